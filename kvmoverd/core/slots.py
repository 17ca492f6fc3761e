"""Slots of one size class: disjoint states, generations, and what devices still touch."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

from kvmoverd.core.errors import PoolExhausted


class SlotState(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    CLEAN = "clean"
    LEASED = "leased"
    QUARANTINED = "quarantined"

    # A member is one object: hashing by identity is right, and many times faster than by name.
    __hash__ = object.__hash__


_HELD = frozenset({SlotState.FILLING, SlotState.LEASED, SlotState.CLEAN})
"""`take` and `free` alone lead from and to FREE; devices alone make and end QUARANTINED."""


class SlotPool:
    """Each slot is in exactly one state; the states' sizes add up to the total.

    FREE -> FILLING or LEASED by `take`; FILLING -> LEASED when filled; LEASED (held, or touched by a device) <-> CLEAN; any
    -> FREE by `free`, over QUARANTINED while a device still touches the slot. No device touches a free or clean slot. The
    generation grows each time a slot becomes free: (slot, generation) names one use of it, also when the slot was forgotten
    and came back.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sets: dict[SlotState, OrderedDict[int, None]] = {state: OrderedDict() for state in SlotState}
        self._state: dict[int, SlotState] = {}
        self._generation: dict[int, int] = {}
        self._inflight: dict[int, int] = {}
        self._first_generation = 0

    def grow(self, slots: Iterable[int]) -> None:
        """New slots, free."""
        for slot in slots:
            assert slot not in self._state, f"slot {slot} is known already"
            self._state[slot] = SlotState.FREE
            self._sets[SlotState.FREE][slot] = None
            self._generation[slot] = self._first_generation
            self._inflight[slot] = 0
            self.total += 1

    def shrink(self, slots: Iterable[int]) -> None:
        """Forgets slots; all must be free."""
        for slot in slots:
            assert self._state[slot] is SlotState.FREE, f"slot {slot} is {self._state[slot].value}, not free"
            self._first_generation = max(self._first_generation, self._generation[slot] + 1)
            del self._sets[SlotState.FREE][slot], self._state[slot], self._generation[slot], self._inflight[slot]
            self.total -= 1

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    def generation(self, slot: int) -> int:
        return self._generation[slot]

    def is_filling(self, slot: int, generation: int) -> bool:
        """Does the slot exist, in the use that has this generation, and is it FILLING?"""
        return self._generation.get(slot) == generation and self._state[slot] is SlotState.FILLING

    def count(self, state: SlotState) -> int:
        return len(self._sets[state])

    def counts(self) -> dict[str, int]:
        """Sizes by state, and the total. Asserts that they add up."""
        found = {state.value: len(slots) for state, slots in self._sets.items()}
        assert sum(found.values()) == self.total, (
            f"{found} add up to {sum(found.values())}, there are {self.total} slots"
        )
        return {"total": self.total, **found}

    def take(self, count: int, state: SlotState) -> list[int]:
        """Free slots, all or nothing, into FILLING or LEASED. Raises `PoolExhausted`."""
        assert state in (SlotState.FILLING, SlotState.LEASED), f"slots are taken to be {state.value}"
        free = self._sets[SlotState.FREE]
        if count > len(free):
            raise PoolExhausted(purpose="slots", asked=count, free=len(free))
        taken = [free.popitem(last=False)[0] for _ in range(count)]
        for slot in taken:
            self._state[slot] = state
            self._sets[state][slot] = None
        return taken

    def move(self, slot: int, state: SlotState) -> None:
        """FILLING, LEASED and CLEAN among each other; a slot that becomes CLEAN is the last to be evicted."""
        before = self._state[slot]
        assert state in _HELD and before in _HELD, f"slot {slot} can't go from {before.value} to {state.value}"
        assert state is not SlotState.CLEAN or not self._inflight[slot], (
            f"slot {slot} can't be clean: devices run {self._inflight[slot]} operations on it"
        )
        del self._sets[before][slot]
        self._state[slot] = state
        self._sets[state][slot] = None

    def free(self, slot: int) -> None:
        """Gives a slot up; it is quarantined while a device touches it."""
        assert self._state[slot] not in (SlotState.FREE, SlotState.QUARANTINED), f"slot {slot} is given up already"
        del self._sets[self._state[slot]][slot]
        if self._inflight[slot]:
            self._state[slot] = SlotState.QUARANTINED
            self._sets[SlotState.QUARANTINED][slot] = None
        else:
            self._set_free(slot)

    def oldest_clean(self) -> int | None:
        """The clean slot that was used longest ago."""
        return next(iter(self._sets[SlotState.CLEAN]), None)

    def device_begin(self, slot: int) -> None:
        """A device may read or write the slot from now on; somebody must hold it."""
        assert self._state[slot] in (SlotState.FILLING, SlotState.LEASED), f"slot {slot} is {self._state[slot].value}"
        self._inflight[slot] += 1

    def device_end(self, slot: int) -> None:
        """The device has let go."""
        assert self._inflight[slot] > 0, f"no device touches slot {slot}"
        self._inflight[slot] -= 1
        if self._state[slot] is SlotState.QUARANTINED and not self._inflight[slot]:
            del self._sets[SlotState.QUARANTINED][slot]
            self._set_free(slot)

    def inflight(self, slot: int) -> int:
        return self._inflight[slot]

    def _set_free(self, slot: int) -> None:
        self._state[slot] = SlotState.FREE
        self._sets[SlotState.FREE][slot] = None
        self._generation[slot] += 1
