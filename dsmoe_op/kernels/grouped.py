"""The experts' two matrix products, routed and shared, in one grouped kernel, for any weights and any GPU.

A launch covers the routed tiles, the shared expert's, or both ("fused"). A routed program finds its expert and rows in
the map `blocks`, made on the device; the grid is a bound that holds for any routing, so nothing is read on the host and
a captured launch stays right. Programs beyond the real blocks return.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsmoe_op.kernels.coded import PLAIN, Coded, coded_products
from dsmoe_op.kernels.epilogue import ended, store, store_zeros
from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.kernels.operands import finished, load_a, weight_rows
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.kernels.split import whole_sum
from dsmoe_op.tuning import Tile


class Part(NamedTuple):
    """One side of a launch, routed or shared. Shapes and contents as in `gemm1` and `gemm2`."""

    a: Tensor
    w: Tensor
    out: Tensor
    bias: Tensor | None = None
    blocks: Tensor | None = None
    sorted_slot: Tensor | None = None
    weight_on_input: Tensor | None = None
    gate: Tensor | None = None
    coded: Coded = PLAIN
    a_scale: Tensor | None = None


_ABSENT = Part(None, None, None)  # type: ignore[arg-type]


def grouped(
    tile: Tile,
    K: int,
    routed: Part | None,
    shared: Part | None,
    num_valid_tokens: Tensor | None,
    zero_tail: bool,
    activation: dict[str, Any],
    allow_tf32: bool,
    warmup: bool,
) -> None:
    """One launch of the products of either part, or of both.

    Args:
        zero_tail, num_valid_tokens: as in `gemm2`.
        activation: of GEMM 1, the kernel's constants ACTIVATION to CLAMP_AFTER; empty for GEMM 2.
    """
    r, s = routed or _ABSENT, shared or _ABSENT
    some = routed or shared
    assert some is not None
    routed_programs = shared_programs = num_blocks = 0
    if routed:
        assert r.blocks is not None
        num_blocks = r.blocks.shape[1]
        routed_programs = num_blocks * triton.cdiv(r.out.shape[1], tile.block_n)
    if shared:
        shared_programs = triton.cdiv(s.out.shape[0], tile.block_m) * triton.cdiv(s.out.shape[1], tile.block_n)
    steps = max(triton.cdiv(part.a.shape[1], tile.block_k) for part in (routed, shared) if part is not None)
    order = activation.get("ORDER")
    gated = bool(activation) and activation["ACTIVATION"] != "relu2"
    r_desc = _descriptor(r.w, tile, gated, order) if routed and r.coded is PLAIN else None
    s_desc = _descriptor(s.w, tile, gated, "gate_up") if shared and s.coded is PLAIN else None
    args = (
        r.a,
        row_stride(r.a) if routed else 0,
        None if r_desc else r.w,
        r_desc,
        r.bias,
        r.out,
        r.blocks,
        num_blocks,
        r.sorted_slot,
        r.weight_on_input,
        s.a,
        row_stride(s.a) if shared else 0,
        None if s_desc else s.w,
        s_desc,
        s.out,
        s.gate,
        num_valid_tokens if shared else None,
        s.out.shape[0] if shared else 0,
        routed_programs,
        *r.coded[:4],
        r.a_scale,
        *s.coded[:4],
        s.a_scale,
    )
    meta = {
        "K": K,
        "COLUMNS": r.out.shape[1] if routed else 0,
        "INNER": r.a.shape[1] if routed else 0,
        "STRIDES": r.w.stride() if routed else (0, 0, 0),
        "SHARED_COLUMNS": s.out.shape[1] if shared else 0,
        "SHARED_INNER": s.a.shape[1] if shared else 0,
        "SHARED_STRIDES": s.w.stride() if shared else (0, 0),
        "ZERO_TAIL": zero_tail,
        "BLOCK_M": tile.block_m,
        "LEAST_M": tile.least_m or tile.block_m,
        "TAIL": tile.tail if routed else 0,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SWAP": tile.swap,
        "PRECISION": "tf32" if allow_tf32 else "ieee",
        "INTERPRET": INTERPRET,
        "num_warps": tile.num_warps,
        # No more than there are steps: memory that no load uses keeps other programs off the multiprocessor.
        "num_stages": max(2, min(tile.num_stages, steps)),
        "FORM": r.coded.form,
        "SHARED_FORM": s.coded.form,
        **activation,
    }
    launch(_grouped_gemm, (routed_programs + shared_programs,), args, meta, warmup=warmup)


def _descriptor(w: Tensor, tile: Tile, gated: bool, order: str | None) -> TensorDescriptor | None:
    """What the copy engine needs to fetch a tile of w [E, rows, inner] in one box; None where it cannot.

    Gate and up rows that lie apart are two planes of a view [2E, rows / 2, inner], so that a box takes both.
    """
    E, rows, inner = (1, *w.shape) if w.dim() == 2 else w.shape
    stride_row, stride_inner = w.stride()[-2:]
    stride_e = rows * stride_row if w.dim() == 2 else w.stride(0)
    aligned = all(n * w.element_size() % 16 == 0 for n in (stride_row, stride_e)) and w.data_ptr() % 16 == 0
    if not tile.tma or stride_inner != 1 or not aligned or min(stride_row, stride_e) <= 0:
        return None
    if not gated or order == "interleaved":
        box = [1, 2 * tile.block_n if gated else tile.block_n, tile.block_k]
        return TensorDescriptor(w, [E, rows, inner], [stride_e, stride_row, 1], box)
    if stride_e != rows * stride_row:
        return None
    half = rows // 2
    return TensorDescriptor(
        w, [2 * E, half, inner], [half * stride_row, stride_row, 1], [2, tile.block_n, tile.block_k]
    )


@triton.jit
def _products(
    a_rows_M,
    in_M,
    weight_on_input_M,
    a_rows_T,
    in_T,
    weight_on_input_T,
    w_ptr,
    w_desc,
    expert,
    column,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """float32 [BLOCK_M, ROWS] of rows of a by rows of w, or [ROWS, BLOCK_M] with SWAP; and [TAIL, ROWS] of the tail's.

    a_rows_M points to the start of each row of a, also where in_M says that its result is not wanted. w_ptr points to
    the expert's w; or w_desc describes that of all experts. A gated tile has 2 BLOCK_N rows of w, in one product.
    STAGES of the loop, where they are not the launch's.
    """
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    RAGGED: tl.constexpr = INNER % BLOCK_K != 0
    # What the matrix unit takes from registers: rows that are weighted first, and w where its box has two planes.
    IN_REGISTERS: tl.constexpr = WEIGHT_ON_INPUT or (SWAP and w_desc is not None)
    d_K = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_M[:, None] + d_K[None, :]
    if w_desc is None:
        row_N, in_N = weight_rows(column, COLUMNS, BLOCK_N, ROWS, INTERLEAVED)
        w_ptrs = w_ptr + row_N.to(tl.int64)[:, None] * STRIDE_ROW + d_K.to(tl.int64)[None, :] * STRIDE_INNER
    if SWAP:
        sum = tl.zeros([ROWS, BLOCK_M], tl.float32)
    else:
        sum = tl.zeros([BLOCK_M, ROWS], tl.float32)
    tail = 0.0
    if TAIL > 0:
        tail = tl.zeros([TAIL, ROWS], tl.float32)
        tail_ptrs = a_rows_T[:, None] + d_K[None, :]
    for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        # Few rows: not to fetch the others is worth a mask.
        a = load_a(a_ptrs, in_M, weight_on_input_M, d_K, INNER - start, SWAP, RAGGED, WEIGHT_ON_INPUT, INTERPRET)
        a_ptrs += BLOCK_K
        if w_desc is not None:
            if GATED and not INTERLEAVED:
                w = w_desc.load([2 * expert, column, start])
            else:
                w = w_desc.load([expert, ROWS // BLOCK_N * column, start])
            w = w.reshape(ROWS, BLOCK_K)
        else:
            if COLUMNS % BLOCK_N == 0 and not RAGGED:
                w = tl.load(w_ptrs)
            else:
                in_w = in_N[:, None] & (d_K < INNER - start)[None, :]
                w = tl.load(w_ptrs, mask=in_w, other=0.0)
            w_ptrs += BLOCK_K * STRIDE_INNER
        w = w.to(a.dtype)
        if SWAP:
            sum = tl.dot(w, a.T, sum, input_precision=PRECISION)
        else:
            sum = tl.dot(a, w.T, sum, input_precision=PRECISION)
        if IN_REGISTERS:
            sum = finished(sum, INTERPRET)
        if TAIL > 0:
            t = load_a(tail_ptrs, in_T, weight_on_input_T, d_K, INNER - start, True, RAGGED, WEIGHT_ON_INPUT, INTERPRET)
            tail_ptrs += BLOCK_K
            tail = tl.dot(t, w.T, tail, input_precision=PRECISION)
            if IN_REGISTERS:
                tail = finished(tail, INTERPRET)
    return sum, tail


@triton.jit
def _rows_of(rows_M, end, other, sorted_slot_ptr, weight_on_input_ptr, K: tl.constexpr):
    """int64 rows of a for those before `end`, row `other` for the rest; which those are; the weights of their slots."""
    in_M = rows_M < end
    read_M = tl.where(in_M, rows_M, other)
    weight_M = 1.0
    if sorted_slot_ptr is not None:
        slots_M = tl.load(sorted_slot_ptr + read_M)
        read_M = slots_M // K
        if weight_on_input_ptr is not None:
            weight_M = tl.load(weight_on_input_ptr + slots_M)
    return read_M.to(tl.int64), in_M, weight_M


@triton.jit
def rows_product(
    a_ptr,
    a_stride,
    sorted_slot_ptr,
    weight_on_input_ptr,
    w_ptr,
    w_desc,
    expert,
    bias_ptr,
    gate_ptr,
    out_ptr,
    row,
    end,
    out_end,
    column,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDER: tl.constexpr,
    CLAMP: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEAST_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr = None,
    scale_ptrs=None,
    FORM: tl.constexpr = None,
    split=0,
    parts=None,
    SPLITS: tl.constexpr = 1,
):
    """Rows row..end-1 (at most BLOCK_M + TAIL) of one expert's product; with ZEROS, zeros from there to out_end.

    A block that is half empty or emptier goes to a tile of half the height, down to LEAST_M. SWAP puts the rows of w on
    the matrix unit's longer side. STAGES of the loop, where they are not the launch's. Of a quantised w, whose FORM and
    scales are as `coded_products` has them, w_desc is None and TAIL 0. Of SPLITS programs that share a tile, this one
    multiplies part `split` of INNER; `parts` are as `whole_sum` has them, w_desc is None, TAIL 0 and BLOCK_M LEAST_M.
    """
    if BLOCK_M > LEAST_M and out_end - row <= BLOCK_M // 2:
        rows_product(
            a_ptr, a_stride, sorted_slot_ptr, weight_on_input_ptr, w_ptr, w_desc, expert, bias_ptr, gate_ptr, out_ptr,
            row, end, out_end, column, K, COLUMNS, INNER, STRIDE_ROW, STRIDE_INNER, ACTIVATION, ORDER, CLAMP,
            CLAMP_AFTER, BLOCK_M // 2, LEAST_M, 0, BLOCK_N, BLOCK_K, SWAP or BLOCK_M // 2 < 64, ZEROS, PRECISION,
            INTERPRET, STAGES, scale_ptrs, FORM,
        )  # fmt: skip
    elif TAIL > 0 and out_end - row <= BLOCK_M:
        rows_product(
            a_ptr, a_stride, sorted_slot_ptr, weight_on_input_ptr, w_ptr, w_desc, expert, bias_ptr, gate_ptr, out_ptr,
            row, end, out_end, column, K, COLUMNS, INNER, STRIDE_ROW, STRIDE_INNER, ACTIVATION, ORDER, CLAMP,
            CLAMP_AFTER, BLOCK_M, BLOCK_M, 0, BLOCK_N, BLOCK_K, SWAP, ZEROS, PRECISION, INTERPRET,
            STAGES,
        )  # fmt: skip
    else:
        GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "relu2"
        rows_M = row + tl.arange(0, BLOCK_M)
        read_M, in_M, weight_M = _rows_of(rows_M, end, row, sorted_slot_ptr, weight_on_input_ptr, K)
        a_rows_M = a_ptr + read_M * a_stride
        rows_T = row + BLOCK_M + tl.arange(0, TAIL if TAIL > 0 else 1)
        a_rows_T, in_T, weight_T = a_rows_M, in_M, weight_M
        if TAIL > 0:
            read_T, in_T, weight_T = _rows_of(rows_T, end, row, sorted_slot_ptr, weight_on_input_ptr, K)
            a_rows_T = a_ptr + read_T * a_stride
        PART: tl.constexpr = INNER // SPLITS
        if SPLITS > 1:
            a_rows_M += split * PART
        if FORM is None:
            if SPLITS > 1:
                w_ptr += split.to(tl.int64) * (PART * STRIDE_INNER)
            sum, tail = _products(
                a_rows_M, in_M, weight_M, a_rows_T, in_T, weight_T, w_ptr, w_desc, expert, column, COLUMNS, PART,
                STRIDE_ROW, STRIDE_INNER, GATED, GATED and ORDER == "interleaved", weight_on_input_ptr is not None,
                BLOCK_M, TAIL, BLOCK_N, BLOCK_K, SWAP, PRECISION, INTERPRET, STAGES,
            )  # fmt: skip
        else:
            sum = coded_products(
                a_rows_M, in_M, weight_M, w_ptr, scale_ptrs, read_M, expert, column, COLUMNS, PART, STRIDE_ROW, GATED,
                weight_on_input_ptr is not None, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, PRECISION, FORM, INTERPRET, STAGES,
                split, SPLITS,
            )  # fmt: skip
        is_whole = True
        if SPLITS > 1:
            row_N, in_N = weight_rows(
                column, COLUMNS, BLOCK_N, 2 * BLOCK_N if GATED else BLOCK_N, GATED and ORDER == "interleaved"
            )
            sum, is_whole = whole_sum(
                sum, split, parts, rows_M, in_M, row_N, in_N, 2 * COLUMNS if GATED else COLUMNS, SWAP, SPLITS
            )
        if is_whole:
            out_MN = ended(sum, bias_ptr, column, COLUMNS, ACTIVATION, ORDER, CLAMP, CLAMP_AFTER, BLOCK_N, SWAP)
            store(out_MN, out_ptr, gate_ptr, rows_M, in_M, out_end, column, COLUMNS, ZEROS)
        if TAIL > 0:
            out_TN = ended(tail, bias_ptr, column, COLUMNS, ACTIVATION, ORDER, CLAMP, CLAMP_AFTER, BLOCK_N, False)
            store(out_TN, out_ptr, gate_ptr, rows_T, in_T, out_end, column, COLUMNS, ZEROS)


@triton.jit
def routed_rows(blocks_ptr, num_blocks, block):
    """Expert, first row, and the row after the last, of a block of the map."""
    expert = tl.load(blocks_ptr + block)
    row = tl.load(blocks_ptr + num_blocks + block)
    end = tl.load(blocks_ptr + 2 * num_blocks + block)
    return expert, row, end


@triton.jit
def shared_rows(block, T, num_valid_ptr, BLOCK_M: tl.constexpr):
    """First row of a block of the shared expert, the row after its last valid one, and the one after its last."""
    row = block * BLOCK_M
    out_end = tl.minimum(row + BLOCK_M, T)
    end = out_end
    if num_valid_ptr is not None:
        end = tl.minimum(end, tl.load(num_valid_ptr))
    return row, end, out_end


@triton.jit(
    do_not_specialize=["T", "routed_programs", "num_blocks"],
    do_not_specialize_on_alignment=[
        "bias_ptr",
        "weight_on_input_ptr",
        "num_valid_ptr",
        "zero_ptr",
        "global_ptr",
        "input_ptr",
        "a_scale_ptr",
        "shared_zero_ptr",
        "shared_global_ptr",
        "shared_input_ptr",
        "shared_a_scale_ptr",
    ],
)
def _grouped_gemm(
    a_ptr,
    a_stride,
    w_ptr,
    w_desc,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    num_blocks,
    sorted_slot_ptr,
    weight_on_input_ptr,
    shared_a_ptr,
    shared_a_stride,
    shared_w_ptr,
    shared_w_desc,
    shared_out_ptr,
    gate_ptr,
    num_valid_ptr,
    T,
    routed_programs,
    scale_ptr,
    zero_ptr,
    global_ptr,
    input_ptr,
    a_scale_ptr,
    shared_scale_ptr,
    shared_zero_ptr,
    shared_global_ptr,
    shared_input_ptr,
    shared_a_scale_ptr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDES: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    SHARED_STRIDES: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEAST_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    ACTIVATION: tl.constexpr = None,
    ORDER: tl.constexpr = None,
    CLAMP: tl.constexpr = None,
    SHARED_CLAMP: tl.constexpr = None,
    CLAMP_AFTER: tl.constexpr = False,
    FORM: tl.constexpr = None,
    SHARED_FORM: tl.constexpr = None,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    program = tl.program_id(0)
    if out_ptr is not None:  # noqa: SIM102 (the compiler decides the outer one)
        if program < routed_programs:
            block = program // tl.cdiv(COLUMNS, BLOCK_N)
            column = program % tl.cdiv(COLUMNS, BLOCK_N) * BLOCK_N
            expert, row, end = routed_rows(blocks_ptr, num_blocks, block)
            if expert >= 0:
                if bias_ptr is not None:
                    bias_ptr += expert * (COLUMNS if ACTIVATION is None or ACTIVATION == "relu2" else 2 * COLUMNS)
                if w_desc is None:
                    w_ptr += expert.to(tl.int64) * STRIDES[0]
                rows_product(
                    a_ptr, a_stride, sorted_slot_ptr, weight_on_input_ptr, w_ptr, w_desc, expert, bias_ptr, None,
                    out_ptr, row, end, end, column, K, COLUMNS, INNER, STRIDES[1], STRIDES[2], ACTIVATION, ORDER, CLAMP,
                    CLAMP_AFTER, BLOCK_M, LEAST_M, TAIL, BLOCK_N, BLOCK_K, SWAP, False, PRECISION, INTERPRET, None,
                    (scale_ptr, zero_ptr, global_ptr, input_ptr, a_scale_ptr), FORM,
                )  # fmt: skip
            elif ZERO_TAIL:
                store_zeros(out_ptr, row, end, column, COLUMNS, BLOCK_M, BLOCK_N)
    if shared_out_ptr is not None:  # noqa: SIM102
        if program >= routed_programs:
            block = (program - routed_programs) // tl.cdiv(SHARED_COLUMNS, BLOCK_N)
            column = (program - routed_programs) % tl.cdiv(SHARED_COLUMNS, BLOCK_N) * BLOCK_N
            row, end, out_end = shared_rows(block, T, num_valid_ptr, BLOCK_M)
            rows_product(
                shared_a_ptr, shared_a_stride, None, None, shared_w_ptr, shared_w_desc, 0, None, gate_ptr,
                shared_out_ptr, row, end, out_end, column, K, SHARED_COLUMNS, SHARED_INNER, SHARED_STRIDES[0],
                SHARED_STRIDES[1], ACTIVATION, "gate_up", SHARED_CLAMP, CLAMP_AFTER, BLOCK_M, LEAST_M, 0, BLOCK_N,
                BLOCK_K, SWAP, num_valid_ptr is not None, PRECISION, INTERPRET, None,
                (shared_scale_ptr, shared_zero_ptr, shared_global_ptr, shared_input_ptr, shared_a_scale_ptr),
                SHARED_FORM,
            )  # fmt: skip
