"""One reader's part of a stream, as the stream's owner sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmoverd.core.machines.window import Arrivals
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome


@dataclass(eq=False, slots=True)
class StreamPart:
    """What one reader has to bring. `prefix` and `granted_blocks` are counted among its own blocks; None: not known yet.

    `holds`: it sends nothing before its first grant. `moving_to`: who takes what it is asked to give up. `fenced`: nothing of
    it may land any more, and another reader follows when that is sure. `refused`: nodes that could not read these blocks.
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

    @property
    def count(self) -> int:
        return self.share.blocks.count

    @property
    def may_give(self) -> bool:
        """Are there blocks that it may still be asked for?"""
        return self.prefix is None and not self.moving_to and not self.fenced and self.count > 0

    @property
    def sends_blocks(self) -> int:
        """How many blocks each of its layers has; 0 while it may not send."""
        if self.granted_blocks is not None:
            return self.granted_blocks
        return 0 if self.holds else self.count if self.prefix is None else self.prefix

    def lost_block(self) -> int | None:
        """Index of its first block that is not good; None: it knows of none."""
        return self.share.blocks.at(self.prefix) if self.prefix is not None and self.prefix < self.count else None
