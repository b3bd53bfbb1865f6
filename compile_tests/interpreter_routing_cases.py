"""What the kernels of the routing promise, run in Triton's interpreter: `test_kernels_interpreter.py` does it.

Oracles are `dsmoe_op.reference` in float64 and plain Python. The interpreter computes no bf16 products (float32 ones
here) and truncates where it rounds to bf16; both are tested on a GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from interpreted import (
    BF16,
    FP16,
    FP32,
    FP64,
    GARBAGE,
    INF,
    NAN,
    choose,
    clear_rows,
    close,
    padded_rows,
    randn,
    rng,
    router_logits,
    spread,
    transposed,
)
from torch import Tensor

import dsmoe_op.kernels.router as router_module
from dsmoe_op import reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import RouterTile, router_variants

__all__ = ["rng"]


# Router


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
