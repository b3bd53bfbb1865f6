"""The first call of a kind compiles all that any T can need, so that a capture compiles and loads nothing.

Launches are recorded here, not made. What a launch would compile follows from its kernel, the dtypes and alignment of
its tensors, which of them are absent, the integers that Triton specialises on, and the constexpr arguments.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from typing import Any

import pytest
import torch
from gpu import with_tiles
from layers import LAUNCHERS, WAYS, make_layer, quantized
from torch import Tensor

from dsmoe_op import MoEConfig, checks, cuda, kernels, launches, streams, tuning
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Layer
from dsmoe_op.kernels import launch as launch_module
from dsmoe_op.schedule import Launch
from dsmoe_op.tuning import Choice, LayerShape, LayerTiles, Table, Tile
from dsmoe_op.tuning.tables import Row

TOKENS = (1, 2, 7, 8, 9, 30, 64, 65, 150, 300, 1025, 5000)


def kind_of(param: Any, value: Any) -> object:
    """What Triton compiles for one argument of a kernel."""
    if isinstance(value, launch_module._DESCRIPTORS):
        return value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)
    if isinstance(value, Tensor):
        return value.dtype, param.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
    if value is None or param.do_not_specialize:
        return type(value)
    return value == 1, value % 16 == 0


class Recorder:
    """What is compiled ahead, and what the launches need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warm: set[object] = set()
        self.launched: set[object] = set()
        for name in LAUNCHERS:
            monkeypatch.setattr(sys.modules[f"dsmoe_op.kernels.{name}"], "launch", self.launch)
        monkeypatch.setattr(streams, "relaxed_capture", contextlib.nullcontext)
        monkeypatch.setattr(cuda, "_prepared", set())
        monkeypatch.setattr(schedules, "execute", self.execute)
        monkeypatch.setattr(launches.Call, "issue_step", issue_step)

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple, meta: dict, *, warmup: bool = False) -> None:
        kinds = tuple(map(kind_of, kernel.params, args))
        overlap = launch_module._overlap.get() if "EARLY" in kernel.arg_names else None
        key = (kernel.fn.__name__, kinds, tuple(sorted(meta.items(), key=str)), overlap)
        (self.warm if warmup else self.launched).add(key)

    def execute(self, steps, issue, device) -> None:
        for step in steps:
            if isinstance(step, Launch):
                issue(step.name, 0)


def names_of(recorder: Recorder) -> set[str]:
    return {name for name, *_ in recorder.launched}


def issue_step(self: launches.Call, step: Launch, *, overlaps: bool) -> None:
    """As on a GPU where launches can overlap."""
    with kernels.overlapping(step.early and overlaps, step.followed and overlaps):
        self.issue(step.name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def call(x: Tensor, args: dict, *, schedule: str = "dual", entry: Any = cuda.moe) -> None:
    given = {"hidden_states": x, **args}
    layer = Layer(**{name: given.get(name) for name in LAYER_FIELDS})
    dims = checks.check_layer(layer, args["config"], schedule)
    called = checks.Checked(dims, args["config"], schedule)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cuda, "_on_device", contextlib.nullcontext)
        entry(layer, called)


@pytest.mark.parametrize("entry", [cuda.moe, cuda.moe_unfinalized])
@pytest.mark.parametrize("schedule", ["serial", "dual", "dual_shared_main", "fused"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_of_any_size_prepares_all_sizes(recorder, dtype, way, schedule, entry) -> None:
    call(*make_layer(3, way=way, dtype=dtype, S=64, shared_gate=True), schedule=schedule, entry=entry)
    warm = set(recorder.warm)
    for T in TOKENS:
        call(*make_layer(T, way=way, dtype=dtype, S=64, shared_gate=True), schedule=schedule, entry=entry)
    assert recorder.launched <= warm
    assert recorder.warm == warm
    launched = {name for name, *_ in recorder.launched}
    assert ("_persistent_gemm2" in launched) == (dtype == torch.bfloat16 and schedule != "fused")
    assert any(overlap and overlap[0] for *_, overlap in recorder.launched) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(("E", "K"), [(1024, 1), (1024, 5), (256, 8), (64, 6), (64, 32)])
def test_the_choice_is_prepared_for_every_number_of_tokens(recorder, E, K) -> None:
    """Which decides how many parts of the logits it adds up and how it orders the slots."""
    weight, config = torch.empty(E, 8192, dtype=torch.bfloat16), MoEConfig(top_k=K)

    def choose(T: int, *, warmup: bool) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32)

        N, block_m = T * K, 16
        rows = kernels.Rows(
            ints(1), ints(N), ints(T, K), ints(3, kernels.num_blocks(N, E, block_m)), block_m, 0,
            ints(kernels.num_counters(N, E)), ints(2), ints(1),
        )  # fmt: skip
        kernels.choose(
            torch.empty(kernels.router_splits(T, torch.bfloat16, weight), T, E), None, None, ints(T, K),
            torch.empty(T, K), config=config, model_dtype=torch.bfloat16, router_weight=weight, rows=rows,
            warmup=warmup,
        )  # fmt: skip

    choose(3, warmup=True)
    for T in (*range(1, 70), *TOKENS, 10000, 70000):
        choose(T, warmup=False)
    assert recorder.launched == recorder.warm


@pytest.mark.parametrize(
    "formats",
    [("fp8_block", "fp8_block"), ("fp8_channel", None), (None, "fp8_block"), ("int4", "mxfp4"), ("int4", None)],
)
@pytest.mark.parametrize("schedule", ["dual", "fused"])
def test_one_call_of_a_quantised_layer_prepares_all_sizes(recorder, schedule, formats) -> None:
    if schedule == "fused" and formats[0] != formats[1]:
        pytest.skip("fused takes one format")

    def layer(T: int) -> tuple[Tensor, dict]:
        x, args = make_layer(T, dtype=torch.bfloat16, S=64, shared_gate=True)
        return x, quantized(args, *formats)

    call(*layer(3), schedule=schedule)
    warm = set(recorder.warm)
    for T in TOKENS:
        call(*layer(T), schedule=schedule)
    assert recorder.launched <= warm
    assert recorder.warm == warm
    made = {name for name, *_ in recorder.launched if name.startswith("_quantize")}
    rounds = any(name in ("fp8_block", "fp8_channel") for name in formats)
    assert ("_persistent_coded" in names_of(recorder)) == (formats[0] == "int4" and schedule == "dual")
    assert {"_reorder", "_reorder_h"} & names_of(recorder) == (
        {"_reorder_h"} if formats[0] == "int4" and schedule == "dual" else set()  # H is no whole words
    )
    many = {name for name, *_ in recorder.launched if name == "_persistent_gemm1"}
    assert bool(many) == (formats[0] in ("fp8_block", "fp8_channel") and schedule == "dual")
    assert made == ({"_quantize_rows", *(["_quantize_h"] if schedule == "dual" else [])} if rounds else set())


@pytest.mark.parametrize("format", [None, "fp8_block", "fp8_channel", "int4"])
@pytest.mark.parametrize("schedule", ["serial", "dual", "fused"])
def test_one_call_prepares_split_tiles_and_persistent_products_of_a_table(recorder, schedule, format) -> None:
    """Of one whose H has whole parts, and of one whose H has none."""
    few = Tile(16, 32, 128, 4, 3, swap=True)
    many, persistent = Tile(64, 64, 128, 4, 3, swap=True), Tile(64, 128, 128, 4, 3, swap=True, persistent=True)
    if format is None:
        many, persistent = (tile._replace(block_m=128) for tile in (many, persistent))
    many = many._replace(persistent=format is not None)
    for H in (512, 272):

        def layer(T: int, H: int = H) -> tuple[Tensor, dict]:
            x, args = make_layer(T, dtype=torch.bfloat16, H=H, I=160, S=320, E=12)
            return x, quantized(args, format, format)

        config = layer(1)[1]["config"]
        shape = LayerShape(tuning.layer_kind(torch.bfloat16, False, format, format), H, 160, 12, config.top_k, 320)
        rows = {}
        for most, splits in ((1, 4), (4, 2), (16, 1)):
            tiles = LayerTiles(few._replace(splits=splits), few, few, few, overlaps=False, one_launch=True)
            rows[shape, most] = Row(1, Choice(tiles, schedule), {}, {}, {})
        for most in (64, 256, 1024, 4096, float("inf")):
            tiles = LayerTiles(many, persistent, many, persistent, overlaps=False)
            rows[shape, most] = Row(1, Choice(tiles, schedule), {}, {}, {})
        tuning.use_table(Table(gpu="any", rows=rows))
        recorder.warm.clear()
        recorder.launched.clear()
        cuda._prepared.clear()
        try:
            call(*layer(30), schedule=schedule)
            warm = set(recorder.warm)
            for T in TOKENS:
                call(*layer(T), schedule=schedule)
        finally:
            tuning.use_table(None)
        assert recorder.launched <= warm
        assert recorder.warm == warm
        metas = [(name, dict(meta)) for name, _, meta, _ in recorder.launched]
        whole = H == 512
        assert {meta["SPLITS"] for name, meta in metas if name == "_experts"} == ({1, 2, 4} if whole else {1})
        taken = [meta for name, meta in metas if name == "_persistent_gemm2"]
        assert bool(taken) == (schedule != "fused" and format != "int4")
        assert all(meta["H_BOXES"] == (2 if format is None else 1) for meta in taken)
        firsts = [meta for name, meta in metas if name == "_persistent_gemm1"]
        assert bool(firsts) == (format in ("fp8_block", "fp8_channel") and schedule != "fused")
        coded = {meta["INNER"] for name, meta in metas if name == "_persistent_coded"}
        ordered = names_of(recorder) & {"_reorder", "_reorder_h"}
        if format != "int4" or schedule == "fused":
            assert (coded, ordered) == (set(), set())
        else:  # 272 columns of x are no whole words
            assert coded == ({H, 160} if whole else {160})
            assert ordered == ({"_reorder", "_reorder_h"} if whole else {"_reorder_h"})


def four_bit_tiles(block_m: int) -> dict[str, Tile]:
    """Fields of LayerTiles with which both products of the routed experts are persistent."""
    wide = Tile(block_m, 64, 128, 4, 3, swap=True, persistent=True)
    return {"gemm1": wide, "gemm2": wide._replace(block_n=128), "one_launch": False}


def four_bits(
    T: int = 200, formats: tuple[str, str | None] = ("int4", None), *, group: int = 32, **options: Any
) -> tuple[Tensor, dict]:
    x, args = make_layer(T, **{"dtype": torch.bfloat16, "H": 96, "I": 160, "S": 320, **options})
    return x, quantized(args, *formats, **({"group": group} if formats[0] == "int4" else {}))


@pytest.mark.parametrize("format", ["int4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shared", ["the same", None, "fp8_block"])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("schedule", ["serial", "dual", "dual_shared_main", "fused"])
def test_products_of_four_bits_are_of_their_kernels_where_tiles_say_so(
    recorder, schedule, block_m, shared, format
) -> None:
    """Those of many rows multiply what launches have brought into their order; in "fused" the shared expert's are in
    the launches."""
    formats = format, format if shared == "the same" else shared
    if schedule == "fused" and formats[0] != formats[1]:
        pytest.skip("fused takes one format")
    with with_tiles(**four_bit_tiles(block_m)):
        for entry in (cuda.moe, cuda.moe_unfinalized):
            recorder.launched.clear()
            call(*four_bits(formats=formats), schedule=schedule, entry=entry)
            names = [name for name, *_ in recorder.launched]
            own = ["_few_coded"] if block_m == 16 else ["_persistent_coded", "_reorder", "_reorder_h"]
            if schedule != "fused":
                assert names.count(own[0]) == 2
            expected = set() if schedule == "fused" else set(own)
            assert {"_few_coded", "_persistent_coded", "_reorder", "_reorder_h"} & set(names) == expected
            assert {"_grouped_gemm", "_persistent_gemm2"} & set(names)  # the shared expert's


def relu2(**options: Any) -> MoEConfig:
    return MoEConfig(top_k=3, activation="relu2", **options)


def with_zero_points(args: dict) -> dict:
    for name in ("w13", "w2"):
        rows, groups = args[f"{name}_scale"].shape[-2:]
        zeros = torch.full((len(args[name]), rows // 2, groups), 0x88, dtype=torch.uint8)
        args = args | {f"{name}_zero_point": zeros}
    return args


def off_by_8_bytes(args: dict) -> dict:
    for name in ("w13", "w2"):
        q = args[name]
        whole = torch.zeros(q.numel() + 16 // q.itemsize, dtype=q.dtype)
        skip = (8 - whole.data_ptr() % 16) % 16 // q.itemsize
        args = args | {name: whole[skip : skip + q.numel()].view(q.shape).copy_(q)}
    return args


def of_scales(dtype: torch.dtype) -> Any:
    return lambda args: args | {f"{name}_scale": args[f"{name}_scale"].to(dtype) for name in ("w13", "w2")}


NEITHER: dict[str, tuple[dict[str, Any], Any]] = {
    "zero points": ({}, with_zero_points),
    "misaligned": ({}, off_by_8_bytes),
    "float32 scales": ({}, of_scales(torch.float32)),
    "fp16 scales beside bf16": ({}, of_scales(torch.float16)),
    "float32 rows": ({"dtype": torch.float32}, lambda args: args),
    "powers of two beside fp16": ({"formats": ("mxfp4", None), "dtype": torch.float16}, lambda args: args),
    "a part of a group": ({"group": 64}, lambda args: args),
    "H and I of no whole words": ({"H": 80, "I": 144}, lambda args: args),
}
ONE: dict[str, tuple[dict[str, Any], str]] = {
    "relu2": ({"config": relu2()}, "h"),
    "weights on the input": ({"config": MoEConfig(top_k=1, apply_router_weight_on_input=True)}, "h"),
    "H of no whole words": ({"H": 80}, "h"),
    "I of no whole words": ({"I": 144}, "x"),
}


@pytest.mark.parametrize("schedule", ["serial", "dual"])
@pytest.mark.parametrize("case", NEITHER)
def test_other_weights_of_four_bits_have_the_ordinary_products_and_nothing_changes_places(
    recorder, case, schedule
) -> None:
    options, change = NEITHER[case]
    x, args = four_bits(**options)
    with with_tiles(**four_bit_tiles(64)):
        call(x, change(args), schedule=schedule)
    assert "_grouped_gemm" in names_of(recorder)
    assert not {"_persistent_coded", "_reorder", "_reorder_h"} & names_of(recorder)
    assert not {"_persistent_coded", "_reorder", "_reorder_h"} & {name for name, *_ in recorder.warm}


@pytest.mark.parametrize("case", ONE)
def test_one_product_of_four_bits_may_be_persistent_and_the_other_not(recorder, case) -> None:
    options, which = ONE[case]
    with with_tiles(**four_bit_tiles(64)):
        call(*four_bits(**options))
    names = [name for name, *_ in recorder.launched]
    assert names.count("_persistent_coded") == 1
    assert ("_reorder" in names, "_reorder_h" in names) == (which == "x", which == "h")


def test_the_heuristic_takes_products_of_four_bits_by_their_rows(recorder) -> None:
    """One launch of both for very few slots, else kernels of their own."""
    few, many = {"_few_coded"}, {"_persistent_coded", "_reorder", "_reorder_h"}
    for T, E, own in ((2, 12, set()), (9, 12, few), (60, 64, few), (60, 12, few), (300, 12, many), (5000, 12, many)):
        recorder.launched.clear()
        call(*four_bits(T, E=E))
        assert {*few, *many} & names_of(recorder) == own, T
        assert ("_experts" in names_of(recorder)) == (not own)


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """The same rows inside longer ones."""
    return torch.nn.functional.pad(x, (before, after))[..., before : before + x.shape[-1]]


def cast(name: str, dtype: torch.dtype) -> Any:
    return lambda x, args: (x, args | {name: args[name].to(dtype)})


OTHERS: dict[str, tuple[str, Any]] = {
    "topk_ids int64": ("topk_ids", cast("topk_ids", torch.int64)),
    "topk_weights bf16": ("topk_ids", cast("topk_weights", torch.bfloat16)),
    "router_logits fp32": ("router_logits", cast("router_logits", torch.float32)),
    "router_weight fp32": ("router_weight", cast("router_weight", torch.float32)),
    "router_bias fp32": ("router_weight", cast("router_bias", torch.float32)),
    "correction_bias bf16": ("router_weight", cast("correction_bias", torch.bfloat16)),
    "w13_bias fp32": ("router_weight", cast("w13_bias", torch.float32)),
    "w2_bias fp32": ("router_weight", cast("w2_bias", torch.float32)),
    "shared_gate fp32": ("router_weight", cast("shared_gate", torch.float32)),
    "w13 transposed": ("router_weight", lambda x, args: (x, args | {"w13": args["w13"].mT.contiguous().mT})),
    "hidden_states in longer rows": ("router_weight", lambda x, args: (padded(x, 0, 3), args)),
    "hidden_states off the 16 bytes": ("router_weight", lambda x, args: (padded(x, 1, 15), args)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_with_another_dtype_or_layout_is_another_kind(recorder, other) -> None:
    """Else the kernels that its first call has no use for would compile at a later one."""
    way, change = OTHERS[other]

    def layer(T: int) -> tuple[Tensor, dict]:
        router = {"router_bias": True, "correction_bias": True} if way == "router_weight" else {}
        return make_layer(T, way=way, dtype=torch.bfloat16, shared_gate=True, expert_bias=True, **router)

    call(*layer(3))
    for T in (3, *TOKENS):
        call(*change(*layer(T)))
    assert recorder.launched <= recorder.warm


@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_routing_of_any_size_prepares_all_sizes(recorder, way) -> None:
    def route(T: int) -> None:
        x, args = make_layer(T, way=way, dtype=torch.bfloat16)
        routing = checks.Routing(x, *(args.get(name) for name in checks.Routing._fields[1:]))
        with pytest.MonkeyPatch.context() as m:
            m.setattr(cuda, "_on_device", contextlib.nullcontext)
            cuda.route(routing, T, 12, args["config"])

    route(3)
    first = recorder.warm | recorder.launched
    for T in TOKENS:
        route(T)
    assert recorder.launched <= first


@pytest.mark.parametrize("way", ["router_weight", "router_logits"])
def test_routing_among_more_experts_is_another_kind(recorder, way) -> None:
    for E in (12, 16, 32, 48):
        x, args = make_layer(3, way=way, E=E, dtype=torch.bfloat16)
        routing = checks.Routing(x, *(args.get(name) for name in checks.Routing._fields[1:]))
        with pytest.MonkeyPatch.context() as m:
            m.setattr(cuda, "_on_device", contextlib.nullcontext)
            cuda.route(routing, 3, E, args["config"])
    assert recorder.launched <= recorder.warm


def test_a_kind_is_prepared_once(recorder) -> None:
    for T in (3, 3, 70):
        call(*make_layer(T))
    assert len(cuda._prepared) == 1


def test_a_kernel_that_fails_to_compile_leaves_the_next_call_fine() -> None:
    """Triton leaves its mode set where a compile that it waits for at the end fails."""
    from triton.runtime._async_compile import active_mode

    class Failure(Exception):
        pass

    def warm_up() -> None:
        mode = active_mode.get()
        ends = len(inspect.signature(mode.submit).parameters) - 2
        mode.submit("key", compiles, *[lambda *args: None] * ends)

    def compiles() -> None:
        raise Failure

    with pytest.raises(Failure):
        kernels.compile_together(warm_up)
    kernels.compile_together(lambda: None)


def test_no_garbage_is_collected_while_kernels_compile() -> None:
    """CPython 3.11 may fail to parse a kernel where a collection lets another thread parse one in between."""
    collects = []

    def warm_up() -> None:
        collects.append(gc.isenabled())
        raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        kernels.compile_together(warm_up)
    assert collects == [False]
    assert gc.isenabled()
