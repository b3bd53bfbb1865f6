"""What is wrong with a schedule: a proof over its launches and waits, as data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from dsmoe_op.schedule import Launch, Step, StreamName, Wait

_BEGIN = "the call's beginning"
_END = "the call's end"


def check_schedule(steps: Iterable[Step], inputs: Collection[str], outputs: Collection[str] = ()) -> list[str]:
    """What is wrong with a schedule, as sentences; an empty list proves that no timing of the streams changes a result.

    A launch runs after another where a chain of stream order and waits says so. The call begins and ends on the
    caller's stream "main": there its buffers are allocated and its inputs complete before the first step, and there its
    outputs are read and its buffers handed to others after the last one.

    - Each launch runs after the call's beginning and before its end, so the side stream is forked and joined.
    - The side stream is joined after a fork even if nothing is launched on it, as a capture demands.
    - What a launch reads is an input, or written by a launch that it runs after. Nothing writes an input.
    - Each buffer has one writer, and each output has one. The writer of "out" runs after all others.
    - The launches that update a buffer run one after another, after the writer, and every reader runs after them.
    - An early launch comes straight after another one on its stream, which is the only one whose end it waits for. That
      one began after all before it had ended, since it waited itself or was an ordinary launch.

    Args:
        steps: as `schedule.plan` gives them, in the order in which they are issued.
        inputs: names of the tensors that the caller gives.
        outputs: names of the buffers that the caller reads afterwards.
    """
    launches: list[Launch] = []
    before: list[set[int]] = []  # of each launch, those that it runs after
    # What comes before the next one. Below 0 are _BEGIN, -1, and each fork.
    done: dict[StreamName, set[int]] = {"main": {-1}, "alt": set()}
    forks: list[int] = []
    problems = []
    after_launch = {"main": False, "alt": False}
    for step in steps:
        if isinstance(step, Wait):
            done[step.waiter] |= done[step.on]
            if step.waiter == "alt":
                forks.append(-2 - len(forks))
                done["alt"].add(forks[-1])
            after_launch[step.waiter] = False
        else:
            if step.early and not after_launch[step.stream]:
                problems.append(f"{step.name} is early and comes straight after no launch on its stream")
            after_launch[step.stream] = True
            before.append(set(done[step.stream]))
            done[step.stream].add(len(launches))
            launches.append(step)

    if not done["main"].issuperset(forks):
        problems.append(f"alt waits for main and is not joined before {_END}")
    writers: dict[str, list[int]] = {}
    updaters: dict[str, list[int]] = {}
    for i, launch in enumerate(launches):
        if -1 not in before[i]:
            problems.append(f"{launch.name} does not run after {_BEGIN}")
        if i not in done["main"]:
            problems.append(f"{launch.name} does not run before {_END}")
        for name in launch.writes:
            writers.setdefault(name, []).append(i)
        for name in launch.updates:
            updaters.setdefault(name, []).append(i)

    for changers, does in ((writers, "writes"), (updaters, "updates")):
        for name, by in changers.items():
            names = " and ".join(launches[i].name for i in by)
            if name in inputs:
                problems.append(f"{names} {does} the input {name}")
            if len(by) > 1 and does == "writes":
                problems.append(f"{name} is written by {names}")
    problems += [
        f"{name} is updated by {launches[i].name} and by {launches[j].name}, which does not run after it"
        for name, by in updaters.items()
        for i, j in itertools.combinations(by, 2)
        if i not in before[j]
    ]

    for i, launch in enumerate(launches):
        for name in (*launch.reads, *launch.updates):
            if name in inputs:
                continue
            by = writers.get(name, [])
            if name in launch.reads:
                problems += [
                    f"{launch.name} reads {name} and does not run after {launches[u].name}, which updates it"
                    for u in updaters.get(name, [])
                    if u not in before[i]
                ]
            if not by:
                problems.append(f"{launch.name} reads {name}, which nothing writes")
            problems += [
                f"{launch.name} reads {name} and does not run after {launches[w].name}, which writes it"
                for w in by
                if w not in before[i]
            ]
    problems += [f"{_END} reads {name}, which nothing writes" for name in outputs if name not in writers]
    for last in writers.get("out", []):
        problems += [
            f"{launches[last].name} writes out and does not run after {launch.name}"
            for i, launch in enumerate(launches)
            if i != last and i not in before[last]
        ]
    return problems
