"""Engines' regions: sealed memory files, mapped into this process, and GPU memory that is opened here."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable

import numpy as np

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.cuda import GpuMemory, Gpus
from kvmoverd.adapters.memory.iovec import CopyStep
from kvmoverd.core.errors import BadRegion, NoCuda
from kvmoverd.ports.memory import GpuShare
from kvmoverd.ports.transport import IoVec

_HUGE_PAGE_BYTES = 2 << 20
UNMAP_BYTES = 16 << 20
UNMAP_PIECES_MAX = 4096
_HOW_TO_SEAL = "create it with MFD_ALLOW_SEALING and, after ftruncate, call fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)"


class RegionMemory:
    """A mapped region, implements `EngineMemory`. The mapping keeps the file alive: no descriptor is kept."""

    def __init__(self, address: int, size_bytes: int, page_kind: str, *, may_vanish: bool) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self._page_kind = page_kind
        self._mapped = True
        self._before_close: list[Callable[[], None]] = []
        self.may_vanish = may_vanish

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def page_kind(self) -> str:
        return self._page_kind

    def on_close(self, before_close: Callable[[], None]) -> None:
        """Has `before_close` called while the addresses are still this region's; at once where they are not any more."""
        self._before_close.append(before_close)
        if not self._mapped:
            before_close()

    def close(self) -> None:
        """Unmaps, a large region in the background; a second call does nothing."""
        if self._mapped:
            self._mapped = False
            for before_close in self._before_close:
                before_close()
            _unmap(self._address, self._size_bytes)


class Regions:
    """Maps regions, and knows where memory lies that an engine can take away under a copy.

    F_SEAL_SHRINK does not forbid holes, only F_SEAL_WRITE would. Who touches a hole of an ordinary memory file gets a page
    of zeros; a hole in huge pages (hugetlb) has one only while the system has some left, and is a SIGBUS when it has not.
    """

    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = gpus
        self._lock = threading.Lock()
        self._vanishing: tuple[tuple[int, int], ...] = ()

    def map(self, fd: int) -> RegionMemory:
        """`map_region`, kept in the book until it is closed. Raises `BadRegion`."""
        region = map_region(fd)
        if region.may_vanish:
            held = (region.address, region.address + region.size_bytes)
            with self._lock:
                self._vanishing += (held,)
            region.on_close(lambda: self._drop(held))
        return region

    def open_gpu(self, share: GpuShare) -> GpuMemory:
        """A region in GPU memory, known until it is closed. Blocks. Raises `NoCuda`, `BadRegion`."""
        if self._gpus is None:
            raise NoCuda("this daemon was built without GPUs")
        return self._gpus.open(share)

    def gpu_step(self, destination: IoVec, source: IoVec) -> CopyStep | None:
        """What copies slices of which some are on a GPU; None: none are. From any thread."""
        return self._gpus.step(destination, source) if self._gpus is not None else None

    @property
    def gpu_text(self) -> str:
        """How GPU memory is copied; empty while there is none."""
        return self._gpus.text if self._gpus is not None else ""

    def close(self, timeout_s: float) -> bool:
        """Opens no GPU memory any more; only when no copy runs. False: CUDA may still hold the pool."""
        return self._gpus is None or self._gpus.close(timeout_s)

    def may_vanish(self, iov: IoVec) -> bool:
        """Does any slice begin in such memory? From any thread; costs nothing where no engine has any."""
        starts = iov[:, 0]
        return any(
            bool(((starts >= np.uint64(low)) & (starts < np.uint64(high))).any()) for low, high in self._vanishing
        )

    def _drop(self, held: tuple[int, int]) -> None:
        with self._lock:
            self._vanishing = tuple(known for known in self._vanishing if known != held)


def _unmap(address: int, size_bytes: int) -> None:
    """Giving pages back takes some 80 ms a GB, under a lock that every page fault of this process needs: piece by piece."""
    piece_bytes = max(UNMAP_BYTES, -(-size_bytes // UNMAP_PIECES_MAX // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)

    def work() -> None:
        for start in range(0, size_bytes, piece_bytes):
            libc.unmap_memory(address + start, min(piece_bytes, size_bytes - start))

    if size_bytes <= piece_bytes:
        work()
        return
    try:
        threading.Thread(target=work, name="kvmover-unmap", daemon=True).start()
    except RuntimeError:
        # The system starts no thread: then the loop has to wait.
        work()


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
    huge = libc.filesystem_type(fd) == libc.HUGETLBFS_MAGIC
    return RegionMemory(address, status.st_size, _page_kind(status.st_blksize, huge=huge), may_vanish=huge)


def _page_kind(page_bytes: int, *, huge: bool) -> str:
    """A memory file names its page size as the size of its blocks; more than 4 KiB without hugetlb may be so in part."""
    size = f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"
    return f"{size} (hugetlb)" if huge else f"{size} (transparent)" if page_bytes > mmap.PAGESIZE else size


def _check_seals(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise BadRegion(f"the file knows no seals ({error}); pass a memfd: {_HOW_TO_SEAL}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadRegion(f"the memfd has seals {seals:#x}, F_SEAL_SHRINK is missing; {_HOW_TO_SEAL}", seals=seals)
    if seals & fcntl.F_SEAL_WRITE:
        raise BadRegion(f"the memfd has seals {seals:#x}: F_SEAL_WRITE lets nobody write it; leave it out", seals=seals)
