"""Random small layers for tests: every dim has another size, and H, I and S are multiples of 16, as CUDA asks for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from dsmoe_op import MoEConfig, formats, reference
from dsmoe_op.checks import LAYER_FIELDS

T, H, E, K, I, S = 7, 48, 12, 3, 32, 80
WAYS = ("router_weight", "router_logits", "topk_ids")
"""The ways in, named by the argument that each is known by."""
LAUNCHERS = (
    "quantize", "reorder", "router", "route", "gemm", "grouped", "coded_few", "coded_persistent", "gemm1_persistent",
    "gemm2_persistent", "experts", "gate", "finalize",
)  # fmt: skip
"""Modules of kernels that launch."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Of `error`, for a layer of these sizes computed in that dtype."""


def make_layer(
    T: int | tuple[int, ...] = T,
    *,
    way: str = "router_weight",
    config: MoEConfig | None = None,
    H: int = H,
    E: int = E,
    I: int = I,
    S: int = S,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    router_dtype: torch.dtype | None = None,
    correction_bias: bool = False,
    router_bias: bool = False,
    expert_bias: bool = False,
    shared_gate: bool = False,
    valid_tokens: int | None = None,
    E_global: int | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """hidden_states and the other arguments of `dual_stream_moe`; those that the layer has not are left out.

    Args:
        T: tokens, or the leading dims of hidden_states.
        way: one of WAYS. topk_ids holds distinct ids in each row.
        config: default `MoEConfig(top_k=3, routed_scaling_factor=2.5)`.
        S: 0 for no shared expert.
        router_dtype: of router_weight or router_logits; default `dtype`.
        correction_bias, router_bias, expert_bias, shared_gate: whether these tensors exist.
        valid_tokens: value of num_valid_tokens.
        E_global: length of an expert_map that puts the E experts of this rank at random global ids.
    """
    config = config or MoEConfig(top_k=K, routed_scaling_factor=2.5)
    lead = (T,) if isinstance(T, int) else tuple(T)
    tokens = math.prod(lead)
    rows = 2 if config.gated else 1
    E_routing = E_global or E
    E_logits = E_routing + config.num_zero_experts

    def random(*shape: int, dtype: torch.dtype = dtype, fan_in: int = 1) -> Tensor:
        return (torch.randn(shape, device=device) / math.sqrt(fan_in)).to(dtype)

    layer: dict[str, Any] = {
        "config": config,
        "w13": random(E, rows * I, H, fan_in=H),
        "w2": random(E, H, I, fan_in=I),
    }
    if way == "router_weight":
        layer["router_weight"] = random(E_logits, H, dtype=router_dtype or dtype, fan_in=H)
        if router_bias:
            layer["router_bias"] = random(E_logits, dtype=router_dtype or dtype)
    elif way == "router_logits":
        layer["router_logits"] = random(tokens, E_logits, dtype=router_dtype or dtype)
    elif way == "topk_ids":
        layer["topk_ids"] = (
            torch.rand(tokens, E_logits, device=device)
            .argsort(dim=1)[:, : config.top_k]
            .to(torch.int32, memory_format=torch.contiguous_format)
        )
        layer["topk_weights"] = torch.rand(tokens, config.top_k, device=device)
    else:
        raise ValueError(f"way: expected one of {WAYS}, got {way!r}")
    if correction_bias:
        layer["correction_bias"] = random(E_logits, dtype=torch.float32)
    if expert_bias:
        layer["w13_bias"] = random(E, rows * I)
        layer["w2_bias"] = random(E, H)
    if S:
        layer["shared_w13"] = random(rows * S, H, fan_in=H)
        layer["shared_w2"] = random(H, S, fan_in=S)
        if shared_gate:
            layer["shared_gate"] = random(1, H, fan_in=H)
    if valid_tokens is not None:
        layer["num_valid_tokens"] = torch.tensor([valid_tokens], dtype=torch.int32, device=device)
    if E_global is not None:
        expert_map = torch.full((E_global,), -1, dtype=torch.int32, device=device)
        expert_map[torch.randperm(E_global, device=device)[:E]] = torch.arange(E, dtype=torch.int32, device=device)
        layer["expert_map"] = expert_map
    return random(*lead, H), layer


def quantized(
    layer: dict[str, Any], routed: str | None = None, shared: str | None = None, **options: Any
) -> dict[str, Any]:  # fmt: skip
    """The layer with its weights in these formats; options as of `formats.quantize`, an input_scale that fits randn."""
    config = dataclasses.replace(layer["config"], routed_format=routed, shared_format=shared)
    new = layer | {"config": config}
    for name in ("w13", "w2", "shared_w13", "shared_w2"):
        format = config.format_of(name)
        if format is None or name not in layer:
            continue
        given = dict(options)
        if format == "fp8_tensor":
            given["input_scale"] = torch.full((1,), 5 / 448, device=layer[name].device)
        halves, interleaved = config.halves(name), config.interleaves(name)
        parts = formats.quantize(format, layer[name], halves=halves, interleaved=interleaved, **given)
        new |= {name + suffix: t for suffix, t in zip(formats.SUFFIXES, parts, strict=True) if t is not None}
    return new


def tensors_of(x: Tensor, layer: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a call by argument name."""
    return {"hidden_states": x, **{name: t for name, t in layer.items() if isinstance(t, Tensor)}}


def moe_args(x: Tensor, layer: dict[str, Any], schedule: str = "auto") -> tuple[Any, ...]:
    """The same call as positional arguments of `torch.ops.dsmoe.moe_v1` and `moe_unfinalized_v1`.

    Without the last ones that are None, as PyTorch's dispatcher hands them to the op's kernels.
    """
    tensors = tensors_of(x, layer)
    scales = [tensors.get(name) for name in LAYER_FIELDS[16:]]
    while scales and scales[-1] is None:
        scales.pop()
    return *(tensors.get(name) for name in LAYER_FIELDS[:16]), layer["config"].key, schedule, *scales


def route_args(x: Tensor | None, layer: dict[str, Any]) -> tuple[Any, ...]:
    """The routing of that call as positional arguments of `torch.ops.dsmoe.route_v1`."""
    names = ("router_weight", "router_bias", "correction_bias", "router_logits")
    return x, *(layer.get(name) for name in names), layer["config"].key


def routing_of(layer: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `route` among those of a layer."""
    names = ("config", "router_weight", "router_bias", "correction_bias", "router_logits")
    return {name: layer[name] for name in names if name in layer}


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits; a NaN equals itself."""
    bits = (t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(*bits)


def error(out: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of what is expected; 0 for empty tensors that agree in shape."""
    assert out.shape == expected.shape
    if out.numel() == 0:
        return 0.0
    out, expected = out.detach().double().cpu(), expected.detach().double().cpu()
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_right(out: Tensor, x: Tensor, layer: dict[str, Any]) -> None:
    """out is what the float64 reference says, within the tolerance of its dtype."""
    expected = reference.moe(x.detach(), **{name: v for name, v in layer.items() if name != "schedule"})
    assert out.dtype == x.dtype
    found = error(out, expected)
    assert found < TOLERANCE[x.dtype], f"relative error {found:.2e}"
