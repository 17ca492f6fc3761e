"""Routers submit, leaders pull, engines run: with real daemons and a real scheduler, through the client library alone.

Every request is done once and its bytes are right, whoever is killed and started again meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from cluster import Cluster, Node, environment, running
from engine import Engine, engine, whole_request
from scheduler_process_kit import SchedulerProcess, scheduler

from kvmover_client import (
    Assignment,
    AsyncClient,
    Client,
    DaemonGone,
    EngineLoad,
    KvmoverError,
    Leader,
    NoScheduler,
    Role,
    SchedulerUnreachable,
    Submitted,
    Ticket,
    TicketState,
    TimedOut,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODEL = "m"
BLOCKS, HIT = 6, 4
TOKENS = 64
DONE_S = 60.0
SEEN_S = 20.0
RUN_S = 40.0
DOCS = Path(__file__).resolve().parents[2] / "docs"
LIMITS = 'group_silent = "20s"\nsettle = "2s"'

Both = tuple[SchedulerProcess, Cluster]


class ScheduledNode(Node):
    """A daemon that belongs to the scheduler of the test."""

    scheduler_address = ""

    def write_config(self) -> None:
        super().write_config()
        with self.config.open("a") as config:
            config.write(f'\n[scheduler]\naddresses = ["{self.scheduler_address}"]\ntimeout = "500ms"\n')


class ScheduledCluster(Cluster):
    """A prefill node, a decode node, and the router's, "h0"."""

    node_class = ScheduledNode


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """For all tests: what one of them has killed it has started again."""
    home = tmp_path_factory.mktemp("scheduler")
    with scheduler(home, policy="joint", limits=LIMITS) as process, pytest.MonkeyPatch.context() as patch:
        process.port = int(process.address.rpartition(":")[2])
        patch.setattr(ScheduledNode, "scheduler_address", process.address)
        with running(nodes=3, cluster_class=ScheduledCluster) as cluster:
            yield process, cluster


class Side:
    """A group of one engine, and the task that pulls for it until it is closed."""

    def __init__(self, member: Engine, group: str, role: Role) -> None:
        self.member = member
        self.leader = Leader(member.client, group, MODEL, role)
        self.begun: Counter[tuple[str, int]] = Counter()
        self.reconnects = 0
        self._pulling = asyncio.create_task(self._pull_on())

    def load(self) -> EngineLoad:
        held = [held.assignment for held in self.leader.held]
        tokens = sum(assignment.prompt_tokens for assignment in held)
        return EngineLoad(f"{self.leader.group}.0", len(held), tokens, (1 << 30) - tokens)

    async def _pull_on(self) -> None:
        while True:
            try:
                for news in await self.leader.pull([self.load()]):
                    if isinstance(news, Assignment):
                        self.begun[news.request_id, news.attempt] += 1
            except DaemonGone:
                # Just after its death its sockets may still take a connection.
                with suppress(DaemonGone):
                    await self.member.reconnect()
                    self.reconnects += 1
            except (SchedulerUnreachable, TimedOut):
                pass
            await asyncio.sleep(self.leader.pull_again_s)

    def holds(self) -> dict[tuple[str, int], Assignment]:
        held = [held.assignment for held in self.leader.held]
        return {(assignment.request_id, assignment.attempt): assignment for assignment in held}

    async def close(self) -> None:
        self._pulling.cancel()
        await asyncio.wait((self._pulling,))
        if not self._pulling.cancelled():
            self._pulling.result()


class Engines:
    """A prefill and a decode engine that run what both have been given, one request after the other."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill = prefill
        self.decode = decode
        self.wrong: dict[str, list[tuple[int, int]]] = {}
        self._running = asyncio.create_task(self._run_on())

    async def _run_on(self) -> None:
        while True:
            decodes = self.decode.holds()
            ready = [assignment for name, assignment in self.prefill.holds().items() if name in decodes]
            if ready:
                await self._run(ready[0])
            await asyncio.sleep(0.005)

    async def _run(self, given: Assignment) -> None:
        pe, de = self.prefill.member, self.decode.member
        keys = pe.keys("prompt", HIT) + pe.keys(given.request_id, BLOCKS)[HIT:]
        hit_blocks = given.hit_tokens // TOKENS
        shares = given.read.shares(0, hit_blocks)
        plan = pe.plan(
            given.request_id,
            keys,
            hit_blocks=hit_blocks,
            path=shares.path,
            parts=shares.parts,
            attempt=given.attempt,
            decode_node=given.decode_node,
        )
        self.wrong[given.request_id] = await whole_request(pe, de, plan)
        self.prefill.leader.prefilled(given.request_id, given.attempt)
        self.decode.leader.whole(given.request_id, given.attempt)
        self.decode.leader.finished(given.request_id, given.attempt)

    def check(self) -> None:
        assert not any(self.wrong.values()), self.wrong
        for side in (self.prefill, self.decode):
            assert set(side.begun.values()) <= {1}, side.begun

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))
        await self.prefill.close()
        await self.decode.close()
        if not self._running.cancelled():
            self._running.result()


@asynccontextmanager
async def engines(cluster: Cluster) -> AsyncIterator[Engines]:
    async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
        await pe.store(uuid.uuid4().hex, pe.keys("prompt", HIT))
        pair = Engines(Side(pe, "prefills", Role.PREFILL), Side(de, "decodes", Role.DECODE))
        try:
            yield pair
        finally:
            await pair.close()


async def until(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + SEEN_S
    while not is_so():
        assert time.monotonic() < until_s, f"not {what} after {SEEN_S} s"
        await asyncio.sleep(0.01)


async def submit(client: AsyncClient, request_id: str) -> Submitted:
    return await client.submit(
        request_id, MODEL, BLOCKS * TOKENS, hit_tokens=HIT * TOKENS, session=request_id, timeout_s=DONE_S
    )


async def finished(made: list[Submitted]) -> list[Ticket]:
    return list(await asyncio.gather(*(submitted.done() for submitted in made)))


async def test_what_a_router_submits_is_done_by_engines_of_other_nodes(both: Both) -> None:
    _, cluster = both
    async with engines(cluster) as pair, await AsyncClient.connect(cluster.helpers[0].endpoint) as router:
        made = await asyncio.gather(*(submit(router, f"many/{number}") for number in range(20)))
        tickets = await finished(made)
        assert {(ticket.state, ticket.attempt) for ticket in tickets} == {(TicketState.DONE, 1)}
        assert len(pair.wrong) == 20
        pair.check()
        explained = await made[0].explain()
        assert "prefills.0" in explained.text and explained.json.startswith("{")
        choice = await router.choose_path(MODEL, "pe", "de", HIT * TOKENS)
        assert choice.shares(0, HIT).path is not None


async def test_a_scheduler_and_a_routers_daemon_that_are_killed_cost_no_request_and_run_none_twice(both: Both) -> None:
    process, cluster = both
    async with engines(cluster) as pair, await AsyncClient.connect(cluster.helpers[0].endpoint) as router:
        made = [await submit(router, f"killed/{number}") for number in range(40)]
        waiting = asyncio.create_task(finished(made))
        await until(lambda: len(pair.wrong) >= 5, "five done")
        await asyncio.to_thread(process.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(process.start)
        seen = len(pair.wrong)
        await until(lambda: len(pair.wrong) >= min(40, seen + 5), "five more done")
        await asyncio.to_thread(cluster.helpers[0].kill)
        await asyncio.to_thread(cluster.helpers[0].start)
        tickets = await waiting
        assert {ticket.state for ticket in tickets} == {TicketState.DONE}
        assert len(pair.wrong) == 40
        pair.check()


async def test_a_leader_whose_daemon_is_killed_goes_on_over_its_next_start(both: Both) -> None:
    _, cluster = both
    async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
        await pe.store(uuid.uuid4().hex, pe.keys("prompt", HIT))
        sides = Side(pe, "prefills", Role.PREFILL), Side(de, "decodes", Role.DECODE)
        async with await AsyncClient.connect(cluster.helpers[0].endpoint) as router:
            submitted = await submit(router, "held")
            await until(lambda: all(side.holds() for side in sides), "given")
            await asyncio.to_thread(cluster.pe.kill)
            await asyncio.to_thread(cluster.pe.start)
            await until(lambda: sides[0].reconnects == 1, "in touch again")
            pair = Engines(*sides)
            assert (await submitted.done()).state is TicketState.DONE
            pair.check()
            await pair.close()


async def test_a_request_that_is_withdrawn_ends_in_its_engines(both: Both) -> None:
    _, cluster = both
    async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
        sides = [Side(pe, "prefills", Role.PREFILL), Side(de, "decodes", Role.DECODE)]
        async with await AsyncClient.connect(cluster.helpers[0].endpoint) as router:
            submitted = await submit(router, "left")
            await submitted.assigned()
            await until(lambda: all(side.holds() for side in sides), "given")
            assert (await submitted.withdraw()).state is TicketState.WITHDRAWN
            await until(lambda: not any(side.holds() for side in sides), "revoked")
        with pytest.raises(KvmoverError, match="attempt"):
            await (await pe.client.push_layers(pe.plan("left", pe.keys("left", BLOCKS), hit_blocks=0, path=None))).end(
                5.0
            )
        for side in sides:
            await side.close()


def test_the_program_in_the_docs_runs_as_it_stands(both: Both) -> None:
    _, cluster = both
    sockets = [str(node.socket) for node in (cluster.helpers[0], cluster.pe, cluster.de)]
    said = subprocess.run(
        [sys.executable, str(DOCS / "scheduled.py"), *sockets, MODEL],
        check=True,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=environment(),
    ).stdout
    assert re.search(r"/1: attempt 1, because \S+/\S+/\S+\n", said), said
    assert re.search(r"/1: prefilled by p-\w+\.0, path \w+\n", said) and re.search(r"/1: decoded by d-\w+\.0\n", said)
    assert said.endswith("/1: DONE\n")


def test_a_node_without_a_scheduler_says_so_to_both_clients() -> None:
    with running(nodes=1) as cluster, Client.connect(cluster.pe.endpoint) as client:
        with pytest.raises(NoScheduler, match="belongs to no scheduler") as caught:
            client.submit("r", MODEL, 100)
        assert "scheduler.addresses" in caught.value.remedy
