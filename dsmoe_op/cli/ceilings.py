"""What this machine does at best: bytes read, the rate of a large matrix product, one more launch in a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsmoe_op.cli import timing
from dsmoe_op.cli.comparison import DTYPES
from dsmoe_op.cli.problem import free_bytes
from dsmoe_op.cli.shapes import Ceilings

GPU_BYTES, CPU_BYTES = 1 << 32, 1 << 29
GPU_SIZE, CPU_SIZE = 8192, 1024
"""Rows and columns of the two random matrices that are multiplied."""
LAUNCHES = 400
READ_TILES = ((4096, 4, 8), (4096, 8, 4), (8192, 8, 4), (8192, 16, 2), (16384, 16, 2))
"""Elements that a program reads at once, warps, programs for each multiprocessor."""


def measure(device: torch.device, dtypes: Sequence[str]) -> Ceilings:
    if device.type == "cpu":
        return Ceilings(bandwidth=_cpu_bandwidth(), flops={dtype: _cpu_flops(dtype) for dtype in dtypes})
    return Ceilings(
        bandwidth=_gpu_bandwidth(device),
        flops={dtype: _gpu_flops(dtype, device) for dtype in dtypes},
        cache=float(torch.cuda.get_device_properties(device).L2_cache_size),
        launch_us=_launch_us(device),
    )


def as_json(ceilings: Ceilings) -> dict[str, Any]:
    return {
        "read_tb_per_s": round(ceilings.bandwidth / 1e12, 4),
        "tflop_per_s": {dtype: round(flops / 1e12, 3) for dtype, flops in ceilings.flops.items()},
        "cache_mb": round(ceilings.cache / 1e6, 1) if ceilings.cache != float("inf") else None,
        "launch_us": round(ceilings.launch_us, 3),
    }


def words(ceilings: Ceilings) -> str:
    flops = ", ".join(f"{dtype} matmul {rate / 1e12:.4g} TFLOP/s" for dtype, rate in ceilings.flops.items())
    launch = f", one more launch in a graph {ceilings.launch_us:.2f} us" if ceilings.launch_us else ""
    return f"reads {ceilings.bandwidth / 1e12:.3g} TB/s, {flops}{launch}"


def _gpu_bandwidth(device: torch.device) -> float:
    """The best of several sums over random numbers, Triton's and torch's."""
    elements = min(GPU_BYTES, free_bytes(device) // 2) // 4 // 2**24 * 2**24
    data = torch.randn(max(elements, 2**24), device=device)
    runs: list[Callable[[], object]] = [lambda: data.sum()]
    runs += [_read(data, *tile) for tile in READ_TILES]
    return data.nbytes / (1e-6 * min(map(timing.median_us, runs)))


def _read(data: Tensor, block: int, warps: int, per_multiprocessor: int) -> Callable[[], object]:
    from dsmoe_op.cli.probes import read_sum

    programs = per_multiprocessor * torch.cuda.get_device_properties(data.device).multi_processor_count
    out = torch.empty(programs, device=data.device)

    def run() -> None:
        read_sum[(programs,)](data, out, data.numel(), BLOCK=block, num_warps=warps)

    return run


def _gpu_flops(dtype: str, device: torch.device) -> float:
    a, b = (torch.randn(GPU_SIZE, GPU_SIZE, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    return 2 * GPU_SIZE**3 / (1e-6 * timing.median_us(lambda: torch.mm(a, b), repeats=100))


def _launch_us(device: torch.device) -> float:
    """Of a kernel of one program that does next to nothing, in a graph of nothing else."""
    from dsmoe_op.cli.probes import touch

    out = torch.zeros(1, device=device)

    def call(i: int) -> Tensor:
        touch[(1,)](out)
        return out

    captured = timing.capture(call, LAUNCHES)
    return timing.median_us(captured.graph.replay) / LAUNCHES


def _cpu_bandwidth() -> float:
    data = torch.ones(CPU_BYTES // 4)
    return data.nbytes / _fastest(lambda: data.sum())


def _cpu_flops(dtype: str) -> float:
    a, b = (torch.randn(CPU_SIZE, CPU_SIZE, dtype=DTYPES[dtype]) for _ in range(2))
    return 2 * CPU_SIZE**3 / _fastest(lambda: torch.mm(a, b))


def _fastest(run: Callable[[], object], repeats: int = 4) -> float:
    """Seconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
