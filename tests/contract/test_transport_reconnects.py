"""A sender that has opened another channel while its old one was half dead: how that ends is no affair of the new one."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markers import needs_vm_readv
from transport_kit import (
    IO_TIMEOUT_S,
    NEXT_KEY,
    WAIT_S,
    Bytes,
    End,
    RawSender,
    await_first_byte,
    cut,
    noise,
    shm,
    tcp,
    untouched,
)

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Route, RouteLost, SinkQuiet

KINDS = ["tcp", pytest.param("shm", marks=needs_vm_readv)]
FRAME_BYTES = 6_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(29)


@pytest.fixture(params=KINDS)
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[End]:
    """Who is sent to, over either medium."""
    made = End(tcp("boot-2") if request.param == "tcp" else shm(tmp_path / "b.sock", "boot-2"))
    yield made
    assert made.transport.close(WAIT_S)


def channel(far: End, link_id: int) -> RawSender:
    return RawSender(far.transport.endpoint, link_id=link_id).accepted()  # type: ignore[attr-defined]


def sink(far: End, sink_id: int, rng: np.random.Generator) -> Bytes:
    memory = untouched(FRAME_BYTES)
    slices = cut(memory, rng, 7)
    far.expect(sink_id, lambda layer, first_block: slices)
    return memory


def send(far: End, raw: RawSender, sink_id: int, source: Bytes) -> Status:
    if far.transport.endpoint.startswith("unix:"):  # type: ignore[attr-defined]
        raw.by_address(sink_id, cut(source, np.random.default_rng(1), 3))
    else:
        raw.header(sink_id, len(source))
        raw.sock.sendall(source.tobytes())
    return raw.ack().status


def lost_sinks(far: End, count: int) -> set[int]:
    """Sinks that the latest of so many losses names."""
    lost = far.wait(RouteLost, count)
    assert len(lost) == count and all((one.node, one.boot_id, one.inbound) == ("a", "boot-1", True) for one in lost)
    return set(lost[-1].sink_ids)


def test_a_channel_that_breaks_late_ends_only_what_came_over_it(far: End, rng: np.random.Generator) -> None:
    source, memories = noise(rng, FRAME_BYTES), {number: sink(far, number, rng) for number in (1, 2, 3)}
    old = channel(far, 7)
    assert send(far, old, 1, source) is Status.APPLIED
    new = channel(far, 8)
    assert send(far, new, 2, source) is Status.APPLIED
    old.reset()
    assert lost_sinks(far, 1) == {1}
    assert send(far, new, 3, source) is Status.APPLIED
    assert all((memory == source).all() for memory in memories.values())
    assert len(far.wait(Received, 3)) == 3 and len(far.of(RouteLost)) == 1
    new.reset()
    assert lost_sinks(far, 2) == {2, 3}


def test_a_channel_that_breaks_before_the_next_is_there_ends_nothing_that_waits_for_it(
    far: End, rng: np.random.Generator
) -> None:
    """The request is there, its first frame is not: it will come over another channel."""
    source, memory = noise(rng, FRAME_BYTES), sink(far, 1, rng)
    channel(far, 7).reset()
    assert lost_sinks(far, 1) == set()
    new = channel(far, 8)
    assert send(far, new, 1, source) is Status.APPLIED
    assert (memory == source).all()
    new.close()


def test_all_connections_of_a_channel_are_named_by_the_first_that_breaks(far: End, rng: np.random.Generator) -> None:
    source = noise(rng, FRAME_BYTES)
    for number in (1, 2, 3):
        sink(far, number, rng)
    first, second, other = channel(far, 7), channel(far, 7), channel(far, 8)
    for number, raw in enumerate((first, second, other), 1):
        assert send(far, raw, number, source) is Status.APPLIED
    first.reset()
    assert lost_sinks(far, 1) == {1, 2}
    assert send(far, other, 3, source) is Status.REFUSED, "that layer was there already"
    second.reset()
    other.reset()
    assert lost_sinks(far, 2) == {3}


def test_a_sink_that_was_forgotten_is_not_named(far: End, rng: np.random.Generator) -> None:
    source = noise(rng, FRAME_BYTES)
    sink(far, 1, rng)
    sink(far, 2, rng)
    old = channel(far, 7)
    assert [send(far, old, number, source) for number in (1, 2)] == [Status.APPLIED] * 2
    far.transport.forget(1)
    far.wait(SinkQuiet, 1)
    old.reset()
    assert lost_sinks(far, 1) == {2}


def test_what_an_old_channel_left_in_mid_frame_is_not_written_on(receiver: End, rng: np.random.Generator) -> None:
    """The old one stands in mid-frame while the new one works; its layer is free when it has broken."""
    source, begun = noise(rng, FRAME_BYTES), sink(receiver, 1, rng)
    old = channel(receiver, 7)
    old.header(1, FRAME_BYTES)
    old.sock.sendall(b"\x01" * (FRAME_BYTES // 2))
    await_first_byte(begun)
    new, other = channel(receiver, 8), sink(receiver, 2, rng)
    assert send(receiver, new, 2, source) is Status.APPLIED
    old.reset()
    assert lost_sinks(receiver, 1) == {1}
    assert send(receiver, new, 1, source) is Status.APPLIED
    assert (begun == source).all() and (other == source).all()
    new.close()


class Relay:
    """A way of TCP that can stop carrying: what was sent over its connections by then goes nowhere, and nobody is told."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop, self._stopped = socket.socketpair()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._stuck: list[tuple[socket.socket, socket.socket]] = []
        self.lock = threading.Lock()
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def strand(self) -> None:
        """Connections carry nothing from now on; new ones do."""
        with self.lock:
            self._stuck += self._pairs
            self._pairs = []

    def reset(self) -> None:
        """The far ends of the stranded connections learn that they are broken."""
        for pair in self._stuck:
            for sock in pair:
                sock.close()

    def close(self) -> None:
        self._stop.close()
        self._thread.join(WAIT_S)
        for sock in (self._listener, self._stopped, *(sock for pair in self._pairs + self._stuck for sock in pair)):
            sock.close()

    def _run(self) -> None:
        while True:
            with self.lock:
                pairs = list(self._pairs)
            ends = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
            ready = select.select([self._listener, self._stopped, *ends], [], [], 0.02)[0]
            if self._stopped in ready:
                return
            with self.lock:
                self._carry([sock for sock in ready if sock in ends and self._carries(sock)], ends)
                if self._listener in ready:
                    self._pairs.append((self._listener.accept()[0], socket.create_connection(self._to, WAIT_S)))

    def _carries(self, sock: socket.socket) -> bool:
        return any(sock in pair for pair in self._pairs)

    def _carry(self, ready: list[socket.socket], ends: dict[socket.socket, socket.socket]) -> None:
        for sock in ready:
            with contextlib.suppress(OSError):
                found = sock.recv(1 << 16)
                if found:
                    ends[sock].sendall(found)
                else:
                    self._pairs = [pair for pair in self._pairs if sock not in pair]
                    sock.close()
                    ends[sock].close()


@pytest.fixture
def relay(receiver: End) -> Iterator[Relay]:
    made = Relay(receiver.transport.endpoint)  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.mark.parametrize("connections", [1, 3])
def test_a_sender_that_has_found_a_new_way_is_not_disturbed_by_the_end_of_the_old_one(
    receiver: End, relay: Relay, rng: np.random.Generator, connections: int
) -> None:
    source, memories = noise(rng, FRAME_BYTES), {number: sink(receiver, number, rng) for number in (1, 2, 3)}
    sender = End(tcp("boot-1", io_timeout_s=IO_TIMEOUT_S, connections=connections))
    route = Route("b", "boot-2", relay.endpoint, b"k" * 31 + b"\x01")
    slices = cut(source, rng, 5)
    assert sender.sent(sender.send(route, 1, 0, slices)).reason is Reason.OK
    relay.strand()
    assert sender.sent(sender.send(route, 1, 1, slices)).reason is Reason.PEER_LOST
    assert not sender.wait(RouteLost, 1)[0].inbound
    assert sender.sent(sender.send(route, 2, 0, slices)).reason is Reason.OK
    assert receiver.of(RouteLost) == [], "the old channel's end is not known here yet"
    relay.reset()
    assert lost_sinks(receiver, 1) == {1}
    assert sender.sent(sender.send(route, 3, 0, slices)).reason is Reason.OK
    assert all((memory == source).all() for memory in memories.values())
    assert len(sender.of(RouteLost)) == 1 == len(receiver.of(RouteLost))
    assert sender.transport.close(WAIT_S)


def test_what_was_dialled_before_the_last_hello_carries_nothing_more(
    receiver: End, relay: Relay, rng: np.random.Generator
) -> None:
    """A network that was cut for a while keeps it from the sender that its idle connection is over at the other end."""
    source, memories = noise(rng, FRAME_BYTES), {number: sink(receiver, number, rng) for number in (1, 2, 3)}
    sender = End(tcp("boot-1", io_timeout_s=IO_TIMEOUT_S))
    before = Route("b", "boot-2", relay.endpoint, b"k" * 31 + b"\x01")
    slices = cut(source, rng, 5)
    assert sender.sent(sender.send(before, 1, 0, slices)).reason is Reason.OK
    relay.strand()
    greeted_anew = replace(before, key=NEXT_KEY[:-1] + b"\x01")
    for number in (2, 3):
        assert sender.sent(sender.send(greeted_anew, number, 0, slices)).reason is Reason.OK
    assert all((memory == source).all() for memory in memories.values())
    assert sender.of(RouteLost) == [], "nobody relied on what was there before"
    assert sender.transport.close(WAIT_S)


def test_what_is_under_way_when_a_route_is_greeted_anew_ends(
    receiver: End, relay: Relay, rng: np.random.Generator
) -> None:
    source = noise(rng, FRAME_BYTES)
    for number in (1, 2, 3):
        sink(receiver, number, rng)
    sender = End(tcp("boot-1", io_timeout_s=WAIT_S))
    before = Route("b", "boot-2", relay.endpoint, b"k" * 31 + b"\x01")
    slices = cut(source, rng, 5)
    assert sender.sent(sender.send(before, 1, 0, slices)).reason is Reason.OK
    relay.strand()
    stuck = sender.send(before, 2, 0, slices)
    assert sender.sent(sender.send(replace(before, key=NEXT_KEY[:-1] + b"\x01"), 3, 0, slices)).reason is Reason.OK
    ended = sender.sent(stuck)
    assert ended.reason is Reason.PEER_LOST and "b was greeted anew" in ended.message
    assert sender.transport.close(WAIT_S)
