"""A leader: what its scheduler says in which order, what is lost on the way, and what its engines hear of it, once each."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from client_scheduling_kit import MODEL, loads, serving

from kvmover_client import (
    Assignment,
    BadReport,
    BadRequest,
    Delivery,
    HeldAssignment,
    Identity,
    Leader,
    ReadChoice,
    Revoked,
    Role,
    SchedulerUnreachable,
    TicketState,
    TimedOut,
    Work,
    WorkReport,
)
from kvmover_client import Path as ReadPath
from kvmover_client import leader as leader_module

LOADS = loads("e0")


def given(request_id: str, attempt: int = 1) -> Assignment:
    return Assignment(request_id, attempt, "p0", "pn", "d0", "dn", ReadChoice(ReadPath.PE), 100, 64, "a/b/c")


class Scripted:
    """A scheduler that answers what a test has written down, and keeps every report. An error is raised instead."""

    def __init__(self, *answers: Work | Exception) -> None:
        self.answers = deque(answers)
        self.reports: list[WorkReport] = []

    async def pull_work(self, report: WorkReport, *, timeout_s: float = 10.0) -> Work:
        self.reports.append(report)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def last(self) -> WorkReport:
        return self.reports[-1]


def works(*told: Assignment | Revoked, first: int = 1, boot: str = "b1", epoch: int = 0) -> Work:
    deliveries = tuple(Delivery(number, what) for number, what in enumerate(told, first))
    return Work(Identity(boot, epoch), deliveries, 0.02)


def tells(boot: str = "b1", epoch: int = 0) -> Work:
    return Work(Identity(boot, epoch), (), 0.0, tell_held=True)


def leader(scheduler: Scripted, role: Role = Role.DECODE) -> Leader:
    return Leader(scheduler, "g", MODEL, role)


async def test_a_delivery_is_heard_only_with_the_pull_after_it_and_told_again_only_once() -> None:
    scheduler = Scripted(tells(), works(given("a"), given("b")), works(given("b"), given("c"), first=2), works())
    led = leader(scheduler)
    assert await led.pull(LOADS) == [given("a"), given("b")]
    assert scheduler.last.heard == 0, "the loads of this pull do not hold them"
    assert await led.pull(LOADS) == [given("c")]
    assert scheduler.last.heard == 2
    assert await led.pull(LOADS) == []
    assert scheduler.last.heard == 3
    assert [report.sequence for report in scheduler.reports] == [1, 2, 3, 4]
    assert {report.boot_id for report in scheduler.reports} == {led.boot_id}
    assert led.pull_again_s == 0.02
    assert leader(scheduler).boot_id != led.boot_id, "one that starts again is another"


async def test_what_is_done_is_said_until_it_was_heard_and_held_until_then() -> None:
    lost = SchedulerUnreachable("nobody")
    scheduler = Scripted(tells(), works(given("a"), given("b")), lost, tells("b2"), works(boot="b2"), works(boot="b2"))
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 1) and not led.finished("a", 2 + 16) and not led.finished("never", 1)
    assert [held.assignment.request_id for held in led.held] == ["b"]
    with pytest.raises(SchedulerUnreachable):
        await led.pull(LOADS)
    assert scheduler.last.done == (("a", 1),)
    assert await led.pull(LOADS) == []
    asked, told = scheduler.reports[-2:]
    assert (asked.scheduler_boot_id, asked.held, asked.done) == ("b1", (), (("a", 1),))
    assert (told.scheduler_boot_id, told.heard, told.done) == ("b2", 0, (("a", 1),))
    assert told.held == (HeldAssignment(given("a")), HeldAssignment(given("b")))
    assert not led.finished("a", 1), "it has been heard"
    await led.pull(LOADS)
    assert (scheduler.last.done, scheduler.last.held) == ((), ())
    assert [held.assignment.request_id for held in led.held] == ["b"]


async def test_what_is_finished_while_a_pull_is_under_way_goes_with_the_next() -> None:
    scheduler = Scripted(tells(), works(given("a"), given("b")), works(), works())
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 1)
    answering = scheduler.pull_work

    async def meanwhile(report: WorkReport, *, timeout_s: float = 10.0) -> Work:
        assert led.finished("b", 1)
        return await answering(report)

    scheduler.pull_work = meanwhile  # type: ignore[method-assign]
    await led.pull(LOADS)
    assert scheduler.last.done == (("a", 1),)
    scheduler.pull_work = answering  # type: ignore[method-assign]
    await led.pull(LOADS)
    assert scheduler.last.done == (("b", 1),)


async def test_an_engine_that_went_on_by_itself_may_finish_under_its_own_attempt() -> None:
    scheduler = Scripted(tells(), works(given("a"), given("b", 17)), works())
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 3) and led.whole("b", 18) and not led.whole("b", 16)
    await led.pull(LOADS)
    assert scheduler.last.done == (("a", 1),)
    assert led.held == (HeldAssignment(given("b", 17), prefill_done=True),)


async def test_a_revoked_attempt_is_told_once_and_nothing_of_it_is_said_any_more() -> None:
    scheduler = Scripted(
        tells(),
        works(given("a"), given("b")),
        works(Revoked("a", 1), Revoked("never", 3), Revoked("b", 0), first=3),
        works(Revoked("a", 1), first=3),
        works(),
    )
    led = leader(scheduler)
    await led.pull(LOADS)
    assert await led.pull(LOADS) == [Revoked("a", 1)]
    assert await led.pull(LOADS) == []
    assert not led.finished("a", 1) and led.finished("b", 1)
    await led.pull(LOADS)
    assert scheduler.last.done == (("b", 1),)


async def test_an_attempt_that_was_finished_when_it_was_revoked_is_nobodys_business() -> None:
    scheduler = Scripted(tells(), works(given("a")), works(Revoked("a", 1), first=2), works())
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 1)
    assert await led.pull(LOADS) == [] and not led.held


async def test_a_higher_attempt_takes_the_place_of_the_one_that_is_held_and_a_lower_one_is_ignored() -> None:
    again = works(given("a", 17), given("a", 1), Revoked("a", 1), first=2)
    scheduler = Scripted(tells(), works(given("a")), again)
    led = leader(scheduler)
    await led.pull(LOADS)
    assert await led.pull(LOADS) == [Revoked("a", 1), given("a", 17)]
    assert led.held == (HeldAssignment(given("a", 17)),)


async def test_a_new_scheduler_gives_an_engine_nothing_twice() -> None:
    scheduler = Scripted(
        tells(),
        works(given("a"), given("b")),
        works(),
        tells("b2"),
        works(given("a"), given("b"), given("c"), boot="b2"),
        works(boot="b2"),
    )
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 1)
    await led.pull(LOADS)
    assert await led.pull(LOADS) == [given("c")]
    await led.pull(LOADS)
    assert scheduler.last.done == (("a", 1),), "the new one does not know that it is over"


async def test_a_prefill_group_prefills_again_what_a_new_scheduler_wants_again() -> None:
    scheduler = Scripted(tells(), works(given("a")), works(), tells("b2"), works(given("a"), boot="b2"))
    led = leader(scheduler, Role.PREFILL)
    await led.pull(LOADS)
    assert led.prefilled("a", 1)
    await led.pull(LOADS)
    assert await led.pull(LOADS) == [given("a")], "its KV may be wanted on another node"


async def test_words_of_a_lower_epoch_are_ignored() -> None:
    late = works(given("z"), first=9, epoch=3)
    scheduler = Scripted(tells(epoch=4), works(given("a"), epoch=4), late, works(epoch=4))
    led = leader(scheduler)
    await led.pull(LOADS)
    assert led.finished("a", 1)
    assert await led.pull(LOADS) == [] and not led.held
    await led.pull(LOADS)
    assert (scheduler.last.heard, scheduler.last.done) == (1, (("a", 1),))


async def test_a_scheduler_that_never_has_enough_is_asked_again_later() -> None:
    scheduler = Scripted(*(tells(f"b{number}") for number in range(9)))
    led = leader(scheduler)
    assert await led.pull(LOADS) == []
    assert len(scheduler.reports) == 4 and led.pull_again_s > 0


async def test_failed_pulls_are_repeated_after_pauses_that_grow_up_to_a_bound() -> None:
    failures = [TimedOut("late") for _ in range(12)]
    scheduler = Scripted(*failures, SchedulerUnreachable("n", details={"retry_after_ms": "700"}), tells(), works())
    led = leader(scheduler)
    pauses = []
    for _ in failures:
        with pytest.raises(TimedOut):
            await led.pull(LOADS)
        pauses.append(led.pull_again_s)
    assert pauses == sorted(pauses) and pauses[0] < 0.1 and pauses[-1] == leader_module.PAUSE_MAX_S
    with pytest.raises(SchedulerUnreachable):
        await led.pull(LOADS)
    await led.pull(LOADS)
    assert led.pull_again_s == 0.02


async def test_a_pull_says_no_more_than_may_be_said_and_takes_no_more_than_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_module, "DONE_MAX", 2)
    monkeypatch.setattr(leader_module, "HELD_MAX", 3)
    monkeypatch.setattr(leader_module, "FINISHED_MAX", 2)
    four = works(given("a"), given("b"), given("c"), given("d"))
    scheduler = Scripted(tells(), four, works(given("d"), first=4), works(), works())
    led = leader(scheduler)
    assert await led.pull(LOADS) == [given("a"), given("b"), given("c")]
    assert led.finished("a", 1) and led.finished("b", 1) and led.finished("c", 1)
    assert await led.pull(LOADS) == [given("d")]
    assert (scheduler.last.heard, scheduler.last.done) == (3, (("a", 1), ("b", 1)))
    await led.pull(LOADS)
    assert scheduler.last.done == (("c", 1),)
    assert len(led._finished) == 2


async def test_a_group_has_one_role_and_one_pull_at_a_time() -> None:
    scheduler = Scripted(tells(), works(given("a")))
    led = leader(scheduler)
    with pytest.raises(BadRequest, match="group g is of role DECODE, this is for PREFILL"):
        led.prefilled("a", 1)
    for call in (leader(scheduler, Role.PREFILL).finished, leader(scheduler, Role.PREFILL).whole):
        with pytest.raises(BadRequest, match="is of role PREFILL"):
            call("a", 1)
    started, answered = asyncio.Event(), scheduler.pull_work

    async def slow(report: WorkReport, *, timeout_s: float = 10.0) -> Work:
        started.set()
        await asyncio.sleep(0.02)
        return await answered(report)

    scheduler.pull_work = slow  # type: ignore[method-assign]
    first = asyncio.create_task(led.pull(LOADS))
    await started.wait()
    with pytest.raises(BadRequest, match="group g is pulled for twice at once"):
        await led.pull(LOADS)
    assert await first == [given("a")]


async def test_a_pull_that_is_cancelled_loses_nothing() -> None:
    scheduler = Scripted(tells(), works(given("a")), works(given("a")))
    led = leader(scheduler)
    answering = scheduler.pull_work

    async def hangs(report: WorkReport, *, timeout_s: float = 10.0) -> Work:
        answer = await answering(report)
        await asyncio.sleep(0.05)
        return answer

    scheduler.pull_work = hangs  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(led.pull(LOADS), 0.07)
    scheduler.pull_work = answering  # type: ignore[method-assign]
    assert await led.pull(LOADS) == [given("a")]


async def test_loads_reach_the_scheduler_as_they_are_and_bad_ones_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (daemon, client):
        led = Leader(client, "g", MODEL, Role.PREFILL, boot_id="boot")
        await led.pull([replace(LOADS[0], requests=3, prompt_tokens=77, tokens_per_s=5)])
        sent = daemon.engine.heard["PullWork"]
        assert (sent.group, sent.model, sent.role, sent.boot_id) == ("g", MODEL, 1, "boot")
        (engine,) = sent.engines
        assert (engine.engine, engine.requests, engine.prompt_tokens, engine.tokens_per_s) == ("e0", 3, 77, 5)
        with pytest.raises(BadRequest, match="requests of e0 is -1, must be 0 to"):
            await led.pull([replace(LOADS[0], requests=-1)])
        with pytest.raises(BadReport):
            await led.pull([])
        await led.pull(LOADS)


@pytest.mark.parametrize("seed", range(3))
async def test_over_restarts_and_lost_answers_every_request_is_done_and_no_attempt_is_given_twice(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    async with serving(tmp_path / "s") as (daemon, client):
        sides = [
            (Leader(client, "p", MODEL, Role.PREFILL), loads("p0")),
            (Leader(client, "d", MODEL, Role.DECODE), loads("d0")),
        ]
        made = [await client.submit(f"r{number}", MODEL, 100) for number in range(20)]
        waits = [asyncio.create_task(submitted.done(20)) for submitted in made]
        begun: dict[tuple[str, str], list[int]] = {}
        for turn in range(800):
            if turn in (6, 60, 120):
                daemon.restart_scheduler()
            if turn < 200 and chance.random() < 0.2:
                daemon.engine.cut.append(chance.choice(["PullWork", "PullWork", "GetTicket", "Submit"]))
            for led, load in sides:
                with suppress(SchedulerUnreachable):
                    for news in await led.pull(load):
                        if isinstance(news, Assignment):
                            begun.setdefault((led.group, news.request_id), []).append(news.attempt)
            if turn % 3 == 0:
                finish_one(sides[0][0], sides[1][0])
            if turn >= 200:
                daemon.engine.cut.clear()
            if all(wait.done() for wait in waits):
                break
            await asyncio.sleep(0.003)
        assert {(await wait).state for wait in waits} == {TicketState.DONE}, f"seed {seed}"
        assert all(attempts == sorted(set(attempts)) for attempts in begun.values()), f"seed {seed}: {begun}"


def finish_one(prefill: Leader, decode: Leader) -> None:
    """The oldest request that both have under one attempt: prefilled first, decoded the next time."""
    for held in decode.held:
        one = held.assignment
        if held.prefill_done:
            assert decode.finished(one.request_id, one.attempt)
            return
        if prefill.prefilled(one.request_id, one.attempt):
            assert decode.whole(one.request_id, one.attempt)
            return


@pytest.mark.parametrize("role", list(Role))
async def test_what_is_given_back_is_said_until_it_was_heard_and_may_come_again_under_a_higher_attempt(
    role: Role,
) -> None:
    lost = SchedulerUnreachable("nobody answers")
    scheduler = Scripted(tells(), works(given("a")), lost, works(), works(given("a", 17), first=2))
    group = leader(scheduler, role)
    await group.pull(LOADS)
    assert group.failed("a", 1)
    assert group.held == ()
    with pytest.raises(SchedulerUnreachable):
        await group.pull(LOADS)
    assert await group.pull(LOADS) == []
    assert [report.failed for report in scheduler.reports[-2:]] == [(("a", 1),), (("a", 1),)]
    assert scheduler.last.done == ()
    assert await group.pull(LOADS) == [given("a", 17)]
    assert scheduler.last.failed == ()
    assert not group.failed("a", 1)
