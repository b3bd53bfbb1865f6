"""Few tokens' experts in one launch: GEMM 1, GEMM 2 and, where nothing else has to be joined before it, the end.

Programs by ascending number:

    [GEMM 1, shared] [GEMM 1, routed] [GEMM 2, column after column: shared and routed blocks] [sums]

The shared expert's are there where it is fused, the sums where the launch ends the layer. A program of GEMM 1 arrives
at its block's counter; one of GEMM 2 waits there for all columns of its block, works through some neighbouring columns
of its own, and arrives at their counter; the sums of some tokens there wait for all blocks. So each waits for programs
of lower numbers alone (`arrivals.py`). Different blocks' products, and the sums of the first columns, run side by side
where launches would wait for the last program. The tiles, and thereby the bits, are those of `gemm1`, `gemm2` and
`finalize`.

All programs have the shared memory of the largest kind, and GEMM 2 alone would have more of them on a multiprocessor.
Hence the columns of a program are one loop, in which the next one's weights are always under way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.arrivals import arrive, has_come, wait_for
from dsmoe_op.kernels.finalize import sum_of_rows
from dsmoe_op.kernels.gemm import _block
from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.kernels.order import Rows
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.tuning import Tile, experts_columns, experts_stages, one_launch


def num_arrivals(num_blocks: int, T: int, H: int, gemm2: Tile) -> int:
    """Counters of a launch: of the routed blocks, of the shared expert's, and of the columns of GEMM 2."""
    return num_blocks + triton.cdiv(T, gemm2.block_m) + triton.cdiv(H, gemm2.block_n)


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
    allow_tf32: bool = False,
    each: int | None = None,
    prefetch: int = 128 << 10,
    warmup: bool = False,
) -> None:
    """h and y of the routed experts, those of the shared one where shared_w13 is given, and out where it is.

    Args:
        tiles: of GEMM 1 and GEMM 2, such as `tuning.one_launch` takes; block_m is that of `rows`.
        rows: as `order_rows` leaves them; `num_arrivals` zeros in arrivals, which are changed.
        topk_ids_TK, topk_weights_TK: int32 and float32 [T, K], contiguous, as `choose` and `order_rows` leave them.
        shared_TH: written with shared_w13, else read for out, if there is a shared expert; [T, H] contiguous.
        each: tiles of columns that a program of GEMM 2 works through; None: as many as leave enough programs.
        prefetch: bytes of its weights that a program of GEMM 2 asks the L2 cache for while it waits.

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
    gemm1_programs = num_blocks * triton.cdiv(I, one.block_n) + row_blocks * triton.cdiv(S, one.block_n)
    blocks, columns = num_blocks + row_blocks, triton.cdiv(H, two.block_n)
    each = each or experts_columns(blocks * columns)
    # 16 bytes of each row for a thread, as in `finalize`.
    tokens = max(1, 32 * two.num_warps * (16 // y_NH.element_size()) // two.block_n)
    sums = columns * triton.cdiv(T, tokens) if ends else 0
    if not warmup:
        assert rows.block_m == one.block_m
        assert rows.arrivals.numel() >= blocks + columns
    # Lines of 128 bytes in a row of w2, if all of them can be asked for.
    lines = max(triton.next_power_of_2(triton.cdiv(n * w2.element_size(), 128)) for n in (I, max(1, S)))
    lines = max(1, min(lines, prefetch // (128 * two.block_n)))
    zero_experts = ends and config.num_zero_experts > 0
    args = (
        x_TH,
        row_stride(x_TH),
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
        topk_ids_TK if zero_experts else None,
        topk_weights_TK if ends else None,
        rows.row_of_TK if ends else None,
        out_TH,
        T,
        each,
        min(each, max(1, prefetch // (128 * two.block_n * lines))),
    )
    stages = experts_stages(one, two, H, 2 if config.gated else 1, x_TH.element_size())
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
        "STAGES": stages,
        "BLOCK_T": tokens,
        "AT_ONCE": 8,
        "PRECISION": "tf32" if allow_tf32 else "ieee",
        "LINES": 0 if INTERPRET or not prefetch else triton.next_power_of_2(lines + 1) // 2,
        "INTERPRET": INTERPRET,
        "num_warps": one.num_warps,
        "num_stages": max(stages),
    }
    launch(_experts, (gemm1_programs + blocks * triton.cdiv(columns, each) + sums,), args, meta, warmup=warmup)


@triton.jit
def _wait(
    counter_ptr,
    count,
    w_ptr,
    column,
    ahead,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
):
    """Until h is there. Meanwhile the L2 cache is asked for the first LINES lines of 128 bytes of rows of w, in which
    INNER elements lie side by side: of `ahead` tiles from row `column` on, of the ROWS that w has."""
    if LINES > 0:
        if not has_come(counter_ptr, count):
            LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
            d_K = tl.minimum(tl.arange(0, LINES) * LINE, INNER - 1)
            while ahead > 0:
                row_N = tl.minimum(column + tl.arange(0, BLOCK_N), ROWS - 1).to(tl.int64)
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                    "=r,l",
                    [w_ptr + row_N[:, None] * STRIDE + d_K[None, :]],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
                column += BLOCK_N
                ahead -= 1
            wait_for(counter_ptr, count)
        tl.debug_barrier()
    else:
        wait_for(counter_ptr, count)


@triton.jit
def _step(
    step,
    sum,
    a_ptrs,
    in_M,
    w_ptrs,
    column,
    rows_M,
    in_out_M,
    bias_ptr,
    gate_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One step of `_columns`: the product of BLOCK_K of the inner columns, and the end of a tile at its last step."""
    STEPS: tl.constexpr = triton.cdiv(INNER, BLOCK_K)
    start = step % STEPS * BLOCK_K
    tile = step // STEPS
    c_N = column + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_N = c_N < COLUMNS
    in_a = in_M[:, None]
    in_w = in_N[:, None]
    if INNER % BLOCK_K != 0:
        in_K = (tl.arange(0, BLOCK_K) < INNER - start)[None, :]
        in_a = in_a & in_K
        in_w = in_w & in_K
    a = tl.load(a_ptrs + start, mask=in_a, other=0.0)
    w_ptrs += (tile * BLOCK_N).to(tl.int64) * STRIDE_ROW + start.to(tl.int64) * STRIDE_INNER
    w = tl.load(w_ptrs, mask=in_w, other=0.0)
    if INTERPRET:  # its bf16 products are wrong
        a = a.to(tl.float32)
    w = w.to(a.dtype)
    sum = tl.where(start == 0, 0.0, sum)
    if SWAP:
        sum = tl.dot(w, a.T, sum, input_precision=PRECISION)
    else:
        sum = tl.dot(a, w.T, sum, input_precision=PRECISION)
    if start + BLOCK_K >= INNER:
        if SWAP:
            out_MN = sum.T
        else:
            out_MN = sum
        if bias_ptr is not None:
            out_MN += tl.load(bias_ptr + c_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
        if gate_ptr is not None:
            out_MN *= tl.load(gate_ptr + rows_M, mask=in_out_M, other=0.0)[:, None]
        if ZEROS:  # whatever the weights hold
            out_MN = tl.where(in_M[:, None], out_MN, 0.0)
        out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * COLUMNS + c_N[None, :]
        tl.store(out_ptrs, out_MN.to(out_ptr.dtype.element_ty), mask=in_out_M[:, None] & in_N[None, :])
    return sum


@triton.jit
def _columns(
    a_ptr,
    w_ptr,
    bias_ptr,
    gate_ptr,
    out_ptr,
    row,
    end,
    out_end,
    column,
    tiles,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What `gemm2` makes of a block of rows in so many tiles from `column` on, in one loop over all their steps."""
    rows_M = row + tl.arange(0, BLOCK_M)
    in_M = rows_M < end
    in_out_M = rows_M < out_end
    d_K = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + tl.where(in_M, rows_M, row).to(tl.int64)[:, None] * INNER + d_K[None, :]
    row_N = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    w_ptrs = w_ptr + row_N[:, None] * STRIDE_ROW + d_K.to(tl.int64)[None, :] * STRIDE_INNER
    if SWAP:
        sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.minimum(tiles, tl.cdiv(COLUMNS - column, BLOCK_N)) * tl.cdiv(INNER, BLOCK_K)
    if INTERPRET:  # that of Triton 3.6 cannot take a `range` to a runtime number with numpy 2.4
        step = steps * 0
        while step < steps:
            sum = _step(
                step, sum, a_ptrs, in_M, w_ptrs, column, rows_M, in_out_M, bias_ptr, gate_ptr, out_ptr, COLUMNS, INNER,
                STRIDE_ROW, STRIDE_INNER, BLOCK_N, BLOCK_K, SWAP, ZEROS, PRECISION, INTERPRET,
            )  # fmt: skip
            step += 1
    else:
        for step in tl.range(0, steps, num_stages=STAGES):
            sum = _step(
                step, sum, a_ptrs, in_M, w_ptrs, column, rows_M, in_out_M, bias_ptr, gate_ptr, out_ptr, COLUMNS, INNER,
                STRIDE_ROW, STRIDE_INNER, BLOCK_N, BLOCK_K, SWAP, ZEROS, PRECISION, INTERPRET,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["T", "num_blocks", "row_blocks", "each", "ahead"],
    do_not_specialize_on_alignment=[
        "w13_bias_ptr",
        "w2_bias_ptr",
        "weight_on_input_ptr",
        "num_valid_ptr",
        "arrivals_ptr",
        "ids_ptr",
        "weights_ptr",
        "row_of_ptr",
    ],
)
def _experts(
    x_ptr,
    x_stride,
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
    ids_ptr,
    weights_ptr,
    row_of_ptr,
    out_ptr,
    T,
    each,
    ahead,
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
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    LINES: tl.constexpr,
    INTERPRET: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    COLUMNS1: tl.constexpr = triton.cdiv(I, BLOCK_N[0])
    SHARED_COLUMNS1: tl.constexpr = triton.cdiv(S, BLOCK_N[0])
    COLUMNS2: tl.constexpr = triton.cdiv(H, BLOCK_N[1])
    BLOCK_N2: tl.constexpr = BLOCK_N[1]
    FUSED: tl.constexpr = shared_w13_ptr is not None
    ZEROS: tl.constexpr = num_valid_ptr is not None
    program = tl.program_id(0)
    # A counter for each block, the shared expert's first, then one for the columns of each program of GEMM 2.
    routed1 = row_blocks * SHARED_COLUMNS1
    gemm2 = routed1 + num_blocks * COLUMNS1
    blocks = row_blocks + num_blocks
    sums = gemm2 + blocks * tl.cdiv(COLUMNS2, each)
    columns_ptr = arrivals_ptr + blocks
    if program < gemm2:
        if FUSED:  # noqa: SIM102 (the compiler decides the outer one)
            if program < routed1:
                block = program // SHARED_COLUMNS1
                row = block * BLOCK_M
                out_end = tl.minimum(row + BLOCK_M, T)
                end = out_end
                if num_valid_ptr is not None:
                    end = tl.minimum(end, tl.load(num_valid_ptr))
                _block(
                    x_ptr, x_stride, None, None, shared_w13_ptr, None, 0, None, None, shared_h_ptr, row, end, out_end,
                    program % SHARED_COLUMNS1 * BLOCK_N[0], K, S, H, SHARED_W13_STRIDES[0], SHARED_W13_STRIDES[1],
                    ACTIVATION, "gate_up", SHARED_CLAMP, CLAMP_AFTER, BLOCK_M, BLOCK_M, 0, BLOCK_N[0], BLOCK_K[0],
                    SWAP[0], ZEROS, PRECISION, INTERPRET, STAGES[0],
                )  # fmt: skip
                arrive(arrivals_ptr + block)
        if program >= routed1:
            block = (program - routed1) // COLUMNS1
            expert = tl.load(blocks_ptr + block)
            row = tl.load(blocks_ptr + num_blocks + block)
            end = tl.load(blocks_ptr + 2 * num_blocks + block)
            if expert >= 0:
                if w13_bias_ptr is not None:
                    w13_bias_ptr += expert * (I if ACTIVATION == "relu2" else 2 * I)
                _block(
                    x_ptr, x_stride, sorted_slot_ptr, weight_on_input_ptr,
                    w13_ptr + expert.to(tl.int64) * W13_STRIDES[0], None, expert, w13_bias_ptr, None, h_ptr, row, end,
                    end, (program - routed1) % COLUMNS1 * BLOCK_N[0], K, I, H, W13_STRIDES[1], W13_STRIDES[2],
                    ACTIVATION, ORDER, CLAMP, CLAMP_AFTER, BLOCK_M, BLOCK_M, 0, BLOCK_N[0], BLOCK_K[0], SWAP[0],
                    False, PRECISION, INTERPRET, STAGES[0],
                )  # fmt: skip
                arrive(arrivals_ptr + row_blocks + block)
    elif program < sums:
        group = (program - gemm2) // blocks
        column = group * each * BLOCK_N2
        block = (program - gemm2) % blocks - row_blocks
        counter_ptr = arrivals_ptr + row_blocks + block
        if FUSED:  # noqa: SIM102
            if block < 0:
                row = (row_blocks + block) * BLOCK_M
                out_end = tl.minimum(row + BLOCK_M, T)
                end = out_end
                if num_valid_ptr is not None:
                    end = tl.minimum(end, tl.load(num_valid_ptr))
                _wait(
                    counter_ptr, SHARED_COLUMNS1, shared_w2_ptr, column, ahead, H, S, SHARED_W2_STRIDES[0], BLOCK_N2,
                    LINES if SHARED_W2_STRIDES[1] == 1 else 0,
                )  # fmt: skip
                _columns(
                    shared_h_ptr, shared_w2_ptr, None, gate_ptr, shared_ptr, row, end, out_end, column, each, H, S,
                    SHARED_W2_STRIDES[0], SHARED_W2_STRIDES[1], BLOCK_M, BLOCK_N2, BLOCK_K[1], SWAP[1], ZEROS,
                    PRECISION, INTERPRET, STAGES[1],
                )  # fmt: skip
        if block >= 0:
            expert = tl.load(blocks_ptr + block)
            row = tl.load(blocks_ptr + num_blocks + block)
            end = tl.load(blocks_ptr + 2 * num_blocks + block)
            if expert >= 0:
                w2_ptr += expert.to(tl.int64) * W2_STRIDES[0]
                if w2_bias_ptr is not None:
                    w2_bias_ptr += expert * H
                _wait(
                    counter_ptr, COLUMNS1, w2_ptr, column, ahead, H, I, W2_STRIDES[1], BLOCK_N2,
                    LINES if W2_STRIDES[2] == 1 else 0,
                )  # fmt: skip
                _columns(
                    h_ptr, w2_ptr, w2_bias_ptr, None, y_ptr, row, end, end, column, each, H, I, W2_STRIDES[1],
                    W2_STRIDES[2], BLOCK_M, BLOCK_N2, BLOCK_K[1], SWAP[1], False, PRECISION, INTERPRET, STAGES[1],
                )  # fmt: skip
            elif ZERO_TAIL:
                rows_M = row + tl.arange(0, BLOCK_M)
                columns_end = tl.minimum(column + each * BLOCK_N2, H)
                while column < columns_end:
                    c_N = column + tl.arange(0, BLOCK_N2)
                    out_ptrs = y_ptr + rows_M.to(tl.int64)[:, None] * H + c_N[None, :]
                    zeros_MN = tl.zeros([BLOCK_M, BLOCK_N2], y_ptr.dtype.element_ty)
                    tl.store(out_ptrs, zeros_MN, mask=(rows_M < end)[:, None] & (c_N < H)[None, :])
                    column += BLOCK_N2
        if out_ptr is not None:
            arrive(columns_ptr + group)
    elif out_ptr is not None:
        groups = tl.cdiv(T, BLOCK_T)
        column = (program - sums) // groups
        t_T = ((program - sums) % groups * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        h_H = (column * BLOCK_N2 + tl.arange(0, BLOCK_N2))[None, :]
        sum_TH = sum_of_rows(
            tl.zeros([BLOCK_T, BLOCK_N2], tl.float32), t_T, t_T < T, h_H, y_ptr, ids_ptr, weights_ptr, row_of_ptr,
            shared_ptr, x_ptr if ids_ptr is not None else None, x_stride, columns_ptr + column // each, blocks, H, K,
            WEIGHT_ON_INPUT, ROUTED_SCALE, SCALE, AT_ONCE, ".cg",
        )  # fmt: skip
        tl.store(out_ptr + t_T * H + h_H, sum_TH.to(out_ptr.dtype.element_ty), mask=(t_T < T) & (h_H < H))
