"""What this node's segments are: alive and used so much, purged, or dead and still there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.graveyard import Graveyard
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.usage import SegmentFile, Usage
from kvmoverd.core.store.eviction import SegmentUse
from kvmoverd.core.store.places import PAGE_BYTES, Place

_SECOND_NS = 10**9


class SegmentNow(Protocol):
    """What the index knows of a segment."""

    @property
    def author(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def fingerprint16(self) -> bytes: ...
    @property
    def purge(self) -> int: ...
    @property
    def record_pages(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def depth_mean(self) -> float: ...


class SegmentTable(Protocol):
    """What is asked of the index; None for what it does not know, or not any more."""

    def segment(self, segment_id: int) -> SegmentNow | None: ...

    def segment_id(self, author: str, number: int) -> int | None: ...

    def wants(self, fingerprint16: bytes) -> bool:
        """False: the namespace is not kept in RAM."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Whose records a segment holds, and of what size. `segment_id` -1: the index does not know it."""

    segment_id: int
    fingerprint16: bytes
    purge: int
    record_pages: int
    alive: bool
    depth: float


@dataclass(slots=True)
class Dead:
    """Segments that are there and should not be.

    `purged`: made under a lower purge number. `told`: a tombstone names them. `unheard`: no log says anything of them, or they
    are dead to the index, though their namespace is in RAM; while that is so, they hold nothing that anybody could find.
    """

    purged: list[SegmentFile] = field(default_factory=list)
    told: list[SegmentFile] = field(default_factory=list)
    unheard: list[SegmentFile] = field(default_factory=list)


class Census:
    """`uses` is for any thread; the rest reads files, and is for the keeper's.

    `is_active`: the segment takes records now. `unknown`: live nodes whose use is not known, as by `TouchWatch.unknown`.
    `dropped`: a tombstone names the segment, whether the index has heard of it or not.
    """

    def __init__(
        self,
        *,
        index: SegmentTable,
        touches: Touches,
        usage: Usage,
        graveyard: Graveyard,
        purges: Purges,
        is_active: Callable[[str, int], bool],
        unknown: Callable[[], Collection[str]],
        dropped: Callable[[str, int], bool],
        now_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._index, self._touches, self._usage, self._graveyard = index, touches, usage, graveyard
        self._purges, self._is_active, self.unknown, self._dropped = purges, is_active, unknown, dropped
        self._now_ns, self._wall_ns = now_ns, wall_ns

    def kind(self, segment: SegmentFile) -> Kind | None:
        """From the index, else from the segment's own header where `dead` has read that."""
        segment_id = self._index.segment_id(*segment.name)
        known = self._index.segment(segment_id) if segment_id is not None else None
        if segment_id is not None and known is not None and (known.author, known.number) == segment.name:
            fingerprint16 = known.fingerprint16
            return Kind(segment_id, fingerprint16, known.purge, known.record_pages, known.alive, known.depth_mean)
        header = segment.header
        if header is None:
            return None
        return Kind(-1, header.fingerprint[:16], header.purge, header.record_pages, True, 0.0)

    def id_of(self, place: Place) -> int | None:
        """The index's number of a place's segment."""
        return self._index.segment_id(place.author, place.segment)

    def dead(self, segments: Iterable[SegmentFile]) -> Dead:
        """Those of these segments that are not on their way out yet."""
        found = Dead()
        for segment in segments:
            if segment.name in self._graveyard:
                continue
            kind = self.kind(segment)
            if kind is None:
                self._usage.header(segment)
                kind = self.kind(segment)
            if kind is not None and kind.purge < self._purge_number(kind.fingerprint16):
                found.purged.append(segment)
            elif self._is_active(*segment.name):
                continue
            elif self._dropped(*segment.name):
                found.told.append(segment)
            elif kind is None or (not (kind.alive and kind.segment_id >= 0) and self._index.wants(kind.fingerprint16)):
                # To the index a segment is dead, too, whose namespace was left out of RAM a moment ago.
                found.unheard.append(segment)
        return found

    def uses(self, segments: Iterable[SegmentFile]) -> list[SegmentUse]:
        """What is known of those of these segments that are not on their way out."""
        unknown = bool(self.unknown())
        found = []
        for segment in segments:
            if segment.name in self._graveyard:
                continue
            kind = self.kind(segment)
            if kind is not None and kind.alive:
                found.append(self._use(segment, kind, unknown=unknown))
        return found

    def _use(self, segment: SegmentFile, kind: Kind, *, unknown: bool) -> SegmentUse:
        age_s = max(0, self._wall_ns() - segment.written_ns) / _SECOND_NS
        records = max(1, round(segment.size_bytes / (kind.record_pages * PAGE_BYTES)))
        heat, used_ns, pinned, pins = np.zeros(records, np.uint8), 0, 0, np.empty(0, np.uint32)
        if kind.segment_id >= 0:
            heat = _padded(self._touches.heat(kind.segment_id), records)
            used_ns = self._touches.used_ns(kind.segment_id)
            own = self._touches.own_pins(kind.segment_id)
            pins, pinned = (own, 0) if own is not None else (pins, self._touches.pinned(kind.segment_id))
        used_s = (self._now_ns() - used_ns) / _SECOND_NS if used_ns else age_s
        return SegmentUse(
            *segment.name,
            kind.fingerprint16,
            segment.size_bytes,
            heat,
            min(age_s, used_s),
            age_s,
            kind.depth,
            active=self._is_active(*segment.name),
            pinned=pinned,
            unknown=unknown,
            pins=pins,
        )

    def _purge_number(self, fingerprint16: bytes) -> int:
        number = self._purges.number(fingerprint16)
        if number or self._purges.watches(fingerprint16):
            return number
        with contextlib.suppress(OSError):
            return self._purges.watch(fingerprint16)
        return 0


def _padded(heat: npt.NDArray[np.uint8], records: int) -> npt.NDArray[np.uint8]:
    return np.pad(heat, (0, records - len(heat))) if len(heat) < records else heat
