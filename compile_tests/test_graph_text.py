"""The graphs that functorch's tracers see, pinned: AOT's and make_fx's, on fake CUDA tensors also where no GPU is."""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch import make_fx
from functorch.compile import aot_function, make_boxed_func
from layers import WAYS, make_layer, routing_of, tensors_of
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, route

FAKE_DEVICES = pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
TRACERS = pytest.mark.parametrize("tracer", ["make_fx", "aot_function"])


def text(graph: fx.Graph) -> str:
    """A node with its type and its arguments, those of this project's ops by name; arguments left out are not shown."""
    shown_as: dict[Any, str] = {}

    def typed(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return ", ".join(map(typed, value))
        return f"{str(value.dtype)[6:]}[{', '.join(map(str, value.shape))}] {value.device.type}"

    def shown(argument: Any) -> str:
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(map(shown, argument))}]"
        return shown_as.get(argument, repr(argument))

    lines = []
    for node in graph.nodes:
        if node.target is operator.getitem:
            shown_as[node] = f"{node.args[0]}[{node.args[1]}]"
        elif node.op == "placeholder":
            lines.append(f"{node}: {typed(node.meta['val'])}")
        elif node.op == "output":
            lines.append(f"return {shown(node.args[0])}")
        else:
            arguments = [shown(a) for a in node.args]
            if str(node.target).startswith("dsmoe."):
                names = [a.name for a in node.target._schema.arguments]
                arguments = [f"{n}={shown(a)}" for n, a in zip(names, node.args, strict=False) if a is not None]
            lines.append(f"{node} = {node.target}({', '.join(arguments)}): {typed(node.meta['val'])}")
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in text.split("\n"))


def trace(tracer: str, call: Callable[..., Any], x: Tensor, layer: dict[str, Any]) -> fx.Graph:
    """The graph of call(x, layer), its inputs in the order of the layer's tensors."""
    tensors = tensors_of(x, layer)

    def flat(*values: Tensor) -> Any:
        x, *rest = values
        return call(x, {**layer, **dict(zip(list(tensors)[1:], rest, strict=True))})

    if tracer == "make_fx":
        return make_fx(flat)(*tensors.values()).graph
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    aot_function(flat, fw_compiler=keep, bw_compiler=keep)(*tensors.values())
    graph = graphs[0]
    (output,) = (n for n in graph.nodes if n.op == "output")
    if len(output.args[0]) == 1:  # AOT returns a list of one where make_fx returns the value
        output.args = tuple(output.args[0])
    return graph


def trace_fakes(tracer: str, call: Callable[..., Any], fake_device: str, **options: Any) -> str:
    """The text of the graph of call on fake tensors, without the device, which is the same all over."""
    x, layer = make_layer(**{"dtype": torch.bfloat16, **options})
    with FakeTensorMode():

        def fake(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=fake_device)

        layer = {n: fake(v) if isinstance(v, Tensor) else v for n, v in layer.items()}
        graph = trace(tracer, call, fake(x), layer)
    whole = text(graph)
    assert set(re.findall(r"\] (cpu|cuda|meta)\b", whole)) == {fake_device}
    return wrapped(whole.replace(f"] {fake_device}", "]"))


def layer_between(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return dual_stream_moe(x * 2, **layer) + 1


@TRACERS
@FAKE_DEVICES
def test_a_layer_is_one_node_with_every_tensor(fake_device, tracer):
    options = {"correction_bias": True, "shared_gate": True, "valid_tokens": 5}
    assert_expected_inline(
        trace_fakes(tracer, layer_between, fake_device, **options),
        """\
arg0_1: bfloat16[7, 48]
arg1_1: bfloat16[12, 64, 48]
arg2_1: bfloat16[12, 48, 32]
arg3_1: bfloat16[12, 48]
arg4_1: float32[12]
arg5_1: bfloat16[160, 48]
arg6_1: bfloat16[48, 80]
arg7_1: bfloat16[1, 48]
arg8_1: int32[1]
mul = aten.mul.Tensor(arg0_1, 2): bfloat16[7, 48]
moe_v1 = dsmoe.moe_v1.default(hidden_states=mul, w13=arg1_1, w2=arg2_1, router_weight=arg3_1,
    correction_bias=arg4_1, shared_w13=arg5_1, shared_w2=arg6_1, shared_gate=arg7_1, num_valid_tokens=arg8_1,
    config='{"routed_scaling_factor":2.5,"top_k":3}', schedule='auto'): bfloat16[7, 48]
add = aten.add.Tensor(moe_v1, 1): bfloat16[7, 48]
return add""",
    )


@TRACERS
@FAKE_DEVICES
def test_way_in_router_logits(fake_device, tracer):
    assert_expected_inline(
        trace_fakes(tracer, layer_between, fake_device, way="router_logits", S=0),
        """\
arg0_1: bfloat16[7, 48]
arg1_1: bfloat16[12, 64, 48]
arg2_1: bfloat16[12, 48, 32]
arg3_1: bfloat16[7, 12]
mul = aten.mul.Tensor(arg0_1, 2): bfloat16[7, 48]
moe_v1 = dsmoe.moe_v1.default(hidden_states=mul, w13=arg1_1, w2=arg2_1, router_logits=arg3_1,
    config='{"routed_scaling_factor":2.5,"top_k":3}', schedule='auto'): bfloat16[7, 48]
add = aten.add.Tensor(moe_v1, 1): bfloat16[7, 48]
return add""",
    )


@TRACERS
@FAKE_DEVICES
def test_way_in_topk_ids(fake_device, tracer):
    assert_expected_inline(
        trace_fakes(tracer, layer_between, fake_device, way="topk_ids", S=0, E_global=20),
        """\
arg0_1: bfloat16[7, 48]
arg1_1: bfloat16[12, 64, 48]
arg2_1: bfloat16[12, 48, 32]
arg3_1: int32[7, 3]
arg4_1: float32[7, 3]
arg5_1: int32[20]
mul = aten.mul.Tensor(arg0_1, 2): bfloat16[7, 48]
moe_v1 = dsmoe.moe_v1.default(hidden_states=mul, w13=arg1_1, w2=arg2_1, topk_ids=arg3_1, topk_weights=arg4_1,
    expert_map=arg5_1, config='{"routed_scaling_factor":2.5,"top_k":3}', schedule='auto'): bfloat16[7, 48]
add = aten.add.Tensor(moe_v1, 1): bfloat16[7, 48]
return add""",
    )


@TRACERS
@FAKE_DEVICES
def test_deferred_finalize(fake_device, tracer):
    def call(x: Tensor, layer: dict[str, Any]) -> Tensor:
        return finalize(dual_stream_moe_unfinalized(x, **layer), config=layer["config"], hidden_states=x)

    options = {"T": (2, 3), "config": MoEConfig(top_k=3, num_zero_experts=2)}
    assert_expected_inline(
        trace_fakes(tracer, call, fake_device, **options),
        """\
arg0_1: bfloat16[2, 3, 48]
arg1_1: bfloat16[12, 64, 48]
arg2_1: bfloat16[12, 48, 32]
arg3_1: bfloat16[14, 48]
arg4_1: bfloat16[160, 48]
arg5_1: bfloat16[48, 80]
moe_unfinalized_v1 = dsmoe.moe_unfinalized_v1.default(hidden_states=arg0_1, w13=arg1_1, w2=arg2_1,
    router_weight=arg3_1, shared_w13=arg4_1, shared_w2=arg5_1, config='{"num_zero_experts":2,"top_k":3}',
    schedule='auto'): bfloat16[18, 48], int32[6, 3], float32[6, 3], int32[6, 3], bfloat16[6, 48]
finalize_v1 = dsmoe.finalize_v1.default(y=moe_unfinalized_v1[0], topk_ids=moe_unfinalized_v1[1],
    topk_weights=moe_unfinalized_v1[2], row_of=moe_unfinalized_v1[3], shared=moe_unfinalized_v1[4],
    hidden_states=arg0_1, config='{"num_zero_experts":2,"top_k":3}'): bfloat16[2, 3, 48]
return finalize_v1""",
    )


@FAKE_DEVICES
def test_route(fake_device):
    def call(x: Tensor, layer: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return route(x, **routing_of(layer))

    assert_expected_inline(
        trace_fakes("make_fx", call, fake_device, S=0),
        """\
arg0_1: bfloat16[7, 48]
arg1_1: bfloat16[12, 64, 48]
arg2_1: bfloat16[12, 48, 32]
arg3_1: bfloat16[12, 48]
route_v1 = dsmoe.route_v1.default(hidden_states=arg0_1, router_weight=arg3_1,
    config='{"routed_scaling_factor":2.5,"top_k":3}'): int32[7, 3], float32[7, 3]
return [route_v1[0], route_v1[1]]""",
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_symbolic_T_is_in_the_outputs_and_nowhere_else(way):
    x, layer = make_layer(way=way)
    tensors = tensors_of(x, layer)

    def flat(*values: Tensor) -> Any:
        given = dict(zip(tensors, values, strict=True))
        pieces = dual_stream_moe_unfinalized(**given, config=layer["config"])
        return dual_stream_moe(**given, config=layer["config"]), *pieces

    graph = make_fx(flat, tracing_mode="symbolic")(*tensors.values()).graph
    deferred, one = (n for n in graph.nodes if "dsmoe" in str(n.target))
    T = one.meta["val"].shape[0]
    assert isinstance(T, torch.SymInt)
    assert one.meta["val"].shape == (T, 48)
    assert [tuple(t.shape) for t in deferred.meta["val"]] == [(T * 3, 48), (T, 3), (T, 3), (T, 3), (T, 48)]
    others = [n for n in graph.nodes if n.op == "call_function" and n not in (one, deferred)]
    assert {n.target for n in others} == {operator.getitem}


def test_training_graphs_hold_the_op_and_an_opaque_backward():
    """AOT traces a backward wherever a weight requires grad: it must not raise while traced, nor be dropped."""
    x, layer = make_layer(S=0)
    layer["w13"].requires_grad_()
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    tensors = tensors_of(x, layer)

    def flat(*values: Tensor) -> Tensor:
        return dual_stream_moe(**dict(zip(tensors, values, strict=True)), config=layer["config"])

    out = aot_function(flat, fw_compiler=keep, bw_compiler=keep)(*tensors.values())
    with pytest.raises(NotImplementedError, match="has no backward"):
        out.sum().backward()
    assert_expected_inline(
        wrapped("\n\n".join(map(text, graphs))),
        """\
primals_1: float32[7, 48] cpu
primals_2: float32[12, 64, 48] cpu
primals_3: float32[12, 48, 32] cpu
primals_4: float32[12, 48] cpu
moe_v1 = dsmoe.moe_v1.default(hidden_states=primals_1, w13=primals_2, w2=primals_3, router_weight=primals_4,
    config='{"routed_scaling_factor":2.5,"top_k":3}', schedule='auto'): float32[7, 48] cpu
return [moe_v1, primals_2]

primals_2: float32[12, 64, 48] cpu
tangents_1: float32[7, 48] cpu
moe_backward_v1 = dsmoe.moe_backward_v1.default(grads=[tangents_1], inputs=[primals_2], name='moe_v1'):
    float32[12, 64, 48] cpu
return [None, moe_backward_v1[0], None, None]""",
    )


@pytest.mark.parametrize("way", WAYS)
def test_real_tensors_give_the_graph_of_fake_ones(way, device):
    x, layer = make_layer(way=way, device=device, dtype=torch.bfloat16)
    for tracer in ("make_fx", "aot_function"):
        real = text(trace(tracer, layer_between, x, layer)).replace(f"] {device}", "]")
        assert wrapped(real) == trace_fakes(tracer, layer_between, "cuda", way=way)
