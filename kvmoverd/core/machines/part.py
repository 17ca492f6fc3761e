"""Part: one node reads blocks [0, n) into its slots and sends each layer of the good prefix, credit by credit.

Blocks arrive layer range by layer range. The prefix is decided when the first range of every block has come or failed; from
then on layers go out as soon as every block of the prefix has them. A block that fails later cuts the attempt short.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from kvmoverd.core.machines.actions import Action, AnnouncePrefix, Finish, Release, TakeSlots
from kvmoverd.core.machines.reads import BlockReads
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

    `Finish.end.prefix_blocks` is the good prefix; with the reason PREFIX_CUT it is smaller than the one announced.
    """

    def __init__(self, *, blocks: int, layers: int, credit_layers: int, window_layers: int) -> None:
        self.state = PartState.WAITING
        self.blocks = blocks
        self.prefix_blocks = blocks
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self.credit_layers = min(credit_layers, layers)
        self.reads = BlockReads(blocks=blocks, layers=layers)
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
        """Blocks whose read ended, each with its reason (OK: whole and checked). The first outcome of a block counts."""
        return self._after_reads(self.reads.ended(outcomes)) if self.state in _TAKING else []

    def on_layers(self, progress: Iterable[tuple[int, int]]) -> list[Action]:
        """Blocks that go on being read, each with the number of leading layers that are there, checked."""
        if self.state not in _TAKING:
            return []
        self.reads.went_on(progress)
        return self._after_reads(())

    def on_credit(self, prefix_blocks: int, layers: int) -> list[Action]:
        """A credit counts only for the prefix it was granted for: a cut voids those granted before it."""
        if prefix_blocks == self.prefix_blocks:
            self.credit_layers = max(self.credit_layers, min(layers, self.window.layers))
        return self._due() if self.state is PartState.SENDING else []

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
        return told + self._due()

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        """Stop: nothing more is sent; what is under way is waited for. Reads go on for the pool's sake."""
        if self.state in (PartState.DRAINING, PartState.ENDED):
            return []
        # Before every block has its first layers no prefix is known to be good.
        known_blocks = self.prefix_blocks if self.state is PartState.SENDING else 0
        return self._stopped(End(reason, message, prefix_blocks=known_blocks))

    def on_quiesce_timeout(self) -> list[Action]:
        """A part touches no engine's pages through its own books: its slots simply wait for the last send to end."""
        return []

    def _after_reads(self, newly_lost: Sequence[int]) -> list[Action]:
        if self.state is PartState.READING:
            return self._decide_prefix()
        cut = min((block for block in newly_lost if block < self.prefix_blocks), default=None)
        if cut is None:
            return self._due()
        text = f"block {cut} was lost after its first layers: {self.reads.lost[cut].name}"
        return self._stopped(End(Reason.PREFIX_CUT, text, prefix_blocks=cut))

    def _decide_prefix(self) -> list[Action]:
        if self.reads.unknown_blocks:
            return []
        lost = min(self.reads.lost, default=None)
        if lost is None:
            told: list[Action] = [AnnouncePrefix(self.blocks, None)]
        else:
            self.prefix_blocks, self.credit_layers = lost, 0
            told = [AnnouncePrefix(lost, BlockOutcome.of(self.reads.lost[lost]))]
        if self.prefix_blocks == 0:
            return told + self._ended(End(Reason.OK, prefix_blocks=0))
        self.state = PartState.SENDING
        return told + self._due()

    def _due(self) -> list[Action]:
        """Sends of layers that are granted and read, every block of the prefix."""
        self.window.allow(min(self.credit_layers, self.reads.readable_layers(self.prefix_blocks)))
        return list(self.window.due())

    def _stopped(self, end: End) -> list[Action]:
        self._end = end
        self.state = PartState.DRAINING
        return self._drained()

    def _drained(self) -> list[Action]:
        if self.window.inflight:
            return []
        assert self._end is not None, "draining without an end"
        return self._ended(self._end)

    def _ended(self, end: End) -> list[Action]:
        self.state = PartState.ENDED
        return [Release(), Finish(end)]


_TAKING = (PartState.READING, PartState.SENDING)
