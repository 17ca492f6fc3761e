"""Part driver: this node reads blocks of a request and sends their layers to a sink, here or on another node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadRequest, KvmoverError, QueueFull
from kvmoverd.core.machines.actions import (
    Action,
    AnnouncePrefix,
    Finish,
    GaveRest,
    GaveUp,
    Release,
    SendAssembly,
    SendLayer,
    TakeSlots,
)
from kvmoverd.core.machines.part import PartMachine, PartState
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.block_set import BlockSet, Outcomes, Progress
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.layer_dues import LayerDues
from kvmoverd.node.mover import Need
from kvmoverd.node.peer import PartListener
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.slices import Addresses, slot_iovec
from kvmoverd.ports.transport import IoVec, Route

LAYERS_DUE = 0
"""Read priority of blocks whose layers an engine waits for: the most urgent of all."""
HELP_LATER_NS = 20_000_000
"""What others' requests stand back for this node's own in the queue of reads: these go first for so long, and nobody starves."""
HELP_WAIT_S = 0.5
"""How long a part of another node's request may wait for room here: longer than that, somebody else reads it sooner."""
NO_HINTS: Mapping[bytes, Place] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the layers go. `sink_id` 0: it is named later."""

    route: Route | None
    sink_id: int


@dataclass(frozen=True, slots=True)
class Helping:
    """What is different for a part of two other nodes. `hints`: where its blocks lie, as far as its owner has heard;
    `assembly`: the decode node, whose sink is named later, or None."""

    hints: Mapping[bytes, Place]
    assembly: Destination | None


class PartDriver(Driver):
    """A `PartHandle`: its owner calls it here, or by way of `rpc`.

    With `blocks` the slots are those of a DE buffer, held by it, also when they come later (`wait_for_blocks`); without, the
    part takes room and slots of its own: those that are there for others' requests, when it helps. `first_block`: where its
    first block stands in the request.
    """

    kind: ClassVar[str] = "read_part"

    def __init__(
        self,
        services: Services,
        call: Call,
        *,
        namespace: Namespace,
        keys: Sequence[bytes],
        credit_layers: int,
        destination: Destination,
        listener: PartListener,
        blocks: BlockSet | None = None,
        first_block: int = 0,
        first_layer: int = 0,
        holds: bool = False,
        helping: Helping | None = None,
    ) -> None:
        if first_layer > namespace.layout.layer_count:
            raise BadRequest(f"first_layer is {first_layer}, the model has {namespace.layout.layer_count} layers")
        super().__init__(services, call)
        self.namespace, self.keys = namespace, keys
        self.destination = destination
        self._assembly = helping.assembly if helping is not None else None
        self.listener, self.first_block = listener, first_block
        self._blocks, self._owns_blocks = blocks, blocks is None
        self._helping = helping
        self._first_layer, self._rest_layer = first_layer, 0
        self._told_progress = (0, 0)
        self._dues = LayerDues()
        self._first_credit = 0
        self._sending: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._machine = PartMachine(
            blocks=len(keys),
            layers=namespace.layout.layer_count,
            credit_layers=credit_layers,
            window_layers=services.limits.window_layers,
            first_layer=first_layer,
            holds=holds,
            assembles=self._assembly is not None,
        )

    @property
    def machine(self) -> PartMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self._hear_of_reads()
        self.run(self._machine.on_credit(prefix_blocks, layers))
        if self._sending:
            # Page sets of a ring come back as the engine computes: later credits tell its pace.
            computed_layers = self._machine.credit_layers - self._first_credit
            self._dues.computed(computed_layers, self.services.clock.now_ns())

    def assemble(self, sink_id: int) -> None:
        """The decode node's sink is open; the first one named counts, and none for a part whose layers nobody assembles."""
        if self._assembly is not None and not self._assembly.sink_id:
            self._hear_of_reads()
            self._assembly = Destination(self._assembly.route, sink_id)
            self.run(self._machine.on_assemble())

    def give_up(self, kept_blocks: int) -> None:
        self.run(self._machine.on_give_up(kept_blocks, self._begun_blocks()))

    def give_rest(self, kept_blocks: int) -> None:
        self._hear_of_reads()
        self.run(self._machine.on_give_rest(*self._stop_reading(kept_blocks)))

    def _hear_of_reads(self) -> None:
        """Of a batch of completions others may be told first, and speak to this part: a lost block's slot is gone by then."""
        if self._blocks is not None:
            self._blocks.tell()

    def _stop_reading(self, kept_blocks: int) -> tuple[int, int]:
        """Blocks that are still read whole, and how many layers of the others; 0 layers: all are, as before."""
        prefix, blocks = self._machine.prefix_blocks, self._blocks
        if blocks is None or kept_blocks >= prefix or not self._machine.may_give_rest:
            return prefix, 0
        if self._owns_blocks:
            self._keep(prefix)
        # A DE buffer cuts its sets itself, when it hears of the prefix.
        return self.services.reader.give_rest(blocks, kept_blocks) if len(blocks.slots) == prefix else (prefix, 0)

    def _begun_blocks(self) -> int:
        """Leading blocks that it keeps: all that it has taken over, the rest of a part or, still without slots, a DE buffer's."""
        if self._rest_layer:
            return len(self.keys)
        if self._blocks is not None:
            return self.services.reader.begun(self._blocks)
        return 0 if self._owns_blocks else len(self.keys)

    def stop(self, reason: Reason = Reason.CANCELLED, message: str = "stopped by its owner") -> None:
        super().stop(reason, message)

    def goes_to(self, node: str, boot_id: str) -> bool:
        """Does this boot of that node get its layers?"""
        ways = [to.route for to in (self.destination, self._assembly) if to is not None and to.route is not None]
        return any((route.node, route.boot_id) == (node, boot_id) for route in ways)

    def do(self, action: Action) -> None:
        match action:
            case TakeSlots():
                self._take_slots()
            case AnnouncePrefix(prefix_blocks, first_lost):
                self.listener.on_prefix(prefix_blocks, first_lost)
            case SendLayer(layer):
                self._send(layer)
            case SendAssembly(layer):
                self._send_assembly(layer)
            case GaveUp(kept_blocks):
                self._give_up(kept_blocks)
            case GaveRest(kept_blocks, first_layer):
                self.listener.on_gave_rest(kept_blocks, first_layer)
            case Release():
                self._release()
            case Finish(end):
                self.listener.on_end(end)
            case _:
                self.outbox.put(action)

    def _take_slots(self) -> None:
        if self._blocks is not None:
            self._slots_taken(self._blocks)
        elif self._owns_blocks:
            self._ask_for_room()

    def wait_for_blocks(self) -> None:
        """To be called before `start`: the slots will be those of a DE buffer, which has none for the part yet."""
        self._owns_blocks = False

    def read_rest(self) -> None:
        """To be called before `start`: layers before its first one are read by nobody here."""
        layers = self.namespace.layout.layer_count
        assert 0 < self._first_layer < layers, f"the rest of a part begins at layer {self._first_layer} of {layers}"
        self._rest_layer = self._first_layer

    def take_blocks(self, blocks: BlockSet) -> None:
        """The DE buffer has slots for the part now, which has started; one that is over reads nothing."""
        if self._machine.state is PartState.WAITING:
            self._blocks = blocks
            self._slots_taken(blocks)

    def _ask_for_room(self) -> None:
        size_bytes = len(self.keys) * self.namespace.layout.record_bytes
        purpose, wait_s = (Purpose.READ, None) if self._helping is None else (Purpose.HELP, HELP_WAIT_S)
        self.services.room.ask(purpose, self, size_bytes, granted=self._acquire, refused=self.refused, wait_s=wait_s)

    def _acquire(self) -> None:
        due_ns, hints = self.services.clock.now_ns(), NO_HINTS
        if self._helping is not None:
            due_ns, hints = due_ns + HELP_LATER_NS, self._helping.hints
        try:
            blocks = self._acquired(due_ns, hints)
        except QueueFull as error:
            self.refused(error)
            return
        self._blocks = blocks
        self._slots_taken(blocks)

    def _acquired(self, due_ns: int, hints: Mapping[bytes, Place]) -> BlockSet:
        reader, namespace, keys = self.services.reader, self.namespace, self.keys
        if self._rest_layer:
            return reader.acquire_rest(
                namespace, keys, self._rest_layer, priority=LAYERS_DUE, due_ns=due_ns, hints=hints
            )
        return reader.acquire(namespace, keys, priority=LAYERS_DUE, due_ns=due_ns, by_ranges=True, hints=hints)

    def _slots_taken(self, blocks: BlockSet) -> None:
        self.run(self._machine.on_slots())
        blocks.listen(self._on_blocks, self._on_layers)
        self._tell_progress(blocks)

    def _on_layers(self, progress: Progress) -> None:
        self.run(self._machine.on_layers(progress))
        if self._blocks is not None:
            self._tell_progress(self._blocks)

    def _on_blocks(self, outcomes: Outcomes) -> None:
        self.run(self._machine.on_blocks(outcomes))
        if self._blocks is not None:
            self._tell_progress(self._blocks)

    def _tell_progress(self, blocks: BlockSet) -> None:
        """Once for a batch of completions."""
        if self._machine.state not in (PartState.READING, PartState.HOLDING, PartState.SENDING):
            return
        progress = self.services.reader.begun(blocks), blocks.read_bytes
        if progress != self._told_progress:
            self._told_progress = progress
            self.listener.on_progress(*progress)

    def refused(self, error: KvmoverError) -> None:
        """There is no room for the part, or there are no slots."""
        self.run(self._machine.on_no_slots(reason_of(error), str(error)))

    def _give_up(self, kept_blocks: int) -> None:
        self._keep(kept_blocks)
        self.listener.on_gave_up(kept_blocks)

    def _keep(self, blocks: int) -> None:
        """Reads of the others that no device knows of are dropped; their room is somebody else's now."""
        if blocks == len(self.keys):
            return
        self.keys = self.keys[:blocks]
        if self._blocks is not None:
            self.services.reader.trim(self._blocks, blocks)
        if self._owns_blocks:
            self.services.room.shrink(self, blocks * self.namespace.layout.record_bytes)

    def _send(self, layer: int) -> None:
        to, source = self.destination, self._source(layer)
        self.services.mover.send(
            to.route,
            to.sink_id,
            layer,
            self.first_block,
            source,
            self._on_sent,
            need=Need.LAYERS,
            since_ns=self._dues.due_ns(layer, self.services.clock.now_ns()),
        )

    def _send_assembly(self, layer: int) -> None:
        to = self._assembly
        assert to is not None and to.sink_id, f"layer {layer} has no DE buffer to go to"
        self.services.mover.send(
            to.route, to.sink_id, layer, self.first_block, self._source(layer), self._on_assembled, need=Need.ASSEMBLY
        )

    def _source(self, layer: int) -> IoVec:
        assert self._blocks is not None, "a layer is sent before slots were taken"
        if not self._sending:
            self._begin_sending(self._blocks)
        return slot_iovec(self.namespace.layout, layer, self._payloads[: self._machine.blocks_at(layer)], 0)

    def _begin_sending(self, blocks: BlockSet) -> None:
        """The slots are a device's from the first layer until the part is over, also those whose read fails meanwhile."""
        prefix = self._machine.prefix_blocks
        self._first_credit = self._machine.credit_layers
        self._sending = blocks.slots[:prefix]
        self._payloads = blocks.payloads()[:prefix]
        blocks.size_class.device_begin(self._sending)

    def _on_sent(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))

    def _on_assembled(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_assembled(layer, reason, message))

    def _release(self) -> None:
        if self._blocks is not None:
            self.read_bytes = self._blocks.read_bytes
            self._blocks.size_class.device_end(self._sending)
        if not self._owns_blocks:
            return
        if self._blocks is not None:
            self.services.reader.release(self._blocks)
        self.services.room.give_back(self)
