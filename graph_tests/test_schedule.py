"""The launches of a layer as data: where they run, how many there are, and that no timing of two streams can matter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import gpu
import pytest
import torch
from gpu import Boom

from dsmoe_op import MoEConfig, streams, tuning
from dsmoe_op.formats import FORMATS, SUFFIXES
from dsmoe_op.schedule import FORK, JOIN, OPTIONAL, Launch, Step, Wait, coded_h, coded_rows, execute, plan, resolve
from dsmoe_op.testing import check_schedule

ALWAYS = ("hidden_states", "w13", "w2")
WAYS = {
    "router_weight": ("router_weight", "router_bias", "correction_bias"),
    "router_logits": ("router_logits", "correction_bias"),
    "topk_ids": ("topk_ids", "topk_weights"),
}
SHARED = ("shared_w13", "shared_w2")
OPTIONS = (("w13_bias", "w2_bias"), ("num_valid_tokens",), ("expert_map",), ("shared_gate",))
UNFINALIZED = ("y", "slot_ids", "slot_weights", "row_of")
ROUTED = {"router", "choose_order", "choose", "zero", "order", "gemm1", "gemm2", "experts"}


def presents(*, shared: bool) -> Iterator[frozenset[str]]:
    """Every way in with every set of options."""
    for way, chosen in itertools.product(WAYS.values(), itertools.product((False, True), repeat=len(OPTIONS))):
        options = [names for names, is_there in zip(OPTIONS, chosen, strict=True) if is_there]
        if ("shared_gate",) in options and not shared:
            continue
        yield frozenset((*way, *itertools.chain(*options), *(SHARED if shared else ())))


Plan = tuple[tuple[Step, ...], set[str], tuple[str, ...]]


@functools.cache
def plans(*schedules: str) -> tuple[Plan, ...]:
    """(steps, inputs, outputs) of every layer that these schedules can run, its weights not quantised."""
    return _distinct(
        plan_of(schedule, present, **options)
        for schedule, shared in itertools.product(schedules, (True, False))
        for present, options in itertools.product(presents(shared=shared), OTHERS)
    )


@functools.cache
def quantised_plans() -> tuple[Plan, ...]:
    """The same in every mix of formats and every schedule."""
    return _distinct(
        plan_of(schedule, present | of_formats, **options, **codes)
        for schedule, shared in itertools.product(ALL, (True, False))
        if shared or schedule == "serial"
        for of_formats, codes in [*_distinct_codes(schedule, shared), *_ordered(schedule, shared)]
        for present, options in itertools.product(presents(shared=shared), OTHERS)
        if options["alt_first"] <= (schedule in TWO_STREAMS) and options["one_chunk"] <= ("topk_ids" in present)
        if not ((codes["coded_h"] or codes["ordered"]) and options["one_launch"])
    )


def _distinct_codes(schedule: str, shared: bool) -> list[tuple[frozenset[str], dict[str, frozenset[str]]]]:
    """The tensors of every mix, and the branches whose rows become fp8 in their own launches: all that can, or none."""
    found = {
        (mix.tensors, rows, h)
        for mix in mixes(schedule, shared=shared)
        for rows, h in itertools.product((frozenset(), mix.coded_rows(shared)), (frozenset(), mix.coded_h(shared)))
    }
    nothing: frozenset[str] = frozenset()
    return [
        (tensors, {"coded_rows": rows, "coded_h": h, "ordered": nothing}) for tensors, rows, h in sorted(found, key=str)
    ]


def _ordered(schedule: str, shared: bool) -> Iterator[tuple[frozenset[str], dict[str, frozenset[str]]]]:
    """Routed experts of four bits whose products multiply columns in another order, beside any shared expert."""
    for mix in mixes(schedule, shared=shared):
        if schedule != "fused" and mix.routed is not None and FORMATS[mix.routed].bits == 4:
            for ordered in (frozenset({"x"}), frozenset({"h"}), frozenset({"x", "h"})):
                codes = {"coded_rows": mix.coded_rows(shared), "coded_h": mix.coded_h(shared)}
                yield mix.tensors, {**codes, "ordered": ordered}


def drawn_plans() -> Iterator[Plan]:
    """Each mix of formats in each schedule, with a way in and options drawn for it."""
    for schedule, shared in itertools.product(ALL, (True, False)):
        for mix in mixes(schedule, shared=shared):
            present = random.choice([*presents(shared=shared)])
            options = random.choice(OTHERS)
            h = frozenset() if options["one_launch"] else mix.coded_h(shared)
            yield plan_of(schedule, present | mix.tensors, **options, coded_rows=mix.coded_rows(shared), coded_h=h)


def plan_of(schedule: str, present: frozenset[str], **options: Any) -> Plan:
    shared = "shared_w13" in present
    steps = plan(resolve(schedule, has_shared=shared), present, **options)
    outputs = ("out",) if options["finalized"] else (*UNFINALIZED, *(("shared",) if shared else ()))
    return steps, {*ALWAYS, *present}, outputs


def _distinct(found: Iterable[Plan]) -> tuple[Plan, ...]:
    return tuple({steps: (steps, *rest) for steps, *rest in found}.values())


OTHERS = [
    dict(zip(("zero_experts", "finalized", "alt_first", "one_chunk", "one_launch"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=5)
]


class Mix(NamedTuple):
    """Formats of the routed and the shared experts, and the tensors that their weights then have beside themselves."""

    routed: str | None
    shared: str | None
    tensors: frozenset[str]

    def config(self, shared: bool) -> MoEConfig:
        return MoEConfig(top_k=1, routed_format=self.routed, shared_format=self.shared if shared else None)

    def coded_rows(self, shared: bool) -> frozenset[str]:
        return frozenset(coded_rows(self.config(shared), has_shared=shared))

    def coded_h(self, shared: bool) -> frozenset[str]:
        return frozenset(coded_h(self.config(shared), has_shared=shared))


def mixes(schedule: str, *, shared: bool) -> Iterator[Mix]:
    """Those of a schedule that have some format; "fused" takes the same one twice."""
    for one, two in itertools.product(KINDS, KINDS if shared else [NOT_QUANTISED]):
        if (one[0] or two[0]) and (one[0] == two[0] or not shared or schedule != "fused"):
            names = [w + suffix for w in ("w13", "w2") for suffix in one[1]]
            names += [w + suffix for w in SHARED for suffix in two[1]]
            yield Mix(one[0], two[0], frozenset(names))


NOT_QUANTISED: tuple[None, tuple[str, ...]] = (None, ())
KINDS = [
    NOT_QUANTISED,
    *(
        (
            name,
            (
                "_scale",
                *["_zero_point"] * has_zero_point,
                *["_global_scale"] * format.has_global_scale,
                *["_input_scale"] * (format.activations == "tensor"),
            ),
        )
        for name, format in FORMATS.items()
        for has_zero_point in {False, format.may_have_zero_point}
    ),
]
"""Formats, and what tensors a weight has in them, by the ends of their names."""

ALL = ("serial", "dual", "dual_shared_main", "fused")
TWO_STREAMS = ("dual", "dual_shared_main")


def launches(steps: tuple[Step, ...], stream: str | None = None) -> list[Launch]:
    return [step for step in steps if isinstance(step, Launch) and stream in (None, step.stream)]


def two_streams(*schedules: str) -> Iterator[tuple[Step, ...]]:
    return (steps for steps, _, _ in plans(*schedules) if FORK in steps)


def test_dual_runs_the_routed_experts_on_the_callers_stream_and_the_shared_one_beside_them() -> None:
    for steps in two_streams("dual"):
        assert {s.name for s in launches(steps, "main")} <= {*ROUTED, "finalize"}
        assert {s.name for s in launches(steps, "alt")} - {"gate"} == {"shared_gemm1", "shared_gemm2"}


def test_dual_shared_main_runs_them_the_other_way_round() -> None:
    for steps in two_streams("dual_shared_main"):
        assert {s.name for s in launches(steps, "alt")} <= ROUTED
        assert {"shared_gemm1", "shared_gemm2"} <= {s.name for s in launches(steps, "main")}


def test_the_fork_comes_first_and_the_join_right_before_finalize() -> None:
    for steps in two_streams(*TWO_STREAMS):
        end = launches(steps)[-1:] if launches(steps)[-1].name == "finalize" else []
        assert steps[0] == FORK
        assert steps[-1 - len(end)] == JOIN
        assert (steps.count(FORK), steps.count(JOIN)) == (1, 1)


def test_finalize_is_the_last_launch_of_every_layer_that_has_it_or_a_part_of_the_last() -> None:
    for steps, _, outputs in plans(*ALL):
        names = [s.name for s in launches(steps)]
        assert names[-1].endswith("finalize") == ("out" in outputs)
        assert not any(name.endswith("finalize") for name in names[:-1])
        assert (names[-1] in ("experts_finalize", "fused_experts_finalize")) <= (FORK not in steps)


def test_one_launch_of_the_experts_leaves_four_launches_on_the_callers_stream_and_three_without_others() -> None:
    for present in (p for shared in (True, False) for p in presents(shared=shared)):
        has_shared = "shared_w13" in present
        for schedule, most in {"dual": 4, "fused": 4, "dual_shared_main": 4, "serial": 6 if has_shared else 3}.items():
            if has_shared or schedule == "serial":
                options = {"zero_experts": False, "finalized": True, "one_chunk": True}
                steps = plan(schedule, present, **options, one_launch=True)
                assert len(launches(steps, "main")) <= most, steps
                apart = plan(schedule, present, **options)
                on_one_stream = schedule in ("serial", "fused")
                assert len(launches(apart)) - len(launches(steps)) == 1 + on_one_stream, steps


def test_without_a_gate_a_fused_layer_is_three_launches() -> None:
    present = frozenset((*WAYS["router_weight"], *SHARED))
    steps = plan("fused", present, zero_experts=False, finalized=True, one_launch=True)
    assert [s.name for s in launches(steps)] == ["router", "choose_order", "fused_experts_finalize"]


def test_the_callers_branch_is_issued_first_unless_asked_otherwise() -> None:
    for schedule, present in itertools.product(TWO_STREAMS, presents(shared=True)):
        for alt_first in (False, True):
            steps = plan(schedule, present, zero_experts=False, finalized=True, alt_first=alt_first)
            order = [s.stream for s in launches(steps)[:-1]]
            assert order == sorted(order, reverse=not alt_first)


def test_dual_issues_at_most_five_launches_on_the_callers_stream_and_three_beside_them() -> None:
    for steps in two_streams("dual"):
        assert len(launches(steps, "main")) <= 5
        assert len(launches(steps, "alt")) <= 3


def test_serial_and_fused_have_one_stream_and_no_waits() -> None:
    for steps, _, _ in plans("serial", "fused"):
        assert launches(steps, "main") == list(steps)


def test_fused_runs_the_shared_expert_in_the_launches_of_the_routed_ones() -> None:
    for present in presents(shared=True):
        names = [s.name for s in launches(plan("fused", present, zero_experts=False, finalized=True))]
        assert [n for n in names if "gemm" in n] == ["fused_gemm1", "fused_gemm2"]


@pytest.mark.parametrize("schedule", ["auto", *ALL])
def test_every_schedule_means_serial_without_a_shared_expert(schedule: str) -> None:
    assert resolve(schedule, has_shared=False) == "serial"


def test_auto_means_two_streams_with_a_shared_expert() -> None:
    assert resolve("auto", has_shared=True) == "dual"
    assert resolve("auto", has_shared=True, auto="fused") == "fused"
    assert resolve("auto", has_shared=True, auto="fused", one_format=False) == "dual"
    assert resolve("auto", has_shared=True, auto="serial", one_format=False) == "serial"
    assert [resolve(s, has_shared=True) for s in ALL] == list(ALL)


def test_a_tensor_that_is_absent_is_not_read() -> None:
    for steps, inputs, _ in plans(*ALL):
        buffers = {name for s in launches(steps) for name in s.writes}
        assert {name for s in launches(steps) for name in s.reads} <= inputs | buffers


def test_exactly_the_launches_straight_after_another_on_their_stream_are_early_and_those_before_them_followed() -> None:
    some = 0
    for steps, _, _ in plans(*ALL):
        for stream in ("main", "alt"):
            lane = [s for s in steps if (s.waiter if isinstance(s, Wait) else s.stream) == stream]
            pairs = list(itertools.pairwise([None, *lane, None]))
            for before, step in pairs:
                if isinstance(step, Launch):
                    assert step.early == isinstance(before, Launch), (steps, step)
                if isinstance(before, Launch):
                    assert before.followed == isinstance(step, Launch), (steps, before)
                    some += before.followed
    assert some > 100


def test_finalize_of_two_streams_is_an_ordinary_launch() -> None:
    """It waits for both streams, and an early launch for the one before it alone."""
    for steps in two_streams(*TWO_STREAMS):
        assert not any(s.early for s in launches(steps) if s.name == "finalize")


def test_the_layer_of_the_gpu_tests_has_the_launches_that_they_name() -> None:
    for (name, T), by_schedule in gpu.LAUNCHES.items():
        block = gpu.Block(device="cpu", formats=gpu.FORMATS[name])
        _, args = block.inputs(1)
        kind = tuning.layer_kind(torch.bfloat16, False, *block.formats)
        sizes = (block.sizes[of] for of in "HIE")
        tiles = tuning.layer_choice(tuning.LayerShape(kind, *sizes, block.config.top_k, block.sizes["S"]), T).tiles
        present, few = frozenset(args) & OPTIONAL, tiles.one_launch
        in_order = name == "int4+none" and tiles.gemm1.persistent and tiles.gemm1.block_m > 16
        rows, h = (frozenset(coded(block.config, has_shared=True)) for coded in (coded_rows, coded_h))
        for resolved in gpu.schedules_of(block.formats):
            steps = plan(
                resolved, present, zero_experts=False, finalized=True, one_launch=few, coded_rows=rows,
                coded_h=frozenset() if few else h,
                ordered=frozenset({"x", "h"} if in_order else ()),
            )  # fmt: skip
            assert tuple(s.name for s in launches(steps)) == by_schedule[resolved], (name, T, resolved)


def test_a_launch_that_reads_a_weight_reads_all_its_tensors_and_no_other_launch_reads_one(counted) -> None:
    parts = {weight: {weight + suffix for suffix in SUFFIXES} for weight in (*ALWAYS[1:], *SHARED)}
    reads = 0
    for steps, inputs, _ in quantised_plans():
        of_weights = {weight: names & inputs for weight, names in parts.items()}
        of_all = set().union(*of_weights.values())
        for launch in launches(steps):
            read = of_all.intersection(launch.reads)
            assert read == set().union(*(of_weights[weight] for weight in read & parts.keys())), launch
            reads += len(read)
    counted("reads of quantised weights' tensors", reads)


def test_no_timing_of_the_streams_changes_a_result(counted) -> None:
    for steps, inputs, outputs in (*plans(*ALL), *quantised_plans()):
        assert check_schedule(steps, inputs, outputs) == []
    assert len(plans(*ALL)) > 500
    assert len(quantised_plans()) > 10_000
    counted("schedules proved free of races", len(plans(*ALL)))
    counted("schedules of quantised layers proved so too", len(quantised_plans()))
    counted("mixes of formats in these", len({mix[:2] for mix in mixes("dual", shared=True)}))


def cut_short(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """What `execute` issues where one of the launches raises, each in turn."""
    issued: list[Step] = []
    waits = mock.Mock(handles={"main": "main", "alt": "alt"}, wait=lambda *wait: issued.append(Wait(*wait)))
    with mock.patch.multiple(streams, lanes=lambda _: waits, current_handle=lambda _: "main"):
        for last in launches(steps):

            def issue(name: str, stream: str, last: Launch = last) -> None:
                issued.append(next(s for s in launches(steps, stream) if s.name == name))
                if name == last.name:
                    raise Boom

            issued.clear()
            with pytest.raises(Boom):
                execute(steps, issue, torch.device("cuda", 0))
            yield tuple(issued)


def test_a_layer_that_an_exception_ends_is_free_of_races_too(counted) -> None:
    """The streams are joined, or memory that the side stream still writes would be given away."""
    for steps, inputs, _ in (*plans(*ALL), *drawn_plans()):
        for issued in cut_short(steps):
            assert check_schedule(issued, inputs) == []
            assert issued[:-1] == steps[: len(issued) - 1]  # the last may be the join
            counted("layers that an exception ends proved so too")


# --- the checker itself: each way to spoil a schedule is caught -------------------------------------------------------


def replaced(steps: tuple[Step, ...], i: int, **changes: object) -> tuple[Step, ...]:
    return (*steps[:i], dataclasses.replace(steps[i], **changes), *steps[i + 1 :])


def without(steps: tuple[Step, ...], i: int) -> tuple[Step, ...]:
    return (*steps[:i], *steps[i + 1 :])


def dropped_waits(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    return (without(steps, i) for i, step in enumerate(steps) if step in (FORK, JOIN))


def turned_waits(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    return (replaced(steps, i, waiter=s.on, on=s.waiter) for i, s in enumerate(steps) if isinstance(s, Wait))


def moved_waits(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    """The fork anywhere after the first launch beside the caller's, and the join anywhere before the last one."""
    on_alt = [i for i, step in enumerate(steps) if isinstance(step, Launch) and step.stream == "alt"]
    for wait in {FORK, JOIN} & {*steps}:
        rest = without(steps, steps.index(wait))
        places = range(on_alt[0], len(rest) + 1) if wait == FORK else range(on_alt[-1])
        yield from ((*rest[:i], wait, *rest[i:]) for i in places)


def launches_on_the_other_stream(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    other = {"main": "alt", "alt": "main"}
    return (replaced(steps, i, stream=other[s.stream]) for i, s in enumerate(steps) if isinstance(s, Launch))


def shared_buffers(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    """One of two buffers takes the other's name, everywhere."""
    buffers = [name for s in launches(steps) for name in s.writes]

    def renamed(names: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
        return tuple(new if name == old else name for name in names)

    for old, new in itertools.combinations(buffers, 2):
        yield tuple(
            dataclasses.replace(s, **{f: renamed(getattr(s, f), old, new) for f in ("reads", "writes", "updates")})
            if isinstance(s, Launch)
            else s
            for s in steps
        )


def written_inputs(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    for i, step in enumerate(steps):
        if isinstance(step, Launch):
            yield from (replaced(steps, i, writes=(*step.writes, name)) for name in inputs)


def dropped_launches(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    return (without(steps, i) for i, step in enumerate(steps) if isinstance(step, Launch))


def late_writers(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    """A launch is issued after the one that first reads what it writes."""
    for i, step in enumerate(steps):
        if isinstance(step, Launch):
            written = set(step.writes)
            reader = next(
                (j for j, s in enumerate(steps) if isinstance(s, Launch) and {*s.reads, *s.updates} & written), None
            )
            if reader is not None:
                yield (*steps[:i], *steps[i + 1 : reader + 1], step, *steps[reader + 1 :])


def early_launches(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    """One that is not early is made so."""
    return (replaced(steps, i, early=True) for i, s in enumerate(steps) if isinstance(s, Launch) and not s.early)


def unjoined_exceptions(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    """An exception ends the layer, and nothing joins the streams that it had forked."""
    return (issued[:-1] for issued in cut_short(steps) if issued[-1] == JOIN)


def repeated_launches(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[tuple[Step, ...]]:
    return ((*steps[:i], s, *steps[i:]) for i, s in enumerate(steps) if isinstance(s, Launch))


MUTATIONS = [
    unjoined_exceptions,
    repeated_launches,
    early_launches,
    dropped_waits,
    turned_waits,
    moved_waits,
    launches_on_the_other_stream,
    shared_buffers,
    written_inputs,
    dropped_launches,
    late_writers,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_the_checker_catches(mutation, counted) -> None:
    for what, some in (("schedules", plans(*ALL)), ("schedules of quantised layers", drawn_plans())):
        seen = missed = 0
        for steps, inputs, outputs in some:
            for spoilt in mutation(steps, inputs):
                seen += 1
                missed += not check_schedule(spoilt, inputs, () if mutation is unjoined_exceptions else outputs)
        assert seen > 100
        assert missed == 0
        counted(f"mutations of {what}, all caught", seen)


class Race(Exception):
    pass


def every_timing(steps: tuple[Step, ...], inputs: set[str]) -> Iterator[dict[str, object]]:
    """What the buffers hold at the call's end, for each order in which two streams may run the steps.

    A value is its launch with the values that this read. It knows nothing of the checker.

    Raises:
        Race: something runs before the call's beginning or after its end, or reads what is not there.
    """
    lanes: dict[str, list[tuple[int, Step | None]]] = {"main": [(-1, None)], "alt": []}
    for i, step in enumerate(steps):
        lanes[step.waiter if isinstance(step, Wait) else step.stream].append((i, step))

    def run(done: dict[str, int], values: dict[str, object]) -> Iterator[dict[str, object]]:
        if done["main"] == len(lanes["main"]):
            if done["alt"] < len(lanes["alt"]):
                raise Race
            yield values
            return
        for lane, steps_of_lane in lanes.items():
            if done[lane] == len(steps_of_lane):
                continue
            i, step = steps_of_lane[done[lane]]
            new = dict(values)
            if step is None:
                new |= dict.fromkeys(inputs, "given")
            elif isinstance(step, Launch):
                needed = (*step.reads, *step.updates)
                if not {*needed} <= values.keys() or not done["main"]:
                    raise Race
                value = (step.name, *(values[name] for name in needed))
                new |= {name: hash((name, value)) for name in (*step.writes, *step.updates)}
            elif any(j < i for j, _ in lanes[step.on][done[step.on] :]):
                continue  # it waits
            yield from run({**done, lane: done[lane] + 1}, new)

    return run({"main": 0, "alt": 0}, {})


def has_race(steps: tuple[Step, ...], inputs: set[str], outputs: tuple[str, ...]) -> bool:
    try:
        return len({tuple(values[name] for name in outputs) for values in every_timing(steps, inputs)}) != 1
    except (Race, KeyError):
        return True


def shuffled(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Some steps elsewhere, on the other stream, or gone."""
    new = list(steps)
    for _ in range(random.randint(1, 2)):
        step = new.pop(random.randrange(len(new)))
        change = random.choice(("move", "move", "turn", "drop"))
        if change == "turn" and isinstance(step, Launch):
            step = dataclasses.replace(step, stream="alt" if step.stream == "main" else "main")
        if change != "drop":
            new.insert(random.randrange(len(new) + 1), step)
    return tuple(dataclasses.replace(s, early=False, followed=False) if isinstance(s, Launch) else s for s in new)


def test_whatever_some_timing_spoils_the_checker_catches(counted) -> None:
    """Held against a second judge, which runs through every timing; the checker may be the stricter one."""
    drawn = [random.choice(plans(*TWO_STREAMS)) for _ in range(400)]
    spoilt = 0
    for steps, inputs, outputs in drawn:
        steps = shuffled(steps)
        if has_race(steps, inputs, outputs):
            spoilt += 1
            assert check_schedule(steps, inputs, outputs) != []
    assert spoilt > 50
    counted("random mutations that some timing spoils, all caught", spoilt)


def test_no_timing_spoils_a_layer_on_two_streams() -> None:
    for steps, inputs, outputs in random.sample(plans(*TWO_STREAMS), 40):
        assert not has_race(steps, inputs, outputs)


def test_the_checker_names_the_launches_and_the_tensor() -> None:
    steps = (FORK, Launch("a", "main", ("x",), ("h",)), Launch("b", "alt", ("h",), ("y",)), JOIN)
    assert check_schedule(steps, {"x"}, ("y",)) == ["b reads h and does not run after a, which writes it"]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ((Launch("a", "main", (), ("out",)), Launch("b", "main", (), ("y",))), "a writes out and does not run after b"),
        ((Launch("a", "main", ("h",), ("out",)),), "a reads h, which nothing writes"),
        ((Launch("a", "main", (), ("x", "out")),), "a writes the input x"),
        ((Launch("a", "main", (), ("h",)), Launch("b", "main", (), ("h", "out"))), "h is written by a and b"),
        ((Launch("a", "main", (), ("out",), ("h",)),), "a reads h, which nothing writes"),
        (
            (
                *(Launch("a", "main", (), ("h",)), FORK, Launch("b", "alt", (), ("b",), ("h",))),
                *(Launch("c", "main", (), ("c",), ("h",)), JOIN, Launch("d", "main", (), ("out",), ("h",))),
            ),
            "h is updated by b and by c, which does not run after it",
        ),
        (
            (
                Launch("a", "main", (), ("h",)),
                Launch("b", "main", ("h",), ("y",)),
                Launch("c", "main", (), ("out",), ("h",)),
            ),
            "b reads h and does not run after c, which updates it",
        ),
        ((Launch("a", "main", (), ("out",), ("x",)),), "a updates the input x"),
        (
            (Launch("a", "main", (), ("out",), early=True),),
            "a is early and comes straight after no launch on its stream",
        ),
        (
            (FORK, Launch("a", "alt", (), ("h",)), JOIN, Launch("b", "main", ("h",), ("out",), early=True)),
            "b is early and comes straight after no launch on its stream",
        ),
        ((Launch("a", "main", (), ()),), "the call's end reads out, which nothing writes"),
        ((FORK, Launch("a", "main", (), ("out",))), "alt waits for main and is not joined before the call's end"),
    ],
)
def test_the_checker_says_what_is_wrong(steps, problem) -> None:
    assert check_schedule(steps, {"x"}, ("out",)) == [problem]
