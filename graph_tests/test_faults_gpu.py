"""A call that something ends, on a GPU: the next call and capture are as ever, and memory is back where it was."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
import torch
from gpu import (
    Allocations,
    Block,
    Boom,
    capture,
    delays,
    every_call,
    in_any_format,
    launches_of,
    needs_gpu,
    raising_at,
)
from layers import moe_args
from torch import Tensor

from dsmoe_op import checks, dual_stream_moe, dual_stream_moe_unfinalized, ops

pytestmark = needs_gpu

ENTRIES = {dual_stream_moe: ops._moe, dual_stream_moe_unfinalized: ops._moe_unfinalized}
ANY_CALL = every_call(quantised=("dual", "fused"))
ANY_SIZE = pytest.mark.parametrize("T", [33, 130])
"""The experts are one launch, and several."""


class Call:
    """One layer's call, what it gives, and the state around it that a call leaves as it was."""

    def __init__(self, block: Block, T: int, way: str, schedule: str, entry: Any) -> None:
        self.x, self.args = block.inputs(T, way)
        self.schedule, self.entry = schedule, entry
        wide = torch.zeros(1, 2 * block.sizes["H"], dtype=block.dtype, device="cuda")
        wide[:, ::2] = self.args["shared_gate"]
        self.args["shared_gate"] = wide[:, ::2]  # which a call copies, so that it allocates once more
        self.want = self.tensors()
        capture(self.tensors)  # PyTorch takes some memory of its own with the first one
        torch.cuda.synchronize()
        self.stream, self.allocated = torch.cuda.current_stream(), torch.cuda.memory_allocated()

    def __call__(self) -> Any:
        return self.entry(self.x, **self.args, schedule=self.schedule)

    def kernel(self) -> Any:
        """The same past PyTorch's dispatcher, which would hide the op's allocations from a TorchDispatchMode."""
        return ENTRIES[self.entry](*moe_args(self.x, self.args, self.schedule))

    def tensors(self) -> list[Tensor]:
        """What a call gives."""
        given = self()
        return [given] if isinstance(given, Tensor) else [t for t in given if t is not None]

    def check(self, *, captures: bool) -> None:
        """Nothing is left of the call that was ended, and the next ones have its bits."""
        assert torch.cuda.current_stream() == self.stream
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.memory_allocated() == self.allocated
        with delays():
            found = self.tensors()
        assert all(map(torch.equal, found, self.want))
        if captures:
            graph, found = capture(self.tensors)
            graph.replay()
            assert all(map(torch.equal, found, self.want))
            torch.cuda.synchronize()
            del graph
        del found
        assert torch.cuda.memory_allocated() == self.allocated


@pytest.mark.parametrize("is_first_call", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
@ANY_SIZE
@ANY_CALL
def test_an_exception_at_any_launch_leaves_the_next_call_and_capture_fine(
    block, counted, thorough, monkeypatch, way, schedule, T, entry, is_first_call
) -> None:
    call = Call(block, T, way, schedule, entry)
    for name, before in itertools.product(launches_of(call), (True, False)):
        if is_first_call:
            monkeypatch.setattr(checks, "_checked", {})
        with raising_at(name, before=before), pytest.raises(Boom):
            call()
        call.check(captures=thorough or random.random() < 0.1)
        counted("calls ended on the GPU by an exception at a launch")


@pytest.mark.parametrize("is_first_call", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
@ANY_SIZE
@ANY_CALL
def test_a_failed_allocation_leaves_the_next_call_and_capture_fine(
    block, counted, thorough, monkeypatch, way, schedule, T, entry, is_first_call
) -> None:
    call = Call(block, T, way, schedule, entry)

    def kernel(**options: Any) -> int:
        if is_first_call:
            monkeypatch.setattr(checks, "_checked", {})
        with Allocations(**options) as found:
            call.kernel()
        return found.count

    outputs, workspace, copies = 1 if entry is dual_stream_moe else 5, 1, 1 + is_first_call
    allocations = kernel()
    assert allocations >= outputs + workspace + copies
    for index in range(allocations):
        with pytest.raises(torch.OutOfMemoryError):
            kernel(fail_at=index)
        call.check(captures=thorough or random.random() < 0.1)
        counted("calls ended on the GPU by a failed allocation")


@pytest.mark.parametrize("entry", ENTRIES)
@in_any_format
def test_a_call_that_memory_does_not_suffice_for_is_a_clean_error(block, counted, entry) -> None:
    """PyTorch's own limit, raised until the call fits: it fails at the output first, then at the workspace."""
    call = Call(block, 16384, "router_weight", "dual", entry)
    gc.collect()
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    ended = 0
    try:
        for room in range(0, 2**30, 2**22):
            torch.cuda.set_per_process_memory_fraction((held + room) / total)
            try:
                call()
            except torch.OutOfMemoryError:
                ended += 1
            else:
                break
            assert torch.cuda.memory_allocated() == call.allocated
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 2 <= ended < 2**8
    call.check(captures=True)
    counted("calls ended on the GPU by a limit of memory", ended)
