"""Every kernel that can be chosen, compiled for sm_90 without a GPU by the launchers' own warm-up.

Sizes are those of DeepSeek-V3 (or odd ones, where masks matter), on tensors without memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

from sm90 import (  # noqa: E402
    ASIDE,
    BF16,
    FORMS,
    FP16,
    FP32,
    SHARED_MEMORY,
    TOKENS,
    V3,
    Layer,
    check_arrivals,
    check_fp8_steps,
    check_loops,
    check_products,
    check_resources,
    coded_weight,
    compiled,
    instructions,
    least_side,
    matrix_instructions,
    named,
    product_loops,
    products_of_4_bits,
    stack_bytes,
)

from dsmoe_op import formats, kernels, schedule, tuning  # noqa: E402
from dsmoe_op.cli import arguments, candidates, compiling, shapes  # noqa: E402
from dsmoe_op.config import MoEConfig  # noqa: E402
from dsmoe_op.kernels import (  # noqa: E402
    coded_few,
    coded_persistent,
    fetched_codes,
    gemm1_persistent,
    gemm2_persistent,
)
from dsmoe_op.kernels.launch import INTERPRET  # noqa: E402
from dsmoe_op.tuning import LayerTiles, Tile  # noqa: E402
from dsmoe_op.tuning.tile import ONE_LAUNCH_KINDS  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs Triton's compiler, and its interpreter is on")

__all__ = ["compiled"]


@pytest.mark.parametrize(
    ("dtype", "name", "form"),
    [(BF16, "bf16", "routed"), (BF16, "bf16", "shared"), (BF16, "bf16", "fused"), (FP16, "f16", "routed")],
)
def test_16bit_products_use_the_matrix_units_and_fit(compiled, tmp_path, form, dtype, name):
    Layer(dtype=dtype).gemms(form)
    assert named(compiled, "_grouped_gemm")
    assert bool(named(compiled, "_persistent_gemm2")) == (form == "routed")
    check_products(compiled, name)
    for kernel in named(compiled, "_grouped_gemm"):
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # loads of 16 bytes, in the background
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(transposed=True),
        Layer(transposed=True, config=MoEConfig(top_k=1, apply_router_weight_on_input=True), E=16, bias=BF16),
        Layer(H=7168 - 48, I=1424, S=2832, bias=BF16, config=MoEConfig(top_k=6, clamp_routed=7.0, activation="gelu")),
        Layer(bias=BF16, config=MoEConfig(top_k=4, activation="swiglu_oai", w13_order="interleaved", clamp_shared=7.0)),
        Layer(config=MoEConfig(top_k=6, activation="relu2"), I=1856, S=3712, E=128, H=2688),
    ],
    ids=["transposed", "weight_on_input", "odd_sizes", "interleaved", "not_gated"],
)
def test_16bit_products_fit_in_every_layout(compiled, tmp_path, layer):
    layer.gemms("fused", overlaps=False)
    check_products(compiled, "bf16")
    check_resources(compiled, tmp_path)


def test_weighted_inputs_and_half_empty_blocks_are_multiplied_from_registers_a_step_at_a_time(compiled, tmp_path):
    """The kernels that Triton 3.6 would let run into the next step; without them the check above shows nothing."""
    for config in (MoEConfig(top_k=1, apply_router_weight_on_input=True), V3):
        compiled.clear()
        Layer(E=16, config=config).gemms("routed", overlaps=False)
        assert sum(check_loops(kernel, tmp_path) for kernel in named(compiled, "_grouped_gemm"))


@pytest.mark.parametrize("name", formats.FORMATS)
def test_quantised_products_use_the_matrix_units_and_fit(compiled, tmp_path, name):
    """Routed, shared and both in one launch; sizes are no multiple of a tile's."""
    T, E, K, H, I, S = 4, 8, 2, 2048 - 16, 1424, 2832
    layer = Layer(T=T, H=H, I=I, S=S, E=E, config=MoEConfig(top_k=K))
    kind, activations = tuning.gemm_kind(BF16, False, name), formats.FORMATS[name].activations
    codes: dict[str, Any] = {}
    if activations in ("block", "token"):
        scales = layer.tensor(T, *([-(-H // 128)] if activations == "block" else []), dtype=FP32)
        codes = {"x_codes_TH": layer.tensor(T, H, dtype=formats.E4M3), "x_scales": scales}
        scales = layer.tensor(T * K, *([-(-I // 128)] if activations == "block" else []), dtype=FP32)
        h_codes = {"h_codes_NI": layer.tensor(T * K, I, dtype=formats.E4M3), "h_scales": scales}
    w13, w2 = coded_weight(name, E, 2 * I, H, 2), coded_weight(name, E, H, I, 1)
    shared_w13, shared_w2 = coded_weight(name, 0, 2 * S, H, 2), coded_weight(name, 0, H, S, 1)

    def launch() -> None:
        for tiles in tuning.layer_variants(kind):
            rows = layer.rows(tiles.gemm1.block_m)
            common = {"config": layer.config, "warmup": True}
            shared = {"h_shared_TS": layer.tensor(T, S)}
            shared1 = {**shared, "shared_w13": shared_w13["q"], "shared_coded": shared_w13["coded"]}
            shared2 = {**shared, "shared_w2": shared_w2["q"], "shared_coded": shared_w2["coded"]}
            shared2["shared_TH"] = layer.tensor(T, H)
            kernels.gemm1(
                layer.x, tile=tiles.gemm1, w13=w13["q"], coded=w13["coded"], sorted_slot_N=rows.sorted_slot_N,
                h_NI=layer.tensor(T * K, I), blocks=rows.blocks_3B, **shared1, **codes, **common,
            )  # fmt: skip
            kernels.gemm2(
                tile=tiles.gemm2, w2=w2["q"], coded=w2["coded"], h_NI=layer.tensor(T * K, I),
                y_NH=layer.tensor(T * K, H), blocks=rows.blocks_3B, **shared2, **common,
            )  # fmt: skip
            if codes:
                kernels.quantize_rows(layer.tensor(T * K, I), *h_codes.values(), rows.offsets, of_h=True, warmup=True)
                kernels.gemm2(
                    tile=tiles.gemm2, w2=w2["q"], coded=w2["coded"], h_NI=layer.tensor(T * K, I),
                    y_NH=layer.tensor(T * K, H), blocks=rows.blocks_3B, offsets=rows.offsets, taken=rows.taken,
                    **h_codes, **common,
                )  # fmt: skip
            kernels.gemm1(layer.x, tile=tiles.shared_gemm1, **shared1, **codes, **common)
            if codes:  # what is made of x itself, where routing weights come first
                kernels.gemm1(layer.x, tile=tiles.shared_gemm1, **shared1, **common)
                kernels.quantize_rows(layer.x, *codes.values(), warmup=True)
            kernels.gemm2(tile=tiles.shared_gemm2, **shared2, **common)
            if not tiles.one_launch:
                continue
            for fused in (False, True):
                beside = {**shared, "shared_w13": shared_w13["q"], "shared_w2": shared_w2["q"]} if fused else {}
                if fused:
                    beside["shared_coded"] = (shared_w13["coded"], shared_w2["coded"])
                kernels.experts(
                    layer.x, tiles=tiles[:2], rows=rows, w13=w13["q"], w2=w2["q"], coded=(w13["coded"], w2["coded"]),
                    h_NI=layer.tensor(T * K, I), y_NH=layer.tensor(T * K, H), topk_ids_TK=layer.slots(),
                    topk_weights_TK=layer.slots(FP32), shared_TH=layer.tensor(T, H), out_TH=layer.tensor(T, H),
                    **beside, **codes, **common,
                )  # fmt: skip

    kernels.compile_together(launch)
    assert compiled
    for kernel in compiled:
        if not kernel.metadata.name.startswith(("_quantize", "_persistent")):  # these have tests of their own
            unit = "wgmma" if least_side(kernel) >= 64 else "mma"
            assert matrix_instructions(kernel) == {"wgmma e4m3" if kind == "fp8" else f"{unit} bf16"}
            if kind == "fp8":
                check_fp8_steps(kernel)
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(("name", "format"), [("kimi_k2_tp8", "int4+none"), ("dsv3_tp8", "fp8_block")])
def test_candidates_for_quantised_products_use_the_matrix_units_and_fit(compiled, tmp_path, name, format):
    shape = shapes.quantised(shapes.parse_shape(name), arguments.formats(format))
    kind, _, _ = candidates.layer_shape(shape).kind.partition("+")
    tiles = {
        (kernel, tile)
        for T in (32, 1024)  # few tokens' and many
        for kernel, some in candidates.tiles(shape, T).items()
        for tile in some
        if kernel in ("gemm1", "gemm2")
    }
    for kernel in ("gemm1", "gemm2"):
        listed = candidates._FEW_ROWS[kind, kernel] + candidates._MANY_ROWS[kind, kernel]
        assert {(kernel, tile) for tile in listed} <= tiles
    for pair in candidates._TOGETHER[kind]:
        assert tuning.one_launch(kind, 64, *pair)
        tiles |= {("experts", pair), ("experts", (pair[0]._replace(splits=4), pair[1]))}

    def launch() -> None:
        for kernel, tile in sorted(tiles):
            compiling.warm_up(compiling.Job(shape, kernel, tile))

    kernels.compile_together(launch)
    has_codes = bool(schedule.coded_h(shape.config, has_shared=shape.S > 0))  # products of h, and of its codes
    assert len(compiled) == len(tiles) + has_codes * sum(kernel == "gemm2" for kernel, _ in tiles)
    for kernel in compiled:
        persistent, few = (kernel.metadata.name.startswith(name) for name in ("_persistent", "_few_coded"))
        unit = "wgmma" if kind == "fp8" or persistent or (not few and least_side(kernel) >= 64) else "mma"
        assert matrix_instructions(kernel) == {"wgmma e4m3" if kind == "fp8" else f"{unit} bf16"}
        if kind == "fp8" and not persistent:  # whose steps tests of their own have
            check_fp8_steps(kernel)
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_the_persistent_gemm2_of_fp8_fits_and_adds_each_step_in_float32(compiled, tmp_path, name, block_m):
    T, E, K, H, I = 4, 8, 2, 2048 - 16, 1424
    layer = Layer(T=T, H=H, I=I, E=E, config=MoEConfig(top_k=K))
    tile = Tile(block_m, 8192 // block_m, 128, 8, 3, swap=True, persistent=True, least_m=16)
    w2, shared_w2, rows = coded_weight(name, E, H, I, 1), coded_weight(name, 0, H, I, 1), layer.rows(block_m)

    def codes(rows: int) -> tuple[Tensor, Tensor]:
        groups = () if name == "fp8_channel" else (-(-I // 128),)
        return layer.tensor(rows, I, dtype=formats.E4M3), layer.tensor(rows, *groups, dtype=FP32)

    h_codes, h_scales = codes(T * K)
    shared_codes, shared_scales = codes(T)
    kernels.gemm2(
        config=layer.config, tile=tile, w2=w2["q"], coded=w2["coded"], w2_bias=layer.tensor(E, H, dtype=FP32),
        h_NI=layer.tensor(T * K, I), y_NH=layer.tensor(T * K, H), blocks=rows.blocks_3B, offsets=rows.offsets,
        taken=rows.taken, h_codes_NI=h_codes, h_scales=h_scales, warmup=True,
    )  # fmt: skip
    kernels.gemm2(
        config=layer.config, tile=tile, shared_w2=shared_w2["q"], shared_coded=shared_w2["coded"],
        h_shared_TS=layer.tensor(T, I), shared_TH=layer.tensor(T, H), h_shared_codes_TS=shared_codes,
        h_shared_scales=shared_scales, warmup=True,
    )  # fmt: skip
    assert [kernel.metadata.name for kernel in compiled] == 2 * ["_persistent_gemm2"]
    for kernel in compiled:
        code = [text for _, text in instructions(kernel, tmp_path)]
        products = [text for text in code if "QGMMA" in text]
        assert all(text.startswith("QGMMA.64x128x32.F32.E4M3.E4M3") for text in products)
        # The first of the four products of a step begins a sum: two consumers, one step each.
        assert len(products) == 8
        assert sum(" RZ, !UPT" in text for text in products) == 2
        check_arrivals(kernel, stages=6 if block_m == 128 else 4)
        assert kernel.metadata.shared <= SHARED_MEMORY
        assert stack_bytes(kernel, tmp_path) == 0


PERSISTENT_GEMM1 = tuple(
    tile for tile in candidates._MANY_ROWS["fp8", "gemm1"] if tile.persistent
)  # of 64 rows and of 128


def gemm1_of_fp8(
    tile: Tile, name: str = "fp8_block", form: str = "routed", *, H: int = 2048 - 16, I: int = 1424,
    config: MoEConfig = V3, dtype: torch.dtype = BF16, bias: torch.dtype | None = FP32, whole: bool = False,
    padded: bool = False, longer_rows: int = 0, offset: int = 0, x_is_codes: bool = True,
) -> None:  # fmt: skip
    """One launch of GEMM 1, routed, shared or both.

    whole: as in `coded_weight`. padded: the call has padding. longer_rows, offset: w13's rows are longer than H, and
    begin at that element.
    """
    T, E, R = 70, 8, (1 + config.gated) * I
    N, layer = T * config.top_k, Layer(T=T, H=H, I=I, E=E, config=config, dtype=dtype)
    rows = layer.rows(tile.block_m)
    args: dict[str, Any] = {"config": config, "tile": tile, "warmup": True}
    if x_is_codes:
        scales = layer.tensor(T, *([-(-H // 128)] if name == "fp8_block" else []), dtype=FP32)
        args |= {"x_codes_TH": layer.tensor(T, H, dtype=formats.E4M3), "x_scales": scales}
    if form != "shared":
        interleaved = config.w13_order == "interleaved"
        w13 = coded_weight(name, E, R, H, 1 + config.gated, whole=whole, interleaved=interleaved)
        q = layer.tensor(E * R * (H + longer_rows) + offset, dtype=formats.E4M3)[offset:]
        args |= {"w13": q.view(E, R, H + longer_rows)[..., :H], "coded": w13["coded"], "h_NI": layer.tensor(N, I)}
        args |= {"blocks": rows.blocks_3B, "sorted_slot_N": rows.sorted_slot_N, "taken": rows.taken}
        args |= {"w13_bias": layer.tensor(E, R, dtype=bias) if bias else None, "topk_weights_TK": layer.slots(FP32)}
    if form != "routed":
        shared = coded_weight(name, 0, R, H, 1 + config.gated, whole=whole)
        args |= {"shared_w13": shared["q"], "shared_coded": shared["coded"], "h_shared_TS": layer.tensor(T, I)}
        args["num_valid_tokens"] = layer.tensor(1, dtype=torch.int32) if padded else None
    kernels.gemm1(layer.x, **args)


@pytest.mark.parametrize("tile", PERSISTENT_GEMM1, ids=["64", "128"])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_the_persistent_gemm1_fits_and_adds_each_step_in_float32(compiled, tmp_path, name, tile):
    two = tile.block_m == 128
    for form in ("routed", "shared"):
        for sizes in ({}, {"H": 7168, "I": 256}):
            compiled.clear()
            with kernels.overlapping(True, True):
                gemm1_of_fp8(tile, name, form, **sizes)
            (kernel,) = compiled
            assert kernel.metadata.name == "_persistent_gemm1"
            code = [text for _, text in instructions(kernel, tmp_path)]
            products = [text for text in code if "QGMMA" in text]
            assert all("QGMMA.64x128x32.F32.E4M3.E4M3" in text for text in products)
            # The first of the four products of a step begins a sum. Two consumers, of 64 rows one product a step; of
            # 128 that too, for blocks with so few, and two.
            steps = 6 if two else 2
            assert len(products) == 4 * steps
            assert sum(" RZ, !UPT" in text for text in products) == steps
            # The next step's scales are fetched while the matrix unit works.
            waits = re.findall(r"QGMMA[^D]*?(?:(?!WARPGROUP.DEPBAR).)*WARPGROUP.DEPBAR", " ".join(code))
            assert sum("LDG" in one for one in waits) == (name == "fp8_block") * (4 if two else 2)
            check_arrivals(kernel, stages=4 if two else 5, full=1 + 128)  # the engine's, and each thread's copies
            ptx = kernel.asm["ptx"]
            assert "cp.async.cg.shared.global" in ptx
            assert "cp.async.bulk.tensor.3d" in ptx
            assert bool(re.search(r"\b(atom|red)\.", ptx)) == (form == "routed")
            assert "griddepcontrol" not in ptx
            assert not kernel.metadata.launch_pdl
            assert kernel.metadata.shared <= SHARED_MEMORY
            assert stack_bytes(kernel, tmp_path) <= (ASIDE if two else 0)
            for products in (4, 8)[: 1 + two]:
                bodies = [one for one in product_loops(kernel, tmp_path) if sum("QGMMA" in i for i in one) == products]
                assert len(bodies) >= 2  # the consumers'
                assert not any(re.search(r"\b(STL|LDL)\b", one) for body in bodies[:2] for one in body)


@pytest.mark.parametrize(
    "given",
    [
        {"config": MoEConfig(top_k=8, w13_order="up_gate", activation="gelu", clamp_routed=7.0)},
        {"config": MoEConfig(top_k=8, activation="swiglu_oai", clamp_routed=7.0), "dtype": FP16, "bias": BF16},
        {"I": 192, "whole": True},  # scales of the whole w13, one of which gate and up share
        {"name": "fp8_channel", "I": 1432},
        {"form": "shared", "config": MoEConfig(top_k=8, w13_order="interleaved", clamp_shared=7.0)},
    ],
    ids=str,
)
def test_the_persistent_gemm1_takes(compiled, given):
    for tile in PERSISTENT_GEMM1:
        gemm1_of_fp8(tile, **given)
    assert [kernel.metadata.name for kernel in compiled] == 2 * ["_persistent_gemm1"]


@pytest.mark.parametrize(
    "given",
    [
        {"config": MoEConfig(top_k=8, w13_order="interleaved")},
        {"config": MoEConfig(top_k=8, activation="relu2")},
        {"config": MoEConfig(top_k=1, apply_router_weight_on_input=True), "x_is_codes": False},
        {"x_is_codes": False},
        {"dtype": FP32},
        {"H": 2048 - 8},
        {"offset": 8},
        {"longer_rows": 16},
        {"I": 1424, "whole": True},  # gate and up rows of one box may have scales of two blocks
        {"form": "fused"},
        {"form": "shared", "padded": True},
    ],
    ids=str,
)
def test_weights_that_the_persistent_gemm1_does_not_take_have_the_ordinary_one(compiled, given):
    for tile in PERSISTENT_GEMM1:
        gemm1_of_fp8(tile, **{"bias": None, **given})
    assert [kernel.metadata.name for kernel in compiled] == 2 * ["_grouped_gemm"]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_persistent_product_of_fp8_leaves_16_bits_alone(compiled, dtype):
    """Layers of float32 have the tiles of 16 bits where their weights are fp8."""
    layer, (T, K) = Layer(T=70, H=512, I=384, E=2, dtype=dtype), (70, 8)
    (tile,) = {v.gemm2 for v in tuning.layer_variants("fp8") if v.gemm2.persistent}
    w2, rows = coded_weight("fp8_block", 2, 512, 384, 1), layer.rows(tile.block_m)
    codes = {"h_codes_NI": layer.tensor(T * K, 384, dtype=formats.E4M3), "h_scales": layer.tensor(T * K, 3, dtype=FP32)}
    kernels.gemm2(
        config=layer.config, tile=tile, w2=w2["q"], coded=w2["coded"], h_NI=layer.tensor(T * K, 384),
        y_NH=layer.tensor(T * K, 512), blocks=rows.blocks_3B, offsets=rows.offsets, taken=rows.taken, **codes,
        warmup=True,
    )  # fmt: skip
    assert [one.metadata.name for one in compiled] == ["_persistent_gemm2" if dtype == BF16 else "_grouped_gemm"]


def gemm_tiles() -> Iterator[tuple[str, str, Tile]]:
    """Launcher, form and tile of every 16-bit product but the persistent one."""
    for tiles in tuning.layer_variants("16bit"):
        yield from (("gemm1", "routed", tiles.gemm1), ("gemm1", "shared", tiles.shared_gemm1))
        yield from (("gemm2", "routed", tiles.gemm2), ("gemm2", "shared", tiles.shared_gemm2))


def test_the_copy_engine_fetches_the_weights_that_tiles_say_and_no_transposed_ones(compiled):
    for launcher, form, tile in set(gemm_tiles()):
        if tile.tma:
            for transposed in (False, True):
                compiled.clear()
                getattr(Layer(transposed=transposed), launcher)(form, tile)
                assert ("cp.async.bulk.tensor" in compiled[0].asm["ptx"]) == (not transposed), (launcher, form, tile)


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "bf16"), (FP16, "f16")])
@pytest.mark.parametrize("bias", [None, "model", FP32])
@pytest.mark.parametrize("sizes", [{}, {"H": 2880, "I": 1424}])
def test_the_persistent_gemm2_fits_and_never_starts_early(compiled, tmp_path, dtype, name, bias, sizes):
    """Its barriers and items know of no launch before, so it has to be an ordinary one, whatever it is asked for."""
    (tile,) = {v.gemm2 for v in tuning.layer_variants("16bit") if v.gemm2.persistent}
    layer = Layer(dtype=dtype, bias=dtype if bias == "model" else bias, **sizes)
    with kernels.overlapping(True, True):
        layer.gemm2("routed", tile)
    kernel, tail = compiled
    assert tail.metadata.name == "_zero_rows"
    assert kernel.metadata.name == "_persistent_gemm2"
    assert matrix_instructions(kernel) == {f"wgmma {name}"}
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert "griddepcontrol" not in kernel.asm["ptx"]
    assert not kernel.metadata.launch_pdl
    check_arrivals(kernel, stages=4)
    assert kernel.metadata.shared <= SHARED_MEMORY
    # Triton 3.6 spills one register of the lookup of a float32 bias, once a tile and outside the products' loop.
    some = 8 if bias == FP32 and triton.__version__.startswith("3.6") else 0
    assert stack_bytes(kernel, tmp_path) <= some
    compiled.clear()
    layer.gemm2("routed", tile, zero_tail=False)
    assert [one.metadata.name for one in compiled] == ["_persistent_gemm2"]


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "bf16"), (FP16, "f16")])
def test_the_shared_experts_persistent_gemm2_fits_and_takes_no_gate_and_no_padding(compiled, tmp_path, dtype, name):
    (tile,) = {v.gemm2 for v in tuning.layer_variants("16bit") if v.gemm2.persistent}
    with kernels.overlapping(True, True):
        Layer(dtype=dtype, plain=True).gemm2("shared", tile)
    (kernel,) = compiled
    assert kernel.metadata.name == "_persistent_gemm2"
    assert matrix_instructions(kernel) == {f"wgmma {name}"}
    assert not re.search(r"griddepcontrol|\b(atom|red)\.", kernel.asm["ptx"])
    assert not kernel.metadata.launch_pdl
    check_resources(compiled, tmp_path)
    for layer, form in (
        (Layer(), "shared"),
        (Layer(plain=True), "fused"),
        (Layer(plain=True, longer_rows=8), "shared"),
    ):
        compiled.clear()
        layer.gemm2(form, tile)
        assert [one.metadata.name for one in compiled] == ["_grouped_gemm"]


def tiles_of_one_launch() -> list[tuple[Tile, Tile]]:
    """Those of the heuristic, and of the table that the library has, for 16 bits."""
    table = tuning.tables.shipped("NVIDIA H200")
    assert table is not None
    rows = [row for (shape, _), row in table.rows.items() if shape.kind == "16bit"]
    chosen = (*tuning.layer_variants("16bit"), *(row.choice.tiles for row in rows))
    pairs = list(dict.fromkeys(tiles[:2] for tiles in chosen if tiles.one_launch))
    return [*pairs, *((one._replace(splits=4), two) for one, two in (tuning._NARROW["16bit"], pairs[0]))]


@pytest.mark.parametrize(("form", "ends"), [("routed", False), ("fused", True)])
def test_the_one_launch_fits_on_the_matrix_unit(compiled, tmp_path, form, ends):
    for sizes in ({"I": 256, "S": 256}, {"H": 2048, "I": 512, "S": 512, "E": 512}):
        layer = Layer(T=16, **sizes)
        for tiles in tiles_of_one_launch():
            compiled.clear()
            layer.experts(form, tiles, ends=ends)
            (one,) = compiled
            assert one.metadata.name == "_experts"
            assert "wgmma bf16" in matrix_instructions(one) or tiles[0].block_m < 16  # 3.6 takes mma for 8 rows
            assert matrix_instructions(one) <= {"wgmma bf16", "mma bf16"}
            assert "cp.async.cg.shared.global" in one.asm["ptx"]
            assert bool(re.search(r"ld\.global\.cg\.v4", one.asm["ptx"])) == ends  # the sums', 16 bytes a thread
            assert not re.search(r"ld\.global\.cg\.b16", one.asm["ptx"])
            check_resources(compiled, tmp_path)


def test_parts_of_a_tile_may_begin_beyond_2_to_the_31_elements(compiled):
    """The step from part to part, which a column's stride may make large; Triton's interpreter overflows nowhere."""
    layer, (gemm1, gemm2) = Layer(H=2048, I=208, S=336, E=16, transposed=True), tiles_of_one_launch()[-1]
    layer.experts("fused", (gemm1, gemm2), ends=True)
    for width in (layer.I, layer.S):
        step = layer.H // gemm1.splits * 2 * width
        assert set(re.findall(rf"arith\.constant {step} : (\w+)", compiled[0].asm["ttir"])) == {"i64"}


@pytest.mark.parametrize(
    "layer",
    [
        Layer(transposed=True),
        Layer(config=MoEConfig(top_k=1, apply_router_weight_on_input=True), E=16, bias=BF16),
        Layer(H=7168 - 48, I=1424, S=2832, bias=FP32, config=MoEConfig(top_k=6, clamp_routed=7.0, activation="gelu")),
        Layer(bias=BF16, config=MoEConfig(top_k=4, activation="swiglu_oai", w13_order="interleaved", clamp_shared=7.0)),
        Layer(config=MoEConfig(top_k=12, num_zero_experts=8, activation="relu2"), I=1856, S=3712, E=128, H=2688),
        Layer(dtype=FP16, config=MoEConfig(top_k=8, combine="average", scale_on="output", routed_scaling_factor=3.0)),
    ],
    ids=["transposed", "weight_on_input", "odd_sizes", "interleaved", "not_gated_zero_experts", "fp16"],
)
def test_the_one_launch_fits_in_every_layout(compiled, tmp_path, layer):
    for tiles in {variant[:2] for variant in tuning.layer_variants("16bit") if variant.one_launch}:
        layer.experts("fused", tiles, ends=True)
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(
    "change", [{"transposed": True}, {"I": 2056, "S": 2056, "longer_rows": 1}, {"dtype": FP32, "allow_tf32": True}]
)
def test_weights_that_the_persistent_gemm2_does_not_take_have_the_ordinary_one(compiled, change):
    (tile,) = {v.gemm2 for v in tuning.layer_variants("16bit") if v.gemm2.persistent}
    layer = Layer(**change)
    if layer.dtype == FP32:
        tile = tile._replace(block_n=64, block_k=32)
    layer.gemm2("routed", tile)
    assert [kernel.metadata.name for kernel in compiled] == ["_grouped_gemm"]


GLOBAL = re.compile(r"\b(?:ld|st|atom|red)(?:\.\w+)*\.global\S*|\bcp\.async\S*")


@pytest.mark.parametrize(("early", "followed"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_early_launch_waits_before_it_touches_memory_and_others_never(compiled, tmp_path, early, followed):
    layer = Layer(T=2, H=1024, I=256, S=384, E=16, config=MoEConfig(top_k=4, num_zero_experts=2), bias=BF16)
    (tiles,) = layer.tiles(warmup=False)
    assert tiles.overlaps
    with kernels.overlapping(early, followed):
        layer.routing(warmup=False)
        layer.ends(warmup=False)
        for form in FORMS:
            layer.gemm1(form, tiles.shared_gemm1 if form == "shared" else tiles.gemm1)
            layer.gemm2(form, tiles.shared_gemm2 if form == "shared" else tiles.gemm2)
        for ends in (False, True):
            layer.experts("routed", tiles[:2], ends=ends)
            layer.experts("fused", tiles[:2], ends=ends)
        codes, scales = layer.tensor(2, 1024, dtype=formats.E4M3), layer.tensor(2, 8, dtype=FP32)
        kernels.quantize_rows(layer.x, codes, scales)
        kernels.quantize_rows(layer.x, codes, scales, layer.rows().offsets, of_h=True)
        kernels.reorder_columns(layer.x, layer.tensor(2, 1024))
        kernels.reorder_columns(layer.x, layer.x, layer.rows().offsets)
    names = {kernel.metadata.name for kernel in compiled}
    assert names == {"_router_logits", "_route", "_zero", "_grouped_gemm", "_experts", "_shared_gate", "_finalize"} | {
        "_quantize_rows",
        "_quantize_h",
        "_reorder",
        "_reorder_h",
    }
    for kernel in compiled:
        ptx, name = kernel.asm["ptx"], kernel.metadata.name
        assert bool(kernel.metadata.launch_pdl) == early, name
        assert ptx.count("griddepcontrol.wait") == early, name
        assert ptx.count("griddepcontrol.launch_dependents") == followed, name
        touched = GLOBAL.search(ptx)
        assert touched, name
        if early:
            assert ptx.index("griddepcontrol.wait") < touched.start(), name
            branch = re.search(r"\bbra\b", ptx)  # so on every path
            assert branch is None or ptx.index("griddepcontrol.wait") < branch.start(), name
        if early and followed:  # or a launch after the next one would not wait for the one before this
            assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents"), name
    check_resources(compiled, tmp_path)


def test_products_of_misaligned_rows_fit_though_they_spill(compiled):
    Layer(misaligned=True).gemms("routed", overlaps=False)
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


def test_products_of_weights_in_odd_rows_fit(compiled):
    Layer(longer_rows=1).gemms("routed", overlaps=False)
    assert all("cp.async.bulk.tensor" not in kernel.asm["ptx"] for kernel in compiled)
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


@pytest.mark.parametrize("transposed", [False, True])
def test_float32_products_are_tf32_only_where_allowed(compiled, tmp_path, transposed):
    Layer(dtype=FP32, transposed=transposed).gemms("routed", "shared")
    assert all(matrix_instructions(kernel) == set() for kernel in compiled)
    compiled.clear()
    Layer(dtype=FP32, transposed=transposed, allow_tf32=True).gemms("routed", "shared")
    assert {kind for kernel in compiled for kind in matrix_instructions(kernel)} == {"mma tf32", "wgmma tf32"}
    assert all(kernel.metadata.shared <= SHARED_MEMORY for kernel in compiled)


@pytest.mark.parametrize(
    ("dtype", "router_dtype", "kinds"),
    [
        (BF16, BF16, {"mma bf16", "wgmma bf16"}),
        (BF16, FP32, {"mma bf16", "wgmma bf16"}),  # a float32 weight in three exact parts
        (FP16, FP16, {"mma f16", "wgmma f16"}),
        (FP16, FP32, {"mma tf32", "wgmma tf32"}),  # in three products
        (FP32, FP32, set()),
    ],
)
def test_routing_kernels_fit_and_the_router_multiplies_as_it_must(compiled, tmp_path, dtype, router_dtype, kinds):
    Layer(dtype=dtype, router_dtype=router_dtype).routing()
    router = [kernel for kernel in compiled if kernel.metadata.name == "_router_logits"]
    assert {kind for kernel in router for kind in matrix_instructions(kernel)} == kinds
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(("E", "K", "Z"), [(1, 1, 0), (160, 6, 0), (512, 10, 0), (1024, 32, 0), (1024, 12, 256)])
def test_routing_kernels_fit_for_any_number_of_experts(compiled, tmp_path, E, K, Z):
    groups = {"n_group": 8, "topk_group": 3} if E == 160 else {}
    layer = Layer(E=E, H=512, dtype=BF16, config=MoEConfig(top_k=K, num_zero_experts=Z, score="softmax", **groups))
    layer.routing()
    layer.ends()
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(
    "knobs",
    [
        {"score": "none", "normalize": "none"},
        {"score": "none", "weights_from": "topk_softmax", "normalize": "sum"},
        {"score": "none", "weights_from": "topk_sigmoid", "score_dtype": "model"},
        {"score": "none", "weights_from": "topk_sigmoid", "choice_on": "logit", "normalize": "sum_clamp"},
        {"score": "sqrtsoftplus", "score_dtype": "model", "weight_dtype": "model"},
        {"score": "softmax", "score_dtype": "model", "n_group": 8, "topk_group": 4, "group_mask": "zero"},
        {"score": "softmax", "choice_on": "logit", "n_group": 8, "topk_group": 4, "group_score": "max"},
    ],
)
def test_the_choice_compiles_with_every_value_of_every_knob(compiled, tmp_path, knobs):
    Layer(E=64, H=512, dtype=BF16, config=MoEConfig(top_k=4, **knobs)).routing()
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_no_number_of_tokens_needs_a_kernel_that_warmup_has_not_compiled(compiled, dtype):
    """Neither a tile nor an argument's value compiles another one: no compile in a capture."""
    small = {"H": 256, "I": 128, "S": 384, "E": 16, "dtype": dtype, "config": MoEConfig(top_k=4, num_zero_experts=2)}
    Layer(T=5, **small).all(warmup=True)
    assert len(compiled) > 20
    warm = {id(kernel) for kernel in compiled}
    for T in TOKENS:
        compiled.clear()
        Layer(T=T, **small).all(warmup=False)
        names = [kernel.metadata.name for kernel in compiled]
        assert len(names) == 6 + 2 * len(FORMS) + 2 + names.count("_zero_rows")
        assert names.count("_persistent_gemm2") == names.count("_zero_rows") == (T >= 200 and dtype == BF16)
        assert {id(kernel) for kernel in compiled} <= warm


@pytest.mark.parametrize("T", [1, 500])
@pytest.mark.parametrize("E", [64, 256, 1024])
def test_the_choice_sums_integers_alone(compiled, T, E):
    """So no layout decides a bit, and `route` has the bits of the layer. What is summed by k is added one by one."""
    for softmax in ({"score": "softmax"}, {"weights_from": "topk_softmax", "n_group": 8, "topk_group": 4}):
        config = MoEConfig(top_k=8, normalize="sum", **softmax)
        layer = Layer(T=T, E=E, config=config)
        weight = layer.weight(E, layer.H)
        logits = layer.tensor(kernels.router_splits(T, layer.dtype, weight), T, E, dtype=FP32)
        compiled.clear()
        for rows in (None, layer.rows()):
            kernels.choose(
                logits, None, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16,
                router_weight=weight, rows=rows,
            )  # fmt: skip
        for kernel in compiled:
            assert sums(kernel)
            assert sums(kernel) <= {"i32", "i64"}


@pytest.mark.parametrize(
    ("E", "config"),
    [
        (8, MoEConfig(top_k=2, score="softmax")),
        (64, MoEConfig(top_k=6, score="softmax", normalize="sum")),
        (128, MoEConfig(top_k=8, score="none", weights_from="topk_softmax")),
        (256, V3),
        (160, MoEConfig(top_k=6, n_group=8, topk_group=3, group_score="max")),
        (512, MoEConfig(top_k=10, score="softmax", normalize="sum")),
    ],
)
@pytest.mark.parametrize("T", [1, 5000])
def test_the_choice_crosses_no_warps(compiled, T, E, config):
    """Where each has a token. Nothing is exchanged through shared memory, as reductions across warps would, and changes
    of layout."""
    layer = Layer(T=T, E=E, H=512 if T > 1 else 7168, config=config)
    weight, bias = layer.weight(E, layer.H), layer.tensor(E, dtype=FP32)
    partial = layer.tensor(kernels.router_splits(T, layer.dtype, weight), T, E, dtype=FP32)
    for logits in (layer.tensor(T, E, dtype=BF16), partial):
        kernels.choose(logits, bias, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16)
    assert [kernel.metadata.shared for kernel in compiled] == [0, 0]


@pytest.mark.parametrize(
    ("E", "config", "shares"),
    [
        (64, MoEConfig(top_k=6, score="softmax"), 1),
        (128, MoEConfig(top_k=8), 2),
        (256, V3, 4),
        (300, MoEConfig(top_k=16, n_group=2, topk_group=1), 2),
        (384, MoEConfig(top_k=8, n_group=1, topk_group=1), 4),
        (512, MoEConfig(top_k=10, score="softmax"), 4),
    ],
)
def test_few_slots_are_chosen_for_by_warps_that_share_a_token(compiled, tmp_path, E, config, shares):
    """In the order's launch; each warp with two rows of 32 logits at least, and with whole groups."""
    layer = Layer(T=1, E=E, config=config)
    weight = layer.weight(E, layer.H)
    logits = layer.tensor(kernels.router_splits(1, layer.dtype, weight), 1, E, dtype=FP32)
    kernels.choose(
        logits, None, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16, router_weight=weight,
        rows=layer.rows(),
    )  # fmt: skip
    (kernel,) = compiled
    assert kernel.metadata.num_warps == shares
    check_resources(compiled, tmp_path)


def sums(kernel: Any) -> set[str]:
    """The type of each sum in the IR."""
    return set(re.findall(r"arith\.add[fi] [^\n]* : (\w+)[^\n]*\n\s*tt\.reduce\.return", kernel.asm["ttgir"]))


ATOMIC = ("_route", "_persistent_coded", "_persistent_gemm1", "_persistent_gemm2", "_experts")


def test_atomics_are_of_integers_alone(compiled):
    """Of the row order's counts, of the items that persistent programs take, and of programs that have come to where
    others wait: their order leaves no trace."""
    layer = Layer(H=256, I=128, S=384, E=16, config=MoEConfig(top_k=4, num_zero_experts=2))
    layer.all()
    for tiles in tiles_of_one_launch():
        layer.experts("fused", tiles, ends=True)
    gemm1_of_fp8(PERSISTENT_GEMM1[0])
    products_of_4_bits(64, "int4", 32)
    assert named(compiled, "_persistent_gemm1")
    assert named(compiled, "_persistent_coded")
    for kernel in compiled:
        found = set(re.findall(r"\b(?:atom|red)\.\S+", kernel.asm["ptx"]))
        assert not found or kernel.metadata.name in ATOMIC, found
        assert not any(re.search(r"\.b?f(16|32|64)", name) for name in found)


KINDS = sorted(tuning.tables.KINDS)


def test_tables_end_without_a_limit_and_ascend():
    tables = [*tuning._SHARED.values(), *tuning._ROUTER.values(), tuning._ORDER]
    for table in tables:
        limits = [most for most, _ in table]
        assert limits == sorted(set(limits))
        assert limits[-1] == float("inf")
    for routed in tuning._ROUTED.values():
        limits = [(r.most_rows, r.most_slots) for r in routed]
        for i, (rows, slots) in enumerate(limits):  # else an earlier one is always taken
            assert not any(rows <= most_rows and slots <= most_slots for most_rows, most_slots in limits[:i]), limits
        assert limits[-1] == (float("inf"), float("inf"))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_chosen_is_among_the_variants(kind):
    """Each tile alone, since each is compiled alone; those that overlap are compiled so."""
    variants = tuning.layer_variants(kind)
    for T, E, K, S in itertools.product((*TOKENS, *range(4, 70, 5)), (1, 8, 64, 256, 1000), (1, 8, 32), (0, 96, 4096)):
        chosen = tuning.layer_tiles(kind, T, 4096, E, K, S)
        for field in LayerTiles._fields[:4]:
            same = {getattr(v, field) for v in variants if v.overlaps == chosen.overlaps}
            assert (S == 0 and field.startswith("shared")) or getattr(chosen, field) in same, (field, chosen)
        pairs = {v[:2] for v in variants if v[4:] == chosen[4:]}
        assert chosen[:2] in pairs, chosen
        assert not chosen.one_launch or (kind.partition("+")[0] in ONE_LAUNCH_KINDS and T <= 64)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_such_as_the_kernels_take(kind):
    routed_kind, _, shared_kind = kind.partition("+")
    for v in tuning.layer_variants(kind):
        assert v.gemm1.block_m == v.gemm2.block_m  # they share a map of blocks
        for tile in v[:4]:
            assert all(n & (n - 1) == 0 for n in tile[:3])
            assert tile.least_m in (0, 16)
            assert 2 * tile.block_n <= 256 or not tile.tma or tile in (v.gemm2, v.shared_gemm2)  # of the copy engine
            second = tile in (v.gemm2, v.shared_gemm2)
            its_kind = shared_kind or kind if tile in (v.shared_gemm1, v.shared_gemm2) else routed_kind
            may_persist = second or its_kind in ("fp8", "4bit")
            assert not tile.persistent or (tile.block_m in tuning.tables.PERSISTENT_M[its_kind] and may_persist)


def test_other_gpus_than_hoppers_take_the_products_without_gluon(monkeypatch) -> None:
    w2 = torch.empty(3, 64, 128, dtype=BF16, device="meta")
    w13, coded = coded_weight("fp8_block", 3, 128, 256, 2).values()
    four_bits = coded_weight("int4", 3, 128, 256, 2, zero_point=False)
    for hopper in (True, False):
        for module in (fetched_codes, gemm1_persistent, gemm2_persistent):
            monkeypatch.setattr(module, "is_hopper", lambda device, it=hopper: it)
        assert coded_persistent.takes(four_bits["q"], BF16, 64, four_bits["coded"], V3) == hopper
        assert coded_few.takes(four_bits["q"], BF16, 16, four_bits["coded"], V3) == hopper
        assert gemm2_persistent.takes(w2) == hopper
        assert gemm1_persistent.takes(w13, 64, V3, coded, shared=False) == hopper
