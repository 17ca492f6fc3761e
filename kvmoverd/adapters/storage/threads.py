"""Storage by threads: a fixed set of workers, each doing one op at a time with plain preadv and pwritev."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvmoverd.adapters.storage.file_storage import FileStorage
from kvmoverd.adapters.storage.workers import shutting_down
from kvmoverd.ports.storage import StorageOp


class ThreadsStorage(FileStorage):
    """Storage port over a directory; `note`: why it is this one, where another was asked for."""

    def __init__(
        self, root: Path, *, name: str, threads: int, ops_max: int, direct: bool = True, note: str = ""
    ) -> None:
        super().__init__(root, name=name, threads=threads, ops_max=ops_max, direct=direct, note=note)
        self._closing = False

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.completions.expect(ops, self.ops_max)
        for op in ops:
            if self._closing:
                self.completions.put(op, shutting_down(op))
            else:
                self.workers.put(op)

    def close(self, timeout_s: float) -> bool:
        """Ends ops that wait with SHUTTING_DOWN, and waits for those under way, at most `timeout_s` in all.

        False: a worker is stuck in the kernel and its slot must stay mapped.
        """
        self._closing = True
        self.workers.end()
        quiet = self.workers.join(time.monotonic() + timeout_s)
        self.layout.close()
        if quiet:
            self.completions.close()
        return quiet
