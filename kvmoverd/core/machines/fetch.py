"""Fetch: Full Blocks into the pool under a lease, or through the pool into region pages."""

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
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class FetchKind(enum.Enum):
    """What becomes of the blocks."""

    LEASE = "lease"
    PAGES = "pages"
    WARM = "warm"


class FetchState(enum.Enum):
    WAITING = "waiting"
    READING = "reading"
    COPYING = "copying"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class FetchMachine:
    """Reads `blocks` blocks; the answer keeps their order.

    LEASE keeps the good ones, PAGES copies them, WARM lets them go.
    """

    def __init__(self, *, blocks: int, layers: int, kind: FetchKind, window_layers: int) -> None:
        self.state = FetchState.WAITING
        self.blocks = blocks
        self.kind = kind
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self._outcomes: dict[int, Reason] = {}
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
        """Indexes whose bytes are whole and checked."""
        return tuple(block for block in range(self.blocks) if self._outcomes.get(block) is Reason.OK)

    def on_blocks(self, outcomes: Iterable[tuple[int, Reason]]) -> list[Action]:
        if self.state is not FetchState.READING:
            return []
        before = len(self._outcomes)
        for block, reason in outcomes:
            self._outcomes.setdefault(block, reason)
        if len(self._outcomes) == before:
            return []
        told: list[Action] = [AnnounceProgress(len(self._outcomes))]
        if len(self._outcomes) < self.blocks:
            return told
        if self.kind is FetchKind.PAGES and self.good_blocks():
            self.state = FetchState.COPYING
            self.window.allow(self.window.layers)
            return told + list(self.window.due())
        return self._done(told)

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
        return self._done([]) if self.window.complete else list(self.window.due())

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

    def _done(self, told: list[Action]) -> list[Action]:
        if self.kind is FetchKind.LEASE and self.good_blocks():
            told = [*told, GrantLease()]
        outcomes = tuple(BlockOutcome.of(self._outcomes[block]) for block in range(self.blocks))
        good = next((block for block in range(self.blocks) if self._outcomes[block] is not Reason.OK), self.blocks)
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
