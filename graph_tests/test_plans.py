"""A plan is one kind of call's launches, bound: what it fixes, what it leaves open, and what it does not keep alive."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gpu import with_tiles
from layers import LAUNCHERS, WAYS, make_layer, quantized
from torch import Tensor

triton = pytest.importorskip("triton", reason="no triton")

from fake_binaries import ALT, MAIN, Binary, Launcher, kinds_of, launches, log, named, plain, run  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from dsmoe_op import checks, cuda, kernels, ops, tuning  # noqa: E402
from dsmoe_op.checks import LAYER_FIELDS, Layer  # noqa: E402
from dsmoe_op.cli import compiling, shapes  # noqa: E402
from dsmoe_op.cli.arguments import Formats  # noqa: E402
from dsmoe_op.kernels import launch as launch_module  # noqa: E402
from dsmoe_op.kernels.launch import Bound, Direct, Recording  # noqa: E402
from dsmoe_op.launches import Call, buffer_specs  # noqa: E402
from dsmoe_op.tuning import Tile  # noqa: E402

__all__ = ["log"]  # a fixture
BF16, FP32 = torch.bfloat16, torch.float32


# --- what tells plans apart -----------------------------------------------------------------------------------------


def directly(x: Tensor, args: dict, schedule: str) -> list[tuple]:
    """The launches of a call made without a plan: kernel, kinds of its arguments, grid, integers, constexprs."""
    made: list[tuple] = []

    def launch(kernel, grid, args, meta, *, warmup=False):
        fixed = tuple(None if isinstance(arg, Tensor) else (plain(arg),) for arg in args)
        made.append((kernel.fn.__name__, kinds_of(kernel, args), grid, fixed, tuple(sorted(meta.items(), key=str))))

    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    config = args["config"]
    dims = checks.check_layer(layer, config, schedule)
    tiles = tuning.layer_tiles("16bit", *dims[:4], dims.S)
    specs = itertools.chain(*buffer_specs(layer, dims, config, tiles, True))
    buffers = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in specs}
    call = Call(cuda._normalised(layer, dims, LAYER_FIELDS), dims, config, buffers, tiles, False)
    present = frozenset(n for n in cuda.schedules.OPTIONAL if getattr(layer, n) is not None)
    one_chunk = kernels.num_chunks(dims.T * dims.K, alone=True) == 1
    steps = cuda.schedules.plan(
        schedule, present, zero_experts=False, finalized=True, one_chunk=one_chunk, one_launch=tiles.one_launch
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHERS:
            patch.setattr(sys.modules[f"dsmoe_op.kernels.{name}"], "launch", launch)
        for step in steps:
            if isinstance(step, cuda.schedules.Launch):
                call.issue_step(step, overlaps=tiles.overlaps)
    return made


def off(t: Tensor) -> Tensor:
    """The same contiguous values, at an address that is no multiple of 16 bytes."""
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    return flat.copy_(t)


def wide(t: Tensor, by: int) -> Tensor:
    """The same values in longer rows."""
    return torch.nn.functional.pad(t, (0, by))[..., : t.shape[-1]]


def changes() -> Iterator[tuple[str, Tensor, dict]]:
    """Calls that each differ from the first in one property."""

    def layer(T: Any = 3, **options: Any) -> tuple[Tensor, dict]:
        given = {"way": "router_weight", "router_bias": True, "correction_bias": True, "S": 64, **options}
        return make_layer(T, dtype=BF16, shared_gate=True, expert_bias=True, **given)

    x, args = layer()
    yield "first", x, args
    yield "other values", *layer()
    for T in (1, 2, 16, 17, 33, 250, (1, 3), (3, 1)):
        yield f"T={T}", *layer(T)
    for by in (1, 16):
        yield f"x in rows longer by {by}", wide(x, by), args
    yield "x off", off(x), args
    for name in ("w13", "w2", "router_weight", "shared_w13", "shared_w2", "w13_bias", "correction_bias", "shared_gate"):
        yield f"{name} off", x, args | {name: off(args[name])}
    for name in ("w13", "w2", "shared_w13", "shared_w2", "router_weight"):
        yield f"{name} transposed", x, args | {name: args[name].mT.contiguous().mT}
        yield f"{name} in longer rows", x, args | {name: wide(args[name], 8)}
    for name in ("router_weight", "router_bias", "w13_bias", "w2_bias", "shared_gate"):
        yield f"{name} fp32", x, args | {name: args[name].to(FP32)}
    for name in ("router_bias", "correction_bias", "w13_bias", "shared_gate"):
        yield f"no {name}", x, {k: v for k, v in args.items() if k != name}
    yield "valid tokens", *layer(valid_tokens=2)
    for sizes in ({"E": 16}, {"I": 16}, {"S": 96}, {"H": 64}, {"E_global": 20}):
        yield f"{sizes}", *layer(**sizes)
    for way in WAYS[1:]:
        bias = way != "topk_ids"
        y, given = layer(way=way, router_bias=False, correction_bias=bias)
        yield way, y, given
        rows = {k: v for k, v in given.items() if k in ("router_logits", "topk_ids", "topk_weights")}
        for name, value in rows.items():
            yield f"{name} in longer rows", y, given | {name: wide(value, 16)}
            yield f"{name} off", y, given | {name: off(value)}
        for dtype in (FP32, BF16):
            yield f"{way} {dtype}", y, given | {k: v.to(dtype) for k, v in rows.items() if v.is_floating_point()}


@pytest.mark.parametrize("schedule", ["serial", "dual", "fused"])
def test_calls_share_a_plan_only_where_their_launches_differ_in_addresses_alone(log, schedule) -> None:
    shared: list[str] = []
    kept: list[object] = []
    for name, x, args in changes():
        log.clear()
        run(x, args, schedule=schedule)
        (plan,) = [p for call in checks._checked.values() for p in call.plans.values() if p not in kept] or [None]
        found = directly(x, args, schedule)
        assert len(launches(log)) == len(found)
        for (grid, _, (kernel, kinds, meta), _, _, _, _, *bound), want in zip(launches(log), found, strict=True):
            integers = tuple(None if w is None else (plain(b),) for b, w in zip(bound, want[3], strict=False))
            given = kernel, kinds, grid, integers, tuple(m for m in meta if m[0] != "enable_fp_fusion")
            assert given == (*want[:2], (*want[2], 1, 1)[:3], *want[3:]), name
        if plan is None:
            shared.append(name)
        else:
            kept.append(plan)
    assert "other values" in shared
    assert len(kept) > 10


@pytest.mark.parametrize("way", WAYS)
def test_a_later_call_launches_the_same_on_its_own_tensors(log, way) -> None:
    found = []
    for _ in range(3):
        x, args = make_layer(3, way=way, dtype=BF16, shared_gate=True)
        log.clear()
        out = run(x, args)
        found.append(named(launches(log), {"x": x, **args, "out": out}))
    assert found[0] == found[1] == found[2]
    assert sum(len(call.plans) for call in checks._checked.values()) == 1
    used = {a for entry in found[0] for a in entry if isinstance(a, str)}
    assert used >= {"x", "w13", "w2", "shared_w13", "shared_w2", "shared_gate", "out", "buffer", way}


def test_two_arguments_that_were_one_tensor_may_be_two_at_the_next_call(log) -> None:
    x, args = make_layer(3, dtype=BF16, router_bias=True)
    bias = args["router_bias"]
    run(x, args | {"correction_bias": bias})
    for first, second in ((bias, bias.clone()), (bias.clone(), bias)):
        log.clear()
        run(x, args | {"router_bias": first, "correction_bias": second})
        (choose,) = (entry for entry in launches(log) if entry[2][0] == "_route")
        assert choose.index(first.data_ptr()) < choose.index(second.data_ptr())  # in the order of its arguments


def test_an_input_that_kernels_take_contiguous_is_copied_at_each_call(log) -> None:
    x, args = make_layer(3, dtype=BF16, expert_bias=True)
    for _ in range(2):
        args["w2_bias"] = args["w2_bias"].mT.contiguous().mT
        log.clear()
        run(x, args)
        assert not any(args["w2_bias"].data_ptr() in entry for entry in launches(log))
        assert any(args["w13_bias"].data_ptr() in entry for entry in launches(log))


def test_launches_are_on_the_streams_of_the_schedule(log) -> None:
    x, args = make_layer(3, dtype=BF16, shared_gate=True)
    run(x, args)
    on = [(entry[2][0], entry[1]) for entry in launches(log)]
    assert [name for name, stream in on if stream == ALT] == ["_shared_gate", "_grouped_gemm", "_grouped_gemm"]
    assert on[-1] == ("_finalize", MAIN)


# --- what a plan keeps ----------------------------------------------------------------------------------------------


def test_no_tensor_stays_alive(log) -> None:
    x, args = make_layer(3, dtype=BF16, shared_gate=True, expert_bias=True)
    args["w2_bias"] = args["w2_bias"].mT.contiguous().mT
    tensors = [x, *(t for t in args.values() if isinstance(t, Tensor)), run(x, args)]
    refs = [weakref.ref(t) for t in tensors]
    del x, args, tensors
    log.clear()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    reachable, todo = set(), list(checks._checked.values())
    while todo:
        one = todo.pop()
        if id(one) in reachable or isinstance(one, type | type(sys) | type(run)):
            continue
        reachable.add(id(one))
        assert not isinstance(one, Tensor | torch.cuda.Stream | torch.cuda.Event)
        todo += gc.get_referents(one)


def test_plans_and_checked_calls_are_bounded(log, monkeypatch) -> None:
    monkeypatch.setattr(checks, "_CHECKED_CALLS", 3)
    for T in (1, 2, 3, 4, 5):
        run(*make_layer(T, dtype=BF16))
    assert len(checks._checked) == 3
    monkeypatch.setattr(cuda, "_PLANS", 1)
    x, args = make_layer(3, dtype=BF16)
    for _ in range(2):
        for given in (x, off(x)):
            run(given, args)
    assert all(len(call.plans) <= 1 for call in checks._checked.values())


# --- the workspace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 3, 77])
@pytest.mark.parametrize("way", WAYS)
def test_buffers_lie_apart_at_multiples_of_256_bytes(way, T) -> None:
    x, args = make_layer(T, way=way, dtype=BF16, shared_gate=True)
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    dims = checks.check_layer(layer, args["config"])
    tiles = tuning.layer_tiles("16bit", *dims[:4], dims.S)
    inside, _ = buffer_specs(layer, dims, args["config"], tiles, True)
    buffers, size = cuda._laid_out(inside)
    assert all(buffer.offset % 256 == 0 for buffer in buffers)
    spans = sorted((b.offset, b.offset + b.nbytes) for b in buffers)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= size
    carved = cuda._carve(torch.empty(size, dtype=torch.uint8), buffers)
    assert [(t.shape, t.dtype) for t in carved] == [(b.shape, b.dtype) for b in buffers]


@pytest.mark.parametrize("way", WAYS)
def test_a_call_allocates_its_outputs_and_one_workspace(log, way) -> None:
    for entry, outputs in ((ops._moe, 1), (ops._moe_unfinalized, 5)):
        x, args = make_layer(3, way=way, dtype=BF16, shared_gate=True)
        run(x, args, entry=entry)
        with mock.patch.object(torch, "empty", wraps=torch.empty) as made:
            out = run(x, args, entry=entry)
        assert made.call_count == 1
        out = (out,) if isinstance(out, Tensor) else out
        assert len({t.untyped_storage().data_ptr() for t in out}) == outputs
        assert all(t._base is None for t in out)


@pytest.mark.parametrize("schedule", ["serial", "dual", "dual_shared_main"])
def test_columns_of_x_in_another_order_lie_in_the_outputs_memory_until_the_last_launch_writes_it(log, schedule) -> None:
    x, args = make_layer(200, dtype=BF16, H=96, I=160, S=320)
    args = quantized(args, "int4", None, group=32)
    persistent = Tile(64, 128, 128, 4, 3, swap=True, persistent=True)
    with with_tiles(gemm1=persistent, gemm2=persistent, one_launch=False):
        out = run(x, args, schedule=schedule)
    found = named(launches(log), {"x": x, "out": out})
    assert [entry[2][0] for entry in found if "out" in entry] == ["_reorder", "_persistent_coded", "_finalize"]
    assert found[-1][2][0] == "_finalize"


@pytest.mark.parametrize("formats", [None, Formats("int4", None), Formats("nvfp4", None), Formats("mxfp4", "mxfp4")])
@pytest.mark.parametrize("ranks", ["", "_tp8"])
def test_the_workspace_is_within_the_bound_that_bench_reports(formats, ranks) -> None:
    """At powers of four; between, the parts of 512 experts' logits exceed it by up to 6 %, from 1025 to 2816 tokens."""
    for name, T in itertools.product(shapes.SHAPES, (1, 4, 16, 64, 256, 1024, 4096, 16384)):
        shape = shapes.parse_shape(name + ranks)
        shape = shape if formats is None else shapes.quantised(shape, formats)
        dims = compiling.dims_of(shape, T)
        kind = tuning.layer_kind(BF16, False, shape.config.routed_format, shape.config.shared_format)
        key = tuning.LayerShape(kind, dims.H, dims.I, dims.E, dims.K, dims.S)
        for tables in (tuning.tables_of(None, "NVIDIA H200"), ()):
            tiles, schedule = tuning.layer_choice(key, T, tables)
            layer = compiling._without_memory(shape, dims)
            inside, _ = buffer_specs(layer, dims, shape.config, tiles, True, fused=schedule == "fused")
            assert cuda._laid_out(inside)[1] <= shapes.memory_bound(shape, T, 2), (name, T)


def test_memory_that_binaries_could_not_use_is_refused(log, monkeypatch) -> None:
    x, args = make_layer(3, dtype=BF16)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, **k: empty(n + 1, **k)[1:] if isinstance(n, int) else empty(n, **k))
    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        run(x, args)


# --- launches -------------------------------------------------------------------------------------------------------


class Kernel:
    """A kernel of a pointer, an integer and two constexprs."""

    arg_names = ("x_ptr", "n", "A", "B")

    class Param:
        do_not_specialize = do_not_specialize_on_alignment = False

        def __init__(self, is_constexpr: bool) -> None:
            self.is_constexpr = is_constexpr

    params = tuple(map(Param, (False, False, True, True)))

    def __init__(self, launcher: Any = Launcher) -> None:
        self.log: list[tuple] = []
        self.direct: list[tuple] = []
        self.binary = Binary("binary", self.log)
        self.binary.run = launcher(self.log)

    def warmup(self, *args: Any, grid: object, **meta: Any) -> Binary:
        return self.binary

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **meta: self.direct.append((grid, args, meta))


def bind(kernel: Kernel, tensor: Tensor, *, n: int = 5, base: Any = None) -> tuple[Bound | Direct, list[Any]]:
    """One launch of `kernel`, and its table without the tensor."""
    recording = Recording([tensor])
    with recording as made:
        launch_module.launch(kernel, (3, 2), (tensor if base is None else base, n), {"A": 1, "B": 2})
    (one,) = made
    return one, recording.constants


def test_a_bound_launch_gives_the_binary_its_grid_stream_and_arguments() -> None:
    kernel = Kernel()
    one, constants = bind(kernel, torch.empty(4))
    one([1234, *constants], 9)
    assert kernel.log == [((3, 2, 1), 9, "binary", (4, 1, 0), None, None, None, 1234, 5, None, None)]
    assert kernel.direct == []


class Later:
    """The launcher of Triton 3.8 and 3.9."""

    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        self.log.append((stream, function, kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, args))


class Unknown:
    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    def __call__(self, grid, stream, args):
        raise AssertionError


def test_both_known_forms_of_triton_launchers_are_called() -> None:
    kernel = Kernel(Later)
    one, constants = bind(kernel, torch.empty(4))
    one([1234, *constants], 9)
    assert kernel.log == [(9, "binary", (4, 1, 0), None, None, None, (1234, 5, None, None))]


def test_the_installed_triton_has_a_known_form() -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    kernel = Kernel(lambda log: object.__new__(CudaLauncher))
    assert isinstance(bind(kernel, torch.empty(4))[0], Bound)


def test_an_unknown_form_is_launched_by_triton_itself() -> None:
    kernel, tensor = Kernel(Unknown), torch.empty(4)
    one, constants = bind(kernel, tensor)
    assert isinstance(one, Direct)
    one([tensor, *constants], None)
    ((grid, args, meta),) = kernel.direct
    assert (grid, args[1:], meta) == ((3, 2), (5,), {"enable_fp_fusion": True, "A": 1, "B": 2})
    assert args[0] is tensor


def test_hooks_of_a_profiler_are_called(monkeypatch) -> None:
    kernel = Kernel()
    one, constants = bind(kernel, torch.empty(4))

    def hook(metadata: object) -> None: ...

    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    one([1234, *constants], 9)
    ((_, _, _, _, metadata, enter, _, *_),) = kernel.log
    assert metadata == {"grid": (3, 2, 1), "stream": 9}
    assert enter is hook


def test_a_tensor_that_is_not_the_calls_own_is_refused() -> None:
    tensor = torch.empty(4)
    with pytest.raises(ValueError, match="not the call's own"):
        bind(Kernel(), tensor, base=tensor[1:])


def test_a_descriptor_is_made_of_the_address_of_each_call() -> None:
    kernel, tensor = Kernel(), torch.empty(8, 16, dtype=BF16)
    descriptor = TensorDescriptor.from_tensor(tensor, [4, 16])
    one, constants = bind(kernel, tensor, base=descriptor)
    for address in (2**40, 2**41):
        kernel.log.clear()
        one([address, *constants], 9)
        made = kernel.log[0][7]
        assert made.base.data_ptr() == address
        assert (list(made.shape), list(made.strides), made.block_shape) == ([8, 16], [16, 1], [4, 16])
        assert made.base.dtype == BF16


def test_integers_beyond_32_bits_are_bound_as_they_are() -> None:
    kernel = Kernel()
    one, constants = bind(kernel, torch.empty(4), n=2**31)
    one([0, *constants], 9)
    assert kernel.log[0][8] == 2**31


def test_equal_constants_of_other_types_are_kept_apart() -> None:
    tensor = torch.empty(4)
    recording = Recording([tensor])
    kernel = Kernel()
    with recording as made:
        for n in (1, True, 1.0):
            launch_module.launch(kernel, (1,), (tensor, n), {"A": 1, "B": 2})
    for one in made:
        one([0, *recording.constants], 9)
    assert [type(entry[8]) for entry in kernel.log] == [int, bool, float]


def test_a_recording_launches_nothing_and_ends() -> None:
    kernel, tensor = Kernel(), torch.empty(4)
    bind(kernel, tensor)
    assert kernel.log == kernel.direct == []
    launch_module.launch(kernel, (1,), (tensor, 5), {"A": 1, "B": 2})
    assert len(kernel.direct) == 1
