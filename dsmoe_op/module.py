"""`DualStreamMoE`: the layer as a module that holds its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dsmoe_op import checks
from dsmoe_op.config import MoEConfig
from dsmoe_op.ops import dual_stream_moe, prepare


class DualStreamMoE(nn.Module):
    """One MoE layer that runs as one `dual_stream_moe` call.

    Built so, it owns flat parameters named as the op's arguments (correction_bias is a float32 buffer). Built by
    `from_transformers`, it keeps the children and the state_dict of the block it replaces.

    Args:
        config: the layer's knobs.
        hidden_size: H.
        num_experts: E; the router has config.num_zero_experts rows more.
        intermediate_size: I.
        shared_intermediate_size: S, or None without a shared expert.
        shared_gate: whether the shared output is gated by sigmoid(x . shared_gate).
        router_bias, correction_bias, w13_bias, w2_bias: whether these exist.
        router_dtype: dtype of router_weight and router_bias; None is `dtype`.
        dtype, device: of the weights; None is torch's default.
        schedule: as in `dual_stream_moe`.

    Raises:
        ValueError: arguments that no call could run with; the text names the argument.

    Attributes:
        config: MoEConfig of the layer.
        schedule: used by the next call; may be set at any time.
    """

    config: MoEConfig
    _paths: tuple[tuple[str, tuple[str, ...]], ...]
    """Op argument -> path of the attribute that holds it."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        router_bias: bool = False,
        correction_bias: bool = False,
        w13_bias: bool = False,
        w2_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        schedule: str = "auto",
    ) -> None:
        super().__init__()
        if schedule not in checks.SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(map(repr, checks.SCHEDULES))}, got {schedule!r}")
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected an integer above 0, got {size!r}")
        checks.check_choice(config, num_experts + config.num_zero_experts)
        if shared_gate and not shared_intermediate_size:
            raise ValueError("shared_gate: expected False without shared_intermediate_size, got True")
        self.config = config
        self.schedule = schedule
        H, E, I, S = hidden_size, num_experts, intermediate_size, shared_intermediate_size or 0
        E_logits = E + config.num_zero_experts
        rows = 2 if config.gated else 1
        router_dtype = router_dtype or dtype
        shapes: dict[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = {
            "router_weight": ((E_logits, H), router_dtype),
            "router_bias": ((E_logits,) if router_bias else None, router_dtype),
            "w13": ((E, rows * I, H), dtype),
            "w13_bias": ((E, rows * I) if w13_bias else None, dtype),
            "w2": ((E, H, I), dtype),
            "w2_bias": ((E, H) if w2_bias else None, dtype),
            "shared_w13": ((rows * S, H) if S else None, dtype),
            "shared_w2": ((H, S) if S else None, dtype),
            "shared_gate": ((1, H) if shared_gate else None, dtype),
        }
        for name, (shape, its_dtype) in shapes.items():
            tensor = None if shape is None else nn.Parameter(torch.empty(shape, dtype=its_dtype, device=device))
            self.register_parameter(name, tensor)
        bias = torch.zeros(E_logits, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction_bias", bias)
        held = [name for name in (*shapes, "correction_bias") if getattr(self, name) is not None]
        self._paths = tuple((name, (name,)) for name in held)
        self.reset_parameters()

    @classmethod
    def from_transformers(cls, block: nn.Module, schedule: str = "auto") -> DualStreamMoE:
        """The same layer as a MoE block of Hugging Face transformers, on the same storage.

        The block's children stay under their names (the shared expert's gate and up weights alone are merged, once), so
        state_dict keys, dtypes, devices, hooks of the block and of its router, and what it returns stay as they were.

        Args:
            block: a block that `dsmoe_op.hf.families()` lists; one that is a DualStreamMoE already is returned.
            schedule: as in `dual_stream_moe`.

        Raises:
            ValueError: the block's class is unknown, or it holds something that the op does not compute; the text names
                the class and the part.
        """
        from dsmoe_op import hf  # hf builds on this module, and most users of it have no transformers

        return hf.from_transformers(block, schedule)

    def reset_parameters(self) -> None:
        """Uniform weights within 1/sqrt(fan-in), as nn.Linear has; biases zero."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("_bias"):
                    parameter.zero_()
                else:
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound)

    def tensors(self) -> dict[str, Tensor]:
        """The op's tensor arguments that this layer holds, by name."""
        found: dict[str, Tensor] = {}
        for name, path in self._paths:
            owner: Any = self
            for part in path:
                # Most are parameters, which nn.Module's own look-up comes to last; a parametrised one is not there.
                held = owner._parameters.get(part)
                owner = getattr(owner, part) if held is None else held
            found[name] = owner
        return found

    def prepare(self) -> float | None:
        """Compiles and loads all that a forward pass of any size needs; see `dsmoe_op.prepare`.

        Returns:
            Seconds taken, or None where there is nothing to do: on the CPU.
        """
        given = self.tensors()
        w13 = given["w13"]
        one_token = torch.empty((1, w13.shape[2]), dtype=w13.dtype, device=w13.device)
        return prepare(one_token, config=self.config, schedule=self.schedule, **given)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [..., H] -> a fresh contiguous tensor like it; the other arguments as in `dual_stream_moe`.

        With router_logits, or topk_ids and topk_weights, the module's own router is left out.
        """
        given = self.tensors()
        if router_logits is not None or topk_ids is not None:
            given.pop("router_weight", None)
            given.pop("router_bias", None)
        if topk_ids is not None:
            given.pop("correction_bias", None)
        return dual_stream_moe(
            hidden_states,
            config=self.config,
            schedule=self.schedule,
            router_logits=router_logits,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            num_valid_tokens=num_valid_tokens,
            expert_map=expert_map,
            **given,
        )

    def extra_repr(self) -> str:
        return f"config={self.config.key}, schedule={self.schedule!r}"
