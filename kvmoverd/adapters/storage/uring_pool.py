"""The pool, registered with a ring: the kernel pins it once, and not at each read. Kept only where a real trial works."""

from __future__ import annotations

import contextlib
import errno
import os

from kvmoverd.adapters.storage.block_io import DISK_FULL, BlockIo, errno_name
from kvmoverd.adapters.storage.uring_ring import Ring, read_and_wait
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import ALIGN_BYTES
from kvmoverd.core.record import memory_view
from kvmoverd.ports.memory import Memory

_TRIAL_BYTES = 2 * ALIGN_BYTES
_REMEDIES = {errno.ENOMEM: "; raise the limit of locked memory: ulimit -l, or LimitMEMLOCK of systemd"}


def register_pool(ring: Ring, memory: Memory, piece_bytes: int, io: BlockIo, trial_path: str) -> str:
    """Registers, and reads a file of this root at `trial_path`, made for it, into the pool; says what came of it.

    The pool's first bytes are overwritten. Raises `StorageUnusable` when a read does not come back at all.
    """
    try:
        ring.register(memory.address, memory.size_bytes, piece_bytes)
    except OSError as error:
        return (
            f"plain reads: registering the pool was refused ({errno_name(error)}{_REMEDIES.get(error.errno or 0, '')})"
        )
    try:
        _try_read(ring, memory, io, trial_path)
    except TimeoutError as error:
        raise StorageUnusable(f"a read into the pool hangs: {error}") from error
    except OSError as error:
        ring.unregister()
        if error.errno in DISK_FULL:
            return "plain reads: the disk is full, reads into registered memory were not tried"
        return f"plain reads: one into registered memory was tried and failed ({errno_name(error)})"
    return "registered pool"


def _try_read(ring: Ring, memory: Memory, io: BlockIo, path: str) -> None:
    target, content = memory_view(memory.address, _TRIAL_BYTES), os.urandom(_TRIAL_BYTES)
    try:
        target[:] = content
        io.write_new(path, target)
        target[:] = bytes(_TRIAL_BYTES)
        fd, _ = io.open_read(path)
        try:
            got = read_and_wait(ring, fd, memory.address, _TRIAL_BYTES)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if got != _TRIAL_BYTES or target != content:
        raise OSError(errno.EIO, f"{got} of {_TRIAL_BYTES} bytes came, or others than written")
