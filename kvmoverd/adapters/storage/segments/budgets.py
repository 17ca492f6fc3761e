"""How much must go: the root's own budgets, the filesystem's room, and the limits of tenants and models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvmoverd.adapters.storage.segments.purges import Identity
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.adapters.storage.segments.usage import Room
from kvmoverd.core.store.eviction import UNKNOWN_HIGH, SegmentUse, Victim, Watermark, Why, choose, expired


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes and inodes of this node's directories; `leaving`: those of them that are on their way out already."""

    size_bytes: int
    inodes: int
    leaving_bytes: int = 0
    leaving_inodes: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """What must go beyond what is going already."""

    size_bytes: int = 0
    inodes: int = 0

    def __bool__(self) -> bool:
        return self.size_bytes > 0 or self.inodes > 0


class Budgets:
    """Watermarks with their memory: once above `high` they ask until `low`. For one thread; nothing here touches a device."""

    def __init__(self, settings: SegmentSettings) -> None:
        high, low = settings.high, settings.low
        self._high = high
        self._bytes = Watermark(settings.bytes_max, high, low)
        self._inodes = Watermark(settings.inodes_max, high, low)
        self._room_bytes = Watermark(0, high, low)
        self._room_inodes = Watermark(0, high, low)
        self.limits = [(limit, Watermark(limit.bytes_max, high, low)) for limit in settings.limits]
        self.used = 0.0
        """Of the budget that is used most, the filesystem's room among them: 1.0 is all of it."""

    def copy(self) -> Budgets:
        """To ask without leaving a trace."""
        return copy.deepcopy(self)

    def excess(self, taken: Taken, room: Room, *, unknown: bool) -> Excess:
        """`unknown`: the use by a live node is unknown; then only what is beyond 95 % goes, down to the high mark."""
        self._room_bytes.max, self._room_inodes.max = room.bytes_total, room.inodes_total
        found_bytes = found_inodes = 0.0
        self.used = 0.0
        for mark, now, part in (
            (self._bytes, taken.size_bytes, 1.0),
            (self._room_bytes, room.bytes_used, _part(taken.size_bytes, room.bytes_used)),
        ):
            found_bytes = max(found_bytes, self._ask(mark, now, unknown=unknown) * part)
        for mark, now, part in (
            (self._inodes, taken.inodes, 1.0),
            (self._room_inodes, room.inodes_used, _part(taken.inodes, room.inodes_used)),
        ):
            found_inodes = max(found_inodes, self._ask(mark, now, unknown=unknown) * part)
        return Excess(
            max(0, round(found_bytes) - taken.leaving_bytes), max(0, round(found_inodes) - taken.leaving_inodes)
        )

    def _ask(self, mark: Watermark, now: int, *, unknown: bool) -> int:
        if mark.max > 0:
            self.used = max(self.used, now / mark.max)
        wanted = mark.excess(now)
        if not unknown:
            return wanted
        return mark.beyond(now, self._high) if mark.beyond(now, UNKNOWN_HIGH) else 0


def of_limits(
    limits: Sequence[tuple[Limit, Watermark]],
    uses: Iterable[SegmentUse],
    identity: Callable[[bytes], Identity | None],
) -> Iterator[tuple[Limit, Watermark, list[SegmentUse]]]:
    """For each limit the segments that it is about: the first limit that matches a segment's namespace counts."""
    found: list[list[SegmentUse]] = [[] for _ in limits]
    for use in uses:
        whose = identity(use.fingerprint16)
        if whose is None:
            continue
        matching = (number for number, (limit, _) in enumerate(limits) if _matches(limit, whose))
        if (first := next(matching, None)) is not None:
            found[first].append(use)
    for (limit, mark), some in zip(limits, found, strict=True):
        yield limit, mark, some


def choose_victims(
    uses: Sequence[SegmentUse],
    limits: Sequence[tuple[Limit, Watermark]],
    excess: Excess,
    identity: Callable[[bytes], Identity | None],
) -> list[Victim]:
    """What is to be dropped, in order. Limits first: what they drop, the budgets need not."""
    victims: list[Victim] = []
    for limit, mark, some in of_limits(limits, uses, identity):
        old = expired(some, limit.ttl_s) if limit.ttl_s > 0 else []
        gone = {id(victim.use) for victim in old}
        left = [use for use in some if id(use) not in gone]
        wanted = mark.excess(sum(use.size_bytes for use in left))
        victims += old
        victims += choose(left, why=Why.LIMIT, bytes_wanted=wanted) if wanted else []
    gone = {id(victim.use) for victim in victims}
    bytes_wanted = excess.size_bytes - sum(victim.freed_bytes for victim in victims)
    inodes_wanted = excess.inodes - len(victims)
    if excess and (bytes_wanted > 0 or inodes_wanted > 0):
        victims += choose(
            [use for use in uses if id(use) not in gone],
            why=Why.WATERMARK,
            bytes_wanted=bytes_wanted,
            inodes_wanted=inodes_wanted,
            even_unknown=True,
        )
    return victims


def _matches(limit: Limit, whose: Identity) -> bool:
    return limit.tenant in ("", whose.tenant) and limit.model_id in ("", whose.model_id)


def _part(ours: int, used: int) -> float:
    """Of what a filesystem must lose, what is ours: each node that fills it gives as much of it as it has."""
    return min(1.0, ours / used) if used > 0 else 1.0
