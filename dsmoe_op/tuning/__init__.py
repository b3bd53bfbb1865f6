"""Tile choice as data, from sizes known on the host alone.

What a GPU was measured to be fastest with comes first: the user's table (`use_table`), then the library's own for that
GPU (`<gpu>.json` here, by `python -m dsmoe_op tune`). For other shapes and GPUs there is a heuristic: a kernel's tiles,
each with the most rows it is for.

Few tiles, so that all that can be chosen are compiled together before the first call (`layer_choices`).
Bytes of shared memory of a GEMM tile: num_stages * block_k * (block_m + rows of w) * itemsize.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsmoe_op.formats import FORMATS
from dsmoe_op.tuning.tables import BUCKETS, Table, bucket, load_table, save_table, shipped
from dsmoe_op.tuning.tile import ONE_LAUNCH_TOKENS, Choice, LayerShape, LayerTiles, Tile, one_launch

__all__ = ["Choice", "LayerShape", "LayerTiles", "Table", "Tile", "load_table", "save_table", "use_table"]

Tiles = tuple[tuple[float, Tile], ...]
"""(most rows, tile), ascending; the last one has no limit."""

ALL = float("inf")


class OrderBlock(NamedTuple):
    """Slots that a program of the row order places at once, and its warps."""

    slots: int
    num_warps: int
    whole: bool = False  # it holds all slots of a call, so that one chunk does and no program waits


class RouterTile(NamedTuple):
    """The router's tile, and how the inner sum over H is split among programs."""

    tile: Tile
    columns: int
    """of H in each split but the last, a multiple of the tile's block_k"""
    splits: int


class Routed(NamedTuple):
    """Tiles of the routed experts' products, up to a size. Both have one block_m, that of the map of blocks."""

    most_rows: float  # expected rows of an expert, T*K/E
    most_slots: float  # T*K
    gemm1: Tile
    gemm2: Tile


_MANY_ROWS_OF_4_BITS = (
    Tile(64, 64, 128, 8, 3, swap=True, least_m=16),
    Tile(64, 128, 128, 8, 3, swap=True, least_m=16),
)
_FEW_ROWS_OF_4_BITS = (
    Tile(16, 32, 256, 4, 3, swap=True, persistent=True),
    Tile(16, 128, 128, 4, 4, swap=True, persistent=True),
)
_MANY_ROWS_OF_FP8 = (
    Tile(64, 64, 128, 4, 3, swap=True, persistent=True, least_m=16),
    Tile(64, 128, 128, 4, 3, swap=True, persistent=True, least_m=16),
)
"""GEMM 1 and GEMM 2 of quantised weights."""

_ROUTED: dict[str, tuple[Routed, ...]] = {
    # Up to 8 rows the bytes of the weights decide: many programs with deep loads. From 28 on the matrix unit does.
    "16bit": (
        Routed(8, 16, Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
        Routed(8, ALL, Tile(16, 32, 128, 4, 3, swap=True), Tile(16, 128, 128, 4, 3, swap=True)),
        Routed(28, ALL, Tile(32, 32, 128, 4, 4, swap=True), Tile(32, 64, 128, 4, 3, swap=True)),
        Routed(
            48,
            ALL,
            Tile(64, 128, 64, 4, 4, tma=True, least_m=16),
            Tile(64, 128, 64, 4, 3, tma=True, least_m=16),
        ),
        Routed(
            ALL,
            ALL,
            Tile(128, 128, 64, 8, 4, tma=True, least_m=16),
            Tile(128, 256, 64, 8, 3, persistent=True, least_m=16),
        ),
    ),
    "tf32": (
        Routed(24, ALL, Tile(16, 32, 64, 4, 4), Tile(16, 64, 64, 4, 4)),
        Routed(ALL, ALL, Tile(64, 64, 32, 4, 4), Tile(64, 128, 32, 4, 4)),
    ),
    # On the ordinary units.
    "fp32": (
        Routed(24, ALL, Tile(16, 32, 32, 4, 3), Tile(16, 64, 32, 4, 3)),
        Routed(ALL, ALL, Tile(64, 32, 32, 8, 3), Tile(64, 64, 32, 8, 3)),
    ),
    # Quantised weights: their numbers are made in registers, from where the matrix unit takes its longer side. A step
    # of fp8 is the 128 columns that share a scale.
    "fp8": (
        Routed(16, ALL, Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
        Routed(24, ALL, Tile(32, 64, 128, 4, 3, swap=True), Tile(32, 128, 128, 4, 3, swap=True)),
        Routed(ALL, ALL, *_MANY_ROWS_OF_FP8),
    ),
    "4bit": (
        Routed(16, 16, Tile(16, 32, 256, 4, 3, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
        # Programs of one warp (`coded_few`), which decode a weight again for each eight rows; of few slots the
        # persistent programs of more rows would be too few.
        Routed(8, ALL, *_FEW_ROWS_OF_4_BITS),
        Routed(16, 256, *_FEW_ROWS_OF_4_BITS),
        Routed(
            28,
            ALL,
            Tile(32, 64, 128, 4, 4, swap=True, persistent=True),
            Tile(32, 128, 128, 4, 3, swap=True, persistent=True),
        ),
        Routed(64, ALL, *(tile._replace(persistent=True) for tile in _MANY_ROWS_OF_4_BITS)),
        # Slower than 64 rows where the weights are such that the products are the ordinary ones. These have the stages,
        # two, with which they fit on a GPU of 99 KiB.
        Routed(ALL, ALL, *(tile._replace(block_m=128, num_stages=2, persistent=True) for tile in _MANY_ROWS_OF_4_BITS)),
    ),
    "fp32_4bit": (Routed(ALL, ALL, Tile(16, 32, 64, 4, 3), Tile(16, 64, 64, 4, 3)),),
}

_NARROW: dict[str, tuple[Tile, Tile]] = {
    "16bit": (Tile(8, 32, 128, 4, 4, swap=True), Tile(8, 128, 128, 4, 4, swap=True)),
    "fp8": (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
    "4bit": (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
}
"""GEMM 1 and 2 of one launch whose GEMM 1 has fewer tiles than a GPU has multiprocessors: programs share them."""
AT_ONCE = 264
"""Programs of few tokens' GEMM 1, two on each multiprocessor, from which on more would only wait for one another."""
MOST_SPLITS = 4
_SPLIT_LEAST = 1024
"""Columns of H that are worth a program of their own."""

# The shared expert's, by T: (most T, tiles by falling size). The first one with a program for nearly each SM is taken,
# else the last.
_SHARED: dict[tuple[str, str], tuple[tuple[float, tuple[Tile, ...]], ...]] = {
    ("gemm1", "16bit"): (
        (16, (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 16, 128, 4, 6, swap=True))),
        (64, (Tile(64, 32, 128, 4, 3, swap=True), Tile(64, 16, 128, 4, 4, swap=True))),
        (ALL, (Tile(128, 128, 64, 8, 4, tma=True, least_m=16), Tile(64, 64, 64, 4, 4, tma=True))),
    ),
    ("gemm2", "16bit"): (
        (16, (Tile(16, 64, 128, 4, 4, swap=True), Tile(16, 32, 128, 4, 4, swap=True))),
        (64, (Tile(64, 64, 128, 4, 3, swap=True), Tile(64, 32, 128, 4, 3, swap=True))),
        (ALL, (Tile(128, 256, 64, 8, 3, persistent=True, least_m=16), Tile(64, 128, 64, 4, 3, tma=True))),
    ),
    ("gemm1", "tf32"): ((24, (Tile(16, 32, 64, 4, 4),)), (ALL, (Tile(64, 64, 32, 4, 4),))),
    ("gemm2", "tf32"): ((24, (Tile(16, 64, 64, 4, 4),)), (ALL, (Tile(64, 128, 32, 4, 4),))),
    ("gemm1", "fp32"): ((24, (Tile(16, 32, 32, 4, 3),)), (ALL, (Tile(64, 32, 32, 8, 3),))),
    ("gemm2", "fp32"): ((24, (Tile(16, 64, 32, 4, 3),)), (ALL, (Tile(64, 64, 32, 8, 3),))),
    ("gemm1", "fp8"): (
        (16, (Tile(16, 32, 128, 4, 6, swap=True),)),
        (64, (Tile(32, 32, 128, 4, 4, swap=True),)),
        (
            ALL,
            (
                Tile(128, 32, 128, 8, 3, swap=True, persistent=True, least_m=16),
                Tile(64, 64, 128, 4, 3, swap=True, least_m=16),
            ),
        ),
    ),
    ("gemm2", "fp8"): (
        (16, (Tile(16, 64, 128, 4, 4, swap=True),)),
        (64, (Tile(32, 64, 128, 4, 4, swap=True),)),
        (ALL, (Tile(128, 64, 128, 8, 3, swap=True, persistent=True, least_m=16),)),
    ),
    ("gemm1", "4bit"): (
        (16, (Tile(16, 32, 256, 4, 4, swap=True),)),
        (64, (Tile(32, 64, 128, 4, 4, swap=True),)),
        (ALL, (_MANY_ROWS_OF_4_BITS[0],)),
    ),
    ("gemm2", "4bit"): (
        (16, (Tile(16, 64, 256, 4, 3, swap=True),)),
        (64, (Tile(32, 64, 128, 4, 3, swap=True),)),
        (ALL, (_MANY_ROWS_OF_4_BITS[1],)),
    ),
    ("gemm1", "fp32_4bit"): ((ALL, (Tile(16, 32, 64, 4, 3),)),),
    ("gemm2", "fp32_4bit"): ((ALL, (Tile(16, 64, 64, 4, 3),)),),
}
_ENOUGH_PROGRAMS = 100
OVERLAPPING_SLOTS = 16
"""T*K up to which launches overlap (`LayerTiles.overlaps`)."""
_OVERLAPPING_FEW = 64
"""The same around the products of `coded_few`."""

_ROUTER: dict[str, Tiles] = {
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

_CHOICE_APART = 128
"""Tokens that are chosen for in a program each: about as many as multiprocessors, for each to load its own."""

_CHOICE_SHARES = 4
"""Warps for one token's choice at most: more would have more picks to compare than they save in reading."""

_ORDER: tuple[tuple[float, OrderBlock], ...] = (
    (32, OrderBlock(32, 4, whole=True)),
    (64, OrderBlock(64, 4, whole=True)),
    (ALL, OrderBlock(128, 4)),
)
"""(most slots, block)"""
_ORDER_ONE_CHUNK, _ORDER_LEAST = 256, 128


def gemm_kind(dtype: torch.dtype, allow_tf32: bool, format: str | None = None) -> str:
    """The part of the GEMM tables that rows of a dtype and weights of a format use."""
    if format is not None and FORMATS[format].bits == 8:
        return "fp8"
    if format is not None:
        return "4bit" if dtype != torch.float32 else "fp32_4bit"
    if dtype != torch.float32:
        return "16bit"
    return "tf32" if allow_tf32 else "fp32"


def layer_kind(dtype: torch.dtype, allow_tf32: bool, routed: str | None = None, shared: str | None = None) -> str:
    """The same for a layer: one where both branches have it, else that of the routed experts, "+", the shared one's."""
    kinds = [gemm_kind(dtype, allow_tf32, format) for format in (routed, shared)]
    return "+".join(dict.fromkeys(kinds))


_own: Table | None = None
"""The user's."""


def use_table(table: Table | None) -> None:
    """Lets calls from now on look into this table first, on every GPU; None: no longer.

    `use_table(load_table("my.json"))` before the model is prepared or first called. It may also come later: calls made
    with another table share nothing with later ones, which compile what is new to them at their first call. A CUDA
    graph stays as it was captured.

    Raises:
        TypeError: it is no table, such as a path.
    """
    global _own
    if table is not None and not isinstance(table, Table):
        raise TypeError(f"table: expected a table of load_table, or None, got {type(table).__name__}")
    _own = table


def own_table() -> Table | None:
    """The one that `use_table` set."""
    return _own


def tables_of(own: Table | None, gpu: str | None) -> tuple[Table, ...]:
    """Where to look, in that order, on a GPU of that name. The file of a name is read once."""
    its = None if gpu is None else shipped(gpu)
    return tuple(table for table in (own, its) if table is not None)


@functools.lru_cache(maxsize=1024)
def layer_choice(shape: LayerShape, T: int, tables: tuple[Table, ...] = ()) -> Choice:
    """Tiles and schedule of a call: those of the first table that has this shape and bucket of T, else the heuristic's.

    The tables are as `tables_of` gives them.
    """
    return _row(shape, bucket(T), tables) or _heuristic(shape, T)


@functools.lru_cache(maxsize=256)
def layer_choices(shape: LayerShape, tables: tuple[Table, ...] = ()) -> tuple[Choice, ...]:
    """Choices that name, between them, all tiles that `layer_choice` can choose at any T, each with its schedule."""
    found = [_row(shape, most, tables) for most in BUCKETS]
    choices = dict.fromkeys(choice for choice in found if choice is not None)
    if None in found:
        schedule = _schedule(shape.S)
        choices |= dict.fromkeys(Choice(tiles, schedule) for tiles in layer_variants(shape.kind))
        few = range(1, OVERLAPPING_SLOTS // shape.K + 1)
        choices |= dict.fromkeys(_heuristic(shape, T) for T in few if _splits(shape, T) > 1)
    return tuple(choices)


def _row(shape: LayerShape, most: float, tables: tuple[Table, ...]) -> Choice | None:
    choices = (table.choice(shape, most) for table in tables)
    return next((choice for choice in choices if choice is not None), None)


# --- the heuristic --------------------------------------------------------------------------------------------------


def _heuristic(shape: LayerShape, T: int) -> Choice:
    """The shared expert runs beside the routed ones, or as one of them where these are few and narrow."""
    tiles = layer_tiles(shape.kind, T, shape.H, shape.E, shape.K, shape.S)
    kind, _, other = shape.kind.partition("+")
    splits = _splits(shape, T)
    if splits > 1:
        gemm1, gemm2 = _NARROW[kind]
        tiles = tiles._replace(gemm1=gemm1._replace(splits=splits), gemm2=gemm2, overlaps=True, one_launch=True)
        if shape.S and not other and shape.S % shape.I == 0:
            return Choice(tiles, "fused")
    return Choice(tiles, _schedule(shape.S))


def _schedule(S: int) -> str:
    return "dual" if S else "serial"


def _splits(shape: LayerShape, T: int) -> int:
    """Programs for a tile of GEMM 1: several where there are few tiles for many multiprocessors."""
    kind, slots = shape.kind.partition("+")[0], T * shape.K
    if kind not in _NARROW or slots > OVERLAPPING_SLOTS or T > _NARROW[kind][0].block_m:
        return 1
    gemm1, _ = _NARROW[kind]
    programs = min(shape.E, slots) * -(-shape.I // gemm1.block_n)
    splits = MOST_SPLITS
    while splits > 1 and (
        splits * programs > AT_ONCE
        or shape.H < splits * _SPLIT_LEAST
        or shape.H % (splits * gemm1.block_k)  # no whole steps in a part
    ):
        splits //= 2
    return splits


@functools.lru_cache(maxsize=1024)
def layer_tiles(kind: str, T: int, H: int, E: int, K: int, S: int) -> LayerTiles:
    """The heuristic's tiles of a call; `kind` as `gemm_kind` says, sizes as in `checks.Dims`."""
    rows, slots = T * K / E, T * K
    routed_kind, _, shared_kind = kind.partition("+")
    routed = next(r for r in _ROUTED[routed_kind] if rows <= r.most_rows and slots <= r.most_slots)
    shared = []
    for kernel, columns in (("gemm1", S), ("gemm2", H)):
        tiles = next(tiles for most, tiles in _SHARED[kernel, shared_kind or kind] if most >= T)
        enough = (t for t in tiles if -(-T // t.block_m) * -(-columns // _columns(t)) >= _ENOUGH_PROGRAMS)
        shared.append(next(enough, tiles[-1]))
    one = one_launch(kind, T, routed.gemm1, routed.gemm2)
    overlaps = one and slots <= OVERLAPPING_SLOTS and rows <= _ROUTED[routed_kind][0].most_rows
    overlaps |= _is_of_few_rows(routed) and slots <= _OVERLAPPING_FEW
    return LayerTiles(routed.gemm1, routed.gemm2, shared[0], shared[1], overlaps, one)


def _is_of_few_rows(routed: Routed) -> bool:
    """Whether the products are those of `coded_few`, where that takes the weights."""
    return routed.gemm1.persistent and routed.gemm1.block_m == 16


def _columns(tile: Tile) -> int:
    """Columns that a program takes at once; a persistent one has 128 or more, whatever those of its place are."""
    return max(tile.block_n, 128) if tile.persistent else tile.block_n


def layer_variants(kind: str) -> tuple[LayerTiles, ...]:
    """Tiles that name, between them, every one that `layer_tiles` can choose at any T; some are named twice.

    So too those that can be of one launch, and those that can overlap.
    """
    routed_kind, _, shared_kind = kind.partition("+")
    routed = _ROUTED[routed_kind]

    def variants(routed: Sequence[Routed], most: float, *, overlaps: bool, one: bool) -> list[LayerTiles]:
        tables = [_SHARED[kernel, shared_kind or kind] for kernel in ("gemm1", "gemm2")]
        shared = (_up_to(most, table) for table in tables)
        return _side_by_side(routed, *shared, overlaps=overlaps, one=one)

    found = variants(routed, ALL, overlaps=False, one=False)
    if few := [r for r in routed if one_launch(kind, 1, r.gemm1, r.gemm2)]:
        found += variants(few, ONE_LAUNCH_TOKENS, overlaps=False, one=True)
        found += variants(few[:1], OVERLAPPING_SLOTS, overlaps=True, one=True)
    if own := [r for r in routed if _is_of_few_rows(r)]:
        found += variants(own, _OVERLAPPING_FEW, overlaps=True, one=False)
    return tuple(found)


def _up_to(most: float, table: tuple[tuple[float, tuple[Tile, ...]], ...]) -> list[Tile]:
    """The tiles of the entries that some T up to `most` falls into."""
    ends = (0.0, *(limit for limit, _ in table))
    return [tile for end, (_, tiles) in zip(ends, table, strict=False) if end < most for tile in tiles]


def _side_by_side(
    routed: Sequence[Routed], shared_gemm1: Sequence[Tile], shared_gemm2: Sequence[Tile], *, overlaps: bool, one: bool
) -> list[LayerTiles]:
    def nth(items: Sequence[Any], n: int) -> Any:
        return items[min(n, len(items) - 1)]

    return [
        LayerTiles(
            nth(routed, n).gemm1, nth(routed, n).gemm2, nth(shared_gemm1, n), nth(shared_gemm2, n), overlaps, one
        )
        for n in range(max(len(routed), len(shared_gemm1), len(shared_gemm2)))
    ]


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


def choice_tokens(T: int, most: int) -> int:
    """Tokens that one program chooses for, side by side; at most `most`."""
    return 1 if T <= _CHOICE_APART else most


def choice_shares(rows: int, groups: int | None, top_k: int) -> int:
    """Warps that share a token where few slots are all of a call, a power of two.

    Args:
        rows: of 32 logits that a token has; a share is two at least.
        groups: of experts, of which some are chosen, and a warp has whole ones; None where all stay.
        top_k: picks of each share, which are written out one by one and take long to compile.
    """
    if top_k > 16 or (groups is not None and groups > 32):  # a warp compares 32 groups at once
        return 1
    return max(1, min(_CHOICE_SHARES, rows // 2, rows if groups is None else groups))


def order_block(num_slots: int) -> OrderBlock:
    """Block of the row order's kernel."""
    return next(block for most, block in _ORDER if num_slots <= most)


def order_variants() -> tuple[OrderBlock, ...]:
    """Everything that `order_block` can choose."""
    return tuple(block for _, block in _ORDER)


def order_chunk_size(num_slots: int, alone: bool) -> int:
    """Slots that one program of the row order places, a power of two; `alone`: the order is a launch of its own.

    Up to 256 slots are one chunk: nobody waits, and an order that is alone needs no zeroed counts, which are a launch
    more. Then a program's time grows with its slots, and with the number of chunks, whose counts it adds up: up to 256
    chunks of 128 slots, 512 of 256, 1024 of 512.
    """
    chunk = _ORDER_ONE_CHUNK if alone or num_slots <= _ORDER_ONE_CHUNK else _ORDER_LEAST
    while 2 * chunk * chunk < num_slots:
        chunk *= 2
    return chunk
