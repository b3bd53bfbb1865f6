"""A small Hugging Face model decodes with its MoE blocks as they are, then with each as one op; the two are compared.

Both have the same weights. What they must agree on:
- float32: the greedy tokens are equal, in each mode and for each number of requests.
- bf16, fp16: both are compared with the same weights in float32, all fed the same tokens. The patched model's error
  (relative L2 distance of a position's logits, averaged over positions) may be at most NOISE_FACTOR times the plain
  model's largest plus NOISE_FLOOR. A fixed bound on the distance of the two would mean little: where two experts are
  nearly tied, rounding decides which is chosen, in either model, and that position's logits are then quite others.

With a format the patched model's expert weights are quantised, and the plain model's are what these stand for, so that
all of the above holds. But where the format quantises the experts' rows too, which the plain model does not, tokens may
differ in float32 as well. There the patched model may have NOISE_FACTOR times the error that the plain model has with
noise of ROWS_NOISE on what each MoE block returns, plus ROWS_FLOOR.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsmoe_op import DualStreamMoE
from dsmoe_op.cli import decode, output, profiling, quantized, small_models
from dsmoe_op.cli.arguments import Formats
from dsmoe_op.cli.output import CommandError

NOISE_FACTOR, NOISE_FLOOR = 1.5, 0.1
ROWS_NOISE, ROWS_FLOOR = 0.05, 0.02
"""Relative to a row's norm. Rows in fp8 give a layer's output an error of 0.043 to 0.046 in exact arithmetic."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        sizes: batch sizes that compiled and captured steps exist for, ascending.
        requests: how many requests decode together, one run each; padded to the next size where steps exist for sizes.
        format: of the patched model's expert weights; the plain model's are then what those stand for. None: none.
        compare_modes: whether the plain model is compiled and captured too, for its speed.
    """

    family: str
    size: small_models.Size
    dtype: str
    device: torch.device
    prompt: str
    tokens: int
    schedule: str
    seed: int
    sizes: tuple[int, ...]
    requests: tuple[int, ...]
    compile: bool
    graphs: bool
    compare_modes: bool
    format: Formats | None = None

    @property
    def rounds_rows(self) -> bool:
        """Whether a format quantises what the experts' weights multiply."""
        return self.format is not None and self.format.rounds_rows

    @property
    def exact(self) -> bool:
        """Whether tokens are to be equal."""
        return self.dtype == "fp32" and not self.rounds_rows

    def padded(self, requests: int) -> int:
        return min(size for size in self.sizes if size >= requests)


@dataclasses.dataclass(kw_only=True)
class Row:
    """One mode of one of the two models, at one number of requests.

    Attributes:
        batch: rows of a step, padding included.
        tokens_per_s: of the steps after prefill.
        tokens_equal: whether the freely running model's tokens are those of the plain eager one.
        logits_error: mean over positions of the relative L2 distance to the reference's logits.
        agrees: whether the patched model agrees with the plain one; None in the plain model's rows.
        error: why there is nothing else.
    """

    model: str
    mode: str
    requests: int
    batch: int
    tokens_per_s: float | None = None
    tokens_equal: bool | None = None
    logits_error: float | None = None
    agrees: bool | None = None
    error: str | None = None


@dataclasses.dataclass(kw_only=True)
class Result:
    """What was measured.

    Attributes:
        moe_layers: how many blocks were swapped.
        plain_experts: transformers' name of what the plain model's experts ran with.
        noise: the plain model's error, which the patched model's is held against where tokens may differ.
        smallest_gap: between the best two logits of the plain model, over all tokens.
        largest_difference: of one logit between patched and reference.
        graphs: for each compile of the patched model, its dsmoe nodes.
        captured: sizes of the patched model's CUDA graphs, in the order of capture.
        streams: by mode, of a step of the most requests; a text where it failed.
        text: the first request's new tokens.
    """

    job: Job
    moe_layers: int
    plain_experts: str
    rows: list[Row]
    noise: float
    smallest_gap: float
    largest_difference: float
    graphs: list[list[str]]
    graph_breaks: int
    captured: list[int]
    streams: dict[str, profiling.Streams | str]
    text: str
    seconds: float

    @property
    def match(self) -> bool:
        patched = [row for row in self.rows if row.model == "patched"]
        return bool(patched) and all(row.agrees for row in patched)


@torch.no_grad()
def compare(job: Job) -> Result:
    """Builds the model, measures it as it is, swaps its blocks, measures it again.

    Raises:
        CommandError: the plain model does not run here, or its blocks cannot be swapped.
    """
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no tf32: tokens in float32 are to be equal
    try:
        return _compare(job)
    finally:
        torch.set_float32_matmul_precision(precision)


def _compare(job: Job) -> Result:
    from dsmoe_op.hf import replace_moe_blocks

    begin = time.perf_counter()
    with output.progress(_count_rows(job) + 2, "build the model") as bar:
        model = small_models.build(job.family, job.size, dtype=DTYPES[job.dtype], device=job.device, seed=job.seed)
        measure = _Measure(job, bar)
        patched, swapped = None, 0
        if job.format is not None:
            bar.set_description(f"quantise to {job.format}")
            try:
                patched, swapped = quantized.twin(model, job.format, job.schedule, measure.prompts[:1])
            except ValueError as error:
                raise CommandError(f"{job.family} in {job.format} on {job.device}: {error}") from None
        bar.update()
        measure.reference(model)
        if job.rounds_rows and patched is not None:
            measure.noise_of_rows(model, [name for name, m in patched.named_modules() if isinstance(m, DualStreamMoE)])
        bar.update()
        all_modes = job.compare_modes
        measure.model("plain", model, compiled=job.compile and all_modes, graphs=job.graphs and all_modes)
        if patched is None:
            patched = model
            try:
                swapped = replace_moe_blocks(model, job.schedule)
            except ValueError as error:
                raise CommandError(f"{job.family}: {error}") from None
        if not swapped:
            raise CommandError(f"{job.family}: expected MoE blocks in the model, found none")
        measure.model("patched", patched, compiled=job.compile, graphs=job.graphs)
    return Result(
        job=job,
        moe_layers=swapped,
        plain_experts=measure.plain_experts,
        rows=measure.rows,
        noise=measure.noise,
        smallest_gap=measure.smallest_gap,
        largest_difference=measure.largest_difference,
        graphs=measure.compiled_graphs,
        graph_breaks=measure.graph_breaks,
        captured=measure.captured,
        streams=measure.streams,
        text=bytes(token for token in measure.tokens[0].tolist() if token < 256).decode(errors="replace"),
        seconds=time.perf_counter() - begin,
    )


def _count_rows(job: Job) -> int:
    patched = 1 + job.compile + job.graphs
    return (patched + (patched if job.compare_modes else 1)) * len(job.requests)


Batches = dict[int, decode.Batch | Exception]
"""By size; an exception where that size could not be prepared."""


class _Measure:
    """Runs a model in its modes, compares with the reference, and gathers what is found."""

    def __init__(self, job: Job, bar: Any) -> None:
        self.job, self.bar = job, bar
        text = job.prompt.encode()
        starts = [17 * row % len(text) for row in range(max(job.requests))]
        self.prompts = torch.tensor([list(text[s:] + text[:s]) for s in starts], device=job.device)
        self.rows: list[Row] = []
        self.largest_difference = 0.0
        self.compiled_graphs: list[list[str]] = []
        self.graph_breaks = 0
        self.captured: list[int] = []
        self.streams: dict[str, profiling.Streams | str] = {}
        self.tokens, self.logits = torch.empty(0), torch.empty(0)
        self.smallest_gap = 0.0
        self.plain_experts = ""
        self.noise = 0.0  # the plain eager model's largest error, with noise on its blocks where the format has it

    def reference(self, model: Any) -> None:
        """The plain eager model's tokens, and the logits to compare with: its own, or its weights' in float32."""
        self.bar.set_description("plain, eager, as the reference")
        decoded = self._plain(model)
        if not decoded.logits.isfinite().all():
            raise CommandError(f"the plain {self.job.family} gives logits that are not finite in {self.job.dtype}")
        self.tokens, self.logits = decoded.tokens, decoded.logits
        best = decoded.logits.topk(2, -1).values
        self.smallest_gap = (best[..., 0] - best[..., 1]).min().item()
        if self.job.dtype != "fp32":
            self.logits = self._plain(copy.deepcopy(model).float(), forced=self.tokens).logits
        self.plain_experts = model.config._experts_implementation

    def noise_of_rows(self, model: nn.Module, blocks: list[str]) -> None:
        """What noise as large as that of rows in fp8 makes of the plain model."""
        generator = torch.Generator(self.job.device).manual_seed(self.job.seed)

        def add(block: nn.Module, inputs: Any, out: Any) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            noise = torch.randn(hidden.shape, device=hidden.device, generator=generator)
            size = ROWS_NOISE * hidden.float().square().mean(-1, keepdim=True).sqrt()
            noisy = (hidden.float() + size * noise).to(hidden.dtype)
            return (noisy, *out[1:]) if isinstance(out, tuple) else noisy

        handles = [model.get_submodule(name).register_forward_hook(add) for name in blocks]
        decoded = self._plain(model, forced=self.tokens)
        for handle in handles:
            handle.remove()
        self.noise = _error(decoded.logits, self.logits)

    def _plain(self, model: Any, **options: Any) -> decode.Decoded:
        """The plain model decodes; its experts run as a loop where the kernels that transformers picks fail."""
        try:
            return self._decode(self._batch(model, decode.plain_step(model), len(self.prompts)), **options)
        except Exception as error:
            text = output.error_text(error)
            if model.config._experts_implementation == "eager":
                traceback.print_exc()
                raise CommandError(f"the plain {self.job.family} does not run here: {text}") from None
        print(f"the plain model's experts fail ({text}); they run as a loop instead", file=sys.stderr)
        model.set_experts_implementation("eager")
        return self._plain(model, **options)

    def model(self, name: str, model: nn.Module, *, compiled: bool, graphs: bool) -> None:
        """All modes of one of the two models."""
        step = decode.plain_step(model)
        self._rows(name, "eager", lambda requests: self._batch(model, step, requests))
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            step = compiled_step = decode.Compiled(step)

            def compile_it(batch: decode.Batch) -> None:
                batch.prefill(self._spaces(batch))
                batch.advance()

            batches = self._prepare(name, "compile", model, step, compile_it)
            self._rows(name, "compiled", lambda requests: batches[self.job.padded(requests)])
            if name == "patched":
                self.compiled_graphs = compiled_step.graphs
                self.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        if graphs:
            pool = torch.cuda.graph_pool_handle()

            def capture(batch: decode.Batch) -> None:
                batch.capture(self._spaces(batch), pool)

            graphs_by_size = self._prepare(name, "capture", model, step, capture)
            self._rows(name, "CUDA graph", lambda requests: graphs_by_size[self.job.padded(requests)])
            if name == "patched":
                captured = [size for size, batch in graphs_by_size.items() if isinstance(batch, decode.Batch)]
                self.captured = captured

    def _batch(self, model: nn.Module, step: decode.Step, rows: int) -> decode.Batch:
        length = self.prompts.shape[1] + self.job.tokens + 8  # room for warm-up and profiled steps
        return decode.Batch(model, step, rows, length)

    def _spaces(self, batch: decode.Batch) -> Tensor:
        return self.prompts.new_full((batch.rows, self.prompts.shape[1]), ord(" "))

    def _decode(self, batch: decode.Batch, requests: int | None = None, **options: Any) -> decode.Decoded:
        return decode.decode(batch, self.prompts[:requests], self.job.tokens, **options)

    def _prepare(
        self, name: str, what: str, model: nn.Module, step: decode.Step, prepare: Callable[[decode.Batch], None]
    ) -> Batches:
        """A batch of each size, prepared, the largest first."""
        batches: Batches = {}
        for size in reversed(self.job.sizes):
            self.bar.set_description(f"{name}, {what} for {size}")
            batch = self._batch(model, step, size)
            try:
                prepare(batch)
                batches[size] = batch
            except Exception as error:
                if name == "patched":
                    traceback.print_exc()
                batches[size] = error
        return batches

    def _rows(self, name: str, mode: str, batch_of: Callable[[int], decode.Batch | Exception]) -> None:
        """Rows of one mode, and its streams."""
        for requests in self.job.requests:
            self.bar.set_description(f"{name}, {mode}, {requests} requests")
            batch = batch_of(requests)
            size = requests if mode == "eager" else self.job.padded(requests)
            row = Row(model=name, mode=mode, requests=requests, batch=size)
            self.rows.append(row)
            try:
                if isinstance(batch, Exception):
                    raise batch
                self._measure(row, batch)
            except Exception as error:
                if error is not batch and name == "patched":
                    traceback.print_exc()
                row.error = output.error_text(error)
                row.agrees = False if name == "patched" else None
            self.bar.update()
        if name == "patched" and self.job.device.type == "cuda" and isinstance(batch, decode.Batch):
            try:
                batch.prefill(self._spaces(batch))
                batch.advance()
                self.streams[mode] = profiling.streams_of(batch.advance)
            except Exception as error:
                traceback.print_exc()
                self.streams[mode] = output.error_text(error)

    def _measure(self, row: Row, batch: decode.Batch) -> None:
        requests = row.requests
        logits, tokens = self.logits[:requests], self.tokens[:requests]
        forced = self._decode(batch, requests, forced=tokens)
        free = self._decode(batch, requests, keep_logits=False)
        row.tokens_per_s = round(requests * (self.job.tokens - 1) / free.seconds, 1)
        row.tokens_equal = torch.equal(free.tokens, tokens)
        row.logits_error = _error(forced.logits, logits)
        if row.model == "plain":
            if row.mode == "eager":
                self.noise = max(self.noise, row.logits_error)
            return
        self.largest_difference = max(self.largest_difference, (forced.logits - logits).abs().max().item())
        floor = ROWS_FLOOR if self.job.rounds_rows else NOISE_FLOOR
        within = row.logits_error <= NOISE_FACTOR * self.noise + floor
        row.agrees = row.tokens_equal if self.job.exact else within


def _error(logits: Tensor, expected: Tensor) -> float:
    """Relative L2 distance of a position's logits, averaged over positions."""
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).mean().item()
