"""Whole small models of transformers, before and after their MoE blocks are swapped."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_cases import relative_error
from hf_model_cases import MODELS, make_model, tokens
from torch import nn

from dsmoe_op import MoEConfig, load_block
from dsmoe_op.hf import replace_moe_blocks, swap
from dsmoe_op.hf.shared import MergedMLP
from dsmoe_op.module import DualStreamMoE

models = pytest.mark.parametrize("name", MODELS)
pytest.importorskip("transformers")


def swapped_blocks(model: nn.Module) -> list[DualStreamMoE]:
    return [m for m in model.modules() if isinstance(m, DualStreamMoE)]


@models
@torch.no_grad()
def test_logits_and_greedy_tokens_stay(name: str) -> None:
    model, ids = make_model(name), tokens(2, 11)
    logits = model(ids).logits
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    count = replace_moe_blocks(model)
    assert count == len(swapped_blocks(model)) > 0
    assert relative_error(model(ids).logits, logits) <= 1e-5
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)


@models
@torch.no_grad()
def test_router_logits_are_recorded_where_the_model_asks_for_them(name: str) -> None:
    model, ids = make_model(name), tokens(2, 11)
    expected = getattr(model(ids, output_router_logits=True), "router_logits", None)
    if expected is None:
        pytest.skip("the model records none")
    replace_moe_blocks(model)
    got = model(ids, output_router_logits=True).router_logits
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= 1e-5


@models
def test_what_save_pretrained_writes_loads_unpatched(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    replace_moe_blocks(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not swapped_blocks(loaded)
    after = loaded.state_dict()
    assert list(after) == list(before)
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key


@models
def test_weights_of_an_unpatched_model_load(name: str) -> None:
    source, target = make_model(name, seed=1), make_model(name, seed=2)
    replace_moe_blocks(target)
    result = target.load_state_dict(source.state_dict())
    assert result.missing_keys == result.unexpected_keys == []
    for (key, a), (other, b) in zip(target.state_dict().items(), source.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "llama4"])
def test_a_loaded_bfloat16_model_round_trips(name: str, tmp_path: Path) -> None:
    make_model(name).bfloat16().save_pretrained(tmp_path / "a")
    cls = type(make_model(name))
    model = cls.from_pretrained(tmp_path / "a", dtype=torch.bfloat16).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    replace_moe_blocks(model)
    model.save_pretrained(tmp_path / "b")
    after = cls.from_pretrained(tmp_path / "b", dtype=torch.bfloat16).state_dict()
    assert list(after) == list(before)
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "llama4", "minimax_m3_vl", "nemotron_h"])
@torch.no_grad()
def test_swapped_models_copy_and_pickle(name: str, tmp_path: Path) -> None:
    model, ids = make_model(name), tokens(1, 9)
    replace_moe_blocks(model)
    logits = model(ids).logits
    torch.save(model, tmp_path / "model.pt")
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    )
    for other in copies:
        assert torch.equal(other(ids).logits, logits)
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "laguna", "llama4"])
@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_a_compiled_model_is_one_graph_with_a_node_a_block(name: str) -> None:
    model, ids = make_model(name), tokens(2, 11)
    count = replace_moe_blocks(model)
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    asks = {"use_cache": False, "output_router_logits": True}
    recorded = model(ids, **asks)  # before compiling: transformers takes a lock when it first puts its hooks on
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(ids, use_cache=False).logits, recorded.logits)
    assert [sum("moe_v1" in target for target in targets) for targets in graphs] == [count]
    if getattr(recorded, "router_logits", None) is not None:
        for a, b in zip(compiled(ids, **asks).router_logits, recorded.router_logits, strict=True):
            assert torch.equal(a, b)


def test_blocks_are_found_inside_any_module() -> None:
    model = make_model("deepseek_v3")
    layers = nn.ModuleDict({"a": nn.Sequential(*model.model.layers), "b": nn.ModuleList([model.model.layers[1].mlp])})
    assert replace_moe_blocks(layers) == 2
    assert layers["b"][0] is layers["a"][1].mlp  # one block in two places stays one


def test_swapping_twice_changes_nothing() -> None:
    model = make_model("qwen2_moe")
    assert replace_moe_blocks(model) == 3
    blocks = swapped_blocks(model)
    assert replace_moe_blocks(model) == 0
    assert all(a is b for a, b in zip(swapped_blocks(model), blocks, strict=True))


def test_a_model_without_moe_blocks_has_none() -> None:
    assert replace_moe_blocks(nn.Sequential(nn.Linear(3, 4), nn.ReLU())) == 0


def test_at_most_one_shared_expert_exists_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2_moe")
    old = [weakref.ref(layer.mlp.shared_expert.gate_proj.weight) for layer in model.model.layers]
    alive: list[int] = []

    def merged(*args: Any) -> MergedMLP:
        alive.append(sum(ref() is not None for ref in old))
        return MergedMLP(*args)

    monkeypatch.setattr(swap, "MergedMLP", merged)
    replace_moe_blocks(model)
    gc.collect()
    assert alive == [3, 2, 1]
    assert all(ref() is None for ref in old)


def test_a_schedule_goes_to_every_block() -> None:
    model = make_model("deepseek_v3")
    replace_moe_blocks(model, schedule="serial")
    assert {block.schedule for block in swapped_blocks(model)} == {"serial"}
    with pytest.raises(ValueError, match=r"schedule: expected one of 'auto', .*, got 'fast'"):
        replace_moe_blocks(make_model("deepseek_v3"), schedule="fast")


def test_one_bad_block_leaves_the_model_unchanged() -> None:
    model = make_model("deepseek_v3")
    model.model.layers[2].mlp.shared_experts.up_proj = nn.Linear(64, 96, bias=True)
    before = list(model.modules())
    text = r"model\.layers\.2\.mlp: \S*DeepseekV3MoE: shared_experts\.up_proj\.bias: expected None, got a tensor"
    with pytest.raises(ValueError, match=text):
        replace_moe_blocks(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_an_unknown_moe_class_is_refused_by_name() -> None:
    class StrangeMoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), nn.ModuleList([nn.Linear(8, 8)])

    with pytest.raises(ValueError, match=r"1\.mlp: .*StrangeMoE: expected a MoE block that is known"):
        replace_moe_blocks(nn.Sequential(nn.Identity(), nn.ModuleDict({"mlp": StrangeMoE()})))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"block_size": (128, 128)}, "fp8_block"),
        ({"block_size": (128, 128), "scale_fmt": "ue8m0"}, "fp8_block"),
        ({"activation_scheme": "static"}, "fp8_tensor"),
        ({"expert_dtype": "fp4", "scale_fmt": "ue8m0"}, "mxfp4"),
    ],
)
def test_fp8_experts_are_refused_by_name_and_load_from_their_state_dict(options: dict[str, Any], name: str) -> None:
    cls = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Experts
    if not options.keys() <= inspect.signature(cls).parameters.keys():
        pytest.skip("transformers is older than that")
    sizes = {"hidden_size": 160, "num_local_experts": 5, "moe_intermediate_size": 192, "hidden_act": "silu"}
    model = make_model("deepseek_v3")
    experts = model.model.layers[1].mlp.experts = cls(SimpleNamespace(**sizes), **options)
    with pytest.raises(
        ValueError, match=r"1\.mlp: \S*DeepseekV3MoE: experts: expected DeepseekV3\w*, got \S*FP8Experts"
    ):
        replace_moe_blocks(model)
    config, tensors = load_block(experts.state_dict(prefix="experts."), config=MoEConfig(top_k=2))
    assert config.routed_format == name
    assert tensors["w13"].data_ptr() == experts.gate_up_proj.data_ptr()
    assert tensors["w13_scale"].shape[0] == tensors["w2_scale"].shape[0] == 5


def test_a_block_itself_is_sent_to_from_transformers() -> None:
    with pytest.raises(ValueError, match=r"got a block, .*DeepseekV3MoE: use DualStreamMoE\.from_transformers"):
        replace_moe_blocks(make_model("deepseek_v3").model.layers[1].mlp)


def test_the_package_imports_no_transformers() -> None:
    code = "import sys, dsmoe_op.hf; dsmoe_op.hf.families(); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
