"""A real scheduler as a process: asked, killed, stopped, started again, and its log played again."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from scheduler_process_kit import SchedulerProcess, environment, scheduler

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.rpc.errors import error_info

pytestmark = pytest.mark.e2e

CALL_S = 10.0
REQUESTS = 40
BURST = 5_000


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[scheduler_pb2_grpc.SchedulerStub]:
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[misc]


class Leader:
    """Of a group of four engines, whose work is done when `works` is false at the next pull."""

    def __init__(self, name: str, role: scheduler_pb2.Role.ValueType) -> None:
        loads = [scheduler_pb2.EngineLoad(engine=f"{name}.{rank}", free_hbm_tokens=1 << 30) for rank in range(4)]
        self.report = scheduler_pb2.PullWorkRequest(
            group=name, model="m", role=role, boot_id="boot", node=f"{name} node", engines=loads
        )
        self.held: dict[tuple[str, int], scheduler_pb2.Assignment] = {}

    async def pull(self, stub: scheduler_pb2_grpc.SchedulerStub) -> bool:
        """False: it was asked what the group holds, and says so with the next pull."""
        self.report.sequence += 1
        reply = await stub.PullWork(self.report, timeout=CALL_S)  # type: ignore[misc]
        self.report.scheduler_boot_id = reply.scheduler.boot_id
        if reply.tell_held:
            del self.report.held[:]
            self.report.held.extend(scheduler_pb2.HeldAssignment(assignment=held) for held in self.held.values())
            return False
        del self.report.done[:], self.report.held[:]
        for delivery in reply.deliveries:
            self.report.heard = delivery.number
            if delivery.HasField("assigned"):
                self.held[delivery.assigned.request_id, delivery.assigned.attempt] = delivery.assigned
            else:
                self.held.pop((delivery.revoked.request_id, delivery.revoked.attempt), None)
        return True

    def finish(self) -> None:
        for request_id, attempt in self.held:
            self.report.done.add(request_id=request_id, attempt=attempt)
        self.held.clear()


async def submit(
    stub: scheduler_pb2_grpc.SchedulerStub, request_id: str, after_attempt: int = 0
) -> scheduler_pb2.TicketReply:
    request = scheduler_pb2.SubmitRequest(
        request_id=request_id, model="m", prompt_tokens=1000, hit_tokens=900, after_attempt=after_attempt
    )
    found: scheduler_pb2.TicketReply = await stub.Submit(request, timeout=CALL_S)  # type: ignore[misc]
    return found


async def ticket(stub: scheduler_pb2_grpc.SchedulerStub, request_id: str) -> scheduler_pb2.TicketReply:
    request = scheduler_pb2.GetTicketRequest(request_id=request_id)
    found: scheduler_pb2.TicketReply = await stub.GetTicket(request, timeout=CALL_S)  # type: ignore[misc]
    return found


def leaders() -> tuple[Leader, Leader]:
    return Leader("p", scheduler_pb2.PREFILL), Leader("d", scheduler_pb2.DECODE)


async def given_out(stub: scheduler_pb2_grpc.SchedulerStub, prefill: Leader, decode: Leader, count: int) -> None:
    """So many requests are with their engines."""
    for number in range(count):
        await submit(stub, f"r{number}")
    until = time.monotonic() + CALL_S
    while len(prefill.held) < count or len(decode.held) < count:
        assert time.monotonic() < until
        for leader in (decode, prefill):
            await leader.pull(stub)


async def test_requests_are_served_and_the_log_played_again_decides_the_same(tmp_path: Path) -> None:
    log = tmp_path / "decisions"
    with scheduler(tmp_path, journal=str(log)) as served:
        prefill, decode = leaders()
        async with asking(served.address) as stub:
            await given_out(stub, prefill, decode, REQUESTS)
            for leader in (prefill, decode):
                leader.finish()
                await leader.pull(stub)
            assert {(await ticket(stub, f"r{number}")).state for number in range(REQUESTS)} == {scheduler_pb2.DONE}
        books = served.status()
        assert books["counts"]["done"] == REQUESTS
        assert books["journal"]["dropped"] == 0
        assert [group["engines"] for group in books["first_groups"]] == [4, 4]
        shown = await asyncio.to_thread(command, "--status", served.address)
        assert shown.returncode == 0
        assert f"  done: {REQUESTS}\n" in shown.stdout
        assert scraped(served)["kvmoverd_scheduler_done_total"] == REQUESTS
    done = await asyncio.to_thread(command, "--replay", str(log))
    assert (done.returncode, done.stdout) == (0, f"same: decisions {REQUESTS}, differs 0\n"), done.stderr


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """`kvmoverd scheduler`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvmoverd", "scheduler", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def scraped(served: SchedulerProcess) -> dict[str, float]:
    connection = http.client.HTTPConnection(served.metrics_address, timeout=5.0)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


async def test_one_that_was_killed_learns_anew_what_leaders_hold(tmp_path: Path) -> None:
    with scheduler(tmp_path, limits='settle = "1s"') as served:
        prefill, decode = leaders()
        async with asking(served.address) as stub:
            await given_out(stub, prefill, decode, REQUESTS)
            before = {f"r{number}": await ticket(stub, f"r{number}") for number in range(REQUESTS)}
        served.kill()
        served.port = int(served.address.rpartition(":")[2])
        # One that both leaders have forgotten meanwhile: it is given out again, under a higher attempt.
        for leader in (prefill, decode):
            del leader.held["r0", 1]
        served.start()
        async with asking(served.address) as stub:
            for request_id, was in before.items():
                again = await submit(stub, request_id, after_attempt=was.attempt)
                assert again.scheduler.boot_id != was.scheduler.boot_id
            for leader in (prefill, decode):
                assert not await leader.pull(stub)
                assert await leader.pull(stub)
            for request_id, was in before.items():
                now = await ticket(stub, request_id)
                if request_id != "r0":
                    assert (now.state, now.attempt) == (scheduler_pb2.ASSIGNED, was.attempt)
                    assert now.assignment.decode_engine == was.assignment.decode_engine
            until = time.monotonic() + CALL_S
            while (found := await ticket(stub, "r0")).state != scheduler_pb2.ASSIGNED:
                assert time.monotonic() < until
                for leader in (decode, prefill):
                    await leader.pull(stub)
                await asyncio.sleep(0.05)
            assert found.attempt > before["r0"].attempt


async def test_a_burst_of_calls_waits_for_the_scheduler_and_is_not_cut(tmp_path: Path) -> None:
    """More at once than gRPC would let wait by itself."""
    with scheduler(tmp_path) as served:
        async with asking(served.address) as stub:
            await submit(stub, "r")
            wait = scheduler_pb2.GetTicketRequest(
                request_id="r", known_state=scheduler_pb2.WAITING, known_attempt=1, wait_ms=60_000
            )
            calls = [asyncio.ensure_future(stub.GetTicket(wait, timeout=60.0)) for _ in range(BURST)]  # type: ignore[arg-type]
            until = time.monotonic() + 30.0
            while (await asyncio.to_thread(served.status))["waits"] < BURST:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
            await stub.Withdraw(scheduler_pb2.WithdrawRequest(request_id="r"), timeout=CALL_S)  # type: ignore[misc]
            assert {found.state for found in await asyncio.gather(*calls)} == {scheduler_pb2.WITHDRAWN}
        assert served.status()["waits"] == 0


async def test_a_stop_is_quick_and_everyone_who_waits_hears_of_it(tmp_path: Path) -> None:
    with scheduler(tmp_path) as served:
        async with asking(served.address) as stub:
            await submit(stub, "r")
            waits = [
                asyncio.ensure_future(
                    stub.GetTicket(  # type: ignore[arg-type]
                        scheduler_pb2.GetTicketRequest(
                            request_id="r", known_state=scheduler_pb2.WAITING, known_attempt=1, wait_ms=60_000
                        ),
                        timeout=CALL_S,
                    )
                )
                for _ in range(200)
            ]
            until = time.monotonic() + CALL_S
            while served.status()["waits"] < len(waits):
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            began = time.monotonic()
            os.kill(served.pid, signal.SIGTERM)
            for found in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(found, grpc.aio.AioRpcError)
                info = error_info(found)
                assert info is not None
                assert info.reason == "SHUTTING_DOWN"
            assert served.process is not None
            assert await asyncio.to_thread(served.process.wait, CALL_S) == 0
            assert time.monotonic() - began < 3.0
        served.process = None


def test_it_stops_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    made = SchedulerProcess(tmp_path)
    made.write_config()
    words = [sys.executable, "-m", "kvmoverd", "scheduler", "--config", str(made.config), "--until-eof"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stderr is not None
    for line in process.stderr:
        if b"scheduler serves at" in line:
            break
    process.communicate(timeout=CALL_S)
    assert process.returncode == 0


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    with scheduler(tmp_path) as served:
        other = SchedulerProcess(tmp_path, port=int(served.address.rpartition(":")[2]))
        other.write_config()
        done = command("--config", str(other.config))
        assert done.returncode == 2
        assert f"can't listen at {served.address}: Address already in use" in done.stderr
