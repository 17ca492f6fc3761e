"""One connection of a route: frames one way, acks the other, and the books of what waits for an ack."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from typing import NoReturn, Protocol

import numpy as np

from kvmoverd.adapters.memory.iovec import SLICE_ROW_BYTES, STEP_BYTES_MAX, Cursor, address_of, total_bytes
from kvmoverd.adapters.transport.frames import ACK_BYTES, Ack, BodyKind, Frame, FrameError, Preface, Status
from kvmoverd.adapters.transport.medium import ChannelSettings, Medium
from kvmoverd.adapters.transport.sinks import REASONS
from kvmoverd.adapters.transport.wire import IDLE_WAIT_S, READ, WRITE, ChannelLost, Wire
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Route, Send

WINDOW_FRAMES = 16
"""Frames without an ack: enough that a round trip is hidden, few enough that cancelling drains quickly."""
PULL_REFUSED = "run both daemons as one user in one pid namespace, with kernel.yama.ptrace_scope 0 or 1"
"""Remedy when the kernel does not let a daemon pull from another."""
_ACKS_BYTES_MAX = 64 * ACK_BYTES


class Work(Protocol):
    """Where a channel gets sends, and tells their ends. All methods may be called from any thread."""

    def take(self, channel: Channel) -> Send | None:
        """The next send. None: there is none; the channel is woken when one comes, or when the route is lost."""

    def attend(self, *, busy: bool) -> None:
        """Between two steps of a channel that has a frame to write, or not. Raises `ChannelLost` when another one broke."""

    def end(self, send: Send, reason: Reason, moved_bytes: int, message: str) -> None:
        """Once for each send taken."""


class _Outbound:
    """A frame on its way: header and body as one walk over slices. Holds the memory that the slices point at."""

    def __init__(self, send: Send, sequence: int, kind: BodyKind) -> None:
        source = np.ascontiguousarray(send.source)
        by_address = kind is BodyKind.ADDRESSES
        self.send = send
        self.sequence = sequence
        self.payload_bytes = total_bytes(source)
        frame = Frame(
            kind,
            sequence,
            send.sink_id,
            send.layer,
            send.first_block,
            self.payload_bytes,
            len(source) if by_address else 0,
        )
        header = np.frombuffer(frame.encode(), dtype=np.uint8)
        body = np.array([[address_of(source), len(source) * SLICE_ROW_BYTES]], np.uint64) if by_address else source
        head = np.array([[header.ctypes.data, len(header)]], dtype=np.uint64)
        self._held = (header, source)
        self.cursor = Cursor(np.concatenate([head, body]))


class Channel:
    """`converse` is the life of a connection; `close` ends it, and only then the sends that it still held.

    A source is not touched after its end: the connection is closed before, and a receiver that pulls from this process
    applies nothing once it sees that.
    """

    def __init__(self, route: Route, link_id: int, medium: Medium, settings: ChannelSettings, work: Work) -> None:
        self._route = route
        self._link_id = link_id
        self._medium = medium
        self._settings = settings
        self._work = work
        self._wire: Wire | None = None
        self._frames: deque[_Outbound] = deque()
        self._acks = b""
        self._sequence = 0
        self._progress_s = 0.0
        self._wake_fd = -1

    def wake(self) -> None:
        """Only between `dial` and `give_up`."""
        os.eventfd_write(self._wake_fd, 1)

    def dial(self) -> None:
        """Connects and is let in. Raises `ChannelLost`, `FrameError`, `Stopped`, `OSError`, `ValueError`."""
        settings, route = self._settings, self._route
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        sock = self._medium.connect(route.endpoint)
        wire = self._wire = Wire(sock, stop_fd=settings.stop_fd, io_timeout_s=settings.io_timeout_s)
        wire.connected()
        wire.write_all(Preface(settings.node, settings.boot_id, route.key, self._link_id).encode())
        try:
            answer = Ack.decode(wire.read_exactly(ACK_BYTES))
        except ChannelLost as error:
            raise ChannelLost(f"not accepted, its Hello key may be void: {error}") from error
        if answer.status is not Status.ACCEPTED:
            raise ChannelLost(f"not accepted: {answer.status.name}")

    def converse(self) -> NoReturn:
        """Sends and reads acks until the channel breaks. Raises `ChannelLost`, `FrameError`, `Stopped`."""
        wire = self._wire
        assert wire is not None, "a channel converses after it has dialled"
        while True:
            writing = self._next_frame()
            self._work.attend(busy=writing is not None)
            if writing is not None and (moved_bytes := wire.send_step(writing.cursor)):
                self._progress_s = time.monotonic()
                # A socket that took less than it was offered is full: asking again would only say so.
                if moved_bytes >= STEP_BYTES_MAX or not writing.cursor.left_bytes:
                    continue
            wanted = {wire.fd: READ | (WRITE if writing else 0), self._wake_fd: READ}
            ready = wire.poll(wanted, self._patience_s())
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if ready.get(wire.fd, 0) & ~WRITE:
                self._take_acks(wire.read_some(_ACKS_BYTES_MAX))
            if self._patience_s() <= 0:
                raise ChannelLost(f"no byte moved for {self._settings.io_timeout_s:g} s")

    def close(self) -> None:
        """The socket; what was on its way stays in the books until `give_up`."""
        if self._wire is not None:
            self._wire.close()

    def give_up(self, reason: Reason, message: str) -> None:
        """After `close`, also of a channel that did not dial: ends what was on its way."""
        frames, self._frames = self._frames, deque()
        for frame in frames:
            self._work.end(frame.send, reason, 0, message)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    def _patience_s(self) -> float:
        """How long to wait now; 0 or less: too long already."""
        if not self._frames:
            return IDLE_WAIT_S
        return self._progress_s + self._settings.io_timeout_s - time.monotonic()

    def _next_frame(self) -> _Outbound | None:
        """The frame that is being written, else the next of the route if the window allows."""
        if self._frames and self._frames[-1].cursor.left_bytes:
            return self._frames[-1]
        while len(self._frames) < WINDOW_FRAMES and (send := self._work.take(self)) is not None:
            self._sequence += 1
            try:
                made = _Outbound(send, self._sequence, self._medium.kind)
            except FrameError as error:
                self._work.end(send, Reason.INTERNAL, 0, str(error))
                continue
            if not self._frames:
                self._progress_s = time.monotonic()
            self._frames.append(made)
            return made
        return None

    def _take_acks(self, raw: bytes) -> None:
        self._acks += raw
        while len(self._acks) >= ACK_BYTES:
            ack = Ack.decode(self._acks[:ACK_BYTES])
            self._acks = self._acks[ACK_BYTES:]
            self._take_ack(ack)

    def _take_ack(self, ack: Ack) -> None:
        frame = self._frames[0] if self._frames else None
        if frame is None or frame.sequence != ack.sequence or frame.cursor.left_bytes or ack.status not in REASONS:
            raise ChannelLost(f"ack {ack.status.name} of frame {ack.sequence}, which does not wait for one")
        self._frames.popleft()
        self._progress_s = time.monotonic()
        self._work.end(frame.send, REASONS[ack.status], ack.moved_bytes, self._explain(frame, ack))

    def _explain(self, frame: _Outbound, ack: Ack) -> str:
        send, node = frame.send, self._route.node
        match ack.status:
            case Status.REFUSED:
                return f"{node} does not take layer {send.layer} at block {send.first_block} in sink {send.sink_id}"
            case Status.MISMATCH:
                return f"{node} has {ack.detail} bytes for layer {send.layer}, {frame.payload_bytes} were sent"
            case Status.FAILED:
                hint = f": {PULL_REFUSED}" if ack.detail in (errno.EPERM, errno.ESRCH) else ""
                return f"{node} could not apply layer {send.layer}: {os.strerror(ack.detail)}{hint}"
            case _:
                return ""
