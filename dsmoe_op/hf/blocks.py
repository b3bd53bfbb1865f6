"""Reads a MoE block of transformers by its row in `families.py`: what it computes, where its tensors are.

Whatever the block, or a part of it, holds that its row does not explain is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dsmoe_op.config import MoEConfig
from dsmoe_op.hf.families import FAMILIES, LINEAR, Family, Part, Router

Path = tuple[str, ...]

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
_HARMLESS = {
    "config", "layer_idx", "num_experts", "top_k", "hidden_dim", "hidden_size", "intermediate_dim", "intermediate_size",
    "expert_dim", "gradient_checkpointing",
}  # fmt: skip
_EXPERTS_FLAGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated"}
_MODULE_ATTRIBUTES = set(vars(nn.Module()))
_BY_CLASS: dict[tuple[str, str], list[Family]] = {}
for _family in FAMILIES:
    _BY_CLASS.setdefault((_family.module, _family.block), []).append(_family)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one block becomes a DualStreamMoE.

    Attributes:
        config: what it computes.
        config_32: what it computes while its gate's weight is float32; None where that changes nothing.
        paths: op argument -> attribute path in the block; shared_w13 is absent where two weights have to be merged.
        transposed: whether w13 and w2 are stored [E, H, 2I] and [E, I, H].
        softcap: limit of the logits, or None.
    """

    family: Family
    config: MoEConfig
    config_32: MoEConfig | None
    paths: dict[str, Path]
    transposed: bool
    softcap: float | None

    @property
    def merged(self) -> Part | None:
        """The shared expert, where its gate and up weights have to be merged."""
        return self.family.shared if "shared_w2" in self.paths and "shared_w13" not in self.paths else None


class _Unsupported(ValueError):
    pass


def class_name(module: nn.Module) -> str:
    """Module path and name of a class, for people."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_block(module: nn.Module) -> bool:
    """Whether its class, or one it inherits from, is in the table."""
    return bool(_rows(module))


def looks_like_moe(module: nn.Module) -> bool:
    """Whether it has children named as those of a MoE block, whatever its class."""
    children = module._modules
    return children.get("experts") is not None and bool({"gate", "router"} & children.keys())


def read_block(block: nn.Module) -> Plan:
    """Raises ValueError where the class is unknown or something in the block isn't computed by the op."""
    rows = _rows(block)
    if not rows:
        raise ValueError(f"{class_name(block)}: expected a MoE block that is known (dsmoe_op.hf.families() lists them)")
    reasons = []
    for row in rows:
        try:
            return _read(block, row)
        except _Unsupported as error:
            reasons.append(str(error))
    raise ValueError(f"{class_name(block)}: {'; or: '.join(dict.fromkeys(reasons))}")


def _rows(module: nn.Module) -> list[Family]:
    for cls in type(module).__mro__:
        if (cls.__module__, cls.__qualname__) in _BY_CLASS:
            return _BY_CLASS[cls.__module__, cls.__qualname__]
    return []


def _read(block: nn.Module, family: Family) -> Plan:
    _check_class("the block", block, family, family.block)
    parts = [family.router, family.experts]
    shared = family.shared
    if shared is not None and family.shared_optional and getattr(block, shared.name, None) is None:
        shared = None
    if shared is not None:
        parts.append(shared)
    for part in parts:
        child = getattr(block, part.name, None)
        if child is None:
            raise _Unsupported(f"{part.name}: expected a {part.cls}, got none")
        _check_class(part.name, child, family, part.cls)
        if part is not family.router:
            _check_no_hooks(part.name, child)

    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    _read_router(block, family, values, paths)
    _read_experts(block, family.experts, values, paths)
    if shared is not None:
        _read_shared(block, shared, values, paths)
    if family.shared_gate is not None:
        _linear(block, family.shared_gate)
        paths["shared_gate"] = (family.shared_gate, "weight")
    if family.scale is not None:
        values.update(routed_scaling_factor=getattr(block, family.scale), scale_on="output")
    if family.average_if is not None and shared is not None:
        values["combine"] = getattr(block, family.average_if)
    if family.after is not None:
        _check_class(family.after[0], getattr(block, family.after[0]), family, family.after[1])
    values.update(_refined("", family.refine, block))

    known = {part.name for part in parts} | set(family.also)
    known |= {name for name in (family.shared_gate, family.scale, family.average_if) if name}
    known |= {family.after[0]} if family.after else set()
    known |= {family.correction_bias} if family.correction_bias else set()
    known |= {family.shared.name} if family.shared else set()
    _check_nothing_else("", block, known)
    for name, path in paths.items():
        _check_tensor(name, ".".join(path), _follow(block, path))

    router: Router = family.router.kind
    softcap = getattr(block.get_submodule(family.router.name), router.softcap) if router.softcap else None
    try:
        config = MoEConfig(**values)
        in_float32 = dict.fromkeys(router.by_gate_dtype, "float32")
        config_32 = MoEConfig(**values | in_float32) if in_float32 else None
    except ValueError as error:
        raise _Unsupported(str(error)) from None
    return Plan(
        family=family,
        config=config,
        config_32=config_32,
        paths=paths,
        transposed=family.experts.kind.transposed,
        softcap=softcap or None,
    )


def _read_router(block: nn.Module, family: Family, values: dict[str, Any], paths: dict[str, Path]) -> None:
    name, _, kind = family.router
    router = getattr(block, name)
    values.update(kind.fixed)
    values["top_k"] = getattr(router, kind.top_k) if kind.top_k else _follow(block, (family.top_k or "").split("."))
    normalize = kind.normalize_if is None or getattr(router, kind.normalize_if)
    values["normalize"] = kind.normalize if normalize else "none"
    if kind.scale is not None:
        values["routed_scaling_factor"] = getattr(router, kind.scale)
    if kind.groups is not None:
        n_group, topk_group = (getattr(router, attribute) for attribute in kind.groups)
        if n_group is not None and n_group != topk_group:
            values.update(n_group=n_group, topk_group=topk_group)
    values.update(_refined(name, kind.refine, router))
    paths["router_weight"] = (name, *kind.weight.split("."))
    if kind.bias is not None:
        paths["router_bias"] = (name, *kind.bias.split("."))
    if kind.correction_bias is not None:
        paths["correction_bias"] = (name, *kind.correction_bias.split("."))
    if family.correction_bias is not None:
        paths["correction_bias"] = (family.correction_bias,)

    attributes = (kind.top_k, kind.normalize_if, kind.scale, kind.softcap, *(kind.groups or ()))
    tensors = (kind.weight, kind.bias, kind.correction_bias)
    known = {a for a in (*attributes, *kind.also) if a} | {t for t in tensors if t and "." not in t}
    _check_nothing_else(name, router, known)


def _read_experts(block: nn.Module, part: Part, values: dict[str, Any], paths: dict[str, Path]) -> None:
    name, _, kind = part
    experts = getattr(block, name)
    if getattr(experts, "_is_expert_parallel", False):
        raise _Unsupported(f"{name}: expected all experts on this rank, got expert parallelism")
    expected = {
        "has_gate": kind.gated,
        "has_bias": kind.w13_bias is not None,
        "has_post_expert_norm": False,
        "is_transposed": kind.transposed,
        "is_concatenated": kind.order != "interleaved",
    }
    for flag, value in expected.items():
        if getattr(experts, flag, value) != value:
            raise _Unsupported(f"{name}.{flag}: expected {value}, got {not value}")
    values["activation"] = _activation(name, experts, kind.act)
    if kind.gated != (values["activation"] != "relu2"):
        wanted = "a gated activation" if kind.gated else "relu2"
        raise _Unsupported(f"{name}.{kind.act}: expected {wanted}, got {values['activation']}")
    values["w13_order"] = kind.order
    values["clamp_after_activation"] = kind.clamp_after_activation
    values["clamp_routed"] = _limit(experts, kind.clamp)
    if kind.zero_experts is not None:
        values["num_zero_experts"] = getattr(experts, kind.zero_experts)
    values.update(_refined(name, kind.refine, experts))
    for argument in ("w13", "w2", "w13_bias", "w2_bias"):
        path = getattr(kind, argument)
        if path is not None:
            paths[argument] = (name, *path.split("."))
    tensors = {t for t in (kind.w13, kind.w2, kind.w13_bias, kind.w2_bias) if t and "." not in t}
    attributes = {a for a in (kind.act, kind.clamp, kind.zero_experts, *kind.also) if a}
    _check_nothing_else(name, experts, tensors | attributes | _EXPERTS_FLAGS)


def _read_shared(block: nn.Module, part: Part, values: dict[str, Any], paths: dict[str, Path]) -> None:
    name, _, kind = part
    shared = getattr(block, name)
    activation = _activation(name, shared, kind.act)
    if activation != values["activation"]:
        raise _Unsupported(f"{name}.{kind.act}: expected the routed experts' {values['activation']}, got {activation}")
    values["clamp_shared"] = _limit(shared, kind.clamp)
    weights = [_linear(shared, child, name).weight for child in (*kind.w13, kind.w2)]
    if len(kind.w13) == 1:
        paths["shared_w13"] = (name, kind.w13[0], "weight")
    else:
        gate, up = weights[:2]
        for what in ("shape", "dtype", "device", "requires_grad"):
            if getattr(gate, what) != getattr(up, what):
                got = f"{getattr(gate, what)} and {getattr(up, what)}"
                raise _Unsupported(f"{name}: expected {' and '.join(kind.w13)} of one {what}, got {got}")
        for child in kind.w13:
            _check_tensor("shared_w13", f"{name}.{child}.weight", shared.get_submodule(child).weight)
    paths["shared_w2"] = (name, kind.w2, "weight")
    _check_nothing_else(name, shared, {*kind.w13, kind.w2, *kind.also} | {a for a in (kind.act, kind.clamp) if a})


def _follow(owner: Any, path: Iterable[str]) -> Any:
    for part in path:
        owner = getattr(owner, part)
    return owner


def _refined(name: str, refine: Any, module: nn.Module) -> dict[str, Any]:
    try:
        return {} if refine is None else refine(module)
    except ValueError as error:
        raise _Unsupported(f"{name}.{error}" if name else str(error)) from None


def _limit(module: nn.Module, attribute: str | None) -> float | None:
    limit = None if attribute is None else getattr(module, attribute)
    return None if limit is None or limit == math.inf else limit


def _activation(where: str, module: nn.Module, act: str) -> str:
    if act.startswith("="):
        return act[1:]
    fn = getattr(module, act)
    if isinstance(fn, nn.Module):
        _check_untouched(f"{where}.{act}", fn)
    name = type(fn).__name__
    if name not in _ACTIVATIONS:
        raise _Unsupported(f"{where}.{act}: expected silu, gelu, tanh-gelu or relu2, got {name}")
    return _ACTIVATIONS[name]


def _linear(owner: nn.Module, child: str, where: str = "") -> nn.Linear:
    module = getattr(owner, child)
    where = f"{where}.{child}" if where else child
    if type(module) is not nn.Linear:
        raise _Unsupported(f"{where}: expected nn.Linear, got {class_name(module)}")
    if module.bias is not None:
        raise _Unsupported(f"{where}.bias: expected None, got a tensor")
    _check_untouched(where, module)
    return module


def _check_tensor(argument: str, where: str, tensor: Any) -> None:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise _Unsupported(f"{where}: expected a plain tensor for {argument}, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise _Unsupported(f"{where}: expected a floating-point tensor for {argument}, got {tensor.dtype}")


def _check_class(where: str, module: nn.Module, family: Family, name: str) -> None:
    """Its class, or one it inherits forward from, is the named one, and the object has no forward of its own."""
    _check_forward(where, module)
    if name == LINEAR:
        if type(module) is not nn.Linear or module.bias is not None:
            raise _Unsupported(f"{where}: expected nn.Linear without a bias, got {class_name(module)}")
        return
    cls = next((c for c in type(module).__mro__ if (c.__module__, c.__qualname__) == (family.module, name)), None)
    if cls is None:
        raise _Unsupported(f"{where}: expected {name}, got {class_name(module)}")
    for method in ("forward", "_apply_gate"):
        if getattr(type(module), method, None) is not getattr(cls, method, None):
            raise _Unsupported(f"{where}: expected the {method} of {name}, got one of {class_name(module)}")


def _check_forward(where: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise _Unsupported(
            f"{where}: expected the forward of its class, got one set on the object (accelerate does so)"
        )


def _check_untouched(where: str, module: nn.Module) -> None:
    _check_forward(where, module)
    _check_no_hooks(where, module)


def _check_no_hooks(where: str, module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks:
        raise _Unsupported(f"{where}: expected no forward hooks, since it is not called any more, got some")


def _check_nothing_else(where: str, module: nn.Module, known: set[str]) -> None:
    """Refuses what a class may have come to hold, and compute with, after its row was written."""
    held = {name for name in vars(module) if name not in _MODULE_ATTRIBUTES and not name.startswith("_")}
    held -= _HARMLESS
    for entries in (module._parameters, module._buffers, module._modules):
        held |= {name for name, value in entries.items() if value is not None}
    unknown = sorted(held - known)
    if unknown:
        raise _Unsupported(f"{where or 'the block'}: expected nothing unknown in it, got {', '.join(unknown)}")
