"""Fixtures of both folders, imported by their conftests: device, counts, random numbers that a seed brings back."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch

_SHOWN, _SUMMED = pytest.StashKey[bool](), pytest.StashKey[bool]()


class Running(NamedTuple):
    """A file of cases in Triton's interpreter."""

    process: subprocess.Popen[bytes]
    output: pathlib.Path
    report: pathlib.Path
    """JUnit's XML, when the process has ended."""


_RUNNING = pytest.StashKey[dict[pathlib.Path, Running]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # the other folder's conftest was first
        parser.addoption(
            "--seed", type=int, default=None, help="random inputs of an earlier run (its header shows the seed)"
        )
        parser.addoption(
            "--thorough", action="store_true", help="a thousand draws and more where a test repeats itself on a GPU"
        )
        parser.addoption(
            "--counts", type=pathlib.Path, metavar="FILE", help="what the tests counted, as JSON, when all are done"
        )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.counts is not None and not config.option.counts.absolute().parent.is_dir():
        raise pytest.UsageError(f"--counts: expected a file in a folder that exists, got {config.option.counts}")
    if config.option.seed is None:
        config.option.seed = random.randrange(10**6)
    torch.set_num_threads(1)  # on inputs of this size threads do little but wait for each other
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        _wait_asleep()


def _wait_asleep() -> None:
    """A thread that waits for a GPU sleeps: where processes share one, those that spin take the compilers' cores."""
    with contextlib.suppress(ImportError):
        from cuda.bindings import driver

        driver.cuInit(0)
        for gpu in range(torch.cuda.device_count()):
            driver.cuDevicePrimaryCtxSetFlags(gpu, driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC.value)


def pytest_report_header(config: pytest.Config) -> str | None:
    shown, config.stash[_SHOWN] = config.stash.get(_SHOWN, False), True
    return None if shown else f"random inputs: --seed {config.option.seed}"


# --- cases in Triton's interpreter ------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are marked with `interpreted(file)` come last, since the files take long."""
    items.sort(key=lambda item: item.get_closest_marker("interpreted") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The files of these marks begin to run beside the tests before these.

    pytest-xdist's processes leave that to the one that has such a test.
    """
    if session.config.option.collectonly or "PYTEST_XDIST_WORKER" in os.environ:
        return
    for item in session.items:
        for mark in item.iter_markers("interpreted"):
            _interpret(session.config, *mark.args)


@pytest.fixture(scope="module", autouse=True)
def _frozen(request: pytest.FixtureRequest) -> None:
    """What earlier files imported and keep is not looked through again at each collection of garbage."""
    gc.collect()
    gc.freeze()
    request.config.add_cleanup(gc.unfreeze)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Callable[[pathlib.Path], Running]:
    """Waits for the cases of a file."""

    def ended(file: pathlib.Path) -> Running:
        running = _interpret(request.config, file)
        running.process.wait()
        return running

    return ended


def _interpret(config: pytest.Config, file: pathlib.Path) -> Running:
    """Starts it, once a run, in a process of its own: Triton decides when it is imported whether it interprets."""
    all_running = config.stash.setdefault(_RUNNING, {})
    if file not in all_running:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="interpreted_"))
        output, report = folder / "output.txt", folder / "report.xml"
        env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--junitxml={report}", f"--seed={config.option.seed}"]
        with output.open("w") as to:
            process = subprocess.Popen(command, env=env, cwd=file.parents[1], stdout=to, stderr=subprocess.STDOUT)
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # what runs beside it may have limits of time
        all_running[file] = Running(process, output, report)

        def end() -> None:
            process.kill()
            process.wait()
            shutil.rmtree(folder)

        config.add_cleanup(end)
    return all_running[file]


# --- counts -----------------------------------------------------------------------------------------------------------


_COUNTED = "counted"


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Iterator[Callable[..., None]]:
    """`counted(what, n=1)`: cases that a test has gone through; the run ends with the sums over all tests."""
    counts: Counter[str] = Counter()
    yield lambda what, n=1: counts.update({what: n})
    record_property(_COUNTED, json.dumps(counts))


def counts_in(junit: pathlib.Path) -> Counter[str]:
    """What the tests of another process counted, from its report."""
    properties = ElementTree.parse(junit).iter("property")
    return _sum(p.get("value", "") for p in properties if p.get("name") == _COUNTED)


def _sum(counts: Iterable[str]) -> Counter[str]:
    return sum((Counter(json.loads(one)) for one in counts), Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Here, with pytest-xdist too, are the reports of all tests: it sends them to the process that has the terminal."""
    if config.stash.get(_SUMMED, False):  # the other folder's conftest was first
        return
    config.stash[_SUMMED] = True
    reports = (r for r in itertools.chain(*terminalreporter.stats.values()) if getattr(r, "when", "") == "teardown")
    found = _sum(value for report in reports for name, value in report.user_properties if name == _COUNTED)
    if found:
        terminalreporter.write_line("counted: " + "; ".join(f"{n:,} {what}" for what, n in sorted(found.items())))
    if config.option.counts is not None:
        tests = {name: len(terminalreporter.stats.get(key, ())) for name, key in _OUTCOMES.items()}
        run = {**_machine(), "thorough": config.option.thorough, **tests, "counts": dict(sorted(found.items()))}
        config.option.counts.write_text(json.dumps(run, indent=1) + "\n")


_OUTCOMES = {"passed": "passed", "failed": "failed", "errors": "error", "skipped": "skipped"}
"""Numbers of tests in the file of counts, and pytest's own words for them."""


def _machine() -> dict[str, str | None]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether to repeat what is random so often that rare faults show."""
    return request.config.option.thorough


@pytest.fixture(autouse=True)
def _fresh_random(request: pytest.FixtureRequest) -> None:
    """Other inputs in each run and each test; a test alone gets those that it had among the others."""
    seed = request.config.option.seed ^ zlib.crc32(request.node.nodeid.rpartition("/")[2].encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code before the test, none left after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def cpp() -> None:
    """What Inductor needs to compile the C++ that it writes for the CPU, and for packages of any device."""
    headers = pathlib.Path(torch.__file__).parent / "include" / "torch" / "csrc"
    if not (headers.exists() and shutil.which("g++")):
        pytest.skip("needs g++ and torch's C++ headers")


@pytest.fixture
def inductor(device: str, request: pytest.FixtureRequest) -> str:
    """A device on which Inductor can compile."""
    if device == "cpu":
        request.getfixturevalue("cpp")
    return device


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, and the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
