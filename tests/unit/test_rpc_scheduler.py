"""The scheduler's calls through the engine API: who may make them, what goes on to the scheduler, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_kit import HERE, Engine, Kit, end_of, refused, rpc_kit, until
from scheduler_rig import DEAD, Rig, rigs

from kvmover_proto import common_pb2, scheduler_pb2
from kvmoverd import cli
from kvmoverd.core.errors import QueueFull
from kvmoverd.rpc.status_client import plain_status

CALLS: dict[str, Any] = {
    "Submit": scheduler_pb2.SubmitRequest(request_id="r", model="m", prompt_tokens=7, tenant="t"),
    "GetTicket": scheduler_pb2.GetTicketRequest(request_id="r", known_attempt=2),
    "Withdraw": scheduler_pb2.WithdrawRequest(request_id="r"),
    "Explain": scheduler_pb2.ExplainRequest(request_id="r"),
    "ChoosePath": scheduler_pb2.ChoosePathRequest(model="m", prefill_node="p", decode_node="d", hit_tokens=9),
    "PullWork": scheduler_pb2.PullWorkRequest(group="g", boot_id="b", sequence=3, heard=1),
}


@asynccontextmanager
async def relaying(home: Path, *, answers_in: str = "500ms") -> AsyncIterator[tuple[Rig, Kit, Engine]]:
    """A scheduler, a daemon and an engine."""
    async with rigs() as (rig,):
        rig.epoch = 3
        settings = {"addresses": [rig.address], "timeout": answers_in}
        async with rpc_kit(home, scheduler=settings) as kit:
            yield rig, kit, await kit.engine()


def assigned(number: int, request_id: str, attempt: int) -> scheduler_pb2.Delivery:
    return scheduler_pb2.Delivery(
        number=number, assigned=scheduler_pb2.Assignment(request_id=request_id, attempt=attempt)
    )


def revoked(number: int, request_id: str, attempt: int) -> scheduler_pb2.Delivery:
    return scheduler_pb2.Delivery(
        number=number, revoked=scheduler_pb2.AttemptRef(request_id=request_id, attempt=attempt)
    )


async def test_every_call_goes_to_the_scheduler_and_its_answer_comes_back(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, _, engine):
        rig.answers = {"Submit": {"request_id": "r", "attempt": 4}, "ChoosePath": {"why": "shorter"}}
        for method, request in CALLS.items():
            reply = await engine.ask(method, request)
            if method != "Explain":
                assert reply.scheduler == rig.identity
        assert (await engine.ask("Submit", CALLS["Submit"])).attempt == 4
        assert (await engine.ask("ChoosePath", CALLS["ChoosePath"])).why == "shorter"
        assert (await engine.ask("Explain", CALLS["Explain"])).text == "why"
        asked = {type(request): request for request in rig.requests}
        for method, request in CALLS.items():
            if method not in ("Explain", "PullWork"):
                assert asked[type(request)] == request


async def test_the_daemon_puts_its_own_name_into_a_pull(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, _, engine):
        await engine.ask("PullWork", scheduler_pb2.PullWorkRequest(group="g", boot_id="b", node="another"))
        (pulled,) = [request for request in rig.requests if isinstance(request, scheduler_pb2.PullWorkRequest)]
        assert (pulled.node, pulled.group, pulled.boot_id) == (HERE, "g", "b")


@pytest.mark.parametrize("names", [("", "b"), ("g", ""), ("g" * 257, "b"), ("g", "b" * 257), ("g" * (12 << 20), "b")])
async def test_a_group_without_a_proper_name_is_not_remembered(tmp_path: Path, names: tuple[str, str]) -> None:
    """It would be told with this node's reports when its leader goes: a few long ones are larger than a message may be."""
    group, boot_id = names
    async with relaying(tmp_path) as (rig, _, engine):
        pull = scheduler_pb2.PullWorkRequest(group=group, boot_id=boot_id)
        found = await refused(engine.ask("PullWork", pull))
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REPORT")
        assert rig.calls["PullWork"] == 0


@pytest.mark.parametrize("method", CALLS)
async def test_a_call_without_a_session_goes_nowhere(tmp_path: Path, method: str) -> None:
    async with relaying(tmp_path) as (rig, kit, _):
        found = await refused(getattr(kit.engine_stub, method)(CALLS[method], timeout=5.0))
        assert (found.code, found.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION")
        assert rig.calls.total() == 0


async def test_a_node_that_belongs_to_no_scheduler_says_so(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        for method, request in CALLS.items():
            found = await refused(engine.ask(method, request))
            assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_SCHEDULER")
            assert not found.retryable
        assert not (await kit.status()).HasField("scheduler")


async def test_while_no_scheduler_answers_calls_are_refused_with_a_time_to_come_again(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, scheduler={"addresses": [DEAD], "timeout": "200ms"}) as kit:
        engine = await kit.engine()
        for method, request in CALLS.items():
            found = await refused(engine.ask(method, request))
            assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_UNREACHABLE")
            assert found.retryable and int(found.facts["retry_after_ms"]) > 0
        status = (await kit.status()).scheduler
        assert (status.state, status.address, status.boot_id, status.answered_ms) == ("unreachable", DEAD, "", 0)
        assert status.why and status.calls["unreachable"] >= len(CALLS)


async def test_what_the_scheduler_refuses_a_call_with_comes_back_unchanged(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, _, engine):
        rig.refuses = QueueFull("7 requests wait", retry_after_ms=33)
        for method, request in CALLS.items():
            found = await refused(engine.ask(method, request))
            assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), method
            assert (found.message, found.facts["retry_after_ms"]) == ("7 requests wait", "33")
            assert found.facts["remedy"] == QueueFull.remedy and found.retryable


async def test_attempts_that_an_answer_ends_are_over_before_the_leader_hears_of_it(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, kit, engine):
        calls = {name: engine.assemble(name) for name in ("taken", "again", "kept")}
        await kit.until_live(lambda: len(kit.node.decode_side._waiting) == 3)
        rig.answers["PullWork"] = {
            "deliveries": [revoked(1, "taken", 1), assigned(2, "again", 2), assigned(3, "kept", 1)]
        }
        await engine.ask("PullWork", CALLS["PullWork"])
        assert list(kit.node.decode_side._waiting) == ["kept"]
        for name in ("taken", "again"):
            assert (await end_of(calls[name])).status.reason == common_pb2.STALE_ATTEMPT
            assert (await refused(engine.assemble(name))).reason == "STALE_ATTEMPT"
        heir = await kit.engine()
        second = heir.assemble("again", attempt=2)
        await kit.until_live(lambda: len(kit.node.decode_side._waiting) == 2)
        for call in (calls["kept"], second):
            call.cancel()
        await kit.everything_is_home()
        assert (await kit.status()).scheduler.fences == 2
        await engine.ask("PullWork", CALLS["PullWork"])
        assert (await kit.status()).scheduler.fences == 2, "what is told again is no news"


async def test_the_next_attempt_of_another_engine_begins_at_once_where_the_last_one_ran(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, kit, engine):
        heir = await kit.engine()
        first = engine.push(engine.plan("x"), 1)
        await kit.until_live(lambda: kit.node.requests.by_kind()["assemble"])
        assert (await refused(heir.push(heir.plan("x", attempt=2), 1))).reason == "REQUEST_TAKEN"
        rig.answers["PullWork"] = {"deliveries": [assigned(1, "x", 2)]}
        await heir.ask("PullWork", CALLS["PullWork"])
        second = heir.push(heir.plan("x", attempt=2), 3)
        assert (await end_of(first)).status.reason == common_pb2.STALE_ATTEMPT
        assert (await end_of(second)).status.reason == common_pb2.OK
        kit.node.cancel("x", 2, "")
        for driver in kit.node.requests.live():
            driver.stop()  # type: ignore[call-arg]
        await kit.everything_is_home()


async def test_a_ticket_that_is_waited_for_may_take_longer_than_other_calls(tmp_path: Path) -> None:
    async with relaying(tmp_path, answers_in="100ms") as (rig, _, engine):
        rig.hold = lambda: asyncio.sleep(0.3)
        reply = await engine.ask("GetTicket", scheduler_pb2.GetTicketRequest(request_id="r", wait_ms=2_000))
        assert reply.scheduler == rig.identity
        found = await refused(engine.ask("GetTicket", scheduler_pb2.GetTicketRequest(request_id="r")))
        assert found.reason == "SCHEDULER_UNREACHABLE"


async def test_calls_that_wait_leave_room_for_others(tmp_path: Path) -> None:
    async with relaying(tmp_path, answers_in="5s") as (rig, kit, engine):
        kit.daemon.scheduler._waits_max = 2
        held = asyncio.Event()
        rig.hold = held.wait
        long = scheduler_pb2.GetTicketRequest(request_id="r", wait_ms=5_000)
        waiting = [engine.ask("GetTicket", long) for _ in range(2)]
        await until(lambda: rig.calls["GetTicket"] == 2, "they wait")
        found = await refused(engine.ask("GetTicket", long))
        assert (found.reason, found.facts["retry_after_ms"]) == ("QUEUE_FULL", "100")
        submitting = engine.ask("Submit", CALLS["Submit"])
        await until(lambda: rig.calls["Submit"] == 1, "passed on")
        held.set()
        for call in (*waiting, submitting):
            await call
        await engine.ask("GetTicket", long)


async def test_a_full_server_lets_leaders_pull_and_clients_withdraw(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        settings = {"addresses": [rig.address]}
        async with rpc_kit(tmp_path, scheduler=settings, engine_api={"streams_max": 2}) as kit:
            engine = await kit.engine()
            filling = [engine.assemble(f"r{number}") for number in range(2)]
            await kit.until_live(lambda: len(kit.node.decode_side._waiting) == 2)
            assert (await refused(engine.ask("Submit", CALLS["Submit"]))).reason == "QUEUE_FULL"
            for method in ("PullWork", "Withdraw"):
                await engine.ask(method, CALLS[method])
            for call in filling:
                call.cancel()


async def test_a_pull_with_all_that_a_large_group_holds_goes_through(tmp_path: Path) -> None:
    held = scheduler_pb2.HeldAssignment(
        assignment=scheduler_pb2.Assignment(request_id="r" * 128, prefill_engine="p" * 100, decode_engine="d" * 100)
    )
    request = scheduler_pb2.PullWorkRequest(group="g", boot_id="b", held=[held] * 40_000)
    assert request.ByteSize() > 8 << 20
    async with relaying(tmp_path, answers_in="5s") as (rig, _, engine):
        await engine.ask("PullWork", request)
        assert len(rig.requests[-1].held) == 40_000


async def test_status_says_which_scheduler_answers(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (rig, kit, engine):
        await rig.reported(2)
        await engine.ask("Submit", CALLS["Submit"])
        found = plain_status(await kit.status())["scheduler"]
        assert (found["state"], found["address"], found["boot_id"]) == ("reports", rig.address, "s1")
        assert (found["epoch"], found["why"]) == (3, "")
        assert found["reports"] >= 2 and found["calls"] == {"answered": 1} and found["answered_ms"] < 1000


async def test_the_command_line_warns_of_a_scheduler_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for addresses, words in (([DEAD], f"warning: no scheduler answers: {DEAD}"), ([], "")):
        async with rpc_kit(tmp_path, scheduler={"addresses": addresses}) as kit:
            if addresses:
                await until(lambda kit=kit: DEAD in kit.daemon.scheduler.status().why, "tried")
            assert await asyncio.to_thread(cli.main, ["status", "--socket", str(kit.socket)]) == 0
            printed = capsys.readouterr().out
            assert words in printed and ("no scheduler answers" in printed) == bool(words)
