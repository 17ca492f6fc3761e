"""A receiver whose sender stalls, dies, lies or is a stranger: told in bounded time, and never a late write."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from markers import needs_vm_readv
from transport_kit import (
    IO_TIMEOUT_S,
    KEY,
    PATIENT_S,
    WAIT_S,
    End,
    RawSender,
    await_first_byte,
    cut,
    noise,
    open_sink,
    shm,
    tcp,
    untouched,
)

from kvmoverd.adapters.transport.frames import FRAME_BYTES, Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Received, Route, RouteLost, SinkQuiet

BOUND_S = IO_TIMEOUT_S + 2.0
"""Time without progress, and room for a busy machine."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def hasty() -> Iterator[End]:
    """A TCP end that others send to, with a short timeout."""
    end = End(tcp("boot-2", io_timeout_s=IO_TIMEOUT_S))
    yield end
    assert end.transport.close(WAIT_S)


@pytest.fixture
def sender() -> Iterator[End]:
    """A TCP end that sends."""
    end = End(tcp("boot-1", queue_max=8, io_timeout_s=IO_TIMEOUT_S))
    yield end
    assert end.transport.close(WAIT_S)


@pytest.fixture
def raw(receiver: End) -> Iterator[RawSender]:
    made = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture
def raw_to_hasty(hasty: End) -> Iterator[RawSender]:
    made = RawSender(hasty.transport.endpoint).accepted()  # type: ignore[attr-defined]
    yield made
    made.close()


def test_a_sink_forgotten_in_mid_frame_is_quiet_at_once_and_the_rest_is_drained(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    memory = untouched(3_000_000)
    open_sink(receiver, memory, rng)
    raw.header(1, len(memory))
    raw.sock.sendall(b"\x01" * 2_000_000)
    await_first_byte(memory)
    receiver.transport.forget(1)
    receiver.wait(SinkQuiet, 1, timeout_s=1.0)
    memory[:] = 0xEE
    raw.sock.sendall(b"\x02" * 1_000_000)
    answer = raw.ack()
    assert (answer.sequence, answer.status, answer.moved_bytes) == (1, Status.REFUSED, 0)
    assert (memory == untouched(len(memory))).all()
    assert receiver.of(Received) == [] and receiver.of(RouteLost) == []


def test_a_sink_opened_anew_under_its_old_number_does_not_get_the_rest_of_an_old_frame(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    before, after = untouched(200_000), untouched(200_000)
    open_sink(receiver, before, rng)
    raw.header(1, len(before))
    raw.sock.sendall(b"\x01" * 100_000)
    await_first_byte(before)
    receiver.transport.forget(1)
    receiver.wait(SinkQuiet, 1)
    open_sink(receiver, after, rng)
    before[:] = 0xEE
    raw.sock.sendall(b"\x02" * 100_000)
    assert raw.ack().status is Status.REFUSED
    assert (before == untouched(200_000)).all() and (after == untouched(200_000)).all()


def test_a_sender_that_stalls_in_mid_frame_is_given_up_after_the_timeout(
    hasty: End, raw_to_hasty: RawSender, rng: np.random.Generator
) -> None:
    open_sink(hasty, untouched(1_000), rng, 3)
    raw_to_hasty.header(1, 1_000)
    raw_to_hasty.sock.sendall(b"x" * 999)
    began_s = time.monotonic()
    lost = hasty.wait(RouteLost, 1)[0]
    assert IO_TIMEOUT_S * 0.9 < time.monotonic() - began_s < BOUND_S
    assert (lost.node, lost.boot_id, lost.inbound) == ("a", "boot-1", True) and "no byte moved" in lost.message
    assert raw_to_hasty.closed_by_peer()
    assert hasty.of(Received) == []


def test_an_idle_channel_is_not_given_up(hasty: End, raw_to_hasty: RawSender, rng: np.random.Generator) -> None:
    memory = untouched(10)
    open_sink(hasty, memory, rng, 2)
    time.sleep(IO_TIMEOUT_S * 1.5)
    raw_to_hasty.header(1, 10)
    raw_to_hasty.sock.sendall(b"0123456789")
    assert raw_to_hasty.ack().status is Status.APPLIED
    assert memory.tobytes() == b"0123456789"
    assert hasty.of(RouteLost) == []


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_sender_that_ends_in_mid_frame_is_told_and_nothing_is_received(
    receiver: End, raw: RawSender, rng: np.random.Generator, end: str
) -> None:
    open_sink(receiver, untouched(1_000), rng, 3)
    raw.header(1, 1_000)
    raw.sock.sendall(b"x" * 500)
    getattr(raw, end)()
    assert receiver.wait(RouteLost, 1)[0].inbound
    assert receiver.of(Received) == []
    receiver.transport.forget(1)
    receiver.wait(SinkQuiet, 1)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 60, b"\x00" * 4_096, b"\xff" * 4_096, b"x"],
    ids=["http", "zeros", "ones", "short"],
)
def test_garbage_is_shut_out_and_others_are_served(hasty: End, rng: np.random.Generator, garbage: bytes) -> None:
    host, _, port = hasty.transport.endpoint.rpartition(":")  # type: ignore[attr-defined]
    with socket.create_connection((host, int(port)), timeout=BOUND_S) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(garbage)
        assert stranger.recv(1) == b""
    memory = untouched(3)
    open_sink(hasty, memory, rng, 1)
    good = RawSender(hasty.transport.endpoint).accepted()  # type: ignore[attr-defined]
    good.header(1, 3)
    good.sock.sendall(b"abc")
    assert good.ack().status is Status.APPLIED
    good.close()
    assert [lost.message for lost in hasty.wait(RouteLost, 1)] == [
        "data channel from a: the other side closed the connection"
    ]


@pytest.mark.parametrize(
    ("head", "fill", "words"),
    [
        (b"", b"\xff", "frame header begins with"),
        (b"KVMF", b"\x00", "frame body of kind 0"),
        (b"KVMF\x01\x00\x00\x00", b"\xff", "a frame of 18446744073709551615 bytes"),
    ],
    ids=["magic", "kind", "size"],
)
def test_a_peer_that_is_let_in_and_then_sends_garbage_is_dropped(
    receiver: End, raw: RawSender, head: bytes, fill: bytes, words: str
) -> None:
    raw.sock.sendall(head.ljust(FRAME_BYTES, fill))
    assert words in receiver.wait(RouteLost, 1)[0].message
    assert raw.closed_by_peer()


@pytest.mark.parametrize("key", [b"z" * 32, KEY[:-1] + b"\x07"])
def test_a_wrong_key_or_another_boots_key_opens_nothing(
    sender: End, receiver: End, rng: np.random.Generator, key: bytes
) -> None:
    open_sink(receiver, untouched(100), rng, 3)
    route = Route("b", "boot-2", receiver.transport.endpoint, key)  # type: ignore[attr-defined]
    done = sender.sent(sender.send(route, 1, 0, cut(noise(rng, 100), rng, 2)))
    assert done.reason is Reason.PEER_LOST and "its Hello key may be void" in done.message
    assert not sender.wait(RouteLost, 1)[0].inbound
    receiver.pump(0.05)
    assert receiver.events == []


@needs_vm_readv
def test_a_pull_that_ends_after_its_sender_gave_up_is_not_received(tmp_path: Path, rng: np.random.Generator) -> None:
    """The sender may have filled its memory anew by then: what was pulled may be anything."""
    receiver = End(shm(tmp_path / "b.sock", "boot-2"))
    slices, gone = cut(untouched(1_000), rng, 3), threading.Event()

    def resolve(layer: int, first_block: int) -> IoVec | None:
        assert gone.wait(WAIT_S)
        return slices

    receiver.expect(1, resolve)
    raw = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    raw.by_address(1, cut(noise(rng, 1_000), rng, 5))
    raw.close()
    gone.set()
    assert "in the middle of a frame" in receiver.wait(RouteLost, 1)[0].message
    assert receiver.of(Received) == []
    assert receiver.transport.close(WAIT_S)


@needs_vm_readv
def test_rows_that_do_not_add_up_or_point_nowhere_do_no_harm(tmp_path: Path, rng: np.random.Generator) -> None:
    receiver = End(shm(tmp_path / "b.sock", "boot-2"))
    open_sink(receiver, untouched(1_000), rng, 3)
    raw = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    raw.by_address(1, np.array([[8, 1_000]], dtype=np.uint64))
    answer = raw.ack()
    assert (answer.status, answer.detail) == (Status.FAILED, errno.EFAULT)
    raw.by_address(1, np.array([[8, 2**64 - 1], [8, 1_001]], dtype=np.uint64), payload_bytes=1_000)
    assert "2 slices do not add up to the frame's 1000 bytes" in receiver.wait(RouteLost, 1)[0].message
    raw.close()
    assert receiver.transport.close(WAIT_S)


def test_a_channel_carries_only_its_own_kind_of_frame(receiver: End, raw: RawSender) -> None:
    raw.by_address(1, np.array([[8, 10]], dtype=np.uint64))
    assert "a frame of kind ADDRESSES" in receiver.wait(RouteLost, 1)[0].message


def test_connections_beyond_the_limit_are_closed(rng: np.random.Generator) -> None:
    end = End(tcp("boot-2", inbound_max=2))
    raws = [RawSender(end.transport.endpoint) for _ in range(2)]  # type: ignore[attr-defined]
    for raw in raws:
        raw.accepted()
    with contextlib.suppress(ConnectionError):
        third = RawSender(end.transport.endpoint)  # type: ignore[attr-defined]
        assert third.closed_by_peer()
        third.close()
    raws[0].close()
    end.wait(RouteLost, 1)
    deadline_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(AssertionError, ConnectionError):
            raws.append(RawSender(end.transport.endpoint).accepted())  # type: ignore[attr-defined]
            break
        assert time.monotonic() < deadline_s, "no place became free"
    for raw in raws:
        raw.close()
    assert end.transport.close(WAIT_S)


def test_closing_while_a_peer_stalls_takes_no_longer_than_allowed(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    open_sink(receiver, untouched(1_000), rng, 3)
    raw.header(1, 1_000)
    began_s = time.monotonic()
    assert receiver.transport.close(WAIT_S)
    assert time.monotonic() - began_s < PATIENT_S / 2
