"""Two real schedulers over a real etcd, real daemons, engines and a client: whoever dies or stands still, requests go on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cluster import Cluster, Node, running

from kvmover_client import Assignment, AsyncClient, EngineLoad, KvmoverError, Leader, Role
from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.rpc.errors import error_info
from tests.contract.etcd_kit import Etcd, needs_etcd
from tests.scheduler_process_kit import SchedulerProcess

pytestmark = [pytest.mark.e2e, needs_etcd, pytest.mark.timeout(150)]

TTL_S = 2.0
TAKES_OVER_S = TTL_S + 2.0
SEEN_S = 10.0
DONE_S = 40.0
SUBMIT_S = 0.05
WORKS_S = 0.05
POLL_S = 0.02
LIMITS = 'group_silent = "20s"\nsettle = "500ms"'


def membership(endpoint: str, ttl_s: float) -> str:
    return f'[membership]\nkind = "etcd"\n[membership.etcd]\nendpoints = ["{endpoint}"]\nttl = "{ttl_s:.0f}s"\n'


class MemberNode(Node):
    """A daemon that finds the others, and the scheduler that leads, in etcd alone."""

    section = ""

    def write_config(self) -> None:
        self.peers = []
        super().write_config()
        with self.config.open("a") as config:
            config.write(f'\n{self.section}\n[scheduler]\ntimeout = "500ms"\n')


class MemberCluster(Cluster):
    node_class = MemberNode


@dataclass
class Town:
    etcd: Etcd
    schedulers: Sequence[SchedulerProcess]
    nodes: Cluster

    async def leading(self, *, but_not: SchedulerProcess | None = None, within_s: float = SEEN_S) -> SchedulerProcess:
        """The one scheduler that leads; `but_not` is not asked."""
        until_s = time.monotonic() + within_s
        while True:
            for process in self.schedulers:
                if process is but_not or process.process is None:
                    continue
                if (await asyncio.to_thread(process.status))["leads"]:
                    return process
            assert time.monotonic() < until_s, (
                f"nobody leads after {within_s} s: {[s.log_text() for s in self.schedulers]}"
            )
            await asyncio.sleep(POLL_S)

    def other(self, than: SchedulerProcess) -> SchedulerProcess:
        return next(process for process in self.schedulers if process is not than)


@contextlib.contextmanager
def town(home: Path, monkeypatch: pytest.MonkeyPatch, *, ttl_s: float = TTL_S, nodes: int = 2) -> Iterator[Town]:
    etcd = Etcd(home)
    schedulers: list[SchedulerProcess] = []
    try:
        section = membership(etcd.start().endpoint, ttl_s)
        for name in ("one", "two"):
            (home / name).mkdir()
            schedulers.append(SchedulerProcess(home / name, limits=LIMITS, more=section))
            schedulers[-1].start()
        monkeypatch.setattr(MemberNode, "section", section)
        with running(nodes=nodes, cluster_class=MemberCluster) as cluster:
            yield Town(etcd, schedulers, cluster)
    finally:
        for process in schedulers:
            if process.process is not None:
                process.kill()
        etcd.kill()


@dataclass
class Work:
    """Requests that are submitted one after another while schedulers come and go, and who was given which attempt."""

    given: dict[tuple[str, int, Role], str] = field(default_factory=dict)
    prefilled: set[tuple[str, int]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    requests: list[asyncio.Task[float]] = field(default_factory=list)

    async def lead(self, leader: Leader, works_s: float = WORKS_S) -> None:
        """Of one engine. A decode group finishes what has been prefilled."""
        engine = f"{leader.group}.0"
        under_way: dict[tuple[str, int], float] = {}
        while True:
            loads = [EngineLoad(engine, len(under_way), 1_000 * len(under_way), 1 << 30)]
            with contextlib.suppress(KvmoverError):
                for news in await leader.pull(loads):
                    name = news.request_id, news.attempt
                    if isinstance(news, Assignment):
                        self._was_given(news, leader.role, engine)
                        under_way[name] = time.monotonic() + works_s
                    else:
                        under_way.pop(name, None)
            for name, due_s in list(under_way.items()):
                if leader.role is Role.PREFILL and due_s < time.monotonic():
                    self.prefilled.add(name)
                    leader.prefilled(*name)
                elif leader.role is Role.DECODE and name in self.prefilled:
                    leader.finished(*name)
                else:
                    continue
                del under_way[name]
            await asyncio.sleep(max(POLL_S, min(leader.pull_again_s, 0.2)))

    def _was_given(self, assignment: Assignment, role: Role, engine: str) -> None:
        name = assignment.request_id, assignment.attempt, role
        if name in self.given:
            self.wrong.append(f"{name} was given to {self.given[name]}, and to {engine}")
        self.given[name] = engine

    async def submit_on(self, client: AsyncClient) -> None:
        for number in itertools.count():
            self.requests.append(asyncio.ensure_future(self._one(client, f"r{number}")))
            await asyncio.sleep(SUBMIT_S)

    async def _one(self, client: AsyncClient, request_id: str) -> float:
        submitted = await client.submit(request_id, "m", 1_000, hit_tokens=900, wait=True, timeout_s=DONE_S)
        await submitted.done()
        return time.monotonic()

    async def all_done(self) -> list[float]:
        """When each was done. Nothing more is submitted by then."""
        return list(await asyncio.gather(*self.requests))


@contextlib.asynccontextmanager
async def working(nodes: Cluster) -> AsyncIterator[tuple[Work, asyncio.Task[None]]]:
    """A prefill and a decode group, each over its own daemon, and a client that submits until its task is cancelled."""
    work = Work()
    async with contextlib.AsyncExitStack() as built:
        clients = []
        for node in nodes.nodes:
            clients.append(await AsyncClient.connect(node.endpoint, name="standby", timeout_s=10.0))
            built.push_async_callback(clients[-1].close)
        leaders = [Leader(clients[0], "p", "m", Role.PREFILL), Leader(clients[1], "d", "m", Role.DECODE)]
        tasks = [asyncio.ensure_future(work.lead(leader)) for leader in leaders]
        submitting = asyncio.ensure_future(work.submit_on(clients[0]))
        try:
            yield work, submitting
        finally:
            ending = [*tasks, submitting, *work.requests]
            for task in ending:
                task.cancel()
            ended = await asyncio.gather(*ending, return_exceptions=True)
        for found in ended:
            if isinstance(found, Exception):
                raise found


async def some_done(work: Work, count: int) -> None:
    """Until so many more are done than now."""
    until_s, wanted = time.monotonic() + SEEN_S, count + sum(task.done() for task in work.requests)
    while sum(task.done() for task in work.requests) < wanted:
        assert time.monotonic() < until_s, f"{sum(task.done() for task in work.requests)} of {wanted} are done"
        await asyncio.sleep(POLL_S)


async def stopped_and_done(work: Work, submitting: asyncio.Task[None]) -> None:
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await work.all_done()
    assert work.wrong == []


async def asked(address: str, request_id: str, timeout_s: float = SEEN_S) -> str:
    """What a scheduler itself says to a new request: the state, or the reason why not."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        request = scheduler_pb2.SubmitRequest(request_id=request_id, model="m", prompt_tokens=1000, hit_tokens=900)
        try:
            return scheduler_pb2.TicketState.Name((await stub.Submit(request, timeout=timeout_s)).state)
        except grpc.aio.AioRpcError as error:
            info = error_info(error)
            return error.code().name if info is None else info.reason


async def test_a_standby_goes_on_when_the_leader_is_killed_and_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town(tmp_path, monkeypatch) as here:
        async with working(here.nodes) as (work, submitting):
            epochs, boots, gaps_s = [], [], []
            for _ in range(3):
                leads = await here.leading()
                status = await asyncio.to_thread(leads.status)
                epochs.append(status["epoch"])
                boots.append(status["boot_id"])
                await some_done(work, 5)
                leads.kill()
                began_s = time.monotonic()
                assert await here.leading(within_s=TAKES_OVER_S) is here.other(leads)
                gaps_s.append(time.monotonic() - began_s)
                await asyncio.to_thread(leads.start)
                await some_done(work, 5)
            epochs.append((await asyncio.to_thread((await here.leading()).status))["epoch"])
            await stopped_and_done(work, submitting)
        assert epochs == sorted(set(epochs)), epochs
        assert len(set(boots)) == 3
        print("taken over after", [f"{gap_s:.2f} s" for gap_s in gaps_s], "requests", len(work.requests))


async def test_one_that_stood_still_says_nothing_as_a_leader_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town(tmp_path, monkeypatch) as here:
        async with working(here.nodes) as (work, submitting):
            old = await here.leading()
            await some_done(work, 5)
            os.kill(old.pid, signal.SIGSTOP)
            try:
                new = await here.leading(but_not=old, within_s=TAKES_OVER_S)
                # They lie before it when it goes on: it hears of them before it can hear from etcd.
                early = [asyncio.ensure_future(asked(old.address, f"early {number}")) for number in range(8)]
                await some_done(work, 5)
            finally:
                os.kill(old.pid, signal.SIGCONT)
            assert set(await asyncio.gather(*early)) == {"NOT_LEADING"}
            for number in range(20):
                assert await asked(old.address, f"late {number}") == "NOT_LEADING"
                await asyncio.sleep(POLL_S)
            status = await asyncio.to_thread(old.status)
            assert (status["leads"], status["leader"]) == (False, new.address)
            await some_done(work, 5)
            await stopped_and_done(work, submitting)
        assert (await asyncio.to_thread(new.status))["leads"]


async def test_one_that_is_told_to_stop_hands_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with town(tmp_path, monkeypatch, ttl_s=30.0) as here:
        async with working(here.nodes) as (work, submitting):
            leads = await here.leading()
            await some_done(work, 5)
            process, leads.process = leads.process, None
            assert process is not None
            process.terminate()
            began_s = time.monotonic()
            await here.leading(but_not=leads, within_s=5.0)
            gap_s = time.monotonic() - began_s
            assert await asyncio.to_thread(process.wait, SEEN_S) == 0
            await some_done(work, 5)
            await stopped_and_done(work, submitting)
        print(f"handed over after {gap_s:.2f} s")


async def test_without_etcd_nobody_leads_and_with_it_again_no_request_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town(tmp_path, monkeypatch) as here:
        async with working(here.nodes) as (work, submitting):
            before = (await asyncio.to_thread((await here.leading()).status))["epoch"]
            await some_done(work, 5)
            here.etcd.kill()
            until_s = time.monotonic() + TTL_S
            while any([(await asyncio.to_thread(process.status))["leads"] for process in here.schedulers]):
                assert time.monotonic() < until_s, "it leads longer than its lease can live"
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(here.etcd.start)
            leads = await here.leading()
            assert (await asyncio.to_thread(leads.status))["epoch"] > before
            await some_done(work, 5)
            await stopped_and_done(work, submitting)


async def test_what_a_dead_node_had_goes_to_others_as_soon_as_etcd_says_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with town(tmp_path, monkeypatch, nodes=3) as here:
        async with contextlib.AsyncExitStack() as built:
            clients = {}
            for node in here.nodes.nodes:
                clients[node.name] = await AsyncClient.connect(node.endpoint, name="standby", timeout_s=10.0)
                built.push_async_callback(clients[node.name].close)
            await here.leading()
            work = Work()
            busy = work.lead(Leader(clients["pe"], "busy", "m", Role.PREFILL), works_s=DONE_S)
            decode = work.lead(Leader(clients["de"], "d", "m", Role.DECODE))
            leading = [asyncio.ensure_future(each) for each in (busy, decode)]
            try:
                work.requests = [asyncio.ensure_future(work._one(clients["de"], f"r{number}")) for number in range(8)]
                until_s = time.monotonic() + SEEN_S
                while sum(engine == "busy.0" for engine in work.given.values()) < len(work.requests):
                    assert time.monotonic() < until_s, work.given
                    await asyncio.sleep(POLL_S)
                here.nodes.pe.kill()
                killed_s = time.monotonic()
                free = work.lead(Leader(clients["h0"], "free", "m", Role.PREFILL))
                leading.append(asyncio.ensure_future(free))
                last_s = max(await work.all_done()) - killed_s
            finally:
                for task in (*leading, *work.requests):
                    task.cancel()
                await asyncio.gather(*leading, *work.requests, return_exceptions=True)
        assert work.wrong == []
        assert {
            engine for (_, attempt, role), engine in work.given.items() if role is Role.PREFILL and attempt > 1
        } == {"free.0"}
        assert TTL_S / 2 < last_s < TAKES_OVER_S + 1.0
