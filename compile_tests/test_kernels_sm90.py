"""Every kernel that can be chosen, compiled for sm_90 without a GPU by the launchers' own warm-up.

Here are the products of 16 bits and float32, and what holds for all kernels; `test_routing_sm90.py`,
`test_quantised_sm90.py` and `test_four_bits_sm90.py` have the others.

Sizes are those of DeepSeek-V3 (or odd ones, where masks matter), on tensors without memory.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch

triton = pytest.importorskip("triton", reason="no triton")

from sm90 import (  # noqa: E402
    BF16,
    FORMS,
    FP16,
    FP32,
    PERSISTENT_GEMM1,
    SHARED_MEMORY,
    TOKENS,
    V3,
    Layer,
    check_arrivals,
    check_loops,
    check_products,
    check_resources,
    coded_weight,
    compiled,
    gemm1_of_fp8,
    matrix_instructions,
    named,
    products_of_4_bits,
    stack_bytes,
)

from dsmoe_op import formats, kernels, tuning  # noqa: E402
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
        kernels.quantize_rows(layer.x, codes, scales, layer.rows().num_rows, of_h=True)
        kernels.reorder_columns(layer.x, layer.tensor(2, 1024))
        kernels.reorder_columns(layer.x, layer.x, layer.rows().num_rows)
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
