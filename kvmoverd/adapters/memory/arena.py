"""The pool's arena: one mapping in the largest pages that can be had, never swapped in by surprise."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from pathlib import Path

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.scratch import Scratch
from kvmoverd.core.errors import ConfigError

HUGE_PAGE_BYTES = 2 << 20
SCRATCH_BYTES = HUGE_PAGE_BYTES
TOUCH_STEP_BYTES = 64 << 20
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOSTLY = 0.95
"""So much of a mapping in 2 MiB pages counts as all of it."""
_SHARED_MODE = 0o600
SHARED_AT = "/dev/shm"
"""Where memory lies that another process of this machine may be given: the daemons of filesystems map nothing else."""


class Arena:
    """Memory of this process, implements `Memory`. Mapped when made, but backed by pages only after `touch`.

    Raises `ConfigError` that names `pool.bytes` when the memory can't be had. It is not dumped and not inherited, and
    every page is populated by a call that reports failure: no access can end the process by SIGBUS.

    Private and anonymous, or with `shared` a file without a name: then whoever is given `shared_fd`, or a name that was
    linked to it for a moment, maps the same pages. They are freed with their last mapping, however this process ends.

    One page more than the pool is mapped: `scratch`, where trials may write at any time. In the pool only slots are written.
    """

    def __init__(self, size_bytes: int, piece_bytes: int, *, shared: bool = False) -> None:
        if size_bytes < max(piece_bytes, 1):
            raise ConfigError(f"pool.bytes is {size_bytes}, must hold at least one piece of {piece_bytes} bytes")
        self._size_bytes = size_bytes
        pool_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._mapped_bytes = pool_bytes + SCRATCH_BYTES
        self._mapped = True
        self.shared_fd = -1
        """Of the file that the memory is, open until `close`; -1 when it is private."""
        if shared:
            self.shared_fd, self._address = _map_shared(self._mapped_bytes)
            self._page_kind = "4 KiB"
        else:
            self._map_private()
        self.scratch = Scratch(self._address + pool_bytes, SCRATCH_BYTES)
        for advice in (libc.MADV_DONTDUMP, libc.MADV_DONTFORK):
            libc.advise(self._address, self._mapped_bytes, advice)

    def _map_private(self) -> None:
        try:
            self._address = libc.map_memory(self._mapped_bytes, _PROTECTION, _FLAGS | libc.MAP_HUGETLB)
            self._page_kind = "2 MiB (hugetlb)"
        except OSError:
            self._address = _map_aligned(self._mapped_bytes)
            self._page_kind = "4 KiB"

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        """Of the pool alone."""
        return self._size_bytes

    @property
    def mapped_bytes(self) -> int:
        """From `address` on, the pool and behind it `scratch`: what devices are told of."""
        return self._mapped_bytes

    @property
    def page_kind(self) -> str:
        """Known for sure after `touch`."""
        return self._page_kind

    def touch(self) -> None:
        """Takes every page now, so that no fault delays a transfer. Blocks some 0.3 s a GiB; run it off the loop."""
        if self._page_kind != "2 MiB (hugetlb)":
            _check_available(self._mapped_bytes)
        for start in range(0, self._mapped_bytes, TOUCH_STEP_BYTES):
            _populate(self._address + start, min(TOUCH_STEP_BYTES, self._mapped_bytes - start))
        if self._page_kind != "2 MiB (hugetlb)":
            self._page_kind = _transparent_kind(self._address, self._mapped_bytes)

    def close(self) -> None:
        """Unmaps; a second call does nothing."""
        if self._mapped:
            self._mapped = False
            libc.unmap_memory(self._address, self._mapped_bytes)
            if self.shared_fd >= 0:
                os.close(self.shared_fd)
                self.shared_fd = -1


def _pool_bytes(mapped_bytes: int) -> int:
    """What the config asks for, where all of it is mapped."""
    return mapped_bytes - SCRATCH_BYTES


def _map_shared(size_bytes: int) -> tuple[int, int]:
    """(descriptor of a file in memory without a name, address of its mapping), with huge pages where tmpfs has them."""
    room = shutil.disk_usage(SHARED_AT).free
    if size_bytes > room:
        raise ConfigError(
            f"pool.bytes is {_pool_bytes(size_bytes)}, {SHARED_AT} has room for {room}, {size_bytes} are needed; "
            "lower it, or remount with size="
        )
    fd = -1
    try:
        fd = os.open(SHARED_AT, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _SHARED_MODE)
        os.ftruncate(fd, size_bytes)
        address = libc.map_memory(size_bytes, _PROTECTION, mmap.MAP_SHARED, fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ConfigError(
            f"pool.bytes is {_pool_bytes(size_bytes)}, it can't be shared in {SHARED_AT}: {error}"
        ) from error
    with contextlib.suppress(OSError):
        libc.advise(address, size_bytes, libc.MADV_HUGEPAGE)
    return fd, address


def _map_aligned(size_bytes: int) -> int:
    """A mapping that begins at a 2 MiB boundary, and asks for transparent huge pages."""
    try:
        found = libc.map_memory(size_bytes + HUGE_PAGE_BYTES, _PROTECTION, _FLAGS)
    except OSError as error:
        asked_bytes = _pool_bytes(size_bytes)
        raise ConfigError(f"pool.bytes is {asked_bytes}, the system does not map it: {error}; lower it") from error
    address = -(-found // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if address > found:
        libc.unmap_memory(found, address - found)
    tail_bytes = found + HUGE_PAGE_BYTES - address
    if tail_bytes:
        libc.unmap_memory(address + size_bytes, tail_bytes)
    with contextlib.suppress(OSError):
        libc.advise(address, size_bytes, libc.MADV_HUGEPAGE)
    return address


def _populate(address: int, size_bytes: int) -> None:
    """Raises `ConfigError`. Kernels before 5.14 do not know the advice: there the bytes are written."""
    try:
        libc.advise(address, size_bytes, libc.MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise ConfigError(f"pool.bytes can't be backed by memory: {error}; lower it") from error
        libc.fill_zero(address, size_bytes)


def _check_available(size_bytes: int) -> None:
    """Linux promises more memory than there is and then kills a process: refuse before that. Raises `ConfigError`."""
    available = available_bytes()
    if available is not None and size_bytes > available:
        raise ConfigError(
            f"pool.bytes is {_pool_bytes(size_bytes)}, only {available} bytes of memory are available, {size_bytes} are "
            "needed; lower it",
            asked_bytes=size_bytes,
            available_bytes=available,
        )


def available_bytes() -> int | None:
    """Memory that can be had without swapping, by the machine and by this process's cgroups; None when nobody says."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                found += _cgroup_bytes(Path("/sys/fs/cgroup" + line.removeprefix("0::")))
    return min(found, default=None)


def _cgroup_bytes(group: Path) -> list[int]:
    found = []
    for directory in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            limit = int((directory / "memory.max").read_text())
            found.append(limit - int((directory / "memory.current").read_text()))
    return found


def _transparent_kind(address: int, size_bytes: int) -> str:
    huge = _huge_bytes(address, address + size_bytes) / size_bytes
    if huge >= _MOSTLY:
        return "2 MiB (transparent)"
    return f"4 KiB ({huge:.0%} transparent 2 MiB)" if huge > 0 else "4 KiB"


def _huge_bytes(start: int, stop: int) -> int:
    """Sum of huge pages over the mappings in [start, stop), private and shared."""
    found, inside = 0, False
    with contextlib.suppress(OSError), open("/proc/self/smaps") as lines:
        for line in lines:
            name = line.split(maxsplit=1)[0]
            if not name.endswith(":"):
                low, high = (int(part, 16) for part in name.split("-"))
                inside = low < stop and high > start
            elif inside and name in ("AnonHugePages:", "ShmemPmdMapped:"):
                found += int(line.split()[1]) << 10
    return found
