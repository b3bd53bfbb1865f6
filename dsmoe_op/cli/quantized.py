"""A model whose MoE blocks are ops on quantised weights, beside the same model on the numbers that these stand for."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsmoe_op import DualStreamMoE, formats, reference
from dsmoe_op.cli.arguments import Formats
from dsmoe_op.quantizing import WEIGHTS


@torch.no_grad()
def twin(model: nn.Module, names: Formats, schedule: str, text: Tensor) -> tuple[nn.Module, int]:
    """A copy of a model of transformers with its MoE blocks swapped and quantised, and how many they are.

    The weights of `model`, whose blocks stay, become what the quantised ones stand for, rounded to its dtype.

    Args:
        text: int64 [1, P]: one forward pass of it gives fp8_tensor its input scales.

    Raises:
        ValueError: a block cannot be swapped, or the op does not take a format here.
    """
    from dsmoe_op.hf import replace_moe_blocks

    plain = copy.deepcopy(model)
    swapped = replace_moe_blocks(plain, schedule)
    scales = _input_scales(plain, text) if "fp8_tensor" in names else {}
    patched = copy.deepcopy(plain)
    for name, module in _layers(patched).items():
        its = {w: s for w, s in scales.get(name, {}).items() if names[w.startswith("shared_")] == "fp8_tensor"}
        shared_format = "same" if names.routed == names.shared else names.shared
        module.quantize(names.routed, shared_format=shared_format, input_scales=its)
        module.prepare(next(model.parameters()).dtype)
        _dequantize(module, _layers(plain)[name])
    model.load_state_dict(plain.state_dict())
    return patched, swapped


def _layers(model: nn.Module) -> dict[str, DualStreamMoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, DualStreamMoE)}


def _dequantize(module: DualStreamMoE, plain: DualStreamMoE) -> None:
    """Writes what the module's weights stand for into those of `plain`."""
    tensors, config = module.tensors(), module.config
    for name, weight in plain.tensors().items():
        format = config.format_of(name) if name in WEIGHTS else None
        if format is not None:
            options: dict[str, Any] = {"halves": config.halves(name), "interleaved": config.interleaves(name)}
            its = formats.quantised(tensors, name)
            weight.copy_(formats.dequantize(format, its, weight.shape[-1], dtype=torch.float32, **options))


def _input_scales(model: nn.Module, text: Tensor) -> dict[str, dict[str, Tensor]]:
    """Of each layer, by its name in the model: largest magnitude of what each weight multiplies, over 448."""
    found: dict[str, dict[str, Tensor]] = {}

    def watch(name: str, module: DualStreamMoE) -> Any:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            largest = _largest(module, inputs[0])
            found[name] = {
                f"{weight}_input_scale": (amax.clamp(min=formats.LEAST_AMAX) / formats.LARGEST_E4M3).reshape(1)
                for weight, amax in largest.items()
            }

        return module.register_forward_pre_hook(note)

    handles = [watch(name, module) for name, module in _layers(model).items()]
    try:
        model(input_ids=text)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _largest(module: DualStreamMoE, x: Tensor) -> dict[str, Tensor]:
    """Largest magnitudes of x and h, those of every expert for every token."""
    tensors, config = module.tensors(), module.config
    x = x.reshape(-1, x.shape[-1]).float()

    def h(w13: Tensor, bias: Tensor | None, clamp: float | None, order: str) -> Tensor:
        product = F.linear(x, w13.float(), None if bias is None else bias.float())
        return reference.activation(product, config, clamp=clamp, order=order).abs().max()

    biases = tensors.get("w13_bias", [None] * len(tensors["w13"]))
    routed = [h(w, b, config.clamp_routed, config.w13_order) for w, b in zip(tensors["w13"], biases, strict=True)]
    found = {"w13": x.abs().max(), "w2": torch.stack(routed).max()}
    if "shared_w13" in tensors:
        shared = h(tensors["shared_w13"], None, config.clamp_shared, "gate_up")
        found |= {"shared_w13": x.abs().max(), "shared_w2": shared}
    return found
