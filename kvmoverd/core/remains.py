"""What a part that sends still has to read, and what of it the reader could give to another one, as seen from outside. Pure.

Blocks are read in ranges of layers, the first range of all blocks before the next. What the reader really gives is for it to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmoverd.core.layout import Layout


@dataclass(frozen=True, slots=True)
class Remains:
    """`left_bytes`: what the part has to read. `gifts`: what it could give, one or the other: so many of its last blocks, and the
    bytes of each that it leaves out then."""

    left_bytes: int
    gifts: tuple[tuple[int, int], ...] = ()

    @property
    def most_bytes(self) -> int:
        """The most that it could give."""
        return max((blocks * block_bytes for blocks, block_bytes in self.gifts), default=0)

    def gift(self, wanted_bytes: float, blocks_max: int) -> tuple[int, int]:
        """Blocks, and bytes of each: as near to the wanted bytes as it comes, and not above; as few blocks as will do.

        >>> remains = Remains(300, ((10, 20), (30, 8)))
        >>> remains.gift(110, 99), remains.gift(230, 99), remains.gift(230, 12)
        ((5, 20), (28, 8), (10, 20))
        """
        best = 0, 0
        for blocks, size_bytes in self.gifts:
            wanted = int(wanted_bytes // size_bytes)
            if wanted <= min(blocks, blocks_max):
                return wanted, size_bytes
            best = max(best, (min(blocks, blocks_max), size_bytes), key=lambda gift: gift[0] * gift[1])
        return best


@dataclass(frozen=True, slots=True)
class Extent:
    """What a part reads: layers from `first_layer` on of its first `kept_blocks` blocks; of the others up to `stop_layer`."""

    blocks: int
    kept_blocks: int
    first_layer: int
    stop_layer: int

    def bytes_from(self, layout: Layout, layer: int) -> int:
        """Bytes of records from that layer on.

        >>> layout = Layout.uniform(layers=4, tokens=64, token_bytes=64)
        >>> Extent(blocks=10, kept_blocks=4, first_layer=0, stop_layer=2).bytes_from(layout, 1) // 4096
        18
        """
        first, count = max(layer, self.first_layer), layout.layer_count
        whole = len(layout.read_span(first, count)) if first < count else 0
        cut = len(layout.read_span(first, self.stop_layer)) if first < self.stop_layer else 0
        return self.kept_blocks * whole + (self.blocks - self.kept_blocks) * cut


def remains_of(layout: Layout, *, blocks: int, left_bytes: int, range_bytes: int) -> Remains:
    """Of a part of whole blocks that has `left_bytes` of all its bytes to read. `range_bytes`: the shortest range.

    Of those blocks that are not in the present range yet it could give all from there on; of all blocks what comes after it. With
    other requests beside it a reader takes longer ranges, and its device is ahead of what is known here.
    """
    record_bytes = layout.record_bytes
    read_bytes = blocks * record_bytes - left_bytes
    if blocks <= 0 or left_bytes <= 0:
        return Remains(0)
    for first_bytes, stop_bytes in _ranges(layout, range_bytes):
        begun = max(0, -(-(read_bytes - blocks * first_bytes) // (stop_bytes - first_bytes)))
        if begun < blocks:
            gifts = ((blocks - begun, record_bytes - first_bytes), (blocks, record_bytes - stop_bytes))
            return Remains(left_bytes, gifts if stop_bytes < record_bytes else gifts[:1])
    return Remains(left_bytes)


def _ranges(layout: Layout, range_bytes: int) -> Iterator[tuple[int, int]]:
    """Where in a record each range begins and ends, but for the first, which every block has when a part sends."""
    first = 0
    while first < layout.layer_count:
        stop = layout.range_stop(first, max(range_bytes, layout.layer_offsets[first]))
        begin, end = (layout.read_span(0, layer).stop for layer in (first, stop))
        if first and begin < end:
            # Small layers share pages: a range may have no page of its own.
            yield begin, end
        first = stop
