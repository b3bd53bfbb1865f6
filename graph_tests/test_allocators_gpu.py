"""The tests of races, captures and memory with other allocators than PyTorch's usual one.

An allocator is chosen before torch starts, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from fixtures import counts_in
from gpu import needs_gpu

pytestmark = needs_gpu

FOLDER = pathlib.Path(__file__).parent
EXPANDABLE, ASYNC = "expandable_segments:True", "backend:cudaMallocAsync"
RUNS = {
    (EXPANDABLE, "test_races.py"): "",
    (EXPANDABLE, "test_capture.py"): "",
    (EXPANDABLE, "test_memory.py"): "",
    (ASYNC, "test_races.py"): "",
    # In PyTorch 2.11 this backend lists no blocks and counts no allocations. It takes whatever any thread allocates
    # during a capture for the capture's, and a graph that is never replayed leaves tensors that cannot be freed.
    (ASYNC, "test_capture.py"): "new_contents or side_by_side or any_size or every_capture_mode",
    (ASYNC, "test_memory.py"): "many_calls or many_replays or allocator",
}


@pytest.mark.parametrize(("allocator", "file"), RUNS)
def test_another_allocator_changes_nothing(request, tmp_path, counted, thorough, allocator, file) -> None:
    if not thorough:
        pytest.skip("only with --thorough: the same tests run with the usual allocator")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    command += [f"--seed={request.config.option.seed}", "--thorough", str(FOLDER / file), "-k", RUNS[allocator, file]]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    done = subprocess.run(command, env=env, cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-9000:]
    counts = counts_in(report)
    assert counts
    for what, n in counts.items():
        counted(f"{what}, with {allocator}", n)
