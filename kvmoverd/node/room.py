"""Room: admission to the pool by purpose, with callbacks and a time limit on the wait."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmoverd.core.admission import Admission, Granted, Purpose
from kvmoverd.core.errors import KvmoverError, PoolExhausted, QueueFull

RETRY_S = 0.02
"""How long to wait for slots on their way home before looking again."""


@dataclass(slots=True)
class _Place:
    """An owner's place: waiting while `timer` is set, else it holds `size_bytes`."""

    number: int
    purpose: Purpose
    size_bytes: int
    granted: Callable[[], None]
    refused: Callable[[KvmoverError], None]
    since_s: float
    wait_s: float
    until_s: float
    timer: asyncio.TimerHandle | None = None
    retry: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class RoomUse:
    """Of one purpose, now; `refused`: requests that found no room in time, since the start."""

    purpose: Purpose
    limit_bytes: int
    taken_bytes: int
    waiting: int
    waiting_bytes: int
    oldest_wait_s: float
    refused: int


class Room:
    """Each owner holds one place at most; `give_back` ends it in whatever state it is.

    Room counts what requests may hold, slots are what is there: some may be on their way home from a request that has
    given its room back. A `granted` that raises `PoolExhausted` is therefore called again until the wait is over.
    """

    def __init__(self, admission: Admission, *, wait_s: float) -> None:
        self._admission = admission
        self._wait_s = wait_s
        self._numbers = itertools.count(1)
        self._owners: dict[object, _Place] = {}
        self._waiting: dict[int, _Place] = {}
        self._refused: Counter[Purpose] = Counter()

    def ask(
        self,
        purpose: Purpose,
        owner: object,
        size_bytes: int,
        *,
        granted: Callable[[], None],
        refused: Callable[[KvmoverError], None],
        waited_s: float = 0.0,
        wait_s: float | None = None,
    ) -> None:
        """Calls `granted` now or within the wait, or `refused`; the place must be given back after either.

        `wait_s`: how long it may wait in all; None: as long as anybody.

        A request that has `waited_s` already goes before those that have waited less, and waits no longer than they may in
        all. A place that was taken for the owner beforehand, by `rename`, is the one that it asks for.
        """
        if owner in self._owners:
            self._use(self._owners[owner], purpose, size_bytes, granted, refused)
            return
        now_s = asyncio.get_running_loop().time()
        most_s = self._wait_s if wait_s is None else wait_s
        left_s = max(0.0, most_s - waited_s)
        since_s = now_s - waited_s
        place = _Place(next(self._numbers), purpose, size_bytes, granted, refused, since_s, most_s, now_s + left_s)
        try:
            answer = self._admission.ask(purpose, place.number, size_bytes, since_s=since_s)
        except KvmoverError as error:
            self._refused[purpose] += isinstance(error, QueueFull)
            refused(error)
            return
        self._owners[owner] = place
        if isinstance(answer, Granted):
            self._admit(place)
            return
        self._waiting[place.number] = place
        place.timer = asyncio.get_running_loop().call_later(left_s, self._expire, owner, place)

    def _use(
        self,
        place: _Place,
        purpose: Purpose,
        size_bytes: int,
        granted: Callable[[], None],
        refused: Callable[[KvmoverError], None],
    ) -> None:
        asked, had = (purpose, size_bytes), (place.purpose, place.size_bytes)
        assert asked == had and place.timer is None, f"{asked} asked for with a place of {had}"
        place.granted, place.refused = granted, refused
        self._admit(place)

    def give_back(self, owner: object) -> None:
        """Leaves the queue, or gives the room back; nothing for an owner without a place."""
        place = self._owners.pop(owner, None)
        if place is None:
            return
        if place.retry is not None:
            place.retry.cancel()
        if place.timer is not None:
            place.timer.cancel()
            del self._waiting[place.number]
            self._grant(self._admission.leave(place.purpose, place.number))
        else:
            self._grant(self._admission.give_back(place.purpose, place.size_bytes))

    def shrink(self, owner: object, size_bytes: int) -> None:
        """The owner needs no more than so much from now on; one that waits keeps its turn. Nothing for one without a place."""
        place = self._owners.get(owner)
        if place is None or size_bytes >= place.size_bytes:
            return
        spare_bytes, place.size_bytes = place.size_bytes - size_bytes, size_bytes
        if place.timer is None:
            self.give_back_bytes(place.purpose, spare_bytes)
        else:
            self._grant(self._admission.shrink(place.purpose, place.number, size_bytes))

    def free_bytes(self, purpose: Purpose) -> int:
        """Of the purpose's share, whoever waits for it."""
        return self._admission.free_bytes(purpose)

    def uses(self) -> list[RoomUse]:
        """One for each purpose."""
        return [self._use_of(purpose) for purpose in Purpose]

    def _use_of(self, purpose: Purpose) -> RoomUse:
        waiting = [place for place in self._waiting.values() if place.purpose is purpose]
        taken_bytes = self._admission.taken_bytes(purpose)
        now_s = asyncio.get_running_loop().time() if waiting else 0.0
        return RoomUse(
            purpose,
            limit_bytes=taken_bytes + self._admission.free_bytes(purpose),
            taken_bytes=taken_bytes,
            waiting=len(waiting),
            waiting_bytes=sum(place.size_bytes for place in waiting),
            oldest_wait_s=max((now_s - place.since_s for place in waiting), default=0.0),
            refused=self._refused[purpose],
        )

    def give_back_bytes(self, purpose: Purpose, size_bytes: int) -> None:
        """Gives back room that was handed over."""
        self._grant(self._admission.give_back(purpose, size_bytes))

    def hand_over(self, owner: object, size_bytes: int) -> tuple[Purpose, int]:
        """So much of the owner's room stays taken, whoever gets it must give the bytes back; the rest is given back now."""
        place = self._owners.pop(owner)
        assert size_bytes <= place.size_bytes, f"{size_bytes} bytes handed over, the place has {place.size_bytes}"
        self.give_back_bytes(place.purpose, place.size_bytes - size_bytes)
        return place.purpose, size_bytes

    def fits_now(self, purpose: Purpose, size_bytes: int) -> bool:
        """Would `ask` grant at once?"""
        return not self._admission.waiting(purpose) and size_bytes <= self._admission.free_bytes(purpose)

    def rename(self, owner: object, new_owner: object) -> None:
        self._owners[new_owner] = self._owners.pop(owner)

    def _grant(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            place = self._waiting.pop(number)
            assert place.timer is not None, "a waiting place has no timer"
            place.timer.cancel()
            place.timer = None
            self._admit(place)

    def _admit(self, place: _Place) -> None:
        """Lets the owner take its slots, again and again while they are not home yet."""
        place.retry = None
        try:
            place.granted()
        except PoolExhausted as error:
            loop = asyncio.get_running_loop()
            if loop.time() < place.until_s:
                place.retry = loop.call_later(RETRY_S, self._admit, place)
            else:
                self._refused[place.purpose] += 1
                place.refused(error)

    def _expire(self, owner: object, place: _Place) -> None:
        self._owners.pop(owner, None)
        self._waiting.pop(place.number, None)
        free_bytes = self._admission.free_bytes(place.purpose)
        granted = self._admission.leave(place.purpose, place.number)
        place.timer = None
        self._refused[place.purpose] += 1
        where = f"pool.{place.purpose.value}_bytes, after {place.wait_s:g} s"
        place.refused(PoolExhausted(purpose=where, asked=place.size_bytes, free=free_bytes, unit="bytes"))
        self._grant(granted)
