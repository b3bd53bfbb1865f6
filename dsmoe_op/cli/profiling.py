"""What ran on a GPU's streams: kernels by stream, and for how long two streams worked at once."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import math
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Trace = dict[str, Any]
"""A Chrome trace as torch.profiler writes it: "traceEvents" is a list of events, the rest describes the run."""


class Work(NamedTuple):
    """One kernel, copy or fill on the GPU; times in microseconds, stream and device as the profiler numbers them."""

    name: str
    stream: int
    begin: float
    end: float
    device: int = 0


class Streams(NamedTuple):
    """A summary for one call.

    Attributes:
        kernels: by stream, copies and fills included; the busiest stream first.
        busy_us: time in which anything ran.
        overlap_us: time in which something ran on two streams or more.
        idle_us: time between the first begin and the last end in which nothing ran.
    """

    kernels: dict[int, float]
    busy_us: float
    overlap_us: float
    idle_us: float = 0.0

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
    """What `calls` calls of `call` put on the GPU, ordered by begin. Warm it up before. Needs a GPU."""
    return read_trace(record(call, calls=calls))


_RECORDED = "recorded from here"


def record(call: Callable[[], object], *, calls: int = 1, before: Callable[[], object] | None = None) -> Trace:
    """The trace of `calls` calls: what the CPU did, and the GPU where there is one.

    The profiler's exported trace is read, whose format is the same in all versions of torch that are supported.

    Args:
        before: runs first, and is not in the trace: a profiler that starts holds up the first kernels of a stream.
    """
    from torch.profiler import ProfilerActivity

    gpu = torch.cuda.is_available()
    wait: Callable[[], object] = torch.cuda.synchronize if gpu else lambda: None
    wait()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as run:
        if before is not None:
            before()
            wait()
        with torch.profiler.record_function(_RECORDED):
            for _ in range(calls):
                call()
            wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        run.export_chrome_trace(str(path))
        return _recorded(read_file(path))


def _recorded(trace: Trace) -> Trace:
    """Without what was before `record`'s calls; events that describe others have no time that counts."""
    events = trace["traceEvents"]
    marks = [e for e in events if e.get("name") == _RECORDED and e.get("cat") == "user_annotation"]
    begin = float(marks[0]["ts"]) if marks else -math.inf

    def stays(event: dict[str, Any]) -> bool:
        return event.get("name") != _RECORDED and (event.get("ph") == "M" or float(event.get("ts", begin)) >= begin)

    return trace | {"traceEvents": [event for event in events if stays(event)]}


def read_file(path: Path) -> Trace:
    """A saved trace, plain or gzipped.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no Chrome trace.
    """
    data = path.read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise ValueError(f"expected a Chrome trace in JSON, plain or gzipped ({error})") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("expected a Chrome trace: an object with a list of events under traceEvents")
    return trace if isinstance(trace, dict) else {"traceEvents": events}


def read_trace(trace: Trace) -> list[Work]:
    """The GPU's work in a Chrome trace of torch.profiler, ordered by begin.

    Raises:
        ValueError: an event of the GPU's lacks its stream or its time.
    """
    return sorted(
        (_work(event) for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE),
        key=lambda w: w.begin,
    )


def _work(event: dict[str, Any]) -> Work:
    try:
        begin, length, args = float(event["ts"]), float(event["dur"]), event["args"]
        if not (math.isfinite(begin) and 0 <= length < math.inf):
            raise ValueError
        return Work(str(event["name"]), int(args["stream"]), begin, begin + length, int(args.get("device", 0)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(
            f"expected name, ts, dur and args.stream in each {event['cat']} event, got {json.dumps(event)[:300]}"
        ) from None


def summarize(work: Iterable[Work], *, calls: int = 1, leave_out: Collection[str] = ()) -> Streams:
    """Counts and times of `calls` calls, for one of them, without work whose name contains a word of `leave_out`."""
    counted = [w for w in work if not any(word in w.name for word in leave_out)]
    kernels = collections.Counter(w.stream for w in counted)
    by_count = [0.0, 0.0, 0.0]
    for begin, end, streams in stretches(counted):
        by_count[min(streams, 2)] += end - begin
    idle, alone, overlap = (us / calls for us in by_count)
    by_stream = {s: count / calls for s, count in kernels.most_common()}
    return Streams(by_stream, alone + overlap, overlap, idle)


def stretches(work: Iterable[Work]) -> list[tuple[float, float, int]]:
    """The time from the first begin to the last end, cut wherever something begins or ends.

    Returns:
        begin, end, and on how many streams something runs.
    """
    edges = sorted(edge for w in work for edge in ((w.begin, 1, w.stream), (w.end, -1, w.stream)))
    running: collections.Counter[int] = collections.Counter()
    found = []
    for (time, change, stream), (next_time, *_) in itertools.pairwise(edges):
        running[stream] += change
        if next_time > time:
            found.append((time, next_time, sum(count > 0 for count in running.values())))
    return found


def streams_of(call: Callable[[], object], *, calls: int = 4, leave_out: Collection[str] = ()) -> Streams:
    """`profile`, summarized for one call."""
    return summarize(profile(call, calls=calls), calls=calls, leave_out=leave_out)
