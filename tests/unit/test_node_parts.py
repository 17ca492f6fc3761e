"""A part on its node: progress, blocks given up while they are read, taken over at a later layer, late devices."""

from __future__ import annotations

import asyncio

import numpy as np
from node_kit import LAYOUT, WHOLE, NodeKit, node_kit, until
from part_kit import OWNER, Owner, Pages, own_part

from kvmoverd.core.admission import Purpose
from kvmoverd.core.status import Reason
from kvmoverd.node.mover import UNDER_WAY_MAX, Need
from kvmoverd.node.services import Limits

RECORD = LAYOUT.record_bytes
LAYERS = LAYOUT.layer_count


async def finished(kit: NodeKit, owners: Owner | list[Owner], *pages: Pages) -> None:
    """The devices let everything happen; the parts end; all is home."""
    kit.disk.closed = kit.wire.closed = False
    for owner in [owners] if isinstance(owners, Owner) else owners:
        while owner.end is None:
            kit.disk.release_one()
            kit.wire.release_one()
            await _turns()
    while kit.disk.release_one() or kit.wire.release_one():
        await _turns()
    for each in pages:
        each.close()
    await until(lambda: all(each.quiet for each in pages), "sinks are quiet")
    await kit.everything_is_home()


async def _turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_part_tells_what_it_has_begun_and_read_once_for_a_batch() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(12)
        pages, owner = Pages(kit, 12), Owner()
        own_part(kit, keys, pages, owner)
        assert owner.progress == [(8, 0)], "the desk lets eight ops be under way"
        kit.pumping = False
        for _ in range(3):
            kit.disk.release_one()
        kit.pumping = True
        await until(lambda: len(owner.progress) == 2, "three reads came in one batch")
        assert owner.progress[-1] == (11, 3 * RECORD)
        await finished(kit, owner, pages)
        assert owner.said[-3:] == [("prefix", 12), ("progress", 12), ("end", "OK")]
        assert [pages.block(n) for n in range(12)] == [kit.content(key) for key in keys]


async def test_blocks_that_are_in_the_pool_count_as_begun_and_are_not_read() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(12)
        kit.disk.closed = False
        first = Owner()
        warm = Pages(kit, 4)
        own_part(kit, keys[:4], warm, first)
        await until(lambda: first.end is not None, "four blocks are clean in the pool")
        warm.close()
        kit.disk.closed = True
        pages, owner = Pages(kit, 12), Owner()
        own_part(kit, keys, pages, owner)
        assert owner.progress == [(12, 0)], "four are there, eight are under way"
        await finished(kit, owner, pages)
        assert owner.end is not None and owner.end.storage_read_bytes == 8 * RECORD


async def test_a_part_gives_up_the_reads_that_no_device_knows_of_and_their_room() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(20)
        pages, owner = Pages(kit, 20), Owner()
        part = own_part(kit, keys, pages, owner)
        assert kit.admission.taken_bytes(Purpose.READ) == 20 * RECORD
        part.give_up(3)
        assert owner.gave_up == [8], "eight are under way"
        assert kit.admission.taken_bytes(Purpose.READ) == 8 * RECORD
        assert kit.services.desk.reads_waiting() == 0
        assert kit.services.desk.read_queue_bytes == 8 * RECORD
        kit.disk.closed = False
        while kit.disk.release_one():
            await _turns()
        assert owner.prefix == (8, None) and not pages.arrived, "it holds from now on"
        pages.prefix_of(6)
        part.credit(6, LAYERS)
        await finished(kit, owner, pages)
        assert owner.end is not None and (owner.end.reason, owner.end.prefix_blocks) == (Reason.OK, 6)
        assert [pages.block(n) for n in range(6)] == [kit.content(key) for key in keys[:6]]
        assert sum(kit.disk.reads[key] for key in keys) == 8, "what was given up was not read"


async def test_the_next_reader_of_blocks_given_up_reads_them_once() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(20)
        pages, rest = Pages(kit, 8), Pages(kit, 12, first_block=8)
        owner, thief = Owner(), Owner()
        part = own_part(kit, keys, pages, owner)
        part.give_up(0)
        taken = own_part(kit, keys[8:], rest, thief, holds=True)
        kit.disk.closed = False
        while thief.prefix is None:
            kit.disk.release_one()
            await _turns()
        assert owner.prefix == (8, None)
        part.credit(8, LAYERS)
        taken.credit(12, LAYERS)
        await finished(kit, [owner, thief], pages, rest)
        assert [pages.block(n) for n in range(8)] == [kit.content(key) for key in keys[:8]]
        assert [rest.block(n) for n in range(12)] == [kit.content(key) for key in keys[8:]]
        assert all(kit.disk.reads[key] == 1 for key in keys)


async def test_a_read_that_others_wait_for_too_goes_on_when_a_part_gives_it_up() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(12)
        pages, other_pages = Pages(kit, 12), Pages(kit, 12)
        owner, other = Owner(), Owner()
        part = own_part(kit, keys, pages, owner)
        own_part(kit, keys, other_pages, other)
        part.give_up(2)
        assert owner.gave_up == [8]
        assert kit.services.desk.reads_waiting() == 4, "the other part waits for them"
        part.stop()
        await finished(kit, [owner, other], pages, other_pages)
        assert [other_pages.block(n) for n in range(12)] == [kit.content(key) for key in keys]
        assert all(kit.disk.reads[key] == 1 for key in keys)


async def test_a_part_in_the_queue_for_room_gives_up_all_and_leaves_it() -> None:
    async with node_kit(limits=Limits(admission_wait_s=5.0)) as kit:
        _, keys = await kit.stored_and_held(4)
        kit.services.room.ask(Purpose.READ, "all", 64 * RECORD, granted=lambda: None, refused=lambda error: None)
        pages, owner = Pages(kit, 4), Owner()
        part = own_part(kit, keys, pages, owner)
        part.give_up(3)
        assert (owner.gave_up, kit.admission.waiting(Purpose.READ)) == ([3], 1)
        part.give_up(0)
        assert owner.said == [("gave up", 3), ("gave up", 0), ("end", "OK")]
        assert kit.admission.waiting(Purpose.READ) == 0
        kit.services.room.give_back("all")
        await finished(kit, owner, pages)


async def test_of_equal_blocks_one_may_be_given_up_and_the_other_is_read() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(10)
        pages, owner = Pages(kit, 8), Owner()
        part = own_part(kit, (*keys, keys[0]), pages, owner)
        part.give_up(0)
        assert owner.gave_up == [8]
        part.credit(8, LAYERS)
        while owner.prefix is None:
            kit.disk.release_one()
            await _turns()
        part.credit(8, LAYERS)
        await finished(kit, owner, pages)
        assert [pages.block(n) for n in range(8)] == [kit.content(key) for key in keys[:8]]


async def test_a_part_taken_over_sends_the_layers_from_there_on() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(3)
        pages, owner = Pages(kit, 3), Owner()
        own_part(kit, keys, pages, owner, first_layer=1)
        await finished(kit, owner, pages)
        assert pages.arrived == [1, 2]
        for layer in (1, 2):
            span = LAYOUT.layer_span(layer)
            for n, key in enumerate(keys):
                assert pages.layer(layer, n) == kit.content(key)[span.start : span.stop]
        assert not any(pages.layer(0, n).strip(b"\0") for n in range(3)), "layer 0 was there already"


async def test_a_part_ends_when_its_owner_or_the_node_it_sends_to_is_lost() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(3)
        pages, owner = Pages(kit, 3), Owner()
        part = own_part(kit, keys, pages, owner)
        kit.parts.add(OWNER, 7, part)
        kit.parts.peer_lost("owner", "another boot", "gone")
        assert not owner.is_told_end and kit.parts.find(OWNER, 7) is part
        kit.parts.peer_lost(*OWNER, "no beat for 2 s")
        assert owner.end is not None and owner.end.reason is Reason.PEER_LOST
        assert owner.end.message == "owner: no beat for 2 s"
        assert len(kit.parts) == 0 and kit.parts.find(OWNER, 7) is None
        await finished(kit, owner, pages)


async def test_a_late_device_keeps_a_given_up_blocks_slot_until_it_lets_go() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(10)
        pages, owner = Pages(kit, 10), Owner()
        part = own_part(kit, keys, pages, owner)
        kit.disk.give_up_one()
        await until(lambda: bool(owner.progress) and owner.progress[-1][0] == 9, "block 0 is lost")
        part.give_up(0)
        assert owner.gave_up == [9]
        while owner.end is None:
            kit.disk.release_one()
            await _turns()
        assert owner.end.reason is Reason.OK and owner.end.prefix_blocks == 0
        assert kit.pool.slot_counts()[0]["quarantined"] == 1
        kit.disk.let_go_one()
        await finished(kit, owner, pages)


async def test_of_two_parts_the_one_whose_engine_needs_its_next_layer_sooner_goes_first() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(2)
        quick, slow, owners = Pages(kit, 1), Pages(kit, 1), [Owner(), Owner()]
        kit.disk.closed = False
        ahead = own_part(kit, keys[:1], slow, owners[0], holds=True)
        behind = own_part(kit, keys[1:], quick, owners[1], holds=True)
        for _ in range(2):
            kit.disk.release_one()
        await until(lambda: all(owner.prefix is not None for owner in owners), "both hold")
        kit.wire.closed = True
        no_sink, nothing = 0, np.empty((0, 2), dtype=np.uint64)
        for layer in range(UNDER_WAY_MAX):
            kit.mover.send(None, no_sink, layer, 0, nothing, lambda *told: None, need=Need.LAYERS)
        ahead.credit(1, LAYERS)
        behind.credit(1, 1)
        for _ in range(UNDER_WAY_MAX):
            kit.wire.release_one()
        await until(lambda: len(kit.wire.held) == 4, "what waited is sent")
        sinks = [send.sink_id for send, _ in kit.wire.held]
        assert sinks == [slow.sink_id, quick.sink_id, slow.sink_id, slow.sink_id]
        behind.credit(1, LAYERS)
        await finished(kit, owners, slow, quick)


async def test_a_part_that_waits_for_a_buffers_blocks_gives_none_up() -> None:
    async with node_kit(range_bytes=WHOLE) as kit:
        _, keys = await kit.stored_and_held(3)
        pages, owner = Pages(kit, 3), Owner()
        part = own_part(kit, keys, pages, owner, holds=True, waits_for_blocks=True)
        part.give_up(0)
        assert owner.said == [("gave up", 3)]
        assert kit.admission.taken_bytes(Purpose.READ) == 0
        due_ns = kit.services.clock.now_ns()
        found = kit.services.reader.acquire(kit.namespace, keys, priority=0, due_ns=due_ns, by_ranges=True)
        part.take_blocks(found)
        kit.disk.closed = False
        while owner.prefix is None:
            kit.disk.release_one()
            await _turns()
        part.credit(3, LAYERS)
        await until(lambda: owner.is_told_end, "it is sent")
        assert [pages.block(n) for n in range(3)] == [kit.content(key) for key in keys]
        part.take_blocks(found)
        kit.services.reader.release(found)
        await finished(kit, owner, pages)
