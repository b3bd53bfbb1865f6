"""The kernels in Triton's interpreter, on the CPU: each promise of `interpreter_*_cases.py`.

Each of these files runs in a process of its own, since Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton", reason="no triton")
pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")

CASES = [Path(__file__).with_name(f"interpreter_{part}_cases.py") for part in ("routing", "product", "coded")]
PROMISES = [name for file in CASES for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)]
assert len(PROMISES) == len(set(PROMISES))

pytestmark = pytest.mark.xdist_group("interpreter")  # one process has the outcomes of all


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> dict[str, list[str]]:
    """For each promise, what its cases said: nothing, or how they failed."""
    folder = tmp_path_factory.mktemp("interpreter")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = []
    for file in CASES:
        report, output = folder / f"{file.stem}.xml", folder / f"{file.stem}.txt"
        command = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", f"--junitxml={report}"]
        command.append(f"--seed={request.config.option.seed}")
        with output.open("w") as to:
            process = subprocess.Popen(command, env=env, cwd=file.parents[1], stdout=to, stderr=subprocess.STDOUT)
        running.append((process, report, output))
    said = defaultdict(list)
    for process, report, output in running:
        process.wait()
        assert report.exists(), output.read_text()[-7000:]
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.get("name", "")
            said[name.partition("[")[0]].append("\n".join(f"{name}: {child.text}" for child in case))
    return said


@pytest.mark.parametrize("promise", PROMISES)
def test_kernels_keep(promise, outcomes):
    assert outcomes[promise], f"{promise} did not run"
    failures = [text for text in outcomes[promise] if text]
    assert not failures, f"{len(failures)} of {len(outcomes[promise])} cases failed, the first:\n{failures[0]}"
