"""`python -m dsmoe_op trace`: what the two streams do, as a trace for Perfetto, as a picture, and in figures.

It profiles a layer or a small model, or reads a saved trace of any program. The op's parts are told by their kernels
(`parts.py`), so that replays of CUDA graphs have them too. A CPU has no streams: there, the parts are the ranges that
the op gives a profiler (`dsmoe_op/ranges.py`).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsmoe_op import ranges as op_ranges
from dsmoe_op.checks import SCHEDULES
from dsmoe_op.cli import (
    arguments,
    bench,
    decode,
    output,
    parts,
    peers,
    plot,
    profiling,
    run,
    shapes,
    small_models,
    timeline,
    timing,
)
from dsmoe_op.cli.comparison import DTYPES
from dsmoe_op.cli.output import CommandError
from dsmoe_op.cli.parts import OTHER, Range
from dsmoe_op.cli.problem import COLD_BYTES, Problem
from dsmoe_op.cli.profiling import Streams, Trace, Work

SHAPE, TOKENS, DTYPE, SCHEDULE, CALLS = "v2lite", 1, "bf16", "auto", 4
DESCRIBING = ("tokens", "dtype", "schedule", "calls", "device", "seed", "eager")
"""Options that say what to run, and so do not go with --from."""


class Profiled(NamedTuple):
    """What was profiled.

    Attributes:
        trace: of `calls` calls, one after another.
        fused: whether the shared experts are in the routed ones' launches.
        words: what it was, for people.
    """

    trace: Trace
    calls: int
    fused: bool
    words: str


class View(NamedTuple):
    """What is shown.

    Attributes:
        lanes: names by stream, from above.
        device: number of the GPU; None: the CPU.
    """

    ranges: list[Range]
    lanes: dict[int, str]
    figures: Streams
    device: int | None


# --- profiling ------------------------------------------------------------------------------------------------------


def profile_layer(options: argparse.Namespace, device: torch.device, bar: Any) -> Profiled:
    """Calls of a layer, each on the next copy of the weights."""
    shape, T = options.shape, options.tokens
    bar.set_description(f"{shape.name}, weights")
    problem = Problem(shape, options.dtype, device, options.seed)
    inputs = [problem.draw(T) for _ in range(options.calls)]
    layer = peers.ours(problem, options.schedule).build()

    def call(i: int) -> torch.Tensor:
        return layer(inputs[i], problem.at(i))

    def all_calls() -> None:
        for i in range(options.calls):
            call(i)

    bar.update()
    bar.set_description(f"{shape.name}, {T} tokens")
    with torch.inference_mode():
        call(0)
        fused = is_fused(profiling.record(lambda: call(0)))
        bar.update()
        profiled: Callable[[], object] = all_calls
        if device.type == "cuda" and not options.eager:
            captured = timing.capture(call, options.calls)
            profiled = captured.graph.replay
        profiled()

        def before() -> None:
            profiled()
            if device.type == "cuda":  # weights are cold, as in a model
                torch.empty(int(COLD_BYTES), dtype=torch.uint8, device=device).zero_()

        trace = profiling.record(profiled, before=before)
    bar.update()
    name = shape.name if shape.name == shape.numbers else f"{shape.name} ({shape.numbers})"
    words = f"{_plural(options.calls, 'call')} of {name}, {_plural(T, 'token')}, {_how(options, device)}"
    return Profiled(trace, options.calls, fused, words)


@torch.no_grad()
def profile_model(options: argparse.Namespace, device: torch.device, bar: Any) -> Profiled:
    """Decode steps of a small model, as `run` builds it."""
    from dsmoe_op.hf import replace_moe_blocks

    bar.set_description(f"{options.family}, weights")
    size, rows = small_models.size(options), options.tokens
    model = small_models.build(options.family, size, dtype=DTYPES[options.dtype], device=device, seed=options.seed)
    try:
        swapped = replace_moe_blocks(model, options.schedule)
    except ValueError as error:
        raise CommandError(f"--family {options.family}: {error}") from None
    if not swapped:
        raise CommandError(f"--family {options.family}: expected MoE blocks in the model, found none")
    bar.update()
    bar.set_description(f"{options.family}, {rows} requests")
    text = list(run.PROMPT.encode()[:64])
    prompts = torch.tensor([text[row % 64 :] + text[: row % 64] for row in range(rows)], device=device)
    batch = decode.Batch(model, decode.plain_step(model), rows, len(text) + options.calls + 8)
    batch.prefill(prompts)
    batch.advance()
    fused = is_fused(profiling.record(batch.advance))
    bar.update()
    if device.type == "cuda" and not options.eager:
        batch.capture(prompts, torch.cuda.graph_pool_handle())
        batch.advance()
    trace = profiling.record(batch.advance, calls=options.calls)
    bar.update()
    words = f"{_plural(options.calls, 'decode step')} of a small {options.family} with {swapped} MoE layers, "
    return Profiled(trace, options.calls, fused, f"{words}{_plural(rows, 'request')}, {_how(options, device)}")


def is_fused(trace: Trace) -> bool:
    """Whether a range of the trace holds routed and shared experts together."""
    return any(str(event.get("name")).startswith(f"{op_ranges.PREFIX}routed+shared") for event in trace["traceEvents"])


def _how(options: argparse.Namespace, device: torch.device) -> str:
    mode = "" if device.type != "cuda" else ", eager" if options.eager else ", CUDA graph"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{options.dtype}, schedule {options.schedule}{mode}, {name}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# --- what a trace holds ---------------------------------------------------------------------------------------------


def of_gpu(work: Sequence[Work], *, fused: bool, device: int | None = None) -> View:
    """The work on one GPU, by default the one with most of it.

    Raises:
        ValueError: that GPU has none.
    """
    devices = collections.Counter(w.device for w in work)
    chosen = devices.most_common(1)[0][0] if device is None else device
    if chosen not in devices:
        raise ValueError(f"expected one of {', '.join(map(str, sorted(devices)))}, got {chosen}")
    return _view(parts.ranges((w for w in work if w.device == chosen), fused=fused), chosen)


def of_cpu(trace: Trace) -> View | None:
    """The op's ranges on the CPU's threads, which count as one lane; None where there are none."""
    work = [
        Work(event["name"], 0, float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(op_ranges.PREFIX)
    ]
    found, layer = [], 0
    for w in sorted(work, key=lambda w: w.begin):
        part = w.name.removeprefix(op_ranges.PREFIX)
        found.append(Range(part, w.stream, layer, w.begin, w.end, (w,)))
        layer += part.endswith("finalize")
    return _view(found, None) if found else None


def _view(ranges: list[Range], device: int | None) -> View:
    """Lanes: the stream that ends the layers first, then by how much runs on them."""
    figures = profiling.summarize(w for r in ranges for w in r.work)
    ends = {r.stream for r in ranges if r.part.endswith("finalize")}
    ours = {r.stream for r in ranges if r.part != OTHER}

    def name(stream: int) -> str:
        if device is None:
            return "CPU"
        kind = "stream" if len(ends) != 1 or stream not in ours else "caller's" if stream in ends else "side"
        return f"stream {stream}" if kind == "stream" else f"{kind} stream ({stream})"

    streams = sorted(figures.kernels, key=lambda stream: stream not in ends)
    return View(ranges, {stream: name(stream) for stream in streams}, figures, device)


def cut(view: View, window: tuple[float, float]) -> View:
    """What a view has in a window of microseconds from its first begin on.

    Raises:
        ValueError: nothing.
    """
    first = min(r.begin for r in view.ranges)
    low, high = first + window[0], first + window[1]

    def inside(begin: float, end: float) -> bool:
        return begin < high and end > low

    ranges = []
    for r in view.ranges:
        work = tuple(
            w._replace(begin=max(w.begin, low), end=min(w.end, high)) for w in r.work if inside(w.begin, w.end)
        )
        if work and inside(r.begin, r.end):
            ranges.append(r._replace(begin=max(r.begin, low), end=min(r.end, high), work=work))
    if not ranges:
        span = max(r.end for r in view.ranges) - first
        raise ValueError(f"nothing runs there; the work takes {span:.1f} us")
    streams = {r.stream for r in ranges}
    lanes = {stream: name for stream, name in view.lanes.items() if stream in streams}
    return view._replace(ranges=ranges, lanes=lanes, figures=profiling.summarize(w for r in ranges for w in r.work))


def with_ranges(trace: Trace, view: View) -> Trace:
    """The trace with a process above all others: a row for each stream, its parts, and in them their kernels.

    Rows of their own: a viewer nests what is on one row, and kernels of one stream may overlap, since a launch may
    begin while the one before it runs. Here each ends where the next begins.
    """
    process = "dsmoe_op: parts by stream"

    def about(what: str, row: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": row, "args": args}

    events = [about("process_name", 0, name=process), about("process_sort_index", 0, sort_index=-1)]
    for row, (stream, name) in enumerate(view.lanes.items()):
        events += [about("thread_name", row, name=name), about("thread_sort_index", row, sort_index=row)]
        for r in view.ranges:
            if r.stream == stream and r.part != OTHER:
                where = {"cat": "dsmoe", "pid": process, "tid": row}
                label = f"{op_ranges.PREFIX}{r.part}"
                events.append({"ph": "B", "name": label, "ts": r.begin, **where, "args": {"layer": r.layer}})
                for work, (begin, end) in zip(r.work, r.bars, strict=True):
                    args = {"us": round(work.end - work.begin, 3)}
                    events.append({"ph": "B", "name": work.name, "ts": begin, **where, "args": args})
                    events.append({"ph": "E", "name": work.name, "ts": end, **where})
                events.append({"ph": "E", "name": label, "ts": r.end, **where})
    return {**trace, "traceEvents": [*trace["traceEvents"], *events]}


# --- report ---------------------------------------------------------------------------------------------------------


def part_times(view: View) -> list[dict[str, Any]]:
    """For each part on each stream: how often it comes, its kernels, and the microseconds they run."""
    order = list(timeline.COLORS)
    by_part: dict[tuple[int, str, int], list[Range]] = collections.defaultdict(list)
    for r in view.ranges:
        by_part[order.index(r.part.split("+")[0]), r.part, r.stream].append(r)
    return [
        {
            "part": part,
            "stream": stream,
            "ranges": len(its),
            "kernels": sum(len(r.work) for r in its),
            "us": round(sum(end - begin for r in its for begin, end in r.bars), 2),
        }
        for (_, part, stream), its in sorted(by_part.items())
    ]


def finding(view: View) -> str:
    """What the picture shows."""
    f = view.figures
    busy, idle = f"{f.busy_us:,.1f} us busy", f"{f.idle_us:,.1f} us idle"
    if view.device is None:
        return f"CPU, so no streams: {f.busy_us:,.1f} us in the layers' parts, {f.idle_us:,.1f} us between them"
    if len(view.lanes) < 2:
        return f"{busy}, all on one stream, {idle}"
    return f"{busy}, {f.overlap_us:,.1f} us of it on two streams at once, {idle}"


def as_json(
    view: View, words: str, calls: int | None, machine: dict[str, Any] | None, files: Iterable[Path]
) -> dict[str, Any]:
    """One object. Microseconds are totals over all calls."""
    return {
        "what": words,
        "calls": calls,
        "machine": machine,
        "gpu": view.device,
        "streams": {str(stream): name for stream, name in view.lanes.items()} if view.device is not None else {},
        **view.figures.as_json(),
        "idle_us": round(view.figures.idle_us, 2),
        "parts": part_times(view),
        "files": [str(path) for path in files],
    }


def report(view: View, words: str, calls: int | None, files: Sequence[Path]) -> str:
    """The same for people."""
    cpu = view.device is None
    columns = ("part", "stream", "ranges", "us") if cpu else ("part", "stream", "ranges", "kernels", "us")
    rows = [{**row, "stream": view.lanes[row["stream"]]} for row in part_times(view)]
    f = view.figures
    lines = [words, "", output.table(columns, [[row[column] for column in columns] for row in rows]), ""]
    if cpu:
        lines.append(
            "a CPU has no streams to show; these are the layers' parts on it, one after another, and idle is all else"
        )
    lines.append(f"busy {f.busy_us:.1f} us, overlapped {f.overlap_us:.1f} us, idle {f.idle_us:.1f} us")
    if calls is not None and calls > 1:
        each = (f"{us / calls:.1f}" for us in (f.busy_us, f.overlap_us, f.idle_us))
        lines[-1] += " (a call: {}, {}, {})".format(*each)
    for path in files:
        lines.append(f"wrote {path}{' (open it at https://ui.perfetto.dev)' if path.suffix == '.json' else ''}")
    return "\n".join(lines)


# --- command line ---------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="show what the two streams do: a Perfetto trace with named ranges, a picture, and how much overlaps",
        description="Profiles calls of a layer, or decode steps of a small Hugging Face model, or reads a saved trace "
        "of any program; writes a trace for Perfetto with the ranges dsmoe::router, dsmoe::routed, dsmoe::shared and "
        "dsmoe::finalize (a launch of several is dsmoe::routed+finalize and so on) and a picture of the streams, and "
        "prints busy, overlapped and idle microseconds. Exit code 0: it did; 2: it could not.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    names = f"a layer: {', '.join(shapes.SHAPES)}, one with _tpN for one of N ranks, or H/I/E/K/S ({SHAPE})"
    what.add_argument("--shape", type=shapes.parse_shape, metavar="NAME", help=names)
    families = sorted(small_models.FAMILIES)
    model = f"a small model instead: {', '.join(families)}"
    what.add_argument("--family", choices=families, metavar="NAME", help=model)
    saved = "a saved trace of torch.profiler instead, .json or .json.gz, of any program"
    what.add_argument("--from", dest="saved", type=Path, metavar="PATH", help=saved)
    tokens = f"of a call; requests of a model's decode step ({TOKENS})"
    add("--tokens", type=arguments.integer(1, 1 << 20), metavar="N", help=tokens)
    add("--dtype", choices=list(DTYPES), help=f"({DTYPE})")
    add("--schedule", choices=list(SCHEDULES), help=f"of the op ({SCHEDULE})")
    calls = f"of the layer, or decode steps, one after another ({CALLS}; one step)"
    add("--calls", type=arguments.integer(1, 256), metavar="N", help=calls)
    add("--eager", action="store_true", default=None, help="eager calls on a GPU, and no CUDA graph")
    add("--device", type=arguments.device, metavar="NAME", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--seed", type=arguments.integer(0, 2**31), metavar="N", help="of weights and inputs (0)")
    small_models.add_size(parser.add_argument_group("size of the small model"))
    window = "show, and count, only what runs between these microseconds from the first work on (all)"
    add("--window", type=_window, metavar="A,B", help=window)
    add("--gpu", type=arguments.integer(0, 1023), metavar="N", help="which GPU of a saved trace (the busiest)")
    out = "write PATH.json (not with --from), PATH.png and PATH.svg (dsmoe_trace)"
    add("--out", type=Path, default=Path("dsmoe_trace"), metavar="PATH", help=out)
    add("--no-picture", action="store_true", help="write no picture, which needs matplotlib")
    add("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=lambda options: _command(options, parser))


def _window(text: str) -> tuple[float, float]:
    number = r"\d+(?:\.\d*)?"
    if not re.fullmatch(f"{number},{number}", text) or (ab := tuple(map(float, text.split(","))))[0] >= ab[1]:
        raise argparse.ArgumentTypeError(f"expected two ascending numbers separated by a comma, got {text!r}")
    return ab[0], ab[1]


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    base = options.out
    if base.suffix in (".json", ".png", ".svg"):
        base = base.with_suffix("")
    target = base.with_name(base.name + ".json") if base.name else base
    if (reason := arguments.cannot_write(target)) is not None:
        parser.error(f"argument --out: {reason}")
    if not options.no_picture:
        plot.check_installed("the picture (--no-picture leaves it out)")
    with output.stdout_kept_for_json(options.json):
        if options.saved is not None:
            for name in DESCRIBING:
                if getattr(options, name) is not None:
                    parser.error(f"argument --{name}: not allowed with argument --from")
            view, words = _from_file(options)
            calls, machine = None, None
            files: list[Path] = []
        else:
            if options.gpu is not None:
                parser.error("argument --gpu: only allowed with argument --from")
            device = options.device or arguments.device("cuda" if torch.cuda.is_available() else "cpu")
            profiled = _profile(options, parser, device)
            view, words, calls = _view_of(profiled, device), profiled.words, profiled.calls
            machine = bench.machine(device)
            saved = with_ranges(profiled.trace, view) | {"traceName": words}
            target.write_text(json.dumps(saved), encoding="utf-8")
            files = [target]
        if options.window is not None:
            try:
                view, calls = cut(view, options.window), None
            except ValueError as error:
                raise CommandError(f"--window: {error}") from None
            words += ", of which {:g} to {:g} us".format(*options.window)
        if not options.no_picture:
            files += timeline.save(view.ranges, view.lanes, base, finding(view), words)
    if options.json:
        output.print_json(as_json(view, words, calls, machine, files))
    else:
        print(report(view, words, calls, files))
    return output.OK


def _from_file(options: argparse.Namespace) -> tuple[View, str]:
    path = options.saved
    try:
        trace = profiling.read_file(path)
        work = profiling.read_trace(trace)
        if not work:
            kinds = collections.Counter(str(event.get("cat")) for event in trace["traceEvents"])
            held = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common(3)) or "nothing"
            raise ValueError(f"no work of a GPU's in it (profile with ProfilerActivity.CUDA); its events: {held}")
    except OSError as error:
        raise CommandError(f"--from: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"--from: {path}: {error}") from None
    try:
        view = of_gpu(work, fused=is_fused(trace), device=options.gpu)
    except ValueError as error:
        raise CommandError(f"--gpu: {error}") from None
    devices = {w.device for w in work}
    others = f", GPU {view.device} of {len(devices)} (--gpu shows another)" if len(devices) > 1 else ""
    name = trace.get("traceName")
    is_title = isinstance(name, str) and name and not name.endswith(".json")  # PyTorch's is a path
    return view, f"{name if is_title else path}{others}"


def _profile(options: argparse.Namespace, parser: argparse.ArgumentParser, device: torch.device) -> Profiled:
    default_calls = CALLS if options.family is None else 1
    defaults = {"tokens": TOKENS, "dtype": DTYPE, "schedule": SCHEDULE, "calls": default_calls, "seed": 0}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.family is not None:
        small_models.check_installed(options.family, parser)
        if options.tokens > 512:
            parser.error(f"argument --tokens: expected at most 512 requests of a model, got {options.tokens}")
        profile = profile_model
    else:
        options.shape = options.shape or shapes.parse_shape(SHAPE)
        if device.type == "cuda" and (reason := shapes.gpu_refuses(options.shape)) is not None:
            parser.error(f"argument --shape: {reason}")
        if options.schedule == "fused" and (reason := shapes.fused_refuses(options.shape)) is not None:
            parser.error(f"argument --schedule: {reason}")
        profile = profile_layer
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with output.progress(3, "trace") as bar:
        return profile(options, device, bar)


def _view_of(profiled: Profiled, device: torch.device) -> View:
    work = profiling.read_trace(profiled.trace)
    if work:
        return of_gpu(work, fused=profiled.fused)
    view = of_cpu(profiled.trace) if device.type == "cpu" else None
    if view is None:
        raise CommandError(f"torch.profiler recorded nothing that ran on {device}")
    return view
