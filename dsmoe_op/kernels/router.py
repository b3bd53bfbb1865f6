"""Router logits: x w^T (+ bias), summed in float32. No split of the inner sum, so no atomics and no second pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.kernels.launch import INTERPRET, TL_DTYPE, launch, row_stride
from dsmoe_op.tuning import router_tile, router_variants


def router_logits(
    x_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor | None,
    logits_TE: Tensor,
    *,
    round_to_model: bool,
    warmup: bool = False,
) -> None:
    """logits_TE = x w^T + bias.

    Args:
        x_TH: [T, H] bf16, fp16 or fp32, any row stride, unit stride in the last dim.
        router_weight_EH: [E, H] bf16, fp16 or fp32, unit stride in one dim.
        router_bias_E: [E] contiguous, any float dtype.
        logits_TE: written; float32 [T, E] contiguous.
        round_to_model: the logits are rounded to the dtype of x (and stored in float32 all the same).
    """
    T, H = x_TH.shape
    E = router_weight_EH.shape[0]
    if T == 0:
        return
    product = _product(x_TH.dtype, router_weight_EH.dtype)
    for tile in router_variants(product) if warmup else (router_tile(T, product),):
        launch(
            _router_logits,
            (triton.cdiv(T, tile.block_m), triton.cdiv(E, tile.block_n)),
            (x_TH, row_stride(x_TH), router_weight_EH, router_bias_E, logits_TE, T),
            {
                "E": E,
                "H": H,
                "STRIDE_E": router_weight_EH.stride(0),
                "STRIDE_H": router_weight_EH.stride(1),
                "PRODUCT": product,
                "ROUND_TO": TL_DTYPE[x_TH.dtype] if round_to_model else tl.float32,
                "BLOCK_T": tile.block_m,
                "BLOCK_E": tile.block_n,
                "BLOCK_H": tile.block_k,
                "INTERPRET": INTERPRET,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            },
            warmup=warmup,
        )


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


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["bias_ptr"])
def _router_logits(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    logits_ptr,
    T,
    E: tl.constexpr,
    H: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_H: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROUND_TO: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    h_H = tl.arange(0, BLOCK_H)
    x_ptrs = x_ptr + t_T[:, None] * x_stride + h_H[None, :]
    weight_ptrs = weight_ptr + e_E.to(tl.int64)[None, :] * STRIDE_E + h_H[:, None] * STRIDE_H
    in_T = (t_T < T)[:, None]
    in_E = (e_E < E)[None, :]
    sum_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, H, BLOCK_H):
        if H % BLOCK_H == 0:
            x = tl.load(x_ptrs, mask=in_T, other=0.0)
            w = tl.load(weight_ptrs, mask=in_E, other=0.0)
        else:
            in_H = h_H < H - start
            x = tl.load(x_ptrs, mask=in_T & in_H[None, :], other=0.0)
            w = tl.load(weight_ptrs, mask=in_E & in_H[:, None], other=0.0)
        if INTERPRET:  # its bf16 products are wrong
            sum_TE = tl.dot(x.to(tl.float32), w.to(tl.float32), sum_TE, input_precision="ieee")
        elif PRODUCT == "plain":
            sum_TE = tl.dot(x, w, sum_TE)
        elif PRODUCT == "split":
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            sum_TE = tl.dot(x, low, sum_TE)
            sum_TE = tl.dot(x, middle, sum_TE)
            sum_TE = tl.dot(x, high, sum_TE)
        else:
            sum_TE = tl.dot(x.to(tl.float32), w.to(tl.float32), sum_TE, input_precision=PRODUCT)
        x_ptrs += BLOCK_H
        weight_ptrs += BLOCK_H * STRIDE_H
    if bias_ptr is not None:
        sum_TE += tl.load(bias_ptr + e_E, mask=e_E < E, other=0.0).to(tl.float32)[None, :]
    sum_TE = sum_TE.to(ROUND_TO).to(tl.float32)
    tl.store(logits_ptr + t_T[:, None] * E + e_E[None, :], sum_TE, mask=in_T & in_E)
