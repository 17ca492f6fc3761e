"""The pool, shared with the daemon of a 3FS mount: published by a link in its virtual directory.

The filesystem's daemon maps the memory while the link is made. It knows the owner by a thread's number, and forgets all that
has this number, rings too, when a directory handle of `3fs-virt/iovs` with the same number is closed; the library keeps one
open until the process ends. So all of one mount is made in one thread, which lives as long as the process, lest another
process get its number; and this process never lists that directory.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from kvmoverd.adapters.memory.arena import SHARED_AT, Arena
from kvmoverd.adapters.storage.owners import start_ticks
from kvmoverd.adapters.storage.usrbio_library import VIRTUAL, IovStruct, Library

BLOCK_BYTES_MAX = 1 << 30
"""The daemon registers memory with its network cards by blocks, which no read may cross."""
PREFIX = "kvmover-pool"


class SharedPool:
    """The arena as one mount knows it. Raises `OSError`; nothing is left then."""

    def __init__(self, library: Library, arena: Arena, mount: str, piece_bytes: int) -> None:
        if arena.shared_fd < 0:
            raise OSError("the pool's memory is private: it was not made to be shared")
        size_bytes = os.fstat(arena.shared_fd).st_size
        block_bytes = min(BLOCK_BYTES_MAX // piece_bytes * piece_bytes or piece_bytes, size_bytes)
        identity = uuid.uuid4()
        self._link = f"{mount}/{VIRTUAL}/{identity}.b{block_bytes}"
        name = f"{SHARED_AT}/{pool_name()}"
        # The name is needed only while the daemon maps it: a process that is killed leaves no memory behind.
        _name_file(arena.shared_fd, name)
        try:
            os.symlink(name, self._link)
        finally:
            os.unlink(name)
        try:
            self.iov: IovStruct = library.wrap(arena.address, size_bytes, block_bytes, identity.bytes, mount)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Only when no ring reads into it any more. A second call does nothing."""
        with contextlib.suppress(OSError):
            os.unlink(self._link)


def pool_name() -> str:
    """`kvmover-pool.<namespace of process ids>.<pid>-<start>.<random>`: it tells whether its owner lives."""
    return f"{PREFIX}.{_pid_space()}.{os.getpid()}-{start_ticks(os.getpid())}.{uuid.uuid4().hex[:8]}"


def is_left_over(name: str) -> bool:
    """Was this the pool of a process that has ended? Not for those of containers that see other process ids."""
    prefix, space, owner = [*name.split("."), "", "", ""][:3]
    if prefix != PREFIX or space != _pid_space():
        return False
    pid, _, start = owner.partition("-")
    return pid.isdigit() and str(start_ticks(int(pid))) != start


def reclaim_pools(mount: str) -> int:
    """Takes away what ended processes have left: links of a mount, and names of memory; gives how many. Raises `OSError`.

    For a process that has nothing of its own there: closing the directory takes away what it has.
    """
    reclaimed = 0
    for directory in (f"{mount}/{VIRTUAL}", SHARED_AT):
        for name in os.listdir(directory):
            path = Path(directory, name)
            with contextlib.suppress(OSError):
                target = os.path.basename(os.readlink(path)) if path.is_symlink() else name
                if is_left_over(target):
                    path.unlink()
                    reclaimed += 1
    return reclaimed


def _name_file(fd: int, name: str) -> None:
    """Only with a directory's descriptor does Python use the call that follows the link in /proc."""
    here = os.open(SHARED_AT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=here)
    finally:
        os.close(here)


def _pid_space() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
