"""torch.export and AOTInductor: saved programs that hold the op and run at any T."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import WAYS, assert_right, make_layer, routing_of
from torch import Tensor, nn

from dsmoe_op import MoEConfig, dual_stream_moe, dual_stream_moe_unfinalized, finalize, route
from dsmoe_op.module import DualStreamMoE

T_ROWS = ("router_logits", "topk_ids", "topk_weights")
SIZES = (7, 2, 64, 1000)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def one_call(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return dual_stream_moe(x, **layer)


def two_calls(x: Tensor, layer: dict[str, Any]) -> Tensor:
    return finalize(dual_stream_moe_unfinalized(x, **layer), config=layer["config"], hidden_states=x)


def routed_apart(x: Tensor, layer: dict[str, Any]) -> Tensor:
    ids, weights = route(x, **routing_of(layer))
    rest = {n: v for n, v in layer.items() if n == "config" or n not in routing_of(layer)}
    return dual_stream_moe(x, **rest, topk_ids=ids, topk_weights=weights)


class Layer(nn.Module):
    """A call whose weights are buffers and whose rows are inputs."""

    def __init__(self, call: Callable[[Tensor, dict[str, Any]], Tensor], layer: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.config = call, layer["config"]
        self.names = [n for n, v in layer.items() if isinstance(v, Tensor) and n not in T_ROWS]
        for name in self.names:
            self.register_buffer(name, layer[name])

    def forward(self, x: Tensor, rows: dict[str, Tensor]) -> Tensor:
        layer = {"config": self.config, **{n: getattr(self, n) for n in self.names}, **rows}
        return self.call(torch.tanh(x), layer) * 2


def rows_of(layer: dict[str, Any]) -> dict[str, Tensor]:
    return {n: layer[n] for n in T_ROWS if n in layer}


def export(module: nn.Module, x: Tensor, rows: dict[str, Tensor]) -> torch.export.ExportedProgram:
    T = torch.export.Dim("T", min=0, max=4096)
    shapes = {"x": {0: T}, "rows": {name: {0: T} for name in rows}}
    return torch.export.export(module, (x, rows), dynamic_shapes=shapes, strict=False)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize(
    ("call", "way"),
    [*((one_call, way) for way in WAYS), (two_calls, "router_weight"), (routed_apart, "router_weight")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_exported_program_runs_at_any_T_after_save_and_load(call, way, device):
    x, layer = make_layer(way=way, device=device)
    module = Layer(call, layer)
    program = saved_and_loaded(export(module, x, rows_of(layer)))
    assert "dsmoe.moe" in program.graph_module.code
    for T in (*SIZES, 1, 0):
        x, other = make_layer(T, way=way, device=device)
        out = program.module()(x, rows_of(other))
        assert torch.equal(out, module(x, rows_of(other)))
        assert_right(out / 2, torch.tanh(x), {**layer, **rows_of(other)})


def test_an_exported_layer_is_one_node_and_keeps_its_weights_as_state(device):
    layer = DualStreamMoE(MoEConfig(top_k=3), 48, 12, 32, shared_intermediate_size=80, device=device)
    x = torch.randn(7, 48, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("T", max=4096)},), strict=False)
    assert len(re.findall(r"torch\.ops\.dsmoe\.", program.graph_module.code)) == 1
    assert set(program.state_dict) == set(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(saved_and_loaded(program).module()(x[:2]), layer(x[:2]))


def test_bad_input_is_refused_while_exporting(device):
    x, layer = make_layer(device=device)
    layer["w2"] = layer["w2"].mT
    with pytest.raises(Exception, match=re.escape("w2: expected [E=12, H=48, I=32], got [12, 32, 48]")):
        export(Layer(one_call, layer), x, {})


def test_an_aoti_package_runs_in_python(tmp_path: Path, cpp, device):
    def run(what: str) -> subprocess.CompletedProcess[str]:
        script = Path(__file__).with_name("aoti_package.py")
        command = [sys.executable, str(script), what, device, str(tmp_path / f"{what}.pt2")]
        return subprocess.run(command, capture_output=True, text=True, cwd=script.parents[1])

    done = run("op")
    if done.returncode < 0 and run("control").returncode < 0:
        pytest.skip("AOTInductor packages crash here, without the op too")
    assert done.returncode == 0, done.stderr[-3000:]
