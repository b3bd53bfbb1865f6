"""What few tokens' experts in one launch promise, run in Triton's interpreter by `test_kernels_interpreter.py`."""

from __future__ import annotations

import pytest
import torch
from interpreted import (
    FP16,
    FP64,
    NAN,
    close,
    gemm1_oracle,
    order_of,
    order_rows,
    padded_rows,
    randn,
    rng,
    some_ids,
    tile_id,
    transposed,
)
from triton.runtime.interpreter import InterpreterBuilder

from dsmoe_op import kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import Tile, layer_variants

__all__ = ["rng"]


def pairs_of_one_launch() -> list[tuple[Tile, Tile]]:
    """The heuristic's, and two that a table may have."""
    pairs = [v[:2] for v in layer_variants("16bit") if v.one_launch]
    pairs += [
        (Tile(8, 16, 64, 4, 2, swap=True), Tile(8, 64, 32, 4, 3)),
        (Tile(64, 32, 32, 8, 2), Tile(64, 64, 32, 8, 2)),
    ]
    return list(dict.fromkeys(pairs))


@pytest.mark.parametrize("tiles", pairs_of_one_launch(), ids=lambda pair: "-".join(map(tile_id, pair)))
def test_one_launch_has_the_bits_of_gemm1_gemm2_and_finalize(rng, tiles):
    """With several blocks of an expert, masked edges, and routed experts alone or beside the shared one."""
    T, H, I, S, E, K = 40, 272, 48, 80, 5, 3
    one, two = tiles
    config = MoEConfig(top_k=K, clamp_routed=0.9, combine="average")
    w13, w2 = randn(rng, E, 2 * I, H, dtype=FP16, scale=0.2), randn(rng, E, H, I, dtype=FP16)
    shared_w13, shared_w2 = randn(rng, 2 * S, H, dtype=FP16, scale=0.2), transposed(randn(rng, H, S, dtype=FP16))
    w13_bias, w2_bias = randn(rng, E, 2 * I, dtype=FP16), randn(rng, E, H)
    x, gate, weights = padded_rows(randn(rng, T, H, dtype=FP16)), torch.rand(T, generator=rng), randn(rng, T, K)
    valid = torch.tensor([T - 3], dtype=torch.int32)
    ids = some_ids(rng, T, K, E)
    ids[T - 3 :] = -1
    for fused, ends in ((False, True), (True, True), (True, False)):
        rows = order_of(ids, E, one)
        outs = []
        for together in (False, True):
            h, y = torch.full((T * K, I), NAN, dtype=FP16), torch.full((T * K, H), NAN, dtype=FP16)
            h_shared, shared = torch.full((T, S), NAN, dtype=FP16), torch.full((T, H), NAN, dtype=FP16)
            out = torch.full((T, H), NAN, dtype=FP16)
            first = {"w13": w13, "w13_bias": w13_bias, "h_NI": h}
            second = {"w2": w2, "w2_bias": w2_bias, "y_NH": y, "zero_tail": not ends}
            if fused:
                first |= {"shared_w13": shared_w13, "h_shared_TS": h_shared, "num_valid_tokens": valid}
                second |= {"shared_w2": shared_w2, "gate_T": gate, "shared_TH": shared}
            if together:
                kernels.experts(
                    x, config=config, tiles=tiles, rows=rows, topk_ids_TK=ids, topk_weights_TK=weights,
                    out_TH=out if ends else None, **first, **second,
                )  # fmt: skip
            else:
                kernels.gemm1(
                    x, config=config, tile=one, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N, **first
                )
                second |= {"h_NI": h} | ({"h_shared_TS": h_shared, "num_valid_tokens": valid} if fused else {})
                kernels.gemm2(config=config, tile=two, blocks=rows.blocks_3B, **second)
                if ends:
                    kernels.finalize(
                        y, ids, weights, rows.row_of_TK, shared if fused else None, None, out, config=config
                    )
            outs.append((h[: rows.num_rows], y[: None if not ends else rows.num_rows], shared, out))
        for apart, got, there in zip(*outs, (True, True, fused, ends), strict=True):
            assert apart.isfinite().all() or not there
            assert torch.equal(got, apart) or not there


@pytest.mark.parametrize(("splits", "swap", "H"), [(2, True, 192), (4, True, 256), (4, False, 128), (4, True, 144)])
@pytest.mark.parametrize(
    "options", [{}, {"w13_order": "interleaved"}, {"activation": "relu2"}, {"apply_router_weight_on_input": True}]
)
def test_programs_may_share_the_tiles_of_the_one_launchs_gemm1(rng, options, splits, swap, H):
    """Where H has whole parts, which 144 has not. Every program but the last one of a tile only leaves its part."""
    T, I, S, E, K = 11, 48, 80, 5, 3
    tiles = Tile(16, 32, 32, 4, 3, swap=swap, splits=splits), Tile(16, 128, 32, 4, 3, swap=swap)
    config = MoEConfig(top_k=K, clamp_routed=0.9, **options)
    width = 1 + config.gated
    w13, w2 = randn(rng, E, width * I, H, dtype=FP16, scale=0.2), randn(rng, E, H, I, dtype=FP16)
    shared_w13, shared_w2 = transposed(randn(rng, width * S, H, dtype=FP16, scale=0.2)), randn(rng, H, S, dtype=FP16)
    bias, x, weights = randn(rng, E, width * I), padded_rows(randn(rng, T, H, dtype=FP16)), torch.rand(T, K)
    valid, ids = torch.tensor([T - 3], dtype=torch.int32), some_ids(rng, T, K, E)
    ids[T - 3 :] = -1
    rows = order_rows(ids, weights, E=E, arrivals=kernels.num_arrivals(20, T, H, I, S, tiles))[0]
    h, h_shared = torch.full((T * K, I), NAN, dtype=FP16), torch.full((T, S), NAN, dtype=FP16)
    y, shared, out = (torch.full((n, H), NAN, dtype=FP16) for n in (T * K, T, T))
    parts = torch.full((kernels.num_parts(T, K, I, S, config.gated, tiles[0]),), NAN)
    kernels.experts(
        x, config=config, tiles=tiles, rows=rows, topk_ids_TK=ids, topk_weights_TK=weights, w13=w13, w13_bias=bias,
        w2=w2, h_NI=h, y_NH=y, shared_w13=shared_w13, shared_w2=shared_w2, h_shared_TS=h_shared, shared_TH=shared,
        num_valid_tokens=valid, out_TH=out, parts=parts,
    )  # fmt: skip
    on_input = weights if config.apply_router_weight_on_input else None
    want, sums = gemm1_oracle(x, w13, bias, config, rows, on_input)
    close(h[: len(want)], want, sums=sums)
    sums = x.to(FP64) @ shared_w13.to(FP64).T
    close(h_shared[:-3], reference.activation(sums, config, clamp=None)[:-3], sums=sums)
    assert (h_shared[-3:] == 0).all()
    assert parts.isnan().all() == (H == 144)
    assert out.isfinite().all()
    # The rest has the bits of the launches of its own, for these h.
    apart, alone = torch.full_like(y, NAN), torch.full_like(out, NAN)
    kernels.gemm2(config=config, tile=tiles[1], w2=w2, blocks=rows.blocks_3B, h_NI=h, y_NH=apart)
    kernels.finalize(apart, ids, weights, rows.row_of_TK, shared, None, alone, config=config)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("splits", [2, 8])
def test_split_tiles_have_the_same_bits_whoever_is_last(rng, monkeypatch, splits):
    """The interpreter runs programs by ascending number, so here GEMM 1's take their numbers at random."""
    T, H, I, S, E, K = 7, 128, 48, 80, 5, 2
    tiles = Tile(16, 32, 16, 4, 3, swap=splits == 2, splits=splits), Tile(16, 64, 16, 4, 3, swap=True)
    config, ids, weights = MoEConfig(top_k=K), some_ids(rng, T, K, E), torch.rand(T, K)
    w13, w2 = randn(rng, E, 2 * I, H, dtype=FP16, scale=0.2), randn(rng, E, H, I, dtype=FP16)
    shared_w13, shared_w2 = randn(rng, 2 * S, H, dtype=FP16, scale=0.2), randn(rng, H, S, dtype=FP16)
    x, number = randn(rng, T, H, dtype=FP16), InterpreterBuilder.set_grid_idx
    found = []
    for i in range(5):
        rows = order_rows(ids, weights, E=E, arrivals=kernels.num_arrivals(20, T, H, I, S, tiles))[0]
        sizes = (T * K, I), (T, S), (T * K, H), (T, H), (T, H)
        h, h_shared, y, shared, out = (torch.full(size, NAN, dtype=FP16) for size in sizes)
        order = list(range(splits * (rows.blocks_3B.shape[1] * 2 + 3)))
        if i:
            order = torch.randperm(len(order), generator=rng).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(
                InterpreterBuilder,
                "set_grid_idx",
                lambda self, x, y, z, order=order: number(self, order[x] if x < len(order) else x, y, z),
            )
            kernels.experts(
                x, config=config, tiles=tiles, rows=rows, w13=w13, w2=w2, h_NI=h, y_NH=y, topk_ids_TK=ids,
                topk_weights_TK=weights, shared_w13=shared_w13, shared_w2=shared_w2, h_shared_TS=h_shared,
                shared_TH=shared, out_TH=out, parts=torch.full((kernels.num_parts(T, K, I, S, True, tiles[0]),), NAN),
            )  # fmt: skip
        want, sums = gemm1_oracle(x, w13, None, config, rows)
        close(h[: len(want)], want, sums=sums)
        sums = x.to(FP64) @ shared_w13.to(FP64).T
        close(h_shared, reference.activation(sums, config, clamp=None), sums=sums)
        assert out.isfinite().all()
        found.append((h[: len(want)], h_shared, out))
        # Counters of the shared block and the routed ones, of GEMM 2's columns, and of tiles; no others.
        there = (rows.blocks_3B[0] >= 0).int()
        counts = 3 * splits, *(2 * splits * there), *[1 + len(there)] * 2, *[splits] * 3
        counts = torch.tensor([*counts, *(splits * there.repeat_interleave(2))], dtype=torch.int32)
        assert torch.equal(rows.arrivals, torch.nn.functional.pad(counts, (0, len(rows.arrivals) - len(counts))))
    assert all(torch.equal(one, first) for some in found for one, first in zip(some, found[0], strict=True))
