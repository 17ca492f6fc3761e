"""DE buffers when a data channel breaks over which their owner sent."""

from __future__ import annotations

from de_rig import DeRig
from node_kit import end_of, told, until
from node_net import node_net

from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason


async def test_a_channel_that_broke_ends_only_buffers_that_miss_what_came_over_it() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=2, blocks=3)
        await rig.reserve()
        assembled = rig.attach()
        rig.side.sinks_lost({rig.assembly.push_sink + 1}, "p: an old channel was reset")
        assert rig.assembly.ended is None
        rig.side.sinks_lost({rig.assembly.push_sink}, "p: reset")
        end = end_of(await told(assembled))
        assert (end.reason, end.message) == (Reason.PEER_LOST, "p: reset")
        await rig.over()


async def test_a_buffer_that_misses_nothing_outlives_the_channel_that_it_came_over() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=2, blocks=3)
        await rig.reserve()
        await rig.set_prefix(2)
        await rig.push_all([0, 1, 2])
        rig.side.sinks_lost({rig.assembly.push_sink}, "p: reset")
        assembled = rig.attach()
        await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "the buffer is whole")
        assert end_of(await told(rig.deliver())).reason is Reason.OK
        assert end_of(await told(assembled)).reason is Reason.OK
        rig.delivered_right()
        await rig.over()
