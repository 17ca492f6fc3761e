"""Rows that begin on a disk: into the pool, the whole way into an engine's pages, and how soon the first layer is there.

Cold means: O_DIRECT passes the page cache by, and the pool holds less than one of two sets of blocks, which are read in
turn. Each run checks that every byte came from storage, so that a run that was not cold ends the row instead of helping it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmover_client import (
    ROOT,
    AsyncClient,
    BlockState,
    End,
    Layout,
    Manifest,
    Model,
    Plan,
    Reason,
    Region,
    RegionMemory,
    paged_geometry,
    wrapped_key,
)
from kvmover_client import Path as ReadPath
from kvmoverd.core.layout import HEADER_BYTES
from tests.bench.cpu import CpuMeter
from tests.bench.daemon import BenchFailed, Daemon, daemon
from tests.bench.pairs import Run
from tests.bench.plain import Plain
from tests.bench.records import Record, find_records

V32_LAYERS, V32_TOKENS, V32_TOKEN_BYTES = 61, 64, 656
SETS = 2
CHECKED_BLOCKS = 3
TIMEOUT_S = 120.0
SPARE_BYTES = 8 << 30
"""Others use the disk, too; and near its end a store drops what it has."""


@dataclass(frozen=True, slots=True)
class Work:
    """One run: so many requests of so many blocks, so many of them at once."""

    requests: int = 24
    blocks: int = 64
    at_once: int = 8
    layers: int = V32_LAYERS
    piece_bytes: int = 64 << 20

    @property
    def layout(self) -> Layout:
        return Layout.uniform(layers=self.layers, tokens=V32_TOKENS, token_bytes=V32_TOKEN_BYTES)

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + -(-self.layout.block_bytes // 4096) * 4096

    @property
    def all_blocks(self) -> int:
        return self.requests * self.blocks

    @property
    def live_blocks(self) -> int:
        return self.at_once * self.blocks

    @property
    def total_bytes(self) -> int:
        """What one run takes from the disk."""
        return self.all_blocks * self.record_bytes


SMALL = Work(requests=6, blocks=4, at_once=2, layers=13, piece_bytes=2 << 20)
"""Tries all that a run does."""


class DiskRig:
    """A daemon over two sets of stored blocks, an engine with a page for each block that is under way, and the reference."""

    def __init__(
        self, work: Work, made: Daemon, client: AsyncClient, model: Model, region: Region, plain: Plain
    ) -> None:
        self.work = work
        self.daemon = made
        self._plain = plain
        self._client = client
        self._model = model
        self._region = region
        self._numbers = itertools.count()
        self._records: list[list[Record]] = []
        self._keys = [self._new_keys() for _ in range(SETS)]

    @property
    def page_kind(self) -> str:
        """Of the reference's memory: the kind that a pool of this size gets, too."""
        return self._plain.page_kind

    async def fill(self, store: Path) -> None:
        """Stores both sets through the daemon."""
        for keys in self._keys:
            for first in range(0, len(keys), self.work.live_blocks):
                self.fill_pages()
                for start in range(first, min(first + self.work.live_blocks, len(keys)), self.work.blocks):
                    await self._store(keys[start : start + self.work.blocks], start - first)
        self._records = [find_records(store, self._model.fingerprint, keys) for keys in self._keys]

    def fill_pages(self) -> None:
        """Bytes that no layer below can compress or find twice."""
        rng = np.random.default_rng(secrets.randbits(64))
        words = self._region.memory.array(np.uint64)
        words[:] = rng.integers(0, 1 << 64, len(words), dtype=np.uint64)

    async def put(self, number: int) -> Run:
        """As many new blocks out of the pages; the time ends when the last is durable."""
        return await self._run(self._new_keys(), self._put_one)

    async def fetch(self, number: int) -> Run:
        """Every block of a set into the pool, under leases."""
        return await self._run(self._keys[number % SETS], self._fetch_one)

    async def whole_way(self, number: int) -> Run:
        """Every block of a set into pages, layer by layer."""
        return await self._run(self._keys[number % SETS], self._stream_one)

    async def reference(self, number: int) -> Run:
        return self._plain.read(self._records[number % SETS])

    def plain_put(self, directory: Path) -> Run:
        """The same bytes as `put`, by threads that do nothing else."""
        return self._plain.write(directory, self.work.all_blocks)

    async def first_layer(self, number: int) -> tuple[float, float]:
        """One request alone, another one each time: seconds to the first layer, and to all of them.

        By the time that a request's turn comes again, all the others have gone through the pool.
        """
        which, request = number % SETS, number // SETS % self.work.requests
        keys = self._keys[which][request * self.work.blocks :][: self.work.blocks]
        began_s = time.monotonic()
        call = await self._client.stream_layers(self._plan(keys, 0))
        await call.wait_layer(0)
        first_s = time.monotonic() - began_s
        await call.wait_layer(self.work.layers - 1)
        all_s = time.monotonic() - began_s
        _check_end(await call.end(), len(keys) * self.work.record_bytes)
        return first_s, all_s

    async def warm_up(self) -> None:
        """Reads the first set, then the second: what the pool keeps of the latter is gone when its turn comes."""
        for number in range(SETS):
            await self._run(self._keys[number], self._fetch_one, check=False)

    async def check_bytes(self) -> None:
        """The pages hold what the store's files hold. Raises `BenchFailed`."""
        keys = self._keys[0][: self.work.blocks]
        call = await self._client.stream_layers(self._plan(keys, 0))
        await call.end()
        for page in np.random.default_rng(0).permutation(len(keys))[:CHECKED_BLOCKS]:
            payload = self._payload(self._records[0][page])
            for layer, (size_bytes,) in enumerate(self.work.layout.layers):
                there = self._region.page_view(layer, 0, int(page)).tobytes()
                if there != payload[layer * size_bytes : (layer + 1) * size_bytes]:
                    raise BenchFailed(f"block {page}, layer {layer}: the page differs from the file")

    def _payload(self, record: Record) -> bytes:
        with record.path.open("rb") as file:
            file.seek(record.offset_bytes + HEADER_BYTES)
            return file.read(self.work.layout.block_bytes)

    async def _run(self, keys: list[bytes], one: Callable[..., Awaitable[None]], *, check: bool = True) -> Run:
        """The requests of one run, `at_once` workers, each with pages of its own."""
        work = self.work
        starts = iter(range(0, len(keys), work.blocks))

        async def worker(place: int) -> None:
            for start in starts:
                await one(keys[start : start + work.blocks], place * work.blocks, check=check)

        meter, began_s = CpuMeter(self.daemon.pid, os.getpid()), time.monotonic()
        async with asyncio.TaskGroup() as group:
            for place in range(work.at_once):
                group.create_task(worker(place))
        took_s = time.monotonic() - began_s
        return Run(work.total_bytes / took_s / 1e9, meter.spent_s() / (work.total_bytes / 1e9))

    async def _fetch_one(self, keys: Sequence[bytes], first_page: int, *, check: bool) -> None:
        call = await self._client.fetch_blocks(self._name(), 1, self._model, keys, timeout_s=TIMEOUT_S)
        result = await call.result()
        missed = [block for block in result.blocks if block.state is not BlockState.HIT]
        if missed or result.lease is None:
            raise BenchFailed(f"{len(missed)} of {len(keys)} blocks were not fetched, the first: {missed[:1]}")
        await self._client.release([result.lease])
        _check_end(await call.end(), len(keys) * self.work.record_bytes if check else None)

    async def _stream_one(self, keys: Sequence[bytes], first_page: int, *, check: bool) -> None:
        call = await self._client.stream_layers(self._plan(keys, first_page))
        await call.wait_layer(self.work.layers - 1)
        _check_end(await call.end(), len(keys) * self.work.record_bytes if check else None)

    async def _put_one(self, keys: Sequence[bytes], first_page: int, *, check: bool) -> None:
        await self._store(keys, first_page)

    async def _store(self, keys: Sequence[bytes], first_page: int) -> None:
        pages = range(first_page, first_page + len(keys))
        call = await self._client.store_blocks(
            self._name(), 1, self._model, keys, ROOT, 0, self._region, pages, timeout_s=TIMEOUT_S
        )
        states = [block.state for block in await call.result()]
        await call.end()
        if states != [BlockState.HIT] * len(keys):
            raise BenchFailed(f"{states.count(BlockState.HIT)} of {len(keys)} blocks were stored")

    def _plan(self, keys: Sequence[bytes], first_page: int) -> Plan:
        return Plan(
            request_id=self._name(),
            attempt=1,
            fingerprint=self._model.fingerprint,
            block_keys=keys,
            tail_tokens=0,
            hit_blocks=len(keys),
            decode_node="",
            path=ReadPath.PE,
            region_id=self._region.region_id,
            page_sets=[range(first_page, first_page + len(keys))],
            timeout_s=TIMEOUT_S,
        )

    def _new_keys(self) -> list[bytes]:
        return [wrapped_key(self._model.fingerprint, secrets.token_bytes(32)) for _ in range(self.work.all_blocks)]

    def _name(self) -> str:
        return f"bench-{next(self._numbers)}"


def _check_end(end: End, read_bytes: int | None) -> None:
    """A run counts only when it ended well and, with `read_bytes`, when it was cold."""
    if end.reason is not Reason.OK:
        raise BenchFailed(f"a request ended with {end.reason.name}: {end.message}")
    if read_bytes is not None and end.storage_read_bytes != read_bytes:
        raise BenchFailed(f"a run was not cold: {end.storage_read_bytes} of {read_bytes} bytes came from storage")


def config(work: Work, store: Path, *, storage: str, layout: str = "", write_blocks: int) -> str:
    """A pool that holds what is under way and little more. `storage` and `layout`: "" for the daemon's default."""
    live_bytes, write_bytes = work.live_blocks * work.record_bytes, write_blocks * work.record_bytes
    piece_slots = work.piece_bytes // work.record_bytes
    pieces = -(-(work.live_blocks + write_blocks // 2) // piece_slots) + 1
    pool_bytes = max(pieces * work.piece_bytes, _up(live_bytes + write_bytes + 1, work.piece_bytes))
    chosen = "".join(f'{key} = "{value}"\n' for key, value in (("kind", storage), ("layout", layout)) if value)
    return (
        f"[pool]\nbytes = {pool_bytes}\npiece_bytes = {work.piece_bytes}\n"
        f"read_bytes = {live_bytes}\nwrite_back_bytes = {write_bytes}\nde_buffer_bytes = 1\n\n"
        f'[[storage]]\nname = "disk"\npath = "{store}"\n{chosen}\n'
        '[transport]\nlisten = "127.0.0.1:0"\n\n[log]\nlevel = "warning"\n'
    )


def check_space(store: Path, size_bytes: int) -> None:
    """Raises `BenchFailed` rather than fill a disk."""
    free_bytes, wanted_bytes = shutil.disk_usage(store).free, size_bytes + SPARE_BYTES
    if free_bytes < wanted_bytes:
        raise BenchFailed(f"{store} has {free_bytes} bytes free, {wanted_bytes} are wanted: name another --directory")


def _up(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


@asynccontextmanager
async def disk_rig(
    home: Path, store: Path, work: Work, *, storage: str, layout: str = "", profile: bool
) -> AsyncIterator[DiskRig]:
    """Everything stored, warmed up and checked. `storage`, `layout`: "" for the daemon's default."""
    check_space(store, SETS * work.total_bytes)
    text = config(work, store, storage=storage, layout=layout, write_blocks=work.blocks)
    async with _rig(home, text, work, profile=profile) as rig:
        await rig.fill(store)
        await rig.check_bytes()
        await rig.warm_up()
        yield rig


@asynccontextmanager
async def put_rig(
    home: Path, store: Path, work: Work, *, storage: str, layout: str = "", profile: bool
) -> AsyncIterator[DiskRig]:
    """An empty store, and pages full of bytes; one run's worth of blocks was stored to warm up."""
    text = config(work, store, storage=storage, layout=layout, write_blocks=work.live_blocks)
    async with _rig(home, text, work, profile=profile) as rig:
        rig.fill_pages()
        await rig.put(0)
        yield rig


@asynccontextmanager
async def _rig(home: Path, text: str, work: Work, *, profile: bool) -> AsyncIterator[DiskRig]:
    async with AsyncExitStack() as stack:
        made = stack.enter_context(daemon(home, text, profile=profile))
        client = await stack.enter_async_context(await AsyncClient.connect(made.endpoint, name="bench"))
        model = await client.register_model(
            Manifest("bench", secrets.token_bytes(32), secrets.token_bytes(32), work.layout, "u8")
        )
        geometry = paged_geometry(work.layout, work.live_blocks)
        memory = stack.enter_context(RegionMemory.create(geometry.size_bytes, "bench"))
        region = await client.register_region(memory, geometry, model)
        plain = Plain(work.live_blocks, work.record_bytes, work.piece_bytes)
        stack.callback(plain.close)
        yield DiskRig(work, made, client, model, region, plain)
