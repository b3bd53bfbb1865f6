"""Quantised weights on a GPU: against the float64 reference, and bit for bit across schedules and replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import CONFIG, QUANTISED_SIZES, Block, Formats, capture, needs_gpu
from layers import error, make_layer, quantized
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

import triton.language as tl  # noqa: E402

from dsmoe_op import dual_stream_moe, formats, reference  # noqa: E402
from dsmoe_op.kernels.coded import _unpacked  # noqa: E402
from dsmoe_op.kernels.launch import TL_DTYPE  # noqa: E402

pytestmark = needs_gpu

FP8 = {name for name, format in formats.FORMATS.items() if format.activations is not None}
MIXES = [*((name, name) for name in formats.FORMATS), ("int4", None), (None, "fp8_block"), ("mxfp4", "fp8_channel")]
TOKENS = (1, 7, 64, 300)


def compiled_once(mix: Formats, *values: Any) -> Any:
    """A parameter, or the mix itself. Its tests run in one process, since each process compiles what it calls."""
    return pytest.param(*(values or (mix,)), marks=pytest.mark.xdist_group("-".join(map(str, mix))))


NAMES = [compiled_once((name, name), name) for name in formats.FORMATS]


def limit(*names: str | None) -> float:
    return 2e-2 if FP8.intersection(names) else 1e-2


@pytest.fixture(scope="module", params=map(compiled_once, MIXES), ids=lambda mix: "-".join(map(str, mix)))
def layer(request) -> Block:
    return Block(formats=request.param)


def test_a_quantised_layer_is_the_reference_at_every_size(layer) -> None:
    for T in TOKENS:
        x, args = layer.inputs(T)
        assert error(dual_stream_moe(x, **args), reference.moe(x, **args)) <= limit(*layer.formats), T


def test_schedules_with_the_same_kernels_give_the_same_bits(layer) -> None:
    for T in TOKENS:
        x, args, serial = layer.out(T)
        for schedule in ("dual", "dual_shared_main"):
            assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), serial), (T, schedule)


def test_a_replay_with_new_contents_has_the_bits_of_the_eager_call(layer) -> None:
    for T in TOKENS:
        x, args = layer.inputs(T)
        dual_stream_moe(x, **args)
        graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args))
        for _ in range(2):
            x.copy_(layer.inputs(T)[0])
            graph.replay()
            assert torch.equal(out, dual_stream_moe(x, **args)), T


@pytest.mark.parametrize("name", NAMES)
def test_the_fused_schedule_takes_one_format_of_both(name) -> None:
    layer = Block(formats=(name, name))
    for T in TOKENS:
        x, args = layer.inputs(T)
        assert error(dual_stream_moe(x, **args, schedule="fused"), reference.moe(x, **args)) <= limit(name), T


@pytest.mark.parametrize("zero_point", [False, True])
def test_columns_that_are_not_there_are_no_infinite_numbers(zero_point) -> None:
    """A code of 0 there would stand for -8 scales, beyond the largest float16, and times 0 for NaN."""
    _, args = make_layer(1, config=CONFIG, dtype=torch.float16, device="cuda", **QUANTISED_SIZES)
    args = quantized(args, "int4", zero_point=zero_point)
    args["w13_scale"].fill_(9000.0)
    args["w13"].fill_(0x88)
    if zero_point:
        args["w13_zero_point"].fill_(0x88)
    x = torch.randn(7, QUANTISED_SIZES["H"], device="cuda").half()
    assert dual_stream_moe(x, **args).isfinite().all()


@pytest.mark.parametrize("name", [compiled_once((name, name), name) for name in sorted(FP8)])
def test_a_nan_of_one_token_stays_in_its_row(name) -> None:
    x, args = Block(formats=(name, name)).inputs(7)
    good = dual_stream_moe(x, **args)
    x[3, 5] = float("nan")
    bad = dual_stream_moe(x, **args)
    assert bad[3].isnan().all()
    others = torch.arange(7, device="cuda") != 3
    assert torch.equal(bad[others], good[others])


@triton.jit
def _store_unpacked(word_ptr, zero_ptr, scale_ptr, out_ptr, NAME: tl.constexpr, DTYPE: tl.constexpr,
                    ROWS: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    r_N = tl.arange(0, ROWS)[:, None]
    word = tl.load(word_ptr + r_N * WORDS + tl.arange(0, WORDS)[None, :])
    zero = None
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + r_N)
    numbers = _unpacked(word, None, zero, tl.load(scale_ptr + r_N), NAME, DTYPE, 1, False)
    tl.store(out_ptr + r_N * (8 * WORDS) + tl.arange(0, 8 * WORDS)[None, :], numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "has_zero"), [("int4", False), ("int4", True), ("mxfp4", False), ("nvfp4", False)])
def test_every_code_becomes_its_number_times_its_scale_rounded_once(name, has_zero, dtype) -> None:
    """By packed instructions, which Triton's interpreter does not run."""
    rows, words = 128, 32
    word = torch.randint(-(2**31), 2**31, (rows, words), device="cuda", dtype=torch.int32)
    zero = torch.randint(0, 16, (rows, 1), device="cuda", dtype=torch.int16) if has_zero else None
    scale = torch.randn(rows, 1, device="cuda") * torch.logspace(-7, 3, rows, device="cuda")[:, None]
    scale = scale.to(dtype)
    got = torch.empty(rows, 8 * words, dtype=dtype, device="cuda")
    _store_unpacked[(1,)](word, zero, scale, got, NAME=name, DTYPE=TL_DTYPE[dtype], ROWS=rows, WORDS=words)
    numbers = formats.unpack(name, word.view(torch.uint8), torch.float64)
    if name == "int4":
        numbers -= formats.INT4_ZERO if zero is None else zero
    want = (numbers * scale.double()).to(dtype)
    assert torch.equal(got, in_order(want))


def in_order(t: Tensor) -> Tensor:
    """The columns of each 32, which are codes of four words, by code modulo 4, word, and half of the word."""
    return t.view(len(t), -1, 4, 2, 4).permute(0, 1, 4, 2, 3).reshape(t.shape)
