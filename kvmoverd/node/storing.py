"""Store driver: full blocks out of an engine's pages into write-back slots, and from there to storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.machines.actions import Action, AnnounceAccepted, Release, SendLayer, TakeSlots, WriteBlocks
from kvmoverd.core.machines.store import StoreMachine
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.mover import Need
from kvmoverd.node.pool import SizeClass
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import Addresses, blocks_iovec, payloads_iovec
from kvmoverd.node.writer import ChainBlock, write_block
from kvmoverd.ports.transport import IoVec

COPY_BYTES = 8 << 20
"""About so much is copied out of the pages at a time: nobody waits for single blocks, and each copy costs the loop 0.1 ms."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks of one chain."""

    keys: Sequence[bytes]
    parent: bytes
    first_depth: int

    def block(self, index: int) -> ChainBlock:
        parent = self.keys[index - 1] if index else self.parent
        return ChainBlock(self.keys[index], parent, self.first_depth + index)


class StoreDriver(Driver):
    """Raises `BadPages` in the constructor; nothing is taken then. The region is in use until the blocks are accepted."""

    kind: ClassVar[str] = "store"

    def __init__(
        self, services: Services, call: Call, *, namespace: Namespace, chain: Chain, region: Region, pages: Pages
    ) -> None:
        region.check(pages, len(chain.keys))
        region.use(None)
        super().__init__(services, call)
        self.namespace = namespace
        self.chain = chain
        self.region = region
        self.pages = pages
        self._size_class: SizeClass = services.pool.size_class(namespace.layout)
        self._owner = services.pool.new_holder()
        self._slots: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._sink_id: int | None = None
        self._uses_region = True
        self._copies = _copies(namespace.layout, len(chain.keys))
        self._crcs: dict[int, npt.NDArray[np.uint32]] = {}
        # With more copies in its window than the mover hands out, the request that came first is whole first.
        self._since_ns = services.clock.now_ns()
        window = services.limits.window_layers
        self._machine = StoreMachine(blocks=len(chain.keys), layers=len(self._copies), window_layers=window)

    @property
    def machine(self) -> StoreMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def do(self, action: Action) -> None:
        match action:
            case TakeSlots():
                size_bytes = len(self.chain.keys) * self.namespace.layout.record_bytes
                self.services.room.ask(Purpose.WRITE_BACK, self, size_bytes, granted=self._take, refused=self._refused)
            case SendLayer(number):
                self._copy(number)
            case WriteBlocks(blocks):
                self._write(blocks)
            case AnnounceAccepted():
                self._let_region_go()
                self.outbox.put(action)
            case Release():
                self._release()
            case _:
                self.outbox.put(action)

    def uses_region(self, region: Region) -> bool:
        return self._uses_region and self.region is region

    def gone(self) -> None:
        self._let_region_go()

    def _let_region_go(self) -> None:
        if self._uses_region:
            self._uses_region = False
            self.region.let_go(None)

    def _take(self) -> None:
        self._slots = self._size_class.private(len(self.chain.keys), self._owner)
        self._payloads = self._size_class.addresses(self._slots) + np.uint64(HEADER_BYTES)
        ends = np.cumsum(self.namespace.layout.layer_bytes, dtype=np.uint64)
        self._sink_id = self.services.mover.expect(
            self._resolve, lambda layer, moved: None, sum_ends=ends, on_sums=self._summed
        )
        self._size_class.device_begin(self._slots)
        self.run(self._machine.on_slots())

    def _refused(self, error: KvmoverError) -> None:
        self.run(self._machine.on_no_slots(reason_of(error), str(error)))

    def _copy(self, number: int) -> None:
        """To the machine, and to the sink, a copy of some blocks is one layer."""
        assert self._sink_id is not None, "copying before slots were taken"
        blocks, per_block = self._copies[number], len(self.pages) // len(self.chain.keys)
        pages = self.pages[blocks.start * per_block : blocks.stop * per_block]
        source = blocks_iovec(self.region, pages, len(blocks))
        send = self.services.mover.send
        send(None, self._sink_id, number, 0, source, self._on_sent, need=Need.STORE, since_ns=self._since_ns)

    def _resolve(self, number: int, first_block: int) -> IoVec | None:
        if first_block or number >= len(self._copies):
            return None
        blocks = self._copies[number]
        return payloads_iovec(self.namespace.layout, self._payloads[blocks.start : blocks.stop])

    def _summed(self, number: int, sums: npt.NDArray[np.uint32]) -> None:
        """In a thread that copies. Python's numbers are made when a block is written, not here."""
        for block, row in zip(self._copies[number], sums, strict=True):
            self._crcs[block] = row

    def _on_sent(self, number: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(number, reason, message))

    def _write(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            write_block(
                self.services,
                self.namespace,
                self.chain.block(block),
                self._size_class,
                self._slots[block],
                self._written(block),
                layer_crcs=tuple(self._crcs.pop(block).tolist()) if block in self._crcs else (),
            )
        self.services.desk.submit()

    def _written(self, block: int) -> Callable[[Reason], None]:
        return lambda reason: self.run(self._machine.on_written(block, reason))

    def _release(self) -> None:
        self._size_class.give_back(self._owner)
        if self._sink_id is None:
            self.services.room.give_back(self)
        else:
            self.services.mover.forget(self._sink_id, self._sink_quiet)

    def _sink_quiet(self) -> None:
        """No copy can land in the slots any more: they are home, and so is the room."""
        self._size_class.device_end(self._slots)
        self.services.room.give_back(self)


def _copies(layout: Layout, blocks: int) -> list[range]:
    """The blocks of each copy."""
    wanted = max(1, min(layout.layer_count, blocks * layout.block_bytes // COPY_BYTES))
    each = max(1, -(-blocks // wanted))
    return [range(first, min(first + each, blocks)) for first in range(0, blocks, each)]
