"""KV that lies in the prefill engine's pages, in a DE buffer or in a pool is not read again, and goes no way that it need not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from node_kit import LAYOUT, NodeKit, until
from node_net import Net, node_net
from node_world import World
from test_node_split import all_ok

from kvmoverd.core.status import Path

BLOCK = LAYOUT.block_bytes
TAIL = 3 * BLOCK // LAYOUT.block_tokens


async def warm(kit: NodeKit, keys: Sequence[bytes]) -> None:
    """The blocks are clean in this node's pool, and nobody holds them."""
    blocks = kit.services.reader.acquire(kit.namespace, list(keys), priority=0, due_ns=0)
    await until(lambda: blocks.whole_prefix() == len(keys), "the blocks are read")
    kit.services.reader.release(blocks)


async def turned(
    net: Net,
    *,
    hit: int = 4,
    blocks: int = 6,
    resident: int = 0,
    at_decode: Sequence[int] = (),
    at_prefill: Sequence[int] = (),
    path: Path = Path.AUTO,
    tail: int = 3,
    to: str = "d",
) -> tuple[int, dict[tuple[str, str], int]]:
    """A turn that succeeds: blocks that were read from storage, and bytes that went from node to node."""
    world = World(net["p"], hit=hit, blocks=blocks, resident=resident, net=net, to=to)
    await net["p"].store(net["p"].engine(), world.keys[:hit])
    net["p"].forget_clean()
    await warm(net["d"], [world.keys[block] for block in at_decode])
    await warm(net["p"], [world.keys[block] for block in at_prefill])
    net.forget_counts()
    world._turn(path if hit > resident else None, hit, tail=tail)
    await world.finish()
    all_ok(world)
    return sum(net.read_blocks().values()), net.far_bytes()


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("path", [Path.AUTO, Path.DE])
async def test_what_is_clean_at_the_decode_node_is_not_read_and_only_new_kv_goes_there(path: Path) -> None:
    async with node_net(2) as net:
        reads, sent = await turned(net, at_decode=ALL, path=path)
        assert (reads, sent) == (0, {("d", "p"): 4 * BLOCK, ("p", "d"): 2 * BLOCK + TAIL})


@pytest.mark.parametrize("path", [Path.AUTO, Path.PE])
async def test_what_is_clean_at_the_prefill_node_is_not_read_and_goes_on_from_the_pages(path: Path) -> None:
    async with node_net(2) as net:
        reads, sent = await turned(net, at_prefill=ALL, path=path)
        assert (reads, sent) == (0, {("p", "d"): 6 * BLOCK + TAIL})


async def test_what_is_resident_is_not_read_and_goes_to_a_decode_node_that_lacks_it() -> None:
    async with node_net(2) as net:
        assert await turned(net, resident=4) == (0, {("p", "d"): 6 * BLOCK + TAIL})
        assert net["p"].services.counts.plans == {"resident": 1}


async def test_what_is_resident_and_clean_at_the_decode_node_is_not_moved_at_all() -> None:
    async with node_net(2) as net:
        assert await turned(net, resident=4, at_decode=ALL) == (0, {("p", "d"): 2 * BLOCK + TAIL})


async def test_a_full_hit_at_the_decode_node_with_nothing_to_compute_is_local() -> None:
    async with node_net(2) as net:
        assert await turned(net, hit=4, blocks=4, resident=4, at_decode=ALL, tail=0) == (0, {})


async def test_a_full_hit_of_which_the_prefill_node_has_nothing_costs_its_pages_and_no_way_back() -> None:
    async with node_net(2) as net:
        reads, sent = await turned(net, hit=4, blocks=4, at_decode=ALL, path=Path.DE, tail=0)
        assert (reads, sent) == (0, {("d", "p"): 4 * BLOCK})


async def test_each_block_of_a_mixed_request_takes_the_shortest_way() -> None:
    """0, 1 resident, of which the decode node has 0; 2 is clean at the decode node, 3 at the prefill node; 4, 5 are new."""
    async with node_net(2) as net:
        reads, sent = await turned(net, resident=2, at_decode=(0, 2), at_prefill=(3,))
        assert (reads, sent) == (0, {("d", "p"): BLOCK, ("p", "d"): 4 * BLOCK + TAIL})


async def test_only_what_lies_nowhere_is_read() -> None:
    async with node_net(2) as net:
        reads, _ = await turned(net, hit=6, blocks=7, resident=1, at_decode=(2,), at_prefill=(4,))
        assert reads == 3


@pytest.mark.parametrize("path", [Path.AUTO, Path.PE, Path.DE])
@pytest.mark.parametrize("pooled", [(), ALL])
async def test_engines_of_one_node_use_no_network(path: Path, pooled: Sequence[int]) -> None:
    async with node_net(2) as net:
        reads, sent = await turned(net, at_prefill=pooled, path=path, to="p")
        assert (reads, sent) == (4 - len(pooled), {})
        assert not set(net.calls) - {"depth"}, "and nothing is asked of another node but whether it may help"


@pytest.mark.parametrize("pooled", [(), ALL])
async def test_what_is_resident_on_one_node_of_both_engines_is_not_read(pooled: Sequence[int]) -> None:
    async with node_net(2) as net:
        assert await turned(net, resident=4, at_prefill=pooled, to="p") == (0, {})


async def test_engines_of_one_node_get_from_a_helper_what_it_reads_and_nothing_else_from_anywhere() -> None:
    async with node_net(3) as net:
        world = World(net["p"], hit=4, blocks=6, net=net, to="p")
        await world.prepare()
        world.turn_parts(("h", (0, 1)), ("p", (1, 4)))
        await world.finish()
        all_ok(world)
        assert net.read_blocks() == {"p": 3, "d": 0, "h": 1}
        assert net.far_bytes() == {("h", "p"): 2 * BLOCK}, "once to the pages, once to the DE buffer"


async def test_a_buffer_of_clean_blocks_does_not_evict_them_for_its_other_slots() -> None:
    """The pool has just as many slots as the request needs: what is clean must be held before the rest is taken."""
    async with node_net(2, slots=8) as net:
        assert await turned(net, hit=4, blocks=7, at_decode=ALL, path=Path.DE) == (
            0,
            {("d", "p"): 4 * BLOCK, ("p", "d"): 3 * BLOCK + TAIL},
        )
