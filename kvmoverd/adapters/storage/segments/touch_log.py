"""Touch logs: each node says what it used of others' segments and what it pins there; owners read that before they drop.

A log is made in full size and appended to, page by page; the last two are kept. A node that has nothing to say writes an
empty page now and then, so that its silence means something.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.block_io import BlockIo, create_file, read_into
from kvmoverd.adapters.storage.segments.touches import Touches, Used
from kvmoverd.core.store.places import PAGE_BYTES, number_of, touch_name
from kvmoverd.core.store.touch_pages import PINNED, TOUCH, USED, author_tag, decode_page, encode_pages, runs, unrolled

LOG_PAGES = 1024
FLUSH_S = 5.0
"""Period of `TouchTeller.step`."""
SILENCE_S = 25.0
"""After so long an empty page is written, and pins that still hold are told again."""
UNKNOWN_S = 60.0
"""A live node whose touch log says nothing for so long: what it uses is unknown."""
PIN_LEASE_S = 90.0
"""A pin that another node does not repeat ends: it died, or took it back."""
OWN_S = 60.0
"""How often a node tells what it used of its own segments: only who adopts them once will read that."""
READ_BYTES = 256 << 10
_OWN_ENTRIES_MAX = 1 << 16
_STEP_NS = 100_000_000
_SECOND_NS = 10**9


class SegmentName(Protocol):
    @property
    def author(self) -> str: ...
    @property
    def number(self) -> int: ...


class SegmentNames(Protocol):
    """What is asked of the index: whose segment an id is, and the reverse; None for one that is gone."""

    def segment(self, segment_id: int) -> SegmentName | None: ...

    def segment_id(self, author: str, number: int) -> int | None: ...


class TouchLog:
    """The touch logs of one author, for him to append to. One thread."""

    def __init__(self, directory: Path, io: BlockIo, *, pages: int = LOG_PAGES) -> None:
        self._directory = directory
        self._flags = os.O_DIRECT if io.direct else 0
        self._pages = pages
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._log = 1 + max(_numbers(directory), default=-1)
        self._fd = self._create()
        self._next = 0

    def append(self, entries: npt.NDArray[np.void]) -> None:
        """Writes them, in one page at least, and makes that visible to others.

        Raises `OSError`; what is written then is in doubt, and so no page's number is used twice.
        """
        per_page = (PAGE_BYTES - 64) // TOUCH.itemsize
        while True:
            if self._next >= self._pages:
                self._roll()
            room = min(self._pages - self._next, READ_BYTES // PAGE_BYTES)
            some, entries = entries[: room * per_page], entries[room * per_page :]
            self._write(b"".join(encode_pages(some, self._log, self._next)))
            if not len(entries):
                return

    def close(self) -> None:
        """It may be called again: by then the descriptor's number may be another file's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _write(self, pages: bytes) -> None:
        offset_bytes = self._next * PAGE_BYTES
        self._next += len(pages) // PAGE_BYTES
        self._buffer[: len(pages)] = pages
        with memoryview(self._buffer)[: len(pages)] as view:
            put = os.pwrite(self._fd, view, offset_bytes)
        if put != len(pages):
            raise OSError(errno.EIO, f"touch log: {put} of {len(pages)} bytes were written")
        os.fdatasync(self._fd)

    def _roll(self) -> None:
        self.close()
        self._log += 1
        self._fd = self._create()
        self._next = 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory / touch_name(self._log - 2))

    def _create(self) -> int:
        fd = create_file(self._directory / touch_name(self._log), self._flags)
        try:
            os.ftruncate(fd, self._pages * PAGE_BYTES)
        except OSError:
            os.close(fd)
            raise
        return fd


class TouchTeller:
    """The keeper's job that writes this node's touches and pins. One thread.

    `log`: that of the author who writes now. `owned`: authors whose segments this node itself collects; of those nobody else
    need be told soon, but a later start of this node, or who adopts them else, will know what was hot.
    """

    def __init__(
        self,
        log: Callable[[], TouchLog],
        touches: Touches,
        names: SegmentNames,
        *,
        owned: Callable[[], Collection[str]],
        now_ns: Callable[[], int],
    ) -> None:
        self._log, self._touches, self._names, self._owned, self._now_ns = log, touches, names, owned, now_ns
        self._pinned: set[int] = set()
        self._told_ns: int | None = None
        self._own: list[npt.NDArray[np.void]] = []
        self._own_told_ns = now_ns()
        self.told_records = 0
        """Touches and pins of single records that were written since the start."""

    def step(self) -> None:
        """Writes what is new. Raises `OSError`: it is lost then, and only what comes later is told."""
        parts = self._used()
        pins = self._touches.pins()
        pinned = set(_codes(pins).tolist())
        due = self._told_ns is None or self._is_due(self._told_ns, SILENCE_S)
        if due or pinned != self._pinned:
            unpinned = _unpinned(self._pinned - pinned)
            parts += [entries for _, entries in self._entries(unpinned, kind=PINNED)]
            parts += [entries for _, entries in self._entries(pins, kind=PINNED)]
        if parts or due:
            self._pinned = pinned
            self._log().append(np.concatenate(parts) if parts else np.empty(0, TOUCH))
            self._told_ns = self._now_ns()

    def _used(self) -> list[npt.NDArray[np.void]]:
        """What was used of others' segments since the last call, and now and then of our own."""
        owned = self._owned()
        parts: list[npt.NDArray[np.void]] = []
        for author, entries in self._entries(self._touches.take_fresh(), kind=USED):
            (self._own if author in owned else parts).append(entries)
        if self._is_due(self._own_told_ns, OWN_S) or sum(map(len, self._own)) > _OWN_ENTRIES_MAX:
            parts += self._own
            self._own, self._own_told_ns = [], self._now_ns()
        return parts

    def _entries(self, used: Used, *, kind: int) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
        """Author and entries for each segment; `used` is sorted by segment."""
        bounds = [0, *(np.flatnonzero(np.diff(used.segment_ids)) + 1).tolist(), len(used)]
        for start, stop in itertools.pairwise(bounds if len(used) else []):
            name = self._names.segment(int(used.segment_ids[start]))
            if name is None:
                continue
            self.told_records += stop - start
            records, counts = used.record_indexes[start:stop], used.counts[start:stop]
            yield name.author, runs(author_tag(name.author), name.number, records, counts, kind=kind)

    def _is_due(self, since_ns: int, period_s: float) -> bool:
        return self._now_ns() - since_ns >= period_s * _SECOND_NS


class TouchFollower:
    """Reads one author's touch logs as they grow. One thread; `buffer` is `READ_BYTES` long, page-aligned, and shared."""

    def __init__(self, directory: Path, io: BlockIo, buffer: mmap.mmap) -> None:
        self._directory, self._io, self._buffer = directory, io, buffer
        self._log: int | None = None
        self._page = 0
        self.bad_pages = 0

    def poll(self) -> list[npt.NDArray[np.void]] | None:
        """Entries of the pages that are new, a read at most; None when there is no new page. Raises `OSError`."""
        if self._log is None:
            numbers = _numbers(self._directory)
            if not numbers:
                return None
            self._log = min(numbers)
        for _ in range(2):
            found, at_end = self._read(self._log)
            if found:
                return found
            if not at_end and not (self._directory / touch_name(self._log + 1)).exists():
                return None
            # The next log is made after the last page of this one was written: look here once more, then go on.
            found, _ = self._read(self._log)
            if found:
                return found
            later = [number for number in _numbers(self._directory) if number > self._log]
            if not later:
                return None
            self._log, self._page = min(later), 0
        return None

    def _read(self, log: int) -> tuple[list[npt.NDArray[np.void]], bool]:
        """Entries page by page, and whether the log has no more pages to come."""
        try:
            fd, status = self._io.open_read(str(self._directory / touch_name(log)))
        except FileNotFoundError:
            return [], True
        try:
            offset_bytes = self._page * PAGE_BYTES
            if offset_bytes >= status.st_size:
                return [], True
            with memoryview(self._buffer) as view:
                got = read_into(fd, view, offset_bytes) // PAGE_BYTES
                return self._decoded(view, log, got), False
        finally:
            os.close(fd)

    def _decoded(self, view: memoryview, log: int, pages: int) -> list[npt.NDArray[np.void]]:
        found: list[npt.NDArray[np.void]] = []
        last = 0
        for number in range(pages):
            raw = bytes(view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])
            entries = decode_page(raw, log, self._page + number)
            if entries is not None:
                found.append(entries)
                last = number + 1
        # Bad pages with a good one behind were torn; with nothing behind they are not there yet.
        self.bad_pages += last - len(found)
        self._page += last
        return found


class TouchWatch:
    """The keeper's job that reads the touch logs of all live others into `touches`. One thread.

    `live`: authors that are alive, this node's own ones excepted; `owned`: authors whose segments this node collects. What was
    said of an author's segments before he was adopted is read again then, as is what he said himself.
    """

    def __init__(
        self,
        authors: Path,
        io: BlockIo,
        touches: Touches,
        names: SegmentNames,
        *,
        owned: Callable[[], Collection[str]],
        live: Callable[[], Collection[str]],
        now_ns: Callable[[], int],
    ) -> None:
        self._authors, self._io, self._touches, self._names = authors, io, touches, names
        self._owned, self._live, self._now_ns = owned, live, now_ns
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._followers: dict[str, TouchFollower] = {}
        self._heard_ns: dict[str, int] = {}
        self._waiting: list[str] = []
        self._known = set(owned())
        self._late: list[tuple[str, TouchFollower, dict[int, str]]] = []
        self.heard_records = 0
        """Touches and pins of single records of ours that were read since the start."""

    def step(self) -> bool:
        """Reads on for a tenth of a second at most; True when there is more to read."""
        self._meet()
        deadline_ns = self._now_ns() + _STEP_NS
        tags = {author_tag(author): author for author in self._known}
        waiting = self._waiting or list(self._followers)
        while waiting and self._now_ns() < deadline_ns:
            author = waiting.pop()
            if self._take(author, self._followers[author], tags):
                self._heard_ns[author] = self._now_ns()
                waiting.append(author)
        while self._late and self._now_ns() < deadline_ns:
            if not self._take(*self._late[-1]):
                self._late.pop()
        self._waiting = waiting
        return bool(waiting or self._late)

    def unknown(self) -> dict[str, float]:
        """Live authors whose use is unknown, and for how many seconds they were silent. For any thread."""
        now_ns = self._now_ns()
        silent = {author: (now_ns - heard_ns) / _SECOND_NS for author, heard_ns in list(self._heard_ns.items())}
        return {author: silent_s for author, silent_s in silent.items() if silent_s > UNKNOWN_S}

    def _meet(self) -> None:
        """Begins to follow who is new, and forgets who is dead, with his pins."""
        live = set(self._live())
        for author in live - self._followers.keys():
            self._followers[author] = self._follower(author)
            self._heard_ns[author] = self._now_ns()
        for author in self._followers.keys() - live:
            del self._followers[author], self._heard_ns[author]
            self._touches.unpin_all(by=author)
        self._waiting = [author for author in self._waiting if author in live]
        owned = set(self._owned())
        tags = {author_tag(author): author for author in owned}
        for adopted in owned - self._known:
            self._late.append((adopted, self._follower(adopted), tags))
            self._late += [(author, self._follower(author), {author_tag(adopted): adopted}) for author in live]
        self._known = owned

    def _follower(self, author: str) -> TouchFollower:
        return TouchFollower(self._authors / author, self._io, self._buffer)

    def _take(self, author: str, follower: TouchFollower, tags: dict[int, str]) -> bool:
        """Reads on in one log, of what it says of these authors' segments; False when there was nothing new.

        A file that can't be read says nothing, and so makes its author's use unknown in the end.
        """
        pages = None
        with contextlib.suppress(OSError):
            pages = follower.poll()
        if pages is None:
            return False
        entries = np.concatenate(pages)
        entries = entries[np.isin(entries["author"], np.array(list(tags), np.uint64))]
        for tag, number in np.unique(entries[["author", "segment"]]).tolist():
            segment_id = self._names.segment_id(tags[tag], number)
            if segment_id is not None:
                mine = entries[(entries["author"] == tag) & (entries["segment"] == number)]
                self._apply(author, segment_id, mine)
        return True

    def _apply(self, author: str, segment_id: int, entries: npt.NDArray[np.void]) -> None:
        records, counts = unrolled(entries[entries["kind"] == USED], "count")
        if len(records):
            found, at = np.unique(records, return_inverse=True)
            sums = np.bincount(at, weights=counts).astype(np.uint32)
            self._touches.add(np.full(len(found), segment_id, np.uint32), found, sums)
        for pin in entries[entries["kind"] == PINNED]:
            which, _ = unrolled(np.array([pin]), "pin_s")
            for_s = min(float(pin["pin_s"]), PIN_LEASE_S)
            self._touches.pin(np.full(len(which), segment_id, np.uint32), which, for_s, by=author)
            self.heard_records += len(which)
        self.heard_records += len(records)


def _numbers(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [number for name in names if (number := number_of(name, "touch")) is not None]


def _codes(used: Used) -> npt.NDArray[np.uint64]:
    return (used.segment_ids.astype(np.uint64) << np.uint64(32)) | used.record_indexes


def _unpinned(codes: Collection[int]) -> Used:
    """Pins that are no more, by segment, with 0 seconds left."""
    every = np.array(sorted(codes), np.uint64)
    return Used(
        (every >> np.uint64(32)).astype(np.uint32),
        (every & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        np.zeros(len(every), np.uint32),
    )
