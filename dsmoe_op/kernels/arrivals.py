"""Programs that wait for others of their own launch, by counters in memory.

A wait ends if every program waits only for programs of lower numbers, and those wait for none but lower ones in turn.
GPUs start programs by ascending number, so of all programs that have not ended the lowest one has been started, and
all that it waits for has ended: it goes on. Programs that wait may therefore fill the GPU, and other launches may come
between; what they must not do is wait for a program of a higher number (route.py has an argument of its own, by tickets
that are drawn). Triton's interpreter runs programs one after another by ascending number, so that all is there when one
asks.

What a program wrote before it arrives is seen by those that waited for it: its threads meet at a barrier, one of them
releases at the GPU's scope, one thread of the other program acquires and the rest meet it at a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr):
    """All of the program's writes, then its arrival, which releases them."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait_for(counter_ptr, count):
    """Goes on when `count` programs have arrived."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()
