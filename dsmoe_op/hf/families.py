"""The MoE blocks of Hugging Face transformers that are understood: what each class computes and where it holds what.

Data, read in the forwards of the installed package (5.24, and 5.17 where it differs); `blocks.py` reads a block by it.
Paths are attribute paths: of a router's, expert's or shared expert's own attributes, or of the block where so said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """What a router class computes.

    Attributes:
        words: one line for the table of families.
        fixed: MoEConfig fields that its forward fixes.
        weight, bias: paths of the gate's weight and bias.
        top_k: attribute with K; None where the block's row has it.
        groups: attributes with the number of groups and of the groups kept; a None there is no groups.
        normalize: how weights are normalised, where they are.
        normalize_if: attribute that says whether; None is always.
        scale: attribute with the factor on the weights.
        correction_bias: path of the bias that counts for the choice.
        by_gate_dtype: MoEConfig fields that are "model" only while the gate's weight isn't float32.
        softcap: attribute with a limit c > 0 of the logits, c * tanh(logits / c); 0 is none.
        refine: reads what the rest cannot say; returns MoEConfig fields, raises ValueError "attribute: reason".
        also: attributes that change nothing, or that `refine` reads.
    """

    words: str
    fixed: Mapping[str, Any]
    weight: str = "weight"
    bias: str | None = None
    top_k: str | None = "top_k"
    groups: tuple[str, str] | None = None
    normalize: str = "none"
    normalize_if: str | None = None
    scale: str | None = None
    correction_bias: str | None = None
    by_gate_dtype: tuple[str, ...] = ()
    softcap: str | None = None
    refine: Callable[[nn.Module], dict[str, Any]] | None = None
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """How an experts class holds its weights, [E, 2I, H] and [E, H, I] unless `transposed`.

    Attributes:
        act: attribute with the activation module, or "=name" where the forward names the activation itself.
        clamp: attribute with the limit; None there, or infinity, is no limit.
        zero_experts: attribute with the number of zero experts; w13 may then have rows for them, which nothing reads.
        also: attributes that change nothing.
    """

    w13: str = "gate_up_proj"
    w2: str = "down_proj"
    w13_bias: str | None = None
    w2_bias: str | None = None
    transposed: bool = False
    act: str = "act_fn"
    gated: bool = True
    order: str = "gate_up"
    clamp: str | None = None
    clamp_after_activation: bool = False
    zero_experts: str | None = None
    refine: Callable[[nn.Module], dict[str, Any]] | None = None
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """How a shared expert's class holds its weights: nn.Linear for gate and up, one for both, or one ungated."""

    w13: tuple[str, ...] = ("gate_proj", "up_proj")
    w2: str = "down_proj"
    act: str = "act_fn"
    clamp: str | None = None
    also: tuple[str, ...] = ()


LINEAR = "nn.Linear"


class Part(NamedTuple):
    """A child of a block: its name, its class's name (in the family's module, or LINEAR), and what that class is."""

    name: str
    cls: str
    kind: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One MoE block class.

    Attributes:
        title: the models, for people.
        package: folder of transformers.models.
        block: name of the class.
        router, experts, shared: its parts; shared may be None, or be None in the block where `shared_optional`.
        shared_gate: child, an nn.Linear [H -> 1], whose sigmoid gates the shared expert.
        correction_bias: path of the choice's bias where the block itself holds it; the router is then called with it.
        top_k: path of K in the block, where its router does not hold it.
        scale: attribute of the block with the factor on the routed output.
        average_if: attribute of the block that is "average" where the sum is halved, "sum" where not.
        after: child applied to the sum.
        returns: "hidden"; "hidden, logits" and flattened to [T, H] (Llama-4); or "hidden, weights" (GPT-OSS).
        routed_by_block: whether the block's own router routes, given input_ids, and the op takes its ids and weights.
        router_input: whether the block hands its router [T, H] or what it got.
        refine: as for Router, given the block.
        also: attributes and children that change nothing, or that `refine` reads.
        notes: for the table of families.
    """

    title: str
    package: str
    block: str
    router: Part
    experts: Part
    shared: Part | None = None
    shared_optional: bool = False
    shared_gate: str | None = None
    correction_bias: str | None = None
    top_k: str | None = None
    scale: str | None = None
    average_if: str | None = None
    after: tuple[str, str] | None = None
    returns: str = "hidden"
    routed_by_block: bool = False
    router_input: str = "flat"
    refine: Callable[[nn.Module], dict[str, Any]] | None = None
    also: tuple[str, ...] = ()
    notes: str = ""

    @property
    def module(self) -> str:
        """Name of the module that defines the classes."""
        return f"transformers.models.{self.package}.modeling_{self.package}"


# --- routers --------------------------------------------------------------------------------------------------------


def _deepseek_v2_method(router: nn.Module) -> dict[str, Any]:
    if router.topk_method == "greedy":
        return {"n_group": None, "topk_group": None}
    if router.topk_method != "group_limited_greedy":
        raise ValueError(f"topk_method: expected 'greedy' or 'group_limited_greedy', got {router.topk_method!r}")
    return {}


def _ernie_norm_min(router: nn.Module) -> dict[str, Any]:
    if router.norm_min != 1e-12:
        raise ValueError(f"norm_min: expected 1e-12, got {router.norm_min!r}")
    return {}


def _cohere_selection(router: nn.Module) -> dict[str, Any]:
    if router.expert_selection_fn == "softmax":
        return {"weights_from": "topk_softmax", "normalize": "none"}
    if router.expert_selection_fn == "sigmoid":
        return {"weights_from": "topk_sigmoid", "score_dtype": "model"}
    raise ValueError(f"expert_selection_fn: expected 'softmax' or 'sigmoid', got {router.expert_selection_fn!r}")


def _deepseek_v4_score(router: nn.Module) -> dict[str, Any]:
    name = type(router.score_fn).__name__
    if name not in ("SqrtSoftplusActivation", "Sigmoid"):
        raise ValueError(f"score_fn: expected sqrtsoftplus or sigmoid, got {name}")
    return {"score": "sigmoid" if name == "Sigmoid" else "sqrtsoftplus"}


_SIGMOID_32 = {"score": "sigmoid", "group_score": "top2_sum"}
_MODEL_WEIGHTS = {"router_dtype": "model", "weight_dtype": "model"}

DEEPSEEK_V2 = Router(
    words="softmax; best groups by their best expert, losers 0.0; never normalised",
    fixed={"score": "softmax", "group_score": "max", "group_mask": "zero"},
    groups=("num_group", "topk_group"),
    scale="routed_scaling_factor",
    refine=_deepseek_v2_method,
    also=("topk_method",),
)
DEEPSEEK_V3 = Router(
    words="sigmoid + bias; best groups by their two best, losers -inf; / (sum + 1e-20)",
    fixed={**_SIGMOID_32, "group_mask": "-inf"},
    groups=("num_group", "topk_group"),
    normalize="sum_eps",
    normalize_if="norm_topk_prob",
    scale="routed_scaling_factor",
    correction_bias="e_score_correction_bias",
)
AXK2 = dataclasses.replace(
    DEEPSEEK_V3,
    words="as DeepSeek-V3, losing groups 0.0",
    fixed={**_SIGMOID_32, "group_mask": "zero"},
)
HY_V3 = Router(
    words="sigmoid + bias; / (sum + 1e-20)",
    fixed={"score": "sigmoid"},
    normalize="sum_eps",
    scale="router_scaling_factor",
)
AFMOE = Router(
    words="logits in the model's dtype; sigmoid + bias; / (sum + 1e-20)",
    fixed={"score": "sigmoid", "router_dtype": "model"},
    weight="gate.weight",
    normalize="sum_eps",
    scale="route_scale",
    also=("gate",),
)
HUNYUAN = Router(
    words="softmax; / sum; logits and weights in the gate's dtype",
    fixed={"score": "softmax", **_MODEL_WEIGHTS},
    weight="wg.weight",
    normalize="sum",
    by_gate_dtype=("router_dtype", "weight_dtype"),
    also=("wg",),
)
QWEN = Router(
    words="logits in the model's dtype; softmax; / sum; weights in the model's dtype",
    fixed={"score": "softmax", **_MODEL_WEIGHTS},
    normalize="sum",
    normalize_if="norm_topk_prob",
)
QWEN_NORMALIZED = dataclasses.replace(QWEN, normalize_if=None)
ERNIE = Router(
    words="softmax + bias; / max(sum, 1e-12); weights in the model's dtype",
    fixed={"score": "softmax", "weight_dtype": "model"},
    normalize="sum_clamp",
    correction_bias="moe_statics.e_score_correction_bias",
    refine=_ernie_norm_min,
    also=("norm_min", "moe_statics"),
)
LLAMA4 = Router(
    words="logits in the model's dtype; sigmoid of the chosen, on the experts' input",
    fixed={"score": "none", "weights_from": "topk_sigmoid", "apply_router_weight_on_input": True, **_MODEL_WEIGHTS},
    also=("in_features", "out_features"),
)
ARIA = Router(
    words="logits in the model's dtype; softmax over the chosen",
    fixed={"score": "none", "weights_from": "topk_softmax", **_MODEL_WEIGHTS},
)
COHERE2 = Router(
    words="logits in the model's dtype; softmax over the chosen, or their sigmoids / sum",
    fixed={"score": "none", **_MODEL_WEIGHTS},
    normalize="sum",
    normalize_if="norm_topk_prob",
    refine=_cohere_selection,
    also=("expert_selection_fn",),
)
MISTRAL4 = Router(
    words="softmax in the model's dtype; best groups by their two best, losers 0.0; / (sum + 1e-20)",
    fixed={
        "score": "softmax",
        "group_score": "top2_sum",
        "group_mask": "zero",
        "score_dtype": "model",
        **_MODEL_WEIGHTS,
    },
    groups=("num_group", "topk_group"),
    normalize="sum_eps",
    normalize_if="norm_topk_prob",
    scale="routed_scaling_factor",
)
MISTRAL_LARGE4 = Router(
    words="softmax; best groups by their two best, losers 0.0; / (sum + 1e-20)",
    fixed={"score": "softmax", "group_score": "top2_sum", "group_mask": "zero"},
    groups=("num_group", "topk_group"),
    normalize="sum_eps",
    scale="routed_scaling_factor",
)
FLINT = Router(
    words="sigmoid; / sum",
    fixed={"score": "sigmoid"},
    normalize="sum",
    normalize_if="norm_topk_prob",
)
LAGUNA = Router(
    words="logits (soft cap) in the model's dtype; sigmoid + bias; / sum; weights likewise; factor on output",
    fixed={"score": "sigmoid", **_MODEL_WEIGHTS},
    normalize="sum",
    correction_bias="e_score_correction_bias",
    softcap="router_logit_softcapping",
)
MINIMAX_M3 = Router(
    words="logits in the gate's dtype; sigmoid + bias; / sum; factor on output",
    fixed={"score": "sigmoid", "router_dtype": "model"},
    normalize="sum",
    correction_bias="e_score_correction_bias",
    by_gate_dtype=("router_dtype",),
)
KOLIBRI = Router(
    words="choice by logit + bias; sigmoid of the chosen; / sum",
    fixed={"score": "none", "choice_on": "logit", "weights_from": "topk_sigmoid"},
    normalize="sum",
    normalize_if="norm_topk_prob",
    correction_bias="e_score_correction_bias",
)
DEEPSEEK_V4 = Router(
    words="sqrt(softplus) + bias, all in the model's dtype; / (sum + 1e-20)",
    fixed={"score_dtype": "model", **_MODEL_WEIGHTS},
    normalize="sum_eps",
    scale="routed_scaling_factor",
    correction_bias="e_score_correction_bias",
    refine=_deepseek_v4_score,
    also=("score_fn",),
)
DEEPSEEK_V4_HASH = Router(
    words="experts by a table of input_ids; weights as DeepSeek V4's",
    fixed={},
    also=("score_fn", "routed_scaling_factor", "tid2eid"),
)
LONGCAT = Router(
    words="softmax + bias over experts and zero experts; never normalised",
    fixed={"score": "softmax"},
    weight="classifier.weight",
    scale="routed_scaling_factor",
    correction_bias="e_score_correction_bias",
    also=("n_routed_experts", "router_bias", "classifier"),
)
GPT_OSS = dataclasses.replace(
    ARIA, words="logits with a bias in the model's dtype; softmax over the chosen", bias="bias"
)


# --- experts and shared experts -------------------------------------------------------------------------------------


def _swiglu_alpha(attribute: str) -> Callable[[nn.Module], dict[str, Any]]:
    def refine(module: nn.Module) -> dict[str, Any]:
        alpha = getattr(module, attribute)
        if alpha != 1.702:
            raise ValueError(f"{attribute}: expected 1.702, got {alpha!r}")
        return {}

    return refine


STACKED = Experts()
TRANSPOSED = Experts(transposed=True)
ARIA_GROUPED = Experts(w13="fc1.weight", w2="fc2.weight", transposed=True, act="=silu", also=("fc1", "fc2"))
RELU2 = Experts(w13="up_proj", gated=False)
CLAMPED_SILU = Experts(act="=silu", clamp="swiglu_limit")
CLAMPED = Experts(clamp="limit")
CLAMPED_AFTER = Experts(clamp="limit", clamp_after_activation=True)
SWIGLU_OAI = Experts(
    act="=swiglu_oai", clamp="swiglu_limit", refine=_swiglu_alpha("swiglu_alpha"), also=("limit", "swiglu_alpha")
)
GPT_OSS_EXPERTS = Experts(
    w13_bias="gate_up_proj_bias",
    w2_bias="down_proj_bias",
    transposed=True,
    act="=swiglu_oai",
    order="interleaved",
    clamp="limit",
    refine=_swiglu_alpha("alpha"),
    also=("alpha",),
)
LONGCAT_EXPERTS = Experts(
    zero_experts="zero_expert_num", also=("num_routed_experts", "total_experts", "identity_expert")
)

MLP = Shared()
MLP_CLAMPED = Shared(clamp="limit")
MLP_SWIGLU_LIMIT = Shared(clamp="swiglu_limit")
LLAMA4_MLP = Shared(act="activation_fn")
RELU2_MLP = Shared(w13=("up_proj",))
SWIGLU_OAI_MLP = Shared(w13=("gate_up_proj",), act="=swiglu_oai", clamp="swiglu_limit", also=("swiglu_alpha",))


# --- blocks ---------------------------------------------------------------------------------------------------------


def _nemotron_latent(block: nn.Module) -> dict[str, Any]:
    for name in ("fc1_latent_proj", "fc2_latent_proj"):
        if not isinstance(getattr(block, name), nn.Identity):
            raise ValueError(f"{name}: expected nn.Identity (experts on a latent are not computed), got a projection")
    return {}


def _no_jitter(block: nn.Module) -> dict[str, Any]:
    if block.jitter_noise:
        raise ValueError(f"jitter_noise: expected 0 (noise in training is not computed), got {block.jitter_noise!r}")
    return {}


def _standard(title: str, package: str, prefix: str, router: Router, **other: Any) -> Family:
    """A block laid out as DeepSeek-V3's: gate, experts, shared_experts; its classes named by one prefix."""
    names = {
        "block": prefix + other.pop("block_suffix", "MoE"),
        "router": Part("gate", prefix + other.pop("router_suffix", "TopkRouter"), router),
        "experts": Part("experts", prefix + other.pop("experts_suffix", "Experts"), other.pop("expert_kind", STACKED)),
        "shared": Part(other.pop("shared_name", "shared_experts"), prefix + "MLP", other.pop("shared_kind", MLP)),
    }
    return Family(title=title, package=package, **{**names, **other})


_QWEN_LIKE = {"block_suffix": "SparseMoeBlock", "router_suffix": "TopKRouter"}
_GATED_SHARED = {**_QWEN_LIKE, "shared_name": "shared_expert", "shared_gate": "shared_expert_gate"}
_NO_SHARED = {**_QWEN_LIKE, "shared": None}

FAMILIES: tuple[Family, ...] = (
    _standard("DeepSeek V2", "deepseek_v2", "DeepseekV2", DEEPSEEK_V2, block_suffix="Moe"),
    _standard("DeepSeek V3, R1, Kimi-K2", "deepseek_v3", "DeepseekV3", DEEPSEEK_V3),
    _standard("DeepSeek V3.2", "deepseek_v32", "DeepseekV32", DEEPSEEK_V3),
    _standard(
        "DeepSeek V4",
        "deepseek_v4",
        "DeepseekV4",
        DEEPSEEK_V4,
        **_QWEN_LIKE,
        expert_kind=CLAMPED,
        shared_kind=MLP_CLAMPED,
        also=("is_hash",),
    ),
    _standard(
        "DeepSeek V4, hash layers",
        "deepseek_v4",
        "DeepseekV4",
        DEEPSEEK_V4_HASH,
        **{**_QWEN_LIKE, "router_suffix": "HashRouter"},
        expert_kind=CLAMPED,
        shared_kind=MLP_CLAMPED,
        routed_by_block=True,
        also=("is_hash",),
        notes="the block's own router chooses, by input_ids",
    ),
    _standard("GLM-4 MoE (4.5, 4.6)", "glm4_moe", "Glm4Moe", DEEPSEEK_V3),
    _standard("GLM-4 MoE lite", "glm4_moe_lite", "Glm4MoeLite", DEEPSEEK_V3),
    _standard("GLM-4V MoE", "glm4v_moe", "Glm4vMoeText", DEEPSEEK_V3),
    _standard("GLM-DSA (GLM-5)", "glm_moe_dsa", "GlmMoeDsa", DEEPSEEK_V3),
    _standard(
        "GLM-5-next",
        "glm5_next",
        "Glm5NextText",
        DEEPSEEK_V3,
        expert_kind=CLAMPED_SILU,
        shared_kind=MLP_SWIGLU_LIMIT,
        notes="routed and shared experts clamped",
    ),
    _standard("dots.llm1", "dots1", "Dots1", DEEPSEEK_V3),
    _standard(
        "dots3 note (text)",
        "dots3_note",
        "Dots3NoteText",
        DEEPSEEK_V3,
        experts=Part("experts", "Dots3NoteExperts", STACKED),
    ),
    _standard("Solar-Open", "solar_open", "SolarOpen", DEEPSEEK_V3),
    _standard("Exaone-MoE", "exaone_moe", "ExaoneMoe", DEEPSEEK_V3, block_suffix="SparseMoEBlock"),
    _standard(
        "AXK1",
        "axk1",
        "AXK1",
        DEEPSEEK_V3,
        after=("post_mlp_layernorm", "AXK1RMSNorm"),
        notes="its RMSNorm after the sum stays a module of its own",
    ),
    _standard("AXK2", "axk2", "AXK2", AXK2),
    _standard("Bailing / Ling hybrid", "bailing_hybrid", "BailingHybrid", DEEPSEEK_V3),
    _standard("Kimi-Linear", "kimi_linear", "KimiLinear", DEEPSEEK_V3),
    _standard("MiMo-V2-Flash", "mimo_v2_flash", "MiMoV2Flash", DEEPSEEK_V3, shared=None),
    _standard("DeepSeek-OCR 2 (text)", "deepseek_ocr2", "DeepseekOcr2Text", DEEPSEEK_V2, block_suffix="Moe"),
    _standard("Unlimited-OCR (text)", "unlimited_ocr", "UnlimitedOcrText", DEEPSEEK_V2, block_suffix="Moe"),
    _standard(
        "Nemotron-H",
        "nemotron_h",
        "NemotronH",
        DEEPSEEK_V3,
        expert_kind=RELU2,
        shared_kind=RELU2_MLP,
        refine=_nemotron_latent,
        also=("fc1_latent_proj", "fc2_latent_proj"),
        notes="relu², not gated; experts on a latent (moe_latent_size) are refused",
    ),
    _standard(
        "HY V3",
        "hy_v3",
        "HYV3",
        HY_V3,
        router_suffix="TopKRouter",
        correction_bias="e_score_correction_bias",
        also=("enable_moe_fp32_combine", "top_k"),
        notes="the sum is in float32 whatever enable_moe_fp32_combine says",
    ),
    _standard(
        "HY V4", "hy_v4", "HYV4", DEEPSEEK_V3, expert_kind=CLAMPED_SILU, notes="only the routed experts are clamped"
    ),
    _standard(
        "Hunyuan-V1-MoE (A13B)",
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        HUNYUAN,
        block_suffix="Moe",
        router_suffix="Gate",
        shared_name="shared_mlp",
    ),
    _standard("Qwen2-MoE", "qwen2_moe", "Qwen2Moe", QWEN, **_GATED_SHARED),
    _standard("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", QWEN, **_NO_SHARED),
    _standard("Qwen3-Next", "qwen3_next", "Qwen3Next", QWEN, **_GATED_SHARED),
    _standard("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5Moe", QWEN_NORMALIZED, **_GATED_SHARED),
    _standard("Qwen3-VL-MoE", "qwen3_vl_moe", "Qwen3VLMoeText", QWEN_NORMALIZED, **_NO_SHARED),
    _standard("Qwen3-Omni thinker", "qwen3_omni_moe", "Qwen3OmniMoeThinkerText", QWEN, **_NO_SHARED),
    _standard("Qwen3-Omni talker", "qwen3_omni_moe", "Qwen3OmniMoeTalkerText", QWEN, **_GATED_SHARED),
    _standard("Qwen4 (experimental)", "qwen4_exp", "Qwen4ExpText", QWEN, **_GATED_SHARED),
    _standard("OLMoE", "olmoe", "Olmoe", QWEN, **_NO_SHARED),
    _standard("FlexOlmo", "flex_olmo", "FlexOlmo", QWEN, **_NO_SHARED),
    _standard("Mellum", "mellum", "Mellum", QWEN, **_NO_SHARED),
    Family(
        title="Afmoe",
        package="afmoe",
        block="AfmoeSparseMoeBlock",
        router=Part("router", "AfmoeTokenChoiceRouter", AFMOE),
        experts=Part("experts", "AfmoeExperts", STACKED),
        shared=Part("shared_experts", "AfmoeMLP", MLP),
        correction_bias="expert_bias",
        router_input="as given",
    ),
    _standard("Ernie 4.5 MoE", "ernie4_5_moe", "Ernie4_5_Moe", ERNIE, **_QWEN_LIKE, shared_optional=True),
    Family(
        title="Llama 4 (text)",
        package="llama4",
        block="Llama4TextMoe",
        router=Part("router", "Llama4Router", LLAMA4),
        experts=Part("experts", "Llama4TextExperts", TRANSPOSED),
        shared=Part("shared_expert", "Llama4TextMLP", LLAMA4_MLP),
        returns="hidden, logits",
        notes="weights stored transposed; returns ([T, H], logits)",
    ),
    Family(
        title="Aria (text)",
        package="aria",
        block="AriaTextMoELayer",
        router=Part("router", "AriaTextTopKRouter", ARIA),
        experts=Part("experts", "AriaExperts", TRANSPOSED),
        shared=Part("shared_experts", "AriaSharedExpertsMLP", MLP),
        notes="weights stored transposed",
    ),
    _standard(
        "Cohere2-MoE",
        "cohere2_moe",
        "Cohere2Moe",
        COHERE2,
        **_QWEN_LIKE,
        shared_optional=True,
        average_if="shared_expert_combination_strategy",
        also=("num_shared_experts",),
        notes="routed and shared are averaged, where so configured",
    ),
    _standard("Mistral 4", "mistral4", "Mistral4", MISTRAL4),
    _standard("Mistral Large 4", "mistral_large4", "MistralLarge4Text", MISTRAL_LARGE4),
    _standard("Flint", "flint", "Flint", FLINT, **_QWEN_LIKE, shared_name="shared_expert"),
    _standard("Laguna", "laguna", "Laguna", LAGUNA, **_QWEN_LIKE, scale="routed_scaling_factor"),
    _standard(
        "MiniMax-M3",
        "minimax_m3_vl",
        "MiniMaxM3VL",
        MINIMAX_M3,
        **_QWEN_LIKE,
        expert_kind=SWIGLU_OAI,
        shared=Part("shared_experts", "MiniMaxM3VLDenseMLP", SWIGLU_OAI_MLP),
        scale="routed_scaling_factor",
    ),
    _standard(
        "Step-3.7",
        "step3p7",
        "Step3p7",
        MINIMAX_M3,
        **_QWEN_LIKE,
        expert_kind=CLAMPED_AFTER,
        shared_kind=MLP_CLAMPED,
        scale="routed_scaling_factor",
        notes="clamps after the activation",
    ),
    _standard("Kolibri", "kolibri1", "Kolibri1", KOLIBRI, **_QWEN_LIKE),
    _standard(
        "MiniMax-M2",
        "minimax_m2",
        "MiniMaxM2",
        dataclasses.replace(
            MINIMAX_M3, words="logits in the gate's dtype; sigmoid + bias; / sum", correction_bias=None
        ),
        **_NO_SHARED,
        correction_bias="e_score_correction_bias",
        refine=_no_jitter,
        also=("jitter_noise",),
        notes="router_jitter_noise is refused",
    ),
    _standard(
        "Mixtral",
        "mixtral",
        "Mixtral",
        Router(
            words="logits in the model's dtype; softmax; / sum",
            fixed={"score": "softmax", "router_dtype": "model"},
            normalize="sum",
        ),
        **_NO_SHARED,
        refine=_no_jitter,
        also=("jitter_noise",),
        notes="router_jitter_noise is refused",
    ),
    Family(
        title="LongCat-Flash",
        package="longcat_flash",
        block="LongcatFlashMoE",
        router=Part("router", "LongcatFlashTopkRouter", LONGCAT),
        experts=Part("experts", "LongcatFlashExperts", LONGCAT_EXPERTS),
        notes="zero experts",
    ),
    Family(
        title="GPT-OSS",
        package="gpt_oss",
        block="GptOssMLP",
        router=Part("router", "GptOssTopKRouter", GPT_OSS),
        experts=Part("experts", "GptOssExperts", GPT_OSS_EXPERTS),
        returns="hidden, weights",
        notes="weights stored transposed, gate and up rows alternating, biases; returns (hidden, routing weights)",
    ),
    Family(
        title="Aria (text), transformers 5.17",
        package="aria",
        block="AriaTextMoELayer",
        router=Part("router", LINEAR, dataclasses.replace(ARIA, top_k=None, also=("in_features", "out_features"))),
        experts=Part("experts", "AriaExperts", ARIA_GROUPED),
        shared=Part("shared_experts", "AriaSharedExpertsMLP", MLP),
        top_k="config.moe_topk",
    ),
)


class Row(NamedTuple):
    """A row of the table of families."""

    family: str
    block: str
    router: str
    notes: str


def families() -> list[Row]:
    """The families that load, for the README's table. Imports nothing: the installed transformers may lack some."""
    return [Row(f.title, f"{f.package}.{f.block}", f.router.kind.words, f.notes) for f in FAMILIES]
