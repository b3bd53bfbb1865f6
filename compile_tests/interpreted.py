"""What the interpreter's cases share: inputs, comparisons, and the rows that the products work through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsmoe_op import kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.kernels.launch import INTERPRET
from dsmoe_op.kernels.order import num_zeros
from dsmoe_op.tuning import Tile

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
ROUNDING = {BF16: 2.0**-7, FP16: 2.0**-11, FP32: 2.0**-20}  # of one result; float32 leaves room for its sum
GARBAGE = 12345  # what a kernel must not leave, or must not read

assert INTERPRET


@pytest.fixture
def rng() -> torch.Generator:
    """Seeded for each test by conftest.py."""
    return torch.default_generator


def randn(rng: torch.Generator, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def spread(rng: torch.Generator, T: int, E: int, low: float, high: float) -> Tensor:
    """Logits [T, E] in random order, no two of a row closer than about (high - low) / 2E."""
    grid = torch.stack([torch.randperm(E, generator=rng) for _ in range(T)]) + torch.rand(T, E, generator=rng) / 2
    return low + (high - low) / E * grid


def close(
    got: Tensor, want: Tensor, dtype: torch.dtype | None = None, slack: float = 2.0, sums: Tensor | None = None
) -> None:
    """Within `slack` roundings to the dtype, and of float32 sums of the size of the largest value.

    Args:
        sums: the float32 sums that `want` is made of, where they may be larger than it: a clamp may cut off one of two
            factors and leave the error of the other.
    """
    dtype = dtype or got.dtype
    eps = slack * ROUNDING[dtype]
    largest = max((t.abs().max().item() for t in (want, sums) if t is not None and t.numel()), default=0.0)
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # roundings are no smaller
    atol = slack * ROUNDING[FP32] * max(1e-30, largest) + subnormal
    torch.testing.assert_close(got.to(FP64), want.to(FP64), rtol=eps, atol=atol)


def padded_rows(x: Tensor) -> Tensor:
    """The same values behind a row stride larger than the row."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), float(GARBAGE), dtype=x.dtype)
    wide[:, 8 : 8 + x.shape[1]] = x
    return wide[:, 8 : 8 + x.shape[1]]


def transposed(w: Tensor) -> Tensor:
    """The same values with the unit stride in the last dim but one."""
    return w.mT.contiguous().mT


def router_logits(x: Tensor, weight: Tensor, **options) -> Tensor:
    """The partial sums of the logits, [P, T, E]."""
    logits = torch.full((kernels.router_splits(x.shape[0], x.dtype, weight), x.shape[0], weight.shape[0]), NAN)
    kernels.router_logits(x, weight, logits, **options)
    return logits


def choose(logits: Tensor, config: MoEConfig, bias=None, num_valid=None, model_dtype=FP32, **options):
    """logits [T, E], or [P, T, E] of partial sums."""
    T = logits.shape[-2]
    ids = torch.full((T, config.top_k), GARBAGE, dtype=torch.int32)
    weights = torch.full((T, config.top_k), NAN)
    kernels.choose(logits, bias, num_valid, ids, weights, config=config, model_dtype=model_dtype, **options)
    return ids, weights


def clear_rows(logits: Tensor, config: MoEConfig, bias: Tensor | None, margin: float = 1e-6) -> Tensor:
    """bool [T]: rows whose choice has no two candidates so close that float32 may swap them.

    A pair about as close as the margin changes places when random multiples of it are added one way or the other.
    """
    nudge = 8 * margin * torch.rand(logits.shape[1], dtype=FP64)
    bias = torch.zeros(logits.shape[1]) if bias is None else bias
    ids = [reference.route(logits.to(FP64), config, correction_bias=bias.to(FP64) + s * nudge)[0] for s in (-1, 1)]
    return (ids[0] == ids[1]).all(1)


def empty_rows(T: int, K: int, E: int, block_m: int, tail: int = 0, arrivals: int = 300) -> kernels.Rows:
    def garbage(*shape: int) -> Tensor:
        return torch.full(shape, GARBAGE, dtype=torch.int32)

    counters = garbage(kernels.num_counters(T * K, E))
    counters[: num_zeros(T * K, E, alone=True)] = 0
    tiles = garbage(3, kernels.num_blocks(T * K, E, block_m))
    order = garbage(1), garbage(T * K), garbage(T, K), tiles, block_m, tail, counters
    return kernels.Rows(*order, garbage(2), garbage(arrivals))


def order_rows(
    ids, weights, expert_map=None, num_valid=None, *, E, Z=0, canonical=True, block_m=16, tail=0, arrivals=300
):
    """The rows, and canonical ids and weights."""
    T, K = ids.shape
    rows = empty_rows(T, K, E, block_m, tail, arrivals)
    out_ids, out_weights = torch.full((T, K), GARBAGE, dtype=torch.int32), torch.full((T, K), NAN)
    kernels.order_rows(
        ids, weights, expert_map, num_valid, num_experts=E, num_zero_experts=Z, rows=rows,
        ids_out_TK=out_ids if canonical else None, weights_out_TK=out_weights if canonical else None,
    )  # fmt: skip
    return rows, out_ids, out_weights


def order_of(ids: Tensor, E: int, tile: Tile) -> kernels.Rows:
    rows, _, _ = order_rows(ids, torch.ones(ids.shape), E=E, block_m=tile.block_m, tail=tile.tail)
    return rows


def tile_id(value: object) -> str | None:
    if not isinstance(value, Tile):
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
    words = [word for word in ("swap", "tma", "persistent") if getattr(value, word)]
    return "-".join(
        [
            "x".join(map(str, value[:3])),
            *words,
            *(f"{name}{getattr(value, name)}" for name in ("least_m", "tail") if getattr(value, name)),
        ]
    )


def experts_of(rows: kernels.Rows, E: int) -> list[slice]:
    """The rows of each expert, from the blocks."""
    found = [slice(0, 0)] * E
    for expert, first, end in rows.blocks_3B.t().tolist():
        if expert >= 0:
            found[expert] = slice(found[expert].start if found[expert].stop else first, end)
    return found


def gemm1_oracle(x, w13, bias, config, rows: kernels.Rows, weights=None):
    """float64 [rows, I], and [rows, 2I] of sums before the activation."""
    slots = rows.sorted_slot_N[: rows.num_rows].long()
    x_rows = x[slots // config.top_k]
    if weights is not None:
        x_rows = (x_rows.float() * weights.flatten()[slots, None]).to(x.dtype)
    h = torch.zeros(len(slots), w13.shape[1], dtype=FP64)
    for expert, its in enumerate(experts_of(rows, len(w13))):
        h[its] = x_rows[its].to(FP64) @ w13[expert].to(FP64).T + (0 if bias is None else bias[expert].to(FP64))
    return reference.activation(h, config, clamp=config.clamp_routed, order=config.w13_order), h


def some_ids(rng, T: int, K: int, E: int) -> Tensor:
    """Some experts empty, one crowded, some slots without one."""
    ids = torch.randint(-1, E, (T, K), generator=rng, dtype=torch.int32)
    ids[ids == 1] = 2
    ids[T // 2 :, 0] = 3
    return ids
