"""Leaders die and the scheduler is killed, at random moments: every request is done, and no attempt is given out twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from scheduler_process_kit import SchedulerProcess, scheduler

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.rpc.errors import error_info

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CALL_S = 5.0
RUN_S = 90.0
END_S = 20.0
REQUESTS = 150
GROUPS = 3
ENGINES = 2
SUBMIT_S = 0.02
LIMITS = """
attempts_max = 1000
group_silent = "600ms"
settle = "500ms"
"""
Answer = TypeVar("Answer")


@dataclass
class Seen:
    """What was ever given to whom, and what must not be."""

    given: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    deaths: int = 0
    starts: int = 0

    def was_given(self, assignment: scheduler_pb2.Assignment) -> None:
        name = assignment.request_id, assignment.attempt
        engines = assignment.prefill_engine, assignment.decode_engine
        if self.given.setdefault(name, engines) != engines:
            self.wrong.append(f"{name} was given to {self.given[name]}, and to {engines}")


class Scheduler:
    """Calls that go on over deaths of the scheduler."""

    def __init__(self, address: str) -> None:
        options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200))
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(self.channel)

    async def asked(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Again and again while nobody answers."""
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
            await asyncio.sleep(0.05)


class Leader:
    """Finishes what its group holds by chance, and dies by chance: then another boot comes, which holds nothing."""

    def __init__(self, name: str, role: scheduler_pb2.Role.ValueType, chance: random.Random, seen: Seen) -> None:
        self.name, self.role, self.chance, self.seen = name, role, chance, seen
        self.boots = 0
        self.begin()

    def begin(self) -> None:
        self.boots += 1
        self.held: dict[tuple[str, int], scheduler_pb2.HeldAssignment] = {}
        engines = [scheduler_pb2.EngineLoad(engine=f"{self.name}.{rank}") for rank in range(ENGINES)]
        self.report = scheduler_pb2.PullWorkRequest(
            group=self.name,
            model="m",
            role=self.role,
            boot_id=f"{self.name} {self.boots}",
            node=f"{self.name} node",
            engines=engines,
        )

    async def run(self, served: Scheduler) -> None:
        while True:
            if self.chance.random() < 0.01:
                self.seen.deaths += 1
                self.begin()
                await asyncio.sleep(self.chance.choice((0.0, 1.0)))
            self._load()
            self.report.sequence += 1
            reply = await served.asked(lambda: served.stub.PullWork(self.report, timeout=CALL_S))
            self._take(reply)
            await asyncio.sleep(reply.pull_again_ms / 1000)

    def _load(self) -> None:
        for load in self.report.engines:
            mine = [
                held.assignment
                for held in self.held.values()
                if load.engine in (held.assignment.prefill_engine, held.assignment.decode_engine)
            ]
            load.requests, load.prompt_tokens = len(mine), sum(each.prompt_tokens for each in mine)
            load.free_hbm_tokens = max(0, 200_000 - load.prompt_tokens)

    def _take(self, reply: scheduler_pb2.PullWorkReply) -> None:
        report = self.report
        report.scheduler_boot_id = reply.scheduler.boot_id
        if reply.tell_held:
            del report.held[:]
            report.held.extend(self.held.values())
            return
        del report.done[:], report.held[:]
        for delivery in reply.deliveries:
            if delivery.number <= report.heard:
                continue
            report.heard = delivery.number
            if delivery.HasField("assigned"):
                self.seen.was_given(delivery.assigned)
                name = delivery.assigned.request_id, delivery.assigned.attempt
                self.held[name] = scheduler_pb2.HeldAssignment(assignment=delivery.assigned)
            else:
                self.held.pop((delivery.revoked.request_id, delivery.revoked.attempt), None)
        for name in list(self.held):
            if self.chance.random() < 0.2:
                del self.held[name]
                report.done.add(request_id=name[0], attempt=name[1])


async def client(served: Scheduler, request_id: str, seen: Seen) -> scheduler_pb2.TicketReply:
    """Submits, waits, and submits again to a scheduler that does not know the request."""
    boot_id, attempt, assigned = "", 0, 0
    while True:
        submit = scheduler_pb2.SubmitRequest(
            request_id=request_id, model="m", prompt_tokens=10_000, hit_tokens=9_000, after_attempt=attempt
        )
        ticket = await served.asked(lambda submit=submit: served.stub.Submit(submit, timeout=CALL_S))  # type: ignore[misc]
        boot_id = ticket.scheduler.boot_id
        while ticket.scheduler.boot_id == boot_id:
            state, attempt = ticket.state, max(attempt, ticket.attempt)
            if state == scheduler_pb2.ASSIGNED and ticket.attempt < assigned:
                seen.wrong.append(f"{request_id}: engines have attempt {ticket.attempt} after {assigned}")
            assigned = max(assigned, ticket.attempt) if ticket.HasField("assignment") else assigned
            if state not in (scheduler_pb2.WAITING, scheduler_pb2.ASSIGNED):
                return ticket
            wait = scheduler_pb2.GetTicketRequest(
                request_id=request_id, known_state=state, known_attempt=ticket.attempt, wait_ms=500
            )
            try:
                ticket = await served.asked(lambda wait=wait: served.stub.GetTicket(wait, timeout=CALL_S))  # type: ignore[misc]
            except grpc.aio.AioRpcError as error:
                info = error_info(error)
                if info is None or info.reason != "UNKNOWN_REQUEST":
                    raise
                break
        attempt = max(1, attempt)


async def killer(process: SchedulerProcess, seen: Seen, chance: random.Random) -> None:
    """Kills the scheduler now and then, and starts it again at the same address."""
    process.port = int(process.address.rpartition(":")[2])
    for _ in range(3):
        await asyncio.sleep(chance.uniform(0.8, 2.0))
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)
        seen.starts += 1


@contextlib.asynccontextmanager
async def running(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    """One that fails fails the test, none outlives it."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for found in ended:
        if isinstance(found, Exception):
            raise found


@pytest.mark.parametrize(("policy", "seed"), [("paper", 1), ("joint", 2)])
async def test_no_request_is_lost_and_no_attempt_is_given_out_twice(tmp_path: Path, policy: str, seed: int) -> None:
    chance, seen = random.Random(seed), Seen()
    with scheduler(tmp_path, policy=policy, limits=LIMITS, more_scheduler="pulls_per_s = 1000") as process:
        served = Scheduler(process.address)
        leaders = [
            Leader(f"{role}{number}", getattr(scheduler_pb2, role), random.Random(f"{seed} {role} {number}"), seen)
            for role in ("PREFILL", "DECODE")
            for number in range(GROUPS)
        ]
        tasks = [asyncio.ensure_future(leader.run(served)) for leader in leaders]
        killing = asyncio.ensure_future(killer(process, seen, chance))
        async with running([*tasks, killing]):
            clients = []
            for number in range(REQUESTS):
                clients.append(asyncio.ensure_future(client(served, f"r{number}", seen)))
                await asyncio.sleep(SUBMIT_S)
            async with asyncio.timeout(RUN_S):
                ended = await asyncio.gather(*clients)
                await killing
            assert {ticket.state for ticket in ended} == {scheduler_pb2.DONE}, [each.why for each in ended if each.why]
            # A leader may go on with what was done before a death of the scheduler, until it has said so.
            until = time.monotonic() + END_S
            while any(leader.held for leader in leaders) or any(
                (await asyncio.to_thread(process.status))["requests"].values()
            ):
                for task in tasks:
                    assert not task.done(), task.exception()
                assert time.monotonic() < until, [(leader.name, list(leader.held)) for leader in leaders]
                await asyncio.sleep(0.1)
        assert seen.wrong == []
        assert seen.starts == 3
        assert seen.deaths >= 1
        await served.channel.close()
