"""A launch that starts before the one before it on its stream has ended (programmatic dependent launch, sm_90 and up).

What it saves is the time between the two: the later kernel's programs are in place when the earlier one's writes are
complete. `schedule.plan` says which launches do so; each calls `begin` before all else, so nothing of it runs early.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(EARLY: tl.constexpr, FOLLOWED: tl.constexpr):
    """
    Args:
        EARLY: wait until all earlier launches of the stream have ended and their writes are there.
        FOLLOWED: the next launch of the stream is an early one, and may start once all programs of this one run.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
