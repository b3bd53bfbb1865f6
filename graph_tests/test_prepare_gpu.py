"""`prepare` on a GPU: the first call after it compiles and loads nothing."""

from __future__ import annotations

import pytest
import torch
from gpu import CONFIG, FORMATS, capture, needs_gpu
from layers import make_layer, quantized

from dsmoe_op import dual_stream_moe, prepare, streams

pytestmark = needs_gpu


@pytest.mark.parametrize(
    ("schedule", "way", "E", "name"),
    [
        ("serial", "router_weight", 20, "16bit"),
        ("dual", "router_weight", 24, "16bit"),
        ("dual", "topk_ids", 40, "16bit"),
        ("dual_shared_main", "router_logits", 28, "16bit"),
        ("fused", "topk_ids", 36, "16bit"),
        ("dual", "router_weight", 44, "fp8_block"),
        ("dual", "router_weight", 52, "int4+none"),
    ],
)
def test_calls_and_captures_of_any_size_compile_and_load_nothing_after_prepare(
    monkeypatch, schedule, way, E, name
) -> None:
    from triton import knobs

    def layer(T: int) -> tuple[torch.Tensor, dict]:
        # A number of experts that no other test has, so that nothing is compiled yet.
        sizes = {"H": 128, "E": E, "I": 64, "S": 128}
        options = {"config": CONFIG, "dtype": torch.bfloat16, "device": "cuda", "shared_gate": True}
        x, args = make_layer(T, way=way, **options, **sizes)
        return x, quantized(args, *FORMATS[name])

    loaded: list[object] = []
    launched: list[object] = []
    monkeypatch.setattr(knobs.runtime, "kernel_load_start_hook", lambda *args: loaded.append(args))
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", launched.append)
    x, args = layer(3)
    assert prepare(x, **args, schedule=schedule) >= 0
    assert loaded
    assert not launched
    assert streams._own
    loaded.clear()
    for T in (1, 3, 12, 40, 900):
        x, args = layer(T)
        graph, out = capture(lambda x=x, args=args: dual_stream_moe(x, **args, schedule=schedule))
        graph.replay()
        want = dual_stream_moe(x, **args, schedule=schedule)
        assert torch.equal(out, want)
    assert launched
    assert not loaded
