"""The client's side of the pages: what it makes of them, right ones and wrong ones, in its loop and in other threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from companion_kit import open_fds, until
from progress_kit import BOOT_ID
from rpc_kit import LAYERS, Engine, keys_of, rpc_kit

from kvmover_client import (
    AsyncClient,
    Client,
    DaemonGone,
    Geometry,
    KvmoverError,
    Layout,
    Manifest,
    Model,
    Plan,
    Reason,
    Region,
    RequestEnded,
    TimedOut,
    progress,
    sync_client,
)
from kvmover_client import Path as ReadPath
from kvmover_client.progress import ProgressPages
from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core import progress as core
from kvmoverd.core.machines.actions import AnnounceLayers, Finish
from kvmoverd.core.status import End
from kvmoverd.core.status import Reason as CoreReason
from kvmoverd.node.progress import ProgressBook


@contextmanager
def both(entries: int = core.ENTRIES, boot_id: str = BOOT_ID) -> Iterator[tuple[ProgressBook, ProgressPages]]:
    """The daemon's book and the client's view of it."""
    shared = EnginePages()
    book = ProgressBook(shared, MonotonicClock(), BOOT_ID)
    fds = [os.dup(fd) for fd in shared.engine_fds()]
    shared.close_engine_fds()
    try:
        pages = ProgressPages(fds, entries, boot_id)
        try:
            yield book, pages
        finally:
            pages.close()
            pages.close()
    finally:
        book.close()


def test_both_sides_mean_the_same_words() -> None:
    for name in ("MAGIC", "VERSION", "WORD_BYTES", "HEADER_BYTES", "BOOT_ID_BYTES", "GENERATION_MAX"):
        assert getattr(progress, name) == getattr(core, name), name
    assert core.CallState.ENDED.value == progress.ENDED


@pytest.mark.parametrize(
    ("entries", "boot_id"), [(core.ENTRIES, "another"), (8, BOOT_ID), (0, BOOT_ID), (1 << 20, BOOT_ID)]
)
async def test_pages_that_are_not_those_promised_are_refused_and_closed(entries: int, boot_id: str) -> None:
    before = open_fds()
    with pytest.raises(KvmoverError, match="progress page"), both(entries, boot_id):
        pass
    assert open_fds() == before


async def test_an_entry_keeps_its_layers_when_another_call_has_it() -> None:
    with both() as (book, pages):
        entry = pages.take()
        assert entry is not None and entry.layers == 0 and entry.stamp_ns == 0
        changed = asyncio.Event()
        entry.on_change = changed.set
        with book.claiming(entry.number, entry.generation) as told:
            told.tell(AnnounceLayers(0, 4))
        await asyncio.wait_for(changed.wait(), 1)
        assert entry.layers == 5 and entry.stamp_ns <= time.monotonic_ns()
        told.tell(Finish(End(CoreReason.OK)))
        with book.claiming(entry.number, entry.generation + 1):
            assert entry.layers == 5
        entry.release()
        assert (entry.layers, entry.stamp_ns, entry.credit(1)) == (5, 0, False)


async def test_an_entry_that_the_daemon_still_holds_is_not_taken_again() -> None:
    with both() as (book, pages):
        first = pages.take()
        assert first is not None
        with book.claiming(first.number, first.generation) as told:
            first.release()
        for _ in range(core.ENTRIES - 1):
            entry = pages.take()
            assert entry is not None and entry.number != first.number
        assert pages.take() is None
        told.tell(Finish(End(CoreReason.OK)))
        again = pages.take()
        assert again is not None and again.number == first.number


async def test_credits_survive_a_full_pipe_and_a_daemon_that_went() -> None:
    with both() as (book, pages):
        entry = pages.take()
        assert entry is not None
        taken: list[int] = []
        with book.claiming(entry.number, entry.generation) as told:
            told.listen(taken.append)
        for layers in range(10_000):
            assert entry.credit(layers)
        await until(lambda: taken[-1:] == [9_999])
        book.close()
        await asyncio.sleep(0.005)
        assert not entry.credit(10_000)


async def test_a_generation_is_never_zero() -> None:
    with both() as (_, pages):
        pages._generation = core.GENERATION_MAX - 1
        entries = [pages.take(), pages.take()]
        assert [entry.generation for entry in entries if entry is not None] == [core.GENERATION_MAX, 1]


async def test_calls_after_the_end_of_the_session_say_that_the_daemon_is_gone(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        client = await AsyncClient.connect(f"unix://{kit.socket}")
        plan, region = ring_plan(engine, "r"), Region(1, 4, 1, engine.memories[0], Geometry((), 0))
        await client.close()
        calls = [client.stream_layers(plan), client.push_layers(plan), client.deliver("r", 1, region, range(2))]
        for call in calls:
            with pytest.raises(DaemonGone):
                await call


# Blocking engines ---------------------------------------------------------------------------------------------------


def ring_plan(engine: Engine, name: str) -> Plan:
    """It stops at two layers until one is computed."""
    sets = [[2 * n, 2 * n + 1] for n in range(2)]
    return Plan(
        name, 1, engine.fingerprint, keys_of(engine.fingerprint, 2), 0, 2, "", ReadPath.PE, engine.region_id, sets
    )


async def test_a_blocking_engine_waits_in_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rpc_kit(tmp_path) as kit:
        with await asyncio.to_thread(Client.connect, f"unix://{kit.socket}") as client:
            engine = await kit.engine()
            await engine.store(2)
            assert engine.geometry is not None
            model = Model(Manifest("m", b"", b"", Layout(1, ()), ""), engine.fingerprint, 0, 0)
            register = client.register_region
            region = await asyncio.to_thread(register, engine.memories[0], engine.geometry, model)
            engine.region_id = region.region_id

            def play(name: str) -> list[str]:
                found = []
                stream = client.stream_layers(ring_plan(engine, name))
                stream.wait_layer(1, 5.0)
                try:
                    stream.wait_layer(2, 0.05)
                except TimedOut:
                    found.append("timed out")
                waiting = threading.Thread(target=stream.wait_layer, args=(2, 5.0))
                waiting.start()
                stream.computed(1)
                waiting.join(5)
                found.append("came" if not waiting.is_alive() and stream.ready_layers == LAYERS else "did not come")
                found.append(stream.end(5.0).reason.name)
                stream.wait_layer(2)
                return found

            assert await asyncio.to_thread(play, "r") == ["timed out", "came", "OK"]
            monkeypatch.setattr(sync_client, "BELL_S", 0.01)
            assert await asyncio.to_thread(play, "r2") == ["timed out", "came", "OK"]

            def cancelled() -> Reason:
                stream = client.stream_layers(ring_plan(engine, "r3"))
                stream.wait_layer(1, 5.0)
                threading.Timer(0.05, stream.cancel).start()
                with pytest.raises(RequestEnded) as caught:
                    stream.wait_layer(2)
                return caught.value.end.reason

            assert await asyncio.to_thread(cancelled) is Reason.CANCELLED

            def closed() -> None:
                stream = client.stream_layers(ring_plan(engine, "r4"))
                stream.wait_layer(1, 5.0)
                threading.Timer(0.05, client.close).start()
                with pytest.raises(DaemonGone):
                    stream.wait_layer(2)

            await asyncio.to_thread(closed)
        await kit.everything_is_home()
