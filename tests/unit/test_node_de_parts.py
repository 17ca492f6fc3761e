"""Parts of a DE buffer: begun at Reserve or later, given up, taken over from third nodes; whatever moves, no slot is lost."""

from __future__ import annotations

import asyncio

import pytest
from de_rig import LAYERS, DeRig, Part
from node_kit import end_of, told, until
from node_net import node_net

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadRequest, TicketExpired, UnknownRequest
from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason
from kvmoverd.node.de_buffer import NO_SLOT
from kvmoverd.node.peer import PartListener, PartOrder
from kvmoverd.node.reading import Destination
from kvmoverd.node.services import Limits

OPS_MAX = 8
"""Reads that the desk of a test's node hands to its storage at once."""


async def whole_and_delivered(rig: DeRig) -> None:
    assembled = rig.attach()
    await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "the buffer is whole")
    assert end_of(await told(rig.deliver())).reason is Reason.OK
    assert end_of(await told(assembled)).reason is Reason.OK
    rig.delivered_right()
    await rig.over()


def sends_all(part: Part, prefix: int) -> None:
    assert part.driver is not None
    part.driver.credit(prefix, LAYERS)


async def ended_well(rig: DeRig, part: Part) -> None:
    await until(lambda: part.end is not None, "the part ends")
    assert part.end is not None and part.end.reason is Reason.OK, part.end
    for place, block in enumerate(part.blocks.head(part.end.prefix_blocks).indexes().tolist()):
        assert part.block(place) == rig.kit.content(rig.keys[block]), f"block {block} came wrong"


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


async def test_a_third_node_that_is_lost_ends_nothing_here_and_the_owner_ends_all() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        assembled = rig.attach()
        (sink,) = await rig.set_prefix(4, ("h", (1, 3)))
        await rig.push_all([0, 3, 4])
        rig.side.peer_lost("h", "boot-h", "no word")
        assert rig.assembly.ended is None
        rig.side.peer_lost("p", "boot-p", "no word")
        assert end_of(await told(assembled)).reason is Reason.PEER_LOST, (
            "the buffer would wait for its third node for ever"
        )
        assert rig.send("h", sink, 0, (1, 2), 1) == []
        await rig.over()


async def test_a_buffer_that_has_all_from_others_outlives_its_owner() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        (sink,) = await rig.set_prefix(4, ("h", (1, 3)))
        answers = [rig.send("h", sink, layer, (1, 2), 1) for layer in range(LAYERS)]
        await until(lambda: all(answers), "all layers are in")
        await rig.push_all([0, 3, 4])
        rig.side.peer_lost("p", "boot-p", "no word")
        await whole_and_delivered(rig)


@pytest.mark.parametrize(
    ("prefix", "helped", "words"),
    [
        (4, [("d", (1, 3))], "d sends blocks"),
        (4, [("p", (1, 3))], "p sends blocks"),
        (4, [("h", (0, 2))], r"\(\(0, 2\),\)"),
        (3, [("h", (2, 4))], r"\(\(2, 4\),\)"),
        (4, [("h", (3, 5))], r"\(\(3, 5\),\)"),
        (4, [("h", (2, 2))], "h sends blocks"),
        (4, [("h", (1, 3)), ("i", (2, 4))], "i sends blocks"),
        (5, [], "prefix of 5 blocks set, 4 have been read"),
    ],
)
async def test_a_prefix_that_does_not_fit_the_buffer_is_refused(
    prefix: int, helped: list[tuple[str, tuple[int, int]]], words: str
) -> None:
    async with node_net(4) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((0, 1))
        part = rig.part((0, 1))
        await until(lambda: part.prefix and rig.assembly.buffer.whole(4), "read")
        with pytest.raises(BadRequest, match=words):
            await rig.set_prefix(prefix, *helped)
        assert rig.assembly.machine.prefix_blocks is None
        sinks = await rig.set_prefix(4, ("h", (1, 3)), ("i", (3, 4)))
        assert await rig.set_prefix(4, ("h", (1, 3)), ("i", (3, 4))) == sinks, "a call may come again"
        with pytest.raises(BadRequest, match="it is 4 already, with 2 parts"):
            await rig.set_prefix(4, ("h", (1, 3)))
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


async def test_a_helpers_sink_takes_its_layers_once_from_that_node_alone() -> None:
    async with node_net(4) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        (sink,) = await rig.set_prefix(4, ("h", (1, 3)))
        for node, layer, blocks, first in (
            ("i", 0, (1, 2), 1),
            ("p", 0, (1, 2), 1),
            ("h", 0, (1, 2), 0),
            ("h", LAYERS, (1, 2), 1),
        ):
            refused = rig.send(node, sink, min(layer, LAYERS - 1), blocks, first) if layer < LAYERS else None
            if refused is not None:
                await until(lambda refused=refused: refused, "answered")
                assert refused == [Reason.CANCELLED]
        for expected in (Reason.OK, Reason.CANCELLED):
            answer = rig.send("h", sink, 0, (1, 2), 1)
            await until(lambda answer=answer: answer, "answered")
            assert answer == [expected]
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


@pytest.mark.parametrize(
    ("reason", "told_reason"),
    [
        (Reason.DEADLINE, Reason.DEADLINE),
        (Reason.ENGINE_GONE, Reason.ENGINE_GONE),
        (Reason.SHUTTING_DOWN, Reason.SHUTTING_DOWN),
        # Where the cut is only the part knows that lost the block.
        (Reason.PREFIX_CUT, Reason.CANCELLED),
    ],
)
async def test_a_part_ends_for_the_reason_that_its_buffer_ends_for(reason: Reason, told_reason: Reason) -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=4)
        await rig.reserve((2, 4))
        part = rig.part((2, 4))
        await until(lambda: part.prefix is not None, "the prefix")
        rig.assembly.stop(reason, "so it is")
        await until(lambda: part.end is not None, "the part ends")
        assert part.end is not None
        assert (part.end.reason, part.end.message) == (told_reason, "the DE buffer was released: so it is")
        await rig.over()


async def test_only_hits_that_nobody_reads_can_be_read_and_only_for_the_ticket_s_owner() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((2, 4), resident=1)
        for spans in ([(4, 5)], [(0, 1)], [(1, 3)], [(3, 4)], []):
            with pytest.raises(UnknownRequest, match="not left to be read here"):
                rig.part(*spans)
        part = rig.part((2, 4))
        with pytest.raises(UnknownRequest, match="not left to be read here"):
            rig.part((2, 4))
        order = PartOrder(999, part.blocks, 1, 1, 0, True, 1.0, rig.ticket)
        with pytest.raises(TicketExpired, match="is not h's"):
            rig.side.read_part(
                order, ("h", "boot-h"), Destination(None, 1), PartListener(lambda *_: None, lambda end: None)
            )
        await until(lambda: part.prefix, "read")
        await rig.set_prefix(4)
        with pytest.raises(UnknownRequest, match="no part of a third node"):
            rig.part((1, 2))
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


async def test_a_stopped_take_over_reads_nothing_and_the_buffer_waits_for_its_end() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        (sink,) = await rig.set_prefix(4, ("h", (1, 3)))
        net.fars["h"].closed = True
        rig.send("h", sink, 0, (1, 2), 1)
        taken = rig.part((1, 3))
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        assert taken.end is not None and taken.end.reason is Reason.CANCELLED
        assert net["d"].admission.taken_bytes(Purpose.DE_BUFFER) > 0, "a late frame may still land"
        net.fars["h"].closed = False
        net.fars["h"].release_one()
        await rig.over()
        assert net.read_blocks()["d"] == 0


async def test_a_buffer_stays_until_its_part_has_sent_all_though_it_is_delivered_long_before() -> None:
    """Nothing is pushed here, so nothing else says that the prefill engine has had its layers."""
    async with node_net(2) as net:
        rig = DeRig(net, hit=2, blocks=2)
        await rig.reserve((0, 2))
        part = rig.part((0, 2))
        await until(lambda: part.prefix, "read")
        await rig.set_prefix(2)
        assembled = rig.attach()
        await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "the buffer is whole")
        assert end_of(await told(rig.deliver())).reason is Reason.OK
        await asyncio.sleep(0.01)
        assert rig.assembly.ended is None and part.end is None
        sends_all(part, 2)
        await ended_well(rig, part)
        assert end_of(await told(assembled)).reason is Reason.OK
        rig.delivered_right()
        await rig.over()
