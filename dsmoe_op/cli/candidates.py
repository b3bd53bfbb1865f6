"""What `tune` times: tiles for each launch, schedules for each layer. The heuristic's is always the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from dsmoe_op import schedule, tuning
from dsmoe_op.cli import shapes
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.tuning import Choice, LayerShape, LayerTiles, Tile
from dsmoe_op.tuning.tables import GEMMS, SCHEDULES, SHARED, product_kind

_FEW_ROWS: dict[tuple[str, str], tuple[Tile, ...]] = {
    ("16bit", "gemm1"): (
        Tile(16, 32, 128, 4, 3, swap=True),
        Tile(16, 32, 128, 4, 4, swap=True),
        Tile(16, 32, 128, 4, 5, swap=True),
        Tile(16, 16, 128, 4, 6, swap=True),
        Tile(8, 32, 128, 4, 4, swap=True),
        Tile(8, 64, 128, 4, 4, swap=True),
        Tile(16, 64, 128, 4, 4, swap=True),
        Tile(32, 32, 128, 4, 4, swap=True),
        Tile(32, 64, 128, 4, 4, swap=True),
    ),
    ("16bit", "gemm2"): (
        Tile(16, 64, 128, 4, 3, swap=True),
        Tile(16, 64, 128, 4, 5, swap=True),
        Tile(16, 128, 128, 4, 3, swap=True),
        Tile(16, 128, 128, 4, 5, swap=True),
        Tile(8, 64, 128, 4, 3, swap=True),
        Tile(8, 128, 128, 4, 3, swap=True),
        Tile(32, 64, 128, 4, 3, swap=True),
        Tile(32, 128, 128, 4, 4, swap=True),
    ),
    ("4bit", "gemm1"): (
        Tile(16, 32, 128, 4, 4, swap=True),
        Tile(16, 32, 256, 4, 3, swap=True),
        Tile(16, 32, 256, 4, 4, swap=True),
        Tile(16, 64, 256, 4, 3, swap=True),
        Tile(16, 16, 256, 4, 4, swap=True),
        Tile(32, 32, 256, 4, 3, swap=True),
        Tile(32, 64, 128, 4, 4, swap=True),
        Tile(16, 32, 256, 4, 3, swap=True, persistent=True),
        Tile(32, 64, 128, 4, 4, swap=True, persistent=True),
    ),
    ("4bit", "gemm2"): (
        Tile(16, 64, 128, 4, 4, swap=True),
        Tile(16, 64, 256, 4, 3, swap=True),
        Tile(16, 128, 128, 4, 4, swap=True),
        Tile(16, 128, 256, 4, 3, swap=True),
        Tile(32, 64, 128, 4, 3, swap=True),
        Tile(32, 128, 128, 4, 3, swap=True),
        Tile(16, 128, 128, 4, 4, swap=True, persistent=True),
        Tile(32, 128, 128, 4, 3, swap=True, persistent=True),
    ),
    # A step of fp8 is the 128 columns that share a scale.
    ("fp8", "gemm1"): (
        Tile(16, 32, 128, 4, 4, swap=True),
        Tile(16, 32, 128, 4, 6, swap=True),
        Tile(16, 64, 128, 4, 4, swap=True),
        Tile(32, 32, 128, 4, 4, swap=True),
        Tile(32, 64, 128, 4, 3, swap=True),
    ),
    ("fp8", "gemm2"): (
        Tile(16, 64, 128, 4, 4, swap=True),
        Tile(16, 64, 128, 4, 6, swap=True),
        Tile(16, 128, 128, 4, 4, swap=True),
        Tile(32, 64, 128, 4, 4, swap=True),
        Tile(32, 128, 128, 4, 3, swap=True),
    ),
}
_MANY_ROWS: dict[tuple[str, str], tuple[Tile, ...]] = {
    ("16bit", "gemm1"): (
        Tile(64, 128, 64, 4, 4, tma=True, least_m=16),
        Tile(128, 128, 64, 8, 4, tma=True, least_m=16),
        Tile(128, 128, 64, 8, 4, least_m=16),
        Tile(128, 128, 64, 8, 3, tma=True, least_m=16),
        Tile(128, 128, 64, 8, 4, tma=True, least_m=16, tail=64),
        Tile(32, 64, 128, 4, 3, swap=True),
    ),
    ("16bit", "gemm2"): (
        Tile(64, 128, 64, 4, 3, tma=True, least_m=16),
        Tile(128, 128, 64, 4, 3, tma=True, least_m=16),
        Tile(128, 256, 64, 8, 3, least_m=16),
        Tile(128, 128, 64, 8, 3, least_m=16),
        Tile(128, 256, 64, 8, 3, persistent=True, least_m=16),
        Tile(128, 256, 64, 8, 3, tma=True, least_m=16, tail=64),
    ),
    ("4bit", "gemm1"): (
        Tile(64, 64, 128, 8, 3, swap=True, least_m=16),
        Tile(64, 32, 128, 4, 3, swap=True, least_m=16),
        Tile(64, 64, 128, 8, 3, swap=True, persistent=True, least_m=16),
        Tile(128, 64, 128, 8, 2, swap=True, persistent=True, least_m=16),
    ),
    ("4bit", "gemm2"): (
        Tile(64, 128, 128, 8, 3, swap=True, least_m=16),
        Tile(64, 64, 128, 4, 3, swap=True, least_m=16),
        Tile(64, 128, 128, 8, 3, swap=True, persistent=True, least_m=16),
        Tile(128, 128, 128, 8, 2, swap=True, persistent=True, least_m=16),
    ),
    ("fp8", "gemm1"): (
        Tile(64, 64, 128, 8, 3, swap=True, least_m=16),
        Tile(64, 64, 128, 4, 3, swap=True, least_m=16),
        Tile(64, 32, 128, 4, 4, swap=True, least_m=16),
        Tile(64, 128, 128, 8, 3, swap=True, least_m=16),
        Tile(128, 32, 128, 8, 3, swap=True, least_m=16),
        Tile(64, 64, 128, 4, 3, swap=True, persistent=True, least_m=16),
        Tile(128, 32, 128, 8, 3, swap=True, persistent=True, least_m=16),
    ),
    ("fp8", "gemm2"): (
        Tile(64, 128, 128, 8, 3, swap=True, least_m=16),
        Tile(64, 128, 128, 4, 3, swap=True, least_m=16),
        Tile(64, 128, 128, 4, 3, swap=True, persistent=True, least_m=16),
        Tile(128, 64, 128, 8, 3, swap=True, persistent=True, least_m=16),
    ),
}
_TOGETHER: dict[str, tuple[tuple[Tile, Tile], ...]] = {
    "16bit": (
        (Tile(16, 32, 128, 4, 3, swap=True), Tile(16, 64, 128, 4, 3, swap=True)),
        (Tile(16, 32, 128, 4, 3, swap=True), Tile(16, 128, 128, 4, 3, swap=True)),
        (Tile(8, 32, 128, 4, 4, swap=True), Tile(8, 64, 128, 4, 4, swap=True)),
        (Tile(8, 32, 128, 4, 4, swap=True), Tile(8, 128, 128, 4, 4, swap=True)),
        (Tile(8, 32, 128, 4, 4, swap=True), Tile(8, 256, 128, 4, 2, swap=True)),
    ),
    "4bit": (
        (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
        (Tile(16, 32, 128, 4, 8, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
        (Tile(16, 32, 128, 4, 8, swap=True), Tile(16, 256, 64, 4, 4, swap=True)),
        (Tile(16, 32, 256, 4, 3, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
    ),
    "fp8": (
        (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 64, 128, 4, 4, swap=True)),
        (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 128, 128, 4, 4, swap=True)),
        (Tile(16, 32, 128, 4, 4, swap=True), Tile(16, 256, 128, 4, 2, swap=True)),
    ),
}
"""gemm1 and gemm2 of one launch: its programs all have the memory of the larger one, so the best alone may not do.

Of one token, GEMM 2 in columns of 128 can have more programs than a GPU holds at once (448 at DeepSeek-V3's sizes,
where three fit on each of 132 multiprocessors); in columns of 256 it has half as many.
"""
_FEW_TOKENS, _FEW = 64, 32
"""Up to so many tokens, or expected rows of an expert, tiles for few rows are candidates; above, those for many."""
OVERLAPPING_UP_TO = 16
"""Tokens up to which a layer whose launches overlap is a candidate."""

Candidates = Mapping[str, tuple[Tile, ...]]
"""By the name of the launch."""


def layer_shape(shape: Shape) -> LayerShape:
    formats = shapes.formats_of(shape)
    kind = tuning.layer_kind(torch.bfloat16, False, formats.routed, formats.shared if shape.S else formats.routed)
    return LayerShape(kind, shape.H, shape.I, shape.E, shape.K, shape.S)


def heuristic(shape: Shape, T: int) -> Choice:
    """What a call takes where there is no table."""
    choice = tuning.layer_choice(layer_shape(shape), T)
    routed, shared = shapes.formats_of(shape)
    auto = schedule.resolve("auto", has_shared=shape.S > 0, auto=choice.schedule, one_format=routed == shared)
    return choice._replace(schedule=auto)


def whole(tiles: LayerTiles) -> LayerTiles:
    """With a GEMM 1 whose tiles no programs share, as a launch of its own has it."""
    return tiles._replace(gemm1=tiles.gemm1._replace(splits=1))


def tiles(shape: Shape, T: int) -> Candidates:
    """Tiles of each launch of a layer of T tokens."""
    names = [name for name in GEMMS if shape.S or name not in SHARED]
    first = whole(heuristic(shape, T).tiles)
    return {name: tuple(dict.fromkeys((getattr(first, name), *_others(name, shape, T)))) for name in names}


def _others(name: str, shape: Shape, T: int) -> Iterable[Tile]:
    shared, kernel, layer_kind = name in SHARED, name.removeprefix("shared_"), layer_shape(shape).kind
    kind = product_kind(layer_kind, name)
    few_tokens = T <= _FEW_TOKENS
    few, many = few_tokens, not few_tokens
    if not shared:
        few |= T * shape.K / shape.E <= _FEW
    least, most = 1, max(16, 1 << (T - 1).bit_length())  # rows that a tile can use
    if shared and T > 16:
        least = 32 if T <= 256 else 64
    own = [getattr(variant, name) for variant in tuning.layer_variants(layer_kind)]
    for tile in (*_FEW_ROWS[kind, kernel] * few, *_MANY_ROWS[kind, kernel] * many, *own):
        coded = tile.persistent and kind == "4bit"  # of routed experts; of few tokens with few rows
        refused = (shared and (tile.tail or coded)) or (few_tokens and coded and tile.block_m > 16)
        if least <= tile.block_m <= most and not refused:
            yield tile


def schedules(shape: Shape) -> tuple[str, ...]:
    """Those that a layer of this shape has."""
    if not shape.S:
        return ("serial",)
    return tuple(name for name in SCHEDULES if name != "fused" or shapes.fused_refuses(shape) is None)


def choices(shape: Shape, T: int, best: LayerTiles) -> tuple[Choice, ...]:
    """Layers to time: the heuristic's, and the best tiles, or such as do together, in each schedule."""
    kind = layer_shape(shape).kind
    together = _TOGETHER.get(product_kind(kind, "gemm1"), ())
    pairs = [(best.gemm1, best.gemm2), *(pair for pair in together if pair[0].block_m >= min(T, 16))]
    one = [pair for pair in pairs if tuning.one_launch(kind, T, *pair)]
    one += [(split, gemm2) for gemm1, gemm2 in one for split in _split(gemm1, shape, T)]
    overlaps = (False, True) if T <= OVERLAPPING_UP_TO else (False,)
    found = [
        Choice(best._replace(gemm1=gemm1, gemm2=gemm2, overlaps=o, one_launch=(gemm1, gemm2) in one), schedule)
        for gemm1, gemm2 in dict.fromkeys((pairs[0], *one))
        for schedule in schedules(shape)
        for o in overlaps
    ]
    return tuple(dict.fromkeys((heuristic(shape, T), *found)))


def _split(gemm1: Tile, shape: Shape, T: int) -> Iterator[Tile]:
    """The tile split among more and more programs, as long as a GPU has room for them all at once."""
    programs = min(shape.E, T * shape.K) * -(-shape.I // gemm1.block_n)
    most, step = tuning.MOST_SPLITS, 2 * gemm1.block_k
    while programs < tuning.AT_ONCE and gemm1.splits < most and shape.H % (step * gemm1.splits) == 0:
        gemm1 = gemm1._replace(splits=2 * gemm1.splits)
        programs *= 2
        yield gemm1


KEPT = 0.99
"""What is not faster than this, relative to the heuristic's, gives way to the heuristic's: it may be noise."""


def best_tiles(us: Mapping[str, Mapping[Tile, float]], first: LayerTiles) -> LayerTiles | None:
    """The fastest tiles by the launches' times; gemm1 and gemm2 share a map of blocks. None where none is right.

    Args:
        us: microseconds by launch and tile, without those that are wrong or fail.
        first: the heuristic's.
    """
    pairs = {
        (a, b): us_a + us_b
        for a, us_a in us["gemm1"].items()
        for b, us_b in us["gemm2"].items()
        if (a.block_m, a.tail) == (b.block_m, b.tail)
    }
    if not pairs or any(name in us and not us[name] for name in SHARED):
        return None
    first = whole(first)
    gemm1, gemm2 = fastest(pairs, (first.gemm1, first.gemm2))
    shared = [fastest(us[name], getattr(first, name)) if name in us else gemm1 for name in SHARED]
    return LayerTiles(gemm1, gemm2, shared[0], shared[1], overlaps=False)


Key = TypeVar("Key")


def fastest(us: Mapping[Key, float], first: Key) -> Key:
    """The key with the least time, or `first` where it is hardly slower."""
    best = min(us, key=us.__getitem__)
    return first if first in us and us[best] > KEPT * us[first] else best
