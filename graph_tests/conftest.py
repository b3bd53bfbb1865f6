"""Fixtures of the tests of streams and graphs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from fixtures import (
    _fresh_random,
    _frozen,
    counted,
    device,
    fresh_dynamo,
    interpreted,
    poisoned,
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_terminal_summary,
    thorough,
)
from gpu import FORMATS, Block, schedules_of
from layers import WAYS

from dsmoe_op import dual_stream_moe, dual_stream_moe_unfinalized

__all__ = [
    "_fresh_random",
    "_frozen",
    "counted",
    "device",
    "fresh_dynamo",
    "interpreted",
    "poisoned",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_terminal_summary",
    "thorough",
]


@pytest.fixture(scope="session")
def sm_90() -> None:
    """For tests of what only such a GPU runs."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of sm_90")


@pytest.fixture(scope="session")
def blocks(request: pytest.FixtureRequest) -> dict[torch.dtype, Block]:
    """One layer on the GPU for each dtype."""
    torch.manual_seed(request.config.option.seed)
    blocks = {dtype: Block(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    _compile_once("dtypes", blocks.values())
    return blocks


@pytest.fixture(scope="session")
def quantised_blocks(request: pytest.FixtureRequest) -> dict[str, Block]:
    """The layers of `gpu.FORMATS` but the first."""
    torch.manual_seed(request.config.option.seed)
    blocks = {name: Block(formats=formats) for name, formats in FORMATS.items() if name != "16bit"}
    _compile_once("formats", blocks.values())
    return blocks


def _compile_once(what: str, blocks: Iterable[Block]) -> None:
    """The first process of pytest-xdist that comes here compiles all, while the others wait."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run:
        with _first_of(f"{run}_{what}") as is_first:
            if is_first:
                _compile(blocks)


@contextlib.contextmanager
def _first_of(run: str) -> Iterator[bool]:
    """Whether this process of pytest-xdist is the first of the run to come here; the others wait until it is done."""
    with Path(tempfile.gettempdir(), f"dsmoe_op_tests_{run}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield os.fstat(file.fileno()).st_size == 0
        file.write("done")


def _compile(blocks: Iterable[Block]) -> None:
    """What these layers launch, with all cores, into Triton's cache on disk: else each process would compile it all."""
    for block in blocks:
        for way in WAYS:
            x, args = block.inputs(3, way)
            for schedule in schedules_of(block.formats):
                dual_stream_moe(x, **args, schedule=schedule)
                if block.dtype == torch.bfloat16:
                    dual_stream_moe_unfinalized(x, **args, schedule=schedule)


@pytest.fixture
def block(request: pytest.FixtureRequest) -> Block:
    """The layer in bf16; a test may ask for one of `gpu.FORMATS`."""
    name = getattr(request, "param", "16bit")
    if name != "16bit":
        return request.getfixturevalue("quantised_blocks")[name]
    return request.getfixturevalue("blocks")[torch.bfloat16]
