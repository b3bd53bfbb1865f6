"""Bad input is refused before any launch, in one text: eager, on fake tensors, and inside what the compiler raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import WAYS, make_layer, moe_args, route_args, routing_of, tensors_of
from refusals import bad, refused, split
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsmoe_op
from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, route
from dsmoe_op.checks import LAYER_FIELDS

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_launch")
QUANTISATION = [
    *("w13_scale", "w2_scale", "shared_w13_scale", "shared_w2_scale"),
    *("w13_zero_point", "w2_zero_point", "shared_w13_zero_point", "shared_w2_zero_point"),
    *("w13_global_scale", "w2_global_scale", "shared_w13_global_scale", "shared_w2_global_scale"),
    *("w13_input_scale", "w2_input_scale", "shared_w13_input_scale", "shared_w2_input_scale"),
]


def knobs(**fields: Any) -> MoEConfig:
    return MoEConfig(**{"top_k": 3, **fields})


def no_unit_stride(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


ONE_WAY = "router_weight, router_logits, topk_ids: expected exactly one of these ways in, got"
UNIT_STRIDE = "expected a unit stride in one of the last two dims (repack with .contiguous()), got strides"

# Sizes: T=7, H=48, E=12, K=3, I=32, S=80.
CASES = [
    # hidden_states
    bad("hidden_states: expected bfloat16 or float16 or float32, got float64", lambda t: t.double()),
    bad("hidden_states: expected bfloat16 or float16 or float32, got int64", lambda t: t.long()),
    bad("hidden_states: expected [..., H] with H at least 1, got []", lambda t: t[0, 0]),
    bad("hidden_states: expected [..., H] with H at least 1, got [7, 0]", lambda t: t[:, :0]),
    # w13, w2 and their biases
    bad("w13: expected [E=12, 2I=64, H=40], got [12, 64, 48]", {"hidden_states": lambda t: t[:, :40]}),
    bad("w13: expected 3 dims [E, 2I, H=48], got [64, 48]", lambda t: t[0]),
    bad("w13: expected 3 dims [E, I, H=48], got [32, 48]", lambda t: t[0], config=knobs(activation="relu2")),
    bad("w13: expected an even number of gate and up rows [E, 2I, H=48], got [12, 63, 48]", lambda t: t[:, 1:]),
    bad("w13: expected at least one row an expert, got [12, 0, 48]", lambda t: t[:, :0]),
    bad("w13: expected 1..1024 experts, got [0, 64, 48]", lambda t: t[:0]),
    bad("w13: expected 1..1024 experts, got [1025, 64, 48]", lambda t: t[:1].expand(1025, -1, -1)),
    bad("w13: expected [E=12, 2I=64, H=48], got [12, 64, 47]", lambda t: t[..., :47]),
    bad("w13: expected float32, got bfloat16", lambda t: t.bfloat16()),
    bad(
        "w13: expected float32 as hidden_states has, or a routed_format that tells what it is, got float8_e4m3fn",
        lambda t: t.to(torch.float8_e4m3fn),
    ),
    bad(
        "w13: expected float32 as hidden_states has, or a routed_format that tells what it is, got uint8",
        lambda t: t.byte(),
    ),
    bad(f"w13: {UNIT_STRIDE} [6144, 96, 2]", no_unit_stride),
    bad("w2: expected [E=12, H=48, I=32], got [12, 32, 48]", lambda t: t.mT),
    bad("w2: expected [E=12, H=48, I=32], got [11, 48, 32]", lambda t: t[1:]),
    bad("w2: expected [E=12, H=48, I=32], got [48, 32]", lambda t: t[0]),
    bad("w2: expected float32, got float16", lambda t: t.half()),
    bad(
        "w2: expected float32 as hidden_states has, or a routed_format that tells what it is, got int8",
        lambda t: t.char(),
    ),
    bad(f"w2: {UNIT_STRIDE} [3072, 64, 2]", no_unit_stride),
    bad("w13_bias: expected [E=12, 2I=64], got [12, 32]", lambda t: t[:, :32], expert_bias=True),
    bad("w13_bias: expected float32, got float16", lambda t: t.half(), expert_bias=True),
    bad(
        "w13_bias: expected bfloat16 or float32, got float16",
        lambda t: t.half(),
        expert_bias=True,
        dtype=torch.bfloat16,
    ),
    bad("w2_bias: expected [E=12, H=48], got [48]", lambda t: t[0], expert_bias=True),
    # the ways in
    bad(
        f"{ONE_WAY} none of them",
        {"router_weight": None},
    ),
    bad(
        f"{ONE_WAY} router_weight and router_logits",
        {"router_logits": torch.randn(7, 12)},
    ),
    bad(
        f"{ONE_WAY} router_weight and topk_ids",
        {"router_weight": torch.randn(12, 48)},
        way="topk_ids",
    ),
    bad(
        f"{ONE_WAY} router_logits and topk_ids",
        {"router_logits": torch.randn(7, 12)},
        way="topk_ids",
    ),
    bad(
        f"{ONE_WAY} router_weight and router_logits and topk_ids",
        {"router_logits": torch.randn(7, 12), "router_weight": torch.randn(12, 48)},
        way="topk_ids",
    ),
    bad("topk_weights: expected topk_ids and topk_weights together, got None", {"topk_weights": None}, way="topk_ids"),
    bad("topk_ids: expected topk_ids and topk_weights together, got None", {"topk_ids": None}, way="topk_ids"),
    bad("topk_ids: expected topk_ids and topk_weights together, got None", {"topk_weights": torch.rand(7, 3)}),
    # the router's tensors
    bad("router_weight: expected [E=12, H=48], got [13, 48]", {"router_weight": torch.randn(13, 48)}),
    bad("router_weight: expected [E=14, H=48], got [12, 48]", lambda t: t[2:], config=knobs(num_zero_experts=2)),
    bad("router_weight: expected [E=20, H=48], got [12, 48]", lambda t: t[:12], E_global=20),
    bad("router_weight: expected [E=12, H=48], got [48]", lambda t: t[0]),
    bad("router_weight: expected bfloat16 or float16 or float32, got float64", lambda t: t.double()),
    bad(f"router_weight: {UNIT_STRIDE} [96, 2]", no_unit_stride),
    bad("router_bias: expected [E=12], got [1, 12]", lambda t: t[None], router_bias=True),
    bad("router_bias: expected bfloat16 or float16 or float32, got int64", lambda t: t.long(), router_bias=True),
    bad(
        "router_bias: expected None beside router_logits, got a tensor",
        {"router_bias": torch.randn(12)},
        way="router_logits",
    ),
    bad("router_bias: expected None beside topk_ids, got a tensor", {"router_bias": torch.randn(12)}, way="topk_ids"),
    bad("correction_bias: expected [E=12], got [11]", lambda t: t[1:], correction_bias=True),
    bad(
        "correction_bias: expected [E=14], got [12]",
        lambda t: t[2:],
        correction_bias=True,
        config=knobs(num_zero_experts=2),
    ),
    bad("correction_bias: expected bfloat16 or float16 or float32, got int32", lambda t: t.int(), correction_bias=True),
    bad(
        "correction_bias: expected None beside topk_ids, got a tensor",
        {"correction_bias": torch.randn(12)},
        way="topk_ids",
    ),
    bad("router_logits: expected [T=7, E=12], got [8, 12]", {"router_logits": torch.randn(8, 12)}, way="router_logits"),
    bad("router_logits: expected [T=7, E=12], got [7, 11]", lambda t: t[:, 1:], way="router_logits"),
    bad(
        "router_logits: expected [T=6, E=12], got [2, 3, 12]", lambda t: t.view(2, 3, 12), way="router_logits", T=(2, 3)
    ),
    bad(
        "router_logits: expected bfloat16 or float16 or float32, got float64", lambda t: t.double(), way="router_logits"
    ),
    bad("topk_ids: expected [T=7, K=3], got [7, 2]", lambda t: t[:, 1:], way="topk_ids"),
    bad("topk_ids: expected [T=7, K=3], got [6, 3]", lambda t: t[1:], way="topk_ids"),
    bad("topk_ids: expected int32 or int64, got int16", lambda t: t.short(), way="topk_ids"),
    bad("topk_ids: expected int32 or int64, got float32", lambda t: t.float(), way="topk_ids"),
    bad("topk_weights: expected [T=7, K=3], got [7, 2]", lambda t: t[:, 1:], way="topk_ids"),
    bad("topk_weights: expected bfloat16 or float16 or float32, got int32", lambda t: t.int(), way="topk_ids"),
    # the choice
    bad("top_k: expected at most the 12 experts that the router knows, got 13", {"config": MoEConfig(top_k=13)}),
    bad("n_group: expected a divisor of the 12 experts, got 5", {"config": knobs(n_group=5, topk_group=2)}),
    bad(
        "n_group: expected groups of at least 2 experts for 'top2_sum', got 12 of 12",
        {"config": knobs(n_group=12, topk_group=4)},
    ),
    bad(
        "top_k: expected at most the 4 experts of topk_group=2 groups, got 5",
        {"config": MoEConfig(top_k=5, n_group=6, topk_group=2)},
    ),
    # the shared expert
    bad("shared_w2: expected shared_w13 and shared_w2 together, got None", {"shared_w2": None}),
    bad("shared_w13: expected shared_w13 and shared_w2 together, got None", {"shared_w13": None}),
    bad("shared_gate: expected None without shared_w13, got a tensor", {"shared_gate": torch.randn(1, 48)}, S=0),
    bad("shared_gate: expected [1, H=48], got [48]", lambda t: t[0], shared_gate=True),
    bad("shared_gate: expected float32, got float16", lambda t: t.half(), shared_gate=True),
    bad("shared_w13: expected [2S, H=48] with 2S above 0, got [159, 48]", lambda t: t[1:]),
    bad("shared_w13: expected [2S, H=48] with 2S above 0, got [0, 48]", lambda t: t[:0]),
    bad("shared_w13: expected [S, H=48] with S above 0, got [48]", lambda t: t[0], config=knobs(activation="relu2")),
    bad("shared_w13: expected [2S=160, H=48], got [160, 47]", lambda t: t[:, 1:]),
    bad("shared_w13: expected float32, got bfloat16", lambda t: t.bfloat16()),
    bad("shared_w2: expected [H=48, S=80], got [80, 48]", lambda t: t.mT),
    bad(
        "shared_w2: expected float32 as hidden_states has, or a shared_format that tells what it is, got float8_e5m2",
        lambda t: t.to(torch.float8_e5m2),
    ),
    bad(f"shared_w2: {UNIT_STRIDE} [160, 2]", no_unit_stride),
    # num_valid_tokens and expert_map
    bad("num_valid_tokens: expected int32, got int64", lambda t: t.long(), valid_tokens=5),
    bad("num_valid_tokens: expected [1], got []", lambda t: t[0], valid_tokens=5),
    bad("num_valid_tokens: expected [1], got [2]", lambda t: t.repeat(2), valid_tokens=5),
    bad("expert_map: expected int32, got int64", lambda t: t.long(), E_global=20),
    bad("expert_map: expected [E_global], got [1, 20]", lambda t: t[None], E_global=20),
    bad("expert_map: expected 1..1024 entries, got [0]", lambda t: t[:0], E_global=20),
    bad("expert_map: expected 1..1024 entries, got [1025]", lambda t: t[:1].expand(1025), E_global=20),
    # what is no tensor
    bad(
        "schedule: expected one of 'auto', 'serial', 'dual', 'dual_shared_main', 'fused', got 'both'",
        {"schedule": "both"},
    ),
    bad("schedule: 'fused' expects S to be a multiple of I, got S=80, I=32", {"schedule": "fused"}),
    bad("config: expected a MoEConfig, got dict", {"config": {"top_k": 3}}),
    bad("config: expected a MoEConfig, got str", {"config": '{"top_k":3}'}),
]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_of_dual_stream_moe_is_refused(case):
    x, layer = make_layer(**case.layer)
    tensors, others = split(case.spoil({"hidden_states": x, **layer}))
    refused(case.text, dual_stream_moe, tensors, **others)


def whole_layers() -> list[tuple[Tensor, dict[str, Any]]]:
    """Layers that together have every tensor argument."""
    parts = {"shared_gate": True, "expert_bias": True, "valid_tokens": 5, "E_global": 20}
    return [
        make_layer(way="router_weight", router_bias=True, correction_bias=True, **parts),
        make_layer(way="router_logits", correction_bias=True, **parts),
        make_layer(way="topk_ids", **parts),
    ]


def test_whole_layers_have_every_argument():
    assert {name for x, layer in whole_layers() for name in tensors_of(x, layer)} == set(LAYER_FIELDS[:16])


BREAKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dtype": (lambda t: t.to(torch.complex64), "expected {dtypes}, got complex64"),
    "device": (lambda t: t.to("meta"), "expected device cpu, got meta"),
    "one dim more": (lambda t: t.unsqueeze(0), "expected {dims}, got {shape}"),
}


@pytest.mark.parametrize("breakage", BREAKS)
@pytest.mark.parametrize("call", [dual_stream_moe, dual_stream_moe_unfinalized], ids=lambda call: call.__name__)
def test_every_argument_is_checked_and_named(breakage, call):
    change, pattern = BREAKS[breakage]
    pattern = re.escape(pattern).replace(r"\{dtypes\}", "[a-z]+[0-9]+.*")
    pattern = pattern.replace(r"\{dims\}", r"(3 dims )?\[.+\]( with .+)?").replace(r"\{shape\}", r"\[1, .*\]")
    for x, layer in whole_layers():
        for name, tensor in tensors_of(x, layer).items():
            if name == "hidden_states" and breakage != "dtype":
                continue  # it may have any leading dims, and it is the device that the others are held to
            arguments = {**tensors_of(x, layer), name: change(tensor)}
            with pytest.raises(ValueError, match=f"^{name}: {pattern}$"):
                call(**arguments, config=layer["config"])


@pytest.mark.parametrize("grow", [1, -1])
def test_no_size_of_any_argument_can_be_off_by_one(grow):
    """Whichever argument is named, the text shows the shapes that do not fit."""
    for x, layer in whole_layers():
        for name, tensor in tensors_of(x, layer).items():
            for dim, size in enumerate(tensor.shape):
                if (name, dim) == ("hidden_states", 0) and "router_weight" in layer:
                    continue  # nothing else has T rows
                if name == "expert_map" and "topk_ids" in layer:
                    continue  # nothing else has a row for each global expert
                shape = list(tensor.shape)
                shape[dim] = size + grow
                arguments = {**tensors_of(x, layer), name: torch.zeros(shape, dtype=tensor.dtype)}
                with pytest.raises(ValueError, match=r"^\w+: expected .+, got .*\[.*\]$") as e:
                    dual_stream_moe(**arguments, config=layer["config"])
                named = str(e.value).partition(":")[0]
                assert named == name or name in (
                    "hidden_states",
                    "w13",
                    "shared_w13",
                    "router_weight",
                    "router_logits",
                    "expert_map",
                )


@pytest.mark.parametrize("name", QUANTISATION)
def test_a_tensor_of_a_quantised_weight_is_refused_without_a_format(name):
    x, layer = make_layer()
    field = "shared_format" if name.startswith("shared_") else "routed_format"
    tensors, others = split({"hidden_states": x, **layer, name: torch.ones(12)})
    refused(f"{name}: expected None with {field}=None, got a tensor", dual_stream_moe, tensors, **others)


def test_the_schema_has_every_tensor_of_quantised_weights():
    assert list(LAYER_FIELDS[16:]) == QUANTISATION


def test_a_config_string_that_is_none_is_refused_by_the_ops():
    x, layer = make_layer()
    args = list(moe_args(x, layer))
    args[16] = "fast"
    for op in (torch.ops.dsmoe.moe_v1.default, torch.ops.dsmoe.moe_unfinalized_v1.default):
        with pytest.raises(ValueError, match=r"^config: expected the key of a MoEConfig, got 'fast'$"):
            op(*args)
    with pytest.raises(ValueError, match=r"^config: expected the key of a MoEConfig, got 'fast'$"):
        torch.ops.dsmoe.route_v1.default(*route_args(x, layer)[:-1], "fast")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"H": 40}, "hidden_states: expected H to be a multiple of 16 on CUDA, got 40"),
        ({"I": 40}, "w13: expected I to be a multiple of 16 on CUDA, got 40"),
        ({"S": 40}, "shared_w13: expected S to be a multiple of 16 on CUDA, got 40"),
    ],
    ids=["H", "I", "S"],
)
def test_sizes_that_cuda_does_not_take_are_refused_there_alone(monkeypatch, way, option, text):
    x, layer = make_layer(way=way, **option)
    with FakeTensorMode():
        fakes = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for n, t in tensors_of(x, layer).items()
        }
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            dual_stream_moe(**fakes, config=layer["config"])
    monkeypatch.undo()
    assert dual_stream_moe(x, **layer).shape == x.shape


@pytest.mark.parametrize("name", ["w13", "router_weight", "num_valid_tokens", "shared_w2"])
def test_a_tensor_left_on_the_cpu_is_refused(name):
    x, layer = make_layer(valid_tokens=3)
    with FakeTensorMode():
        fakes = {
            n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu" if n == name else "cuda")
            for n, t in tensors_of(x, layer).items()
        }
        text = f"{name}: expected device cuda:0, got cpu"
        with pytest.raises(ValueError, match=f"^{text}$"):
            dual_stream_moe(**fakes, config=layer["config"])


def test_a_tensor_left_on_the_cpu_is_refused_on_a_real_gpu(device):
    x, layer = make_layer(device=device, valid_tokens=3)
    other, names = "meta" if device == "cpu" else "cpu", ("w13", "router_weight", "num_valid_tokens", "shared_w2")
    for name in names:
        arguments = {**tensors_of(x, layer), name: layer[name].to(other)}
        with pytest.raises(ValueError, match=f"^{name}: expected device {x.device}, got {other}$"):
            dual_stream_moe(**arguments, config=layer["config"])


ROUTE_CASES = [
    bad(
        "hidden_states: expected a tensor, or router_logits in its place, got None",
        {"hidden_states": None, "router_weight": None},
    ),
    bad(
        "hidden_states: expected a tensor beside router_weight, got None",
        {"hidden_states": None, "router_logits": torch.randn(7, 12)},
    ),
    bad(
        "router_weight, router_logits: expected exactly one of these ways in, got none of them", {"router_weight": None}
    ),
    bad(
        "router_weight, router_logits: expected exactly one of these ways in, got router_weight and router_logits",
        {"router_logits": torch.randn(7, 12)},
    ),
    bad("router_weight: expected [E, H=48], got [12, 47]", lambda t: t[:, 1:]),
    bad("router_weight: expected 1..1024 routed experts, got 1025 logits a row", lambda t: t[:1].expand(1025, 48)),
    bad(
        "router_weight: expected 1..1024 routed experts, got 3 logits a row",
        lambda t: t[:3],
        config=knobs(num_zero_experts=3),
    ),
    bad("router_logits: expected [T=7, E], got [6, 12]", lambda t: t[1:], way="router_logits"),
    bad("router_logits: expected [T=7, E], got [7]", lambda t: t[:, 0], way="router_logits"),
    bad("correction_bias: expected [E=12], got [13]", {"correction_bias": torch.randn(13)}),
    bad("top_k: expected at most the 2 experts that the router knows, got 3", {"router_weight": lambda t: t[:2]}),
    bad("n_group: expected a divisor of the 12 experts, got 5", {"config": knobs(n_group=5, topk_group=2)}),
    bad("config: expected a MoEConfig, got NoneType", {"config": None}),
]


@pytest.mark.parametrize("case", ROUTE_CASES)
def test_a_bad_argument_of_route_is_refused(case):
    x, layer = make_layer(**case.layer)
    tensors, others = split(case.spoil({"hidden_states": x, **routing_of(layer)}))
    refused(case.text, route, tensors, **others)


FINALIZE_CASES = [
    bad("y: expected 2 dims [N, H], got [21]", lambda t: t[:, 0]),
    bad("y: expected [N=21, H=48], got [20, 48]", lambda t: t[1:]),
    bad("y: expected bfloat16 or float16 or float32, got float64", lambda t: t.double()),
    bad("topk_ids: expected 2 dims [T, K=3], got [21]", lambda t: t.flatten()),
    bad("topk_ids: expected [T=7, K=3], got [7, 2]", lambda t: t[:, 1:]),
    bad("topk_ids: expected int32, got int64", lambda t: t.long()),
    bad("topk_weights: expected float32, got bfloat16", lambda t: t.bfloat16()),
    bad("topk_weights: expected [T=7, K=3], got [6, 3]", lambda t: t[1:]),
    bad("row_of: expected [T=7, K=3], got [6, 3]", lambda t: t[1:]),
    bad("row_of: expected int32, got int64", lambda t: t.long()),
    bad("shared: expected [T=7, H=48], got [6, 48]", lambda t: t[1:]),
    bad("shared: expected float32, got bfloat16", lambda t: t.bfloat16()),
    bad("hidden_states: expected [T=7, H=48], got [6, 48]", lambda t: t[1:]),
    bad("hidden_states: expected [T=7, H=48], got [7, 47]", lambda t: t[:, 1:]),
    bad("hidden_states: expected [..., H=48], got []", lambda t: t[0, 0]),
    bad("hidden_states: expected float32, got bfloat16", lambda t: t.bfloat16()),
    bad(
        "hidden_states: expected a tensor, since the config has zero experts, got None",
        {"hidden_states": None, "config": knobs(num_zero_experts=2)},
    ),
    bad("topk_ids: expected device meta, got cpu", {"y": lambda t: t.to("meta")}),
    bad("shared: expected device cpu, got meta", lambda t: t.to("meta")),
    bad("config: expected a MoEConfig, got NoneType", {"config": None}),
]


@pytest.mark.parametrize("case", FINALIZE_CASES)
def test_a_bad_argument_of_finalize_is_refused(case):
    good = {
        "y": torch.randn(21, 48),
        "topk_ids": torch.zeros(7, 3, dtype=torch.int32),
        "topk_weights": torch.rand(7, 3),
        "row_of": torch.arange(21, dtype=torch.int32).view(7, 3),
        "shared": torch.randn(7, 48),
        "hidden_states": torch.randn(7, 48),
        "config": MoEConfig(top_k=3),
    }
    tensors, others = split(case.spoil(good))

    def call(hidden_states: Tensor | None = None, *, config: MoEConfig, **pieces: Tensor) -> Tensor:
        return finalize(dsmoe_op.Unfinalized(**pieces), config=config, hidden_states=hidden_states)

    refused(case.text, call, tensors, **others)
