"""What the kernels of the products promise, run in Triton's interpreter: `test_kernels_interpreter.py` does it.

Oracles are `dsmoe_op.reference` in float64 and plain torch. The interpreter computes no bf16 products (float32 ones
here) and truncates where it rounds to bf16; both are tested on a GPU.
"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from interpreted import (
    BF16,
    FP16,
    FP32,
    FP64,
    GARBAGE,
    INF,
    NAN,
    choose,
    clear_rows,
    close,
    empty_rows,
    experts_of,
    gemm1_oracle,
    order_of,
    padded_rows,
    randn,
    rng,
    router_logits,
    some_ids,
    tile_id,
    transposed,
)
from layers import LAUNCHERS
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import dsmoe_op.kernels.gemm as gemm_module
import dsmoe_op.kernels.grouped as grouped_module
from dsmoe_op import kernels, reference
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import (
    Tile,
    gemm_kind,
    layer_tiles,
    layer_variants,
)

__all__ = ["rng"]


def tile_of(dtype: torch.dtype, T: int, H: int, E: int, K: int, S: int, part: str) -> Tile:
    """The one that a layer of these sizes takes; `part` is a field of LayerTiles."""
    return getattr(layer_tiles(gemm_kind(dtype, False), T, H, E, K, S), part)


def every_tile(gemm: str) -> list[tuple[torch.dtype, Tile]]:
    """All that can be chosen for gemm1 or gemm2, routed or shared, and with the copy engine where dtypes allow it."""
    found: dict[tuple[torch.dtype, Tile], None] = {}
    for kind in ("16bit", "fp32", "tf32"):
        for v in layer_variants(kind):
            for tile in (getattr(v, gemm), getattr(v, f"shared_{gemm}"), *([TALL[gemm]] if kind == "16bit" else [])):
                for tma in (True, False) if kind == "16bit" else (False,):
                    found[FP16 if kind == "16bit" else FP32, tile._replace(tma=tma)] = None
    return list(found)


SMALL = Tile(16, 32, 128, 4, 4, swap=True)
LARGE = Tile(64, 128, 64, 4, 4, tma=True, least_m=16)
TALL = {
    "gemm1": Tile(128, 128, 64, 8, 4, tma=True, least_m=16, tail=64),
    "gemm2": Tile(128, 256, 64, 8, 3, tma=True, least_m=16, tail=64),
}
"""What `tune` may choose beside."""


@pytest.fixture
def descriptors(monkeypatch) -> list[int]:
    """How many weights each launch of a product fetches by the copy engine."""
    found: list[int] = []
    launch = grouped_module.launch

    def counted(kernel, grid, args, meta, **options):
        found.append(sum(isinstance(arg, TensorDescriptor) for arg in args))
        launch(kernel, grid, args, meta, **options)

    monkeypatch.setattr(grouped_module, "launch", counted)
    return found


HEIGHTS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 192, 193)


def ids_of_heights(rng: torch.Generator, without: int = 7) -> Tensor:
    """[T, 1]: expert 2n+1 has HEIGHTS[n] rows and the others none, in random order, beside `without` slots of none."""
    ids = torch.cat([torch.full((rows,), 2 * n + 1) for n, rows in enumerate(HEIGHTS)] + [torch.full((without,), -1)])
    return ids[torch.randperm(len(ids), generator=rng)].to(torch.int32)[:, None]


def check_gemm1(
    rng, config, *, tile=None, dtype=FP32, T=9, H=48, I=80, E=5, bias=None, form=lambda w: w, ids=None, slack=2.0
):
    """bias: its dtype, or None."""
    K, width = config.top_k, 2 if config.gated else 1
    ids = some_ids(rng, T, K, E) if ids is None else ids
    T = len(ids)
    tile = tile or tile_of(dtype, T, H, E, K, 0, "gemm1")
    x, w13 = randn(rng, T, H, dtype=dtype), randn(rng, E, width * I, H, dtype=dtype, scale=0.3)
    w13_bias = randn(rng, E, width * I, dtype=bias) if bias else None
    weights = randn(rng, T, K) if config.apply_router_weight_on_input else None
    rows = order_of(ids, E, tile)
    h = torch.full((T * K, I), GARBAGE, dtype=dtype)
    kernels.gemm1(
        padded_rows(x), config=config, tile=tile, w13=form(w13), w13_bias=w13_bias, blocks=rows.blocks_3B,
        sorted_slot_N=rows.sorted_slot_N, topk_weights_TK=weights, h_NI=h,
    )  # fmt: skip
    end = int(rows.num_rows)
    want, sums = gemm1_oracle(x, w13, w13_bias, config, rows, weights)
    close(h[:end], want, slack=slack, sums=sums)
    assert (h[end:] == torch.tensor(GARBAGE, dtype=dtype)).all()


# H and I below, at, and beyond multiples of every tile's sizes.
SIZES = [(1, 16, 48), (37, 144, 80), (3, 128, 256)]


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm1"), ids=tile_id)
def test_gemm1_is_right_in_every_tile(rng, dtype, tile):
    for T, H, I in SIZES:
        check_gemm1(rng, MoEConfig(top_k=3), tile=tile, dtype=dtype, T=T, H=H, I=I)


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm1"), ids=tile_id)
def test_gemm1_is_right_at_every_height_of_an_experts_rows(rng, dtype, tile):
    check_gemm1(
        rng, MoEConfig(top_k=1), tile=tile, dtype=dtype, H=32, I=48, E=2 * len(HEIGHTS), ids=ids_of_heights(rng)
    )


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_gemm1_is_right_for_every_order_at_every_size(rng, descriptors, tile, order, activation):
    config = MoEConfig(top_k=3, w13_order=order, activation=activation)
    for T, H, I in SIZES:
        for bias in (FP16, FP32):
            check_gemm1(rng, config, tile=tile, dtype=FP16, T=T, H=H, I=I, bias=bias)
    assert set(descriptors) == {int(tile.tma)}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize(("clamp", "after"), [(None, False), (0.7, False), (0.7, True)])
def test_gemm1_is_the_reference_for_every_activation_order_and_clamp(rng, activation, order, clamp, after):
    config = MoEConfig(
        top_k=2, activation=activation, w13_order=order, clamp_routed=clamp, clamp_after_activation=after
    )  # fmt: skip
    for tile in (SMALL, LARGE):
        check_gemm1(rng, config, tile=tile, bias=FP32, slack=4)
        check_gemm1(rng, config, tile=tile, form=transposed, slack=4)


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
def test_gemm1_puts_the_router_weight_on_the_rounded_input(rng, tile):
    config = MoEConfig(top_k=2, apply_router_weight_on_input=True)
    check_gemm1(rng, config, tile=tile, dtype=FP16)
    check_gemm1(rng, config, tile=tile, dtype=FP16, T=70, H=128, I=32)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gemm1_rounds_once(rng, dtype):
    check_gemm1(rng, MoEConfig(top_k=2), dtype=dtype, slack=1.01)


def off(w: Tensor) -> Tensor:
    """The same contiguous values, at an address that is no multiple of 16 bytes."""
    return torch.cat([w.flatten()[:1], w.flatten()])[1:].view(w.shape)


def longer_rows(by: int):
    """The same values in rows longer by that many."""
    return lambda w: torch.nn.functional.pad(w, (0, by), value=float(GARBAGE))[..., : w.shape[-1]]


def more_rows(w: Tensor) -> Tensor:
    """The same values, experts farther apart than their rows."""
    return torch.nn.functional.pad(w, (0, 0, 0, 3), value=float(GARBAGE))[:, : w.shape[1]]


@pytest.mark.parametrize(
    ("form", "copied"),
    [
        (lambda w: w, (1, 1)),
        (longer_rows(8), (1, 1)),
        (longer_rows(3), (0, 0)),
        (off, (0, 0)),
        (transposed, (0, 0)),
        (more_rows, (0, 1)),  # gate rows and up rows are no planes of one array
    ],
    ids=["contiguous", "longer_rows", "odd_rows", "misaligned", "transposed", "more_rows"],
)
def test_weights_come_by_the_copy_engine_where_it_can_fetch_them_and_else_by_pointers(rng, descriptors, form, copied):
    """(of gate rows before up rows, of others)"""
    for order in ("gate_up", "up_gate", "interleaved"):
        config = MoEConfig(top_k=2, w13_order=order)
        check_gemm1(rng, config, tile=LARGE, dtype=FP16, T=40, H=80, I=48, form=form)
        assert descriptors.pop() == copied[order == "interleaved"]
    check_gemm1(rng, MoEConfig(top_k=2, activation="relu2"), tile=LARGE, dtype=FP16, form=form)
    assert descriptors.pop() == copied[1]
    check_gemm2(rng, tile=LARGE, dtype=FP16, T=40, H=80, I=48, form=form)
    assert descriptors.pop() == copied[1]
    if form is not more_rows:
        check_shared(rng, LARGE, LARGE, dtype=FP16, T=40, H=80, S=48, form=form)
        assert descriptors == [copied[0], copied[1]]


def test_experts_that_are_one_and_the_same_come_by_pointers(rng, descriptors):
    x, w13 = randn(rng, 5, 32, dtype=FP16), randn(rng, 1, 2 * 48, 32, dtype=FP16).expand(4, -1, -1)
    rows, h = order_of(some_ids(rng, 5, 2, 4), 4, LARGE), torch.full((10, 48), NAN, dtype=FP16)
    config = MoEConfig(top_k=2)
    kernels.gemm1(
        x, config=config, tile=LARGE, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N, h_NI=h
    )
    close(h[: rows.num_rows], gemm1_oracle(x, w13, None, config, rows)[0])
    assert descriptors == [0]


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=tile_id)
def test_gemm_reaches_beyond_2_to_the_31_elements(rng, tile):
    """A weight of 3 experts that lie 1.5e9 elements apart; only the pages that are used take memory."""
    H, I, T, apart = 16, 32, 4, 3 * 2**29
    storage = torch.empty(2 * apart + 2 * I * H, dtype=FP16)
    w13 = storage.as_strided((3, 2 * I, H), (apart, H, 1))
    w13.copy_(randn(rng, 3, 2 * I, H, dtype=FP16))
    x = randn(rng, T, H, dtype=FP16)
    rows = order_of(torch.tensor([[2], [0], [2], [1]], dtype=torch.int32), 3, tile)
    for order in ("gate_up", "interleaved"):  # the latter by the copy engine
        h, config = torch.zeros(T, I, dtype=FP16), MoEConfig(top_k=1, w13_order=order)
        kernels.gemm1(
            x, config=config, tile=tile, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N, h_NI=h
        )
        close(h, gemm1_oracle(x, w13, None, config, rows)[0])


def gemm2_oracle(h, w2, bias, rows):
    """float64 [rows, H]."""
    y = torch.zeros(int(rows.num_rows), w2.shape[1], dtype=FP64)
    for expert, its in enumerate(experts_of(rows, len(w2))):
        y[its] = h[its].to(FP64) @ w2[expert].to(FP64).T + (0 if bias is None else bias[expert].to(FP64))
    return y


def check_gemm2(
    rng, *, tile=None, dtype=FP32, T=9, K=2, H=48, I=80, E=5, bias=None, form=lambda w: w, zero_tail=False, ids=None
):
    """bias: its dtype, or None."""
    ids = some_ids(rng, T, K, E) if ids is None else ids
    T, K = ids.shape
    tile = tile or tile_of(dtype, T, H, E, K, 0, "gemm2")
    h, w2 = randn(rng, T * K, I, dtype=dtype), randn(rng, E, H, I, dtype=dtype, scale=0.3)
    w2_bias = randn(rng, E, H, dtype=bias) if bias else None
    rows = order_of(ids, E, tile)
    end = int(rows.num_rows)
    h[end:] = NAN
    y = torch.full((T * K, H), GARBAGE, dtype=dtype)
    kernels.gemm2(
        config=MoEConfig(top_k=K), tile=tile, w2=form(w2), w2_bias=w2_bias, blocks=rows.blocks_3B,
        num_rows=rows.num_rows, taken=rows.taken, h_NI=h, y_NH=y, zero_tail=zero_tail,
    )  # fmt: skip
    close(y[:end], gemm2_oracle(h, w2, w2_bias, rows))
    assert (y[end:] == torch.tensor(0 if zero_tail else GARBAGE, dtype=dtype)).all()


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm2"), ids=tile_id)
def test_gemm2_is_right_in_every_tile(rng, dtype, tile):
    for T, H, I in SIZES:
        check_gemm2(rng, tile=tile, dtype=dtype, T=T, H=H, I=I, bias=dtype)
        check_gemm2(rng, tile=tile, dtype=dtype, T=T, H=H, I=I, bias=FP32, form=transposed, zero_tail=True)


@pytest.mark.parametrize(("dtype", "tile"), every_tile("gemm2"), ids=tile_id)
def test_gemm2_is_right_at_every_height_of_an_experts_rows(rng, dtype, tile):
    ids = ids_of_heights(rng, without=150)
    check_gemm2(rng, tile=tile, dtype=dtype, H=48, I=32, E=2 * len(HEIGHTS), ids=ids, zero_tail=True)


@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=tile_id)
def test_gemm2_zeroes_the_whole_tail(rng, tile):
    T, K, E = 91, 2, 5
    few = torch.full((T, K), -1, dtype=torch.int32)
    few[17, 1] = 4
    many = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
    for ids in (few, torch.full_like(few, -1), many, many.masked_fill(many == 0, -1)):
        check_gemm2(rng, tile=tile, E=E, zero_tail=True, ids=ids)
    # Every expert and the tail with one row in its last block: as many blocks as there can be.
    ids = torch.tensor([0] * (tile.block_m + 1) + [1, 2, 3, 4, -1], dtype=torch.int32).view(-1, 2)
    check_gemm2(rng, tile=tile, E=5, zero_tail=True, ids=ids)


@pytest.mark.parametrize("H", [48, 1040, 2048])
def test_the_launch_beside_a_persistent_gemm2_zeroes_the_whole_tail(rng, H):
    N = 50
    for end in (0, 1, 16, 17, 49, 50):
        y = randn(rng, N, H, dtype=FP16)
        want = y.clone()
        want[end:] = 0
        gemm_module._zero_rows_after(torch.tensor([end], dtype=torch.int32), y, warmup=False)
        assert torch.equal(y, want)


def check_shared(rng, tile1, tile2, *, dtype, T, H, S, form=lambda w: w, config=None, valid=None) -> None:
    """Both products, with a gate, and valid rows before padding."""
    config = config or MoEConfig(top_k=2, w13_order="up_gate", clamp_shared=0.9, clamp_routed=0.1)
    x, width = randn(rng, T, H, dtype=dtype), 2 if config.gated else 1
    w13, w2 = randn(rng, width * S, H, dtype=dtype, scale=0.3), randn(rng, H, S, dtype=dtype, scale=0.3)
    gate, end = torch.rand(T, generator=rng), T if valid is None else valid
    num_valid = None if valid is None else torch.tensor([valid], dtype=torch.int32)
    h, shared = torch.full((T, S), NAN, dtype=dtype), torch.full((T, H), NAN, dtype=dtype)
    x[end:] = NAN
    kernels.gemm1(
        padded_rows(x), config=config, tile=tile1, shared_w13=form(w13), h_shared_TS=h, num_valid_tokens=num_valid
    )
    sums = x[:end].to(FP64) @ w13.to(FP64).T
    close(h[:end], reference.activation(sums, config, clamp=config.clamp_shared), sums=sums)
    kernels.gemm2(
        config=config, tile=tile2, shared_w2=form(w2), h_shared_TS=h, gate_T=gate, shared_TH=shared,
        num_valid_tokens=num_valid,
    )  # fmt: skip
    close(shared[:end], (gate.to(FP64)[:, None] * (h.to(FP64) @ w2.to(FP64).T))[:end])
    assert (h[end:] == 0).all()
    assert (shared[end:] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("form", [lambda w: w, transposed])
def test_shared_expert_is_the_reference(rng, dtype, T, form):
    H, S = 48, 80
    tiles = layer_tiles(gemm_kind(dtype, False), T, H, 5, 2, S)
    for valid in (None, max(1, T - 2)):
        check_shared(rng, tiles.shared_gemm1, tiles.shared_gemm2, dtype=dtype, T=T, H=H, S=S, form=form, valid=valid)


def pairs_of_tiles() -> list[tuple[torch.dtype, Tile, Tile]]:
    """Each of `every_tile` at least once."""
    return [
        (dtype, *pair)
        for dtype in (FP16, FP32)
        for pair in zip_cycled(*([t for d, t in every_tile(gemm) if d == dtype] for gemm in ("gemm1", "gemm2")))
    ]


def zip_cycled(a: list[Tile], b: list[Tile]) -> list[tuple[Tile, Tile]]:
    return [(a[n % len(a)], b[n % len(b)]) for n in range(max(len(a), len(b)))]


@pytest.mark.parametrize(("dtype", "tile1", "tile2"), pairs_of_tiles(), ids=tile_id)
def test_shared_expert_is_right_in_every_tile(rng, dtype, tile1, tile2):
    for T, H, S in SIZES:
        check_shared(rng, tile1, tile2, dtype=dtype, T=T, H=H, S=S)
    for T in (16, 33, 65, 129, 200):
        valid = T - T // 3
        check_shared(rng, tile1, tile2, dtype=dtype, T=T, H=32, S=48, valid=valid, config=MoEConfig(top_k=1))
    check_shared(rng, tile1, tile2, dtype=dtype, T=33, H=32, S=48, config=MoEConfig(top_k=1, activation="relu2"))


@pytest.mark.parametrize("tile", [SMALL, LARGE, LARGE._replace(tma=False)], ids=tile_id)
def test_shared_expert_is_zero_on_padding_whatever_lies_there(rng, tile):
    x, w13 = randn(rng, 4, 16), randn(rng, 2 * 32, 16)
    x[2:], w13[3] = NAN, INF
    h = torch.full((4, 32), NAN)
    valid = torch.tensor([2], dtype=torch.int32)
    kernels.gemm1(x, config=MoEConfig(top_k=1), tile=tile, shared_w13=w13, h_shared_TS=h, num_valid_tokens=valid)
    assert (h[2:] == 0).all()
    gate = torch.full((4,), NAN)
    shared = torch.full((4, 16), NAN)
    kernels.gemm2(
        config=MoEConfig(top_k=1), tile=tile, shared_w2=randn(rng, 16, 32), h_shared_TS=h, gate_T=gate,
        shared_TH=shared, num_valid_tokens=valid,
    )  # fmt: skip
    assert (shared[2:] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "tile1", "tile2", "order"),
    [(*pair, ("up_gate", "interleaved")[n // 2 % 2]) for n, pair in enumerate(pairs_of_tiles())],  # tma alternates
    ids=tile_id,
)
def test_one_launch_for_routed_and_shared_equals_two(rng, dtype, tile1, tile2, order):
    """And so is right, as the two are."""
    H, I, S, E, K = 80, 48, 96, 5, 2
    config = MoEConfig(top_k=K, clamp_routed=0.5, w13_order=order)
    w13, w2 = randn(rng, E, 2 * I, H, dtype=dtype), randn(rng, E, H, I, dtype=dtype)
    shared_w13, shared_w2 = randn(rng, 2 * S, H, dtype=dtype), randn(rng, H, S, dtype=dtype)
    for T in (1, 75):
        x, gate, ids = randn(rng, T, H, dtype=dtype), torch.rand(T, generator=rng), some_ids(rng, T, K, E)
        rows, rows2 = (order_of(ids, E, tile) for tile in (tile1, tile2))
        results = []
        for fused in (True, False):
            h, h_shared, y, shared = (torch.full(s, NAN, dtype=dtype) for s in ((T * K, I), (T, S), (T * K, H), (T, H)))
            routed = {"w13": w13, "blocks": rows.blocks_3B, "sorted_slot_N": rows.sorted_slot_N, "h_NI": h}
            dense = {"shared_w13": shared_w13, "h_shared_TS": h_shared}
            for part in [routed | dense] if fused else [routed, dense]:
                kernels.gemm1(x, config=config, tile=tile1, **part)
            routed = {"w2": w2, "blocks": rows2.blocks_3B, "h_NI": h, "y_NH": y, "zero_tail": True}
            dense = {"shared_w2": shared_w2, "h_shared_TS": h_shared, "gate_T": gate, "shared_TH": shared}
            for part in [routed | dense] if fused else [routed, dense]:
                kernels.gemm2(config=config, tile=tile2, **part)
            results.append((h[: rows.num_rows], h_shared, y, shared))
        for a, b in zip(*results, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


@pytest.mark.parametrize(("x_dtype", "gate_dtype"), [(BF16, BF16), (FP16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("H", [16, 1040])
def test_gate_is_the_sigmoid_of_the_float32_product(rng, x_dtype, gate_dtype, H):
    x, weight = randn(rng, 5, H, dtype=x_dtype), randn(rng, 1, H, dtype=gate_dtype, scale=0.2)
    gate = torch.full((5,), NAN)
    kernels.shared_gate(padded_rows(x), weight, gate)
    torch.testing.assert_close(gate.double(), torch.sigmoid(x.double() @ weight[0].double()), rtol=1e-5, atol=1e-6)


# The end


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_on": "output", "routed_scaling_factor": 2.5},
        {"combine": "average"},
        {
            "apply_router_weight_on_input": True,
            "scale_on": "output",
            "routed_scaling_factor": 0.5,
            "combine": "average",
        },
    ],
)
def test_finalize_sums_a_tokens_rows_and_rounds_once(rng, dtype, with_shared, options):
    T, H, K, E = 7, 1040, 3, 4
    config = MoEConfig(top_k=K, **options)
    rows = order_of(some_ids(rng, T, K, E), E, SMALL)
    row_of = rows.row_of_TK
    y, weights, shared = randn(rng, T * K, H, dtype=dtype), randn(rng, T, K), randn(rng, T, H, dtype=dtype)
    y[rows.num_rows :] = NAN
    weights[row_of < 0] = NAN  # nothing of a slot without a row is used
    want = torch.zeros(T, H, dtype=FP64)
    for t, k in itertools.product(range(T), range(K)):
        if row_of[t, k] >= 0:
            w = 1.0 if config.apply_router_weight_on_input else weights[t, k].double()
            want[t] += w * y[row_of[t, k]].double()
    want = want * config.scale_at_end + (shared.double() if with_shared else 0)
    want = want * (0.5 if config.combine == "average" else 1.0)
    out = torch.full((T, H), NAN, dtype=dtype)
    ids = torch.zeros(T, K, dtype=torch.int32)
    kernels.finalize(y, ids, weights, row_of, shared if with_shared else None, None, out, config=config)
    close(out, want, slack=1.01)


def test_finalize_adds_zero_experts_and_nothing_for_ids_without_one(rng):
    config = MoEConfig(top_k=3, num_zero_experts=2, scale_on="output", routed_scaling_factor=3.0)
    x, weights = randn(rng, 2, 48), randn(rng, 2, 3)
    ids = torch.tensor([[5, -1, 6], [-1, 0, -1]], dtype=torch.int32)
    row_of = torch.tensor([[-1, -1, -1], [-1, 0, -1]], dtype=torch.int32)
    y = torch.full((6, 48), NAN)
    y[0] = randn(rng, 48)
    out = torch.full((2, 48), NAN)
    kernels.finalize(y, ids, weights, row_of, None, padded_rows(x), out, config=config)
    parts = 3 * weights[0, ::2, None].double() * x[0].double()
    close(out[0], parts.sum(0), sums=parts)
    close(out[1], 3 * weights[1, 1].double() * y[0].double())


# All together


@pytest.mark.parametrize("T", [1, 2, 19])
@pytest.mark.parametrize(
    "options",
    [
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {"score": "softmax", "normalize": "none", "num_zero_experts": 2, "combine": "average", "scale_on": "output"},
        {"weights_from": "topk_sigmoid", "apply_router_weight_on_input": True, "normalize": "none"},
        {"activation": "relu2", "score": "sqrtsoftplus"},
    ],
)
def test_the_kernels_in_a_row_are_the_layer(rng, T, options):
    H, I, S, E, K = 48, 32, 80, 12, 3
    config = MoEConfig(top_k=K, **options)
    Z, width = config.num_zero_experts, 2 if config.gated else 1
    x, router_weight, bias = randn(rng, T, H), randn(rng, E + Z, H, scale=0.3), randn(rng, E + Z)
    w13, w2 = randn(rng, E, width * I, H, scale=0.2), randn(rng, E, H, I, scale=0.2)
    shared_w13, shared_w2 = randn(rng, width * S, H, scale=0.2), randn(rng, H, S, scale=0.2)
    gate_weight, valid = randn(rng, 1, H), torch.tensor([max(1, T - 1)], dtype=torch.int32)

    tiles = layer_tiles("fp32", T, H, E, K, S)
    rows = empty_rows(T, K, E, tiles.gemm1.block_m)
    logits = router_logits(x, router_weight, counters=rows.counters)
    ids, weights = choose(logits, config, bias, valid, rows=rows)
    h, y, h_shared, shared, out = (torch.full(s, NAN) for s in ((T * K, I), (T * K, H), (T, S), (T, H), (T, H)))
    gate = torch.empty(T)
    kernels.shared_gate(x, gate_weight, gate)
    kernels.gemm1(
        x, config=config, tile=tiles.gemm1, w13=w13, blocks=rows.blocks_3B, sorted_slot_N=rows.sorted_slot_N,
        topk_weights_TK=weights, h_NI=h, shared_w13=shared_w13, h_shared_TS=h_shared, num_valid_tokens=valid,
    )  # fmt: skip
    kernels.gemm2(
        config=config, tile=tiles.gemm2, w2=w2, blocks=rows.blocks_3B, h_NI=h, y_NH=y, shared_w2=shared_w2,
        h_shared_TS=h_shared, gate_T=gate, shared_TH=shared, num_valid_tokens=valid,
    )  # fmt: skip
    kernels.finalize(y, ids, weights, rows.row_of_TK, shared, x, out, config=config)
    want = reference.moe(
        x, config=config, w13=w13, w2=w2, router_weight=router_weight, correction_bias=bias, shared_w13=shared_w13,
        shared_w2=shared_w2, shared_gate=gate_weight, num_valid_tokens=valid,
    )  # fmt: skip
    logits = reference.compute_logits(x, router_weight, None, config)
    clear = clear_rows(logits, config, bias, margin=1e-5) | (torch.arange(T) >= valid)
    close(out[clear], want[clear], slack=8)


def test_zero_tokens_launch_nothing(monkeypatch):
    """Every launch goes through one function, which is not called."""

    def refuse(*args, **kwargs):
        raise AssertionError("launched")

    for name in LAUNCHERS:
        monkeypatch.setattr(sys.modules[f"dsmoe_op.kernels.{name}"], "launch", refuse)
    config, E, K, H = MoEConfig(top_k=2), 4, 2, 16
    x, ids, weights = torch.empty(0, H), torch.empty(0, K, dtype=torch.int32), torch.empty(0, K)
    rows = empty_rows(0, K, E, 16)
    kernels.router_logits(x, torch.empty(E, H), torch.empty(1, 0, E))
    kernels.choose(torch.empty(1, 0, E), None, None, ids, weights, config=config, model_dtype=FP32, rows=rows)
    kernels.order_rows(ids, weights, None, None, num_experts=E, num_zero_experts=0, rows=rows)
    for v in layer_variants("16bit"):
        kernels.gemm1(
            x, config=config, tile=v.gemm1, w13=torch.empty(E, 32, H), blocks=rows.blocks_3B,
            sorted_slot_N=rows.sorted_slot_N, h_NI=x, shared_w13=x, h_shared_TS=x,
        )  # fmt: skip
        routed = {"w2": torch.empty(E, H, H), "blocks": rows.blocks_3B, "h_NI": x, "y_NH": x, "zero_tail": True}
        routed |= {"num_rows": rows.num_rows, "taken": rows.taken}
        shared = {"shared_w2": x, "h_shared_TS": x, "shared_TH": x}
        for part in (routed, shared, routed | shared):
            kernels.gemm2(config=config, tile=v.gemm2, **part)
    kernels.experts(
        x, config=config, tiles=layer_variants("16bit")[0][:2], rows=rows, w13=torch.empty(E, 32, H),
        w2=torch.empty(E, H, H), h_NI=x, y_NH=x, topk_ids_TK=ids, topk_weights_TK=weights, out_TH=x,
    )  # fmt: skip
    kernels.quantize_rows(x, x, torch.empty(0, 1))
    kernels.reorder_columns(torch.empty(0, 32), torch.empty(0, 32))
    kernels.shared_gate(x, torch.empty(1, H), torch.empty(0))
    kernels.finalize(x, ids, weights, ids, None, None, x, config=config)
