"""Small whole models of transformers, their configs made in code: family -> (class, config class, config)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

VOCABULARY = 96
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LATENT_ATTENTION = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEXER = {**_LATENT_ATTENTION, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64}
_DEEPSEEK = {
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_QWEN = {
    "num_experts": 12,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", "AfmoeConfig", {"num_experts": 12, "num_shared_experts": 1, "num_dense_layers": 1}),
    "aria": ("AriaText", "AriaTextConfig", {"moe_num_experts": 12, "moe_topk": 3}),
    "axk1": ("AXK1", "AXK1Config", {**_LATENT_ATTENTION, **_DEEPSEEK}),
    "axk2": ("AXK2", "AXK2Config", {**_INDEXER, **_DEEPSEEK}),
    "bailing_hybrid": (
        "BailingHybrid",
        "BailingHybridConfig",
        {**_LATENT_ATTENTION, **_DEEPSEEK, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "cohere2_moe": ("Cohere2Moe", "Cohere2MoeConfig", {"num_experts": 12, "num_shared_experts": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        "DeepseekV2Config",
        {**_LATENT_ATTENTION, **_DEEPSEEK, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3Config", {**_LATENT_ATTENTION, **_DEEPSEEK}),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32Config", {**_INDEXER, **_DEEPSEEK, **_SPARSE}),
    "deepseek_v4": (
        "DeepseekV4",
        "DeepseekV4Config",
        {**_DEEPSEEK, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
    ),
    "dots1": ("Dots1", "Dots1Config", _DEEPSEEK),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 12, "moe_k": 3, "moe_num_shared_experts": 2},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        "ExaoneMoeConfig",
        {**_DEEPSEEK, "num_experts": 12, "num_shared_experts": 2, "is_moe_layer": [False, True, True]},
    ),
    "flint": ("Flint", "FlintConfig", {"num_experts": 12, "shared_expert_intermediate_size": 32}),
    "glm4_moe": ("Glm4Moe", "Glm4MoeConfig", _DEEPSEEK),
    "glm4_moe_lite": ("Glm4MoeLite", "Glm4MoeLiteConfig", {**_LATENT_ATTENTION, **_DEEPSEEK, **_SPARSE}),
    "glm_moe_dsa": ("GlmMoeDsa", "GlmMoeDsaConfig", {**_INDEXER, **_DEEPSEEK, **_SPARSE}),
    "gpt_oss": ("GptOss", "GptOssConfig", {"num_local_experts": 12}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", "HunYuanMoEV1Config", {"num_experts": 12, "moe_topk": 3}),
    "hy_v3": ("HYV3", "HYV3Config", {**_DEEPSEEK, "num_experts": 12, "num_shared_experts": 1}),
    "hy_v4": ("HYV4", "HYV4Config", {**_LATENT_ATTENTION, **_DEEPSEEK}),
    "kimi_linear": (
        "KimiLinear",
        "KimiLinearConfig",
        {
            **_LATENT_ATTENTION,
            **_DEEPSEEK,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "kolibri1": ("Kolibri1", "Kolibri1Config", _QWEN),
    "laguna": ("Laguna", "LagunaConfig", {**_QWEN, "moe_router_logit_softcapping": 2.0}),
    "llama4": (
        "Llama4",
        "Llama4TextConfig",
        {
            "num_local_experts": 12,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        "LongcatFlashConfig",
        {
            **_LATENT_ATTENTION,
            "n_routed_experts": 12,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "ffn_hidden_size": 80,
            "expert_ffn_hidden_size": 48,
            "num_layers": 2,
        },
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VL",
        "MiniMaxM3VLTextConfig",
        {"num_local_experts": 12, "shared_intermediate_size": 32},
    ),
    "nemotron_h": (
        "NemotronH",
        "NemotronHConfig",
        {
            **_DEEPSEEK,
            "moe_shared_expert_intermediate_size": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
        },
    ),
    "qwen2_moe": ("Qwen2Moe", "Qwen2MoeConfig", _QWEN),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", {**_QWEN, **_LINEAR_ATTENTION}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig", {**_QWEN, **_LINEAR_ATTENTION}),
    "solar_open": ("SolarOpen", "SolarOpenConfig", _DEEPSEEK),
}


def _names() -> list[Any]:
    if importlib.util.find_spec("transformers") is None:
        return [pytest.param("deepseek_v3", marks=pytest.mark.skip("transformers is not installed"))]
    lacks = pytest.mark.skip("transformers lacks it")
    found = {name: importlib.util.find_spec(f"transformers.models.{name}") is not None for name in _MODELS}
    return [name if there else pytest.param(name, marks=lacks) for name, there in found.items()]


MODELS = _names()


def make_model(name: str, seed: int = 0) -> Any:
    """A float32 model in eval mode, its weights wide enough that no two logits tie."""
    prefix, config_cls, values = _MODELS[name]
    package = f"transformers.models.{name}"
    config = getattr(importlib.import_module(f"{package}.configuration_{name}"), config_cls)(**{**_BASE, **values})
    model = getattr(importlib.import_module(f"{package}.modeling_{name}"), f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.dim() >= 2:
                gain = 0.3 if ".gate." in key or "router" in key else 0.7 / min(tensor.shape[-1], 64) ** 0.5
                tensor.copy_(gain * torch.randn(tensor.shape, generator=generator))
            elif key.endswith(("correction_bias", "expert_bias")):
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
            elif key.endswith("tid2eid"):
                table = [torch.randperm(12, generator=generator)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
                tensor.copy_(torch.stack(table))
    return model.eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random ids, none of them special."""
    return torch.randint(2, VOCABULARY, (batch, length))
