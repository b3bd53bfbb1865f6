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


def quantize_rows(x_TH: Tensor, codes_TH: Tensor, scales: Tensor, *, warmup: bool = False) -> None:
    """codes * scales is about x, as `formats.quantize_rows` has it.

    Args:
        x_TH: [T, H] any row stride, unit stride in the last dim.
        codes_TH: written; float8_e4m3fn [T, H] contiguous.
        scales: written; float32, [T] of a row each, or [T, ceil(H / 128)] of 128 columns each. Contiguous.
    """
    T, H = x_TH.shape
    if T == 0:
        return
    groups = 1 if scales.dim() == 1 else 8
    columns = triton.next_power_of_2(H) if groups == 1 else GROUP
    launch(
        _quantize_rows,
        (T, 1 if groups == 1 else triton.cdiv(H, groups * columns)),
        (x_TH, row_stride(x_TH), codes_TH, scales),
        {
            "H": H,
            "GROUPS": groups,
            "COLUMNS": columns,
            "INTERPRET": INTERPRET,
            "num_warps": max(1, min(8, groups * columns // 512)),
        },
        warmup=warmup,
    )


@triton.jit
def _quantize_rows(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
    LARGEST: tl.constexpr = LARGEST_E4M3,
    LEAST: tl.constexpr = LEAST_AMAX,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    token = tl.program_id(0).to(tl.int64)
    g_G = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    h_GC = g_G[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x_GC = tl.load(x_ptr + token * x_stride + h_GC, mask=h_GC < H, other=0.0)
    factor_G, scale_G = factor_and_scale(tl.max(tl.abs(x_GC.to(tl.float32)), 1), LARGEST, LEAST)
    codes_GC = to_fp8(x_GC, factor_G, LARGEST, INTERPRET)
    tl.store(codes_ptr + token * H + h_GC, codes_GC.to(codes_ptr.dtype.element_ty), mask=h_GC < H)
    ALL: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    tl.store(scales_ptr + token * ALL + g_G, scale_G, mask=g_G < ALL)
