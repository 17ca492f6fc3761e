"""From a layer that is ready to the engine awake: the daemon's session, page and outbox here, a real client in a process.

    python -m tests.bench.wakeup --streams 8 --samples 4000 --loop uvloop

The clock starts with the time that the daemon writes into the call's entry, and stops when `wait_layer` has returned.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from kvmover_client import AsyncClient, BlockingStreamCall, Client, Plan
from kvmover_client.call import LayerCall
from kvmover_proto import engine_pb2, engine_pb2_grpc
from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core.machines.actions import AnnounceLayers, AnnouncePrefix, Finish
from kvmoverd.core.status import End, Reason
from kvmoverd.node.outbox import Outbox
from kvmoverd.node.progress import ProgressBook
from kvmoverd.node.sessions import Sessions
from kvmoverd.ports.progress import SharedPages
from kvmoverd.rpc import convert
from kvmoverd.rpc.companion import CompanionServer, SessionPeer
from kvmoverd.rpc.plan_calls import first_plan

ROOT = Path(__file__).resolve().parents[2]
LAYERS_MAX = 2_000
PERIOD_S = 0.002
"""Mean time between two layers of one stream. They come as a device's completions do: by a descriptor, at any time; the
loop's own timers go off at whole milliseconds, many at once."""
START_S = 30.0
BOOT_ID = "0123456789abcdef"
KINDS = ("asyncio", "uvloop", "threads")


class _Sessions:
    """The companion server's hooks, over the daemon's own books."""

    def __init__(self) -> None:
        self.sessions = Sessions(sessions_max=4)

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        session, token = self.sessions.open(peer.client, peer.pid)
        return session.session_id, token

    def progress_pages(self, session_id: str) -> SharedPages | None:
        session = self.sessions.by_id(session_id)
        assert session is not None
        pages = EnginePages()
        session.progress = ProgressBook(pages, MonotonicClock(), BOOT_ID)
        return pages

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        raise AssertionError(f"{session_id} passes {label}: a stream here moves no bytes")

    def closed(self, session_id: str, why: str) -> None:
        self.sessions.end(session_id)


class _Announcing(engine_pb2_grpc.EngineServicer):
    """Each stream gets its layers in their time, through its outbox, as a driver's would."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._outboxes: deque[tuple[Outbox, Iterator[int]]] = deque()

    async def StreamLayers(
        self, requests: AsyncIterator[engine_pb2.StreamLayersRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.StreamEvent]:
        plan = await first_plan(requests)
        (session,) = self._sessions.all()
        outbox = Outbox()
        if session.progress is not None:
            with session.progress.claiming(plan.progress_entry, plan.progress_generation) as entry:
                outbox.report_to(entry)
        outbox.put(AnnouncePrefix(1, None))
        self._outboxes.append((outbox, iter(range(plan.tail_tokens))))
        while (told := await outbox.get()) is not None:
            yield convert.stream_event(told)

    def completed(self, device: int, streams: int) -> None:
        """The device has a layer, of each stream in turn, once all have come."""
        for _ in os.read(device, 1):
            if len(self._outboxes) < streams:
                return
            outbox, layers = self._outboxes[0]
            self._outboxes.rotate(-1)
            layer = next(layers, None)
            if layer is not None:
                outbox.put(AnnounceLayers(layer, layer))
            else:
                outbox.put(Finish(End(Reason.OK, prefix_blocks=1)))


def _be_the_device(streams: int) -> None:
    """Writes a byte for each layer, at random times, until nobody reads."""
    scatter = random.Random(streams)
    with suppress(BrokenPipeError):
        while True:
            time.sleep(PERIOD_S / streams * scatter.uniform(0.5, 1.5))
            os.write(1, b"\1")


def _plan(stream: int, layers: int) -> Plan:
    """The number of layers travels as the tail's: this daemon has no model."""
    return Plan(f"wakeup/{stream}", 1, bytes(32), [bytes(32)], layers, 1, "", None, 1, [[0]], START_S + layers)


def _note(call: LayerCall[Any], ready: int, found: list[float]) -> None:
    """The entry's time is that of its last layer: an engine that comes late for one can't know how late."""
    now_ns = time.monotonic_ns()
    entry = call._entry
    assert entry is not None, "the daemon gave no page"
    stamp_ns = entry.stamp_ns
    if entry.layers == ready:
        found.append((now_ns - stamp_ns) / 1000)


async def _listen(call: LayerCall[Any], layers: int) -> list[float]:
    found: list[float] = []
    for ready in range(1, layers):
        await call.wait_layer(ready - 1)
        _note(call, ready, found)
    await call.end()
    return found


def _listen_blocking(call: BlockingStreamCall, layers: int) -> list[float]:
    found: list[float] = []
    for ready in range(1, layers):
        call.wait_layer(ready - 1)
        _note(call._inner, ready, found)
    call.end()
    return found


def _blocking_engine(endpoint: str, streams: int, layers: int) -> list[float]:
    with Client.connect(endpoint, timeout_s=START_S) as client, ThreadPoolExecutor(streams) as threads:
        calls = [client.stream_layers(_plan(stream, layers)) for stream in range(streams)]
        found = threads.map(lambda call: _listen_blocking(call, layers), calls)
        return list(itertools.chain.from_iterable(found))


async def _engine(endpoint: str, streams: int, layers: int) -> list[float]:
    async with await AsyncClient.connect(endpoint, timeout_s=START_S) as client:
        calls = [await client.stream_layers(_plan(stream, layers)) for stream in range(streams)]
        found = await asyncio.gather(*(_listen(call, layers) for call in calls))
        return list(itertools.chain.from_iterable(found))


async def measure_async(streams: int, samples: int, loop: str) -> list[float]:
    layers = max(2, min(LAYERS_MAX, -(-samples // streams) + 1))
    with tempfile.TemporaryDirectory(prefix="wakeup") as home:
        path = Path(home) / "engine.sock"
        hooks = _Sessions()
        companion = CompanionServer(
            f"{path}.companion",
            hooks,
            boot_id=BOOT_ID,
            version="0",
            engine_endpoint=f"unix://{path}",
            connections_max=4,
            mode=0o600,
        )
        server, announcing = grpc.aio.server(), _Announcing(hooks.sessions)
        engine_pb2_grpc.add_EngineServicer_to_server(announcing, server)
        server.add_insecure_port(f"unix:{path}")
        await companion.start()
        await server.start()
        reading, writing = os.pipe()
        asyncio.get_running_loop().add_reader(reading, announcing.completed, reading, streams)
        device = await _process("--device", "--streams", str(streams), stdout=writing)
        os.close(writing)
        try:
            return await _in_a_process(f"unix://{path}", streams, layers, loop)
        finally:
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            await device.wait()
            await server.stop(0)
            await companion.stop()


async def _process(*arguments: str, stdout: int) -> asyncio.subprocess.Process:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}:{ROOT / 'client'}"}
    command = [sys.executable, "-m", "tests.bench.wakeup", *arguments]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ, stdout=stdout)


async def _in_a_process(endpoint: str, streams: int, layers: int, loop: str) -> list[float]:
    command = ["--engine", endpoint, "--streams", str(streams), "--samples", str(layers), "--loop", loop]
    child = await _process(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(START_S + 4 * PERIOD_S * layers):
            said, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise RuntimeError(f"the engine's process ended with {child.returncode}")
    found: list[float] = json.loads(said)
    return found


def measure(streams: int, samples: int, loop: str = "asyncio") -> list[float]:
    """Microseconds from each layer's entry to the engine awake; at least `samples`, but for those that were overtaken.

    `loop`: what the engine runs on: "asyncio", "uvloop", or "threads" for the blocking client with a thread a stream.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure_async(streams, samples, loop))


def _main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--streams", type=int, default=1)
    arguments.add_argument("--samples", type=int, default=2_000)
    arguments.add_argument("--loop", choices=KINDS, default="asyncio")
    arguments.add_argument("--engine", help="be the engine of the daemon at this endpoint")
    arguments.add_argument("--device", action="store_true", help="be the device whose completions the layers are")
    asked = arguments.parse_args()
    if asked.device:
        _be_the_device(asked.streams)
        return
    if asked.engine and asked.loop == "threads":
        print(json.dumps(_blocking_engine(asked.engine, asked.streams, asked.samples)))
        return
    if asked.engine:
        factory = uvloop.new_event_loop if asked.loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            print(json.dumps(runner.run(_engine(asked.engine, asked.streams, asked.samples))))
        return
    found = measure(asked.streams, asked.samples, asked.loop)
    cuts = statistics.quantiles(found, n=100)
    print(f"{asked.loop}, {asked.streams} streams, {len(found)} layers: ", end="")
    print(", ".join(f"p{cut} {cuts[cut - 1]:.1f} us" for cut in (10, 50, 90, 99)))


if __name__ == "__main__":
    _main()
