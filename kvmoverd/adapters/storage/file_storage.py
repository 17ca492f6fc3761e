"""What storages over a directory of block files share: the root, the books, and threads that do ops start to end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvmoverd.adapters.storage.block_files import BlockFiles
from kvmoverd.adapters.storage.block_io import BlockIo, choose_io, errno_name
from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.adapters.storage.layout_a import LayoutA
from kvmoverd.adapters.storage.workers import Workers, shutting_down
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.manifest import Namespace
from kvmoverd.ports.storage import StorageCounters, StorageDone, StorageFacts, StorageOp


class FileStorage:
    """The port, with all ops done by threads where `_begin` knows no other way. The threads are the root's own: one hung
    filesystem stops no other. Raises `StorageUnusable` for a root that can't be written.
    """

    kind: str

    def __init__(
        self, root: Path, *, name: str, threads: int, ops_max: int, direct: bool = True, note: str = ""
    ) -> None:
        self.layout = LayoutA(root)
        self.io = self._choose_io(root, direct=direct)
        self.files = BlockFiles(self.layout, self.io)
        self.completions = Completions()
        self.workers = Workers(self.files, self.completions, name=name, threads=threads)
        self.ops_max = ops_max
        self._name = name
        self.closing = False
        self.notes = [text for text in (note, self.io.note) if text]

    @property
    def facts(self) -> StorageFacts:
        return StorageFacts(root=self._name, kind=self.kind, io_mode=self.io.mode, note="; ".join(self.notes))

    @property
    def counters(self) -> StorageCounters:
        return self.completions.counters

    def open_namespace(self, namespace: Namespace) -> None:
        self.layout.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self.layout.purge(namespace)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.completions.expect(ops, self.ops_max)
        for op in ops:
            if self.closing:
                self.completions.put(op, shutting_down(op))
            else:
                self._begin(op)

    def close(self, timeout_s: float) -> bool:
        """Ends ops that are not begun with SHUTTING_DOWN, and waits for those under way, at most `timeout_s` in all.

        False: the kernel, or a thread in it, still has a slot, which must stay mapped. It may be called again.
        """
        deadline_s = time.monotonic() + timeout_s
        self.closing = True
        quiet = self._end_own(deadline_s)
        self.workers.end()
        quiet = self.workers.join(deadline_s) and quiet
        self.layout.close()
        if quiet:
            self.completions.close()
        return quiet

    def _begin(self, op: StorageOp) -> None:
        """Has an op done."""
        self.workers.put(op)

    def _end_own(self, deadline_s: float) -> bool:
        """Ends what is not the workers'; True when nothing of it touches a slot any more."""
        return True

    def poll(self, completions_max: int) -> list[StorageDone]:
        return self.completions.poll(completions_max)

    def fileno(self) -> int:
        return self.completions.fileno()

    def _choose_io(self, root: Path, *, direct: bool) -> BlockIo:
        try:
            return choose_io(self.layout.new_temp(), direct=direct)
        except OSError as error:
            self.layout.close()
            raise StorageUnusable(f"{root} can't be written: {errno_name(error)} ({error})", root=root) from error
