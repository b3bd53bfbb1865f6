"""Every launch of a small layer once at each of its tiles, for compute-sanitizer to watch: `test_sanitizer_gpu.py`.

    python sanitized_layers.py WHAT FILE [--compile] [--not-persistent]

WHAT is one of LAYERS, or "control" for a kernel that is wrong. FILE gets JSON: how often each launch was issued, and
the names of the kernels. With --compile they are compiled side by side, those of --not-persistent too, and lie in
Triton's cache then.

Inputs are made on the CPU, so that nearly all that runs on the GPU is this library's. Each of a call's buffers is an
allocation of its own here, so that a step out of it is seen.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from gpu import CONFIG, FORMATS, QUANTISED_SIZES, SPLIT, Block, Formats, issuing, schedules_of, with_changed, with_tiles
from layers import error
from torch import Tensor

from dsmoe_op import cuda, dual_stream_moe, dual_stream_moe_unfinalized, finalize, formats, reference, tuning

SIZES = QUANTISED_SIZES  # for 16 bits too: wider than a tile, and no multiple of one
FEW = dict(zip(("gemm1", "gemm2"), tuning._FEW_ROWS_OF_4_BITS, strict=True))
"""Tiles of the products of few rows of four bits."""
LAYERS: dict[str, Formats] = FORMATS | {name: (name, name) for name in formats.FORMATS}
MOST_TOKENS = 1000
LIMIT = 2e-2


def on_the_gpu(t: Any) -> Any:
    return t.cuda() if isinstance(t, Tensor) else t


def tokens(mix: Formats) -> dict[int, tuning.LayerTiles]:
    """The fewest tokens for each of the tiles that a layer can have, in these formats up to MOST_TOKENS; and those."""
    kind = tuning.layer_kind(torch.bfloat16, False, *mix)
    shape = tuning.LayerShape(kind, *(SIZES[name] for name in "HIE"), CONFIG.top_k, SIZES["S"])
    first: dict[tuning.LayerTiles, int] = {}
    for T in range(1, MOST_TOKENS):
        first.setdefault(tuning.layer_choice(shape, T).tiles, T)
    return {T: tiles for tiles, T in first.items()}


class OneCall(NamedTuple):
    T: int
    way: str
    schedule: str
    finalized: bool = True


def calls(mix: Formats) -> Iterator[OneCall]:
    """Each kernel of each tile once. The routing knows of no format and no schedule; dual_shared_main has dual's."""
    for T, tiles in tokens(mix).items():
        yield from every_end([T], mix)
        if tiles.one_launch or tiles.overlaps:  # else dual has what serial has
            yield OneCall(T, "router_weight", "dual")
        if mix == (None, None):
            yield OneCall(T, "router_logits", "dual")
            yield OneCall(T, "topk_ids", "dual")


def every_end(tokens: Iterable[int], mix: Formats) -> Iterator[OneCall]:
    """On one stream, finalized or not."""
    for T, schedule in itertools.product(tokens, schedules_of(mix)):
        if schedule in ("serial", "fused"):
            yield from (OneCall(T, "router_weight", schedule, finalized) for finalized in (True, False))


def apart(kept: list[Tensor]) -> Callable[..., list[Any]]:
    """In place of `cuda._table`: every buffer an allocation of its own, kept in that list."""

    def table(plan: Any, addresses: list[int], workspace: Tensor, outputs: tuple[Tensor, ...]) -> list[Any]:
        buffers = [torch.empty(buffer.nbytes, dtype=torch.uint8, device=workspace.device) for buffer in plan.buffers]
        kept.extend(buffers)
        return [*addresses, *(t.data_ptr() for t in (*buffers, *plan.written(outputs))), *plan.constants]

    return table


def has_4_bits(mix: Formats) -> bool:
    """Whether the routed experts have."""
    return mix[0] is not None and formats.FORMATS[mix[0]].bits == 4


def not_persistent(mix: Formats, tiles: tuning.LayerTiles) -> tuning.LayerTiles:
    """The copy engine stores what a persistent GEMM 2 leaves, and initcheck does not see it. A persistent GEMM 1 stores
    as others do, and so do both products of four bits."""
    shared_gemm2 = tiles.shared_gemm2._replace(persistent=False)
    gemm2 = tiles.gemm2 if has_4_bits(mix) else tiles.gemm2._replace(persistent=False)
    return tiles._replace(gemm2=gemm2, shared_gemm2=shared_gemm2)


def run(mix: Formats) -> None:
    kept: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_table", apart(kept))
        issue(Block(device="cpu", sizes=SIZES, formats=mix), calls(mix), kept)
        with with_tiles(gemm1=SPLIT[0], gemm2=SPLIT[1], one_launch=True):
            issue(Block(device="cpu", sizes=SIZES | {"H": 512}, formats=mix), every_end((1, 3), mix), kept)
        if has_4_bits(mix):  # more steps than buffers, which are filled again
            with with_tiles(**FEW, one_launch=False):
                issue(
                    Block(device="cpu", sizes=SIZES | {"H": 1056}, formats=mix),
                    [OneCall(70, "router_weight", "serial")],
                    kept,
                )


def issue(block: Block, calls: Iterable[OneCall], kept: list[Tensor]) -> None:
    calls = list(calls)
    with choosing({call.T for call in calls}):
        for call in calls:
            x, args = block.inputs(call.T, call.way)
            want = reference.moe(x, **args)
            given = {name: on_the_gpu(t) for name, t in args.items()}
            if call.finalized:
                out = dual_stream_moe(x.cuda(), **given, schedule=call.schedule)
            else:
                pieces = dual_stream_moe_unfinalized(x.cuda(), **given, schedule=call.schedule)
                out = finalize(pieces, config=args["config"])
            torch.cuda.synchronize()
            assert kept, "the launches were not given the buffers that are apart"
            kept.clear()
            assert error(out.cpu(), want) <= LIMIT, call


@contextlib.contextmanager
def choosing(tokens: Iterable[int]) -> Iterator[None]:
    """A first call inside compiles what calls of these sizes choose, and not what those of any size would."""

    def choices(shape: tuning.LayerShape, tables: tuple[tuning.Table, ...] = ()) -> tuple[tuning.Choice, ...]:
        return tuple(dict.fromkeys(tuning.layer_choice(shape, T, tables) for T in sorted(tokens)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "layer_choices", choices)
        yield


@triton.jit
def _wrong(read_ptr, write_ptr, n):
    offset = tl.arange(0, 64)
    tl.store(write_ptr + n + offset, tl.load(read_ptr + offset))


def run_control() -> None:
    """Reads what nobody wrote, and writes right behind a tensor."""
    fresh, short = torch.empty(64, device="cuda"), torch.zeros(64).cuda()
    _wrong[(1,)](fresh, short, 64)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["control", *LAYERS])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--not-persistent", action="store_true")
    options = parser.parse_args()
    if not options.compile:
        cuda._prepare = lambda kind, launch: None  # a kernel that is not launched need not be loaded
    launches: collections.Counter[str] = collections.Counter()
    kernels: set[str] = set()

    def count(launch: Callable[[], None], name: str) -> None:
        launch()
        launches[name] += 1

    def note(module: object, function: object, name: str, *rest: object) -> None:
        kernels.add(name)

    triton.knobs.runtime.kernel_load_start_hook.add(note)
    if options.what == "control":
        run_control()
    else:
        mix = LAYERS[options.what]
        with issuing(count):
            if not options.not_persistent:
                run(mix)
            if options.not_persistent or options.compile:
                with with_changed(lambda tiles: not_persistent(mix, tiles)):
                    run(mix)
    options.file.write_text(json.dumps({"launches": launches, "kernels": sorted(kernels)}))


if __name__ == "__main__":
    main()
