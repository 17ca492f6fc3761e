"""Lag of the event loop: how late it serves what is due. Steps that hold the loop show up here, and a busy machine does."""

from __future__ import annotations

import asyncio
import time
from collections import deque

PERIOD_US = 2_000
"""A timer that often costs about 0.5 % of a core. A step of n us is seen as a lag of n - 2,000 to n us: nothing that the
loop itself offers sees single steps, and a watching thread would want the interpreter's lock whenever a step has it."""
LONG_US = 1_000
WINDOW_S = 1.0
WINDOWS = 10
SUB_BITS = 2
LAG_BITS = 24
"""Longer lags count as one of 16 s."""
BUCKETS = (LAG_BITS - SUB_BITS + 1) << SUB_BITS


def _bucket(lag_us: int) -> int:
    """Four buckets an octave: a lag is known to a quarter of itself."""
    shift = max(0, lag_us.bit_length() - SUB_BITS - 1)
    return (shift << SUB_BITS) + (lag_us >> shift)


def _bucket_end_us(bucket: int) -> int:
    """The longest lag of a bucket.

    >>> all(_bucket_end_us(_bucket(lag)) >= lag > _bucket_end_us(_bucket(lag) - 1) for lag in range(1, 5_000))
    True
    """
    shift = max(0, (bucket >> SUB_BITS) - 1)
    return ((bucket - (shift << SUB_BITS) + 1) << shift) - 1


class LagWindow:
    """Lags of a second."""

    def __init__(self) -> None:
        self.max_us = 0
        self.counts = [0] * BUCKETS

    def add(self, lag_us: int) -> None:
        """Counts moments, not timers: a timer that was late stands for those that should have fired meanwhile."""
        self.max_us = max(self.max_us, lag_us)
        for moment_us in range(lag_us, -1, -PERIOD_US):
            self.counts[_bucket(moment_us)] += 1


class LoopLag:
    """What the loop's lag was in the last 10 s, and how often it was longer than 1 ms since the start."""

    def __init__(self) -> None:
        self.long_count = 0
        self._windows = deque([LagWindow()], maxlen=WINDOWS)
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        self._arm()
        try:
            while True:
                await asyncio.sleep(WINDOW_S)
                self._windows.append(LagWindow())
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _arm(self) -> None:
        self._due_ns = time.monotonic_ns() + PERIOD_US * 1_000
        self._timer = asyncio.get_running_loop().call_later(PERIOD_US / 1e6, self._fired)

    def _fired(self) -> None:
        self.saw((time.monotonic_ns() - self._due_ns) // 1_000)
        self._arm()

    def saw(self, lag_us: int) -> None:
        """A timer was so late; a clock that is coarser than the lag may say less than nothing."""
        lag_us = min(max(0, lag_us), (1 << LAG_BITS) - 1)
        self.long_count += lag_us > LONG_US
        self._windows[-1].add(lag_us)

    @property
    def max_us(self) -> int:
        return max(window.max_us for window in self._windows)

    def quantile_us(self, share: float) -> int:
        """What so many of all moments' lags were at most; 0 before the first."""
        counts = [sum(column) for column in zip(*(window.counts for window in self._windows), strict=True)]
        below, wanted = 0, share * sum(counts)
        for bucket, count in enumerate(counts):
            below += count
            if count and below >= wanted:
                return min(_bucket_end_us(bucket), self.max_us)
        return 0
