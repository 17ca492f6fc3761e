"""Completions on their way to the loop: a queue, an eventfd that wakes once for many, and the counters."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence

from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, StorageCounters, StorageDone, StorageOp

_NOT_STORED = frozenset({Reason.CORRUPT, Reason.SHORT_READ})
_FAILED = frozenset({Reason.IO_ERROR, Reason.NO_SPACE, Reason.INTERNAL})


class Completions:
    """`put` may be called from any thread; all else, and the counters, belong to the loop's thread."""

    def __init__(self) -> None:
        self.counters = StorageCounters()
        self._under_way = 0
        self._ended: deque[tuple[StorageOp, StorageDone]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False

    def expect(self, ops: Sequence[StorageOp], ops_max: int) -> None:
        """Books ops that were handed in. The caller keeps to `ops_max`: more is its fault, not the device's."""
        self._under_way += len(ops)
        assert self._under_way <= ops_max, f"{self._under_way} storage ops are under way, at most {ops_max} may be"
        self.counters.queued_bytes += sum(map(_op_bytes, ops))

    def put(self, op: StorageOp, done: StorageDone) -> None:
        self._ended.append((op, done))
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def poll(self, completions_max: int) -> list[StorageDone]:
        """Drains the eventfd before it clears the flag: in the other order a `put` in between would wake nobody."""
        if self._wake_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        self._woken = self._wake_fd < 0
        taken: list[StorageDone] = []
        while self._ended and len(taken) < completions_max:
            op, done = self._ended.popleft()
            self._count(op, done)
            taken.append(done)
        if self._ended and not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)
        return taken

    def fileno(self) -> int:
        return self._wake_fd

    def close(self) -> None:
        """Closes the eventfd; only when nobody puts any more. What has ended can still be polled."""
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd, self._woken = -1, True

    def _count(self, op: StorageOp, done: StorageDone) -> None:
        counters = self.counters
        self._under_way -= 1
        counters.queued_bytes -= _op_bytes(op)
        counters.corrupt_blocks += done.reason in _NOT_STORED
        counters.short_reads += done.reason is Reason.SHORT_READ
        counters.failed_ops += done.reason in _FAILED
        if isinstance(op, BlockRead):
            counters.read_bytes += done.moved_bytes
            counters.read_blocks += done.reason is Reason.OK and op.layers.stop == op.namespace.layout.layer_count
            counters.missed_blocks += done.reason is Reason.MISS
        elif isinstance(op, BlockWrite):
            counters.written_bytes += done.moved_bytes
            counters.written_blocks += done.reason is Reason.OK and done.moved_bytes > 0


def _op_bytes(op: StorageOp) -> int:
    if isinstance(op, BlockRead):
        return len(op.span)
    return op.namespace.layout.record_bytes if isinstance(op, BlockWrite) else 0
