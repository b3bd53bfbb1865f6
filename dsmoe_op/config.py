"""The knobs of one MoE layer, as a frozen value that crosses the op as one canonical string."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dsmoe_op.formats import FormatName

Score = Literal["sigmoid", "softmax", "sqrtsoftplus", "none"]
ChoiceOn = Literal["score", "logit"]
GroupScore = Literal["top2_sum", "max"]
GroupMask = Literal["-inf", "zero"]
WeightsFrom = Literal["score", "topk_softmax", "topk_sigmoid"]
Normalize = Literal["none", "sum", "sum_eps", "sum_clamp"]
ScaleOn = Literal["weights", "output"]
Dtype = Literal["float32", "model"]
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"]
W13Order = Literal["gate_up", "up_gate", "interleaved"]
Combine = Literal["sum", "average"]

_LARGEST = 3.4e38
"""Beyond it a float32 is infinite."""
MAX_TOP_K = 32
MAX_EXPERTS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What a layer computes besides its weights. The defaults are DeepSeek-V3's, without groups and with a factor of 1.

    A row's routing is ``logits -> scores -> choice -> weights``; `reference.py` is the definition.

    Attributes:
        top_k: experts chosen for each token, 1..32.
        score: what the router's logits become. "none" keeps them.
        choice_on: whether correction_bias is added to the score or to the logit; the sum decides the choice alone.
        n_group, topk_group: the experts form n_group equal groups, of which the best topk_group stay eligible.
            Both or neither.
        group_score: a group's worth: the sum of its two best choice values, or its best.
        group_mask: what the choice values of the losing groups become.
        weights_from: the unbiased scores of the chosen, or softmax/sigmoid over the chosen logits.
        normalize: "none"; w / sum; w / (sum + 1e-20); w / max(sum, 1e-12). A divisor of 0 counts as 1.
        routed_scaling_factor: applied once, to the weights or to the routed sum (scale_on).
        router_dtype: "model" rounds the logits to the dtype of hidden_states.
        score_dtype: "model" rounds every step of the arithmetic from the scores on likewise: the scores (sqrtsoftplus
            after each of its two steps), group sums without a correction bias, the sum, the quotient and the scaled
            weight.
        weight_dtype: "model" rounds the weights once, after normalize and the factor.
        apply_router_weight_on_input: the weight multiplies the expert's input instead of its output.
        activation: "relu2" is not gated: w13 is [E, I, H] and shared_w13 [S, H]. "swiglu_oai" is
            (up + 1) * gate * sigmoid(1.702 * gate).
        clamp_routed, clamp_shared: a limit L: gate <= L and -L <= up <= L. None is no clamp.
        clamp_after_activation: the limit holds for act(gate) instead of gate.
        w13_order: order of w13's rows: all gate rows then all up rows, the reverse, or alternating, gate first.
            shared_w13 is always gate_up.
        combine: the layer's sum of routed and shared output, or half of it, their average.
        num_zero_experts: Z; ids E..E+Z-1 return w * x. router_weight and correction_bias then have E + Z rows.
        routed_format, shared_format: how w13 and w2, and shared_w13 and shared_w2, are quantised: a name of
            `dsmoe_op.formats.FORMATS`. None: they are not.

    Raises:
        ValueError: a field outside its values; the text names the field, what came and what is accepted.
    """

    top_k: int
    score: Score = "sigmoid"
    choice_on: ChoiceOn = "score"
    n_group: int | None = None
    topk_group: int | None = None
    group_score: GroupScore = "top2_sum"
    group_mask: GroupMask = "-inf"
    weights_from: WeightsFrom = "score"
    normalize: Normalize = "sum_eps"
    routed_scaling_factor: float = 1.0
    scale_on: ScaleOn = "weights"
    router_dtype: Dtype = "float32"
    score_dtype: Dtype = "float32"
    weight_dtype: Dtype = "float32"
    apply_router_weight_on_input: bool = False
    activation: Activation = "silu"
    clamp_routed: float | None = None
    clamp_shared: float | None = None
    clamp_after_activation: bool = False
    w13_order: W13Order = "gate_up"
    combine: Combine = "sum"
    num_zero_experts: int = 0
    routed_format: FormatName | None = None
    shared_format: FormatName | None = None

    def __post_init__(self) -> None:
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                _refuse(name, getattr(self, name), f"one of {', '.join(map(repr, values))}")
        _check_int("top_k", self.top_k, 1, MAX_TOP_K)
        _check_int("num_zero_experts", self.num_zero_experts, 0, MAX_EXPERTS)
        if (self.n_group is None) != (self.topk_group is None):
            missing = "n_group" if self.n_group is None else "topk_group"
            _refuse(missing, None, "n_group and topk_group given together, or neither")
        if self.n_group is not None:
            _check_int("n_group", self.n_group, 1, MAX_EXPERTS)
            _check_int("topk_group", self.topk_group, 1, self.n_group)
        for name in ("apply_router_weight_on_input", "clamp_after_activation"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        for name in ("routed_scaling_factor", "clamp_routed", "clamp_shared"):
            value = getattr(self, name)
            optional = name != "routed_scaling_factor"
            if value is None and optional:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not abs(value) <= _LARGEST or (optional and value <= 0):
                _refuse(name, value, "a finite number" + (" above 0, or None" if optional else ""))
            object.__setattr__(self, name, float(value))
        if self.apply_router_weight_on_input and self.num_zero_experts:
            _refuse("num_zero_experts", self.num_zero_experts, "0 with apply_router_weight_on_input")
        object.__setattr__(self, "key", self._make_key())

    key: str = dataclasses.field(init=False, repr=False, compare=False)
    """Canonical string: top_k and whatever differs from its default, so that a later field leaves old keys valid."""

    def _make_key(self) -> str:
        # By hand: Dynamo traces this where a config is made inside a compiled function, and it can't trace json.dumps.
        values = [(name, getattr(self, name)) for name in _FIELDS]
        parts = [f'"{name}":{_json(v)}' for name, v in values if name not in _DEFAULTS or v != _DEFAULTS[name]]
        return "{" + ",".join(parts) + "}"

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_key(key: str) -> MoEConfig:
        """The config that `key` was made from.

        Raises:
            ValueError: `key` is not the key of a config.
        """
        try:
            values = json.loads(key)
        except ValueError:
            values = None
        if not isinstance(values, Mapping) or "top_k" not in values:
            raise ValueError(f"config: expected the key of a MoEConfig, got {key!r}")
        unknown = sorted(set(values) - {f.name for f in dataclasses.fields(MoEConfig) if f.init})
        if unknown:
            raise ValueError(f"config: expected the fields of MoEConfig, got also {', '.join(unknown)}")
        return MoEConfig(**values)

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows (2I of them) or up rows alone (I)."""
        return self.activation != "relu2"

    def format_of(self, weight: str) -> FormatName | None:
        """Of w13, w2, shared_w13 or shared_w2."""
        return self.shared_format if weight.startswith("shared_") else self.routed_format

    def halves(self, weight: str) -> int:
        """2 where the weight of that name has gate and up rows, else 1."""
        return 2 if self.gated and weight.endswith("w13") else 1

    def interleaves(self, weight: str) -> bool:
        """Whether its gate and up rows alternate."""
        return self.gated and weight == "w13" and self.w13_order == "interleaved"

    @property
    def scale_in_weights(self) -> float:
        """The factor that the weights take."""
        return self.routed_scaling_factor if self.scale_on == "weights" else 1.0

    @property
    def scale_at_end(self) -> float:
        """The factor that the routed sum takes."""
        return self.routed_scaling_factor if self.scale_on == "output" else 1.0

    def __reduce__(self) -> tuple[Any, ...]:
        return MoEConfig.from_key, (self.key,)


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "score": get_args(Score),
    "choice_on": get_args(ChoiceOn),
    "group_score": get_args(GroupScore),
    "group_mask": get_args(GroupMask),
    "weights_from": get_args(WeightsFrom),
    "normalize": get_args(Normalize),
    "scale_on": get_args(ScaleOn),
    "router_dtype": get_args(Dtype),
    "score_dtype": get_args(Dtype),
    "weight_dtype": get_args(Dtype),
    "activation": get_args(Activation),
    "w13_order": get_args(W13Order),
    "combine": get_args(Combine),
    "routed_format": (None, *get_args(FormatName)),
    "shared_format": (None, *get_args(FormatName)),
}

_FIELDS = tuple(sorted(f.name for f in dataclasses.fields(MoEConfig) if f.init))
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(MoEConfig) if f.default is not dataclasses.MISSING}


def _json(value: object) -> str:
    if isinstance(value, str):  # one of its field's choices: nothing to escape
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _refuse(name: str, got: object, accepted: str) -> None:
    raise ValueError(f"{name}: expected {accepted}, got {got!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _refuse(name, value, f"an integer in {low}..{high}")
