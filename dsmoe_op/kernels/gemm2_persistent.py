"""GEMM 2 for many rows: persistent programs with a producer and two consumers, in Gluon (sm_90).

A product of I columns is short beside what begins and ends a program, so one program an SM takes item after item. An
item is a tile of a block's rows: 128 rows by 256 columns of y, or with fp8 128 by 128, or 64 by 256. Its warps divide
the work:

- The producer fetches tiles of h and w2 into a ring of buffers by the copy engine, and runs ahead into the next item
  while the consumers finish one. It takes items by a counter, so that programs with cheap items take more of them.
- Two consumers (a warpgroup each) multiply 64 rows each, or half of the columns of the same 64, and store. One without
  rows only passes the buffers on. With fp8, each step's product is added in float32, with the scales of its 128
  columns; while one consumer does so the other one multiplies.

The ring's barriers, and how an item is told, are as `ring` says.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsmoe_op.kernels.coded import PLAIN, Coded
from dsmoe_op.kernels.launch import launch
from dsmoe_op.kernels.ring import (
    GL_DTYPE,
    buffer_before,
    in_two,
    is_hopper,
    item_at,
    load_box,
    load_scales,
    multiprocessors,
    next_buffer,
    ring_of,
    store_box,
    take_item,
    tell,
    told,
)

BLOCK_M = 128
"""Rows of a block of 16-bit rows; of fp8, 64 too."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56


class _Boxes(NamedTuple):
    """What a stage of the ring holds: boxes of 64 rows of h, and of rows of w2, of so many columns."""

    h_boxes: int
    w_boxes: int
    w_rows: int
    columns: int
    stages: int


_BOXES = {
    (False, 128): _Boxes(2, 1, 256, 64, 4),
    (True, 128): _Boxes(2, 1, 128, 128, 6),
    (True, 64): _Boxes(1, 2, 128, 128, 4),
}
"""By whether weights are fp8, and the rows of a block."""


def takes(w2: Tensor, block_m: int = BLOCK_M, coded: Coded = PLAIN) -> bool:
    """Whether their GPU has Hopper's matrix unit, and its copy engine can fetch these weights.

    They are contiguous, aligned to 16 bytes, and 16 bits wide, or fp8 with scales for 128 by 128 or for a row.
    """
    form = () if coded.form is None else coded.form
    kinds = form[:1] in ((), ("fp8_channel",)) or form[:2] == ("fp8_block", 128)
    aligned = w2.data_ptr() % 16 == 0 and w2.shape[-1] * w2.element_size() % 16 == 0
    fits = kinds and ((w2.itemsize == 1), block_m) in _BOXES and (w2.itemsize == 1) == bool(form)
    return fits and w2.dtype in GL_DTYPE and w2.is_contiguous() and aligned and is_hopper(w2.device)


def gemm2_persistent(
    h_NI: Tensor,
    w2: Tensor,
    y_NH: Tensor,
    *,
    bias: Tensor | None = None,
    blocks_3B: Tensor | None = None,
    block_m: int = BLOCK_M,
    taken: Tensor | None = None,
    coded: Coded = PLAIN,
    h_scales: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """y = h w2^T + bias, rounded once, for the rows that experts have.

    Args:
        h_NI, y_NH: [N, I] and, written, [N, H]; contiguous, aligned to 16 bytes. h in the dtype of w2, y in 16 bits.
        w2: [E, H, I], or [H, I] for the one expert that has all rows; such as `takes` says.
        bias: [E, H] contiguous, any float dtype.
        blocks_3B: as `Rows`, of blocks of block_m rows. None: one expert has all rows.
        taken: int32 [2], the first one zero before; changed. None: programs take items in turn.
        coded, h_scales: what belongs to w2, and to h, where they are fp8: h_scales as `quantize_rows` makes them.
    """
    H, I = w2.shape[-2:]
    rows = w2.numel() // I
    boxes = _BOXES[w2.itemsize == 1, block_m]
    form = coded.form
    args = (
        _descriptor(h_NI, [y_NH.shape[0], I], [64, boxes.columns]),  # a warm-up may have no h
        _descriptor(w2, [rows, I], [boxes.w_rows, boxes.columns]),
        y_NH,
        _descriptor(y_NH, [y_NH.shape[0], H], [64, 128]),
        bias,
        blocks_3B,
        triton.cdiv(y_NH.shape[0], block_m) if blocks_3B is None else blocks_3B.shape[1],
        y_NH.shape[0],
        taken,
        h_scales if form else None,
        coded.scale,
    )
    meta = {
        "COLUMNS": H,
        "INNER": I,
        "H_BOXES": boxes.h_boxes,
        "W_BOXES": boxes.w_boxes,
        "STAGES": boxes.stages,
        "SCALES": None if form is None else form[0],
        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "num_warps": 4,
    }
    launch(_persistent_gemm2, (multiprocessors(w2.device),), args, meta, warmup=warmup)


def _descriptor(base: Tensor, shape: list[int], box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(box, GL_DTYPE[base.dtype])
    return TensorDescriptor(base, shape, [shape[1], 1], box, layout)


@gluon.jit
def _produce(
    h_desc, w_desc, blocks_ptr, num_blocks, N, taken_ptr, h_bufs, w_bufs, info, full, empty,
    COLUMNS: gl.constexpr, INNER: gl.constexpr, H_BOXES: gl.constexpr, W_BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    W_ROWS: gl.constexpr = w_bufs.shape[1]
    BLOCK_K: gl.constexpr = w_bufs.shape[2]
    BLOCK_N: gl.constexpr = W_BOXES * W_ROWS
    TILES: gl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    W_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    H_BYTES: gl.constexpr = 64 * BLOCK_K * w_desc.dtype.primitive_bitwidth // 8
    item = gl.program_id(0)
    expert, row, end, tile = item_at(blocks_ptr, num_blocks, N, item, TILES, 64 * H_BOXES)
    s = item * 0
    phase = s + 1  # a fresh barrier counts as past its odd phase: the first wait for each buffer passes
    while expert >= 0:
        # The next item is looked up while this one is fetched.
        item = take_item(taken_ptr, item)
        next_expert, next_row, next_end, next_tile = item_at(blocks_ptr, num_blocks, N, item, TILES, 64 * H_BOXES)
        first = expert * COLUMNS + tile * BLOCK_N
        for start in range(0, INNER, BLOCK_K):
            mbarrier.wait(empty.index(s), phase)
            if start == 0:
                tell(info, s, expert, row, end, tile)
            bar = full.index(s)
            if H_BOXES == 2:
                both = end - row > 64
                mbarrier.expect(bar, W_BYTES + H_BYTES, pred=end - row <= 64)
                mbarrier.expect(bar, W_BYTES + 2 * H_BYTES, pred=both)
                load_box(w_desc, [first, start], bar, w_bufs.index(s))
                load_box(h_desc, [row, start], bar, h_bufs.index(2 * s))
                load_box(h_desc, [row + 64, start], bar, h_bufs.index(2 * s + 1), pred=both)
            else:
                mbarrier.expect(bar, W_BYTES + H_BYTES)
                load_box(h_desc, [row, start], bar, h_bufs.index(s))
                load_box(w_desc, [first, start], bar, w_bufs.index(2 * s))
                load_box(w_desc, [first + W_ROWS, start], bar, w_bufs.index(2 * s + 1))
            s, phase = next_buffer(s, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
        tile = next_tile
    mbarrier.wait(empty.index(s), phase)
    tell(info, s, -1, 0, 0, 0)
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def _consume(
    h_bufs, w_bufs, out_bufs, info, full, empty, y_ptr, y_desc, bias_ptr, h_scale_ptr, w_scale_ptr,
    WHICH: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, H_BOXES: gl.constexpr, W_BOXES: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Of each item the 64 rows from 64 * WHICH on, or its columns in the box WHICH of w2."""
    W_ROWS: gl.constexpr = w_bufs.shape[1]
    BLOCK_K: gl.constexpr = w_bufs.shape[2]
    STEPS: gl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, W_ROWS, 256 // w_bufs.dtype.primitive_bitwidth]
    )
    H_BOX: gl.constexpr = WHICH * (H_BOXES - 1)
    W_BOX: gl.constexpr = WHICH * (W_BOXES - 1)
    out_buf = out_bufs.index(WHICH)
    # Never read before a product has replaced it. Outside the loop, so that no item has to clear it.
    product = gl.zeros([64, W_ROWS], gl.float32, LAYOUT)
    mbarrier.wait(full.index(0), 0)
    expert, row, end, tile = told(info, 0)
    s = expert * 0
    phase = s
    while expert >= 0:
        row = row + 64 * H_BOX
        column = (tile * W_BOXES + W_BOX) * W_ROWS
        if end > row:
            if SCALES is None:
                for k in range(STEPS):
                    mbarrier.wait(full.index(s), phase)
                    w = w_bufs.index(W_BOXES * s + W_BOX).permute([1, 0])
                    h = h_bufs.index(H_BOXES * s + H_BOX)
                    product = warpgroup_mma(h, w, product, use_acc=k > 0, is_async=True)
                    product = warpgroup_mma_wait(1, deps=[product])
                    # The product before this one is done: its buffers are free.
                    mbarrier.arrive(empty.index(buffer_before(s, STAGES)), count=1, pred=k > 0)
                    s, phase = next_buffer(s, phase, STAGES)
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(buffer_before(s, STAGES)), count=1)
                acc = product
            else:
                acc = gl.zeros([64, W_ROWS], gl.float32, LAYOUT)
                rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
                for k in range(STEPS):
                    if SCALES == "fp8_block":  # under way while the product is
                        factor = _of_step(h_scale_ptr, w_scale_ptr, expert, rows, end, column, k, COLUMNS, STEPS)
                    mbarrier.wait(full.index(s), phase)
                    w = w_bufs.index(W_BOXES * s + W_BOX).permute([1, 0])
                    h = h_bufs.index(H_BOXES * s + H_BOX)
                    product = warpgroup_mma(h, w, product, use_acc=False, is_async=True)
                    product = warpgroup_mma_wait(0, deps=[product])
                    mbarrier.arrive(empty.index(s), count=1)
                    if SCALES == "fp8_block":
                        acc = acc + product * gl.expand_dims(factor, 1)
                    else:
                        acc = acc + product
                    s, phase = next_buffer(s, phase, STAGES)
                if SCALES == "fp8_channel":
                    acc = _of_rows(acc, h_scale_ptr, w_scale_ptr, expert, rows, end, column, COLUMNS)
            if W_ROWS == 256:
                left, right = in_two(acc)
                if bias_ptr is not None:
                    bias = bias_ptr + expert * COLUMNS
                    left = _add_bias(left, bias, column, COLUMNS)
                    right = _add_bias(right, bias, column + 128, COLUMNS)
                tma.store_wait(0)  # the item before has left the buffer
                _write(left.to(out_bufs.dtype), out_buf, y_desc, y_ptr, row, end, column, COLUMNS)
                tma.store_wait(0)
                _write(right.to(out_bufs.dtype), out_buf, y_desc, y_ptr, row, end, column + 128, COLUMNS)
            else:
                if bias_ptr is not None:
                    acc = _add_bias(acc, bias_ptr + expert * COLUMNS, column, COLUMNS)
                tma.store_wait(0)
                _write(acc.to(out_bufs.dtype), out_buf, y_desc, y_ptr, row, end, column, COLUMNS)
        else:
            for _ in range(STEPS):
                mbarrier.wait(full.index(s), phase)
                mbarrier.arrive(empty.index(s), count=1)
                s, phase = next_buffer(s, phase, STAGES)
        mbarrier.wait(full.index(s), phase)
        expert, row, end, tile = told(info, s)
    tma.store_wait(0)


@gluon.jit
def _of_step(h_scale_ptr, w_scale_ptr, expert, rows, end, column, k, COLUMNS: gl.constexpr, STEPS: gl.constexpr):
    """What a step's product is multiplied by: float32 [64], for the columns of y that share a scale."""
    h_scale = gl.load(h_scale_ptr + rows.to(gl.int64) * STEPS + k, mask=rows < end, other=0.0)
    BLOCKS: gl.constexpr = (COLUMNS + 127) // 128
    w_scale = load_scales(w_scale_ptr + (expert.to(gl.int64) * BLOCKS + column // 128) * STEPS + k, column < COLUMNS)
    return h_scale * w_scale


@gluon.jit
def _of_rows(acc, h_scale_ptr, w_scale_ptr, expert, rows, end, column, COLUMNS: gl.constexpr):
    """acc with the scales of its rows, and those of w2's."""
    h_scale = gl.load(h_scale_ptr + rows, mask=rows < end, other=0.0)
    c = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    w_scale = load_scales(w_scale_ptr + expert.to(gl.int64) * COLUMNS + c, c < COLUMNS)
    return acc * gl.expand_dims(w_scale, 0) * gl.expand_dims(h_scale, 1)


@gluon.jit
def _add_bias(x, bias_ptr, column, COLUMNS: gl.constexpr):
    c = column + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    bias = gl.load(bias_ptr + c, mask=c < COLUMNS, other=0.0)
    return x + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def _write(value, buf, y_desc, y_ptr, row, end, column, COLUMNS: gl.constexpr):
    """64 rows of y, or those before `end`."""
    N: gl.constexpr = value.shape[1]
    buf.store(value)
    fence_async_shared()
    if end - row >= 64:
        store_box(y_desc, [row, column], buf)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        c = column + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(c < COLUMNS, 0)
        ptrs = y_ptr + gl.expand_dims(rows.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(c, 0)
        gl.store(ptrs, buf.load(layout), mask=mask)


@gluon.jit(
    do_not_specialize=["num_blocks", "N"],
    do_not_specialize_on_alignment=["bias_ptr", "taken_ptr", "h_scale_ptr", "w_scale_ptr"],
)
def _persistent_gemm2(
    h_desc,
    w_desc,
    y_ptr,
    y_desc,
    bias_ptr,
    blocks_ptr,
    num_blocks,
    N,
    taken_ptr,
    h_scale_ptr,
    w_scale_ptr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    H_BOXES: gl.constexpr,
    W_BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    SCALES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = w_desc.dtype
    h_bufs = gl.allocate_shared_memory(
        DTYPE, [H_BOXES * STAGES, h_desc.block_shape[0], h_desc.block_shape[1]], h_desc.layout
    )
    w_bufs = gl.allocate_shared_memory(
        DTYPE, [W_BOXES * STAGES, w_desc.block_shape[0], w_desc.block_shape[1]], w_desc.layout
    )
    out_bufs = gl.allocate_shared_memory(y_desc.dtype, [2, y_desc.block_shape[0], y_desc.block_shape[1]], y_desc.layout)
    info, full, empty = ring_of(STAGES, 1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    h_bufs, w_bufs, out_bufs, info, full, empty, y_ptr, y_desc, bias_ptr, h_scale_ptr, w_scale_ptr,
                    0, COLUMNS, INNER, H_BOXES, W_BOXES, STAGES, SCALES,
                ),
            ),
            (
                _consume,
                (
                    h_bufs, w_bufs, out_bufs, info, full, empty, y_ptr, y_desc, bias_ptr, h_scale_ptr, w_scale_ptr,
                    1, COLUMNS, INNER, H_BOXES, W_BOXES, STAGES, SCALES,
                ),
            ),
            (
                _produce,
                (
                    h_desc, w_desc, blocks_ptr, num_blocks, N, taken_ptr, h_bufs, w_bufs, info, full, empty,
                    COLUMNS, INNER, H_BOXES, W_BOXES, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
