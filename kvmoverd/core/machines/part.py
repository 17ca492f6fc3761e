"""Part: one node reads blocks [0, n) into its slots and sends each layer of the good prefix, credit by credit."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvmoverd.core.machines.actions import Action, AnnouncePrefix, Finish, Release, TakeSlots
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class PartState(enum.Enum):
    WAITING = "waiting"
    READING = "reading"
    SENDING = "sending"
    DRAINING = "draining"
    ENDED = "ended"


class PartMachine:
    """Reader of a part. Whoever owns the request grants credits; `on_stop` is its stop, answered by `Finish`.

    `Finish.end.prefix_blocks` is the good prefix.
    """

    def __init__(self, *, blocks: int, layers: int, credit_layers: int, window_layers: int) -> None:
        self.state = PartState.WAITING
        self.blocks = blocks
        self.prefix_blocks = blocks
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self.window.allow(credit_layers)
        self._outcomes: dict[int, Reason] = {}
        self._end: End | None = None

    def start(self) -> list[Action]:
        return [TakeSlots()]

    def on_slots(self) -> list[Action]:
        if self.state is not PartState.WAITING:
            return []
        self.state = PartState.READING
        return self._decide_prefix()

    def on_no_slots(self, reason: Reason, message: str) -> list[Action]:
        return self.on_stop(reason, message) if self.state is PartState.WAITING else []

    def on_blocks(self, outcomes: Iterable[tuple[int, Reason]]) -> list[Action]:
        """Blocks whose read ended, each with its reason (OK: whole and checked)."""
        if self.state is not PartState.READING:
            return []
        for block, reason in outcomes:
            self._outcomes.setdefault(block, reason)
        return self._decide_prefix()

    def on_credit(self, prefix_blocks: int, layers: int) -> list[Action]:
        """A credit counts only for the prefix it was granted for: a cut voids those granted before it."""
        if prefix_blocks == self.prefix_blocks:
            self.window.allow(layers)
        return list(self.window.due()) if self.state is PartState.SENDING else []

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer was applied at the sink, or not. A layer that is not under way changes nothing."""
        if layer not in self.window.inflight:
            return []
        if reason is not Reason.OK:
            self.window.lost(layer)
            return self._drained() if self.state is PartState.DRAINING else self.on_stop(reason, message)
        told: list[Action] = list(self.window.sent(layer))
        if self.state is PartState.DRAINING:
            return self._drained()
        if self.window.complete:
            return told + self._ended(End(Reason.OK, prefix_blocks=self.prefix_blocks))
        return told + list(self.window.due())

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        """Stop: nothing more is sent; what is under way is waited for. Reads go on for the pool's sake."""
        if self.state in (PartState.DRAINING, PartState.ENDED):
            return []
        # Before every read has its outcome no prefix is known to be good.
        self._end = End(reason, message, prefix_blocks=self.prefix_blocks if self.state is PartState.SENDING else 0)
        self.state = PartState.DRAINING
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        """A part touches no engine's pages through its own books: its slots simply wait for the last send to end."""
        return []

    def _decide_prefix(self) -> list[Action]:
        if len(self._outcomes) < self.blocks:
            return []
        lost = min((block for block, reason in self._outcomes.items() if reason is not Reason.OK), default=None)
        if lost is None:
            told: list[Action] = [AnnouncePrefix(self.blocks, None)]
        else:
            self.prefix_blocks, self.window.allowed = lost, 0
            told = [AnnouncePrefix(lost, BlockOutcome.of(self._outcomes[lost]))]
        if self.prefix_blocks == 0:
            return told + self._ended(End(Reason.OK, prefix_blocks=0))
        self.state = PartState.SENDING
        return told + list(self.window.due())

    def _drained(self) -> list[Action]:
        if self.window.inflight:
            return []
        assert self._end is not None, "draining without an end"
        return self._ended(self._end)

    def _ended(self, end: End) -> list[Action]:
        self.state = PartState.ENDED
        return [Release(), Finish(end)]
