"""The other end of the companion socket, byte by byte, and a server with hooks that remember."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvmover_proto.companion_pb2 import CompanionHello, CompanionRegionFd, CompanionReply, CompanionRequest
from kvmoverd.ports.progress import SharedPages
from kvmoverd.rpc.companion import CompanionServer, SessionPeer

HELLO = CompanionRequest(hello=CompanionHello(client="engine", protocol=1))
REGION_FD = CompanionRequest(region_fd=CompanionRegionFd(label="kv"))
WAIT_S = 5.0

# Connects, says hello, hands its end of the socket to its parent, and stays: from then on only its pidfd tells its death.
CHILD = """
import socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[3]))
sock.recv(65536)
socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b"x"], [sock.fileno()])
time.sleep(60)
"""


class Hooks:
    """Keeps what it was told; a descriptor's ticket is its size, so a test sees which file came."""

    def __init__(self) -> None:
        self.peers: list[SessionPeer] = []
        self.labels: list[str] = []
        self.closed_sessions: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.open_pages: Callable[[], SharedPages] | None = None
        self.pages: list[SharedPages] = []

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        if self.refusal is not None:
            raise self.refusal
        self.peers.append(peer)
        return f"s{len(self.peers)}", bytes(32)

    def progress_pages(self, session_id: str) -> SharedPages | None:
        if self.open_pages is None:
            return None
        self.pages.append(self.open_pages())
        return self.pages[-1]

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.labels.append(label)
        return os.fstat(fd).st_size

    def closed(self, session_id: str, why: str) -> None:
        self.closed_sessions.append((session_id, why))


def make(path: Path, hooks: Hooks, **changes: Any) -> CompanionServer:
    settings: dict[str, Any] = {"connections_max": 4, "mode": 0o600, **changes}
    return CompanionServer(path, hooks, boot_id="boot", version="1.2", engine_endpoint="unix:///x", **settings)


def frame(request: CompanionRequest) -> bytes:
    body = request.SerializeToString()
    return struct.pack("<I", len(body)) + body


class RawEngine:
    """The other end, byte by byte."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.connect(str(path))

    async def reply(self) -> CompanionReply:
        """Raises `EOFError` when the daemon closed."""
        (size,) = struct.unpack("<I", await self._exactly(4))
        return CompanionReply.FromString(await self._exactly(size))

    async def ask(self, request: CompanionRequest, fds: Sequence[int] = ()) -> CompanionReply:
        socket.send_fds(self.sock, [frame(request)], list(fds))
        return await self.reply()

    async def at_end(self) -> bool:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 1), WAIT_S) == b""

    async def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, size - len(found)), WAIT_S)
            if not more:
                raise EOFError
            found += more
        return found


@asynccontextmanager
async def serving(path: Path, **changes: Any) -> AsyncIterator[tuple[CompanionServer, Hooks, RawEngine]]:
    """A server and an engine that is connected and has not said anything."""
    hooks = Hooks()
    server = make(path, hooks, **changes)
    await server.start()
    engine = RawEngine(path)
    try:
        yield server, hooks, engine
    finally:
        engine.sock.close()
        await server.stop()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(WAIT_S / 1000)
    raise AssertionError(f"not within {WAIT_S} s")


def new_file(size_bytes: int = 0) -> int:
    fd = os.memfd_create("kv")
    os.ftruncate(fd, size_bytes)
    return fd


def is_there(path: Path) -> bool:
    return path.exists()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def start_child(path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """An engine's process in a session, and our own copy of its end of the socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CHILD, str(path), str(theirs.fileno()), frame(HELLO).hex()]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    return child, fds[0]
