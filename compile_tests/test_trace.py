"""`trace` on a machine without a GPU: figures against a count of each microsecond, parts against the schedule's plan,
what is written, and what is refused."""

from __future__ import annotations

import collections
import gzip
import importlib
import itertools
import json
import pathlib
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from layers import LAUNCHERS, make_layer

from dsmoe_op import MoEConfig, dual_stream_moe
from dsmoe_op import ranges as op_ranges
from dsmoe_op import schedule as schedules
from dsmoe_op.cli import main, parts, profiling, trace
from dsmoe_op.cli.profiling import Work

BIG = 5_150_080_722_954
"""Microseconds: where a profiler's clock may stand."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are promises about machines without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> Any:
    """The command's exit code, and the one object on its stdout; it writes to tmp_path/shown.*"""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["trace", *arguments, "--out", str(tmp_path / "shown"), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def saved(work: list[Work], path: pathlib.Path, others: tuple[dict[str, Any], ...] = ()) -> str:
    """A trace as torch.profiler saves one."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [
        {
            "ph": "X",
            "cat": kinds[i % 3] if w.name == "other" else "kernel",
            "name": w.name,
            "pid": w.device,
            "tid": w.stream,
            "ts": w.begin,
            "dur": w.end - w.begin,
            "args": {"device": w.device, "stream": w.stream, "correlation": i},
        }
        for i, w in enumerate(work)
    ]
    random.shuffle(events)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*others, *events]}))
    return str(path)


def random_work(count: int, streams: tuple[int, ...], device: int = 0) -> list[Work]:
    """At integer microseconds; also on one stream some overlap, and some take no time."""
    found = []
    for stream in streams:
        time = BIG + random.randrange(40)
        for _ in range(count):
            end = time + random.choice((0, 1, random.randrange(2, 30)))
            found.append(Work("other", stream, time, end, device))
            time = max(time, end + random.randrange(-2, 25))
    return found


def counted(work: list[Work], low: float = -1, high: float = float("inf")) -> tuple[int, int, int]:
    """Busy, overlapped and idle microseconds of a window, by a look at each."""
    first = int(min(w.begin for w in work))
    ticks: dict[int, set[int]] = collections.defaultdict(set)
    for w in work:
        for t in range(int(w.begin), int(w.end)):
            if first + low <= t < first + high:
                ticks[t].add(w.stream)
    inside = [w for w in work if w.begin < first + high and w.end > first + low]
    begin = max(min(w.begin for w in inside), first + low)
    end = min(max(w.end for w in inside), first + high)
    overlapped = sum(len(streams) > 1 for streams in ticks.values())
    return len(ticks), overlapped, int(end - begin) - len(ticks)


def figures(result: dict[str, Any]) -> tuple[float, float, float]:
    return result["busy_us"], result["overlap_us"], result["idle_us"]


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [(7,), (7, 13), (20, 7, 24)])
def test_figures_are_what_a_count_of_each_microsecond_gives(streams: tuple[int, ...]) -> None:
    for _ in range(20):
        work = random_work(random.randrange(1, 30), streams)
        found = profiling.summarize(work)
        assert (found.busy_us, found.overlap_us, found.idle_us) == counted(work)


def test_a_saved_trace_of_any_program_has_its_figures_and_its_lanes(show: Any, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    work = random_work(60, (7, 20, 24))
    code, result = show("--from", saved(work, tmp_path / "some.json"))
    assert code == 0
    assert figures(result) == counted(work)
    assert result["kernels_by_stream"] == {"7": 60, "20": 60, "24": 60}
    assert set(result["streams"].values()) == {"stream 7", "stream 20", "stream 24"}
    assert {row["part"] for row in result["parts"]} == {"other"}


@pytest.mark.parametrize(
    "named", [{}, *({"traceName": name} for name in ("/tmp/x/trace.json", "", None, 7, "a layer"))]
)
def test_a_saved_trace_is_called_what_it_was_saved_as(show: Any, tmp_path: pathlib.Path, named) -> None:
    path = pathlib.Path(saved(random_work(9, (7, 20)), tmp_path / "some.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    _, result = show("--from", str(path), "--no-picture")
    assert result["what"] == ("a layer" if "a layer" in named.values() else str(path))


def test_a_window_has_its_own_figures(show: Any, tmp_path: pathlib.Path) -> None:
    work = random_work(80, (7, 20))
    first, path = min(w.begin for w in work), saved(work, tmp_path / "some.json")
    inside = {int(w.begin - first) + 1 for w in work if w.end - w.begin > 2}  # where something runs
    low = min(inside)
    for high in random.sample(sorted(inside - {low}), k=4):
        code, result = show("--from", path, "--window", f"{low},{high}.0", "--no-picture")
        assert code == 0
        assert figures(result) == counted(work, low, high)


def test_a_gzipped_trace_and_a_bare_list_of_events_are_read_too(show: Any, tmp_path: pathlib.Path) -> None:
    work = random_work(9, (7, 20))
    whole = json.loads(pathlib.Path(saved(work, tmp_path / "some.json")).read_text())
    for name, data in (
        ("some.json.gz", gzip.compress(json.dumps(whole).encode())),
        ("bare.json", json.dumps(whole["traceEvents"]).encode()),
    ):
        tmp_path.joinpath(name).write_bytes(data)
        code, result = show("--from", str(tmp_path / name), "--no-picture")
        assert code == 0
        assert figures(result) == counted(work)


def test_each_gpu_of_a_trace_is_shown_alone(show: Any, tmp_path: pathlib.Path) -> None:
    by_gpu = {0: random_work(12, (7, 20), 0), 3: random_work(25, (7, 20), 3)}
    path = saved(by_gpu[0] + by_gpu[3], tmp_path / "some.json")
    for gpu, arguments in ((3, []), (0, ["--gpu", "0"])):
        code, result = show("--from", path, "--no-picture", *arguments)
        assert code == 0
        assert result["gpu"] == gpu
        assert figures(result) == counted(by_gpu[gpu])


# --- parts ----------------------------------------------------------------------------------------------------------

TENSORS = ("router_weight", "shared_w13", "shared_w2", "shared_gate", "correction_bias")
WAYS = {"router_weight": ("router_weight",), "router_logits": ("router_logits",), "topk": ("topk_ids", "topk_weights")}
KERNELS = {
    "quantize": ("_quantize_rows",),
    **dict.fromkeys(("quantize_h", "quantize_shared_h"), ("_quantize_h",)),
    "reorder": ("_reorder",),
    "reorder_h": ("_reorder_h",),
    "router": ("_router_logits",),
    "zero": ("_zero",),
    **dict.fromkeys(("choose_order", "choose", "order"), ("_route",)),
    **dict.fromkeys(("gemm1", "shared_gemm1"), ("_grouped_gemm", "_persistent_gemm1", "_persistent_coded")),
    **dict.fromkeys(("fused_gemm1", "fused_gemm2"), ("_grouped_gemm",)),
    **dict.fromkeys(("gemm2", "shared_gemm2"), ("_grouped_gemm", "_persistent_gemm2", "_persistent_coded")),
    **dict.fromkeys(("experts", "experts_finalize", "fused_experts", "fused_experts_finalize"), ("_experts",)),
    "gate": ("_shared_gate",),
    "finalize": ("_finalize",),
}
"""What the launches are on the GPU."""


def plans() -> list[tuple[str, tuple[schedules.Step, ...]]]:
    """Each schedule's steps in each form that ends with the sum."""
    found = []
    codes: tuple[frozenset[str], ...] = (frozenset(), frozenset({"routed", "shared"}))
    orders = (frozenset(), frozenset({"x", "h"}))
    options = itertools.product(
        ("serial", "dual", "dual_shared_main", "fused"), WAYS, (False, True), (False, True), codes, orders
    )
    for schedule, way, gate, one_launch, coded_rows, ordered in options:
        if ordered and (one_launch or coded_rows or schedule == "fused"):
            continue
        shared = ("shared_w13", "shared_w2", *(("shared_gate",) if gate else ()))
        for present in ((*WAYS[way], *shared), *((WAYS[way],) if schedule == "serial" else ())):
            for one_chunk, alt_first in itertools.product((False, True), (False, True)):
                steps = schedules.plan(
                    schedule, frozenset(present), zero_experts=False, finalized=True, one_chunk=one_chunk,
                    alt_first=alt_first, one_launch=one_launch, coded_rows=coded_rows,
                    coded_h=frozenset() if one_launch else coded_rows, ordered=ordered,
                )  # fmt: skip
                found.append((schedule, steps))
    return found


def run_on_paper(layers: Sequence[tuple[schedules.Step, ...]], *, early: bool) -> list[tuple[Work, str, int]]:
    """Kernels of these layers one after another, each with its part and layer.

    Which stream is which may change from one layer to the next, as in a replay. With `early`, a kernel may begin before
    the one ahead of it on its stream ends.
    """
    time = {"main": float(BIG), "alt": float(BIG)}
    found = []
    for layer, steps in enumerate(layers):
        lanes = dict(zip(("main", "alt"), random.sample((7, 13), 2), strict=True))
        time = dict.fromkeys(time, max(time.values()))
        for step in steps:
            if isinstance(step, schedules.Wait):
                time[step.waiter] = max(time.values())
                continue
            gap = random.uniform(-0.5, 0.5) if early and step.early else random.uniform(0.1, 1)
            begin = time[step.stream] + gap
            time[step.stream] = begin + random.uniform(2, 30)
            name = random.choice(KERNELS[step.name])
            work = Work(name, lanes[step.stream], begin, time[step.stream])
            found.append((work, schedules.PARTS[step.name], layer))
    return found


def test_every_launch_of_every_schedule_has_a_part() -> None:
    names = {step.name for _, steps in plans() for step in steps if isinstance(step, schedules.Launch)}
    assert names | {"fused_experts"} == schedules.PARTS.keys() == KERNELS.keys()  # that one leaves the sum to others


@pytest.mark.parametrize("early", [False, True])
def test_kernels_get_the_parts_of_the_launches_that_the_schedule_has_in_their_place(early: bool) -> None:
    for schedule, steps in plans():
        expected = run_on_paper([steps] * 3, early=early)
        found = parts.ranges([work for work, *_ in expected], fused=schedule == "fused")
        told = {work: (r.part, r.layer) for r in found for work in r.work}
        assert told == {work: (part, layer) for work, part, layer in expected}, (schedule, steps)


def test_layers_of_several_schedules_may_follow_one_another() -> None:
    others = [steps for schedule, steps in plans() if schedule != "fused"]
    for _ in range(20):
        expected = run_on_paper(random.choices(others, k=20), early=True)
        found = parts.ranges([work for work, *_ in expected], fused=False)
        assert {work: (r.part, r.layer) for r in found for work in r.work} == {w: (p, n) for w, p, n in expected}


def test_work_of_others_between_is_none_of_the_parts() -> None:
    dual = next(steps for schedule, steps in plans() if schedule == "dual")
    expected = run_on_paper([dual] * 4, early=False)
    ours = [work for work, *_ in expected]
    others = [Work(name, 7, w.end, w.end + 0.01) for w, name in zip(ours, itertools.cycle(("gemm", "my_experts")))]
    found = parts.ranges(sorted(ours + others, key=lambda w: w.begin), fused=False)
    told = {work: r.part for r in found for work in r.work}
    assert told == {work: part for work, part, _ in expected} | dict.fromkeys(others, "other")


def test_the_kernels_that_are_looked_for_are_the_ops() -> None:
    there = set()
    for module in LAUNCHERS:
        there |= vars(importlib.import_module(f"dsmoe_op.kernels.{module}")).keys()
    assert parts._LABELS.keys() <= there


# --- what is written ------------------------------------------------------------------------------------------------


def rows_of(written: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The events of the process that was added, by its rows' names."""
    added = [event for event in written["traceEvents"] if event.get("pid") == "dsmoe_op: parts by stream"]
    names = {event["tid"]: event["args"]["name"] for event in added if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in added:
        if event["ph"] in "BE":
            found[names[event["tid"]]].append(event)
    return found


def test_the_written_trace_has_nested_ranges_that_hold_the_kernels_of_their_part() -> None:
    for schedule, steps in plans():
        expected = run_on_paper([steps] * 2, early=True)
        view = trace.of_gpu([work for work, *_ in expected], fused=schedule == "fused")
        given = {"schemaVersion": 1, "traceEvents": [{"ph": "i", "name": "mine"}]}
        written = json.loads(json.dumps(trace.with_ranges(given, view)))
        assert written["traceEvents"][0] == {"ph": "i", "name": "mine"}
        held = []
        for events in rows_of(written).values():
            times = [event["ts"] for event in events]
            assert times == sorted(times)
            open_: list[dict[str, Any]] = []
            for event in events:
                if event["ph"] == "E":
                    assert open_.pop()["name"] == event["name"]
                    continue
                open_.append(event)
                if len(open_) == 2:
                    held.append((event["name"], event["ts"], open_[0]["name"], open_[0]["args"]["layer"]))
            assert not open_
        assert sorted(held) == sorted((w.name, w.begin, f"dsmoe::{part}", n) for w, part, n in expected)


def test_the_picture_has_lanes_parts_and_figures_by_name(show: Any, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    dual = next(steps for schedule, steps in plans() if schedule == "dual")
    work = [w for w, *_ in run_on_paper([dual], early=False)]
    main_stream = work[-1].stream
    code, result = show("--from", saved(work, tmp_path / "dual.json"))
    assert code == 0
    names = [f"caller's stream ({main_stream})", f"side stream ({20 - main_stream})"]
    assert list(result["streams"].values()) == names
    svg = re.sub("<!--.*?-->", "", tmp_path.joinpath("shown.svg").read_text())
    words = [*names, "router", "routed", "shared", "finalize", "two streams at once", "microseconds"]
    sums = profiling.summarize(work)
    words += [f"{sums.busy_us:,.1f} us busy", f"{sums.overlap_us:,.1f} us of it on two", f"{sums.idle_us:,.1f} us idle"]
    assert [word for word in words if word not in svg] == []
    assert tmp_path.joinpath("shown.png").read_bytes().startswith(b"\x89PNG")
    assert result["files"] == [str(tmp_path / "shown.png"), str(tmp_path / "shown.svg")]
    assert not tmp_path.joinpath("shown.json").exists()


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_a_recording_has_its_calls_and_nothing_of_what_ran_before_them() -> None:
    def call(name: str) -> None:
        with torch.profiler.record_function(name):
            torch.ones(3) + 1

    def named(trace: profiling.Trace) -> list[str]:
        return [e["name"] for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "user_annotation"]

    assert named(profiling.record(lambda: call("mine"), calls=3)) == ["mine"] * 3
    trace = profiling.record(lambda: call("mine"), calls=2, before=lambda: call("before"))
    assert named(trace) == ["mine"] * 2
    assert sum(event.get("name") == "aten::add" for event in trace["traceEvents"]) == 2
    assert any(event.get("ph") == "M" for event in trace["traceEvents"])


LAYER = ("--shape", "64/32/16/4/48", "--tokens", "5", "--calls", "3")


def test_a_layer_on_a_cpu_is_one_lane_of_its_parts(show: Any, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    code, result = show(*LAYER)
    assert code == 0
    assert result["gpu"] is None
    assert result["streams"] == {}
    assert [(row["part"], row["ranges"]) for row in result["parts"]] == [
        (part, 3) for part in ("router", "routed", "shared", "finalize")
    ]
    assert result["overlap_us"] == 0
    assert sum(row["us"] for row in result["parts"]) == pytest.approx(result["busy_us"], abs=0.1)
    written = json.loads(tmp_path.joinpath("shown.json").read_text())
    assert written["traceName"] == result["what"]
    on_cpu = [event for event in written["traceEvents"] if event.get("cat") == "user_annotation"]
    order = ["router", "routed", "shared", "finalize"] * 3
    assert [e["name"] for e in sorted(on_cpu, key=lambda e: e["ts"])] == [f"dsmoe::{part}" for part in order]
    assert any(event.get("cat") == "cpu_op" for event in written["traceEvents"])
    assert "CPU, so no streams" in tmp_path.joinpath("shown.svg").read_text()


def test_a_cpus_report_says_that_there_are_no_streams(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["trace", *LAYER, "--no-picture", "--out", str(tmp_path / "shown.json")]) == 0
    captured = capsys.readouterr()
    assert "a CPU has no streams to show" in captured.out
    assert "overlapped 0.0 us" in captured.out
    assert "%|" in captured.err  # the progress bar
    assert [path.name for path in tmp_path.iterdir()] == ["shown.json"]


def test_a_small_models_step_has_the_parts_of_each_layer(show: Any) -> None:
    pytest.importorskip("transformers")
    small = ["--layers", "3", "--hidden", "64", "--tokens", "2", "--no-picture"]
    code, result = show("--family", "deepseek_v3", *small)  # whose first layer is dense
    assert code == 0
    assert [row["ranges"] for row in result["parts"]] == [2] * 4


# --- ranges ---------------------------------------------------------------------------------------------------------


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_ranges, "record_function", None)
    x, args = make_layer(3, config=MoEConfig(top_k=2), H=32, E=8, I=16, S=48)
    dual_stream_moe(x, **args)
    with torch.profiler.profile(), pytest.raises(TypeError):
        dual_stream_moe(x, **args)


def test_each_launch_is_in_a_range_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules.streams, "current_handle", lambda index: 0)
    issued: list[str] = []
    every = [steps for schedule, steps in plans() if schedule in ("serial", "fused")]
    with torch.profiler.profile() as profiler:
        for steps in every:
            schedules.execute(steps, lambda name, stream: issued.append(name), torch.device("cuda", 0))
    assert issued == [step.name for steps in every for step in steps]
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("dsmoe::")]
    assert names == [f"dsmoe::{schedules.PARTS[name]}" for name in issued]


# --- what is refused ------------------------------------------------------------------------------------------------

KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {"stream": 7}}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"", "Chrome trace"),
        (b"\xff\x00 no text", "Chrome trace"),
        (b'{"traceEvents": [', "Chrome trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "Chrome trace"),
        (b"[" * 100_000, "Chrome trace"),
        (b'"a text"', "traceEvents"),
        (b'{"events": []}', "traceEvents"),
        (b'{"traceEvents": [1]}', "traceEvents"),
        (json.dumps([KERNEL | {"args": {}}]).encode(), "args.stream"),
        (json.dumps([KERNEL | {"args": None}]).encode(), "args.stream"),
        (json.dumps([KERNEL | {"dur": -1}]).encode(), "dur"),
        (json.dumps([KERNEL | {"ts": float("nan")}]).encode(), "ts"),
        (json.dumps([KERNEL | {"ts": "soon"}]).encode(), '"soon"'),
        (json.dumps([{k: v for k, v in KERNEL.items() if k != "dur"}]).encode(), "dur"),
        (b'{"traceEvents": []}', "nothing"),
        (json.dumps([KERNEL | {"cat": "cpu_op"}] * 3).encode(), "3 of cpu_op"),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_refused(content: bytes | None, word: str, capsys, tmp_path) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", "--from", str(path), "--no-picture", "--out", str(tmp_path / "shown")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: --from: " in captured.err
    assert str(path) in captured.err
    assert word in captured.err


@pytest.mark.parametrize(
    ("arguments", "named", "word"),
    [
        (["--from", "a.json", "--tokens", "3"], "--tokens", "--from"),
        (["--from", "a.json", "--eager"], "--eager", "--from"),
        (["--from", "a.json", "--shape", "v2lite"], "--shape", "--from"),
        (["--family", "mixtral", "--shape", "v2lite"], "--shape", "--family"),
        (["--gpu", "1"], "--gpu", "--from"),
        (["--shape", "64/32/16/4/48", "--schedule", "fused"], "--schedule", "multiple of I"),
        (["--window", "5,5"], "--window", "ascending"),
        (["--out", "nowhere/at/all"], "--out", "no folder"),
        (["--family", "no_such"], "--family", "mixtral"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str, word: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["trace", *arguments, *([] if "--out" in arguments else ["--no-picture"])])
    assert exit_.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {named}" in error
    assert word in error


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--gpu", "2"], "expected one of 0, got 2"), (["--window", "5000,6000"], "work takes")]
)
def test_what_a_trace_does_not_have_is_told(arguments: list[str], word: str, capsys, tmp_path) -> None:
    path = saved(random_work(5, (7,)), tmp_path / "some.json")
    assert main(["trace", "--from", path, *arguments, "--no-picture"]) == 2
    assert f"error: {arguments[0]}: " in (error := capsys.readouterr().err)
    assert word in error


def test_without_matplotlib_it_says_what_to_install_and_what_goes_without(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = ["trace", "--from", saved(random_work(5, (7,)), tmp_path / "some.json")]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "pip install 'dsmoe_op[bench]'" in error
    assert "--no-picture" in error
    assert main([*given, "--no-picture"]) == 0
