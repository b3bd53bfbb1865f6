"""The layer on the CPU: slots grouped by expert, one matmul a weight and expert through torch (oneDNN), threads as torch is set.

Routing is `reference.route` in float32. h, y and shared rows are stored in the model's dtype, as on CUDA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsmoe_op import reference
from dsmoe_op.checks import Dims, Layer, Routing
from dsmoe_op.config import MoEConfig


def moe(layer: Layer, dims: Dims, config: MoEConfig, schedule: str) -> Tensor:
    out = finalize(*moe_unfinalized(layer, dims, config, schedule), layer.hidden_states, config)
    return out.view(layer.hidden_states.shape)


@torch.autocast("cpu", enabled=False)
def moe_unfinalized(layer: Layer, dims: Dims, config: MoEConfig, schedule: str) -> tuple[Tensor, ...]:
    """y, topk_ids, topk_weights, row_of, shared; one CPU has no streams, so `schedule` changes nothing."""
    x_TH = layer.hidden_states.reshape(-1, dims.H)
    ids_TK, weights_TK = _routing(layer, dims, config)
    ids_TK, weights_TK, row_ids_TK = _canonical(ids_TK, weights_TK, layer, dims, config)

    slot_order_N = row_ids_TK.flatten().argsort(stable=True)
    counts = row_ids_TK.flatten().bincount(minlength=dims.E + 1).tolist()
    num_rows = sum(counts[: dims.E])
    row_of_N = torch.full_like(slot_order_N, -1, dtype=torch.int32)
    row_of_N[slot_order_N[:num_rows]] = torch.arange(num_rows, dtype=torch.int32)

    y_NH = x_TH.new_zeros((dims.T * dims.K, dims.H))
    start = 0
    for expert, count in enumerate(counts[: dims.E]):
        if count == 0:
            continue
        slots = slot_order_N[start : start + count]
        x = x_TH[slots // dims.K]
        if config.apply_router_weight_on_input:
            x = (weights_TK.flatten()[slots].unsqueeze(1) * x).to(x_TH.dtype)
        h = _linear(x, layer.w13[expert], layer.w13_bias, expert)
        h = _activation(h, config, config.clamp_routed, config.w13_order)
        y_NH[start : start + count] = _linear(h, layer.w2[expert], layer.w2_bias, expert)
        start += count
    shared_TH = _shared(x_TH, layer, config, dims)
    return y_NH, ids_TK, weights_TK, row_of_N.view(dims.T, dims.K), shared_TH


def finalize(
    y_NH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    row_of_TK: Tensor,
    shared_TH: Tensor | None,
    hidden_states: Tensor | None,
    config: MoEConfig,
) -> Tensor:
    """round_once(sum over k of w * y + shared), in float32 and ascending k."""
    T, H = topk_ids_TK.shape[0], y_NH.shape[1]
    out_TH = torch.zeros((T, H), dtype=torch.float32)
    for k in range(config.top_k if T else 0):
        rows = row_of_TK[:, k]
        weights = topk_weights_TK[:, k : k + 1]
        has_row = (rows >= 0).unsqueeze(1)
        y = y_NH[rows.clamp(min=0)].float()
        out_TH += torch.where(has_row, y if config.apply_router_weight_on_input else weights * y, 0.0)
        if config.num_zero_experts and hidden_states is not None:
            is_zero_expert = ((rows < 0) & (topk_ids_TK[:, k] >= 0)).unsqueeze(1)
            out_TH += torch.where(is_zero_expert, weights * hidden_states.reshape(T, H).float(), 0.0)
    if config.scale_at_end != 1.0:
        out_TH *= config.scale_at_end
    if shared_TH is not None and shared_TH.shape[0]:
        out_TH += shared_TH
    if config.combine == "average":
        out_TH *= 0.5
    out_TH = out_TH.to(y_NH.dtype)
    return out_TH if hidden_states is None else out_TH.view(hidden_states.shape)


@torch.autocast("cpu", enabled=False)
def route(routing: Routing, T: int, num_logits: int, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """topk_ids int32 [T, K] and topk_weights float32 [T, K]."""
    return _route(routing, config, None)


def _routing(layer: Layer, dims: Dims, config: MoEConfig) -> tuple[Tensor, Tensor]:
    if layer.topk_ids is not None and layer.topk_weights is not None:
        return layer.topk_ids, layer.topk_weights.float()
    return _route(layer, config, layer.num_valid_tokens)


def _route(layer: Layer | Routing, config: MoEConfig, num_valid_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    if layer.router_logits is not None:
        logits_TE = layer.router_logits.float()
    else:
        assert layer.router_weight is not None
        x_TH = layer.hidden_states.reshape(-1, layer.hidden_states.shape[-1])
        logits_TE = reference.compute_logits(x_TH, layer.router_weight, layer.router_bias, config, torch.float32)
    ids_TK, weights_TK = reference.route(
        logits_TE,
        config,
        correction_bias=layer.correction_bias,
        num_valid_tokens=num_valid_tokens,
        model_dtype=layer.hidden_states.dtype,
    )
    return ids_TK.int(), weights_TK


def _canonical(
    ids_TK: Tensor, weights_TK: Tensor, layer: Layer, dims: Dims, config: MoEConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh ids int32 and weights with -1 and 0 where a slot contributes nothing, and the row of w13 (E = none) int64."""
    ids = ids_TK.long()
    is_routed = (ids >= 0) & (ids < dims.E_routing)
    rows = ids.clamp(0, dims.E_routing - 1)
    if layer.expert_map is not None:
        rows = layer.expert_map[rows].long()
    is_routed &= (rows >= 0) & (rows < dims.E)
    is_zero_expert = (ids >= dims.E_routing) & (ids < dims.E_routing + config.num_zero_experts)
    if layer.num_valid_tokens is not None:
        is_valid = (torch.arange(dims.T) < layer.num_valid_tokens).unsqueeze(1)
        is_routed, is_zero_expert = is_routed & is_valid, is_zero_expert & is_valid
    contributes = is_routed | is_zero_expert
    return (
        torch.where(contributes, ids, -1).int(),
        torch.where(contributes, weights_TK, 0.0),
        torch.where(is_routed, rows, dims.E),
    )


def _shared(x_TH: Tensor, layer: Layer, config: MoEConfig, dims: Dims) -> Tensor:
    if layer.shared_w13 is None or layer.shared_w2 is None:
        return x_TH.new_empty((0, dims.H))
    h = _activation(F.linear(x_TH, layer.shared_w13), config, config.clamp_shared, "gate_up")
    shared_TH = F.linear(h, layer.shared_w2)
    if layer.shared_gate is not None:
        gate_T1 = torch.sigmoid(F.linear(x_TH.float(), layer.shared_gate.float()))
        shared_TH = (gate_T1 * shared_TH).to(x_TH.dtype)
    if layer.num_valid_tokens is not None:
        shared_TH[torch.arange(dims.T) >= layer.num_valid_tokens] = 0
    return shared_TH


def _linear(x: Tensor, weight: Tensor, bias_E: Tensor | None, expert: int) -> Tensor:
    out = F.linear(x, weight)
    return out if bias_E is None else (out.float() + bias_E[expert].float()).to(x.dtype)


def _activation(h: Tensor, config: MoEConfig, clamp: float | None, order: str) -> Tensor:
    return reference.activation(h.float(), config, clamp=clamp, order=order).to(h.dtype)
