"""Runs: some of a request's blocks, as ascending ranges of their indexes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Runs:
    """Disjoint ranges [first, stop), ascending, none of them empty, no two of them touching: `Runs.of` and `Runs.union` see to
    it.

    >>> parts = Runs.of((0, 2), (4, 6), (2, 3))
    >>> parts.spans, parts.count, parts.at(3), parts.below(5)
    (((0, 3), (4, 6)), 5, 4, 4)
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, *spans: tuple[int, int]) -> Runs:
        """From ranges in any order; empty ones vanish, touching and overlapping ones become one."""
        joined: list[tuple[int, int]] = []
        for first, stop in sorted(span for span in spans if span[0] < span[1]):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    @classmethod
    def of_mask(cls, mask: npt.NDArray[np.bool_]) -> Runs:
        """The indexes at which it is true.

        >>> Runs.of_mask(np.array([True, False, True, True])).spans
        ((0, 1), (2, 4))
        """
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
        return cls(tuple(zip(edges[::2], edges[1::2], strict=True)))

    @classmethod
    def union(cls, parts: Iterable[Runs]) -> Runs:
        return cls.of(*(span for part in parts for span in part.spans))

    @property
    def count(self) -> int:
        """How many blocks these are."""
        return sum(stop - first for first, stop in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    @property
    def first(self) -> int:
        """The lowest index; 0 when there is none."""
        return self.spans[0][0] if self.spans else 0

    @property
    def stop(self) -> int:
        """One more than the highest index; 0 when there is none."""
        return self.spans[-1][1] if self.spans else 0

    def below(self, block: int) -> int:
        """How many of them have a lower index."""
        return sum(min(stop, block) - first for first, stop in self.spans if first < block)

    def at(self, place: int) -> int:
        """Index of the block at that place among them; that of the end of the last run for `count`."""
        starts = list(accumulate((stop - first for first, stop in self.spans), initial=0))
        assert 0 <= place <= starts[-1], f"place {place} of {starts[-1]} blocks"
        if place == starts[-1]:
            return self.stop
        run = bisect_right(starts, place) - 1
        return self.spans[run][0] + place - starts[run]

    def head(self, count: int) -> Runs:
        """The first `count` of them."""
        return self.cut(0, self.at(min(count, self.count)))

    def tail(self, count: int) -> Runs:
        """All but the first `count` of them."""
        return self.cut(self.at(count), self.stop) if count < self.count else Runs()

    def cut(self, first: int, stop: int) -> Runs:
        """Those with indexes in [first, stop)."""
        return Runs.of(*((max(first, a), min(stop, b)) for a, b in self.spans))

    def minus(self, other: Runs) -> Runs:
        """One pass over both.

        >>> Runs.of((0, 10)).minus(Runs.of((2, 4), (8, 12))).spans
        ((0, 2), (4, 8))
        """
        left: list[tuple[int, int]] = []
        taken, place = other.spans, 0
        for first, stop in self.spans:
            start = first
            while place < len(taken) and taken[place][0] < stop:
                left.append((start, taken[place][0]))
                start = max(start, taken[place][1])
                if taken[place][1] > stop:
                    break
                place += 1
            left.append((start, stop))
        return Runs.of(*left)

    def both(self, other: Runs) -> Runs:
        """Those that are in both."""
        return self.minus(self.minus(other))

    def __contains__(self, block: int) -> bool:
        return any(first <= block < stop for first, stop in self.spans)

    def indexes(self) -> npt.NDArray[np.int64]:
        """Shape (count,)."""
        parts = [np.arange(first, stop, dtype=np.int64) for first, stop in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


NO_RUNS = Runs()
