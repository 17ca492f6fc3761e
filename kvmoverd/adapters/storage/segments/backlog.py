"""What is still to be read of older logs and snapshots, the most useful first, a bit at a time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmoverd.adapters.storage.segments.followed import Followed, Listing
from kvmoverd.adapters.storage.segments.log_reader import LogCounters, LogReader, News
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.snapshots import SnapshotCounters, SnapshotDamaged, read_snapshot

_ITEMS_MAX = 1 << 20
_TRIES_MAX = 5
_RETRY_NS = 2 * 10**9
"""What can't be read now is tried again so much later, and then twice as much later."""


@dataclass(frozen=True, slots=True)
class Item:
    """A log, or a snapshot, to be read whole. `only`: the namespaces that count, None for all; `tries`: that have failed."""

    author: Followed
    number: int
    snapshot: bool
    only: frozenset[bytes] | None
    tries: int = 0


@dataclass(slots=True)
class BacklogCounters:
    """`failed`: logs and snapshots that could not be read; their blocks are not known here. `retries`: tries after the first."""

    logs: int = 0
    snapshots: int = 0
    failed: int = 0
    retries: int = 0


class Backlog:
    """For one thread. Own former starts come first, then the newest log of everyone, then the next older ones."""

    def __init__(
        self,
        files: PageFiles,
        pages: LogCounters,
        *,
        is_own_node: Callable[[Followed], bool],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._files, self._pages, self._is_own_node, self._now_ns = files, pages, is_own_node, now_ns
        self._heap: list[tuple[bool, int, int, Item]] = []
        self._order = itertools.count()
        self._now: tuple[Item, Iterator[News]] | None = None
        self._later: list[tuple[int, int, Item]] = []
        self._damaged: set[tuple[str, int]] = set()
        """Snapshots that could not be used: nothing is replaced by them."""
        self.counters = BacklogCounters()
        self.sections = SnapshotCounters()

    def __len__(self) -> int:
        return len(self._heap) + len(self._later) + (self._now is not None)

    @property
    def busy(self) -> bool:
        """Whether there is something that can be read now."""
        return bool(self._heap) or self._now is not None

    def add(self, author: Followed, listing: Listing, below: int, only: frozenset[bytes] | None = None) -> None:
        """All that the author said before log `below`."""
        logs, snapshot = listing.older(below)
        for rank, number in enumerate(logs):
            self._push(rank, Item(author, number, False, only))
        if snapshot is not None:
            self._push(len(logs), Item(author, snapshot, True, only))

    def step(self) -> tuple[Item, News] | None:
        """The next bit; None when nothing is left to be read now. What is not there is replaced by what stands for it.

        What can't be read is tried again a few times, and counted when that has not helped.
        """
        while self._later and self._later[0][0] <= self._now_ns():
            self._push(0, heapq.heappop(self._later)[2])
        while self._now is not None or self._heap:
            if self._now is None:
                item = heapq.heappop(self._heap)[3]
                self._now = item, self._reading(item)
            item, reading = self._now
            try:
                news = next(reading, None)
            except OSError as error:
                self._now = None
                self._failed(item, error)
                continue
            if news is not None:
                return item, news
            self._now = None
        return None

    def again(self, item: Item) -> None:
        """What this item has said last was not taken: it is read again from its begin."""
        self._now = None
        self._push(0, item)

    def forget(self, author: Followed) -> None:
        """The author is gone."""
        self._heap = [entry for entry in self._heap if entry[3].author is not author]
        heapq.heapify(self._heap)
        self._later = [entry for entry in self._later if entry[2].author is not author]
        heapq.heapify(self._later)
        self._damaged = {name for name in self._damaged if name[0] != author.name}
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
            self._damaged.add((item.author.name, item.number))
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

    def _failed(self, item: Item, error: OSError) -> None:
        if isinstance(error, SnapshotDamaged):
            self._damaged.add((item.author.name, item.number))
        elif not isinstance(error, FileNotFoundError) and item.tries < _TRIES_MAX:
            self.counters.retries += 1
            due_ns = self._now_ns() + (_RETRY_NS << item.tries)
            again = dataclasses.replace(item, tries=item.tries + 1)
            heapq.heappush(self._later, (due_ns, next(self._order), again))
            return
        self._instead_of(item)

    def _instead_of(self, item: Item) -> None:
        """An item is gone or damaged: what stands for it, a newer snapshot for either, else older ones for a snapshot."""
        try:
            listing = Listing.of(item.author.directory)
        except OSError:
            self.counters.failed += 1
            return
        usable = [number for number in listing.snapshots if (item.author.name, number) not in self._damaged]
        newest = usable[-1] if usable else 0
        if newest > item.number or (newest == item.number and not item.snapshot):
            found = [(newest, True)]
        elif item.snapshot:
            older = max((number for number in usable if number < item.number), default=0)
            logs = [number for number in listing.logs if older < number <= item.number]
            found = [(number, False) for number in reversed(logs)] + ([(older, True)] if older else [])
        else:
            found = []
        self.counters.failed += not found
        for rank, (number, snapshot) in enumerate(found):
            self._push(rank, Item(item.author, number, snapshot, item.only))
