"""Where the slices of a layer lie: in an engine's pages and in pool slots, as arrays of offsets and lengths.

Canonical order of a layer's bytes: block by block, segment by segment, token by token. Sender and receiver agree on this
order alone; how each cuts it into slices is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmoverd.core.errors import BadPages, BadRegion
from kvmoverd.core.layout import Layout

U64: TypeAlias = npt.NDArray[np.uint64]
Slices: TypeAlias = tuple[U64, U64, npt.NDArray[np.int64]]
"""Offsets, lengths in bytes, and for each slice the index of its base."""

PAGES_MAX = 1 << 24
UNEQUAL_PAIRS_MAX = 100_000
"""Pairs of intertwined segments of unequal strides that are compared, at some 10 us each: engines have none at all."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of equal pages: page i lies at base_bytes + i * page_stride_bytes."""

    base_bytes: int
    page_stride_bytes: int
    page_bytes: int
    pages: int

    @property
    def end_bytes(self) -> int:
        return self.base_bytes + (self.pages - 1) * self.page_stride_bytes + self.page_bytes


class RegionGeometry:
    """Layout of an engine's region, checked at construction. Raises `BadRegion` with the numbers that do not fit."""

    def __init__(self, layout: Layout, size_bytes: int, layers: tuple[tuple[Segment, ...], ...]) -> None:
        self.layout = layout
        self.size_bytes = size_bytes
        self.layers = layers
        self.is_ring = len(layers) == 1 and layout.layer_count > 1
        _check_layer_count(layout, layers)
        self.pages_per_block = _pages_per_block(layout, layers)
        for layer, segments in enumerate(layers):
            for segment in segments:
                _check_bounds(layer, segment, size_bytes)
        _check_disjoint([segment for segments in layers for segment in segments])
        self.pages = min(segment.pages for segments in layers for segment in segments)
        of_block = [one for at in range(layout.layer_count) for one in layers[0 if self.is_ring else at]]
        self._bases = _column(one.base_bytes for one in of_block)
        self._strides = _column(one.page_stride_bytes for one in of_block)
        self._lengths = _column(one.page_bytes for one in of_block)

    def check_pages(self, pages: npt.NDArray[np.uint32], needed: int) -> None:
        """Raises `BadPages` unless these are `needed` distinct pages of the region."""
        if len(pages) != needed:
            raise BadPages(f"{len(pages)} pages are given, {needed} are needed", given=len(pages), needed=needed)
        if needed and int(pages.max()) >= self.pages:
            raise BadPages(f"page {int(pages.max())} is out of bounds, the region has {self.pages}", pages=self.pages)
        distinct = distinct_pages(pages)
        if distinct != needed:
            raise BadPages(f"{needed - distinct} of {needed} pages are given more than once")

    def only_segment(self, layer: int) -> Segment | None:
        """The layer's segment where it has one: its pages are its slices then."""
        segments = self.layers[0 if self.is_ring else layer]
        return segments[0] if len(segments) == 1 else None

    def region_slices(
        self, layer: int, pages: npt.NDArray[np.uint32], blocks: int, tail_tokens: int
    ) -> tuple[U64, U64]:
        """Offsets from the region's base and lengths, canonical order. `tail_tokens`: the last block is partial."""
        per_block = self.pages_per_block
        segments = self.layers[0 if self.is_ring else layer]
        by_block = pages.astype(np.uint64).reshape(blocks, per_block)
        offsets = np.empty((blocks, len(segments), per_block), dtype=np.uint64)
        lengths = np.empty((blocks, len(segments), per_block), dtype=np.uint64)
        for index, segment in enumerate(segments):
            offsets[:, index, :] = by_block * np.uint64(segment.page_stride_bytes) + np.uint64(segment.base_bytes)
            lengths[:, index, :] = segment.page_bytes
            if tail_tokens:
                whole = self.layout.layers[layer][index]
                left = self.layout.tail_bytes(whole, tail_tokens) - np.arange(per_block) * segment.page_bytes
                lengths[-1, index, :] = np.clip(left, 0, segment.page_bytes)
        flat = offsets.reshape(-1), lengths.reshape(-1)
        return _without_empty(*flat) if tail_tokens else flat

    def block_slices(self, pages: npt.NDArray[np.uint32], blocks: int) -> tuple[U64, U64]:
        """Offsets and lengths as of `region_slices`, but of whole blocks: all layers of a block before the next block.

        Shapes (blocks, segments of a block, pages), and what goes with it.
        """
        by_block = pages.astype(np.uint64).reshape(blocks, 1, self.pages_per_block)
        return by_block * self._strides + self._bases, self._lengths


def _column(numbers: Iterable[int]) -> U64:
    return np.fromiter(numbers, np.uint64)[:, np.newaxis]


def distinct_pages(pages: npt.NDArray[np.uint32]) -> int:
    """How many different numbers there are. Sorting is ten times as quick as `np.unique` for the pages of a request."""
    if not len(pages):
        return 0
    found = np.sort(pages)
    return 1 + int(np.count_nonzero(found[1:] != found[:-1]))


def layer_slices(layout: Layout, layer: int, blocks: int, tail_tokens: int) -> Slices:
    """Slices of a layer in slots, canonical order: offsets from each block's payload, lengths, index of the block.

    A whole block is one slice; a partial one has a slice for each segment.
    """
    start, size = layout.layer_offsets[layer], layout.layer_bytes[layer]
    whole = blocks - (tail_tokens > 0)
    offsets = np.full(whole, start, dtype=np.uint64)
    lengths = np.full(whole, size, dtype=np.uint64)
    owners = np.arange(whole)
    if not tail_tokens:
        return offsets, lengths, owners
    parts = layout.layers[layer]
    tail = np.asarray([layout.tail_bytes(part, tail_tokens) for part in parts], dtype=np.uint64)
    tail_offsets = np.asarray(layout.segment_offsets(layer), dtype=np.uint64)
    return (
        np.concatenate([offsets, tail_offsets]),
        np.concatenate([lengths, tail]),
        np.concatenate([owners, np.full(len(parts), whole)]),
    )


def iovec(
    bases: U64, offsets: U64, lengths: U64, owners: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.uint64]:
    """Shape (n, 2): address and length. `owners` says which base each slice counts from; None: the only one."""
    found = np.empty((len(offsets), 2), dtype=np.uint64)
    found[:, 0] = offsets + (bases[0] if owners is None else bases[owners])
    found[:, 1] = lengths
    return found


def _without_empty(offsets: U64, lengths: U64) -> tuple[U64, U64]:
    some = lengths > 0
    return offsets[some], lengths[some]


def _check_layer_count(layout: Layout, layers: Sequence[Sequence[Segment]]) -> None:
    if len(layers) not in (1, layout.layer_count):
        raise BadRegion(f"the region has {len(layers)} layers, must have {layout.layer_count}, or 1 for a ring")
    if len(layers) == 1 and len(set(layout.layers)) > 1:
        raise BadRegion("a ring region needs a layout of equal layers")
    for layer, segments in enumerate(layers):
        if len(segments) != len(layout.layers[layer]):
            raise BadRegion(f"layer {layer} has {len(segments)} segments, the layout has {len(layout.layers[layer])}")


def _pages_per_block(layout: Layout, layers: Sequence[Sequence[Segment]]) -> int:
    found = 0
    for layer, segments in enumerate(layers):
        for index, segment in enumerate(segments):
            whole = layout.layers[layer][index]
            if segment.page_bytes < 1 or whole % segment.page_bytes:
                raise BadRegion(
                    f"layer {layer} segment {index}: page_bytes {segment.page_bytes} does not divide {whole}"
                )
            per_block = whole // segment.page_bytes
            if found and per_block != found:
                raise BadRegion(f"layer {layer} segment {index} has {per_block} pages a block, others have {found}")
            found = per_block
    if layout.block_tokens % found:
        raise BadRegion(f"{found} pages a block do not divide {layout.block_tokens} tokens")
    return found


def _check_bounds(layer: int, segment: Segment, size_bytes: int) -> None:
    if not 1 <= segment.pages <= PAGES_MAX:
        raise BadRegion(f"layer {layer} has a segment of {segment.pages} pages, must be 1 to {PAGES_MAX}")
    if segment.base_bytes < 0 or segment.page_stride_bytes < segment.page_bytes:
        raise BadRegion(
            f"layer {layer}: base {segment.base_bytes} must be 0 or more and stride {segment.page_stride_bytes} "
            f"at least page_bytes {segment.page_bytes}"
        )
    if segment.end_bytes > size_bytes:
        raise BadRegion(f"layer {layer} ends at byte {segment.end_bytes}, the region has {size_bytes}")


def _check_disjoint(segments: Sequence[Segment]) -> None:
    """Segments may interleave (K and V page by page, all layers in one page), but share no byte."""
    ordered = sorted(segments, key=lambda segment: segment.base_bytes)
    bases, ends, strides, page_bytes = (
        np.asarray([getattr(segment, name) for segment in ordered], dtype=np.int64)
        for name in ("base_bytes", "end_bytes", "page_stride_bytes", "page_bytes")
    )
    unequal_left = UNEQUAL_PAIRS_MAX
    for index, segment in enumerate(ordered):
        reaching = ends[:index] > segment.base_bytes
        equal = strides[:index] == segment.page_stride_bytes
        near, others = np.flatnonzero(reaching & equal), np.flatnonzero(reaching & ~equal)
        unequal_left -= len(others)
        if unequal_left < 0:
            raise BadRegion(f"more than {UNEQUAL_PAIRS_MAX} pairs of segments of unequal strides are intertwined")
        # Of one stride: both begin anew each step, so the first step that they share shows all.
        within = (segment.base_bytes - bases[near]) % segment.page_stride_bytes
        touching = (within < page_bytes[near]) | (within > segment.page_stride_bytes - segment.page_bytes)
        clashes = [*near[touching], *(other for other in others if _share_bytes(ordered[other], segment))]
        if clashes:
            found = ordered[clashes[0]].base_bytes
            raise BadRegion(f"segments at bytes {found} and {segment.base_bytes} share bytes")


def _share_bytes(first: Segment, second: Segment) -> bool:
    """Does a page of one share a byte with a page of the other? Any strides; `first` begins no later.

    Were `first` endless, page j of `second` at distance d would touch its pages i with d - page_bytes < i * stride < d + length:
    floor((d + length - 1) / stride) - floor((d - page_bytes) / stride) of them, summed over j without looking at each.
    """
    stride, distance = first.page_stride_bytes, second.base_bytes - first.base_bytes
    last_byte = distance + second.page_bytes - 1
    inside = -((last_byte - first.pages * stride) // second.page_stride_bytes)
    inside = min(max(inside, 0), second.pages)
    # One stride is added on both sides: it keeps the numerators from being negative.
    up_to = _floor_sum(inside, stride, second.page_stride_bytes, last_byte + stride)
    before = _floor_sum(inside, stride, second.page_stride_bytes, distance - first.page_bytes + stride)
    if up_to > before:
        return True
    beyond = distance + inside * second.page_stride_bytes
    return inside < second.pages and beyond < (first.pages - 1) * stride + first.page_bytes


def _floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """Sum of floor((step * i + start) / divisor) for i in [0, count), in logarithmic time. Nothing may be negative.

    Source: floor_sum of the AtCoder Library.

    >>> _floor_sum(4, 10, 6, 3), sum((6 * i + 3) // 10 for i in range(4))
    (3, 3)
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        top = step * count + start
        if top < divisor:
            return total
        count, start = divmod(top, divisor)
        divisor, step = step, divisor
