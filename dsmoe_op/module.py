"""`DualStreamMoE`: the layer as a module that holds its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dsmoe_op import checks, formats, quantizing
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FormatName
from dsmoe_op.ops import dual_stream_moe, prepare
from dsmoe_op.quantizing import ROUTED, WEIGHTS

_OTHERS = ("router_weight", "router_bias", "w13_bias", "w2_bias", "shared_gate")
_HELD = ("correction_bias", *_OTHERS, *(w + s for w in WEIGHTS for s in formats.SUFFIXES))
"""The op's arguments that a layer holds; the others belong to a call."""


class DualStreamMoE(nn.Module):
    """One MoE layer that runs as one `dual_stream_moe` call.

    Built so, it owns flat parameters named as the op's arguments (correction_bias is a float32 buffer). Built by
    `from_transformers`, it keeps the children and the state_dict of the block it replaces. `quantize` quantises the
    experts' weights; `from_tensors` takes weights of either kind as they are.

    Args:
        config: the layer's knobs; without formats, which come by `quantize` and `from_tensors`.
        hidden_size: H.
        num_experts: E; the router has config.num_zero_experts rows more.
        intermediate_size: I.
        shared_intermediate_size: S, or None without a shared expert.
        shared_gate: whether the shared output is gated by sigmoid(x . shared_gate).
        router_bias, correction_bias, w13_bias, w2_bias: whether these exist.
        router_dtype: dtype of router_weight and router_bias; None is `dtype`.
        dtype, device: of the weights; None is torch's default.
        schedule: as in `dual_stream_moe`.

    Raises:
        ValueError: arguments that no call could run with; the text names the argument.

    Attributes:
        config: MoEConfig of the layer.
        schedule: used by the next call; may be set at any time.
    """

    config: MoEConfig
    _paths: tuple[tuple[str, tuple[str, ...]], ...]
    """Op argument -> path of the attribute that holds it."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        router_bias: bool = False,
        correction_bias: bool = False,
        w13_bias: bool = False,
        w2_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        schedule: str = "auto",
    ) -> None:
        super().__init__()
        if schedule not in checks.SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(map(repr, checks.SCHEDULES))}, got {schedule!r}")
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected an integer above 0, got {size!r}")
        checks.check_choice(config, num_experts + config.num_zero_experts)
        for name in ("routed_format", "shared_format"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}: expected None (quantize() sets it), got {getattr(config, name)!r}")
        if shared_gate and not shared_intermediate_size:
            raise ValueError("shared_gate: expected False without shared_intermediate_size, got True")
        self.config = config
        self.schedule = schedule
        H, E, I, S = hidden_size, num_experts, intermediate_size, shared_intermediate_size or 0
        E_logits = E + config.num_zero_experts
        rows = 2 if config.gated else 1
        router_dtype = router_dtype or dtype
        shapes: dict[str, tuple[tuple[int, ...] | None, torch.dtype | None]] = {
            "router_weight": ((E_logits, H), router_dtype),
            "router_bias": ((E_logits,) if router_bias else None, router_dtype),
            "w13": ((E, rows * I, H), dtype),
            "w13_bias": ((E, rows * I) if w13_bias else None, dtype),
            "w2": ((E, H, I), dtype),
            "w2_bias": ((E, H) if w2_bias else None, dtype),
            "shared_w13": ((rows * S, H) if S else None, dtype),
            "shared_w2": ((H, S) if S else None, dtype),
            "shared_gate": ((1, H) if shared_gate else None, dtype),
        }
        for name, (shape, its_dtype) in shapes.items():
            tensor = None if shape is None else nn.Parameter(torch.empty(shape, dtype=its_dtype, device=device))
            self.register_parameter(name, tensor)
        bias = torch.zeros(E_logits, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction_bias", bias)
        held = [name for name in (*shapes, "correction_bias") if getattr(self, name) is not None]
        self._paths = tuple((name, (name,)) for name in held)
        self.reset_parameters()

    @classmethod
    def from_transformers(cls, block: nn.Module, schedule: str = "auto") -> DualStreamMoE:
        """The same layer as a MoE block of Hugging Face transformers, on the same storage.

        The block's children stay under their names (the shared expert's gate and up weights alone are merged, once), so
        state_dict keys, dtypes, devices, hooks of the block and of its router, and what it returns stay as they were.

        Args:
            block: a block that `dsmoe_op.hf.families()` lists; one that is a DualStreamMoE already is returned.
            schedule: as in `dual_stream_moe`.

        Raises:
            ValueError: the block's class is unknown, or it holds something that the op does not compute; the text names
                the class and the part.
        """
        from dsmoe_op import hf  # hf builds on this module, and most users of it have no transformers

        return hf.from_transformers(block, schedule)

    @staticmethod
    def from_tensors(config: MoEConfig, tensors: Mapping[str, Tensor], *, schedule: str = "auto") -> DualStreamMoE:
        """A module that holds these tensors, as parameters without gradient; none is copied.

        Args:
            config: the layer's knobs, with the formats of the weights.
            tensors: those that `tensors()` returns, by the names of `dual_stream_moe`. Without a router_weight calls
                need router_logits or topk_ids. Scales in float8_e8m0fnu are held as their bytes, in uint8.
            schedule: as in `dual_stream_moe`.

        Raises:
            ValueError: what the op would refuse; a name that is not of a layer's own tensors.
        """
        unknown = sorted(set(tensors) - set(_HELD))
        if unknown:
            raise ValueError(f"tensors: expected a layer's own, of {', '.join(_HELD)}; got also {', '.join(unknown)}")
        call: dict[str, Any] = dict.fromkeys(checks.LAYER_FIELDS) | _call(config, tensors, 0)
        checks.check_layer(checks.Layer(**call), config, schedule)
        module = DualStreamMoE.__new__(DualStreamMoE)
        nn.Module.__init__(module)
        module.config, module.schedule = config, schedule
        module._paths = tuple((name, (name,)) for name in tensors)
        for name, tensor in tensors.items():
            if name == "correction_bias":
                module.register_buffer(name, tensor.detach())
            else:
                module.register_parameter(name, _frozen(tensor))
        return module

    def quantize(
        self,
        format: FormatName | None,
        *,
        shared_format: FormatName | Literal["same"] | None = "same",
        group: int = 32,
        zero_point: bool = False,
        input_scales: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Quantises the experts' weights, in place and for good: `config` gets the formats, the old weights are freed.

        The new tensors are parameters without gradient, named as the op's arguments: w13, w13_scale, ... They keep
        their dtypes whatever the module is cast to, and load_state_dict takes no others. Of a block of transformers,
        the children that held the experts and the shared expert go, with their state_dict keys; the router and all else
        stays.

        Memory: one weight after the other, one expert of it at a time. At the most there is, beside the weights as they
        were, the quantised w13 (or w2, or shared one, if larger) and some float32 copies of one expert's (or of the
        shared expert's) weight. An error half-way, such as too little memory, leaves the module unusable.

        Args:
            format: of w13 and w2, a name of `dsmoe_op.formats.FORMATS`; None leaves them.
            shared_format: of shared_w13 and shared_w2, where there are any: likewise; None leaves them.
            group: columns that share a scale in int4: 32, 64 or 128.
            zero_point: of int4; else its numbers are symmetric.
            input_scales: of fp8_tensor, which needs one for each weight: w13_input_scale, w2_input_scale,
                shared_w13_input_scale, shared_w2_input_scale; float32 [E] (of the routed ones), [1] or [].

        Returns:
            The module.

        Raises:
            ValueError: an unknown format, weights that have one already, or options that do not fit. Nothing is changed
                then.
        """
        given = self.tensors()
        if shared_format == "same":
            shared_format = format if "shared_w13" in given else None
        chosen = quantizing.chosen_formats(format, shared_format, given, self.config)
        scales = dict(input_scales or {})
        quantizing.check_options(chosen, given, group, zero_point, scales)

        paths, gone = dict(self._paths), set()
        for name, its in chosen.items():
            path = paths.pop(name)
            owner = _follow(self, path[:-1])
            options: dict[str, Any] = {"halves": self.config.halves(name), "interleaved": self.config.interleaves(name)}
            if its == "int4":
                options |= {"group": group, "zero_point": zero_point}
            parts = quantizing.quantize_each(its, given.pop(name), **options)
            owner._parameters[path[-1]] = None  # frees it before the next one's numbers are made
            parts = parts._replace(input_scale=scales.get(f"{name}_input_scale"))
            for suffix, part in zip(formats.SUFFIXES, parts, strict=True):
                if part is not None:
                    self.register_parameter(name + suffix, _frozen(part))
                    paths[name + suffix] = (name + suffix,)
            if len(path) > 1:
                gone.add(path[0])
        for name, path in paths.items():
            if path[0] in gone:  # biases of experts that go
                self.register_parameter(name, _follow(self, path))
                paths[name] = (name,)
        for child in gone:
            del self._modules[child]
        self._paths = tuple(paths.items())
        self._set_formats(format, shared_format)
        return self

    def _set_formats(self, routed: FormatName | None, shared: FormatName | None) -> None:
        """Of what has been quantised now; None leaves a format as it is."""
        self.config = quantizing.with_formats(self.config, routed, shared)

    def reset_parameters(self) -> None:
        """Uniform weights within 1/sqrt(fan-in), as nn.Linear has; biases zero.

        Raises:
            ValueError: the weights are quantised.
        """
        if self.config.routed_format is not None or self.config.shared_format is not None:
            raise ValueError("reset_parameters: expected weights that are not quantised")
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("_bias"):
                    parameter.zero_()
                else:
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound)

    def tensors(self) -> dict[str, Tensor]:
        """The op's tensor arguments that this layer holds, by name."""
        found: dict[str, Tensor] = {}
        for name, path in self._paths:
            owner: Any = self
            for part in path:
                # Most are parameters, which nn.Module's own look-up comes to last; a parametrised one is not there.
                held = owner._parameters.get(part)
                owner = getattr(owner, part) if held is None else held
            found[name] = owner
        return found

    def prepare(self, dtype: torch.dtype | None = None) -> float | None:
        """Compiles and loads all that a forward pass of any size needs; see `dsmoe_op.prepare`.

        Args:
            dtype: of hidden_states; None is that of the experts' weights. Where these are quantised, it is the dtype of
                the router or a bias that is not float32, or else bfloat16.

        Returns:
            Seconds taken, or None where there is nothing to do: on the CPU.
        """
        return prepare(**_call(self.config, self.tensors(), 1, dtype), config=self.config, schedule=self.schedule)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        router_logits: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_valid_tokens: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [..., H] -> a fresh contiguous tensor like it; the other arguments as in `dual_stream_moe`.

        With router_logits, or topk_ids and topk_weights, the module's own router is left out.
        """
        given = self.tensors()
        if router_logits is not None or topk_ids is not None:
            given.pop("router_weight", None)
            given.pop("router_bias", None)
        if topk_ids is not None:
            given.pop("correction_bias", None)
        return dual_stream_moe(
            hidden_states,
            config=self.config,
            schedule=self.schedule,
            router_logits=router_logits,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            num_valid_tokens=num_valid_tokens,
            expert_map=expert_map,
            **given,
        )

    def _keeps_dtype(self) -> set[str]:
        """Names of the tensors of quantised weights: to cast one is to change what it means."""
        weights = [name for name in WEIGHTS if self.config.format_of(name) is not None]
        return {name + suffix for name in weights for suffix in formats.SUFFIXES}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As of nn.Module, which moves and casts by it; what a cast would spoil is only moved, as bytes.

        That is quantised weights, and correction_bias: rounded, it would choose other experts.
        """
        kept = [self._parameters.get(name) for name in self._keeps_dtype()] + [self._buffers.get("correction_bias")]
        held = {id(tensor) for tensor in kept if tensor is not None}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in held:
                return fn(tensor)
            data = tensor.reshape(-1).view(torch.uint8)
            new = fn(data)
            new = new if new.dtype == data.dtype else data.to(new.device)  # Module.type casts whatever it is
            return new.view(tensor.dtype).view(tensor.shape)

        return super()._apply(move, recurse)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As nn.Module's, which casts what it loads: of quantised weights it would lose what they mean."""
        given, missing = dict(state_dict), list[str]()
        for name in sorted(self._keeps_dtype() & self._parameters.keys()):
            key, held = prefix + name, self._parameters[name]
            if held is not None and key in given and given[key].dtype != held.dtype:
                error_msgs.append(f"dtype mismatch for {key}: expected {held.dtype}, got {given.pop(key).dtype}")
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [key for key in missing if key not in state_dict]

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which knows no 8-bit floats: they are bytes in it."""
        state = self.__dict__.copy()
        floats = {name: t for name, t in self._parameters.items() if t is not None and t.dtype == formats.E4M3}
        if floats:
            state["_parameters"] = self._parameters | {name: t.detach().view(torch.uint8) for name, t in floats.items()}
            state["_float8"] = list(floats)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.__dict__.pop("_float8", ()):
            self._parameters[name] = _frozen(self._parameters[name].view(formats.E4M3))  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        return f"config={self.config.key}, schedule={self.schedule!r}"


def _follow(owner: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        owner = getattr(owner, part)
    return owner


def _frozen(tensor: Tensor) -> nn.Parameter:
    """Scales in float8_e8m0fnu as their bytes: few files and tools know the dtype, and the op takes either."""
    tensor = tensor.detach()
    return nn.Parameter(tensor.view(torch.uint8) if tensor.dtype == formats.E8M0 else tensor, requires_grad=False)


def _model_dtype(config: MoEConfig, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """That of the expert weights; where all are quantised, of another tensor that is not float32, as routers may be."""
    for name in WEIGHTS:
        if name in tensors and config.format_of(name) is None and tensors[name].dtype in checks.MODEL_DTYPES:
            return tensors[name].dtype
    others = (tensors[name].dtype for name in _OTHERS if name in tensors)
    return next((dtype for dtype in others if dtype != torch.float32), torch.bfloat16)


def _call(
    config: MoEConfig, tensors: Mapping[str, Tensor], T: int, dtype: torch.dtype | None = None
) -> dict[str, Any]:  # fmt: skip
    """Tensors of a call of T tokens, none of them written, by the op's argument names."""
    for name in dict.fromkeys((*ROUTED, *tensors)):
        if not isinstance(tensors.get(name), Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensors.get(name)).__name__}")
    w2 = tensors["w2"]
    if w2.dim() != 3:
        raise ValueError(f"w2: expected 3 dims [E, H, I], got {list(w2.shape)}")
    call = {"hidden_states": w2.new_empty((T, w2.shape[1]), dtype=dtype or _model_dtype(config, tensors)), **tensors}
    if "router_weight" not in tensors:
        call["router_logits"] = call["hidden_states"].new_empty((T, len(w2) + config.num_zero_experts))
    return call
