"""Frames that come late, twice or uncalled for never land; bytes that may be wrong are never kept."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from node_kit import LAYOUT, POISON, WHOLE, Anonymous, NodeKit, end_of, node_kit, told, until
from node_world import World
from test_node_incidents import SHORT

from kvmoverd.core.errors import BadPages, BadRequest, PagesBusy, UnknownRequest
from kvmoverd.core.machines.actions import AnnounceWhole
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.peer import PartListener, PartOrder, Reservation
from kvmoverd.node.reading import Destination
from kvmoverd.node.sessions import as_pages
from kvmoverd.ports.storage import BlockWrite
from kvmoverd.ports.transport import Send, Sent

_OPS = itertools.count(1_000_000)


async def frame(kit: NodeKit, sink_id: int, layer: int, first_block: int, size_bytes: int) -> Reason:
    """A frame of 0xEE from somewhere else: how its sender is answered."""
    memory = Anonymous(max(1, size_bytes))
    memory.bytes[:] = POISON
    pumping, kit.pumping = kit.pumping, False
    op_id = next(_OPS)
    source = np.array([[memory.address, size_bytes]], dtype=np.uint64)
    kit.wire.inner.submit([Send(op_id, None, sink_id, layer, first_block, source)])
    events = kit.wire.inner.poll(100)
    answer = next(event for event in events if isinstance(event, Sent) and event.op_id == op_id)
    for event in events:
        if event is not answer:
            kit.mover._take(event)
    kit.pumping = pumping
    return answer.reason


def reservation(kit: NodeKit, blocks: int, hit: int, path: Path | None) -> Reservation:
    keys = kit.chain(blocks)
    return Reservation("x", 1, kit.namespace.fingerprint, keys, 0, hit, path, 60.0, "here", "boot")


async def test_a_pushed_frame_for_a_released_ticket_is_refused() -> None:
    async with node_kit() as kit:
        reserved = await kit.node.decode_side.reserve(kit.namespace, reservation(kit, 2, 0, None))
        await kit.node.decode_side.set_prefix(reserved.ticket, 0, ())
        size_bytes = 2 * LAYOUT.layer_bytes[0]
        assert await frame(kit, reserved.push_sink, 0, 0, size_bytes) is Reason.OK
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        assert await frame(kit, reserved.push_sink, 1, 0, size_bytes) is Reason.CANCELLED
        await kit.everything_is_home()
        assert kit.pooled() == {}, "a buffer given up in mid-fill leaves no block"


async def test_a_buffer_takes_each_layer_once_whole_and_where_it_belongs() -> None:
    async with node_kit() as kit:
        reserved = await kit.node.decode_side.reserve(kit.namespace, reservation(kit, 2, 0, None))
        sink, size_bytes = reserved.push_sink, 2 * LAYOUT.layer_bytes[0]
        assert await frame(kit, sink, 0, 0, size_bytes) is Reason.CANCELLED, "nobody has said which blocks are new"
        await kit.node.decode_side.set_prefix(reserved.ticket, 0, ())
        assert await frame(kit, sink, 0, 0, size_bytes - 1) is Reason.INTERNAL
        assert await frame(kit, sink, 0, 1, size_bytes // 2) is Reason.CANCELLED
        assert await frame(kit, sink, 0, 0, size_bytes) is Reason.OK
        assert await frame(kit, sink, 0, 0, size_bytes) is Reason.CANCELLED, "it is in already"
        assert await frame(kit, sink, LAYOUT.layer_count, 0, size_bytes) is Reason.CANCELLED, "no such layer"
        assert await frame(kit, 99_999, 0, 0, size_bytes) is Reason.CANCELLED, "no such sink"
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_a_streamed_frame_lands_only_while_its_layer_is_granted() -> None:
    async with node_kit(slots=24, limits=SHORT, range_bytes=WHOLE) as kit:
        world = World(kit)
        await world.prepare()
        world.load_only()
        while not kit.wire.held:
            await world.step()
        sink_id, size_bytes = kit.wire.held[0][0].sink_id, 2 * LAYOUT.layer_bytes[0]
        assert await frame(kit, sink_id, 0, 1, size_bytes // 2) is Reason.CANCELLED, "not at its place"
        assert await frame(kit, sink_id, LAYOUT.layer_count, 0, size_bytes) is Reason.CANCELLED, "no such layer"
        await world.step()
        assert await frame(kit, sink_id, 0, 0, size_bytes) is Reason.CANCELLED, "ready: the engine reads it now"
        kit.node.cancel("x", 1, world.prefill.session.session_id)
        before = world.prefill.memory.bytes.copy()
        assert sink_id not in kit.wire._open
        kit.wire.fails = lambda send: Reason.CANCELLED
        await world.finish()
        assert await frame(kit, sink_id, 1, 0, size_bytes) is Reason.CANCELLED
        poisoned = world.prefill.memory.bytes == POISON
        assert (poisoned | (world.prefill.memory.bytes == before)).all()


async def test_a_prefix_that_was_not_read_here_is_not_believed() -> None:
    """Whole by the prefill node's word alone, the buffer would hand out what was in its slots before."""
    async with node_kit(range_bytes=WHOLE) as kit:
        keys = kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        kit.disk.closed = True
        reserved = await kit.node.decode_side.reserve(kit.namespace, reservation(kit, 2, 2, Path.DE))
        order = PartOrder(1, Runs.of((0, 2)), 1, 0, 0, holds=True, timeout_s=60.0, ticket=reserved.ticket)
        listener = PartListener(lambda prefix_blocks, first_lost: None, lambda end: None)
        kit.node.decode_side.read_part(order, ("here", "boot"), Destination(None, 1), listener).start()
        with pytest.raises(BadRequest, match="prefix of 2 blocks set, 0 have been read here"):
            await kit.node.decode_side.set_prefix(reserved.ticket, 2, ())
        kit.disk.release_one()
        await asyncio.sleep(0)
        await until(lambda: kit.pool.slot_counts()[0]["filling"] == 1, "one block is read")
        with pytest.raises(BadRequest, match="prefix of 2 blocks set, 1 have been read here"):
            await kit.node.decode_side.set_prefix(reserved.ticket, 2, ())
        await kit.node.decode_side.set_prefix(reserved.ticket, 1, ())
        kit.disk.closed = False
        kit.disk.release_one()
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


@pytest.mark.parametrize("steps", range(9))
async def test_a_buffer_given_up_in_mid_fill_never_serves_as_clean_blocks(steps: int) -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        world.turn_de()
        for _ in range(steps):
            await world.step()
        for driver in list(kit.node.decode_side._by_ticket.values()):
            driver.stop(Reason.CANCELLED, "given up")
        await world.finish()
        assert world.keys[2] not in kit.pooled() or kit.stored(world.keys[2]) is not None


async def test_a_block_published_from_a_buffer_has_exactly_the_stored_bytes() -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        world.turn_pe()
        await world.finish()
        assert kit.pooled()[world.keys[2]] == kit.stored(world.keys[2]) == kit.content(world.keys[2])


@pytest.mark.parametrize("flow", [World.turn_pe, World.store_blocks])
async def test_a_block_whose_write_failed_is_not_kept(flow) -> None:  # type: ignore[no-untyped-def]
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit, hit=2 if flow is World.turn_pe else 0)
        await world.prepare()
        kit.disk.fails = lambda op: Reason.NO_SPACE if isinstance(op, BlockWrite) else None
        flow(world)
        await world.finish()
        assert world.keys[2] not in kit.pooled() and kit.stored(world.keys[2]) is None
        assert (await kit.node.namespaces.lookup(kit.namespace, world.keys)).prefix_blocks == world.hit


async def test_a_refused_delivery_does_not_harm_the_buffer_and_a_second_one_is_refused() -> None:
    async with node_kit() as kit:
        prefill, decode, keys, side = kit.engine(), kit.engine(), kit.chain(2), kit.node.decode_side
        other = Namespace(Manifest("another", b"w" * 32, b"t" * 32, LAYOUT, "u8"))
        session, call = decode.session.session_id, kit.call(prefill)
        push = kit.node.push(kit.plan(prefill, call, keys, hit=0, path=None))
        kit.fill(prefill, keys)
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        assembled = side.attach(kit.namespace, call.request_id, 1, session, 5.0)
        while not isinstance(await assembled.get(), AnnounceWhole):
            pass
        decode.region.use(as_pages([4]))
        for error, pages in ((BadPages, [0]), (BadPages, [0, 0]), (BadPages, [0, 99]), (PagesBusy, [3, 4])):
            with pytest.raises(error):
                side.deliver(call.request_id, 1, decode.region, as_pages(pages), session)
        decode.region.let_go(as_pages([4]))
        pages = as_pages([1, 2])
        for request_id, attempt, asker in (
            ("?", 1, session),
            (call.request_id, 2, session),
            (call.request_id, 1, "s9"),
        ):
            with pytest.raises(UnknownRequest):
                side.deliver(request_id, attempt, decode.region, pages, asker)
        decode.region.namespace = other
        with pytest.raises(BadRequest):
            side.deliver(call.request_id, 1, decode.region, pages, session)
        decode.region.namespace = kit.namespace
        kit.wire.closed = True
        delivery = side.deliver(call.request_id, 1, decode.region, pages, session)
        with pytest.raises(UnknownRequest):
            side.deliver(call.request_id, 1, decode.region, as_pages([5, 6]), session)
        kit.wire.closed = False
        while kit.wire.release_one():
            pass
        assert end_of(await told(delivery)).reason is Reason.OK
        assert [decode.block(page) for page in (1, 2)] == [kit.content(key) for key in keys]
        assert end_of(await told(assembled)).reason is Reason.OK
        await kit.everything_is_home()


async def test_an_outbox_that_nobody_reads_stays_small() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(20)
        await kit.store(engine, keys)
        kit.forget_clean()
        fetch = kit.node.fetch
        drivers = [
            fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60),
            kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=20, path=Path.PE, decode_node="")),
        ]
        await until(lambda: all(driver.is_gone for driver in drivers), "both end")
        assert [len(driver.outbox._waiting) for driver in drivers] == [3, 3]
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()
