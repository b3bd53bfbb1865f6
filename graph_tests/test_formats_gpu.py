"""Quantised weights on a GPU: against the float64 reference, and bit for bit across schedules and replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import CONFIG, SIZES, capture, clear_rows, needs_gpu
from layers import error, make_layer, quantized

from dsmoe_op import dual_stream_moe, formats, reference

pytestmark = needs_gpu

FP8 = {name for name, format in formats.FORMATS.items() if format.activations is not None}
MIXES = [*((name, name) for name in formats.FORMATS), ("int4", None), (None, "fp8_block"), ("mxfp4", "fp8_channel")]
TOKENS = (1, 7, 64, 300)


def limit(*names: str | None) -> float:
    return 2e-2 if FP8.intersection(names) else 1e-2


class Quantised:
    """A bf16 layer with weights in these formats, and sizes that are no multiple of 128."""

    sizes = SIZES | {"H": 272, "I": 144, "S": 288}

    def __init__(self, routed: str | None, shared: str | None) -> None:
        _, args = make_layer(1, config=CONFIG, dtype=torch.bfloat16, device="cuda", shared_gate=True, **self.sizes)
        self.args = quantized(args, routed, shared)
        self.limit = limit(routed, shared)

    def inputs(self, T: int) -> torch.Tensor:
        x = torch.randn(2 * T + 16, self.sizes["H"], device="cuda").bfloat16()
        return x[clear_rows(x, T, self.args)].contiguous()

    def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return dual_stream_moe(x, **self.args, **options)


@pytest.fixture(scope="module", params=MIXES, ids=lambda mix: "-".join(map(str, mix)))
def layer(request) -> Quantised:
    return Quantised(*request.param)


def test_a_quantised_layer_is_the_reference_at_every_size(layer) -> None:
    for T in TOKENS:
        x = layer.inputs(T)
        assert error(layer(x), reference.moe(x, **layer.args)) <= layer.limit, T


def test_schedules_with_the_same_kernels_give_the_same_bits(layer) -> None:
    for T in TOKENS:
        x = layer.inputs(T)
        serial = layer(x, schedule="serial")
        for schedule in ("dual", "dual_shared_main"):
            assert torch.equal(layer(x, schedule=schedule), serial), (T, schedule)


def test_a_replay_with_new_contents_has_the_bits_of_the_eager_call(layer) -> None:
    for T in TOKENS:
        x = layer.inputs(T)
        layer(x)
        graph, out = capture(lambda x=x: layer(x))
        for _ in range(2):
            x.copy_(layer.inputs(T))
            graph.replay()
            assert torch.equal(out, layer(x)), T


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_fused_schedule_takes_one_format_of_both(name) -> None:
    layer = Quantised(name, name)
    for T in TOKENS:
        x = layer.inputs(T)
        assert error(layer(x, schedule="fused"), reference.moe(x, **layer.args)) <= layer.limit, T


@pytest.mark.parametrize("zero_point", [False, True])
def test_columns_that_are_not_there_are_no_infinite_numbers(zero_point) -> None:
    """A code of 0 there would stand for -8 scales, beyond the largest float16, and times 0 for NaN."""
    _, args = make_layer(1, config=CONFIG, dtype=torch.float16, device="cuda", **(SIZES | {"H": 272, "I": 144}))
    args = quantized(args, "int4", zero_point=zero_point)
    args["w13_scale"].fill_(9000.0)
    args["w13"].fill_(0x88)
    if zero_point:
        args["w13_zero_point"].fill_(0x88)
    x = torch.randn(7, 272, device="cuda").half()
    assert dual_stream_moe(x, **args).isfinite().all()


@pytest.mark.parametrize("name", sorted(FP8))
def test_a_nan_of_one_token_stays_in_its_row(name) -> None:
    layer = Quantised(name, name)
    x = layer.inputs(7)
    good = layer(x)
    x[3, 5] = float("nan")
    bad = layer(x)
    assert bad[3].isnan().all()
    others = torch.arange(7, device="cuda") != 3
    assert torch.equal(bad[others], good[others])
