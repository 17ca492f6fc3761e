"""Names in the order of a number that changes often."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf


class Ranked:
    """The names with the least numbers are at hand at once; of equal ones the lesser name is first. A change costs log n
    comparisons."""

    __slots__ = ("_numbers", "_sorted")

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._sorted: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def number(self, name: str) -> float:
        """The last one that was put."""
        return self._numbers[name]

    def put(self, name: str, number: float) -> None:
        """The name's number is this one from now on."""
        before = self._numbers.get(name)
        if before == number:
            return
        if before is not None:
            del self._sorted[bisect_left(self._sorted, (before, name))]
        self._numbers[name] = number
        insort(self._sorted, (number, name))

    def drop(self, name: str) -> None:
        """One that is not there is ignored."""
        before = self._numbers.pop(name, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, (before, name))]

    def least(self) -> float:
        """The least number; infinite when there is none."""
        return self._sorted[0][0] if self._sorted else inf

    def first(self, most: int) -> list[tuple[float, str]]:
        """Up to so many with their numbers, the least first."""
        return self._sorted[:most]
