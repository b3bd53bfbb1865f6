"""Kernels that measure a GPU. Needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_sum(data_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    """Each program sums every num_programs-th block of data, float32, and writes its sum to out."""
    total = tl.zeros([BLOCK], tl.float32)
    within = tl.arange(0, BLOCK)
    start = tl.program_id(0) * BLOCK
    while start < numel:  # a range of what is known on the GPU alone ends Triton 3.6's interpreter
        offsets = start + within
        total += tl.load(data_ptr + offsets, mask=offsets < numel, other=0.0)
        start += tl.num_programs(0) * BLOCK
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def touch(out_ptr):
    """Adds one to a number."""
    tl.store(out_ptr, tl.load(out_ptr) + 1)
