"""A third node reads what a slow one has not begun, and then the taker, or the giver, dies or stands still."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack

import pytest
from cluster import Cluster, Node, running
from engine import END_S, Engine, engine, outcome, outcomes
from test_slow_readers import (
    HITS,
    LAYERS,
    MANIFEST,
    PAGE_BYTES,
    PAGES,
    RECORD_BYTES,
    SETTINGS,
    Request,
    SlowableCluster,
    node_named,
    nothing_was_read_twice,
    prepared,
)

from kvmover_client.errors import KvmoverError

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

GIVERS = pytest.mark.parametrize("givers", [("pe",), ("pe", "de")], ids=["pe gives", "both give"])
"""With the prefill node well it would read for the decode node."""
ALONE_S = 10.0
SOME_LAYERS = 12
"""Of the ranges before the last one of a block."""
FLOOR = 'floor = "300ms"'
"""More than a third reader gains while all are well: it has no part of the plan."""
TOLD = {"OK", "PREFIX_CUT"}


class ThirdTakes(SlowableCluster):
    """The decode node reads for nobody: what the prefill node gives goes to the third node."""

    settings = SETTINGS | {"split": FLOOR}


@pytest.fixture(params=["tcp", "shm"])
def trio(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(nodes=3, transport=request.param, cluster_class=ThirdTakes) as cluster:
        cluster.de.settings = ThirdTakes.settings | {"split": f"{FLOOR}\nhelps = false"}
        cluster.de.write_config()
        yield cluster


@pytest.fixture
async def engines(trio: Cluster) -> AsyncIterator[tuple[Engine, Engine, list[bytes]]]:
    """Of both sides, and the keys of a prompt that lies in no pool."""
    keys = await prepared(trio)
    async with AsyncExitStack() as stack:
        pe, de = [await stack.enter_async_context(engine(node.endpoint, MANIFEST, PAGES)) for node in trio.nodes[:2]]
        yield pe, de, keys


def third(cluster: Cluster) -> Node:
    return cluster.helpers[0]


def stand_still_or_go_on(cluster: Cluster, names: Sequence[str]) -> None:
    for name in names:
        node_named(cluster, name).stand_still_or_go_on()


async def given_to_the_third(cluster: Cluster, request: Request, givers: Sequence[str]) -> None:
    """Returns when the third node reads what `givers`, which stand still, have not begun."""
    await request.begin()
    stand_still_or_go_on(cluster, givers)
    await cluster.pe.settled(lambda status: status["moved_parts"].get("rest", 0) >= len(givers), "moving")
    await third(cluster).settled(lambda status: any(root["read_bytes"] for root in status["storage"]), "reading")


async def played(request: Request, first: int = 0, end: int = LAYERS) -> tuple[int, list[tuple[int, int]]]:
    """(layers that were told to be ready, wrong blocks among them), each looked at when it is told."""
    wrong, keys = [], request.plan.block_keys
    for layer in range(first, end):
        try:
            await request.stream.wait_layer(layer, END_S)
            wrong += [(block, at) for block, at in request.pe.wrong_blocks(keys[:HITS]) if at == layer]
            request.pe.fill(keys[HITS:], HITS, [layer])
            await request.push.computed(layer + 1)
        except KvmoverError:
            return layer, wrong
    return end, wrong


async def delivered_wrong(request: Request) -> list[tuple[int, int]]:
    """What is wrong with what the decode engine gets, which must be all."""
    keys = request.plan.block_keys
    await request.assembly.whole(END_S)
    deliver = await request.de.client.deliver("r", request.plan.attempt, request.de.region, range(len(keys)))
    assert await outcome(deliver) == "OK"
    return request.de.wrong_blocks(keys) + request.pe.wrong_blocks(keys)


async def begun_again(pe: Engine, de: Engine, keys: list[bytes]) -> Request:
    """The next attempt that is let in: a node that was away is left alone for some seconds."""
    until_s = time.monotonic() + ALONE_S
    for attempt in itertools.count(2):
        again = Request(pe, de, keys, attempt=attempt)
        try:
            await again.begin()
        except KvmoverError:
            if time.monotonic() > until_s:
                raise
            again.assembly.cancel()
            await asyncio.sleep(0.2)
        else:
            return again
    raise AssertionError


async def all_home_and_serving(cluster: Cluster, pe: Engine, de: Engine, keys: list[bytes]) -> None:
    for node in cluster.nodes:
        await node.slots_home()
    again = await begun_again(pe, de, keys)
    layers, wrong = await played(again)
    assert (layers, wrong) == (LAYERS, [])
    assert await delivered_wrong(again) == []
    assert set(await outcomes(again.stream, again.push, again.assembly)) == {"OK"}
    for node in cluster.nodes:
        await node.slots_home()


async def read_by(nodes: Sequence[Node]) -> int:
    """Bytes from storage."""
    told = [await node.status() for node in nodes]
    return sum(int(root["read_bytes"]) for status in told for root in status["storage"])


@GIVERS
@pytest.mark.parametrize("incident", ["kill", "stop"])
async def test_a_third_node_that_dies_or_stops_with_a_rest_costs_no_byte(
    trio: Cluster, engines: tuple[Engine, Engine, list[bytes]], givers: Sequence[str], incident: str
) -> None:
    """Its blocks are read by an owner, or the prefix is cut: what was told to be ready is right either way."""
    pe, de, keys = engines
    request = Request(pe, de, keys)
    await given_to_the_third(trio, request, givers)
    helper = third(trio)
    if incident == "kill":
        helper.kill()
    else:
        helper.pause()
    stand_still_or_go_on(trio, givers)
    layers, wrong = await played(request)
    assert wrong == []
    if layers == LAYERS:
        assert await delivered_wrong(request) == []
    ended = await outcomes(request.stream, request.push)
    print(f"{givers} {incident}: {layers} layers, {ended}")
    assert set(ended) == {"OK"} if layers == LAYERS else set(ended) <= {"PREFIX_CUT"}, ended
    assert await read_by(trio.nodes[:2]) <= HITS * (RECORD_BYTES + 2 * PAGE_BYTES), "the owners read something twice"
    await outcome(request.assembly)
    if incident == "kill":
        await asyncio.to_thread(helper.start)
    else:
        helper.resume()
    await all_home_and_serving(trio, pe, de, keys)


async def test_a_third_node_that_dies_when_the_layers_before_its_rest_are_there_leaves_only_right_layers(
    trio: Cluster, engines: tuple[Engine, Engine, list[bytes]]
) -> None:
    """The owners have read all that they kept by then: one that is done reads anew, or the prefix is cut."""
    pe, de, keys = engines
    request = Request(pe, de, keys)
    await given_to_the_third(trio, request, ("pe", "de"))
    node_named(trio, third(trio).name).slow_down()
    stand_still_or_go_on(trio, ("pe", "de"))
    assert await played(request, end=SOME_LAYERS) == (SOME_LAYERS, [])
    third(trio).kill()
    layers, wrong = await played(request, first=SOME_LAYERS)
    assert wrong == []
    ended = await outcomes(request.stream, request.push) if layers < LAYERS else []
    print(f"{layers} layers, {ended}")
    assert set(ended) <= {"PREFIX_CUT"}, ended
    if layers == LAYERS:
        assert await delivered_wrong(request) == []
    else:
        await outcome(request.assembly)
    await asyncio.to_thread(third(trio).start)
    await all_home_and_serving(trio, pe, de, keys)


@pytest.mark.parametrize("dies", ["pe", "de"])
async def test_an_owner_that_dies_after_it_gave_its_rest_ends_the_request_everywhere(
    trio: Cluster, engines: tuple[Engine, Engine, list[bytes]], dies: str
) -> None:
    pe, de, keys = engines
    request = Request(pe, de, keys)
    await given_to_the_third(trio, request, ("pe", "de"))
    dead, engine_of_dead = node_named(trio, dies), {"pe": pe, "de": de}[dies]
    dead.kill()
    lives = "de" if dies == "pe" else "pe"
    stand_still_or_go_on(trio, [lives])
    calls = [request.assembly] if dies == "pe" else [request.stream, request.push]
    ended = await outcomes(*calls)
    assert set(ended) <= {"PEER_LOST", "PREFIX_CUT"}, ended
    for node in trio.nodes:
        if node is not dead:
            await node.slots_home()
    await asyncio.to_thread(dead.start)
    await engine_of_dead.reconnect()
    await all_home_and_serving(trio, pe, de, keys)


async def test_a_third_node_brings_the_rests_of_both_and_nothing_is_read_twice(
    trio: Cluster, engines: tuple[Engine, Engine, list[bytes]]
) -> None:
    pe, de, keys = engines
    request = Request(pe, de, keys)
    await given_to_the_third(trio, request, ("pe", "de"))
    stand_still_or_go_on(trio, ("pe", "de"))
    assert await request.went_well() == []
    await nothing_was_read_twice(trio)
    for node in trio.nodes:
        await node.slots_home()
