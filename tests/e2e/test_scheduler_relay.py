"""Real daemons and a real scheduler: engines speak to their own daemons alone, and lose neither work nor pages whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cluster import Cluster, Node, running
from engine import Engine, engine, outcome, whole_request

from kvmover_client import Path as ReadPath
from kvmover_proto import scheduler_pb2
from kvmoverd.rpc.errors import error_info
from tests.scheduler_process_kit import SchedulerProcess, scheduler

pytestmark = pytest.mark.e2e

CALL_S = 10.0
PULL_S = 0.02
SEEN_S = 8.0
BLOCKS, HIT = 6, 4
LOST_S = 2.0
"""What is given out anew when a leader dies: far less than the time after which it would be taken for dead by its silence."""
GROUP_SILENT = "20s"


class ScheduledNode(Node):
    """A daemon that belongs to the scheduler of the test."""

    scheduler_address = ""

    def write_config(self) -> None:
        super().write_config()
        with self.config.open("a") as config:
            config.write(f'\n[scheduler]\naddresses = ["{self.scheduler_address}"]\ntimeout = "500ms"\n')


class ScheduledCluster(Cluster):
    """Two prefill nodes, "pe" and "h0", and a decode node, "de"."""

    node_class = ScheduledNode


@pytest.fixture
def scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SchedulerProcess, Cluster]]:
    silent = f'group_silent = "{GROUP_SILENT}"\nsettle = "500ms"'
    with scheduler(tmp_path, policy="paper", limits=silent) as process:
        process.port = int(process.address.rpartition(":")[2])
        monkeypatch.setattr(ScheduledNode, "scheduler_address", process.address)
        with running(nodes=3, cluster_class=ScheduledCluster) as cluster:
            yield process, cluster


async def ask(member: Engine, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
    """A call of the engine API, in an engine's own session."""
    link = member.client._link
    return await getattr(link.stub, method)(request, timeout=timeout_s, metadata=link.metadata)


async def submit(member: Engine, request_id: str, after_attempt: int = 0) -> scheduler_pb2.TicketReply:
    request = scheduler_pb2.SubmitRequest(
        request_id=request_id,
        model="m",
        prompt_tokens=BLOCKS * 64,
        hit_tokens=HIT * 64,
        after_attempt=after_attempt,
    )
    return await ask(member, "Submit", request)


async def ticket(member: Engine, request_id: str) -> scheduler_pb2.TicketReply:
    return await ask(member, "GetTicket", scheduler_pb2.GetTicketRequest(request_id=request_id))


async def until_ticket(member: Engine, request_id: str, state: int, attempt: int) -> scheduler_pb2.TicketReply:
    until_s = time.monotonic() + SEEN_S
    while (found := await ticket(member, request_id)).state != state or found.attempt != attempt:
        assert time.monotonic() < until_s, f"not {state} under attempt {attempt}: {found}"
        await asyncio.sleep(PULL_S)
    return found


class Leader:
    """Of a group of one engine, that pulls until it is closed."""

    def __init__(self, member: Engine, name: str, role: scheduler_pb2.Role.ValueType) -> None:
        self.member = member
        self.report = scheduler_pb2.PullWorkRequest(
            group=name,
            model="m",
            role=role,
            boot_id=f"boot of {name}",
            engines=[scheduler_pb2.EngineLoad(engine=f"{name}.0", free_hbm_tokens=1 << 30)],
        )
        self.held: dict[tuple[str, int], scheduler_pb2.Assignment] = {}
        self.revoked: list[tuple[str, int]] = []
        self.boots: list[str] = []
        self._pulling = asyncio.create_task(self._pull_on())

    async def _pull_on(self) -> None:
        while True:
            try:
                await self._pull()
            except grpc.aio.AioRpcError as error:
                info = error_info(error)
                if info is None or info.reason != "SCHEDULER_UNREACHABLE":
                    raise
            await asyncio.sleep(PULL_S)

    async def _pull(self) -> None:
        self.report.sequence += 1
        told = len(self.report.done)
        reply = await ask(self.member, "PullWork", self.report)
        self.report.scheduler_boot_id = reply.scheduler.boot_id
        if reply.tell_held:
            del self.report.held[:]
            self.report.held.extend(scheduler_pb2.HeldAssignment(assignment=held) for held in self.held.values())
            return
        if reply.scheduler.boot_id not in self.boots:
            self.boots.append(reply.scheduler.boot_id)
            self.report.heard = 0
        del self.report.done[:told], self.report.held[:]
        for delivery in reply.deliveries:
            self.report.heard = delivery.number
            if delivery.HasField("assigned"):
                self.held[delivery.assigned.request_id, delivery.assigned.attempt] = delivery.assigned
            else:
                self.revoked.append((delivery.revoked.request_id, delivery.revoked.attempt))
                self.held.pop(self.revoked[-1], None)

    def finish(self, request_id: str, attempt: int) -> None:
        del self.held[request_id, attempt]
        self.report.done.add(request_id=request_id, attempt=attempt)

    async def has(self, request_id: str, above: int = 0) -> scheduler_pb2.Assignment:
        """Under an attempt above that one."""
        until_s = time.monotonic() + SEEN_S
        while not (found := [held for name, held in self.held.items() if name[0] == request_id and name[1] > above]):
            assert time.monotonic() < until_s, f"{self.report.group} has {list(self.held)}"
            assert not self._pulling.done(), self._pulling.exception()
            await asyncio.sleep(PULL_S)
        return found[0]

    async def close(self) -> None:
        self._pulling.cancel()
        await asyncio.wait((self._pulling,))
        if not self._pulling.cancelled():
            self._pulling.result()


@asynccontextmanager
async def group(node: Node, role: scheduler_pb2.Role.ValueType, name: str = "") -> AsyncIterator[Leader]:
    async with engine(node.endpoint) as member:
        leader = Leader(member, name or f"{node.name} engines", role)
        try:
            yield leader
        finally:
            await leader.close()


async def test_a_request_goes_from_its_submission_over_three_daemons_to_its_end(
    scheduled: tuple[SchedulerProcess, Cluster],
) -> None:
    _, cluster = scheduled
    async with (
        group(cluster.pe, scheduler_pb2.PREFILL) as prefill,
        group(cluster.de, scheduler_pb2.DECODE) as decode,
        engine(cluster.helpers[0].endpoint) as router,
    ):
        keys = prefill.member.keys("a", BLOCKS)
        await prefill.member.store("store", keys[:HIT])
        waiting = await submit(router, "r")
        assert waiting.state in (scheduler_pb2.WAITING, scheduler_pb2.ASSIGNED)
        known = scheduler_pb2.GetTicketRequest(
            request_id="r", known_state=waiting.state, known_attempt=waiting.attempt, wait_ms=5_000
        )
        changed = await ask(router, "GetTicket", known)
        assert changed.state == scheduler_pb2.ASSIGNED
        assignment = await prefill.has("r")
        await decode.has("r")
        assert (assignment.prefill_node, assignment.decode_node) == ("pe", "de"), "the daemons have put their names in"
        path = ReadPath(assignment.read.path)
        plan = prefill.member.plan("r", keys, hit_blocks=HIT, path=path, decode_node=assignment.decode_node)
        assert await whole_request(prefill.member, decode.member, plan) == []
        prefill.finish("r", 1)
        decode.finish("r", 1)
        await until_ticket(router, "r", scheduler_pb2.DONE, 1)
        explained = await ask(router, "Explain", scheduler_pb2.ExplainRequest(request_id="r"))
        assert "pe" in explained.text
        chosen = await ask(
            router,
            "ChoosePath",
            scheduler_pb2.ChoosePathRequest(model="m", prefill_node="pe", decode_node="de", hit_tokens=100),
        )
        assert chosen.scheduler.boot_id == changed.scheduler.boot_id
        status = (await cluster.pe.status())["scheduler"]
        assert (status["state"], status["boot_id"]) == ("reports", changed.scheduler.boot_id)


async def test_when_a_prefill_leader_dies_its_request_goes_on_elsewhere_and_its_calls_are_fenced(
    scheduled: tuple[SchedulerProcess, Cluster],
) -> None:
    _, cluster = scheduled
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(group(cluster.de, scheduler_pb2.DECODE))
        first = await stack.enter_async_context(group(cluster.pe, scheduler_pb2.PREFILL))
        await submit(decode.member, "r")
        await first.has("r")
        await decode.has("r")
        keys = first.member.keys("a", BLOCKS)
        assembly = await decode.member.client.assemble_blocks("r", 1, decode.member.model, 30.0)
        push = await first.member.client.push_layers(first.member.plan("r", keys, hit_blocks=0, path=None))
        await cluster.de.settled(lambda status: status["requests"].get("assemble"), "with a DE buffer")
        second = await stack.enter_async_context(group(cluster.helpers[0], scheduler_pb2.PREFILL))
        died_s = time.monotonic()
        await first.close()
        await first.member.client.close()
        assignment = await second.has("r", above=1)
        assert time.monotonic() - died_s < LOST_S
        assert assignment.prefill_node == "h0"
        assert (await decode.has("r", above=1)).attempt == assignment.attempt
        assert ("r", 1) in decode.revoked
        assert await outcome(assembly) in ("STALE_ATTEMPT", "PEER_LOST", "CANCELLED", "ENGINE_GONE")
        await outcome(push)
        plan = second.member.plan("r", keys, hit_blocks=0, path=None, attempt=assignment.attempt)
        assert await whole_request(second.member, decode.member, plan) == []
        async with engine(cluster.pe.endpoint) as late:
            stale = late.plan("r", keys, hit_blocks=0, path=None, attempt=1)
            assert await outcome(await late.client.push_layers(stale)) == "StaleAttempt"
        fenced = await cluster.pe.settled(lambda status: status["scheduler"]["fences"], "fenced")
        assert fenced["scheduler"]["fences"] == 1


async def test_while_the_scheduler_is_away_nodes_serve_on_and_what_is_held_is_known_to_the_next_one(
    scheduled: tuple[SchedulerProcess, Cluster],
) -> None:
    process, cluster = scheduled
    async with (
        group(cluster.pe, scheduler_pb2.PREFILL) as prefill,
        group(cluster.de, scheduler_pb2.DECODE) as decode,
    ):
        before = await submit(decode.member, "r")
        await prefill.has("r")
        await decode.has("r")
        process.kill()
        await cluster.pe.settled(lambda status: status["scheduler"]["state"] == "unreachable", "without a scheduler")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ticket(decode.member, "r")
        info = error_info(refused.value)
        assert info is not None and info.reason == "SCHEDULER_UNREACHABLE" and int(info.metadata["retry_after_ms"])
        keys = prefill.member.keys("a", BLOCKS)
        plan = prefill.member.plan("r", keys, hit_blocks=0, path=None)
        assert await whole_request(prefill.member, decode.member, plan) == []
        process.start()
        await cluster.pe.settled(lambda status: status["scheduler"]["state"] == "reports", "with a scheduler")
        again = await submit(decode.member, "r", after_attempt=1)
        assert again.scheduler.boot_id != before.scheduler.boot_id
        await until_ticket(decode.member, "r", scheduler_pb2.ASSIGNED, 1)
        prefill.finish("r", 1)
        decode.finish("r", 1)
        await until_ticket(decode.member, "r", scheduler_pb2.DONE, 1)
        assert not prefill.revoked and not decode.revoked


async def test_a_scheduler_that_hangs_costs_its_callers_their_time_and_nobody_else(
    scheduled: tuple[SchedulerProcess, Cluster],
) -> None:
    process, cluster = scheduled
    async with engine(cluster.pe.endpoint) as member:
        await submit(member, "r")
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError):
                await ticket(member, "r")
            assert time.monotonic() - began_s < 2.0
            await member.store("store", member.keys("a", BLOCKS))
            await cluster.pe.settled(
                lambda status: status["scheduler"]["state"] == "unreachable", "without a scheduler"
            )
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await cluster.pe.settled(lambda status: status["scheduler"]["state"] == "reports", "with a scheduler")
        assert (await ticket(member, "r")).state == scheduler_pb2.WAITING
