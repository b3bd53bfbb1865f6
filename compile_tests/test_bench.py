"""`bench` on a machine without a GPU: shapes, floors, what is checked, what is reported, and the parts of a profile."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.cli import arguments as types
from dsmoe_op.cli import bench, cell, main, parts, peers, plain, problem, shapes, timing
from dsmoe_op.cli.cell import Cell, Row
from dsmoe_op.cli.profiling import Work
from dsmoe_op.cli.shapes import SHAPES, Ceilings, parse_shape
from dsmoe_op.cli.timing import Time

pytest.importorskip("transformers")

TINY = "64/32/16/4/48"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are promises about machines without one. The machine's ceilings matter to none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    flops = dict.fromkeys(("bf16", "fp16", "fp32"), 1e11)
    monkeypatch.setattr(bench.ceilings, "measure", lambda device, dtypes: Ceilings(bandwidth=1e10, flops=flops))
    monkeypatch.setattr(timing, "MIN_ROUNDS", 3)


def _bench(*arguments: str, shape: str = TINY) -> int:
    return main(["bench", "--shape", shape, "--tokens", "1,5", "--seconds", "0", *arguments])


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_a_shape_is_a_name_or_numbers() -> None:
    named = parse_shape("dsv3")
    assert named.numbers == "7168/2048/256/8/2048"
    assert (named.config.n_group, named.config.topk_group, named.config.routed_scaling_factor) == (8, 4, 2.5)
    own = parse_shape("96/48/10/3/0")
    assert (own.H, own.I, own.E, own.K, own.S, own.config.top_k) == (96, 48, 10, 3, 0, 3)


def test_a_rank_of_tensor_parallelism_divides_the_widths_alone() -> None:
    assert parse_shape("dsv3_tp8").numbers == "7168/256/256/8/256"
    assert parse_shape("qwen35_35b_tp2").numbers == "2048/256/256/8/256"
    assert parse_shape("kimi_k2_tp8").numbers == "7168/256/384/8/256"
    assert parse_shape("dsv3_tp8").config == parse_shape("dsv3").config


def test_the_config_chooses_as_many_experts_as_the_shape_says() -> None:
    for shape in SHAPES.values():
        assert shape.config.top_k == shape.K


@pytest.mark.parametrize("text", ["dsv4", "64/32/16/4", "64/32/16/17/0", "0/32/16/4/0", "glm45air_tp7", "dsv3_tp0", ""])
def test_what_is_no_shape_is_refused_with_what_is_accepted(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        _bench(shape=text)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert "--shape: expected" in error
    assert f"got {text!r}" in error


def quantised(name: str, format: str) -> shapes.Shape:
    return shapes.quantised(parse_shape(name), types.formats(format))


# --- floor ----------------------------------------------------------------------------------------------------------


def test_the_floor_of_few_tokens_is_their_experts_weights() -> None:
    """One token of DeepSeek-V3 on 8 experts, bf16, at 4.57 TB/s, by hand."""
    weights = 3 * 7168 * 2 * (8 * 2048 + 2048)
    router, rows = 2 * 256 * 7168, 4 * 7168
    us = shapes.floor_us(SHAPES["dsv3"], 1, 8, 2, 4.57e12, 736e12, 50e6)
    assert us == pytest.approx((weights + router + rows) / 4.57e6, rel=1e-9)
    assert us == pytest.approx(174.3, abs=0.1)


def test_the_floor_of_many_tokens_is_their_arithmetic() -> None:
    """16384 tokens of DeepSeek-V2-Lite: 6 T H (K I + S) + 2 T H E at 736 TFLOP/s."""
    flop = 6 * 16384 * 2048 * (6 * 1408 + 2816) + 2 * 16384 * 2048 * 64
    us = shapes.floor_us(SHAPES["v2lite"], 16384, 64, 2, 4.57e12, 736e12, 50e6)
    assert us == pytest.approx(flop / 736e6, rel=1e-9)
    assert us == pytest.approx(3087, abs=1)


@pytest.mark.parametrize(("T", "counted"), [(1023, False), (1024, True)])
def test_from_1024_tokens_rows_beyond_the_cache_are_written_and_read(T: int, counted: bool) -> None:
    shape = parse_shape("dsv3_tp8")
    weights = 2 * (3 * 7168 * 257 * 256 + 256 * 7168 + 2 * T * 7168)
    rows = 2 * (T * 8 * 7168 * 2 - 60e6) if counted else 0
    assert shapes.floor_us(shape, T, 256, 2, 4.57e12, 736e12, 60e6) == pytest.approx((weights + rows) / 4.57e6)


def test_the_floor_of_quantised_weights_is_of_their_bytes_and_their_scales() -> None:
    """Eight 4-bit numbers in four bytes, and a bf16 scale for each 32, or for the last 16 of the shared expert's 48."""
    both = 0.5 + 2 / 32, 0.5 + (2 * 96 * 2 + 64 * 2 * 2) / (3 * 64 * 48)
    for format, expected in (("int4", both), ("int4+none", (both[0], 2)), ("none+int4", (2, both[1]))):
        made = problem.Problem(quantised(TINY, format), "bf16", CPU, seed=5)
        assert (made.routed_bytes, made.shared_bytes) == expected
    us = shapes.floor_us(made.shape, 2, 5.5, 2, 4e12, 736e12, 50e6, routed_bytes=0.625, shared_bytes=2)
    moved = 3 * 64 * (0.625 * 5.5 * 32 + 2 * 48) + 2 * (16 * 64 + 2 * 2 * 64)
    assert us == pytest.approx(moved / 4e6, rel=1e-9)


def test_the_bound_on_memory_is_rows_of_both_products_and_a_tenth() -> None:
    shape = parse_shape("96/48/10/3/40")
    assert shapes.memory_bound(shape, 7, 2) == int(1.1 * (7 * 3 * (48 + 96) + 7 * (40 + 96)) * 2) + 2 * 2**20


# --- the layer that is timed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("experts", [plain.experts_in_a_loop, plain.experts_grouped])
def test_the_plain_layer_and_the_op_are_the_reference_with_each_shapes_router(name: str, experts: Any) -> None:
    shape = dataclasses.replace(SHAPES[name], H=48, I=16, S=32)
    made = problem.Problem(shape, "fp32", CPU, seed=5)
    inputs = made.inputs(6)
    answers = problem.Answers(made, inputs)
    for layer in (plain.layer(shape.config, experts), peers.ours(made, "auto").build()):
        for i in answers.inputs:
            assert answers.error(i, layer(inputs[i], made.at(i))) < 1e-5


@pytest.mark.parametrize("format", formats.FORMATS)
def test_the_op_has_quantised_weights_and_the_others_what_they_stand_for(format: Any) -> None:
    shape = quantised(TINY, format)
    assert shape.name == f"{TINY} {format}"
    made = problem.Problem(shape, "fp32", CPU, seed=5)
    assert made.tensors(made.at(1))["w13"].dtype in formats.FORMATS[format].dtypes
    inputs = made.inputs(6)
    answers = problem.Answers(made, inputs)
    op, other = peers.ours(made, "auto").build(), plain.layer(shape.config, plain.experts_in_a_loop)
    for i in answers.inputs:
        assert answers.error(i, op(inputs[i], made.at(i))) < (answers.limit if made.rounds_rows else 1e-5)
        error = answers.error(i, other(inputs[i], made.at(i)))
        assert (1e-2 < error < answers.limit_of_others) if made.rounds_rows else error < 1e-5
    without = peers.ours(made, "serial", shared=False).build()(inputs[0], made.at(0))
    shared = op(inputs[0], made.at(0)) - without
    rows = 0.06 if made.rounds_rows else 1e-5
    expected = plain.shared_expert(inputs[0], made.at(0))
    assert (shared - expected).norm() < rows * expected.norm()


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("compiled", [False, True])
def test_transformers_experts_compute_with_each_copy_of_the_weights(way: str, compiled: bool) -> None:
    made = problem.Problem(parse_shape(TINY), "fp32", CPU, seed=5)
    made.routed.append((made._normal(16, 64, 64), made._normal(16, 64, 32)))
    made.routed_copies = 2
    inputs = made.inputs(5)
    layer = peers._hf_layer(made, way, compiled=compiled)
    answers = problem.Answers(made, inputs)
    assert {i % 2 for i in answers.inputs} == {0, 1}
    for i in answers.inputs:
        assert answers.error(i, layer(inputs[i], made.at(i))) < 1e-5


def test_no_row_of_an_input_hangs_on_a_rounding() -> None:
    made = problem.Problem(parse_shape("64/16/256/8/0"), "bf16", CPU, seed=5)
    x = made.inputs(64)[0]
    logits = x.double() @ made.at(0).router_weight.double().t()
    keys = logits.sigmoid() + made.correction_bias
    best = keys.topk(9).values
    assert (best[:, 7] - best[:, 8]).min() > 1e-6


def test_copies_of_what_every_token_reads_are_larger_than_a_cache() -> None:
    assert problem._copies(11_000_000, at_least=4) * 11_000_000 >= 220e6
    assert problem._copies(10**9, at_least=4) == 4
    assert problem._copies(10**9, at_least=1) == 1


def test_a_seed_gives_the_same_weights_and_inputs() -> None:
    one, same, other = (problem.Problem(parse_shape(TINY), "bf16", CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.at(0).w13, same.at(0).w13)
    assert not torch.equal(one.at(0).w13, other.at(0).w13)
    assert torch.equal(one.inputs(3)[1], same.inputs(3)[1])


# --- what is wrong is seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_what_is_right_passes_in_every_dtype(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench("--dtype", dtype, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ours_good"]
    assert {row["status"] for row in result["rows"]} == {"ok"}
    assert all(row["us"] > 0 for row in result["rows"])


def test_a_format_is_in_the_shapes_name_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench("--format", "mxfp4", "--dtype", "bf16", "--against", "transformers", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["shape"] for row in result["rows"]} == {f"{TINY} mxfp4"}
    assert {row["status"] for row in result["rows"]} == {"ok"}
    assert '"routed_format":"mxfp4"' in result["shapes"][f"{TINY} mxfp4"]["config"]


@pytest.mark.parametrize("format", ["none", "none+none"])
def test_the_format_none_leaves_the_weights_as_they_are(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench("--format", format, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["shape"] for row in result["rows"]} == {TINY}


@pytest.mark.parametrize(
    ("format", "limit", "quantised", "plain"),
    [
        ("int4+none", problem.ERROR_LIMITS["bf16"], '"routed_format":"int4"', "shared_format"),
        ("none+fp8_block", problem.ROWS_LIMITS[1], '"shared_format":"fp8_block"', "routed_format"),
    ],
)
def test_routed_and_shared_experts_may_have_a_format_each(
    format: str, limit: float, quantised: str, plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench("--format", format, "--against", "eager", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for row in result["rows"]:
        assert (row["shape"], row["status"]) == (f"{TINY} {format}", "ok")
        assert row["error"] < limit
    config = result["shapes"][f"{TINY} {format}"]["config"]
    assert quantised in config
    assert plain not in config


def test_a_format_of_the_shared_expert_alone_decides_how_far_rows_may_be_off() -> None:
    for format, rounds in (("int4+fp8_channel", True), ("fp8_tensor+none", True), ("int4+none", False)):
        made = problem.Problem(quantised(TINY, format), "bf16", CPU, seed=5)
        assert made.rounds_rows == rounds
    assert not problem.Problem(quantised("64/32/16/4/0", "int4+fp8_channel"), "bf16", CPU, seed=5).rounds_rows


def test_a_format_that_the_op_does_not_take_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: Any, tensors: Any) -> None:
        raise ValueError("routed_format: expected None on CUDA, got 'mxfp4'")

    monkeypatch.setattr(problem.DualStreamMoE, "from_tensors", refuse)
    assert _bench("--format", "mxfp4") == 2
    assert "--format: the op does not take it on cpu: routed_format: expected None on CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [1.03, math.nan])
def test_a_wrong_peer_is_shown_as_wrong_and_keeps_its_time(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = plain.shared_expert
    monkeypatch.setattr(plain, "shared_expert", lambda x, w: factor * right(x, w))
    assert _bench("--against", "eager", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["candidate"], row["status"]) for row in rows[:2]] == [("dsmoe_op auto", "ok"), ("eager", "WRONG")]
    assert rows[1]["us"] > 0
    assert _bench("--against", "eager") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " eager " in line]
    assert all(line.endswith("WRONG") for line in lines)


def test_an_op_that_is_wrong_in_one_input_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, calls = peers.dual_stream_moe, []

    def wrong_once(x: Tensor, **given: Any) -> Tensor:
        calls.append(x)
        out = right(x, **given)
        return out.roll(1, -1) if len(calls) == 3 else out

    monkeypatch.setattr(peers, "dual_stream_moe", wrong_once)
    assert _bench("--against", "eager", "--json") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows if row["candidate"] == "dsmoe_op auto"] == ["WRONG", "ok"]


def test_a_candidate_that_raises_is_failed_with_its_text_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("no such product here")

    monkeypatch.setattr(plain, "experts_in_a_loop", fails)
    assert _bench() == 0
    captured = capsys.readouterr()
    assert "no such product here" in captured.out
    assert "eager FAILED: RuntimeError: no such product here" in captured.err
    assert "transformers batched_mm" in captured.out


# --- reports --------------------------------------------------------------------------------------------------------


def test_the_report_has_schedules_side_by_side_and_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench("--schedule", "auto,dual", "--against", "serial,eager,transformers", "--dtype", "bf16") == 0
    out = capsys.readouterr().out
    assert f"{TINY}, bf16" in out
    header = next(line for line in out.splitlines() if line.startswith("tokens  experts hit"))
    assert [word for word in header.split() if word in ("auto", "serial", "dual")] == ["auto", "serial", "dual"]
    for candidate in ("eager", "transformers eager", "transformers grouped_mm", "transformers batched_mm"):
        assert sum(f" {candidate} " in line for line in out.splitlines()) >= 2


def test_csv_and_json_have_the_same_rows(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert _bench("--dtype", "fp32,bf16", "--csv", str(path), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    with path.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == list(bench.COLUMNS)
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in result["rows"]] == written
    assert {(row["dtype"], row["tokens"]) for row in result["rows"]} == {
        (d, T) for d in ("bf16", "fp32") for T in (1, 5)
    }
    assert result["machine"]["torch"] == torch.__version__
    for cell_rows in (result["rows"][i : i + 5] for i in range(0, len(result["rows"]), 5)):
        base = cell_rows[0]
        assert base["candidate"] == "dsmoe_op auto"
        for row in cell_rows:
            assert row["ratio_to_ours"] == pytest.approx(row["us"] / base["us"], abs=2e-3)
            assert row["percent_of_floor"] == pytest.approx(100 * row["floor_us"] / row["us"], abs=2e-3)
    fastest = result["fastest_others"][0]
    others = {row["candidate"]: row["us"] for row in result["rows"][1:5]}
    assert fastest["fastest"] == min(others, key=others.__getitem__)


def test_one_token_hits_as_many_experts_as_it_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert _bench("--against", "eager", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["distinct_experts"] == 4
    assert 4 < rows[-1]["distinct_experts"] <= 16


@pytest.mark.parametrize("name", ["times.png", "times.svg", "times"])
def test_a_plot_is_a_png_and_an_svg_with_machine_versions_units_and_names(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    assert _bench("--plot", str(tmp_path / name), "--against", "eager") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["times.png", "times.svg"]
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "times.png").stat().st_size > 10_000
    svg = (tmp_path / "times.svg").read_text()
    assert "<svg" in svg
    for text in (bench.cpu_name(), f"torch {torch.__version__}", "tokens", "time of a layer, us", "floor", "eager"):
        assert f"<!-- {text}" in svg or text in svg


def _cell(**times: float) -> Cell:
    rows = [Row(candidate=name.replace("_", " "), graph=True, time=Time(us, us, us, 9)) for name, us in times.items()]
    return Cell(
        shape="s",
        dtype="bf16",
        tokens=4,
        inputs=2,
        distinct_experts=7.5,
        floor_us=30.0,
        ours=rows[0].candidate,
        rows=rows,
        details={},
    )


def test_ratios_are_to_ours_and_percent_of_the_floor() -> None:
    made = _cell(auto=40.0, eager=100.0)
    assert made.ratio(made.rows[1]) == 2.5
    assert made.percent_of_floor(made.rows[0]) == 75.0


def test_what_is_hidden_of_the_shared_expert() -> None:
    found = cell.shared_expert_hidden(serial=50.0, dual=42.0, routed_only=40.0, floor=30.0)
    assert (found["shared_only_us"], found["not_hidden_us"], found["not_hidden_of_shared_only"]) == (10.0, 2.0, 0.2)
    at_the_floor = cell.shared_expert_hidden(serial=50.0, dual=46.0, routed_only=40.0, floor=45.0)
    assert at_the_floor["not_hidden_us"] == 1.0


def test_quartiles_are_of_one_call() -> None:
    assert timing.summarize([10.0, 20.0, 30.0, 40.0, 50.0], calls=10) == Time(3.0, 2.0, 4.0, 5)


# --- parts of a profile ---------------------------------------------------------------------------------------------

ROUTED = ("_router_logits", "_route", "_grouped_gemm", "_persistent_gemm2")
SHARED = ("_shared_gate", "_grouped_gemm", "_grouped_gemm")


def _work(calls: int, *streams: tuple[int, tuple[str, ...]]) -> list[Work]:
    """Kernel j of a call takes j + 1 us on each stream."""
    found = []
    for call in range(calls):
        for stream, names in streams:
            begin = 100.0 * call
            for j, name in enumerate(names):
                found.append(Work(name, stream, begin, begin + j + 1))
                begin += j + 2
    return found


def test_products_on_the_stream_of_the_routing_are_the_routed_experts() -> None:
    found = parts.parts(_work(6, (7, (*ROUTED, "_finalize")), (9, SHARED)), calls=6)
    assert [(p.part, p.stream) for p in found] == [
        *((part, 7) for part in ("router", "choice and order", "GEMM1", "GEMM2", "finalize")),
        *(("shared", 9) for _ in SHARED),
    ]
    assert [p.us for p in found] == [1, 2, 3, 4, 5, 1, 2, 3]


def test_on_one_stream_the_third_and_fourth_product_are_the_shared_experts() -> None:
    found = parts.parts(_work(3, (7, (*ROUTED, *SHARED, "_finalize"))), calls=3)
    assert [p.part for p in found][2:] == ["GEMM1", "GEMM2", "shared", "shared", "shared", "finalize"]


def test_beside_one_launch_of_the_routed_experts_all_products_are_the_shared_experts() -> None:
    found = parts.parts(_work(3, (7, ("_router_logits", "_route", *SHARED, "_experts"))), calls=3)
    assert [p.part for p in found][2:] == ["shared", "shared", "shared", "experts"]


def test_kernels_that_do_not_repeat_are_added_by_name() -> None:
    work = [Work("_route", 7, 0, 4), Work("_route", 7, 5, 7), Work("_finalize", 7, 8, 9)]
    assert [(p.part, p.us) for p in parts.parts(work, calls=2)] == [("choice and order", 3.0), ("finalize", 0.5)]


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named", "accepted"),
    [
        (["--tokens", "0"], "--tokens", "1..1048576"),
        (["--dtype", "fp8"], "--dtype", "bf16, fp16, fp32"),
        (["--schedule", "both"], "--schedule", "dual_shared_main"),
        (["--schedule", "fused"], "--schedule", "S a multiple of I"),
        (["--against", "cublas"], "--against", "eager"),
        (["--seconds", "x"], "--seconds", "0..3600"),
        (["--device", "cuda"], "--device", "cpu"),
        (["--csv", "/no/such/folder/x.csv"], "--csv", "no folder"),
        (["--format", "fp4"], "--format", "or ROUTED+SHARED"),
        (["--format", "int4+none+none"], "--format", "or ROUTED+SHARED"),
        (["--format", "none+int4", "--shape", "64/32/16/4/0"], "--format", "a format of the routed experts"),
        (["--format", "int4+none", "--schedule", "fused", "--shape", "64/32/16/4/64"], "--schedule", "in one format"),
    ],
)
def test_bad_arguments_end_with_2_and_are_named(
    arguments: list[str], named: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        _bench(*arguments)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert f"argument {named}: " in error
    assert accepted in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "native_streams"], "--against: native_streams needs a GPU, and --device is cpu"),
        (["--against", "compiled", "--dtype", "fp32"], "--against: compiled is for bf16"),
        (["--shape", "dsv3", "--dtype", "fp32"], "--shape: dsv3 in fp32 has"),
    ],
)
def test_what_cannot_run_here_ends_with_2_and_says_why(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(problem, "free_bytes", lambda device: 10**9)
    assert _bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_without_transformers_or_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert _bench("--against", "transformers") == 2
    assert "pip install 'dsmoe_op[bench]'" in capsys.readouterr().err
    assert _bench("--json") == 0
    assert [row["candidate"] for row in json.loads(capsys.readouterr().out)["rows"][:2]] == ["dsmoe_op auto", "eager"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _bench("--plot", str(tmp_path / "p")) == 2
    assert "pip install 'dsmoe_op[bench]'" in capsys.readouterr().err


# --- kernels that measure a GPU ---------------------------------------------------------------------------------------


def test_the_reading_kernel_reads_every_number_once() -> None:
    pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")
    code = """
import torch
from dsmoe_op.cli.probes import read_sum, touch
data, out = torch.randn(5000), torch.zeros(3)
read_sum[(3,)](data, out, 5000, BLOCK=512)
torch.testing.assert_close(out.sum(), data.sum(), rtol=1e-4, atol=1e-3)
touch[(1,)](out)
"""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
