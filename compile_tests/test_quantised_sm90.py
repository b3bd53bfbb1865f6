"""Products of quantised weights in the ordinary kernel, and fp8's persistent ones, compiled for sm_90 without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

from sm90 import (  # noqa: E402
    ASIDE,
    BF16,
    FP16,
    FP32,
    PERSISTENT_GEMM1,
    SHARED_MEMORY,
    Layer,
    check_arrivals,
    check_fp8_steps,
    check_resources,
    coded_weight,
    compiled,
    gemm1_of_fp8,
    instructions,
    least_side,
    matrix_instructions,
    product_loops,
    stack_bytes,
)

from dsmoe_op import formats, kernels, schedule, tuning  # noqa: E402
from dsmoe_op.cli import arguments, candidates, compiling, shapes  # noqa: E402
from dsmoe_op.config import MoEConfig  # noqa: E402
from dsmoe_op.kernels.launch import INTERPRET  # noqa: E402
from dsmoe_op.tuning import Tile  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs Triton's compiler, and its interpreter is on")

__all__ = ["compiled"]


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
                kernels.quantize_rows(layer.tensor(T * K, I), *h_codes.values(), rows.num_rows, of_h=True, warmup=True)
                kernels.gemm2(
                    tile=tiles.gemm2, w2=w2["q"], coded=w2["coded"], h_NI=layer.tensor(T * K, I),
                    y_NH=layer.tensor(T * K, H), blocks=rows.blocks_3B, num_rows=rows.num_rows, taken=rows.taken,
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
        h_NI=layer.tensor(T * K, I), y_NH=layer.tensor(T * K, H), blocks=rows.blocks_3B, num_rows=rows.num_rows,
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
        y_NH=layer.tensor(T * K, 512), blocks=rows.blocks_3B, num_rows=rows.num_rows, taken=rows.taken, **codes,
        warmup=True,
    )  # fmt: skip
    assert [one.metadata.name for one in compiled] == ["_persistent_gemm2" if dtype == BF16 else "_grouped_gemm"]
