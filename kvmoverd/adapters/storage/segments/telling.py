"""What authors say, on its way into the index: about themselves and others, in whatever order it is read."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.bad_records import BadRecords
from kvmoverd.adapters.storage.segments.follow_stats import FollowStats
from kvmoverd.adapters.storage.segments.followed import IndexSink, SegmentBits
from kvmoverd.adapters.storage.segments.log_reader import News, Run
from kvmoverd.core.store.log_pages import author16

_PENDING_ENTRIES_MAX = 1 << 20
_GONE_MAX = 1 << 16
_WAITING_ENTRIES_MAX = 1 << 14
"""Entries that the index is told of at once; it takes many small parts much faster so."""
_NO_OWNER = bytes(16)


class Telling:
    """`take` is for one thread, which calls `flush` when it has taken for now; `name_of` and `dropped` are for any.

    Of an author who is not known yet all waits until he is `met`, but for what he is told dead: that is remembered.
    """

    def __init__(self, index: IndexSink, stats: FollowStats, on_namespace: Callable[[bytes], None]) -> None:
        self._index, self._stats, self._on_namespace = index, stats, on_namespace
        self._names: dict[bytes, str] = {}
        self._dropped: dict[bytes, SegmentBits] = {}
        self._seen: dict[bytes, SegmentBits] = {}
        self._pending: dict[bytes, list[Run]] = {}
        self._gone: dict[bytes, None] = {}
        self._namespaces: set[bytes] = set()
        self._waiting: list[tuple[int, npt.NDArray[np.void]]] = []
        self._waiting_entries = 0
        self._waiting_old = False
        self.bad = BadRecords(index.mark_bad)
        self.bad_late: set[bytes] = set()
        """Namespaces with records that were told bad after their segment was told of: other records of the same blocks may
        have been passed over as there was one already."""

    def name_of(self, name16: bytes) -> str | None:
        return self._names.get(name16)

    def dropped(self, author: str, segment: int) -> bool:
        """Whether somebody has said that this segment is not to be read any more."""
        return segment in self._dropped.get(author16(author), ())

    def told_dead(self, left_out: Collection[str] = ()) -> dict[str, list[int]]:
        """Segments that others than this process have said are not to be read any more, by author. For any thread."""
        return {
            name: bits.numbers()
            for name16, name in list(self._names.items())
            if name not in left_out and (bits := self._dropped.get(name16)) is not None
        }

    def met(self, author: str) -> None:
        """The author is known from now on: what waited for him is taken."""
        name16 = author16(author)
        self._gone.pop(name16, None)
        if name16 in self._names:
            return
        if name16 in self._dropped:
            self._index.drop_segments(author, self._dropped[name16].numbers())
        for run in self._pending.get(name16, ()):
            self._take_run(author, name16, run, old=True)
        self._stats.pending_entries -= sum(len(run.entries) for run in self._pending.pop(name16, ()))
        self._names[name16] = author

    def gone(self, author: str) -> None:
        """The author's directory is gone, with his segments: whatever else is said of him does not matter any more."""
        self.flush()
        name16 = author16(author)
        self._names.pop(name16, None)
        self._dropped.pop(name16, None)
        self._seen.pop(name16, None)
        self.bad.forget(name16)
        self._gone[name16] = None
        if len(self._gone) > _GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._index.drop_author(author)

    def take(self, name16: bytes, news: News, only: Collection[bytes] | None = None, *, old: bool) -> None:
        """What an author has said; it may be told again, as it must be where this raises.

        `only`: of these namespaces, all else was taken before. `old`: it is not known when he said it.
        """
        for said16, numbers in news.tombstones if only is None else ():
            self._drop(_owner(said16, name16), list(numbers))
        for run in news.bad:
            owner16 = _owner(run.owner16, name16)
            self.flush()
            self.bad.add(self._names.get(owner16), owner16, run)
            if run.segment in self._seen.get(owner16, ()):
                self.bad_late.add(run.fingerprint16)
        for run in news.runs:
            if only is not None and run.fingerprint16 not in only:
                continue
            owner16 = _owner(run.owner16, name16)
            name = self._names.get(owner16)
            if name is None:
                self._wait_for_owner(owner16, run)
            else:
                self._take_run(name, owner16, run, old=old)

    def drop_all_but(self, name16: bytes, alive: set[int]) -> None:
        """An author's tombstones went by unread: dead is what he has, less what is known to be alive."""
        seen = self._seen.get(name16, SegmentBits())
        gone = [number for number in seen.numbers() if number not in alive]
        if gone:
            self._drop(name16, gone)

    def flush(self) -> None:
        """Tells the index what was taken; where that raises it waits for the next time."""
        if self._waiting:
            self._index.add_many(self._waiting, old=self._waiting_old)
            self._waiting, self._waiting_entries = [], 0

    def _drop(self, owner16: bytes, numbers: list[int]) -> None:
        if owner16 in self._gone:
            return
        self.flush()
        bits = self._dropped.setdefault(owner16, SegmentBits())
        for number in numbers:
            bits.add(number)
        name = self._names.get(owner16)
        if name is not None:
            self._index.drop_segments(name, numbers)

    def _take_run(self, name: str, owner16: bytes, run: Run, *, old: bool) -> None:
        if run.segment in self._dropped.get(owner16, ()):
            return
        if run.fingerprint16 not in self._namespaces:
            self._namespaces.add(run.fingerprint16)
            self._on_namespace(run.fingerprint16)
        self._seen.setdefault(owner16, SegmentBits()).add(run.segment)
        segment_id = self._index.add_segment(
            name,
            run.segment,
            fingerprint16=run.fingerprint16,
            generation=run.generation,
            purge=run.purge,
            record_pages=run.record_pages,
        )
        if segment_id < 0:
            self._stats.skipped_entries += len(run.entries)
            return
        if old != self._waiting_old:
            self.flush()
            self._waiting_old = old
        entries = self.bad.others(owner16, run)
        self._stats.entries += len(run.entries)
        self._waiting.append((segment_id, entries))
        self._waiting_entries += len(entries)
        if self._waiting_entries >= _WAITING_ENTRIES_MAX:
            self.flush()

    def _wait_for_owner(self, owner16: bytes, run: Run) -> None:
        if owner16 in self._gone:
            return
        if self._stats.pending_entries >= _PENDING_ENTRIES_MAX:
            self._stats.lost_entries += len(run.entries)
            return
        self._pending.setdefault(owner16, []).append(run)
        self._stats.pending_entries += len(run.entries)


def _owner(said16: bytes, name16: bytes) -> bytes:
    """Whom a page is about: zeros stand for the log's own author."""
    return name16 if said16 == _NO_OWNER else said16
