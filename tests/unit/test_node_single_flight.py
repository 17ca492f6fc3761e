"""One read per block however many ask: who joins, who leaves, who is told, and how urgent the read is."""

from __future__ import annotations

import pytest
from node_kit import Engine, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import BlockState, Path, Reason
from kvmoverd.node.fetching import FetchDriver
from kvmoverd.node.outbox import Fetched
from kvmoverd.ports.storage import BlockRead


def fetch(kit: NodeKit, engine: Engine, keys: tuple[bytes, ...]) -> FetchDriver:
    return kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)


async def states(driver: FetchDriver) -> list[BlockState]:
    events = await told(driver.outbox)
    assert end_of(events).reason is Reason.OK
    fetched = next(event for event in events if isinstance(event, Fetched))
    return [outcome.state for outcome in fetched.outcomes]


async def let_go(kit: NodeKit) -> None:
    kit.disk.closed = False
    while kit.disk.release_one():
        pass


async def test_many_requests_for_the_same_blocks_read_each_once() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(4)
        drivers = [fetch(kit, engine, keys[n % 2 :]) for n in range(6)]
        pages = kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=4, path=Path.PE, decode_node=""))
        await let_go(kit)
        for n, driver in enumerate(drivers):
            assert await states(driver) == [BlockState.HIT] * (4 - n % 2)
        assert end_of(await told(pages.outbox)).reason is Reason.OK
        assert [engine.block(page) for page in range(4)] == [kit.content(key) for key in keys]
        assert kit.disk.reads == dict.fromkeys(keys, 1)
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_request_with_duplicates_reads_once_and_answers_each() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(2)
        missing = kit.chain(1, salt=9)[0]
        asked = (keys[0], missing, keys[0], keys[1], missing, keys[0])
        driver = fetch(kit, engine, asked)
        await let_go(kit)
        hit, miss = BlockState.HIT, BlockState.MISS
        assert await states(driver) == [hit, miss, hit, hit, miss, hit]
        assert kit.disk.reads == {keys[0]: 1, keys[1]: 1, missing: 1}
        assert kit.pool.slot_counts()[0]["leased"] == 2
        record_bytes = kit.namespace.layout.record_bytes
        assert sum(map(kit.admission.taken_bytes, kit.admission._taken)) == 2 * record_bytes, "room of what is held"
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_cancelling_one_request_leaves_the_others_their_read() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(3)
        first, second = fetch(kit, engine, keys), fetch(kit, engine, keys[:2])
        kit.node.cancel(first.call.request_id, 1, engine.session.session_id)
        assert end_of(await told(first.outbox)).reason is Reason.CANCELLED
        await let_go(kit)
        assert await states(second) == [BlockState.HIT] * 2
        assert kit.disk.reads == dict.fromkeys(keys, 1)
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_when_all_have_left_waiting_reads_are_dropped_and_begun_ones_end_clean() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(12)
        drivers = [fetch(kit, engine, keys), fetch(kit, engine, keys)]
        assert len(kit.disk.held) == 8, "as many as may be under way"
        for driver in drivers:
            driver.stop(Reason.CANCELLED, "test")
        assert kit.pool.slot_counts()[0]["filling"] == 8
        await let_go(kit)
        await until(lambda: kit.pool.slot_counts()[0]["clean"] == 8, "begun reads end as clean blocks")
        assert len(kit.disk.reads) == 8
        assert kit.services.desk.idle() and kit.services.desk.read_queue_bytes == 0
        await kit.everything_is_home()


async def test_a_failure_reaches_every_waiter_and_the_next_request_reads_again() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(3)
        kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockRead) and op.key == keys[1] else None
        drivers = [fetch(kit, engine, keys) for _ in range(3)]
        await let_go(kit)
        for driver in drivers:
            assert await states(driver) == [BlockState.HIT, BlockState.FAILED, BlockState.HIT]
        assert kit.disk.reads[keys[1]] == 1
        kit.disk.fails = lambda op: None
        assert await states(fetch(kit, engine, keys)) == [BlockState.HIT] * 3
        assert kit.disk.reads == {keys[0]: 1, keys[1]: 2, keys[2]: 1}
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_read_is_as_urgent_as_the_most_urgent_who_waits_for_it() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(8)
        hinted, asked, wanted = keys[:4], keys[4:], keys[2:3]
        kit.services.desk.ops_max = 1
        assert kit.node.prefetch(engine.session.session_id, kit.namespace, hinted) == 4
        later = fetch(kit, engine, asked)
        stream = kit.node.stream(kit.plan(engine, kit.call(engine), wanted, hit=1, path=Path.PE, decode_node=""))
        order: list[bytes] = []
        kit.disk.fails = lambda op: order.append(op.key)  # type: ignore[func-returns-value,union-attr]
        await let_go(kit)
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        await until(lambda: len(order) == 8, "all reads")
        assert order == [keys[0], keys[2], *asked, keys[1], keys[3]], "the first was at the device when it was alone"
        await states(later)
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_full_queue_refuses_what_must_be_read_and_serves_what_is_there() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(14)
        kit.services.desk.queue_max = 8
        kit.disk.closed = False
        assert await states(fetch(kit, engine, keys[12:])) == [BlockState.HIT] * 2
        kit.disk.closed = True
        first, second = fetch(kit, engine, keys[:8]), fetch(kit, engine, keys[8:12])
        clean_before = kit.pool.slot_counts()
        refused = fetch(kit, engine, kit.chain(5, salt=5))
        assert end_of(await told(refused.outbox)).reason is Reason.POOL_EXHAUSTED
        counts = kit.pool.slot_counts()[0]
        assert counts["filling"] == clean_before[0]["filling"] and counts["quarantined"] == 0, "nothing was taken"
        assert await states(fetch(kit, engine, keys[12:])) == [BlockState.HIT] * 2
        await let_go(kit)
        assert await states(first) == [BlockState.HIT] * 8
        assert await states(second) == [BlockState.HIT] * 4
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


@pytest.mark.parametrize("rounds", [50])
async def test_a_hanging_disk_does_not_make_cancelled_reads_pile_up(rounds: int) -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(8)
        fetch(kit, engine, keys)
        for n in range(rounds):
            fetch(kit, engine, kit.chain(8, salt=n + 1)).stop(Reason.CANCELLED, "test")
        assert kit.services.desk._in_lines < 100
        assert kit.services.desk.reads_waiting() == 0
        kit.node.session_closed(engine.session.session_id, "done")
        await let_go(kit)
        await kit.everything_is_home()
