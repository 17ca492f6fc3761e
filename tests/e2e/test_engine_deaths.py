"""Engines that die, cancel or are late: the daemon takes everything back, and leaves their pages alone."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster, environment
from engine import END_S, LAYERS, SCRUB, engine, outcome

from kvmover_client import Path as ReadPath
from kvmover_client import Reason

pytestmark = pytest.mark.e2e
CHILD = Path(__file__).with_name("engine_child.py")
WATCH_S = 0.2


async def test_an_engine_that_is_killed_leaves_nothing_behind_in_either_daemon(pair: Cluster) -> None:
    async with engine(pair.de.endpoint) as de:
        assembly = await de.client.assemble_blocks("push", 1, de.model)
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), pair.pe.endpoint, stdout=asyncio.subprocess.PIPE, env=environment()
        )
        try:
            assert child.stdout is not None
            assert await asyncio.wait_for(child.stdout.readline(), END_S) == b"busy\n"
            before = await pair.pe.status()
            assert (before["sessions"], before["regions"], before["leases"]) == (1, 2, 1)
            assert (before["requests"]["prefill"], before["requests"]["push"]) == (1, 1)
        finally:
            child.kill()
            await child.communicate()
        began_s = time.monotonic()
        await pair.pe.settled(lambda status: not status["sessions"] and not status["regions"], "without sessions")
        await pair.pe.slots_home()
        assert await outcome(assembly) in {"PEER_LOST", "ENGINE_GONE", "CANCELLED"}
        await pair.de.slots_home()
        assert time.monotonic() - began_s < 5.0


async def test_pages_never_change_after_a_cancelled_stream_said_that_they_are_quiet(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        keys = pe.keys("stored", 8)
        await pe.store("store", keys)
        for number in range(12):
            path = (ReadPath.PE, ReadPath.DE)[number % 2]
            plan = pe.plan(f"cancelled {number}", keys, hit_blocks=8, path=path, first_page=8 * number)
            await de.client.assemble_blocks(plan.request_id, 1, de.model)
            stream = await pe.client.stream_layers(plan)
            await asyncio.sleep(0.001 * number)
            stream.cancel()
            end = await stream.end(END_S)
            await stream.quiet(END_S)
            assert end.reason in (Reason.CANCELLED, Reason.OK), end
            pe.scrub()
            await asyncio.sleep(WATCH_S)
            assert (pe.region.memory.array() == SCRUB).all(), f"{plan.request_id}: written after {end}"
    await pair.pe.slots_home()
    await pair.de.slots_home()


async def test_a_stream_that_is_cancelled_between_two_layers_ends_as_cancelled(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as pe:
        keys = pe.keys("stored", 8)
        await pe.store("store", keys)
        stream = await pe.client.stream_layers(pe.plan("r", keys, hit_blocks=8, decode_node="", ring_sets=2))
        await stream.wait_layer(1, END_S)
        stream.cancel()
        end = await stream.end(END_S)
        assert (end.reason, end.pages_quiet) == (Reason.CANCELLED, True)
        assert stream.ready_layers < LAYERS
        await single.pe.slots_home()


async def test_a_request_ends_with_its_deadline(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as pe:
        keys = pe.keys("stored", 8)
        await pe.store("store", keys)
        began_s = time.monotonic()
        plan = pe.plan("r", keys, hit_blocks=8, decode_node="", ring_sets=2, timeout_s=0.3)
        stream = await pe.client.stream_layers(plan)
        assembly = await pe.client.assemble_blocks("nobody-comes", 1, pe.model, 0.4)
        end = await stream.end(END_S)
        assert (end.reason, end.pages_quiet) == (Reason.DEADLINE, True)
        assert await outcome(assembly) == "DEADLINE"
        assert 0.3 <= time.monotonic() - began_s < 2.0
        await single.pe.slots_home()


async def test_a_lease_that_nobody_renews_runs_out_and_a_renewed_one_stays(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as pe:
        keys = pe.keys("stored", 8)
        await pe.store("store", keys)
        calls = [await pe.client.fetch_blocks(f"lease {number}", 1, pe.model, keys, lease_s=0.3) for number in range(2)]
        leases = [(await call.result()).lease for call in calls]
        assert leases[0] is not None and leases[1] is not None
        assert await pe.client.renew([leases[0]], lease_s=30.0) == [True]
        await single.pe.settled(lambda status: status["leases"] == 1, "one lease left")
        assert await pe.client.renew([leases[0], leases[1]]) == [True, False]
        assert await pe.client.release([leases[0]]) == 1
        await single.pe.slots_home()


async def test_a_request_beyond_the_pool_is_refused_and_takes_nothing(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as pe:
        keys = pe.keys("never stored", 80)
        call = await pe.client.fetch_blocks("big", 1, pe.model, keys, lease_s=1.0)
        assert await outcome(call) == "TOO_BIG"
        await single.pe.slots_home()


async def test_descriptors_and_threads_of_a_daemon_do_not_grow_with_the_sessions_it_has_seen(single: Cluster) -> None:
    async def session(number: int) -> None:
        async with engine(single.pe.endpoint) as pe:
            keys = pe.keys("shared", 4)
            await pe.store(f"store {number}", keys)
            assert await pe.fetch_wrong(f"fetch {number}", keys) == []

    async def counted() -> tuple[int, int]:
        await single.pe.settled(lambda status: not status["sessions"] and not status["regions"], "without sessions")
        gc.collect()  # a channel of this process that is still referred to somewhere keeps its connection
        await asyncio.sleep(0.3)
        return single.pe.open_files(), single.pe.threads()

    await session(0)
    before = await counted()
    for number in range(1, 21):
        await session(number)
    after = await counted()
    assert after[0] <= before[0] + 1 and after[1] <= before[1], f"{before} descriptors and threads became {after}"
