"""`tune` on a machine without a GPU: what it times, what it keeps, and how it stops and goes on."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from dsmoe_op import formats, tuning
from dsmoe_op.cli import arguments, candidates, compiling, main, shapes, tune
from dsmoe_op.cli.compiling import Compiler, Job, OutOfTime, Target
from dsmoe_op.cli.problem import Problem
from dsmoe_op.cli.shapes import parse_shape
from dsmoe_op.tuning import Choice, LayerTiles, Table, Tile, load_table
from dsmoe_op.tuning.tables import BUCKETS, GEMMS, Row, bucket

TINY, OTHER, PLAIN = "64/32/16/4/64", "96/32/16/4/48", "64/32/16/4/0"
GPU = "Some GPU"


class FakeCompiler:
    """Everything compiles, or what `bad` says does not."""

    def __init__(self, *_: object) -> None:
        self.jobs: list[Job] = []
        self.closed = False

    def submit(self, jobs: Any) -> None:
        self.jobs += jobs

    def failures(self, jobs: Any, deadline: float) -> dict[Job, str]:
        self.jobs += jobs
        return {job: "does not fit" for job in jobs if job.tile == BAD}

    def close(self) -> None:
        self.closed = True


BAD = Tile(32, 128, 128, 4, 4, swap=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU on which everything is timed by random numbers."""
    made: dict[str, Any] = {"cells": []}
    trial = pytest.importorskip("dsmoe_op.cli.trial", reason="no triton")

    class Trial:
        def __init__(self, problem: Any, inputs: Any, say: Any) -> None:
            pass

        def times(self, tiles: Any) -> Any:
            assert all(BAD not in some for some in tiles.values())
            return {name: {tile: random.uniform(5, 50) for tile in some} for name, some in tiles.items()}

    def layer_times(problem: Any, inputs: Any, choices: Any, gpu: str, say: Any) -> dict[Choice, float]:
        made["cells"].append((problem.shape.name, len(inputs[0])))
        return {choice: random.uniform(50, 100) for choice in choices}

    def make(*given: Any) -> FakeCompiler:
        made["compiler"] = FakeCompiler()
        return made["compiler"]

    monkeypatch.setattr(trial, "Trial", Trial)
    monkeypatch.setattr(trial, "layer_times", layer_times)
    monkeypatch.setattr(tune, "Compiler", make)
    monkeypatch.setattr(tune, "_target", lambda: None)
    monkeypatch.setattr(tune.Problem, "inputs", lambda self, T: [torch.empty(T, self.shape.H)])
    cuda = {"is_available": lambda: True, "set_device": lambda device: None, "get_device_name": lambda *_: GPU}
    cuda |= {"get_device_capability": lambda *_: (9, 0), "is_initialized": lambda: False}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(tune.arguments, "device", lambda name: torch.device("cpu"))
    return made


def run(*given: str) -> int:
    return main(["tune", *given])


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run() == 2
    assert "tune needs a CUDA GPU, which it measures, and torch finds none here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "5,16"], "expected one number for each bucket, got 5 and 16 of the same"),
        (["--tokens", "0"], "expected integers in 1.."),
        (["--minutes", "0"], "--minutes: expected a number above 0, up to 1440, got '0'"),
        (["--shape", "64/40/16/4/64"], "--shape: expected multiples of 16, got I=40"),
        (["--format", "int5"], "--format: expected none, one of fp8_block, "),
        (
            ["--format", "none+int4", "--shape", PLAIN],
            "--format: expected a format of the routed experts, since 64/32/",
        ),
    ],
)
def test_bad_arguments_are_refused(gpu: Any, given: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*given)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_table_of_all_cells_is_written_and_can_be_used(gpu: Any, tmp_path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "t.json"
    assert run("--shape", f"{TINY},{PLAIN}", "--out", str(path), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finished"]
    assert len(result["rows"]) == 16
    table = load_table(path)
    assert table.gpu == GPU
    for text in (TINY, PLAIN):
        shape = candidates.layer_shape(parse_shape(text))
        for T in tune.TOKENS:
            row = table.rows[shape, bucket(T)]
            assert row.tokens == T
            assert tuning.layer_choice(shape, T, (table,)) == row.choice
            assert row.us["layer"] <= row.heuristic_us["layer"]
            # Tiles that only do together have no time alone.
            timed = candidates.tiles(parse_shape(text), T)
            assert row.us.keys() == {"layer", *(n for n in timed if getattr(row.choice.tiles, n) in timed[n])}
    assert gpu["compiler"].closed


@pytest.mark.parametrize(
    ("format", "kind", "kind_without_shared"),
    [("fp8_channel", "fp8", "fp8"), ("int4+none", "4bit+16bit", "4bit")],
)
def test_layers_with_quantised_weights_are_rows_of_their_kind(
    format: str, kind: str, kind_without_shared: str, gpu: Any, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.json"
    given = ("--shape", f"{TINY},{PLAIN}", "--tokens", "1,40,5000", "--out", str(path))
    assert run(*given, "--format", format, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["shape"] for row in rows} == {f"{TINY} {format}", f"{PLAIN} {format}"}
    assert run(*given, "--resume") == 0  # bf16 beside them
    table = load_table(path)
    kinds = {(shape.kind, shape.S): most for shape, most in table.rows}
    assert kinds.keys() == {(kind, 64), (kind_without_shared, 0), ("16bit", 64), ("16bit", 0)}
    assert len(table.rows) == 12


def test_without_json_a_report_names_each_cell(gpu: Any, tmp_path, capsys: pytest.CaptureFixture) -> None:
    assert run("--shape", TINY, "--tokens", "1,300", "--out", str(tmp_path / "t.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [[TINY, "1"], [TINY, "300"]]
    assert lines[-1].endswith("t.json: 2 cells")


def test_resume_does_what_is_missing_and_keeps_the_rest(gpu: Any, tmp_path) -> None:
    path = tmp_path / "t.json"
    assert run("--shape", TINY, "--tokens", "1,64", "--out", str(path)) == 0
    before = load_table(path)
    gpu["cells"].clear()
    assert run("--shape", f"{TINY},{OTHER}", "--tokens", "1,7,64", "--out", str(path), "--resume") == 0
    assert gpu["cells"] == [(TINY, 7), (OTHER, 1), (OTHER, 7), (OTHER, 64)]
    after = load_table(path)
    assert len(after.rows) == 6
    assert all(after.rows[key] == row for key, row in before.rows.items())


def test_a_shape_under_two_names_is_timed_once(gpu: Any, tmp_path) -> None:
    given = "v2lite_tp2,2048/704/64/6/1408"
    assert run("--shape", f"{TINY},{given},{TINY}", "--tokens", "1", "--out", str(tmp_path / "t.json")) == 0
    assert gpu["cells"] == [(TINY, 1), ("v2lite_tp2", 1)]


def test_a_table_is_not_overwritten_and_not_mixed_with_another_gpus(
    gpu: Any, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "t.json"
    given = ("--shape", TINY, "--tokens", "1", "--out", str(path))
    assert run(*given) == 0
    assert run(*given) == 2
    assert f"--out: {path} exists; --resume goes on with it" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Another")
    assert run(*given, "--resume") == 2
    assert "is of Some GPU, and this GPU is Another" in capsys.readouterr().err
    path.write_text("{}")
    assert run(*given, "--resume") == 2
    assert "--resume: " in capsys.readouterr().err


def test_at_the_end_of_the_time_what_is_done_stays(
    gpu: Any, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path, real = tmp_path / "t.json", time.monotonic
    trial = sys.modules["dsmoe_op.cli.trial"]
    inner = trial.layer_times

    def layer_times(*given: Any) -> Any:
        if len(gpu["cells"]) == 1:  # the second cell is the last that time is left for
            monkeypatch.setattr(tune.time, "monotonic", lambda: real() + 3600)
        return inner(*given)

    monkeypatch.setattr(trial, "layer_times", layer_times)
    assert run("--shape", TINY, "--tokens", "1,3,9,40", "--minutes", "10", "--out", str(path)) == 0
    captured = capsys.readouterr()
    assert "--resume does the rest" in captured.out
    assert "the time is up" in captured.err
    assert sorted(most for _, most in load_table(path).rows) == [1, 4]
    assert gpu["compiler"].closed


def test_a_cell_without_a_right_candidate_is_told_and_left_out(
    gpu: Any, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["dsmoe_op.cli.trial"], "layer_times", lambda *_: {})
    assert run("--shape", TINY, "--tokens", "1", "--out", str(tmp_path / "t.json")) == 1
    assert "no candidate is right" in capsys.readouterr().err


def test_while_one_shapes_layers_are_timed_the_next_ones_products_compile(gpu: Any, tmp_path) -> None:
    assert run("--shape", f"{TINY},{OTHER}", "--tokens", "1", "--out", str(tmp_path / "t.json")) == 0
    jobs = list(dict.fromkeys(gpu["compiler"].jobs))
    first, other = (
        [i for i, job in enumerate(jobs) if job.shape.name == name and job.name == kind]
        for name, kind in ((TINY, "fused_experts_finalize"), (OTHER, "gemm1"))
    )
    assert max(first) < min(other)


# --- candidates -----------------------------------------------------------------------------------------------------


def shape_of(name: str, format: str | None) -> shapes.Shape:
    shape = parse_shape(name)
    return shape if format is None else shapes.quantised(shape, arguments.formats(format))


@pytest.mark.parametrize("format", [None, "int4", "int4+none", "fp8_block", "none+mxfp4", "nvfp4+fp8_tensor"])
@pytest.mark.parametrize("name", ["dsv3_tp8", "qwen3next", "llama4_scout", PLAIN])
def test_the_heuristics_is_the_first_of_every_launchs_tiles_and_has_a_partner(name: str, format: str | None) -> None:
    if (name, format) == (PLAIN, "none+mxfp4"):
        return  # nothing of it is quantised
    shape = shape_of(name, format)
    for T in (*tune.TOKENS, 3, 100):
        tiles, first = candidates.tiles(shape, T), candidates.heuristic(shape, T)
        assert candidates.choices(shape, T, first.tiles)[0] == first
        assert ("shared_gemm1" in tiles) == (shape.S > 0)
        for kernel, some in tiles.items():
            assert some[0] == getattr(candidates.whole(first.tiles), kernel)
            assert len(set(some)) == len(some) > 1
        assert {t.block_m for t in tiles["gemm1"]} & {t.block_m for t in tiles["gemm2"]}


@pytest.mark.parametrize("format", ["int4+none", "none+fp8_block", "fp8_channel", "nvfp4+fp8_block"])
def test_candidates_are_such_as_tables_take(format: str, tmp_path) -> None:
    shape = shape_of("kimi_k2_tp8", format)
    key = candidates.layer_shape(shape)
    for n in range(36):  # each table has the nth tiles, and each tile of gemm2 has its turn beside one of its height
        rows = {}
        for T in tune.TOKENS:
            tiles = candidates.tiles(shape, T)
            gemm2, shared1, shared2 = (tiles[name][n % len(tiles[name])] for name in GEMMS[1:])
            partners = [tile for tile in tiles["gemm1"] if (tile.block_m, tile.tail) == (gemm2.block_m, gemm2.tail)]
            best = LayerTiles(partners[n // 6 % len(partners)], gemm2, shared1, shared2, overlaps=False)
            choices = candidates.choices(shape, T, best)
            rows[key, bucket(T)] = Row(T, choices[-1 - n % (len(choices) - 1)], {}, {}, {})
        tuning.save_table(Table(gpu=GPU, rows=rows), tmp_path / "t.json")
        assert load_table(tmp_path / "t.json").rows == rows


def test_programs_share_tiles_where_a_gpu_has_room_for_more_of_them() -> None:
    found = {}
    for name, T in (("dsv3_tp8", 1), ("dsv3_tp8", 4), ("dsv3_tp8", 16), ("qwen3next", 1), ("dsv3", 1)):
        shape = parse_shape(name)
        choices = candidates.choices(shape, T, candidates.heuristic(shape, T).tiles)
        found[name, T] = {choice.tiles.gemm1.splits for choice in choices}
    # Programs of these tiles: 8 experts x 8 column tiles, 32 x 8, 128 x 8, 10 x 16, 8 x 64.
    assert list(found.values()) == [{1, 2, 4}, {1, 2}, {1}, {1, 2}, {1}]


def test_fused_is_timed_only_where_widths_and_formats_allow_it() -> None:
    shape = parse_shape("dsv3_tp8")
    assert candidates.heuristic(shape, 1).schedule == "fused"
    assert candidates.heuristic(shape_of("dsv3_tp8", "fp8_block"), 1).schedule == "fused"
    assert candidates.heuristic(shape_of("dsv3_tp8", "fp8_block+fp8_channel"), 1).schedule == "dual"
    assert "fused" in candidates.schedules(parse_shape("v2lite"))
    assert "fused" in candidates.schedules(shape_of("v2lite", "int4"))
    assert "fused" not in candidates.schedules(shape_of("v2lite", "int4+none"))
    assert "fused" not in candidates.schedules(parse_shape("64/48/16/4/64"))
    assert candidates.schedules(parse_shape(PLAIN)) == ("serial",)


def a_tile(block_m: int, n: int = 32) -> Tile:
    return Tile(block_m, n, 64, 4, 3)


def test_the_fastest_pair_of_one_height_wins_by_its_sum() -> None:
    us = {
        "gemm1": {a_tile(16): 10.0, a_tile(32): 1.0, a_tile(64): 4.0},
        "gemm2": {a_tile(16): 1.0, a_tile(32, 16): 11.0, a_tile(64): 5.0},
        "shared_gemm1": {a_tile(16): 3.0, a_tile(64): 2.0},
        "shared_gemm2": {a_tile(16): 3.0},
    }
    first = LayerTiles(a_tile(16), a_tile(16), a_tile(16), a_tile(16), overlaps=True)
    best = candidates.best_tiles(us, first)
    assert best == LayerTiles(a_tile(64), a_tile(64), a_tile(64), a_tile(16), overlaps=False)
    us["gemm1"][a_tile(64)] = 5.95  # less than 1 % faster than the heuristic's
    best = candidates.best_tiles(us, first)
    assert best is not None
    assert best[:2] == (a_tile(16), a_tile(16))


def test_no_pair_of_one_height_is_no_choice() -> None:
    first = LayerTiles(a_tile(16), a_tile(16), a_tile(16), a_tile(16), overlaps=False)
    us = {"gemm1": {a_tile(16): 1.0}, "gemm2": {a_tile(32): 1.0}}
    assert candidates.best_tiles(us, first) is None


# --- compiling ------------------------------------------------------------------------------------------------------


def test_other_processes_compile_for_a_gpu_that_is_not_there_and_say_what_fails(monkeypatch, tmp_path) -> None:
    pytest.importorskip("triton", reason="no triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = parse_shape(TINY)
    good = [Job(shape, "gemm2", a_tile(16)), Job(shape, "gate", None), Job(shape, "shared_gemm1", a_tile(16), True)]
    good = [job for job in good if job.name != "gate" or shape.shared_gate]
    bad = Job(shape, "gemm1", a_tile(16, 48))
    compiler = Compiler(Target("cuda", 90, 32), 2)
    try:
        found = compiler.failures([*good, bad], time.monotonic() + 120)
        assert found.keys() == {bad}
        assert "Error" in found[bad]
        with pytest.raises(OutOfTime):
            compiler.failures([Job(shape, "gemm1", a_tile(32))], time.monotonic())
    finally:
        compiler.close()
    assert len(list(tmp_path.glob("**/_grouped_gemm.cubin"))) >= len(good)


def test_the_layers_jobs_are_the_launches_of_its_schedules() -> None:
    shape = parse_shape(TINY)
    tiles = LayerTiles(*map(a_tile, (16, 16, 32, 64)), overlaps=True)
    dual = tune._layer_jobs(shape, [Choice(tiles, "dual")], True)
    assert [job.name for job in dual] == [
        "router", "choose_order", "gemm1", "gemm2", "shared_gemm1", "shared_gemm2", "finalize",
    ]  # fmt: skip
    assert [job.tile and job.tile.block_m for job in dual] == [None, None, 16, 16, 32, 64, None]
    assert any(job.early for job in dual)
    assert not any(job.early or job.followed for job in tune._layer_jobs(shape, [Choice(tiles, "dual")], False))
    fused = tune._layer_jobs(shape, [Choice(tiles._replace(overlaps=False), "fused")], True)
    assert [(job.name, job.tile) for job in fused[2:4]] == [("fused_gemm1", a_tile(16)), ("fused_gemm2", a_tile(16))]
    assert not any(job.early or job.followed for job in fused)
    one = tune._layer_jobs(shape, [Choice(tiles._replace(one_launch=True), "dual")], True)
    assert [job.name for job in one] == [
        "router", "choose_order", "experts", "shared_gemm1", "shared_gemm2", "finalize",
    ]  # fmt: skip
    assert one[2].tile == tiles[:2]


def test_every_bucket_has_a_default_number_of_tokens() -> None:
    assert [bucket(T) for T in tune.TOKENS] == list(BUCKETS)


# --- the kernels, in Triton's interpreter ---------------------------------------------------------------------------


def test_each_candidate_is_held_against_the_heuristics_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton", reason="no triton")
    cases = pathlib.Path(__file__).with_name("tune_cases.py")
    seed = f"--seed={request.config.option.seed}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", seed, str(cases)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=cases.parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_a_job_is_compiled_on_tensors_without_memory() -> None:
    pytest.importorskip("triton", reason="no triton")
    shape = parse_shape("qwen3next")
    layer = compiling._without_memory(shape, compiling.dims_of(shape, 4))
    assert all(t.device.type == "meta" for t in layer if t is not None)
    assert layer.shared_gate is not None


@pytest.mark.parametrize("format", [*formats.FORMATS, "int4+none", "none+fp8_block"])
def test_a_job_is_compiled_for_the_tensors_that_are_timed(format: str) -> None:
    """Or what is compiled ahead would be compiled again."""
    pytest.importorskip("triton", reason="no triton")
    shape = shape_of("96/48/12/3/32", format)
    dims = compiling.dims_of(shape, 4)
    problem = Problem(shape, "bf16", torch.device("cpu"), seed=5)
    real = compiling.layer_of(problem.draw(4), problem.tensors(problem.at(1)), dims)
    for name, timed, ahead in zip(real._fields, real, compiling._without_memory(shape, dims), strict=True):
        found = [None if t is None else (t.dtype, t.shape, t.stride()) for t in (timed, ahead)]
        assert found[0] == found[1], name
