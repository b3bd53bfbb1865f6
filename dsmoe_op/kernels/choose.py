"""logits -> chosen experts and their weights, one program a row. The definition is `reference.route`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import TL_DTYPE, launch, row_stride
from dsmoe_op.kernels.numerics import exp, sigmoid, softplus


def choose(
    logits_TE: Tensor,
    correction_bias: Tensor | None,
    num_valid_tokens: Tensor | None,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    config: MoEConfig,
    model_dtype: torch.dtype,
    warmup: bool = False,
) -> None:
    """Scores, choice and weights of each row.

    Args:
        logits_TE: [T, E+Z], any float dtype, any row stride, unit stride in the last dim.
        correction_bias: [E+Z] contiguous, any float dtype.
        num_valid_tokens: int32 [1]; rows from there on get ids -1 and weights 0.
        topk_ids_TK, topk_weights_TK: written; int32 and float32 [T, K], contiguous.
        model_dtype: what "model" means in the config's dtypes.
    """
    T, E = logits_TE.shape
    if T == 0:
        return
    groups = config.n_group or 1
    members = E // groups
    padded = triton.next_power_of_2(groups) * triton.next_power_of_2(members)
    launch(
        _choose,
        (T,),
        (logits_TE, row_stride(logits_TE), correction_bias, num_valid_tokens, topk_ids_TK, topk_weights_TK),
        {
            "K": config.top_k,
            "K_PAD": triton.next_power_of_2(config.top_k),
            "GROUPS": groups,
            "GROUPS_PAD": triton.next_power_of_2(groups),
            "MEMBERS": members,
            "MEMBERS_PAD": triton.next_power_of_2(members),
            "TOPK_GROUP": config.topk_group or 0,
            "TOP2_SUM": config.group_score == "top2_sum",
            "LOST": float("-inf") if config.group_mask == "-inf" else 0.0,
            "SCORE": config.score,
            "CHOICE_ON": config.choice_on,
            "WEIGHTS_FROM": config.weights_from,
            "NORMALIZE": config.normalize,
            "SCALE": config.scale_in_weights,
            "STEP_DTYPE": TL_DTYPE[model_dtype] if config.score_dtype == "model" else tl.float32,
            "WEIGHT_DTYPE": TL_DTYPE[model_dtype] if config.weight_dtype == "model" else tl.float32,
            "num_warps": 1 if padded <= 1024 else 4,
        },
        warmup=warmup,
    )


@triton.jit
def _sanitised(logits):
    """float32; NaN counts as -inf, +inf as the largest float32."""
    logits = logits.to(tl.float32)
    logits = tl.where(logits != logits, float("-inf"), logits)
    return tl.where(logits > 3.4028234663852886e38, 3.4028234663852886e38, logits)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _scores(logits, top, total, SCORE: tl.constexpr, DTYPE: tl.constexpr):
    """Scores of sanitised logits; top and total are those of the row's softmax."""
    score = logits
    if SCORE == "sigmoid":
        score = _rounded(sigmoid(logits), DTYPE)
    elif SCORE == "softmax":
        score = _rounded(tl.div_rn(exp(logits - top), total), DTYPE)
    elif SCORE == "sqrtsoftplus":
        score = _rounded(tl.sqrt_rn(_rounded(softplus(logits), DTYPE)), DTYPE)
    return score


@triton.jit
def _ranked(value, index):
    """int64 that orders like (value, then lower index first), so that one max finds both; never the least int64."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(ranked):
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit(
    do_not_specialize=["logits_stride"],
    do_not_specialize_on_alignment=["logits_ptr", "bias_ptr", "num_valid_ptr"],
)
def _choose(
    logits_ptr,
    logits_stride,
    bias_ptr,
    num_valid_ptr,
    ids_ptr,
    weights_ptr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBERS_PAD: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    LOST: tl.constexpr,
    SCORE: tl.constexpr,
    CHOICE_ON: tl.constexpr,
    WEIGHTS_FROM: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    STEP_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
):
    NEVER: tl.constexpr = -(2**63)
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * logits_stride
    k_K = tl.arange(0, K_PAD)
    inside_K = k_K < K

    g_G = tl.arange(0, GROUPS_PAD)
    m_M = tl.arange(0, MEMBERS_PAD)
    id_GM = g_G[:, None] * MEMBERS + m_M[None, :]
    inside_GM = (g_G < GROUPS)[:, None] & (m_M < MEMBERS)[None, :]
    logits_GM = _sanitised(tl.load(logits_ptr + id_GM, mask=inside_GM, other=float("-inf")))

    top = 0.0
    total = 1.0
    if SCORE == "softmax":
        top = tl.max(logits_GM)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(exp(logits_GM - top))  # padding adds exp(-inf) = 0
        total = tl.where(total == 0, 1.0, total)

    # Choice.
    if CHOICE_ON == "logit":
        key_GM = logits_GM
    else:
        key_GM = _scores(logits_GM, top, total, SCORE, STEP_DTYPE)
    if bias_ptr is not None:
        key_GM += tl.load(bias_ptr + id_GM, mask=inside_GM, other=0.0).to(tl.float32)
    key_GM = tl.where(inside_GM & (key_GM == key_GM), key_GM, float("-inf"))
    if TOPK_GROUP > 0:
        worth_G = tl.max(key_GM, axis=1)
        if TOP2_SUM:
            # The second best is the best without one member that holds it.
            first_G = tl.min(tl.where(key_GM == worth_G[:, None], m_M[None, :], MEMBERS_PAD), axis=1)
            worth_G += tl.max(tl.where(m_M[None, :] == first_G[:, None], float("-inf"), key_GM), axis=1)
            worth_G = tl.where(worth_G == worth_G, worth_G, float("-inf"))
        if bias_ptr is None:
            worth_G = _rounded(worth_G, STEP_DTYPE)
        ranked_G = tl.where(g_G < GROUPS, _ranked(worth_G, g_G), NEVER)
        kept_G = g_G < 0
        for _ in range(TOPK_GROUP):
            best = tl.max(ranked_G)
            kept_G = kept_G | (ranked_G == best)
            ranked_G = tl.where(ranked_G == best, NEVER, ranked_G)
        key_GM = tl.where(kept_G[:, None], key_GM, LOST)

    ranked_GM = tl.where(inside_GM, _ranked(key_GM, id_GM), NEVER)
    ranked_E = tl.reshape(ranked_GM, [GROUPS_PAD * MEMBERS_PAD])
    chosen_K = tl.zeros([K_PAD], tl.int32)
    for k in range(K):
        best = tl.max(ranked_E)
        ranked_E = tl.where(ranked_E == best, NEVER, ranked_E)
        chosen_K = tl.where(k_K == k, _index_of(best), chosen_K)

    # Weights, from the chosen logits read again: cheaper than to carry the scores through the choice.
    logits_K = _sanitised(tl.load(logits_ptr + chosen_K, mask=inside_K, other=float("-inf")))
    if WEIGHTS_FROM == "topk_softmax":
        top = tl.max(logits_K)
        exp_K = exp(logits_K - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(exp_K)
        weights_K = _rounded(tl.div_rn(exp_K, tl.where(total == 0, 1.0, total)), STEP_DTYPE)
    elif WEIGHTS_FROM == "topk_sigmoid":
        weights_K = _rounded(sigmoid(logits_K), STEP_DTYPE)
    else:
        weights_K = _scores(logits_K, top, total, SCORE, STEP_DTYPE)
    weights_K = tl.where(inside_K & (weights_K != float("-inf")), weights_K, 0.0)
    if NORMALIZE != "none":
        total = 0.0
        for k in range(K):
            total += tl.sum(tl.where(k_K == k, weights_K, 0.0))
        if NORMALIZE == "sum_eps":
            total += 1e-20
        elif NORMALIZE == "sum_clamp":
            total = tl.where(total < 1e-12, 1e-12, total)
        total = _rounded(total, STEP_DTYPE)
        total = tl.where(total == 0, 1.0, total)
        weights_K = _rounded(tl.div_rn(weights_K, total), STEP_DTYPE)
    weights_K = _rounded(_rounded(weights_K * SCALE, STEP_DTYPE), WEIGHT_DTYPE)

    if num_valid_ptr is not None:
        valid = token < tl.load(num_valid_ptr)
        chosen_K = tl.where(valid, chosen_K, -1)
        weights_K = tl.where(valid, weights_K, 0.0)
    tl.store(ids_ptr + token * K + k_K, chosen_K, mask=inside_K)
    tl.store(weights_ptr + token * K + k_K, weights_K, mask=inside_K)
