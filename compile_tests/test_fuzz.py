"""Whole layers drawn at random, on the CPU: see `fuzz.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import bounds
import pytest
import torch
from bounds import Approx
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


FRACTIONS = [(name, None) for name in formats.FORMATS]
FRACTIONS += [(name, 13) for name, format in formats.FORMATS.items() if format.activations]  # as on Hopper


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # bfloat16's roundings hide a few
@pytest.mark.parametrize(("name", "fraction"), FRACTIONS)
def test_a_scale_that_is_missing_or_anothers_is_out_of_bounds(monkeypatch, counted, name, fraction, dtype) -> None:
    monkeypatch.setattr(bounds, "fp8_fraction", lambda device: fraction)
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


def on_a_matrix_unit(x: Tensor, w: Tensor, fraction: int) -> Tensor:
    """float64 [R, N]: fp8 by fp8 [R, K], [N, K] as published experiments say that Hopper's unit adds it up."""

    def power(t: Tensor) -> Tensor:
        """Of two in each number; subnormal ones have the least normal number's, and 0 has none."""
        return torch.exp2(torch.frexp(t.abs()).exponent.double() - 1).clamp(min=2.0**-6) * (t != 0)

    def cut(t: Tensor, unit: Tensor) -> Tensor:
        return torch.where(unit > 0, (t / unit).trunc() * unit, 0.0)

    x, w = x.double(), w.double()
    steps = []
    for step in range(0, x.shape[1], 128):
        sum = torch.zeros(len(x), len(w), 1, dtype=torch.float64)
        for first in range(step, min(step + 128, x.shape[1]), 32):
            a, b = (t[:, first : min(first + 32, step + 128)] for t in (x, w))
            terms = torch.cat([a[:, None] * b, sum], -1)
            before = torch.exp2(torch.frexp(sum).exponent.double() - 1) * (sum != 0)
            largest = torch.cat([power(a)[:, None] * power(b), before], -1).amax(-1, keepdim=True)
            sum = cut(terms, largest * 2.0**-fraction).sum(-1, keepdim=True)
            sum = cut(sum, torch.exp2(torch.frexp(sum).exponent.double() - 1 - fraction) * (sum != 0))
        steps.append(sum.squeeze(-1))
    return torch.stack(steps).sum(0)


def test_sums_that_a_matrix_unit_cuts_off_are_within_their_bound_and_not_within_float32s(counted) -> None:
    worst, beyond_float32 = 0.0, 0
    # Binary orders by which numbers differ beside what randn does, down to subnormal ones.
    for K, orders, positive in itertools.product((16, 144, 416), (0, 3, 7), (False, True)):
        parts = []
        for rows in (40, 24):
            t = torch.randn(rows, K) * 2.0 ** torch.randint(-orders, orders + 1, (rows, K))
            parts.append(formats.quantize_rows(t.abs() if positive else t, "fp8_channel"))
        (x, x_scale), (w, w_scale) = parts
        scales = x_scale.double() * w_scale.double().T
        exact = x.double() @ w.double().T * scales
        a, b = (Approx.exact(q.double() * scale.double()) for q, scale in parts)
        least = ((scale.double() * 2.0**-6).expand(q.shape) for q, scale in parts)
        bound = bounds.cut_off(a, b, *least, 13) + 1e-12 * exact.abs()
        lost = (on_a_matrix_unit(x, w, 13) * scales - exact).abs()
        assert (lost <= bound).all()
        assert ((on_a_matrix_unit(x, w, 9) * scales - exact).abs() > bound).any()
        worst = max(worst, float((lost / bound).max()))
        beyond_float32 += int((lost > a.linear(b).error).sum())
        counted("sums of fp8 products, cut off as Hopper does, within their bound", lost.numel())
    assert worst > 0.5  # the bound is no larger than it needs to be
    assert beyond_float32
