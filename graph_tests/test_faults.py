"""A call that something ends, at any launch and any allocation: streams joined, nothing kept, the next call as ever."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gpu import SCHEDULES, Allocations, Boom
from layers import WAYS, make_layer
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

from fake_binaries import ALT, Launcher, log, named, run  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from dsmoe_op import checks, ops  # noqa: E402

__all__ = ["log"]  # a fixture
FORK, JOIN = ("alt", "main"), ("main", "alt")
ENTRIES = pytest.mark.parametrize("entry", [ops._moe, ops._moe_unfinalized])
ANY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
ANY_WAY = pytest.mark.parametrize("way", WAYS)


@contextlib.contextmanager
def failing_launch(index: int, *, before: bool) -> Iterator[None]:
    """The launch of that number raises, before it is made or after it."""
    numbers, call = itertools.count(), Launcher.__call__

    @functools.wraps(call)
    def failing(self: Launcher, *args: Any) -> None:
        number = next(numbers)
        if number != index or not before:
            call(self, *args)
        if number == index:
            raise Boom

    with mock.patch.object(Launcher, "__call__", failing):
        yield


def layer(way: str) -> tuple[Tensor, dict]:
    """One with a copied input, so that there is one more allocation."""
    x, args = make_layer(3, way=way, dtype=torch.bfloat16, shared_gate=True, expert_bias=True, S=64)
    args["w2_bias"] = args["w2_bias"].mT.contiguous().mT
    return x, args


def told(log: list[tuple], call: Any, x: Tensor, args: dict) -> list[tuple]:
    """What is launched and waited for in one call, with the names of its tensors."""
    log.clear()
    outputs = call()
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return named(log, {"x": x, **args, **{f"output {i}": t for i, t in enumerate(outputs)}})


@ENTRIES
@ANY_SCHEDULE
@ANY_WAY
def test_all_memory_is_taken_before_the_fork(log, way, schedule, entry) -> None:
    """On the caller's stream, then; and nothing that PyTorch would launch comes between a call's launches."""
    x, args = layer(way)
    for is_first in (True, False):
        log.clear()
        with Allocations(log):
            run(x, args, schedule=schedule, entry=entry)
        taken = log.count(("allocates",))
        outputs, workspace, copies = 1 if entry is ops._moe else 5, 1, 1 + is_first
        assert taken == outputs + workspace + copies
        assert log[:taken] == [("allocates",)] * taken
        assert (log[taken] == FORK) == (FORK in log) == (schedule in ("dual", "dual_shared_main"))


@pytest.mark.parametrize("is_first_call", [True, False])
@ENTRIES
@ANY_SCHEDULE
@ANY_WAY
def test_an_exception_at_any_launch_joins_the_streams_and_keeps_nothing(
    log, counted, monkeypatch, way, schedule, entry, is_first_call
) -> None:
    x, args = layer(way)
    call = functools.partial(run, x, args, schedule=schedule, entry=entry)
    expected = told(log, call, x, args)
    launches = sum(len(line) > 2 for line in expected)
    for index, before in itertools.product(range(launches), (True, False)):
        if is_first_call:
            monkeypatch.setattr(checks, "_checked", {})
        log.clear()
        with Allocations() as allocations, failing_launch(index, before=before), pytest.raises(Boom):
            call()
        assert sum(len(line) > 2 for line in log) == index + (not before)
        assert [line for line in log if len(line) == 2] == ([FORK, JOIN] if FORK in expected else [])
        on_alt = [i for i, line in enumerate(log) if len(line) > 2 and line[1] == ALT]
        assert all(log.index(FORK) < i < log.index(JOIN) for i in on_alt)
        assert [ref() for ref in allocations.made] == [None] * len(allocations.made)
        assert told(log, call, x, args) == expected
        counted("calls ended by an exception at a launch")


@pytest.mark.parametrize("is_first_call", [True, False])
@ENTRIES
@ANY_SCHEDULE
@ANY_WAY
def test_a_failed_allocation_is_a_clean_error(log, counted, monkeypatch, way, schedule, entry, is_first_call) -> None:
    """Nothing is launched or waited for, nothing stays, and the next call is as if it had not been."""
    x, args = layer(way)
    call = functools.partial(run, x, args, schedule=schedule, entry=entry)
    expected = told(log, call, x, args)
    with Allocations() as all_of_them:
        call()
    for index in range(all_of_them.count):
        if is_first_call:
            monkeypatch.setattr(checks, "_checked", {})
        log.clear()
        with Allocations(fail_at=index) as allocations, pytest.raises(torch.OutOfMemoryError):
            call()
        assert log == []
        assert [ref() for ref in allocations.made] == [None] * index
        assert told(log, call, x, args) == expected
        counted("calls ended by a failed allocation")


@ANY_SCHEDULE
def test_a_kernel_that_cannot_be_loaded_leaves_no_plan_behind(log, monkeypatch, schedule) -> None:
    """A plan is kept when all its launches are bound, or not at all."""
    x, args = layer("router_weight")
    call = functools.partial(run, x, args, schedule=schedule)
    expected = told(log, call, x, args)
    warmup = JITFunction.warmup
    for index in range(sum(len(line) > 2 for line in expected)):
        numbers = itertools.count()

        def failing(*args: Any, index: int = index, numbers: Iterator[int] = numbers, **kwargs: Any) -> object:
            if next(numbers) == index:
                raise Boom
            return warmup(*args, **kwargs)

        monkeypatch.setattr(checks, "_checked", {})
        with mock.patch.object(JITFunction, "warmup", failing), pytest.raises(Boom):
            call()
        assert [one.plans for one in checks._checked.values()] == [{}]
        assert told(log, call, x, args) == expected
