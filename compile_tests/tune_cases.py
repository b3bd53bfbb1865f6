"""The launches that `tune` times, on the CPU in Triton's interpreter. `test_tune.py` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from dsmoe_op import reference
from dsmoe_op.cli import arguments, candidates, shapes, timing, trial
from dsmoe_op.cli.problem import ROWS_LIMITS, Problem
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import INTERPRET
from dsmoe_op.tuning import Tile

assert INTERPRET

CONFIG = MoEConfig(top_k=2, score="softmax", normalize="sum")
SHAPE = Shape(name="small", H=64, I=32, E=4, K=2, S=48, config=CONFIG, shared_gate=True)


class Graph(NamedTuple):
    """A replay calls again."""

    run: Callable[[int], torch.Tensor]
    count: int

    def replay(self) -> None:
        for i in range(self.count):
            self.run(i)


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(run: Any, count: int) -> timing.Captured:
        return timing.Captured(Graph(run, count), [run(i) for i in range(count)])  # type: ignore[arg-type]

    def in_turn(runs: Any, calls: int, rounds: int) -> dict[str, timing.Time]:
        return {name: timing.Time(10.0 + n, 0, 0, rounds) for n, name in enumerate(runs)}

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "time_in_turn", in_turn)
    monkeypatch.setattr(trial, "recover", lambda: None)
    monkeypatch.setattr(Problem, "count", lambda self, T: 2)


def made(T: int, say: Callable[[str], None], shape: Shape = SHAPE) -> tuple[Problem, list[torch.Tensor], trial.Trial]:
    problem = Problem(shape, "fp32", torch.device("cpu"), int(torch.randint(1 << 30, ())))
    inputs = problem.inputs(T)
    return problem, inputs, trial.Trial(problem, inputs, say)


def small(tiles: candidates.Candidates) -> candidates.Candidates:
    """The interpreter is slow: four of each launch, with two heights."""
    return {name: tuple(dict.fromkeys((*some[:3], some[-1]))) for name, some in tiles.items()}


@pytest.mark.parametrize(("T", "format"), [(3, None), (40, None), (9, "int4+none"), (9, "fp8_block")])
def test_every_candidate_leaves_what_the_heuristics_leaves(T: int, format: str | None) -> None:
    complaints: list[str] = []
    shape = SHAPE if format is None else shapes.quantised(SHAPE, arguments.formats(format))
    problem, inputs, found = made(T, complaints.append, shape)
    tiles = small(candidates.tiles(shape, T))
    times = found.times(tiles)
    assert complaints == []
    assert {name: tuple(us) for name, us in times.items()} == dict(tiles)
    for i, x in enumerate(inputs):  # and that is right: y and shared are those of the layer
        call = found._calls(found.first.gemm1)[i]
        call.issue("finalize")
        right = reference.moe(x, config=shape.config, **problem.tensors(problem.at(i)))
        limit = ROWS_LIMITS[0] if problem.rounds_rows else 1e-4
        assert float((call.out - right).norm() / right.norm()) < limit


def test_a_tile_that_is_wrong_or_fails_is_told_and_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, failing = Tile(16, 64, 32, 4, 2), Tile(16, 32, 32, 4, 2)
    run_of = trial.Trial._run

    def _run(self: trial.Trial, name: str, tile: Tile) -> timing.Call:
        inner = run_of(self, name, tile)

        def run(i: int) -> torch.Tensor:
            if tile == failing:
                raise RuntimeError("out of resource")
            out = inner(i)
            return out.mul_(1.02) if tile == wrong else out

        return run

    monkeypatch.setattr(trial.Trial, "_run", _run)
    complaints: list[str] = []
    _, _, found = made(5, complaints.append)
    first = candidates.tiles(SHAPE, 5)["gemm1"][0]
    times = found.times({"gemm1": (first, wrong, failing)})
    assert tuple(times["gemm1"]) == (first,)
    assert "gemm1 16x64x32 4 warps 2 stages: WRONG, 0.02 from the heuristic's" in complaints
    assert any("gemm1 16x32x32" in text and "out of resource" in text for text in complaints)
