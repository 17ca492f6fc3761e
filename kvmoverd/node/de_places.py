"""Places in the queue for DE buffer room, and what a scheduler is told when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvmoverd.core.errors import KvmoverError, PoolExhausted, QueueFull
from kvmoverd.node.peer import Reservation

RETRY_AFTER_MIN_S = 0.02
"""The least that a caller is told to wait."""


class Place:
    """A reservation's place. `since_s`: when the request began to wait for room, here or before it came back."""

    def __init__(self, reservation: Reservation, now_s: float) -> None:
        self.reservation = reservation
        self.since_s = now_s - reservation.waited_s
        self._refusal: KvmoverError | None = None
        self._decided = asyncio.Event()

    def grant(self) -> None:
        self._decided.set()

    def refuse(self, error: KvmoverError) -> None:
        """Counts also after `grant`, until whoever waits has gone on."""
        self._refusal = error
        self._decided.set()

    async def wait(self) -> None:
        """Until room is granted. Raises what it was refused with."""
        await self._decided.wait()
        self.check()

    def check(self) -> None:
        """Raises what it was refused with."""
        if self._refusal is not None:
            raise self._refusal


class Places:
    """All reservations that wait, as long as they do; the room bounds how many and how long."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._last_wait_s = 0.0

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: Place) -> None:
        self._places.add(place)

    def remove(self, place: Place) -> None:
        self._places.remove(place)

    def served(self, place: Place, now_s: float) -> None:
        """It has its buffer: so long one waits now."""
        self._last_wait_s = now_s - place.since_s

    def advise(self, error: KvmoverError, now_s: float, wait_max_s: float) -> None:
        """Tells a caller that there is no room for how many wait, since when, and in how many milliseconds to ask again.

        That is how long the oldest has waited by now, or the last that got room had: whoever comes behind them waits as long.
        """
        if isinstance(error, PoolExhausted | QueueFull):
            oldest_s = max((now_s - place.since_s for place in self._places), default=0.0)
            retry_s = min(max(oldest_s, self._last_wait_s, RETRY_AFTER_MIN_S), max(wait_max_s, RETRY_AFTER_MIN_S))
            error.details |= {
                "retry_after_ms": str(round(retry_s * 1000)),
                "waiting": str(len(self._places)),
                "oldest_wait_ms": str(round(oldest_s * 1000)),
            }
