"""The captured graph of many layers, walked node by node: it is the schedule, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from gpu import AHEAD, LAUNCHES, SHARED, Block, needs_gpu

from dsmoe_op import dual_stream_moe
from dsmoe_op.testing import Graph, captured_graph

pytestmark = needs_gpu

LAYERS = 64


class Call(NamedTuple):
    """One layer's call, and its launches by schedule."""

    x: torch.Tensor
    args: dict[str, Any]
    launches: dict[str, tuple[str, ...]]


def graph_of(call: Call, *, layers: int, schedule: str) -> Graph:
    def run() -> None:
        y = call.x
        for _ in range(layers):
            y = dual_stream_moe(y, **call.args, schedule=schedule)

    pytest.importorskip("cuda.bindings.driver")
    graph = captured_graph(run)
    assert {node.kind for node in graph.nodes} == {"kernel"}
    return graph


def functions(graph: Graph) -> list[int]:
    """The handle of the function that each node launches."""
    return [node.function for node in graph.nodes]


@pytest.fixture(scope="module", params=LAUNCHES, ids=lambda param: f"{param[0]}-{param[1]}")
def call(request) -> Call:
    """Few tokens and many, in each format."""
    name, T = request.param
    block: Block = (
        request.getfixturevalue("blocks")[torch.bfloat16]
        if name == "16bit"
        else request.getfixturevalue("quantised_blocks")[name]
    )
    x, args = block.inputs(T)
    for schedule in ("serial", "dual"):
        dual_stream_moe(x, **args, schedule=schedule)
    return Call(x, args, LAUNCHES[request.param])


@pytest.fixture(scope="module")
def names(call) -> dict[int, str]:
    """Which launch a kernel is: one layer issues them in the order that is known."""
    found: dict[int, str] = {}
    for schedule in ("serial", "dual"):  # of some launches another binary where another one comes before or after it
        kernels = functions(graph_of(call, layers=1, schedule=schedule))
        assert len(set(kernels)) == len(kernels)
        for kernel, name in zip(kernels, call.launches[schedule], strict=True):
            assert found.setdefault(kernel, name) == name
    return found


def layers_of(graph: Graph, names: dict[int, str]) -> list[dict[str, int]]:
    """For each layer, its nodes by launch: it lies between two of the finalize nodes, which are in order."""
    ends = [i for i, kernel in enumerate(functions(graph)) if names[kernel] == "finalize"]
    layers: list[dict[str, int]] = [{} for _ in range(LAYERS)]
    for node, kernel in enumerate(functions(graph)):
        layer = layers[sum(graph.before[node] >> end & 1 for end in ends)]
        assert names[kernel] not in layer
        layer[names[kernel]] = node
    return layers


@pytest.fixture(scope="module")
def dual(call, names) -> tuple[Graph, list[dict[str, int]], set[str]]:
    """Of many layers: the graph, the nodes of each layer by launch, and the names of the launches."""
    graph = graph_of(call, layers=LAYERS, schedule="dual")
    return graph, layers_of(graph, names), set(call.launches["dual"])


def test_a_graph_holds_the_launches_of_its_layers_and_nothing_else(dual, counted) -> None:
    graph, layers, launches = dual
    counted("nodes of captured graphs held against the schedule", len(graph.nodes))
    assert len(graph.nodes) == LAYERS * len(launches)
    assert all(layer.keys() == launches for layer in layers)


def test_routed_and_shared_kernels_of_a_layer_wait_for_nothing_of_each_other(dual) -> None:
    graph, layers, launches = dual
    shared = launches & SHARED
    routed = launches - SHARED - AHEAD - {"finalize"}
    for layer in layers:
        for a, b in itertools.product(routed, shared):
            assert not graph.ordered(layer[a], layer[b]), (a, b)


def test_every_kernel_waits_for_what_comes_before_the_fork(dual) -> None:
    graph, layers, launches = dual
    for layer in layers:
        for first, name in itertools.product(launches & AHEAD, launches - AHEAD):
            assert graph.before[layer[name]] >> layer[first] & 1, (first, name)


def test_finalize_waits_for_every_kernel_of_its_layer(dual) -> None:
    graph, layers, launches = dual
    for layer in layers:
        for name in launches - {"finalize"}:
            assert graph.before[layer["finalize"]] >> layer[name] & 1


def test_every_kernel_waits_for_the_layer_before(dual) -> None:
    graph, layers, _ = dual
    for before, layer in itertools.pairwise(layers):
        for node in layer.values():
            assert graph.before[node] >> before["finalize"] & 1


def test_each_branch_is_one_lane(dual) -> None:
    graph, layers, launches = dual
    for layer in layers:
        for lane in (launches & SHARED, launches - SHARED):
            assert all(graph.ordered(layer[a], layer[b]) for a, b in itertools.combinations(lane, 2))


def test_the_control_serial_has_one_lane(call) -> None:
    graph = graph_of(call, layers=3, schedule="serial")
    assert all(graph.ordered(a, b) for a, b in itertools.combinations(range(len(graph.nodes)), 2))
