"""A lock for a few who are in a hurry, and for bulk work that takes it again and again."""

from __future__ import annotations

import threading
import time

_TURN_S = 100e-6


class TurnLock:
    """A lock of the library is not fair: who gives it up and wants it again at once gets it, though others wait.

    So bulk work calls `give_way` between two holds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wanted = True
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def give_way(self) -> None:
        """Sleeps for 0.1 ms where somebody has had to wait since it last did: he has the lock by then."""
        if self._wanted:
            self._wanted = False
            time.sleep(_TURN_S)
