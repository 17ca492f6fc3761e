"""Records that are read from one of their layers on, over every adapter: the header page, then ranges, and nothing before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from storage_kit import SHOPS, Driver, Shop, Slots, needs_names, open_shop
from test_storage_ranges import LAYOUT, SPACE, UNTOUCHED, flip, stored_block
from test_storage_ranges import replace as replace_record

from kvmoverd.core.layout import ALIGN_BYTES, HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import StorageDone

LAYERS = LAYOUT.layer_count
FROM = range(1, LAYERS)


@pytest.fixture(params=SHOPS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    with open_shop(request.param, tmp_path, SPACE) as shop:
        yield shop


@pytest.fixture
def slots() -> Slots:
    return Slots(LAYOUT, 2)


def read(driver: Driver, key: bytes, address: int, layers: range, rest_from: int) -> StorageDone:
    return driver.run([replace(driver.read_op(SPACE, key, address, layers), rest_from=rest_from)])[0]


@pytest.mark.parametrize("rest_from", FROM)
def test_the_header_page_comes_first_and_then_what_lies_from_the_layer_on(
    shop: Shop, driver: Driver, slots: Slots, rest_from: int
) -> None:
    key, _ = stored_block(driver, slots)
    record, address = shop.stored(SPACE, key) or b"", slots.fill(1, b"")
    begins_at = HEADER_BYTES + LAYOUT.layer_offsets[rest_from] // ALIGN_BYTES * ALIGN_BYTES
    untouched = bytes([UNTOUCHED])
    done = read(driver, key, address, range(rest_from), rest_from)
    assert (done.reason, done.moved_bytes) == (Reason.OK, HEADER_BYTES)
    assert slots.record(1) == record[:HEADER_BYTES] + untouched * (len(record) - HEADER_BYTES)
    done = read(driver, key, address, range(rest_from, LAYERS), rest_from)
    assert (done.reason, done.moved_bytes) == (Reason.OK, len(record) - begins_at)
    assert slots.record(1) == record[:HEADER_BYTES] + untouched * (begins_at - HEADER_BYTES) + record[begins_at:]
    assert driver.storage.counters.read_bytes == LAYOUT.rest_bytes(rest_from)
    assert (driver.storage.counters.read_blocks, driver.storage.counters.queued_bytes) == (1, 0)


@pytest.mark.parametrize("rest_from", range(1, LAYERS - 1))
def test_a_rest_goes_on_in_ranges_that_do_not_overlap(shop: Shop, driver: Driver, slots: Slots, rest_from: int) -> None:
    key, payload = stored_block(driver, slots)
    address, moved_bytes = slots.fill(1, b""), 0
    for layers in (range(rest_from), *(range(layer, layer + 1) for layer in range(rest_from, LAYERS))):
        done = read(driver, key, address, layers, rest_from)
        assert done.reason is Reason.OK, done.message
        moved_bytes += done.moved_bytes
    begins_at = LAYOUT.layer_offsets[rest_from]
    assert slots.payload(1)[begins_at:] == payload[begins_at:] and moved_bytes == LAYOUT.rest_bytes(rest_from)


@pytest.mark.parametrize("rest_from", FROM)
def test_a_flipped_bit_in_a_rest_is_found_and_one_before_it_is_nobodys_affair(
    shop: Shop, driver: Driver, slots: Slots, rest_from: int
) -> None:
    key, _ = stored_block(driver, slots)
    flip(shop, key, HEADER_BYTES + LAYOUT.layer_offsets[rest_from - 1])
    address, rest = slots.fill(1, b""), range(rest_from, LAYERS)
    assert [read(driver, key, address, layers, rest_from).reason for layers in (range(rest_from), rest)] == [
        Reason.OK,
        Reason.OK,
    ]
    flip(shop, key, HEADER_BYTES + LAYOUT.layer_offsets[rest_from])
    done = read(driver, key, address, rest, rest_from)
    assert done.reason is Reason.CORRUPT and f"layer_crc32c[{rest_from}]" in done.message


def test_a_record_replaced_between_header_and_rest_is_corrupt_and_the_new_one_stays(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    address = slots.fill(1, b"")
    assert read(driver, key, address, range(2), 2).reason is Reason.OK
    payload = replace_record(shop, driver, slots, key)
    done = read(driver, key, address, range(2, LAYERS), 2)
    assert done.reason is Reason.CORRUPT and "replaced meanwhile" in done.message
    assert driver.read(SPACE, key, address).reason is Reason.OK and slots.payload(1) == payload


def test_a_damaged_header_or_none_is_found_by_the_first_step(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    flip(shop, key, 100)
    assert read(driver, key, slots.address(1), range(2), 2).reason is Reason.CORRUPT
    assert read(driver, bytes(32), slots.address(1), range(2), 2).reason is Reason.MISS
