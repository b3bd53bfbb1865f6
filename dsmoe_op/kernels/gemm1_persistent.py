"""GEMM 1 of fp8 weights for many rows: persistent programs with a producer and two consumers, in Gluon (sm_90).

One program an SM takes item after item, as in `gemm2_persistent`. An item is a tile of a block's rows: 64 or 128 of
them by 128 columns of h.

- The producer, a warpgroup, gathers rows of x with asynchronous copies, and fetches rows of w13 by the copy engine: the
  gate's and the up's 64 for each consumer. A buffer is full when all of its threads' copies and the engine's have come.
- A consumer multiplies the item's rows by its 64 pairs, 64 rows at a time, adds each step's product in float32 with
  the step's scales, and applies the activation. While it adds, the other one multiplies.
"""

from __future__ import annotations

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.coded import Coded
from dsmoe_op.kernels.epilogue import activate
from dsmoe_op.kernels.launch import launch
from dsmoe_op.kernels.ring import (
    GL_DTYPE,
    gather,
    in_two,
    is_hopper,
    item_at,
    load_box,
    load_scales,
    multiprocessors,
    next_buffer,
    read_rows,
    ring_of,
    take_item,
    tell,
    told,
)

_PAIRS = 64
"""Gate and up rows of a consumer's part of an item."""
_STEP = 128
"""Columns of x in a step: those that share a scale."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 56
_STAGES = {64: 5, 128: 4}
"""Of the ring, by the rows of a block."""


def takes(w13: Tensor, block_m: int, config: MoEConfig, coded: Coded, *, shared: bool) -> bool:
    """Whether their GPU has Hopper's matrix unit, and its copy engine can fetch these weights for these sizes.

    They are fp8, contiguous, aligned to 16 bytes, with gate and up rows apart and scales for 128 by 128 or for a row.
    """
    form = () if coded.form is None else coded.form
    apart = config.gated and (shared or config.w13_order != "interleaved")
    if form[:2] == ("fp8_block", _STEP):
        # The pairs of a consumer share a scale each.
        kinds = form[4] or w13.shape[-2] // 2 % _PAIRS == 0
    else:
        kinds = form[:1] == ("fp8_channel",)
    aligned = w13.data_ptr() % 16 == 0 and w13.shape[-1] % 16 == 0
    fits = apart and kinds and block_m in _STAGES and w13.dtype == torch.float8_e4m3fn
    return fits and w13.is_contiguous() and aligned and is_hopper(w13.device)


def gemm1_persistent(
    x_codes_TH: Tensor,
    x_scales: Tensor,
    w13: Tensor,
    h_NI: Tensor,
    *,
    config: MoEConfig,
    coded: Coded,
    block_m: int,
    bias: Tensor | None = None,
    blocks_3B: Tensor | None = None,
    sorted_slot_N: Tensor | None = None,
    taken: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """h = act(x w13^T + bias), rounded once, for the rows that experts have.

    Args:
        x_codes_TH, x_scales: x as `quantize_rows` makes it; aligned to 16 bytes.
        w13: float8_e4m3fn [E, 2I, H], or [2S, H] for the one expert that has all tokens; such as `takes` says.
        h_NI: written; [N, I] contiguous, 16 bits wide.
        coded: what belongs to w13.
        bias: [E, 2I] contiguous, any float dtype.
        blocks_3B, sorted_slot_N: as `Rows`, of blocks of block_m rows. None: one expert has all tokens as they are.
        taken: int32 [2], the second one zero before; changed. None: programs take items in turn.
    """
    I, H = w13.shape[-2] // 2, w13.shape[-1]
    experts = w13.numel() // (2 * I * H)
    form = coded.form
    assert form is not None
    box = [2, _PAIRS, _STEP]
    layout = gl.NVMMASharedLayout.get_default_for(box, GL_DTYPE[w13.dtype])
    args = (
        x_codes_TH,
        x_scales,
        sorted_slot_N,
        TensorDescriptor(w13, [2 * experts, I, H], [I * H, H, 1], box, layout),
        coded.scale,
        bias,
        h_NI,
        blocks_3B,
        triton.cdiv(h_NI.shape[0], block_m) if blocks_3B is None else blocks_3B.shape[1],
        h_NI.shape[0],
        taken,
    )
    meta = {
        "K": config.top_k,
        "COLUMNS": I,
        "INNER": H,
        "BOXES": block_m // 64,
        "STAGES": _STAGES[block_m],
        "SCALES": form[0],
        "SCALE_ROWS": form[3],
        "SCALES_OF_HALVES": form[4],
        "ACTIVATION": config.activation,
        "UP_FIRST": blocks_3B is not None and config.w13_order == "up_gate",
        "CLAMP": config.clamp_routed if blocks_3B is not None else config.clamp_shared,
        "CLAMP_AFTER": config.clamp_after_activation,
        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        "num_warps": 4,
    }
    launch(_persistent_gemm1, (multiprocessors(w13.device),), args, meta, warmup=warmup)


@gluon.jit
def _produce(
    x_ptr, sorted_slot_ptr, w_desc, blocks_ptr, num_blocks, N, taken_ptr, x_bufs, w_bufs, info, full, empty,
    K: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PAIRS: gl.constexpr = w_bufs.shape[2]
    STEP: gl.constexpr = w_bufs.shape[3]
    TILES: gl.constexpr = (COLUMNS + 2 * PAIRS - 1) // (2 * PAIRS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, 64 * BOXES, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    item = gl.program_id(0)
    expert, row, end, tile = item_at(blocks_ptr, num_blocks, N, item, TILES, 64 * BOXES)
    s = item * 0
    phase = s + 1  # a fresh barrier counts as past its odd phase: the first wait for each buffer passes
    while expert >= 0:
        # The next item is looked up while this one is fetched.
        item = take_item(taken_ptr, item)
        next_expert, next_row, next_end, next_tile = item_at(blocks_ptr, num_blocks, N, item, TILES, 64 * BOXES)
        rows = row + m
        x_rows = x_ptr + read_rows(sorted_slot_ptr, rows, end, K) * INNER
        column = tile * (2 * PAIRS)
        for start in range(0, INNER, STEP):
            mbarrier.wait(empty.index(s), phase)
            if start == 0:
                tell(info, s, expert, row, end, tile)
            bar = full.index(s)
            mbarrier.expect(bar, 4 * PAIRS * STEP)
            load_box(w_desc, [2 * expert, column, start], bar, w_bufs.index(2 * s))
            load_box(w_desc, [2 * expert, column + PAIRS, start], bar, w_bufs.index(2 * s + 1))
            there = gl.expand_dims(rows < end, 1) & gl.expand_dims(start + d < INNER, 0)
            pointers = gl.expand_dims(x_rows, 1) + gl.expand_dims(start + d, 0)
            gather(x_bufs.index(s), pointers, mask=there)
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


@gluon.jit
def _begun(x_buf, w_buf, product):
    """The product of 64 rows of x by a consumer's of w13, under way."""
    PAIRS: gl.constexpr = w_buf.shape[1]
    STEP: gl.constexpr = w_buf.shape[2]
    w = w_buf.reshape([2 * PAIRS, STEP]).permute([1, 0])
    return warpgroup_mma(x_buf, w, product, use_acc=False, is_async=True)


@gluon.jit
def _added(gate, up, product, x_scale, gate_scale, up_scale, SCALES: gl.constexpr):
    """A step's product added to the sums."""
    first, second = in_two(product)
    if SCALES == "fp8_block":
        gate = gate + first * gl.expand_dims(x_scale * gate_scale, 1)
        up = up + second * gl.expand_dims(x_scale * up_scale, 1)
    else:
        gate = gate + first
        up = up + second
    return gate, up


@gluon.jit
def _sums(
    x_bufs, w_bufs, full, empty, s, phase, product, x_ptrs, x_ptrs2, there, there2, gate_ptr, up_ptr,
    WHICH: gl.constexpr, BOXES: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """An item's sums over H: gate's and up's of its first 64 rows, and where BOXES is 2 (else as these) of the others.

    x_ptrs, there: where the scales of the 64 rows' steps begin, and which rows there are; x_ptrs2, there2: the others'.
    gate_ptr, up_ptr: where those of w13's steps begin. Returned too: product, s and phase, for the next item.
    """
    zero, _ = in_two(product)
    gate = gl.zeros_like(zero)
    up = gl.zeros_like(zero)
    gate2, up2 = gate, up
    x_scale, x_scale2, gate_scale, up_scale = 0.0, 0.0, 0.0, 0.0
    if SCALES == "fp8_block":
        x_scale = gl.load(x_ptrs, mask=there, other=0.0)
        gate_scale = load_scales(gate_ptr, True)
        up_scale = load_scales(up_ptr, True)
        if BOXES == 2:
            x_scale2 = gl.load(x_ptrs2, mask=there2, other=0.0)
    for k in range(STEPS):
        mbarrier.wait(full.index(s), phase)
        fence_async_shared()
        w_buf = w_bufs.index(2 * s + WHICH)
        product = _begun(x_bufs.index(s).slice(0, 64), w_buf, product)
        # The next step's scales are under way while this one's product is.
        if SCALES == "fp8_block":
            more = k + 1 < STEPS
            next_x = gl.load(x_ptrs + k + 1, mask=there & more, other=0.0)
            next_gate = load_scales(gate_ptr + k + 1, more)
            next_up = load_scales(up_ptr + k + 1, more)
            if BOXES == 2:
                next_x2 = gl.load(x_ptrs2 + k + 1, mask=there2 & more, other=0.0)
        product = warpgroup_mma_wait(0, deps=[product])
        if BOXES == 1:
            mbarrier.arrive(empty.index(s), count=1)
        gate, up = _added(gate, up, product, x_scale, gate_scale, up_scale, SCALES)
        if BOXES == 2:
            product = _begun(x_bufs.index(s).slice(64, 64), w_buf, product)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(s), count=1)
            gate2, up2 = _added(gate2, up2, product, x_scale2, gate_scale, up_scale, SCALES)
        if SCALES == "fp8_block":
            x_scale, gate_scale, up_scale = next_x, next_gate, next_up
            if BOXES == 2:
                x_scale2 = next_x2
        s, phase = next_buffer(s, phase, STAGES)
    return gate, up, gate2, up2, product, s, phase


@gluon.jit
def _end(
    gate, up, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows, tokens, end, column,
    COLUMNS: gl.constexpr, SCALES: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, CLAMP: gl.constexpr,
    CLAMP_AFTER: gl.constexpr,
):  # fmt: skip
    """What is left to do with 64 rows' sums: scales of rows, bias, activation, and the store."""
    # Pointers are a scalar and small offsets, which take few registers.
    n = gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
    in_columns = n < COLUMNS - column
    first = expert.to(gl.int64) * (2 * COLUMNS) + column
    if SCALES == "fp8_channel":
        x_scale = gl.expand_dims(gl.load(x_scale_ptr + tokens, mask=rows < end, other=0.0), 1)
        gate = gate * gl.expand_dims(load_scales(w_scale_ptr + first + n, in_columns), 0) * x_scale
        up = up * gl.expand_dims(load_scales(w_scale_ptr + (first + COLUMNS) + n, in_columns), 0) * x_scale
    if bias_ptr is not None:
        gate_bias = gl.load(bias_ptr + first + n, mask=in_columns, other=0.0)
        up_bias = gl.load(bias_ptr + (first + COLUMNS) + n, mask=in_columns, other=0.0)
        gate = gate + gl.expand_dims(gate_bias.to(gl.float32), 0)
        up = up + gl.expand_dims(up_bias.to(gl.float32), 0)
    if UP_FIRST:
        h = activate(up, gate, ACTIVATION, CLAMP, CLAMP_AFTER)
    else:
        h = activate(gate, up, ACTIVATION, CLAMP, CLAMP_AFTER)
    ptrs = h_ptr + column + gl.expand_dims(rows.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(n, 0)
    mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(in_columns, 0)
    gl.store(ptrs, h.to(h_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(
    x_bufs, w_bufs, info, full, empty, x_scale_ptr, sorted_slot_ptr, w_scale_ptr, bias_ptr, h_ptr,
    WHICH: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALES_OF_HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, CLAMP: gl.constexpr, CLAMP_AFTER: gl.constexpr,
):  # fmt: skip
    """Of each item the columns of box WHICH, for its first 64 rows and, where BOXES is 2, for the others."""
    PAIRS: gl.constexpr = w_bufs.shape[2]
    STEP: gl.constexpr = w_bufs.shape[3]
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, 2 * PAIRS, 256 // w_bufs.dtype.primitive_bitwidth]
    )
    # Never read before a product has replaced it. Outside the loop, so that no item has to clear it.
    product = gl.zeros([64, 2 * PAIRS], gl.float32, LAYOUT)
    zero, _ = in_two(product)
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, zero.type.layout))
    mbarrier.wait(full.index(0), 0)
    expert, row, end, tile = told(info, 0)
    s = expert * 0
    phase = s
    while expert >= 0:
        column = (2 * tile + WHICH) * PAIRS
        rows = row + m
        tokens = read_rows(sorted_slot_ptr, rows, end, K)
        x_ptrs = x_scale_ptr + tokens * STEPS
        in_scales = gl.where(column < COLUMNS, column, 0)  # a box beyond the last column has none
        gate_row = expert.to(gl.int64) * SCALE_ROWS + in_scales // STEP
        if SCALES_OF_HALVES:
            up_row = gate_row + SCALE_ROWS // 2
        else:
            up_row = expert.to(gl.int64) * SCALE_ROWS + (COLUMNS + in_scales) // STEP
        gate_ptr = w_scale_ptr + gate_row * STEPS
        up_ptr = w_scale_ptr + up_row * STEPS
        if BOXES == 1 or end - row <= 64:
            gate, up, _, _, product, s, phase = _sums(
                x_bufs, w_bufs, full, empty, s, phase, product, x_ptrs, x_ptrs, rows < end, rows < end, gate_ptr,
                up_ptr, WHICH, 1, STEPS, STAGES, SCALES,
            )  # fmt: skip
        else:
            rows2 = rows + 64
            tokens2 = read_rows(sorted_slot_ptr, rows2, end, K)
            gate, up, gate2, up2, product, s, phase = _sums(
                x_bufs, w_bufs, full, empty, s, phase, product, x_ptrs, x_scale_ptr + tokens2 * STEPS, rows < end,
                rows2 < end, gate_ptr, up_ptr, WHICH, 2, STEPS, STAGES, SCALES,
            )  # fmt: skip
            _end(
                gate2, up2, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows2, tokens2, end, column,
                COLUMNS, SCALES, ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
            )  # fmt: skip
        _end(
            gate, up, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows, tokens, end, column,
            COLUMNS, SCALES, ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
        )  # fmt: skip
        mbarrier.wait(full.index(s), phase)
        expert, row, end, tile = told(info, s)


@gluon.jit(
    do_not_specialize=["num_blocks", "N"],
    do_not_specialize_on_alignment=["bias_ptr", "taken_ptr", "x_scale_ptr", "w_scale_ptr"],
)
def _persistent_gemm1(
    x_ptr,
    x_scale_ptr,
    sorted_slot_ptr,
    w_desc,
    w_scale_ptr,
    bias_ptr,
    h_ptr,
    blocks_ptr,
    num_blocks,
    N,
    taken_ptr,
    K: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    SCALES: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALES_OF_HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    UP_FIRST: gl.constexpr,
    CLAMP: gl.constexpr,
    CLAMP_AFTER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = w_desc.dtype
    STEP: gl.constexpr = w_desc.block_shape[2]
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64 * BOXES, STEP], DTYPE)
    x_bufs = gl.allocate_shared_memory(DTYPE, [STAGES, 64 * BOXES, STEP], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 2, w_desc.block_shape[1], STEP], w_desc.layout)
    info, full, empty = ring_of(STAGES, 1 + 32 * 4)  # the engine's arrival, and one of each thread of the producer
    if taken_ptr is not None:
        taken_ptr += 1
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_bufs, w_bufs, info, full, empty, x_scale_ptr, sorted_slot_ptr, w_scale_ptr, bias_ptr, h_ptr,
                    0, K, COLUMNS, INNER, BOXES, STAGES, SCALES, SCALE_ROWS, SCALES_OF_HALVES, ACTIVATION, UP_FIRST,
                    CLAMP, CLAMP_AFTER,
                ),
            ),
            (
                _consume,
                (
                    x_bufs, w_bufs, info, full, empty, x_scale_ptr, sorted_slot_ptr, w_scale_ptr, bias_ptr, h_ptr,
                    1, K, COLUMNS, INNER, BOXES, STAGES, SCALES, SCALE_ROWS, SCALES_OF_HALVES, ACTIVATION, UP_FIRST,
                    CLAMP, CLAMP_AFTER,
                ),
            ),
            (
                _produce,
                (
                    x_ptr, sorted_slot_ptr, w_desc, blocks_ptr, num_blocks, N, taken_ptr, x_bufs, w_bufs, info, full,
                    empty, K, COLUMNS, INNER, BOXES, STAGES,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
