"""Many requests at once over three real daemons, read in every way, split without sense: every byte, each block read once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from cluster import Cluster, running
from engine import END_S, LAYERS, Engine, engine

from kvmover_client import Part, Path, Plan

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORKERS, ROUNDS, BLOCKS, NEW = 4, 6, 16, 2
WINDOW = BLOCKS + NEW
"""Pages of one worker, at both engines."""
FAR_S = 30.0
NODES = ("pe", "de", "h0")
SETTINGS = {
    "write_back_bytes": "8MiB",
    "more_pool": 'help_bytes = "8MiB"',
    "more_storage": 'read_rate_max = "48MiB"\nthreads = 4\nops_max = 8',
}


def dealt(chance: random.Random, hits: int) -> tuple[Part, ...]:
    """Each block to any node: runs of a block or two, as no scheduler would have it."""
    owners = [chance.choice(NODES) for _ in range(hits)]
    spans: dict[str, list[tuple[int, int]]] = {}
    for block, node in enumerate(owners):
        spans.setdefault(node, []).append((block, block + 1))
    return tuple(Part(node, found) for node, found in spans.items())


async def loaded(pe: Engine, de: Engine, plan: Plan, first_page: int) -> None:
    """A whole request in its own window of pages; the layers are looked at as they become ready, and after the delivery."""
    keys, pages = plan.block_keys, range(first_page, first_page + len(plan.block_keys))
    assembly = await de.client.assemble_blocks(plan.request_id, plan.attempt, de.model, plan.timeout_s)
    stream, push = await pe.client.stream_layers(plan), await pe.client.push_layers(plan)
    for layer in range(LAYERS):
        await stream.wait_layer(layer, END_S)
        wrong = [block for block, at in pe.wrong_blocks(keys[: plan.hit_blocks], first_page) if at <= layer]
        assert wrong == [], f"{plan.request_id}: layer {layer} is ready, blocks {wrong} are not as they must be"
        pe.fill(keys[plan.hit_blocks :], first_page + plan.hit_blocks, [layer])
        await push.computed(layer + 1)
    await assembly.whole(END_S)
    deliver = await de.client.deliver(plan.request_id, plan.attempt, de.region, pages)
    for call in (stream, push, deliver, assembly):
        end = await call.end(END_S)
        assert end.reason.name == "OK", f"{plan.request_id}: {end}"
    assert de.wrong_blocks(keys, first_page) == [], plan.request_id


async def worker(number: int, pe: Engine, de: Engine, chains: Sequence[list[bytes]]) -> int:
    """Its requests, one after the other; how many blocks they loaded."""
    chance, first_page, blocks = random.Random(number), number * WINDOW, 0
    for turn, chain in enumerate(chains):
        path = (Path.AUTO, Path.PARTS, Path.PE, Path.PARTS, Path.DE, Path.AUTO)[(turn + number) % 6]
        hits = chance.randint(1, len(chain))
        name = f"{number}/{turn} {path.name}"
        keys = chain[:hits] + pe.keys(f"new {name}", chance.randrange(NEW + 1))
        parts = dealt(chance, hits) if path is Path.PARTS else ()
        plan = pe.plan(name, keys, hit_blocks=hits, path=path, timeout_s=FAR_S, first_page=first_page, parts=parts)
        await loaded(pe, de, plan, first_page)
        blocks += hits
    return blocks


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_requests_read_in_every_way_at_once_are_right_and_read_nothing_twice(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "settings", SETTINGS)
    with running(nodes=3, transport=transport) as cluster:
        async with engine(cluster.pe.endpoint) as pe:
            chains = [pe.keys(f"chain {number}", BLOCKS) for number in range(WORKERS * ROUNDS)]
            for number, chain in enumerate(chains):
                await pe.store(f"store {number}", chain)
        await asyncio.to_thread(cluster.restart)
        async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
            for reader in (pe, de):
                assert await reader.found(chains[-1], BLOCKS) == BLOCKS
            shares = [chains[number::WORKERS] for number in range(WORKERS)]
            loads = await asyncio.gather(*(worker(number, pe, de, share) for number, share in enumerate(shares)))
            statuses = [await node.slots_home() for node in cluster.nodes]
        read = [sum(int(root["read_blocks"]) for root in status["storage"]) for status in statuses]
        assert sum(read) == sum(loads), f"{read} blocks were read for {loads}"
        assert min(read) > 0, read
