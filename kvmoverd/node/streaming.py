"""Stream driver: Layer Blocks of the hit prefix into a prefill engine's pages."""

from __future__ import annotations

from typing import ClassVar

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.machines.actions import Action, Finish, Grant, Quiesce, Reserve, SetPrefix, StartPart
from kvmoverd.core.machines.stream import StreamMachine
from kvmoverd.core.status import BlockOutcome, End, Path, Reason
from kvmoverd.node.driver import Driver
from kvmoverd.node.peer import PartHandle, PartListener
from kvmoverd.node.prefill import PrefillRequest
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.sessions import Region
from kvmoverd.node.slices import region_iovec
from kvmoverd.ports.transport import IoVec, Sender


class _LocalPart:
    """A part that this node reads itself."""

    def __init__(self, driver: PartDriver) -> None:
        self.driver = driver

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self.driver.credit(prefix_blocks, layers)

    def stop(self) -> None:
        self.driver.stop(Reason.CANCELLED, "stopped by its owner")


class StreamDriver(Driver):
    """One StreamLayers call. The sink it opens lets in only layers that were granted, once each."""

    kind: ClassVar[str] = "prefill"

    def __init__(self, request: PrefillRequest) -> None:
        super().__init__(request.services, request.plan.call)
        plan = request.plan
        self.request = request
        self._machine = StreamMachine(
            layers=plan.namespace.layout.layer_count,
            hit_blocks=plan.hit_blocks,
            has_decode_side=request.peer is not None,
            ring_sets=plan.ring_sets,
            pushes=request.peer is not None,
        )
        self._granted = 0
        self._part: PartHandle | None = None
        self._part_ended = True
        self._sink_id: int | None = None
        request.join("stream")
        request.on_reserved.append(lambda: self.run(self._machine.on_reserved()))
        request.on_reserve_failed.append(self._reserve_failed)
        request.on_failed.append(self.stop)
        request.on_computed.insert(0, lambda layers: self.run(self._machine.on_computed(layers)))
        request.on_pushed.append(lambda layers: self.run(self._machine.on_pushed(layers)))

    @property
    def machine(self) -> StreamMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def uses_region(self, region: Region) -> bool:
        return self.request.plan.region is region

    def gone(self) -> None:
        self.request.leave("stream", self.ended.reason if self.ended else Reason.CANCELLED)

    def do(self, action: Action) -> None:
        match action:
            case Reserve():
                self.request.reserve()
            case StartPart():
                self._start_part()
            case SetPrefix(prefix_blocks):
                self.request.set_prefix(prefix_blocks)
            case Grant(prefix_blocks, layers):
                self._granted = layers
                if self._part is not None:
                    self._part.credit(prefix_blocks, layers)
            case Quiesce():
                self._begin_quiesce()
            case Finish(end):
                self.request.finished(end)
                self.outbox.put(action)
            case _:
                self.outbox.put(action)

    def _reserve_failed(self, reason: Reason, message: str) -> None:
        self.run(self._machine.on_reserve_failed(reason, message))
        self.run(self._machine.on_part_failed(reason, message))

    def _start_part(self) -> None:
        self._granted = self._machine.credit_layers()
        self._sink_id = self.services.mover.expect(self._resolve, self._on_layer, self._reader())
        listener = PartListener(self._on_prefix, self._on_part_end)
        self._part_ended = False
        plan = self.request.plan
        if plan.path is Path.DE:
            peer, reserved = self.request.peer, self.request.reserved
            assert peer is not None and reserved is not None, "a DE read without a ticket"
            try:
                self._part = peer.read_part(
                    reserved.ticket, self._sink_id, self._granted, plan.call.timeout_s, listener
                )
            except KvmoverError as error:
                self._on_part_end(End(reason_of(error), f"{plan.decode_node}: {error}"))
            return
        part = PartDriver(
            self.services,
            plan.call,
            namespace=plan.namespace,
            keys=plan.keys[: plan.hit_blocks],
            credit_layers=self._granted,
            destination=Destination(None, self._sink_id),
            listener=listener,
        )
        self._part = _LocalPart(part)
        self.request.hand_room_to(part)
        part.start()

    def _reader(self) -> Sender | None:
        """Who will send the layers; None: this node itself."""
        reserved = self.request.reserved
        if self.request.plan.path is not Path.DE or reserved is None or reserved.route is None:
            return None
        return reserved.route.node, reserved.route.boot_id

    def _resolve(self, layer: int, first_block: int) -> IoVec | None:
        if first_block or not self._machine.ready.in_order <= layer < self._granted:
            return None
        plan = self.request.plan
        prefix = self._machine.prefix_blocks
        pages = plan.pages_of(layer)[: prefix * plan.region.geometry.pages_per_block]
        return region_iovec(plan.region, layer, pages, prefix, 0)

    def _on_prefix(self, prefix_blocks: int, first_lost: BlockOutcome | None) -> None:
        self.run(self._machine.on_prefix(prefix_blocks, first_lost))

    def _on_layer(self, layer: int, moved_bytes: int) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_layer(layer))

    def _on_part_end(self, end: End) -> None:
        self._part_ended = True
        self.read_bytes += end.storage_read_bytes
        if end.reason is not Reason.OK:
            self.run(self._machine.on_part_failed(end.reason, end.message, end.prefix_blocks))
        self._tell_if_quiet()

    def _begin_quiesce(self) -> None:
        if self._part is not None and not self._part_ended and not self._machine.ready.complete:
            self._part.stop()
        if self._sink_id is None:
            self._tell_if_quiet()
        else:
            self.services.mover.forget(self._sink_id, self._sink_quiet)

    def _sink_quiet(self) -> None:
        self._sink_id = None
        self._tell_if_quiet()

    def _tell_if_quiet(self) -> None:
        if self._part_ended and self._sink_id is None:
            self.run(self._machine.on_quiet())
