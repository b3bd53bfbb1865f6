"""`python -m dsmoe_op hazard`: what becomes of two-stream code under torch.compile and in CUDA graphs, on this torch.

The layer of `branches.py` runs as plain code with `with torch.cuda.stream(...)`, forked and joined by wait_stream or by
events, and as the op: eager, compiled and captured. A row says on how many streams its kernels ran, for how long two of
them worked at once, and in how many calls, branches delayed at random, the output was not bit for bit that of the same
code without a second stream. Nothing is known beforehand: whatever is printed was measured in this run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import dsmoe_op
from dsmoe_op.cli import arguments, branches, output, profiling
from dsmoe_op.cli.branches import BEFORE, CODES, OURS, Call
from dsmoe_op.cli.output import CommandError

MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "eager-captured": None,
    "fullgraph": {"fullgraph": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "compile": {},
    "compile-captured": {},
}
"""Arguments of torch.compile, in the order in which the modes run."""
INPUTS = ("made inside", "given")
"""Whether the function makes the layer's input itself, or is given it."""
LONGEST_NS = 500_000
WARMUP = 4


@dataclasses.dataclass(kw_only=True)
class Row:
    """One kind of code in one mode.

    Attributes:
        wrong: calls, of `calls`, whose output is not bit for bit that of one stream.
        largest_difference: from it, relative to its largest value.
        streams: kernels by stream and overlap, without delays.
        error: why the rest is missing.
    """

    code: str
    mode: str
    input: str
    calls: int
    wrong: int | None = None
    largest_difference: float | None = None
    streams: profiling.Streams | None = None
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.error is None and self.wrong == 0 and self.streams is not None and len(self.streams.kernels) > 1


class Bench:
    """Measures rows on the current device."""

    def __init__(self, calls: int, seed: int, device: str = "cuda") -> None:
        self.calls, self.seed = calls, seed
        self.w = branches.Weights(torch.bfloat16, device, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (branches.T, branches.H)
        self.inputs = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(8)]
        self.x = torch.zeros_like(self.inputs[0])
        self.truths: dict[tuple[str, bool, bool], list[Tensor]] = {}

    def rows(self, code: str, input: str, modes: tuple[str, ...]) -> Iterator[Row]:
        """Rows of modes that share one callable; whatever goes wrong in one stays in it."""
        inside, options = input == "made inside", MODES[modes[0]]
        call: Call | None = None
        for mode in modes:
            row = Row(code=code, mode=mode, input=input, calls=self.calls)
            try:
                truth = self._truth(code, inside, compiled=options is not None)
                with self._delays(code) as delayed:
                    if call is None:
                        call = self._make(code, options, two_streams=True, made_inside=inside)
                        for _ in range(WARMUP):
                            self._call(call)
                        torch.cuda.synchronize()
                    measured = self._captured(call) if mode.endswith("captured") else call
                    row.wrong, row.largest_difference = self._compare(measured, truth)
                    if code == OURS and not delayed:
                        raise RuntimeError("the delays did not reach the op")
                    row.streams = self._streams(measured)
            except Exception as error:
                if code == OURS:
                    traceback.print_exc()
                row.error = output.error_text(error)
                _recover()
            yield row

    def _delays(self, code: str) -> Any:
        return branches.delayed_launches(self.w.delays) if code == OURS else contextlib.nullcontext([])

    def _make(self, code: str, options: dict[str, Any] | None, **form: bool) -> Call:
        op, w = branches.late_op(), self.w

        def late(x: Tensor, where: int) -> Tensor:
            return op(x, w.delays, where)

        call = branches.layer(code, w, late, **form)
        if options is None:
            return call
        torch._dynamo.reset()
        return torch.compile(call, **options)

    def _truth(self, code: str, inside: bool, *, compiled: bool) -> list[Tensor]:
        """Outputs of the same code on one stream. All compiled modes have one, since they generate the same kernels."""
        key = (OURS if code == OURS else "plain", inside, compiled)
        if key not in self.truths:
            self.w.delays.zero_()
            call = self._make(code, {} if compiled else None, two_streams=False, made_inside=inside)
            self.truths[key] = [call(x).clone() for x in self.inputs]
            torch.cuda.synchronize()
        return self.truths[key]

    def _call(self, call: Call) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return call(self.x)

    def _captured(self, call: Call) -> Call:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(self.x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(self.x)

        def replay(x: Tensor) -> Tensor:
            graph.replay()
            return out

        return replay

    def _compare(self, call: Call, truth: list[Tensor]) -> tuple[int, float]:
        """Calls that differ, and by how much at most; the input is overwritten as soon as a call has returned."""
        from dsmoe_op.cli.delay import delay

        rng = random.Random(self.seed)
        wrong, differences = [], []
        for n in range(self.calls):
            ns = [rng.choice((0, rng.randrange(LONGEST_NS))) for _ in range(3)]
            self.w.delays.copy_(torch.tensor(ns))
            right = truth[n % len(truth)]
            delay(self.w.delays, BEFORE)
            self.x.copy_(self.inputs[n % len(truth)])
            out = self._call(call)
            wrong.append((out != right).any())
            differences.append((out.float() - right.float()).abs().max() / right.float().abs().max())
            self.x.zero_()
            torch.cuda.synchronize()
        return int(torch.stack(wrong).sum()), float(torch.stack(differences).max())

    def _streams(self, call: Call, calls: int = 4) -> profiling.Streams:
        """Without delays in the branches, but with enough work queued before that the host isn't what is waited for."""
        from dsmoe_op.cli import delay

        self.w.delays.copy_(torch.tensor([LONGEST_NS, 0, 0]))

        def queued() -> None:
            delay.delay(self.w.delays, BEFORE)
            self._call(call)

        queued()
        return profiling.streams_of(queued, calls=calls, leave_out=(delay.NAME, "Memcpy DtoD"))


def _recover() -> None:
    """After an error: so that the next row starts from nothing."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch._dynamo.reset()


# --- command line ---------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "hazard",
        help="show what torch.compile and CUDA graphs do to two-stream code on this GPU, next to the op",
        description="Runs one layer as plain two-stream code and as the op: eager, compiled and captured. Prints "
        "kernels by stream, their overlap, and how many calls, delayed at random, differ from one stream. "
        "Exit code 0: the op was never wrong and always on two streams; 1: not so; 2: no GPU, or bad arguments.",
    )
    add = parser.add_argument
    modes = arguments.some_of(list(MODES))
    add(
        "--calls", type=arguments.integer(1, 100_000), default=200, metavar="N", help="calls compared in each row (200)"
    )
    add("--seed", type=arguments.integer(0, 2**31), default=0, metavar="N", help="of weights, inputs and delays (0)")
    add("--modes", type=modes, default=tuple(MODES), metavar="A,B", help=f"some of {', '.join(MODES)} (all)")
    seconds = "no row starts later, and those left out are named (140)"
    add("--seconds", type=arguments.integer(1, 100_000), default=140, metavar="N", help=seconds)
    add("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CommandError(
            "hazard needs a GPU, and torch finds none here. With one it shows, for the installed torch, on how many "
            "streams two-stream code runs when it is eager, compiled and captured, how long the streams overlap, and "
            "how many calls give a wrong result: for plain `with torch.cuda.stream(...)` code, and for the op"
        )
    with output.stdout_kept_for_json(options.json):
        rows = measure(options.calls, options.seed, options.modes, options.seconds)
    good = all(row.good for row in rows if row.code == OURS)
    if options.json:
        output.print_json(as_json(rows, good))
    else:
        print(report(rows, good))
    return output.OK if good else output.WRONG


@torch.no_grad()
def measure(calls: int, seed: int, modes: tuple[str, ...], seconds: float) -> list[Row]:
    """All rows; those that would start after `seconds` say so."""
    begin = time.perf_counter()
    groups: dict[str, tuple[str, ...]] = {}  # modes that share a callable
    for mode in modes:
        made_as = mode.removesuffix("-captured")
        groups[made_as] = (*groups.get(made_as, ()), mode)
    # one code after the other, the op first: what a failed capture leaves behind is nobody else's
    jobs = [(code, input, group) for code in CODES for group in groups.values() for input in INPUTS]
    rows: list[Row] = []
    with output.progress(sum(len(group) for *_, group in jobs), "hazard") as bar:
        torch.cuda.synchronize()
        bench = Bench(calls, seed)
        for code, input, group in jobs:
            bar.set_description(f"{code}, {group[0]}, x {input}")
            if time.perf_counter() - begin > seconds:
                late = f"not run: {seconds:g} s were over (--seconds)"
                made = [Row(code=code, mode=mode, input=input, calls=calls, error=late) for mode in group]
                rows += made
                bar.update(len(made))
                continue
            for row in bench.rows(code, input, group):
                rows.append(row)
                bar.update()
    return rows


def _versions() -> dict[str, str]:
    import triton

    hardware = torch.cuda.get_device_name()
    return {
        "dsmoe_op": dsmoe_op.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "hardware": hardware,
    }


def as_json(rows: list[Row], good: bool) -> dict[str, Any]:
    def one(row: Row) -> dict[str, Any]:
        fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "streams"}
        streams = row.streams.as_json() if row.streams else {}
        return {k: v for k, v in {**fields, **streams}.items() if v is not None}

    return {"ours_good": good, **_versions(), "rows": [one(row) for row in rows]}


def report(rows: list[Row], good: bool) -> str:
    versions = _versions()
    columns = ("code", "mode", "input", "wrong", "of", "by", "kernels", "overlap us", "")
    lines = [
        f"torch {versions['torch']}, triton {versions['triton']}, {versions['hardware']}",
        f"{branches.E} experts and a shared one, {branches.T} tokens, hidden {branches.H}, bf16. wrong: calls whose "
        "output is not bit-equal to the same code on one stream; by: their largest difference; kernels: on each stream",
        "",
        output.table(columns, [_cells(row) for row in rows]),
        "",
        f"plain code: {_facts([row for row in rows if row.code != OURS])}",
        f"the op: {_facts([row for row in rows if row.code == OURS])}",
        "the op held in every row" if good else "THE OP DID NOT HOLD in every row",
    ]
    return "\n".join(lines)


def _cells(row: Row) -> list[object]:
    by = "" if not row.wrong else f"{row.largest_difference:.1e}"
    wrong = "" if row.wrong is None else row.wrong
    kernels, overlap = "", ""
    if row.streams:
        kernels = " + ".join(f"{count:g}" for count in row.streams.kernels.values())
        overlap = f"{row.streams.overlap_us:.1f}"
    return [row.code, row.mode, row.input, wrong, row.calls, by, kernels, overlap, row.error or ""]


def _facts(rows: list[Row]) -> str:
    ran = [row for row in rows if row.error is None]
    two = sum(1 for row in ran if row.streams and len(row.streams.kernels) > 1)
    wrong = [row for row in ran if row.wrong]
    facts = [f"two streams in {two} of {len(ran)} rows"]
    if wrong:
        worst = max(wrong, key=lambda row: row.wrong or 0)
        worst_is = f"{worst.wrong} of {worst.calls} calls ({worst.code}, {worst.mode})"
        facts.append(f"wrong results in {len(wrong)} rows, at worst in {worst_is}")
    else:
        facts.append(f"0 wrong of {sum(row.calls for row in ran)} calls")
    failed = len(rows) - len(ran)
    return "; ".join(facts + ([f"{failed} rows failed"] if failed else []))
