"""The kernels of the routing, compiled for sm_90 without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="no triton")

from sm90 import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    V3,
    Layer,
    check_resources,
    compiled,
    matrix_instructions,
)

from dsmoe_op import kernels  # noqa: E402
from dsmoe_op.config import MoEConfig  # noqa: E402
from dsmoe_op.kernels.launch import INTERPRET  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs Triton's compiler, and its interpreter is on")

__all__ = ["compiled"]


@pytest.mark.parametrize(
    ("dtype", "router_dtype", "kinds"),
    [
        (BF16, BF16, {"mma bf16", "wgmma bf16"}),
        (BF16, FP32, {"mma bf16", "wgmma bf16"}),  # a float32 weight in three exact parts
        (FP16, FP16, {"mma f16", "wgmma f16"}),
        (FP16, FP32, {"mma tf32", "wgmma tf32"}),  # in three products
        (FP32, FP32, set()),
    ],
)
def test_routing_kernels_fit_and_the_router_multiplies_as_it_must(compiled, tmp_path, dtype, router_dtype, kinds):
    Layer(dtype=dtype, router_dtype=router_dtype).routing()
    router = [kernel for kernel in compiled if kernel.metadata.name == "_router_logits"]
    assert {kind for kernel in router for kind in matrix_instructions(kernel)} == kinds
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(("E", "K", "Z"), [(1, 1, 0), (160, 6, 0), (512, 10, 0), (1024, 32, 0), (1024, 12, 256)])
def test_routing_kernels_fit_for_any_number_of_experts(compiled, tmp_path, E, K, Z):
    groups = {"n_group": 8, "topk_group": 3} if E == 160 else {}
    layer = Layer(E=E, H=512, dtype=BF16, config=MoEConfig(top_k=K, num_zero_experts=Z, score="softmax", **groups))
    layer.routing()
    layer.ends()
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(
    "knobs",
    [
        {"score": "none", "normalize": "none"},
        {"score": "none", "weights_from": "topk_softmax", "normalize": "sum"},
        {"score": "none", "weights_from": "topk_sigmoid", "score_dtype": "model"},
        {"score": "none", "weights_from": "topk_sigmoid", "choice_on": "logit", "normalize": "sum_clamp"},
        {"score": "sqrtsoftplus", "score_dtype": "model", "weight_dtype": "model"},
        {"score": "softmax", "score_dtype": "model", "n_group": 8, "topk_group": 4, "group_mask": "zero"},
        {"score": "softmax", "choice_on": "logit", "n_group": 8, "topk_group": 4, "group_score": "max"},
    ],
)
def test_the_choice_compiles_with_every_value_of_every_knob(compiled, tmp_path, knobs):
    Layer(E=64, H=512, dtype=BF16, config=MoEConfig(top_k=4, **knobs)).routing()
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize("T", [1, 500])
@pytest.mark.parametrize("E", [64, 256, 1024])
def test_the_choice_sums_integers_alone(compiled, T, E):
    """So no layout decides a bit, and `route` has the bits of the layer. What is summed by k is added one by one."""
    for softmax in ({"score": "softmax"}, {"weights_from": "topk_softmax", "n_group": 8, "topk_group": 4}):
        config = MoEConfig(top_k=8, normalize="sum", **softmax)
        layer = Layer(T=T, E=E, config=config)
        weight = layer.weight(E, layer.H)
        logits = layer.tensor(kernels.router_splits(T, layer.dtype, weight), T, E, dtype=FP32)
        compiled.clear()
        for rows in (None, layer.rows()):
            kernels.choose(
                logits, None, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16,
                router_weight=weight, rows=rows,
            )  # fmt: skip
        for kernel in compiled:
            assert sums(kernel)
            assert sums(kernel) <= {"i32", "i64"}


@pytest.mark.parametrize(
    ("E", "config"),
    [
        (8, MoEConfig(top_k=2, score="softmax")),
        (64, MoEConfig(top_k=6, score="softmax", normalize="sum")),
        (128, MoEConfig(top_k=8, score="none", weights_from="topk_softmax")),
        (256, V3),
        (160, MoEConfig(top_k=6, n_group=8, topk_group=3, group_score="max")),
        (512, MoEConfig(top_k=10, score="softmax", normalize="sum")),
    ],
)
@pytest.mark.parametrize("T", [1, 5000])
def test_the_choice_crosses_no_warps(compiled, T, E, config):
    """Where each has a token. Nothing is exchanged through shared memory, as reductions across warps would, and changes
    of layout."""
    layer = Layer(T=T, E=E, H=512 if T > 1 else 7168, config=config)
    weight, bias = layer.weight(E, layer.H), layer.tensor(E, dtype=FP32)
    partial = layer.tensor(kernels.router_splits(T, layer.dtype, weight), T, E, dtype=FP32)
    for logits in (layer.tensor(T, E, dtype=BF16), partial):
        kernels.choose(logits, bias, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16)
    assert [kernel.metadata.shared for kernel in compiled] == [0, 0]


@pytest.mark.parametrize(
    ("E", "config", "shares"),
    [
        (64, MoEConfig(top_k=6, score="softmax"), 1),
        (128, MoEConfig(top_k=8), 2),
        (256, V3, 4),
        (300, MoEConfig(top_k=16, n_group=2, topk_group=1), 2),
        (384, MoEConfig(top_k=8, n_group=1, topk_group=1), 4),
        (512, MoEConfig(top_k=10, score="softmax"), 4),
    ],
)
def test_few_slots_are_chosen_for_by_warps_that_share_a_token(compiled, tmp_path, E, config, shares):
    """In the order's launch; each warp with two rows of 32 logits at least, and with whole groups."""
    layer = Layer(T=1, E=E, config=config)
    weight = layer.weight(E, layer.H)
    logits = layer.tensor(kernels.router_splits(1, layer.dtype, weight), 1, E, dtype=FP32)
    kernels.choose(
        logits, None, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16, router_weight=weight,
        rows=layer.rows(),
    )  # fmt: skip
    (kernel,) = compiled
    assert kernel.metadata.num_warps == shares
    check_resources(compiled, tmp_path)


@pytest.mark.parametrize(("E", "config"), [(256, V3), (512, MoEConfig(top_k=10, score="softmax"))])
def test_the_order_of_33_to_64_slots_takes_no_barrier_more_than_that_of_fewer(compiled, E, config):
    """They are two parts of each warp's lanes, so no warp waits for another one's."""
    barriers = []
    for T in (2, 6):
        layer = Layer(T=T, E=E, config=config)
        weight = layer.weight(E, layer.H)
        logits = layer.tensor(16, T, E, dtype=FP32)
        compiled.clear()
        kernels.choose(
            logits, None, None, layer.slots(), layer.slots(FP32), config=config, model_dtype=BF16,
            router_weight=weight, rows=layer.rows(),
        )  # fmt: skip
        (kernel,) = compiled
        barriers.append(len(re.findall(r"\bbar(?:rier)?\.sync", kernel.asm["ptx"])))
    assert barriers[0] == barriers[1] > 0


def sums(kernel: Any) -> set[str]:
    """The type of each sum in the IR."""
    return set(re.findall(r"arith\.add[fi] [^\n]* : (\w+)[^\n]*\n\s*tt\.reduce\.return", kernel.asm["ttgir"]))
