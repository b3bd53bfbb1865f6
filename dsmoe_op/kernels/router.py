"""Router logits x w^T, summed in float32, as partial sums over parts of H: few tokens alone make too few programs.

The partial sums are added up by ascending part where the logits are read (choose.py): no atomics and no second pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.launch import INTERPRET, launch, row_stride
from dsmoe_op.kernels.order import zero
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.tuning import router_tile, router_variants


def router_logits(
    x_TH: Tensor,
    router_weight_EH: Tensor,
    logits_PTE: Tensor,
    *,
    counters: Tensor | None = None,
    warmup: bool = False,
) -> None:
    """The sum of logits_PTE over its first dim is x w^T.

    Args:
        x_TH: [T, H] bf16, fp16 or fp32, any row stride, unit stride in the last dim.
        router_weight_EH: [E, H] bf16, fp16 or fp32, unit stride in one dim.
        logits_PTE: written; float32 [P, T, E] contiguous, where P is `router_splits` of the other two.
        counters: int32, contiguous; zeroed, for the row order that a later launch of the call makes.
    """
    T, H = x_TH.shape
    E = router_weight_EH.shape[0]
    if T == 0:
        return
    product = _product(x_TH.dtype, router_weight_EH.dtype)
    chosen = router_tile(T, E, H, product)
    assert logits_PTE.shape == (chosen.splits, T, E), (logits_PTE.shape, chosen)
    for tile in router_variants(product) if warmup else (chosen.tile,):
        launch(
            _router_logits,
            (triton.cdiv(T, tile.block_m), triton.cdiv(E, tile.block_n), chosen.splits),
            (
                x_TH,
                row_stride(x_TH),
                router_weight_EH,
                logits_PTE,
                counters,
                T,
                chosen.columns,
                0 if counters is None else counters.numel(),
            ),
            {
                "E": E,
                "H": H,
                "STRIDE_E": router_weight_EH.stride(0),
                "STRIDE_H": router_weight_EH.stride(1),
                "PRODUCT": product,
                "BLOCK_T": tile.block_m,
                "BLOCK_E": tile.block_n,
                "BLOCK_H": tile.block_k,
                "INTERPRET": INTERPRET,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            },
            warmup=warmup,
        )


def router_splits(T: int, dtype: torch.dtype, router_weight_EH: Tensor) -> int:
    """Partial sums that `router_logits` makes of each logit for T tokens of that dtype."""
    E, H = router_weight_EH.shape
    return router_tile(T, E, H, _product(dtype, router_weight_EH.dtype)).splits


def _product(x: torch.dtype, weight: torch.dtype) -> str:
    """How the products are made exact, or as good as float32, for these dtypes.

    "plain": one product of two equal 16-bit dtypes, exact in float32. "split": a float32 weight is the exact sum of
    three bf16 numbers, so three exact products do. "tf32x3": other 16-bit inputs, which are exact in tf32 (the weight
    then keeps 22 bits). "ieee": float32 inputs, on the ordinary units.
    """
    if x == torch.float32:
        return "ieee"
    if x == weight:
        return "plain"
    return "split" if (x, weight) == (torch.bfloat16, torch.float32) else "tf32x3"


@triton.jit
def _multiplied(
    sum_TE, x_ptrs, weight_ptrs, in_T, in_E, rest, H: tl.constexpr, BLOCK_H: tl.constexpr, PRODUCT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """sum_TE and the product of the next BLOCK_H columns, of which `rest` are left."""
    if H % BLOCK_H == 0:
        x = tl.load(x_ptrs, mask=in_T, other=0.0)
        w = tl.load(weight_ptrs, mask=in_E, other=0.0)
    else:
        in_H = tl.arange(0, BLOCK_H) < rest
        x = tl.load(x_ptrs, mask=in_T & in_H[None, :], other=0.0)
        w = tl.load(weight_ptrs, mask=in_E & in_H[:, None], other=0.0)
    if INTERPRET:  # its bf16 products are wrong
        sum_TE = tl.dot(x.to(tl.float32), w.to(tl.float32), sum_TE, input_precision="ieee")
    elif PRODUCT == "plain":
        sum_TE = tl.dot(x, w, sum_TE)
    elif PRODUCT == "split":
        high = w.to(tl.bfloat16)
        rest_of_w = w - high.to(tl.float32)
        middle = rest_of_w.to(tl.bfloat16)
        low = (rest_of_w - middle.to(tl.float32)).to(tl.bfloat16)
        sum_TE = tl.dot(x, low, sum_TE)
        sum_TE = tl.dot(x, middle, sum_TE)
        sum_TE = tl.dot(x, high, sum_TE)
    else:
        sum_TE = tl.dot(x.to(tl.float32), w.to(tl.float32), sum_TE, input_precision=PRODUCT)
    return sum_TE


@triton.jit(
    do_not_specialize=["T", "columns", "num_counters"],
    do_not_specialize_on_alignment=["logits_ptr", "counters_ptr"],
)
def _router_logits(
    x_ptr,
    x_stride,
    weight_ptr,
    logits_ptr,
    counters_ptr,
    T,
    columns,
    num_counters,
    E: tl.constexpr,
    H: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_H: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    split = tl.program_id(2)
    if counters_ptr is not None:
        program = (split * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        zero(counters_ptr, num_counters, program, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2))

    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    # The loop is of int32 offsets from the split's first column, so that loads of 16 bytes are seen to be aligned.
    first = tl.multiple_of(split * columns, BLOCK_H)
    h_H = tl.arange(0, BLOCK_H)
    x_ptrs = x_ptr + t_T[:, None] * x_stride + first + h_H[None, :]
    weight_ptrs = weight_ptr + e_E.to(tl.int64)[None, :] * STRIDE_E + (first + h_H).to(tl.int64)[:, None] * STRIDE_H
    in_T = (t_T < T)[:, None]
    in_E = (e_E < E)[None, :]
    sum_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    end = tl.minimum(first + columns, H)
    if INTERPRET:  # that of Triton 3.6 cannot take a `range` to a runtime number with numpy 2.4
        start = first
        while start < end:
            sum_TE = _multiplied(sum_TE, x_ptrs, weight_ptrs, in_T, in_E, H - start, H, BLOCK_H, PRODUCT, INTERPRET)
            x_ptrs += BLOCK_H
            weight_ptrs += BLOCK_H * STRIDE_H
            start += BLOCK_H
    else:
        for start in range(first, end, BLOCK_H):
            sum_TE = _multiplied(sum_TE, x_ptrs, weight_ptrs, in_T, in_E, H - start, H, BLOCK_H, PRODUCT, INTERPRET)
            x_ptrs += BLOCK_H
            weight_ptrs += BLOCK_H * STRIDE_H
    logits_ptrs = logits_ptr + (split * T + t_T)[:, None] * E + e_E[None, :]
    tl.store(logits_ptrs, sum_TE, mask=in_T & in_E)
