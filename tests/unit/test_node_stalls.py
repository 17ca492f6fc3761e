"""Third nodes that live and send nothing after the prefix; decode nodes that can't take over: every byte comes all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from node_far import FarGate
from node_kit import LAYOUT, end_of, told, until
from node_net import Net, _FarPart, node_net
from node_world import World

from kvmoverd.core.errors import KvmoverError, QueueFull
from kvmoverd.core.machines.stream import StreamMachine, StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.services import SplitSettings
from kvmoverd.node.streaming import StreamDriver

STALL_S = 0.06
IMPATIENT = SplitSettings(stall_s=STALL_S)
HELPED = (("p", (0, 1)), ("h", (1, 3)), ("d", (3, 4)))


def all_ok(world: World) -> None:
    ends = {heard.name: heard.end.reason for heard in world.heard if heard.end is not None}
    assert ends == dict.fromkeys(("assemble", "stream", "push", "deliver"), Reason.OK), [
        (heard.name, heard.end) for heard in world.heard
    ]


def machine_of(net: Net) -> StreamMachine:
    (found,) = [driver for driver in net["p"].node.requests.live() if isinstance(driver, StreamDriver)]
    return found.machine


async def streaming(net: Net, *shares: tuple[str, tuple[int, int]], hit: int = 4, blocks: int = 5) -> World:
    """All gates are closed, and the prefix of all has just been told."""
    world = World(net["p"], hit=hit, blocks=blocks, net=net, timeout_s=8.0)
    await world.prepare()
    world.turn_parts(*shares)
    await world.settle()
    while machine_of(net).state is not StreamState.STREAMING:
        assert await world.step(), "nothing more happens"
    return world


async def flow(net: Net, world: World, until_true: Callable[[], bool], what: str, *, step: Callable[[], bool]) -> None:
    """Takes a step after the other until the condition is true."""
    deadline_s = asyncio.get_running_loop().time() + 5.0
    while not until_true():
        assert asyncio.get_running_loop().time() < deadline_s, what
        if not step():
            await asyncio.sleep(0.002)
        await world.settle()


def land_all(far: FarGate, node: str) -> bool:
    """What waits for this node lands; what waits for others still waits. Did anything land?"""
    there = [one for one in far.held if one.to.node == node]
    for one in there:
        far.held.remove(one)
        far.held.appendleft(one)
        far.release_one()
    return bool(there)


def release(net: Net, *, disk_but: str = "", far_but: str = "") -> bool:
    """One read or send happens on each node but these."""
    done = [kit.disk.release_one() for name, kit in net.kits.items() if name != disk_but]
    done += [kit.wire.release_one() for kit in net.kits.values()]
    return any([*done, *(far.release_one() for name, far in net.fars.items() if name != far_but)])


async def test_a_living_third_node_whose_reads_stop_after_the_first_layers_is_replaced() -> None:
    async with node_net(3, split=IMPATIENT) as net:
        world = await streaming(net, *HELPED)
        moves = net["p"].services.counts.moves
        await flow(net, world, lambda: moves["stalled"] == 1, "it is replaced", step=lambda: release(net, disk_but="h"))
        ended = [heard for heard in world.heard if heard.name in ("stream", "push")]
        await flow(
            net,
            world,
            lambda: all(heard.end is not None for heard in ended),
            "both calls of the prefill engine end while it still stands",
            step=lambda: release(net, disk_but="h"),
        )
        assert moves == {"stalled": 1}
        await world.finish()
        all_ok(world)


async def test_a_living_third_node_whose_lane_is_dead_is_replaced_once_nothing_of_it_can_land() -> None:
    async with node_net(3, split=IMPATIENT) as net:
        world = await streaming(net, *HELPED)
        moves = net["p"].services.counts.moves
        await flow(net, world, lambda: moves["stalled"] == 1, "it is fenced", step=lambda: release(net, far_but="h"))
        assert net.fars["h"].held, "what it has under way may land still"
        await world.finish()
        all_ok(world)
        assert moves == {"stalled": 1}


async def test_a_third_node_that_does_not_fill_the_decode_nodes_buffer_is_replaced_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never hears where the decode node wants its layers."""
    monkeypatch.setattr(_FarPart, "assemble", lambda self, sink_id: None)
    async with node_net(3, split=IMPATIENT) as net:
        world = await streaming(net, *HELPED)
        await world.finish()
        all_ok(world)
        assert net["p"].services.counts.moves == {"stalled": 1}
        assert net.far_bytes().get(("h", "d")) is None, "it has sent nothing there"


async def test_an_engine_that_is_slow_is_no_fault_of_a_third_node() -> None:
    """All that its pages have room for has come, and the engine computes."""
    async with node_net(3, split=IMPATIENT) as net:
        kit = net["p"]
        engine, keys = kit.engine(8, ring=True), kit.chain(4)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        shares = (Share("p", Runs.of((0, 2))), Share("h", Runs.of((2, 4))))
        call = kit.call(engine, timeout_s=5.0)
        driver = kit.node.stream(kit.plan(engine, call, keys, hit=4, path=Path.PARTS, decode_node="", shares=shares))
        await until(lambda: driver.machine.ready.in_order == 1, "the first layer is ready")
        await asyncio.sleep(5 * STALL_S)
        assert driver.machine.ready.in_order == 1 and not kit.services.counts.moves
        for layers in range(1, LAYOUT.layer_count + 1):
            driver.request.computed(layers)
            await until(lambda now=layers: driver.machine.ready.in_order > now or driver.is_gone, "the next layer")
        assert end_of(await told(driver.outbox)).reason is Reason.OK


# Nobody to take over ---------------------------------------------------------------------------------------------------


async def test_when_the_buffer_is_delivered_and_gone_the_prefill_node_reads_what_a_third_one_did_not_send_it() -> None:
    async with node_net(3, split=SplitSettings(stall_s=30.0)) as net:
        world = World(net["p"], hit=4, blocks=4, net=net, timeout_s=8.0)
        await world.prepare()
        shares = (Share("h", Runs.of((0, 2))), Share("d", Runs.of((2, 4))))
        world._turn(Path.PARTS, 4, tail=0, shares=shares)
        (assemble,) = [heard for heard in world.heard if heard.name == "assemble"]
        await flow(
            net,
            world,
            lambda: assemble.end is not None,
            "the buffer is delivered",
            step=lambda: release(net, far_but="h") or land_all(net.fars["h"], "d"),
        )
        assert net.fars["h"].held and machine_of(net).ready.in_order < 3
        net.kill("h")
        await world.finish()
        all_ok(world)
        assert net.read_blocks()["p"] == 2


def refusing(net: Net, *nodes: str) -> list[str]:
    """Nodes that have no place for a read; who was asked."""
    asked: list[str] = []

    def refuses(call: str, own: str, other: str) -> KvmoverError | None:
        if call != "read_part" or other not in nodes:
            return None
        asked.append(other)
        return QueueFull("64 reads wait, at most 64 may")

    net.refuses = refuses
    return asked


@pytest.mark.parametrize("shares", [(("p", (0, 2)), ("d", (2, 4))), (("h", (0, 2)), ("d", (2, 4))), (("d", (0, 4)),)])
async def test_what_the_decode_node_takes_no_part_of_the_prefill_node_reads(
    shares: tuple[tuple[str, tuple[int, int]], ...],
) -> None:
    async with node_net(3, split=SplitSettings(stall_s=30.0)) as net:
        asked = refusing(net, "d")
        world = World(net["p"], hit=4, blocks=5, net=net)
        await world.prepare()
        world.turn_parts(*shares)
        await world.finish()
        all_ok(world)
        assert asked == ["d"], "once"
