"""Captured graphs as data, and what assert_dual_stream says of them; no GPU: the graphs are made here."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import pytest
import torch
from expecttest import assert_expected_inline
from fake_driver import NODE_TYPES, FakeDriver, Spec

from dsmoe_op.testing import Graph, Node, assert_dual_stream, captured_graph, graphs
from dsmoe_op.testing.dual_stream import check_graph
from dsmoe_op.testing.graphs import read_graph

Edges = list[tuple[int, int]]


def made(names: str, edges: str) -> Graph:
    """A graph of these nodes, kernels but for those named mem..., with a chain of edges for each word `a>b>c`."""
    nodes = [Node("memcpy" if name.startswith("mem") else "kernel", name) for name in names.split()]
    place = {node.name: i for i, node in enumerate(nodes)}
    chains = [[place[name] for name in word.split(">")] for word in edges.split()]
    return Graph(nodes, [pair for chain in chains for pair in itertools.pairwise(chain)])


DUAL = made(
    "norm router choose experts gate up down finalize",
    "norm>router>choose>experts>finalize norm>gate>up>down>finalize",
)
SERIAL = made("norm router choose gate up memcpy down experts", "norm>router>choose>gate>up>memcpy>down>experts")
ROUTED, SHARED = re.compile("router|choose|experts"), re.compile("gate|up|down")


def layers_of(count: int, branches: int, kernels: int) -> Graph:
    """Layers one after the other: a kernel, its branches of some kernels each, and a kernel that joins them."""
    names, edges, last = [], [], None
    for layer in range(count):
        names += [f"fork{layer}", f"join{layer}"]
        if last is not None:
            edges.append(f"{last}>fork{layer}")
        for branch in range(branches):
            chain = [f"b{layer}_{branch}_{i}" for i in range(kernels)]
            names += chain
            edges.append(">".join([f"fork{layer}", *chain, f"join{layer}"]))
        last = f"join{layer}"
    return made(" ".join(names), " ".join(edges))


def random_edges(num: int) -> Edges:
    """Of an acyclic graph whose numbers are not in its order; from few edges to nearly all."""
    place, share = random.sample(range(num), num), random.random()
    return [(place[a], place[b]) for a, b in itertools.combinations(range(num), 2) if random.random() < share]


def random_graph(num: int) -> tuple[Graph, nx.DiGraph]:
    """A random graph, some of its nodes no kernels, and the same in networkx by the numbers of the Graph."""
    edges = random_edges(num)
    graph = Graph([Node(random.choice(["kernel", "kernel", "memset"]), str(i)) for i in range(num)], edges)
    number = {int(node.name): i for i, node in enumerate(graph.nodes)}
    oracle = nx.DiGraph()
    oracle.add_nodes_from(range(num))
    oracle.add_edges_from((number[a], number[b]) for a, b in edges)
    return graph, oracle


def graphs_and_oracles(count: int = 100, most: int = 12) -> Iterator[tuple[Graph, nx.DiGraph]]:
    for _ in range(count):
        yield random_graph(random.randint(1, most))


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_a_node_runs_after_all_that_edges_lead_from() -> None:
    for graph, oracle in graphs_and_oracles():
        for node in oracle:
            before = nx.ancestors(oracle, node)
            assert {other for other in oracle if graph.before[node] >> other & 1} == before
            assert set(graph.parents[node]) == set(oracle.predecessors(node))
            for other in oracle:
                is_ordered = other in before or node in nx.ancestors(oracle, other)
                assert graph.ordered(node, other) == graph.ordered(other, node) == is_ordered


def test_nodes_keep_the_order_given_where_the_edges_allow_it() -> None:
    for _ in range(50):
        num = random.randint(1, 12)
        nodes = [Node("kernel", str(i)) for i in range(num)]
        edges = random_edges(num)
        numbers = [int(node.name) for node in Graph(nodes, edges).nodes]
        assert sorted(numbers) == list(range(num))
        assert all(numbers.index(a) < numbers.index(b) for a, b in edges)
        assert Graph(nodes, [(min(edge), max(edge)) for edge in edges]).nodes == tuple(nodes)


def test_a_path_is_a_shortest_one_along_edges() -> None:
    for graph, oracle in graphs_and_oracles():
        end, starts = random.choice(list(oracle)), random.sample(list(oracle), random.randint(1, len(oracle)))
        lengths = [nx.shortest_path_length(oracle, start, end) for start in starts if nx.has_path(oracle, start, end)]
        path = graph.path(starts, end)
        assert len(path) == (min(lengths) + 1 if lengths else 0)
        assert all(oracle.has_edge(a, b) for a, b in itertools.pairwise(path))
        assert not path or (path[0] in starts and path[-1] == end)


def test_lanes_are_chains_with_each_node_in_one() -> None:
    for graph, _ in graphs_and_oracles():
        lanes = graph.lanes(graph.kernels)
        assert sorted(itertools.chain(*lanes)) == graph.kernels
        assert all(graph.before[b] >> a & 1 for lane in lanes for a, b in itertools.pairwise(lane))


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_layers_in_a_row_have_as_many_lanes_as_one_has_branches(branches) -> None:
    graph = layers_of(random.randint(1, 9), branches, random.randint(1, 4))
    assert len(graph.lanes(graph.kernels)) == branches


def parts(graph: Graph, oracle: nx.DiGraph) -> list[list[int]]:
    """Sections by their other definition: kernels that a chain of parallel pairs links."""
    beside = nx.Graph()
    beside.add_nodes_from(graph.kernels)
    closure = nx.transitive_closure_dag(oracle)
    for a, b in itertools.combinations(graph.kernels, 2):
        if not closure.has_edge(a, b) and not closure.has_edge(b, a):
            beside.add_edge(a, b)
    return sorted(sorted(part) for part in nx.connected_components(beside))


def test_sections_are_what_chains_of_parallel_kernels_link() -> None:
    for graph, oracle in graphs_and_oracles():
        assert graph.sections(graph.kernels) == parts(graph, oracle)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([(0, 1), (1, 2), (2, 0)], "edges: expected none that lead back to where they start, got a cycle"),
        ([(1, 1)], "edges: expected none that lead back to where they start, got a cycle"),
        ([(0, 3)], r"edges: expected pairs of 0 to 2, got \(0, 3\)"),
        ([(-1, 0)], r"edges: expected pairs of 0 to 2, got \(-1, 0\)"),
    ],
)
def test_edges_that_make_no_graph_are_refused(edges, said) -> None:
    with pytest.raises(ValueError, match=said):
        Graph([Node("kernel", name) for name in "abc"], edges)


# --- judgement ------------------------------------------------------------------------------------------------------


def passes(graph: Graph, *args: Any, **kwargs: Any) -> bool:
    try:
        check_graph(graph, *args, **kwargs)
    except AssertionError:
        return False
    return True


def test_without_names_any_two_parallel_kernels_pass() -> None:
    for graph, oracle in graphs_and_oracles():
        expected = any(len(part) > 1 for part in parts(graph, oracle))
        assert passes(graph) == expected


def test_layers_are_counted_by_their_forks() -> None:
    count = random.randint(2, 5)
    graph = layers_of(count, 2, 2)
    assert passes(graph, layers=count)
    assert not passes(graph, layers=count + 1)
    assert passes(graph, re.compile(r"_0_\d"), re.compile(r"_1_\d"), layers=count)
    assert not passes(graph, re.compile(r"_0_\d"), re.compile(r"_1_\d"), layers=count + 1)


def test_with_names_forks_of_other_work_do_not_count_as_layers() -> None:
    graph = made("q k attend r s join", "q>attend k>attend>r>join attend>s>join")
    assert passes(graph, layers=2)
    assert passes(graph, re.compile("^r"), re.compile("^s"), layers=1)
    assert not passes(graph, re.compile("^r"), re.compile("^s"), layers=2)


def test_with_names_no_kernel_of_a_fork_is_ordered_with_the_other_kind_and_none_is_alone() -> None:
    verdicts = []
    while len(verdicts) < 300:
        graph, oracle = random_graph(random.randint(2, 9))
        kernels = random.sample(graph.kernels, min(len(graph.kernels), random.randint(2, 5)))
        if len(kernels) < 2:
            continue
        cut = random.randint(1, len(kernels) - 1)
        routed, shared = set(kernels[:cut]), set(kernels[cut:])
        names = [{graph.nodes[i].name for i in kind} for kind in (routed, shared)]
        sections = [(routed & set(part), shared & set(part)) for part in parts(graph, oracle)]
        expected = all(bool(a) == bool(b) for a, b in sections) and not any(
            nx.has_path(oracle, *pair) or nx.has_path(oracle, *pair[::-1])
            for a, b in sections
            for pair in itertools.product(a, b)
        )
        assert passes(graph, names[0].__contains__, names[1].__contains__) == expected
        verdicts.append(expected)


@pytest.mark.parametrize(
    ("routed", "shared"),
    [
        ("experts", "up"),
        (re.compile("^r|experts$"), re.compile("up|down")),
        (lambda name: "r" in name, lambda name: name == "down"),
    ],
)
def test_kernels_are_named_by_a_part_a_pattern_or_a_function(routed, shared) -> None:
    graph = made("router experts up down", "router>experts up>down")
    assert passes(graph, routed, shared)
    assert not passes(made("router experts up down", "router>experts>up>down"), routed, shared)


# --- accounts -------------------------------------------------------------------------------------------------------


def account(graph: Graph, *args: Any, **kwargs: Any) -> str:
    """Of a failure."""
    with pytest.raises(AssertionError) as raised:
        check_graph(graph, *args, **kwargs)
    return str(raised.value)


def test_the_account_of_parallel_branches_shows_each_lane() -> None:
    assert_expected_inline(
        check_graph(DUAL, ROUTED, SHARED),
        """\
8 kernels on 2 lanes, parallel branches 1 time:
  #1 norm
  side by side:
    lane 1: #2 router, #3 choose, #4 experts
    lane 2: #5 gate, #6 up, #7 down
  #8 finalize""",
    )


def test_the_account_of_one_branch_lists_its_kernels_in_order() -> None:
    assert_expected_inline(
        account(SERIAL),
        """\
expected routed and shared work on parallel branches, got one branch, of 7 kernels in a row:
  #1 norm
  #2 router
  #3 choose
  #4 gate
  #5 up
  #7 down
  #8 experts
(A side stream that does not wait for the caller's stream is not captured, and its kernels not listed.)""",
    )


def test_the_account_of_named_kernels_shows_the_shortest_chain_that_orders_two() -> None:
    assert_expected_inline(
        account(SERIAL, "norm", "down"),
        """\
expected routed and shared work on parallel branches, but the shared kernel #7 down waits for the routed kernel #1 norm:
  edges: #1 norm
      -> #2 router
      -> #3 choose
      -> #4 gate
      -> #5 up
      -> #6 memcpy
      -> #7 down
not beside the other branch: 1 of 1 routed kernel, 1 of 1 shared kernel
  #1 norm
  #2 router
  #3 choose
  #4 gate
  #5 up
  #7 down
  #8 experts""",
    )
    assert account(SERIAL, ROUTED, SHARED).splitlines()[1:4] == [
        "  edges: #3 choose",
        "      -> #4 gate",
        "not beside the other branch: 3 of 3 routed kernels, 3 of 3 shared kernels",
    ]


def test_an_edge_between_two_branches_is_named() -> None:
    graph = made("fork r1 r2 s1 s2 join", "fork>r1>r2>join fork>s1>s2>join r1>s2")
    assert_expected_inline(
        account(graph, re.compile("^r"), re.compile("^s")),
        """\
expected routed and shared work on parallel branches, but the shared kernel #5 s2 waits for the routed kernel #2 r1:
  edges: #2 r1
      -> #5 s2
not beside the other branch: 1 of 2 routed kernels, 1 of 2 shared kernels
  #1 fork
  side by side:
    lane 1: #2 r1, #3 r2
    lane 2: #4 s1, #5 s2
  #6 join""",
    )


def test_a_layer_of_several_that_has_one_branch_is_to_be_seen() -> None:
    graph = made("r1 s1 f1 r2 s2 f2", "r1>f1 s1>f1>r2>s2>f2")
    assert_expected_inline(
        account(graph, layers=2),
        """\
expected routed and shared work on parallel branches in 2 layers, got them 1 time:
  side by side:
    lane 1: #1 r1
    lane 2: #2 s1
  #3 f1
  #4 r2
  #5 s2
  #6 f2
(A side stream that does not wait for the caller's stream is not captured, and its kernels not listed.)""",
    )
    assert "shared kernel #5 s2 waits for the routed kernel #4 r2" in account(graph, re.compile("r"), re.compile("s"))


@pytest.mark.parametrize(("nodes", "held"), [("", "nothing"), ("memcpy", "memcpy")])
def test_a_graph_without_kernels_fails(nodes, held) -> None:
    assert f"got a graph without kernels: {held} in it" in account(made(nodes, ""))


def test_names_that_match_nothing_fail_with_what_there_is() -> None:
    for kind, other in (("routed", "shared"), ("shared", "routed")):
        said = account(DUAL, **{kind: "no such kernel", other: "up"})
        assert f"got no kernel that {kind}='no such kernel' matches:\n  #1 norm" in said


def test_a_kernel_of_both_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match="routed, shared: expected no kernel that both match, got #6 up"):
        check_graph(DUAL, "up", re.compile("up|gate"))


def test_long_accounts_show_both_ends() -> None:
    num = random.randint(45, 99)
    names = [f"k{i}" for i in range(num)]
    lines = account(made(" ".join(names), ">".join(names))).splitlines()
    assert lines[1:-1] == [
        *(f"  #{i + 1} k{i}" for i in range(20)),
        f"  ... {num - 40} more ...",
        *(f"  #{i + 1} k{i}" for i in range(num - 20, num)),
    ]
    lane = check_graph(made(" ".join(["side", *names]), ">".join(names))).splitlines()[-1]
    assert lane == "    lane 2: " + ", ".join(
        [
            *(f"#{i + 2} k{i}" for i in range(6)),
            f"... {num - 12} more ...",
            *(f"#{i + 2} k{i}" for i in range(num - 6, num)),
        ]
    )


@pytest.mark.parametrize("place", [0, 19, 20, 21, 50, 78, 79, 80, 81, 98])
def test_long_accounts_of_named_kernels_show_what_is_around_them(place) -> None:
    names = [f"k{i}" for i in range(100)]
    names[place : place + 2] = "routed", "shared"
    lines = account(made(" ".join(names), ">".join(names)), "routed", "shared").splitlines()[4:]
    start = min(max(place + 1 - 20, 0), 60)
    shown = [f"  #{i + 1} {names[i]}" for i in range(start, start + 40)]
    before, after = ([f"  ... {n} more ..."] if n else [] for n in (start, 60 - start))
    assert lines == [*before, *shown, *after]
    assert {f"  #{place + 1} routed", f"  #{place + 2} shared"} <= set(shown)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("_finalize", "_finalize"),
        ("void f<int, (g)1>(float*, h(*)(int))", "f<int, (g)1>"),
        ("(unnamed)", "(unnamed)"),
        (f"void {'a' * 100}(int)", "a" * 100),
        (f"void {'a' * 77}bbbb{'c' * 20}(int)", f"{'a' * 77}...{'c' * 20}"),
    ],
)
def test_names_of_cpp_kernels_are_cut_to_what_tells_them_apart(name, shown) -> None:
    said = account(Graph([Node("kernel", name)], []))
    assert f"\n  #1 {shown}\n" in said


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"routed": "a"}, "routed, shared: expected both or neither, got only routed"),
        ({"shared": "a"}, "routed, shared: expected both or neither, got only shared"),
        ({"routed": 3, "shared": "a"}, "routed: expected part of a kernel's name, a re.Pattern or a function, got int"),
        ({"routed": "a", "shared": ""}, "shared: expected part of a kernel's name, a re.Pattern or a function, got ''"),
        ({"routed": re.compile(b"a"), "shared": "b"}, r"routed: expected .* got re.compile\(b'a'\)"),
        ({"layers": 0}, "layers: expected an int of at least 1, got 0"),
        ({"layers": True}, "layers: expected an int of at least 1, got True"),
        ({"layers": 2.0}, "layers: expected an int of at least 1, got 2.0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        assert_dual_stream(lambda: pytest.fail("called"), **given)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="fn: expected a callable, got Tensor"):
        assert_dual_stream(torch.ones(3))  # type: ignore[arg-type]


# --- captures, with stand-ins for the GPU ----------------------------------------------------------------------------


class FakeCuda:
    """What a capture takes of torch.cuda: streams by name, and a capture that may fail when it ends."""

    def __init__(self, patch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
        self.current, self.log = "caller", []  # type: list[str]
        self.ends_with: Exception | None = None
        self.capturing = False
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(graphs, "_driver", lambda: driver)
        patch.setattr(graphs, "_stream", lambda device: types.SimpleNamespace(name="own", wait_stream=self.note))
        for name, value in {
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "current_device": lambda: 0,
            "current_stream": lambda: types.SimpleNamespace(name=self.current, wait_stream=self.note),
            "CUDAGraph": lambda **options: types.SimpleNamespace(raw_cuda_graph=lambda: 1, **options),
            "graph_pool_handle": lambda: (0, 7),
            "stream": self.stream,
            "graph": self.graph,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.log.append("pool"), raising=False)

    def note(self, other: Any) -> None:
        self.log.append(f"wait for {other.name}")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        """As torch's: where the capture cannot end, its own stream stays the current one."""
        self.current, self.capturing = "capture", True
        try:
            yield
        finally:
            self.capturing = False
            error, self.ends_with = self.ends_with, None
            self.log.append("failed" if error else "captured")
            if error:
                raise error


TWO_BRANCHES = {1: ({10: Spec("KERNEL", "a", func=3), 20: Spec("KERNEL", "b", func=4)}, [])}
ONE_BRANCH = {1: (TWO_BRANCHES[1][0], [(10, 20)])}


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch, FakeDriver(TWO_BRANCHES))


def test_a_callable_is_called_twice_and_then_captured_with_its_arguments(cuda) -> None:
    calls = []
    said = assert_dual_stream(lambda *args, **kwargs: calls.append((cuda.current, args, kwargs)), 1, 2, c=3)
    assert calls == [(stream, (1, 2), {"c": 3}) for stream in ("own", "own", "capture")]
    assert cuda.log == ["wait for caller", "wait for own", "captured"]
    assert "2 kernels on 2 lanes" in said


def test_a_callable_on_one_branch_fails(monkeypatch) -> None:
    FakeCuda(monkeypatch, FakeDriver(ONE_BRANCH))
    with pytest.raises(AssertionError, match="got one branch, of 2 kernels in a row:\n  #1 a\n  #2 b"):
        assert_dual_stream(lambda: None)


def raising(error: Exception, at_call: int) -> Callable[[], None]:
    calls = itertools.count(1)

    def fn() -> None:
        if next(calls) == at_call:
            raise error

    return fn


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_outside_of_the_capture_is_the_callables_own(cuda, call) -> None:
    with pytest.raises(KeyError, match="mine"):
        captured_graph(raising(KeyError("mine"), call))
    assert cuda.log == ["wait for caller", "wait for own"]
    assert cuda.current == "caller"


ENDS = "CUDA error: capturing stream has unjoined work\nCompile with ..."


@pytest.mark.parametrize(
    ("own", "ends_with", "said"),
    [
        (KeyError("mine"), None, "KeyError: 'mine'\nNothing in it may wait for the GPU"),
        (KeyError("mine"), RuntimeError(ENDS), "KeyError: 'mine'\nNothing in it may wait for the GPU"),
        (
            None,
            RuntimeError(ENDS),
            "RuntimeError: CUDA error: capturing stream has unjoined work\nA stream that it forked",
        ),
        (
            RuntimeError("CUDA error: dependency created on uncaptured work in another stream\nCompile with ..."),
            RuntimeError("CUDA error: operation failed due to a previous error during capture"),
            "RuntimeError: CUDA error: dependency created on uncaptured work in another stream\n"
            "It waits for a stream that was not forked",
        ),
    ],
)
def test_what_cannot_be_captured_is_said_with_advice(cuda, own, ends_with, said) -> None:
    cuda.ends_with = ends_with
    with pytest.raises(RuntimeError) as raised:
        captured_graph(raising(own, 3) if own else lambda: None)
    assert str(raised.value).startswith(f"the callable cannot be captured into a CUDA graph: {said}")
    assert cuda.current == "caller"


def test_after_a_capture_that_failed_the_process_goes_on_as_before(cuda) -> None:
    cuda.ends_with = RuntimeError(ENDS)
    with pytest.raises(RuntimeError):
        captured_graph(lambda: None)
    assert cuda.log[2:] == ["failed", "pool", "captured"]


def test_a_callable_with_graphs_of_its_own_is_told_apart(cuda) -> None:
    own: dict[str, Any] = {}
    code = "calls = []\ndef fn():\n    calls.append(0)\n    if len(calls) == 3:\n        raise RuntimeError('no')"
    exec(compile(code, "/torch/_inductor/cudagraph_trees.py", "exec"), own)
    with pytest.raises(RuntimeError, match='Compile it without a mode, or with "max-autotune-no-cudagraphs"'):
        captured_graph(own["fn"])


def test_a_call_inside_a_capture_is_refused(cuda) -> None:
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="outside of any capture"):
        captured_graph(lambda: pytest.fail("called"))


@pytest.mark.parametrize(("available", "version"), [(False, "13.0"), (True, None)])
def test_a_machine_without_an_nvidia_gpu_is_told_so(monkeypatch, available, version) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(RuntimeError, match="expected an NVIDIA GPU, found none"):
        assert_dual_stream(lambda: pytest.fail("called"))


def test_missing_bindings_are_named_with_how_to_get_them(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ImportError, match="pip install cuda-bindings"):
        assert_dual_stream(lambda: pytest.fail("called"))


# --- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [12, 13])
def test_kernels_and_edges_are_read_on_either_version_of_cuda(version) -> None:
    num = random.randint(2, 12)
    edges = random_edges(num)
    handles = random.sample(range(1, 1000), num)
    specs = {
        handle: Spec("KERNEL", f"k{i}", **{random.choice(["func", "kern"]): 5000 + i})
        for i, handle in enumerate(handles)
    }
    driver = FakeDriver({1: (specs, [(handles[a], handles[b]) for a, b in edges])}, version)
    graph = read_graph(1, driver)
    number = [int(node.name[1:]) for node in graph.nodes]
    assert [node.function for node in graph.nodes] == [5000 + i for i in number]
    assert {(number[a], number[b]) for b, its in enumerate(graph.parents) for a in its} == set(edges)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("_ZN2at6native4fillIiEEvPT_", "void at::native::fill<int>(int*)"), ("f", "f"), ("_finalize", "_finalize")],
)
def test_cpp_names_are_demangled_and_others_kept(name, shown) -> None:
    assert read_graph(1, FakeDriver({1: ({1: Spec("KERNEL", name, func=1)}, [])})).nodes[0].name == shown


@pytest.mark.parametrize("unknown", [ValueError, KeyError])
def test_each_kind_of_node_has_a_readable_name(unknown) -> None:
    others = [name for name in NODE_TYPES if name not in ("KERNEL", "GRAPH")]
    driver = FakeDriver({1: ({i: Spec(name) for i, name in enumerate([*others, "OF_A_NEWER_DRIVER"], start=1)}, [])})
    driver.unknown = unknown
    names = [node.name for node in read_graph(1, driver).nodes]
    assert names == [node.kind for node in read_graph(1, driver).nodes]
    assert_expected_inline(
        ", ".join(names),
        """\
memcpy, memset, host function, empty, wait event, event record, ext semas signal, ext semas wait, mem alloc, mem free, \
batch mem op, conditional (what it holds is not read), unknown""",
    )


def test_a_kernel_that_the_driver_cannot_describe_is_still_a_kernel() -> None:
    driver = FakeDriver({1: ({1: Spec("KERNEL"), 2: Spec("KERNEL", func=5), 3: Spec("KERNEL", "k", func=6)}, [])})
    graph = read_graph(1, driver)
    assert graph.kernels == [0, 1, 2]
    assert [node.name for node in graph.nodes] == ["(a kernel without a known name)"] * 2 + ["k"]


def test_nodes_of_child_graphs_stand_in_their_place() -> None:
    kernel = [Spec("KERNEL", f"k{i}", func=100 + i) for i in range(6)]
    driver = FakeDriver(
        {
            1: ({1: kernel[0], 2: Spec("GRAPH", child=2), 3: kernel[1]}, [(1, 2), (2, 3)]),
            2: ({4: kernel[2], 5: kernel[3], 6: Spec("GRAPH", child=3), 7: Spec("GRAPH", child=4)}, [(4, 5), (5, 6)]),
            3: ({8: kernel[4], 9: kernel[5]}, []),
            4: ({}, []),
        }
    )
    graph = read_graph(1, driver)
    names = [node.name for node in graph.nodes]
    assert sorted(f"{names[a]} > {names[b]}" for b, its in enumerate(graph.parents) for a in its) == sorted(
        [
            "k0 > child graph",
            "child graph > k2",
            "child graph > child graph",
            "k2 > k3",
            "k3 > child graph",
            "child graph > k4",
            "child graph > k5",
            "k4 > k1",
            "k5 > k1",
            "child graph > k1",
        ]
    )


def test_an_empty_graph_is_read() -> None:
    assert read_graph(1, FakeDriver({1: ({}, [])})).nodes == ()


def test_an_error_of_the_driver_is_named(monkeypatch) -> None:
    driver = FakeDriver({1: ({1: Spec("KERNEL", "k", func=5)}, [])}, 12)
    del driver.cuGraphGetEdges_v2
    with pytest.raises(RuntimeError, match="_edges_without_data failed: CUDA_ERROR_LOSSY_QUERY"):
        read_graph(1, driver)
