"""Assemble and deliver: the decode side's DE buffer of one request, from reservation to the last stored block."""

from __future__ import annotations

import enum

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceAttached,
    AnnounceQuiet,
    AnnounceStored,
    AnnounceWhole,
    Finish,
    FinishDelivery,
    Quiesce,
    Release,
    WriteBlocks,
)
from kvmoverd.core.machines.window import Arrivals, LayerWindow
from kvmoverd.core.status import End, Reason


class AssembleState(enum.Enum):
    WAITING_ENGINE = "waiting for the decode engine"
    FILLING = "filling"
    WHOLE = "whole"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    DRAINING = "draining"
    STORING = "storing"
    UNQUIET = "unquiet"
    ENDED = "ended"


class AssembleMachine:
    """The DE buffer of `blocks` full blocks and perhaps a tail.

    It is whole when the prefix is set, every layer was pushed, each helper's part has every layer, and the hit blocks of the
    prefix that this node reads are read to their last layer, or to that from which on their rest is pushed. From then on
    nothing is lost when the engine goes: the new full blocks are stored all the same (state STORING). Slots are released when
    delivered and stored, and sent to the prefill node by all parts that this node reads: where nothing is pushed, that may be
    last.
    """

    def __init__(self, *, layers: int, blocks: int, hit_blocks: int, window_layers: int) -> None:
        self.state = AssembleState.WAITING_ENGINE
        self.hits_whole = True
        self.blocks = blocks
        self.hit_blocks = hit_blocks
        self.prefix_blocks: int | None = None
        self.pushed = Arrivals(layers)
        self.helped: dict[int, Arrivals] = {}
        self.parts: dict[int, bool] = {}
        self.delivery = LayerWindow(layers=layers, window_layers=window_layers)
        self.attached = False
        self.was_whole = False
        self.stored: dict[int, Reason] = {}
        self.writing: frozenset[int] = frozenset()
        self._delivery_open = False
        self._end: End | None = None

    def on_attached(self) -> list[Action]:
        """The decode engine waits for this request."""
        if self.state is not AssembleState.WAITING_ENGINE:
            return []
        self.attached = True
        self.state = AssembleState.FILLING
        return [AnnounceAttached(), *self._whole()]

    def on_hits_pending(self) -> list[Action]:
        """This node reads hit blocks; the buffer is not whole before `on_hits_whole`."""
        self.hits_whole = False
        return []

    def on_hits_whole(self) -> list[Action]:
        """The hit blocks of the prefix that this node reads have every layer that is not pushed, checked."""
        self.hits_whole = True
        return self._whole()

    def on_prefix(self, prefix_blocks: int, helped: int = 0, first_pushed: int = 0) -> list[Action]:
        """The prefill node says which blocks are new, and how many parts of the prefix come from third nodes.

        `first_pushed`: it has nothing to push of the layers before that; where this node has or reads all blocks to their last
        layer, that is their number. Raises `BadRequest` for another prefix than before.
        """
        if prefix_blocks > self.hit_blocks:
            raise BadRequest(f"prefix of {prefix_blocks} blocks set, {self.hit_blocks} are hits")
        if self.prefix_blocks is not None:
            if prefix_blocks != self.prefix_blocks:
                raise BadRequest(f"prefix set to {prefix_blocks} blocks, it is {self.prefix_blocks} already")
            return []
        self.prefix_blocks = prefix_blocks
        self.helped = {part: Arrivals(self.pushed.layers) for part in range(helped)}
        if first_pushed:
            self.pushed = Arrivals(self.pushed.layers, first_pushed)
        return self._whole()

    def on_rest(self, first_layer: int) -> list[Action]:
        """From that layer on the prefill node pushes blocks that this node was to read; of these layers none was pushed yet.

        After `on_prefix`, which says so of what is known by then.
        """
        if self.state in FILLING and first_layer < self.pushed.in_order:
            self.pushed = Arrivals(self.pushed.layers, first_layer)
        return []

    def on_layer(self, layer: int) -> list[Action]:
        """A pushed layer was applied in the DE buffer."""
        self.pushed.add(layer)
        return self._whole()

    def on_helped_layer(self, part: int, layer: int) -> list[Action]:
        """A layer of a third node's part was applied in the DE buffer; parts are counted in the order of `on_prefix`."""
        if part in self.helped:
            self.helped[part].add(layer)
        return self._whole()

    def on_taken_over(self, part: int) -> list[Action]:
        """This node reads a third node's part itself from now on; `on_hits_whole` says when it has."""
        return self.on_hits_pending() if self.helped.pop(part, None) is not None else []

    def on_part_begun(self, part: int) -> list[Action]:
        """This node sends a part of the hit blocks to the prefill node; no two have the same number."""
        self.parts.setdefault(part, False)
        return []

    def on_part_over(self, part: int) -> list[Action]:
        """One of these parts has ended."""
        if part in self.parts:
            self.parts[part] = True
        return self._settled()

    @property
    def received(self) -> bool:
        """Has everything come that other nodes send?"""
        helped = all(part.complete for part in self.helped.values())
        return self.prefix_blocks is not None and self.pushed.complete and helped

    def on_deliver(self) -> list[Action]:
        """The engine gave pages. Raises `NotWhole` before the buffer is whole, `UnknownRequest` once it was delivered."""
        if self.state in FILLING:
            raise NotWhole(
                f"the DE buffer is {self.state.value}: {self.pushed.in_order} of {self.pushed.layers} layers are in"
            )
        if self.state is not AssembleState.WHOLE:
            raise UnknownRequest(f"the DE buffer is {self.state.value}: delivered already, or its request is over")
        self.state = AssembleState.DELIVERING
        self._delivery_open = True
        self.delivery.allow(self.delivery.layers)
        return list(self.delivery.due())

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer was copied into the engine's pages, or not."""
        if layer not in self.delivery.inflight:
            return []
        if self.state in (AssembleState.DRAINING, AssembleState.UNQUIET):
            self.delivery.lost(layer)
            return self._drained()
        if reason is not Reason.OK:
            self.delivery.lost(layer)
            return self.on_stop(reason, message)
        told: list[Action] = list(self.delivery.sent(layer))
        if not self.delivery.complete:
            return told + list(self.delivery.due())
        self.state = AssembleState.DELIVERED
        self._delivery_open = False
        return [*told, FinishDelivery(End(Reason.OK, prefix_blocks=self.blocks)), *self._settled()]

    def on_written(self, block: int, reason: Reason) -> list[Action]:
        """A new block is durable, or was given up."""
        if block in self.writing:
            self.stored.setdefault(block, reason)
        return self._settled()

    def on_stop(self, reason: Reason, message: str = "", good_blocks: int = 0) -> list[Action]:
        """Cancel, deadline, death of engine or peer, a higher attempt, shutdown. `good_blocks`: what a cut left good."""
        if self.state in (AssembleState.DRAINING, AssembleState.STORING, AssembleState.UNQUIET, AssembleState.ENDED):
            return []
        self._end = End(reason, message, prefix_blocks=good_blocks)
        self.state = AssembleState.DRAINING
        if self.delivery.inflight:
            return [Quiesce()]
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        """Copies into the pages did not end in time."""
        if self.state is not AssembleState.DRAINING:
            return []
        self.state = AssembleState.UNQUIET
        return self._told(pages_quiet=False)

    def _whole(self) -> list[Action]:
        if self.state is not AssembleState.FILLING or self.prefix_blocks is None:
            return []
        if not (self.received and self.hits_whole):
            return []
        self.state, self.was_whole = AssembleState.WHOLE, True
        new = tuple(range(self.prefix_blocks, self.blocks))
        self.writing = frozenset(new)
        told: list[Action] = [AnnounceWhole(self.prefix_blocks)]
        return [*told, WriteBlocks(new)] if new else told

    def _drained(self) -> list[Action]:
        if self.delivery.inflight:
            return []
        told = [AnnounceQuiet()] if self.state is AssembleState.UNQUIET else self._told(pages_quiet=True)
        self.state = AssembleState.STORING
        return [*told, *self._settled()]

    def _told(self, *, pages_quiet: bool) -> list[Action]:
        assert self._end is not None, "draining without an end"
        end = End(self._end.reason, self._end.message, pages_quiet=pages_quiet, prefix_blocks=self._end.prefix_blocks)
        return [FinishDelivery(end), Finish(end)] if self._delivery_open else [Finish(end)]

    def _settled(self) -> list[Action]:
        """Ends when nothing is owed any more: delivered and sent (or given up), and every write has an outcome."""
        if self.state not in (AssembleState.DELIVERED, AssembleState.STORING) or len(self.stored) < len(self.writing):
            return []
        delivered = self.state is AssembleState.DELIVERED
        if delivered and not all(self.parts.values()):
            return []
        self.state = AssembleState.ENDED
        told: list[Action] = [Release()]
        if delivered:
            durable = sum(reason is Reason.OK for reason in self.stored.values())
            told.append(AnnounceStored(durable, len(self.writing) - durable))
            told.append(Finish(End(Reason.OK, prefix_blocks=self.blocks)))
        return told


FILLING = (AssembleState.WAITING_ENGINE, AssembleState.FILLING)
"""States in which the buffer is not whole yet."""
