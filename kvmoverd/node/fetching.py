"""Fetch driver: Full Blocks into the pool under a lease, or through it into an engine's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError, QueueFull
from kvmoverd.core.leases import Lease
from kvmoverd.core.machines.actions import Action, AnnounceBlocks, GrantLease, Release, SendLayer, TakeSlots
from kvmoverd.core.machines.fetch import FetchKind, FetchMachine
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import BlockOutcome, Reason
from kvmoverd.node.block_set import BlockSet, Outcomes, Progress
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.leasing import LeaseBook
from kvmoverd.node.mover import Need
from kvmoverd.node.outbox import Fetched
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import Addresses, region_iovec, slot_iovec
from kvmoverd.ports.transport import IoVec

FETCH = 1
"""Read priority of blocks that a call waits for; layers due come before."""


class FetchDriver(Driver):
    """Raises `BadPages`, `PagesBusy`, `QueueFull` in the constructor; nothing is taken then."""

    kind: ClassVar[str] = "fetch"

    def __init__(
        self,
        services: Services,
        call: Call,
        *,
        namespace: Namespace,
        keys: Sequence[bytes],
        kind: FetchKind,
        leases: LeaseBook,
        lease_s: float = 0.0,
        region: Region | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.region, self.pages = region, pages
        self._lease_promised = kind is FetchKind.LEASE
        if self._lease_promised:
            leases.promise()
        if region is not None and pages is not None:
            region.check(pages, len(keys))
            region.use(pages)
        super().__init__(services, call)
        self.namespace = namespace
        self.keys = keys
        self.lease: Lease | None = None
        self._leases = leases
        self._lease_s = lease_s
        self._blocks: BlockSet | None = None
        self._copying: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._copied_blocks: dict[int, npt.NDArray[np.int64]] = {}
        self._sink_id: int | None = None
        layers = namespace.layout.layer_count
        window = services.limits.window_layers
        self._machine = FetchMachine(blocks=len(keys), layers=layers, kind=kind, window_layers=window)

    @property
    def machine(self) -> FetchMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def do(self, action: Action) -> None:
        match action:
            case TakeSlots():
                size_bytes = len(self.keys) * self.namespace.layout.record_bytes
                self.services.room.ask(Purpose.READ, self, size_bytes, granted=self._acquire, refused=self._refused)
            case SendLayer(layer):
                self._copy(layer)
            case AnnounceBlocks(outcomes):
                self.outbox.put(self._fetched(outcomes))
            case GrantLease():
                self._grant_lease()
            case Release():
                self._release()
            case _:
                self.outbox.put(action)

    def uses_region(self, region: Region) -> bool:
        return self.region is region

    def gone(self) -> None:
        if self._lease_promised:
            self._leases.withdraw()
        if self.region is not None and self.pages is not None:
            self._let_go(self.region, self.pages)

    def _let_go(self, region: Region, pages: Pages) -> None:
        """The copies have ended, the pages are free at once; the region stays mapped until its sink is quiet."""
        region.pages_quiet(pages)
        if self._sink_id is None:
            region.let_go(None)
        else:
            self.services.mover.forget(self._sink_id, lambda: region.let_go(None))

    def _acquire(self) -> None:
        due_ns = self.services.clock.now_ns()
        try:
            self._blocks = self.services.reader.acquire(
                self.namespace,
                self.keys,
                priority=FETCH,
                due_ns=due_ns,
                by_ranges=self._machine.kind is FetchKind.PAGES,
            )
        except QueueFull as error:
            self._refused(error)
            return
        self.run(self._machine.on_slots())
        self._blocks.listen(self._on_blocks, self._on_layers)

    def _refused(self, error: KvmoverError) -> None:
        self.run(self._machine.on_no_slots(reason_of(error), str(error)))

    def _on_blocks(self, outcomes: Outcomes) -> None:
        self.run(self._machine.on_blocks(outcomes))

    def _on_layers(self, progress: Progress) -> None:
        self.run(self._machine.on_layers(progress))

    def _copy(self, layer: int) -> None:
        assert self._blocks is not None, "copying before slots were taken"
        if self._sink_id is None:
            self._sink_id = self.services.mover.expect(self._resolve, lambda layer, moved: None)
        if not self._copying:
            # The slots are a device's until the fetch is over, also those whose read fails meanwhile.
            self._copying = [self._blocks.slots[block] for block in self._machine.good_blocks()]
            self._payloads = self._blocks.payloads()
            self._blocks.size_class.device_begin(self._copying)
        good = self._copied_blocks[layer] = np.asarray(self._machine.good_blocks(), dtype=np.int64)
        source = slot_iovec(self.namespace.layout, layer, self._payloads[good], 0)
        self.services.mover.send(None, self._sink_id, layer, 0, source, self._on_sent, need=Need.PAGES)

    def _resolve(self, layer: int, first_block: int) -> IoVec | None:
        """Pages of the blocks that were good when the layer was sent."""
        good = self._copied_blocks.get(layer)
        if self.region is None or self.pages is None or first_block or good is None:
            return None
        pages = self.pages.reshape(len(self.keys), -1)[good].reshape(-1)
        return region_iovec(self.region, layer, pages, len(good), 0)

    def _on_sent(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(layer, reason, message))

    def _grant_lease(self) -> None:
        assert self._blocks is not None, "a lease without blocks"
        slots = {self._blocks.slots[block] for block in self._machine.good_blocks()}
        room = self.services.room.hand_over(self, len(slots) * self.namespace.layout.record_bytes)
        self.read_bytes = self._blocks.read_bytes
        self._lease_promised = False
        self.lease = self._leases.grant(self.call.session_id, self._blocks, room, self._lease_s)
        self._blocks = None

    def _fetched(self, outcomes: tuple[BlockOutcome, ...]) -> Fetched:
        if self.lease is None:
            return Fetched(outcomes)
        return Fetched(outcomes, self.lease.lease_id, self.lease.generation, self._lease_s)

    def _release(self) -> None:
        if self._blocks is not None:
            self.read_bytes = self._blocks.read_bytes
            self._blocks.size_class.device_end(self._copying)
            self.services.reader.release(self._blocks)
            self._blocks = None
        self.services.room.give_back(self)
