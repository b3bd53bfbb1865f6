"""Triton launches on the current device: every entry of the CUDA path makes that the tensors' device first."""

from __future__ import annotations

import contextlib

import pytest
import torch
from layers import make_layer, routing_of

from dsmoe_op import checks, cuda
from dsmoe_op.checks import LAYER_FIELDS, Layer


class Devices:
    """Two devices that exist in name alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.entered: list[int] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextlib.contextmanager
    def device(self, device: torch.device):
        before, self.current = self.current, torch.device(device).index
        self.entered.append(self.current)
        yield
        self.current = before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def test_another_device_is_current_inside_alone(devices) -> None:
    with cuda._on_device(torch.device("cuda", 1)):
        assert devices.current == 1
    assert devices.current == 0


def test_the_current_device_is_left_as_it_is(devices) -> None:
    with cuda._on_device(torch.device("cuda", 0)):
        assert devices.current == 0
    assert devices.entered == []


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each launch or run of a schedule, whether the guard was on."""
    inside: list[bool] = []
    on = [False]

    @contextlib.contextmanager
    def guard(device: torch.device):
        on[0] = True
        yield
        on[0] = False

    def launch(*args: object, **kwargs: object) -> None:
        inside.append(on[0])

    monkeypatch.setattr(cuda, "_on_device", guard)
    monkeypatch.setattr(cuda, "_prepare", lambda kind, launch: launch(warmup=True))
    monkeypatch.setattr(cuda.schedules, "execute", launch)
    for name in (
        "router_logits", "choose", "order_rows", "zero_counters", "gemm1", "gemm2", "experts", "shared_gate",
        "finalize",
    ):  # fmt: skip
        monkeypatch.setattr(cuda.kernels, name, launch)
    return inside


def make_call(**options: object) -> tuple[Layer, checks.Checked, dict]:
    x, args = make_layer(shared_gate=True, **options)
    config = args["config"]
    layer = Layer(**{name: {"hidden_states": x, **args}.get(name) for name in LAYER_FIELDS})
    return layer, checks.Checked(checks.check_layer(layer, config), config, "dual"), args


@pytest.mark.parametrize("entry", [cuda.moe, cuda.moe_unfinalized])
def test_a_layer_runs_under_the_guard(guarded, entry) -> None:
    layer, called, _ = make_call()
    entry(layer, called)
    assert guarded == [True] * len(guarded)
    assert len(guarded) > 2 * 8  # each kernel loaded and bound, and the run


def test_route_launches_under_the_guard(guarded) -> None:
    layer, called, args = make_call()
    tensors = {name: t for name, t in routing_of(args).items() if name != "config"}
    routing = checks.Routing(layer.hidden_states, **{**dict.fromkeys(checks.Routing._fields[1:]), **tensors})
    cuda.route(routing, called.dims.T, called.dims.E, args["config"])
    assert guarded == [True] * 4  # two kernels, each loaded and launched


def test_finalize_launches_under_the_guard(guarded) -> None:
    layer, called, args = make_call()
    y, ids, weights, row_of, shared = cuda.moe_unfinalized(layer, called)
    guarded.clear()
    cuda.finalize(y, ids, weights, row_of, shared, None, args["config"])
    assert guarded == [True] * 2  # the kernel, loaded and launched
