"""A fixed set of threads that do ops on `Blocks`, one at a time each, start to end."""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from functools import partial

from kvmoverd.adapters.storage.block_io import DISK_FULL, errno_name
from kvmoverd.adapters.storage.blocks import LOOKS, Blocks
from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, StorageDone, StorageOp


class Workers:
    """`put` is for any thread. Every op gets its completion, whatever happens to it.

    The threads are daemon threads: one that is stuck in the kernel delays no exit.
    """

    def __init__(self, blocks: Blocks, completions: Completions, *, name: str, threads: int) -> None:
        self._blocks = blocks
        self._completions = completions
        self._ops: queue.SimpleQueue[tuple[StorageOp, int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvmover-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, op: StorageOp, looks: int = LOOKS) -> None:
        """`looks`: as in `Blocks.read`."""
        self._ops.put((op, looks))

    def end(self) -> None:
        """Ends ops that wait with SHUTTING_DOWN, and each thread after the op it is at. Nothing may be put after it."""
        for op in self._take_waiting():
            self._completions.put(op, shutting_down(op))
        for _ in self._threads:
            self._ops.put(None)

    def join(self, deadline_s: float) -> bool:
        """Waits for the threads until a time of `time.monotonic`; True when all have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take_waiting(self) -> list[StorageOp]:
        """All waiting ops: a thread that hangs must not keep them from their completions."""
        taken: list[StorageOp] = []
        with contextlib.suppress(queue.Empty):
            while (waiting := self._ops.get_nowait()) is not None:
                taken.append(waiting[0])
        return taken

    def _work(self) -> None:
        while (waiting := self._ops.get()) is not None:
            op, looks = waiting
            try:
                self._do(op, looks)
            except Exception as error:  # noqa: BLE001 - an op without a completion would hold its slot for ever
                self._completions.put(op, failed(op, error))

    def _do(self, op: StorageOp, looks: int) -> None:
        if isinstance(op, BlockWrite):
            self._blocks.write(op, partial(self._completions.put, op))
        elif isinstance(op, BlockRead):
            self._completions.put(op, self._blocks.read(op, looks=looks))
        else:
            self._completions.put(op, self._blocks.probe(op))


def failed(op: StorageOp, error: Exception) -> StorageDone:
    """The completion of an op that ended by an exception."""
    if isinstance(error, OSError):
        return StorageDone(op.op_id, _reason(op, error), message=f"{errno_name(error)}: {error}")
    return StorageDone(op.op_id, Reason.INTERNAL, message=f"{type(error).__name__}: {error}")


def shutting_down(op: StorageOp) -> StorageDone:
    """The completion of an op that was not begun before the storage was closed."""
    return StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is being closed")


def _reason(op: StorageOp, error: OSError) -> Reason:
    """A stale handle is how NFS says that another client deleted the file."""
    if isinstance(op, BlockRead) and error.errno in (errno.ENOENT, errno.ESTALE):
        return Reason.MISS
    return Reason.NO_SPACE if error.errno in DISK_FULL else Reason.IO_ERROR
