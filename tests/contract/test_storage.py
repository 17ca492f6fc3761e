"""The storage port's contract, kept by every adapter: files with direct and with buffered I/O, and memory."""

from __future__ import annotations

import dataclasses
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import (
    OPS_MAX,
    SHOPS,
    UNEVEN,
    Driver,
    MemoryShop,
    Shop,
    Slots,
    namespace,
    needs_names,
    new_key,
    open_shop,
)

from kvmoverd.core.errors import StaleEpoch
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import decode
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, StorageOp

SPACE = namespace()
SHARDED = Layout(block_tokens=64, layers=((41_984,),) * 5)
FIRST_LAYER, MIDDLE_LAYER, LAST_LAYER = (HEADER_BYTES + start for start in UNEVEN.layer_offsets)
LAST_BYTE = HEADER_BYTES + UNEVEN.block_bytes - 1


@pytest.fixture(params=SHOPS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    with open_shop(request.param, tmp_path, SPACE) as shop:
        yield shop


def stored_block(driver: Driver, slots: Slots) -> tuple[bytes, bytes]:
    key, payload = new_key(), os.urandom(UNEVEN.block_bytes)
    assert driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.OK
    return key, payload


def test_what_was_written_is_read_back_byte_for_byte(driver: Driver, slots: Slots) -> None:
    key, payload = stored_block(driver, slots)
    done = driver.read(SPACE, key, slots.fill(1, b""))
    assert (done.reason, done.moved_bytes, slots.payload(1)) == (Reason.OK, UNEVEN.record_bytes, payload)


def test_many_blocks_in_one_batch_keep_their_own_bytes(driver: Driver, slots: Slots) -> None:
    blocks = [(new_key(), os.urandom(UNEVEN.block_bytes)) for _ in range(8)]
    writes = [driver.write_op(SPACE, key, slots.fill(slot, payload)) for slot, (key, payload) in enumerate(blocks)]
    assert {done.reason for done in driver.run(writes)} == {Reason.OK}
    reads = [driver.read_op(SPACE, key, slots.fill(7 - slot, b"")) for slot, (key, _) in enumerate(blocks)]
    assert {done.reason for done in driver.run(reads)} == {Reason.OK}
    assert [slots.payload(7 - slot) for slot in range(8)] == [payload for _, payload in blocks]


def test_layers_of_a_latent_cache_are_read_back(shop: Shop, driver: Driver) -> None:
    space, slots = namespace(SHARDED, model_id="latent"), Slots(SHARDED, 2)
    shop.storage.open_namespace(space)
    key, payload = new_key(), os.urandom(SHARDED.block_bytes)
    assert driver.write(space, key, slots.fill(0, payload)).reason is Reason.OK
    assert driver.read(space, key, slots.fill(1, b"")).reason is Reason.OK
    assert slots.payload(1) == payload


def test_the_stored_record_says_whose_it_is_and_pads_with_zeros(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, payload = stored_block(driver, slots)
    record = shop.stored(SPACE, key)
    assert record is not None and len(record) == UNEVEN.record_bytes
    header = decode(record[:HEADER_BYTES])
    assert (header.key, header.fingerprint, header.block_tokens) == (key, SPACE.fingerprint, 16)
    assert record[HEADER_BYTES : LAST_BYTE + 1] == payload
    assert not any(record[LAST_BYTE + 1 :]), "the padding must not carry bytes of the slot's former owner"


def test_a_second_write_of_a_key_is_fine_and_moves_nothing(driver: Driver, slots: Slots) -> None:
    key, payload = stored_block(driver, slots)
    again = driver.write(SPACE, key, slots.fill(0, payload))
    assert (again.reason, again.moved_bytes) == (Reason.OK, 0)
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK


def test_one_key_written_many_times_at_once_is_stored_once_and_whole(driver: Driver, slots: Slots) -> None:
    key, payload = new_key(), os.urandom(UNEVEN.block_bytes)
    writes = [driver.write_op(SPACE, key, slots.fill(slot, payload)) for slot in range(8)]
    assert {done.reason for done in driver.run(writes)} == {Reason.OK}
    assert driver.read(SPACE, key, slots.fill(0, b"")).reason is Reason.OK
    assert slots.payload(0) == payload


def test_one_key_read_many_times_at_once_comes_to_every_reader(driver: Driver, slots: Slots) -> None:
    key, payload = stored_block(driver, slots)
    reads = [driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(8)]
    assert {done.reason for done in driver.run(reads)} == {Reason.OK}
    assert {slots.payload(slot) for slot in range(8)} == {payload}


def test_a_key_that_was_never_written_is_a_miss(driver: Driver, slots: Slots) -> None:
    done = driver.read(SPACE, new_key(), slots.address(0))
    assert (done.reason, done.moved_bytes) == (Reason.MISS, 0)
    assert driver.storage.counters.missed_blocks == 1
    assert driver.storage.counters.failed_ops == 0


@pytest.mark.parametrize(
    ("at", "named"),
    [
        (0, "magic"),
        (20, "header_crc32c"),
        (HEADER_BYTES - 1, "header_crc32c"),
        (FIRST_LAYER, "layer_crc32c[0]"),
        (MIDDLE_LAYER + 36, "layer_crc32c[1]"),
        (LAST_LAYER, "layer_crc32c[2]"),
        (LAST_BYTE, "layer_crc32c[2]"),
    ],
)
def test_a_flipped_bit_is_corrupt_and_names_its_place(
    shop: Shop, driver: Driver, slots: Slots, at: int, named: str
) -> None:
    key, _ = stored_block(driver, slots)
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[at] ^= 0x10
    shop.tamper(SPACE, key, bytes(record))
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.CORRUPT and named in done.message


@pytest.mark.parametrize("length_bytes", [0, 1, HEADER_BYTES, LAST_BYTE, UNEVEN.record_bytes - 1])
def test_a_record_that_ends_early_is_a_short_read(shop: Shop, driver: Driver, slots: Slots, length_bytes: int) -> None:
    key, _ = stored_block(driver, slots)
    shop.tamper(SPACE, key, (shop.stored(SPACE, key) or b"")[:length_bytes])
    if shop.by_name:
        assert driver.present(SPACE, key) == 0
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.SHORT_READ and f"{length_bytes} of {UNEVEN.record_bytes} bytes" in done.message
    assert driver.present(SPACE, key) == 0


def test_a_record_that_is_too_long_is_corrupt(shop: Shop, driver: Driver, slots: Slots) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    shop.tamper(SPACE, key, (shop.stored(SPACE, key) or b"") + b"x")
    assert driver.present(SPACE, key) == 0
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.CORRUPT


def test_a_record_under_another_name_is_corrupt(shop: Shop, driver: Driver, slots: Slots) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    other = new_key()
    shop.tamper(SPACE, other, shop.stored(SPACE, key))
    done = driver.read(SPACE, other, slots.address(1))
    assert done.reason is Reason.CORRUPT and f"key is {key.hex()}" in done.message


def test_a_record_of_another_model_is_corrupt(shop: Shop, driver: Driver, slots: Slots) -> None:
    needs_names(shop)
    key, _ = stored_block(driver, slots)
    other = namespace(model_id="another")
    shop.storage.open_namespace(other)
    shop.tamper(other, key, shop.stored(SPACE, key))
    done = driver.read(other, key, slots.address(1))
    assert done.reason is Reason.CORRUPT and "fingerprint" in done.message


@pytest.mark.parametrize("at", [5, MIDDLE_LAYER])
def test_what_was_found_corrupt_is_gone_and_the_next_write_repairs_it(
    shop: Shop, driver: Driver, slots: Slots, at: int
) -> None:
    key, payload = stored_block(driver, slots)
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[at] ^= 1
    shop.tamper(SPACE, key, bytes(record))
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.CORRUPT
    assert driver.present(SPACE, key) == 0
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert driver.write(SPACE, key, slots.fill(0, payload)).moved_bytes == UNEVEN.record_bytes
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
    assert slots.payload(1) == payload


@pytest.mark.parametrize("damage", ["short", "header"])
def test_a_write_replaces_a_damaged_record_that_nobody_has_read(
    shop: Shop, driver: Driver, slots: Slots, damage: str
) -> None:
    key, payload = stored_block(driver, slots)
    record = shop.stored(SPACE, key) or b""
    shop.tamper(SPACE, key, record[:-4096] if damage == "short" else bytes(HEADER_BYTES) + record[HEADER_BYTES:])
    assert driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.OK
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK


def test_a_write_leaves_a_record_whose_layers_alone_are_damaged_to_whoever_reads_it(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    key, payload = stored_block(driver, slots)
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[MIDDLE_LAYER] ^= 1
    shop.tamper(SPACE, key, bytes(record))
    again = driver.write(SPACE, key, slots.fill(0, payload))
    assert (again.reason, again.moved_bytes) == (Reason.OK, 0), "a duplicate costs no read of the payload"
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.CORRUPT
    assert driver.write(SPACE, key, slots.fill(0, payload)).moved_bytes == UNEVEN.record_bytes
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK


def test_a_probe_counts_leading_keys_only(driver: Driver, slots: Slots) -> None:
    (first, _), (second, _) = stored_block(driver, slots), stored_block(driver, slots)
    assert driver.present(SPACE, first, second) == 2
    assert driver.present(SPACE, first, new_key(), second) == 1
    assert driver.present(SPACE, new_key(), first) == 0
    assert driver.present(SPACE, first, first, second) == 3
    assert driver.present(SPACE) == 0


def test_a_look_finds_what_a_write_would_leave_and_nothing_that_it_would_write(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    (first, payload), (second, _), (third, _) = (stored_block(driver, slots) for _ in range(3))
    assert driver.found(SPACE, first, second, third) == 3
    assert driver.found(SPACE, first, new_key(), third) == 1 and driver.found(SPACE) == 0
    record = shop.stored(SPACE, second)
    assert record is not None
    shop.tamper(SPACE, second, bytes(4096) + record[4096:])
    assert driver.found(SPACE, first, second, third) == 1, "its header is another's"
    shop.lose(SPACE, third)
    assert driver.found(SPACE, third) == 0
    for key in (second, third):
        assert driver.write(SPACE, key, slots.fill(0, payload)).moved_bytes > 0, "so it is written"
    assert driver.found(SPACE, first, second, third) == 3


def test_a_purged_namespace_is_empty_and_takes_blocks_again_once_opened(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    key, payload = stored_block(driver, slots)
    stored_block(driver, slots)
    assert shop.storage.purge(SPACE) == (2, 2 * UNEVEN.record_bytes)
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert driver.present(SPACE, key) == 0
    assert driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.IO_ERROR
    assert shop.storage.purge(SPACE) == (0, 0)
    shop.storage.open_namespace(SPACE)
    assert driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.OK


def test_a_purged_tenant_loses_all_its_namespaces_and_others_keep_theirs(
    shop: Shop, driver: Driver, slots: Slots
) -> None:
    theirs = [Namespace(dataclasses.replace(SPACE.manifest, tenant="acme", model_id=name)) for name in ("a", "b")]
    for space in theirs:
        shop.storage.open_namespace(space)
    key, payload = stored_block(driver, slots)
    for space in theirs:
        assert driver.write(space, key, slots.fill(0, payload)).reason is Reason.OK
    assert shop.storage.purge_tenant("nobody") == (0, 0)
    assert shop.storage.purge_tenant("acme") == (2, 2 * UNEVEN.record_bytes)
    for space in theirs:
        assert driver.read(space, key, slots.address(1)).reason is Reason.MISS
        assert driver.write(space, key, slots.fill(0, payload)).reason is Reason.IO_ERROR, "it is not open any more"
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == payload
    shop.storage.open_namespace(theirs[0])
    assert driver.read(theirs[0], key, slots.address(1)).reason is Reason.MISS
    assert driver.write(theirs[0], key, slots.fill(0, payload)).reason is Reason.OK


def test_the_index_knows_what_was_found_and_not_what_was_lost(shop: Shop, driver: Driver, slots: Slots) -> None:
    index, (key, _), other = shop.storage.index, stored_block(driver, slots), new_key()
    index.found(SPACE, [key])
    assert index.known(SPACE, [key, other, key]).tolist() == [True, False, True]
    assert index.known(SPACE, []).tolist() == []
    assert index.known(namespace(model_id="another"), [key]).tolist() == [False]
    places = index.places(SPACE, [key, other])
    assert places[1] is None and (places[0] is None) == shop.by_name
    index.touch(SPACE, [key, other])
    assert index.pin(SPACE, [key, other], 60.0) == 1 and index.pin(SPACE, [key, other], 0.0) == 1
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[MIDDLE_LAYER] ^= 1
    shop.tamper(SPACE, key, bytes(record))
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.CORRUPT
    index.lost(SPACE, key)
    assert index.known(SPACE, [key]).tolist() == [False]
    shop.storage.purge(SPACE)
    index.forget(SPACE)
    assert index.known(SPACE, [key]).tolist() == [False]


def test_hearing_of_authors_never_fails_and_what_others_are_told_is_a_name_and_a_number(shop: Shop) -> None:
    shop.storage.heard("nobody.0000", 1)
    shop.storage.heard("nobody.0000", 0)
    author, log = shop.storage.signature()
    assert (author, log) == ("", 0) if shop.by_name else (author == "node.boot" and log >= 1)


def test_a_lower_epoch_is_refused_and_a_higher_one_starts_empty(shop: Shop, driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    shop.storage.open_namespace(namespace(epoch=3))
    assert driver.present(namespace(epoch=3), key) == 0
    for stale in (0, 2):
        with pytest.raises(StaleEpoch, match=f"epoch {stale} is below epoch 3"):
            shop.storage.open_namespace(namespace(epoch=stale))
    shop.storage.open_namespace(namespace(epoch=3))
    shop.storage.open_namespace(namespace(model_id="another"))


def test_a_small_poll_leaves_the_descriptor_readable(driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    ops = [driver.read_op(SPACE, key, slots.address(slot)) for slot in range(8)]
    assert len(driver.run(ops, poll_max=3)) == 8
    assert select.select([driver.storage.fileno()], [], [], 0)[0] == [], "nothing is left, nothing wakes"


def test_counters_say_what_was_done(driver: Driver, slots: Slots) -> None:
    key, _ = stored_block(driver, slots)
    driver.read(SPACE, key, slots.address(0))
    driver.read(SPACE, new_key(), slots.address(0))
    counters = driver.storage.counters
    assert (counters.written_blocks, counters.written_bytes) == (1, UNEVEN.record_bytes)
    assert (counters.read_blocks, counters.read_bytes) == (1, UNEVEN.record_bytes)
    assert (counters.missed_blocks, counters.corrupt_blocks, counters.failed_ops) == (1, 0, 0)
    assert counters.queued_bytes == 0


def test_more_ops_than_allowed_are_a_broken_invariant(shop: Shop) -> None:
    if isinstance(shop, MemoryShop):
        pytest.skip("memory has no queue: its ops are done when they are submitted")
    ops = [BlockProbe(number, SPACE, ()) for number in range(OPS_MAX + 1)]
    with pytest.raises(AssertionError, match=f"{OPS_MAX + 1} storage ops"):
        shop.storage.submit(ops)


def test_after_close_every_op_still_gets_its_completion(shop: Shop, driver: Driver, slots: Slots) -> None:
    payload = b"x" * UNEVEN.block_bytes
    ops: list[StorageOp] = [driver.write_op(SPACE, new_key(), slots.fill(slot, payload)) for slot in range(8)]
    shop.storage.submit(ops)
    assert shop.storage.close(5.0)
    late = driver.read_op(SPACE, new_key(), slots.address(0))
    shop.storage.submit([late])
    done = {completion.op_id: completion.reason for completion in shop.storage.poll(OPS_MAX)}
    assert done.keys() == {op.op_id for op in [*ops, late]}
    assert set(done.values()) <= {Reason.OK, Reason.SHUTTING_DOWN} and done[late.op_id] is Reason.SHUTTING_DOWN
