"""The CUDA path on the CPU, up to the driver: Triton's binder is real; its binaries write down what is launched."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.jit import JITFunction

from dsmoe_op import checks, cuda, ops, streams
from dsmoe_op.checks import LAYER_FIELDS
from dsmoe_op.kernels import launch as launch_module

MAIN, ALT = 70, 80


class Launcher:
    """The form of Triton's launcher; 3.6 has no names between `function` and the rest."""

    def __init__(self, log: list[tuple]) -> None:
        self.log = log

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.log.append(((gridX, gridY, gridZ), stream, function, *args))


class Binary:
    """A compiled kernel; `function` says of what, as Triton's own cache would tell binaries apart."""

    packed_metadata = (4, 1, 0)

    def __init__(self, function: object, log: list[tuple]) -> None:
        self.function, self.run = function, Launcher(log)

    def launch_metadata(self, grid, stream, *args):
        return {"grid": grid, "stream": stream}


@pytest.fixture
def log(monkeypatch) -> list[tuple]:
    """Launches, as the driver would get them. Layers are on the CPU in all but name."""
    found: list[tuple] = []

    def warmup(kernel: Any, *args: Any, grid: object, **meta: Any) -> Binary:
        return Binary((kernel.fn.__name__, kinds_of(kernel, args), tuple(sorted(meta.items(), key=str))), found)

    class Lanes:
        handles = {"main": MAIN, "alt": ALT}  # noqa: RUF012

        def wait(self, waiter: str, on: str) -> None:
            found.append((waiter, on))

    monkeypatch.setattr(JITFunction, "warmup", warmup)
    monkeypatch.setattr(launch_module, "INTERPRET", False)
    monkeypatch.setattr(cuda, "_prepare", lambda kind, launch: None)
    monkeypatch.setattr(cuda, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(streams, "lanes", lambda device: Lanes())
    monkeypatch.setattr(streams, "current_handle", lambda device: MAIN)
    monkeypatch.setattr(ops, "_backend", lambda x: cuda)
    monkeypatch.setattr(checks, "_checked", {})
    return found


def kinds_of(kernel: Any, args: tuple[Any, ...]) -> tuple[object, ...]:
    """What Triton specialises a kernel on in its arguments."""
    return tuple(kind_of(param, arg) for param, arg in zip(kernel.params, args, strict=False))


def kind_of(param: Any, value: Any) -> object:
    if isinstance(value, launch_module._DESCRIPTORS):
        return "descriptor", value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)
    if isinstance(value, Tensor):
        return value.dtype, param.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
    if value is None:
        return None
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return width if param.do_not_specialize else (width, value == 1, value % 16 == 0)


def run(x: Tensor, args: dict, *, schedule: str = "dual", entry: Any = ops._moe) -> Any:
    given = {"hidden_states": x, **args}
    tensors = [given.get(name) for name in LAYER_FIELDS]
    return entry(*tensors[:16], args["config"].key, schedule, *tensors[16:])


def plain(value: Any) -> Any:
    """All of a descriptor but its tensor; other values as they are."""
    if isinstance(value, launch_module._DESCRIPTORS):
        return tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    return value


def launches(log: list[tuple]) -> list[tuple]:
    return [entry for entry in log if len(entry) > 2]


_LARGEST_SIZE = 2**20
"""What is larger among a launch's arguments is an address."""


def named(log: list[tuple], tensors: dict[str, Any]) -> list[tuple]:
    """The log with the names of these tensors for their addresses, and "buffer" for others."""
    names = {t.data_ptr(): name for name, t in tensors.items() if isinstance(t, Tensor)}
    return [
        tuple(names.get(a, "buffer") if isinstance(a, int) and a > _LARGEST_SIZE else a for a in entry) for entry in log
    ]
