"""`python -m dsmoe_op doctor`: what this machine can do, and what keeps two streams from working side by side on it.

Versions, compilers, caches and environment are looked at; the op is run against the reference; and on a GPU its two
streams are profiled, captured and compiled, next to those of plain code. Nothing is known beforehand of what torch does
with streams: what is printed was seen in this run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dsmoe_op
from dsmoe_op.cli import output

OLDEST_TORCH = (2, 11)
PERSISTENT_BYTES = 229752
"""Shared memory of a program that the largest tiles need (kernels/NOTES.md)."""
CALLS = 20
"""Delayed calls of each code that are compared."""
_REPORT = "report this with the versions above"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        state: "ok"; "note", which is good to know; or "problem", with which the op or its second stream does not work.
        advice: what to do about it; empty where nothing is to be done.
    """

    topic: str
    state: str
    found: str
    advice: str = ""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what keeps the two streams from overlapping on it",
        description="Looks at versions, compilers, caches and environment, runs the op against the reference and, on a "
        "GPU, profiles its two streams next to plain two-stream code, captured and compiled. "
        "Exit code 0: no problem was found; 1: one was.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    with output.stdout_kept_for_json(options.json):
        findings = examine()
    problems = [finding for finding in findings if finding.state == "problem"]
    if options.json:
        output.print_json({"problems": len(problems), "findings": [finding._asdict() for finding in findings]})
    else:
        print(report(findings))
    return output.WRONG if problems else output.OK


def report(findings: list[Finding]) -> str:
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for topic, state, found, advice in findings:
        lines.append(f"{state:<8} {topic:<{width}}  {found}")
        if advice:
            lines.append(f"{'':<8} {'':<{width}}  -> {advice}")
    count = sum(finding.state == "problem" for finding in findings)
    lines.append(f"\n{count or 'no'} problem{'' if count == 1 else 's'}")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """All findings, in the order in which one depends on another; what fails by itself is a problem, not an end."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("torch", _torch),
        ("triton", _triton),
        ("packages", _packages),
        ("compilers", _compilers),
        ("caches", _caches),
        ("environment", _environment),
        ("the op", _op),
    ]
    if torch.cuda.is_available():
        looks[1:1] = [("GPU", _gpu)]
        looks.append(("two streams", _two_streams))
    else:
        looks[1:1] = [("GPU", _no_gpu)]
    findings: list[Finding] = []
    with output.progress(len(looks), "doctor") as bar:
        for topic, look in looks:
            bar.set_description(f"doctor: {topic}")
            try:
                findings += look()
            except Exception as error:
                findings.append(
                    Finding(topic, "problem", output.error_text(error), "report this with the versions above")
                )
            bar.update()
    return findings


# --- what is installed ----------------------------------------------------------------------------------------------


def _torch() -> Iterator[Finding]:
    version = torch.__version__
    found = f"{version}, Python {sys.version.split()[0]}, dsmoe_op {dsmoe_op.__version__}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        yield Finding("torch", "problem", found, f"install torch {'.'.join(map(str, OLDEST_TORCH))} or newer")
    else:
        yield Finding("torch", "ok", found)


def _triton() -> Iterator[Finding]:
    try:
        import triton
    except ImportError as error:
        needed = torch.cuda.is_available()
        advice = "install triton: the op's CUDA kernels are written in it" if needed else ""
        yield Finding("triton", "problem" if needed else "note", output.error_text(error), advice)
        return
    yield Finding("triton", "ok", triton.__version__)
    if triton.knobs.runtime.interpret:
        found = "TRITON_INTERPRET is set: kernels run in Triton's interpreter, on the CPU"
        state = "problem" if torch.cuda.is_available() else "note"
        yield Finding("triton", state, found, "unset TRITON_INTERPRET but to debug a kernel")


def _packages() -> Iterator[Finding]:
    for name, purpose in {
        "transformers": "replace_moe_blocks and `run` need it",
        "matplotlib": "`bench --plot` and the pictures of `trace` need it",
    }.items():
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "note", f"not installed; {purpose}", f"pip install {name}")


def _compilers() -> Iterator[Finding]:
    c = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    if torch.cuda.is_available():  # Triton compiles a launcher for each kernel's signature
        if c is None or not shutil.which(c):
            found = "none found" if c is None else f"CC={c}, which is not there"
            yield Finding(
                "C compiler", "problem", found, "install gcc, or set CC: Triton compiles its launchers with it"
            )
        else:
            yield Finding("C compiler", "ok", str(shutil.which(c)))
    cxx = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
    if cxx is None or not shutil.which(cxx):
        found = "none found" if cxx is None else f"CXX={cxx}, which is not there"
        yield Finding("C++ compiler", "note", found, "install g++: torch.compile needs it for what runs on the CPU")
    else:
        yield Finding("C++ compiler", "ok", str(shutil.which(cxx)))


def _caches() -> Iterator[Finding]:
    folders = {"Inductor's cache": _inductor_cache()}
    if torch.cuda.is_available():
        import triton

        folders["Triton's cache"] = Path(triton.knobs.cache.dir)
    for topic, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            advice = "make it writable, or name another folder: TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR"
            yield Finding(topic, "problem", f"{folder}: {error.strerror}", advice)
            continue
        free = shutil.disk_usage(there).free / 2**30
        advice = "make room: a layer shape's kernels take some 10 MB" if free < 1 else ""
        yield Finding(topic, "note" if free < 1 else "ok", f"{folder}, {free:.1f} GiB free", advice)


def _inductor_cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


_SPOILERS: tuple[tuple[str, str, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", "1", "problem", "each launch waits for its end, so nothing overlaps"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "problem", "all streams share one queue, so launches of two may not overlap"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "problem", "memory cannot be allocated while a graph is captured"),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "", "note", "this process has a part of the GPU"),
    ("TORCH_COMPILE_DISABLE", "1", "note", "torch.compile does nothing"),
    ("TORCHDYNAMO_DISABLE", "1", "note", "torch.compile does nothing"),
)
"""Name, the value that matters (any where it is empty), what it is, and why."""


def _environment() -> Iterator[Finding]:
    there = False
    for name, value, state, why in _SPOILERS:
        given = os.environ.get(name)
        on_gpu = torch.cuda.is_available() or not name.startswith(("CUDA_", "PYTORCH_"))
        if given is not None and on_gpu and (given == value or not value):
            there = True
            yield Finding("environment", state, f"{name}={given}: {why}", f"unset {name}" if state == "problem" else "")
    if not there:
        yield Finding("environment", "ok", "nothing that stands in the way")


# --- what the machine has -------------------------------------------------------------------------------------------


def _no_gpu() -> Iterator[Finding]:
    threads = torch.get_num_threads()
    found = f"torch finds none; on the CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} threads) one stream"
    advice = "" if torch.version.cuda is None else "torch is a CUDA build: see whether nvidia-smi finds the driver"
    yield Finding("GPU", "note", found, advice)


def _gpu() -> Iterator[Finding]:
    from dsmoe_op.tuning.tables import shipped

    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        capability = (gpu.major, gpu.minor)
        found = (
            f"{i}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
            f"{gpu.total_memory / 2**30:.0f} GiB"
        )
        if capability < (8, 0):
            yield Finding("GPU", "problem", found, "use a GPU of sm_80 or newer: the kernels need bf16 products")
            continue
        yield Finding("GPU", "ok", found)
        memory = getattr(gpu, "shared_memory_per_block_optin", PERSISTENT_BYTES)
        if capability != (9, 0):
            advice = "hold results and times against what you have"
            yield Finding("GPU", "note", "the kernels were tested and measured on sm_90 alone", advice)
        elif memory < PERSISTENT_BYTES:
            found = f"{memory} bytes of shared memory for a program; the largest tiles need {PERSISTENT_BYTES}"
            yield Finding("GPU", "problem", found, "give `tuning.use_table` a table of smaller tiles")
        table = shipped(gpu.name)
        if table is None:
            advice = "`python -m dsmoe_op tune` measures one, `tuning.use_table` takes it"
            yield Finding("tiles", "note", f"no table for {gpu.name}; a rule chooses", advice)
        else:
            yield Finding("tiles", "ok", f"a table for {gpu.name}: {len(table.rows)} cells")


# --- what the op does -----------------------------------------------------------------------------------------------


def _op() -> Iterator[Finding]:
    """One small layer, eager and compiled, against the float64 reference."""
    from dsmoe_op import MoEConfig, dual_stream_moe, reference

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    T, H, E, I, S = 24, 64, 8, 48, 80

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device)

    x, config = normal(T, H), MoEConfig(top_k=2)
    weights: dict[str, Any] = {"router_weight": normal(E, H), "w13": normal(E, 2 * I, H), "w2": normal(E, H, I)}
    weights |= {"shared_w13": normal(2 * S, H), "shared_w2": normal(H, S)}
    exact: dict[str, Any] = {name: w.double() for name, w in weights.items()}
    right = reference.moe(x.double(), config=config, **exact)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return dual_stream_moe(x, config=config, **weights)

    with torch.no_grad():
        for name, call in (("eager", layer), ("torch.compile", torch.compile(layer, fullgraph=True))):
            try:
                error = float((call(x).double() - right).norm() / right.norm())
            except Exception as raised:
                yield Finding(
                    f"the op, {name}", "problem", output.error_text(raised), "see the compilers and caches above"
                )
                continue
            good = error < 1e-5
            advice = "" if good else f"do not use it here; {_REPORT}"
            found = f"float32 layer on {device}: {error:.1e} from the float64 reference"
            yield Finding(f"the op, {name}", "ok" if good else "problem", found, advice)


def _two_streams() -> Iterator[Finding]:
    """The op and plain code of `hazard`'s layer, each call with branches delayed at random."""
    from dsmoe_op.cli import hazard
    from dsmoe_op.cli.branches import OURS

    rows = hazard.measure(CALLS, 0, ("eager-captured", "fullgraph"), 60)
    for row in rows:
        if row.input != "given":
            continue
        topic = f"{'the op' if row.code == OURS else f'plain code, {row.code}'}, {row.mode}"
        if row.error is not None or row.streams is None:
            yield Finding(topic, "problem" if row.code == OURS else "note", row.error or "not run")
            continue
        two, overlaps = len(row.streams.kernels) > 1, row.streams.overlap_us > 0
        found = f"{row.streams.words()}; {row.wrong} of {row.calls} delayed calls differ from one stream"
        if row.code == OURS:
            good = two and not row.wrong and (overlaps or row.mode != "eager-captured")
            advice = "" if good else "see the environment above; is the GPU shared with another process?"
            yield Finding(topic, "ok" if good else "problem", found, advice)
        elif row.wrong:
            yield Finding(
                topic, "note", found, "this torch gives such code wrong results: keep two streams inside an op"
            )
        elif not two:
            yield Finding(topic, "note", found, "this torch drops such code's second stream: keep it inside an op")
        else:
            yield Finding(topic, "ok", found)
