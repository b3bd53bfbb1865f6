"""Options and fixtures of the tests of the op and the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures import (
    _fresh_random,
    _frozen,
    counted,
    cpp,
    device,
    fresh_dynamo,
    inductor,
    interpreted,
    poisoned,
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_terminal_summary,
)

from dsmoe_op import cpu

__all__ = [
    "_fresh_random",
    "_frozen",
    "counted",
    "cpp",
    "device",
    "fresh_dynamo",
    "inductor",
    "interpreted",
    "poisoned",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_terminal_summary",
]


@pytest.fixture(autouse=True)
def _only_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a call compiles what it launches, not what other sizes would: most layers here are called once or twice.

    graph_tests have calls as they are.
    """
    if torch.cuda.is_available():
        monkeypatch.setattr("dsmoe_op.cuda._prepare", lambda kind, launch: None)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches the kernels fails the test."""

    def launched(*args: Any) -> None:
        raise AssertionError("bad input reached the kernels")

    for name in ("moe", "moe_unfinalized", "finalize", "route"):
        monkeypatch.setattr(cpu, name, launched)
