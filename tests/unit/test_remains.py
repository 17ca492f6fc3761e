"""What a part that sends has left, and could give: as far as it can be told from how much it has read."""

from __future__ import annotations

import random

import pytest

from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.remains import Extent, Remains, remains_of
from kvmoverd.core.rests import choose_rest

RANGE = 512 << 10
BIG = Layout.uniform(layers=32, tokens=64, token_bytes=2048)
"""4 MiB a block, read in ranges of 4, 4, 8 and 16 layers."""
LAYER = 64 * 2048
ENDS = (4, 8, 16, 32)


def remains(read_bytes: int, blocks: int = 100, layout: Layout = BIG) -> Remains:
    return remains_of(layout, blocks=blocks, left_bytes=blocks * layout.record_bytes - read_bytes, range_bytes=RANGE)


def read_to(layer: int, blocks: int) -> int:
    return blocks * len(BIG.read_span(0, layer)) if layer else 0


def test_of_blocks_that_all_have_the_first_range_all_layers_from_there_on_could_go() -> None:
    found = remains(read_to(4, 100))
    assert found.gifts == ((100, 28 * LAYER), (100, 24 * LAYER))
    assert found.left_bytes == found.most_bytes == 100 * 28 * LAYER


def test_blocks_that_have_begun_the_present_range_give_what_comes_after_it() -> None:
    found = remains(read_to(8, 100) + 60 * 8 * LAYER)
    assert found.gifts == ((40, 24 * LAYER), (100, 16 * LAYER))
    assert found.most_bytes == 1600 * LAYER < found.left_bytes


def test_in_the_last_range_only_blocks_that_have_not_begun_it_give_something() -> None:
    assert remains(read_to(16, 100) + 99 * 16 * LAYER).gifts == ((1, 16 * LAYER),)
    last = remains(read_to(32, 100) - 1)
    assert last == Remains(1) and last.most_bytes == 0


@pytest.mark.parametrize("read_bytes", [0, 1, read_to(4, 99)])
def test_who_sends_has_the_first_range_whoever_read_it(read_bytes: int) -> None:
    assert remains(read_bytes).gifts == ((100, 28 * LAYER), (100, 24 * LAYER))


def test_blocks_of_one_range_have_nothing_to_give() -> None:
    small = Layout.uniform(layers=8, tokens=64, token_bytes=1024)
    assert remains(0, layout=small) == Remains(100 * small.record_bytes)


def test_nothing_is_left_of_no_blocks_and_when_all_is_read() -> None:
    assert remains(0, blocks=0) == remains(read_to(32, 100)) == Remains(0)


def test_a_gift_is_as_near_to_what_is_wanted_as_it_comes_and_never_above() -> None:
    found = remains(read_to(8, 100) + 90 * 8 * LAYER)
    for wanted in range(0, 1700 * LAYER, 7 * LAYER):
        blocks, size_bytes = found.gift(wanted, 100)
        assert wanted - 24 * LAYER < blocks * size_bytes <= wanted or blocks * size_bytes == found.most_bytes
    assert found.gift(1600 * LAYER, 5) == (5, 24 * LAYER), "no more blocks than there is room for"
    assert found.gift(1600 * LAYER, 0)[0] == 0 and Remains(99).gift(99, 99) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_expected_is_what_a_reader_without_a_device_ahead_gives(seed: int) -> None:
    chance = random.Random(seed)
    blocks = chance.randint(1, 60)
    wave = chance.randrange(1, 4)
    front, step = chance.randrange(blocks), len(BIG.read_span(ENDS[wave - 1], ENDS[wave]))
    found = remains(read_to(ENDS[wave - 1], blocks) + front * step, blocks)
    begun = [ENDS[wave] if block < front else ENDS[wave - 1] for block in range(blocks)]
    wanted = chance.uniform(0, found.left_bytes)
    given, size_bytes = found.gift(wanted, blocks)
    if not given:
        return
    kept, first_layer = choose_rest(begun.__getitem__, blocks, blocks - given, BIG)
    assert given * size_bytes <= (blocks - kept) * len(BIG.read_span(first_layer, 32)) <= wanted


def test_what_was_cut_is_a_rectangle_less() -> None:
    whole = Extent(10, kept_blocks=10, first_layer=0, stop_layer=32)
    cut = Extent(10, kept_blocks=4, first_layer=0, stop_layer=8)
    assert whole.bytes_from(BIG, 0) == 10 * BIG.record_bytes
    assert whole.bytes_from(BIG, 0) - cut.bytes_from(BIG, 0) == 6 * 24 * LAYER
    assert cut.bytes_from(BIG, 8) == cut.bytes_from(BIG, 7) - 10 * LAYER == 4 * 24 * LAYER
    assert whole.bytes_from(BIG, 32) == cut.bytes_from(BIG, 32) == 0


def test_a_rest_is_read_from_its_first_layer_on() -> None:
    rest = Extent(6, kept_blocks=6, first_layer=8, stop_layer=32)
    assert rest.bytes_from(BIG, 0) == rest.bytes_from(BIG, 8) == 6 * 24 * LAYER
    assert BIG.record_bytes == HEADER_BYTES + 32 * LAYER


def test_ranges_that_share_a_page_are_no_ranges_of_their_own() -> None:
    tiny = Layout.uniform(layers=4, tokens=1, token_bytes=8)
    found = remains_of(tiny, blocks=9, left_bytes=5 * tiny.record_bytes, range_bytes=8)
    assert found == Remains(5 * tiny.record_bytes)
