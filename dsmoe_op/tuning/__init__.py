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


class OrderBlock(NamedTuple):
    """Slots that a program of the row order places at once, and its warps."""

    slots: int
    num_warps: int


class RouterTile(NamedTuple):
    """The router's tile, and how the inner sum over H is split among programs."""

    tile: Tile
    columns: int
    """of H in each split but the last, a multiple of the tile's block_k"""
    splits: int


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

# Up to 16 tokens the weight's bytes decide, and many programs that have all their bytes in flight at once; where there
# are enough tokens, wgmma's 64 rows, and tiles so large that the matrix units and not L2 decide.
_ROUTER: dict[str, Table] = {
    "plain": (
        (16, Tile(16, 16, 256, 4, 3)),
        (64, Tile(64, 32, 128, 4, 4)),
        (1024, Tile(64, 64, 128, 4, 3)),
        (ALL, Tile(128, 128, 64, 8, 3)),
    ),
    "split": ((16, Tile(16, 16, 128, 4, 4)), (64, Tile(16, 32, 128, 4, 4)), (ALL, Tile(64, 64, 64, 4, 3))),
    "tf32x3": ((16, Tile(16, 16, 128, 4, 3)), (64, Tile(16, 32, 128, 4, 3)), (ALL, Tile(64, 64, 32, 4, 3))),
    "ieee": ((64, Tile(16, 16, 64, 4, 4)), (ALL, Tile(32, 64, 32, 4, 3))),
}

_ROUTER_PROGRAMS = 264  # two for each multiprocessor of an H200
_ROUTER_LEAST = 512  # columns of H that are worth a program of their own
_SPLITS = (1, 4, 16)

_ORDER: tuple[tuple[float, OrderBlock], ...] = ((32, OrderBlock(32, 1)), (ALL, OrderBlock(128, 4)))
"""(most slots, block)"""
_ORDER_LEAST, _ORDER_CHUNKS = 256, 64


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


def router_tile(T: int, E: int, H: int, product: str) -> RouterTile:
    """Tile and splits of the router for E rows of weight; `product` as in kernels/router.py."""
    tile = next(tile for most, tile in _ROUTER[product] if most >= T)
    tiles = -(-T // tile.block_m) * -(-E // tile.block_n)
    splits = max(1, min(_ROUTER_PROGRAMS // tiles, router_most_splits(H)))
    blocks = -(-H // tile.block_k)
    columns = -(-blocks // splits) * tile.block_k
    return RouterTile(tile, columns, -(-H // columns))


def router_most_splits(H: int) -> int:
    """Splits for any T and E are at most that."""
    return max(1, min(H // _ROUTER_LEAST, _SPLITS[-1]))


def router_variants(product: str) -> tuple[Tile, ...]:
    """Every tile that `router_tile` can choose."""
    return tuple(tile for _, tile in _ROUTER[product])


def splits_variant(splits: int) -> int:
    """For how many partial sums the kernel that adds them is compiled, at least so many: few numbers."""
    return next(variant for variant in _SPLITS if splits <= variant)


def splits_variants(most_splits: int) -> tuple[int, ...]:
    """Everything that `splits_variant` can be for at most so many."""
    return tuple(variant for variant in _SPLITS if variant <= splits_variant(most_splits))


def order_block(num_slots: int) -> OrderBlock:
    """Block of the row order's kernel."""
    return next(block for most, block in _ORDER if num_slots <= most)


def order_variants() -> tuple[OrderBlock, ...]:
    """Everything that `order_block` can choose."""
    return tuple(block for _, block in _ORDER)


def order_chunk(num_slots: int) -> int:
    """Slots that one program of the row order places: a power of two, so many that there are at most 64 programs."""
    chunk = _ORDER_LEAST
    while chunk * _ORDER_CHUNKS < num_slots:
        chunk *= 2
    return chunk


def _pick(table: Table, rows: float) -> Tile:
    return next(tile for most, tile in table if rows <= most)
