"""Pages of files that others write: read past every cache of this node, and never a word about a file's size or times."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.block_io import NOT_DIRECT, open_regular, read_into
from kvmoverd.core.store.places import PAGE_BYTES

PAGES_AT_ONCE = 256
Pages = npt.NDArray[np.uint8]
"""n x `PAGE_BYTES` bytes."""


class PageFiles:
    """For one thread at a time: what `read` gives is overwritten by the next.

    Reads are direct; where that is refused they are buffered, after what the kernel has cached was dropped, and stay so.
    """

    def __init__(self, *, direct: bool = True, pages_max: int = PAGES_AT_ONCE) -> None:
        self.direct = direct
        self.failed_pages = 0
        self._map = mmap.mmap(-1, pages_max * PAGE_BYTES)
        self._view = memoryview(self._map)
        self._pages: Pages = np.frombuffer(self._map, np.uint8).reshape(pages_max, PAGE_BYTES)

    def open(self, path: Path) -> int:
        """A descriptor for `read`, which the caller closes. Raises `OSError`."""
        if self.direct:
            try:
                return open_regular(str(path), os.O_DIRECT)[0]
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                fd = open_regular(str(path))[0]
                self.direct = False
                return fd
        return open_regular(str(path))[0]

    def read(self, fd: int, first_page: int, pages: int) -> Pages:
        """Up to `pages` whole pages from `first_page` on, fewer only where the file ends. Raises `OSError`.

        Pages that the device can't read, between others that it can, are given as bytes of 255 and counted.
        """
        pages = min(pages, len(self._pages))
        try:
            got = self._read(fd, first_page, self._view[: pages * PAGE_BYTES])
        except OSError as error:
            if error.errno != errno.EIO or pages == 1:
                raise
            got = self._read_singly(fd, first_page, pages, error)
        return self._pages[: got // PAGE_BYTES]

    def read_page(self, path: Path) -> bytes:
        """The first page of a small file; shorter where the file is. Raises `OSError`."""
        fd = self.open(path)
        try:
            return bytes(self._view[: self._read(fd, 0, self._view[:PAGE_BYTES])])
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _read(self, fd: int, first_page: int, target: memoryview) -> int:
        offset_bytes = first_page * PAGE_BYTES
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            try:
                return read_into(fd, target, offset_bytes)
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self.direct = False
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset_bytes, len(target), os.POSIX_FADV_DONTNEED)
        return read_into(fd, target, offset_bytes)

    def _read_singly(self, fd: int, first_page: int, pages: int, first_error: OSError) -> int:
        got, failed = 0, 0
        for number in range(pages):
            target = self._view[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            try:
                read_bytes = self._read(fd, first_page + number, target)
            except OSError:
                target[:] = b"\xff" * PAGE_BYTES
                read_bytes, failed = PAGE_BYTES, failed + 1
            got += read_bytes
            if read_bytes < PAGE_BYTES:
                break
        if failed == pages:
            raise first_error
        self.failed_pages += failed
        return got
