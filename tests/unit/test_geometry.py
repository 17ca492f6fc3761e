"""Slices of layers in regions and slots, against a reference that walks byte by byte."""

from __future__ import annotations

import doctest
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np
import pytest

from kvmoverd.core import geometry as geometry_module
from kvmoverd.core.errors import BadPages, BadRegion
from kvmoverd.core.geometry import RegionGeometry, Segment, _share_bytes, iovec, layer_slices
from kvmoverd.core.layout import Layout

LATENT = Layout.uniform(layers=2, tokens=4, token_bytes=2)
"""Two layers of one segment of 8 bytes."""


@dataclass(frozen=True)
class Case:
    """A random region, and a request for some of its pages."""

    layout: Layout
    geometry: RegionGeometry
    pages: list[int]
    blocks: int
    tail_tokens: int


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(geometry_module).failed == 0


def region(layout: Layout, *, pages: int, per_block: int = 1, style: str = "apart") -> RegionGeometry:
    """All segments `apart`, one after the other, or `mixed`: every page of the engine holds all layers and segments."""
    sizes = [size // per_block for segments in layout.layers for size in segments]
    step, at, flat = sum(sizes), 0, []
    for size in sizes:
        flat.append(Segment(at, step if style == "mixed" else size, size, pages))
        at += size if style == "mixed" else size * pages
    rest = iter(flat)
    layers = tuple(tuple(next(rest) for _ in segments) for segments in layout.layers)
    return RegionGeometry(layout, step * pages, layers)


def random_case(random: Random) -> Case:
    per_block = random.choice([1, 2, 4])
    tokens = per_block * random.choice([1, 2, 3])
    layers = tuple(
        tuple(per_block * random.randint(1, 9) for _ in range(random.randint(1, 3)))
        for _ in range(random.randint(1, 4))
    )
    layout = Layout(tokens, layers)
    blocks = random.randint(0, 5)
    tail_tokens = random.randint(0, tokens - 1) if blocks else 0
    pages = blocks * per_block + random.randint(1, 9)
    geometry = region(layout, pages=pages, per_block=per_block, style=random.choice(["apart", "mixed"]))
    return Case(layout, geometry, random.sample(range(pages), blocks * per_block), blocks, tail_tokens)


def bytes_of_region(case: Case, layer: int) -> list[int]:
    """Offset of every byte of a layer, canonical order: block, segment, page, byte; a tail has its first bytes only."""
    found = []
    per_block = case.geometry.pages_per_block
    for block in range(case.blocks):
        for index, segment in enumerate(case.geometry.layers[layer]):
            whole = case.layout.layers[layer][index]
            is_tail = case.tail_tokens and block == case.blocks - 1
            size = case.layout.tail_bytes(whole, case.tail_tokens) if is_tail else whole
            for at in range(size):
                page = case.pages[block * per_block + at // segment.page_bytes]
                found.append(segment.base_bytes + page * segment.page_stride_bytes + at % segment.page_bytes)
    return found


def bytes_of_slots(case: Case, layer: int, payloads: list[int]) -> list[int]:
    found = []
    for block in range(case.blocks):
        for offset, whole in zip(case.layout.segment_offsets(layer), case.layout.layers[layer], strict=True):
            is_tail = case.tail_tokens and block == case.blocks - 1
            size = case.layout.tail_bytes(whole, case.tail_tokens) if is_tail else whole
            found += [payloads[block] + offset + at for at in range(size)]
    return found


def spread(table: np.ndarray) -> list[int]:
    """Address of every byte of an iovec."""
    assert table.dtype == np.uint64
    assert (table[:, 1] > 0).all(), "a slice of no bytes"
    return [at for start, size in table.tolist() for at in range(start, start + size)]


def test_slices_name_the_same_bytes_in_the_same_order_as_a_walk_byte_by_byte() -> None:
    for seed in range(400):
        case = random_case(Random(seed))
        payloads = [1_000_000 + 10_000 * block for block in range(case.blocks)]
        for layer in range(case.layout.layer_count):
            pages = np.asarray(case.pages, dtype=np.uint32)
            offsets, lengths = case.geometry.region_slices(layer, pages, case.blocks, case.tail_tokens)
            there = spread(iovec(np.full(1, 77, dtype=np.uint64), offsets, lengths))
            assert there == [77 + at for at in bytes_of_region(case, layer)], f"seed {seed}"
            slices = layer_slices(case.layout, layer, case.blocks, case.tail_tokens)
            here = spread(iovec(np.asarray(payloads, dtype=np.uint64), *slices))
            assert here == bytes_of_slots(case, layer, payloads), f"seed {seed}"
            assert len(here) == len(there), f"seed {seed}"


def test_slices_of_whole_blocks_are_those_of_their_layers_block_by_block() -> None:
    random = Random(5)
    for case in (random_case(random) for _ in range(200)):
        pages = np.asarray(case.pages[: case.blocks * case.geometry.pages_per_block], dtype=np.uint32)
        offsets, lengths = case.geometry.block_slices(pages, case.blocks)
        for block in range(case.blocks):
            per_block = case.geometry.pages_per_block
            of_block = pages[block * per_block : (block + 1) * per_block]
            layers = [case.geometry.region_slices(layer, of_block, 1, 0) for layer in range(case.layout.layer_count)]
            found = offsets[block], np.broadcast_to(lengths, offsets.shape[1:])
            for mine, theirs in zip(found, zip(*layers, strict=True), strict=True):
                assert mine.reshape(-1).tolist() == np.concatenate(theirs).tolist()


def test_a_layer_of_whole_blocks_has_one_slice_a_block_in_slots_and_one_a_page_in_the_region() -> None:
    layout = Layout(4, ((8, 16),))
    geometry = region(layout, pages=20, per_block=2)
    assert geometry.pages_per_block == 2
    offsets, _ = geometry.region_slices(0, np.arange(6, dtype=np.uint32), 3, 0)
    assert len(offsets) == 3 * 2 * 2
    slots, lengths, owners = layer_slices(layout, 0, 3, 0)
    assert (slots.tolist(), lengths.tolist(), owners.tolist()) == ([0, 0, 0], [24, 24, 24], [0, 1, 2])


def test_a_request_that_is_nothing_but_a_tail_has_only_the_tokens_that_are_valid() -> None:
    geometry = region(LATENT, pages=3)
    offsets, lengths = geometry.region_slices(1, np.asarray([2], dtype=np.uint32), 1, 3)
    assert (offsets.tolist(), lengths.tolist()) == ([3 * 8 + 2 * 8], [6])
    offsets, lengths, owners = layer_slices(LATENT, 1, 1, 3)
    assert (offsets.tolist(), lengths.tolist(), owners.tolist()) == ([8], [6], [0])


def test_offsets_beyond_32_bits_do_not_wrap() -> None:
    page_bytes = 1 << 30
    layout = Layout(1, ((page_bytes,),))
    geometry = RegionGeometry(layout, 1 << 42, ((Segment(0, page_bytes, page_bytes, 4096),),))
    offsets, _ = geometry.region_slices(0, np.asarray([4095], dtype=np.uint32), 1, 0)
    assert int(offsets[0]) == 4095 << 30
    address = iovec(np.asarray([(1 << 64) - (1 << 43)], dtype=np.uint64), offsets, offsets)[0, 0]
    assert int(address) == (1 << 64) - (1 << 43) + (4095 << 30)


def test_every_layer_of_a_ring_lies_in_the_same_pages() -> None:
    layout = Layout.uniform(layers=3, tokens=2, token_bytes=4)
    geometry = RegionGeometry(layout, 40, ((Segment(0, 8, 8, 5),),))
    assert geometry.is_ring
    pages = np.asarray([4, 1], dtype=np.uint32)
    for layer in range(3):
        assert geometry.region_slices(layer, pages, 2, 0)[0].tolist() == [32, 8]
    assert geometry.block_slices(pages, 2)[0].reshape(-1).tolist() == [32] * 3 + [8] * 3


def test_a_region_of_the_only_layer_is_no_ring() -> None:
    assert not region(Layout(2, ((8,),)), pages=3).is_ring


def test_pages_are_those_that_every_segment_has() -> None:
    layout = Layout(2, ((8, 8),))
    geometry = RegionGeometry(layout, 200, ((Segment(0, 8, 8, 10), Segment(80, 8, 8, 15)),))
    assert geometry.pages == 10


@pytest.mark.parametrize(
    ("pages", "needed", "message"),
    [
        ([0, 1], 3, "2 pages are given, 3 are needed"),
        ([0, 5], 2, "page 5 is out of bounds, the region has 5"),
        ([0, 4_294_967_295], 2, "page 4294967295 is out of bounds, the region has 5"),
        ([0, 3, 3, 0, 1], 5, "2 of 5 pages are given more than once"),
    ],
)
def test_pages_that_do_not_fit_are_refused_with_the_numbers(pages: list[int], needed: int, message: str) -> None:
    with pytest.raises(BadPages) as refused:
        region(LATENT, pages=5).check_pages(np.asarray(pages, dtype=np.uint32), needed)
    assert str(refused.value) == message


def test_pages_in_any_order_and_no_pages_at_all_are_taken() -> None:
    geometry = region(LATENT, pages=5)
    geometry.check_pages(np.asarray([4, 0, 2], dtype=np.uint32), 3)
    geometry.check_pages(np.asarray([], dtype=np.uint32), 0)


FITS = ((Segment(0, 8, 8, 2),), (Segment(16, 8, 8, 2),))


@pytest.mark.parametrize(
    ("layout", "size_bytes", "layers", "message"),
    [
        (LATENT, 99, (), "the region has 0 layers, must have 2, or 1 for a ring"),
        (LATENT, 99, FITS * 2, "the region has 4 layers, must have 2, or 1 for a ring"),
        (Layout(4, ((8,), (4,))), 99, FITS[:1], "a ring region needs a layout of equal layers"),
        (LATENT, 99, (FITS[0], ()), "layer 1 has 0 segments, the layout has 1"),
        (LATENT, 99, ((Segment(0, 8, 3, 2),), FITS[1]), "layer 0 segment 0: page_bytes 3 does not divide 8"),
        (LATENT, 99, ((Segment(0, 8, 0, 2),), FITS[1]), "layer 0 segment 0: page_bytes 0 does not divide 8"),
        (LATENT, 99, (FITS[0], (Segment(16, 8, 4, 2),)), "layer 1 segment 0 has 2 pages a block, others have 1"),
        (LATENT, 99, ((Segment(0, 1, 1, 2),), (Segment(16, 1, 1, 2),)), "8 pages a block do not divide 4 tokens"),
        (LATENT, 99, (FITS[0], (Segment(16, 8, 8, 0),)), "layer 1 has a segment of 0 pages, must be 1 to 16777216"),
        (LATENT, 31, FITS, "layer 1 ends at byte 32, the region has 31"),
        (
            LATENT,
            99,
            ((Segment(-1, 8, 8, 2),), FITS[1]),
            "base -1 must be 0 or more and stride 8 at least page_bytes 8",
        ),
        (LATENT, 99, ((Segment(0, 7, 8, 2),), FITS[1]), "base 0 must be 0 or more and stride 7 at least page_bytes 8"),
        (LATENT, 99, (FITS[0], (Segment(15, 8, 8, 2),)), "segments at bytes 0 and 15 share bytes"),
        (LATENT, 99, (FITS[0], FITS[0]), "segments at bytes 0 and 0 share bytes"),
    ],
)
def test_a_region_that_does_not_fit_is_refused_with_the_numbers(
    layout: Layout, size_bytes: int, layers: tuple[tuple[Segment, ...], ...], message: str
) -> None:
    with pytest.raises(BadRegion) as refused:
        RegionGeometry(layout, size_bytes, layers)
    assert str(refused.value).endswith(message)


@pytest.mark.parametrize("huge", [(1 << 63) - 1, (1 << 63) - 8])
def test_numbers_that_would_overflow_64_bits_are_refused_like_any_that_end_too_late(huge: int) -> None:
    with pytest.raises(BadRegion, match=f"ends at byte {huge + 16}, the region has 99"):
        RegionGeometry(LATENT, 99, (FITS[0], (Segment(huge, 8, 8, 2),)))
    with pytest.raises(BadRegion, match=f"ends at byte {16 + huge + 8}, the region has 99"):
        RegionGeometry(LATENT, 99, (FITS[0], (Segment(16, huge, 8, 2),)))


def test_a_segment_of_one_page_may_have_any_stride() -> None:
    huge = (1 << 63) - 1
    layers = ((Segment(0, huge, 8, 1),), (Segment(8, huge, 8, 1),))
    assert RegionGeometry(LATENT, 16, layers).pages == 1


def touched(segment: Segment) -> set[int]:
    starts = range(segment.base_bytes, segment.end_bytes, segment.page_stride_bytes)
    return {start + at for start in starts for at in range(segment.page_bytes)}


def refused_as_sharing(first: Segment, second: Segment) -> bool:
    layout = Layout(1, ((first.page_bytes, second.page_bytes),))
    try:
        RegionGeometry(layout, 1 << 20, ((first, second),))
    except BadRegion as refused:
        return "share bytes" in str(refused)
    return False


def random_segment(random: Random) -> Segment:
    page_bytes = random.randint(1, 6)
    return Segment(random.randint(0, 40), page_bytes + random.randint(0, 12), page_bytes, random.randint(1, 8))


def test_segments_are_refused_exactly_when_they_share_a_byte() -> None:
    random, outcomes = Random(5), []
    for _ in range(4000):
        first, second = random_segment(random), random_segment(random)
        shares = bool(touched(first) & touched(second))
        assert refused_as_sharing(first, second) == shares, f"{first} {second}"
        outcomes.append(shares)
    assert 400 < sum(outcomes) < 3600


def test_segments_of_equal_strides_are_refused_exactly_when_they_share_a_byte() -> None:
    sizes = range(1, 4)
    for base, page_bytes, other_bytes, pages, others in product(range(24), sizes, sizes, (1, 2, 4), (1, 3)):
        first, second = Segment(0, 5, page_bytes, pages), Segment(base, 5, other_bytes, others)
        shares = bool(touched(first) & touched(second))
        assert _share_bytes(first, second) == shares, f"{first} {second}"
        assert refused_as_sharing(first, second) == shares, f"{first} {second}"


@pytest.mark.slow
def test_the_most_segments_that_there_can_be_are_checked_without_looking_at_each_page() -> None:
    layout = Layout(1, ((8,) * 8,) * 512)
    geometry = region(layout, pages=1 << 24, style="mixed")
    assert geometry.pages == 1 << 24


def test_two_huge_segments_of_unequal_strides_are_compared_without_looking_at_each_page() -> None:
    layout, pages = Layout(1, ((1, 1),)), 1 << 24
    good = (Segment(0, 2, 1, pages), Segment(1, 6, 1, pages))
    assert RegionGeometry(layout, 1 << 40, (good,)).pages == pages
    with pytest.raises(BadRegion, match="segments at bytes 0 and 1 share bytes"):
        RegionGeometry(layout, 1 << 40, ((Segment(0, 2, 1, pages), Segment(1, 7, 1, pages)),))


def test_thousands_of_intertwined_segments_of_unequal_strides_are_refused_in_bounded_time() -> None:
    layout = Layout(1, ((1,) * 8,) * 64)
    layers = tuple(
        tuple(Segment(layer * 8 + index, 1 << 20 | layer, 1, 1000) for index in range(8)) for layer in range(64)
    )
    with pytest.raises(BadRegion, match="more than 100000 pairs of segments of unequal strides"):
        RegionGeometry(layout, 1 << 40, layers)
