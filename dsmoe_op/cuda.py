"""The layer on CUDA: the named buffers of a call, and `schedule.execute` to issue the kernels on them.

The first call with certain shapes, strides, dtypes and alignments makes a `_Plan`: the steps of its schedule, and each
launch with its binary, grid and constants. The call, like all later ones, then allocates, fills addresses into the
plan's table, and issues.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import formats, kernels, ranges, streams, tuning
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Checked, Dims, Layer, Routing
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import Choice, LayerTiles


def moe(layer: Layer, call: Checked) -> Tensor:
    """The whole layer; output like hidden_states."""
    x = layer.hidden_states
    out = x.new_empty(x.shape)
    if call.dims.T:
        _run(layer, call, (out,))
    return out


def moe_unfinalized(layer: Layer, call: Checked) -> tuple[Tensor, ...]:
    """y, topk_ids, topk_weights, row_of, shared ([0, H] without a shared expert)."""
    dims = call.dims
    x, slots = layer.hidden_states, (dims.T, dims.K)
    pieces = (
        x.new_empty((dims.T * dims.K, dims.H)),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty(slots, dtype=torch.float32),
        x.new_empty(slots, dtype=torch.int32),
        x.new_empty((dims.T if dims.S else 0, dims.H)),
    )
    if dims.T:
        _run(layer, call, pieces)
    return pieces


def prepare(layer: Layer, call: Checked) -> None:
    """All that the first call would do but launch, and the side stream."""
    with _on_device(layer.hidden_states.device):
        _plan_of(layer, call, _addresses(layer), finalized=True)
        streams.lanes(layer.hidden_states.device.index)


@ranges.in_part("finalize")
def finalize(
    y: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    row_of: Tensor,
    shared: Tensor | None,
    hidden_states: Tensor | None,
    config: MoEConfig,
) -> Tensor:
    """The last launch of a layer on its own."""
    T, H = topk_ids.shape[0], y.shape[1]
    out = y.new_empty((T, H) if hidden_states is None else hidden_states.shape)
    if T:
        x = _rows(hidden_states, H) if hidden_states is not None and config.num_zero_experts else None
        ids, weights, row_of = topk_ids.contiguous(), topk_weights.contiguous(), row_of.contiguous()
        rows = (y.contiguous(), ids, weights, row_of, _contiguous(shared), x, out.view(T, H))
        with _on_device(y.device):
            launch = functools.partial(kernels.finalize, *rows, config=config)
            row_kinds = (None if t is None else _rows_kind(t) for t in rows)
            _prepare(("finalize", config.key, y.device, H, *row_kinds), launch)
            launch(warmup=False)
    return out


@ranges.in_part("router")
def route(routing: Routing, T: int, num_logits: int, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """topk_ids int32 [T, K] and topk_weights float32 [T, K]."""
    x = routing.hidden_states
    ids = x.new_empty((T, config.top_k), dtype=torch.int32)
    weights = x.new_empty((T, config.top_k), dtype=torch.float32)
    if not T:
        return ids, weights
    x_TH = _rows(x, x.shape[-1])
    router_bias, correction_bias = _contiguous(routing.router_bias), _contiguous(routing.correction_bias)
    logits = _logits(x_TH, T, num_logits, routing.router_weight, routing.router_logits)

    def launch(*, warmup: bool) -> None:
        if routing.router_weight is not None:
            kernels.router_logits(x_TH, routing.router_weight, logits, warmup=warmup)
        kernels.choose(
            logits,
            correction_bias,
            None,
            ids,
            weights,
            config=config,
            model_dtype=x.dtype,
            router_bias=router_bias,
            router_weight=routing.router_weight,
            warmup=warmup,
        )

    with _on_device(x.device):
        weight_kinds = map(_weight_kind, (routing.router_weight, router_bias, correction_bias))
        sizes = (num_logits, x.shape[-1])
        _prepare(
            (
                "route",
                config.key,
                sizes,
                x.device,
                _rows_kind(x_TH),
                _rows_kind(logits if logits.dim() == 2 else logits[0]),
                *weight_kinds,
            ),
            launch,
        )
        launch(warmup=False)
    return ids, weights


# --- one call -------------------------------------------------------------------------------------------------------


def _run(layer: Layer, call: Checked, outputs: tuple[Tensor, ...]) -> None:
    """Runs the layer into its outputs: `out` alone, or the pieces of an unfinalized one.

    The tensors made here live until all is issued and the streams are joined. All are of the caller's stream, so what
    takes their memory next comes after.
    """
    x = layer.hidden_states
    device = x.device
    with _on_device(device):
        addresses = _addresses(layer)
        plan = _plan_of(layer, call, addresses, finalized=len(outputs) == 1)
        if plan.copied:
            layer = _normalised(layer, call.dims, plan.copied)
            addresses = _addresses(layer)
        workspace = torch.empty(plan.size, dtype=torch.uint8, device=device)
        if plan.on_tensors:
            inputs = [t for t in _normalised(layer, call.dims, LAYER_FIELDS) if t is not None]
            buffers = _carve(workspace, plan.buffers)
            table: list[Any] = [*inputs, *buffers, *_as_kernels_see(outputs, call.dims), *plan.constants]
        else:
            table = _table(plan, addresses, workspace, outputs)
        schedules.execute(plan.steps, functools.partial(plan.issue, table), device)


def _table(plan: _Plan, addresses: list[int], workspace: Tensor, outputs: tuple[Tensor, ...]) -> list[Any]:
    """What the plan's launches draw from."""
    base = workspace.data_ptr()
    returned = [t.data_ptr() for t in outputs]
    if any(address % 16 for address in (base, *returned)):  # binaries may count on it
        raise RuntimeError("expected memory aligned to 16 bytes from PyTorch's allocator")
    return [*addresses, *[base + offset for offset in plan.offsets], *returned, *plan.constants]


class _Buffer(NamedTuple):
    """One of a call's buffers, at a place of its own in the workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_ALIGNMENT = 256
"""Bytes. Triton asks for 16, TMA for 128, and a line of the L2 cache has 128."""


class _Plan:
    """What calls of one kind have in common. It holds no tensor, no buffer and no stream.

    Attributes:
        steps: of the schedule.
        copied: names of the inputs that kernels take contiguous and the caller gives otherwise.
        buffers, offsets, size: of the workspace.
        constants: the end of the launches' table, after inputs, buffers and outputs.
        on_tensors: whether the table holds tensors and not their addresses.
    """

    __slots__ = ("_launches", "buffers", "constants", "copied", "offsets", "on_tensors", "size", "steps")

    def __init__(
        self, layer: Layer, call: Checked, finalized: bool, allow_tf32: bool, table: tuning.Table | None
    ) -> None:
        dims, config, x = call.dims, call.config, layer.hidden_states
        present = frozenset(n for n in schedules.OPTIONAL if getattr(layer, n) is not None)
        _check_gpu(config, x.device)
        shared_format = config.shared_format if dims.S else config.routed_format
        kind = tuning.layer_kind(x.dtype, allow_tf32, config.routed_format, shared_format)
        shape = tuning.LayerShape(kind, dims.H, dims.I, dims.E, dims.K, dims.S)
        tables = tuning.tables_of(table, torch.cuda.get_device_name(x.device) if x.is_cuda else None)
        tiles, auto = tuning.layer_choice(shape, dims.T, tables)
        one_format = config.routed_format == shared_format
        resolve = functools.partial(schedules.resolve, call.schedule, has_shared=dims.S > 0, one_format=one_format)
        options: dict[str, Any] = {"zero_experts": config.num_zero_experts > 0, "finalized": finalized}
        options["coded_rows"] = frozenset(schedules.coded_rows(config, has_shared=dims.S > 0))
        one_chunk = kernels.num_chunks(dims.T * dims.K, alone=True) == 1
        chosen = resolve(auto=auto)
        self.steps = schedules.plan(
            chosen,
            present,
            **options,
            one_chunk=one_chunk,
            one_launch=tiles.one_launch,
            coded_h=_coded_h(config, dims),
        )
        inside, outputs = _buffers(layer, dims, config, tiles, finalized, fused=chosen == "fused")
        self.buffers, self.size = _laid_out(inside)
        self.offsets = tuple(buffer.offset for buffer in self.buffers)

        given = _normalised(layer, dims, LAYER_FIELDS)
        self.copied = tuple(name for name in LAYER_FIELDS if _is_copy(getattr(given, name), getattr(layer, name)))
        # Kernels are chosen for the buffers by shape and dtype, so that these need no memory here.
        buffers = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in (*inside, *outputs)}
        one = _Call(given, dims, config, buffers, tiles, allow_tf32)
        any_T = tuple(Choice(c.tiles, resolve(auto=c.schedule)) for c in tuning.layer_choices(shape, tables))
        plan_of = functools.partial(schedules.plan, present=present, **options)
        _prepare(one.kind(any_T, finalized), functools.partial(one.warm_up, any_T, plan_of))

        recording = kernels.Recording([*(t for t in given if t is not None), *buffers.values()])
        self._launches: dict[str, list[kernels.Bound | kernels.Direct]] = {}
        for step in self.steps:
            if isinstance(step, schedules.Launch):
                with recording as launches:
                    one.issue_step(step, overlaps=tiles.overlaps)
                self._launches[step.name] = launches
        self.constants = recording.constants
        self.on_tensors = any(isinstance(one, kernels.Direct) for some in self._launches.values() for one in some)

    def issue(self, table: kernels.Table, name: str, stream: int | None) -> None:
        """Issues the launch of that name on the stream of that handle."""
        for launch in self._launches[name]:
            launch(table, stream)


_PLANS = 64
"""Plans of one `Checked`: a few alignments and settings."""


def _addresses(layer: Layer) -> list[int]:
    return [t.data_ptr() for t in layer if t is not None]


def _plan_of(layer: Layer, call: Checked, addresses: list[int], *, finalized: bool) -> _Plan:
    """The plan for these tensors. Its key and `checks.checked`'s together are all that host and kernels look at."""
    x = layer.hidden_states
    allow_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    table = tuning.own_table()
    key = (finalized, allow_tf32, table, *[address % 16 == 0 for address in addresses])
    plan = call.plans.get(key)
    if plan is None:
        plan = _Plan(layer, call, finalized, allow_tf32, table)
        if len(call.plans) >= _PLANS:
            call.plans.clear()  # rather than to count uses at each call
        call.plans[key] = plan
    return plan


Spec = tuple[str, tuple[int, ...], torch.dtype]


def _buffers(
    layer: Layer, dims: Dims, config: MoEConfig, tiles: LayerTiles, finalized: bool, *, fused: bool = False
) -> tuple[list[Spec], list[Spec]]:
    """Name, shape and dtype of the buffers in the workspace, and of the tensors that the call returns."""
    T, H, E, K, I, S, E_routing = dims
    N = T * K
    x, i32, f32 = layer.hidden_states.dtype, torch.int32, torch.float32
    blocks = kernels.num_blocks(N, E, tiles.gemm1.block_m)
    inside: list[Spec] = []
    if layer.router_weight is not None:
        splits = kernels.router_splits(T, layer.hidden_states.dtype, layer.router_weight)
        inside.append(("logits", (splits, T, E_routing + config.num_zero_experts), f32))
    if codes := schedules.coded_rows(config, has_shared=S > 0):
        groups = () if "token" in codes.values() else (math.ceil(H / formats.GROUP),)
        inside += [("x_codes", (T, H), formats.E4M3), ("x_scales", (T, *groups), f32)]
    for branch, over in schedules.coded_h(config, has_shared=S > 0).items():
        name, rows, width = ("h", N, I) if branch == "routed" else ("shared_h", T, S)
        rows = rows if _coded_h(config, dims) and not fused else 0
        groups = () if over == "token" else (math.ceil(width / formats.GROUP),)
        inside += [(f"{name}_codes", (rows, width), formats.E4M3), (f"{name}_scales", (rows, *groups), f32)]
    inside += [
        ("counters", (kernels.num_counters(N, E),), i32),
        ("taken", (1,), i32),
        ("arrivals", (kernels.num_arrivals(blocks, T, H, I, S, tiles[:2]) if tiles.one_launch else 0,), i32),
        ("parts", (kernels.num_parts(T, K, I, S, config.gated, tiles.gemm1) if tiles.one_launch else 0,), f32),
        ("offsets", (E + 1,), i32),
        ("sorted_slot", (N,), i32),
        ("blocks", (3, blocks), i32),
        ("h", (N, I), x),
    ]
    if layer.shared_gate is not None:
        inside.append(("gate", (T,), f32))
    inside.append(("shared_h", (T if S else 0, S), x))
    pieces: list[Spec] = [
        ("y", (N, H), x),
        ("slot_ids", (T, K), i32),
        ("slot_weights", (T, K), f32),
        ("row_of", (T, K), i32),
        ("shared", (T if S else 0, H), x),
    ]
    return (inside + pieces, [("out", (T, H), x)]) if finalized else (inside, pieces)


def _laid_out(specs: list[Spec]) -> tuple[tuple[_Buffer, ...], int]:
    """The buffers one after another, and the bytes that they take."""
    buffers, size = [], 0
    for spec in specs:
        buffers.append(_Buffer(*spec, offset=size))
        size += -(-buffers[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(buffers), size


def _as_kernels_see(outputs: tuple[Tensor, ...], dims: Dims) -> tuple[Tensor, ...]:
    return (outputs[0].view(dims.T, dims.H),) if len(outputs) == 1 else outputs


def _carve(workspace: Tensor, buffers: tuple[_Buffer, ...]) -> list[Tensor]:
    return [workspace[b.offset : b.offset + b.nbytes].view(b.dtype).view(b.shape) for b in buffers]


def _normalised(layer: Layer, dims: Dims, names: tuple[str, ...]) -> Layer:
    """The inputs of those names as kernels take them, a copy only where no view is so; each an object of its own."""
    widths = {"hidden_states": dims.H}
    if layer.router_logits is not None:
        widths["router_logits"] = layer.router_logits.shape[1]
    new: dict[str, Tensor] = {}
    for name in names:
        t = getattr(layer, name)
        if t is not None:
            t = t.detach()  # one tensor may come under two names, and the next call may give two
            t = kernels.as_bytes(t) if name in _MAYBE_QUANTISED else t
            new[name] = _rows(t, widths[name]) if name in widths else t.contiguous() if name in _CONTIGUOUS else t
    return layer._replace(**new)


def _coded(layer: Layer, name: str, dims: Dims, config: MoEConfig) -> kernels.Coded:
    """What belongs to the weight of that name."""
    format = config.format_of(name)
    if format is None or getattr(layer, name) is None:
        return kernels.PLAIN
    width = dims.S if name.startswith("shared_") else dims.I
    halves = config.halves(name)
    rows, columns = (halves * width, dims.H) if name.endswith("w13") else (dims.H, width)
    parts = formats.quantised(layer._asdict(), name)
    return kernels.coded(format, parts, rows, columns, halves, config.interleaves(name))


_CODED_H_TOKENS = 64
"""T up to which GEMM 2 makes h fp8 itself: a step or two of few rows, against a launch. "fused" always does."""


def _coded_h(config: MoEConfig, dims: Dims) -> frozenset[str]:
    """The branches whose h a launch makes fp8."""
    many = dims.T > _CODED_H_TOKENS
    return frozenset(schedules.coded_h(config, has_shared=dims.S > 0)) if many else frozenset()


def _check_gpu(config: MoEConfig, device: torch.device) -> None:
    """
    Raises:
        ValueError: the GPU has no fp8 numbers, and a format has some.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    for field in ("routed_format", "shared_format"):
        name = getattr(config, field)
        if name is not None and formats.E4M3 in formats.FORMATS[name].dtypes + formats.FORMATS[name].scale_dtypes:
            got = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise ValueError(f"{field}: expected a GPU of compute capability 8.9 or more for {name!r}, got {got}")


def _is_copy(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() != b.data_ptr()


class _Call:
    """The tensors of one call, and a method for each launch of a schedule, which issues it on the current stream.

    Args:
        layer: its inputs as `_normalised` leaves them.
        buffers: what `_buffers` names.
        tiles: those of the products for these sizes.
        allow_tf32: float32 products may be tf32.
    """

    def __init__(
        self,
        layer: Layer,
        dims: Dims,
        config: MoEConfig,
        buffers: dict[str, Tensor],
        tiles: LayerTiles,
        allow_tf32: bool,
    ) -> None:
        self.layer, self.dims, self.config, self.allow_tf32 = layer, dims, config, allow_tf32
        self.warmup = False
        self.x = layer.hidden_states
        self.num_valid_tokens = layer.num_valid_tokens
        self.correction_bias, self.router_bias = layer.correction_bias, layer.router_bias
        self.w13_bias, self.w2_bias = layer.w13_bias, layer.w2_bias
        self.expert_map, self.shared_gate = layer.expert_map, layer.shared_gate
        self.coded = {name: _coded(layer, name, dims, config) for name in _WEIGHTS}
        self.tiles = tiles
        if layer.topk_ids is None:
            self.logits = buffers["logits"] if layer.router_logits is None else layer.router_logits
        self.slot_ids, self.slot_weights = buffers["slot_ids"], buffers["slot_weights"]
        order = {name: buffers[name] for name in ("offsets", "counters", "taken", "arrivals")}
        order |= {"sorted_slot_N": buffers["sorted_slot"], "row_of_TK": buffers["row_of"]}
        self.rows = kernels.Rows(
            blocks_3B=buffers["blocks"], block_m=tiles.gemm1.block_m, tail=tiles.gemm1.tail, **order
        )
        self.h, self.y, self.parts = buffers["h"], buffers["y"], buffers["parts"]
        self.gate_T, self.out = buffers.get("gate"), buffers.get("out")
        self.x_codes, self.h_codes, self.shared_h_codes = (
            (buffers.get(f"{name}_codes"), buffers.get(f"{name}_scales")) for name in ("x", "h", "shared_h")
        )
        self.coded_h = _coded_h(config, dims)
        self.shared_h, self.shared = buffers["shared_h"], buffers["shared"]

    def kind(self, choices: tuple[Choice, ...], finalized: bool) -> tuple[object, ...]:
        """All that the kernels of this call are specialised on, whatever its T."""
        layer = self.layer
        weights = [getattr(layer, name) for name in LAYER_FIELDS if name not in _ROWS]
        rows = [getattr(layer, name) for name in _ROWS]
        kinds = (*(None if t is None else _rows_kind(t) for t in rows), *map(_weight_kind, weights))
        key, device = self.config.key, self.x.device
        forms = tuple(coded.form for coded in self.coded.values())  # by the shapes of scales, which `kinds` has not
        return (choices, key, self.dims[1:], finalized, device, self.allow_tf32, forms, *kinds)

    def issue(self, name: str) -> None:
        """Issues the launch of that name on the current stream."""
        getattr(self, "_" + name)()

    def issue_step(self, step: schedules.Launch, *, overlaps: bool) -> None:
        """The same, early where the schedule says so, if launches are to overlap and the GPU can."""
        overlaps = overlaps and self.x.is_cuda and torch.cuda.get_device_capability(self.x.device) >= (9, 0)
        with kernels.overlapping(step.early and overlaps, step.followed and overlaps):
            self.issue(step.name)

    def warm_up(
        self, choices: tuple[Choice, ...], plan_of: Callable[..., tuple[schedules.Step, ...]], *, warmup: bool
    ) -> None:
        """Compiles and loads what a call like this can launch at any T: any of the choices.

        Args:
            plan_of: `schedules.plan` for this call but the schedule, and what depends on T.
        """
        self.warmup = warmup
        chosen, done = (self.tiles, self.coded_h), set()
        all_h = frozenset(schedules.coded_h(self.config, has_shared=self.dims.S > 0))
        kinds = itertools.product(choices, (False, True), dict.fromkeys((frozenset(), all_h)))
        for (self.tiles, schedule), one_chunk, self.coded_h in kinds:
            one_launch, overlaps = self.tiles.one_launch, self.tiles.overlaps
            if one_launch and self.coded_h:
                continue
            for step in plan_of(schedule, one_launch=one_launch, one_chunk=one_chunk, coded_h=self.coded_h):
                if isinstance(step, schedules.Launch):
                    key = (step, overlaps, self.tiles if step.name in schedules.TILED else None)
                    if key not in done:
                        done.add(key)
                        self.issue_step(step, overlaps=overlaps)
        (self.tiles, self.coded_h), self.warmup = chosen, False

    def _quantize(self) -> None:
        self._to_codes(self.x, *self.x_codes)

    def _quantize_h(self) -> None:
        self._to_codes(self.h, *self.h_codes, self.rows.offsets, of_h=True)

    def _quantize_shared_h(self) -> None:
        self._to_codes(self.shared_h, *self.shared_h_codes, of_h=True)

    def _to_codes(
        self, rows: Tensor, codes: Tensor | None, scales: Tensor | None, *offsets: Tensor, of_h: bool = False
    ) -> None:
        assert codes is not None
        assert scales is not None
        kernels.quantize_rows(rows, codes, scales, *offsets, of_h=of_h, warmup=self.warmup)

    def _router(self) -> None:
        assert self.layer.router_weight is not None
        kernels.router_logits(
            self.x, self.layer.router_weight, self.logits, counters=self.rows.counters, warmup=self.warmup
        )

    def _choose(self, rows: kernels.Rows | None = None) -> None:
        kernels.choose(
            self.logits,
            self.correction_bias,
            self.num_valid_tokens,
            self.slot_ids,
            self.slot_weights,
            config=self.config,
            model_dtype=self.x.dtype,
            router_bias=self.router_bias,
            router_weight=self.layer.router_weight,
            expert_map=self.expert_map,
            num_experts=self.dims.E,
            rows=rows,
            counters=self.rows.counters,
            warmup=self.warmup,
        )

    def _choose_order(self) -> None:
        self._choose(self.rows)

    def _zero(self) -> None:
        kernels.zero_counters(self.rows, warmup=self.warmup)

    def _order(self) -> None:
        given = self.layer.topk_ids is not None
        kernels.order_rows(
            self.layer.topk_ids if self.layer.topk_ids is not None else self.slot_ids,
            self.layer.topk_weights,
            self.expert_map,
            self.num_valid_tokens if given else None,
            num_experts=self.dims.E,
            num_zero_experts=self.config.num_zero_experts,
            rows=self.rows,
            ids_out_TK=self.slot_ids if given else None,
            weights_out_TK=self.slot_weights if given else None,
            warmup=self.warmup,
        )

    def _gemm1(self, *, routed: bool = True, shared: bool = False) -> None:
        kernels.gemm1(
            self.x,
            config=self.config,
            tile=self.tiles.gemm1 if routed else self.tiles.shared_gemm1,
            w13=self.layer.w13 if routed else None,
            w13_bias=self.w13_bias if routed else None,
            blocks=self.rows.blocks_3B if routed else None,
            sorted_slot_N=self.rows.sorted_slot_N if routed else None,
            topk_weights_TK=self.slot_weights if routed else None,
            h_NI=self.h if routed else None,
            shared_w13=self.layer.shared_w13 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            num_valid_tokens=self.num_valid_tokens,
            coded=self.coded["w13"] if routed else kernels.PLAIN,
            shared_coded=self.coded["shared_w13"] if shared else kernels.PLAIN,
            x_codes_TH=self.x_codes[0],
            x_scales=self.x_codes[1],
            allow_tf32=self.allow_tf32,
            warmup=self.warmup,
        )

    def _gemm2(self, *, routed: bool = True, shared: bool = False) -> None:
        coded_h = frozenset() if routed and shared else self.coded_h
        h_codes, h_scales = self.h_codes if "routed" in coded_h else (None, None)
        shared_codes, shared_scales = self.shared_h_codes if "shared" in coded_h else (None, None)
        kernels.gemm2(
            config=self.config,
            tile=self.tiles.gemm2 if routed else self.tiles.shared_gemm2,
            w2=self.layer.w2 if routed else None,
            w2_bias=self.w2_bias if routed else None,
            blocks=self.rows.blocks_3B if routed else None,
            h_NI=self.h if routed else None,
            y_NH=self.y if routed else None,
            offsets=self.rows.offsets if routed else None,
            taken=self.rows.taken if routed else None,
            zero_tail=routed and self.out is None,
            shared_w2=self.layer.shared_w2 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            gate_T=self.gate_T if shared else None,
            shared_TH=self.shared if shared else None,
            num_valid_tokens=self.num_valid_tokens,
            coded=self.coded["w2"] if routed else kernels.PLAIN,
            shared_coded=self.coded["shared_w2"] if shared else kernels.PLAIN,
            h_codes_NI=h_codes,
            h_scales=h_scales,
            h_shared_codes_TS=shared_codes,
            h_shared_scales=shared_scales,
            allow_tf32=self.allow_tf32,
            warmup=self.warmup,
        )

    def _gate(self) -> None:
        assert self.shared_gate is not None
        assert self.gate_T is not None
        kernels.shared_gate(self.x, self.shared_gate, self.gate_T, warmup=self.warmup)

    def _shared_gemm1(self) -> None:
        self._gemm1(routed=False, shared=True)

    def _shared_gemm2(self) -> None:
        self._gemm2(routed=False, shared=True)

    def _fused_gemm1(self) -> None:
        self._gemm1(shared=True)

    def _fused_gemm2(self) -> None:
        self._gemm2(shared=True)

    def _experts(self, *, shared: bool = False, ends: bool = False) -> None:
        kernels.experts(
            self.x,
            config=self.config,
            tiles=(self.tiles.gemm1, self.tiles.gemm2),
            rows=self.rows,
            w13=self.layer.w13,
            w13_bias=self.w13_bias,
            w2=self.layer.w2,
            w2_bias=self.w2_bias,
            h_NI=self.h,
            y_NH=self.y,
            topk_ids_TK=self.slot_ids,
            topk_weights_TK=self.slot_weights,
            zero_tail=self.out is None,
            shared_w13=self.layer.shared_w13 if shared else None,
            shared_w2=self.layer.shared_w2 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            gate_T=self.gate_T if shared else None,
            shared_TH=self.shared if self.dims.S else None,
            num_valid_tokens=self.num_valid_tokens,
            out_TH=self.out if ends else None,
            coded=(self.coded["w13"], self.coded["w2"]),
            shared_coded=(self.coded["shared_w13"], self.coded["shared_w2"])
            if shared
            else (kernels.PLAIN, kernels.PLAIN),
            x_codes_TH=self.x_codes[0],
            x_scales=self.x_codes[1],
            parts=self.parts,
            warmup=self.warmup,
        )

    def _fused_experts(self) -> None:
        self._experts(shared=True)

    def _experts_finalize(self) -> None:
        self._experts(ends=True)

    def _fused_experts_finalize(self) -> None:
        self._experts(shared=True, ends=True)

    def _finalize(self) -> None:
        assert self.out is not None
        kernels.finalize(
            self.y,
            self.slot_ids,
            self.slot_weights,
            self.rows.row_of_TK,
            self.shared if self.dims.S else None,
            self.x if self.config.num_zero_experts else None,
            self.out,
            config=self.config,
            warmup=self.warmup,
        )


_ROWS = ("hidden_states", "router_logits", "topk_ids", "topk_weights")
"""Arguments with a row for each token."""

_WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")
_MAYBE_QUANTISED = frozenset(weight + suffix for weight in _WEIGHTS for suffix in formats.SUFFIXES)

_CONTIGUOUS = ("router_bias", "correction_bias", "w13_bias", "w2_bias", "shared_gate", "expert_map")
"""Arguments that kernels take contiguous."""

_prepared: set[tuple[object, ...]] = set()
"""Kinds of call whose kernels are compiled and loaded: a cache alone, no buffer and no stream."""


def _prepare(kind: tuple[object, ...], launch: Callable[..., None]) -> None:
    """At the first call of a kind: compiles and loads what any T can choose, so that a capture loads nothing.

    Args:
        kind: all that the kernels are specialised on.
        launch: launches the call's kernels, with warmup=True instead compiles and loads every variant of them.
    """
    if kind not in _prepared:
        with streams.relaxed_capture():
            kernels.compile_together(functools.partial(launch, warmup=True))
        _prepared.add(kind)


def _weight_kind(t: Tensor | None) -> tuple[object, ...] | None:
    """What kernels are specialised on in a tensor whose shape T is no part of."""
    return None if t is None else (t.dtype, t.data_ptr() % 16 == 0, t.stride())


def _rows_kind(t: Tensor) -> tuple[object, ...]:
    """The same for rows of a token each."""
    return t.dtype, t.data_ptr() % 16 == 0, kernels.row_stride(t) % 16 == 0


def _rows(x: Tensor, width: int) -> Tensor:
    """x as [rows, width] with a unit stride in the last dim; a copy only where no view is so."""
    x = x.reshape(-1, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()


def _logits(
    x_TH: Tensor, T: int, num_logits: int, router_weight: Tensor | None, router_logits: Tensor | None
) -> Tensor:
    """Those given, or a float32 buffer [P, T, E+Z] for the router's partial sums."""
    if router_weight is None:
        assert router_logits is not None
        return _rows(router_logits, num_logits)
    splits = kernels.router_splits(T, x_TH.dtype, router_weight)
    return torch.empty((splits, T, num_logits), dtype=torch.float32, device=x_TH.device)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device guard: launches are made on the current device, whatever their arguments are on."""
    return _AS_IT_IS if device.index == torch.cuda.current_device() else torch.cuda.device(device)


_AS_IT_IS = contextlib.nullcontext()
