"""Timers that a loop can wait for: readable when they are due."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class AlarmTimer:
    """Stands still until it is set. Python has timer descriptors from 3.13 on. Raises `OSError`."""

    def __init__(self) -> None:
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def set(self, after_s: float, *, every_s: float = 0.0) -> None:
        """Readable after so long, and from then on every so long, 0: once. Replaces what was set before."""
        # Of 0 the kernel would think that the timer is to stand still.
        first, interval = _timespec(max(1, int(after_s * 1e9))), _timespec(int(every_s * 1e9))
        self._set(_TimerSpec(interval, first))

    def take(self) -> None:
        """What has made it readable is over."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def stand_still(self) -> None:
        self._set(_TimerSpec())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, spec: _TimerSpec) -> None:
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")


class BeatTimer(AlarmTimer):
    """Readable at each beat while it runs, and a clock that stands still while this process does, and never goes back.

    Only a beat that comes late says that the process stood still: until then, time goes on for two beats at most.
    """

    def __init__(self, beat_s: float, clock_s: Callable[[], float]) -> None:
        super().__init__()
        self.beat_s = beat_s
        self.running = False
        self._clock_s = clock_s
        self._last = clock_s(), 0.0
        """When the last beat was, and what was lost before; one value, as other threads ask for the time."""

    def now_s(self) -> float:
        last_s, lost_s = self._last
        clock_s = self._clock_s()
        return (min(clock_s, last_s + 2 * self.beat_s) if self.running else clock_s) - lost_s

    def start(self) -> None:
        self._last = self._clock_s(), self._last[1]
        self.set(self.beat_s, every_s=self.beat_s)
        self.running = True

    def take(self) -> None:
        """A beat was heard."""
        super().take()
        (last_s, lost_s), clock_s = self._last, self._clock_s()
        self._last = clock_s, lost_s + max(0.0, clock_s - last_s - 2 * self.beat_s)

    def stop(self) -> None:
        self.stand_still()
        self.running = False


def _timespec(length_ns: int) -> _Timespec:
    return _Timespec(length_ns // 10**9, length_ns % 10**9)
