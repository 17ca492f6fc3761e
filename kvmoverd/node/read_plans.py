"""Read plans: what the prefill node of a request knows that bears on who reads it, and what it decides alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmoverd.core.admission import Purpose
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share
from kvmoverd.core.split import Reader, decide
from kvmoverd.core.status import Path
from kvmoverd.core.store.places import Place
from kvmoverd.node.peer import Peers, Reservation, SplitFacts
from kvmoverd.node.services import Services

if TYPE_CHECKING:
    from kvmoverd.node.helper_book import HelperBook
    from kvmoverd.node.prefill import Plan


class ReadPlanner:
    """For one request. `peers` and `helper_book` are those of the node, None where it has none."""

    def __init__(
        self, services: Services, plan: Plan, peers: Peers | None = None, helper_book: HelperBook | None = None
    ) -> None:
        self.peers = peers
        self._services = services
        self._plan = plan
        self._helper_book = helper_book
        self._depths: dict[str, Depth] = {}

    def reservation(self, waited_s: float) -> Reservation:
        """What the decode node is asked for, with what is known by now."""
        plan, services = self._plan, self._services
        return Reservation(
            request_id=plan.call.request_id,
            attempt=plan.call.attempt,
            fingerprint=plan.namespace.fingerprint,
            block_keys=tuple(plan.keys),
            tail_tokens=plan.tail_tokens,
            hit_blocks=plan.hit_blocks,
            path=plan.path,
            timeout_s=plan.call.timeout_s,
            node=services.node,
            boot_id=services.boot_id,
            session_id=plan.call.session_id,
            waited_s=waited_s,
            places=self._hints(),
            resident_blocks=plan.resident_blocks,
            shares=plan.shares,
            facts=self._facts() if plan.path is Path.AUTO else None,
        )

    def alone(self) -> ReadPlan:
        """The plan of a request without a decode node."""
        plan = self._plan
        if not plan.loaded:
            return ReadPlan((), why="resident")
        match plan.path:
            case Path.PARTS:
                return ReadPlan(plan.shares, why="parts")
            case Path.AUTO:
                return decide(
                    blocks=plan.loaded,
                    block_bytes=plan.namespace.layout.record_bytes,
                    prefill=self.own_reader(),
                    decode=None,
                    helpers=[Reader(node, depth) for node, depth in self.helpers(())],
                    floor_s=self._services.split.floor_s,
                )
            case _:
                return ReadPlan((Share(self._services.node, plan.loaded),), why="prefill")

    def own_reader(self) -> Reader:
        return Reader(self._services.node, self._services.reader.depth(), self._pooled())

    def own_blocks(self, reads: ReadPlan) -> int:
        """How many blocks this node reads into slots of its own: as the decode node it has them in the DE buffer."""
        own = self._services.node
        return 0 if own == self._plan.decode_node else sum(one.blocks.count for one in reads.shares if one.node == own)

    def helpers(self, busy: Sequence[str]) -> tuple[tuple[str, Depth], ...]:
        """Third nodes that may read now, and have no part of this request yet, best first; as many as it may have more."""
        plan, split = self._plan, self._services.split
        may_more = split.helpers_max - len(busy)
        if plan.no_helpers or plan.path is not Path.AUTO or self._helper_book is None or may_more <= 0:
            return ()
        exclude = {self._services.node, plan.decode_node, *busy, *self.starved_from()}
        found = self._helper_book.candidates(exclude, plan.helpers or None)
        self._depths |= dict(found)
        return tuple(found[:may_more])

    def depth(self, node: str, reserved: Depth) -> Depth:
        """What is known of a node's storage NIC. `reserved`: what the decode node saw of itself."""
        if node == self._services.node:
            return self._services.reader.depth()
        return reserved if node == self._plan.decode_node else self._depths.get(node, Depth())

    def depth_now(self, node: str) -> Depth | None:
        """A node's storage NIC as it is now, all requests together; None when nothing was heard of it lately."""
        if node == self._services.node:
            return self._services.reader.depth()
        return self._helper_book.depth(node) if self._helper_book is not None else None

    def rest_bytes(self, node: str) -> int:
        """What a node has room for beside what it has of this request already: others take it on as helpers."""
        if node == self._services.node:
            room = self._services.room
            return room.free_bytes(Purpose.READ) if room.fits_now(Purpose.READ, 0) else 0
        return self._helper_book.help_bytes(node) if self._helper_book is not None else 0

    def chosen(self, reads: ReadPlan) -> None:
        """Counts the plan, and what it gives to third nodes. A request without hits has none."""
        if not self._plan.hit_blocks:
            return
        self._services.counts.plans[reads.why] += 1
        for share in reads.shares:
            self.given(share)

    def given(self, share: Share) -> None:
        """A node has got a part: another one's queue is that much longer until it tells it itself."""
        if self._helper_book is not None and share.node != self._services.node:
            size_bytes = share.blocks.count * self._plan.namespace.layout.record_bytes
            self._helper_book.assigned(share.node, size_bytes)

    def starved_from(self) -> set[str]:
        """Nodes whose KV to this one gets too little."""
        return self.peers.starved_from() if self.peers is not None else set()

    def starved_to_decode(self) -> bool:
        """Does KV to the decode node get too little?"""
        services, decode_node = self._services, self._plan.decode_node
        if decode_node in ("", services.node):
            return False
        return services.mover.lanes.starved(decode_node, services.clock.now_ns())

    def places(self, blocks: Runs) -> Sequence[Place | None]:
        """Where these blocks lie, as far as this node has heard."""
        plan = self._plan
        return self._services.reader.catalog.places(plan.namespace, plan.keys_of(blocks))

    def _facts(self) -> SplitFacts:
        return SplitFacts(
            prefill=self._services.reader.depth(),
            pooled=self._pooled(),
            helpers=self.helpers(()),
            starved_to_decode=self.starved_to_decode(),
            starved_from_decode=self._plan.decode_node in self.starved_from(),
            floor_s=self._services.split.floor_s,
        )

    def pooled(self, blocks: Runs) -> int:
        """How many of these blocks are clean in this node's pool."""
        return int(self._services.reader.pooled(self._plan.namespace, self._plan.keys_of(blocks)).sum())

    def _pooled(self) -> Runs:
        """Of the blocks that are loaded, those that are clean in this node's pool."""
        first = self._plan.resident_blocks
        mask = self._services.reader.pooled(self._plan.namespace, self._plan.keys[first : self._plan.hit_blocks])
        return Runs(tuple((a + first, b + first) for a, b in Runs.of_mask(mask).spans))

    def _hints(self) -> Sequence[Place | None]:
        """Where the hit blocks lie, for a decode node that reads them and may not have heard of them yet."""
        plan = self._plan
        if plan.path in (None, Path.PE) or plan.decode_node == self._services.node:
            return ()
        return self.places(Runs.of((0, plan.hit_blocks)))
