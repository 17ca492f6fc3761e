"""Events on their way from a transport's threads to the loop: a queue and one eventfd that wakes once for many."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from kvmoverd.ports.transport import TransportEvent


class Events:
    """`put` may be called from any thread, `poll` by one. As many wait at most as sends, sinks and channels exist."""

    def __init__(self) -> None:
        self._events: deque[TransportEvent] = deque()
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False

    def put(self, event: TransportEvent) -> None:
        with self._lock:
            self._events.append(event)
            self._wake()

    def wake(self) -> None:
        """Makes the descriptor readable: `poll` would find something, though nothing was put."""
        with self._lock:
            self._wake()

    def poll(self, events_max: int) -> list[TransportEvent]:
        with self._lock:
            taken = [self._events.popleft() for _ in range(min(events_max, len(self._events)))]
            if self._woken:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if self._events:
                self._wake()
            return taken

    def fileno(self) -> int:
        return self._wake_fd

    def close(self) -> None:
        """Closes the eventfd. What was put can still be polled, and a late `put` harms nobody."""
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
            self._wake_fd, self._woken = -1, False

    def _wake(self) -> None:
        if not self._woken and self._wake_fd >= 0:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)
