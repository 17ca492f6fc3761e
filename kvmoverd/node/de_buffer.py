"""DE buffer: the slots of one request on the decode node, by block, and who fills each.

A slot is private, for what other nodes send, or belongs to a set of the block reader, for what this node reads or has. Before the
prefix is set nothing lands in private slots, so blocks go from the one kind to the other as readers give up and take over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.driver import Driver
from kvmoverd.node.peer import Helped, Reservation
from kvmoverd.node.reading import LAYERS_DUE
from kvmoverd.node.services import Services
from kvmoverd.node.slices import Addresses

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Rest:
    """What the part of a read has given away: of its blocks from `kept_blocks` on, the layers from `first_layer` on."""

    kept_blocks: int
    first_layer: int


@dataclass(eq=False)
class OwnRead:
    """Hit blocks that this node reads for the request, or has, in one set of the block reader.

    `part`: who sends them to the prefill node; None: nobody yet. `readable`: how many leading ones it said are good. `rest`:
    what of them is pushed, into the same slots; once for ever.
    """

    blocks: Runs
    found: BlockSet
    part: Driver | None = None
    readable: int = 0
    rest: Rest | None = None

    @property
    def rest_blocks(self) -> Runs:
        """Blocks whose last layers this node does not read."""
        return Runs() if self.rest is None else self.blocks.tail(self.rest.kept_blocks)

    def good(self) -> int:
        """Leading blocks whose bytes are in the buffer, or on their way into it, or were when the part said so."""
        return min(self.blocks.count, max(self.found.begun_prefix(), self.readable))

    def whole(self, prefix_blocks: int) -> bool:
        """Are the blocks below the prefix there to the last layer, or to where their rest begins?"""
        ours = self.blocks.below(prefix_blocks)
        if self.rest is None:
            return self.found.whole_prefix() >= ours
        kept, first_layer = min(ours, self.rest.kept_blocks), self.rest.first_layer
        return self.found.whole_prefix() >= kept and all(self._has(place, first_layer) for place in range(kept, ours))

    def _has(self, place: int, layers: int) -> bool:
        """Are so many leading layers of the block there?"""
        outcome = self.found.outcomes.get(place)
        return self.found.progress.get(place, 0) >= layers if outcome is None else outcome is Reason.OK

    @property
    def has_lost(self) -> bool:
        """Has one of its blocks failed?"""
        return any(reason is not Reason.OK for reason in self.found.outcomes.values())

    def lost(self, prefix_blocks: int) -> int | None:
        """The first block of the prefix that can't be read any more, unless its part is there to say so."""
        if self.part is not None and not self.part.is_gone:
            return None
        ours, outcomes = self.blocks.below(prefix_blocks), self.found.outcomes
        failed = (place for place in range(ours) if outcomes.get(place, Reason.OK) is not Reason.OK)
        place = next(failed, None)
        return None if place is None else self.blocks.at(place)


class DeBuffer:
    """All slots or none: raises `PoolExhausted`, `QueueFull`. `own`: what this node reads at once; `held`: clean here.

    `keys`: of the full blocks; `total_blocks` may be one more. `hints`: where blocks lie, as far as somebody has heard.
    """

    def __init__(
        self,
        services: Services,
        namespace: Namespace,
        keys: Sequence[bytes],
        total_blocks: int,
        *,
        own: Runs,
        held: Runs,
        hints: Mapping[bytes, Place],
    ) -> None:
        self.namespace = namespace
        self.size_class = services.pool.size_class(namespace.layout)
        self.reads: list[OwnRead] = []
        self.released = False
        self._services = services
        self._keys = keys
        self._hints = hints
        self._owner = services.pool.new_holder()
        self._slots: npt.NDArray[np.int64] = np.full(total_blocks, NO_SLOT, dtype=np.int64)
        self._open(own, held)

    def _open(self, own: Runs, held: Runs) -> None:
        """Private slots come before reads: they can fail. What is clean here is held meanwhile, or they would evict it."""
        pins = self._services.pool.new_holder()
        try:
            mine = Runs.union((own, held))
            self.size_class.want(self._clean(mine), pins)
            self._fill(self.all_blocks.minus(mine))
            for blocks in (held, own):
                if blocks:
                    self._read(blocks)
        except KvmoverError:
            self.release()
            raise
        finally:
            self.size_class.give_back(pins)

    @property
    def all_blocks(self) -> Runs:
        return Runs.of((0, len(self._slots)))

    @property
    def own_blocks(self) -> Runs:
        """What this node reads or has."""
        return Runs.union(read.blocks for read in self.reads)

    @property
    def private_blocks(self) -> Runs:
        """What other nodes send."""
        return self.all_blocks.minus(self.own_blocks)

    def slots(self, blocks: Runs | None = None) -> list[int]:
        """Slot of each block, of all by default."""
        found: list[int] = (self._slots if blocks is None else self._slots[blocks.indexes()]).tolist()
        return found

    def payloads(self, blocks: Runs | None = None) -> Addresses:
        """Payload address of each block, of all by default."""
        return self.size_class.addresses(self.slots(blocks)) + np.uint64(HEADER_BYTES)

    def good_prefix(self, hit_blocks: int) -> int:
        """Leading hit blocks that are good as far as this node's reads go."""
        cuts = (read.blocks.at(read.good()) for read in self.reads if read.good() < read.blocks.count)
        return min(cuts, default=hit_blocks)

    def check_prefix(self, asked: Reservation, prefix_blocks: int, helped: Sequence[Helped]) -> None:
        """Raises `BadRequest` for a prefix that does not fit what was reserved and read, and for such parts of third nodes."""
        good = self.good_prefix(asked.hit_blocks)
        if not asked.resident_blocks <= prefix_blocks <= good:
            raise BadRequest(
                f"prefix of {prefix_blocks} blocks set, {good} have been read here, {asked.resident_blocks} are resident"
            )
        left = self.private_blocks.cut(asked.resident_blocks, prefix_blocks)
        for part in helped:
            if part.node in (self._services.node, asked.node) or not part.blocks or part.blocks.minus(left):
                raise BadRequest(
                    f"{part.node} sends blocks {part.blocks.spans}: of other nodes' {left.spans} are left, and only "
                    "third nodes have parts"
                )
            left = left.minus(part.blocks)

    def whole(self, prefix_blocks: int) -> bool:
        """Are all blocks of the prefix that this node reads there, as far as it reads them?"""
        return all(read.whole(prefix_blocks) for read in self.reads)

    def lost(self, prefix_blocks: int) -> int | None:
        """The first block of the prefix that this node can't read, and of which no part says so."""
        lost = (read.lost(prefix_blocks) for read in self.reads)
        return min((block for block in lost if block is not None), default=None)

    @property
    def rests(self) -> list[tuple[Runs, int]]:
        """Blocks whose layers from there on are pushed, though this node reads them.

        None of a read that has lost a block: the block's slot is not the buffer's any more, and the request ends with its part.
        """
        return [
            (read.rest_blocks, read.rest.first_layer)
            for read in self.reads
            if read.rest is not None and not read.has_lost
        ]

    def untaken(self, blocks: Runs) -> OwnRead | None:
        """A read of exactly these blocks that no part sends yet."""
        return next((read for read in self.reads if read.part is None and read.blocks == blocks), None)

    def take(self, blocks: Runs) -> OwnRead:
        """Reads blocks that were to be sent here, into other slots; nothing may land in their old ones. Raises `QueueFull`.

        Both in one step of the loop: there are as many slots to be had as are given back.
        """
        self._drop_private(blocks)
        try:
            return self._read(blocks)
        except KvmoverError:
            self._fill(blocks)
            raise

    def give_up(self, read: OwnRead, kept_blocks: int) -> None:
        """A part keeps so many leading blocks, and has given back the others: they are without slots until `fill`."""
        self._leave(read, kept_blocks)
        if not kept_blocks:
            self.reads.remove(read)
            self._services.reader.release(read.found)

    def drop_unasked(self, held: Runs) -> None:
        """Reads that no part was ever opened for: its owner was refused it, and has somebody else send these blocks.

        They are without slots until `fill`. To be told before the prefix is set; nobody asks for what is `held`.
        """
        for read in [read for read in self.reads if read.part is None and read.blocks != held]:
            self.give_up(read, 0)

    def cut(self, prefix_blocks: int) -> None:
        """Blocks from there on are new: what was read of them is given back. They are without slots until `fill`."""
        for read in self.reads:
            kept = read.blocks.below(prefix_blocks)
            if kept < read.blocks.count:
                self._services.reader.trim(read.found, kept)
                self._leave(read, kept)

    def fill(self) -> None:
        """Private slots for the blocks that have none. Raises `PoolExhausted`, then as before."""
        self._fill(Runs.of_mask(self._slots == NO_SLOT))

    def release(self) -> int:
        """Gives all slots back; returns the bytes that were read from storage for them."""
        self.released = True
        self.size_class.give_back(self._owner)
        for read in self.reads:
            self._services.reader.release(read.found)
        return sum(read.found.read_bytes for read in self.reads)

    def in_place(self, blocks: Runs) -> BlockSet:
        """Blocks that were sent here whole, for a part that sends them on; the slots stay the buffer's."""
        slots = self.slots(blocks)
        no_waiter = self._services.pool.new_holder()
        return BlockSet(no_waiter, self.size_class, slots, dict.fromkeys(range(len(slots)), Reason.OK))

    def _clean(self, blocks: Runs) -> list[tuple[bytes, bytes]]:
        fingerprint, keys, cache = self.namespace.fingerprint, self._keys, self.size_class.cache
        named = ((fingerprint, keys[block]) for block in blocks.indexes().tolist())
        return [key for key in named if cache.is_clean(key)]

    def _read(self, blocks: Runs) -> OwnRead:
        found = self._services.reader.acquire(
            self.namespace,
            [self._keys[block] for block in blocks.indexes().tolist()],
            priority=LAYERS_DUE,
            due_ns=self._services.clock.now_ns(),
            by_ranges=True,
            hints=self._hints,
        )
        self._slots[blocks.indexes()] = found.slots
        self.reads.append(read := OwnRead(blocks, found))
        return read

    def _fill(self, blocks: Runs) -> None:
        if blocks:
            self._slots[blocks.indexes()] = self.size_class.private(blocks.count, self._owner)

    def _leave(self, read: OwnRead, kept_blocks: int) -> None:
        self._slots[read.blocks.tail(kept_blocks).indexes()] = NO_SLOT
        read.blocks = read.blocks.head(kept_blocks)

    def _drop_private(self, blocks: Runs) -> None:
        left = self.private_blocks.minus(blocks)
        self.size_class.cache.trim(self._owner, set(self.slots(left)))
        self._slots[blocks.indexes()] = NO_SLOT
