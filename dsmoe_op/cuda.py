"""The layer on CUDA: the named buffers of a call, and `schedule.execute` to issue the kernels on them.

The first call with certain shapes, strides, dtypes and alignments makes a `_Plan`: the steps of its schedule, and each
launch with its binary, grid and constants. The call, like all later ones, then allocates, fills addresses into the
plan's table, and issues.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import formats, kernels, launches, ranges, streams, tuning
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Checked, Dims, Layer, Routing
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import Choice


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
            row_kinds = (None if t is None else launches.rows_kind(t) for t in rows)
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
        weight_kinds = map(launches.weight_kind, (routing.router_weight, router_bias, correction_bias))
        sizes = (num_logits, x.shape[-1])
        _prepare(
            (
                "route",
                config.key,
                sizes,
                x.device,
                launches.rows_kind(x_TH),
                launches.rows_kind(logits if logits.dim() == 2 else logits[0]),
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
            table: list[Any] = [*inputs, *buffers, *plan.written(_as_kernels_see(outputs, call.dims)), *plan.constants]
        else:
            table = _table(plan, addresses, workspace, outputs)
        schedules.execute(plan.steps, functools.partial(plan.issue, table), device)


def _table(plan: _Plan, addresses: list[int], workspace: Tensor, outputs: tuple[Tensor, ...]) -> list[Any]:
    """What the plan's launches draw from."""
    base = workspace.data_ptr()
    written = [t.data_ptr() for t in plan.written(outputs)]
    if any(address % 16 for address in (base, *written)):  # binaries may count on it
        raise RuntimeError("expected memory aligned to 16 bytes from PyTorch's allocator")
    return [*addresses, *[base + offset for offset in plan.offsets], *written, *plan.constants]


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

    __slots__ = (
        "_launches",
        "_num_outputs",
        "buffers",
        "constants",
        "copied",
        "offsets",
        "on_tensors",
        "size",
        "steps",
    )

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
        given = _normalised(layer, dims, LAYER_FIELDS)
        self.steps = schedules.plan(
            chosen,
            present,
            **options,
            one_chunk=one_chunk,
            one_launch=tiles.one_launch,
            coded_h=launches.coded_h(config, dims),
            ordered=frozenset() if chosen == "fused" else launches.ordered(given, dims, config, tiles),
        )
        inside, outputs = launches.buffer_specs(given, dims, config, tiles, finalized, fused=chosen == "fused")
        self.buffers, self.size = _laid_out(inside)
        self.offsets = tuple(buffer.offset for buffer in self.buffers)
        self._num_outputs = len(outputs)

        self.copied = tuple(name for name in LAYER_FIELDS if _is_copy(getattr(given, name), getattr(layer, name)))
        # Kernels are chosen for the buffers by shape and dtype, so that these need no memory here.
        buffers = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in (*inside, *outputs)}
        one = launches.Call(given, dims, config, buffers, tiles, allow_tf32)
        any_T = tuple(Choice(c.tiles, resolve(auto=c.schedule)) for c in tuning.layer_choices(shape, tables))
        plan_of = functools.partial(schedules.plan, present=present, **options)
        _prepare(one.kind(any_T, finalized), functools.partial(one.warm_up, any_T, plan_of))

        recording = kernels.Recording([*(t for t in given if t is not None), *buffers.values()])
        self._launches: dict[str, list[kernels.Bound | kernels.Direct]] = {}
        for step in self.steps:
            if isinstance(step, schedules.Launch):
                with recording as bound:
                    one.issue_step(step, overlaps=tiles.overlaps)
                self._launches[step.name] = bound
        self.constants = recording.constants
        self.on_tensors = any(isinstance(one, kernels.Direct) for some in self._launches.values() for one in some)

    def written(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """These in the table's order: `out` once more where it holds something else before."""
        return outputs + outputs[:1] * (self._num_outputs - len(outputs))

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


def _laid_out(specs: list[launches.Spec]) -> tuple[tuple[_Buffer, ...], int]:
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


_MAYBE_QUANTISED = frozenset(weight + suffix for weight in launches.WEIGHTS for suffix in formats.SUFFIXES)

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
