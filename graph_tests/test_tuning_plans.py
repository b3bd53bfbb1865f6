"""Plans take tiles and schedule from the tables, each table its own; nothing is launched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layers import LAUNCHERS, make_layer, quantized
from torch import Tensor

pytest.importorskip("triton", reason="no triton")

from dsmoe_op import checks, cuda, streams
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Layer
from dsmoe_op.schedule import Launch, Wait
from dsmoe_op.tuning import Choice, LayerShape, LayerTiles, Table, Tile, use_table
from dsmoe_op.tuning.tables import BUCKETS, Row

SIZES = {"H": 64, "E": 12, "I": 32, "S": 64}
TILES = [Tile(m, n, 32, 4, 2) for m, n in ((16, 16), (32, 32), (64, 64), (128, 16))]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, str, int, dict[str, Any]]]]:
    """Launches: whether only warmed up, the kernel, its block_m if it has one, its constexprs."""
    found: list[tuple[bool, str, int, dict[str, Any]]] = []

    def launch(kernel: Any, grid: Any, args: Any, meta: dict[str, Any], *, warmup: bool = False) -> None:
        found.append((warmup, kernel.fn.__name__, meta.get("BLOCK_M", 0), meta))

    for name in LAUNCHERS:
        monkeypatch.setattr(sys.modules[f"dsmoe_op.kernels.{name}"], "launch", launch)
    monkeypatch.setattr(streams, "relaxed_capture", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "_prepared", set())
    yield found
    use_table(None)


def plan(call: checks.Checked, x: Tensor, args: dict[str, Any]) -> cuda._Plan:
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    return cuda._plan_of(layer, call, cuda._addresses(layer), finalized=True)


def called(T: int, schedule: str = "auto") -> tuple[checks.Checked, Tensor, dict[str, Any]]:
    x, args = make_layer(T, dtype=torch.bfloat16, **SIZES)
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    return checks.Checked(checks.check_layer(layer, args["config"], schedule), args["config"], schedule), x, args


def schedule_of(steps: tuple[schedules.Step, ...]) -> str:
    names = [step.name for step in steps if isinstance(step, Launch)]
    if "fused_gemm1" in names:
        return "fused"
    if not any(isinstance(step, Wait) for step in steps):
        return "serial"
    alt = {step.name for step in steps if isinstance(step, Launch) and step.stream == "alt"}
    return "dual" if "shared_gemm1" in alt else "dual_shared_main"


def table(K: int, choices: dict[float, Choice]) -> Table:
    shape = LayerShape("16bit", SIZES["H"], SIZES["I"], SIZES["E"], K, SIZES["S"])
    return Table(gpu="any", rows={(shape, most): Row(1, choice, {}, {}, {}) for most, choice in choices.items()})


def choice(i: int, schedule: str) -> Choice:
    return Choice(LayerTiles(TILES[i], TILES[i], TILES[i], TILES[i], overlaps=False), schedule)


def test_auto_is_the_tables_schedule_and_a_schedule_that_is_asked_for_stays(made: Any) -> None:
    K = called(3)[2]["config"].top_k
    use_table(table(K, {1: choice(0, "serial"), 4: choice(1, "fused"), 16: choice(2, "dual_shared_main")}))
    for T, expected in ((1, "serial"), (3, "fused"), (9, "dual_shared_main"), (90, "dual")):
        assert schedule_of(plan(*called(T)).steps) == expected
        assert schedule_of(plan(*called(T, "dual")).steps) == "dual"


@pytest.mark.parametrize(
    ("shared", "expected"), [("fp8_channel", "fused"), ("fp8_block", "dual"), ("fp8_tensor", "dual")]
)
def test_a_row_that_fuses_does_not_where_formats_of_its_kind_differ(shared: str, expected: str) -> None:
    x, args = make_layer(100, dtype=torch.bfloat16, **SIZES)
    args = quantized(args, "fp8_channel", shared)
    shape = LayerShape("fp8", SIZES["H"], SIZES["I"], SIZES["E"], args["config"].top_k, SIZES["S"])
    use_table(Table(gpu="any", rows={(shape, most): Row(1, choice(1, "fused"), {}, {}, {}) for most in BUCKETS}))
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    call = checks.Checked(checks.check_layer(layer, args["config"], "auto"), args["config"], "auto")
    assert schedule_of(plan(call, x, args).steps) == expected


def test_the_products_take_the_tables_tiles(made: Any) -> None:
    K = called(3)[2]["config"].top_k
    use_table(table(K, {most: choice(i % 4, "dual") for i, most in enumerate(BUCKETS)}))
    for T, i in ((1, 0), (4, 1), (5, 2), (20, 3), (300, 1)):
        made.clear()
        plan(*called(T))
        products = [m for warm, kernel, m, _ in made if kernel == "_grouped_gemm" and not warm]
        assert products == [TILES[i].block_m] * 4


def test_the_first_call_compiles_all_that_a_table_can_choose_at_any_size(made: Any) -> None:
    K = called(3)[2]["config"].top_k
    kinds = ("serial", "fused", "dual_shared_main", "dual")
    use_table(table(K, {most: choice(i % 4, kinds[i % 4]) for i, most in enumerate(BUCKETS)}))
    plan(*called(3))
    ahead = [(kernel, str(sorted(meta.items(), key=str))) for warm, kernel, _, meta in made if warm]
    for T in (1, 2, 9, 33, 200, 900, 3000, 9000):
        made.clear()
        plan(*called(T))
        assert not any(warm for warm, *_ in made)
        for _, kernel, _, meta in made:
            assert (kernel, str(sorted(meta.items(), key=str))) in ahead


def test_a_plan_of_one_table_is_not_taken_with_another(made: Any) -> None:
    one = called(3)
    K = one[2]["config"].top_k
    heuristic = plan(*one)
    first, second = (table(K, {4: choice(i, "serial")}) for i in range(2))
    use_table(first)
    of_first = plan(*one)
    use_table(second)
    of_second = plan(*one)
    assert len({id(p) for p in (heuristic, of_first, of_second)}) == 3
    use_table(first)
    assert plan(*one) is of_first
    use_table(None)
    assert plan(*one) is heuristic
