"""Daemons whose network is cut in mid-request: everyone is told in bounded time, and afterwards all goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fault_cells import HELPER, Cell, Incident, Process
from fault_control import until
from fault_incidents import carry_on
from fault_recipes import bring_about
from fault_scene import CALL_S, NotReached, Scene, Stage, stage_home
from netns_town import NetCluster, NoNamespaces, Town, town_of_three

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOLD_S = 6.0
"""After a cut everyone concerned is told within this time: a silence of 2.5 s, and what follows from it."""
SETTLE_S = 12.0
TRIES = 4


@asynccontextmanager
async def staged() -> AsyncIterator[tuple[Town, Stage]]:
    """A stage of three nodes in namespaces."""
    try:
        with town_of_three() as town, stage_home() as home:
            stage = Stage(await asyncio.to_thread(NetCluster, home, nodes=3, transport="tcp"))
            try:
                await stage.begin()
                yield town, stage
            except BaseException:
                await stage.end(is_sound=False)
                raise
            assert await stage.end(is_sound=True) == []
    except NoNamespaces as refused:
        pytest.skip(f"no network namespaces: {refused}")


async def held_in(stage: Stage, machine: str, state: str, path: str) -> Scene:
    """A request in that state. A node that was away is left alone for a moment: then it is tried again."""
    cell = Cell(Process.PE_DAEMON, Incident.CUT, machine, state, path)
    for _ in range(TRIES):
        scene = Scene(stage, cell, f"cut {next(stage.numbers)}")
        try:
            await bring_about(scene)
        except NotReached:
            for node in stage.nodes:
                await node.ask("open")
            await carry_on(scene)
            await scene.ends(CALL_S)
            for one in stage.engines.values():
                assert await one.ask("over") == [], "what a try before had as its calls is not the next one's"
        else:
            return scene
    raise NotReached(f"{machine} is never {state} on the path {path}")


async def cut_in_mid_request(
    town: Town, stage: Stage, way: tuple[str, str], machine: str, state: str, path: str
) -> dict[str, str]:
    """How the calls of a request in that state end when the way is cut; all else is checked here."""
    scene = await held_in(stage, machine, state, path)
    town.cut(*way)
    cut_s = time.monotonic()
    for node in stage.nodes:
        await node.ask("open")
    await carry_on(scene)
    ends = await scene.ends(TOLD_S)
    late = [call for call, told in ends.items() if not told["end"]]
    where = f"{way} cut while {machine} was {state}, {path}"
    assert not late, f"{where}: {late} not told within {TOLD_S:g} s: {ends}"
    assert time.monotonic() - cut_s < CALL_S, "only the deadline ended it"
    wrong = [text for engine in stage.engines.values() for text in await engine.ask("over")]
    town.heal(*way)
    for node in stage.nodes:

        async def is_home(node=node) -> bool:  # type: ignore[no-untyped-def]
            return not await node.owed()

        assert await until(is_home, SETTLE_S), f"{node.name}: {await node.owed()}"
    wrong += [text for engine in stage.engines.values() for text in await engine.ask("over")]
    assert not wrong, wrong
    assert await stage.whole_request(path) == [], "the next request"
    return {call: f"{told['end']} {told['message']}".strip() for call, told in ends.items()}


def reasons(ends: dict[str, str]) -> set[str]:
    return {end.partition(" ")[0] for end in ends.values()}


@pytest.mark.timeout(240)
async def test_a_cut_way_ends_requests_or_is_gone_round_and_heals() -> None:
    """What is cut off last needs its other ways for long: channels that were cut before break meanwhile, and disturb nobody."""
    async with staged() as (town, stage):
        for machine, state, path in (
            ("part", "SENDING", "PE"),
            ("part", "READING", "DE"),
            ("stream", "STREAMING", "split"),
            ("push", "PUSHING", "helped"),
            ("assemble", "FILLING", "DE"),
        ):
            ends = await cut_in_mid_request(town, stage, ("pe", "de"), machine, state, path)
            assert reasons(ends) <= {"PEER_LOST", "PREFIX_CUT", "NotMade", "OK"}, (machine, state, path, ends)
            assert "OK" not in (ends["push 1"], ends["assembly 1"]), (machine, state, path, ends)
        for way in (("pe", HELPER), ("de", HELPER)):
            for machine, state in (("part", "READING"), ("part", "SENDING"), ("stream", "STREAMING")):
                ends = await cut_in_mid_request(town, stage, way, machine, state, "helped")
                assert reasons(ends) == {"OK"}, (way, machine, state, ends)


@pytest.mark.timeout(240)
async def test_a_cut_way_in_the_middle_of_a_move_of_later_layers_is_told_or_gone_round() -> None:
    """A third node that reads a rest, and has sent nothing of it, is replaced; what is cut between the two that own it ends."""
    async with staged() as (town, stage):
        for path in ("DE", "split", "PE"):
            for state in ("GIVING_REST", "RESTING")[path == "PE" :]:
                ends = await cut_in_mid_request(town, stage, ("pe", "de"), "move", state, path)
                assert reasons(ends) <= {"PEER_LOST", "PREFIX_CUT", "NotMade", "OK"}, (state, path, ends)
                assert "OK" not in (ends["push 1"], ends["assembly 1"]), (state, path, ends)
        for way in (("pe", HELPER), ("de", HELPER)):
            for state in ("GIVING_REST", "RESTING"):
                ends = await cut_in_mid_request(town, stage, way, "move", state, "helped")
                assert reasons(ends) == {"OK"}, (way, state, ends)
