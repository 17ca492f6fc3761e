"""How DE buffers end when parts of theirs have given a rest: whoever goes, no slot is lost, and none is written late."""

from __future__ import annotations

import asyncio

from de_parts_kit import gives, goes_on, in_mid_stream, opens, read_layers, sends_all
from de_rig import LAYERS, DeRig, Part
from node_kit import end_of, told, until
from node_net import Net, node_net

from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason

SETTLED_S = 0.01


async def given(net: Net, *, new: int = 1) -> tuple[DeRig, Part]:
    """Four hits of which the last three come from the third layer on by push; the second is still in the device."""
    rig = DeRig(net, hit=4, blocks=4 + new)
    part = await in_mid_stream(rig)
    await rig.set_prefix(4)
    sends_all(part, 4)
    assert gives(part, 1) == (1, 2)
    return rig, part


async def ended(part: Part) -> Reason:
    """What is on its way from its slots lands before."""
    await until(lambda: part.end, "the part is over")
    assert part.end is not None
    return part.end.reason


async def test_a_block_that_is_lost_before_its_rest_begins_cuts_the_buffer() -> None:
    async with node_net(2) as net:
        rig, part = await given(net)
        assembled = rig.attach()
        net["d"].storage.tamper(rig.kit.namespace, rig.keys[2], None)
        opens(rig)
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 2)
        assert await ended(part) is Reason.PREFIX_CUT
        await rig.over()


async def test_a_buffer_that_goes_keeps_the_slots_of_a_rest_until_its_late_frame_has_landed() -> None:
    async with node_net(2) as net:
        rig, part = await given(net)
        goes_on(part, 1)
        opens(rig)
        assert await ended(part) is Reason.OK
        net.fars["p"].closed = True
        late = rig.push(2, 1, 2, 3, 4)
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await asyncio.sleep(SETTLED_S)
        (counts,) = net["d"].pool.slot_counts()
        assert counts["quarantined"] == 4, counts
        net.fars["p"].closed = False
        while net.fars["p"].release_one():
            pass
        await until(lambda: late, "it landed")
        assert late == [Reason.CANCELLED]
        await rig.over()


async def test_a_rest_that_is_given_to_a_buffer_that_is_gone_is_not_let_in() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        part = await in_mid_stream(rig)
        await rig.set_prefix(4)
        sends_all(part, 4)
        assert part.driver is not None
        listener, assembly = part.driver.listener, rig.assembly
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        assert assembly.buffer.released
        listener.on_gave_rest(1, 2)
        assert rig.push(2, 1, 2, 3, 4) in ([], [Reason.CANCELLED])
        opens(rig)
        await rig.over()


async def test_a_buffer_that_waits_for_a_rest_ends_with_its_prefill_node() -> None:
    async with node_net(2) as net:
        rig, part = await given(net, new=0)
        assembled = rig.attach()
        rig.side.peer_lost("p", "boot-p", "no word")
        end = end_of(await told(assembled))
        assert (end.reason, end.message) == (Reason.PEER_LOST, "p: no word")
        assert await ended(part) is Reason.PEER_LOST
        opens(rig)
        await rig.over()


async def test_a_buffer_that_waits_for_a_rest_ends_with_the_channel_over_which_it_comes() -> None:
    async with node_net(2) as net:
        rig, _ = await given(net, new=0)
        assert rig.reserved is not None
        assembled = rig.attach()
        rig.side.sinks_lost({rig.reserved.push_sink}, "the channel broke")
        assert end_of(await told(assembled)).reason is Reason.PEER_LOST
        opens(rig)
        await rig.over()


async def test_a_layer_that_was_pushed_before_its_rest_was_given_ends_the_buffer() -> None:
    """No prefill engine computes a layer that it does not have of all blocks: so the layer is not what it should be."""
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        part = await in_mid_stream(rig)
        assembled = rig.attach()
        await rig.set_prefix(4)
        await rig.push_all([4])
        sends_all(part, 4)
        assert gives(part, 1) == (1, 2)
        end = end_of(await told(assembled))
        assert (end.reason, end.message) == (Reason.INTERNAL, "layer 2 was pushed before it was sent of all blocks")
        assert await ended(part) is Reason.INTERNAL
        assert part.words == ["prefix", "gave rest", "end"], "the end does not overtake the answer"
        opens(rig)
        await rig.over()


async def test_a_buffer_whose_rest_never_comes_ends_in_time_and_takes_its_part_along() -> None:
    async with node_net(2) as net:
        rig, part = await given(net)
        assembled = rig.attach()
        rig.assembly.due_within(SETTLED_S)
        assert end_of(await told(assembled)).reason is Reason.DEADLINE
        assert await ended(part) is Reason.DEADLINE
        opens(rig)
        await rig.over()


async def test_a_part_that_dies_after_it_has_given_its_rest_leaves_the_buffer_to_its_own_reads() -> None:
    """The prefill node's affair; here the blocks are still read, and a lost one is spoken of though the part is gone."""
    async with node_net(2) as net:
        rig, part = await given(net)
        assembled = rig.attach()
        assert part.driver is not None
        part.driver.stop()
        assert await ended(part) is Reason.CANCELLED
        read_layers(rig, 2, 0, 1, 3)
        net["d"].storage.tamper(rig.kit.namespace, rig.keys[2], None)
        assert rig.assembly.machine.state is AssembleState.FILLING
        opens(rig)
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 2)
        await rig.over()


async def test_what_was_given_away_is_no_clean_block_afterwards() -> None:
    async with node_net(2) as net:
        rig, part = await given(net)
        goes_on(part, 1)
        opens(rig)
        assert await ended(part) is Reason.OK
        await rig.push_all([4], range(2))
        await rig.push_all([1, 2, 3, 4], range(2, LAYERS))
        rig.attach()
        await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "the buffer is whole")
        assert end_of(await told(rig.deliver())).reason is Reason.OK
        rig.delivered_right()
        await rig.over()
        assert set(net["d"].pooled()) == {rig.keys[0], rig.keys[4]}
