"""One reader's part of a stream, as the stream's owner sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmoverd.core.machines.window import Arrivals
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome


@dataclass(eq=False, slots=True)
class StreamPart:
    """What one reader has to bring. `prefix` and `granted_blocks` are counted among its own blocks; None: not known yet.

    `holds`: it sends nothing before its first grant. `moving_to`: who takes what it is asked to give up. `fenced`: nothing of
    it may land any more, and another reader follows when that is sure. `refused`: nodes that could not read these blocks.

    `rest_to`: who takes the rest that it is asked for, once ever. `kept_blocks`: what it brings of the layers from `cut_layer`
    on, once it has given the others' rest. `giver`: of a rest, the node that gave it; `is_helpers`: a third node reads it.
    """

    part: int
    share: Share
    first_layer: int
    holds: bool
    arrived: Arrivals
    refused: frozenset[str] = frozenset()
    prefix: int | None = None
    first_lost: BlockOutcome | None = None
    granted_blocks: int | None = None
    moving_to: str = ""
    fenced: bool = False
    ended: bool = False
    is_helpers: bool = False
    giver: str = ""
    rest_to: str = ""
    rest_asked: bool = False
    kept_blocks: int | None = None
    cut_layer: int = 0

    @property
    def count(self) -> int:
        return self.share.blocks.count

    @property
    def may_give(self) -> bool:
        """Are there blocks that it may still be asked for?"""
        return self.prefix is None and not self.moving_to and not self.fenced and self.count > 0

    @property
    def rest(self) -> bool:
        """Is it what another part gave of its last blocks, from some layer on?"""
        return bool(self.giver)

    @property
    def may_give_rest(self) -> bool:
        """May it be asked for the layers that no device reads yet? Nobody is who has replaced another reader."""
        is_asked = self.rest_asked or self.rest or self.is_helpers or bool(self.refused)
        return bool(self.granted_blocks) and not is_asked and not self.fenced and not self.ended and self.owes_layers

    @property
    def owes_layers(self) -> bool:
        """Is there a layer of which nothing has come yet?"""
        return self.arrived.stop < self.arrived.layers

    @property
    def ready_layers(self) -> int:
        """Leading layers of which it owes nothing any more."""
        is_over = self.kept_blocks == 0 and self.arrived.in_order >= self.cut_layer
        return self.arrived.layers if is_over else self.arrived.in_order

    def ask_for_rest(self, kept_blocks: int, to_node: str) -> bool:
        """May it be asked for the rest of all but its first blocks, for that node? Then it is."""
        if not self.may_give_rest or kept_blocks >= (self.granted_blocks or 0) or to_node in ("", self.share.node):
            return False
        self.rest_to, self.rest_asked = to_node, True
        return True

    def give_rest(self, kept_blocks: int, first_layer: int) -> Runs | None:
        """It goes on without the layers from `first_layer` on of all but its first blocks: these others. None: it can't."""
        count = self.granted_blocks or 0
        if not 0 <= kept_blocks < count or not self.arrived.stop <= first_layer < self.arrived.layers:
            return None
        self.kept_blocks, self.cut_layer = kept_blocks, first_layer
        return self.share.blocks.head(count).tail(kept_blocks)

    def blocks_at(self, layer: int) -> int:
        """How many blocks this layer has; 0 while, or when, it may not be sent."""
        is_kept = self.kept_blocks is not None and layer >= self.cut_layer
        return self.kept_blocks or 0 if is_kept else self.sends_blocks

    @property
    def sends_blocks(self) -> int:
        """How many blocks each of its layers has, unless it gave their rest; 0 while it may not send."""
        if self.granted_blocks is not None:
            return self.granted_blocks
        return 0 if self.holds else self.count if self.prefix is None else self.prefix

    def lost_block(self) -> int | None:
        """Index of its first block that is not good; None: it knows of none."""
        return self.share.blocks.at(self.prefix) if self.prefix is not None and self.prefix < self.count else None
