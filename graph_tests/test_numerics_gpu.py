"""The CUDA path on a GPU against the float64 reference, and against itself bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu import CONFIG, SCHEDULES, SIZES, Block, clear_rows, needs_gpu
from layers import WAYS, error, make_layer

from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, reference

pytestmark = needs_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 1e-2, FP16: 1e-2, FP32: 1e-5}
TOKENS = (1, 2, 7, 12, 64, 65, 300)


@pytest.fixture(params=[BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def layer(request, blocks) -> Block:
    return blocks[request.param]


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_is_the_reference_at_every_size(layer, way) -> None:
    for T in TOKENS:
        x, args = layer.inputs(T, way)
        expected = reference.moe(x, **args)
        for schedule in SCHEDULES:
            assert error(dual_stream_moe(x, **args, schedule=schedule), expected) <= LIMIT[layer.dtype], (T, schedule)


@pytest.mark.parametrize("way", WAYS)
def test_serial_and_both_dual_schedules_give_the_same_bits(layer, way) -> None:
    for T in TOKENS:
        x, args, serial = layer.out(T, way)
        for schedule in ("dual", "dual_shared_main"):
            assert torch.equal(dual_stream_moe(x, **args, schedule=schedule), serial), (T, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_calls_give_the_same_bits(layer, schedule) -> None:
    for T in TOKENS:
        x, args = layer.inputs(T)
        first, second = (dual_stream_moe(x, **args, schedule=schedule) for _ in range(2))
        assert torch.equal(first, second), T


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_unfinalized_and_finalize_give_the_bits_of_the_one_call(block, way, schedule) -> None:
    for T in TOKENS:
        x, args = block.inputs(T, way)
        pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
        whole = dual_stream_moe(x, **args, schedule=schedule)
        assert torch.equal(finalize(pieces, config=args["config"]), whole), T


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_of_y_after_the_last_experts_are_zeros(block, schedule) -> None:
    x, args = block.inputs(300, "topk_ids")
    args["topk_ids"][40:] = -1
    torch.full((1200, SIZES["H"]), float("nan"), dtype=x.dtype, device=x.device)  # the memory that y may get
    y = dual_stream_moe_unfinalized(x, **args, schedule=schedule).y
    assert torch.equal(y[40 * 4 :], torch.zeros_like(y[40 * 4 :]))


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_give_a_fresh_empty_tensor(block, way) -> None:
    x, args = block.inputs(0, way)
    for schedule in SCHEDULES:
        out = dual_stream_moe(x, **args, schedule=schedule)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert out is not x
        pieces = dual_stream_moe_unfinalized(x, **args, schedule=schedule)
        assert finalize(pieces, config=args["config"]).shape == x.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bad_row_leaves_every_other_row_as_it_was(block, schedule, bad) -> None:
    x, args = block.inputs(65)
    clean = dual_stream_moe(x, **args, schedule=schedule)
    x[3] = bad
    out = dual_stream_moe(x, **args, schedule=schedule)
    others = torch.arange(65, device=x.device) != 3
    assert torch.equal(out[others], clean[others])


def test_all_tokens_on_one_expert(block) -> None:
    x, args = block.inputs(300, "topk_ids")
    args["topk_ids"] = torch.full_like(args["topk_ids"], 5)
    assert error(dual_stream_moe(x, **args), reference.moe(x, **args)) <= LIMIT[BF16]


def test_an_id_of_no_expert_contributes_nothing(block) -> None:
    x, args = block.inputs(65, "topk_ids")
    ids = args["topk_ids"].long()
    outside = torch.tensor([-1, SIZES["E"], 2**31 - 1, 2**32 + 1, -(2**63), -(2**32) + 2], device=x.device)
    ids[::2, 1] = outside[torch.arange(33, device=x.device) % len(outside)]
    ids[7] = -1
    for given in (ids, ids.clamp(-2, 2**31 - 1).int()):
        expected = reference.moe(x, **args | {"topk_ids": given})
        assert error(dual_stream_moe(x, **args | {"topk_ids": given}), expected) <= LIMIT[BF16]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_comes_out_as_zeros_and_leaves_the_valid_rows_alone(block, schedule, way) -> None:
    x, args = block.inputs(65, way)
    whole = dual_stream_moe(x, **args, schedule=schedule)
    for valid in (0, 1, 40, 65):
        x[valid:] = float("nan")
        count = torch.tensor([valid], dtype=torch.int32, device=x.device)
        out = dual_stream_moe(x, **args, num_valid_tokens=count, schedule=schedule)
        assert torch.equal(out[:valid], whole[:valid])
        assert torch.equal(out[valid:], torch.zeros_like(out[valid:]))
        x, args = block.inputs(65, way)
        whole = dual_stream_moe(x, **args, schedule=schedule)


def test_an_expert_map_routes_over_all_ranks_experts_and_computes_this_ones() -> None:
    x, args = make_layer(
        300, way="topk_ids", config=CONFIG, dtype=BF16, device="cuda", E_global=24, shared_gate=True, **SIZES
    )
    assert error(dual_stream_moe(x, **args), reference.moe(x, **args)) <= LIMIT[BF16]


def test_transposed_weights_need_no_copy(block) -> None:
    x, args, want = block.out(65)
    turned = {name: args[name].mT.contiguous().mT for name in ("w13", "w2", "shared_w13", "shared_w2")}
    for T in (65, 2):
        torch.cuda.synchronize()
        dual_stream_moe(x[:T], **args | turned)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = dual_stream_moe(x[:T], **args | turned)
        assert error(out, want[:T]) <= LIMIT[BF16]
    assert torch.cuda.max_memory_allocated() - before < args["w13"].nbytes


def test_rows_of_a_wider_tensor_give_the_same_bits(block) -> None:
    x, args, want = block.out(65)
    wide = torch.full((65, SIZES["H"] + 32), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 16:-16] = x
    assert torch.equal(dual_stream_moe(wide[:, 16:-16], **args), want)


def test_a_thousand_experts_and_32_a_token() -> None:
    config = MoEConfig(top_k=32)
    x, args = make_layer(160, config=config, dtype=BF16, device="cuda", H=128, E=1024, I=48, S=0)
    x = x[clear_rows(x, 65, args)].contiguous()
    assert error(dual_stream_moe(x, **args), reference.moe(x, **args)) <= LIMIT[BF16]


def test_weights_of_more_than_2_to_the_31_elements() -> None:
    E, H, I, config = 600, 2048, 1024, MoEConfig(top_k=2)
    w13 = torch.empty(E, 2 * I, H, dtype=BF16, device="cuda")
    w2 = torch.empty(E, H, I, dtype=BF16, device="cuda")
    assert w13.numel() > 2**31
    few, ids = [0, 1, E - 2, E - 1], torch.tensor([[3, 0], [2, 1], [3, 2]], device="cuda")
    for w in (w13, w2):
        w[few] = torch.randn(4, *w.shape[1:], device="cuda").to(BF16) / 40
    x, weights = torch.randn(3, H, device="cuda").to(BF16), torch.rand(3, 2, device="cuda")
    out = dual_stream_moe(
        x, config=config, w13=w13, w2=w2, topk_ids=torch.tensor(few, device="cuda")[ids], topk_weights=weights
    )
    expected = reference.moe(x, config=config, w13=w13[few], w2=w2[few], topk_ids=ids, topk_weights=weights)
    assert error(out, expected) <= LIMIT[BF16]


def test_rows_of_more_than_2_to_the_31_elements() -> None:
    T, H, E, I, config = 540_000, 2048, 3, 16, MoEConfig(top_k=2)
    assert T * config.top_k * H > 2**31
    _, args = make_layer(1, config=config, dtype=BF16, device="cuda", H=H, E=E, I=I, S=0, way="topk_ids")
    x = torch.randn(T, H, dtype=BF16, device="cuda")
    args["topk_ids"] = torch.randint(0, E, (T, 2), device="cuda")
    args["topk_weights"] = torch.rand(T, 2, device="cuda")
    out = dual_stream_moe(x, **args)
    for rows in (slice(0, 9), slice(T // 2, T // 2 + 9), slice(T - 9, T)):
        part = args | {name: args[name][rows] for name in ("topk_ids", "topk_weights")}
        assert error(out[rows], reference.moe(x[rows], **part)) <= LIMIT[BF16]
