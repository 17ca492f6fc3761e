"""Shape of a Full Block: which bytes belong to which layer and segment. Sizes in bytes, offsets from the block's start."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvmoverd.core.errors import BadLayout

BLOCK_TOKENS_MAX = 4096
LAYERS_MAX = 512
SEGMENTS_MAX = 8
SEGMENT_BYTES_MAX = 1 << 30
ALIGN_BYTES = 4096
HEADER_BYTES = 4096


def padded(size_bytes: int) -> int:
    """Rounds up to the alignment that O_DIRECT may ask for.

    >>> padded(2_561_024)
    2564096
    """
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Layout:
    """A list of layers, each a tuple of segment sizes in bytes per whole block.

    A Layer Block is its segments one after the other; a Full Block is its Layer Blocks one after the other. Raises
    `BadLayout` for sizes outside the bounds.
    """

    block_tokens: int
    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise BadLayout(f"block_tokens is {self.block_tokens}, must be 1 to {BLOCK_TOKENS_MAX}")
        if not 1 <= len(self.layers) <= LAYERS_MAX:
            raise BadLayout(f"the layout has {len(self.layers)} layers, must be 1 to {LAYERS_MAX}")
        for layer, segments in enumerate(self.layers):
            _check_segments(layer, segments)

    @classmethod
    def uniform(cls, *, layers: int, tokens: int, token_bytes: int) -> Layout:
        """All layers alike, one segment each: the layout of a latent cache such as MLA's."""
        return cls(block_tokens=tokens, layers=((tokens * token_bytes,),) * layers)

    @cached_property
    def layer_count(self) -> int:
        return len(self.layers)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of each Layer Block."""
        return tuple(sum(segments) for segments in self.layers)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each Layer Block in its Full Block."""
        return tuple(_running(self.layer_bytes))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a Full Block, without padding.

        >>> Layout.uniform(layers=61, tokens=64, token_bytes=656).block_bytes
        2561024
        """
        return sum(self.layer_bytes)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a stored record, and of a pool slot: the header page and the padded payload."""
        return HEADER_BYTES + padded(self.block_bytes)

    def layer_span(self, layer: int) -> range:
        """Bytes of one Layer Block inside its Full Block.

        >>> Layout.uniform(layers=4, tokens=2, token_bytes=8).layer_span(1)
        range(16, 32)
        """
        start = self.layer_offsets[layer]
        return range(start, start + self.layer_bytes[layer])

    def read_span(self, first_layer: int, stop_layer: int) -> range:
        """Bytes of a record that a read of layers [first_layer, stop_layer) moves, when the layers before it have been read.

        Whole pages, as O_DIRECT wants them: the page that two ranges share comes with the first of them, the header page
        with layer 0, the padding with the last layer. Spans of ranges that follow each other do not overlap.

        >>> layout = Layout.uniform(layers=61, tokens=64, token_bytes=656)
        >>> layout.read_span(0, 13), layout.read_span(13, 61)
        (range(0, 552960), range(552960, 2568192))
        """
        return range(self._page_ends[first_layer], self._page_ends[stop_layer])

    def rest_span(self, first_layer: int, stop_layer: int) -> range:
        """As `read_span`, where nothing before `first_layer` has been read: the page that it shares with them comes, too.

        >>> layout = Layout.uniform(layers=61, tokens=64, token_bytes=656)
        >>> layout.rest_span(13, 61), layout.rest_bytes(13)
        (range(548864, 2568192), 2023424)
        """
        begins_at = HEADER_BYTES + self.layer_offsets[first_layer]
        return range(begins_at - begins_at % ALIGN_BYTES, self._page_ends[stop_layer])

    def rest_bytes(self, first_layer: int) -> int:
        """Bytes that move when only layers from `first_layer` on are read: these, and the header page for their checksums."""
        return HEADER_BYTES + len(self.rest_span(first_layer, self.layer_count))

    def range_stop(self, first_layer: int, range_bytes: int) -> int:
        """Where a range of at least `range_bytes` that begins at `first_layer` ends; what would be left is never smaller.

        >>> layout = Layout.uniform(layers=61, tokens=64, token_bytes=656)
        >>> layout.range_stop(0, 512 << 10), layout.range_stop(13, 512 << 10), layout.range_stop(39, 512 << 10)
        (13, 26, 61)
        """
        start = self.layer_offsets[first_layer]
        stop = bisect.bisect_left(self.layer_offsets, start + range_bytes)
        if stop >= self.layer_count or self.block_bytes - self.layer_offsets[stop] < range_bytes:
            return self.layer_count
        return stop

    @cached_property
    def _page_ends(self) -> tuple[int, ...]:
        """End of the last page that layers [0, n) touch in the record, for each n."""
        between = [HEADER_BYTES + padded(offset) for offset in self.layer_offsets[1:]]
        return (0, *between, self.record_bytes)

    def segment_offsets(self, layer: int) -> tuple[int, ...]:
        """Offset of each segment of a layer in its Full Block."""
        start = self.layer_offsets[layer]
        return tuple(start + offset for offset in _running(self.layers[layer]))

    def tail_bytes(self, segment_bytes: int, tokens: int) -> int:
        """Bytes that the first `tokens` tokens take in a segment; rounds up where rows span several tokens.

        >>> Layout.uniform(layers=1, tokens=64, token_bytes=656).tail_bytes(41_984, 3)
        1968
        """
        return -(-segment_bytes * tokens // self.block_tokens)


def _check_segments(layer: int, segments: Sequence[int]) -> None:
    if not 1 <= len(segments) <= SEGMENTS_MAX:
        raise BadLayout(f"layer {layer} has {len(segments)} segments, must be 1 to {SEGMENTS_MAX}")
    for size_bytes in segments:
        if not 1 <= size_bytes <= SEGMENT_BYTES_MAX:
            raise BadLayout(f"layer {layer} has a segment of {size_bytes} bytes, must be 1 to {SEGMENT_BYTES_MAX}")


def _running(sizes: Sequence[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets
