"""`DualStreamMoE`: its own weights, and blocks of transformers turned into it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from modules import E, H, I, K, LargestAllocation, layers, make, make_block, run, transformers_only
from torch import Tensor, nn

from dsmoe_op import MoEConfig, prepare, reference
from dsmoe_op.hf.families import FAMILIES
from dsmoe_op.module import DualStreamMoE

# --- weights of its own ---------------------------------------------------------------------------------------------


@layers
@torch.no_grad()
def test_it_computes_the_reference_on_its_weights(name: str) -> None:
    module = make(name)
    x = torch.randn(3, 5, H)
    expected = reference.moe(x, config=module.config, **module.tensors())
    assert (module(x) - expected).norm() <= 1e-5 * expected.norm()


@layers
def test_its_weights_are_named_as_the_ops_arguments(name: str) -> None:
    module = make(name, dtype=torch.bfloat16, router_dtype=torch.float32)
    assert set(module.state_dict()) == set(module.tensors())
    for key, tensor in module.tensors().items():
        assert tensor.dtype == (
            torch.float32 if key in ("router_weight", "router_bias", "correction_bias") else torch.bfloat16
        )


@torch.no_grad()
def test_the_other_ways_in_leave_its_router_out() -> None:
    module = make("shared")
    x = torch.randn(7, H)
    weights = {k: v for k, v in module.tensors().items() if k not in ("router_weight", "correction_bias")}
    logits, ids, w = torch.randn(7, E), torch.randint(E, (7, K)), torch.rand(7, K)
    bias = module.correction_bias
    for given, also in (
        ({"router_logits": logits}, {"correction_bias": bias}),
        ({"topk_ids": ids, "topk_weights": w}, {}),
    ):
        expected = reference.moe(x, config=module.config, **given, **also, **weights)
        assert (module(x, **given) - expected).norm() <= 1e-5 * expected.norm()


@torch.no_grad()
def test_rows_of_padding_are_zeros() -> None:
    out = make("shared")(torch.randn(7, H), num_valid_tokens=torch.tensor([4], dtype=torch.int32))
    assert out[:4].abs().sum(-1).all()
    assert not out[4:].any()


@layers
@torch.no_grad()
def test_it_copies_pickles_and_reloads(name: str) -> None:
    module, x = make(name), torch.randn(5, H)
    expected = module(x)
    other = make(name)
    other.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(twin(x), expected)
        assert twin.config == module.config


def test_it_can_be_made_on_meta() -> None:
    module = make("shared", device="meta")
    assert all(t.is_meta for t in module.tensors().values())
    module.to_empty(device="cpu").reset_parameters()
    assert not any(t.is_meta for t in module.tensors().values())


def test_a_gate_needs_a_shared_expert() -> None:
    with pytest.raises(ValueError, match="shared_gate: expected False without shared_intermediate_size"):
        DualStreamMoE(MoEConfig(top_k=K), H, E, I, shared_gate=True)


# --- blocks of transformers -----------------------------------------------------------------------------------------


@transformers_only
@pytest.mark.parametrize("package", ["deepseek_v3", "llama4", "gpt_oss", "nemotron_h"])
def test_no_copy_of_the_experts_is_ever_made(package: str) -> None:
    block = make_block(package)
    x = torch.randn(1, 3, 80)
    with LargestAllocation() as seen:
        module = DualStreamMoE.from_transformers(block)
        module.tensors()
    shared = module.tensors().get("shared_w13")
    assert seen.largest <= (0 if shared is None else shared.untyped_storage().nbytes())
    stored = {p.untyped_storage().data_ptr() for p in block.experts.parameters()}
    assert {module.tensors()[n].untyped_storage().data_ptr() for n in ("w13", "w2")} <= stored
    assert run(module, x).shape[-1] == 80


@transformers_only
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)])
def test_a_cast_reaches_every_weight(cast: Any) -> None:
    block = make_block("deepseek_v3")
    module = cast(DualStreamMoE.from_transformers(block))
    expected = {k: v.dtype for k, v in cast(make_block("deepseek_v3")).state_dict().items()}
    assert {k: v.dtype for k, v in module.state_dict().items()} == expected
    x = torch.randn(1, 5, 80, dtype=module.tensors()["w13"].dtype)
    assert run(module, x).dtype == x.dtype


@transformers_only
@pytest.mark.parametrize("package", ["hunyuan_v1_moe", "minimax_m3_vl"])
def test_rounding_follows_the_gates_dtype(package: str) -> None:
    from hf_cases import run_block

    family = next(f for f in FAMILIES if f.package == package)
    block = make_block(package).bfloat16()
    weight = block.get_parameter(f"gate.{family.router.kind.weight}")
    module = DualStreamMoE.from_transformers(block)
    for dtype, values in ((torch.float32, "float32"), (torch.bfloat16, "model"), (torch.float32, "float32")):
        weight.data = weight.data.to(dtype)
        x = torch.randn(1, 65, 80).bfloat16()
        expected, _, _ = run_block(block, family, x)
        assert module.config.router_dtype == values
        close = (run(module, x).float() - expected.float()).norm(dim=-1) <= 3e-2 * expected.float().norm(dim=-1)
        assert close.float().mean() > 0.9


@transformers_only
def test_a_shared_experts_weights_stay_tied_to_their_keys() -> None:
    module = DualStreamMoE.from_transformers(make_block("qwen2_moe"))
    state = module.state_dict()
    with torch.no_grad():
        module.tensors()["shared_w13"].fill_(3.0)
    assert (state["shared_expert.gate_proj.weight"] == 3.0).all()
    assert (state["shared_expert.up_proj.weight"] == 3.0).all()
    assert module.state_dict(keep_vars=True)["shared_expert.up_proj.weight"].requires_grad


@transformers_only
@pytest.mark.parametrize("assign", [False, True])
def test_loading_takes_the_blocks_own_state(assign: bool) -> None:
    source, x = make_block("qwen2_moe", norm_topk_prob=False), torch.randn(2, 5, 80)
    module = DualStreamMoE.from_transformers(make_block("qwen2_moe", norm_topk_prob=False).bfloat16())
    for p in source.parameters():
        p.data.mul_(1.1)
    result = module.load_state_dict(source.state_dict(), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    if assign:
        assert {t.dtype for t in module.tensors().values()} == {torch.float32}
        assert torch.equal(run(module, x), run(DualStreamMoE.from_transformers(source), x))
    for key, tensor in source.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor if assign else tensor.bfloat16())


@transformers_only
def test_loading_onto_meta_with_assign() -> None:
    source, x = make_block("deepseek_v3"), torch.randn(1, 4, 80)
    module = DualStreamMoE.from_transformers(make_block("deepseek_v3").to("meta"))
    module.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(run(module, x), run(DualStreamMoE.from_transformers(source), x))


@transformers_only
def test_loading_names_missing_unexpected_and_misshapen_keys() -> None:
    module = DualStreamMoE.from_transformers(make_block("deepseek_v3"))
    state = dict(module.state_dict())
    gate = "shared_experts.gate_proj.weight"
    bad = {k: v for k, v in state.items() if k != gate} | {"shared_experts.gate_proj.bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=rf'Missing.*"{gate}"(.|\n)*Unexpected.*"shared_experts.gate_proj.bias"'):
        module.load_state_dict(bad)
    up = torch.full_like(state["shared_experts.up_proj.weight"], 2.0)
    before = state[gate].clone()
    module.load_state_dict({"shared_experts.up_proj.weight": up}, strict=False)
    assert torch.equal(module.state_dict()["shared_experts.up_proj.weight"], up)
    assert torch.equal(module.state_dict()[gate], before)
    with pytest.raises(RuntimeError, match=f"size mismatch for {gate}"):
        module.load_state_dict(state | {gate: torch.zeros(3, 4)})


@transformers_only
def test_frozen_weights_and_mode_are_kept() -> None:
    block = make_block("deepseek_v3")
    block.shared_experts.requires_grad_(False)
    block.gate.weight.requires_grad_(False)
    block.train()
    module = DualStreamMoE.from_transformers(block)
    wanted = {k: v.requires_grad for k, v in block.state_dict(keep_vars=True).items()}
    assert {k: v.requires_grad for k, v in module.state_dict(keep_vars=True).items()} == wanted
    assert all(m.training for m in module.modules())
    assert not any(m.training for m in DualStreamMoE.from_transformers(block.eval()).modules())


@transformers_only
def test_torch_save_of_a_state_dict_is_the_blocks() -> None:
    block = make_block("axk1")
    file = io.BytesIO()
    torch.save(DualStreamMoE.from_transformers(block).state_dict(), file)
    file.seek(0)
    fresh = make_block("axk1")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for key, tensor in block.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], tensor)


@transformers_only
def test_hooks_of_the_block_and_of_its_router_still_run() -> None:
    block, called = make_block("afmoe"), []
    handle = block.register_forward_hook(lambda *_: called.append("block"))
    block.router.register_forward_hook(lambda m, args, out: called.append(tuple(out[0].shape)))
    module = DualStreamMoE.from_transformers(block)
    run(module, torch.randn(2, 3, 80))
    assert called == [(6, 12), "block"]
    handle.remove()
    run(module, torch.randn(1, 3, 80))
    assert called == [(6, 12), "block", (3, 12)]


@transformers_only
def test_hash_layers_choose_by_input_ids() -> None:
    block = make_block("deepseek_v4", mlp_layer_types=["hash_moe"] * 2, vocab_size=50)
    block.gate.tid2eid.copy_(torch.stack([torch.randperm(12)[:3] for _ in range(50)]))
    recorded: list[Tensor] = []
    module = DualStreamMoE.from_transformers(block)
    x, ids = torch.randn(2, 9, 80), torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = block(x, input_ids=ids)
        block.gate.register_forward_hook(lambda m, args, out: recorded.append(out[0]))
        assert (module(x, input_ids=ids) - expected).norm() <= 1e-5 * expected.norm()
    assert [tuple(logits.shape) for logits in recorded] == [(18, 12)]


@transformers_only
def test_a_subclass_that_computes_the_same_is_taken() -> None:
    block = make_block("deepseek_v3")
    block.__class__ = type("Mine", (type(block),), {"extra": True})
    assert isinstance(DualStreamMoE.from_transformers(block), DualStreamMoE)
    block.__class__ = type("Other", (type(block),), {"forward": lambda self, x: x})
    with pytest.raises(ValueError, match="Other: the block: expected the forward of DeepseekV3MoE"):
        DualStreamMoE.from_transformers(block)


@transformers_only
def test_a_module_that_is_one_already_is_returned() -> None:
    module = make("plain")
    assert DualStreamMoE.from_transformers(module) is module


def _patched_forward(block: nn.Module) -> None:
    block.forward = lambda x: x


def _other_linear(block: nn.Module) -> None:
    block.shared_experts.down_proj = type("LoRA", (nn.Linear,), {})(96, 80, bias=False)


REFUSED = {
    "activation": (
        "deepseek_v3",
        {"hidden_act": "relu"},
        None,
        "experts.act_fn: expected silu, gelu, tanh-gelu or relu2, got ReLU",
    ),
    "gated relu2": (
        "deepseek_v3",
        {"hidden_act": "relu2"},
        None,
        "experts.act_fn: expected a gated activation, got relu2",
    ),
    "ungated silu": ("nemotron_h", {"mlp_hidden_act": "silu"}, None, "experts.act_fn: expected relu2, got silu"),
    "shared bias": ("hy_v3", {"mlp_bias": True}, None, "shared_experts.gate_proj.bias: expected None, got a tensor"),
    "alpha": ("minimax_m3_vl", {"swiglu_alpha": 1.5}, None, "experts.swiglu_alpha: expected 1.702, got 1.5"),
    "norm_min": ("ernie4_5_moe", {"moe_norm_min": 1e-6}, None, "gate.norm_min: expected 1e-12, got 1e-06"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, None, "jitter_noise: expected 0 .*, got 0.1"),
    "topk_method": (
        "deepseek_v2",
        {"topk_method": "noaux_tc"},
        None,
        "gate.topk_method: expected 'greedy' or .*'noaux_tc'",
    ),
    "latent": (
        "nemotron_h",
        {"moe_latent_size": 32},
        None,
        "fc1_latent_proj: expected nn.Identity .*, got a projection",
    ),
    "top_k": ("deepseek_v3", {"num_experts_per_tok": 33}, None, r"top_k: expected an integer in 1\.\.32, got 33"),
    "own forward": (
        "deepseek_v3",
        {},
        _patched_forward,
        "the block: expected the forward of its class, got one set on the object",
    ),
    "other linear": ("deepseek_v3", {}, _other_linear, "shared_experts.down_proj: expected nn.Linear, got .*LoRA"),
    "unknown attribute": (
        "deepseek_v3",
        {},
        lambda block: setattr(block.gate, "softcap", 3.0),
        "gate: expected nothing unknown in it, got softcap",
    ),
    "unknown child": (
        "deepseek_v3",
        {},
        lambda block: block.add_module("post_norm", nn.LayerNorm(80)),
        "the block: expected nothing unknown in it, got post_norm",
    ),
    "hooks": (
        "deepseek_v3",
        {},
        lambda block: block.experts.register_forward_hook(lambda *_: None),
        "experts: expected no forward hooks",
    ),
    "hooks of an activation": (
        "deepseek_v3",
        {},
        lambda block: block.shared_experts.act_fn.register_forward_hook(lambda *_: None),
        "shared_experts.act_fn: expected no forward hooks",
    ),
    "own forward of a linear": (
        "deepseek_v3",
        {},
        lambda block: _patched_forward(block.shared_experts.down_proj),
        "shared_experts.down_proj: expected the forward of its class",
    ),
    "expert parallel": (
        "deepseek_v3",
        {},
        lambda block: setattr(block.experts, "_is_expert_parallel", True),
        "experts: expected all experts on this rank, got expert parallelism",
    ),
    "other router": (
        "deepseek_v3",
        {},
        lambda block: setattr(block, "gate", nn.Linear(80, 12)),
        "gate: expected DeepseekV3TopkRouter, got torch.nn.modules.linear.Linear",
    ),
    "quantised": (
        "deepseek_v3",
        {},
        lambda block: setattr(
            block.experts,
            "down_proj",
            nn.Parameter(block.experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False),
        ),
        "experts.down_proj: expected a floating-point tensor for w2, got torch.float8_e4m3fn",
    ),
    "subclassed tensor": (
        "deepseek_v3",
        {},
        lambda block: setattr(
            block.gate, "weight", nn.Parameter(block.gate.weight.detach().as_subclass(type("DTensor", (Tensor,), {})))
        ),
        "gate.weight: expected a plain tensor for router_weight, got ",
    ),
}


@transformers_only
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_computed_is_refused_by_name(what: str) -> None:
    package, changes, alter, text = REFUSED[what]
    block = make_block(package, **changes)
    if alter is not None:
        alter(block)
    with pytest.raises(ValueError, match=rf"^transformers\.models\.{package}\.\S+: {text}"):
        DualStreamMoE.from_transformers(block)


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"torch\.nn\.modules\.linear\.Linear: expected a MoE block that is known"):
        DualStreamMoE.from_transformers(nn.Linear(3, 4))


# --- prepare --------------------------------------------------------------------------------------------------------


@layers
def test_there_is_nothing_to_prepare_on_the_cpu(name: str) -> None:
    module = make(name)
    assert module.prepare() is None
    assert prepare(torch.empty(2, 3, H), config=module.config, **module.tensors()) is None


def test_prepare_refuses_what_the_call_would() -> None:
    module = make("shared")
    given = {"config": module.config, **module.tensors()}
    x = torch.empty(3, H)
    with pytest.raises(ValueError, match=r"w2: expected \[E=6, H=40, I=24\], got \[6, 24, 40\]"):
        prepare(x, **given | {"w2": module.w2.mT})
    with pytest.raises(ValueError, match="w13: expected a tensor, got NoneType"):
        prepare(x, **given | {"w13": None})
    with pytest.raises(ValueError, match="schedule: expected one of"):
        prepare(x, **given, schedule="both")
    with pytest.raises(TypeError, match="got also weights"):
        prepare(x, **given, weights=x)
    with pytest.raises(ValueError, match=r"hidden_states: expected at least one token, got \[0, 40\]"):
        prepare(x[:0], **given)
