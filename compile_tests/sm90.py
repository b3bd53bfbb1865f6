"""A layer's arguments on tensors without memory, its kernels compiled for sm_90, and what their binaries must be."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from typing import Any

import bounds
import pytest
import torch
import triton
from layers import LAUNCHERS
from sass import unset_uniform_registers
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

from dsmoe_op import formats, kernels, tuning
from dsmoe_op.cli import candidates
from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels import launch as launch_module
from dsmoe_op.tuning import LayerTiles, Tile

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V3 = MoEConfig(top_k=8, n_group=8, topk_group=4, routed_scaling_factor=2.5)
SHARED_MEMORY = 227 * 1024
ASIDE = 32
"""Bytes of an item's numbers that a persistent GEMM 1 of 128 rows keeps in memory, outside its products' loops."""
FORMS = ("routed", "shared", "fused")
TOKENS = (1, 2, 3, 15, 16, 17, 64, 65, 500, 1000, 5000, 70000)


class _Sm90:
    """What Triton asks a driver for while it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90  # of no machine, so that no real device's kernels are mixed with these

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """The kernels that launchers warm up or launch, compiled and not loaded."""
    found: list[Any] = []

    def compile_only(kernel, grid, args, meta, *, warmup=False):
        launch_module.launch(kernel, grid, args, meta, warmup=True)

    monkeypatch.setattr(driver, "_active", _Sm90())
    monkeypatch.setattr(
        launch_module, "_load", lambda one: found.append(one.result() if hasattr(one, "result") else one)
    )
    for module in LAUNCHERS:
        monkeypatch.setattr(sys.modules[f"dsmoe_op.kernels.{module}"], "launch", compile_only)
    return found


@dataclasses.dataclass(kw_only=True)
class Layer:
    """Arguments of every launcher for one layer, on tensors without memory."""

    T: int = 4
    H: int = 7168
    I: int = 2048
    E: int = 256
    S: int = 2048
    dtype: torch.dtype = BF16
    router_dtype: torch.dtype = BF16
    config: MoEConfig = V3
    transposed: bool = False
    bias: torch.dtype | None = None
    allow_tf32: bool = False
    misaligned: bool = False
    longer_rows: int = 0
    plain: bool = False
    """The shared expert has no gate, and the call no padding."""

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def weight(self, *shape: int) -> Tensor:
        if self.transposed:
            return self.tensor(*shape[:-2], shape[-1], shape[-2]).mT
        return self.tensor(*shape[:-1], shape[-1] + self.longer_rows)[..., : shape[-1]]

    @property
    def x(self) -> Tensor:
        return self.tensor(self.T, self.H + 3)[:, 3:] if self.misaligned else self.tensor(self.T, self.H)

    def slots(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.tensor(self.T, self.config.top_k, dtype=dtype)

    def rows(self, block_m: int = 64) -> kernels.Rows:
        def ints(*shape: int) -> Tensor:
            return self.tensor(*shape, dtype=torch.int32)

        E, N = self.E, self.T * self.config.top_k
        blocks, counters = ints(3, kernels.num_blocks(N, E, block_m)), ints(kernels.num_counters(N, E))
        arrivals = ints(blocks.shape[1] + self.T + self.H)  # more than any tile needs
        return kernels.Rows(ints(1), ints(N), self.slots(), blocks, block_m, 0, counters, ints(2), arrivals)

    def routing(self, warmup: bool = True) -> None:
        """Each way to route: from hidden_states, from logits, and from ids."""
        E, Z, rows = self.E, self.config.num_zero_experts, self.rows()
        weight = self.tensor(E + Z, self.H, dtype=self.router_dtype)
        logits = self.tensor(kernels.router_splits(self.T, self.dtype, weight), self.T, E + Z, dtype=FP32)
        given, bias = self.tensor(1, self.T, E + Z, dtype=BF16), self.tensor(E + Z, dtype=FP32)
        slots, valid = (self.slots(), self.slots(FP32)), self.tensor(1, dtype=torch.int32)
        choice = {"config": self.config, "model_dtype": self.dtype, "warmup": warmup}
        kernels.router_logits(self.x, weight, logits, counters=rows.counters, warmup=warmup)
        kernels.choose(logits, bias, valid, *slots, router_bias=bias, router_weight=weight, rows=rows, **choice)
        kernels.choose(given, bias, valid, *slots, counters=rows.counters, **choice)
        order = {"num_experts": E, "num_zero_experts": Z, "rows": rows, "warmup": warmup}
        kernels.order_rows(*slots, None, None, **order)
        kernels.zero_counters(rows, num_experts=E, warmup=warmup)
        kernels.order_rows(*slots, None, valid, ids_out_TK=slots[0], weights_out_TK=slots[1], **order)

    def tiles(self, *, warmup: bool) -> tuple[LayerTiles, ...]:
        """All that can be chosen, or what these sizes choose."""
        kind = tuning.gemm_kind(self.dtype, self.allow_tf32)
        if warmup:
            return tuning.layer_variants(kind)
        return (tuning.layer_tiles(kind, self.T, self.H, self.E, self.config.top_k, self.S),)

    def gemms(self, *forms: str, warmup: bool = True, overlaps: bool = True) -> None:
        """The launches of each form; those that may overlap only if asked for."""

        def launch() -> None:
            for tiles, form in itertools.product(self.tiles(warmup=warmup), forms):
                if tiles.overlaps and not overlaps:
                    continue
                gemm1, gemm2 = tiles[:2] if form != "shared" else tiles[2:4]
                with kernels.overlapping(tiles.overlaps, tiles.overlaps):
                    self.gemm1(form, gemm1, warmup=warmup)
                    self.gemm2(form, gemm2, warmup=warmup)

        kernels.compile_together(launch) if warmup else launch()

    def gemm1(self, form: str, tile: Tile, *, warmup: bool = True) -> None:
        N, width = self.T * self.config.top_k, 2 if self.config.gated else 1
        E, H, I, S, rows = self.E, self.H, self.I, self.S, self.rows(tile.block_m)
        args: dict[str, Any] = {"config": self.config, "tile": tile, "allow_tf32": self.allow_tf32, "warmup": warmup}
        args["num_valid_tokens"] = self.tensor(1, dtype=torch.int32)
        if form != "shared":
            args |= {"w13": self.weight(E, width * I, H), "h_NI": self.tensor(N, I), "blocks": rows.blocks_3B}
            args |= {"sorted_slot_N": rows.sorted_slot_N, "topk_weights_TK": self.slots(FP32)}
            args["w13_bias"] = self.tensor(E, width * I, dtype=self.bias) if self.bias else None
        if form != "routed":
            args |= {"shared_w13": self.weight(width * S, H), "h_shared_TS": self.tensor(self.T, S)}
        kernels.gemm1(self.x, **args)

    def gemm2(self, form: str, tile: Tile, *, zero_tail: bool = True, warmup: bool = True) -> None:
        N, E, H, I, S, rows = self.T * self.config.top_k, self.E, self.H, self.I, self.S, self.rows(tile.block_m)
        args: dict[str, Any] = {"config": self.config, "tile": tile, "allow_tf32": self.allow_tf32, "warmup": warmup}
        args["num_valid_tokens"] = self.tensor(1, dtype=torch.int32)
        if form != "shared":
            args |= {"w2": self.weight(E, H, I), "h_NI": self.tensor(N, I), "blocks": rows.blocks_3B}
            args |= {"num_rows": rows.num_rows, "taken": rows.taken, "y_NH": self.tensor(N, H), "zero_tail": zero_tail}
            args["w2_bias"] = self.tensor(E, H, dtype=self.bias) if self.bias else None
        if form != "routed":
            args |= {"shared_w2": self.weight(H, S), "h_shared_TS": self.tensor(self.T, S)}
            args |= {"shared_TH": self.tensor(self.T, H), "gate_T": self.tensor(self.T, dtype=FP32)}
        if self.plain:
            args |= {"gate_T": None, "num_valid_tokens": None}
        kernels.gemm2(**args)

    def experts(self, form: str, tiles: tuple[Tile, Tile], *, ends: bool, warmup: bool = True) -> None:
        """One launch of both products; form as in `gemms`, but "shared"."""
        T, H, I, S, N, width = self.T, self.H, self.I, self.S, self.T * self.config.top_k, 1 + self.config.gated
        args: dict[str, Any] = {"zero_tail": not ends, "out_TH": self.tensor(T, H) if ends else None}
        if self.bias:
            args["w13_bias"] = self.tensor(self.E, width * I, dtype=self.bias)
            args["w2_bias"] = self.tensor(self.E, H, dtype=self.bias)
        if form == "fused":
            args |= {"shared_w13": self.weight(width * S, H), "shared_w2": self.weight(H, S)}
            args |= {"h_shared_TS": self.tensor(T, S), "gate_T": self.tensor(T, dtype=FP32)}
            args["num_valid_tokens"] = self.tensor(1, dtype=torch.int32)
        if form == "fused" or ends:
            args["shared_TH"] = self.tensor(T, H)
        args["parts"] = self.tensor(
            kernels.num_parts(T, self.config.top_k, I, S, self.config.gated, tiles[0]), dtype=FP32
        )
        kernels.experts(
            self.x, config=self.config, tiles=tiles, rows=self.rows(tiles[0].block_m),
            w13=self.weight(self.E, width * I, H), w2=self.weight(self.E, H, I), h_NI=self.tensor(N, I),
            y_NH=self.tensor(N, H), topk_ids_TK=self.slots(), topk_weights_TK=self.slots(FP32),
            warmup=warmup, **args,
        )  # fmt: skip

    def ends(self, warmup: bool = True) -> None:
        T, H, K = self.T, self.H, self.config.top_k
        gate_weight, gate = self.tensor(1, H), self.tensor(T, dtype=FP32)
        kernels.shared_gate(self.x, gate_weight, gate, warmup=warmup)
        kernels.finalize(
            self.tensor(T * K, H), self.slots(), self.slots(FP32), self.slots(), self.tensor(T, H), self.x,
            self.tensor(T, H), config=self.config, warmup=warmup,
        )  # fmt: skip

    def all(self, warmup: bool = True) -> None:
        self.routing(warmup)
        self.gemms(*FORMS, warmup=warmup)
        self.ends(warmup)


def _usage(kernel: Any, folder) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_bytes(kernel: Any, folder) -> int:
    """Local memory of a thread, in bytes: where spilled registers go."""
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", _usage(kernel, folder)))


def registers(kernel: Any, folder) -> int:
    """Of a thread."""
    (found,) = re.findall(r"REG:(\d+)", _usage(kernel, folder))
    return int(found)


def serialises(kernel: Any, folder) -> bool:
    """Whether the assembler says that it lets each matrix instruction wait for the one before."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(folder / "kernel.o")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "registers" in said.stderr
    return "C7512" in said.stderr or "serialized" in said.stderr


def _disassembled(kernel: Any, folder) -> str:
    """As `cuobjdump -sass` has it; once for all that look at one kernel after another."""
    if kernel.hash not in _sass:
        _sass.clear()
        _sass[kernel.hash] = _dumped(kernel, folder)
    return _sass[kernel.hash]


_sass: dict[str, str] = {}


def _dumped(kernel: Any, folder) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(kernel: Any, folder) -> list[tuple[int, str]]:
    """Address and text of each machine instruction."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", _disassembled(kernel, folder))
    return [(int(address, 16), instruction) for address, instruction in found]


def product_loops(kernel: Any, folder, product: str = "GMMA") -> list[list[str]]:
    """The instructions of each loop that has matrix instructions of that name, inner loops before outer ones."""
    code = instructions(kernel, folder)
    found = []
    for address, text in code:
        target = re.search(r"BRA\S*.* 0x([0-9a-f]+)", text)
        if target is not None and int(target[1], 16) < address:
            body = [one for at, one in code if int(target[1], 16) <= at <= address]
            if any(product in one for one in body):
                found.append(body)
    return sorted(found, key=len)


def check_loops(kernel: Any, folder) -> int:
    """No step of a loop may write registers that a matrix instruction of the step before still reads: where one takes
    an operand from registers, the step ends when all are done. The number of such loops."""
    if not re.search(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{", kernel.asm["ptx"]):  # all operands in shared memory
        return 0
    found = 0
    for body in product_loops(kernel, folder):
        if any(re.search(r"GMMA\S* R\d+, R\d+, gdesc", one) for one in body):
            last = [one for one in body if "WARPGROUP.DEPBAR" in one or "GMMA" in one][-1]
            assert re.search(r"DEPBAR.LE gsb0, 0x0$", last), (kernel.metadata, last)
            found += 1
    return found


def check_resources(compiled: list[Any], folder) -> None:
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_MEMORY, kernel.metadata
        aside = ASIDE if kernel.metadata.name in ("_persistent_gemm1", "_persistent_coded") else 0
        assert stack_bytes(kernel, folder) <= aside, kernel.metadata
        check_loops(kernel, folder)
        if "wgmma" in kernel.asm["ptx"]:  # whose descriptors lie in uniform registers
            assert unset_uniform_registers(_disassembled(kernel, folder)) == [], kernel.metadata


def matrix_instructions(kernel: Any) -> set[str]:
    """Kinds of matrix instruction, such as "wgmma bf16" or "mma tf32", of a kernel."""
    text = kernel.asm["ptx"]
    found = {f"wgmma {kind}" for kind in re.findall(r"wgmma\.mma_async\S*\.f32\.(\w+)\.\w+", text)}
    return found | {f"mma {kind}" for kind in re.findall(r"mma\.sync\S*\.f32\.(\w+)\.\w+\.f32", text)}


def check_fp8_steps(kernel: Any) -> None:
    """Sums of fp8 products start from zero each 128 columns, of four instructions, as `bounds.cut_off` has it."""
    found = re.findall(r"wgmma\.mma_async\S*k(\d+)\.f32\.e4m3\.e4m3 \{[^}]*\}, .*?, (\S+), 1, 1;", kernel.asm["ptx"])
    assert len(found) == kernel.asm["ptx"].count("wgmma.mma_async")
    assert {int(products) for products, _ in found} == {bounds.FP8_PRODUCTS}
    step = bounds.FP8_STEP // bounds.FP8_PRODUCTS
    assert [adds == "0" for _, adds in found] == [i % step == 0 for i in range(len(found))], kernel.metadata


def check_arrivals(kernel: Any, stages: int, full: int = 1) -> None:
    """One thread arrives for all of its warps, so these meet before it: none still reads what the buffer then loses.
    Buffers are full by so many arrivals, of which each thread's copies make their own, and empty by both consumers'."""
    ptx = kernel.asm["ptx"]
    counts = [int(count) for count in re.findall(r"mbarrier\.init\S* \[%r\d+\], (\d+);", ptx)]
    assert sorted(counts) == sorted([full] * stages + [2] * stages)
    steps = re.findall(
        r"\bbar\.(?:warp\.)?sync|wgmma\.wait_group|[ls][dt]\.shared|(?<!async\.)mbarrier\.arrive(?!\.expect)", ptx
    )
    arrivals = [before for before, step in itertools.pairwise(steps) if step == "mbarrier.arrive"]
    assert arrivals
    assert all(before.startswith("bar.") for before in arrivals), kernel.metadata


def least_side(kernel: Any) -> int:
    """The fewest rows that an accumulator has in the IR."""
    return min(int(rows) for rows in re.findall(r"tt\.dot.*-> tensor<(\d+)x\d+xf32", kernel.asm["ttir"]))


def named(compiled: list[Any], name: str) -> list[Any]:
    return [kernel for kernel in compiled if kernel.metadata.name == name]


def check_products(compiled: list[Any], name: str) -> None:
    """Every product is of the matrix units, and of warpgroups where it has rows for them."""
    for kernel in named(compiled, "_grouped_gemm"):
        assert matrix_instructions(kernel) == {f"wgmma {name}" if least_side(kernel) >= 64 else f"mma {name}"}
    for kernel in named(compiled, "_persistent_gemm2"):
        assert matrix_instructions(kernel) == {f"wgmma {name}"}


def coded_weight(
    name: str, E: int, R: int, C: int, halves: int, *, whole: bool = False, interleaved: bool = False,
    group: int | None = None, zero_point: bool = True, scale: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """q and the rest of a quantised weight without memory; E = 0 for the shared expert's. whole: scales of both halves
    in one row of blocks, where that is another shape. group, zero_point: of int4. scale: its dtype, if another one."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((E, *shape) if E else shape, dtype=dtype, device="meta")

    format = formats.FORMATS[name]
    bits, dtype = format.bits, {"mxfp4": torch.uint8, "int4": BF16}.get(name, format.scale_dtypes[0])
    q = empty(R, C * bits // 8, dtype=torch.uint8 if bits == 4 else format.dtypes[0])
    shape = formats.scale_shapes(name, R, C, halves=halves)[-1 if whole else 0]
    scales = empty(*(shape if group is None else (R, -(-C // group))), dtype=scale or dtype)
    zero = empty(R // 2, scales.shape[-1], dtype=torch.uint8) if name == "int4" and zero_point else None
    global_scale = empty(*(halves,) * (halves == 2), dtype=FP32) if format.has_global_scale else None
    given = torch.empty(1, dtype=FP32, device="meta") if format.activations == "tensor" else None
    parts = formats.Quantised(q, scales, zero, global_scale, given)
    return {"q": q, "coded": kernels.coded(name, parts, R, C, halves, interleaved)}


PERSISTENT_4BIT = {
    (tile.block_m, name): tile
    for name in ("gemm1", "gemm2")
    for tile in candidates._FEW_ROWS["4bit", name] + candidates._MANY_ROWS["4bit", name]
    if tile.persistent
}
"""By rows of a block, and product."""


def products_of_4_bits(
    block_m: int, name: str, group: int, products: tuple[str, ...] = ("gemm1", "gemm2"), *, H: int | None = None,
    I: int | None = None, config: MoEConfig = V3, dtype: torch.dtype = BF16, bias: torch.dtype | None = FP32,
    ordered: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Launches of the routed experts' products, with rows in the order of codes or the ordinary ones of the same tiles.

    Blocks of 16 rows take rows as they are. H and I are whole groups. options: of `coded_weight`.
    """
    tiles = {what: PERSISTENT_4BIT[block_m, what]._replace(persistent=ordered or block_m > 16) for what in products}
    ordered &= block_m > 16
    T, E, least = 70, 8, max(group, 32)
    H, I = H or 2048 - least, I or 11 * least
    N, layer = T * config.top_k, Layer(T=T, H=H, I=I, E=E, config=config, dtype=dtype)
    rows = layer.rows(block_m)
    args: dict[str, Any] = {"config": config, "blocks": rows.blocks_3B, "taken": rows.taken, "warmup": True}
    options = {"group": group, "zero_point": False, "scale": dtype if name == "int4" else None, **options}
    if "gemm1" in products:
        R, interleaved = (1 + config.gated) * I, config.w13_order == "interleaved"
        w13 = coded_weight(name, E, R, H, 1 + config.gated, interleaved=interleaved, **options)
        kernels.gemm1(
            layer.x, tile=tiles["gemm1"], w13=w13["q"], coded=w13["coded"],
            w13_bias=layer.tensor(E, R, dtype=bias) if bias else None, sorted_slot_N=rows.sorted_slot_N,
            h_NI=layer.tensor(N, I), x_ordered=layer.x if ordered else None, **args,
        )  # fmt: skip
    if "gemm2" in products:
        w2 = coded_weight(name, E, H, I, 1, **options)
        kernels.gemm2(
            tile=tiles["gemm2"], w2=w2["q"], coded=w2["coded"],
            w2_bias=layer.tensor(E, H, dtype=bias) if bias else None, num_rows=rows.num_rows, h_NI=layer.tensor(N, I),
            y_NH=layer.tensor(N, H), h_is_ordered=ordered, **args,
        )  # fmt: skip


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
