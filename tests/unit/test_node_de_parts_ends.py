"""How parts of DE buffers end, and buffers with them: who is lost, who may ask, what stays until when."""

from __future__ import annotations

import asyncio

import pytest
from de_parts_kit import ended_well, sends_all, whole_and_delivered
from de_rig import LAYERS, DeRig
from node_kit import end_of, told, until
from node_net import node_net

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadRequest, TicketExpired, UnknownRequest
from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason
from kvmoverd.node.peer import PartListener, PartOrder
from kvmoverd.node.reading import Destination

OPS_MAX = 8
"""Reads that the desk of a test's node hands to its storage at once."""


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
