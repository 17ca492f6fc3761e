"""A device that takes too long: whoever waits is told, the slot stays the device's until it lets go."""

from __future__ import annotations

import pytest
from node_gates import StorageGate
from node_kit import LAYOUT, MANIFEST, Anonymous, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.desk import StorageDesk
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain
from kvmoverd.ports.storage import StorageDone


def quarantined(kit: NodeKit) -> int:
    return sum(counts["quarantined"] for counts in kit.pool.slot_counts())


async def test_who_waits_for_a_late_read_is_told_at_once_and_the_slot_comes_home_with_the_device() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(2)
        driver = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)
        await until(lambda: len(kit.disk.held) == 2, "both reads are at the device")
        kit.disk.give_up_one()
        kit.disk.release_one()
        assert end_of(await told(driver.outbox)).prefix_blocks == 0
        assert quarantined(kit) == 1 and kit.services.desk.late() == 1
        kit.slots_add_up()
        kit.node.session_closed(engine.session.session_id, "done")
        assert quarantined(kit) == 1, "it is the device's, whoever gave it up"
        kit.disk.let_go_one()
        await until(lambda: quarantined(kit) == 0, "the device has let go")
        assert kit.services.desk.late() == 0
        kit.disk.closed = False
        await kit.everything_is_home()


async def test_a_block_whose_read_is_late_is_read_again_into_another_slot() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(1)
        late = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)
        await until(lambda: len(kit.disk.held) == 1, "the read is at the device")
        kit.disk.give_up_one()
        await told(late.outbox)
        kit.disk.closed = False
        again = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)
        assert end_of(await told(again.outbox)).prefix_blocks == 1
        assert set(kit.pooled()) == set(keys)
        kit.disk.let_go_one()
        await until(lambda: quarantined(kit) == 0, "the device has let go")
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_late_range_of_layers_ends_the_block_and_no_later_range_is_read() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(1)
        blocks = kit.services.reader.acquire(kit.namespace, keys, priority=1, due_ns=1, by_ranges=True)
        kit.disk.release_one()
        await until(lambda: len(kit.disk.held) == 1 and blocks.progress[0] > 0, "the second range is at the device")
        kit.disk.give_up_one()
        await until(lambda: blocks.outcomes.get(0) is Reason.IO_ERROR, "its waiter is told")
        kit.services.reader.release(blocks)
        assert kit.services.desk.read_queue_bytes == 0 and quarantined(kit) == 1
        kit.disk.let_go_one()
        await until(lambda: quarantined(kit) == 0, "the device has let go")
        kit.disk.closed = False
        await kit.everything_is_home()


async def test_a_late_write_fails_its_block_at_once_and_frees_its_slot_when_the_device_lets_go() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(1)
        kit.fill(engine, keys)
        kit.disk.closed = True
        driver = kit.node.store(kit.call(engine), kit.namespace, Chain(keys, ROOT, 0), engine.region, as_pages([0]))
        await until(lambda: len(kit.disk.held) == 1, "the write is at the device")
        kit.disk.give_up_one()
        await told(driver.outbox)
        await until(lambda: quarantined(kit) == 1, "its owner has given the slot up")
        assert kit.services.desk.writes(kit.namespace) == 1, "a purge would still wait for it"
        kit.disk.let_go_one()
        await until(lambda: quarantined(kit) == 0, "the device has let go")
        kit.disk.closed = False
        await kit.everything_is_home()


async def test_a_write_that_is_durable_while_copies_are_made_is_a_clean_block_only_afterwards() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(1)
        kit.fill(engine, keys)
        kit.disk.closed = True
        driver = kit.node.store(kit.call(engine), kit.namespace, Chain(keys, ROOT, 0), engine.region, as_pages([0]))
        await until(lambda: len(kit.disk.held) == 1, "the write is at the device")
        op = kit.disk.held.popleft()
        kit.storage.submit([op])
        (done,) = kit.storage.poll(8)
        kit.disk.told_later.append(StorageDone(op.op_id, Reason.OK, done.moved_bytes, quiet=False))
        assert end_of(await told(driver.outbox)).reason is Reason.OK
        counts = kit.pool.slot_counts()[0]
        assert (counts["leased"], counts["clean"], counts["quarantined"]) == (1, 0, 0)
        kit.disk.told_later.append(StorageDone(op.op_id, Reason.OK))
        await until(lambda: kit.pool.slot_counts()[0]["clean"] == 1, "the copies are made")
        kit.disk.closed = False
        await kit.everything_is_home()


@pytest.mark.parametrize("ends", ["request first", "copy first", "purge first"])
async def test_a_block_that_was_read_while_a_copy_is_made_is_there_at_once_and_clean_only_afterwards(ends: str) -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(1)
        driver = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)
        await until(lambda: len(kit.disk.held) == 1, "the read is at the device")
        op = kit.disk.held.popleft()
        kit.storage.submit([op])
        (done,) = kit.storage.poll(8)
        kit.disk.told_later.append(StorageDone(op.op_id, Reason.OK, done.moved_bytes, quiet=False))
        assert end_of(await told(driver.outbox)).prefix_blocks == 1
        assert kit.services.desk.late() == 1 and set(kit.pooled()) == set(keys)
        if ends != "copy first":
            kit.node.session_closed(engine.session.session_id, "done")
            assert kit.pool.slot_counts()[0]["leased"] == 1, "a device still has it"
        if ends == "purge first":
            kit.services.reader.forget_namespace(kit.namespace)
        kit.disk.told_later.append(StorageDone(op.op_id, Reason.OK))
        await until(lambda: kit.services.desk.late() == 0, "the copy is made")
        if ends == "copy first":
            assert kit.pool.slot_counts()[0]["leased"] == 1, "the engine has a lease"
            kit.node.session_closed(engine.session.session_id, "done")
        await until(lambda: kit.pool.slot_counts()[0]["leased"] == 0, "nobody has it")
        assert kit.pool.slot_counts()[0]["clean"] == (ends != "purge first")
        kit.disk.closed = False
        await kit.everything_is_home()


@pytest.mark.parametrize("late", [0, 3])
def test_what_is_late_takes_no_place_at_the_desk(late: int) -> None:
    gate, memory = StorageGate(), Anonymous(LAYOUT.record_bytes)
    gate.closed = True
    desk, told_of = StorageDesk(gate, ops_max=3, queue_max=100), list[tuple[int, bool]]()

    def tell(done: StorageDone) -> None:
        told_of.append((done.op_id, done.quiet))

    for n in range(6):
        desk.read(Namespace(MANIFEST), bytes([n]) * 32, memory.address, rank=(0, n), done=tell)
    desk.submit()
    assert len(gate.held) == 3
    for _ in range(late):
        gate.give_up_one()
    desk.pump()
    assert len(gate.held) == 3 and desk.late() == late
    assert told_of == [(n + 1, False) for n in range(late)]
    while gate.late:
        gate.let_go_one()
    desk.pump()
    assert desk.late() == 0 and told_of[late:] == [(n + 1, True) for n in range(late)]
    gate.close(0)
