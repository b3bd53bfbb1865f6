"""GEMM 1 of fp8 weights for many rows: persistent programs with a producer and two consumers, in Gluon (sm_90).

As in `gemm2_persistent`, whose ring this is: an item is a tile of a block's rows, 64 or 128 of them by 128 columns of h, and
programs take items by a counter.

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
from dsmoe_op.kernels.gemm2_persistent import (
    _GL_DTYPE,
    _is_hopper,
    _item,
    _load,
    _multiprocessors,
    _next,
    _scale,
    _take,
    _tell,
    _told,
)
from dsmoe_op.kernels.launch import launch

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
    return fits and w13.is_contiguous() and aligned and _is_hopper(w13.device)


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
    layout = gl.NVMMASharedLayout.get_default_for(box, _GL_DTYPE[w13.dtype])
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
    launch(_persistent_gemm1, (_multiprocessors(w13.device),), args, meta, warmup=warmup)


@gluon.jit
def _token(sorted_slot_ptr, rows, end, K: gl.constexpr):
    """int64 token of each row before `end`."""
    if sorted_slot_ptr is None:
        token = gl.where(rows < end, rows, 0)
    else:
        token = gl.load(sorted_slot_ptr + rows, mask=rows < end, other=0) // K
    return token.to(gl.int64)


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
    expert, row, end, tile = _item(blocks_ptr, num_blocks, N, item, TILES, 64 * BOXES)
    s = item * 0
    phase = s + 1  # a fresh barrier counts as past its odd phase: the first wait for each buffer passes
    while expert >= 0:
        # The next item is looked up while this one is fetched.
        item = _take(taken_ptr, item)
        next_expert, next_row, next_end, next_tile = _item(blocks_ptr, num_blocks, N, item, TILES, 64 * BOXES)
        rows = row + m
        x_rows = x_ptr + _token(sorted_slot_ptr, rows, end, K) * INNER
        column = tile * (2 * PAIRS)
        for start in range(0, INNER, STEP):
            mbarrier.wait(empty.index(s), phase)
            if start == 0:
                _tell(info, s, expert, row, end, tile)
            bar = full.index(s)
            mbarrier.expect(bar, 4 * PAIRS * STEP)
            _load(w_desc, [2 * expert, column, start], bar, w_bufs.index(2 * s))
            _load(w_desc, [2 * expert, column + PAIRS, start], bar, w_bufs.index(2 * s + 1))
            there = gl.expand_dims(rows < end, 1) & gl.expand_dims(start + d < INNER, 0)
            pointers = gl.expand_dims(x_rows, 1) + gl.expand_dims(start + d, 0)
            async_copy.async_copy_global_to_shared(x_bufs.index(s), pointers, mask=there)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            s, phase = _next(s, phase, STAGES)
        expert = next_expert
        row = next_row
        end = next_end
        tile = next_tile
    mbarrier.wait(empty.index(s), phase)
    _tell(info, s, -1, 0, 0, 0)
    mbarrier.arrive(full.index(s), count=1)
    async_copy.mbarrier_arrive(full.index(s), increment_count=False)


@gluon.jit
def _step_scales(ptrs, scale_ptrs, there, k, STEPS: gl.constexpr):
    """Of step k: float32 scales of rows, of gate's and up's columns."""
    gate_ptr, up_ptr = scale_ptrs
    is_step = k < STEPS
    x_scale = gl.load(ptrs + k, mask=there & is_step, other=0.0)
    return x_scale, _scale(gate_ptr + k, is_step), _scale(up_ptr + k, is_step)


@gluon.jit
def _halves(product):
    """The products with a consumer's first and second rows of w13."""
    M: gl.constexpr = product.shape[0]
    N: gl.constexpr = product.shape[1]
    return gl.split(gl.permute(gl.reshape(product, [M, 2, N // 2]), [0, 2, 1]))


@gluon.jit
def _begin(x_buf, w_buf, product):
    PAIRS: gl.constexpr = w_buf.shape[1]
    STEP: gl.constexpr = w_buf.shape[2]
    w = w_buf.reshape([2 * PAIRS, STEP]).permute([1, 0])
    return warpgroup_mma(x_buf, w, product, use_acc=False, is_async=True)


@gluon.jit
def _added(gate, up, product, x_scale, gate_scale, up_scale, SCALES: gl.constexpr):
    first, second = _halves(product)
    if SCALES == "fp8_block":
        gate = gate + first * gl.expand_dims(x_scale * gate_scale, 1)
        up = up + second * gl.expand_dims(x_scale * up_scale, 1)
    else:
        gate = gate + first
        up = up + second
    return gate, up


@gluon.jit
def _end(
    gate, up, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows, tokens, end, column,
    COLUMNS: gl.constexpr, SCALES: gl.constexpr, ACTIVATION: gl.constexpr, UP_FIRST: gl.constexpr, CLAMP: gl.constexpr,
    CLAMP_AFTER: gl.constexpr,
):  # fmt: skip
    """What is left to do with an item's sums: scales of rows, bias, activation, and the store."""
    c = column + gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
    first = expert.to(gl.int64) * (2 * COLUMNS) + c
    if SCALES == "fp8_channel":
        x_scale = gl.expand_dims(gl.load(x_scale_ptr + tokens, mask=rows < end, other=0.0), 1)
        gate = gate * gl.expand_dims(_scale(w_scale_ptr + first, c < COLUMNS), 0) * x_scale
        up = up * gl.expand_dims(_scale(w_scale_ptr + first + COLUMNS, c < COLUMNS), 0) * x_scale
    if bias_ptr is not None:
        gate = gate + gl.expand_dims(gl.load(bias_ptr + first, mask=c < COLUMNS, other=0.0).to(gl.float32), 0)
        up = up + gl.expand_dims(gl.load(bias_ptr + first + COLUMNS, mask=c < COLUMNS, other=0.0).to(gl.float32), 0)
    if UP_FIRST:
        h = activate(up, gate, ACTIVATION, CLAMP, CLAMP_AFTER)
    else:
        h = activate(gate, up, ACTIVATION, CLAMP, CLAMP_AFTER)
    ptrs = h_ptr + gl.expand_dims(rows.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(c, 0)
    mask = gl.expand_dims(rows < end, 1) & gl.expand_dims(c < COLUMNS, 0)
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
    zero, _ = _halves(product)
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, zero.type.layout))
    mbarrier.wait(full.index(0), 0)
    expert, row, end, tile = _told(info, 0)
    s = expert * 0
    phase = s
    while expert >= 0:
        column = (2 * tile + WHICH) * PAIRS
        rows = row + m
        tokens = _token(sorted_slot_ptr, rows, end, K)
        x_ptrs = x_scale_ptr + tokens * STEPS
        there = rows < end
        in_columns = column < COLUMNS
        scale_row = expert.to(gl.int64) * SCALE_ROWS
        if SCALES_OF_HALVES:
            first_row = scale_row + column // STEP
            second_row = first_row + SCALE_ROWS // 2
        else:
            first_row = scale_row + column // STEP
            second_row = scale_row + (COLUMNS + column) // STEP
        # A box beyond the last column has no scales.
        first_row = gl.where(in_columns, first_row, 0)
        second_row = gl.where(in_columns, second_row, 0)
        scale_ptrs = (w_scale_ptr + first_row * STEPS, w_scale_ptr + second_row * STEPS)
        gate = gl.zeros_like(zero)
        up = gl.zeros_like(zero)
        x_scale, gate_scale, up_scale = m * 0.0, expert * 0.0, expert * 0.0
        if SCALES == "fp8_block":
            x_scale, gate_scale, up_scale = _step_scales(x_ptrs, scale_ptrs, there, 0, STEPS)
        if BOXES == 1 or end - row <= 64:
            for k in range(STEPS):
                mbarrier.wait(full.index(s), phase)
                fence_async_shared()
                product = _begin(x_bufs.index(s).slice(0, 64), w_bufs.index(2 * s + WHICH), product)
                # The next step's scales are under way while this one's product is.
                next_x, next_gate, next_up = x_scale, gate_scale, up_scale
                if SCALES == "fp8_block":
                    next_x, next_gate, next_up = _step_scales(x_ptrs, scale_ptrs, there, k + 1, STEPS)
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(s), count=1)
                gate, up = _added(gate, up, product, x_scale, gate_scale, up_scale, SCALES)
                x_scale, gate_scale, up_scale = next_x, next_gate, next_up
                s, phase = _next(s, phase, STAGES)
        else:
            rows2 = rows + 64
            tokens2 = _token(sorted_slot_ptr, rows2, end, K)
            x_ptrs2 = x_scale_ptr + tokens2 * STEPS
            gate2 = gl.zeros_like(zero)
            up2 = gl.zeros_like(zero)
            x_scale2 = x_scale
            if SCALES == "fp8_block":
                x_scale2 = gl.load(x_ptrs2, mask=rows2 < end, other=0.0)
            for k in range(STEPS):
                mbarrier.wait(full.index(s), phase)
                fence_async_shared()
                product = _begin(x_bufs.index(s).slice(0, 64), w_bufs.index(2 * s + WHICH), product)
                next_x, next_gate, next_up, next_x2 = x_scale, gate_scale, up_scale, x_scale2
                if SCALES == "fp8_block":
                    next_x, next_gate, next_up = _step_scales(x_ptrs, scale_ptrs, there, k + 1, STEPS)
                    next_x2 = gl.load(x_ptrs2 + k + 1, mask=(rows2 < end) & (k + 1 < STEPS), other=0.0)
                product = warpgroup_mma_wait(0, deps=[product])
                gate, up = _added(gate, up, product, x_scale, gate_scale, up_scale, SCALES)
                product = _begin(x_bufs.index(s).slice(64, 64), w_bufs.index(2 * s + WHICH), product)
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(s), count=1)
                gate2, up2 = _added(gate2, up2, product, x_scale2, gate_scale, up_scale, SCALES)
                x_scale, gate_scale, up_scale, x_scale2 = next_x, next_gate, next_up, next_x2
                s, phase = _next(s, phase, STAGES)
            _end(
                gate2, up2, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows2, tokens2, end, column,
                COLUMNS, SCALES, ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
            )  # fmt: skip
        _end(
            gate, up, h_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, expert, rows, tokens, end, column,
            COLUMNS, SCALES, ACTIVATION, UP_FIRST, CLAMP, CLAMP_AFTER,
        )  # fmt: skip
        mbarrier.wait(full.index(s), phase)
        expert, row, end, tile = _told(info, s)


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
    info = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
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
