"""What ran on a GPU's streams: kernels by stream, and for how long two streams worked at once."""

from __future__ import annotations

import collections
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """One kernel, copy or fill on the GPU; times in microseconds, stream as the profiler numbers it."""

    name: str
    stream: int
    begin: float
    end: float


class Streams(NamedTuple):
    """A summary for one call.

    Attributes:
        kernels: by stream, copies and fills included; the busiest stream first.
        busy_us: time in which anything ran.
        overlap_us: time in which something ran on two streams or more.
    """

    kernels: dict[int, float]
    busy_us: float
    overlap_us: float

    def words(self) -> str:
        """For people."""
        by_stream = ", ".join(f"{count:g} on stream {stream}" for stream, count in self.kernels.items())
        if len(self.kernels) < 2:
            return f"kernels: {by_stream or 'none'}; one stream, so no overlap"
        overlap = f"{self.overlap_us:.1f} of {self.busy_us:.1f} us overlap" if self.overlap_us else "NO overlap"
        return f"kernels: {by_stream}; {overlap}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kernels_by_stream": {str(stream): count for stream, count in self.kernels.items()},
            "busy_us": round(self.busy_us, 2),
            "overlap_us": round(self.overlap_us, 2),
        }


def profile(call: Callable[[], object], *, calls: int = 4) -> list[Work]:
    """What `calls` calls of `call` put on the GPU, ordered by begin. Warm it up before. Needs a GPU.

    The profiler's exported trace is read, whose format is the same in all versions of torch that are supported.
    """
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return read_trace(json.load(file))
    finally:
        os.unlink(path)


def read_trace(trace: dict[str, Any]) -> list[Work]:
    """The GPU's work in a chrome trace of torch.profiler, ordered by begin."""
    work = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE:
            begin = float(event["ts"])
            work.append(Work(event["name"], int(event["args"]["stream"]), begin, begin + float(event["dur"])))
    return sorted(work, key=lambda w: w.begin)


def summarize(work: Iterable[Work], *, calls: int = 1, leave_out: Collection[str] = ()) -> Streams:
    """Counts and times of `calls` calls, for one of them, without work whose name contains a word of `leave_out`."""
    counted = [w for w in work if not any(word in w.name for word in leave_out)]
    kernels = collections.Counter(w.stream for w in counted)
    edges = sorted([(w.begin, 1, w.stream) for w in counted] + [(w.end, -1, w.stream) for w in counted])
    running: collections.Counter[int] = collections.Counter()
    busy = overlap = before = 0.0
    for time, change, stream in edges:
        if running:
            busy += time - before
        if len(running) > 1:
            overlap += time - before
        running[stream] += change
        if not running[stream]:
            del running[stream]
        before = time
    return Streams({s: count / calls for s, count in kernels.most_common()}, busy / calls, overlap / calls)


def streams_of(call: Callable[[], object], *, calls: int = 4, leave_out: Collection[str] = ()) -> Streams:
    """`profile`, summarized for one call."""
    return summarize(profile(call, calls=calls), calls=calls, leave_out=leave_out)
