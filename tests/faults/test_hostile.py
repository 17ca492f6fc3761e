"""Engines that mean no good, in processes of their own, beside engines that do: these get all their bytes, in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_control import until
from fault_engines import EngineHandle
from fault_scene import HITS, Stage, begin_stage, stage_home

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
HOSTILE = Path(__file__).with_name("hostile_process.py")
HOARDS = 2
"""Streams that fit into the room for reads together, and leave some to others."""
HOARD_BLOCKS = HITS // 2
LIVE_MAX, STREAMS_MAX = 24, 64
FLOOD_CALLS = 300
HOME_S = 8.0


@asynccontextmanager
async def hostile(settings: Mapping[str, str] | None = None) -> AsyncIterator[tuple[Stage, EngineHandle]]:
    """A stage, and one engine more that is with the prefill node. Whatever it did, all is at rest and sound afterwards."""
    with stage_home() as home:
        made = await begin_stage(home, "tcp", settings)
        bad = await EngineHandle.start(HOSTILE)
        is_sound = False
        try:
            await bad.ask("connect", session="pe", endpoint=made.node("pe").endpoint)
            yield made, bad
            await bad.kill()
            for node in made.nodes:
                assert await until(lambda node=node: _is_home(node), HOME_S), await node.owed()
                assert node.new_tracebacks(made.log_seen_bytes[node.name]) == []
                assert (await node.ask("books"))["loop_errors"] == []
            assert await made.whole_request("PE") == []
            is_sound = True
        finally:
            await bad.kill()
            problems = await made.end(is_sound=is_sound)
        assert problems == []


async def _is_home(node: Any) -> bool:
    return not await node.owed()


async def _serves_others(stage: Stage, rounds: int) -> None:
    """Whole requests of the honest engines go through, each at once."""
    for number in range(rounds):
        wrong = await stage._request_once(f"honest {next(stage.numbers)}", ("PE", "DE")[number % 2])
        assert wrong == [], wrong


async def test_memory_that_could_shrink_is_refused_and_registered_memory_cannot_be_shrunk() -> None:
    async with hostile() as (stage, bad):
        assert await bad.ask("pass_unsealed", session="pe") == "BadRegion"
        assert set(await bad.ask("truncate", session="pe")) == {"EPERM"}
        await _serves_others(stage, 2)


async def test_noise_in_an_engines_pages_while_they_are_moved_spoils_no_other_engines_bytes() -> None:
    async with hostile() as (stage, bad):
        scribbling = asyncio.create_task(bad.ask("scribble", session="pe", seconds=2.0))
        for number in range(6):
            name = f"noise {number}"
            keys = [["hits", 0, HITS], [name, 0, 2]]
            asked = {"request": name, "keys": keys, "hit_blocks": HITS, "path": ("PE", "DE")[number % 2]}
            await bad.ask("store", session="pe", call=f"store {name}", request=f"store {name}", chain=name, blocks=6)
            await bad.ask("stream", session="pe", call=f"stream {name}", timeout_s=4.0, **asked)
            await bad.ask("push", session="pe", call=f"push {name}", timeout_s=4.0, computed=6, **asked)
            await _serves_others(stage, 1)
        assert await scribbling > 10


async def test_a_flood_of_quick_calls_is_bounded_and_others_are_served_meanwhile() -> None:
    async with hostile({"live_max": str(LIVE_MAX), "streams_max": str(STREAMS_MAX)}) as (stage, bad):
        flooding = asyncio.create_task(bad.ask("flood", session="pe", calls=FLOOD_CALLS, timeout_s=4.0, wait_s=30.0))
        served = 0
        began_s = time.monotonic()
        while not flooding.done() or not served:
            assert len(await stage.node("pe").ask("live")) <= LIVE_MAX
            served += not await stage._request_once(f"honest {next(stage.numbers)}", "PE")
            assert time.monotonic() - began_s < 20.0
        ends = await flooding
        assert sum(ends.values()) == FLOOD_CALLS
        assert set(ends) <= {"OK", "QueueFull", "PoolExhausted", "POOL_EXHAUSTED", "Unavailable"}, ends


async def test_calls_that_nothing_ends_fill_the_bound_and_no_more_and_leave_with_their_deadline() -> None:
    async with hostile({"live_max": str(LIVE_MAX), "streams_max": str(STREAMS_MAX)}) as (stage, bad):
        node = stage.node("pe")
        await node.ask("shut", "reads")
        flooding = asyncio.create_task(bad.ask("flood", session="pe", calls=FLOOD_CALLS, timeout_s=2.0, wait_s=30.0))
        most = 0
        while not flooding.done():
            most = max(most, len(await node.ask("live")))
            await asyncio.sleep(0.02)
        ends = await flooding
        await node.ask("open")
        assert 0 < most <= LIVE_MAX
        assert sum(ends.values()) == FLOOD_CALLS
        typed = {"OK", "DEADLINE", "QueueFull", "POOL_EXHAUSTED", "PoolExhausted", "Unavailable"}
        assert set(ends) <= typed, ends
        assert await stage.whole_request("PE") == []


async def test_streams_whose_credits_never_come_back_hold_nobody_up_and_end_with_their_deadline() -> None:
    async with hostile() as (stage, bad):
        for number in range(HOARDS):
            keys = [["hits", 0, HOARD_BLOCKS]]
            asked = {
                "request": f"hoard {number}",
                "keys": keys,
                "hit_blocks": HOARD_BLOCKS,
                "decode_node": "",
                "timeout_s": 2.0,
            }
            first_page = 2 * HITS * number
            await bad.ask("stream", session="pe", call=f"hoard {number}", ring_sets=2, first_page=first_page, **asked)
        await bad.ask("layer", call=f"hoard {HOARDS - 1}", layer=1, timeout_s=2.0)
        await _serves_others(stage, 4)
        for number in range(HOARDS):
            told = await bad.ask("end", call=f"hoard {number}", timeout_s=6.0)
            assert (told["end"], told["ready"], told["wrong"]) == ("DEADLINE", 2, [])
        assert await bad.ask("over") == []


async def test_an_attempt_that_was_overtaken_is_refused_and_disturbs_nothing() -> None:
    async with hostile() as (stage, bad):
        await stage.node("pe").ask("forget")
        await stage.node("pe").ask("shut", "reads")
        asked = {"session": "pe", "request": "again", "chain": "hits", "blocks": HITS, "timeout_s": 8.0}
        await bad.ask("fetch", call="second", attempt=2, first_page=0, **asked)
        for number in range(10):
            await bad.ask("fetch", call=f"first {number}", attempt=1, first_page=8, **asked)
            assert (await bad.ask("end", call=f"first {number}", timeout_s=4.0))["end"] == "StaleAttempt"
        assert await stage.node("pe").states("again", 2) == {"fetch": {"READING"}}
        await stage.node("pe").ask("open")
        told = await bad.ask("end", call="second", timeout_s=4.0)
        assert (told["end"], told["wrong"]) == ("OK", [])


async def test_a_companion_that_closes_in_mid_stream_takes_its_streams_along_and_nothing_else() -> None:
    async with hostile() as (stage, bad):
        for number in range(5):
            keys = [["hits", 0, HITS]]
            asked = {"request": f"cut {number}", "keys": keys, "hit_blocks": HITS, "path": ("PE", "DE")[number % 2]}
            await bad.ask("stream", session="pe", call=f"stream {number}", ring_sets=2, **asked)
            await bad.ask("layer", call=f"stream {number}", layer=1, timeout_s=4.0)
            await bad.ask("cut", session="pe")
            assert (await bad.ask("end", call=f"stream {number}", timeout_s=4.0))["end"] == "DaemonGone"
            await bad.ask("connect", session="pe", endpoint=stage.node("pe").endpoint)
            await _serves_others(stage, 1)
