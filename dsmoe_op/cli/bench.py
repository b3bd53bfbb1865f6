"""`python -m dsmoe_op bench`: how fast the op is, beside others on the same weights, inputs and routing.

On a GPU each candidate is a CUDA graph that holds one call for each of several inputs, and its time is that of a replay
for one call: the median over rounds in which all candidates have their turn. Weights are cold: the inputs hit different
experts, and there are copies of router and shared expert, so that more is read between two uses of a weight than the L2
cache holds. On a CPU calls are timed one by one, on one copy of the weights, in an order shuffled anew each round.
Every candidate is first held against the reference; one that is wrong is shown as wrong.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dsmoe_op
from dsmoe_op.checks import SCHEDULES
from dsmoe_op.cli import arguments, ceilings, output, peers, plot, serving_peers, shapes
from dsmoe_op.cli import cell as cells_module
from dsmoe_op.cli.cell import FAILED, OK, Cell, Row
from dsmoe_op.cli.comparison import DTYPES
from dsmoe_op.cli.output import CommandError
from dsmoe_op.cli.problem import Problem
from dsmoe_op.cli.shapes import Ceilings, Shape

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
COLUMNS = (
    "shape",
    "dtype",
    "tokens",
    "candidate",
    "us",
    "low_us",
    "high_us",
    "rounds",
    "floor_us",
    "percent_of_floor",
    "ratio_to_ours",
    "distinct_experts",
    "cuda_graph",
    "status",
    "error",
    "failure",
)
"""Of the CSV; low and high are the quartiles, ratio_to_ours is above 1 where the candidate is slower."""


# --- report ---------------------------------------------------------------------------------------------------------


def records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A dict with the keys COLUMNS for each row of each cell; None where there is nothing."""
    return [
        dict(
            zip(
                COLUMNS,
                (
                    cell.shape,
                    cell.dtype,
                    cell.tokens,
                    row.candidate,
                    *(_rounded(v) for v in (row.time[:3] if row.time else (None,) * 3)),
                    row.time.rounds if row.time else None,
                    _rounded(cell.floor_us),
                    _rounded(cell.percent_of_floor(row)),
                    _rounded(cell.ratio(row)),
                    _rounded(cell.distinct_experts),
                    row.graph,
                    row.status,
                    None if row.error is None else float(f"{row.error:.3g}"),
                    row.failure,
                ),
                strict=True,
            )
        )
        for cell in cells
        for row in cell.rows
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def report(cells: Sequence[Cell]) -> str:
    """Two tables a shape and dtype: the op's schedules, and all candidates; then the op's own parts."""
    blocks = []
    for shape, dtype in dict.fromkeys((cell.shape, cell.dtype) for cell in cells):
        mine = [cell for cell in cells if (cell.shape, cell.dtype) == (shape, dtype)]
        blocks += [f"{shape}, {dtype}", _schedules(mine), _against(mine)]
        blocks += _left_out(mine)
        blocks += [text for cell in mine if (text := _details(cell))]
    return "\n\n".join(blocks)


def _schedules(cells: Sequence[Cell]) -> str:
    names = [row.candidate for row in cells[0].rows if row.candidate.startswith(peers.OURS)]
    header = ("tokens", "experts hit", "floor us", *(f"{name.split()[1]} us" for name in names), "% of floor")
    rows = []
    for cell in cells:
        ours = cell.row(cell.ours)
        times = [_number(cell.us(name)) for name in names]
        percent = _number(cell.percent_of_floor(ours) if ours else None)
        rows.append((cell.tokens, _number(cell.distinct_experts), _number(cell.floor_us), *times, percent))
    return output.table(header, rows)


def _against(cells: Sequence[Cell]) -> str:
    header = ("tokens", "candidate", "us", "% of floor", "x ours", "error", "")
    rows = []
    for cell in cells:
        for row in cell.rows:
            error = "-" if row.error is None else f"{row.error:.1e}"
            note = row.failure if row.status == FAILED else "" if row.status == OK else row.status
            if not row.graph and cell.details:
                note = f"no graph {note}".strip()
            numbers = (row.time.us if row.time else None, cell.percent_of_floor(row), cell.ratio(row))
            rows.append((cell.tokens, row.candidate, *(_number(n) for n in numbers), error, note))
    return output.table(header, rows)


def _left_out(cells: Sequence[Cell]) -> list[str]:
    """A block with a line for each candidate and reason, with the tokens where not all have it; none for none."""
    tokens: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for left_out in cell.left_out.items():
            tokens.setdefault(left_out, []).append(str(cell.tokens))
    lines = []
    for (name, reason), where in tokens.items():
        at = "" if len(where) == len(cells) else f" at {', '.join(where)} tokens"
        lines.append(f"left out: {name}{at}: {reason}")
    return ["\n".join(lines)] if lines else []


def _number(value: float | None) -> float | str:
    """Four digits are enough."""
    return "-" if value is None else float(f"{value:.4g}")


def _details(cell: Cell) -> str:
    d = cell.details
    if not d:
        return ""
    lines = [f"{cell.ours}, {cell.tokens} tokens"]
    if "kernels" in d:
        rows = [(k["part"], k["stream"], _number(k["us"]), k["kernel"][:60]) for k in d["kernels"]]
        lines.append(output.table(("part", "stream", "us", "kernel"), rows))
        by_stream = ", ".join(
            f"{count:g} on stream {stream}" for stream, count in d["streams"]["kernels_by_stream"].items()
        )
        bound = "within" if d["peak_within_bound"] else "ABOVE"
        lines += [
            f"launches: {by_stream}; {d['streams']['overlap_us']:.1f} of {d['streams']['busy_us']:.1f} us overlap",
            f"peak memory beyond weights and output: {d['peak_bytes'] / 2**20:.2f} MiB, {bound} the bound of "
            f"{d['peak_bound_bytes'] / 2**20:.2f} MiB",
            f"host: {d['host_us_of_an_eager_call']:.1f} us an eager call; first call {d['first_call_s']:.2f} s, "
            f"first capture {d['first_capture_s']:.2f} s",
        ]
    if "shared_expert" in d:
        s = d["shared_expert"]
        lines.append(
            f"shared expert: {s['shared_only_us']:.1f} us alone, {s['not_hidden_us']:.1f} us of it not hidden by dual "
            f"({100 * s['not_hidden_of_shared_only']:.0f} %); routed only {s['routed_only_us']:.1f} us"
        )
    return "\n".join(lines)


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(records(cells))


PACKAGES = ("triton", "transformers", *serving_peers.VERSIONS)
"""Whose versions belong to the times, where they are installed."""


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "dsmoe_op": dsmoe_op.__version__,
        "torch": torch.__version__,
        **{name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    else:
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        found["threads"] = torch.get_num_threads()
    return found


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def as_json(cells: Sequence[Cell], found: dict[str, Any], limits: Ceilings, chosen: Sequence[Shape]) -> dict[str, Any]:
    return {
        "machine": found,
        "ceilings": ceilings.as_json(limits),
        "shapes": {shape.name: {"H/I/E/K/S": shape.numbers, "config": shape.config.key} for shape in chosen},
        "units": "us: median microseconds a layer; ratio_to_ours above 1: slower; error: relative Frobenius distance",
        "load_average_after": os.getloadavg(),
        "ours_good": ours_good(cells),
        "fastest_others": [other for cell in cells if (other := fastest_other(cell))],
        "rows": records(cells),
        "left_out": [
            {"shape": c.shape, "dtype": c.dtype, "tokens": c.tokens, "candidate": name, "reason": reason}
            for c in cells
            for name, reason in c.left_out.items()
        ],
        "details": [
            {"shape": c.shape, "dtype": c.dtype, "tokens": c.tokens, "candidate": c.ours, **c.details}
            for c in cells
            if c.details
        ],
    }


def fastest_other(cell: Cell) -> dict[str, Any] | None:
    """The fastest candidate that is not the op and is right, and the op's time over its time: below 1, the op wins."""
    others = {
        row.candidate: row.time.us
        for row in cell.rows
        if row.time is not None and row.status == OK and not row.candidate.startswith(peers.OURS)
    }
    ours = cell.us(cell.ours)
    if not others or ours is None:
        return None
    fastest = min(others, key=others.__getitem__)
    where = {"shape": cell.shape, "dtype": cell.dtype, "tokens": cell.tokens}
    return where | {"ours": cell.ours, "fastest": fastest, "ours_to_fastest": _rounded(ours / others[fastest])}


def ours_good(cells: Sequence[Cell]) -> bool:
    return all(row.status == OK for cell in cells for row in cell.rows if row.candidate.startswith(peers.OURS))


# --- command line ---------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the op's schedules beside plain torch, torch.compile, transformers and servers, on a GPU or a CPU",
        description="Times one MoE layer: the op in its schedules and others on the same weights, inputs and routing. "
        "On a GPU: replays of CUDA graphs with cold weights, in turn, medians; the machine's own ceilings are measured "
        "first, for the floor. Each candidate is first held against the reference. "
        "Exit code 0: the op was right everywhere; 1: it was not; 2: it could not run.",
    )
    add = parser.add_argument
    default_shape = shapes.parse_shapes("v2lite")
    names = f"some of {', '.join(shapes.SHAPES)}, these with _tpN for one of N ranks, or H/I/E/K/S in numbers (v2lite)"
    add("--shape", type=shapes.parse_shapes, default=default_shape, metavar="A,B", help=names)
    tokens = arguments.integers(1, 1 << 20)
    add("--tokens", type=tokens, default=TOKENS, metavar="1,2", help=f"({','.join(map(str, TOKENS))})")
    add(
        "--dtype",
        type=arguments.some_of(list(DTYPES)),
        default=("bf16",),
        metavar="A,B",
        help=f"some of {', '.join(DTYPES)} (bf16)",
    )
    quantise = f"quantise the op's experts, the others have what that stands for: {arguments.FORMATS_ACCEPTED} (none)"
    add("--format", type=arguments.formats_or_none, metavar="NAME", help=quantise)
    add(
        "--schedule",
        type=arguments.some_of(SCHEDULES),
        metavar="A,B",
        help=f"some of {', '.join(SCHEDULES)} (all that a shape has; auto on a CPU, where they are the same)",
    )
    against = f"some of {', '.join(peers.AGAINST)} (all that are installed and can run here; not compiled on a CPU)"
    add("--against", type=arguments.some_of(list(peers.AGAINST)), metavar="A,B", help=against)
    add("--device", type=arguments.device, metavar="NAME", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--seconds", type=_seconds, default=2.0, metavar="S", help="of timing for each shape, dtype and tokens (2)")
    add("--threads", type=arguments.integer(1, 1024), metavar="N", help="of a CPU (as torch is set)")
    add("--seed", type=arguments.integer(0, 2**31), default=0, metavar="N", help="of weights and inputs (0)")
    add("--csv", type=Path, metavar="PATH", help="write the rows there")
    add("--plot", type=Path, metavar="PATH", help="write time over tokens there, as .png and .svg")
    add("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=lambda options: _command(options, parser))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected a number in 0..3600, got {text!r}")
    return value


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device = options.device or arguments.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
        for shape in options.shape:
            if (reason := shapes.gpu_refuses(shape)) is not None:
                parser.error(f"argument --shape: {reason}")
    if options.format:
        try:
            options.shape = tuple(shapes.quantised(shape, options.format) for shape in options.shape)
        except ValueError as error:
            parser.error(f"argument --format: {error}")
    fused_is_asked = options.schedule is not None and "fused" in options.schedule
    for shape in options.shape:
        if fused_is_asked and (reason := shapes.fused_refuses(shape)) is not None:
            parser.error(f"argument --schedule: {reason}")
    for name, path in (("csv", options.csv), ("plot", options.plot)):
        if path is not None and (reason := arguments.cannot_write(path)) is not None:
            parser.error(f"argument --{name}: {reason}")
    against = _against_names(options, device)
    if options.plot:
        plot.check_installed()
    if options.threads:
        torch.set_num_threads(options.threads)

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no tf32: float32 is held against float64
    try:
        with output.stdout_kept_for_json(options.json):
            limits = ceilings.measure(device, options.dtype)
            found = machine(device)
            print(f"{', '.join(f'{name} {value}' for name, value in found.items())}\n{ceilings.words(limits)}\n")
            cells = _measure(options, device, against, limits)
    finally:
        torch.set_float32_matmul_precision(precision)
    if options.json:
        output.print_json(as_json(cells, found, limits, options.shape))
    else:
        print(report(cells))
    if options.plot:
        plot.save(cells, options.plot, _title(found))
    return output.OK if ours_good(cells) else output.WRONG


def _against_names(options: argparse.Namespace, device: torch.device) -> tuple[str, ...]:
    """What was asked for, or all that can run; compiling on a CPU takes long and is left to be asked for.

    Raises:
        CommandError: what was asked for cannot run here.
    """
    asked: tuple[str, ...] | None = options.against
    names = asked or (tuple(peers.AGAINST) if device.type == "cuda" else ("eager", "transformers"))
    if asked is None:  # each cell leaves out what it cannot have
        return tuple(name for name in names if peers.missing(name) is None)
    for name in names:
        if (reason := peers.unsupported(name, device, options.shape, options.dtype)) is not None:
            raise CommandError(f"--against: {reason}")
    return asked


def _schedules_of(shape: Shape, asked: tuple[str, ...] | None, against: tuple[str, ...], gpu: bool) -> list[str]:
    every = SCHEDULES if gpu and shape.S else ("auto",)
    chosen = set(asked or every) | ({"serial"} & set(against))
    return [name for name in SCHEDULES if name in chosen and (name != "fused" or shapes.fused_refuses(shape) is None)]


def _measure(
    options: argparse.Namespace, device: torch.device, against: tuple[str, ...], limits: Ceilings
) -> list[Cell]:
    cells = []
    total = len(options.shape) * len(options.dtype) * len(options.tokens)
    with output.progress(total, "bench") as bar:
        for shape in options.shape:
            schedules = _schedules_of(shape, options.schedule, against, device.type == "cuda")
            for dtype in options.dtype:
                bar.set_description(f"{shape.name} {dtype}")
                problem = Problem(shape, dtype, device, options.seed)
                for T in options.tokens:
                    bar.set_description(f"{shape.name} {dtype} {T} tokens")
                    cell = cells_module.measure(problem, T, schedules, against, limits, options.seconds)
                    cells.append(cell)
                    if options.csv:  # each time, so that what ends early leaves its rows
                        write_csv(cells, options.csv)
                    for row in cells_module.wrong_or_failed(cell.rows):
                        bar.write(f"{shape.name} {dtype} {T} tokens: {_complaint(row)}", file=sys.stderr)
                    bar.update()
                del problem  # before the next one's weights are made
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return cells


def _complaint(row: Row) -> str:
    return f"{row.candidate} {row.status}: {row.failure or f'error {row.error:.2e}'}"


def _title(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {found[n]}" for n in ("dsmoe_op", "torch", *PACKAGES) if n in found)
    return f"One MoE layer on {found['device']}: {versions}"
