"""Runs `*_cases.py`, the whole CUDA path in Triton's interpreter, each file in a process of its own.

The interpreter is chosen when the kernels are imported, so it cannot be had beside kernels for a GPU.
"""

from __future__ import annotations

import pathlib

import pytest
from fixtures import counts_in

FOLDER = pathlib.Path(__file__).parent
CASES = tuple(FOLDER / f"{name}_cases.py" for name in ("cuda_path", "guarded", "fuzz"))

# One process of pytest-xdist has the outcomes of all.
pytestmark = [pytest.mark.xdist_group("cuda path"), *(pytest.mark.interpreted(file) for file in CASES)]


@pytest.mark.parametrize("file", CASES, ids=[file.stem for file in CASES])
def test_the_cuda_path_keeps_its_promises_in_the_interpreter(interpreted, counted, file) -> None:
    process, output, report = interpreted(file)
    assert process.returncode == 0, output.read_text()[-9000:]
    for what, n in counts_in(report).items():
        counted(what, n)
