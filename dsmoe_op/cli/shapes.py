"""Shapes of layers that people run, and how little time and memory a layer of a shape can take."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import Any

from dsmoe_op.cli.arguments import Formats
from dsmoe_op.config import MoEConfig

ROWS_COUNT_FROM = 1024
"""Tokens from which the rows between the experts and the sum no longer stay in a cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer, and its router.

    Every router's matmul counts as float32 here, whatever a family does: bfloat16 logits tie, and a tie is broken
    differently by each candidate.

    Attributes:
        H, I, E, K, S: hidden size, routed width, experts, chosen ones, shared width (0: no shared expert).
        correction_bias: whether the choice has one.
        shared_gate: whether the shared output is gated.
    """

    name: str
    H: int
    I: int
    E: int
    K: int
    S: int
    config: MoEConfig
    correction_bias: bool = False
    shared_gate: bool = False

    @property
    def numbers(self) -> str:
        return f"{self.H}/{self.I}/{self.E}/{self.K}/{self.S}"

    @property
    def routed_elements(self) -> int:
        return 3 * self.E * self.H * self.I

    @property
    def shared_elements(self) -> int:
        return 3 * self.H * self.S

    @property
    def router_elements(self) -> int:
        return self.E * self.H

    def split(self, ranks: int) -> Shape:
        """One rank's share under tensor parallelism, which divides the widths.

        Raises:
            ValueError: a width cannot be divided.
        """
        if not ranks or self.I % ranks or self.S % ranks:
            raise ValueError(f"{self.name} has I={self.I} and S={self.S}")
        return dataclasses.replace(self, name=f"{self.name}_tp{ranks}", I=self.I // ranks, S=self.S // ranks)


def _sigmoid(K: int, factor: float = 1.0, groups: tuple[int, int] | None = None) -> dict[str, Any]:
    n_group, topk_group = groups or (None, None)
    config = MoEConfig(top_k=K, n_group=n_group, topk_group=topk_group, routed_scaling_factor=factor)
    return {"K": K, "config": config, "correction_bias": True}


def _softmax(K: int, *, gate: bool = False) -> dict[str, Any]:
    return {"K": K, "config": MoEConfig(top_k=K, score="softmax", normalize="sum"), "shared_gate": gate}


def _deepseek_v2(K: int, factor: float = 1.0, groups: tuple[int, int] | None = None) -> dict[str, Any]:
    n_group, topk_group = groups or (None, None)
    config = MoEConfig(
        top_k=K,
        score="softmax",
        normalize="none",
        n_group=n_group,
        topk_group=topk_group,
        group_score="max",
        group_mask="zero",
        routed_scaling_factor=factor,
    )
    return {"K": K, "config": config}


def _llama4() -> dict[str, Any]:
    config = MoEConfig(top_k=1, weights_from="topk_sigmoid", normalize="none", apply_router_weight_on_input=True)
    return {"K": 1, "config": config}


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(name="dsv3", H=7168, I=2048, E=256, S=2048, **_sigmoid(8, 2.5, (8, 4))),
        Shape(name="qwen3next", H=2048, I=512, E=512, S=512, **_softmax(10, gate=True)),
        Shape(name="glm45air", H=4096, I=1408, E=128, S=1408, **_sigmoid(8)),
        Shape(name="v2lite", H=2048, I=1408, E=64, S=2816, **_deepseek_v2(6)),
        Shape(name="dsv2", H=5120, I=1536, E=160, S=3072, **_deepseek_v2(6, 16.0, (8, 3))),
        Shape(name="kimi_k2", H=7168, I=2048, E=384, S=2048, **_sigmoid(8, 2.827)),
        Shape(name="glm45", H=5120, I=1536, E=160, S=1536, **_sigmoid(8, 2.5)),
        Shape(name="glm5", H=6144, I=2048, E=256, S=2048, **_sigmoid(8, 2.5)),
        Shape(name="qwen35_35b", H=2048, I=512, E=256, S=512, **_softmax(8, gate=True)),
        Shape(name="qwen2_57b", H=3584, I=2560, E=64, S=20480, **_softmax(8, gate=True)),
        Shape(name="ling_mini", H=2048, I=512, E=256, S=512, **_sigmoid(8, 2.5, (8, 4))),
        Shape(name="dots1", H=4096, I=1408, E=128, S=2816, **_sigmoid(6, 2.5)),
        Shape(name="hunyuan_a13b", H=4096, I=3072, E=64, S=3072, **_softmax(8)),
        Shape(name="llama4_scout", H=5120, I=8192, E=16, S=8192, **_llama4()),
    )
}


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, one with _tpN behind it for a rank of N, or H/I/E/K/S in numbers.

    Numbers get DeepSeek-V3's router without groups.

    Raises:
        argparse.ArgumentTypeError: it is neither; the text says what is accepted.
    """
    if re.fullmatch(r"\d+(/\d+){4}", text):
        H, I, E, K, S = map(int, text.split("/"))
        if not (min(H, I, E, K) >= 1 and min(E, 32) >= K and E <= 1024):
            raise argparse.ArgumentTypeError(
                f"expected H/I/E/K/S with H and I above 0, E in 1..1024, K in 1..min(E, 32), got {text!r}"
            )
        return Shape(name=text, H=H, I=I, E=E, S=S, **_sigmoid(K))
    match = re.fullmatch(r"(\w+?)(?:_tp(\d+))?", text)
    if match is None or match[1] not in SHAPES:
        accepted = f"H/I/E/K/S in numbers, {', '.join(SHAPES)}, or a name with _tpN for one of N ranks"
        raise argparse.ArgumentTypeError(f"expected {accepted}, got {text!r}")
    shape, ranks = SHAPES[match[1]], int(match[2] or 1)
    try:
        return shape.split(ranks) if match[2] else shape
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number of ranks that divides the widths ({error}), got {text!r}"
        ) from None


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Separated by commas, each once, in the order given."""
    return tuple({shape.name: shape for shape in map(parse_shape, text.split(","))}.values())


def gpu_refuses(shape: Shape) -> str | None:
    """Why the kernels do not take a shape; None where they do."""
    odd = [f"{letter}={getattr(shape, letter)}" for letter in "HIS" if getattr(shape, letter) % 16]
    return f"expected multiples of 16 on a GPU, got {odd[0]}" if odd else None


def fused_refuses(shape: Shape) -> str | None:
    """Why a shape has no schedule "fused"; None where it has."""
    if shape.S % shape.I:
        return f"fused needs S a multiple of I, and {shape.name} has {shape.S} and {shape.I}"
    if shape.S and shape.config.routed_format != shape.config.shared_format:
        return f"fused needs routed and shared experts in one format, and got {formats_of(shape)}"
    return None


def formats_of(shape: Shape) -> Formats:
    """Of what there is: without a shared expert that one has none."""
    return Formats(shape.config.routed_format, shape.config.shared_format if shape.S else None)


def quantised(shape: Shape, formats: Formats) -> Shape:
    """With its experts and its shared expert in these formats, which the name has too.

    Raises:
        ValueError: only the shared expert is to be quantised, and there is none.
    """
    if formats.routed is None and not shape.S:
        raise ValueError(f"expected a format of the routed experts, since {shape.name} has no others, got {formats}")
    config = dataclasses.replace(shape.config, routed_format=formats.routed, shared_format=formats.shared)
    return dataclasses.replace(shape, name=f"{shape.name} {formats}", config=config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a machine does at best.

    Attributes:
        bandwidth: bytes read a second.
        flops: floating-point operations a second of a large matrix product, by name of dtype.
        cache: bytes of the cache that all cores share; infinite where it is not known.
        launch_us: of one more kernel in a CUDA graph; 0 without a GPU.
    """

    bandwidth: float
    flops: dict[str, float]
    cache: float = math.inf
    launch_us: float = 0.0


def floor_us(
    shape: Shape, T: int, hit: float, itemsize: int, bandwidth: float, flops: float, cache: float,
    *, routed_bytes: float | None = None, shared_bytes: float | None = None,
) -> float:  # fmt: skip
    """Microseconds below which no layer can be: bytes that it must move, or its arithmetic, at the machine's ceilings.

    Bytes: weights of the experts that are hit, shared expert and router, input and output, and from ROWS_COUNT_FROM
    tokens on the rows of the experts, written and read, past what the cache holds.

    Args:
        hit: distinct experts that the T tokens chose; may be a mean.
        routed_bytes, shared_bytes: of a weight of the routed experts, and of the shared one, where it is not itemsize.
    """
    H, I, E, K, S = shape.H, shape.I, shape.E, shape.K, shape.S
    moved = 3 * H * (hit * I * (routed_bytes or itemsize) + S * (shared_bytes or itemsize))
    moved += itemsize * (E * H + 2 * T * H)
    if T >= ROWS_COUNT_FROM:
        moved += 2 * max(0.0, itemsize * T * K * H - cache)
    arithmetic = 6 * T * H * (K * I + S) + 2 * T * H * E
    return 1e6 * max(moved / bandwidth, arithmetic / flops)


def memory_bound(shape: Shape, T: int, itemsize: int) -> int:
    """Bytes beyond weights and output that a call may take at its peak: the rows of its two products, 10 %, 2 MiB."""
    rows = T * shape.K * (shape.I + shape.H) + T * (shape.S + (shape.H if shape.S else 0))
    return int(1.1 * rows * itemsize) + 2 * 2**20
