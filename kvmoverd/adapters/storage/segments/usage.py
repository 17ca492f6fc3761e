"""What this node's directories take: bytes and inodes by segment, and the room of the filesystem.

What touches the device is for the keeper's thread, and for one that needs room on a full disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.block_io import BlockIo, read_into
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.store.places import PAGE_BYTES, number_of, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, decode_segment

SEGMENTS = "seg"
LOOK_WAIT_S = 5.0
LOOK_AT_ONCE = 32
"""Segments whose sizes are asked for between two pauses: some take a millisecond each."""
_SECTOR_BYTES = 512


@dataclass(slots=True, eq=False)
class SegmentFile:
    """A segment that is there. `written_ns`: when it was last written, wall clock. `settled`: it will not change any more."""

    author: str
    number: int
    path: Path
    size_bytes: int = 0
    written_ns: int = 0
    settled: bool = False
    header: SegmentHeader | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.author, self.number


@dataclass(frozen=True, slots=True)
class Room:
    """What the filesystem says of itself; `inodes_total` 0: it has no fixed number."""

    bytes_total: int
    bytes_free: int
    inodes_total: int
    inodes_free: int

    @property
    def bytes_used(self) -> int:
        return self.bytes_total - self.bytes_free

    @property
    def inodes_used(self) -> int:
        return self.inodes_total - self.inodes_free


def room_of(path: Path) -> Room:
    """Raises `OSError`; may hang with the filesystem."""
    said = os.statvfs(path)
    return Room(said.f_blocks * said.f_frsize, said.f_bavail * said.f_frsize, said.f_files, said.f_favail)


class Usage:
    """Segments of the authors that this node owns. `authors`: the directory of all authors. Safe for many threads.

    `header` is for the keeper's.
    """

    def __init__(self, authors: Path, io: BlockIo) -> None:
        self._authors, self._io = authors, io
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._segments: dict[str, dict[int, SegmentFile]] = {}
        self._others: dict[str, tuple[int, int]] = {}
        self._page = page_memory(PAGE_BYTES)

    def refresh(self, owned: Iterable[str], is_active: Callable[[str, int], bool]) -> None:
        """Looks at these authors' directories, and forgets all others. New segments, and active ones, are measured.

        Raises `OSError` when all that can be looked at was, and a `TimeoutError` where another thread has been looking for 5 s; a
        directory that is gone is empty.
        """
        names = list(owned)
        failed: OSError | None = None
        if not self._looking.acquire(timeout=LOOK_WAIT_S):
            raise TimeoutError(f"another thread has been looking at {self._authors} for {LOOK_WAIT_S:g} s")
        try:
            for author in names:
                try:
                    deque(self.look(author, is_active), maxlen=0)
                except OSError as error:
                    failed = failed or error
        finally:
            self._looking.release()
        with self._lock:
            for author in self._segments.keys() - set(names):
                del self._segments[author]
                self._others.pop(author, None)
        if failed is not None:
            raise failed

    def directory(self, author: str) -> Path:
        return self._authors / author

    def segments(self, owned: Collection[str] | None = None) -> list[SegmentFile]:
        """Of these authors, or of all that were looked at."""
        with self._lock:
            authors = self._segments if owned is None else [author for author in owned if author in self._segments]
            return [segment for author in authors for segment in self._segments[author].values()]

    def of_author(self, author: str) -> int:
        """How many segments of his are there."""
        with self._lock:
            return len(self._segments.get(author, ()))

    def find(self, author: str, number: int) -> SegmentFile | None:
        with self._lock:
            return self._segments.get(author, {}).get(number)

    def gone(self, segment: SegmentFile) -> None:
        """It is no longer in its author's directory."""
        with self._lock:
            self._segments.get(segment.author, {}).pop(segment.number, None)

    def left(self, author: str) -> None:
        """His directory is no longer there: what it took counts where it is now."""
        with self._lock:
            self._segments.pop(author, None)
            self._others.pop(author, None)

    def totals(self) -> tuple[int, int]:
        """Bytes and inodes of all files and directories of these authors."""
        with self._lock:
            segments = [segment for segments in self._segments.values() for segment in segments.values()]
            others_bytes = sum(other[0] for other in self._others.values())
            others = sum(other[1] for other in self._others.values())
        return sum(segment.size_bytes for segment in segments) + others_bytes, len(segments) + others

    def header(self, segment: SegmentFile) -> SegmentHeader | None:
        """Read at the first call; None where it can't be read, or is of another segment."""
        if segment.header is None:
            with contextlib.suppress(OSError, RecordMismatch):
                header = self._read_header(segment.path)
                if (header.author, header.number) == segment.name:
                    segment.header = header
        return segment.header

    def look(self, author: str, is_active: Callable[[str, int], bool]) -> Iterator[None]:
        """Looks at one more author's directory; a pause after every `LOOK_AT_ONCE` segments. Raises `OSError`."""
        directory = self._authors / author
        with self._lock:
            known = dict(self._segments.get(author, {}))
        found: dict[int, SegmentFile] = {}
        for at, number in enumerate(_segment_numbers(directory / SEGMENTS), 1):
            segment = known.get(number) or self._new(author, number)
            if segment.settled or _measure(segment, is_active):
                found[number] = segment
            if at % LOOK_AT_ONCE == 0:
                yield
        others = _others(directory)
        with self._lock:
            now = self._segments.get(author, {})
            # What was dropped while this looked stays dropped; what another thread found meanwhile is the same segment.
            dropped = known.keys() - now.keys()
            self._segments[author] = {
                number: now.get(number, one) for number, one in found.items() if number not in dropped
            }
            self._others[author] = others

    def _new(self, author: str, number: int) -> SegmentFile:
        return SegmentFile(author, number, self._authors / author / SEGMENTS / segment_name(number))

    def _read_header(self, path: Path) -> SegmentHeader:
        fd, _ = self._io.open_read(str(path))
        try:
            got = read_into(fd, self._page)
            return decode_segment(self._page[:got])
        finally:
            os.close(fd)


def _measure(segment: SegmentFile, is_active: Callable[[str, int], bool]) -> bool:
    """Sets its size and time; False when it is not there."""
    # Asked before it is measured: what is settled afterwards was already when it was measured.
    settled = not is_active(segment.author, segment.number)
    try:
        status = os.stat(segment.path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    segment.size_bytes = status.st_blocks * _SECTOR_BYTES
    segment.written_ns = status.st_mtime_ns
    segment.settled = settled
    return True


def _segment_numbers(directory: Path) -> Collection[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(number for name in names if (number := number_of(name, "seg")) is not None)


def _others(directory: Path) -> tuple[int, int]:
    """Bytes and inodes of logs and the like, and of the two directories themselves."""
    size_bytes = inodes = 0
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:
        return 0, 0
    with entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += entry.stat(follow_symlinks=False).st_blocks * _SECTOR_BYTES
                inodes += 1
    return size_bytes, inodes + 1
