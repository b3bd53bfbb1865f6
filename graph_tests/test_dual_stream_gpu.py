"""assert_dual_stream on a GPU: of this library's layer, and of plain code on one stream and on two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu import needs_gpu
from torch import Tensor

from dsmoe_op import dual_stream_moe
from dsmoe_op.testing import assert_dual_stream

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def _bindings() -> None:
    pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize("schedule", ["dual", "dual_shared_main"])
def test_a_layer_on_two_streams_passes(block, schedule) -> None:
    x, args = block.inputs(7)
    assert "on 2 lanes" in assert_dual_stream(dual_stream_moe, x, **args, schedule=schedule)


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_a_layer_on_one_stream_fails(block, schedule) -> None:
    x, args = block.inputs(7)
    with pytest.raises(AssertionError, match=r"got one branch, of \d kernels in a row:\n  #1 _router"):
        assert_dual_stream(dual_stream_moe, x, **args, schedule=schedule)


def test_layers_in_a_row_are_counted(block) -> None:
    x, args = block.inputs(7)

    def layers(schedules: tuple[str, ...]) -> Tensor:
        y = x
        for schedule in schedules:
            y = dual_stream_moe(y, **args, schedule=schedule)
        return y

    assert_dual_stream(layers, ("dual", "dual", "dual"), layers=3)
    with pytest.raises(AssertionError, match="in 3 layers, got them 2 times"):
        assert_dual_stream(layers, ("dual", "serial", "dual"), layers=3)


def test_a_compiled_layer_on_two_streams_passes(block, fresh_dynamo) -> None:
    x, args = block.inputs(7)

    @torch.compile(fullgraph=True)
    def layer(x: Tensor) -> Tensor:
        return dual_stream_moe(x * 2, **args, schedule="dual") + 1

    with torch.no_grad():
        assert_dual_stream(layer, x)


def plain(*, forks: bool = True, joins: bool = True) -> Callable[[Tensor], Tensor]:
    """Routed work, a sine, and shared work, a cosine, on streams of their own, as a user writes it."""
    side = torch.cuda.Stream()

    def fn(x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        if forks:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            shared = torch.cos(x)
        routed = torch.sin(x)
        if joins:
            main.wait_stream(side)
        return routed + shared if joins else routed

    return fn


def one_stream(x: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 256, device="cuda")


def test_plain_code_on_two_streams_passes(x) -> None:
    assert_dual_stream(plain(), x)
    assert_dual_stream(plain(), x, routed="sin_kernel", shared="cos_kernel")


def test_plain_code_on_one_stream_fails_with_the_edge_that_orders_it(x) -> None:
    with pytest.raises(AssertionError, match="got one branch, of 3 kernels in a row"):
        assert_dual_stream(one_stream, x)
    with pytest.raises(AssertionError, match=r"the shared kernel #2 .*cos_kernel.* waits for the routed kernel #1 "):
        assert_dual_stream(one_stream, x, routed="sin_kernel", shared="cos_kernel")


@pytest.mark.parametrize(
    ("forgotten", "advice"), [("joins", "A stream that it forked is not joined"), ("forks", "that was not forked")]
)
def test_a_forgotten_wait_is_said_and_leaves_the_process_as_it_was(x, forgotten, advice) -> None:
    with pytest.raises(RuntimeError, match=advice):
        assert_dual_stream(plain(**{forgotten: False}), x)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(3, device="cuda").isfinite().all()
    assert_dual_stream(plain(), x)


def test_work_that_waits_for_the_gpu_is_said(x) -> None:
    with pytest.raises(RuntimeError, match="cannot be captured"):
        assert_dual_stream(lambda: x.sum().item())
