"""A layer in CUDA graphs: any stream, mode, size and order; with exceptions and other calls in between."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu import (
    CONFIG,
    Boom,
    Captured,
    Differences,
    capture,
    every_call,
    in_any_format,
    launches_of,
    needs_gpu,
    raising_at,
)
from layers import make_layer

from dsmoe_op import dual_stream_moe, dual_stream_moe_unfinalized, finalize

pytestmark = needs_gpu


@every_call()
def test_replays_with_new_contents_give_the_new_answer(block, counted, thorough, way, schedule) -> None:
    replays = 100 if thorough else 3
    for T in (33, 130):  # 64 is the most whose experts are one launch
        if schedule == "fused":  # its bits may differ from those of serial
            x, args = block.inputs(T, way)
            dual_stream_moe(x, **args, schedule="fused")
            graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule="fused"))
            for _ in range(replays):
                x.copy_(block.inputs(T)[0])
                graph.replay()
                assert torch.equal(out, dual_stream_moe(x, **args, schedule="fused"))
        else:
            captured = Captured(block, T, way=way, schedule=schedule)
            assert all(captured.is_right() for _ in range(replays))
        counted("replays with new contents", replays)


@pytest.mark.parametrize("priority", [0, -1])
def test_a_layer_is_captured_on_a_stream_of_the_callers_choice(block, priority) -> None:
    assert Captured(block, 7, stream=torch.cuda.Stream(priority=priority)).is_right()


def test_a_layer_is_captured_from_inside_another_stream_than_the_default(block) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert Captured(block, 7).is_right()
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_every_capture_mode_works(block, mode) -> None:
    assert Captured(block, 7, capture_error_mode=mode).is_right()


@in_any_format
def test_two_graphs_live_side_by_side(block, counted, thorough) -> None:
    graphs, replays = [Captured(block, 7), Captured(block, 7)], 200 if thorough else 6
    for _ in range(replays):
        assert random.choice(graphs).is_right()
    counted("replays of two graphs in turn", replays)


def test_a_second_capture_after_the_first_graph_is_gone(block) -> None:
    for _ in range(2):
        captured = Captured(block, 7)
        assert captured.is_right()
        captured.graph.reset()


@in_any_format
def test_three_sizes_share_a_pool(block) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs = [Captured(block, T, pool=pool) for T in (130, 64, 7)]
    for captured in [*graphs, *reversed(graphs), *random.choices(graphs, k=6)]:
        assert captured.is_right()


def test_no_tokens_are_captured(block) -> None:
    x, args = block.inputs(0)
    _, out = capture(lambda: (dual_stream_moe(x, **args), x.new_zeros(1)))
    assert out[0].shape == x.shape


def test_caller_streams_first_seen_in_a_capture_have_side_streams(block) -> None:
    """More of them than side streams are made ahead."""
    x, args, want = block.out(7)
    for _ in range(12):
        graph, out = capture(lambda: dual_stream_moe(x, **args, schedule="dual"), stream=torch.cuda.Stream())
        graph.replay()
        assert torch.equal(out, want)


@in_any_format
def test_the_two_halves_of_a_layer_may_be_captured_apart(block) -> None:
    x, args, want = block.out(33)
    finalize(dual_stream_moe_unfinalized(x, **args), config=args["config"])
    first, pieces = capture(lambda: dual_stream_moe_unfinalized(x, **args))
    second, out = capture(lambda: finalize(pieces, config=args["config"]))
    first.replay()
    second.replay()
    assert torch.equal(out, want)


def test_after_one_eager_call_no_size_compiles_or_loads_a_kernel() -> None:
    import triton

    T, shape = 3, {"H": 208, "E": 12, "I": 112, "S": 336}  # of no other test
    x, args = make_layer(T, config=CONFIG, dtype=torch.bfloat16, device="cuda", shared_gate=True, **shape)
    dual_stream_moe(x, **args)
    loaded = []

    def note(module: object, function: object, name: str, *rest: object) -> None:
        loaded.append(name)

    captured = []
    triton.knobs.runtime.kernel_load_start_hook.add(note)
    try:
        for T in (1, 20, 64, 300, 2000):
            x = torch.randn(T, shape["H"], device="cuda").bfloat16()
            captured.append((x, *capture(lambda x=x: dual_stream_moe(x, **args))))
    finally:
        triton.knobs.runtime.kernel_load_start_hook.remove(note)
    assert loaded == []
    for x, graph, out in captured:
        graph.replay()
        assert torch.equal(out, dual_stream_moe(x, **args, schedule="serial"))  # which may load kernels of its own


@every_call()
def test_an_exception_at_any_launch_leaves_the_capture_usable(block, counted, way, schedule) -> None:
    for T in (7, 130):  # 64 is the most whose experts are one launch
        x, args, want = block.out(T, way)
        if schedule == "fused":  # its bits may differ from those of serial
            want = dual_stream_moe(x, **args, schedule=schedule)

        def twice(name: str, before: bool, x: torch.Tensor = x, args: dict[str, Any] = args) -> torch.Tensor:
            with raising_at(name, before=before), pytest.raises(Boom):
                dual_stream_moe(x, **args, schedule=schedule)
            return dual_stream_moe(x, **args, schedule=schedule)

        names = launches_of(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
        for name, before in itertools.product(names, (True, False)):
            graph, out = capture(lambda name=name, before=before, twice=twice: twice(name, before))
            graph.replay()
            assert torch.equal(out, want), (T, name, before)
        counted("captures that go on after an exception at a launch", 2 * len(names))


@every_call(ways=("router_weight",))
def test_a_capture_that_an_exception_ends_leaves_the_next_ones_fine(block, counted, way, schedule) -> None:
    for T in (7, 130):
        x, args = block.inputs(T, way)
        want = dual_stream_moe(x, **args, schedule=schedule)
        names = launches_of(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
        for name in names:
            with raising_at(name), pytest.raises(Boom):
                capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
            assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), want)
            graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
            graph.replay()
            assert torch.equal(out, want), (T, name)
        counted("captures that an exception at a launch ended", len(names))


@in_any_format
def test_eager_calls_of_any_size_between_replays_change_nothing(block, counted, thorough) -> None:
    captured = Captured(block, 33)
    more = [int(2 ** random.uniform(0, 14)) for _ in range(200)] if thorough else []
    for T in (1, 5000, 64, 0, 300, *more):
        x, args = block.inputs(T)
        dual_stream_moe(x, **args)
        assert captured.is_right()
    counted("eager calls of another size between replays", 5 + len(more))


@pytest.mark.parametrize("schedule", ["dual", "dual_shared_main"])
@in_any_format
def test_a_capture_in_one_thread_leaves_an_eager_one_in_another_alone(block, counted, thorough, schedule) -> None:
    x, args, want = block.out(33)
    dual_stream_moe(x, **args, schedule=schedule)
    torch.cuda.synchronize()
    stop, started = threading.Event(), threading.Event()
    captures = 300 if thorough else 5

    def eager() -> tuple[int, int]:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong, calls = Differences(), 0
            while not stop.is_set():
                wrong.compare(dual_stream_moe(x, **args, schedule=schedule), want)
                torch.cuda.current_stream().synchronize()  # else its queue fills up
                calls += 1
                started.set()
            return int(wrong), calls

    graphs = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(eager)
        try:
            assert started.wait(30)
            for _ in range(captures):
                graphs.append(
                    capture(lambda: dual_stream_moe(x, **args, schedule=schedule), capture_error_mode="thread_local")
                )
        finally:
            stop.set()
        wrong, calls = other.result()
    assert wrong == 0
    for graph, out in graphs:
        graph.replay()
        assert torch.equal(out, want)
    counted("captures in a thread while another calls eagerly", captures)
    counted("eager calls in a thread while another captures", calls)
