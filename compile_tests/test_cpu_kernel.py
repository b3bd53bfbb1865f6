"""The CPU kernel: every knob in every dtype against the float64 definition, and what is the kernel's own.

What the op promises on any device is in test_op.py. Ids and weights are given here, so that a choice that hangs on a
rounding is no part of an error; the kernel's routing is held against the definition's bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.utils.deterministic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layers import error, make_layer, moe_args, routing_of
from torch.utils._python_dispatch import TorchDispatchMode

from dsmoe_op import (
    MoEConfig,
    Unfinalized,
    cpu,
    dual_stream_moe,
    dual_stream_moe_unfinalized,
    finalize,
    ops,
    reference,
    route,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SEEDS = st.integers(0, 2**31 - 1)
PROPERTY = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

CHOICES = st.fixed_dictionaries(
    {
        "top_k": st.integers(1, 4),
        "score": st.sampled_from(["sigmoid", "softmax", "sqrtsoftplus", "none"]),
        "choice_on": st.sampled_from(["score", "logit"]),
        "groups": st.sampled_from([(None, None), (4, 2), (2, 1), (3, 3)]),
        "group_score": st.sampled_from(["max", "top2_sum"]),
        "group_mask": st.sampled_from(["-inf", "zero"]),
        "weights_from": st.sampled_from(["score", "topk_softmax", "topk_sigmoid"]),
        "normalize": st.sampled_from(["none", "sum", "sum_eps", "sum_clamp"]),
        "score_dtype": st.sampled_from(["float32", "model"]),
        "weight_dtype": st.sampled_from(["float32", "model"]),
        "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
    }
)
EXPERTS = st.fixed_dictionaries(
    {
        "top_k": st.integers(1, 5),
        "activation": st.sampled_from(["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"]),
        "clamp_routed": st.sampled_from([None, 0.4]),
        "clamp_shared": st.sampled_from([None, 0.7]),
        "clamp_after_activation": st.booleans(),
        "w13_order": st.sampled_from(["gate_up", "up_gate", "interleaved"]),
        "combine": st.sampled_from(["sum", "average"]),
        "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
        "scale_on": st.sampled_from(["weights", "output"]),
    }
)


@PROPERTY
@given(
    CHOICES,
    st.sampled_from(["distinct", "tied", "bad"]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from([0, cpu.SORT_LOGITS]),
    SEEDS,
)
def test_routing_is_the_definitions_bit_for_bit(counted, knobs, kind, has_bias, dtype, sort_logits, seed):
    torch.manual_seed(seed)
    knobs["n_group"], knobs["topk_group"] = knobs.pop("groups")
    config = MoEConfig(**knobs)
    _, layer = make_layer(9, way="router_logits", config=config, dtype=dtype, correction_bias=has_bias, S=0)
    logits = layer["router_logits"]
    if kind != "distinct":
        logits.copy_(logits.round())
        if has_bias:
            layer["correction_bias"].round_()
    if kind == "bad":
        logits[torch.rand(logits.shape) < 0.3] = math.nan
        logits[torch.rand(logits.shape) < 0.3] = -math.inf
        logits[0], logits[1], logits[2, 3] = math.nan, -math.inf, math.inf
    with mock.patch.object(cpu, "SORT_LOGITS", sort_logits):
        ids, weights = route(**routing_of(layer))
    bias = layer.get("correction_bias")
    expected = reference.route(logits.float(), config, correction_bias=bias, model_dtype=dtype)
    assert torch.equal(ids, expected[0].int())
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=0, equal_nan=True)
    counted("random routings with the definition's bits")


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("router_bias", [False, True])
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_router_logits_are_float32_products_whatever_torch_allows(dtype, weight_dtype, router_bias, precision):
    config = MoEConfig(top_k=12, score="none", normalize="none")
    x, layer = make_layer(300, config=config, dtype=dtype, router_dtype=weight_dtype, router_bias=router_bias, H=336)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        ids, weights = route(x, **routing_of(layer))
    finally:
        torch.set_float32_matmul_precision(before)
    logits = reference.compute_logits(x, layer["router_weight"], layer.get("router_bias"), config)
    assert error(weights, logits.gather(1, ids.long())) < 1e-6


@pytest.mark.parametrize("router_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_the_model_dtype_are_rounded_once(dtype, router_bias):
    config = MoEConfig(top_k=12, score="none", normalize="none", router_dtype="model")
    x, layer = make_layer(300, config=config, dtype=dtype, router_bias=router_bias, H=336)
    ids, weights = route(x, **routing_of(layer))
    logits = reference.compute_logits(x, layer["router_weight"], layer.get("router_bias"), config)
    expected = logits.gather(1, ids.long())
    assert torch.equal(weights, weights.to(dtype).float())
    assert error(weights, expected) < {torch.float32: 1e-6, torch.bfloat16: 5e-4, torch.float16: 1e-4}[dtype]


@PROPERTY
@given(
    EXPERTS,
    st.sampled_from(DTYPES),
    st.fixed_dictionaries({n: st.booleans() for n in ("expert_bias", "shared_gate")}),
    st.sampled_from([{}, {"num_zero_experts": 2}, {"apply_router_weight_on_input": True}]),
    st.sampled_from([{}, {"S": 0, "shared_gate": False}]),
    st.sampled_from([{}, {"E_global": 19}]),
    st.sampled_from([{}, {"valid_tokens": 0}, {"valid_tokens": 4}, {"valid_tokens": -1}, {"valid_tokens": 99}]),
    st.integers(1, 40),
    SEEDS,
)
def test_every_knob_in_every_dtype(counted, knobs, dtype, tensors, extra, shared, ranks, valid, T, seed):
    torch.manual_seed(seed)
    config = MoEConfig(**knobs, **extra)
    x, layer = make_layer(T, way="topk_ids", config=config, dtype=dtype, **(tensors | shared | ranks | valid))
    layer["topk_ids"][torch.rand(T, config.top_k) < 0.1] = 10**6
    expected = reference.moe(x, **layer)
    out = dual_stream_moe(x, **layer)
    if not expected.any():
        assert not out.any()
    else:
        assert error(out, expected) < TOLERANCE[dtype]
    pieces = dual_stream_moe_unfinalized(x, **layer)
    assert torch.equal(finalize(pieces, config=config, hidden_states=x), out)
    counted("random layers held against the float64 definition")


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4, 37])
@pytest.mark.parametrize("strides", ["transposed", "padded", "transposed and padded", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_any_strides_and_experts_of_any_size(dtype, strides, rows, onednn, monkeypatch):
    if not onednn:
        monkeypatch.setattr(cpu, "_onednn_has", lambda dtype: False)
    x, layer = make_layer(rows, way="topk_ids", config=MoEConfig(top_k=2), dtype=dtype)
    layer["topk_ids"][:] = torch.tensor([4, 9])
    for name in ("w13", "w2", "shared_w13", "shared_w2"):
        weight = layer[name]
        pad = 5 if "padded" in strides else 0
        if strides == "expanded":
            layer[name] = weight[:1].expand_as(weight) if name.startswith("w") else weight
        elif "transposed" in strides:
            room = weight.new_full((*weight.shape[:-2], weight.shape[-1], weight.shape[-2] + pad), math.nan)
            layer[name] = room.mT[..., pad:, :].copy_(weight)
        else:
            room = weight.new_full((*weight.shape[:-1], weight.shape[-1] + pad), math.nan)
            layer[name] = room[..., pad:].copy_(weight)
    assert error(dual_stream_moe(x, **layer), reference.moe(x, **layer)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ids", [[20, 21, 22, 24], [1, 2, 38, 39], [7, 7, 7, 7]])
@pytest.mark.parametrize("dims", [{"H": 51, "I": 23, "S": 37}, {"H": 56, "I": 24, "S": 40}, {"H": 40, "I": 1, "S": 1}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_sizes_and_experts_near_or_far_apart(dtype, dims, ids, bias):
    layer_dims = {**dims, "E": 40}
    x, layer = make_layer(6, way="topk_ids", config=MoEConfig(top_k=4), dtype=dtype, expert_bias=bias, **layer_dims)
    layer["topk_ids"][:] = torch.tensor(ids)
    for name in ("w13", "w2"):  # their memory begins where no alignment helps
        layer[name] = torch.cat([layer[name].flatten()[:1], layer[name].flatten()])[1:].view_as(layer[name])
    assert error(dual_stream_moe(x, **layer), reference.moe(x, **layer)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", ["one expert", "two experts", "all experts"])
def test_more_rows_and_numbers_than_are_taken_at_a_time(spread, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "RUN_ROWS", 64)
    monkeypatch.setattr(cpu, "FLOATS", 1000)
    config = MoEConfig(top_k=4, num_zero_experts=3)
    x, layer = make_layer(157, way="topk_ids", config=config, dtype=dtype, shared_gate=True, expert_bias=True)
    ids = layer["topk_ids"]
    ids[:, 0] = 13  # a zero expert
    ids[::3, 1] = -1
    if spread == "one expert":
        ids[:, 2:] = 5
    elif spread == "two experts":
        ids[:, 2:] = torch.tensor([8, 1])
    assert error(dual_stream_moe(x, **layer), reference.moe(x, **layer)) < TOLERANCE[dtype]


def test_a_call_has_two_products_for_each_expert_that_has_rows_and_two_for_the_shared_one(monkeypatch):
    products = []
    linear = cpu._linear
    monkeypatch.setattr(cpu, "_linear", lambda x, *rest: products.append(len(x)) or linear(x, *rest))
    x, layer = make_layer(50, way="topk_ids", config=MoEConfig(top_k=3))
    layer["topk_ids"][:] = torch.tensor([7, 0, 7])
    dual_stream_moe(x, **layer)
    assert products == [50, 100, 50, 100, 50, 50]


@PROPERTY
@given(st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 3 * cpu.RUN_ROWS)), max_size=40))
def test_runs_hold_each_expert_that_has_rows_once_and_in_order(counts):
    runs = list(cpu._runs(counts))
    assert [e for experts, _ in runs for e in experts] == [e for e, count in enumerate(counts) if count]
    end = 0
    for experts, rows in runs:
        assert (rows.start, rows.stop) == (end, end + sum(counts[e] for e in experts))
        assert len(experts) == 1 or rows.stop - rows.start <= cpu.RUN_ROWS
        end = rows.stop
    for (_, rows), (experts, _) in itertools.pairwise(runs):
        assert rows.stop - rows.start + counts[experts[0]] > cpu.RUN_ROWS, "the next expert had room in this run"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_y_are_sorted_by_expert_then_slot_and_end_in_zeros(dtype):
    x, layer = make_layer(11, way="topk_ids", config=MoEConfig(top_k=4), dtype=dtype, E_global=20, S=0)
    ids, config = layer["topk_ids"], layer["config"]
    ids[2, 1], ids[3, 0], ids[5, 2] = -1, 20, ids[5, 1]
    pieces = dual_stream_moe_unfinalized(x, **layer)
    row = torch.where((ids >= 0) & (ids < 20), layer["expert_map"][ids.clamp(0, 19)], -1).flatten().tolist()
    order = sorted((expert, slot) for slot, expert in enumerate(row) if expert >= 0)
    expected_row_of = [-1] * len(row)
    for y_row, (expert, slot) in enumerate(order):
        expected_row_of[slot] = y_row
        h = reference.activation(layer["w13"][expert].double() @ x[slot // 4].double(), config, clamp=None)
        assert error(pieces.y[y_row], layer["w2"][expert].double() @ h) < TOLERANCE[dtype]
    has_row = pieces.row_of >= 0
    assert pieces.row_of.flatten().tolist() == expected_row_of
    assert torch.equal(pieces.topk_ids, ids.where(has_row, -1))
    assert torch.equal(pieces.topk_weights, layer["topk_weights"].where(has_row, 0))
    assert not pieces.y[len(order) :].any()
    assert pieces.shared is None


@pytest.mark.parametrize("T", [0, 1, 2, 9])
@pytest.mark.parametrize("way", ["router_weight", "router_logits", "topk_ids"])
def test_outputs_have_the_strides_of_new_tensors(way, T):
    x, layer = make_layer(T, way=way, shared_gate=True)
    x = torch.stack([x, x], 1)[:, 1]
    for name in ("topk_ids", "topk_weights", "router_logits"):
        if name in layer:
            layer[name] = torch.stack([layer[name].t()] * 2, -1)[..., 1].t()
    tensors = [dual_stream_moe(x, **layer), *dual_stream_moe_unfinalized(x, **layer)]
    if way != "topk_ids":
        tensors += route(None if way == "router_logits" else x, **routing_of(layer))
    for tensor in tensors:
        assert tensor.stride() == torch.empty(tensor.shape).stride()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("T", [2, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_row_changes_no_other_row(dtype, T, value):
    x, layer = make_layer(T, way="router_weight", dtype=dtype, shared_gate=True, expert_bias=True)
    good = dual_stream_moe(x, **layer)
    bad = torch.randint(T, ())
    x[bad] = value
    out = dual_stream_moe(x, **layer)
    others = torch.arange(T) != bad
    assert error(out[others], good[others]) < TOLERANCE[dtype]
    assert out[bad].isnan().any()


@pytest.mark.parametrize("zero_experts", [0, 2])
def test_a_bad_row_that_no_expert_takes_is_zeros(zero_experts):
    x, layer = make_layer(8, way="topk_ids", config=MoEConfig(top_k=3, num_zero_experts=zero_experts), S=0)
    layer["topk_ids"][3], x[3], layer["topk_weights"][3] = torch.tensor([-1, 99, -7]), math.nan, math.nan
    out = dual_stream_moe(x, **layer)
    assert not out[3].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_is_rounded_once(dtype, activation):
    config = MoEConfig(top_k=1, activation=activation, clamp_routed=1.1)
    x, layer = make_layer(300, way="topk_ids", config=config, dtype=dtype, H=64, I=32 if config.gated else 64, S=0)
    layer["topk_weights"].fill_(1.0)
    for name in ("w13", "w2"):
        layer[name] = torch.eye(*layer[name].shape[1:], dtype=dtype).expand_as(layer[name])
    expected = reference.activation(x.float(), config, clamp=1.1).to(dtype)
    assert torch.equal(dual_stream_moe(x, **layer)[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_ascends_in_k_and_is_rounded_once(dtype):
    step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    y = torch.ones(3, 16, dtype=dtype)
    row_of = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    weights = torch.tensor([[2.0**27, -(2.0**27), 1 + step / 4]])
    shared = torch.full((1, 16), step / 2, dtype=dtype)
    out = finalize(Unfinalized(y, row_of, weights, row_of, shared), config=MoEConfig(top_k=3))
    assert torch.equal(out, torch.full((1, 16), 1 + step, dtype=dtype))  # 1 + 3/4 step, rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["router_weight", "router_logits", "topk_ids"])
def test_what_lies_in_fresh_memory_does_not_matter(way, dtype, request):
    config = MoEConfig(top_k=4, num_zero_experts=3)
    options = {"shared_gate": True, "expert_bias": True, "valid_tokens": 9, "E_global": 20}
    x, layer = make_layer(11, way=way, config=config, dtype=dtype, **options)
    out, pieces = dual_stream_moe(x, **layer), dual_stream_moe_unfinalized(x, **layer)
    request.getfixturevalue("poisoned")
    assert torch.empty(1).isnan()
    assert torch.equal(dual_stream_moe(x, **layer), out)
    for again, piece in zip(dual_stream_moe_unfinalized(x, **layer), pieces, strict=True):
        assert torch.equal(again, piece)
    assert torch.equal(finalize(pieces, config=config, hidden_states=x), out)


class OutOfMemory(TorchDispatchMode):
    """Lets one of PyTorch's operations fail, as if there were no memory for its result."""

    def __init__(self, fail_at):
        super().__init__()
        self.left = fail_at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1 and not func.is_view:
            raise torch.OutOfMemoryError(str(func))
        return func(*args, **(kwargs or {}))


def test_an_operation_that_fails_ends_the_call_and_leaves_the_next_one_right(counted):
    config = MoEConfig(top_k=4, num_zero_experts=3)
    x, layer = make_layer(11, config=config, shared_gate=True, expert_bias=True, E_global=20)
    call = functools.partial(ops._moe, *moe_args(x, layer))  # a mode sees no further into a registered op
    expected = call()
    with OutOfMemory(-1) as all_of_them:
        call()
    count = -1 - all_of_them.left
    assert count > 30
    for fail_at in range(count):
        with contextlib.suppress(torch.OutOfMemoryError), OutOfMemory(fail_at):  # a view cannot fail
            call()
        assert torch.equal(call(), expected)
        counted("calls ended by a failed allocation")
