"""`bench --against` of servers' layers, on stand-ins for their packages: what they are given, and what is left out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import fake_servers
import pytest
import torch
from fake_servers import MOE

from dsmoe_op import MoEConfig
from dsmoe_op.cli import arguments as types
from dsmoe_op.cli import bench, cell, main, peers, serving_peers, shapes, timing
from dsmoe_op.cli.problem import Answers, Problem
from dsmoe_op.cli.shapes import SHAPES, Ceilings, Shape, parse_shape

pytest.importorskip("triton", reason="triton_kernels takes a function of Triton")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LIMITS = Ceilings(bandwidth=1e10, flops={"bf16": 1e11, "fp32": 1e11})
SIZES: dict[str, Any] = {"H": 256, "I": 128, "E": 12, "K": 3, "S": 384}


def _shape(name: str, **other: Any) -> Shape:
    """The router of a shape of SHAPES, small: three pieces of a shared expert, four groups of three experts."""
    shape = SHAPES[name]
    groups = {"n_group": 4, "topk_group": 2} if shape.config.n_group else {}
    config = dataclasses.replace(shape.config, top_k=3, **groups)
    return dataclasses.replace(shape, config=config, **(SIZES | other))


def _quantised(shape: Shape, format: str | None) -> Shape:
    return shape if format is None else shapes.quantised(shape, types.formats(format))


def _several_copies(shape: Shape) -> Problem:
    """Two copies of the routed experts and three of the others, as on a GPU."""
    made, *more = (Problem(shape, "bf16", CPU, seed) for seed in (5, 6, 7))
    made.routed += more[0].routed
    made.others += more[0].others + more[1].others
    for other in more:
        made._quantised |= other._quantised
    made.kept_alive = more  # type: ignore[attr-defined] # ids of tensors are keys
    made.routed_copies, made.copies = 2, 3
    return made


@pytest.fixture(autouse=True)
def _servers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_servers.install(monkeypatch)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 3)


class Streams:
    """Stand-ins for torch's, which write down what is forked and joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.main = self.Stream(self, "main")
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: self.Stream(self, "alt"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    class Stream:
        def __init__(self, streams: Streams, name: str) -> None:
            self.streams, self.name = streams, name

        def wait_stream(self, other: Any) -> None:
            self.streams.events.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            self.streams.current = self

        def __exit__(self, *error: Any) -> None:
            self.streams.current = self.streams.main


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def _candidates(name: str, made: Problem, T: int = 5) -> dict[str, Any]:
    return {c.name: c for c in serving_peers.candidates(name, made, T)}


# --- what is computed -----------------------------------------------------------------------------------------------

ROUTERS = ("dsv3", "qwen3next", "v2lite", "dsv2", "glm45")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", ["vllm", "sglang", "triton_kernels"])
def test_servers_layers_compute_with_each_copy_of_the_weights(router: str, name: str, streams: Streams) -> None:
    _is_right(name, _several_copies(_shape(router)), without=router == "dsv2" and name == "sglang")


@pytest.mark.parametrize("format", ["fp8_block", "fp8_block+none", "none+fp8_block"])
@pytest.mark.parametrize("name", ["vllm", "sglang", "triton_kernels", "deepgemm"])
def test_in_fp8_they_compute_with_the_ops_weights(format: str, name: str, streams: Streams) -> None:
    routed_is_fp8 = format.startswith("fp8")
    without = routed_is_fp8 if name == "triton_kernels" else not routed_is_fp8 and name == "deepgemm"
    _is_right(name, _several_copies(_quantised(_shape("dsv3"), format)), without=without)


def _is_right(name: str, made: Problem, *, without: bool) -> None:
    inputs = made.inputs(5)
    answers = Answers(made, inputs)
    assert {(i % 2, i % 3) for i in answers.inputs} >= {(0, 0), (0, 2), (1, 0)}
    timed = [c for c in serving_peers.candidates(name, made, 5) if c.left_out is None]
    assert bool(timed) != without
    assert [c.name for c in timed][1:2] == ([] if without else [f"{name} two streams"])
    for candidate in timed:
        layer = candidate.build()
        for i in answers.inputs:
            before = inputs[i].clone()
            out = layer(inputs[i], made.at(i))
            assert (out.dtype, out.shape) == (torch.bfloat16, inputs[i].shape)
            assert answers.error(i, out) < answers.limit, (candidate.name, i)
            assert torch.equal(inputs[i], before)


@pytest.mark.parametrize("format", [None, "fp8_block"])
def test_the_shared_expert_is_fused_as_further_experts_where_the_peer_can(format: str | None) -> None:
    made = _several_copies(_quantised(_shape("dsv3"), format))
    fused = {name for name in serving_peers.PEERS if f"{name} fused" in _candidates(name, made)}
    assert fused == ({"sglang", "triton_kernels"} if format is None else {"sglang"})
    weights = serving_peers.fused_weights(made, 5)
    assert len(weights) == 6
    w = made.at(4)
    its, given = weights[id(w.w13), id(w.shared_w13)], made.tensors(w)
    assert its["w13"].shape == (15, 256, 256)
    assert torch.equal(its["w13"][:12].float(), given["w13"].float())
    middle = torch.cat([given["shared_w13"][128:256], given["shared_w13"][384 + 128 : 384 + 256]])
    assert torch.equal(its["w13"][13].float(), middle.float())
    assert torch.equal(its["w2"][13].float(), given["shared_w2"][:, 128:256].float())


def test_without_a_shared_expert_there_is_one_candidate_which_is_right() -> None:
    made = Problem(_shape("glm45", S=0), "bf16", CPU, seed=5)
    inputs = made.inputs(5)
    answers = Answers(made, inputs)
    for name in ("vllm", "sglang", "triton_kernels"):
        ((only, candidate),) = _candidates(name, made).items()
        assert only == name
        assert answers.error(0, candidate.build()(inputs[0], made.at(0))) < answers.limit


def test_on_two_streams_the_shared_expert_is_on_the_side_between_fork_and_join(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    silu, experts = torch.ops._C.silu_and_mul, sys.modules[f"{MOE}.fused_moe"].fused_experts_impl

    def noted(what: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            streams.events.append(f"{what} on {streams.current.name}")
            return function(*given, **named)

        return call

    monkeypatch.setattr(torch.ops._C, "silu_and_mul", noted("shared", silu))
    monkeypatch.setattr(sys.modules[f"{MOE}.fused_moe"], "fused_experts_impl", noted("routed", experts))
    made = Problem(_shape("dsv3"), "bf16", CPU, seed=5)
    found = _candidates("vllm", made)
    x = made.inputs(5)[0]
    found["vllm two streams"].build()(x, made.at(0))
    expected = ["alt waits for main", "shared on alt", "routed on main", "main waits for alt"]
    assert streams.events == expected
    streams.events.clear()
    found["vllm"].build()(x, made.at(0))
    assert streams.events == ["routed on main", "shared on main"]


def test_vllms_shared_expert_is_without_deepgemm_where_vllm_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    deep_gemm = sys.modules["vllm.utils.deep_gemm"]
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_supported", lambda: False)
    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", None)
    made = Problem(_quantised(_shape("dsv3"), "fp8_block"), "bf16", CPU, seed=5)
    inputs = made.inputs(5)
    answers = Answers(made, inputs)
    out = _candidates("vllm", made)["vllm"].build()(inputs[0], made.at(0))
    assert answers.error(0, out) < answers.limit


def test_triton_kernels_of_triton_3_5_take_the_activation_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    library = sys.modules["triton_kernels.matmul_ogs"]
    monkeypatch.setattr(library, "FnSpecs", fake_servers.FnSpecsOf35)
    monkeypatch.setattr(library, "FusedActivation", fake_servers.FusedActivationOf35)
    made = Problem(_shape("dsv3"), "bf16", CPU, seed=5)
    inputs = made.inputs(5)
    answers = Answers(made, inputs)
    out = _candidates("triton_kernels", made)["triton_kernels"].build()(inputs[0], made.at(0))
    assert answers.error(0, out) < answers.limit


def test_the_activation_for_triton_kernels_is_silu_of_the_first_of_each_pair_times_the_second(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    code = """
import torch, triton, triton.language as tl
from dsmoe_op.cli.probes import silu_and_mul
@triton.jit
def kernel(x, out, beta, M: tl.constexpr, N: tl.constexpr):
    rows, columns, half = tl.arange(0, M)[:, None], tl.arange(0, 2 * N)[None, :], tl.arange(0, N)[None, :]
    tl.store(out + rows * N + half, silu_and_mul(tl.load(x + rows * 2 * N + columns), beta))
x, out = torch.randn(4, 16), torch.zeros(4, 8)
kernel[(1,)](x, out, 1.0, 4, 8)
torch.testing.assert_close(out, torch.nn.functional.silu(x[:, 0::2]) * x[:, 1::2])
"""
    path = tmp_path / "silu.py"
    path.write_text(code)  # Triton reads a kernel's source from its file
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# --- what is wrong or fails is seen ---------------------------------------------------------------------------------


def _rows(name: str, made: Problem) -> dict[str, cell.Row]:
    found = cell.measure(made, 5, ["auto"], [name, "eager"], LIMITS, 0.0)
    return {row.candidate: row for row in found.rows}


def test_up_rows_before_gate_rows_are_shown_as_wrong(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    module = sys.modules[f"{MOE}.fused_moe"]
    right = module.fused_experts_impl

    def other_order(x: Any, w13: Any, *given: Any, **named: Any) -> Any:
        return right(x, torch.cat(w13.chunk(2, 1)[::-1], 1), *given, **named)

    monkeypatch.setattr(module, "fused_experts_impl", other_order)
    rows = _rows("vllm", Problem(_shape("dsv3"), "bf16", CPU, seed=5))
    assert {name: row.status for name, row in rows.items()} == {
        "dsmoe_op auto": "ok",
        "vllm": "WRONG",
        "vllm two streams": "WRONG",
        "eager": "ok",
    }
    assert all(row.time is not None for row in rows.values())


@pytest.mark.parametrize("in_build", [True, False])
def test_another_versions_interface_fails_with_its_text_and_the_others_go_on(
    in_build: bool, monkeypatch: pytest.MonkeyPatch, streams: Streams
) -> None:
    module = sys.modules["sglang.kernels.ops.moe.moe_fused_gate"]
    if in_build:
        monkeypatch.delattr(module, "moe_fused_gate")
    else:

        def changed(*given: Any) -> None: ...

        monkeypatch.setattr(module, "moe_fused_gate", changed)
    rows = _rows("sglang", Problem(_shape("dsv3"), "bf16", CPU, seed=5))
    assert {name: row.status for name, row in rows.items()} == {
        "dsmoe_op auto": "ok",
        "sglang": "FAILED",
        "sglang two streams": "FAILED",
        "sglang fused": "FAILED",
        "eager": "ok",
    }
    text = "no attribute 'moe_fused_gate'" if in_build else "unexpected keyword argument"
    assert text in (rows["sglang"].failure or "")


# --- what is left out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "format", "dtype", "words"),
    [
        ("vllm", "llama4_scout", None, "bf16", "has no weights_from='topk_sigmoid'"),
        ("sglang", "dsv2", None, "bf16", "has no groups with group_score='max' and softmax"),
        ("vllm", "dsv3", None, "fp32", "vllm is for bf16, and --dtype is fp32"),
        ("vllm", "dsv3", "int4", "bf16", "vllm is for bf16 and --format fp8_block, and the format is int4"),
        ("sglang", "dsv3", "fp8_block+int4", "bf16", "and the format is fp8_block+int4"),
        ("triton_kernels", "dsv3", "fp8_block", "bf16", "triton_kernels is for bf16, and the format is fp8_block"),
        ("deepgemm", "dsv3", None, "bf16", "deepgemm is for --format fp8_block, and the format is none"),
    ],
)
def test_what_a_peer_does_not_have_is_left_out_with_the_reason(
    name: str, shape: str, format: str | None, dtype: str, words: str
) -> None:
    small = _shape(shape) if shape != "llama4_scout" else dataclasses.replace(SHAPES[shape], **(SIZES | {"K": 1}))
    ((only, candidate),) = _candidates(name, Problem(_quantised(small, format), dtype, CPU, seed=5)).items()
    assert only == name
    assert words in candidate.left_out


def test_each_knob_that_the_adapters_do_not_hand_on_is_a_reason() -> None:
    other = {
        "choice_on": "logit",
        "weights_from": "topk_softmax",
        "normalize": "sum_clamp",
        "scale_on": "output",
        "router_dtype": "model",
        "score_dtype": "model",
        "weight_dtype": "model",
        "apply_router_weight_on_input": True,
        "activation": "gelu",
        "clamp_routed": 7.0,
        "clamp_shared": 7.0,
        "clamp_after_activation": True,
        "w13_order": "up_gate",
        "combine": "average",
        "num_zero_experts": 2,
        "score": "sqrtsoftplus",
    }
    handled = {"top_k", "n_group", "topk_group", "routed_scaling_factor", "routed_format", "shared_format"}
    with_groups = {"group_score": "max", "group_mask": "zero"}
    assert {f.name for f in dataclasses.fields(MoEConfig) if f.init} == other.keys() | handled | with_groups.keys()
    for knobs, base in ((other, "glm45"), (with_groups, "dsv3")):
        for knob, value in knobs.items():
            shape = _shape(base)
            shape = dataclasses.replace(shape, config=dataclasses.replace(shape.config, **{knob: value}))
            reason = serving_peers._router_refuses(serving_peers.PEERS["vllm"], shape)
            assert reason is not None
            assert f"{knob}={value!r}" in reason
    assert "correction_bias" in str(
        serving_peers._router_refuses(
            serving_peers.PEERS["vllm"], dataclasses.replace(_shape("glm45"), correction_bias=False)
        )
    )


@pytest.mark.parametrize(("letter", "size"), [("H", 192), ("I", 192), ("S", 192)])
def test_fp8_needs_whole_blocks(letter: str, size: int) -> None:
    made = Problem(_quantised(_shape("dsv3", **{letter: size}), "fp8_block"), "bf16", CPU, seed=5)
    reason = _candidates("vllm", made)["vllm"].left_out
    assert reason.startswith("needs multiples of 128 in fp8_block")
    assert reason.endswith(f"has {letter}={size}")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (_shape("dsv3", S=320), "fused needs S a multiple of I"),
        (_shape("qwen3next"), "has no fused shared expert with a gate"),
        (_quantised(_shape("dsv3"), "fp8_block+none"), "fused needs routed and shared experts in one format"),
    ],
)
def test_a_shared_expert_that_cannot_be_fused_leaves_the_other_two(shape: Shape, words: str) -> None:
    found = _candidates("sglang", Problem(shape, "bf16", CPU, seed=5))
    assert [name for name, c in found.items() if c.left_out is None] == ["sglang", "sglang two streams"]
    assert words in found["sglang fused"].left_out


def test_repacked_weights_beyond_the_limit_leave_their_candidates_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _several_copies(_shape("dsv3"))
    w13 = 12 * 256 * 256 * 2
    routed, shared = w13 * 3 // 2, 3 * 256 * 384 * 2
    monkeypatch.setattr(serving_peers, "REPACKED", 0.5)

    def names(free: int) -> list[str]:
        monkeypatch.setattr(serving_peers, "free_bytes", lambda device: free)
        every = {**_candidates("triton_kernels", made), **_candidates("sglang", made)}
        assert all("for repacked weights, and may take" in c.left_out for c in every.values() if c.left_out)
        return [name for name, c in every.items() if c.left_out is None]

    plain = ["triton_kernels", "triton_kernels two streams"]
    fused = 6 * (routed + shared)
    assert names(2 * fused) == [*plain, "triton_kernels fused", "sglang", "sglang two streams", "sglang fused"]
    assert names(2 * fused - 2) == [*plain, "sglang", "sglang two streams"]
    assert names(2 * 2 * w13) == [*plain, "sglang", "sglang two streams"]
    assert names(2 * 2 * w13 - 2) == ["sglang", "sglang two streams"]


def test_reports_have_what_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serving_peers, "unsupported", lambda *given: None)  # that there is no GPU
    monkeypatch.setattr(bench.ceilings, "measure", lambda device, dtypes: LIMITS)
    call = ["bench", "--shape", "64/32/16/4/48", "--seconds", "0", "--device", "cpu", "--against", "eager,deepgemm"]
    reason = "deepgemm is for --format fp8_block, and the format is none"
    assert main([*call, "--tokens", "1,5"]) == 0
    assert f"\nleft out: deepgemm: {reason}\n" in capsys.readouterr().out + "\n"
    assert main([*call, "--tokens", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    where = {"shape": "64/32/16/4/48", "dtype": "bf16", "tokens": 5}
    assert result["left_out"] == [where | {"candidate": "deepgemm", "reason": reason}]


def test_a_reason_of_some_tokens_names_them() -> None:
    cells = [
        cell.Cell(
            shape="s", dtype="bf16", tokens=T, inputs=1, distinct_experts=1.0, floor_us=1.0, ours="o", rows=[],
            details={}, left_out=reasons,
        )
        for T, reasons in ((1, {"a": "large", "b": "odd"}), (4, {"b": "odd"}))
    ]  # fmt: skip
    assert bench._left_out(cells) == ["left out: a at 1 tokens: large\nleft out: b: odd"]
    assert bench._left_out([]) == []


# --- what is not installed ------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peers.importlib.util.find_spec
    packages = {"vllm", "sglang", "triton_kernels", "deep_gemm"}
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in packages else found(name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm", "vllm needs vllm, which is not installed: pip install vllm"),
        ("sglang", "sglang needs sglang, which is not installed: pip install sglang"),
        ("triton_kernels", "triton_kernels needs vllm, which is not installed: pip install vllm"),
        ("deepgemm", "deepgemm needs vllm, which is not installed: pip install vllm"),
    ],
)
def test_without_its_packages_it_says_what_to_install(
    name: str, words: str, nothing_installed: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--shape", "64/32/16/4/48", "--device", "cpu", "--against", name]) == 2
    assert f"--against: {words}" in capsys.readouterr().err


def test_what_vllms_wheel_brings_along_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delitem(sys.modules, "deep_gemm")
    assert "deepgemm needs deep_gemm" in str(serving_peers.missing("deepgemm"))
    spec = sys.modules["vllm"].__spec__
    assert spec is not None
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    (tmp_path / "third_party" / "deep_gemm").mkdir(parents=True)
    assert serving_peers.missing("deepgemm") is None


def test_without_against_those_that_are_installed_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(against=None, shape=(parse_shape("dsv3"),), dtype=("bf16",))
    every = bench._against_names(options, CUDA)
    assert every == tuple(peers.AGAINST)
    assert every[-4:] == tuple(serving_peers.PEERS) == ("vllm", "sglang", "triton_kernels", "deepgemm")
    monkeypatch.delitem(sys.modules, "sglang")
    assert bench._against_names(options, CUDA) == tuple(name for name in every if name != "sglang")
    assert bench._against_names(options, CPU) == ("eager", "transformers")


@pytest.mark.parametrize(
    ("device", "dtypes", "format", "words"),
    [
        (CPU, ("bf16",), None, "vllm needs a GPU, and --device is cpu"),
        (CUDA, ("bf16", "fp16"), None, "vllm is for bf16, and --dtype is fp16"),
        (CUDA, ("bf16",), "mxfp4", "vllm is for bf16 and --format fp8_block, and the format is mxfp4"),
        (CUDA, ("bf16",), "fp8_block", None),
        (CUDA, ("bf16",), None, None),
    ],
)
def test_what_can_be_timed_nowhere_is_refused_where_it_is_asked_for(
    device: torch.device, dtypes: tuple[str, ...], format: str | None, words: str | None
) -> None:
    chosen = [_quantised(parse_shape(name), format) for name in ("dsv3", "llama4_scout")]
    assert peers.unsupported("vllm", device, chosen, dtypes) == words


def test_nothing_of_them_is_imported_before_it_is_built() -> None:
    code = """
import sys
from dsmoe_op.cli import serving_peers
names = ("vllm", "sglang", "triton_kernels", "deep_gemm", "triton")
assert not [name for name in names if name in sys.modules and name != "triton"], sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_versions_of_what_is_installed_are_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_version", lambda name: {"vllm": "0.33.0", "sglang-kernel": "0.4.5"}.get(name))
    found = bench.machine(CPU)
    assert (found["vllm"], found["sglang-kernel"]) == ("0.33.0", "0.4.5")
    assert "sglang" not in found
