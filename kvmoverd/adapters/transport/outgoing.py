"""The sending end of one route: a queue, and the connections that take from it, each with a thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque

from kvmoverd.adapters.transport.channel import Channel
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import FrameError
from kvmoverd.adapters.transport.link import Link
from kvmoverd.adapters.transport.medium import ChannelSettings, Medium
from kvmoverd.adapters.transport.threads import Threads
from kvmoverd.adapters.transport.wire import READ, ChannelLost, Stopped
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Route, RouteLost, Send, Sent

PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0
"""Before the next dial after a loss; doubled until a frame is applied."""
LINGER_S = 30.0
"""A thread without connection and work ends after so long."""


class Outgoing:
    """Dials when there is work, answers every send once, and ends when it lingers without work.

    The lead's thread, `run`, makes a link of one connection, which grows to `settings.connections` while sends wait and all
    are busy. Sends go over whichever is free. When one connection breaks, the link does, and that is told once.
    """

    def __init__(
        self, route: Route, medium: Medium, settings: ChannelSettings, events: Events, threads: Threads
    ) -> None:
        self.node = route.node
        self.sent_bytes = 0
        self._route = route
        self._medium = medium
        self._settings = settings
        self._events = events
        self._threads = threads
        self._lock = threading.Lock()
        self._queue: deque[Send] = deque()
        self._pending = 0
        self._retired = False
        self._replaced = False
        self._link: Link | None = None
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
            if self._link is not None:
                self._link.wake_one()
            else:
                os.eventfd_write(self._wake_fd, 1)
            return True

    @property
    def retired(self) -> bool:
        return self._retired

    def replaced_by(self, route: Route) -> bool:
        """Ends what was dialled with the key of an earlier Hello, without telling a loss; False: nothing of that is open.

        The other side may have ended it long ago: a network that was cut meanwhile keeps the word from us until the next send.
        """
        with self._lock:
            link = self._link
            if link is None or route.key == self._route.key:
                return False
            self._retired = self._replaced = True
        link.lose(Reason.PEER_LOST, f"{self.node} was greeted anew")
        return True

    def abandon(self, reason: Reason, message: str) -> None:
        """Ends all that waits where no thread can be had: `run` must never be called then."""
        self._give_up(reason, message)
        os.close(self._wake_fd)

    def run(self) -> None:
        """The lead's whole life."""
        while self._await_work():
            link = Link(self._lock, self._queue, self._settings.connections, self._end, self._grow)
            with self._lock:
                self._link = link
            self._serve(link)
            with self._lock:
                self._link = None
            reason, message = link.loss
            self._give_up(reason, message)
            if reason is not Reason.SHUTTING_DOWN and not self._replaced:
                self._events.put(RouteLost(self.node, self._route.boot_id, False, message))
                self._pause()

    def _await_work(self) -> bool:
        """False when the thread should end: the transport stops, or nothing came for `LINGER_S`."""
        deadline_s = time.monotonic() + LINGER_S
        stopping = self._replaced
        while not stopping and not self._queue and (left_s := deadline_s - time.monotonic()) > 0:
            stopping = self._settings.stop_fd in self._poll(left_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
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

    def _pause(self) -> None:
        self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        poller = select.poll()
        poller.register(self._settings.stop_fd, READ)
        poller.poll(self._pause_s * 1000)

    def _grow(self, link: Link) -> None:
        """One connection more; where the system gives no thread, those there are do the work."""
        if not self._threads.start(f"to-{self.node}", lambda: self._serve(link, helper=True)):
            link.stay_small()

    def _serve(self, link: Link, *, helper: bool = False) -> None:
        """One connection from dial to end. The socket is closed before its sends are given up, and the link is lost then.

        A helper that the other side does not let in is no loss: the link stays as it is.
        """
        route = self._route
        channel = Channel(route, link.link_id, self._medium, self._settings, link)
        entered = False
        try:
            channel.dial()
            entered = link.enter(channel)
            if entered:
                channel.converse()
        except Stopped:
            reason, message = Reason.SHUTTING_DOWN, "the transport is closed"
        except (ChannelLost, FrameError, OSError, ValueError) as error:
            reason, message = Reason.PEER_LOST, f"data channel to {self.node} at {route.endpoint}: {error}"
        except Exception as error:  # noqa: BLE001 - a thread that ends without a word would leave its sends open for ever
            reason, message = Reason.INTERNAL, f"data channel to {self.node} at {route.endpoint}: {error!r}"
        channel.close()
        link.leave(channel)
        if helper and not entered:
            link.stay_small()
        else:
            link.lose(reason, message)
        channel.give_up(*link.loss)

    def _give_up(self, reason: Reason, message: str) -> None:
        """Ends all sends that no connection has taken."""
        while True:
            with self._lock:
                if not self._queue:
                    return
                send = self._queue.popleft()
            self._end(send, reason, 0, message)

    def _end(self, send: Send, reason: Reason, moved_bytes: int, message: str) -> None:
        with self._lock:
            self._pending -= 1
            if reason is Reason.OK:
                self.sent_bytes += moved_bytes
                self._pause_s = 0.0
        self._events.put(Sent(send.op_id, reason, moved_bytes, message))
