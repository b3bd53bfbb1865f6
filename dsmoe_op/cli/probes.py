"""Kernels that measure a GPU, and one that a peer takes into its own. Needs triton."""

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


@triton.jit(repr=lambda _: "silu_and_mul")
def silu_and_mul(rows, beta):
    """[M, 2N] of a product's tile, gate and up in turn -> gate * sigmoid(beta * gate) * up, float32 [M, N].

    For triton_kernels, whose products take such a function into their epilogue.
    """
    pairs = tl.reshape(rows, (rows.shape[0], rows.shape[1] // 2, 2))
    gate, up = tl.split(pairs)
    gate = gate.to(tl.float32)
    return gate * tl.sigmoid(beta * gate) * up.to(tl.float32)
