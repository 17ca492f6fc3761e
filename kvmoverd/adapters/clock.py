"""The machine's monotonic clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Clock port over `CLOCK_MONOTONIC`: never goes back, says nothing about the time of day."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
