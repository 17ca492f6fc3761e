"""Calls that gRPC cuts in the middle: a daemon that stops does so before it closes the companion socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from client_kit import ScriptedDaemon
from test_client_calls import LAST_WAITS, OPENERS

from kvmover_client import AsyncClient, CallCancelled, DaemonGone, KvmoverError, Layout, Manifest, Reason, Unavailable
from kvmover_client import link as link_module

SLOW = Manifest("slow", bytes(32), bytes(32), Layout.uniform(layers=4, tokens=4, token_bytes=8), "fp8")
LATER_S = 0.2


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[ScriptedDaemon]:
    daemon = await ScriptedDaemon(tmp_path / "s").start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(daemon.endpoint) as client:
        yield client


async def stops(daemon: ScriptedDaemon) -> None:
    """In the order of a daemon that stops: its calls, then the companion socket."""
    await daemon._server.stop(0)
    await asyncio.sleep(LATER_S)
    await daemon.companion.stop()


@pytest.mark.parametrize("how", ["hang", "broken", "stopped"])
@pytest.mark.parametrize("kind", OPENERS)
async def test_every_wait_of_every_call_says_that_the_daemon_is_gone_when_it_stops(
    daemon: ScriptedDaemon, client: AsyncClient, kind: str, how: str
) -> None:
    call = await OPENERS[kind](client, how)
    waits = [asyncio.create_task(wait) for wait in (LAST_WAITS[kind](call), call.end(), call.quiet())]
    await asyncio.sleep(0.05)
    await stops(daemon)
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DaemonGone] * 3, outcomes
    assert all(isinstance(outcome, KvmoverError) and outcome.retryable for outcome in outcomes)


async def test_a_question_says_that_the_daemon_is_gone_when_it_stops(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    asking = asyncio.create_task(client.register_model(SLOW))
    await asyncio.sleep(0.05)
    await stops(daemon)
    with pytest.raises(DaemonGone):
        await asking


@pytest.mark.parametrize("how", ["broken", "stopped"])
async def test_a_call_that_is_cut_while_the_session_lives_may_be_made_again(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(link_module, "CUT_S", LATER_S)
    began_s = time.monotonic()
    call = await OPENERS["fetch"](client, how)
    with pytest.raises(Unavailable) as caught:
        await call.end()
    assert caught.value.retryable and not client.is_gone
    assert LATER_S <= time.monotonic() - began_s < 5
    assert (await (await OPENERS["fetch"](client, "plain")).end()).reason is Reason.OK


async def test_what_this_side_closes_is_still_cancelled_at_once(client: AsyncClient) -> None:
    call = await OPENERS["fetch"](client, "hang")
    await asyncio.sleep(0.05)
    call._tasks[0].cancel()
    began_s = time.monotonic()
    with pytest.raises(CallCancelled):
        await call.end()
    assert time.monotonic() - began_s < LATER_S
