"""`python -m dsmoe_op.cli.host_bench`: where the host's time of one eager call goes.

Each part is timed alone, as the median over batches of calls; the device's queue is emptied between batches and not
within one. Parts that contain others are marked by their indentation. On the CPU there is no launch to time, and the
layer's arithmetic is left out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsmoe_op import DualStreamMoE, MoEConfig, checks, dual_stream_moe, ops
from dsmoe_op import schedule as schedules
from dsmoe_op.cli import arguments, output
from dsmoe_op.streams import Lanes

BATCH = 50
"""Calls between two waits for the device: few enough that its queue of launches does not fill up."""

Part = tuple[str, Callable[[], Any]]


def parts(module: DualStreamMoE, x: Tensor) -> Iterator[Part]:
    """The parts of a call of `module` on x; names are indented under what contains them."""
    given, config, schedule = module.tensors(), module.config, module.schedule
    tensors = (x, *(given.get(name) for name in checks.LAYER_FIELDS[1:16]))
    args = (*tensors, config.key, schedule)
    op = torch.ops.dsmoe.moe_v1.default

    yield "DualStreamMoE", lambda: module(x)
    yield "  dual_stream_moe", lambda: dual_stream_moe(x, config=config, schedule=schedule, **given)
    yield "    op, in inference mode", lambda: op(*args)
    yield "      its kernel", lambda: ops._moe(*args)
    yield "        checks and lookup", lambda: ops._checked(args)
    yield "        output", lambda: x.new_empty(x.shape)
    if x.device.type == "cuda":
        yield from _cuda_parts(x, args)


def _cuda_parts(x: Tensor, args: tuple[Any, ...]) -> Iterator[Part]:
    from dsmoe_op import cuda, streams  # triton may be missing where there is no GPU

    layer, call = ops._checked(args)
    out = x.new_empty(x.shape)
    cuda.moe(layer, call)
    plan = cuda._plan_of(layer, call, cuda._addresses(layer), finalized=True)
    lanes, index = streams.lanes(x.device.index), x.device.index
    yield "        run", lambda: cuda._run(layer, call, (out,))
    yield "          plan", lambda: cuda._plan_of(layer, call, cuda._addresses(layer), finalized=True)
    yield "          workspace", lambda: torch.empty(plan.size, dtype=torch.uint8, device=x.device)
    yield "          side stream", lambda: streams.lanes(index)
    if any(isinstance(step, schedules.Wait) for step in plan.steps):
        yield "          fork and join", functools.partial(_fork_and_join, lanes)

    # Real launches, on the buffers of a whole call: what a launch alone reads is what that call wrote.
    workspace = torch.zeros(plan.size, dtype=torch.uint8, device=x.device)
    table = cuda._table(plan, cuda._addresses(layer), workspace, (out,))
    schedules.execute(plan.steps, functools.partial(plan.issue, table), x.device)
    for step in plan.steps:
        if isinstance(step, schedules.Launch):
            stream = lanes.handles[step.stream]
            yield f"          launch {step.name}", functools.partial(plan.issue, table, step.name, stream)


def _fork_and_join(lanes: Lanes) -> None:
    lanes.wait("alt", "main")
    lanes.wait("main", "alt")


def microseconds(fn: Callable[[], Any], batches: int, synchronize: Callable[[], None]) -> float:
    """Median over batches of the time of a call."""
    times = []
    for i in range(batches + 2):
        synchronize()
        start = time.perf_counter()
        for _ in range(BATCH):
            fn()
        if i >= 2:
            times.append((time.perf_counter() - start) / BATCH)
    synchronize()
    return statistics.median(times) * 1e6


def measure(
    *, device: torch.device, tokens: int, schedule: str, batches: int, sizes: Sequence[int] = (2048, 1024, 64, 512, 8)
) -> list[dict[str, Any]]:
    """Rows of part and microseconds. Sizes: H, I, E, S, K."""
    H, I, E, S, K = sizes
    on_cuda = device.type == "cuda"
    module = DualStreamMoE(
        MoEConfig(top_k=K, routed_scaling_factor=2.5),
        H,
        E,
        I,
        shared_intermediate_size=S,
        correction_bias=True,
        dtype=torch.bfloat16,
        device=device,
        schedule=schedule,
    )
    x = torch.randn(tokens, H, dtype=torch.bfloat16, device=device)
    synchronize = (lambda: torch.cuda.synchronize(device)) if on_cuda else (lambda: None)
    backend = ops._backend
    if not on_cuda:
        out = torch.empty_like(x)
        ops._backend = lambda x: SimpleNamespace(moe=lambda layer, call: out)  # type: ignore[assignment, return-value]
    try:
        with torch.inference_mode():
            return [
                {"part": name, "microseconds": round(microseconds(fn, batches, synchronize), 2)}
                for name, fn in parts(module, x)
            ]
    finally:
        ops._backend = backend


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m dsmoe_op.cli.host_bench", description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=arguments.device, default=default, help=f"default {default}")
    parser.add_argument("--tokens", type=arguments.integer(1, 1 << 16), default=1, help="default 1")
    parser.add_argument("--schedule", choices=checks.SCHEDULES, default="dual", help="default dual")
    parser.add_argument(
        "--batches", type=arguments.integer(1, 10_000), default=40, help=f"of {BATCH} calls; default 40"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    args = parser.parse_args(argv)
    device = arguments.device(args.device) if isinstance(args.device, str) else args.device
    rows = measure(device=device, tokens=args.tokens, schedule=args.schedule, batches=args.batches)
    if args.json:
        about = {"torch": torch.__version__, "device": str(device), "T": args.tokens, "schedule": args.schedule}
        output.print_json({**about, "rows": rows})
    else:
        print(output.table(("part", "us"), [(row["part"], row["microseconds"]) for row in rows]))


if __name__ == "__main__":
    main()
