"""compute-sanitizer sees no access out of bounds, and none to memory that nobody wrote, in any kernel of a layer."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from gpu import FORMATS, needs_gpu

from dsmoe_op import formats

SCRIPT = pathlib.Path(__file__).with_name("sanitized_layers.py")
LONGEST = 500
"""Seconds of one run."""
pytestmark = [needs_gpu, pytest.mark.timeout(2 * LONGEST + 60)]  # the first test of a layer compiles in a run before
TOOLS = {
    # What the CUDA API refuses is PyTorch's business. 256 bytes behind every allocation are no one's.
    "memcheck": ("--report-api-errors", "no", "--padding", "256"),
    "initcheck": (),
}


@pytest.fixture(scope="module")
def sanitizer(thorough: bool) -> str:
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    if not thorough:
        pytest.skip("only with --thorough: it takes minutes")
    return found


def run(*command: str, **env: str) -> tuple[int, str]:
    """Exit code and output."""
    paths = [str(SCRIPT.parents[1]), str(SCRIPT.parents[1] / "compile_tests"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip

        def end() -> None:
            os.killpg(process.pid, signal.SIGKILL)  # the tool starts a process of its own

        try:
            output, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            end()
            output = f"{process.communicate()[0]}\nnot done in {LONGEST} s"
        except BaseException:  # the test's own limit, or an interrupt: to leave this block would wait for the process
            end()
            raise
        return process.returncode, output


def watched(sanitizer: str, tool: str, what: str, file: pathlib.Path) -> str:
    """The output of the script under a tool, which does not see into PyTorch's own cache of memory."""
    options = ["--tool", tool, *TOOLS[tool], "--target-processes", "application-only", "--show-backtrace", "no"]
    options += ["--print-limit", "10000"]
    options += [sys.executable, str(SCRIPT), what, str(file)]
    options += ["--not-persistent"] * (tool == "initcheck")  # it does not see what the copy engine writes
    _, output = run(sanitizer, *options, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return output


_START = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|LEAK SUMMARY|Target application)\S")
_KERNEL = re.compile(r"=========\s+at (?:0x[0-9a-f]+ in )?(?:\S+:)?([^\s+(:]+)")


def reports(output: str) -> list[tuple[str | None, str]]:
    """The tool's reports: the kernel that each is about, None where it names none, and its text."""
    found: list[list[str]] = []
    for line in output.splitlines():
        if _START.match(line):
            found.append([line])
        elif found and line.startswith("=========  "):
            found[-1].append(line)
    return [(next(iter(_KERNEL.findall("\n".join(lines))), None), "\n".join(lines)) for lines in found]


LAYERS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in {**FORMATS, **formats.FORMATS}]


@pytest.fixture(scope="module", params=LAYERS)
def what(sanitizer, request, tmp_path_factory) -> str:
    """A layer whose kernels lie compiled in Triton's cache. All tools' tests of it run in one process, in turn."""
    file = tmp_path_factory.mktemp("compiled") / "all.json"
    code, output = run(sys.executable, str(SCRIPT), request.param, str(file), "--compile")
    assert code == 0, output[-9000:]
    return request.param


@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing_in_any_launch(sanitizer, tmp_path, counted, tool, what) -> None:
    file = tmp_path / f"{tool}.json"
    output = watched(sanitizer, tool, what, file)
    assert file.exists(), output[-9000:]
    assert "ERROR SUMMARY: " in output, output[-9000:]
    ran: dict[str, Any] = json.loads(file.read_text())
    ours = [text for kernel, text in reports(output) if kernel is None or kernel in ran["kernels"]]
    assert not ours, f"{len(ours)} reports, the first:\n" + "\n".join(ours[:5])
    launches = {"router", "choose_order", "gate", "gemm1", "gemm2", "experts", "finalize"}
    if what in ("fp8_block", "fp8_channel"):
        launches |= {"quantize", "quantize_h", "quantize_shared_h"}
    if what in ("int4", "mxfp4", "nvfp4", "int4+none"):
        launches |= {"reorder", "reorder_h"}
        assert {"_few_coded", "_persistent_coded"} <= set(ran["kernels"])
    assert launches <= ran["launches"].keys()
    counted(f"launches in which compute-sanitizer's {tool} found nothing", sum(ran["launches"].values()))
    counted(f"kernels under compute-sanitizer's {tool}", len(ran["kernels"]))


@pytest.mark.parametrize(
    ("tool", "expected"), [("memcheck", "Invalid __global__ write"), ("initcheck", "ninitialized")]
)
def test_the_control_a_wrong_kernel_is_seen(sanitizer, tmp_path, tool, expected) -> None:
    output = watched(sanitizer, tool, "control", tmp_path / "control.json")
    assert any(kernel == "_wrong" and expected in text for kernel, text in reports(output)), output[-9000:]
