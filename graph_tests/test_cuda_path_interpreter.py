"""Runs `cuda_path_cases.py`, the whole CUDA path in Triton's interpreter, in a process of its own.

The interpreter is chosen when the kernels are imported, so it cannot be had beside kernels for a GPU.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

CASES = pathlib.Path(__file__).with_name("cuda_path_cases.py")


def test_the_cuda_path_keeps_its_promises_in_the_interpreter(request) -> None:
    seed = f"--seed={request.config.option.seed}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", seed, str(CASES)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=CASES.parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
