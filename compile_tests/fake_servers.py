"""Stand-ins for vLLM, SGLang, triton_kernels and DeepGEMM: the functions that the benchmark calls, in plain torch.

Each computes what its arguments mean there: weights [E, out, in] with gate rows first (alternating for triton_kernels,
whose weights are [E, in, out]), a float32 scale for each block of 128 rows and columns, ids of int32, and the shared
expert's ids behind the routed experts'.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

MOE = "vllm.model_executor.layers.fused_moe"
SGLANG_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils"
E4M3 = torch.float8_e4m3fn


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes them importable, all of them or those that are named."""
    for name, content in modules().items():
        package = name.partition(".")[0]
        if not packages or package in packages:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            vars(module).update(content)
            for value in content.values():
                if hasattr(value, "its_module"):
                    value.its_module.append(module)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace(silu_and_mul=_silu_and_mul_into_first), raising=False)


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _dequantised(w: Tensor, scale: Tensor | None) -> Tensor:
    """Without a scale an fp8 number is what it is."""
    if scale is None:
        return w.float()
    *_, rows, columns = w.shape
    assert scale.dtype == torch.float32
    assert scale.shape[-2:] == (-(-rows // 128), -(-columns // 128)), (scale.shape, w.shape)
    return w.float() * scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    return (groups / scale.unsqueeze(-1)).to(E4M3).flatten(-2), scale


def _rows(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale.repeat_interleave(128, -1)


def _round_trip(x: Tensor) -> Tensor:
    return _rows(*_quantised(x))


def _mlp(x: Tensor, w13: Tensor, w2: Tensor, quantises: bool) -> Tensor:
    """Of float32 weights, gate rows first; the rows between have x's dtype, and are quantised where x was."""
    gate, up = (x.float() @ w13.T).chunk(2, -1)
    h = (F.silu(gate) * up).bfloat16()
    return (_round_trip(h) if quantises else h.float()) @ w2.T


def _experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, s13: Tensor | None, s2: Tensor | None
) -> Tensor:  # fmt: skip
    """[T, H] float32: the weighted sum over K."""
    assert weights.shape == ids.shape
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert 0 <= int(ids.min()) <= int(ids.max()) < len(w13)
    assert all(t.is_contiguous() for t in (x, w13, w2))
    out = torch.zeros(x.shape, dtype=torch.float32)
    rows = x if s13 is None else _round_trip(x)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        its = [_dequantised(w[e], None if s is None else s[e]) for w, s in ((w13, s13), (w2, s2))]
        out.index_add_(0, token, _mlp(rows[token], *its, s13 is not None) * weights[token, slot, None])
    return out


def _route(scores: Tensor, bias: Any, K: int, groups: int, kept: int, best: int, normalize: bool) -> tuple[Any, Any]:
    """Weights and ids; a group is worth its `best` best sums of score and bias."""
    choice = scores + bias
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        worth = grouped.topk(best).values.sum(-1)
        lost = torch.ones_like(worth, dtype=torch.bool).scatter(1, worth.topk(kept).indices, False)
        choice = grouped.masked_fill(lost[..., None], -torch.inf).flatten(1)
    ids = choice.topk(K).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, ids.int()


def _silu_and_mul_into_first(out: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def _silu_and_mul_into_second(x: Tensor, out: Tensor) -> None:
    _silu_and_mul_into_first(out, x)


def _told_fp8(use_fp8_w8a8: bool, w1_scale: Any, w2_scale: Any, block_shape: Any) -> tuple[Any, Any]:
    if not use_fp8_w8a8:
        return None, None
    assert block_shape == [128, 128]
    return w1_scale, w2_scale


# --- vLLM -----------------------------------------------------------------------------------------------------------


def _vllm_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu",
    apply_router_weight_on_input: bool = False, use_fp8_w8a8: bool = False, w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None, block_shape: list[int] | None = None,
) -> Tensor:  # fmt: skip
    scales = _told_fp8(use_fp8_w8a8, w1_scale, w2_scale, block_shape)
    return _experts(hidden_states, w1, w2, topk_weights, topk_ids, *scales).to(hidden_states.dtype)


def _vllm_grouped_topk_kernel(
    scores: Tensor, num_expert_group: int, topk_group: int, topk: int, renormalize: bool, routed_scaling_factor: float,
    bias: Tensor, scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = scores.sigmoid() if scoring_func == 1 else scores
    weights, ids = _route(scores, bias, topk, num_expert_group, topk_group, 2, renormalize)
    return weights * routed_scaling_factor, ids


def _vllm_grouped_topk(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, num_expert_group: int = 0,
    topk_group: int = 0, scoring_func: str = "softmax", routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = gating_output.softmax(-1) if scoring_func == "softmax" else gating_output.sigmoid()
    biased = e_score_correction_bias is not None
    bias, best = e_score_correction_bias if biased else 0, 2 if biased else 1
    weights, ids = _route(scores, bias, topk, num_expert_group, topk_group, best, renormalize)
    return weights * routed_scaling_factor, ids


def _vllm_fused_topk(
    hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, indices_type: Any = None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = gating_output.softmax(-1) if scoring_func == "softmax" else gating_output.sigmoid()
    weights, ids = _route(scores, 0, topk, 1, 1, 1, renormalize)
    return weights, ids, torch.zeros_like(ids)


def _per_token_group_quant_fp8(
    x: Tensor, group_size: int, column_major_scales: bool = False, tma_aligned_scales: bool = False
) -> tuple[Tensor, Tensor]:
    assert group_size == 128
    q, scale = _quantised(x)
    return q, scale.T.contiguous().T if column_major_scales else scale


def _fp8_gemm_nt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> None:
    assert a[1].stride(0) == 1, "DeepGEMM: scales of rows in columns"
    out.copy_(_rows(*a) @ _dequantised(*b).T)


def _w8a8_triton_block_scaled_mm(
    A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: list[int], output_dtype: torch.dtype = torch.float16
) -> Tensor:
    assert block_size == [128, 128]
    assert As.is_contiguous()
    return (_rows(A, As) @ _dequantised(B, Bs).T).to(output_dtype)


def _quantize_input(
    A: Tensor, A_scale: Any, quant_dtype: torch.dtype, per_act_token_quant: bool, block_shape: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    assert (A_scale, quant_dtype, per_act_token_quant, block_shape) == (None, E4M3, False, [128, 128])
    return _quantised(A)


class _DeepGemmExperts:
    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        assert quant_config.block_shape == [128, 128]
        self.moe_config, self.quant_config = moe_config, quant_config

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: str,
    ) -> tuple[tuple[int, ...], ...]:  # fmt: skip
        assert self.moe_config.in_dtype == torch.bfloat16
        rows = -(-M * topk // 128) * 128 + local_num_experts * 128
        return (rows, max(N // 2, K) // 2), (rows, max(N, K)), (M, K)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: str, global_num_experts: int, expert_map: Any, a1q_scale: Tensor, a2_scale: Any,
        workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        assert (activation, expert_map, a2_scale, apply_router_weight_on_input) == ("silu", None, None, False)
        T, N, K = len(hidden_states), w1.shape[1], w1.shape[2]
        needed = self.workspace_shapes(T, N, K, topk_ids.shape[1], len(w1), len(w1), None, activation)
        assert [tuple(workspace13.shape), tuple(workspace2.shape), tuple(output.shape)] == list(needed)
        x = _rows(hidden_states, a1q_scale)
        scales = self.quant_config.w1_scale, self.quant_config.w2_scale
        output.copy_(_experts(x, w1, w2, topk_weights, topk_ids, *scales))


# --- triton_kernels -------------------------------------------------------------------------------------------------


def _make_routing_data(topk_ids: Tensor, topk_weights: Tensor, num_local_experts: int) -> tuple[Any, Any, Any]:
    order = topk_ids.flatten().sort(stable=True).indices
    counts = topk_ids.flatten().bincount(minlength=num_local_experts).tolist()
    assert len(counts) == num_local_experts
    routing = types.SimpleNamespace(
        gate_scal=topk_weights.bfloat16().flatten()[order], counts=counts, n_expts_act=topk_ids.shape[1]
    )
    return routing, types.SimpleNamespace(rows=order // topk_ids.shape[1]), types.SimpleNamespace(slots=order)


@dataclasses.dataclass(frozen=True)
class _FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]
    fn_arg_do_not_specialize: tuple[str, ...] = ()
    reduction_n: int = 1


@dataclasses.dataclass(frozen=True)
class _FusedActivation:
    specs: Any
    fn_args: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class FnSpecsOf35:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]
    fn_arg_do_not_specialize: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FusedActivationOf35:
    specs: Any
    fn_args: tuple[Any, ...] = ()
    reduction_n: int = 1


def _matmul_ogs(
    x: Tensor, w: Tensor, bias: Any, routing_data: Any = None, gather_indx: Any = None, scatter_indx: Any = None,
    gammas: Tensor | None = None, fused_activation: Any = None,
) -> Tensor:  # fmt: skip
    """Rows of expert after expert; y[t] is the sum of its K rows where they are scattered."""
    rows = x if gather_indx is None else x[gather_indx.rows]
    assert bias is None
    assert (rows.shape[1], len(w)) == (w.shape[1], len(routing_data.counts))
    parts = rows.float().split(routing_data.counts)
    y = torch.cat([part @ its.float() for part, its in zip(parts, w, strict=True)])
    if fused_activation is not None:
        specs = fused_activation.specs
        assert getattr(specs, "reduction_n", getattr(fused_activation, "reduction_n", None)) == 2
        assert (specs.fn.fn.__name__, specs.fn_arg_names) == ("silu_and_mul", ("beta",))
        gate, up = y[:, 0::2], y[:, 1::2]
        y = gate * torch.sigmoid(fused_activation.fn_args[0] * gate) * up
    if gammas is not None:
        y = y * gammas.float()[:, None]
    if scatter_indx is not None:
        slots = torch.empty_like(y)
        slots[scatter_indx.slots] = y
        y = slots.unflatten(0, (-1, routing_data.n_expts_act)).sum(1)
    return y.to(x.dtype)


# --- SGLang ---------------------------------------------------------------------------------------------------------


def _sglang_gate(
    scores: Tensor, bias: Tensor | None, topk: int, scoring_func: str = "sigmoid", num_fused_shared_experts: int = 0,
    renormalize: bool = True, routed_scaling_factor: float = 1.0, apply_routed_scaling_factor_on_output: bool = False,
    moe_softcapping: float = 0.0, num_expert_group: int = 1, topk_group: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """topk counts the shared ones; without the factor in the weights, those of the shared ones are one over it."""
    assert bias is not None or scoring_func == "softmax"
    K, (T, E) = topk - num_fused_shared_experts, scores.shape
    found = scores.sigmoid() if scoring_func == "sigmoid" else scores.softmax(-1)
    weights, ids = _route(found, 0 if bias is None else bias, K, num_expert_group, topk_group, 2, renormalize)
    inside = routed_scaling_factor if apply_routed_scaling_factor_on_output else 1.0
    shared = torch.full((T, num_fused_shared_experts), inside / routed_scaling_factor)
    more = torch.arange(E, E + num_fused_shared_experts, dtype=torch.int32).expand(T, -1)
    return torch.cat([weights * inside, shared], 1), torch.cat([ids, more], 1)


def _not_published() -> None:
    raise ValueError("config namespace 'exec' not published")


class _SglangExperts:
    """Asks the server around it by the functions of its module, as they are at the call."""

    its_module: list[Any]

    def __init__(self) -> None:
        self.its_module = []

    def __call__(
        self, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        filter_expert: bool = True, routed_scaling_factor: float | None = None, use_fp8_w8a8: bool = False,
        w1_scale: Tensor | None = None, w2_scale: Tensor | None = None, block_shape: list[int] | None = None,
    ) -> Tensor:  # fmt: skip
        server = self.its_module[-1]
        assert not server.get_exec().moe.enable_fused_moe_sum_all_reduce
        assert (
            not sys.modules[f"{SGLANG_MOE}.fused_moe_triton_config"]
            .get_exec()
            .deterministic.enable_deterministic_inference
        )
        with server.use_symmetric_memory(server.get_parallel().tp_group, disabled=not server.is_allocation_symmetric()):
            scales = _told_fp8(use_fp8_w8a8, w1_scale, w2_scale, block_shape)
        out = _experts(hidden_states, w1, w2, topk_weights, topk_ids, *scales)
        return (out * (1.0 if routed_scaling_factor is None else routed_scaling_factor)).to(hidden_states.dtype)


def _sglang_linear(
    input: Tensor, weight: Tensor, block_size: list[int], weight_scale: Tensor, input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert (block_size, input_scale, bias) == ([128, 128], None, None)
    return (_round_trip(input) @ _dequantised(weight, weight_scale).T).to(input.dtype)


# --- all ------------------------------------------------------------------------------------------------------------


def modules() -> dict[str, dict[str, Any]]:
    """Names of modules, with what is in them."""

    def config(*, w1_scale: Tensor, w2_scale: Tensor, block_shape: list[int]) -> Any:
        return types.SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale, block_shape=block_shape)

    asked: dict[str, Callable[..., Any]] = {"get_exec": _not_published}
    server = asked | dict.fromkeys(("get_parallel", "is_allocation_symmetric", "use_symmetric_memory"), _not_published)
    return {
        "vllm": {},
        "vllm._custom_ops": {"grouped_topk": _vllm_grouped_topk_kernel},
        MOE: {"fused_topk": _vllm_fused_topk},
        f"{MOE}.fused_moe": {"fused_experts_impl": _vllm_experts},
        f"{MOE}.router.grouped_topk_router": {"grouped_topk": _vllm_grouped_topk},
        f"{MOE}.config": {"fp8_w8a8_moe_quant_config": config},
        f"{MOE}.activation": {"MoEActivation": types.SimpleNamespace(SILU="silu")},
        f"{MOE}.utils": {"moe_kernel_quantize_input": _quantize_input},
        f"{MOE}.experts.deep_gemm_moe": {"DeepGemmExperts": _DeepGemmExperts},
        f"{MOE}.experts.gpt_oss_triton_kernels_moe": {"make_routing_data": _make_routing_data},
        "vllm.model_executor.layers.quantization.utils.fp8_utils": {
            "per_token_group_quant_fp8": _per_token_group_quant_fp8,
            "w8a8_triton_block_scaled_mm": _w8a8_triton_block_scaled_mm,
        },
        "vllm.utils.deep_gemm": {"is_deep_gemm_supported": lambda: True, "fp8_gemm_nt": _fp8_gemm_nt},
        "deep_gemm": {},
        "triton_kernels": {},
        "triton_kernels.matmul_ogs": {
            "FnSpecs": _FnSpecs,
            "FusedActivation": _FusedActivation,
            "matmul_ogs": _matmul_ogs,
        },
        "sglang": {},
        "sglang.kernels.ops.moe.moe_fused_gate": {"moe_fused_gate": _sglang_gate},
        "sglang.kernels.ops.activation.activation": {"silu_and_mul": _silu_and_mul_into_second},
        f"{SGLANG_MOE}.fused_moe": server | {"fused_experts_impl": _SglangExperts()},
        f"{SGLANG_MOE}.fused_moe_triton_config": asked,
        "sglang.srt.layers.quantization.fp8_utils": {"dispatch_w8a8_block_fp8_linear": lambda: _sglang_linear},
    }
