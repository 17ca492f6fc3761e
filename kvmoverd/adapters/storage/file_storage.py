"""What storages over files share: the books, and threads that do ops on `Blocks` start to end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.adapters.storage.workers import Workers, shutting_down
from kvmoverd.core.manifest import Namespace
from kvmoverd.ports.storage import BlockIndex, BlockWrite, StorageCounters, StorageDone, StorageFacts, StorageOp


class FileStorage:
    """The port, with all ops done by threads where `_begin` knows no other way. Takes over `blocks`, and closes them.

    The threads are the root's own: one hung filesystem stops no other. Writes have threads of their own, as many as reads:
    they may wait for room, for a commit or for a file that is made, and reads wait for none of these.
    """

    kind: str

    def __init__(self, blocks: Blocks, *, name: str, threads: int, ops_max: int, note: str = "") -> None:
        self.blocks = blocks
        self.completions = Completions()
        self.workers = Workers(blocks, self.completions, name=name, threads=threads)
        self.writers = Workers(blocks, self.completions, name=f"{name}-write", threads=threads)
        self.ops_max = ops_max
        self._name = name
        self.closing = False
        self.notes = [text for text in (note, blocks.io.note) if text]

    @property
    def facts(self) -> StorageFacts:
        note = "; ".join([*self.notes, *self.blocks.notes()])
        return StorageFacts(self._name, self.kind, self.blocks.io.mode, note, self.blocks.details())

    @property
    def counters(self) -> StorageCounters:
        return self.completions.counters

    @property
    def index(self) -> BlockIndex:
        return self.blocks.index

    def open_namespace(self, namespace: Namespace) -> None:
        self.blocks.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self.blocks.purge(namespace)

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return self.blocks.purge_tenant(tenant)

    def heard(self, author: str, log: int) -> None:
        self.blocks.heard(author, log)

    def signature(self) -> tuple[str, int]:
        return self.blocks.signature()

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
        for threads in (self.workers, self.writers):
            threads.end()
        quiet = self.workers.join(deadline_s) and quiet
        quiet = self.writers.join(deadline_s) and quiet
        quiet = self.blocks.close(max(0.0, deadline_s - time.monotonic())) and quiet
        if quiet:
            self.completions.close()
        return quiet

    def _begin(self, op: StorageOp) -> None:
        """Has an op done."""
        (self.writers if isinstance(op, BlockWrite) else self.workers).put(op)

    def _end_own(self, deadline_s: float) -> bool:
        """Ends what is not the workers'; True when nothing of it touches a slot any more."""
        return True

    def poll(self, completions_max: int) -> list[StorageDone]:
        return self.completions.poll(completions_max)

    def fileno(self) -> int:
        return self.completions.fileno()
