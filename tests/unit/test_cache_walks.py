"""Block cache under random histories of requests, devices and purges: nothing leaks, nothing is told twice or not at all."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from kvmoverd.core.cache import BlockCache, Key
from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.slots import SlotPool, SlotState

NAMESPACES = (b"f" * 32, b"g" * 32)
PIECE = 4
PIECES = 4
Use = tuple[int, int]
"""Slot and generation."""


class Waiter:
    """What one request was promised: which indexes it has, and which it must still be told of."""

    def __init__(self, keys: list[Key], slots: tuple[int, ...]) -> None:
        self.keys = keys
        self.slots = slots
        self.has: set[int] = set()
        self.lost: set[int] = set()

    def owed(self) -> set[int]:
        return set(range(len(self.keys))) - self.has - self.lost


class Walk:
    """Plays requests and devices. `content` says what a device wrote into each use of a slot."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.slots = SlotPool()
        self.cache = BlockCache(self.slots)
        self.ids = count(1)
        self.waiters: dict[int, Waiter] = {}
        self.owners: dict[int, list[int]] = {}
        self.reading: dict[Use, Key] = {}
        self.sending: list[int] = []
        self.content: dict[Use, Key] = {}
        self.pieces: set[int] = set()

    def use(self, slot: int) -> Use:
        return slot, self.slots.generation(slot)

    def step(self) -> None:
        frequent = [self.want, self.drop, self.read_done, self.read_done, self.send, self.sent]
        self.random.choice(frequent * 4 + [self.private, self.publish, self.give_back, self.purge, self.resize])()

    def want(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = [(namespace, bytes([self.random.randrange(12)]) * 32) for _ in range(self.random.randint(0, 6))]
        waiter, before = next(self.ids), self.slots.counts()
        try:
            wanted = self.cache.want(keys, waiter)
        except PoolExhausted:
            assert self.slots.counts() == before
            return
        promised = self.waiters[waiter] = Waiter(keys, wanted.slots)
        promised.has.update(wanted.ready)
        for index in wanted.to_read:
            slot = wanted.slots[index]
            assert self.use(slot) not in self.reading, "a block is read twice at once"
            self.reading[self.use(slot)] = keys[index]
            self.slots.device_begin(slot)

    def read_done(self) -> None:
        if not self.reading:
            return
        use = self.random.choice(sorted(self.reading))
        key, ok = self.reading.pop(use), self.random.random() < 0.8
        if ok:
            self.content[use] = key
        self.cache.device_end(use[0])
        told = self.cache.read_done(*use, ok=ok)
        assert len({waiter for waiter, _ in told}) == len(told)
        for waiter, indexes in told:
            promised = self.waiters[waiter]
            assert set(indexes) <= promised.owed(), "told twice"
            (promised.has if ok else promised.lost).update(indexes)
        assert self.cache.read_done(*use, ok=ok) == []

    def drop(self) -> None:
        if self.waiters:
            waiter = self.random.choice(sorted(self.waiters))
            del self.waiters[waiter]
            self.drop_reads(self.cache.drop(waiter))

    def drop_reads(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.use(slot) in self.reading
            if self.random.random() < 0.5:
                del self.reading[self.use(slot)]
                self.cache.device_end(slot)
                self.cache.read_dropped(slot)

    def send(self) -> None:
        """A device reads a block that somebody holds; it may go on after everybody let go."""
        held = [promised.slots[index] for promised in self.waiters.values() for index in sorted(promised.has)]
        held += [slot for slots in self.owners.values() for slot in slots]
        if held:
            self.sending.append(self.random.choice(held))
            self.slots.device_begin(self.sending[-1])

    def sent(self) -> None:
        if self.sending:
            self.cache.device_end(self.sending.pop(self.random.randrange(len(self.sending))))

    def private(self) -> None:
        owner = next(self.ids)
        try:
            self.owners[owner] = self.cache.private(self.random.randint(0, 3), owner)
        except PoolExhausted:
            return
        assert not {self.use(slot) for slot in self.owners[owner]} & set(self.content)

    def publish(self) -> None:
        slots = [slot for slots in self.owners.values() for slot in slots if self.use(slot) not in self.content]
        if slots:
            slot, key = self.random.choice(slots), (NAMESPACES[0], bytes([self.random.randrange(12)]) * 32)
            self.content[self.use(slot)] = key
            self.cache.publish(slot, key)

    def give_back(self) -> None:
        if self.owners:
            owner = self.random.choice(sorted(self.owners))
            del self.owners[owner]
            assert self.cache.drop(owner) == []

    def purge(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        self.cache.forget_namespace(namespace)
        assert not any(self.cache.is_clean((namespace, bytes([name]) * 32)) for name in range(12))

    def resize(self) -> None:
        piece = self.random.randrange(PIECES)
        ids = range(piece * PIECE, (piece + 1) * PIECE)
        if piece not in self.pieces:
            self.slots.grow(ids)
            self.pieces.add(piece)
            return
        unused = {SlotState.FREE, SlotState.CLEAN}
        idle = all(self.slots.state(slot) in unused for slot in ids)
        assert self.cache.shrink(ids) == idle
        if idle:
            self.pieces.discard(piece)

    def check(self) -> None:
        counts = self.slots.counts()
        assert counts["total"] == len(self.pieces) * PIECE == sum(counts.values()) - counts["total"]
        assert counts["filling"] == len(self.reading), "each filling slot is being read"
        for promised in self.waiters.values():
            for index in promised.has:
                slot = promised.slots[index]
                assert self.slots.state(slot) is SlotState.LEASED
                assert self.content[self.use(slot)] == promised.keys[index], "a held block changed"
            assert {self.use(promised.slots[index]) for index in promised.owed()} <= set(self.reading)
        for owned in self.owners.values():
            assert all(self.slots.state(slot) is SlotState.LEASED for slot in owned)

    def end(self) -> None:
        """Everybody lets go and every device ends."""
        for waiter in list(self.waiters):
            del self.waiters[waiter]
            self.drop_reads(self.cache.drop(waiter))
        while self.owners:
            self.give_back()
        while self.sending:
            self.sent()
        while self.reading:
            self.read_done()


@pytest.mark.parametrize("seed", range(30))
def test_no_slot_is_lost_and_no_block_changes_while_it_is_held(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(600):
        walk.step()
        walk.check()
    walk.end()
    walk.check()
    counts = walk.slots.counts()
    assert counts["free"] + counts["clean"] == counts["total"]
    for namespace in NAMESPACES:
        walk.cache.forget_namespace(namespace)
    assert walk.slots.counts()["free"] == counts["total"]
