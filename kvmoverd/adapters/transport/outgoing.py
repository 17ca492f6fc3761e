"""The sending end of one route: a queue, a thread, a connection, and the frames that wait for their acks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from typing import NoReturn

import numpy as np

from kvmoverd.adapters.memory.iovec import SLICE_ROW_BYTES, Cursor, address_of, total_bytes
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import ACK_BYTES, Ack, BodyKind, Frame, FrameError, Preface, Status
from kvmoverd.adapters.transport.medium import ChannelSettings, Medium
from kvmoverd.adapters.transport.sinks import REASONS
from kvmoverd.adapters.transport.wire import IDLE_WAIT_S, READ, WRITE, ChannelLost, Stopped, Wire
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Route, RouteLost, Send, Sent

WINDOW_FRAMES = 16
"""Frames without an ack: enough that a round trip is hidden, few enough that cancelling drains quickly."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0
"""Before the next dial after a loss; doubled until a frame is applied."""
LINGER_S = 30.0
"""A thread without connection and work ends after so long."""
_ACKS_BYTES_MAX = 64 * ACK_BYTES


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


class Outgoing:
    """Dials when there is work, answers every send once, and ends when it lingers without work.

    A source is not touched after its `Sent`: the connection is closed before sends are given up, and a receiver that
    pulls from this process applies nothing once it sees that.
    """

    def __init__(self, route: Route, medium: Medium, settings: ChannelSettings, events: Events) -> None:
        self.node = route.node
        self.sent_bytes = 0
        self._route = route
        self._medium = medium
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()
        self._queue: deque[Send] = deque()
        self._pending = 0
        self._retired = False
        self._frames: deque[_Outbound] = deque()
        self._acks = b""
        self._sequence = 0
        self._progress_s = 0.0
        self._pause_s = 0.0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, send: Send, route: Route) -> bool:
        """Takes the send, or refuses it with a `Sent`; False when this end has retired. The latest route is dialled."""
        with self._lock:
            if self._retired:
                return False
            self._route = route
            if self._pending >= self._settings.queue_max:
                queue_max = self._settings.queue_max
                text = f"{self._pending} sends to {self.node} wait or run, transport.queue_max is {queue_max}"
                self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, text))
                return True
            self._pending += 1
            self._queue.append(send)
            os.eventfd_write(self._wake_fd, 1)
            return True

    @property
    def retired(self) -> bool:
        return self._retired

    def abandon(self, reason: Reason, message: str) -> None:
        """Ends all that waits where no thread can be had: `run` must never be called then."""
        self._give_up(reason, message)
        os.close(self._wake_fd)

    def run(self) -> None:
        """The thread's whole life."""
        while self._await_work():
            reason, message = self._serve_once()
            self._give_up(reason, message)
            if reason is not Reason.SHUTTING_DOWN:
                self._events.put(RouteLost(self.node, self._route.boot_id, False, message))
                self._pause()

    def _await_work(self) -> bool:
        """False when the thread should end: the transport stops, or nothing came for `LINGER_S`."""
        deadline_s = time.monotonic() + LINGER_S
        stopping = False
        while not stopping and not self._queue and (left_s := deadline_s - time.monotonic()) > 0:
            stopping = self._settings.stop_fd in self._poll(left_s)
            self._heed()
        with self._lock:
            if self._queue and not stopping:
                return True
            self._retired = True
        self._give_up(Reason.SHUTTING_DOWN, "the transport is closed")
        os.close(self._wake_fd)
        return False

    def _poll(self, timeout_s: float) -> dict[int, int]:
        poller = select.poll()
        for fd in (self._settings.stop_fd, self._wake_fd):
            poller.register(fd, READ)
        return dict(poller.poll(timeout_s * 1000))

    def _heed(self) -> None:
        """Clears the wake-up; who does it looks into the queue afterwards."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _pause(self) -> None:
        self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        poller = select.poll()
        poller.register(self._settings.stop_fd, READ)
        poller.poll(self._pause_s * 1000)

    def _serve_once(self) -> tuple[Reason, str]:
        """One connection from dial to end: why it ended. The socket is closed on return."""
        wire = None
        try:
            wire = self._dial()
            self._greet(wire)
            self._converse(wire)
        except Stopped:
            return Reason.SHUTTING_DOWN, "the transport is closed"
        except (ChannelLost, FrameError, OSError, ValueError) as error:
            return Reason.PEER_LOST, f"data channel to {self.node} at {self._route.endpoint}: {error}"
        except Exception as error:  # noqa: BLE001 - a thread that ends without a word would leave its sends open for ever
            return Reason.INTERNAL, f"data channel to {self.node} at {self._route.endpoint}: {error!r}"
        finally:
            if wire is not None:
                wire.close()

    def _dial(self) -> Wire:
        settings = self._settings
        sock = self._medium.connect(self._route.endpoint)
        return Wire(sock, stop_fd=settings.stop_fd, io_timeout_s=settings.io_timeout_s)

    def _greet(self, wire: Wire) -> None:
        wire.connected()
        wire.write_all(Preface(self._settings.node, self._settings.boot_id, self._route.key).encode())
        try:
            answer = Ack.decode(wire.read_exactly(ACK_BYTES))
        except ChannelLost as error:
            raise ChannelLost(f"not accepted, its Hello key may be void: {error}") from error
        if answer.status is not Status.ACCEPTED:
            raise ChannelLost(f"not accepted: {answer.status.name}")
        self._acks = b""

    def _converse(self, wire: Wire) -> NoReturn:
        """Sends and reads acks until the channel breaks."""
        while True:
            writing = self._next_frame()
            if writing is not None and wire.send_step(writing.cursor):
                self._progress_s = time.monotonic()
                continue
            wanted = {wire.fd: READ | (WRITE if writing else 0), self._wake_fd: READ}
            ready = wire.poll(wanted, self._patience_s())
            if self._wake_fd in ready:
                self._heed()
            if ready.get(wire.fd, 0) & ~WRITE:
                self._take_acks(wire.read_some(_ACKS_BYTES_MAX))
            if self._patience_s() <= 0:
                raise ChannelLost(f"no byte moved for {self._settings.io_timeout_s:g} s")

    def _patience_s(self) -> float:
        """How long to wait now; 0 or less: too long already."""
        if not self._frames:
            return IDLE_WAIT_S
        return self._progress_s + self._settings.io_timeout_s - time.monotonic()

    def _next_frame(self) -> _Outbound | None:
        """The frame that is being written, else the next of the queue if the window allows."""
        if self._frames and self._frames[-1].cursor.left_bytes:
            return self._frames[-1]
        while len(self._frames) < WINDOW_FRAMES and self._queue:
            send = self._queue.popleft()
            self._sequence += 1
            try:
                made = _Outbound(send, self._sequence, self._medium.kind)
            except FrameError as error:
                self._end(send, Reason.INTERNAL, 0, str(error))
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
        if ack.status is Status.APPLIED:
            self.sent_bytes += frame.payload_bytes
            self._pause_s = 0.0
        self._end(frame.send, REASONS[ack.status], ack.moved_bytes, self._explain(frame, ack))

    def _explain(self, frame: _Outbound, ack: Ack) -> str:
        send = frame.send
        match ack.status:
            case Status.REFUSED:
                return (
                    f"{self.node} does not take layer {send.layer} at block {send.first_block} in sink {send.sink_id}"
                )
            case Status.MISMATCH:
                return f"{self.node} has {ack.detail} bytes for layer {send.layer}, {frame.payload_bytes} were sent"
            case Status.FAILED:
                hint = f": {PULL_REFUSED}" if ack.detail in (errno.EPERM, errno.ESRCH) else ""
                return f"{self.node} could not apply layer {send.layer}: {os.strerror(ack.detail)}{hint}"
            case _:
                return ""

    def _give_up(self, reason: Reason, message: str) -> None:
        """Ends all sends under way and all that wait; the connection is closed already."""
        frames, self._frames = self._frames, deque()
        for frame in frames:
            self._end(frame.send, reason, 0, message)
        while self._queue:
            self._end(self._queue.popleft(), reason, 0, message)

    def _end(self, send: Send, reason: Reason, moved_bytes: int, message: str) -> None:
        with self._lock:
            self._pending -= 1
        self._events.put(Sent(send.op_id, reason, moved_bytes, message))


PULL_REFUSED = "run both daemons as one user in one pid namespace, with kernel.yama.ptrace_scope 0 or 1"
"""Remedy when the kernel does not let a daemon pull from another."""
