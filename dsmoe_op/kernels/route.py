"""Choice and row order, in one launch where both are to be made.

Programs that produce (choose for a few tokens, or count a chunk's slots) come first, those that order a chunk after
them; for the order of all chunks everything that is produced has to be there:

- One chunk: the producer that arrives last orders it. Nobody waits.
- Several: the programs that order them wait until all producers have arrived. Producers never wait, so this ends if
  they get to run. They do:
  - Up to 64 chunks: at most 64 programs wait, and a GPU holds more programs of this kernel at once (at least two on
    each multiprocessor, by their registers), so those that wait never fill it, in whatever order it starts programs.
  - More: each program first draws a ticket, and the first ones to do so are the producers. So when a program begins to
    wait, all producers run already, whatever their number and whatever else fills the GPU, and what runs goes on.
  GPUs also start programs by ascending number, producers first, which keeps waits short.

Arrivals and tickets are counted from zero, which an earlier launch of the call sees to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.arrivals import wait_for
from dsmoe_op.kernels.choose import choose_tokens
from dsmoe_op.kernels.launch import TL_DTYPE, launch, row_stride
from dsmoe_op.kernels.order import (
    TICKETS,
    Rows,
    count_chunk,
    count_slots,
    num_chunks,
    num_zeros,
    order_all,
    order_chunk,
    zero,
)
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.kernels.router import router_splits
from dsmoe_op.tuning import (
    OrderBlock,
    choice_shares,
    choice_tokens,
    order_block,
    order_variants,
    router_most_splits,
    splits_variant,
    splits_variants,
)
from dsmoe_op.tuning import order_chunk_size as chunk_size

MOST_WAITING = tl.constexpr(64)
"""Programs that may wait though others of the launch may not have begun."""


def choose(
    logits: Tensor,
    correction_bias: Tensor | None,
    num_valid_tokens: Tensor | None,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    config: MoEConfig,
    model_dtype: torch.dtype,
    router_bias: Tensor | None = None,
    router_weight: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_experts: int | None = None,
    rows: Rows | None = None,
    counters: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """Scores, choice and weights of each row; with `rows`, their order too.

    Args:
        logits: [T, E+Z], any float dtype, any row stride, unit stride in the last dim; or [P, T, E+Z], float32 and
            contiguous, of which the sum over P is meant.
        correction_bias: [E+Z] contiguous, any float dtype.
        num_valid_tokens: int32 [1]; rows from there on get ids -1 and weights 0.
        topk_ids_TK, topk_weights_TK: written; int32 and float32 [T, K], contiguous. -1 and 0 where a slot contributes
            nothing.
        model_dtype: what "model" means in the config's dtypes.
        router_bias: [E+Z] contiguous, any float dtype; added to the logits.
        router_weight: of `router_logits`, where these logits are its. They are then rounded where the config says so.
        expert_map: int32 [E], id -> row of the weights, -1 for none. None: id = row.
        num_experts: rows of the weights; None for E.
        rows: written; the counters are all zero before.
        counters: without `rows`: those of the `Rows` of an `order_rows` that comes later; zeroed as it needs them.
    """
    splits, T, num_logits = (1, *logits.shape) if logits.dim() == 2 else logits.shape
    if T == 0:
        return
    E_routing = num_logits - config.num_zero_experts
    E = E_routing if num_experts is None else num_experts
    groups = config.n_group or 1
    groups_pad, members_pad = triton.next_power_of_2(groups), triton.next_power_of_2(num_logits // groups)
    lanes = min(32, members_pad)
    args = {
        "logits_ptr": logits,
        "logits_stride": row_stride(logits) if logits.dim() == 2 else num_logits,
        "num_splits": splits,
        "router_bias_ptr": router_bias,
        "bias_ptr": correction_bias,
        "num_valid_ptr": num_valid_tokens,
        "map_ptr": expert_map,
        "ids_ptr": topk_ids_TK,
        "id_stride_t": config.top_k,
        "id_stride_k": 1,
        "weights_ptr": topk_weights_TK,
        "num_slots": T * config.top_k,
    }
    rounds = router_weight is not None and config.router_dtype == "model"
    meta = {
        "ROUND_TO": TL_DTYPE[model_dtype] if rounds else None,
        "K": config.top_k,
        "K_PAD": max(lanes, triton.next_power_of_2(config.top_k)),
        "GROUPS": groups,
        "GROUPS_PAD": groups_pad,
        "MEMBERS": num_logits // groups,
        "MEMBERS_PAD": members_pad,
        "LANES": lanes,
        "TOPK_GROUP": 0 if config.topk_group == config.n_group else config.topk_group,  # 0: every group stays
        "TOP2_SUM": config.group_score == "top2_sum",
        "LOST": float("-inf") if config.group_mask == "-inf" else 0.0,
        "SCORE": config.score,
        "CHOICE_ON": config.choice_on,
        "WEIGHTS_FROM": config.weights_from,
        "NORMALIZE": config.normalize,
        "SCALE": config.scale_in_weights,
        "STEP_DTYPE": TL_DTYPE[model_dtype] if config.score_dtype == "model" else tl.float32,
        "WEIGHT_DTYPE": TL_DTYPE[model_dtype] if config.weight_dtype == "model" else tl.float32,
    }
    if rows is not None:
        args |= _order_args(T * config.top_k, rows, alone=False)
    elif counters is not None:
        args["counters_ptr"] = counters
        args["zeros"] = num_zeros(T * config.top_k, E, alone=True)
    if rows is None:
        blocks: tuple[OrderBlock, ...] = (OrderBlock(0, 4),)
    else:
        blocks = order_variants() if warmup else (order_block(T * config.top_k),)
    for block in blocks:
        variants = {splits_variant(splits)}
        if warmup and router_weight is not None:
            variants = _splits_beside(block, config.top_k, model_dtype, router_weight)
        for variant in sorted(variants):
            _launch(args, meta | {"SPLITS": variant}, E, E_routing, config.num_zero_experts, block, warmup, T=T)


def _splits_beside(block: OrderBlock, top_k: int, dtype: torch.dtype, router_weight: Tensor) -> set[int]:
    """Every `splits_variant` with which an order of such a block can be in one launch."""
    if not block.whole:
        return set(splits_variants(router_most_splits(router_weight.shape[1])))
    tokens = (T for T in range(1, block.slots // top_k + 1) if order_block(T * top_k) == block)
    return {splits_variant(router_splits(T, dtype, router_weight)) for T in tokens}


def order_rows(
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor | None,
    expert_map: Tensor | None,
    num_valid_tokens: Tensor | None,
    *,
    num_experts: int,
    num_zero_experts: int,
    rows: Rows,
    ids_out_TK: Tensor | None = None,
    weights_out_TK: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """Where each (token, choice) slot's row lies among the sorted rows, and the reverse.

    Args:
        topk_ids_TK: [T, K] int32 or int64, any strides. Ids are those of the router; what is neither a routed expert
            held here nor a zero expert contributes nothing.
        topk_weights_TK: [T, K] any float dtype, any strides; read for weights_out_TK alone.
        expert_map: int32 [E_routing], id -> row of the weights, -1 for none. None: E_routing = num_experts, id = row.
        num_valid_tokens: int32 [1]; slots of later tokens contribute nothing.
        num_experts: rows of the weights, E.
        num_zero_experts: Z; ids E_routing..E_routing+Z-1 have no row, but keep id and weight.
        rows: written. Where `num_chunks` is not 1, the first `num_zeros` counters are zero before.
        ids_out_TK, weights_out_TK: written; int32 and float32 [T, K] contiguous, with -1 and 0 where the slot
            contributes nothing. None where the inputs are already so, from `choose`.
    """
    T, K = topk_ids_TK.shape
    if T == 0:
        return
    chunks = num_chunks(T * K, alone=True)
    E_routing = num_experts if expert_map is None else expert_map.shape[0]
    args = {
        "num_valid_ptr": num_valid_tokens,
        "map_ptr": expert_map,
        "ids_ptr": topk_ids_TK,
        "id_stride_t": topk_ids_TK.stride(0),
        "id_stride_k": topk_ids_TK.stride(1),
        "ids_out_ptr": ids_out_TK,
        "weights_out_ptr": weights_out_TK,
        "producers": chunks if chunks > 1 else 0,
        **_order_args(T * K, rows, alone=True),
    }
    if weights_out_TK is not None:
        assert topk_weights_TK is not None
        args["weights_ptr"] = topk_weights_TK
        args["weight_stride_t"], args["weight_stride_k"] = topk_weights_TK.stride()
    for block in order_variants() if warmup else (order_block(T * K),):
        _launch(args, {"K": K}, num_experts, E_routing, num_zero_experts, block, warmup)


def zero_counters(rows: Rows, *, num_experts: int, warmup: bool = False) -> None:
    """Zeroes the counters as `order_rows` needs them: a launch for calls in which nothing else comes before it."""
    zeros = num_zeros(rows.sorted_slot_N.shape[0], num_experts, alone=True)
    launch(_zero, (triton.cdiv(zeros, 128),), (rows.counters, zeros), {"num_warps": 1}, warmup=warmup)


def _order_args(num_slots: int, rows: Rows, *, alone: bool) -> dict[str, Any]:
    assert rows.block_m & (rows.block_m - 1) == 0, rows.block_m
    assert 0 <= rows.tail < rows.block_m, rows.tail
    return {
        "counters_ptr": rows.counters,
        "num_rows_ptr": rows.num_rows,
        "taken_ptr": rows.taken,
        "arrivals_ptr": rows.arrivals,
        "num_arrivals": rows.arrivals.numel(),
        "sorted_slot_ptr": rows.sorted_slot_N,
        "row_of_ptr": rows.row_of_TK,
        "blocks_ptr": rows.blocks_3B,
        "num_slots": num_slots,
        "log_chunk": chunk_size(num_slots, alone).bit_length() - 1,
        "num_chunks": num_chunks(num_slots, alone=alone),
        "num_blocks": rows.blocks_3B.shape[1],
        "log_block_m": rows.block_m.bit_length() - 1,
        "tail": rows.tail,
    }


def _launch(
    args: dict[str, Any],
    meta: dict[str, Any],
    E: int,
    E_routing: int,
    Z: int,
    block: OrderBlock,
    warmup: bool,
    *,
    T: int = 0,
) -> None:
    """Args: T: tokens to choose for; 0 for none."""
    E_pad = max(32, triton.next_power_of_2(E))
    num_warps = block.num_warps
    if T:
        lanes, groups = meta["LANES"], meta["GROUPS_PAD"]
        rows = groups * meta["MEMBERS_PAD"] // lanes
        shares = 1
        if block.whole:
            if lanes == 32:
                shares = choice_shares(rows, groups if meta["TOPK_GROUP"] else None, meta["K"])
            # More than a warp only where it has shares, or many experts to go through.
            if shares > 1 or max(E_pad, rows * lanes) <= 128:
                num_warps = shares
        meta = {**meta, "TOKENS": num_warps * 32 // lanes // shares, "SHARES": shares}
        tokens = choice_tokens(T, meta["TOKENS"])
        args = {**args, "tokens": tokens, "producers": triton.cdiv(T, tokens)}
    producers, chunks = args["producers"], args.get("num_chunks", 0)
    programs = producers + (chunks if chunks > 1 or not producers else 0)
    meta = {
        "CHOOSES": T > 0,
        "ORDERS": chunks > 0,
        **_NO_CHOICE,
        **meta,
        "E": E,
        "E_PAD": E_pad,
        "E_ROUTING": E_routing,
        "Z": Z,
        "BLOCK": block.slots,
        "WHOLE": block.whole,
        # As many loads at once as registers allow.
        "COUNT_ROWS": max(2, min(8, 1024 * num_warps // E_pad)),
        "num_warps": num_warps,
        # All of the registers: else the compiler lets some loads wait for others, or spills at many experts.
        "maxnreg": 255 if block.whole or E_pad > 512 else None,
    }
    launch(_route, (programs,), tuple(args.get(name, other) for name, other in _ARGUMENTS), meta, warmup=warmup)


_ARGUMENTS: tuple[tuple[str, int | None], ...] = (
    ("logits_ptr", None),
    ("logits_stride", 0),
    ("num_splits", 0),
    ("router_bias_ptr", None),
    ("bias_ptr", None),
    ("num_valid_ptr", None),
    ("map_ptr", None),
    ("ids_ptr", None),
    ("id_stride_t", 0),
    ("id_stride_k", 0),
    ("weights_ptr", None),
    ("weight_stride_t", 0),
    ("weight_stride_k", 0),
    ("producers", 0),
    ("tokens", 0),
    ("zeros", 0),
    ("counters_ptr", None),
    ("num_rows_ptr", None),
    ("taken_ptr", None),
    ("arrivals_ptr", None),
    ("num_arrivals", 0),
    ("sorted_slot_ptr", None),
    ("row_of_ptr", None),
    ("blocks_ptr", None),
    ("ids_out_ptr", None),
    ("weights_out_ptr", None),
    ("num_slots", 0),
    ("log_chunk", 0),
    ("num_chunks", 0),
    ("num_blocks", 0),
    ("log_block_m", 0),
    ("tail", 0),
)
"""The kernel's runtime arguments in order, and what stands for one that a launch has no use for."""

_NO_CHOICE: dict[str, Any] = dict.fromkeys(
    (
        "SPLITS", "ROUND_TO", "K_PAD", "GROUPS", "GROUPS_PAD", "MEMBERS", "MEMBERS_PAD", "LANES", "TOKENS",
        "SHARES", "TOPK_GROUP", "TOP2_SUM", "LOST", "SCORE", "CHOICE_ON", "WEIGHTS_FROM", "NORMALIZE", "SCALE",
        "STEP_DTYPE", "WEIGHT_DTYPE",
    )
)  # fmt: skip


@triton.jit(do_not_specialize=["zeros"])
def _zero(counters_ptr, zeros, EARLY: tl.constexpr = False, FOLLOWED: tl.constexpr = False):
    begin(EARLY, FOLLOWED)
    zero(counters_ptr, zeros, tl.program_id(0), tl.num_programs(0))


@triton.jit(
    do_not_specialize=[
        "logits_stride",
        "num_splits",
        "id_stride_t",
        "id_stride_k",
        "weight_stride_t",
        "weight_stride_k",
        "producers",
        "tokens",
        "zeros",
        "num_arrivals",
        "num_slots",
        "log_chunk",
        "num_chunks",
        "num_blocks",
        "log_block_m",
        "tail",
    ],
    do_not_specialize_on_alignment=[
        "router_bias_ptr",
        "bias_ptr",
        "num_valid_ptr",
        "map_ptr",
        "ids_ptr",
        "weights_ptr",
        "num_rows_ptr",
        "blocks_ptr",
        "taken_ptr",
        "arrivals_ptr",
    ],
)
def _route(
    logits_ptr,
    logits_stride,
    num_splits,
    router_bias_ptr,
    bias_ptr,
    num_valid_ptr,
    map_ptr,
    ids_ptr,
    id_stride_t,
    id_stride_k,
    weights_ptr,
    weight_stride_t,
    weight_stride_k,
    producers,
    tokens,
    zeros,
    counters_ptr,
    num_rows_ptr,
    taken_ptr,
    arrivals_ptr,
    num_arrivals,
    sorted_slot_ptr,
    row_of_ptr,
    blocks_ptr,
    ids_out_ptr,
    weights_out_ptr,
    num_slots,
    log_chunk,
    num_chunks,
    num_blocks,
    log_block_m,
    tail,
    CHOOSES: tl.constexpr,
    ORDERS: tl.constexpr,
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
    E_PAD: tl.constexpr,
    E_ROUTING: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    program = tl.program_id(0)
    if ORDERS and not WHOLE:  # noqa: SIM102 (the compiler decides the outer one)
        if num_chunks > MOST_WAITING:
            program = tl.atomic_add(counters_ptr + TICKETS, 1, sem="relaxed")
    if ORDERS:
        zero(arrivals_ptr, num_arrivals, program, tl.num_programs(0))
        if program == 0:
            tl.store(taken_ptr + tl.arange(0, 2), 0)
    chunk = program - producers  # to be ordered; none where it is negative
    if CHOOSES:
        experts_P = tl.full([TOKENS * K_PAD], E, tl.int32)
    else:
        experts_P = None
    if program < producers:
        if CHOOSES:
            LOGITS: tl.constexpr = GROUPS * MEMBERS
            num_tokens = num_slots // K
            first_token = program * tokens
            end_token = tl.minimum(first_token + tokens, num_tokens)
            experts_P = choose_tokens(
                first_token.to(tl.int64),
                end_token.to(tl.int64),
                logits_ptr,
                logits_stride,
                num_tokens.to(tl.int64) * LOGITS,
                num_splits,
                router_bias_ptr,
                bias_ptr,
                num_valid_ptr,
                map_ptr,
                ids_ptr,
                weights_ptr,
                SPLITS,
                ROUND_TO,
                K,
                K_PAD,
                GROUPS,
                GROUPS_PAD,
                MEMBERS,
                MEMBERS_PAD,
                LANES,
                TOKENS,
                SHARES,
                TOPK_GROUP,
                TOP2_SUM,
                LOST,
                SCORE,
                CHOICE_ON,
                WEIGHTS_FROM,
                NORMALIZE,
                SCALE,
                STEP_DTYPE,
                WEIGHT_DTYPE,
                E,
                E_ROUTING,
                Z,
            )
            if ORDERS and not WHOLE:  # noqa: SIM102
                if num_chunks > 1:
                    p_P = tl.arange(0, TOKENS * K_PAD)
                    token_P = first_token + p_P // K_PAD
                    slot_P = token_P * K + p_P % K_PAD
                    is_slot_P = (token_P < end_token) & (p_P % K_PAD < K)
                    count_slots(experts_P, slot_P, is_slot_P, log_chunk, num_chunks, counters_ptr, E)
            if not ORDERS and counters_ptr is not None:
                zero(counters_ptr, zeros, program, producers)
        else:
            count_chunk(
                program,
                log_chunk,
                num_chunks,
                num_slots,
                ids_ptr,
                id_stride_t,
                id_stride_k,
                map_ptr,
                num_valid_ptr,
                counters_ptr,
                K,
                E,
                E_PAD,
                E_ROUTING,
                BLOCK,
            )
        if ORDERS:
            if producers > 1:
                # All of the program's writes, then its arrival, which releases them.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters_ptr, 1, sem="acq_rel") + 1
            else:
                arrived = producers
            if WHOLE:
                chunk = arrived - producers
            elif arrived == producers and num_chunks == 1:
                chunk = 0
    elif ORDERS and not WHOLE:  # noqa: SIM102
        if producers > 0:
            wait_for(counters_ptr, producers)

    if ORDERS:  # noqa: SIM102
        if chunk >= 0:
            if WHOLE:
                order_all(
                    experts_P,
                    num_slots,
                    ids_ptr,
                    id_stride_t,
                    id_stride_k,
                    weights_ptr,
                    weight_stride_t,
                    weight_stride_k,
                    map_ptr,
                    num_valid_ptr,
                    num_rows_ptr,
                    sorted_slot_ptr,
                    row_of_ptr,
                    blocks_ptr,
                    num_blocks,
                    log_block_m,
                    tail,
                    ids_out_ptr,
                    weights_out_ptr,
                    K,
                    TOKENS,
                    E,
                    E_ROUTING,
                    Z,
                    BLOCK,
                )
            else:
                tl.debug_barrier()
                order_chunk(
                    chunk,
                    log_chunk,
                    num_chunks,
                    num_slots,
                    ids_ptr,
                    id_stride_t,
                    id_stride_k,
                    weights_ptr,
                    weight_stride_t,
                    weight_stride_k,
                    map_ptr,
                    num_valid_ptr,
                    counters_ptr,
                    num_rows_ptr,
                    sorted_slot_ptr,
                    row_of_ptr,
                    blocks_ptr,
                    num_blocks,
                    log_block_m,
                    tail,
                    ids_out_ptr,
                    weights_out_ptr,
                    K,
                    E,
                    E_PAD,
                    E_ROUTING,
                    Z,
                    BLOCK,
                    COUNT_ROWS,
                )
