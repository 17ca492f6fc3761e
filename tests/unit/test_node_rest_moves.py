"""Moves in mid-stream over whole nodes: the layers that a part has not begun are read by another, to the last byte and once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from node_gates import NEVER
from node_kit import LAYOUT, end_of, told, until
from node_net import Net, node_net
from rest_kit import (
    EVERY,
    MOVES,
    PATIENT,
    SPLIT,
    STEPS_MAX,
    Rest,
    RingWorld,
    all_ok,
    begun,
    steps_of,
    streaming,
    streams_of,
    until_streaming,
)

from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.sessions import as_pages

LAYERS = LAYOUT.layer_count


@pytest.mark.parametrize(("giver", "taker"), MOVES)
@pytest.mark.parametrize("kept", [0, 5])
async def test_the_layers_that_a_part_has_not_begun_are_read_by_another_node_and_none_twice(
    giver: str, taker: str, kept: int
) -> None:
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move(giver, taker, kept)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert 0 < rest.rest_reads(taker) <= 12 - kept
        assert sum(rest.layers_read().values()) == 24 * LAYERS


@pytest.mark.parametrize(("node", "taker"), [("p", "d"), ("p", "h"), ("d", "p"), ("d", "h")])
async def test_a_part_alone_gives_its_rest_too(node: str, taker: str) -> None:
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, (node, (0, 20)))
        assert rest.move(node, taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


@pytest.mark.parametrize("ops_max", [1, 3, 64])
@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_whatever_is_under_way_in_the_device_stays_where_it_is(giver: str, taker: str, ops_max: int) -> None:
    async with node_net(3, split=PATIENT, ops_max=ops_max) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move(giver, taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_rest_may_be_asked_for_after_any_step(giver: str, taker: str, every: int) -> None:
    given: Counter[bool] = Counter()
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT, ops_max=2) as net:
            rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
            went_on = await steps_of(rest, steps)
            if streams_of(net):
                rest.move(giver, taker)
            await rest.world.finish()
            all_ok(rest.world)
            rest.nothing_was_read_twice()
            given[rest.rest_reads(taker) > 0] += 1
        if not went_on:
            break
    assert given[True] and given[False], given


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_words_that_travel_cross_with_layers_and_nothing_is_lost(giver: str, taker: str) -> None:
    for delay_s in (0.001, 0.004, 0.02):
        async with node_net(3, split=PATIENT) as net:
            rest = await streaming(net, *SPLIT)
            net.delay_s = delay_s
            assert rest.move(giver, taker)
            net.open_gates()
            await rest.world.finish()
            all_ok(rest.world)
            rest.nothing_was_read_twice()


SCATTERED = (("p", (0, 4)), ("d", (4, 9)), ("p", (9, 14)), ("d", (14, 17)), ("h", (17, 20)), ("d", (20, 24)))


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_parts_of_several_ranges_of_blocks_give_rests_of_several(giver: str, taker: str) -> None:
    """The third node has a part of its own beside the rest."""
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        rest = await streaming(net, *SCATTERED)
        assert rest.move(giver, taker, 2)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 3


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_of_a_prefix_that_is_shorter_than_was_hoped_for_the_rest_is_given(giver: str, taker: str) -> None:
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        shares = (("p", (0, 12)), ("d", (12, 24))) if giver == "d" else (("d", (0, 12)), ("p", (12, 24)))
        rest = await begun(net, *shares)
        net["p"].storage.tamper(net["p"].namespace, rest.world.keys[20], None)
        await until_streaming(rest)
        assert rest.move(giver, taker, 1)
        await rest.world.finish()
        all_ok(rest.world)
        assert rest.world.prefix == 20
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


@pytest.mark.parametrize("taker", ["h"])
async def test_a_node_that_prefills_and_decodes_gives_the_rest_of_what_it_reads(taker: str) -> None:
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        rest = await streaming(net, ("p", (0, 12)), to="p")
        assert rest.move("p", taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_with_blocks_that_are_resident_the_rest_of_the_others_is_given(giver: str, taker: str) -> None:
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        rest = await streaming(net, ("p", (5, 12)), ("d", (12, 20)), resident=5)
        assert rest.move(giver, taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_blocks_that_another_request_waits_for_are_not_given(giver: str, taker: str) -> None:
    """It has joined their reads, and gets them whole."""
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        rest = await streaming(net, *SPLIT)
        kit, keys = net[giver], rest.world.keys[:24][-6:] if giver == "d" else rest.world.keys[6:12]
        engine, pages = kit.engine(), as_pages(list(range(6)))
        call = kit.call(engine)
        other = kit.node.fetch(call, kit.namespace, keys, FetchKind.PAGES, region=engine.region, pages=pages)
        await rest.world.settle()
        rest.move(giver, taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert end_of(await told(other.outbox)).reason is Reason.OK
        assert not any(net[taker].disk.layer_reads[key, layer] for key in keys for layer in range(LAYERS))


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_who_asks_for_given_blocks_afterwards_gets_them_whole(giver: str, taker: str) -> None:
    """On the node that gave them, and on the one that reads the rest: neither has what anybody may find."""
    async with node_net(3, split=PATIENT, ops_max=3) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move(giver, taker)
        await steps_of(rest, 8)
        keys = rest.world.keys[:24]
        others = []
        for kit in (net[giver], net[taker]):
            engine = kit.engine(32)
            fetched = kit.node.fetch(
                kit.call(engine),
                kit.namespace,
                keys,
                FetchKind.PAGES,
                region=engine.region,
                pages=as_pages(list(range(24))),
            )
            others.append((engine, fetched))
        await rest.world.finish()
        all_ok(rest.world)
        for engine, fetched in others:
            assert end_of(await told(fetched.outbox)).reason is Reason.OK
            assert [engine.block(page) for page in range(24)] == [net["p"].content(key) for key in keys]


async def test_both_parts_may_give_their_rests() -> None:
    async with node_net(4, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move("p", "i") and rest.move("d", "h")
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads("h") and rest.rest_reads("i")


async def test_a_part_that_is_asked_twice_gives_once() -> None:
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move("p", "h", 8)
        await rest.world.settle()
        again = rest.move("p", "d")
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert not again, "it has given its rest"


async def test_a_rest_gives_none_and_a_third_nodes_part_neither() -> None:
    async with node_net(4, split=PATIENT) as net:
        rest = await streaming(net, ("p", (0, 8)), ("h", (8, 16)), ("d", (16, 24)))
        assert not rest.move("h", "i"), "a third node's part"
        assert rest.move("p", "i")
        await rest.world.settle()
        assert not rest.move("i", "d"), "a rest"
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_the_blocks_of_a_rest_never_count_as_clean_where_they_are_not_whole(giver: str, taker: str) -> None:
    """`everything_is_home` compares all that is clean; what the taker has read must not be found there at all."""
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT)
        assert rest.move(giver, taker)
        await rest.world.finish()
        all_ok(rest.world)
        disk = net[taker].disk
        partly = {key for key, layer in disk.layer_reads if layer and not disk.layer_reads[key, 0]}
        assert partly and not partly & set(net[taker].pooled()) - _pushed(net, taker, rest)


def _pushed(net: Net, node: str, rest: Rest) -> set[bytes]:
    """The decode node's buffer gets every block whole, from one or the other."""
    return set(rest.world.keys) if node == "d" else set()


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_ring_of_page_sets_takes_a_rest_too(giver: str, taker: str) -> None:
    """Each layer is computed and pushed before the next may come into the same pages."""
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT, world_class=RingWorld)
        assert rest.move(giver, taker)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
        assert rest.rest_reads(taker) > 0


async def test_equal_readers_move_nothing_in_mid_stream() -> None:
    async with node_net(2) as net:
        rest = await streaming(net, *SPLIT)
        net.open_gates()
        await rest.world.finish()
        all_ok(rest.world)
        assert not net["p"].services.counts.moves


async def test_a_part_without_a_decode_node_gives_its_rest_to_a_third_node() -> None:
    async with node_net(3, split=PATIENT) as net:
        kit = net["p"]
        engine, keys = kit.engine(), kit.chain(12)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        net.forget_counts()
        net.close_gates()
        shares = (Share("p", Runs.of((0, 12))),)
        call = kit.call(engine, timeout_s=5.0)
        driver = kit.node.stream(kit.plan(engine, call, keys, hit=12, path=Path.PARTS, decode_node="", shares=shares))
        rest = Rest(net, None)  # type: ignore[arg-type]
        await until(lambda: driver.machine.state.name == "STREAMING" or not kit.disk.release_first_range(), "a prefix")
        await asyncio.sleep(0.01)
        assert rest.move("p", "h")
        await asyncio.sleep(0.01)
        net.open_gates()
        while not driver.is_gone:
            net.release_one()
            await asyncio.sleep(0)
        assert end_of(await told(driver.outbox)).reason is Reason.OK
        for page, key in enumerate(keys):
            assert engine.block(page) == kit.content(key)
        rest.nothing_was_read_twice()
        assert rest.rest_reads("h") > 0
        kit.disk.fails = NEVER
        await net.everything_is_home()
