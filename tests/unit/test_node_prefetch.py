"""Hints warm the pool: in order of need, after all else, within their budget, and never at a request's cost."""

from __future__ import annotations

import asyncio

import pytest
from node_kit import LAYOUT, Engine, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Reason
from kvmoverd.node import prefetching
from kvmoverd.node.counts import HintCounts
from kvmoverd.node.hints import GRACE_NS
from kvmoverd.node.prefetching import UNDER_WAY_MAX
from kvmoverd.node.services import Limits
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain
from kvmoverd.ports.storage import BlockRead, StorageOp

RECORD = LAYOUT.record_bytes


def limits(blocks: int) -> Limits:
    return Limits(admission_wait_s=0.2, attach_timeout_s=0.5, prefetch_bytes=blocks * RECORD)


def hint(kit: NodeKit, engine: Engine, keys: tuple[bytes, ...], in_s: float = 0.0) -> int:
    return kit.node.prefetch(engine.session.session_id, kit.namespace, keys, in_s)


def counts(kit: NodeKit) -> HintCounts:
    return kit.services.counts.hints


def record_order(kit: NodeKit) -> list[bytes]:
    """Keys of reads as the storage gets them."""
    order: list[bytes] = []

    def note(op: StorageOp) -> Reason | None:
        if isinstance(op, BlockRead) and not op.first_layer:
            order.append(op.key)
        return None

    kit.disk.fails = note
    return order


async def fetch(kit: NodeKit, engine: Engine, keys: tuple[bytes, ...]) -> int:
    """Blocks read from storage for it."""
    before = sum(kit.disk.reads.values())
    driver = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60)
    end = end_of(await told(driver.outbox))
    assert (end.reason, end.prefix_blocks) == (Reason.OK, len(keys))
    return sum(kit.disk.reads.values()) - before


async def home(kit: NodeKit, *engines: Engine) -> None:
    for engine in engines:
        kit.node.session_closed(engine.session.session_id, "done")
    kit.disk.closed = False
    while kit.disk.release_one():
        pass
    await kit.everything_is_home()
    assert counts(kit).taken_bytes == 0


async def test_what_was_hinted_is_there_when_it_is_wanted() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(6)
        await kit.store(engine, keys)
        kit.forget_clean()
        kit.disk.reads.clear()
        assert hint(kit, engine, keys, 5.0) == 6
        assert counts(kit).taken_bytes == 6 * RECORD
        await until(lambda: counts(kit).read_blocks == 6, "all are read")
        assert await fetch(kit, engine, keys) == 0
        assert counts(kit) == HintCounts(taken_bytes=0, read_blocks=6, used_blocks=6)
        await home(kit, engine)


async def test_what_is_expected_sooner_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "UNDER_WAY_MAX", 1)
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(6)
        order = record_order(kit)
        assert [hint(kit, engine, keys[n : n + 2], in_s) for n, in_s in ((0, 9.0), (2, 3.0), (4, 6.0))] == [2, 2, 2]
        kit.disk.closed = False
        kit.disk.release_one()
        await until(lambda: counts(kit).read_blocks == 6, "all are read")
        assert order == [keys[0], keys[2], keys[3], keys[4], keys[5], keys[1]], "the first was begun when it was alone"
        await home(kit, engine)


async def test_few_reads_for_hints_are_under_way_and_one_at_a_time_where_blocks_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(12)
        hint(kit, engine, keys)
        assert len(kit.disk.held) == UNDER_WAY_MAX
        await home(kit, engine)
    monkeypatch.setattr(prefetching, "UNDER_WAY_BYTES", RECORD // 2)
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(12)
        hint(kit, engine, keys)
        for _ in range(5):
            assert len(kit.disk.held) == 1
            kit.disk.release_one()
            await until(lambda: kit.disk.held, "the next one")
        await home(kit, engine)


async def test_nothing_is_read_for_hints_while_a_request_reads() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(6)
        reading = asyncio.get_running_loop().create_task(fetch(kit, engine, keys[:2]))
        await until(lambda: len(kit.disk.held) == 2, "the request's reads")
        assert hint(kit, engine, keys[2:]) == 4
        await asyncio.sleep(0.02)
        assert len(kit.disk.held) == 2, "the storage has other things to do"
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await reading
        await until(lambda: counts(kit).read_blocks == 4, "now it has not")
        await home(kit, engine)


async def test_nothing_is_read_for_hints_while_a_write_waits() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(4)
        new, desk = kit.chain(12, salt=1), kit.services.desk
        kit.fill(engine, new)
        pages = as_pages(list(range(12)))
        storing = kit.node.store(kit.call(engine), kit.namespace, Chain(new, ROOT, 0), engine.region, pages)
        await until(lambda: desk.writes_waiting() > 0, "more writes than may be under way")
        assert hint(kit, engine, keys) == 4
        while desk.writes_waiting():
            assert not any(isinstance(op, BlockRead) for op in kit.disk.held)
            kit.disk.release_one()
            await asyncio.sleep(0)
        await until(lambda: any(isinstance(op, BlockRead) for op in kit.disk.held), "writes under way are no reason")
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        assert end_of(await told(storing.outbox)).reason is Reason.OK
        await home(kit, engine)


async def test_a_hint_that_waits_for_an_idle_storage_is_looked_after_when_no_completion_comes() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(2)
        kit.pumping = False
        kit.services.reader._unstarted_bytes = 1
        assert hint(kit, engine, keys) == 2 and not kit.disk.held
        kit.services.reader._unstarted_bytes = 0
        await asyncio.sleep(0)
        assert not kit.disk.held
        kit.node.prefetcher.look()
        assert len(kit.disk.held) == 2
        kit.pumping = True
        await home(kit, engine)


async def test_a_request_that_wants_a_block_hastens_its_read_and_reads_the_rest_itself() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(4)
        kit.services.desk.ops_max = 1
        hint(kit, engine, keys)
        reading = asyncio.get_running_loop().create_task(fetch(kit, engine, keys))
        await asyncio.sleep(0)
        kit.disk.closed = False
        while not reading.done():
            kit.disk.release_one()
            await asyncio.sleep(0)
        assert await reading < 4 and set(kit.disk.reads.values()) == {1}, "no block is read twice"
        assert counts(kit).taken_bytes == 0
        await home(kit, engine)


async def test_hints_take_no_more_than_their_budget() -> None:
    async with node_kit(limits=limits(4)) as kit:
        engine, keys = kit.engine(), kit.chain(8)
        await kit.store(engine, keys)
        kit.forget_clean()
        assert hint(kit, engine, keys[:6], 1.0) == 4
        assert hint(kit, engine, keys[:3], 2.0) == 3, "they are among those already"
        assert hint(kit, engine, keys[6:], 2.0) == 0
        assert counts(kit).refused_blocks == 4 and counts(kit).taken_bytes == 4 * RECORD
        await until(lambda: counts(kit).read_blocks == 4, "those are read")
        assert await fetch(kit, engine, keys[:2]) == 0
        assert hint(kit, engine, keys[6:], 2.0) == 2, "two were wanted and made room"
        await home(kit, engine)


async def test_hints_leave_each_others_blocks_alone_and_a_request_does_not() -> None:
    async with node_kit(slots=8, limits=limits(64)) as kit:
        engine, keys = kit.engine(), kit.chain(8)
        others = kit.chain(8, salt=1)
        await kit.store(engine, keys)
        await kit.store(engine, others)
        kit.forget_clean()
        hint(kit, engine, keys, 60.0)
        await until(lambda: counts(kit).read_blocks == 8, "the pool is full of them")
        hint(kit, engine, others)
        await until(lambda: not len(kit.node.prefetcher._book), "the others find no slot")
        assert counts(kit).read_blocks == 8 and counts(kit).refused_blocks == 8
        assert set(kit.pooled()) == set(keys)
        assert await fetch(kit, engine, others[:5]) == 5
        assert len(set(kit.pooled()) & set(keys)) == 3
        await home(kit, engine)


async def test_what_was_not_wanted_long_after_it_was_expected_makes_room() -> None:
    async with node_kit(slots=8, limits=limits(8)) as kit:
        engine, keys = kit.engine(), kit.chain(8)
        others = kit.chain(4, salt=1)
        await kit.store(engine, keys)
        await kit.store(engine, others)
        kit.forget_clean()
        hint(kit, engine, keys, 1.0)
        await until(lambda: counts(kit).read_blocks == 8, "read")
        book, now_ns = kit.node.prefetcher._book, kit.services.clock.now_ns()
        book.expire(now_ns + GRACE_NS)
        assert counts(kit).expired_blocks == 0, "it may come late"
        book.expire(now_ns + GRACE_NS + 2_000_000_000)
        assert (counts(kit).expired_blocks, counts(kit).taken_bytes) == (8, 0)
        assert hint(kit, engine, others) == 4
        await until(lambda: counts(kit).read_blocks == 12, "in their place")
        await home(kit, engine)


async def test_what_is_stored_nowhere_is_not_taken_on_where_the_index_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(5)
        await kit.store(engine, keys[:3])
        kit.forget_clean()
        monkeypatch.setattr(type(kit.storage.index), "complete", True)
        assert hint(kit, engine, keys) == 3
        assert counts(kit).refused_blocks == 2
        await until(lambda: counts(kit).read_blocks == 3, "those that are")
        await home(kit, engine)


async def test_behind_a_block_that_is_lost_nothing_is_read() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(UNDER_WAY_MAX + 4)
        assert hint(kit, engine, keys) == len(keys)
        kit.disk.fails = lambda op: Reason.MISS if isinstance(op, BlockRead) and op.key == keys[1] else None
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(lambda: not len(kit.node.prefetcher._book), "nothing is left to be read")
        assert counts(kit).refused_blocks == 5 and sum(kit.disk.reads.values()) == UNDER_WAY_MAX
        await home(kit, engine)


@pytest.mark.parametrize("end", ["session", "drain", "shutdown", "purge"])
async def test_hints_go_with_their_session_and_with_a_drain_a_shutdown_and_a_purge(end: str) -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(UNDER_WAY_MAX + 4)
        assert hint(kit, engine, keys, 9.0) == len(keys)
        assert len(kit.disk.held) == UNDER_WAY_MAX
        purging: asyncio.Task[tuple[int, int]] | None = None
        match end:
            case "session":
                kit.node.session_closed(engine.session.session_id, "gone")
            case "drain":
                kit.node.drain()
                assert hint(kit, engine, keys) == 0
            case "shutdown":
                assert await kit.node.shut_down(0.0)
            case _:
                purging = asyncio.get_running_loop().create_task(kit.node.namespaces.purge(kit.namespace))
                await until(lambda: not counts(kit).taken_bytes, "they are forgotten")
        assert counts(kit).taken_bytes == 0 and not kit.node.prefetcher._reads
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await asyncio.sleep(0)
        if purging is not None:
            await purging
        assert sum(kit.disk.reads.values()) == UNDER_WAY_MAX, "what was begun ends, no more is begun"
        await home(kit, engine)


async def test_another_sessions_hints_stay_when_one_goes() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(4)
        other = kit.engine()
        hint(kit, engine, keys[:2], 1.0)
        hint(kit, other, keys[2:], 1.0)
        kit.node.session_closed(engine.session.session_id, "gone")
        assert counts(kit).taken_bytes == 2 * RECORD
        await home(kit, engine, other)


async def test_hints_that_wait_go_on_when_the_session_whose_blocks_are_being_read_goes() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(UNDER_WAY_MAX + 2)
        other = kit.engine()
        hint(kit, engine, keys[:UNDER_WAY_MAX], 1.0)
        hint(kit, other, keys[UNDER_WAY_MAX:], 2.0)
        assert len(kit.disk.held) == UNDER_WAY_MAX
        kit.node.session_closed(engine.session.session_id, "gone")
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(lambda: counts(kit).read_blocks == 2, "the other session's blocks are read")
        await home(kit, other)


async def test_an_empty_hint_and_too_many_of_them_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "HINTS_MAX", 2)
    monkeypatch.setattr(prefetching, "UNDER_WAY_MAX", 1)
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(6)
        assert hint(kit, engine, ()) == 0
        assert [hint(kit, engine, keys[n : n + 2]) for n in (0, 2, 4)] == [2, 2, 0]
        await home(kit, engine)
