"""The layer's end: the weighted sum of a token's rows, the shared row, and the one rounding."""

from __future__ import annotations

from typing import Any  # noqa: F401 (of a type comment)

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.arrivals import wait_for
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


@triton.jit
def sum_of_rows(
    sum,
    token,
    there,
    h,
    y_ptr,
    ids_ptr,
    weights_ptr,
    row_of_ptr,
    shared_ptr,
    x_ptr,
    x_stride,
    counter_ptr,
    count,
    H: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    ROUTED_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Columns h of the layer's output in float32, before they are rounded; `sum` are zeros of their shape.

    Of one token (a scalar, and h is of one dim), or of a column of tokens beside a row h. `there` (bool, of the token's
    shape) says of which tokens rows are read at all; None: of every one. With counter_ptr, y and shared are read when
    `count` programs have arrived there, and CACHE says how.
    """
    # Loads first, the sum after them, so that many rows are under way at once. The barriers hold the assembler to that
    # order, which it would give up for a few registers.
    for first in tl.static_range(0, K, AT_ONCE):
        rows = ()  # type: tuple[Any, ...]
        weights = ()  # type: tuple[Any, ...]
        for k in tl.static_range(first, min(K, first + AT_ONCE)):
            if there is None:
                rows += (tl.load(row_of_ptr + token * K + k).to(tl.int64),)
                weights += (tl.load(weights_ptr + token * K + k),)
            else:
                rows += (tl.load(row_of_ptr + token * K + k, mask=there, other=-1).to(tl.int64),)
                weights += (tl.load(weights_ptr + token * K + k, mask=there, other=0.0),)
        if first == 0 and counter_ptr is not None:
            wait_for(counter_ptr, count)
        else:
            tl.debug_barrier()
        if first == 0 and shared_ptr is not None:
            in_shared = h < H
            if there is not None:
                in_shared = there & in_shared
            shared = tl.load(shared_ptr + token * H + h, mask=in_shared, other=0.0, cache_modifier=CACHE)
        ys = ()  # type: tuple[Any, ...]
        for k in tl.static_range(min(K - first, AT_ONCE)):
            if there is None:
                in_row = h < tl.where(rows[k] >= 0, H, 0)
            else:  # of rank 2, where Triton sees in this form alone that a thread's columns share the mask
                in_row = (rows[k] >= 0) & (h < H)
            ys += (tl.load(y_ptr + rows[k] * H + h, mask=in_row, other=0.0, cache_modifier=CACHE),)
        tl.debug_barrier()
        for k in tl.static_range(min(K - first, AT_ONCE)):
            row, weight, y = rows[k], weights[k], ys[k].to(tl.float32)
            if WEIGHT_ON_INPUT:
                term = y
            else:
                term = weight * y
            # Selected, not multiplied away: a slot without a row may hold any weight.
            term = tl.where(row >= 0, term, 0.0)
            if x_ptr is not None:
                id_ptrs = ids_ptr + token * K + first + k
                if there is None:
                    id = tl.load(id_ptrs)
                else:
                    id = tl.load(id_ptrs, mask=there, other=-1)
                zero_expert = (row < 0) & (id >= 0)
                x_ptrs = x_ptr + token * x_stride + h
                if there is None:
                    in_x = h < tl.where(zero_expert, H, 0)
                else:
                    in_x = zero_expert & (h < H)
                x = tl.load(x_ptrs, mask=in_x, other=0.0).to(tl.float32)
                term = tl.where(zero_expert, weight * x, term)
            sum += term
    if ROUTED_SCALE != 1.0:
        sum *= ROUTED_SCALE
    if shared_ptr is not None:
        sum += shared.to(tl.float32)
    if SCALE != 1.0:
        sum *= SCALE
    return sum


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
    sum_H = sum_of_rows(
        tl.zeros([BLOCK_H], tl.float32), token, None, h_H, y_ptr, ids_ptr, weights_ptr, row_of_ptr, shared_ptr, x_ptr,
        x_stride, None, 0, H, K, WEIGHT_ON_INPUT, ROUTED_SCALE, SCALE, AT_ONCE, "",
    )  # fmt: skip
    tl.store(out_ptr + token * H + h_H, sum_H.to(out_ptr.dtype.element_ty), mask=h_H < H)
