"""Lanes that starve while a request is being read: what their readers have not begun comes by another way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from node_kit import NodeKit, until
from node_net import Net, node_net
from node_world import World
from test_node_moves import all_ok

from kvmoverd.core import balance
from kvmoverd.core.admission import Purpose
from kvmoverd.core.qos import KV_LANE, KvClass
from kvmoverd.core.status import Path
from kvmoverd.node import balancing
from kvmoverd.node.lane_watch import LaneWatch
from kvmoverd.node.services import SplitSettings

HITS = 22
SETTINGS = SplitSettings(stall_s=30.0)
"""Nobody is taken for dead here."""
LOOKS_S = 0.3
"""Within this parts are looked at several times."""


async def begun(net: Net, *shares: tuple[str, tuple[int, int]], path: Path = Path.PARTS) -> World:
    """A request of which every device has its first reads, and ends none."""
    world = World(net["p"], hit=HITS, blocks=HITS + 1, net=net, timeout_s=5.0)
    await world.prepare()
    if path is Path.PARTS:
        world.turn_parts(*shares)
    else:
        world._turn(path, HITS)
    await world.settle()
    return world


async def read_all(net: Net, world: World, names: Sequence[str]) -> None:
    """These nodes read all that they are asked for."""
    for name in names:
        while net[name].disk.release_one():
            await world.settle()


def starve(kit: NodeKit, node: str) -> None:
    """What was sent from here to that node three seconds ago is not there yet."""
    kit.mover.lanes = LaneWatch(
        dict.fromkeys(KvClass, KV_LANE.text), floor_bytes_per_s=1 << 20, window_s=1.0, observer=kit.observer
    )
    boot_id = f"boot-{node}"
    kit.mover.lanes.begun((node, boot_id), KvClass.ASSEMBLY, 100, kit.services.clock.now_ns() - 3_000_000_000)


async def relieved(net: Net, world: World, reader: str) -> None:
    """The reader's blocks but those that it has begun are read by others, and none is read twice."""
    await until(lambda: net["p"].services.counts.moves, "blocks move")
    assert net["p"].services.counts.moves == {"starved": 1}
    await world.finish()
    all_ok(world)
    read = net.read_blocks()
    assert sum(read.values()) == HITS, read
    assert read[reader] <= 8, f"{reader} had begun no more than a device takes at once: {read}"


@pytest.mark.parametrize("reader", ["d", "h"])
async def test_a_reader_whose_lane_starves_in_mid_request_gives_what_it_has_not_begun(reader: str) -> None:
    async with node_net(3, split=SETTINGS) as net:
        world = await begun(net, ("p", (0, 2)), (reader, (2, HITS)))
        await read_all(net, world, "p")
        assert not net["p"].services.counts.moves
        net.peers["p"].starved = {reader}
        await relieved(net, world, reader)


async def test_what_the_decode_node_reads_alone_goes_to_the_prefill_node_when_its_lane_starves() -> None:
    async with node_net(2, split=SETTINGS) as net:
        world = await begun(net, path=Path.DE)
        net.peers["p"].starved = {"d"}
        await relieved(net, world, "d")


@pytest.mark.parametrize("path", [Path.PE, Path.PARTS])
async def test_the_decode_node_reads_what_would_starve_on_the_way_to_it(path: Path) -> None:
    async with node_net(2, split=SETTINGS) as net:
        world = await begun(net, ("p", (0, HITS - 2)), ("d", (HITS - 2, HITS)), path=path)
        await read_all(net, world, "d")
        starve(net["p"], "d")
        await relieved(net, world, "p")


async def stays(net: Net, world: World) -> None:
    """Nothing moves, however often it is looked at, and the request ends well all the same."""
    await asyncio.sleep(LOOKS_S)
    assert not net["p"].services.counts.moves
    net.peers["p"].starved = set()
    await world.finish()
    all_ok(world)


@pytest.mark.parametrize("moves_max", [0, 32])
@pytest.mark.parametrize("rebalances", [True, False])
async def test_nothing_moves_where_all_lanes_starve_or_nothing_may(
    rebalances: bool, moves_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancing, "MOVES_MAX", moves_max)
    monkeypatch.setattr(balance, "STOPPED_NS", 60_000_000_000)
    async with node_net(2, split=SplitSettings(stall_s=30.0, rebalances=rebalances)) as net:
        world = await begun(net, ("p", (0, 2)), ("d", (2, HITS)))
        await read_all(net, world, "p")
        net.peers["p"].starved = {"d"}
        if rebalances and moves_max:
            starve(net["p"], "d")
        await stays(net, world)
        assert net.read_blocks() == {"p": 2, "d": HITS - 2}


async def test_nothing_moves_to_a_prefill_node_that_has_no_room_for_it_now() -> None:
    """The request holds its DE buffer: it does not queue for room at home meanwhile."""
    async with node_net(2, split=SETTINGS, room_slots={Purpose.READ: HITS - 1}) as net:
        world = await begun(net, path=Path.DE)
        net.peers["p"].starved = {"d"}
        await stays(net, world)
        assert net.read_blocks() == {"p": 0, "d": HITS}
