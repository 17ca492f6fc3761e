"""Admission: each purpose has its share of the pool; who does not fit waits in order, for a bounded time."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvmoverd.core.errors import QueueFull, TooBig


class Purpose(enum.Enum):
    """What pool slots are for. The value is the key of `[pool]` that limits it, without `_bytes`."""

    READ = "read"
    DE_BUFFER = "de_buffer"
    WRITE_BACK = "write_back"
    HELP = "help"


@dataclass(frozen=True, slots=True)
class Granted:
    """The bytes are taken."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request waits behind `ahead` others."""

    ahead: int


@dataclass(frozen=True, slots=True)
class _Ask:
    number: int
    size_bytes: int
    since_s: float


class Admission:
    """Bytes by purpose, and within a purpose by age: a large request is not overtaken for ever by small ones.

    A purpose without a limit gets nothing.
    """

    def __init__(self, limits_bytes: Mapping[Purpose, int], *, queue_max: int) -> None:
        self._limits = dict.fromkeys(Purpose, 0) | dict(limits_bytes)
        self._taken = dict.fromkeys(Purpose, 0)
        self._queues: dict[Purpose, deque[_Ask]] = {purpose: deque() for purpose in Purpose}
        self._queue_max = queue_max

    def ask(self, purpose: Purpose, number: int, size_bytes: int, *, since_s: float = math.inf) -> Granted | Waiting:
        """Takes the bytes or a place in the queue; who needs nothing waits for nobody.

        `since_s`: when the request began to wait, on a clock that all share; it goes before those that began later. Raises
        `TooBig` for what could never fit, `QueueFull`.
        """
        assert size_bytes >= 0, f"{size_bytes} bytes are asked for"
        limit = self._limits[purpose]
        if size_bytes > limit:
            text = f"{size_bytes} bytes of the pool are needed, pool.{purpose.value}_bytes allows {limit}"
            raise TooBig(text, asked_bytes=size_bytes, limit_bytes=limit)
        queue = self._queues[purpose]
        ahead = len(queue)
        while ahead and queue[ahead - 1].since_s > since_s:
            ahead -= 1
        if not size_bytes or (not ahead and self.free_bytes(purpose) >= size_bytes):
            self._taken[purpose] += size_bytes
            return Granted()
        if len(queue) >= self._queue_max:
            raise QueueFull(f"{len(queue)} requests wait for pool.{purpose.value}_bytes, at most {self._queue_max} may")
        queue.insert(ahead, _Ask(number, size_bytes, since_s))
        return Waiting(ahead)

    def give_back(self, purpose: Purpose, size_bytes: int) -> list[int]:
        """Returns the numbers of the requests that are granted now."""
        assert size_bytes <= self._taken[purpose], f"{size_bytes} bytes given back, {self._taken[purpose]} are taken"
        self._taken[purpose] -= size_bytes
        return self._grant(purpose)

    def shrink(self, purpose: Purpose, number: int, size_bytes: int) -> list[int]:
        """A waiting request needs less by now and keeps its turn; returns the numbers of those that are granted because of it."""
        queue = self._queues[purpose]
        self._queues[purpose] = deque(
            replace(ask, size_bytes=size_bytes) if ask.number == number else ask for ask in queue
        )
        return self._grant(purpose)

    def leave(self, purpose: Purpose, number: int) -> list[int]:
        """A waiting request gives up; returns the numbers of those that are granted because of it."""
        queue = self._queues[purpose]
        self._queues[purpose] = deque(ask for ask in queue if ask.number != number)
        return self._grant(purpose)

    def free_bytes(self, purpose: Purpose) -> int:
        return self._limits[purpose] - self._taken[purpose]

    def taken_bytes(self, purpose: Purpose) -> int:
        return self._taken[purpose]

    def waiting(self, purpose: Purpose) -> int:
        return len(self._queues[purpose])

    def _grant(self, purpose: Purpose) -> list[int]:
        queue, granted = self._queues[purpose], []
        while queue and queue[0].size_bytes <= self.free_bytes(purpose):
            ask = queue.popleft()
            self._taken[purpose] += ask.size_bytes
            granted.append(ask.number)
        return granted
