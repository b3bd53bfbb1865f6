"""Small Hugging Face models of many families, with random weights under which their answers mean something.

A config is the one table of sizes in `_fields`, cut to what its config class has, and what is the family's own.
transformers is imported at the first call.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsmoe_op.cli import arguments
from dsmoe_op.cli.output import CommandError

VOCAB = 320
"""The 256 bytes, and room for special tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How big a model is: `layers` in all, `hidden` a multiple of 64, `experts` routed ones in each MoE layer."""

    layers: int
    hidden: int
    experts: int
    positions: int = 4096

    @property
    def top_k(self) -> int:
        return min(4, max(1, self.experts // 2))

    @property
    def groups(self) -> int:
        return 4 if self.experts % 4 == 0 and self.experts >= 8 else 1

    @property
    def width(self) -> int:
        """Of one expert."""
        return self.hidden // 2


class SmallFamily(NamedTuple):
    """A folder of transformers.models, its config class, its causal language model, and config fields of its own."""

    package: str
    config: str
    model: str
    own: Callable[[Size], dict[str, Any]]

    @property
    def folder(self) -> str:
        return f"transformers.models.{self.package}"


def _fields(size: Size) -> dict[str, Any]:
    """Config fields under all the names that families give them."""
    H, I, E, K = size.hidden, size.width, size.experts, size.top_k
    head = H // 4
    same = {
        E: "n_routed_experts num_experts num_local_experts moe_num_experts",
        K: "num_experts_per_tok moe_k moe_topk",
        2: "n_shared_experts num_shared_experts moe_num_shared_experts",
        2 * I: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
        2.5: "routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor",
        None: "pad_token_id bos_token_id eos_token_id",
    }
    return {
        **{name: value for value, names in same.items() for name in names.split()},
        "vocab_size": VOCAB,
        "max_position_embeddings": size.positions,
        "sliding_window": size.positions,
        "tie_word_embeddings": False,
        "hidden_size": H,
        "num_hidden_layers": size.layers,
        "intermediate_size": 2 * H,
        "moe_intermediate_size": I,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": head,
        "q_lora_rank": 2 * head,
        "kv_lora_rank": head,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": head // 2,
        "v_head_dim": head,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
        "linear_num_heads": 4,
        "linear_head_dim": head,
        "n_group": size.groups,
        "topk_group": max(1, size.groups // 2),
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (size.layers - 1),
        "mlp_only_layers": [],
        "num_mtp_layers": 0,
    }


def _full(size: Size) -> dict[str, Any]:
    """No sliding windows: their static cache counts tokens in Python, which a captured step would never advance."""
    return {"layer_types": ["full_attention"] * size.layers}


def _linear_and_full(size: Size) -> dict[str, Any]:
    """Layers of linear attention; the last is of full attention, since a static cache without one knows no length."""
    return {"layer_types": ["linear_attention"] * (size.layers - 1) + ["full_attention"]}


def _nemotron_h(size: Size) -> dict[str, Any]:
    kinds = ("full_attention", "moe", "linear_attention", "moe")
    return {
        "layers_block_type": [kinds[i % 4] for i in range(size.layers)],
        "mamba_num_heads": 4,
        "mamba_head_dim": size.hidden // 4,
        "n_groups": 2,
        "ssm_state_size": 16,
    }


def _longcat(size: Size) -> dict[str, Any]:
    """Two attentions a layer; the shared path is a dense MLP beside the block, the block itself has none."""
    return {"num_layers": size.layers, "zero_expert_num": 4, "head_dim": size.hidden // 8}


def _family(package: str, prefix: str, text: str = "", *, own: Any = None, model: str | None = None) -> SmallFamily:
    return SmallFamily(package, f"{prefix}{text}Config", model or f"{prefix}ForCausalLM", own or (lambda size: {}))


FAMILIES: dict[str, SmallFamily] = {
    family.package: family
    for family in (
        _family("afmoe", "Afmoe", own=_full),
        _family("aria", "Aria", "Text", own=lambda s: {"intermediate_size": s.width}, model="AriaTextForCausalLM"),
        _family("axk1", "AXK1"),
        _family("axk2", "AXK2"),
        _family("bailing_hybrid", "BailingHybrid", own=_linear_and_full),
        _family("cohere2_moe", "Cohere2Moe", own=_full),
        _family("deepseek_v2", "DeepseekV2", own=lambda s: {"topk_method": "group_limited_greedy"}),
        _family("deepseek_v3", "DeepseekV3"),
        _family("deepseek_v32", "DeepseekV32"),
        _family("dots1", "Dots1"),
        _family("ernie4_5_moe", "Ernie4_5_Moe"),
        _family("exaone_moe", "ExaoneMoe", own=_full),
        _family("flint", "Flint", own=_full),
        _family("glm4_moe", "Glm4Moe"),
        _family("glm4_moe_lite", "Glm4MoeLite"),
        _family("glm_moe_dsa", "GlmMoeDsa"),
        _family("gpt_oss", "GptOss", own=lambda s: {"intermediate_size": s.width, **_full(s)}),
        _family("hunyuan_v1_moe", "HunYuanMoEV1", own=lambda s: {"intermediate_size": s.width}),
        _family("hy_v3", "HYV3"),
        _family("hy_v4", "HYV4"),
        _family("kimi_linear", "KimiLinear", own=_linear_and_full),
        _family("kolibri1", "Kolibri1", own=_full),
        _family("laguna", "Laguna", own=_full),
        _family(
            "llama4",
            "Llama4",
            "Text",
            own=lambda s: {"intermediate_size": s.width, "num_experts_per_tok": 1, **_full(s)},
        ),
        _family("longcat_flash", "LongcatFlash", own=_longcat),
        _family("minimax_m2", "MiniMaxM2", own=lambda s: {"intermediate_size": s.width}),
        _family("minimax_m3_vl", "MiniMaxM3VL", "Text", own=lambda s: {"intermediate_size": s.width}),
        _family("mistral4", "Mistral4"),
        _family("mixtral", "Mixtral", own=lambda s: {"intermediate_size": s.width, "sliding_window": None}),
        _family("nemotron_h", "NemotronH", own=_nemotron_h),
        _family("olmoe", "Olmoe", own=lambda s: {"intermediate_size": s.width}),
        _family("qwen2_moe", "Qwen2Moe"),
        _family("qwen3_5_moe", "Qwen3_5Moe", "Text", own=_linear_and_full),
        _family("qwen3_moe", "Qwen3Moe"),
        _family("qwen3_next", "Qwen3Next", own=_linear_and_full),
        _family("solar_open", "SolarOpen"),
    )
}


def installed() -> list[str]:
    """The names of FAMILIES that the installed transformers has.

    Raises:
        ImportError: there is no transformers.
    """
    importlib.import_module("transformers")
    return [name for name, family in FAMILIES.items() if importlib.util.find_spec(family.folder) is not None]


def check_installed(name: str, parser: argparse.ArgumentParser) -> None:
    """Ends the command where there is no such family.

    Raises:
        CommandError: there is no transformers.
    """
    try:
        names = installed()
    except ImportError as error:
        raise CommandError(f"transformers cannot be imported ({error}): pip install 'dsmoe_op[run]'") from None
    if name not in names:
        import transformers

        lacks = f"transformers {transformers.__version__} has no {name}"
        parser.error(f"argument --family: {lacks} (choose from {', '.join(names)})")


def add_size(parser: Any) -> None:
    """The arguments that `size` reads."""
    add = parser.add_argument
    layers = arguments.integer(2, 128)
    add("--layers", type=layers, default=4, metavar="N", help="some families keep the first dense (4)")
    add("--hidden", type=arguments.integer(64, 8192, 64), default=256, metavar="N", help="a multiple of 64 (256)")
    add("--experts", type=arguments.integer(2, 1024), default=16, metavar="N", help="routed experts of a layer (16)")


def size(options: argparse.Namespace) -> Size:
    return Size(layers=options.layers, hidden=options.hidden, experts=options.experts)


def build(name: str, size: Size, *, dtype: torch.dtype, device: torch.device | str, seed: int) -> nn.Module:
    """A causal language model in eval mode; the same weights, rounded to `dtype`, wherever it is built.

    Parameters that transformers keeps in float32 when it loads a checkpoint in `dtype` are float32.
    """
    family = FAMILIES[name]
    config_class = getattr(importlib.import_module(f"{family.folder}.configuration_{family.package}"), family.config)
    model_class = getattr(importlib.import_module(f"{family.folder}.modeling_{family.package}"), family.model)
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    fields = {field: value for field, value in _fields(size).items() if field in known}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**fields, **family.own(size)})).eval()
        _randomize(model, size)
    _cast(model, dtype)
    return model.to(device)


@torch.no_grad()
def _randomize(model: nn.Module, size: Size) -> None:
    """Weights that keep a unit variance through each matmul, so that every layer counts and the logits spread widely.

    Norms, convolutions and the like keep the start that transformers gives them.
    """

    def normal(tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape) * std)

    for name, module in model.named_modules():
        for its_name, tensor in _own_tensors(module):
            chooses = "correction_bias" in its_name or its_name == "expert_bias"
            of_linear = its_name == "bias" and isinstance(module, nn.Linear)
            if chooses or of_linear or (its_name.endswith("_bias") and tensor.dim() == 2):
                normal(tensor, 0.1)
            elif isinstance(module, nn.Embedding):
                normal(tensor, 1.0)
            elif name == "lm_head":
                normal(tensor, 4 * size.hidden**-0.5)
            elif tensor.dim() == 3 and not isinstance(module, nn.Conv1d):
                narrows = (
                    "down" in its_name or "fc2" in its_name
                )  # else stacked experts read the hidden size, in any layout
                normal(tensor, (tensor[0].numel() / size.hidden if narrows else size.hidden) ** -0.5)
            elif tensor.dim() == 2:
                normal(tensor, tensor.shape[1] ** -0.5)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=False) if name.endswith("_bias"))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(names)) or r"(?!)")
    stored = model.state_dict().keys()  # not the tables of rotary embeddings
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored and tensor.is_floating_point() and not kept.search(name):
            tensor.data = tensor.data.to(dtype)
