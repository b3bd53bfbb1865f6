"""The layer on the CPU: slots grouped by expert, a oneDNN matmul for each expert and weight, threads as torch is set.

h, y and shared rows are stored in the model's dtype, as on CUDA. A product is rounded to it once more, before the bias
and the activation, which are in float32: torch's oneDNN products have the dtype of their factors.

Suffixes as in `reference.py`; N = T * K slots.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsmoe_op import formats, ranges, reference
from dsmoe_op.checks import Checked, Dims, Layer, Routing
from dsmoe_op.config import MoEConfig

RUN_ROWS = 2048
"""Experts are taken together up to so many rows: few torch calls where each has few, and temporaries stay small."""
FLOATS = 1 << 19
"""Numbers of a smaller dtype that are float32 at a time, likewise."""
GROUP_IDLE = 4
"""A grouped product also visits the experts without rows between others: worth it up to so many for each busy one."""
SORT_LOGITS = 1 << 13
"""Up to so many numbers, a sort of all is faster than the choice of a few and a look for ties."""
CAST_ROWS = 4
"""From so many rows on, a cast to float32 beats torch's own products in a dtype that oneDNN lacks."""


def moe(layer: Layer, call: Checked) -> Tensor:
    """The layer's output: fresh, contiguous, like hidden_states."""
    y, ids, weights, row_of, shared = moe_unfinalized(layer, call)
    return finalize(y, ids, weights, row_of, shared, layer.hidden_states, call.config)


@torch.autocast("cpu", enabled=False)
def moe_unfinalized(layer: Layer, call: Checked) -> tuple[Tensor, ...]:
    """y, topk_ids, topk_weights, row_of, shared; one CPU has no streams, so the schedule changes nothing."""
    dims, config = call.dims, call.config
    x_TH = layer.hidden_states.reshape(-1, dims.H).contiguous()
    with ranges.part("router"):
        ids_TK, weights_TK = _routing(layer, config)
        ids_TK, weights_TK, expert_TK = _canonical(ids_TK, weights_TK, layer, dims, config)
        slots_N = expert_TK.flatten().argsort(stable=True)
        counts_E = expert_TK.flatten().bincount(minlength=dims.E).tolist()[: dims.E]
        num_rows = sum(counts_E)
        row_of_TK = torch.full((dims.T, dims.K), -1, dtype=torch.int32)
        row_of_TK.view(-1)[slots_N[:num_rows]] = torch.arange(num_rows, dtype=torch.int32)
    with ranges.part("routed"):
        y_NH = x_TH.new_empty((dims.T * dims.K, dims.H))
        y_NH[num_rows:] = 0
        w13, w2 = (_Weight(layer, name, config, x_TH.dtype) for name in ("w13", "w2"))
        for experts, rows in _runs(counts_E):
            slots = slots_N[rows]
            x = x_TH.index_select(0, slots // dims.K)
            if config.apply_router_weight_on_input:
                x = (weights_TK.flatten()[slots].unsqueeze(1) * x).to(x.dtype)
            h = _linear_each(x, w13, layer.w13_bias, experts, counts_E)
            h = _activation(h, config, config.clamp_routed, config.w13_order, x.dtype)
            if len(h) == len(y_NH):  # one run is all of it: no copy
                y_NH = _linear_each(h, w2, layer.w2_bias, experts, counts_E).to(x.dtype)
            else:
                _linear_each(h, w2, layer.w2_bias, experts, counts_E, out=y_NH[rows])
    shared_TH = x_TH.new_empty((0, dims.H))
    if layer.shared_w13 is not None:
        with ranges.part("shared"):
            shared_TH = _shared(x_TH, layer, config)
    return y_NH, ids_TK, weights_TK, row_of_TK, shared_TH


@ranges.in_part("finalize")
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
    x_TH = hidden_states.reshape(T, H) if hidden_states is not None and config.num_zero_experts else None
    has_no_row_TK = row_of_TK < 0
    all_rows = not has_no_row_TK.any()
    if not all_rows:  # a slot that contributes nothing may have any weight, NaN too
        is_empty_TK = has_no_row_TK if x_TH is None else has_no_row_TK & (topk_ids_TK < 0)
        topk_weights_TK = topk_weights_TK.masked_fill(is_empty_TK, 0.0)
    row_TK = row_of_TK.clamp(min=0)
    # The result is no view, not even of a tensor of ours: autograd refuses writes in place to a view.
    out = y_NH.new_empty((T, H) if hidden_states is None else hidden_states.shape)
    out_TH = out.view(T, H)
    tokens = max(1, FLOATS // H)
    for start in range(0, T, tokens):
        block = slice(start, start + tokens)
        total = torch.zeros(out_TH[block].shape, dtype=torch.float32)
        for k in range(config.top_k):
            y = y_NH.index_select(0, row_TK[block, k]).float()
            if not all_rows:
                has_no_row = has_no_row_TK[block, k : k + 1]
                y.masked_fill_(has_no_row, 0.0)
                if x_TH is not None:
                    is_zero_expert = has_no_row & (topk_ids_TK[block, k : k + 1] >= 0)
                    y = torch.where(is_zero_expert, x_TH[block].float(), y)
            if config.apply_router_weight_on_input:
                total += y
            else:
                total.addcmul_(y, topk_weights_TK[block, k : k + 1])
        if config.scale_at_end != 1.0:
            total *= config.scale_at_end
        if shared_TH is not None and len(shared_TH):
            total += shared_TH[block]
        if config.combine == "average":
            total *= 0.5
        out_TH[block] = total
    return out


@ranges.in_part("router")
@torch.autocast("cpu", enabled=False)
def route(routing: Routing, T: int, num_logits: int, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """topk_ids int32 [T, K] and topk_weights float32 [T, K]."""
    return _route(routing, config)


def _routing(layer: Layer, config: MoEConfig) -> tuple[Tensor, Tensor]:
    if layer.topk_ids is not None and layer.topk_weights is not None:
        return _fresh(layer.topk_ids), layer.topk_weights.float()
    return _route(layer, config)


def _route(layer: Layer | Routing, config: MoEConfig) -> tuple[Tensor, Tensor]:
    ids_TK, weights_TK = reference.route(
        _logits(layer, config),
        config,
        correction_bias=layer.correction_bias,
        model_dtype=layer.hidden_states.dtype,
        best=_best_ids,
    )
    return ids_TK.int(), weights_TK


def _logits(layer: Layer | Routing, config: MoEConfig) -> Tensor:
    """Float32 [T, E+Z]."""
    if layer.router_logits is not None:
        return layer.router_logits.float()
    assert layer.router_weight is not None
    weight_EH, bias_E = layer.router_weight, layer.router_bias
    x_TH = layer.hidden_states.reshape(-1, weight_EH.shape[1])
    is_bfloat16 = weight_EH.dtype == x_TH.dtype == torch.bfloat16
    if config.router_dtype == "model" and is_bfloat16 and bias_E is None and not _mixes_rows(x_TH):
        return F.linear(x_TH, weight_EH).float()  # sums in float32 and rounds them, as the definition has it
    # Where torch may take less than float32 for the matmul, float64 stays exact enough for a router.
    is_exact = torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    dtype = torch.float32 if is_exact else torch.float64
    return reference.compute_logits(x_TH, weight_EH, bias_E, config, dtype).float()


def _best_ids(t: Tensor, k: int) -> Tensor:
    """As `reference.best_ids`, by torch.topk except in rows where equal values among the k+1 best leave it a choice."""
    if t.numel() <= SORT_LOGITS:
        return _fresh(reference.best_ids(t, k))
    values, ids = t.topk(min(k + 1, t.shape[-1]))
    is_tied = (values[:, 1:] == values[:, :-1]).any(-1)
    ids = _fresh(ids[:, :k])
    if is_tied.any():
        ids[is_tied] = reference.best_ids(t[is_tied], k)
    return ids


def _fresh(t: Tensor) -> Tensor:
    """A copy with the strides of a new tensor, also where .contiguous() has no need of them: in dims of size 1."""
    return t.clone(memory_format=torch.contiguous_format)


def _canonical(
    ids_TK: Tensor, weights_TK: Tensor, layer: Layer, dims: Dims, config: MoEConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids int32 and weights, new: -1 and 0 where a slot contributes nothing; and the row of w13 (E = none), int64."""
    is_special = any(t is not None for t in (layer.topk_ids, layer.expert_map, layer.num_valid_tokens))
    if not is_special and config.num_zero_experts == 0:  # every chosen id is an expert of this rank
        return ids_TK, weights_TK, ids_TK.long()
    ids = ids_TK.long()
    is_routed = (ids >= 0) & (ids < dims.E_routing)
    expert = ids.clamp(0, dims.E_routing - 1)
    if layer.expert_map is not None:
        expert = layer.expert_map[expert].long()
        is_routed &= (expert >= 0) & (expert < dims.E)
    contributes = is_routed
    if config.num_zero_experts:
        contributes = is_routed | ((ids >= dims.E_routing) & (ids < dims.E_routing + config.num_zero_experts))
    if layer.num_valid_tokens is not None:
        is_valid_T1 = (torch.arange(dims.T) < layer.num_valid_tokens).unsqueeze(1)
        is_routed, contributes = is_routed & is_valid_T1, contributes & is_valid_T1
    return (
        torch.where(contributes, ids, -1).int(),
        torch.where(contributes, weights_TK, 0.0),
        torch.where(is_routed, expert, dims.E),
    )


def _runs(counts_E: Sequence[int]) -> Iterator[tuple[list[int], slice]]:
    """Neighbouring experts that have rows, as many as come to RUN_ROWS or one that has more, with their rows of y."""
    experts: list[int] = []
    start = end = 0
    for expert, count in enumerate(counts_E):
        if experts and end - start + count > RUN_ROWS:
            yield experts, slice(start, end)
            experts, start = [], end
        if count:
            experts.append(expert)
            end += count
    if experts:
        yield experts, slice(start, end)


def _shared(x_TH: Tensor, layer: Layer, config: MoEConfig) -> Tensor:
    """[T, H]."""
    assert layer.shared_w13 is not None
    assert layer.shared_w2 is not None
    T = len(x_TH)
    w13, w2 = (_Weight(layer, name, config, x_TH.dtype) for name in ("shared_w13", "shared_w2"))
    rows = w13.rows(x_TH)
    h = _linear(rows, w13.of(), rows.new_empty((T, layer.shared_w13.shape[0])))
    h = _activation(h, config, config.clamp_shared, "gate_up", x_TH.dtype)
    shared_TH = _linear(w2.rows(h), w2.of(), x_TH.new_empty(x_TH.shape))
    if layer.shared_gate is not None:
        gate = layer.shared_gate.float()
        tokens = max(1, FLOATS // x_TH.shape[1])
        for x, shared in zip(x_TH.split(tokens), shared_TH.split(tokens), strict=True):
            shared.copy_(torch.sigmoid(F.linear(x.float(), gate)) * shared)
    if layer.num_valid_tokens is not None:
        shared_TH[torch.arange(T) >= layer.num_valid_tokens] = 0
    return shared_TH


class _Weight:
    """One of the layer's four weights. A quantised one becomes numbers an expert at a time.

    Where it quantises the rows too, products are in float32: a sum that is rounded to the model's dtype and then to fp8
    is twice as far off.
    """

    def __init__(self, layer: Layer, name: str, config: MoEConfig, dtype: torch.dtype) -> None:
        self.plain: Tensor = getattr(layer, name)
        self.num_rows = self.plain.shape[-2]
        self.dtype, self.format = dtype, config.format_of(name)
        if self.format is not None:
            if formats.FORMATS[self.format].activations is not None:
                self.dtype = torch.float32
            self._tensors = formats.quantised(layer._asdict(), name)
            self._options: dict[str, Any] = {"halves": config.halves(name), "interleaved": config.interleaves(name)}
            packed = formats.numbers(formats.FORMATS[self.format], self.plain.dtype)
            self._columns = self.plain.shape[-1] * packed

    def of(self, expert: int | None = None) -> Tensor:
        """[R, K] of an expert or of the shared one, in the dtype of the products."""
        if self.format is None:
            return self.plain if expert is None else self.plain[expert]
        its = self._tensors if expert is None else self._tensors.expert(expert)
        return formats.dequantize(self.format, its, self._columns, dtype=torch.float32, **self._options).to(self.dtype)

    def rows(self, x: Tensor, experts: list[int] | None = None, sizes: list[int] | None = None) -> Tensor:
        """x as the weight multiplies it, in that dtype; of the routed one so many rows for each of these experts."""
        if self.format is None:
            return x
        scale = self._tensors.input_scale
        if scale is not None and scale.numel() > 1:
            scale = scale[experts].repeat_interleave(torch.tensor(sizes)).unsqueeze(1)
        return formats.quantized_rows(x, self.format, scale).to(self.dtype)


def _linear_each(
    x: Tensor,
    weight: _Weight,
    bias_E: Tensor | None,
    experts: list[int],
    counts_E: list[int],
    out: Tensor | None = None,
) -> Tensor:
    """Each expert's product with its rows of x, the next counts_E[expert] of them; float32 where there is a bias.

    Torch's grouped product spares a loop in Python, but it cannot write into `out`.
    """
    first, end = experts[0], experts[-1] + 1
    sizes = [counts_E[e] for e in experts]
    is_dense = end - first <= (GROUP_IDLE + 1) * len(experts)
    x = weight.rows(x, experts, sizes)
    if out is None and is_dense and weight.format is None and _can_group(x, weight.plain):
        ends = torch.tensor(list(itertools.accumulate(counts_E[first:end])), dtype=torch.int32)
        product = F.grouped_mm(x, weight.plain[first:end].mT, offs=ends)
    else:
        product = x.new_empty((len(x), weight.num_rows)) if out is None else out
        for expert, its_x, its_product in zip(experts, x.split(sizes), product.split(sizes), strict=True):
            _linear(its_x, weight.of(expert), its_product)
    if bias_E is not None:
        product = product.float() + bias_E[experts].float().repeat_interleave(torch.tensor(sizes), 0)
    return product if out is None or product is out else out.copy_(product)


def _can_group(x: Tensor, weight_E: Tensor) -> bool:
    """Whether torch's grouped product takes these strides, and is the one of oneDNN that `_linear` would choose."""
    expert, *row_and_column = weight_E.stride()
    unit, other = sorted(row_and_column)
    is_aligned = unit == 1 and all(s * x.element_size() % 16 == 0 for s in (x.stride(0), expert, other))
    return is_aligned and x.dtype != torch.float32 and _onednn_has(x.dtype) and not _mixes_rows(x)


def _linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """out = x weight^T; float32 factors may have an out of another dtype."""
    is_half = x.dtype != torch.float32
    is_native = _onednn_has(x.dtype) or (len(x) < CAST_ROWS and weight.stride(-1) == 1)
    if is_half and is_native and not _mixes_rows(x):
        return torch.mm(x, weight.t(), out=out)
    if is_half:
        x, weight = x.float(), weight.float()
    if not _onednn_has(torch.float32):
        return out.copy_(F.linear(x, weight))
    # F.linear takes BLAS for float32, which is slower where rows are few.
    return out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))


def _mixes_rows(x: Tensor) -> bool:
    """Whether a half-precision product may read past a row of x into the next one, times 0: a NaN there spreads.

    Seen with oneDNN on AMX, whose tiles take 64 bytes of a row, at widths that are no multiple of that.
    """
    return x.shape[1] % 32 != 0 and torch.cpu._is_amx_tile_supported()


@functools.cache
def _onednn_has(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _activation(h: Tensor, config: MoEConfig, clamp: float | None, order: str, dtype: torch.dtype) -> Tensor:
    out = h.new_empty((len(h), h.shape[1] // 2 if config.gated else h.shape[1]), dtype=dtype)
    rows = max(1, FLOATS // h.shape[1])
    for its_h, its_out in zip(h.split(rows), out.split(rows), strict=True):
        its_out.copy_(reference.activation(its_h.float(), config, clamp=clamp, order=order))
    return out
