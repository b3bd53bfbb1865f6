"""The file that --counts writes: what the tests counted and how they ended, in one process and in several."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_counts(counted, n):
    counted("draws", n)
    counted("calls")
    assert n != 3

def test_is_skipped(counted):
    counted("calls")
    pytest.skip("as asked")

@pytest.fixture
def broken():
    raise ValueError

def test_has_no_fixture(broken):
    pass

def test_thorough(thorough, counted):
    counted("runs", 1000 if thorough else 10)
"""
CONFTEST = (
    "from fixtures import counted, pytest_addoption, pytest_configure, pytest_report_header, "
    "pytest_terminal_summary, thorough\n"
)
needs_xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")


def run(folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    paths = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    return subprocess.run(
        command, cwd=folder, env={**env, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True
    )


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=needs_xdist)], ids=["alone", "xdist"])
@pytest.mark.parametrize("is_thorough", [False, True])
def test_the_file_has_the_sums_of_all_tests_and_how_they_ended(tmp_path, options, is_thorough) -> None:
    done = run(tmp_path, *options, "--counts", "counts.json", *(["--thorough"] if is_thorough else []))
    assert done.returncode == 1, done.stdout + done.stderr  # some tests fail
    found = json.loads((tmp_path / "counts.json").read_text())
    today = datetime.datetime.now(datetime.UTC).date()
    assert today - datetime.date.fromisoformat(found.pop("date")) <= datetime.timedelta(days=1)
    assert found.pop("gpu") == (torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    assert "triton" in found
    del found["triton"]
    assert found == {
        "torch": torch.__version__,
        "thorough": is_thorough,
        "passed": 4,
        "failed": 1,
        "errors": 1,
        "skipped": 1,
        "counts": {"calls": 5, "draws": 10, "runs": 1000 if is_thorough else 10},
    }
    assert f"counted: 5 calls; 10 draws; {1000 if is_thorough else 10:,} runs" in done.stdout


def test_a_folder_that_is_not_there_is_said_before_any_test_runs(tmp_path) -> None:
    done = run(tmp_path, "--counts", "nowhere/counts.json")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--counts: expected a file in a folder that exists, got nowhere/counts.json" in done.stderr
