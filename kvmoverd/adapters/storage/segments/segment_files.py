"""Segments that are open for reading: a descriptor each, kept until others are needed more."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.block_io import BlockIo, NotRegular, close_quietly, read_into
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.store.places import PAGE_BYTES, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, decode_segment

NAME_BYTES_MAX = 255
SEGMENT_MAX = (1 << 32) - 1


@dataclass(slots=True, eq=False)
class OpenSegment:
    """`users`: reads under way; `dropped`: closed as soon as there are none."""

    fd: int
    header: SegmentHeader
    size_bytes: int
    users: int = 0
    dropped: bool = False


class SegmentFiles:
    """At most `files_max` descriptors that nobody uses at the moment. Safe for many threads; no I/O under its lock.

    `on_close` is called with each descriptor just before it is closed.
    """

    def __init__(self, authors: Path, io: BlockIo, *, files_max: int = 256) -> None:
        self._authors, self._io, self._files_max = str(authors), io, files_max
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, int], OpenSegment] = OrderedDict()
        self._by_fd: dict[int, OpenSegment] = {}
        self.on_close: Callable[[int], None] = lambda fd: None

    def __len__(self) -> int:
        return len(self._by_fd)

    def take(self, author: str, number: int) -> OpenSegment:
        """An open segment, to be let go. Raises `OSError`, and `RecordMismatch` when its first page is not that of it."""
        name = (author, number)
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
                found.users += 1
                return found
        made = self._open_file(author, number)
        with self._lock:
            found = self._open.setdefault(name, made)
            found.users += 1
            if found is made:
                self._by_fd[made.fd] = made
            closing = [made] if found is not made else self._take_spare()
        self._close(closing)
        return found

    def let_go(self, fd: int) -> None:
        """Ends what `take` began."""
        with self._lock:
            segment = self._by_fd[fd]
            segment.users -= 1
            closing = [self._by_fd.pop(fd)] if segment.dropped and not segment.users else []
        self._close(closing)

    def drop(self, author: str, numbers: Iterable[int]) -> None:
        """These are deleted: their bytes are free only when nobody has them open."""
        with self._lock:
            closing = [segment for number in numbers if (segment := self._drop((author, number))) is not None]
        self._close(closing)

    def names(self) -> list[tuple[str, int]]:
        """Author and number of all that are open and kept."""
        with self._lock:
            return list(self._open)

    def drop_deleted(self, names: Iterable[tuple[str, int]]) -> int:
        """Drops those of these whose file has no name any more, whoever took it; how many. Asks the filesystem."""
        with self._lock:
            asked = [(name, segment) for name in names if (segment := self._open.get(name)) is not None]
            for _, segment in asked:
                segment.users += 1
        dropped = 0
        for (author, number), segment in asked:
            if _is_deleted(segment.fd):
                self.drop(author, [number])
                dropped += 1
            self.let_go(segment.fd)
        return dropped

    def close(self) -> None:
        """Closes all that nobody reads, and the others when they are let go."""
        with self._lock:
            closing = [segment for name in list(self._open) if (segment := self._drop(name)) is not None]
        self._close(closing)

    def _take_spare(self) -> list[OpenSegment]:
        """Takes those out that are too many and idle, the least recently used first."""
        idle = [name for name, segment in self._open.items() if not segment.users]
        spare = idle[: max(0, len(idle) - self._files_max)]
        return [segment for name in spare if (segment := self._drop(name)) is not None]

    def _drop(self, name: tuple[str, int]) -> OpenSegment | None:
        """Takes one out; gives it back if it may be closed now."""
        segment = self._open.pop(name, None)
        if segment is None:
            return None
        segment.dropped = True
        return None if segment.users else self._by_fd.pop(segment.fd)

    def _close(self, segments: list[OpenSegment]) -> None:
        for segment in segments:
            self.on_close(segment.fd)
            close_quietly(segment.fd)

    def _open_file(self, author: str, number: int) -> OpenSegment:
        """The name may come from another node: it must not lead anywhere else."""
        if "/" in author or "\0" in author or author.startswith(".") or not 0 < len(author.encode()) <= NAME_BYTES_MAX:
            raise FileNotFoundError(errno.ENOENT, "no author has such a name", author)
        if not 0 <= number <= SEGMENT_MAX:
            raise FileNotFoundError(errno.ENOENT, "no segment has such a number", str(number))
        try:
            fd, status = self._io.open_read(f"{self._authors}/{author}/seg/{segment_name(number)}")
        except (NotRegular, NotADirectoryError) as error:
            # Its blocks are gone, and the device is sound.
            raise FileNotFoundError(errno.ENOENT, error.strerror, error.filename) from error
        try:
            page = page_memory(PAGE_BYTES)
            header = decode_segment(page[: read_into(fd, page)])
            if (header.author, header.number) != (author, number):
                found, expected = f"{header.author}/{header.number}", f"{author}/{number}"
                raise RecordMismatch("segment", found=found, expected=expected)
        except BaseException:
            close_quietly(fd)
            raise
        return OpenSegment(fd, header, status.st_size)


def _is_deleted(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError as error:
        return error.errno == errno.ESTALE
