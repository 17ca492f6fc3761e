"""An engine for the end-to-end tests: pages, blocks whose bytes follow from their keys, and whole requests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np

from kvmover_client import (
    ROOT,
    AsyncClient,
    BlockState,
    End,
    KvmoverError,
    Layout,
    Manifest,
    Part,
    Path,
    Plan,
    Region,
    RegionMemory,
    paged_geometry,
    ring_geometry,
    wrapped_key,
)

LAYERS = 6
LAYOUT = Layout.uniform(layers=LAYERS, tokens=64, token_bytes=656)
LAYER_BYTES = LAYOUT.layers[0][0]
MANIFEST = Manifest("e2e", b"w" * 32, b"t" * 32, LAYOUT, "u8")
PAGES = 96
END_S = 12.0
SEEN_S = 3.0
SCRUB = 0xEE


class Call(Protocol):
    def cancel(self) -> None: ...

    async def end(self, timeout_s: float | None = None) -> End: ...


def kv(key: bytes, layer: int, size_bytes: int = LAYER_BYTES) -> np.ndarray:
    """The bytes of a Layer Block."""
    return np.frombuffer(hashlib.shake_128(key + bytes([layer])).digest(size_bytes), dtype=np.uint8)


class Engine:
    """A session and two regions: `region`, where every layer has its own pages, and `ring`, which all layers share."""

    def __init__(self, client: AsyncClient, manifest: Manifest = MANIFEST, pages: int = PAGES) -> None:
        self.client = client
        self.manifest, self.pages = manifest, pages
        self.layers = len(manifest.layout.layers)
        self.memory: list[RegionMemory] = []

    async def register(self) -> None:
        """Again after each `reconnect`."""
        self.model = await self.client.register_model(self.manifest)
        self.region = await self._region(ring=False)
        self.ring = await self._region(ring=True)

    async def _region(self, *, ring: bool) -> Region:
        geometry = (ring_geometry if ring else paged_geometry)(self.manifest.layout, self.pages)
        memory = RegionMemory.create(geometry.size_bytes, "e2e")
        self.memory.append(memory)
        return await self.client.register_region(memory, geometry, self.model)

    async def reconnect(self) -> None:
        await self.client.reconnect()
        await self.register()

    async def close(self) -> None:
        try:
            await self.client.close()
        finally:
            for memory in self.memory:
                memory.close()

    def keys(self, name: str, blocks: int) -> list[bytes]:
        """A chain's keys; equal names give equal keys."""
        return [
            wrapped_key(self.model.fingerprint, hashlib.sha256(f"{name}/{number}".encode()).digest())
            for number in range(blocks)
        ]

    def fill(self, keys: Sequence[bytes], first_page: int = 0, layers: Sequence[int] | None = None) -> None:
        for page, key in enumerate(keys, first_page):
            for layer in range(self.layers) if layers is None else layers:
                self.region.page_view(layer, 0, page)[:] = self.kv(key, layer)

    def kv(self, key: bytes, layer: int) -> np.ndarray:
        """The bytes of a Layer Block of this engine's model."""
        return kv(key, layer, sum(self.manifest.layout.layers[layer]))

    def scrub(self) -> None:
        for memory in self.memory:
            memory.array()[:] = SCRUB

    def wrong_blocks(self, keys: Sequence[bytes], first_page: int = 0) -> list[tuple[int, int]]:
        """(block, layer) of each Layer Block in the pages that is not as it must be."""
        return [
            (block, layer)
            for block, key in enumerate(keys)
            for layer in range(self.layers)
            if not np.array_equal(self.region.page_view(layer, 0, first_page + block), self.kv(key, layer))
        ]

    async def store(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Writes the blocks into pages and stores them, durably."""
        self.fill(keys)
        call = await self.client.store_blocks(request_id, 1, self.model, keys, ROOT, 0, self.region, range(len(keys)))
        assert [block.state for block in await call.result()] == [BlockState.HIT] * len(keys)
        await call.end()

    async def found(self, keys: Sequence[bytes], blocks: int) -> int:
        """Leading blocks that a look-up finds: what another node has stored is seen within a second or so."""
        until_s = time.monotonic() + SEEN_S
        while (prefix := (await self.client.lookup(self.model, keys)).prefix_blocks) < blocks:
            if time.monotonic() > until_s:
                break
            await asyncio.sleep(0.02)
        return prefix

    async def fetch_wrong(self, request_id: str, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Fetches blocks into scrubbed pages; what is wrong with them, a miss counted as wrong."""
        self.scrub()
        call = await self.client.fetch_blocks(
            request_id, 1, self.model, keys, region=self.region, pages=range(len(keys))
        )
        await call.result()
        await call.end()
        return self.wrong_blocks(keys)

    def plan(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        hit_blocks: int,
        path: Path | None = Path.PE,
        attempt: int = 1,
        decode_node: str = "de",
        timeout_s: float = 20.0,
        ring_sets: int = 0,
        first_page: int = 0,
        parts: Sequence[Part] = (),
    ) -> Plan:
        """`ring_sets` 0: each layer has its own pages. `parts`: with `Path.PARTS`."""
        firsts = [first_page + number * len(keys) for number in range(max(1, ring_sets))]
        return Plan(
            request_id=request_id,
            attempt=attempt,
            fingerprint=self.model.fingerprint,
            block_keys=keys,
            tail_tokens=0,
            hit_blocks=hit_blocks,
            decode_node=decode_node,
            path=path,
            region_id=(self.ring if ring_sets else self.region).region_id,
            page_sets=[range(first, first + len(keys)) for first in firsts],
            timeout_s=timeout_s,
            parts=parts,
        )


@asynccontextmanager
async def engine(endpoint: str, manifest: Manifest = MANIFEST, pages: int = PAGES) -> AsyncIterator[Engine]:
    """A registered engine; it may outlive its daemon."""
    made = Engine(await AsyncClient.connect(endpoint, name="e2e", timeout_s=10.0), manifest, pages)
    try:
        await made.register()
        yield made
    finally:
        await made.close()


async def whole_request(pe: Engine, de: Engine, plan: Plan) -> list[tuple[int, int]]:
    """A request from the look-up to the decode engine's pages; what is wrong there."""
    pe.scrub()
    de.scrub()
    assembly = await de.client.assemble_blocks(plan.request_id, plan.attempt, de.model, plan.timeout_s)
    stream = await pe.client.stream_layers(plan) if plan.hit_blocks else None
    push = await pe.client.push_layers(plan)
    prefix_blocks = (await stream.prefix()).prefix_blocks if stream else 0
    for layer in range(LAYERS):
        if stream:
            await stream.wait_layer(layer)
        pe.fill(plan.block_keys[prefix_blocks:], prefix_blocks, [layer])
        await push.computed(layer + 1)
    await assembly.whole()
    deliver = await de.client.deliver(plan.request_id, plan.attempt, de.region, range(len(plan.block_keys)))
    for call in (stream, push, deliver, assembly):
        end = await call.end(END_S) if call else None
        assert end is None or end.reason.name == "OK", f"{call}: {end}"
    return de.wrong_blocks(plan.block_keys) + pe.wrong_blocks(plan.block_keys)


async def outcome(call: Call, timeout_s: float = END_S) -> str:
    """How a call ended: its reason's name, or that of the error it failed with."""
    try:
        return (await call.end(timeout_s)).reason.name
    except KvmoverError as error:
        return type(error).__name__


async def outcomes(*calls: Call, timeout_s: float = END_S) -> list[str]:
    return list(await asyncio.gather(*(outcome(call, timeout_s) for call in calls)))
