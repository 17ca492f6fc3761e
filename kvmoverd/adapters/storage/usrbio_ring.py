"""One ring of 3FS: reads by number into memory that is shared with the filesystem's daemon."""

from __future__ import annotations

from kvmoverd.adapters.storage.usrbio_library import CqeStruct, IovStruct, Library

REAPED_MAX = 64
"""Ends taken at a time."""
SPARE_FACTOR = 2
"""The library gives an entry free before it has read it to the end: with as many spare ones nobody takes it meanwhile."""


class UsrbioRing:
    """`read` and `submit` are for one thread, `reap` is for one, perhaps another. Raises `OSError`, from all of them.

    The memory that is read into is the caller's, and stays mapped until each read was reaped. A read may begin, and end,
    before it is submitted.
    """

    def __init__(self, library: Library, mount: str, *, reads_max: int, priority: int) -> None:
        self._library = library
        self._iov = IovStruct()
        self._ended = (CqeStruct * REAPED_MAX)()
        self._ring = library.create_ring(mount, reads_max * SPARE_FACTOR, priority)
        self.entries = library.entries(self._ring)

    def read_into(self, iov: IovStruct) -> None:
        """The memory that all its reads lie in; before the first."""
        self._iov = iov

    def read(self, number: int, fd: int, address: int, size_bytes: int, offset_bytes: int) -> None:
        """Puts a read of a registered file into the ring. `BlockingIOError`: it is full."""
        self._library.prepare(self._ring, self._iov, fd, address, size_bytes, offset_bytes, number)

    def submit(self) -> None:
        """Wakes the daemon, which may have seen the reads before, or else never does."""
        self._library.submit(self._ring)

    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """(number, bytes or negative errno) of reads that have ended; waits for the first. Empty when none has."""
        found = self._library.wait(self._ring, self._ended, timeout_s)
        return [(entry.userdata, entry.result) for entry in self._ended[:found]]

    def close(self) -> None:
        """Only when all reads were reaped."""
        self._library.destroy_ring(self._ring)
