"""Sends to a daemon that dies, stalls, lies, comes back or is not there: each ends once, in bounded time, with words."""

from __future__ import annotations

import errno
import signal
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
    WAIT_S,
    End,
    RawReceiver,
    child,
    cut,
    make_pair,
    noise,
    open_sink,
    own_key,
    route_to,
    shm,
    tcp,
    untouched,
)

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Route, RouteLost

BOUND_S = IO_TIMEOUT_S + 2.0
"""Time without progress, and room for a busy machine."""
REMOTE = [pytest.param("shm", marks=needs_vm_readv), "tcp"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.fixture
def sender() -> Iterator[End]:
    """A TCP end that sends."""
    end = End(tcp("boot-1", queue_max=8, io_timeout_s=IO_TIMEOUT_S))
    yield end
    assert end.transport.close(WAIT_S)


def hasty_end(kind: str, directory: Path) -> End:
    if kind == "tcp":
        return End(tcp(io_timeout_s=IO_TIMEOUT_S))
    return End(shm(directory / "a.sock", io_timeout_s=IO_TIMEOUT_S))


@pytest.mark.parametrize("kind", REMOTE)
def test_a_peer_that_is_killed_ends_every_send_and_loses_the_route(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    size_bytes = 16 << 20
    source = cut(noise(rng, size_bytes), rng, 500)
    end = hasty_end(kind, tmp_path)
    with child(kind, "0" if kind == "tcp" else str(tmp_path / "b.sock"), size_bytes) as peer:
        ops = [end.send(peer.route, 1, layer, source) for layer in range(60)]
        end.sent(ops[1])
        peer.signal(signal.SIGKILL)
        began_s = time.monotonic()
        reasons = [end.sent(op_id, BOUND_S).reason for op_id in ops]
        assert time.monotonic() - began_s < BOUND_S
    assert set(reasons) == {Reason.OK, Reason.PEER_LOST}
    lost = end.wait(RouteLost, 1)[0]
    assert (lost.node, lost.boot_id, lost.inbound) == ("b", "boot-2", False)
    assert end.transport.close(WAIT_S)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_peer_that_is_stopped_delays_its_sends_by_the_timeout_and_no_more(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    size_bytes = 8 << 20
    source = cut(noise(rng, size_bytes), rng, 500)
    end = hasty_end(kind, tmp_path)
    with child(kind, "0" if kind == "tcp" else str(tmp_path / "b.sock"), size_bytes) as peer:
        assert end.sent(end.send(peer.route, 1, 0, source)).reason is Reason.OK
        peer.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        ops = [end.send(peer.route, 1, layer, source) for layer in range(1, 21)]
        ended = [end.sent(op_id, BOUND_S) for op_id in ops]
        assert IO_TIMEOUT_S * 0.9 < time.monotonic() - began_s < BOUND_S
        peer.signal(signal.SIGCONT)
    assert {done.reason for done in ended} == {Reason.PEER_LOST}
    assert f"no byte moved for {IO_TIMEOUT_S:g} s" in ended[0].message
    assert end.transport.close(WAIT_S)


@pytest.mark.parametrize("kind", REMOTE)
def test_a_peer_that_restarts_is_reached_under_its_new_boot_id(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    source, memory = noise(rng, 50_000), untouched(50_000)
    pair = make_pair("tcp4" if kind == "tcp" else "shm-remote", tmp_path)
    assert pair.route is not None
    open_sink(pair.receiver, memory, rng)
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(source, rng, 9))).reason is Reason.OK
    assert pair.receiver.transport.close(WAIT_S)
    assert pair.sender.wait(RouteLost, 1)[0].boot_id == "boot-2"
    memory[:] = 0xEE
    port = 0 if kind == "shm" else int(pair.route.endpoint.rpartition(":")[2])
    again = tcp("boot-3", port=port) if kind == "tcp" else shm(tmp_path / "b.sock", "boot-3")
    pair.receiver = End(again)
    open_sink(pair.receiver, memory, rng)
    route = route_to(again, boot_id="boot-3")
    assert pair.sender.sent(pair.sender.send(route, 1, 0, cut(source, rng, 9))).reason is Reason.OK
    assert (memory == source).all()
    assert pair.sender.transport.sent_bytes() == {"b": 100_000}  # type: ignore[attr-defined]
    pair.close()


def test_nobody_at_the_endpoint_ends_the_send_and_the_next_one_dials_again(
    sender: End, rng: np.random.Generator
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    route = Route("b", "boot-2", f"127.0.0.1:{port}", own_key("boot-1"))
    source, memory = noise(rng, 1_000), untouched(1_000)
    for attempt in range(1, 3):
        done = sender.sent(sender.send(route, 1, 0, cut(source, rng, 3)))
        assert done.reason is Reason.PEER_LOST and "Connection refused" in done.message
        sender.wait(RouteLost, attempt)
    receiver = End(tcp("boot-2", port=port))
    open_sink(receiver, memory, rng, 4)
    assert sender.sent(sender.send(route, 1, 0, cut(source, rng, 3))).reason is Reason.OK
    assert (memory == source).all()
    assert receiver.transport.close(WAIT_S)


@pytest.mark.parametrize("endpoint", ["nowhere", "127.0.0.1:port", ":1", "unix:/nowhere.sock", ""])
def test_an_endpoint_that_makes_no_sense_ends_the_send(sender: End, rng: np.random.Generator, endpoint: str) -> None:
    done = sender.sent(sender.send(Route("b", "boot-2", endpoint, KEY), 1, 0, cut(noise(rng, 10), rng, 1)))
    assert done.reason is Reason.PEER_LOST and "is not host:port" in done.message


def test_what_is_beyond_the_queue_is_refused_at_once_and_the_rest_ends_in_time(
    sender: End, rng: np.random.Generator
) -> None:
    source = cut(noise(rng, 100), rng, 2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        route = Route("b", "boot-2", f"127.0.0.1:{mute.getsockname()[1]}", own_key("boot-1"))
        ops = [sender.send(route, 1, layer, source) for layer in range(12)]
        refused = [sender.sent(op_id, IO_TIMEOUT_S / 2) for op_id in ops[8:]]
        assert {done.reason for done in refused} == {Reason.POOL_EXHAUSTED}
        assert "transport.queue_max is 8" in refused[0].message
        assert {sender.sent(op_id, BOUND_S).reason for op_id in ops[:8]} == {Reason.PEER_LOST}


def test_copies_beyond_the_queue_are_refused_at_once(rng: np.random.Generator) -> None:
    end = End(shm(None, copy_threads=1, queue_max=3), None)
    slices, go = cut(untouched(100), rng, 2), threading.Event()

    def resolve(layer: int, first_block: int) -> IoVec | None:
        assert go.wait(WAIT_S)
        return slices

    end.expect(1, resolve)
    ops = [end.send(None, 1, layer, cut(noise(rng, 100), rng, 2)) for layer in range(5)]
    assert [end.sent(op_id).reason for op_id in ops[3:]] == [Reason.POOL_EXHAUSTED] * 2
    go.set()
    assert [end.sent(op_id).reason for op_id in ops[:3]] == [Reason.OK] * 3
    assert end.transport.close(WAIT_S)


@pytest.mark.parametrize(
    ("status", "detail", "reason", "words"),
    [
        (Status.FAILED, errno.EPERM, Reason.INTERNAL, "Operation not permitted: run both daemons as one user"),
        (Status.FAILED, errno.ENOMEM, Reason.INTERNAL, "Cannot allocate memory"),
        (Status.ACCEPTED, 0, Reason.PEER_LOST, "which does not wait for one"),
    ],
)
def test_what_a_receiver_answers_decides_how_the_send_ends(
    sender: End, rng: np.random.Generator, status: Status, detail: int, reason: Reason, words: str
) -> None:
    raw = RawReceiver()
    op_id = sender.send(raw.route, 1, 0, cut(noise(rng, 100), rng, 2))
    frame = raw.accept()
    assert (frame.sink_id, frame.payload_bytes) == (1, 100)
    raw.answer(frame.sequence, status, detail)
    done = sender.sent(op_id)
    assert done.reason is reason and words in done.message
    raw.close()


def test_a_receiver_that_answers_another_frame_is_not_believed(sender: End, rng: np.random.Generator) -> None:
    raw = RawReceiver()
    op_id = sender.send(raw.route, 1, 0, cut(noise(rng, 100), rng, 2))
    raw.answer(raw.accept().sequence + 1, Status.APPLIED, 0)
    done = sender.sent(op_id)
    assert done.reason is Reason.PEER_LOST and "ack APPLIED of frame" in done.message
    raw.close()


def test_frames_do_not_wait_for_the_acks_of_earlier_ones(sender: End, rng: np.random.Generator) -> None:
    raw = RawReceiver()
    ops = [sender.send(raw.route, 1, layer, cut(noise(rng, 100), rng, 2)) for layer in range(4)]
    frames = [raw.accept(), raw.frame(), raw.frame(), raw.frame()]
    assert [frame.layer for frame in frames] == [0, 1, 2, 3]
    for frame in frames:
        raw.answer(frame.sequence, Status.APPLIED, 0)
    assert {sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    raw.close()
