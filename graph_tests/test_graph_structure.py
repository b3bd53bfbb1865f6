"""The captured graph of many layers, walked node by node: it is the schedule, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu import LAUNCHES, SHARED, needs_gpu

from dsmoe_op import dual_stream_moe
from dsmoe_op.testing import Graph, captured_graph

pytestmark = needs_gpu

LAYERS = 64


def graph_of(x: torch.Tensor, args: dict[str, Any], *, layers: int, schedule: str) -> Graph:
    def call() -> None:
        y = x
        for _ in range(layers):
            y = dual_stream_moe(y, **args, schedule=schedule)

    pytest.importorskip("cuda.bindings.driver")
    graph = captured_graph(call)
    assert {node.kind for node in graph.nodes} == {"kernel"}
    return graph


def functions(graph: Graph) -> list[int]:
    """The handle of the function that each node launches."""
    return [node.function for node in graph.nodes]


@pytest.fixture(scope="module")
def call(blocks) -> tuple[torch.Tensor, dict[str, Any]]:
    x, args = blocks[torch.bfloat16].inputs(7)
    for schedule in ("serial", "dual"):
        dual_stream_moe(x, **args, schedule=schedule)
    return x, args


@pytest.fixture(scope="module")
def names(call) -> dict[int, str]:
    """Which launch a kernel is: one layer on one stream issues them in the order that is known."""
    kernels = functions(graph_of(*call, layers=1, schedule="serial"))
    assert len(kernels) == len(LAUNCHES["serial"])
    assert len(set(kernels)) == len(LAUNCHES["serial"])
    found = dict(zip(kernels, LAUNCHES["serial"], strict=True))
    # On two streams the experts' launch is another binary, and one after it ends the layer.
    others = [kernel for kernel in functions(graph_of(*call, layers=1, schedule="dual")) if kernel not in found]
    return found | dict(zip(others, ("experts", "finalize"), strict=True))


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
def dual(call, names) -> tuple[Graph, list[dict[str, int]]]:
    graph = graph_of(*call, layers=LAYERS, schedule="dual")
    return graph, layers_of(graph, names)


def test_a_graph_holds_the_launches_of_its_layers_and_nothing_else(dual, counted) -> None:
    graph, layers = dual
    counted("nodes of captured graphs held against the schedule", len(graph.nodes))
    assert len(graph.nodes) == LAYERS * len(LAUNCHES["dual"])
    assert all(layer.keys() == set(LAUNCHES["dual"]) for layer in layers)


def test_routed_and_shared_kernels_of_a_layer_wait_for_nothing_of_each_other(dual) -> None:
    graph, layers = dual
    routed = set(LAUNCHES["dual"]) - SHARED - {"finalize"}
    for layer in layers:
        for a, b in itertools.product(routed, SHARED):
            assert not graph.ordered(layer[a], layer[b]), (a, b)


def test_finalize_waits_for_every_kernel_of_its_layer(dual) -> None:
    graph, layers = dual
    for layer in layers:
        for name in set(LAUNCHES["dual"]) - {"finalize"}:
            assert graph.before[layer["finalize"]] >> layer[name] & 1


def test_every_kernel_waits_for_the_layer_before(dual) -> None:
    graph, layers = dual
    for before, layer in itertools.pairwise(layers):
        for node in layer.values():
            assert graph.before[node] >> before["finalize"] & 1


def test_each_branch_is_one_lane(dual) -> None:
    graph, layers = dual
    for layer in layers:
        for lane in (SHARED, set(LAUNCHES["dual"]) - SHARED):
            assert all(graph.ordered(layer[a], layer[b]) for a, b in itertools.combinations(lane, 2))


def test_the_control_serial_has_one_lane(call) -> None:
    graph = graph_of(*call, layers=3, schedule="serial")
    assert all(graph.ordered(a, b) for a, b in itertools.combinations(range(len(graph.nodes)), 2))
