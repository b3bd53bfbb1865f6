"""Few tokens' experts in one launch: the bits of the launches one by one, whatever the timing."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from gpu import FORMATS, SCHEDULES, SPLIT, Block, capture, delays, every_call, nap, needs_gpu, schedules_of, with_tiles
from layers import WAYS, error, make_layer, quantized
from torch import Tensor

from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, reference
from dsmoe_op.tuning import Tile

pytestmark = needs_gpu

TOKENS = (1, 2, 4, 7, 16, 33, 64)


def one_by_one() -> contextlib.AbstractContextManager[None]:
    """Calls inside have a launch for each product."""
    return with_tiles(one_launch=False)


def names_of(call: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


def test_what_these_tests_compare_are_different_launches(block: Block) -> None:
    x, args = block.inputs(7)
    for context, expected in ((contextlib.nullcontext, True), (one_by_one, False)):
        with context():
            dual_stream_moe(x, **args)
            assert any("_experts" in name for name in names_of(lambda: dual_stream_moe(x, **args))) == expected


def check_calls(block: Block, way: str, schedule: str) -> None:
    for T in TOKENS:
        x, args = block.inputs(T, way)
        with one_by_one():
            want = dual_stream_moe(x, **args, schedule=schedule)
        assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), want), T
        pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
        assert not pieces.y[int(pieces.row_of.max()) + 1 :].any()
        assert torch.equal(finalize(pieces, config=args["config"]), want), T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_has_the_bits_of_the_launches_one_by_one(blocks, dtype, way, schedule) -> None:
    check_calls(blocks[dtype], way, schedule)


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_a_call_of_a_quantised_layer_has_them_too(quantised_blocks, name) -> None:
    for schedule in schedules_of(FORMATS[name]):
        check_calls(quantised_blocks[name], "router_weight", schedule)


WIDE = {"H": 2048, "E": 64, "I": 320, "S": 640}
WHOLE = Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)
"""No program shares a tile of theirs: a sum of parts has other bits."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wide_layer_with_every_option_has_them_too(schedule) -> None:
    config = MoEConfig(top_k=6, score="softmax", num_zero_experts=8, combine="average", w13_order="up_gate")
    options = {"shared_gate": True, "expert_bias": True, "correction_bias": True, "device": "cuda"}
    for T in TOKENS:
        x, args = make_layer(T, config=config, dtype=torch.bfloat16, valid_tokens=max(1, T - 2), **options, **WIDE)
        with with_tiles(gemm1=WHOLE[0], gemm2=WHOLE[1], one_launch=False):
            want = dual_stream_moe(x, **args, schedule=schedule)
        with with_tiles(gemm1=WHOLE[0], gemm2=WHOLE[1], one_launch=True):
            got = dual_stream_moe(x, **args, schedule=schedule)
        assert torch.equal(got, want), T
        exact = reference.moe(x.double(), **{k: v.double() if _is_float(v) else v for k, v in args.items()})
        rows = (got.double() - exact).norm(dim=-1) <= 0.02 * exact.norm(dim=-1) + 1e-6
        assert rows.float().mean() > 0.8  # but where bf16 hidden_states make another choice


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@every_call(ways=("router_weight",))
def test_replays_under_random_delays_have_those_bits(block, way, schedule) -> None:
    for T in TOKENS:
        source, args = block.inputs(T, way)
        x = source.clone()
        dual_stream_moe(x, **args, schedule=schedule)
        with delays():
            graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
        for _ in range(10):
            x.copy_(block.inputs(T)[0])
            with one_by_one():
                want = dual_stream_moe(x, **args, schedule=schedule)
            nap()
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want), T


def test_calls_on_two_streams_at_once_have_those_bits(block) -> None:
    """Programs that wait in one call leave those of the other their turn."""
    jobs = []
    for _ in range(2):
        x, args = block.inputs(random.choice(TOKENS))
        with one_by_one():
            want = dual_stream_moe(x, **args, schedule="serial")
        jobs.append((x, args, want, torch.cuda.Stream()))
    torch.cuda.synchronize()
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(200):
        for x, args, want, stream in jobs:
            with torch.cuda.stream(stream):
                found.append((dual_stream_moe(x, **args, schedule="serial"), want))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out, want in found)


LOW = Tile(8, 32, 128, 4, 4, swap=True, splits=4), Tile(8, 128, 128, 4, 4, swap=True)


@pytest.mark.parametrize(
    ("format", "tiles"), [(None, SPLIT), (None, LOW), ("fp8_block", SPLIT), ("int4", SPLIT), ("nvfp4", SPLIT)]
)
def test_programs_that_share_tiles_leave_the_same_bits_whoever_is_last(format, tiles) -> None:
    """In each schedule, in calls at once on two streams, and in replays under delays."""
    config = MoEConfig(top_k=6, score="softmax")
    routing = {"way": "topk_ids", "config": config, "dtype": torch.bfloat16, "shared_gate": True, "device": "cuda"}
    with with_tiles(gemm1=tiles[0], gemm2=tiles[1], one_launch=True):
        for T in (1, 3, 16):
            x, args = make_layer(T, valid_tokens=max(1, T - 2), **routing, **WIDE)
            args = quantized(args, format, format)
            on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in args.items()}
            # By turns, so that the parts which an earlier call left in the same memory are wrong ones.
            inputs, want = (x, torch.randn_like(x)), {}
            for i, one in enumerate(inputs):
                exact = reference.moe(one.cpu(), **on_cpu)
                for schedule in SCHEDULES:
                    want[schedule, i] = out = dual_stream_moe(one, **args, schedule=schedule)
                    assert error(out, exact) < (2e-2 if format == "fp8_block" else 1e-2), (T, schedule)
                    assert schedule == "fused" or torch.equal(out, want["serial", i]), (T, schedule)
            streams, found = [torch.cuda.Stream() for _ in range(2)], []
            torch.cuda.synchronize()
            for i in (0, 1) * 50:
                for schedule, stream in zip(("fused", "serial"), streams, strict=True):
                    with torch.cuda.stream(stream):
                        found.append((dual_stream_moe(inputs[i], **args, schedule=schedule), (schedule, i)))
            torch.cuda.synchronize()
            assert all(torch.equal(out, want[which]) for out, which in found), T
            for schedule in SCHEDULES:
                x = inputs[0].clone()
                with delays():
                    graph, out = capture(lambda x=x, args=args, s=schedule: dual_stream_moe(x, **args, schedule=s))
                for i in (0, 1) * 3:
                    x.copy_(inputs[i])
                    out.fill_(float("nan"))
                    nap()
                    graph.replay()
                    assert torch.equal(out, want[schedule, i]), (T, schedule)
