"""A layer's launches on CUDA: the buffers that they take by name, and a method of `Call` for each.

`cuda.py` says which are issued, in what order and on what memory; `schedule.py` what each reads and writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dsmoe_op import formats, kernels
from dsmoe_op import schedule as schedules
from dsmoe_op.checks import LAYER_FIELDS, Dims, Layer
from dsmoe_op.config import MoEConfig
from dsmoe_op.tuning import Choice, LayerTiles

WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")

_ROWS = ("hidden_states", "router_logits", "topk_ids", "topk_weights")
"""Arguments with a row for each token."""

Spec = tuple[str, tuple[int, ...], torch.dtype]


def buffer_specs(
    layer: Layer, dims: Dims, config: MoEConfig, tiles: LayerTiles, finalized: bool, *, fused: bool = False
) -> tuple[list[Spec], list[Spec]]:
    """Name, shape and dtype of the buffers in the workspace, and of the tensors that the call returns.

    What follows "out" lies in its memory: nothing uses it any more when the last launch writes out.
    """
    T, H, E, K, I, S, E_routing = dims
    N = T * K
    order = frozenset() if fused else ordered(layer, dims, config, tiles)
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
        rows = rows if coded_h(config, dims) and not fused else 0
        groups = () if over == "token" else (math.ceil(width / formats.GROUP),)
        inside += [(f"{name}_codes", (rows, width), formats.E4M3), (f"{name}_scales", (rows, *groups), f32)]
    inside += [
        ("counters", (kernels.num_counters(N, E),), i32),
        ("taken", (2,), i32),
        ("arrivals", (kernels.num_arrivals(blocks, T, H, I, S, tiles[:2]) if tiles.one_launch else 0,), i32),
        ("parts", (kernels.num_parts(T, K, I, S, config.gated, tiles.gemm1) if tiles.one_launch else 0,), f32),
        ("num_rows", (1,), i32),
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
    out: list[Spec] = [("out", (T, H), x)]
    (out if finalized and "x" in order else inside).append(("x_ordered", (T if "x" in order else 0, H), x))
    return (inside + pieces, out) if finalized else (inside, pieces)


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


CODED_H_TOKENS = 64
"""T up to which GEMM 2 makes h fp8 itself: a step or two of few rows, against a launch. "fused" always does."""


def coded_h(config: MoEConfig, dims: Dims) -> frozenset[str]:
    """The branches whose h a launch makes fp8."""
    many = dims.T > CODED_H_TOKENS
    return frozenset(schedules.coded_h(config, has_shared=dims.S > 0)) if many else frozenset()


def ordered(layer: Layer, dims: Dims, config: MoEConfig, tiles: LayerTiles) -> frozenset[str]:
    """Of "x" and "h", what routed experts of four bits multiply with another order of columns."""
    if kernels.INTERPRET or tiles.one_launch:
        return frozenset()
    rows, found = layer.hidden_states.dtype, set()
    for what, name, tile in (("x", "w13", tiles.gemm1), ("h", "w2", tiles.gemm2)):
        weight = getattr(layer, name)
        gated = config if name == "w13" else None
        coded = _coded(layer, name, dims, config)
        if tile.persistent and kernels.takes_ordered(weight, rows, tile.block_m, coded, gated):
            found.add(what)
    return frozenset(found)


class Call:
    """The tensors of one call, and a method for each launch of a schedule, which issues it on the current stream.

    Args:
        layer: its inputs as `cuda._normalised` leaves them.
        buffers: what `buffer_specs` names.
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
        self.coded = {name: _coded(layer, name, dims, config) for name in WEIGHTS}
        self.tiles = tiles
        if layer.topk_ids is None:
            self.logits = buffers["logits"] if layer.router_logits is None else layer.router_logits
        self.slot_ids, self.slot_weights = buffers["slot_ids"], buffers["slot_weights"]
        order = {name: buffers[name] for name in ("num_rows", "counters", "taken", "arrivals")}
        order |= {"sorted_slot_N": buffers["sorted_slot"], "row_of_TK": buffers["row_of"]}
        self.rows = kernels.Rows(
            blocks_3B=buffers["blocks"], block_m=tiles.gemm1.block_m, tail=tiles.gemm1.tail, **order
        )
        self.h, self.y, self.parts = buffers["h"], buffers["y"], buffers["parts"]
        self.x_ordered, self.ordered = buffers["x_ordered"], ordered(layer, dims, config, tiles)
        self.gate_T, self.out = buffers.get("gate"), buffers.get("out")
        self.x_codes, self.h_codes, self.shared_h_codes = (
            (buffers.get(f"{name}_codes"), buffers.get(f"{name}_scales")) for name in ("x", "h", "shared_h")
        )
        self.coded_h = coded_h(config, dims)
        self.shared_h, self.shared = buffers["shared_h"], buffers["shared"]

    def kind(self, choices: tuple[Choice, ...], finalized: bool) -> tuple[object, ...]:
        """All that the kernels of this call are specialised on, whatever its T."""
        layer = self.layer
        weights = [getattr(layer, name) for name in LAYER_FIELDS if name not in _ROWS]
        rows = [getattr(layer, name) for name in _ROWS]
        kinds = (*(None if t is None else rows_kind(t) for t in rows), *map(weight_kind, weights))
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
        chosen, done = (self.tiles, self.coded_h, self.ordered), set()
        all_h = frozenset(schedules.coded_h(self.config, has_shared=self.dims.S > 0))
        kinds = itertools.product(choices, (False, True), dict.fromkeys((frozenset(), all_h)))
        for (self.tiles, schedule), one_chunk, self.coded_h in kinds:
            one_launch, overlaps = self.tiles.one_launch, self.tiles.overlaps
            if one_launch and self.coded_h:
                continue
            fused = schedule == "fused"
            self.ordered = frozenset() if fused else ordered(self.layer, self.dims, self.config, self.tiles)
            options = {"one_launch": one_launch, "one_chunk": one_chunk, "coded_h": self.coded_h}
            for step in plan_of(schedule, **options, ordered=self.ordered):
                if isinstance(step, schedules.Launch):
                    key = (step, overlaps, self.tiles if step.name in schedules.TILED else None)
                    if key not in done:
                        done.add(key)
                        self.issue_step(step, overlaps=overlaps)
        (self.tiles, self.coded_h, self.ordered), self.warmup = chosen, False

    def _quantize(self) -> None:
        self._to_codes(self.x, *self.x_codes)

    def _quantize_h(self) -> None:
        self._to_codes(self.h, *self.h_codes, self.rows.num_rows, of_h=True)

    def _quantize_shared_h(self) -> None:
        self._to_codes(self.shared_h, *self.shared_h_codes, of_h=True)

    def _to_codes(
        self, rows: Tensor, codes: Tensor | None, scales: Tensor | None, *num_rows: Tensor, of_h: bool = False
    ) -> None:
        assert codes is not None
        assert scales is not None
        kernels.quantize_rows(rows, codes, scales, *num_rows, of_h=of_h, warmup=self.warmup)

    def _reorder(self) -> None:
        kernels.reorder_columns(self.x, self.x_ordered, warmup=self.warmup)

    def _reorder_h(self) -> None:
        kernels.reorder_columns(self.h, self.h, self.rows.num_rows, warmup=self.warmup)

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
        kernels.zero_counters(self.rows, num_experts=self.dims.E, warmup=self.warmup)

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
            taken=self.rows.taken if routed else None,
            shared_w13=self.layer.shared_w13 if shared else None,
            h_shared_TS=self.shared_h if shared else None,
            num_valid_tokens=self.num_valid_tokens,
            coded=self.coded["w13"] if routed else kernels.PLAIN,
            shared_coded=self.coded["shared_w13"] if shared else kernels.PLAIN,
            x_codes_TH=self.x_codes[0],
            x_scales=self.x_codes[1],
            x_ordered=self.x_ordered if routed and not shared and "x" in self.ordered else None,
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
            num_rows=self.rows.num_rows if routed else None,
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
            h_is_ordered=routed and not shared and "h" in self.ordered,
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


def weight_kind(t: Tensor | None) -> tuple[object, ...] | None:
    """What kernels are specialised on in a tensor whose shape T is no part of."""
    return None if t is None else (t.dtype, t.data_ptr() % 16 == 0, t.stride())


def rows_kind(t: Tensor) -> tuple[object, ...]:
    """The same for rows of a token each."""
    return t.dtype, t.data_ptr() % 16 == 0, kernels.row_stride(t) % 16 == 0
