"""Engines' regions: sealed memory files, mapped into this process."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

from kvmoverd.adapters.memory import libc
from kvmoverd.core.errors import BadRegion

_HUGE_PAGE_BYTES = 2 << 20
_HOW_TO_SEAL = "create it with MFD_ALLOW_SEALING and, after ftruncate, call fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)"


class RegionMemory:
    """A mapped region, implements `Memory`. The mapping keeps the file alive: no descriptor is kept."""

    def __init__(self, address: int, size_bytes: int, page_kind: str) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self._page_kind = page_kind
        self._mapped = True

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def page_kind(self) -> str:
        return self._page_kind

    def close(self) -> None:
        """Unmaps; a second call does nothing."""
        if self._mapped:
            self._mapped = False
            libc.unmap_memory(self._address, self._size_bytes)


def map_region(fd: int) -> RegionMemory:
    """Maps the whole file behind `fd`, readable and writable; the caller keeps `fd`. Raises `BadRegion`.

    A file that its owner could truncate would end this process by SIGBUS: without F_SEAL_SHRINK it is refused.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise BadRegion(f"the descriptor is no memory file (mode {status.st_mode:o}); pass one of memfd_create")
    if status.st_size < 1:
        raise BadRegion("the memory file has 0 bytes; call ftruncate before it is sealed and passed")
    _check_seals(fd)
    try:
        address = libc.map_memory(status.st_size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
    except OSError as error:
        text = f"{status.st_size} bytes of the memory file can't be mapped: {error}"
        raise BadRegion(text, size_bytes=status.st_size) from error
    try:
        for advice in (libc.MADV_DONTDUMP, libc.MADV_DONTFORK):
            libc.advise(address, status.st_size, advice)
    except OSError as error:
        libc.unmap_memory(address, status.st_size)
        text = f"{status.st_size} mapped bytes can't be kept out of core dumps and of child processes: {error}"
        raise BadRegion(text, size_bytes=status.st_size) from error
    huge = status.st_blksize == _HUGE_PAGE_BYTES
    return RegionMemory(address, status.st_size, "2 MiB (hugetlb)" if huge else "4 KiB")


def _check_seals(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadRegion(f"the file knows no seals ({error}); pass a memfd: {_HOW_TO_SEAL}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadRegion(f"the memfd has seals {seals:#x}, F_SEAL_SHRINK is missing; {_HOW_TO_SEAL}", seals=seals)
    if seals & fcntl.F_SEAL_WRITE:
        raise BadRegion(f"the memfd has seals {seals:#x}: F_SEAL_WRITE lets nobody write it; leave it out", seals=seals)
