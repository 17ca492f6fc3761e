"""Block reader: keyed blocks into pool slots, one read in flight per block however many ask for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.layout import LAYERS_MAX
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.rests import choose_rest
from kvmoverd.core.shares import Depth
from kvmoverd.core.slots import SlotState
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.block_reads import Batch, Reading
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.catalog import Catalog
from kvmoverd.node.desk import LOW_PRIORITY, Rank, StorageDesk
from kvmoverd.node.hand_out import HandOut
from kvmoverd.node.pool import BufferPool, SizeClass
from kvmoverd.ports.observer import Observer
from kvmoverd.ports.storage import StorageDone

RANGE_BYTES = 512 << 10
"""The shortest range of layers that is read by itself: below it a device spends more on the call than on the bytes."""

STARTS_MAX = 128
"""Reads that are started in one step of the loop: some 0.5 ms. The rest of a large request follows in the next steps."""


class BlockReader:
    """Acquires and releases block sets; owns the single flight between the cache and the storage desk."""

    def __init__(
        self, pool: BufferPool, desk: StorageDesk, observer: Observer, *, range_bytes: int = RANGE_BYTES
    ) -> None:
        self._range_bytes = range_bytes
        self._pool = pool
        self._desk = desk
        self.catalog = Catalog(desk)
        self._observer = observer
        self._readings: dict[tuple[int, int], Reading] = {}
        self._sets: dict[int, BlockSet] = {}
        self._sets_reading = 0
        self._unstarted = 0
        self._unstarted_bytes = 0
        self._read_blocks = self._read_bytes = 0
        self._hurried: dict[tuple[int, int], Rank] = {}
        """Unstarted reads that others wait for too, and how urgently."""
        self._news: dict[int, BlockSet] = {}
        desk.on_pumped = self._tell_news

    @property
    def range_bytes(self) -> int:
        """The shortest range of layers that is read by itself."""
        return self._range_bytes

    def acquire(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        priority: int,
        due_ns: int,
        by_ranges: bool = False,
        hints: Mapping[bytes, Place] = MappingProxyType({}),
    ) -> BlockSet:
        """Takes a slot for each key, all or nothing, and starts the reads that nobody has started.

        `by_ranges`: the first layers are wanted early. Blocks are then read in ranges of layers, the first range of all
        blocks before the next; the more requests read at once, the longer the ranges. `hints`: where blocks lie, as far as
        somebody has heard. Raises `PoolExhausted`, `QueueFull`.
        """
        size_class = self._pool.size_class(namespace.layout)
        waiter = self._pool.new_holder()
        fingerprint = namespace.fingerprint
        wanted = size_class.want([(fingerprint, key) for key in keys], waiter)
        blocks = BlockSet(waiter, size_class, list(wanted.slots))
        self._check_queue(blocks, wanted.to_read)
        self._sets[waiter] = blocks
        if priority < LOW_PRIORITY:
            self.catalog.used(namespace, keys)
        blocks.outcomes = dict.fromkeys(wanted.ready, Reason.OK)
        rank = priority, due_ns
        if wanted.to_read:
            to_read = [(keys[index], blocks.slots[index]) for index in wanted.to_read]
            self._start(Batch(namespace, blocks, self.purges(namespace), by_ranges, rank, deque(), hints), to_read)
        if len(wanted.ready) + len(wanted.to_read) < len(keys):
            self._join(blocks, set(wanted.ready) | set(wanted.to_read), rank)
        return blocks

    def acquire_rest(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        first_layer: int,
        *,
        priority: int,
        due_ns: int,
        hints: Mapping[bytes, Place] = MappingProxyType({}),
    ) -> BlockSet:
        """As `acquire` by ranges, of layers from `first_layer` on alone, which is not 0; the slots are the set's own.

        Nobody else finds or joins them, and they never become clean. The set's progress counts layers before `first_layer` as
        there; OK: those from there on are there, checked.
        """
        assert 0 < first_layer < namespace.layout.layer_count, f"a rest from layer {first_layer} on"
        size_class = self._pool.size_class(namespace.layout)
        waiter = self._pool.new_holder()
        slots = size_class.private(len(keys), waiter, SlotState.FILLING)
        blocks = BlockSet(waiter, size_class, slots, may_give=False)
        self._check_queue(blocks, range(len(keys)))
        self._sets[waiter] = blocks
        batch = Batch(
            namespace, blocks, self.purges(namespace), True, (priority, due_ns), deque(), hints, rest_from=first_layer
        )
        if keys:
            self._start(batch, list(zip(keys, slots, strict=True)))
        return blocks

    def give_rest(self, blocks: BlockSet, kept_blocks: int) -> tuple[int, int]:
        """(kept, first_layer): layers from `first_layer` on of the set's blocks from `kept` on are not read here any more.

        None of them is in a device. Of those that no device has yet these are as many bytes as there are in the blocks from
        `kept_blocks` on, in one rectangle; (all blocks, 0): none. A set gives once. A block that others wait for, too, keeps all.
        The given blocks' layers before `first_layer` still come; their slots stay the set's, and nobody else's.
        """
        count = len(blocks.slots)
        last = self._readings.get((blocks.size_class.slot_bytes, blocks.slots[-1])) if count else None
        if last is None or not blocks.may_give:
            return count, 0
        layout = last.batch.namespace.layout
        kept, first_layer = choose_rest(partial(self._begun_layers, blocks), count, kept_blocks, layout)
        if first_layer:
            blocks.may_give = False
            for slot in blocks.slots[kept:]:
                self._end_at(self._readings[blocks.size_class.slot_bytes, slot], first_layer)
        return kept, first_layer

    def _begun_layers(self, blocks: BlockSet, index: int) -> int:
        """Layers of a block that are there or in a device; `LAYERS_MAX` where the set alone can't say what is read of it."""
        slot = blocks.slots[index]
        reading = self._readings.get((blocks.size_class.slot_bytes, slot))
        if reading is None or not blocks.size_class.cache.is_filled_for(blocks.waiter, slot):
            return LAYERS_MAX
        return reading.layers if self._desk.waits(reading.op_id) else reading.stop_layer or LAYERS_MAX

    def _end_at(self, reading: Reading, end_layer: int) -> None:
        """No more of the block than layers [0, end_layer), which are begun at least."""
        reading.batch.starter.size_class.cache.withdraw(reading.slot)
        if reading.layers == end_layer and self._desk.drop_read(reading.op_id):
            self._given(reading)
        else:
            reading.end_at(end_layer)
            self._desk.end_at(reading.op_id, end_layer)

    def _given(self, reading: Reading) -> None:
        """All that was not given away is there: the read is over, and has no outcome."""
        self._over(reading)
        reading.batch.starter.size_class.cache.read_done(reading.slot, reading.generation, ok=True)

    def _check_queue(self, blocks: BlockSet, to_read: Sequence[int]) -> None:
        """Raises `QueueFull`; what was taken is given back then."""
        waiting = self._desk.reads_waiting() + self._unstarted
        if not to_read or waiting + len(to_read) <= self._desk.queue_max:
            return
        self._undo(blocks, {blocks.slots[index] for index in to_read})
        raise QueueFull(
            f"{waiting} block reads wait and {len(to_read)} more are wanted, at most {self._desk.queue_max} may"
        )

    def _undo(self, blocks: BlockSet, fresh: set[int]) -> None:
        """Gives back what `want` took; nothing was started in the fresh slots."""
        for slot in blocks.size_class.cache.drop(blocks.waiter):
            if slot in fresh:
                blocks.size_class.cache.read_dropped(slot)

    def _join(self, blocks: BlockSet, others: Container[int], rank: Rank) -> None:
        """Reads under way for others: they are as urgent as their most urgent waiter, and may have come some way."""
        size_class = blocks.size_class
        for index, slot in enumerate(blocks.slots):
            place = size_class.slot_bytes, slot
            if index in others:
                continue
            reading = self._readings.get(place)
            if reading is None:
                self._hurried[place] = min(rank, self._hurried.get(place, rank))
                continue
            if reading.layers:
                blocks.progress[index] = reading.layers
            if rank < reading.rank:
                reading.rank = rank
                self._desk.hasten(reading.op_id, rank)

    def release(self, blocks: BlockSet) -> None:
        """Gives the references back; reads that only this set waited for are dropped if they have not begun."""
        blocks.deafen()
        self._sets.pop(blocks.waiter, None)
        self._drop_reads(blocks, blocks.size_class.cache.drop(blocks.waiter))

    def trim(self, blocks: BlockSet, kept_blocks: int) -> None:
        """Gives back all but the leading blocks, as `release` does; the set goes on with these."""
        blocks.keep(kept_blocks)
        kept = set(blocks.slots)
        self._drop_reads(blocks, blocks.size_class.cache.trim(blocks.waiter, kept))

    def begun(self, blocks: BlockSet) -> int:
        """Leading blocks of the set that are there or lost, or that the storage reads, be it for somebody else.

        Reads of the others can be taken back. Never shrinks; each block is looked at once.
        """
        count = blocks.begun_blocks
        while count < len(blocks.slots) and self._is_begun(blocks, count):
            count += 1
        blocks.begun_blocks = count
        return count

    def _is_begun(self, blocks: BlockSet, index: int) -> bool:
        if index in blocks.outcomes or index in blocks.progress:
            return True
        reading = self._readings.get((blocks.size_class.slot_bytes, blocks.slots[index]))
        return reading is not None and (reading.layers > 0 or not self._desk.waits(reading.op_id))

    def _drop_reads(self, blocks: BlockSet, slots: Sequence[int]) -> None:
        for slot in slots:
            place = blocks.size_class.slot_bytes, slot
            reading = self._readings.get(place)
            if reading is None:
                self._hurried.pop(place, None)
                blocks.size_class.cache.read_dropped(slot)
            elif self._desk.drop_read(reading.op_id):
                self._over(reading)
                blocks.size_class.cache.read_dropped(slot)

    def depth(self) -> Depth:
        """The storage's, with the reads that no device knows of yet."""
        desk = self._desk.depth()
        return replace(desk, queue_bytes=desk.queue_bytes + self._unstarted_bytes)

    def purges(self, namespace: Namespace) -> int:
        """How often the namespace was purged: what began before the last time must not be found."""
        return self.catalog.purges(namespace)

    def stored(self, namespace: Namespace, key: bytes, size_class: SizeClass, slot: int, purges: int) -> None:
        """A private slot's block is durable: it may stay as a clean block, and look-ups may find it.

        Not if the namespace was purged since the write was queued, when it had been purged `purges` times.
        """
        if purges == self.purges(namespace):
            size_class.cache.publish(slot, (namespace.fingerprint, key))
            self.catalog.found(namespace, (key,), purges)

    def pooled_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading keys that are clean in the pool."""
        cache = self._pool.size_class(namespace.layout).cache
        fingerprint = namespace.fingerprint
        return next((n for n, key in enumerate(keys) if not cache.is_clean((fingerprint, key))), len(keys))

    def pooled(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Shape (keys,): which of them are clean in the pool."""
        is_clean, fingerprint = self._pool.size_class(namespace.layout).cache.is_clean, namespace.fingerprint
        return np.fromiter((is_clean((fingerprint, key)) for key in keys), dtype=np.bool_, count=len(keys))

    def forget_namespace(self, namespace: Namespace) -> None:
        """Purged: nothing of it may be found in RAM."""
        self.catalog.forget(namespace)
        self._pool.size_class(namespace.layout).cache.forget_namespace(namespace.fingerprint)

    def _start(self, batch: Batch, to_read: Sequence[tuple[bytes, int]]) -> None:
        """Starts the reads of these keys into these slots."""
        size_class = batch.starter.size_class
        keys, slots = zip(*to_read, strict=True)
        addresses = size_class.addresses(slots).tolist()
        batch.unstarted.extend(zip(keys, slots, map(size_class.slots.generation, slots), addresses, strict=True))
        batch.starter.reading_blocks = len(slots)
        self._sets_reading += 1
        self._unstarted += len(slots)
        self._unstarted_bytes += len(slots) * batch.block_bytes
        self._start_some(batch)

    def _start_some(self, batch: Batch) -> None:
        """Starts a bounded number of reads; those of slots that were given up meanwhile are not begun."""
        size_class, unstarted = batch.starter.size_class, batch.unstarted
        for _ in range(min(STARTS_MAX, len(unstarted))):
            key, slot, generation, address = unstarted.popleft()
            self._unstarted -= 1
            self._unstarted_bytes -= batch.block_bytes
            if not size_class.slots.is_filling(slot, generation):
                self._one_less(batch.starter)
                continue
            place = size_class.slot_bytes, slot
            rank = min(batch.rank, self._hurried.pop(place, batch.rank))
            reading = self._readings[place] = Reading(batch, key, slot, generation, address, rank, batch.hints.get(key))
            size_class.slots.device_begin(slot)
            self._read_next(reading)
        self._desk.submit()
        if unstarted:
            asyncio.get_running_loop().call_soon(self._start_some, batch)

    def _read_next(self, reading: Reading) -> None:
        """Queues the next range: as long as all before it together, or longer while others read too."""
        batch = reading.batch
        reading.next_range(self._range_bytes, (self._sets_reading + 1) // 2)
        reading.op_id = self._desk.read(
            batch.namespace,
            reading.key,
            reading.address,
            layers=(reading.layers, reading.stop_layer),
            rank=reading.rank,
            done=partial(self._on_read, reading),
            place=reading.place,
            rest_from=batch.rest_from,
            end_layer=reading.end_layer,
        )

    def _on_read(self, reading: Reading, completion: StorageDone) -> None:
        """A range of layers came, or did not. Waiters are told at once; a slot that a device still has comes home with it."""
        if reading.is_late:
            reading.batch.starter.size_class.cache.device_end(reading.slot)
            return
        starter, stop_layer = reading.batch.starter, reading.stop_layer
        starter.read_bytes += completion.moved_bytes
        if completion.reason is not Reason.OK or not stop_layer:
            self._ended(reading, completion)
            return
        cache = starter.size_class.cache
        self._read_bytes += completion.moved_bytes
        reading.layers, reading.place = stop_layer, completion.place
        waiters = cache.waiters(reading.slot, reading.generation)
        if not waiters:
            self._desk.leave_out(reading.bytes_behind())
            self._over(reading)
            cache.read_dropped(reading.slot)
            return
        for waiter, indexes in waiters if stop_layer != reading.batch.rest_from else ():
            if blocks := self._sets.get(waiter):
                blocks.went_on(indexes, stop_layer)
                self._news[waiter] = blocks
        if stop_layer == reading.end_layer:
            self._given(reading)
        else:
            self._read_next(reading)

    def _ended(self, reading: Reading, completion: StorageDone) -> None:
        reading.is_late = not completion.quiet
        self._over(reading)
        batch, reason = reading.batch, completion.reason
        if reason is Reason.OK:
            self._read_blocks += 1
            self._read_bytes += completion.moved_bytes
            self.catalog.was_read(batch.namespace, reading.key, batch.purges)
        else:
            self.catalog.lost(batch.namespace, reading.key)
            if reason is not Reason.MISS:
                self._observer.block_failed(self._desk.storage.facts.root, reading.key, reason, completion.message)
        cache = batch.starter.size_class.cache
        for waiter, indexes in cache.read_done(reading.slot, reading.generation, ok=reason is Reason.OK):
            if blocks := self._sets.get(waiter):
                blocks.ended(indexes, reason)
                self._news[waiter] = blocks

    def _over(self, reading: Reading) -> None:
        """The read has ended, and no device touches the slot for it any more, unless it is late."""
        starter = reading.batch.starter
        del self._readings[starter.size_class.slot_bytes, reading.slot]
        if not reading.is_late:
            starter.size_class.slots.device_end(reading.slot)
        self._one_less(starter)

    def _one_less(self, starter: BlockSet) -> None:
        starter.reading_blocks -= 1
        if not starter.reading_blocks:
            self._sets_reading -= 1

    def _tell_news(self) -> None:
        """What the last completions brought, once per request: one that is told may release or acquire others."""
        self._remember_found()
        news, self._news = self._news, {}
        handed = HandOut()
        for blocks in news.values():
            handed.out(BlockSet.tell, blocks)
        handed.check()

    def _remember_found(self) -> None:
        """Books of what was read, once for many blocks."""
        if self._read_bytes:
            self._observer.blocks_read(self._read_blocks, self._read_bytes)
            self._read_blocks = self._read_bytes = 0
        self.catalog.remember()
