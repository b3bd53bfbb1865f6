"""Four-bit weights on a GPU: the products of few and of many rows at every height, alone and in a layer."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu import Block, Captured, capture, needs_gpu, with_tiles
from layers import make_layer, quantized
from many_rows import BF16, FP16, FP32, HEIGHTS, Routed, activated, prefill, worst_row
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
from dsmoe_op.kernels import coded_few, coded_persistent

pytestmark = [needs_gpu, pytest.mark.usefixtures("sm_90")]

LOW_HEIGHTS = (0, 1, 15, 16, 17, 0, 31, 32, 33, 47, 48, 49, 63, 64, 65, 0, 0, 127, 128, 129, 255, 256, 257, 300, 0)
"""Rows of each expert, around the blocks of these products."""
FORMS = (("int4", 32), ("int4", 64), ("int4", 128), ("mxfp4", 32), ("nvfp4", 16))
"""Formats of four bits, and columns of a scale."""
FOUR_BIT_TILES = {
    (tile.block_m, name): tile
    for name in ("gemm1", "gemm2")
    for tile in candidates._FEW_ROWS["4bit", name] + candidates._MANY_ROWS["4bit", name]
    if tile.persistent
}
"""Candidates of `tune`, by rows of a block."""
FEW = coded_few.BLOCK_M
"""Rows of blocks whose products are of programs of one warp: of rows as they lie, and with sums of their own."""


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
        self.what = f"{form=}, {dtype=}, {bias=}, {self.config}"
        self.x = torch.randn(self.T, H + 8, device="cuda").to(dtype)[:, :H]
        self.a = torch.randn(self.N, I, device="cuda").to(dtype)
        self.a[self.end :] = float("nan")
        self.w13, self.coded13, self.w13_numbers = self._weight(2 * I, H, 2)
        self.w2, self.coded2, self.w2_numbers = self._weight(H, I, 1)
        self.few = block_m == FEW
        module = coded_few if self.few else coded_persistent
        assert module.takes(self.w13, dtype, block_m, self.coded13, self.config)
        assert module.takes(self.w2, dtype, block_m, self.coded2)
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
        ordered, by_items = None, persistent and not self.few
        if by_items:
            ordered = torch.empty(self.x.shape, dtype=self.dtype, device="cuda")
            kernels.reorder_columns(self.x, ordered)
        kernels.gemm1(
            self.x, config=self.config, tile=self.tiles["gemm1"]._replace(persistent=persistent), w13=self.w13,
            w13_bias=self.w13_bias, blocks=self.rows.blocks_3B, sorted_slot_N=self.rows.sorted_slot_N, h_NI=self.h,
            taken=self.rows.taken, coded=self.coded13, x_ordered=ordered,
        )  # fmt: skip
        items = self.blocks() * -(-self.h.shape[1] // 128)
        return self._written(self.h, (0, items * by_items))  # each item is followed by a look for another one

    def gemm2(self, *, persistent: bool = True) -> Tensor:
        self.around[self.y.shape[1]].fill_(float("nan"))
        self.rows.taken.zero_()
        a, by_items = self.a.clone(), persistent and not self.few
        if by_items:
            kernels.reorder_columns(a, a, self.rows.num_rows)
            assert a[self.end :].isnan().all()
        kernels.gemm2(
            config=self.config, tile=self.tiles["gemm2"]._replace(persistent=persistent), w2=self.w2,
            w2_bias=self.w2_bias, blocks=self.rows.blocks_3B, h_NI=a, y_NH=self.y, num_rows=self.rows.num_rows,
            taken=self.rows.taken, coded=self.coded2, h_is_ordered=by_items,
        )  # fmt: skip
        items = self.blocks() * -(-self.y.shape[1] // 256)
        return self._written(self.y, (items * by_items, 0))

    def check_gemm1(self) -> None:
        h = self.gemm1()
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
            x, w13 = self.x[self.tokens[first:last]].double(), self.w13_numbers[e]
            expected, bound = activated(
                x @ w13.T, x.abs() @ w13.abs().T, None if self.w13_bias is None else self.w13_bias[e], self.config,
                self.config.clamp_routed, self.config.w13_order, self.dtype, off=2.0**-16,
            )  # fmt: skip
            assert ((h[first:last].double() - expected).abs() <= bound).all(), (e, self.what)
        self.check_bits(self.gemm1, h, self.coded13, self.w13_bias, self.config, ordinary=not self.few)

    def check_gemm2(self) -> None:
        y, rounding = self.gemm2(), {BF16: 2.0**-8, FP16: 2.0**-11}[self.dtype]
        for e, (first, last) in enumerate(itertools.pairwise(self.ends)):
            a, w2 = self.a[first:last].double(), self.w2_numbers[e]
            expected = a @ w2.T
            if self.w2_bias is not None:
                expected += self.w2_bias[e].double()
            bound = 1.01 * rounding * expected.abs() + 2.0**-16 * (a.abs() @ w2.abs().T) + 1e-6
            assert ((y[first:last].double() - expected).abs() <= bound).all(), (e, self.what)
        self.check_bits(self.gemm2, y, self.coded2, self.w2_bias, ordinary=not self.few)


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
    """And have the bits of the ordinary ones where rows are many. Experts with no rows too."""
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
        num_rows = torch.tensor([rows], dtype=torch.int32, device="cuda")
        kernels.reorder_columns(h.view(BF16), h.view(BF16), num_rows)
        assert torch.equal(h[:rows], x[:rows, whole])
        assert torch.equal(h[rows:], x[rows:])


LAYER_FORMS = [("int4", 32, 16), ("int4", 128, 64), ("int4", 64, 128), ("mxfp4", 32, 32), ("nvfp4", 16, 64)]
"""Format, columns of a scale, and rows of a block."""


def four_bit_layer(format: str, group: int, shared: str | None, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    H, I = widths_of(group)[0]
    x, args = prefill(H=H, I=I, **options)
    return x, quantized(args, format, shared, **({"group": group} if format == "int4" else {}))


@pytest.mark.parametrize(("format", "group", "block_m"), LAYER_FORMS)
def test_a_layer_of_four_bits_has_its_own_products_where_its_tiles_say_so(format, group, block_m) -> None:
    """In each schedule, for many rows with the ordinary products' bits, and in replays, each with items of its own."""
    # Of nvfp4 a bias would meet the tensor's scale: see `may_round_otherwise`.
    x, args = four_bit_layer(format, group, format, expert_bias=format != "nvfp4")
    expected, other = reference.moe(x, **args), torch.randn_like(x)
    outs: dict[str, Tensor] = {}
    for persistent in (False, True):
        alike = "few rows" if persistent and block_m == FEW else ""
        with with_tiles(**four_bit_tiles(block_m, persistent=persistent), one_launch=False):
            for schedule in ("serial", "dual", "dual_shared_main", "fused"):
                out = dual_stream_moe(x, **args, schedule=schedule)
                assert worst_row(out, expected) <= 2e-2, schedule
                assert torch.equal(out, outs.setdefault("fused" if schedule == "fused" else alike, out)), schedule
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                dual_stream_moe(x, **args, schedule="serial")
                torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            for kernel, few in (
                ("_few_coded", True),
                ("_persistent_coded", False),
                ("_reorder", False),
            ):  # of x, and of h
                assert sum(kernel in name for name in names) == 2 * (persistent and few == (block_m == FEW))
            for schedule in ("serial", "dual", "dual_shared_main"):
                source, want = x.clone(), dual_stream_moe(other, **args, schedule=schedule)
                graph, out = capture(lambda s=schedule, x=source: dual_stream_moe(x, **args, schedule=s))
                for given, its in ((x, outs[alike]), (other, want)) * 3:
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
def test_a_layer_of_four_bits_with_a_part_of_the_experts_has_products_of_its_own(format, group, block_m) -> None:
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
    assert block_m == FEW or torch.equal(*outs)


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


@pytest.mark.parametrize(("block_m", "kernel"), [(FEW, "_few_coded"), (64, "_persistent_coded")])
def test_only_one_product_of_four_bits_may_be_of_its_own_kernel(block_m, kernel) -> None:
    """The other one multiplies its rows as they lie."""
    for options, which in (
        ({"H": 416, "I": 208}, "gemm1"),
        ({"H": 400, "I": 224}, "gemm2"),
    ):
        x, args = prefill(**options)
        args, outs = quantized(args, "int4", None), []
        for persistent in (False, True):
            with with_tiles(**four_bit_tiles(block_m, persistent=persistent), one_launch=False):
                outs.append(dual_stream_moe(x, **args))
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    dual_stream_moe(x, **args)
                    torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            assert sum(kernel in name for name in names) == persistent, which
            assert sum("_reorder_h" in name for name in names) == (persistent and which == "gemm2" and block_m > FEW)
        assert block_m == FEW or torch.equal(*outs)
        for out in outs:
            assert worst_row(out, reference.moe(x, **args)) <= 2e-2, which
