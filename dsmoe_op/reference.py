"""The layer's definition in plain torch: slow, readable, exact in float64. Every kernel is held against it.

Shape suffixes: T tokens, H hidden, E routed experts (and Z zero experts after them), K chosen, I and S the routed and
shared widths, G groups, M members of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.config import MoEConfig


def compute_logits(
    x_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor | None,
    config: MoEConfig,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Logits [T, E+Z] in `dtype`, rounded to the model's dtype (that of x_TH) where the config says so."""
    bias = None if router_bias_E is None else router_bias_E.to(dtype)
    logits_TE = F.linear(x_TH.to(dtype), router_weight_EH.to(dtype), bias)
    return logits_TE.to(x_TH.dtype).to(dtype) if config.router_dtype == "model" else logits_TE


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    *,
    correction_bias: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    model_dtype: torch.dtype = torch.float32,
    best: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """logits -> (topk_ids int64 [T, K], topk_weights [T, K] in the logits' dtype).

    Args:
        logits_TE: [T, E+Z], float32 or float64. NaN counts as -inf, +inf as the largest float32.
        correction_bias: [E+Z]; added for the choice only.
        num_valid_tokens: int [1]; later rows get ids -1 and weights 0.
        model_dtype: what "model" means in the config's dtypes.
        best: a faster function with the results of `best_ids`.
    """
    best = best or best_ids
    T, E = logits_TE.shape
    logits_TE = torch.nan_to_num(logits_TE, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)

    def rounded(t: Tensor) -> Tensor:
        """One step of arithmetic from the scores on."""
        return t.to(model_dtype).to(t.dtype) if config.score_dtype == "model" else t

    if config.score == "sigmoid":
        scores_TE = rounded(torch.sigmoid(logits_TE))
    elif config.score == "softmax":
        scores_TE = rounded(_softmax(logits_TE))
    elif config.score == "sqrtsoftplus":
        scores_TE = rounded(rounded(F.softplus(logits_TE)).sqrt())
    else:
        scores_TE = logits_TE

    choice_TE = logits_TE if config.choice_on == "logit" else scores_TE
    if correction_bias is not None:
        choice_TE = choice_TE + correction_bias.to(choice_TE.dtype)
    choice_TE = _nan_to_minus_inf(choice_TE)
    if config.n_group is not None and config.topk_group is not None:
        grouped_TGM = choice_TE.view(T, config.n_group, E // config.n_group)
        members = 1 if config.group_score == "max" else 2
        group_TG = _nan_to_minus_inf(grouped_TGM.topk(members, dim=-1).values.sum(-1))
        if correction_bias is None:  # a float32 bias makes the sum float32
            group_TG = rounded(group_TG)
        kept = best(group_TG, config.topk_group)
        lost_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, kept, False)
        masked = -torch.inf if config.group_mask == "-inf" else 0.0
        choice_TE = grouped_TGM.masked_fill(lost_TG.unsqueeze(-1), masked).reshape(T, E)
    ids_TK = best(choice_TE, config.top_k)

    if config.weights_from == "topk_softmax":
        weights_TK = rounded(_softmax(logits_TE.gather(1, ids_TK)))
    elif config.weights_from == "topk_sigmoid":
        weights_TK = rounded(torch.sigmoid(logits_TE.gather(1, ids_TK)))
    else:
        weights_TK = scores_TE.gather(1, ids_TK)
    weights_TK = weights_TK.masked_fill(weights_TK == -torch.inf, 0.0)
    if config.normalize != "none":
        total_T1 = weights_TK.sum(-1, keepdim=True)
        if config.normalize == "sum_eps":
            total_T1 = total_T1 + 1e-20
        elif config.normalize == "sum_clamp":
            total_T1 = total_T1.clamp(min=1e-12)
        total_T1 = rounded(total_T1)
        weights_TK = rounded(weights_TK / total_T1.masked_fill(total_T1 == 0, 1.0))
    weights_TK = rounded(weights_TK * config.scale_in_weights)
    if config.weight_dtype == "model":
        weights_TK = weights_TK.to(model_dtype).to(weights_TK.dtype)
    if num_valid_tokens is not None:
        padding_T1 = (torch.arange(T, device=logits_TE.device) >= num_valid_tokens).unsqueeze(1)
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    return ids_TK, weights_TK


def activation(h: Tensor, config: MoEConfig, *, clamp: float | None, order: str = "gate_up") -> Tensor:
    """h [..., 2I] -> [..., I], or [..., I] -> [..., I] where the activation is not gated."""
    if not config.gated:
        return F.relu(h if clamp is None else h.clamp(-clamp, clamp)).square()
    if order == "interleaved":
        gate, up = h[..., 0::2], h[..., 1::2]
    else:
        gate, up = h.chunk(2, dim=-1)
        if order == "up_gate":
            gate, up = up, gate
    if clamp is not None:
        up = up.clamp(-clamp, clamp)
        if not config.clamp_after_activation:
            gate = gate.clamp(max=clamp)
    if config.activation == "swiglu_oai":
        gate, up = gate * torch.sigmoid(1.702 * gate), up + 1
    elif config.activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if config.activation == "gelu_tanh" else "none")
    if clamp is not None and config.clamp_after_activation:
        gate = gate.clamp(max=clamp)
    return gate * up


def moe(
    hidden_states: Tensor,
    *,
    config: MoEConfig,
    w13: Tensor,
    w2: Tensor,
    router_weight: Tensor | None = None,
    router_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    router_logits: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **scales: Tensor | None,
) -> Tensor:
    """The whole layer in `dtype`: arguments as in `dual_stream_moe`, output like hidden_states, unrounded.

    Args:
        scales: w13_scale and all the others of quantised weights. Where their format quantises the rows too, x and h do
            it from the dtype of hidden_states, to which h is rounded before.
    """
    tensors = {"w13": w13, "w2": w2, "shared_w13": shared_w13, "shared_w2": shared_w2, **scales}

    def linear(x: Tensor, name: str, expert: int | None = None, bias: Tensor | None = None) -> Tensor:
        x, weight = _operands(x, tensors, name, expert, config, hidden_states.dtype)
        return F.linear(x, weight, None if bias is None else bias.to(dtype))

    x_TH = hidden_states.reshape(-1, hidden_states.shape[-1]).to(dtype)
    T = x_TH.shape[0]
    num_experts = w13.shape[0] if expert_map is None else expert_map.shape[0]
    valid_T = torch.ones(T, dtype=torch.bool, device=x_TH.device)
    if num_valid_tokens is not None:
        valid_T = torch.arange(T, device=x_TH.device) < num_valid_tokens

    if topk_ids is not None and topk_weights is not None:
        ids_TK, weights_TK = topk_ids.long(), topk_weights.to(dtype)
        ids_TK = ids_TK.masked_fill(~valid_T.unsqueeze(1), -1)
    else:
        if router_logits is not None:
            logits_TE = router_logits.to(dtype)
        else:
            assert router_weight is not None
            flat_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
            logits_TE = compute_logits(flat_TH, router_weight, router_bias, config, dtype)
        ids_TK, weights_TK = route(
            logits_TE,
            config,
            correction_bias=correction_bias,
            num_valid_tokens=num_valid_tokens,
            model_dtype=hidden_states.dtype,
        )

    out_TH = torch.zeros_like(x_TH)
    for expert in range(num_experts + config.num_zero_experts):
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        weight = weights_TK[token, slot].unsqueeze(1)
        x = x_TH[token]
        if expert >= num_experts:
            out_TH.index_add_(0, token, weight * x)
            continue
        row = expert if expert_map is None else int(expert_map[expert])
        if row < 0 or len(token) == 0:
            continue
        if config.apply_router_weight_on_input:
            x, weight = weight * x, torch.ones_like(weight)
        h = linear(x, "w13", row, None if w13_bias is None else w13_bias[row])
        h = activation(h, config, clamp=config.clamp_routed, order=config.w13_order)
        y = linear(h, "w2", row, None if w2_bias is None else w2_bias[row])
        out_TH.index_add_(0, token, weight * y)
    out_TH = out_TH * config.scale_at_end

    if shared_w13 is not None and shared_w2 is not None:
        shared_TH = activation(linear(x_TH, "shared_w13"), config, clamp=config.clamp_shared)
        shared_TH = linear(shared_TH, "shared_w2")
        if shared_gate is not None:
            shared_TH = torch.sigmoid(F.linear(x_TH, shared_gate.to(dtype))) * shared_TH
        out_TH = out_TH + shared_TH
    if config.combine == "average":
        out_TH = out_TH * 0.5
    return out_TH.masked_fill(~valid_T.unsqueeze(1), 0.0).view(hidden_states.shape)


def _operands(
    x: Tensor, tensors: Mapping[str, Tensor | None], name: str, expert: int | None, config: MoEConfig,
    model_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x as the weight of that name multiplies it, and the weight [R, K], of an expert or the shared one, as numbers."""
    format, weight = config.format_of(name), formats.quantised(tensors, name)
    weight = weight if expert is None else weight.expert(expert)
    if format is None:
        return x, weight.q.to(x.dtype)
    halves, interleaved = config.halves(name), config.interleaves(name)
    numbers = formats.dequantize(
        format, weight, x.shape[1], halves=halves, interleaved=interleaved, dtype=x.dtype
    )  # fmt: skip
    if formats.FORMATS[format].activations is not None:
        x = formats.quantized_rows(x.to(model_dtype), format, weight.input_scale).to(x.dtype)
    return x, numbers


def _softmax(t: Tensor) -> Tensor:
    """Softmax over the last dim in which a row of -inf gives zeros, not NaN."""
    top = t.amax(-1, keepdim=True)
    e = torch.exp(t - top.masked_fill(top == -torch.inf, 0.0))
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def _nan_to_minus_inf(t: Tensor) -> Tensor:
    return t.masked_fill(t.isnan(), -torch.inf)


def best_ids(t: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, best first; equal values by ascending id (torch.topk leaves that open)."""
    return t.sort(dim=-1, descending=True, stable=True).indices[..., :k]
