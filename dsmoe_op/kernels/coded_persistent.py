"""Products of four-bit weights and many rows: persistent programs with a producer and two consumers, in Gluon (sm_90).

One kernel for GEMM 1 and GEMM 2, of which one program an SM takes item after item, as in `gemm2_persistent`. An item is
a block's rows by 256 rows of w, which the matrix unit has on its longer side and takes from registers.

- The producer, a warpgroup, gathers rows of a with asynchronous copies, and fetches codes of w by the copy engine. A
  buffer is full when all of its threads' copies and the engine's have come.
- A consumer has two times 64 rows of w: pairs of gate and up rows, or neighbours. It makes numbers of the codes of one
  while the product with the other runs.

Columns of a come in the order in which a word's codes become numbers (`reorder.py`), so they go straight from memory to
where the matrix unit reads them. A tile has one height, however few rows a block has: with several in one kernel, and
an inner product of a single step, ptxas 12.8 used a shared-memory descriptor of one path in another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.coded import Coded
from dsmoe_op.kernels.epilogue import activate
from dsmoe_op.kernels.fetched_codes import (
    boxes,
    compiled_for,
    decodes,
    doubled,
    numbers,
)
from dsmoe_op.kernels.launch import launch
from dsmoe_op.kernels.ring import (
    gather,
    in_two,
    item_at,
    load_box,
    multiprocessors,
    next_buffer,
    read_rows,
    reinterpret,
    ring_of,
    take_item,
    tell,
    told,
)

_ROWS = 64
"""Rows of w in one product of a consumer, which has two."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_RING = {32: (256, 4), 64: (128, 6), 128: (128, 4)}
"""Columns of a step, and buffers, by the rows of a block."""


def takes(w: Tensor, rows_dtype: torch.dtype, block_m: int, coded: Coded, config: MoEConfig | None = None) -> bool:
    """Whether this kernel multiplies these weights by such rows: as `decodes` says, in blocks of 32, 64 or 128."""
    return block_m in _RING and decodes(w, rows_dtype, coded, config)


def coded_persistent(
    a: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    coded: Coded,
    block_m: int,
    blocks_3B: Tensor,
    taken: Tensor,
    config: MoEConfig | None = None,
    bias: Tensor | None = None,
    sorted_slot_N: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """out = a w^T + bias, or with a config the activation of that, rounded once, for the rows that experts have.

    Args:
        a: rows in the order of `reorder_columns`, contiguous: h [N, I], or with a config x [T, H].
        w: [E, H, I / 2] or [E, 2I, H / 2] bytes; such as `takes` says.
        out: written; y [N, H] or h [N, I], contiguous.
        coded: what belongs to w.
        blocks_3B, sorted_slot_N: as `Rows`, of blocks of block_m rows; the latter with a config.
        taken: int32 [2], zeros before; changed: GEMM 2 counts in the first, GEMM 1 in the second.
        config: that of the layer, for GEMM 1.
        bias: [E, H] or [E, 2I] contiguous, any float dtype.
    """
    columns = out.shape[1]
    step, stages = _RING[block_m]
    args = (
        a,
        sorted_slot_N,
        boxes(w, columns, config, _ROWS, step),
        coded.scale,
        coded.global_scale,
        bias,
        out,
        blocks_3B,
        blocks_3B.shape[1],
        out.shape[0],
        taken,
    )
    meta = {
        **compiled_for(w, columns, coded, config),
        "BLOCK_M": block_m,
        "STEP": step,
        "STAGES": stages,
        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "num_warps": 4,
    }
    launch(_persistent_coded, (multiprocessors(w.device),), args, meta, warmup=warmup)


@gluon.jit
def _produce(
    a_ptr, sorted_slot_ptr, w_desc, blocks_ptr, num_blocks, N, taken_ptr, a_bufs, w_bufs, info, full, empty,
    K: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, BLOCK_M: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    PANELS: gl.constexpr = STEP // 64
    WIDE: gl.constexpr = 128 if GATED else 256  # columns of an item
    OWN: gl.constexpr = WIDE // 2
    TILES: gl.constexpr = (COLUMNS + WIDE - 1) // WIDE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    item = gl.program_id(0)
    expert, row, end, tile = item_at(blocks_ptr, num_blocks, N, item, TILES, BLOCK_M)
    s = item * 0
    phase = s + 1  # a fresh barrier counts as past its odd phase: the first wait for each buffer passes
    while expert >= 0:
        # The next item is looked up while this one is fetched.
        item = take_item(taken_ptr, item)
        next_expert, next_row, next_end, next_tile = item_at(blocks_ptr, num_blocks, N, item, TILES, BLOCK_M)
        rows = row + m
        a_rows = a_ptr + read_rows(sorted_slot_ptr, rows, end, K) * INNER
        column = tile * WIDE
        for start in range(0, INNER, STEP):
            mbarrier.wait(empty.index(s), phase)
            if start == 0:
                tell(info, s, expert, row, end, tile)
            bar = full.index(s)
            mbarrier.expect(bar, 4 * 64 * (STEP // 2))
            for i in gl.static_range(4):
                if INTERLEAVED:
                    at = [expert * COLUMNS + column + OWN * (i // 2), i % 2, start // 2]
                elif GATED:
                    at = [2 * expert + i % 2, column + OWN * (i // 2), start // 2]
                else:
                    at = [expert, column + 64 * i, start // 2]
                load_box(w_desc, at, bar, w_bufs.index(4 * s + i))
            for p in gl.static_range(PANELS):
                c = start + 64 * p + d
                there = gl.expand_dims(rows < end, 1) & gl.expand_dims(c < INNER, 0)
                pointers = gl.expand_dims(a_rows, 1) + gl.expand_dims(c, 0)
                gather(a_bufs.index(PANELS * s + p), pointers, mask=there)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            s, phase = next_buffer(s, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
        tile = next_tile
    mbarrier.wait(empty.index(s), phase)
    tell(info, s, -1, 0, 0, 0)
    mbarrier.arrive(full.index(s), count=1)
    async_copy.mbarrier_arrive(full.index(s), increment_count=False)


@gluon.constexpr_function
def _words(words):
    """Layout of [64, words] int32 in which a thread has what it gives the matrix unit."""
    bits = []
    w = 4
    while w < words:
        bits.append([0, w])
        w *= 2
    return gl.DistributedLinearLayout(
        [*bits, [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, words]
    )


@gluon.constexpr_function
def _of_groups(words, groups):
    """The same layout of [64, groups, words / groups]."""
    each = words // groups

    def split(base):
        return [base[0], base[1] // each, base[1] % each]

    layout = _words(words)
    return gl.DistributedLinearLayout(
        [split(b) for b in layout.reg_bases], [split(b) for b in layout.lane_bases],
        [split(b) for b in layout.warp_bases], [], [64, groups, each],
    )  # fmt: skip


@gluon.jit
def _scales(rows_ptr, there, k, STEP: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Of step k: [64, COUNT], at least one for each 64 columns; zeros for rows and groups that are not there."""
    COUNT: gl.constexpr = STEP // (GROUP if GROUP < 64 else 64)
    WORDS: gl.constexpr = gl.SliceLayout(2, _of_groups(STEP // 8, COUNT))
    j = gl.arange(0, COUNT, layout=gl.SliceLayout(0, WORDS))
    if GROUP <= 64:
        group = k * COUNT + j
    else:
        group = (k * STEP + 64 * j) // GROUP
    ptrs = gl.expand_dims(rows_ptr, 1) + gl.expand_dims(group, 0)
    mask = gl.expand_dims(there, 1) & gl.expand_dims(group < GROUPS, 0)
    if ptrs.dtype.element_ty == gl.uint8:
        return gl.load(ptrs, mask=mask, other=0)
    else:
        return gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def _operand(words, scale, NAME: gl.constexpr, DTYPE: gl.constexpr, DOT: gl.constexpr):
    """[64, 64] numbers of [64, 8] words, columns in the order of `in_order`; scale is int32 [64, groups], doubled."""
    G: gl.constexpr = scale.shape[1]
    LAYOUT: gl.constexpr = _of_groups(8, G)
    w3 = gl.convert_layout(gl.reshape(words, [64, G, 8 // G]), LAYOUT, assert_trivial=True)
    s3 = gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(2, LAYOUT), assert_trivial=True), 2)
    n = gl.permute(gl.reshape(numbers(w3, s3, NAME, DTYPE), [64, 2, 4, 2, 2, 2]), [0, 1, 5, 4, 2, 3])
    return gl.convert_layout(gl.reshape(n, [64, 64]), DOT, assert_trivial=True)


@gluon.jit
def _panels(t, PANELS: gl.constexpr):
    """The parts of a step that are 64 columns of a: two or four."""
    first, second = in_two(t)
    if PANELS == 2:
        return first, second
    else:
        p0, p1 = in_two(first)
        p2, p3 = in_two(second)
        return p0, p1, p2, p3


@gluon.jit
def _products(
    a_bufs, w_words, full, empty, first_ptr, second_ptr, first_there, second_there, s, phase,
    WHICH: gl.constexpr, M: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    NAME: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """float32 [64, M] twice: the products of 64 rows of w and M rows of a each; then the next buffer and its phase."""
    DTYPE: gl.constexpr = a_bufs.dtype
    PANELS: gl.constexpr = STEP // 64
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    first = gl.zeros([64, M], gl.float32, MMA)
    second = gl.zeros([64, M], gl.float32, MMA)
    first_scales = _scales(first_ptr, first_there, 0, STEP, GROUP, GROUPS)
    second_scales = _scales(second_ptr, second_there, 0, STEP, GROUP, GROUPS)
    for k in range(STEPS):
        mbarrier.wait(full.index(s), phase)
        fence_async_shared()
        LAYOUT: gl.constexpr = _words(STEP // 8)
        first_words = _panels(w_words.index(4 * s + 2 * WHICH).load(LAYOUT), PANELS)
        second_words = _panels(w_words.index(4 * s + 2 * WHICH + 1).load(LAYOUT), PANELS)
        # The next step's scales are under way while this one's products are.
        next_first = _scales(first_ptr, first_there & (k + 1 < STEPS), k + 1, STEP, GROUP, GROUPS)
        next_second = _scales(second_ptr, second_there & (k + 1 < STEPS), k + 1, STEP, GROUP, GROUPS)
        of_first = _panels(first_scales, PANELS)
        of_second = _panels(second_scales, PANELS)
        second_w = None
        # A product is under way while the next one's numbers are made, but none from step to step: ptxas 12.8 then lets
        # every product wait for the one before.
        for p in gl.static_range(PANELS):
            a = a_bufs.index(PANELS * s + p).permute([1, 0])
            first_w = _operand(first_words[p], doubled(of_first[p], DTYPE), NAME, DTYPE, DOT)
            first = warpgroup_mma(first_w, a, first, is_async=True)
            if p > 0:
                second, second_w = warpgroup_mma_wait(1, deps=[second, second_w])
            second_w = _operand(second_words[p], doubled(of_second[p], DTYPE), NAME, DTYPE, DOT)
            second = warpgroup_mma(second_w, a, second, is_async=True)
            first, first_w = warpgroup_mma_wait(1, deps=[first, first_w])
        second, second_w = warpgroup_mma_wait(0, deps=[second, second_w])
        mbarrier.arrive(empty.index(s), count=1)
        first_scales = next_first
        second_scales = next_second
        s, phase = next_buffer(s, phase, STAGES)
    return first, second, s, phase


@gluon.jit
def _write(value, buf, out_ptr, row, end, column, COLUMNS: gl.constexpr):
    """Rows of out, from their transposed tile, through shared memory: 16 bytes a thread."""
    M: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buf.permute([1, 0]).store(value.to(out_ptr.dtype.element_ty))
    rows = row + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    c = column + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(c < COLUMNS, 0)
    ptrs = out_ptr + gl.expand_dims(rows.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(c, 0)
    gl.store(ptrs, buf.load(LAYOUT), mask=mask)


@gluon.jit
def _bias_of(ptr, rows, mask):
    """float32, of these rows of w."""
    return gl.load(ptr + rows, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _tile(
    a_bufs, w_words, out_buf, full, empty, scale_ptr, global_ptr, bias_ptr, out_ptr, expert, row, end, column, s, phase,
    WHICH: gl.constexpr, M: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, NAME: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, PER_TENSOR: gl.constexpr,
    INTERLEAVED: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr,
    CLAMP: gl.constexpr, CLAMP_AFTER: gl.constexpr,
):  # fmt: skip
    """A consumer's part of an item, from its first buffer to its rows of out; the next buffer and its phase."""
    GATED: gl.constexpr = ACTIVATION is not None
    ALL_ROWS: gl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    COUNT: gl.constexpr = STEP // (GROUP if GROUP < 64 else 64)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _of_groups(STEP // 8, COUNT))))
    base = expert.to(gl.int64) * ALL_ROWS
    if INTERLEAVED:
        first_rows = 2 * (column + r)
        second_rows = first_rows + 1
    elif GATED:
        first_rows = column + r
        second_rows = first_rows + COLUMNS
    else:
        first_rows = column + r
        second_rows = first_rows + 64
    first_there = column + r < COLUMNS
    second_there = first_there
    if not GATED:
        second_there = second_rows < COLUMNS
    first_ptr = scale_ptr + (base + first_rows) * GROUPS
    second_ptr = scale_ptr + (base + second_rows) * GROUPS
    first, second, s, phase = _products(
        a_bufs, w_words, full, empty, first_ptr, second_ptr, first_there, second_there, s, phase,
        WHICH, M, INNER, STEP, STAGES, NAME, GROUP, GROUPS,
    )  # fmt: skip
    if PER_TENSOR > 0:
        first = first * gl.load(global_ptr + expert * PER_TENSOR)
        second = second * gl.load(global_ptr + expert * PER_TENSOR + PER_TENSOR - 1)
    if bias_ptr is not None:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, first.type.layout))
        bias = bias_ptr + base
        if INTERLEAVED:
            bias_first = _bias_of(bias, 2 * (column + i), column + i < COLUMNS)
            bias_second = _bias_of(bias, 2 * (column + i) + 1, column + i < COLUMNS)
        elif GATED:
            bias_first = _bias_of(bias, column + i, column + i < COLUMNS)
            bias_second = _bias_of(bias, COLUMNS + column + i, column + i < COLUMNS)
        else:
            bias_first = _bias_of(bias, column + i, column + i < COLUMNS)
            bias_second = _bias_of(bias, column + 64 + i, column + 64 + i < COLUMNS)
        first = first + gl.expand_dims(bias_first, 1)
        second = second + gl.expand_dims(bias_second, 1)
    if GATED:
        if UP_FIRST:
            h = activate(second, first, ACTIVATION, CLAMP, CLAMP_AFTER)
        else:
            h = activate(first, second, ACTIVATION, CLAMP, CLAMP_AFTER)
        _write(h, out_buf, out_ptr, row, end, column, COLUMNS)
    else:
        _write(first, out_buf, out_ptr, row, end, column, COLUMNS)
        _write(second, out_buf, out_ptr, row, end, column + 64, COLUMNS)
    return s, phase


@gluon.jit
def _consume(
    a_bufs, w_words, out_bufs, info, full, empty, scale_ptr, global_ptr, bias_ptr, out_ptr,
    WHICH: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, BLOCK_M: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, NAME: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, PER_TENSOR: gl.constexpr,
    INTERLEAVED: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr,
    CLAMP: gl.constexpr, CLAMP_AFTER: gl.constexpr,
):  # fmt: skip
    OWN: gl.constexpr = 64 if ACTIVATION is not None else 128
    out_buf = out_bufs.index(WHICH)
    mbarrier.wait(full.index(0), 0)
    expert, row, end, tile = told(info, 0)
    s = expert * 0
    phase = s
    while expert >= 0:
        column = (2 * tile + WHICH) * OWN
        s, phase = _tile(
            a_bufs, w_words, out_buf, full, empty, scale_ptr, global_ptr, bias_ptr, out_ptr, expert, row, end, column,
            s, phase, WHICH, BLOCK_M, COLUMNS, INNER, STEP, STAGES, NAME, GROUP, GROUPS, PER_TENSOR, INTERLEAVED,
            ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
        )  # fmt: skip
        mbarrier.wait(full.index(s), phase)
        expert, row, end, tile = told(info, s)


@gluon.jit(
    do_not_specialize=["num_blocks", "N"],
    do_not_specialize_on_alignment=["bias_ptr", "taken_ptr", "global_ptr"],
)
def _persistent_coded(
    a_ptr,
    sorted_slot_ptr,
    w_desc,
    scale_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    num_blocks,
    N,
    taken_ptr,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    BLOCK_M: gl.constexpr,
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
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = a_ptr.dtype.element_ty
    PANELS: gl.constexpr = STEP // 64
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, 64], DTYPE)
    WORDS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(STEP // 2, 32, 2)
    a_bufs = gl.allocate_shared_memory(DTYPE, [PANELS * STAGES, BLOCK_M, 64], A_LAYOUT)
    w_bufs = gl.allocate_shared_memory(
        gl.uint8, [4 * STAGES, w_desc.block_shape[0], w_desc.block_shape[1], w_desc.block_shape[2]], w_desc.layout
    )
    w_words = reinterpret(w_bufs, gl.int32, [4 * STAGES, 64, STEP // 8], WORDS_LAYOUT)
    out_bufs = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2, BLOCK_M, 64], A_LAYOUT)
    info, full, empty = ring_of(STAGES, 1 + 32 * 4)  # the engine's arrival, and one of each thread of the producer
    if ACTIVATION is not None:
        taken_ptr += 1
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    a_bufs, w_words, out_bufs, info, full, empty, scale_ptr, global_ptr, bias_ptr, out_ptr,
                    0, COLUMNS, INNER, BLOCK_M, STEP, STAGES, NAME, GROUP, GROUPS, PER_TENSOR, INTERLEAVED,
                    ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
                ),
            ),
            (
                _consume,
                (
                    a_bufs, w_words, out_bufs, info, full, empty, scale_ptr, global_ptr, bias_ptr, out_ptr,
                    1, COLUMNS, INNER, BLOCK_M, STEP, STAGES, NAME, GROUP, GROUPS, PER_TENSOR, INTERLEAVED,
                    ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
                ),
            ),
            (
                _produce,
                (
                    a_ptr, sorted_slot_ptr, w_desc, blocks_ptr, num_blocks, N, taken_ptr, a_bufs, w_bufs, info, full,
                    empty, K, COLUMNS, INNER, BLOCK_M, STEP, STAGES, ACTIVATION is not None, INTERLEAVED,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
