"""Assembly driver: the DE buffer of one request on the decode node, from reservation to the last stored block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from kvmoverd.core.drops import Drop
from kvmoverd.core.errors import BadRequest, KvmoverError, UnknownRequest
from kvmoverd.core.keys import ROOT
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
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import ReadPlan
from kvmoverd.core.status import End, Reason
from kvmoverd.core.store.places import known_places
from kvmoverd.node.de_buffer import DeBuffer, OwnRead, Rest
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.landing import Landing, Landings
from kvmoverd.node.mover import Need
from kvmoverd.node.outbox import Attached, Outbox
from kvmoverd.node.peer import Helped, Reservation
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import Addresses, region_iovec, slot_iovec
from kvmoverd.node.writer import ChainBlock, note_dropped, write_blocks
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
    """Constructed with room granted; takes its slots at once. Raises `PoolExhausted` when they can't be had, `QueueFull`."""

    kind: ClassVar[str] = "assemble"

    def __init__(
        self, services: Services, call: Call, *, namespace: Namespace, reservation: Reservation, plan: ReadPlan
    ) -> None:
        self.namespace = namespace
        self.reservation = reservation
        self.plan = plan
        self.full_blocks = len(reservation.block_keys)
        self.total_blocks = self.full_blocks + (reservation.tail_tokens > 0)
        self.buffer = DeBuffer(
            services,
            namespace,
            reservation.block_keys,
            self.total_blocks,
            own=Runs.union(share.blocks for share in plan.shares if share.node == services.node),
            held=plan.held,
            hints=known_places(reservation.block_keys, reservation.places),
        )
        super().__init__(services, call)
        self._delivery: Delivery | None = None
        self._machine = AssembleMachine(
            layers=namespace.layout.layer_count,
            blocks=self.full_blocks,
            hit_blocks=reservation.hit_blocks,
            window_layers=services.limits.window_layers,
        )
        self._copying: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._landings = Landings(services, namespace.layout, self._none_lands)
        self._helped: list[Landing | None] = []
        self._taken_over = 0
        self._prefix_call: tuple[int, tuple[Helped, ...], list[int]] | None = None
        self._push = self._landings.add((reservation.node, reservation.boot_id), self._on_pushed)
        for read in self.buffer.reads:
            self._listen_to(read)

    @property
    def machine(self) -> AssembleMachine:
        return self._machine

    @property
    def push_sink(self) -> int:
        return self._push.sink_id

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

    # What this node reads ---------------------------------------------------------------------------------------------

    def has_part(self, part: Driver) -> None:
        """It sends blocks of the buffer, which stays until it has; it ends with the buffer."""
        number = len(self._machine.parts)
        self.run(self._machine.on_part_begun(number))
        part.on_gone.append(lambda: self._part_over(number))
        self.on_gone.append(lambda: self._stop_part(part))

    def _stop_part(self, part: Driver) -> None:
        """The prefill node hears why; of a cut it hears by the part that knows where it is."""
        end = self.ended or End(Reason.CANCELLED)
        reason = Reason.CANCELLED if end.reason in (Reason.OK, Reason.PREFIX_CUT) else end.reason
        part.stop(reason, f"the DE buffer was released: {end.message}")

    def _part_over(self, number: int) -> None:
        self.run(self._machine.on_part_over(number))
        # A block may have been lost that the part, stopped meanwhile, speaks of no more.
        self._look_at_hits()

    def read_of(self, blocks: Runs) -> OwnRead:
        """Reads these hit blocks for the prefill engine, if it does not yet. Before the prefix is set.

        Raises `UnknownRequest` for blocks that are not hits, or that a part reads already; `QueueFull`.
        """
        untaken = self.buffer.untaken(blocks)
        if untaken is not None:
            return untaken
        left = self.buffer.private_blocks.cut(self.reservation.resident_blocks, self.reservation.hit_blocks)
        if not blocks or blocks.minus(left):
            raise UnknownRequest(f"blocks {blocks.spans} are not left to be read here, {left.spans} are")
        read = self.buffer.take(blocks)
        self._listen_to(read)
        return read

    def hits_read(self, read: OwnRead, good_blocks: int) -> None:
        """A part knows its good prefix: blocks that have their first layers. Others are read no further."""
        read.readable = good_blocks
        if good_blocks < read.blocks.count:
            self.services.reader.trim(read.found, good_blocks)

    def give_up(self, read: OwnRead, kept_blocks: int) -> None:
        """A part keeps so many of its blocks; the others wait for slots, which `fill` takes."""
        self.buffer.give_up(read, kept_blocks)

    def fill(self) -> None:
        """Slots for the blocks that were given up. Raises `PoolExhausted`."""
        if not self.buffer.released:
            self.buffer.fill()

    def helped_part(self, blocks: Runs) -> int:
        """Which third node's part these blocks are. Raises `UnknownRequest`."""
        for part, landing in enumerate(self._helped):
            if landing is not None and landing.blocks == blocks:
                return part
        raise UnknownRequest(f"blocks {blocks.spans} are no part of a third node here")

    def has_helped(self, part: int) -> bool:
        """Has the third node sent all layers of its part?"""
        return self._machine.helped[part].complete

    def fence_helped(self, part: int, then: Callable[[], None]) -> None:
        """Nothing of that third node is taken any more: this node reads its part, by `take` once `then` was called."""
        landing = self._helped[part]
        assert landing is not None, f"part {part} is taken over already"
        self._helped[part] = None
        self._taken_over += 1
        self.run(self._machine.on_taken_over(part))
        self._landings.fence(landing, self.buffer, then)

    def take(self, blocks: Runs) -> OwnRead:
        """Reads a part whose sink is quiet. Raises `QueueFull`."""
        read = self.buffer.take(blocks)
        self._taken_over -= 1
        self._listen_to(read)
        return read

    def _listen_to(self, read: OwnRead) -> None:
        self._machine.on_hits_pending()
        read.found.listen(lambda outcomes: self._look_at_hits(), lambda progress: self._came_on(read))

    def _came_on(self, read: OwnRead) -> None:
        """Blocks whose rest is pushed come no further than to its first layer."""
        if read.rest is not None:
            self._look_at_hits()

    def gave_rest(self, read: OwnRead, rest: Rest) -> None:
        """A part has given the rest of its blocks: it is pushed. To be told before the prefill node hears of it.

        A buffer that is gone takes nothing in; one whose prefix is not set takes it in with that.
        """
        if self.buffer.released:
            return
        read.rest = rest
        if self._machine.prefix_blocks is None:
            return
        if self._push.asked_layers > rest.first_layer:
            message = f"layer {self._push.asked_layers - 1} was pushed before it was sent of all blocks"
            self.run(self._machine.on_stop(Reason.INTERNAL, message))
            return
        self._landings.let_in_rest(self._push, self.buffer, read.rest_blocks, rest.first_layer)
        self.run(self._machine.on_rest(rest.first_layer))
        self._look_at_hits()

    # The prefix -------------------------------------------------------------------------------------------------------

    def set_prefix(self, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        """Blocks from `prefix_blocks` on are new. The sinks of third nodes' parts. Raises `BadRequest`, `PoolExhausted`.

        A hit block that was lost since its first layers were there is no fault of the caller: its part has ended, and the
        request with it.
        """
        if self._prefix_call is not None and self._prefix_call[:2] == (prefix_blocks, tuple(helped)):
            return self._prefix_call[2]
        self.buffer.drop_unasked(self.plan.held)
        self._check_new(prefix_blocks, helped)
        self.buffer.check_prefix(self.reservation, prefix_blocks, helped)
        self.buffer.cut(prefix_blocks)
        self.buffer.fill()
        pushed = self.buffer.private_blocks.minus(Runs.union(part.blocks for part in helped))
        tail_tokens = self.reservation.tail_tokens
        self._landings.let_in(self._push, self.buffer, pushed, tail_tokens)
        for blocks, first_layer in self.buffer.rests:
            self._landings.let_in_rest(self._push, self.buffer, blocks, first_layer)
        for number, part in enumerate(helped):
            landing = self._landings.add((part.node, part.boot_id), partial(self._on_helped, number))
            self._landings.let_in(landing, self.buffer, part.blocks, 0)
            self._helped.append(landing)
        sinks = [landing.sink_id for landing in self._helped if landing is not None]
        self._prefix_call = prefix_blocks, tuple(helped), sinks
        self.run(self._machine.on_prefix(prefix_blocks, len(helped), self._landings.first_layer(self._push)))
        self._look_at_hits()
        return sinks

    def _check_new(self, prefix_blocks: int, helped: Sequence[Helped]) -> None:
        if self._prefix_call is not None:
            text = f"prefix set to {prefix_blocks} blocks, {len(helped)} parts of third nodes"
            raise BadRequest(f"{text}; it is {self._prefix_call[0]} already, with {len(self._prefix_call[1])} parts")

    def _look_at_hits(self) -> None:
        """Are the hit blocks of the prefix whole, or is one lost that no part speaks of?"""
        prefix_blocks = self._machine.prefix_blocks
        if prefix_blocks is None or self._machine.hits_whole or self.buffer.released:
            return
        if not self._taken_over and self.buffer.whole(prefix_blocks):
            self.run(self._machine.on_hits_whole())
        elif (block := self.buffer.lost(prefix_blocks)) is not None:
            self.cut(block, f"block {block} was lost after its first layers")

    def cut(self, good_blocks: int, message: str) -> None:
        """A hit block was lost after the prefix was set."""
        self.run(self._machine.on_stop(Reason.PREFIX_CUT, message, good_blocks))

    # Sinks ------------------------------------------------------------------------------------------------------------

    def _on_pushed(self, layer: int, moved_bytes: int) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_layer(layer))

    def _on_helped(self, part: int, layer: int, moved_bytes: int) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_helped_layer(part, layer))

    # Deliver and store ------------------------------------------------------------------------------------------------

    def deliver(self, region: Region, pages: Pages, session_id: str) -> Outbox:
        """Starts the delivery. Raises `NotWhole`, `BadPages`, `PagesBusy`."""
        region.check(pages, self.total_blocks)
        region.use(pages)
        try:
            actions = self._machine.on_deliver()
        except KvmoverError:
            region.let_go(pages)
            raise
        sink_id = self.services.mover.expect(self._resolve_delivery, lambda layer, moved: None)
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
        self.services.mover.forget(delivery.sink_id, lambda: delivery.region.let_go(None))

    def _copy(self, layer: int) -> None:
        assert self._delivery is not None, "a layer is delivered before Deliver"
        if not self._copying:
            self._copying, self._payloads = self.buffer.slots(), self.buffer.payloads()
            self.buffer.size_class.device_begin(self._copying)
        source = slot_iovec(self.namespace.layout, layer, self._payloads, self.reservation.tail_tokens)
        self.services.mover.send(None, self._delivery.sink_id, layer, 0, source, self._on_copied, need=Need.PAGES)

    def _resolve_delivery(self, layer: int, first_block: int) -> IoVec | None:
        delivery = self._delivery
        if delivery is None or first_block or layer >= self.namespace.layout.layer_count:
            return None
        return region_iovec(delivery.region, layer, delivery.pages, self.total_blocks, self.reservation.tail_tokens)

    def _on_copied(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))

    def _write(self, blocks: tuple[int, ...]) -> None:
        keys, slots = self.reservation.block_keys, self.buffer.slots()
        chain = [ChainBlock(keys[block], keys[block - 1] if block else ROOT, block) for block in blocks]

        def written(index: int, reason: Reason) -> None:
            self.run(self._machine.on_written(blocks[index], reason))

        new_slots = [slots[block] for block in blocks]
        write_blocks(self.services, self.namespace, chain, self.buffer.size_class, new_slots, written)

    def _note_discarded(self) -> None:
        """New blocks that were on their way here, and will not be stored."""
        prefix_blocks = self._machine.prefix_blocks
        if prefix_blocks is not None and not self._machine.was_whole:
            message = f"request {self.call.request_id!r} ended before its DE buffer was whole"
            note_dropped(self.services, Drop.DISCARDED, self.full_blocks - prefix_blocks, message)

    def _release(self) -> None:
        self._note_discarded()
        self.buffer.size_class.device_end(self._copying)
        self.read_bytes = self.buffer.release()
        for landing in [self._push, *self._helped]:
            if landing is not None:
                self._landings.fence(landing, self.buffer)

    def _none_lands(self) -> None:
        """The slots are home, and so is the room."""
        if self.buffer.released:
            self.services.room.give_back(self)
