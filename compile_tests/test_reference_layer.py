"""The definition of the layer after its routing, held against loops over Python floats."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from layers import make_layer
from torch import Tensor

from dsmoe_op import MoEConfig, reference

T, H, E, I, S, K = 5, 6, 4, 3, 7, 2
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"]
Row = list[float]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def activate(name: str, gate: float, up: float, limit: float | None, after: bool) -> float:
    """By the letter: gate <= limit, before the activation or after it; -limit <= up <= limit."""
    if limit is not None:
        up = min(max(up, -limit), limit)
        if not after:
            gate = min(gate, limit)
    if name == "silu":
        gate = gate * sigmoid(gate)
    elif name == "gelu":
        gate = gate * 0.5 * (1 + math.erf(gate / math.sqrt(2)))
    elif name == "gelu_tanh":
        gate = gate * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    elif name == "swiglu_oai":
        gate, up = gate * sigmoid(1.702 * gate), up + 1
    if limit is not None and after:
        gate = min(gate, limit)
    return gate * up


def times(weight: list[Row], x: Row, bias: Row | None = None) -> Row:
    out = [math.fsum(a * b for a, b in zip(row, x, strict=True)) for row in weight]
    return out if bias is None else [o + b for o, b in zip(out, bias, strict=True)]


def mlp(
    x: Row,
    w13: list[Row],
    w2: list[Row],
    config: MoEConfig,
    limit: float | None,
    order: str,
    w13_bias: Row | None = None,
    w2_bias: Row | None = None,
) -> Row:
    h = times(w13, x, w13_bias)
    half = len(h) // 2
    if config.activation == "relu2":
        h = [max(v, 0.0) ** 2 for v in h]
    else:
        if order == "gate_up":
            pairs = [(h[i], h[half + i]) for i in range(half)]
        elif order == "up_gate":
            pairs = [(h[half + i], h[i]) for i in range(half)]
        else:
            pairs = [(h[2 * i], h[2 * i + 1]) for i in range(half)]
        h = [activate(config.activation, g, u, limit, config.clamp_after_activation) for g, u in pairs]
    return times(w2, h, w2_bias)


def layer_row(t: int, x: Row, layer: dict[str, Any]) -> Row:
    """Row t of the output, from ids and weights that are given."""
    config: MoEConfig = layer["config"]
    if "num_valid_tokens" in layer and t >= layer["num_valid_tokens"][0]:
        return [0.0] * H
    expert_map = layer.get("expert_map") or list(range(E))
    total = [0.0] * H
    for id, weight in zip(layer["topk_ids"][t], layer["topk_weights"][t], strict=True):
        if 0 <= id < len(expert_map) and expert_map[id] >= 0:
            e = expert_map[id]
            bias = [layer[name][e] for name in ("w13_bias", "w2_bias") if name in layer]
            given = [weight * v for v in x] if config.apply_router_weight_on_input else x
            y = mlp(given, layer["w13"][e], layer["w2"][e], config, config.clamp_routed, config.w13_order, *bias)
            factor = 1.0 if config.apply_router_weight_on_input else weight
        elif len(expert_map) <= id < len(expert_map) + config.num_zero_experts:
            y, factor = x, weight
        else:
            continue
        total = [a + factor * b for a, b in zip(total, y, strict=True)]
    if config.scale_on == "output":
        total = [config.routed_scaling_factor * v for v in total]
    if "shared_w13" in layer:
        shared = mlp(x, layer["shared_w13"], layer["shared_w2"], config, config.clamp_shared, "gate_up")
        gate = sigmoid(times(layer["shared_gate"], x)[0]) if "shared_gate" in layer else 1.0
        total = [a + gate * b for a, b in zip(total, shared, strict=True)]
    return [v / 2 for v in total] if config.combine == "average" else total


def check(config: MoEConfig, **options: Any) -> None:
    x, layer = make_layer(T, way="topk_ids", H=H, E=E, I=I, S=options.pop("S", S), config=config, **options)
    layer["w13"] *= 3  # so that the clamps clamp
    layer["topk_ids"][1] = torch.tensor([-1, 99])
    layer["topk_ids"][2] = 3  # twice in a row
    out = reference.moe(x, **layer)
    assert out.dtype == torch.float64
    plain = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in layer.items()}
    want = torch.tensor([layer_row(t, row, plain) for t, row in enumerate(x.tolist())], dtype=torch.float64)
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_clamps_and_orders(activation, order):
    limits = [None] if activation == "relu2" else [None, 0.7]
    for routed, shared, after in itertools.product(limits, limits, [False, True]):
        config = MoEConfig(
            top_k=K,
            activation=activation,
            w13_order=order,
            clamp_routed=routed,
            clamp_shared=shared,
            clamp_after_activation=after,
        )
        check(config)


def test_the_sum_in_every_combination():
    for combine, scale_on, S_, gate, bias, valid, E_global, special in itertools.product(
        ["sum", "average"], ["weights", "output"], [0, S], [False, True], [False, True], [None, 3], [None, 9], range(3)
    ):
        config = MoEConfig(
            top_k=K,
            combine=combine,
            scale_on=scale_on,
            routed_scaling_factor=2.5,
            num_zero_experts=2 * (special == 1),
            apply_router_weight_on_input=special == 2,
        )
        check(config, S=S_, shared_gate=gate, expert_bias=bias, valid_tokens=valid, E_global=E_global)


@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_the_ways_in_meet_in_the_ids_and_weights_of_route(way):
    x, layer = make_layer(way=way, dtype=torch.float64, correction_bias=True, router_bias=way == "router_weight")
    config, bias = layer["config"], layer.pop("correction_bias")
    if way == "router_weight":
        logits = x @ layer.pop("router_weight").mT + layer.pop("router_bias")
    else:
        logits = layer.pop("router_logits")
    ids, weights = reference.route(logits, config, correction_bias=bias)
    given = reference.moe(x, **layer, topk_ids=ids, topk_weights=weights)
    torch.testing.assert_close(reference.moe(x, **layer, router_logits=logits, correction_bias=bias), given)
