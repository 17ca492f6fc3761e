"""What a new owner of a directory does first: finds the blocks that are in no log, and counts the bytes.

The scan goes on a bit at a time, at a limited rate, beside reads and writes. The count is made in one go, and no write is
accepted before it, for half a minute at most where a directory can't be counted.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.accounting import Accounting, Counted
from kvmoverd.adapters.storage.segments.backlog import Backlog
from kvmoverd.adapters.storage.segments.followed import Followed, Listing
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.log_reader import LOG_PAGES_MAX, LogCounters
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.tail_scan import ScanStats, Tail, scan_segment
from kvmoverd.core.store.log_pages import Kind, LogPage, about, author16, paged
from kvmoverd.core.store.places import PAGE_BYTES, number_of, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader

PERIOD_S = 0.5
SCAN_BYTES_PER_S = 200_000_000
"""Of records that no log speaks of, at most: where a whole log is lost that is all that its author ever wrote."""
_STEP_NS = 50_000_000
_TRIES_MAX = 1000
_RETRY_NS = 5 * 10**9
_NO_OWNER = bytes(16)

Publish = Callable[[str, SegmentHeader, npt.NDArray[np.void], int], None]
"""Says durably, in this node's own log, that these blocks of an author's segment are there. Raises `OSError`."""
Bury = Callable[[str, Sequence[int]], None]
"""Says durably, in this node's own log, that these segments of an author are dead, and drops them. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An adopted directory, how often it was tried, and when it is tried next."""

    author: str
    tries: int
    due_ns: int


@dataclass(slots=True)
class RecoveryStats:
    """`waiting`: adopted directories that are still to be scanned; `failures`: scans that were begun again, or given up.

    `uncounted`: directories that nobody could count so far, and without which writes were let in.
    """

    waiting: int = 0
    uncounted: int = 0
    scanned_authors: int = 0
    failures: int = 0
    account_s: float = 0.0
    scan: ScanStats = field(default_factory=ScanStats)


class Recovery:
    """`step` is the keeper's job; `adopted` and `lost` are for its thread; all else is for any.

    It is also whom the garbage collector asks for what is its own. `accountable`: authors whose bytes count as this node's.
    `publish`, `bury`: of this node's log writer; `on_found` puts what was published into the index.
    """

    def __init__(
        self,
        authors: Path,
        followers: Followers,
        *,
        own: Callable[[], str],
        machine: str,
        settings: SegmentSettings,
        accountable: Callable[[], list[str]],
        counted: Counted,
        publish: Publish,
        bury: Bury,
        on_found: Callable[[str, SegmentHeader, npt.NDArray[np.void]], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        direct: bool = True,
    ) -> None:
        self._authors, self._followers, self._own, self._machine = authors, followers, own, machine
        self._settings = settings
        self._publish, self._bury, self._on_found, self._now_ns = publish, bury, on_found, now_ns
        self._files = PageFiles(direct=direct)
        self._waiting: deque[_Waiting] = deque()
        self._scan: tuple[_Waiting, Generator[bool, None, None]] | None = None
        """It gives False after each bit, and True while nothing more can be read now."""
        self._accounting = Accounting(
            authors,
            counted,
            accountable=accountable,
            is_active=self._is_active,
            listed=lambda: followers.scanned,
            now_ns=now_ns,
        )
        self._scan_bytes = 0
        self._pace_ns = 0
        self._settled: dict[str, None] = {}
        self._stats = RecoveryStats()

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until it was counted what this node keeps; False when that took too long."""
        return self._accounting.wait_ready(timeout_s)

    def own(self) -> str:
        """The author that this process writes as."""
        return self._own()

    def owned(self) -> list[str]:
        """The own author, and adopted ones of whom all logs and tails were read. For any thread."""
        return [self._own(), *self._settled]

    def left(self, author: str) -> None:
        """Nothing is left of this adopted author, one of `owned`: his directory is gone. For any thread."""
        self._settled.pop(author, None)

    def adopted(self, author: str) -> None:
        """This directory is ours now."""
        self._waiting.append(_Waiting(author, 0, self._now_ns()))

    def lost(self, author: str) -> None:
        """It is not ours any more."""
        self._settled.pop(author, None)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.author != author)
        if self._scan is not None and self._scan[0].author == author:
            self._scan[1].close()
            self._scan = None

    def step(self) -> bool:
        """Counts, if that was not done; then scans for a twentieth of a second. True when there is more that can be done now.

        Raises `OSError` while something can't be counted.
        """
        deadline_ns = self._now_ns() + _STEP_NS
        if self._accounting.step(deadline_ns):
            return True
        self._allow()
        while self._now_ns() < deadline_ns:
            if self._scan is None:
                if not self._waiting or self._waiting[0].due_ns > deadline_ns:
                    return False
                waiting = self._waiting.popleft()
                self._scan = waiting, self._scanning(waiting.author)
            if self._scan_bytes <= 0:
                return False
            before = self._read_bytes
            must_wait = self._go_on(*self._scan)
            self._scan_bytes -= self._read_bytes - before
            if must_wait:
                return False
        return True

    def notes(self) -> list[str]:
        """What a person should know. For any thread."""
        return self._accounting.notes()

    def stats(self) -> RecoveryStats:
        self._stats.waiting = len(self._waiting) + (self._scan is not None)
        self._stats.uncounted, self._stats.account_s = self._accounting.uncounted, self._accounting.account_s
        return self._stats

    @property
    def _read_bytes(self) -> int:
        return self._stats.scan.read_bytes + self._stats.scan.headers * PAGE_BYTES

    def _allow(self) -> None:
        """More may be scanned as time goes by, but what was not used in one period is not added to the next."""
        now_ns = self._now_ns()
        allowed = self._scan_bytes + (now_ns - self._pace_ns) * SCAN_BYTES_PER_S // 10**9
        self._scan_bytes, self._pace_ns = min(allowed, round(PERIOD_S * SCAN_BYTES_PER_S)), now_ns

    def _is_active(self, author: str, number: int) -> bool:
        return author == self._own()

    def _go_on(self, waiting: _Waiting, scan: Iterator[bool]) -> bool:
        """True when nothing more of this can be done now."""
        try:
            must_wait = next(scan, None)
        except OSError:
            # Also when the directory, or one of its segments, is gone meanwhile: the next try finds what is left.
            self._try_again(waiting)
            return False
        except Exception:
            # Or the next look at the scan would take it for one that has ended.
            self._try_again(waiting)
            raise
        if must_wait is None:
            self._scan = None
            self._settled[waiting.author] = None
            self._stats.scanned_authors += 1
        return bool(must_wait)

    def _try_again(self, waiting: _Waiting) -> None:
        self._scan = None
        self._stats.failures += 1
        if waiting.tries + 1 < _TRIES_MAX and (self._authors / waiting.author).exists():
            self._waiting.append(_Waiting(waiting.author, waiting.tries + 1, self._now_ns() + _RETRY_NS))

    def _scanning(self, author: str) -> Generator[bool, None, None]:
        self._followers.finish(author)
        yield False
        numbers = self._segments(author)
        said: dict[int, list[npt.NDArray[np.uint32]]] = {number: [] for number in numbers}
        named: set[int] = set()
        yield from self._read_said(author, said, named)
        self._say_dead(author, set(numbers), named)
        for number in numbers:
            if self._followers.dropped(author, number):
                continue
            pages = np.concatenate([*said.pop(number), np.zeros(0, np.uint32)])
            path = self._authors / author / "seg" / segment_name(number)
            for tail in scan_segment(path, author, number, pages, self._files, self._stats.scan):
                if tail is not None:
                    self._say(author, tail)
                yield False

    def _segments(self, author: str) -> list[int]:
        names = os.listdir(self._authors / author / "seg")
        return sorted(number for name in names if (number := number_of(name, "seg")) is not None)

    def _say_dead(self, author: str, there: set[int], named: set[int]) -> None:
        """Says again who is dead of these: whoever said it first may be dead himself, and his logs gone before these are.

        A segment that logs speak of and that is not there was deleted by somebody: it is dead, too.
        """
        dropped = {number for number in there | named if self._followers.dropped(author, number)}
        dead = sorted(dropped | (named - there))
        if dead:
            self._bury(author, dead)

    def _read_said(self, author: str, said: dict[int, list[npt.NDArray[np.uint32]]], named: set[int]) -> Iterator[bool]:
        """Pages of the records of each segment that its author's own logs speak of, and all segments that they name.

        A log that can't be read now is waited for: without it, all that it names would be read, and said once more.
        """
        counters = LogCounters()
        dead = Followed(self._authors, author, self._files, counters, self._settings, self._machine)
        backlog = Backlog(self._files, counters, is_own_node=lambda one: True, now_ns=self._now_ns)
        backlog.add(dead, Listing.of(dead.directory), LOG_PAGES_MAX)
        while len(backlog):
            found = backlog.step()
            for run in found[1].runs if found else ():
                if run.owner16 != _NO_OWNER:
                    continue
                named.add(run.segment)
                if run.segment in said:
                    said[run.segment].append(run.entries["page"].copy())
            yield found is None and len(backlog) > 0

    def _say(self, author: str, tail: Tail) -> None:
        self._publish(author, tail.header, tail.entries, tail.time_s)
        self._on_found(author, tail.header, tail.entries)


def pages_about(author: str, segment: SegmentHeader, entries: npt.NDArray[np.void], time_s: int) -> list[LogPage]:
    """Pages for an adopter's log that say that these blocks of another author's segment are durable."""
    return paged(about(Kind.BLOCKS, segment, time_s=time_s, owner16=author16(author)), entries)
