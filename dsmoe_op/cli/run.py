"""`python -m dsmoe_op run`: a small Hugging Face model, plain and with its MoE blocks as ops; see `comparison.py`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from dsmoe_op.checks import SCHEDULES
from dsmoe_op.cli import arguments, output, profiling, small_models
from dsmoe_op.cli.comparison import DTYPES, NOISE_FACTOR, NOISE_FLOOR, ROWS_FLOOR, ROWS_NOISE, Job, Result, Row, compare

PROMPT = (
    "A mixture-of-experts layer sends each token to a few of its experts and adds what a shared expert makes of every "
    "token. The two do not need each other, so a GPU can run them side by side on two streams, as long as nobody "
    "reorders them."
)
SIZES = (1, 2, 4)


def as_json(result: Result) -> dict[str, Any]:
    """One object. Speed is in tokens a second, times are in microseconds of one decode step."""
    job = result.job
    nodes = [len(graph) for graph in result.graphs]

    def rows(model: str) -> list[dict[str, Any]]:
        fields = [dataclasses.asdict(row) for row in result.rows if row.model == model]
        return [{k: v for k, v in row.items() if v is not None and k != "model"} for row in fields]

    return {
        "match": result.match,
        "criterion": _criterion(job),
        "family": job.family,
        "dtype": job.dtype,
        "format": None if job.format is None else str(job.format),
        "device": str(job.device),
        **_versions(job.device),
        "layers": job.size.layers,
        "moe_layers": result.moe_layers,
        "plain_experts": result.plain_experts,
        "hidden": job.size.hidden,
        "experts": job.size.experts,
        "schedule": job.schedule,
        "seed": job.seed,
        "prompt_tokens": len(job.prompt.encode()),
        "new_tokens": job.tokens,
        "sizes": list(job.sizes),
        "plain": rows("plain"),
        "patched": rows("patched"),
        "noise": result.noise,
        "smallest_gap": result.smallest_gap,
        "largest_logits_difference": result.largest_difference,
        "compile": {
            "enabled": job.compile,
            "compiles": len(nodes),
            "graph_breaks": result.graph_breaks,
            "op_nodes": nodes,
            "op_nodes_per_layer": sorted({n / result.moe_layers for n in nodes}),
        },
        "cuda_graphs": {"captured": result.captured, "none_because": None if job.graphs else _no_graphs(job)},
        "streams": {
            mode: streams.as_json() if isinstance(streams, profiling.Streams) else {"error": streams}
            for mode, streams in result.streams.items()
        },
        "text": result.text,
        "seconds": round(result.seconds, 1),
    }


def report(result: Result) -> str:
    """The same for people."""
    job, versions = result.job, _versions(result.job.device)
    dense = "" if result.moe_layers == job.size.layers else f", {result.moe_layers} of them MoE"
    columns = ("model", "mode", "requests", "batch", "tokens/s", "tokens", "logits error", "")
    plain = "as it is" if job.format is None else "on what the quantised weights stand for"
    lines = [
        f"{job.family} of transformers {versions['transformers']}, torch {versions['torch']}, {versions['hardware']}",
        f"{job.size.layers} layers{dense}, hidden {job.size.hidden}, {job.size.experts} experts, {job.dtype}"
        f"{'' if job.format is None else f', expert weights in {job.format}'}, "
        f"seed {job.seed}, schedule {job.schedule}; prompt of {len(job.prompt.encode())} tokens, {job.tokens} new ones",
        "",
        output.table(columns, [_cells(row) for row in result.rows]),
        f"plain: the model {plain}; patched: its {result.moe_layers} MoE blocks swapped for the op. logits error: the "
        "norm of the difference from the reference, fed the same tokens, over the norm of the reference",
        "",
    ]
    if job.compile:
        counts = sorted({len(graph) for graph in result.graphs})
        nodes = " or ".join(f"{n} dsmoe nodes ({n / result.moe_layers:g} a MoE layer)" for n in counts) or "nothing"
        sizes = f"{len(result.graphs)} compiles for sizes {_list(job.sizes)}"
        lines.append(f"compile: {sizes}, each one graph with {nodes}; {result.graph_breaks} graph breaks")
    else:
        lines.append("compile: none (--enable-torch-compile compiles the step)")
    if job.graphs:
        lines.append(f"CUDA graphs: captured for {_list(result.captured) or 'no size'}, sharing one pool")
    else:
        lines.append(f"CUDA graphs: none ({_no_graphs(job)})")
    for mode, streams in result.streams.items():
        words = streams if isinstance(streams, str) else streams.words()
        lines.append(f"streams, {mode}, a step of {max(job.requests)} requests: {words}")
    if not result.streams:
        lines.append("streams: not looked at (no GPU)")
    if job.dtype == "fp32":
        lines.append(
            f"smallest gap between the best two logits {result.smallest_gap:.2g}, "
            f"largest difference of a logit {result.largest_difference:.2g}"
        )
    if job.rounds_rows:
        lines.append(f"logits error of the plain model with noise of {ROWS_NOISE} on its MoE blocks {result.noise:.1e}")
    lines.append(f"{'match' if result.match else 'MISMATCH'} ({_criterion(job)}); {result.seconds:.0f} s")
    return "\n".join(lines)


def _cells(row: Row) -> list[object]:
    tokens = {None: "", True: "equal", False: "differ"}[row.tokens_equal]
    error = "" if row.logits_error is None else f"{row.logits_error:.1e}"
    note = row.error or ("MISMATCH" if row.agrees is False else "")
    rate = "" if row.tokens_per_s is None else row.tokens_per_s
    return [row.model, row.mode, row.requests, row.batch, rate, tokens, error, note]


def _criterion(job: Job) -> str:
    model = "model" if job.format is None else "model on the dequantised weights"
    if job.exact:
        return f"greedy tokens equal those of the plain eager {model}"
    if job.rounds_rows:
        noise = f"that of the plain model with noise of {ROWS_NOISE} on what each MoE block returns"
        bound, why = f"({NOISE_FACTOR} times {noise}) + {ROWS_FLOOR}", f"since {job.format} quantises rows too"
    else:
        bound, why = f"({NOISE_FACTOR} times that of the plain model) + {NOISE_FLOOR}", f"in {job.dtype}"
    return f"fed the same tokens, logits error against the float32 {model} at most {bound}; tokens may differ {why}"


def _no_graphs(job: Job) -> str:
    return "a CPU has none" if job.device.type != "cuda" else "--cuda-graph-bs 1,2,4,8 captures some"


def _versions(device: torch.device) -> dict[str, str]:
    import transformers

    cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if cuda else f"CPU with {torch.get_num_threads()} threads"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "hardware": hardware}


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


# --- command line ---------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="decode with a small Hugging Face model, plain and with its MoE blocks as ops, and compare",
        description="Builds a small model with random weights, decodes with a static KV cache, swaps its MoE blocks "
        "for the op, decodes again in each mode asked for, and compares tokens, logits and speed. "
        "Exit code 0: they match; 1: they do not; 2: it could not run.",
    )
    add = parser.add_argument
    family = "deepseek_v3"
    names = f"one of {_list(sorted(small_models.FAMILIES))} ({family})"
    add("--family", choices=sorted(small_models.FAMILIES), default=family, metavar="NAME", help=names)
    small_models.add_size(parser)
    add("--dtype", choices=list(DTYPES), default="fp32", help="(fp32)")
    add("--device", type=arguments.device, metavar="NAME", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--prompt", type=arguments.text, default=PROMPT, metavar="TEXT", help="its bytes are the tokens (a paragraph)")
    add("--tokens", type=arguments.integer(2, 1024), default=32, metavar="N", help="new tokens of each request (32)")
    add("--schedule", choices=list(SCHEDULES), default="auto", help="of the op (auto)")
    quantise = f"quantise the experts' weights: {arguments.FORMATS_ACCEPTED} (none)"
    add("--format", type=arguments.formats_or_none, metavar="NAME", help=quantise)
    add("--seed", type=arguments.integer(0, 2**31), default=0, metavar="N", help="of the weights (0)")
    add("--enable-torch-compile", action="store_true", help="compile the decode step, fullgraph=True")
    sizes = arguments.integers(1, 512)
    graphs = "batch sizes to capture a CUDA graph of the step for, sharing one pool; without a GPU they only pad"
    add("--cuda-graph-bs", type=sizes, metavar="1,2,4,8", help=graphs)
    requests = "how many requests decode together, a run each, padded to the next size (each size, and one between)"
    add("--requests", type=sizes, metavar="1,3,8", help=requests)
    add("--compare-modes", action="store_true", help="compile and capture the plain model too, for its speed")
    add("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=lambda options: _command(options, parser))


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    small_models.check_installed(options.family, parser)
    sizes = options.cuda_graph_bs or SIZES
    between = [n for n in range(1, sizes[-1]) if n not in sizes][:1]
    requests = options.requests or tuple(sorted({*sizes, *between}))
    if requests[-1] > sizes[-1]:
        parser.error(f"argument --requests: expected at most {sizes[-1]}, the largest size, got {requests[-1]}")
    size = small_models.size(options)
    try:
        length = len(options.prompt.encode())
    except UnicodeEncodeError as error:
        parser.error(f"argument --prompt: expected UTF-8 text, {error}")
    room = size.positions - options.tokens - 8
    if length > room:
        parser.error(f"argument --prompt: expected at most {room} bytes, got {length}")
    device = options.device or arguments.device("cuda" if torch.cuda.is_available() else "cpu")
    job = Job(
        family=options.family,
        size=size,
        dtype=options.dtype,
        device=device,
        prompt=options.prompt,
        tokens=options.tokens,
        schedule=options.schedule,
        seed=options.seed,
        sizes=sizes,
        requests=requests,
        compile=options.enable_torch_compile,
        graphs=options.cuda_graph_bs is not None and device.type == "cuda",
        compare_modes=options.compare_modes,
        format=options.format,
    )
    with output.stdout_kept_for_json(options.json):
        result = compare(job)
    if options.json:
        output.print_json(as_json(result))
    else:
        print(report(result))
    return output.OK if result.match else output.WRONG
