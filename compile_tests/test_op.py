"""What the ops promise to the dispatcher, to autograd and to their callers, run eagerly."""

from __future__ import annotations

import math
import re
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from layers import TOLERANCE, WAYS, assert_right, error, make_layer, moe_args, route_args, routing_of, tensors_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

from dsmoe_op import MoEConfig, checks, dual_stream_moe, dual_stream_moe_unfinalized, finalize, route

OPS = torch.ops.dsmoe
SMALL = {"E": 5, "H": 48, "I": 16, "S": 32}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
ANY_T = pytest.mark.parametrize("T", [0, 1, 2, 7])
ANY_WAY = pytest.mark.parametrize("way", WAYS)
ZERO_EXPERTS = MoEConfig(top_k=3, num_zero_experts=2, routed_scaling_factor=2.5)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain float32": {},
    "plain bfloat16": {"dtype": torch.bfloat16},
    "plain float16": {"dtype": torch.float16},
    "no shared expert": {"S": 0, "dtype": torch.bfloat16},
    "all tensors": {
        **{"shared_gate": True, "expert_bias": True, "valid_tokens": 5, "E_global": 20},
        "dtype": torch.bfloat16,
        "router_dtype": torch.float32,
    },
    "leading dims": {"T": (2, 1, 3), "dtype": torch.float16},
    "one row without dims": {"T": ()},
    "zero experts": {"config": ZERO_EXPERTS, "dtype": torch.bfloat16},
    "on the input": {"config": MoEConfig(top_k=3, apply_router_weight_on_input=True, score="softmax")},
    "on the output": {
        "config": MoEConfig(top_k=3, scale_on="output", routed_scaling_factor=2.5, combine="average"),
        "dtype": torch.float16,
    },
    "not gated": {"config": MoEConfig(top_k=2, activation="relu2")},
}
ANY_OPTION = pytest.mark.parametrize("option", OPTIONS)


def every_call(x: Tensor, layer: dict[str, Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each op that computes a layer or a part of it, with its arguments for this layer."""
    yield OPS.moe_v1.default, moe_args(x, layer)
    yield OPS.moe_unfinalized_v1.default, moe_args(x, layer)
    if "topk_ids" not in layer:
        yield OPS.route_v1.default, route_args(x, layer)
    if "router_logits" in layer:
        yield OPS.route_v1.default, route_args(None, layer)
    pieces = dual_stream_moe_unfinalized(x, **layer)
    yield OPS.finalize_v1.default, (*pieces, x, layer["config"].key)
    if not layer["config"].num_zero_experts:
        yield OPS.finalize_v1.default, (*pieces, None, layer["config"].key)


def tensors(values: Any) -> list[Tensor]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [v for v in values if isinstance(v, Tensor)]


def to_fakes(mode: FakeTensorMode, args: tuple[Any, ...]) -> list[Any]:
    return [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]


# --- registration ---------------------------------------------------------------------------------------------------


@ANY_WAY
@ANY_T
def test_opcheck(T, way, device):
    x, layer = make_layer(T, way=way, device=device, **SMALL)
    for op, args in every_call(x, layer):
        opcheck(op, args)


@ANY_WAY
def test_opcheck_with_every_tensor_in_bfloat16(way, device):
    parts = {"shared_gate": True, "expert_bias": True, "valid_tokens": 2, "E_global": 8, "config": ZERO_EXPERTS}
    x, layer = make_layer(
        (1, 3), way=way, device=device, dtype=torch.bfloat16, correction_bias=way != "topk_ids", **parts, **SMALL
    )
    for op, args in every_call(x.transpose(0, 1), layer):
        opcheck(op, args)


def test_names_end_in_a_version_and_schemas_are_the_recorded_ones():
    """A compile cache on disk does not notice another fake or another meaning: it knows an op by its name alone.

    So whoever changes a schema here, or what an op returns, raises the version in its name.
    """
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsmoe::"))
    assert all(re.fullmatch(r"dsmoe::\w+_v[0-9]+", name) for name in names)
    schemas = (str(getattr(OPS, name.removeprefix("dsmoe::")).default._schema) for name in names)
    assert_expected_inline(
        "\n".join(textwrap.fill(s, 100, subsequent_indent="  ") for s in schemas),
        """\
dsmoe::finalize_v1(Tensor y, Tensor topk_ids, Tensor topk_weights, Tensor row_of, Tensor? shared,
  Tensor? hidden_states, str config) -> Tensor
dsmoe::moe_backward_v1(Tensor[] grads, Tensor[] inputs, str name) -> Tensor[]
dsmoe::moe_unfinalized_v1(Tensor hidden_states, Tensor w13, Tensor w2, Tensor? router_weight,
  Tensor? router_bias, Tensor? correction_bias, Tensor? router_logits, Tensor? topk_ids, Tensor?
  topk_weights, Tensor? w13_bias, Tensor? w2_bias, Tensor? shared_w13, Tensor? shared_w2, Tensor?
  shared_gate, Tensor? num_valid_tokens, Tensor? expert_map, str config, str schedule, Tensor?
  w13_scale=None, Tensor? w2_scale=None, Tensor? shared_w13_scale=None, Tensor?
  shared_w2_scale=None, Tensor? w13_zero_point=None, Tensor? w2_zero_point=None, Tensor?
  shared_w13_zero_point=None, Tensor? shared_w2_zero_point=None, Tensor? w13_global_scale=None,
  Tensor? w2_global_scale=None, Tensor? shared_w13_global_scale=None, Tensor?
  shared_w2_global_scale=None, Tensor? w13_input_scale=None, Tensor? w2_input_scale=None, Tensor?
  shared_w13_input_scale=None, Tensor? shared_w2_input_scale=None) -> (Tensor y, Tensor topk_ids,
  Tensor topk_weights, Tensor row_of, Tensor shared)
dsmoe::moe_v1(Tensor hidden_states, Tensor w13, Tensor w2, Tensor? router_weight, Tensor?
  router_bias, Tensor? correction_bias, Tensor? router_logits, Tensor? topk_ids, Tensor?
  topk_weights, Tensor? w13_bias, Tensor? w2_bias, Tensor? shared_w13, Tensor? shared_w2, Tensor?
  shared_gate, Tensor? num_valid_tokens, Tensor? expert_map, str config, str schedule, Tensor?
  w13_scale=None, Tensor? w2_scale=None, Tensor? shared_w13_scale=None, Tensor?
  shared_w2_scale=None, Tensor? w13_zero_point=None, Tensor? w2_zero_point=None, Tensor?
  shared_w13_zero_point=None, Tensor? shared_w2_zero_point=None, Tensor? w13_global_scale=None,
  Tensor? w2_global_scale=None, Tensor? shared_w13_global_scale=None, Tensor?
  shared_w2_global_scale=None, Tensor? w13_input_scale=None, Tensor? w2_input_scale=None, Tensor?
  shared_w13_input_scale=None, Tensor? shared_w2_input_scale=None) -> Tensor
dsmoe::route_v1(Tensor? hidden_states, Tensor? router_weight, Tensor? router_bias, Tensor?
  correction_bias, Tensor? router_logits, str config) -> (Tensor topk_ids, Tensor topk_weights)""",
    )


def test_outputs_are_the_recorded_ones():
    """The other half of what a version stands for: see above."""
    x, layer = make_layer((2, 4), dtype=torch.bfloat16)
    mode, lines = FakeTensorMode(), []
    for op, args in every_call(x, layer):
        with mode:
            out = op(*to_fakes(mode, args))
            lines += [f"{op}:", *(f"  {str(t.dtype)[6:]} {list(t.shape)} {list(t.stride())}" for t in tensors(out))]
    assert_expected_inline(
        "\n".join(lines),
        """\
dsmoe.moe_v1.default:
  bfloat16 [2, 4, 48] [192, 48, 1]
dsmoe.moe_unfinalized_v1.default:
  bfloat16 [24, 48] [48, 1]
  int32 [8, 3] [3, 1]
  float32 [8, 3] [3, 1]
  int32 [8, 3] [3, 1]
  bfloat16 [8, 48] [48, 1]
dsmoe.route_v1.default:
  int32 [8, 3] [3, 1]
  float32 [8, 3] [3, 1]
dsmoe.finalize_v1.default:
  bfloat16 [2, 4, 48] [192, 48, 1]
dsmoe.finalize_v1.default:
  bfloat16 [8, 48] [48, 1]""",
    )


def test_ops_carry_the_tags_of_a_compliant_op_with_exact_strides():
    for op in (OPS.moe_v1, OPS.moe_unfinalized_v1, OPS.finalize_v1, OPS.route_v1, OPS.moe_backward_v1):
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.default.tags)


def metadata(out: Any) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.device, t.requires_grad) for t in tensors(out)]


@ANY_OPTION
@ANY_WAY
def test_fake_outputs_look_like_real_ones(way, option, device):
    for T, grad in ((0, False), (1, True), (7, False), (7, True)):
        x, layer = make_layer(**{"T": T, "way": way, "device": device, **OPTIONS[option]})
        layer["w2"].requires_grad_(grad)
        mode = FakeTensorMode()
        for rows in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
            for op, args in every_call(rows, layer):
                with mode:
                    fake = op(*to_fakes(mode, args))
                assert metadata(fake) == metadata(op(*args)), op


def test_the_fake_backward_gives_gradients_like_the_inputs():
    with FakeTensorMode():
        inputs = [torch.empty(7, 48, dtype=torch.bfloat16), torch.empty(12, 48, 32).mT]
        grads = OPS.moe_backward_v1.default([torch.empty(7, 48)], inputs, "moe_v1")
    assert metadata(grads) == metadata(inputs)


# --- inputs and outputs ---------------------------------------------------------------------------------------------


@ANY_OPTION
@ANY_WAY
def test_outputs_alias_no_input_and_not_each_other(way, option, device):
    for T in (0, 1, 7):
        x, layer = make_layer(**{"T": T, "way": way, "device": device, **OPTIONS[option]})
        for op, args in every_call(x, layer):
            storages = [t.untyped_storage()._cdata for t in tensors(op(*args))]
            assert len(set(storages)) == len(storages), op
            assert not {t.untyped_storage()._cdata for t in tensors(args)} & set(storages), op


@pytest.mark.parametrize("schedule", checks.SCHEDULES)
@ANY_OPTION
@ANY_WAY
def test_inputs_are_neither_written_nor_moved(way, option, schedule, device):
    for T in (0, 1, 7):
        x, layer = make_layer(**{"T": T, "way": way, "device": device, "S": 64, **OPTIONS[option]})
        given = tensors_of(x, layer)
        before = {n: (t.data_ptr(), t.shape, t.stride(), t._version, t.clone()) for n, t in given.items()}
        dual_stream_moe(x, **layer, schedule=schedule)
        pieces = dual_stream_moe_unfinalized(x, **layer, schedule=schedule)
        held = {n: t.clone() for n, t in pieces._asdict().items() if t is not None}
        finalize(pieces, config=layer["config"], hidden_states=x)
        if way != "topk_ids":
            route(x, **routing_of(layer))
        for name, t in given.items():
            *place, values = before[name]
            assert [t.data_ptr(), t.shape, t.stride(), t._version] == place, name
            assert torch.equal(t, values), name
        assert all(torch.equal(getattr(pieces, name), t) for name, t in held.items())


def views(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values behind other strides and offsets; what lies between them is garbage."""
    garbage = float("nan") if t.is_floating_point() else 10**6
    flat = t.new_full((t.numel() + 3,), garbage)
    flat[3:] = t.flatten()
    yield "offset", flat[3:].view(t.shape)
    twice = t.new_full((2 * t.shape[0], *t.shape[1:]), garbage)
    twice[::2] = t
    yield "every second row", twice[::2]
    if t.dim() > 1:
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 24), garbage)
        wide[..., 16:-8] = t
        yield "row stride above the row's length", wide[..., 16:-8]
        yield "transposed", t.mT.contiguous().mT


@ANY_WAY
def test_strides_and_offsets_of_any_argument_change_nothing(way, device):
    parts = {"shared_gate": True, "expert_bias": True, "valid_tokens": 5, "E_global": 20, "config": ZERO_EXPERTS}
    routed = way != "topk_ids"
    x, layer = make_layer(way=way, device=device, correction_bias=routed, router_bias=way == "router_weight", **parts)
    expected = dual_stream_moe(x, **layer)
    assert_right(expected, x, layer)
    pieces = dual_stream_moe_unfinalized(x, **layer)
    for name, t in tensors_of(x, layer).items():
        for kind, view in views(t):
            assert torch.equal(view, t)
            arguments = {"hidden_states": x, **layer, name: view}
            assert error(dual_stream_moe(**arguments), expected) < 1e-6, (name, kind)
            assert dual_stream_moe(**arguments).is_contiguous(), (name, kind)
            if routed and name in ("hidden_states", *routing_of(layer)):
                ids, weights = route(arguments["hidden_states"], **routing_of(arguments))
                want_ids, want_weights = route(x, **routing_of(layer))
                assert torch.equal(ids, want_ids), (name, kind)
                assert error(weights, want_weights) < 1e-6, (name, kind)
    for name, t in pieces._asdict().items():
        for kind, view in views(t):
            out = finalize(pieces._replace(**{name: view}), config=layer["config"], hidden_states=x)
            assert torch.equal(out, expected), (name, kind)
    for kind, view in views(x):
        assert torch.equal(finalize(pieces, config=layer["config"], hidden_states=view), expected), kind


@ANY_WAY
def test_expanded_rows_and_values_count_once_for_each_row(way, device):
    x, layer = make_layer(way=way, device=device)
    for name in ("hidden_states", "router_logits", "topk_ids", "topk_weights"):
        given = {"hidden_states": x, **layer}
        if name in given:
            one_row = given[name][:1].expand_as(given[name])
            got = dual_stream_moe(**{**given, name: one_row})
            assert error(got, dual_stream_moe(**{**given, name: one_row.contiguous()})) < 1e-6, name
    for name in ("hidden_states", "topk_weights"):
        given = {"hidden_states": x, **layer}
        if name in given:
            one_value = given[name][:1, :1].expand_as(given[name])
            got = dual_stream_moe(**{**given, name: one_value})
            assert error(got, dual_stream_moe(**{**given, name: one_value.contiguous()})) < 1e-6, name


@ANY_WAY
def test_leading_dims_are_flattened_and_restored(way, device):
    flat, layer = make_layer(6, way=way, device=device)
    expected = dual_stream_moe(flat, **layer)
    for shape in ((2, 3), (1, 6), (6, 1), (3, 1, 2)):
        x = flat.view(*shape, -1)
        assert torch.equal(dual_stream_moe(x, **layer), expected.view(x.shape))
        pieces = dual_stream_moe_unfinalized(x, **layer)
        assert torch.equal(finalize(pieces, config=layer["config"], hidden_states=x), expected.view(x.shape))
        assert torch.equal(finalize(pieces, config=layer["config"]), expected)
    swapped = flat.view(2, 3, -1).transpose(0, 1).contiguous().transpose(0, 1)
    out = dual_stream_moe(swapped, **layer)
    assert out.is_contiguous()
    assert error(out, expected.view(out.shape)) < 1e-6


# --- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", checks.SCHEDULES)
@DTYPES
@ANY_WAY
def test_every_schedule_and_entry_is_the_layer(way, dtype, schedule, device):
    for T in (0, 1, 2, 65):
        for scale_on in ("weights", "output"):
            config = MoEConfig(top_k=3, routed_scaling_factor=2.5, scale_on=scale_on)
            x, layer = make_layer(T, way=way, dtype=dtype, device=device, S=64, config=config)
            assert_right(dual_stream_moe(x, **layer, schedule=schedule), x, layer)
            pieces = dual_stream_moe_unfinalized(x, **layer, schedule=schedule)
            assert_right(finalize(pieces, config=config), x, layer)


@ANY_OPTION
@ANY_WAY
def test_deferred_finalize_gives_the_bits_of_one_call(way, option, device):
    for T in (0, 1, 7):
        x, layer = make_layer(**{"T": T, "way": way, "device": device, **OPTIONS[option]})
        for schedule in ("serial", "dual", "dual_shared_main", "auto"):
            pieces = dual_stream_moe_unfinalized(x, **layer, schedule=schedule)
            assert (pieces.shared is None) == ("shared_w13" not in layer)
            out = finalize(pieces, config=layer["config"], hidden_states=x)
            assert torch.equal(out, dual_stream_moe(x, **layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["one call", "two calls"])
def test_the_end_is_summed_in_float32_and_rounded_once(apart, dtype, device):
    """Within half a unit in the last place of the exact sum of the stored rows: a second rounding would show."""
    config = MoEConfig(top_k=8, routed_scaling_factor=2.5, scale_on="output", combine="average")
    x, layer = make_layer(40, dtype=dtype, device=device, config=config)
    pieces = dual_stream_moe_unfinalized(x, **layer)
    terms = pieces.y[pieces.row_of.long()].double() * pieces.topk_weights.double().unsqueeze(-1) * 2.5
    terms = torch.cat([terms, pieces.shared.double().unsqueeze(1)], dim=1) * 0.5
    exact, of_float32 = terms.sum(1), terms.abs().sum(1) * 2**-21
    out = finalize(pieces, config=config) if apart else dual_stream_moe(x, **layer)
    info = torch.finfo(dtype)
    half_unit = exact.abs().clamp(min=info.smallest_normal).log2().floor().exp2() * info.eps / 2
    assert ((out.double() - exact).abs() <= half_unit + of_float32).all()
    assert pieces.topk_weights.dtype == torch.float32


@ANY_OPTION
@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_route_and_the_layer_choose_and_weigh_alike(way, option, device):
    x, layer = make_layer(**{"way": way, "device": device, "correction_bias": True, **OPTIONS[option]})
    ids, weights = route(x, **routing_of(layer))
    rest = {n: v for n, v in layer.items() if n == "config" or n not in routing_of(layer)}
    assert torch.equal(dual_stream_moe(x, **rest, topk_ids=ids, topk_weights=weights), dual_stream_moe(x, **layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_on", ["weights", "output"])
@ANY_WAY
def test_the_factor_is_applied_once(way, scale_on, dtype, device):
    """A factor of 2 doubles the routed sum bit for bit. Given weights are final: the output's factor alone acts."""
    x, layer = make_layer(way=way, dtype=dtype, device=device, S=0, config=MoEConfig(top_k=3))
    plain = dual_stream_moe(x, **layer)
    layer["config"] = MoEConfig(top_k=3, routed_scaling_factor=2.0, scale_on=scale_on)
    expected = plain if (way, scale_on) == ("topk_ids", "weights") else 2 * plain
    assert torch.equal(dual_stream_moe(x, **layer), expected)
    assert torch.equal(finalize(dual_stream_moe_unfinalized(x, **layer), config=layer["config"]), expected)


@DTYPES
@pytest.mark.parametrize("schedule", ["serial", "dual", "dual_shared_main", "auto"])
def test_the_shared_expert_is_added_once(schedule, dtype, device):
    x, layer = make_layer(dtype=dtype, device=device, shared_gate=True)
    layer["w2"].zero_()
    shared = dual_stream_moe_unfinalized(x, **layer, schedule=schedule).shared
    assert shared.abs().sum() > 0
    assert torch.equal(dual_stream_moe(x, **layer, schedule=schedule), shared)


@ANY_OPTION
def test_rows_from_num_valid_tokens_on_are_zeros_and_change_no_other(option, device):
    x, layer = make_layer(**{**OPTIONS[option], "device": device, "T": 7})
    for valid in (0, 1, 6, 7):
        layer["num_valid_tokens"] = torch.tensor([valid], dtype=torch.int32, device=device)
        out = dual_stream_moe(x, **layer)
        assert (out[valid:] == 0).all()
        layer["num_valid_tokens"] = None
        assert error(out[:valid], dual_stream_moe(x[:valid], **layer)) < TOLERANCE[x.dtype]


def test_padding_may_hold_anything(device):
    x, layer = make_layer(device=device, valid_tokens=4)
    expected = dual_stream_moe(x, **layer)
    for garbage in (float("nan"), float("inf"), 1e30):
        x[4:] = garbage
        assert torch.equal(dual_stream_moe(x, **layer), expected)


@ANY_WAY
def test_ranks_with_expert_maps_add_up_to_the_whole_layer(way, device):
    """18 experts on two ranks, at random rows of each; the shared expert and zero experts are on the first."""
    x, whole = make_layer(way=way, device=device, E=18, S=0)
    owner, parts = torch.randperm(18, device=device), []
    for mine in (owner[:7], owner[7:]):
        expert_map = torch.full((18,), -1, dtype=torch.int32, device=device)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32, device=device)
        rank = {**whole, "w13": whole["w13"][mine], "w2": whole["w2"][mine], "expert_map": expert_map}
        parts.append(dual_stream_moe(x, **rank))
        assert_right(parts[-1], x, rank)
    assert error(parts[0] + parts[1], dual_stream_moe(x, **whole)) < 1e-6


@pytest.mark.parametrize("expert_map", [False, True])
@pytest.mark.parametrize("zero_experts", [0, 2])
def test_an_id_of_no_expert_contributes_nothing(zero_experts, expert_map, device):
    config = MoEConfig(top_k=3, num_zero_experts=zero_experts)
    options = {"E_global": 20} if expert_map else {}
    x, layer = make_layer(way="topk_ids", device=device, config=config, **options)
    first_bad = (20 if expert_map else 12) + zero_experts
    for bad in (-1, -7, first_bad, 10**6, 2**31 - 1, -(2**31), 2**32 + 3, 2**40, -(2**63)):
        for dtype in (torch.int64, torch.int32):
            if dtype == torch.int32 and not -(2**31) <= bad < 2**31:
                continue
            ids = layer["topk_ids"].to(dtype)
            ids[1, 0] = ids[4, 2] = bad
            none = torch.zeros_like(ids, dtype=torch.bool)
            none[1, 0] = none[4, 2] = True
            out = dual_stream_moe(x, **{**layer, "topk_ids": ids})
            weights = layer["topk_weights"].masked_fill(none, 0.0)
            assert error(out, dual_stream_moe(x, **{**layer, "topk_weights": weights})) < 1e-6, bad
            pieces = dual_stream_moe_unfinalized(x, **{**layer, "topk_ids": ids})
            assert (pieces.topk_ids[none] == -1).all()
            assert (pieces.topk_weights[none] == 0).all()
            assert (pieces.row_of[none] == -1).all()


def test_a_bad_slot_may_have_any_weight(device):
    x, layer = make_layer(way="topk_ids", device=device)
    layer["topk_ids"][2, 1] = -1
    expected = dual_stream_moe(x, **layer)
    for weight in (float("nan"), float("inf")):
        layer["topk_weights"][2, 1] = weight
        assert torch.equal(dual_stream_moe(x, **layer), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_a_bad_row_changes_no_other_row(way, value, device):
    """Bit for bit on CUDA; within rounding on the CPU, where the number of an expert's rows chooses a matmul."""
    x, layer = make_layer(way=way, device=device, S=0)
    expected = dual_stream_moe(x, **layer)
    target = x if way == "router_weight" else layer["router_logits"]
    target[3] = value
    ids, weights = route(x, **routing_of(layer))
    assert sorted(set(ids[3].tolist())) == sorted(ids[3].tolist())
    assert 0 <= ids.min() <= ids.max() < 12
    assert torch.isfinite(weights).all()
    out, others = dual_stream_moe(x, **layer), [0, 1, 2, 4, 5, 6]
    assert error(out[others], expected[others]) < 1e-6
    if device == "cuda":
        assert torch.equal(out[others], expected[others])
    if way == "router_logits":
        assert torch.isfinite(out).all()


def test_two_threads_at_once_get_what_one_gets(device):
    layers = [make_layer(T, device=device) for T in (3, 33)]
    expected = [dual_stream_moe(x, **layer) for x, layer in layers]
    wrong: list[int] = []

    def work(i: int) -> None:
        x, layer = layers[i]
        for _ in range(20):
            if not torch.equal(dual_stream_moe(x, **layer), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@ANY_WAY
def test_autocast_changes_nothing(way, dtype, device):
    x, layer = make_layer(way=way, dtype=dtype, device=device, shared_gate=True)
    calls = list(every_call(x, layer))
    expected = [tensors(op(*args)) for op, args in calls]
    with torch.autocast(device, dtype=torch.bfloat16):
        found = [tensors(op(*args)) for op, args in calls]
    for want, got in zip(expected, found, strict=True):
        assert metadata(got) == metadata(want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@ANY_WAY
def test_modes_of_autograd_change_no_bit(way, device):
    x, layer = make_layer(way=way, device=device)
    expected = dual_stream_moe(x, **layer)
    layer["w13"].requires_grad_()
    layer["shared_w2"].requires_grad_()
    with torch.no_grad():
        out = dual_stream_moe(x, **layer)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    with torch.inference_mode():
        out = dual_stream_moe(x.clone(), **layer)
        assert out.is_inference()
    assert torch.equal(out, expected)
    with torch.enable_grad():
        out = dual_stream_moe(x, **layer)
    assert torch.equal(out, expected)
    assert out.requires_grad


NO_BACKWARD = re.escape(
    " has no backward. Call it under torch.no_grad() or torch.inference_mode(), or detach its inputs."
)


@ANY_WAY
def test_backward_is_refused_when_it_reaches_the_op(way, device):
    """And not before: people call models without no_grad."""
    x, layer = make_layer(way=way, device=device)
    for name, t in tensors_of(x, layer).items():
        if not t.is_floating_point():
            continue
        needy = {"hidden_states": x, **layer, name: t.clone().requires_grad_()}
        out = dual_stream_moe(**needy)
        with pytest.raises(NotImplementedError, match=f"^dsmoe::moe_v1{NO_BACKWARD}$"):
            (out * 2).sum().backward()
        pieces = dual_stream_moe_unfinalized(**needy)
        assert not pieces.topk_ids.requires_grad
        assert not pieces.row_of.requires_grad
        with pytest.raises(NotImplementedError, match=f"^dsmoe::moe_unfinalized_v1{NO_BACKWARD}$"):
            pieces.y.sum().backward()
        with pytest.raises(NotImplementedError, match=f"^dsmoe::finalize_v1{NO_BACKWARD}$"):
            finalize(pieces, config=layer["config"]).sum().backward()
        assert needy[name].grad is None


@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_backward_of_route_is_refused(way, device):
    x, layer = make_layer(way=way, device=device)
    layer[way].requires_grad_()
    ids, weights = route(x, **routing_of(layer))
    assert (ids.requires_grad, weights.requires_grad) == (False, True)
    with pytest.raises(NotImplementedError, match=f"^dsmoe::route_v1{NO_BACKWARD}$"):
        weights.sum().backward()


def test_the_call_stays_usable_after_a_refusal(device):
    x, layer = make_layer(device=device)
    expected = dual_stream_moe(x, **layer)
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            dual_stream_moe(x.clone().requires_grad_(), **layer).sum().backward()
        with pytest.raises(ValueError, match=r"^w2: "):
            dual_stream_moe(x, **{**layer, "w2": layer["w13"]})
        assert torch.equal(dual_stream_moe(x, **layer), expected)


def test_forward_mode_derivatives_are_refused(device):
    x, layer = make_layer(device=device)
    text = "has no forward-mode derivative$"
    with forward_ad.dual_level():
        for name in ("hidden_states", "w13", "router_weight", "shared_w2"):
            given = {"hidden_states": x, **layer}
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            with pytest.raises(NotImplementedError, match=text):
                dual_stream_moe(**{**given, name: dual})
        assert torch.equal(dual_stream_moe(x, **layer), dual_stream_moe(x, **layer))
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(lambda x: dual_stream_moe(x, **layer), (x,), (x,))


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian], ids=lambda f: f.__name__
)
def test_derivatives_of_torch_func_are_refused(transform, device):
    x, layer = make_layer(device=device)
    with pytest.raises(NotImplementedError, match=r"^dsmoe::moe_v1 has no (backward|forward-mode derivative)|vmap"):
        transform(lambda x: dual_stream_moe(x, **layer).sum())(x)


def test_vmap_is_refused_with_the_way_out(device):
    x, layer = make_layer((2, 7), device=device)
    calls = {
        "moe_v1": lambda x: dual_stream_moe(x, **layer),
        "moe_unfinalized_v1": lambda x: dual_stream_moe_unfinalized(x, **layer),
        "route_v1": lambda x: route(x, **routing_of(layer)),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"^dsmoe::{name} does not run under vmap.* leading dims"):
            torch.vmap(call)(x)
    dual_stream_moe(x, **layer)  # the way out


def test_functionalize_sees_a_functional_op(device):
    x, layer = make_layer(device=device)
    assert torch.equal(torch.func.functionalize(lambda x: dual_stream_moe(x, **layer))(x), dual_stream_moe(x, **layer))


def test_outputs_may_be_written_in_place(device):
    """Autograd refuses that for a view, even of a tensor that nobody else has."""
    x, layer = make_layer((2, 4), device=device, shared_gate=True)
    weight = torch.nn.Parameter(torch.ones(x.shape[-1], device=device))
    with torch.no_grad():
        outs = (dual_stream_moe(x, **layer), *dual_stream_moe_unfinalized(x, **layer))
    assert not any(out._is_view() for out in outs if out is not None)
    outs[0].mul_(weight)
    dual_stream_moe(x, **layer | {"w2": layer["w2"].requires_grad_()}).add_(1)


def test_a_slot_without_a_row_may_have_any_weight_in_finalize(device):
    x, layer = make_layer(device=device)
    pieces = dual_stream_moe_unfinalized(x, **layer)
    empty = torch.zeros_like(pieces.row_of, dtype=torch.bool)
    empty[2, 1] = empty[4] = True
    row_of = pieces.row_of.masked_fill(empty, -1)
    ids = pieces.topk_ids.masked_fill(empty, -1)
    outs = [
        finalize(
            pieces._replace(row_of=row_of, topk_ids=ids, topk_weights=pieces.topk_weights.masked_fill(empty, value)),
            config=layer["config"],
        )
        for value in (0.0, math.nan)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["hidden_states", "w13", "num_valid_tokens", "topk_ids"])
def test_what_is_no_tensor_is_refused_by_name(name):
    x, layer = make_layer()
    given = {"hidden_states": x, **layer, name: 3}
    for call in (dual_stream_moe, dual_stream_moe_unfinalized):
        with pytest.raises(ValueError, match=f"{name}: expected a tensor, got int"):
            call(given["hidden_states"], **{k: v for k, v in given.items() if k != "hidden_states"})
