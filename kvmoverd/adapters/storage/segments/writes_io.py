"""What the writing side of a segment store does to files: the one seam where a test can watch, delay or break it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from kvmoverd.adapters.storage.block_io import create_file, write_from
from kvmoverd.adapters.storage.namespaces import sync_directory

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM})
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class WriteIo:
    """Files of one's own, pre-sized and never grown. Every call may raise `OSError`. `direct`: past the page cache."""

    def __init__(self, *, direct: bool) -> None:
        self._flags = os.O_DIRECT if direct else 0
        self._can_reserve = True

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

    def reserve(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        """Takes room on the disk for bytes of the file, so that writing there is only writing; nothing where that can't be.

        Not by posix_fallocate: where the filesystem can't do it, that writes a byte into every page.
        """
        self._allocate(fd, 0, offset_bytes, size_bytes)

    def give_back(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        """Frees what was reserved, and reads as zeros again."""
        self._allocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset_bytes, size_bytes)

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

    def _allocate(self, fd: int, mode: int, offset_bytes: int, size_bytes: int) -> None:
        if self._can_reserve and size_bytes > 0 and _libc.fallocate(fd, mode, offset_bytes, size_bytes):
            code = ctypes.get_errno()
            if code not in _CANNOT:
                raise OSError(code, os.strerror(code))
            self._can_reserve = False


def page_memory(size_bytes: int) -> memoryview:
    """Zeroed memory that begins at a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, size_bytes))
