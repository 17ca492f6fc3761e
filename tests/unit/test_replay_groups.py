"""Groups, board and router of a scheduled replay: a scripted scheduler gives work, scripted engines do it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvmover_client import AsyncClient, DaemonGone, Path, SchedulerUnreachable, UnknownRequest
from kvmover_client.replay import groups, router
from kvmover_client.replay.board import Board, Failed
from kvmover_client.replay.engines import Decoded, DecodeEngine, Prefilled, PrefillEngine
from kvmover_client.replay.groups import DecodeGroup, Place, PrefillGroup
from kvmover_client.replay.pages import PageAllocator
from kvmover_client.replay.request import AttemptFailed, Request
from kvmover_client.replay.router import Router
from kvmover_client.replay.scheduled import ScheduledOptions, agents_of
from kvmover_client.replay.tokens import chain
from kvmover_client.replay.trace import Session, Turn
from kvmover_client.scheduling import (
    Assignment,
    Delivery,
    Identity,
    ReadChoice,
    Revoked,
    Ticket,
    TicketState,
    Work,
    WorkReport,
)
from kvmover_client.words import LookupResult, ReaderDepth

REQUEST = Request("r", [bytes([n]) * 32 for n in range(4)], chain(np.zeros(256, dtype=np.uint32)), 200, 64)
READ = ReadChoice(Path.DE)


def assignment(request_id: str = "r", attempt: int = 1, engine: str = "n/0") -> Assignment:
    return Assignment(request_id, attempt, engine, "n", engine, "d", READ, 200, 128, "C2/low/tie")


class _Scheduler:
    """What a leader's pulls are answered: one list of news a pull, then nothing new."""

    def __init__(self, *news: list[Assignment | Revoked] | Exception) -> None:
        self.news = deque(news)
        self.reports: list[WorkReport] = []
        self._told = 0

    async def pull_work(self, report: WorkReport, *, timeout_s: float = 0) -> Work:
        self.reports.append(report)
        if len(self.reports) == 1:
            return Work(Identity("s"), (), 0.001, tell_held=True)
        answer = self.news.popleft() if self.news else []
        if isinstance(answer, Exception):
            raise answer
        deliveries = tuple(Delivery(self._told + number, what) for number, what in enumerate(answer, 1))
        self._told += len(answer)
        return Work(Identity("s"), deliveries, 0.001)

    @property
    def done(self) -> list[tuple[str, int]]:
        return [done for report in self.reports for done in report.done]


class _Engine:
    """Either engine: does as it is told, once an attempt."""

    def __init__(self, outcome: Callable[[], object] | None = None) -> None:
        self.kv = SimpleNamespace(allocator=PageAllocator(10, seed=0))
        self.model = SimpleNamespace(layout=SimpleNamespace(block_tokens=64))
        self.unquiet_pages, self.tokens_per_s = 1, 77
        self.calls: list[tuple[object, ...]] = []
        self.go = asyncio.Event()
        self.cancelled = 0
        self._outcome = outcome

    async def prefill(self, request: Request, attempt: int, decode_node: str, read: ReadChoice) -> object:
        self.calls.append((request.request_id, attempt, decode_node, read))
        return await self._work(Prefilled())

    async def decode(self, request: Request, attempt: int, whole_now: Callable[[], object]) -> object:
        self.calls.append((request.request_id, attempt))
        whole_now()
        return await self._work(Decoded())

    async def _work(self, seen: object) -> object:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._outcome is not None:
            self._outcome()
        return seen


def prefill_group(scheduler: _Scheduler, engine: _Engine, board: Board) -> PrefillGroup:
    place = Place("n", cast(AsyncClient, scheduler))
    return PrefillGroup(place, {"n/0": cast(PrefillEngine, engine)}, board, "m")


def decode_group(scheduler: _Scheduler, engine: _Engine, board: Board) -> DecodeGroup:
    place = Place("d", cast(AsyncClient, scheduler))
    return DecodeGroup(place, {"n/0": cast(DecodeEngine, engine)}, board, "m")


@asynccontextmanager
async def leading(group: PrefillGroup | DecodeGroup) -> AsyncIterator[None]:
    task = asyncio.create_task(group.lead())
    try:
        async with asyncio.timeout(5.0):
            yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 (what is waited for says so to nobody)
        await asyncio.sleep(0.001)


async def test_what_is_assigned_is_prefilled_and_told_to_router_and_scheduler() -> None:
    board, engine, scheduler = Board(), _Engine(), _Scheduler([assignment()])
    entry = board.open(REQUEST)
    group = prefill_group(scheduler, engine, board)
    async with leading(group):
        await until(lambda: bool(engine.calls))
        assert engine.calls == [("r", 1, "d", READ)]
        await until(lambda: scheduler.reports[-1].engines[0].requests == 1)
        load = scheduler.reports[-1].engines[0]
        assert (load.engine, load.prompt_tokens, load.tokens_per_s) == ("n/0", 200, 77)
        assert load.free_hbm_tokens == (10 - 1 - 4) * 64, "less pages that never became quiet, and those of the request"
        assert not scheduler.done
        engine.go.set()
        await until(lambda: ("r", 1) in scheduler.done)
        await until(lambda: scheduler.reports[-1].engines[0].requests == 0)
    assert not entry.over.is_set(), "the decode engine has not finished it"
    entry.decoded(1, Decoded())
    assert entry.over.is_set() and [finished.attempt for finished in entry.finished] == [1]
    assert group.by_rule == {"C2/low/tie": 1}


async def test_the_decode_side_says_when_its_kv_is_whole() -> None:
    board, engine, scheduler = Board(), _Engine(), _Scheduler([assignment()])
    board.open(REQUEST)
    group = decode_group(scheduler, engine, board)
    async with leading(group):
        await until(lambda: bool(engine.calls))
        (held,) = group._leader.held
        assert held.prefill_done
        engine.go.set()
        await until(lambda: ("r", 1) in scheduler.done)


async def test_what_is_revoked_is_cancelled_and_never_said_to_be_done() -> None:
    board, engine = Board(), _Engine()
    scheduler = _Scheduler([assignment()], [], [Revoked("r", 1)], [assignment(attempt=2)])
    entry = board.open(REQUEST)
    group = prefill_group(scheduler, engine, board)
    async with leading(group):
        await until(lambda: engine.cancelled == 1 and len(engine.calls) == 2)
        engine.go.set()
        await until(lambda: bool(scheduler.done))
    assert set(scheduler.done) == {("r", 2)} and group.revoked == 1
    assert entry.failures.empty(), "who is told to stop has not failed"


@pytest.mark.parametrize(
    ("error", "retryable"), [(AttemptFailed("lost", retryable=True), True), (DaemonGone("x"), False)]
)
async def test_what_an_engine_could_not_do_its_router_hears(error: Exception, retryable: bool) -> None:
    def fail() -> None:
        raise error

    board, engine, scheduler = Board(), _Engine(fail), _Scheduler([assignment(attempt=3)])
    entry = board.open(REQUEST)
    engine.go.set()
    async with leading(prefill_group(scheduler, engine, board)):
        failure = await entry.failures.get()
    assert failure.attempt == 3 and "n: " in failure.message and failure.retryable is (retryable or error.retryable)
    assert not scheduler.done


async def test_an_attempt_that_nobody_waits_for_any_more_is_finished_at_once() -> None:
    engine, scheduler = _Engine(), _Scheduler([assignment("gone")])
    async with leading(prefill_group(scheduler, engine, Board())):
        await until(lambda: ("gone", 1) in scheduler.done)
    assert not engine.calls


async def test_a_scheduler_that_is_away_for_a_while_is_asked_again_and_a_daemon_that_is_gone_ends_it() -> None:
    away = SchedulerUnreachable("nobody leads")
    scheduler = _Scheduler(away, [assignment()], DaemonGone("gone"))
    board, engine = Board(), _Engine()
    board.open(REQUEST)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(5.0):
            await prefill_group(scheduler, engine, board).lead()
    assert raised.group_contains(DaemonGone) and engine.cancelled == 1, "what runs ends with it"


async def test_pulls_that_fail_all_the_time_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PULL_FAILURES_MAX", 3)
    scheduler = _Scheduler(*[SchedulerUnreachable("nobody leads")] * 9)
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(5.0):
            await prefill_group(scheduler, _Engine(), Board()).lead()
    assert len(scheduler.reports) == 1 + 3


class _Ticket:
    """A request at the scheduler."""

    def __init__(self) -> None:
        self.ticket = Ticket("r", TicketState.ASSIGNED, 1)
        self.withdrawn = 0
        self.is_done = asyncio.Event()

    async def done(self) -> Ticket:
        await self.is_done.wait()
        return self.ticket

    async def withdraw(self) -> Ticket:
        self.withdrawn += 1
        raise UnknownRequest("ended long ago")


class _Node:
    """A node's client as the router uses it."""

    def __init__(self, board: Board, play: Callable[[str, Board, _Ticket], None]) -> None:
        self.submitted: list[tuple[str, dict[str, Any]]] = []
        self.tickets: list[_Ticket] = []
        self.queue_bytes = 0
        self._board, self._play = board, play

    async def lookup(self, model: object, keys: list[bytes]) -> LookupResult:
        return LookupResult(min(2, len(keys)), min(1, len(keys)), reader=ReaderDepth(self.queue_bytes, 0))

    async def submit(self, request_id: str, model: str, prompt_tokens: int, **more: Any) -> _Ticket:
        self.submitted.append((request_id, more))
        ticket = _Ticket()
        self.tickets.append(ticket)
        self._play(request_id, self._board, ticket)
        return ticket


def _router(play: Callable[[str, Board, _Ticket], None]) -> tuple[Router, _Node]:
    board = Board()
    node = _Node(board, play)
    model = cast(Any, SimpleNamespace(manifest=SimpleNamespace(model_id="m"), block_bytes=100))
    return Router([Place("n", cast(AsyncClient, node))], model, board), node


def _finish(request_id: str, board: Board, ticket: _Ticket, *, attempt: int = 1) -> None:
    entry = board.find(request_id)
    assert entry is not None
    entry.prefilled(attempt, Prefilled(found_blocks=2, hit_blocks=2, ready_at_s=1e9))
    entry.decoded(attempt, Decoded(durable_keys=REQUEST.keys[:2]))
    ticket.is_done.set()


async def test_a_turn_is_submitted_with_its_hits_and_where_they_are() -> None:
    made, node = _router(_finish)
    routed = await made.play(REQUEST, "s", 5)
    assert routed.finished is not None and routed.errors == [] and routed.ready_s > 0
    ((request_id, more),) = node.submitted
    assert request_id == "r.1" and more["hit_tokens"] == 128 and more["session"] == "s"
    assert [(prefix.where, prefix.tokens) for prefix in more["cached"]] == [("n", 64)]
    assert made.stored.prefix_blocks(REQUEST.keys) == 2


async def test_what_a_busy_node_is_about_to_push_out_of_its_pool_is_not_said_to_be_there() -> None:
    made, node = _router(_finish)
    node.queue_bytes = 1
    await made.play(REQUEST, "s", 0)
    ((_, more),) = node.submitted
    assert more["cached"] == [] and more["hit_tokens"] == 128


async def test_what_failed_is_left_and_submitted_under_another_name() -> None:
    def fail_once(request_id: str, board: Board, ticket: _Ticket) -> None:
        if request_id == "r.1":
            entry = board.find(request_id)
            assert entry is not None
            entry.failed(Failed(1, "n: lost", retryable=True))
        else:
            _finish(request_id, board, ticket)

    made, node = _router(fail_once)
    routed = await made.play(REQUEST, "s", 0)
    assert [name for name, _ in node.submitted] == ["r.1", "r.2"] and node.tickets[0].withdrawn == 1
    assert routed.failures == ["try 1: n: lost"] and routed.errors == []


async def test_a_failure_of_what_the_scheduler_had_given_up_is_none() -> None:
    def replaced(request_id: str, board: Board, ticket: _Ticket) -> None:
        ticket.ticket = Ticket("r", TicketState.ASSIGNED, 2)
        entry = board.find(request_id)
        assert entry is not None
        entry.failed(Failed(1, "stale", retryable=False))
        asyncio.get_running_loop().call_later(0.01, lambda: _finish(request_id, board, ticket, attempt=2))

    made, node = _router(replaced)
    routed = await made.play(REQUEST, "s", 0)
    assert routed.finished is not None and routed.finished.attempt == 2 and routed.failures == []
    assert node.tickets[0].withdrawn == 0


async def test_a_request_that_is_done_twice_is_an_error() -> None:
    def twice(request_id: str, board: Board, ticket: _Ticket) -> None:
        for attempt in (1, 2):
            _finish(request_id, board, ticket, attempt=attempt)

    made, _ = _router(twice)
    routed = await made.play(REQUEST, "s", 0)
    assert routed.finished is None and routed.errors == ["try 1: finished more than once, under attempts 1, 2"]


async def test_engines_and_scheduler_must_agree_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "DONE_S", 0.01)
    made, node = _router(lambda request_id, board, ticket: ticket.is_done.set())
    routed = await made.play(REQUEST, "s", 0)
    assert routed.finished is None and "engines have finished 0 attempts" in routed.errors[0]
    assert node.tickets[0].withdrawn == 1


def test_agents_play_the_sessions_again_and_again_and_share_nothing() -> None:
    sessions = [Session("a", 64, (Turn(100, 10, 0),)), Session("b", 128, (Turn(90, 5, 0),))]
    found = agents_of(sessions, 5)
    assert [session.name for session in found] == ["a", "b", "a#1", "b#1", "a#2"]
    assert all(session.shared_tokens == 0 for session in found)


@pytest.mark.parametrize(("nodes", "engines", "pages"), [(3, 1, 8), (3, 2, 4), (1, 1, 24), (12, 4, 1)])
def test_engines_have_pages_for_twice_their_share(nodes: int, engines: int, pages: int) -> None:
    some = {str(number): "unix:///x" for number in range(nodes)}
    options = ScheduledOptions(some, some, trace=cast(Any, None), engines=engines)
    assert options.pages_at_once == pages
