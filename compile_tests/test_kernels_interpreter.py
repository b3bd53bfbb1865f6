"""The kernels in Triton's interpreter, on the CPU: each promise of `interpreter_cases.py`.

They run in one process of their own, since Triton decides when it is imported whether it interprets.
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

CASES = Path(__file__).with_name("interpreter_cases.py")
PROMISES = re.findall(r"^def (test_\w+)", CASES.read_text(), re.MULTILINE)


pytestmark = pytest.mark.xdist_group("interpreter")  # one process has the outcomes of all


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> dict[str, list[str]]:
    """For each promise, what its cases said: nothing, or how they failed."""
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", f"--junitxml={report}"]
    command.append(f"--seed={request.config.option.seed}")
    done = subprocess.run(command, env=env, cwd=CASES.parents[1], capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    said = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        said[name.partition("[")[0]].append("\n".join(f"{name}: {child.text}" for child in case))
    return said


@pytest.mark.parametrize("promise", PROMISES)
def test_kernels_keep(promise, outcomes):
    assert outcomes[promise], f"{promise} did not run"
    failures = [text for text in outcomes[promise] if text]
    assert not failures, f"{len(failures)} of {len(outcomes[promise])} cases failed, the first:\n{failures[0]}"
