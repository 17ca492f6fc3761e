"""Directories to delete: one rename hides them, a thread of its own frees their bytes bit by bit."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path

PACE_FILES = 256
PACE_S = 0.01
_IDLE_S = 3600.0


class Trash:
    """Empties its directory at start, after each `throw` and once an hour, whoever filled it.

    A thread that deletes touches no memory of others: it is not waited for at the end.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._deleted_files = 0
        self._wanted.set()
        threading.Thread(target=self._run, name="kvmover-trash", daemon=True).start()

    def throw(self, path: Path) -> None:
        """Hides a directory at once, if it is there. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self._directory / secrets.token_hex(16))
        self._wanted.set()

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wanted.clear()
            # Another node may empty the same trash, and a root may go away: the next sweep tries again.
            with contextlib.suppress(OSError):
                self._delete_below(self._directory)
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
        os.unlink(entry.path)
        self._deleted_files += 1
        if self._deleted_files % PACE_FILES == 0:
            self._closed.wait(PACE_S)
