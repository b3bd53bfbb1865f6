"""What the Triton kernels promise, run in Triton's interpreter: `test_kernels_interpreter.py` does it.

Oracles are `dsmoe_op.reference` in float64 and plain torch. The interpreter computes no bf16 products (they are float32
here) and truncates where it rounds to bf16; both are tested on a GPU.
"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import dsmoe_op.kernels.gemm as gemm_module
import dsmoe_op.kernels.order as order_module
import dsmoe_op.kernels.route as route_module
import dsmoe_op.kernels.router as router_module
from dsmoe_op import kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import INTERPRET
from dsmoe_op.kernels.order import num_zeros
from dsmoe_op.tuning import (
    OrderBlock,
    RouterTile,
    Tile,
    gemm_kind,
    layer_tiles,
    layer_variants,
    order_variants,
    router_variants,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
ROUNDING = {BF16: 2.0**-7, FP16: 2.0**-11, FP32: 2.0**-20}  # of one result; float32 leaves room for its sum
GARBAGE = 12345  # what a kernel must not leave, or must not read

assert INTERPRET


@pytest.fixture
def rng() -> torch.Generator:
    """Seeded for each test by conftest.py."""
    return torch.default_generator


def randn(rng: torch.Generator, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None, slack: float = 2.0) -> None:
    """Within `slack` roundings to the dtype, and of float32 sums of the size of the largest value."""
    eps = slack * ROUNDING[dtype or got.dtype]
    atol = slack * ROUNDING[FP32] * max(1e-30, want.abs().max().item() if want.numel() else 0.0)
    torch.testing.assert_close(got.to(FP64), want.to(FP64), rtol=eps, atol=atol)


def padded_rows(x: Tensor) -> Tensor:
    """The same values behind a row stride larger than the row."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), float(GARBAGE), dtype=x.dtype)
    wide[:, 8 : 8 + x.shape[1]] = x
    return wide[:, 8 : 8 + x.shape[1]]


def transposed(w: Tensor) -> Tensor:
    """The same values with the unit stride in the last dim but one."""
    return w.mT.contiguous().mT


# Router


def router_logits(x: Tensor, weight: Tensor, **options) -> Tensor:
    """The partial sums of the logits, [P, T, E]."""
    logits = torch.full((kernels.router_splits(x.shape[0], x.dtype, weight), x.shape[0], weight.shape[0]), NAN)
    kernels.router_logits(x, weight, logits, **options)
    return logits


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32), (FP32, BF16)]
)
@pytest.mark.parametrize("T", [1, 2, 7, 70])
def test_router_logits_are_the_float32_product(rng, x_dtype, weight_dtype, T):
    for H, E in [(336, 21), (1616, 5)]:
        x, weight = randn(rng, T, H, dtype=x_dtype), randn(rng, E, H, dtype=weight_dtype, scale=0.1)
        want = reference.compute_logits(x, weight, None, MoEConfig(top_k=1))
        for x_form, weight_form in [(x, weight), (padded_rows(x), transposed(weight))]:
            logits = router_logits(x_form, weight_form)
            assert len(logits) == (1 if H < 1024 else 3)
            close(logits.sum(0), want, slack=4)


@pytest.mark.parametrize("tile", router_variants("plain"))
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_router_splits_the_sum_over_h_into_any_number_of_parts(rng, monkeypatch, tile, parts):
    blocks, T, E = 7, 130, 17
    for rest in (0, 16):
        H = blocks * tile.block_k - rest
        columns = -(-blocks // parts) * tile.block_k
        chosen = RouterTile(tile, columns, -(-H // columns))
        monkeypatch.setattr(router_module, "router_tile", lambda *_, chosen=chosen: chosen)
        x, weight = randn(rng, T, H, dtype=FP16), randn(rng, E, H, dtype=FP16)
        logits = router_logits(x, weight)
        for part, logits_TE in enumerate(logits):
            h = slice(part * columns, (part + 1) * columns)
            close(logits_TE, x[:, h].double() @ weight[:, h].double().T, slack=4)


@pytest.mark.parametrize("size", [1, 32, 129, 5000])
def test_router_zeroes_the_counters(rng, size):
    counters = torch.full((size + 1,), GARBAGE, dtype=torch.int32)
    router_logits(randn(rng, 20, 1040), randn(rng, 40, 1040), counters=counters[:size])
    assert counters.tolist() == [0] * size + [GARBAGE]


# Choice


def choose(logits: Tensor, config: MoEConfig, bias=None, num_valid=None, model_dtype=FP32, **options):
    """logits [T, E], or [P, T, E] of partial sums."""
    T = logits.shape[-2]
    ids = torch.full((T, config.top_k), GARBAGE, dtype=torch.int32)
    weights = torch.full((T, config.top_k), NAN)
    kernels.choose(logits, bias, num_valid, ids, weights, config=config, model_dtype=model_dtype, **options)
    return ids, weights


def clear_rows(logits: Tensor, config: MoEConfig, bias: Tensor | None, margin: float = 1e-6) -> Tensor:
    """bool [T]: rows whose choice has no two candidates so close that float32 may swap them.

    A pair closer than the margin changes places when the margin's multiples are added one way or the other.
    """
    nudge = margin * torch.arange(logits.shape[1], dtype=FP64)
    bias = torch.zeros(logits.shape[1]) if bias is None else bias
    ids = [reference.route(logits.to(FP64), config, correction_bias=bias.to(FP64) + s * nudge)[0] for s in (-1, 1)]
    return (ids[0] == ids[1]).all(1)


def check_choice(logits: Tensor, config: MoEConfig, bias=None, num_valid=None, dtype=FP64, all_rows=False) -> None:
    """Against the reference in `dtype`, on the rows whose choice is clear or on all."""
    got = choose(logits, config, bias, num_valid)
    want = reference.route(logits.to(dtype), config, correction_bias=bias, num_valid_tokens=num_valid)
    if not all_rows:
        clear = clear_rows(logits, config, bias)
        assert clear.float().mean() > 0.4
        got, want = [t[clear] for t in got], [t[clear] for t in want]
    assert got[0].tolist() == want[0].tolist()
    torch.testing.assert_close(got[1].to(FP64), want[1].to(FP64), rtol=1e-6, atol=1e-6)


def spread(rng: torch.Generator, T: int, E: int, low: float, high: float) -> Tensor:
    """Logits [T, E] in random order, no two of a row closer than about (high - low) / 2E."""
    grid = torch.stack([torch.randperm(E, generator=rng) for _ in range(T)]) + torch.rand(T, E, generator=rng) / 2
    return low + (high - low) / E * grid


SCORES = ["sigmoid", "softmax", "sqrtsoftplus", "none"]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("choice_on", ["score", "logit"])
@pytest.mark.parametrize("weights_from", ["score", "topk_softmax", "topk_sigmoid"])
def test_choose_is_the_reference_for_every_score_and_source_of_weights(rng, score, choice_on, weights_from):
    logits, bias = randn(rng, 5, 44, scale=2), randn(rng, 44)
    for normalize, scale_on, b in [
        ("none", "weights", bias),
        ("sum", "output", None),
        ("sum_eps", "weights", None),
        ("sum_clamp", "weights", bias),
    ]:
        config = MoEConfig(
            top_k=6, score=score, choice_on=choice_on, weights_from=weights_from, normalize=normalize,
            routed_scaling_factor=2.5, scale_on=scale_on,
        )  # fmt: skip
        if normalize != "none" and score == "none":
            logits = logits.abs()  # a sum near 0 would make any rounding large
        check_choice(logits, config, b)


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize("group_mask", ["-inf", "zero"])
@pytest.mark.parametrize(
    ("E", "n_group", "topk_group", "top_k"), [(40, 5, 2, 7), (36, 6, 3, 8), (160, 8, 3, 6), (16, 8, 8, 16)]
)
def test_choose_is_the_reference_for_groups(rng, group_score, group_mask, E, n_group, topk_group, top_k):
    config = MoEConfig(
        top_k=top_k, n_group=n_group, topk_group=topk_group, group_score=group_score, group_mask=group_mask
    )  # fmt: skip
    check_choice(randn(rng, 6, E), config, randn(rng, E))
    check_choice(randn(rng, 6, E), config, randn(rng, E) - 4)  # every biased score negative: zeros win


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("weights_from", ["score", "topk_softmax", "topk_sigmoid"])
def test_choose_rounds_to_the_model_dtype_where_the_config_says(rng, score, weights_from):
    """Against the same steps in float32, which differ by a rounding of FP16 only where a number lies between two."""
    logits, bias, same = spread(rng, 4, 24, 0, 4), 2.0 * torch.randperm(24, generator=rng), []
    for normalize, (score_dtype, weight_dtype), (groups, b) in itertools.product(
        ["none", "sum_eps"],
        [("model", "float32"), ("float32", "model"), ("model", "model")],
        [(None, bias), (6, None)],
    ):
        config = MoEConfig(
            top_k=5, score=score, weights_from=weights_from, normalize=normalize, score_dtype=score_dtype,
            weight_dtype=weight_dtype, n_group=groups, topk_group=groups and 4, routed_scaling_factor=1.7,
        )  # fmt: skip
        ids, weights = choose(logits, config, b, model_dtype=FP16)
        want_ids, want = reference.route(logits, config, correction_bias=b, model_dtype=FP16)
        assert ids.tolist() == want_ids.tolist()
        assert torch.equal(weights, weights.half().float())
        torch.testing.assert_close(weights, want, rtol=2.0**-9, atol=0)
        same.append((weights == want).float().mean().item())
    assert min(same) > 0.8


@pytest.mark.parametrize("score", SCORES)
def test_choose_gives_ties_to_the_lowest_id(rng, score):
    logits = torch.randint(-1, 2, (12, 30), generator=rng).float()
    logits[3] = 0.0
    logits[4, ::2] = -0.0
    for groups in (None, 5):
        config = MoEConfig(top_k=9, score=score, n_group=groups, topk_group=groups and 3, normalize="none")
        check_choice(logits, config, all_rows=True)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("weights_from", "normalize"),
    [("score", "none"), ("score", "sum"), ("score", "sum_eps"), ("topk_softmax", "sum"), ("topk_sigmoid", "sum_clamp")],
)
def test_choose_survives_bad_rows(rng, score, weights_from, normalize):
    logits = spread(rng, 7, 20, 0, 5)
    clean_ids, clean_weights = choose(
        logits, MoEConfig(top_k=4, score=score, weights_from=weights_from, normalize=normalize)
    )
    for groups in (None, 5):
        config = MoEConfig(
            top_k=4,
            score=score,
            weights_from=weights_from,
            normalize=normalize,
            n_group=groups,
            topk_group=groups and 2,
        )
        bad = logits.clone()
        bad[0], bad[1], bad[2] = NAN, -INF, INF
        bad[3, 3:], bad[4, ::2], bad[5, 7] = -INF, NAN, INF
        ids, weights = choose(bad, config)
        assert weights.isfinite().all()
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 20 for row in ids.tolist())
        check_choice(bad, config, dtype=FP32, all_rows=True)  # there, too, a sum of the largest float32 overflows
        if groups is None:
            assert torch.equal(ids[6], clean_ids[6])
            assert torch.equal(weights[6], clean_weights[6])


def test_choose_counts_a_nan_bias_as_minus_infinity(rng):
    bias = randn(rng, 16)
    bias[5] = NAN
    logits = randn(rng, 3, 16)
    logits[:, 5] = 30.0
    check_choice(logits, MoEConfig(top_k=15), bias)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrtsoftplus"])
def test_choose_is_within_1e_6_of_float64_at_any_logit(score):
    """Relative to the weight itself, however small."""
    logits = torch.linspace(-60, 8, 33 * 8).view(8, 33)
    for normalize in ("none", "sum"):
        config = MoEConfig(top_k=8, score=score, normalize=normalize, routed_scaling_factor=2.5)
        ids, weights = choose(logits, config)
        want_ids, want = reference.route(logits.to(FP64), config)
        assert ids.tolist() == want_ids.tolist()
        torch.testing.assert_close(weights.to(FP64), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("E", "K"), [(1, 1), (2, 2), (5, 5), (1024, 32), (1030, 11), (300, 1)])
def test_choose_takes_any_number_of_experts(rng, E, K):
    check_choice(randn(rng, 2, E), MoEConfig(top_k=K), randn(rng, E))


@pytest.mark.parametrize("valid", [0, 2, 5, 9])
def test_choose_routes_no_padding(rng, valid):
    logits = spread(rng, 5, 12, -3, 3)
    logits[valid:] = NAN
    check_choice(logits, MoEConfig(top_k=3), num_valid=torch.tensor([valid], dtype=torch.int32), all_rows=True)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_choose_reads_logits_of_any_dtype_and_row_stride(rng, dtype):
    logits = randn(rng, 4, 18, dtype=dtype)
    ids, weights = choose(padded_rows(logits), MoEConfig(top_k=3))
    want_ids, want_weights = choose(logits.float(), MoEConfig(top_k=3))
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want_weights)


@pytest.mark.parametrize("parts", [2, 3, 4, 5, 14, 16])
def test_choose_adds_partial_sums_by_ascending_part_then_the_bias(rng, parts):
    logits, router_bias = randn(rng, parts, 5, 37), randn(rng, 37, dtype=FP16)
    total = logits[0]
    for part in logits[1:]:
        total = total + part
    total = total + router_bias.float()
    config, bias = MoEConfig(top_k=6, n_group=1, topk_group=1), randn(rng, 37)
    assert all(map(torch.equal, choose(logits, config, bias, router_bias=router_bias), choose(total, config, bias)))
    config = MoEConfig(top_k=6, score="none", normalize="none")
    ids, weights = choose(logits, config, router_bias=router_bias)
    assert torch.equal(weights, total.gather(1, ids.long()))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("parts", [1, 3])
def test_choose_rounds_the_logits_to_the_model_dtype_after_the_bias(rng, dtype, parts):
    logits, bias = randn(rng, parts, 5, 12), randn(rng, 12, dtype=dtype)
    config = MoEConfig(top_k=12, score="none", normalize="none", router_dtype="model")
    ids, weights = choose(logits, config, model_dtype=dtype, router_bias=bias, router_weight=randn(rng, 12, 2048))
    assert torch.equal(weights, weights.to(dtype).float())
    close(weights, (logits.double().sum(0) + bias.double()).gather(1, ids.long()), dtype, slack=1)


def test_choose_writes_only_what_the_expert_map_has_here(rng):
    config = MoEConfig(top_k=5, num_zero_experts=2, score="softmax", normalize="sum")
    expert_map = torch.full((9,), -1, dtype=torch.int32)
    expert_map[[1, 4, 6]] = torch.tensor([2, 0, 1], dtype=torch.int32)
    expert_map[7] = 3  # of a rank that has 4
    logits = randn(rng, 8, 11)
    want_ids, want = choose(logits, config)
    ids, weights = choose(logits, config, expert_map=expert_map, num_experts=3)
    here = torch.isin(want_ids, torch.tensor([1, 4, 6, 9, 10]))
    assert torch.equal(ids, torch.where(here, want_ids, -1))
    assert torch.equal(weights, torch.where(here, want, 0.0))


@pytest.mark.parametrize("T", [1, 7, 300])
def test_choose_zeroes_the_counters_that_a_later_order_needs_so(rng, T):
    K, E = 5, 70
    zeros = num_zeros(T * K, E, alone=True)
    counters = torch.full((kernels.num_counters(T * K, E) + 1,), GARBAGE, dtype=torch.int32)
    choose(randn(rng, T, E), MoEConfig(top_k=K), counters=counters)
    assert counters.tolist() == [0] * zeros + [GARBAGE] * (len(counters) - zeros)


# Row order


def sort_oracle(ids, weights, expert_map, valid, E, Z):
    """Plain Python."""
    T, K = ids.shape
    E_routing = E if expert_map is None else len(expert_map)
    rows, row_of = [[] for _ in range(E)], torch.full((T, K), -1)
    out_ids, out_weights = torch.full((T, K), -1), torch.zeros(T, K)
    for t, k in itertools.product(range(T), range(K)):
        id = ids[t, k].item()
        if t >= valid or not 0 <= id < E_routing + Z:
            continue
        expert = -1 if id >= E_routing else id if expert_map is None else expert_map[id].item()
        if expert < 0 and id < E_routing:
            continue
        out_ids[t, k], out_weights[t, k] = id, weights[t, k].float()
        if expert >= 0:
            rows[expert].append(t * K + k)
    order = list(itertools.chain(*rows))
    for row, slot in enumerate(order):
        row_of[slot // K, slot % K] = row
    offsets = list(itertools.accumulate((len(r) for r in rows), initial=0))
    return offsets, order, row_of, out_ids, out_weights


def empty_rows(T: int, K: int, E: int, block_m: int, tail: int = 0, arrivals: int = 300) -> kernels.Rows:
    def garbage(*shape: int) -> Tensor:
        return torch.full(shape, GARBAGE, dtype=torch.int32)

    counters = garbage(kernels.num_counters(T * K, E))
    counters[: num_zeros(T * K, E, alone=True)] = 0
    tiles = garbage(3, kernels.num_blocks(T * K, E, block_m))
    order = garbage(E + 1), garbage(T * K), garbage(T, K), tiles, block_m, tail, counters
    return kernels.Rows(*order, garbage(1), garbage(arrivals))


def order_rows(ids, weights, expert_map=None, num_valid=None, *, E, Z=0, canonical=True, block_m=16, tail=0):
    """The rows, and canonical ids and weights."""
    T, K = ids.shape
    rows = empty_rows(T, K, E, block_m, tail)
    out_ids, out_weights = torch.full((T, K), GARBAGE, dtype=torch.int32), torch.full((T, K), NAN)
    kernels.order_rows(
        ids, weights, expert_map, num_valid, num_experts=E, num_zero_experts=Z, rows=rows,
        ids_out_TK=out_ids if canonical else None, weights_out_TK=out_weights if canonical else None,
    )  # fmt: skip
    return rows, out_ids, out_weights


def check_rows(rows: kernels.Rows, want) -> None:
    offsets, order, row_of = want[:3]
    N, B = len(rows.sorted_slot_N), rows.block_m
    assert rows.offsets.tolist() == offsets
    assert rows.taken.tolist() == [0]
    assert not rows.arrivals.any()
    assert rows.sorted_slot_N[: offsets[-1]].tolist() == order
    assert torch.equal(rows.row_of_TK.long(), row_of)
    assert (rows.sorted_slot_N[offsets[-1] :] == GARBAGE).all()
    tiles = []
    for expert, (first, end) in enumerate(itertools.pairwise([*offsets, N])):
        name = expert if expert < len(offsets) - 1 else -1
        tail = rows.tail if name >= 0 else 0
        starts = [row for row in range(first, end, B) if row == first or row + tail < end]
        tiles += [(name, *ends) for ends in itertools.pairwise([*starts, end])]
    assert len(tiles) <= rows.blocks_3B.shape[1]
    tiles += [(-1, N, N)] * (rows.blocks_3B.shape[1] - len(tiles))
    assert list(map(tuple, rows.blocks_3B.t().tolist())) == tiles


def check_order(ids, weights, expert_map=None, valid=None, *, E, Z=0, block_m=16, tail=0) -> None:
    num_valid = None if valid is None else torch.tensor([valid], dtype=torch.int32)
    rows, out_ids, out_weights = order_rows(ids, weights, expert_map, num_valid, E=E, Z=Z, block_m=block_m, tail=tail)
    want = sort_oracle(ids, weights, expert_map, len(ids) if valid is None else valid, E, Z)
    check_rows(rows, want)
    assert torch.equal(out_ids.long(), want[3])
    assert torch.equal(out_weights, want[4])


def use_order(monkeypatch, block: OrderBlock, chunk: int) -> None:
    block = block._replace(whole=False)  # several chunks here
    monkeypatch.setattr(route_module, "order_block", lambda num_slots: block)
    for module in (route_module, order_module):
        monkeypatch.setattr(module, "chunk_size", lambda num_slots, alone: chunk)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", order_variants())
@pytest.mark.parametrize("chunk", [16, 128, 1024])  # more chunks than make a sum, several, or one of several blocks
@pytest.mark.parametrize(("T", "K"), [(1, 1), (1, 5), (3, 4), (90, 6)])
def test_rows_are_ordered_by_expert_then_slot(rng, monkeypatch, ids_dtype, block, chunk, T, K):
    use_order(monkeypatch, block, chunk)
    E = 7
    ids = torch.randint(-2, E + 3, (T, K), generator=rng, dtype=ids_dtype)
    check_order(ids, randn(rng, T, K), E=E)
    check_order(ids, randn(rng, T, K, dtype=BF16), E=E, Z=2, block_m=8)
    check_order(ids, randn(rng, T, K), E=E, Z=1, valid=T // 2, block_m=32)
    check_order(torch.full_like(ids, 3), randn(rng, T, K), E=E, block_m=64)
    check_order(ids, randn(rng, T, K), E=E, block_m=16, tail=8)
    check_order(torch.full_like(ids, -1), randn(rng, T, K), E=E, block_m=128)


@pytest.mark.parametrize(("T", "E", "K"), [(1, 256, 8), (16, 64, 8), (33, 256, 8), (700, 1, 1), (60, 1024, 32)])
@pytest.mark.parametrize(("block_m", "tail"), [(8, 0), (8, 7), (64, 32), (256, 0)])
def test_rows_are_ordered_for_any_number_of_tokens_and_experts(rng, T, E, K, block_m, tail):
    """With the blocks and chunks that the sizes choose."""
    ids = torch.rand(T, max(E, K), generator=rng).argsort(1)[:, :K]
    check_order(ids, randn(rng, T, K), E=E, block_m=block_m, tail=tail)
    crowded = torch.where(ids % 3 > 0, ids, E // 2)
    crowded[T // 2 :: 5] = -1
    check_order(crowded, randn(rng, T, K), E=E, valid=T - T // 7, block_m=block_m, tail=tail)


def test_tiles_are_as_many_as_there_can_be_and_no_more(rng):
    """Every expert and the rest with one row in its last block."""
    ids = torch.tensor([0] * 17 + [1, 2, 3, 4, -1], dtype=torch.int32).view(11, 2)
    rows, _, _ = order_rows(ids, randn(rng, 11, 2), E=5)
    assert (rows.blocks_3B[1] < rows.blocks_3B[2]).all()
    check_order(ids, randn(rng, 11, 2), E=5)


def test_the_order_follows_the_expert_map(rng, monkeypatch):
    E_routing, E = 11, 4
    expert_map = torch.full((E_routing,), -1, dtype=torch.int32)
    expert_map[torch.randperm(E_routing, generator=rng)[:E]] = torch.arange(E, dtype=torch.int32)
    for chunk in (256, 16):
        use_order(monkeypatch, OrderBlock(16, 1), chunk)
        ids = torch.randint(-1, E_routing + 4, (9, 5), generator=rng, dtype=torch.int32)
        check_order(ids, randn(rng, 9, 5), expert_map, E=E, Z=2)
        check_order(ids, randn(rng, 9, 5), expert_map, E=E, Z=2, valid=4)


def test_the_order_compares_ids_before_it_narrows_them(rng):
    ids = torch.tensor([[2**32 + 1, 1, -(2**33)], [2, 2**40, 2**63 - 1]])
    check_order(ids, randn(rng, 2, 3), E=3, Z=1)


def test_the_order_reads_ids_and_weights_of_any_stride(rng):
    ids = torch.randint(0, 5, (4, 13), generator=rng)
    weights = randn(rng, 4, 26)
    check_order(ids.t(), weights[:, ::2].t(), E=5)
    check_order(ids[:1].expand(6, 13), weights[:1, :13].expand(6, 13), E=5)


def test_the_order_leaves_canonical_ids_where_they_are(rng):
    ids = torch.randint(-1, 5, (6, 3), generator=rng, dtype=torch.int32)
    rows, out_ids, out_weights = order_rows(ids, randn(rng, 6, 3), E=5, canonical=False)
    check_rows(rows, sort_oracle(ids, torch.zeros(6, 3), None, 6, 5, 0))
    assert (out_ids == GARBAGE).all()
    assert out_weights.isnan().all()


@pytest.mark.parametrize("T", [1, 300])
def test_zero_counters_zeroes_what_an_order_needs_so(T):
    rows, zeros = empty_rows(T, 5, 70, 16), num_zeros(T * 5, 70, alone=True)
    rows.counters.fill_(GARBAGE)
    kernels.zero_counters(rows)
    assert rows.counters.tolist() == [0] * zeros + [GARBAGE] * (len(rows.counters) - zeros)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("T", "chunk"),
    [(1, None), (2, 16), (3, None), (40, None), (40, 16), (90, None), (90, 64), (350, 16)],  # 350: tickets
)
def test_one_launch_of_choice_and_order_is_the_two_in_a_row(rng, monkeypatch, T, tokens, chunk):
    if chunk:
        use_order(monkeypatch, OrderBlock(16, 1), chunk)
    monkeypatch.setattr(route_module, "choice_tokens", lambda T, most: min(tokens, most))
    E_routing, K, Z, P = 24, 3, 2, 3
    config = MoEConfig(top_k=K, num_zero_experts=Z, score="softmax", normalize="none")
    expert_map = torch.full((E_routing,), -1, dtype=torch.int32)
    expert_map[torch.randperm(E_routing, generator=rng)[:10]] = torch.arange(10, dtype=torch.int32)
    logits, bias = randn(rng, P, T, E_routing + Z), randn(rng, E_routing + Z)
    valid = torch.tensor([T - T // 3], dtype=torch.int32)
    for mapping, E in [(None, E_routing), (expert_map, 10)]:
        want = choose(logits, config, bias, valid, expert_map=mapping, num_experts=E)
        want_rows, *_ = order_rows(*want, mapping, E=E, Z=Z, canonical=False)
        rows = empty_rows(T, K, E, 16)
        rows.counters.zero_()
        got = choose(logits, config, bias, valid, expert_map=mapping, num_experts=E, rows=rows)
        assert all(map(torch.equal, got, want))
        assert all(map(torch.equal, rows[:4], want_rows[:4]))
        check_rows(rows, sort_oracle(*got, mapping, T, E, Z))


# Products of the experts


def order_of(ids: Tensor, E: int, tile: Tile) -> kernels.Rows:
    rows, _, _ = order_rows(ids, torch.ones(ids.shape), E=E, block_m=tile.block_m, tail=tile.tail)
    return rows


def tile_of(dtype: torch.dtype, T: int, H: int, E: int, K: int, S: int, part: str) -> Tile:
    """The one that a layer of these sizes takes; `part` is a field of LayerTiles."""
    return getattr(layer_tiles(gemm_kind(dtype, False), T, H, E, K, S), part)


def every_tile(gemm: str) -> list[tuple[torch.dtype, Tile]]:
    """All that can be chosen for gemm1 or gemm2, routed or shared, and with the copy engine where dtypes allow it."""
    found: dict[tuple[torch.dtype, Tile], None] = {}
    for kind in ("16bit", "fp32", "tf32"):
        for v in layer_variants(kind):
            for tile in (getattr(v, gemm), getattr(v, f"shared_{gemm}"), *([TALL[gemm]] if kind == "16bit" else [])):
                for tma in (True, False) if kind == "16bit" else (False,):
                    found[FP16 if kind == "16bit" else FP32, tile._replace(tma=tma)] = None
    return list(found)


def tile_id(value: object) -> str | None:
    if not isinstance(value, Tile):
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
    words = [word for word in ("swap", "tma", "persistent") if getattr(value, word)]
    return "-".join(
        [
            "x".join(map(str, value[:3])),
            *words,
            *(f"{name}{getattr(value, name)}" for name in ("least_m", "tail") if getattr(value, name)),
        ]
    )


SMALL = Tile(16, 32, 128, 4, 4, swap=True)
LARGE = Tile(64, 128, 64, 4, 4, tma=True, least_m=16)
TALL = {
    "gemm1": Tile(128, 128, 64, 8, 4, tma=True, least_m=16, tail=64),
    "gemm2": Tile(128, 256, 64, 8, 3, tma=True, least_m=16, tail=64),
}
"""What `tune` may choose beside."""


@pytest.fixture
def descriptors(monkeypatch) -> list[int]:
    """How many weights each launch of a product fetches by the copy engine."""
    found: list[int] = []
    launch = gemm_module.launch

    def counted(kernel, grid, args, meta, **options):
        found.append(sum(isinstance(arg, TensorDescriptor) for arg in args))
        launch(kernel, grid, args, meta, **options)

    monkeypatch.setattr(gemm_module, "launch", counted)
    return found


def experts_of(offsets: Tensor) -> list[slice]:
    return [slice(*ends) for ends in itertools.pairwise(offsets.tolist())]


def gemm1_oracle(x, w13, bias, config, rows: kernels.Rows, weights=None):
    """float64 [rows, I]."""
    slots = rows.sorted_slot_N[: rows.offsets[-1]].long()
    x_rows = x[slots // config.top_k]
    if weights is not None:
        x_rows = (x_rows.float() * weights.flatten()[slots, None]).to(x.dtype)
    h = torch.zeros(len(slots), w13.shape[1], dtype=FP64)
    for expert, its in enumerate(experts_of(rows.offsets)):
        h[its] = x_rows[its].to(FP64) @ w13[expert].to(FP64).T + (0 if bias is None else bias[expert].to(FP64))
    return reference.activation(h, config, clamp=config.clamp_routed, order=config.w13_order)


def some_ids(rng, T: int, K: int, E: int) -> Tensor:
    """Some experts empty, one crowded, some slots without one."""
    ids = torch.randint(-1, E, (T, K), generator=rng, dtype=torch.int32)
    ids[ids == 1] = 2
    ids[T // 2 :, 0] = 3
    return ids


HEIGHTS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 192, 193)


def ids_of_heights(rng: torch.Generator, without: int = 7) -> Tensor:
    """[T, 1]: expert 2n+1 has HEIGHTS[n] rows and the others none, in random order, beside `without` slots of none."""
    ids = torch.cat([torch.full((rows,), 2 * n + 1) for n, rows in enumerate(HEIGHTS)] + [torch.full((without,), -1)])
    return ids[torch.randperm(len(ids), generator=rng)].to(torch.int32)[:, None]


def check_gemm1(
    rng, config, *, tile=None, dtype=FP32, T=9, H=48, I=80, E=5, bias=None, form=lambda w: w, ids=None, slack=2.0
):
    """bias: its dtype, or None."""
    K, width = config.top_k, 2 if config.gated else 1
    ids = some_ids(rng, T, K, E) if ids is None else ids
    T = len(ids)
    tile = tile or tile_of(dtype, T, H, E, K, 0, "gemm1")
    x, w13 = randn(rng, T, H, dtype=dtype), randn(rng, E, width * I, H, dtype=dtype, scale=0.3)
    w13_bias = randn(rng, E, width * I, dtype=bias) if bias else None
    weights = randn(rng, T, K) if config.apply_router_weight_on_input else None
    rows = order_of(ids, E, tile)
    h = torch.full((T * K, I), GARBAGE, dtype=dtype)
    kernels.gemm1(
        padded_rows(x), config=config, tile=tile, w13=form(w13), w13_bias=w13_bias, blocks=rows.blocks_3B,
        sorted_slot_N=rows.sorted_slot_N, topk_weights_TK=weights, h_NI=h,
    )  # fmt: skip
    end = int(rows.offsets[-1])
    close(h[:end], gemm1_oracle(x, w13, w13_bias, config, rows, weights), slack=slack)
    assert (h[end:] == torch.tensor(GARBAGE, dtype=dtype)).all()


# H and I below, at, and beyond multiples of every tile's sizes.
SIZES = [(1, 16, 48), (37, 144, 80), (3, 128, 256)]


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm1"), ids=tile_id)
def test_gemm1_is_right_in_every_tile(rng, dtype, tile):
    for T, H, I in SIZES:
        check_gemm1(rng, MoEConfig(top_k=3), tile=tile, dtype=dtype, T=T, H=H, I=I)


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm1"), ids=tile_id)
def test_gemm1_is_right_at_every_height_of_an_experts_rows(rng, dtype, tile):
    check_gemm1(
        rng, MoEConfig(top_k=1), tile=tile, dtype=dtype, H=32, I=48, E=2 * len(HEIGHTS), ids=ids_of_heights(rng)
    )


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_gemm1_is_right_for_every_order_at_every_size(rng, descriptors, tile, order, activation):
    config = MoEConfig(top_k=3, w13_order=order, activation=activation)
    for T, H, I in SIZES:
        for bias in (FP16, FP32):
            check_gemm1(rng, config, tile=tile, dtype=FP16, T=T, H=H, I=I, bias=bias)
    assert set(descriptors) == {int(tile.tma)}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize(("clamp", "after"), [(None, False), (0.7, False), (0.7, True)])
def test_gemm1_is_the_reference_for_every_activation_order_and_clamp(rng, activation, order, clamp, after):
    config = MoEConfig(
        top_k=2, activation=activation, w13_order=order, clamp_routed=clamp, clamp_after_activation=after
    )  # fmt: skip
    for tile in (SMALL, LARGE):
        check_gemm1(rng, config, tile=tile, bias=FP32, slack=4)
        check_gemm1(rng, config, tile=tile, form=transposed, slack=4)


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
def test_gemm1_puts_the_router_weight_on_the_rounded_input(rng, tile):
    config = MoEConfig(top_k=2, apply_router_weight_on_input=True)
    check_gemm1(rng, config, tile=tile, dtype=FP16)
    check_gemm1(rng, config, tile=tile, dtype=FP16, T=70, H=128, I=32)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gemm1_rounds_once(rng, dtype):
    check_gemm1(rng, MoEConfig(top_k=2), dtype=dtype, slack=1.01)


def off(w: Tensor) -> Tensor:
    """The same contiguous values, at an address that is no multiple of 16 bytes."""
    return torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape)


def longer_rows(by: int):
    """The same values in rows longer by that many."""
    return lambda w: torch.nn.functional.pad(w, (0, by), value=float(GARBAGE))[..., : w.shape[-1]]


def more_rows(w: Tensor) -> Tensor:
    """The same values, experts farther apart than their rows."""
    return torch.nn.functional.pad(w, (0, 0, 0, 3), value=float(GARBAGE))[:, : w.shape[1]]


@pytest.mark.parametrize(
    ("form", "copied"),
    [
        (lambda w: w, (1, 1)),
        (longer_rows(8), (1, 1)),
        (longer_rows(3), (0, 0)),
        (off, (0, 0)),
        (transposed, (0, 0)),
        (more_rows, (0, 1)),  # gate rows and up rows are no planes of one array
    ],
    ids=["contiguous", "longer_rows", "odd_rows", "misaligned", "transposed", "more_rows"],
)
def test_weights_come_by_the_copy_engine_where_it_can_fetch_them_and_else_by_pointers(rng, descriptors, form, copied):
    """(of gate rows before up rows, of others)"""
    for order in ("gate_up", "up_gate", "interleaved"):
        config = MoEConfig(top_k=2, w13_order=order)
        check_gemm1(rng, config, tile=LARGE, dtype=FP16, T=40, H=80, I=48, form=form)
        assert descriptors.pop() == copied[order == "interleaved"]
    check_gemm1(rng, MoEConfig(top_k=2, activation="relu2"), tile=LARGE, dtype=FP16, form=form)
    assert descriptors.pop() == copied[1]
    check_gemm2(rng, tile=LARGE, dtype=FP16, T=40, H=80, I=48, form=form)
    assert descriptors.pop() == copied[1]
    if form is not more_rows:
        check_shared(rng, LARGE, LARGE, dtype=FP16, T=40, H=80, S=48, form=form)
        assert descriptors == [copied[0], copied[1]]


def test_experts_that_are_one_and_the_same_come_by_pointers(rng, descriptors):
    x, w13 = randn(rng, 5, 32, dtype=FP16), randn(rng, 1, 2 * 48, 32, dtype=FP16).expand(4, -1, -1)
    rows, h = order_of(some_ids(rng, 5, 2, 4), 4, LARGE), torch.full((10, 48), NAN, dtype=FP16)
    config = MoEConfig(top_k=2)
    kernels.gemm1(
        x, config=config, tile=LARGE, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N, h_NI=h
    )
    close(h[: rows.offsets[-1]], gemm1_oracle(x, w13, None, config, rows))
    assert descriptors == [0]


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=tile_id)
def test_gemm_reaches_beyond_2_to_the_31_elements(rng, tile):
    """A weight of 3 experts that lie 1.5e9 elements apart; only the pages that are used take memory."""
    H, I, T, apart = 16, 32, 4, 3 * 2**29
    storage = torch.empty(2 * apart + 2 * I * H, dtype=FP16)
    w13 = storage.as_strided((3, 2 * I, H), (apart, H, 1))
    w13.copy_(randn(rng, 3, 2 * I, H, dtype=FP16))
    x = randn(rng, T, H, dtype=FP16)
    rows = order_of(torch.tensor([[2], [0], [2], [1]], dtype=torch.int32), 3, tile)
    for order in ("gate_up", "interleaved"):  # the latter by the copy engine
        h, config = torch.zeros(T, I, dtype=FP16), MoEConfig(top_k=1, w13_order=order)
        kernels.gemm1(
            x, config=config, tile=tile, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N, h_NI=h
        )
        close(h, gemm1_oracle(x, w13, None, config, rows))


def gemm2_oracle(h, w2, bias, offsets):
    """float64 [rows, H]."""
    y = torch.zeros(int(offsets[-1]), w2.shape[1], dtype=FP64)
    for expert, its in enumerate(experts_of(offsets)):
        y[its] = h[its].to(FP64) @ w2[expert].to(FP64).T + (0 if bias is None else bias[expert].to(FP64))
    return y


def check_gemm2(
    rng, *, tile=None, dtype=FP32, T=9, K=2, H=48, I=80, E=5, bias=None, form=lambda w: w, zero_tail=False, ids=None
):
    """bias: its dtype, or None."""
    ids = some_ids(rng, T, K, E) if ids is None else ids
    T, K = ids.shape
    tile = tile or tile_of(dtype, T, H, E, K, 0, "gemm2")
    h, w2 = randn(rng, T * K, I, dtype=dtype), randn(rng, E, H, I, dtype=dtype, scale=0.3)
    w2_bias = randn(rng, E, H, dtype=bias) if bias else None
    rows = order_of(ids, E, tile)
    end = int(rows.offsets[-1])
    h[end:] = NAN
    y = torch.full((T * K, H), GARBAGE, dtype=dtype)
    kernels.gemm2(
        config=MoEConfig(top_k=K), tile=tile, w2=form(w2), w2_bias=w2_bias, blocks=rows.blocks_3B,
        offsets=rows.offsets, taken=rows.taken, h_NI=h, y_NH=y, zero_tail=zero_tail,
    )  # fmt: skip
    close(y[:end], gemm2_oracle(h, w2, w2_bias, rows.offsets))
    assert (y[end:] == torch.tensor(0 if zero_tail else GARBAGE, dtype=dtype)).all()


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm2"), ids=tile_id)
def test_gemm2_is_right_in_every_tile(rng, dtype, tile):
    for T, H, I in SIZES:
        check_gemm2(rng, tile=tile, dtype=dtype, T=T, H=H, I=I, bias=dtype)
        check_gemm2(rng, tile=tile, dtype=dtype, T=T, H=H, I=I, bias=FP32, form=transposed, zero_tail=True)


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm2"), ids=tile_id)
def test_gemm2_is_right_at_every_height_of_an_experts_rows(rng, dtype, tile):
    ids = ids_of_heights(rng, without=150)
    check_gemm2(rng, tile=tile, dtype=dtype, H=48, I=32, E=2 * len(HEIGHTS), ids=ids, zero_tail=True)


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=tile_id)
def test_gemm2_zeroes_the_whole_tail(rng, tile):
    T, K, E = 91, 2, 5
    few = torch.full((T, K), -1, dtype=torch.int32)
    few[17, 1] = 4
    many = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
    for ids in (few, torch.full_like(few, -1), many, many.masked_fill(many == 0, -1)):
        check_gemm2(rng, tile=tile, E=E, zero_tail=True, ids=ids)
    # Every expert and the tail with one row in its last block: as many blocks as there can be.
    ids = torch.tensor([0] * (tile.block_m + 1) + [1, 2, 3, 4, -1], dtype=torch.int32).view(-1, 2)
    check_gemm2(rng, tile=tile, E=5, zero_tail=True, ids=ids)


@pytest.mark.parametrize("H", [48, 1040, 2048])
def test_the_launch_beside_a_persistent_gemm2_zeroes_the_whole_tail(rng, H):
    N = 50
    for end in (0, 1, 16, 17, 49, 50):
        y = randn(rng, N, H, dtype=FP16)
        want = y.clone()
        want[end:] = 0
        offsets = torch.tensor([0, end // 2, end], dtype=torch.int32)
        gemm_module._zero_rows_after(offsets, y, warmup=False)
        assert torch.equal(y, want)


def shared_oracle(x, shared_w13, config):
    h = x.to(FP64) @ shared_w13.to(FP64).T
    return reference.activation(h, config, clamp=config.clamp_shared)


def check_shared(rng, tile1, tile2, *, dtype, T, H, S, form=lambda w: w, config=None, valid=None) -> None:
    """Both products, with a gate, and valid rows before padding."""
    config = config or MoEConfig(top_k=2, w13_order="up_gate", clamp_shared=0.9, clamp_routed=0.1)
    x, width = randn(rng, T, H, dtype=dtype), 2 if config.gated else 1
    w13, w2 = randn(rng, width * S, H, dtype=dtype, scale=0.3), randn(rng, H, S, dtype=dtype, scale=0.3)
    gate, end = torch.rand(T, generator=rng), T if valid is None else valid
    num_valid = None if valid is None else torch.tensor([valid], dtype=torch.int32)
    h, shared = torch.full((T, S), NAN, dtype=dtype), torch.full((T, H), NAN, dtype=dtype)
    x[end:] = NAN
    kernels.gemm1(
        padded_rows(x), config=config, tile=tile1, shared_w13=form(w13), h_shared_TS=h, num_valid_tokens=num_valid
    )
    close(h[:end], shared_oracle(x, w13, config)[:end])
    kernels.gemm2(
        config=config, tile=tile2, shared_w2=form(w2), h_shared_TS=h, gate_T=gate, shared_TH=shared,
        num_valid_tokens=num_valid,
    )  # fmt: skip
    close(shared[:end], (gate.to(FP64)[:, None] * (h.to(FP64) @ w2.to(FP64).T))[:end])
    assert (h[end:] == 0).all()
    assert (shared[end:] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("form", [lambda w: w, transposed])
def test_shared_expert_is_the_reference(rng, dtype, T, form):
    H, S = 48, 80
    tiles = layer_tiles(gemm_kind(dtype, False), T, H, 5, 2, S)
    for valid in (None, max(1, T - 2)):
        check_shared(rng, tiles.shared_gemm1, tiles.shared_gemm2, dtype=dtype, T=T, H=H, S=S, form=form, valid=valid)


def pairs_of_tiles() -> list[tuple[torch.dtype, Tile, Tile]]:
    """Each of `every_tile` at least once."""
    return [
        (dtype, *pair)
        for dtype in (FP16, FP32)
        for pair in zip_cycled(*([t for d, t in every_tile(gemm) if d == dtype] for gemm in ("gemm1", "gemm2")))
    ]


def zip_cycled(a: list[Tile], b: list[Tile]) -> list[tuple[Tile, Tile]]:
    return [(a[n % len(a)], b[n % len(b)]) for n in range(max(len(a), len(b)))]


@pytest.mark.parametrize(("dtype", "tile1", "tile2"), pairs_of_tiles(), ids=tile_id)
def test_shared_expert_is_right_in_every_tile(rng, dtype, tile1, tile2):
    for T, H, S in SIZES:
        check_shared(rng, tile1, tile2, dtype=dtype, T=T, H=H, S=S)
    for T in (16, 33, 65, 129, 200):
        valid = T - T // 3
        check_shared(rng, tile1, tile2, dtype=dtype, T=T, H=32, S=48, valid=valid, config=MoEConfig(top_k=1))
    check_shared(rng, tile1, tile2, dtype=dtype, T=33, H=32, S=48, config=MoEConfig(top_k=1, activation="relu2"))


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
def test_shared_expert_is_zero_on_padding_whatever_lies_there(rng, tile):
    x, w13 = randn(rng, 4, 16), randn(rng, 2 * 32, 16)
    x[2:], w13[3] = NAN, INF
    h = torch.full((4, 32), NAN)
    valid = torch.tensor([2], dtype=torch.int32)
    kernels.gemm1(x, config=MoEConfig(top_k=1), tile=tile, shared_w13=w13, h_shared_TS=h, num_valid_tokens=valid)
    assert (h[2:] == 0).all()
    gate = torch.full((4,), NAN)
    shared = torch.full((4, 16), NAN)
    kernels.gemm2(
        config=MoEConfig(top_k=1), tile=tile, shared_w2=randn(rng, 16, 32), h_shared_TS=h, gate_T=gate,
        shared_TH=shared, num_valid_tokens=valid,
    )  # fmt: skip
    assert (shared[2:] == 0).all()


@pytest.mark.parametrize(("dtype", "tile1", "tile2"), pairs_of_tiles(), ids=tile_id)
@pytest.mark.parametrize("order", ["up_gate", "interleaved"])
def test_one_launch_for_routed_and_shared_equals_two(rng, dtype, tile1, tile2, order):
    """And so is right, as the two are."""
    H, I, S, E, K = 80, 48, 96, 5, 2
    config = MoEConfig(top_k=K, clamp_routed=0.5, w13_order=order)
    w13, w2 = randn(rng, E, 2 * I, H, dtype=dtype), randn(rng, E, H, I, dtype=dtype)
    shared_w13, shared_w2 = randn(rng, 2 * S, H, dtype=dtype), randn(rng, H, S, dtype=dtype)
    for T in (1, 75):
        x, gate, ids = randn(rng, T, H, dtype=dtype), torch.rand(T, generator=rng), some_ids(rng, T, K, E)
        rows, rows2 = (order_of(ids, E, tile) for tile in (tile1, tile2))
        results = []
        for fused in (True, False):
            h, h_shared, y, shared = (torch.full(s, NAN, dtype=dtype) for s in ((T * K, I), (T, S), (T * K, H), (T, H)))
            routed = {"w13": w13, "blocks": rows.blocks_3B, "sorted_slot_N": rows.sorted_slot_N, "h_NI": h}
            dense = {"shared_w13": shared_w13, "h_shared_TS": h_shared}
            for part in [routed | dense] if fused else [routed, dense]:
                kernels.gemm1(x, config=config, tile=tile1, **part)
            routed = {"w2": w2, "blocks": rows2.blocks_3B, "h_NI": h, "y_NH": y, "zero_tail": True}
            dense = {"shared_w2": shared_w2, "h_shared_TS": h_shared, "gate_T": gate, "shared_TH": shared}
            for part in [routed | dense] if fused else [routed, dense]:
                kernels.gemm2(config=config, tile=tile2, **part)
            results.append((h[: rows.offsets[-1]], h_shared, y, shared))
        for a, b in zip(*results, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


@pytest.mark.parametrize(("x_dtype", "gate_dtype"), [(BF16, BF16), (FP16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("H", [16, 1040])
def test_gate_is_the_sigmoid_of_the_float32_product(rng, x_dtype, gate_dtype, H):
    x, weight = randn(rng, 5, H, dtype=x_dtype), randn(rng, 1, H, dtype=gate_dtype, scale=0.2)
    gate = torch.full((5,), NAN)
    kernels.shared_gate(padded_rows(x), weight, gate)
    torch.testing.assert_close(gate.double(), torch.sigmoid(x.double() @ weight[0].double()), rtol=1e-5, atol=1e-6)


# The end


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_on": "output", "routed_scaling_factor": 2.5},
        {"combine": "average"},
        {
            "apply_router_weight_on_input": True,
            "scale_on": "output",
            "routed_scaling_factor": 0.5,
            "combine": "average",
        },
    ],
)
def test_finalize_sums_a_tokens_rows_and_rounds_once(rng, dtype, with_shared, options):
    T, H, K, E = 7, 1040, 3, 4
    config = MoEConfig(top_k=K, **options)
    rows = order_of(some_ids(rng, T, K, E), E, SMALL)
    row_of = rows.row_of_TK
    y, weights, shared = randn(rng, T * K, H, dtype=dtype), randn(rng, T, K), randn(rng, T, H, dtype=dtype)
    y[rows.offsets[-1] :] = NAN
    weights[row_of < 0] = NAN  # nothing of a slot without a row is used
    want = torch.zeros(T, H, dtype=FP64)
    for t, k in itertools.product(range(T), range(K)):
        if row_of[t, k] >= 0:
            w = 1.0 if config.apply_router_weight_on_input else weights[t, k].double()
            want[t] += w * y[row_of[t, k]].double()
    want = want * config.scale_at_end + (shared.double() if with_shared else 0)
    want = want * (0.5 if config.combine == "average" else 1.0)
    out = torch.full((T, H), NAN, dtype=dtype)
    ids = torch.zeros(T, K, dtype=torch.int32)
    kernels.finalize(y, ids, weights, row_of, shared if with_shared else None, None, out, config=config)
    close(out, want, slack=1.01)


def test_finalize_adds_zero_experts_and_nothing_for_ids_without_one(rng):
    config = MoEConfig(top_k=3, num_zero_experts=2, scale_on="output", routed_scaling_factor=3.0)
    x, weights = randn(rng, 2, 48), randn(rng, 2, 3)
    ids = torch.tensor([[5, -1, 6], [-1, 0, -1]], dtype=torch.int32)
    row_of = torch.tensor([[-1, -1, -1], [-1, 0, -1]], dtype=torch.int32)
    y = torch.full((6, 48), NAN)
    y[0] = randn(rng, 48)
    out = torch.full((2, 48), NAN)
    kernels.finalize(y, ids, weights, row_of, None, padded_rows(x), out, config=config)
    close(out[0], 3 * (weights[0, 0] + weights[0, 2]).double() * x[0].double())
    close(out[1], 3 * weights[1, 1].double() * y[0].double())


# Few tokens' experts in one launch


def pairs_of_one_launch() -> list[tuple[Tile, Tile]]:
    """The heuristic's, and two that a table may have."""
    pairs = [v[:2] for v in layer_variants("16bit") if v.one_launch]
    pairs += [
        (Tile(8, 16, 64, 4, 2, swap=True), Tile(8, 32, 16, 4, 3)),
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
            outs.append((h[: rows.offsets[-1]], y[: None if not ends else rows.offsets[-1]], shared, out))
        for apart, got, there in zip(*outs, (True, True, fused, ends), strict=True):
            assert apart.isfinite().all() or not there
            assert torch.equal(got, apart) or not there


# All together


@pytest.mark.parametrize("T", [1, 2, 19])
@pytest.mark.parametrize(
    "options",
    [
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"score": "softmax", "normalize": "none", "num_zero_experts": 2, "combine": "average", "scale_on": "output"},
        {"weights_from": "topk_sigmoid", "apply_router_weight_on_input": True, "normalize": "none"},
        {"activation": "relu2", "score": "sqrtsoftplus"},
    ],
)
def test_the_kernels_in_a_row_are_the_layer(rng, T, options):
    H, I, S, E, K = 48, 32, 80, 12, 3
    config = MoEConfig(top_k=K, **options)
    Z, width = config.num_zero_experts, 2 if config.gated else 1
    x, router_weight, bias = randn(rng, T, H), randn(rng, E + Z, H, scale=0.3), randn(rng, E + Z)
    w13, w2 = randn(rng, E, width * I, H, scale=0.2), randn(rng, E, H, I, scale=0.2)
    shared_w13, shared_w2 = randn(rng, width * S, H, scale=0.2), randn(rng, H, S, scale=0.2)
    gate_weight, valid = randn(rng, 1, H), torch.tensor([max(1, T - 1)], dtype=torch.int32)

    tiles = layer_tiles("fp32", T, H, E, K, S)
    rows = empty_rows(T, K, E, tiles.gemm1.block_m)
    logits = router_logits(x, router_weight, counters=rows.counters)
    ids, weights = choose(logits, config, bias, valid, rows=rows)
    h, y, h_shared, shared, out = (torch.full(s, NAN) for s in ((T * K, I), (T * K, H), (T, S), (T, H), (T, H)))
    gate = torch.empty(T)
    kernels.shared_gate(x, gate_weight, gate)
    kernels.gemm1(
        x, config=config, tile=tiles.gemm1, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N,
        topk_weights_TK=weights, h_NI=h, shared_w13=shared_w13, h_shared_TS=h_shared, num_valid_tokens=valid,
    )  # fmt: skip
    kernels.gemm2(
        config=config, tile=tiles.gemm2, w2=w2, blocks=rows.blocks_3B, h_NI=h, y_NH=y, shared_w2=shared_w2,
        h_shared_TS=h_shared, gate_T=gate, shared_TH=shared, num_valid_tokens=valid,
    )  # fmt: skip
    kernels.finalize(y, ids, weights, rows.row_of_TK, shared, x, out, config=config)
    want = reference.moe(
        x, config=config, w13=w13, w2=w2, router_weight=router_weight, correction_bias=bias, shared_w13=shared_w13,
        shared_w2=shared_w2, shared_gate=gate_weight, num_valid_tokens=valid,
    )  # fmt: skip
    logits = reference.compute_logits(x, router_weight, None, config)
    clear = clear_rows(logits, config, bias, margin=1e-5) | (torch.arange(T) >= valid)
    close(out[clear], want[clear], slack=8)


def test_zero_tokens_launch_nothing(monkeypatch):
    """Every launch goes through one function, which is not called."""

    def refuse(*args, **kwargs):
        raise AssertionError("launched")

    for name in ("router", "route", "gemm", "experts", "gate", "finalize"):
        monkeypatch.setattr(sys.modules[f"dsmoe_op.kernels.{name}"], "launch", refuse)
    config, E, K, H = MoEConfig(top_k=2), 4, 2, 16
    x, ids, weights = torch.empty(0, H), torch.empty(0, K, dtype=torch.int32), torch.empty(0, K)
    rows = empty_rows(0, K, E, 16)
    kernels.router_logits(x, torch.empty(E, H), torch.empty(1, 0, E))
    kernels.choose(torch.empty(1, 0, E), None, None, ids, weights, config=config, model_dtype=FP32, rows=rows)
    kernels.order_rows(ids, weights, None, None, num_experts=E, num_zero_experts=0, rows=rows)
    for v in layer_variants("16bit"):
        kernels.gemm1(
            x, config=config, tile=v.gemm1, w13=torch.empty(E, 32, H), blocks=rows.blocks_3B,
            sorted_slot_N=rows.sorted_slot_N, h_NI=x, shared_w13=x, h_shared_TS=x,
        )  # fmt: skip
        routed = {"w2": torch.empty(E, H, H), "blocks": rows.blocks_3B, "h_NI": x, "y_NH": x, "zero_tail": True}
        routed |= {"offsets": rows.offsets, "taken": rows.taken}
        shared = {"shared_w2": x, "h_shared_TS": x, "shared_TH": x}
        for part in (routed, shared, routed | shared):
            kernels.gemm2(config=config, tile=v.gemm2, **part)
    kernels.experts(
        x, config=config, tiles=layer_variants("16bit")[0][:2], rows=rows, w13=torch.empty(E, 32, H),
        w2=torch.empty(E, H, H), h_NI=x, y_NH=x, topk_ids_TK=ids, topk_weights_TK=weights, out_TH=x,
    )  # fmt: skip
    kernels.shared_gate(x, torch.empty(1, H), torch.empty(0))
    kernels.finalize(x, ids, weights, ids, None, None, x, config=config)
