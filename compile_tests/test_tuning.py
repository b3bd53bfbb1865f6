"""Tables of measured choices: where a choice is looked up, what a file may hold, and what is compiled ahead."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsmoe_op import formats, tuning
from dsmoe_op.tuning import Choice, LayerShape, LayerTiles, Table, Tile, load_table, save_table, tables, use_table
from dsmoe_op.tuning.tables import BUCKETS, Row, bucket

SHAPE = LayerShape("16bit", H=96, I=32, E=24, K=3, S=64)
PLAIN = LayerShape("16bit", H=96, I=32, E=24, K=3, S=0)
SCHEDULES = ("serial", "dual", "dual_shared_main", "fused")
SHIPPED = sorted(pathlib.Path(tables.__file__).parent.glob("*.json"))


@pytest.fixture(autouse=True)
def _no_table() -> Iterator[None]:
    use_table(None)
    yield
    use_table(None)


def random_tile(kind: str, blocks: tuple[int, int] | None = None) -> Tile:
    """Of this block_m and tail, for a product of this kind."""
    quantised = kind in ("fp8", "4bit")
    m, tail = blocks or (2 ** random.randint(3, 7), 0 if quantised else random.choice((0, 4)))
    flags = {name: random.random() < 0.5 for name in ("swap", "tma")}
    k = 128 if kind == "fp8" else 2 ** random.randint(5 if quantised else 4, 8)
    numbers = 2 ** random.randint(4, 8), k, random.choice((4, 8)), random.randint(2, 6)
    least = random.choice((0, min(16, m)))
    may_persist = m in tables.PERSISTENT_M.get(kind, (128,)) and not tail
    return Tile(m, *numbers, **flags, persistent=may_persist and random.random() < 0.5, least_m=least, tail=tail)


def random_row(shape: LayerShape, most: float) -> Row:
    routed_kind, _, shared_kind = shape.kind.partition("+")
    gemm1 = random_tile(routed_kind)
    shared = (random_tile(shared_kind or routed_kind), random_tile(shared_kind or routed_kind))
    gemm2 = random_tile(routed_kind, (gemm1.block_m, gemm1.tail))
    if tuning.one_launch(shape.kind, most, gemm1, gemm2):
        whole = [n for n in (2, 4) if shape.H % (n * gemm1.block_k) == 0]
        gemm1 = gemm1._replace(splits=random.choice((1, *whole)))
    shared = shared if shape.S else (gemm1, gemm1)
    one_launch = tuning.one_launch(shape.kind, most, gemm1, gemm2)
    tiles = LayerTiles(gemm1, gemm2, *shared, overlaps=random.random() < 0.5, one_launch=one_launch)
    schedules = SCHEDULES[:3] if shared_kind else SCHEDULES
    choice = Choice(tiles, random.choice(schedules) if shape.S else "serial")
    us = {name: round(random.uniform(1, 99), 2) for name in tables.PARTS}
    return Row(int(min(most, 9999)), choice, us, {**us, "layer": 100.0}, {choice.schedule: us["layer"]})


def random_table(*shapes: LayerShape, most: tuple[float, ...] = BUCKETS, gpu: str = "some GPU") -> Table:
    rows = {(shape, m): random_row(shape, m) for shape in shapes for m in most}
    return Table(gpu=gpu, rows=rows, made_with={"torch": "2"})


# --- look-up --------------------------------------------------------------------------------------------------------


def test_buckets_begin_after_the_one_before() -> None:
    expected = {1: 1, 2: 4, 4: 4, 5: 16, 16: 16, 17: 64, 64: 64, 65: 256, 256: 256, 257: 1024, 1024: 1024, 1025: 4096}
    assert {T: bucket(T) for T in expected} == expected
    assert bucket(4096) == 4096
    assert bucket(4097) == bucket(10**6) == math.inf


def test_the_first_table_that_has_a_shape_and_bucket_decides_else_the_heuristic() -> None:
    own, its = random_table(SHAPE, most=(4, 64)), random_table(SHAPE, most=(4, 16))
    heuristic = Choice(tuning.layer_tiles("16bit", 1, 96, 24, 3, 64), "dual")
    found = {T: tuning.layer_choice(SHAPE, T, (own, its)) for T in (1, 3, 9, 40, 100)}
    assert found[1] == heuristic
    assert found[3] == own.rows[SHAPE, 4].choice
    assert found[9] == its.rows[SHAPE, 16].choice
    assert found[40] == own.rows[SHAPE, 64].choice
    assert found[100] == Choice(tuning.layer_tiles("16bit", 100, 96, 24, 3, 64), "dual")


@pytest.mark.parametrize("field", LayerShape._fields)
def test_a_layer_that_differs_in_one_size_is_another_shape(field: str) -> None:
    other = SHAPE._replace(**{field: "tf32" if field == "kind" else getattr(SHAPE, field) + 1})
    table = random_table(SHAPE)
    heuristic = tuning.layer_choice(other, 9)
    assert tuning.layer_choice(other, 9, (table,)) == heuristic


def test_the_users_table_is_before_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own, its = random_table(SHAPE), random_table(SHAPE)
    monkeypatch.setattr(tuning, "shipped", {"some GPU": its, "another": None}.__getitem__)
    assert tuning.tables_of(None, None) == ()
    assert tuning.tables_of(None, "some GPU") == (its,)
    assert tuning.tables_of(own, "some GPU") == (own, its)
    assert tuning.tables_of(own, "another") == tuning.tables_of(own, None) == (own,)


def test_a_gpus_table_is_found_by_its_name_and_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("NVIDIA GeForce RTX 4090 (x)") == "nvidia_geforce_rtx_4090_x.json"
    monkeypatch.setattr(tables, "__file__", str(tmp_path / "tables.py"))
    tables.shipped.cache_clear()
    save_table(random_table(SHAPE), tmp_path / "a_gpu.json")
    found = tables.shipped("A GPU")
    (tmp_path / "a_gpu.json").unlink()
    assert found is not None
    assert tables.shipped("A GPU") is found
    assert tables.shipped("no such GPU") is None
    tables.shipped.cache_clear()


def test_only_a_table_can_be_used() -> None:
    table = random_table(SHAPE)
    use_table(table)
    with pytest.raises(TypeError, match="table: expected a table of load_table, or None, got str"):
        use_table("my.json")  # type: ignore[arg-type]
    assert tuning.own_table() is table


NARROW = LayerShape("16bit", H=7168, I=256, E=256, K=8, S=256)
"""A rank's share of a large layer: one token has 64 tiles of GEMM 1 for more multiprocessors."""


def test_a_shared_gemm1_of_fp8_is_persistent_only_with_items_for_most_multiprocessors() -> None:
    """An item is 128 rows by 128 columns, whatever the tile says for where the weights are not taken."""
    seen = set()
    for T, S in itertools.product((65, 300, 1000, 2048, 4096, 9000, 16384, 70000), (96, 256, 2048, 8192)):
        tile = tuning.layer_tiles("fp8", T, 7168, 256, 8, S).shared_gemm1
        assert tile.persistent == (-(-T // 128) * -(-S // 128) >= 100), (T, S)
        seen.add(tile.persistent)
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("change", "T", "schedule", "splits"),
    [
        ({}, 1, "fused", 4),
        ({}, 2, "fused", 2),
        ({}, 3, "dual", 1),
        ({"kind": "fp8"}, 1, "fused", 4),
        ({"kind": "4bit+16bit"}, 1, "dual", 4),
        ({"kind": "fp32"}, 1, "dual", 1),
        ({"S": 0}, 1, "serial", 4),
        ({"S": 128}, 1, "dual", 4),  # not as wide as a routed expert, or several
        ({"H": 2048}, 1, "fused", 2),
        ({"H": 7168 + 128}, 1, "dual", 1),  # no whole steps in a part
        ({"I": 512}, 1, "dual", 2),
        ({"I": 1024}, 1, "dual", 1),
        ({"K": 1}, 3, "fused", 4),
        ({"K": 1}, 9, "dual", 1),  # more rows than a tile of theirs has
    ],
)
def test_programs_share_tiles_where_there_are_few_by_the_heuristic(change, T, schedule, splits) -> None:
    choice = tuning.layer_choice(NARROW._replace(**change), T)
    assert (choice.schedule, choice.tiles.gemm1.splits) == (schedule, splits)
    assert choice.tiles.one_launch == (change.get("kind") != "fp32")


@pytest.mark.parametrize("most", [(), (1, 16), BUCKETS])
@pytest.mark.parametrize("kind", ["16bit", "tf32", "fp32", "fp8", "4bit+16bit"])
@pytest.mark.parametrize("shape", [SHAPE, NARROW, NARROW._replace(K=2, S=0)], ids=["shape", "narrow", "no_shared"])
def test_what_is_compiled_ahead_covers_all_that_can_be_chosen(
    shape: LayerShape, kind: str, most: tuple[float, ...]
) -> None:
    shape = shape._replace(kind=kind)
    given = (random_table(shape, most=most[::2]), random_table(shape, most=most))
    ahead = tuning.layer_choices(shape, given)
    for name in ("gemm1", "gemm2", "shared_gemm1", "shared_gemm2"):
        prepared = {(c.schedule, c.tiles.overlaps, getattr(c.tiles, name)) for c in ahead}
        for T in (*range(1, 70), 100, 256, 300, 1025, 4097, 10**5):
            choice = tuning.layer_choice(shape, T, given)
            assert (choice.schedule, choice.tiles.overlaps, getattr(choice.tiles, name)) in prepared, (T, name)
    pairs = {(c.schedule, c.tiles.overlaps, c.tiles[:2]) for c in ahead if c.tiles.one_launch}
    for T in range(1, 70):
        choice = tuning.layer_choice(shape, T, given)
        assert not choice.tiles.one_launch or (choice.schedule, choice.tiles.overlaps, choice.tiles[:2]) in pairs, T


def test_a_shape_with_all_buckets_compiles_nothing_but_its_rows() -> None:
    table = random_table(SHAPE)
    assert set(tuning.layer_choices(SHAPE, (table,))) == {row.choice for row in table.rows.values()}


def test_tables_know_every_kind_that_a_layer_can_have() -> None:
    names = (None, *formats.FORMATS)
    dtypes = ((torch.bfloat16, False), (torch.float16, False), (torch.float32, False), (torch.float32, True))
    found = {tuning.layer_kind(*of, *pair) for of in dtypes for pair in itertools.product(names, repeat=2)}
    assert found == tables.KINDS


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_table_survives_the_way_through_a_file(tmp_path) -> None:
    kinds = ("fp32", "fp8", "4bit", "4bit+16bit", "16bit+fp8")
    table = random_table(SHAPE, PLAIN, *(SHAPE._replace(kind=kind, H=48) for kind in kinds))
    save_table(table, tmp_path / "t.json")
    again = load_table(tmp_path / "t.json")
    assert (again.gpu, again.rows, again.made_with) == (table.gpu, table.rows, table.made_with)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_file_has_a_line_for_each_bucket_and_no_defaults() -> None:
    tile = Tile(16, 32, 128, 4, 4, swap=True)
    choice = Choice(LayerTiles(tile, tile, tile, tile, overlaps=False), "dual")
    table = Table(gpu="G", rows={(SHAPE, most): Row(1, choice, {}, {}, {}) for most in (1, math.inf)})
    lines = tables.dumps(table).splitlines()
    assert len(lines) == 6
    named = '{"block_m": 16, "block_n": 32, "block_k": 128, "num_warps": 4, "num_stages": 4, "swap": true}'
    assert lines[2].count(named) == 4
    assert [line.split('"up_to": ')[1].split(",")[0] for line in lines[2:4]] == ["1", "null"]


def broken(path: str, value: Any) -> dict[str, Any]:
    """A good table as JSON, with one value replaced, or gone where it is ..."""
    table = json.loads(tables.dumps(Table(gpu="G", rows={(SHAPE, 4): _row(SHAPE), (PLAIN, 4): _row(PLAIN)})))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = table
    for part in way:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return table


def _row(shape: LayerShape) -> Row:
    tile = Tile(16, 32, 128, 4, 4, swap=True)
    choice = Choice(LayerTiles(tile, tile, tile, tile, overlaps=False), "dual" if shape.S else "serial")
    return Row(3, choice, {"layer": 3.0}, {}, {})


# shapes are sorted: the one without a shared expert is the first.
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gpu", ..., "gpu: expected a value, got null"),
        ("gpu", 3, "gpu: expected text, got 3"),
        ("shapes", {}, r"shapes: expected a list, got \{\}"),
        ("more", 1, "more: expected no field but gpu, shapes, made_with"),
        ("shapes.1.kind", "int4", r"shapes\[1\].kind: expected one of 16bit, .*, fp32_4bit, or two .*, got \"int4\""),
        (
            "shapes.1.kind",
            "4bit+fp32",
            r"shapes\[1\].kind: expected .* or two of them that one dtype has, joined by \+",
        ),
        ("shapes.1.kind", ["4bit"], r"shapes\[1\].kind: expected one of 16bit, "),
        ("shapes.1.H", 0, r"shapes\[1\].H: expected an integer of at least 1, got 0"),
        ("shapes.1.E", "8", r"shapes\[1\].E: expected an integer of at least 1, got \"8\""),
        ("shapes.1.rows.0.up_to", 5, r"rows\[0\].up_to: expected one of 1, 4, .*, null, got 5"),
        ("shapes.1.rows.0.tokens", 5, r"rows\[0\].tokens: expected a number in the bucket that up_to names, got 5"),
        ("shapes.1.rows.0.schedule", "auto", r"rows\[0\].schedule: expected one of serial, .*, got \"auto\""),
        ("shapes.1.rows.0.overlaps", 0, r"rows\[0\].overlaps: expected true or false, got 0"),
        ("shapes.1.rows.0.gemm1", ..., r"rows\[0\].gemm1: expected a value, got null"),
        ("shapes.1.rows.0.gemm1.block_n", 48, r"gemm1.block_n: expected a power of two, got 48"),
        ("shapes.1.rows.0.gemm1.block_k", 8, r"gemm1.block_k: expected an integer of at least 16, got 8"),
        ("shapes.1.rows.0.gemm1.num_warps", 64, r"gemm1.num_warps: expected at most 16, got 64"),
        ("shapes.1.rows.0.gemm1.num_stages", 99, r"gemm1.num_stages: expected at most 16, got 99"),
        ("shapes.1.rows.0.gemm1.least_m", 3, r"gemm1.least_m: expected a power of two, got 3"),
        ("shapes.1.rows.0.gemm1.least_m", 256, r"gemm1.least_m: expected at most block_m, \d+, got 256"),
        ("shapes.1.rows.0.gemm1.num_stages", 1.5, r"gemm1.num_stages: expected an integer of at least 1, got 1.5"),
        ("shapes.1.rows.0.gemm1.num_warps", ..., r"gemm1.num_warps: expected a value"),
        ("shapes.1.rows.0.gemm1.swap", 1, r"gemm1.swap: expected true or false, got 1"),
        ("shapes.1.rows.0.gemm1.tail", 128, r"gemm1.tail: expected less than block_m, \d+, got 128"),
        ("shapes.1.rows.0.gemm2.tail", 8, r"gemm2.tail: expected that of gemm1, 0, got 8"),
        ("shapes.1.rows.0.gemm1.splits", 2, r"gemm1.splits: expected 1, or a number of parts of H=96 that are mult"),
        ("shapes.1.rows.0.gemm1.splits", 3, r"gemm1.splits: expected a power of two, got 3"),
        (
            "shapes.1.rows.0.gemm2.splits",
            2,
            r"gemm2.splits: expected 1, since tiles of gemm1 alone are split, got 2",
        ),
        (
            "shapes.1.rows.0.shared_gemm1.splits",
            2,
            r"shared_gemm1.splits: expected 1, since tiles of gemm1 alone are split",
        ),
        ("shapes.1.rows.0.gemm1.swop", True, r"gemm1.swop: expected no field but block_m"),
        ("shapes.1.rows.0.gemm2.block_m", 32, r"gemm2.block_m: expected that of gemm1, 16, got 32"),
        ("shapes.1.rows.0.gemm2.persistent", True, r"gemm2.block_m: expected 128, since it is persistent, got 16"),
        ("shapes.1.rows.0.shared_gemm2", ..., r"shared_gemm2: expected a tile, since S=64, got null"),
        ("shapes.1.rows.0.us.layer", -1, r"us.layer: expected microseconds above 0, got -1"),
        ("shapes.1.rows.0.us.all", 1, r"us.all: expected no field but"),
        ("shapes.0.rows.0.schedule", "dual", r"shapes\[0\].rows\[0\].schedule: expected 'serial', since S=0"),
    ],
)
def test_a_malformed_table_is_refused_by_file_field_and_value(tmp_path, path: str, value: Any, message: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(broken(path, value)))
    with pytest.raises(ValueError, match=message) as error:
        load_table(file)
    assert str(error.value).startswith(f"{file}: ")


def test_fused_is_refused_where_widths_forbid_it(tmp_path) -> None:
    table = broken("shapes.1.rows.0.schedule", "fused")
    table["shapes"][1]["I"] = 48
    (tmp_path / "t.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="schedule: expected another, since S=64 is no multiple of I=48"):
        load_table(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("kind", "name", "field", "value", "message"),
    [
        ("fp8", "gemm1", "block_k", 64, "gemm1.block_k: expected 128, since weights are fp8, got 64"),
        ("fp8+16bit", "gemm2", "block_k", 256, "gemm2.block_k: expected 128, since weights are fp8, got 256"),
        (
            "16bit+fp8",
            "shared_gemm2",
            "block_k",
            64,
            "shared_gemm2.block_k: expected 128, since weights are fp8, got 64",
        ),
        ("4bit", "gemm2", "block_k", 16, "gemm2.block_k: expected at least 32, since weights are 4bit, got 16"),
        (
            "fp32_4bit",
            "gemm1",
            "block_k",
            16,
            "gemm1.block_k: expected at least 32, since weights are fp32_4bit, got 16",
        ),
        ("fp32", "gemm1", "splits", 2, "gemm1.splits: expected 1, since the products are not one launch, got 2"),
        ("fp8", "gemm1", "persistent", True, "gemm1.block_m: expected 64 or 128, since it is persistent, got 16"),
        ("fp8", "gemm2", "persistent", True, "gemm2.block_m: expected 64 or 128, since it is persistent, got 16"),
        ("4bit+16bit", "gemm1", "tail", 8, "gemm1.tail: expected 0, since weights are 4bit, got 8"),
    ],
)
def test_tiles_that_products_with_quantised_weights_do_not_take_are_refused(
    tmp_path, kind: str, name: str, field: str, value: int, message: str
) -> None:
    table = broken("shapes.1.kind", kind)
    (tmp_path / "t.json").write_text(json.dumps(table))
    load_table(tmp_path / "t.json")
    table["shapes"][1]["rows"][0][name][field] = value
    (tmp_path / "t.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_table(tmp_path / "t.json")


def test_a_layer_of_two_kinds_is_not_fused(tmp_path) -> None:
    table = broken("shapes.1.rows.0.schedule", "fused")
    table["shapes"][1]["kind"] = "4bit"
    (tmp_path / "t.json").write_text(json.dumps(table))
    load_table(tmp_path / "t.json")
    table["shapes"][1]["kind"] = "4bit+16bit"
    (tmp_path / "t.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"schedule: expected another, since 4bit\+16bit is of two formats"):
        load_table(tmp_path / "t.json")


def test_a_bucket_stands_once(tmp_path) -> None:
    table = broken("gpu", "G")
    table["shapes"].append(table["shapes"][0])
    (tmp_path / "t.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"shapes\[2\].rows\[0\]: expected a shape and up_to that no earlier row has"):
        load_table(tmp_path / "t.json")


def test_what_is_no_json_is_refused(tmp_path) -> None:
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match=r"t\.json: expected JSON"):
        load_table(tmp_path / "t.json")


# --- the library's own tables ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHIPPED, reason="the library has no table yet")
def test_every_choice_of_the_librarys_tables_is_within_10_percent_of_the_best_that_was_measured() -> None:
    for path in SHIPPED:
        table = load_table(path)
        assert tables.file_name(table.gpu) == path.name
        for row in table.rows.values():
            best = min(row.heuristic_us["layer"], *row.schedules_us.values())
            assert row.us["layer"] <= 1.1 * best


def test_a_table_with_a_kind_that_none_can_have_is_not_saved(tmp_path):
    table = random_table(SHAPE._replace(kind="4bit+fp32"))
    with pytest.raises(ValueError, match=r"^kind: expected one of 16bit, .*, got '4bit\+fp32'$"):
        save_table(table, tmp_path / "a_gpu.json")
    assert not list(tmp_path.iterdir())
