"""Prefill side: one request of a prefill engine: the DE buffer reserved, hits streamed in, layers pushed out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadRequest, KvmoverError, PoolExhausted
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.runs import NO_RUNS, Runs
from kvmoverd.core.shares import ReadPlan, Share
from kvmoverd.core.status import End, Path, Reason
from kvmoverd.node.driver import Call
from kvmoverd.node.peer import Helped, Peer, Reserved, Ticket
from kvmoverd.node.read_plans import ReadPlanner
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region

HOLD_S = 0.5
"""How long a request that has a DE buffer may wait for room of its own node; then others may have the buffer."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What the engine asks for, checked against layout and region."""

    call: Call
    namespace: Namespace
    keys: Sequence[bytes]
    tail_tokens: int
    hit_blocks: int
    decode_node: str
    path: Path | None
    region: Region
    page_sets: tuple[Pages, ...]
    resident_blocks: int = 0
    """Leading hit blocks whose KV is in the pages already: they are not loaded."""
    shares: tuple[Share, ...] = ()
    """With `Path.PARTS`: who reads what."""
    helpers: tuple[str, ...] = ()
    """Third nodes that may read with `Path.AUTO`; none named: any that this node knows of, unless `no_helpers`."""
    no_helpers: bool = False

    @property
    def loaded(self) -> Runs:
        """The blocks that are loaded."""
        return Runs.of((self.resident_blocks, self.hit_blocks))

    @property
    def total_blocks(self) -> int:
        return len(self.keys) + (self.tail_tokens > 0)

    def page_set(self, layer: int) -> int:
        """Which of the page sets a layer goes to."""
        return layer % len(self.page_sets)

    def pages_of(self, page_set: int, blocks: Runs) -> Pages:
        """Pages of these blocks; the index of a tail is that of the block after the last."""
        pages, each = self.page_sets[page_set], self.region.geometry.pages_per_block
        parts = [pages[first * each : stop * each] for first, stop in blocks.spans]
        return parts[0] if len(parts) == 1 else np.concatenate([pages[:0], *parts])

    def keys_of(self, blocks: Runs) -> tuple[bytes, ...]:
        return tuple(key for first, stop in blocks.spans for key in self.keys[first:stop])

    @property
    def ring_sets(self) -> int:
        return len(self.page_sets) if len(self.page_sets) > 1 or self.region.geometry.is_ring else 0

    def same_request(self, other: Plan) -> bool:
        """Do StreamLayers and PushLayers speak of the same thing?"""
        return (
            self.namespace == other.namespace
            and tuple(self.keys) == tuple(other.keys)
            and (self.tail_tokens, self.hit_blocks, self.resident_blocks, self.decode_node)
            == (other.tail_tokens, other.hit_blocks, other.resident_blocks, other.decode_node)
            and (self.path, self.shares, self.helpers, self.no_helpers)
            == (other.path, other.shares, other.helpers, other.no_helpers)
            and self.region is other.region
            and len(self.page_sets) == len(other.page_sets)
            and all(map(np.array_equal, self.page_sets, other.page_sets))
        )


class PrefillRequest:
    """State that the stream and the push of one request share: the ticket, the prefix, the pages in use.

    It is over when both calls are gone; a ticket that was not used up is then given back. Only the pages of the hit blocks
    are written here; those of the others are read, and may be shared with other requests.
    """

    def __init__(self, services: Services, plan: Plan, peer: Peer | None, planner: ReadPlanner) -> None:
        self.services = services
        self.plan = plan
        self.peer = peer
        self.planner = planner
        self.reserved: Reserved | None = None
        self.reads: ReadPlan | None = None
        self.pushed = NO_RUNS
        """The blocks that are pushed, the tail too, once the prefix is known; of each layer, that is."""
        self.rests: list[tuple[int, Runs]] = []
        """Blocks of which the decode node reads no layer from the first one named on any more: these are pushed, too."""
        self.prefix_blocks: int | None = None
        self.prefix_set = False
        self.on_reserved: list[Callable[[], None]] = []
        self.on_reserve_failed: list[Callable[[Reason, str], None]] = []
        self.on_prefix_set: list[Callable[[], None]] = []
        self.on_computed: list[Callable[[int], None]] = []
        self.on_pushed: list[Callable[[int], None]] = []
        self.on_failed: list[Callable[[End], None]] = []
        self.on_over: list[Callable[[], None]] = []
        self.pushed_whole = False
        self.failed: tuple[Reason, str] | None = None
        self.failure: End | None = None
        self._live: set[str] = set()
        self._awaited = {"stream"} if plan.loaded else set()
        if peer is not None:
            self._awaited.add("push")
        self._alone: asyncio.TimerHandle | None = None
        self._reserving = False
        self._room_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._written = _hit_pages(plan)
        plan.region.use(self._written)

    def join(self, kind: str) -> None:
        """A stream or a push begins."""
        self._live.add(kind)
        self._awaited.discard(kind)
        self._stop_waiting()
        if "stream" in self._awaited:
            self._alone = self._loop.call_later(self.services.limits.attach_timeout_s, self._no_stream)

    def finished(self, end: End) -> None:
        """A stream or a push has told its caller; when it failed, the other can't succeed either."""
        if end.reason is not Reason.OK:
            self.failure = self.failure or end
            self._loop.call_soon(_tell, list(self.on_failed), end)

    def leave(self, kind: str, reason: Reason) -> None:
        """A stream or a push is gone; after a stream that went well, the push may still come."""
        self._live.discard(kind)
        if self._live:
            return
        if reason is Reason.OK and self._awaited:
            self._alone = self._loop.call_later(self.services.limits.attach_timeout_s, self._over, Reason.DEADLINE)
        else:
            self._over(reason if self.failure is None else self.failure.reason)

    def abandon(self, reason: Reason) -> None:
        """The engine is gone or gave up while nothing was under way; live calls are stopped by themselves."""
        if self.is_alone:
            self._over(reason)

    @property
    def is_alone(self) -> bool:
        """Is nothing under way while a call is still awaited?"""
        return self._alone is not None and not self._live

    def goes_over(self, node: str, boot_id: str) -> bool:
        """Is this boot of that node the one with the DE buffer?"""
        route = self.reserved.route if self.reserved is not None else None
        return route is not None and (route.node, route.boot_id) == (node, boot_id)

    def _no_stream(self) -> None:
        wait_s = self.services.limits.attach_timeout_s
        _tell(self.on_failed, End(Reason.DEADLINE, f"no StreamLayers of this attempt came within {wait_s:g} s"))

    def _stop_waiting(self) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def _over(self, reason: Reason) -> None:
        self._stop_waiting()
        self.plan.region.let_go(self._written)
        self.services.room.give_back(self)
        if self.reserved is not None and not self.pushed_whole:
            self.give_ticket_back(reason)
        for told in self.on_over:
            told()

    def reserve(self) -> None:
        """Asks for the DE buffer, once; the outcome goes to all who listen, also to those who ask after it."""
        if self.reads is not None:
            self._loop.call_soon(_tell, list(self.on_reserved))
        elif self.failed is not None:
            self._loop.call_soon(_tell, list(self.on_reserve_failed), *self.failed)
        if self._reserving:
            return
        self._reserving = True
        if self.peer is None:
            self._decided(self.planner.alone())
        else:
            self._spawn(self._reserve(self.peer))

    def _decided(self, reads: ReadPlan) -> None:
        """It is known who reads what."""
        self.reads = reads
        self.planner.chosen(reads)
        _tell(self.on_reserved)

    def set_prefix(
        self,
        prefix_blocks: int,
        *,
        there: Runs = NO_RUNS,
        helped: Sequence[Helped] = (),
        on_sinks: Callable[[list[int]], None] = lambda sinks: None,
    ) -> None:
        """Tells the decode node which blocks are new; the push may begin then.

        `there`: blocks of the prefix that the decode node has or reads itself; `helped`: what third nodes bring it, through
        `on_sinks`, in that order. All others are pushed.
        """
        if self.prefix_blocks is not None:
            return
        self.prefix_blocks = prefix_blocks
        if self.reserved is None or self.reads is None or self.peer is None:
            return
        elsewhere = Runs.union([there, self.reads.held, *(part.blocks for part in helped)]).cut(0, prefix_blocks)
        self.pushed = Runs.of((0, self.plan.total_blocks)).minus(elsewhere)
        self._spawn(self._set_prefix(self.peer, self.reserved.ticket, prefix_blocks, helped, on_sinks))

    def push_rest(self, blocks: Runs, first_layer: int) -> None:
        """The decode node has given these layers of what it reads to another reader, and takes them by push.

        None of them was computed yet, so none was pushed.
        """
        self.rests.append((first_layer, blocks))

    def pushed_of(self, layer: int) -> Runs:
        """The blocks that are pushed of a layer."""
        rests = [blocks for first_layer, blocks in self.rests if first_layer <= layer]
        return Runs.union([self.pushed, *rests]) if rests else self.pushed

    def computed(self, layers: int) -> None:
        """The engine has computed layers [0, layers). Raises `BadRequest`, also for layers whose hits were never loaded."""
        if layers and "stream" in self._awaited:
            raise BadRequest(f"layers [0, {layers}) said to be computed, StreamLayers has not loaded any")
        _tell(self.on_computed, layers)

    def give_ticket_back(self, reason: Reason) -> None:
        if self.peer is not None and self.reserved is not None:
            self._spawn(self._release_ticket(self.peer, self.reserved.ticket, reason))
            self.reserved = None

    async def _release_ticket(self, peer: Peer, ticket: Ticket, reason: Reason) -> None:
        """A node that does not answer loses the ticket by itself: to its deadline, or with the data channel."""
        with contextlib.suppress(KvmoverError):
            await peer.release_ticket(ticket, reason)

    async def _reserve(self, peer: Peer) -> None:
        try:
            reserved = await self._take_in_order(peer)
        except KvmoverError as error:
            self._fail(error)
            return
        self.reserved = reserved
        if not self._live:
            self.give_ticket_back(Reason.CANCELLED)
            self.services.room.give_back(self)
            return
        self._decided(reserved.plan)

    async def _take_in_order(self, peer: Peer) -> Reserved:
        """First the DE buffer, then room for this node's own share: without the latter the former goes back for a while.

        The request keeps its age meanwhile. Raises what either is refused with.
        """
        began_s = self._loop.time()
        while True:
            try:
                reserved = await peer.reserve(self.planner.reservation(self._loop.time() - began_s))
            except PoolExhausted:
                if not self._live or self._loop.time() + HOLD_S > began_s + self.services.limits.admission_wait_s:
                    raise
                await asyncio.sleep(HOLD_S)
                continue
            try:
                own_blocks = self.planner.own_blocks(reserved.plan)
                fits = not own_blocks or await self._room_here(own_blocks, self._loop.time() - began_s)
            except KvmoverError:
                self._spawn(self._release_ticket(peer, reserved.ticket, Reason.POOL_EXHAUSTED))
                raise
            if fits or not self._live:
                return reserved
            await peer.return_ticket(reserved.ticket)

    async def _room_here(self, blocks: int, waited_s: float) -> bool:
        """False when there is none for now. Raises `PoolExhausted` when the wait is over, `TooBig`, `QueueFull`."""
        decided: asyncio.Future[KvmoverError | None] = self._loop.create_future()

        def decide(error: KvmoverError | None = None) -> None:
            if not decided.done():
                decided.set_result(error)

        room, size_bytes = self.services.room, blocks * self.plan.namespace.layout.record_bytes
        room.ask(Purpose.READ, self, size_bytes, granted=decide, refused=decide, waited_s=waited_s)
        await asyncio.wait([decided], timeout=HOLD_S)
        if decided.done() and decided.result() is None:
            self._room_bytes = size_bytes
            return True
        room.give_back(self)
        if decided.done() and (error := decided.result()) is not None:
            raise error
        return False

    def hand_room_to(self, part: object, blocks: int) -> None:
        """The room that was taken for this node's own share is the part's from now on; a later part takes its own."""
        if self._room_bytes and self._room_bytes == blocks * self.plan.namespace.layout.record_bytes:
            self._room_bytes = 0
            self.services.room.rename(self, part)

    async def _set_prefix(
        self,
        peer: Peer,
        ticket: Ticket,
        prefix_blocks: int,
        helped: Sequence[Helped],
        on_sinks: Callable[[list[int]], None],
    ) -> None:
        try:
            sinks = await peer.set_prefix(ticket, prefix_blocks, helped)
        except KvmoverError as error:
            self._fail(error)
            return
        self.prefix_set = True
        on_sinks(sinks)
        _tell(self.on_prefix_set)

    def _fail(self, error: KvmoverError) -> None:
        """The decode node refused or did not answer: told to the calls that run, kept for the one that still comes."""
        self.failed = reason_of(error), f"{self.plan.decode_node}: {error}"
        _tell(self.on_reserve_failed, *self.failed)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tell(listeners: Sequence[Callable[..., None]], *what: object) -> None:
    for told in list(listeners):
        told(*what)


def _hit_pages(plan: Plan) -> Pages:
    """Pages that layers of hit blocks are loaded into; the sets are disjoint."""
    return np.concatenate([plan.pages_of(page_set, plan.loaded) for page_set in range(len(plan.page_sets))])
