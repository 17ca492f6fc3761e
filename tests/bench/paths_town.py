"""Several real nodes over one store, each with a storage NIC of the same set speed, and engines at the first ones.

Engine 0 prefills, the others decode. A request is loaded as it is in production: the decode engine attaches, layers come into
the prefill engine's pages, what the decode node lacks is pushed, and the whole buffer is delivered. All bytes that arrive follow
from the blocks' keys, so that any of them can be checked at any time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmover_client import (
    ROOT,
    AssembleCall,
    AsyncClient,
    BlockState,
    DeliverCall,
    Layout,
    Manifest,
    Model,
    Plan,
    PushCall,
    Reason,
    Region,
    RegionMemory,
    StreamCall,
    paged_geometry,
    wrapped_key,
)
from kvmover_client import Path as ReadPath
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.rpc.status_client import node_status
from tests.bench.cpu import CpuMeter
from tests.bench.daemon import BenchFailed, Daemon, daemon
from tests.bench.paths_load import Queues, Rule
from tests.e2e.cluster import free_ports

TIMEOUT_S = 60.0
SEEN_S = 5.0
STORED_AT_ONCE = 64
CHECKED_BLOCKS = 6
COLD_TRIES = 4
PIECE_BYTES = 16 << 20
STORE_OPS = 16
"""Of a root's hands: what waits there is not overtaken any more."""
NAMES = ("a", "b", "c", "d")

CONFIG = """\
[pool]
bytes = {pool_bytes}
piece_bytes = {piece_bytes}
read_bytes = {room_bytes}
de_buffer_bytes = {room_bytes}
help_bytes = {help_bytes}
write_back_bytes = {write_bytes}
prefetch_bytes = "0B"

[[storage]]
name = "nic"
path = "{store}"
layout = "segments"
segment_bytes = "256MiB"
direct = false
threads = 4
ops_max = {ops_max}
read_rate_max = {rate}

[transport]
kind = "{transport}"
listen = "127.0.0.1:0"
socket = "{home}/data.sock"

[log]
level = "warning"
"""
PEER = '\n[[peers]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\n'


@dataclass(frozen=True, slots=True)
class Scale:
    """`blocks` of one request; all that is under way at once has `pages` blocks; `sets` of blocks are read in turn."""

    blocks: int = 500
    layers: int = 16
    layer_bytes: int = 16 << 10
    rate_bytes_per_s: int = 64 << 20
    pages: int = 512
    engines: int = 2
    sets: int = 16

    @property
    def layout(self) -> Layout:
        return Layout.uniform(layers=self.layers, tokens=64, token_bytes=self.layer_bytes // 64)

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + -(-self.layout.block_bytes // 4096) * 4096

    @property
    def room_bytes(self) -> int:
        return self.pages * self.record_bytes

    def config(self, home: Path, store: Path, transport: str, *, has_engine: bool) -> str:
        """A pool that holds what is under way, and little more: what was read some runs ago must not be there any more."""
        write_bytes = STORED_AT_ONCE * self.record_bytes if has_engine else 1
        room_bytes = self.room_bytes if has_engine else 1
        help_bytes = self.room_bytes if has_engine else self.room_bytes // 2
        wanted_bytes = 2 * room_bytes + help_bytes + write_bytes
        return CONFIG.format(
            pool_bytes=-(-wanted_bytes // PIECE_BYTES) * PIECE_BYTES + (2 * PIECE_BYTES if has_engine else 0),
            piece_bytes=PIECE_BYTES,
            room_bytes=room_bytes,
            help_bytes=help_bytes,
            write_bytes=write_bytes,
            store=store,
            ops_max=STORE_OPS,
            rate=self.rate_bytes_per_s,
            transport=transport,
            home=home,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """One request: seconds to its first layer and to its last, and what storage was read for it."""

    first_s: float
    all_s: float
    read_bytes: int


class Engine:
    """A session, its pages, and which of them are free."""

    def __init__(self, scale: Scale, client: AsyncClient, model: Model, region: Region) -> None:
        self.client, self.model, self.region = client, model, region
        self._scale = scale
        self._free = deque(range(scale.pages))
        self._given = asyncio.Condition()
        self._words = np.arange(scale.layer_bytes // 8, dtype=np.uint64)

    async def take(self, count: int) -> list[int]:
        """Pages, when there are so many. Raises `TimeoutError`."""
        async with asyncio.timeout(TIMEOUT_S), self._given:
            await self._given.wait_for(lambda: len(self._free) >= count)
            return [self._free.popleft() for _ in range(count)]

    async def give(self, pages: Sequence[int]) -> None:
        async with self._given:
            self._free.extend(pages)
            self._given.notify_all()

    def fill(self, keys: Sequence[bytes]) -> None:
        """Writes what belongs to the keys into the first pages."""
        for page, key in enumerate(keys):
            for layer in range(self._scale.layers):
                self._page(layer, page)[:] = self._content(key, layer)

    def check(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Some of the blocks, byte by byte, and scrubs those. Raises `BenchFailed`."""
        for place in np.random.default_rng().permutation(len(keys))[:CHECKED_BLOCKS].tolist():
            for layer in range(self._scale.layers):
                there = self._page(layer, pages[place])
                if not np.array_equal(there, self._content(keys[place], layer)):
                    raise BenchFailed(f"block {place} of {len(keys)}, layer {layer}: the page has other bytes")
                there[:] = 0

    def _page(self, layer: int, page: int) -> np.ndarray:
        return self.region.page_view(layer, 0, page).view(np.uint64)

    def _content(self, key: bytes, layer: int) -> np.ndarray:
        seed = np.uint64((int.from_bytes(key[:8], "little") + 0x9E3779B97F4A7C15 * (layer + 1)) & ((1 << 64) - 1))
        return np.asarray(self._words * np.uint64(0x2545F4914F6CDD1D) ^ seed)


class Town:
    """Nodes `NAMES`; the prefill engine is at the first, decode engines at those after it."""

    def __init__(self, scale: Scale, daemons: Sequence[Daemon], engines: Sequence[Engine]) -> None:
        self.scale = scale
        self.daemons = daemons
        self.names = NAMES[: len(daemons)]
        self._engines = engines
        self._numbers = itertools.count()
        self._sets = [self._new_keys() for _ in range(scale.sets)]
        self._turns = itertools.cycle([key for keys in self._sets for key in keys])

    @property
    def prefill(self) -> Engine:
        return self._engines[0]

    def pids(self) -> list[int]:
        return [os.getpid(), *(made.pid for made in self.daemons)]

    def meter(self) -> CpuMeter:
        return CpuMeter(*self.pids())

    async def read_bytes(self) -> dict[str, int]:
        """By each node's storage since its start."""
        sockets = [str(made.home / "engine.sock") for made in self.daemons]
        found = await asyncio.gather(*(asyncio.to_thread(node_status, socket, timeout_s=5.0) for socket in sockets))
        counters = {}
        for name, status in zip(self.names, found, strict=True):
            if status is None:
                raise BenchFailed(f"node {name} does not say what it has read")
            counters[name] = sum(root["read_bytes"] for root in status["storage"])
        return counters

    def next_keys(self, count: int = 0) -> list[bytes]:
        """Those that were read longest ago, as no pool holds them any more; 0: as many as one request has."""
        return [next(self._turns) for _ in range(count or self.scale.blocks)]

    async def fill(self) -> None:
        """Stores all sets through the prefill node, and waits until every engine's node knows them."""
        for keys in self._sets:
            for first in range(0, len(keys), STORED_AT_ONCE):
                await self._store(keys[first : first + STORED_AT_ONCE])
        until_s = time.monotonic() + SEEN_S
        for engine in self._engines:
            while (await engine.client.lookup(engine.model, self._sets[-1])).prefix_blocks < self.scale.blocks:
                if time.monotonic() > until_s:
                    raise BenchFailed(f"a node does not know what was stored {SEEN_S:g} s ago")
                await asyncio.sleep(0.05)

    async def load(self, rule: Rule, keys: Sequence[bytes], *, decode: int = 1, queues: Queues | None = None) -> Loaded:
        """One request, to the decode engine's pages; its bytes are checked there and at the prefill engine."""
        pe, de = self._engines[0], self._engines[decode]
        pages = await pe.take(len(keys))
        try:
            return await self._load(rule, keys, pages, de, self.names[decode], queues or Queues())
        finally:
            await pe.give(pages)

    async def _load(
        self, rule: Rule, keys: Sequence[bytes], pages: list[int], de: Engine, decode: str, queues: Queues
    ) -> Loaded:
        pe, size_bytes = self.prefill, len(keys) * self.scale.record_bytes
        reader = queues.choose(rule, self.names[0], decode)
        queues.given(reader, size_bytes)
        plan = self._plan(rule, keys, pages, decode, reader)
        assembly = await de.client.assemble_blocks(plan.request_id, 1, de.model, TIMEOUT_S)
        began_s = time.monotonic()
        stream = await pe.client.stream_layers(plan)
        await stream.wait_layer(0)
        first_s = time.monotonic() - began_s
        await stream.wait_layer(self.scale.layers - 1)
        all_s = time.monotonic() - began_s
        queues.given(reader, -size_bytes)
        push = await pe.client.push_layers(plan)
        await push.computed(self.scale.layers)
        await assembly.whole()
        await self._deliver(plan, de)
        read_bytes = 0
        for call in (stream, push, assembly):
            read_bytes = max(read_bytes, await _ended_well(call, plan.request_id))
        pe.check(keys, pages)
        return Loaded(first_s, all_s, read_bytes)

    async def _deliver(self, plan: Plan, de: Engine) -> None:
        pages = await de.take(len(plan.block_keys))
        try:
            deliver = await de.client.deliver(plan.request_id, 1, de.region, pages)
            await _ended_well(deliver, plan.request_id)
            de.check(plan.block_keys, pages)
        finally:
            await de.give(pages)

    def _plan(self, rule: Rule, keys: Sequence[bytes], pages: Sequence[int], decode: str, reader: str) -> Plan:
        one_side = ReadPath.PE if reader == self.names[0] else ReadPath.DE
        return Plan(
            request_id=f"paths-{next(self._numbers)}",
            attempt=1,
            fingerprint=self.prefill.model.fingerprint,
            block_keys=keys,
            tail_tokens=0,
            hit_blocks=len(keys),
            decode_node=decode,
            path=ReadPath.AUTO if rule in (Rule.SPLIT, Rule.HELPED) else one_side,
            region_id=self.prefill.region.region_id,
            page_sets=[pages],
            timeout_s=TIMEOUT_S,
            no_helpers=rule is Rule.SPLIT,
        )

    async def _store(self, keys: Sequence[bytes]) -> None:
        engine = self.prefill
        engine.fill(keys)
        call = await engine.client.store_blocks(
            f"paths-{next(self._numbers)}",
            1,
            engine.model,
            keys,
            ROOT,
            0,
            engine.region,
            range(len(keys)),
            timeout_s=TIMEOUT_S,
        )
        states = [block.state for block in await call.result()]
        await call.end()
        if states != [BlockState.HIT] * len(keys):
            raise BenchFailed(f"{states.count(BlockState.HIT)} of {len(keys)} blocks were stored")

    def _new_keys(self) -> list[bytes]:
        fingerprint = self.prefill.model.fingerprint
        return [wrapped_key(fingerprint, secrets.token_bytes(32)) for _ in range(self.scale.blocks)]


async def _ended_well(call: StreamCall | PushCall | AssembleCall | DeliverCall, request_id: str) -> int:
    """What was read from storage for it. Raises `BenchFailed`."""
    end = await call.end()
    if end.reason is not Reason.OK:
        raise BenchFailed(f"{request_id} ended with {end.reason.name}: {end.message}")
    return end.storage_read_bytes


@asynccontextmanager
async def town(home: Path, store: Path, scale: Scale, *, nodes: int, transport: str) -> AsyncIterator[Town]:
    """With everything stored; each node's pool holds some of it."""
    async with AsyncExitStack() as stack:
        daemons = stack.enter_context(_daemons(home, store, scale, nodes, transport))
        digest = secrets.token_bytes(32)
        manifest = Manifest("paths", digest, digest, scale.layout, "u8")
        engines = []
        for made in daemons[: scale.engines]:
            client = await stack.enter_async_context(await AsyncClient.connect(made.endpoint, name="bench"))
            model = await client.register_model(manifest)
            geometry = paged_geometry(scale.layout, scale.pages)
            memory = stack.enter_context(RegionMemory.create(geometry.size_bytes, "bench"))
            engines.append(Engine(scale, client, model, await client.register_region(memory, geometry, model)))
        found = Town(scale, daemons, engines)
        await found.fill()
        yield found


@contextmanager
def _daemons(home: Path, store: Path, scale: Scale, nodes: int, transport: str) -> Iterator[list[Daemon]]:
    names = NAMES[:nodes]
    ports = dict(zip(names, free_ports(nodes), strict=True))
    with ExitStack() as stack:
        found = []
        for number, name in enumerate(names):
            own = home / name
            own.mkdir()
            peers = "".join(PEER.format(name=peer, port=ports[peer]) for peer in names if peer != name)
            text = scale.config(own, store, transport, has_engine=number < scale.engines) + peers
            found.append(stack.enter_context(daemon(own, text, profile=False, name=name, port=ports[name])))
        yield found
