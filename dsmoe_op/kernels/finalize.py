"""The layer's end: the weighted sum of a token's rows, the shared row, and the one rounding."""

from __future__ import annotations

from typing import Any  # noqa: F401 (of a type comment)

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import launch, row_stride
from dsmoe_op.kernels.overlap import begin


def finalize(
    y_NH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    row_of_TK: Tensor,
    shared_TH: Tensor | None,
    x_TH: Tensor | None,
    out_TH: Tensor,
    *,
    config: MoEConfig,
    warmup: bool = False,
) -> None:
    """out = round(sum_k w y + shared), in float32, by ascending k, with the config's factors.

    Args:
        y_NH: [T*K, H] contiguous, the experts' rows; no row is read that row_of_TK does not name.
        topk_ids_TK, topk_weights_TK, row_of_TK: int32, float32, int32 [T, K] contiguous, as `choose` and `order_rows`
            leave them.
        shared_TH: [T, H] contiguous, already gated.
        x_TH: [T, H] any row stride; read where a slot has an id but no row (a zero expert). None where there are none.
        out_TH: written; [T, H] contiguous.
    """
    T, H = out_TH.shape
    if T == 0:
        return
    # 16 bytes of each row for a thread.
    block = min(128 * (16 // y_NH.element_size()), triton.next_power_of_2(H))
    zero_experts = config.num_zero_experts > 0
    launch(
        _finalize,
        (T, triton.cdiv(H, block)),
        (
            y_NH,
            topk_ids_TK if zero_experts else None,
            topk_weights_TK,
            row_of_TK,
            shared_TH,
            x_TH if zero_experts else None,
            row_stride(x_TH) if zero_experts and x_TH is not None else 0,
            out_TH,
        ),
        {
            "H": H,
            "K": topk_ids_TK.shape[1],
            "WEIGHT_ON_INPUT": config.apply_router_weight_on_input,
            "ROUTED_SCALE": config.scale_at_end,
            "SCALE": 0.5 if config.combine == "average" else 1.0,
            "BLOCK_H": block,
            "AT_ONCE": 8,
            "num_warps": 4,
        },
        warmup=warmup,
    )


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "weights_ptr", "row_of_ptr"])
def _finalize(
    y_ptr,
    ids_ptr,
    weights_ptr,
    row_of_ptr,
    shared_ptr,
    x_ptr,
    x_stride,
    out_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ROUTED_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    token = tl.program_id(0).to(tl.int64)
    h_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside_H = h_H < H
    if shared_ptr is not None:
        shared_H = tl.load(shared_ptr + token * H + h_H, mask=inside_H, other=0.0)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    # Loads first, the sum after them, so that many rows are under way at once. The barriers hold the assembler to that
    # order, which it would give up for a few registers.
    for first in tl.static_range(0, K, AT_ONCE):
        rows = ()  # type: tuple[Any, ...]
        weights = ()  # type: tuple[Any, ...]
        for k in tl.static_range(first, min(K, first + AT_ONCE)):
            rows += (tl.load(row_of_ptr + token * K + k).to(tl.int64),)
            weights += (tl.load(weights_ptr + token * K + k),)
        tl.debug_barrier()
        ys_H = ()  # type: tuple[Any, ...]
        for k in tl.static_range(min(K - first, AT_ONCE)):
            in_row_H = h_H < tl.where(rows[k] >= 0, H, 0)
            ys_H += (tl.load(y_ptr + rows[k] * H + h_H, mask=in_row_H, other=0.0),)
        tl.debug_barrier()
        for k in tl.static_range(min(K - first, AT_ONCE)):
            row, weight, y_H = rows[k], weights[k], ys_H[k].to(tl.float32)
            if WEIGHT_ON_INPUT:
                term_H = y_H
            else:
                term_H = weight * y_H
            # Selected, not multiplied away: a slot without a row may hold any weight.
            term_H = tl.where(row >= 0, term_H, 0.0)
            if x_ptr is not None:
                zero_expert = (row < 0) & (tl.load(ids_ptr + token * K + first + k) >= 0)
                x_ptrs = x_ptr + token * x_stride + h_H
                x_H = tl.load(x_ptrs, mask=h_H < tl.where(zero_expert, H, 0), other=0.0).to(tl.float32)
                term_H = tl.where(zero_expert, weight * x_H, term_H)
            sum_H += term_H
    if ROUTED_SCALE != 1.0:
        sum_H *= ROUTED_SCALE
    if shared_ptr is not None:
        sum_H += shared_H.to(tl.float32)
    if SCALE != 1.0:
        sum_H *= SCALE
    tl.store(out_ptr + token * H + h_H, sum_H.to(out_ptr.dtype.element_ty), mask=inside_H)
