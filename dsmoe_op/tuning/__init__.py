"""Tile choice as data: a kernel's tiles, each with the most rows it is for. Chosen from sizes known on the host alone.

Few tiles, so that all that can be chosen are compiled together before the first call (`variants`).
Bytes of shared memory of a GEMM tile: num_stages * block_k * (block_m + block_n * accumulators) * itemsize.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """One program's part of a product [M, K] x [K, N]. A gated GEMM 1 has two products of block_n columns."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


Table = tuple[tuple[float, Tile], ...]
"""(most rows, tile), ascending; the last one has no limit."""

ALL = float("inf")

# Up to 32 rows the weights' bytes decide: narrow tiles for many programs, deep loads. Above, wgmma's 64 rows and more.
_GEMM: dict[tuple[str, str], Table] = {
    ("gemm1", "16bit"): (
        (8, Tile(16, 32, 128, 4, 5)),
        (24, Tile(32, 32, 128, 4, 4)),
        (48, Tile(64, 64, 64, 4, 4)),
        (ALL, Tile(128, 128, 64, 8, 3)),
    ),
    ("gemm2", "16bit"): (
        (8, Tile(16, 64, 128, 4, 5)),
        (24, Tile(32, 64, 128, 4, 4)),
        (48, Tile(64, 128, 64, 4, 4)),
        (ALL, Tile(128, 128, 64, 8, 4)),
    ),
    ("gemm1", "tf32"): (
        (24, Tile(16, 32, 64, 4, 4)),
        (ALL, Tile(64, 64, 32, 4, 4)),
    ),
    ("gemm2", "tf32"): (
        (24, Tile(16, 64, 64, 4, 4)),
        (ALL, Tile(64, 128, 32, 4, 4)),
    ),
    # On the ordinary units.
    ("gemm1", "fp32"): (
        (24, Tile(16, 32, 32, 4, 3)),
        (ALL, Tile(64, 32, 32, 8, 3)),
    ),
    ("gemm2", "fp32"): (
        (24, Tile(16, 64, 32, 4, 3)),
        (ALL, Tile(64, 64, 32, 8, 3)),
    ),
}

_ROUTER: dict[str, Table] = {
    "plain": ((64, Tile(16, 8, 256, 4, 6)), (1024, Tile(16, 32, 256, 4, 4)), (ALL, Tile(64, 128, 64, 4, 4))),
    "split": ((64, Tile(16, 8, 256, 4, 4)), (1024, Tile(16, 32, 128, 4, 4)), (ALL, Tile(64, 64, 64, 4, 3))),
    "tf32x3": ((64, Tile(16, 8, 128, 4, 4)), (1024, Tile(16, 32, 128, 4, 3)), (ALL, Tile(64, 64, 32, 4, 3))),
    "ieee": ((64, Tile(16, 16, 64, 4, 4)), (ALL, Tile(32, 64, 32, 4, 3))),
}

_SORT_BLOCKS = ((512, (512, 4)), (ALL, (4096, 8)))
"""(most slots, (block, num_warps))"""


def gemm_kind(dtype: torch.dtype, allow_tf32: bool) -> str:
    """The part of the GEMM tables that a dtype uses."""
    if dtype != torch.float32:
        return "16bit"
    return "tf32" if allow_tf32 else "fp32"


def gemm_tile(kernel: str, kind: str, rows: float) -> Tile:
    """Tile of "gemm1" or "gemm2".

    Args:
        rows: expected rows of an expert, T*K/E; T for the shared expert.
    """
    return _pick(_GEMM[kernel, kind], rows)


def gemm_variants(kernel: str, kind: str) -> tuple[Tile, ...]:
    """Every tile that `gemm_tile` can choose."""
    return tuple(tile for _, tile in _GEMM[kernel, kind])


def router_tile(T: int, product: str) -> Tile:
    """Tile of the router; `product` as in kernels/router.py."""
    return _pick(_ROUTER[product], T)


def router_variants(product: str) -> tuple[Tile, ...]:
    """Every tile that `router_tile` can choose."""
    return tuple(tile for _, tile in _ROUTER[product])


def sort_block(num_slots: int) -> tuple[int, int]:
    """(slots a program reads at once, num_warps) of the row order's kernel."""
    return next(block for most, block in _SORT_BLOCKS if num_slots <= most)


def sort_variants() -> tuple[tuple[int, int], ...]:
    """Everything that `sort_block` can choose."""
    return tuple(block for _, block in _SORT_BLOCKS)


def _pick(table: Table, rows: float) -> Tile:
    return next(tile for most, tile in table if rows <= most)
