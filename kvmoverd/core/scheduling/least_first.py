"""Names by a number that changes often, the least first: a heap in which old entries are skipped."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class LeastFirst:
    """A change costs log n. Of equal numbers the lesser name is first. Old entries are swept out before they are the most."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, name: str, number: float) -> None:
        """The name's number is this one from now on."""
        if self._numbers.get(name) == number:
            return
        self._numbers[name] = number
        heappush(self._heap, (number, name))
        if len(self._heap) > 4 * len(self._numbers) + 64:
            self._heap = [(number, name) for name, number in self._numbers.items()]
            heapify(self._heap)

    def drop(self, name: str) -> None:
        self._numbers.pop(name, None)

    def least(self) -> str | None:
        """The name with the least number; None when there is none."""
        heap, numbers = self._heap, self._numbers
        while heap:
            number, name = heap[0]
            if numbers.get(name) == number:
                return name
            heappop(heap)
        return None

    def leasts(self, most: int) -> list[str]:
        """Up to so many names, the least first. Costs `most` log n."""
        found: list[tuple[float, str]] = []
        while len(found) < most and self.least() is not None:
            entry = heappop(self._heap)
            if not found or found[-1] != entry:
                found.append(entry)
        for entry in found:
            heappush(self._heap, entry)
        return [name for _, name in found]
