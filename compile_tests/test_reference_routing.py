"""The definition of routing, held against loops over Python floats: one row, one expert, one step at a time."""

from __future__ import annotations

import itertools
import math
import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from dsmoe_op import MoEConfig, reference

T, E, K = 5, 24, 3
GROUPS: list[dict[str, Any]] = [
    {},
    {"n_group": 6, "topk_group": 2, "group_score": "top2_sum", "group_mask": "-inf"},
    {"n_group": 6, "topk_group": 2, "group_score": "top2_sum", "group_mask": "zero"},
    {"n_group": 4, "topk_group": 3, "group_score": "max", "group_mask": "-inf"},
    {"n_group": 4, "topk_group": 1, "group_score": "max", "group_mask": "zero"},
    {"n_group": 24, "topk_group": 7, "group_score": "max"},
    {"n_group": 1, "topk_group": 1},
]
SCORES = ["sigmoid", "softmax", "sqrtsoftplus", "none"]
WEIGHTS_FROM = ["score", "topk_softmax", "topk_sigmoid"]
NORMALIZE = ["none", "sum", "sum_eps", "sum_clamp"]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v))


def softmax(values: list[float]) -> list[float]:
    exps = [math.exp(v - max(values)) for v in values]
    return [e / math.fsum(exps) for e in exps]


def softplus(v: float) -> float:
    return max(v, 0.0) + math.log1p(math.exp(-abs(v)))


def bf16(v: float) -> float:
    """Nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", v))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def largest(values: list[float], count: int) -> list[int]:
    """Positions of the `count` largest, the lowest position first among equals."""
    left, found = dict(enumerate(values)), []
    for _ in range(count):
        best = max(left.values())
        found.append(min(i for i, v in left.items() if v == best))
        del left[found[-1]]
    return found


def route_row(logits: list[float], config: MoEConfig, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One row of finite logits by the letter of the tables: logits -> scores -> choice -> weights."""
    step = bf16 if config.score_dtype == "model" else float
    if config.score == "sigmoid":
        scores = [step(sigmoid(v)) for v in logits]
    elif config.score == "softmax":
        scores = [step(v) for v in softmax(logits)]
    elif config.score == "sqrtsoftplus":
        scores = [step(math.sqrt(step(softplus(v)))) for v in logits]
    else:
        scores = logits

    keys = list(logits if config.choice_on == "logit" else scores)
    if bias is not None:
        keys = [k + b for k, b in zip(keys, bias, strict=True)]
    if config.n_group is not None:
        size = len(keys) // config.n_group
        groups = [sorted(keys[g * size : (g + 1) * size], reverse=True) for g in range(config.n_group)]
        if config.group_score == "max":
            worth = [group[0] for group in groups]
        else:
            worth = [group[0] + group[1] for group in groups]
            if bias is None:
                worth = [step(w) for w in worth]
        kept = largest(worth, config.topk_group)
        lost = -math.inf if config.group_mask == "-inf" else 0.0
        keys = [key if i // size in kept else lost for i, key in enumerate(keys)]
    ids = largest(keys, config.top_k)

    if config.weights_from == "topk_softmax":
        weights = [step(w) for w in softmax([logits[i] for i in ids])]
    elif config.weights_from == "topk_sigmoid":
        weights = [step(sigmoid(logits[i])) for i in ids]
    else:
        weights = [scores[i] for i in ids]
    if config.normalize != "none":
        total = {
            "sum": sum(weights),
            "sum_eps": sum(weights) + 1e-20,
            "sum_clamp": max(sum(weights), 1e-12),
        }[config.normalize]
        weights = [step(w / step(total)) for w in weights]
    if config.scale_on == "weights":
        weights = [step(w * config.routed_scaling_factor) for w in weights]
    if config.weight_dtype == "model":
        weights = [bf16(w) for w in weights]
    return ids, weights


def check(config: MoEConfig, logits: Tensor, bias: Tensor | None) -> None:
    ids, weights = reference.route(logits, config, correction_bias=bias, model_dtype=torch.bfloat16)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float64)
    for row, row_ids, row_weights in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        want_ids, want_weights = route_row(row, config, None if bias is None else bias.tolist())
        assert row_ids == want_ids
        assert row_weights == pytest.approx(want_weights, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda g: ",".join(map(str, g.values())) or "none")
@pytest.mark.parametrize("score", SCORES)
def test_every_combination_of_knobs_follows_the_tables(score, groups):
    knobs = itertools.product(["score", "logit"], [False, True], WEIGHTS_FROM, NORMALIZE, ["weights", "output"])
    for choice_on, biased, weights_from, normalize, scale_on in knobs:
        config = MoEConfig(
            top_k=K,
            score=score,
            choice_on=choice_on,
            weights_from=weights_from,
            normalize=normalize,
            scale_on=scale_on,
            routed_scaling_factor=2.5,
            **groups,
        )
        bias = torch.randn(E, dtype=torch.float64) if biased else None
        check(config, torch.randn(T, E, dtype=torch.float64) * 2, bias)


@pytest.mark.parametrize("weight_dtype", ["float32", "model"])
@pytest.mark.parametrize("score_dtype", ["float32", "model"])
@pytest.mark.parametrize("score", SCORES)
def test_model_dtype_rounds_where_the_config_says(score, score_dtype, weight_dtype):
    for groups, weights_from, normalize, biased in itertools.product(
        GROUPS[:3], WEIGHTS_FROM, NORMALIZE, [False, True]
    ):
        config = MoEConfig(
            top_k=K,
            score=score,
            score_dtype=score_dtype,
            weight_dtype=weight_dtype,
            weights_from=weights_from,
            normalize=normalize,
            routed_scaling_factor=2.5,
            **groups,
        )
        bias = torch.randn(E, dtype=torch.float64) if biased else None
        check(config, torch.randn(T, E, dtype=torch.float64) * 2, bias)


def test_the_correction_bias_moves_the_choice_and_not_the_weights():
    logits, bias = torch.randn(T, E, dtype=torch.float64), torch.zeros(E)
    bias[[4, 9, 20]] = 100.0
    ids, weights = reference.route(logits, MoEConfig(top_k=3, normalize="none"), correction_bias=bias)
    assert ids.sort(dim=1).values.tolist() == [[4, 9, 20]] * T
    torch.testing.assert_close(weights, torch.sigmoid(logits.gather(1, ids)))


def test_the_mask_of_the_losing_groups_matters_where_all_that_is_left_is_negative():
    """Group 1 is kept and its third best key is below 0: with "zero" the third pick is the lowest id of group 0."""
    logits = torch.tensor([[-5.0, -5.0, -5.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    knobs = {"top_k": 3, "score": "none", "n_group": 2, "topk_group": 1, "normalize": "none"}
    assert reference.route(logits, MoEConfig(group_mask="-inf", **knobs))[0].tolist() == [[3, 4, 5]]
    assert reference.route(logits, MoEConfig(group_mask="zero", **knobs))[0].tolist() == [[3, 4, 0]]


@pytest.mark.parametrize("groups", GROUPS, ids=lambda g: ",".join(map(str, g.values())) or "none")
def test_ties_go_to_the_lowest_id_of_experts_and_of_groups(groups):
    """Logits of three values alone, so that nearly every comparison is a tie."""
    for score in SCORES:
        logits = torch.randint(-1, 2, (64, E)).double()
        check(MoEConfig(top_k=K, score=score, **groups), logits, None)
    ids, _ = reference.route(torch.zeros(2, E), MoEConfig(top_k=K, **groups))
    assert ids.tolist() == [[0, 1, 2]] * 2


BAD_ROWS = {
    "all NaN": torch.full((E,), math.nan),
    "all -inf": torch.full((E,), -math.inf),
    "all +inf": torch.full((E,), math.inf),
    "one NaN": torch.zeros(E).index_fill(0, torch.tensor([0]), math.nan),
    "one finite": torch.full((E,), -math.inf).index_fill(0, torch.tensor([17]), 1.0),
    "two finite, rest NaN": torch.full((E,), math.nan).index_fill(0, torch.tensor([5, 17]), 1.0),
    "+inf and -inf": torch.full((E,), -math.inf).index_fill(0, torch.tensor([3, 8]), math.inf),
    "very low": torch.full((E,), -3e4),
}
HARD_CONFIGS = [
    MoEConfig(
        top_k=K,
        score=score,
        weights_from=weights_from,
        normalize=normalize,
        choice_on=choice_on,
        score_dtype=dtype,
        weight_dtype=dtype,
        **groups,
    )
    for score, weights_from, normalize, choice_on, dtype, groups in itertools.product(
        SCORES, WEIGHTS_FROM, NORMALIZE, ["score", "logit"], ["float32", "model"], GROUPS
    )
]


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_row_gets_distinct_valid_ids_and_finite_weights(row, model_dtype):
    good = torch.randn(3, E)
    logits = good.clone()
    logits[1] = BAD_ROWS[row]
    # +inf counts as the largest float32, which is inf again in a shorter dtype.
    configs = [c for c in HARD_CONFIGS if "+inf" not in row or c.score_dtype == "float32"]
    for config, bias in itertools.product(random.sample(configs, 200), (None, torch.randn(E))):
        ids, weights = reference.route(logits, config, correction_bias=bias, model_dtype=model_dtype)
        assert len(set(ids[1].tolist())) == K, config
        assert 0 <= ids.min() <= ids.max() < E, config
        assert torch.isfinite(weights).all(), (config, weights[1])
        good_ids, good_weights = reference.route(good, config, correction_bias=bias, model_dtype=model_dtype)
        assert torch.equal(ids[::2], good_ids[::2]), config
        assert torch.equal(weights[::2], good_weights[::2]), config


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_weights_that_sum_to_zero_stay_finite(normalize):
    """Sigmoid underflow: every chosen score is 0."""
    logits = torch.full((2, E), -200.0)
    ids, weights = reference.route(logits, MoEConfig(top_k=K, normalize=normalize, routed_scaling_factor=2.5))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[0.0] * K] * 2


@pytest.mark.parametrize("bias", [math.nan, -math.inf, math.inf])
def test_a_bias_that_is_not_finite_harms_no_other_expert(bias):
    logits = torch.randn(T, E)
    bias_E = torch.zeros(E).index_fill(0, torch.tensor([6]), bias)
    for groups in GROUPS:
        config = MoEConfig(top_k=K, **groups)
        ids, weights = reference.route(logits, config, correction_bias=bias_E)
        assert all(len(set(row)) == K for row in ids.tolist())
        assert torch.isfinite(weights).all()
        assert (ids == 6).any(1).all() if bias == math.inf else not (ids == 6).any() or "zero" in groups.values()


def test_rows_from_num_valid_tokens_on_route_nowhere():
    config = MoEConfig(top_k=K, routed_scaling_factor=2.5)
    logits = torch.randn(T, E)
    ids, weights = reference.route(logits, config)
    for valid in range(T + 1):
        few_ids, few_weights = reference.route(logits, config, num_valid_tokens=torch.tensor([valid]))
        assert torch.equal(few_ids[:valid], ids[:valid])
        assert torch.equal(few_weights[:valid], weights[:valid])
        assert (few_ids[valid:] == -1).all()
        assert (few_weights[valid:] == 0).all()


def test_no_rows_route_to_no_rows():
    for config in random.sample(HARD_CONFIGS, 20):
        ids, weights = reference.route(torch.empty(0, E), config)
        assert ids.shape == weights.shape == (0, K)


@pytest.mark.parametrize("router_dtype", ["float32", "model"])
def test_logits_are_one_float_sum_rounded_only_for_router_dtype_model(router_dtype):
    x, weight, bias = torch.randn(4, 16).bfloat16(), torch.randn(E, 16), torch.randn(E)
    logits = reference.compute_logits(x, weight, bias, MoEConfig(top_k=K, router_dtype=router_dtype))
    for t, e in itertools.product(range(4), range(E)):
        want = math.fsum(a * b for a, b in zip(x[t].tolist(), weight[e].tolist(), strict=True)) + bias[e].item()
        assert logits[t, e].item() == pytest.approx(bf16(want) if router_dtype == "model" else want, rel=1e-12)
