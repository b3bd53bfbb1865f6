"""Decoding as a server does it: batches of fixed sizes on a static KV cache, steps compiled or replayed from a graph.

Needs transformers.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor, Any], Tensor]
"""ids [B, 1], positions [B, 1], cache -> logits [B, V]; writes the cache."""


def plain_step(model: nn.Module) -> Step:
    """One decode step of a causal language model of transformers."""
    cache_name = _cache_name(model)

    def step(ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        out = model(input_ids=ids, position_ids=positions, use_cache=True, **{cache_name: cache})
        return out.logits[:, -1]

    return step


def _cache_name(model: nn.Module) -> str:
    """transformers renamed the argument; only the name that a version has compiles without a break there."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Compiled:
    """A decode step under torch.compile(fullgraph=True), with its compiles counted.

    The batch is marked dynamic, as servers that compile once for all their sizes do. That makes two compiles, since
    torch.compile takes a batch of 1 as a constant.

    Attributes:
        graphs: for each compile, the targets of its dsmoe nodes.
    """

    def __init__(self, step: Step) -> None:
        self.graphs: list[list[str]] = []
        self._marked: set[int] = set()
        self._step = torch.compile(step, fullgraph=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.graphs.append([target for target in targets if target.startswith("dsmoe.")])
        return torch._inductor.compile(graph, example_inputs)

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        if ids.shape[0] > 1 and id(cache) not in self._marked:
            self._marked.add(id(cache))
            for tensor in (ids, positions, *_batched_tensors(cache, ids.shape[0])):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self._step(ids, positions, cache)


def _batched_tensors(cache: Any, batch: int) -> list[Tensor]:
    """Keys, values, states: whatever a cache's layers hold for each row."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for held in vars(layer).values():
            tensors = held.values() if isinstance(held, dict) else (held,)
            found += [t for t in tensors if isinstance(t, Tensor) and t.dim() > 1 and t.shape[0] == batch]
    return found


class Batch:
    """`rows` requests that decode together, under no_grad; their cache is allocated at the first prefill and kept.

    Attributes:
        ids, positions: int64 [rows, 1], the next step's input; each step writes the greedy choice into ids.
    """

    def __init__(self, model: nn.Module, step: Step, rows: int, max_length: int) -> None:
        from transformers import StaticCache

        device = next(model.parameters()).device
        self.model, self.step, self.rows = model, step, rows
        self.ids = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        self._cache_name = _cache_name(model)
        self._fresh = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = self.ids

    def prefill(self, prompts: Tensor) -> Tensor:
        """Reads prompts [rows, P] from position 0 on; the logits [rows, V] of the first new token. Always eager."""
        if not self._fresh:
            self.cache.reset()  # in place: graphs hold its addresses
        self._fresh = False
        P = prompts.shape[1]
        positions = torch.arange(P, device=prompts.device).expand(self.rows, P)
        cache = {self._cache_name: self.cache}
        out = self.model(input_ids=prompts, position_ids=positions, use_cache=True, logits_to_keep=1, **cache)
        self.positions.fill_(P)
        self.ids.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        return out.logits[:, -1]

    def advance(self) -> Tensor:
        """One step; logits [rows, V], valid until the next."""
        if self._graph is None:
            return self._advance()
        self._graph.replay()
        return self._logits

    def _advance(self) -> Tensor:
        logits = self.step(self.ids, self.positions, self.cache)
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.positions.add_(1)
        return logits

    def capture(self, prompts: Tensor, pool: Any) -> None:
        """From now on `advance` replays a CUDA graph of the step, whose memory is of `pool`."""
        self.prefill(prompts)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._logits = self._advance()
        self._graph = graph


class Decoded(NamedTuple):
    """tokens int64 [rows, N]; logits float32 [rows, N, V]; seconds of the N - 1 steps after prefill."""

    tokens: Tensor
    logits: Tensor
    seconds: float


def decode(
    batch: Batch, prompts: Tensor, count: int, *, forced: Tensor | None = None, keep_logits: bool = True
) -> Decoded:
    """`count` new tokens for each of prompts [rows, P], greedily.

    Args:
        prompts: may have fewer rows than the batch: the rest is padded with rows of spaces, which no result includes.
        forced: [rows, count]: these tokens are fed back instead of the model's own, which are still returned.
        keep_logits: False times the steps without copies of the logits, and returns an empty tensor for them.
    """
    rows = prompts.shape[0]
    padded = torch.full((batch.rows, prompts.shape[1]), ord(" "), device=prompts.device)
    padded[:rows] = prompts
    forced_rows = None
    if forced is not None:
        forced_rows = torch.full((batch.rows, count), ord(" "), device=prompts.device)
        forced_rows[:rows] = forced

    tokens, logits = [], []

    def note(step: int, new: Tensor) -> None:
        tokens.append(batch.ids[:rows].clone())
        if keep_logits:
            logits.append(new[:rows].to(torch.float32, copy=True))  # a graph's next replay overwrites them
        if forced_rows is not None:
            batch.ids.copy_(forced_rows[:, step : step + 1])

    note(0, batch.prefill(padded))
    _synchronize(prompts.device)
    begin = time.perf_counter()
    for step in range(1, count):
        note(step, batch.advance())
    _synchronize(prompts.device)
    seconds = time.perf_counter() - begin
    kept = torch.stack(logits, 1) if keep_logits else torch.empty(0)
    return Decoded(torch.cat(tokens, 1), kept, seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
