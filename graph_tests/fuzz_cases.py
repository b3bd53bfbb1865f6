"""Whole layers drawn at random, on the CUDA path in Triton's interpreter, which cannot round to bfloat16."""

from __future__ import annotations

import pytest
import torch
from cuda_path_cases import on_the_cpu
from fuzz import beside, check, fuzz, layers
from hypothesis import given
from hypothesis import strategies as st

from dsmoe_op import cuda, formats, ops

DTYPES = (torch.float32, torch.float16)


@pytest.fixture
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(ops, "_backend", lambda x: cuda)


@fuzz(16)
@given(layers(st.sampled_from([0, 1, 2, 5, 9]), DTYPES, H=48, E=8, I=16, S=32))
def test_any_layer_is_the_definition_within_its_roundings(cuda_path, counted, layer):
    check(layer, lambda what, n=1: counted(f"{what} on the CUDA path", n))


@pytest.mark.parametrize("routed", [None, *formats.FORMATS])
@fuzz(2)
@given(data=st.data())
def test_any_quantised_layer_is_too(cuda_path, counted, routed, data):
    """In any mix of formats."""
    tokens, mix = st.sampled_from([5, 9, 2, 1]), (routed, data.draw(beside(routed)))
    layer = data.draw(layers(tokens, DTYPES, mix, H=48, E=8, I=16, S=32))
    check(layer, lambda what, n=1: counted(f"{what} on the CUDA path", n))
