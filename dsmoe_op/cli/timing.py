"""Times of calls side by side: replays of CUDA graphs in turn, or calls on a CPU in an order shuffled each round."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]
Call = Callable[[int], Tensor]
"""The layer of input i."""
MIN_ROUNDS, MAX_ROUNDS = 15, 300


class Time(NamedTuple):
    """Microseconds of one call: median and quartiles over `rounds`."""

    us: float
    low: float
    high: float
    rounds: int


def summarize(samples: Sequence[float], calls: int = 1) -> Time:
    """samples: microseconds of `calls` calls each."""
    if len(samples) < 2:
        return Time(samples[0] / calls, samples[0] / calls, samples[0] / calls, len(samples))
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Time(middle / calls, low / calls, high / calls, len(samples))


# --- on a GPU -------------------------------------------------------------------------------------------------------


class Captured(NamedTuple):
    """A CUDA graph of one call for each input, and what a replay leaves."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor]


def capture(call: Call, count: int) -> Captured:
    """Runs the calls once outside, on a stream of their own, and captures them."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for i in range(count):
            call(i)
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(i) for i in range(count)]
    return Captured(graph, outputs)


def time_in_turn(
    runs: Mapping[str, Run], calls: int, seconds: float = 0, *, rounds: int | None = None
) -> dict[str, Time]:
    """Round robin over `runs`, `calls` calls each, with an event between any two; needs a GPU.

    The host runs ahead: a GPU that waited for it would be timed with its wait.

    Args:
        seconds: about how long to go on, within MIN_ROUNDS and MAX_ROUNDS.
        rounds: so many, and not by seconds.
    """
    if not runs:
        return {}
    for _ in range(2):
        once = _round(runs)
    if rounds is None:
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds * 1e6 / max(1.0, sum(once)))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, us in zip(runs, _round(runs), strict=True):
            samples[name].append(us)
    return {name: summarize(us, calls) for name, us in samples.items()}


def _round(runs: Mapping[str, Run]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead
    for event, run in zip(events, runs.values(), strict=False):
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def median_us(run: Run, repeats: int = 20) -> float:
    """Of back-to-back runs on a GPU."""
    for _ in range(3):
        run()
    return statistics.median(_round({str(n): run for n in range(repeats)}))


def host_us(call: Call, count: int, repeats: int = 50) -> float:
    """How long the host is busy with an eager call: the median until it returns, the GPU being idle before."""
    samples = []
    for n in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(n % count)
        samples.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(samples)


def peak_bytes(call: Call) -> int:
    """Memory that a call takes at its peak beyond what was there before and its output."""
    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.nbytes


# --- on a CPU -------------------------------------------------------------------------------------------------------


def time_shuffled(calls: Mapping[str, Call], count: int, seconds: float) -> dict[str, Time]:
    """Each call on an input drawn at random, so that none always follows the one that leaves the best caches behind."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for i in range(2):
            call(i % count)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < end):
        for name in random.sample(list(calls), len(calls)):
            i = random.randrange(count)
            begin = time.perf_counter()
            calls[name](i)
            samples[name].append(1e6 * (time.perf_counter() - begin))
        rounds += 1
    return {name: summarize(us) for name, us in samples.items()}
