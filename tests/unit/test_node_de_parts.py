"""Parts of a DE buffer: begun at Reserve or later, given up, taken over from third nodes; whatever moves, no slot is lost."""

from __future__ import annotations

import asyncio

from de_parts_kit import ended_well, sends_all, whole_and_delivered
from de_rig import LAYERS, DeRig
from node_kit import end_of, told, until
from node_net import node_net

from kvmoverd.core.status import Reason
from kvmoverd.node.de_buffer import NO_SLOT
from kvmoverd.node.services import Limits

OPS_MAX = 8
"""Reads that the desk of a test's node hands to its storage at once."""


async def test_a_share_is_read_from_the_reservation_on_and_its_part_finds_it() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((2, 4))
        await until(lambda: len(net["d"].disk.reads) == 2, "both blocks are read before anybody asks for the part")
        part = rig.part((2, 4))
        await until(lambda: part.prefix is not None, "the prefix")
        await rig.set_prefix(4)
        sends_all(part, 2)
        await ended_well(rig, part)
        await rig.push_all([0, 1, 4])
        await whole_and_delivered(rig)
        assert net.read_blocks() == {"p": 0, "d": 2}


async def test_several_parts_of_one_ticket_are_read_and_all_end_with_it() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=6, blocks=6)
        await rig.reserve((0, 2))
        parts = [rig.part((0, 2)), rig.part((2, 4)), rig.part((5, 6))]
        await until(lambda: all(part.prefix for part in parts), "all are read")
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        assert [part.end.reason for part in parts if part.end] == [Reason.CANCELLED] * 3
        await rig.over()


async def test_blocks_that_no_device_knows_of_are_given_up_and_read_by_a_later_part_once() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=12, blocks=12)
        net["d"].disk.closed = True
        await rig.reserve((0, 12))
        part = rig.part((0, 12))
        assert part.driver is not None
        part.driver.give_up(3)
        assert part.kept == [OPS_MAX], "what the storage has is kept"
        assert rig.assembly.buffer.private_blocks.spans == ((OPS_MAX, 12),)
        assert NO_SLOT not in rig.assembly.buffer.slots(), "each block has a slot before anybody hears of it"
        later = rig.part((OPS_MAX, 12))
        net["d"].disk.closed = False
        while net["d"].disk.release_one():
            pass
        await until(lambda: part.prefix and later.prefix, "both are read")
        await rig.set_prefix(12)
        sends_all(part, OPS_MAX)
        sends_all(later, 4)
        await ended_well(rig, part)
        await ended_well(rig, later)
        assert set(net["d"].disk.reads.values()) == {1}
        await whole_and_delivered(rig)


async def test_a_part_that_gives_all_up_says_so_before_it_ends_and_others_send_its_blocks() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=4)
        net["d"].disk.closed = True
        blocker = net["d"].chain(OPS_MAX, salt=9)
        held = net["d"].services.reader.acquire(rig.kit.namespace, blocker, priority=0, due_ns=0)
        await rig.reserve((0, 4))
        part = rig.part((0, 4))
        assert part.driver is not None
        part.driver.give_up(0)
        assert part.words == ["gave up", "end"]
        net["d"].disk.closed = False
        while net["d"].disk.release_one():
            pass
        net["d"].services.reader.release(held)
        await rig.set_prefix(4)
        await rig.push_all([0, 1, 2, 3])
        await whole_and_delivered(rig)
        assert not [key for key in rig.keys if net["d"].disk.reads[key]], "nothing of it was read here"


async def test_nobody_hears_of_blocks_that_were_given_up_while_they_have_no_slots() -> None:
    """Their slots stay with another request that waits for the same blocks; the pool has no others for a while."""
    limits = Limits(admission_wait_s=5, attach_timeout_s=5)
    async with node_net(2, slots=16, limits=limits) as net:
        rig, kit = DeRig(net, hit=12, blocks=12), net["d"]
        kit.disk.closed = True
        await rig.reserve((0, 12))
        part = rig.part((0, 12))
        assert part.driver is not None
        reader, size_class = kit.services.reader, rig.assembly.buffer.size_class
        other = reader.acquire(rig.kit.namespace, rig.keys[OPS_MAX:], priority=0, due_ns=0)
        full = kit.pool.new_holder()
        size_class.private(4, full)
        part.driver.give_up(OPS_MAX)
        await asyncio.sleep(0.05)
        assert part.words == [], "there are no slots yet"
        part.driver.stop()
        assert part.words == [], "and the end does not overtake it"
        size_class.give_back(full)
        await until(lambda: part.words == ["gave up", "end"], "slots are home, both are told")
        assert NO_SLOT not in rig.assembly.buffer.slots()
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        reader.release(other)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await rig.over()


async def test_a_buffer_that_finds_no_slots_for_what_was_given_up_ends_in_time() -> None:
    async with node_net(2, slots=16, limits=Limits(admission_wait_s=0.1, attach_timeout_s=5)) as net:
        rig, kit = DeRig(net, hit=12, blocks=12), net["d"]
        kit.disk.closed = True
        await rig.reserve((0, 12))
        part = rig.part((0, 12))
        assert part.driver is not None
        reader, size_class = kit.services.reader, rig.assembly.buffer.size_class
        other = reader.acquire(rig.kit.namespace, rig.keys[OPS_MAX:], priority=0, due_ns=0)
        full = kit.pool.new_holder()
        size_class.private(4, full)
        assembled = rig.attach()
        part.driver.give_up(OPS_MAX)
        assert end_of(await told(assembled)).reason is Reason.POOL_EXHAUSTED
        assert part.end is not None and part.words[-1] == "end"
        size_class.give_back(full)
        reader.release(other)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await rig.over()


async def test_a_part_of_a_third_node_is_taken_over_when_nothing_of_it_can_land_any_more() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((0, 2))
        first = rig.part((0, 2))
        await until(lambda: first.prefix, "read")
        (sink,) = await rig.set_prefix(4, ("h", (2, 4)))
        sends_all(first, 2)
        assembled = rig.send("h", sink, 0, (2, 3), 2)
        await until(lambda: assembled, "a layer is in")
        net.fars["h"].closed = True
        late = rig.send("h", sink, 1, (2, 3), 2)
        rig.side.peer_lost("h", "boot-h", "no word")
        assert not rig.assembly.ended, "who sends instead is its owner's affair"
        taken = rig.part((2, 4), first_layer=1)
        await asyncio.sleep(0.02)
        assert not net["d"].disk.reads[rig.keys[2]], "a late frame may still land in the slots"
        net.fars["h"].release_one()
        await until(lambda: taken.prefix, "read anew")
        assert late == [Reason.CANCELLED]
        sends_all(taken, 2)
        await until(lambda: taken.end and taken.landed == [1, 2], "the layers from there on are sent")
        assert taken.end is not None and taken.end.reason is Reason.OK
        await rig.push_all([4])
        await whole_and_delivered(rig)
        assert net.read_blocks()["d"] == 4


async def test_what_came_whole_from_a_third_node_is_sent_on_from_the_buffer_and_not_read() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        (sink,) = await rig.set_prefix(4, ("h", (1, 3)))
        answers = [rig.send("h", sink, layer, (1, 2), 1) for layer in range(LAYERS)]
        await until(lambda: all(answers), "all layers are in")
        taken = rig.part((1, 3))
        await until(lambda: taken.prefix, "known at once")
        sends_all(taken, 2)
        await ended_well(rig, taken)
        await rig.push_all([0, 3, 4])
        await whole_and_delivered(rig)
        assert net.read_blocks()["d"] == 0


async def test_a_part_may_be_taken_over_for_the_buffer_alone() -> None:
    """All its layers are in the pages already, and not all in the buffer, which is whole only with them."""
    async with node_net(3) as net:
        rig = DeRig(net, hit=3, blocks=4)
        await rig.reserve()
        await rig.set_prefix(3, ("h", (0, 2)))
        await rig.push_all([2, 3])
        taken = rig.part((0, 2), first_layer=LAYERS)
        await until(lambda: taken.prefix, "read")
        sends_all(taken, 2)
        await until(lambda: taken.end, "over")
        assert (taken.end and taken.end.reason, taken.landed) == (Reason.OK, [])
        await whole_and_delivered(rig)


async def test_a_block_that_is_lost_behind_its_part_cuts_the_buffer() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=3, blocks=4)
        await rig.reserve()
        assembled = rig.attach()
        await rig.set_prefix(3, ("h", (0, 2)))
        net["d"].disk.closed = True
        taken = rig.part((0, 2), first_layer=LAYERS)
        await until(lambda: net["d"].disk.held, "the blocks are read by ranges of layers")
        for _ in range(2):
            net["d"].disk.release_one()
        await until(lambda: taken.prefix, "first layers are there")
        sends_all(taken, 2)
        await until(lambda: taken.end, "its layers are in the pages, the part is over")
        net["d"].storage.tamper(rig.kit.namespace, rig.keys[1], None)
        net["d"].disk.closed = False
        while net["d"].disk.release_one():
            pass
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 1)
        await rig.over()


async def test_a_block_that_is_lost_while_the_word_of_the_prefix_is_on_its_way_cuts_the_buffer() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=3, blocks=4)
        net["d"].disk.closed = True
        await rig.reserve((0, 3))
        assembled = rig.attach()
        part = rig.part((0, 3), holds=False)
        await until(lambda: net["d"].disk.held, "the blocks are read by ranges of layers")
        while not part.prefix:
            assert net["d"].disk.release_one()
            await asyncio.sleep(0)
        net["d"].storage.tamper(rig.kit.namespace, rig.keys[1], None)
        net["d"].disk.closed = False
        while net["d"].disk.release_one():
            pass
        await until(lambda: part.end, "the part is over")
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 1)
        await rig.over()
