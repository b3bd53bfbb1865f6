"""The command line on a GPU: a compiled model in CUDA graphs, and plain two-stream code beside the op."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

import pytest
import torch
from gpu import needs_gpu

from dsmoe_op.cli import main, peers, profiling, serving_peers

pytestmark = needs_gpu


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command's exit code, and the one object on its stdout."""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_the_profile_tells_streams_and_their_overlap() -> None:
    side = torch.cuda.Stream()

    def together() -> None:
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(1_000_000)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
        torch.cuda.current_stream().wait_stream(side)

    def apart() -> None:
        torch.cuda._sleep(1_000_000)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
        torch.cuda.current_stream().wait_stream(side)

    for call in (together, apart):
        call()
    overlapping, serial = profiling.streams_of(together), profiling.streams_of(apart)
    assert sorted(overlapping.kernels.values()) == sorted(serial.kernels.values()) == [1, 1]
    assert overlapping.overlap_us > 0.5 * overlapping.busy_us
    assert serial.overlap_us < 0.05 * serial.busy_us


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_compiled_model_in_graphs_gives_the_plain_models_tokens_from_two_streams(
    dtype: str, command: Any, fresh_dynamo: None
) -> None:
    pytest.importorskip("transformers")
    small = ["--layers", "3", "--tokens", "12", "--dtype", dtype]
    code, result = command("run", *small, "--enable-torch-compile", "--cuda-graph-bs", "1,4")
    assert code == 0, result
    assert result["cuda_graphs"]["captured"] == [4, 1]
    assert result["compile"]["op_nodes_per_layer"] == [1]
    replayed = [row for row in result["patched"] if row["mode"] == "CUDA graph"]
    assert [(row["requests"], row["batch"]) for row in replayed] == [(1, 1), (2, 4), (4, 4)]
    streams = result["streams"]["CUDA graph"]
    assert len(streams["kernels_by_stream"]) == 2
    assert streams["overlap_us"] > 0


def test_an_eager_model_is_captured_too(command: Any) -> None:
    pytest.importorskip("transformers")
    code, result = command("run", "--family", "qwen2_moe", "--layers", "2", "--tokens", "6", "--cuda-graph-bs", "2")
    assert code == 0, result
    assert [row["mode"] for row in result["patched"]] == ["eager"] * 2 + ["CUDA graph"] * 2


def test_the_op_is_never_wrong_where_plain_code_may_be(command: Any, fresh_dynamo: None) -> None:
    modes = "eager,eager-captured,reduce-overhead"
    code, result = command("hazard", "--calls", "20", "--modes", modes)
    assert code == 0, result
    ours = [row for row in result["rows"] if row["code"] == "dsmoe_op"]
    assert len(ours) == 6
    assert all(row["wrong"] == 0 and len(row["kernels_by_stream"]) > 1 for row in ours)
    eager = [row for row in result["rows"] if row["mode"] == "eager" and row["code"] != "dsmoe_op"]
    assert all(
        row["wrong"] == 0 and len(row["kernels_by_stream"]) == 2 for row in eager
    )  # so the bench itself is right


BENCH = ["bench", "--shape", "256/128/16/4/384", "--seconds", "0.2"]


def test_bench_times_checked_graphs_of_every_schedule_and_lists_the_ops_parts(command: Any, fresh_dynamo: None) -> None:
    pytest.importorskip("transformers")
    code, result = command(*BENCH, "--tokens", "1,33")
    assert code == 0, result
    assert 0.1 < result["ceilings"]["read_tb_per_s"] < 50
    assert result["ceilings"]["launch_us"] < 10
    for T in (1, 33):
        rows = {row["candidate"]: row for row in result["rows"] if row["tokens"] == T}
        for schedule in ("auto", "serial", "dual", "dual_shared_main", "fused"):
            row = rows.pop(f"dsmoe_op {schedule}")
            assert row["status"] == "ok"
            assert row["cuda_graph"]
            assert 1 < row["us"] < 1000
        assert {"eager", "compiled", "transformers grouped_mm", "transformers batched_mm compiled"} <= rows.keys()
        assert all(row["cuda_graph"] for row in rows.values())
        right = [name for name, row in rows.items() if name != "native_streams"]
        assert all(rows[name]["status"] == "ok" for name in right), rows
    for details in result["details"]:
        found = {kernel["part"] for kernel in details["kernels"]}
        assert {"router", "experts", "shared", "finalize"} <= found
        assert sum(details["streams"]["kernels_by_stream"].values()) == pytest.approx(len(details["kernels"]))
        assert details["peak_within_bound"], details
        assert details["shared_expert"]["shared_only_us"] > 0


@pytest.mark.parametrize("format", [[], ["--format", "fp8_block"]], ids=["bf16", "fp8_block"])
@pytest.mark.parametrize("name", serving_peers.PEERS)
def test_bench_times_servers_that_are_installed_and_right(name: str, format: list[str], command: Any) -> None:
    if (reason := serving_peers.missing(name)) is not None:
        pytest.skip(reason)
    if name == ("triton_kernels" if format else "deepgemm"):
        pytest.skip("not in this format")
    shape = ["bench", "--shape", "1024/256/32/4/512", "--seconds", "0.2", "--schedule", "auto"]
    code, result = command(*shape, "--tokens", "1,33", "--against", name, *format)
    assert code == 0, result
    theirs = [row for row in result["rows"] if row["candidate"].startswith(name)]
    assert {row["candidate"] for row in theirs} >= {name, f"{name} two streams"}
    assert all((row["status"], row["cuda_graph"]) == ("ok", True) for row in theirs), theirs


def test_bench_sees_a_graph_that_leaves_something_else(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.dual_stream_moe
    monkeypatch.setattr(peers, "dual_stream_moe", lambda x, **given: 1.03 * right(x, **given))
    code, result = command(*BENCH, "--tokens", "5", "--against", "eager", "--schedule", "dual")
    assert code == 1
    assert [(row["candidate"], row["status"]) for row in result["rows"]] == [
        ("dsmoe_op dual", "WRONG"),
        ("eager", "ok"),
    ]


def test_bench_times_what_a_graph_cannot_hold_without_one(command: Any) -> None:
    code, result = command(*BENCH, "--tokens", "5", "--against", "eager", "--schedule", "auto", "--dtype", "fp32,fp16")
    assert code == 0, result
    assert [row["cuda_graph"] for row in result["rows"]] == [True, False] * 2
    assert all(row["status"] == "ok" and row["us"] > 0 for row in result["rows"])


def test_doctor_sees_the_ops_streams_overlap(command: Any, fresh_dynamo: None) -> None:
    code, result = command("doctor")
    found = {finding["topic"]: finding for finding in result["findings"]}
    assert code == 0, [finding for finding in result["findings"] if finding["state"] == "problem"]
    assert found["the op, eager-captured"]["state"] == "ok"
    assert " us overlap; 0 of " in found["the op, eager-captured"]["found"]
    assert found["GPU"]["state"] in ("ok", "note")


TRACE = ["trace", "--shape", "256/128/16/4/384", "--tokens", "5"]


def ranges_by_part(result: dict[str, Any]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for row in result["parts"]:
        if row["part"] != "other":
            found[row["part"]] += row["ranges"]
    return found


def test_trace_finds_the_parts_on_two_overlapping_streams_in_a_graphs_replay(
    command: Any, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib")
    code, result = command(*TRACE, "--schedule", "dual", "--calls", "6", "--out", str(tmp_path / "trace"))
    assert code == 0
    assert ranges_by_part(result) == dict.fromkeys(("router", "routed", "shared", "finalize"), 6)
    assert len(result["streams"]) == 2
    assert 0 < result["overlap_us"] < result["busy_us"] < 6000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.png", "trace.svg"]
    saved, again = command("trace", "--from", str(tmp_path / "trace.json"), "--out", str(tmp_path / "again"))
    assert saved == 0
    assert (again["parts"], again["idle_us"]) == (result["parts"], result["idle_us"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--schedule", "serial"], ["router", "routed+finalize", "shared"]),
        (["--schedule", "fused", "--eager"], ["router", "routed+shared+finalize"]),
        (["--schedule", "dual", "--eager"], ["router", "routed", "shared", "finalize"]),
    ],
)
def test_trace_names_launches_of_several_parts(
    arguments: list[str], expected: list[str], command: Any, tmp_path: pathlib.Path
) -> None:
    code, result = command(*TRACE, *arguments, "--no-picture", "--out", str(tmp_path / "trace"))
    assert code == 0
    assert ranges_by_part(result) == dict.fromkeys(expected, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "dsmoe"}
    assert {f"dsmoe::{part}" for part in expected} <= names


def test_trace_shows_a_models_step(command: Any, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    small = ["--layers", "3", "--tokens", "2", "--schedule", "dual", "--no-picture", "--out", str(tmp_path / "trace")]
    code, result = command("trace", "--family", "deepseek_v3", *small)  # whose first layer is dense
    assert code == 0
    assert ranges_by_part(result) == dict.fromkeys(("router", "routed", "shared", "finalize"), 2)
    assert "other" in {row["part"] for row in result["parts"]}
