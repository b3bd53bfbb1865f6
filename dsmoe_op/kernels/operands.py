"""What a product of the experts reads in a step: rows of a, and which rows of w a tile has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_a(a_ptrs, in_M, weight_M, d_K, rest, MASKED: tl.constexpr, RAGGED: tl.constexpr, WEIGHT: tl.constexpr,
           INTERPRET: tl.constexpr):  # fmt: skip
    """[rows, BLOCK_K] of a; RAGGED where a step may have fewer columns than BLOCK_K, of which `rest` are left."""
    if MASKED or RAGGED:
        in_a = in_M[:, None]
        if RAGGED:
            in_a = in_a & (d_K < rest)[None, :]
        a = tl.load(a_ptrs, mask=in_a, other=0.0)
    else:
        a = tl.load(a_ptrs)
    if WEIGHT:
        a = (a.to(tl.float32) * weight_M[:, None]).to(a.dtype)
    if INTERPRET:  # its bf16 products are wrong
        a = a.to(tl.float32)
    return a


@triton.jit
def weight_rows(column, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """int32 [ROWS] of w's rows, and which there are: a pair lies COLUMNS apart, or side by side."""
    r_N = tl.arange(0, ROWS)
    if INTERLEAVED:
        row_N = 2 * column + r_N
        in_N = row_N < 2 * COLUMNS
    else:
        row_N = column + r_N % BLOCK_N
        in_N = row_N < COLUMNS
        row_N += r_N // BLOCK_N * COLUMNS
    return row_N, in_N


@triton.jit
def finished(sum, INTERPRET: tl.constexpr):
    """The same float32 sum, which is whole before the next step begins.

    Triton 3.6 else leaves up to three products of a step under way, and lets the next step write the registers that
    they still read where an operand lies in registers (triton issue 9433). A use of the sum in the loop prevents that.
    """
    if not INTERPRET:
        sum = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [sum], tl.float32, is_pure=True, pack=1)
    return sum
