"""Writes the index logs of one author: whole pages, each once, in order; what they say is durable when `publish` returns."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
import time
from collections.abc import Callable, Sequence

from kvmoverd.adapters.storage.block_io import DISK_FULL
from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.writes_io import WriteIo, page_memory
from kvmoverd.core.store.log_pages import SEGMENTS_MAX, Kind, LogPage, author16, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, log_name

PAGES_MIN = 3
"""Head, one page, seal."""
SPARE_PAGES = 32
"""At least so many of the next pages have room on the disk, so that a full one still takes tombstones."""
FILL_PAGES = 256
"""So many more are given room at once. A killed start leaves no more behind than what it had room for."""


class LogWriter:
    """Makes log 1 and the one after it. Safe for many threads; each call does I/O and may take as long as that takes.

    The next log always exists before a log is sealed. `on_seal` is called with the number of a log that was sealed, in the
    thread that sealed it; it must not publish. Raises `OSError`. An author who is not born has no log: nothing can be published.
    """

    def __init__(self, author: Author, io: WriteIo, *, pages: int) -> None:
        assert pages >= PAGES_MIN, f"a log of {pages} pages is too short, {PAGES_MIN} are the least"
        self._author, self._io, self._pages = author, io, pages
        self._lock = threading.Lock()
        self._page = page_memory(PAGE_BYTES)
        self._closed = not author.born
        self.on_seal: Callable[[int], None] = lambda number: None
        self.number = 1
        """Of the log that is written now."""
        self._next_fd = -1
        self._at = 1
        self._filled = self._filled_first
        """Pages of the present log that have room on the disk."""
        self._fd = -1
        if not self._closed:
            self._fd = self._make(1)
            try:
                self._next_fd = self._make(2)
            except OSError:
                self._io.close(self._fd)
                raise

    def publish(self, pages: Sequence[LogPage]) -> list[OSError | None]:
        """Writes pages, whose `log` and `number` are set here, and syncs once: for each whether that failed.

        A page that can't be written is given up with its number, and never written again.
        """
        with self._lock:
            if self._closed:
                return [self._closed_error() for _ in pages]
            if self._next_fd < 0:
                with contextlib.suppress(OSError):
                    self._next_fd = self._make(self.number + 1)
            failures: list[OSError | None] = []
            unsynced = 0
            for page in pages:
                log, failure = self.number, self._append(page)
                if self.number != log:
                    # The sync of the seal was that of the pages before it, too.
                    failures[unsynced:] = [earlier or failure for earlier in failures[unsynced:]]
                    unsynced = len(failures)
                failures.append(failure)
            try:
                self._io.sync(self._fd)
            except OSError as error:
                failures[unsynced:] = [failure or error for failure in failures[unsynced:]]
            with contextlib.suppress(OSError):
                self._fill_ahead(SPARE_PAGES)
            return failures

    def tombstone(self, numbers: Sequence[int], owner: str = "") -> None:
        """Says durably that these segments are not to be read any more. `owner`: an adopted author whose they are.

        Raises `OSError`: then some of them may be taken for dead by others all the same.
        """
        owner16 = author16(owner) if owner and owner != self._author.name else bytes(16)
        pages = [
            LogPage(
                Kind.TOMBSTONE,
                0,
                0,
                time_s=int(time.time()),
                owner16=owner16,
                segments=tuple(numbers[at : at + SEGMENTS_MAX]),
            )
            for at in range(0, len(numbers), SEGMENTS_MAX)
        ]
        for failure in self.publish(pages):
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Closes the files; what is published later fails. It may be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for fd in (self._fd, self._next_fd):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        self._io.close(fd)

    def _closed_error(self) -> OSError:
        if self._author.born:
            return OSError(errno.EBADF, "the log is closed")
        return OSError(errno.ENOSPC, "there was no room for a log yet")

    def _append(self, page: LogPage) -> OSError | None:
        try:
            if self._at >= self._pages - 1:
                self._roll_over()
            # The one behind it, too: a log whose last page was written must have room for its seal.
            self._fill_ahead(2)
            at, self._at = self._at, self._at + 1
            self._write(self._fd, dataclasses.replace(page, log=self.number, number=at))
        except OSError as error:
            return error
        return None

    def _roll_over(self) -> None:
        """Seals this log and goes on in the next. The one after that may be made later: a full disk must take tombstones."""
        if self._next_fd < 0:
            self._next_fd = self._make(self.number + 1)
        try:
            self._write(self._fd, LogPage(Kind.SEAL, self.number, self._pages - 1))
            self._io.sync(self._fd)
        finally:
            # Sealed or not, this log takes no more pages: whoever reads it to its last page goes on in the next.
            sealed_fd, sealed = self._fd, self.number
            self._fd, self._next_fd, self.number, self._at = self._next_fd, -1, self.number + 1, 1
            self._filled = self._filled_first
            with contextlib.suppress(OSError):
                self._io.close(sealed_fd)
        with contextlib.suppress(OSError):
            self._next_fd = self._make(self.number + 1)
        self.on_seal(sealed)

    def _make(self, number: int) -> int:
        """A new log with its head page, durable, of its whole size; what it has room for on the disk grows with its pages."""
        path = self._author.directory / log_name(number)
        fd = self._io.create(path, self._pages * PAGE_BYTES)
        try:
            self._fill(fd, 0, self._filled_first)
            self._write(fd, LogPage(Kind.HEAD, number, 0, author=self._author.name))
            self._io.sync_whole(fd)
            self._io.sync_names(path.parent)
        except OSError:
            self._io.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._author.log = number
        return fd

    @property
    def _filled_first(self) -> int:
        return min(self._pages, 2 + SPARE_PAGES)

    def _fill_ahead(self, pages: int) -> None:
        """Gives more pages room unless so many that are still to be written have it, or all. Raises `OSError` on a full disk."""
        if self._filled < self._pages and self._filled - self._at < pages:
            upto = min(self._pages, self._filled + FILL_PAGES)
            try:
                self._fill(self._fd, self._filled, upto)
            except OSError as error:
                # A device that refuses these zeros may refuse the pages, too: each is tried, and given up, alone.
                if error.errno in DISK_FULL:
                    raise
            self._filled = upto

    def _fill(self, fd: int, first: int, upto: int) -> None:
        """Writes zeros into pages that were never written. What has room so is written faster than what is only reserved."""
        zeros = page_memory((upto - first) * PAGE_BYTES)
        self._io.write(fd, zeros, first * PAGE_BYTES)

    def _write(self, fd: int, page: LogPage) -> None:
        self._page[:] = encode_page(page)
        self._io.write(fd, self._page, page.number * PAGE_BYTES)
