"""What `import dsmoe_op` costs and touches, each seen from a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def fresh(code: str) -> str:
    """What `code` prints in a process of its own, after `import torch`."""
    command = [sys.executable, "-c", "import sys, time, torch\n" + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_import_takes_at_most_300_ms_beyond_torch():
    """The best of three: others may be using the machine."""
    code = "start = time.perf_counter()\nimport dsmoe_op\nprint(time.perf_counter() - start)"
    assert min(float(fresh(code)) for _ in range(3)) <= 0.3


def test_import_brings_in_no_triton_no_transformers_and_no_dynamo():
    code = "before = set(sys.modules)\nimport dsmoe_op\nprint(*{m.split('.')[0] for m in set(sys.modules) - before})"
    brought = set(fresh(code).split())
    assert "dsmoe_op" in brought
    assert not brought & {"triton", "transformers", "numpy", "functorch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "triton", "transformers")
    code = f"import dsmoe_op\nprint(*(m for m in {heavy} if m in sys.modules))"
    assert fresh(code) == fresh(f"print(*(m for m in {heavy} if m in sys.modules))")


def test_import_and_a_cpu_call_leave_cuda_and_triton_alone():
    code = """
import dsmoe_op
x, config = torch.randn(3, 16), dsmoe_op.MoEConfig(top_k=2)
weights = {"w13": torch.randn(4, 64, 16), "w2": torch.randn(4, 16, 32), "router_weight": torch.randn(4, 16)}
dsmoe_op.dual_stream_moe(x, config=config, **weights)
print(torch.cuda.is_initialized(), "triton" in sys.modules)
"""
    assert fresh(code) == "False False"


def test_the_public_names_are_there():
    code = """
import dsmoe_op
names = "MoEConfig DualStreamMoE Unfinalized dual_stream_moe dual_stream_moe_unfinalized finalize prepare route "
names += "load_block replace_moe_blocks streams"
print(*(n for n in names.split() if n not in dsmoe_op.__all__ or not hasattr(dsmoe_op, n)))
print("triton" in sys.modules, "transformers" in sys.modules)
"""
    assert fresh(code) == "False False"


_AS_SERVERS = """
import importlib, pkgutil, sys, triton
for name in ("next_power_of_2", "cdiv"):
    setattr(triton, name, lambda *args, own=getattr(triton, name): own(*args))
from dsmoe_op import kernels
keys = 0
for info in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"dsmoe_op.kernels.{info.name}")
    for value in vars(sys.modules[f"dsmoe_op.kernels.{info.name}"]).values():
        keys += bool(getattr(value, "cache_key", None))  # looks at all that the kernel refers to
assert keys > 50
"""


def test_kernels_refer_to_nothing_that_a_server_replaces() -> None:
    """SGLang puts a Python function of its own in the place of triton.next_power_of_2, which kernels cannot call."""
    pytest.importorskip("triton", reason="no triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _AS_SERVERS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
