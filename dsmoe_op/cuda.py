"""The layer on CUDA: allocates the named buffers of a call, then lets `schedule.execute` issue the kernels on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsmoe_op import kernels, streams
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Dims, Layer, Routing
from dsmoe_op.config import MoEConfig


def moe(layer: Layer, dims: Dims, config: MoEConfig, schedule: str) -> Tensor:
    """The whole layer; output like hidden_states."""
    out = layer.hidden_states.new_empty(layer.hidden_states.shape)
    if dims.T:
        with _on_device(out.device):
            call = _Call(layer, dims, config, out.view(dims.T, dims.H))
            call.run(schedule)
    return out


def moe_unfinalized(layer: Layer, dims: Dims, config: MoEConfig, schedule: str) -> tuple[Tensor, ...]:
    """y, topk_ids, topk_weights, row_of, shared ([0, H] without a shared expert)."""
    x = layer.hidden_states
    if not dims.T:
        slots = (0, dims.K)
        ids, weights = x.new_empty(slots, dtype=torch.int32), x.new_empty(slots, dtype=torch.float32)
        return x.new_empty((0, dims.H)), ids, weights, torch.empty_like(ids), x.new_empty((0, dims.H))
    with _on_device(x.device):
        call = _Call(layer, dims, config, None)
        call.run(schedule)
    return call.y, call.slot_ids, call.slot_weights, call.row_of, call.shared


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
        _prepare(("route", config.key, sizes, x.device, _rows_kind(x_TH), _rows_kind(logits[0]), *weight_kinds), launch)
        launch(warmup=False)
    return ids, weights


class _Call:
    """The buffers of one call, and a method for each launch of a schedule, which issues it on the current stream."""

    def __init__(self, layer: Layer, dims: Dims, config: MoEConfig, out: Tensor | None) -> None:
        self.layer, self.dims, self.config, self.out = layer, dims, config, out
        self.warmup = False
        T, H, E, K, I, S, E_routing = dims
        x = layer.hidden_states
        self.x = _rows(x, H)
        self.allow_tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.num_valid_tokens = layer.num_valid_tokens
        self.correction_bias = _contiguous(layer.correction_bias)
        self.router_bias = _contiguous(layer.router_bias)
        self.w13_bias, self.w2_bias = _contiguous(layer.w13_bias), _contiguous(layer.w2_bias)
        self.expert_map, self.shared_gate = _contiguous(layer.expert_map), _contiguous(layer.shared_gate)

        def buffer(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        if layer.topk_ids is None:
            self.logits = _logits(
                self.x, T, E_routing + config.num_zero_experts, layer.router_weight, layer.router_logits
            )
        block_m = kernels.tile_rows(T * K / E, x.dtype, self.allow_tf32)
        self.offsets = buffer(E + 1, dtype=torch.int32)
        self.sorted_slot = buffer(T * K, dtype=torch.int32)
        self.tiles = buffer(3, kernels.num_tiles(T * K, E, block_m), dtype=torch.int32)
        self.counters = buffer(kernels.num_counters(T * K, E), dtype=torch.int32)
        self.row_of = buffer(T, K, dtype=torch.int32)
        self.slot_ids = buffer(T, K, dtype=torch.int32)
        self.slot_weights = buffer(T, K, dtype=torch.float32)
        self.rows = kernels.Rows(self.offsets, self.sorted_slot, self.row_of, self.tiles, block_m, self.counters)
        self.h, self.y = buffer(T * K, I), buffer(T * K, H)
        self.gate_T = buffer(T, dtype=torch.float32) if layer.shared_gate is not None else None
        self.shared_h = buffer(T if S else 0, S)
        self.shared = buffer(T if S else 0, H)

    def run(self, schedule: str) -> None:
        layer = self.layer
        resolved = schedules.resolve(schedule, has_shared=self.dims.S > 0)
        present = frozenset(n for n in schedules.OPTIONAL if getattr(layer, n) is not None)
        plan = functools.partial(
            schedules.plan,
            resolved,
            present,
            zero_experts=self.config.num_zero_experts > 0,
            finalized=self.out is not None,
        )
        steps = plan(one_chunk=kernels.num_chunks(self.dims.T * self.dims.K) == 1)
        weights = (getattr(layer, name) for name in LAYER_FIELDS if name not in _ROWS)
        rows = (
            self.logits[0] if name == "router_logits" else getattr(layer, name) for name in _ROWS if name in present
        )
        kinds = (*map(_rows_kind, (self.x, *rows)), *map(_weight_kind, weights))
        kind = (resolved, self.config.key, self.dims[1:], self.out is not None, self.x.device, self.allow_tf32)
        _prepare((*kind, *kinds), functools.partial(self._issue_all, plan()))
        schedules.execute(steps, self.issue, layer.hidden_states.device)

    def issue(self, name: str) -> None:
        """Issues the launch of that name on the current stream."""
        getattr(self, "_" + name)()

    def _issue_all(self, steps: tuple[schedules.Step, ...], *, warmup: bool) -> None:
        self.warmup = warmup
        for step in steps:
            if isinstance(step, schedules.Launch):
                self.issue(step.name)
        self.warmup = False

    def _router(self) -> None:
        assert self.layer.router_weight is not None
        kernels.router_logits(self.x, self.layer.router_weight, self.logits, counters=self.counters, warmup=self.warmup)

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
            counters=self.counters,
            warmup=self.warmup,
        )

    def _choose_order(self) -> None:
        self._choose(self.rows)

    def _zero(self) -> None:
        kernels.zero_counters(self.counters, warmup=self.warmup)

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
            w13=self.layer.w13 if routed else None,
            w13_bias=self.w13_bias if routed else None,
            offsets=self.offsets if routed else None,
            sorted_slot_N=self.sorted_slot if routed else None,
            topk_weights_TK=self.slot_weights if routed else None,
            h_NI=self.h if routed else None,
            shared_w13=self.layer.shared_w13 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            num_valid_tokens=self.num_valid_tokens,
            allow_tf32=self.allow_tf32,
            warmup=self.warmup,
        )

    def _gemm2(self, *, routed: bool = True, shared: bool = False) -> None:
        kernels.gemm2(
            config=self.config,
            w2=self.layer.w2 if routed else None,
            w2_bias=self.w2_bias if routed else None,
            offsets=self.offsets if routed else None,
            h_NI=self.h if routed else None,
            y_NH=self.y if routed else None,
            zero_tail=routed and self.out is None,
            shared_w2=self.layer.shared_w2 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            gate_T=self.gate_T if shared else None,
            shared_TH=self.shared if shared else None,
            num_valid_tokens=self.num_valid_tokens,
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

    def _finalize(self) -> None:
        assert self.out is not None
        kernels.finalize(
            self.y,
            self.slot_ids,
            self.slot_weights,
            self.row_of,
            self.shared if self.dims.S else None,
            self.x if self.config.num_zero_experts else None,
            self.out,
            config=self.config,
            warmup=self.warmup,
        )


_ROWS = ("hidden_states", "router_logits", "topk_ids", "topk_weights")
"""Arguments with a row for each token."""

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
    """Those given as [1, T, E+Z], or a float32 buffer [P, T, E+Z] for the router's partial sums."""
    if router_weight is None:
        assert router_logits is not None
        return _rows(router_logits, num_logits)[None]
    splits = kernels.router_splits(x_TH, router_weight)
    return torch.empty((splits, T, num_logits), dtype=torch.float32, device=x_TH.device)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """The device guard: Triton launches on the current device, whatever its arguments are on."""
    if device.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(device):
            yield
