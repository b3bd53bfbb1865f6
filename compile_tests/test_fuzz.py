"""Whole layers drawn at random, on the CPU: see `fuzz.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuzz import beside, check, definition, fuzz, layers, quantized_at_random
from hypothesis import given
from hypothesis import strategies as st
from layers import make_layer, same
from torch import Tensor

from dsmoe_op import dual_stream_moe, formats


@fuzz(200)
@given(layers(st.integers(0, 40)))
def test_any_layer_is_the_definition_within_its_roundings(counted, layer):
    check(layer, counted)


@fuzz(8)
@given(layers(st.integers(1000, 4096)))
def test_any_layer_of_many_tokens_is_too(counted, layer):
    check(layer, counted)


@pytest.mark.parametrize("routed", [None, *formats.FORMATS])
@fuzz(16)
@given(data=st.data())
def test_any_quantised_layer_is_too(counted, routed, data):
    """In any mix of formats."""
    check(data.draw(layers(st.integers(0, 40), mix=(routed, data.draw(beside(routed))))), counted)


@pytest.mark.parametrize("routed", [None, *formats.FORMATS])
@fuzz(2)
@given(data=st.data())
def test_any_quantised_layer_of_many_tokens_is_too(counted, routed, data):
    check(data.draw(layers(st.integers(1000, 4096), mix=(routed, data.draw(beside(routed))))), counted)


# --- the bounds themselves: each way to mistake a scale is seen -------------------------------------------------------


def mistaken(args: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """A tensor of a quantised weight in which scales or zero points are missing, or stand where the next one should."""
    suffixes = ("_scale", "_zero_point", "_global_scale")
    for name in (weight + suffix for weight in ("w13", "w2", "shared_w13", "shared_w2") for suffix in suffixes):
        if name in args:
            t = args[name]
            bits = t.view(torch.uint8) if t.itemsize == 1 else t
            for dim in range(t.dim()):
                yield name, f"the next in dim {dim}", bits.roll(1, dim).view(t.dtype)
            if not name.endswith("_zero_point"):
                one = torch.ones(t.shape)
                is_power = t.dtype == torch.uint8
                yield name, "missing", one.to(formats.E8M0).view(torch.uint8) if is_power else one.to(t.dtype)


def differs(a: Tensor, b: Tensor) -> bool:
    """By a factor of 2 somewhere, or in some zero point; of neighbours some are equal, or about."""
    if a.dtype in (torch.uint8, torch.int32):
        return not same(a, b)
    quotient = a.double() / b.double()
    return bool((torch.maximum(quotient, 1 / quotient) >= 2).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16's roundings hide a few
@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_scale_that_is_missing_or_anothers_is_out_of_bounds(counted, name, dtype) -> None:
    for S in (0, 80):  # the routed experts alone, and the shared one
        x, args = make_layer(9, way="topk_ids", H=144, I=144, S=S, dtype=dtype)
        if S:
            args["topk_ids"].fill_(-1)
        args = quantized_at_random(args, name, name, group=32, zero_point=True)
        want, bound = definition(x, args["topk_ids"], args["topk_weights"], args)
        assert ((dual_stream_moe(x, **args) - want).abs() <= bound).all()
        for tensor, how, t in mistaken(args):
            if tensor.startswith("shared_") == bool(S) and differs(t, args[tensor]):
                out = dual_stream_moe(x, **args | {tensor: t})
                assert not ((out - want).abs() <= bound).all(), (tensor, how)
                counted("mistaken scales and zero points, all out of bounds")
