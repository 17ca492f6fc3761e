"""Rests of a DE buffer's parts: layers that this node reads no more are pushed, into the slots of the blocks that it read."""

from __future__ import annotations

import pytest
from de_parts_kit import ended_well, gives, goes_on, in_mid_stream, opens, read_layers, sends_all, whole_and_delivered
from de_rig import LAYERS, DeRig
from node_kit import until
from node_net import node_net

from kvmoverd.core.status import Reason


async def test_the_rest_is_pushed_into_the_slots_of_the_blocks_and_the_node_reads_it_no_more() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=6)
        part = await in_mid_stream(rig)
        await rig.set_prefix(4)
        sends_all(part, 4)
        slots = rig.assembly.buffer.slots()
        assert gives(part, 1) == (1, 2), "the second layer of all is in the device"
        goes_on(part, 1)
        opens(rig)
        await ended_well(rig, part)
        await rig.push_all([4, 5], range(2))
        assert not rig.assembly.buffer.released and rig.assembly.machine.hits_whole
        await rig.push_all([1, 2, 3, 4, 5], range(2, LAYERS))
        assert rig.assembly.buffer.slots() == slots
        await whole_and_delivered(rig)
        reads = {(rig.keys.index(key), layer): count for (key, layer), count in net["d"].disk.layer_reads.items()}
        whole = {(0, layer) for layer in range(LAYERS)}
        assert reads == dict.fromkeys(whole | {(block, layer) for block in (1, 2, 3) for layer in range(2)}, 1)


async def test_what_this_node_reads_is_there_when_the_blocks_have_the_layers_before_their_rest_and_not_sooner() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        part = await in_mid_stream(rig)
        await rig.set_prefix(4)
        net.fars["d"].closed = True
        sends_all(part, 4)
        assert gives(part, 1) == (1, 2)
        goes_on(part, 1)
        read_layers(rig, LAYERS, 0)
        read_layers(rig, 2, 1, 2)
        await until(lambda: not rig.assembly.machine.hits_whole and len(net["d"].disk.held) == 1, "one block is left")
        read_layers(rig, 2, 3)
        assert rig.assembly.machine.hits_whole and part.end is None, "it need not be sent for that"
        net.fars["d"].closed = False
        while net.fars["d"].release_one():
            pass
        await ended_well(rig, part)
        opens(rig)
        await rig.push_all([4], range(2))
        await rig.push_all([1, 2, 3, 4], range(2, LAYERS))
        await whole_and_delivered(rig)


async def test_a_buffer_that_nothing_was_to_be_pushed_into_waits_for_the_rest_alone() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=3, blocks=3)
        part = await in_mid_stream(rig)
        await rig.set_prefix(3)
        assert rig.assembly.machine.received
        sends_all(part, 3)
        assert gives(part, 2) == (2, 2)
        assert not rig.assembly.machine.received
        assert rig.reserved is not None
        empty = rig.send("p", rig.reserved.push_sink, 0, (), 0)
        await until(lambda: empty, "answered")
        assert empty == [Reason.CANCELLED], "a frame without blocks is none"
        opens(rig)
        await until(lambda: rig.assembly.machine.hits_whole, "what is read here is there")
        goes_on(part, 2)
        await ended_well(rig, part)
        assert not rig.assembly.machine.received and not rig.assembly.machine.was_whole
        await rig.push_all([2], range(2, LAYERS))
        await whole_and_delivered(rig)


async def test_a_part_that_keeps_no_block_is_over_with_the_layer_before_and_the_buffer_goes_on() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=3, blocks=4, tail=2)
        part = await in_mid_stream(rig)
        await rig.set_prefix(3)
        sends_all(part, 3)
        assert gives(part, 0) == (0, 2)
        opens(rig)
        await ended_well(rig, part)
        await until(lambda: part.landed == [0, 1], "no more layers come")
        await rig.push_all([3, 4], range(2))
        await rig.push_all([0, 1, 2, 3, 4], range(2, LAYERS))
        await whole_and_delivered(rig)


async def test_each_layer_has_its_own_blocks_and_no_frame_of_others_is_let_in() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        part = await in_mid_stream(rig)
        await rig.set_prefix(4)
        sends_all(part, 4)
        assert gives(part, 1) == (1, 2)
        goes_on(part, 1)
        opens(rig)
        for layer, blocks in ((0, (1, 2, 3, 4)), (1, (1, 2, 3, 4)), (2, (4,)), (2, (0, 1, 2, 3, 4))):
            answer = rig.push(layer, *blocks)
            await until(lambda answer=answer: answer, "answered")
            assert answer == [Reason.CANCELLED], f"layer {layer} of blocks {blocks}"
        await rig.push_all([4], range(2))
        await rig.push_all([1, 2, 3, 4], range(2, LAYERS))
        await ended_well(rig, part)
        await whole_and_delivered(rig)


async def test_a_rest_that_was_given_before_the_prefix_was_set_is_let_in_with_it() -> None:
    for new in (0, 1):
        async with node_net(2) as net:
            rig = DeRig(net, hit=3, blocks=3 + new)
            part = await in_mid_stream(rig, holds=False)
            assert gives(part, 1) == (1, 2)
            goes_on(part, 1)
            opens(rig)
            await ended_well(rig, part)
            await rig.set_prefix(3)
            assert rig.assembly.machine.hits_whole and not rig.assembly.machine.received
            if new:
                await rig.push_all([3], range(2))
            await rig.push_all([1, 2, *[3] * new], range(2, LAYERS))
            await whole_and_delivered(rig)


@pytest.mark.parametrize(("prefix", "pushed_late"), [(3, (2,)), (2, ())])
async def test_a_prefix_that_ends_before_blocks_that_were_given_makes_them_new_ones(
    prefix: int, pushed_late: tuple[int, ...]
) -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=4)
        part = await in_mid_stream(rig, holds=False)
        assert gives(part, 2) == (2, 2)
        assert part.driver is not None
        part.driver.stop()
        opens(rig)
        new = tuple(range(prefix, 4))
        await rig.set_prefix(prefix)
        await rig.push_all(new, range(2))
        await rig.push_all([*pushed_late, *new], range(2, LAYERS))
        await whole_and_delivered(rig)


async def test_several_parts_give_from_different_layers_on() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=13, blocks=14)
        rig.there.disk.closed = True
        await rig.reserve((0, 4))
        one, other = rig.part((0, 4)), rig.part((4, 12))
        read_layers(rig, 1, *range(12))
        await until(lambda: one.prefix and other.prefix, "both know their prefix")
        (sink,) = await rig.set_prefix(13, ("h", (12, 13)))
        sends_all(one, 4)
        sends_all(other, 8)
        assert gives(one, 1) == (1, 2)
        assert gives(other, 4) == (4, 1), "the second layer of its last blocks is in no device yet"
        goes_on(one, 1)
        goes_on(other, 4)
        opens(rig)
        helped = [rig.send("h", sink, layer, (12,), 12) for layer in range(LAYERS)]
        await rig.push_all([13], range(1))
        await rig.push_all([8, 9, 10, 11, 13], range(1, 2))
        await rig.push_all([1, 2, 3, 8, 9, 10, 11, 13], range(2, LAYERS))
        await until(lambda: all(helped), "the third node's layers are in")
        for part in (one, other):
            await ended_well(rig, part)
        await whole_and_delivered(rig)
        assert max(net.layer_reads().values()) == 1


async def test_nothing_is_given_of_blocks_that_came_whole_from_a_third_node() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=4, blocks=4)
        await rig.reserve()
        (sink,) = await rig.set_prefix(4, ("h", (0, 4)))
        answers = [rig.send("h", sink, layer, (0, 1, 2, 3), 0) for layer in range(LAYERS)]
        await until(lambda: all(answers), "all layers are in")
        net.fars["d"].closed = True
        taken = rig.part((0, 4))
        await until(lambda: taken.prefix, "known at once")
        sends_all(taken, 4)
        assert gives(taken, 0) == (4, 0)
        net.fars["d"].closed = False
        while net.fars["d"].release_one():
            pass
        await ended_well(rig, taken)
        await whole_and_delivered(rig)
