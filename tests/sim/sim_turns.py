"""One turn of a conversation in the simulation: a prefill engine, a decode engine, and what they do about failures."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from node_kit import LAYOUT
from sim_engines import NAMESPACE, DaemonGone, Heard, SimEngine, content_of, ok

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.machines.actions import AnnounceLayers, AnnouncePrefix, AnnounceWhole, FinishDelivery
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.driver import Call
from kvmoverd.node.outbox import Told
from kvmoverd.node.prefill import Plan
from kvmoverd.node.pushing import PushDriver
from kvmoverd.node.sessions import as_pages

TAIL = b"tail" * 8
ATTEMPTS_MAX = 3
SLACK_S = 12.0
"""What a call may take beyond its timeout: the wait for what is under way, silences, and the time to say so."""


@dataclass(frozen=True)
class Wish:
    """What the turn asks for."""

    request_id: str
    keys: tuple[bytes, ...]
    hit_blocks: int
    tail_tokens: int
    path: Path
    timeout_s: float
    resident_blocks: int = 0
    shares: tuple[Share, ...] = ()
    """With `Path.PARTS`: fit for the first attempt; later ones are read as by `AUTO`."""
    no_helpers: bool = False


class Turn:
    """`prefill` and `decode` (or none) are its engines; `run` is over when nothing more will be tried."""

    def __init__(self, wish: Wish, prefill: SimEngine, decode: SimEngine | None, rng: random.Random) -> None:
        self.wish = wish
        self.prefill, self.decode = prefill, decode
        self.random = rng
        self.attempt = 0
        self.hit = wish.hit_blocks
        self.prefix: int | None = None
        self.delivered = False
        self.computed = 0
        self.pushing: PushDriver | None = None
        self.cancelled = False

    @property
    def total(self) -> int:
        return len(self.wish.keys) + (self.wish.tail_tokens > 0)

    def pages(self) -> range:
        first = (self.attempt - 1) * self.total
        return range(first, first + self.total)

    async def run(self) -> None:
        try:
            await self.prefill.open()
            if self.decode is not None:
                await self.decode.open()
            for self.attempt in range(1, ATTEMPTS_MAX + 1):
                if await self._try() or self.cancelled:
                    return
                await asyncio.sleep(self.random.choice([0.001, 0.1, 1.0]))
        except DaemonGone:
            return

    async def _try(self) -> bool:
        """One attempt; True when it was done."""
        self.prefix, self.pushing, self.computed = None, None, 0
        assembly = await self._attach() if self.decode is not None else None
        calls: list[Heard] = []
        for page, key in zip(self.pages(), self.wish.keys[: self.wish.resident_blocks], strict=False):
            self.prefill.memory_of.fill(page, content_of(key))
        try:
            if self.loads:
                calls.append(await self._stream())
            if self.decode is not None:
                if self.loads and self.random.random() < 0.3:
                    await asyncio.sleep(self.random.random() * 0.2)
                calls.append(await self._push())
        except KvmoverError as error:
            self.prefill.refused.append(f"attempt {self.attempt}: {error}")
        self.prefill.uses(self.pages(), *calls)
        await self._over([*calls, *([assembly] if assembly else [])])
        self._learn(calls)
        self.prefill.look()
        return bool(calls) and all(map(ok, calls)) and (self.decode is None or self.delivered)

    async def _over(self, calls: list[Heard]) -> None:
        while not all(call.over or call.engine_gone() for call in calls):  # noqa: ASYNC110 - several things may end them
            await asyncio.sleep(0.02)

    def _learn(self, calls: list[Heard]) -> None:
        """The next attempt loads what is said to be good."""
        for call in calls:
            if call.end is not None and call.end.reason is Reason.PREFIX_CUT and " stream " in call.name:
                assert call.end.prefix_blocks <= self.hit, f"{call.end.prefix_blocks} of {self.hit} blocks are good"
                if call.end.prefix_blocks < self.hit:
                    self.cuts(call.end.prefix_blocks)
                self.hit = call.end.prefix_blocks

    def cuts(self, first_lost: int) -> None:
        """Recompute from there: what is before must be good, and this one not."""
        store = self.prefill.daemon.cluster.store
        assert first_lost < self.hit, f"{self.wish.request_id}: cut at {first_lost} of {self.hit} blocks"
        key = self.wish.keys[first_lost]
        assert store.is_lost(key), f"{self.wish.request_id}: cut at block {first_lost}, which never failed"

    # Calls ------------------------------------------------------------------------------------------------------------

    def _call(self, engine: SimEngine) -> Call:
        return Call(self.wish.request_id, self.attempt, engine.session.session_id, self.wish.timeout_s)

    def _plan(self) -> Plan:
        wish, decode_node = self.wish, self.decode.daemon.name if self.decode is not None else ""
        path = wish.path
        if path is Path.PARTS and (self.attempt > 1 or not self.loads):
            path = Path.AUTO
        return Plan(
            self._call(self.prefill),
            NAMESPACE,
            wish.keys,
            wish.tail_tokens,
            self.hit,
            decode_node,
            path if self.hit else None,
            self.prefill.region,
            (as_pages(list(self.pages())),),
            resident_blocks=min(self.hit, wish.resident_blocks),
            shares=wish.shares if path is Path.PARTS else (),
            no_helpers=wish.no_helpers and path is Path.AUTO and self.hit > 0,
        )

    @property
    def loads(self) -> bool:
        """Is there anything to load?"""
        return self.hit > self.wish.resident_blocks

    @property
    def _bound_s(self) -> float:
        return self.wish.timeout_s + SLACK_S

    async def _stream(self) -> Heard:
        driver = await self.prefill.ask(lambda: self.prefill.daemon.node.stream(self._plan()))
        return self.prefill.listen(f"stream {self.attempt}", driver.outbox, self._bound_s, self._on_stream)

    async def _on_stream(self, event: Told) -> None:
        if isinstance(event, AnnouncePrefix):
            self.prefix = event.prefix_blocks
            if event.prefix_blocks < self.hit:
                self.cuts(event.prefix_blocks)
        if isinstance(event, AnnounceLayers):
            assert self.prefix is not None, "layers before the prefix"
            for layer in range(event.first, event.last + 1):
                keys = self.wish.keys[: self.prefix]
                self.prefill.check_layer(layer, self.pages()[: self.prefix], keys, content_of)
            await self._compute(event.first, event.last + 1)

    async def _compute(self, first: int, stop: int) -> None:
        attempt = self.attempt
        for layer in range(first, stop):
            if self.prefill.compute_s:
                await asyncio.sleep(self.prefill.compute_s * self.random.random())
            if self.attempt != attempt or self._given_up():
                return
            self._fill_new(layer, self.prefix or 0)
            self.computed = layer + 1
        if self.decode is None:
            return
        pushing = self.pushing
        if pushing is not None:
            await self.prefill.ask(lambda: pushing.request.computed(stop))

    def _given_up(self) -> bool:
        """Has a call of this attempt ended with a failure? Then its pages may be somebody else's."""
        mine = [call for call in self.prefill.heard if call.name.endswith(f" {self.attempt}")]
        return any(call.over and not ok(call) for call in mine)

    def _fill_new(self, layer: int, prefix: int) -> None:
        """What a prefill engine computes: the blocks from the prefix on, and the tail."""
        pages = self.pages()
        for block in range(prefix, len(self.wish.keys)):
            self.prefill.memory_of.fill_layer(layer, pages[block], content_of(self.wish.keys[block]))
        if self.wish.tail_tokens:
            self.prefill.memory_of.fill_layer(layer, pages[-1], content_of(TAIL))

    async def _push(self) -> Heard:
        self.pushing = driver = await self.prefill.ask(lambda: self.prefill.daemon.node.push(self._plan()))
        heard = self.prefill.listen(f"push {self.attempt}", driver.outbox, self._bound_s)
        if not self.loads:
            self.prefix = self.hit
            self.prefill.process.task(self._compute_all())
        elif self.computed:
            self.prefill.process.task(self._compute_again())
        return heard

    async def _compute_all(self) -> None:
        try:
            await self._compute(0, LAYOUT.layer_count)
        except (KvmoverError, DaemonGone) as error:
            self.prefill.refused.append(str(error))

    async def _compute_again(self) -> None:
        """The push came after layers that are computed."""
        try:
            await self._compute(self.computed, self.computed)
        except (KvmoverError, DaemonGone) as error:
            self.prefill.refused.append(str(error))

    async def _attach(self) -> Heard | None:
        decode = self.decode
        assert decode is not None, "nobody to attach"
        node, wish = decode.daemon.node, self.wish
        try:
            outbox = await decode.ask(
                lambda: node.decode_side.attach(
                    NAMESPACE, wish.request_id, self.attempt, decode.session.session_id, wish.timeout_s
                )
            )
        except KvmoverError as error:
            decode.refused.append(f"attach {self.attempt}: {error}")
            return None
        return decode.listen(f"assemble {self.attempt}", outbox, self._bound_s, self._on_assembly)

    async def _on_assembly(self, event: Told) -> None:
        if isinstance(event, AnnounceWhole):
            await self._deliver()

    async def _deliver(self) -> None:
        decode = self.decode
        assert decode is not None, "nobody to deliver to"
        attempt, pages = self.attempt, list(self.pages())
        outbox = await decode.ask(
            lambda: decode.daemon.node.decode_side.deliver(
                self.wish.request_id, attempt, decode.region, as_pages(pages), decode.session.session_id
            )
        )

        async def on_delivery(event: Told) -> None:
            if isinstance(event, FinishDelivery) and event.end.reason is Reason.OK:
                for layer in range(LAYOUT.layer_count):
                    decode.check_layer(layer, pages[: len(self.wish.keys)], self.wish.keys, content_of)
                self.delivered = True

        decode.uses(pages, decode.listen(f"deliver {attempt}", outbox, self._bound_s, on_delivery))

    async def cancel(self) -> None:
        """The prefill engine, and the decode engine after it, give up."""
        self.cancelled = True
        for engine in (self.prefill, self.decode):
            if engine is not None and not engine.is_gone:
                session = getattr(engine, "session", None)
                if session is None:
                    continue
                node = engine.daemon.node
                try:
                    await engine.ask(
                        lambda node=node, session=session: node.cancel(  # type: ignore[misc]
                            self.wish.request_id, self.attempt, session.session_id
                        )
                    )
                except (DaemonGone, KvmoverError):
                    continue
