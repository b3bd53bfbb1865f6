"""The layer in plain torch, written for speed: what the op is compared with, and what peers' experts are put in.

Shape suffixes as in `reference.py`, which is the definition; here everything is in the model's dtype but the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsmoe_op.config import MoEConfig


class Weights(NamedTuple):
    """One layer's, named as the op's arguments."""

    router_weight: Tensor
    correction_bias: Tensor | None
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor | None
    shared_w2: Tensor | None
    shared_gate: Tensor | None


Layer = Callable[[Tensor, Weights], Tensor]
"""x [T, H] -> [T, H] in the dtype of x: the whole layer, its routed experts with their router, or its shared expert."""
Experts = Callable[[Tensor, Tensor, Tensor, Weights], Tensor]
"""x [T, H], topk_ids int64 [T, K], topk_weights float32 [T, K] -> [T, H] in the dtype of x."""


class Candidate(NamedTuple):
    """One way to compute the layer.

    Attributes:
        build: makes what computes it; may take long, or fail.
        captured: whether a CUDA graph can hold it.
        left_out: why it is not timed.
    """

    name: str
    build: Callable[[], Layer]
    captured: bool = True
    left_out: str | None = None


def router_logits(x_TH: Tensor, w: Weights) -> Tensor:
    """float32 [T, E]."""
    if x_TH.is_cuda and x_TH.dtype != torch.float32:
        return torch.mm(x_TH, w.router_weight.t(), out_dtype=torch.float32)
    return F.linear(x_TH.float(), w.router_weight.float())


def route(x_TH: Tensor, w: Weights, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """topk_ids int64 [T, K], topk_weights float32 [T, K]; for the knobs that the shapes of `shapes.py` have."""
    logits_TE = router_logits(x_TH, w)
    if config.weights_from == "topk_sigmoid":
        logits_TK, ids_TK = logits_TE.topk(config.top_k)
        return ids_TK, logits_TK.sigmoid()
    scores_TE = logits_TE.sigmoid() if config.score == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if w.correction_bias is None else scores_TE + w.correction_bias
    if config.n_group is not None and config.topk_group is not None:
        grouped_TGM = choice_TE.unflatten(1, (config.n_group, -1))
        best = 1 if config.group_score == "max" else 2
        kept_TG = grouped_TGM.topk(best).values.sum(-1).topk(config.topk_group).indices
        lost_TG = torch.ones_like(grouped_TGM[..., 0], dtype=torch.bool).scatter(1, kept_TG, False)
        mask = 0.0 if config.group_mask == "zero" else -torch.inf
        choice_TE = grouped_TGM.masked_fill(lost_TG.unsqueeze(-1), mask).flatten(1)
    ids_TK = choice_TE.topk(config.top_k).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if config.normalize != "none":
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK * config.routed_scaling_factor


def _mlp(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = F.linear(x, w13).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2)


def shared_expert(x_TH: Tensor, w: Weights) -> Tensor:
    assert w.shared_w13 is not None
    assert w.shared_w2 is not None
    return gated(_mlp(x_TH, w.shared_w13, w.shared_w2), x_TH, w)


def gated(shared_TH: Tensor, x_TH: Tensor, w: Weights) -> Tensor:
    """The shared expert's output times its gate, where it has one."""
    return shared_TH if w.shared_gate is None else torch.sigmoid(F.linear(x_TH, w.shared_gate)) * shared_TH


def experts_in_a_loop(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w: Weights) -> Tensor:
    """One expert after the other, those that are hit; asks the device which, so it cannot be captured."""
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for expert in ids_TK.unique().tolist():
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        y = _mlp(x_TH[token], w.w13[expert], w.w2[expert])
        out_TH.index_add_(0, token, y * weights_TK[token, slot, None])
    return out_TH.to(x_TH.dtype)


def experts_grouped(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w: Weights) -> Tensor:
    """Rows sorted by expert, torch's grouped product twice, rows brought back and summed."""
    T, K = ids_TK.shape
    sorted_ids, order = ids_TK.flatten().sort()
    ends = torch.searchsorted(sorted_ids, torch.arange(len(w.w13), device=x_TH.device), right=True, out_int32=True)
    gate, up = F.grouped_mm(x_TH[order // K], w.w13.transpose(1, 2), offs=ends).chunk(2, -1)
    y_NH = F.grouped_mm(F.silu(gate) * up, w.w2.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=x_TH.device))
    return torch.bmm(weights_TK.to(x_TH.dtype).unsqueeze(1), y_NH[back].view(T, K, -1)).squeeze(1)


def routed_experts(x_TH: Tensor, w: Weights, config: MoEConfig, experts: Experts) -> Tensor:
    """Router and experts. A weight on the input is of one expert a token, so it is put on x."""
    ids_TK, weights_TK = route(x_TH, w, config)
    if config.apply_router_weight_on_input:
        assert config.top_k == 1
        x_TH, weights_TK = (x_TH * weights_TK).to(x_TH.dtype), torch.ones_like(weights_TK)
    return experts(x_TH, ids_TK, weights_TK, w)


def layer(config: MoEConfig, experts: Experts) -> Layer:
    """Router, `experts` and shared expert, one after the other, and their sum."""
    return in_turn(lambda x_TH, w: routed_experts(x_TH, w, config, experts), shared_expert)


def two_stream_layer(config: MoEConfig, experts: Experts) -> Layer:
    """The same with the shared expert on a stream of its own."""
    return on_two_streams(lambda x_TH, w: routed_experts(x_TH, w, config, experts), shared_expert)


def in_turn(routed: Layer, shared: Layer) -> Layer:
    """Both, where there is a shared expert, and their sum."""

    def call(x_TH: Tensor, w: Weights) -> Tensor:
        routed_TH = routed(x_TH, w)
        return routed_TH if w.shared_w13 is None else routed_TH + shared(x_TH, w)

    return call


def on_two_streams(routed: Layer, shared: Layer) -> Layer:
    """Both and their sum, the shared expert on a stream of its own, forked and joined as user code does it."""
    alt = torch.cuda.Stream(priority=-1)

    def call(x_TH: Tensor, w: Weights) -> Tensor:
        main = torch.cuda.current_stream()
        alt.wait_stream(main)
        with torch.cuda.stream(alt):
            shared_TH = shared(x_TH, w)
        routed_TH = routed(x_TH, w)
        main.wait_stream(alt)
        return routed_TH + shared_TH

    return call
