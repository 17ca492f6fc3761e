"""Reads an author's index logs: from a page on, as many pages at a time as there are, decoded by columns."""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.adapters.storage.segments.page_files import PAGES_AT_ONCE, PageFiles, Pages
from kvmoverd.core.store.log_pages import (
    ENTRIES_MAX,
    ENTRY,
    ENTRY_BYTES,
    FORMAT,
    HEADER_BYTES,
    MAGIC,
    SEGMENTS_MAX,
    Kind,
)
from kvmoverd.core.store.places import PAGE_BYTES, log_name

PEEK_PAGES = 2
"""A look at a log that has been still: one page that may be new, and whether there is another behind it."""
LOG_PAGES_MAX = 1 << 20
"""No log is longer than 4 GiB: where a search ends."""
HOLES_MAX = 64
HOLE_LOOKS = 5
"""A bad page that others follow may be one that is being written: it is looked at so often before it counts as damaged."""
_STUCK_LOOKS = 5
_MAGIC = int.from_bytes(MAGIC, "little")
_COVERED_FROM = 8
_HEAD = np.dtype(
    [
        ("magic", "<u4"),
        ("crc", "<u4"),
        ("format", "<u2"),
        ("kind", "<u2"),
        ("count", "<u2"),
        ("zero", "<u2"),
        ("log", "<u4"),
        ("number", "<u4"),
        ("about", "V32"),
        ("time_s", "<u8"),
        ("owner16", "V16"),
        ("spare", "V48"),
    ]
)
"""As in `log_pages`; `about`: what a page says of its segment, up to the fingerprint."""
_ABOUT = struct.Struct("<IIII16s")
_ABOUT_AT, _OWNER_AT = 24, 64
assert _HEAD.itemsize == HEADER_BYTES
assert _HEAD.fields is not None
assert (_HEAD.fields["about"][1], _HEAD.fields["owner16"][1]) == (_ABOUT_AT, _OWNER_AT)
assert _HEAD["about"].itemsize == _ABOUT.size


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one segment. `owner16`: as in the page, zeros for the log's own author; `entries`: an array of `ENTRY`."""

    owner16: bytes
    segment: int
    generation: int
    purge: int
    record_pages: int
    fingerprint16: bytes
    time_s: int
    entries: npt.NDArray[np.void]


@dataclass(slots=True)
class News:
    """What one look found. `tombstones`: (owner16, segment numbers); `bad`: damaged blocks; `more`: look again at once."""

    runs: list[Run] = field(default_factory=list)
    bad: list[Run] = field(default_factory=list)
    tombstones: list[tuple[bytes, tuple[int, ...]]] = field(default_factory=list)
    pages: int = 0
    entries: int = 0
    more: bool = False
    sealed: bool = False


@dataclass(slots=True)
class LogCounters:
    """Totals of all readers that share it. `damaged_pages` were skipped, as good ones came behind them."""

    pages: int = 0
    damaged_pages: int = 0
    lost_seals: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Of a reader: the page that is next, and the damaged ones before it, with how often each was looked at."""

    log: int
    page: int
    holes: dict[int, int]


class LogReader:
    """Where one reader is in an author's logs. For one thread.

    `log` and `page` say what is read next; a seal leads on to the next log where `follow` is true. `FileNotFoundError` says
    that this log is not there: not yet, or not any more.
    """

    def __init__(
        self,
        directory: Path,
        files: PageFiles,
        counters: LogCounters,
        *,
        log: int,
        page: int = 0,
        follow: bool = True,
    ) -> None:
        self.log, self.page = log, page
        self._directory, self._files, self._counters, self._follow = directory, files, counters, follow
        self._fd = -1
        self._holes: dict[int, int] = {}
        self._stuck_looks = 0

    def read(self, pages_max: int = PAGES_AT_ONCE) -> News:
        """What is new, from at most so many pages. Raises `OSError`; the next call then opens the file anew."""
        try:
            news = self._read(pages_max)
        except OSError:
            self.close()
            raise
        self._counters.pages += news.pages
        return news

    def position(self) -> Position:
        """Where it is, to come back to."""
        return Position(self.log, self.page, dict(self._holes))

    def go_back(self, to: Position) -> None:
        """Reads on from there: what was read since is read again."""
        self._go_on_in(to.log)
        self.page, self._holes = to.page, dict(to.holes)

    def look_beyond(self) -> bool:
        """Searches the rest of the log, and the start of the next one, for a good page behind those that are not.

        True when there is one: `read` goes on there. For when it is known that there should be more, or never will be.
        """
        try:
            first = self._first_good()
            if first is not None:
                self._counters.damaged_pages += first - self.page
                self.page, self._stuck_looks = first, 0
                return True
            return self._follow and self._next_log_begun()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _read(self, pages_max: int) -> News:
        assert PEEK_PAGES <= pages_max <= PAGES_AT_ONCE, f"{pages_max} pages at once"
        pages = self._files.read(self._descriptor(), self.page, pages_max)
        good = good_pages(pages, self.log, self.page)
        found = np.flatnonzero(good)
        if not len(found):
            return self._nothing_good(pages, pages_max)
        stop = int(found[-1]) + 1
        news = decode(pages[:stop], good[:stop])
        if self._follow:
            news.more = stop == pages_max or news.sealed
        else:
            news.more = len(pages) == pages_max and not news.sealed
        self._stuck_looks = 0
        self._keep_holes(np.flatnonzero(~good[:stop]) + self.page)
        self.page += stop
        self._look_at_holes(news, last=news.sealed or not self._follow)
        if news.sealed and self._follow:
            self._go_on_in(self.log + 1)
        return news

    def _nothing_good(self, pages: Pages, pages_max: int) -> News:
        news = News()
        at_end, torn = len(pages) < pages_max, bool(pages[:1].any())
        if not self._follow:
            # A log that others follow has no more to come: what is bad here is damage, also where it is wide.
            news.more = not at_end
            self._counters.damaged_pages += len(pages)
            self.page += len(pages)
            return news
        self._look_at_holes(news, last=False)
        if at_end:
            news.more = self._next_log_begun()
        elif torn:
            self._stuck_looks += 1
            news.more = self._stuck_looks % _STUCK_LOOKS == 0 and self.look_beyond()
        return news

    def _keep_holes(self, numbers: npt.NDArray[np.int64]) -> None:
        for number in numbers.tolist():
            if len(self._holes) < HOLES_MAX:
                self._holes[number] = 0
            else:
                self._counters.damaged_pages += 1

    def _look_at_holes(self, news: News, *, last: bool) -> None:
        for number, looks in list(self._holes.items()):
            page = self._files.read(self._descriptor(), number, 1)
            if good_pages(page, self.log, number).all() and len(page):
                found = decode(page, np.ones(1, np.bool_))
                news.runs += found.runs
                news.bad += found.bad
                news.tombstones += found.tombstones
                news.pages, news.entries = news.pages + 1, news.entries + found.entries
                del self._holes[number]
            elif last or looks + 1 >= HOLE_LOOKS:
                self._counters.damaged_pages += 1
                del self._holes[number]
            else:
                self._holes[number] = looks + 1

    def _first_good(self) -> int | None:
        for first in range(self.page, LOG_PAGES_MAX, PAGES_AT_ONCE):
            pages = self._files.read(self._descriptor(), first, PAGES_AT_ONCE)
            found = np.flatnonzero(good_pages(pages, self.log, first))
            if len(found):
                return first + int(found[0])
            if len(pages) < PAGES_AT_ONCE:
                return None
        return None

    def _next_log_begun(self) -> bool:
        """Goes on in the next log when its author did, though this one's seal is not there.

        The next log is made beforehand: not its first page is a sign, but its second.
        """
        following = self._directory / log_name(self.log + 1)
        try:
            fd = self._files.open(following)
        except FileNotFoundError:
            return False
        try:
            begun = good_pages(self._files.read(fd, 0, 2), self.log + 1, 0)
        finally:
            os.close(fd)
        if not begun[1:].any():
            return False
        # What was written here before the next log was begun is there now, if it was not when it was looked for. Opened
        # anew, the file also has its full length, should the length have been cached too early.
        self.close()
        if self._first_good() is not None:
            return True
        self._counters.lost_seals += 1
        self._look_at_holes(News(), last=True)
        self._go_on_in(self.log + 1)
        return True

    def _go_on_in(self, log: int) -> None:
        self.close()
        self.log, self.page, self._stuck_looks = log, 0, 0
        self._holes.clear()

    def _descriptor(self) -> int:
        if self._fd < 0:
            self._fd = self._files.open(self._directory / log_name(self.log))
        return self._fd


def good_pages(pages: Pages, log: int, first_page: int) -> npt.NDArray[np.bool_]:
    """For each page whether it is page `first_page`, and so on, of this log, as it was written."""
    if not len(pages):
        return np.zeros(0, np.bool_)
    heads = _heads(pages)
    numbers = np.arange(first_page, first_page + len(pages), dtype=np.uint32)
    good: npt.NDArray[np.bool_] = (
        (heads["magic"] == _MAGIC)
        & (heads["format"] == FORMAT)
        & (heads["log"] == log)
        & (heads["number"] == numbers)
        & (heads["kind"] >= Kind.HEAD)
        & (heads["kind"] <= Kind.BAD)
        & (((heads["kind"] != Kind.BLOCKS) & (heads["kind"] != Kind.BAD)) | (heads["count"] <= ENTRIES_MAX))
        & ((heads["kind"] != Kind.TOMBSTONE) | (heads["count"] <= SEGMENTS_MAX))
    )
    raw, crcs = pages.reshape(-1).data, heads["crc"]
    found = np.flatnonzero(good)
    computed = [crc32c(raw[at + _COVERED_FROM : at + PAGE_BYTES]) for at in (found * PAGE_BYTES).tolist()]
    good[found] = np.array(computed, np.uint32) == crcs[found]
    return good


def decode(pages: Pages, good: npt.NDArray[np.bool_]) -> News:
    """What the good ones of these pages say, the blocks by segment; it stays when the pages are overwritten."""
    heads = _heads(pages)
    news = News(pages=int(good.sum()))
    kinds = heads["kind"]
    news.sealed = bool((good & (kinds == Kind.SEAL)).any())
    news.runs = _runs(pages, heads, np.flatnonzero(good & (kinds == Kind.BLOCKS)))
    news.bad = _runs(pages, heads, np.flatnonzero(good & (kinds == Kind.BAD)))
    news.entries = sum(len(run.entries) for run in news.runs)
    for number in np.flatnonzero(good & (kinds == Kind.TOMBSTONE)).tolist():
        count = int(heads["count"][number])
        numbers = pages[number, HEADER_BYTES : HEADER_BYTES + 4 * count].view("<u4").tolist()
        news.tombstones.append((heads["owner16"][number].tobytes(), tuple(numbers)))
    return news


def _runs(pages: Pages, heads: npt.NDArray[np.void], numbers: npt.NDArray[np.int64]) -> list[Run]:
    """What these pages say, a run for all of them that are about the same segment."""
    if not len(numbers):
        return []
    names = _names(pages[numbers])
    # Neighbours mostly are of one segment: only where that changes is it looked up.
    changes = np.flatnonzero((names[1:] != names[:-1]).any(axis=1)) + 1
    groups: dict[bytes, list[npt.NDArray[np.int64]]] = {}
    starts = [0, *changes.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        groups.setdefault(names[start].tobytes(), []).append(numbers[start:stop])
    runs = []
    for name, parts in groups.items():
        segment, generation, purge, record_pages, fingerprint16 = _ABOUT.unpack_from(name)
        if record_pages < 2:
            continue
        members = np.concatenate(parts) if len(parts) > 1 else parts[0]
        found, time_s = _entries(pages, heads["count"], members), int(heads["time_s"][members[-1]])
        runs.append(Run(name[_ABOUT.size :], segment, generation, purge, record_pages, fingerprint16, time_s, found))
    return runs


def _names(pages: Pages) -> npt.NDArray[np.uint8]:
    """What each page is about: the bytes of its segment, and of the segment's owner."""
    return np.concatenate([pages[:, _ABOUT_AT : _ABOUT_AT + _ABOUT.size], pages[:, _OWNER_AT : _OWNER_AT + 16]], axis=1)


def _entries(pages: Pages, counts: npt.NDArray[np.uint16], members: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The entries of these pages, one page's after the other's, as an array of `ENTRY` of its own."""
    counts = counts[members]
    most = int(counts.max())
    # Bytes, as joining arrays with fields takes numpy ten times as long.
    found = pages[members, HEADER_BYTES : HEADER_BYTES + most * ENTRY_BYTES].reshape(len(members), most, ENTRY_BYTES)
    if (counts != most).any():
        found = found[np.arange(most) < counts[:, None]]
    return found.reshape(-1).view(ENTRY)


def _heads(pages: Pages) -> npt.NDArray[np.void]:
    return pages[:, :HEADER_BYTES].view(_HEAD)[:, 0]


assert PAGE_BYTES >= HEADER_BYTES + ENTRIES_MAX * ENTRY_BYTES
