"""Engines of the simulation: severe ones. What a call says is ready is looked at, and pages that are quiet are poisoned.

An engine is a process on the node of its daemon. It hears of the daemon's death at once; the daemon hears of its.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from node_kit import LAYOUT, MANIFEST, POISON, Anonymous, Engine
from sim_daemon import SimDaemon
from sim_loop import START_S, Process

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.geometry import RegionGeometry, Segment
from kvmoverd.core.machines.actions import AnnounceQuiet, Finish, FinishDelivery
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import End, Reason
from kvmoverd.node.outbox import Outbox, Told

T = TypeVar("T")
NAMESPACE = Namespace(MANIFEST)


class DaemonGone(Exception):
    """The companion socket says so."""


@dataclass(eq=False)
class Heard:
    """One call and all that its caller was told."""

    name: str
    made_s: float
    bound_s: float
    engine_gone: Callable[[], bool]
    events: list[Told] = field(default_factory=list)
    end: End | None = None
    ended_s: float = 0.0
    quiet: bool = False
    gone: bool = False
    """The daemon died: there is no end, and nobody writes any more."""

    @property
    def over(self) -> bool:
        return self.end is not None or self.gone

    def take(self, event: Told, now_s: float) -> None:
        assert not self.quiet, f"{self.name} was told {event} after its end"
        assert self.end is None or isinstance(event, AnnounceQuiet), f"{self.name} was told {event} after {self.end}"
        self.events.append(event)
        if isinstance(event, Finish | FinishDelivery):
            self.end, self.quiet, self.ended_s = event.end, event.end.pages_quiet, now_s
        elif isinstance(event, AnnounceQuiet):
            assert self.end is not None, f"{self.name} is quiet without an end"
            self.quiet = True


@dataclass(eq=False)
class InUse:
    """Pages that calls work on; poisoned when all of these have let go."""

    engine: SimEngine
    pages: Sequence[int]
    calls: list[Heard]
    poisoned: bool = False

    def look(self) -> None:
        if self.poisoned:
            self.check()
        elif all(call.quiet or call.gone for call in self.calls):
            self.poisoned = True
            for page in self.pages:
                self.engine.memory_of.fill(page, bytes([POISON]) * LAYOUT.block_bytes)

    def check(self) -> None:
        for page in self.pages:
            assert not self.poisoned or set(self.engine.memory_of.block(page)) == {POISON}, (
                f"page {page} of {self.engine.process.name} changed after {[(c.name, c.end, c.gone) for c in self.calls]}"
            )


class SimEngine:
    """A session with a daemon, and one paged region."""

    def __init__(self, daemon: SimDaemon, name: str, pages: int, *, compute_s: float = 0.0) -> None:
        self.daemon = daemon
        self.process = Process(daemon.process.loop, name)
        daemon.cluster.net.nodes[self.process] = daemon.name
        self.compute_s = compute_s
        self.pages = pages
        self.heard: list[Heard] = []
        self.in_use: list[InUse] = []
        self.failures: list[str] = []
        self.refused: list[str] = []
        self.is_gone = False
        self.hearing: dict[Heard, asyncio.Task[Any]] = {}

    @property
    def now_s(self) -> float:
        return self.process.loop.time()

    async def open(self) -> None:
        """Raises `DaemonGone`."""
        await self.ask_async(lambda: self.daemon.node.namespaces.register(MANIFEST))
        await self.ask(self._open)

    def _open(self) -> None:
        node = self.daemon.node
        self.session, _ = node.session_opened(self.process.name, 1)
        layers, at = [], 0
        for segments in LAYOUT.layers:
            layer = []
            for size in segments:
                layer.append(Segment(at, size, size, self.pages))
                at += size * self.pages
            layers.append(tuple(layer))
        self.memory = Anonymous(at)
        self.session.mappings[7] = self.memory
        geometry = RegionGeometry(LAYOUT, at, tuple(layers))
        self.region = node.register_region(self.session, 7, NAMESPACE, geometry)
        self.memory_of = Engine(None, self.session, self.region, self.memory, self.pages)  # type: ignore[arg-type]
        self.daemon.on_killed.append(self.daemon_died)

    async def ask(self, work: Callable[[], T]) -> T:
        """What the daemon answers. Raises `KvmoverError`, `DaemonGone`."""

        async def asked() -> T:
            return work()

        return await self.ask_async(asked)

    async def ask_async(self, work: Callable[[], Awaitable[T]]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        daemon = self.daemon

        async def answering() -> None:
            try:
                found = await work()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(found)

        daemon.process.soon(lambda: daemon.process.task(answering()))
        await asyncio.wait([answer, daemon.gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise DaemonGone
        return answer.result()

    def listen(
        self, name: str, outbox: Outbox, bound_s: float, react: Callable[[Told], Awaitable[None]] | None = None
    ) -> Heard:
        heard = Heard(f"{self.process.name} {name}", self.now_s, bound_s, lambda: self.is_gone)
        self.heard.append(heard)
        if self.daemon.process.is_dead:
            heard.gone = heard.quiet = True
            return heard

        async def hear() -> None:
            while (event := await outbox.get()) is not None:
                try:
                    heard.take(event, self.now_s)
                    if react is not None:
                        await react(event)
                    self.look()
                except DaemonGone:
                    return
                except KvmoverError as error:
                    self.refused.append(f"{heard.name}: {error}")
                except AssertionError as error:
                    self.failures.append(f"{self.now_s - START_S:.3f} s: {heard.name}: {error}")
                    raise

        self.hearing[heard] = self.process.task(hear())
        return heard

    def uses(self, pages: Sequence[int], *calls: Heard) -> None:
        self.in_use.append(InUse(self, list(pages), list(calls)))

    def look(self) -> None:
        for used in self.in_use:
            used.look()

    def daemon_died(self) -> None:
        """In no process: the calls are over."""
        for heard in self.heard:
            if not heard.over:
                heard.gone = heard.quiet = True
                self.hearing[heard].cancel()
        if not self.is_gone:
            self.process.soon(self.look)

    def die(self) -> None:
        """kill -9: the memory stays until the daemon has unmapped it, which it does by poisoning it here."""
        if self.is_gone:
            return
        self.is_gone = True
        self.process.kill()
        daemon = self.daemon
        daemon.process.soon(lambda: daemon.node.session_closed(self.session.session_id, "the engine died"))

    def check_layer(
        self, layer: int, pages: Sequence[int], keys: Sequence[bytes], content: Callable[[bytes], bytes]
    ) -> None:
        span = LAYOUT.layer_span(layer)
        for page, key in zip(pages, keys, strict=True):
            got = self.memory_of.block(page)[span.start : span.stop]
            assert got == content(key)[span.start : span.stop], f"layer {layer} of page {page} has wrong bytes"

    def last_look(self) -> list[str]:
        """What is wrong at the end."""
        found = list(self.failures)
        if self.is_gone:
            if getattr(self, "memory", None) is not None and not self.memory.was_left_alone():
                found.append(f"{self.process.name}: written after it was unmapped")
            return found
        try:
            self.look()
            self.look()
        except AssertionError as error:
            found.append(str(error))
        return found


def ok(heard: Heard) -> bool:
    return heard.end is not None and heard.end.reason is Reason.OK


def content_of(key: bytes) -> bytes:
    """The KV of a block: a function of its key alone."""
    if key not in _CONTENT:
        seed = int.from_bytes(key[:8], "little")
        _CONTENT[key] = np.random.default_rng(seed).bytes(LAYOUT.block_bytes)
    return _CONTENT[key]


_CONTENT: dict[bytes, bytes] = {}
