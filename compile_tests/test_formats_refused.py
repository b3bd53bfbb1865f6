"""Bad input of quantised weights: what is refused, and in which words."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layers import make_layer, quantized
from refusals import bad, refused, refused_untraced, split
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsmoe_op import (
    MoEConfig,
    dual_stream_moe,
    dual_stream_moe_unfinalized,
    prepare,
)
from dsmoe_op.formats import FORMATS

E4M3 = torch.float8_e4m3fn
NAMES = tuple(FORMATS)
ANY = pytest.mark.parametrize("name", NAMES)
SMALL = {"E": 5, "H": 40, "I": 24, "S": 56}
"""No multiples of a block or of a group; two int32 and more a row."""


def make_quantized(
    routed: str | None = None, shared: str | None = None, *, options: dict[str, Any] | None = None, **parts: Any
) -> tuple[Tensor, dict[str, Any]]:
    x, layer = make_layer(**{**SMALL, **parts})
    return x, quantized(layer, routed, shared, **(options or {}))


def as_int32(t: Tensor) -> Tensor:
    return t.view(torch.int32)


def first_rows(count: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t[..., :count, :].contiguous()


ZERO_POINTS = {"zero_point": True}
# Sizes: T=7, H=40, E=5, K=3, I=24, S=56.
CASES = [
    # weights
    bad("w13: expected float8_e4m3fn, got float32", lambda t: t.float(), routed="fp8_block"),
    bad("w2: expected float8_e4m3fn, got uint8", lambda t: t.view(torch.uint8), routed="fp8_channel"),
    bad("w13: expected float8_e4m3fn, got float8_e5m2", lambda t: t.to(torch.float8_e5m2), routed="fp8_tensor"),
    bad("shared_w13: expected uint8 or int8, got int32", as_int32, shared="nvfp4"),
    bad("w2: expected uint8 or int8, got float8_e4m3fn", lambda t: t.view(E4M3), routed="mxfp4"),
    bad("w13: expected int32 or uint8, got int8", lambda t: t.view(torch.int8), routed="int4"),
    bad(
        "shared_w2: expected float32 as hidden_states has, or a shared_format that tells what it is, got uint8",
        lambda t: t.byte(),
        routed="int4",
    ),
    bad("w13: expected 3 dims [E, 2I, H/2=20], got [48, 20]", lambda t: t[0], routed="nvfp4"),
    bad(
        "w13: expected an even number of gate and up rows [E, 2I, H/8=5], got [5, 47, 5]",
        lambda t: as_int32(t)[:, 1:],
        routed="int4",
    ),
    bad("w13: expected [E=5, 2I=48, H=40], got [5, 48, 39]", lambda t: t[..., 1:], routed="fp8_block"),
    bad("w13: expected [E=5, 2I=48, H/2=20], got [5, 48, 40]", lambda t: t.repeat(1, 1, 2), routed="mxfp4"),
    bad("w2: expected [E=5, H=40, I/8=3], got [4, 40, 3]", lambda t: as_int32(t)[1:], routed="int4"),
    bad("w2: expected [E=5, H=40, I/2=12], got [5, 12, 40]", lambda t: t.mT, routed="nvfp4"),
    bad("shared_w13: expected [2S, H/2=20] with 2S above 0, got [20]", lambda t: t[0], shared="int4"),
    bad("shared_w2: expected [H=40, S/2=28], got [40, 27]", lambda t: t[:, 1:], shared="int4"),
    bad(
        "w13: expected H to be a multiple of 8 for its dtype, got 36",
        {"hidden_states": lambda t: t[:, :36], "w13": as_int32},
        routed="int4",
    ),
    bad(
        "w2: expected I to be a multiple of 8 for its dtype, got 20",
        {"w13": first_rows(40), "w13_scale": first_rows(40), "w2": as_int32},
        routed="int4",
    ),
    bad(
        "shared_w2: expected S to be a multiple of 2 for its dtype, got 55",
        {"shared_w13": first_rows(110), "shared_w13_scale": first_rows(110)},
        shared="mxfp4",
    ),
    bad("w13: expected device cpu, got meta", lambda t: t.to("meta"), routed="int4"),
    bad(
        "w13: expected a contiguous tensor, got strides [1920, 1, 48]",
        lambda t: t.mT.contiguous().mT,
        routed="fp8_block",
    ),
    bad(
        "shared_w2: expected a contiguous tensor, got strides [56, 2]", lambda t: t.repeat(1, 2)[:, ::2], shared="mxfp4"
    ),
    # scales
    bad("w13_scale: expected a tensor for the format 'fp8_block', got None", {"w13_scale": None}, routed="fp8_block"),
    bad("shared_w2_scale: expected a tensor for the format 'int4', got None", {"shared_w2_scale": None}, shared="int4"),
    bad("w13_scale: expected float32 or float8_e8m0fnu or uint8, got float16", lambda t: t.half(), routed="fp8_block"),
    bad("w2_scale: expected float32 or bfloat16, got float16", lambda t: t.half(), routed="fp8_channel"),
    bad("w2_scale: expected float32, got bfloat16", lambda t: t.bfloat16(), routed="fp8_tensor"),
    bad("shared_w2_scale: expected float8_e4m3fn, got float32", lambda t: t.float(), shared="nvfp4"),
    bad("w2_scale: expected float8_e8m0fnu or uint8, got int8", lambda t: t.view(torch.int8), routed="mxfp4"),
    bad("w2_scale: expected bfloat16 or float16 or float32, got uint8", lambda t: t.byte(), routed="int4"),
    bad(
        "w13_scale: expected [5, 2, 1] or [5, 1, 1], got [5, 3, 1]",
        {"w13_scale": torch.ones(5, 3, 1)},
        routed="fp8_block",
    ),
    bad(
        "w13_scale: expected [5, 1, 1], got [5, 2, 1]",
        {"w13_scale": torch.ones(5, 2, 1)},
        routed="fp8_block",
        config=MoEConfig(top_k=3, w13_order="interleaved"),
    ),
    bad("shared_w13_scale: expected [2, 1] or [1, 1], got [2]", lambda t: t[:, 0], shared="fp8_block"),
    bad("w13_scale: expected [5, 48, 1], got [5, 48]", lambda t: t[..., 0], routed="fp8_channel"),
    bad(
        "w13_scale: expected [5] or [5, 1] or [5, 2], got [5, 3]", {"w13_scale": torch.ones(5, 3)}, routed="fp8_tensor"
    ),
    bad("w2_scale: expected [5] or [5, 1], got [5, 2]", {"w2_scale": torch.ones(5, 2)}, routed="fp8_tensor"),
    bad(
        "shared_w13_scale: expected [] or [1] or [2], got [3]", {"shared_w13_scale": torch.ones(3)}, shared="fp8_tensor"
    ),
    bad("w13_scale: expected [5, 48, 3], got [5, 48, 2]", lambda t: t[..., 1:].contiguous(), routed="nvfp4"),
    bad("w2_scale: expected [5, 40, 1], got [5, 40, 2]", lambda t: t.repeat(1, 1, 2), routed="mxfp4"),
    bad(
        "w13_scale: expected [5, 48, 2] or [5, 48, 1], got [5, 48, 3]",
        {"w13_scale": torch.ones(5, 48, 3)},
        routed="int4",
    ),
    bad("w13_scale: expected device cpu, got meta", lambda t: t.to("meta"), routed="mxfp4"),
    bad(
        "w13_scale: expected a contiguous tensor, got strides [96, 1, 48]",
        lambda t: t.mT.contiguous().mT,
        routed="int4",
    ),
    # the other tensors
    bad(
        "w13_zero_point: expected [5, 24, 2], got [5, 48, 2]",
        lambda t: t.repeat(1, 2, 1),
        routed="int4",
        options=ZERO_POINTS,
    ),
    bad(
        "w2_zero_point: expected [5, 5, 1], got [5, 20, 1]",
        {"w2_zero_point": torch.ones(5, 20, 1).int()},
        routed="int4",
    ),
    bad(
        "shared_w2_zero_point: expected int32 or uint8, got int8",
        {"shared_w2_zero_point": torch.ones(20, 2).char()},
        shared="int4",
    ),
    bad(
        "w13_global_scale: expected a tensor for the format 'nvfp4', got None",
        {"w13_global_scale": None},
        routed="nvfp4",
    ),
    bad("w2_global_scale: expected float32, got bfloat16", lambda t: t.bfloat16(), routed="nvfp4"),
    bad("w13_global_scale: expected [5] or [5, 1] or [5, 2], got []", lambda t: t[0, 0], routed="nvfp4"),
    bad(
        "w2_input_scale: expected a tensor for the format 'fp8_tensor', got None",
        {"w2_input_scale": None},
        routed="fp8_tensor",
    ),
    bad("w13_input_scale: expected [5] or [1] or [], got [4]", lambda t: t.repeat(4), routed="fp8_tensor"),
    bad("shared_w2_input_scale: expected [1] or [], got [2]", lambda t: t.repeat(2), shared="fp8_tensor"),
    # tensors that the format does not have
    bad(
        "w13_zero_point: expected None with routed_format='nvfp4', got a tensor",
        {"w13_zero_point": torch.ones(5, 24, 3).byte()},
        routed="nvfp4",
    ),
    bad(
        "shared_w2_global_scale: expected None with shared_format='int4', got a tensor",
        {"shared_w2_global_scale": torch.ones(1)},
        shared="int4",
    ),
    bad(
        "w2_input_scale: expected None with routed_format='fp8_block', got a tensor",
        {"w2_input_scale": torch.ones(1)},
        routed="fp8_block",
    ),
    bad("w2_scale: expected None with routed_format=None, got a tensor", {"w2_scale": torch.ones(5)}, shared="int4"),
    bad(
        "shared_w13_scale: expected None without shared_w13, got a tensor",
        {"shared_w13_scale": torch.ones(1)},
        routed="int4",
        S=0,
    ),
    bad("w13_scale: expected a tensor, got float", {"w13_scale": 0.5}, routed="fp8_tensor"),
    # a schedule that needs one format
    bad(
        "schedule: 'fused' expects shared_format to be routed_format='int4', got None",
        {"schedule": "fused"},
        routed="int4",
        S=48,
    ),
    bad(
        "schedule: 'fused' expects shared_format to be routed_format='mxfp4', got 'nvfp4'",
        {"schedule": "fused"},
        routed="mxfp4",
        shared="nvfp4",
        S=48,
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_refused(case):
    x, layer = make_quantized(**case.layer)
    tensors, others = split(case.spoil({"hidden_states": x, **layer}))
    refused_untraced(case.text, dual_stream_moe, tensors, **others)


@pytest.mark.usefixtures("fresh_dynamo", "no_launch")
@pytest.mark.parametrize("case", CASES[::7])
def test_a_bad_argument_is_refused_with_the_same_text_while_compiling(case):
    x, layer = make_quantized(**case.layer)
    tensors, others = split(case.spoil({"hidden_states": x, **layer}))
    refused(case.text, dual_stream_moe, tensors, **others)


def spoilt(t: Tensor, *, may_be_missing: bool) -> Iterator[tuple[str, Tensor | None]]:
    """Each kind of bad tensor in the place of a good one, with the end of the text that refuses it."""
    if not may_be_missing:
        yield "expected .+, got None", None
    yield r"expected \w+( or \w+)*, got complex64", torch.zeros(t.shape, dtype=torch.complex64)
    yield "expected device cpu, got meta", t.to("meta")
    yield r"expected .*\[.*\].*, got \[1, 1(, .*)?\]", t[None, None]
    for dim, size in enumerate(t.shape):
        if size > 1:
            twice = t.new_empty([2 * n if d == dim else n for d, n in enumerate(t.shape)])
            every_second = twice[tuple(slice(None, None, 2 if d == dim else 1) for d in range(t.dim()))]
            yield r"expected a contiguous tensor, got strides \[.+\]", every_second


@pytest.mark.usefixtures("no_launch")
@ANY
def test_every_tensor_of_a_format_is_checked_and_named(name):
    call = random.choice((dual_stream_moe, dual_stream_moe_unfinalized))
    x, layer = make_quantized(name, name, options={"zero_point": True} if name == "int4" else {})
    weights = [n for n in layer if n.startswith(("w13", "w2", "shared_w"))]
    assert len(weights) == 4 * {"nvfp4": 3, "fp8_tensor": 3, "int4": 3}.get(name, 2)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in layer.items()}
    for n in weights:
        is_weight = n.endswith(("w13", "w2"))
        for text, t in spoilt(layer[n], may_be_missing=is_weight or n.endswith("_zero_point")):
            with pytest.raises(ValueError, match=f"^{n}: {text}$") as eager:
                call(x, **{**layer, n: t})
            with mode, pytest.raises(ValueError, match=f"^{re.escape(str(eager.value))}$"):
                call(mode.from_tensor(x), **{**fakes, n: None if t is None else mode.from_tensor(t)})


@pytest.mark.usefixtures("no_launch")
@ANY
def test_no_size_of_any_tensor_of_a_format_can_be_off_by_one(name):
    """Whichever tensor is named, the text shows the shapes that do not fit."""
    x, layer = make_quantized(name, name, options={"zero_point": True} if name == "int4" else {})
    for n in [n for n in layer if n.startswith(("w13", "w2", "shared_w"))]:
        for dim, grow in itertools.product(range(layer[n].dim()), (1, -1)):
            shape = list(layer[n].shape)
            shape[dim] += grow
            if (
                n in ("w13_scale", "w13_global_scale", "shared_w13_scale", "shared_w13_global_scale")
                and shape[dim] == 1
            ):
                continue  # one for both halves
            if shape[dim] == 0 and len(shape) == 1:
                continue
            with pytest.raises(ValueError, match=r"^\w+: expected .+, got \[.*\]$") as e:
                dual_stream_moe(x, **{**layer, n: torch.zeros(shape, dtype=layer[n].dtype)})
            named = str(e.value).partition(":")[0]
            other_group = n.endswith("_scale") and named == n.removesuffix("_scale") + "_zero_point"
            assert named == n or n in ("w13", "shared_w13") or other_group


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("routed", [None, *NAMES])
def test_no_tensor_is_taken_that_the_format_does_not_have(routed):
    shared = random.choice(NAMES)
    has = {
        None: [],
        "nvfp4": ["_scale", "_global_scale"],
        "fp8_tensor": ["_scale", "_input_scale"],
        "int4": ["_scale", "_zero_point"],
    }
    x, layer = make_quantized(routed, shared)
    for weight, name in (("w13", routed), ("w2", routed), ("shared_w13", shared), ("shared_w2", shared)):
        for suffix in ("_scale", "_zero_point", "_global_scale", "_input_scale"):
            if suffix in has.get(name, ["_scale"]):
                continue
            field = "shared_format" if weight.startswith("shared") else "routed_format"
            text = f"{weight}{suffix}: expected None with {field}={name!r}, got a tensor"
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                dual_stream_moe(x, **layer, **{weight + suffix: torch.ones(1)})


@pytest.mark.usefixtures("fresh_dynamo", "no_launch")
def test_an_argument_of_another_name_is_refused():
    x, layer = make_quantized("int4", "mxfp4")
    for call in (dual_stream_moe, dual_stream_moe_unfinalized):
        text = f"{call.__name__}: expected the tensors of dual_stream_moe, got also w13_scales, zero"
        for value in (torch.ones(1), None):
            with pytest.raises(TypeError, match=f"^{text}$"):
                call(x, **layer, zero=value, w13_scales=value)
    with pytest.raises(TypeError, match=r"^prepare: expected the tensors of dual_stream_moe, got also w4$"):
        prepare(x, **layer, w4=x)
    assert prepare(x, **layer) is None
    compiled = torch.compile(lambda x: dual_stream_moe(x, **layer, w4=x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="dual_stream_moe: expected the tensors of dual_stream_moe, got also w4"):
        compiled(x)


def test_scales_that_are_none_are_as_if_left_out():
    x, layer = make_layer(**SMALL)
    assert torch.equal(
        dual_stream_moe(x, **layer, w13_scale=None, shared_w2_input_scale=None), dual_stream_moe(x, **layer)
    )
