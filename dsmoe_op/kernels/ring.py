"""What persistent programs share: the ring of buffers, and the items that they take (Gluon, sm_90).

A producer fills buffers and runs ahead of the consumers, into the next items. A buffer has two barriers: `full` when
its data are there, `empty` when all consumers are done with it. What an item is travels with its first buffer; the end
of the work is a buffer without data, told by the expert -1.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.runtime.driver import driver

# Names that changed after Triton 3.6.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
gather = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_buffers = gl.shared_memory_descriptor
reinterpret = _buffers.reinterpret if hasattr(_buffers, "reinterpret") else _buffers._reinterpret

GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def is_hopper(device: torch.device) -> bool:
    """For tensors that are on no GPU: whether kernels are compiled for such a one, as they are where nobody says."""
    if device.type == "cuda":
        return _capability(device) == (9, 0)
    try:
        return bool(driver.active.get_current_target().arch == 90)
    except (RuntimeError, AssertionError):  # no driver, or none that finds its library
        return True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; an H200's for tensors that are on none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@gluon.jit
def ring_of(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """For so many buffers: info, full and empty. A buffer is full by so many arrivals, and empty by two consumers'."""
    info = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return info, full, empty


@gluon.jit
def next_buffer(s, phase, STAGES: gl.constexpr):
    """The ring's next buffer, and the parity of its barriers."""
    wraps = s == STAGES - 1
    return gl.where(wraps, 0, s + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def buffer_before(s, STAGES: gl.constexpr):
    # Not a variable that follows s from step to step: Triton 3.6 takes `before = s` in a loop for no change.
    return gl.where(s == 0, STAGES - 1, s - 1)


@gluon.jit
def item_at(blocks_ptr, num_blocks, N, item, TILES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Expert (-1: no item), first row, row after the last, and column tile."""
    block = item // TILES
    is_block = block < num_blocks
    if blocks_ptr is None:
        expert = item * 0
        row = block * BLOCK_M
        end = gl.minimum(row + BLOCK_M, N)
    else:
        block = gl.where(is_block, block, 0)
        expert = gl.load(blocks_ptr + block)
        row = gl.load(blocks_ptr + num_blocks + block)
        end = gl.load(blocks_ptr + 2 * num_blocks + block)
    return gl.where(is_block, expert, -1), row, end, item % TILES


@gluon.jit
def read_rows(sorted_slot_ptr, rows, end, K: gl.constexpr):
    """int64: what each row before `end` is gathered from, its slot's token or, without slots, itself."""
    if sorted_slot_ptr is None:
        read = gl.where(rows < end, rows, 0)
    else:
        read = gl.load(sorted_slot_ptr + rows, mask=rows < end, other=0) // K
    return read.to(gl.int64)


@gluon.jit
def take_item(taken_ptr, item):
    """The one after `item` of this program: of a counter that all share, or without one in turn."""
    if taken_ptr is None:
        return item + gl.num_programs(0)
    else:
        return gl.atomic_add(taken_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def tell(info, s, expert, row, end, tile):
    """Writes beside buffer s what the item is that begins there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    info.index(s * 4).store(gl.full([1], expert, gl.int32, layout))
    info.index(s * 4 + 1).store(gl.full([1], row, gl.int32, layout))
    info.index(s * 4 + 2).store(gl.full([1], end, gl.int32, layout))
    info.index(s * 4 + 3).store(gl.full([1], tile, gl.int32, layout))
    meet()


@gluon.jit
def told(info, s):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    expert = gl.max(info.index(s * 4).load(layout), 0)
    row = gl.max(info.index(s * 4 + 1).load(layout), 0)
    end = gl.max(info.index(s * 4 + 2).load(layout), 0)
    tile = gl.max(info.index(s * 4 + 3).load(layout), 0)
    return expert, row, end, tile


@gluon.jit
def in_two(t):
    """The first and the second half of the columns."""
    M: gl.constexpr = t.shape[0]
    N: gl.constexpr = t.shape[1]
    return gl.split(gl.permute(gl.reshape(t, [M, 2, N // 2]), [0, 2, 1]))


@gluon.jit
def load_scales(ptrs, mask):
    """float32 scales; a byte is a power of two."""
    if ptrs.dtype.element_ty == gl.uint8:
        e = gl.load(ptrs, mask=mask, other=0).to(gl.int32)
        bits = gl.where(e == 0, 0x00400000, e << 23)  # 2^-127 is subnormal
        return gl.where(e == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    else:
        return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
