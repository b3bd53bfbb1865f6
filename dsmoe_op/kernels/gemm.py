"""The experts' two matrix products, routed and shared, in one grouped kernel.

GEMM 1 takes rows of x (gathered by sorted_slot where they are routed) through w13 and the activation to h.
GEMM 2 takes rows of h through w2 to y. A launch covers the routed tiles, the shared expert's, or both ("fused").

A routed program finds its expert and rows from `offsets` on the device; the grid is a bound that holds for any routing,
so nothing is read on the host and a captured launch stays right. Programs beyond the real tiles return.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.tuning import gemm_kind, gemm_tile, gemm_variants


def gemm1(
    x_TH: Tensor,
    *,
    config: MoEConfig,
    w13: Tensor | None = None,
    w13_bias: Tensor | None = None,
    offsets: Tensor | None = None,
    sorted_slot_N: Tensor | None = None,
    topk_weights_TK: Tensor | None = None,
    h_NI: Tensor | None = None,
    shared_w13: Tensor | None = None,
    h_shared_TS: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    allow_tf32: bool = False,
    warmup: bool = False,
) -> None:
    """h = act(x w13^T + bias), rounded once. Routed where w13 is given, shared where shared_w13 is; both fuse them.

    Args:
        x_TH: [T, H] any row stride, unit stride in the last dim.
        w13: [E, 2I, H] ([E, I, H] where the activation is not gated), unit stride in one of the last two dims.
        w13_bias: [E, 2I] contiguous, dtype of x or float32.
        offsets, sorted_slot_N: as `sort_rows` leaves them.
        topk_weights_TK: float32 [T, K] contiguous; read with config.apply_router_weight_on_input alone.
        h_NI: written up to row offsets[E]; [T*K, I] contiguous.
        shared_w13: [2S, H] ([S, H]), unit stride in one dim.
        h_shared_TS: written; [T, S] contiguous; zeros from num_valid_tokens on.
        num_valid_tokens: int32 [1], for the shared rows; the routed ones have none beyond it.
        allow_tf32: float32 products may be tf32.
    """
    T = x_TH.shape[0]
    if T == 0:
        return
    routed = shared = None
    if w13 is not None:
        assert h_NI is not None
        weight_on_input = topk_weights_TK if config.apply_router_weight_on_input else None
        routed = _Part(x_TH, w13, h_NI, w13_bias, offsets, sorted_slot_N, weight_on_input)
    if shared_w13 is not None:
        assert h_shared_TS is not None
        shared = _Part(x_TH, shared_w13, h_shared_TS)
    activation = {
        "ACTIVATION": config.activation,
        "ORDER": config.w13_order,
        "CLAMP": config.clamp_routed,
        "SHARED_CLAMP": config.clamp_shared,
        "CLAMP_AFTER": config.clamp_after_activation,
    }
    _grouped("gemm1", T, config.top_k, routed, shared, num_valid_tokens, False, activation, allow_tf32, warmup)


def gemm2(
    *,
    config: MoEConfig,
    w2: Tensor | None = None,
    w2_bias: Tensor | None = None,
    offsets: Tensor | None = None,
    h_NI: Tensor | None = None,
    y_NH: Tensor | None = None,
    zero_tail: bool = False,
    shared_w2: Tensor | None = None,
    h_shared_TS: Tensor | None = None,
    gate_T: Tensor | None = None,
    shared_TH: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    allow_tf32: bool = False,
    warmup: bool = False,
) -> None:
    """y = h w2^T + bias, rounded once. Routed where w2 is given, shared where shared_w2 is; both fuse them.

    Args:
        w2: [E, H, I], unit stride in one of the last two dims.
        w2_bias: [E, H] contiguous, dtype of h or float32.
        offsets, h_NI: as `sort_rows` and `gemm1` leave them.
        y_NH: written up to row offsets[E]; [T*K, H] contiguous.
        zero_tail: the rows from offsets[E] on are written too, as zeros.
        shared_w2: [H, S], unit stride in one dim.
        h_shared_TS: [T, S] contiguous, from `gemm1`.
        gate_T: float32 [T], multiplies the shared row before it is rounded.
        shared_TH: written; [T, H] contiguous; zeros from num_valid_tokens on.
        num_valid_tokens, allow_tf32: as in `gemm1`.
    """
    routed = shared = None
    T = 0
    if w2 is not None:
        assert h_NI is not None
        assert y_NH is not None
        routed = _Part(h_NI, w2, y_NH, w2_bias, offsets)
        T = y_NH.shape[0] // config.top_k
    if shared_w2 is not None:
        assert h_shared_TS is not None
        assert shared_TH is not None
        shared = _Part(h_shared_TS, shared_w2, shared_TH, gate=gate_T)
        T = shared_TH.shape[0]
    if T:
        _grouped("gemm2", T, config.top_k, routed, shared, num_valid_tokens, zero_tail, {}, allow_tf32, warmup)


class _Part(NamedTuple):
    """One side of a launch, routed or shared. Shapes and contents as in `gemm1` and `gemm2`."""

    a: Tensor
    w: Tensor
    out: Tensor
    bias: Tensor | None = None
    offsets: Tensor | None = None
    sorted_slot: Tensor | None = None
    weight_on_input: Tensor | None = None
    gate: Tensor | None = None


_ABSENT = _Part(None, None, None)  # type: ignore[arg-type]


def _grouped(
    kernel: str,
    T: int,
    K: int,
    routed: _Part | None,
    shared: _Part | None,
    num_valid_tokens: Tensor | None,
    zero_tail: bool,
    activation: dict[str, Any],
    allow_tf32: bool,
    warmup: bool,
) -> None:
    r, s = routed or _ABSENT, shared or _ABSENT
    some = routed or shared
    assert some is not None
    E = r.w.shape[0] if routed else 1
    kind = gemm_kind(some.a.dtype, allow_tf32)
    tiles = gemm_variants(kernel, kind) if warmup else (gemm_tile(kernel, kind, T * K / E if routed else T),)
    for tile in tiles:
        routed_programs = shared_programs = 0
        if routed:
            # Each expert that has rows may have one partly filled block, and so may the tail.
            partial = min(E + zero_tail, T * K)
            blocks = partial + (T * K - partial) // tile.block_m
            routed_programs = blocks * triton.cdiv(r.out.shape[1], tile.block_n)
        if shared:
            shared_programs = triton.cdiv(T, tile.block_m) * triton.cdiv(s.out.shape[1], tile.block_n)
        args = (
            r.a,
            row_stride(r.a) if routed else 0,
            r.w,
            r.bias,
            r.out,
            r.offsets,
            r.sorted_slot,
            r.weight_on_input,
            s.a,
            row_stride(s.a) if shared else 0,
            s.w,
            s.out,
            s.gate,
            num_valid_tokens if shared else None,
            T,
            routed_programs,
        )
        meta = {
            "E": E,
            "E_PAD": triton.next_power_of_2(E),
            "K": K,
            "COLUMNS": r.out.shape[1] if routed else 0,
            "INNER": r.a.shape[1] if routed else 0,
            "STRIDES": r.w.stride() if routed else (0, 0, 0),
            "SHARED_COLUMNS": s.out.shape[1] if shared else 0,
            "SHARED_INNER": s.a.shape[1] if shared else 0,
            "SHARED_STRIDES": s.w.stride() if shared else (0, 0),
            "ZERO_TAIL": zero_tail,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "PRECISION": "tf32" if kind == "tf32" else "ieee",
            "INTERPRET": INTERPRET,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **activation,
        }
        launch(_grouped_gemm, (routed_programs + shared_programs,), args, meta, warmup=warmup)


@triton.jit
def _sigmoid(x):
    """Within some 10 ulp, enough behind a product: the exact one would cost the end of a tile registers and time."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, CLAMP_AFTER: tl.constexpr):
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
def _tile(
    a_rows_M,
    in_M,
    weight_on_input_M,
    w_ptr,
    bias_ptr,
    column,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ORDER: tl.constexpr,
    CLAMP: tl.constexpr,
    CLAMP_AFTER: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] of output columns from `column` on; a_rows_M points to the start of each row."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "relu2"
    c_N = column + tl.arange(0, BLOCK_N)
    in_N = c_N < COLUMNS
    # Rows of w: a gated pair lies COLUMNS apart, or side by side.
    if GATED and ORDER == "interleaved":
        row_N = 2 * c_N
        up_row_N = row_N + 1
    elif GATED and ORDER == "up_gate":
        row_N = c_N + COLUMNS
        up_row_N = c_N
    else:
        row_N = c_N
        up_row_N = c_N + COLUMNS

    d_K = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_M[:, None] + d_K[None, :]
    w_ptrs = w_ptr + row_N.to(tl.int64)[None, :] * STRIDE_ROW + d_K.to(tl.int64)[:, None] * STRIDE_INNER
    up_ptrs = w_ptr + up_row_N.to(tl.int64)[None, :] * STRIDE_ROW + d_K.to(tl.int64)[:, None] * STRIDE_INNER
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        in_a = in_M[:, None]
        in_w = in_N[None, :]
        if INNER % BLOCK_K != 0:
            in_K = d_K < INNER - start
            in_a = in_a & in_K[None, :]
            in_w = in_w & in_K[:, None]
        a = tl.load(a_ptrs, mask=in_a, other=0.0)
        if WEIGHT_ON_INPUT:
            a = (a.to(tl.float32) * weight_on_input_M[:, None]).to(a.dtype)
        if INTERPRET:  # its bf16 products are wrong
            a = a.to(tl.float32)
        if COLUMNS % BLOCK_N == 0 and INNER % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=in_w, other=0.0)
        sum_MN = tl.dot(a, w.to(a.dtype), sum_MN, input_precision=PRECISION)
        if GATED:
            if COLUMNS % BLOCK_N == 0 and INNER % BLOCK_K == 0:
                up_w = tl.load(up_ptrs)
            else:
                up_w = tl.load(up_ptrs, mask=in_w, other=0.0)
            up_MN = tl.dot(a, up_w.to(a.dtype), up_MN, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_INNER
        up_ptrs += BLOCK_K * STRIDE_INNER

    if bias_ptr is not None:
        sum_MN += tl.load(bias_ptr + row_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_MN += tl.load(bias_ptr + up_row_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        sum_MN = _activate(sum_MN, up_MN, ACTIVATION, CLAMP, CLAMP_AFTER)
    return sum_MN


@triton.jit(
    do_not_specialize=["T", "routed_programs"],
    do_not_specialize_on_alignment=["bias_ptr", "weight_on_input_ptr", "num_valid_ptr"],
)
def _grouped_gemm(
    a_ptr,
    a_stride,
    w_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    sorted_slot_ptr,
    weight_on_input_ptr,
    shared_a_ptr,
    shared_a_stride,
    shared_w_ptr,
    shared_out_ptr,
    gate_ptr,
    num_valid_ptr,
    T,
    routed_programs,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDES: tl.constexpr,
    SHARED_COLUMNS: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    SHARED_STRIDES: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    ACTIVATION: tl.constexpr = None,
    ORDER: tl.constexpr = None,
    CLAMP: tl.constexpr = None,
    SHARED_CLAMP: tl.constexpr = None,
    CLAMP_AFTER: tl.constexpr = False,
):
    program = tl.program_id(0)
    m_M = tl.arange(0, BLOCK_M)
    if a_ptr is not None:  # noqa: SIM102 (the compiler decides the outer one)
        if program < routed_programs:
            block = program // tl.cdiv(COLUMNS, BLOCK_N)
            column = program % tl.cdiv(COLUMNS, BLOCK_N) * BLOCK_N
            c_N = column + tl.arange(0, BLOCK_N)
            in_N = c_N < COLUMNS
            e_E = tl.arange(0, E_PAD)
            first_E = tl.load(offsets_ptr + e_E, mask=e_E < E, other=0)
            end_E = tl.load(offsets_ptr + e_E + 1, mask=e_E < E, other=0)
            blocks_E = tl.cdiv(end_E - first_E, BLOCK_M)
            last_E = tl.cumsum(blocks_E, 0)
            num_blocks = tl.sum(blocks_E)
            if block < num_blocks:
                expert = tl.sum((last_E <= block).to(tl.int32))
                is_mine_E = e_E == expert
                row = tl.sum(tl.where(is_mine_E, first_E + (block - last_E + blocks_E) * BLOCK_M, 0))
                end = tl.sum(tl.where(is_mine_E, end_E, 0))
                rows_M = row + m_M
                in_M = rows_M < end
                weight_M = 1.0
                if sorted_slot_ptr is not None:
                    slots_M = tl.load(sorted_slot_ptr + rows_M, mask=in_M, other=0)
                    a_rows_M = a_ptr + (slots_M // K).to(tl.int64) * a_stride
                    if weight_on_input_ptr is not None:
                        weight_M = tl.load(weight_on_input_ptr + slots_M, mask=in_M, other=0.0)
                else:
                    a_rows_M = a_ptr + rows_M.to(tl.int64) * a_stride
                if bias_ptr is not None:
                    bias_ptr += expert * (COLUMNS if ACTIVATION is None or ACTIVATION == "relu2" else 2 * COLUMNS)
                out_MN = _tile(
                    a_rows_M,
                    in_M,
                    weight_M,
                    w_ptr + expert.to(tl.int64) * STRIDES[0],
                    bias_ptr,
                    column,
                    COLUMNS,
                    INNER,
                    STRIDES[1],
                    STRIDES[2],
                    ACTIVATION,
                    ORDER,
                    CLAMP,
                    CLAMP_AFTER,
                    weight_on_input_ptr is not None,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    PRECISION,
                    INTERPRET,
                )
                out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * COLUMNS + c_N[None, :]
                tl.store(out_ptrs, out_MN.to(out_ptr.dtype.element_ty), mask=in_M[:, None] & in_N[None, :])
            elif ZERO_TAIL:
                rows_M = tl.load(offsets_ptr + E) + (block - num_blocks) * BLOCK_M + m_M
                in_M = rows_M < T * K
                out_ptrs = out_ptr + rows_M.to(tl.int64)[:, None] * COLUMNS + c_N[None, :]
                zeros_MN = tl.zeros([BLOCK_M, BLOCK_N], out_ptr.dtype.element_ty)
                tl.store(out_ptrs, zeros_MN, mask=in_M[:, None] & in_N[None, :])
    if shared_a_ptr is not None:  # noqa: SIM102
        if program >= routed_programs:
            block = (program - routed_programs) // tl.cdiv(SHARED_COLUMNS, BLOCK_N)
            column = (program - routed_programs) % tl.cdiv(SHARED_COLUMNS, BLOCK_N) * BLOCK_N
            c_N = column + tl.arange(0, BLOCK_N)
            in_N = c_N < SHARED_COLUMNS
            rows_M = block * BLOCK_M + m_M
            in_M = rows_M < T
            valid_M = in_M
            if num_valid_ptr is not None:
                valid_M = in_M & (rows_M < tl.load(num_valid_ptr))
            out_MN = _tile(
                shared_a_ptr + rows_M.to(tl.int64) * shared_a_stride,
                valid_M,
                1.0,
                shared_w_ptr,
                None,
                column,
                SHARED_COLUMNS,
                SHARED_INNER,
                SHARED_STRIDES[0],
                SHARED_STRIDES[1],
                ACTIVATION,
                "gate_up",
                SHARED_CLAMP,
                CLAMP_AFTER,
                False,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
                INTERPRET,
            )
            if gate_ptr is not None:
                out_MN *= tl.load(gate_ptr + rows_M, mask=in_M, other=0.0)[:, None]
            # Padding is zeros whatever the weights hold.
            out_MN = tl.where(valid_M[:, None], out_MN, 0.0)
            out_ptrs = shared_out_ptr + rows_M.to(tl.int64)[:, None] * SHARED_COLUMNS + c_N[None, :]
            tl.store(out_ptrs, out_MN.to(shared_out_ptr.dtype.element_ty), mask=in_M[:, None] & in_N[None, :])
