"""Tables of measured choices: what one GPU is fastest with, by a layer's shape and bucket of T, as a file of JSON.

`python -m dsmoe_op tune` writes them. A file has an entry for each shape, and in it a line for each bucket:

    {"gpu": "NVIDIA H200", "made_with": {...}, "shapes": [
      {"kind": "16bit", "H": 7168, "I": 256, "E": 256, "K": 8, "S": 256, "rows": [
        {"up_to": 4, "tokens": 4, "schedule": "dual", "overlaps": false, "gemm1": {"block_m": 16, ...},
         "gemm2": {...}, "shared_gemm1": {...}, "shared_gemm2": {...}, "us": {...}, "heuristic_us": {...}, ...},
        ...
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsmoe_op.tuning.tile import Choice, LayerShape, LayerTiles, Tile, one_launch

BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, math.inf)
"""The most tokens of each bucket."""
_OF_A_DTYPE = (("16bit", "fp8", "4bit"), ("tf32", "fp8", "fp32_4bit"), ("fp32", "fp8", "fp32_4bit"))
"""Kinds of product that a layer's routed and shared experts may have side by side."""
KINDS = frozenset("+".join(dict.fromkeys(kinds)) for some in _OF_A_DTYPE for kinds in itertools.product(some, repeat=2))
_KINDS_ACCEPTED = "one of 16bit, tf32, fp32, fp8, 4bit, fp32_4bit, or two of them that one dtype has, joined by +"
SCHEDULES = ("serial", "dual", "dual_shared_main", "fused")
SHARED = ("shared_gemm1", "shared_gemm2")
GEMMS = ("gemm1", "gemm2", *SHARED)
PARTS = (*GEMMS, "layer")
"""Of what there are times, in microseconds."""
PERSISTENT_M = {"16bit": (128,), "fp8": (64, 128), "4bit": (16, 32, 64, 128)}
"""What block_m of a persistent tile may be, by kind of product; of others it means nothing, and is 128."""
FP8_K, LEAST_4BIT_K = 128, 32
"""block_k of a product with weights in fp8, whose scale may be that of 128 columns, and the least with four bits."""
_RANGES = {
    "block_m": (8, 256),
    "block_n": (8, 512),
    "block_k": (16, 512),
    "num_warps": (1, 16),
    "num_stages": (1, 16),
    "least_m": (0, 256),
    "tail": (0, 128),
    "splits": (1, 16),
}
"""What numbers of a tile may be. More than a GPU's memory or registers hold is still Triton's to refuse."""


def product_kind(kind: str, name: str) -> str:
    """The part of a layer's kind that the product of that name, one of GEMMS, has."""
    routed, _, shared = kind.partition("+")
    return shared or routed if name in SHARED else routed


def bucket(T: int) -> float:
    """The most tokens of the bucket that T is in."""
    return next(most for most in BUCKETS if most >= T)


class Row(NamedTuple):
    """What is fastest for a shape in a bucket, and how fast.

    Attributes:
        tokens: it was measured with.
        us: microseconds of the chosen tiles' launches and of the layer, by the names in PARTS; may be empty.
        heuristic_us: the same of what the heuristic chooses.
        schedules_us: of the layer with the chosen tiles, by schedule.
    """

    tokens: int
    choice: Choice
    us: Mapping[str, float]
    heuristic_us: Mapping[str, float]
    schedules_us: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """Rows by shape and bucket. Two tables are never equal, so that what is kept by table is of that one alone.

    Attributes:
        gpu: name of the one that it was measured on, as PyTorch says.
        made_with: versions.
    """

    gpu: str
    rows: Mapping[tuple[LayerShape, float], Row]
    made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def choice(self, shape: LayerShape, most: float) -> Choice | None:
        """That of the bucket of at most `most` tokens; None where there is no such row."""
        row = self.rows.get((shape, most))
        return None if row is None else row.choice


def file_name(gpu: str) -> str:
    """Of the table that the library has for a GPU of that name, if it has one: "NVIDIA H200" -> nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


@functools.cache
def shipped(gpu: str) -> Table | None:
    """The library's own table for a GPU of that name, read once."""
    path = Path(__file__).with_name(file_name(gpu))
    return load_table(path) if path.is_file() else None


# --- reading --------------------------------------------------------------------------------------------------------


def load_table(path: str | os.PathLike[str]) -> Table:
    """A table as `python -m dsmoe_op tune` writes it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such table. The text names the file, the field, what is accepted and what came.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, {error}") from None
    return _Reader(str(path)).table(value)


class _Reader:
    """Each method takes a value out of the JSON and says where it stood."""

    def __init__(self, name: str) -> None:
        self.name = name

    def table(self, value: Any) -> Table:
        top = self.object(value, "", ("gpu", "shapes"), ("made_with",))
        gpu = self.text(top["gpu"], "gpu")
        made_with = self.object(top.get("made_with", {}), "made_with", (), None)
        for name, version in made_with.items():
            self.text(version, f"made_with.{name}")
        rows: dict[tuple[LayerShape, float], Row] = {}
        for i, entry in enumerate(self.list(top["shapes"], "shapes")):
            at = f"shapes[{i}]"
            fields = self.object(entry, at, (*LayerShape._fields, "rows"))
            shape = self.shape(fields, at)
            for j, row in enumerate(self.list(fields["rows"], f"{at}.rows")):
                key = shape, self.bucket(row, f"{at}.rows[{j}]")
                if key in rows:
                    self.refuse(f"{at}.rows[{j}]", "a shape and up_to that no earlier row has", row["up_to"])
                rows[key] = self.row(row, f"{at}.rows[{j}]", shape, key[1])
        return Table(gpu=gpu, rows=rows, made_with=made_with)

    def shape(self, fields: dict[str, Any], at: str) -> LayerShape:
        if not isinstance(fields["kind"], str) or fields["kind"] not in KINDS:
            self.refuse(f"{at}.kind", _KINDS_ACCEPTED, fields["kind"])
        for name in "HIEKS":
            self.integer(fields[name], f"{at}.{name}", least=0 if name == "S" else 1)
        return LayerShape(*(fields[name] for name in LayerShape._fields))

    def bucket(self, value: Any, at: str) -> float:
        needed = ("up_to", "tokens", "schedule", "overlaps", "gemm1", "gemm2")
        up_to = self.object(value, at, needed, (*SHARED, "us", "heuristic_us", "schedules_us"))["up_to"]
        most = math.inf if up_to is None else up_to
        if isinstance(most, bool) or most not in BUCKETS:
            named = ", ".join("null" if most == math.inf else str(most) for most in BUCKETS)
            self.refuse(f"{at}.up_to", f"one of {named}", up_to)
        return most

    def row(self, value: dict[str, Any], at: str, shape: LayerShape, most: float) -> Row:
        tokens = self.integer(value["tokens"], f"{at}.tokens", least=1)
        if bucket(tokens) != most:
            self.refuse(f"{at}.tokens", "a number in the bucket that up_to names", tokens)
        tiles = {
            name: self.tile(value[name], f"{at}.{name}", product_kind(shape.kind, name))
            for name in GEMMS
            if name in value
        }
        gemm1, gemm2 = tiles["gemm1"], tiles["gemm2"]
        for name in ("block_m", "tail"):
            its, first = getattr(gemm2, name), getattr(gemm1, name)
            if its != first:
                self.refuse(f"{at}.gemm2.{name}", f"that of gemm1, {first}", its)
        for name in SHARED:
            if shape.S and name not in value:
                self.refuse(f"{at}.{name}", f"a tile, since S={shape.S}", None)
        shared = [tiles.get(name, gemm1) for name in SHARED]
        schedule, overlaps = value["schedule"], value["overlaps"]
        if not isinstance(overlaps, bool):
            self.refuse(f"{at}.overlaps", "true or false", overlaps)
        if schedule not in SCHEDULES:
            self.refuse(f"{at}.schedule", f"one of {', '.join(SCHEDULES)}", schedule)
        if not shape.S and schedule != "serial":
            self.refuse(f"{at}.schedule", "'serial', since S=0", schedule)
        if schedule == "fused" and shape.S % shape.I:
            self.refuse(f"{at}.schedule", f"another, since S={shape.S} is no multiple of I={shape.I}", schedule)
        if schedule == "fused" and "+" in shape.kind:
            self.refuse(f"{at}.schedule", f"another, since {shape.kind} is of two formats", schedule)
        one = one_launch(shape.kind, most, gemm1, gemm2)
        if not one and gemm1.splits > 1:
            self.refuse(f"{at}.gemm1.splits", "1, since the products are not one launch", gemm1.splits)
        if shape.H % (gemm1.splits * gemm1.block_k) and gemm1.splits > 1:
            accepted = f"1, or a number of parts of H={shape.H} that are multiples of block_k"
            self.refuse(f"{at}.gemm1.splits", accepted, gemm1.splits)
        for name in tiles.keys() - {"gemm1"}:
            if tiles[name].splits > 1:
                self.refuse(f"{at}.{name}.splits", "1, since tiles of gemm1 alone are split", tiles[name].splits)
        return Row(
            tokens=tokens,
            choice=Choice(LayerTiles(gemm1, gemm2, shared[0], shared[1], overlaps, one), schedule),
            us=self.times(value.get("us", {}), f"{at}.us", PARTS),
            heuristic_us=self.times(value.get("heuristic_us", {}), f"{at}.heuristic_us", PARTS),
            schedules_us=self.times(value.get("schedules_us", {}), f"{at}.schedules_us", SCHEDULES),
        )

    def tile(self, value: Any, at: str, kind: str) -> Tile:
        """kind: of the product."""
        defaults = Tile._field_defaults
        needed = tuple(name for name in Tile._fields if name not in defaults)
        for name, number in self.object(value, at, needed, tuple(defaults)).items():
            if isinstance(defaults.get(name), bool):
                if not isinstance(number, bool):
                    self.refuse(f"{at}.{name}", "true or false", number)
                continue
            least, most = _RANGES[name]
            self.integer(number, f"{at}.{name}", least=least)
            if number > most:
                self.refuse(f"{at}.{name}", f"at most {most}", number)
            if name != "num_stages" and number & (number - 1):
                self.refuse(f"{at}.{name}", "a power of two", number)
        tile = Tile(**value)
        if tile.least_m > tile.block_m:
            self.refuse(f"{at}.least_m", f"at most block_m, {tile.block_m}", tile.least_m)
        if tile.tail and tile.tail >= tile.block_m:
            self.refuse(f"{at}.tail", f"less than block_m, {tile.block_m}", tile.tail)
        if tile.persistent and tile.tail:
            self.refuse(f"{at}.tail", "0, since it is persistent", tile.tail)
        heights = PERSISTENT_M.get(kind, (128,))
        if tile.persistent and tile.block_m not in heights:
            self.refuse(f"{at}.block_m", f"{' or '.join(map(str, heights))}, since it is persistent", tile.block_m)
        if kind == "fp8" and tile.block_k != FP8_K:
            self.refuse(f"{at}.block_k", f"{FP8_K}, since weights are {kind}", tile.block_k)
        if kind.endswith("4bit") and tile.block_k < LEAST_4BIT_K:
            self.refuse(f"{at}.block_k", f"at least {LEAST_4BIT_K}, since weights are {kind}", tile.block_k)
        if (kind == "fp8" or kind.endswith("4bit")) and tile.tail:
            self.refuse(f"{at}.tail", f"0, since weights are {kind}", tile.tail)
        return tile

    def times(self, value: Any, at: str, names: tuple[str, ...]) -> dict[str, float]:
        for name, us in self.object(value, at, (), names).items():
            if isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 < us < math.inf:
                self.refuse(f"{at}.{name}", "microseconds above 0", us)
        return value

    def object(
        self, value: Any, at: str, needed: tuple[str, ...], optional: tuple[str, ...] | None = ()
    ) -> dict[str, Any]:
        """optional: what else it may have; None is anything."""
        if not isinstance(value, dict):
            self.refuse(at, "an object", value)
        for name in needed:
            if name not in value:
                self.refuse(f"{at}.{name}".lstrip("."), "a value", None)
        for name in value if optional is not None else ():
            if name not in (*needed, *(optional or ())):
                self.refuse(f"{at}.{name}".lstrip("."), f"no field but {', '.join((*needed, *(optional or ())))}", name)
        return value

    def list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            self.refuse(at, "a list", value)
        return value

    def text(self, value: Any, at: str) -> str:
        if not isinstance(value, str) or not value:
            self.refuse(at, "text", value)
        return value

    def integer(self, value: Any, at: str, *, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(at, f"an integer of at least {least}", value)
        return value

    def refuse(self, at: str, accepted: str, came: Any) -> None:
        text = json.dumps(came)
        raise ValueError(f"{self.name}: {at or 'the file'}: expected {accepted}, got {text[:80]}")


# --- writing --------------------------------------------------------------------------------------------------------


def save_table(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes the table beside `path` and moves it there, so that `path` always holds a whole one.

    Raises:
        ValueError: it has a kind that no layer has.
    """
    for shape, _ in table.rows:
        if shape.kind not in KINDS:
            raise ValueError(f"kind: expected {_KINDS_ACCEPTED}, got {shape.kind!r}")
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(dumps(table), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def dumps(table: Table) -> str:
    """JSON with a line for each row."""
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Table) -> Iterator[str]:
    yield f'{{"gpu": {json.dumps(table.gpu)}, "made_with": {json.dumps(dict(table.made_with))}, "shapes": ['
    shapes = sorted({shape for shape, _ in table.rows})
    for shape in shapes:
        yield f'  {json.dumps(shape._asdict())[:-1]}, "rows": ['
        most = sorted(most for of, most in table.rows if of == shape)
        for up_to in most:
            line = json.dumps(_row_as_json(table.rows[shape, up_to], shape, up_to))
            yield f"    {line}{',' if up_to != most[-1] else ''}"
        yield f"  ]}}{',' if shape != shapes[-1] else ''}"
    yield "]}"


def _row_as_json(row: Row, shape: LayerShape, most: float) -> dict[str, Any]:
    chosen, schedule = row.choice
    tiles = {
        name: {k: v for k, v in getattr(chosen, name)._asdict().items() if Tile._field_defaults.get(k) != v}
        for name in GEMMS
        if shape.S or name not in SHARED
    }
    start: dict[str, Any] = {"up_to": None if most == math.inf else most, "tokens": row.tokens}
    start |= {"schedule": schedule, "overlaps": chosen.overlaps}
    times = {"us": row.us, "heuristic_us": row.heuristic_us, "schedules_us": row.schedules_us}
    return start | tiles | {name: dict(us) for name, us in times.items() if us}
