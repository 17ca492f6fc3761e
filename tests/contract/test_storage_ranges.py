"""Blocks read in layer ranges, over every adapter: bytes, checks, counters, and files that change between two ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import SHOPS, Driver, FileShop, Shop, Slots, namespace, needs_names, new_key, open_shop

from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.status import Reason

LAYOUT = Layout(block_tokens=64, layers=((41_984,), (41_984,), (37,), (5,), (5000, 600), (41_984,)))
"""Layers of several pages, and some that share one page with their neighbours."""
SPACE = namespace(LAYOUT)
RANGES = (range(1), range(1, 2), range(2, 4), range(4, 6))
"""The third is empty: its layers lie in a page that the second has brought."""
UNTOUCHED = 0xAA


@pytest.fixture(params=SHOPS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    with open_shop(request.param, tmp_path, SPACE) as shop:
        yield shop


@pytest.fixture
def slots() -> Slots:
    return Slots(LAYOUT, 2)


def span(layers: range) -> range:
    return LAYOUT.read_span(layers.start, layers.stop)


def stored_block(driver: Driver, slots: Slots, key: bytes = b"") -> tuple[bytes, bytes]:
    key, payload = key or new_key(), os.urandom(LAYOUT.block_bytes)
    assert driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.OK
    return key, payload


def flip(shop: Shop, key: bytes, at: int) -> None:
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[at] ^= 0x20
    shop.tamper(SPACE, key, bytes(record))


def replace(shop: Shop, driver: Driver, slots: Slots, key: bytes) -> bytes:
    """Another whole record under the same key, as a node writes one after the first was lost."""
    shop.lose(SPACE, key)
    return stored_block(driver, slots, key)[1]


def test_the_ranges_of_the_test_have_an_empty_one_among_them() -> None:
    assert [len(span(layers)) > 0 for layers in RANGES] == [True, True, False, True]
    assert sum(len(span(layers)) for layers in RANGES) == LAYOUT.record_bytes


def test_ranges_in_order_make_the_whole_block_and_each_touches_its_own_bytes_only(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    key, _ = stored_block(driver, slots)
    record, address = shop.stored(SPACE, key) or b"", slots.fill(1, b"")
    expected = bytearray([UNTOUCHED]) * LAYOUT.record_bytes
    for layers in RANGES:
        done = driver.read(SPACE, key, address, layers)
        assert (done.reason, done.moved_bytes) == (Reason.OK, len(span(layers)))
        expected[span(layers).start : span(layers).stop] = record[span(layers).start : span(layers).stop]
        assert slots.record(1) == bytes(expected), f"layers {layers}"
    assert bytes(expected) == record


def test_every_cut_into_two_ranges_reads_the_block(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, payload = stored_block(driver, slots)
    for cut in range(1, LAYOUT.layer_count):
        address = slots.fill(1, b"")
        dones = [driver.read(SPACE, key, address, layers) for layers in (range(cut), range(cut, 6))]
        assert [done.reason for done in dones] == [Reason.OK, Reason.OK] and slots.payload(1) == payload
        assert sum(done.moved_bytes for done in dones) == LAYOUT.record_bytes


def test_a_block_counts_once_and_its_bytes_as_they_come(driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    counters, moved = driver.storage.counters, 0
    for layers in RANGES:
        assert counters.read_blocks == 0
        driver.read(SPACE, key, slots.address(1), layers)
        moved += len(span(layers))
        assert (counters.read_bytes, counters.queued_bytes) == (moved, 0)
    assert counters.read_blocks == 1


def test_what_is_queued_is_counted_by_the_bytes_of_the_range(driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    driver.storage.submit([driver.read_op(SPACE, key, slots.address(1), RANGES[0])])
    assert driver.storage.counters.queued_bytes == len(span(RANGES[0])), "counted until it is polled"
    assert driver.collect(1)[0].reason is Reason.OK and driver.storage.counters.queued_bytes == 0


@pytest.mark.parametrize("layers", RANGES)
def test_a_flipped_bit_is_found_by_the_range_that_has_its_layer(
    shop: Shop, driver: Driver, slots: Slots, layers: range
) -> None:
    key, payload = stored_block(driver, slots)
    flip(shop, key, HEADER_BYTES + LAYOUT.layer_offsets[layers.start])
    address = slots.fill(1, b"")
    for earlier in RANGES[: RANGES.index(layers)]:
        assert driver.read(SPACE, key, address, earlier).reason is Reason.OK
    done = driver.read(SPACE, key, address, layers)
    assert done.reason is Reason.CORRUPT and f"layer_crc32c[{layers.start}]" in done.message
    assert driver.storage.counters.corrupt_blocks == 1
    assert driver.present(SPACE, key) == 0, "it was set aside: its header is the slot's"
    assert driver.write(SPACE, key, slots.fill(0, payload)).moved_bytes == LAYOUT.record_bytes


def test_a_damaged_header_is_found_by_the_first_range(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    flip(shop, key, 100)
    assert driver.read(SPACE, key, slots.address(1), RANGES[0]).reason is Reason.CORRUPT
    assert driver.present(SPACE, key) == 0


@pytest.mark.parametrize("layers", [RANGES[1], RANGES[3]])
def test_a_record_replaced_between_ranges_is_corrupt_and_the_new_one_stays(
    shop: Shop, driver: Driver, slots: Slots, layers: range
) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    address = slots.address(1)
    for earlier in RANGES[: RANGES.index(layers)]:
        assert driver.read(SPACE, key, address, earlier).reason is Reason.OK
    payload = replace(shop, driver, slots, key)
    done = driver.read(SPACE, key, address, layers)
    assert done.reason is Reason.CORRUPT and "replaced meanwhile" in done.message
    assert driver.read(SPACE, key, address).reason is Reason.OK and slots.payload(1) == payload


def test_a_block_that_is_stored_elsewhere_between_ranges_is_read_to_its_end_where_it_was_begun(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    if shop.by_name:
        pytest.skip("a record under a name is replaced in its place")
    key, payload = stored_block(driver, slots)
    address = slots.fill(1, b"")
    assert driver.read(SPACE, key, address, RANGES[0]).reason is Reason.OK
    later = replace(shop, driver, slots, key)
    assert {driver.read(SPACE, key, address, layers).reason for layers in RANGES[1:]} == {Reason.OK}
    assert slots.payload(1) == payload
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == later


def test_a_header_that_was_overwritten_in_the_slot_is_corrupt_and_not_held_against_the_file(
    driver: Driver, slots: Slots
) -> None:
    key, payload = stored_block(driver, slots)
    done = driver.read(SPACE, key, slots.fill(1, b""), RANGES[1])
    assert done.reason is Reason.CORRUPT and "magic" in done.message
    assert "replaced meanwhile" in done.message or "another record's bytes" in done.message
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK and slots.payload(1) == payload


@pytest.mark.parametrize("first", [True, False])
def test_a_record_truncated_between_ranges_is_a_short_read_and_gone(
    shop: Shop, driver: Driver, slots: Slots, first: bool
) -> None:
    if first:
        needs_names(shop)  # the end of a segment says nothing of bytes before it
    key, _ = stored_block(driver, slots)
    assert driver.read(SPACE, key, slots.address(1), RANGES[0]).reason is Reason.OK
    record, cut = shop.stored(SPACE, key) or b"", LAYOUT.record_bytes - 4096
    shop.tamper(SPACE, key, record[:cut])
    done = driver.read(SPACE, key, slots.address(1), RANGES[0] if first else RANGES[3])
    assert done.reason is Reason.SHORT_READ and f"{cut} of {LAYOUT.record_bytes} bytes" in done.message
    assert driver.present(SPACE, key) == 0 and driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS


def test_a_record_that_grew_is_corrupt_for_a_first_range(shop: Shop, driver: Driver, slots: Slots) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    shop.tamper(SPACE, key, (shop.stored(SPACE, key) or b"") + bytes(4096))
    assert driver.read(SPACE, key, slots.address(1), RANGES[0]).reason is Reason.CORRUPT


def test_a_record_that_went_away_between_ranges_is_a_miss(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    assert driver.read(SPACE, key, slots.address(1), RANGES[0]).reason is Reason.OK
    shop.tamper(SPACE, key, None)
    assert driver.read(SPACE, key, slots.address(1), RANGES[1]).reason is Reason.MISS


def test_ranges_of_many_blocks_go_side_by_side(driver: Driver) -> None:
    slots = Slots(LAYOUT, 8)
    blocks = [(new_key(), os.urandom(LAYOUT.block_bytes)) for _ in range(8)]
    driver.run(driver.write_op(SPACE, key, slots.fill(n, payload)) for n, (key, payload) in enumerate(blocks))
    for slot in range(8):
        slots.fill(slot, b"")
    for layers in RANGES:
        reads = [driver.read_op(SPACE, key, slots.address(n), layers) for n, (key, _) in enumerate(blocks)]
        assert {done.reason for done in driver.run(reads)} == {Reason.OK}
    assert [slots.payload(n) for n in range(8)] == [payload for _, payload in blocks]


def test_a_truncated_file_that_was_replaced_by_a_short_one_is_told_from_our_own(tmp_path: Path, slots: Slots) -> None:
    shop = FileShop(tmp_path, direct=False)
    shop.storage.open_namespace(SPACE)
    driver = Driver(shop.storage)
    key, _ = stored_block(driver, slots)
    assert driver.read(SPACE, key, slots.address(1), RANGES[0]).reason is Reason.OK
    shop.tamper(SPACE, key, bytes(5000))
    done = driver.read(SPACE, key, slots.address(1), RANGES[3])
    assert done.reason is Reason.CORRUPT and "replaced meanwhile" in done.message
    assert shop.storage.close(5.0)
