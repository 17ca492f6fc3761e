"""Part: one node reads some blocks of a request into its slots and sends each layer of the good prefix, credit by credit.

Blocks arrive layer range by layer range. The prefix is decided when the first range of every block has come or failed; from
then on layers go out as soon as every block of the prefix has them. A block that fails later cuts the attempt short.

A part that holds is one of several, or was one: a cut in another one may shorten it. It sends nothing before its first
credit, which says how much of its prefix counts. Until the prefix is told the part may be asked to give up its last blocks.
While it sends it may be asked for the rest of them: the layers that no device reads yet. From then on it sends layers below
`first_layer` with all blocks, and the others with those that it kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from kvmoverd.core.machines.actions import (
    Action,
    AnnouncePrefix,
    Finish,
    GaveRest,
    GaveUp,
    Release,
    SendAssembly,
    TakeSlots,
)
from kvmoverd.core.machines.reads import BlockReads
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import BlockOutcome, End, Reason


class PartState(enum.Enum):
    WAITING = "waiting"
    READING = "reading"
    HOLDING = "holding"
    """The prefix is told, and how much of it counts is not known yet."""
    SENDING = "sending"
    DRAINING = "draining"
    ENDED = "ended"


class PartMachine:
    """Reader of a part. Whoever owns the request grants credits; `on_stop` is its stop, answered by `Finish`.

    Blocks are counted among the part's own. `first_layer`: layers below it are at the owner already. `assembles`: each
    layer goes to a second place too, the DE buffer, from `on_assemble` on. `Finish.end.prefix_blocks` is the good prefix;
    with the reason PREFIX_CUT it is smaller than the one announced.
    """

    def __init__(
        self,
        *,
        blocks: int,
        layers: int,
        credit_layers: int,
        window_layers: int,
        first_layer: int = 0,
        holds: bool = False,
        assembles: bool = False,
    ) -> None:
        assert 0 <= first_layer <= layers, f"the part begins at layer {first_layer} of {layers}"
        self.state = PartState.WAITING
        self.blocks = blocks
        self.prefix_blocks = blocks
        self.holds = holds
        self.assembles = assembles
        self.window = LayerWindow(layers=layers, window_layers=window_layers, first_layer=first_layer)
        self.assembly = LayerWindow(layers=layers, window_layers=window_layers)
        self.credit_layers = 0 if holds else min(credit_layers, layers)
        self.reads = BlockReads(blocks=blocks, layers=layers)
        self.given: tuple[int, int] | None = None
        """Its blocks from the first number on are brought to so many layers, the second number."""
        self._begins_later = first_layer > 0
        self._may_assemble = False
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
        """A credit counts only for the blocks it was granted for: a cut voids those granted before it, and layers of which the
        part has given some blocks go only when its owner grants those that are left, and so has heard of it.

        The first credit of a part that holds says what its prefix is from now on; one that comes before the part has told
        its own is void.
        """
        if self.holds and self.state in (PartState.WAITING, PartState.READING):
            return []
        if self.state is PartState.HOLDING:
            return self._agree(prefix_blocks, layers)
        self._credit(prefix_blocks, layers)
        return self._due() if self.state is PartState.SENDING else []

    def on_assemble(self) -> list[Action]:
        """The DE buffer waits for this part's layers."""
        self._may_assemble = self.assembles
        return self._due() if self.state is PartState.SENDING else []

    def on_give_up(self, kept_blocks: int, begun_blocks: int) -> list[Action]:
        """Its owner wants all but the first `kept_blocks` blocks for another reader; what is begun is kept too.

        Once the prefix is told nothing is given up. A part that gave something up holds, or ends when nothing is left.
        """
        if self.state in (PartState.DRAINING, PartState.ENDED):
            return []
        kept = min(self.blocks, max(kept_blocks, begun_blocks))
        if self.state not in (PartState.WAITING, PartState.READING) or kept == self.blocks:
            return [GaveUp(self.blocks)]
        self.blocks = self.prefix_blocks = kept
        self.reads.keep(kept)
        self.holds, self.credit_layers = True, 0
        told: list[Action] = [GaveUp(kept)]
        if not kept:
            return told + self._ended(End(Reason.OK))
        return told + self._decide_prefix() if self.state is PartState.READING else told

    @property
    def may_give_rest(self) -> bool:
        """Once, while it sends, and only what goes to one place and began at the first layer."""
        is_whole = self.given is None and not self._begins_later and not self.assembles
        return is_whole and self.state is PartState.SENDING

    def on_give_rest(self, kept_blocks: int, first_layer: int) -> list[Action]:
        """Its owner asked for the rest: blocks from `kept_blocks` on are read no further than to layers [0, first_layer).

        With `first_layer` 0 nothing is given, and nothing changes: so it has to be unless `may_give_rest`.
        """
        if self.state in (PartState.DRAINING, PartState.ENDED):
            return []
        if not first_layer:
            return [GaveRest(self.prefix_blocks, 0)]
        assert self.may_give_rest, f"a part that is {self.state.value} gives no rest: {self.given}"
        assert 0 <= kept_blocks < self.prefix_blocks, f"{kept_blocks} blocks kept of {self.prefix_blocks}"
        assert self.window.allowed <= first_layer < self.window.layers, (
            f"layer {first_layer} may be sent, or there is none"
        )
        self.given = kept_blocks, first_layer
        self.credit_layers = min(self.credit_layers, first_layer)
        self.reads.give_rest(kept_blocks, first_layer)
        if not kept_blocks:
            self.window.end_at(first_layer)
        return [GaveRest(kept_blocks, first_layer), *self._over_or_due()]

    def blocks_at(self, layer: int) -> int:
        """With how many leading blocks a layer is sent."""
        if self.given is None or layer < self.given[1]:
            return self.prefix_blocks
        return self.given[0]

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer was applied at the owner's sink, or not. A layer that is not under way changes nothing."""
        return self._moved(self.window, layer, reason, message)

    def on_assembled(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """As `on_sent`, for the DE buffer."""
        return self._moved(self.assembly, layer, reason, message)

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        """Stop: nothing more is sent; what is under way is waited for. Reads go on for the pool's sake."""
        if self.state in (PartState.DRAINING, PartState.ENDED):
            return []
        # Before every block has its first layers no prefix is known to be good.
        known_blocks = self.prefix_blocks if self.state in (PartState.HOLDING, PartState.SENDING) else 0
        return self._stopped(End(reason, message, prefix_blocks=known_blocks))

    def on_quiesce_timeout(self) -> list[Action]:
        """A part touches no engine's pages through its own books: its slots simply wait for the last send to end."""
        return []

    def _after_reads(self, newly_lost: Sequence[int]) -> list[Action]:
        match self.state:
            case PartState.READING:
                return self._decide_prefix()
            case PartState.SENDING:
                lost = min(newly_lost, default=self.blocks)
                return self._due() if lost >= self.prefix_blocks else self._cut(lost)
            case _:
                # It may be of no account: the first credit says what the prefix is.
                return []

    def _cut(self, lost: int) -> list[Action]:
        """A block of the prefix is gone whose first layers were there."""
        text = f"block {lost} was lost after its first layers: {self.reads.lost[lost].name}"
        return self._stopped(End(Reason.PREFIX_CUT, text, prefix_blocks=lost))

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
            return told + self._ended(End(Reason.OK))
        if self.holds:
            self.state = PartState.HOLDING
            return told
        return told + self._send()

    def _agree(self, prefix_blocks: int, layers: int) -> list[Action]:
        """The first credit of a part that holds. One for more than is good is none."""
        if prefix_blocks > self.prefix_blocks:
            return []
        self.prefix_blocks = prefix_blocks
        if not prefix_blocks:
            return self._ended(End(Reason.OK))
        self._credit(prefix_blocks, layers)
        lost = min(self.reads.lost, default=self.blocks)
        return self._send() if lost >= prefix_blocks else self._cut(lost)

    def _credit(self, prefix_blocks: int, layers: int) -> None:
        if self.given is not None and prefix_blocks == self.given[0] > 0:
            layers_max = self.window.layers
        elif prefix_blocks == self.prefix_blocks:
            layers_max = self.window.layers if self.given is None else self.given[1]
        else:
            return
        self.credit_layers = max(self.credit_layers, min(layers, layers_max))

    def _send(self) -> list[Action]:
        self.state = PartState.SENDING
        return self._over_or_due()

    def _due(self) -> list[Action]:
        """Sends of layers that are granted and read, every block of the prefix. The DE buffer has room for all of them."""
        readable = self.reads.readable_layers(self.prefix_blocks)
        self.window.allow(min(self.credit_layers, readable))
        due: list[Action] = list(self.window.due())
        if self._may_assemble:
            self.assembly.allow(readable)
            due += [SendAssembly(send.layer) for send in self.assembly.due()]
        return due

    def _moved(self, window: LayerWindow, layer: int, reason: Reason, message: str) -> list[Action]:
        if layer not in window.inflight:
            return []
        if reason is not Reason.OK:
            window.lost(layer)
            return self._drained() if self.state is PartState.DRAINING else self.on_stop(reason, message)
        arrived = window.sent(layer)
        if self.state is PartState.DRAINING:
            return self._drained()
        told: list[Action] = list(arrived) if window is self.window else []
        return told + self._over_or_due()

    def _over_or_due(self) -> list[Action]:
        if self.window.complete and (self.assembly.complete or not self.assembles):
            return self._ended(End(Reason.OK, prefix_blocks=self.prefix_blocks))
        return self._due()

    def _stopped(self, end: End) -> list[Action]:
        self._end = end
        self.state = PartState.DRAINING
        return self._drained()

    def _drained(self) -> list[Action]:
        if self.window.inflight or self.assembly.inflight:
            return []
        assert self._end is not None, "draining without an end"
        return self._ended(self._end)

    def _ended(self, end: End) -> list[Action]:
        self.state = PartState.ENDED
        return [Release(), Finish(end)]


_TAKING = (PartState.READING, PartState.HOLDING, PartState.SENDING)
