"""The blocking twins: a router's requests and a group's leader, from threads, against a daemon in another loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path

import pytest
from client_scheduling_kit import MODEL, SchedulingDaemon, loads

from kvmover_client import (
    Assignment,
    BlockingLeader,
    BlockingSubmitted,
    Client,
    DaemonGone,
    EngineLoad,
    Leader,
    RequestWithdrawn,
    Role,
    Submitted,
    TicketState,
    TimedOut,
    UnknownPeer,
    WorkReport,
)


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_the_blocking_twins_have_every_method_of_the_others() -> None:
    assert public(Submitted) <= public(BlockingSubmitted)
    assert public(Leader) <= public(BlockingLeader)


def prefill_side(client: Client, over: threading.Event) -> int:
    """Prefills whatever it is given until `over`; how many."""
    leader = BlockingLeader(client, "p", MODEL, Role.PREFILL)
    count = 0
    while not over.is_set():
        for news in leader.pull(loads("p0")):
            assert isinstance(news, Assignment) and leader.prefilled(news.request_id, news.attempt)
            count += 1
        over.wait(min(0.02, leader.pull_again_s))
    return count


def decode_side(client: Client, over: threading.Event) -> int:
    leader = BlockingLeader(client, "d", MODEL, Role.DECODE)
    count = 0
    while not over.is_set():
        for news in leader.pull([EngineLoad("d0", len(leader.held), 0, 1_000_000)]):
            assert isinstance(news, Assignment) and leader.whole(news.request_id, news.attempt)
            assert leader.finished(news.request_id, news.attempt)
            count += 1
        over.wait(min(0.02, leader.pull_again_s))
    return count


def router_side(client: Client, over: threading.Event) -> None:
    try:
        made = [client.submit(f"r{number}", MODEL, 100) for number in range(10)]
        assert {submitted.done(10).state for submitted in made} == {TicketState.DONE}
        assert made[0].assigned(5).prefill_engine == "p0" and made[0].request_id == "r0"
        assert made[0].change(5).state is made[0].ticket.state is TicketState.DONE
        assert "p0" in made[0].explain().text
        with pytest.raises(UnknownPeer):
            client.choose_path(MODEL, "never", "heard", 1)
    finally:
        over.set()


async def test_requests_go_from_a_blocking_router_to_blocking_leaders(tmp_path: Path) -> None:
    daemon = await SchedulingDaemon(tmp_path / "s").start()
    over = threading.Event()
    clients = [await asyncio.to_thread(Client.connect, daemon.endpoint, name=name) for name in ("r", "p", "d")]
    sides = zip((router_side, prefill_side, decode_side), clients, strict=True)
    try:
        _, prefilled, decoded = await asyncio.gather(*(asyncio.to_thread(side, client, over) for side, client in sides))
        assert (prefilled, decoded) == (10, 10)
    finally:
        over.set()
        for client in clients:
            await asyncio.to_thread(client.close)
        await daemon.stop()


async def test_waits_of_threads_end_with_their_time_a_withdrawal_or_their_client(tmp_path: Path) -> None:
    daemon = await SchedulingDaemon(tmp_path / "s").start()

    def waits() -> None:
        client = Client.connect(daemon.endpoint)
        first, second = client.submit("first", MODEL, 100), client.submit("second", MODEL, 100)
        with pytest.raises(TimedOut, match="first was last known to be WAITING"):
            first.assigned(0.05)
        assert first.withdraw().state is TicketState.WITHDRAWN
        with pytest.raises(RequestWithdrawn):
            first.assigned(5)
        report = WorkReport("g", MODEL, Role.PREFILL, "boot", 1, loads("e"))
        assert client.pull_work(report).tell_held
        timer = threading.Timer(0.1, client.close)
        timer.start()
        began_s = time.monotonic()
        with pytest.raises(DaemonGone):
            second.done(30)
        assert time.monotonic() - began_s < 5
        timer.join()

    try:
        await asyncio.to_thread(waits)
    finally:
        await daemon.stop()
