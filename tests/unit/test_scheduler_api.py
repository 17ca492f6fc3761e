"""The scheduler's service over gRPC, in this process: what is answered, who is woken, what is refused, how it ends."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmover_proto import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from kvmoverd import config_scheduler
from kvmoverd.rpc.errors import error_info
from kvmoverd.scheduler_daemon import SchedulerDaemon

WAIT_S = 5.0
WAIT_MS = 5_000
CONFIG = """
[scheduler]
listen = "127.0.0.1:0"
policy = "paper"

[[models]]
name = "m"
kv_bytes_per_token = 1000
alpha_tokens = 1000000
beta_tokens = 800000
"""
NO_PROXY = (("grpc.enable_http_proxy", 0),)


class Client:
    """What a daemon asks of a scheduler, in short words."""

    def __init__(self, daemon: SchedulerDaemon, channel: grpc.aio.Channel) -> None:
        self.daemon = daemon
        self.stub = scheduler_pb2_grpc.SchedulerStub(channel)

    async def submit(self, request_id: str, tokens: int = 1000, **more: Any) -> scheduler_pb2.TicketReply:
        asked = {"request_id": request_id, "model": "m", "prompt_tokens": tokens, "hit_tokens": tokens // 2, **more}
        return await self.stub.Submit(scheduler_pb2.SubmitRequest(**asked), timeout=WAIT_S)

    async def ticket(
        self, request_id: str, known: tuple[int, int] = (0, 0), wait_ms: int = 0
    ) -> scheduler_pb2.TicketReply:
        asked = scheduler_pb2.GetTicketRequest(
            request_id=request_id, known_state=known[0], known_attempt=known[1], wait_ms=wait_ms
        )
        return await self.stub.GetTicket(asked, timeout=2 * WAIT_S)

    async def status(self) -> scheduler_pb2.GetSchedulerStatusReply:
        return await self.stub.GetSchedulerStatus(scheduler_pb2.GetSchedulerStatusRequest(), timeout=WAIT_S)

    async def books(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.status()).json)
        return found


class Leader:
    """A group of engines; what it was given is finished when the test says so."""

    def __init__(self, client: Client, name: str, role: scheduler_pb2.Role.ValueType, engines: int = 1) -> None:
        self._client = client
        loads = [scheduler_pb2.EngineLoad(engine=f"{name}.{rank}", free_hbm_tokens=1 << 30) for rank in range(engines)]
        self.report = scheduler_pb2.PullWorkRequest(
            group=name, model="m", role=role, boot_id=f"{name} boot", node=f"{name} node", engines=loads
        )
        self.assigned: list[scheduler_pb2.Assignment] = []
        self.revoked: list[tuple[str, int]] = []

    async def pull_once(self) -> scheduler_pb2.PullWorkReply:
        self.report.sequence += 1
        reply = await self._client.stub.PullWork(self.report, timeout=WAIT_S)
        self.report.scheduler_boot_id = reply.scheduler.boot_id
        if not reply.tell_held:
            del self.report.done[:], self.report.held[:]
        for delivery in reply.deliveries:
            assert delivery.number > self.report.heard
            self.report.heard = delivery.number
            if delivery.HasField("assigned"):
                self.assigned.append(delivery.assigned)
            else:
                self.revoked.append((delivery.revoked.request_id, delivery.revoked.attempt))
        return reply

    async def pull(self) -> scheduler_pb2.PullWorkReply:
        """As leaders do: what the group holds is told when it is asked for."""
        reply = await self.pull_once()
        return await self.pull_once() if reply.tell_held else reply

    def finish(self, request_id: str, attempt: int) -> None:
        self.report.done.add(request_id=request_id, attempt=attempt)


@asynccontextmanager
async def serving(text: str = CONFIG, home: Path = Path("/nonexistent")) -> AsyncIterator[Client]:
    daemon = SchedulerDaemon(config_scheduler.parse(tomllib.loads(text), home))
    try:
        await daemon.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.port}", options=NO_PROXY) as channel:
            yield Client(daemon, channel)
    finally:
        await daemon.stop()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as made:
        yield made


async def refused(call: Awaitable[Any]) -> tuple[str, str, dict[str, str]]:
    """Code, reason and facts."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    info = error_info(caught.value)
    assert info is not None, caught.value
    return caught.value.code().name, info.reason, dict(info.metadata)


async def both(client: Client) -> tuple[Leader, Leader]:
    """A prefill and a decode group of an engine each, which the scheduler knows."""
    leaders = Leader(client, "p", scheduler_pb2.PREFILL), Leader(client, "d", scheduler_pb2.DECODE)
    for leader in leaders:
        await leader.pull()
    return leaders


async def given(client: Client, request_id: str, prefill: Leader, decode: Leader) -> scheduler_pb2.TicketReply:
    """Submits it, and has both leaders pull it."""
    await client.submit(request_id)
    for leader in (decode, prefill, decode):
        await leader.pull()
    return await client.ticket(request_id)


async def test_a_request_goes_its_whole_way(client: Client) -> None:
    prefill, decode = await both(client)
    ticket = await client.submit("r", 1000, tenant="t", session="s")
    assert (ticket.state, ticket.attempt, ticket.request_id) == (scheduler_pb2.WAITING, 1, "r")
    assert ticket.scheduler.boot_id
    assert not ticket.HasField("assignment")
    await decode.pull()
    await prefill.pull()
    await decode.pull()
    (mine,), (yours,) = prefill.assigned, decode.assigned
    assert mine == yours
    assert (mine.prefill_engine, mine.prefill_node, mine.decode_engine, mine.decode_node) == (
        "p.0",
        "p node",
        "d.0",
        "d node",
    )
    assert (mine.request_id, mine.attempt, mine.prompt_tokens, mine.hit_tokens) == ("r", 1, 1000, 500)
    assert mine.read.path in (common_pb2.PATH_PE, common_pb2.PATH_DE)
    assert len(mine.rules.split("/")) == 3
    known = await client.ticket("r")
    assert (known.state, known.assignment) == (scheduler_pb2.ASSIGNED, mine)
    for leader in (prefill, decode):
        leader.finish("r", 1)
        await leader.pull()
    done = await client.ticket("r")
    assert (done.state, done.assignment) == (scheduler_pb2.DONE, mine)
    books = await client.books()
    assert books["assignments"] == {mine.rules: 1}
    assert (books["counts"]["done"], books["requests"]) == (1, {"waiting": 0, "assigned": 0})


async def test_whoever_waits_is_woken_by_each_change(client: Client) -> None:
    prefill, decode = await both(client)
    ticket = await client.submit("r")
    seen = []
    while ticket.state != scheduler_pb2.DONE:
        waiting = asyncio.ensure_future(client.ticket("r", (ticket.state, ticket.attempt), WAIT_MS))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        for leader in (decode, prefill, decode):
            await leader.pull()
        for assignment in decode.assigned:
            decode.finish(assignment.request_id, assignment.attempt)
        began = time.monotonic()
        ticket = await waiting
        assert time.monotonic() - began < 1.0
        seen.append(ticket.state)
    assert seen == [scheduler_pb2.ASSIGNED, scheduler_pb2.DONE]


async def test_a_wait_ends_after_its_time_and_with_what_is_not_known_at_once(client: Client) -> None:
    ticket = await client.submit("r")
    known = (ticket.state, ticket.attempt)
    began = time.monotonic()
    assert (await client.ticket("r", known, 150)).state == scheduler_pb2.WAITING
    assert 0.14 <= time.monotonic() - began < 2.0
    for unlike in ((0, 0), (scheduler_pb2.ASSIGNED, 1), (scheduler_pb2.WAITING, 2)):
        assert (await client.ticket("r", unlike, WAIT_MS)).attempt == 1
    assert client.daemon._office.waits._waiting == {}


async def test_a_client_that_goes_away_leaves_no_wait_behind(client: Client) -> None:
    ticket = await client.submit("r")
    call = client.stub.GetTicket(
        scheduler_pb2.GetTicketRequest(request_id="r", known_state=ticket.state, known_attempt=1, wait_ms=60_000)
    )
    await until(lambda: len(client.daemon._office.waits) == 1)
    call.cancel()
    await until(lambda: len(client.daemon._office.waits) == 0)
    assert client.daemon._office.waits._waiting == {}


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not become so")


async def test_one_wait_too_many_is_told_to_come_again() -> None:
    async with serving(CONFIG + "[limits]\nwaits_max = 2\n") as client:
        await client.submit("r")
        waits = [asyncio.ensure_future(client.ticket("r", (scheduler_pb2.WAITING, 1), WAIT_MS)) for _ in range(2)]
        await until(lambda: len(client.daemon._office.waits) == 2)
        code, reason, facts = await refused(client.ticket("r", (scheduler_pb2.WAITING, 1), WAIT_MS))
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert int(facts["retry_after_ms"]) > 0
        assert (await client.ticket("r")).state == scheduler_pb2.WAITING
        await client.stub.Withdraw(scheduler_pb2.WithdrawRequest(request_id="r"), timeout=WAIT_S)
        assert [wait.state for wait in await asyncio.gather(*waits)] == [scheduler_pb2.WITHDRAWN] * 2


async def test_one_request_too_many_is_told_when_to_come_again() -> None:
    async with serving(CONFIG + "[limits]\nwaiting_max = 1\n") as client:
        await client.submit("a")
        code, reason, facts = await refused(client.submit("b"))
        assert (code, reason, facts["retryable"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "true")
        assert 0 < int(facts["retry_after_ms"]) <= 10_000
        assert (await client.submit("a")).state == scheduler_pb2.WAITING
        assert (await client.books())["counts"]["refused"] == 1


async def test_a_request_that_is_withdrawn_is_revoked_and_fenced(client: Client) -> None:
    prefill, decode = await both(client)
    await given(client, "r", prefill, decode)
    reply = await client.stub.Withdraw(scheduler_pb2.WithdrawRequest(request_id="r"), timeout=WAIT_S)
    assert reply.state == scheduler_pb2.WITHDRAWN
    for leader in (prefill, decode):
        await leader.pull()
        assert leader.revoked == [("r", 1)]
    async with node(client, "p node") as reports:
        told = await reports.report()
        (fence,) = told.fences
        assert fence.request_id == "r"
        assert fence.attempt >= 1
        assert list((await reports.report()).fences) == [fence]
        reports.message.fences_heard = fence.number
        assert not (await reports.report()).fences


async def test_a_leader_of_another_scheduler_says_first_what_it_holds(client: Client) -> None:
    leader = Leader(client, "d", scheduler_pb2.DECODE)
    await client.submit("r")
    first = await leader.pull_once()
    assert first.tell_held
    assert not first.deliveries
    assert (await client.books())["groups"] == {"prefill": 0, "decode": 0}
    # The answer was lost: it is asked again, as often as it takes.
    leader.report.scheduler_boot_id = "an earlier one"
    assert (await leader.pull_once()).tell_held
    second = await leader.pull_once()
    assert not second.tell_held
    assert second.pull_again_ms > 0
    assert not (await leader.pull_once()).tell_held


async def test_what_leaders_hold_lives_on_in_a_scheduler_that_starts_anew(client: Client) -> None:
    prefill, decode = await both(client)
    known = await given(client, "r", prefill, decode)
    client.daemon.step_down("")
    client.daemon.lead(2)
    for leader in (prefill, decode):
        assert (await leader.pull_once()).tell_held
        leader.report.held.add(assignment=known.assignment)
        await leader.pull_once()
    again = await client.submit("r", after_attempt=known.attempt)
    assert (again.state, again.attempt) == (scheduler_pb2.ASSIGNED, known.attempt)
    assert again.scheduler.epoch == 2
    assert again.scheduler.boot_id != known.scheduler.boot_id
    decode.finish("r", known.attempt)
    await decode.pull_once()
    assert (await client.ticket("r")).state == scheduler_pb2.DONE


async def test_a_group_that_was_lost_says_again_what_it_holds(client: Client) -> None:
    prefill, decode = await both(client)
    await given(client, "r", prefill, decode)
    async with node(client, "d node") as reports:
        reports.message.lost_groups.add(group="d", boot_id="another boot")
        await reports.report()
        assert not (await prefill.pull_once()).tell_held
        assert prefill.revoked == []
        reports.message.lost_groups[0].boot_id = "d boot"
        await reports.report()
        await reports.report()
    await prefill.pull_once()
    assert prefill.revoked == [("r", 1)]
    assert (await client.ticket("r")).attempt > 1
    assert (await decode.pull_once()).tell_held
    assert not (await decode.pull_once()).tell_held


async def test_explanations_are_for_people_and_for_programs(client: Client) -> None:
    await given(client, "r", *await both(client))
    reply = await client.stub.Explain(scheduler_pb2.ExplainRequest(request_id="r"), timeout=WAIT_S)
    assert "prefill: p.0 by " in reply.text
    words = json.loads(reply.json)
    assert words["decode"]["engine"] == "d.0"
    assert [seen["engine"] for seen in words["prefill"]["candidates"]] == ["p.0"]


async def test_a_router_of_its_own_asks_who_reads(client: Client) -> None:
    async with node(client, "p node") as one, node(client, "d node") as other:
        one.message.read_queue_bytes = 10_000_000
        for reports in (one, other):
            await reports.report()
        asked = scheduler_pb2.ChoosePathRequest(
            model="m", prefill_node="p node", decode_node="d node", hit_tokens=10_000
        )
        reply = await client.stub.ChoosePath(asked, timeout=WAIT_S)
    assert (reply.read.path, reply.why) == (common_pb2.PATH_DE, "shorter")
    assert reply.scheduler.boot_id


class Reports:
    """A node's stream of reports."""

    def __init__(self, client: Client, name: str) -> None:
        self.call = client.stub.ReportNode()
        self.message = scheduler_pb2.ReportNodeRequest(node=name, boot_id=f"{name} boot")

    async def report(self) -> scheduler_pb2.ReportNodeReply:
        self.message.sequence += 1
        async with asyncio.timeout(WAIT_S):
            await self.call.write(self.message)
            reply = await self.call.read()
            if reply == grpc.aio.EOF:
                await self.call  # raises what it ended with
        assert isinstance(reply, scheduler_pb2.ReportNodeReply)
        return reply


@asynccontextmanager
async def node(client: Client, name: str) -> AsyncIterator[Reports]:
    reports = Reports(client, name)
    try:
        yield reports
    finally:
        reports.call.cancel()


async def test_every_report_of_a_node_is_answered(client: Client) -> None:
    async with node(client, "n") as reports:
        for _ in range(3):
            reply = await reports.report()
            assert 100 <= reply.report_again_ms <= 300
            assert reply.scheduler.boot_id
        assert (await client.books())["nodes"]["streams"] == 1
        await reports.call.done_writing()
        assert await reports.call.read() == grpc.aio.EOF
    await until(lambda: len(client.daemon._streams) == 0)
    assert "n" in client.daemon._office._cluster().nodes


async def test_a_second_stream_of_a_node_takes_the_place_of_the_first(client: Client) -> None:
    async with node(client, "n") as first, node(client, "n") as second:
        await first.report()
        second.message.sequence = first.message.sequence
        await second.report()
        code, reason, _ = await refused(first.call.read())
        assert (code, reason) == ("INVALID_ARGUMENT", "BAD_REPORT")
        await second.report()
        assert len(client.daemon._streams) == 1


async def test_streams_are_bounded_and_so_are_their_words() -> None:
    async with serving(CONFIG + "[limits]\nnodes_max = 1\n") as client, node(client, "a") as one:
        await one.report()
        async with node(client, "b") as other:
            code, reason, facts = await refused(other.report())
            assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert int(facts["retry_after_ms"]) > 0
        one.message.node = "b"
        assert (await refused(one.report()))[1] == "BAD_REPORT"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"node": ""}, "BAD_REPORT"),
        ({"boot_id": "x" * 257}, "BAD_REPORT"),
        ({"read_queue_bytes": -1}, "BAD_REPORT"),
        ({"buffer_bytes": -1}, "BAD_REPORT"),
        ({"lost_groups": [scheduler_pb2.LostGroup(group="g", boot_id="b")] * 1025}, "BAD_REPORT"),
    ],
)
async def test_a_bad_report_ends_its_stream(client: Client, change: dict[str, Any], reason: str) -> None:
    async with node(client, "n") as reports:
        reports.message.MergeFrom(scheduler_pb2.ReportNodeRequest(**change))
        if change.get("node") == "":
            reports.message.node = ""
        assert (await refused(reports.report()))[:2] == ("INVALID_ARGUMENT", reason)
    assert len(client.daemon._streams) == 0


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"request_id": ""}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"model": "other"}, "NOT_FOUND", "UNKNOWN_MODEL"),
        ({"tokens": 0}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"hit_tokens": 1001}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"tenant": "x" * 257}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"cached": [scheduler_pb2.CachedPrefix(where="n", tokens=1)] * 17}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"cached": [scheduler_pb2.CachedPrefix(where="n", tokens=501)]}, "INVALID_ARGUMENT", "BAD_REQUEST"),
    ],
)
async def test_a_bad_submit_is_refused(client: Client, change: dict[str, Any], code: str, reason: str) -> None:
    words = {"request_id": "r", "tokens": 1000, **change}
    assert (await refused(client.submit(**words)))[:2] == (code, reason)
    assert (await client.books())["requests"]["waiting"] == 0


def held_message(attempt: int = 1, node: str = "n", stop: float = 1.0) -> scheduler_pb2.HeldAssignment:
    part = scheduler_pb2.PartOfRead(node=node, first=0.0, stop=stop)
    return scheduler_pb2.HeldAssignment(
        assignment=scheduler_pb2.Assignment(
            request_id="r",
            attempt=attempt,
            prefill_engine="p.0",
            prefill_node="n",
            decode_engine="d.0",
            decode_node="n",
            read=scheduler_pb2.ReadChoice(path=common_pb2.PATH_PARTS, parts=[part]),
            prompt_tokens=100,
        )
    )


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({"role": 0}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"role": 77}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"model": "other"}, "NOT_FOUND", "UNKNOWN_MODEL"),
        ({"engines": []}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"engines": [scheduler_pb2.EngineLoad(engine="e")] * 4097}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"engines": [scheduler_pb2.EngineLoad(engine="e", prompt_tokens=-1)]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"done": [scheduler_pb2.AttemptRef(request_id="r", attempt=1)] * 65_537}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"done": [scheduler_pb2.AttemptRef(request_id="r")]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [scheduler_pb2.HeldAssignment()] * 65_537}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [scheduler_pb2.HeldAssignment()]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [held_message(attempt=(1 << 31) - 1)]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [held_message(node="x" * 257)]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [held_message(node="")]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [held_message(stop=float("nan"))]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"held": [held_message(stop=1.1)]}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"node": ""}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"group": ""}, "INVALID_ARGUMENT", "BAD_REPORT"),
        ({"sequence": 1 << 63}, "INVALID_ARGUMENT", "BAD_REPORT"),
    ],
)
async def test_a_bad_pull_is_refused(client: Client, change: dict[str, Any], code: str, reason: str) -> None:
    leader = Leader(client, "p", scheduler_pb2.PREFILL)
    await leader.pull_once()
    for name in change:
        leader.report.ClearField(name)
    leader.report.MergeFrom(scheduler_pb2.PullWorkRequest(**change))
    assert (await refused(client.stub.PullWork(leader.report, timeout=WAIT_S)))[:2] == (code, reason)
    assert (await client.books())["groups"] == {"prefill": 0, "decode": 0}


async def test_what_is_not_known_is_not_found(client: Client) -> None:
    stub = client.stub
    for call in (
        client.ticket("r"),
        client.ticket("r", (0, 0), WAIT_MS),
        stub.Withdraw(scheduler_pb2.WithdrawRequest(request_id="r"), timeout=WAIT_S),
        stub.Explain(scheduler_pb2.ExplainRequest(request_id="r"), timeout=WAIT_S),
    ):
        assert (await refused(call))[:2] == ("NOT_FOUND", "UNKNOWN_REQUEST")
    assert (await refused(client.ticket("r", (0, 0), 60_001)))[1] == "BAD_REQUEST"
    asked = scheduler_pb2.ChoosePathRequest(model="m", prefill_node="a", decode_node="b")
    assert (await refused(stub.ChoosePath(asked, timeout=WAIT_S)))[1] == "UNKNOWN_PEER"


async def test_one_that_does_not_lead_says_who_does_and_shows_its_books(client: Client) -> None:
    _, decode = await both(client)
    await client.submit("r")
    waiting = asyncio.ensure_future(client.ticket("r", (scheduler_pb2.WAITING, 1), WAIT_MS))
    await until(lambda: len(client.daemon._office.waits) == 1)
    async with node(client, "n") as reports:
        await reports.report()
        client.daemon.step_down("10.0.0.7:9402")
        for call in (waiting, client.submit("x"), client.ticket("r"), decode.pull_once(), reports.report()):
            code, reason, facts = await refused(call)
            assert (code, reason, facts["leader"]) == ("UNAVAILABLE", "NOT_LEADING", "10.0.0.7:9402")
    status = await client.status()
    assert (status.leads, status.leader, status.policy) == (False, "10.0.0.7:9402", "paper")
    client.daemon.lose_node("n")
    client.daemon.lead(3)
    again = await client.status()
    assert (again.leads, again.scheduler.epoch) == (True, 3)
    assert again.scheduler.boot_id != status.scheduler.boot_id
    assert (await refused(client.ticket("r")))[1] == "UNKNOWN_REQUEST"
    assert (await client.books())["leads_total"] == 2


async def test_the_books_are_shown_with_the_first_groups_and_nodes(client: Client) -> None:
    prefill, decode = await both(client)
    await given(client, "r", prefill, decode)
    for number in range(3):
        await client.submit(f"w{number}", tenant="ab"[number % 2])
    async with node(client, "p node") as reports:
        reports.message.read_queue_bytes = 7
        reports.message.draining = True
        await reports.report()
        client.daemon._office.tick()
        books = await client.books()
    assert books["nodes"] == {"known": 2, "stale": 1, "draining": 1, "streams": 1}
    assert books["groups"] == {"prefill": 1, "decode": 1}
    assert books["waiting_by_tenant"] == {"a": 2, "b": 1}
    one, other = books["first_groups"]
    assert (one["group"], one["role"], one["engines"], other["group"]) == ("p", "prefill", 1, "d")
    assert (one["requests"], one["tokens"]) == (1, 1000)
    seen = {shown["node"]: shown for shown in books["first_nodes"]}
    assert (seen["p node"]["draining"], seen["d node"]["read_queue_bytes"]) == (True, -1)
    assert books["calls"]["submit"]["calls"] == 4
    assert books["loop_lag_us_max"] >= 0


async def test_one_whose_lease_has_run_out_decides_nothing_before_it_is_told(client: Client) -> None:
    office = client.daemon._office
    await client.submit("r")
    answers = iter([True, False])
    office.may_lead = lambda: next(answers, False)
    assert office.leads
    office.tick()
    client.daemon.lose_node("n")
    assert (await refused(client.submit("s")))[1] == "NOT_LEADING"
    assert not (await client.status()).leads
    office.may_lead = lambda: True
    assert (await client.ticket("r")).state == scheduler_pb2.WAITING


async def test_a_node_that_is_known_to_be_dead_loses_what_its_engines_had(client: Client) -> None:
    prefill, decode = await both(client)
    await given(client, "r", prefill, decode)
    waiting = asyncio.ensure_future(client.ticket("r", (scheduler_pb2.ASSIGNED, 1), WAIT_MS))
    await until(lambda: len(client.daemon._office.waits) == 1)
    client.daemon.lose_node("d node")
    found = await waiting
    assert found.state == scheduler_pb2.WAITING
    assert found.attempt > 1
    assert not found.HasField("assignment")


async def test_a_stop_tells_everyone_in_time(client: Client) -> None:
    await client.submit("r")
    waiting = asyncio.ensure_future(client.ticket("r", (scheduler_pb2.WAITING, 1), WAIT_MS))
    await until(lambda: len(client.daemon._office.waits) == 1)
    async with node(client, "n") as reports:
        await reports.report()
        began = time.monotonic()
        assert await client.daemon.stop()
        assert time.monotonic() - began < 1.0
        assert (await refused(waiting))[:2] == ("UNAVAILABLE", "SHUTTING_DOWN")
        assert (await refused(reports.call.read()))[:2] == ("UNAVAILABLE", "SHUTTING_DOWN")


async def test_nobody_is_taken_for_dead_because_the_scheduler_stood_still() -> None:
    async with serving(CONFIG + '[limits]\ngroup_silent = "200ms"\n') as client:
        leaders = await both(client)
        time.sleep(0.6)  # noqa: ASYNC251 the loop of all of them stands still
        await asyncio.sleep(0.1)
        for leader in leaders:
            assert not (await leader.pull_once()).tell_held
        await asyncio.sleep(0.8)
        assert (await leaders[0].pull_once()).tell_held


async def test_a_fault_of_its_own_ends_the_scheduler(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("the books do not add up")

    monkeypatch.setattr(client.daemon._office._cluster(), "submit", fails)
    assert (await refused(client.submit("r")))[:2] == ("INTERNAL", "INTERNAL")
    assert client.daemon.broken.is_set()


async def test_one_that_is_elected_and_cannot_lead_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("there are no books to begin with")

    monkeypatch.setattr(client.daemon._office, "lead", fails)
    with pytest.raises(AssertionError):
        client.daemon.lead(7)
    assert client.daemon.broken.is_set()


async def test_leaders_are_told_different_times_and_longer_ones_where_they_are_many() -> None:
    async with serving(CONFIG.replace('policy = "paper"', "pulls_per_s = 10")) as client:
        leaders = await both(client)
        client.daemon._office.tick()
        told = [(await leaders[0].pull()).pull_again_ms for _ in range(40)]
    assert 150 <= min(told) < 170
    assert 230 < max(told) <= 250
    assert len(set(told)) > 30
    assert sum(told) / len(told) == pytest.approx(200, rel=0.05)
