"""Requests that a client gives to the scheduler: none is lost and none runs twice, whatever restarts between the two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from client_scheduling_kit import MODEL, SETTLE_S, SchedulingDaemon, loads, serving

from kvmover_client import (
    Assignment,
    AsyncClient,
    BadRequest,
    CachedPrefix,
    DaemonGone,
    Leader,
    NoScheduler,
    QueueFull,
    RequestFailed,
    RequestWithdrawn,
    Role,
    SchedulerUnreachable,
    Ticket,
    TicketState,
    TimedOut,
    UnknownModel,
    UnknownPeer,
    UnknownRequest,
)
from kvmover_client import Path as ReadPath
from kvmover_client import scheduler_desk as desk
from kvmoverd.core import errors as daemon_errors


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[SchedulingDaemon]:
    daemon = await SchedulingDaemon(tmp_path / "s").start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def client(daemon: SchedulingDaemon) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(daemon.endpoint, name="router") as client:
        yield client


class Pair:
    """A prefill and a decode group, with a session each."""

    def __init__(self, client: AsyncClient) -> None:
        self.prefill = Leader(client, "p", MODEL, Role.PREFILL)
        self.decode = Leader(client, "d", MODEL, Role.DECODE)

    async def pull(self) -> list[object]:
        return [*await self.prefill.pull(loads("p0")), *await self.decode.pull(loads("d0"))]

    async def until_given(self, request_id: str) -> Assignment:
        """Pulls until both have it."""
        for _ in range(200):
            await self.pull()
            held = {leader: self.holds(leader, request_id) for leader in (self.prefill, self.decode)}
            if all(held.values()):
                found = held[self.decode]
                assert found is not None
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(f"{request_id} is not given to both: {held}")

    async def finish(self, request_id: str, attempt: int) -> None:
        assert self.prefill.prefilled(request_id, attempt) and self.decode.whole(request_id, attempt)
        await self.pull()
        assert self.decode.finished(request_id, attempt)
        await self.pull()

    @staticmethod
    def holds(leader: Leader, request_id: str) -> Assignment | None:
        return next((held.assignment for held in leader.held if held.assignment.request_id == request_id), None)


async def test_a_request_is_given_to_both_its_engines_and_its_client_hears_of_each_step(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100, hit_tokens=64, cached=[CachedPrefix("p0", 32)], session="s")
    assert (submitted.request_id, submitted.ticket.state) == ("r", TicketState.WAITING)
    pair = Pair(client)
    waiting = asyncio.create_task(submitted.assigned(5))
    assignment = await pair.until_given("r")
    told = await waiting
    assert (told.prefill_engine, told.decode_engine, told.attempt) == ("p0", "d0", 1)
    assert (told.prefill_node, told.decode_node) == ("node-of-p", "node-of-d")
    assert (told.prompt_tokens, told.hit_tokens) == (100, 64)
    assert told.read.path is not None and told.rules.count("/") == 2
    assert assignment == told
    assert "p0" in (await submitted.explain()).text
    await pair.finish("r", 1)
    assert (await submitted.done(5)).state is TicketState.DONE
    assert await submitted.assigned(5) == told, "of a request that is done it is still known who had it"
    assert daemon.engine.calls["Submit"] == 1


async def test_the_same_request_id_again_is_the_same_request(daemon: SchedulingDaemon, client: AsyncClient) -> None:
    first, second = await client.submit("r", MODEL, 100), await client.submit("r", MODEL, 100)
    await Pair(client).until_given("r")
    assert await first.assigned(5) == await second.assigned(5)


async def test_several_tasks_wait_for_one_request_and_one_of_them_asks(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    pair = Pair(client)
    waits = [asyncio.create_task(submitted.assigned(5)) for _ in range(20)]
    waits.append(asyncio.create_task(submitted.assigned(0.05)))
    with pytest.raises(
        TimedOut, match=r"r is not assigned in time: request r was last known to be WAITING, attempt \d, by"
    ):
        await waits.pop()
    assert daemon.engine.most["GetTicket"] == 1
    waits.pop().cancel()
    await pair.until_given("r")
    assert len(set(await asyncio.gather(*waits))) == 1


async def test_a_change_is_told_once_it_is_there(daemon: SchedulingDaemon, client: AsyncClient) -> None:
    submitted = await client.submit("r", MODEL, 100)
    pair = Pair(client)
    with pytest.raises(TimedOut, match="r is not changed in time"):
        await submitted.change(0.05)
    before = submitted.ticket
    await pair.until_given("r")
    assert (await submitted.change(5)).state is TicketState.ASSIGNED
    assert (await submitted.change(5, known=before)).state is TicketState.ASSIGNED
    daemon.office.lose_group("p", pair.prefill.boot_id)
    assert (await submitted.change(5)).state is TicketState.WAITING
    assert (await pair.until_given("r")).attempt > 1


async def test_a_request_that_is_withdrawn_is_revoked_and_ends_all_waits(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    pair = Pair(client)
    await pair.until_given("r")
    waiting = asyncio.create_task(submitted.done(5))
    await asyncio.sleep(0.02)
    assert (await submitted.withdraw()).state is TicketState.WITHDRAWN
    with pytest.raises(RequestWithdrawn, match="request r, attempt 1: its client has left it"):
        await waiting
    assert len(await pair.pull()) == 2 and not pair.decode.held
    assert (await submitted.change(5)).state is TicketState.WITHDRAWN
    assert (await submitted.withdraw()).state is TicketState.WITHDRAWN


async def test_a_request_that_the_scheduler_gave_up_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", wait_max_ns=50_000_000) as (_, client):
        submitted = await client.submit("r", MODEL, 100)
        with pytest.raises(RequestFailed, match=r"request r, attempt \d: "):
            await submitted.assigned(5)
        assert submitted.ticket.why


async def test_what_is_out_of_bounds_is_refused_before_it_is_sent(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    with pytest.raises(BadRequest, match="prompt_tokens is 0, must be 1 to"):
        await client.submit("r", MODEL, 0)
    with pytest.raises(BadRequest, match="hit_tokens is 101, must be 0 to 100"):
        await client.submit("r", MODEL, 100, hit_tokens=101)
    with pytest.raises(BadRequest, match="cached is 17, must be 0 to 16"):
        await client.submit("r", MODEL, 100, cached=[CachedPrefix("n", 0)] * 17)
    assert not daemon.engine.calls
    with pytest.raises(UnknownModel):
        await client.submit("r", "another", 100)
    daemon.engine.refusals.append(daemon_errors.NoScheduler("this node belongs to no scheduler"))
    with pytest.raises(NoScheduler):
        await client.submit("r", MODEL, 100)


async def test_a_router_of_its_own_asks_who_reads(client: AsyncClient) -> None:
    with pytest.raises(UnknownPeer):
        await client.choose_path(MODEL, "never", "heard", 10)
    await Pair(client).pull()
    choice = await client.choose_path(MODEL, "node-of-p", "node-of-d", 64)
    assert choice.path in (ReadPath.PE, ReadPath.DE)


async def test_a_full_queue_is_the_callers_to_decide_unless_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "PAUSE_MAX_S", 0.1)
    async with serving(tmp_path / "s", waiting_max=1) as (_, client):
        await client.submit("first", MODEL, 100)
        with pytest.raises(QueueFull) as caught:
            await client.submit("second", MODEL, 100)
        assert int(caught.value.details["retry_after_ms"]) > 0
        waiting = asyncio.create_task(client.submit("second", MODEL, 100, wait=True))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await Pair(client).until_given("first")
        assert (await waiting).request_id == "second"


async def test_a_new_scheduler_is_given_the_request_again_with_its_attempt_and_nobody_begins_anew(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100, hit_tokens=64, tenant="t")
    pair = Pair(client)
    await pair.until_given("r")
    await submitted.assigned(5)
    waiting = asyncio.create_task(submitted.done(10))
    await asyncio.sleep(0.02)
    daemon.restart_scheduler()
    for _ in range(20):
        assert not await pair.pull(), "both go on with what they hold"
        await asyncio.sleep(2 * SETTLE_S / 10)
    sent = daemon.engine.heard["Submit"]
    assert (sent.request_id, sent.after_attempt, sent.hit_tokens, sent.tenant) == ("r", 1, 64, "t")
    await pair.finish("r", 1)
    assert (await waiting).attempt == 1
    assert daemon.engine.calls["Submit"] == 2


async def test_a_new_scheduler_gives_out_what_nobody_holds_under_a_higher_attempt(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    await Pair(client).until_given("r")
    first = await submitted.assigned(5)
    daemon.restart_scheduler()
    others = Pair(client)
    waiting = asyncio.create_task(submitted.change(5, known=submitted.ticket))
    assert (await others.until_given("r")).attempt > first.attempt
    await waiting
    ticket = submitted.ticket
    while ticket.state is not TicketState.ASSIGNED:
        ticket = await submitted.change(5)
    assert ticket.attempt > first.attempt


async def test_a_request_that_no_engine_has_had_is_not_lost_with_its_scheduler(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    waiting = asyncio.create_task(submitted.assigned(5))
    await asyncio.sleep(0.02)
    daemon.restart_scheduler()
    given = await Pair(client).until_given("r")
    assert given == await waiting and given.attempt > 1, "some engine might have had it"


async def test_withdrawing_reaches_engines_whose_scheduler_started_again(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    pair = Pair(client)
    await pair.until_given("r")
    await submitted.assigned(5)
    daemon.restart_scheduler()
    assert (await submitted.withdraw(5)).state is TicketState.WITHDRAWN
    told = await pair.pull()
    assert len(told) == 2 and not any(isinstance(news, Assignment) for news in told)
    assert not pair.prefill.held and not pair.decode.held


async def test_a_request_that_this_very_scheduler_has_forgotten_is_not_run_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", ended_max=1) as (daemon, client):
        submitted, other = await client.submit("r", MODEL, 100), await client.submit("other", MODEL, 100)
        pair = Pair(client)
        for name in ("r", "other"):
            await pair.finish(name, (await pair.until_given(name)).attempt)
        forgotten = "it ended since then, so long ago that the scheduler has forgotten how"
        with pytest.raises(UnknownRequest, match=forgotten):
            await submitted.done(5)
        with pytest.raises(UnknownRequest, match=forgotten):
            await submitted.withdraw()
        assert (await other.done(5)).state is TicketState.DONE
        assert daemon.engine.calls["Submit"] == 2
        daemon.restart_scheduler()
        with pytest.raises(TimedOut):
            await submitted.done(0.2)
        assert daemon.engine.calls["Submit"] == 3, "another one than it was given to may not have known it at all"


async def test_a_lost_answer_to_submit_is_asked_for_again(daemon: SchedulingDaemon, client: AsyncClient) -> None:
    daemon.engine.cut.extend(["Submit", "GetTicket"])
    submitted = await client.submit("r", MODEL, 100)
    pair = Pair(client)
    waiting = asyncio.create_task(submitted.assigned(5))
    await pair.until_given("r")
    assert (await waiting).attempt == 1


async def test_while_no_scheduler_answers_waits_go_on_until_their_time_and_say_what_was_known(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    daemon.engine.unreachable = True
    began_s = time.monotonic()
    with pytest.raises(TimedOut, match=r"r is not assigned in time: .* WAITING.* SCHEDULER_UNREACHABLE") as caught:
        await submitted.assigned(0.4)
    assert 0.3 < time.monotonic() - began_s < 2
    assert 2 <= int(caught.value.details["tries"]) <= 10, "pauses grow"
    waiting = asyncio.create_task(submitted.assigned(10))
    await asyncio.sleep(0.1)
    daemon.engine.unreachable = False
    await Pair(client).until_given("r")
    assert (await waiting).attempt == 1
    daemon.engine.unreachable = True
    with pytest.raises(TimedOut, match="no scheduler has heard of it"):
        await client.submit("s", MODEL, 100, timeout_s=0.1)
    with pytest.raises(SchedulerUnreachable):
        await Pair(client).pull()


async def test_a_daemon_that_starts_again_loses_no_request_and_leaves_the_clients_session_alone(
    daemon: SchedulingDaemon, client: AsyncClient, tmp_path: Path
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    waits = [asyncio.create_task(submitted.assigned(10)) for _ in range(3)]
    others = [asyncio.create_task((await client.submit(f"r{n}", MODEL, 100)).assigned(10)) for n in range(3)]
    await asyncio.sleep(0.05)
    books = daemon.office
    await daemon.stop()
    await asyncio.sleep(0.1)
    successor = await SchedulingDaemon(tmp_path / "s", books).start()
    leaders = await AsyncClient.connect(successor.endpoint)
    pair = Pair(leaders)
    for request in ("r", "r0", "r1", "r2"):
        await pair.until_given(request)
    assert {told.attempt for told in await asyncio.gather(*waits, *others)} == {1}
    assert client.is_gone, "whoever has registered something over it is to see that"
    assert len(successor.sessions.tokens) == 2, "one session for all that wait, and the leaders'"
    await client.reconnect()
    await pair.finish("r", 1)
    assert (await submitted.done(5)).state is TicketState.DONE
    await asyncio.sleep(0.05)
    assert len(successor.sessions.tokens) == 2, "the client's own is used again, the other one is closed"
    await leaders.close()
    await successor.stop()


async def test_closing_the_client_ends_its_waits_at_once(daemon: SchedulingDaemon, client: AsyncClient) -> None:
    submitted = await client.submit("r", MODEL, 100)
    waiting = asyncio.create_task(submitted.done(60))
    await asyncio.sleep(0.02)
    began_s = time.monotonic()
    await client.close()
    with pytest.raises(DaemonGone):
        await waiting
    with pytest.raises(DaemonGone):
        await submitted.done(60)
    assert time.monotonic() - began_s < 2


async def test_the_words_of_a_scheduler_that_leads_no_more_do_not_count(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    daemon.restart_scheduler(epoch=7)
    submitted = await client.submit("r", MODEL, 100)
    daemon.restart_scheduler(epoch=3)
    with pytest.raises(TimedOut, match="a scheduler speaks for epoch 3, 7 is known"):
        await submitted.assigned(0.3)
    daemon.restart_scheduler(epoch=8)
    waiting = asyncio.create_task(submitted.assigned(5))
    assert await Pair(client).until_given("r") == await waiting


async def test_many_requests_share_few_calls_and_each_has_its_turn(
    daemon: SchedulingDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "LONG_POLLS_MAX", 4)
    monkeypatch.setattr(desk, "SHORT_CALLS_MAX", 3)
    monkeypatch.setattr(desk, "CROWDED_POLL_S", 0.02)
    async with await AsyncClient.connect(daemon.endpoint) as few:
        made = await asyncio.gather(*(few.submit(f"r{n}", MODEL, 100) for n in range(30)))
        waits = [asyncio.create_task(submitted.assigned(10)) for submitted in made]
        await asyncio.sleep(0.05)
        pair = Pair(client)
        while len(pair.decode.held) < 30:
            await pair.pull()
        assert {told.attempt for told in await asyncio.gather(*waits)} == {1}
    assert daemon.engine.most["GetTicket"] <= 4 and daemon.engine.most["Submit"] <= 3


async def test_a_crowd_that_nobody_answers_asks_seldom_and_is_woken_by_the_first_answer() -> None:
    crowd = desk.Crowd()
    clock = asyncio.get_running_loop().time
    pauses = [asyncio.create_task(crowd.pause(0.06, 60.0)) for _ in range(1_000)]
    await asyncio.sleep(0.2)
    assert sum(pause.done() for pause in pauses) < 400
    began_s = clock()
    crowd.wake()
    await asyncio.gather(*pauses)
    assert clock() - began_s < 1
    assert desk.retry_after_s(QueueFull("full", details={"retry_after_ms": "1500"})) == 1.5
    assert desk.retry_after_s(QueueFull("full")) == 0.0


def test_numbers_that_a_newer_scheduler_may_say_are_read_as_the_safest() -> None:
    from kvmover_client.scheduling_wire import read_from, ticket_from
    from kvmover_proto import scheduler_pb2

    future = scheduler_pb2.TicketReply(request_id="r", state=99, attempt=2)  # type: ignore[arg-type]
    assert ticket_from(future) == Ticket("r", TicketState.WAITING, 2)
    unknown = scheduler_pb2.ReadChoice(path=77, parts=[scheduler_pb2.PartOfRead(node="a", first=0, stop=1)])  # type: ignore[arg-type]
    assert read_from(unknown).path is ReadPath.AUTO and not read_from(unknown).parts
    numbers = SimpleNamespace(**dict(scheduler_pb2.TicketState.items()))
    assert (numbers.WAITING, numbers.ASSIGNED, numbers.DONE) == (1, 2, 3)
    assert (TicketState.FAILED.value, TicketState.WITHDRAWN.value) == (numbers.TICKET_FAILED, numbers.WITHDRAWN)
    assert {role.name: role.value for role in Role} == {n: v for n, v in scheduler_pb2.Role.items() if v}


async def test_a_client_that_was_closed_and_connected_again_is_as_patient_as_a_new_one(
    daemon: SchedulingDaemon, client: AsyncClient
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    await client.close()
    await client.reconnect()
    waiting = asyncio.create_task(submitted.assigned(10))
    daemon.engine.unreachable = True
    await asyncio.sleep(0.1)
    daemon.engine.unreachable = False
    await Pair(client).until_given("r")
    assert (await waiting).attempt == 1


async def test_a_daemon_that_starts_twice_leaves_no_session_of_its_first_start(
    daemon: SchedulingDaemon, client: AsyncClient, tmp_path: Path
) -> None:
    submitted = await client.submit("r", MODEL, 100)
    waiting = asyncio.create_task(submitted.done(10))
    books = daemon.office
    await daemon.stop()
    for _ in range(2):
        daemon = await SchedulingDaemon(tmp_path / "s", books).start()
        async with asyncio.timeout(5):
            while not daemon.engine.calls["GetTicket"]:  # noqa: ASYNC110 - the kit counts, and tells nobody
                await asyncio.sleep(0.01)
        assert len(daemon.sessions.tokens) == 1
        await daemon.stop()
    daemon = await SchedulingDaemon(tmp_path / "s", books).start()
    async with await AsyncClient.connect(daemon.endpoint) as leaders:
        pair = Pair(leaders)
        await pair.until_given("r")
        await pair.finish("r", 1)
        assert (await waiting).state is TicketState.DONE
    await daemon.stop()
