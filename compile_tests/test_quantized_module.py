"""`DualStreamMoE` with quantised weights: made so, or given so; its files, copies and casts."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import weakref
from typing import Any

import pytest
import torch
from layers import make_layer, quantized
from modules import E, H, I, K, LargestAllocation, layers, make, make_block, run, transformers_only
from torch import Tensor, nn

from dsmoe_op import MoEConfig, formats, quantizing, reference
from dsmoe_op.module import DualStreamMoE

WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")
each_format = pytest.mark.parametrize("format", formats.FORMATS)


def quantize(module: DualStreamMoE, format: Any, **options: Any) -> DualStreamMoE:
    """With input scales for h and x of about 1, and one for each expert."""
    shared = options.get("shared_format", format)
    scales = {}
    for name, tensor in module.tensors().items():
        if name in WEIGHTS and (shared if name.startswith("shared_") else format) == "fp8_tensor":
            scales[f"{name}_input_scale"] = 0.01 + 0.001 * torch.rand(len(tensor) if tensor.dim() == 3 else 1)
    return module.quantize(format, input_scales=scales, **options)


def parts(module: DualStreamMoE) -> dict[str, Tensor]:
    """The tensors of the quantised weights."""
    names = {w + s for w in WEIGHTS if module.config.format_of(w) for s in formats.SUFFIXES}
    return {name: tensor for name, tensor in module.tensors().items() if name in names}


def same_bits(a: Tensor, b: Tensor) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.detach().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def assert_is_the_reference(module: DualStreamMoE, x: Tensor, given: dict[str, Any] | None = None) -> None:
    expected = reference.moe(x, config=module.config, **(given or module.tensors()))
    rounds_rows = any("fp8" in str(format) for format in (module.config.routed_format, module.config.shared_format))
    limit = 2e-2 if rounds_rows else 1e-5  # h may be on either side of the middle of two fp8 numbers
    with torch.no_grad():
        assert (module(x) - expected).norm() <= limit * expected.norm()


@each_format
def test_quantised_tensors_are_those_of_the_whole_weight(format: Any) -> None:
    module = make("shared", dtype=torch.bfloat16)
    old = {name: tensor.detach().clone() for name, tensor in module.tensors().items()}
    assert quantize(module, format) is module
    assert module.config.routed_format == module.config.shared_format == format
    for name in WEIGHTS:
        made = formats.quantize(format, old[name], halves=module.config.halves(name))
        for suffix, part in zip(formats.SUFFIXES[:-1], made[:-1], strict=True):
            held = module.tensors().get(name + suffix)
            if part is None:
                assert held is None
            else:
                assert isinstance(held, nn.Parameter)
                assert not held.requires_grad
                assert same_bits(held, part.view(torch.uint8) if part.dtype == formats.E8M0 else part)


@each_format
def test_a_quantised_layer_computes_the_reference(format: Any) -> None:
    assert_is_the_reference(quantize(make("shared"), format), torch.randn(3, 5, H))


@layers
def test_a_layer_of_each_kind_can_be_quantised(name: str) -> None:
    module = make(name).quantize("int4", group=64, zero_point=True)
    assert module.w13_scale.shape[-1] == module.w13_zero_point.shape[-1] == 1
    assert_is_the_reference(module, torch.randn(9, H))
    assert module.prepare() is None


def test_an_interleaved_w13_is_quantised_as_one() -> None:
    module = DualStreamMoE(MoEConfig(top_k=K, w13_order="interleaved"), H, E, I)
    with torch.no_grad():
        module.w13[:, 0::2] *= 30
    amax = module.w13.detach().unflatten(1, (I, 2)).abs().amax((1, 3))
    quantize(module, "fp8_tensor")
    torch.testing.assert_close(module.w13_scale.data * 448, amax)  # gate and up rows have a scale each


@pytest.mark.parametrize(("routed", "shared"), [("int4", None), (None, "fp8_block"), ("mxfp4", "fp8_channel")])
def test_routed_and_shared_formats_are_chosen_apart(routed: Any, shared: Any) -> None:
    module = make("shared")
    old = module.tensors()
    quantize(module, routed, shared_format=shared)
    assert (module.config.routed_format, module.config.shared_format) == (routed, shared)
    assert_is_the_reference(module, torch.randn(9, H))
    kept = [name for name in ("w13", "shared_w13", "router_weight") if module.tensors()[name] is old[name]]
    assert kept == ["w13"] * (routed is None) + ["shared_w13"] * (shared is None) + ["router_weight"]


def test_branches_can_be_quantised_one_after_the_other() -> None:
    module = make("shared").quantize("int4", shared_format=None).quantize(None, shared_format="mxfp4")
    assert (module.config.routed_format, module.config.shared_format) == ("int4", "mxfp4")
    assert_is_the_reference(module, torch.randn(9, H))


def test_old_weights_are_freed_and_one_expert_at_a_time_is_quantised() -> None:
    module = DualStreamMoE(MoEConfig(top_k=K), 64, 96, 48, dtype=torch.bfloat16)
    old = [weakref.ref(module.w13), weakref.ref(module.w2)]
    with LargestAllocation() as seen:
        module.quantize("fp8_channel")
    assert [ref() for ref in old] == [None, None]
    assert seen.largest == module.w13.numel()  # in float32 all of it would be 4 times as many bytes


REFUSED_FORMATS = {
    "no format": ({"format": None}, "format: expected a format, or a shared_format beside None, got None for both"),
    "a name": ({"format": "int3"}, "format: expected one of 'fp8_block', .*'int4', or None, got 'int3'"),
    "shared name": ({"format": "int4", "shared_format": "fp8"}, "shared_format: expected one of .*, got 'fp8'"),
    "group": ({"format": "int4", "group": 48}, "group: expected one of 32, 64, 128, got 48"),
    "zero_point": ({"format": "mxfp4", "zero_point": True}, "zero_point: expected False without a weight in int4"),
    "no scale": (
        {"format": "fp8_tensor", "shared_format": None, "input_scales": {"w2_input_scale": torch.ones(1)}},
        "input_scales: expected w13_input_scale, w2_input_scale for fp8_tensor, got w2_input_scale",
    ),
    "no need": (
        {"format": "int4", "input_scales": {"w2_input_scale": torch.ones(1)}},
        "input_scales: expected none, since no weight becomes fp8_tensor, got w2_input_scale",
    ),
    "scale's shape": (
        {"format": "fp8_tensor", "input_scales": {f"{name}_input_scale": torch.ones(E) for name in WEIGHTS}},
        r"shared_w13_input_scale: expected \[\] or \[1\], got \[6\]",
    ),
    "scale's dtype": (
        {"format": "fp8_tensor", "input_scales": {f"{name}_input_scale": torch.ones(1).half() for name in WEIGHTS}},
        "w13_input_scale: expected a float32 tensor, got torch.float16",
    ),
}


@pytest.mark.parametrize("what", REFUSED_FORMATS)
def test_quantize_refuses_before_it_changes_anything(what: str) -> None:
    options, text = REFUSED_FORMATS[what]
    module = make("shared")
    before = module.tensors()
    with pytest.raises(ValueError, match=f"^{text}"):
        module.quantize(**options)
    after = module.tensors()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert module.config.routed_format is None


def test_quantize_refuses_what_a_layer_cannot_have() -> None:
    with pytest.raises(ValueError, match="shared_format: expected None without a shared expert, got 'int4'"):
        make("plain").quantize("int4", shared_format="int4")
    with pytest.raises(ValueError, match=r"^w2: expected columns in a multiple of 2 for mxfp4, got \[6, 40, 23\]"):
        DualStreamMoE(MoEConfig(top_k=K), H, E, 23).quantize("mxfp4")
    module = make("plain").quantize("int4")
    with pytest.raises(ValueError, match=r"^format: expected None, since w13 and w2 are int4 already, got 'mxfp4'"):
        module.quantize("mxfp4")
    with pytest.raises(ValueError, match="reset_parameters: expected weights that are not quantised"):
        module.reset_parameters()
    with pytest.raises(ValueError, match=r"routed_format: expected None \(quantize\(\) sets it\), got 'int4'"):
        DualStreamMoE(module.config, H, E, I)


@each_format
def test_a_state_dict_goes_through_a_safetensors_file(format: Any, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module, x = quantize(make("shared"), format), torch.randn(5, H)
    assert set(module.state_dict()) == set(module.tensors())
    safetensors.save_file(module.state_dict(), tmp_path / "layer.safetensors")
    loaded = safetensors.load_file(tmp_path / "layer.safetensors")
    other = quantize(make("shared"), format)
    other.load_state_dict(loaded)
    assigned = quantize(make("shared", device="meta"), format) if format != "fp8_tensor" else other
    assigned.load_state_dict(loaded, assign=True)
    for twin in (other, assigned, DualStreamMoE.from_tensors(module.config, loaded)):
        assert all(same_bits(twin.tensors()[name], tensor) for name, tensor in module.tensors().items())
        assert torch.equal(twin(x), module(x))


@each_format
def test_a_quantised_layer_copies_and_pickles(format: Any) -> None:
    module, x = quantize(make("shared"), format), torch.randn(5, H)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved):
        assert set(twin.state_dict()) == set(module.state_dict())
        for name, tensor in parts(module).items():
            copied = twin.get_parameter(name)
            assert same_bits(copied, tensor)
            assert not copied.requires_grad
            assert copied.data_ptr() != tensor.data_ptr()
        assert torch.equal(twin(x), module(x))


@each_format
def test_casts_and_moves_keep_the_numbers_of_quantised_weights(format: Any) -> None:
    module = quantize(make("shared"), format)
    old = {name: tensor.detach().clone() for name, tensor in parts(module).items()}
    casts = [nn.Module.half, nn.Module.double, lambda m: m.type(torch.float16), nn.Module.float]
    for cast in (*casts, lambda m: m.to("cpu", torch.bfloat16)):
        cast(module)
        assert all(same_bits(module.tensors()[name], tensor) for name, tensor in old.items())
    assert module.router_weight.dtype == torch.bfloat16
    assert module(torch.randn(3, H).bfloat16()).dtype == torch.bfloat16
    module.to("meta")
    found = parts(module)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {n: (t.dtype, t.shape) for n, t in old.items()}
    assert all(tensor.is_meta for tensor in found.values())


def test_casts_leave_the_correction_bias_which_would_choose_other_experts() -> None:
    module = make("shared")
    before = module.correction_bias.clone()
    for cast in (nn.Module.half, lambda m: m.to(torch.bfloat16), lambda m: m.type(torch.float16)):
        assert same_bits(cast(module).correction_bias, before)
    assert module.router_weight.dtype == torch.float16


@pytest.mark.parametrize(("router", "dtype"), [(None, torch.float16), (torch.float32, torch.bfloat16)])
def test_a_quantised_layer_prepares_for_the_dtype_that_is_left_or_asked_for(monkeypatch, router, dtype) -> None:
    asked = []
    monkeypatch.setattr("dsmoe_op.module.prepare", lambda **given: asked.append(given["hidden_states"].dtype))
    module = make("plain", dtype=torch.float16, router_dtype=router).quantize("int4")
    module.prepare()
    module.prepare(torch.float32)
    assert asked == [dtype, torch.float32]


def test_a_format_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^format: expected one of 'fp8_block', .*, got \['int4'\]$"):
        make("plain").quantize(["int4"])


def test_a_quantised_weight_without_its_format_is_refused_by_name() -> None:
    given = make("plain").quantize("fp8_channel").tensors()
    with pytest.raises(ValueError, match=r"^w13: expected bfloat16 as hidden_states has, or a routed_format"):
        DualStreamMoE.from_tensors(MoEConfig(top_k=K), given)


def test_a_state_of_another_dtype_is_refused_and_not_cast() -> None:
    module = make("plain").quantize("fp8_channel")
    before = {name: tensor.detach().clone() for name, tensor in parts(module).items()}
    text = r"dtype mismatch for w13: expected torch.float8_e4m3fn, got torch.float32\W+dtype mismatch for w2: "
    with pytest.raises(RuntimeError, match=text) as error:
        module.load_state_dict(make("plain").state_dict())
    assert "w13_scale" in str(error.value)  # missing
    assert 'Missing key(s) in state_dict: "w13"' not in str(error.value)
    assert all(same_bits(module.tensors()[name], tensor) for name, tensor in before.items())


def test_its_text_names_the_formats() -> None:
    text = repr(make("shared").quantize("int4", shared_format="mxfp4"))
    assert '"routed_format":"int4"' in text
    assert '"shared_format":"mxfp4"' in text


@transformers_only
@pytest.mark.parametrize("package", ["deepseek_v3", "llama4", "gpt_oss", "longcat_flash", "qwen2_moe"])
def test_a_quantised_block_is_the_block_on_dequantised_weights(package: str) -> None:
    from hf_cases import first

    block = make_block(package)
    plain = DualStreamMoE.from_transformers(copy.deepcopy(block))
    module = DualStreamMoE.from_transformers(block)
    router = dict(block.get_submodule("gate" if hasattr(block, "gate") else "router").named_parameters())
    module.quantize("int4", group=64)
    with torch.no_grad():
        for name in set(WEIGHTS) & module.tensors().keys():
            weight, config = plain.tensors()[name], module.config
            options = {"halves": config.halves(name), "interleaved": config.interleaves(name)}
            its = formats.quantised(module.tensors(), name)
            weight.copy_(formats.dequantize("int4", its, weight.shape[-1], dtype=torch.float32, **options))
    unpatched = make_block(package)
    unpatched.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 80)
    with torch.no_grad():
        out, expected = module(x), unpatched(x)
    assert isinstance(out, tuple) == isinstance(expected, tuple)
    assert (first(out).reshape(6, 80) - first(expected).reshape(6, 80)).norm() <= 1e-4 * first(expected).norm()
    assert not hasattr(module, "experts")
    assert {id(p) for p in router.values()} <= {id(p) for p in module.parameters()}


@transformers_only
def test_a_weight_is_freed_before_the_next_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    block, alive = make_block("deepseek_v3"), []
    old = weakref.ref(block.experts.gate_up_proj)
    module, each = DualStreamMoE.from_transformers(block), quantizing.quantize_each
    del block

    def watch(*arguments: Any, **options: Any) -> Any:
        alive.append(old() is not None)
        return each(*arguments, **options)

    monkeypatch.setattr(quantizing, "quantize_each", watch)
    module.quantize("int4")
    assert alive == [True, False, False, False]


@transformers_only
@pytest.mark.parametrize("shared", [None, "mxfp4"])
def test_children_of_a_quantised_block_go_and_the_others_stay(shared: Any) -> None:
    block = make_block("deepseek_v3")
    old, called = weakref.ref(block.experts.gate_up_proj), []
    block.gate.register_forward_hook(lambda *_: called.append("gate"))
    module = DualStreamMoE.from_transformers(block)
    del block
    module.quantize("int4", shared_format=shared)
    assert old() is None
    keys = {"gate.weight", "gate.e_score_correction_bias", "w13", "w13_scale", "w2", "w2_scale"}
    mlp = {f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    flat = {"shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale"}
    assert set(module.state_dict()) == keys | (flat if shared else mlp)
    run(module, torch.randn(1, 3, 80))
    assert called == ["gate"]


@transformers_only
def test_a_quantised_block_reloads_copies_and_pickles() -> None:
    module = DualStreamMoE.from_transformers(make_block("deepseek_v3")).bfloat16().quantize("fp8_block")
    other = DualStreamMoE.from_transformers(make_block("deepseek_v3").bfloat16()).quantize("fp8_block")
    with torch.no_grad():
        other.shared_w2_scale.zero_()
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 4, 80).bfloat16()
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(twin, x), run(module, x))


# --- tensors as they are --------------------------------------------------------------------------------------------


@layers
def test_given_tensors_are_held_not_copied(name: str) -> None:
    source = make(name)
    module = DualStreamMoE.from_tensors(source.config, source.tensors(), schedule="serial")
    assert module.schedule == "serial"
    assert set(module.state_dict()) == set(source.state_dict())
    assert {n: t.data_ptr() for n, t in module.tensors().items()} == {
        n: t.data_ptr() for n, t in source.tensors().items()
    }
    assert not any(p.requires_grad for p in module.parameters())
    x = torch.randn(5, H)
    with torch.no_grad():
        assert torch.equal(module(x), source(x))


def test_scales_that_are_powers_of_two_are_held_as_bytes() -> None:
    layer = quantized(make_layer(E=4, H=32, I=64)[1], "mxfp4", "mxfp4")
    config = layer.pop("config")
    assert layer["w13_scale"].dtype == torch.float8_e8m0fnu
    module = DualStreamMoE.from_tensors(config, layer)
    assert module.w13_scale.dtype == torch.uint8
    assert module.w13_scale.data_ptr() == layer["w13_scale"].data_ptr()
    assert_is_the_reference(module, torch.randn(6, 32), layer)


def test_a_layer_without_a_router_takes_logits() -> None:
    source, x, logits = make("shared"), torch.randn(7, H), torch.randn(7, E)
    given = {name: t for name, t in source.tensors().items() if name != "router_weight"}
    module = DualStreamMoE.from_tensors(source.config, given)
    with torch.no_grad():
        assert torch.equal(module(x, router_logits=logits), source(x, router_logits=logits))
    assert module.prepare() is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t | {"w3": t["w2"]}, "tensors: expected a layer's own, of .*; got also w3"),
        (lambda t: t | {"topk_ids": t["w2"]}, "tensors: expected a layer's own, of .*; got also topk_ids"),
        (lambda t: t | {"w2": None}, "w2: expected a tensor, got NoneType"),
        (lambda t: {n: v for n, v in t.items() if n != "w13"}, "w13: expected a tensor, got NoneType"),
        (lambda t: t | {"w2": t["w2"][0]}, r"w2: expected 3 dims \[E, H, I\], got \[40, 12\]"),
        (lambda t: t | {"w13_scale": t["w13_scale"][:, :3]}, r"w13_scale: expected \[6, 48, 2\] or .*\[6, 3, 2\]"),
        (
            lambda t: {n: v for n, v in t.items() if n != "w2_scale"},
            "w2_scale: expected a tensor for the format 'int4'",
        ),
        (
            lambda t: t | {"router_weight": t["router_weight"][1:]},
            r"router_weight: expected \[E=6, H=40\], got \[5, 40\]",
        ),
    ],
)
def test_tensors_that_no_call_could_run_with_are_refused(change: Any, text: str) -> None:
    module = make("shared").quantize("int4")
    with pytest.raises(ValueError, match=f"^{text}"):
        DualStreamMoE.from_tensors(module.config, change(module.tensors()))
