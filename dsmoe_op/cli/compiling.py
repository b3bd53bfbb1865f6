"""Kernels compiled ahead by processes of their own, one for each core. What they compile, Triton's cache on disk has.

The processes never touch the GPU: they are told what to compile for.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsmoe_op import schedule
from dsmoe_op.checks import LAYER_FIELDS, Dims, Layer
from dsmoe_op.cli.output import CommandError, error_text
from dsmoe_op.cli.plain import Weights
from dsmoe_op.cli.problem import arguments_of, quantise
from dsmoe_op.cli.shapes import Shape
from dsmoe_op.quantizing import WEIGHTS
from dsmoe_op.tuning import LayerTiles, Tile


class OutOfTime(Exception):
    """The budget is spent."""


class Target(NamedTuple):
    """What to compile for, as Triton says."""

    backend: str
    arch: int | str
    warp_size: int


class Job(NamedTuple):
    """One launch of a layer.

    Attributes:
        tile: of a product, or both where one launch makes both; None for other launches, which compile what they need
            at any T.
        early, followed: as in `schedule.Launch`, where launches overlap.
    """

    shape: Shape
    name: str
    tile: Tile | tuple[Tile, Tile] | None
    early: bool = False
    followed: bool = False


class Compiler:
    """Processes that compile jobs, each job once. Close it at the end."""

    def __init__(self, target: Target, workers: int | None = None) -> None:
        self._executor = ProcessPoolExecutor(
            workers or max(1, len(os.sched_getaffinity(0)) - 1),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(target,),
        )
        self._results: dict[Job, Future[str | None]] = {}

    def submit(self, jobs: Iterable[Job]) -> None:
        """Jobs are begun in the order in which they come."""
        for job in jobs:
            if job not in self._results:
                self._results[job] = self._executor.submit(compile_one, job)

    def failures(self, jobs: Iterable[Job], deadline: float) -> dict[Job, str]:
        """Waits for the jobs; why some of them failed.

        Args:
            deadline: of time.monotonic.

        Raises:
            OutOfTime: they take longer.
            CommandError: a process died.
        """
        jobs = list(jobs)
        self.submit(jobs)
        try:
            found = {job: self._results[job].result(max(0.0, deadline - time.monotonic())) for job in jobs}
        except TimeoutError:
            raise OutOfTime from None
        except BrokenProcessPool:
            raise CommandError("a process that compiles kernels died, perhaps for want of memory") from None
        return {job: text for job, text in found.items() if text is not None}

    def close(self) -> None:
        """Waits for the jobs that are under way, and for no others."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def layer_of(x: Tensor, given: Mapping[str, Any], dims: Dims) -> Layer:
    """As kernels take it. given: weights by the op's arguments, as `Problem.tensors` has them."""
    from dsmoe_op import cuda  # needs triton

    layer = Layer(
        hidden_states=x,
        router_bias=None,
        router_logits=None,
        topk_ids=None,
        topk_weights=None,
        w13_bias=None,
        w2_bias=None,
        num_valid_tokens=None,
        expert_map=None,
        **given,
    )
    return cuda._normalised(layer, dims, LAYER_FIELDS)


def dims_of(shape: Shape, T: int) -> Dims:
    return Dims(T, shape.H, shape.E, shape.K, shape.I, shape.S, shape.E)


def all_of(tile: Tile | tuple[Tile, Tile]) -> LayerTiles:
    """Every product with that tile; with two, those of GEMM 1 and GEMM 2 in one launch."""
    one, two = (tile, tile) if isinstance(tile, Tile) else tile
    return LayerTiles(one, two, one, two, overlaps=False, one_launch=not isinstance(tile, Tile))


# --- in a process ---------------------------------------------------------------------------------------------------


class _Driver:
    """What Triton asks a driver for while it compiles."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _start(target: Target) -> None:
    from triton.runtime.driver import driver

    torch.set_num_threads(1)
    driver.set_active(_Driver(target))


def compile_one(job: Job) -> str | None:
    """Why it failed, if it did."""
    from dsmoe_op import kernels

    try:
        with kernels.compiling_only():
            warm_up(job)
    except Exception as error:
        return error_text(error)
    return None


def warm_up(job: Job) -> None:
    """Compiles it, on tensors without memory."""
    from dsmoe_op import kernels, launches

    dims = dims_of(job.shape, 4)
    layer = _without_memory(job.shape, dims)
    tiles = all_of(job.tile or Tile(16, 16, 16, 4, 2))
    specs = [spec for some in launches.buffer_specs(layer, dims, job.shape.config, tiles, True) for spec in some]
    buffers = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in specs}
    call = launches.Call(layer, dims, job.shape.config, buffers, tiles, False)
    call.warmup = True
    coded_h = schedule.coded_h(job.shape.config, has_shared=dims.S > 0)
    with kernels.overlapping(job.early, job.followed):
        for call.coded_h in dict.fromkeys((frozenset(), frozenset(coded_h))):
            call.issue(job.name)
            if not job.name.endswith("gemm2"):
                break


def ordered(shape: Shape, tiles: LayerTiles) -> frozenset[str]:
    """As `launches.ordered` says of a layer of this shape."""
    from dsmoe_op import launches

    dims = dims_of(shape, 4)
    return launches.ordered(_without_memory(shape, dims), dims, shape.config, tiles)


@functools.lru_cache(maxsize=4)
def _without_memory(shape: Shape, dims: Dims) -> Layer:
    def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    H, I, E, S = shape.H, shape.I, shape.E, shape.S
    weights = Weights(
        router_weight=tensor(E, H),
        correction_bias=tensor(E, dtype=torch.float32) if shape.correction_bias else None,
        w13=tensor(E, 2 * I, H),
        w2=tensor(E, H, I),
        shared_w13=tensor(2 * S, H) if S else None,
        shared_w2=tensor(H, S) if S else None,
        shared_gate=tensor(1, H) if S and shape.shared_gate else None,
    )
    given: dict[str, Any] = weights._asdict()
    for name, weight in weights._asdict().items():
        format = shape.config.format_of(name) if name in WEIGHTS else None
        if format is not None and weight is not None:
            given |= arguments_of(name, quantise(name, format, weight, shape.config.halves(name)))
    return layer_of(tensor(dims.T, H), given, dims)
