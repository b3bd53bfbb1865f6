"""Runs `*_cases.py`, the whole CUDA path in Triton's interpreter, each file in a process of its own.

The interpreter is chosen when the kernels are imported, so it cannot be had beside kernels for a GPU.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from fixtures import counts_in

FOLDER = pathlib.Path(__file__).parent
CASES = ("cuda_path_cases", "guarded_cases", "fuzz_cases")

pytestmark = pytest.mark.xdist_group("cuda path")  # one process has the outcomes of all


class Running(NamedTuple):
    process: subprocess.Popen[bytes]
    output: pathlib.Path
    report: pathlib.Path


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """All of them, side by side."""
    folder, started = tmp_path_factory.mktemp("interpreter"), {}
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for cases in CASES:
        output, report = folder / f"{cases}.txt", folder / f"{cases}.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
        command += [f"--seed={request.config.option.seed}", str(FOLDER / f"{cases}.py")]
        with output.open("w") as to:
            process = subprocess.Popen(command, env=env, stdout=to, stderr=subprocess.STDOUT, cwd=FOLDER.parent)
        started[cases] = Running(process, output, report)
    yield started
    for one in started.values():
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("cases", CASES)
def test_the_cuda_path_keeps_its_promises_in_the_interpreter(running, counted, cases) -> None:
    process, output, report = running[cases]
    assert process.wait() == 0, output.read_text()[-9000:]
    for what, n in counts_in(report).items():
        counted(what, n)
