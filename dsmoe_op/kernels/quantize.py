"""Rows become fp8 once for all products that read them: one program for some columns of a token, or for all of them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.formats import FORMATS, GROUP, LARGEST_E4M3, LEAST_AMAX
from dsmoe_op.kernels.coded import Coded, factor_and_scale, to_fp8
from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.kernels.overlap import begin


def takes_codes(coded: Coded, x_scales: Tensor | None) -> bool:
    """Whether a weight of that form multiplies the rows of these scales, and not what it would make of x itself."""
    if coded.form is None or x_scales is None:
        return False
    activations = FORMATS[coded.form[0]].activations
    return activations == ("token" if x_scales.dim() == 1 else "block")


def quantize_rows(
    x_TH: Tensor, codes_TH: Tensor, scales: Tensor, num_rows: Tensor | None = None, *, of_h: bool = False,
    warmup: bool = False,
) -> None:  # fmt: skip
    """codes * scales is about x, as `formats.quantize_rows` has it.

    Args:
        x_TH: [T, H] any row stride, unit stride in the last dim.
        codes_TH: written; float8_e4m3fn [T, H] contiguous.
        scales: written; float32, [T] of a row each, or [T, ceil(H / 128)] of 128 columns each. Contiguous.
        num_rows: as `order_rows` leaves it, where x is the experts' rows: those of no expert are left alone.
        of_h: the kernel has another name then, by which a profile tells what lies between the products.
    """
    T, H = x_TH.shape
    if T == 0 and not warmup:
        return
    columns = triton.next_power_of_2(H) if scales.dim() == 1 else GROUP
    groups = triton.cdiv(H, columns)
    at_once = max(1, 1024 // columns)
    launch(
        _quantize_h if of_h else _quantize_rows,
        (triton.cdiv(T * groups, at_once),),
        (x_TH, row_stride(x_TH), codes_TH, scales, num_rows, T),
        {
            "H": H,
            "AT_ONCE": at_once,
            "COLUMNS": columns,
            "INTERPRET": INTERPRET,
            "num_warps": max(1, min(8, at_once * columns // 512)),
        },
        warmup=warmup,
    )


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _quantize_rows(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    num_rows_ptr,
    T,
    H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    _quantize(x_ptr, x_stride, codes_ptr, scales_ptr, num_rows_ptr, T, H, AT_ONCE, COLUMNS, INTERPRET)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _quantize_h(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    num_rows_ptr,
    T,
    H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    _quantize(x_ptr, x_stride, codes_ptr, scales_ptr, num_rows_ptr, T, H, AT_ONCE, COLUMNS, INTERPRET)


@triton.jit
def _quantize(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    num_rows_ptr,
    T,
    H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
    LARGEST: tl.constexpr = LARGEST_E4M3,
    LEAST: tl.constexpr = LEAST_AMAX,
):
    """A program takes AT_ONCE groups of COLUMNS columns, of one row or of several."""
    GROUPS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    g_G = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    row_G = g_G // GROUPS
    end = T
    if num_rows_ptr is not None:
        end = tl.load(num_rows_ptr)
    in_G = row_G < end
    h_GC = (g_G % GROUPS * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    in_GC = in_G[:, None] & (h_GC < H)
    row_G = row_G.to(tl.int64)[:, None]
    x_GC = tl.load(x_ptr + row_G * x_stride + h_GC, mask=in_GC, other=0.0)
    factor_G, scale_G = factor_and_scale(tl.max(tl.abs(x_GC.to(tl.float32)), 1), LARGEST, LEAST)
    codes_GC = to_fp8(x_GC, factor_G, LARGEST, INTERPRET)
    tl.store(codes_ptr + row_G * H + h_GC, codes_GC.to(codes_ptr.dtype.element_ty), mask=in_GC)
    tl.store(scales_ptr + g_G, scale_G, mask=in_G)
