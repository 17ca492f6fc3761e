"""What storages over a directory of block files share: the root, the books, and threads that do ops start to end."""

from __future__ import annotations

from pathlib import Path

from kvmoverd.adapters.storage.block_files import BlockFiles
from kvmoverd.adapters.storage.block_io import BlockIo, choose_io, errno_name
from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.adapters.storage.layout_a import LayoutA
from kvmoverd.adapters.storage.workers import Workers
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.manifest import Namespace
from kvmoverd.ports.storage import StorageCounters, StorageDone, StorageFacts


class FileStorage:
    """All of the port but `submit` and `close`. The threads are the root's own: one hung filesystem stops no other.

    Raises `StorageUnusable` for a root that can't be written.
    """

    kind = "threads"

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
