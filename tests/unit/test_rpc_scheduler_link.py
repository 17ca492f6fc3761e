"""The way to the scheduler that leads: found, followed, left, and never believed when another leads since."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from rpc_kit import until
from scheduler_rig import DEAD, Rig, rigs

from kvmover_proto import scheduler_pb2
from kvmoverd.core.errors import QueueFull, SchedulerUnreachable, ShuttingDown, TooBig
from kvmoverd.rpc.errors import DOMAIN, PassedOn, to_status
from kvmoverd.rpc.scheduler_link import MESSAGE_BYTES_MAX, PAUSE_S, SchedulerLink

TIMEOUT_S = 0.3


@asynccontextmanager
async def linked(*addresses: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[SchedulerLink]:
    link = SchedulerLink(lambda: addresses, timeout_s=timeout_s)
    try:
        yield link
    finally:
        await link.close()


def to(found: Sequence[Rig]) -> tuple[str, ...]:
    return tuple(rig.address for rig in found)


async def submit(link: SchedulerLink, **how: Any) -> scheduler_pb2.TicketReply:
    request = scheduler_pb2.SubmitRequest(request_id="r")
    return await link.ask(lambda stub, left_s: stub.Submit(request, timeout=left_s), **how)


async def wait_for_change(link: SchedulerLink, wait_s: float = 5.0) -> scheduler_pb2.TicketReply:
    request = scheduler_pb2.GetTicketRequest(request_id="r", wait_ms=int(wait_s * 1000))
    return await link.ask(lambda stub, left_s: stub.GetTicket(request, timeout=left_s), wait_s=wait_s)


async def boot_of(link: SchedulerLink) -> str:
    return (await submit(link)).scheduler.boot_id


async def forever() -> None:
    await asyncio.Event().wait()


async def test_who_answers_is_asked_again_and_known() -> None:
    async with rigs(2) as (first, second), linked(first.address, second.address) as link:
        first.epoch = 7
        assert [await boot_of(link) for _ in range(3)] == ["s1"] * 3
        assert (link.address, link.boot_id, link.epoch, link.calls["answered"]) == (first.address, "s1", 7, 3)
        assert 0 <= link.answered_ms < 1000
        assert second.calls.total() == 0


async def test_the_leader_that_is_named_is_asked_also_if_no_address_names_it() -> None:
    async with rigs(2) as (standby, leader), linked(standby.address) as link:
        standby.leads_not(leader.address)
        assert [await boot_of(link) for _ in range(2)] == ["s2"] * 2
        assert (standby.calls["Submit"], link.calls["not_leading"]) == (1, 1)


async def test_where_nobody_is_named_the_next_address_is_tried() -> None:
    async with rigs(2) as (standby, leader), linked(DEAD, *to([standby, leader])) as link:
        standby.leads_not()
        assert await boot_of(link) == "s2"
        assert link.address == leader.address


async def test_a_scheduler_that_stops_sends_its_callers_to_the_next_one() -> None:
    async with rigs(2) as found, linked(*to(found)) as link:
        found[0].refuses = ShuttingDown("this scheduler stops")
        assert await boot_of(link) == "s2"


async def test_two_that_name_each_other_are_not_asked_for_ever() -> None:
    async with rigs(2) as (one, other), linked(*to([one, other])) as link:
        one.leads_not(other.address)
        other.leads_not(one.address)
        with pytest.raises(SchedulerUnreachable, match="does not lead") as refused:
            await submit(link)
        assert 2 <= one.calls.total() + other.calls.total() <= 6
        assert int(refused.value.details["retry_after_ms"]) >= 1000 * PAUSE_S


async def test_without_a_scheduler_calls_fail_at_once_for_a_pause_and_then_try_again() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        await rig.stop()
        with pytest.raises(SchedulerUnreachable, match="UNAVAILABLE"):
            await submit(link)
        await rig.start(rig.port)
        with pytest.raises(SchedulerUnreachable) as refused:
            await submit(link)
        assert (refused.value.retryable, rig.calls.total()) == (True, 0), "nobody was asked in the pause"
        await asyncio.sleep(int(refused.value.details["retry_after_ms"]) / 1000)
        assert await boot_of(link) == "s1"
        assert link.calls["unreachable"] == 2


async def test_nobody_to_ask_is_no_reason_to_wait() -> None:
    async with linked("", "") as link:
        with pytest.raises(SchedulerUnreachable, match="no address of one is known"):
            await submit(link)
        with pytest.raises(SchedulerUnreachable, match="no address of one is known"):
            link.connection()


async def test_a_refusal_is_passed_on_word_by_word() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        rig.refuses = QueueFull("9 requests wait", retry_after_ms=250, waiting=9)
        with pytest.raises(PassedOn, match="9 requests wait") as refused:
            await submit(link)
        assert to_status(refused.value) == to_status(rig.refuses)
        assert link.calls["refused"] == 1


async def test_a_refusal_that_only_a_newer_scheduler_knows_is_passed_on_too() -> None:
    info = error_details_pb2.ErrorInfo(
        reason="NOVEL", domain=DOMAIN, metadata={"retryable": "true", "remedy": "think", "retry_after_ms": "7"}
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    rich = status_pb2.Status(code=code_pb2.Code.ABORTED, message="new words", details=[detail])
    async with rigs(1) as (rig,), linked(rig.address) as link:
        rig.status = rpc_status.to_status(rich)
        with pytest.raises(PassedOn) as refused:
            await submit(link)
        said = to_status(refused.value)
        assert (said.code, said.details) == (grpc.StatusCode.ABORTED, "new words")
        assert status_pb2.Status.FromString(said.trailing_metadata[0][1]) == rich


async def test_a_message_that_is_too_large_is_the_callers_fault() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        with pytest.raises(TooBig):
            await link.ask(
                lambda stub, left_s: stub.Withdraw(
                    scheduler_pb2.WithdrawRequest(request_id="x" * MESSAGE_BYTES_MAX), timeout=left_s
                )
            )
        assert await boot_of(link) == "s1"


async def test_who_speaks_for_a_lower_epoch_is_not_believed_and_the_next_one_is_asked() -> None:
    async with rigs(2) as (old, new), linked(*to([old, new])) as link:
        old.epoch = new.epoch = 4
        await submit(link)
        await old.stop()
        new.epoch = 5
        assert await boot_of(link) == "s2"
        await new.stop()
        await old.start(old.port)
        with pytest.raises(SchedulerUnreachable, match=r"epoch 4, 5 is known|UNAVAILABLE"):
            await submit(link)
        assert (link.calls["stale_epoch"], link.epoch, link.boot_id) == (1, 5, "s2")


async def test_an_answer_of_a_lower_epoch_is_replaced_by_one_of_the_leader() -> None:
    async with rigs(2) as (old, new), linked(*to([new, old])) as link:
        old.epoch, new.epoch = 4, 5
        await submit(link)
        new.leads_not(old.address)
        with pytest.raises(SchedulerUnreachable):
            await submit(link)
        new.refuses = None
        await asyncio.sleep(2 * PAUSE_S)
        assert await boot_of(link) == "s2"


async def test_a_scheduler_that_hangs_is_left_when_it_was_silent_twice() -> None:
    async with rigs(2) as (first, second), linked(*to([first, second])) as link:
        await submit(link)
        first.hold = forever
        began_s = time.monotonic()
        with pytest.raises(SchedulerUnreachable, match="DEADLINE_EXCEEDED"):
            await submit(link)
        assert TIMEOUT_S * 0.9 <= time.monotonic() - began_s < 3 * TIMEOUT_S
        with pytest.raises(SchedulerUnreachable):
            await submit(link)
        await asyncio.sleep(PAUSE_S)
        assert await boot_of(link) == "s2"


async def test_while_one_is_looked_for_each_address_gets_its_share_of_the_time() -> None:
    async with rigs(2) as (first, second), linked(*to([first, second])) as link:
        first.hold = forever
        began_s = time.monotonic()
        assert await boot_of(link) == "s2"
        assert TIMEOUT_S * 0.4 <= time.monotonic() - began_s < TIMEOUT_S


async def test_callers_in_a_hurry_do_not_make_a_scheduler_a_silent_one() -> None:
    async with rigs(2) as (first, second), linked(*to([first, second]), timeout_s=5.0) as link:
        await submit(link)
        first.hold = forever
        for _ in range(3):
            with pytest.raises(SchedulerUnreachable):
                await submit(link, left_s=0.02)
        first.hold = None
        assert await boot_of(link) == "s1"
        assert second.calls.total() == 0


async def test_a_call_that_waits_for_a_change_may_take_longer_than_others() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        rig.hold = lambda: asyncio.sleep(2 * TIMEOUT_S)
        assert (await wait_for_change(link)).scheduler.boot_id == "s1"


async def test_calls_that_wait_go_over_to_the_next_scheduler_when_theirs_dies() -> None:
    async with rigs(2) as (first, second), linked(*to([first, second])) as link:
        await submit(link)
        first.hold = forever
        waiting = [asyncio.ensure_future(wait_for_change(link)) for _ in range(8)]
        await until(lambda: first.calls["GetTicket"] == 8, "they wait")
        await first.stop()
        assert {(await each).scheduler.boot_id for each in waiting} == {"s2"}


async def test_calls_that_wait_go_over_as_soon_as_one_call_learns_that_another_leads() -> None:
    async with rigs(2) as (first, second), linked(first.address) as link:
        await submit(link)
        first.hold = forever
        waiting = [asyncio.ensure_future(wait_for_change(link)) for _ in range(8)]
        await until(lambda: first.calls["GetTicket"] == 8, "they wait")
        first.hold = None
        first.leads_not(second.address)
        assert await boot_of(link) == "s2"
        assert {(await each).scheduler.boot_id for each in waiting} == {"s2"}
        assert first.cancelled["GetTicket"] == 8


async def test_a_caller_that_goes_away_ends_its_call() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        rig.hold = forever
        waiting = asyncio.ensure_future(wait_for_change(link))
        await until(lambda: rig.calls["GetTicket"] == 1, "it waits")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: rig.cancelled["GetTicket"] == 1, "the scheduler hears of it")


async def test_when_the_daemon_stops_calls_end_and_there_are_no_others() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        await submit(link)
        rig.hold = forever
        waiting = asyncio.ensure_future(wait_for_change(link))
        await until(lambda: rig.calls["GetTicket"] == 1, "it waits")
        await link.close()
        with pytest.raises(SchedulerUnreachable):
            await waiting
        with pytest.raises(SchedulerUnreachable):
            await submit(link)


async def test_a_restarted_scheduler_is_found_at_its_address() -> None:
    async with rigs(1) as (rig,), linked(rig.address) as link:
        await submit(link)
        await rig.stop()
        rig.boot_id = "s9"
        await rig.start(rig.port)
        assert await boot_of(link) == "s9"
