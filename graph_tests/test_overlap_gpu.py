"""Launches of few tokens that start before the ones ahead of them have ended change no bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu import SCHEDULES, Block, capture, every_call, in_any_format, nap, needs_gpu, schedules_of, with_tiles
from layers import WAYS
from torch import Tensor

from dsmoe_op import checks, cuda, dual_stream_moe, dual_stream_moe_unfinalized, finalize, tuning

pytestmark = needs_gpu

TOKENS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _overlap(block: Block) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of sm_90, where launches overlap")
    for T in TOKENS:
        kind = tuning.layer_kind(block.dtype, False, *block.formats)
        shape = tuning.LayerShape(kind, **block.sizes, K=block.config.top_k)
        assert tuning.layer_choice(shape, T, tuning.tables_of(None, torch.cuda.get_device_name())).tiles.overlaps


def one_after_another() -> contextlib.AbstractContextManager[None]:
    """Calls inside have launches that do not overlap."""
    return with_tiles(overlaps=False)


@contextlib.contextmanager
def busy_gpu() -> Iterator[Callable[[], None]]:
    """What queues some work on another stream, of which a call meets more or less."""
    side, a = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    small = torch.zeros(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())

    def more() -> None:
        with torch.cuda.stream(side):
            for _ in range(random.randrange(4)):
                torch.mm(a, a)
            for _ in range(random.randrange(8)):
                small.add_(1)

    yield more
    torch.cuda.synchronize()


Job = tuple[Tensor, dict[str, Any], str, Tensor]


@in_any_format
def test_launches_overlap_but_where_these_tests_say_no(block) -> None:
    """What the others compare are launches of both kinds."""
    x, args = block.inputs(2)
    asked: list[tuple[bool, bool]] = []

    @contextlib.contextmanager
    def overlapping(early: bool, followed: bool) -> Iterator[None]:
        asked.append((early, followed))
        yield

    for without in (False, True):
        with one_after_another() if without else contextlib.nullcontext(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "_checked", {})
            patch.setattr(cuda, "_prepare", lambda *args: None)
            patch.setattr(cuda.kernels, "overlapping", overlapping)
            asked.clear()
            dual_stream_moe(x, **args, schedule="dual")
        assert any(early for early, _ in asked) == (not without)
        assert any(followed for _, followed in asked) == (not without)


def jobs(block: Block, count: int) -> list[Job]:
    """Random calls: inputs, schedule, and what they make with launches one after another."""
    found = []
    for _ in range(count):
        x, args = block.inputs(random.choice(TOKENS), random.choice(WAYS))
        schedule = random.choice(schedules_of(block.formats))
        with one_after_another():
            found.append((x, args, schedule, dual_stream_moe(x, **args, schedule=schedule)))
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("naps", [False, True])
@in_any_format
def test_calls_in_a_row_on_a_busy_gpu_have_the_bits_of_launches_one_after_another(block, naps) -> None:
    calls = jobs(block, 200)
    with busy_gpu() as more:
        outs = []
        for x, args, schedule, _ in calls:
            more()
            if naps:
                nap()
            outs.append(dual_stream_moe(x, **args, schedule=schedule))
    wrong = [i for i, (out, call) in enumerate(zip(outs, calls, strict=True)) if not torch.equal(out, call[-1])]
    assert wrong == []


@in_any_format
def test_inputs_that_arrive_late_and_go_early_do_not_matter(block) -> None:
    """The first launch waits for what comes before the call, and what comes after it for the last one."""
    calls = jobs(block, 100)
    with busy_gpu() as more:
        outs = []
        for x, args, schedule, _ in calls:
            more()
            late = torch.full_like(x, float("nan"))
            nap()
            late.copy_(x)
            out = dual_stream_moe(late, **args, schedule=schedule)
            late.fill_(float("nan"))
            outs.append(out.clone())
            out.fill_(float("nan"))
    assert all(torch.equal(out, call[-1]) for out, call in zip(outs, calls, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unfinalized_calls_have_those_bits_too(block, schedule) -> None:
    calls = jobs(block, 20)
    with busy_gpu() as more:
        for x, args, _, _ in calls:
            with one_after_another():
                want = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
            more()
            pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
            rows = int(want.row_of.max()) + 1
            assert torch.equal(pieces.y[:rows], want.y[:rows])
            assert torch.equal(pieces.shared, want.shared)
            assert torch.equal(finalize(pieces, config=args["config"]), finalize(want, config=args["config"]))


@every_call()
def test_replays_of_layers_in_a_row_have_those_bits_too(block, schedule, way) -> None:
    def layers() -> Tensor:
        # Two at a time: a layer is about quadratic in its input, so a longer row of them ends in zeros or in NaN.
        y = x
        for _ in range(6):
            for _ in range(2):
                y = dual_stream_moe(y, **args, schedule=schedule)
            y = torch.nn.functional.rms_norm(y, y.shape[-1:])
        return y

    for T in TOKENS:
        x, args = block.inputs(T, way)
        layers()
        graph, out = capture(layers)
        with busy_gpu() as more:
            for _ in range(10):
                x.copy_(torch.randn_like(x))
                with one_after_another():
                    want = layers()
                more()
                graph.replay()
                assert want.isfinite().all()
                assert want.any(dim=-1).all()
                assert torch.equal(out, want), T
