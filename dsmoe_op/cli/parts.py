"""Where a layer's time goes: its kernels by name, each with the part of the layer that it is."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsmoe_op.cli.profiling import Work

_WORDS = {
    "finalize": "finalize",
    "router": "router",
    "route": "choice and order",
    "gate": "shared",
    "experts": "experts",
}
"""Word of a kernel's name -> its part; the first that is found counts. Products are told by their place."""
_ROUTING = ("router", "choice and order")


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
    """Of one stream's kernels: on the stream of the routing the first two products are the routed experts', where they
    are no launch of their own."""
    labels = [_label(name) for name in names]
    routed = ["GEMM1", "GEMM2"] if set(labels) & set(_ROUTING) and "experts" not in labels else []
    return [(routed.pop(0) if routed else "shared") if label == "product" else label for label in labels]


def _label(name: str) -> str:
    lower = name.lower()
    other = "product" if "gemm" in lower else "other"
    return next((part for word, part in _WORDS.items() if word in lower), other)
