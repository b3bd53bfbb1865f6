"""The one place where a kernel is launched, or compiled and loaded without a launch."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter (which cannot multiply bf16), as decided when they are imported."""

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], *, warmup: bool = False
) -> None:
    """Launches on the current stream of the current device; with `warmup` it compiles and loads, and launches nothing.

    Args:
        args: the kernel's runtime arguments, in order.
        meta: its constexpr arguments and the compiler's options.
    """
    meta = {"enable_fp_fusion": True, **meta}  # said aloud, since Triton's default changes between versions
    if not warmup:
        kernel[grid](*args, **meta)
        return
    compiled = kernel.warmup(*args, grid=grid, **meta)
    if compiled is None:  # in the interpreter
        return
    together = _together.get()
    if together is None:
        _load(compiled)
    else:
        together.append(compiled)


def compile_together(warm_up: Callable[[], None]) -> None:
    """What `warm_up` warms up is compiled side by side, on all of the process's cores, and loaded at the end."""
    compiling: list[Any] = []

    def compile_all() -> None:
        _together.set(compiling)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor, triton.AsyncCompileMode(executor):
            warm_up()

    # In a context of its own: a kernel that fails to compile leaves the mode set, and the next call could not enter it.
    contextvars.Context().run(compile_all)
    for compiled in compiling:
        _load(compiled)


_together: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("together", default=None)


def _load(compiled: Any) -> None:
    """Loads the binary, which the first launch would otherwise do, perhaps in a capture."""
    if hasattr(compiled, "result"):  # of an asynchronous compile
        compiled = compiled.result()
    compiled._init_handles()


def row_stride(rows: Tensor) -> int:
    """Elements between rows of a [T, H] tensor; one row may report any number, which would compile one more kernel."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
