"""A storage NIC that gets slow when the first layers are there: the layers that are not begun are read by others, each once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from cluster import Cluster, Node, running
from engine import END_S, Engine, engine, outcomes

from kvmover_client import AssembleCall, Layout, Manifest, Part, Path, Plan, PushCall, StreamCall

pytestmark = pytest.mark.e2e

LAYERS = 24
LAYOUT = Layout.uniform(layers=LAYERS, tokens=64, token_bytes=1312)
"""Blocks of 2 MB, a layer no multiple of a page: three ranges."""
MANIFEST = Manifest("rests", b"w" * 32, b"t" * 32, LAYOUT, "u8")
RECORD_BYTES = 4096 + -(-LAYOUT.block_bytes // 4096) * 4096
PAGE_BYTES = 4096
BLOCKS, HITS, PAGES = 18, 16, 20
RATE_MB = 24
SETTINGS = {
    "pool_bytes": "192MiB",
    "read_bytes": "40MiB",
    "de_buffer_bytes": "40MiB",
    "write_back_bytes": "36MiB",
    "more_pool": 'help_bytes = "36MiB"',
    "more_storage": f'read_rate_max = "{RATE_MB}MiB"\nthreads = 2\nops_max = 4',
    "split": 'floor = "150ms"',
    "silence": "2s",
}
LAUNCHER = FilePath(__file__).with_name("slow_daemon.py")


class SlowableNode(Node):
    """A daemon whose storage NIC may lose nine tenths of its rate, or stand still."""

    def command(self) -> list[str]:
        return [sys.executable, str(LAUNCHER), str(self.config)]

    def slow_down(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def stand_still_or_go_on(self) -> None:
        os.kill(self.pid, signal.SIGUSR2)


class SlowableCluster(Cluster):
    node_class = SlowableNode
    settings = SETTINGS


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(transport=request.param, cluster_class=SlowableCluster) as cluster:
        yield cluster


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with running(nodes=3, cluster_class=SlowableCluster) as cluster:
        yield cluster


async def prepared(cluster: Cluster) -> list[bytes]:
    """Keys of a prompt whose hits lie in the store and in no pool."""
    async with engine(cluster.pe.endpoint, MANIFEST, PAGES) as pe:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
    await asyncio.to_thread(cluster.restart)
    return keys


class Request:
    """One request between two engines: `run` starts its calls, `went_well` plays it to its end."""

    def __init__(self, pe: Engine, de: Engine, keys: list[bytes], **changed: object) -> None:
        self.pe, self.de = pe, de
        plan = pe.plan("r", keys, hit_blocks=HITS, path=Path.AUTO, timeout_s=30.0)
        self.plan: Plan = replace(plan, **changed)  # type: ignore[arg-type]
        self.stream: StreamCall
        self.push: PushCall
        self.assembly: AssembleCall

    async def begin(self) -> None:
        """Returns when the prefix is known."""
        self.pe.scrub()
        self.de.scrub()
        plan = self.plan
        self.assembly = await self.de.client.assemble_blocks(
            plan.request_id, plan.attempt, self.de.model, plan.timeout_s
        )
        self.stream = await self.pe.client.stream_layers(plan)
        self.push = await self.pe.client.push_layers(plan)
        assert (await self.stream.prefix()).prefix_blocks == HITS

    async def went_well(self) -> list[tuple[int, int]]:
        """What is wrong in either engine's pages."""
        keys = self.plan.block_keys
        for layer in range(LAYERS):
            await self.stream.wait_layer(layer, END_S)
            self.pe.fill(keys[HITS:], HITS, [layer])
            await self.push.computed(layer + 1)
        await self.assembly.whole(END_S)
        deliver = await self.de.client.deliver("r", 1, self.de.region, range(len(keys)))
        for call in (self.stream, self.push, deliver, self.assembly):
            end = await call.end(END_S)
            assert end.reason.name == "OK", end
        return self.de.wrong_blocks(keys) + self.pe.wrong_blocks(keys)


@asynccontextmanager
async def begun(cluster: Cluster, **changed: object) -> AsyncIterator[Request]:
    """A request whose prefix is known, of engines on the first two nodes. After it all slots are at home."""
    keys = await prepared(cluster)
    async with AsyncExitStack() as stack:
        pe, de = [await stack.enter_async_context(engine(node.endpoint, MANIFEST, PAGES)) for node in cluster.nodes[:2]]
        request = Request(pe, de, keys, **changed)
        await request.begin()
        yield request
    for node in cluster.nodes:
        await node.slots_home()


async def read_bytes(cluster: Cluster) -> dict[str, int]:
    found = {}
    for node in cluster.nodes:
        status = await node.status()
        found[node.name] = sum(int(root["read_bytes"]) for root in status["storage"])
    return found


async def nothing_was_read_twice(cluster: Cluster) -> None:
    """But for headers, and pages that two ranges share."""
    read = await read_bytes(cluster)
    more_bytes = sum(read.values()) - HITS * RECORD_BYTES
    assert 0 <= more_bytes <= HITS * 2 * PAGE_BYTES, read


async def rests(cluster: Cluster) -> int:
    return int((await cluster.pe.status())["moved_parts"].get("rest", 0))


def node_named(cluster: Cluster, name: str) -> SlowableNode:
    (found,) = [node for node in cluster.nodes if node.name == name]
    assert isinstance(found, SlowableNode)
    return found


@pytest.mark.parametrize("slow", ["pe", "de"])
async def test_a_storage_nic_that_gets_slow_after_the_prefix_is_relieved_of_the_rest(pair: Cluster, slow: str) -> None:
    async with begun(pair, no_helpers=True) as request:
        node_named(pair, slow).slow_down()
        assert await request.went_well() == []
        assert await rests(pair) > 0, (await pair.pe.status())["moved_parts"]
        await nothing_was_read_twice(pair)


@pytest.mark.parametrize("still", ["pe", "de"])
async def test_one_that_stands_still_after_the_prefix_is_relieved_though_its_caller_has_chosen_it(
    pair: Cluster, still: str
) -> None:
    parts = (Part("pe", ((0, HITS // 2),)), Part("de", ((HITS // 2, HITS),)))
    async with begun(pair, path=Path.PARTS, parts=parts) as request:
        node_named(pair, still).stand_still_or_go_on()
        await pair.pe.settled(lambda status: status["moved_parts"].get("rest", 0) > 0, "moving")
        node_named(pair, still).stand_still_or_go_on()
        assert await request.went_well() == []
        await nothing_was_read_twice(pair)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["pe", "de"])
async def test_a_third_node_may_take_a_rest(trio: Cluster, slow: str) -> None:
    """Whoever it is that takes it: no byte is wrong, and none read twice."""
    async with begun(trio) as request:
        node_named(trio, slow).slow_down()
        assert await request.went_well() == []
        await nothing_was_read_twice(trio)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["pe", "de"])
async def test_whoever_dies_after_a_move_everybody_is_told(pair: Cluster, slow: str) -> None:
    """With the prefill node slow the decode node reads the rest; with itself slow it has given it. Either way it dies."""
    keys = await prepared(pair)
    async with AsyncExitStack() as stack:
        pe, de = [await stack.enter_async_context(engine(node.endpoint, MANIFEST, PAGES)) for node in pair.nodes]
        request = Request(pe, de, keys, no_helpers=True)
        await request.begin()
        node_named(pair, slow).slow_down()
        await pair.pe.settled(lambda status: status["moved_parts"].get("rest", 0) > 0, "moving")
        pair.de.kill()
        ended = await outcomes(request.stream, request.push)
        assert set(ended) <= {"PEER_LOST", "PREFIX_CUT"}, ended
        await pair.pe.slots_home()
        pair.de.start()
