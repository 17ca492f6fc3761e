"""What a careful reader found: orders of calls, purges amid writes, and one failing owner among many."""

from __future__ import annotations

import asyncio

import pytest
from node_kit import LAYOUT, end_of, node_kit, told, until

from kvmoverd.core.errors import RequestTaken
from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.hand_out import HandOut
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain


async def test_a_stream_without_hits_that_comes_after_the_reservation_is_told_of_it() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        call = kit.call(engine)
        plan = kit.plan(engine, call, kit.chain(2), hit=0, path=None)
        push = kit.node.push(plan)
        await until(lambda: push.request.prefix_set, "the push is reserved for")
        stream = kit.node.stream(plan)
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        kit.node.requests.stop_all(Reason.SHUTTING_DOWN, "the test is over")
        await kit.everything_is_home()


@pytest.mark.parametrize("path", list(Path))
async def test_the_end_of_a_stream_says_how_much_was_read_from_storage(path: Path) -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        await kit.store(engine, keys)
        kit.forget_clean()
        call = kit.call(engine)
        stream = kit.node.stream(kit.plan(engine, call, keys, hit=3, path=path))
        end = end_of(await told(stream.outbox))
        assert (end.reason, end.storage_read_bytes) == (Reason.OK, 3 * LAYOUT.record_bytes)
        kit.node.cancel(call.request_id, 1, engine.session.session_id)
        await kit.everything_is_home()


async def test_nothing_that_was_written_amid_a_purge_is_found_after_it() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(6)
        for page, key in enumerate(keys):
            engine.fill(page, kit.content(key))
        kit.disk.closed = True
        pages = as_pages(list(range(6)))
        store = kit.node.store(kit.call(engine), kit.namespace, Chain(keys, ROOT, 0), engine.region, pages)
        await until(lambda: kit.services.desk.writes(kit.namespace) > 0, "writes are under way")
        purging = asyncio.get_running_loop().create_task(kit.node.namespaces.purge(kit.namespace))
        await asyncio.sleep(0.02)
        assert not purging.done()
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await asyncio.wait_for(purging, 5.0)
        await told(store.outbox)
        looked = await kit.node.namespaces.lookup(kit.namespace, keys)
        assert (looked.prefix_blocks, looked.pooled_blocks) == (0, 0)
        fetch = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE)
        await told(fetch.outbox)
        assert not kit.pooled()
        await kit.everything_is_home()


def test_one_owner_that_fails_does_not_take_the_others_completions() -> None:
    heard = []

    def take(number: int) -> None:
        if number == 1:
            raise ValueError("a broken invariant")
        heard.append(number)

    handed = HandOut()
    for number in range(4):
        handed.out(take, number)
    assert heard == [0, 2, 3]
    with pytest.raises(ValueError, match="a broken invariant"):
        handed.check()


async def test_another_session_does_not_take_the_place_of_an_engine_that_waits() -> None:
    async with node_kit() as kit:
        waits, stranger = kit.engine(), kit.engine()
        side = kit.node.decode_side
        outbox = side.attach(kit.namespace, "x", 1, waits.session.session_id, 5.0)
        with pytest.raises(RequestTaken, match="another session waits for request 'x'"):
            side.attach(kit.namespace, "x", 2, stranger.session.session_id, 5.0)
        kit.node.cancel("x", 1, waits.session.session_id)
        assert end_of(await told(outbox)).reason is Reason.CANCELLED
        await kit.everything_is_home()


async def test_a_push_that_comes_after_its_stream_failed_fails_with_it_at_once() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        await kit.store(engine, keys)
        kit.forget_clean()
        kit.disk.closed = True
        call = kit.call(engine)
        plan = kit.plan(engine, call, keys, hit=2, path=Path.PE)
        stream = kit.node.stream(plan)
        await until(lambda: bool(kit.disk.held), "the stream reads")
        stream.stop(Reason.PEER_LOST, "the other node is gone")
        assert end_of(await told(stream.outbox)).reason is Reason.PEER_LOST
        push = kit.node.push(plan)
        end = end_of(await told(push.outbox))
        assert (end.reason, end.message, end.pages_quiet) == (Reason.PEER_LOST, "the other node is gone", True)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await kit.everything_is_home()
