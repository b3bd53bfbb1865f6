"""A layer under torch.compile on a GPU: the bits of eager, and two streams, in every mode."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu import FORMATS, Block, Differences, delays, in_any_format, nap, needs_gpu, profiled
from torch import Tensor

from dsmoe_op import dual_stream_moe

pytestmark = [needs_gpu, pytest.mark.usefixtures("fresh_dynamo")]

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "fullgraph": {"fullgraph": True},
    "reduce-overhead": {"mode": "reduce-overhead", "fullgraph": True},
    "aot_eager": {"backend": "aot_eager", "fullgraph": True},
}

_lib = torch.library.Library("dsmoe_graph_tests", "FRAGMENT")
_lib.define("late(Tensor x) -> Tensor")
_lib.impl("late", torch.compiler.disable(lambda x: (nap(), x.clone())[1]), "CUDA")
torch.library.register_fake("dsmoe_graph_tests::late", torch.empty_like, lib=_lib)


class Model(torch.nn.Module):
    """A producer, two layers and a consumer of what they return."""

    def __init__(self, block: Block, *, schedule: str = "dual", late: bool = False) -> None:
        super().__init__()
        self.config, self.schedule, self.late = block.config, schedule, late
        self.names = [name for name in block.args if name != "config"]
        for name in self.names:
            self.register_buffer(name, block.args[name])

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: getattr(self, name) for name in self.names}
        y = x * 0.5 + 1
        for _ in range(2):
            if self.late:
                y = torch.ops.dsmoe_graph_tests.late(y)
            y = dual_stream_moe(y, config=self.config, **weights, schedule=self.schedule)
        if self.late:
            y = torch.ops.dsmoe_graph_tests.late(y)
        return y * 2


def step(fn: Any, x: Tensor) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()
    return fn(x).clone()


def eager(block: Block, x: Tensor) -> Tensor:
    """On one stream. A fused x * 0.5 + 1 has these bits too, since the halves are exact."""
    return Model(block, schedule="serial")(x)


def inputs(block: Block, T: int) -> Tensor:
    return block.inputs(T)[0] * 2


@pytest.mark.parametrize(
    ("mode", "block"),
    [*((mode, "16bit") for mode in MODES), *(("reduce-overhead", name) for name in list(FORMATS)[1:])],
    indirect=["block"],
)
def test_results_have_the_bits_of_eager_and_run_on_two_streams(block, counted, thorough, mode) -> None:
    compiled = torch.compile(Model(block), dynamic=False, **MODES[mode])
    calls = 300 if thorough else 4
    with torch.no_grad():
        for _ in range(calls):
            x = inputs(block, 33)
            assert torch.equal(step(compiled, x), eager(block, x))
        profile = profiled(lambda: step(compiled, x))
    assert profile.with_kernel("gate") is not profile.with_kernel("finalize")
    assert len(profile.with_kernel("gate")) == 2 * 3
    if mode == "reduce-overhead":
        assert any("GraphLaunch" in call for call in profile.runtime)
    counted(f"calls under torch.compile, {mode}", calls)


@in_any_format
def test_cudagraph_trees_do_not_complain(block) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    compiled = torch.compile(Model(block), mode="reduce-overhead", fullgraph=True, dynamic=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?i).*cuda ?graph.*")
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # the trees' own first graph
        for _ in range(5):
            step(compiled, inputs(block, 33))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("mode", "block"),
    [("default", "16bit"), *(("reduce-overhead", name) for name in FORMATS)],
    indirect=["block"],
)
def test_a_late_producer_and_an_early_consumer_change_nothing(block, counted, thorough, mode) -> None:
    compiled, calls = torch.compile(Model(block, late=True), dynamic=True, **MODES[mode]), 100 if thorough else 3
    with torch.no_grad():
        for T in (33, 7, 65, 20, 130, 48):
            with delays():
                for _ in range(calls):  # under reduce-overhead: a first run, a recording, replays of its sleeps
                    x = inputs(block, T)
                    assert torch.equal(step(compiled, x), eager(block, x))
            for _ in range(calls):
                x = inputs(block, T)
                assert torch.equal(step(compiled, x), eager(block, x))
            counted(f"calls under torch.compile, {mode}, with random sleeps around all launches", calls)
            counted(f"calls under torch.compile, {mode}, with random sleeps around the layers", calls)


def test_eager_calls_in_another_thread_leave_cudagraph_trees_alone(block, counted, thorough) -> None:
    """The trees' replays in this thread, eager calls in the other."""
    compiled = torch.compile(Model(block), dynamic=False, **MODES["reduce-overhead"])
    x, args, want = block.out(65)
    calls, ended = 500 if thorough else 10, threading.Event()

    def call() -> tuple[int, int]:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong, calls = Differences(), 0
            while not ended.is_set():
                wrong.compare(dual_stream_moe(x, **args, schedule="dual"), want)
                torch.cuda.current_stream().synchronize()  # else its queue fills up
                calls += 1
            return int(wrong), calls

    given = inputs(block, 33)
    with torch.no_grad():
        for _ in range(3):  # a first run, a recording, a replay
            assert torch.equal(step(compiled, given), eager(block, given))
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(call)
            try:
                for _ in range(calls):
                    given = inputs(block, 33)
                    assert torch.equal(step(compiled, given), eager(block, given))
            finally:
                ended.set()
            wrong, others = other.result()
    assert wrong == 0
    counted("replays of cudagraph trees while another thread calls eagerly", calls)
    counted("eager calls in a thread while another replays cudagraph trees", others)
