"""The experts' two matrix products: which kernel makes them.

GEMM 1 takes rows of x (gathered by sorted_slot where they are routed) through w13 and the activation to h.
GEMM 2 takes rows of h through w2 to y. The ordinary kernel is in grouped.py; others take some weights in its place.
What these leave of y's rows that no expert has, `_zero_rows` writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.coded import PLAIN, Coded
from dsmoe_op.kernels.coded_few import coded_few
from dsmoe_op.kernels.coded_few import takes as takes_few
from dsmoe_op.kernels.coded_persistent import coded_persistent
from dsmoe_op.kernels.gemm1_persistent import gemm1_persistent
from dsmoe_op.kernels.gemm1_persistent import takes as takes_w13
from dsmoe_op.kernels.gemm2_persistent import gemm2_persistent
from dsmoe_op.kernels.gemm2_persistent import takes as takes_w2
from dsmoe_op.kernels.grouped import Part, grouped
from dsmoe_op.kernels.launch import INTERPRET, launch
from dsmoe_op.kernels.overlap import begin
from dsmoe_op.kernels.quantize import takes_codes
from dsmoe_op.tuning import Tile


def gemm1(
    x_TH: Tensor,
    *,
    config: MoEConfig,
    tile: Tile,
    w13: Tensor | None = None,
    w13_bias: Tensor | None = None,
    blocks: Tensor | None = None,
    sorted_slot_N: Tensor | None = None,
    topk_weights_TK: Tensor | None = None,
    h_NI: Tensor | None = None,
    taken: Tensor | None = None,
    shared_w13: Tensor | None = None,
    h_shared_TS: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    coded: Coded = PLAIN,
    shared_coded: Coded = PLAIN,
    x_codes_TH: Tensor | None = None,
    x_scales: Tensor | None = None,
    x_ordered: Tensor | None = None,
    allow_tf32: bool = False,
    warmup: bool = False,
) -> None:
    """h = act(x w13^T + bias), rounded once. Routed where w13 is given, shared where shared_w13 is; both fuse them.

    Args:
        x_TH: [T, H] any row stride, unit stride in the last dim.
        tile: its block_m is that of `blocks`.
        w13: [E, 2I, H] ([E, I, H] where the activation is not gated), unit stride in one of the last two dims.
        w13_bias: [E, 2I] contiguous, dtype of x or float32.
        blocks, sorted_slot_N: as `order_rows` leaves them (`Rows`).
        topk_weights_TK: float32 [T, K] contiguous; read with config.apply_router_weight_on_input alone.
        h_NI: the experts' rows are written; [T*K, I] contiguous.
        taken: as `order_rows` leaves it, for a persistent tile.
        shared_w13: [2S, H] ([S, H]), unit stride in one dim.
        h_shared_TS: written; [T, S] contiguous; zeros from num_valid_tokens on.
        num_valid_tokens: int32 [1], for the shared rows; the routed ones have none beyond it.
        coded, shared_coded: what belongs to w13 and to shared_w13 where they are quantised, contiguous as `as_bytes`
            leaves them.
        x_codes_TH, x_scales: x as `quantize_rows` makes it, which weights multiply in place of x whose format quantises
            rows so; others quantise what they read.
        x_ordered: x as `reorder_columns` makes it, for routed experts of four bits such as `coded_persistent.takes`
            says, which multiply it in place of x.
        allow_tf32: float32 products may be tf32.
    """
    if x_TH.shape[0] == 0:
        return
    assert tile.splits == 1

    routed = shared = None
    if x_ordered is not None:
        assert w13 is not None
        assert h_NI is not None
        assert blocks is not None
        assert taken is not None
        coded_persistent(
            x_ordered, w13, h_NI, coded=coded, block_m=tile.block_m, config=config, bias=w13_bias, blocks_3B=blocks,
            sorted_slot_N=sorted_slot_N, taken=taken, warmup=warmup,
        )  # fmt: skip
        return
    if w13 is not None:
        assert h_NI is not None
        weight_on_input = topk_weights_TK if config.apply_router_weight_on_input else None
        a, a_scale = _rows_for(coded, x_TH, x_codes_TH, x_scales)
        alone = shared_w13 is None and weight_on_input is None
        if alone and _is_few(tile, x_TH, w13, coded, config):
            assert blocks is not None
            coded_few(
                x_TH, w13, h_NI, coded=coded, config=config, bias=w13_bias, blocks_3B=blocks,
                sorted_slot_N=sorted_slot_N, warmup=warmup,
            )  # fmt: skip
            return
        if alone and _is_persistent_gemm1(tile, a_scale, w13, h_NI, config, coded, shared=False):
            assert a_scale is not None
            assert taken is not None
            gemm1_persistent(
                a, a_scale, w13, h_NI, config=config, coded=coded, block_m=tile.block_m, bias=w13_bias,
                blocks_3B=blocks, sorted_slot_N=sorted_slot_N, taken=taken, warmup=warmup,
            )  # fmt: skip
            return
        routed = Part(a, w13, h_NI, w13_bias, blocks, sorted_slot_N, weight_on_input, coded=coded, a_scale=a_scale)
    if shared_w13 is not None:
        assert h_shared_TS is not None
        a, a_scale = _rows_for(shared_coded, x_TH, x_codes_TH, x_scales)
        alone = routed is None and num_valid_tokens is None
        if alone and _is_persistent_gemm1(tile, a_scale, shared_w13, h_shared_TS, config, shared_coded, shared=True):
            assert a_scale is not None
            gemm1_persistent(
                a, a_scale, shared_w13, h_shared_TS, config=config, coded=shared_coded, block_m=tile.block_m,
                warmup=warmup,
            )  # fmt: skip
            return
        shared = Part(a, shared_w13, h_shared_TS, coded=shared_coded, a_scale=a_scale)
    activation = {
        "ACTIVATION": config.activation,
        "ORDER": config.w13_order,
        "CLAMP": config.clamp_routed,
        "SHARED_CLAMP": config.clamp_shared,
        "CLAMP_AFTER": config.clamp_after_activation,
    }
    grouped(tile, config.top_k, routed, shared, num_valid_tokens, False, activation, allow_tf32, warmup)


def _is_persistent_gemm1(
    tile: Tile, a_scale: Tensor | None, w13: Tensor, h: Tensor, config: MoEConfig, coded: Coded, *, shared: bool
) -> bool:
    """Whether this product is that of `gemm1_persistent`: of codes, to 16 bits."""
    fits = a_scale is not None and h.itemsize == 2
    return tile.persistent and not INTERPRET and fits and takes_w13(w13, tile.block_m, config, coded, shared=shared)


def _is_few(tile: Tile, a: Tensor, w: Tensor, coded: Coded, config: MoEConfig | None = None) -> bool:
    """Whether this product is that of `coded_few`."""
    return tile.persistent and not INTERPRET and takes_few(w, a.dtype, tile.block_m, coded, config)


def _rows_for(
    coded: Coded, rows: Tensor, codes: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What a weight multiplies: the rows, or their codes with scales, if it takes these."""
    if codes is not None and takes_codes(coded, scales):
        return codes, scales
    return rows, None


def gemm2(
    *,
    config: MoEConfig,
    tile: Tile,
    w2: Tensor | None = None,
    w2_bias: Tensor | None = None,
    blocks: Tensor | None = None,
    h_NI: Tensor | None = None,
    y_NH: Tensor | None = None,
    num_rows: Tensor | None = None,
    taken: Tensor | None = None,
    zero_tail: bool = False,
    shared_w2: Tensor | None = None,
    h_shared_TS: Tensor | None = None,
    gate_T: Tensor | None = None,
    shared_TH: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    coded: Coded = PLAIN,
    shared_coded: Coded = PLAIN,
    h_codes_NI: Tensor | None = None,
    h_scales: Tensor | None = None,
    h_is_ordered: bool = False,
    h_shared_codes_TS: Tensor | None = None,
    h_shared_scales: Tensor | None = None,
    allow_tf32: bool = False,
    warmup: bool = False,
) -> None:
    """y = h w2^T + bias, rounded once. Routed where w2 is given, shared where shared_w2 is; both fuse them.

    Args:
        tile: its block_m is that of `blocks`.
        w2: [E, H, I], unit stride in one of the last two dims.
        w2_bias: [E, H] contiguous, dtype of h or float32.
        blocks, h_NI: as `order_rows` and `gemm1` leave them.
        y_NH: the experts' rows are written; [T*K, H] contiguous.
        num_rows, taken: as `order_rows` leaves them, for a persistent tile.
        zero_tail: the rows that no expert has are written too, as zeros.
        shared_w2: [H, S], unit stride in one dim.
        h_shared_TS: [T, S] contiguous, from `gemm1`.
        gate_T: float32 [T], multiplies the shared row before it is rounded.
        shared_TH: written; [T, H] contiguous; zeros from num_valid_tokens on.
        h_codes_NI, h_scales, h_shared_codes_TS, h_shared_scales: h as `quantize_rows` makes it, as of x in `gemm1`.
        h_is_ordered: h_NI is as `reorder_columns` makes it, for w2 such as `coded_persistent.takes` says.
        num_valid_tokens, coded, shared_coded, allow_tf32: as in `gemm1`.
    """
    routed = shared = None
    if w2 is not None:
        assert h_NI is not None
        assert y_NH is not None
        a, a_scale = _rows_for(coded, h_NI, h_codes_NI, h_scales)
        if h_is_ordered and y_NH.shape[0]:
            assert blocks is not None
            assert num_rows is not None
            assert taken is not None
            coded_persistent(
                h_NI, w2, y_NH, coded=coded, block_m=tile.block_m, bias=w2_bias, blocks_3B=blocks, taken=taken,
                warmup=warmup,
            )  # fmt: skip
            if zero_tail:
                _zero_rows_after(num_rows, y_NH, warmup=warmup)
            return
        if shared_w2 is None and y_NH.shape[0] and _is_few(tile, h_NI, w2, coded):
            assert blocks is not None
            assert num_rows is not None
            coded_few(h_NI, w2, y_NH, coded=coded, bias=w2_bias, blocks_3B=blocks, warmup=warmup)
            if zero_tail:
                _zero_rows_after(num_rows, y_NH, warmup=warmup)
            return
        if shared_w2 is None and y_NH.shape[0] and _is_persistent_gemm2(tile, a, w2, y_NH, coded):
            assert blocks is not None
            assert num_rows is not None
            assert taken is not None
            gemm2_persistent(
                a, w2, y_NH, bias=w2_bias, blocks_3B=blocks, block_m=tile.block_m, taken=taken, coded=coded,
                h_scales=a_scale, warmup=warmup,
            )  # fmt: skip
            if zero_tail:
                _zero_rows_after(num_rows, y_NH, warmup=warmup)
            return
        routed = Part(a, w2, y_NH, w2_bias, blocks, coded=coded, a_scale=a_scale)
    if shared_w2 is not None:
        assert h_shared_TS is not None
        assert shared_TH is not None
        plain = gate_T is None and num_valid_tokens is None and routed is None and shared_TH.shape[0]
        a, a_scale = _rows_for(shared_coded, h_shared_TS, h_shared_codes_TS, h_shared_scales)
        if plain and _is_persistent_gemm2(tile, a, shared_w2, shared_TH, shared_coded):
            gemm2_persistent(
                a, shared_w2, shared_TH, block_m=tile.block_m, coded=shared_coded, h_scales=a_scale, warmup=warmup
            )
            return
        shared = Part(a, shared_w2, shared_TH, gate=gate_T, coded=shared_coded, a_scale=a_scale)
    if any(part is not None and part.out.shape[0] for part in (routed, shared)):
        grouped(tile, config.top_k, routed, shared, num_valid_tokens, zero_tail, {}, allow_tf32, warmup)


def _is_persistent_gemm2(tile: Tile, a: Tensor, w2: Tensor, y: Tensor, coded: Coded) -> bool:
    """Whether this product is that of `gemm2_persistent`: of rows in the dtype of the weights, to 16 bits."""
    fits = a.dtype == w2.dtype and y.itemsize == 2
    return tile.persistent and not INTERPRET and fits and takes_w2(w2, tile.block_m, coded)


def _zero_rows_after(num_rows: Tensor, y_NH: Tensor, *, warmup: bool) -> None:
    """Zeroes the rows of y behind the experts'; few or none, as a rule."""
    N, H = y_NH.shape
    grid = (min(triton.cdiv(N, 16), 1024),)
    args = (num_rows, y_NH, N)
    meta = {"H": H, "BLOCK_H": min(1024, triton.next_power_of_2(H)), "num_warps": 4}
    launch(_zero_rows, grid, args, meta, warmup=warmup)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["num_rows_ptr"])
def _zero_rows(
    num_rows_ptr,
    y_ptr,
    N,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr = False,
    FOLLOWED: tl.constexpr = False,
):
    begin(EARLY, FOLLOWED)
    row = tl.load(num_rows_ptr) + tl.program_id(0)
    while row < N:
        for start in range(0, H, BLOCK_H):
            h_H = start + tl.arange(0, BLOCK_H)
            zeros_H = tl.zeros([BLOCK_H], y_ptr.dtype.element_ty)
            tl.store(y_ptr + row.to(tl.int64) * H + h_H, zeros_H, mask=h_H < H)
        row += tl.num_programs(0)
