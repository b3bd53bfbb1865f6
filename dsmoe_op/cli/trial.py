"""Tiles and schedules of one layer side by side: each held against the heuristic's, then timed in replays of graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dsmoe_op import dual_stream_moe, kernels, launches, schedule, tuning
from dsmoe_op.checks import Layer
from dsmoe_op.cli import candidates, compiling, timing
from dsmoe_op.cli.candidates import Candidates
from dsmoe_op.cli.output import CommandError, error_text
from dsmoe_op.cli.problem import ROWS_LIMITS, Problem
from dsmoe_op.formats import FORMATS
from dsmoe_op.tuning import Choice, LayerTiles, Table, Tile
from dsmoe_op.tuning.tables import BUCKETS, Row

ROUNDS = 9
LIMIT = 1e-2
"""Relative distance (Frobenius) from what the heuristic's leaves, from which a candidate counts as wrong. A product's
rows are the same for all; in a layer whose rows become fp8 between its products it is ROWS_LIMITS'."""
_OUTPUTS = {"gemm1": "h", "gemm2": "y", "shared_gemm1": "shared_h", "shared_gemm2": "shared"}
_TAKEN = 64
"""Elements between two pairs of counters: binaries count on addresses that are multiples of 16 bytes."""

Say = Callable[[str], None]
"""Takes what went wrong with a candidate."""


class Trial:
    """The launches of one layer of T tokens, for each of several inputs, on buffers of their own."""

    def __init__(self, problem: Problem, inputs: Sequence[Tensor], say: Say) -> None:
        self.say, self.config = say, problem.shape.config
        self.dims = compiling.dims_of(problem.shape, len(inputs[0]))
        given = (problem.tensors(problem.at(i)) for i in range(len(inputs)))
        self.layers = [compiling.layer_of(x, its, self.dims) for x, its in zip(inputs, given, strict=True)]
        self.first = candidates.heuristic(problem.shape, self.dims.T).tiles
        self._buffers = [self._made(layer, self.first) for layer in self.layers]
        # In one tensor, so that one launch a replay zeroes them.
        self._taken = torch.zeros(len(inputs), _TAKEN, dtype=torch.int32, device=inputs[0].device)
        for i, buffers in enumerate(self._buffers):
            buffers["taken"] = self._taken[i, :2]
            if _is_4_bits(self.config.routed_format):  # some candidates multiply it, whatever the heuristic's do
                buffers["x_ordered"] = torch.empty_like(self.layers[i].hidden_states)
        self._h_ordered: list[Tensor] = []
        """h as some candidates of GEMM 2 take it, once there are such."""
        self._routed: dict[tuple[int, int, bool], list[launches.Call]] = {}
        self._codes = schedule.coded_rows(self.config, has_shared=self.dims.S > 0)

    def _made(self, layer: Layer, tiles: LayerTiles, *names: str) -> dict[str, Tensor]:
        inside, outputs = launches.buffer_specs(layer, self.dims, self.config, tiles, True)
        device = layer.hidden_states.device
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, shape, dtype in (*inside, *outputs)
            if not names or name in names
        }

    def _calls(self, tile: Tile, *, of_ordered: bool = False) -> list[launches.Call]:
        """A call for each input, routed, with its rows in blocks as this tile has them, and h as its GEMM 2 has it."""
        blocks = tile.block_m, tile.tail, of_ordered
        if blocks not in self._routed:
            tiles = compiling.all_of(tile)
            made = []
            for i, (layer, buffers) in enumerate(zip(self.layers, self._buffers, strict=True)):
                own = self._made(layer, tiles, "blocks")
                if of_ordered:
                    own["h"] = self._h_ordered[i]
                call = launches.Call(layer, self.dims, self.config, buffers | own, tiles, False)
                if self._codes:
                    call.issue("quantize")
                call.issue("router")
                call.issue("choose_order")
                made.append(call)
            self._routed[blocks] = made
        return self._routed[blocks]

    def _run(self, name: str, tile: Tile) -> timing.Call:
        tiles = compiling.all_of(tile)
        ordered = launches.ordered(self.layers[0], self.dims, self.config, tiles)
        if name == "gemm2" and "h" in ordered and not self._h_ordered:
            for call in self._calls(self.first.gemm1):  # whose h is that of the first product by now
                self._h_ordered.append(torch.empty_like(call.h))
                kernels.reorder_columns(call.h, self._h_ordered[-1], call.rows.num_rows)
        calls = self._calls(tile, of_ordered=name == "gemm2" and "h" in ordered)
        if name == "gemm1" and "x" in ordered:
            for call in calls:
                call.issue("reorder")

        def run(i: int) -> Tensor:
            if i == 0 and name in ("gemm1", "gemm2"):
                self._taken.zero_()
            calls[i].tiles, calls[i].ordered = tiles, ordered
            calls[i].issue(name)
            return self._buffers[i][_OUTPUTS[name]]

        return run

    def _quantize_h(self, gemm1: str) -> None:
        """What a second product reads where h becomes fp8 in a launch between."""
        branch, launch = ("routed", "quantize_h") if gemm1 == "gemm1" else ("shared", "quantize_shared_h")
        for call in self._calls(self.first.gemm1):
            if gemm1.endswith("gemm1") and branch in call.coded_h:
                call.issue(launch)

    def times(self, tiles: Candidates) -> dict[str, dict[Tile, float]]:
        """Microseconds by launch and tile, without those that are wrong or fail. The first that runs is right."""
        us: dict[str, dict[Tile, float]] = {}
        for name, some in tiles.items():
            if name == "shared_gemm2" and self.layers[0].shared_gate is not None:
                for call in self._calls(self.first.gemm1):
                    call.issue("gate")
            runs = {tile: self._run(name, tile) for tile in some}
            us[name] = side_by_side(runs, len(self.layers), functools.partial(_named, name), self.say)
            if not us[name]:
                return {key: {} for key in tiles}
            for i in range(len(self.layers)):  # whatever the others left: what the next product reads
                runs[next(iter(us[name]))](i)
            self._quantize_h(name)
        return us


def _is_4_bits(format: str | None) -> bool:
    return format is not None and FORMATS[format].bits == 4


def layer_times(
    problem: Problem, inputs: Sequence[Tensor], choices: Sequence[Choice], gpu: str, say: Say
) -> dict[Choice, float]:
    """Microseconds of a whole layer by choice, without those that are wrong or fail. The first that runs is right."""
    runs = {choice: _layer(problem, inputs, choice, gpu) for choice in choices}

    def name(choice: Choice) -> str:
        return f"{choice.schedule}{' overlapping' if choice.tiles.overlaps else ''}"

    own = tuning.own_table()
    limit = ROWS_LIMITS[0] if problem.rounds_rows else LIMIT
    try:
        return side_by_side(runs, len(inputs), name, say, limit)
    finally:
        tuning.use_table(own)


def _layer(problem: Problem, inputs: Sequence[Tensor], choice: Choice, gpu: str) -> timing.Call:
    shape = candidates.layer_shape(problem.shape)
    table = Table(gpu=gpu, rows={(shape, most): Row(1, choice, {}, {}, {}) for most in BUCKETS})

    def run(i: int) -> Tensor:
        tuning.use_table(table)
        weights = problem.tensors(problem.at(i))
        return dual_stream_moe(inputs[i], config=problem.shape.config, schedule=choice.schedule, **weights)

    return run


Key = TypeVar("Key")


def side_by_side(
    runs: Mapping[Key, timing.Call], count: int, name: Callable[[Key], str], say: Say, limit: float = LIMIT
) -> dict[Key, float]:
    """Microseconds of one call by key, without those that are wrong or fail.

    Args:
        runs: each leaves its output for input i; the others are held against the first that runs.
        count: of inputs.
        limit: of the distance from it.
    """
    graphs: dict[Key, timing.Captured] = {}
    right: list[Tensor] = []
    for key, run in runs.items():
        try:
            captured = timing.capture(run, count)
            for out in captured.outputs:
                out.fill_(torch.nan)
            captured.graph.replay()
            if right:
                apart = max(map(distance, captured.outputs, right))
                if not apart <= limit:  # NaN is wrong
                    say(f"{name(key)}: WRONG, {apart:.2g} from the heuristic's")
                    continue
            else:
                right = [out.clone() for out in captured.outputs]
                if not all(out.isfinite().all() for out in right):
                    raise CommandError(f"{name(key)} leaves what is not finite")
            graphs[key] = captured
        except CommandError:
            raise
        except Exception as error:
            say(f"{name(key)}: {error_text(error)}")
            recover()
    del right
    keys = list(graphs)
    times = timing.time_in_turn({str(n): graphs[key].graph.replay for n, key in enumerate(keys)}, count, rounds=ROUNDS)
    return {key: times[str(n)].us for n, key in enumerate(keys)}


def distance(out: Tensor, right: Tensor) -> float:
    """Relative, in the Frobenius norm; in parts, since all rows in float32 may take much memory."""
    apart = norm = 0.0
    for a, b in zip(out.split(1 << 14), right.split(1 << 14), strict=True):
        apart += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        norm += float(b.float().square().sum(dtype=torch.float64))
    return (apart / norm) ** 0.5


def recover() -> None:
    """After a candidate failed: so that the next one starts from nothing.

    Raises:
        CommandError: the GPU runs nothing more for this process.
    """
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise CommandError(f"the GPU failed, and --resume goes on from what is written: {error_text(error)}") from None


def _named(name: str, tile: Tile) -> str:
    return f"{name} {brief(tile)}"


def brief(tile: Tile) -> str:
    """Such as: 16x32x128 4 warps 4 stages swap."""
    flags = [name for name, value in tile._asdict().items() if value is True]
    flags += [f"least {tile.least_m}"] if tile.least_m else []
    flags += [f"tail {tile.tail}"] if tile.tail else []
    flags += [f"{tile.splits} splits"] if tile.splits > 1 else []
    numbers = f"{tile.block_m}x{tile.block_n}x{tile.block_k} {tile.num_warps} warps {tile.num_stages} stages"
    return " ".join((numbers, *flags))
