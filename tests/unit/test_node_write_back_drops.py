"""Write-back that does not come about: each block is counted by why, told to its caller, and logged."""

from __future__ import annotations

import pytest
from node_kit import LAYOUT, NodeKit, end_of, node_kit, told, until
from write_back_kit import dropped, failing_writes, home, let_go, reasons, store

from kvmoverd.core.drops import Drop
from kvmoverd.core.errors import Draining
from kvmoverd.core.machines.actions import AnnounceAccepted
from kvmoverd.core.status import End, Reason
from kvmoverd.node.storing import StoreDriver

RECORD = LAYOUT.record_bytes


async def lost(kit: NodeKit, driver: StoreDriver, blocks: int, why: Drop, reason: Reason) -> End:
    events = await told(driver.outbox)
    assert reasons(events) == [reason] * blocks
    assert dropped(kit) == {why.value: blocks}
    return end_of(events)


async def test_no_room() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.admission._limits[next(p for p in kit.admission._limits if p.value == "write_back")] = 2 * RECORD
        kit.disk.closed = True
        waits = store(kit, engine, kit.chain(2, salt=1))
        end = await lost(kit, store(kit, engine, keys), 2, Drop.NO_ROOM, Reason.POOL_EXHAUSTED)
        assert "pool.write_back_bytes" in end.message and end.pages_quiet
        await let_go(kit)
        await told(waits.outbox)
        await home(kit)


async def test_more_than_could_ever_have_room() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        kit.admission._limits[next(p for p in kit.admission._limits if p.value == "write_back")] = 2 * RECORD
        await lost(kit, store(kit, engine, keys), 3, Drop.NO_ROOM, Reason.TOO_BIG)
        await home(kit)


async def test_a_full_queue() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        kit.services.desk.queue_max = 0
        await lost(kit, store(kit, engine, keys), 3, Drop.FULL_QUEUE, Reason.DROPPED)
        await home(kit)


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (Reason.NO_SPACE, Drop.DISK_FULL),
        (Reason.IO_ERROR, Drop.IO_ERROR),
        (Reason.DROPPED, Drop.REFUSED),
        (Reason.SHUTTING_DOWN, Drop.SHUTTING_DOWN),
        (Reason.INTERNAL, Drop.ERROR),
    ],
    ids=lambda value: value.name,
)
async def test_what_the_storage_says(reason: Reason, why: Drop) -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.disk.fails = failing_writes(reason)
        end = await lost(kit, store(kit, engine, keys), 2, why, reason)
        assert end.message == "2 of 2 blocks were not stored"
        kit.disk.fails = lambda op: None
        assert reasons(await told(store(kit, engine, keys).outbox)) == [Reason.OK] * 2, "and again it may succeed"
        await home(kit)


async def test_a_purge_while_writes_wait() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(8)
        kit.disk.closed = True
        driver = store(kit, engine, keys)
        await until(lambda: kit.services.desk.writes_waiting() == 2, "six are at the device")
        kit.services.reader.forget_namespace(kit.namespace)
        kit.services.desk.drop_writes(kit.namespace)
        assert dropped(kit) == {Drop.PURGED.value: 2}
        kit.disk.fails = failing_writes(Reason.IO_ERROR)
        await let_go(kit)
        events = await told(driver.outbox)
        assert reasons(events) == [Reason.IO_ERROR] * 6 + [Reason.DROPPED] * 2
        assert dropped(kit) == {Drop.PURGED.value: 8}
        await home(kit)


async def test_a_stop_with_writes_queued() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(8)
        kit.disk.closed = True
        driver = store(kit, engine, keys)
        await until(lambda: kit.services.desk.writes_waiting() == 2, "six are at the device")
        assert not await kit.node.shut_down(0.01)
        assert dropped(kit) == {Drop.SHUTTING_DOWN.value: 8}, "of those at the device nobody will hear"
        assert end_of(await told(driver.outbox)).reason is Reason.SHUTTING_DOWN
        await home(kit)


async def test_a_call_while_the_node_drains() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.node.drain()
        with pytest.raises(Draining):
            store(kit, engine, keys)
        assert dropped(kit) == {Drop.SHUTTING_DOWN.value: 2}
        await home(kit)


@pytest.mark.parametrize(
    ("stop", "why", "reason"),
    [
        ("gone", Drop.ENGINE_GONE, Reason.ENGINE_GONE),
        ("cancel", Drop.CANCELLED, Reason.CANCELLED),
        ("deadline", Drop.DEADLINE, Reason.DEADLINE),
    ],
)
async def test_an_end_before_the_pages_were_copied(stop: str, why: Drop, reason: Reason) -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.wire.closed = True
        driver = store(kit, engine, keys, timeout_s=0.02 if stop == "deadline" else 5.0)
        await until(lambda: kit.wire.held, "the copy is under way")
        if stop == "gone":
            kit.node.session_closed(engine.session.session_id, "gone")
        elif stop == "cancel":
            kit.node.cancel(driver.call.request_id, 1, engine.session.session_id)
        else:
            await until(lambda: driver.machine.state.name == "DRAINING", "its time is over")
        await let_go(kit)
        await lost(kit, driver, 2, why, reason)
        await home(kit)


async def test_a_copy_that_fails() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.wire.fails = lambda send: Reason.IO_ERROR
        await lost(kit, store(kit, engine, keys), 2, Drop.ERROR, Reason.IO_ERROR)
        kit.wire.fails = lambda send: None
        await home(kit)


async def test_a_caller_that_leaves_after_its_blocks_were_accepted_loses_none() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        kit.disk.closed = True
        driver = store(kit, engine, keys)
        assert isinstance(await driver.outbox.get(), AnnounceAccepted)
        kit.node.session_closed(engine.session.session_id, "gone")
        await let_go(kit)
        await until(lambda: not kit.node.requests.live(), "all is written")
        assert all(kit.stored(key) == kit.content(key) for key in keys) and dropped(kit) == {}
        await home(kit)
