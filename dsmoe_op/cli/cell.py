"""One cell of the benchmark: all candidates on one shape, dtype and number of tokens, checked, then timed in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dsmoe_op.cli import output, parts, peers, profiling, shapes, timing
from dsmoe_op.cli.plain import Candidate
from dsmoe_op.cli.problem import Answers, Problem
from dsmoe_op.cli.shapes import Ceilings
from dsmoe_op.cli.timing import Time

OK, WRONG, FAILED = "ok", "WRONG", "FAILED"
HIDDEN_UP_TO = 64
"""Tokens up to which it is told how much of the shared expert the other stream hides."""


@dataclasses.dataclass(kw_only=True)
class Row:
    """One candidate.

    Attributes:
        graph: whether the time is of a CUDA graph's replay.
        time: None where the candidate failed.
        error: relative distance from the reference, the largest of the inputs that are checked.
        failure: why there is no time.
    """

    candidate: str
    graph: bool
    time: Time | None = None
    error: float | None = None
    status: str = OK
    failure: str | None = None


@dataclasses.dataclass(kw_only=True)
class Cell:
    """Candidates side by side.

    Attributes:
        distinct_experts: that an input's tokens hit, in the mean over inputs.
        floor_us: below which no layer can be on this machine.
        ours: name of the row that the others are compared with.
        details: of that row, where the device is a GPU: kernels, streams, memory, times of the host.
        left_out: candidates that were not tried, and why.
    """

    shape: str
    dtype: str
    tokens: int
    inputs: int
    distinct_experts: float
    floor_us: float
    ours: str
    rows: list[Row]
    details: dict[str, Any]
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def row(self, candidate: str) -> Row | None:
        return next((row for row in self.rows if row.candidate == candidate), None)

    def us(self, candidate: str) -> float | None:
        row = self.row(candidate)
        return None if row is None or row.time is None else row.time.us

    def ratio(self, row: Row) -> float | None:
        """To ours: above 1, the candidate is slower."""
        base = self.us(self.ours)
        return None if base is None or row.time is None else row.time.us / base

    def percent_of_floor(self, row: Row) -> float | None:
        """100 where nothing can be faster."""
        return None if row.time is None else 100 * self.floor_us / row.time.us


def measure(
    problem: Problem, T: int, schedules: Sequence[str], against: Sequence[str], ceilings: Ceilings, seconds: float
) -> Cell:
    """Builds the candidates, holds what they compute against the reference, and times them."""
    with torch.inference_mode():
        cell = _Bench(problem, T, ceilings, seconds).cell(schedules, against)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # what was compiled may hold weights
    gc.collect()
    if problem.device.type == "cuda":
        torch.cuda.empty_cache()
    return cell


class _Bench:
    def __init__(self, problem: Problem, T: int, ceilings: Ceilings, seconds: float) -> None:
        self.problem, self.T, self.ceilings, self.seconds = problem, T, ceilings, seconds
        self.gpu = problem.device.type == "cuda"
        self.inputs = problem.inputs(T)
        self.count = len(self.inputs)
        self.answers = Answers(problem, self.inputs)
        self.calls: dict[str, timing.Call] = {}
        self.graphs: dict[str, timing.Captured] = {}
        self.first: dict[str, tuple[float, float]] = {}

    def cell(self, schedules: Sequence[str], against: Sequence[str]) -> Cell:
        problem, T = self.problem, self.T
        main = "auto" if "auto" in schedules else schedules[0]
        ordered = [main, *(s for s in schedules if s != main)]
        ours = [peers.ours(problem, schedule) for schedule in ordered]
        every = [c for name in against for c in peers.AGAINST[name](problem, T)]
        others = [c for c in every if c.left_out is None]
        hit = problem.hit(self.inputs)
        ceilings = self.ceilings
        floor = shapes.floor_us(
            problem.shape,
            T,
            hit,
            problem.itemsize,
            ceilings.bandwidth,
            ceilings.flops[problem.dtype],
            ceilings.cache,
            routed_bytes=problem.routed_bytes,
            shared_bytes=problem.shared_bytes,
        )
        rows = [self._prepare(candidate) for candidate in ours]
        alone = peers.ours(problem, "serial", shared=False)
        wanted = {peers.ours(problem, schedule).name for schedule in ("serial", "dual")}
        hides = self.gpu and problem.shape.S > 0 and T <= HIDDEN_UP_TO and wanted <= self.graphs.keys()
        if hides:
            hides = self._prepare(alone, checked=False).status == OK
        rows += [self._prepare(candidate) for candidate in others]  # last: a capture that fails may leave much behind
        times = self._times()
        for row in rows:
            row.time = times.get(row.candidate)
        cell = Cell(
            shape=problem.shape.name,
            dtype=problem.dtype,
            tokens=T,
            inputs=self.count,
            distinct_experts=hit,
            floor_us=floor,
            ours=ours[0].name,
            rows=rows,
            details={},
            left_out={c.name: c.left_out for c in every if c.left_out is not None},
        )
        if self.gpu and cell.ours in self.graphs:
            cell.details = self._details(cell.ours)
        if hides:
            us = [times[name].us for name in (*sorted(wanted), alone.name)]
            cell.details["shared_expert"] = shared_expert_hidden(us[1], us[0], us[2], floor)
        return cell

    def _prepare(self, candidate: Candidate, *, checked: bool = True) -> Row:
        """Builds and captures it, and checks what it leaves; whatever goes wrong stays in its row."""
        row = Row(candidate=candidate.name, graph=self.gpu and candidate.captured)
        try:
            layer = candidate.build()

            def call(i: int) -> torch.Tensor:
                return layer(self.inputs[i], self.problem.at(i))

            begin = time.perf_counter()
            call(0)
            self._wait()
            called = time.perf_counter()
            if row.graph:
                captured = timing.capture(call, self.count)
                self.first[row.candidate] = called - begin, time.perf_counter() - called
                for out in captured.outputs:
                    out.fill_(torch.nan)
                captured.graph.replay()
                self._wait()
                outputs = dict(enumerate(captured.outputs))
            else:
                outputs = {i: call(i) for i in self.answers.inputs}
            if checked:
                errors = [self.answers.error(i, outputs[i]) for i in self.answers.inputs]
                row.error = max(errors, key=lambda e: math.inf if math.isnan(e) else e)
                is_ours = candidate.name.startswith(peers.OURS)
                limit = self.answers.limit if is_ours else self.answers.limit_of_others
                row.status = OK if row.error <= limit else WRONG  # NaN is wrong
            if row.graph:
                self.graphs[row.candidate] = captured
            self.calls[row.candidate] = call
        except Exception as error:
            row.status, row.failure = FAILED, output.error_text(error)
            self._recover()
        return row

    def _times(self) -> dict[str, Time]:
        if not self.gpu:
            return timing.time_shuffled(self.calls, self.count, self.seconds)
        replays = {name: captured.graph.replay for name, captured in self.graphs.items()}
        eager = {name: self._all_inputs(call) for name, call in self.calls.items() if name not in replays}
        return timing.time_in_turn(replays, self.count, self.seconds) | timing.time_in_turn(
            eager, self.count, self.seconds / 4
        )

    def _all_inputs(self, call: timing.Call) -> timing.Run:
        def run() -> None:
            for i in range(self.count):
                call(i)

        return run

    def _details(self, name: str, replays: int = 3) -> dict[str, Any]:
        call, replay = self.calls[name], self.graphs[name].graph.replay
        first_call, first_capture = self.first[name]
        itemsize = self.problem.itemsize
        peak, bound = timing.peak_bytes(call), shapes.memory_bound(self.problem.shape, self.T, itemsize)
        work = profiling.profile(replay, calls=replays)
        calls = replays * self.count
        return {
            "kernels": [part._asdict() for part in parts.parts(work, calls)],
            "streams": profiling.summarize(work, calls=calls).as_json(),
            "peak_bytes": peak,
            "peak_bound_bytes": bound,
            "peak_within_bound": peak <= bound,
            "host_us_of_an_eager_call": timing.host_us(call, self.count),
            "first_call_s": first_call,
            "first_capture_s": first_capture,
        }

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def _recover(self) -> None:
        """After an error: so that the next candidate starts from nothing."""
        with contextlib.suppress(Exception):
            self._wait()
        with contextlib.suppress(Exception):
            torch._dynamo.reset()
        gc.collect()
        if self.gpu:
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()


def shared_expert_hidden(serial: float, dual: float, routed_only: float, floor: float) -> dict[str, float]:
    """How much of the shared expert's time the second stream hides; all in microseconds a layer.

    Its own time is what it adds on one stream: serial - routed_only. What is left of it on two streams is what dual
    takes beyond the routed experts, or beyond the floor, which nothing can hide.
    """
    alone, left = serial - routed_only, dual - max(routed_only, floor)
    return {
        "routed_only_us": routed_only,
        "shared_only_us": alone,
        "not_hidden_us": left,
        "not_hidden_of_shared_only": left / alone if alone > 0 else math.nan,
    }


def wrong_or_failed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.status != OK]
