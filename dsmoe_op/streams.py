"""The side streams, which the field calls alt_stream: one for each device and caller stream, for the process's life.

They are the library's own, not of PyTorch's pool: the pool hands 32 streams out in turn, so a pooled side stream may be
or become the stream that another thread captures or computes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

_AHEAD = 8
"""Streams made together, so that a caller stream first seen inside a capture finds one."""

_lock = threading.Lock()
_free: dict[int, list[torch.cuda.Stream]] = defaultdict(list)
_own: dict[tuple[int, int], torch.cuda.Stream] = {}
_given: dict[tuple[int, int | None], torch.cuda.Stream] = {}


def alt_stream(caller: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of `caller`: what `set_alt_stream` gave, or one of the library's that no other caller has.

    The result equals `caller` only where `set_alt_stream` gave that very stream; the layer then runs serial.
    """
    return _alt_of(caller.device_index, caller.cuda_stream)


def _alt_of(device: int, handle: int) -> torch.cuda.Stream:
    if _given:
        stream = _given.get((device, handle)) or _given.get((device, None))
        if stream is not None:
            return stream
    stream = _own.get((device, handle))
    if stream is not None:
        return stream
    with _lock:
        key = (device, handle)
        if key not in _own:
            if not _free[device]:
                with relaxed_capture():
                    _free[device] = make_streams(device, _AHEAD)
            _own[key] = _free[device].pop()
        return _own[key]


def current_handle(device: int) -> int:
    """The handle of the current stream: what a launch takes."""
    return torch._C._cuda_getCurrentRawStream(device)


class Lanes:
    """The caller's current stream ("main") and its side stream ("alt"), by handle, with the waits between them.

    A wait is an event recorded on the one and waited for on the other, the same two events each time: half the cost of
    wait_stream, which makes a new one. Each event belongs to one stream, so where two threads share both streams, a
    record that comes between the other thread's record and its wait only stands for more work of that same stream.
    """

    __slots__ = ("_events", "_streams", "handles")

    def __init__(self, main: torch.cuda.Stream, alt: torch.cuda.Stream) -> None:
        self.handles = {"main": main.cuda_stream, "alt": alt.cuda_stream}
        self._streams = {"main": main, "alt": alt}
        self._events = {"main": torch.cuda.Event(), "alt": torch.cuda.Event()}

    def wait(self, waiter: str, on: str) -> None:
        """What comes on `waiter` from here on runs after all that was issued on `on` so far."""
        if _is_replaced(torch.cuda.Stream.wait_stream):  # by a server that must see each fork and join
            self._streams[waiter].wait_stream(self._streams[on])
            return
        event = self._events[on]
        event.record(self._streams[on])
        event.wait(self._streams[waiter])


_lanes: dict[tuple[int, int, int], Lanes] = {}


def lanes(device: int) -> Lanes:
    """The lanes of the current stream of `device`."""
    handle = current_handle(device)
    alt = _alt_of(device, handle)
    key = (device, handle, alt.cuda_stream)
    found = _lanes.get(key)
    if found is None:
        with _lock:
            found = _lanes.get(key) or Lanes(torch.cuda.current_stream(device), alt)
            _lanes[key] = found
    return found


@contextlib.contextmanager
def current_stream(handle: int | None) -> Iterator[None]:
    """Makes the stream of that handle PyTorch's current one, on the current device; None leaves it as it is."""
    if handle is None or handle == current_handle(torch.cuda.current_device()):
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        yield


def _is_replaced(wait_stream: Any) -> bool:
    return getattr(wait_stream, "__globals__", None) is not torch.cuda.streams.__dict__


def set_alt_stream(stream: torch.cuda.Stream | None, *, caller: torch.cuda.Stream | None = None) -> None:
    """Lets a server that has a side stream of its own hand it in.

    Threads that share a side stream must not capture and call at the same time: the call would fall into the capture.

    Args:
        stream: used from now on as the side stream on its device; None returns to the library's own.
        caller: only for calls on this stream; default all caller streams of the device (of every device for None).

    Raises:
        ValueError: stream is no CUDA stream, or caller is on another device.
    """
    for name, value in (("stream", stream), ("caller", caller)):
        if value is not None and not isinstance(value, torch.cuda.Stream):
            raise ValueError(f"{name}: expected a torch.cuda.Stream or None, got {type(value).__name__}")
    if stream is None:
        with _lock:
            for key in list(_given):
                if caller is None or key == (caller.device_index, caller.cuda_stream):
                    del _given[key]
        return
    if caller is not None and caller.device_index != stream.device_index:
        raise ValueError(f"caller: expected a stream of device {stream.device_index}, got one of {caller.device_index}")
    with _lock:
        _given[stream.device_index, None if caller is None else caller.cuda_stream] = stream


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """For loading a kernel: a capture in this thread lets through what it would else refuse, such as a module load."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


def make_streams(device: int, count: int) -> list[torch.cuda.Stream]:
    """New streams on `device`, of the highest priority and not ordered with the default stream."""
    cuda = ctypes.CDLL("libcuda.so.1")
    non_blocking = 1
    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()  # a runtime call: it makes the device's context current in this thread
        low, high = ctypes.c_int(), ctypes.c_int()
        _check(cuda.cuCtxGetStreamPriorityRange(ctypes.byref(low), ctypes.byref(high)), "cuCtxGetStreamPriorityRange")
        streams: list[torch.cuda.Stream] = []
        for _ in range(count):
            handle = ctypes.c_void_p()
            error = cuda.cuStreamCreateWithPriority(ctypes.byref(handle), ctypes.c_uint(non_blocking), high)
            _check(error, "cuStreamCreateWithPriority")
            streams.append(torch.cuda.ExternalStream(handle.value, device=device))
    return streams


def _check(error: int, name: str) -> None:
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")
