"""Slots: disjoint states that add up to the total, generations, and devices that have not let go."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.slots import SlotPool, SlotState

FREE, FILLING, CLEAN, LEASED, QUARANTINED = SlotState


def pool_of(slots: int) -> SlotPool:
    pool = SlotPool()
    pool.grow(range(slots))
    return pool


def test_new_slots_are_free_and_counted() -> None:
    assert pool_of(3).counts() == {"total": 3, "free": 3, "filling": 0, "clean": 0, "leased": 0, "quarantined": 0}


def test_slots_are_taken_all_or_none() -> None:
    pool = pool_of(3)
    pool.take(1, LEASED)
    with pytest.raises(PoolExhausted, match="asked for 3 slots, 2 can be had"):
        pool.take(3, FILLING)
    assert pool.counts()["free"] == 2
    assert len(set(pool.take(2, FILLING))) == 2
    assert pool.take(0, FILLING) == []


def test_a_slot_given_up_under_a_device_is_free_only_after_the_last_operation() -> None:
    pool = pool_of(1)
    [slot] = pool.take(1, LEASED)
    pool.device_begin(slot)
    pool.device_begin(slot)
    pool.free(slot)
    assert pool.state(slot) is QUARANTINED
    pool.device_end(slot)
    assert pool.state(slot) is QUARANTINED
    with pytest.raises(PoolExhausted):
        pool.take(1, LEASED)
    pool.device_end(slot)
    assert pool.state(slot) is FREE


def test_the_generation_names_one_use_of_a_slot() -> None:
    pool = pool_of(1)
    seen = set()
    for _ in range(3):
        [slot] = pool.take(1, LEASED)
        seen.add(pool.generation(slot))
        pool.device_begin(slot)
        pool.free(slot)
        assert pool.generation(slot) in seen, "a quarantined slot is still in its old use"
        pool.device_end(slot)
    assert len(seen) == 3


def test_a_slot_that_was_forgotten_comes_back_under_a_new_generation() -> None:
    pool = pool_of(2)
    for _ in range(4):
        pool.take(1, LEASED)
        pool.free(0)
        pool.take(1, LEASED)
        pool.free(1)
    before = max(pool.generation(0), pool.generation(1))
    pool.shrink([0, 1])
    assert pool.counts()["total"] == 0
    pool.grow([1])
    assert pool.generation(1) > before


def test_clean_slots_leave_in_the_order_of_their_last_use() -> None:
    pool = pool_of(3)
    for slot in pool.take(3, LEASED):
        pool.move(slot, CLEAN)
    pool.move(0, LEASED)
    pool.move(0, CLEAN)
    pool.move(1, CLEAN)
    order = []
    while (oldest := pool.oldest_clean()) is not None:
        order.append(oldest)
        pool.free(oldest)
    assert order == [2, 0, 1]


def test_nothing_is_the_oldest_where_nothing_is_clean() -> None:
    assert pool_of(2).oldest_clean() is None


def begin_on_clean(pool: SlotPool) -> None:
    pool.move(pool.take(1, LEASED)[0], CLEAN)
    pool.device_begin(0)


def clean_under_a_device(pool: SlotPool) -> None:
    pool.device_begin(pool.take(1, LEASED)[0])
    pool.move(0, CLEAN)


def free_twice(pool: SlotPool) -> None:
    pool.take(1, LEASED)
    pool.free(0)
    pool.free(0)


def move_a_quarantined_one(pool: SlotPool) -> None:
    pool.device_begin(pool.take(1, LEASED)[0])
    pool.free(0)
    pool.move(0, LEASED)


def shrink_a_held_one(pool: SlotPool) -> None:
    pool.take(1, FILLING)
    pool.shrink([0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (begin_on_clean, "slot 0 is clean"),
        (clean_under_a_device, "slot 0 can't be clean: devices run 1 operations on it"),
        (free_twice, "slot 0 is given up already"),
        (move_a_quarantined_one, "slot 0 can't go from quarantined to "),
        (shrink_a_held_one, "slot 0 is filling, not free"),
        (lambda pool: pool.grow([1]), "slot 1 is known already"),
        (lambda pool: pool.take(1, CLEAN), "slots are taken to be clean"),
        (lambda pool: pool.move(0, LEASED), "slot 0 can't go from free to leased"),
        (lambda pool: pool.device_begin(0), "slot 0 is free"),
        (lambda pool: pool.device_end(0), "no device touches slot 0"),
    ],
)
def test_a_broken_promise_of_the_caller_stops_it(wrong: Callable[[SlotPool], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        wrong(pool_of(2))


def test_a_lost_slot_is_found_by_the_sum_that_names_both_numbers() -> None:
    pool = pool_of(3)
    pool.total = 4
    with pytest.raises(AssertionError, match="add up to 3, there are 4 slots"):
        pool.counts()


class Walk:
    """Random legal steps, with the state of each slot kept once more in the plainest way."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool = SlotPool()
        self.states: dict[int, SlotState] = {}
        self.busy: dict[int, int] = {}

    def step(self) -> None:
        steps = [self.grow, self.shrink, self.take, self.take, self.move, self.free, self.begin, self.end, self.end]
        self.random.choice(steps)()

    def pick(self, *states: SlotState) -> int | None:
        found = [slot for slot, state in self.states.items() if state in states]
        return self.random.choice(found) if found else None

    def grow(self) -> None:
        slot = self.random.randrange(12)
        if slot not in self.states:
            self.pool.grow([slot])
            self.states[slot], self.busy[slot] = FREE, 0

    def shrink(self) -> None:
        slot = self.pick(FREE)
        if slot is not None and not self.random.randrange(4):
            self.pool.shrink([slot])
            del self.states[slot]

    def take(self) -> None:
        count, state = self.random.randint(0, 3), self.random.choice([FILLING, LEASED])
        free = [slot for slot, known in self.states.items() if known is FREE]
        if count > len(free):
            with pytest.raises(PoolExhausted):
                self.pool.take(count, state)
            return
        taken = self.pool.take(count, state)
        assert len(taken) == count
        assert set(taken) <= set(free)
        self.states.update(dict.fromkeys(taken, state))

    def move(self) -> None:
        slot = self.pick(FILLING, LEASED, CLEAN)
        if slot is not None:
            state = self.random.choice([LEASED] if self.busy[slot] else [LEASED, CLEAN])
            self.pool.move(slot, state)
            self.states[slot] = state

    def free(self) -> None:
        slot = self.pick(FILLING, LEASED, CLEAN)
        if slot is not None:
            self.pool.free(slot)
            self.states[slot] = QUARANTINED if self.busy[slot] else FREE

    def begin(self) -> None:
        slot = self.pick(FILLING, LEASED)
        if slot is not None:
            self.pool.device_begin(slot)
            self.busy[slot] += 1

    def end(self) -> None:
        touched = [slot for slot in self.states if self.busy[slot]]
        if not touched:
            return
        slot = self.random.choice(touched)
        generation = self.pool.generation(slot)
        self.pool.device_end(slot)
        self.busy[slot] -= 1
        if self.states[slot] is QUARANTINED and not self.busy[slot]:
            self.states[slot] = FREE
            assert self.pool.generation(slot) == generation + 1

    def check(self) -> None:
        counts = self.pool.counts()
        assert counts.pop("total") == sum(counts.values()) == len(self.states)
        for state in SlotState:
            assert counts[state.value] == list(self.states.values()).count(state)
        for slot, state in self.states.items():
            assert self.pool.state(slot) is state
            assert self.pool.inflight(slot) == self.busy[slot]


@pytest.mark.parametrize("seed", range(20))
def test_the_states_add_up_to_the_total_after_every_step(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(500):
        walk.step()
        walk.check()
