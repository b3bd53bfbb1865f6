"""Named ranges: in what a profiler records, a layer's parts are `dsmoe::router`, `routed`, `shared` and `finalize`.

Without a profiler a range costs one check. torch.profiler shows them on the CPU's threads, and, for eager calls, on the
GPU's streams too; `torch.autograd.profiler.emit_nvtx` makes them NVTX ranges. A CUDA graph's replay has none: there
parts are told by their kernels (`cli/parts.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

PREFIX = "dsmoe::"
P = ParamSpec("P")
R = TypeVar("R")


def part(name: str) -> contextlib.AbstractContextManager[object]:
    """A range of that part's name where a profiler is on."""
    return record_function(PREFIX + name) if torch.autograd._profiler_enabled() else _NONE


def in_part(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Calls of the function are in such a range."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_range(*args: P.args, **kwargs: P.kwargs) -> R:
            with part(name):
                return function(*args, **kwargs)

        return in_range

    return decorate


_NONE = contextlib.nullcontext()
