"""One io_uring, by the `liburing` package: the only module that imports it, and none of its types leave here.

What the package does that one would not expect: `res` of a completion raises for an error; an `Iovec` holds no reference
to its memory; each call keeps the interpreter lock, also those that wait. So nothing here waits: an eventfd says when
there are completions, and few reads go into one submit. Some builds use instructions that a CPU may lack: nothing here
may be imported before a trial in another process (`uring_probe`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
from collections import deque

import liburing

from kvmoverd.core.record import memory_view

ENTRIES_MAX = 32_768
BUFFER_BYTES_MAX = 1 << 30
"""The kernel's limit for one registered buffer."""
BUFFERS_MAX = 16_384
AGAIN = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
"""The kernel is short of something: reap, and submit again."""
_TRIAL_BYTES = 4096
_TRIAL_WAIT_S = 2.0


class Ring:
    """Reads by number: `read` gives each a new one, `reap` says how it ended. Of one thread; raises `OSError`.

    The ring holds what the kernel needs of a read until its completion was reaped; the memory that is read into is the
    caller's and must stay mapped until then.
    """

    def __init__(self, entries: int) -> None:
        assert 1 <= entries <= ENTRIES_MAX, f"{entries} entries, a ring can have {ENTRIES_MAX}"
        self._ring = liburing.Ring()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            liburing.io_uring_queue_init(entries, self._ring, 0)
        except OSError:
            os.close(self._wake_fd)
            raise
        try:
            liburing.io_uring_register_eventfd(self._ring, self._wake_fd)
        except OSError:
            liburing.io_uring_queue_exit(self._ring)
            os.close(self._wake_fd)
            raise
        self._sqe, self._cqe = liburing.Sqe(), liburing.Cqe()
        self._last_id = 0
        self._held: dict[int, tuple[memoryview, liburing.Iovec]] = {}
        self._unsubmitted: deque[int] = deque()
        self._base, self._chunk_bytes, self._registered_bytes = 0, 1, 0
        self.strays = 0
        """Completions of no read under way, or of one that had ended: dropped."""
        self.by_workers = False
        """Reads are done by threads of the kernel, not begun within the submit: slower, but then a submit only queues."""

    def fileno(self) -> int:
        """An eventfd: readable when there may be completions, and whenever others wrote to it."""
        return self._wake_fd

    def register(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        """Lets the kernel keep this memory pinned, in chunks: reads that lie in one are spared the pinning.

        Raises `OSError`; the ring then works as before.
        """
        chunk_bytes = min(BUFFER_BYTES_MAX // chunk_bytes * chunk_bytes or BUFFER_BYTES_MAX, size_bytes)
        starts = range(0, size_bytes, chunk_bytes)
        if len(starts) > BUFFERS_MAX:
            raise OSError(errno.E2BIG, f"{len(starts)} buffers, the kernel takes {BUFFERS_MAX}")
        views = [memory_view(address + start, min(chunk_bytes, size_bytes - start)) for start in starts]
        liburing.io_uring_register_buffers(self._ring, liburing.Iovec(views))
        self._base, self._chunk_bytes, self._registered_bytes = address, chunk_bytes, size_bytes

    def unregister(self) -> None:
        """Goes back to plain reads. Raises `OSError`."""
        self._registered_bytes = 0
        liburing.io_uring_unregister_buffers(self._ring)

    def read(self, fd: int, address: int, size_bytes: int, offset_bytes: int) -> int:
        """Puts a read into the queue, for the next `submit`; gives its number. Raises `BlockingIOError` when it is full."""
        view = memory_view(address, size_bytes)
        iovec = liburing.Iovec([view])
        buffer = self._buffer_of(address, size_bytes)
        # Prepared aside and copied in whole: an entry of the queue that was taken and left would be submitted as it is.
        if buffer < 0:
            liburing.io_uring_prep_readv(self._sqe, fd, iovec, offset_bytes)
        else:
            liburing.io_uring_prep_readv_fixed(self._sqe, fd, iovec, buffer, offset_bytes)
        liburing.io_uring_sqe_set_flags(self._sqe, liburing.IOSQE_ASYNC if self.by_workers else 0)
        liburing.io_uring_sqe_set_data64(self._sqe, self._last_id + 1)
        if not liburing.put_sqe(self._ring, self._sqe):
            raise BlockingIOError(errno.EAGAIN, f"{len(self._unsubmitted)} reads wait in the queue, it is full")
        self._last_id += 1
        self._held[self._last_id] = (view, iovec)
        self._unsubmitted.append(self._last_id)
        return self._last_id

    def submit(self) -> bool:
        """Hands what waits in the queue to the kernel; False when some of it still waits. Raises `OSError`."""
        try:
            self._enter()
        except OSError as error:
            if error.errno not in AGAIN:
                raise
        finally:
            # The kernel says how far it came, also when it says that something went wrong.
            waiting = liburing.io_uring_sq_ready(self._ring)
            while len(self._unsubmitted) > waiting:
                self._unsubmitted.popleft()
        return not self._unsubmitted

    def reap(self) -> list[tuple[int, int]]:
        """(number, bytes or negative errno) of reads that have ended. Raises `OSError` when completions were lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        ended: list[tuple[int, int]] = []
        for number, result in self._take_entries():
            if self._held.pop(number, None) is None:
                self.strays += 1
            else:
                ended.append((number, result))
        return ended

    def overflowed(self) -> bool:
        """More completions came than the ring had room for: then somebody's count is wrong."""
        return bool(liburing.io_uring_cq_has_overflow(self._ring))

    def take_unsubmitted(self) -> list[int]:
        """Numbers of reads that the kernel has not seen. Only for a ring into which nothing is submitted any more."""
        taken = list(self._unsubmitted)
        self._unsubmitted.clear()
        for number in taken:
            del self._held[number]
        return taken

    @property
    def idle(self) -> bool:
        """No read is under way or waits."""
        return not self._held

    def close(self) -> None:
        """Only when it is idle: the kernel would go on writing."""
        assert self.idle, f"{len(self._held)} reads are under way"
        liburing.io_uring_queue_exit(self._ring)
        os.close(self._wake_fd)

    def _enter(self) -> None:
        liburing.io_uring_submit(self._ring)

    def _take_entries(self) -> list[tuple[int, int]]:
        """(user data, result) of all completions that are there."""
        if self.overflowed():
            with contextlib.suppress(OSError):
                liburing.io_uring_get_events(self._ring)
        taken: list[tuple[int, int]] = []
        for _ in range(liburing.io_uring_cq_ready(self._ring)):
            liburing.io_uring_peek_cqe(self._ring, self._cqe)
            entry = self._cqe[0]
            number = entry.user_data
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            liburing.io_uring_cqe_seen(self._ring, entry)
            taken.append((number, result))
        return taken

    def _buffer_of(self, address: int, size_bytes: int) -> int:
        """Index of the registered buffer that holds all of this memory; -1 for none."""
        start = address - self._base
        if not 0 <= start <= self._registered_bytes - size_bytes:
            return -1
        first, last = start // self._chunk_bytes, (start + size_bytes - 1) // self._chunk_bytes
        return first if first == last else -1


def read_and_wait(ring: Ring, fd: int, address: int, size_bytes: int) -> int:
    """One read from the start of a file, for trials: bytes read. Raises `OSError`, `TimeoutError` after 2 s."""
    ring.read(fd, address, size_bytes, 0)
    ring.submit()
    if not select.select([ring.fileno()], [], [], _TRIAL_WAIT_S)[0]:
        raise TimeoutError(errno.ETIMEDOUT, f"a read of {size_bytes} bytes was not done within {_TRIAL_WAIT_S} s")
    ended = ring.reap()
    result = ended[0][1] if ended else 0
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def try_ring() -> None:
    """All that a storage does with a ring, once, on a file in memory. Raises whatever goes wrong; may even be killed."""
    content = os.urandom(_TRIAL_BYTES)
    target = ctypes.create_string_buffer(_TRIAL_BYTES)
    fd = os.memfd_create("kvmover-trial", os.MFD_CLOEXEC)
    os.write(fd, content)
    ring = Ring(8)
    got = read_and_wait(ring, fd, ctypes.addressof(target), _TRIAL_BYTES)
    if got != _TRIAL_BYTES or target.raw != content:
        raise OSError(errno.EIO, f"{got} of {_TRIAL_BYTES} bytes came, or others than written")
    ring.close()
