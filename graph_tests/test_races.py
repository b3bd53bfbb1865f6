"""Whatever the timing, the bits are those of one stream: naps around every launch, threads, graphs at once, poison."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from gpu import Differences, capture, delays, every_call, in_any_format, nap, needs_gpu
from layers import same, tensors_of
from torch import Tensor

from dsmoe_op import dual_stream_moe, dual_stream_moe_unfinalized, finalize, streams

pytestmark = needs_gpu

TWO_STREAMS = ("dual", "dual_shared_main")
NAPS = "with random sleeps before, between and after all launches on both streams"


def late_producer_early_consumer(source: Tensor, args: dict[str, Any], schedule: str) -> Tensor:
    """hidden_states arrive late, and right after the call all memory that it may have used is overwritten."""
    x = torch.full_like(source, float("nan"))
    nap()
    x.copy_(source)
    out = dual_stream_moe(x, **args, schedule=schedule)
    x.fill_(float("nan"))
    for rows in (source.shape[0], source.shape[0] * args["config"].top_k):
        for width in (args["w2"].shape[1], args["w13"].shape[1] // 2, args["shared_w13"].shape[0] // 2):
            torch.full((rows, width), float("nan"), dtype=source.dtype, device=source.device)
    nap()
    return out.clone()


@every_call(schedules=TWO_STREAMS)
def test_eager_calls_do_not_depend_on_timing(block, counted, thorough, way, schedule) -> None:
    rounds, calls = (10, 100) if thorough else (4, 10)
    wrong = Differences()
    for T in random.choices((33, 130), k=rounds):  # 64 is the most whose experts are one launch
        source, args, want = block.out(T, way)
        with delays():
            for _ in range(calls):
                wrong.compare(late_producer_early_consumer(source, args, schedule), want)
    assert int(wrong) == 0
    counted(f"eager calls, producer and consumer {NAPS}", rounds * calls)


@pytest.mark.parametrize("schedule", TWO_STREAMS)
@in_any_format
def test_replays_do_not_depend_on_timing(block, counted, thorough, schedule) -> None:
    captures, replays = (1000, 2) if thorough else (15, 2)
    wrong, jobs = Differences(), {}
    for T in (33, 130):
        inputs = [block.inputs(T)[0] for _ in range(8)]
        jobs[T] = [(x, dual_stream_moe(x, **block.args, schedule="serial")) for x in inputs]
    for T in random.choices(list(jobs), k=captures):
        source = jobs[T][0][0].clone()
        with delays():
            graph, out = capture(lambda source=source: late_producer_early_consumer(source, block.args, schedule))
        for x, want in random.sample(jobs[T], replays):
            source.copy_(x)
            graph.replay()
            wrong.compare(out, want)
    assert int(wrong) == 0
    counted(f"captures, producer and consumer {NAPS}", captures)
    counted("replays of these captures", captures * replays)


@in_any_format
def test_layers_in_a_row_do_not_depend_on_timing(block, counted, thorough) -> None:
    rounds = 75 if thorough else 3
    for T in (33, 130):
        x, args = block.inputs(T)

        def layers(schedule: str, x: Tensor = x, args: dict[str, Any] = args) -> Tensor:
            y = x
            for _ in range(8):
                y = dual_stream_moe(y, **args, schedule=schedule)
            return y

        want = layers("serial")
        for _ in range(rounds):
            with delays():
                assert torch.equal(layers("dual"), want)
        counted(f"layers in a row {NAPS}", 8 * rounds)


@in_any_format
def test_a_finalize_that_is_called_later_does_not_depend_on_timing(block, counted, thorough) -> None:
    rounds = 250 if thorough else 3
    for T in (33, 130):
        x, args, want = block.out(T)
        for schedule in TWO_STREAMS * rounds:
            with delays():
                pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
                nap()
                assert torch.equal(finalize(pieces, config=args["config"]), want)
        counted(f"unfinalized calls {NAPS}", 2 * rounds)


def test_a_thread_that_has_used_no_cuda_yet_can_make_side_streams() -> None:
    def make() -> int:
        with streams.relaxed_capture():
            return len({stream.cuda_stream for stream in streams.make_streams(0, 2)})

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(make).result() == 2


@pytest.mark.parametrize("own_streams", [True, False])
@in_any_format
def test_threads_do_not_disturb_each_other(block, counted, thorough, own_streams) -> None:
    jobs, calls = [block.out(T) for T in (7, 33, 65, 130)], 500 if thorough else 30
    torch.cuda.synchronize()

    def work(job: tuple[Tensor, dict[str, Any], Tensor]) -> int:
        x, args, want = job
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.default_stream()):
            wrong = Differences()
            for _ in range(calls):
                wrong.compare(dual_stream_moe(x, **args, schedule="dual"), want)
            return int(wrong)

    with delays(), ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(work, jobs)) == [0] * len(jobs)
    where = "on streams of their own" if own_streams else "on one stream"
    counted(f"eager calls of {len(jobs)} threads at once {where}", calls * len(jobs))


@in_any_format
def test_eager_calls_and_replays_at_once_do_not_disturb_each_other(block, counted, thorough) -> None:
    """Two threads replay a graph each while two others call the layer, all on streams of their own."""
    jobs, calls = [block.out(T) for T in (33, 65, 7, 130)], 1000 if thorough else 30
    graphs = []
    with delays():
        for x, args, want in jobs[:2]:
            graphs.append((*capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule="dual")), want))
    torch.cuda.synchronize()
    ended = threading.Event()

    def replay(graph: torch.cuda.CUDAGraph, out: Tensor, want: Tensor) -> tuple[int, int]:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong, replays = Differences(), 0
            while not ended.is_set():
                for _ in range(20):
                    graph.replay()
                    wrong.compare(out, want)
                replays += 20
                torch.cuda.current_stream().synchronize()  # else the queue of one thread fills up for all
            return int(wrong), replays

    def call(x: Tensor, args: dict[str, Any], want: Tensor) -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong = Differences()
            for _ in range(calls):
                wrong.compare(dual_stream_moe(x, **args, schedule="dual"), want)
            return int(wrong)

    with delays(), ThreadPoolExecutor(4) as pool:
        replaying = [pool.submit(replay, *graph) for graph in graphs]
        try:
            assert [one.result() for one in [pool.submit(call, *job) for job in jobs[2:]]] == [0, 0]
        finally:
            ended.set()
        found = [one.result() for one in replaying]
    assert [wrong for wrong, _ in found] == [0, 0]
    counted("eager calls during replays", 2 * calls)
    counted("replays during eager calls", sum(replays for _, replays in found))


@in_any_format
def test_two_graphs_replay_at_once_on_two_streams(block, counted, thorough) -> None:
    rounds, jobs = 5000 if thorough else 20, [block.out(T) for T in (33, 65)]
    with delays():
        graphs = [
            capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule="dual"), stream=torch.cuda.Stream())
            for x, args, _ in jobs
        ]
    lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
    for graph, _ in graphs:
        graph.replay()  # cudaMallocAsync gives a graph its memory here
    torch.cuda.synchronize()
    wrong = [Differences(), Differences()]
    torch.cuda.synchronize()
    for _ in range(rounds):
        for lane, (graph, out), (_, _, want), found in zip(lanes, graphs, jobs, wrong, strict=True):
            with torch.cuda.stream(lane):
                out.fill_(float("nan"))
                graph.replay()
                found.compare(out, want)
    torch.cuda.synchronize()
    assert [int(found) for found in wrong] == [0, 0]
    counted("replays of two graphs at once on two streams", 2 * rounds)


@every_call()
def test_what_lies_in_fresh_memory_does_not_matter(block, request, counted, thorough, way, schedule) -> None:
    tokens = [1, 7, 33, 65, 130, 300, *random.choices(range(1, 2000), k=60)] if thorough else [33, 130]
    jobs = []
    for T in tokens:
        x, args = block.inputs(T, way)
        jobs.append((x, args, dual_stream_moe(x, **args, schedule=schedule)))
    request.getfixturevalue("poisoned")
    assert torch.empty(1, device="cuda").isnan()
    for x, args, want in jobs:
        assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), want)
        pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
        assert torch.equal(finalize(pieces, config=args["config"]), want)
        graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
        graph.replay()
        assert torch.equal(out, want)
    counted("calls and replays with NaN in all memory that they take", 3 * len(jobs))


@every_call()
def test_no_input_is_written_moved_or_resized(block, way, schedule) -> None:
    x, args = block.inputs(33, way)
    tensors = tensors_of(x, args)
    before = {n: (t.clone(), t.data_ptr(), t.shape, t.stride(), t._version) for n, t in tensors.items()}
    dual_stream_moe(x, **args, schedule=schedule)
    dual_stream_moe_unfinalized(x, **args, schedule=schedule)
    for name, tensor in tensors.items():
        clone, *rest = before[name]
        assert same(tensor, clone), name
        assert rest == [tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version], name
