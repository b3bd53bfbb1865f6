"""Reads one MoE block of a released checkpoint into the op's tensors.

A checkpoint names its linear layers and their tensors by one of a few conventions. What a weight's format is follows
from the names, dtypes and shapes alone; no config file is read. What the formats mean is in `formats.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.checks import MODEL_DTYPES
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FormatName

Device = torch.device | str | None

_LINEARS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PARTS = {
    "weight": "q",
    "weight_packed": "q",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",  # for all its name, w = q * scale
    "scale": "scale",
    "weight_zero_point": "zero_point",
    "weight_scale_2": "global_scale",
    "weight_global_scale": "global_scale",  # this one divides
    "input_scale": "input_scale",
    "activation_scale": "input_scale",
    "input_global_scale": "input_global_scale",
    "weight_shape": "shape",
    "weight_g_idx": "g_idx",
    "bias": "bias",
}
"""What follows a linear layer's name, and what that is."""
_FUSED_LINEARS = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}
_FUSED_PARTS = {
    "": "q",
    "_blocks": "q",
    "_scale_inv": "scale",
    "_scales": "scale",
    "_activation_scale": "input_scale",
    "_bias": "bias",
}
"""The same where one tensor has all experts."""
_ROUTER = {
    "gate.weight": "router_weight",
    "router.weight": "router_weight",
    "router.bias": "router_bias",
    "gate.e_score_correction_bias": "correction_bias",
    "e_score_correction_bias": "correction_bias",
    "shared_expert_gate.weight": "shared_gate",
}
_NATIVE_CORRECTION_BIAS = "gate.bias"
"""Of DeepSeek's own names; elsewhere it could be the router's bias."""


def _any_of(names: Iterable[str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


_ONE_EXPERT = re.compile(rf"(experts\.\d+|shared_experts?|shared_mlp)\.({_any_of(_LINEARS)})\.({_any_of(_PARTS)})")
_ALL_EXPERTS = re.compile(rf"(experts)\.({_any_of(_FUSED_LINEARS)})({_any_of(_FUSED_PARTS)})")


def load_block(
    state_dict: Mapping[str, Tensor],
    prefix: str = "",
    *,
    config: MoEConfig,
    device: Device = None,
    consume: bool = False,
) -> tuple[MoEConfig, dict[str, Tensor]]:
    """The tensors of one MoE block of a checkpoint, as those of `dual_stream_moe`.

    After `config, tensors = load_block(...)`, `dual_stream_moe(x, config=config, **tensors)` computes the block.

    A linear layer of R rows and K columns may be, told from its tensors:

    - fp8_block: `weight` float8_e4m3fn with `weight_scale_inv` (or `weight_scale`, or `scale`), one for each 128 x 128;
    - fp8_channel: the same with `weight_scale` [R, 1] or [R]; or with one scale for all and no static `input_scale`.
      Nothing tells where only weights were to be quantised: the op quantises the rows of x too;
    - fp8_tensor: the same with one scale for all and `input_scale` (or `activation_scale`);
    - int4 of compressed-tensors: `weight_packed` int32 [R, K / 8], `weight_scale` [R, K / 32, 64 or 128], maybe
      `weight_zero_point` [R / 8, ...]; a `weight_g_idx` that reorders columns is refused;
    - nvfp4: `weight_packed` and `weight_global_scale` of compressed-tensors, which divides, or `weight` and
      `weight_scale_2` of ModelOpt, which multiplies, with `weight_scale` float8_e4m3fn [R, K / 16]. Scales of
      activations (`input_global_scale`, `input_scale`) are left out: the op quantises weights alone;
    - mxfp4: `weight` or `weight_packed` uint8 or int8 with scales of powers of two [R, K / 32], uint8 or e8m0;
    - not quantised.

    Routed experts are `experts.0.gate_proj.`, `up_proj.`, `down_proj.` (or `w1.`, `w3.`, `w2.`) and so on. Or a tensor
    has all of them: `experts.gate_up_proj`, `gate_up_proj_scale_inv`, `down_proj`, ... as transformers holds fp8, mxfp4
    and weights that are not quantised, or `experts.gate_up_proj_blocks`, `_scales`, `_bias`, `down_proj_blocks`, ... of
    gpt-oss: mxfp4 whose gate and up rows alternate. The shared expert is `shared_experts.`, `shared_expert.` or
    `shared_mlp.`, in a format of its own. Beside them are taken `gate.weight` or `router.weight`; `router.bias`;
    `e_score_correction_bias` or `gate.e_score_correction_bias`, or beside w1, w3 and w2 `gate.bias`; and
    `shared_expert_gate.weight`.

    Gate and up rows keep the scales that they have. Of two static scales of their input the op gets the larger. Scales
    of a float dtype that a format does not take become float32.

    Memory: a tensor that has all experts is kept as it is. Those of single experts, and the shared expert's gate and up
    weights, are copied once into new storage, so there are two copies until `state_dict` lets go of its own.

    Args:
        state_dict: key -> tensor; safetensors.torch.load_file gives one. A lazy mapping is read twice.
        prefix: of the block's keys, such as "model.layers.3.mlp"; a dot after it may be left out. Other keys are not
            looked at.
        config: the block's knobs. Its routed_format, shared_format and w13_order do not count.
        device: of the result; None leaves tensors where they are.
        consume: take each tensor out of `state_dict`, a dict, once it is copied. If nothing else holds it, host memory
            peaks at one copy and one expert's weight, since new storage takes up what has been written of it; that of a
            device which held `state_dict` at one copy and w13.

    Returns:
        The config with routed_format, shared_format and w13_order as the tensors are, and the tensors by argument name.

    Raises:
        ValueError: a key that is unknown or missing; a layout, or a mix of them, that the op does not take. The text
            names the key. Nothing has been copied or taken out then.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict: expected a mapping from keys to tensors, got {type(state_dict).__name__}")
    prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    if consume and not isinstance(state_dict, MutableMapping):
        raise ValueError(f"consume: expected False unless state_dict is a dict, got a {type(state_dict).__name__}")
    router, weights = _find(state_dict, prefix, config)
    for key in router.values():
        if state_dict[key].dtype not in MODEL_DTYPES:
            raise ValueError(f"{key}: expected {_dtypes(*MODEL_DTYPES)}, got {_dtypes(state_dict[key].dtype)}")
    found = {name: _check_linears(linears, state_dict) for name, linears in weights.items()}
    _check_sizes(weights, found)
    if "router_weight" in router:
        first = weights["w13"][0][0]
        E = found["w13"].tensors[""].shape[0] if first.has_experts else len(weights["w13"])
        key, rows = router["router_weight"], E + config.num_zero_experts
        if state_dict[key].shape[:1] != (rows,):
            raise ValueError(f"{key}: expected {rows} rows for so many experts, got {list(state_dict[key].shape)}")
    config = dataclasses.replace(
        config,
        routed_format=found["w13"].format,
        shared_format=found["shared_w13"].format if "shared_w13" in found else None,
        w13_order="interleaved" if weights["w13"][0][0].is_interleaved else "gate_up",
    )
    tensors: dict[str, Tensor] = {}
    for name, linears in weights.items():
        its = _take(linears, state_dict, device, consume, is_shared=name.startswith("shared_"))
        tensors |= {name + suffix: t for suffix, t in its.items()}
    for argument, key in router.items():
        tensors[argument] = _moved(state_dict[key], device)
        _let_go(state_dict, [key], consume)
    return config, tensors


# --- keys -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A linear layer of the checkpoint, of one expert or of all.

    Attributes:
        name: what its keys begin with.
        has_experts: whether its tensors have a first dim of experts.
        halves: 2 where it has gate and up rows.
        keys: of its tensors, by the values of `_PARTS`.
    """

    name: str
    has_experts: bool = False
    halves: int = 1
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_interleaved(self) -> bool:
        return self.halves == 2 and self.keys.get("q", "").endswith("_blocks")

    def key(self, part: str) -> str:
        """Of a part that may be missing."""
        return self.keys.get(part, self.name)


_Linears = list[list[_Linear]]
"""Of one weight of the op: for each expert one, or gate and up; or the one that has all experts."""


def _find(
    state_dict: Mapping[str, Tensor], prefix: str, config: MoEConfig
) -> tuple[dict[str, str], dict[str, _Linears]]:
    """Keys of the router's arguments and the linear layers of the weights, by argument name."""
    router: dict[str, str] = {}
    # "experts.0", "experts.1", ... or "experts" for all, and "shared_experts" -> gate, up, down.
    owners: dict[str, dict[str, _Linear]] = {}
    unknown = []
    is_native = False
    for key in state_dict:
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        if rest in _ROUTER:
            _put(router, _ROUTER[rest], key)
        elif match := _ONE_EXPERT.fullmatch(rest):
            owner, name, part = match.groups()
            is_native |= name == "w1"
            its = owners.setdefault(owner, {}).setdefault(_LINEARS[name], _Linear(f"{prefix}{owner}.{name}"))
            _put(its.keys, _PARTS[part], key)
        elif match := _ALL_EXPERTS.fullmatch(rest):
            owner, name, part = match.groups()
            fused = _Linear(f"{prefix}{owner}.{name}", True, 2 if name == "gate_up_proj" else 1)
            its = owners.setdefault(owner, {}).setdefault(_FUSED_LINEARS[name], fused)
            _put(its.keys, _FUSED_PARTS[part], key)
        else:
            unknown.append(key)
    native_bias = prefix + _NATIVE_CORRECTION_BIAS
    if is_native and native_bias in unknown:
        unknown.remove(native_bias)
        _put(router, "correction_bias", native_bias)
    if unknown:
        raise ValueError(f"{unknown[0]}: expected keys of a MoE block under {prefix!r}, got this unknown one")

    routed = [owner for owner in owners if owner.startswith("experts")]
    shared = [owner for owner in owners if owner not in routed]
    if not routed:
        raise ValueError(f"{prefix}experts: expected the tensors of experts, got none")
    for names in (sorted(routed), shared):  # "experts" comes first
        if len(names) > 1 and (names is shared or names[0] == "experts"):
            one, other = (next(iter(owners[name].values())).name for name in names[:2])
            raise ValueError(f"{one}: expected one of the two, got {other} too")
    w13 = ["gate", "up"] if config.gated else ["up"]
    if routed == ["experts"]:
        weights = _weights("", owners, routed, ["gate_up"] if config.gated else ["up"], prefix)
    else:
        weights = _weights("", owners, [f"experts.{e}" for e in range(len(routed))], w13, prefix)
    return router, weights | (_weights("shared_", owners, shared, w13, prefix) if shared else {})


def _put(keys: dict[str, str], part: str, key: str) -> None:
    if part in keys:
        raise ValueError(f"{key}: expected one tensor of this meaning, got {keys[part]} too")
    keys[part] = key


def _weights(
    side: str, owners: dict[str, dict[str, _Linear]], names: list[str], w13: list[str], prefix: str
) -> dict[str, _Linears]:  # fmt: skip
    for name in names:
        its = owners.get(name, {})
        for linear in (*w13, "down"):
            if linear not in its:
                raise ValueError(f"{prefix}{name}: expected a weight named {_names_of(linear)}, got none")
        for linear in its.keys() - {*w13, "down"}:
            raise ValueError(f"{its[linear].name}: expected {' and '.join(w13)} and down weights, got this one too")
    return {
        f"{side}w13": [[owners[name][linear] for linear in w13] for name in names],
        f"{side}w2": [[owners[name]["down"]] for name in names],
    }


def _names_of(linear: str) -> str:
    return " or ".join(name for name, of in {**_LINEARS, **_FUSED_LINEARS}.items() if of == linear)


# --- one linear layer -----------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A linear layer as the op has it.

    Attributes:
        format: of its weight, or None.
        tensors: by the suffix of the op's argument, with the dim of experts where the layer has one.
        rows, columns: of the weight.
    """

    format: FormatName | None
    tensors: dict[str, Tensor]
    rows: int
    columns: int


def _read(linear: _Linear, state_dict: Mapping[str, Tensor]) -> _Found:
    """Views of its tensors, but for small ones; checked."""
    parts = {part: state_dict[key].detach() for part, key in linear.keys.items()}
    if "q" not in parts:
        raise ValueError(f"{linear.name}: expected a weight, got {', '.join(linear.keys.values())} alone")
    q = parts.pop("q")
    q = q.flatten(-2) if linear.key("q").endswith("_blocks") and q.dim() else q
    lead = tuple(q.shape[:1]) if linear.has_experts else ()
    if q.dim() != len(lead) + 2:
        raise ValueError(f"{linear.key('q')}: expected {len(lead) + 2} dims, got {list(q.shape)}")
    rows = q.shape[-2]
    tensors = {"": q}
    bias = parts.pop("bias", None)
    if bias is not None:
        _check_part(linear, "bias", bias, MODEL_DTYPES, [(*lead, rows)])
        tensors["_bias"] = bias
    if q.dtype in MODEL_DTYPES:
        for part in parts:
            raise ValueError(f"{linear.key(part)}: expected none beside a {_dtypes(q.dtype)} weight, got a tensor")
        return _Found(None, tensors, rows, q.shape[-1])

    if "scale" not in parts:
        raise ValueError(f"{linear.name}: expected a scale of its {_dtypes(q.dtype)} weight, got none")
    scale = parts.pop("scale")
    if scale.shape[: len(lead)] != torch.Size(lead):
        raise ValueError(f"{linear.key('scale')}: expected {lead[0]} experts, got {list(scale.shape)}")
    name = _format_of(linear, q, scale, "input_scale" in parts)
    format = formats.FORMATS[name]
    columns = q.shape[-1] * formats.numbers(format, q.dtype)
    tensors["_scale"] = scale = _scale(linear, name, scale, lead, rows, columns)
    one_each = [(*lead, *shape) for shape in formats.per_tensor_shapes(linear.halves)]
    if format.has_global_scale:
        if "global_scale" not in parts:
            raise ValueError(f"{linear.name}: expected a global scale of its {name} weight, got none")
        t = parts.pop("global_scale")
        _check_part(linear, "global_scale", t, MODEL_DTYPES, one_each)
        t = 1 / t.float() if linear.key("global_scale").endswith("weight_global_scale") else t.float()
        tensors["_global_scale"] = t if lead else t.reshape(())
        for part in ("input_scale", "input_global_scale"):
            parts.pop(part, None)
    if format.activations == "tensor":
        t = parts.pop("input_scale")
        _check_part(linear, "input_scale", t, MODEL_DTYPES, [lead, (*lead, 1)])
        tensors["_input_scale"] = t.float().reshape(lead)
    if name == "int4":
        _check_order(linear, parts.pop("g_idx", None), columns, formats.group_size(name, columns, scale.shape[-1]))
        if "zero_point" in parts:
            tensors["_zero_point"] = t = parts.pop("zero_point")
            packed = -(-rows // formats.numbers(format, t.dtype))
            _check_part(linear, "zero_point", t, format.dtypes, [(*lead, packed, scale.shape[-1])])
    shape = parts.pop("shape", None)
    if shape is not None and shape.tolist() != [rows, columns]:
        raise ValueError(
            f"{linear.key('shape')}: expected [{rows}, {columns}] of 4 bits a number, got {shape.tolist()}"
        )
    for part in parts:
        raise ValueError(f"{linear.key(part)}: expected none beside a {name} weight, got a tensor")
    return _Found(name, tensors, rows, columns)


def _format_of(linear: _Linear, q: Tensor, scale: Tensor, has_input_scale: bool) -> FormatName:
    if q.dtype == torch.int32:
        return "int4"
    if q.dtype in (torch.uint8, torch.int8):
        if scale.dtype == formats.E4M3:
            return "nvfp4"
        if scale.dtype in (formats.E8M0, torch.uint8):
            return "mxfp4"
        accepted = _dtypes(formats.E4M3, formats.E8M0, torch.uint8)
        raise ValueError(
            f"{linear.key('scale')}: expected {accepted} beside a {_dtypes(q.dtype)} weight, got {_dtypes(scale.dtype)}"
        )
    if q.dtype != formats.E4M3:
        accepted = _dtypes(formats.E4M3, torch.int32, torch.uint8, torch.int8, *MODEL_DTYPES)
        raise ValueError(f"{linear.key('q')}: expected {accepted}, got {_dtypes(q.dtype)}")
    *_, rows, columns = q.shape
    shape = tuple(scale.shape[q.dim() - 2 :])
    if shape in formats.scale_shapes("fp8_block", rows, columns, halves=linear.halves) and not has_input_scale:
        return "fp8_block"
    if math.prod(shape) in (1, linear.halves):  # transformers has [E, 2, 1] and [E, 1, 1] too
        return "fp8_tensor" if has_input_scale else "fp8_channel"
    return "fp8_channel" if shape in ((rows, 1), (rows,)) else "fp8_block"


def _scale(
    linear: _Linear, name: FormatName, scale: Tensor, lead: tuple[int, ...], rows: int, columns: int
) -> Tensor:  # fmt: skip
    """In a shape and dtype that the op takes."""
    format = formats.FORMATS[name]
    if scale.dtype not in format.scale_dtypes and scale.dtype in MODEL_DTYPES and torch.float32 in format.scale_dtypes:
        scale = scale.float()
    if format.rows is None:
        scale = scale.reshape(*lead, -1) if lead else scale.reshape(())
    elif name == "fp8_channel":
        each = scale.reshape(*lead, -1)
        scale = each.repeat_interleave(rows // each.shape[-1], -1).unsqueeze(-1)
    shapes = formats.scale_shapes(name, rows, columns, halves=linear.halves, interleaved=linear.is_interleaved)
    _check_part(linear, "scale", scale, format.scale_dtypes, [(*lead, *shape) for shape in shapes])
    return scale


def _check_order(linear: _Linear, group_of: Tensor | None, columns: int, group: int) -> None:
    """Refuses groups of other than neighbouring columns; -1 says nothing of them."""
    if group_of is None or bool((group_of == -1).all()):
        return
    neighbours = torch.arange(columns, device=group_of.device) // group
    if group_of.shape != neighbours.shape or not torch.equal(group_of.long(), neighbours):
        raise ValueError(f"{linear.key('g_idx')}: expected groups of {group} neighbouring columns, got another order")


def _check_part(
    linear: _Linear, part: str, t: Tensor, dtypes: Sequence[torch.dtype], shapes: list[tuple[int, ...]]
) -> None:  # fmt: skip
    if t.dtype not in dtypes:
        raise ValueError(f"{linear.key(part)}: expected {_dtypes(*dtypes)}, got {_dtypes(t.dtype)}")
    if tuple(t.shape) not in shapes:
        accepted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{linear.key(part)}: expected {accepted}, got {list(t.shape)}")


def _dtypes(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# --- a weight -------------------------------------------------------------------------------------------------------


def _check_linears(linears: _Linears, state_dict: Mapping[str, Tensor]) -> _Found:
    """What they all are, with tensors on the meta device."""
    first = linears[0][0]
    found = _read(first, state_dict)
    found = found._replace(tensors={suffix: t.to("meta") for suffix, t in found.tensors.items()})
    for linear in (linear for its in linears for linear in its):
        other = _read(linear, state_dict)
        if other.format != found.format:
            raise ValueError(f"{linear.name}: expected {_name(found)} as {first.name} has, got {_name(other)}")
        for suffix in dict.fromkeys([*found.tensors, *other.tensors]):
            wanted, got = (_kind(one.tensors.get(suffix)) for one in (found, other))
            if wanted != got:
                part = suffix[1:] or "q"
                raise ValueError(f"{linear.key(part)}: expected {wanted} as {first.key(part)} is, got {got}")
    return found


def _check_sizes(weights: dict[str, _Linears], found: dict[str, _Found]) -> None:
    H = found["w13"].columns
    for side in ("", "shared_"):
        if f"{side}w13" not in weights:
            continue
        (first, *_), (down,) = weights[f"{side}w13"][0], weights[f"{side}w2"][0]
        w13, w2 = found[f"{side}w13"], found[f"{side}w2"]
        width = w13.rows // first.halves
        if w13.columns != H or w13.rows % first.halves:
            letter = ("2" if first.halves == 2 else "") + ("S" if side else "I")
            raise ValueError(f"{first.key('q')}: expected [{letter}, H={H}], got [{w13.rows}, {w13.columns}]")
        if w2.format != w13.format:
            raise ValueError(f"{down.name}: expected {_name(w13)} as {first.name} has, got {_name(w2)}")
        if (w2.rows, w2.columns) != (H, width):
            raise ValueError(f"{down.key('q')}: expected [{H}, {width}], got [{w2.rows}, {w2.columns}]")
        E, E_down = (one.tensors[""].shape[0] for one in (w13, w2))
        if first.has_experts and E_down != E:
            raise ValueError(f"{down.key('q')}: expected {E} experts as {first.key('q')} has, got {E_down}")
        for linear, one in ((first, w13), (down, w2)):
            if side and "_bias" in one.tensors:
                raise ValueError(f"{linear.key('bias')}: expected no bias of the shared expert, got a tensor")


def _name(found: _Found) -> str:
    return "a weight that is not quantised" if found.format is None else f"a {found.format} weight"


def _kind(t: Tensor | None) -> str:
    return "none" if t is None else f"{_dtypes(t.dtype)} {list(t.shape)}"


def _take(
    linears: _Linears, state_dict: Mapping[str, Tensor], device: Device, consume: bool, *, is_shared: bool
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of one weight by suffix: as they are where one linear layer is all of it, else in new storage."""
    if linears[0][0].has_experts or (is_shared and len(linears[0]) == 1):
        linear = linears[0][0]
        tensors = {suffix: _moved(t, device) for suffix, t in _read(linear, state_dict).tensors.items()}
        _let_go(state_dict, linear.keys.values(), consume)
        return tensors
    new: dict[str, Tensor] = {}
    for e, its in enumerate(linears):
        for i, linear in enumerate(its):
            for suffix, t in _read(linear, state_dict).tensors.items():
                if suffix not in new:
                    shape = (len(linears), len(its), *t.shape)
                    new[suffix] = torch.empty(shape, dtype=t.dtype, device=device or t.device)
                new[suffix][e, i].copy_(t)
            _let_go(state_dict, linear.keys.values(), consume)
    merged = {suffix: _merged(suffix, t) for suffix, t in new.items()}
    return {suffix: t[0] for suffix, t in merged.items()} if is_shared else merged


def _merged(suffix: str, t: Tensor) -> Tensor:
    """[E, 1 or 2, ...] -> what the op takes: rows one after the other, one scale for each half, an input's largest."""
    if suffix == "_input_scale":
        return t.amax(1)
    if t.dim() == 2:
        return t.squeeze(1)
    return t.flatten(1, 2)


def _moved(t: Tensor, device: Device) -> Tensor:
    return t.detach().to(device or t.device).contiguous()


def _let_go(state_dict: Mapping[str, Tensor], keys: Iterable[str], consume: bool) -> None:
    if consume:
        for key in keys:
            del state_dict[key]  # type: ignore[attr-defined]
