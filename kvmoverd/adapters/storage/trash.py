"""What is to be deleted: one rename hides it, a thread of its own frees its bytes bit by bit."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

from kvmoverd.adapters.storage.namespaces import make_directory

PACE_FILES = 256
PACE_S = 0.01
CLOSE_S = 0.5
"""How long a close waits for the thread to let go of its directory, which may be about to be unmounted."""
_IDLE_S = 3600.0
_SECTOR_BYTES = 512


class Trash:
    """Empties its directory at start, after each `throw` and once an hour, whoever filled it.

    `bytes_per_s` 0: as fast as the filesystem deletes, with a pause every 256 files. A thread that deletes touches no memory
    of others: one that hangs is not waited for at the end. `around`: the directory that trashes of others lie in, too.
    """

    def __init__(self, directory: Path, *, bytes_per_s: float = 0.0, around: Path | None = None) -> None:
        self.directory = directory
        self._around = around or directory
        self._bytes_per_s = bytes_per_s
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self.deleted_files = 0
        self.deleted_bytes = 0
        """What their blocks took."""
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="kvmover-trash", daemon=True)
        self._thread.start()

    def throw(self, path: Path, name: str = "") -> None:
        """Hides a file or directory at once, if it is there. Raises `OSError`."""
        place = self.directory / (name or secrets.token_hex(16))
        try:
            os.rename(path, place)
        except FileNotFoundError:
            if os.path.lexists(path):
                # The trash itself was thrown away, by whoever took this node for dead.
                make_directory(self.directory)
                os.rename(path, place)
        self._wanted.set()

    def pending(self) -> tuple[int, int]:
        """Bytes and files that lie here now. Looks at each: for a directory of few, large files. Raises `OSError`."""
        size_bytes = files = 0
        for place, _, names in os.walk(self.directory):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    size_bytes += os.lstat(f"{place}/{name}").st_blocks * _SECTOR_BYTES
                    files += 1
        return size_bytes, files

    def empty_now(self, bytes_wanted: int, deadline_s: float) -> int:
        """Deletes until so many bytes are free, or until the deadline on the monotonic clock; gives how many it freed.

        For the caller's thread, beside our own, without its pauses. What others threw away is as dead. Raises `OSError`.
        """
        freed_bytes = 0
        for place, _, names in os.walk(self._around):
            for name in names:
                if freed_bytes >= bytes_wanted or time.monotonic() > deadline_s:
                    return freed_bytes
                with contextlib.suppress(FileNotFoundError):
                    freed_bytes += self._unlink(f"{place}/{name}")
        return freed_bytes

    def close(self) -> None:
        """Ends the thread; waits for it for `CLOSE_S` at most. It may be called again."""
        self._closed.set()
        self._wanted.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.clear()
            # Another node may empty the same trash, and a root may go away: the next sweep tries again.
            with contextlib.suppress(OSError):
                self._delete_below(self.directory)
            self._wanted.wait(_IDLE_S)

    def _delete_below(self, directory: Path) -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._closed.is_set():
                    return
                with contextlib.suppress(FileNotFoundError):
                    self._delete(entry)

    def _delete(self, entry: os.DirEntry[str]) -> None:
        if entry.is_dir(follow_symlinks=False):
            self._delete_below(Path(entry.path))
            if not self._closed.is_set():
                os.rmdir(entry.path)
            return
        if self._bytes_per_s:
            self._closed.wait(self._unlink(entry.path) / self._bytes_per_s)
            return
        os.unlink(entry.path)
        self.deleted_files += 1
        if self.deleted_files % PACE_FILES == 0:
            self._closed.wait(PACE_S)

    def _unlink(self, path: str) -> int:
        """Gives the bytes that the file took."""
        size_bytes = os.lstat(path).st_blocks * _SECTOR_BYTES
        os.unlink(path)
        self.deleted_files += 1
        self.deleted_bytes += size_bytes
        return size_bytes
