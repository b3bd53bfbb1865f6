"""Whole layers drawn at random, on the CUDA path in Triton's interpreter, which cannot round to bfloat16."""

from __future__ import annotations

import pytest
import torch
from cuda_path_cases import on_the_cpu
from fuzz import check, fuzz, layers
from hypothesis import given
from hypothesis import strategies as st

from dsmoe_op import cuda, ops

DTYPES = (torch.float32, torch.float16)


@pytest.fixture
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(ops, "_backend", lambda x: cuda)


@fuzz(16)
@given(layers(st.sampled_from([0, 1, 2, 5, 9]), DTYPES, H=48, E=8, I=16, S=32))
def test_any_layer_is_the_definition_within_its_roundings(cuda_path, counted, layer):
    check(layer, lambda what, n=1: counted(f"{what} on the CUDA path", n))
