"""A node among its engines, or two and helpers, every call listened to: what each caller is told, and does with its pages then.

An engine here is a severe one. As soon as it was told that a call's pages are quiet, it overwrites them, and looks at
them ever after: a byte that changes was written by somebody who said that he had stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from node_kit import LAYOUT, POISON, Engine, NodeKit, until
from node_net import Net

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.actions import (
    AnnounceAccepted,
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceQuiet,
    AnnounceWhole,
    Finish,
    FinishDelivery,
)
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockState, End, Path, Reason
from kvmoverd.node.driver import Call
from kvmoverd.node.outbox import Fetched, Outbox, Told
from kvmoverd.node.prefill import Plan
from kvmoverd.node.pushing import PushDriver
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain

TAIL = b"tail" * 8
ROUNDS = 8


@dataclass(eq=False)
class Heard:
    """One call and all that its caller was told. `copied`: a store was accepted, its pages are free."""

    name: str
    react: Callable[[Told], None]
    events: list[Told] = field(default_factory=list)
    end: End | None = None
    quiet: bool = False
    copied: bool = False

    def take(self, event: Told) -> None:
        assert not self.quiet, f"{self.name} was told {event} after its end"
        assert self.end is None or isinstance(event, AnnounceQuiet), f"{self.name} was told {event} after {self.end}"
        self.events.append(event)
        if isinstance(event, Finish | FinishDelivery):
            self.end, self.quiet = event.end, event.end.pages_quiet
        elif isinstance(event, AnnounceQuiet):
            assert self.end is not None, f"{self.name} is quiet without an end"
            self.quiet = True
        elif isinstance(event, AnnounceAccepted):
            self.copied = True
        self.react(event)


@dataclass(eq=False)
class InUse:
    """Pages that calls work on; poisoned when all of these have let go."""

    engine: Engine
    pages: Sequence[int]
    calls: list[Heard]
    poisoned: bool = False

    def look(self) -> None:
        if self.poisoned:
            for page in self.pages:
                assert set(self.engine.block(page)) == {POISON}, f"page {page} changed after {self._ends()}"
        elif all(call.quiet or call.copied for call in self.calls):
            self.poisoned = True
            for page in self.pages:
                self.engine.fill(page, bytes([POISON]) * LAYOUT.block_bytes)

    def _ends(self) -> list[tuple[str, End | None]]:
        return [(call.name, call.end) for call in self.calls]


class World:
    """Starts one flow of an attempt of a request; holds the devices and lets them go step by step.

    `net`: the decode engine is on its node `to`, the prefill engine on the node of `kit`. Without it both are on this one.
    """

    def __init__(
        self,
        kit: NodeKit,
        *,
        request_id: str = "x",
        salt: int = 0,
        hit: int = 2,
        blocks: int = 3,
        resident: int = 0,
        net: Net | None = None,
        to: str = "d",
        timeout_s: float = 2.0,
        attempt: int = 1,
    ) -> None:
        self.kit = kit
        self.attempt = attempt
        self.net = net
        self.there = kit if net is None else net[to]
        self.request_id = request_id
        self.timeout_s = timeout_s
        pages = max(8, blocks + 1)
        self.prefill, self.decode = kit.engine(pages), self.there.engine(pages)
        self.keys = kit.chain(blocks, salt)
        self.hit = hit
        self.resident = resident
        self.prefix = resident
        kit.fill(self.prefill, self.keys[:resident])
        self.tail = 1
        self.heard: list[Heard] = []
        self.in_use: list[InUse] = []
        self.refused: list[KvmoverError] = []
        self.tasks: set[asyncio.Task[object]] = set()

    async def prepare(self) -> None:
        """The hit blocks are in storage, and nowhere else; from now on nothing happens by itself."""
        await self.kit.store(self.kit.engine(max(8, self.hit)), self.keys[: self.hit])
        self.kit.forget_clean()
        (self.net or self.kit).forget_counts()
        (self.net or self.kit).close_gates()

    # Flows ------------------------------------------------------------------------------------------------------------

    def fetch_lease(self) -> None:
        driver = self.kit.node.fetch(
            self.call(self.prefill), self.kit.namespace, self.keys, FetchKind.LEASE, lease_s=60
        )
        self.listen("fetch", driver.outbox)

    def fetch_pages(self) -> None:
        pages = as_pages([4, 5, 6])
        call, region = self.call(self.prefill), self.prefill.region
        driver = self.kit.node.fetch(call, self.kit.namespace, self.keys, FetchKind.PAGES, region=region, pages=pages)

        def react(event: Told) -> None:
            if isinstance(event, Fetched):
                for page, key, outcome in zip((4, 5, 6), self.keys, event.outcomes, strict=True):
                    if outcome.state is BlockState.HIT:
                        assert self.prefill.block(page) == self.kit.content(key)

        self.uses(self.prefill, (4, 5, 6), self.listen("fetch", driver.outbox, react))

    def store_blocks(self) -> None:
        for page, key in enumerate(self.keys):
            self.prefill.fill(page, self.kit.content(key))
        chain, pages = Chain(self.keys, ROOT, 0), as_pages([0, 1, 2])
        call = self.call(self.prefill)
        driver = self.kit.node.store(call, self.kit.namespace, chain, self.prefill.region, pages)
        self.uses(self.prefill, (0, 1, 2), self.listen("store", driver.outbox))

    def load_only(self) -> None:
        """A stream without a decode side."""
        plan = self.plan(Path.PE, self.hit, decode_node="", tail=0)
        self.uses(self.prefill, range(3), self.stream(plan, lambda layers: None))

    def turn_pe(self) -> None:
        self._turn(Path.PE, self.hit)

    def turn_de(self) -> None:
        self._turn(Path.DE, self.hit)

    def turn_full(self) -> None:
        """Everything but the tail is stored."""
        self.keys = self.keys[: self.hit]
        self._turn(Path.DE, self.hit)

    def push_only(self) -> None:
        self._turn(Path.PE, 0)

    def turn_auto(self) -> None:
        self._turn(Path.AUTO, self.hit)

    def turn_parts(self, *shares: tuple[str, tuple[int, int]]) -> None:
        """Each node's blocks, as a range."""
        parts = tuple(Share(node, Runs.of(blocks)) for node, blocks in shares)
        self._turn(Path.PARTS, self.hit, shares=parts)

    def _turn(self, path: Path, hit: int, *, tail: int = 3, **more: object) -> None:
        self.assemble()
        plan = self.plan(path, hit, tail=tail, **more)
        loads = hit > self.resident
        pushing: list[PushDriver] = []

        def compute(layers: int) -> None:
            for layer in range(pushing[0].machine.window.allowed, layers):
                self.fill_new(layer, self.prefix, tail)
            try:
                pushing[0].request.computed(layers)
            except KvmoverError as error:
                self.refused.append(error)

        calls = [self.stream(plan, compute)] if loads else []
        pushing.append(self.kit.node.push(plan))
        calls.append(self.listen("push", pushing[0].outbox))
        self.uses(self.prefill, range(len(self.keys) + (tail > 0)), *calls)
        if not loads:
            compute(LAYOUT.layer_count)

    def stream(self, plan: Plan, compute: Callable[[int], None]) -> Heard:
        driver = self.kit.node.stream(plan)

        def react(event: Told) -> None:
            if isinstance(event, AnnouncePrefix):
                self.prefix = event.prefix_blocks
            if isinstance(event, AnnounceLayers):
                for layer in range(event.first, event.last + 1):
                    self._check_layer(self.prefill, layer, self.prefix)
                compute(event.last + 1)

        return self.listen("stream", driver.outbox, react)

    def assemble(self) -> None:
        session = self.decode.session.session_id
        side = self.there.node.decode_side
        outbox = side.attach(self.kit.namespace, self.request_id, self.attempt, session, self.timeout_s)
        self.listen("assemble", outbox, lambda event: self.deliver() if isinstance(event, AnnounceWhole) else None)

    def deliver(self) -> None:
        blocks, tail = len(self.keys), self.tail
        pages, session = as_pages(list(range(blocks + tail))), self.decode.session.session_id
        side, name = self.there.node.decode_side, (self.request_id, self.attempt)
        try:
            outbox = side.deliver(*name, self.decode.region, pages, session)
        except KvmoverError as error:
            self.refused.append(error)
            self.there.node.cancel(*name, session)
            return

        def react(event: Told) -> None:
            if isinstance(event, FinishDelivery) and event.end.reason is Reason.OK:
                for layer in range(LAYOUT.layer_count):
                    self._check_layer(self.decode, layer, blocks)

        self.uses(self.decode, range(blocks + tail), self.listen("deliver", outbox, react))

    # Words ------------------------------------------------------------------------------------------------------------

    def call(self, engine: Engine, attempt: int | None = None) -> Call:
        """`attempt` None: the flow's own."""
        attempt = self.attempt if attempt is None else attempt
        return self.kit.call(engine, request_id=self.request_id, attempt=attempt, timeout_s=self.timeout_s)

    def plan(
        self,
        path: Path | None,
        hit: int,
        *,
        tail: int = 3,
        decode_node: str | None = None,
        attempt: int | None = None,
        **more: object,
    ) -> Plan:
        call, self.tail = self.call(self.prefill, attempt), int(tail > 0)
        decode_node = self.there.services.node if decode_node is None else decode_node
        more = {"hit": hit, "path": path, "tail": tail, "decode_node": decode_node} | more
        return self.kit.plan(self.prefill, call, self.keys, resident_blocks=self.resident, **more)  # type: ignore[arg-type]

    def fill_new(self, layer: int, prefix: int, tail: int = 3) -> None:
        """What a prefill engine computes: the blocks from the prefix on, and the tail."""
        for page in range(prefix, len(self.keys)):
            self.prefill.fill_layer(layer, page, self.kit.content(self.keys[page]))
        if tail:
            self.prefill.fill_layer(layer, len(self.keys), self.kit.content(TAIL))

    def listen(self, name: str, outbox: Outbox, react: Callable[[Told], None] = lambda event: None) -> Heard:
        heard = Heard(name, react)
        self.heard.append(heard)

        async def hear() -> None:
            while (event := await outbox.get()) is not None:
                heard.take(event)

        self.do(hear())
        return heard

    def do(self, work: object) -> None:
        """Runs a coroutine beside the flow; its failure is the test's."""
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self.tasks.add(task)

    def uses(self, engine: Engine, pages: Sequence[int], *calls: Heard) -> None:
        self.in_use.append(InUse(engine, list(pages), list(calls)))

    def _check_layer(self, engine: Engine, layer: int, blocks: int) -> None:
        span = LAYOUT.layer_span(layer)
        for page, key in enumerate(self.keys[:blocks]):
            got = np.frombuffer(engine.block(page), dtype=np.uint8)[span.start : span.stop]
            want = np.frombuffer(self.kit.content(key), dtype=np.uint8)[span.start : span.stop]
            assert bytes(got) == bytes(want), f"layer {layer} of block {page} is wrong"

    # Time -------------------------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """The oldest storage op happens, or else the oldest send, and all that follows from it; False when none waits."""
        await self.settle()
        happened = (self.net or self.kit).release_one()
        await self.settle()
        return happened

    async def settle(self) -> None:
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        self.look()

    def look(self) -> None:
        for used in self.in_use:
            used.look()
        self.kit.slots_add_up()
        self.there.slots_add_up()
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()

    async def finish(self) -> None:
        """Lets everything happen; every call has its one end, all pages are quiet, all is home."""
        while await self.step():
            pass
        (self.net or self.kit).open_gates()
        await self.ended()
        self.close()
        await (self.net or self.kit).everything_is_home()
        self.look()

    async def ended(self) -> None:
        """Waits until nothing of this request runs: each call had one end, and is quiet."""
        await until(lambda: all(heard.quiet for heard in self.heard), "all calls have their end")
        await self.settle()
        await until(self._no_task, "the listeners end")

    def close(self) -> None:
        for kit, engine in ((self.kit, self.prefill), (self.there, self.decode)):
            kit.node.session_closed(engine.session.session_id, "the test ends")

    def _no_task(self) -> bool:
        self.look()
        return not self.tasks
