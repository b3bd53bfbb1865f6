"""The launches of a layer as data, and the one executor that issues them.

A schedule is a tuple of steps in the order in which they are issued: launches, each on a stream and with the tensors it
reads and writes by name, and waits between the two streams. "main" is the caller's stream, "alt" its side stream
(`streams.py`). All tensors are allocated on the caller's stream before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch

from dsmoe_op import ranges, streams
from dsmoe_op.checks import LAYER_FIELDS
from dsmoe_op.config import MoEConfig
from dsmoe_op.formats import FORMATS, SUFFIXES

StreamName = Literal["main", "alt"]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    name: str
    stream: StreamName
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    updates: tuple[str, ...] = ()
    """What another launch wrote, and this one reads and changes."""
    early: bool = False
    """It may start while the launch before it on its stream runs; it waits for that one's end itself (`overlap.py`)."""
    followed: bool = False
    """The next launch on its stream is an early one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """What is issued on `waiter` from here on runs after all that was issued on `on` so far."""

    waiter: StreamName
    on: StreamName


Step = Launch | Wait
FORK = Wait(waiter="alt", on="main")
JOIN = Wait(waiter="main", on="alt")


def resolve(schedule: str, *, has_shared: bool, auto: str = "dual", one_format: bool = True) -> str:
    """What "auto" means is `auto`; and "serial" where there is no shared expert to run beside the routed ones.

    Args:
        one_format: whether the weights of both branches have it, without which they cannot be "fused": a choice is made
            for a kind of weights, and formats of a kind may differ.
    """
    if not has_shared:
        return "serial"
    if schedule != "auto":
        return schedule
    return auto if one_format or auto != "fused" else "dual"


def coded_rows(config: MoEConfig, *, has_shared: bool) -> dict[str, str]:
    """The branches whose hidden_states become fp8 numbers in a launch for both, and over what: "block" or "token".

    Where the branches' formats differ in that, the shared expert's products make their own. Where routing weights come
    first, each slot's row is another, and where a format has a static scale there is nothing to find out.
    """
    if config.apply_router_weight_on_input:
        return {}
    found = coded_h(config, has_shared=has_shared)
    first = next(iter(found.values()), None)
    return {branch: over for branch, over in found.items() if over == first}


def coded_h(config: MoEConfig, *, has_shared: bool) -> dict[str, str]:
    """The branches whose h may become fp8 numbers in a launch of its own, and over what, each branch for itself."""
    names = {"routed": config.routed_format, "shared": config.shared_format if has_shared else None}
    activations = {branch: FORMATS[name].activations for branch, name in names.items() if name is not None}
    return {branch: over for branch, over in activations.items() if over in ("block", "token")}


@functools.lru_cache(maxsize=256)
def plan(
    schedule: str, present: frozenset[str], *, zero_experts: bool, finalized: bool, one_chunk: bool = False,
    alt_first: bool = False, one_launch: bool = False, coded_rows: frozenset[str] = frozenset(),
    coded_h: frozenset[str] = frozenset(), ordered: frozenset[str] = frozenset(),
) -> tuple[Step, ...]:  # fmt: skip
    """The steps of one layer.

    Args:
        schedule: a resolved one, so not "auto".
        present: names of the optional tensors of the call, as in `dual_stream_moe`.
        zero_experts: finalize also reads hidden_states.
        finalized: whether finalize is the last launch.
        one_chunk: the slots are so few that one program orders them, which needs no counters by itself.
        alt_first: issue the side branch before the caller's own. A replayed graph continues a join on the lane of its
            first-recorded parent, so the default keeps to one lane for the caller and one for the side stream.
        one_launch: the routed experts' products are one launch, which also ends the layer where the caller's stream has
            all that it takes.
        coded_rows: of "routed" and "shared", the branches whose weights multiply hidden_states as fp8 numbers that one
            launch makes for both, before the fork.
        coded_h: the branches whose second products multiply h as such numbers, which a launch between the products
            makes; not with one_launch or "fused", whose second products do so themselves.
        ordered: of "x" and "h", what the routed experts' products multiply in another order of columns, into which a
            launch before each brings it; not with one_launch or "fused".
    """

    def launch(name: str, reads: str, writes: str, stream: StreamName = "main", updates: str = "") -> Launch:
        there = dict.fromkeys(r for r in reads.split() if r not in OPTIONAL or r in present)
        return Launch(name, stream, tuple(there), tuple(writes.split()), tuple(updates.split()))

    has_shared, has_gate, fused = "shared_w13" in present, "shared_gate" in present, schedule == "fused"
    branch: StreamName = "alt" if schedule == "dual_shared_main" else "main"
    shared_branch: StreamName = "alt" if schedule == "dual" else "main"

    routed = []
    rows, slots = "num_rows sorted_slot row_of blocks taken", "slot_ids slot_weights"
    rows += " arrivals" if one_launch else ""
    choice = "router_bias correction_bias num_valid_tokens expert_map"
    if "router_weight" in present:
        routed.append(launch("router", "hidden_states router_weight", "logits counters", branch))
        routed.append(launch("choose_order", f"logits {choice}", f"{slots} {rows}", branch, "counters"))
    elif "router_logits" in present:
        routed.append(launch("choose", f"router_logits {choice}", f"{slots} counters", branch))
        routed.append(launch("order", "slot_ids expert_map", rows, branch, "counters"))
    else:
        chosen = "topk_ids topk_weights expert_map num_valid_tokens"
        if not one_chunk:
            routed.append(launch("zero", "", "counters", branch))
        routed.append(launch("order", chosen, f"{slots} {rows}", branch, "" if one_chunk else "counters"))
    gate = [launch("gate", "hidden_states shared_gate", "gate", shared_branch)] if has_gate else []
    routed_x, shared_x = ("x_codes x_scales" if b in coded_rows else "hidden_states" for b in ("routed", "shared"))
    routed_x = "x_ordered" if "x" in ordered else routed_x
    gemm1 = f"{routed_x} {_parts('w13')} w13_bias blocks sorted_slot slot_weights"
    gemm2 = f"{_parts('w2')} w2_bias blocks"
    h = "h_codes h_scales" if "routed" in coded_h else "h"
    shared_h = "shared_h_codes shared_h_scales" if "shared" in coded_h else "shared_h"
    shared1 = f"{shared_x} {_parts('shared_w13')} num_valid_tokens"
    shared2 = f"{_parts('shared_w2')} num_valid_tokens{' gate' if has_gate else ''}"
    sums = f"slot_ids slot_weights row_of{' hidden_states' if zero_experts else ''}"
    shared = gate
    if has_shared and not fused:
        shared.append(launch("shared_gemm1", shared1, "shared_h", shared_branch))
        if "shared" in coded_h:
            shared.append(launch("quantize_shared_h", "shared_h", shared_h, shared_branch))
        shared.append(launch("shared_gemm2", f"{shared_h} {shared2}", "shared", shared_branch))
    one_stream = schedule in ("serial", "fused")
    ahead = [launch("quantize", "hidden_states", "x_codes x_scales")] if coded_rows else []
    end = []
    if finalized and not (one_launch and one_stream):
        end.append(launch("finalize", f"y {sums}{' shared' if has_shared else ''}", "out"))
    if one_launch:
        name, reads, writes = "experts", f"{gemm1} {gemm2}", "parts h y"
        if fused:
            name, reads, writes = "fused_experts", f"{reads} {shared1} {shared2}", f"{writes} shared_h shared"
        if one_stream:
            routed, shared = routed + shared, []
        if finalized and one_stream:
            name, writes = f"{name}_finalize", f"{writes} out"
            reads += f" {sums}{' shared' if has_shared and not fused else ''}"
        routed.append(launch(name, reads, writes, branch, "arrivals"))
    elif fused:
        routed += shared
        routed.append(launch("fused_gemm1", f"{gemm1} {shared1}", "h shared_h"))
        routed.append(launch("fused_gemm2", f"h {gemm2} num_rows shared_h {shared2}", "y shared"))
        shared = []
    else:
        if "x" in ordered:
            routed.append(launch("reorder", "hidden_states", "x_ordered", branch))
        routed.append(launch("gemm1", gemm1, "h", branch, "taken"))
        if "routed" in coded_h:
            routed.append(launch("quantize_h", "h num_rows", h, branch))
        if "h" in ordered:
            routed.append(launch("reorder_h", "num_rows", "", branch, "h"))
        routed.append(launch("gemm2", f"{h} {gemm2} num_rows", "y", branch, "taken"))

    if one_stream:
        return _overlapping(*ahead, *routed, *shared, *end)
    on_main, on_alt = (routed, shared) if branch == "main" else (shared, routed)
    first, second = (on_alt, on_main) if alt_first else (on_main, on_alt)
    return _overlapping(*ahead, FORK, *first, *second, JOIN, *end)


def _parts(weight: str) -> str:
    """The tensors of a weight, which has more than one where it is quantised."""
    return " ".join(weight + suffix for suffix in SUFFIXES)


def _overlapping(*steps: Step) -> tuple[Step, ...]:
    """The steps, with each launch early that comes straight after another on its stream."""
    new = list(steps)
    last: dict[StreamName, tuple[int, Launch]] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Wait):
            last.pop(step.waiter, None)
            continue
        if step.stream in last:
            j, before = last[step.stream]
            new[j] = dataclasses.replace(before, followed=True)
            new[i] = step = dataclasses.replace(step, early=True)
        last[step.stream] = i, step
    return tuple(new)


TILED = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "shared_", "fused_")
    for name in ("gemm1", "gemm2", "experts", "experts_finalize")
)
"""Launches whose tiles are chosen by the layer's sizes."""

PARTS = {
    **dict.fromkeys(("quantize", "router", "choose_order", "choose", "order", "zero"), "router"),
    **dict.fromkeys(("reorder", "gemm1", "quantize_h", "reorder_h", "gemm2", "experts"), "routed"),
    **dict.fromkeys(("gate", "shared_gemm1", "quantize_shared_h", "shared_gemm2"), "shared"),
    "finalize": "finalize",
    "experts_finalize": "routed+finalize",
    **dict.fromkeys(("fused_gemm1", "fused_gemm2", "fused_experts"), "routed+shared"),
    "fused_experts_finalize": "routed+shared+finalize",
}
"""The part of the layer that a launch is; some are several."""

OPTIONAL = frozenset(LAYER_FIELDS[3:])
"""Tensors of a call that may be absent."""


def execute(steps: tuple[Step, ...], issue: Callable[[str, int], None], device: torch.device) -> None:
    """Issues the steps: `issue(name, stream)` launches on the stream of that handle.

    PyTorch's current stream stays the caller's throughout. An exception leaves the two streams joined, so that a
    capture or the next call goes on.
    """
    if torch.autograd._profiler_enabled():
        issue = _in_ranges(issue)
    index = device.index
    if not any(type(step) is Wait for step in steps):
        main = streams.current_handle(index)
        for step in steps:
            issue(step.name, main)  # type: ignore[union-attr]
        return
    lanes = streams.lanes(index)
    handles = lanes.handles
    if handles["alt"] == handles["main"]:  # a server's own side stream is the current one: in order on one stream
        for step in steps:
            if type(step) is Launch:
                issue(step.name, handles["main"])
        return
    forked = False
    try:
        for step in steps:
            if type(step) is Launch:
                issue(step.name, handles[step.stream])
            elif type(step) is Wait:
                lanes.wait(step.waiter, step.on)
                forked = step.waiter == "alt"
    finally:
        if forked:
            lanes.wait("main", "alt")


def _in_ranges(issue: Callable[[str, int], None]) -> Callable[[str, int], None]:
    def in_range(name: str, stream: int) -> None:
        with ranges.part(PARTS[name]):
            issue(name, stream)

    return in_range
