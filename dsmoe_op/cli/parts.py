"""Where a layer's time goes: its kernels by name, each with the part of the layer that it is.

A kernel's name alone tells its part, but for the products, which routed and shared experts have in common. Those are
told by their place: on the stream of the routing the first two are the routed experts', where these are no launch of
their own.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dsmoe_op.cli.profiling import Work

_LABELS = {
    "_quantize_rows": "rows to fp8",
    "_quantize_h": "h to fp8",
    "_reorder": "columns of x",
    "_reorder_h": "columns of h",
    "_router_logits": "router",
    "_zero": "choice and order",
    "_route": "choice and order",
    "_experts": "experts",
    "_shared_gate": "shared",
    "_grouped_gemm": "product",
    "_persistent_gemm1": "product",
    "_persistent_gemm2": "product",
    "_persistent_coded": "product",
    "_few_coded": "product",
    "_zero_rows": "GEMM2",
    "_finalize": "finalize",
}
"""The op's kernels. What else runs is "other"."""
_ROUTING = ("router", "choice and order")
_FIRST = ("rows to fp8", *_ROUTING)
_ROUTED = ("columns of x", "GEMM1", "h to fp8", "columns of h", "GEMM2", "experts")
_PARTS = {**dict.fromkeys(_FIRST, "router"), **dict.fromkeys(_ROUTED, "routed")}
OTHER = "other"


class Part(NamedTuple):
    """One kernel of a layer; stream as the profiler numbers it, us its median time."""

    part: str
    kernel: str
    stream: int
    us: float


def parts(work: Iterable[Work], calls: int) -> list[Part]:
    """The kernels of one call, stream by stream in their order, out of the work of `calls` like calls.

    Where a stream's kernels do not repeat from call to call, each name is one entry with its time in the mean call.
    """
    by_stream: dict[int, list[Work]] = collections.defaultdict(list)
    for item in sorted(work, key=lambda w: w.begin):
        by_stream[item.stream].append(item)
    found: list[Part] = []
    for stream, items in by_stream.items():
        each = len(items) // calls
        names = [item.name for item in items]
        if each and names == names[:each] * calls:
            kernels = [(names[j], statistics.median(w.end - w.begin for w in items[j::each])) for j in range(each)]
        else:
            total: dict[str, float] = collections.defaultdict(float)
            for item in items:
                total[item.name] += (item.end - item.begin) / calls
            kernels = list(total.items())
        labels = _labels([name for name, _ in kernels])
        found += [Part(label, name, stream, us) for label, (name, us) in zip(labels, kernels, strict=True)]
    return found


def _labels(names: Sequence[str]) -> list[str]:
    """Of one stream's kernels in one layer."""
    labels = [_label(name) for name in names]
    routed = ["GEMM1", "GEMM2"] if set(labels) & set(_ROUTING) and "experts" not in labels else []
    found = []
    for label in labels:
        if label == "product":
            label = routed.pop(0) if routed else "shared"
        elif label == "h to fp8" and routed != ["GEMM2"]:
            label = "shared"
        found.append(label)
    return found


def _label(name: str) -> str:
    return _LABELS.get(name, OTHER)


class Range(NamedTuple):
    """Neighbours on a stream that are one part of one layer, or work that is none of the op's ("other").

    Attributes:
        part: as `schedule.PARTS` names it: "router", "routed+finalize".
        layer: counted from 0 over the whole of the work.
        end: not after the begin of the stream's next range. A launch may begin while the one before it runs, and waits
            for it then.
    """

    part: str
    stream: int
    layer: int
    begin: float
    end: float
    work: tuple[Work, ...]

    @property
    def bars(self) -> list[tuple[float, float]]:
        """Begin and end of each kernel, one after another: until the next begins."""
        ends = [*(w.begin for w in self.work[1:]), self.end]
        return [(w.begin, min(w.end, end)) for w, end in zip(self.work, ends, strict=True)]


def ranges(work: Iterable[Work], *, fused: bool) -> list[Range]:
    """What the work of any program, ordered by begin, has of the op's layers; by begin.

    Args:
        fused: the shared experts run in the routed ones' launches, which the kernels do not tell.
    """
    items = sorted(work, key=lambda w: w.begin)
    layers, last = _layers([_label(item.name) for item in items])
    lanes: dict[int, list[int]] = collections.defaultdict(list)
    for i, item in enumerate(items):
        lanes[item.stream].append(i)
    labels: dict[int, str] = {}
    for lane in lanes.values():
        for group in _groups(lane, items):
            labels |= zip(group, _labels([items[i].name for i in group]), strict=True)
    apart = {layers[i] for i, label in labels.items() if (label, _label(items[i].name)) == ("shared", "product")}

    def part_of(i: int) -> str:
        part = _PARTS.get(labels[i], labels[i])
        if part != "routed":
            return part
        shared = "+shared" if fused and layers[i] not in apart else ""
        return f"{part}{shared}{'+finalize' if i in last else ''}"

    found = []
    for stream, lane in lanes.items():
        runs = [(key, list(run)) for key, run in itertools.groupby(lane, lambda i: (part_of(i), layers[i]))]
        next_begins = [*(items[run[0]].begin for _, run in runs[1:]), math.inf]
        for ((part, layer), run), next_begin in zip(runs, next_begins, strict=True):
            its = tuple(items[i] for i in run)
            end = min(max(w.end for w in its), next_begin)
            found.append(Range(part, stream, layer, its[0].begin, end, its))
    return sorted(found, key=lambda r: r.begin)


def _layers(labels: Sequence[str]) -> tuple[list[int], set[int]]:
    """Of kernels by begin: each one's layer, and which are the last of theirs.

    Finalize is the last, or the launch of the experts where no finalize comes before the next layer's routing.
    """
    last = set()
    experts = None
    for i, label in enumerate(labels):
        if label == "finalize":
            last.add(i)
            experts = None
        elif label in ("experts", *_FIRST):
            if experts is not None:
                last.add(experts)
            experts = i if label == "experts" else None
    if experts is not None:
        last.add(experts)
    return list(itertools.accumulate(int(i - 1 in last) for i in range(len(labels)))), last


def _groups(lane: Sequence[int], items: Sequence[Work]) -> Iterator[list[int]]:
    """One stream's kernels, cut before each of a routing's, so that none has two layers' routed experts."""
    group: list[int] = []
    for i in lane:
        if group and _label(items[i].name) in _FIRST:
            yield group
            group = []
        group.append(i)
    yield group
