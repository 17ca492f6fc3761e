"""Fetch: Full Blocks into the pool under a lease, or through the pool into region pages.

On the way into pages a layer is copied as soon as every block has it that is not lost; no byte of a lost block is copied any
more, and what was copied of it before counts for nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceBlocks,
    AnnounceProgress,
    AnnounceQuiet,
    Finish,
    GrantLease,
    Release,
    TakeSlots,
)
from kvmoverd.core.machines.reads import BlockReads
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class FetchKind(enum.Enum):
    """What becomes of the blocks."""

    LEASE = "lease"
    PAGES = "pages"


class FetchState(enum.Enum):
    WAITING = "waiting"
    READING = "reading"
    COPYING = "copying"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class FetchMachine:
    """Reads `blocks` blocks; the answer keeps their order. LEASE keeps the good ones, PAGES copies them."""

    def __init__(self, *, blocks: int, layers: int, kind: FetchKind, window_layers: int) -> None:
        self.state = FetchState.WAITING
        self.blocks = blocks
        self.kind = kind
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self.reads = BlockReads(blocks=blocks, layers=layers)
        self._end: End | None = None

    def start(self) -> list[Action]:
        if self.blocks == 0:
            return self._ended([AnnounceBlocks(())], End(Reason.OK), release=False)
        return [TakeSlots()]

    def on_slots(self) -> list[Action]:
        if self.state is FetchState.WAITING:
            self.state = FetchState.READING
        return []

    def on_no_slots(self, reason: Reason, message: str) -> list[Action]:
        return self.on_stop(reason, message) if self.state is FetchState.WAITING else []

    def good_blocks(self) -> tuple[int, ...]:
        """Indexes that are not lost. Once every block is known: those whose bytes are checked, as far as they have come."""
        return tuple(block for block in range(self.blocks) if block not in self.reads.lost)

    def on_blocks(self, outcomes: Iterable[tuple[int, Reason]]) -> list[Action]:
        """Blocks whose read ended, each with its reason (OK: whole and checked). The first outcome of a block counts."""
        if self.state not in _TAKING:
            return []
        before = self.reads.ended_blocks
        self.reads.ended(outcomes)
        told: list[Action] = []
        if self.reads.ended_blocks > before:
            told.append(AnnounceProgress(self.reads.ended_blocks))
        return self._after_reads(told)

    def on_layers(self, progress: Iterable[tuple[int, int]]) -> list[Action]:
        """Blocks that go on being read, each with the number of leading layers that are there, checked."""
        if self.state not in _TAKING:
            return []
        self.reads.went_on(progress)
        return self._after_reads([])

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer of the good blocks was copied into the pages, or not."""
        if layer not in self.window.inflight:
            return []
        if self.state in (FetchState.DRAINING, FetchState.UNQUIET):
            self.window.lost(layer)
            return self._drained()
        if reason is not Reason.OK:
            self.window.lost(layer)
            return self.on_stop(reason, message)
        self.window.sent(layer)
        return self._copied([])

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        if self.state not in (FetchState.WAITING, FetchState.READING, FetchState.COPYING):
            return []
        self._end = End(reason, message)
        self.state = FetchState.DRAINING
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        if self.state is not FetchState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = FetchState.UNQUIET
        return [Finish(End(self._end.reason, self._end.message, pages_quiet=False))]

    def _after_reads(self, told: list[Action]) -> list[Action]:
        if self.state is FetchState.COPYING:
            return self._copied(told)
        if self.kind is FetchKind.PAGES and not self.reads.unknown_blocks and self.good_blocks():
            self.state = FetchState.COPYING
            return self._copied(told)
        return self._done(told) if self.reads.ended_blocks == self.blocks else told

    def _copied(self, told: list[Action]) -> list[Action]:
        """Goes on copying; done when every block that is not lost has arrived, or none is left."""
        any_good = len(self.reads.lost) < self.blocks
        if self.window.complete or not (any_good or self.window.inflight):
            return self._done(told)
        if any_good:
            self.window.allow(self.reads.readable_layers(self.blocks))
            told += self.window.due()
        return told

    def _done(self, told: list[Action]) -> list[Action]:
        if self.kind is FetchKind.LEASE and self.good_blocks():
            told = [*told, GrantLease()]
        lost = self.reads.lost
        outcomes = tuple(BlockOutcome.of(lost.get(block, Reason.OK)) for block in range(self.blocks))
        good = min(lost, default=self.blocks)
        return self._ended([*told, AnnounceBlocks(outcomes)], End(Reason.OK, prefix_blocks=good))

    def _drained(self) -> list[Action]:
        if self.window.inflight:
            return []
        assert self._end is not None, "draining without an end"
        if self.state is FetchState.UNQUIET:
            self.state = FetchState.ENDED
            return [Release(), AnnounceQuiet()]
        return self._ended([], self._end)

    def _ended(self, told: list[Action], end: End, *, release: bool = True) -> list[Action]:
        self.state = FetchState.ENDED
        return [*told, *([Release()] if release else []), Finish(end)]


_TAKING = (FetchState.READING, FetchState.COPYING)
