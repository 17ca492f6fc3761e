"""All that a root has open with the daemon of its 3FS mount: the shared pool, and rings of two priorities."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.scratch import PART_BYTES
from kvmoverd.adapters.storage.block_io import DISK_FULL, BlockIo
from kvmoverd.adapters.storage.usrbio_iov import SharedPool
from kvmoverd.adapters.storage.usrbio_library import PRIORITY_LOW, PRIORITY_NORMAL, Library
from kvmoverd.adapters.storage.usrbio_ring import UsrbioRing
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.record import memory_view

URGENT_RINGS = 4
"""The daemon does what it finds in a ring as one batch, whose reads end together: more rings, smaller batches. Each has two
threads here, which wait."""
TRIAL_WAIT_S = 10.0


class UsrbioRings:
    """Made and closed in one thread per mount. `depth`: reads at a time in each ring. Raises `OSError`; nothing is left then."""

    def __init__(
        self, library: Library, arena: Arena, root: Path, piece_bytes: int, *, depth: int, urgent: int = URGENT_RINGS
    ) -> None:
        self.library = library
        self.depth = depth
        self.urgent: list[UsrbioRing] = []
        mount = library.mount_point(str(root))
        with contextlib.ExitStack() as opened:
            # The rings first: with the first one the library opens the directory by which the daemon sees us live.
            for _ in range(urgent):
                ring = UsrbioRing(library, mount, reads_max=depth, priority=PRIORITY_NORMAL)
                opened.callback(ring.close)
                self.urgent.append(ring)
            self.low = UsrbioRing(library, mount, reads_max=depth, priority=PRIORITY_LOW)
            opened.callback(self.low.close)
            self._pool = SharedPool(library, arena, mount, piece_bytes)
            opened.pop_all()
        for ring in self.all:
            ring.read_into(self._pool.iov)

    @property
    def all(self) -> list[UsrbioRing]:
        return [*self.urgent, self.low]

    def close(self) -> None:
        """Only when nothing is under way in any of them."""
        for ring in self.all:
            ring.close()
        self._pool.close()


def try_rings(rings: UsrbioRings, arena: Arena, io: BlockIo, path: str) -> str:
    """Reads a file of this root at `path`, made for it, through each ring; says what a person should know.

    Into the arena's scratch, which is shared like the pool: others may work with that already. Raises `OSError` when it does
    not work, `StorageUnusable` when a read does not come back at all: its memory is kept then, and the rings can't be closed.
    """
    address, under_way = arena.scratch.take(), set[UsrbioRing]()
    try:
        _try_each(rings, address, io, path, under_way)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return "at the start the disk was full: reads through rings were not tried"
    finally:
        # What is under way is still written there.
        if not under_way:
            arena.scratch.give_back(address)
    return ""


def _try_each(rings: UsrbioRings, address: int, io: BlockIo, path: str, under_way: set[UsrbioRing]) -> None:
    """`under_way`: rings whose read has not come back, at any time."""
    target, content = memory_view(address, PART_BYTES), os.urandom(PART_BYTES)
    try:
        target[:] = content
        io.write_new(path, target)
        fd, _ = io.open_read(path)
        try:
            for ring in rings.all:
                target[:] = bytes(PART_BYTES)
                _read_and_wait(rings.library, ring, fd, address, under_way)
                if target != content:
                    raise OSError(errno.EIO, "other bytes came than were written")
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _read_and_wait(library: Library, ring: UsrbioRing, fd: int, address: int, under_way: set[UsrbioRing]) -> None:
    library.register(fd)
    try:
        ring.read(1, fd, address, PART_BYTES, 0)
        under_way.add(ring)
        ring.submit()
        deadline_s = time.monotonic() + TRIAL_WAIT_S
        while not (ended := ring.reap(TRIAL_WAIT_S)):
            if time.monotonic() >= deadline_s:
                raise StorageUnusable(f"a read of {PART_BYTES} bytes through a ring hangs for {TRIAL_WAIT_S:g} s")
        under_way.discard(ring)
    finally:
        library.deregister(fd)
    result = ended[0][1]
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    if result != PART_BYTES:
        raise OSError(errno.EIO, f"{result} of {PART_BYTES} bytes came")
