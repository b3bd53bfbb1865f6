"""What the buffers and launches of the CUDA path promise, on the CPU in Triton's interpreter.

`test_cuda_path_interpreter.py` runs this file. A call is `launches.Call`, its launches are issued in a schedule's
order, and its buffers are full of garbage first.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable
from typing import ClassVar

import pytest
import torch
from layers import TOLERANCE, WAYS, error, make_layer, quantized, same, tensors_of
from torch import Tensor

from dsmoe_op import MoEConfig, checks, cuda, formats, launches, reference, streams, tuning
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Layer
from dsmoe_op.kernels.launch import INTERPRET
from dsmoe_op.schedule import Launch, Step, Wait

assert INTERPRET

BUFFERS = (
    "logits", "counters", "num_rows", "sorted_slot", "row_of", "blocks", "taken", "arrivals", "parts", "x_ordered",
    "slot_ids", "slot_weights", "h", "y", "gate", "shared_h", "shared", "out",
)  # fmt: skip
SCHEDULES = ("serial", "dual", "dual_shared_main", "fused")
CONFIGS = {
    "deepseek": MoEConfig(top_k=2, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "scaled_output": MoEConfig(
        top_k=2, score="softmax", scale_on="output", routed_scaling_factor=3.0, combine="average"
    ),
    "zero_experts": MoEConfig(top_k=2, score="softmax", normalize="none", num_zero_experts=4),
    "weight_on_input": MoEConfig(
        top_k=2, weights_from="topk_sigmoid", normalize="none", apply_router_weight_on_input=True
    ),
    "relu2": MoEConfig(top_k=2, activation="relu2", score="sqrtsoftplus"),
}
OPTIONS = {
    "deepseek": {"shared_gate": True, "correction_bias": True},
    "scaled_output": {"valid_tokens": 4, "expert_bias": True},
    "zero_experts": {"shared_gate": True, "correction_bias": True, "valid_tokens": 3},
    "weight_on_input": {"E_global": 12},
    "relu2": {"router_bias": True},
}
SIZES = {"T": 5, "H": 48, "E": 8, "I": 16, "S": 32}  # S a multiple of I, for "fused"
GARBAGE = {torch.int32: 1_000_000_007}  # NaN elsewhere


def make(name: str, way: str, dtype: torch.dtype = torch.float32, **options: object) -> tuple[Tensor, dict]:
    given = {**OPTIONS[name], **options}
    if way == "topk_ids":
        given.pop("correction_bias", None)
    return make_layer(way=way, config=CONFIGS[name], dtype=dtype, **{**SIZES, **given})


def fill(tensor: Tensor) -> None:
    tensor.fill_(GARBAGE.get(tensor.dtype, float("nan")))


class Run:
    """One call: its buffers by the names that a schedule has for them, and its launches."""

    def __init__(
        self, x: Tensor, args: dict, schedule: str, *, finalized: bool = True, alt_first: bool = False,
        one_launch: bool = False,
    ) -> None:  # fmt: skip
        given = {"hidden_states": x, **args}
        self.layer = Layer(**{name: given.get(name) for name in LAYER_FIELDS})
        config = args["config"]
        dims = checks.check_layer(self.layer, config, schedule)
        shared_format = config.shared_format if dims.S else config.routed_format
        kind = tuning.layer_kind(x.dtype, False, config.routed_format, shared_format)
        tiles = tuning.layer_tiles(kind, dims.T, dims.H, dims.E, dims.K, dims.S)
        tiles = tiles._replace(one_launch=one_launch)
        specs = itertools.chain(*launches.buffer_specs(self.layer, dims, config, tiles, finalized))
        buffers = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in specs}
        self.call = launches.Call(cuda._normalised(self.layer, dims, LAYER_FIELDS), dims, config, buffers, tiles, False)
        self.inputs = tensors_of(x, args)
        resolved = schedules.resolve(schedule, has_shared=dims.S > 0)
        present = frozenset(self.inputs) & schedules.OPTIONAL
        self.steps: tuple[Step, ...] = schedules.plan(
            resolved, present, zero_experts=config.num_zero_experts > 0, finalized=finalized, alt_first=alt_first,
            one_launch=one_launch, coded_rows=frozenset(schedules.coded_rows(config, has_shared=dims.S > 0)),
            coded_h=self.call.coded_h,
        )  # fmt: skip
        self.buffers = buffers
        for tensor in self.buffers.values():
            fill(tensor)

    def issue(self, names: Iterable[str] | None = None) -> Run:
        for name in [s.name for s in self.steps if isinstance(s, Launch)] if names is None else names:
            self.call.issue(name)
        return self

    @property
    def out(self) -> Tensor:
        return self.buffers["out"]

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        c = self.call
        return c.y, c.slot_ids, c.slot_weights, c.rows.row_of_TK, c.shared


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_schedule_computes_the_reference_and_all_but_fused_the_same_bits(name, way) -> None:
    x, args = make(name, way)
    expected = reference.moe(x, **args)
    outs = {schedule: Run(x, args, schedule).issue().out for schedule in SCHEDULES}
    for schedule, out in outs.items():
        assert error(out, expected) < TOLERANCE[torch.float32], schedule
        assert schedule == "fused" or same(out, outs["serial"]), schedule


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("way", WAYS)
def test_16_bit_dtypes_compute_the_reference(way, dtype, limit) -> None:
    """The interpreter cuts a float32 off where hardware rounds it to bf16, and each cut is towards zero."""
    x, args = make("deepseek", way, dtype)
    assert error(Run(x, args, "dual").issue().out, reference.moe(x, **args)) < limit


@pytest.mark.parametrize("shared", [*formats.FORMATS, None])
def test_quantised_weights_compute_the_reference_in_every_schedule(shared) -> None:
    """Every format of the shared expert, beside one of the routed experts, and both in the same one."""
    for routed in {shared, random.choice([*formats.FORMATS, None])}:
        name, way = random.choice(list(CONFIGS)), random.choice(WAYS)
        x, args = make(name, way, random.choice((torch.float32, torch.float16)))
        args = quantized(args, routed, shared)
        expected = reference.moe(x, **args)
        runs = {s: Run(x, args, s) for s in (SCHEDULES if routed == shared else SCHEDULES[:3])}
        outs = {schedule: run.issue().out for schedule, run in runs.items()}
        kind, tiles = tuning.gemm_kind(x.dtype, False, routed), runs["serial"].call.tiles
        for schedule, out in outs.items():
            assert error(out, expected) < 2e-2, (routed, name, way, schedule)
            assert schedule == "fused" or same(out, outs["serial"]), (routed, name, way, schedule)
            if tuning.one_launch(kind, len(x), tiles.gemm1, tiles.gemm2):
                together = Run(x, args, schedule, one_launch=True).issue().out
                assert same(together, out), (routed, name, way, schedule)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launches, "CODED_H_TOKENS", 0)
                of_many = Run(x, args, schedule)
                assert same(of_many.issue().out, out), (routed, name, way, schedule)
            made = {step.name for step in of_many.steps if isinstance(step, Launch)} & {
                "quantize_h",
                "quantize_shared_h",
            }
            rounds = [format in ("fp8_block", "fp8_channel") for format in (routed, shared)]
            assert len(made) == sum(rounds) * (schedule != "fused"), (routed, name, way, schedule)


@pytest.mark.parametrize(
    ("routed", "shared", "scale", "change"),
    [
        ("fp8_tensor", None, "w13_input_scale", lambda t: t.expand(8).contiguous()),
        (None, "fp8_tensor", "shared_w13_scale", lambda t: t[:1].clone()),
        (None, "nvfp4", "shared_w13_global_scale", lambda t: t[:1].clone()),
        (None, "fp8_block", "shared_w13_scale", lambda t: torch.cat([t, t[:1]])),
    ],
)
def test_scales_of_other_shapes_are_another_kind_of_call(routed, shared, scale, change) -> None:
    """Kernels are compiled for them, so what is prepared for one is not for the other."""
    x, args = make("deepseek", "topk_ids", S=192)
    args = quantized(args, routed, shared)
    if shared == "fp8_block":  # three blocks of all rows, or two of gate and two of up rows
        args[scale] = args[scale][:3].clone()
    kinds = {Run(x, args | {scale: t}, "dual").call.kind((), True) for t in (args[scale], change(args[scale]))}
    assert len(kinds) == 2


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("deepseek", "serial"),
        ("deepseek", "dual_shared_main"),
        ("scaled_output", "dual"),
        ("scaled_output", "fused"),
        ("zero_experts", "serial"),
        ("zero_experts", "dual_shared_main"),
        ("weight_on_input", "dual"),
        ("weight_on_input", "fused"),
        ("relu2", "serial"),
        ("relu2", "dual"),
    ],
)
def test_one_launch_of_the_experts_has_the_bits_of_its_parts(name, schedule) -> None:
    """With several blocks of an expert, and experts without rows."""
    for T in (1, 21):
        x, args = make(name, random.choice(WAYS), random.choice((torch.float32, torch.float16)), T=T, H=272)
        for finalized in (True, False):
            apart, one = (
                Run(x, args, schedule, finalized=finalized, one_launch=one_launch).issue()
                for one_launch in (False, True)
            )
            assert sum(step.name.startswith(("experts", "fused_experts")) for step in launches_of(one)) == 1
            assert not any(step.name in ("gemm1", "gemm2", "fused_gemm1", "fused_gemm2") for step in launches_of(one))
            if finalized:
                assert same(one.out, apart.out)
            else:
                assert all(map(same, one.pieces, apart.pieces))


def launches_of(run: Run) -> list[Launch]:
    return [step for step in run.steps if isinstance(step, Launch)]


def interleaved(steps: tuple[Step, ...]) -> list[str]:
    """The launches in a random order among those that two streams may run them in."""
    main = [s for s in steps if isinstance(s, Wait) or s.stream == "main"]
    alt = [s for s in steps if isinstance(s, Wait) or s.stream == "alt"]
    order: list[str] = []
    while main or alt:
        heads = [lane for lane in (main, alt) if lane and isinstance(lane[0], Launch)]
        if heads:
            order.append(random.choice(heads).pop(0).name)
        else:  # both are at the same wait
            assert main.pop(0) == alt.pop(0)
    return order


@pytest.mark.parametrize("schedule", ["dual", "dual_shared_main"])
@pytest.mark.parametrize("way", WAYS)
def test_any_order_that_two_streams_allow_gives_the_same_bits(way, schedule) -> None:
    x, args = make("deepseek", way)
    serial = Run(x, args, "serial").issue().out
    orders = {tuple(interleaved(Run(x, args, schedule).steps)) for _ in range(4)}
    assert len(orders) > 1
    for order in orders:
        assert same(Run(x, args, schedule).issue(order).out, serial)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_unfinalized_and_finalize_give_the_bits_of_the_one_call(monkeypatch, name, schedule) -> None:
    monkeypatch.setattr(cuda, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "_prepare", lambda kind, launch: None)
    x, args = make(name, random.choice(WAYS))
    pieces = Run(x, args, schedule, finalized=False).issue().pieces
    assert same(cuda.finalize(*pieces, x, args["config"]), Run(x, args, schedule).issue().out)


class OneStream:
    """Both lanes, where there are no streams."""

    handles: ClassVar = {"main": None, "alt": None}


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in the interpreter, in order."""
    monkeypatch.setattr(cuda, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "_prepare", lambda kind, launch: None)
    monkeypatch.setattr(streams, "lanes", lambda device: OneStream)
    monkeypatch.setattr(streams, "current_handle", lambda device: None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_calls_by_a_plan_compute_the_reference_each_on_its_own_tensors(monkeypatch, name, schedule) -> None:
    on_the_cpu(monkeypatch)
    way = random.choice(WAYS)
    check_calls_by_a_plan(schedule, lambda: make(name, way), TOLERANCE[torch.float32])


@pytest.mark.parametrize("schedule", ["dual", "fused"])
@pytest.mark.parametrize("T", [40, 150, 260])
def test_calls_of_many_rows_by_a_plan_compute_the_reference_too(monkeypatch, T, schedule) -> None:
    """Tiles whose weights come by the copy engine, whose descriptors are made at each call."""
    on_the_cpu(monkeypatch)
    check_calls_by_a_plan(
        schedule, lambda: make("scaled_output", "topk_ids", torch.float16, T=T, valid_tokens=T - 9), 3e-3
    )


@pytest.mark.parametrize(
    ("format", "splits", "limit"), [(None, 2, 3e-3), (None, 4, 3e-3), ("fp8_channel", 4, 2e-2), ("int4", 4, 3e-3)]
)
def test_calls_whose_programs_share_tiles_by_the_heuristic_compute_the_reference_too(
    monkeypatch, format, splits, limit
) -> None:
    """Fused, with more rows of an expert than a tile of 8 has, where tokens name one twice."""
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(tuning, "_SPLIT_LEAST", 128)
    monkeypatch.setattr(tuning, "layer_choice", tuning.layer_choice.__wrapped__)  # remembers nothing
    I, (T, H) = 80, (2, 512) if splits == 4 else (8, 256)  # 16 slots at most
    sizes = {"T": T, "H": H, "I": I, "S": 2 * I}
    kind = tuning.layer_kind(torch.float16, False, format, format)
    tiles, auto = tuning.layer_choice(tuning.LayerShape(kind, H, I, SIZES["E"], 2, 2 * I), T)
    assert (tiles.gemm1.splits, auto) == (splits, "fused")

    def draw() -> tuple[Tensor, dict]:
        x, args = make("scaled_output", "topk_ids", torch.float16, **sizes, valid_tokens=T - 1, expert_bias=True)
        args["topk_ids"][:, 1] = args["topk_ids"][: T // 2, 0] = args["topk_ids"][0, 0].clone()
        return x, quantized(args, format, format)

    check_calls_by_a_plan("auto", draw, limit)


def check_calls_by_a_plan(schedule: str, draw: Callable[[], tuple[Tensor, dict]], limit: float) -> None:
    call: checks.Checked | None = None
    for _ in range(2):
        x, args = draw()
        config = args["config"]
        layer = Layer(**{n: {"hidden_states": x, **args}.get(n) for n in LAYER_FIELDS})
        call = call or checks.Checked(checks.check_layer(layer, config, schedule), config, schedule)
        expected = reference.moe(x, **args)
        out = cuda.moe(layer, call)
        assert out.shape == x.shape
        assert error(out, expected) < limit
        pieces = cuda.moe_unfinalized(layer, call)
        assert same(cuda.finalize(*pieces, x, config), out)
        assert len({t.untyped_storage().data_ptr() for t in pieces}) == 5
    assert call is not None
    assert len(call.plans) == 2


@pytest.mark.parametrize("one_launch", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["scaled_output", "weight_on_input"])
def test_rows_of_y_after_the_last_experts_are_zeros(name, schedule, one_launch) -> None:
    options = {"finalized": False, "one_launch": one_launch}
    run = Run(*make(name, "topk_ids"), schedule, **options).issue()
    while (rows := int(run.call.rows.row_of_TK.max()) + 1) == len(run.call.y):  # every expert chosen was of this rank
        run = Run(*make(name, "topk_ids"), schedule, **options).issue()
    assert same(run.call.y[rows:], torch.zeros_like(run.call.y[rows:]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_input_is_written_resized_or_moved(schedule) -> None:
    run = Run(*make("zero_experts", random.choice(WAYS)), schedule)
    before = {n: (t.clone(), t.data_ptr(), t.shape, t.stride(), t._version) for n, t in run.inputs.items()}
    run.issue()
    for n, t in run.inputs.items():
        clone, *rest = before[n]
        assert same(t, clone), n
        assert rest == [t.data_ptr(), t.shape, t.stride(), t._version], n


@pytest.mark.parametrize("way", WAYS)
def test_every_buffer_of_a_call_is_one_that_the_schedule_names(way) -> None:
    """A tensor that a launch could use behind the schedule's back would escape its checker."""
    run = Run(*make("deepseek", way), "dual")
    known = {t.data_ptr() for t in (*run.inputs.values(), *run.buffers.values())}
    held = {**vars(run.call), **run.call.rows._asdict()}
    tensors = {n: t for n, t in held.items() if isinstance(t, Tensor) and t.numel()}
    assert {n for n, t in tensors.items() if t.data_ptr() not in known} == set()


def test_no_two_buffers_share_memory() -> None:
    run = Run(*make("deepseek", "router_weight"), "dual")
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in run.buffers.values())
    assert len(spans) == len(BUFFERS)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
