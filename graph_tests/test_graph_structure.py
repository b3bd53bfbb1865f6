"""The captured graph of many layers, walked node by node: it is the schedule, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu import LAUNCHES, SHARED, needs_gpu

from dsmoe_op import dual_stream_moe

pytestmark = needs_gpu

LAYERS = 64


class Graph:
    """Nodes of a captured graph by number, in an order that its edges allow.

    Attributes:
        kernels: the handle of the function that each node launches.
        before: for each node, the set of those that it runs after, as bits.
    """

    def __init__(self, x: torch.Tensor, args: dict[str, Any], *, layers: int, schedule: str) -> None:
        driver = pytest.importorskip("cuda.bindings.driver")

        def ask(function: Any, *given: Any) -> list[Any]:
            error, *found = function(*given)
            assert int(error) == 0, error
            return found

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            y = x
            for _ in range(layers):
                y = dual_stream_moe(y, **args, schedule=schedule)
        raw = driver.CUgraph(graph.raw_cuda_graph())
        _, count = ask(driver.cuGraphGetNodes, raw, 0)
        nodes, count = ask(driver.cuGraphGetNodes, raw, count)
        starts, ends, *_, edges = ask(driver.cuGraphGetEdges, raw, 8 * count)
        parents: dict[int, set[int]] = {int(node): set() for node in nodes}
        for start, end in zip(starts[:edges], ends[:edges], strict=True):
            parents[int(end)].add(int(start))

        handles = {}
        for node in nodes:
            (kind,) = ask(driver.cuGraphNodeGetType, node)
            assert kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, kind
            (params,) = ask(driver.cuGraphKernelNodeGetParams, node)
            handles[int(node)] = int(params.func) or int(params.kern)

        order: dict[int, int] = {}
        self.kernels: list[int] = []
        self.before: list[int] = []
        while len(order) < count:
            ready = [node for node, its in parents.items() if node not in order and its <= order.keys()]
            assert ready
            for node in ready:
                order[node] = len(self.kernels)
                self.kernels.append(handles[node])
                before = [order[parent] for parent in parents[node]]
                bits = 0
                for i in before:
                    bits |= 1 << i | self.before[i]
                self.before.append(bits)

    def ordered(self, a: int, b: int) -> bool:
        return bool(self.before[b] >> a & 1 or self.before[a] >> b & 1)


@pytest.fixture(scope="module")
def call(blocks) -> tuple[torch.Tensor, dict[str, Any]]:
    x, args = blocks[torch.bfloat16].inputs(7)
    for schedule in ("serial", "dual"):
        dual_stream_moe(x, **args, schedule=schedule)
    return x, args


@pytest.fixture(scope="module")
def names(call) -> dict[int, str]:
    """Which launch a kernel is: one layer on one stream issues them in the order that is known."""
    graph = Graph(*call, layers=1, schedule="serial")
    assert len(graph.kernels) == len(LAUNCHES["serial"])
    assert len(set(graph.kernels)) == len(LAUNCHES["serial"])
    found = dict(zip(graph.kernels, LAUNCHES["serial"], strict=True))
    # On two streams the experts' launch is another binary, and one after it ends the layer.
    others = [kernel for kernel in Graph(*call, layers=1, schedule="dual").kernels if kernel not in found]
    return found | dict(zip(others, ("experts", "finalize"), strict=True))


def layers_of(graph: Graph, names: dict[int, str]) -> list[dict[str, int]]:
    """For each layer, its nodes by launch: it lies between two of the finalize nodes, which are in order."""
    ends = [i for i, kernel in enumerate(graph.kernels) if names[kernel] == "finalize"]
    layers: list[dict[str, int]] = [{} for _ in range(LAYERS)]
    for node, kernel in enumerate(graph.kernels):
        layer = layers[sum(graph.before[node] >> end & 1 for end in ends)]
        assert names[kernel] not in layer
        layer[names[kernel]] = node
    return layers


@pytest.fixture(scope="module")
def dual(call, names) -> tuple[Graph, list[dict[str, int]]]:
    graph = Graph(*call, layers=LAYERS, schedule="dual")
    return graph, layers_of(graph, names)


def test_a_graph_holds_the_launches_of_its_layers_and_nothing_else(dual) -> None:
    graph, layers = dual
    assert len(graph.kernels) == LAYERS * len(LAUNCHES["dual"])
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
    graph = Graph(*call, layers=3, schedule="serial")
    assert all(graph.ordered(a, b) for a, b in itertools.combinations(range(len(graph.kernels)), 2))
