"""The layer as servers run it: their routers, experts and kernels on the benchmark's weights, one adapter each.

Written against vLLM 0.33.0, SGLang 0.5.23 with sglang-kernel 0.4.5, triton_kernels for Triton 3.6 and DeepGEMM 2.8.1.
Nothing of them is imported before an adapter is built, so another version's adapter fails as a candidate of its own.
`vllm` and `sglang` are their Triton experts, in fp8 with the linear layer that each takes for the shared expert;
`triton_kernels` and `deepgemm` have vLLM's router and are called as vLLM does.

Weights are used as they are but for these, which are made at build: triton_kernels' w13, whose gate and up rows
alternate, and for a fused shared expert the routed experts with the shared one's pieces behind them, once for each pair
of copies that the inputs use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsmoe_op.cli import plain, shapes
from dsmoe_op.cli.plain import Candidate, Layer, Weights
from dsmoe_op.cli.problem import Problem, free_bytes
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import GROUP

REPACKED = 0.3
"""Of the free memory, that a candidate may take for weights in a layout of its own; beyond it, it is left out."""
BLOCK = [GROUP, GROUP]
"""Rows and columns of a weight that share an fp8 scale."""

Route = Callable[[Tensor, Weights], tuple[Tensor, Tensor]]
"""topk_weights float32 [T, K] and topk_ids int32 [T, K], in the order in which the servers' experts take them."""
Branches = tuple[Layer, Layer]
"""Routed experts with their router, and the shared expert."""
Fused = dict[tuple[int, int], dict[str, Tensor]]
"""w13 and w2, and in fp8 their scales, of E + S / I experts, by the ids of w13 and shared_w13."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """How one of them is built.

    Attributes:
        packages: that it imports, and how to get them.
        bf16, fp8: whether the routed experts may be bfloat16, and fp8_block.
        max_groups: whether its router has groups that are worth their best expert, without a correction bias.
        build: imports the packages; the result may be called in a graph's capture.
        fused: the whole layer with the shared expert as further routed ones, with the weights of `fused_weights`.
        alternating: whether its w13 is a copy, with alternating gate and up rows.
    """

    packages: tuple[str, ...]
    install: str
    bf16: bool = True
    fp8: bool = True
    max_groups: bool = True
    build: Callable[[Problem], Branches]
    fused: Callable[[Problem, Fused], Layer] | None = None
    alternating: bool = False


def candidates(name: str, problem: Problem, T: int) -> list[Candidate]:
    """One after the other, on two streams, and fused, as far as there are a shared expert and such a peer."""
    peer, shape = PEERS[name], problem.shape
    reason = _not_for(name, shape, problem.dtype) or _router_refuses(peer, shape) or _fp8_refuses(shape)
    reason = reason or _repacked_refuses(problem, peer, T, fused=False)
    if reason is not None:
        return [_left_out(name, reason)]
    build = functools.cache(lambda: peer.build(problem))  # a repacked weight is there once
    found = [Candidate(name, lambda: plain.in_turn(*build()))]
    if shape.S:
        found.append(Candidate(f"{name} two streams", lambda: plain.on_two_streams(*build())))
    if shape.S and peer.fused is not None:
        fused, its_name = peer.fused, f"{name} fused"
        reason = _fused_refuses(shape) or _repacked_refuses(problem, peer, T, fused=True)
        made = Candidate(its_name, lambda: fused(problem, fused_weights(problem, T, alternating=peer.alternating)))
        found.append(made if reason is None else _left_out(its_name, reason))
    return found


# --- what cannot be timed -------------------------------------------------------------------------------------------


def missing(name: str) -> str | None:
    """What to install for a name of PEERS; None where it is there."""
    peer = PEERS[name]
    absent = [package for package in peer.packages if not _installed(package)]
    return f"{name} needs {absent[0]}, which is not installed: {peer.install}" if absent else None


def unsupported(name: str, device: torch.device, shapes: Sequence[Shape], dtypes: Sequence[str]) -> str | None:
    """Why a name of PEERS can be timed nowhere here, or not in a dtype or format that is asked for."""
    if (reason := missing(name)) is not None:
        return reason
    if device.type != "cuda":
        return f"{name} needs a GPU, and --device is {device}"
    reasons = (_not_for(name, shape, dtype) for shape in shapes for dtype in dtypes)
    return next((reason for reason in reasons if reason is not None), None)


def _installed(package: str) -> bool:
    """On its own, or within vLLM, which finds it there too."""
    if importlib.util.find_spec(package) is not None:
        return True
    vllm = importlib.util.find_spec("vllm")
    folders = vllm.submodule_search_locations if vllm is not None else None
    return any((Path(folder) / "third_party" / package).is_dir() for folder in folders or ())


def _left_out(name: str, reason: str) -> Candidate:
    def build() -> Layer:
        raise RuntimeError(reason)

    return Candidate(name, build, left_out=reason)


def _not_for(name: str, shape: Shape, dtype: str) -> str | None:
    peer, formats = PEERS[name], shapes.formats_of(shape)
    if dtype != "bf16":
        return f"{name} is for bf16, and --dtype is {dtype}"
    known = [word for word, has in ((None, peer.bf16), ("fp8_block", peer.fp8)) if has]
    if formats.routed not in known or (shape.S and formats.shared not in (None, "fp8_block")):
        accepted = " and ".join("bf16" if word is None else f"--format {word}" for word in known)
        return f"{name} is for {accepted}, and the format is {formats}"
    return None


_ROUTER_KNOBS = {
    "top_k", "score", "n_group", "topk_group", "group_score", "group_mask", "normalize", "routed_scaling_factor",
    "routed_format", "shared_format",
}  # fmt: skip
"""Fields of MoEConfig that the adapters look at; the others must have their defaults."""


def _router_refuses(peer: Peer, shape: Shape) -> str | None:
    """The first knob that the peer's router, or its experts as they are called here, does not know."""
    config = shape.config
    for field in dataclasses.fields(MoEConfig):
        value = getattr(config, field.name)
        if field.init and field.name not in _ROUTER_KNOBS and value != field.default:
            return f"has no {field.name}={value!r}"
    if config.normalize == "sum_clamp":
        return "has no normalize='sum_clamp'"
    if config.score == "sigmoid":
        if not shape.correction_bias:
            return "has score='sigmoid' with a correction_bias alone"
        if config.n_group is not None and (config.group_score, config.group_mask) != ("top2_sum", "-inf"):
            return f"has no group_score={config.group_score!r} and group_mask={config.group_mask!r} with sigmoid"
        return None
    if config.score != "softmax" or shape.correction_bias:
        return f"has no score={config.score!r}" + (" with a correction_bias" if shape.correction_bias else "")
    if config.n_group is not None and not (peer.max_groups and config.group_score == "max"):
        return f"has no groups with group_score={config.group_score!r} and softmax"
    return None  # scores of softmax are above 0, so that either group_mask is the same


def _fp8_refuses(shape: Shape) -> str | None:
    """Scales stand for blocks of all of w13's rows there, and gate and up rows never share one here."""
    formats = shapes.formats_of(shape)
    sizes = {"H": shape.H, "I": shape.I if formats.routed else 0, "S": shape.S if formats.shared else 0}
    if not formats.rounds_rows:
        return None
    odd = [f"{letter}={size}" for letter, size in sizes.items() if size % GROUP]
    return f"needs multiples of {GROUP} in fp8_block, and {shape.name} has {odd[0]}" if odd else None


def _fused_refuses(shape: Shape) -> str | None:
    return "has no fused shared expert with a gate" if shape.shared_gate else shapes.fused_refuses(shape)


def _repacked_refuses(problem: Problem, peer: Peer, T: int, *, fused: bool) -> str | None:
    routed = problem.routed_bytes * problem.shape.routed_elements
    if fused:
        needed = len(_pairs(problem, T)) * (routed + problem.shared_bytes * problem.shape.shared_elements)
    else:
        needed = problem.routed_copies * routed * 2 / 3 if peer.alternating else 0  # w13 is two thirds
    limit = REPACKED * free_bytes(problem.device)
    if needed <= limit:
        return None
    return f"needs {needed / 1e9:.1f} GB for repacked weights, and may take {limit / 1e9:.1f} GB"


# --- weights --------------------------------------------------------------------------------------------------------


def _pairs(problem: Problem, T: int) -> list[Weights]:
    """Weights of those inputs whose routed or shared experts no input before has."""
    used = map(problem.at, range(problem.count(T)))
    return list({(id(w.w13), id(w.shared_w13)): w for w in used}.values())


def fused_weights(problem: Problem, T: int, *, alternating: bool = False) -> Fused:
    """The S / I pieces of the shared expert, each as wide as a routed expert, behind the routed experts."""
    n = problem.shape.S // problem.shape.I
    found: Fused = {}
    for w in _pairs(problem, T):
        given = problem.tensors(w)
        names = [name for name in ("w13", "w2", "w13_scale", "w2_scale") if name in given]
        its: dict[str, Tensor] = {
            name: _behind(given[name], _pieces(name, given[f"shared_{name}"], n)) for name in names
        }
        if alternating:
            its["w13"] = _alternating(its["w13"])
        found[id(w.w13), id(w.shared_w13)] = its
    return found


def _pieces(name: str, shared: Tensor, n: int) -> Tensor:
    """[2S, H] -> [n, 2S/n, H], each piece with its gate rows first; [H, S] -> [n, H, S/n]; the same for scales."""
    if name.startswith("w13"):
        return shared.unflatten(0, (2, n, -1)).transpose(0, 1).flatten(1, 2)
    return shared.unflatten(1, (n, -1)).transpose(0, 1)


def _behind(routed: Tensor, pieces: Tensor) -> Tensor:
    both = routed.new_empty(len(routed) + len(pieces), *routed.shape[1:])
    both[: len(routed)], both[len(routed) :] = routed, pieces
    return both


def _alternating(w13: Tensor) -> Tensor:
    """[E, 2I, H], gate rows then up rows -> gate and up rows in turn."""
    return torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)


def _fp8_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the servers' Triton experts are told of fp8 weights."""
    if "w13_scale" not in given:
        return {}
    scales = {"w1_scale": given["w13_scale"], "w2_scale": given["w2_scale"]}
    return {"use_fp8_w8a8": True, "block_shape": BLOCK, **scales}


def _shared_expert(
    problem: Problem, silu_and_mul: Callable[[Tensor], Tensor], fp8_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Layer:
    """
    Args:
        silu_and_mul: [T, 2S] -> [T, S].
        fp8_linear: of rows, a weight and its scale.
    """

    def linear(x: Tensor, name: str, given: Mapping[str, Any]) -> Tensor:
        scale = given.get(f"{name}_scale")
        return F.linear(x, given[name]) if scale is None else fp8_linear(x, given[name], scale)

    def call(x: Tensor, w: Weights) -> Tensor:
        given = problem.tensors(w)
        shared = linear(silu_and_mul(linear(x, "shared_w13", given)), "shared_w2", given)
        return plain.gated(shared, x, w)

    return call


# --- vLLM -----------------------------------------------------------------------------------------------------------

_VLLM_MOE = "vllm.model_executor.layers.fused_moe"


def _vllm_router(config: MoEConfig) -> Route:
    """Its kernel for DeepSeek-V3's router, of one group where there are none; its softmax; or DeepSeek-V2's router."""
    normalize, groups = config.normalize != "none", (config.n_group or 1, config.topk_group or 1)
    scale = config.routed_scaling_factor
    if config.score == "sigmoid":
        ops = importlib.import_module("vllm._custom_ops")

        def biased(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
            # the last argument: sigmoid of the logits
            return ops.grouped_topk(
                plain.router_logits(x, w), *groups, config.top_k, normalize, scale, w.correction_bias, 1
            )

        return biased
    if config.n_group is None and scale == 1:
        fused_topk = importlib.import_module(_VLLM_MOE).fused_topk

        def softmax(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
            weights, ids, *_ = fused_topk(x, plain.router_logits(x, w), config.top_k, normalize)
            return weights, ids

        return softmax
    grouped_topk = importlib.import_module(f"{_VLLM_MOE}.router.grouped_topk_router").grouped_topk

    def grouped(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        return grouped_topk(
            hidden_states=x,
            gating_output=plain.router_logits(x, w),
            topk=config.top_k,
            renormalize=normalize,
            num_expert_group=groups[0],
            topk_group=groups[1],
            scoring_func="softmax",
            routed_scaling_factor=scale,
        )

    return grouped


def _vllm_shared(problem: Problem) -> Layer:
    importlib.import_module("vllm._custom_ops")  # loads the kernels

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return out

    fp8 = shapes.formats_of(problem.shape).shared is not None
    return _shared_expert(problem, silu_and_mul, _vllm_fp8_linear() if fp8 else _no_fp8)


def _no_fp8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    raise RuntimeError("no shared expert in fp8 was built")


def _vllm_fp8_linear() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """DeepGEMM's product where vLLM would take it, else its Triton one."""
    fp8_utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    quantise = fp8_utils.per_token_group_quant_fp8

    def by_deep_gemm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(weight))
        rows = quantise(x, GROUP, column_major_scales=True, tma_aligned_scales=True)
        deep_gemm.fp8_gemm_nt(rows, (weight, scale), out)
        return out

    def by_triton(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        rows, rows_scale = quantise(x, GROUP)
        return fp8_utils.w8a8_triton_block_scaled_mm(rows, weight, rows_scale, scale, BLOCK, x.dtype)

    return by_deep_gemm if deep_gemm.is_deep_gemm_supported() else by_triton


def _vllm(problem: Problem) -> Branches:
    experts = importlib.import_module(f"{_VLLM_MOE}.fused_moe").fused_experts_impl
    route = _vllm_router(problem.shape.config)

    def routed(x: Tensor, w: Weights) -> Tensor:
        given, (weights, ids) = problem.tensors(w), route(x, w)
        return experts(x, given["w13"], given["w2"], weights, ids, **_fp8_of(given))

    return routed, _vllm_shared(problem)


# --- SGLang ---------------------------------------------------------------------------------------------------------

_SGLANG_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils"
_Experts = Callable[[Tensor, Mapping[str, Any], Tensor, Tensor], Tensor]


def _sglang_parts(config: MoEConfig) -> tuple[Callable[[Tensor, Weights, int], tuple[Tensor, Tensor]], _Experts]:
    """Its router, with so many experts more that every token has, and its experts, which apply the scaling factor."""
    gate = importlib.import_module("sglang.kernels.ops.moe.moe_fused_gate").moe_fused_gate
    fused_moe = importlib.import_module(f"{_SGLANG_MOE}.fused_moe")
    _as_in_a_server(fused_moe, importlib.import_module(f"{_SGLANG_MOE}.fused_moe_triton_config"))

    def route(x: Tensor, w: Weights, more: int) -> tuple[Tensor, Tensor]:
        return gate(
            plain.router_logits(x, w),
            w.correction_bias,
            config.top_k + more,
            scoring_func=config.score,
            num_fused_shared_experts=more,
            renormalize=config.normalize != "none",
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=False,
            num_expert_group=config.n_group or 1,
            topk_group=config.topk_group or 1,
        )

    def experts(x: Tensor, given: Mapping[str, Any], weights: Tensor, ids: Tensor) -> Tensor:
        return fused_moe.fused_experts_impl(
            x,
            given["w13"],
            given["w2"],
            weights,
            ids,
            filter_expert=False,
            routed_scaling_factor=config.routed_scaling_factor,
            **_fp8_of(given),
        )

    return route, experts


def _as_in_a_server(*modules: types.ModuleType) -> None:
    """What they ask of the server around them, which is not there: one GPU, nothing special."""
    space = types.SimpleNamespace
    flags = space(
        moe=space(enable_fused_moe_sum_all_reduce=False), deterministic=space(enable_deterministic_inference=False)
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_exec": lambda: flags,
        "get_parallel": lambda: space(tp_group=None),
        "is_allocation_symmetric": lambda: False,
        "use_symmetric_memory": lambda *args, **kwargs: contextlib.nullcontext(),
    }
    for module in modules:
        for name, function in answers.items():
            if hasattr(module, name):
                setattr(module, name, function)


def _sglang(problem: Problem) -> Branches:
    route, experts = _sglang_parts(problem.shape.config)
    activation = importlib.import_module("sglang.kernels.ops.activation.activation")

    def routed(x: Tensor, w: Weights) -> Tensor:
        return experts(x, problem.tensors(w), *route(x, w, 0))

    def silu_and_mul(gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        activation.silu_and_mul(gate_up, out)
        return out

    fp8 = shapes.formats_of(problem.shape).shared is not None
    return routed, _shared_expert(problem, silu_and_mul, _sglang_fp8_linear() if fp8 else _no_fp8)


def _sglang_fp8_linear() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The one that it chooses for this machine."""
    linear = importlib.import_module("sglang.srt.layers.quantization.fp8_utils").dispatch_w8a8_block_fp8_linear()
    return lambda x, weight, scale: linear(input=x, weight=weight, block_size=BLOCK, weight_scale=scale)


def _sglang_fused(problem: Problem, weights_of: Fused) -> Layer:
    route, experts = _sglang_parts(problem.shape.config)
    more = problem.shape.S // problem.shape.I

    def call(x: Tensor, w: Weights) -> Tensor:
        return experts(x, weights_of[id(w.w13), id(w.shared_w13)], *route(x, w, more))

    return call


# --- triton_kernels and DeepGEMM, as vLLM calls them ----------------------------------------------------------------


def _triton_kernels_experts() -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Of x, a w13 whose rows alternate, w2, topk_weights and topk_ids; vLLM prepares the ids."""
    glue = importlib.import_module(f"{_VLLM_MOE}.experts.gpt_oss_triton_kernels_moe")
    library = importlib.import_module("triton_kernels.matmul_ogs")
    from dsmoe_op.cli.probes import silu_and_mul

    name, arguments = ("silu_and_mul", silu_and_mul, ("beta",)), (1.0,)
    if "reduction_n" in {field.name for field in dataclasses.fields(library.FnSpecs)}:
        activation = library.FusedActivation(library.FnSpecs(*name, reduction_n=2), arguments)
    else:  # of Triton 3.5, which vLLM brings along
        activation = library.FusedActivation(library.FnSpecs(*name), arguments, 2)

    def experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        routing, gather, scatter = glue.make_routing_data(ids, weights, len(w13))
        product = library.matmul_ogs
        h = product(x, w13.mT, None, routing, gather_indx=gather, fused_activation=activation)
        return product(h, w2.mT, None, routing, scatter_indx=scatter, gammas=routing.gate_scal)

    return experts


def _triton_kernels(problem: Problem) -> Branches:
    experts, route = _triton_kernels_experts(), _vllm_router(problem.shape.config)
    alternating = {id(w13): _alternating(w13) for w13, _ in problem.routed}

    def routed(x: Tensor, w: Weights) -> Tensor:
        return experts(x, alternating[id(w.w13)], w.w2, *route(x, w))

    return routed, _vllm_shared(problem)


def _triton_kernels_fused(problem: Problem, weights_of: Fused) -> Layer:
    experts, route = _triton_kernels_experts(), _vllm_router(problem.shape.config)
    E, n = problem.shape.E, problem.shape.S // problem.shape.I
    more = torch.arange(E, E + n, dtype=torch.int32, device=problem.device)

    def call(x: Tensor, w: Weights) -> Tensor:
        weights, ids = route(x, w)
        given = weights_of[id(w.w13), id(w.shared_w13)]
        ids = torch.cat([ids, more.expand(len(ids), n)], 1)
        return experts(x, given["w13"], given["w2"], F.pad(weights, (0, n), value=1.0), ids)

    return call


def _deepgemm(problem: Problem) -> Branches:
    """vLLM's experts by DeepGEMM: rows are quantised, sorted and padded, and DeepGEMM has the two products."""
    shape = problem.shape
    config = importlib.import_module(f"{_VLLM_MOE}.config")
    experts_of = importlib.import_module(f"{_VLLM_MOE}.experts.deep_gemm_moe").DeepGemmExperts
    silu = importlib.import_module(f"{_VLLM_MOE}.activation").MoEActivation.SILU
    quantise = importlib.import_module(f"{_VLLM_MOE}.utils").moe_kernel_quantize_input
    route = _vllm_router(shape.config)
    # what it reads of a server's configuration
    layer_config = types.SimpleNamespace(
        in_dtype=torch.bfloat16,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        activation_situ_beta=None,
        activation_situ_linear_beta=None,
    )

    def with_scales(given: Mapping[str, Any]) -> Any:
        scales = {"w1_scale": given["w13_scale"], "w2_scale": given["w2_scale"]}
        return experts_of(layer_config, config.fp8_w8a8_moe_quant_config(block_shape=BLOCK, **scales))

    copies = map(problem.at, range(problem.routed_copies))
    experts = {id(w.w13): with_scales(problem.tensors(w)) for w in copies}

    def routed(x: Tensor, w: Weights) -> Tensor:
        given, (weights, ids), its = problem.tensors(w), route(x, w), experts[id(w.w13)]
        rows, scale = quantise(x, None, torch.float8_e4m3fn, False, BLOCK)
        sizes = its.workspace_shapes(len(x), 2 * shape.I, shape.H, shape.K, shape.E, shape.E, None, silu)
        first, second, out = map(x.new_empty, sizes)
        its.apply(
            out, rows, given["w13"], given["w2"], weights, ids, silu, shape.E, None, scale, None, first, second, None,
            False,
        )  # fmt: skip
        return out

    return routed, _vllm_shared(problem)


_FROM_VLLM = "pip install vllm, whose wheel brings it along"
PEERS: dict[str, Peer] = {
    "vllm": Peer(packages=("vllm",), install="pip install vllm", build=_vllm),
    "sglang": Peer(
        packages=("sglang",), install="pip install sglang", max_groups=False, build=_sglang, fused=_sglang_fused
    ),
    "triton_kernels": Peer(
        packages=("vllm", "triton_kernels"),
        install=_FROM_VLLM,
        fp8=False,
        build=_triton_kernels,
        fused=_triton_kernels_fused,
        alternating=True,
    ),
    "deepgemm": Peer(packages=("vllm", "deep_gemm"), install=_FROM_VLLM, bf16=False, build=_deepgemm),
}
VERSIONS = ("vllm", "sglang", "sglang-kernel", "triton-kernels", "deep-gemm")
"""Distributions whose versions belong to their times."""
