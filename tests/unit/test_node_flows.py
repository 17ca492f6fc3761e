"""The flows of a node, both engines on it: bytes, order of events, and books that add up afterwards."""

from __future__ import annotations

import asyncio

import pytest
from node_kit import LAYOUT, end_of, node_kit, told, until

from kvmoverd.core.errors import BadPages, BadRequest, NotWhole, PagesBusy, StaleAttempt, UnknownPeer
from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.actions import AnnouncePrefix, AnnounceStored, AnnounceWhole
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import BlockState, Path, Reason
from kvmoverd.node.outbox import Attached, Fetched
from kvmoverd.node.services import Limits
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize(("hit", "full", "tail"), [(0, 2, 0), (0, 2, 3), (3, 5, 0), (3, 5, 3), (5, 5, 3)])
async def test_a_turn_carries_every_byte_to_both_engines(path: Path, hit: int, full: int, tail: int) -> None:
    async with node_kit() as kit:
        prefill, decode, writer = kit.engine(), kit.engine(), kit.engine()
        keys = kit.chain(full)
        await kit.store(writer, keys[:hit])
        tail_content = kit.content(b"tail" * 8)
        call = kit.call(prefill)
        plan = kit.plan(prefill, call, keys, hit=hit, path=path, tail=tail)
        assembled = kit.node.decode_side.attach(kit.namespace, call.request_id, 1, decode.session.session_id, 5.0)
        events = []
        if hit:
            stream = kit.node.stream(plan)
            events = await told(stream.outbox)
            assert end_of(events).reason is Reason.OK
            assert [prefill.block(page) for page in range(hit)] == [kit.content(key) for key in keys[:hit]]
        push = kit.node.push(plan)
        for layer in range(LAYOUT.layer_count):
            for page in range(hit, full):
                prefill.fill_layer(layer, page, kit.content(keys[page]))
            if tail:
                prefill.fill_layer(layer, full, tail_content)
            push.request.computed(layer + 1)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver_and_check(kit, decode, call, keys, tail, tail_content, assembled)
        await until(lambda: not kit.node.requests.live(), "all requests end")
        await kit.everything_is_home()
        looked = await kit.node.namespaces.lookup(kit.namespace, keys)
        assert looked.prefix_blocks == full


async def deliver_and_check(kit, decode, call, keys, tail, tail_content, assembled) -> None:  # type: ignore[no-untyped-def]
    attached = await asyncio.wait_for(assembled.get(), 5)
    assert attached == Attached(len(keys), tail, "here")
    assert isinstance(await asyncio.wait_for(assembled.get(), 5), AnnounceWhole)
    pages = as_pages(list(range(len(keys) + (tail > 0))))
    delivery = kit.node.decode_side.deliver(
        call.request_id, call.attempt, decode.region, pages, decode.session.session_id
    )
    assert end_of(await told(delivery)).reason is Reason.OK
    assert [decode.block(page) for page in range(len(keys))] == [kit.content(key) for key in keys]
    if tail:
        got, want = decode.block(len(keys)), tail_content
        for layer in range(LAYOUT.layer_count):
            for offset, size in zip(LAYOUT.segment_offsets(layer), LAYOUT.layers[layer], strict=True):
                valid = LAYOUT.tail_bytes(size, tail)
                assert got[offset : offset + valid] == want[offset : offset + valid]
                assert not any(got[offset + valid : offset + size]), "bytes beyond the tail were written"
    rest = await told(assembled)
    assert any(isinstance(event, AnnounceStored) for event in rest)
    assert end_of(rest).reason is Reason.OK


@pytest.mark.parametrize("path", list(Path))
async def test_a_corrupt_block_cuts_the_prefix_and_the_recomputed_one_repairs_it(path: Path) -> None:
    async with node_kit(slots=64) as kit:
        prefill, decode, writer = kit.engine(), kit.engine(), kit.engine()
        keys = kit.chain(4)
        await kit.store(writer, keys)
        kit.forget_clean()
        record = bytearray(kit.storage.stored(kit.namespace, keys[2]) or b"")
        record[4096 + 2] ^= 1
        kit.storage.tamper(kit.namespace, keys[2], bytes(record))
        call = kit.call(prefill)
        plan = kit.plan(prefill, call, keys, hit=4, path=path, tail=1)
        assembled = kit.node.decode_side.attach(kit.namespace, call.request_id, 1, decode.session.session_id, 5.0)
        stream = kit.node.stream(plan)
        events = await told(stream.outbox)
        prefix = next(event for event in events if isinstance(event, AnnouncePrefix))
        assert prefix.prefix_blocks == 2
        assert prefix.first_lost is not None and prefix.first_lost.reason is Reason.CORRUPT
        assert end_of(events).reason is Reason.OK and end_of(events).prefix_blocks == 2
        push = kit.node.push(plan)
        for layer in range(LAYOUT.layer_count):
            for page in (2, 3):
                prefill.fill_layer(layer, page, kit.content(keys[page]))
            prefill.fill_layer(layer, 4, kit.content(b"tail" * 8))
            push.request.computed(layer + 1)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver_and_check(kit, decode, call, keys, 1, kit.content(b"tail" * 8), assembled)
        await until(lambda: not kit.node.requests.live(), "all requests end")
        await kit.everything_is_home()
        stored = kit.storage.stored(kit.namespace, keys[2])
        assert stored is not None and stored[4096 : 4096 + LAYOUT.block_bytes] == kit.content(keys[2])


async def test_fetch_answers_each_key_in_order_with_duplicates_and_misses() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        keys = kit.chain(3)
        await kit.store(engine, keys[:2])
        asked = (keys[1], keys[2], keys[1], keys[0])
        pages = as_pages([10, 11, 12, 13])
        driver = kit.node.fetch(
            kit.call(engine), kit.namespace, asked, FetchKind.PAGES, region=engine.region, pages=pages
        )
        events = await told(driver.outbox)
        fetched = next(event for event in events if isinstance(event, Fetched))
        assert [outcome.state for outcome in fetched.outcomes] == [
            BlockState.HIT,
            BlockState.MISS,
            BlockState.HIT,
            BlockState.HIT,
        ]
        assert [engine.block(page) for page in (10, 12, 13)] == [kit.content(keys[n]) for n in (1, 1, 0)]
        assert not any(engine.block(11)), "a missed block's page was written"
        await kit.everything_is_home()


async def test_an_empty_fetch_and_an_empty_store_are_done_at_once() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        fetch = kit.node.fetch(kit.call(engine), kit.namespace, (), FetchKind.LEASE)
        assert end_of(await told(fetch.outbox)).reason is Reason.OK
        empty = Chain((), ROOT, 0)
        driver = kit.node.store(kit.call(engine), kit.namespace, empty, engine.region, as_pages([]))
        assert end_of(await told(driver.outbox)).reason is Reason.OK
        await kit.everything_is_home()


async def test_a_lease_holds_its_slots_until_it_is_released_or_its_session_ends() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        keys = kit.chain(3)
        await kit.store(engine, keys)
        driver = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60.0)
        fetched = next(event for event in await told(driver.outbox) if isinstance(event, Fetched))
        assert kit.pool.slot_counts()[0]["leased"] == 3
        session = engine.session.session_id
        refs = [(fetched.lease_id, fetched.lease_generation), (999, 1)]
        assert kit.node.leases.renew(session, refs, 60.0) == [True, False]
        assert kit.node.leases.release(session, refs) == 1
        await kit.everything_is_home()
        kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60.0)
        await until(lambda: len(kit.node.leases) == 1, "a second lease")
        kit.node.session_closed(session, "test")
        assert len(kit.node.leases) == 0
        await kit.everything_is_home()
        assert engine.memory.closed


async def test_no_pages_are_taken_before_the_buffer_is_whole() -> None:
    async with node_kit() as kit:
        prefill, decode = kit.engine(), kit.engine()
        keys = kit.chain(2)
        call = kit.call(prefill)
        kit.node.decode_side.attach(kit.namespace, call.request_id, 1, decode.session.session_id, 5.0)
        kit.fill(prefill, keys)
        push = kit.node.push(kit.plan(prefill, call, keys, hit=0, path=None))
        push.request.computed(LAYOUT.layer_count - 1)
        await until(lambda: push.machine.window.arrived.in_order == 2, "two layers pushed")
        with pytest.raises(NotWhole):
            kit.node.decode_side.deliver(call.request_id, 1, decode.region, as_pages([0, 1]), decode.session.session_id)
        assert decode.region.users == 0
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        delivery = kit.node.decode_side.deliver(
            call.request_id, 1, decode.region, as_pages([0, 1]), decode.session.session_id
        )
        assert end_of(await told(delivery)).reason is Reason.OK
        await until(lambda: not kit.node.requests.live(), "all requests end")
        await kit.everything_is_home()


async def test_a_higher_attempt_ends_the_lower_one_everywhere() -> None:
    async with node_kit() as kit:
        prefill, decode = kit.engine(), kit.engine()
        keys = kit.chain(2)
        first = kit.call(prefill, request_id="x")
        assembled = kit.node.decode_side.attach(kit.namespace, "x", 1, decode.session.session_id, 5.0)
        push = kit.node.push(kit.plan(prefill, first, keys, hit=0, path=None))
        await until(lambda: push.request.prefix_set, "reserved")
        again = kit.node.decode_side.attach(kit.namespace, "x", 2, decode.session.session_id, 5.0)
        assert end_of(await told(assembled)).reason is Reason.STALE_ATTEMPT
        assert end_of(await told(push.outbox)).reason is Reason.STALE_ATTEMPT
        with pytest.raises(StaleAttempt):
            kit.node.push(kit.plan(prefill, first, keys, hit=0, path=None))
        kit.fill(prefill, keys)
        second = kit.node.push(kit.plan(prefill, kit.call(prefill, request_id="x", attempt=2), keys, hit=0, path=None))
        second.request.computed(LAYOUT.layer_count)
        assert end_of(await told(second.outbox)).reason is Reason.OK
        kit.node.cancel("x", 2, decode.session.session_id)
        assert end_of(await told(again)).reason is Reason.CANCELLED
        await until(lambda: not kit.node.requests.live(), "all requests end")
        await kit.everything_is_home()


async def test_whichever_side_comes_alone_expires() -> None:
    async with node_kit(limits=Limits(attach_timeout_s=0.05)) as kit:
        prefill, decode = kit.engine(), kit.engine()
        lonely = kit.node.decode_side.attach(kit.namespace, "a", 1, decode.session.session_id, 5.0)
        call = kit.call(prefill, request_id="b")
        push = kit.node.push(kit.plan(prefill, call, kit.chain(2), hit=0, path=None))
        assert end_of(await told(lonely)).reason is Reason.DEADLINE
        await until(lambda: push.request.reserved is not None, "reserved")
        await asyncio.sleep(0.06)
        push.request.computed(1)
        assert end_of(await told(push.outbox)).reason is not Reason.OK
        await until(lambda: not kit.node.requests.live(), "all requests end")
        await kit.everything_is_home()


async def test_bad_input_is_refused_and_takes_nothing() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        keys = kit.chain(2)
        plan = kit.plan
        refused = [
            (BadPages, lambda call: kit.node.stream(plan(engine, call, keys, hit=2, path=Path.PE, first_page=31))),
            (BadRequest, lambda call: kit.node.stream(plan(engine, call, keys, hit=3, path=Path.PE))),
            (BadRequest, lambda call: kit.node.stream(plan(engine, call, (), hit=0, path=None))),
            (
                UnknownPeer,
                lambda call: kit.node.push(plan(engine, call, keys, hit=0, path=None, decode_node="nowhere")),
            ),
            (
                BadPages,
                lambda call: kit.node.store(call, kit.namespace, Chain(keys, ROOT, 0), engine.region, as_pages([1, 1])),
            ),
        ]
        for kind, attempt in refused:
            call = kit.call(engine)
            with pytest.raises(kind):
                attempt(call)
            with pytest.raises(kind):
                attempt(call)
        await kit.everything_is_home()


async def test_two_requests_never_write_the_same_pages() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        keys = kit.chain(2)
        await kit.store(engine, keys)
        kit.pumping = False
        kit.forget_clean()
        first = kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=2, path=Path.PE, decode_node=""))
        with pytest.raises(PagesBusy):
            kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=2, path=Path.PE, decode_node=""))
        kit.pumping = True
        assert end_of(await told(first.outbox)).reason is Reason.OK
        await kit.everything_is_home()


async def test_what_never_fits_is_told_at_once_and_what_does_not_fit_now_waits() -> None:
    async with node_kit(slots=8) as kit:
        engine = kit.engine(pages=32)
        big = kit.node.fetch(kit.call(engine), kit.namespace, kit.chain(9), FetchKind.LEASE)
        assert end_of(await told(big.outbox)).reason is Reason.TOO_BIG
        await kit.store(engine, kit.chain(6))
        held = kit.node.fetch(kit.call(engine), kit.namespace, kit.chain(6), FetchKind.LEASE, lease_s=60)
        await told(held.outbox)
        waiting = kit.node.fetch(kit.call(engine), kit.namespace, kit.chain(6, salt=1), FetchKind.LEASE, lease_s=60)
        assert end_of(await told(waiting.outbox)).reason is Reason.POOL_EXHAUSTED
        third = kit.node.fetch(kit.call(engine), kit.namespace, kit.chain(6), FetchKind.LEASE, lease_s=60)
        assert held.lease is not None
        kit.node.leases.release(engine.session.session_id, [(held.lease.lease_id, held.lease.generation)])
        assert end_of(await told(third.outbox)).reason is Reason.OK
        kit.node.session_closed(engine.session.session_id, "test")
        await kit.everything_is_home()
