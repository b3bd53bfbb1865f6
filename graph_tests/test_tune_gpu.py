"""`tune` on a GPU: its table is whole, its choices are right and no slower than it says, and `auto` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from gpu import capture, needs_gpu

from dsmoe_op import dual_stream_moe, prepare, reference, tuning
from dsmoe_op.cli import arguments, candidates, main, shapes
from dsmoe_op.cli.problem import ROWS_LIMITS, Problem
from dsmoe_op.cli.shapes import parse_shape
from dsmoe_op.tuning.tables import bucket

pytestmark = needs_gpu
SHAPE = "256/128/24/4/256"


@pytest.fixture(autouse=True)
def _no_table() -> Iterator[None]:
    yield
    tuning.use_table(None)


@pytest.mark.parametrize(("format", "tokens"), [(None, (1, 40, 700)), ("int4+none", (1, 40)), ("fp8_block", (9,))])
def test_a_tuned_table_serves_right_layers_in_its_schedules(format, tokens, tmp_path, capsys) -> None:
    path = tmp_path / "t.json"
    given = ["tune", "--shape", SHAPE, "--tokens", ",".join(map(str, tokens)), "--minutes", "4", "--out", str(path)]
    given += ["--format", format] if format else []
    assert main([*given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finished"]
    assert result["gpu"] == torch.cuda.get_device_name()
    table = tuning.load_table(path)
    shape = parse_shape(SHAPE)
    if format:
        shape = shapes.quantised(shape, arguments.formats(format))
    assert len(table.rows) == len(tokens)
    tuning.use_table(table)
    problem = Problem(shape, "bf16", torch.device("cuda", 0), seed=3)
    limit = ROWS_LIMITS[0] if problem.rounds_rows else 1e-2
    for T in tokens:
        row = table.rows[candidates.layer_shape(shape), bucket(T)]
        assert row.us["layer"] <= row.heuristic_us["layer"]
        timed = candidates.tiles(shape, T)  # others, such as tiles that programs share, are of one launch alone
        assert row.us.keys() == {"layer", *(n for n in timed if getattr(row.choice.tiles, n) in timed[n])}
        assert row.us.keys() >= {"shared_gemm1", "shared_gemm2"}
        x, weights = problem.inputs(T)[0], problem.tensors(problem.at(0))
        prepare(x, config=shape.config, **weights)
        graph, out = capture(lambda x=x, w=weights: dual_stream_moe(x, config=shape.config, **w))
        graph.replay()
        right = reference.moe(x, config=shape.config, **weights)
        assert float((out.float() - right.float()).norm() / right.float().norm()) < limit
        asked = dual_stream_moe(x, config=shape.config, schedule=row.choice.schedule, **weights)
        assert torch.equal(out, asked)
    assert main([*given, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == []
