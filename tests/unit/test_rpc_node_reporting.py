"""What a daemon reports to the scheduler, how often, and what it does with the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from rpc_kit import HERE, Engine, Kit, end_of, refused, rpc_kit, until
from rpc_parts_kit import release, reservation
from scheduler_rig import DEAD, Rig, rigs

from kvmover_proto import common_pb2, scheduler_pb2
from kvmoverd.core.errors import SchedulerUnreachable
from kvmoverd.core.scheduling.reports import BadReport
from kvmoverd.core.shares import Depth
from kvmoverd.rpc.lost_groups import GRACE_S, LostGroups, PulledFor
from kvmoverd.rpc.node_reporting import EARLY_SHARE, LOOK_S, NodeReporter


@asynccontextmanager
async def reporting(home: Path, *found: Rig, answers_in: str = "500ms", **changed: Any) -> AsyncIterator[Kit]:
    """A daemon that has been answered once."""
    addresses = [rig.address for rig in found]
    async with rpc_kit(home, scheduler={"addresses": addresses, "timeout": answers_in}, **changed) as kit:
        await until(lambda: any(rig.reports for rig in found), "a report")
        yield kit


def fence(number: int, request_id: str, attempt: int) -> scheduler_pb2.Fence:
    return scheduler_pb2.Fence(number=number, request_id=request_id, attempt=attempt)


async def pull(engine: Engine, group: str = "g", boot_id: str = "b") -> Any:
    return await engine.ask("PullWork", scheduler_pb2.PullWorkRequest(group=group, boot_id=boot_id))


async def pull_on(engine: Engine) -> None:
    """Calls that are answered all the time."""
    while True:
        await pull(engine)
        await asyncio.sleep(0.02)


async def test_a_report_says_what_the_nodes_books_say(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        report = await rig.reported()
        pool = kit.daemon.config.pool
        assert (report.node, report.boot_id, report.draining, report.starved) == (
            HERE,
            kit.daemon.boot_id,
            False,
            False,
        )
        assert (report.buffer_bytes, report.buffer_free_bytes) == (pool.de_buffer_bytes, pool.de_buffer_bytes)
        assert (report.help_free_bytes, report.read_queue_bytes, report.silent_ns) == (pool.help_bytes, 0, 0)
        engine = await kit.engine()
        call = engine.push(engine.plan("x", blocks=2), 1)
        await kit.until_live(lambda: kit.node.requests.by_kind()["assemble"])
        taken = kit.node.services.room.uses()[1].taken_bytes
        report = await rig.reported(2)
        assert report.buffer_free_bytes == pool.de_buffer_bytes - taken < pool.de_buffer_bytes
        call.cancel()
        await kit.everything_is_home()


async def test_a_node_that_helps_nobody_has_no_room_for_others(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig, split={"helps": False}):
        assert (await rig.reported()).help_free_bytes == 0


async def test_numbers_of_reports_rise_also_over_streams(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig):
        await rig.reported(2)
        await rig.stop()
        await rig.start(rig.port)
        await rig.reported(2)
        sequences = [report.sequence for report in rig.reports]
        assert sequences == sorted(set(sequences)) and rig.streams >= 2


async def test_reports_come_as_often_as_the_scheduler_wants_them(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 60_000
        async with reporting(tmp_path, rig):
            await asyncio.sleep(0.1)
            assert len(rig.reports) == 1


async def test_a_scheduler_that_wants_them_without_a_pause_gets_them_with_one(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 0
        async with reporting(tmp_path, rig):
            before = len(rig.reports)
            await asyncio.sleep(0.2)
            assert 1 <= len(rig.reports) - before <= 0.2 / LOOK_S + 1


async def test_a_drain_is_told_long_before_the_next_report_is_due(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 400
        async with reporting(tmp_path, rig) as kit:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            kit.node.drain()
            assert (await rig.reported()).draining
            assert loop.time() - began_s < 0.4 * EARLY_SHARE + 4 * LOOK_S


async def test_reads_that_begin_and_end_are_told_long_before_the_next_report_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 400
        async with reporting(tmp_path, rig) as kit:
            reader, loop = kit.node.services.reader, asyncio.get_running_loop()
            for queue_bytes in (7, 0):
                began_s = loop.time()
                monkeypatch.setattr(reader, "depth", lambda queue_bytes=queue_bytes: Depth(queue_bytes, 1000, 0))
                assert (await rig.reported()).read_queue_bytes == queue_bytes
                assert loop.time() - began_s < 0.4 * EARLY_SHARE + 4 * LOOK_S


async def test_reads_that_come_and_go_all_the_time_are_no_reason_to_report_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 200
        async with reporting(tmp_path, rig) as kit:
            depths = itertools.cycle([Depth(7, 1000, 0), Depth(0, 1000, 0)])
            monkeypatch.setattr(kit.node.services.reader, "depth", lambda: next(depths))
            before = len(rig.reports)
            await asyncio.sleep(1.0)
            assert len(rig.reports) - before <= 4 + 1.0 / 0.2


async def test_fences_are_in_force_before_they_are_heard_and_told_until_then(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        engine = await kit.engine()
        waiting = engine.assemble("x")
        await kit.until_live(lambda: kit.node.decode_side._waiting)
        rig.fences = [fence(11, "x", 1), fence(12, "y", 3)]
        await until(lambda: rig.reports[-1].fences_heard == 12, "heard")
        assert (await end_of(waiting)).status.reason == common_pb2.STALE_ATTEMPT
        late = await refused(engine.assemble("y", attempt=3))
        assert (late.code, late.reason) == (grpc.StatusCode.ABORTED, "STALE_ATTEMPT")
        assert (await kit.status()).scheduler.fences == 2
        await kit.everything_is_home()


async def test_a_new_stream_begins_with_nothing_heard_and_so_does_another_boot_of_the_scheduler(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig):
        rig.fences = [fence(11, "x", 1)]
        await until(lambda: rig.reports[-1].fences_heard == 11, "heard")
        rig.fences = [fence(5, "z", 1)]
        rig.boot_id = "another"
        await until(lambda: rig.reports[-1].fences_heard == 5, "numbers of another scheduler")
        await rig.stop()
        before = len(rig.reports)
        await rig.start(rig.port)
        await rig.reported()
        assert rig.reports[before].fences_heard == 0


async def test_words_of_a_lower_epoch_are_not_taken(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        rig.epoch = 5
        async with reporting(tmp_path, rig) as kit:
            await rig.reported()
            rig.epoch, rig.fences = 4, [fence(1, "x", 1)]
            await rig.reported(2)
            await until(lambda: rig.streams >= 3, "the stream is ended and begun anew")
            status = (await kit.status()).scheduler
            assert (status.state, status.epoch, status.fences) == ("unreachable", 5, 0)
            assert status.calls["stale_epoch"] >= 1 and "epoch 4, 5 is known" in status.why


async def test_names_that_are_none_are_not_taken_and_the_daemon_goes_on(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        rig.fences = [fence(1, "", 1)]
        await rig.reported()
        await until(lambda: not kit.daemon.scheduler._reporter.answers, "the stream is ended")
        assert kit.daemon.scheduler._reporter.fences == 0


async def test_a_stream_that_stalls_is_opened_anew_with_another_scheduler(tmp_path: Path) -> None:
    async with rigs(2) as (first, second), reporting(tmp_path, first, second) as kit:
        first.silent = True
        await second.reported()
        status = (await kit.status()).scheduler
        assert (status.state, status.boot_id, status.address, status.why) == ("reports", "s2", second.address, "")


async def test_a_stream_that_stalls_while_calls_are_answered_is_opened_anew_and_cuts_nobody(tmp_path: Path) -> None:
    async with rigs(2) as (first, second), reporting(tmp_path, first, second) as kit:
        engine = await kit.connect()
        await first.reported()
        held = asyncio.Event()
        first.hold = held.wait
        waiting = engine.ask("GetTicket", scheduler_pb2.GetTicketRequest(request_id="r", wait_ms=5_000))
        await until(lambda: first.calls["GetTicket"] == 1, "it waits")
        first.silent, first.hold = True, None
        streams = first.streams
        pulling = asyncio.ensure_future(pull_on(engine))
        await until(lambda: first.streams > streams, "opened anew")
        first.silent = False
        await until(lambda: kit.daemon.scheduler._reporter.answers, "answered")
        pulling.cancel()
        held.set()
        assert (await waiting).scheduler.boot_id == "s1"
        assert (second.streams, second.calls.total(), first.cancelled.total()) == (0, 0, 0)


async def test_reports_follow_the_leader(tmp_path: Path) -> None:
    async with rigs(2) as (first, second), reporting(tmp_path, first) as kit:
        first.leads_not(second.address)
        await second.reported()
        assert (await kit.status()).scheduler.boot_id == "s2"


async def test_reports_follow_the_leader_that_another_call_has_found_while_none_was_under_way(tmp_path: Path) -> None:
    async with rigs(2) as (first, second), reporting(tmp_path, first) as kit:
        first.report_again_ms = 500
        engine = await kit.engine()
        await first.reported()
        await asyncio.sleep(0.1)
        first.leads_not(second.address)
        await pull(engine)
        await second.reported(2)


async def test_a_fault_in_one_report_does_not_end_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(*_: object) -> None:
        monkeypatch.undo()
        raise ValueError("this node's books do not add up")

    async with rigs() as (rig,), reporting(tmp_path, rig):
        monkeypatch.setattr("kvmoverd.rpc.node_reporting.node_report", fails_once)
        await until(lambda: rig.streams == 2, "another stream")
        await rig.reported()


async def test_reasons_that_alternate_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reporter = NodeReporter(cast(Any, None), cast(Any, None), LostGroups())
    for _ in range(10):
        reporter._note("connection refused")
        reporter._note("connection reset")
    assert [record.getMessage() for record in caplog.records] == ["no reports to a scheduler: connection refused"]


async def test_what_is_no_scheduler_is_called_so(tmp_path: Path) -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with rpc_kit(tmp_path, scheduler={"addresses": [address], "timeout": "500ms"}) as kit:
        engine = await kit.engine()
        found = await refused(engine.ask("PullWork", scheduler_pb2.PullWorkRequest(group="g", boot_id="b")))
        assert found.reason == "SCHEDULER_UNREACHABLE"
        assert "no scheduler, or one of another version" in (await kit.status()).scheduler.why
    await server.stop(None)


async def test_a_scheduler_that_refuses_reports_is_not_asked_all_the_time(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig):
        rig.refuses = BadReport("no such node")
        await rig.reported()
        before = rig.streams
        await asyncio.sleep(0.3)
        assert rig.streams - before <= 1


async def test_without_a_scheduler_the_node_serves_its_engines_as_ever(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        await rig.stop()
        engine = await kit.engine()
        await engine.store(2)
        end = await end_of(engine.ask("FetchBlocks", engine.fetch_request("f")))
        assert end.status.reason == common_pb2.OK
        status = (await kit.status()).scheduler
        assert (status.boot_id, status.address) == ("s1", rig.address)


async def test_a_leader_that_is_gone_is_told_of_until_a_report_is_answered(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        engine = await kit.connect()
        await pull(engine, "g", "b1")
        rig.silent = True
        engine.close()
        await until(lambda: any(report.lost_groups for report in rig.reports), "told")
        seen = len(rig.reports)
        rig.silent = False
        await until(lambda: any(report.lost_groups for report in rig.reports[seen:]), "told again")
        await until(lambda: not rig.reports[-1].lost_groups, "heard")
        told = [group for report in rig.reports for group in report.lost_groups]
        assert {(group.group, group.boot_id) for group in told} == {("g", "b1")}


async def test_a_leader_that_only_connects_anew_is_not_lost(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        before = await kit.connect()
        await pull(before)
        before.close()
        await pull(await kit.connect())
        await asyncio.sleep(1.5 * GRACE_S)
        await rig.reported()
        assert not any(report.lost_groups for report in rig.reports)


async def test_a_leader_that_dies_while_it_pulls_is_lost_after_its_pull(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig, answers_in="2s") as kit:
        engine = await kit.connect()
        held = asyncio.Event()
        rig.hold = held.wait
        pulling = asyncio.ensure_future(pull(engine))
        await until(lambda: rig.calls["PullWork"] == 1, "under way")
        engine.close()
        await until(lambda: any(report.lost_groups for report in rig.reports), "told")
        await until(lambda: not rig.reports[-1].lost_groups, "heard")
        seen = len(rig.reports)
        held.set()
        await pulling
        await until(lambda: any(report.lost_groups for report in rig.reports[seen:]), "told again")


async def test_a_reservation_that_comes_before_the_fence_of_the_last_attempt_has_the_scheduler_asked(
    tmp_path: Path,
) -> None:
    async with rigs() as (rig,):
        rig.report_again_ms = 60_000
        peers = [{"name": name, "address": DEAD} for name in ("first", "second")]
        async with reporting(tmp_path, rig, peers=peers, node_api={"advertise": "127.0.0.1"}) as kit:
            await until(lambda: kit.daemon.scheduler._reporter.answers, "answered")
            engine = await kit.engine()
            for node in ("first", "second"):
                await kit.hello(node)
            await kit.ask_node("Reserve", reservation(engine, node="first"))
            early = await refused(kit.ask_node("Reserve", reservation(engine, node="second", attempt=2)))
            assert early.reason == "REQUEST_TAKEN", "the scheduler was asked, and knows of no fence"
            rig.fences = [fence(1, "r", 1)]
            began = len(rig.reports)
            second = await kit.ask_node("Reserve", reservation(engine, node="second", attempt=2))
            assert len(rig.reports) == began + 1
            await release(kit, second.ticket)
            await kit.everything_is_home()


async def test_fences_that_nobody_can_be_asked_for_are_not_waited_for(tmp_path: Path) -> None:
    async with rigs() as (rig,), reporting(tmp_path, rig) as kit:
        rig.silent = True
        assert not await kit.node.decode_side.fences_asked()
        await until(lambda: not kit.daemon.scheduler._reporter.answers, "the stream is given up")
        assert not await asyncio.wait_for(kit.node.decode_side.fences_asked(), 0.05)


async def test_a_daemon_that_stops_ends_its_reports(tmp_path: Path) -> None:
    async with rigs() as (rig,):
        async with reporting(tmp_path, rig) as kit:
            side = kit.daemon.scheduler
        assert side._reporting.cancelled()
        with pytest.raises(SchedulerUnreachable):
            side._link.connection()
        assert rig.reports[-1].draining, "the last thing that it said"


async def test_a_book_of_groups_forgets_the_first_and_drops_what_is_pulled_for_again() -> None:
    book = LostGroups()
    for number in range(5_000):
        book.pulled(PulledFor(f"g{number}", "b"), "session")
    book.session_ended("session")
    await asyncio.sleep(GRACE_S + 0.05)
    assert book.count == 4096 and book.told()[0].name == "g904" and len(book.told()) == 1024
    book.pulled(PulledFor("g904", "b"), "heir")
    assert book.told()[0].name == "g905"
    book.heard(book.told())
    assert book.count == 4096 - 1 - 1024
    book.close()
