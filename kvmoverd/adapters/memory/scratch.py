"""Memory behind the pool for trials: of the same mapping and pages, but no slot ever lies in it."""

from __future__ import annotations

import threading

from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import ALIGN_BYTES

PART_BYTES = 2 * ALIGN_BYTES


class Scratch:
    """Parts of `PART_BYTES` each, one a trial: roots are opened beside each other, and while others work. From any thread."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.parts_total = size_bytes // PART_BYTES
        self._lock = threading.Lock()
        self._free = [address + part * PART_BYTES for part in reversed(range(self.parts_total))]

    def take(self) -> int:
        """The address of a part that is nobody else's, aligned for O_DIRECT.

        Raises `StorageUnusable` when each of them is held: by reads that never came back.
        """
        with self._lock:
            if not self._free:
                raise StorageUnusable(
                    f"all {self.parts_total} parts of the memory for trials are held by reads that hang; restart"
                )
            return self._free.pop()

    def give_back(self, address: int) -> None:
        """Only when no device writes there any more: what hangs keeps its part."""
        with self._lock:
            assert address not in self._free, f"{address:#x} was given back twice"
            self._free.append(address)

    @property
    def parts_free(self) -> int:
        with self._lock:
            return len(self._free)
