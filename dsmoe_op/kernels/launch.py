"""The one place where a kernel is launched, or compiled and loaded without a launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRET: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter (which cannot multiply bf16), as decided when they are imported."""

TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], *, warmup: bool = False) -> None:
    """Launches on the current stream of the current device; with `warmup` it compiles and loads, and launches nothing.

    Args:
        args: the kernel's runtime arguments, in order.
        meta: its constexpr arguments and the compiler's options.
    """
    if not warmup:
        kernel[grid](*args, **meta)
        return
    compiled = kernel.warmup(*args, grid=grid, **meta)
    if compiled is not None:  # None in the interpreter
        if hasattr(compiled, "result"):  # of an asynchronous compile
            compiled = compiled.result()
        compiled._init_handles()  # loads the binary, which the first launch would otherwise do, perhaps in a capture


def row_stride(rows: Tensor) -> int:
    """Elements between rows of a [T, ...] tensor; one row may report any stride, which would compile a kernel of its own."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
