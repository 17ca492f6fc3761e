"""What the writing side of a segment store does to files: the one seam where a test can watch, delay or break it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvmoverd.adapters.storage.block_io import create_file, write_from
from kvmoverd.adapters.storage.namespaces import sync_directory


class WriteIo:
    """Files of one's own, pre-sized and never grown. Every call may raise `OSError`. `direct`: past the page cache."""

    def __init__(self, *, direct: bool) -> None:
        self._flags = os.O_DIRECT if direct else 0

    def create(self, path: Path, size_bytes: int) -> int:
        """A new file of this size, full of zeros; the caller closes it. Raises `FileExistsError` when it is there."""
        fd = create_file(path, self._flags)
        try:
            os.ftruncate(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, content: memoryview, offset_bytes: int) -> None:
        """All of it; memory, length and offset are whole pages."""
        write_from(fd, content, offset_bytes)

    def sync(self, fd: int) -> None:
        """Makes durable what was written before; not the file's length."""
        os.fdatasync(fd)

    def sync_whole(self, fd: int) -> None:
        """Makes a new file durable, its length too."""
        os.fsync(fd)

    def sync_names(self, directory: Path) -> None:
        """Makes new names in a directory durable, where the filesystem can."""
        sync_directory(directory)

    def close(self, fd: int) -> None:
        os.close(fd)


def page_memory(size_bytes: int) -> memoryview:
    """Zeroed memory that begins at a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, size_bytes))
