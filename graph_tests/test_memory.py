"""Memory: one stream's blocks, in eager as in graphs, and none that stay."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import Block, Captured, Differences, capture, in_any_format, needs_gpu
from layers import tensors_of

from dsmoe_op import dual_stream_moe, streams

pytestmark = needs_gpu


@pytest.fixture(params=["dual", "dual_shared_main"])
def call(request, block) -> Callable[[], Any]:
    x, args = block.inputs(304)  # whose output is a multiple of the 512 bytes by which PyTorch allocates

    def layer() -> torch.Tensor:
        return dual_stream_moe(x, **args, schedule=request.param)

    for _ in range(3):
        layer()
    torch.cuda.synchronize()
    return layer


def reserved() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@in_any_format
def test_a_call_leaves_its_output_alone_allocated(call) -> None:
    before = torch.cuda.memory_allocated()
    out = call()
    assert torch.cuda.memory_allocated() - before == out.nbytes
    del out
    assert torch.cuda.memory_allocated() == before


@in_any_format
def test_calls_that_wait_in_a_queue_share_their_blocks(call) -> None:
    """A block that a side stream was recorded on would come back only once that stream had got there."""
    before = torch.cuda.memory_reserved()
    torch.cuda._sleep(100_000_000)
    for _ in range(100):
        call()
    assert torch.cuda.memory_reserved() == before


@in_any_format
def test_every_block_belongs_to_the_callers_stream(block) -> None:
    x, args = block.inputs(300)
    torch.cuda.synchronize()
    caller = torch.cuda.Stream()
    with torch.cuda.stream(caller):
        dual_stream_moe(x, **args, schedule="dual")
        alt = streams.alt_stream(caller).cuda_stream
        used = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
        torch.cuda.synchronize()
    assert caller.cuda_stream in used
    assert alt not in used


@in_any_format
def test_a_call_allocates_its_named_buffers_and_no_more(call) -> None:
    counts = []
    for _ in range(3):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert counts == [counts[0]] * 3
    assert counts[0] <= 14


@in_any_format
def test_many_calls_leave_memory_flat(call, counted, thorough) -> None:
    def figures() -> list[int]:
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return [stats[f"{name}.all.current"] for name in ("allocation", "allocated_bytes", "segment", "reserved_bytes")]

    before, calls = figures(), 10_000 if thorough else 1000
    for _ in range(calls):
        call()
    assert figures() == before
    counted("eager calls that leave memory flat", calls)


@in_any_format
def test_many_replays_leave_memory_flat(block, counted, thorough) -> None:
    captured, wrong = Captured(block, 33), Differences()
    assert captured.is_right()
    want = dual_stream_moe(captured.x, **captured.args, schedule="serial")
    before = reserved(), torch.cuda.memory_allocated()
    times, replays = 100 if thorough else 1, 1000
    for _ in range(times):
        captured.out.fill_(float("nan"))
        for _ in range(replays):
            captured.graph.replay()
        wrong.compare(captured.out, want)
        assert torch.cuda.memory_allocated() == before[1]
    assert (reserved(), torch.cuda.memory_allocated()) == before
    assert int(wrong) == 0
    assert captured.is_right()
    counted("replays that leave memory flat", times * replays)


def test_the_allocator_is_the_one_that_was_asked_for(block) -> None:
    """`test_allocators_gpu.py` runs these tests with others than PyTorch's usual one."""
    asked = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    expected = "cudaMallocAsync" if "cudaMallocAsync" in asked else "native"
    assert torch.cuda.get_allocator_backend() == expected
    if expected == "native":
        expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        assert expandable == ("expandable_segments:True" in asked)


@in_any_format
def test_a_pool_of_three_sizes_captured_largest_first_is_about_as_large_as_the_largest(block) -> None:
    calls = [block.inputs(T) for T in (16384, 8192, 2048)]
    for x, args in calls:
        dual_stream_moe(x, **args)
    pool, kept, sizes = torch.cuda.graph_pool_handle(), [], [reserved()]
    for x, args in calls:
        kept.append(capture(lambda x=x, args=args: dual_stream_moe(x, **args), pool=pool))
        sizes.append(reserved())
    largest, all_three = sizes[1] - sizes[0], sizes[-1] - sizes[0]
    assert largest > 2**24
    assert all_three <= 1.25 * largest


@in_any_format
def test_64_layers_on_two_streams_need_no_more_memory_than_on_one(block) -> None:
    x, args = block.inputs(2048)

    def size(schedule: str) -> int:
        def layers() -> torch.Tensor:
            y = x
            for _ in range(64):
                y = dual_stream_moe(y, **args, schedule=schedule)
            return y

        layers()
        before = reserved()
        graph, out = capture(layers)
        found = reserved() - before
        graph.reset()
        del graph, out
        return found

    serial = size("serial")
    assert serial > 0
    assert size("dual") <= serial


@pytest.fixture
def second_block() -> Block:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return Block(device="cuda:1")


def test_a_layer_on_another_device_than_the_current_one(second_block) -> None:
    x, args = second_block.inputs(33)
    here = {name: t.to("cuda:0") for name, t in tensors_of(x, args).items()}
    want = dual_stream_moe(config=args["config"], **here, schedule="serial")
    for schedule in ("serial", "dual", "dual_shared_main"):
        out = dual_stream_moe(x, **args, schedule=schedule)
        assert torch.cuda.current_device() == 0
        assert torch.equal(out.to("cuda:0"), want)
