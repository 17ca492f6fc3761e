"""Block reader: keyed blocks into pool slots, one read in flight per block however many ask for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.index import PrefixIndex
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.desk import StorageDesk
from kvmoverd.node.pool import BufferPool, SizeClass
from kvmoverd.node.slices import Addresses
from kvmoverd.ports.observer import Observer
from kvmoverd.ports.storage import StorageDone

PROBE_S = 10.0

Outcomes = list[tuple[int, Reason]]


@dataclass(eq=False)
class BlockSet:
    """The blocks of one request that come from storage: their slots and what is known of each."""

    waiter: int
    size_class: SizeClass
    slots: list[int]
    outcomes: dict[int, Reason] = field(default_factory=dict)
    read_bytes: int = 0
    started_blocks: int = 0
    _listeners: list[Callable[[Outcomes], None]] = field(default_factory=list)

    def payloads(self) -> Addresses:
        """Payload address of each block; valid where the outcome is OK, until the set is released."""
        return self.size_class.addresses(self.slots) + np.uint64(HEADER_BYTES)

    def listen(self, on_blocks: Callable[[Outcomes], None]) -> None:
        """Tells what is known already, then the rest as it comes."""
        self._listeners.append(on_blocks)
        if self.outcomes:
            on_blocks(list(self.outcomes.items()))

    def learn(self, outcomes: Outcomes) -> None:
        self.outcomes.update(outcomes)
        for on_blocks in list(self._listeners):
            on_blocks(outcomes)

    def deafen(self) -> None:
        self._listeners.clear()


@dataclass(slots=True)
class _Reading:
    """One read in flight, shared by its waiters."""

    namespace: Namespace
    key: bytes
    size_class: SizeClass
    slot: int
    generation: int
    purges: int
    op_id: int = 0


class BlockReader:
    """Acquires and releases block sets; owns the single flight between the cache and the storage desk."""

    def __init__(self, pool: BufferPool, desk: StorageDesk, index: PrefixIndex, observer: Observer) -> None:
        self._pool = pool
        self._desk = desk
        self._index = index
        self._observer = observer
        self._readings: dict[tuple[int, int], _Reading] = {}
        self._sets: dict[int, BlockSet] = {}
        self._purges: Counter[bytes] = Counter()

    def acquire(self, namespace: Namespace, keys: Sequence[bytes], *, priority: int, due_ns: int) -> BlockSet:
        """Takes a slot for each key, all or nothing, and starts the reads that nobody has started.

        Raises `PoolExhausted`, `QueueFull`.
        """
        size_class = self._pool.size_class(namespace.layout)
        waiter = self._pool.new_holder()
        wanted = size_class.want([(namespace.fingerprint, key) for key in keys], waiter)
        blocks = BlockSet(waiter, size_class, list(wanted.slots))
        fresh = {blocks.slots[index] for index in wanted.to_read}
        if fresh and self._desk.reads_waiting() + len(fresh) > self._desk.queue_max:
            self._undo(blocks, fresh)
            raise QueueFull(
                f"{self._desk.reads_waiting()} block reads wait and {len(fresh)} more are wanted, at most "
                f"{self._desk.queue_max} may"
            )
        self._sets[waiter] = blocks
        for index in wanted.ready:
            blocks.outcomes[index] = Reason.OK
        for index in wanted.to_read:
            self._start(namespace, keys[index], blocks, blocks.slots[index], priority, due_ns)
        for slot in set(blocks.slots) - fresh:
            self._join(size_class, slot, priority, due_ns)
        self._desk.submit()
        return blocks

    def _undo(self, blocks: BlockSet, fresh: set[int]) -> None:
        """Gives back what `want` took; nothing was started in the fresh slots."""
        for slot in blocks.size_class.cache.drop(blocks.waiter):
            if slot in fresh:
                blocks.size_class.cache.read_dropped(slot)

    def _join(self, size_class: SizeClass, slot: int, priority: int, due_ns: int) -> None:
        """A read under way for others is as urgent as its most urgent waiter."""
        reading = self._readings.get((size_class.slot_bytes, slot))
        if reading is not None:
            self._desk.hasten(reading.op_id, priority=priority, due_ns=due_ns)

    def release(self, blocks: BlockSet) -> None:
        """Gives the references back; reads that only this set waited for are dropped if they have not begun."""
        blocks.deafen()
        self._sets.pop(blocks.waiter, None)
        self._drop_reads(blocks, blocks.size_class.cache.drop(blocks.waiter))

    def trim(self, blocks: BlockSet, kept_blocks: int) -> None:
        """Gives back all but the leading blocks, as `release` does; the set goes on with these."""
        kept = set(blocks.slots[:kept_blocks])
        self._drop_reads(blocks, blocks.size_class.cache.trim(blocks.waiter, kept))

    def _drop_reads(self, blocks: BlockSet, slots: Sequence[int]) -> None:
        for slot in slots:
            reading = self._readings[blocks.size_class.slot_bytes, slot]
            if self._desk.drop_read(reading.op_id):
                del self._readings[blocks.size_class.slot_bytes, slot]
                blocks.size_class.device_end([slot])
                blocks.size_class.cache.read_dropped(slot)

    def purges(self, namespace: Namespace) -> int:
        """How often the namespace was purged: what began before the last time must not be found."""
        return self._purges[namespace.fingerprint]

    def stored(self, namespace: Namespace, key: bytes, size_class: SizeClass, slot: int, purges: int) -> None:
        """A private slot's block is durable: it may stay as a clean block, and look-ups may find it.

        Not if the namespace was purged since the write was queued, when it had been purged `purges` times.
        """
        if purges != self.purges(namespace):
            return
        size_class.cache.publish(slot, (namespace.fingerprint, key))
        self._index.add(namespace.fingerprint, key)

    def lost(self, namespace: Namespace, key: bytes, completion: StorageDone) -> None:
        """A block could not be stored."""
        self._observer.block_failed(self._desk.storage.facts.root, key, completion.reason, completion.message)

    def known_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        return self._index.known_prefix(namespace.fingerprint, keys)

    def pooled_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading keys that are clean in the pool."""
        cache = self._pool.size_class(namespace.layout).cache
        fingerprint = namespace.fingerprint
        return next((n for n, key in enumerate(keys) if not cache.is_clean((fingerprint, key))), len(keys))

    async def probe(self, namespace: Namespace, keys: tuple[bytes, ...]) -> int:
        """Leading keys that the store has; what it finds is remembered. 0 when it does not answer in time. Raises `QueueFull`."""
        answer: asyncio.Future[StorageDone] = asyncio.get_running_loop().create_future()
        purges = self.purges(namespace)
        op_id = self._desk.probe(namespace, keys, lambda done: None if answer.done() else answer.set_result(done))
        self._desk.submit()
        try:
            done = await asyncio.wait_for(answer, PROBE_S)
        except TimeoutError:
            return 0
        finally:
            self._desk.drop_probe(op_id)
        for key in keys[: done.present] if purges == self.purges(namespace) else ():
            self._index.add(namespace.fingerprint, key)
        return done.present

    def forget_namespace(self, namespace: Namespace) -> None:
        """Purged: nothing of it may be found in RAM."""
        self._purges[namespace.fingerprint] += 1
        self._index.drop_namespace(namespace.fingerprint)
        self._pool.size_class(namespace.layout).cache.forget_namespace(namespace.fingerprint)

    def _start(self, namespace: Namespace, key: bytes, blocks: BlockSet, slot: int, priority: int, due_ns: int) -> None:
        size_class = blocks.size_class
        generation = size_class.slots.generation(slot)
        reading = _Reading(namespace, key, size_class, slot, generation, self.purges(namespace))
        self._readings[size_class.slot_bytes, slot] = reading
        size_class.device_begin([slot])
        blocks.started_blocks += 1
        address = int(size_class.addresses([slot])[0])
        reading.op_id = self._desk.read(
            namespace,
            key,
            address,
            priority=priority,
            due_ns=due_ns,
            done=lambda completion: self._on_read(reading, blocks, completion),
        )

    def _on_read(self, reading: _Reading, starter: BlockSet, completion: StorageDone) -> None:
        size_class, slot = reading.size_class, reading.slot
        del self._readings[size_class.slot_bytes, slot]
        starter.read_bytes += completion.moved_bytes
        size_class.device_end([slot])
        ok = completion.reason is Reason.OK
        if ok:
            self._observer.blocks_read(1, completion.moved_bytes)
            if reading.purges == self.purges(reading.namespace):
                self._index.add(reading.namespace.fingerprint, reading.key)
        else:
            self._index.remove(reading.namespace.fingerprint, reading.key)
            if completion.reason is not Reason.MISS:
                self._observer.block_failed(
                    self._desk.storage.facts.root, reading.key, completion.reason, completion.message
                )
        for waiter, indexes in size_class.cache.read_done(slot, reading.generation, ok=ok):
            blocks = self._sets.get(waiter)
            if blocks is not None:
                blocks.learn([(index, completion.reason) for index in indexes])
