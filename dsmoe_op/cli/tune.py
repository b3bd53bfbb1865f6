"""`python -m dsmoe_op tune`: measures which tiles and schedule a GPU is fastest with, and writes them as a table.

Shape by shape: each tile of each product is one launch, timed for several inputs in a CUDA graph with cold weights; the
fastest pair of gemm1 and gemm2 with one map wins, then the shared expert's tiles alone; then the whole layer with
these in each schedule, beside the heuristic's. A candidate is first held against what the heuristic's leaves. Other
processes compile meanwhile. The table is written after each cell, a cell being a shape and a bucket of T.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsmoe_op
from dsmoe_op import schedule as schedules
from dsmoe_op import tuning
from dsmoe_op.cli import arguments, candidates, compiling, output, shapes
from dsmoe_op.cli.candidates import layer_shape
from dsmoe_op.cli.compiling import Compiler, Job, OutOfTime, Target
from dsmoe_op.cli.output import CommandError
from dsmoe_op.cli.problem import Problem
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.tuning import Choice, LayerTiles, Table, Tile
from dsmoe_op.tuning.tables import BUCKETS, GEMMS, SHARED, Row, bucket, file_name

SHAPES = "dsv3_tp8,qwen3next,glm45air,v2lite,dsv3"
TOKENS = (*(int(most) for most in BUCKETS[:-1]), 16384)
Times = dict[str, dict[Tile, float]]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="measure which tiles and schedule this GPU is fastest with, and write them as a table",
        description="Times tiles and schedules of MoE layers, in bf16 or with quantised weights, on this GPU, on "
        "random weights and inputs, and writes the fastest ones by shape and number of tokens as JSON, for "
        "dsmoe_op.tuning.use_table(load_table(PATH)). What is not in a table is chosen by a rule. Exit code 0: the "
        "table is written, whole or as far as the minutes went; 1: some cell has no right candidate; 2: it could not "
        "run.",
    )
    add = parser.add_argument
    add("--shape", type=shapes.parse_shapes, default=shapes.parse_shapes(SHAPES), metavar="A,B", help=f"({SHAPES})")
    default = ",".join(map(str, TOKENS))
    add("--tokens", type=_tokens, default=TOKENS, metavar="1,4", help=f"one for each bucket that is wanted ({default})")
    quantised = f"of the experts' weights: {arguments.FORMATS_ACCEPTED} (none)"
    add("--format", type=arguments.formats_or_none, metavar="NAME", help=quantised)
    add("--minutes", type=_minutes, default=10.0, metavar="M", help="stop after so long, with what is done (10)")
    add("--out", type=Path, metavar="PATH", help="the table (its library name, such as nvidia_h200.json, here)")
    add("--resume", action="store_true", help="keep what PATH has, and do the rest")
    add("--device", type=arguments.device, metavar="NAME", help="cuda or cuda:N (cuda)")
    add("--workers", type=arguments.integer(1, 1024), metavar="N", help="processes that compile (cores but one)")
    add("--seed", type=arguments.integer(0, 2**31), default=0, metavar="N", help="of weights and inputs (0)")
    add("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=lambda options: _command(options, parser))


def _tokens(text: str) -> tuple[int, ...]:
    found = arguments.integers(1, 1 << 20)(text)
    for a, b in itertools.pairwise(found):
        if bucket(a) == bucket(b):
            raise argparse.ArgumentTypeError(f"expected one number for each bucket, got {a} and {b} of the same")
    return found


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"expected a number above 0, up to 1440, got {text!r}")
    return value


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    begin = time.monotonic()
    if not torch.cuda.is_available() or (options.device is not None and options.device.type != "cuda"):
        raise CommandError(
            "tune needs a CUDA GPU, which it measures"
            + ("" if torch.cuda.is_available() else ", and torch finds none here")
        )
    for shape in options.shape:
        for letter in "HIS":
            if getattr(shape, letter) % 16:
                parser.error(f"argument --shape: expected multiples of 16, got {letter}={getattr(shape, letter)}")
    if options.format:
        try:
            options.shape = tuple(shapes.quantised(shape, options.format) for shape in options.shape)
        except ValueError as error:
            parser.error(f"argument --format: {error}")
    device = options.device or arguments.device("cuda")
    torch.cuda.set_device(device)
    gpu = torch.cuda.get_device_name(device)
    path = options.out or Path(file_name(gpu))
    table = _start(path, gpu, options.resume)
    compiler = Compiler(_target(), options.workers)
    try:
        with output.stdout_kept_for_json(options.json):
            tuner = Tuner(table, path, device, options.seed, compiler, begin + 60 * options.minutes)
            finished = tuner.run(options.shape, options.tokens)
    finally:
        compiler.close()
    if options.json:
        output.print_json(
            {
                "path": str(path),
                "gpu": gpu,
                "finished": finished,
                "seconds": time.monotonic() - begin,
                "without_a_right_candidate": [f"{shape.name} {T}" for shape, T in tuner.failed],
                "rows": [_as_json(shape, T, row) for shape, T, row in tuner.done],
            }
        )
    else:
        print(report(tuner.done))
        print(f"{path}: {len(tuner.rows)} cells" + ("" if finished else ", of which --resume does the rest"))
    return output.WRONG if tuner.failed else output.OK


def _start(path: Path, gpu: str, resume: bool) -> Table:
    """An empty table, or what the file has.

    Raises:
        CommandError: the file has what would be lost or mixed up, or has no folder.
    """
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--out: there is no folder {path.absolute().parent}")
    rows: dict[Any, Row] = {}
    if path.exists():
        if not resume:
            raise CommandError(f"--out: {path} exists; --resume goes on with it")
        try:
            old = tuning.load_table(path)
        except (OSError, ValueError) as error:
            raise CommandError(f"--resume: {error}") from None
        if old.gpu != gpu:
            raise CommandError(f"--resume: {path} is of {old.gpu}, and this GPU is {gpu}")
        rows |= old.rows
    return Table(gpu=gpu, rows=rows, made_with=_versions())


def _versions() -> dict[str, str]:
    import triton

    return {"dsmoe_op": dsmoe_op.__version__, "torch": torch.__version__, "triton": triton.__version__}


def _target() -> Target:
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


# --- the loop -------------------------------------------------------------------------------------------------------


class Tuner:
    """Fills the table and writes it after each cell.

    Attributes:
        done: shape, tokens and row of each cell of this run.
        failed: cells without a right candidate.
    """

    def __init__(
        self, table: Table, path: Path, device: torch.device, seed: int, compiler: Compiler, deadline: float
    ) -> None:
        """Args: deadline: of time.monotonic."""
        self.table, self.path, self.device, self.seed = table, path, device, seed
        self.compiler, self.deadline = compiler, deadline
        self.rows = dict(table.rows)
        self.done: list[tuple[Shape, int, Row]] = []
        self.failed: list[tuple[Shape, int]] = []

    def run(self, wanted: Sequence[Shape], tokens: Sequence[int]) -> bool:
        """Whether all was done, or the time ran out before."""
        wanted = list({layer_shape(shape): shape for shape in reversed(wanted)}.values())[::-1]  # each once
        cells = {shape: [T for T in tokens if (layer_shape(shape), bucket(T)) not in self.rows] for shape in wanted}
        todo = [shape for shape, some in cells.items() if some]
        total = sum(map(len, cells.values()))
        print(f"{total} cells, {len(wanted) * len(tokens) - total} already there", file=sys.stderr)
        if not todo:
            return True
        with output.progress(total, "tune") as self.bar, torch.inference_mode():
            try:
                for shape, next_shape in zip(todo, (*todo[1:], None), strict=True):
                    ahead = _product_jobs(next_shape, cells[next_shape]) if next_shape else []
                    self._shape(shape, cells[shape], ahead)
            except OutOfTime:
                self.bar.write("the time is up", file=sys.stderr)
                return False
        return True

    def _shape(self, shape: Shape, tokens: Sequence[int], ahead: Sequence[Job]) -> None:
        """Args: ahead: what the processes compile while this shape's layers are timed."""
        self.bar.set_description(f"{shape.name}: compiling")
        self.compiler.submit(_product_jobs(shape, tokens))
        problem = Problem(shape, "bf16", self.device, self.seed)
        found: list[tuple[int, list[Tensor], Times, tuple[Choice, ...]]] = []
        for T in tokens:
            inputs, times = self._products(problem, T)
            best = candidates.best_tiles(times, candidates.heuristic(shape, T).tiles)
            if best is None:
                self._fail(shape, T)
                continue
            found.append((T, inputs, times, candidates.choices(shape, T, best)))
            self.compiler.submit(_layer_jobs(shape, found[-1][-1], self._overlaps))
        self.compiler.submit(ahead)
        for T, inputs, times, choices in found:
            self._layer(problem, T, inputs, times, choices)
        del problem, found
        _free()

    def _products(self, problem: Problem, T: int) -> tuple[list[Tensor], Times]:
        from dsmoe_op.cli.trial import Trial  # needs triton

        shape = problem.shape
        failures = self.compiler.failures(_product_jobs(shape, [T]), self.deadline)
        for job, text in failures.items():
            self._say(shape, T, f"{job.name} {job.tile}: {text}")
        bad = {(job.name, job.tile) for job in failures}
        self._check_time()
        self.bar.set_description(f"{shape.name} {T} tokens: products")
        tiles = {
            name: tuple(tile for tile in some if (name, tile) not in bad)
            for name, some in candidates.tiles(shape, T).items()
        }
        inputs = problem.inputs(T)
        times = Trial(problem, inputs, lambda text: self._say(shape, T, text)).times(tiles)
        _free()
        return inputs, times

    def _layer(self, problem: Problem, T: int, inputs: list[Tensor], times: Times, choices: tuple[Choice, ...]) -> None:
        from dsmoe_op.cli.trial import layer_times

        shape = problem.shape
        failures = self.compiler.failures(_layer_jobs(shape, choices, self._overlaps), self.deadline)
        for job, text in failures.items():  # the layer will say so too
            self._say(shape, T, f"{job.name} {job.tile}: {text}")
        self._check_time()
        self.bar.set_description(f"{shape.name} {T} tokens: layers")
        us = layer_times(problem, inputs, choices, self.table.gpu, lambda text: self._say(shape, T, text))
        if not us:
            self._fail(shape, T)
            return
        row = row_of(T, shape, times, us, choices[0])
        self.rows[layer_shape(shape), bucket(T)] = row
        self.table = Table(gpu=self.table.gpu, rows=self.rows, made_with=self.table.made_with)
        tuning.save_table(self.table, self.path)
        self.done.append((shape, T, row))
        self.bar.update()
        _free()

    @property
    def _overlaps(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= (9, 0)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def _fail(self, shape: Shape, T: int) -> None:
        self.failed.append((shape, T))
        self._say(shape, T, "no candidate is right")
        self.bar.update()

    def _say(self, shape: Shape, T: int, text: str) -> None:
        self.bar.write(f"{shape.name} {T} tokens: {text}", file=sys.stderr)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _product_jobs(shape: Shape, tokens: Sequence[int]) -> list[Job]:
    """The products' launches one by one, and what they need before them."""
    codes = schedules.coded_rows(shape.config, has_shared=shape.S > 0)
    before = ["quantize"] * bool(codes) + ["router", "choose_order"] + ["gate"] * bool(shape.S and shape.shared_gate)
    of_h = schedules.coded_h(shape.config, has_shared=shape.S > 0)
    before += ["quantize_h"] * ("routed" in of_h) + ["quantize_shared_h"] * ("shared" in of_h)
    for launch, what, name in (("reorder", "x", "gemm1"), ("reorder_h", "h", "gemm2")):
        tiles = [tile for T in tokens for tile in candidates.tiles(shape, T)[name]]
        before += [launch] * any(what in compiling.ordered(shape, compiling.all_of(tile)) for tile in tiles)
    jobs = [Job(shape, name, None) for name in before]
    for T in tokens:
        jobs += [Job(shape, name, tile) for name, some in candidates.tiles(shape, T).items() for tile in some]
    return jobs


def _layer_jobs(shape: Shape, choices: Sequence[Choice], overlaps: bool) -> list[Job]:
    """The launches of whole layers.

    Args:
        overlaps: whether the GPU can start a launch early.
    """
    has_shared = shape.S > 0
    coded_rows = frozenset(schedules.coded_rows(shape.config, has_shared=has_shared))
    coded_h = frozenset(schedules.coded_h(shape.config, has_shared=has_shared))
    jobs = []
    for tiles, schedule in choices:
        steps = schedules.plan(
            schedule, _present(shape), zero_experts=False, finalized=True, one_launch=tiles.one_launch,
            coded_rows=coded_rows, coded_h=frozenset() if tiles.one_launch else coded_h,
            ordered=frozenset() if schedule == "fused" else compiling.ordered(shape, tiles),
        )  # fmt: skip
        for step in steps:
            if isinstance(step, schedules.Launch):
                early, followed = (overlaps and tiles.overlaps and flag for flag in (step.early, step.followed))
                name = step.name.removeprefix("fused_")
                tile = tiles[:2] if name.startswith("experts") else getattr(tiles, name, None)
                jobs.append(Job(shape, step.name, tile, early, followed))
    return jobs


def _present(shape: Shape) -> frozenset[str]:
    """Optional tensors of a layer of this shape."""
    names = {"router_weight"}
    names |= {"correction_bias"} if shape.correction_bias else set()
    names |= {"shared_w13", "shared_w2"} if shape.S else set()
    names |= {"shared_gate"} if shape.S and shape.shared_gate else set()
    return frozenset(names)


def row_of(T: int, shape: Shape, times: Times, layer_us: dict[Choice, float], first: Choice) -> Row:
    """The row of the fastest layer.

    Args:
        times: microseconds by launch and tile.
        layer_us: microseconds of layers.
        first: the heuristic's.
    """
    best = candidates.fastest(layer_us, first)

    def us(choice: Choice) -> dict[str, float]:
        found = {name: some.get(getattr(choice.tiles, name)) for name, some in times.items()}
        found["layer"] = layer_us.get(choice)
        return {name: round(value, 2) for name, value in found.items() if value is not None}

    tiles = best.tiles if shape.S else _without_shared(best.tiles)
    by_schedule = {choice.schedule: round(us, 2) for choice, us in layer_us.items() if choice.tiles == best.tiles}
    return Row(T, Choice(tiles, best.schedule), us(best), us(first), by_schedule)


def _without_shared(tiles: LayerTiles) -> LayerTiles:
    """As a table is read that has none."""
    return tiles._replace(shared_gemm1=tiles.gemm1, shared_gemm2=tiles.gemm1)


# --- report ---------------------------------------------------------------------------------------------------------


def report(done: Sequence[tuple[Shape, int, Row]]) -> str:
    from dsmoe_op.cli.trial import brief

    def cells() -> Iterator[tuple[object, ...]]:
        for shape, T, row in done:
            tiles, schedule = row.choice
            us, other = row.us.get("layer", math.nan), row.heuristic_us.get("layer", math.nan)
            faster = round(100 * (other / us - 1), 1)
            overlaps = "yes" if tiles.overlaps else ""
            yield shape.name, T, schedule, overlaps, brief(tiles.gemm1), brief(tiles.gemm2), us, other, faster

    header = ("shape", "tokens", "schedule", "overlaps", "gemm1", "gemm2", "us", "heuristic us", "% faster")
    return output.table(header, list(cells()))


def _as_json(shape: Shape, T: int, row: Row) -> dict[str, Any]:
    times = {"us": dict(row.us), "heuristic_us": dict(row.heuristic_us), "schedules_us": dict(row.schedules_us)}
    tiles, schedule = row.choice
    named = {name: getattr(tiles, name)._asdict() for name in GEMMS if shape.S or name not in SHARED}
    named |= {"schedule": schedule, "overlaps": tiles.overlaps}
    return {"shape": shape.name, "tokens": T, **named, **times}
