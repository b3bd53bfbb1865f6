"""What is timed: random weights of one shape, in as many copies as keep caches cold, inputs, and the right answers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsmoe_op import DualStreamMoE, formats, quantizing, reference
from dsmoe_op.cli import shapes
from dsmoe_op.cli.comparison import DTYPES
from dsmoe_op.cli.output import CommandError
from dsmoe_op.cli.plain import Weights
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.formats import FormatName

COLD_BYTES = 220e6
"""Read between two uses of the same weight: several times what a GPU's L2 cache holds."""
MAX_COPIES = 32
CHECKED_ROWS = 64
"""Of each input that is checked: the first, the last and one between."""
ERROR_LIMITS = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4}
"""Relative distance (Frobenius) from the reference, from which a result counts as wrong."""
ROWS_LIMITS = 2e-2, 1e-1
"""The same where the op quantises rows: of the op, whose rows may be rounded otherwise here and there, and of others,
whose rows are not quantised."""
LARGEST = {"w13": 6.0, "w2": 20.0}
"""Magnitudes of x and h that fp8_tensor reaches to."""
CLEAR = 2e-5
"""Noise on the logits that may not change a row's choice: float32 sums in another order are far nearer."""


class Problem:
    """Weights of one layer, and inputs for it.

    Input i is for weights `at(i)`. On a GPU there are so many copies of router and shared expert, and of the routed
    experts where one copy is not large enough, that whatever a call over all copies reads is in no cache at the next.
    On a CPU there is one copy.

    Where the shape's config has formats, the op has quantised weights, and the others have what these stand for.

    Attributes:
        routed_bytes, shared_bytes: of a routed expert's weight in the op, and of the shared one's, with its part of the
            scales.
        rounds_rows: whether a format quantises what the weights multiply.

    Raises:
        CommandError: the memory is not there, or the op does not take the format on the device.
    """

    def __init__(self, shape: Shape, dtype: str, device: torch.device, seed: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.itemsize = DTYPES[dtype].itemsize
        names = shapes.formats_of(shape)
        each = [float(self.itemsize if name is None else formats.FORMATS[name].bits / 8) for name in names]
        self.routed_bytes, self.shared_bytes = each
        self.rounds_rows = names.rounds_rows
        self.copies = self.routed_copies = 1
        if device.type == "cuda":
            others = shape.router_elements * self.itemsize + shape.shared_elements * self.shared_bytes
            self.copies = _copies(others, at_least=4)
            self.routed_copies = _copies(shape.routed_elements * self.routed_bytes, at_least=1)
        self._check_memory()
        self.generator = torch.Generator(device).manual_seed(seed)
        H, I, E, S = shape.H, shape.I, shape.E, shape.S
        self.correction_bias = None
        if shape.correction_bias:
            self.correction_bias = 0.01 * torch.randn(E, device=device, generator=self.generator)
        self.routed = [(self._normal(E, 2 * I, H), self._normal(E, H, I)) for _ in range(self.routed_copies)]
        self.others = [
            (
                self._normal(E, H),
                self._normal(2 * S, H) if S else None,
                self._normal(H, S) if S else None,
                self._normal(1, H) if S and shape.shared_gate else None,
            )
            for _ in range(self.copies)
        ]
        self._quantised: dict[int, dict[str, Tensor]] = {}
        for w13, w2 in self.routed:
            self._quantise({"w13": w13, "w2": w2})
        for _, shared_w13, shared_w2, _ in self.others:
            self._quantise({"shared_w13": shared_w13, "shared_w2": shared_w2})
        if names.routed is not None:
            self.routed_bytes = self._nbytes(*self.routed[0]) / shape.routed_elements
        if names.shared is not None:
            self.shared_bytes = self._nbytes(*self.others[0][1:3]) / shape.shared_elements
        if self._quantised:
            try:
                given = {name: t for name, t in self.tensors(self.at(0)).items() if t is not None}
                DualStreamMoE.from_tensors(shape.config, given)
            except ValueError as error:
                raise CommandError(f"--format: the op does not take it on {device}: {error}") from None

    def _quantise(self, weights: dict[str, Tensor | None]) -> None:
        """Writes into these weights what they are once they are quantised."""
        config = self.shape.config
        for name, weight in weights.items():
            format = config.format_of(name)
            if weight is None or format is None:
                continue
            halves = config.halves(name)
            parts = quantise(name, format, weight, halves)
            stacked = weight.dim() == 3
            for e, its_weight in enumerate(weight if stacked else [weight]):
                its = parts.expert(e) if stacked else parts
                columns = weight.shape[-1]
                its_weight.copy_(formats.dequantize(format, its, columns, halves=halves, dtype=torch.float32))
            self._quantised[id(weight)] = arguments_of(name, parts)

    def _nbytes(self, *weights: Tensor | None) -> int:
        """Of what the op has in the place of quantised weights."""
        return sum(t.nbytes for weight in weights for t in self._quantised[id(weight)].values())

    def _normal(self, *size: int) -> Tensor:
        """A unit variance through each product."""
        weight = torch.empty(size, dtype=DTYPES[self.dtype], device=self.device)
        for part in (
            weight.split(16) if len(size) == 3 else (weight,)
        ):  # all experts at once are too many numbers for one
            part.normal_(0, size[-1] ** -0.5, generator=self.generator)
        return weight

    def _check_memory(self) -> None:
        shape, needed = self.shape, float(self.copies * self.shape.router_elements * self.itemsize)
        of_each = (
            (self.routed_copies * shape.routed_elements, self.routed_bytes),
            (self.copies * shape.shared_elements, self.shared_bytes),
        )
        for (elements, its), name in zip(of_each, shapes.formats_of(shape), strict=True):
            needed += elements * (self.itemsize + (0 if name is None else its))  # beside what they stand for
        free = free_bytes(self.device)
        if needed > 0.95 * free:
            raise CommandError(
                f"--shape: {self.shape.name} in {self.dtype} has {needed / 1e9:.1f} GB of weights, "
                f"and {self.device} has {free / 1e9:.1f} GB free"
            )

    def at(self, i: int) -> Weights:
        """The weights of input i."""
        (w13, w2), others = self.routed[i % self.routed_copies], self.others[i % self.copies]
        router_weight, shared_w13, shared_w2, shared_gate = others
        return Weights(router_weight, self.correction_bias, w13, w2, shared_w13, shared_w2, shared_gate)

    def tensors(self, weights: Weights) -> dict[str, Any]:
        """What the op has in the place of these weights, by argument name."""
        given: dict[str, Any] = weights._asdict()
        if self._quantised:
            for weight in weights:
                given |= self._quantised.get(id(weight), {})
        return given

    def count(self, T: int) -> int:
        """How many inputs of T tokens one timed round has."""
        if self.device.type == "cpu":
            return max(4, min(64, 4096 // T))
        by_tokens = self.copies if T <= 16 else 8 if T <= 64 else 4 if T <= 256 else 2
        return max(by_tokens, self.routed_copies)

    def inputs(self, T: int) -> list[Tensor]:
        """[T, H] each. No row's choice hangs on a rounding of its logits, or candidates would differ in that alone."""
        found = []
        for i in range(self.count(T)):
            x = self.draw(T)
            for _ in range(20):
                unclear = self._unclear(x, self.at(i))
                if not len(unclear):
                    break
                x[unclear] = self.draw(len(unclear))
            found.append(x)
        return found

    def draw(self, rows: int) -> Tensor:
        """Random [rows, H]."""
        x = torch.randn(rows, self.shape.H, device=self.device, generator=self.generator)
        return x.to(DTYPES[self.dtype])

    def _choice(self, logits: Tensor) -> Tensor:
        ids, _ = reference.route(logits, self.shape.config, correction_bias=self.correction_bias)
        return ids.sort(-1).values

    def _unclear(self, x: Tensor, w: Weights) -> Tensor:
        logits = reference.compute_logits(x, w.router_weight, None, self.shape.config)
        choice = self._choice(logits)
        differs = torch.zeros(len(x), dtype=torch.bool, device=self.device)
        for _ in range(4):
            noise = torch.randn(logits.shape, dtype=logits.dtype, device=self.device, generator=self.generator)
            differs |= (self._choice(logits + CLEAR * noise) != choice).any(-1)
        return differs.nonzero().flatten()

    def hit(self, inputs: list[Tensor]) -> float:
        """Distinct experts that an input's tokens choose, in the mean."""
        total = 0
        for i, x in enumerate(inputs):
            logits = reference.compute_logits(x, self.at(i).router_weight, None, self.shape.config)
            total += self._choice(logits).unique().numel()
        return total / len(inputs)


class Answers:
    """What the layer is for some rows of some inputs, in float32, or in float64 for a layer in float32."""

    def __init__(self, problem: Problem, inputs: list[Tensor]) -> None:
        limit = ERROR_LIMITS[problem.dtype]
        self.limit, self.limit_of_others = ROWS_LIMITS if problem.rounds_rows else (limit, limit)
        T = len(inputs[0])
        self.rows = torch.linspace(0, T - 1, min(T, CHECKED_ROWS), device=problem.device).round().long()
        self.inputs = sorted({0, len(inputs) // 2, len(inputs) - 1})
        exact = torch.float64 if problem.dtype == "fp32" else torch.float32
        self.right = {
            i: reference.moe(
                inputs[i][self.rows], config=problem.shape.config, dtype=exact, **problem.tensors(problem.at(i))
            )
            for i in self.inputs
        }

    def error(self, i: int, out: Tensor) -> float:
        """Relative distance of out [T, H], the layer of input i, from the right answer."""
        right = self.right[i]
        difference = out.reshape(-1, right.shape[-1])[self.rows].to(right.dtype) - right
        return float(difference.norm() / right.norm())


def quantise(name: str, format: FormatName, weight: Tensor, halves: int) -> formats.Quantised:
    """The weight of that argument in a format, which may be one without memory.

    What it multiplies has a static scale in fp8_tensor, up to LARGEST.
    """
    parts = quantizing.quantize_each(format, weight, halves=halves)
    if format == "fp8_tensor":
        largest = LARGEST[name.removeprefix("shared_")]
        scale = torch.full((1,), largest / formats.LARGEST_E4M3, device=weight.device)
        parts = parts._replace(input_scale=scale)
    return parts


def arguments_of(name: str, parts: formats.Quantised) -> dict[str, Tensor]:
    """The tensors of the weight of that argument, by the op's arguments."""
    return {name + suffix: t for suffix, t in zip(formats.SUFFIXES, parts, strict=True) if t is not None}


def _copies(size: float, at_least: int) -> int:
    """How many copies of `size` bytes come to COLD_BYTES."""
    return max(at_least, min(MAX_COPIES, math.ceil(COLD_BYTES / size)))


def free_bytes(device: torch.device) -> int:
    """Memory that a process may still take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return available or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
