"""load_block: each layout of a released checkpoint, packed here from its convention and read from a file on disk.

Oracle: a plain float64 layer on the weights that the tensors stand for, which are known before they are packed.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsmoe_op import MoEConfig, dual_stream_moe, load_block

T, H, E, K, I, S = 7, 160, 5, 2, 192, 96
PREFIX = "model.layers.3.mlp."
CONFIG = MoEConfig(top_k=K, routed_scaling_factor=2.5)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Parts = dict[str, Tensor]
Layout = Callable[[int, int], tuple[Parts, Tensor]]
"""(rows, columns) -> tensors by the end of their key, and the weight that they stand for in float64."""
EXACT, FP8_ROWS, BFLOAT16 = 1e-5, 8e-2, 2e-2
"""Of the error, where only weights are quantised; where the op quantises rows too; where x is bfloat16."""


# --- a linear layer in each convention ------------------------------------------------------------------------------


def factor(*shape: int) -> Tensor:
    """Far enough apart that one taken for another shows."""
    return torch.exp2(torch.empty(shape).uniform_(-1, 1))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[R, K] of 4 bits -> [R, K * 4 / bits], the first number lowest."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] * 4 // bits), dtype=np.uint32)
    for i in range(bits // 4):
        words |= numbers[:, i :: bits // 4].numpy().astype(np.uint32) << 4 * i
    return torch.from_numpy(words.astype(np.uint8) if bits == 8 else words.view(np.int32))


def blown_up(scale: Tensor, rows: int, columns: int, tall: int, wide: int) -> Tensor:
    """scale[r // tall, c // wide] for each number of [rows, columns]."""
    return scale.double()[torch.arange(rows) // tall][:, torch.arange(columns) // wide]


def e4m3(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 64).to(E4M3)


def e2m1(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and what they stand for: sign, two bits of exponent, one of mantissa."""
    codes = torch.randint(0, 16, (rows, columns))
    sign, exponent, mantissa = 1 - 2 * (codes >> 3), codes >> 1 & 3, codes & 1
    return codes, sign * torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)).double()


def fp8_block(suffix: str, dtype: torch.dtype) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        q = e4m3(rows, columns)
        scale = factor(math.ceil(rows / 128), math.ceil(columns / 128)) / 64 / columns**0.5
        if dtype == E8M0:
            scale = torch.exp2(scale.log2().round())
        scale = scale.to(dtype)
        return {"weight": q, suffix: scale}, q.double() * blown_up(scale.float(), rows, columns, 128, 128)

    return make


def fp8_rows(rows: int, columns: int) -> tuple[Parts, Tensor]:
    q, scale = e4m3(rows, columns), (factor(rows, 1) / 64 / columns**0.5).bfloat16()
    return {"weight": q, "weight_scale": scale}, q.double() * scale.double()


def fp8_rows_flat(rows: int, columns: int) -> tuple[Parts, Tensor]:
    parts, w = fp8_rows(rows, columns)
    return parts | {"weight_scale": parts["weight_scale"].flatten().float()}, w


def fp8_tensor(scale_suffix: str, input_suffix: str | None, *shape: int) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        q, scale = e4m3(rows, columns), factor(*shape) / 64 / columns**0.5
        parts = {"weight": q, scale_suffix: scale}
        if input_suffix is not None:
            parts[input_suffix] = factor(*shape) * (256 if rows == H else 16) / 448
        return parts, q.double() * scale.double()

    return make


def int4(group: int, *, zero_points: bool, scale_dtype: torch.dtype) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        groups = math.ceil(columns / group)
        q, scale = torch.randint(0, 16, (rows, columns)), (factor(rows, groups) / 4 / columns**0.5).to(scale_dtype)
        zero = torch.full((rows, groups), 8)
        parts = {"weight_packed": pack(q, 32), "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
        if zero_points:
            zero = torch.randint(5, 11, (rows, groups))
            parts["weight_zero_point"] = pack(zero.T, 32).T.contiguous()
            parts["weight_g_idx"] = (torch.arange(columns) // group).int()
        return parts, (q - blown_up(zero, rows, columns, 1, group)) * blown_up(scale, rows, columns, 1, group)

    return make


def nvfp4(*, divides: bool) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        codes, value = e2m1(rows, columns)
        scale = (factor(rows, columns // 16) * 100).to(E4M3)
        global_scale = factor(1) / 300 / columns**0.5
        w = value * blown_up(scale.float(), rows, columns, 1, 16) * global_scale.double()
        packed, other = pack(codes, 8), torch.rand(1)
        if divides:
            names = {"weight_packed": packed, "weight_global_scale": 1 / global_scale, "input_global_scale": other}
        else:
            names = {"weight": packed, "weight_scale_2": global_scale.squeeze(0), "input_scale": other.squeeze(0)}
        return names | {"weight_scale": scale}, w

    return make


def mxfp4(q_suffix: str, scale_suffix: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        codes, value = e2m1(rows, columns)
        exponent = torch.randint(-1, 2, (rows, columns // 32)) - round(math.log2(3 * columns**0.5))
        scale = (exponent + 127).to(torch.uint8).view(scale_dtype)
        w = value * blown_up(2.0 ** exponent.double(), rows, columns, 1, 32)
        return {q_suffix: pack(codes, 8).view(dtype), scale_suffix: scale}, w

    return make


def plain(dtype: torch.dtype) -> Layout:
    def make(rows: int, columns: int) -> tuple[Parts, Tensor]:
        w = (torch.randn(rows, columns) / columns**0.5).to(dtype)
        return {"weight": w}, w.double()

    return make


LAYOUTS: dict[str, tuple[Layout, str | None, float]] = {
    "DeepSeek fp8": (fp8_block("weight_scale_inv", torch.float32), "fp8_block", FP8_ROWS),
    "fp8 with e8m0 scales": (fp8_block("weight_scale_inv", E8M0), "fp8_block", FP8_ROWS),
    "compressed-tensors fp8 block": (fp8_block("weight_scale", torch.bfloat16), "fp8_block", FP8_ROWS),
    "compressed-tensors fp8 channel": (fp8_rows, "fp8_channel", FP8_ROWS),
    "fp8 channel, one dim": (fp8_rows_flat, "fp8_channel", FP8_ROWS),
    "compressed-tensors fp8 tensor": (fp8_tensor("weight_scale", "input_scale", 1), "fp8_tensor", FP8_ROWS),
    "fp8 tensor, dynamic rows": (fp8_tensor("weight_scale", None, 1), "fp8_channel", FP8_ROWS),
    "ModelOpt fp8": (fp8_tensor("weight_scale", "input_scale"), "fp8_tensor", FP8_ROWS),
    "transformers fp8 tensor": (fp8_tensor("weight_scale_inv", "activation_scale"), "fp8_tensor", FP8_ROWS),
    "int4 of 32": (int4(32, zero_points=False, scale_dtype=torch.bfloat16), "int4", EXACT),
    "int4 of 64 with zero points": (int4(64, zero_points=True, scale_dtype=torch.float16), "int4", EXACT),
    "compressed-tensors nvfp4": (nvfp4(divides=True), "nvfp4", EXACT),
    "ModelOpt nvfp4": (nvfp4(divides=False), "nvfp4", EXACT),
    "compressed-tensors mxfp4": (mxfp4("weight_packed", "weight_scale", torch.uint8, torch.uint8), "mxfp4", EXACT),
    "DeepSeek fp4": (mxfp4("weight", "scale", torch.int8, E8M0), "mxfp4", EXACT),
    "not quantised": (plain(torch.float32), None, EXACT),
}
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
NATIVE = {"gate": "w1", "up": "w3", "down": "w2"}
Weights = dict[str, list[Tensor]]
""""0", "1", ... and "shared" -> gate, up and down in float64."""


def linears(layout: Layout, width: int, owner: str, names: dict[str, str]) -> tuple[Parts, list[Tensor]]:
    """The three linear layers of one expert by key, and their weights."""
    state, weights = {}, []
    for name, (rows, columns) in {"gate": (width, H), "up": (width, H), "down": (H, width)}.items():
        parts, w = layout(rows, columns)
        state |= {f"{PREFIX}{owner}.{names[name]}.{suffix}": t for suffix, t in parts.items()}
        weights.append(w)
    return state, weights


def block(
    routed: Layout, shared: Layout | None = None, names: dict[str, str] = NAMES, shared_name: str = "shared_experts"
) -> tuple[Parts, Weights]:  # fmt: skip
    """A checkpoint with one block, its router and tensors beside the block; and the weights."""
    state = router()
    weights = {}
    for e in range(E):
        its, weights[str(e)] = linears(routed, I, f"experts.{e}", names)
        state |= its
    if shared is not None:
        its, weights["shared"] = linears(shared, S, shared_name, names)
        state |= its
    return state, weights


def router(dtype: torch.dtype = torch.float32) -> Parts:
    """With keys that begin much as those of the block do."""
    return {
        f"{PREFIX}gate.weight": (torch.randn(E, H) / H**0.5).to(dtype),
        "model.layers.3.mlp_norm.weight": torch.rand(H),
        "model.layers.30.mlp.gate.weight": torch.rand(E, H),
        "model.layers.3.self_attn.q_proj.weight_packed": torch.zeros(3, 2, dtype=torch.int32),
    }


def saved(state: Parts, folder: pathlib.Path) -> Parts:
    save_file(state, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def assert_same(tensors: Parts, others: Parts) -> None:
    assert tensors.keys() == others.keys()
    for name, t in tensors.items():
        assert (t.dtype, t.shape) == (others[name].dtype, others[name].shape)
        assert torch.equal(t.flatten().view(torch.uint8), others[name].flatten().view(torch.uint8)), name


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def expected(
    x: Tensor, state: Parts, weights: Weights, *, correction: Tensor | None = None,
    act: Callable[[Tensor, Tensor], Tensor] = silu, biases: dict[str, list[Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """The block in float64: sigmoid scores, the best K, their sum 1, times 2.5."""
    x = x.double()
    scores = torch.sigmoid(x @ state[f"{PREFIX}gate.weight"].double().T)
    ids = (scores if correction is None else scores + correction.double()).topk(K).indices
    out = torch.zeros_like(x)
    for t in range(len(x)):
        total = scores[t, ids[t]].sum()
        for e in ids[t].tolist():
            gate, up, down = weights[str(e)]
            its = biases[str(e)] if biases else [torch.zeros(1)] * 3
            h = act(gate @ x[t] + its[0], up @ x[t] + its[1])
            out[t] += 2.5 * scores[t, e] / total * (down @ h + its[2])
        if "shared" in weights:
            gate, up, down = weights["shared"]
            out[t] += down @ silu(gate @ x[t], up @ x[t])
    return out


def assert_close(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = float((out.double() - wanted).norm() / wanted.norm())
    assert error < tolerance, f"relative error {error:.2e}"


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_op_computes_what_a_checkpoint_of_this_layout_stands_for(layout, tmp_path):
    make, name, tolerance = LAYOUTS[layout]
    state, weights = block(make, make)
    config, tensors = load_block(saved(state, tmp_path), PREFIX, config=CONFIG)
    assert (config.routed_format, config.shared_format) == (name, name)
    x = torch.randn(T, H)
    assert_close(dual_stream_moe(x, config=config, **tensors), expected(x, state, weights), tolerance)


@pytest.mark.parametrize(
    ("routed", "shared"),
    [("int4 of 32", None), (None, "DeepSeek fp8"), ("ModelOpt nvfp4", "ModelOpt fp8")],
    ids=["Kimi-K2.5", "quantised shared alone", "two formats"],
)
def test_routed_and_shared_experts_have_formats_of_their_own(routed, shared, tmp_path):
    bfloat16 = (plain(torch.bfloat16), None, BFLOAT16)
    (make, name, _), (shared_make, shared_name, _) = (LAYOUTS.get(layout, bfloat16) for layout in (routed, shared))
    state, weights = block(make, shared_make)
    config, tensors = load_block(saved(state, tmp_path), PREFIX, config=CONFIG)
    assert (config.routed_format, config.shared_format) == (name, shared_name)
    x = torch.randn(T, H).bfloat16()
    tolerance = FP8_ROWS if shared else BFLOAT16
    assert_close(dual_stream_moe(x, config=config, **tensors), expected(x, state, weights), tolerance)


def test_names_of_deepseeks_own_are_known(tmp_path):
    """w1 is gate, w3 up, w2 down, scale the scale, gate.bias the correction bias."""
    routed, shared = LAYOUTS["DeepSeek fp4"][0], fp8_block("scale", E8M0)
    state, weights = block(routed, shared, NATIVE)
    state[f"{PREFIX}gate.bias"] = correction = torch.rand(E)
    config, tensors = load_block(saved(state, tmp_path), PREFIX, config=CONFIG)
    assert (config.routed_format, config.shared_format) == ("mxfp4", "fp8_block")
    x = torch.randn(T, H)
    wanted = expected(x, state, weights, correction=correction)
    assert_close(dual_stream_moe(x, config=config, **tensors), wanted, FP8_ROWS)


def fused(parts: list[list[Parts]], name: str, suffixes: dict[str, str]) -> Parts:
    """[E][gate, up] or [E][down] -> one tensor of each kind for all experts."""
    return {
        f"{PREFIX}experts.{name}{suffix}": torch.stack([torch.cat([part[kind] for part in its]) for its in parts])
        for kind, suffix in suffixes.items()
    }


def fused_block(layout: Layout, suffixes: dict[str, str]) -> tuple[Parts, Weights]:
    """Routed experts alone, as transformers holds them."""
    gate_up, down, weights = [], [], {}
    for e in range(E):
        made = [layout(*shape) for shape in ((I, H), (I, H), (H, I))]
        weights[str(e)] = [w for _, w in made]
        gate_up.append([parts for parts, _ in made[:2]])
        down.append([made[2][0]])
    return router() | fused(gate_up, "gate_up_proj", suffixes) | fused(down, "down_proj", suffixes), weights


FUSED: dict[str, tuple[Layout, str | None, float]] = {
    "fp8": (fp8_block("scale", torch.float32), "fp8_block", FP8_ROWS),
    "fp8, e8m0": (fp8_block("scale", E8M0), "fp8_block", FP8_ROWS),
    "fp8, one scale a half": (fp8_tensor("scale", None, 1, 1), "fp8_channel", FP8_ROWS),
    "fp4": (mxfp4("weight", "scale", torch.int8, E8M0), "mxfp4", EXACT),
    "not quantised": (plain(torch.float32), None, EXACT),
}


@pytest.mark.parametrize("layout", FUSED)
def test_tensors_of_all_experts_are_taken_as_transformers_holds_them(layout, tmp_path):
    make, name, tolerance = FUSED[layout]
    state, weights = fused_block(make, {"weight": ""} if name is None else {"weight": "", "scale": "_scale_inv"})
    loaded = saved(state, tmp_path)
    config, tensors = load_block(loaded, PREFIX, config=CONFIG)
    assert config.routed_format == name
    assert tensors["w13"].data_ptr() == loaded[f"{PREFIX}experts.gate_up_proj"].data_ptr()
    x = torch.randn(T, H)
    assert_close(dual_stream_moe(x, config=config, **tensors), expected(x, state, weights), tolerance)


def test_blocks_may_run_from_gate_rows_into_up_rows():
    """transformers has ceil(2I / 128) of them: 3 here, where gate and up rows have 2 each on their own."""
    w13, scale = e4m3(E * 2 * I, H).view(E, 2 * I, H), factor(E, 3, 2) / 64 / H**0.5
    down = [fp8_block("scale", torch.float32)(H, I) for _ in range(E)]
    state = router() | fused([[parts] for parts, _ in down], "down_proj", {"weight": "", "scale": "_scale_inv"})
    state |= {f"{PREFIX}experts.gate_up_proj": w13, f"{PREFIX}experts.gate_up_proj_scale_inv": scale}
    gate_up = [w13[e].double() * blown_up(scale[e], 2 * I, H, 128, 128) for e in range(E)]
    weights = {str(e): [gate_up[e][:I], gate_up[e][I:], down[e][1]] for e in range(E)}
    config, tensors = load_block(state, PREFIX, config=CONFIG)
    x = torch.randn(T, H)
    assert_close(dual_stream_moe(x, config=config, **tensors), expected(x, state, weights), FP8_ROWS)


def test_static_scales_of_all_experts_are_taken_as_transformers_holds_them():
    suffixes = {"weight": "", "scale": "_scale_inv"}
    state, weights = fused_block(fp8_tensor("scale", None, 1, 1), suffixes)
    state[f"{PREFIX}experts.gate_up_proj_activation_scale"] = factor(E) * 16 / 448
    state[f"{PREFIX}experts.down_proj_activation_scale"] = factor(E) * 256 / 448
    config, tensors = load_block(state, PREFIX, config=CONFIG)
    assert config.routed_format == "fp8_tensor"
    x = torch.randn(T, H)
    assert_close(dual_stream_moe(x, config=config, **tensors), expected(x, state, weights), FP8_ROWS)


def oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def test_gate_and_up_rows_of_gpt_oss_alternate(tmp_path):
    linear, prefix = mxfp4("blocks", "scales", torch.uint8, torch.uint8), f"{PREFIX}experts."
    made = [[linear(I, H), linear(I, H), linear(H, I)] for _ in range(E)]
    weights = {str(e): [w for _, w in its] for e, its in enumerate(made)}
    biases = {str(e): [torch.randn(n).bfloat16() for n in (I, I, H)] for e in range(E)}
    state = router(torch.bfloat16)
    state[f"{PREFIX}router.weight"] = state[f"{PREFIX}gate.weight"]
    for kind in ("blocks", "scales"):
        gate, up, down = (torch.stack([its[i][0][kind] for its in made]) for i in range(3))
        both = torch.empty(E, 2 * I, gate.shape[2], dtype=torch.uint8)
        both[:, 0::2], both[:, 1::2] = gate, up
        if kind == "blocks":
            both, down = both.view(E, 2 * I, H // 32, 16), down.view(E, H, I // 32, 16)
        state |= {f"{prefix}gate_up_proj_{kind}": both, f"{prefix}down_proj_{kind}": down}
    both = torch.empty(E, 2 * I, dtype=torch.bfloat16)
    for e, (gate, up, _) in enumerate(biases.values()):
        both[e, 0::2], both[e, 1::2] = gate, up
    state |= {
        f"{prefix}gate_up_proj_bias": both,
        f"{prefix}down_proj_bias": torch.stack([b[2] for b in biases.values()]),
    }
    loaded = saved({key: t for key, t in state.items() if key != f"{PREFIX}gate.weight"}, tmp_path)
    given = MoEConfig(top_k=K, routed_scaling_factor=2.5, activation="swiglu_oai", clamp_routed=7.0)
    config, tensors = load_block(loaded, PREFIX, config=given)
    assert (config.routed_format, config.w13_order) == ("mxfp4", "interleaved")
    assert tensors["w13"].data_ptr() == loaded[f"{prefix}gate_up_proj_blocks"].data_ptr()
    x = torch.randn(T, H).bfloat16()
    assert_close(
        dual_stream_moe(x, config=config, **tensors), expected(x, state, weights, act=oai, biases=biases), BFLOAT16
    )


def test_experts_without_a_gate_have_up_rows_alone(tmp_path):
    state, weights = block(LAYOUTS["ModelOpt nvfp4"][0])
    state = {key: t for key, t in state.items() if ".gate_proj." not in key}
    config, tensors = load_block(
        saved(state, tmp_path), PREFIX, config=MoEConfig(top_k=K, routed_scaling_factor=2.5, activation="relu2")
    )
    assert tensors["w13_global_scale"].shape == (E,)
    x = torch.randn(T, H)
    wanted = expected(x, state, weights, act=lambda gate, up: up.relu() ** 2)
    assert_close(dual_stream_moe(x, config=config, **tensors), wanted, EXACT)


def test_a_static_scale_of_gates_and_ups_input_is_the_larger_of_the_two():
    state, _ = block(LAYOUTS["ModelOpt fp8"][0], LAYOUTS["ModelOpt fp8"][0])
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    for e in range(E):
        gate, up, down = (state[f"{PREFIX}experts.{e}.{name}.input_scale"] for name in NAMES.values())
        assert tensors["w13_input_scale"][e] == max(gate, up)
        assert tensors["w2_input_scale"][e] == down
    gate, up, down = (state[f"{PREFIX}shared_experts.{name}.input_scale"] for name in NAMES.values())
    assert tensors["shared_w13_input_scale"] == max(gate, up)
    assert tensors["shared_w2_input_scale"] == down


def test_static_scales_mean_one_scale_a_tensor_where_a_block_would_be_as_large():
    state = {
        "experts.gate_up_proj": e4m3(E * 2 * S, 112).view(E, 2 * S, 112),
        "experts.gate_up_proj_scale_inv": factor(E, 2, 1),
        "experts.gate_up_proj_activation_scale": factor(E),
        "experts.down_proj": e4m3(E * 112, S).view(E, 112, S),
        "experts.down_proj_scale_inv": factor(E, 1, 1),
        "experts.down_proj_activation_scale": factor(E),
    }
    config, tensors = load_block(state, config=CONFIG)
    assert config.routed_format == "fp8_tensor"
    assert torch.equal(tensors["w13_scale"], state["experts.gate_up_proj_scale_inv"].squeeze(-1))


@pytest.mark.parametrize(
    ("key", "argument", "shape"),
    [
        ("router.weight", "router_weight", (E, H)),
        ("router.bias", "router_bias", (E,)),
        ("gate.e_score_correction_bias", "correction_bias", (E,)),
        ("e_score_correction_bias", "correction_bias", (E,)),
        ("shared_expert_gate.weight", "shared_gate", (1, H)),
    ],
)
def test_the_router_and_the_gate_of_the_shared_expert_are_taken_where_they_are(key, argument, shape):
    state, _ = block(plain(torch.bfloat16), plain(torch.bfloat16), shared_name="shared_expert")
    if argument == "router_weight":
        del state[f"{PREFIX}gate.weight"]
    state[PREFIX + key] = given = torch.randn(shape)
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    assert torch.equal(tensors[argument], given)


def test_an_order_of_columns_may_say_nothing():
    state, _ = block(LAYOUTS["int4 of 32"][0])
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    with_(experts__3__up_proj__weight_g_idx=torch.full((H,), -1, dtype=torch.int32))(state)
    _, others = load_block(state, PREFIX, config=CONFIG)
    assert_same(others, tensors)


# --- the state dict -------------------------------------------------------------------------------------------------


def test_a_prefix_may_lack_its_dot_and_may_be_empty():
    state, _ = block(LAYOUTS["int4 of 32"][0])
    its = {key.removeprefix(PREFIX): t for key, t in state.items() if key.startswith(PREFIX)}
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    for given, prefix in ((state, PREFIX[:-1]), (its, "")):
        _, others = load_block(given, prefix, config=CONFIG)
        assert_same(others, tensors)


def test_a_state_dict_keeps_its_tensors_unless_they_are_consumed():
    state, _ = block(LAYOUTS["ModelOpt nvfp4"][0], LAYOUTS["DeepSeek fp8"][0])
    before = dict(state)
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    assert state.keys() == before.keys()
    assert all(state[key] is before[key] for key in state)
    _, others = load_block(state, PREFIX, config=CONFIG, consume=True)
    assert state.keys() == {key for key in before if not key.startswith(PREFIX)}
    assert_same(others, tensors)


def test_each_tensor_is_let_go_before_the_next_expert_is_read():
    alive: list[int] = []

    class State(dict):
        def __getitem__(self, key):
            if key.endswith("down_proj.weight"):
                alive.append(sum(name.endswith("down_proj.weight") for name in self))
            return super().__getitem__(key)

    state, _ = block(LAYOUTS["DeepSeek fp8"][0])
    load_block(State(state), PREFIX, config=CONFIG, consume=True)
    assert alive[-E:] == list(range(E, 0, -1))


def test_a_mapping_that_reads_the_file_will_do(tmp_path):
    class Lazy(Mapping):
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getitem__(self, key):
            return self.file.get_tensor(key)

        def __iter__(self):
            return iter(self.file.keys())

        def __len__(self):
            return len(self.file.keys())

    state, _ = block(LAYOUTS["DeepSeek fp8"][0])
    save_file(state, tmp_path / "model.safetensors")
    _, tensors = load_block(state, PREFIX, config=CONFIG)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        _, others = load_block(Lazy(file), PREFIX, config=CONFIG)
    assert_same(others, tensors)


def test_parameters_become_plain_tensors():
    state, _ = block(plain(torch.float32), plain(torch.float32))
    given = {key: torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for key, t in state.items()}
    _, tensors = load_block(given, PREFIX, config=CONFIG)
    assert not any(t.requires_grad or isinstance(t, torch.nn.Parameter) for t in tensors.values())


def test_a_device_may_be_given():
    state, _ = block(LAYOUTS["DeepSeek fp4"][0], LAYOUTS["DeepSeek fp8"][0])
    _, tensors = load_block(state, PREFIX, config=CONFIG, device="meta")
    assert {t.device.type for t in tensors.values()} == {"meta"}


# --- what is refused ------------------------------------------------------------------------------------------------


def without(*ends: str) -> Callable[[Parts], None]:
    def change(state: Parts) -> None:
        for key in [key for key in state if key.startswith(PREFIX) and any(end in key for end in ends)]:
            del state[key]

    return change


def with_(**tensors: Tensor) -> Callable[[Parts], None]:
    """A name's double underscores are dots."""
    return lambda state: state.update({PREFIX + name.replace("__", "."): t for name, t in tensors.items()})


def other_linear(layout: str, name: str, shape: tuple[int, int]) -> Callable[[Parts], None]:
    def change(state: Parts) -> None:
        without(f"{name}.")(state)
        state.update({f"{PREFIX}{name}.{suffix}": t for suffix, t in LAYOUTS[layout][0](*shape)[0].items()})

    return change


EXPERT, GATE = "experts.3.up_proj", "experts.0.gate_proj"
REFUSED: dict[str, tuple[str, Callable[[Parts], None], str]] = {
    "an expert is missing": ("DeepSeek fp8", without("experts.2."), "experts.2: expected a weight named gate_proj"),
    "a linear layer is missing": ("DeepSeek fp8", without(f"{EXPERT}."), "experts.3: expected a weight named up_proj"),
    "a weight is missing": ("int4 of 32", without(f"{EXPERT}.weight_packed"), f"{EXPERT}: expected a weight, got "),
    "a scale is missing": ("DeepSeek fp8", without(f"{EXPERT}.weight_scale"), f"{EXPERT}: expected a scale of its"),
    "a global scale is missing": (
        "ModelOpt nvfp4", without(f"{EXPERT}.weight_scale_2"), f"{EXPERT}: expected a global scale of its nvfp4 weight"
    ),
    "no experts": ("DeepSeek fp8", without("experts."), "experts: expected the tensors of experts, got none"),
    "an unknown key": (
        "ModelOpt nvfp4", with_(experts__3__up_proj__pre_quant_scale=torch.rand(H)), f"{EXPERT}.pre_quant_scale: "
    ),
    "a bias of the gate that may be either": (
        "DeepSeek fp8", with_(gate__bias=torch.rand(E)), "gate.bias: expected keys of a MoE block"
    ),
    "two weights": (
        "int4 of 32", with_(experts__3__up_proj__weight=torch.rand(I, H)), f"{EXPERT}.weight: expected one tensor"
    ),
    "experts one by one and all in one": (
        "DeepSeek fp8", with_(experts__down_proj=torch.rand(E, H, I)), "experts.down_proj: expected one of the two, got"
    ),
    "two shared experts": (
        "DeepSeek fp8", with_(shared_expert__w3__weight=torch.rand(S, H)), "shared_experts.gate_proj: expected one of"
    ),
    "an expert in another format": (
        "DeepSeek fp8", other_linear("ModelOpt nvfp4", EXPERT, (I, H)),
        f"{EXPERT}: expected a fp8_block weight as {PREFIX}{GATE} has, got a nvfp4 weight",
    ),
    "an expert that is not quantised": (
        "DeepSeek fp8", other_linear("not quantised", EXPERT, (I, H)), f"{EXPERT}: expected a fp8_block weight as"
    ),
    "an expert with other groups": (
        "int4 of 32", other_linear("int4 of 64 with zero points", EXPERT, (I, H)), f"{EXPERT}.weight_scale: expected"
    ),
    "an expert of another size": (
        "DeepSeek fp8", other_linear("DeepSeek fp8", EXPERT, (S, H)), f"{EXPERT}.weight: expected float8_e4m3fn [192"
    ),
    "w2 in another format": (
        "DeepSeek fp8",
        lambda state: [other_linear("ModelOpt nvfp4", f"experts.{e}.down_proj", (H, I))(state) for e in range(E)],
        "experts.0.down_proj: expected a fp8_block weight as",
    ),
    "w2 of another size": (
        "DeepSeek fp8",
        lambda state: [other_linear("DeepSeek fp8", f"experts.{e}.down_proj", (H, S))(state) for e in range(E)],
        "experts.0.down_proj.weight: expected [160, 192], got [160, 96]",
    ),
    "a shared expert of another H": (
        "DeepSeek fp8",
        lambda state: [other_linear("DeepSeek fp8", f"shared_experts.{n}_proj", (S, I))(state) for n in ("gate", "up")],
        "shared_experts.gate_proj.weight: expected [S, H=160], got [96, 192]",
    ),
    "columns in another order": (
        "int4 of 32", with_(experts__3__up_proj__weight_g_idx=torch.arange(H).flip(0).int() // 32),
        f"{EXPERT}.weight_g_idx: expected groups of 32 neighbouring columns",
    ),
    "8 bits in int32": (
        "int4 of 32", with_(experts__3__up_proj__weight_shape=torch.tensor([I, H // 2])),
        f"{EXPERT}.weight_shape: expected [192, 160] of 4 bits a number, got [192, 80]",
    ),
    "groups of 16": (
        "int4 of 32", with_(experts__3__up_proj__weight_scale=torch.rand(I, H // 16)),
        f"{EXPERT}.weight_scale: expected [192, 5] or [192, 3] or [192, 2], got [192, 10]",
    ),
    "unpacked zero points": (
        "int4 of 64 with zero points", with_(experts__3__up_proj__weight_zero_point=torch.ones(I, 3, dtype=torch.int8)),
        f"{EXPERT}.weight_zero_point: expected int32 or uint8, got int8",
    ),
    "int8 weights": (
        "fp8 channel, one dim", with_(experts__3__up_proj__weight=torch.ones(I, H, dtype=torch.int8)),
        f"{EXPERT}.weight_scale: expected float8_e4m3fn or float8_e8m0fnu or uint8 beside a int8 weight, got float32",
    ),
    "e5m2 weights": (
        "DeepSeek fp8", with_(experts__3__up_proj__weight=torch.rand(I, H).to(torch.float8_e5m2)),
        f"{EXPERT}.weight: expected float8_e4m3fn or int32 or uint8",
    ),
    "static scales beside blocks": (
        "DeepSeek fp8", with_(experts__3__up_proj__input_scale=torch.rand(())),
        f"{EXPERT}.input_scale: expected none beside a fp8_block weight",
    ),
    "scales beside a weight that is not quantised": (
        "not quantised", with_(experts__3__up_proj__weight_scale=torch.rand(I, 1)),
        f"{EXPERT}.weight_scale: expected none beside a float32 weight",
    ),
    "a quantised router": (
        "DeepSeek fp8", with_(gate__weight=torch.rand(E, H).to(E4M3)), "gate.weight: expected bfloat16 or float16 or"
    ),
    "fewer experts than the router has": (
        "DeepSeek fp8", with_(gate__weight=torch.rand(E + 1, H)), f"gate.weight: expected {E} rows for so many experts"
    ),
    "a bias of the shared expert": (
        "not quantised", with_(shared_experts__down_proj__bias=torch.rand(H)),
        "shared_experts.down_proj.bias: expected no bias of the shared expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_block_that_the_op_does_not_take_is_refused_by_key_and_nothing_is_taken_out(what):
    layout, change, text = REFUSED[what]
    state, _ = block(LAYOUTS[layout][0], LAYOUTS[layout][0])
    change(state)
    before = dict(state)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is compared below)
        load_block(state, PREFIX, config=CONFIG, consume=True)
    assert str(error.value).startswith(PREFIX + text)
    assert state.keys() == before.keys()


def test_a_gate_of_experts_whose_activation_has_none_is_refused():
    state, _ = block(LAYOUTS["DeepSeek fp8"][0])
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj: expected up and down weights, got this one too"):
        load_block(state, PREFIX, config=MoEConfig(top_k=K, activation="relu2"))


@pytest.mark.parametrize(
    ("name", "t", "text"),
    [
        ("gate_up_proj", torch.zeros(2 * I, H).to(E4M3), "gate_up_proj: expected 3 dims, got [384, 160]"),
        ("down_proj", torch.zeros(E + 1, H, I).to(E4M3), "down_proj_scale_inv: expected 6 experts, got"),
        ("down_proj_activation_scale", torch.ones(E), "down_proj_activation_scale: expected none beside a fp8_block"),
        ("gate_up_proj_scale_inv", torch.ones(E, 5, 2), "gate_up_proj_scale_inv: expected [5, 4, 2] or [5, 3, 2], got"),
        ("gate_up_proj", torch.zeros(E, 2 * H, I).to(E4M3), "down_proj: expected [192, 160], got [160, 192]"),
    ],
)
def test_tensors_of_all_experts_that_do_not_fit_are_refused_by_key(name, t, text):
    state, _ = fused_block(fp8_block("scale", torch.float32), {"weight": "", "scale": "_scale_inv"})
    state[f"{PREFIX}experts.{name}"] = t
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is compared below)
        load_block(state, PREFIX, config=CONFIG)
    assert str(error.value).startswith(f"{PREFIX}experts.{text}")


def test_another_number_of_experts_in_w2_is_refused():
    state, _ = fused_block(plain(torch.float32), {"weight": ""})
    state[f"{PREFIX}experts.down_proj"] = torch.rand(E + 1, H, I)
    with pytest.raises(ValueError, match=r"experts\.down_proj: expected 5 experts as \S*gate_up_proj has, got 6"):
        load_block(state, PREFIX, config=CONFIG)


def test_tensors_can_not_be_taken_out_of_what_is_no_dict():
    state, _ = block(plain(torch.float32))
    with pytest.raises(ValueError, match="consume: expected False unless state_dict is a dict, got a mappingproxy"):
        load_block(MappingProxyType(state), PREFIX, config=CONFIG, consume=True)


def test_what_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match=r"^state_dict: expected a mapping from keys to tensors, got str$"):
        load_block("model.safetensors", PREFIX, config=CONFIG)
