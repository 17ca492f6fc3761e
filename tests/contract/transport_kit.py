"""What the transport tests share: one pair of ends per adapter, memory cut at random, events awaited with a deadline."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from verbs_kit import FakeWire
from verbs_pair import Desk, fake_node, rxe_node

from kvmoverd.adapters.memory.iovec import COMPILED
from kvmoverd.adapters.transport.frames import (
    ACK_BYTES,
    FRAME_BYTES,
    PREFACE_BYTES,
    Ack,
    BodyKind,
    Frame,
    Preface,
    Status,
)
from kvmoverd.adapters.transport.loopback import LoopbackTransport
from kvmoverd.adapters.transport.null import NullTransport
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.ports.transport import IoVec, Route, Send, Sender, Sent, Sink, Transport, TransportEvent

WAIT_S = 10.0
IO_TIMEOUT_S = 0.4
"""For tests that wait it out; the others use a longer one, so that a busy machine does not disturb them."""
PATIENT_S = 5.0
KEY = b"k" * 32
NEXT_KEY = b"n" * 32
"""Of a later Hello."""
UNTOUCHED = 0xEE
LANE = Lane(dscp=8, so_priority=1)

SENDER = ("a", "boot-1")
"""Who the sending ends are."""

Bytes = npt.NDArray[np.uint8]
E = TypeVar("E")
_op_ids = itertools.count(1)


def check_key(key: bytes) -> tuple[str, str] | None:
    """The key opens a channel for node `a`; its last byte names the boot."""
    return ("a", f"boot-{key[-1]}") if key[:-1] in (KEY[:-1], NEXT_KEY[:-1]) else None


def own_key(boot_id: str) -> bytes:
    return KEY[:-1] + bytes([int(boot_id.removeprefix("boot-"))])


def cut(memory: Bytes, rng: np.random.Generator, pieces: int) -> IoVec:
    """Cuts memory into slices at random places, in order."""
    pieces = max(1, min(pieces, len(memory)))
    inner = np.sort(rng.choice(np.arange(1, max(2, len(memory))), pieces - 1, replace=False))
    edges = np.concatenate([[0], inner, [len(memory)]]).astype(np.uint64)
    found = np.empty((pieces, 2), dtype=np.uint64)
    found[:, 0] = edges[:-1] + np.uint64(memory.ctypes.data)
    found[:, 1] = np.diff(edges)
    return found


outliving: list[Bytes] = []
"""Memory of the test that runs, which must stay until its transports are closed: a device does not know that it was freed."""


def noise(rng: np.random.Generator, size_bytes: int) -> Bytes:
    outliving.append(rng.integers(0, 256, size_bytes, dtype=np.uint8))
    return outliving[-1]


def untouched(size_bytes: int) -> Bytes:
    outliving.append(np.full(size_bytes, UNTOUCHED, dtype=np.uint8))
    return outliving[-1]


def scattered(memory: Bytes, rng: np.random.Generator, pieces: int) -> IoVec:
    """Cuts memory into slices in no order, so that no two of them are one write."""
    found = cut(memory, rng, pieces)
    return found[rng.permutation(len(found))]


def stream_of(memory: Bytes, slices: IoVec) -> Bytes:
    """Bytes of memory in the order of its slices."""
    base = memory.ctypes.data
    return np.concatenate([memory[int(at) - base : int(at) - base + int(size)] for at, size in slices])


@dataclass
class End:
    """A transport and what it has said so far.

    `lets_in`: who may send to the sinks that it opens. `copies`: the bytes are moved, not only counted.
    """

    transport: Transport
    lets_in: Sender | None = SENDER
    copies: bool = True
    events: list[TransportEvent] = field(default_factory=list)

    def pump(self, timeout_s: float) -> None:
        select.select([self.transport.fileno()], [], [], timeout_s)
        self.events += self.transport.poll(64)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type[E], count: int, timeout_s: float = WAIT_S) -> list[E]:
        """Waits for `count` events of a kind."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.of(kind)) < count:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{count} {kind.__name__} awaited for {timeout_s} s, there are only {self.events}"
            self.pump(left_s)
        return self.of(kind)

    def expect(self, sink_id: int, resolve: Callable[[int, int], IoVec | None]) -> None:
        self.transport.expect(Sink(sink_id, resolve, self.lets_in))

    def send(self, route: Route | None, sink_id: int, layer: int, source: IoVec, first_block: int = 0) -> int:
        op_id = next(_op_ids)
        self.transport.submit([Send(op_id, route, sink_id, layer, first_block, source)])
        return op_id

    def sent(self, op_id: int, timeout_s: float = WAIT_S) -> Sent:
        """Waits for the end of one send."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := [done for done in self.of(Sent) if done.op_id == op_id]):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"send {op_id} did not end within {timeout_s} s"
            self.pump(left_s)
        assert len(found) == 1, f"send {op_id} ended {len(found)} times"
        return found[0]


@dataclass
class Pair:
    """Who sends and who receives; the same end twice where a transport moves within a process."""

    sender: End
    receiver: End
    route: Route | None
    in_order: bool = True
    """Sends of one sink are applied in the order given: over one connection they are, over more they need not be."""
    after: Callable[[], None] = lambda: None
    """Called when both are closed."""

    def has(self, memory: Bytes, expected: Bytes) -> bool:
        """Did the bytes arrive, where this transport moves any?"""
        return bool((memory == (expected if self.receiver.copies else UNTOUCHED)).all())

    def close(self) -> None:
        for end in {id(end): end for end in (self.sender, self.receiver)}.values():
            assert end.transport.close(WAIT_S), "a thread did not end"
        self.after()


def tcp(boot_id: str = "boot-1", host: str = "127.0.0.1", port: int = 0, **settings: int | float) -> TcpTransport:
    limits = {"io_timeout_s": PATIENT_S, "queue_max": 64, **settings}
    return TcpTransport("a", boot_id, host, port, lane=LANE, check_key=check_key, **limits)  # type: ignore[arg-type]


def shm(path: Path | None, boot_id: str = "boot-1", **settings: int | float) -> ShmTransport:
    limits = {"io_timeout_s": PATIENT_S, "queue_max": 64, **settings}
    return ShmTransport("a", boot_id, path, check_key=check_key, **limits)  # type: ignore[arg-type]


def route_to(transport: TcpTransport | ShmTransport, *, boot_id: str = "boot-2", key_of: str = "boot-1") -> Route:
    return Route("b", boot_id, transport.endpoint, own_key(key_of))


def make_pair(kind: str, directory: Path) -> Pair:
    match kind:
        case "loopback":
            end = End(LoopbackTransport(), None)
            return Pair(end, end, None)
        case "null":
            end = End(NullTransport(), None, copies=False)
            return Pair(end, end, None)
        case "shm-local" | "shm-local-kernel":
            end = End(shm(None, compiled=COMPILED and kind == "shm-local"), None)
            return Pair(end, end, None, in_order=False)
        case "shm-remote" | "shm-remote-2":
            connections = 2 if kind == "shm-remote-2" else 1
            far: TcpTransport | ShmTransport = shm(directory / "b.sock", "boot-2")
            near = shm(directory / "a.sock", connections=connections)
            return Pair(End(near), End(far), route_to(far), in_order=connections == 1)
        case "tcp4" | "tcp4-2" | "tcp6":
            host, connections = "::1" if kind == "tcp6" else "127.0.0.1", 2 if kind == "tcp4-2" else 1
            far = tcp("boot-2", host)
            near_tcp = tcp("boot-1", host, connections=connections)
            return Pair(End(near_tcp), End(far), route_to(far), in_order=connections == 1)
        case "verbs-fake" | "verbs-fake-2" | "verbs-fake-local":
            wire, desk = FakeWire(), Desk()
            near_node = fake_node(wire, desk, SENDER, cnics=2 if kind == "verbs-fake-2" else 1)
            if kind == "verbs-fake-local":
                end = End(near_node.transport, None)
                return Pair(end, end, None, after=wire.close)
            far_node = fake_node(wire, desk, ("b", "boot-2"), cnics=2 if kind == "verbs-fake-2" else 1)
            route = Route("b", "boot-2", far_node.transport.endpoint, own_key("boot-1"))
            return Pair(End(near_node.transport), End(far_node.transport), route, after=wire.close)
        case "verbs" | "verbs-local":
            desk = Desk()
            near_links = rxe_node("rxe0", desk, SENDER)
            if kind == "verbs-local":
                end = End(near_links, None)
                return Pair(end, end, None)
            far_links = rxe_node("rxe1", desk, ("b", "boot-2"))
            return Pair(End(near_links), End(far_links), Route("b", "boot-2", far_links.endpoint, own_key("boot-1")))
    raise AssertionError(kind)


def open_sink(end: End, memory: Bytes, rng: np.random.Generator, pieces: int = 50) -> None:
    slices = cut(memory, rng, pieces)
    end.expect(1, lambda layer, first_block: slices)


def await_first_byte(memory: Bytes) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while memory[0] == UNTOUCHED:
        assert time.monotonic() < deadline_s, "nothing arrived"
        time.sleep(0.001)


class RawSender:
    """The sending end of a channel, byte by byte, for what a real one would not do."""

    def __init__(self, endpoint: str, key: bytes = KEY[:-1] + b"\x01", link_id: int = 1) -> None:
        if endpoint.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(WAIT_S)
            self.sock.connect(endpoint.removeprefix("unix:"))
        else:
            host, _, port = endpoint.rpartition(":")
            self.sock = socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT_S)
        self.sock.sendall(Preface("a", f"boot-{key[-1]}", key, link_id).encode())

    def accepted(self) -> RawSender:
        assert self.ack().status is Status.ACCEPTED
        return self

    def header(self, sink_id: int, payload_bytes: int) -> None:
        self.sock.sendall(Frame(BodyKind.PAYLOAD, 1, sink_id, 0, 0, payload_bytes).encode())

    def by_address(self, sink_id: int, rows: IoVec, payload_bytes: int | None = None) -> None:
        size_bytes = int(rows[:, 1].sum()) if payload_bytes is None else payload_bytes
        self.sock.sendall(Frame(BodyKind.ADDRESSES, 1, sink_id, 0, 0, size_bytes, len(rows)).encode() + rows.tobytes())

    def ack(self) -> Ack:
        return Ack.decode(read_exactly(self.sock, ACK_BYTES))

    def closed_by_peer(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.sock.recv(1) == b""
        return True

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Ends the connection as a machine that crashed would."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class RawReceiver:
    """The receiving end of a TCP channel, byte by byte."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(WAIT_S)
        self._sock: socket.socket | None = None
        self.route = Route("b", "boot-2", f"127.0.0.1:{self._server.getsockname()[1]}", own_key("boot-1"))

    def accept(self) -> Frame:
        """Lets the sender in and reads its first frame."""
        self._sock, _ = self._server.accept()
        self._sock.settimeout(WAIT_S)
        preface = Preface.decode(read_exactly(self._sock, PREFACE_BYTES))
        assert (preface.node, preface.boot_id, preface.key) == ("a", "boot-1", own_key("boot-1"))
        self.answer(0, Status.ACCEPTED, 0)
        return self.frame()

    def frame(self) -> Frame:
        assert self._sock is not None
        found = Frame.decode(read_exactly(self._sock, FRAME_BYTES))
        read_exactly(self._sock, found.payload_bytes)
        return found

    def answer(self, sequence: int, status: Status, detail: int) -> None:
        assert self._sock is not None
        self._sock.sendall(Ack(sequence, status, 0, detail).encode())

    def close(self) -> None:
        self._server.close()
        if self._sock is not None:
            self._sock.close()


def read_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    raw = b""
    while len(raw) < size_bytes:
        part = sock.recv(size_bytes - len(raw))
        assert part, "the other side closed the connection"
        raw += part
    return raw


class Child:
    """A process that receives into one sink until it is killed: `transport_child.py`."""

    def __init__(self, kind: str, place: str, size_bytes: int) -> None:
        script = Path(__file__).with_name("transport_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), kind, place, str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        endpoint = self._process.stdout.readline().decode().strip()
        self.route = Route("b", "boot-2", endpoint, own_key("boot-1"))

    def signal(self, number: int) -> None:
        """Sends it; a stop has happened when this returns."""
        os.kill(self.pid, number)
        until_s = time.monotonic() + WAIT_S
        stat = Path(f"/proc/{self.pid}/stat")
        while number == signal.SIGSTOP and stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < until_s, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def child(kind: str, place: str, size_bytes: int) -> Iterator[Child]:
    made = Child(kind, place, size_bytes)
    try:
        yield made
    finally:
        made.close()
