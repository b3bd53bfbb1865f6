"""logits -> chosen experts and weights of one token. The definition is `reference.route`; route.py launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from dsmoe_op.kernels.numerics import exp, sigmoid, softplus
from dsmoe_op.kernels.order import local_experts


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
def _ordered(value):
    """int32 that orders like the float32 value, which is no NaN; never the least int32.

    A best value and then its lowest index are two reductions of int32, for which a warp has an instruction each.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first_best(ordered, index):
    """The lowest index of the largest value."""
    return tl.min(tl.where(ordered == tl.max(ordered), index, 0x7FFFFFFF))


@triton.jit
def _logits_at(
    logits_ptr,
    id,
    inside,
    split_stride,
    num_splits,
    router_bias_ptr,
    SPLITS: tl.constexpr,
    LOGITS: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """Sanitised logits of these ids, -inf outside: partial sums by ascending split, the bias, one rounding."""
    logits = tl.load(logits_ptr + id, mask=inside, other=float("-inf"))
    if SPLITS > 1:
        for split in tl.static_range(1, SPLITS):
            there = inside & (id < tl.where(split < num_splits, LOGITS, 0))
            logits += tl.load(logits_ptr + split * split_stride + id, mask=there, other=0.0)
    if router_bias_ptr is not None:
        logits = logits.to(tl.float32) + tl.load(router_bias_ptr + id, mask=inside, other=0.0).to(tl.float32)
    if ROUND_TO is not None:
        logits = _rounded(logits, ROUND_TO)
    return _sanitised(logits)


@triton.jit
def choose_token(
    token,
    logits_ptr,
    split_stride,
    num_splits,
    router_bias_ptr,
    bias_ptr,
    num_valid_ptr,
    map_ptr,
    ids_ptr,
    weights_ptr,
    SPLITS: tl.constexpr,
    ROUND_TO: tl.constexpr,
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
    E: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
):
    """Writes the token's ids and weights, -1 and 0 where a slot contributes nothing.

    Args:
        token: int64.
        logits_ptr: the token's first logit, of the first split.
        split_stride: elements between the partial sums of a logit, of which there are num_splits <= SPLITS.
        ROUND_TO: dtype to which the logits are rounded, router_bias included; None for none.
        E, E_ROUTING, Z: as in `local_experts`.

    Returns:
        int32 [K_PAD]: row of the weights of each slot's expert, E where the slot has none.
    """
    NEVER: tl.constexpr = -(2**31)
    LOGITS: tl.constexpr = GROUPS * MEMBERS
    k_K = tl.arange(0, K_PAD)
    inside_K = k_K < K
    g_G = tl.arange(0, GROUPS_PAD)
    m_M = tl.arange(0, MEMBERS_PAD)
    id_GM = g_G[:, None] * MEMBERS + m_M[None, :]
    inside_GM = (g_G < GROUPS)[:, None] & (m_M < MEMBERS)[None, :]
    logits_GM = _logits_at(
        logits_ptr, id_GM, inside_GM, split_stride, num_splits, router_bias_ptr, SPLITS, LOGITS, ROUND_TO
    )

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
        if GROUPS_PAD <= 32:
            # One reduction: a group stays where fewer than TOPK_GROUP are ahead of it.
            ahead_GG = worth_G[:, None] > worth_G[None, :]
            ahead_GG = ahead_GG | ((worth_G[:, None] == worth_G[None, :]) & (g_G[:, None] < g_G[None, :]))
            ahead_GG = ahead_GG & (g_G < GROUPS)[:, None]
            kept_G = tl.sum(ahead_GG.to(tl.int32), axis=0) < TOPK_GROUP
        else:
            ordered_G = tl.where(g_G < GROUPS, _ordered(worth_G), NEVER)
            kept_G = g_G < 0
            for _ in range(TOPK_GROUP):
                best_G = g_G == _first_best(ordered_G, g_G)
                kept_G = kept_G | best_G
                ordered_G = tl.where(best_G, NEVER, ordered_G)
        key_GM = tl.where(kept_G[:, None], key_GM, LOST)

    # Positions among the padded logits, which ascend with the ids.
    p_P = tl.arange(0, GROUPS_PAD * MEMBERS_PAD)
    ordered_GM = tl.where(inside_GM, _ordered(key_GM), NEVER)
    ordered_P = tl.reshape(ordered_GM, [GROUPS_PAD * MEMBERS_PAD])
    place_K = tl.zeros([K_PAD], tl.int32)
    for k in range(K):
        best = _first_best(ordered_P, p_P)
        ordered_P = tl.where(p_P == best, NEVER, ordered_P)
        place_K = tl.where(k_K == k, best, place_K)
    ids_K = place_K // MEMBERS_PAD * MEMBERS + place_K % MEMBERS_PAD

    # Weights, from the chosen logits read again: cheaper than to carry the scores through the choice.
    logits_K = _logits_at(
        logits_ptr, ids_K, inside_K, split_stride, num_splits, router_bias_ptr, SPLITS, LOGITS, ROUND_TO
    )
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
        ids_K = tl.where(token < tl.load(num_valid_ptr), ids_K, -1)
    experts_K = local_experts(ids_K, inside_K, map_ptr, E, E_ROUTING)
    counts_K = (experts_K < E) | ((ids_K >= E_ROUTING) & (ids_K < E_ROUTING + Z))
    tl.store(ids_ptr + token * K + k_K, tl.where(counts_K, ids_K, -1), mask=inside_K)
    tl.store(weights_ptr + token * K + k_K, tl.where(counts_K, weights_K, 0.0), mask=inside_K)
    return experts_K
