"""What docs/faults.md says is shown by tests that exist, and that run where it says."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
    if line.startswith("| **")
]


@functools.cache
def names_in(file: str) -> tuple[bool, frozenset[str]]:
    """Whether all of a file's tests need a GPU, and their names; nothing of it runs."""
    (path,) = (path for folder in ("compile_tests", "graph_tests") for path in (ROOT / folder).glob(file))
    body = ast.parse(path.read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    marks = [
        ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    return any("needs_gpu" in mark for mark in marks), frozenset(names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split("**")[1])
def test_a_fault_is_ruled_out_by_tests_that_exist(row):
    kind, holds, *columns = row
    assert kind
    assert holds
    for needs_gpu, column in zip((False, True), columns, strict=True):
        named = re.findall(r"`(\w+\.py)::(\w+)`", column)
        assert column == " ".join(f"`{file}::{name}`" for file, name in named)
        assert named or needs_gpu, "no test shows it without a GPU"
        for file, name in named:
            assert name in names_in(file)[1], f"{file} has no {name}"
            assert names_in(file)[0] == needs_gpu, f"{file} is in the other column"


def test_the_table_has_a_row_for_each_kind():
    assert len({row[0] for row in ROWS}) == len(ROWS) > 25
