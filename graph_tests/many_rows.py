"""Rows of experts at every height, and layers with such rows: what the tests of persistent products share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from layers import make_layer
from torch import Tensor

from dsmoe_op import MoEConfig, kernels, reference, tuning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEIGHTS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 0, 0, 255, 256, 257, 300, 1000, 0)
"""Rows of each expert."""


def ids_of(heights: Sequence[int], without: int) -> Tensor:
    """[T, 1] in random order: so many slots of each expert, and of none."""
    ids = torch.cat([torch.full((rows,), e) for e, rows in enumerate(heights)] + [torch.full((without,), -1)])
    return ids[torch.randperm(len(ids))].to("cuda", torch.int32)[:, None]


def activated(
    sums: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    config: MoEConfig,
    clamp: float | None,
    order: str,
    dtype: torch.dtype,
    off: float = 2.0**-11,
) -> tuple[Tensor, Tensor]:
    """h in float64 of sums of gate and up, and how far it may be off; sizes: the sums of the products' magnitudes.

    off: of a sum, relative to these. Products of fp8 are added up with fewer bits than a float32 has.
    """
    if bias is not None:
        sums = sums + bias.double()
    h = reference.activation(sums, config, clamp=clamp, order=order)
    if order == "interleaved":
        sums, sizes = (torch.cat([t[..., 0::2], t[..., 1::2]], -1) for t in (sums, sizes))
    gate, up = sums.abs().chunk(2, -1)
    off_gate, off_up = (sizes * off).chunk(2, -1)
    if order == "up_gate":
        gate, up, off_gate, off_up = up, gate, off_up, off_gate
    # No activation is steeper than 1.2, or larger than its gate; swiglu_oai multiplies by up + 1.
    bound = 1.2 * (up + 1) * off_gate + gate * off_up + 1.2 * off_gate * off_up + 1e-5 * (1 + gate) * (1 + up)
    return h, bound + 1.01 * {BF16: 2.0**-8, FP16: 2.0**-11}[dtype] * h.abs()


def may_round_otherwise(coded: kernels.Coded, bias: Tensor | None, config: MoEConfig | None) -> bool:
    """Whether the ordinary product may have other roundings than the persistent one: of GEMM 1, where a scale of whole
    sums meets an addition.

    The compiler makes one fma, so one rounding, of that product and the addition, but not where the product first goes
    through shared memory, as in an ordinary tile whose gate and up rows are different threads'. Such scales are those
    of rows and of a tensor. What may be added is a bias, or swiglu_oai's 1, unless a clamp lies between. gelu_tanh adds
    to gate too, but a later product, which is what becomes an fma with it, in every kernel.

    Args:
        config: of GEMM 1. None: GEMM 2, whose sums stay where they are, so that all kernels have the fma.
    """
    assert coded.form is not None
    scales_sums = coded.form[0] == "fp8_channel" or coded.global_scale is not None
    if config is None or not scales_sums:
        return False
    return bias is not None or (config.activation == "swiglu_oai" and config.clamp_routed is None)


class Routed:
    """Tokens of two slots each, in the order of their experts, in blocks of block_m rows."""

    what: str
    """A product's random choices, for what its tests say when they fail."""

    def __init__(self, heights: Sequence[int], without: int, block_m: int) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.full(shape, 12345, dtype=torch.int32, device="cuda")

        ids = ids_of(heights, without + (sum(heights) + without) % 2).view(-1, 2)
        self.T, self.N, self.E = T, N, E = len(ids), ids.numel(), len(heights)
        self.rows = kernels.Rows(
            ints(1), ints(N), ints(T, 2), ints(3, kernels.num_blocks(N, E, block_m)), block_m, 0,
            ints(kernels.num_counters(N, E)), ints(2), ints(1),
        )  # fmt: skip
        kernels.zero_counters(self.rows, num_experts=E)
        kernels.order_rows(ids, None, None, None, num_experts=E, num_zero_experts=0, rows=self.rows)
        assert self.rows.taken.tolist() == [0, 0]
        self.end, self.ends = sum(heights), [0, *itertools.accumulate(heights)]
        self.empty = [e for e, rows in enumerate(heights) if not rows]
        slots = ids.flatten().where(ids.flatten() >= 0, E).argsort(stable=True)
        self.tokens = slots[: self.end] // 2

    def blocks(self) -> int:
        """Of experts' rows."""
        return int((self.rows.blocks_3B[0] >= 0).sum())

    def check_bits(
        self, product: Callable[..., Tensor], out: Tensor, coded: kernels.Coded, bias: Tensor | None,
        config: MoEConfig | None = None, *, ordinary: bool = True,
    ) -> None:  # fmt: skip
        """Further runs have the bits of `out`, and so has the ordinary product, where all kernels round alike.

        product: takes `persistent`. coded, bias, config: as in `may_round_otherwise`.
        ordinary: whether this product adds up in the order of the ordinary one.
        """
        if ordinary and not may_round_otherwise(coded, bias, config):
            differ = int((product(persistent=False) != out).sum())
            assert not differ, f"{differ} of {out.numel()} numbers are not the ordinary product's: {self.what}"
        for _ in range(3):
            differ = int((product() != out).sum())
            assert not differ, f"{differ} of {out.numel()} numbers are not those of the run before: {self.what}"


def prefill(*, dtype: torch.dtype = BF16, H: int = 400, I: int = 208, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """A layer with an expert of each of the heights."""
    ids = ids_of(HEIGHTS, 77)
    T, E = len(ids), len(HEIGHTS)
    x, args = make_layer(
        T, way="topk_ids", config=MoEConfig(top_k=1), dtype=dtype, device="cuda", H=H, E=E, I=I, S=2 * I, **options
    )
    args["topk_ids"] = ids
    assert tuning.layer_tiles("16bit", T, H, E, 1, 2 * I).gemm2.persistent
    return x, args


def worst_row(out: Tensor, expected: Tensor) -> float:
    out, expected = out.double(), expected.double()
    return float(((out - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)).max())
