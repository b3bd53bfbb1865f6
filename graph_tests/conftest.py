"""Fixtures of the tests of streams and graphs."""

from __future__ import annotations

import pytest
import torch
from fixtures import (
    _fresh_random,
    device,
    fresh_dynamo,
    pytest_addoption,
    pytest_configure,
    pytest_report_header,
)
from gpu import Block

__all__ = [
    "_fresh_random",
    "device",
    "fresh_dynamo",
    "pytest_addoption",
    "pytest_configure",
    "pytest_report_header",
]


@pytest.fixture(scope="session")
def blocks(request: pytest.FixtureRequest) -> dict[torch.dtype, Block]:
    """One layer on the GPU for each dtype."""
    torch.manual_seed(request.config.option.seed)
    return {dtype: Block(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


@pytest.fixture
def block(blocks: dict[torch.dtype, Block]) -> Block:
    """The layer in bf16."""
    return blocks[torch.bfloat16]
