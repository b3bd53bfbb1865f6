"""What each launch of the CUDA path touches, held against what its schedule declares, in Triton's interpreter.

`test_cuda_path_interpreter.py` runs this file. A call is the real one, with a room of poison around every input, buffer
and output, and with `Guard` in the place of `schedule.execute`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from cuda_path_cases import CONFIGS, SCHEDULES, make, on_the_cpu
from gpu import Boom
from layers import TOLERANCE, WAYS, error, make_layer, quantized, same, tensors_of
from torch import Tensor

from dsmoe_op import MoEConfig, checks, cpu, cuda, dual_stream_moe_unfinalized, formats, kernels, reference, tuning
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Layer
from dsmoe_op.kernels.launch import INTERPRET
from dsmoe_op.schedule import Launch, Step

assert INTERPRET

ROOM = 256
"""Bytes before and after each tensor."""


class Poison(NamedTuple):
    """What tensors and the rooms between them are filled with."""

    number: float
    integer: int
    byte: int

    def fill(self, tensor: Tensor) -> None:
        if tensor.itemsize == 1:
            tensor.view(torch.uint8).fill_(self.byte)
        else:
            tensor.fill_(self.number if tensor.is_floating_point() else self.integer)

    def bits(self, tensor: Tensor) -> Tensor:
        """One value of the tensor's dtype as `bits_of` has it."""
        poisoned = tensor.new_empty(1)
        self.fill(poisoned)
        return bits_of(poisoned)


FIRST = Poison(float("nan"), 1_000_000_007, 0xA5)
SECOND = Poison(-float("inf"), -1_000_000_009, 0xFF)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


class Memory:
    """A block of bytes that knows which of them lie between its tensors."""

    def __init__(self, block: Tensor) -> None:
        self.block, self._is_room = block, torch.ones_like(block)

    def take(self, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor at that offset in bytes."""
        nbytes = dtype.itemsize * extent(size, stride)
        tensor, room = (
            block[offset : offset + nbytes].view(dtype).as_strided(size, stride)
            for block in (self.block, self._is_room)
        )
        room.zero_()
        return tensor

    def fill_room(self, poison: Poison) -> None:
        self.block.masked_fill_(self._is_room.bool(), poison.byte)

    def is_intact(self, poison: Poison) -> bool:
        return bool((self.block[self._is_room.bool()] == poison.byte).all())


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first one to its last, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0


class Guard:
    """Issues launches, each held against its declaration.

    Args:
        tensors: all of a call by name.
        memories: those that the tensors lie in.
        issue: issues the launch of that name.
    """

    def __init__(self, tensors: dict[str, Tensor], memories: list[Memory], issue: Callable[[str], None]) -> None:
        self.tensors = {name: t for name, t in tensors.items() if t.numel()}
        self.memories, self.issue = memories, issue

    def poison(self, names: set[str], poison: Poison) -> None:
        """Fills the tensors of these names, and all that lies between tensors."""
        for name in names:
            poison.fill(self.tensors[name])
        for memory in self.memories:
            memory.fill_room(poison)

    def snapshot(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.tensors.items()}

    def restore(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.tensors[name].copy_(value)

    def problems(self, launch: Launch) -> list[str]:
        """Issues the launch twice, the second time with poison in all that it does not declare as read.

        What it was to write and left out keeps the second poison, so that a later launch that needs it goes wrong.
        """
        names = self.tensors.keys()
        reads, writes, updates = (names & set(some) for some in (launch.reads, launch.writes, launch.updates))
        rest = names - reads - writes - updates
        found = [f"{launch.name} declares {n}, which the call lacks" for n in {*launch.reads} - names]
        before = self.snapshot()
        self.poison(writes, FIRST)
        self.issue(launch.name)
        once = self.snapshot()
        found += [f"{launch.name} writes {n}" for n in names - writes - updates if not same(once[n], before[n])]
        found += [
            f"{launch.name} does not write {n}" for n in writes if (bits_of(once[n]) == FIRST.bits(once[n])).all()
        ]
        found += self.rooms(launch, FIRST)

        self.restore(before)
        self.poison(rest | writes, SECOND)
        poisoned = {n: self.tensors[n].clone() for n in rest}
        self.issue(launch.name)
        undeclared = f"{launch.name} reads something that it does not declare"
        for n in writes:
            first, second = bits_of(once[n]), bits_of(self.tensors[n])
            left_out = (first == FIRST.bits(once[n])) & (second == SECOND.bits(once[n]))
            found += [undeclared] * bool(((first != second) & ~left_out).any())
        found += [undeclared for n in updates if not same(once[n], self.tensors[n])]
        found += [f"{launch.name} writes {n}" for n in rest if not same(self.tensors[n], poisoned[n])]
        found += self.rooms(launch, SECOND)
        self.restore({n: before[n] for n in rest})
        return sorted(set(found))

    def rooms(self, launch: Launch, poison: Poison) -> list[str]:
        return [f"{launch.name} writes between tensors" for m in self.memories if not m.is_intact(poison)]


# --- a call under guard -----------------------------------------------------------------------------------------------


WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")
QUANTISED = [weight + suffix for weight in WEIGHTS for suffix in formats.SUFFIXES]


def strides(name: str, t: Tensor, config: MoEConfig) -> tuple[int, ...]:
    """Such as kernels take without a copy: longer rows, or the transposed ones."""
    is_quantised = name in QUANTISED and config.format_of(name) is not None
    if name in cuda._CONTIGUOUS or is_quantised or t.dim() < 2:
        return t.stride()
    *outer, rows, width = t.shape
    kinds = ["rows", "longer rows", *(["columns", "longer columns"] if name in TRANSPOSABLE else [])]
    kind = random.choice(kinds)
    unit, other = (rows, width) if "columns" in kind else (width, rows)
    step = unit + 24 * ("longer" in kind)
    inner = (1, step) if "columns" in kind else (step, 1)
    return (*(step * other for _ in outer), *inner)


TRANSPOSABLE = (*WEIGHTS, "topk_ids", "topk_weights")
PIECES = ("y", "slot_ids", "slot_weights", "row_of", "shared")


class Call:
    """One layer's call, and what it leaves in its outputs."""

    def __init__(self, x: Tensor, args: dict, schedule: str, *, finalized: bool) -> None:
        given = tensors_of(x, args)
        self.config: MoEConfig = args["config"]
        T, H = x.shape
        N, shared_T = T * self.config.top_k, T if "shared_w13" in args else 0
        new = [("out", (T, H), x.dtype)]
        if not finalized:
            slots = (T, self.config.top_k)
            sizes, dtypes = ((N, H), slots, slots, slots, (shared_T, H)), (torch.int32, torch.float32, torch.int32)
            new = list(zip(PIECES, sizes, (x.dtype, *dtypes, x.dtype), strict=True))
        specs = [(name, t.shape, strides(name, t, self.config), t.dtype) for name, t in given.items()]
        specs += [(name, size, torch.empty(size, device="meta").stride(), dtype) for name, size, dtype in new]
        places, end = [], ROOM
        for _, size, stride, dtype in specs:
            places.append(end)
            end = -(-(end + dtype.itemsize * extent(size, stride)) // ROOM) * ROOM + ROOM
        self.memory = Memory(torch.empty(end, dtype=torch.uint8))
        tensors = {name: self.memory.take(place, *rest) for place, (name, *rest) in zip(places, specs, strict=True)}
        self.outputs = tuple(tensors.pop(name) for name, *_ in new)
        for name, t in given.items():
            tensors[name].copy_(t)
        self.names = [name for name, *_ in new]
        self.layer = Layer(**{name: tensors.get(name) for name in LAYER_FIELDS})
        self.checked = checks.Checked(checks.check_layer(self.layer, self.config, schedule), self.config, schedule)

    def run(self, execute: Callable[[tuple[Step, ...], Guard], None]) -> tuple[Tensor, ...]:
        """Makes the call, whose launches `execute` issues."""

        def guarded(steps: tuple[Step, ...], issue: functools.partial[None], device: torch.device) -> None:
            plan, (table,) = issue.func.__self__, issue.args  # type: ignore[attr-defined]
            inputs = [n for n in LAYER_FIELDS if getattr(self.layer, n) is not None]
            tensors = dict(zip([*inputs, *(b.name for b in plan.buffers), *self.names], table, strict=False))
            assert not plan.copied
            workspace = Memory(torch.empty(0, dtype=torch.uint8).set_(tensors["num_rows"].untyped_storage()))
            for b in plan.buffers:
                assert tensors[b.name].storage_offset() * b.dtype.itemsize == b.offset
                workspace.take(b.offset, b.shape, tensors[b.name].stride(), b.dtype)
            execute(steps, Guard(tensors, [self.memory, workspace], functools.partial(issue, stream=None)))

        with mock.patch.object(schedules, "execute", guarded):
            cuda._run(self.layer, self.checked, self.outputs)
        return self.outputs


def with_room(specs: list[cuda.Spec]) -> tuple[tuple[cuda._Buffer, ...], int]:
    """`cuda._laid_out`, with room before and after each buffer."""
    buffers, end = [], ROOM
    for spec in specs:
        buffers.append(cuda._Buffer(*spec, offset=end))
        end += -(-buffers[-1].nbytes // ROOM) * ROOM + ROOM
    return tuple(buffers), end


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls on the CPU, with room in their workspace; `kinds(one_launch=..., one_chunk=...)` chooses their launches.

    Where the experts are one launch, `splits` programs share a tile of theirs.
    """
    choice = tuning.layer_choice
    monkeypatch.setattr(cuda, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "_prepare", lambda kind, launch: None)
    monkeypatch.setattr(cuda, "_laid_out", with_room)

    def set_kinds(*, one_launch: bool, one_chunk: bool, splits: int = 1) -> None:
        def layer_choice(*args: Any) -> tuning.Choice:
            tiles, schedule = choice(*args)
            if one_launch and splits > 1:
                tiles = tiles._replace(gemm1=tiles.gemm1._replace(splits=splits, block_k=16))
            return tuning.Choice(tiles._replace(one_launch=one_launch), schedule)

        monkeypatch.setattr(tuning, "layer_choice", layer_choice)
        monkeypatch.setattr(kernels, "num_chunks", lambda slots, *, alone: 1 if one_chunk else 2)

    return set_kinds


CASES = tuple(itertools.product(SCHEDULES, WAYS, (False, True), (True, False)))


@pytest.mark.parametrize(("schedule", "way", "one_launch", "finalized"), CASES)
def test_a_launch_touches_what_its_schedule_says_and_nothing_else(kinds, counted, schedule, way, one_launch, finalized):
    """And the layer is right though all else was poison, of which nothing is left in what it returns."""
    kinds(one_launch=one_launch, one_chunk=random.random() < 0.5, splits=random.choice((1, 3)))  # of an H of 48
    name = list(CONFIGS)[CASES.index((schedule, way, one_launch, finalized)) % len(CONFIGS)]
    dtype = random.choice((torch.float32, torch.float16))
    launches, found = held(*with_rows(name, way, dtype), schedule, lambda launch: True, finalized=finalized)
    assert found < TOLERANCE[dtype]
    counted("launches held against what they declare", launches)


def with_rows(name: str, way: str, dtype: torch.dtype, **options: int) -> tuple[Tensor, dict]:
    """A layer of that config in which some expert of this rank is chosen."""
    x, args = make(name, way, dtype, **options)
    while dual_stream_moe_unfinalized(x, **args).row_of.max() < 0:
        x, args = make(name, way, dtype, **options)
    return x, args


def held(
    x: Tensor, args: dict, schedule: str, which: Callable[[Launch], object], *, finalized: bool
) -> tuple[int, float]:
    """Holds such launches of a call against their declarations; how many, and the error of the layer."""
    some = []

    def execute(steps: tuple[Step, ...], guard: Guard) -> None:
        for launch in (step for step in steps if isinstance(step, Launch)):
            if which(launch):
                assert guard.problems(launch) == []
                some.append(launch)
            else:
                guard.issue(launch.name)

    outputs = Call(x, args, schedule, finalized=finalized).run(execute)
    assert not any((bits_of(t) == SECOND.bits(t)).any() for t in outputs if t.numel())
    out = outputs[0] if finalized else cpu.finalize(*outputs, x, args["config"])
    return len(some), error(out, reference.moe(x, **args))


FORMATS = (*((name, name) for name in formats.FORMATS), ("int4", None), ("nvfp4", "fp8_block"))
"""Of the routed and of the shared experts."""
ZERO_POINTS = {"int4": {"zero_point": True}}


def quantised_reads(launch: Launch) -> list[str]:
    return [name for name in launch.reads if name in QUANTISED]


@pytest.mark.parametrize("T", [5, 66])  # up to 16 rows of an expert have another tile than more
@pytest.mark.parametrize(("routed", "shared"), FORMATS)
def test_a_launch_with_quantised_weights_touches_what_its_schedule_says_and_nothing_else(
    kinds, counted, routed, shared, T
):
    """No scale or zero point that it does not declare, and nothing before the first one or after the last."""
    kinds(one_launch=T == 5 and random.random() < 0.5, one_chunk=random.random() < 0.5)
    name, dtype = random.choice(list(CONFIGS)), random.choice((torch.float32, torch.float16))
    schedule = random.choice(SCHEDULES if routed == shared else SCHEDULES[:3])
    x, args = with_rows(name, "topk_ids", dtype, T=T, H=144)
    args = quantized(args, routed, shared, **ZERO_POINTS.get(routed, {}))
    launches, found = held(
        x,
        args,
        schedule,
        lambda one: quantised_reads(one) or one.name.startswith("quantize"),
        finalized=random.random() < 0.5,
    )
    assert found < 2e-2, (schedule, name, dtype)
    counted("launches with quantised weights held against what they declare", launches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_call_after_one_that_an_exception_ended_computes_the_same_bits(monkeypatch, schedule) -> None:
    on_the_cpu(monkeypatch)
    x, args = make("deepseek", random.choice(WAYS))
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    call = checks.Checked(checks.check_layer(layer, args["config"], schedule), args["config"], schedule)
    expected, issue = cuda.moe(layer, call), cuda._Plan.issue
    (plan,) = call.plans.values()
    end = random.choice([step.name for step in plan.steps if isinstance(step, Launch)])

    def failing(plan: cuda._Plan, table: kernels.Table, name: str, stream: int | None) -> None:
        issue(plan, table, name, stream)
        if name == end:
            raise Boom

    with mock.patch.object(cuda._Plan, "issue", failing), pytest.raises(Boom):
        cuda.moe(layer, call)
    assert same(cuda.moe(layer, call), expected)


# --- the guard itself: each way to declare something wrong is seen ----------------------------------------------------


def lies_about(launch: Launch, names: set[str], guard: Guard) -> Iterator[Launch]:
    """Declarations that lack one tensor, or name one too many."""
    for name in launch.reads:
        if guard.tensors[name].dtype not in (torch.int32, torch.int64):  # which of poison would be places in memory
            yield dataclasses.replace(launch, reads=tuple(n for n in launch.reads if n != name))
    for name in launch.writes:
        yield dataclasses.replace(launch, writes=tuple(n for n in launch.writes if n != name))
    for name in names - {*launch.reads, *launch.writes, *launch.updates}:
        yield dataclasses.replace(launch, writes=(*launch.writes, name))


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_a_declaration_that_lies_is_seen(kinds, counted, schedule) -> None:
    kinds(one_launch=False, one_chunk=True)
    config = MoEConfig(top_k=2, num_zero_experts=4)
    options = {"shared_gate": True, "expert_bias": True, "router_bias": True, "correction_bias": True}
    x, args = make_layer(config=config, **options, T=4, H=48, E=8, I=16, S=32)
    args["correction_bias"][8], args["correction_bias"][9:] = 10, -10  # a token has one expert and one zero expert

    def execute(steps: tuple[Step, ...], guard: Guard) -> None:
        written: set[str] = set()
        for launch in steps:
            assert isinstance(launch, Launch)
            before = guard.snapshot()
            for lie in lies_about(launch, written, guard):
                if (launch.name, {*launch.reads} - {*lie.reads}) in UNUSED:
                    continue
                assert guard.problems(lie) != [], lie
                counted("false declarations seen")
                guard.restore(before)
            assert guard.problems(launch) == []
            written |= {*launch.writes}

    Call(x, args, schedule, finalized=True).run(execute)


UNUSED = [("gemm1", {"slot_weights"}), ("fused_gemm1", {"slot_weights"})]
"""What a launch reads with other configs than that one's."""


@pytest.mark.parametrize(("routed", "shared"), FORMATS)
def test_a_scale_or_zero_point_that_is_not_declared_is_seen(kinds, counted, routed, shared) -> None:
    kinds(one_launch=random.random() < 0.5, one_chunk=True)
    x, args = make("deepseek", "topk_ids", torch.float16)
    args = quantized(args, routed, shared, **ZERO_POINTS.get(routed, {}))

    def execute(steps: tuple[Step, ...], guard: Guard) -> None:
        for launch in steps:
            assert isinstance(launch, Launch)
            for name in {*quantised_reads(launch)} - {*WEIGHTS}:
                before = guard.snapshot()
                lie = dataclasses.replace(launch, reads=tuple(n for n in launch.reads if n != name))
                assert guard.problems(lie) != [], (launch.name, name)
                counted("false declarations of scales and zero points seen")
                guard.restore(before)
            guard.issue(launch.name)

    Call(x, args, "fused" if routed == shared else "serial", finalized=True).run(execute)


def toy(issue: Callable[[dict[str, Tensor], Memory], None]) -> list[str]:
    """What the guard says about a launch that declares to read a and to write b."""
    memory = Memory(torch.empty(4 * ROOM, dtype=torch.uint8))
    tensors = {n: memory.take(i * ROOM, (3, 5), (6, 1), torch.float32) for i, n in enumerate("abc", 1)}
    for t in tensors.values():
        t.normal_()
    guard = Guard(tensors, [memory], lambda name: issue(tensors, memory))
    return guard.problems(Launch("toy", "main", ("a",), ("b",)))


def test_a_launch_that_does_as_it_says_is_let_through() -> None:
    assert toy(lambda t, memory: t["b"].copy_(t["a"])) == []
    assert toy(lambda t, memory: t["b"][:2].copy_(t["a"][:2])) == []


def test_a_launch_that_writes_or_reads_between_tensors_is_seen() -> None:
    def writes(tensors: dict[str, Tensor], memory: Memory) -> None:
        tensors["b"].copy_(tensors["a"])
        tensors["b"].as_strided((3, 6), (6, 1))[0, 5] = 1.0

    def reads(tensors: dict[str, Tensor], memory: Memory) -> None:
        tensors["b"].copy_(tensors["a"].as_strided((3, 6), (6, 1))[:, 1:])

    assert toy(writes) == ["toy writes between tensors"]
    assert toy(reads) == ["toy reads something that it does not declare"]
