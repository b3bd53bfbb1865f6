"""How far a layer may be from the float64 definition: error bounds of its roundings, element by element.

A value comes with a bound of its error. A rounding to a dtype adds its unit of roundoff times the value; n float32
additions in any order add 2n units of float32 times the sum of absolute values; a function adds what its slope makes of
its argument's error. No bound is a guess: only constants that cover an implementation's own choices are rounded up.

A quantised weight is exact, but for the roundings that make a number of it. Rows become fp8 numbers by steps that never
fall where their argument rises, so what the two ends of an element's interval become encloses what it can become: the
same number, as a rule, and one or the other neighbour where the error reaches over the middle between two.

Products of fp8 by fp8 are the one sum that is not always of float32: `fp8_fraction`.

Suffixes as in `dsmoe_op/reference.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import MoEConfig, reference
from dsmoe_op.formats import (
    E4M3,
    FORMATS,
    LARGEST_E4M3,
    LEAST_AMAX,
    Quantised,
    dequantize,
    quantised,
    quantized_rows,
)

U32 = 2.0**-24
SLOPE = 1.2  # of silu, gelu (either) and swiglu_oai's gate, whose steepest is 1.13
FUNCTION = 8 * U32  # a float32 exp, erf, tanh, log, sqrt or quotient, relative


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


FP8_FRACTION = {(9, 0): 13}
"""By compute capability: bits after the first one that sums of fp8 products keep on the matrix unit, where these are
fewer than float32's. Of Hopper: DeepSeek-V3's report (arXiv 2412.19437, 3.5.2) tells of 14 bits, SageAttention2 (arXiv
2411.10958) and the simulator MMA-Sim (microsoft/MMA-Sim) of 13 after the first, all by experiment; no document of the
vendor's has it."""
FP8_PRODUCTS = 32
"""That an instruction adds up, such as wgmma's with k32."""
FP8_STEP = 128
"""Columns whose products the matrix unit adds up from zero, in kernels/coded.py's steps; steps are added in float32.
`test_quantised_sm90.py` holds the binaries to both numbers."""


def fp8_fraction(device: torch.device) -> int | None:
    """What `moe` is to be told of results of that device."""
    return FP8_FRACTION.get(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


class Approx(NamedTuple):
    """A float64 value and a bound of the distance at which a kernel's lies."""

    value: Tensor
    error: Tensor

    @classmethod
    def exact(cls, t: Tensor) -> Approx:
        return cls(t.double(), torch.zeros(t.shape, dtype=torch.float64))

    @property
    def size(self) -> Tensor:
        """At most this large, in absolute value."""
        return self.value.abs() + self.error

    def rounded(self, u: float, smallest: float = torch.finfo(torch.float32).tiny) -> Approx:
        """With one more rounding, of unit u."""
        return Approx(self.value, self.error + u * self.size + smallest)

    def to(self, dtype: torch.dtype) -> Approx:
        info = torch.finfo(dtype)
        rounded = self.rounded(unit(dtype), info.smallest_normal * unit(dtype))
        return Approx(self.value, rounded.error.masked_fill(rounded.size >= info.max, torch.inf))

    def times(self, other: Approx) -> Approx:
        error = self.error * other.size + self.value.abs() * other.error
        return Approx(self.value * other.value, error).rounded(U32)

    def plus(self, other: Approx) -> Approx:
        return Approx(self.value + other.value, self.error + other.error).rounded(U32)

    def __mul__(self, factor: float) -> Approx:  # type: ignore[override]
        """Times an exact factor, without a rounding."""
        return Approx(self.value * factor, self.error * abs(factor))

    def linear(self, weight: Approx) -> Approx:
        """The product with a weight [N, n], summed in float32, with up to n + 4 roundings beside those of the sum.

        Few of them are taken: of a product, and of scales, which may be multiplied with what is summed or with the sum.
        """
        n = weight.value.shape[-1]
        error = self.error @ weight.value.mT.abs() + self.size @ weight.error.mT
        return Approx(self.value @ weight.value.mT, error + 2 * (n + 2) * U32 * (self.size @ weight.size.mT))

    def map(self, function: Any) -> Approx:
        """Of a function that only picks elements."""
        return Approx(function(self.value), function(self.error))


def cut_off(x: Approx, weight: Approx, least_x: Tensor, least_weight: Tensor, fraction: int) -> Tensor:
    """[R, N]: what sums of fp8 products lose on a matrix unit that keeps `fraction` bits after the first, at most.

    An instruction takes 32 products and the sum of those before. A product's power of two is that of its factors, so it
    is a multiple of 2^-6 of it. All become multiples of 2^-fraction of the largest such power, each cut off towards
    zero, and the new sum keeps as many bits of its own. So large products lose nothing, and others less than one such
    multiple or all that they are.

    Args:
        x, weight: [R, K] and [N, K], fp8 numbers times their scales.
        least_x, least_weight: likewise; the scales times the least normal fp8 number, whose power of two is that of all
            smaller ones too. A step's columns share them.
    """
    K, N = x.value.shape[1], len(weight.value)
    at_once = max(1, 2**24 // (N * FP8_PRODUCTS))
    if len(x.value) > at_once:
        parts = zip(*(t.split(at_once) for t in (*x, least_x)), strict=True)
        return torch.cat([cut_off(Approx(v, e), weight, least, least_weight, fraction) for v, e, least in parts])
    last = 2.0**-fraction
    lost = x.value.new_zeros(len(x.value), N)
    for start in range(0, K, FP8_STEP):
        sum, spread, own = torch.zeros_like(lost), torch.zeros_like(lost), torch.zeros_like(lost)
        for first in range(start, min(start + FP8_STEP, K), FP8_PRODUCTS):
            columns = slice(first, min(first + FP8_PRODUCTS, start + FP8_STEP))
            a, b = (t.map(lambda v, columns=columns: v[:, columns]) for t in (x, weight))
            least_a, least_b = least_x[:, columns], least_weight[:, columns]
            powers, least_powers = (
                _power_of_two(one, least_a)[:, None] * _power_of_two(other, least_b)
                for one, other in ((a.size, b.size), (_least_size(a), _least_size(b)))
            )
            before = sum.abs() + spread + own
            largest = torch.maximum(powers.amax(-1), _power_of_two(before, least_a[:, :1] * least_b[:, 0]))
            each = torch.minimum(a.size[:, None] * b.size, (last * largest)[..., None])
            own = own + each.masked_fill(least_powers >= largest[..., None] * 2.0 ** (6 - fraction), 0.0).sum(-1)
            own = own + torch.minimum(before, last * largest)
            sum = sum + a.value @ b.value.mT
            spread = spread + a.error @ b.value.abs().mT + a.size @ b.error.mT
            own = own + last * (sum.abs() + spread + own)
        lost += own
    return lost


def _least_size(t: Approx) -> Tensor:
    return (t.value.abs() - t.error).clamp(min=0)


def _power_of_two(size: Tensor, least: Tensor) -> Tensor:
    """That of a number so large, in units of `least`, whose own is the least. A scale's roundings change nothing."""
    _, exponent = torch.frexp((size / least).clamp(min=1) * (1 + 2.0**-20))
    return least * torch.exp2(exponent.double() - 1)


def activation(h: Approx, config: MoEConfig, clamp: float | None, order: str) -> Approx:
    """As `reference.activation`, whose clamps never enlarge an error."""
    value = reference.activation(h.value, config, clamp=clamp, order=order)
    limit = float("inf") if clamp is None else clamp
    if not config.gated:
        relu = Approx(h.value.clamp(0, limit), h.error)
        return Approx(value, relu.times(relu).error)
    pick = {
        "interleaved": lambda t: (t[..., 0::2], t[..., 1::2]),
        "gate_up": lambda t: t.chunk(2, -1),
        "up_gate": lambda t: t.chunk(2, -1)[::-1],
    }[order]
    gate, up = (h.map(lambda t, i=i: pick(t)[i]) for i in (0, 1))
    up = Approx(up.value.clamp(-limit, limit), up.error)
    if not config.clamp_after_activation:
        gate = Approx(gate.value.clamp(max=limit), gate.error)
    if config.activation == "swiglu_oai":
        up = Approx(up.value + 1, up.error).rounded(U32)
    acted = Approx(gate.value, SLOPE * gate.error + FUNCTION * gate.size)  # it is at most as large as its argument
    return Approx(value, acted.times(up).error)


def numbers(config: MoEConfig, name: str, weight: Quantised, columns: int, dtype: torch.dtype) -> Approx:
    """The weight of that name [R, K], of an expert or the shared one, as a product in `dtype` takes it."""
    format = config.format_of(name)
    if format is None:
        return Approx.exact(weight.q)
    options = {"halves": config.halves(name), "interleaved": config.interleaves(name)}
    w = Approx.exact(dequantize(format, weight, columns, **options)).rounded(2 * U32)  # by scale and global scale
    return w if FORMATS[format].activations else w.to(dtype)


def least_normal(config: MoEConfig, name: str, weight: Quantised, columns: int) -> Tensor:
    """[R, K]: a weight's scales times the least normal fp8 number."""
    options = {"halves": config.halves(name), "interleaved": config.interleaves(name)}
    least = torch.full(weight.q.shape, torch.finfo(E4M3).smallest_normal, device=weight.q.device).to(E4M3)
    return dequantize(config.format_of(name) or "", weight._replace(q=least), columns, **options)


def fp8_rows(x: Approx, format: str, input_scale: Tensor | None, dtype: torch.dtype) -> tuple[Approx, Tensor]:
    """As `formats.quantized_rows` of what lies within x's bounds and is a number of `dtype`; and `least_normal` of it.

    The error is the width of the interval, so that both what a kernel has and what the definition has may lie anywhere
    in it.
    """
    low, high = ((x.value + sign * x.error).to(dtype).float() for sign in (-1, 1))
    value = quantized_rows(x.value.to(dtype), format, input_scale).double()
    least = torch.finfo(E4M3).smallest_normal
    if input_scale is not None:
        ends = [quantized_rows(end, format, input_scale) for end in (low, high)]
        return Approx(value, (ends[1] - ends[0]).double()), (input_scale.double() * least).expand_as(value)
    columns = low.shape[-1]
    size = 128 if FORMATS[format].activations == "block" else columns

    def amax(t: Tensor) -> Tensor:
        groups = torch.nn.functional.pad(t, (0, -columns % size)).unflatten(-1, (-1, size))
        largest = groups.amax(-1).clamp(min=LEAST_AMAX)
        return largest.repeat_interleave(size, -1)[..., :columns]

    ends = []
    amaxes = [amax(torch.maximum(low, -high).clamp(min=0)), amax(torch.maximum(low.abs(), high.abs()))]
    largest = torch.full_like(low, LARGEST_E4M3)
    for end, pick in ((low, torch.minimum), (high, torch.maximum)):
        q = pick(*(end * (largest / a) for a in amaxes)).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).float()
        ends.append(pick(*(q * (a / largest) for a in amaxes)))
    return Approx(value, (ends[1] - ends[0]).double()), amaxes[1].double() * (least / LARGEST_E4M3)


def moe(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    config: MoEConfig,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_gate: Tensor | None = None,
    num_valid_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    fp8_fraction: int | None = None,
    **scales: Tensor | None,
) -> Tensor:
    """The bound [T, H] of the layer's output for these ids and float32 weights, against `reference.moe`.

    Args:
        fp8_fraction: as of `cut_off`; None: sums of fp8 products are of float32 too.
    """
    dtype = hidden_states.dtype
    tensors = {"w13": w13, "w2": w2, "shared_w13": shared_w13, "shared_w2": shared_w2, **scales}
    x_TH = Approx.exact(hidden_states.reshape(-1, hidden_states.shape[-1]))
    T, H = x_TH.value.shape

    def product(x: Approx, name: str, expert: int | None) -> Approx:
        format, weight = config.format_of(name), quantised(tensors, name)
        weight = weight if expert is None else weight.expert(expert)
        w = numbers(config, name, weight, x.value.shape[1], dtype)
        if format is None or not FORMATS[format].activations:
            return x.linear(w)
        x, least = fp8_rows(x, format, weight.input_scale, dtype)
        y = x.linear(w)
        if fp8_fraction is None:
            return y
        least_weight = least_normal(config, name, weight, x.value.shape[1])
        return Approx(y.value, y.error + cut_off(x, w, least, least_weight, fp8_fraction))

    def products(
        x: Approx, prefix: str, expert: int | None, b13: Tensor | None, b2: Tensor | None, *how: Any
    ) -> Approx:  # fmt: skip
        h = product(x, f"{prefix}w13", expert).to(dtype)
        h = h if b13 is None else h.plus(Approx.exact(b13))
        h = activation(h, config, *how).to(dtype)
        y = product(h, f"{prefix}w2", expert).to(dtype)
        return y if b2 is None else y.plus(Approx.exact(b2)).to(dtype)

    terms_TH = torch.zeros(T, H, dtype=torch.float64)  # bounds of the terms, and of how large they are
    sizes_TH = torch.zeros(T, H, dtype=torch.float64)

    def add(token: Tensor, term: Approx) -> None:
        terms_TH.index_add_(0, token, term.error)
        sizes_TH.index_add_(0, token, term.size)

    num_routed = len(w13) if expert_map is None else len(expert_map)
    for expert in topk_ids.unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        weight, x = Approx.exact(topk_weights[token, slot].unsqueeze(1)), x_TH.map(lambda t, token=token: t[token])
        row = expert if expert_map is None or not 0 <= expert < num_routed else int(expert_map[expert])
        if num_routed <= expert < num_routed + config.num_zero_experts:
            add(token, x.times(weight))
        elif 0 <= expert < num_routed and row >= 0:
            if config.apply_router_weight_on_input:
                x, weight = x.times(weight).to(dtype), Approx.exact(torch.ones(1, 1))
            biases = (None if b is None else b[row] for b in (w13_bias, w2_bias))
            y = products(x, "", row, *biases, config.clamp_routed, config.w13_order)
            add(token, y.times(weight))
    terms_TH, sizes_TH = terms_TH * abs(config.scale_at_end), sizes_TH * abs(config.scale_at_end)
    if shared_w13 is not None and shared_w2 is not None:
        shared = products(x_TH, "shared_", None, None, None, config.clamp_shared, "gate_up")
        if shared_gate is not None:
            logit = x_TH.linear(Approx.exact(shared_gate))
            gate = torch.sigmoid(logit.value)
            shared = shared.times(Approx(gate, logit.error / 4 + FUNCTION * gate)).to(dtype)
        terms_TH, sizes_TH = terms_TH + shared.error, sizes_TH + shared.size
    errors_TH = terms_TH + 2 * (config.top_k + 3) * U32 * sizes_TH
    if config.combine == "average":
        errors_TH, sizes_TH = errors_TH / 2, sizes_TH / 2
    out = Approx(sizes_TH, errors_TH).to(dtype).error
    if num_valid_tokens is not None:
        out = out.masked_fill((torch.arange(T) >= num_valid_tokens).unsqueeze(1), 0.0)
    return out


def logits_of(layer: dict[str, Any], x: Tensor) -> Approx:
    """[T, E+Z], with the error of the op's own product where there is one."""
    if "router_logits" in layer:
        return Approx.exact(layer["router_logits"])
    config, x_TH = layer["config"], x.reshape(-1, x.shape[-1])
    bias = layer.get("router_bias")
    product = Approx.exact(x_TH).linear(Approx.exact(layer["router_weight"]))
    product = product if bias is None else product.plus(Approx.exact(bias))
    value = reference.compute_logits(x_TH, layer["router_weight"], bias, config)
    return Approx(value, _model_rounding(product, config.router_dtype, x.dtype).error)


def _model_rounding(t: Approx, where: str, dtype: torch.dtype) -> Approx:
    """A rounding that the config asks for and the definition makes too: two values round apart by two units."""
    return Approx(t.value, t.error + 2 * (t.to(dtype).error - t.error)) if where == "model" else t


def routing(
    logits: Approx, config: MoEConfig, correction_bias: Tensor | None, model_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids and weights [T, K] as the definition has them, by ascending id; a bound of the weights' error; and bool [T].

    The last are the rows in which no error of the logits and scores can change the set of ids, and the bound is finite.
    """
    ids_TK, weights_TK = reference.route(logits.value, config, correction_bias=correction_bias, model_dtype=model_dtype)
    order = ids_TK.argsort(dim=1)
    ids_TK, weights_TK = ids_TK.gather(1, order), weights_TK.gather(1, order)

    def rounded(t: Approx) -> Approx:
        """To float32, where a number too small is lost, and to the model's dtype."""
        return _model_rounding(t.rounded(U32), config.score_dtype, model_dtype)

    value_TE, spread_T1 = logits.value, torch.expm1(2 * logits.error.amax(1, keepdim=True))

    def softmax(t: Tensor) -> Approx:
        value = torch.softmax(t, 1)
        return rounded(Approx(value, value * (spread_T1 + (t.shape[1] + 8) * U32)))

    def sigmoid(t: Approx) -> Approx:
        value = torch.sigmoid(t.value)
        return rounded(Approx(value, t.error / 4 + FUNCTION * value))

    if config.score == "softmax":
        scores = softmax(value_TE)
    elif config.score == "sigmoid":
        scores = sigmoid(logits)
    elif config.score == "sqrtsoftplus":
        value = torch.nn.functional.softplus(value_TE).sqrt()
        scores = rounded(rounded(Approx(value, logits.error / 2 + FUNCTION * value)))
    else:
        scores = logits

    choice = logits if config.choice_on == "logit" else scores
    if correction_bias is not None:
        choice = choice.plus(Approx.exact(correction_bias))
    choice_TE, error_T = choice.value, choice.error.amax(1)
    is_clear = torch.ones(len(choice_TE), dtype=torch.bool)
    if config.n_group is not None and config.topk_group is not None:
        grouped_TGM = choice_TE.unflatten(1, (config.n_group, -1))
        members = 1 if config.group_score == "max" else 2
        group_TG = grouped_TGM.topk(members, -1).values.sum(-1)
        group = rounded(Approx(group_TG, members * error_T.unsqueeze(1).expand_as(group_TG)).rounded(2 * U32))
        is_clear &= _is_clear(group_TG, config.topk_group, group.error.amax(1))
        kept = reference.best_ids(group_TG, config.topk_group)
        lost_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, kept, False)
        masked = -torch.inf if config.group_mask == "-inf" else 0.0
        choice_TE = grouped_TGM.masked_fill(lost_TG.unsqueeze(-1), masked).flatten(1)
    is_clear &= _is_clear(choice_TE, config.top_k, error_T)

    chosen = logits.map(lambda t: t.gather(1, ids_TK))
    if config.weights_from == "topk_softmax":
        weights = softmax(chosen.value)
    elif config.weights_from == "topk_sigmoid":
        weights = sigmoid(chosen)
    else:
        weights = scores.map(lambda t: t.gather(1, ids_TK))
    if config.normalize != "none":
        total = Approx(weights.value.sum(1, keepdim=True), weights.error.sum(1, keepdim=True))
        total = Approx(total.value, total.error + 2 * config.top_k * U32 * weights.size.sum(1, keepdim=True))
        if config.normalize == "sum_clamp":
            is_below = total.value + total.error < 1e-12
            total = Approx(total.value.clamp(min=1e-12), total.error.masked_fill(is_below, 0.0)).rounded(U32)
        total = rounded(total)
        least = total.value.abs() - total.error
        quotient = weights.value / total.value
        error = (weights.error + quotient.abs() * total.error) / least
        is_clear &= (least > 0).squeeze(1)
        weights = rounded(Approx(quotient, error).rounded(FUNCTION))
    weights = rounded(weights * config.scale_in_weights)
    weights = _model_rounding(weights, config.weight_dtype, model_dtype)
    return ids_TK, weights_TK, weights.error, is_clear & weights.error.isfinite().all(1)


def _is_clear(values_TE: Tensor, k: int, error_T: Tensor) -> Tensor:
    """Rows whose k best stay so where each value errs by that much; false where one is not a number."""
    if k == values_TE.shape[1]:
        return error_T.isfinite()
    best = values_TE.topk(k + 1, 1).values
    return best[:, k - 1] - best[:, k] > 2 * error_T
