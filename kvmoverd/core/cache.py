"""Block cache: keyed blocks in slots, references, single flight, and least-recently-used eviction of what nobody holds."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
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
    holders: dict[int, list[int]]


_MISSING = -1


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
        by_key, blocks = self._by_key, self._blocks
        slots = [by_key.get(key, _MISSING) for key in keys]
        fresh: dict[Key, int] = {}
        for index, slot in enumerate(slots):
            if slot == _MISSING:
                fresh.setdefault(keys[index], index)
        self._make_room(len(fresh), slots)
        held = self._held.setdefault(waiter, {})
        ready = self._hold(slots, waiter)
        for (key, index), slot in zip(fresh.items(), self.slots.take(len(fresh), SlotState.FILLING), strict=True):
            by_key[key] = slots[index] = slot
            blocks[slot] = _Block(key, {waiter: [index]})
            held[slot] = None
        for index, slot in enumerate(slots) if _MISSING in slots else ():
            if slot == _MISSING:
                slots[index] = by_key[keys[index]]
                blocks[slots[index]].holders[waiter].append(index)
        return Wanted(tuple(slots), tuple(ready), tuple(fresh.values()))

    def private(self, count: int, owner: int, state: SlotState = SlotState.LEASED) -> list[int]:
        """Slots without key, held by `owner`; FILLING, if a storage is to fill them. Raises `PoolExhausted`."""
        self._make_room(count, ())
        taken = self.slots.take(count, state)
        held = self._held.setdefault(owner, {})
        for index, slot in enumerate(taken):
            self._blocks[slot] = _Block(None, {owner: [index]})
            held[slot] = None
        return taken

    def publish(self, slot: int, key: Key) -> None:
        """A private slot's block is durable under `key`; a slot that has the key already keeps it."""
        block = self._blocks.get(slot)
        if block is not None and block.key is None and key not in self._by_key:
            block.key = key
            self._by_key[key] = slot

    def is_filled_for(self, waiter: int, slot: int) -> bool:
        """Whether a read of the slot is under way for this waiter and nobody else, and for one index of its request."""
        if self.slots.state(slot) is not SlotState.FILLING:
            return False
        holders = self._blocks[slot].holders
        return len(holders) == 1 and len(holders.get(waiter, ())) == 1

    def withdraw(self, slot: int) -> None:
        """Nobody finds the slot by its key any more: it will not have the whole block, and is given up after its holders."""
        block = self._blocks[slot]
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None

    def waiters(self, slot: int, generation: int) -> list[tuple[int, list[int]]]:
        """Who waits for a read under way, with the indexes in the waiter's request."""
        if not self.slots.is_filling(slot, generation):
            return []
        return list(self._blocks[slot].holders.items())

    def read_done(self, slot: int, generation: int, *, ok: bool) -> list[tuple[int, list[int]]]:
        """Ends a read: who waited, with the indexes. A failed block is forgotten and its slot given up.

        Nobody is told, and nothing changes, when (slot, generation) does not name a read under way.
        """
        if not self.slots.is_filling(slot, generation):
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

    def is_wanted(self, key: Key) -> bool:
        """Has the block a slot, whole or on its way?"""
        return key in self._by_key

    def set_aside(self, kept: Container[Key], steps_max: int) -> bool:
        """Whether one more slot can be had without a block of `kept`: it is free, or the oldest clean one is none of these.

        Kept blocks that are the oldest become the newest, `steps_max` of them at most.
        """
        if self.slots.count(SlotState.FREE):
            return True
        for _ in range(min(steps_max, self.slots.count(SlotState.CLEAN))):
            oldest = self.slots.oldest_clean()
            if oldest is None or self._blocks[oldest].key not in kept:
                return oldest is not None
            self.slots.move(oldest, SlotState.CLEAN)
        return False

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

    def _hold(self, slots: Sequence[int], waiter: int) -> list[int]:
        """References to the slots that are not `_MISSING`; the indexes of those that are whole."""
        blocks, state, held = self._blocks, self.slots.state, self._held[waiter]
        whole = []
        for index, slot in enumerate(slots):
            if slot == _MISSING:
                continue
            blocks[slot].holders.setdefault(waiter, []).append(index)
            held[slot] = None
            now = state(slot)
            if now is SlotState.CLEAN:
                self.slots.move(slot, SlotState.LEASED)
            if now is not SlotState.FILLING:
                whole.append(index)
        return whole

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

    def missing(self, keys: Iterable[Key]) -> int:
        """How many of these keys have no slot; equal ones count each."""
        by_key = self._by_key
        return sum([key not in by_key for key in keys])

    def _make_room(self, count: int, spared: Sequence[int]) -> None:
        """Evicts the oldest clean blocks until `count` slots are free. Raises `PoolExhausted` before evicting anything."""
        free = self.slots.count(SlotState.FREE)
        if count <= free:
            return
        state = self.slots.state
        kept = [slot for slot in dict.fromkeys(spared) if slot != _MISSING and state(slot) is SlotState.CLEAN]
        evictable = self.slots.count(SlotState.CLEAN) - len(kept)
        if count > free + evictable:
            raise PoolExhausted(purpose="slots", asked=count, free=free + evictable)
        for slot in kept:
            self.slots.move(slot, SlotState.CLEAN)  # behind all that will be evicted
        for _ in range(count - free):
            oldest = self.slots.oldest_clean()
            assert oldest is not None, f"{count} slots were promised, {free} are free and none is clean"
            self._forget(oldest)
