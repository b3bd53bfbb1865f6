"""Argument checks of the ops, the same for real and fake tensors: everything is refused here, before any launch.

A text names the argument, what is accepted and what came: `w2: expected [E=64, H=2048, I=1408], got [64, 1408, 2048]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.config import MAX_EXPERTS, MoEConfig

SCHEDULES = ("auto", "serial", "dual", "dual_shared_main", "fused")
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Sizes = Mapping[str, int | None]
"""Letter -> size of each dim; a size of None is any size, a letter of "" is not shown."""
CUDA_MULTIPLE = 16
"""H, I and S are multiples of this on CUDA."""


class Layer(NamedTuple):
    """The tensors of one call, in the order of the op's schema. Shapes as in `dual_stream_moe`."""

    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    router_weight: Tensor | None
    router_bias: Tensor | None
    correction_bias: Tensor | None
    router_logits: Tensor | None
    topk_ids: Tensor | None
    topk_weights: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    shared_w13: Tensor | None
    shared_w2: Tensor | None
    shared_gate: Tensor | None
    num_valid_tokens: Tensor | None
    expert_map: Tensor | None
    # Tensors of quantised weights (`formats.py`).
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    shared_w13_scale: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
    shared_w13_zero_point: Tensor | None = None
    shared_w2_zero_point: Tensor | None = None
    w13_global_scale: Tensor | None = None
    w2_global_scale: Tensor | None = None
    shared_w13_global_scale: Tensor | None = None
    shared_w2_global_scale: Tensor | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    shared_w13_input_scale: Tensor | None = None
    shared_w2_input_scale: Tensor | None = None


LAYER_FIELDS = Layer._fields
_QUANTISATION = tuple(Layer._field_defaults)


class Dims(NamedTuple):
    """Sizes of one call. T may be symbolic; the others are ints."""

    T: int
    H: int
    E: int  # rows of w13 and w2: the experts of this rank
    K: int
    I: int
    S: int  # 0 without a shared expert
    E_routing: int  # routed experts that the router knows: len(expert_map) where there is one


class Checked:
    """What the checks of a call found, and what a backend worked out for calls with the same metadata.

    Attributes:
        dims, config, schedule: of the call.
        plans: a backend's own, by whatever else its work depends on. It holds no tensor, no buffer and no stream.
    """

    __slots__ = ("config", "dims", "plans", "schedule")

    def __init__(self, dims: Dims, config: MoEConfig, schedule: str) -> None:
        self.dims, self.config, self.schedule = dims, config, schedule
        self.plans: dict[Any, Any] = {}


_CHECKED_CALLS = 4096
"""Kinds of call remembered; the oldest is forgotten first."""

_checked: dict[tuple[Any, ...], Checked] = {}


def checked(tensors: tuple[Tensor | None, ...], key: str, schedule: str) -> Checked:
    """`check_layer` for real tensors, done once for each set of shapes, strides, dtypes and devices.

    Nothing else of a tensor is checked. Sizes of fake tensors may be symbolic, so their checks are made each time.

    Args:
        tensors: the first fields of a `Layer`; the others are None.
        key: of the call's config.
    """
    if schedule not in SCHEDULES:  # as a list, say, it would be no part of a key
        raise ValueError(f"schedule: expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
    kind = (key, schedule, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    found = _checked.get(kind)
    if found is None:
        config = MoEConfig.from_key(key)
        layer = Layer(*tensors)  # type: ignore[arg-type]
        found = Checked(check_layer(layer, config, schedule), config, schedule)
        if len(_checked) >= _CHECKED_CALLS:
            _checked.pop(next(iter(_checked)), None)  # another thread may have taken it
        _checked[kind] = found
    return found


def check_layer(layer: Layer, config: MoEConfig, schedule: str = "auto") -> Dims:
    """Checks every argument of one call and returns its sizes.

    Raises:
        ValueError: the text names the argument, what is accepted and what came.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
    x = layer.hidden_states
    _check_hidden_states(x)
    T, H = flat_tokens(x), x.shape[-1]

    width, last = "2I" if config.gated else "I", _packed("H", H, layer.w13, config.routed_format)
    if layer.w13.dim() != 3:
        raise ValueError(f"w13: expected 3 dims [E, {width}, {last}], got {_shape(layer.w13)}")
    E, rows = layer.w13.shape[:2]
    if config.gated and rows % 2:
        raise ValueError(f"w13: expected an even number of gate and up rows [E, 2I, {last}], got {_shape(layer.w13)}")
    I = rows // 2 if config.gated else rows
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"w13: expected 1..{MAX_EXPERTS} experts, got {_shape(layer.w13)}")
    if I == 0:
        raise ValueError(f"w13: expected at least one row an expert, got {_shape(layer.w13)}")
    _check_weight("w13", layer, config, {"E": E, width: rows, "H": H})
    _check_weight("w2", layer, config, {"E": E, "H": H, "I": I})
    _check("w13_bias", layer.w13_bias, {"E": E, width: rows}, x, (x.dtype, torch.float32))
    _check("w2_bias", layer.w2_bias, {"E": E, "H": H}, x, (x.dtype, torch.float32))

    S = _check_shared(layer, config, H)
    _check("expert_map", layer.expert_map, {"E_global": None}, x, (torch.int32,))
    _check("num_valid_tokens", layer.num_valid_tokens, {"": 1}, x, (torch.int32,))
    E_routing = E if layer.expert_map is None else layer.expert_map.shape[0]
    if not 1 <= E_routing <= MAX_EXPERTS:
        raise ValueError(f"expert_map: expected 1..{MAX_EXPERTS} entries, got {_shape(layer.expert_map)}")
    check_routing(layer, config, T, E_routing)

    if x.device.type == "cuda":
        for name, letter, size in (("hidden_states", "H", H), ("w13", "I", I), ("shared_w13", "S", S)):
            if size % CUDA_MULTIPLE:
                raise ValueError(f"{name}: expected {letter} to be a multiple of {CUDA_MULTIPLE} on CUDA, got {size}")
    if schedule == "fused" and S and config.routed_format != config.shared_format:
        raise ValueError(
            f"schedule: 'fused' expects shared_format to be routed_format={config.routed_format!r}, "
            f"got {config.shared_format!r}"
        )
    if schedule == "fused" and S % I:
        raise ValueError(f"schedule: 'fused' expects S to be a multiple of I, got S={S}, I={I}")
    return Dims(T, H, E, config.top_k, I, S, E_routing)


class Routing(NamedTuple):
    """The part of `Layer` that routes: all that `route` takes."""

    hidden_states: Tensor
    router_weight: Tensor | None
    router_bias: Tensor | None
    correction_bias: Tensor | None
    router_logits: Tensor | None


def check_routing(layer: Layer | Routing, config: MoEConfig, T: int, E_routing: int | None) -> int:
    """Checks the way in and all that belongs to it; returns the number of logits a row, E + Z.

    Args:
        E_routing: routed experts, or None where only the router's own tensors tell (`route`).
    """
    x = layer.hidden_states
    ways = {"router_weight": layer.router_weight, "router_logits": layer.router_logits}
    if isinstance(layer, Layer):
        if (layer.topk_ids is None) != (layer.topk_weights is None):
            missing = "topk_ids" if layer.topk_ids is None else "topk_weights"
            raise ValueError(f"{missing}: expected topk_ids and topk_weights together, got None")
        ways["topk_ids"] = layer.topk_ids
    given = [name for name, tensor in ways.items() if tensor is not None]
    if len(given) != 1:
        text = " and ".join(given) if given else "none of them"
        raise ValueError(f"{', '.join(ways)}: expected exactly one of these ways in, got {text}")
    if layer.router_bias is not None and layer.router_weight is None:
        raise ValueError(f"router_bias: expected None beside {given[0]}, got a tensor")

    E_logits = None if E_routing is None else E_routing + config.num_zero_experts
    if isinstance(layer, Layer) and layer.topk_ids is not None:
        if layer.correction_bias is not None:
            raise ValueError("correction_bias: expected None beside topk_ids, got a tensor")
        assert E_logits is not None
        _check("topk_ids", layer.topk_ids, {"T": T, "K": config.top_k}, x, (torch.int32, torch.int64))
        _check("topk_weights", layer.topk_weights, {"T": T, "K": config.top_k}, x, MODEL_DTYPES)
        return E_logits
    if layer.router_weight is not None:
        _check("router_weight", layer.router_weight, {"E": E_logits, "H": x.shape[-1]}, x, MODEL_DTYPES)
        _check_unit_stride("router_weight", layer.router_weight)
        E_logits = layer.router_weight.shape[0]
        _check("router_bias", layer.router_bias, {"E": E_logits}, x, MODEL_DTYPES)
    else:
        assert layer.router_logits is not None
        _check("router_logits", layer.router_logits, {"T": T, "E": E_logits}, x, MODEL_DTYPES)
        E_logits = layer.router_logits.shape[-1]
    _check("correction_bias", layer.correction_bias, {"E": E_logits}, x, MODEL_DTYPES)
    if not 1 <= E_logits - config.num_zero_experts <= MAX_EXPERTS:
        raise ValueError(f"{given[0]}: expected 1..{MAX_EXPERTS} routed experts, got {E_logits} logits a row")
    check_choice(config, E_logits)
    return E_logits


def check_route(
    hidden_states: Tensor | None,
    router_weight: Tensor | None,
    router_bias: Tensor | None,
    correction_bias: Tensor | None,
    router_logits: Tensor | None,
    *,
    config: MoEConfig,
) -> tuple[int, int, Tensor]:
    """Checks the arguments of `route`; returns T, E + Z and the tensor whose dtype "model" means."""
    x = router_logits if hidden_states is None else hidden_states
    if x is None:
        raise ValueError("hidden_states: expected a tensor, or router_logits in its place, got None")
    if hidden_states is None and router_weight is not None:
        raise ValueError("hidden_states: expected a tensor beside router_weight, got None")
    _check_hidden_states(x)
    T = flat_tokens(x)
    layer = Routing(x, router_weight, router_bias, correction_bias, router_logits)
    return T, check_routing(layer, config, T, None), x


def check_finalize(
    y: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor,
    shared: Tensor | None,
    hidden_states: Tensor | None,
    *,
    config: MoEConfig,
) -> None:
    """Checks the pieces that `finalize` adds up."""
    _check_dtype("y", y, MODEL_DTYPES)
    if y.dim() != 2:
        raise ValueError(f"y: expected 2 dims [N, H], got {_shape(y)}")
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: expected 2 dims [T, K={config.top_k}], got {_shape(topk_ids)}")
    T, H = topk_ids.shape[0], y.shape[1]
    _check("topk_ids", topk_ids, {"T": T, "K": config.top_k}, y, (torch.int32,))
    _check("topk_weights", topk_weights, {"T": T, "K": config.top_k}, y, (torch.float32,))
    _check("row_of", row_of, {"T": T, "K": config.top_k}, y, (torch.int32,))
    _check("y", y, {"N": T * config.top_k, "H": H}, y, MODEL_DTYPES)
    _check("shared", shared, {"T": T, "H": H}, y, (y.dtype,))
    if hidden_states is None:
        if config.num_zero_experts:
            raise ValueError("hidden_states: expected a tensor, since the config has zero experts, got None")
        return
    if hidden_states.dim() < 1:
        raise ValueError(f"hidden_states: expected [..., H={H}], got {_shape(hidden_states)}")
    _check_dtype("hidden_states", hidden_states, (y.dtype,))
    _check_device("hidden_states", hidden_states, y)
    _same("hidden_states", hidden_states, flat_tokens(hidden_states), T, {"T": T, "H": H})
    _same("hidden_states", hidden_states, hidden_states.shape[-1], H, {"T": T, "H": H})


def flat_tokens(x: Tensor) -> int:
    """T: the product of all dims but the last."""
    T = 1
    for size in x.shape[:-1]:
        T = T * size
    return T


def _check_hidden_states(x: Tensor) -> None:
    _check_dtype("hidden_states", x, MODEL_DTYPES)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"hidden_states: expected [..., H] with H at least 1, got {_shape(x)}")


def _check_shared(layer: Layer, config: MoEConfig, H: int) -> int:
    x = layer.hidden_states
    if (layer.shared_w13 is None) != (layer.shared_w2 is None):
        missing = "shared_w13" if layer.shared_w13 is None else "shared_w2"
        raise ValueError(f"{missing}: expected shared_w13 and shared_w2 together, got None")
    if layer.shared_w13 is None or layer.shared_w2 is None:
        for name in ("shared_gate", *(n for n in _QUANTISATION if n.startswith("shared_"))):
            if getattr(layer, name) is not None:
                raise ValueError(f"{name}: expected None without shared_w13, got a tensor")
        return 0
    rows = layer.shared_w13.shape[0] if layer.shared_w13.dim() else 0
    width = "2S" if config.gated else "S"
    if layer.shared_w13.dim() != 2 or rows == 0 or (config.gated and rows % 2):
        last = _packed("H", H, layer.shared_w13, config.shared_format)
        raise ValueError(f"shared_w13: expected [{width}, {last}] with {width} above 0, got {_shape(layer.shared_w13)}")
    S = rows // 2 if config.gated else rows
    _check_weight("shared_w13", layer, config, {width: rows, "H": H})
    _check_weight("shared_w2", layer, config, {"H": H, "S": S})
    _check("shared_gate", layer.shared_gate, {"": 1, "H": H}, x, (x.dtype, torch.float32))
    return S


def check_choice(config: MoEConfig, E_logits: int) -> None:
    """Checks that the config can choose among E + Z logits a row."""
    if config.top_k > E_logits:
        raise ValueError(f"top_k: expected at most the {E_logits} experts that the router knows, got {config.top_k}")
    if config.n_group is None or config.topk_group is None:
        return
    if E_logits % config.n_group:
        raise ValueError(f"n_group: expected a divisor of the {E_logits} experts, got {config.n_group}")
    members = E_logits // config.n_group
    if config.group_score == "top2_sum" and members < 2:
        raise ValueError(
            f"n_group: expected groups of at least 2 experts for 'top2_sum', got {config.n_group} of {E_logits}"
        )
    if config.top_k > config.topk_group * members:
        raise ValueError(
            f"top_k: expected at most the {config.topk_group * members} experts of "
            f"topk_group={config.topk_group} groups, got {config.top_k}"
        )


def _check_weight(name: str, layer: Layer, config: MoEConfig, dims: Sizes) -> None:
    """A weight, in the dtype of hidden_states or in its format, and the tensors that belong to it."""
    x, tensor, format_name = layer.hidden_states, getattr(layer, name), config.format_of(name)
    field = "shared_format" if name.startswith("shared_") else "routed_format"
    extras = {suffix: getattr(layer, name + suffix) for suffix in formats.SUFFIXES[1:]}
    if format_name is None:
        if tensor.dtype not in MODEL_DTYPES:
            accepted = f"{_dtypes((x.dtype,))} as hidden_states has, or a {field} that tells what it is"
            raise ValueError(f"{name}: expected {accepted}, got {_dtypes((tensor.dtype,))}")
        _check(name, tensor, dims, x, (x.dtype,))
        _check_unit_stride(name, tensor)
        wanted: set[str] = set()
    else:
        wanted = _check_quantised(name, tensor, extras, format_name, config, dims, x)
    for suffix, extra in extras.items():
        if extra is not None and suffix not in wanted:
            raise ValueError(f"{name}{suffix}: expected None with {field}={format_name!r}, got a tensor")


def _check_quantised(
    name: str, tensor: Tensor, extras: Mapping[str, Tensor | None], format_name: str, config: MoEConfig, dims: Sizes,
    x: Tensor,
) -> set[str]:  # fmt: skip
    """Checks all tensors of one quantised weight; returns the suffixes of those that may be there."""
    format = formats.FORMATS[format_name]
    *others, (letter, _) = dims.items()
    *experts, rows, columns = [int(size or 0) for size in dims.values()]  # constants, since they are of weights
    _check_dtype(name, tensor, format.dtypes)
    n = formats.numbers(format, tensor.dtype)
    if columns % n:
        raise ValueError(f"{name}: expected {letter} to be a multiple of {n} for its dtype, got {columns}")
    _check(name, tensor, {**dict(others), letter if n == 1 else f"{letter}/{n}": columns // n}, x, format.dtypes)
    options: dict[str, Any] = {"halves": config.halves(name), "interleaved": config.interleaves(name)}

    def check(suffix: str, dtypes: tuple[torch.dtype, ...], shapes: list[tuple[int, ...]], *, needed: bool) -> None:
        t = extras[suffix]
        if t is None:
            if needed:
                raise ValueError(f"{name}{suffix}: expected a tensor for the format {format_name!r}, got None")
            return
        _check_dtype(name + suffix, t, dtypes)
        _check_device(name + suffix, t, x)
        if tuple(t.shape) not in shapes:
            accepted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name}{suffix}: expected {accepted}, got {_shape(t)}")
        _check_contiguous(name + suffix, t)

    def with_experts(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(*experts, *shape) for shape in shapes]

    _check_contiguous(name, tensor)
    scales = with_experts(formats.scale_shapes(format_name, rows, columns, **options))
    check("_scale", format.scale_dtypes, scales, needed=True)
    wanted = {"_scale"}
    if format.may_have_zero_point:
        wanted.add("_zero_point")
        scale, points, dtype = extras["_scale"], extras["_zero_point"], tensor.dtype
        assert scale is not None
        packed = -(-rows // formats.numbers(format, dtype if points is None else points.dtype))
        check("_zero_point", format.dtypes, with_experts([(packed, scale.shape[-1])]), needed=False)
    if format.has_global_scale:
        wanted.add("_global_scale")
        shapes = with_experts(formats.per_tensor_shapes(options["halves"]))
        check("_global_scale", (torch.float32,), shapes, needed=True)
    if format.activations == "tensor":
        wanted.add("_input_scale")
        shapes = [(*experts,), (1,), ()] if experts else [(1,), ()]
        check("_input_scale", (torch.float32,), shapes, needed=True)
    return wanted


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")


def _check_unit_stride(name: str, tensor: Tensor) -> None:
    if not any(tensor.stride(d) == 1 or tensor.shape[d] == 1 for d in (-2, -1)):
        raise ValueError(
            f"{name}: expected a unit stride in one of the last two dims (repack with .contiguous()), "
            f"got strides {list(tensor.stride())}"
        )


def _check(name: str, tensor: Tensor | None, dims: Sizes, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Dtype, device and shape of an optional tensor."""
    if tensor is None:
        return
    _check_dtype(name, tensor, dtypes)
    _check_device(name, tensor, x)
    if tensor.dim() != len(dims):
        raise ValueError(_shape_text(name, tensor, dims))
    for got, size in zip(tensor.shape, dims.values(), strict=True):
        if size is not None:
            _same(name, tensor, got, size, dims)


def _same(name: str, tensor: Tensor, got: int, size: int, dims: Sizes) -> None:
    if isinstance(got, int) and isinstance(size, int):
        if got != size:
            raise ValueError(_shape_text(name, tensor, dims))
    else:  # a symbolic T: without a guard where its value is unknown
        torch._check_value(got == size, lambda: _shape_text(name, tensor, dims))


def _shape_text(name: str, tensor: Tensor, dims: Sizes) -> str:
    accepted = ", ".join(_dim(letter, size) for letter, size in dims.items())
    return f"{name}: expected [{accepted}], got {_shape(tensor)}"


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {_dtypes(dtypes)}, got {_dtypes((tensor.dtype,))}")


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected device {x.device}, got {tensor.device}")


def _packed(letter: str, size: int, tensor: Tensor, format_name: str | None) -> str:
    """The last dim of a weight, as the texts have it: in elements, each of which may hold several numbers."""
    format = formats.FORMATS.get(format_name or "")
    n = formats.numbers(format, tensor.dtype) if format and tensor.dtype in format.dtypes else 1
    return _dim(letter if n == 1 else f"{letter}/{n}", size // n)


def _dim(letter: str, size: int | None) -> str:
    if size is None:
        return letter
    return f"{letter}={size}" if letter else f"{size}"


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))


def _shape(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str(list(tensor.shape))
