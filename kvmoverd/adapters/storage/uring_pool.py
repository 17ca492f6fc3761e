"""The pool, registered with a ring: the kernel pins it once, and not at each read. Kept only where a real trial works."""

from __future__ import annotations

import contextlib
import errno
import os

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.scratch import PART_BYTES
from kvmoverd.adapters.storage.block_io import DISK_FULL, BlockIo, errno_name
from kvmoverd.adapters.storage.uring_ring import Ring, read_and_wait
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.record import memory_view

_REMEDIES = {errno.ENOMEM: "; raise the limit of locked memory: ulimit -l, or LimitMEMLOCK of systemd"}


def register_pool(ring: Ring, arena: Arena, piece_bytes: int, io: BlockIo, trial_path: str) -> str:
    """Registers, and reads a file of this root at `trial_path`, made for it; says what came of it.

    Into the arena's scratch, which is registered like the pool: others may work with that already, or open theirs.
    Raises `StorageUnusable` when a read does not come back at all.
    """
    try:
        ring.register(arena.address, arena.mapped_bytes, piece_bytes)
    except OSError as error:
        return (
            f"plain reads: registering the pool was refused ({errno_name(error)}{_REMEDIES.get(error.errno or 0, '')})"
        )
    address = arena.scratch.take()
    try:
        _try_read(ring, address, io, trial_path)
    except TimeoutError as error:
        raise StorageUnusable(f"a read into the pool's memory hangs: {error}") from error
    except OSError as error:
        ring.unregister()
        if error.errno in DISK_FULL:
            return "at the start the disk was full: plain reads until a restart"
        return f"plain reads: one into registered memory was tried and failed ({errno_name(error)})"
    finally:
        # What is under way is still written there.
        if ring.idle:
            arena.scratch.give_back(address)
    return "registered pool"


def _try_read(ring: Ring, address: int, io: BlockIo, path: str) -> None:
    target, content = memory_view(address, PART_BYTES), os.urandom(PART_BYTES)
    try:
        target[:] = content
        io.write_new(path, target)
        target[:] = bytes(PART_BYTES)
        fd, _ = io.open_read(path)
        try:
            got = read_and_wait(ring, fd, address, PART_BYTES)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if got != PART_BYTES or target != content:
        raise OSError(errno.EIO, f"{got} of {PART_BYTES} bytes came, or others than written")
