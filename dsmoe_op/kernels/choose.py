"""logits -> chosen experts and weights of some tokens. The definition is `reference.route`; route.py launches it."""

from __future__ import annotations

from typing import Any  # noqa: F401 (of a type comment)

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
def _sum_of_lanes(fixed):
    """int64 sum along axis 1 of such, or of sums of some: two sums of int32, for which a warp has an instruction."""
    low = tl.sum((fixed & 0xFFFFFF).to(tl.int32), axis=1)
    high = tl.sum((fixed >> 24).to(tl.int32), axis=1)
    return (high.to(tl.int64) << 24) + low


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
    parts = ()  # type: tuple[Any, ...]  # loads first, so that all are under way at once
    for split in tl.static_range(1, min(SPLITS, AT_ONCE)):
        there = inside & (tl.full(id.shape, split, tl.int32) < num_splits)
        parts += (tl.load(logits_ptr + split * split_stride + id, mask=there, other=0.0),)
    for i in tl.static_range(len(parts)):
        logits += parts[i]
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
def _of_all(x_W):
    """The value of each warp, now in every warp, along its lanes."""
    return tl.gather(x_W, tl.arange(0, x_W.shape[0]), 0)


@triton.jit
def _pick(key_RWL):
    """The best key of each warp, and its place among the warp's: row * LANES + lane, the lowest of equal ones.

    The best of each lane and its row, then the best of these: no reduction across lanes waits for a row.

    Returns:
        The keys without it, int32 [W] best key, int32 [W] place.
    """
    NEVER: tl.constexpr = -(2**31)
    MOST: tl.constexpr = 2**31 - 1
    R: tl.constexpr = key_RWL.shape[0]
    LANES: tl.constexpr = key_RWL.shape[2]
    r_R = tl.arange(0, R)[:, None, None]
    l_L = tl.arange(0, LANES)[None, :]
    best_WL = tl.max(key_RWL, axis=0)
    row_WL = tl.min(tl.where(key_RWL == best_WL[None, :, :], r_R, R), axis=0)
    best_W = tl.max(best_WL, axis=1)
    place_WL = tl.where(best_WL == best_W[:, None], row_WL * LANES + l_L, MOST)
    place_W = tl.min(place_WL, axis=1)
    key_RWL = tl.where((place_W[:, None] - l_L)[None, :, :] == r_R * LANES, NEVER, key_RWL)
    return key_RWL, best_W, place_W


@triton.jit
def _pick_together(key_RWL, K: tl.constexpr, K_PAD: tl.constexpr):
    """int32 [1, K_PAD]: the places of the K best keys of all warps, the best one first.

    Each warp picks K of its own. The rank of a pick is the number of better ones; none are equal, with a place in them.
    """
    MOST: tl.constexpr = 2**31 - 1
    W: tl.constexpr = key_RWL.shape[1]
    SHARE: tl.constexpr = key_RWL.shape[0] * key_RWL.shape[2]
    tl.static_assert(W * SHARE <= 1 << 16)
    # SGLang puts a function that kernels cannot call in the place of triton.next_power_of_2.
    FEW: tl.constexpr = 1 if K == 1 else 2 if K == 2 else 4 if K <= 4 else 8 if K <= 8 else 16 if K <= 16 else 32
    LANES: tl.constexpr = min(32, W * FEW)
    w_W = tl.arange(0, W)
    k_K = tl.arange(0, K_PAD)[None, :]
    pick_WK = tl.full([W, K_PAD], -(2**63), tl.int64)
    own = ()  # type: tuple[Any, ...]
    for k in tl.static_range(K):
        key_RWL, best_W, place_W = _pick(key_RWL)
        pick_W = (best_W.to(tl.int64) << 32) | (MOST - w_W * SHARE - place_W)
        pick_WK = tl.where(k_K == k, pick_W[:, None], pick_WK)
        own += (pick_W,)
    # Every warp has all picks along its lanes, and ranks its own. Then it learns all ranks, with the places.
    others = ()  # type: tuple[Any, ...]
    for first in tl.static_range(0, W * FEW, LANES):
        c_L = first + tl.arange(0, LANES)
        others += (tl.gather(tl.reshape(pick_WK, [W * K_PAD]), c_L // FEW * K_PAD + c_L % FEW, 0),)
    rank_WK = tl.full([W, K_PAD], W * K, tl.int32)
    for k in tl.static_range(K):
        better_WL = tl.zeros([W, LANES], tl.int32)
        for i in tl.static_range(len(others)):
            better_WL += (others[i][None, :] > own[k][:, None]).to(tl.int32)
        rank_WK = tl.where(k_K == k, tl.sum(better_WL, axis=1)[:, None], rank_WK)
    ranked_WK = (rank_WK << 16) | (MOST - pick_WK.to(tl.int32))
    ranked = ()  # type: tuple[Any, ...]
    for first in tl.static_range(0, W * FEW, LANES):
        c_L = first + tl.arange(0, LANES)
        ranked += (tl.gather(tl.reshape(ranked_WK, [W * K_PAD]), c_L // FEW * K_PAD + c_L % FEW, 0),)
    place_WK = tl.zeros([1, K_PAD], tl.int32)
    for k in tl.static_range(K):
        place_L = tl.zeros([LANES], tl.int32)
        for i in tl.static_range(len(ranked)):
            place_L += tl.where(ranked[i] >> 16 == k, ranked[i] & 0xFFFF, 0)
        place_WK = tl.where(k_K == k, tl.max(place_L), place_WK)
    return place_WK


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
    SHARES: tl.constexpr,
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

    A token's padded logits are rows of LANES: of a group's members, LANES at a time make one. A warp has a token, or,
    where there are SHARES of one token, as many rows as the others of it (suffix W: tokens or shares; RWL: rows of a
    warp, warps, lanes). Lanes lie along a warp's, and rows in a thread's registers; the choices of a token (WK) lie
    along a warp's lanes. So nothing crosses warps but what shares say to each other: integers, and the logits that are
    chosen. Memory is accessed in shapes that Triton lays out so, whatever its version: [Q, LANES], where Q is rows and
    warps, the latter fastest, and [P], tokens and choices. Strides are runtime numbers, of which it knows no alignment
    that would allow for wider loads, which would cross warps.

    Args:
        first_token, end_token: int64; at most TOKENS tokens.
        logits_ptr: logits of the first split.
        logits_stride: elements between tokens.
        split_stride: elements between the partial sums of a logit, of which there are num_splits <= SPLITS.
        ROUND_TO: dtype to which the logits are rounded, router_bias included; None for none.
        K_PAD: a power of two, at least LANES.
        SHARES: warps of a token; TOKENS is 1 where there are several. Where groups are chosen, a share has whole ones.
        E, E_ROUTING, Z: as in `local_experts`.

    Returns:
        int32 [TOKENS * K_PAD]: row of the weights of each slot's expert, E where the slot has none.
    """
    NEVER: tl.constexpr = -(2**31)
    ROWS: tl.constexpr = MEMBERS_PAD // LANES  # of a group
    G: tl.constexpr = max(1, GROUPS_PAD // SHARES)  # of a share
    R: tl.constexpr = GROUPS_PAD * ROWS // SHARES
    W: tl.constexpr = TOKENS * SHARES
    tl.static_assert(SHARES == 1 or TOKENS == 1)
    l_L = tl.arange(0, LANES)
    q_Q = tl.arange(0, R * W)
    r_Q = q_Q % SHARES * R + q_Q // W
    token_Q = first_token + q_Q % W // SHARES
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
    if SHARES > 1:
        tl.debug_barrier()  # or the compiler lets these wait for the logits
    logits_QL = _logits_at(
        logits_ptr + (token_Q * logits_stride)[:, None], id_QL, inside_QL, split_stride, num_splits, router_bias_ptr,
        SPLITS, ROUND_TO, max(1, 128 // R),
    )  # fmt: skip
    logits_RWL = tl.reshape(logits_QL, [R, W, LANES])
    share_W = tl.arange(0, W) % SHARES
    r_R = tl.arange(0, R)[:, None, None]
    r_RW = share_W[None, :, None] * R + r_R
    m_RWL = r_RW % ROWS * LANES + l_L[None, None, :]
    inside_RWL = (r_RW // ROWS < GROUPS) & (m_RWL < MEMBERS)

    top_W = tl.zeros([TOKENS], tl.float32)
    total_W = tl.full([TOKENS], 1.0, tl.float32)
    if SCORE == "softmax":
        top_W = tl.max(tl.max(_ordered(logits_RWL), axis=0), axis=1)
        if SHARES > 1:
            top_W = tl.max(_of_all(top_W), axis=0, keep_dims=True)
        top_W = _unordered(top_W)
        top_W = tl.where(top_W == float("-inf"), 0.0, top_W)
        exp_RWL = _fixed(exp(logits_RWL - top_W[None, :, None]))  # padding adds exp(-inf) = 0
        total_W = _sum_of_lanes(tl.sum(exp_RWL, axis=0))
        if SHARES > 1:
            total_W = tl.sum(_of_all(total_W), axis=0, keep_dims=True)
        total_W = _total(total_W)

    # Choice.
    score_RWL = logits_RWL
    if CHOICE_ON == "score":
        score_RWL = _scores(logits_RWL, top_W[None, :, None], total_W[None, :, None], SCORE, STEP_DTYPE)
    key_RWL = score_RWL
    if bias_ptr is not None:
        key_RWL += tl.reshape(bias_QL, [R, W, LANES])
    key_RWL = _ordered(tl.where(inside_RWL & (key_RWL == key_RWL), key_RWL, float("-inf")))
    if TOPK_GROUP > 0:
        key_GRWL = tl.reshape(key_RWL, [G, ROWS, W, LANES])
        best_GW = tl.max(tl.max(key_GRWL, axis=1), axis=2)
        worth_GW = _unordered(best_GW)
        if TOP2_SUM:
            # The second best is the best without one member that holds it.
            m_GRWL = tl.reshape(m_RWL, [G, ROWS, W, LANES])
            members_GRWL = tl.where(key_GRWL == best_GW[:, None, :, None], m_GRWL, MEMBERS_PAD)
            first_GW = tl.min(tl.min(members_GRWL, axis=1), axis=2)
            others_GRWL = tl.where(m_GRWL == first_GW[:, None, :, None], NEVER, key_GRWL)
            second_GW = tl.max(tl.max(others_GRWL, axis=1), axis=2)
            worth_GW += tl.where(second_GW == NEVER, float("-inf"), _unordered(second_GW))  # NEVER: of one member
            worth_GW = tl.where(worth_GW == worth_GW, worth_GW, float("-inf"))
        if bias_ptr is None:
            worth_GW = _rounded(worth_GW, STEP_DTYPE)
        g_GW = share_W[None, :] * G + tl.arange(0, G)[:, None]
        worth_GW = tl.where(g_GW < GROUPS, _ordered(worth_GW), NEVER)
        if GROUPS_PAD <= LANES:
            # The lanes have the groups' worths. A group stays where fewer than TOPK_GROUP are ahead of it.
            if SHARES > 1:
                worth_L = tl.gather(tl.reshape(worth_GW, [G * W]), l_L % G * W + l_L // G % W, 0)
                worth_WL = tl.where(l_L < GROUPS, worth_L, NEVER)[None, :]
            else:
                is_own_GWL = g_GW[:, :, None] == l_L[None, None, :]
                worth_WL = tl.max(tl.where(is_own_GWL, worth_GW[:, :, None], NEVER), axis=0)
            ahead_GWL = worth_WL[None, :, :] > worth_GW[:, :, None]
            tied_GWL = worth_WL[None, :, :] == worth_GW[:, :, None]
            ahead_GWL = ahead_GWL | (tied_GWL & (l_L[None, None, :] < g_GW[:, :, None]))
            kept_GW = tl.sum(ahead_GWL.to(tl.int32), axis=2) < TOPK_GROUP
        else:
            tl.static_assert(SHARES == 1)
            kept_GW = tl.zeros([G, W], tl.int1)
            for _ in range(TOPK_GROUP):
                best_W = tl.max(worth_GW, axis=0)
                first_W = tl.min(tl.where(worth_GW == best_W[None, :], g_GW, GROUPS_PAD), axis=0)
                kept_GW = kept_GW | (g_GW == first_W[None, :])
                worth_GW = tl.where(g_GW == first_W[None, :], NEVER, worth_GW)
        lost = _ordered(tl.full([1, 1, 1, 1], LOST, tl.float32))
        key_RWL = tl.reshape(tl.where(kept_GW[:, None, :, None], key_GRWL, lost), [R, W, LANES])

    key_RWL = tl.where(inside_RWL, key_RWL, NEVER)
    if SHARES > 1:
        place_WK = _pick_together(key_RWL, K, K_PAD)
    else:
        place_WK = tl.zeros([TOKENS, K_PAD], tl.int32)
        for k in range(K):
            key_RWL, _, place_W = _pick(key_RWL)
            place_WK = tl.where(k_K == k, place_W[:, None], place_WK)
    place_P = tl.reshape(place_WK, [TOKENS * K_PAD])
    ids_P = place_P // MEMBERS_PAD * MEMBERS + place_P % MEMBERS_PAD  # places among the padded ones ascend with ids

    # Weights: of chosen logits that are read again, which is cheaper than to carry scores through the choice, or of
    # what the shares have.
    scored: tl.constexpr = SHARES > 1 and CHOICE_ON == "score" and WEIGHTS_FROM == "score"
    if SHARES > 1:
        from_RWL = score_RWL if scored else logits_RWL
        place_Q = place_P // LANES % R * SHARES + place_P // (R * LANES)
        chosen_P = tl.gather(tl.reshape(from_RWL, [R * W * LANES]), place_Q * LANES + place_P % LANES, 0)
        chosen_P = tl.where(inside_P, chosen_P, float("-inf"))
    else:
        chosen_P = _logits_at(
            logits_ptr + token_P * logits_stride, ids_P, inside_P, split_stride, num_splits, router_bias_ptr, SPLITS,
            ROUND_TO, SPLITS,
        )  # fmt: skip
    logits_WK = tl.reshape(chosen_P, [TOKENS, K_PAD])
    if WEIGHTS_FROM == "topk_softmax":
        top_W = tl.max(logits_WK, axis=1)
        exp_WK = exp(logits_WK - tl.where(top_W == float("-inf"), 0.0, top_W)[:, None])
        total_W = _total(_sum_of_lanes(_fixed(exp_WK)))
        weights_WK = _rounded(tl.div_rn(exp_WK, total_W[:, None]), STEP_DTYPE)
    elif WEIGHTS_FROM == "topk_sigmoid":
        weights_WK = _rounded(sigmoid(logits_WK), STEP_DTYPE)
    elif scored:
        weights_WK = logits_WK
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
