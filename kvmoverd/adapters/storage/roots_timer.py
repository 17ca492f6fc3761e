"""A timer that a loop can wait for: readable at each beat while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class BeatTimer:
    """Stands still until `start`. Python has timer descriptors from 3.13 on. Raises `OSError`."""

    def __init__(self, beat_s: float) -> None:
        self.beat_s = beat_s
        self.running = False
        self._fd = int(_libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def start(self) -> None:
        self._set(self.beat_s)
        self.running = True

    def stop(self) -> None:
        self._set(0.0)
        self.running = False

    def take(self) -> None:
        """What has made it readable is over."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, beat_s: float) -> None:
        beat_ns = int(beat_s * 1e9)
        beat = _Timespec(beat_ns // 10**9, beat_ns % 10**9)
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(_TimerSpec(beat, beat)), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
