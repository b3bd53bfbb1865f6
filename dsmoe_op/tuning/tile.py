"""What is chosen for a product of the experts."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """One program's part of a product [M, K] x [K, N]. A gated GEMM 1 has twice block_n rows of w, in one product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False  # rows of w on the matrix unit's longer side, tokens on its shorter one
    tma: bool = False  # w is fetched by the copy engine
    persistent: bool = False  # by a kernel whose name says so, or `coded_few`, where that takes the weights
    least_m: int = 0  # a block half empty or emptier takes a tile of half the height, down to this many rows; 0: never
    tail: int = 0  # so many rows more than block_m may an expert's last block have, in a product of their own
    splits: int = 1  # programs that share a GEMM 1 tile of one launch, each with a part of H, where H has whole parts


class LayerTiles(NamedTuple):
    """Tiles of one call. gemm1 and gemm2 have one block_m and one tail, those of the map of blocks."""

    gemm1: Tile
    gemm2: Tile
    shared_gemm1: Tile
    shared_gemm2: Tile
    overlaps: bool
    """Whether a launch may start before the one ahead of it on its stream has ended: pays where launches are short."""
    one_launch: bool = False
    """Whether the routed experts' products are one launch (`experts`), as `one_launch` says of the other fields."""


ONE_LAUNCH_TOKENS = 64
"""T up to which the products can be one launch."""

ONE_LAUNCH_KINDS = ("16bit", "fp8", "4bit")
"""Of the routed experts' products, for which there is such a launch."""


def one_launch(kind: str, most: float, gemm1: Tile, gemm2: Tile) -> bool:
    """Whether calls of at most that many tokens have the routed experts' products in one launch, with these tiles."""
    plain = not any(t.tma or t.persistent or t.tail or t.least_m not in (0, t.block_m) for t in (gemm1, gemm2))
    plain &= gemm2.splits == 1
    alike = (gemm1.block_m, gemm1.num_warps) == (gemm2.block_m, gemm2.num_warps)
    return kind.partition("+")[0] in ONE_LAUNCH_KINDS and most <= ONE_LAUNCH_TOKENS and plain and alike


class Choice(NamedTuple):
    """Tiles of one call, and the schedule that "auto" means for it where there is a shared expert."""

    tiles: LayerTiles
    schedule: str


class LayerShape(NamedTuple):
    """All but T that a choice hangs on; `kind` as `gemm_kind` says, sizes as in `checks.Dims`."""

    kind: str
    H: int
    I: int
    E: int
    K: int
    S: int
