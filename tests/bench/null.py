"""Rows with devices that move nothing: what a daemon itself costs, per Full Block and per slice.

A real daemon with gRPC, sessions, room, slots and cache; only storage and transport are null. Its user + sys counts. Blocks
have 61 layers of 64 bytes: the pool is small, and all that is done per block, layer and slice is as with large ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmover_client import AsyncClient, Layout, Manifest, Model, Plan, Reason, Region, RegionMemory, paged_geometry
from kvmover_client import Path as ReadPath
from tests.bench.daemon import BenchFailed, Daemon, daemon
from tests.bench.pairs import orders

KEY_BYTES = 32
PIECE_BYTES = 64 << 20
TIMEOUT_S = 120.0
CUTS = 4
"""Pages per block of the requests with more slices; the others have one."""

CONFIG = """\
[pool]
bytes = {pool_bytes}
piece_bytes = {piece_bytes}
read_bytes = {read_bytes}
write_back_bytes = 1
de_buffer_bytes = 1

[[storage]]
name = "null"
kind = "null"

[transport]
listen = "127.0.0.1:0"
local = "null"

[log]
level = "warning"
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One run: so many requests of so many blocks, all at once, every layer announced."""

    requests: int = 64
    blocks: int = 500
    layers: int = 61

    @property
    def layout(self) -> Layout:
        return Layout.uniform(layers=self.layers, tokens=64, token_bytes=1)

    @property
    def all_blocks(self) -> int:
        return self.requests * self.blocks

    @property
    def read_bytes(self) -> int:
        payload_bytes = -(-self.layout.block_bytes // 4096) * 4096
        return self.all_blocks * (4096 + payload_bytes)


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of the daemon's CPU per Full Block, with one slice a layer and with `CUTS`."""

    block_us: float
    cut_block_us: float
    layers: int

    @property
    def slice_us(self) -> float:
        """The slope: what each further slice costs."""
        return (self.cut_block_us - self.block_us) / (self.layers * (CUTS - 1))


class NullRig:
    """A daemon over null devices, and one engine with a region for each way to cut blocks. No page is ever touched."""

    def __init__(self, load: Load, made: Daemon, client: AsyncClient, model: Model, regions: dict[int, Region]) -> None:
        self._load = load
        self.daemon = made
        self._client = client
        self._model = model
        self._regions = regions
        self._numbers = itertools.count()

    async def costs(self, count: int, seed: int) -> list[Costs]:
        """So many runs of each way, in pairs of random order."""
        found = []
        for whole_first in orders(count, seed):
            ways = (1, CUTS) if whole_first else (CUTS, 1)
            by_way = {way: await self.block_us(way) for way in ways}
            found.append(Costs(by_way[1], by_way[CUTS], self._load.layers))
        return found

    async def block_us(self, pages_per_block: int) -> float:
        """One run over blocks that the pool does not hold: the daemon's CPU per block."""
        load = self._load
        region, pages = self._regions[pages_per_block], load.blocks * pages_per_block
        plans = [self._plan(region, range(first * pages, (first + 1) * pages)) for first in range(load.requests)]
        before_s = self.daemon.cpu_s()
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(self._stream(plan))
        return (self.daemon.cpu_s() - before_s) / load.all_blocks * 1e6

    async def _stream(self, plan: Plan) -> None:
        call = await self._client.stream_layers(plan)
        await call.wait_layer(self._load.layers - 1)
        end = await call.end()
        if end.reason is not Reason.OK:
            raise BenchFailed(f"{plan.request_id} ended with {end.reason.name}: {end.message}")

    def _plan(self, region: Region, pages: range) -> Plan:
        blocks = self._load.blocks
        return Plan(
            request_id=f"null-{next(self._numbers)}",
            attempt=1,
            fingerprint=self._model.fingerprint,
            block_keys=_new_keys(blocks),
            tail_tokens=0,
            hit_blocks=blocks,
            decode_node="",
            path=ReadPath.PE,
            region_id=region.region_id,
            page_sets=[pages],
            timeout_s=TIMEOUT_S,
        )


def _new_keys(count: int) -> Sequence[bytes]:
    packed = os.urandom(count * KEY_BYTES)
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


@asynccontextmanager
async def null_rig(home: Path, load: Load, *, profile: bool) -> AsyncIterator[NullRig]:
    """Warmed up with one run of each way."""
    pieces = -(-(load.read_bytes + 2) // PIECE_BYTES) + 1
    config = CONFIG.format(pool_bytes=pieces * PIECE_BYTES, piece_bytes=PIECE_BYTES, read_bytes=load.read_bytes)
    async with AsyncExitStack() as stack:
        made = stack.enter_context(daemon(home, config, profile=profile))
        client = await stack.enter_async_context(await AsyncClient.connect(made.endpoint, name="bench"))
        digest = secrets.token_bytes(32)
        model = await client.register_model(Manifest("bench", digest, digest, load.layout, "u8"))
        regions = {}
        for way in (1, CUTS):
            geometry = paged_geometry(load.layout, load.all_blocks * way, way)
            memory = stack.enter_context(RegionMemory.create(geometry.size_bytes, "bench"))
            regions[way] = await client.register_region(memory, geometry, model)
        rig = NullRig(load, made, client, model, regions)
        for way in regions:
            await rig.block_us(way)
        made.measure_from_here()
        yield rig
