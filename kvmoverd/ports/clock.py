"""Clock port: time is an argument, so that tests and the simulator can own it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
