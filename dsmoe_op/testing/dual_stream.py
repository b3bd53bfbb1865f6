"""Whether a callable's routed and shared work are on parallel branches, said so that a reader can find the fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dsmoe_op.testing.graphs import Graph, captured_graph

Names = str | re.Pattern[str] | Callable[[str], bool]
"""Kernels by name: a part of it, a pattern that is searched in it, or a function of it."""

_EXPECTED = "expected routed and shared work on parallel branches"
_NOT_LISTED = "(A side stream that does not wait for the caller's stream is not captured, and its kernels not listed.)"


def assert_dual_stream(
    fn: Callable[..., object],
    *args: Any,
    routed: Names | None = None,
    shared: Names | None = None,
    layers: int = 1,
    **kwargs: Any,
) -> str:
    """Fails if the routed and the shared work of `fn(*args, **kwargs)` are not on parallel branches.

    The call is captured into a CUDA graph, whose edges say what waits for what, however busy the GPU is. Any callable
    that can be captured will do, compiled or not, of this library or not:

        from dsmoe_op.testing import assert_dual_stream

        def test_the_layer_runs_on_two_streams():
            assert_dual_stream(model.layers[3].mlp, hidden_states)
            assert_dual_stream(mlp, hidden_states, routed="fused_moe_kernel", shared=re.compile("silu_and_mul|nvjet"))

    Without `routed` and `shared`, any two kernels that do not wait for each other are enough. That is right for one
    layer; where attention has a second stream of its own, name the kernels. With both, the claim is exact: between a
    fork and its join no routed kernel is ordered with a shared one, and each of either has one of the other there. So
    name the kernels that must run side by side, and not, say, a router that runs before the fork.

    A layer of this library with schedule="auto" has one branch where that is "fused", as at few tokens of narrow ones.

    `fn` is called twice, so that all is compiled and loaded, and then a third time in the capture, where nothing runs
    on the GPU. What torch.compile made with mode="reduce-overhead" or "max-autotune" captures graphs of its own, which
    do not go into another; compiled without a mode it has the same kernels and streams.

    Args:
        fn: called on a stream of its own, on the current device, in the caller's grad mode.
        routed: which kernels are the routed experts' work: a str that is part of the name, a re.Pattern searched in it,
            or a function that takes it. Names are the driver's, demangled, with template arguments.
        shared: the same of the shared expert's work.
        layers: how many layers fn runs, one after the other: so many times at least must there be parallel branches.

    Returns:
        The account of what was found: the kernels in order, and which of them run side by side.

    Raises:
        AssertionError: with such an account and, where kernels are named, the chain of edges that orders two of them.
        ValueError: an argument is of no use, or one kernel is both routed and shared.
        RuntimeError: there is no NVIDIA GPU, or fn cannot be captured; the text says why.
        ImportError: there is no cuda-bindings, which CUDA builds of torch bring along.
    """
    if not callable(fn):
        raise ValueError(f"fn: expected a callable, got {type(fn).__name__}")
    _check(routed, shared, layers)
    return check_graph(captured_graph(lambda: fn(*args, **kwargs)), routed, shared, layers)


def _check(routed: Names | None, shared: Names | None, layers: int) -> None:
    for argument, names in (("routed", routed), ("shared", shared)):
        is_text = isinstance(names, str | re.Pattern)
        text = names.pattern if isinstance(names, re.Pattern) else names
        if names is not None and not (callable(names) or (is_text and isinstance(text, str) and text)):
            got = repr(names) if is_text else type(names).__name__
            raise ValueError(f"{argument}: expected part of a kernel's name, a re.Pattern or a function, got {got}")
    if (routed is None) != (shared is None):
        only = "shared" if routed is None else "routed"
        raise ValueError(f"routed, shared: expected both or neither, got only {only}")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ValueError(f"layers: expected an int of at least 1, got {layers!r}")


def check_graph(graph: Graph, routed: Names | None = None, shared: Names | None = None, layers: int = 1) -> str:
    """The same for a graph, whatever it was made from: its account, or an AssertionError with it."""
    account, kernels = _Account(graph), _count(len(graph.kernels), "kernel")
    if not graph.kernels:
        others = ", ".join(dict.fromkeys(node.kind for node in graph.nodes)) or "nothing"
        raise AssertionError(f"{_EXPECTED}, got a graph without kernels: {others} in it\n{_NOT_LISTED}")
    parallel = [section for section in account.sections if len(section) > 1]
    if routed is not None and shared is not None:
        on_routed, on_shared = _matching(graph, routed), _matching(graph, shared)
        if both := on_routed & on_shared:
            raise ValueError(f"routed, shared: expected no kernel that both match, got {account.name(min(both))}")
        for word, names, found in (("routed", routed, on_routed), ("shared", shared, on_shared)):
            if not found:
                raise AssertionError(
                    f"{_EXPECTED}, got no kernel that {word}={names!r} matches:\n{account}\n{_NOT_LISTED}"
                )
        wrong, path = _faults(account, on_routed, on_shared)
        if wrong:
            raise AssertionError(_ordered(account, wrong, path, on_routed, on_shared))
        parallel = [section for section in parallel if on_routed.intersection(section)]
    elif not parallel:
        raise AssertionError(f"{_EXPECTED}, got one branch, of {kernels} in a row:\n{account}\n{_NOT_LISTED}")
    times = _count(len(parallel), "time")
    if len(parallel) < layers:
        raise AssertionError(f"{_EXPECTED} in {layers} layers, got them {times}:\n{account}\n{_NOT_LISTED}")
    return f"{kernels} on {len(account.lanes)} lanes, parallel branches {times}:\n{account}"


def _matching(graph: Graph, names: Names) -> set[int]:
    if isinstance(names, str):
        return {i for i in graph.kernels if names in graph.nodes[i].name}
    matches = names.search if isinstance(names, re.Pattern) else names
    return {i for i in graph.kernels if matches(graph.nodes[i].name)}


def _faults(account: _Account, routed: set[int], shared: set[int]) -> tuple[set[int], list[int]]:
    """Kernels that are not beside the other branch as they should be, and the shortest chain that orders two.

    There is one of either kind at least. A kernel with none of the other kind in its section is ordered with all.
    """
    graph = account.graph
    wrong: set[int] = set()
    paths: list[list[int]] = []
    for section in account.sections:
        for mine, others in ((routed, shared), (shared, routed)):
            beside = others.intersection(section) or others
            for node in mine.intersection(section):
                if any(graph.ordered(node, other) for other in beside):
                    wrong.add(node)
                    earlier = graph.path(beside, node)
                    later = [] if earlier else [graph.path([node], other) for other in beside]
                    paths += filter(None, [earlier, *later])
    # Of chains as short, one that a shared kernel ends: it is the shared work that was to wait for nothing.
    return wrong, min(paths, key=lambda path: (len(path), path[-1] not in shared, path), default=[])


def _ordered(account: _Account, wrong: set[int], path: list[int], routed: set[int], shared: set[int]) -> str:
    last, first = ("shared", "routed") if path[-1] in shared else ("routed", "shared")
    chain = "\n      -> ".join(account.name(node) for node in path)
    counts = ", ".join(
        f"{len(wrong & kind)} of {_count(len(kind), f'{word} kernel')}"
        for word, kind in (("routed", routed), ("shared", shared))
    )
    return (
        f"{_EXPECTED}, but the {last} kernel {account.name(path[-1])} waits for the {first} kernel "
        f"{account.name(path[0])}:\n  edges: {chain}\nnot beside the other branch: {counts}\n{account.text(path[-1])}"
    )


class _Account:
    """The kernels of a graph in order, a line each, and those between a fork and its join a line for each lane."""

    MOST_LINES, MOST_KERNELS, MOST_LETTERS = 40, 12, 100

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sections = graph.sections(graph.kernels)
        self.lanes = graph.lanes(graph.kernels)

    def name(self, node: int) -> str:
        """As `#3 _finalize`, counted from 1 over all nodes, kernels or not."""
        return f"#{node + 1} {_short(self.graph.nodes[node].name, self.MOST_LETTERS)}"

    def __str__(self) -> str:
        return self.text()

    def text(self, near: int | None = None) -> str:
        """Of many lines those around this node, or else the first and the last."""
        lines: list[str] = []
        line_of: dict[int, int] = {}
        for section in self.sections:
            line_of |= dict.fromkeys(section, len(lines))
            if len(section) == 1:
                lines.append(f"  {self.name(section[0])}")
                continue
            lines.append("  side by side:")
            here = set(section)
            for number, lane in enumerate(self.lanes, start=1):
                names = [self.name(node) for node in lane if node in here]
                if names:
                    lines.append(f"    lane {number}: {', '.join(_ends(names, self.MOST_KERNELS))}")
        more = len(lines) - self.MOST_LINES
        if near is None or more <= 0:
            return "\n".join(_ends(lines, self.MOST_LINES, "  "))
        start = min(max(line_of[near] - self.MOST_LINES // 2, 0), more)
        first, last = ([f"  ... {left_out} more ..."] if left_out else [] for left_out in (start, more - start))
        return "\n".join([*first, *lines[start : start + self.MOST_LINES], *last])


def _ends(items: list[str], most: int, indent: str = "") -> list[str]:
    """The first and the last of them, where they are more than `most`."""
    if len(items) <= most:
        return items
    half = most // 2
    return [*items[:half], f"{indent}... {len(items) - 2 * half} more ...", *items[-half:]]


def _short(name: str, most: int) -> str:
    """A C++ name without its result type and parameters; the middle of what is then too long is left out."""
    name = name.removeprefix("void ")
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, 0, -1):
            depth += (name[place] == ")") - (name[place] == "(")
            if depth == 0:
                name = name[:place]
                break
    if len(name) > most:
        tail = most // 5
        name = f"{name[: most - tail - 3]}...{name[-tail:]}"
    return name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
