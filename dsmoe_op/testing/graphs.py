"""A captured CUDA graph as data: its nodes, what each waits for, and what follows from that.

`captured_graph` captures a callable and reads the graph, which takes a GPU; a `Graph` is plain data, whatever it was
made from. A CUDA graph keeps no streams. What one stream would run shows as a lane: a chain of nodes, each of which
runs after the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dsmoe_op import streams


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of a CUDA graph.

    Attributes:
        kind: "kernel", "memcpy", "memset", "empty", "child graph", "host function", "wait event", ...
        name: of a kernel, as the driver knows it, demangled; of any other node its kind.
        function: the handle of what a kernel node launches, else 0. Kernels of one name may be different binaries.
    """

    kind: str
    name: str
    function: int = 0


class Graph:
    """Nodes by number, from 0, and what each of them waits for.

    Attributes:
        nodes: in an order that the edges allow: the one given, where it is such.
        parents: for each node, those that it has an edge from, ascending.
        before: for each node, all that it runs after, as bits: node i is bit `1 << i`.
    """

    def __init__(self, nodes: Sequence[Node], edges: Iterable[tuple[int, int]]) -> None:
        """
        Args:
            nodes: in any order.
            edges: (a, b), by place in `nodes`: b runs after a.

        Raises:
            ValueError: an edge names no node, or the edges form a cycle.
        """
        parents: list[set[int]] = [set() for _ in nodes]
        children: list[set[int]] = [set() for _ in nodes]
        for a, b in edges:
            if not (0 <= a < len(nodes) and 0 <= b < len(nodes)):
                raise ValueError(f"edges: expected pairs of 0 to {len(nodes) - 1}, got ({a}, {b})")
            parents[b].add(a)
            children[a].add(b)
        waits = [len(its) for its in parents]
        ready = [i for i, count in enumerate(waits) if not count]
        order: list[int] = []
        while ready:
            first = heapq.heappop(ready)
            order.append(first)
            for child in children[first]:
                waits[child] -= 1
                if not waits[child]:
                    heapq.heappush(ready, child)
        if len(order) < len(nodes):
            raise ValueError("edges: expected none that lead back to where they start, got a cycle")

        number = {old: new for new, old in enumerate(order)}
        self.nodes = tuple(nodes[old] for old in order)
        self.parents = tuple(tuple(sorted(number[p] for p in parents[old])) for old in order)
        self.before: list[int] = []
        for its in self.parents:
            bits = 0
            for parent in its:
                bits |= 1 << parent | self.before[parent]
            self.before.append(bits)

    @property
    def kernels(self) -> list[int]:
        """The nodes that are kernels."""
        return [i for i, node in enumerate(self.nodes) if node.kind == "kernel"]

    def ordered(self, a: int, b: int) -> bool:
        """Whether one of the two runs after the other; if not, they are on parallel branches."""
        return bool(self.before[b] >> a & 1 or self.before[a] >> b & 1)

    def path(self, starts: Iterable[int], end: int) -> list[int]:
        """The shortest chain of edges from any of `starts` to `end`, with both; empty where there is none."""
        wanted = set(starts)
        after: dict[int, int | None] = {end: None}
        level = [end]
        while level:
            for node in level:
                if node in wanted:
                    chain: list[int] = []
                    link: int | None = node
                    while link is not None:
                        chain.append(link)
                        link = after[link]
                    return chain
            earlier: list[int] = []
            for node in level:
                for parent in self.parents[node]:
                    if parent not in after:
                        after[parent] = node
                        earlier.append(parent)
            level = sorted(earlier)
        return []

    def lanes(self, among: Iterable[int]) -> list[list[int]]:
        """These nodes as chains, each node in one: a chain goes on with a node that waits for its last, where it can.

        A layer that forks one side branch has two, and so have any number of such layers one after the other.
        """
        lanes: list[list[int]] = []
        for node in sorted(among):
            parents = self.parents[node]
            free = [lane for lane in lanes if self.before[node] >> lane[-1] & 1]
            found = next((lane for lane in free if lane[-1] in parents), free[0] if free else None)
            if found is None:
                found = []
                lanes.append(found)
            found.append(node)
        return lanes

    def sections(self, among: Iterable[int]) -> list[list[int]]:
        """These nodes cut wherever all before the cut are done before anything after it starts.

        A section of one node stands alone; one of several is what runs between a fork and its join. Two nodes on
        parallel branches are always in one section; two of a section need not be parallel to each other.
        """
        nodes = sorted(among)
        behind = [-1] * (len(nodes) + 1)  # what all nodes from here on run after
        for place in range(len(nodes) - 1, -1, -1):
            behind[place] = behind[place + 1] & self.before[nodes[place]]
        sections: list[list[int]] = []
        earlier = 0
        for place, node in enumerate(nodes):
            if earlier & ~behind[place] == 0:
                sections.append([])
            sections[-1].append(node)
            earlier |= 1 << node
        return sections


# --- from a callable ------------------------------------------------------------------------------------------------


def captured_graph(fn: Callable[[], object]) -> Graph:
    """The CUDA graph of what `fn` launches on the current device.

    `fn` is called twice first, on the stream of the capture, so that all is compiled, loaded and tuned; its third call
    is captured, and nothing of it runs on the GPU. The graph is never replayed.

    Raises:
        RuntimeError: there is no NVIDIA GPU, a capture is under way already, or `fn` cannot be captured.
        ImportError: there is no cuda-bindings.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("expected an NVIDIA GPU, found none: what waits for what is read from a captured CUDA graph")
    driver = _driver()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("expected to be called outside of any capture, got called inside one")

    device = torch.cuda.current_device()
    stream, caller = _stream(device), torch.cuda.current_stream()
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                fn()
    finally:
        caller.wait_stream(stream)

    graph, pool = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.graph_pool_handle()
    own: list[Exception] = []
    try:
        # The outer `with` gives the caller's stream back even where the capture cannot end.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                fn()
            except Exception as error:
                own.append(error)
                raise
    except Exception as error:
        _leave_capture(device, pool, stream)
        raise RuntimeError(_why_not_captured(own[0] if own else error)) from error
    return read_graph(graph.raw_cuda_graph(), driver)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            f"captured graphs are read with cuda-bindings ({error}): pip install cuda-bindings"
        ) from error
    return driver


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures here, not of PyTorch's pool: from its 32 streams `fn` may have its side stream."""
    return streams.make_streams(device, 1)[0]


def _leave_capture(device: int, pool: Any, stream: torch.cuda.Stream) -> None:
    """After a capture that could not end: torch 2.11 would go on as in it, with memory and with random numbers."""
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, pool)
    # A capture that ends sets the random numbers right.
    with (
        contextlib.suppress(Exception),
        torch.cuda.stream(stream),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        torch.zeros(1, device="cuda")


def _why_not_captured(error: Exception) -> str:
    said = str(error)
    first = next(iter(said.strip().splitlines()), "")
    text = f"the callable cannot be captured into a CUDA graph: {type(error).__name__}: {first}"
    if any("cudagraph_trees" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        advice = (
            'It makes CUDA graphs of its own, as torch.compile does with mode="reduce-overhead" or "max-autotune". '
            'Compile it without a mode, or with "max-autotune-no-cudagraphs": kernels and streams are the same.'
        )
    elif "unjoined" in said:
        advice = (
            "A stream that it forked is not joined when it returns: let the stream that it is called on wait for that "
            "one, as with torch.cuda.current_stream().wait_stream(side)."
        )
    elif "uncaptured" in said:
        advice = (
            "It waits for a stream that was not forked: let that stream wait first for the one that it is called on, "
            "as with side.wait_stream(torch.cuda.current_stream())."
        )
    else:
        advice = (
            "Nothing in it may wait for the GPU, read a result on the CPU, or use the default stream or one that was "
            "not forked from the stream that it is called on, as with side.wait_stream(torch.cuda.current_stream())."
        )
    return f"{text}\n{advice}"


# --- from the driver ------------------------------------------------------------------------------------------------

_KINDS = {
    "graph": "child graph",
    "host": "host function",
    "conditional": "conditional (what it holds is not read)",
}
"""Kinds of which CUDA's own word says too little."""


def read_graph(raw: int, driver: Any) -> Graph:
    """The nodes and edges of a CUDA graph; a child graph's own come in place, after its node.

    An edge of a programmatic dependent launch counts like any other: what it leads to is on the same stream.

    Args:
        raw: the cudaGraph_t, as of `torch.cuda.CUDAGraph.raw_cuda_graph`.
        driver: the module cuda.bindings.driver, of CUDA 12 or 13.

    Raises:
        RuntimeError: the driver gave an error.
    """
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []
    _add_graph(driver, driver.CUgraph(raw), nodes, edges)
    return Graph(nodes, edges)


def _add_graph(driver: Any, raw: Any, nodes: list[Node], edges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Appends a graph's nodes and edges; gives the places of those that wait for none, and those none waits for."""
    _, count = _ask(driver.cuGraphGetNodes, raw, 0)
    handles = _ask(driver.cuGraphGetNodes, raw, count)[0][:count] if count else []
    first: dict[int, int] = {}
    last: dict[int, list[int]] = {}
    for handle in handles:
        first[int(handle)] = place = len(nodes)
        last[int(handle)] = [place]
        nodes.append(_node(driver, handle))
        if nodes[place].kind == _KINDS["graph"]:
            (child,) = _ask(driver.cuGraphChildGraphNodeGetGraph, handle)
            starts, ends = _add_graph(driver, child, nodes, edges)
            edges += [(place, start) for start in starts]
            last[int(handle)] = ends or [place]
    pairs = _edges(driver, raw, count)
    edges += [(end, first[b]) for a, b in pairs for end in last[a]]
    waiting, waited_for = {b for _, b in pairs}, {a for a, _ in pairs}
    starts = [place for handle, place in first.items() if handle not in waiting]
    ends = [place for handle, places in last.items() if handle not in waited_for for place in places]
    return starts, ends


def _edges(driver: Any, raw: Any, count: int) -> list[tuple[int, int]]:
    # CUDA 12's first form fails where an edge is a programmatic one; its second form is the one form of CUDA 13.
    get = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    room = 2 * count + 1
    while True:
        starts, ends, *_, found = _ask(get, raw, room)
        if found < room:
            return [(int(a), int(b)) for a, b in zip(starts[:found], ends[:found], strict=True)]
        room *= 2


def _node(driver: Any, handle: Any) -> Node:
    """A node that the driver or its bindings cannot describe has a name that says so."""
    kind, name, function = "unknown", "", 0
    with contextlib.suppress(RuntimeError):
        (found,) = _ask(driver.cuGraphNodeGetType, handle)
        kind = found.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower().replace("_", " ")
        kind = _KINDS.get(kind, kind)
    if kind == "kernel":
        name = "(a kernel without a known name)"
        with contextlib.suppress(RuntimeError):
            (params,) = _ask(driver.cuGraphKernelNodeGetParams, handle)
            function = int(params.func) or int(params.kern)
            if int(params.func):
                (found,) = _ask(driver.cuFuncGetName, params.func)
            else:
                (found,) = _ask(driver.cuKernelGetName, params.kern)
            name = _demangled(found.decode())
    return Node(kind, name or kind, function)


def _demangled(name: str) -> str:
    demangle = getattr(torch._C, "_demangle", None)
    # A C name stays as it is: as a C++ one `f` would mean float.
    return demangle(name) if demangle and name.startswith("_Z") else name


def _ask(function: Callable[..., Any], *args: Any) -> list[Any]:
    try:
        error, *found = function(*args)
    except (KeyError, ValueError) as unknown:  # a value of the driver's that is newer than its bindings
        raise RuntimeError(f"{function.__name__} gave what cuda-bindings does not know: {unknown}") from unknown
    if int(error):
        raise RuntimeError(f"{function.__name__} failed: {error.name}")
    return found
