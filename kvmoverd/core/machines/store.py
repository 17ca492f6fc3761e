"""Store: full blocks leave the engine's pages for write-back slots (accepted), and these for storage (durable).

Blocks that are stored, or that somebody writes here at this moment, are neither copied nor do they take room.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceAccepted,
    AnnounceBlocks,
    AnnounceQuiet,
    FindStored,
    Finish,
    Release,
    TakeSlots,
    WriteBlocks,
)
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class StoreState(enum.Enum):
    LOOKING = "looking"
    WAITING = "waiting"
    COPYING = "copying"
    WRITING = "writing"
    LINGERING = "lingering"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class StoreMachine:
    """Once accepted, a block is written whatever becomes of the caller (LINGERING: the caller has had its answer).

    `copies`: in how many pieces so many blocks are copied; a piece is a layer to the window. `to_copy`: the blocks that are
    copied and written for this call, known once it was found out which are stored.
    """

    def __init__(self, *, blocks: int, copies: Callable[[int], int], window_layers: int) -> None:
        self.state = StoreState.LOOKING
        self.blocks = blocks
        self.to_copy: tuple[int, ...] = tuple(range(blocks))
        self.accepted = False
        self.window = LayerWindow(layers=copies(blocks), window_layers=window_layers)
        self.written: dict[int, Reason] = {}
        self._copies = copies
        self._end: End | None = None

    def start(self) -> list[Action]:
        if self.blocks == 0:
            self.state = StoreState.ENDED
            self.accepted = True
            return [AnnounceAccepted(), AnnounceBlocks(()), Finish(End(Reason.OK))]
        return [FindStored()]

    def on_found(self, found: Sequence[tuple[int, Reason]] = ()) -> list[Action]:
        """OK: it is stored; MISS: it is to be copied and written. Of those not named others' writes will tell."""
        if self.state is not StoreState.LOOKING:
            return []
        said = dict(found)
        self.to_copy = tuple(block for block in range(self.blocks) if said.get(block) is Reason.MISS)
        self.written = {block: reason for block, reason in said.items() if reason is Reason.OK}
        if not self.to_copy:
            self.state = StoreState.WRITING
            self.accepted = True
            return [AnnounceAccepted(), *self._over()]
        self.state = StoreState.WAITING
        window = self.window.window_layers
        self.window = LayerWindow(layers=self._copies(len(self.to_copy)), window_layers=window)
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
        """A piece was copied out of the pages, or not."""
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
        self.accepted = True
        return [AnnounceAccepted(), WriteBlocks(self.to_copy)]

    def on_written(self, block: int, reason: Reason) -> list[Action]:
        """Of this call's writes, and of others' that it waits for."""
        if self.state in (StoreState.LOOKING, StoreState.ENDED):
            return []
        if not self.accepted and block in self.to_copy:
            return []
        self.written.setdefault(block, reason)
        return self._over()

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        if self.state is StoreState.WRITING:
            self.state = StoreState.LINGERING
            return [Finish(End(reason, message))]
        if self.state not in (StoreState.LOOKING, StoreState.WAITING, StoreState.COPYING):
            return []
        self._end = End(reason, message)
        if self.state is StoreState.LOOKING:
            self.state = StoreState.ENDED
            return self._given_up(self._end)
        self.state = StoreState.DRAINING
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        """Copies out of the pages did not end in time: they still read the pages."""
        if self.state is not StoreState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = StoreState.UNQUIET
        return self._given_up(End(self._end.reason, self._end.message, pages_quiet=False))

    def _over(self) -> list[Action]:
        """Nothing, unless all is known of every block that was accepted."""
        if self.state not in (StoreState.WRITING, StoreState.LINGERING) or len(self.written) < self.blocks:
            return []
        answered = self.state is StoreState.LINGERING
        self.state = StoreState.ENDED
        released: list[Action] = [Release()] if self.to_copy else []
        return released if answered else [self._outcomes(), *released, Finish(self._verdict())]

    def _outcomes(self, otherwise: Reason = Reason.INTERNAL) -> AnnounceBlocks:
        reasons = (self.written.get(block, otherwise) for block in range(self.blocks))
        return AnnounceBlocks(tuple(BlockOutcome.of(reason) for reason in reasons))

    def _given_up(self, end: End) -> list[Action]:
        """Blocks that others write may be stored all the same; nobody waits for that any more."""
        return [self._outcomes(end.reason), Finish(end)]

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
        return [Release(), AnnounceQuiet()] if unquiet else [Release(), *self._given_up(self._end)]
