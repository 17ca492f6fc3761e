"""What a request knows of the blocks it reads, which come range of layers by range of layers."""

from __future__ import annotations

from collections.abc import Iterable

from kvmoverd.core.status import Reason


class BlockReads:
    """`blocks` blocks of `layers` layers. Each is unknown, then begun (some leading layers are there) or lost.

    >>> reads = BlockReads(blocks=2, layers=3)
    >>> reads.went_on([(0, 2), (1, 1)])
    >>> reads.unknown_blocks, reads.readable_layers(2)
    (0, 1)
    """

    def __init__(self, *, blocks: int, layers: int) -> None:
        self.blocks = blocks
        self.layers = layers
        self.unknown_blocks = blocks
        self.lost: dict[int, Reason] = {}
        self._read_layers = [0] * blocks
        self._kept_blocks, self._rest_layer = blocks, layers
        self._whole_blocks = 0
        self._readable = 0
        self._counted_blocks = -1
        self._short_blocks = 0

    @property
    def ended_blocks(self) -> int:
        """Blocks that are whole or lost."""
        return self._whole_blocks + len(self.lost)

    def ended(self, outcomes: Iterable[tuple[int, Reason]]) -> list[int]:
        """Reads ended, each with its reason (OK: whole and checked). The first outcome of a block counts; the newly lost ones."""
        newly_lost = []
        for block, reason in outcomes:
            if block >= self.blocks:
                continue
            if reason is Reason.OK:
                self._read_to(block, self.layers)
            elif block not in self.lost and self._read_layers[block] < self.layers:
                self.lost[block] = reason
                self.unknown_blocks -= not self._read_layers[block]
                self._counted_blocks = -1
                newly_lost.append(block)
        return newly_lost

    def went_on(self, progress: Iterable[tuple[int, int]]) -> None:
        """Blocks that go on being read, each with the number of leading layers that are there, checked."""
        for block, layers in progress:
            self._read_to(block, layers)

    def keep(self, blocks: int) -> None:
        """Only the first `blocks` blocks are read on; what is said of the others counts no more."""
        for block in range(blocks, self.blocks):
            is_lost = block in self.lost
            self.unknown_blocks -= not (is_lost or self._read_layers[block])
            self._whole_blocks -= not is_lost and self._read_layers[block] == self.layers
        self.lost = {block: reason for block, reason in self.lost.items() if block < blocks}
        del self._read_layers[blocks:]
        self.blocks = blocks
        self._counted_blocks = -1

    def give_rest(self, kept_blocks: int, first_layer: int) -> None:
        """Blocks from `kept_blocks` on are read to layers [0, first_layer) and no further: with these they are whole here."""
        self._kept_blocks, self._rest_layer = kept_blocks, first_layer
        self._counted_blocks = -1
        for block in range(kept_blocks, self.blocks):
            self._read_to(block, self._read_layers[block])

    def readable_layers(self, blocks: int) -> int:
        """Leading layers that all of the first `blocks` blocks have which are not lost; all of them when none is left.

        Counts again only after the shortest have all grown: many blocks make many small steps.
        """
        if self._short_blocks and self._counted_blocks == blocks:
            return self._readable
        lengths = [layers for block, layers in enumerate(self._read_layers[:blocks]) if block not in self.lost]
        self._readable = min(lengths, default=self.layers)
        self._short_blocks = lengths.count(self._readable)
        self._counted_blocks = blocks
        return self._readable

    def _read_to(self, block: int, layers: int) -> None:
        if block >= self.blocks:
            return
        before = self._read_layers[block]
        if block >= self._kept_blocks and layers >= self._rest_layer:
            layers = self.layers
        if layers <= before or block in self.lost:
            return
        self._read_layers[block] = layers
        self._whole_blocks += layers == self.layers
        self.unknown_blocks -= not before
        if before == self._readable and block < self._counted_blocks:
            self._short_blocks -= 1
