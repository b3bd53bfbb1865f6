"""Columns of rows come into the order in which four-bit codes become numbers, for `coded_persistent`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.coded import in_order
from dsmoe_op.kernels.launch import launch, row_stride
from dsmoe_op.kernels.overlap import begin


def reorder_columns(x_TH: Tensor, ordered: Tensor, num_rows: Tensor | None = None, *, warmup: bool = False) -> None:
    """ordered = x with the columns of each 32 in the order of `in_order`.

    Args:
        x_TH: [T, H] any row stride, unit stride in the last dim; H a multiple of 32.
        ordered: written; [T, H] contiguous, the dtype of x. It may be x itself.
        num_rows: as `order_rows` leaves it, where x is the experts' rows: those of no expert are left alone.
    """
    T, H = x_TH.shape
    if T == 0 and not warmup:
        return
    columns = min(1024, 1 << (H & -H).bit_length() - 1)  # the largest power of two that divides H
    at_once = 2048 // columns
    launch(
        _reorder if num_rows is None else _reorder_h,
        (triton.cdiv(T * (H // columns), at_once),),
        (x_TH, row_stride(x_TH), ordered, num_rows, T),
        {
            "H": H,
            "AT_ONCE": at_once,
            "COLUMNS": columns,
            "num_warps": 4,
        },
        warmup=warmup,
    )


@triton.jit
def _in_order(x_ptr, x_stride, ordered_ptr, num_rows_ptr, T, H: tl.constexpr, AT_ONCE: tl.constexpr,
              COLUMNS: tl.constexpr):  # fmt: skip
    """A program takes AT_ONCE parts of COLUMNS columns, of one row or of several."""
    p_P = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    row_P = p_P // (H // COLUMNS)
    end = T
    if num_rows_ptr is not None:
        end = tl.load(num_rows_ptr)
    h_PC = (p_P % (H // COLUMNS) * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    in_PC = (row_P < end)[:, None] & (h_PC < H)
    x_PC = tl.load(x_ptr + row_P[:, None] * x_stride + h_PC, mask=in_PC, other=0.0)
    tl.debug_barrier()  # in place: all is read before something is written
    tl.store(ordered_ptr + row_P[:, None] * H + h_PC, in_order(x_PC), mask=in_PC)


@triton.jit(do_not_specialize=["T"])
def _reorder(
    x_ptr,
    x_stride,
    ordered_ptr,
    num_rows_ptr,
    T,
    H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    _in_order(x_ptr, x_stride, ordered_ptr, num_rows_ptr, T, H, AT_ONCE, COLUMNS)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _reorder_h(
    x_ptr,
    x_stride,
    ordered_ptr,
    num_rows_ptr,
    T,
    H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    _in_order(x_ptr, x_stride, ordered_ptr, num_rows_ptr, T, H, AT_ONCE, COLUMNS)
