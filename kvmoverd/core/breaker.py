"""Breaker: whoever failed is left alone for a pause, longer each time, instead of being waited for by everyone."""

from __future__ import annotations


class Breaker:
    """Opens after `failures_max` failures in a row, or at once by `trip`; the next success closes it for good.

    While it is open nobody is let through. When the pause is over the next failure opens it again, for twice as long, at
    most `pause_max_s`.

    >>> breaker = Breaker(failures_max=2, pause_s=1.0, pause_max_s=8.0)
    >>> [breaker.on_failure(10.0) or breaker.wait_s(10.0) for _ in range(2)]
    [0.0, 1.0]
    """

    def __init__(self, *, failures_max: int, pause_s: float, pause_max_s: float) -> None:
        self.failures = 0
        self._failures_max = failures_max
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._next_pause_s = pause_s
        self._open_until_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until someone is let through; 0 when it is closed."""
        return max(0.0, self._open_until_s - now_s)

    def on_failure(self, now_s: float) -> None:
        """One more failure in a row."""
        self.failures += 1
        if self.failures >= self._failures_max:
            self.trip(now_s)

    def trip(self, now_s: float) -> None:
        """Opens now, whatever was before; nothing when it is open already."""
        if self.wait_s(now_s) > 0.0:
            return
        self.failures = max(self.failures, self._failures_max)
        self._open_until_s = now_s + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, self._pause_max_s)

    def on_success(self) -> None:
        """All is well again."""
        self.failures = 0
        self._open_until_s = 0.0
        self._next_pause_s = self._pause_s
