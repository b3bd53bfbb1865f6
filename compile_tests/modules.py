"""Small `DualStreamMoE` layers, and blocks of transformers, for the tests of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsmoe_op import MoEConfig
from dsmoe_op.hf.families import FAMILIES
from dsmoe_op.module import DualStreamMoE

H, E, I, S, K = 40, 6, 24, 56, 2
CONFIGS = {
    "plain": (MoEConfig(top_k=K), {}),
    "shared": (MoEConfig(top_k=K, routed_scaling_factor=2.5), {"shared_intermediate_size": S, "correction_bias": True}),
    "gated shared": (MoEConfig(top_k=K, score="softmax"), {"shared_intermediate_size": S, "shared_gate": True}),
    "not gated": (MoEConfig(top_k=K, activation="relu2"), {"shared_intermediate_size": S}),
    "biases": (MoEConfig(top_k=K), {"router_bias": True, "w13_bias": True, "w2_bias": True}),
    "zero experts": (MoEConfig(top_k=K, num_zero_experts=3), {"correction_bias": True}),
}
layers = pytest.mark.parametrize("name", CONFIGS)


def make(name: str, **other: Any) -> DualStreamMoE:
    config, options = CONFIGS[name]
    module = DualStreamMoE(config, H, E, I, **{**options, **other})
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if key.endswith("bias"):
                tensor.normal_(std=0.2)
    return module


transformers_only = pytest.mark.skipif(
    not pytest.importorskip("hf_cases").CASES, reason="transformers is not installed"
)


def make_block(package: str, **changes: Any) -> nn.Module:
    from hf_cases import make_block

    return make_block(next(f for f in FAMILIES if f.package == package), changes)


def run(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = block(x)
    return out[0] if isinstance(out, tuple) else out


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in inputs:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out
