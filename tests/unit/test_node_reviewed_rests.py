"""What a review of moves in mid-stream found: slots, words and reads that come in an order that nobody had thought of."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from de_parts_kit import gives, in_mid_stream, opens
from de_rig import DeRig
from node_kit import LAYOUT, end_of, node_kit, told, until
from node_net import node_net
from part_kit import Owner, Pages, own_part

from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead

LAYERS = LAYOUT.layer_count


async def test_a_given_block_that_is_lost_before_the_prefix_is_set_is_not_let_in() -> None:
    """Its part still waits for what it has sent, so the buffer has not heard of it; the slot is nobody's any more."""
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        net.fars["d"].closed = True
        part = await in_mid_stream(rig, holds=False)
        assembled = rig.attach()
        assert gives(part, 1) == (1, 2)
        net["d"].storage.tamper(rig.kit.namespace, rig.keys[2], None)
        opens(rig)
        await until(lambda: 2 in rig.assembly.buffer.reads[0].found.outcomes, "the block is lost")
        assert part.end is None, "frames of it are on their way"
        await rig.set_prefix(4)
        net.fars["d"].closed = False
        while net.fars["d"].release_one():
            pass
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 2)
        await until(lambda: part.end, "the part is over")
        await rig.over()


async def test_a_part_that_may_send_hears_first_what_it_has_lost() -> None:
    """Two parts of one node: in one batch of completions the first knows its prefix, whereupon the second may send, and has lost
    a block that it had not heard of."""
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, later_pages, owner, later = Pages(kit, 2), Pages(kit, 2), Owner(), Owner()
        second = own_part(kit, keys[2:], later_pages, later, holds=True)
        while later.prefix is None:
            kit.disk.release_one()
            await asyncio.sleep(0)
        first = own_part(kit, keys[:2], pages, owner)
        first.listener = replace(first.listener, on_prefix=lambda blocks, lost: second.credit(2, LAYERS))
        kit.disk.release_first_range()
        await asyncio.sleep(0)
        kit.pumping = False
        kit.storage.tamper(kit.namespace, keys[3], None)
        held = [op for op in kit.disk.held if isinstance(op, BlockRead)]
        for op in (one for key in (keys[1], keys[3]) for one in held if one.key == key):
            kit.disk.held.remove(op)
            kit.disk._happen(op)
        kit.node.pump()
        kit.pumping = True
        await until(lambda: later.end, "the second part ends")
        assert later.end is not None and (later.end.reason, later.end.prefix_blocks) == (Reason.PREFIX_CUT, 1)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        first.stop()
        for one in (pages, later_pages):
            one.close()
        await kit.everything_is_home()
