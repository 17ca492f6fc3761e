"""Assembly driver: the DE buffer of one request on the decode node, from reservation to the last stored block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceAttached,
    AnnounceLayers,
    AnnounceQuiet,
    Finish,
    FinishDelivery,
    Quiesce,
    Release,
    SendLayer,
    WriteBlocks,
)
from kvmoverd.core.machines.assemble import AssembleMachine
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import End, Path, Reason
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.mover import Need
from kvmoverd.node.outbox import Attached, Outbox
from kvmoverd.node.peer import Reservation
from kvmoverd.node.reading import LAYERS_DUE
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import Addresses, region_iovec, slot_iovec
from kvmoverd.node.writer import ChainBlock, write_block
from kvmoverd.ports.transport import IoVec


@dataclass(eq=False)
class Delivery:
    """One Deliver call: where the buffer goes and who is told."""

    region: Region
    pages: Pages
    outbox: Outbox
    sink_id: int
    session_id: str


class AssemblyDriver(Driver):
    """Constructed with room granted; takes its slots at once. Raises `PoolExhausted` when they can't be had."""

    kind: ClassVar[str] = "assemble"

    def __init__(self, services: Services, call: Call, *, namespace: Namespace, reservation: Reservation) -> None:
        self.namespace = namespace
        self.reservation = reservation
        self.full_blocks = len(reservation.block_keys)
        self.total_blocks = self.full_blocks + (reservation.tail_tokens > 0)
        self._size_class = services.pool.size_class(namespace.layout)
        self._owner = services.pool.new_holder()
        self.reads_here = reservation.path is Path.DE and reservation.hit_blocks > 0
        self.hits: BlockSet | None = None
        self._services = services
        self._slots = self._take_slots()
        self._payloads: Addresses = self._size_class.addresses(self._slots) + np.uint64(HEADER_BYTES)
        self._first_pushed: int | None = None if self.reads_here else 0
        super().__init__(services, call)
        self._delivery: Delivery | None = None
        layers = namespace.layout.layer_count
        self._machine = AssembleMachine(
            layers=layers,
            blocks=self.full_blocks,
            hit_blocks=reservation.hit_blocks,
            window_layers=services.limits.window_layers,
            reads_hits=self.reads_here,
        )
        self.part_begun = False
        self._announced = False
        self._copying: list[int] = []
        self._pushed_slots = self._slots[self._hit_count() :]
        self._size_class.device_begin(self._pushed_slots)
        asked = reservation.node, reservation.boot_id
        sender = None if asked == (services.node, services.boot_id) else asked
        self.push_sink = services.mover.expect(self._resolve_push, self._on_pushed, sender)
        self._listen_to_hits()

    @property
    def machine(self) -> AssembleMachine:
        return self._machine

    def _hit_count(self) -> int:
        return self.reservation.hit_blocks if self.reads_here else 0

    def _take_slots(self) -> list[int]:
        """Private slots first: they can fail; the hit blocks' reads start only when all is there."""
        hit_count = self._hit_count()
        private = self._size_class.private(self.total_blocks - hit_count, self._owner)
        if not hit_count:
            return private
        keys = self.reservation.block_keys[:hit_count]
        hints = {key: place for key, place in zip(keys, self.reservation.places, strict=False) if place is not None}
        due_ns = self._services.clock.now_ns()
        try:
            self.hits = self._services.reader.acquire(
                self.namespace, keys, priority=LAYERS_DUE, due_ns=due_ns, by_ranges=True, hints=hints
            )
        except KvmoverError:
            self._size_class.give_back(self._owner)
            raise
        return list(self.hits.slots) + private

    def attach(self, session_id: str, outbox: Outbox, timeout_s: float) -> None:
        """The decode engine's call waits here from now on, for `timeout_s` at most."""
        self.call = Call(self.call.request_id, self.call.attempt, session_id, self.call.timeout_s)
        self.outbox = outbox
        self.due_within(timeout_s)
        self.run(self._machine.on_attached())

    def detach(self) -> tuple[str, Outbox, float] | None:
        """Lets the decode engine go, if one is attached: its session, its outbox, how long it waits on, in seconds."""
        if not self._machine.attached:
            return None
        left_s = max(0.0, self._deadline.when() - self._loop.time())
        engine = (self.call.session_id, self.outbox, left_s)
        self.outbox = Outbox()
        self.call = Call(self.call.request_id, self.call.attempt, "", self.call.timeout_s)
        return engine

    def hits_read(self, prefix_blocks: int) -> None:
        """This node's part knows its good prefix: blocks that have their first layers. Others are read no further."""
        self._announced = True
        if self.hits is not None and prefix_blocks < self._hit_count():
            self._services.reader.trim(self.hits, prefix_blocks)
        self.run(self._machine.on_hits_read(prefix_blocks))

    def set_prefix(self, prefix_blocks: int) -> None:
        """Blocks from `prefix_blocks` on are new. Raises `BadRequest`, `PoolExhausted`.

        A hit block that was lost since its first layers were there is no fault of the caller: its part has ended, and the
        request with it.
        """
        read = max(self._read_here(), self._machine.readable_blocks if self._announced else 0)
        if prefix_blocks > read:
            raise BadRequest(f"prefix of {prefix_blocks} blocks set, {read} have been read here")
        actions = self._machine.on_prefix(prefix_blocks)
        if self.reads_here and self._first_pushed is None:
            self._replace_lost(prefix_blocks)
            self._first_pushed = prefix_blocks
        self.run(actions)
        self._look_at_hits()

    def _read_here(self) -> int:
        """Leading hit blocks whose bytes are in the buffer, or on their way into it."""
        return self.reservation.hit_blocks if self.hits is None else self.hits.begun_prefix()

    def _listen_to_hits(self) -> None:
        if self.hits is not None:
            self.hits.listen(lambda outcomes: self._look_at_hits())

    def _look_at_hits(self) -> None:
        prefix_blocks = self._machine.prefix_blocks
        if self.hits is None or prefix_blocks is None or self._machine.hits_whole:
            return
        if self.hits.whole_prefix() >= prefix_blocks:
            self.run(self._machine.on_hits_whole())

    def _replace_lost(self, prefix_blocks: int) -> None:
        """Hit blocks beyond the prefix will be pushed: into private slots, never into shared ones, which are given back."""
        hit_count = self._hit_count()
        if prefix_blocks == hit_count:
            return
        if self.hits is not None and self.hits.all_known():
            self._services.reader.trim(self.hits, self._read_here())
        fresh = self._size_class.private(hit_count - prefix_blocks, self._owner)
        self._size_class.device_begin(fresh)
        self._pushed_slots = fresh + self._pushed_slots
        self._slots = self._slots[:prefix_blocks] + self._pushed_slots
        self._payloads = self._size_class.addresses(self._slots) + np.uint64(HEADER_BYTES)

    def deliver(self, region: Region, pages: Pages, session_id: str) -> Outbox:
        """Starts the delivery. Raises `NotWhole`, `BadPages`, `PagesBusy`."""
        region.check(pages, self.total_blocks)
        region.use(pages)
        try:
            actions = self._machine.on_deliver()
        except KvmoverError:
            region.let_go(pages)
            raise
        sink_id = self._services.mover.expect(self._resolve_delivery, lambda layer, moved: None)
        self._delivery = Delivery(region, pages, Outbox(), sink_id, session_id)
        self.run(actions)
        return self._delivery.outbox

    def do(self, action: Action) -> None:
        match action:
            case SendLayer(layer):
                self._copy(layer)
            case WriteBlocks(blocks):
                self._write(blocks)
            case AnnounceLayers() | AnnounceQuiet():
                self._tell_delivery(action)
            case Finish(end):
                # AssembleBlocks names no pages: those of a delivery are the delivery's own affair.
                self.outbox.put(Finish(replace(end, pages_quiet=True)))
            case FinishDelivery(end):
                counted = End(end.reason, end.message, end.pages_quiet, end.prefix_blocks, self.moved_bytes)
                self._tell_delivery(FinishDelivery(counted))
            case AnnounceAttached():
                asked = self.reservation
                self.outbox.put(Attached(self.full_blocks, asked.tail_tokens, asked.node))
            case Release():
                self._release()
            case Quiesce():
                pass
            case _:
                self.outbox.put(action)

    def uses_region(self, region: Region) -> bool:
        return self._delivery is not None and self._delivery.region is region

    def gone(self) -> None:
        self._end_delivery()

    def _tell_delivery(self, action: Action) -> None:
        if self._delivery is None:
            return
        self._delivery.outbox.put(action)
        if isinstance(action, AnnounceQuiet) or (isinstance(action, FinishDelivery) and action.end.pages_quiet):
            self._end_delivery()

    def _end_delivery(self) -> None:
        if self._delivery is None:
            return
        delivery, self._delivery = self._delivery, None
        delivery.region.pages_quiet(delivery.pages)
        self._services.mover.forget(delivery.sink_id, lambda: delivery.region.let_go(None))

    def _resolve_push(self, layer: int, first_block: int) -> IoVec | None:
        if first_block != self._first_pushed or layer >= self.namespace.layout.layer_count:
            return None
        return slot_iovec(self.namespace.layout, layer, self._payloads[first_block:], self.reservation.tail_tokens)

    def _on_pushed(self, layer: int, moved_bytes: int) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_layer(layer))

    def _copy(self, layer: int) -> None:
        assert self._delivery is not None, "a layer is delivered before Deliver"
        if not self._copying:
            self._copying = list(self._slots)
            self._size_class.device_begin(self._copying)
        source = slot_iovec(self.namespace.layout, layer, self._payloads, self.reservation.tail_tokens)
        self._services.mover.send(None, self._delivery.sink_id, layer, 0, source, self._on_copied, need=Need.PAGES)

    def _resolve_delivery(self, layer: int, first_block: int) -> IoVec | None:
        delivery = self._delivery
        if delivery is None or first_block or layer >= self.namespace.layout.layer_count:
            return None
        return region_iovec(delivery.region, layer, delivery.pages, self.total_blocks, self.reservation.tail_tokens)

    def _on_copied(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))

    def _write(self, blocks: tuple[int, ...]) -> None:
        keys = self.reservation.block_keys
        for block in blocks:
            chain_block = ChainBlock(keys[block], keys[block - 1] if block else ROOT, block)
            slot = self._slots[block]
            write_block(self._services, self.namespace, chain_block, self._size_class, slot, self._written(block))
        self._services.desk.submit()

    def _written(self, block: int) -> Callable[[Reason], None]:
        return lambda reason: self.run(self._machine.on_written(block, reason))

    def _release(self) -> None:
        self._size_class.device_end(self._copying)
        self._size_class.give_back(self._owner)
        if self.hits is not None:
            self.read_bytes = self.hits.read_bytes
            self._services.reader.release(self.hits)
        self._services.mover.forget(self.push_sink, self._push_sink_quiet)

    def _push_sink_quiet(self) -> None:
        """No late frame can land in the slots any more: they are home, and so is the room."""
        self._size_class.device_end(self._pushed_slots)
        self._services.room.give_back(self)
