"""What is timed: the op in its schedules, and others on the same weights, inputs and routing."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsmoe_op import dual_stream_moe
from dsmoe_op.cli import plain, serving_peers
from dsmoe_op.cli.plain import Candidate, Layer, Weights
from dsmoe_op.cli.problem import Problem
from dsmoe_op.cli.shapes import Shape

OURS = "dsmoe_op"
BATCHED_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}
"""Of weights that transformers' batched_mm may copy for a call; beyond them it is left out."""
COMPILED_DTYPES = ("bf16",)
"""Of torch's grouped product under torch.compile."""


def ours(problem: Problem, schedule: str, *, shared: bool = True) -> Candidate:
    """The op; without its shared expert too, for what that one adds."""
    options: dict[str, Any] = {"config": problem.shape.config, "schedule": schedule}

    def layer(x: Tensor, w: Weights) -> Tensor:
        given = problem.tensors(w)
        if not shared:
            given = {name: t for name, t in given.items() if not name.startswith("shared_")}
        return dual_stream_moe(x, **options, **given)

    return Candidate(f"{OURS} {schedule}" if shared else f"{OURS} routed only", lambda: layer)


def _eager(problem: Problem, T: int) -> list[Candidate]:
    grouped = _groups_without_the_host(problem)
    experts = plain.experts_grouped if grouped else plain.experts_in_a_loop
    return [Candidate("eager", lambda: plain.layer(problem.shape.config, experts), grouped)]


def _compiled(problem: Problem, T: int) -> list[Candidate]:
    if problem.dtype not in COMPILED_DTYPES:
        return []
    layer = plain.layer(problem.shape.config, plain.experts_grouped)
    return [Candidate("compiled", lambda: _compile(layer))]


def _native_streams(problem: Problem, T: int) -> list[Candidate]:
    if problem.dtype not in COMPILED_DTYPES or not problem.shape.S:
        return []
    config = problem.shape.config
    return [Candidate("native_streams", lambda: _compile(plain.two_stream_layer(config, plain.experts_grouped)))]


def _transformers(problem: Problem, T: int) -> list[Candidate]:
    shape, gpu = problem.shape, problem.device.type == "cuda"

    def candidates(way: str, captured: bool, compiled: bool) -> list[Candidate]:
        found = [Candidate(f"transformers {way}", lambda: _hf_layer(problem, way), captured)]
        if compiled:
            build = functools.partial(_hf_layer, problem, way, compiled=True)
            found.append(Candidate(f"transformers {way} compiled", lambda: _compile(build()), captured))
        return found

    grouped = _groups_without_the_host(problem)
    found = candidates("grouped_mm", grouped, compiled=grouped)
    if T * shape.K * 3 * shape.H * shape.I * problem.itemsize <= BATCHED_BYTES[problem.device.type]:
        found += candidates("batched_mm", captured=True, compiled=gpu)
    return found if gpu else candidates("eager", captured=False, compiled=False) + found


AGAINST: dict[str, Callable[[Problem, int], list[Candidate]]] = {
    "serial": lambda problem, T: [],  # one of the op's own schedules
    "eager": _eager,
    "compiled": _compiled,
    "transformers": _transformers,
    "native_streams": _native_streams,
    # last: what they import may change how torch behaves
    **{name: functools.partial(serving_peers.candidates, name) for name in serving_peers.PEERS},
}
"""Names of --against."""


def missing(name: str) -> str | None:
    """What to install for a name of AGAINST; None where nothing is missing."""
    if name == "transformers" and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'dsmoe_op[bench]'"
    return serving_peers.missing(name) if name in serving_peers.PEERS else None


def unsupported(name: str, device: torch.device, shapes: Sequence[Shape], dtypes: Sequence[str]) -> str | None:
    """Why a name of AGAINST cannot be timed in all that is asked for; None where it can."""
    if (reason := missing(name)) is not None:
        return reason
    if name in serving_peers.PEERS:
        return serving_peers.unsupported(name, device, shapes, dtypes)
    if name in ("compiled", "native_streams"):
        other = [dtype for dtype in dtypes if dtype not in COMPILED_DTYPES]
        if other:
            return f"{name} is for {', '.join(COMPILED_DTYPES)}, as torch's grouped product, and --dtype is {other[0]}"
    if name == "native_streams":
        if device.type != "cuda":
            return f"native_streams needs a GPU, and --device is {device}"
        without = [shape.name for shape in shapes if not shape.S]
        if without:
            return f"native_streams needs a shared expert, and --shape {without[0]} has none"
    return None


def _groups_without_the_host(problem: Problem) -> bool:
    """torch's grouped product of other dtypes asks the device for its groups, so a graph cannot hold it."""
    return problem.device.type == "cuda" and problem.dtype == "bf16"


def _compile(layer: Layer) -> Layer:
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, dynamic=False)


def _hf_layer(problem: Problem, way: str, *, compiled: bool = False) -> Layer:
    """transformers' experts in the plain layer; one module for each copy of the weights."""
    modules = {id(w13): _hf_experts(problem.shape, w13, w2, way) for w13, w2 in problem.routed}
    first = next(iter(modules.values()))

    def experts(x: Tensor, ids: Tensor, weights: Tensor, w: Weights) -> Tensor:
        return modules[id(w.w13)](x, ids, weights)

    def one_module(x: Tensor, ids: Tensor, weights: Tensor, w: Weights) -> Tensor:
        """For a compiler, which would compile each module anew."""
        given = {"gate_up_proj": w.w13, "down_proj": w.w2}
        return torch.func.functional_call(first, given, (x, ids, weights))

    return plain.layer(problem.shape.config, one_module if compiled else experts)


def _hf_experts(shape: Shape, w13: Tensor, w2: Tensor, way: str) -> torch.nn.Module:
    """The experts of a DeepSeek-V3 block, which are those of all families of gated SiLU experts, on these weights."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

    config = deepseek_v3.DeepseekV3Config(
        hidden_size=shape.H,
        moe_intermediate_size=shape.I,
        n_routed_experts=shape.E,
        num_experts_per_tok=shape.K,
        n_group=1,
        topk_group=1,
    )
    config._experts_implementation = way
    with torch.device("meta"):
        experts = deepseek_v3.DeepseekV3MoE(config).experts
    experts.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w2, requires_grad=False)
    return experts.eval()
