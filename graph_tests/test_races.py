"""Whatever the timing, the bits are those of one stream: naps around every launch, threads, poison, failures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from gpu import LAUNCHES, SCHEDULES, Boom, capture, delays, nap, needs_gpu, raising_at
from layers import WAYS, tensors_of
from torch import Tensor

from dsmoe_op import dual_stream_moe, dual_stream_moe_unfinalized, finalize, streams

pytestmark = needs_gpu

TWO_STREAMS = ("dual", "dual_shared_main")


def late_producer_early_consumer(source: Tensor, args: dict[str, Any], schedule: str) -> Tensor:
    """hidden_states arrive late, and right after the call all memory that it may have used is overwritten."""
    x = torch.full_like(source, float("nan"))
    nap()
    x.copy_(source)
    out = dual_stream_moe(x, **args, schedule=schedule)
    x.fill_(float("nan"))
    for rows in (source.shape[0], source.shape[0] * args["config"].top_k):
        for width in (*args["w2"].shape[1:], args["shared_w2"].shape[1]):
            torch.full((rows, width), float("nan"), dtype=source.dtype, device=source.device)
    nap()
    return out.clone()


@pytest.mark.parametrize("schedule", TWO_STREAMS)
@pytest.mark.parametrize("way", WAYS)
def test_eager_calls_do_not_depend_on_timing(block, way, schedule) -> None:
    for _ in range(4):
        source, args, want = block.out(33, way)
        outs = []
        with delays():
            for _ in range(10):
                outs.append(late_producer_early_consumer(source, args, schedule))
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("schedule", TWO_STREAMS)
def test_replays_do_not_depend_on_timing(block, schedule) -> None:
    source, args, _ = block.out(33)
    for _ in range(15):
        with delays():
            graph, out = capture(lambda: late_producer_early_consumer(source, args, schedule))
        for _ in range(2):
            source.copy_(block.inputs(33)[0])
            graph.replay()
            assert torch.equal(out, dual_stream_moe(source, **args, schedule="serial"))


def test_layers_in_a_row_do_not_depend_on_timing(block) -> None:
    x, args = block.inputs(33)

    def layers(schedule: str) -> Tensor:
        y = x
        for _ in range(8):
            y = dual_stream_moe(y, **args, schedule=schedule)
        return y

    want = layers("serial")
    for _ in range(5):
        with delays():
            assert torch.equal(layers("dual"), want)


def test_a_finalize_that_is_called_later_does_not_depend_on_timing(block) -> None:
    x, args, want = block.out(33)
    for schedule in TWO_STREAMS * 5:
        with delays():
            pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
            nap()
            assert torch.equal(finalize(pieces, config=args["config"]), want)


def test_a_thread_that_has_used_no_cuda_yet_can_make_side_streams() -> None:
    def make() -> int:
        with streams.relaxed_capture():
            return len({stream.cuda_stream for stream in streams.make_streams(0, 2)})

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(make).result() == 2


@pytest.mark.parametrize("own_streams", [True, False])
def test_threads_do_not_disturb_each_other(block, own_streams) -> None:
    jobs = [block.out(T) for T in (7, 33, 65)]
    torch.cuda.synchronize()

    def work(job: tuple[Tensor, dict[str, Any], Tensor]) -> int:
        x, args, want = job
        with torch.cuda.stream(torch.cuda.Stream() if own_streams else torch.cuda.default_stream()):
            return sum(not torch.equal(dual_stream_moe(x, **args, schedule="dual"), want) for _ in range(40))

    with delays(), ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, jobs)) == [0, 0, 0]


def test_two_graphs_replay_at_once_on_two_streams(block) -> None:
    jobs = [block.out(T) for T in (33, 65)]
    with delays():
        graphs = [
            capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule="dual"), stream=torch.cuda.Stream())
            for x, args, _ in jobs
        ]
    torch.cuda.synchronize()
    lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        for lane, (graph, out) in zip(lanes, graphs, strict=True):
            with torch.cuda.stream(lane):
                out.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for (_, out), (_, _, want) in zip(graphs, jobs, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_what_lies_in_fresh_memory_does_not_matter(block, request, way, schedule) -> None:
    x, args = block.inputs(33, way)
    want = dual_stream_moe(x, **args, schedule=schedule)
    request.getfixturevalue("poisoned")
    assert torch.empty(1, device=x.device).isnan()
    assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), want)
    pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
    assert torch.equal(finalize(pieces, config=args["config"]), want)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_no_input_is_written_moved_or_resized(block, way, schedule) -> None:
    x, args = block.inputs(33, way)
    tensors = tensors_of(x, args)
    before = {n: (t.clone(), t.data_ptr(), t.shape, t.stride(), t._version) for n, t in tensors.items()}
    dual_stream_moe(x, **args, schedule=schedule)
    dual_stream_moe_unfinalized(x, **args, schedule=schedule)
    for name, tensor in tensors.items():
        clone, *rest = before[name]
        assert torch.equal(tensor, clone), name
        assert rest == [tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version], name


@pytest.mark.parametrize("schedule", ["serial", *TWO_STREAMS])
def test_an_exception_at_any_launch_leaves_the_next_call_fine(block, schedule) -> None:
    x, args, want = block.out(33)
    stream = torch.cuda.current_stream()
    for name in LAUNCHES[schedule]:
        with raising_at(name), pytest.raises(Boom):
            dual_stream_moe(x, **args, schedule=schedule)
        assert torch.cuda.current_stream() == stream
        with delays():
            assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), want), name
