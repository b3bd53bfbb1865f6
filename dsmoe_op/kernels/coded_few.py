"""Products of four-bit weights and few rows: programs of one warp, in Gluon (sm_90).

A program has 32 rows of w, or 64 short ones, and all their columns. The copy engine fills its ring of buffers with
codes, and it waits for no other warp; an SM has room for twelve programs or more, which hide what each waits for.
The numbers of the codes go to the small matrix instruction from registers, by eight rows of a: blocks of few rows
mostly have no more, and the others take a round for each eight.

Every thread has whole words of codes, and of a the columns that these are of, so that no operand changes threads: in an
instruction's sum over 16 columns any are as good as others, as long as both operands have the same ones.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.coded import Coded
from dsmoe_op.kernels.epilogue import activate
from dsmoe_op.kernels.fetched_codes import boxes, compiled_for, decodes, doubled, numbers
from dsmoe_op.kernels.launch import launch, row_stride
from dsmoe_op.kernels.ring import load_box, meet, next_buffer, read_rows, reinterpret

BLOCK_M = 16
"""Rows of the blocks that this kernel takes."""
_STEP = 256
"""Columns of a step: 128 bytes of a row of w."""
_STAGES = 3
"""Buffers at most: with more there is room for fewer warps."""


def takes(w: Tensor, rows_dtype: torch.dtype, block_m: int, coded: Coded, config: MoEConfig | None = None) -> bool:
    """Whether this kernel multiplies these weights by such rows: as `decodes` says, in blocks of 16."""
    return block_m == BLOCK_M and decodes(w, rows_dtype, coded, config)


def coded_few(
    a: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    coded: Coded,
    blocks_3B: Tensor,
    config: MoEConfig | None = None,
    bias: Tensor | None = None,
    sorted_slot_N: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """out = a w^T + bias, or with a config the activation of that, rounded once, for the rows that experts have.

    Args:
        a: h [N, I], or with a config x [T, H], of any row stride; unit stride in the last dim.
        w: [E, H, I / 2] or [E, 2I, H / 2] bytes; such as `takes` says.
        out: written; y [N, H] or h [N, I], contiguous.
        coded: what belongs to w.
        blocks_3B, sorted_slot_N: as `Rows`, of blocks of `BLOCK_M` rows; the latter with a config.
        config: that of the layer, for GEMM 1.
        bias: [E, H] or [E, 2I] contiguous, any float dtype.
    """
    columns, width = out.shape[1], w.shape[-1]
    gated = config is not None
    steps = triton.cdiv(2 * width, _STEP)
    rows = 32 if gated or steps > 1 else 64
    own = rows // (1 + gated)
    num_blocks = blocks_3B.shape[1]
    args = (
        a,
        row_stride(a),
        sorted_slot_N,
        boxes(w, columns, config, own, _STEP),
        coded.scale,
        coded.global_scale,
        bias,
        out,
        blocks_3B,
        num_blocks,
    )
    meta = {
        **compiled_for(w, columns, coded, config),
        "ROWS": rows,
        "STEP": _STEP,
        "STAGES": min(_STAGES, steps),
        "num_warps": 1,
    }
    launch(_few_coded, (num_blocks * triton.cdiv(columns, own),), args, meta, warmup=warmup)


@gluon.constexpr_function
def _words(rows):
    """Layout of a step's words [rows, 32]: a thread has eight neighbours of a row."""
    return _of_groups(rows, 1, 2)


@gluon.constexpr_function
def _of_groups(rows, groups, rank=3):
    """The same of [rows, groups, words of a group]."""
    each = 32 // groups

    def base(row, word):
        return [row, word] if rank == 2 else [row, word // each, word % each]

    registers = [base(0, word) for word in (1, 2, 4)]
    row = 8
    while row < rows:
        registers.append(base(row, 0))
        row *= 2
    lanes = [base(0, 8), base(0, 16), base(1, 0), base(2, 0), base(4, 0)]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [rows, 32] if rank == 2 else [rows, groups, each])


@gluon.constexpr_function
def _rows_of_a():
    """Layout of eight rows of a step of a: a thread has the columns of its words."""
    registers = [[0, column] for column in (1, 2, 4, 8, 16, 32)]
    return gl.DistributedLinearLayout(registers, [[0, 64], [0, 128], [1, 0], [2, 0], [4, 0]], [], [], [8, 256])


@gluon.jit
def _operands_of_w(words, scale, NAME: gl.constexpr, DTYPE: gl.constexpr, DOT: gl.constexpr):
    """Twice [rows, 128] numbers of [rows, 32] words: of each thread's first four, and of the others."""
    ROWS: gl.constexpr = words.shape[0]
    G: gl.constexpr = scale.shape[1]
    LAYOUT: gl.constexpr = _of_groups(ROWS, G)
    w3 = gl.convert_layout(gl.reshape(words, [ROWS, G, 32 // G]), LAYOUT, assert_trivial=True)
    s3 = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, LAYOUT), assert_trivial=True), 2)
    n = numbers(w3, s3, NAME, DTYPE)
    n = gl.reshape(n, [ROWS, 4, 2, 4, 2, 2, 2])  # [rows, thread, which, word, half, j % 2, j // 2]
    first, second = gl.split(gl.reshape(gl.permute(n, [0, 3, 6, 5, 1, 4, 2]), [ROWS, 128, 2]))
    return gl.convert_layout(first, DOT, assert_trivial=True), gl.convert_layout(second, DOT, assert_trivial=True)


@gluon.jit
def _operands_of_a(a, DOT: gl.constexpr):
    """Twice [128, 8], in the same order of columns."""
    t = gl.permute(gl.reshape(a, [8, 4, 2, 4, 2, 2, 2]), [3, 5, 6, 1, 4, 0, 2])
    first, second = gl.split(gl.reshape(t, [128, 8, 2]))
    return gl.convert_layout(first, DOT, assert_trivial=True), gl.convert_layout(second, DOT, assert_trivial=True)


@gluon.jit
def _load_a(a_rows, there, k, INNER: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    c = k * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    mask = gl.expand_dims(there, 1) & gl.expand_dims(c < INNER, 0)
    return gl.load(gl.expand_dims(a_rows, 1) + gl.expand_dims(c, 0), mask=mask, other=0.0)


@gluon.jit
def _load_scales(rows_ptr, there, k, COUNT: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Of step k: [rows, COUNT], zeros for rows and groups that are not there."""
    g = k * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = gl.expand_dims(rows_ptr, 1) + gl.expand_dims(g, 0)
    mask = gl.expand_dims(there, 1) & gl.expand_dims(g < GROUPS, 0)
    if ptrs.dtype.element_ty == gl.uint8:
        return gl.load(ptrs, mask=mask, other=0)
    else:
        return gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def _fetch(w_desc, w_bufs, full, s, expert, column, k, there, COLUMNS: gl.constexpr, OWN: gl.constexpr,
           STEP: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr):  # fmt: skip
    """Codes of step k into buffer s."""
    HALVES: gl.constexpr = 2 if GATED else 1
    bar = full.index(s)
    mbarrier.expect(bar, HALVES * OWN * (STEP // 2), pred=there)
    for i in gl.static_range(HALVES):
        if INTERLEAVED:
            at = [expert * COLUMNS + column, i, k * (STEP // 2)]
        else:
            at = [HALVES * expert + i, column, k * (STEP // 2)]
        load_box(w_desc, at, bar, w_bufs.index(HALVES * s + i), pred=there)


@gluon.jit
def _row_of_w(c, half, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Of an expert's rows, that of an output column's first or second half."""
    if INTERLEAVED:
        return 2 * c + half
    else:
        return c + half * COLUMNS


@gluon.jit
def _with_bias(sum, bias_ptr, c, half, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr):
    bias = gl.load(bias_ptr + _row_of_w(c, half, COLUMNS, INTERLEAVED), mask=c < COLUMNS, other=0.0)
    return sum + gl.expand_dims(bias.to(gl.float32), 1)


@gluon.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=["bias_ptr", "global_ptr"],
)
def _few_coded(
    a_ptr,
    a_stride,
    sorted_slot_ptr,
    w_desc,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    num_blocks,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    NAME: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    PER_TENSOR: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    UP_FIRST: gl.constexpr,
    CLAMP: gl.constexpr,
    CLAMP_AFTER: gl.constexpr,
):
    GATED: gl.constexpr = ACTIVATION is not None
    HALVES: gl.constexpr = 2 if GATED else 1
    OWN: gl.constexpr = ROWS // HALVES
    TILES: gl.constexpr = (COLUMNS + OWN - 1) // OWN
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    COUNT: gl.constexpr = STEP // GROUP
    DTYPE: gl.constexpr = a_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A_LAYOUT: gl.constexpr = _rows_of_a()
    SCALES: gl.constexpr = gl.SliceLayout(2, _of_groups(ROWS, COUNT))
    w_bufs = gl.allocate_shared_memory(
        gl.uint8, [HALVES * STAGES, w_desc.block_shape[0], w_desc.block_shape[1], STEP // 2], w_desc.layout
    )
    words = reinterpret(w_bufs, gl.int32, [STAGES, ROWS, STEP // 8], gl.NVMMASharedLayout(STEP // 2, 32, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()

    block = gl.program_id(0) // TILES
    column = gl.program_id(0) % TILES * OWN
    expert = gl.load(blocks_ptr + block)
    row = gl.load(blocks_ptr + num_blocks + block)
    end = gl.load(blocks_ptr + 2 * num_blocks + block)
    if expert < 0:
        return
    base = expert.to(gl.int64) * (HALVES * COLUMNS)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCALES))
    # In 64 bits, although 32 would take eleven registers less (Triton 3.6, int4): with those sixteen programs fit on an
    # SM and leave the shared expert's none, as it seems, since layers were slower; alone twelve are as fast (NOTES.md).
    # Triton 3.8 takes 128 registers this way too, and sixteen fit.
    scale_rows = scale_ptr + (base + _row_of_w(column + r % OWN, r // OWN, COLUMNS, INTERLEAVED)) * GROUPS
    scale_there = column + r % OWN < COLUMNS
    s = expert * 0
    phase = s
    while row < end:
        into = s
        for i in gl.static_range(STAGES):
            _fetch(w_desc, w_bufs, full, into, expert, column, i, True, COLUMNS, OWN, STEP, GATED, INTERLEAVED)
            into, _ = next_buffer(into, phase, STAGES)
        m = row + gl.arange(0, 8, layout=gl.SliceLayout(1, A_LAYOUT))
        a_there = m < end
        a_rows = a_ptr + read_rows(sorted_slot_ptr, m, end, K) * a_stride
        a = _load_a(a_rows, a_there, 0, INNER, STEP, A_LAYOUT)
        scale = _load_scales(scale_rows, scale_there, 0, COUNT, GROUPS, SCALES)
        # Two sums, so that an instruction waits for the one before the last at most.
        first_sum = gl.zeros([ROWS, 8], gl.float32, MMA)
        second_sum = gl.zeros([ROWS, 8], gl.float32, MMA)
        for k in range(STEPS):
            mbarrier.wait(full.index(s), phase)
            codes = words.index(s).load(_words(ROWS))
            ahead = k + STAGES
            _fetch(
                w_desc, w_bufs, full, s, expert, column, ahead, ahead < STEPS, COLUMNS, OWN, STEP, GATED, INTERLEAVED
            )
            next_a = a
            if STEPS > 1:
                next_a = _load_a(a_rows, a_there & (k + 1 < STEPS), k + 1, INNER, STEP, A_LAYOUT)
            next_scale = _load_scales(scale_rows, scale_there & (k + 1 < STEPS), k + 1, COUNT, GROUPS, SCALES)
            meet()  # or ptxas moves these loads to where they are used
            w0, w1 = _operands_of_w(codes, doubled(scale, DTYPE), NAME, DTYPE, gl.DotOperandLayout(0, MMA, 2))
            a0, a1 = _operands_of_a(a, gl.DotOperandLayout(1, MMA, 2))
            first_sum = mma_v2(w0, a0, first_sum)
            second_sum = mma_v2(w1, a1, second_sum)
            a = next_a
            scale = next_scale
            s, phase = next_buffer(s, phase, STAGES)
        sum = first_sum + second_sum
        if GATED:
            first, second = gl.split(gl.permute(gl.reshape(sum, [2, OWN, 8]), [1, 2, 0]))
            c = column + gl.arange(0, OWN, layout=gl.SliceLayout(1, first.type.layout))
            if PER_TENSOR > 0:
                first = first * gl.load(global_ptr + expert * PER_TENSOR)
                second = second * gl.load(global_ptr + expert * PER_TENSOR + PER_TENSOR - 1)
            if bias_ptr is not None:
                first = _with_bias(first, bias_ptr + base, c, 0, COLUMNS, INTERLEAVED)
                second = _with_bias(second, bias_ptr + base, c, 1, COLUMNS, INTERLEAVED)
            if UP_FIRST:
                out = activate(second, first, ACTIVATION, CLAMP, CLAMP_AFTER)
            else:
                out = activate(first, second, ACTIVATION, CLAMP, CLAMP_AFTER)
        else:
            c = column + gl.arange(0, OWN, layout=gl.SliceLayout(1, sum.type.layout))
            if PER_TENSOR > 0:
                sum = sum * gl.load(global_ptr + expert * PER_TENSOR)
            if bias_ptr is not None:
                sum = _with_bias(sum, bias_ptr + base, c, 0, COLUMNS, False)
            out = sum
        rows = row + gl.arange(0, 8, layout=gl.SliceLayout(0, out.type.layout))
        ptrs = out_ptr + gl.expand_dims(rows.to(gl.int64) * COLUMNS, 0) + gl.expand_dims(c, 1)
        mask = gl.expand_dims(rows < end, 0) & gl.expand_dims(c < COLUMNS, 1)
        gl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        row += 8
