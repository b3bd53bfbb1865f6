"""Few tokens' experts in one launch: GEMM 1, GEMM 2 and, where nothing else has to be joined before it, the end.

Programs by ascending number:

    [GEMM 1, shared] [GEMM 1, routed] [GEMM 2, column after column: shared and routed blocks] [sums]

The shared expert's are there where it is fused, the sums where the launch ends the layer. A program of GEMM 1 arrives
at its block's counter; one of GEMM 2 waits there for all columns of its block, and arrives at its column's; the sums of
some tokens in a column wait for all blocks of it. So each waits for programs of lower numbers alone (`arrivals.py`).
Where there are few tiles of GEMM 1, several programs may split one (`split.py`); all arrive at its block's counter.
Different blocks' products, and the sums of the first columns, run side by side where launches would wait for the last
program. The tiles, and thereby the bits, are those of `gemm1` (where none is split), `gemm2` and `finalize`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.arrivals import arrive, wait_for
from dsmoe_op.kernels.coded import PLAIN, Coded, takes_part
from dsmoe_op.kernels.epilogue import store_zeros
from dsmoe_op.kernels.finalize import sum_of_rows
from dsmoe_op.kernels.grouped import routed_rows, rows_product, shared_rows
from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.kernels.order import Rows
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.kernels.quantize import takes_codes
from dsmoe_op.tuning import Tile, one_launch


def num_arrivals(num_blocks: int, T: int, H: int, I: int, S: int, tiles: tuple[Tile, Tile]) -> int:
    """Counters of a launch: of the shared and routed blocks, of the columns of GEMM 2, and of GEMM 1's split tiles."""
    one, two = tiles
    row_blocks = triton.cdiv(T, one.block_m)
    split_tiles = num_blocks * triton.cdiv(I, one.block_n) + row_blocks * triton.cdiv(S, one.block_n)
    return num_blocks + row_blocks + triton.cdiv(H, two.block_n) + (split_tiles if one.splits > 1 else 0)


def num_parts(T: int, K: int, I: int, S: int, gated: bool, gemm1: Tile) -> int:
    """float32 numbers that the programs of split tiles leave for one another."""
    return gemm1.splits * (1 + gated) * T * (K * I + S) if gemm1.splits > 1 else 0


def experts(
    x_TH: Tensor,
    *,
    config: MoEConfig,
    tiles: tuple[Tile, Tile],
    rows: Rows,
    w13: Tensor,
    w2: Tensor,
    h_NI: Tensor,
    y_NH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    zero_tail: bool = False,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    h_shared_TS: Tensor | None = None,
    gate_T: Tensor | None = None,
    shared_TH: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    out_TH: Tensor | None = None,
    coded: tuple[Coded, Coded] = (PLAIN, PLAIN),
    shared_coded: tuple[Coded, Coded] = (PLAIN, PLAIN),
    x_codes_TH: Tensor | None = None,
    x_scales: Tensor | None = None,
    parts: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """h and y of the routed experts, those of the shared one where shared_w13 is given, and out where it is.

    Args:
        tiles: of GEMM 1 and GEMM 2, such as `tuning.one_launch` takes; block_m is that of `rows`.
        rows: as `order_rows` leaves them; `num_arrivals` zeros in arrivals, which are changed.
        topk_ids_TK, topk_weights_TK: int32 and float32 [T, K], contiguous, as `choose` and `order_rows` leave them.
        shared_TH: written with shared_w13, else read for out, if there is a shared expert; [T, H] contiguous.
        coded, shared_coded: what belongs to w13 and w2, and to the shared expert's, where they are quantised; of one
            format where both are given.
        parts: float32, at least `num_parts`; for tiles that are split. What it holds before and after means nothing.

    The others, and what is done with them, as in `gemm1`, `gemm2` and `finalize`.
    """
    (T, H), I, K = x_TH.shape, h_NI.shape[1], config.top_k
    if T == 0:
        return
    one, two = tiles
    assert one_launch("16bit", 1, one, two)
    fused, ends = shared_w13 is not None, out_TH is not None
    S = h_shared_TS.shape[1] if fused and h_shared_TS is not None else 0
    num_blocks, row_blocks = rows.blocks_3B.shape[1], triton.cdiv(T, one.block_m) if fused else 0
    codes = takes_codes(coded[0], x_scales)
    splits = one.splits if _can_split(H, one, codes, coded[0], shared_coded[0]) else 1
    gemm1_tiles = num_blocks * triton.cdiv(I, one.block_n) + row_blocks * triton.cdiv(S, one.block_n)
    columns = triton.cdiv(H, two.block_n)
    # 16 bytes of each row for a thread, as in `finalize`.
    tokens = max(1, 32 * two.num_warps * (16 // y_NH.element_size()) // two.block_n)
    programs = splits * gemm1_tiles + (num_blocks + row_blocks) * columns
    programs += columns * triton.cdiv(T, tokens) if ends else 0
    if not warmup:
        assert rows.block_m == one.block_m
        assert rows.arrivals.numel() >= num_blocks + row_blocks + columns + (gemm1_tiles if splits > 1 else 0)
        assert splits == 1 or (parts is not None and parts.numel() >= num_parts(T, K, I, S, config.gated, one))
    zero_experts = ends and config.num_zero_experts > 0
    a = x_codes_TH if codes and x_codes_TH is not None else x_TH
    args = (
        a,
        row_stride(a),
        x_scales if codes else None,
        w13,
        w13_bias,
        w2,
        w2_bias,
        rows.blocks_3B,
        num_blocks,
        rows.sorted_slot_N,
        topk_weights_TK if config.apply_router_weight_on_input else None,
        h_NI,
        y_NH,
        shared_w13,
        shared_w2,
        h_shared_TS if fused else None,
        gate_T if fused else None,
        num_valid_tokens if fused else None,
        shared_TH if fused or ends else None,
        row_blocks,
        rows.arrivals,
        parts if splits > 1 else None,
        x_TH if zero_experts else None,
        row_stride(x_TH) if zero_experts else 0,
        topk_ids_TK if zero_experts else None,
        topk_weights_TK if ends else None,
        rows.row_of_TK if ends else None,
        out_TH,
        T,
        *(tensor for its in (*coded, *shared_coded) for tensor in its[:4]),
    )
    steps = [max(triton.cdiv(n, tile.block_k) for n in of) for tile, of in ((one, (H // splits,)), (two, (I, S)))]
    stages = [max(2, min(tile.num_stages, n)) for tile, n in zip(tiles, steps, strict=True)]
    meta = {
        "K": K,
        "H": H,
        "I": I,
        "S": S,
        "W13_STRIDES": w13.stride(),
        "W2_STRIDES": w2.stride(),
        "SHARED_W13_STRIDES": shared_w13.stride() if shared_w13 is not None else (0, 0),
        "SHARED_W2_STRIDES": shared_w2.stride() if shared_w2 is not None else (0, 0),
        "ZERO_TAIL": zero_tail,
        "ACTIVATION": config.activation,
        "ORDER": config.w13_order,
        "CLAMP": config.clamp_routed,
        "SHARED_CLAMP": config.clamp_shared,
        "CLAMP_AFTER": config.clamp_after_activation,
        "WEIGHT_ON_INPUT": config.apply_router_weight_on_input,
        "ROUTED_SCALE": config.scale_at_end,
        "SCALE": 0.5 if config.combine == "average" else 1.0,
        "BLOCK_M": one.block_m,
        "BLOCK_N": tuple(tile.block_n for tile in tiles),
        "BLOCK_K": tuple(tile.block_k for tile in tiles),
        "SWAP": tuple(tile.swap for tile in tiles),
        "STAGES": tuple(stages),
        "SPLITS": splits,
        "BLOCK_T": tokens,
        "AT_ONCE": 8,
        "INTERPRET": INTERPRET,
        "FORM1": coded[0].form,
        "FORM2": coded[1].form,
        "SHARED_FORM1": shared_coded[0].form,
        "SHARED_FORM2": shared_coded[1].form,
        "num_warps": one.num_warps,
        "num_stages": max(stages),
    }
    launch(_experts, (programs,), args, meta, warmup=warmup)


def _can_split(H: int, gemm1: Tile, codes: bool, *coded: Coded) -> bool:
    """Whether the tile's parts of H are whole steps and scales; what looks at whole rows of x has none."""
    part = H // gemm1.splits
    whole_rows = any(one.form is not None and one.form[0] == "fp8_channel" for one in coded) and not codes
    return H % (gemm1.splits * gemm1.block_k) == 0 and not whole_rows and all(takes_part(one, part) for one in coded)


@triton.jit(
    do_not_specialize=["T", "num_blocks", "row_blocks"],
    do_not_specialize_on_alignment=[
        "w13_bias_ptr",
        "w2_bias_ptr",
        "weight_on_input_ptr",
        "num_valid_ptr",
        "arrivals_ptr",
        "parts_ptr",
        "a_scale_ptr",
        "ids_ptr",
        "weights_ptr",
        "row_of_ptr",
        "w13_zero_ptr",
        "w13_global_ptr",
        "w13_input_ptr",
        "w2_zero_ptr",
        "w2_global_ptr",
        "w2_input_ptr",
        "shared_w13_zero_ptr",
        "shared_w13_global_ptr",
        "shared_w13_input_ptr",
        "shared_w2_zero_ptr",
        "shared_w2_global_ptr",
        "shared_w2_input_ptr",
    ],
)
def _experts(
    a_ptr,
    a_stride,
    a_scale_ptr,
    w13_ptr,
    w13_bias_ptr,
    w2_ptr,
    w2_bias_ptr,
    blocks_ptr,
    num_blocks,
    sorted_slot_ptr,
    weight_on_input_ptr,
    h_ptr,
    y_ptr,
    shared_w13_ptr,
    shared_w2_ptr,
    shared_h_ptr,
    gate_ptr,
    num_valid_ptr,
    shared_ptr,
    row_blocks,
    arrivals_ptr,
    parts_ptr,
    x_ptr,
    x_stride,
    ids_ptr,
    weights_ptr,
    row_of_ptr,
    out_ptr,
    T,
    w13_scale_ptr,
    w13_zero_ptr,
    w13_global_ptr,
    w13_input_ptr,
    w2_scale_ptr,
    w2_zero_ptr,
    w2_global_ptr,
    w2_input_ptr,
    shared_w13_scale_ptr,
    shared_w13_zero_ptr,
    shared_w13_global_ptr,
    shared_w13_input_ptr,
    shared_w2_scale_ptr,
    shared_w2_zero_ptr,
    shared_w2_global_ptr,
    shared_w2_input_ptr,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    S: tl.constexpr,
    W13_STRIDES: tl.constexpr,
    W2_STRIDES: tl.constexpr,
    SHARED_W13_STRIDES: tl.constexpr,
    SHARED_W2_STRIDES: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDER: tl.constexpr,
    CLAMP: tl.constexpr,
    SHARED_CLAMP: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ROUTED_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INTERPRET: tl.constexpr,
    FORM1: tl.constexpr = None,
    FORM2: tl.constexpr = None,
    SHARED_FORM1: tl.constexpr = None,
    SHARED_FORM2: tl.constexpr = None,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    COLUMNS1: tl.constexpr = (I + BLOCK_N[0] - 1) // BLOCK_N[0]
    SHARED_COLUMNS1: tl.constexpr = (S + BLOCK_N[0] - 1) // BLOCK_N[0]
    COLUMNS2: tl.constexpr = (H + BLOCK_N[1] - 1) // BLOCK_N[1]
    BLOCK_N2: tl.constexpr = BLOCK_N[1]
    FUSED: tl.constexpr = shared_w13_ptr is not None
    ZEROS: tl.constexpr = num_valid_ptr is not None
    program = tl.program_id(0)
    # A counter for each block, the shared expert's first, one for each column, and one for each tile that is split.
    routed1 = row_blocks * SHARED_COLUMNS1
    tiles1 = routed1 + num_blocks * COLUMNS1
    gemm2 = tiles1 * SPLITS
    blocks = row_blocks + num_blocks
    sums = gemm2 + blocks * COLUMNS2
    columns_ptr = arrivals_ptr + blocks
    if program < gemm2:
        tile = program // SPLITS
        split = program % SPLITS
        counter_ptr = columns_ptr + COLUMNS2 + tile
        routed_parts = SPLITS * T.to(tl.int64) * K * (I if ACTIVATION == "relu2" else 2 * I)  # before the shared
        if FUSED:  # noqa: SIM102 (the compiler decides the outer one)
            if tile < routed1:
                block = tile // SHARED_COLUMNS1
                row, end, out_end = shared_rows(block, T, num_valid_ptr, BLOCK_M)
                rows_product(
                    a_ptr, a_stride, None, None, shared_w13_ptr, None, 0, None, None, shared_h_ptr, row, end, out_end,
                    tile % SHARED_COLUMNS1 * BLOCK_N[0], K, S, H, SHARED_W13_STRIDES[0], SHARED_W13_STRIDES[1],
                    ACTIVATION, "gate_up", SHARED_CLAMP, CLAMP_AFTER, BLOCK_M, BLOCK_M, 0, BLOCK_N[0], BLOCK_K[0],
                    SWAP[0], ZEROS, "ieee", INTERPRET, STAGES[0],
                    (shared_w13_scale_ptr, shared_w13_zero_ptr, shared_w13_global_ptr, shared_w13_input_ptr,
                     a_scale_ptr), SHARED_FORM1, split, (parts_ptr, routed_parts, T, counter_ptr), SPLITS,
                )  # fmt: skip
                arrive(arrivals_ptr + block)
        if tile >= routed1:
            block = (tile - routed1) // COLUMNS1
            expert, row, end = routed_rows(blocks_ptr, num_blocks, block)
            if expert >= 0:
                if w13_bias_ptr is not None:
                    w13_bias_ptr += expert * (I if ACTIVATION == "relu2" else 2 * I)
                rows_product(
                    a_ptr, a_stride, sorted_slot_ptr, weight_on_input_ptr,
                    w13_ptr + expert.to(tl.int64) * W13_STRIDES[0], None, expert, w13_bias_ptr, None, h_ptr, row, end,
                    end, (tile - routed1) % COLUMNS1 * BLOCK_N[0], K, I, H, W13_STRIDES[1], W13_STRIDES[2],
                    ACTIVATION, ORDER, CLAMP, CLAMP_AFTER, BLOCK_M, BLOCK_M, 0, BLOCK_N[0], BLOCK_K[0], SWAP[0],
                    False, "ieee", INTERPRET, STAGES[0],
                    (w13_scale_ptr, w13_zero_ptr, w13_global_ptr, w13_input_ptr, a_scale_ptr), FORM1, split,
                    (parts_ptr, 0, T * K, counter_ptr), SPLITS,
                )  # fmt: skip
                arrive(arrivals_ptr + row_blocks + block)
    elif program < sums:
        column = (program - gemm2) // blocks * BLOCK_N2
        block = (program - gemm2) % blocks - row_blocks
        counter_ptr = arrivals_ptr + row_blocks + block
        if FUSED:  # noqa: SIM102
            if block < 0:
                row, end, out_end = shared_rows(row_blocks + block, T, num_valid_ptr, BLOCK_M)
                wait_for(counter_ptr, SHARED_COLUMNS1 * SPLITS)
                rows_product(
                    shared_h_ptr, S, None, None, shared_w2_ptr, None, 0, None, gate_ptr, shared_ptr, row, end, out_end,
                    column, K, H, S, SHARED_W2_STRIDES[0], SHARED_W2_STRIDES[1], None, None, None, False, BLOCK_M,
                    BLOCK_M, 0, BLOCK_N2, BLOCK_K[1], SWAP[1], ZEROS, "ieee", INTERPRET, STAGES[1],
                    (shared_w2_scale_ptr, shared_w2_zero_ptr, shared_w2_global_ptr, shared_w2_input_ptr, None),
                    SHARED_FORM2,
                )  # fmt: skip
        if block >= 0:
            expert, row, end = routed_rows(blocks_ptr, num_blocks, block)
            if expert >= 0:
                w2_ptr += expert.to(tl.int64) * W2_STRIDES[0]
                if w2_bias_ptr is not None:
                    w2_bias_ptr += expert * H
                wait_for(counter_ptr, COLUMNS1 * SPLITS)
                rows_product(
                    h_ptr, I, None, None, w2_ptr, None, expert, w2_bias_ptr, None, y_ptr, row, end, end, column, K, H,
                    I, W2_STRIDES[1], W2_STRIDES[2], None, None, None, False, BLOCK_M, BLOCK_M, 0, BLOCK_N2,
                    BLOCK_K[1], SWAP[1], False, "ieee", INTERPRET, STAGES[1],
                    (w2_scale_ptr, w2_zero_ptr, w2_global_ptr, w2_input_ptr, None), FORM2,
                )  # fmt: skip
            elif ZERO_TAIL:
                store_zeros(y_ptr, row, end, column, H, BLOCK_M, BLOCK_N2)
        if out_ptr is not None:
            arrive(columns_ptr + (program - gemm2) // blocks)
    elif out_ptr is not None:
        groups = tl.cdiv(T, BLOCK_T)
        column = (program - sums) // groups
        t_T = ((program - sums) % groups * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        h_H = (column * BLOCK_N2 + tl.arange(0, BLOCK_N2))[None, :]
        sum_TH = sum_of_rows(
            tl.zeros([BLOCK_T, BLOCK_N2], tl.float32), t_T, t_T < T, h_H, y_ptr, ids_ptr, weights_ptr, row_of_ptr,
            shared_ptr, x_ptr, x_stride, columns_ptr + column, blocks, H, K,
            WEIGHT_ON_INPUT, ROUTED_SCALE, SCALE, AT_ONCE, ".cg",
        )  # fmt: skip
        tl.store(out_ptr + t_T * H + h_H, sum_TH.to(out_ptr.dtype.element_ty), mask=(t_T < T) & (h_H < H))
