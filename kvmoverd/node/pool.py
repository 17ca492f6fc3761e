"""Buffer pool: one arena, cut into pieces; each layout has a class of equal slots that grows piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from kvmoverd.core.cache import BlockCache, Key, Wanted
from kvmoverd.core.errors import PoolExhausted, TooBig
from kvmoverd.core.layout import Layout
from kvmoverd.core.slots import SlotPool, SlotState
from kvmoverd.node.slices import Addresses
from kvmoverd.ports.memory import Memory


class SizeClass:
    """Slots of one record size, and the blocks cached in them. Slot ids are dense; ids of a returned piece are re-used."""

    def __init__(self, pool: BufferPool, slot_bytes: int) -> None:
        self._pool = pool
        self.slot_bytes = slot_bytes
        self.slots_per_piece = pool.piece_bytes // slot_bytes
        self.slots = SlotPool()
        self.cache = BlockCache(self.slots)
        self._addresses = np.zeros(0, dtype=np.uint64)
        self._pieces: dict[int, range] = {}
        self._retired: list[range] = []

    def addresses(self, slots: Sequence[int]) -> Addresses:
        """Address of each slot's record: header page first."""
        return self._addresses[np.asarray(slots, dtype=np.int64)]

    def want(self, keys: Sequence[tuple[bytes, bytes]], waiter: int) -> Wanted:
        """As `BlockCache.want`; takes free pieces before it evicts, and other classes' idle ones where that is not enough."""
        if self._pool.has_free_piece():
            self._grow_for(self.cache.missing(keys))
        while True:
            try:
                return self.cache.want(keys, waiter)
            except PoolExhausted:
                if not self._grow():
                    raise

    def private(self, count: int, owner: int, state: SlotState = SlotState.LEASED) -> list[int]:
        """As `BlockCache.private`; grows as `want` does."""
        self._grow_for(count)
        while True:
            try:
                return self.cache.private(count, owner, state)
            except PoolExhausted:
                if not self._grow():
                    raise

    def has_slot_beside(self, kept: Container[Key], steps_max: int) -> bool:
        """As `BlockCache.set_aside`; a free piece of the arena is as good."""
        return self._pool.has_free_piece() or self.cache.set_aside(kept, steps_max)

    def give_back(self, owner: int) -> None:
        self.cache.drop(owner)

    def device_begin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.slots.device_begin(slot)

    def device_end(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.cache.device_end(slot)

    def return_idle_piece(self) -> int | None:
        """Gives up a piece none of whose slots is in use; its cached blocks are forgotten."""
        for piece, ids in self._pieces.items():
            if self.cache.shrink(ids):
                del self._pieces[piece]
                self._retired.append(ids)
                return piece
        return None

    def _grow_for(self, count: int) -> None:
        """Memory that nobody uses comes before blocks that somebody may want again."""
        while self.slots.count(SlotState.FREE) < count and self._pool.has_free_piece():
            self._grow()

    def _grow(self) -> bool:
        piece = self._pool.take_piece(self)
        if piece is None:
            return False
        ids = self._retired.pop() if self._retired else self._new_ids()
        base = self._pool.piece_address(piece)
        offsets = np.arange(self.slots_per_piece, dtype=np.uint64) * np.uint64(self.slot_bytes)
        self._addresses[ids.start : ids.stop] = base + offsets
        self._pieces[piece] = ids
        self.slots.grow(ids)
        return True

    def _new_ids(self) -> range:
        first = len(self._addresses)
        self._addresses = np.concatenate([self._addresses, np.zeros(self.slots_per_piece, dtype=np.uint64)])
        return range(first, first + self.slots_per_piece)


class BufferPool:
    """Hands pieces of the arena to size classes; takes idle ones back when another class needs them."""

    def __init__(self, arena: Memory, *, piece_bytes: int) -> None:
        self._arena = arena
        self.piece_bytes = piece_bytes
        self.size_bytes = arena.size_bytes
        self.page_kind = arena.page_kind
        self.pieces_total = arena.size_bytes // piece_bytes
        self._holders = itertools.count(1)
        self._free_pieces = list(range(self.pieces_total - 1, -1, -1))
        self._classes: dict[int, SizeClass] = {}

    def size_class(self, layout: Layout) -> SizeClass:
        """The class of a layout's records. Raises `TooBig` when a piece can't hold one."""
        slot_bytes = layout.record_bytes
        known = self._classes.get(slot_bytes)
        if known is not None:
            return known
        if slot_bytes > self.piece_bytes:
            raise TooBig(
                f"a record of this layout has {slot_bytes} bytes, pool.piece_bytes is {self.piece_bytes}",
                slot_bytes=slot_bytes,
                piece_bytes=self.piece_bytes,
            )
        made = self._classes[slot_bytes] = SizeClass(self, slot_bytes)
        return made

    def slots_max(self, layout: Layout) -> int:
        """Slots of this layout if the whole pool were theirs."""
        return self.pieces_total * (self.piece_bytes // layout.record_bytes)

    def take_piece(self, asking: SizeClass) -> int | None:
        """A free piece, or an idle one of another class; None when there is none."""
        if self._free_pieces:
            return self._free_pieces.pop()
        for other in self._classes.values():
            if other is not asking and (piece := other.return_idle_piece()) is not None:
                return piece
        return None

    def new_holder(self) -> int:
        """A number that nobody else holds slots under: the caches tell requests, leases and buffers apart by it alone."""
        return next(self._holders)

    def has_free_piece(self) -> bool:
        return bool(self._free_pieces)

    def piece_address(self, piece: int) -> np.uint64:
        return np.uint64(self._arena.address + piece * self.piece_bytes)

    def slot_counts(self) -> list[dict[str, Any]]:
        """State of each class's slots, as NodeStatus tells it."""
        found = []
        for slot_bytes, size_class in self._classes.items():
            counts = size_class.slots.counts()
            found.append({"layout": f"{slot_bytes} B", "slot_bytes": slot_bytes, **counts})
        return found

    def idle(self) -> bool:
        """No slot is filling, leased or quarantined."""
        return all(
            size_class.slots.counts()[state] == 0
            for size_class in self._classes.values()
            for state in ("filling", "leased", "quarantined")
        )
