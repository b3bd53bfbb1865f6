"""The op under torch.compile: one node a layer, few compiles, nothing of its body traced, the bits of eager."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from layers import WAYS, error, make_layer, routing_of, tensors_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import register_bytecode_hook

from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, ops, route
from dsmoe_op.module import DualStreamMoE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ANY_WAY = pytest.mark.parametrize("way", WAYS)
T_ROWS = ("hidden_states", "router_logits", "topk_ids", "topk_weights")
"""The arguments that have a row for each token."""


class Graphs:
    """A backend that runs AOT's graphs as they are and keeps them: one for each compile."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self._backend = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            graphs.append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return self._backend(gm, example_inputs)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend=self, fullgraph=True)


def nodes(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes of this project's ops."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and str(n.target).startswith("dsmoe.")]


def one_call(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return dual_stream_moe(x, **layer)


def two_calls(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return finalize(dual_stream_moe_unfinalized(x, **layer), config=layer["config"], hidden_states=x)


def routed_apart(x: Tensor, layer: dict[str, Any]) -> Tensor:
    ids, weights = route(x, **routing_of(layer))
    rest = {n: v for n, v in layer.items() if n == "config" or n not in routing_of(layer)}
    return dual_stream_moe(x, **rest, topk_ids=ids, topk_weights=weights)


# --- the graph ------------------------------------------------------------------------------------------------------


@ANY_WAY
def test_a_stack_of_layers_is_one_graph_with_one_node_a_layer(way, device):
    x, first = make_layer(way=way, device=device)
    stack = [first, make_layer(way=way, device=device)[1], make_layer(way=way, device=device)[1]]

    def model(x: Tensor, stack: list[dict[str, Any]]) -> Tensor:
        for layer in stack:
            x = x + dual_stream_moe(torch.tanh(x), **layer)
        return x

    graphs = Graphs()
    out = graphs.compile(model)(x, stack)
    assert torch.equal(out, model(x, stack))
    (graph,) = graphs.forward
    assert [str(n.target) for n in nodes(graph)] == ["dsmoe.moe_v1.default"] * 3


def test_the_other_entries_are_one_node_each(device):
    x, layer = make_layer(device=device)
    for call, names in ((two_calls, ["moe_unfinalized", "finalize"]), (routed_apart, ["route", "moe"])):
        graphs = Graphs()
        assert torch.equal(graphs.compile(call)(x, layer), call(x, layer))
        assert [str(n.target) for n in nodes(graphs.forward[0])] == [f"dsmoe.{name}_v1.default" for name in names]


def test_the_graph_holds_every_tensor_and_the_config_string(device):
    """Complete graphs can be exported, and equal layers deduplicated: no handle, no name of a layer."""
    x, layer = make_layer(device=device, correction_bias=True, shared_gate=True, valid_tokens=3)
    graphs = Graphs()
    graphs.compile(one_call)(x, layer)
    (node,) = nodes(graphs.forward[0])
    given = [a for a in node.args if a is not None]
    assert len([a for a in given if isinstance(a, torch.fx.Node)]) == len(tensors_of(x, layer))
    assert [a for a in given if not isinstance(a, torch.fx.Node)] == [layer["config"].key, "auto"]
    assert not node.kwargs


# --- recompiles -----------------------------------------------------------------------------------------------------

ORDERS = {
    "rising": [0, 1, 2, 3, 64, 65, 1000],
    "falling": [1000, 65, 64, 3, 2, 1, 0],
    "mixed": [3, 1000, 1, 65, 0, 64, 2],
    "two and more": [64, 2, 1000, 3, 65],
}


def count_compiles(call: Callable[..., Tensor], way: str, device: str, mark: Any, sizes: list[int]) -> int:
    _, weights = make_layer(way=way, device=device, E=5)
    graphs = Graphs()
    compiled = graphs.compile(call)
    for T in sizes:
        x, layer = make_layer(T, way=way, device=device, E=5)
        layer = {name: layer[name] if name in T_ROWS else t for name, t in weights.items()}
        for name, t in tensors_of(x, layer).items():
            if name in T_ROWS:
                mark(t, 0)
        assert torch.equal(compiled(x, layer), call(x, layer))
    strings = {a for graph in graphs.forward for n in nodes(graph) for a in n.args if isinstance(a, str)}
    assert strings == {weights["config"].key, "auto"}
    return len(graphs.forward)


@pytest.mark.parametrize("sizes", ORDERS.values(), ids=ORDERS)
@ANY_WAY
def test_one_compile_serves_every_T_from_2_under_mark_dynamic(way, sizes, device):
    """And at most one more each for 0 and 1."""
    found = count_compiles(one_call, way, device, torch._dynamo.mark_dynamic, sizes)
    assert found == 1 + (0 in sizes) + (1 in sizes)


@pytest.mark.parametrize("sizes", ORDERS.values(), ids=ORDERS)
@ANY_WAY
def test_one_compile_serves_every_T_under_mark_unbacked(way, sizes, device):
    assert count_compiles(one_call, way, device, torch._dynamo.decorators.mark_unbacked, sizes) == 1


@pytest.mark.parametrize("call", [two_calls, routed_apart], ids=lambda call: call.__name__)
def test_the_other_entries_compile_as_seldom(call, device):
    sizes = ORDERS["mixed"]
    assert count_compiles(call, "router_weight", device, torch._dynamo.mark_dynamic, sizes) == 3
    assert count_compiles(call, "router_weight", device, torch._dynamo.decorators.mark_unbacked, sizes) == 1


def test_a_T_that_does_not_fit_is_refused_at_run_time_where_its_value_is_unknown(device):
    _, layer = make_layer(way="router_logits", device=device)
    compiled = torch.compile(one_call, backend="aot_eager", fullgraph=True)

    def run(rows: int, logits: int) -> Tensor:
        x, now = make_layer(rows, way="router_logits", device=device)
        now = {**layer, "router_logits": now["router_logits"][:1].repeat(logits, 1)}
        for t in (x, now["router_logits"]):
            torch._dynamo.decorators.mark_unbacked(t, 0)
        return compiled(x, now)

    assert run(3, 3).shape == (3, 48)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        run(5, 4)
    assert run(4, 4).shape == (4, 48)


# --- compile cost ---------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers that each made a config of their own, all equal."""

    def __init__(self, count: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DualStreamMoE(
                MoEConfig(top_k=2, routed_scaling_factor=2.5), 16, 4, 32, shared_intermediate_size=48, device=device
            )
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("count", [1, 16])
def test_all_layers_share_one_config_string_in_one_graph(count, device):
    graphs = Graphs()
    with torch.no_grad():
        graphs.compile(Stack(count, device))(torch.randn(3, 16, device=device))
    (graph,) = graphs.forward
    assert len(nodes(graph)) == count
    assert len({tuple(a for a in n.args if not isinstance(a, torch.fx.Node)) for n in nodes(graph)}) == 1
    others = [n for n in graph.graph.nodes if n.op == "call_function" and n not in nodes(graph)]
    assert len(others) == count  # the additions


def test_one_compiled_layer_serves_all_layers(device):
    """Compiled one by one, as for a model with hundreds of them, 16 layers are one compile."""
    graphs, stack = Graphs(), Stack(16, device)
    for layer in stack.layers:
        layer.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        stack(torch.randn(3, 16, device=device))
    assert len(graphs.forward) == 1


# --- where the config is made ---------------------------------------------------------------------------------------


def test_a_config_may_be_made_inside_the_compiled_function(device):
    x, layer = make_layer(device=device)
    layer.pop("config")

    def made_here(x: Tensor, layer: dict[str, Any]) -> Tensor:
        config = MoEConfig(top_k=3, n_group=4, topk_group=2, routed_scaling_factor=2.5, combine="average")
        return dual_stream_moe(x, config=config, **layer)

    graphs = Graphs()
    assert torch.equal(graphs.compile(made_here)(x, layer), made_here(x, layer))
    config = MoEConfig(top_k=3, n_group=4, topk_group=2, routed_scaling_factor=2.5, combine="average")
    assert nodes(graphs.forward[0])[0].args[-2] == config.key


def test_a_bad_config_made_inside_the_compiled_function_is_refused_with_the_same_text(device):
    x, layer = make_layer(device=device)
    layer.pop("config")

    def made_here(x: Tensor, layer: dict[str, Any]) -> Tensor:
        return dual_stream_moe(x, config=MoEConfig(top_k=3, routed_scaling_factor=float("nan")), **layer)

    with pytest.raises(Exception, match="routed_scaling_factor: expected a finite number, got nan"):
        torch.compile(made_here, backend="eager", fullgraph=True)(x, layer)


def test_equal_configs_share_a_compile_and_another_config_makes_one(device):
    graphs = Graphs()
    compiled = graphs.compile(one_call)
    for top_k in (3, 3, 3, 2, 2):
        x, layer = make_layer(device=device, config=MoEConfig(top_k=top_k))
        assert torch.equal(compiled(x, layer), one_call(x, layer))
    assert len(graphs.forward) == 2

    def replaced(x: Tensor, layer: dict[str, Any]) -> Tensor:
        return dual_stream_moe(x, **{**layer, "config": dataclasses.replace(layer["config"], top_k=1)})

    assert torch.equal(graphs.compile(replaced)(x, layer), replaced(x, layer))


# --- Dynamo stays out of the op's body ------------------------------------------------------------------------------


@contextlib.contextmanager
def frames_that_dynamo_compiles() -> Iterator[list[tuple[str, str]]]:
    """(file, function) of each."""
    frames: list[tuple[str, str]] = []
    hook = register_bytecode_hook(lambda code, _: frames.append((code.co_filename, code.co_name)))
    try:
        yield frames
    finally:
        hook.remove()


class Region:
    """A context that Dynamo knows nothing of."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def in_a_skipped_frame(op: Any, args: tuple[Any, ...]) -> Any:
    """A graph break inside a `with` makes Dynamo skip this frame, yet look at each that it calls."""
    with Region():
        torch._dynamo.graph_break()
        return op(*args)


def in_a_frame_disabled_alone(op: Any, args: tuple[Any, ...]) -> Any:
    @torch._dynamo.disable(recursive=False)
    def alone(args: tuple[Any, ...]) -> Any:
        return op(*args)

    return alone(args)


SITES = pytest.mark.parametrize("site", [in_a_skipped_frame, in_a_frame_disabled_alone], ids=lambda site: site.__name__)


@SITES
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_no_frame_of_an_op_is_compiled(mode, site, device):
    """Grad reaches an op through its Autograd kernel, inference mode goes past that one."""
    x, layer = make_layer(device=device)
    layer["shared_w2"].requires_grad_()
    tensors = tensors_of(x, layer)
    key = layer["config"].key
    moe = (x, *(tensors.get(name) for name in ops.LAYER_FIELDS[1:16]), key, "auto")
    with torch.no_grad():
        pieces = torch.ops.dsmoe.moe_unfinalized_v1.default(*moe)
    for name, args in {
        "moe_v1": moe,
        "moe_unfinalized_v1": moe,
        "finalize_v1": (*pieces, None, key),
        "route_v1": (x, layer["router_weight"], None, None, None, key),
    }.items():
        op = getattr(torch.ops.dsmoe, name).default
        torch._dynamo.reset()
        with frames_that_dynamo_compiles() as frames, mode():
            torch.compile(site, backend="eager")(op, args)
        assert [frame for frame in frames if frame[0] != __file__] == [], name


def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


GUARDS = {"none": plainly, "the project's": ops._hide_from_dynamo, "torch's": torch.compiler.disable}


@SITES
@pytest.mark.parametrize("guard", GUARDS)
def test_an_unguarded_kernel_is_compiled_at_both_sites_and_a_guarded_one_is_not(guard, site):
    """What the guard is for, on an op made here: this fails where the sites, or the list of frames, show nothing."""

    def kernel(x: Tensor) -> Tensor:
        return x * 2 + 1

    library = torch.library.Library("dsmoe_guard_test", "FRAGMENT")
    name = f"{site.__name__}_{list(GUARDS).index(guard)}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, GUARDS[guard](kernel), "CPU")
    torch.library.register_fake(f"dsmoe_guard_test::{name}", lambda x: torch.empty_like(x), lib=library)
    op = getattr(torch.ops.dsmoe_guard_test, name).default
    with frames_that_dynamo_compiles() as frames:
        torch.compile(site, backend="eager")(op, (torch.ones(3),))
    assert ("kernel" in [function for _, function in frames]) == (guard == "none")


def test_the_guard_falls_back_to_torchs_own(monkeypatch):
    """Where a torch lacks the names that the fast guard takes."""
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    hidden = ops._hide_from_dynamo(lambda x: x + 1)
    with frames_that_dynamo_compiles() as frames:
        out = torch.compile(in_a_skipped_frame, backend="eager")(hidden, (torch.ones(3),))
    assert torch.equal(out, torch.full((3,), 2.0))
    assert [function for _, function in frames if function == "<lambda>"] == []


# --- autograd and modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "ops_in_graph"), [(one_call, 1), (two_calls, 2), (routed_apart, 2)])
def test_forward_runs_where_weights_require_grad_and_backward_is_refused(call, ops_in_graph, device):
    """People call models without no_grad; AOT then traces a backward, which must not raise while it is traced."""
    x, layer = make_layer(device=device)
    expected = call(x, layer)
    for name in ("w13", "w2", "router_weight", "shared_w13", "shared_w2"):
        layer[name] = layer[name].clone().requires_grad_()
    graphs = Graphs()
    out = graphs.compile(lambda x, layer: call(x, layer) * 1.0)(x, layer)
    assert torch.equal(out, expected)
    assert out.requires_grad
    assert len(nodes(graphs.forward[0])) == ops_in_graph
    with pytest.raises(NotImplementedError, match=r"^dsmoe::\w+_v1 has no backward\. Call it under torch\.no_grad"):
        out.sum().backward()
    assert layer["w13"].grad is None
    assert torch.equal(graphs.compile(call)(x, layer), expected)


def test_modes_of_autograd_change_no_bit(device):
    x, layer = make_layer(device=device)
    expected = dual_stream_moe(x, **layer)
    layer["w13"].requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        graphs = Graphs()
        with mode():
            assert torch.equal(graphs.compile(one_call)(x, layer), expected)
        assert len(graphs.forward) == 1


def test_autocast_changes_nothing(device):
    x, layer = make_layer(device=device)
    expected = dual_stream_moe(x, **layer)

    def under_autocast(x: Tensor, layer: dict[str, Any]) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return dual_stream_moe(x, **layer)

    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(Graphs().compile(one_call)(x, layer), expected)
    assert torch.equal(Graphs().compile(under_autocast)(x, layer), expected)


# --- Inductor -------------------------------------------------------------------------------------------------------


def test_inductor_gives_the_op_what_eager_gives_it(inductor):
    """Strides made inside the graph, which Inductor lays out as it likes."""
    _, layer = make_layer(way="topk_ids", device=inductor)

    def model(x: Tensor, layer: dict[str, Any]) -> Tensor:
        padded = nn.functional.pad(x + 1, (8, 24))[:, 8:-24]
        swapped = (x.mT.contiguous() * 3).mT
        transposed = {**layer, "w13": (layer["w13"].mT.contiguous() * 0.5).mT}
        return dual_stream_moe(padded, **layer) + dual_stream_moe(swapped, **transposed)

    compiled = torch.compile(model, fullgraph=True)
    for T in (7, 2, 65):
        x, rows = make_layer(T, way="topk_ids", device=inductor)
        layer |= {name: rows[name] for name in ("topk_ids", "topk_weights")}
        for t in (x, layer["topk_ids"], layer["topk_weights"]):
            torch._dynamo.mark_dynamic(t, 0)
        halved = {**layer, "w13": layer["w13"] * 0.5}
        expected = dual_stream_moe(x + 1, **layer) + dual_stream_moe(x * 3, **halved)
        assert error(compiled(x, layer), expected) < 1e-5


def test_inductor_of_no_tokens_and_of_one(inductor):
    for T in (0, 1):
        x, layer = make_layer(T, device=inductor)
        out = torch.compile(lambda x, layer: dual_stream_moe(x * 2, **layer) + 1, fullgraph=True)(x, layer)
        assert error(out, dual_stream_moe(x * 2, **layer) + 1) < 1e-5
        assert out.shape == (T, 48)
