"""Requests that several real daemons read at once: over both sides, with a third node, and when that one dies or stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from cluster import Cluster, Node, running
from engine import END_S, LAYERS, LAYOUT, Engine, engine

from kvmover_client import Part, Path, Plan

pytestmark = pytest.mark.e2e

BLOCKS, HITS = 40, 30
FAR_S = 60.0
SETTINGS = {
    "write_back_bytes": "8MiB",
    "more_pool": 'help_bytes = "12MiB"',
    "more_storage": 'read_rate_max = "12MiB"\nthreads = 4\nops_max = 8',
    "silence": "2s",
}
"""Slow storage: what is killed while a request goes on is in the middle of it."""
TRANSPORTS = ["tcp", "shm"]


@pytest.fixture(params=TRANSPORTS)
def trio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Prefill, decode and a third node."""
    monkeypatch.setattr(Cluster, "settings", SETTINGS)
    with running(nodes=3, transport=request.param) as cluster:
        yield cluster


async def prepared(cluster: Cluster) -> list[bytes]:
    """Keys of a prompt whose hits lie in the store and in no pool."""
    async with engine(cluster.pe.endpoint) as pe:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
    await asyncio.to_thread(cluster.restart)
    return keys


async def loaded(
    pe: Engine, de: Engine, plan: Plan, *, meanwhile: Callable[[int], Awaitable[None]] | None = None
) -> list[tuple[int, int]]:
    """A whole request, `meanwhile` called before each layer is waited for; what is wrong in either engine's pages."""
    pe.scrub()
    de.scrub()
    pe.fill(plan.block_keys[: plan.resident_blocks])
    assembly = await de.client.assemble_blocks(plan.request_id, plan.attempt, de.model, plan.timeout_s)
    stream, push = await pe.client.stream_layers(plan), await pe.client.push_layers(plan)
    for layer in range(LAYERS):
        if meanwhile is not None:
            await meanwhile(layer)
        await stream.wait_layer(layer, END_S)
        pe.fill(plan.block_keys[plan.hit_blocks :], plan.hit_blocks, [layer])
        await push.computed(layer + 1)
    await assembly.whole(END_S)
    deliver = await de.client.deliver(plan.request_id, plan.attempt, de.region, range(len(plan.block_keys)))
    for call in (stream, push, deliver, assembly):
        end = await call.end(END_S)
        assert end.reason.name == "OK", end
    assert (await stream.prefix()).prefix_blocks == plan.hit_blocks
    return de.wrong_blocks(plan.block_keys) + pe.wrong_blocks(plan.block_keys)


async def read_bytes(node: Node) -> int:
    """Payload of the blocks that the node read from storage, at most one partial block beside."""
    status = await node.status()
    return sum(int(root["read_blocks"]) for root in status["storage"]) * LAYOUT.block_bytes


def parts(*shares: tuple[str, int, int]) -> tuple[Part, ...]:
    return tuple(Part(node, ((first, stop),)) for node, first, stop in shares)


def plan_of(pe: Engine, keys: list[bytes], **changed: object) -> Plan:
    made = pe.plan("r", keys, hit_blocks=HITS, path=Path.PARTS, timeout_s=FAR_S)
    return replace(made, **changed)  # type: ignore[arg-type]


async def at_rest(cluster: Cluster) -> None:
    for node in cluster.nodes:
        if node.process is not None:
            await node.slots_home()


async def test_each_node_reads_its_part_and_no_other_block(trio: Cluster) -> None:
    keys = await prepared(trio)
    async with engine(trio.pe.endpoint) as pe, engine(trio.de.endpoint) as de:
        shares = parts(("pe", 0, 12), ("h0", 12, 20), ("de", 20, HITS))
        assert await loaded(pe, de, plan_of(pe, keys, parts=shares)) == []
        read = [await read_bytes(node) // LAYOUT.block_bytes for node in trio.nodes]
        assert read == [12, HITS - 20, 8]
        # Resident blocks are read by nobody, what is in the pools neither.
        again = plan_of(pe, keys, request_id="again", resident_blocks=12, parts=parts(("h0", 12, 20), ("de", 20, HITS)))
        assert await loaded(pe, de, again) == []
        assert [await read_bytes(node) // LAYOUT.block_bytes for node in trio.nodes] == read
    await at_rest(trio)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_two_nodes_split_what_one_could_read(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "settings", SETTINGS)
    with running(transport=transport) as cluster:
        keys = await prepared(cluster)
        async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
            assert await loaded(pe, de, plan_of(pe, keys, path=Path.AUTO, no_helpers=True)) == []
            read = [await read_bytes(node) // LAYOUT.block_bytes for node in cluster.nodes]
            assert sum(read) == HITS
            assert min(read) >= HITS // 4, f"one side read nearly all: {read}"
        await at_rest(cluster)


async def test_nodes_that_decide_themselves_read_at_once_and_no_block_twice(trio: Cluster) -> None:
    keys = await prepared(trio)
    async with engine(trio.pe.endpoint) as pe, engine(trio.de.endpoint) as de:
        auto = plan_of(pe, keys, path=Path.AUTO)
        assert await loaded(pe, de, auto) == []
        read = [await read_bytes(node) // LAYOUT.block_bytes for node in trio.nodes]
        assert sum(read) == HITS
        assert min(read[:2]) > 0, f"one side read alone: {read}"
        plans = (await trio.pe.status())["read_plans"]
        assert sum(int(count) for count in plans.values()) == 1, plans
    await at_rest(trio)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("slow", ["pe", "de"])
async def test_a_storage_nic_that_got_slow_gives_blocks_to_the_other(
    slow: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen it at work yet, so it gets half of the blocks."""
    settings = SETTINGS | {"split": 'floor = "0ms"'}
    monkeypatch.setattr(Cluster, "settings", settings)
    with running(transport=transport) as cluster:
        (node,) = [node for node in cluster.nodes if node.name == slow]
        node.settings = settings | {"more_storage": 'read_rate_max = "1MiB"\nthreads = 1\nops_max = 1'}
        node.write_config()
        keys = await prepared(cluster)
        async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
            assert await loaded(pe, de, plan_of(pe, keys, path=Path.AUTO, no_helpers=True)) == []
            read = {one.name: await read_bytes(one) // LAYOUT.block_bytes for one in cluster.nodes}
            assert sum(read.values()) == HITS, "nothing is read twice"
            assert read[slow] < HITS // 3, read
            assert sum(int(count) for count in (await cluster.pe.status())["moved_parts"].values()) > 0
        await at_rest(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1, 3])
async def test_a_helper_that_is_killed_costs_time_and_no_byte(trio: Cluster, layer: int) -> None:
    """Layer 0: before anything has arrived."""
    keys = await prepared(trio)
    (helper,) = trio.helpers

    async def kill(before: int) -> None:
        if before == layer:
            if layer == 0:
                await helper.settled(lambda status: status["requests"].get("read_part", 0) == 1, "helping")
            helper.kill()

    async with engine(trio.pe.endpoint) as pe, engine(trio.de.endpoint) as de:
        shares = parts(("pe", 0, 10), ("h0", 10, 20), ("de", 20, HITS))
        assert await loaded(pe, de, plan_of(pe, keys, parts=shares), meanwhile=kill) == []
        await at_rest(trio)
        helper.start()
        again = plan_of(pe, keys, request_id="again", parts=shares)
        assert await loaded(pe, de, again) == []
    await at_rest(trio)


@pytest.mark.slow
async def test_a_helper_that_stands_still_is_replaced(trio: Cluster) -> None:
    keys = await prepared(trio)
    (helper,) = trio.helpers

    async def pause(before: int) -> None:
        if before == 0:
            await helper.settled(lambda status: status["requests"].get("read_part", 0) == 1, "helping")
            helper.pause()

    async with engine(trio.pe.endpoint) as pe, engine(trio.de.endpoint) as de:
        shares = parts(("pe", 0, 10), ("h0", 10, 20), ("de", 20, HITS))
        try:
            assert await loaded(pe, de, plan_of(pe, keys, parts=shares), meanwhile=pause) == []
        finally:
            helper.resume()
    await at_rest(trio)
