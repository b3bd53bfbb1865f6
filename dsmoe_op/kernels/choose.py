"""logits -> chosen experts and weights of some tokens. The definition is `reference.route`; route.py launches it."""

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
def _unordered(ordered):
    """The float32 value of `_ordered`."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _fixed(exp):
    """int64 multiples of 2^-40 of what lies in [0, 1]: the sum of a softmax is exact, so that no layout decides a bit.

    As the largest one is 1, what is cut off is less than the sum's own rounding.
    """
    return (exp * 1099511627776.0).to(tl.int64)


@triton.jit
def _total(fixed):
    """float32, nearest to a sum of `_fixed`; 1 where that is 0, which it is if all logits are -inf."""
    return tl.where(fixed == 0, 1.0, fixed.to(tl.float32) * (1.0 / 1099511627776.0))


@triton.jit
def _logits_at(
    logits_ptr,
    id,
    inside,
    split_stride,
    num_splits,
    router_bias_ptr,
    SPLITS: tl.constexpr,
    ROUND_TO: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Sanitised logits of these ids, -inf outside: partial sums by ascending split, the bias, one rounding.

    AT_ONCE: how many partial sums of each may be under way at once, by the registers.
    """
    logits = tl.load(logits_ptr + id, mask=inside, other=float("-inf"))
    if SPLITS > 1:
        for split in tl.static_range(1, min(SPLITS, AT_ONCE)):
            there = inside & (tl.full(id.shape, split, tl.int32) < num_splits)
            logits += tl.load(logits_ptr + split * split_stride + id, mask=there, other=0.0)
    if SPLITS > AT_ONCE:
        first = AT_ONCE
        while first < num_splits:
            for i in tl.static_range(AT_ONCE):
                there = inside & (tl.full(id.shape, i, tl.int32) < num_splits - first)
                logits += tl.load(logits_ptr + (first + i) * split_stride + id, mask=there, other=0.0)
            first += AT_ONCE
    if router_bias_ptr is not None:
        bias = tl.load(router_bias_ptr + id, mask=inside, other=0.0)
        logits = logits.to(tl.float32) + bias.to(tl.float32)
    if ROUND_TO is not None:
        logits = _rounded(logits, ROUND_TO)
    return _sanitised(logits)


@triton.jit
def choose_tokens(
    first_token,
    end_token,
    logits_ptr,
    logits_stride,
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
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
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
    """Writes the tokens' ids and weights, -1 and 0 where a slot contributes nothing.

    A token's padded logits are [R, LANES] (suffix RWL with the tokens): of a group's members, LANES at a time make a
    row. Lanes lie along a warp's, tokens along warps and rows in a thread's registers; the choices of a token (WK) lie
    along a warp's lanes. So nothing here crosses warps. Memory is accessed in shapes that Triton lays out so, whatever
    its version: [Q, LANES], where Q is rows and tokens, the latter fastest, and [P], tokens and choices. Strides are
    runtime numbers, of which it knows no alignment that would allow for wider loads, which would cross warps.

    Args:
        first_token, end_token: int64; at most TOKENS tokens.
        logits_ptr: logits of the first split.
        logits_stride: elements between tokens.
        split_stride: elements between the partial sums of a logit, of which there are num_splits <= SPLITS.
        ROUND_TO: dtype to which the logits are rounded, router_bias included; None for none.
        K_PAD: a power of two, at least LANES.
        E, E_ROUTING, Z: as in `local_experts`.

    Returns:
        int32 [TOKENS * K_PAD]: row of the weights of each slot's expert, E where the slot has none.
    """
    NEVER: tl.constexpr = -(2**31)
    MOST: tl.constexpr = 2**31 - 1
    ROWS: tl.constexpr = MEMBERS_PAD // LANES  # of a group
    R: tl.constexpr = GROUPS_PAD * ROWS
    l_L = tl.arange(0, LANES)
    q_Q = tl.arange(0, R * TOKENS)
    r_Q = q_Q // TOKENS
    token_Q = first_token + q_Q % TOKENS
    m_QL = (r_Q % ROWS * LANES)[:, None] + l_L[None, :]
    id_QL = (r_Q // ROWS * MEMBERS)[:, None] + m_QL
    inside_QL = (r_Q // ROWS < GROUPS)[:, None] & (m_QL < MEMBERS) & (token_Q < end_token)[:, None]
    p_P = tl.arange(0, TOKENS * K_PAD)
    k_P = p_P % K_PAD
    token_P = first_token + p_P // K_PAD
    inside_P = (k_P < K) & (token_P < end_token)
    k_K = tl.arange(0, K_PAD)[None, :]

    # All loads first, so that none waits for a result.
    if num_valid_ptr is not None:
        num_valid = tl.load(num_valid_ptr)
    if bias_ptr is not None:
        bias_QL = tl.load(bias_ptr + id_QL, mask=inside_QL, other=0.0).to(tl.float32)
    logits_QL = _logits_at(
        logits_ptr + (token_Q * logits_stride)[:, None], id_QL, inside_QL, split_stride, num_splits, router_bias_ptr,
        SPLITS, ROUND_TO, max(1, 128 // R),
    )  # fmt: skip
    logits_RWL = tl.reshape(logits_QL, [R, TOKENS, LANES])
    r_R = tl.arange(0, R)[:, None, None]
    m_RL = r_R % ROWS * LANES + l_L[None, None, :]
    inside_RL = (r_R // ROWS < GROUPS) & (m_RL < MEMBERS)

    top_W = tl.zeros([TOKENS], tl.float32)
    total_W = tl.full([TOKENS], 1.0, tl.float32)
    if SCORE == "softmax":
        top_W = _unordered(tl.max(tl.max(_ordered(logits_RWL), axis=0), axis=1))
        top_W = tl.where(top_W == float("-inf"), 0.0, top_W)
        exp_RWL = _fixed(exp(logits_RWL - top_W[None, :, None]))  # padding adds exp(-inf) = 0
        total_W = _total(tl.sum(tl.sum(exp_RWL, axis=0), axis=1))

    # Choice.
    if CHOICE_ON == "logit":
        key_RWL = logits_RWL
    else:
        key_RWL = _scores(logits_RWL, top_W[None, :, None], total_W[None, :, None], SCORE, STEP_DTYPE)
    if bias_ptr is not None:
        key_RWL += tl.reshape(bias_QL, [R, TOKENS, LANES])
    key_RWL = _ordered(tl.where(inside_RL & (key_RWL == key_RWL), key_RWL, float("-inf")))
    if TOPK_GROUP > 0:
        key_GRWL = tl.reshape(key_RWL, [GROUPS_PAD, ROWS, TOKENS, LANES])
        best_GW = tl.max(tl.max(key_GRWL, axis=1), axis=2)
        worth_GW = _unordered(best_GW)
        if TOP2_SUM:
            # The second best is the best without one member that holds it.
            m_GRWL = tl.reshape(tl.broadcast_to(m_RL, [R, TOKENS, LANES]), [GROUPS_PAD, ROWS, TOKENS, LANES])
            members_GRWL = tl.where(key_GRWL == best_GW[:, None, :, None], m_GRWL, MEMBERS_PAD)
            first_GW = tl.min(tl.min(members_GRWL, axis=1), axis=2)
            others_GRWL = tl.where(m_GRWL == first_GW[:, None, :, None], NEVER, key_GRWL)
            second_GW = tl.max(tl.max(others_GRWL, axis=1), axis=2)
            worth_GW += tl.where(second_GW == NEVER, float("-inf"), _unordered(second_GW))  # NEVER: of one member
            worth_GW = tl.where(worth_GW == worth_GW, worth_GW, float("-inf"))
        if bias_ptr is None:
            worth_GW = _rounded(worth_GW, STEP_DTYPE)
        g_G = tl.arange(0, GROUPS_PAD)[:, None]
        worth_GW = tl.where(g_G < GROUPS, _ordered(worth_GW), NEVER)
        if GROUPS_PAD <= LANES:
            # A lane counts the groups ahead of one, which stays where they are fewer than TOPK_GROUP.
            own_WL = tl.max(tl.where(g_G[:, :, None] == l_L[None, None, :], worth_GW[:, :, None], NEVER), axis=0)
            ahead_GWL = worth_GW[:, :, None] > own_WL[None, :, :]
            tied_GWL = worth_GW[:, :, None] == own_WL[None, :, :]
            ahead_GWL = ahead_GWL | (tied_GWL & (g_G[:, :, None] < l_L[None, None, :]))
            stays_WL = tl.sum(ahead_GWL.to(tl.int32), axis=0) < TOPK_GROUP
            kept_W = tl.sum(tl.where(stays_WL, 1 << l_L[None, :], 0), axis=1)
            kept_GW = (kept_W[None, :] >> g_G) & 1
        else:
            kept_GW = tl.zeros([GROUPS_PAD, TOKENS], tl.int32)
            for _ in range(TOPK_GROUP):
                best_W = tl.max(worth_GW, axis=0)
                first_W = tl.min(tl.where(worth_GW == best_W[None, :], g_G, GROUPS_PAD), axis=0)
                kept_GW = tl.where(g_G == first_W[None, :], 1, kept_GW)
                worth_GW = tl.where(g_G == first_W[None, :], NEVER, worth_GW)
        lost = _ordered(tl.full([1, 1, 1, 1], LOST, tl.float32))
        key_RWL = tl.reshape(tl.where(kept_GW[:, None, :, None] > 0, key_GRWL, lost), [R, TOKENS, LANES])

    # The best of each lane and its row, then the best of these: no reduction across lanes waits for a row.
    key_RWL = tl.where(inside_RL, key_RWL, NEVER)
    place_WK = tl.zeros([TOKENS, K_PAD], tl.int32)
    for k in range(K):
        best_WL = tl.max(key_RWL, axis=0)
        row_WL = tl.min(tl.where(key_RWL == best_WL[None, :, :], r_R, R), axis=0)
        best_W = tl.max(best_WL, axis=1)
        place_WL = tl.where(best_WL == best_W[:, None], row_WL * LANES + l_L[None, :], MOST)
        place_W = tl.min(place_WL, axis=1)
        row_WL = tl.where(l_L[None, :] == place_W[:, None] % LANES, place_W[:, None] // LANES, R)
        key_RWL = tl.where(r_R == row_WL[None, :, :], NEVER, key_RWL)
        place_WK = tl.where(k_K == k, place_W[:, None], place_WK)
    place_P = tl.reshape(place_WK, [TOKENS * K_PAD])
    ids_P = place_P // MEMBERS_PAD * MEMBERS + place_P % MEMBERS_PAD  # places among the padded ones ascend with ids

    # Weights, from the chosen logits read again: cheaper than to carry the scores through the choice.
    logits_P = _logits_at(
        logits_ptr + token_P * logits_stride, ids_P, inside_P, split_stride, num_splits, router_bias_ptr, SPLITS,
        ROUND_TO, SPLITS,
    )  # fmt: skip
    logits_WK = tl.reshape(logits_P, [TOKENS, K_PAD])
    if WEIGHTS_FROM == "topk_softmax":
        top_W = tl.max(logits_WK, axis=1)
        exp_WK = exp(logits_WK - tl.where(top_W == float("-inf"), 0.0, top_W)[:, None])
        total_W = _total(tl.sum(_fixed(exp_WK), axis=1))
        weights_WK = _rounded(tl.div_rn(exp_WK, total_W[:, None]), STEP_DTYPE)
    elif WEIGHTS_FROM == "topk_sigmoid":
        weights_WK = _rounded(sigmoid(logits_WK), STEP_DTYPE)
    else:
        weights_WK = _scores(logits_WK, top_W[:, None], total_W[:, None], SCORE, STEP_DTYPE)
    weights_WK = tl.where((k_K < K) & (weights_WK != float("-inf")), weights_WK, 0.0)
    if NORMALIZE != "none":
        total_W = tl.zeros([TOKENS], tl.float32)
        bits_WK = weights_WK.to(tl.int32, bitcast=True)
        for k in range(K):  # the largest of int32 is one instruction, and picks a weight
            total_W += tl.max(tl.where(k_K == k, bits_WK, NEVER), axis=1).to(tl.float32, bitcast=True)
        if NORMALIZE == "sum_eps":
            total_W += 1e-20
        elif NORMALIZE == "sum_clamp":
            total_W = tl.where(total_W < 1e-12, 1e-12, total_W)
        total_W = _rounded(total_W, STEP_DTYPE)
        total_W = tl.where(total_W == 0, 1.0, total_W)
        weights_WK = _rounded(tl.div_rn(weights_WK, total_W[:, None]), STEP_DTYPE)
    weights_WK = _rounded(_rounded(weights_WK * SCALE, STEP_DTYPE), WEIGHT_DTYPE)
    weights_P = tl.reshape(weights_WK, [TOKENS * K_PAD])

    if num_valid_ptr is not None:
        ids_P = tl.where(token_P < num_valid, ids_P, -1)
    experts_P = local_experts(ids_P, inside_P, map_ptr, E, E_ROUTING)
    counts_P = (experts_P < E) | ((ids_P >= E_ROUTING) & (ids_P < E_ROUTING + Z))
    slot_P = token_P * K + k_P
    tl.store(ids_ptr + slot_P, tl.where(counts_P, ids_P, -1), mask=inside_P)
    tl.store(weights_ptr + slot_P, tl.where(counts_P, weights_P, 0.0), mask=inside_P)
    return experts_P
