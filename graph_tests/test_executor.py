"""The one executor of schedules, on streams that only write down what is done to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsmoe_op import schedule as schedules
from dsmoe_op import streams
from dsmoe_op.schedule import Launch, Step, Wait, execute, plan

DEVICE = torch.device("cuda", 0)
PRESENT = frozenset({"router_weight", "shared_w13", "shared_w2", "shared_gate"})
DUAL = plan("dual", PRESENT, zero_experts=False, finalized=True)
LAYERS = [
    plan(schedule, PRESENT, zero_experts=False, finalized=finalized, alt_first=alt_first)
    for schedule in ("dual", "dual_shared_main")
    for finalized in (True, False)
    for alt_first in (False, True)
]


class Boom(Exception):
    pass


class FakeLanes:
    """Two streams by handle, whose waits are written down."""

    def __init__(self, main: int, alt: int, log: list[str]) -> None:
        self.handles, self.log = {"main": main, "alt": alt}, log

    def wait(self, waiter: str, on: str) -> None:
        self.log.append(f"{waiter} waits for {on}")


class Machine:
    """The caller's stream, its side stream, and a log of what is issued where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, one_stream: bool = False) -> None:
        self.log: list[str] = []
        self.names = {7: "main"} if one_stream else {7: "main", 8: "alt"}
        self.asked_for: list[int] = []

        def lanes(device: int) -> FakeLanes:
            self.asked_for.append(device)
            return FakeLanes(7, 7 if one_stream else 8, self.log)

        def current_handle(device: int) -> int:
            self.asked_for.append(device)
            return 7

        monkeypatch.setattr(streams, "lanes", lanes)
        monkeypatch.setattr(streams, "current_handle", current_handle)
        monkeypatch.setattr(torch.cuda, "set_stream", None)  # PyTorch's current stream stays as it is
        assert schedules.streams is streams

    def issue(self, name: str, stream: int) -> None:
        self.log.append(f"{name} on {self.names[stream]}")

    def failing(self, at: str) -> Callable[[str, int], None]:
        def issue(name: str, stream: int) -> None:
            self.issue(name, stream)
            if name == at:
                raise Boom

        return issue


def told(step: Step) -> str:
    return f"{step.waiter} waits for {step.on}" if isinstance(step, Wait) else f"{step.name} on {step.stream}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("steps", LAYERS)
def test_every_step_is_issued_in_order_on_its_stream(machine, steps) -> None:
    execute(steps, machine.issue, DEVICE)
    assert machine.log == [told(step) for step in steps]


@pytest.mark.parametrize("schedule", ["serial", "dual"])
def test_the_caller_is_the_current_stream_of_the_tensors_device(machine, schedule) -> None:
    steps = plan(schedule, PRESENT, zero_experts=False, finalized=True)
    execute(steps, machine.issue, torch.device("cuda", 3))
    assert machine.asked_for == [3]


@pytest.mark.parametrize("steps", LAYERS)
def test_an_exception_at_any_launch_leaves_the_streams_joined(machine, steps) -> None:
    for launch in (step for step in steps if isinstance(step, Launch)):
        machine.log.clear()
        with pytest.raises(Boom):
            execute(steps, machine.failing(launch.name), DEVICE)
        on_alt = [i for i, line in enumerate(machine.log) if line.endswith("on alt") or line == "alt waits for main"]
        assert machine.log.index("main waits for alt") > max(on_alt)
        assert machine.log.count("main waits for alt") == 1


def test_nothing_is_issued_after_an_exception(machine) -> None:
    with pytest.raises(Boom):
        execute(DUAL, machine.failing("gemm1"), DEVICE)
    assert machine.log[-2:] == ["gemm1 on main", "main waits for alt"]


def test_the_call_after_an_exception_is_as_if_nothing_had_been(machine) -> None:
    for name in ("router", "shared_gemm1", "finalize"):
        with pytest.raises(Boom):
            execute(DUAL, machine.failing(name), DEVICE)
        machine.log.clear()
        execute(DUAL, machine.issue, DEVICE)
        assert machine.log == [told(step) for step in DUAL]


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_one_stream_schedules_touch_no_other_stream(machine, schedule) -> None:
    steps = plan(schedule, PRESENT, zero_experts=False, finalized=True)
    execute(steps, machine.issue, DEVICE)
    assert machine.log == [f"{step.name} on main" for step in steps]


@pytest.mark.parametrize("steps", LAYERS)
def test_a_side_stream_that_is_the_callers_own_runs_serial_without_waits(monkeypatch, steps) -> None:
    machine = Machine(monkeypatch, one_stream=True)
    execute(steps, machine.issue, DEVICE)
    assert machine.log == [f"{step.name} on main" for step in steps if isinstance(step, Launch)]
