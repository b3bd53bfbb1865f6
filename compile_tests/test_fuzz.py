"""Whole layers drawn at random, on the CPU: see `fuzz.py`."""

from __future__ import annotations

from fuzz import check, fuzz, layers
from hypothesis import given
from hypothesis import strategies as st


@fuzz(200)
@given(layers(st.integers(0, 40)))
def test_any_layer_is_the_definition_within_its_roundings(counted, layer):
    check(layer, counted)


@fuzz(8)
@given(layers(st.integers(1000, 4096)))
def test_any_layer_of_many_tokens_is_too(counted, layer):
    check(layer, counted)
