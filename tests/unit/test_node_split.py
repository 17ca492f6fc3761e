"""One request read by several nodes: every byte of it comes, once, and nothing crosses a network that need not."""

from __future__ import annotations

from node_net import Net, node_net
from node_world import World

from kvmoverd.core.status import Reason


def all_ok(world: World) -> None:
    assert {heard.name: heard.end.reason for heard in world.heard if heard.end} == dict.fromkeys(
        [heard.name for heard in world.heard], Reason.OK
    ), [(heard.name, heard.end) for heard in world.heard]
    assert [heard.name for heard in world.heard].count("deliver") == 1, "the buffer was delivered"


async def turned(net: Net, *shares: tuple[str, tuple[int, int]], hit: int = 4, blocks: int = 6) -> World:
    world = World(net["p"], hit=hit, blocks=blocks, net=net)
    await world.prepare()
    world.turn_parts(*shares)
    await world.finish()
    all_ok(world)
    return world


async def test_a_request_is_read_by_both_sides_at_once() -> None:
    async with node_net(2) as net:
        await turned(net, ("p", (0, 2)), ("d", (2, 4)))
        assert net.read_blocks() == {"p": 2, "d": 2}


async def test_a_third_node_helps() -> None:
    async with node_net(3) as net:
        await turned(net, ("p", (0, 1)), ("h", (1, 2)), ("d", (2, 4)))
        assert net.read_blocks() == {"p": 1, "d": 2, "h": 1}


async def test_two_third_nodes_help() -> None:
    async with node_net(4) as net:
        await turned(net, ("p", (0, 1)), ("h", (1, 2)), ("i", (2, 3)), ("d", (3, 4)))
        assert net.read_blocks() == {"p": 1, "d": 1, "h": 1, "i": 1}
