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

pytestmark = needs_gpu

SCRIPT = pathlib.Path(__file__).with_name("sanitized_layers.py")
LONGEST = 400
"""Seconds of one run."""
TOOLS = {
    # What the CUDA API refuses is PyTorch's business. 256 bytes behind every allocation are no one's.
    "memcheck": ("--report-api-errors", "no", "--padding", "256"),
    "initcheck": (),
}


@pytest.fixture
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
        try:
            output, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool starts a process of its own
            output = f"{process.communicate()[0]}\nnot done in {LONGEST} s"
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


@pytest.mark.parametrize("what", dict.fromkeys((*FORMATS, *formats.FORMATS)))
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing_in_any_launch(sanitizer, tmp_path, counted, tool, what) -> None:
    code, output = run(sys.executable, str(SCRIPT), what, str(tmp_path / "all.json"), "--compile")
    assert code == 0, output[-9000:]
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
        assert "_persistent_coded" in ran["kernels"]
    assert launches <= ran["launches"].keys()
    counted(f"launches in which compute-sanitizer's {tool} found nothing", sum(ran["launches"].values()))
    counted(f"kernels under compute-sanitizer's {tool}", len(ran["kernels"]))


@pytest.mark.parametrize(
    ("tool", "expected"), [("memcheck", "Invalid __global__ write"), ("initcheck", "ninitialized")]
)
def test_the_control_a_wrong_kernel_is_seen(sanitizer, tmp_path, tool, expected) -> None:
    output = watched(sanitizer, tool, "control", tmp_path / "control.json")
    assert any(kernel == "_wrong" and expected in text for kernel, text in reports(output)), output[-9000:]
