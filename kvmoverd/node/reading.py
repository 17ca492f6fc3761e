"""Part driver: this node reads blocks for a request and sends their layers to a sink, here or on another node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError, QueueFull
from kvmoverd.core.machines.actions import (
    Action,
    AnnouncePrefix,
    Finish,
    Release,
    SendLayer,
    TakeSlots,
)
from kvmoverd.core.machines.part import PartMachine
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.block_set import BlockSet, Outcomes, Progress
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.mover import Need
from kvmoverd.node.peer import PartListener
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.slices import Addresses, slot_iovec
from kvmoverd.ports.transport import Route

LAYERS_DUE = 0
"""Read priority of blocks whose layers an engine waits for: the most urgent of all."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the layers go."""

    route: Route | None
    sink_id: int


class PartDriver(Driver):
    """With `blocks` the slots are those of a DE buffer, held by it; without, the part takes room and slots of its own."""

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
    ) -> None:
        super().__init__(services, call)
        self.namespace = namespace
        self.keys = keys
        self.destination = destination
        self.listener = listener
        self.on_sent_layers: Callable[[int], None] = lambda layers: None
        self._blocks = blocks
        self._owns_blocks = blocks is None
        self._sending: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._machine = PartMachine(
            blocks=len(keys),
            layers=namespace.layout.layer_count,
            credit_layers=credit_layers,
            window_layers=services.limits.window_layers,
        )

    @property
    def machine(self) -> PartMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self.run(self._machine.on_credit(prefix_blocks, layers))

    def do(self, action: Action) -> None:
        match action:
            case TakeSlots():
                self._take_slots()
            case AnnouncePrefix(prefix_blocks, first_lost):
                self.listener.on_prefix(prefix_blocks, first_lost)
            case SendLayer(layer):
                self._send(layer)
            case Release():
                self._release()
            case Finish(end):
                self.listener.on_end(end)
            case _:
                self.outbox.put(action)

    def _take_slots(self) -> None:
        if self._blocks is not None:
            self._slots_taken(self._blocks)
            return
        size_bytes = len(self.keys) * self.namespace.layout.record_bytes
        self.services.room.ask(Purpose.READ, self, size_bytes, granted=self._acquire, refused=self._refused)

    def _acquire(self) -> None:
        due_ns = self.services.clock.now_ns()
        try:
            blocks = self.services.reader.acquire(
                self.namespace, self.keys, priority=LAYERS_DUE, due_ns=due_ns, by_ranges=True
            )
        except QueueFull as error:
            self._refused(error)
            return
        self._blocks = blocks
        self._slots_taken(blocks)

    def _slots_taken(self, blocks: BlockSet) -> None:
        self.run(self._machine.on_slots())
        blocks.listen(self._on_blocks, self._on_layers)

    def _on_layers(self, progress: Progress) -> None:
        self.run(self._machine.on_layers(progress))

    def _on_blocks(self, outcomes: Outcomes) -> None:
        self.run(self._machine.on_blocks(outcomes))

    def _refused(self, error: KvmoverError) -> None:
        self.run(self._machine.on_no_slots(reason_of(error), str(error)))

    def _send(self, layer: int) -> None:
        assert self._blocks is not None, "a layer is sent before slots were taken"
        if not self._sending:
            self._begin_sending(self._blocks)
        source = slot_iovec(self.namespace.layout, layer, self._payloads, 0)
        to = self.destination
        self.services.mover.send(to.route, to.sink_id, layer, 0, source, self._on_sent, need=Need.LAYERS)

    def _begin_sending(self, blocks: BlockSet) -> None:
        """The slots are a device's from the first layer until the part is over, also those whose read fails meanwhile."""
        prefix = self._machine.prefix_blocks
        self._sending = blocks.slots[:prefix]
        self._payloads = blocks.payloads()[:prefix]
        blocks.size_class.device_begin(self._sending)

    def _on_sent(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))
        self.on_sent_layers(self._machine.window.arrived.in_order)

    def _release(self) -> None:
        if self._blocks is not None:
            self.read_bytes = self._blocks.read_bytes
            self._blocks.size_class.device_end(self._sending)
        if not self._owns_blocks:
            return
        if self._blocks is not None:
            self.services.reader.release(self._blocks)
        self.services.room.give_back(self)
