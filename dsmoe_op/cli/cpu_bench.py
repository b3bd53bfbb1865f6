"""`python -m dsmoe_op.cli.cpu_bench`: the CPU kernel beside blocks of Hugging Face transformers on the same weights.

Every way in which transformers can run a block's experts is timed, and the fastest of them counts. Calls are
interleaved in an order shuffled anew each round, each on an input drawn at random, so that none always follows the one
that leaves the best caches behind. A time is the median of its calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsmoe_op.cli import arguments
from dsmoe_op.module import DualStreamMoE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {
    "deepseek_v3": {"H": 1024, "I": 512, "E": 64, "K": 8, "S": 512},
    "qwen3_next": {"H": 2048, "I": 512, "E": 64, "K": 10, "S": 512},
    "deepseek_v3_many_experts": {"H": 1024, "I": 256, "E": 256, "K": 8, "S": 256},
}
HF_WAYS = ("eager", "grouped_mm", "batched_mm")
BATCHED_LIMIT = 1 << 30
"""Bytes of weights that transformers' batched_mm may copy for a call; beyond them it is left out."""
INPUTS = 64
MIN_CALLS, MAX_CALLS = 15, 300


def make_block(shape: str) -> nn.Module:
    """A block of transformers with its weights not yet set."""
    H, I, E, K, S = SHAPES[shape].values()
    if shape == "qwen3_next":
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

        return qwen3_next.Qwen3NextSparseMoeBlock(
            qwen3_next.Qwen3NextConfig(
                hidden_size=H,
                moe_intermediate_size=I,
                num_experts=E,
                num_experts_per_tok=K,
                shared_expert_intermediate_size=S,
            )
        )
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

    return deepseek_v3.DeepseekV3MoE(
        deepseek_v3.DeepseekV3Config(
            hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=K, n_shared_experts=S // I
        )
    )


def hf_way(block: Any, way: str) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        block.experts.config._experts_implementation = way
        return block(x)

    return call


def time_cell(ways: dict[str, Callable[[Tensor], Tensor]], inputs: list[Tensor], seconds: float) -> dict[str, float]:
    """Median microseconds of each way, and "calls": at least MIN_CALLS, then more until `seconds` are over."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for x in inputs[:2]:
        for call in ways.values():
            call(x)
    end = time.perf_counter() + seconds
    calls = 0
    while calls < MIN_CALLS or (calls < MAX_CALLS and time.perf_counter() < end):
        for name in random.sample(list(ways), len(ways)):
            x = random.choice(inputs)
            start = time.perf_counter()
            ways[name](x)
            times[name].append((time.perf_counter() - start) * 1e6)
        calls += 1
    return {name: statistics.median(t) for name, t in times.items()} | {"calls": calls}


@torch.inference_mode()
def measure(
    shapes: Sequence[str], dtypes: Sequence[str], tokens: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    cells = []
    bar = tqdm(total=len(shapes) * len(dtypes) * len(tokens), file=sys.stderr)
    for shape in shapes:
        dims = SHAPES[shape]
        for dtype in dtypes:
            block = make_block(shape).to(DTYPES[dtype])
            for parameter in block.parameters():
                parameter.uniform_(-0.05, 0.05)
            ours = DualStreamMoE.from_transformers(block)
            for T in tokens:
                copied = T * dims["K"] * 3 * dims["H"] * dims["I"] * DTYPES[dtype].itemsize
                hf = [way for way in HF_WAYS if way != "batched_mm" or copied <= BATCHED_LIMIT]
                inputs = [torch.randn(1, T, dims["H"], dtype=DTYPES[dtype]) for _ in range(INPUTS)]
                median = time_cell({"ours": ours, **{way: hf_way(block, way) for way in hf}}, inputs, seconds)
                best = min(hf, key=median.__getitem__)
                cells.append(
                    {"shape": shape, "dtype": dtype, "T": T, "calls": median.pop("calls"), "fastest_hf": best}
                    | {f"{way}_us": round(us, 1) for way, us in median.items()}
                    | {"ratio": round(median["ours"] / median[best], 3)}
                )
                tqdm.write(json.dumps(cells[-1]), file=sys.stderr)
                bar.update()
    bar.close()
    return cells


def cpu_name() -> str:
    """The model's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dsmoe_op.cli.cpu_bench", description=__doc__.split("\n")[0])
    shapes, dtypes = arguments.some_of(list(SHAPES)), arguments.some_of(list(DTYPES))
    parser.add_argument("--shapes", type=shapes, default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--dtypes", type=dtypes, default=["fp32", "bf16"], help=",".join(DTYPES))
    parser.add_argument("--tokens", type=arguments.integers(1, 1 << 20), default=(1, 4, 16, 64, 256, 1024))
    parser.add_argument("--threads", type=arguments.integer(1, 1024), help="default: as torch is set")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape, dtype and T (default 3)")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    import transformers

    cells = measure(args.shapes, args.dtypes, args.tokens, args.seconds)
    report = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average_after": os.getloadavg(),
        "shapes": {name: SHAPES[name] for name in args.shapes},
        "unit": "median microseconds a call; ratio: ours / the fastest way of transformers",
        "worst_ratio_below_64_tokens": max((c["ratio"] for c in cells if c["T"] < 64), default=None),
        "worst_ratio_from_64_tokens": max((c["ratio"] for c in cells if c["T"] >= 64), default=None),
    }
    print(json.dumps(report)[:-1] + ', "cells": [\n' + ",\n".join(map(json.dumps, cells)) + "\n]}")


if __name__ == "__main__":
    main()
