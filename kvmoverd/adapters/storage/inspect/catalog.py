"""All that the logs of a segment store say, read from disk as a daemon reads it, into arrays: some 24 bytes a record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.inspect.place import StorePlace
from kvmoverd.adapters.storage.segments.author import machine_name
from kvmoverd.adapters.storage.segments.follow_stats import FollowStats
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.places import Place

ROW = np.dtype([("tag", "<u8"), ("parent", "<u8"), ("page", "<u4"), ("depth", "<u4")])
"""A record: the first 8 bytes of its key and of its parent's, its page in the segment, its depth.

`parent` is 0 for the first block of a chain, and where only a snapshot still tells of a record.
"""
Rows = npt.NDArray[np.void]
Progress = Callable[[str], None]
SegmentName = tuple[str, int]


def no_progress(text: str) -> None:
    """For those who don't want to know."""


@dataclass(slots=True, eq=False)
class LoggedSegment:
    """A segment that logs speak of. `bad`: pages of records that were found damaged before."""

    author: str
    number: int
    fingerprint16: bytes
    generation: int
    purge: int
    record_pages: int
    bad: set[int]
    _parts: list[Rows] = field(default_factory=list)

    @property
    def name(self) -> SegmentName:
        return self.author, self.number

    def add(self, rows: Rows) -> None:
        self._parts.append(rows)

    def rows(self) -> Rows:
        """Its records that are not bad, each once, by page."""
        rows = np.concatenate(self._parts) if self._parts else np.empty(0, ROW)
        # Where a snapshot and a log speak of the same record, the log knows its parent.
        rows = rows[np.lexsort((~rows["parent"].astype(np.bool_), rows["page"]))]
        first = np.ones(len(rows), np.bool_)
        first[1:] = rows["page"][1:] != rows["page"][:-1]
        rows = rows[first]
        if self.bad:
            rows = rows[~np.isin(rows["page"], list(self.bad))]
        self._parts = [rows]
        return rows


class Catalog:
    """Segments by author and number; it is the index into which `Followers` reads. One thread."""

    def __init__(self) -> None:
        self._segments: dict[SegmentName, LoggedSegment] = {}
        self._by_id: list[LoggedSegment] = []
        self._ids: dict[SegmentName, int] = {}
        self._bad: dict[SegmentName, set[int]] = {}
        self.dropped: dict[str, set[int]] = {}
        """Segments of each author that are not to be read any more."""
        self.purges: dict[bytes, int] = {}
        """Purge numbers of namespaces."""
        self.lives: dict[str, Life] = {}
        """Authors that have a directory."""
        self.stats = FollowStats()

    def segments(self, fingerprint16: bytes = b"") -> Iterator[LoggedSegment]:
        """Those that are alive, by author and number; of one namespace, or of all."""
        for name in sorted(self._segments):
            segment = self._segments[name]
            if fingerprint16 in (b"", segment.fingerprint16) and self._is_alive(segment):
                yield segment

    def segment(self, author: str, number: int) -> LoggedSegment | None:
        """None: nobody speaks of it, or it is dead."""
        found = self._segments.get((author, number))
        return found if found is not None and self._is_alive(found) else None

    def is_purged(self, author: str, number: int) -> bool:
        """Whether logs speak of the segment, and it was made before its namespace was purged."""
        found = self._segments.get((author, number))
        return found is not None and not self._is_alive(found)

    def said(self, author: str, number: int) -> npt.NDArray[np.uint32]:
        """Pages of the segment's records of which something is known, good or bad."""
        segment = self._segments.get((author, number))
        pages = segment.rows()["page"] if segment is not None else np.empty(0, np.uint32)
        bad = np.array(sorted(self._bad.get((author, number), ())), np.uint32)
        return np.concatenate([pages.astype(np.uint32), bad])

    def namespaces(self) -> set[bytes]:
        """First 16 bytes of the fingerprints of all that have a segment that is alive."""
        return {segment.fingerprint16 for segment in self._segments.values() if self._is_alive(segment)}

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int:
        name = author, number
        if name not in self._ids:
            bad = self._bad.setdefault(name, set())
            segment = LoggedSegment(author, number, fingerprint16, generation, purge, record_pages, bad)
            self._ids[name] = len(self._by_id)
            self._by_id.append(segment)
            self._segments[name] = segment
        return self._ids[name]

    def add_many(self, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool = False) -> None:
        for segment_id, entries in parts:
            rows = np.empty(len(entries), ROW)
            rows["tag"] = entries["key"][:, 0]
            for name in ("parent", "page", "depth"):
                rows[name] = entries[name]
            self._by_id[segment_id].add(rows)

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        self.dropped.setdefault(author, set()).update(numbers)
        for number in numbers:
            self._segments.pop((author, number), None)

    def drop_author(self, author: str) -> None:
        self.drop_segments(author, [number for name, number in self._segments if name == author])

    def mark_bad(self, fingerprint16: bytes, key: bytes, place: Place, *, for_s: float | None) -> None:
        self._bad.setdefault((place.author, place.segment), set()).add(place.page)

    def set_purge(self, fingerprint16: bytes, purge: int) -> None:
        self.purges[fingerprint16] = purge

    def _is_alive(self, segment: LoggedSegment) -> bool:
        return segment.purge >= self.purges.get(segment.fingerprint16, 0)


def read_catalog(place: StorePlace, progress: Progress = no_progress) -> Catalog:
    """Reads all logs, and the purge numbers. Raises `OSError` where the root can't be read at all.

    What can't be read of one author is counted in `stats`, as by a daemon.
    """
    catalog = Catalog()
    followers = Followers(
        place.authors,
        catalog,
        own=lambda: "",
        machine=machine_name(),
        settings=SegmentSettings(),
        now_ns=time.monotonic_ns,
    )
    try:
        while followers.step() or not followers.stats().loaded:
            progress(f"{followers.stats().entries} entries of logs read")
        for author in followers.known():
            life = followers.life(author) or Life.LIVE
            catalog.lives[author] = life
            if life is not Life.LIVE:
                with contextlib.suppress(OSError):
                    followers.finish(author)
        catalog.stats = followers.stats()
    finally:
        followers.close()
    purges = Purges(place.base, catalog)
    for fingerprint16 in purges.namespaces():
        with contextlib.suppress(OSError):
            purges.watch(fingerprint16)
    return catalog
