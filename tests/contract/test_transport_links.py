"""Routes of several connections: opened while work waits, shared by all sends, lost together and told once."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from transport_kit import (
    IO_TIMEOUT_S,
    WAIT_S,
    Bytes,
    End,
    RawSender,
    child,
    cut,
    noise,
    open_sink,
    own_key,
    read_exactly,
    route_to,
    tcp,
    untouched,
)

from kvmoverd.adapters.transport.frames import FRAME_BYTES, PREFACE_BYTES, Ack, Frame, Preface, Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Route, RouteLost, Send

BIG_BYTES = 16 << 20
"""More than the sockets between two ends hold."""
QUIET_S = 0.3


class Server:
    """Lets connections in one by one, and reads only what it is told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self.route = Route("b", "boot-2", f"127.0.0.1:{self._listener.getsockname()[1]}", own_key("boot-1"))

    def let_in(self, timeout_s: float = WAIT_S) -> tuple[socket.socket, Preface]:
        self._listener.settimeout(timeout_s)
        sock, _ = self._listener.accept()
        sock.settimeout(WAIT_S)
        self._socks.append(sock)
        preface = Preface.decode(read_exactly(sock, PREFACE_BYTES))
        sock.sendall(Ack(0, Status.ACCEPTED).encode())
        return sock, preface

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            sock.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(13)


def read_frame(sock: socket.socket) -> Frame:
    frame = Frame.decode(read_exactly(sock, FRAME_BYTES))
    left_bytes = frame.payload_bytes
    while left_bytes:
        part = sock.recv(min(left_bytes, 1 << 20))
        assert part, "the sender closed the connection"
        left_bytes -= len(part)
    return frame


@pytest.fixture
def big(rng: np.random.Generator) -> Bytes:
    return noise(rng, BIG_BYTES)


def burst(end: End, route: Route, layers: int, big: Bytes) -> list[int]:
    """Sends of several layers at once; their op ids are their layers."""
    source = cut(big, np.random.default_rng(3), 9)
    end.transport.submit([Send(layer, route, 1, layer, 0, source) for layer in range(layers)])
    return list(range(layers))


def test_a_second_connection_is_opened_while_a_send_waits_and_both_carry_frames(server: Server, big: Bytes) -> None:
    end = End(tcp(connections=2))
    ops = burst(end, server.route, 3, big)
    (first, first_preface), (second, second_preface) = server.let_in(), server.let_in()
    assert first_preface == second_preface
    layers = {first: list[int](), second: list[int]()}
    while sum(map(len, layers.values())) < len(ops):
        for sock in select.select(list(layers), [], [], WAIT_S)[0]:
            frame = read_frame(sock)
            layers[sock].append(frame.layer)
            sock.sendall(Ack(frame.sequence, Status.APPLIED, frame.payload_bytes).encode())
    assert layers[first] and layers[second]
    assert sorted(layers[first] + layers[second]) == ops
    assert {end.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert end.transport.sent_bytes() == {"b": 3 * BIG_BYTES}  # type: ignore[attr-defined]
    assert end.transport.close(WAIT_S)


@pytest.mark.parametrize(("connections", "layers"), [(1, 3), (2, 1)])
def test_no_second_connection_is_opened_without_need_or_leave(
    server: Server, big: Bytes, connections: int, layers: int
) -> None:
    end = End(tcp(connections=connections))
    burst(end, server.route, layers, big)
    server.let_in()
    with pytest.raises(TimeoutError):
        server.let_in(QUIET_S)
    assert end.transport.close(WAIT_S)


def test_one_connection_that_breaks_ends_both_each_send_once_and_is_told_once(server: Server, big: Bytes) -> None:
    end = End(tcp(connections=2))
    ops = burst(end, server.route, 6, big)
    (first, _), (second, _) = server.let_in(), server.let_in()
    second.close()
    assert {end.sent(op_id).reason for op_id in ops} == {Reason.PEER_LOST}
    while first.recv(1 << 20):
        pass
    time.sleep(QUIET_S)
    end.pump(0)
    lost = end.of(RouteLost)
    assert [(event.node, event.boot_id, event.inbound) for event in lost] == [("b", "boot-2", False)]
    burst(end, server.route, 1, big)
    sock, _ = server.let_in()
    assert read_frame(sock).layer == 0
    assert end.transport.close(WAIT_S)


def test_a_receiver_that_lets_only_one_connection_in_is_served_over_that_one(
    rng: np.random.Generator, big: Bytes
) -> None:
    sender, far = End(tcp(connections=4)), tcp("boot-2", inbound_max=1)
    receiver, memory = End(far), untouched(BIG_BYTES)
    open_sink(receiver, memory, rng)
    ops = burst(sender, route_to(far), 8, big)
    assert {sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert len(receiver.wait(Received, 8)) == 8
    assert sender.of(RouteLost) == [] == receiver.of(RouteLost)
    for end in (sender, receiver):
        assert end.transport.close(WAIT_S)


def test_connections_of_one_link_are_one_loss_and_those_of_two_are_two() -> None:
    far = tcp("boot-2")
    receiver = End(far)
    raws = [RawSender(far.endpoint, link_id=link_id).accepted() for link_id in (7, 7, 8)]
    for lost, raw in zip((1, 1, 2), raws, strict=True):
        raw.close()
        receiver.wait(RouteLost, lost)
        time.sleep(QUIET_S / 2)
        receiver.pump(0)
        assert len(receiver.of(RouteLost)) == lost
    again = RawSender(far.endpoint, link_id=7).accepted()
    again.close()
    receiver.wait(RouteLost, 3)
    assert receiver.transport.close(WAIT_S)


def test_a_killed_peer_of_several_connections_ends_every_send_once(big: Bytes) -> None:
    end = End(tcp(connections=3))
    with child("tcp", "0", BIG_BYTES) as peer:
        ops = burst(end, peer.route, 40, big)
        end.sent(ops[0])
        peer.signal(signal.SIGKILL)
        reasons = [end.sent(op_id).reason for op_id in ops]
    assert set(reasons) == {Reason.OK, Reason.PEER_LOST}
    assert len(end.wait(RouteLost, 1)) == 1
    assert end.transport.close(WAIT_S)


def test_a_sender_that_trickles_a_long_frame_is_not_given_up(rng: np.random.Generator) -> None:
    """Its reader is woken for a MiB, and in between looks whether a byte has come at all."""
    far, part_bytes = tcp("boot-2", io_timeout_s=IO_TIMEOUT_S), 400_000
    receiver, memory = End(far), untouched(4 * part_bytes)
    open_sink(receiver, memory, rng)
    raw = RawSender(far.endpoint).accepted()
    raw.header(1, len(memory))
    for _ in range(4):
        time.sleep(IO_TIMEOUT_S * 0.7)
        raw.sock.sendall(b"x" * part_bytes)
    assert raw.ack().status is Status.APPLIED
    assert memory.tobytes() == b"x" * len(memory)
    raw.close()
    assert receiver.transport.close(WAIT_S)


def test_a_sender_that_stalls_behind_a_part_of_a_long_frame_is_given_up_after_twice_the_timeout(
    rng: np.random.Generator,
) -> None:
    far = tcp("boot-2", io_timeout_s=IO_TIMEOUT_S)
    receiver, memory = End(far), untouched(4_000_000)
    open_sink(receiver, memory, rng)
    raw = RawSender(far.endpoint).accepted()
    raw.header(1, len(memory))
    time.sleep(IO_TIMEOUT_S / 4)
    raw.sock.sendall(b"x" * 1_000)
    assert "no byte moved" in receiver.wait(RouteLost, 1, 2 * IO_TIMEOUT_S + 2.0)[0].message
    assert memory[0] == ord("x")
    raw.close()
    assert receiver.transport.close(WAIT_S)
