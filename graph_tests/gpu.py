"""What the tests on a GPU share: one layer's weights, calls with fresh inputs, captures, delays, failures, profiles."""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from layers import WAYS, make_layer, quantized
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsmoe_op import MoEConfig, checks, dual_stream_moe, reference, streams, tuning
from dsmoe_op.cli import profiling
from dsmoe_op.tuning import LayerTiles, Tile

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# One shape for all tests of a kind of weights, since each costs a dozen compiled kernels.
CONFIG = MoEConfig(top_k=4, routed_scaling_factor=2.5)
SIZES = {"H": 256, "E": 16, "I": 128, "S": 384}
QUANTISED_SIZES = {"H": 288, "E": 16, "I": 160, "S": 320}
"""No multiples of 128, which is what a scale of fp8 stands for, but of 32, as persistent products of four bits need."""
SCHEDULES = ("serial", "dual", "dual_shared_main", "fused")
SPLIT = Tile(16, 32, 128, 4, 3, swap=True, splits=4), Tile(16, 64, 128, 4, 3, swap=True)
"""Of GEMM 1 and GEMM 2 of one launch; H is a multiple of 512."""
Formats = tuple[str | None, str | None]
"""Of the routed and the shared experts; None: not quantised."""
FORMATS: dict[str, Formats] = {
    "16bit": (None, None),
    "fp8_block": ("fp8_block", "fp8_block"),
    "int4+none": ("int4", None),
}
"""Layers that differ in their launches and buffers: fp8 rows have some of their own, of hidden_states and of h."""


def schedules_of(formats: Formats) -> tuple[str, ...]:
    """fused takes one format."""
    return SCHEDULES if formats[0] == formats[1] else SCHEDULES[:3]


def every_call(
    ways: tuple[str, ...] = WAYS, schedules: tuple[str, ...] = SCHEDULES, quantised: tuple[str, ...] | None = None
) -> pytest.MarkDecorator:
    """A test of `way`, `schedule` and `block`: in 16 bits each way in each schedule; quantised, which the routing does
    not know, one way in each schedule, or in those of `quantised`."""
    calls = [(way, schedule, "16bit") for way, schedule in itertools.product(ways, schedules)]
    for name in list(FORMATS)[1:]:
        some = [s for s in schedules_of(FORMATS[name]) if s in (schedules if quantised is None else quantised)]
        calls += [("router_weight", schedule, name) for schedule in some]
    return pytest.mark.parametrize(("way", "schedule", "block"), calls, indirect=["block"])


in_any_format = pytest.mark.parametrize("block", FORMATS, indirect=True)

_SHARED = ("gate", "shared_gemm1", "shared_gemm2")


def _few(*ahead: str) -> dict[str, tuple[str, ...]]:
    """By schedule, where one launch has all products of the routed experts."""
    routing, finalize = (*ahead, "router", "choose_order"), "finalize"
    return {
        "serial": (*routing, *_SHARED, "experts_finalize"),
        "dual": (*routing, "experts", *_SHARED, finalize),
        "dual_shared_main": (*ahead, *_SHARED, "router", "choose_order", "experts", finalize),
        "fused": (*routing, "gate", "fused_experts_finalize"),
    }


def _many(ahead: tuple[str, ...], products: tuple[str, ...], shared: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The same where each product is a launch."""
    routed = ("router", "choose_order", *products)
    return {
        "serial": (*ahead, *routed, *shared, "finalize"),
        "dual": (*ahead, *routed, *shared, "finalize"),
        "dual_shared_main": (*ahead, *shared, *routed, "finalize"),
        "fused": (*ahead, "router", "choose_order", "gate", "fused_gemm1", "fused_gemm2", "finalize"),
    }


LAUNCHES = {
    ("16bit", 7): _few(),
    ("16bit", 130): _many((), ("gemm1", "gemm2"), _SHARED),
    ("fp8_block", 7): _few("quantize"),
    ("fp8_block", 130): _many(
        ("quantize",), ("gemm1", "quantize_h", "gemm2"), (*_SHARED[:2], "quantize_shared_h", _SHARED[2])
    ),
    ("int4+none", 7): _many((), ("gemm1", "gemm2"), _SHARED),
    ("int4+none", 130): _many((), ("reorder", "gemm1", "reorder_h", "gemm2"), _SHARED),
}
"""Of one such layer, by format and number of tokens, and then by schedule, in the order in which they are issued."""
AHEAD = {"quantize"}
"""Launches before the fork."""
SHARED = {*_SHARED, "quantize_shared_h"}


class Block:
    """The weights of one layer, with a gated shared expert and a correction bias."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", sizes: dict[str, int] | None = None,
        formats: Formats = (None, None),
    ) -> None:  # fmt: skip
        sizes = sizes or (SIZES if formats == (None, None) else QUANTISED_SIZES)
        self.dtype, self.device, self.sizes, self.formats = dtype, device, sizes, formats
        _, args = make_layer(
            1, config=CONFIG, dtype=dtype, device=device, shared_gate=True, correction_bias=True, **sizes
        )
        self.args = quantized(args, *formats)
        self.config = self.args["config"]

    def inputs(self, T: int, way: str = "router_weight") -> tuple[Tensor, dict[str, Any]]:
        """Fresh hidden_states, and the other arguments. No row's choice hangs on a rounding of its logits."""
        drawn = 2 * T + 16
        options: dict[str, Any] = {"correction_bias": True} if way != "topk_ids" else {}
        options |= {"dtype": self.dtype, "device": self.device, **self.sizes}
        x, given = make_layer(drawn, way=way, config=CONFIG, **options)
        args = {k: v for k, v in self.args.items() if k not in ("router_weight", "correction_bias")}
        if way == "topk_ids":
            rows = torch.arange(T, device=self.device)
            args |= {name: given[name][:T] for name in ("topk_ids", "topk_weights")}
        else:
            args["correction_bias"] = self.args["correction_bias"]
            if way == "router_weight":
                args["router_weight"] = self.args["router_weight"]
                rows = clear_rows(x, T, args)
            else:
                rows = clear_rows(x, T, args | {"router_logits": given["router_logits"]})
                args["router_logits"] = given["router_logits"][rows]
        return x[rows].contiguous(), args

    def out(self, T: int, way: str = "router_weight") -> tuple[Tensor, dict[str, Any], Tensor]:
        """Inputs as above, and what the layer makes of them on one stream."""
        x, args = self.inputs(T, way)
        return x, args, dual_stream_moe(x, **args, schedule="serial")


def clear_rows(x: Tensor, T: int, args: dict[str, Any]) -> Tensor:
    """T rows of x in which the last chosen expert is well ahead of the first that is not chosen (sigmoid scores)."""
    config = args["config"]
    if "router_logits" in args:
        logits = args["router_logits"].double()
    else:
        logits = reference.compute_logits(x, args["router_weight"], None, config)
    keys = logits.sigmoid() + args["correction_bias"].double() if "correction_bias" in args else logits.sigmoid()
    best = keys.topk(config.top_k + 1, dim=-1).values
    rows = (best[:, -2] - best[:, -1] > 1e-4).nonzero().flatten()[:T]
    assert len(rows) == T
    return rows


def capture(fn: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of fn, and what fn returned in it; options as of torch.cuda.graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        out = fn()
    return graph, out


class Captured:
    """A layer in a graph, after one eager call."""

    def __init__(
        self, block: Block, T: int, *, way: str = "router_weight", schedule: str = "dual", **options: Any
    ) -> None:
        self.block, self.T, self.way = block, T, way
        self.x, self.args = block.inputs(T, way)
        dual_stream_moe(self.x, **self.args, schedule=schedule)
        self.graph, self.out = capture(lambda: dual_stream_moe(self.x, **self.args, schedule=schedule), **options)

    def is_right(self) -> bool:
        """A replay with new contents has the bits of the serial eager call."""
        x, args, want = self.block.out(self.T, self.way)
        self.x.copy_(x)
        for name in ("router_logits", "topk_ids", "topk_weights"):
            if name in args:
                self.args[name].copy_(args[name])
        self.graph.replay()
        return torch.equal(self.out, want)


class Differences:
    """Compares on the GPU, on the current stream, and is read once: thousands of results without a wait for each."""

    def __init__(self) -> None:
        self._found = torch.zeros((), dtype=torch.int64, device="cuda")

    def compare(self, out: Tensor, want: Tensor) -> None:
        self._found += (out != want).any()

    def __int__(self) -> int:
        """How many results were not what was wanted, bit for bit."""
        return int(self._found)


class Boom(Exception):
    pass


@contextlib.contextmanager
def issuing(wrap: Callable[[Callable[[], None], str], None]) -> Iterator[None]:
    """Each launch of a layer inside goes through wrap(launch, name), on the stream where it is issued."""
    from dsmoe_op import cuda

    original = cuda._Plan.issue

    def issue(self: Any, table: Any, name: str, stream: int) -> None:
        with streams.current_stream(stream):
            wrap(lambda: original(self, table, name, stream), name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda._Plan, "issue", issue)
        yield


def raising_at(failing: str, *, before: bool = False) -> contextlib.AbstractContextManager[None]:
    """An exception right after the launch of that name, or instead of it."""

    def wrap(launch: Callable[[], None], name: str) -> None:
        if not (name == failing and before):
            launch()
        if name == failing:
            raise Boom

    return issuing(wrap)


def launches_of(call: Callable[[], Any]) -> list[str]:
    """The names of the launches of one call of a layer, in the order in which they are issued."""
    names: list[str] = []

    def wrap(launch: Callable[[], None], name: str) -> None:
        names.append(name)
        launch()

    with issuing(wrap):
        call()
    return names


class Allocations(TorchDispatchMode):
    """Counts PyTorch's operations on real memory, each of which allocates in a layer, and lets one of them fail.

    Args:
        log: where each is written down.
        fail_at: the number, from 0, of the one that fails.
    """

    def __init__(self, log: list[tuple] | None = None, *, fail_at: int | None = None) -> None:
        super().__init__()
        self.log, self.fail_at, self.count = log, fail_at, 0
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.returns[0].alias_info is not None or made.is_meta:  # a view, or what needs no memory
            return made
        if self.count == self.fail_at:
            raise torch.OutOfMemoryError(str(func))
        self.count += 1
        self.made.append(weakref.ref(made))
        if self.log is not None:
            self.log.append(("allocates",))
        return made


def with_tiles(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Calls inside have what is chosen for them, but for these fields of `tuning.LayerTiles`."""
    return with_changed(lambda tiles: tiles._replace(**changes))


@contextlib.contextmanager
def with_changed(change: Callable[[LayerTiles], LayerTiles]) -> Iterator[None]:
    """Calls inside have what `change` makes of what is chosen for them."""
    layer_choice = tuning.layer_choice

    def changed(*given: Any) -> tuning.Choice:
        choice = layer_choice(*given)
        return choice._replace(tiles=change(choice.tiles))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_checked", {})  # plans that are made inside stay there
        patch.setattr(tuning, "layer_choice", changed)
        yield


def nap() -> None:
    """A sleep of random length on the current stream, or none; up to some 60 us."""
    if random.random() < 0.6:
        torch.cuda._sleep(random.randrange(1, 100_000))


def delays() -> contextlib.AbstractContextManager[None]:
    """Naps before and after each launch."""

    def wrap(launch: Callable[[], None], name: str) -> None:
        nap()
        launch()
        nap()

    return issuing(wrap)


class Profile(NamedTuple):
    """What ran on the GPU, by stream (in a replay: by lane), and which calls of the CUDA runtime started it."""

    streams: dict[int, list[str]]
    runtime: list[str]

    def with_kernel(self, part: str) -> list[str]:
        """All that ran on the one stream where a kernel of that name ran."""
        (found,) = (names for names in self.streams.values() if any(part in name for name in names))
        return found


def profiled(fn: Callable[[], Any]) -> Profile:
    """Kernels, memsets and copies of one call of fn, which is called once before."""
    fn()
    trace = profiling.record(fn)
    streams: dict[int, list[str]] = {}
    for work in profiling.read_trace(trace):
        streams.setdefault(work.stream, []).append(work.name)
    assert streams, "the profiler saw nothing run on the GPU"
    return Profile(
        streams, [e["name"] for e in trace["traceEvents"] if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    )
