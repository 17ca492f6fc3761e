"""Storage by threads: a fixed set of workers, each doing one block at a time with plain preadv and pwritev."""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvmoverd.adapters.storage.block_files import BlockFiles
from kvmoverd.adapters.storage.block_io import DISK_FULL, BlockIo, choose_io, errno_name
from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.adapters.storage.layout_a import LayoutA
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import (
    BlockRead,
    BlockWrite,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)


class ThreadsStorage:
    """Storage port over a directory; the root's own threads, so that one hung filesystem stops no other.

    Raises `StorageUnusable` for a root that can't be written.
    """

    def __init__(self, root: Path, *, name: str, threads: int, ops_max: int, direct: bool = True) -> None:
        self._layout = LayoutA(root)
        self.io = self._choose_io(root, direct=direct)
        self._facts = StorageFacts(root=name, kind="threads", io_mode=self.io.mode, note=self.io.note)
        self._files = BlockFiles(self._layout, self.io)
        self._completions = Completions()
        self._ops_max = ops_max
        self._ops: queue.SimpleQueue[StorageOp | None] = queue.SimpleQueue()
        self._closing = False
        self._workers = [
            threading.Thread(target=self._work, name=f"kvmover-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def facts(self) -> StorageFacts:
        return self._facts

    @property
    def counters(self) -> StorageCounters:
        return self._completions.counters

    def open_namespace(self, namespace: Namespace) -> None:
        self._layout.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self._layout.purge(namespace)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self._completions.expect(ops, self._ops_max)
        for op in ops:
            if self._closing:
                self._completions.put(op, _shutting_down(op))
            else:
                self._ops.put(op)

    def poll(self, completions_max: int) -> list[StorageDone]:
        return self._completions.poll(completions_max)

    def fileno(self) -> int:
        return self._completions.fileno()

    def close(self, timeout_s: float) -> bool:
        """Ends ops that wait with SHUTTING_DOWN, and waits for those under way, at most `timeout_s` in all.

        False: a worker is stuck in the kernel and its slot must stay mapped; it is a daemon thread and delays no exit.
        """
        self._closing = True
        for op in self._take_waiting():
            self._completions.put(op, _shutting_down(op))
        for _ in self._workers:
            self._ops.put(None)
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
        self._layout.close()
        quiet = not any(worker.is_alive() for worker in self._workers)
        if quiet:
            self._completions.close()
        return quiet

    def _choose_io(self, root: Path, *, direct: bool) -> BlockIo:
        try:
            return choose_io(self._layout.new_temp(), direct=direct)
        except OSError as error:
            self._layout.close()
            raise StorageUnusable(f"{root} can't be written: {errno_name(error)} ({error})", root=root) from error

    def _take_waiting(self) -> list[StorageOp]:
        """All waiting ops: a worker that hangs must not keep them from their completions."""
        taken: list[StorageOp] = []
        with contextlib.suppress(queue.Empty):
            while (op := self._ops.get_nowait()) is not None:
                taken.append(op)
        return taken

    def _work(self) -> None:
        while (op := self._ops.get()) is not None:
            self._completions.put(op, self._done(op))

    def _done(self, op: StorageOp) -> StorageDone:
        try:
            if isinstance(op, BlockRead):
                return self._files.read(op)
            if isinstance(op, BlockWrite):
                return self._files.write(op)
            return self._files.probe(op)
        except OSError as error:
            return StorageDone(op.op_id, _reason(op, error), message=f"{errno_name(error)}: {error}")
        except Exception as error:  # noqa: BLE001 - an op without a completion would hold its slot for ever
            return StorageDone(op.op_id, Reason.INTERNAL, message=f"{type(error).__name__}: {error}")


def _reason(op: StorageOp, error: OSError) -> Reason:
    """A stale handle is how NFS says that another client deleted the file."""
    if isinstance(op, BlockRead) and error.errno in (errno.ENOENT, errno.ESTALE):
        return Reason.MISS
    return Reason.NO_SPACE if error.errno in DISK_FULL else Reason.IO_ERROR


def _shutting_down(op: StorageOp) -> StorageDone:
    return StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is being closed")
