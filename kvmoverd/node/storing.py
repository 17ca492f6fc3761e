"""Store driver: full blocks out of an engine's pages into write-back slots, and from there to storage.

Blocks that are stored, that somebody writes here, or that the call names twice are neither copied nor do they take room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvmoverd.core.admission import Purpose
from kvmoverd.core.drops import drop_of_copy
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceAccepted,
    FindStored,
    Finish,
    Release,
    SendLayer,
    TakeSlots,
    WriteBlocks,
)
from kvmoverd.core.machines.store import StoreMachine, StoreState
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import End, Reason
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.mover import Need
from kvmoverd.node.pool import SizeClass
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.node.slices import Addresses, blocks_iovec, payloads_iovec
from kvmoverd.node.stored import find_stored, known_stored
from kvmoverd.node.writer import ChainBlock, join_write, note_dropped, write_block
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

    def blocks(self) -> list[ChainBlock]:
        return [self.block(index) for index in range(len(self.keys))]


@dataclass(frozen=True, slots=True)
class Chains:
    """Several runs, of any chains: all blocks of one, then those of the next."""

    chains: tuple[Chain, ...]

    def blocks(self) -> list[ChainBlock]:
        return [block for chain in self.chains for block in chain.blocks()]


class StoreDriver(Driver):
    """Raises `BadPages` in the constructor; nothing is taken then. The region is in use until the blocks are accepted."""

    kind: ClassVar[str] = "store"

    def __init__(
        self,
        services: Services,
        call: Call,
        *,
        namespace: Namespace,
        chain: Chain | Chains,
        region: Region,
        pages: Pages,
    ) -> None:
        self.blocks = chain.blocks()
        region.check(pages, len(self.blocks))
        region.use(None)
        super().__init__(services, call)
        self.namespace = namespace
        self.region = region
        self.pages = pages.reshape(len(self.blocks), -1) if self.blocks else pages
        self._size_class: SizeClass = services.pool.size_class(namespace.layout)
        self._owner = services.pool.new_holder()
        self._slots: list[int] = []
        self._payloads: Addresses = np.zeros(0, dtype=np.uint64)
        self._sink_id: int | None = None
        self._uses_region = True
        self._pieces: list[range] = []
        self._crcs: dict[int, npt.NDArray[np.uint32]] = {}
        self._again: dict[int, list[int]] = {}
        # With more copies in its window than the mover hands out, the request that came first is whole first.
        self._since_ns = services.clock.now_ns()
        self._machine = StoreMachine(
            blocks=len(self.blocks),
            copies=lambda blocks: len(_pieces(namespace.layout, blocks)),
            window_layers=services.limits.window_layers,
        )

    @property
    def machine(self) -> StoreMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def do(self, action: Action) -> None:
        match action:
            case FindStored():
                keys = [block.key for block in self.blocks]
                known = known_stored(self.services, self.namespace, keys)
                find_stored(self.services, self.namespace, keys, known, self._found)
            case TakeSlots():
                size_bytes = len(self._machine.to_copy) * self.namespace.layout.record_bytes
                self.services.room.ask(Purpose.WRITE_BACK, self, size_bytes, granted=self._take, refused=self._refused)
            case SendLayer(number):
                self._copy(number)
            case WriteBlocks(blocks):
                self._write(blocks)
            case AnnounceAccepted():
                self._let_region_go()
                self.outbox.put(action)
            case Finish(end):
                self._count_dropped(end)
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

    def _found(self, stored: frozenset[int]) -> None:
        """Of a key that the call names twice the second waits for the first; of one that is written here, for that write."""
        if self._machine.state is not StoreState.LOOKING:
            return
        found: list[tuple[int, Reason]] = []
        first: dict[bytes, int] = {}
        for index, block in enumerate(self.blocks):
            if index in stored:
                found.append((index, Reason.OK))
            elif block.key in first:
                self._again.setdefault(first[block.key], []).append(index)
            else:
                first[block.key] = index
                if not join_write(self.services, self.namespace, block.key, partial(self._written, index)):
                    found.append((index, Reason.MISS))
        self.run(self._machine.on_found(found))

    def _take(self) -> None:
        blocks = len(self._machine.to_copy)
        self._slots = self._size_class.private(blocks, self._owner)
        self._pieces = _pieces(self.namespace.layout, blocks)
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
        piece = self._pieces[number]
        pages = self.pages[list(self._machine.to_copy[piece.start : piece.stop])].reshape(-1)
        source = blocks_iovec(self.region, pages, len(piece))
        send = self.services.mover.send
        send(None, self._sink_id, number, 0, source, self._on_sent, need=Need.STORE, since_ns=self._since_ns)

    def _resolve(self, number: int, first_block: int) -> IoVec | None:
        if first_block or number >= len(self._pieces):
            return None
        piece = self._pieces[number]
        return payloads_iovec(self.namespace.layout, self._payloads[piece.start : piece.stop])

    def _summed(self, number: int, sums: npt.NDArray[np.uint32]) -> None:
        """In a thread that copies. Python's numbers are made when a block is written, not here."""
        for place, row in zip(self._pieces[number], sums, strict=True):
            self._crcs[place] = row

    def _on_sent(self, number: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.moved_bytes += moved_bytes
        self.run(self._machine.on_sent(number, reason, message))

    def _write(self, blocks: tuple[int, ...]) -> None:
        for place, block in enumerate(blocks):
            write_block(
                self.services,
                self.namespace,
                self.blocks[block],
                self._size_class,
                self._slots[place],
                partial(self._written, block),
                layer_crcs=tuple(self._crcs.pop(place).tolist()) if place in self._crcs else (),
            )
        self.services.desk.submit()

    def _written(self, block: int, reason: Reason) -> None:
        for again in (block, *self._again.pop(block, ())):
            self.run(self._machine.on_written(again, reason))

    def _count_dropped(self, end: End) -> None:
        """Blocks that were not accepted are lost with the call; of the others their writes tell."""
        if not self._machine.accepted:
            what = f"request {self.call.request_id!r}: {end.message}"
            note_dropped(self.services, drop_of_copy(end.reason), len(self._machine.to_copy), what)

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


def _pieces(layout: Layout, blocks: int) -> list[range]:
    """The blocks that are copied together, by their place among those that are copied."""
    wanted = max(1, min(layout.layer_count, blocks * layout.block_bytes // COPY_BYTES))
    each = max(1, -(-blocks // wanted))
    return [range(first, min(first + each, blocks)) for first in range(0, blocks, each)]
