"""Many rows on a GPU: the persistent products at every height of an expert's rows, alone and in a layer."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu import SIZES, Block, Captured, capture, needs_gpu, with_tiles
from layers import make_layer, quantized
from torch import Tensor

from dsmoe_op import (
    MoEConfig,
    dual_stream_moe,
    dual_stream_moe_unfinalized,
    finalize,
    formats,
    kernels,
    reference,
    tuning,
)
from dsmoe_op.cli import candidates
from dsmoe_op.kernels import coded_persistent, gemm1_persistent, gemm2_persistent

pytestmark = needs_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEIGHTS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 0, 0, 255, 256, 257, 300, 1000, 0)
"""Rows of each expert."""
LOW_HEIGHTS = (0, 1, 15, 16, 17, 0, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0, 0, 127, 128, 129, 255, 256, 257, 300, 0)
"""The same around the blocks of four bits' products."""


@pytest.fixture(autouse=True)
def _sm_90() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of sm_90")


def ids_of(heights: Sequence[int], without: int) -> Tensor:
    """[T, 1] in random order: so many slots of each expert, and of none."""
    ids = torch.cat([torch.full((rows,), e) for e, rows in enumerate(heights)] + [torch.full((without,), -1)])
    return ids[torch.randperm(len(ids))].to("cuda", torch.int32)[:, None]


def persistent_tile() -> tuning.Tile:
    (tile,) = {tiles.gemm2 for tiles in tuning.layer_variants("16bit") if tiles.gemm2.persistent}
    return tile


def fp8_tile(block_m: int, *, persistent: bool = True) -> tuning.Tile:
    """A candidate of `tune` for GEMM 2."""
    return tuning.Tile(block_m, 8192 // block_m, 128, 8, 3, swap=True, persistent=persistent, least_m=16)


def gemm1_tile(block_m: int, *, persistent: bool = True) -> tuning.Tile:
    """The same for GEMM 1."""
    return tuning.Tile(block_m, 4096 // block_m, 128, 8, 3, swap=True, persistent=persistent, least_m=16)


def codes_of(h: Tensor, format: str, *offsets: Tensor, of_h: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the numbers that these are, in float64."""
    codes = torch.empty(h.shape, dtype=formats.E4M3, device="cuda")
    scales = torch.empty(len(h), *(() if format == "fp8_channel" else (-(-h.shape[1] // 128),)), device="cuda")
    kernels.quantize_rows(h, codes, scales, *offsets, of_h=of_h)
    each = scales.unsqueeze(-1) if scales.dim() == 1 else scales.repeat_interleave(128, 1)[:, : h.shape[1]]
    return codes, scales, codes.double() * each


def fp8_weight(
    w: Tensor, format: str, scale: torch.dtype | None = None, *, halves: int = 1, whole: bool = False
) -> tuple[Tensor, kernels.Coded, Tensor]:
    """q, what kernels are told of it, and the numbers that it is. Scales of bytes are any powers of two near 1.

    halves: of w13, 2. whole: its scales are those of blocks of the whole, not of each half.
    """
    parts, (H, I) = formats.quantize(format, w.float(), halves=1 if whole else halves), w.shape[-2:]
    if scale is torch.uint8:
        parts = parts._replace(scale=torch.randint(120, 132, parts.scale.shape, dtype=scale, device="cuda"))
    elif scale is not None:
        parts = parts._replace(scale=parts.scale.to(scale))
    numbers = formats.dequantize(format, parts, I, halves=halves)
    return parts.q, kernels.coded(format, parts, H, I, halves, False), numbers


class Gemm2:
    """GEMM 2 alone; y lies inside memory that is full of NaN. Of an fp8 format, in blocks of block_m rows."""

    def __init__(
        self, heights: Sequence[int], without: int, H: int, I: int, dtype: torch.dtype, bias: Any,
        format: str | None = None, block_m: int = 128, scale: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        def ints(*shape: int) -> Tensor:
            return torch.full(shape, 12345, dtype=torch.int32, device="cuda")

        ids, self.tile = ids_of(heights, without), persistent_tile()
        if format is not None:
            self.tile = fp8_tile(block_m)
        N, E = len(ids), len(heights)
        counters, B = ints(kernels.num_counters(N, E)), kernels.num_blocks(N, E, self.tile.block_m)
        self.rows = kernels.Rows(
            ints(E + 1), ints(N), ints(N, 1), ints(3, B), self.tile.block_m, self.tile.tail, counters, ints(2), ints(1)
        )  # fmt: skip
        kernels.zero_counters(self.rows)
        kernels.order_rows(ids, None, None, None, num_experts=E, num_zero_experts=0, rows=self.rows)
        self.end = sum(heights)
        self.h = torch.randn(N, I, device="cuda").to(dtype)
        self.h[self.end :] = float("nan")
        self.w2 = (torch.randn(E, H, I, device="cuda") / I**0.5).to(dtype)
        empty = [e for e, rows in enumerate(heights) if not rows]
        self.coded: dict[str, Any] = {}
        self.numbers = self.h, self.w2
        if format is not None:
            codes, scales, h = codes_of(self.h, format, self.rows.offsets)
            self.w2, coded, w2 = fp8_weight(self.w2, format, scale)
            self.numbers = h, w2
            self.coded = {"coded": coded, "h_codes_NI": codes, "h_scales": scales}
            self.w2.view(torch.uint8)[empty] = 0x7F
        else:
            self.w2[empty] = float("nan")
        assert gemm2_persistent.takes(self.w2, self.tile.block_m, self.coded.get("coded", kernels.PLAIN))
        self.bias = torch.randn(E, H, device="cuda").to(bias) if bias else None
        self.around = torch.full((N + 300, H), float("nan"), dtype=dtype, device="cuda")
        self.y = self.around[128 : 128 + N]

    def run(self, *, zero_tail: bool) -> Tensor:
        """All of the memory."""
        self.around.fill_(float("nan"))
        self.rows.taken.zero_()
        kernels.gemm2(
            config=MoEConfig(top_k=1), tile=self.tile, w2=self.w2, w2_bias=self.bias, blocks=self.rows.blocks_3B,
            h_NI=self.h, y_NH=self.y, offsets=self.rows.offsets, taken=self.rows.taken, zero_tail=zero_tail,
            **self.coded,
        )  # fmt: skip
        return self.around

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64, of the experts' rows: y, and the sums of its products' magnitudes."""
        y = torch.empty(self.end, self.y.shape[1], dtype=torch.float64, device="cuda")
        sizes, ends = torch.empty_like(y), self.rows.offsets.tolist()
        for e, (first, last) in enumerate(itertools.pairwise(ends)):
            h, w2 = self.numbers[0][first:last].double(), self.numbers[1][e].double()
            y[first:last], sizes[first:last] = h @ w2.T, h.abs() @ w2.abs().T
            if self.bias is not None:
                y[first:last] += self.bias[e].double()
        return y, sizes

    def check(self, *, zero_tail: bool) -> None:
        around, N = self.run(zero_tail=zero_tail), len(self.y)
        rounding = {BF16: 2.0**-8, FP16: 2.0**-11}[around.dtype]
        expected, sizes = self.expected()
        # Products of fp8 are added up with fewer bits than a float32 has.
        bound = 1.01 * rounding * expected.abs() + (sizes * 2.0**-11 if self.coded else 5e-5)
        assert ((self.y[: self.end].double() - expected).abs() <= bound).all()
        tail = self.y[self.end :]
        assert (tail == 0).all() if zero_tail else tail.isnan().all()
        assert around[:128].isnan().all()
        assert around[128 + N :].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bias", [None, "model", FP32])
@pytest.mark.parametrize(("H", "I"), [(400, 208), (2048, 512), (16, 16), (272, 80), (896, 1408)])
@pytest.mark.parametrize("without", [0, 1, 77])
def test_gemm2_is_right_at_every_height_and_writes_nothing_else(dtype, bias, H, I, without) -> None:
    one = Gemm2(HEIGHTS, without, H, I, dtype, dtype if bias == "model" else bias)
    for zero_tail in (True, False):
        one.check(zero_tail=zero_tail)


@pytest.mark.parametrize(
    ("format", "block_m", "scale"),
    [
        ("fp8_block", 64, None),
        ("fp8_block", 64, torch.uint8),
        ("fp8_block", 128, None),
        ("fp8_block", 128, torch.uint8),
        ("fp8_channel", 64, None),
        ("fp8_channel", 128, BF16),
    ],
)
@pytest.mark.parametrize(("H", "I"), [(400, 208), (2048, 512), (16, 16), (272, 144), (896, 1408)])
def test_gemm2_of_fp8_is_right_at_every_height_and_writes_nothing_else(format, block_m, scale, H, I) -> None:
    dtype = BF16 if scale is torch.uint8 else random.choice([BF16, FP16])  # whose range such scales would leave
    one = Gemm2(HEIGHTS, 77, H, I, dtype, random.choice([None, dtype, FP32]), format, block_m, scale)
    for zero_tail in (True, False):
        one.check(zero_tail=zero_tail)
    first = one.y.clone()
    for _ in range(5):
        one.run(zero_tail=False)
        assert torch.equal(one.y[: one.end], first[: one.end])


@pytest.mark.parametrize("heights", [(0, 1), (1, 0), (0, 0, 0, 5000), (1,) * 300, (129,) * 200, (64, 0) * 150, (0,)])
@pytest.mark.parametrize("kind", [(), ("fp8_block", 64), ("fp8_block", 128)])
def test_gemm2_is_right_for_few_and_for_many_blocks(heights, kind) -> None:
    """Fewer blocks than programs, or more; of one expert, or of many."""
    one = Gemm2(heights, 40, 400, 208, BF16, None, *kind)
    for zero_tail in (True, False):
        one.check(zero_tail=zero_tail)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("H", "S"), [(400, 208), (2048, 512), (16, 16)])
def test_the_shared_experts_gemm2_is_right_at_every_height_and_writes_nothing_else(dtype, H, S) -> None:
    rounding = {BF16: 2.0**-8, FP16: 2.0**-11}[dtype]
    w2 = (torch.randn(H, S, device="cuda") / S**0.5).to(dtype)
    for T in (1, 63, 64, 65, 127, 128, 129, 1000, 20_000):
        h = torch.randn(T, S, device="cuda").to(dtype)
        around = torch.full((T + 300, H), float("nan"), dtype=dtype, device="cuda")
        y, outs = around[128 : 128 + T], []
        for _ in range(3):
            y.fill_(float("nan"))
            kernels.gemm2(
                config=MoEConfig(top_k=1), tile=persistent_tile(), shared_w2=w2, h_shared_TS=h, shared_TH=y
            )  # fmt: skip
            outs.append(y.clone())
        torch.testing.assert_close(y.double(), h.double() @ w2.double().T, rtol=1.01 * rounding, atol=5e-5)
        assert all(torch.equal(out, y) for out in outs)
        assert around[:128].isnan().all()
        assert around[128 + T :].isnan().all()


@pytest.mark.parametrize(("format", "block_m"), [("fp8_block", 64), ("fp8_block", 128), ("fp8_channel", 64)])
@pytest.mark.parametrize(("H", "S"), [(400, 208), (2048, 512), (16, 16)])
def test_the_shared_experts_gemm2_of_fp8_is_right_too(format, block_m, H, S) -> None:
    q, coded, w2 = fp8_weight(torch.randn(H, S, device="cuda") / S**0.5, format)
    assert gemm2_persistent.takes(q, block_m, coded)
    for T in (1, 63, 64, 65, 127, 128, 129, 1000, 20_000):
        codes, scales, h = codes_of(torch.randn(T, S, device="cuda").to(BF16), format)
        around = torch.full((T + 300, H), float("nan"), dtype=BF16, device="cuda")
        y, outs = around[128 : 128 + T], []
        for _ in range(3):
            y.fill_(float("nan"))
            kernels.gemm2(
                config=MoEConfig(top_k=1), tile=fp8_tile(block_m), shared_w2=q, shared_coded=coded, shared_TH=y,
                h_shared_TS=torch.full((T, S), float("nan"), dtype=BF16, device="cuda"), h_shared_codes_TS=codes,
                h_shared_scales=scales,
            )  # fmt: skip
            outs.append(y.clone())
        expected, sizes = h @ w2.double().T, h.abs() @ w2.double().abs().T
        assert ((y.double() - expected).abs() <= 1.01 * 2.0**-8 * expected.abs() + sizes * 2.0**-11).all(), T
        assert all(torch.equal(out, y) for out in outs)
        assert around[:128].isnan().all()
        assert around[128 + T :].isnan().all()


def activated(
    sums: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    config: MoEConfig,
    clamp: float | None,
    order: str,
    dtype: torch.dtype,
    off: float = 2.0**-11,
) -> tuple[Tensor, Tensor]:
    """h in float64 of sums of gate and up, and how far it may be off; sizes: the sums of the products' magnitudes.

    off: of a sum, relative to these. Products of fp8 are added up with fewer bits than a float32 has.
    """
    if bias is not None:
        sums = sums + bias.double()
    h = reference.activation(sums, config, clamp=clamp, order=order)
    if order == "interleaved":
        sums, sizes = (torch.cat([t[..., 0::2], t[..., 1::2]], -1) for t in (sums, sizes))
    gate, up = sums.abs().chunk(2, -1)
    off_gate, off_up = (sizes * off).chunk(2, -1)
    if order == "up_gate":
        gate, up, off_gate, off_up = up, gate, off_up, off_gate
    # No activation is steeper than 1.2, or larger than its gate; swiglu_oai multiplies by up + 1.
    bound = 1.2 * (up + 1) * off_gate + gate * off_up + 1.2 * off_gate * off_up + 1e-5 * (1 + gate) * (1 + up)
    return h, bound + 1.01 * {BF16: 2.0**-8, FP16: 2.0**-11}[dtype] * h.abs()


class Routed:
    """Tokens of two slots each, in the order of their experts, in blocks of block_m rows."""

    def __init__(self, heights: Sequence[int], without: int, block_m: int) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.full(shape, 12345, dtype=torch.int32, device="cuda")

        ids = ids_of(heights, without + (sum(heights) + without) % 2).view(-1, 2)
        self.T, self.N, self.E = T, N, E = len(ids), ids.numel(), len(heights)
        self.rows = kernels.Rows(
            ints(E + 1), ints(N), ints(T, 2), ints(3, kernels.num_blocks(N, E, block_m)), block_m, 0,
            ints(kernels.num_counters(N, E)), ints(2), ints(1),
        )  # fmt: skip
        kernels.zero_counters(self.rows)
        kernels.order_rows(ids, None, None, None, num_experts=E, num_zero_experts=0, rows=self.rows)
        assert self.rows.taken.tolist() == [0, 0]
        self.end, self.ends = sum(heights), [0, *itertools.accumulate(heights)]
        self.empty = [e for e, rows in enumerate(heights) if not rows]
        slots = ids.flatten().where(ids.flatten() >= 0, E).argsort(stable=True)
        self.tokens = slots[: self.end] // 2

    def blocks(self) -> int:
        """Of experts' rows."""
        return int((self.rows.blocks_3B[0] >= 0).sum())


class Gemm1(Routed):
    """GEMM 1 of an fp8 format alone; h lies inside memory that is full of NaN."""

    def __init__(
        self, heights: Sequence[int], without: int, H: int, I: int, format: str, block_m: int, *,
        config: MoEConfig | None = None, dtype: torch.dtype = BF16, bias: torch.dtype | None = None,
        scale: torch.dtype | None = None, whole: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(heights, without, block_m)
        self.config = dataclasses.replace(config or MoEConfig(top_k=2), top_k=2)
        self.tile = gemm1_tile(block_m)
        T, N, E = self.T, self.N, self.E
        self.x = torch.randn(T, H, device="cuda").to(dtype)
        codes, scales, self.numbers = codes_of(self.x, format, of_h=False)
        w13 = torch.randn(E, 2 * I, H, device="cuda") / H**0.5
        self.w13, self.coded, self.w13_numbers = fp8_weight(w13, format, scale, halves=2, whole=whole)
        self.w13.view(torch.uint8)[self.empty] = 0x7F
        self.codes = {"x_codes_TH": codes, "x_scales": scales}
        assert gemm1_persistent.takes(self.w13, block_m, self.config, self.coded, shared=False)
        self.bias = torch.randn(E, 2 * I, device="cuda").to(bias) if bias else None
        self.around = torch.full((N + 300, I), float("nan"), dtype=dtype, device="cuda")
        self.h = self.around[128 : 128 + N]

    def run(self, *, persistent: bool = True) -> Tensor:
        """h of the experts' rows; what is around it stays as it was."""
        self.around.fill_(float("nan"))
        self.rows.taken.zero_()
        kernels.gemm1(
            self.x, config=self.config, tile=self.tile._replace(persistent=persistent), w13=self.w13,
            w13_bias=self.bias, blocks=self.rows.blocks_3B, sorted_slot_N=self.rows.sorted_slot_N, h_NI=self.h,
            taken=self.rows.taken, coded=self.coded, **self.codes,
        )  # fmt: skip
        items = self.blocks() * -(-self.h.shape[1] // 128)
        first, second = self.rows.taken.tolist()
        assert first == 0
        assert second == items * persistent  # each item is followed by a look for another one
        h = self.h[: self.end]
        assert self.h[self.end :].isnan().all()
        assert self.around[:128].isnan().all()
        assert self.around[128 + len(self.h) :].isnan().all()
        return h.clone()

    def check(self) -> None:
        h = self.run()
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
            x, w13 = self.numbers[self.tokens[first:last]], self.w13_numbers[e]
            expected, bound = activated(
                x @ w13.T, x.abs() @ w13.abs().T, None if self.bias is None else self.bias[e], self.config,
                self.config.clamp_routed, self.config.w13_order, h.dtype,
            )  # fmt: skip
            assert ((h[first:last].double() - expected).abs() <= bound).all(), e
        if (
            self.bias is None or self.coded.form[0] == "fp8_block"
        ):  # else a row's scale and the bias may be one rounding
            assert torch.equal(self.run(persistent=False), h)
        for _ in range(3):
            assert torch.equal(self.run(), h)


GEMM1_KINDS = [("fp8_block", 64), ("fp8_block", 128), ("fp8_channel", 64), ("fp8_channel", 128)]


@pytest.mark.parametrize(("format", "block_m"), GEMM1_KINDS)
@pytest.mark.parametrize(("H", "I"), [(400, 208), (2048, 512), (16, 16), (272, 144), (896, 1408)])
@pytest.mark.parametrize("bias", [None, FP32])
def test_gemm1_of_fp8_is_right_at_every_height_and_writes_nothing_else(format, block_m, H, I, bias) -> None:
    """Experts with no rows too, and widths that are no multiple of an item's or a step's."""
    Gemm1(HEIGHTS, 77, H, I, format, block_m, bias=bias, dtype=random.choice([BF16, FP16])).check()


@pytest.mark.parametrize("block_m", [64, 128])
def test_gemm1_of_fp8_takes_every_kind_of_scale(block_m) -> None:
    for format, scale, whole, I in (
        ("fp8_block", torch.uint8, False, 208),
        ("fp8_block", torch.uint8, True, 192),
        ("fp8_block", None, True, 192),  # one block of scales is of the last gate rows and the first up rows
        ("fp8_block", None, True, 320),
        ("fp8_channel", BF16, False, 208),
    ):
        Gemm1(HEIGHTS, 77, 400, I, format, block_m, scale=scale, whole=whole).check()


@pytest.mark.parametrize(("format", "block_m"), GEMM1_KINDS)
def test_gemm1_of_fp8_has_every_activation_and_order(format, block_m) -> None:
    for activation, clamp, after in itertools.product(
        ("silu", "gelu", "gelu_tanh", "swiglu_oai"), (None, 0.7), (False, True)
    ):
        config = MoEConfig(
            top_k=2, activation=activation, clamp_routed=clamp, clamp_after_activation=after and clamp is not None,
            w13_order=random.choice(["gate_up", "up_gate"]),
        )  # fmt: skip
        Gemm1(
            (0, 65, 130, 0, 300), 10, 272, 144, format, block_m, config=config, bias=random.choice([None, BF16])
        ).check()


@pytest.mark.parametrize("heights", [(0, 2), (2, 0), (0, 0, 0, 5000), (1,) * 300, (129,) * 200, (64, 0) * 150, (0,)])
@pytest.mark.parametrize(("format", "block_m"), GEMM1_KINDS[:3])
def test_gemm1_of_fp8_is_right_for_few_and_for_many_blocks(heights, format, block_m) -> None:
    """Fewer items than programs, or more; of one expert, or of many."""
    Gemm1(heights, 40, 400, 208, format, block_m).check()


@pytest.mark.parametrize(("format", "block_m"), GEMM1_KINDS)
@pytest.mark.parametrize(("H", "S"), [(400, 208), (2048, 512), (16, 16), (272, 144)])
def test_the_shared_experts_gemm1_of_fp8_is_right_too(format, block_m, H, S) -> None:
    """Its rows lie gate first, whatever the routed experts' order, and have a clamp of their own."""
    config = MoEConfig(top_k=1, w13_order=random.choice(["gate_up", "up_gate", "interleaved"]), clamp_shared=0.7)
    q, coded, w13 = fp8_weight(torch.randn(2 * S, H, device="cuda") / H**0.5, format, halves=2)
    assert gemm1_persistent.takes(q, block_m, config, coded, shared=True)
    for T in (1, 63, 64, 65, 127, 128, 129, 1000, 20_000):
        x = torch.randn(T, H, device="cuda").to(BF16)
        codes, scales, numbers = codes_of(x, format, of_h=False)
        around = torch.full((T + 300, S), float("nan"), dtype=BF16, device="cuda")
        h, outs = around[128 : 128 + T], []
        for persistent in (True, True, False):
            h.fill_(float("nan"))
            kernels.gemm1(
                x, config=config, tile=gemm1_tile(block_m, persistent=persistent), shared_w13=q, shared_coded=coded,
                h_shared_TS=h, x_codes_TH=codes, x_scales=scales,
            )  # fmt: skip
            outs.append(h.clone())
        expected, bound = activated(
            numbers @ w13.T, numbers.abs() @ w13.abs().T, None, config, config.clamp_shared, "gate_up", BF16
        )
        assert ((outs[0].double() - expected).abs() <= bound).all(), T
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert around[:128].isnan().all()
        assert around[128 + T :].isnan().all()


FORMS = (("int4", 32), ("int4", 64), ("int4", 128), ("mxfp4", 32), ("nvfp4", 16))
"""Formats of four bits, and columns of a scale."""
FOUR_BIT_TILES = {
    (tile.block_m, name): tile
    for name in ("gemm1", "gemm2")
    for tile in candidates._FEW_ROWS["4bit", name] + candidates._MANY_ROWS["4bit", name]
    if tile.persistent
}
"""Candidates of `tune`, by rows of a block."""


def four_bit_tiles(block_m: int, *, persistent: bool = True) -> dict[str, tuning.Tile]:
    return {n: FOUR_BIT_TILES[block_m, n]._replace(persistent=persistent) for n in ("gemm1", "gemm2")}


class FourBits(Routed):
    """Both products of four-bit weights alone, each of rows of its own; h and y lie inside memory full of NaN."""

    def __init__(
        self, heights: Sequence[int], without: int, H: int, I: int, form: tuple[str, int], block_m: int, *,
        config: MoEConfig | None = None, dtype: torch.dtype = BF16, bias: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(heights, without, block_m)
        self.config = dataclasses.replace(config or MoEConfig(top_k=2), top_k=2)
        self.tiles, self.form, self.dtype = four_bit_tiles(block_m), form, dtype
        self.x = torch.randn(self.T, H + 8, device="cuda").to(dtype)[:, :H]
        self.a = torch.randn(self.N, I, device="cuda").to(dtype)
        self.a[self.end :] = float("nan")
        self.w13, self.coded13, self.w13_numbers = self._weight(2 * I, H, 2)
        self.w2, self.coded2, self.w2_numbers = self._weight(H, I, 1)
        assert coded_persistent.takes(self.w13, dtype, block_m, self.coded13, self.config)
        assert coded_persistent.takes(self.w2, dtype, block_m, self.coded2)
        self.w13_bias = torch.randn(self.E, 2 * I, device="cuda").to(bias) if bias else None
        self.w2_bias = torch.randn(self.E, H, device="cuda").to(bias) if bias else None
        self.around = {width: torch.full((self.N + 300, width), float("nan"), dtype=dtype, device="cuda")
                       for width in (I, H)}  # fmt: skip
        self.h, self.y = (self.around[width][128 : 128 + self.N] for width in (I, H))

    def _weight(self, R: int, C: int, halves: int) -> tuple[Tensor, kernels.Coded, Tensor]:
        """q, what kernels are told of it, and the numbers that they multiply, which are rounded once each."""
        (name, group), interleaved = self.form, halves == 2 and self.config.w13_order == "interleaved"
        w = (torch.randn(self.E, R, C, device="cuda") / C**0.5).to(self.dtype)
        options = {"group": group} if name == "int4" else {}
        parts = formats.quantize(name, w, halves=halves, interleaved=interleaved, **options)
        if name == "int4":
            parts = parts._replace(scale=parts.scale.to(self.dtype))
        numbers = formats.dequantize(name, parts, C, halves=halves, interleaved=interleaved)
        if name == "int4":  # those of the others are exact, and their scales of a half come after the sum
            numbers = numbers.to(self.dtype).double()
        parts = formats.Quantised(*(None if t is None else kernels.as_bytes(t) for t in parts))
        if name == "nvfp4":
            assert parts.global_scale is not None
            assert parts.global_scale.numel() == halves * self.E
        parts.scale.view(torch.uint8)[self.empty] = 0xFF  # NaN in each dtype
        coded = kernels.coded(name, parts, R, C, halves, interleaved)
        assert coded.form is not None
        assert coded.form[1] == group or C <= group
        return parts.q, coded, numbers

    def _written(self, out: Tensor, taken: Sequence[int]) -> Tensor:
        """The experts' rows of h or y; nothing else is written, and so many items were taken of each product."""
        assert self.rows.taken.tolist() == list(taken)
        around = self.around[out.shape[1]]
        assert out[self.end :].isnan().all()
        assert around[:128].isnan().all()
        assert around[128 + self.N :].isnan().all()
        return out[: self.end].clone()

    def gemm1(self, *, persistent: bool = True) -> Tensor:
        self.around[self.h.shape[1]].fill_(float("nan"))
        self.rows.taken.zero_()
        ordered = None
        if persistent:
            ordered = torch.empty(self.x.shape, dtype=self.dtype, device="cuda")
            kernels.reorder_columns(self.x, ordered)
        kernels.gemm1(
            self.x, config=self.config, tile=self.tiles["gemm1"]._replace(persistent=persistent), w13=self.w13,
            w13_bias=self.w13_bias, blocks=self.rows.blocks_3B, sorted_slot_N=self.rows.sorted_slot_N, h_NI=self.h,
            taken=self.rows.taken, coded=self.coded13, x_ordered=ordered,
        )  # fmt: skip
        items = self.blocks() * -(-self.h.shape[1] // 128)
        return self._written(self.h, (0, items * persistent))  # each item is followed by a look for another one

    def gemm2(self, *, persistent: bool = True) -> Tensor:
        self.around[self.y.shape[1]].fill_(float("nan"))
        self.rows.taken.zero_()
        a = self.a.clone()
        if persistent:
            kernels.reorder_columns(a, a, self.rows.offsets)
            assert a[self.end :].isnan().all()
        kernels.gemm2(
            config=self.config, tile=self.tiles["gemm2"]._replace(persistent=persistent), w2=self.w2,
            w2_bias=self.w2_bias, blocks=self.rows.blocks_3B, h_NI=a, y_NH=self.y, offsets=self.rows.offsets,
            taken=self.rows.taken, coded=self.coded2, h_is_ordered=persistent,
        )  # fmt: skip
        items = self.blocks() * -(-self.y.shape[1] // 256)
        return self._written(self.y, (items * persistent, 0))

    def check_gemm1(self) -> None:
        h = self.gemm1()
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
            x, w13 = self.x[self.tokens[first:last]].double(), self.w13_numbers[e]
            expected, bound = activated(
                x @ w13.T, x.abs() @ w13.abs().T, None if self.w13_bias is None else self.w13_bias[e], self.config,
                self.config.clamp_routed, self.config.w13_order, self.dtype, off=2.0**-16,
            )  # fmt: skip
            assert ((h[first:last].double() - expected).abs() <= bound).all(), e
        if self.w13_bias is None or self.coded13.global_scale is None:  # else their product and sum may be one rounding
            assert torch.equal(self.gemm1(persistent=False), h)
        for _ in range(3):
            assert torch.equal(self.gemm1(), h)

    def check_gemm2(self) -> None:
        y, rounding = self.gemm2(), {BF16: 2.0**-8, FP16: 2.0**-11}[self.dtype]
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
            a, w2 = self.a[first:last].double(), self.w2_numbers[e]
            expected = a @ w2.T
            if self.w2_bias is not None:
                expected += self.w2_bias[e].double()
            bound = 1.01 * rounding * expected.abs() + 2.0**-16 * (a.abs() @ w2.abs().T) + 1e-6
            assert ((y[first:last].double() - expected).abs() <= bound).all(), e
        if self.w2_bias is None or self.coded2.global_scale is None:
            assert torch.equal(self.gemm2(persistent=False), y)
        for _ in range(3):
            assert torch.equal(self.gemm2(), y)


WIDTHS = {
    32: ((416, 224), (2880, 160), (288, 1056), (2048, 512), (96, 2080)),
    64: ((448, 192), (2880, 320), (64, 1088), (2048, 512)),
    128: ((384, 640), (2944, 128), (128, 896), (2048, 512)),
}
"""H and I by the columns of a group, at least 32: whole groups, most no whole steps, nor whole 64."""


def widths_of(group: int) -> tuple[tuple[int, int], ...]:
    return WIDTHS[max(group, 32)]


def every_form() -> list[tuple[int, tuple[str, int], int, int]]:
    """Each height and form, with widths in turn, and a step that is the only one and not whole."""
    found = []
    for (i, block_m), (name, group) in itertools.product(enumerate((16, 32, 64, 128)), FORMS):
        sizes = widths_of(group)
        found.append((block_m, (name, group), *sizes[(i + len(found)) % len(sizes)]))
    return [*found, *((block_m, ("int4", 32), 32, 96) for block_m in (16, 32, 64, 128))]


@pytest.mark.parametrize(("block_m", "form", "H", "I"), every_form())
def test_products_of_four_bits_are_right_at_every_height_and_write_nothing_else(block_m, form, H, I) -> None:
    """And have the bits of the ordinary ones. Experts with no rows too."""
    dtype = BF16 if form[0] == "mxfp4" else random.choice([BF16, FP16])
    one = FourBits(LOW_HEIGHTS, 77, H, I, form, block_m, dtype=dtype, bias=random.choice([None, dtype, FP32]))
    one.check_gemm1()
    one.check_gemm2()


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("activation", "order"),
    [
        ("silu", "interleaved"),
        ("silu", "up_gate"),
        ("gelu", "gate_up"),
        ("gelu_tanh", "up_gate"),
        ("swiglu_oai", "gate_up"),
        ("swiglu_oai", "interleaved"),
    ],
)
def test_gemm1_of_four_bits_has_every_activation_and_order(block_m, activation, order) -> None:
    clamp = random.choice([None, 0.7])
    config = MoEConfig(
        top_k=2, activation=activation, w13_order=order, clamp_routed=clamp,
        clamp_after_activation=clamp is not None and random.random() < 0.5,
    )  # fmt: skip
    form = random.choice(FORMS)
    H, I = widths_of(form[1])[0]
    FourBits(
        (0, 17, 65, 130, 0, 300), 10, H, I, form, block_m, config=config, bias=random.choice([None, BF16, FP32])
    ).check_gemm1()


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_gate_and_up_rows_have_global_scales_of_their_own(order) -> None:
    """Which differ by a factor of some hundreds here."""
    one = FourBits((0, 17, 130), 10, 288, 160, ("nvfp4", 16), 64, config=MoEConfig(top_k=2, w13_order=order))
    scales = one.coded13.global_scale
    assert scales is not None
    factors = torch.tensor([1.0, 1 / 300], device="cuda")
    scales.view(one.E, 2).mul_(factors)
    of_rows = factors[formats.half_of_row(320, 2, order == "interleaved").cuda()]
    one.w13_numbers *= of_rows.double()[:, None]
    one.check_gemm1()


@pytest.mark.parametrize("heights", [(0, 2), (2, 0), (0, 0, 0, 5000), (1,) * 300, (129,) * 200, (64, 0) * 150, (0,)])
@pytest.mark.parametrize(("form", "block_m"), [(("int4", 32), 16), (("nvfp4", 16), 32), (("mxfp4", 32), 128)])
def test_products_of_four_bits_are_right_for_few_and_for_many_blocks(heights, form, block_m) -> None:
    """Fewer items than programs, or more; of one expert, or of many."""
    one = FourBits(heights, 40, 416, 224, form, block_m)
    one.check_gemm1()
    one.check_gemm2()


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_runs_of_four_bits_give_the_same_bits_whichever_program_takes_what(block_m) -> None:
    one = FourBits(LOW_HEIGHTS, 20, 384, 640, ("int4", 128), block_m)
    h, y, side = one.gemm1(), one.gemm2(), torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(side):
            busy @ busy
        assert torch.equal(one.gemm1(), h)
        assert torch.equal(one.gemm2(), y)
    torch.cuda.synchronize()


@pytest.mark.parametrize("T", [1, 3, 130, 4099])
@pytest.mark.parametrize("H", [32, 96, 1056, 7168])
def test_columns_come_into_the_order_of_codes(T, H) -> None:
    """Of each 32: the code, then the word, then the word's half. Each program reads all that it overwrites first."""
    source = torch.tensor([8 * word + 4 * half + code for code in range(4) for word in range(4) for half in range(2)])
    whole = (torch.arange(0, H, 32)[:, None] + source).flatten().cuda()
    x = torch.randint(-(2**15), 2**15, (T, H + 24), dtype=torch.int16, device="cuda")[:, :H]
    out = torch.empty(T, H, dtype=BF16, device="cuda")
    kernels.reorder_columns(x.view(BF16), out)
    assert torch.equal(out.view(torch.int16), x[:, whole])
    for rows in {0, 1, T // 2, T}:
        h = x.clone(memory_format=torch.contiguous_format)
        offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device="cuda")
        kernels.reorder_columns(h.view(BF16), h.view(BF16), offsets)
        assert torch.equal(h[:rows], x[:rows, whole])
        assert torch.equal(h[rows:], x[rows:])


def test_runs_of_gemm1_give_the_same_bits_whichever_program_takes_what() -> None:
    one, busy = Gemm1(HEIGHTS, 20, 400, 208, "fp8_block", 64), torch.randn(2048, 2048, device="cuda")
    first, side = one.run(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            busy @ busy
        assert torch.equal(one.run(), first)
    torch.cuda.synchronize()


@pytest.mark.parametrize("bias", [None, FP32])
def test_runs_of_gemm2_give_the_same_bits_whichever_program_takes_what(bias) -> None:
    one, busy = Gemm2(HEIGHTS, 20, 400, 208, BF16, bias), torch.randn(2048, 2048, device="cuda")
    first, side = one.run(zero_tail=True).clone(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            busy @ busy
        assert torch.equal(one.run(zero_tail=True)[128:-172], first[128:-172])
    torch.cuda.synchronize()


def prefill(*, dtype: torch.dtype = BF16, H: int = 400, I: int = 208, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """A layer with an expert of each of the heights."""
    ids = ids_of(HEIGHTS, 77)
    T, E = len(ids), len(HEIGHTS)
    x, args = make_layer(
        T, way="topk_ids", config=MoEConfig(top_k=1), dtype=dtype, device="cuda", H=H, E=E, I=I, S=2 * I, **options
    )
    args["topk_ids"] = ids
    assert tuning.layer_tiles("16bit", T, H, E, 1, 2 * I).gemm2.persistent
    return x, args


def worst_row(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double(), expected.double()
    return float(((out - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)).max())


@pytest.mark.parametrize("schedule", ["serial", "dual", "dual_shared_main", "fused"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("expert_bias", [False, True])
def test_every_row_of_a_layer_is_the_references_at_every_height(schedule, dtype, expert_bias) -> None:
    for H, I in ((400, 208), (256, 128), (528, 48)):
        x, args = prefill(dtype=dtype, H=H, I=I, expert_bias=expert_bias, shared_gate=True)
        out = dual_stream_moe(x, **args, schedule=schedule)
        assert worst_row(out, reference.moe(x, **args)) <= 2e-2, (H, I)
        for _ in range(5):
            assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), out), (H, I)


@pytest.mark.parametrize(("format", "block_m"), [("fp8_block", 64), ("fp8_block", 128), ("fp8_channel", 64)])
def test_a_layer_of_fp8_has_persistent_products_where_its_tiles_say_so(format, block_m) -> None:
    """In each schedule, and in replays, each of which takes its own items."""
    outs: dict[tuple[str, bool], Tensor] = {}
    x, args = prefill(expert_bias=True)
    args = quantized(args, format, format)
    expected, other = reference.moe(x, **args), torch.randn_like(x)
    for persistent in (False, True):
        first, second = gemm1_tile(block_m, persistent=persistent), fp8_tile(block_m, persistent=persistent)
        with with_tiles(gemm1=first, gemm2=second, shared_gemm1=first, shared_gemm2=second):
            for schedule in ("serial", "dual", "dual_shared_main", "fused"):
                outs[schedule, persistent] = out = dual_stream_moe(x, **args, schedule=schedule)
                assert worst_row(out, expected) <= 5e-2, schedule
                assert schedule == "fused" or torch.equal(out, outs["serial", persistent]), schedule
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                dual_stream_moe(x, **args, schedule="serial")
                torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            for product in ("_persistent_gemm1", "_persistent_gemm2"):
                assert sum(product in name for name in names) == 2 * persistent
            for schedule in ("serial", "dual", "dual_shared_main"):
                source, want = x.clone(), dual_stream_moe(other, **args, schedule=schedule)
                graph, out = capture(lambda s=schedule, x=source: dual_stream_moe(x, **args, schedule=s))
                for given, its in ((x, outs[schedule, persistent]), (other, want)) * 3:
                    source.copy_(given)
                    graph.replay()
                    assert torch.equal(out, its), schedule
    # The same codes of h, so that only roundings of y differ.
    assert worst_row(outs["serial", True], outs["serial", False]) <= 1e-2


@pytest.mark.parametrize(("format", "block_m"), [("fp8_block", 64), ("fp8_block", 128), ("fp8_channel", 64)])
def test_a_layer_of_fp8_with_a_part_of_the_experts_has_persistent_products(format, block_m) -> None:
    """Slots of the others have no rows, and no program reads what they have left."""
    x, args = make_layer(
        900, way="router_weight", config=MoEConfig(top_k=4), dtype=BF16, device="cuda", H=400, E=12, I=208, S=416,
        E_global=40,
    )  # fmt: skip
    args = quantized(args, format, format)
    expected, outs = reference.moe(x, **args), []
    for persistent in (False, True):
        first, second = gemm1_tile(block_m, persistent=persistent), fp8_tile(block_m, persistent=persistent)
        with with_tiles(gemm1=first, gemm2=second, shared_gemm1=first, shared_gemm2=second):
            outs.append(dual_stream_moe(x, **args))
        assert worst_row(outs[-1], expected) <= 5e-2
    assert worst_row(outs[1], outs[0]) <= 1e-2


LAYER_FORMS = [("int4", 32, 16), ("int4", 128, 64), ("int4", 64, 128), ("mxfp4", 32, 32), ("nvfp4", 16, 64)]
"""Format, columns of a scale, and rows of a block."""


def four_bit_layer(format: str, group: int, shared: str | None, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    H, I = widths_of(group)[0]
    x, args = prefill(H=H, I=I, **options)
    return x, quantized(args, format, shared, **({"group": group} if format == "int4" else {}))


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_a_layer_of_four_bits_has_persistent_products_where_its_tiles_say_so(format, group, block_m) -> None:
    """In each schedule, with the ordinary products' bits, and in replays, each of which takes its own items."""
    # Ordinary products may round a tensor's scale and a bias at once, or not.
    x, args = four_bit_layer(format, group, format, expert_bias=format != "nvfp4")
    expected, other = reference.moe(x, **args), torch.randn_like(x)
    outs: dict[str, Tensor] = {}
    for persistent in (False, True):
        with with_tiles(**four_bit_tiles(block_m, persistent=persistent), one_launch=False):
            for schedule in ("serial", "dual", "dual_shared_main", "fused"):
                out = dual_stream_moe(x, **args, schedule=schedule)
                assert worst_row(out, expected) <= 2e-2, schedule
                assert torch.equal(out, outs.setdefault("fused" if schedule == "fused" else "", out)), schedule
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                dual_stream_moe(x, **args, schedule="serial")
                torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            for kernel in ("_persistent_coded", "_reorder"):  # of x, and of h
                assert sum(kernel in name for name in names) == 2 * persistent
            for schedule in ("serial", "dual", "dual_shared_main"):
                source, want = x.clone(), dual_stream_moe(other, **args, schedule=schedule)
                graph, out = capture(lambda s=schedule, x=source: dual_stream_moe(x, **args, schedule=s))
                for given, its in ((x, outs[""]), (other, want)) * 3:
                    source.copy_(given)
                    graph.replay()
                    assert torch.equal(out, its), schedule


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_replays_of_four_bits_with_other_routing_take_their_own_items(format, group, block_m) -> None:
    """The counts of the items that are taken begin at zero in each replay."""
    del group  # of a block of `Block`, the smallest
    block = Block(sizes={"H": 288, "E": 16, "I": 160, "S": 320}, formats=(format, None))
    with with_tiles(**four_bit_tiles(block_m), one_launch=False):
        for T, schedule in ((200, "dual"), (1500, "dual_shared_main")):
            captured = Captured(block, T, schedule=schedule)
            for _ in range(10):
                assert captured.is_right()


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_a_layer_of_four_bits_with_a_part_of_the_experts_has_persistent_products(format, group, block_m) -> None:
    """Slots of the others have no rows, and no program reads what they have left."""
    H, I = widths_of(group)[0]
    x, args = make_layer(
        900, way="router_weight", config=MoEConfig(top_k=4, w13_order="interleaved"), dtype=BF16, device="cuda", H=H,
        E=12, I=I, S=2 * I, E_global=40,
    )  # fmt: skip
    args = quantized(args, format, None, **({"group": group} if format == "int4" else {}))
    expected, outs = reference.moe(x, **args), []
    for persistent in (False, True):
        with with_tiles(**four_bit_tiles(block_m, persistent=persistent), one_launch=False):
            outs.append(dual_stream_moe(x, **args))
        assert worst_row(outs[-1], expected) <= 2e-2
    assert torch.equal(*outs)


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_an_unfinalized_layer_of_four_bits_has_zeros_after_the_experts_rows(format, group, block_m) -> None:
    x, args = four_bit_layer(format, group, None, expert_bias=True)
    with with_tiles(**four_bit_tiles(block_m), one_launch=False):
        for schedule in ("serial", "dual"):
            out = dual_stream_moe(x, **args, schedule=schedule)
            torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)  # the memory that y may get
            pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
            tail = pieces.y[sum(HEIGHTS) :]
            assert len(tail) == 77
            assert torch.equal(tail, torch.zeros_like(tail))
            assert torch.equal(finalize(pieces, config=args["config"]), out)


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_padding_and_longer_rows_of_a_layer_of_four_bits(format, group, block_m) -> None:
    x, args = four_bit_layer(format, group, None)
    with with_tiles(**four_bit_tiles(block_m), one_launch=False):
        for valid in (0, 1, 1500, len(x)):
            count = torch.tensor([valid], dtype=torch.int32, device="cuda")
            expected = reference.moe(x, **args, num_valid_tokens=count)
            given = torch.full((len(x), x.shape[1] + 5), float("nan"), dtype=x.dtype, device="cuda")
            given = given[:, 5:]  # off 16 bytes
            given[:valid] = x[:valid]
            out = dual_stream_moe(given, **args, num_valid_tokens=count)
            assert worst_row(out, expected) <= 2e-2, valid
            assert torch.equal(out[valid:], torch.zeros_like(out[valid:]))


@pytest.mark.parametrize(("H", "I", "group"), [(416, 224, 32), (448, 192, 64), (416, 224, 64), (416, 224, 128)])
def test_columns_that_are_not_there_are_no_infinite_numbers_for_many_rows(H, I, group) -> None:
    """A code of 0 there would stand for -8 scales, beyond the largest float16, and times 0 for NaN."""
    x, args = prefill(dtype=FP16, H=H, I=I)
    args = quantized(args, "int4", None, group=group)
    for name in ("w13", "w2"):
        args[f"{name}_scale"] = torch.full_like(args[f"{name}_scale"], 9000.0, dtype=FP16)
        args[name] = torch.full_like(args[name], 0x88)  # zeros
    for block_m in (16, 32, 64, 128):
        with with_tiles(**four_bit_tiles(block_m), one_launch=False):
            assert dual_stream_moe(x, **args).isfinite().all(), block_m


def test_only_one_product_of_four_bits_may_be_persistent() -> None:
    """The other one multiplies its rows as they lie."""
    for options, which in (
        ({"H": 416, "I": 208}, "gemm1"),
        ({"H": 400, "I": 224}, "gemm2"),
    ):
        x, args = prefill(**options)
        args, outs = quantized(args, "int4", None), []
        for persistent in (False, True):
            with with_tiles(**four_bit_tiles(64, persistent=persistent), one_launch=False):
                outs.append(dual_stream_moe(x, **args))
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    dual_stream_moe(x, **args)
                    torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            assert sum("_persistent_coded" in name for name in names) == persistent, which
            assert sum("_reorder_h" in name for name in names) == (persistent and which == "gemm2")
        assert torch.equal(*outs)
        assert worst_row(outs[0], reference.moe(x, **args)) <= 2e-2, which


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_on_the_input_of_many_rows(dtype) -> None:
    """The matrix unit takes such rows from registers, which the next step's must not overwrite."""
    config = MoEConfig(top_k=1, apply_router_weight_on_input=True)
    for H, I in ((400, 208), (1024, 128)):
        x, args = prefill(dtype=dtype, H=H, I=I)
        args["config"] = config
        out = dual_stream_moe(x, **args)
        assert worst_row(out, reference.moe(x, **args)) <= 2e-2, (H, I)
        for _ in range(5):
            assert torch.equal(dual_stream_moe(x, **args), out), (H, I)


@pytest.mark.parametrize("schedule", ["serial", "dual", "fused"])
def test_an_unfinalized_layer_has_zeros_after_the_experts_rows_and_the_same_bits(schedule) -> None:
    x, args = prefill(expert_bias=True)
    out = dual_stream_moe(x, **args, schedule=schedule)
    torch.full((len(x), 400), float("nan"), dtype=x.dtype, device=x.device)  # the memory that y may get
    pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
    tail = pieces.y[sum(HEIGHTS) :]
    assert torch.equal(tail, torch.zeros_like(tail))
    assert torch.equal(finalize(pieces, config=args["config"]), out)


def test_padding_is_nobodys_row() -> None:
    x, args = prefill()
    for valid in (0, 1, 1500, len(x)):
        count = torch.tensor([valid], dtype=torch.int32, device="cuda")
        expected = reference.moe(x, **args, num_valid_tokens=count)
        given = x.clone()
        given[valid:] = float("nan")
        out = dual_stream_moe(given, **args, num_valid_tokens=count)
        assert worst_row(out, expected) <= 2e-2, valid
        assert torch.equal(out[valid:], torch.zeros_like(out[valid:]))


@pytest.mark.parametrize("T", [200, 1500])
def test_replays_with_other_routing_take_their_own_items(block, T) -> None:
    """The count of the items that are taken begins at zero in each replay."""
    assert tuning.layer_tiles("16bit", T, SIZES["H"], SIZES["E"], 4, SIZES["S"]).gemm2.persistent
    captured = Captured(block, T)
    for _ in range(10):
        assert captured.is_right()
