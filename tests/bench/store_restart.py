"""How soon a node serves its blocks after it was killed: a real daemon over a store of many blocks, started again and again.

The time begins before the process is started, and ends when an engine has the right bytes of a block in its pages, after it
has connected, registered its model and its memory, and asked. A block that is not found yet is asked for again. What the pool
held is gone with the former process. Before it was killed, each daemon made some blocks durable, which the next must have, and
had accepted others, so that there is a segment whose end no log tells of.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmover_client import (
    ROOT,
    AsyncClient,
    BlockState,
    Layout,
    Manifest,
    Model,
    Region,
    RegionMemory,
    StoreCall,
    paged_geometry,
    wrapped_key,
)
from kvmoverd.core import layout as core_layout
from kvmoverd.core import manifest as core_manifest
from tests.bench.daemon import STOP_S, BenchFailed, Daemon, log_end, start
from tests.bench.store_logs import Sample, make_store

PIECE_BYTES = 64 << 20
PAGES = 16
TIMEOUT_S = 60.0
POLL_S = 0.002
_CONFIG = """\
[pool]
bytes = {pool_bytes}
piece_bytes = {piece_bytes}
read_bytes = {piece_bytes}
write_back_bytes = {piece_bytes}
de_buffer_bytes = 1

[[storage]]
name = "disk"
path = "{store}"
layout = "segments"
{kind}
[transport]
listen = "127.0.0.1:0"

[log]
level = "warning"
"""


@dataclass(frozen=True, slots=True)
class Engine:
    client: AsyncClient
    model: Model
    region: Region


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds since before the process was started. `listens_s`: its socket is there; `asks`: until the block was found."""

    first_hit_s: float
    listens_s: float
    asks: int


class Restarts:
    """A store of `blocks`, and a daemon that lives for one restart at a time."""

    def __init__(self, home: Path, store: Path, *, blocks: int, storage: str) -> None:
        self._home = home
        layers, tokens, token_bytes = 61, 64, 656
        self._digests = secrets.token_bytes(32), secrets.token_bytes(32)
        self._layout = Layout.uniform(layers=layers, tokens=tokens, token_bytes=token_bytes)
        space = core_manifest.Namespace(
            core_manifest.Manifest(
                "bench",
                *self._digests,
                core_layout.Layout.uniform(layers=layers, tokens=tokens, token_bytes=token_bytes),
                "u8",
            )
        )
        kind = f'kind = "{storage}"\n' if storage else ""
        self._config = _CONFIG.format(pool_bytes=4 * PIECE_BYTES, piece_bytes=PIECE_BYTES, store=store, kind=kind)
        self._samples = make_store(store, space, blocks)
        self._killed: list[Sample] = []
        self._numbers = itertools.count()

    async def restart(self, number: int) -> Restart:
        """Raises `BenchFailed` for a wrong byte, and for a block that is not found in time."""
        sample = self._samples[number * 7 % len(self._samples)]
        began_s = time.monotonic()
        made = start(self._home, self._config)
        try:
            listens_s = await self._listening(made, began_s)
            async with self._engine(made) as engine:
                asks = await self._hit(engine, sample, began_s)
                first_hit_s = time.monotonic() - began_s
                for durable in self._killed[-1:]:
                    await self._hit(engine, durable, began_s)
                await self._store_and_kill(engine, made)
        finally:
            _kill(made)
        (self._home / "engine.sock").unlink(missing_ok=True)
        return Restart(first_hit_s, listens_s, asks)

    async def _listening(self, made: Daemon, began_s: float) -> float:
        while not (self._home / "engine.sock").exists():
            made.cpu_s()
            if time.monotonic() - began_s > TIMEOUT_S:
                raise BenchFailed(f"the daemon did not listen within {TIMEOUT_S:g} s:\n{log_end(self._home)}")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s

    @asynccontextmanager
    async def _engine(self, made: Daemon) -> AsyncIterator[Engine]:
        async with AsyncExitStack() as stack:
            client = await AsyncClient.connect(made.endpoint, name="bench")
            # The daemon dies before the session ends.
            stack.push_async_callback(client.close)
            model = await client.register_model(Manifest("bench", *self._digests, self._layout, "u8"))
            geometry = paged_geometry(self._layout, PAGES)
            memory = stack.enter_context(RegionMemory.create(geometry.size_bytes, "bench"))
            yield Engine(client, model, await client.register_region(memory, geometry, model))

    async def _hit(self, engine: Engine, sample: Sample, began_s: float) -> int:
        """Asks until the block is there, and compares its bytes; how often it asked."""
        for asks in itertools.count(1):
            call = await engine.client.fetch_blocks(
                f"hit-{next(self._numbers)}", 1, engine.model, [sample.key], region=engine.region, pages=[0]
            )
            (found,) = (await call.result()).blocks
            await call.end()
            if found.state is BlockState.HIT:
                self._check(engine, sample)
                return asks
            if found.state is not BlockState.MISS or time.monotonic() - began_s > TIMEOUT_S:
                raise BenchFailed(f"a stored block was not found: {found}, asked {asks} times")
            await asyncio.sleep(POLL_S)
        raise AssertionError("it counts for ever")

    def _check(self, engine: Engine, sample: Sample) -> None:
        payload = np.frombuffer(sample.payload(self._layout.block_bytes), np.uint8)
        for layer, span in self._spans():
            if not np.array_equal(engine.region.page_view(layer, 0, 0), payload[span]):
                raise BenchFailed(f"layer {layer} of block {sample.key.hex()} is not what was stored")

    async def _store_and_kill(self, engine: Engine, made: Daemon) -> None:
        sample = Sample(wrapped_key(engine.model.fingerprint, secrets.token_bytes(32)), next(self._numbers))
        payload = np.frombuffer(sample.payload(self._layout.block_bytes), np.uint8)
        for layer, span in self._spans():
            engine.region.page_view(layer, 0, 0)[:] = payload[span]
        durable = await self._store(engine, [sample.key])
        states = [block.state for block in await durable.result()]
        if states != [BlockState.HIT]:
            raise BenchFailed(f"a block was not stored: {states}")
        self._killed.append(sample)
        more = [wrapped_key(engine.model.fingerprint, secrets.token_bytes(32)) for _ in range(PAGES)]
        accepted = await self._store(engine, more)
        await accepted.accepted()
        _kill(made)

    async def _store(self, engine: Engine, keys: list[bytes]) -> StoreCall:
        return await engine.client.store_blocks(
            f"put-{next(self._numbers)}", 1, engine.model, keys, ROOT, 0, engine.region, range(len(keys))
        )

    def _spans(self) -> list[tuple[int, slice]]:
        """Where each layer lies in a block."""
        ends = list(itertools.accumulate(sum(segments) for segments in self._layout.layers))
        return [(layer, slice(start, end)) for layer, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def _kill(made: Daemon) -> None:
    """It may be dead already."""
    made.process.kill()
    made.process.wait(STOP_S)
    assert made.process.stdin is not None
    made.process.stdin.close()
