"""Quantised weights: what each format's bits mean, how numbers come into it, and the op with them on the CPU.

The meaning is held against a decoder written here in plain Python, on random bytes; the op against the float64
definition.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from layers import TOLERANCE, error, make_layer, moe_args, quantized, tensors_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from dsmoe_op import (
    MoEConfig,
    checks,
    dual_stream_moe,
    dual_stream_moe_unfinalized,
    finalize,
    formats,
    reference,
)
from dsmoe_op.formats import FORMATS, Quantised, dequantize, quantize, quantize_rows, quantized_rows

OPS = torch.ops.dsmoe
NAMES = ("fp8_block", "fp8_channel", "fp8_tensor", "nvfp4", "mxfp4", "int4")
FP8 = NAMES[:3]
"""They quantise the rows too."""
ANY = pytest.mark.parametrize("name", NAMES)
ANY_FP8 = pytest.mark.parametrize("name", FP8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SMALL = {"E": 5, "H": 40, "I": 24, "S": 56}
"""No multiples of a block or of a group; two int32 and more a row."""
LARGE = {"E": 4, "H": 152, "I": 136, "S": 264}
"""Likewise, of more blocks than one."""


def test_there_are_these_formats():
    assert tuple(FORMATS) == NAMES


# --- what the bits mean ---------------------------------------------------------------------------------------------


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def e2m1(code: int) -> float:
    sign, exponent, mantissa = -1 if code >> 3 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def number(t: Tensor, *index: int) -> float:
    """One element of a scale."""
    if t.dtype == E4M3:
        return e4m3(int(t.view(torch.uint8)[index]))
    if t.dtype in (E8M0, torch.uint8):
        return e8m0(int(t.view(torch.uint8)[index]))
    return float(t[index])


def nibble(t: Tensor, position: int, *index: int, dim: int) -> int:
    """The number at `position` along a packed dim, whose place in `index` is left out."""
    n = t.element_size() * 2
    at = list(index)
    at.insert(dim, position // n)
    return (int(t[tuple(at)]) & 0xFFFFFFFF) >> 4 * (position % n) & 15


@dataclasses.dataclass
class Variant:
    """One way in which a format's tensors may come. Shapes are without E."""

    name: str
    rows: int
    columns: int
    q: torch.dtype
    scale: torch.dtype
    scale_shape: tuple[int, ...]
    group: int = 0
    zero_point: torch.dtype | None = None
    global_shape: tuple[int, ...] | None = None
    halves: int = 1
    interleaved: bool = False
    block_row: Callable[[int], int] = lambda r: r

    def make(self, *experts: int) -> Quantised:
        """Random bytes in all tensors."""
        n = self.q.itemsize * 8 // (8 if self.q == E4M3 else 4)
        zero = None
        if self.zero_point is not None:
            packed = math.ceil(self.rows / (self.zero_point.itemsize * 2))
            zero = random_bits(self.zero_point, *experts, packed, self.scale_shape[-1])
        return Quantised(
            random_bits(self.q, *experts, self.rows, self.columns // n),
            random_bits(self.scale, *experts, *self.scale_shape),
            zero,
            None if self.global_shape is None else random_bits(torch.float32, *experts, *self.global_shape),
        )

    def at(self, w: Quantised, r: int, k: int) -> float:
        """What the bits of one expert say of row r and column k."""
        half = 0
        if self.halves == 2:
            half = r % 2 if self.interleaved else int(r >= self.rows // 2)

        def of_half(t: Tensor) -> float:
            return number(t) if t.dim() == 0 else number(t, half if len(t) == 2 else 0)

        if self.name == "fp8_tensor":
            return e4m3(int(w.q.view(torch.uint8)[r, k])) * of_half(w.scale)
        if self.name == "fp8_channel":
            return e4m3(int(w.q.view(torch.uint8)[r, k])) * number(w.scale, r, 0)
        if self.name == "fp8_block":
            return e4m3(int(w.q.view(torch.uint8)[r, k])) * number(w.scale, self.block_row(r), k // 128)
        code, scale = nibble(w.q, k, r, dim=1), number(w.scale, r, k // self.group)
        if self.name == "int4":
            zero = 8 if w.zero_point is None else nibble(w.zero_point, r, k // self.group, dim=0)
            return (code - zero) * scale
        return e2m1(code) * scale * (1.0 if w.global_scale is None else of_half(w.global_scale))


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def halves_layouts() -> Iterator[dict[str, Any]]:
    yield {"halves": 1}
    yield {"halves": 2}
    yield {"halves": 2, "interleaved": True}


def variants() -> Iterator[Variant]:
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for scale in (fp32, E8M0, torch.uint8):
        # w2 of 149 rows; w13 of 2 * 136 rows in 4 blocks or 3, of 2 * 100 in 2 of either kind, of 2 * 60 in 2 or 1.
        for rows, tall, halves, interleaved, block_row in (
            (149, 2, 1, False, lambda r: r // 128),
            (272, 4, 2, False, lambda r: r // 128 if r < 136 else 2 + (r - 136) // 128),
            (272, 3, 2, False, lambda r: r // 128),
            (272, 3, 2, True, lambda r: r // 128),
            (200, 2, 2, False, lambda r: int(r >= 100)),
            (200, 2, 2, True, lambda r: r // 128),
            (120, 2, 2, False, lambda r: int(r >= 60)),
            (120, 1, 2, False, lambda r: 0),
        ):
            yield Variant(
                "fp8_block", rows, 387, E4M3, scale, (tall, 4), halves=halves, interleaved=interleaved,
                block_row=block_row,
            )  # fmt: skip
    for scale in (fp32, bf16):
        yield Variant("fp8_channel", 70, 131, E4M3, scale, (70, 1))
    for layout in halves_layouts():
        for shape in ((), (1,), (2,))[: 1 + layout["halves"]]:
            yield Variant("fp8_tensor", 70, 131, E4M3, fp32, shape, **layout)
            for q in (torch.uint8, torch.int8):
                yield Variant("nvfp4", 70, 138, q, E4M3, (70, 9), 16, global_shape=shape, **layout)
    for q, scale in itertools.product((torch.uint8, torch.int8), (E8M0, torch.uint8)):
        yield Variant("mxfp4", 70, 138, q, scale, (70, 5), 32)
    for q, zero, group in itertools.product(
        (torch.uint8, torch.int32), (None, torch.uint8, torch.int32), (32, 64, 128)
    ):
        yield Variant("int4", 75, 328, q, random.choice((fp32, bf16, fp16)), (75, -(-328 // group)), group, zero)
    for scale in (fp32, bf16, fp16):
        yield Variant("int4", 75, 328, torch.int32, scale, (75, 6), 64)


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@ANY
@pytest.mark.parametrize("E", [None, 3])
def test_a_weight_is_what_its_bits_say(name, E):
    for v in variants():
        if v.name != name:
            continue
        w = v.make() if E is None else v.make(E)
        dense = dequantize(name, w, v.columns, halves=v.halves, interleaved=v.interleaved)
        assert dense.dtype == torch.float64
        assert dense.shape == (*(() if E is None else (E,)), v.rows, v.columns)
        edges = [0, 1, v.rows // 2 - 1, v.rows // 2, v.rows - 1], [0, 127, v.columns - 1]
        places = [
            *itertools.product(*edges),
            *((random.randrange(v.rows), random.randrange(v.columns)) for _ in range(30)),
        ]
        for r, k in places:
            e = random.randrange(E or 1)
            its, value = (w, dense) if E is None else (w.expert(e), dense[e])
            assert same(float(value[r, k]), v.at(its, r, k)), (v, e, r, k)


def test_every_code_of_every_kind_of_number_is_decoded():
    every = torch.arange(256, dtype=torch.uint8)
    one = torch.ones(1)
    got = dequantize("fp8_channel", Quantised(every.view(E4M3)[None], one[None]), 256)[0]
    assert all(same(a, e4m3(b)) for a, b in zip(got.tolist(), range(256), strict=True))
    for scale in (every, every.view(E8M0)):
        got = dequantize("mxfp4", Quantised(torch.full((256, 16), 0x22, dtype=torch.uint8), scale[:, None]), 32)
        assert all(same(a, e8m0(b)) for a, b in zip(got[:, 0].tolist(), range(256), strict=True))
    got = dequantize("nvfp4", Quantised(every[:, None], torch.ones(256, 1).to(E4M3), None, torch.tensor(2.0)), 2)
    assert got.flatten().tolist() == [2 * e2m1(c) for b in range(256) for c in (b & 15, b >> 4)]
    got = dequantize("int4", Quantised(every[:, None], one.expand(256, 1)), 2)
    assert got.flatten().tolist() == [c - 8 for b in range(256) for c in (b & 15, b >> 4)]


@ANY
def test_a_weight_in_float32_is_the_rounded_one(name):
    """Whatever a backend multiplies by, at the largest and the smallest scales too: subnormal numbers stay."""
    for v in variants():
        if v.name != name:
            continue
        w = v.make()
        options = {"halves": v.halves, "interleaved": v.interleaved}
        exact = dequantize(name, w, v.columns, **options)
        got = dequantize(name, w, v.columns, dtype=torch.float32, **options)
        usable = exact.isfinite() & (exact.abs() < torch.finfo(torch.float32).max)
        off = (got[usable].double() - exact[usable]).abs()
        assert (off <= 3e-7 * exact[usable].abs() + 2.0**-148).all(), v


def test_a_scale_of_zero_makes_zeros():
    for v in variants():
        w = v.make(2)
        if v.q == E4M3:
            w = w._replace(q=w.q.view(torch.uint8).clamp(max=126).view(E4M3))
        if w.scale.dtype in (E8M0, torch.uint8):
            continue  # powers of two have no zero
        w = w._replace(scale=torch.zeros_like(w.scale.float()).to(w.scale.dtype))
        if w.global_scale is not None:
            w = w._replace(global_scale=torch.ones_like(w.global_scale))
        assert not dequantize(v.name, w, v.columns, halves=v.halves, interleaved=v.interleaved).any(), v


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize(("rows", "groups"), [(4, 2), (8, 3), (24, 1), (8, 1)])
def test_zero_points_may_have_any_strides_that_are_contiguous(dtype, rows, groups):
    """Dims of 1 may have any, and a view of another dtype asks for some."""
    zeros = torch.randint(0, 16, (2, rows, groups), dtype=torch.uint8)
    packed = formats.pack_rows(zeros, dtype)
    other = torch.empty_strided(packed.shape, tuple(8 if n == 1 else s for n, s in strides_of(packed)), dtype=dtype)
    other.copy_(packed)
    for one in (packed, other, packed[0]):
        assert one.is_contiguous()
        want = zeros if one.dim() == 3 else zeros[0]
        assert torch.equal(formats.unpack_rows(one, rows, torch.uint8), want)
        assert formats.bytes_of(one).data_ptr() == one.data_ptr()


def strides_of(t: Tensor) -> list[tuple[int, int]]:
    return list(zip(t.shape, torch.empty(t.shape).stride(), strict=True))


# --- numbers come into a format -------------------------------------------------------------------------------------


def ways_to_quantize(name: str) -> Iterator[dict[str, Any]]:
    for layout in halves_layouts():
        if name != "int4":
            yield layout
    if name == "int4":
        for group, zero_point in itertools.product((32, 64, 128), (False, True)):
            yield {"group": group, "zero_point": zero_point}


def layout_of(options: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in options.items() if n in ("halves", "interleaved")}


@ANY
def test_each_number_is_the_nearest_that_its_scale_allows(name):
    rows, columns = 146, 138
    codes = [b for b in range(256) if b & 127 != 127] if name in FP8 else [c * 17 for c in range(16)]
    for options in ways_to_quantize(name):
        w = torch.randn(rows, columns) * torch.logspace(-4, 4, rows)[torch.randperm(rows), None] + 0.1
        made = quantize(name, w, **options)
        got = dequantize(name, made, columns, **layout_of(options))
        best = torch.full_like(got, math.inf)
        for code in codes:
            q = torch.full_like(made.q.view(torch.uint8), code).view(made.q.dtype)
            value = dequantize(name, made._replace(q=q), columns, **layout_of(options))
            best = torch.minimum(best, (value - w).abs())
        assert ((got - w).abs() - best <= 1e-6 * w.abs()).all(), options
        # And the scale is as large as needed: nothing but mxfp4, and a scale rounded down, cuts off.
        limit = {"mxfp4": 0.25, "nvfp4": 0.07}.get(name, 1e-5 if name in FP8 else 0.1)
        assert ((got - w).abs() / w.abs())[w.abs() == w.abs().amax()].max() <= limit


@ANY
def test_a_weight_of_all_experts_is_quantised_expert_by_expert(name):
    rows, columns = 146, 138
    for options in ways_to_quantize(name):
        w = torch.randn(3, rows, columns)
        made = quantize(name, w, **options)
        for e in range(3):
            alone = quantize(name, w[e], **options)
            for got, want in zip(made.expert(e), alone, strict=True):
                assert (got is None) == (want is None)
                if got is not None:
                    assert got.dtype == want.dtype
                    assert bits(got).equal(bits(want))


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("power", [-20, 0, 9])
@ANY
def test_a_tie_goes_to_the_even_number(name, power):
    """The even number is the one whose code is even; scales are powers of two here, so that ties are exact."""
    step = 2.0**power
    if name in FP8:
        values, top = [e4m3(b) for b in range(127)], 448.0
    elif name == "int4":
        values, top = [float(v) for v in range(8)], 7.0
    else:
        values, top = [e2m1(c) for c in range(8)], 4.0 if name == "mxfp4" else 6.0
    values = [v for v in values if v <= top]
    low = torch.tensor(values[:-1], dtype=torch.float64)
    high = torch.tensor(values[1:], dtype=torch.float64)
    even = torch.arange(len(low)) % 2 == 0
    ties, want = (low + high) / 2, low.where(even, high)
    size = 32 if name in ("mxfp4", "int4") else 16 if name == "nvfp4" else 126
    count = size // 2 - 1
    ties, want = torch.cat([ties[-count:], ties[:-count]]), torch.cat([want[-count:], want[:-count]])
    pieces = -(-len(ties) // count)
    w = torch.zeros(pieces, size, dtype=torch.float64)
    expected = w.clone()
    for i in range(pieces):
        t, x = ties[i * count : (i + 1) * count], want[i * count : (i + 1) * count]
        for row, half in ((w, t), (expected, x)):
            row[i, : len(t)] = half
            row[i, len(t) : 2 * len(t)] = -half
            row[i, -1] = top
    if name == "nvfp4":  # the first group of the tensor has the largest scale, 448
        w, expected = (torch.cat([torch.tensor([[6.0] + [0.0] * 15]) * 448, t]).double() for t in (w, expected))
    made = quantize(name, (w * step).float())
    assert torch.equal(dequantize(name, made, size), expected * step)


def test_a_tie_of_an_int4_with_a_zero_point_goes_to_the_even_number():
    w = torch.tensor([[-5.0, 10.0, *(k + 0.5 for k in range(-5, 10))] + [0.0] * 15])
    want = [-5.0, 10.0, *(float(round(k + 0.5)) for k in range(-5, 10))] + [0.0] * 15
    made = quantize("int4", w / 8, zero_point=True)
    assert (dequantize("int4", made, 32) * 8).flatten().tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("zero_point", [False, True])
def test_int4_of_any_dtype_and_magnitude(dtype, zero_point):
    """A scale of float16 could not be as small as the numbers of a float16 may be."""
    for size in (1.0, 1e-3, 3e-5):
        w = (torch.randn(34, 96) * size).to(dtype)
        made = quantize("int4", w, zero_point=zero_point)
        assert made.scale.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        error = dequantize("int4", made, 96) - w.double()
        assert error.norm() < 0.13 * w.double().norm(), size


@ANY
def test_zeros_stay_zeros_under_a_scale_that_is_a_number(name):
    for options in ways_to_quantize(name):
        w = torch.randn(2, 146, 138)
        w[0], w[1, :, 128:] = 0, 0
        w[1, 3] = 0
        made = quantize(name, w, **options)
        got = dequantize(name, made, 138, **layout_of(options))
        assert not got[w == 0].any()
        for t in (made.scale, made.global_scale):
            if t is not None:
                assert t.float().isfinite().all()
                assert (t.float() > 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@ANY
def test_what_shares_a_scale_with_a_weight_that_is_no_number_is_nan_and_no_other_is(name, value):
    for options in ways_to_quantize(name):
        w = torch.randn(146, 138)
        r, k = random.randrange(146), random.randrange(138)
        w[r, k] = value
        made = quantize(name, w, **options)
        got = dequantize(name, made, 138, **layout_of(options))
        row, column = torch.arange(146)[:, None], torch.arange(138)[None]
        half = row % 2 if options.get("interleaved") else row // 73
        same_half = half == half[r] if options.get("halves") == 2 else torch.ones(146, 1, dtype=torch.bool)
        if name in ("fp8_tensor", "nvfp4"):  # nvfp4 has a scale a tensor too
            shares = same_half & (column >= 0)
        elif name == "fp8_block":
            block = row // 128
            if options["halves"] == 2 and not options.get("interleaved"):
                block = half
            shares = (block == block[r]) & (column // 128 == k // 128)
        else:
            size = 138 if name == "fp8_channel" else 32 if name == "mxfp4" else options["group"]
            shares = (row == r) & (column // size == k // size)
        assert torch.equal(got.isnan(), shares), options


def test_the_largest_and_smallest_powers_of_two_are_decoded_and_made():
    w = torch.tensor([[3.0e38], [2.0**-99]]).expand(2, 32)
    made = quantize("mxfp4", w)
    assert made.scale.view(torch.uint8).flatten().tolist() == [252, 26]
    assert error(dequantize("mxfp4", made, 32), w) < 0.25
    q = torch.full((2, 16), 0x71, dtype=torch.uint8)  # 0.5 and 6
    for dtype in (torch.float64, torch.float32):
        got = dequantize("mxfp4", Quantised(q, torch.tensor([[0], [254]], dtype=torch.uint8)), 32, dtype=dtype)
        assert got[0, :2].tolist() == [2.0**-128, 6 * 2.0**-127]
        assert got[1, :2].tolist() == [2.0**126, 6 * 2.0**127 if dtype == torch.float64 else math.inf]


# --- rows that an fp8 weight multiplies -----------------------------------------------------------------------------


def nearest_e4m3(x: Tensor) -> Tensor:
    """float64 x -> the value of the nearest e4m3 number, the even one of two; what is beyond them becomes the last."""
    values = torch.tensor([e4m3(b) for b in range(127)], dtype=torch.float64)
    high = torch.bucketize(x.abs(), values).clamp(1, 126)
    low = high - 1
    to_low, to_high = x.abs() - values[low], values[high] - x.abs()
    code = torch.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)
    return values[code].copysign(x).where(~x.isnan(), math.nan)


def row_groups(name: str, columns: int) -> list[slice]:
    size = 128 if name == "fp8_block" else columns
    return [slice(start, min(start + size, columns)) for start in range(0, columns, size)]


def quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """In float32, rounded once: torch multiplies by a reciprocal, rounded too, where one of the two is a number."""
    return torch.from_numpy(np.divide(np.asarray(a, np.float32), np.asarray(b, np.float32)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ANY_FP8
def test_rows_become_the_nearest_numbers_of_their_groups_scale(name, dtype):
    x = (torch.randn(6, 300) * torch.logspace(-3, 2, 300)).to(dtype)
    x[2, :128] = 0
    x[3] = 0
    input_scale = torch.tensor([0.03]) if name == "fp8_tensor" else None
    q, scale = quantize_rows(x, name, input_scale)
    assert (q.dtype, q.shape, scale.dtype) == (E4M3, x.shape, torch.float32)
    assert q.is_contiguous()
    assert scale.shape == (6, len(row_groups(name, 300)))
    rows = quantized_rows(x, name, input_scale)
    assert rows.dtype == torch.float32
    for g, columns in enumerate(row_groups(name, 300)):
        part = x[:, columns].float()
        amax = part.abs().amax(-1)
        if input_scale is None:
            least = amax.clamp(min=2.0**-100)
            assert torch.equal(scale[:, g], quotient(least, 448.0))
            scaled = part * quotient(448.0, least)[:, None]
        else:
            assert (scale == input_scale).all()
            scaled = part * quotient(1.0, input_scale)
        want = nearest_e4m3(scaled.double())
        assert torch.equal(q[:, columns].double(), want)
        assert torch.equal(rows[:, columns], want.float() * scale[:, g, None])
        if input_scale is None:
            assert (q[:, columns].float().abs().amax(-1) == 448).equal(amax > 0)
    assert not rows[3].any()


def test_rows_are_multiplied_by_448_over_amax_and_not_divided():
    """These differ where a float32 lies next to a tie, and kernels must agree with this to the bit."""
    amax = torch.rand(1000, 1) + 1
    ties = torch.arange(17.0, 28.0, 2) * 16  # 272 to 432, each the middle of two numbers
    x = torch.cat([amax, ties / 448 * amax], 1)
    q, scale = quantize_rows(x, "fp8_channel")
    assert torch.equal(scale, quotient(amax, 448.0))
    want = nearest_e4m3((x * quotient(448.0, amax)).double())
    assert not torch.equal(want, nearest_e4m3((x / scale).double()))
    assert torch.equal(q.double(), want)


@ANY_FP8
def test_rows_of_the_largest_and_smallest_numbers_keep_their_size(name):
    x = torch.randn(4, 300) / 4
    for power in (-98, -40, 0, 60, 124):
        y = x * 2.0**power
        input_scale = torch.tensor(2.0 ** (power - 7)) if name == "fp8_tensor" else None
        assert error(quantized_rows(y, name, input_scale) * 2.0**-power, x) < 0.04


def test_rows_beyond_a_static_scale_are_cut_off():
    x = torch.tensor([[1.0, -2.0, 447.9, 500.0, -1e30, math.inf, -math.inf, math.nan, 0.0]])
    rows = quantized_rows(x / 8, "fp8_tensor", torch.tensor(1 / 8)) * 8
    want = [1.0, -2.0, 448.0, 448.0, -448.0, 448.0, -448.0, math.nan, 0.0]
    assert all(same(a, b) for a, b in zip(rows[0].tolist(), want, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_a_number_that_is_none_makes_its_group_nan_and_no_other(name, value):
    x = torch.randn(5, 300)
    x[2, 140] = value
    rows = quantized_rows(x, name)
    want = torch.zeros(5, 300, dtype=torch.bool)
    want[2, next(g for g in row_groups(name, 300) if g.start <= 140 < g.stop)] = True
    assert torch.equal(rows.isnan(), want)


def test_other_formats_leave_rows_alone():
    x = torch.randn(3, 40)
    assert all(quantized_rows(x, name) is x for name in (None, *NAMES[3:]))


# --- the op on the CPU ----------------------------------------------------------------------------------------------


def assert_right(out: Tensor, x: Tensor, layer: dict[str, Any]) -> None:
    """out is the definition's.

    Where h is quantised and differs from the definition's in its last bits, a number of it may rarely fall to the other
    side of a tie: so two rows may be off by more.
    """
    expected = reference.moe(x, **layer).flatten(0, -2)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    out = out.flatten(0, -2)
    if {layer["config"].routed_format, layer["config"].shared_format} & set(FP8):
        errors = torch.tensor([error(a, b) for a, b in zip(out, expected, strict=True)])
        assert (errors < 0.1).all(), errors
        kept = errors.argsort()[: max(0, len(errors) - 2)]
        out, expected = out[kept], expected[kept]
    found = error(out, expected)
    assert found < TOLERANCE[x.dtype], f"relative error {found:.2e}"


def assert_both_entries_are_right(x: Tensor, layer: dict[str, Any]) -> None:
    out = dual_stream_moe(x, **layer)
    assert_right(out, x, layer)
    pieces = dual_stream_moe_unfinalized(x, **layer)
    assert torch.equal(finalize(pieces, config=layer["config"], hidden_states=x), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routed", [None, *NAMES])
def test_every_mix_of_formats_is_the_definition(routed, dtype):
    for shared in (None, *NAMES):
        x, layer = make_layer(6, way="topk_ids", dtype=dtype, **SMALL)
        assert_both_entries_are_right(x, quantized(layer, routed, shared))


OPTIONS: dict[str, dict[str, Any]] = {
    "router_weight": {"way": "router_weight"},
    "router_logits": {"way": "router_logits"},
    "biases, a gate and a map": {"expert_bias": True, "shared_gate": True, "E_global": 9},
    "padding": {"valid_tokens": 4},
    "no shared expert": {"S": 0},
    "on the input": {"config": MoEConfig(top_k=3, apply_router_weight_on_input=True)},
    "up first": {"config": MoEConfig(top_k=3, w13_order="up_gate", clamp_routed=1.5)},
    "alternating": {"config": MoEConfig(top_k=3, w13_order="interleaved", activation="swiglu_oai")},
    "not gated": {"config": MoEConfig(top_k=2, activation="relu2")},
    "T=0": {"T": 0},
    "T=1": {**LARGE, "T": 1},
    "T=2": {**LARGE, "T": 2},
    "leading dims": {"T": (2, 1, 3)},
    "more blocks than one": LARGE,
    "more blocks than one, alternating": {**LARGE, "config": MoEConfig(top_k=3, w13_order="interleaved")},
}


@pytest.mark.parametrize("option", OPTIONS)
@ANY
def test_every_option_is_the_definitions(name, option):
    dtype = random.choice(DTYPES)
    x, layer = make_layer(**{"T": 7, "way": "topk_ids", "dtype": dtype, **SMALL, **OPTIONS[option]})
    assert_both_entries_are_right(x, quantized(layer, name, name))


def repacked(layer: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    return {n: change(n, t) if isinstance(t, Tensor) else t for n, t in layer.items()}


def test_every_spelling_of_the_same_bits_gives_the_same_layer():
    """int32 for bytes, bytes for powers of two, int8 for uint8, one scale of each form, HF's blocks."""

    def int32(n: str, t: Tensor) -> Tensor:
        if n.endswith("_zero_point"):
            return formats.pack_rows(formats.unpack_rows(t, t.shape[-2] * 2, torch.uint8), torch.int32)
        return t.view(torch.int32) if t.dtype == torch.uint8 else t

    def int8(n: str, t: Tensor) -> Tensor:
        return t.view(torch.int8) if t.dtype == torch.uint8 else t

    def plain_bytes(n: str, t: Tensor) -> Tensor:
        return t.view(torch.uint8) if t.dtype == E8M0 else t

    def one_more_dim(n: str, t: Tensor) -> Tensor:
        return t.unsqueeze(-1) if t.dim() < 2 and n in ("w2_global_scale", "w2_scale", "shared_w2_scale") else t

    for name, change, options in (
        ("int4", int32, {}),
        ("int4", int32, {"zero_point": True, "group": 64}),
        ("nvfp4", int8, {}),
        ("mxfp4", int8, {}),
        ("mxfp4", plain_bytes, {}),
        ("nvfp4", one_more_dim, {}),
        ("fp8_tensor", one_more_dim, {}),
    ):
        x, layer = make_layer(way="topk_ids", **SMALL)
        layer = quantized(layer, name, name, **options)
        other = repacked(layer, change)
        changed = [
            n
            for n, t in layer.items()
            if isinstance(t, Tensor) and (t.dtype, t.shape) != (other[n].dtype, other[n].shape)
        ]
        assert changed, (name, change)
        assert torch.equal(dual_stream_moe(x, **other), dual_stream_moe(x, **layer)), (name, change)


@pytest.mark.parametrize(
    ("name", "dtype"), [("int4", torch.bfloat16), ("int4", torch.float16), ("fp8_channel", torch.bfloat16)], ids=str
)
def test_scales_may_have_a_smaller_dtype(name, dtype):
    x, layer = make_layer(way="topk_ids", dtype=torch.bfloat16, **SMALL)
    layer = quantized(layer, name, name)
    small = {n: t.to(dtype) if n.endswith("_scale") else t for n, t in layer.items()}
    wide = {n: small[n].float() if n.endswith("_scale") else t for n, t in layer.items()}
    assert_both_entries_are_right(x, small)
    assert torch.equal(dual_stream_moe(x, **small), dual_stream_moe(x, **wide))


@pytest.mark.parametrize("scale", [torch.float32, E8M0, torch.uint8], ids=str)
def test_blocks_over_the_whole_w13_are_taken(scale):
    x, layer = make_layer(way="topk_ids", **{**LARGE, "S": 104})
    layer = quantized(layer, "fp8_block", "fp8_block")
    for name, shape in (("w13", (4, 3, 2)), ("w2", (4, 2, 2)), ("shared_w13", (2, 2))):  # ceil(272 or 208 / 128) rows
        powers = torch.randint(117, 120, shape, dtype=torch.uint8)
        if scale == torch.uint8:
            layer[f"{name}_scale"] = powers
        else:
            layer[f"{name}_scale"] = powers.view(E8M0) if scale == E8M0 else torch.rand(shape) / 100 + 1e-3
    assert_both_entries_are_right(x, layer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_expert_has_its_own_input_scale(dtype):
    x, layer = make_layer(9, way="topk_ids", dtype=dtype, **SMALL)
    layer = quantized(layer, "fp8_tensor", "fp8_tensor")
    one_for_all = dual_stream_moe(x, **layer)
    for name in ("w13", "w2"):
        layer[f"{name}_input_scale"] = torch.rand(5) / 50 + 1e-3
    layer["shared_w13_input_scale"], layer["shared_w2_input_scale"] = torch.tensor(0.02), torch.tensor([0.003])
    assert_both_entries_are_right(x, layer)
    assert error(dual_stream_moe(x, **layer), one_for_all) > 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ANY_FP8
def test_rows_in_fp8_cost_no_more_than_their_own_rounding(name, dtype):
    x, layer = make_layer(192, way="topk_ids", dtype=dtype, **LARGE)
    layer = quantized(layer, name, name)
    if name == "fp8_tensor":  # a product of two normal numbers goes further than one
        layer["w2_input_scale"] = layer["shared_w2_input_scale"] = torch.tensor([20 / 448])
    plain = {n: t for n, t in layer.items() if not n.endswith("_scale")}
    config = plain["config"] = dataclasses.replace(layer["config"], routed_format=None, shared_format=None)
    for weight in ("w13", "w2", "shared_w13", "shared_w2"):
        columns = layer[weight].shape[-1]
        its = formats.quantised(layer, weight)
        plain[weight] = dequantize(name, its, columns, halves=config.halves(weight))
    found = error(dual_stream_moe(x, **layer), reference.moe(x, **plain))
    assert 5e-3 < found < 5e-2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ANY
def test_a_bad_row_changes_no_other_row(name, dtype, value):
    x, layer = make_layer(8, way="topk_ids", dtype=dtype, shared_gate=True, **SMALL)
    layer = quantized(layer, name, name)
    good = dual_stream_moe(x, **layer)
    row = random.randrange(8)
    x[row, 11] = value
    out = dual_stream_moe(x, **layer)
    others = torch.arange(8) != row
    assert torch.equal(out[others], good[others])
    if name != "fp8_tensor" or value != value:  # a static scale cuts infinity off
        assert out[row].isnan().any()


@ANY
def test_rows_of_zeros_and_experts_of_zeros_come_out_as_zeros(name):
    x, layer = make_layer(8, way="topk_ids", **SMALL)
    x[3] = 0
    layer["topk_ids"][5] = torch.tensor([0, 2, 4])
    layer["shared_w2"].zero_()
    layer["w13"][[0, 2, 4]] = 0
    out = dual_stream_moe(x, **quantized(layer, name, name))
    assert not out[[3, 5]].any()
    assert out.isfinite().all()


@ANY
def test_inputs_are_neither_written_nor_moved(name):
    x, layer = make_layer(way="topk_ids", **{**SMALL, "S": 48})
    layer = quantized(layer, name, name, **({"zero_point": True} if name == "int4" else {}))
    given = tensors_of(x, layer)
    before = {n: (t.data_ptr(), t.shape, t.stride(), t._version, bits(t).clone()) for n, t in given.items()}
    for schedule in checks.SCHEDULES:
        out = dual_stream_moe(x, **layer, schedule=schedule)
        pieces = dual_stream_moe_unfinalized(x, **layer, schedule=schedule)
        finalize(pieces, config=layer["config"])
        storages = {t.untyped_storage().data_ptr() for t in (out, *pieces)}
        assert not storages & {t.untyped_storage().data_ptr() for t in given.values()}
    for n, t in given.items():
        *place, held = before[n]
        assert [t.data_ptr(), t.shape, t.stride(), t._version] == place, n
        assert torch.equal(bits(t), held), n


# --- the compiler ---------------------------------------------------------------------------------------------------


def one_call(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return dual_stream_moe(x, **layer)


def two_calls(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return finalize(dual_stream_moe_unfinalized(x, **layer), config=layer["config"], hidden_states=x)


@ANY
def test_opcheck(name):
    """Without its test that inputs stay as they are where it cannot compare them: see the one above."""
    x, layer = make_layer(5, way="topk_ids", **SMALL)
    layer = quantized(layer, name, "fp8_channel" if name == "int4" else "int4", zero_point=name in ("mxfp4", "int4"))
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(str(t.dtype).startswith("torch.float8") for t in tensors_of(x, layer).values()):
        tests.append("test_schema")
    opcheck(OPS.moe_v1.default, moe_args(x, layer), test_utils=tests)
    opcheck(OPS.moe_unfinalized_v1.default, moe_args(x, layer), test_utils=tests[:2])


def metadata(out: Any) -> list[tuple[Any, ...]]:
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.device, t.requires_grad) for t in outs]


@pytest.mark.parametrize("T", [0, 1, 7, (2, 1, 3)])
@ANY
def test_fake_outputs_look_like_real_ones(name, T):
    x, layer = make_layer(T, dtype=random.choice(DTYPES), **SMALL)
    args = moe_args(x, quantized(layer, name, random.choice(NAMES)))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
    for op in (OPS.moe_v1.default, OPS.moe_unfinalized_v1.default):
        with mode:
            fake = op(*fakes)
        assert metadata(fake) == metadata(op(*args))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "call", "nodes"),
    [*((name, one_call, ["moe"]) for name in NAMES), ("int4", two_calls, ["moe_unfinalized", "finalize"])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_compile_serves_every_T_with_one_node_a_call(name, call, nodes):
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    _, layer = make_layer(**SMALL)
    layer = quantized(layer, name, random.choice(NAMES))
    compiled = torch.compile(call, backend=keep, fullgraph=True)
    for T in (7, 2, 64, 3):
        x, _ = make_layer(T, **SMALL)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x, layer), call(x, layer))
    (graph,) = graphs
    assert re.findall(r"torch\.ops\.dsmoe\.(\w+)_v1", graph.code) == nodes


class Layer(nn.Module):
    """A call whose weights are buffers."""

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        self.config = layer["config"]
        self.names = [n for n, v in layer.items() if isinstance(v, Tensor)]
        for name in self.names:
            self.register_buffer(name, layer[name])

    def forward(self, x: Tensor) -> Tensor:
        return dual_stream_moe(torch.tanh(x), config=self.config, **{n: getattr(self, n) for n in self.names})


@pytest.mark.usefixtures("fresh_dynamo")
@ANY
def test_an_exported_program_runs_at_any_T_after_save_and_load(name):
    x, layer = make_layer(5, **SMALL)
    layer = quantized(layer, name, "int4" if name == "mxfp4" else "mxfp4")
    # Powers of two as bytes: torch 2.11 saves no float8_e8m0fnu.
    layer = {n: t.view(torch.uint8) if isinstance(t, Tensor) and t.dtype == E8M0 else t for n, t in layer.items()}
    module = Layer(layer)
    T = torch.export.Dim("T", min=0, max=4096)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: T},), strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for n, t in module.state_dict().items():
        assert loaded.state_dict[n].dtype == t.dtype
        assert torch.equal(bits(loaded.state_dict[n]), bits(t))
    run = loaded.module()
    for tokens in (7, 2, 64, 1, 0):
        x, _ = make_layer(tokens, **SMALL)
        assert torch.equal(run(x), module(x))
