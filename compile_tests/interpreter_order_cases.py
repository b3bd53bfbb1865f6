"""What the row order promises, alone and in one launch with the choice, run in Triton's interpreter:
`test_kernels_interpreter.py` does it. The oracle is plain Python.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from interpreted import (
    BF16,
    FP64,
    GARBAGE,
    INF,
    NAN,
    choose,
    clear_rows,
    empty_rows,
    order_rows,
    randn,
    rng,
    spread,
)

import dsmoe_op.kernels.order as order_module
import dsmoe_op.kernels.route as route_module
from dsmoe_op import kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.order import num_zeros
from dsmoe_op.tuning import OrderBlock

__all__ = ["rng"]


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
    return [len(r) for r in rows], order, row_of, out_ids, out_weights


def check_rows(rows: kernels.Rows, want) -> None:
    heights, order, row_of = want[:3]
    N, B = len(rows.sorted_slot_N), rows.block_m
    assert rows.num_rows.tolist() == [len(order)]
    assert rows.taken.tolist() == [0, 0]
    assert not rows.arrivals.any()
    assert rows.sorted_slot_N[: len(order)].tolist() == order
    assert torch.equal(rows.row_of_TK.long(), row_of)
    assert (rows.sorted_slot_N[len(order) :] == GARBAGE).all()
    tiles = []
    for expert, (first, end) in enumerate(itertools.pairwise([*itertools.accumulate(heights, initial=0), N])):
        name = expert if expert < len(heights) else -1
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
    monkeypatch.setattr(route_module, "order_block", lambda num_slots: block)
    for module in (route_module, order_module):
        monkeypatch.setattr(module, "chunk_size", lambda num_slots, alone: chunk)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [OrderBlock(32, 4), OrderBlock(128, 4)])
@pytest.mark.parametrize("chunk", [16, 128, 1024])  # more chunks than make a sum, several, or one of several blocks
@pytest.mark.parametrize(("T", "K"), [(1, 1), (1, 5), (3, 4), (45, 6)])
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


@pytest.mark.parametrize(
    ("T", "E", "K"),
    [
        *((1, 256, 8), (8, 4, 4)),  # up to 32 slots
        *((3, 512, 11), (8, 256, 8), (9, 5, 5), (63, 1, 1), (64, 3, 1), (2, 40, 32)),  # up to 64
        *((13, 70, 5), (16, 64, 8), (33, 256, 8), (700, 1, 1), (60, 1024, 32)),
    ],
)
@pytest.mark.parametrize(("block_m", "tail"), [(1, 0), (8, 0), (8, 7), (64, 32), (256, 0)])
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


@pytest.mark.parametrize("T", [1, 7, 300])
def test_choose_zeroes_the_counters_that_a_later_order_needs_so(rng, T):
    K, E = 5, 70
    zeros = num_zeros(T * K, E, alone=True)
    counters = torch.full((kernels.num_counters(T * K, E) + 1,), GARBAGE, dtype=torch.int32)
    choose(randn(rng, T, E), MoEConfig(top_k=K), counters=counters)
    assert counters.tolist() == [0] * zeros + [GARBAGE] * (len(counters) - zeros)


@pytest.mark.parametrize("T", [1, 300])
def test_zero_counters_zeroes_what_an_order_needs_so(T):
    rows, zeros = empty_rows(T, 5, 70, 16), num_zeros(T * 5, 70, alone=True)
    rows.counters.fill_(GARBAGE)
    kernels.zero_counters(rows, num_experts=70)
    assert rows.counters.tolist() == [0] * zeros + [GARBAGE] * (len(rows.counters) - zeros)


@pytest.mark.parametrize(
    ("E", "knobs"),
    [
        (128, {"top_k": 1}),
        (150, {"top_k": 5, "score": "softmax", "normalize": "sum"}),
        (256, {"top_k": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}),
        (160, {"top_k": 6, "score": "softmax", "n_group": 8, "topk_group": 3, "group_score": "max"}),
        (300, {"top_k": 8, "n_group": 2, "topk_group": 1, "group_mask": "zero", "weights_from": "topk_softmax"}),
        (384, {"top_k": 8, "n_group": 1, "topk_group": 1, "normalize": "sum_eps"}),
        (420, {"top_k": 16, "n_group": 3, "topk_group": 3, "weights_from": "topk_sigmoid", "choice_on": "logit"}),
        (512, {"top_k": 10, "score": "softmax", "choice_on": "logit", "weights_from": "topk_softmax"}),
        (1024, {"top_k": 9, "score": "sqrtsoftplus", "num_zero_experts": 4}),
    ],
)
@pytest.mark.parametrize("T", [1, 4])  # up to 32 slots, and up to 64
def test_warps_that_share_a_token_choose_as_one_does(rng, E, knobs, T):
    """And as the reference, with ties and rows of bad logits; all slots of a call are ordered by the same launch."""
    config, Z = MoEConfig(**knobs), knobs.get("num_zero_experts", 0)
    bias = randn(rng, E + Z)
    logits = randn(rng, 3, T, E + Z)
    ties = torch.randint(-1, 2, (1, T, E + Z), generator=rng).float()
    bad = spread(rng, T, E + Z, 0, 5)[None]
    bad[0, 0, ::3], bad[0, 0, 5], bad[0, -1, 40:] = NAN, INF, -INF
    for given, b in [(logits, bias), (logits, None), (ties, None), (bad, None)]:
        want = choose(given, config, b)
        rows = empty_rows(T, config.top_k, E, 16)
        rows.counters.zero_()
        got = choose(given, config, b, rows=rows)
        assert all(map(torch.equal, got, want))
        check_rows(rows, sort_oracle(*got, None, T, E, Z))
        if given is not bad:
            total = given[0] if len(given) == 1 else given[0] + given[1] + given[2]
            clear = clear_rows(total, config, b) if given is logits else torch.ones(T, dtype=torch.bool)
            want_ids, want_weights = reference.route(total.to(FP64), config, correction_bias=b)
            assert got[0][clear].tolist() == want_ids[clear].tolist()
            torch.testing.assert_close(got[1][clear].to(FP64), want_weights[clear].to(FP64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("T", "chunk", "tokens"),
    [
        (1, None, 1),
        (1, None, 3),
        (2, 16, 3),
        (3, None, 1),
        (11, None, 3),  # 33 slots
        (21, None, 1),
        (40, None, 3),
        (40, 16, 1),
        (40, 16, 3),
        (90, None, 1),
        (90, 4, 3),  # tickets
    ],
)
def test_one_launch_of_choice_and_order_is_the_two_in_a_row(rng, monkeypatch, T, chunk, tokens):
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
