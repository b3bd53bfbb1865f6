"""Every family's own block, unpatched, against the module that replaces it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_cases import CASES, H, first, hf_module, make_block, relative_error, run_block, to_model_dtype
from torch import Tensor

from dsmoe_op import reference
from dsmoe_op.hf.families import FAMILIES, Family
from dsmoe_op.module import DualStreamMoE
from dsmoe_op.ops import route

pytestmark = pytest.mark.skipif(not CASES, reason="transformers is not installed")
family_cases = pytest.mark.parametrize(("family", "changes"), CASES)


def skip_twins(family: Family, device: str) -> None:
    """On a GPU a family that is in everything like an earlier one would only compile the same kernels again."""
    kinds = [(f.router.kind, f.experts.kind, f.shared and f.shared.kind, f.shared_gate, f.scale) for f in FAMILIES]
    index = FAMILIES.index(family)
    if device == "cuda" and kinds[index] in kinds[:index]:
        pytest.skip("like an earlier family")


def own_routing(module: DualStreamMoE, x: Tensor) -> tuple[Tensor, Tensor]:
    tensors = module.tensors()
    given = {n: t for n, t in tensors.items() if n in ("router_weight", "router_bias", "correction_bias")}
    flat = x.reshape(-1, x.shape[-1])
    if module._softcap is not None:
        logits = torch.nn.functional.linear(flat, given.pop("router_weight")).float()
        return route(
            flat, config=module.config, router_logits=(logits / module._softcap).tanh() * module._softcap, **given
        )
    return route(flat, config=module.config, **given)


def by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.long().argsort(dim=-1)
    return ids.long().gather(1, order), weights.double().gather(1, order)


@family_cases
def test_float32_block_is_reproduced(family: Family, changes: dict[str, Any], device: str) -> None:
    skip_twins(family, device)
    block = make_block(family, changes).to(device)
    module = DualStreamMoE.from_transformers(block)
    for shape in ((1, 1), (1, 2), (1, 7), (3, 11)):
        x = torch.randn(*shape, H, device=device)
        expected, ids, weights = run_block(block, family, x)
        with torch.no_grad():
            got = module(x)
        own_ids, own_weights = own_routing(module, x)
        (own_ids, own_weights), (ids, weights) = by_id(own_ids, own_weights), by_id(ids, weights)
        same = (own_ids == ids).all(-1)
        assert (~same).sum() <= (1 if len(same) > 7 else 0)  # two experts may be closer than the last bit
        assert relative_error(own_weights[same], weights[same]) <= 1e-5
        got_TH, expected_TH = (first(t).reshape(-1, H)[same] for t in (got, expected))
        assert relative_error(got_TH, expected_TH) <= 1e-5


@family_cases
def test_bfloat16_block_is_as_close_to_float64_as_its_own(family: Family, changes: dict[str, Any], device: str) -> None:
    skip_twins(family, device)
    block = to_model_dtype(make_block(family, changes), family, torch.bfloat16).to(device)
    module = DualStreamMoE.from_transformers(block)
    x = torch.randn(1, 133, H, device=device).bfloat16()
    expected, ids, weights = run_block(block, family, x)
    with torch.no_grad():
        got = module(x)
        tensors = {n: t for n, t in module.tensors().items() if "router" not in n and n != "correction_bias"}
        exact = reference.moe(x, config=module.config, topk_ids=ids, topk_weights=weights, **tensors)
        if family.after:
            exact = block.get_submodule(family.after[0]).double()(exact)
    (own_ids, own_weights), (ids, weights) = by_id(*own_routing(module, x)), by_id(ids, weights)
    same = (own_ids == ids).all(-1)
    assert same.float().mean() > 0.9  # where rounding ties two experts, either is right
    # Rounded where its own are: else most would differ by about 1e-3.
    assert torch.isclose(own_weights[same], weights[same], rtol=1e-5, atol=0).double().mean() > 0.99
    got_TH, expected_TH, exact_TH = (first(t).reshape(-1, H)[same] for t in (got, expected, exact))
    error = relative_error(got_TH, exact_TH)
    assert error <= 1e-2
    assert error <= 1.5 * relative_error(expected_TH, exact_TH)


@family_cases
def test_what_a_block_returns_stays_as_it_was(family: Family, changes: dict[str, Any]) -> None:
    block = make_block(family, changes)
    module = DualStreamMoE.from_transformers(block)
    x = torch.randn(2, 9, H)
    expected, _, _ = run_block(block, family, x)
    with torch.no_grad():
        got = module(x)
    assert type(got) is type(expected)
    got, expected = (out if isinstance(out, tuple) else (out,) for out in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) <= 1e-5


@family_cases
def test_zero_tokens(family: Family, changes: dict[str, Any]) -> None:
    module = DualStreamMoE.from_transformers(make_block(family, changes))
    with torch.no_grad():
        out = first(module(torch.randn(1, 0, H)))
    assert out.numel() == 0
    assert out.shape[-1] == H


@family_cases
def test_state_dict_and_storage_stay_as_they_were(family: Family, changes: dict[str, Any]) -> None:
    block = to_model_dtype(make_block(family, changes), family, torch.bfloat16)
    before = block.state_dict()
    module = DualStreamMoE.from_transformers(block)
    after = module.state_dict()
    assert list(after) == list(before)
    assert [k for k, _ in module.named_buffers()] == [k for k, _ in block.named_buffers()]
    merged = [f"{family.shared.name}.{n}.weight" for n in family.shared.kind.w13] if family.shared else []
    merged = merged if len(merged) == 2 else []
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor)
        if key not in merged:
            assert after[key].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("package", "masked_win"), [("axk2", True), ("deepseek_v3", False)])
def test_losing_groups_win_where_their_mask_is_zero_and_all_else_is_negative(package: str, masked_win: bool) -> None:
    family = next(f for f in FAMILIES if f.package == package)
    if hf_module(family) is None:
        pytest.skip("transformers lacks it")
    block = make_block(family, {"topk_group": 3})  # the one losing group has K = 3 members
    block.gate.e_score_correction_bias -= 5
    module = DualStreamMoE.from_transformers(block)
    x = torch.randn(1, 33, H)
    expected, ids, _ = run_block(block, family, x)
    assert ((ids // 3 == ids[:, :1] // 3).all(-1)).all() == masked_win
    with torch.no_grad():
        assert relative_error(module(x), expected) <= 1e-5
