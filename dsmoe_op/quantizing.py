"""What `DualStreamMoE.quantize` does to weights, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsmoe_op import formats
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FormatName, Quantised

ROUTED, SHARED = ("w13", "w2"), ("shared_w13", "shared_w2")
WEIGHTS = ROUTED + SHARED
"""Those that may have a format, by argument of the op."""


def with_formats(config: MoEConfig, routed: FormatName | None, shared: FormatName | None) -> MoEConfig:
    """None leaves a format as it is."""
    return dataclasses.replace(
        config, routed_format=routed or config.routed_format, shared_format=shared or config.shared_format
    )


def chosen_formats(
    format: FormatName | None, shared_format: FormatName | None, given: Mapping[str, Tensor], config: MoEConfig
) -> dict[str, FormatName]:
    """Weight -> the format that it is to get."""
    if format is None and shared_format is None:
        raise ValueError("format: expected a format, or a shared_format beside None, got None for both")
    if shared_format is not None and "shared_w13" not in given:
        raise ValueError(f"shared_format: expected None without a shared expert, got {shared_format!r}")
    chosen: dict[str, FormatName] = {}
    for argument, its, weights in (("format", format, ROUTED), ("shared_format", shared_format, SHARED)):
        if its is None:
            continue
        if not isinstance(its, str) or its not in formats.FORMATS:
            accepted = ", ".join(map(repr, formats.FORMATS))
            raise ValueError(f"{argument}: expected one of {accepted}, or None, got {its!r}")
        if (old := config.format_of(weights[0])) is not None:
            raise ValueError(f"{argument}: expected None, since {' and '.join(weights)} are {old} already, got {its!r}")
        chosen |= dict.fromkeys(weights, its)
    return chosen


def check_options(
    chosen: Mapping[str, FormatName], given: Mapping[str, Tensor], group: int, zero_point: bool,
    input_scales: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """What `quantize` was asked for, beside the formats themselves."""
    groups = formats.FORMATS["int4"].columns
    if group not in groups:
        raise ValueError(f"group: expected one of {', '.join(map(str, groups))}, got {group!r}")
    if zero_point and "int4" not in chosen.values():
        raise ValueError("zero_point: expected False without a weight in int4, got True")
    for name, its in chosen.items():
        in_byte = 8 // formats.FORMATS[its].bits
        if given[name].shape[-1] % in_byte:
            accepted = f"columns in a multiple of {in_byte} for {its}"
            raise ValueError(f"{name}: expected {accepted}, got {list(given[name].shape)}")
    wanted = {f"{name}_input_scale": given[name] for name, its in chosen.items() if its == "fp8_tensor"}
    if wanted.keys() != input_scales.keys():
        accepted = f"{', '.join(wanted)} for fp8_tensor" if wanted else "none, since no weight becomes fp8_tensor"
        raise ValueError(f"input_scales: expected {accepted}, got {', '.join(input_scales) or 'none'}")
    for name, weight in wanted.items():
        scale = input_scales[name]
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise ValueError(f"{name}: expected a float32 tensor, got {got}")
        shapes = [(), (1,), (len(weight),)] if weight.dim() == 3 else [(), (1,)]
        if tuple(scale.shape) not in shapes:
            accepted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name}: expected {accepted}, got {list(scale.shape)}")
        if scale.device != weight.device:
            raise ValueError(f"{name}: expected device {weight.device}, got {scale.device}")


@torch.no_grad()
def quantize_each(format: FormatName, weight: Tensor, **options: Any) -> Quantised:
    """`formats.quantize` an expert at a time: it makes float32 copies of what it is given."""
    if weight.dim() == 2:
        return formats.quantize(format, weight, **options)
    first = formats.quantize(format, weight[0], **options)
    whole = Quantised(*(None if p is None else p.new_empty((len(weight), *p.shape)) for p in first))  # type: ignore[arg-type]
    if weight.is_meta:
        return whole
    for expert, its_weight in enumerate(weight):
        parts = formats.quantize(format, its_weight, **options) if expert else first
        for tensor, part in zip(whole, parts, strict=True):
            if tensor is not None and part is not None:
                tensor[expert] = part
    return whole
