"""What both engines of a replay are: a session with their node's daemon, pages in a region, and one thread that computes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from kvmover_client import (
    AsyncClient,
    CallCancelled,
    DaemonGone,
    End,
    Geometry,
    KvmoverError,
    Manifest,
    Model,
    Reason,
    Region,
    RegionMemory,
    TimedOut,
    paged_geometry,
)
from kvmover_client.replay.kv import KvPattern, Mismatch, Span
from kvmover_client.replay.mixing import Words
from kvmover_client.replay.pages import PageAllocator, PagedKv
from kvmover_client.replay.request import AttemptFailed

CONNECT_S = 30.0
SETTLE_S = 15.0
PAGES_S = 120.0
ERRORS_MAX = 20

T = TypeVar("T")


class Call(Protocol):
    """What all calls have in common."""

    def cancel(self) -> None: ...

    async def end(self, timeout_s: float | None = None) -> End: ...

    async def quiet(self, timeout_s: float | None = None) -> None: ...


@dataclass(slots=True)
class Checked:
    """What an engine checked in one attempt."""

    verified_bytes: int = 0
    wrong_bytes: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, where: str, checked_bytes: int, found: Mismatch) -> None:
        self.verified_bytes += checked_bytes
        self.wrong_bytes += found.wrong_bytes
        if found.wrong_bytes:
            self.error(f"{where}: {found.wrong_bytes} wrong bytes, the first at token {found.token} byte {found.byte}")

    def error(self, message: str) -> None:
        """Keeps the first ones; a request that is wrong throughout says so in `wrong_bytes`."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(message)


class Engine:
    """One engine. Its pages are given back only when no call reads or writes them any more."""

    def __init__(
        self, name: str, client: AsyncClient, memory: RegionMemory, model: Model, region: Region, kv: PagedKv
    ) -> None:
        self.name = name
        self.client = client
        self.memory = memory
        self.model = model
        self.region = region
        self.kv = kv
        self.unquiet_pages = 0
        self.tokens_done = 0
        self.busy_s = 0.0
        self._turns = asyncio.Lock()
        self._given_back = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    @classmethod
    async def start(cls, endpoint: str, *, name: str, manifest: Manifest, pages: int, seed: int) -> Self:
        """Connects, and goes on as `open`. Raises the errors of the client library."""
        client = await AsyncClient.connect(endpoint, name=name, timeout_s=CONNECT_S)
        try:
            return await cls.open(client, name=name, manifest=manifest, pages=pages, seed=seed)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def open(cls, client: AsyncClient, *, name: str, manifest: Manifest, pages: int, seed: int) -> Self:
        """Registers model and memory in a session that may be shared. Raises the errors of the client library."""
        memory: RegionMemory | None = None
        try:
            model = await client.register_model(manifest)
            geometry = paged_geometry(manifest.layout, pages)
            memory = RegionMemory.create(geometry.size_bytes, name)
            region = await client.register_region(memory, geometry, model)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        kv = _paged_kv(memory, geometry, model, PageAllocator(pages, seed=seed))
        return cls(name, client, memory, model, region, kv)

    async def close(self) -> None:
        """Ends the session, for all who share it; the daemon then lets go of the region."""
        await self.client.close()
        self._thread.shutdown(wait=True)
        self.kv.forget_memory()
        self.memory.close()

    async def compute(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs work that touches pages on the engine's own thread, one piece after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, work, *arguments)

    @property
    def tokens_per_s(self) -> int:
        """Prompt tokens, hit and new, for each second that the engine's thread was busy with them; 0: none yet."""
        return int(self.tokens_done / self.busy_s) if self.busy_s else 0

    def _timed(self, work: Callable[..., T], *arguments: object) -> T:
        begun_s = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.busy_s += time.perf_counter() - begun_s

    async def over(self, call: Call, what: str) -> None:
        """Waits for a call's last word. Raises `AttemptFailed` when it is not OK."""
        end = await call.end()
        if end.reason is not Reason.OK:
            raise AttemptFailed(f"{what}: {end.reason.name}: {end.message}", retryable=end.retryable)

    def check(self, where: str, layer: int, rows: Sequence[Span], chain: Words, seen: Checked) -> None:
        """Compares a layer's rows with what must be in them; to be run by `compute`."""
        tokens = sum(span.count for span in rows)
        seen.add(where, tokens * self.kv.pattern.token_bytes, self.kv.verify(layer, rows, chain))

    async def take(self, count: int) -> tuple[int, ...]:
        """Pages with nothing of before in them; who came first has them first. Raises `OutOfPages` after `PAGES_S`."""
        allocator = self.kv.allocator
        async with self._turns:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAGES_S):
                    while allocator.free < count <= allocator.total:
                        self._given_back.clear()
                        await self._given_back.wait()
            pages = allocator.take(count)
        try:
            await self.compute(self.kv.scrub, pages)
        except BaseException:
            await self.give_back(pages, ())
            raise
        return pages

    async def give_back(self, pages: Sequence[int], calls: Sequence[Call]) -> None:
        """Ends the calls that use the pages. Pages that never become quiet are never lent again, and counted."""
        quiet = await asyncio.gather(*(_settled(call) for call in calls))
        await asyncio.shield(self.compute(lambda: None))
        if all(quiet):
            self.kv.allocator.give_back(pages)
            self._given_back.set()
        else:
            self.unquiet_pages += len(pages)


async def _settled(call: Call) -> bool:
    """Cancels what still runs; True when its pages are quiet. A call that was refused has never touched them."""
    call.cancel()
    try:
        await call.end(SETTLE_S)
        await call.quiet(SETTLE_S)
    except (CallCancelled, DaemonGone, TimedOut):
        return False
    except KvmoverError as error:
        return error.reason != KvmoverError.reason_default
    return True


def _paged_kv(memory: RegionMemory, geometry: Geometry, model: Model, allocator: PageAllocator) -> PagedKv:
    """Views of the layers: one segment each, pages without gaps, all tokens alike."""
    layout = model.layout
    token_bytes = layout.layers[0][0] // layout.block_tokens
    pattern = KvPattern(
        layers=layout.layer_count,
        token_bytes=token_bytes,
        page_tokens=layout.block_tokens,
        model=model.fingerprint.hex(),
    )
    whole = memory.array()
    layers = [
        whole[segment.base_bytes : segment.base_bytes + segment.pages * segment.page_bytes].reshape(-1, token_bytes)
        for (segment,) in geometry.layers
    ]
    return PagedKv(layers, allocator, pattern)
