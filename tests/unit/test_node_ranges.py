"""Reading by ranges of layers: first layers early, losses after the first layers, joining and leaving in the middle."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from node_gates import NEVER
from node_kit import LAYOUT, NodeKit, end_of, node_kit, told, until
from test_node_flows import deliver_and_check

from kvmoverd.core.machines.actions import AnnouncePrefix
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.driver import Driver
from kvmoverd.node.outbox import Fetched
from kvmoverd.node.prefill import Plan
from kvmoverd.node.sessions import as_pages
from kvmoverd.ports.storage import BlockRead


def planned(plan: Plan) -> Plan:
    """Where the request says who reads: one reader, this node."""
    return replace(plan, shares=(Share("here", plan.loaded),)) if plan.path is Path.PARTS else plan


@pytest.mark.parametrize("path", list(Path))
async def test_a_block_corrupt_in_its_last_layer_cuts_the_attempt_and_the_next_one_recomputes_from_it(
    path: Path,
) -> None:
    async with node_kit(slots=64) as kit:
        prefill, decode, writer = kit.engine(), kit.engine(), kit.engine()
        keys = kit.chain(4)
        await kit.store(writer, keys)
        kit.forget_clean()
        record = bytearray(kit.storage.stored(kit.namespace, keys[2]) or b"")
        record[4096 + LAYOUT.layer_span(2).start] ^= 1
        kit.storage.tamper(kit.namespace, keys[2], bytes(record))
        call = kit.call(prefill)
        plan = planned(kit.plan(prefill, call, keys, hit=4, path=path, tail=1))
        assembled = kit.node.decode_side.attach(kit.namespace, call.request_id, 1, decode.session.session_id, 5.0)
        events = await told(kit.node.stream(plan).outbox)
        assert next(event for event in events if isinstance(event, AnnouncePrefix)).prefix_blocks == 4
        assert (end_of(events).reason, end_of(events).prefix_blocks) == (Reason.PREFIX_CUT, 2)
        assert "block 2 was lost after its first layers: CORRUPT" in end_of(events).message
        assert end_of(await told(assembled)).reason is Reason.PREFIX_CUT, "the decode engine is told why"
        call = replace(call, attempt=2)
        plan = planned(kit.plan(prefill, call, keys, hit=2, path=path, tail=1))
        assembled = kit.node.decode_side.attach(kit.namespace, call.request_id, 2, decode.session.session_id, 5.0)
        assert end_of(await told(kit.node.stream(plan).outbox)).reason is Reason.OK
        push = kit.node.push(plan)
        for layer in range(LAYOUT.layer_count):
            for page in (2, 3):
                prefill.fill_layer(layer, page, kit.content(keys[page]))
            prefill.fill_layer(layer, 4, kit.content(b"tail" * 8))
            push.request.computed(layer + 1)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver_and_check(kit, decode, call, keys, 1, kit.content(b"tail" * 8), assembled)
        await kit.everything_is_home()


@pytest.mark.parametrize("late", [False, True])
async def test_a_push_whose_stream_was_cut_tells_where_the_cut_is(late: bool) -> None:
    """An engine may hear of the push's end first, and computes anew from there."""
    async with node_kit(slots=64) as kit:
        prefill, decode, writer = kit.engine(), kit.engine(), kit.engine()
        keys = kit.chain(4)
        await kit.store(writer, keys)
        kit.forget_clean()
        record = bytearray(kit.storage.stored(kit.namespace, keys[2]) or b"")
        record[4096 + LAYOUT.layer_span(2).start] ^= 1
        kit.storage.tamper(kit.namespace, keys[2], bytes(record))
        call = kit.call(prefill)
        plan = planned(kit.plan(prefill, call, keys, hit=4, path=Path.PE, tail=1))
        kit.node.decode_side.attach(kit.namespace, call.request_id, 1, decode.session.session_id, 5.0)
        stream = kit.node.stream(plan)
        push = None if late else kit.node.push(plan)
        assert end_of(await told(stream.outbox)).reason is Reason.PREFIX_CUT
        end = end_of(await told((push or kit.node.push(plan)).outbox))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 2)
        await kit.everything_is_home()


async def lose_the_last_block_as_the_first_begins(kit: NodeKit, driver: Driver) -> None:
    """Of two blocks whose first ranges are held: one step brings those of the first block, and the loss of the last."""
    kit.disk.held.reverse()
    kit.disk.release_one()
    await until(lambda: len(kit.disk.held) == 2, "the second range of the last block is under way")
    kit.disk.fails = lambda op: Reason.CORRUPT if isinstance(op, BlockRead) and op.first_layer else None
    kit.pumping = False
    kit.disk.release_one()
    kit.disk.release_one()
    kit.disk.fails = NEVER
    kit.disk.closed = False
    kit.pumping = True
    while not driver.ended:
        kit.disk.release_one()
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", list(Path))
async def test_a_block_lost_in_the_step_that_brings_the_others_first_layers_is_not_sent(path: Path) -> None:
    """The slot of the lost block is given up, and may be another's, before anyone is told."""
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(2)
        call = kit.call(engine)
        plan = planned(kit.plan(engine, call, keys, hit=2, path=path, decode_node="here" if path is Path.DE else ""))
        stream = kit.node.stream(plan)
        await until(lambda: len(kit.disk.held) == 2, "both first ranges are under way")
        await lose_the_last_block_as_the_first_begins(kit, stream)
        events = await told(stream.outbox)
        assert next(event for event in events if isinstance(event, AnnouncePrefix)).prefix_blocks == 1
        assert end_of(events).reason is Reason.OK
        assert engine.block(0) == kit.content(keys[0])
        kit.node.cancel(call.request_id, 1, engine.session.session_id)
        await kit.everything_is_home()


async def test_a_fetch_does_not_copy_a_block_lost_in_the_step_that_brings_the_others_first_layers() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(2)
        pages = as_pages([4, 5])
        driver = kit.node.fetch(
            kit.call(engine), kit.namespace, keys, FetchKind.PAGES, region=engine.region, pages=pages
        )
        await lose_the_last_block_as_the_first_begins(kit, driver)
        events = await told(driver.outbox)
        fetched = next(event for event in events if isinstance(event, Fetched))
        assert [outcome.reason for outcome in fetched.outcomes] == [Reason.OK, Reason.CORRUPT]
        assert engine.block(4) == kit.content(keys[0])
        await kit.everything_is_home()


async def test_who_listens_late_is_told_what_was_lost_before_what_goes_on() -> None:
    async with node_kit() as kit:
        blocks = BlockSet(1, kit.pool.size_class(LAYOUT), [0, 1])
        heard: list[object] = []
        blocks.went_on([0, 1], 2)
        blocks.ended([1], Reason.CORRUPT)
        blocks.listen(heard.append, heard.append)
        assert heard == [[(1, Reason.CORRUPT)], [(0, 2), (1, 2)]]


async def test_the_first_layers_are_ready_before_the_last_are_read() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(3)
        stream = kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=3, path=Path.PE, decode_node=""))
        assert [(op.first_layer, op.layers.stop) for op in kit.disk.held] == [(0, 1)] * 3
        for _ in range(3):
            kit.disk.release_one()
        await until(lambda: stream.machine.ready.in_order == 1, "layer 0 is ready")
        assert [(op.first_layer, op.layers.stop) for op in kit.disk.held] == [(1, 2)] * 3
        assert kit.services.desk.read_queue_bytes == 3 * (LAYOUT.record_bytes - LAYOUT.read_span(0, 1).stop)
        kit.disk.closed = False
        kit.disk.release_one()
        for _ in range(10):
            kit.disk.release_one()
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        assert [engine.block(page) for page in range(3)] == [kit.content(key) for key in keys]
        assert kit.services.desk.read_queue_bytes == 0
        await kit.everything_is_home()


async def test_ranges_grow_to_whole_blocks_when_others_read_too_and_for_whoever_wants_whole_blocks() -> None:
    async with node_kit(range_bytes=LAYOUT.layer_bytes[0]) as kit:
        engine, keys = await kit.stored_and_held(6)
        streams = [
            kit.node.stream(
                kit.plan(engine, kit.call(engine), keys[n : n + 1], hit=1, path=Path.PE, decode_node="", first_page=n)
            )
            for n in range(3)
        ]
        whole = kit.node.fetch(kit.call(engine), kit.namespace, keys[4:], FetchKind.LEASE)
        stops = [op.layers.stop for op in kit.disk.held if isinstance(op, BlockRead)]
        assert stops == [1, 1, 3, 3, 3]
        kit.disk.closed = False
        for _ in range(12):
            kit.disk.release_one()
        for stream in streams:
            assert end_of(await told(stream.outbox)).reason is Reason.OK
        assert end_of(await told(whole.outbox)).reason is Reason.OK
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_read_that_nobody_waits_for_any_more_is_not_continued() -> None:
    async with node_kit() as kit:
        engine, keys = await kit.stored_and_held(3)
        call = kit.call(engine)
        stream = kit.node.stream(kit.plan(engine, call, keys, hit=3, path=Path.PE, decode_node=""))
        kit.disk.release_one()
        await until(lambda: len(kit.disk.held) == 3, "the second range of the first block is under way")
        kit.node.cancel(call.request_id, 1, engine.session.session_id)
        assert end_of(await told(stream.outbox)).reason is Reason.CANCELLED
        for _ in range(3):
            kit.disk.release_one()
        await until(lambda: kit.services.desk.idle() and kit.services.desk.read_queue_bytes == 0, "no read is left")
        assert kit.pool.slot_counts()[0]["free"] == kit.pool.slot_counts()[0]["total"]
        await kit.everything_is_home()


async def test_who_joins_a_read_that_has_come_some_way_has_its_first_layers_at_once() -> None:
    async with node_kit() as kit:
        first, second, keys = kit.engine(), kit.engine(), kit.chain(2)
        await kit.store(first, keys)
        kit.forget_clean()
        kit.disk.closed = True
        one = kit.node.stream(kit.plan(first, kit.call(first), keys, hit=2, path=Path.PE, decode_node=""))
        kit.disk.release_one()
        kit.disk.release_one()
        await until(lambda: one.machine.ready.in_order == 1, "layer 0 is ready")
        two = kit.node.stream(kit.plan(second, kit.call(second), keys, hit=2, path=Path.PE, decode_node=""))
        await until(lambda: two.machine.ready.in_order == 1, "layer 0 is ready for the second too")
        kit.disk.closed = False
        for _ in range(10):
            kit.disk.release_one()
        for engine, stream in ((first, one), (second, two)):
            assert end_of(await told(stream.outbox)).reason is Reason.OK
            assert [engine.block(page) for page in range(2)] == [kit.content(key) for key in keys]
        assert kit.disk.reads == dict.fromkeys(keys, 1)
        await kit.everything_is_home()


async def test_a_fetch_into_pages_copies_while_it_reads_and_names_a_block_that_is_lost_late() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        record = bytearray(kit.storage.stored(kit.namespace, keys[1]) or b"")
        record[4096 + LAYOUT.layer_span(2).start] ^= 1
        kit.storage.tamper(kit.namespace, keys[1], bytes(record))
        kit.disk.closed = kit.wire.closed = True
        pages = as_pages([4, 5, 6])
        call = kit.call(engine)
        driver = kit.node.fetch(call, kit.namespace, keys, FetchKind.PAGES, region=engine.region, pages=pages)
        for _ in range(3):
            kit.disk.release_one()
        await until(lambda: len(kit.wire.held) == 1, "layer 0 is being copied while the others are read")
        kit.disk.closed = kit.wire.closed = False
        kit.wire.release_one()
        for _ in range(9):
            kit.disk.release_one()
        events = await told(driver.outbox)
        fetched = next(event for event in events if isinstance(event, Fetched))
        assert [outcome.reason for outcome in fetched.outcomes] == [Reason.OK, Reason.CORRUPT, Reason.OK]
        assert (end_of(events).reason, end_of(events).prefix_blocks) == (Reason.OK, 1)
        assert [engine.block(page) for page in (4, 6)] == [kit.content(key) for key in (keys[0], keys[2])]
        damaged, last = engine.block(5), LAYOUT.layer_span(2)
        assert not any(damaged[last.start : last.stop]), "a layer that failed its check was copied"
        await kit.everything_is_home()
