"""Storage with an engine for reads, in depth and without a thread each; the rest is done by threads.

A read is three steps in three places: a helper opens the record, the engine has it read, a helper checks it. Only what
goes well goes this way: a file that is not as it should be, a short or a damaged read is left to the workers, who look
again and know what to do with damage.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvmoverd.adapters.storage.blocks import LOOKS, Blocks, Opened
from kvmoverd.adapters.storage.file_storage import FileStorage
from kvmoverd.adapters.storage.read_engine import Ends, ReadEngine
from kvmoverd.adapters.storage.workers import failed, shutting_down
from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, StorageDone, StorageFacts, StorageOp

HELPERS = 4


class EngineStorage(FileStorage):
    """Storage port over `blocks`, which it closes, as it does the engine that `make_engine` gives it."""

    def __init__(
        self,
        blocks: Blocks,
        make_engine: Callable[[Ends], ReadEngine],
        *,
        name: str,
        threads: int,
        ops_max: int,
        note: str = "",
    ) -> None:
        super().__init__(blocks, name=name, threads=threads, ops_max=ops_max, note=note)
        self._engine_closed = False
        self._steps: queue.SimpleQueue[tuple[BlockRead, Opened | None] | None] = queue.SimpleQueue()
        self.reads = make_engine(Ends(self._came, self._failed, self._given_up))
        self._helpers = [
            threading.Thread(target=self._help, name=f"kvmover-{name}-help-{number}", daemon=True)
            for number in range(HELPERS)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def facts(self) -> StorageFacts:
        """The note says when the engine went out of use, and whether it ever reported reads that were not under way."""
        facts, notes = super().facts, []
        if self.reads.poisoned:
            notes.append(f"reads go by threads, the ring is out of use: {self.reads.poisoned}")
        if self.reads.strays:
            notes.append(f"{self.reads.strays} stray completions were dropped")
        return replace(facts, note="; ".join(filter(None, [*notes, facts.note]))) if notes else facts

    def _begin(self, op: StorageOp) -> None:
        if isinstance(op, BlockRead) and not self.reads.poisoned:
            self._steps.put((op, None))
        else:
            super()._begin(op)

    def _end_own(self, deadline_s: float) -> bool:
        self._end_waiting()
        return self._engine_closed or self._close_engine(deadline_s)

    def _close_engine(self, deadline_s: float) -> bool:
        """The engine's thread first, as it still hands to the helpers; the engine last, as both still wake it."""
        self.reads.stop()
        if not self.reads.join(deadline_s):
            return False
        for _ in self._helpers:
            self._steps.put(None)
        for helper in self._helpers:
            helper.join(max(0.0, deadline_s - time.monotonic()))
        if any(helper.is_alive() for helper in self._helpers):
            return False
        self._engine_closed = True
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

    def _step(self, op: BlockRead, opened: Opened | None) -> None:
        try:
            if opened is not None:
                self.blocks.let_go(opened)
                self._check(op, opened)
            elif self.closing:
                self.completions.put(op, shutting_down(op))
            else:
                self._open(op)
        except Exception as error:  # noqa: BLE001 - an op without a completion would hold its slot for ever
            self.completions.put(op, failed(op, error))

    def _open(self, op: BlockRead) -> None:
        if not op.span:
            self._check(op, None)
            return
        opened = self.blocks.open(op)
        if opened.whole:
            self.reads.put(op, opened)
        else:
            self.blocks.let_go(opened)
            self._look_again(op, looks=LOOKS)

    def _check(self, op: BlockRead, opened: Opened | None) -> None:
        try:
            self.blocks.check(op, opened)
        except RecordMismatch:
            self._look_again(op, looks=1)
        else:
            place = opened.place if opened is not None else op.place
            self.completions.put(op, StorageDone(op.op_id, Reason.OK, len(op.span), place=place))

    def _look_again(self, op: BlockRead, *, looks: int) -> None:
        if self.closing:
            self.completions.put(op, shutting_down(op))
        else:
            self.workers.put(op, looks)

    def _came(self, op: BlockRead, opened: Opened) -> None:
        self._steps.put((op, opened))

    def _failed(self, op: BlockRead, opened: Opened, error: OSError) -> None:
        self.blocks.let_go(opened)
        self.blocks.failed(op, opened.place, error)
        self.completions.put(op, failed(op, error))

    def _given_up(self, op: BlockRead, opened: Opened) -> None:
        self.blocks.let_go(opened)
        self._look_again(op, looks=LOOKS)
