"""The kernels in Triton's interpreter, on the CPU: each promise of `interpreter_*_cases.py`.

Each of these files runs in a process of its own, since Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fixtures import Running

pytest.importorskip("triton", reason="no triton")
pytest.importorskip("numpy", reason="Triton's interpreter computes with numpy")

CASES = [
    Path(__file__).with_name(f"interpreter_{part}_cases.py")
    for part in ("routing", "order", "product", "experts", "coded")
]
PROMISES = [name for file in CASES for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)]
assert len(PROMISES) == len(set(PROMISES))

# One process of pytest-xdist has the outcomes of all.
pytestmark = [pytest.mark.xdist_group("interpreter"), *(pytest.mark.interpreted(file) for file in CASES)]


@pytest.fixture
def outcomes(interpreted: Callable[[Path], Running]) -> dict[str, list[str]]:
    """For each promise, what its cases said: nothing, or how they failed."""
    said = defaultdict(list)
    for file in CASES:
        _, output, report = interpreted(file)
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
