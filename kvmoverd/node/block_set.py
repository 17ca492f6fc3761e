"""Block set: the blocks of one request that come from storage, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.node.pool import SizeClass
from kvmoverd.node.slices import Addresses

Outcomes = list[tuple[int, Reason]]
"""Blocks whose read ended: index in the request, and how."""
Progress = list[tuple[int, int]]
"""Blocks that go on being read: index in the request, and how many leading layers are there, checked."""


@dataclass(eq=False)
class BlockSet:
    """The blocks of one request that come from storage: their slots and what is known of each."""

    waiter: int
    size_class: SizeClass
    slots: list[int]
    outcomes: dict[int, Reason] = field(default_factory=dict)
    progress: dict[int, int] = field(default_factory=dict)
    read_bytes: int = 0
    reading_blocks: int = 0
    begun_blocks: int = 0
    """Leading blocks found to be begun, by `BlockReader.begun`."""
    may_give: bool = True
    """Whether `BlockReader.give_rest` may find something to give: a set gives once, and the rest of others' blocks never."""
    _on_blocks: list[Callable[[Outcomes], None]] = field(default_factory=list)
    _on_layers: list[Callable[[Progress], None]] = field(default_factory=list)
    _new_outcomes: Outcomes = field(default_factory=list)
    _new_progress: Progress = field(default_factory=list)

    def payloads(self) -> Addresses:
        """Payload address of each block; valid where the outcome is OK, until the set is released."""
        return self.size_class.addresses(self.slots) + np.uint64(HEADER_BYTES)

    def begun_prefix(self) -> int:
        """Leading blocks whose first layers are there; those lost since are not."""
        return next((block for block in range(len(self.slots)) if not self._begun(block)), len(self.slots))

    def whole_prefix(self) -> int:
        """Leading blocks that are there to the last layer."""
        outcomes = self.outcomes
        return next((n for n in range(len(self.slots)) if outcomes.get(n) is not Reason.OK), len(self.slots))

    def listen(
        self, on_blocks: Callable[[Outcomes], None], on_layers: Callable[[Progress], None] | None = None
    ) -> None:
        """Tells what is known already, then the rest as it comes: many blocks at a time, each outcome once.

        What was lost is told before what goes on: slots of lost blocks are given up already, and may be others' by now.
        """
        self.tell()
        self._on_blocks.append(on_blocks)
        if on_layers is not None:
            self._on_layers.append(on_layers)
        if self.outcomes:
            on_blocks(list(self.outcomes.items()))
        if self.progress and on_layers in self._on_layers:
            on_layers(list(self.progress.items()))

    def ended(self, indexes: Sequence[int], reason: Reason) -> None:
        """Reads ended; told with the next `tell`."""
        for index in self._mine(indexes):
            self.outcomes[index] = reason
            self._new_outcomes.append((index, reason))

    def went_on(self, indexes: Sequence[int], layers: int) -> None:
        """As `ended`, for blocks that have so many layers now."""
        for index in self._mine(indexes):
            self.progress[index] = layers
            self._new_progress.append((index, layers))

    def keep(self, blocks: int) -> None:
        """The set is its first `blocks` blocks from now on; nothing is told of the others any more."""
        del self.slots[blocks:]
        self.outcomes = {index: reason for index, reason in self.outcomes.items() if index < blocks}
        self.progress = {index: layers for index, layers in self.progress.items() if index < blocks}
        self._new_outcomes = [(index, reason) for index, reason in self._new_outcomes if index < blocks]
        self._new_progress = [(index, layers) for index, layers in self._new_progress if index < blocks]
        self.begun_blocks = min(self.begun_blocks, blocks)

    def tell(self) -> None:
        outcomes, self._new_outcomes = self._new_outcomes, []
        progress, self._new_progress = self._new_progress, []
        for on_blocks in list(self._on_blocks) if outcomes else ():
            on_blocks(outcomes)
        for on_layers in list(self._on_layers) if progress else ():
            on_layers(progress)

    def deafen(self) -> None:
        self._on_blocks.clear()
        self._on_layers.clear()

    def _mine(self, indexes: Sequence[int]) -> Sequence[int]:
        """Without those of blocks that were given up: equal keys share a slot, which one of them may have kept."""
        if indexes[-1] < len(self.slots):
            return indexes
        return [index for index in indexes if index < len(self.slots)]

    def _begun(self, block: int) -> bool:
        outcome = self.outcomes.get(block)
        return block in self.progress if outcome is None else outcome is Reason.OK
