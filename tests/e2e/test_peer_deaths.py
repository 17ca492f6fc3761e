"""Daemons that die, stand still or restart before a byte was pushed: their peers know by the watch, not by a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, running
from engine import END_S, engine, outcome, outcomes, whole_request

from kvmover_client import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCKS, HITS = 12, 8
FAR_S = 60.0
"""A deadline that must not be what ends a request here."""
DEAD_S, SILENT_S = 3.0, 6.0
"""Within which a death is known, and a standstill: a node is taken for dead after 2 s of silence here."""
PATHS = pytest.mark.parametrize("path", [Path.PE, Path.DE], ids=["pe_read", "de_read"])


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(Cluster, "settings", {"silence": "2s"})
    with running() as cluster:
        yield cluster


async def test_death_of_the_prefill_daemon_between_the_reservation_and_the_first_push_ends_the_assembly(
    pair: Cluster,
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("new", BLOCKS)
        assembly = await de.client.assemble_blocks("r", 1, de.model, FAR_S)
        await pe.client.push_layers(pe.plan("r", keys, hit_blocks=0, timeout_s=FAR_S))
        await assembly.attached(END_S)
        began_s = time.monotonic()
        pair.pe.kill()
        assert await outcome(assembly, DEAD_S) == "PEER_LOST"
        await pair.de.slots_home()
        print(f"known after {time.monotonic() - began_s:.3f} s")
        pair.pe.start()
        await pe.reconnect()
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=0, attempt=2)) == []


async def test_a_prefill_daemon_that_stands_still_after_its_reservation_costs_the_decode_side_seconds(
    pair: Cluster,
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        assembly = await de.client.assemble_blocks("r", 1, de.model, FAR_S)
        stream = await pe.client.stream_layers(
            pe.plan("r", keys, hit_blocks=HITS, path=Path.DE, timeout_s=FAR_S, ring_sets=2)
        )
        await stream.wait_layer(1, END_S)
        await assembly.attached(END_S)
        began_s = time.monotonic()
        pair.pe.pause()
        try:
            assert await outcome(assembly, SILENT_S) == "PEER_LOST"
            await pair.de.slots_home()
            print(f"known after {time.monotonic() - began_s:.3f} s")
        finally:
            pair.pe.resume()
        assert await outcome(stream, DEAD_S) in {"PEER_LOST", "PREFIX_CUT"}, "it learns that it was given up"
        await pair.pe.slots_home()
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=Path.DE, attempt=2)) == []


async def test_death_of_the_decode_daemon_before_anything_is_computed_ends_the_push(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("new", BLOCKS)
        assembly = await de.client.assemble_blocks("r", 1, de.model, FAR_S)
        push = await pe.client.push_layers(pe.plan("r", keys, hit_blocks=0, timeout_s=FAR_S))
        await assembly.attached(END_S)
        pair.de.kill()
        assert await outcome(push, DEAD_S) == "PEER_LOST"
        assert await outcome(assembly) == "DaemonGone"
        await pair.pe.slots_home()


@PATHS
async def test_a_decode_daemon_that_stands_still_before_anything_is_computed_costs_the_prefill_side_seconds(
    pair: Cluster, path: Path
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        plan = pe.plan("r", keys, hit_blocks=HITS, path=path, timeout_s=FAR_S, ring_sets=2)
        assembly = await de.client.assemble_blocks("r", 1, de.model, FAR_S)
        stream, push = await pe.client.stream_layers(plan), await pe.client.push_layers(plan)
        await assembly.attached(END_S)
        await stream.wait_layer(1, END_S)
        pair.de.pause()
        try:
            ends = await outcomes(stream, push, timeout_s=SILENT_S)
            assert set(ends) <= {"PEER_LOST", "PREFIX_CUT"}, ends
            await stream.quiet(END_S)
            await push.quiet(END_S)
            await pair.pe.slots_home()
        finally:
            pair.de.resume()
        assert await outcome(assembly, DEAD_S) == "PEER_LOST"
        await pair.de.slots_home()
        await asyncio.sleep(1.1)  # a node that did not answer is left alone for a second
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, attempt=2)) == []


async def test_a_prefill_daemon_that_waits_for_room_at_a_node_that_dies_is_told_at_once(pair: Cluster) -> None:
    """The decode node has room for 24 MiB; admission takes 3 s, the request's deadline is far."""
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint):
        big = await pe.client.push_layers(pe.plan("big", pe.keys("big", 80), hit_blocks=0, timeout_s=FAR_S))
        await pair.de.settled(lambda status: status["requests"].get("assemble") == 1, "reserved")
        waiting = await pe.client.push_layers(pe.plan("waits", pe.keys("w", 80), hit_blocks=0, timeout_s=FAR_S))
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        pair.de.kill()
        assert await outcomes(big, waiting, timeout_s=DEAD_S) == ["PEER_LOST", "PEER_LOST"]
        assert time.monotonic() - began_s < 2.0
        await pair.pe.slots_home()
