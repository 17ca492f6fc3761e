"""The null storage: at once, in batches, and without touching memory."""

from __future__ import annotations

import select
from dataclasses import replace

from storage_kit import UNEVEN, Driver, Slots, namespace, new_key

from kvmoverd.adapters.storage.null import NullStorage
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe

SPACE = namespace()


def test_reads_and_writes_are_ok_count_their_bytes_and_touch_no_memory() -> None:
    storage, slots = NullStorage("null"), Slots(UNEVEN, 2)
    driver, address = Driver(storage), slots.fill(0, b"")
    before = slots.record(0)
    whole, first, rest = (
        driver.read_op(SPACE, new_key(), address, layers) for layers in (range(0), range(1), range(1, 3))
    )
    moved = [done.moved_bytes for done in driver.run([whole, first, rest])]
    assert moved == [UNEVEN.record_bytes, len(first.span), len(rest.span)]
    assert driver.write(SPACE, new_key(), address).moved_bytes == UNEVEN.record_bytes
    counters = storage.counters
    assert (counters.read_bytes, counters.read_blocks) == (2 * UNEVEN.record_bytes, 2)
    assert (counters.written_blocks, counters.queued_bytes) == (1, 0)
    assert slots.record(0) == before
    assert storage.close(1.0)


def test_a_rest_counts_the_header_page_and_what_lies_behind() -> None:
    storage, slots = NullStorage("null"), Slots(UNEVEN, 1)
    driver, key = Driver(storage), new_key()
    steps = [
        replace(driver.read_op(SPACE, key, slots.address(0), layers), rest_from=2) for layers in (range(2), range(2, 3))
    ]
    assert sum(done.moved_bytes for done in driver.run(steps)) == UNEVEN.rest_bytes(2) == storage.counters.read_bytes
    assert storage.counters.read_blocks == 1 and storage.close(1.0)


def test_a_probe_finds_everything() -> None:
    storage = NullStorage("null")
    assert Driver(storage).present(SPACE, new_key(), new_key()) == 2
    assert storage.purge(SPACE) == (0, 0) and storage.close(1.0)


def test_completions_come_in_batches_and_the_descriptor_says_when_there_are_none() -> None:
    storage, slots = NullStorage("null"), Slots(UNEVEN, 1)
    driver = Driver(storage)
    assert len(driver.run([driver.read_op(SPACE, new_key(), slots.address(0)) for _ in range(64)], poll_max=10)) == 64
    assert select.select([storage.fileno()], [], [], 0)[0] == []
    storage.submit([])
    assert select.select([storage.fileno()], [], [], 0)[0] == []
    assert storage.close(1.0)


def test_after_close_every_op_still_gets_its_completion() -> None:
    storage = NullStorage("null")
    assert storage.close(1.0) and storage.close(1.0)
    storage.submit([BlockProbe(1, SPACE, ())])
    assert [done.reason for done in storage.poll(8)] == [Reason.SHUTTING_DOWN] and storage.facts.kind == "null"
