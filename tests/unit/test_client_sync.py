"""The blocking client against a daemon in a process of its own, and what both clients see when that process is killed."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import client_kit
import pytest
import uvloop
from client_kit import LAYERS

from kvmover_client import (
    AsyncClient,
    BlockState,
    Client,
    DaemonGone,
    Layout,
    LookupResult,
    Manifest,
    Model,
    Plan,
    Prefix,
    Reason,
    RegionMemory,
    RequestEnded,
    StaleAttempt,
    Whole,
    paged_geometry,
)
from kvmover_client import Path as ReadPath
from kvmover_client.blocking import LoopThread

LAYOUT = Layout.uniform(layers=LAYERS, tokens=4, token_bytes=8)
MANIFEST = Manifest("m", bytes(32), bytes(32), LAYOUT, "fp8")
MODEL = Model(MANIFEST, bytes(32), 128, 9)
KEYS = (bytes([1]) * 32, bytes([2]) * 32)


class DaemonProcess:
    def __init__(self, path: Path) -> None:
        self.endpoint = f"unix://{path}"
        command = [sys.executable, client_kit.__file__, str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "serving\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = DaemonProcess(tmp_path_factory.mktemp("daemon") / "s")
    yield process.endpoint
    process.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path / "s")
    yield process
    process.kill()


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client.connect(endpoint, name="test") as client:
        yield client


def plan(request_id: str) -> Plan:
    return Plan(request_id, 1, MODEL.fingerprint, KEYS, 0, 2, "de", ReadPath.PE, 5, ((0, 1),), 30.0)


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_the_blocking_client_has_every_method_of_the_other() -> None:
    assert public(AsyncClient) <= public(Client)


def test_short_calls_block_until_their_answer(client: Client) -> None:
    model = client.register_model(MANIFEST)
    assert client.lookup(model, KEYS) == LookupResult(2, 1)
    geometry = paged_geometry(LAYOUT, 3)
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        region = client.register_region(memory, geometry, model)
        assert (region.pages, client.unregister_region(region)) == (3, True)
    assert client.node_status().node == "scripted"
    assert client.session_id.startswith("s") and client.boot_id and not client.is_gone


def test_long_calls_are_wrapped_and_wait_in_the_callers_thread(client: Client) -> None:
    stream, push = client.stream_layers(plan("plain/1")), client.push_layers(plan("plain/2"))
    assert stream.prefix() == Prefix(2, None)
    for layer in range(LAYERS):
        stream.wait_layer(layer)
        push.computed(layer + 1)
        push.wait_pushed(layer + 1)
    assert (stream.ready_layers, push.pushed_layers) == (LAYERS, LAYERS)
    assert stream.end().reason is push.end().reason is Reason.OK
    stream.quiet()
    assembly = client.assemble_blocks("plain/3", 1, MODEL)
    assert assembly.whole() == Whole(2) and assembly.stored().durable_blocks == 1
    fetch = client.fetch_blocks("plain/4", 1, MODEL, KEYS)
    assert fetch.result().blocks[0].state is BlockState.HIT and fetch.done_blocks == 1


def test_errors_arrive_in_the_callers_thread(client: Client) -> None:
    with pytest.raises(StaleAttempt):
        client.stream_layers(plan("stale")).prefix()
    with pytest.raises(RequestEnded):
        client.stream_layers(plan("cut")).wait_layer(3)


def test_one_client_serves_many_threads(client: Client) -> None:
    def whole(index: int) -> Whole:
        return client.assemble_blocks(f"plain/{index}", 1, MODEL).whole()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(whole, range(24))) == [Whole(2)] * 24


def test_a_call_is_cancelled_from_another_thread(client: Client) -> None:
    call = client.assemble_blocks("hang/sync", 1, MODEL)
    call.attached()
    timer = threading.Timer(0.05, call.cancel)
    timer.start()
    assert call.end().reason is Reason.CANCELLED
    timer.join()


def test_closing_ends_waits_of_other_threads_and_the_background_thread(endpoint: str) -> None:
    client = Client.connect(endpoint, name="closing")
    call = client.assemble_blocks("hang/closing", 1, MODEL)
    call.attached()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call.end)
        time.sleep(0.05)
        client.close()
        with pytest.raises(DaemonGone):
            waiting.result(5)
    with pytest.raises(DaemonGone, match="this client is closed"):
        client.node_status()
    client.close()
    assert not any(thread.name == "kvmover-closing" for thread in threading.enumerate())


def test_a_failed_connect_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(DaemonGone, match="no daemon listens"):
        Client.connect(f"unix://{tmp_path}/none", name="absent", timeout_s=0.1)
    assert not any(thread.name == "kvmover-absent" for thread in threading.enumerate())


def test_stopping_a_loop_cancels_what_runs_on_it() -> None:
    thread = LoopThread("loop")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(lambda: thread.run(asyncio.sleep(60)))
        time.sleep(0.05)
        thread.stop()
        with pytest.raises(DaemonGone, match="closed in the middle of a call"):
            running.result(5)


def test_a_killed_daemon_fails_blocking_waits_at_once(mortal: DaemonProcess) -> None:
    client = Client.connect(mortal.endpoint)
    calls = [client.assemble_blocks("hang/a", 1, MODEL), client.push_layers(plan("hang/b"))]
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(call.end) for call in calls]
        time.sleep(0.05)
        began_s = time.monotonic()
        mortal.kill()
        for waiting in waits:
            with pytest.raises(DaemonGone):
                waiting.result(5)
        assert time.monotonic() - began_s < 2
    assert client.is_gone
    client.close()


def test_a_killed_daemon_is_noticed_and_its_successor_found_on_uvloop(mortal: DaemonProcess, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with await AsyncClient.connect(mortal.endpoint) as client:
            stream = await client.stream_layers(plan("hang/c"))
            await stream.wait_layer(1)
            await asyncio.to_thread(mortal.kill)
            with pytest.raises(DaemonGone):
                await stream.wait_layer(3)
            await stream.wait_layer(0)
            boot_id = client.boot_id
            successor = await asyncio.to_thread(DaemonProcess, tmp_path / "s")
            await client.reconnect()
            assert client.boot_id != boot_id
            geometry = paged_geometry(LAYOUT, 2)
            with RegionMemory.create(geometry.size_bytes, "kv") as memory:
                model = await client.register_model(MANIFEST)
                assert (await client.register_region(memory, geometry, model)).pages == 2
            successor.kill()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 20))
