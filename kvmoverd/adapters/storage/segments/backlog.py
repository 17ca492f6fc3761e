"""What is still to be read of older logs and snapshots, the most useful first, a bit at a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmoverd.adapters.storage.segments.followed import Followed, Listing
from kvmoverd.adapters.storage.segments.log_reader import LogCounters, LogReader, News
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.snapshots import SnapshotCounters, read_snapshot

_ITEMS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A log, or a snapshot, to be read whole. `only`: what of it counts, None for all."""

    author: Followed
    number: int
    snapshot: bool
    only: bytes | None


@dataclass(slots=True)
class BacklogCounters:
    """`failed`: logs and snapshots that could not be read; their blocks are not known here."""

    logs: int = 0
    snapshots: int = 0
    failed: int = 0


class Backlog:
    """For one thread. Own former starts come first, then the newest log of everyone, then the next older ones."""

    def __init__(self, files: PageFiles, pages: LogCounters, *, is_own_node: Callable[[Followed], bool]) -> None:
        self._files, self._pages, self._is_own_node = files, pages, is_own_node
        self._heap: list[tuple[bool, int, int, Item]] = []
        self._order = itertools.count()
        self._now: tuple[Item, Iterator[News]] | None = None
        self.counters = BacklogCounters()
        self.sections = SnapshotCounters()

    def __len__(self) -> int:
        return len(self._heap) + (self._now is not None)

    def add(self, author: Followed, listing: Listing, below: int, only: bytes | None = None) -> None:
        """All that the author said before log `below`."""
        logs, snapshot = listing.older(below)
        for rank, number in enumerate(logs):
            self._push(rank, Item(author, number, False, only))
        if snapshot is not None:
            self._push(len(logs), Item(author, snapshot, True, only))

    def step(self) -> tuple[Item, News] | None:
        """The next bit; None when nothing is left. What can't be read is counted, or replaced by what can."""
        while self._now is not None or self._heap:
            if self._now is None:
                item = heapq.heappop(self._heap)[3]
                self._now = item, self._reading(item)
            item, reading = self._now
            try:
                news = next(reading, None)
            except OSError:
                self._now = None
                self._instead_of(item)
                continue
            if news is not None:
                return item, news
            self._now = None
        return None

    def forget(self, author: Followed) -> None:
        """The author is gone."""
        self._heap = [entry for entry in self._heap if entry[3].author is not author]
        heapq.heapify(self._heap)
        if self._now is not None and self._now[0].author is author:
            self._now = None

    def _push(self, rank: int, item: Item) -> None:
        if len(self._heap) >= _ITEMS_MAX:
            self.counters.failed += 1
            return
        heapq.heappush(self._heap, (not self._is_own_node(item.author), rank, next(self._order), item))

    def _reading(self, item: Item) -> Iterator[News]:
        if item.snapshot:
            return self._read_snapshot(item)
        return self._read_log(item)

    def _read_snapshot(self, item: Item) -> Iterator[News]:
        damaged_before = self.sections.damaged
        yield from read_snapshot(item.author.directory, item.number, self.sections, only=item.only)
        self.counters.snapshots += 1
        if self.sections.damaged > damaged_before:
            self._instead_of(item)

    def _read_log(self, item: Item) -> Iterator[News]:
        # Only the first reading counts damage.
        pages = self._pages if item.only is None else LogCounters()
        reader = LogReader(item.author.directory, self._files, pages, log=item.number, follow=False)
        try:
            more = True
            while more:
                news = reader.read()
                more = news.more
                yield news
        finally:
            reader.close()
        self.counters.logs += 1

    def _instead_of(self, item: Item) -> None:
        """An item is gone or damaged: what stands for it, a newer snapshot for a log, older ones for a snapshot."""
        try:
            listing = Listing.of(item.author.directory)
        except OSError:
            self.counters.failed += 1
            return
        if item.snapshot:
            older = [number for number in listing.snapshots if number < item.number]
            numbers = [number for number in listing.logs if (older[-1] if older else 0) < number <= item.number]
            found = [(number, False) for number in reversed(numbers)] + [(number, True) for number in older[-1:]]
        else:
            found = [(number, True) for number in listing.snapshots[-1:] if number >= item.number]
        self.counters.failed += not found
        for rank, (number, snapshot) in enumerate(found):
            self._push(rank, Item(item.author, number, snapshot, item.only))
