"""Two real daemons on one store of segments: hints, purges and pins of one, seen by the other."""

from __future__ import annotations

import time

import pytest
from cluster import Cluster
from engine import engine, whole_request

from kvmover_client import Path

pytestmark = pytest.mark.e2e

HEARD_S = 0.5
"""Within this a purge is known at the other node, which was told; its own look at the store may take twice as long."""


async def test_a_decode_node_reads_at_once_what_the_prefill_node_has_just_stored(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        for number in range(3):
            keys = pe.keys(f"chain {number}", 8)
            await pe.store(f"store {number}", keys[:6])
            assert await whole_request(pe, de, pe.plan(f"r {number}", keys, hit_blocks=6, path=Path.DE)) == []
        (root,) = (await pair.de.slots_home())["storage"]
        assert (int(root["read_blocks"]), int(root["missed_blocks"])) == (18, 0)


async def test_what_one_node_purges_the_other_has_forgotten_and_stores_again(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("chain", 8)
        await de.store("first", keys)
        assert await pe.found(keys, 8) == 8
        assert (await pe.client.purge_namespace(pe.model)).purged_blocks == 8
        began_s = time.monotonic()
        assert (await pe.client.lookup(pe.model, keys)).prefix_blocks == 0
        while (await de.client.lookup(de.model, keys)).prefix_blocks:
            assert time.monotonic() < began_s + HEARD_S, "the other node was not told"
        await de.store("again", keys)
        assert await pe.found(keys, 8) == 8
        assert await pe.fetch_wrong("fetch", keys) == []


async def test_a_node_pins_what_another_has_stored(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("chain", 8)
        await de.store("first", keys[:5])
        assert await pe.found(keys, 5) == 5
        assert await pe.client.pin(pe.model, keys, pin_s=60.0) == 5
        assert await de.client.pin(de.model, keys, pin_s=60.0) == 5
        assert await pe.client.pin(pe.model, keys, pin_s=0.0) == 5


async def test_what_one_node_has_stored_the_other_neither_copies_nor_writes(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("chain", 8)
        await pe.store("first", keys[:6])
        assert await de.found(keys, 6) == 6
        await de.store("again, and two more", keys)
        (wrote,), (found,) = [(await node.slots_home())["storage"] for node in (pair.pe, pair.de)]
        assert (int(wrote["written_blocks"]), int(found["written_blocks"])) == (6, 2)
        clean = sum(int(counts["clean"]) for counts in (await pair.de.status())["slots"])
        assert clean == 2, "what is stored took no slot"
        assert await pe.found(keys, 8) == 8
        assert await pe.fetch_wrong("fetch", keys) == []
