"""The shared expert of a swapped block: gate and up weights in one tensor, under their two old keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class MergedMLP(nn.Module):
    """Holds gate_proj.weight and up_proj.weight [S, H] as the rows of one w13 [2S, H], and down_proj as it was.

    Its state_dict has the two keys, as views of w13; loading takes the two, or the one that comes, into w13.
    It computes nothing: `DualStreamMoE` reads its weights.
    """

    def __init__(self, mlp: nn.Module, names: tuple[str, str], down: str) -> None:
        super().__init__()
        gate, up = (mlp.get_parameter(f"{name}.weight") for name in names)
        self.halves = tuple(f"{name}.weight" for name in names)
        self.w13 = nn.Parameter(torch.cat([gate.detach(), up.detach()]), requires_grad=gate.requires_grad)
        self.add_module(down, mlp.get_submodule(down))
        self.train(mlp.training)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        w13 = self.w13 if keep_vars else self.w13.detach()
        for name, half in zip(self.halves, w13.chunk(2), strict=True):
            destination[prefix + name] = half

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As nn.Module's, for the two keys. With assign=True w13 becomes a tensor of the given dtype and device."""
        S, H = self.w13.shape[0] // 2, self.w13.shape[1]
        given: list[Tensor | None] = []
        for name in self.halves:
            half = state_dict.get(prefix + name)
            if half is None and strict:
                missing_keys.append(prefix + name)
            if half is not None and tuple(half.shape) != (S, H):
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {tuple(half.shape)} from "
                    f"checkpoint, the shape in current model is {(S, H)}."
                )
                half = None
            given.append(half)
        if strict:
            for key in state_dict:
                name = key.removeprefix(prefix)
                if key.startswith(prefix) and name not in self.halves and name.split(".")[0] not in self._modules:
                    unexpected_keys.append(key)
        with torch.no_grad():
            old = self.w13.detach().chunk(2)
            if local_metadata.get("assign_to_params_buffers", False) and any(half is not None for half in given):
                first = next(half for half in given if half is not None)
                halves = [o.to(first) if half is None else half for o, half in zip(old, given, strict=True)]
                self.w13 = nn.Parameter(torch.cat([h.detach() for h in halves]), requires_grad=self.w13.requires_grad)
                return
            for target, half in zip(old, given, strict=True):
                if half is not None:
                    target.copy_(half)

    def extra_repr(self) -> str:
        return f"w13={list(self.w13.shape)} of {' and '.join(self.halves)}"
