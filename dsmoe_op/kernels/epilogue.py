"""The end of a tile of a product: bias and activation on its float32 sums, one rounding, and the store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    """Within some 10 ulp, enough behind a product: the exact one would cost the end of a tile registers and time."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, CLAMP_AFTER: tl.constexpr):
    """`reference.activation` of float32 tiles. Limits are selections, which let a NaN through."""
    if ACTIVATION == "relu2":
        if CLAMP is not None:
            gate = tl.where(gate > CLAMP, CLAMP, gate)  # the lower limit is relu's
        gate = tl.where(gate < 0, 0.0, gate)
        return gate * gate
    if CLAMP is not None:
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
        if not CLAMP_AFTER:
            gate = tl.where(gate > CLAMP, CLAMP, gate)
    if ACTIVATION == "swiglu_oai":
        gate = gate * _sigmoid(1.702 * gate)
        up += 1.0
    elif ACTIVATION == "silu":
        gate = gate * _sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z)
        gate = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    if CLAMP is not None and CLAMP_AFTER:
        gate = tl.where(gate > CLAMP, CLAMP, gate)
    return gate * up


@triton.jit
def _halves(sum, INTERLEAVED: tl.constexpr, SWAP: tl.constexpr):
    """The two [BLOCK_M, BLOCK_N] tiles of the first and second rows of each pair of w."""
    if SWAP:
        if INTERLEAVED:
            first, second = tl.split(tl.permute(tl.reshape(sum, [sum.shape[0] // 2, 2, sum.shape[1]]), [2, 0, 1]))
        else:
            first, second = tl.split(tl.permute(tl.reshape(sum, [2, sum.shape[0] // 2, sum.shape[1]]), [2, 1, 0]))
    elif INTERLEAVED:
        first, second = tl.split(tl.reshape(sum, [sum.shape[0], sum.shape[1] // 2, 2]))
    else:
        first, second = tl.split(tl.permute(tl.reshape(sum, [sum.shape[0], 2, sum.shape[1] // 2]), [0, 2, 1]))
    return first, second


@triton.jit
def ended(
    sum,
    bias_ptr,
    column,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDER: tl.constexpr,
    CLAMP: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
):
    """float32 [rows, BLOCK_N] of output columns from `column` on, from the sums of `_products`."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "relu2"
    INTERLEAVED: tl.constexpr = GATED and ORDER == "interleaved"
    c_N = column + tl.arange(0, BLOCK_N)
    in_N = c_N < COLUMNS
    if GATED:
        first, second = _halves(sum, INTERLEAVED, SWAP)
        if ORDER == "up_gate":
            first, second = second, first
        gate_N = c_N
        up_N = c_N + COLUMNS
        if INTERLEAVED:
            gate_N = 2 * c_N
            up_N = 2 * c_N + 1
        elif ORDER == "up_gate":
            gate_N = c_N + COLUMNS
            up_N = c_N
        if bias_ptr is not None:
            first += tl.load(bias_ptr + gate_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
            second += tl.load(bias_ptr + up_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
        return activate(first, second, ACTIVATION, CLAMP, CLAMP_AFTER)
    else:
        if SWAP:
            sum = sum.T
        if bias_ptr is not None:
            sum += tl.load(bias_ptr + c_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION is not None:
            sum = activate(sum, sum, ACTIVATION, CLAMP, CLAMP_AFTER)
        return sum


@triton.jit
def store(out_MN, out_ptr, gate_ptr, rows_M, in_M, out_end, column, COLUMNS: tl.constexpr, ZEROS: tl.constexpr):
    in_out_M = rows_M < out_end
    if gate_ptr is not None:
        out_MN *= tl.load(gate_ptr + rows_M, mask=in_out_M, other=0.0)[:, None]
    if ZEROS:  # whatever the weights hold
        out_MN = tl.where(in_M[:, None], out_MN, 0.0)
    c_N = column + tl.arange(0, out_MN.shape[1])
    out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * COLUMNS + c_N[None, :]
    tl.store(out_ptrs, out_MN.to(out_ptr.dtype.element_ty), mask=in_out_M[:, None] & (c_N < COLUMNS)[None, :])


@triton.jit
def store_zeros(out_ptr, row, end, column, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of rows that no expert has."""
    rows_M = row + tl.arange(0, BLOCK_M)
    c_N = column + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * COLUMNS + c_N[None, :]
    zeros_MN = tl.zeros([BLOCK_M, BLOCK_N], out_ptr.dtype.element_ty)
    tl.store(out_ptrs, zeros_MN, mask=(rows_M < end)[:, None] & (c_N < COLUMNS)[None, :])
