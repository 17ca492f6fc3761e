"""Storage by io_uring: reads go through a ring, in depth and without a thread each; the rest is done by threads.

A read is three steps in three places: a helper opens the file, the ring's thread has it read, a helper checks it. Only
what goes well goes this way: a file of the wrong size, a short or a damaged read is left to the workers, who look again
and know what to do with damage.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

from kvmoverd.adapters.storage.block_files import LOOKS
from kvmoverd.adapters.storage.block_io import close_quietly
from kvmoverd.adapters.storage.file_storage import FileStorage
from kvmoverd.adapters.storage.uring_pool import register_pool
from kvmoverd.adapters.storage.uring_reads import Ends, Flight, UringReads
from kvmoverd.adapters.storage.uring_ring import BUFFER_BYTES_MAX, Ring
from kvmoverd.adapters.storage.workers import failed, shutting_down
from kvmoverd.core.record import RecordMismatch, check_layers, memory_view
from kvmoverd.core.status import Reason
from kvmoverd.ports.memory import Memory
from kvmoverd.ports.storage import BlockRead, StorageDone, StorageFacts, StorageOp

HELPERS = 4
_NOT_OPEN = -1


class UringStorage(FileStorage):
    """Storage port over a directory. Takes over the ring, which must have room for `ops_max` reads, and closes it.

    `memory`: where the slots lie, in pieces that none of them straddles; registered with the ring where that works.
    Raises `StorageUnusable`.
    """

    kind = "uring"

    def __init__(
        self,
        root: Path,
        ring: Ring,
        *,
        name: str,
        threads: int,
        ops_max: int,
        direct: bool = True,
        memory: Memory | None = None,
        piece_bytes: int = BUFFER_BYTES_MAX,
    ) -> None:
        super().__init__(root, name=name, threads=threads, ops_max=ops_max, direct=direct)
        ring.by_workers = not self.io.direct  # what the page cache has would be copied within the submit
        if memory is not None:
            self.notes.append(register_pool(ring, memory, piece_bytes, self.io, self.layout.new_temp()))
        self._ring_closed = False
        self._steps: queue.SimpleQueue[tuple[BlockRead, int] | None] = queue.SimpleQueue()
        self.reads = UringReads(ring, Ends(self._came, self._failed, self._given_up), name=name, depth=-(-ops_max // 2))
        self._helpers = [
            threading.Thread(target=self._help, name=f"kvmover-{name}-help-{number}", daemon=True)
            for number in range(HELPERS)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def facts(self) -> StorageFacts:
        """The note says when the ring went out of use, and whether it ever reported reads that were not under way."""
        facts, notes = super().facts, []
        if self.reads.poisoned:
            notes.append(f"reads go by threads, the ring is out of use: {self.reads.poisoned}")
        if self.reads.strays:
            notes.append(f"{self.reads.strays} stray completions were dropped")
        return replace(facts, note="; ".join([*notes, facts.note])) if notes else facts

    def _begin(self, op: StorageOp) -> None:
        if isinstance(op, BlockRead) and not self.reads.poisoned:
            self._steps.put((op, _NOT_OPEN))
        else:
            self.workers.put(op)

    def _end_own(self, deadline_s: float) -> bool:
        self._end_waiting()
        return self._ring_closed or self._close_ring(deadline_s)

    def _close_ring(self, deadline_s: float) -> bool:
        """The ring's thread first, as it still hands to the helpers; the ring last, as both still wake it."""
        self.reads.stop()
        if not self.reads.join(deadline_s):
            return False
        for _ in self._helpers:
            self._steps.put(None)
        for helper in self._helpers:
            helper.join(max(0.0, deadline_s - time.monotonic()))
        if any(helper.is_alive() for helper in self._helpers):
            return False
        self._ring_closed = True
        self.reads.close()
        return True

    def _end_waiting(self) -> None:
        """Helpers that hang must not keep what waits from its completion."""
        with contextlib.suppress(queue.Empty):
            while (step := self._steps.get_nowait()) is not None:
                self._step(*step)

    def _help(self) -> None:
        while (step := self._steps.get()) is not None:
            self._step(*step)

    def _step(self, op: BlockRead, fd: int) -> None:
        try:
            if fd != _NOT_OPEN or not op.span:
                self._check(op, fd)
            elif self.closing:
                self.completions.put(op, shutting_down(op))
            else:
                self._open(op)
        except Exception as error:  # noqa: BLE001 - an op without a completion would hold its slot for ever
            self.completions.put(op, failed(op, error))

    def _open(self, op: BlockRead) -> None:
        fd, found_bytes = self.files.open(op)
        if found_bytes == op.namespace.layout.record_bytes:
            self.reads.put(op, fd)
        else:
            close_quietly(fd)
            self._look_again(op, looks=LOOKS)

    def _check(self, op: BlockRead, fd: int) -> None:
        if fd != _NOT_OPEN:
            close_quietly(fd)
        record = memory_view(op.address, op.namespace.layout.record_bytes)
        try:
            check_layers(record, op.namespace, op.key, op.first_layer, op.layers.stop)
        except RecordMismatch:
            self._look_again(op, looks=1)
        else:
            self.completions.put(op, StorageDone(op.op_id, Reason.OK, len(op.span)))

    def _look_again(self, op: BlockRead, *, looks: int) -> None:
        if self.closing:
            self.completions.put(op, shutting_down(op))
        else:
            self.workers.put(op, looks)

    def _came(self, flight: Flight) -> None:
        self._steps.put((flight.op, flight.fd))

    def _failed(self, flight: Flight, error: OSError) -> None:
        close_quietly(flight.fd)
        self.completions.put(flight.op, failed(flight.op, error))

    def _given_up(self, flight: Flight) -> None:
        close_quietly(flight.fd)
        self._look_again(flight.op, looks=LOOKS)
