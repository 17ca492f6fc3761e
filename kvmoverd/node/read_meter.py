"""How fast storage reads while it has something to read, over the last seconds of work. Pure: time is an argument."""

from __future__ import annotations

import math

MEMORY_S = 0.5
"""Of work: what was read so long ago counts for a third of what is read now. Longer, and requests wait too long for a device that
got slow."""
KNOWN_S = 0.02
"""Less work than this says nothing of a device."""


class ReadMeter:
    """Bytes over the time in which reads were under way; both fade as that time goes on, and stay as they are while none is.

    So reads that end together are no burst, for the time in which they moved counts too; a pause is no slowness; and a device
    that stalls grows slower with each look.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_ns = memory_s * 1e9
        self._under_way = 0
        self._seen_ns = 0
        self._busy_ns = 0.0
        self._read_bytes = 0.0
        self._worked_ns = 0
        self._moved_ns = 0

    def begun(self, reads: int, now_ns: int) -> None:
        """So many reads more are under way."""
        self._go_on(now_ns)
        if not self._under_way:
            self._moved_ns = now_ns
        self._under_way += reads

    def ended(self, read_bytes: int, now_ns: int) -> None:
        """A read has ended, well or not, and has moved so many bytes."""
        self._go_on(now_ns)
        assert self._under_way > 0, "a read ended that had not begun"
        self._under_way -= 1
        self._read_bytes += read_bytes
        if read_bytes:
            self._moved_ns = now_ns

    def rate_bytes_per_s(self, now_ns: int) -> int:
        """0: not known."""
        self._go_on(now_ns)
        if self._worked_ns < KNOWN_S * 1e9:
            return 0
        return max(1, round(self._read_bytes * 1e9 / self._busy_ns)) if self._read_bytes else 0

    def silent_ns(self, now_ns: int) -> int:
        """For how long nothing has come, though reads are under way; 0 when none is."""
        return max(0, now_ns - self._moved_ns) if self._under_way else 0

    def _go_on(self, now_ns: int) -> None:
        if self._under_way and now_ns > self._seen_ns:
            kept = math.exp((self._seen_ns - now_ns) / self._memory_ns)
            self._busy_ns = self._busy_ns * kept + self._memory_ns * (1 - kept)
            self._read_bytes *= kept
            self._worked_ns += now_ns - self._seen_ns
        self._seen_ns = max(self._seen_ns, now_ns)
