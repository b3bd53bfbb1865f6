"""The kernels of four-bit weights, of few rows and of many, compiled for sm_90 without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

from sm90 import (  # noqa: E402
    ASIDE,
    BF16,
    FP16,
    FP32,
    PERSISTENT_4BIT,
    SHARED_MEMORY,
    V3,
    check_arrivals,
    check_loops,
    coded_weight,
    compiled,
    named,
    product_loops,
    products_of_4_bits,
    registers,
    serialises,
    stack_bytes,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from dsmoe_op import kernels, tuning  # noqa: E402
from dsmoe_op.config import MoEConfig  # noqa: E402
from dsmoe_op.kernels import coded_few, coded_persistent  # noqa: E402
from dsmoe_op.kernels.launch import INTERPRET  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs Triton's compiler, and its interpreter is on")

__all__ = ["compiled"]


FORMS_4BIT = (("int4", 32), ("int4", 64), ("int4", 128), ("mxfp4", 32), ("nvfp4", 16))


@pytest.mark.parametrize("arch", [86, 120])
def test_what_the_heuristic_takes_for_four_bits_fits_on_gpus_of_99_kib(compiled, monkeypatch, arch):
    """A first call loads all that can be chosen, so that one tile too large would let every call fail."""
    own = {
        name: {getattr(r, name) for r in tuning._ROUTED["4bit"] if r.gemm1.persistent} for name in ("gemm1", "gemm2")
    }
    for name, tiles in own.items():
        assert tiles == {PERSISTENT_4BIT[tile.block_m, name] for tile in tiles}
    for name, its in (("get_current_target", GPUTarget("cuda", arch, 32)), ("get_current_device", arch)):
        monkeypatch.setattr(type(driver._active), name, lambda self, its=its: its)
    for tile in sorted(own["gemm1"]):
        products_of_4_bits(tile.block_m, "int4", 128, ordered=False)
    assert [kernel.metadata.name for kernel in compiled] == ["_grouped_gemm"] * 2 * len(own["gemm1"])
    assert all(kernel.metadata.target.arch == arch for kernel in compiled)
    assert max(kernel.metadata.shared for kernel in compiled) <= 99 * 1024


def check_persistent_coded(kernel: Any, block_m: int, name: str, folder) -> None:
    """It fits, keeps all numbers in registers, and multiplies codes from there without a wait for each product."""
    step, stages = {32: (256, 4), 64: (128, 6), 128: (128, 4)}[block_m]
    assert kernel.metadata.name == "_persistent_coded"
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(kernel, folder) <= (ASIDE if block_m == 128 else 0)
    assert not serialises(kernel, folder)
    ptx = kernel.asm["ptx"]
    # Four of 16 columns for each 64, twice 64 rows of w: two consumers.
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16\.f32\.(\w+)\.\w+\s+\{[^}]*\},\s*\{", ptx)
    assert products == [(str(block_m), name)] * (2 * 2 * step // 16)
    assert ptx.count("wgmma.mma_async") == len(products)
    check_arrivals(kernel, stages=stages, full=1 + 128)  # the engine's, and each thread's copies
    check_loops(kernel, folder)
    read_back = 0 if triton.__version__.startswith("3.6") else 1  # 3.9: of 128 rows one number a step, at most
    for body in product_loops(kernel, folder)[:2]:  # the consumers' inner ones
        assert not any(re.search(r"\bSTL\b", one) for one in body)
        assert sum(bool(re.search(r"\bLDL\b", one)) for one in body) <= read_back
    assert "cp.async.cg.shared.global" in ptx
    assert "cp.async.bulk.tensor.3d" in ptx
    assert "griddepcontrol" not in ptx
    assert not kernel.metadata.launch_pdl


def check_few_coded(kernel: Any, rows: int, name: str, folder, room: int) -> None:
    """A program of one warp, of which an SM has room for so many, and whose operands stay in their threads."""
    assert kernel.metadata.name == "_few_coded"
    assert kernel.metadata.num_warps == 1
    assert room * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert stack_bytes(kernel, folder) == 0
    # Each quarter of an SM has 16384 registers, of which a thread gets a multiple of eight.
    assert 4 * (16384 // (32 * triton.cdiv(registers(kernel, folder), 8) * 8)) >= room
    ptx = kernel.asm["ptx"]
    products = re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(\w+)\.\w+\.f32", ptx)
    assert products == [name] * (rows // 16 * 256 // 16)
    assert "wgmma" not in ptx
    assert "cp.async.bulk.tensor.3d" in ptx
    assert "st.shared.b" not in re.sub(r"(?m)^.*@.*st\.shared\.b64.*$", "", ptx)  # a barrier's beginning alone
    assert "shfl" not in ptx
    assert "griddepcontrol" not in ptx
    assert not kernel.metadata.launch_pdl


OAI = MoEConfig(top_k=4, w13_order="interleaved", activation="swiglu_oai", clamp_routed=7.0)
GELU, GELU_TANH = MoEConfig(top_k=4, w13_order="up_gate", activation="gelu"), MoEConfig(top_k=8, activation="gelu_tanh")
FEW_ROWS_4BIT = [
    (("int4", 32), 7168, 256, {"bias": None}),
    (("int4", 64), 64, 192, {}),  # no whole step
    (("int4", 128), 2944, 384, {"dtype": FP16}),
    (("mxfp4", 32), 2880, 2880, {"config": OAI, "bias": BF16}),
    (("nvfp4", 16), 2048, 512, {"config": GELU}),
    (("nvfp4", 16), 1024, 1408, {"config": GELU_TANH, "dtype": FP16, "bias": FP16}),
]


@pytest.mark.parametrize(("form", "H", "I", "options"), FEW_ROWS_4BIT, ids=str)
def test_the_products_of_four_bits_and_few_rows_are_warps_on_their_own(compiled, tmp_path, form, H, I, options):
    def launch() -> None:
        with kernels.overlapping(True, True):  # an ordinary launch, whatever it is asked for
            products_of_4_bits(16, *form, H=H, I=I, **options)

    kernels.compile_together(launch)
    assert len(compiled) == 2
    for kernel, rows in zip(compiled, (32, 64 if I <= 256 else 32), strict=True):
        check_few_coded(kernel, rows, "f16" if options.get("dtype") == FP16 else "bf16", tmp_path, room=12)


class InTorch:
    """What `coded_few` asks of Gluon to put operands in order, of tensors on the CPU."""

    @staticmethod
    def SliceLayout(dim: int, parent: Any) -> None: ...

    @staticmethod
    def convert_layout(t: Tensor, layout: Any, assert_trivial: bool) -> Tensor:
        return t

    @staticmethod
    def split(t: Tensor) -> tuple[Tensor, ...]:
        return t.unbind(-1)

    reshape, permute, expand_dims = Tensor.reshape, Tensor.permute, Tensor.unsqueeze


def numbers_in_torch(words: Tensor, scale: Tensor, *_: Any) -> Tensor:
    """[.., half, j % 2, j // 2], as `fetched_codes.numbers` says, of int4."""
    j = torch.arange(2)[:, None, None] * 4 + torch.arange(2)[:, None] + torch.arange(2) * 2
    return (((words[..., None, None, None] >> 4 * j) & 15) - 8) * scale[..., None, None, None]


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [32, 64])
def test_operands_of_few_rows_have_the_same_columns(monkeypatch, rows, group):
    """Of codes and of a; the assembler sees which threads they are in, but not their order within a thread."""
    monkeypatch.setattr(coded_few, "gl", InTorch)
    monkeypatch.setattr(coded_few, "_of_groups", lambda rows, groups: None)
    monkeypatch.setattr(coded_few, "numbers", numbers_in_torch)
    codes, scale, a = (torch.randint(16, size) for size in ((rows, 256), (rows, 256 // group), (8, 256)))
    q = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)  # two neighbours in a byte, the first one low
    of_w = coded_few._operands_of_w.fn(q.view(torch.int32), scale, "int4", None, None)
    of_a = coded_few._operands_of_a.fn(a, None)
    w = (codes - 8) * scale.repeat_interleave(group, 1)
    assert torch.equal(sum(one @ other for one, other in zip(of_w, of_a, strict=True)), w @ a.T)


@pytest.mark.parametrize(
    ("block_m", "name", "group"),
    [*((block_m, "int4", 32) for block_m in (32, 64)), *((128, *form) for form in FORMS_4BIT)],
)
def test_the_persistent_products_of_four_bits_fit_and_decode_while_others_run(compiled, tmp_path, block_m, name, group):
    def launch() -> None:
        with kernels.overlapping(True, True):  # an ordinary launch, whatever it is asked for
            products_of_4_bits(block_m, name, group)

    kernels.compile_together(launch)
    assert len(named(compiled, "_persistent_coded")) == 2
    assert len(named(compiled, "_zero_rows")) == 0
    for kernel in compiled:
        check_persistent_coded(kernel, block_m, "bf16", tmp_path)


@pytest.mark.parametrize(
    ("block_m", "given", "options"),
    [
        (128, ("int4", 128, ("gemm1", "gemm2")), {"H": 2944, "I": 384, "dtype": FP16, "bias": None}),
        (64, ("nvfp4", 16, ("gemm1",)), {"config": GELU}),
        (
            32,
            ("nvfp4", 16, ("gemm1", "gemm2")),
            {"config": MoEConfig(top_k=8, w13_order="interleaved", clamp_routed=7.0), "dtype": FP16, "bias": FP16},
        ),
        (
            128,
            ("mxfp4", 32, ("gemm1",)),
            {"config": OAI, "H": 2880, "I": 2880, "bias": BF16},
        ),
        (64, ("int4", 64, ("gemm1", "gemm2")), {"H": 64, "I": 192}),  # no whole step
        (32, ("mxfp4", 32, ("gemm2",)), {"config": MoEConfig(top_k=8, activation="relu2")}),
    ],
    ids=str,
)  # fmt: skip
def test_the_persistent_products_of_four_bits_fit_in_every_layout(compiled, tmp_path, block_m, given, options):
    name, group, products = given
    kernels.compile_together(lambda: products_of_4_bits(block_m, name, group, products, **options))
    assert len(compiled) == len(products)
    for kernel in compiled:
        check_persistent_coded(kernel, block_m, "f16" if options.get("dtype") == FP16 else "bf16", tmp_path)


@pytest.mark.parametrize(
    ("name", "group", "options"),
    [
        ("nvfp4", 16, {}),
        ("int4", 32, {"dtype": FP16}),
        ("int4", 128, {"zero_point": True}),
        ("int4", 32, {"zero_point": True, "scale": FP32}),
        ("mxfp4", 32, {"dtype": FP16}),
    ],
    ids=str,
)
def test_the_same_tiles_of_the_ordinary_products_fit(compiled, tmp_path, name, group, options):
    """Where weights are such as the persistent ones do not take, and in a launch with the shared expert's."""
    for block_m in (16, 32, 64, 128):
        compiled.clear()
        kernels.compile_together(
            lambda block_m=block_m: products_of_4_bits(block_m, name, group, ordered=False, **options)
        )
        assert [kernel.metadata.name for kernel in compiled] == 2 * ["_grouped_gemm"]
        for kernel in compiled:
            assert kernel.metadata.shared <= SHARED_MEMORY
            # A candidate of `tune`, which the heuristic never chooses, makes numbers with float32 scales one by one:
            # 64 bytes, under Triton 3.9 up to 104.
            assert stack_bytes(kernel, tmp_path) <= (104 if block_m == 16 else 0)
            check_loops(kernel, tmp_path)


def changed_weight(name: str, E: int, R: int, C: int, halves: int, change: str) -> dict[str, Any]:
    """One that the persistent products take, but for that."""
    group = {"nvfp4": 16, "mxfp4": 32}.get(name, 128)
    options: dict[str, Any] = {"group": group, "zero_point": change == "zero points"}
    if change in ("float32 scales", "fp16 scales"):
        options["scale"] = FP32 if change == "float32 scales" else FP16
    one = coded_weight(name, E, R, C, halves, **options)
    q = one["q"]
    if change == "longer rows":
        one["q"] = torch.empty(E, R, C // 2 + 16, dtype=q.dtype, device="meta")[..., : C // 2]
    if change == "misaligned":
        one["q"] = torch.empty(q.numel() + 8, dtype=q.dtype)[8:].view(q.shape)
        assert one["q"].data_ptr() % 16 == 8
    return one


@pytest.mark.parametrize(
    ("name", "change", "taken"),
    [
        *((name, "", True) for name in ("int4", "mxfp4", "nvfp4")),
        ("int4", "zero points", False),
        ("int4", "float32 scales", False),
        ("int4", "fp16 scales", False),
        ("int4", "longer rows", False),
        ("int4", "misaligned", False),
        ("nvfp4", "misaligned", False),
        ("mxfp4", "32 columns and 16", False),
        ("int4", "a part of a group", False),
        ("int4", "fp16 rows", False),  # with scales of bfloat16
        ("mxfp4", "fp16 rows", False),  # which has not all powers of two
        ("nvfp4", "fp16 rows", True),
        ("nvfp4", "float32 rows", False),
        ("mxfp4", "float32 rows", False),
    ],
)
def test_the_persistent_products_of_four_bits_say_what_they_take(name, change, taken):
    C = 512 + {"32 columns and 16": 16, "a part of a group": 64}.get(change, 0)
    rows = {"fp16 rows": FP16, "float32 rows": FP32}.get(change, BF16)
    for halves, config in ((2, V3), (1, None)):
        w = changed_weight(name, 3, 128, C, halves, change)
        for block_m in (8, 16, 32, 64, 128, 256):
            many, few = (
                module.takes(w["q"], rows, block_m, w["coded"], config) for module in (coded_persistent, coded_few)
            )
            assert many == (taken and block_m in (32, 64, 128))
            assert few == (taken and block_m == 16)
    w13 = changed_weight(name, 3, 128, C, 2, change)
    for config in (
        MoEConfig(top_k=1, apply_router_weight_on_input=True),
        MoEConfig(top_k=2, activation="relu2"),
    ):
        assert not coded_persistent.takes(w13["q"], rows, 64, w13["coded"], config)
        assert not coded_few.takes(w13["q"], rows, 16, w13["coded"], config)


def test_the_persistent_products_of_four_bits_take_no_groups_of_whole_rows_and_no_other_format():
    for name, options in (
        ("int4", {"group": 512, "zero_point": False}),
        ("fp8_block", {}),
        ("fp8_channel", {}),
        ("fp8_tensor", {}),
    ):
        w = coded_weight(name, 3, 128, 512, 1, **options)
        assert not coded_persistent.takes(w["q"], BF16, 64, w["coded"])
    assert not coded_persistent.takes(torch.empty(3, 64, 128, dtype=BF16, device="meta"), BF16, 64, kernels.PLAIN)
