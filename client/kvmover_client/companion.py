"""The client's end of the companion socket: opens the session, passes descriptors, notices the daemon's death at once."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvmover_client.errors import DaemonGone, KvmoverError, QueueFull, Refused, TimedOut, from_companion
from kvmover_client.progress import FDS, ProgressPages
from kvmover_proto import companion_pb2

PROTOCOL = 1
FRAME_BYTES_MAX = 65_536
TEXT_MAX = 128
WAITING_MAX = 64
RETRY_S = 0.05

_LENGTH = struct.Struct("<I")
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)

Waiting = asyncio.Future[companion_pb2.CompanionReply]


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the daemon says of itself and of the session. `session_token` is secret."""

    session_token: bytes
    session_id: str
    boot_id: str
    version: str
    engine_endpoint: str
    progress_entries: int = 0


class Companion:
    """One open companion socket. `gone` is called once, when the daemon closes it; not after `close`."""

    def __init__(self, sock: socket.socket, gone: Callable[[str], None]) -> None:
        self._sock = sock
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._waiting: deque[Waiting] = deque()
        self._fds: list[int] = []
        self._open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def connect(cls, path: str, gone: Callable[[str], None], deadline_s: float) -> Companion:
        """Tries until `deadline_s` (of the loop's clock) while nobody listens. Raises `DaemonGone`, `Refused`."""
        loop = asyncio.get_running_loop()
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                # A Unix socket connects or fails at once, so this never blocks the loop.
                sock.connect(path)
            except OSError as error:
                sock.close()
                if error.errno not in _ABSENT:
                    raise Refused(f"can't connect to {path}: {error}") from error
                if loop.time() + RETRY_S > deadline_s:
                    raise DaemonGone(f"no daemon listens at {path}: {error}") from error
            else:
                return cls(sock, gone)
            await asyncio.sleep(RETRY_S)

    async def hello(self, name: str, timeout_s: float, *, progress_page: bool = False) -> Welcome:
        """Raises `QueueFull`, `Refused`, `DaemonGone`, `TimedOut`."""
        hello = companion_pb2.CompanionHello(client=name[:TEXT_MAX], protocol=PROTOCOL, progress_page=progress_page)
        reply = await self._ask(companion_pb2.CompanionRequest(hello=hello), [], timeout_s)
        welcome = reply.welcome
        return Welcome(
            welcome.session_token,
            welcome.session_id,
            welcome.boot_id,
            welcome.version,
            welcome.engine_endpoint,
            welcome.progress_entries,
        )

    def progress_pages(self, welcome: Welcome) -> ProgressPages | None:
        """The pages that came with the welcome; None when there are none. Raises `KvmoverError` for unusable ones."""
        fds, self._fds = self._fds, []
        if welcome.progress_entries and len(fds) == FDS:
            return ProgressPages(fds, welcome.progress_entries, welcome.boot_id)
        for fd in fds:
            os.close(fd)
        if welcome.progress_entries:
            raise KvmoverError(f"{len(fds)} descriptors came with the pages, {FDS} were promised")
        return None

    async def pass_fd(self, fd: int, label: str, timeout_s: float) -> int:
        """Passes a copy of `fd`; the ticket to register it by. Raises `BadRegion`, `QueueFull`, `DaemonGone`, `TimedOut`."""
        region_fd = companion_pb2.CompanionRegionFd(label=label[:TEXT_MAX])
        reply = await self._ask(companion_pb2.CompanionRequest(region_fd=region_fd), [fd], timeout_s)
        return reply.fd_ticket.fd_ticket

    def close(self) -> None:
        """Ends the session; questions under way fail with `DaemonGone`."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(DaemonGone("the companion socket closed before the answer"))
        self._waiting.clear()

    async def _ask(
        self, request: companion_pb2.CompanionRequest, fds: list[int], timeout_s: float
    ) -> companion_pb2.CompanionReply:
        if not self._open:
            raise DaemonGone("the companion socket is closed")
        if len(self._waiting) >= WAITING_MAX:
            raise QueueFull(f"{len(self._waiting)} questions wait on the companion socket, at most {WAITING_MAX} may")
        self._send(request.SerializeToString(), fds)
        # Answers come in the order of the questions; one that nobody waits for any more keeps its place in the queue.
        waiting: Waiting = self._loop.create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await waiting
        except TimeoutError:
            raise TimedOut(f"no answer on the companion socket within {timeout_s:g} s") from None
        if reply.WhichOneof("kind") == "error":
            raise from_companion(reply.error.message)
        return reply

    def _send(self, body: bytes, fds: list[int]) -> None:
        frame = _LENGTH.pack(len(body)) + body
        try:
            sent = socket.send_fds(self._sock, [frame], fds, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise DaemonGone(f"the daemon does not read its companion socket: {error}") from error
        if sent != len(frame):
            self._lost(f"{sent} of {len(frame)} bytes went into the companion socket")
            raise DaemonGone("the daemon does not read its companion socket")

    def _readable(self) -> None:
        try:
            found, fds, _, _ = socket.recv_fds(self._sock, FRAME_BYTES_MAX, FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(f"the companion socket broke: {error}")
            return
        self._fds += fds
        if not found:
            self._lost("the daemon closed the companion socket")
            return
        self._received += found
        try:
            while (body := self._next_body()) is not None:
                self._take(companion_pb2.CompanionReply.FromString(body))
        except (DecodeError, KvmoverError) as error:
            self._lost(f"the daemon broke the companion protocol: {error}")

    def _next_body(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > FRAME_BYTES_MAX:
            raise KvmoverError(f"a message of {size} bytes, at most {FRAME_BYTES_MAX} are taken")
        end = _LENGTH.size + size
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def _take(self, reply: companion_pb2.CompanionReply) -> None:
        if not self._waiting:
            raise KvmoverError(f"a {reply.WhichOneof('kind')} that nobody asked for")
        waiting = self._waiting.popleft()
        if not waiting.done():
            waiting.set_result(reply)

    def _lost(self, why: str) -> None:
        if self._open:
            self.close()
            self._gone(why)
