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
    """Empties its directory at start, after each `throw` and once an hour, whoever filled it. What can't be deleted is passed by.

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
        self.failures = 0
        """Files and directories that could not be deleted, at each try."""
        self.stuck_bytes = 0
        """What files take that the last sweep could not delete."""
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
        """Bytes and files that lie here now. Looks at each: for a directory of few, large files."""
        size_bytes = files = 0
        for place, _, names in os.walk(self.directory):
            for name in names:
                with contextlib.suppress(OSError):
                    size_bytes += os.lstat(f"{place}/{name}").st_blocks * _SECTOR_BYTES
                    files += 1
        return size_bytes, files

    def empty_now(self, bytes_wanted: int, deadline_s: float) -> int:
        """Deletes until so many bytes are free, or until the deadline on the monotonic clock; gives how many it freed.

        For the caller's thread, beside our own, without its pauses. What others threw away is as dead, though they may own it
        in a way that this node can't delete.
        """
        freed_bytes = 0
        for place, _, names in os.walk(self._around):
            for name in names:
                if freed_bytes >= bytes_wanted or time.monotonic() > deadline_s:
                    return freed_bytes
                try:
                    freed_bytes += self._unlink(f"{place}/{name}")
                except FileNotFoundError:
                    continue
                except OSError:
                    self.failures += 1
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
                self.stuck_bytes = self._delete_below(self.directory)
            self._wanted.wait(_IDLE_S)

    def _delete_below(self, directory: Path) -> int:
        """Gives the bytes that stay, as they can't be deleted. Raises `OSError` where the directory can't be read."""
        stuck_bytes = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._closed.is_set():
                    break
                try:
                    stuck_bytes += self._delete(entry)
                except FileNotFoundError:
                    continue
                except OSError:
                    self.failures += 1
                    with contextlib.suppress(OSError):
                        stuck_bytes += entry.stat(follow_symlinks=False).st_blocks * _SECTOR_BYTES
        return stuck_bytes

    def _delete(self, entry: os.DirEntry[str]) -> int:
        """Gives the bytes that stay below it."""
        if entry.is_dir(follow_symlinks=False):
            stuck_bytes = self._delete_below(Path(entry.path))
            if not stuck_bytes and not self._closed.is_set():
                os.rmdir(entry.path)
            return stuck_bytes
        if self._bytes_per_s:
            self._closed.wait(self._unlink(entry.path) / self._bytes_per_s)
            return 0
        os.unlink(entry.path)
        self.deleted_files += 1
        if self.deleted_files % PACE_FILES == 0:
            self._closed.wait(PACE_S)
        return 0

    def _unlink(self, path: str) -> int:
        """Gives the bytes that the file took."""
        size_bytes = os.lstat(path).st_blocks * _SECTOR_BYTES
        os.unlink(path)
        self.deleted_files += 1
        self.deleted_bytes += size_bytes
        return size_bytes
