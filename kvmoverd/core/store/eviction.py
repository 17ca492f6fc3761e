"""Which segments to drop, and when: pure. Whole segments, coldest first, and of equal heat the deeper first.

Every request touches all keys of its prefix, so a parent's count is never below that of its descendants. What is lost
here are blocks whose counts do not exceed a level, the lowest that gives the room; blocks above it are salvaged or stay.
So whoever counts more than the level keeps all its ancestors.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SALVAGE_BELOW = 0.10
"""Of a segment's records: where fewer are hot they are appended anew, and the segment goes; else the next one is looked at."""
LEVELS = (0, 1, 3, 7, 15, 31, 63, 127, 255)
"""Counts up to this are cold. Halving takes each to the one before."""
UNKNOWN_HIGH = 0.95
"""While the use by a live node is unknown nothing counts as cold, and only beyond this is anything dropped."""
_IDLE_STEP_S = 60.0


class Why(enum.Enum):
    """Why a segment is dropped."""

    PURGED = "purged"
    EXPIRED = "expired"
    LIMIT = "limit"
    WATERMARK = "watermark"
    NO_SPACE = "no_space"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentUse:
    """A segment that this node may drop, and what is known of its use.

    `heat`: a count for each of its records. `idle_s`: since a record was last used, or else written. `age_s`: since it was
    last written, by wall clock. `inodes`: that its deletion frees. `unknown`: others may use it, and do not say so.
    `pinned`: how many records are pinned where they are; `pins`: those whose pins go along when they are appended anew.
    """

    author: str
    number: int
    fingerprint16: bytes
    size_bytes: int
    heat: npt.NDArray[np.uint8] = field(repr=False)
    idle_s: float
    age_s: float = 0.0
    depth: float = 0.0
    inodes: int = 1
    active: bool = False
    pinned: int = 0
    unknown: bool = False
    pins: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32), repr=False)

    @property
    def record_bytes(self) -> float:
        return self.size_bytes / max(1, len(self.heat))

    def hot(self, level: int) -> npt.NDArray[np.uint32]:
        """Records whose counts exceed the level, and pinned ones."""
        found = np.flatnonzero(self.heat > level).astype(np.uint32)
        return np.union1d(found, self.pins).astype(np.uint32) if len(self.pins) else found


@dataclass(frozen=True, slots=True, eq=False)
class Victim:
    """A segment to drop; its records `salvage` are appended anew before. `level`: what counts as cold here."""

    use: SegmentUse
    why: Why
    salvage: npt.NDArray[np.uint32]
    level: int = 0

    @property
    def freed_bytes(self) -> int:
        """What its deletion frees, less what is appended anew."""
        return round(self.use.size_bytes - len(self.salvage) * self.use.record_bytes)


def choose(
    uses: Iterable[SegmentUse],
    *,
    why: Why,
    bytes_wanted: int,
    inodes_wanted: int = 0,
    salvage_below: float = SALVAGE_BELOW,
    even_unknown: bool = False,
    level_max: int = LEVELS[-1],
) -> list[Victim]:
    """Victims in the order in which to drop them, until both amounts are freed or nothing more may go.

    Never an active segment, or one with pins that can't go along, and one of unknown use only with `even_unknown`.
    `salvage_below` 0: nothing is appended anew, as when the disk is full.
    """
    left = [use for use in uses if not (use.active or use.pinned) and (even_unknown or not use.unknown)]
    victims: list[Victim] = []
    freed_bytes = freed_inodes = 0
    for level in (level for level in LEVELS if level <= level_max):
        if freed_bytes >= bytes_wanted and freed_inodes >= inodes_wanted:
            break
        ranked = sorted(_candidates(left, level, salvage_below), key=lambda pair: _rank(*pair))
        taken: set[int] = set()
        for hot, use in ranked:
            if freed_bytes >= bytes_wanted and freed_inodes >= inodes_wanted:
                break
            victim = Victim(use, why, use.hot(level) if hot else np.empty(0, np.uint32), level)
            victims.append(victim)
            taken.add(id(use))
            freed_bytes += victim.freed_bytes
            freed_inodes += use.inodes
        left = [use for use in left if id(use) not in taken]
    return victims


def expired(uses: Iterable[SegmentUse], ttl_s: float) -> list[Victim]:
    """Segments written longer ago than their time to live, the oldest first; heat does not count, and nothing is salvaged."""
    old = [use for use in uses if use.age_s > ttl_s and not use.active]
    none = np.empty(0, np.uint32)
    return [Victim(use, Why.EXPIRED, none) for use in sorted(old, key=lambda use: -use.age_s)]


@dataclass(slots=True)
class Watermark:
    """When to begin dropping, and when to stop: above `high` of the budget, until `low`. `max` 0: no limit.

    >>> mark = Watermark(1000, high=0.9, low=0.8)
    >>> mark.excess(900), mark.excess(901), mark.excess(850), mark.excess(800), mark.excess(850)
    (0, 101, 50, 0, 0)
    """

    max: int
    high: float
    low: float
    dropping: bool = False

    def excess(self, now: int) -> int:
        """How much must go now."""
        if self.max <= 0:
            return 0
        if now > self.high * self.max:
            self.dropping = True
        elif now <= self.low * self.max:
            self.dropping = False
        return round(now - self.low * self.max) if self.dropping else 0

    def beyond(self, now: int, part: float) -> int:
        """How much is above a part of the budget."""
        return max(0, round(now - part * self.max)) if self.max > 0 else 0


def _candidates(uses: Sequence[SegmentUse], level: int, salvage_below: float) -> list[tuple[int, SegmentUse]]:
    """Segments that may go at this level, each with how many of its records would have to be salvaged."""
    found = []
    for use in uses:
        hot = len(use.hot(level)) if len(use.pins) else int(np.count_nonzero(use.heat > level))
        if hot == 0 or hot < salvage_below * len(use.heat):
            found.append((hot, use))
    return found


def _rank(hot: int, use: SegmentUse) -> tuple[float, int, float, float, int]:
    """Few hot ones first, then those idle for longer, by the minute, then the deeper, then the older."""
    return hot / max(1, len(use.heat)), -int(use.idle_s // _IDLE_STEP_S), -use.depth, -use.age_s, use.number
