"""Help: a third node reads some blocks of a request and sends their layers to the engine's pages and to the DE buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from node_kit import LAYOUT, WHOLE, NodeKit, node_kit, until
from part_kit import OWNER, ROUTES, Owner, Pages, order_of, own_part

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadPlan, BadRequest, Draining, QueueFull, StaleAttempt
from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.peer import PartOrder
from kvmoverd.node.reading import HELP_WAIT_S, PartDriver
from kvmoverd.node.services import Limits, SplitSettings
from kvmoverd.ports.storage import BlockRead
from kvmoverd.ports.transport import Send

RECORD = LAYOUT.record_bytes
LAYERS = LAYOUT.layer_count


def opened(kit: NodeKit, order: PartOrder, owner: Owner) -> PartDriver:
    part = kit.node.helper_side.open(order, owner=OWNER, **ROUTES, listener=owner.listener)
    part.start()
    return part


async def steps(kit: NodeKit, done: Callable[[], bool]) -> None:
    """One device op after the other until it is so."""
    async with asyncio.timeout(5.0):
        while not done():
            kit.disk.release_one()
            kit.wire.release_one()
            await asyncio.sleep(0)


async def over(kit: NodeKit, *pages: Pages) -> None:
    kit.disk.closed = kit.wire.closed = False
    await steps(kit, lambda: not kit.disk.held and not kit.wire.held)
    for each in pages:
        each.close()
    await until(lambda: all(each.quiet for each in pages), "sinks are quiet")
    assert len(kit.parts) == 0
    await kit.everything_is_home()


async def test_a_helper_fills_the_pages_and_the_buffer_and_reads_each_block_once() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(5)
        pages, buffer, owner = Pages(kit, 5, first_block=3), Pages(kit, 5, first_block=3), Owner()
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        assert kit.admission.taken_bytes(Purpose.HELP) == 5 * RECORD
        assert kit.admission.taken_bytes(Purpose.READ) == 0
        kit.disk.closed = False
        await steps(kit, lambda: owner.prefix is not None)
        assert not pages.arrived, "it holds"
        part.credit(5, LAYERS)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.is_told_end)
        assert owner.end is not None and (owner.end.reason, owner.end.prefix_blocks) == (Reason.OK, 5)
        assert owner.end.storage_read_bytes == 5 * RECORD and owner.end.moved_bytes == 10 * LAYOUT.block_bytes
        for n, key in enumerate(keys):
            assert pages.block(n) == buffer.block(n) == kit.content(key)
        assert kit.disk.reads == dict.fromkeys(keys, 1)
        await over(kit, pages, buffer)


async def test_the_buffer_gets_only_the_blocks_of_the_prefix_that_all_parts_agreed_on() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, buffer, owner = Pages(kit, 2), Pages(kit, 2), Owner()
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(2, 1)
        await steps(kit, lambda: owner.prefix is not None and len(buffer.arrived) == LAYERS)
        assert pages.arrived == [0], "the engine has pages for one layer, the buffer for all"
        part.credit(2, LAYERS)
        await steps(kit, lambda: owner.is_told_end)
        assert [buffer.block(n) for n in range(2)] == [kit.content(key) for key in keys[:2]]
        await over(kit, pages, buffer)


async def test_layers_for_the_engine_and_for_the_buffer_ride_on_their_own_lanes() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(1)
        pages, buffer, owner = Pages(kit, 1), Pages(kit, 1), Owner()
        rode: dict[int, set[KvClass]] = {pages.sink_id: set(), buffer.sink_id: set()}

        def look(send: Send) -> None:
            rode[send.sink_id].add(send.kv_class)

        kit.wire.fails = look
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(1, LAYERS)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.is_told_end)
        assert rode == {pages.sink_id: {KvClass.LAYERS}, buffer.sink_id: {KvClass.ASSEMBLY}}
        await over(kit, pages, buffer)


async def test_without_a_decode_node_the_engines_pages_are_all() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(2)
        pages, owner = Pages(kit, 2), Owner()
        part = opened(kit, order_of(keys, pages, assembles=False, kit=kit), owner)
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(2, LAYERS)
        await steps(kit, lambda: owner.is_told_end)
        assert owner.end is not None and owner.end.reason is Reason.OK
        await over(kit, pages)


async def test_places_that_the_owner_knows_go_with_the_reads() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(2)
        pages, owner = Pages(kit, 2), Owner()
        place = Place("author", 1, 2)
        opened(kit, order_of(keys, pages, places=(None, place), kit=kit), owner)
        reads = [op for op in kit.disk.held if isinstance(op, BlockRead)]
        assert [(op.key, op.place) for op in reads] == [(keys[0], None), (keys[1], place)]
        kit.parts.stop(OWNER, 1)
        await over(kit, pages)


async def test_a_helpers_own_requests_read_before_what_it_reads_for_others() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(24)
        busy, mine, theirs = Pages(kit, 8), Pages(kit, 8), Pages(kit, 8)
        owners = [Owner(), Owner(), Owner()]
        own_part(kit, keys[:8], busy, owners[0])
        opened(kit, order_of(keys[8:16], theirs, kit=kit), owners[2])
        own_part(kit, keys[16:], mine, owners[1])
        for _ in range(8):
            kit.disk.release_one()
        await until(lambda: len(kit.disk.held) == 8, "eight more are under way")
        assert [op.key for op in kit.disk.held if isinstance(op, BlockRead)] == list(keys[16:])
        kit.parts.stop(OWNER, 1)
        await steps(kit, lambda: owners[0].is_told_end and owners[1].is_told_end)
        await over(kit, busy, mine, theirs)


async def test_a_part_waits_for_the_room_of_helpers_only_a_short_while() -> None:
    async with node_kit(limits=Limits(admission_wait_s=30.0)) as kit:
        _, keys = await kit.stored_and_held(2)
        kit.services.room.ask(Purpose.HELP, "others", 64 * RECORD, granted=lambda: None, refused=lambda error: None)
        pages, owner = Pages(kit, 2), Owner()
        began_s = asyncio.get_running_loop().time()
        opened(kit, order_of(keys, pages, kit=kit), owner)
        await until(lambda: owner.is_told_end, "it is refused")
        assert HELP_WAIT_S <= asyncio.get_running_loop().time() - began_s < HELP_WAIT_S + 2.0
        assert owner.end is not None and owner.end.reason is Reason.POOL_EXHAUSTED
        assert "pool.help_bytes, after 0.5 s" in owner.end.message
        kit.services.room.give_back("others")
        await over(kit, pages)


async def test_what_never_fits_is_refused_at_once() -> None:
    async with node_kit() as kit:
        keys, owner = kit.chain(65), Owner()
        pages = Pages(kit, 1)
        opened(kit, order_of(keys, pages, kit=kit), owner)
        assert owner.end is not None and owner.end.reason is Reason.TOO_BIG
        await over(kit, pages)


async def test_a_stop_waits_for_what_is_under_way_to_both_places() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(2)
        pages, buffer, owner = Pages(kit, 2), Pages(kit, 2), Owner()
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        kit.disk.closed = False
        await steps(kit, lambda: owner.prefix is not None)
        kit.wire.closed = True
        part.credit(2, 1)
        part.assemble(buffer.sink_id)
        assert len(kit.wire.held) == 1 + LAYERS
        assert kit.parts.stop(OWNER, 1) is part
        kit.wire.release_one()
        await asyncio.sleep(0)
        assert not part.is_gone and not owner.is_told_end
        kit.wire.closed = False
        await steps(kit, lambda: part.is_gone)
        assert owner.end is not None and owner.end.reason is Reason.CANCELLED
        await over(kit, pages, buffer)


@pytest.mark.parametrize("failing", ["pages", "buffer"])
async def test_a_place_that_can_not_be_reached_ends_the_part(failing: str) -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(2)
        pages, buffer, owner = Pages(kit, 2), Pages(kit, 2), Owner()
        lost = {"pages": pages, "buffer": buffer}[failing].sink_id
        kit.wire.fails = lambda send: Reason.PEER_LOST if send.sink_id == lost else None
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(2, LAYERS)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.is_told_end)
        assert owner.end is not None and owner.end.reason is Reason.PEER_LOST
        await over(kit, pages, buffer)


async def test_a_block_lost_after_the_prefix_cuts_the_part() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        await kit.store(engine, keys)
        kit.forget_clean()
        record = bytearray(kit.storage.stored(kit.namespace, keys[1]) or b"")
        record[4096 + LAYOUT.layer_span(LAYERS - 1).start] ^= 1
        kit.storage.tamper(kit.namespace, keys[1], bytes(record))
        pages, buffer, owner = Pages(kit, 3), Pages(kit, 3), Owner()
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(3, LAYERS)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.is_told_end)
        assert owner.end is not None and (owner.end.reason, owner.end.prefix_blocks) == (Reason.PREFIX_CUT, 1)
        assert LAYERS - 1 not in pages.arrived + buffer.arrived
        await over(kit, pages, buffer)


async def test_the_owners_death_ends_its_parts_in_every_state() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(3)
        kit.disk.closed = False
        sinks = [Pages(kit, 1) for _ in range(3)]
        owners = [Owner() for _ in range(3)]
        held = opened(kit, order_of(keys[:1], sinks[0], part=1, kit=kit), owners[0])
        sent = opened(kit, order_of(keys[1:2], sinks[1], part=2, kit=kit), owners[1])
        await steps(kit, lambda: owners[0].prefix is not None and owners[1].prefix is not None)
        kit.disk.closed = True
        sent.credit(1, LAYERS)
        await steps(kit, lambda: len(sinks[1].arrived) == LAYERS)
        opened(kit, order_of(keys[2:], sinks[2], part=3, kit=kit), owners[2])
        assert [held.machine.state.name, sent.machine.state.name] == ["HOLDING", "SENDING"]
        kit.parts.peer_lost(*OWNER, "no beat for 2 s")
        assert [owner.end.reason for owner in owners if owner.end] == [Reason.PEER_LOST] * 3
        await over(kit, *sinks)


async def test_a_deadline_ends_a_part_that_nobody_credits() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(1)
        pages, owner = Pages(kit, 1), Owner()
        opened(kit, order_of(keys, pages, timeout_s=0.05, kit=kit), owner)
        await steps(kit, lambda: owner.is_told_end)
        assert owner.end is not None and owner.end.reason is Reason.DEADLINE
        await over(kit, pages)


async def test_what_is_refused_leaves_nothing() -> None:
    async with node_kit() as kit:
        keys, pages, owner = kit.chain(2), Pages(kit, 2), Owner()
        order = order_of(keys, pages, kit=kit)
        with pytest.raises(BadRequest, match="0 keys are given for a part of 2 blocks"):
            opened(kit, replace(order, help=None), owner)
        kit.services.split = SplitSettings(helps=False)
        with pytest.raises(BadPlan, match=r"here reads for no other node: split\.helps"):
            opened(kit, order, owner)
        assert not kit.node.helper_side.helps
        kit.services.split = SplitSettings()
        kit.node.requests.draining = True
        with pytest.raises(Draining):
            opened(kit, order, owner)
        kit.node.requests.draining = False
        kit.node.requests.live_max = 0
        with pytest.raises(QueueFull):
            opened(kit, order, owner)
        kit.node.requests.live_max = 64
        assert not owner.said
        await over(kit, pages)


async def test_a_number_is_open_once_and_a_request_may_have_several_parts_here() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(2)
        pages, more, owner, other = Pages(kit, 1), Pages(kit, 1), Owner(), Owner()
        opened(kit, order_of(keys[:1], pages, kit=kit), owner)
        with pytest.raises(BadRequest, match="part 1 of owner is open already"):
            opened(kit, order_of(keys[1:], more, kit=kit), other)
        opened(kit, order_of(keys[1:], more, part=2, kit=kit), other)
        assert len(kit.parts) == 2
        kit.parts.stop(OWNER, 1)
        kit.parts.stop(OWNER, 2)
        assert kit.parts.stop(OWNER, 2) is None
        await over(kit, pages, more)


async def test_a_higher_attempt_ends_the_parts_of_lower_ones_and_these_are_refused_from_then_on() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(2)
        pages, owner, later, late = Pages(kit, 2), Owner(), Owner(), Owner()
        opened(kit, order_of(keys, pages, kit=kit), owner)
        opened(kit, order_of(keys, pages, part=2, attempt=2, kit=kit), later)
        assert owner.end is not None and owner.end.reason is Reason.STALE_ATTEMPT
        with pytest.raises(StaleAttempt):
            opened(kit, order_of(keys, pages, part=3, kit=kit), late)
        kit.parts.stop(OWNER, 2)
        await over(kit, pages)


async def test_a_part_of_an_attempt_that_is_fenced_off_ends_and_no_later_one_of_it_is_taken() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(2)
        pages, owner, again = Pages(kit, 2), Owner(), Owner()
        first = opened(kit, order_of(keys, pages, kit=kit), owner)
        kit.node.requests.fence_off(first.call.request_id, first.call.attempt)
        assert owner.end is not None and owner.end.reason is Reason.STALE_ATTEMPT
        with pytest.raises(StaleAttempt):
            opened(kit, order_of(keys, pages, part=2, kit=kit), Owner())
        opened(kit, order_of(keys, pages, part=3, attempt=2, kit=kit), again)
        assert again.end is None
        kit.parts.stop(OWNER, 3)
        await over(kit, pages)


async def test_a_helper_gives_up_blocks_and_their_room() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(12)
        pages, buffer, owner = Pages(kit, 8), Pages(kit, 8), Owner()
        part = opened(kit, order_of(keys, pages, kit=kit), owner)
        part.give_up(1)
        assert owner.gave_up == [8] and kit.admission.taken_bytes(Purpose.HELP) == 8 * RECORD
        kit.disk.closed = False
        await steps(kit, lambda: owner.prefix is not None)
        part.credit(8, LAYERS)
        part.assemble(buffer.sink_id)
        await steps(kit, lambda: owner.is_told_end)
        for n, key in enumerate(keys[:8]):
            assert pages.block(n) == buffer.block(n) == kit.content(key)
        await over(kit, pages, buffer)
