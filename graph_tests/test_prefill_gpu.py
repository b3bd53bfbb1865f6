"""Many rows on a GPU: the persistent products at every height of an expert's rows, alone and in a layer."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu import SIZES, Captured, capture, needs_gpu, with_tiles
from layers import make_layer, quantized
from many_rows import BF16, FP16, FP32, HEIGHTS, Routed, activated, ids_of, prefill, worst_row
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
from dsmoe_op.kernels import gemm1_persistent, gemm2_persistent

pytestmark = [needs_gpu, pytest.mark.usefixtures("sm_90")]


def persistent_tile() -> tuning.Tile:
    (tile,) = {tiles.gemm2 for tiles in tuning.layer_variants("16bit") if tiles.gemm2.persistent}
    return tile


def fp8_tile(block_m: int, *, persistent: bool = True) -> tuning.Tile:
    """A candidate of `tune` for GEMM 2."""
    return tuning.Tile(block_m, 8192 // block_m, 128, 8, 3, swap=True, persistent=persistent, least_m=16)


def gemm1_tile(block_m: int, *, persistent: bool = True) -> tuning.Tile:
    """The same for GEMM 1."""
    return tuning.Tile(block_m, 4096 // block_m, 128, 8, 3, swap=True, persistent=persistent, least_m=16)


def codes_of(h: Tensor, format: str, *num_rows: Tensor, of_h: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the numbers that these are, in float64."""
    codes = torch.empty(h.shape, dtype=formats.E4M3, device="cuda")
    scales = torch.empty(len(h), *(() if format == "fp8_channel" else (-(-h.shape[1] // 128),)), device="cuda")
    kernels.quantize_rows(h, codes, scales, *num_rows, of_h=of_h)
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
        self.what = f"{format=}, {dtype=}, {bias=}"
        if format is not None:
            self.tile = fp8_tile(block_m)
        N, E = len(ids), len(heights)
        counters, B = ints(kernels.num_counters(N, E)), kernels.num_blocks(N, E, self.tile.block_m)
        self.rows = kernels.Rows(
            ints(1), ints(N), ints(N, 1), ints(3, B), self.tile.block_m, self.tile.tail, counters, ints(2), ints(1)
        )  # fmt: skip
        kernels.zero_counters(self.rows, num_experts=E)
        kernels.order_rows(ids, None, None, None, num_experts=E, num_zero_experts=0, rows=self.rows)
        self.end, self.ends = sum(heights), [0, *itertools.accumulate(heights)]
        self.h = torch.randn(N, I, device="cuda").to(dtype)
        self.h[self.end :] = float("nan")
        self.w2 = (torch.randn(E, H, I, device="cuda") / I**0.5).to(dtype)
        empty = [e for e, rows in enumerate(heights) if not rows]
        self.coded: dict[str, Any] = {}
        self.numbers = self.h, self.w2
        if format is not None:
            codes, scales, h = codes_of(self.h, format, self.rows.num_rows)
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
            h_NI=self.h, y_NH=self.y, num_rows=self.rows.num_rows, taken=self.rows.taken, zero_tail=zero_tail,
            **self.coded,
        )  # fmt: skip
        return self.around

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64, of the experts' rows: y, and the sums of its products' magnitudes."""
        y = torch.empty(self.end, self.y.shape[1], dtype=torch.float64, device="cuda")
        sizes = torch.empty_like(y)
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
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
        assert ((self.y[: self.end].double() - expected).abs() <= bound).all(), self.what
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
        self.what = f"{format=}, {dtype=}, {bias=}, {self.config}"
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
            assert ((h[first:last].double() - expected).abs() <= bound).all(), (e, self.what)
        self.check_bits(self.run, h, self.coded, self.bias, self.config)


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
