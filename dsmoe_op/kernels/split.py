"""A tile's sum by several programs: each leaves its part, and the one that arrives last adds them up and goes on.

Parts lie in memory as float32 and are added by ascending part, so the bits do not depend on who is last. Nobody waits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def whole_sum(sum, split, parts, rows_M, in_M, row_N, in_N, WIDTH: tl.constexpr, SWAP: tl.constexpr,
              SPLITS: tl.constexpr):  # fmt: skip
    """The sum of all parts of a tile, and whether this program is the one to go on with it; else no sum.

    Args:
        sum: this program's part, float32 [M, N], or [N, M] with SWAP.
        split: which part that is.
        parts: pointer to float32, where from it on lie [SPLITS, num_rows, WIDTH], num_rows, and pointer to the tile's
            counter, zero before.
        rows_M, in_M, row_N, in_N: row and place in it of each element, and which there are.
    """
    parts_ptr, first, num_rows, counter_ptr = parts
    parts_ptr += first
    at_M = rows_M.to(tl.int64) * WIDTH
    if SWAP:
        at, there = at_M[None, :] + row_N[:, None], in_M[None, :] & in_N[:, None]
    else:
        at, there = at_M[:, None] + row_N[None, :], in_M[:, None] & in_N[None, :]
    stride = num_rows.to(tl.int64) * WIDTH
    tl.store(parts_ptr + split * stride + at, sum, mask=there)
    # All of the program's writes, then its arrival, which releases them and acquires those of the others.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
    tl.debug_barrier()
    if is_last:
        sum = tl.load(parts_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            sum += tl.load(parts_ptr + other * stride + at, mask=there, other=0.0, cache_modifier=".cg")
    return sum, is_last
