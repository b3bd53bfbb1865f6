"""A stand-in for cuda.bindings.driver that knows some graphs, so that graphs are read without a GPU."""

from __future__ import annotations

import enum
import types
from typing import Any, NamedTuple

NODE_TYPES = (
    *("KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "WAIT_EVENT", "EVENT_RECORD", "EXT_SEMAS_SIGNAL"),
    *("EXT_SEMAS_WAIT", "MEM_ALLOC", "MEM_FREE", "BATCH_MEM_OP", "CONDITIONAL"),
)


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_LOSSY_QUERY = 402


class Spec(NamedTuple):
    """A node: its type; a kernel's function or kernel handle and name, or the number of a child graph."""

    type: str
    name: str = ""
    func: int = 0
    kern: int = 0
    child: int = 0


class FakeDriver:
    """Graphs by number: handles with their nodes, and edges between handles.

    Args:
        cuda: 12 or 13, which differ in how edges are asked for. Some edges have data: programmatic dependent launches.
    """

    def __init__(self, graphs: dict[int, tuple[dict[int, Spec], list[tuple[int, int]]]], cuda: int = 13) -> None:
        self.graphs = graphs
        self.nodes = {handle: spec for nodes, _ in graphs.values() for handle, spec in nodes.items()}
        if cuda == 12:
            self.cuGraphGetEdges_v2 = self._edges_with_data
            self.cuGraphGetEdges = self._edges_without_data
        else:
            self.cuGraphGetEdges = self._edges_with_data

    CUgraph = staticmethod(int)
    unknown: type[Exception] = ValueError
    """What the bindings raise where the driver gives a value that they do not know: some versions a KeyError."""

    def cuGraphGetNodes(self, graph: int, num: int = 0) -> tuple[Any, ...]:
        handles = list(self.graphs[graph][0])
        if num == 0:
            return Result(0), [], len(handles)
        return Result(0), (handles + [0] * num)[:num], min(num, len(handles))

    def _edges_with_data(self, graph: int, num: int = 0) -> tuple[Any, ...]:
        edges = self.graphs[graph][1]
        found = min(num, len(edges)) if num else len(edges)
        starts, ends = ([edge[i] for edge in edges[:num]] + [0] * (num - len(edges)) for i in (0, 1))
        return Result(0), starts, ends, [types.SimpleNamespace(type=0)] * num, found

    def _edges_without_data(self, graph: int, num: int = 0) -> tuple[Any, ...]:
        return Result(402), None, None, None

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        name = self.nodes[node].type
        if name not in NODE_TYPES:
            raise self.unknown("99 is not a valid CUgraphNodeType")
        return Result(0), types.SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{name}")

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        spec = self.nodes[node]
        if not spec.func and not spec.kern:
            return Result(400), None
        return Result(0), types.SimpleNamespace(func=spec.func, kern=spec.kern)

    def _name(self, kind: str, handle: int) -> tuple[Any, ...]:
        names = [spec.name for spec in self.nodes.values() if getattr(spec, kind) == handle]
        return (Result(0), names[0].encode()) if handle and names[0] else (Result(400), None)

    def cuFuncGetName(self, func: int) -> tuple[Any, ...]:
        return self._name("func", func)

    def cuKernelGetName(self, kern: int) -> tuple[Any, ...]:
        return self._name("kern", kern)

    def cuGraphChildGraphNodeGetGraph(self, node: int) -> tuple[Any, ...]:
        return Result(0), self.nodes[node].child
