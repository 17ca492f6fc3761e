"""Places that can't be read for a while: when each may be tried again."""

from __future__ import annotations

import heapq

BAD_MAX = 65_536
"""Places that are known to be bad for a while; beyond it the one whose time ends first is tried again at once."""


class BadPlaces:
    """(time, namespace, raw tag, place word without flags), the earliest first. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, until_ns: int, fingerprint16: bytes, tag: int, place: int) -> None:
        heapq.heappush(self._heap, (until_ns, fingerprint16, tag, place))

    def due(self, now_ns: int) -> bool:
        return bool(self._heap) and (self._heap[0][0] <= now_ns or len(self._heap) > BAD_MAX)

    def take(self) -> tuple[bytes, int, int]:
        """The earliest: namespace, raw tag, place word."""
        return heapq.heappop(self._heap)[1:]
