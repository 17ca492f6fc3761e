"""Block cache: keyed blocks in slots, references, single flight, and least-recently-used eviction of what nobody holds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.slots import SlotPool, SlotState

Key: TypeAlias = tuple[bytes, bytes]
"""Fingerprint and block key."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Slot of each key asked for; indexes whose block is there; indexes whose read the caller must start, one per slot."""

    slots: tuple[int, ...]
    ready: tuple[int, ...]
    to_read: tuple[int, ...]


@dataclass(slots=True)
class _Block:
    """A slot in use: its key if it has one, and who holds it (waiter -> indexes in the waiter's request)."""

    key: Key | None
    holders: dict[int, list[int]] = field(default_factory=dict)


class BlockCache:
    """A waiter is a number that the caller gives once: a request, or the lease that it became."""

    def __init__(self, slots: SlotPool) -> None:
        self.slots = slots
        self._by_key: dict[Key, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._held: dict[int, dict[int, None]] = {}

    def is_clean(self, key: Key) -> bool:
        """Is the block whole in the pool, held or not?"""
        slot = self._by_key.get(key)
        return slot is not None and self.slots.state(slot) in (SlotState.CLEAN, SlotState.LEASED)

    def want(self, keys: Sequence[Key], waiter: int) -> Wanted:
        """References for all keys, or none: raises `PoolExhausted`. Equal keys share a slot, also with other waiters."""
        distinct = dict.fromkeys(keys)
        missing = [key for key in distinct if key not in self._by_key]
        spared = [self._by_key[key] for key in distinct if key in self._by_key]
        self._make_room(len(missing), spared)
        for key, slot in zip(missing, self.slots.take(len(missing), SlotState.FILLING), strict=True):
            self._by_key[key] = slot
            self._blocks[slot] = _Block(key)
        slots = tuple([self._by_key[key] for key in keys])
        self._hold(slots, waiter)
        ready, to_read, fresh = [], [], set(missing)
        for index, slot in enumerate(slots):
            if self.slots.state(slot) is not SlotState.FILLING:
                ready.append(index)
            elif keys[index] in fresh:
                fresh.remove(keys[index])
                to_read.append(index)
        return Wanted(slots, tuple(ready), tuple(to_read))

    def private(self, count: int, owner: int) -> list[int]:
        """Slots without key, held by `owner`. Raises `PoolExhausted`."""
        self._make_room(count, ())
        taken = self.slots.take(count, SlotState.LEASED)
        for slot in taken:
            self._blocks[slot] = _Block(None)
        self._hold(taken, owner)
        return taken

    def publish(self, slot: int, key: Key) -> None:
        """A private slot's block is durable under `key`; a slot that has the key already keeps it."""
        block = self._blocks.get(slot)
        if block is not None and block.key is None and key not in self._by_key:
            block.key = key
            self._by_key[key] = slot

    def waiters(self, slot: int, generation: int) -> list[tuple[int, list[int]]]:
        """Who waits for a read under way, with the indexes in the waiter's request."""
        if self.slots.generation(slot) != generation or self.slots.state(slot) is not SlotState.FILLING:
            return []
        return list(self._blocks[slot].holders.items())

    def read_done(self, slot: int, generation: int, *, ok: bool) -> list[tuple[int, list[int]]]:
        """Ends a read: who waited, with the indexes. A failed block is forgotten and its slot given up.

        Nobody is told, and nothing changes, when (slot, generation) does not name a read under way.
        """
        if self.slots.generation(slot) != generation or self.slots.state(slot) is not SlotState.FILLING:
            return []
        waiters = list(self._blocks[slot].holders.items())
        if ok:
            self.slots.move(slot, SlotState.LEASED)
            if not waiters:
                self._release_if_unheld(slot)
        else:
            for waiter, _ in waiters:
                del self._held[waiter][slot]
            self._forget(slot)
        return waiters

    def read_dropped(self, slot: int) -> None:
        """A read that had not begun was taken back; nobody waits for it."""
        assert not self._blocks[slot].holders, f"slot {slot} is waited for"
        self._forget(slot)

    def device_end(self, slot: int) -> None:
        """A device has let go of a slot; one that nobody holds becomes clean or free now."""
        self.slots.device_end(slot)
        if self.slots.state(slot) is SlotState.LEASED:
            self._release_if_unheld(slot)

    def drop(self, waiter: int) -> list[int]:
        """Ends all references of a waiter. Returns the filling slots that nobody waits for any more.

        The last block asked for is the first to be evicted: a chain is of use only from its root.
        """
        return self._let_go(waiter, reversed(self._held.pop(waiter, {})))

    def trim(self, waiter: int, kept: Container[int]) -> list[int]:
        """As `drop`, but the slots in `kept` stay held."""
        held = self._held.get(waiter, {})
        given_up = [slot for slot in reversed(held) if slot not in kept]
        for slot in given_up:
            del held[slot]
        return self._let_go(waiter, given_up)

    def _let_go(self, waiter: int, slots: Iterable[int]) -> list[int]:
        unwanted = []
        for slot in slots:
            holders = self._blocks[slot].holders
            del holders[waiter]
            if holders:
                continue
            if self.slots.state(slot) is SlotState.FILLING:
                unwanted.append(slot)
            else:
                self._release_if_unheld(slot)
        return unwanted

    def forget_namespace(self, fingerprint: bytes) -> None:
        """No block of it is found from now on; those in use live until they are given back."""
        for key in [key for key in self._by_key if key[0] == fingerprint]:
            slot = self._by_key.pop(key)
            self._blocks[slot].key = None
            if self.slots.state(slot) is SlotState.CLEAN:
                self._forget(slot)

    def shrink(self, slots: Iterable[int]) -> bool:
        """Gives slots up for good if nobody uses any of them, else says False; clean ones are forgotten."""
        ids = list(slots)
        if any(self.slots.state(slot) not in (SlotState.FREE, SlotState.CLEAN) for slot in ids):
            return False
        for slot in ids:
            if self.slots.state(slot) is SlotState.CLEAN:
                self._forget(slot)
        self.slots.shrink(ids)
        return True

    def _hold(self, slots: Sequence[int], waiter: int) -> None:
        held = self._held.setdefault(waiter, {})
        blocks, state = self._blocks, self.slots.state
        for index, slot in enumerate(slots):
            holders = blocks[slot].holders
            if waiter in holders:
                holders[waiter].append(index)
                continue
            holders[waiter] = [index]
            held[slot] = None
            if state(slot) is SlotState.CLEAN:
                self.slots.move(slot, SlotState.LEASED)

    def _release_if_unheld(self, slot: int) -> None:
        """Of a leased slot: clean when nobody holds it and no device touches it, given up at once when it has no key."""
        block = self._blocks[slot]
        if block.holders:
            return
        if block.key is None:
            self._forget(slot)
        elif not self.slots.inflight(slot):
            self.slots.move(slot, SlotState.CLEAN)

    def _forget(self, slot: int) -> None:
        block = self._blocks.pop(slot)
        if block.key is not None and self._by_key.get(block.key) == slot:
            del self._by_key[block.key]
        self.slots.free(slot)

    def _make_room(self, count: int, spared: Sequence[int]) -> None:
        """Evicts the oldest clean blocks until `count` slots are free. Raises `PoolExhausted` before evicting anything."""
        free = self.slots.count(SlotState.FREE)
        if count <= free:
            return
        kept = [slot for slot in spared if self.slots.state(slot) is SlotState.CLEAN]
        evictable = self.slots.count(SlotState.CLEAN) - len(kept)
        if count > free + evictable:
            raise PoolExhausted(purpose="slots", asked=count, free=free + evictable)
        for slot in kept:
            self.slots.move(slot, SlotState.CLEAN)  # behind all that will be evicted
        for _ in range(count - free):
            oldest = self.slots.oldest_clean()
            assert oldest is not None, f"{count} slots were promised, {free} are free and none is clean"
            self._forget(oldest)
