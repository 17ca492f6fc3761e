"""Damaged records that this node has met when it read: told in its own log, so that no other node meets them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvmoverd.adapters.storage.segments.index_segments import SegmentInfo
from kvmoverd.core.store.log_pages import ENTRIES_MAX, ENTRY, Kind, LogPage, about, author16
from kvmoverd.core.store.places import Place

STEP_S = 1.0
"""Period of `DamageTeller.step`."""
TOLD_MAX = 64
TOLD_S = 60.0
"""So many in so long: a node that finds more damaged has a trouble of its own, and must not take the blocks from the others."""
CUT_SEGMENTS_MAX = 16
"""In the same time, segments whose file ends early: all records that are found cut off there are told, however many."""
_WAITING_MAX = 1 << 14
_KEY_WORDS = 4


class SegmentTable(Protocol):
    """What is asked of the index."""

    def segment(self, segment_id: int) -> SegmentInfo | None: ...

    def segment_id(self, author: str, number: int) -> int | None: ...


class DamageTeller:
    """`found` is for any thread, and never blocks; `step` is the keeper's job.

    `own`: the author that this process writes as; `publish`: of his log, gives for each page whether that failed.
    """

    def __init__(
        self,
        index: SegmentTable,
        *,
        own: Callable[[], str],
        publish: Callable[[list[LogPage]], list[OSError | None]],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._index, self._own, self._publish, self._now_ns = index, own, publish, now_ns
        self._waiting: deque[tuple[bytes, Place, bool]] = deque(maxlen=_WAITING_MAX)
        self._told_ns: deque[int] = deque(maxlen=TOLD_MAX)
        self._cut_ns: dict[tuple[str, int], int] = {}
        self.told = 0
        """Records that all nodes know of, since the start."""
        self.kept = 0
        """Records that were not told, as there were too many, or their segment is gone."""

    def found(self, key: bytes, place: Place, *, cut: bool = False) -> None:
        """The record of this key there is damaged, at every look. `cut`: its segment's file ends before it does."""
        self._waiting.append((key, place, cut))

    def step(self) -> None:
        """Tells what was found. Raises `OSError`: then these records are met again by whoever reads them."""
        segments: dict[tuple[str, int], list[tuple[bytes, Place]]] = {}
        for _ in range(len(self._waiting)):
            key, place, cut = self._waiting.popleft()
            name = (place.author, place.segment)
            if self._may_tell_cut(name) if cut else self._may_tell():
                segments.setdefault(name, []).append((key, place))
            else:
                self.kept += 1
        pages = []
        for name, records in segments.items():
            about = self._about(*name)
            if about is None:
                self.kept += len(records)
            else:
                pages += [_page(about, self._own(), records[at : at + ENTRIES_MAX]) for at in _starts(records)]
        for page, failure in zip(pages, self._publish(pages) if pages else (), strict=True):
            if failure is not None:
                raise failure
            assert page.entries is not None, "a page of bad records has entries"
            self.told += len(page.entries)

    def _may_tell(self) -> bool:
        now_ns = self._now_ns()
        if len(self._told_ns) == TOLD_MAX and now_ns - self._told_ns[0] < TOLD_S * 1e9:
            return False
        self._told_ns.append(now_ns)
        return True

    def _may_tell_cut(self, name: tuple[str, int]) -> bool:
        now_ns = self._now_ns()
        if name in self._cut_ns:
            return True
        self._cut_ns = {cut: since_ns for cut, since_ns in self._cut_ns.items() if now_ns - since_ns < TOLD_S * 1e9}
        if len(self._cut_ns) >= CUT_SEGMENTS_MAX:
            return False
        self._cut_ns[name] = now_ns
        return True

    def _about(self, author: str, number: int) -> SegmentInfo | None:
        segment_id = self._index.segment_id(author, number)
        known = self._index.segment(segment_id) if segment_id is not None else None
        return known if known is not None and known.alive and (known.author, known.number) == (author, number) else None


def _starts(records: list[tuple[bytes, Place]]) -> range:
    return range(0, len(records), ENTRIES_MAX)


def _page(segment: SegmentInfo, own: str, records: list[tuple[bytes, Place]]) -> LogPage:
    entries = np.zeros(len(records), ENTRY)
    for at, (key, place) in enumerate(records):
        entries[at]["key"], entries[at]["page"] = np.frombuffer(key, "<u8", _KEY_WORDS), place.page
    owner16 = bytes(16) if segment.author == own else author16(segment.author)
    return replace(about(Kind.BAD, segment, time_s=int(time.time()), owner16=owner16), entries=entries)
