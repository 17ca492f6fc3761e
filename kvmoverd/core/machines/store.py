"""Store: full blocks leave the engine's pages for write-back slots (accepted), and these for storage (durable)."""

from __future__ import annotations

import enum

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceAccepted,
    AnnounceBlocks,
    AnnounceQuiet,
    Finish,
    Release,
    TakeSlots,
    WriteBlocks,
)
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class StoreState(enum.Enum):
    WAITING = "waiting"
    COPYING = "copying"
    WRITING = "writing"
    LINGERING = "lingering"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class StoreMachine:
    """Once accepted, a block is written whatever becomes of the caller (LINGERING: the caller has had its answer)."""

    def __init__(self, *, blocks: int, layers: int, window_layers: int) -> None:
        self.state = StoreState.WAITING
        self.blocks = blocks
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self.written: dict[int, Reason] = {}
        self._end: End | None = None

    def start(self) -> list[Action]:
        if self.blocks == 0:
            self.state = StoreState.ENDED
            return [AnnounceAccepted(), AnnounceBlocks(()), Finish(End(Reason.OK))]
        return [TakeSlots()]

    def on_slots(self) -> list[Action]:
        if self.state is not StoreState.WAITING:
            return []
        self.state = StoreState.COPYING
        self.window.allow(self.window.layers)
        return list(self.window.due())

    def on_no_slots(self, reason: Reason, message: str) -> list[Action]:
        return self.on_stop(reason, message) if self.state is StoreState.WAITING else []

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer was copied out of the pages, or not."""
        if layer not in self.window.inflight:
            return []
        if self.state in (StoreState.DRAINING, StoreState.UNQUIET):
            self.window.lost(layer)
            return self._drained()
        if reason is not Reason.OK:
            self.window.lost(layer)
            return self.on_stop(reason, message)
        self.window.sent(layer)
        if not self.window.complete:
            return list(self.window.due())
        self.state = StoreState.WRITING
        return [AnnounceAccepted(), WriteBlocks(tuple(range(self.blocks)))]

    def on_written(self, block: int, reason: Reason) -> list[Action]:
        if self.state not in (StoreState.WRITING, StoreState.LINGERING):
            return []
        self.written.setdefault(block, reason)
        if len(self.written) < self.blocks:
            return []
        answered = self.state is StoreState.LINGERING
        self.state = StoreState.ENDED
        if answered:
            return [Release()]
        return [self._outcomes(), Release(), Finish(self._verdict())]

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        if self.state is StoreState.WRITING:
            self.state = StoreState.LINGERING
            return [Finish(End(reason, message))]
        if self.state not in (StoreState.WAITING, StoreState.COPYING):
            return []
        self._end = End(reason, message)
        self.state = StoreState.DRAINING
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        """Copies out of the pages did not end in time: they still read the pages."""
        if self.state is not StoreState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = StoreState.UNQUIET
        return [Finish(End(self._end.reason, self._end.message, pages_quiet=False))]

    def _outcomes(self) -> AnnounceBlocks:
        return AnnounceBlocks(tuple(BlockOutcome.of(self.written[block]) for block in range(self.blocks)))

    def _verdict(self) -> End:
        bad = [reason for reason in self.written.values() if reason is not Reason.OK]
        if not bad:
            return End(Reason.OK, prefix_blocks=self.blocks)
        good = next(block for block in range(self.blocks) if self.written[block] is not Reason.OK)
        return End(bad[0], f"{len(bad)} of {self.blocks} blocks were not stored", prefix_blocks=good)

    def _drained(self) -> list[Action]:
        if self.window.inflight:
            return []
        unquiet = self.state is StoreState.UNQUIET
        self.state = StoreState.ENDED
        assert self._end is not None, "draining without an end"
        return [Release(), AnnounceQuiet() if unquiet else Finish(self._end)]
