"""One layer of two branches, as a user writes it for two streams, for one, and as the op; with delays in its branches.

The layer has two experts, both chosen, and a shared expert: a MoE layer whose routed branch has static shapes, so that
plain code can be compiled and captured. Its sizes make all buffers of the two branches equally large, as in two like
MLPs: whatever hands memory from one branch to the other can do so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dsmoe_op import MoEConfig, dual_stream_moe
from dsmoe_op import schedule as schedules
from dsmoe_op.streams import current_stream

Call = Callable[[Tensor], Tensor]
Late = Callable[[Tensor, int], Tensor]

OURS = "dsmoe_op"
CODES = (OURS, "wait_stream", "events")
T, H, E, I = 64, 4096, 2, 2048
S = E * I
BEFORE, ROUTED, SHARED = 0, 1, 2
"""Where a delay is: index into `Weights.delays`."""
CONFIG = MoEConfig(top_k=E, activation="relu2")


class Weights(nn.Module):
    """Parameters, and the delays in nanoseconds, at addresses that a captured graph may keep."""

    delays: Tensor

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values.to(device, dtype), requires_grad=False)

        self.router, self.w13, self.w2 = normal(E, H), normal(E, I, H), normal(E, H, I)
        self.shared_w13, self.shared_w2 = normal(S, H), normal(H, S)
        self.register_buffer("delays", torch.zeros(3, dtype=torch.int64, device=device))
        for tensor in (*self.parameters(), *self.buffers()):
            torch._dynamo.mark_static_address(tensor)  # or reduce-overhead copies the weights before each replay


def routed_branch(w: Weights, x: Tensor) -> Tensor:
    """Both experts, weighted by their normalised sigmoid scores; float32 [T, H]."""
    scores_TE = torch.sigmoid(x.float() @ w.router.float().t())
    weights_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    h = torch.relu(x @ w.w13.flatten(0, 1).t()).square()
    y0, y1 = h[:, :I] @ w.w2[0].t(), h[:, I:] @ w.w2[1].t()
    return weights_TE[:, :1] * y0.float() + weights_TE[:, 1:] * y1.float()


def shared_branch(w: Weights, x: Tensor) -> Tensor:
    return torch.relu(x @ w.shared_w13.t()).square() @ w.shared_w2.t()


def total(routed: Tensor, shared: Tensor) -> Tensor:
    return (routed + shared.float()).to(shared.dtype)


def layer(code: str, w: Weights, late: Late, *, two_streams: bool, made_inside: bool) -> Call:
    """The layer as a function of x [T, H].

    Args:
        code: one of CODES.
        late: `late(x, where)` is a copy of x, made after a delay. The op does without: its launches are delayed.
        two_streams: or the same code without its second stream.
        made_inside: whether the function first makes the layer's input, x * 2.
    """
    functions = {OURS: _ours, "wait_stream": _wait_stream, "events": _events}
    fn = functions[code] if two_streams or code == OURS else _one_stream
    call = fn(w, late, "dual" if two_streams else "serial")
    return (lambda x: call(x * 2.0)) if made_inside else call


def _ours(w: Weights, late: Late, schedule: str) -> Call:
    def call(x: Tensor) -> Tensor:
        return dual_stream_moe(
            x,
            config=CONFIG,
            router_weight=w.router,
            w13=w.w13,
            w2=w.w2,
            shared_w13=w.shared_w13,
            shared_w2=w.shared_w2,
            schedule=schedule,
        )

    return call


def _one_stream(w: Weights, late: Late, schedule: str) -> Call:
    def call(x: Tensor) -> Tensor:
        routed = routed_branch(w, late(x, ROUTED))
        shared = shared_branch(w, late(x, SHARED))
        return total(routed, shared)

    return call


def _wait_stream(w: Weights, late: Late, schedule: str) -> Call:
    alt = torch.cuda.Stream(priority=-1)

    def call(x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        alt.wait_stream(main)
        routed = routed_branch(w, late(x, ROUTED))
        with torch.cuda.stream(alt):
            shared = shared_branch(w, late(x, SHARED))
        main.wait_stream(alt)
        return total(routed, shared)

    return call


def _events(w: Weights, late: Late, schedule: str) -> Call:
    alt = torch.cuda.Stream(priority=-1)

    def call(x: Tensor) -> Tensor:
        fork, join = torch.cuda.Event(), torch.cuda.Event()
        fork.record()
        routed = routed_branch(w, late(x, ROUTED))
        with torch.cuda.stream(alt):
            fork.wait()
            shared = shared_branch(w, late(x, SHARED))
            join.record()
        join.wait()
        return total(routed, shared)

    return call


@functools.cache
def late_op() -> Any:
    """`late(x, ns, where)`, an op since no compiler may look into a delay: a copy of x after ns[where] ns."""
    from dsmoe_op.cli.delay import delay

    library = torch.library.Library("dsmoe_hazard", "DEF")
    library.define("late(Tensor x, Tensor ns, int where) -> Tensor")

    def late(x: Tensor, ns: Tensor, where: int) -> Tensor:
        delay(ns, where)
        return x.clone()

    library.impl("late", torch.compiler.disable(late), "CompositeExplicitAutograd")
    torch.library.register_fake("dsmoe_hazard::late", lambda x, ns, where: torch.empty_like(x), lib=library)
    _libraries.append(library)
    return torch.ops.dsmoe_hazard.late.default


_libraries: list[torch.library.Library] = []
"""A registration lives as long as its object."""


@contextlib.contextmanager
def delayed_launches(ns: Tensor) -> Iterator[list[str]]:
    """Delays each branch inside the op before its first launch; yields the names of the launches delayed so far."""
    from dsmoe_op.cli.delay import delay

    execute = schedules.execute
    delayed: list[str] = []

    def execute_late(steps: Any, issue: Callable[[str, int], None], device: torch.device) -> None:
        first: dict[str, str] = {}
        for step in steps:
            if isinstance(step, schedules.Launch):
                first.setdefault(step.stream, step.name)
        where = {name: ROUTED if stream == "main" else SHARED for stream, name in first.items()}

        def issue_late(name: str, stream: int) -> None:
            if name in where:
                with current_stream(stream):
                    delay(ns, where[name])
                delayed.append(name)
            issue(name, stream)

        execute(steps, issue_late, device)

    schedules.execute = execute_late
    try:
        yield delayed
    finally:
        schedules.execute = execute
