"""The table of side streams, with a factory that makes fakes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import defaultdict
from typing import ClassVar

import pytest
import torch

from dsmoe_op import streams


@dataclasses.dataclass(frozen=True)
class FakeStream:
    device_index: int
    cuda_stream: int


class Table:
    """An empty table, and what was made for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[FakeStream] = []
        self.batches = 0
        self.relaxed = False

        @contextlib.contextmanager
        def relaxed_capture():
            self.relaxed = True
            yield
            self.relaxed = False

        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(streams, "relaxed_capture", relaxed_capture)
        monkeypatch.setattr(streams, "make_streams", self.make)
        monkeypatch.setattr(streams, "_free", defaultdict(list))
        monkeypatch.setattr(streams, "_own", {})
        monkeypatch.setattr(streams, "_given", {})
        monkeypatch.setattr(streams, "_lanes", {})

    def make(self, device: int, count: int) -> list[FakeStream]:
        assert self.relaxed, "a capture would refuse to make a stream"
        self.batches += 1
        new = [FakeStream(device, 10_000 + len(self.made) + i) for i in range(count)]
        self.made += new
        return list(new)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def callers(count: int, device: int = 0) -> list[FakeStream]:
    return [FakeStream(device, handle) for handle in range(count)]  # handle 0 is the default stream


def test_a_caller_keeps_its_side_stream(table) -> None:
    first = [streams.alt_stream(caller) for caller in callers(5)]
    assert [streams.alt_stream(caller) for caller in callers(5)] == first


def test_no_two_callers_share_a_side_stream(table) -> None:
    assert len({streams.alt_stream(caller) for caller in callers(50)}) == 50


def test_two_handles_of_one_stream_are_one_caller(table) -> None:
    assert streams.alt_stream(FakeStream(0, 5)) is streams.alt_stream(FakeStream(0, 5))


def test_a_side_stream_is_never_its_caller(table) -> None:
    for caller in callers(20):
        alt = streams.alt_stream(caller)
        assert alt.cuda_stream != caller.cuda_stream
        assert streams.alt_stream(alt).cuda_stream != alt.cuda_stream  # a layer inside another's side branch


def test_a_side_stream_is_on_its_callers_device(table) -> None:
    for device in (0, 1, 3):
        assert {streams.alt_stream(caller).device_index for caller in callers(3, device)} == {device}


def test_streams_are_made_ahead_so_that_a_caller_first_seen_in_a_capture_finds_one(table) -> None:
    for caller in callers(4):
        streams.alt_stream(caller)
    assert table.batches == 1


def test_threads_that_arrive_together_get_streams_of_their_own(table) -> None:
    gate, found = threading.Barrier(16), []

    def ask(caller: FakeStream) -> None:
        gate.wait()
        found.append((caller, streams.alt_stream(caller)))

    threads = [threading.Thread(target=ask, args=(caller,)) for caller in callers(8) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == len({alt for _, alt in found}) == 8


def test_a_servers_own_stream_serves_every_caller_of_its_device(table) -> None:
    server = FakeStream(1, 99)
    streams.set_alt_stream(server)
    assert {streams.alt_stream(caller) for caller in callers(3, device=1)} == {server}
    assert server not in {streams.alt_stream(caller) for caller in callers(3, device=0)}


def test_a_servers_own_stream_for_one_caller_leaves_the_others(table) -> None:
    mine, other = callers(2)
    usual = streams.alt_stream(other)
    server, one = FakeStream(0, 98), FakeStream(0, 99)
    streams.set_alt_stream(one, caller=mine)
    assert (streams.alt_stream(mine), streams.alt_stream(other)) == (one, usual)
    streams.set_alt_stream(server)
    assert (streams.alt_stream(mine), streams.alt_stream(other)) == (one, server)


def test_a_servers_own_stream_may_be_the_callers(table) -> None:
    (caller,) = callers(1)
    streams.set_alt_stream(caller)
    assert streams.alt_stream(caller) == caller


def test_none_returns_to_the_librarys_own_streams(table) -> None:
    mine, other = callers(2)
    usual = [streams.alt_stream(mine), streams.alt_stream(other)]
    streams.set_alt_stream(FakeStream(0, 98), caller=mine)
    streams.set_alt_stream(FakeStream(0, 99), caller=other)
    streams.set_alt_stream(None, caller=mine)
    assert [streams.alt_stream(mine), streams.alt_stream(other)] == [usual[0], FakeStream(0, 99)]
    streams.set_alt_stream(None)
    assert [streams.alt_stream(mine), streams.alt_stream(other)] == usual


def test_what_is_no_stream_is_refused(table) -> None:
    with pytest.raises(ValueError, match=r"stream: expected a torch\.cuda\.Stream or None, got int"):
        streams.set_alt_stream(3)
    with pytest.raises(ValueError, match=r"caller: expected a torch\.cuda\.Stream or None, got str"):
        streams.set_alt_stream(FakeStream(0, 1), caller="default")


def test_a_stream_of_another_device_than_its_caller_is_refused(table) -> None:
    with pytest.raises(ValueError, match="caller: expected a stream of device 1, got one of 0"):
        streams.set_alt_stream(FakeStream(1, 1), caller=FakeStream(0, 2))


def test_a_refused_stream_changes_nothing(table) -> None:
    (caller,) = callers(1)
    usual = streams.alt_stream(caller)
    with pytest.raises(ValueError, match="caller"):
        streams.set_alt_stream(FakeStream(1, 1), caller=caller)
    assert streams.alt_stream(caller) == usual


class FakeEvent:
    """Stands for all that was issued on a stream when it was recorded last."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self) -> None:
        self.recorded: list[object] = []
        self.made.append(self)

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def wait(self, stream: object) -> None:
        LOG.append((stream, self.recorded[-1]))


LOG: list[tuple[object, object]] = []


@pytest.fixture
def lanes_of(table, monkeypatch):
    """The lanes of a caller."""
    LOG.clear()
    FakeEvent.made.clear()

    def lanes(caller: FakeStream) -> streams.Lanes:
        monkeypatch.setattr(streams, "current_handle", lambda device: caller.cuda_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
        return streams.lanes(caller.device_index)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(streams, "_is_replaced", lambda wait_stream: False)
    monkeypatch.setattr(FakeStream, "wait_stream", None, raising=False)
    return lanes


def test_lanes_are_the_caller_and_its_side_stream(lanes_of) -> None:
    for caller in callers(4, device=1):
        assert lanes_of(caller).handles == {"main": caller.cuda_stream, "alt": streams.alt_stream(caller).cuda_stream}


def test_waits_record_what_is_waited_for_each_time_and_make_no_events(lanes_of) -> None:
    (caller,) = callers(1)
    alt = streams.alt_stream(caller)
    for _ in range(3):
        lanes = lanes_of(caller)
        lanes.wait("alt", "main")
        lanes.wait("main", "alt")
    assert LOG[:] == [(alt, caller), (caller, alt)] * 3
    assert len(FakeEvent.made) == 2


def test_an_event_belongs_to_one_stream(lanes_of) -> None:
    """So that a record of another thread, on the same streams, stands for no less than this thread's."""
    for caller in callers(3):
        for _ in range(2):
            lanes_of(caller).wait("alt", "main")
            lanes_of(caller).wait("main", "alt")
    assert [len(set(event.recorded)) for event in FakeEvent.made] == [1] * 6


def test_lanes_follow_a_servers_own_stream(lanes_of) -> None:
    (caller,) = callers(1)
    usual = lanes_of(caller).handles["alt"]
    streams.set_alt_stream(FakeStream(0, 99))
    assert lanes_of(caller).handles["alt"] == 99
    streams.set_alt_stream(None)
    assert lanes_of(caller).handles["alt"] == usual


def test_a_server_that_replaced_wait_stream_sees_each_fork_and_join(monkeypatch) -> None:
    seen: list[tuple[object, object]] = []
    main, alt = callers(2)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    lanes = streams.Lanes(main, alt)
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: seen.append((self, other)))
    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: seen.append((self, other)), raising=False)
    lanes.wait("alt", "main")
    lanes.wait("main", "alt")
    assert seen == [(alt, main), (main, alt)]


def test_pytorchs_own_wait_stream_is_known_as_such() -> None:
    assert not streams._is_replaced(torch.cuda.Stream.wait_stream)
