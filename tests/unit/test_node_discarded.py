"""New blocks of an attempt that ends before its DE buffer is whole: not stored, and counted, told and logged once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from node_net import Net, node_net
from node_world import World

from kvmoverd.core.drops import Drop
from kvmoverd.core.status import Path

HIT, BLOCKS = 2, 6


def dropped(net: Net) -> dict[str, dict[str, int]]:
    """By node and why; each node's log was told the same."""
    found = {name: dict(kit.services.counts.dropped) for name, kit in net.kits.items()}
    for name, kit in net.kits.items():
        assert found[name] == {why: n for (kind, why), n in kit.observer.counts.items() if kind == "dropped"}
    return {name: counts for name, counts in found.items() if counts}


def cancel(session: str) -> Callable[[Net, World], None]:
    def end(net: Net, world: World) -> None:
        engine = world.prefill if session == "p" else world.decode
        net[session].node.cancel("x", 1, engine.session.session_id)

    return end


def lose(net: Net, world: World) -> None:
    net.cut("p", "d")


ENDS = {"prefill-cancels": cancel("p"), "decode-cancels": cancel("d"), "nodes-lose-each-other": lose}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("path", [Path.PE, Path.DE])
async def test_new_blocks_of_a_buffer_that_never_got_whole_are_counted_once(how: str, path: Path) -> None:
    async with node_net(2) as net:
        world = World(net["p"], hit=HIT, blocks=BLOCKS, net=net, timeout_s=5.0)
        await world.prepare()
        world._turn(path, HIT)
        await world.settle()
        while not net.fars["p"].held:
            assert await world.step(), "a computed layer goes to the decode node"
        ENDS[how](net, world)
        await world.finish()
        assert dropped(net) == {"d": {Drop.DISCARDED.value: BLOCKS - HIT}}
        assert not any(net["d"].stored(key) for key in world.keys[HIT:])


async def test_an_attempt_that_ends_before_anything_was_computed_has_no_new_blocks() -> None:
    async with node_net(2) as net:
        world = World(net["p"], hit=HIT, blocks=BLOCKS, net=net)
        await world.prepare()
        world.turn_pe()
        await world.settle()
        cancel("p")(net, world)
        await world.finish()
        assert dropped(net) == {}


async def test_blocks_of_a_buffer_that_was_whole_are_stored_whoever_leaves() -> None:
    async with node_net(2) as net:
        world = World(net["p"], hit=HIT, blocks=BLOCKS, net=net)
        await world.prepare()
        world.turn_pe()
        await world.settle()
        while not any(heard.name == "deliver" for heard in world.heard):
            assert await world.step(), "it gets whole"
        assert not net["d"].stored(world.keys[HIT])
        cancel("d")(net, world)
        await world.finish()
        assert all(net["d"].stored(key) == net["d"].content(key) for key in world.keys)
        assert dropped(net) == {}
