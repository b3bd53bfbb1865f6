"""What the products with quantised weights promise, in Triton's interpreter: `test_kernels_interpreter.py` runs it.

Oracles are `formats.dequantize` and plain torch in float64. The interpreter multiplies float32 in place of bf16 and of
fp16 (`interpreter_product_cases.py`), so how codes become 16-bit numbers has tests of its own here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted import (
    BF16,
    FP16,
    FP32,
    FP64,
    GARBAGE,
    NAN,
    close,
    experts_of,
    order_of,
    order_rows,
    padded_rows,
    randn,
    rng,
)
from torch import Tensor

from dsmoe_op import formats, kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FORMATS, Quantised
from dsmoe_op.kernels.coded import _load_scale, _numbers, to_fp8
from dsmoe_op.tuning import Tile, gemm_kind, layer_variants

__all__ = ["rng"]

FP8 = ("fp8_block", "fp8_channel", "fp8_tensor")
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
TL = {FP16: tl.float16, BF16: tl.bfloat16, FP32: tl.float32}


# --- numbers --------------------------------------------------------------------------------------------------------


@triton.jit
def _store_numbers(code_ptr, zero_ptr, scale_ptr, out_ptr, NAME: tl.constexpr, DTYPE: tl.constexpr, N: tl.constexpr):
    i_N = tl.arange(0, N)
    scale = _load_scale(scale_ptr + i_N, i_N < N, DTYPE)
    numbers = _numbers(tl.load(code_ptr + i_N), tl.load(zero_ptr + i_N), scale, NAME, DTYPE)
    tl.store(out_ptr + i_N, numbers)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_every_code_becomes_its_number_times_its_scale_rounded_once(rng, name, dtype):
    codes = torch.arange(16, dtype=torch.int16).repeat(64)
    zero = torch.randint(0, 16, codes.shape, generator=rng).float() if name == "int4" else torch.zeros(codes.shape)
    scale = {
        "nvfp4": torch.randint(0x20, 0x58, codes.shape, generator=rng, dtype=torch.uint8).view(formats.E4M3),
        "mxfp4": torch.randint(121, 134, codes.shape, generator=rng, dtype=torch.uint8),
        "int4": torch.rand(codes.shape, generator=rng).to(random_of(rng, dtype, FP32)),
    }[name]
    out = torch.empty(codes.shape, dtype=dtype)
    _store_numbers[(1,)](codes, zero, scale, out, NAME=name, DTYPE=TL[dtype], N=len(codes))
    table = torch.tensor([*formats.E2M1, *(-v for v in formats.E2M1)], dtype=FP64)
    number = codes.to(FP64) - zero.to(FP64) if name == "int4" else table[codes.long()]
    want = number * formats.power_of_two(scale).to(FP64)
    assert torch.equal(out, want.to(dtype))


def random_of(rng: torch.Generator, *values: Any) -> Any:
    return values[int(torch.randint(len(values), (1,), generator=rng))]


@triton.jit
def _store_scales(scale_ptr, out_ptr, DTYPE: tl.constexpr, N: tl.constexpr):
    i_N = tl.arange(0, N)
    tl.store(out_ptr + i_N, _load_scale(scale_ptr + i_N, i_N < N, DTYPE))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_byte_of_a_scale_is_its_power_of_two(dtype):
    scale = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=dtype)
    _store_scales[(1,)](scale, out, DTYPE=TL[dtype], N=256)
    assert torch.equal(out[:255].double(), 2.0 ** torch.arange(-127, 128, dtype=FP64))
    assert out[255].isnan()


@triton.jit
def _store_rows(a_ptr, factor_ptr, out_ptr, LARGEST: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    q = to_fp8(tl.load(a_ptr + at), tl.load(factor_ptr + tl.arange(0, M)), LARGEST, True)
    tl.store(out_ptr + at, q)


def test_rows_become_the_fp8_numbers_of_the_definition(rng):
    """In the interpreter's own way, without which the products below would show nothing."""
    x = randn(rng, 16, 128) * torch.logspace(-6, 6, 16)[:, None]
    x[3, 5], x[4], x[5, :64] = NAN, 0.0, x[5, :64] * 2.0**-16
    amax = x.nan_to_num(0.0).abs().amax(1).clamp(min=2.0**-100)
    factor = torch.full_like(amax, 448.0) / amax
    factor[7] *= 10  # beyond the largest
    out = torch.empty_like(x)
    _store_rows[(1,)](x, factor, out, LARGEST=448.0, M=16, N=128)
    want = (x * factor[:, None]).clamp(-448, 448).to(formats.E4M3).float()
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


# --- the order of columns --------------------------------------------------------------------------------------------


def reordered(x: Tensor) -> Tensor:
    """Columns of each 32 as eight codes of a word become pairs: the code, then the word, then the word's half."""
    source = [32 * part + 8 * word + 4 * half + code for part in range(x.shape[1] // 32) for code in range(4)
              for word in range(4) for half in range(2)]  # fmt: skip
    return x[:, source]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("H", [32, 96, 160, 256, 1056, 2048, 3072])  # 32 times 1, 3, 5, 33 and powers of two
@pytest.mark.parametrize("T", [1, 7, 70])
def test_columns_come_into_the_order_of_codes(rng, dtype, H, T):
    numbers = torch.arange(T * H, dtype=torch.int16).view(T, H)  # every bit pattern is moved, none computed with
    for stride in (H, H + 24):
        around = torch.full((T, stride), -1, dtype=torch.int16)
        around[:, :H] = numbers
        out = torch.full((T + 2, H), -1, dtype=torch.int16)
        kernels.reorder_columns(around.view(dtype)[:, :H], out[1:-1].view(dtype))
        assert torch.equal(out[1:-1], reordered(numbers))
        assert (out[[0, -1]] == -1).all()
        assert torch.equal(around[:, :H], numbers)
        assert (around[:, H:] == -1).all()


@pytest.mark.parametrize("I", [32, 96, 160, 1024, 2080])
@pytest.mark.parametrize("rows", [0, 1, 33, 64])
def test_columns_of_h_change_places_in_place_and_rows_of_no_expert_stay(rng, I, rows):
    N = 64
    h = torch.randint(-(2**15), 2**15, (N + 2, I), generator=rng, dtype=torch.int16)
    before, given = h.clone(), h[1:-1].view(BF16)
    kernels.reorder_columns(given, given, torch.tensor([rows], dtype=torch.int32))
    assert torch.equal(h[1 : 1 + rows], reordered(before[1 : 1 + rows]))
    assert torch.equal(h[1 + rows :], before[1 + rows :])
    assert torch.equal(h[0], before[0])


# --- products -------------------------------------------------------------------------------------------------------


def coded_tiles(name: str, dtype: torch.dtype, gemm: str) -> list[Tile]:
    variants = layer_variants(gemm_kind(dtype, False, name))
    return list(dict.fromkeys(t for v in variants for t in (getattr(v, gemm), getattr(v, f"shared_{gemm}"))))


@dataclasses.dataclass
class Weight:
    """A random quantised weight of E experts, or of the shared one (E = 0), and what kernels are told of it."""

    name: str
    q: Tensor
    coded: kernels.Coded
    numbers: Tensor
    """float64"""
    input_scale: Tensor | None

    def rows(self, a: Tensor, expert: int) -> Tensor:
        """float64: a as this weight multiplies it."""
        scale = self.input_scale
        if scale is not None and scale.numel() > 1:
            scale = scale[expert]
        return formats.quantized_rows(a, self.name, scale).to(FP64)


def make_weight(rng, name: str, E: int, R: int, C: int, halves: int, interleaved: bool, **options) -> Weight:
    w = randn(rng, *((E,) if E else ()), R, C, scale=0.3)
    if name == "fp8_tensor":
        options["input_scale"] = torch.rand(E or 1, generator=rng) * 0.01 + 0.002
    whole, misaligned = options.pop("whole_blocks", False), options.pop("misaligned", False)
    given = {"halves": 1 if whole else halves, "interleaved": interleaved and not whole}
    parts = formats.quantize(name, w, **given, **options)
    if options.get("zero_point") and random_of(rng, True, False):  # packed in int32, as compressed-tensors does
        zeros = formats.unpack_rows(parts.zero_point, R, torch.uint8)
        parts = parts._replace(zero_point=formats.pack_rows(zeros, torch.int32))
    numbers = formats.dequantize(name, parts, C, halves=halves, interleaved=interleaved)
    parts = Quantised(*(None if t is None else kernels.as_bytes(t) for t in parts))
    if misaligned:
        q = torch.empty(parts.q.numel() + 1, dtype=parts.q.dtype)[1:].view(parts.q.shape)
        parts = parts._replace(q=q.copy_(parts.q))
    return Weight(name, parts.q, kernels.coded(name, parts, R, C, halves, interleaved), numbers, parts.input_scale)


def check_gemm1(rng, name, tile, *, dtype=FP32, T=37, H=144, I=80, E=5, bias=False, config=None, **options) -> None:
    config = config or MoEConfig(top_k=3)
    K, halves, interleaved = config.top_k, 2 if config.gated else 1, config.interleaves("w13")
    ids = torch.randint(-1, E, (T, K), generator=rng, dtype=torch.int32)
    ids[ids == 1] = 2
    x = randn(rng, T, H, dtype=dtype)
    w = make_weight(rng, name, E, halves * I, H, halves, interleaved, **options)
    b = randn(rng, E, halves * I) if bias else None
    weights = randn(rng, T, K) if config.apply_router_weight_on_input else None
    rows = order_of(ids, E, tile)
    h = torch.full((T * K, I), GARBAGE, dtype=dtype)
    kernels.gemm1(
        padded_rows(x), config=config, tile=tile, w13=w.q, coded=w.coded, w13_bias=b, blocks=rows.blocks_3B,
        sorted_slot_N=rows.sorted_slot_N, topk_weights_TK=weights, h_NI=h,
    )  # fmt: skip
    for expert, its in enumerate(experts_of(rows, E)):
        slots = rows.sorted_slot_N[its].long()
        a = x[slots // K]
        if weights is not None:
            a = (a.float() * weights.flatten()[slots, None]).to(dtype)
        sums = w.rows(a, expert) @ w.numbers[expert].T + (0 if b is None else b[expert].to(FP64))
        close(h[its], reference.activation(sums, config, clamp=None, order=config.w13_order), sums=sums)
    assert (h[rows.num_rows :] == torch.tensor(GARBAGE, dtype=dtype)).all()


def check_gemm2(rng, name, tile, *, dtype=FP32, T=37, H=80, I=144, E=5, **options) -> None:
    K = 3
    ids = torch.randint(-1, E, (T, K), generator=rng, dtype=torch.int32)
    ids[ids == 1] = 2
    rows = order_of(ids, E, tile)
    w = make_weight(rng, name, E, H, I, 1, False, **options)
    h, y = randn(rng, T * K, I, dtype=dtype), torch.full((T * K, H), GARBAGE, dtype=dtype)
    kernels.gemm2(
        config=MoEConfig(top_k=K), tile=tile, w2=w.q, coded=w.coded, blocks=rows.blocks_3B, h_NI=h, y_NH=y,
        num_rows=rows.num_rows, zero_tail=True,
    )  # fmt: skip
    for expert, its in enumerate(experts_of(rows, E)):
        close(y[its], w.rows(h[its], expert) @ w.numbers[expert].T)
    assert (y[rows.num_rows :] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_gemm1_of_codes_is_right_in_every_tile(rng, name):
    for dtype in (FP32, FP16):
        for tile in coded_tiles(name, dtype, "gemm1"):
            check_gemm1(rng, name, tile, dtype=dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_gemm2_of_codes_is_right_in_every_tile(rng, name):
    for dtype in (FP32, FP16):
        for tile in coded_tiles(name, dtype, "gemm2"):
            check_gemm2(rng, name, tile, dtype=dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_gemm1_of_codes_is_right_in_every_form(rng, name):
    tile = coded_tiles(name, FP16, "gemm1")[0]
    for order in ("up_gate", "interleaved"):
        check_gemm1(rng, name, tile, T=5, config=MoEConfig(top_k=2, w13_order=order), bias=True)
    check_gemm1(rng, name, tile, T=5, config=MoEConfig(top_k=2, activation="relu2"))
    on_input = MoEConfig(top_k=2, apply_router_weight_on_input=True)
    check_gemm1(rng, name, tile, T=5, H=256, config=on_input, dtype=FP16)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_codes_may_lie_at_any_address(rng, name):
    """Not of words, but of bytes then."""
    check_gemm1(rng, name, coded_tiles(name, FP16, "gemm1")[0], T=5, H=272, misaligned=True)
    check_gemm2(rng, name, coded_tiles(name, FP16, "gemm2")[0], T=5, misaligned=True)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zero_point", [False, True])
def test_int4_has_groups_of_any_size_and_zero_points(rng, group, zero_point):
    for tile in coded_tiles("int4", FP32, "gemm1")[:1] + coded_tiles("int4", FP16, "gemm1")[:1]:
        check_gemm1(rng, "int4", tile, T=5, H=272, group=group, zero_point=zero_point)


def test_fp8_blocks_may_be_of_all_rows_of_w13(rng):
    """They are then ceil(2I / 128): some have both gate and up rows."""
    for I in (144, 176):
        check_gemm1(rng, "fp8_block", coded_tiles("fp8_block", FP16, "gemm1")[0], T=5, I=I, whole_blocks=True)


@pytest.mark.parametrize("name", FORMATS)
def test_the_shared_experts_products_are_right(rng, name):
    T, H, S = 21, 144, 80
    for dtype in (FP32, FP16):
        x, config = randn(rng, T, H, dtype=dtype), MoEConfig(top_k=2)
        w13, w2 = make_weight(rng, name, 0, 2 * S, H, 2, False), make_weight(rng, name, 0, H, S, 1, False)
        gate, valid = torch.rand(T, generator=rng), torch.tensor([T - 3], dtype=torch.int32)
        h, shared = torch.full((T, S), NAN, dtype=dtype), torch.full((T, H), NAN, dtype=dtype)
        tiles = layer_variants(gemm_kind(dtype, False, name))[-1]
        kernels.gemm1(
            x, config=config, tile=tiles.shared_gemm1, shared_w13=w13.q, shared_coded=w13.coded, h_shared_TS=h,
            num_valid_tokens=valid,
        )  # fmt: skip
        kernels.gemm2(
            config=config, tile=tiles.shared_gemm2, shared_w2=w2.q, shared_coded=w2.coded, h_shared_TS=h, gate_T=gate,
            shared_TH=shared, num_valid_tokens=valid,
        )  # fmt: skip
        sums = w13.rows(x, 0) @ w13.numbers.T
        close(h[:-3], reference.activation(sums, config, clamp=None)[:-3], sums=sums)
        close(shared[:-3], (gate.to(FP64)[:, None] * (w2.rows(h, 0) @ w2.numbers.T))[:-3])
        assert (shared[-3:] == 0).all()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("name", "group"),
    [*((name, None) for name in FORMATS if name != "int4"), *(("int4", n) for n in (32, 64, 128, 384))],
)
def test_programs_may_share_the_tiles_of_codes(rng, name, group, ahead):
    """Each with a part of H, and of its scales, of which that of int4's groups of 128 here is no whole number.
    fp8_channel has parts where a launch has made the rows' codes ahead.

    Other formats than fp8 know no codes ahead: their words are misaligned instead, and read byte by byte.
    """
    T, H, I, S, E, K = 5, 384 if name == "int4" else 512, 48, 80, 4, 2
    dtype, config = random_of(rng, FP32, FP16), MoEConfig(top_k=K)
    tiles = Tile(16, 32, 64 if name == "int4" else 128, 4, 3, True, splits=2), Tile(16, 128, 128, 4, 3, swap=True)
    options = {"group": group, "zero_point": True} if name == "int4" else {}
    options["misaligned"] = ahead and name in FOUR_BITS
    w13, w2 = (make_weight(rng, name, E, R, C, n, False, **options) for R, C, n in ((2 * I, H, 2), (H, I, 1)))
    shared = [make_weight(rng, name, 0, R, C, n, False, **options) for R, C, n in ((2 * S, H, 2), (H, S, 1))]
    ids = torch.randint(-1, E, (T, K), generator=rng, dtype=torch.int32)
    rows = order_rows(ids, None, E=E, canonical=False, arrivals=kernels.num_arrivals(20, T, H, I, S, tiles))[0]
    x = randn(rng, T, H, dtype=dtype)
    activations, codes = FORMATS[name].activations, {}
    if ahead and activations in ("block", "token"):
        scales = torch.empty(T, *(() if activations == "token" else (H // 128,)))
        codes = {"x_codes_TH": torch.empty(T, H, dtype=formats.E4M3), "x_scales": scales}
        kernels.quantize_rows(x, *codes.values())
    h, h_shared = torch.full((T * K, I), NAN, dtype=dtype), torch.full((T, S), NAN, dtype=dtype)
    y, out = torch.full((T * K, H), NAN, dtype=dtype), torch.full((T, H), NAN, dtype=dtype)
    parts = torch.full((kernels.num_parts(T, K, I, S, True, tiles[0]),), NAN)
    kernels.experts(
        x, config=config, tiles=tiles, rows=rows, topk_ids_TK=ids, topk_weights_TK=torch.rand(T, K), w13=w13.q, w2=w2.q,
        h_NI=h, y_NH=y, shared_w13=shared[0].q, shared_w2=shared[1].q, h_shared_TS=h_shared, out_TH=out, parts=parts,
        shared_TH=torch.full((T, H), NAN, dtype=dtype), coded=(w13.coded, w2.coded),
        shared_coded=tuple(w.coded for w in shared), **codes,
    )  # fmt: skip
    for expert, its in enumerate(experts_of(rows, E)):
        sums = w13.rows(x[rows.sorted_slot_N[its].long() // K], expert) @ w13.numbers[expert].T
        close(h[its], reference.activation(sums, config, clamp=None), sums=sums)
    sums = shared[0].rows(x, 0) @ shared[0].numbers.T
    close(h_shared, reference.activation(sums, config, clamp=None), sums=sums)
    assert out.isfinite().all()
    assert parts.isnan().all() == (group == 128 or (name == "fp8_channel" and not ahead))
