"""A small block of every family: the installed transformers' own class, random weights, all sizes different."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsmoe_op.hf.families import FAMILIES, Family

H, E, K = 80, 12, 3

# What a block may read of its model's config, under every name that some family uses.
_CONFIG: dict[str, Any] = {
    "hidden_size": H,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), K),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"), 112
    ),
    "shared_intermediate_size": 112,
    "shared_experts_intermediate_size": 32,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 2.5),
    **dict.fromkeys(("moe_routed_scaling_factor", "moe_router_scaling_factor"), 1.7),
    "topk_method": "group_limited_greedy",
    "moe_norm_min": 1e-12,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "rms_norm_eps": 1e-6,
    "moe_latent_size": None,
    "enable_moe_fp32_combine": True,
    "swiglu_limit": 0.6,
    "swiglu_limits": [None, 0.5],
    "swiglu_limits_shared": [None, 0.7],
    "swiglu_alpha": 1.702,
    "moe_router_logit_softcapping": 0.0,
    "expert_selection_fn": "softmax",
    "shared_expert_combination_strategy": "average",
    "scoring_func": "sqrtsoftplus",
    "mlp_layer_types": ["moe", "moe"],
    "zero_expert_num": 5,
    "router_jitter_noise": 0.0,
    "_experts_implementation": "eager",
}

# Further cases: family -> what differs, so that every branch of a block's forward is met.
_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [{"topk_method": "greedy"}],
    "deepseek_v3": [{"n_group": 1, "topk_group": 1}, {"norm_topk_prob": False}, {"hidden_act": "gelu"}],
    "axk2": [{"n_group": None}],
    "qwen2_moe": [{"norm_topk_prob": False}, {"hidden_act": "gelu_pytorch_tanh"}],
    "ernie4_5_moe": [{"moe_num_shared_experts": 0}],
    "llama4": [{"num_experts_per_tok": 1}],
    "cohere2_moe": [
        {"shared_expert_combination_strategy": "sum"},
        {"num_shared_experts": 0},
        {"expert_selection_fn": "sigmoid"},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ],
    "mistral4": [{"norm_topk_prob": False}],
    "laguna": [{"moe_router_logit_softcapping": 1.5}],
    "step3p7": [{"swiglu_limits": None}, {"swiglu_limits_shared": None}],
    "deepseek_v4": [{"scoring_func": "sigmoid"}],
    "hy_v3": [{"enable_moe_fp32_combine": False}],
}


def hf_module(family: Family) -> Any:
    """The module that defines the family, or None where the installed transformers lacks it."""
    package = family.module.rpartition(".")[0]
    return importlib.import_module(family.module) if importlib.util.find_spec(package) else None


def _cases() -> list[Any]:
    if importlib.util.find_spec("transformers") is None:
        return []
    cases = []
    seen = set()
    for family in FAMILIES:
        module = hf_module(family)
        if (family.module, family.block) in seen:  # a row for another version of the package
            continue
        seen.add((family.module, family.block))
        if module is None or not hasattr(module, family.block):
            cases.append(pytest.param(family, {}, id=family.title, marks=pytest.mark.skip("transformers lacks it")))
            continue
        for changes in ({}, *_VARIANTS.get(family.package, [])):
            name = " ".join([family.block, *(f"{k}={v}" for k, v in changes.items())])
            cases.append(pytest.param(family, changes, id=name))
    return cases


CASES = _cases()


def make_block(family: Family, changes: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """A float32 block with random weights, biases and norms, in eval mode."""
    config = SimpleNamespace(**{**_CONFIG, **(changes or {})})
    cls = getattr(hf_module(family), family.block)
    takes = inspect.signature(cls.__init__).parameters
    block = cls(config, **({"layer_idx": 1} if "layer_idx" in takes else {}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            if tensor.dim() < 2 or name.endswith("_bias"):
                centre = 1.0 if "norm" in name else 0.0
                tensor.copy_(centre + 0.3 * torch.randn(tensor.shape, generator=generator))
            else:
                fan_in = tensor.shape[-1] if tensor.shape[-1] == H or tensor.dim() == 2 else tensor.shape[-2]
                gain = 1.5 if name.startswith(family.router.name) else 2.5
                tensor.copy_(gain * torch.randn(tensor.shape, generator=generator) / fan_in**0.5)
    return block.eval()


def to_model_dtype(block: nn.Module, family: Family, dtype: torch.dtype) -> nn.Module:
    """As from_pretrained(dtype=...) does: what the model class keeps in float32 stays."""
    kept = {
        fragment
        for cls in vars(hf_module(family)).values()
        if isinstance(cls, type)
        for fragment in (*(getattr(cls, "_keep_in_fp32_modules_strict", None) or ()),)
    }
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if not any(fragment.removeprefix("mlp.") in name for fragment in kept):
            tensor.data = tensor.data.to(dtype)
    return block


def run_block(block: nn.Module, family: Family, x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """(what the unpatched block returns, ids [T, K], weights [T, K]): the routing as its experts are given it."""
    seen: list[Any] = []
    if family.package == "llama4":
        handle = block.router.register_forward_hook(lambda m, args, out: seen.append(out))
    else:
        handle = block.experts.register_forward_pre_hook(lambda m, args: seen.append(args))
    try:
        with torch.no_grad():
            out = block(x)
    finally:
        handle.remove()
    if family.package == "llama4":
        scores, logits = seen[0]
        ids = logits.topk(block.top_k, dim=1).indices
        return out, ids, scores.gather(1, ids)
    if len(seen[0]) == 2:  # Aria of 5.17 routes inside its experts
        weights, ids = seen[0][1].topk(K, dim=-1)
        return out, ids, weights.softmax(-1)
    return out, seen[0][1], seen[0][2]


def first(out: Any) -> Tensor:
    """The hidden states of what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance, in float64."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
