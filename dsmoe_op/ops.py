"""The ops: their schemas, registration, fakes, and the public calls.

Everything about registration is here, once. The kernels behind the ops are `cpu.py` and `cuda.py`, imported at the
first real call. Rules that the registration keeps, each with a test that shows the failure it prevents:

- Python kernels are hidden from Dynamo (`_hide_from_dynamo`), or it compiles their bodies where it skipped the frame
  above.
- An op's name carries a version, raised when outputs or their meaning change: compile caches on disk do not notice a
  changed fake.
- The fake makes the same checks as the real kernel and has one `new_empty` an output, without a branch on T.
- Outputs never alias inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import checks
from dsmoe_op.checks import LAYER_FIELDS, Layer
from dsmoe_op.config import MoEConfig

_lib = torch.library.Library("dsmoe", "DEF")

_COUNT = 16
_TENSORS, _SCALES = LAYER_FIELDS[:_COUNT], LAYER_FIELDS[_COUNT:]
_REQUIRED = ("hidden_states", "w13", "w2")
_LAYER_SCHEMA = ", ".join(
    [*(f"Tensor {n}" if n in _REQUIRED else f"Tensor? {n}" for n in _TENSORS)]
    + ["str config", "str schedule"]
    + [f"Tensor? {n}=None" for n in _SCALES]
)
_ROUTE_SCHEMA = (
    "Tensor? hidden_states, Tensor? router_weight, Tensor? router_bias, Tensor? correction_bias, "
    "Tensor? router_logits, str config"
)
_FINALIZE_SCHEMA = (
    "Tensor y, Tensor topk_ids, Tensor topk_weights, Tensor row_of, Tensor? shared, Tensor? hidden_states, str config"
)


class Unfinalized(NamedTuple):
    """A layer without its last sum: what `finalize` takes.

    Attributes:
        y: [N, H], N = T * K: rows of the experts, sorted by expert; zeros after the last row that is an expert's.
        topk_ids: int32 [T, K]; -1 where a slot contributes nothing.
        topk_weights: float32 [T, K]; 0 where a slot contributes nothing.
        row_of: int32 [T, K]: the row of y, or -1 where there is none.
        shared: [T, H], gated already, or None without a shared expert.
    """

    y: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    row_of: Tensor
    shared: Tensor | None


# --- public calls ---------------------------------------------------------------------------------------------------


def dual_stream_moe(
    hidden_states: Tensor,
    *,
    config: MoEConfig,
    w13: Tensor,
    w2: Tensor,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    schedule: str = "auto",
    **scales: Tensor | None,
) -> Tensor:
    """One MoE layer: router, K of E routed experts a token, beside them on a second stream the shared expert, the sum.

    T tokens, H hidden size, E experts, K = config.top_k, I and S routed and shared widths, Z = config.num_zero_experts.
    Exactly one way in: router_weight; router_logits; or topk_ids with topk_weights. No input is written.

    Args:
        hidden_states: [..., H], bfloat16, float16 or float32, any strides; T is the product of the leading dims.
        config: the layer's knobs.
        w13: [E, 2I, H] in the dtype of hidden_states ([E, I, H] for a non-gated activation); a unit stride in one of
            the last two dims. Order of its rows: config.w13_order.
        w2: [E, H, I], likewise.
        router_weight: [E+Z, H], bfloat16, float16 or float32. The router's matmul is then the op's own.
        router_bias: [E+Z], added to the logits.
        correction_bias: [E+Z], float32 in released models; added for the choice only.
        router_logits: [T, E+Z]: the op starts at the scores.
        topk_ids, topk_weights: int32 or int64 [T, K] and float [T, K]: routing is done and the weights are final. An id
            outside 0..E+Z-1 contributes nothing.
        w13_bias, w2_bias: [E, 2I] and [E, H].
        shared_w13, shared_w2: [2S, H], gate rows first, and [H, S].
        shared_gate: [1, H]; the shared output is multiplied by sigmoid(x . shared_gate).
        num_valid_tokens: int32 [1] on the device; rows from there on come out as zeros.
        expert_map: int32 [E_global]: global expert id -> row of w13 and w2, or -1. The E of router_weight, router_bias,
            correction_bias, router_logits and of ids is then E_global.
        schedule: "auto" (the library's choice), "serial", "dual" (shared expert on the alt_stream, the side stream of
            `dsmoe_op.streams`), "dual_shared_main" (routed experts on the alt_stream), "fused" (shared expert as one
            more routed slot; S a multiple of I, in one format). Without a shared expert each means "serial". The bits
            are the same in all but "fused".
        scales: of quantised weights, whose format config.routed_format or config.shared_format names: what belongs to
            w13 as w13_scale, w13_zero_point, w13_global_scale, w13_input_scale, and to w2, shared_w13 and shared_w2
            likewise. `dsmoe_op.formats` has the shapes; the weights are then as a format packs them.

    Returns:
        A fresh contiguous tensor like hidden_states.

    Raises:
        ValueError: bad arguments, before anything is launched. While torch.compile traces, its error has the same text.
        TypeError: an argument of another name.
    """
    tensors = (
        hidden_states,
        w13,
        w2,
        router_weight,
        router_bias,
        correction_bias,
        router_logits,
        topk_ids,
        topk_weights,
        w13_bias,
        w2_bias,
        shared_w13,
        shared_w2,
        shared_gate,
        num_valid_tokens,
        expert_map,
    )
    given = _with_scales("dual_stream_moe", tensors, scales)
    return _call(torch.ops.dsmoe.moe_v1.default, *given[:_COUNT], _key(config), schedule, *given[_COUNT:])


def dual_stream_moe_unfinalized(
    hidden_states: Tensor,
    *,
    config: MoEConfig,
    w13: Tensor,
    w2: Tensor,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    schedule: str = "auto",
    **scales: Tensor | None,
) -> Unfinalized:
    """`dual_stream_moe` without its last sum, for callers that fuse or delay it: `finalize` gives the same bits.

    Arguments and errors as in `dual_stream_moe`.
    """
    tensors = (
        hidden_states,
        w13,
        w2,
        router_weight,
        router_bias,
        correction_bias,
        router_logits,
        topk_ids,
        topk_weights,
        w13_bias,
        w2_bias,
        shared_w13,
        shared_w2,
        shared_gate,
        num_valid_tokens,
        expert_map,
    )
    given = _with_scales("dual_stream_moe_unfinalized", tensors, scales)
    op = torch.ops.dsmoe.moe_unfinalized_v1.default
    pieces = _call(op, *given[:_COUNT], _key(config), schedule, *given[_COUNT:])
    y, topk_ids, topk_weights, row_of, shared = pieces
    return Unfinalized(y, topk_ids, topk_weights, row_of, None if shared_w13 is None else shared)


def prepare(
    hidden_states: Tensor, *, config: MoEConfig, schedule: str = "auto", **tensors: Tensor | None
) -> float | None:
    """Compiles and loads all that `dual_stream_moe` needs for such a layer, at any T, and launches none of it.

    A layer's first call does the same, so this is for where that must not take seconds. Layers that differ in their
    weights' values alone need it once. On the CPU there is nothing to do.

    Args:
        hidden_states: [..., H] of at least one token; its values do not matter, and neither do those of the others.
        config, schedule: as in `dual_stream_moe`.
        tensors: the other tensors of `dual_stream_moe`, by name.

    Returns:
        Seconds taken, or None on the CPU.

    Raises:
        ValueError: what `dual_stream_moe` would refuse; hidden_states has no token.
        TypeError: a name that `dual_stream_moe` does not have.
    """
    scales = {name: tensors.pop(name) for name in list(tensors) if name not in _TENSORS[1:]}
    given = _with_scales("prepare", (hidden_states, *(tensors.get(name) for name in _TENSORS[1:])), scales)
    call = checks.checked(given, _key(config), schedule)
    if not call.dims.T:
        raise ValueError(f"hidden_states: expected at least one token, got {list(hidden_states.shape)}")
    if hidden_states.device.type != "cuda":
        return None
    start = time.perf_counter()
    _backend(hidden_states).prepare(Layer(*given), call)  # type: ignore[arg-type]
    return time.perf_counter() - start


def finalize(pieces: Unfinalized, *, config: MoEConfig, hidden_states: Tensor | None = None) -> Tensor:
    """The last sum of a layer: round_once(sum_k w * y + shared), in float32 and ascending k.

    Args:
        pieces: what `dual_stream_moe_unfinalized` returned.
        config: the same config.
        hidden_states: [..., H], needed for zero experts alone; where given, the result has its shape.

    Returns:
        A fresh contiguous [T, H] (or the shape of hidden_states) in the dtype of pieces.y.

    Raises:
        ValueError: bad arguments, before anything is launched.
    """
    y, topk_ids, topk_weights, row_of, shared = pieces
    for name, tensor in zip(Unfinalized._fields[:4], pieces[:4], strict=True):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return torch.ops.dsmoe.finalize_v1.default(y, topk_ids, topk_weights, row_of, shared, hidden_states, _key(config))


def route(
    hidden_states: Tensor | None = None,
    *,
    config: MoEConfig,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The routing of a layer alone, from router_weight or from router_logits.

    Args:
        hidden_states: [..., H]; may be left out beside router_logits, whose dtype is then the model's.
        config, router_weight, router_bias, correction_bias, router_logits: as in `dual_stream_moe`.

    Returns:
        topk_ids int32 [T, K], best first and equal values by ascending id, and topk_weights float32 [T, K].

    Raises:
        ValueError: bad arguments, before anything is launched.
    """
    if hidden_states is None and router_logits is None:  # there may be no tensor at all for the dispatcher to go by
        checks.check_route(None, router_weight, router_bias, correction_bias, None, config=config)
    return torch.ops.dsmoe.route_v1.default(
        hidden_states, router_weight, router_bias, correction_bias, router_logits, _key(config)
    )


def _with_scales(call: str, tensors: tuple[Any, ...], scales: dict[str, Any]) -> tuple[Any, ...]:
    """The tensors of a call in the order of `Layer`: without those of quantised weights where there are none.

    It refuses what the dispatcher would refuse in words of its own.
    """
    if scales:
        unknown = sorted(set(scales) - set(_SCALES))
        if unknown:
            raise TypeError(f"{call}: expected the tensors of dual_stream_moe, got also {', '.join(unknown)}")
        if any(scale is not None for scale in scales.values()):
            tensors += tuple(scales.get(name) for name in _SCALES)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) and (tensor is not None or LAYER_FIELDS[i] in _REQUIRED):
            raise ValueError(f"{LAYER_FIELDS[i]}: expected a tensor, got {type(tensor).__name__}")
    return tensors


def _call(op: Any, *args: Any) -> Any:
    """op(*args), past the op's Python kernel for autograd where that would only pass the call on."""
    if (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in args if isinstance(t, Tensor)))
    ):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _key(config: MoEConfig) -> str:
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config: expected a MoEConfig, got {type(config).__name__}")
    return config.key


# --- real kernels ---------------------------------------------------------------------------------------------------


def _backend(x: Tensor) -> ModuleType:
    """The module with the kernels for x's device; `cuda` alone imports triton."""
    if x.device.type == "cuda":
        from dsmoe_op import cuda

        return cuda
    from dsmoe_op import cpu

    return cpu


def _tensors(args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The tensors among an op's arguments, which come without the last ones that have their defaults."""
    return args[:_COUNT] + args[_COUNT + 2 :]


def _split(args: tuple[Any, ...]) -> tuple[Layer, MoEConfig, str]:
    key, schedule = args[_COUNT : _COUNT + 2]
    return Layer(*_tensors(args)), MoEConfig.from_key(key), schedule  # type: ignore[arg-type]


def _checked(args: tuple[Any, ...]) -> tuple[Layer, checks.Checked]:
    tensors = _tensors(args)
    call = checks.checked(tensors, args[_COUNT], args[_COUNT + 1])
    return Layer(*tensors), call  # type: ignore[arg-type]


def _moe(*args: Any) -> Tensor:
    layer, call = _checked(args)
    return _backend(layer.hidden_states).moe(layer, call)


def _moe_unfinalized(*args: Any) -> tuple[Tensor, ...]:
    layer, call = _checked(args)
    return _backend(layer.hidden_states).moe_unfinalized(layer, call)


def _finalize(*args: Any) -> Tensor:
    config = MoEConfig.from_key(args[-1])
    checks.check_finalize(*args[:-1], config=config)
    return _backend(args[0]).finalize(*args[:-1], config)


def _route(*args: Any) -> tuple[Tensor, Tensor]:
    config = MoEConfig.from_key(args[-1])
    T, num_logits, x = checks.check_route(*args[:-1], config=config)
    return _backend(x).route(checks.Routing(x, *args[1:-1]), T, num_logits, config)


def _no_backward(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"dsmoe::{name} has no backward. Call it under torch.no_grad() or torch.inference_mode(), or detach its inputs."
    )


def _backward(grads: list[Tensor], inputs: list[Tensor], name: str) -> list[Tensor]:
    raise _no_backward(name)


# --- fakes ----------------------------------------------------------------------------------------------------------


def _moe_fake(*args: Any) -> Tensor:
    layer, config, schedule = _split(args)
    checks.check_layer(layer, config, schedule)
    return layer.hidden_states.new_empty(layer.hidden_states.shape)


def _moe_unfinalized_fake(*args: Any) -> tuple[Tensor, ...]:
    layer, config, schedule = _split(args)
    dims = checks.check_layer(layer, config, schedule)
    x, slots = layer.hidden_states, (dims.T, dims.K)
    return (
        x.new_empty((dims.T * dims.K, dims.H)),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty(slots, dtype=torch.float32),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty((dims.T if dims.S else 0, dims.H)),
    )


def _finalize_fake(*args: Any) -> Tensor:
    checks.check_finalize(*args[:-1], config=MoEConfig.from_key(args[-1]))
    y, topk_ids, hidden_states = args[0], args[1], args[5]
    return y.new_empty((topk_ids.shape[0], y.shape[1]) if hidden_states is None else hidden_states.shape)


def _route_fake(*args: Any) -> tuple[Tensor, Tensor]:
    config = MoEConfig.from_key(args[-1])
    T, _, x = checks.check_route(*args[:-1], config=config)
    slots = (T, config.top_k)
    return x.new_empty(slots, dtype=torch.int32), x.new_empty(slots, dtype=torch.float32)


def _backward_fake(grads: list[Tensor], inputs: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(t) for t in inputs]


# --- registration ---------------------------------------------------------------------------------------------------


def _hide_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn for the dispatcher, with Dynamo off in its frame and in all that it calls.

    This is torch.compiler.disable without its import of Dynamo, which takes many times as long as that of this package:
    the entry's code object is marked from the start as one to skip, with all that runs below it.
    """
    dynamo = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        strategy = dynamo._FrameExecStrategy(skip, skip)
        set_strategy = dynamo.set_code_exec_strategy
    except AttributeError:
        return torch.compiler.disable(fn)

    def entry(*args: Any) -> Any:
        return fn(*args)

    set_strategy(entry.__code__, strategy)
    return entry


class _NoBackward(torch.autograd.Function):
    """Runs an op below autograd; its backward is the opaque op that refuses, so that a compiler can trace it."""

    @staticmethod
    def forward(ctx: Any, op: Any, name: str, *args: Any) -> Any:
        ctx.name = name
        ctx.wanted = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        ctx.count = len(args)
        ctx.save_for_backward(*(args[i] for i in ctx.wanted))
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*args)
        if isinstance(out, tuple):
            ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        wanted = torch.ops.dsmoe.moe_backward_v1.default(given, list(ctx.saved_tensors), ctx.name)
        out: list[Tensor | None] = [None] * ctx.count
        for i, grad in zip(ctx.wanted, wanted, strict=True):
            out[i] = grad
        return None, None, *out


def _autograd_of(op: Any, name: str) -> Callable[..., Any]:
    def autograd(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if torch.autograd.forward_ad._current_level >= 0:
            for t in tensors:
                if torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
                    raise NotImplementedError(f"dsmoe::{name} has no forward-mode derivative")
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            if torch._C._are_functorch_transforms_active():  # torch.func.grad and its like take no such Function
                raise _no_backward(name)
            return _NoBackward.apply(op, name, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return autograd


def _vmap_refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError(
            f"dsmoe::{name} does not run under vmap. hidden_states may have any leading dims: pass the batch as one."
        )

    return refuse


def _register(
    name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any], *, forward: bool = True
) -> None:
    _lib.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        _lib.impl(name, _hide_from_dynamo(real), key)
    torch.library.register_fake(f"dsmoe::{name}", fake, lib=_lib)
    _lib.impl(name, _vmap_refusal(name), "FuncTorchBatched")
    if forward:
        op = getattr(torch.ops.dsmoe, name).default
        _lib.impl(name, _hide_from_dynamo(_autograd_of(op, name)), "Autograd")


_register("moe_v1", f"({_LAYER_SCHEMA}) -> Tensor", _moe, _moe_fake)
_register(
    "moe_unfinalized_v1",
    f"({_LAYER_SCHEMA}) -> (Tensor y, Tensor topk_ids, Tensor topk_weights, Tensor row_of, Tensor shared)",
    _moe_unfinalized,
    _moe_unfinalized_fake,
)
_register("finalize_v1", f"({_FINALIZE_SCHEMA}) -> Tensor", _finalize, _finalize_fake)
_register("route_v1", f"({_ROUTE_SCHEMA}) -> (Tensor topk_ids, Tensor topk_weights)", _route, _route_fake)
_register(
    "moe_backward_v1",
    "(Tensor[] grads, Tensor[] inputs, str name) -> Tensor[]",
    _backward,
    _backward_fake,
    forward=False,
)
