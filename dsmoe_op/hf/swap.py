"""Blocks of transformers as DualStreamMoE, one by one and in a whole model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsmoe_op.checks import SCHEDULES
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FormatName
from dsmoe_op.hf.blocks import Plan, class_name, is_block, looks_like_moe, read_block
from dsmoe_op.hf.shared import MergedMLP
from dsmoe_op.module import DualStreamMoE
from dsmoe_op.ops import dual_stream_moe, route
from dsmoe_op.quantizing import with_formats

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class TransformersMoE(DualStreamMoE):
    """A DualStreamMoE in the place of a block of transformers, made by `DualStreamMoE.from_transformers`.

    It has the block's children, parameters and buffers under their names. Its router module is called only where it has
    forward hooks, by which transformers records router logits; the routing of the output is the op's own.
    """

    def __init__(self, block: nn.Module, plan: Plan, schedule: str) -> None:
        nn.Module.__init__(self)
        for entries in ("_parameters", "_buffers", "_modules"):
            getattr(self, entries).update(getattr(block, entries))
        self._non_persistent_buffers_set = set(block._non_persistent_buffers_set)
        for hooks in _HOOKS:  # the same objects: a handle's remove() must still reach them
            setattr(self, hooks, getattr(block, hooks))
        self.training = block.training
        self.schedule = schedule
        family = plan.family
        self._replaced = class_name(block)
        self._config, self._config_32 = plan.config, plan.config_32
        self._router = family.router.name
        self._router_takes_bias = family.correction_bias
        self._router_input_flat = family.router_input == "flat"
        self._routed_by_block = family.routed_by_block
        self._softcap = plan.softcap
        self._transposed = plan.transposed
        self._after = family.after[0] if family.after else None
        self._returns = family.returns
        paths = dict(plan.paths)
        if plan.merged is not None:
            name, _, kind = plan.merged
            self._modules[name] = MergedMLP(block.get_submodule(name), kind.w13, kind.w2)
            paths["shared_w13"] = (name, "w13")
        self._paths = tuple(paths.items())

    @property
    def config(self) -> MoEConfig:  # type: ignore[override]
        """The layer's knobs; some blocks round as the dtype of their gate's weight says, which .to() may change."""
        if self._config_32 is not None and super().tensors()["router_weight"].dtype == torch.float32:
            return self._config_32
        return self._config

    def _set_formats(self, routed: FormatName | None, shared: FormatName | None) -> None:
        self._config = with_formats(self._config, routed, shared)
        if self._config_32 is not None:
            self._config_32 = with_formats(self._config_32, routed, shared)
        if routed is not None:
            self._transposed = False  # in a format they are as the op's arguments

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        if self._transposed:
            found["w13"], found["w2"] = found["w13"].transpose(1, 2), found["w2"].transpose(1, 2)
        if found["w13"].shape[0] != found["w2"].shape[0]:
            found["w13"] = found["w13"][: found["w2"].shape[0]]  # LongCat has rows for its zero experts, never read
        bias = found.get("correction_bias")
        if bias is not None and bias.dim() > 1:
            found["correction_bias"] = bias.flatten()  # Ernie's is [1, E]
        return found

    def prepare(self, dtype: torch.dtype | None = None) -> float | None:
        """As of `DualStreamMoE`; also None where code of the block's own makes the op's routing inputs."""
        return None if self._routed_by_block or self._softcap is not None else super().prepare(dtype)

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Any:  # type: ignore[override]
        """What the block itself returns for hidden_states [..., H]; hash layers choose experts by input_ids."""
        tensors, config = self.tensors(), self.config
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        router: nn.Module = getattr(self, self._router)
        routed: Any = None
        if self._routed_by_block:
            routed = router(hidden_states, input_ids)
        elif router._forward_hooks or router._forward_pre_hooks:
            also = () if self._router_takes_bias is None else (getattr(self, self._router_takes_bias),)
            routed = router(flat if self._router_input_flat else hidden_states, *also)

        given = dict(tensors)
        if self._routed_by_block:
            del given["router_weight"]
            given["topk_weights"], given["topk_ids"] = routed[1:]
        elif self._softcap is not None:
            logits = F.linear(flat, given.pop("router_weight")).float()
            given["router_logits"] = torch.tanh(logits / self._softcap) * self._softcap
        out = dual_stream_moe(hidden_states, config=config, schedule=self.schedule, **given)
        if self._after is not None:
            out = getattr(self, self._after)(out)
        if self._returns == "hidden, logits":
            logits = F.linear(flat, tensors["router_weight"]) if routed is None else routed[1]
            return out.reshape(flat.shape), logits
        if self._returns == "hidden, weights":
            if routed is not None:
                return out, routed[1]
            weight, bias = tensors["router_weight"], tensors.get("router_bias")
            _, weights = route(flat, config=config, router_weight=weight, router_bias=bias)
            return out, weights.to(hidden_states.dtype)
        return out

    def extra_repr(self) -> str:
        return f"{self._replaced}, {super().extra_repr()}"


def from_transformers(block: nn.Module, schedule: str = "auto") -> DualStreamMoE:
    """As `DualStreamMoE.from_transformers`."""
    _check_schedule(schedule)
    return block if isinstance(block, DualStreamMoE) else TransformersMoE(block, read_block(block), schedule)


def replace_moe_blocks(model: nn.Module, schedule: str = "auto") -> int:
    """Swaps every MoE block of transformers inside `model` for a DualStreamMoE on the same storage.

    All blocks are read before the first is changed. Blocks swapped earlier stay as they are; a block that the model has
    in several places becomes one module in all of them.

    Args:
        model: any module; its model.config isn't read.
        schedule: as in `dual_stream_moe`.

    Returns:
        How many blocks were swapped, 0 where there are none.

    Raises:
        ValueError: a block is of an unknown class, or holds something that the op does not compute; or `model` is
            itself a block. The text names the place, the class and the part. Nothing is changed then.
    """
    _check_schedule(schedule)
    if isinstance(model, DualStreamMoE):
        return 0
    if is_block(model) or looks_like_moe(model):
        raise ValueError(
            f"model: expected a module that has MoE blocks in it, got a block, {class_name(model)}: "
            "use DualStreamMoE.from_transformers"
        )
    plans: dict[nn.Module, Plan] = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, child in module._modules.items():
            if child is None or isinstance(child, DualStreamMoE):
                continue
            where = f"{path}.{name}" if path else name
            if not is_block(child) and not looks_like_moe(child):
                visit(child, where)
                continue
            if child not in plans:
                try:
                    plans[child] = read_block(child)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
            places.setdefault(child, []).append((module, name))

    visit(model, "")
    count = len(plans)
    while plans:  # nothing here may keep a block once it is swapped: its unmerged shared expert is to be freed
        block, plan = plans.popitem()
        module = TransformersMoE(block, plan, schedule)
        for parent, name in places.pop(block):
            parent._modules[name] = module
    return count


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
