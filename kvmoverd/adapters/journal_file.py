"""The decision log in a file, written by a thread. A disk that stands still never holds the scheduler's loop."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import IO

from kvmoverd.core.scheduling.numbers import JournalNumbers

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 18
FORMER_SUFFIX = ".1"
CONTINUES, DROPPED = "continues", "dropped"
"""The one key of a first line of a file that goes on, with how many files came before it; of a line that stands for others."""


class _Begin:
    """Stands in the queue for the beginning of another log."""


class JournalFile:
    """Lines for a file of at most `bytes_max`, then the file is moved to PATH.1, over the former one there, and goes on.

    At most `queue_max` lines wait, 4 or more; what comes beyond is dropped, and a line of the file says so where it is missing.
    After a write that fails all is dropped until the next beginning. Raises `OSError` when the file can't be opened.
    """

    def __init__(self, path: Path, *, bytes_max: int, queue_max: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._queue: queue.Queue[str | _Begin | None] = queue.Queue(queue_max)
        self._queue_max = queue_max
        self._dropped = self._dropped_untold = 0
        self._begins = False
        """A beginning is not in the queue yet."""
        self._lock = threading.Lock()
        self._lines = self._bytes = 0
        self._file: IO[bytes] | None = None
        self._file_bytes = 0
        self._pieces = 0
        self._thread = threading.Thread(target=self._write, name="kvmoverd-journal", daemon=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        self._thread.start()

    def begin(self) -> None:
        """Another log begins: what is in the file goes to PATH.1."""
        with self._lock:
            self._begins = True

    def write(self, line: str) -> None:
        with self._lock:
            # Nobody else puts anything in meanwhile: there is room for all of it, or for nothing.
            if self._queue_max - self._queue.qsize() < 3:
                self._dropped += 1
                self._dropped_untold += 1
                return
            for item in (*self._missing(), line):
                self._queue.put_nowait(item)

    def numbers(self) -> JournalNumbers:
        return JournalNumbers(self._lines, self._bytes, self._dropped, self._queue.qsize())

    def stop(self, timeout_s: float) -> bool:
        """Writes what waits; True when all of it was written in time, and nothing was dropped before."""
        with self._lock:
            last = [*self._missing(), None]
        if self._thread.is_alive():
            try:
                for item in last:
                    self._queue.put(item, timeout=timeout_s)
            except queue.Full:
                return False
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._dropped

    def _missing(self) -> list[str | _Begin | None]:
        """What stands before the next line: a beginning, and how many lines are missing."""
        found: list[str | _Begin | None] = [_Begin()] if self._begins else []
        if self._dropped_untold:
            found.append(json.dumps({DROPPED: self._dropped_untold}))
        self._begins, self._dropped_untold = False, 0
        return found

    # In the thread.

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, _Begin):
                    self._start(pieces=0)
                else:
                    self._write_line(item.encode() + b"\n")
                if self._file is not None and self._queue.empty():
                    self._file.flush()
            except OSError as error:
                self._fail(error)
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._fail(error)

    def _write_line(self, line: bytes) -> None:
        if self._file is None:
            self._lose_one()
            return
        if self._file_bytes + len(line) > self._bytes_max and self._file_bytes:
            self._start(pieces=self._pieces + 1)
        self._add(line)
        self._lines += 1

    def _start(self, *, pieces: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.path.exists() and self.path.stat().st_size:
            os.replace(self.path, former_of(self.path))
        self._file = self.path.open("wb", buffering=BUFFER_BYTES)
        self._file_bytes, self._pieces = 0, pieces
        if pieces:
            self._add(json.dumps({CONTINUES: pieces}).encode() + b"\n")

    def _add(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._file_bytes += len(line)
        self._bytes += len(line)

    def _fail(self, error: OSError) -> None:
        log.warning("the decision log %s can't be written, and ends: %s", self.path, error.strerror)
        self._lose_one()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                return

    def _lose_one(self) -> None:
        with self._lock:
            self._dropped += 1


def former_of(path: Path) -> Path:
    """Where a file goes that is full."""
    return path.with_name(path.name + FORMER_SUFFIX)
