"""Fixtures of both folders, imported by their conftests: device, and fresh random numbers that a seed brings back."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import zlib
from collections.abc import Iterator

import pytest
import torch

_SHOWN = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # the other folder's conftest was first
        parser.addoption(
            "--seed", type=int, default=None, help="random inputs of an earlier run (its header shows the seed)"
        )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.randrange(10**6)
    torch.set_num_threads(1)  # on inputs of this size threads do little but wait for each other


def pytest_report_header(config: pytest.Config) -> str | None:
    shown, config.stash[_SHOWN] = config.stash.get(_SHOWN, False), True
    return None if shown else f"random inputs: --seed {config.option.seed}"


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
