"""A layer in CUDA graphs: any stream, mode, size and order; with exceptions and other calls in between."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu import CONFIG, LAUNCHES, SCHEDULES, Boom, Captured, capture, needs_gpu, raising_at
from layers import WAYS, make_layer

from dsmoe_op import dual_stream_moe, dual_stream_moe_unfinalized, finalize

pytestmark = needs_gpu


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_replays_with_new_contents_give_the_new_answer(block, way, schedule) -> None:
    if schedule == "fused":  # its bits may differ from those of serial
        x, args = block.inputs(33, way)
        dual_stream_moe(x, **args, schedule="fused")
        graph, out = capture(lambda: dual_stream_moe(x, **args, schedule="fused"))
        for _ in range(3):
            x.copy_(block.inputs(33)[0])
            graph.replay()
            assert torch.equal(out, dual_stream_moe(x, **args, schedule="fused"))
        return
    captured = Captured(block, 33, way=way, schedule=schedule)
    assert all(captured.is_right() for _ in range(3))


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


def test_two_graphs_live_side_by_side(block) -> None:
    graphs = [Captured(block, 7), Captured(block, 7)]
    for _ in range(6):
        assert random.choice(graphs).is_right()


def test_a_second_capture_after_the_first_graph_is_gone(block) -> None:
    for _ in range(2):
        captured = Captured(block, 7)
        assert captured.is_right()
        captured.graph.reset()


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


@pytest.mark.parametrize("name", LAUNCHES["dual"])
@pytest.mark.parametrize("schedule", ["dual", "dual_shared_main"])
def test_an_exception_at_any_launch_leaves_the_capture_usable(block, schedule, name) -> None:
    def twice() -> torch.Tensor:
        with raising_at(name), pytest.raises(Boom):
            dual_stream_moe(x, **args, schedule=schedule)
        return dual_stream_moe(x, **args, schedule=schedule)

    x, args, want = block.out(7)
    graph, out = capture(twice)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["router", "shared_gemm1", "experts"])
def test_a_capture_that_an_exception_ends_leaves_the_next_ones_fine(block, name) -> None:
    x, args, want = block.out(7)
    with raising_at(name), pytest.raises(Boom):
        capture(lambda: dual_stream_moe(x, **args, schedule="dual"))
    assert torch.equal(dual_stream_moe(x, **args, schedule="dual"), want)
    assert Captured(block, 7).is_right()


def test_eager_calls_of_any_size_between_replays_change_nothing(block) -> None:
    captured = Captured(block, 33)
    for T in (1, 5000, 64, 0, 300):
        x, args = block.inputs(T)
        dual_stream_moe(x, **args)
        assert captured.is_right()


def test_a_capture_in_one_thread_leaves_an_eager_one_in_another_alone(block) -> None:
    x, args, want = block.out(33)
    dual_stream_moe(x, **args, schedule="dual")
    torch.cuda.synchronize()
    stop, started = threading.Event(), threading.Event()

    def eager() -> list[bool]:
        right = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                right.append(torch.equal(dual_stream_moe(x, **args, schedule="dual"), want))
                started.set()
        return right

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(eager)
        try:
            assert started.wait(30)
            graphs = [
                capture(lambda: dual_stream_moe(x, **args, schedule="dual"), capture_error_mode="thread_local")
                for _ in range(5)
            ]
        finally:
            stop.set()
        assert all(other.result())
    for graph, out in graphs:
        graph.replay()
        assert torch.equal(out, want)
