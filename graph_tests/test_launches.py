"""How many kernels a layer launches, and on which streams, as the profiler sees them."""

from __future__ import annotations

import pytest
import torch
from gpu import Captured, capture, needs_gpu, profiled
from layers import WAYS

from dsmoe_op import dual_stream_moe, streams

pytestmark = needs_gpu


@pytest.mark.parametrize("T", [1, 64, 1500])
@pytest.mark.parametrize("way", WAYS)
def test_dual_launches_at_most_four_on_the_callers_stream_for_few_tokens_else_five_and_three_beside_it(
    block, way, T
) -> None:
    x, args = block.inputs(T, way)
    profile = profiled(lambda: dual_stream_moe(x, **args, schedule="dual"))
    assert len(profile.streams) == 2
    assert len(profile.with_kernel("finalize")) <= (4 if T <= 64 else 5)
    assert len(profile.with_kernel("gate")) <= 3
    assert profile.with_kernel("finalize") is not profile.with_kernel("gate")


@pytest.mark.parametrize("T", [1, 64])
def test_a_replay_has_those_launches_on_two_lanes(block, T) -> None:
    profile = profiled(Captured(block, T).graph.replay)
    assert len(profile.streams) == 2
    assert len(profile.with_kernel("finalize")) <= 4
    assert len(profile.with_kernel("gate")) <= 3


@pytest.mark.parametrize("T", [1, 64])
def test_few_tokens_without_a_shared_expert_are_three_launches(block, T) -> None:
    x, args = block.inputs(T)
    routed = {name: value for name, value in args.items() if not name.startswith("shared")}
    for graph in (False, True):
        run = lambda: dual_stream_moe(x, **routed)  # noqa: E731
        (names,) = profiled(capture(run)[0].replay if graph else run).streams.values()
        assert ["router" in names[0], "route" in names[1], "experts" in names[2]] == [True] * 3
        assert len(names) == 3


def test_replays_of_many_layers_have_two_lanes(block) -> None:
    def layers() -> torch.Tensor:
        y = x
        for _ in range(16):
            y = dual_stream_moe(y, **args, schedule="dual")
        return y

    x, args = block.inputs(7)
    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    assert len(profiled(graph.replay).streams) == 2


def test_dual_shared_main_puts_the_shared_expert_on_the_callers_stream(block) -> None:
    x, args = block.inputs(7)
    profile = profiled(lambda: dual_stream_moe(x, **args, schedule="dual_shared_main"))
    assert len(profile.streams) == 2
    assert profile.with_kernel("finalize") is profile.with_kernel("gate")


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_serial_and_fused_have_one_stream(block, schedule) -> None:
    x, args = block.inputs(7)
    assert len(profiled(lambda: dual_stream_moe(x, **args, schedule=schedule)).streams) == 1


def test_without_a_shared_expert_there_is_one_stream(block) -> None:
    x, args = block.inputs(7)
    routed = {name: value for name, value in args.items() if not name.startswith("shared")}
    assert len(profiled(lambda: dual_stream_moe(x, **routed, schedule="dual")).streams) == 1


@pytest.fixture
def own_alt_stream():
    yield streams.set_alt_stream
    streams.set_alt_stream(None)


def test_a_servers_own_side_stream_carries_the_side_branch(block, own_alt_stream) -> None:
    x, args, want = block.out(7)
    server = torch.cuda.Stream()
    own_alt_stream(server)
    assert torch.equal(dual_stream_moe(x, **args, schedule="dual"), want)
    own = profiled(lambda: dual_stream_moe(x, **args, schedule="dual"))
    with torch.cuda.stream(server):
        alone = profiled(lambda: dual_stream_moe(x, **args, schedule="serial"))
    (server_id,) = alone.streams
    assert own.with_kernel("gate") is own.streams[server_id]


def test_a_servers_own_side_stream_that_is_current_runs_serial(block, own_alt_stream) -> None:
    x, args, want = block.out(7)
    server = torch.cuda.Stream()
    own_alt_stream(server)
    torch.cuda.synchronize()
    with torch.cuda.stream(server):
        out = dual_stream_moe(x, **args, schedule="dual")
        assert len(profiled(lambda: dual_stream_moe(x, **args, schedule="dual")).streams) == 1
    torch.cuda.synchronize()
    assert torch.equal(out, want)
