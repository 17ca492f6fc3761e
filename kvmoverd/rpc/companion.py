"""The companion socket: what gRPC can't carry between an engine and its daemon. See `companion.proto`.

It reads who the engine is, takes descriptors, and lives as long as the session. An engine is dead when its process ends
or its end of the socket closes, whichever is seen first; the session then ends, once.

Everything runs in callbacks of the loop on non-blocking sockets: the loops' own socket calls take no ancillary data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from kvmover_proto import companion_pb2
from kvmoverd.core.errors import BadRequest, ConfigError, KvmoverError, ProtocolMismatch, QueueFull
from kvmoverd.core.progress import ENTRIES
from kvmoverd.ports.progress import SharedPages
from kvmoverd.rpc.companion_frames import Frame, refusal, send_reply

log = logging.getLogger(__name__)

PROTOCOL = 1
TEXT_MAX = 128
FRAME_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 1.0
PROBE_TIMEOUT_S = 1.0
LISTEN_BACKLOG = 64
SILENT_MAX = 32
"""Connections that have not said Hello. One more takes the place of the oldest of the user who has the most of them, so
that nobody keeps others out; an engine says Hello as soon as it is connected."""

_PEER_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class SessionPeer:
    """Who opened a session: credentials as the kernel gives them, and the name the engine gives itself.

    `pid` is 0 when the engine's process has no number in this daemon's PID namespace.
    """

    pid: int
    uid: int
    gid: int
    client: str


class SessionHooks(Protocol):
    """What the daemon does with sessions. Called from the loop; may raise `KvmoverError`, which the engine is told."""

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        """A session begins: its public id and its secret token."""

    def progress_pages(self, session_id: str) -> SharedPages | None:
        """The engine asks for its session's pages, once; None when it gets none. The caller closes the engine's ends."""

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        """A descriptor came: the ticket it is registered by. The caller closes `fd` when this returns."""

    def closed(self, session_id: str, why: str) -> None:
        """The session ended; once for each one opened."""


class CompanionServer:
    """Listens at `path`; a socket file left by a dead daemon is replaced, one of a live daemon refused."""

    def __init__(
        self,
        path: Path | str,
        sessions: SessionHooks,
        *,
        boot_id: str,
        version: str,
        engine_endpoint: str,
        connections_max: int,
        mode: int,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        """`frame_timeout_s`: from connecting to the whole Hello, and from the first to the last byte of a message."""
        self.path = Path(path)
        self.sessions = sessions
        self.boot_id = boot_id
        self.version = version
        self.engine_endpoint = engine_endpoint
        self.connections_max = connections_max
        self.mode = mode
        self.frame_timeout_s = frame_timeout_s
        # In the order in which they came.
        self._silent: dict[_Connection, None] = {}
        self._sessions: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._inode = 0
        self._resume: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        return len(self._silent) + len(self._sessions)

    async def start(self) -> None:
        """Raises `ConfigError` when the path can't be had."""
        _remove_stale(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self.path))
            os.chmod(self.path, self.mode)
            listener.listen(LISTEN_BACKLOG)
            self._inode = os.stat(self.path).st_ino
        except OSError as error:
            listener.close()
            raise ConfigError(f"can't listen at {self.path}: {error}", path=self.path) from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    async def stop(self) -> None:
        """Ends every session and removes the socket file, if it is still this server's."""
        if self._listener is None:
            return
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for connection in [*self._silent, *self._sessions]:
            connection.end("the daemon stops")
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            log.debug("%s was removed by someone else", self.path)

    def _accept(self) -> None:
        assert self._listener is not None, "accepting without a listener"
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        sock.setblocking(False)
        if len(self._sessions) >= self.connections_max:
            send_reply(sock, refusal(self._full()))
            sock.close()
            return
        if len(self._silent) >= SILENT_MAX:
            self._make_room()
        connection = _Connection(self, sock, self._gone)
        self._silent[connection] = None
        connection.begin()

    def greeted(self, connection: _Connection) -> None:
        """It said Hello, and becomes a session. Raises `QueueFull`."""
        if len(self._sessions) >= self.connections_max:
            raise self._full()
        del self._silent[connection]
        self._sessions.add(connection)

    def _full(self) -> QueueFull:
        return QueueFull(f"{len(self._sessions)} companion connections are open, at most {self.connections_max} may be")

    def _make_room(self) -> None:
        users = Counter(connection.uid for connection in self._silent)
        ((uid, most),) = users.most_common(1)
        oldest = next(connection for connection in self._silent if connection.uid == uid)
        oldest.refuse(QueueFull(f"{most} connections of user {uid} have not said Hello, and others want their turn"))

    def _gone(self, connection: _Connection) -> None:
        self._silent.pop(connection, None)
        self._sessions.discard(connection)

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: the listener stays readable, and trying again at once would only spin."""
        assert self._listener is not None, "pausing without a listener"
        loop, fileno = asyncio.get_running_loop(), self._listener.fileno()
        log.warning("no companion connections for %g s: %s", ACCEPT_PAUSE_S, error)
        loop.remove_reader(fileno)
        self._resume = loop.call_later(ACCEPT_PAUSE_S, loop.add_reader, fileno, self._accept)


class _Connection:
    """One engine. `end` may be called any number of times; the session's end is told once."""

    def __init__(self, server: CompanionServer, sock: socket.socket, gone: Callable[[_Connection], None]) -> None:
        self._server = server
        self._sock = sock
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._frame = Frame()
        self._session_id = ""
        self._pidfd = -1
        self._deadline: asyncio.TimerHandle | None = None
        self._open = True
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        self._pid, self.uid, self._gid = _PEER_CREDENTIALS.unpack(credentials)

    def begin(self) -> None:
        """Watches the process and the socket; Hello must be whole before the deadline."""
        self._arm()
        self._loop.add_reader(self._sock.fileno(), self._readable)
        if self._pid == 0:
            log.info("an engine of another PID namespace: only the end of its socket tells its death")
            return
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self.end(f"process {self._pid} ended")
            return
        except OSError as error:
            log.warning("process %d can't be watched, only its socket: %s", self._pid, error)
            return
        self._loop.add_reader(self._pidfd, self.end, f"process {self._pid} ended")

    def end(self, why: str) -> None:
        if not self._open:
            return
        self._open = False
        self._disarm()
        self._loop.remove_reader(self._sock.fileno())
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._frame.close()
        self._sock.close()
        self._gone(self)
        if self._session_id:
            self._server.sessions.closed(self._session_id, why)

    def _arm(self) -> None:
        late = f"no whole message within {self._server.frame_timeout_s:g} s"
        self._deadline = self._loop.call_later(self._server.frame_timeout_s, self.refuse, BadRequest(late))

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _readable(self) -> None:
        try:
            message = self._frame.read(self._sock)
        except BlockingIOError:
            return
        except (EOFError, OSError) as error:
            self.end(f"its socket broke: {error}" if str(error) else "it closed its socket")
            return
        except BadRequest as error:
            self.refuse(error)
            return
        if message is None:
            if self._deadline is None and self._frame.begun:
                self._arm()
            return
        self._disarm()
        frame, self._frame = self._frame, Frame()
        try:
            self._take(message, frame)
        except Exception as error:
            # A fault of the daemon: without an answer and an end the engine would wait for its deadline.
            log.exception("a message of session %s failed", self._session_id or "(none)")
            self.refuse(KvmoverError(f"{type(error).__name__}: {error}"))
        finally:
            frame.close()

    def _take(self, message: bytes, frame: Frame) -> None:
        try:
            request = companion_pb2.CompanionRequest.FromString(message)
        except DecodeError:
            self.refuse(BadRequest(f"a message of {len(message)} bytes is no CompanionRequest"))
            return
        kind = request.WhichOneof("kind")
        if kind == "hello" and not self._session_id and not frame.fds:
            self._hello(request.hello)
        elif kind == "region_fd" and self._session_id:
            self._region_fd(request.region_fd, frame)
        else:
            expected = "RegionFd" if self._session_id else "Hello"
            came = f"{kind or 'an unknown kind'} with {len(frame.fds)} descriptors"
            self.refuse(BadRequest(f"expected {expected}, got {came}"))

    def _hello(self, hello: companion_pb2.CompanionHello) -> None:
        if hello.protocol != PROTOCOL:
            self.refuse(ProtocolMismatch(f"protocol {hello.protocol} is refused, this daemon speaks {PROTOCOL}"))
            return
        server = self._server
        try:
            server.greeted(self)
            session_id, token = server.sessions.opened(
                SessionPeer(self._pid, self.uid, self._gid, hello.client[:TEXT_MAX])
            )
        except KvmoverError as error:
            self.refuse(error)
            return
        self._session_id = session_id
        welcome = companion_pb2.CompanionWelcome(
            session_token=token,
            session_id=session_id,
            boot_id=server.boot_id,
            version=server.version,
            engine_endpoint=server.engine_endpoint,
        )
        pages = server.sessions.progress_pages(session_id) if hello.progress_page else None
        if pages is None:
            self._reply(companion_pb2.CompanionReply(welcome=welcome))
            return
        welcome.progress_entries = ENTRIES
        try:
            self._reply(companion_pb2.CompanionReply(welcome=welcome), pages.engine_fds())
        finally:
            pages.close_engine_fds()

    def _region_fd(self, region_fd: companion_pb2.CompanionRegionFd, frame: Frame) -> None:
        """A refused descriptor leaves the session alive: nothing was taken."""
        if len(frame.fds) != 1 or frame.fds_cut:
            came = f"{len(frame.fds)} descriptors{' and more' if frame.fds_cut else ''}"
            self._reply(refusal(BadRequest(f"{came} came with one RegionFd, exactly 1 is taken")))
            return
        try:
            ticket = self._server.sessions.fd_received(self._session_id, frame.fds[0], region_fd.label[:TEXT_MAX])
        except KvmoverError as error:
            self._reply(refusal(error))
            return
        self._reply(companion_pb2.CompanionReply(fd_ticket=companion_pb2.CompanionFdTicket(fd_ticket=ticket)))

    def refuse(self, error: KvmoverError) -> None:
        """A broken conversation can't be picked up again: say why, and end it."""
        send_reply(self._sock, refusal(error))
        self.end(str(error))

    def _reply(self, reply: companion_pb2.CompanionReply, fds: Sequence[int] = ()) -> None:
        # Replies are small and one per request: a full socket means an engine that does not read, not a burst.
        if not send_reply(self._sock, reply, fds):
            self.end("it does not read its replies")


def _remove_stale(path: Path) -> None:
    """Raises `ConfigError` when something other than a dead daemon's socket is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket", path=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"{path} is taken, and asking who has it failed: {error}", path=path) from error
    raise ConfigError(f"{path} is taken by a live daemon: stop it, or choose another engine_api.socket", path=path)
