"""A kernel that only waits, to shift two streams against each other. Needs triton and a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

NAME = "dsmoe_delay"
"""Of the kernel, in a profile."""


@triton.jit(do_not_specialize=["which"])
def dsmoe_delay(ns_ptr, which):
    ns = tl.load(ns_ptr + which)
    begin = globaltimer()
    now = begin
    while now - begin < ns:
        now = globaltimer()


def delay(ns: Tensor, which: int) -> None:
    """Keeps the current stream busy for ns[which] nanoseconds; ns, int64, is read when it runs, also in a replay."""
    dsmoe_delay[(1,)](ns, which)
