"""How many bytes a lane moved in the time in which it had something to move, over the last moments. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = 20
"""Of a window: it slides in steps of one, and has one more, so that it is never shorter than it should be."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the window that ends at `until_ns`, how long sends were under way, and what they moved."""

    until_ns: int
    covered_ns: int
    busy_ns: float
    moved_bytes: float

    @property
    def rate_bytes_per_s(self) -> float | None:
        """None: nothing was under way."""
        return self.moved_bytes * 1e9 / self.busy_ns if self.busy_ns else None

    @property
    def busy_share(self) -> float:
        return min(1.0, self.busy_ns / self.covered_ns) if self.covered_ns else 0.0


class LaneMeter:
    """Bytes are told when a send ends; they count for all the time since the end before it, not for that moment.

    So a send that takes longer than a window is neither a silence nor a burst. Nor are several that moved side by side: ends
    that follow one soon, in half the time that it took, count as one with it. Until the next end nobody knows what the
    sends under way have moved by now: see `seen`.
    """

    def __init__(self, window_ns: int) -> None:
        self.moved_bytes = 0
        """Since it was made."""
        self.under_way = 0
        self.under_way_bytes = 0
        self.touched_ns = 0
        """When something was last under way."""
        self._part_ns = max(1, window_ns // PARTS)
        self._known_ns = 0
        self._together: tuple[int, int] | None = None
        """Of the last ends that count as one: since when their bytes count, and when the first of them was."""
        self._parts = [-1] * (PARTS + 1)
        self._busy_ns = [0.0] * (PARTS + 1)
        self._moved = [0.0] * (PARTS + 1)

    def begun(self, size_bytes: int, now_ns: int) -> None:
        if not self.under_way:
            self._known_ns, self._together = now_ns, None
        self.under_way += 1
        self.under_way_bytes += size_bytes
        self.touched_ns = now_ns

    def ended(self, size_bytes: int, moved_bytes: int, now_ns: int) -> None:
        self._spread(self._moved, self._since_ns(now_ns), now_ns, moved_bytes)
        self._spread(self._busy_ns, self._known_ns, now_ns, now_ns - self._known_ns)
        self.moved_bytes += moved_bytes
        self._leave(size_bytes, now_ns)

    def given_up(self, size_bytes: int, now_ns: int, *, counts: bool) -> None:
        """A send that failed moved nothing; the time it took is only held against the lane if it `counts`."""
        if counts:
            self._spread(self._busy_ns, self._known_ns, now_ns, now_ns - self._known_ns)
        self._leave(size_bytes, now_ns)

    def silence_ns(self, now_ns: int) -> int:
        """How long sends have been under way without an end."""
        return now_ns - self._known_ns if self.under_way else 0

    def seen(self, now_ns: int, *, patience_ns: int) -> Seen:
        """The last window. A silence of up to `patience_ns` is left out, a longer one counts as time that moved nothing."""
        silence_ns = self.silence_ns(now_ns)
        if silence_ns > patience_ns:
            return self._window(now_ns, silence_ns)
        return self._window(now_ns - silence_ns, 0)

    def _since_ns(self, now_ns: int) -> int:
        """Since when the bytes of a send that ends now were moved."""
        if self._together is not None:
            since_ns, first_ns = self._together
            if now_ns - first_ns <= max(self._part_ns, (first_ns - since_ns) // 2):
                return since_ns
        self._together = self._known_ns, now_ns
        return self._known_ns

    def _leave(self, size_bytes: int, now_ns: int) -> None:
        self.under_way -= 1
        self.under_way_bytes -= size_bytes
        assert self.under_way >= 0 <= self.under_way_bytes, f"{self.under_way} sends of {self.under_way_bytes} B"
        self._known_ns = self.touched_ns = now_ns

    def _spread(self, row: list[float], since_ns: int, until_ns: int, amount: float) -> None:
        """Over the parts of a time, evenly; what is older than the window goes under."""
        length_ns = until_ns - since_ns
        if length_ns <= 0:
            row[self._place(until_ns // self._part_ns)] += amount
            return
        from_ns = max(since_ns, (until_ns // self._part_ns - PARTS) * self._part_ns)
        while from_ns < until_ns:
            part = from_ns // self._part_ns
            to_ns = min(until_ns, (part + 1) * self._part_ns)
            row[self._place(part)] += amount * (to_ns - from_ns) / length_ns
            from_ns = to_ns

    def _place(self, part: int) -> int:
        """Where a part is counted; what stood there before is a whole round older."""
        place = part % (PARTS + 1)
        if self._parts[place] != part:
            self._parts[place], self._busy_ns[place], self._moved[place] = part, 0.0, 0.0
        return place

    def _window(self, until_ns: int, silence_ns: int) -> Seen:
        first = until_ns // self._part_ns - PARTS
        covered_ns = until_ns - first * self._part_ns
        places = [place for place, part in enumerate(self._parts) if part >= first]
        busy_ns = sum(self._busy_ns[place] for place in places) + min(silence_ns, covered_ns)
        return Seen(until_ns, covered_ns, busy_ns, sum(self._moved[place] for place in places))
