"""Daemons that stop, die or stand still while requests run: all others hear of it in bounded time, and the next attempt works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cluster import Cluster, running
from engine import END_S, Engine, engine, outcome, outcomes, whole_request

from kvmover_client import AssembleCall, Path, Plan, PushCall, StreamCall

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCKS, HITS = 12, 8
PATHS = pytest.mark.parametrize("path", [Path.PE, Path.DE], ids=["pe_read", "de_read"])
WAYS = pytest.mark.parametrize(
    ("pair", "path"), [("tcp", Path.PE), ("shm", Path.DE)], indirect=["pair"], ids=["tcp-pe_read", "shm-de_read"]
)
LOST = {"PEER_LOST", "PREFIX_CUT", "LEASE_EXPIRED"}


class Running:
    """A request in mid-flight: some layers pushed out of a ring, the next one loaded, the engine not done computing."""

    stream: StreamCall
    push: PushCall
    assembly: AssembleCall

    async def begin(self, pe: Engine, de: Engine, plan: Plan, layers: int = 2) -> Running:
        self.assembly = await de.client.assemble_blocks(plan.request_id, plan.attempt, de.model, plan.timeout_s)
        self.stream = await pe.client.stream_layers(plan)
        self.push = await pe.client.push_layers(plan)
        await self.assembly.attached(END_S)
        await self.stream.wait_layer(layers - 1, END_S)
        await self.push.computed(layers)
        await self.push.wait_pushed(layers, END_S)
        await self.stream.wait_layer(layers, END_S)
        return self


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(Cluster, "settings", {"silence": "2s", "drain": "1s"})
    with running() as cluster:
        yield cluster


async def test_sigterm_ends_every_call_within_the_drain_time_and_the_next_start_serves_what_was_stored(
    pair: Cluster,
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        running = await Running().begin(pe, de, pe.plan("r", keys, hit_blocks=HITS, ring_sets=2))
        plan = pe.plan("ring", stored, hit_blocks=HITS, path=Path.PE, decode_node="", ring_sets=2, first_page=40)
        ring = await pe.client.stream_layers(plan)
        await ring.wait_layer(1, END_S)
        alone = await pe.client.assemble_blocks("nobody-comes", 1, pe.model)
        late = await pe.client.store_blocks(
            "late", 1, pe.model, pe.keys("late", 40), bytes(32), 0, pe.region, range(40, 80)
        )
        began_s = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(pair.pe.terminate))
        ends = await outcomes(running.stream, running.push, ring, alone)
        assert set(ends) <= {"SHUTTING_DOWN", "DaemonGone", "Draining"}, ends  # refused, if it came after the signal
        assert await outcome(late) in {"OK", "SHUTTING_DOWN", "DaemonGone"}
        assert await outcome(running.assembly) in LOST | {"SHUTTING_DOWN"}
        assert await stopping == 0, pair.pe.log_text()
        assert time.monotonic() - began_s < 6.0, "a drain of 3 s took longer than 6 s"
        await pair.de.slots_home()
        pair.pe.start()
        await pe.reconnect()
        assert (await pe.client.lookup(pe.model, stored)).prefix_blocks == HITS
        assert await pe.fetch_wrong("again", stored) == []
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, attempt=2)) == []
    await pair.pe.slots_home()


@WAYS
async def test_death_of_the_prefill_daemon_ends_the_assembly_and_frees_its_buffer(pair: Cluster, path: Path) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        running = await Running().begin(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, ring_sets=2))
        pair.pe.kill()
        assert await outcomes(running.stream, running.push) == ["DaemonGone", "DaemonGone"]
        assert await outcome(running.assembly) == "PEER_LOST"
        await pair.de.slots_home()
        pair.pe.start()
        await pe.reconnect()
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, attempt=2)) == []


async def test_death_of_the_prefill_daemon_before_the_first_byte_is_noticed_by_the_deadline_at_the_latest(
    pair: Cluster,
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("new", BLOCKS)
        assembly = await de.client.assemble_blocks("r", 1, de.model, 3.0)
        await pe.client.push_layers(pe.plan("r", keys, hit_blocks=0, timeout_s=3.0))
        await assembly.attached(END_S)
        pair.pe.kill()
        assert await outcome(assembly, 6.0) in {"PEER_LOST", "DEADLINE"}
        await pair.de.slots_home()


@WAYS
async def test_death_of_the_decode_daemon_ends_stream_and_push_and_the_next_attempt_works_after_its_restart(
    pair: Cluster, path: Path
) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        running = await Running().begin(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, ring_sets=2))
        pair.de.kill()
        assert await outcome(running.assembly) == "DaemonGone"
        assert set(await outcomes(running.stream, running.push, timeout_s=3.0)) <= LOST, (
            "nobody computes: no send tells"
        )
        await running.stream.quiet(END_S)
        await running.push.quiet(END_S)
        await pair.pe.slots_home()
        pair.de.start()
        await de.reconnect()
        await asyncio.sleep(1.1)  # a node that did not answer is left alone for a second
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, attempt=2)) == []


@PATHS
async def test_a_decode_daemon_that_stands_still_costs_one_attempt_in_bounded_time(
    impatient: Cluster, path: Path
) -> None:
    """The I/O timeout is 1 s here, and 2 s of silence are a death; the request's own deadline is far."""
    pair = impatient
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        stored = pe.keys("stored", HITS)
        await pe.store("store", stored)
        keys = stored + pe.keys("new", BLOCKS - HITS)
        plan = pe.plan("r", keys, hit_blocks=HITS, path=path, timeout_s=30.0, ring_sets=2)
        running = await Running().begin(pe, de, plan)
        pair.de.pause()
        try:
            await running.push.computed(3)
            assert await outcome(running.push, 8.0) in LOST
            assert await outcome(running.stream, 8.0) in LOST
            await running.stream.quiet(END_S)
        finally:
            pair.de.resume()
        assert await outcome(running.assembly) in LOST
        await asyncio.sleep(1.1)  # as above
        assert await whole_request(pe, de, pe.plan("r", keys, hit_blocks=HITS, path=path, attempt=2)) == []


async def test_a_decode_daemon_that_stands_still_is_not_waited_for_beyond_the_deadline(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe:
        pair.de.pause()
        try:
            began_s = time.monotonic()
            push = await pe.client.push_layers(pe.plan("r", pe.keys("new", 4), hit_blocks=0, timeout_s=2.0))
            assert await outcome(push) in LOST | {"DEADLINE"}
            assert time.monotonic() - began_s < 4.0
        finally:
            pair.de.resume()
        await pair.pe.slots_home()
    await pair.de.slots_home()


def has_stored(blocks: int, status: dict[str, Any]) -> bool:
    return sum(int(root["written_blocks"]) for root in status["storage"]) >= blocks


async def test_blocks_that_are_found_after_a_kill_in_mid_store_are_whole(single: Cluster) -> None:
    found_blocks = 0
    async with engine(single.pe.endpoint) as pe:
        for number in range(3):
            names = [f"round {number} chain {chain}" for chain in range(3)]
            for chain, name in enumerate(names):
                pe.fill(pe.keys(name, 30), 30 * chain)
                await pe.client.store_blocks(
                    name, 1, pe.model, pe.keys(name, 30), bytes(32), 0, pe.region, range(30 * chain, 30 * chain + 30)
                )
            await single.pe.settled(partial(has_stored, 15 * number), "in mid-store")
            single.pe.kill()
            single.pe.start()
            await pe.reconnect()
            for name in names:
                prefix = (await pe.client.lookup(pe.model, pe.keys(name, 30))).prefix_blocks
                found_blocks += prefix
                assert await pe.fetch_wrong(f"fetch {name}", pe.keys(name, prefix)) == []
        status = await single.pe.slots_home()
        assert sum(int(root["corrupt_blocks"]) for root in status["storage"]) == 0
    assert found_blocks, "no round was slow enough to store anything"
