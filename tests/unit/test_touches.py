"""Counts and pins of segments' records."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvmoverd.adapters.storage.segments import touches as module
from kvmoverd.adapters.storage.segments.touches import DECAY_NS, Touches

SECOND_NS = 10**9


class Clock:
    def __init__(self) -> None:
        self.ns = SECOND_NS

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def touches(clock: Clock) -> Touches:
    return Touches(now_ns=clock)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_what_was_touched_counts_and_nothing_else(touches: Touches) -> None:
    touches.touch(ids(3, 3, 700), ids(0, 5, 417))
    touches.touch(ids(3), ids(5))
    assert touches.heat(3, 8).tolist() == [1, 0, 0, 0, 0, 2, 0, 0]
    assert touches.heat(700, 418)[417] == 1 and touches.heat(700, 418).sum() == 1
    assert touches.heat(4, 3).tolist() == [0, 0, 0] and touches.heat(9_999, 2).tolist() == [0, 0]
    assert not touches.heat(9_999).size


def test_counts_saturate_and_are_halved_every_ten_minutes(touches: Touches, clock: Clock) -> None:
    for _ in range(300):
        touches.touch(ids(1, 2), ids(0, 0))
    touches.add(ids(2), ids(1), np.array([1_000]))
    assert touches.heat(1, 1).tolist() == [255] and touches.heat(2, 2).tolist() == [255, 255]
    touches.decay()
    assert touches.heat(1, 1).tolist() == [255], "nothing is due yet"
    clock.ns += DECAY_NS
    touches.decay()
    touches.decay()
    assert touches.heat(1, 1).tolist() == [127]
    clock.ns += 100 * DECAY_NS
    touches.decay()
    assert touches.heat(1, 1).tolist() == [0]


def test_a_segment_that_is_forgotten_leaves_nothing_to_the_next_in_its_place(touches: Touches) -> None:
    touches.touch(ids(1, 1), ids(3, 60))
    touches.pin(ids(1), ids(3), 10.0)
    touches.forget(1)
    touches.forget(77_777)
    assert not touches.heat(1).size and touches.pinned(1) == 0 and touches.used_ns(1) == 0
    touches.touch(ids(2), ids(1))
    assert touches.heat(2, 64).sum() == 1


def test_extents_grow_and_keep_what_they_counted(touches: Touches) -> None:
    chance = random.Random(5)
    expected: dict[tuple[int, int], int] = {}
    for _ in range(400):
        records = {(chance.randrange(40), int(chance.paretovariate(0.4)) % 5_000) for _ in range(20)}
        touches.touch(ids(*[pair[0] for pair in records]), ids(*[pair[1] for pair in records]))
        for pair in records:
            expected[pair] = min(255, expected.get(pair, 0) + 1)
    for segment in range(40):
        heat = touches.heat(segment, 5_000)
        assert {(segment, int(at)): int(heat[at]) for at in np.flatnonzero(heat)} == {
            pair: count for pair, count in expected.items() if pair[0] == segment
        }


def test_a_pin_holds_until_its_deadline_or_until_it_is_taken_back(touches: Touches, clock: Clock) -> None:
    touches.pin(ids(1, 1, 2), ids(0, 9, 4), 10.0)
    touches.pin(ids(1), ids(9), 30.0, by="other")
    assert touches.pinned(1) == 2 and touches.pinned(2) == 1 and touches.pinned(3) == 0
    touches.pin(ids(1), ids(9), 0)
    assert touches.pinned(1) == 2, "the other node's pin stands apart"
    clock.ns += 11 * SECOND_NS
    assert touches.pinned(1) == 1 and touches.pinned(2) == 0
    touches.unpin_all(by="other")
    assert touches.pinned(1) == 0


def test_a_pin_goes_along_with_a_record_and_those_of_others_stay(touches: Touches, clock: Clock) -> None:
    touches.pin(ids(1, 1), ids(3, 4), 10.0)
    own = touches.own_pins(1)
    assert own is not None and own.tolist() == [3, 4]
    touches.move_pin(1, 3, 7, 0)
    touches.move_pin(1, 9, 7, 1)
    own, moved = touches.own_pins(1), touches.own_pins(7)
    assert own is not None and own.tolist() == [4] and moved is not None and moved.tolist() == [0]
    touches.pin(ids(1), ids(9), 5.0, by="other")
    assert touches.own_pins(1) is None
    clock.ns += 6 * SECOND_NS
    assert touches.own_pins(1) is not None
    clock.ns += 5 * SECOND_NS
    assert touches.pinned(7) == 0, "as long as it was given"


def test_own_pins_are_told_with_the_seconds_that_are_left(touches: Touches, clock: Clock) -> None:
    touches.pin(ids(1, 2), ids(7, 8), 10.0)
    touches.pin(ids(3), ids(1), 99.0, by="other")
    clock.ns += SECOND_NS // 2
    told = touches.pins()
    assert (told.segment_ids.tolist(), told.record_indexes.tolist(), told.counts.tolist()) == ([1, 2], [7, 8], [10, 10])
    clock.ns += 20 * SECOND_NS
    assert len(touches.pins()) == 0


def test_fresh_touches_are_told_once_and_summed_up(touches: Touches) -> None:
    touches.touch(ids(2, 1), ids(4, 4))
    touches.touch(ids(2), ids(4))
    touches.add(ids(5), ids(5), np.array([3]))
    told = touches.take_fresh()
    assert (told.segment_ids.tolist(), told.record_indexes.tolist(), told.counts.tolist()) == ([1, 2], [4, 4], [1, 2])
    assert len(touches.take_fresh()) == 0


def test_touches_that_nobody_asks_for_stay_within_their_limit(
    touches: Touches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_MAX", 100)
    for _ in range(30):
        touches.touch(ids(*[1] * 10), ids(*range(10)))
    assert touches.take_fresh().record_indexes.tolist() == list(range(10)) and touches.fresh_dropped == 0
    for start in range(0, 300, 10):
        touches.touch(ids(*[1] * 10), ids(*range(start, start + 10)))
    assert len(touches.take_fresh()) <= 100 and touches.fresh_dropped > 0


def test_when_a_segment_was_last_used_is_known(touches: Touches, clock: Clock) -> None:
    touches.touch(ids(1, 2), ids(0, 0))
    clock.ns += 5
    touches.touch(ids(2), ids(1))
    assert (touches.used_ns(1), touches.used_ns(2), touches.used_ns(900)) == (SECOND_NS, SECOND_NS + 5, 0)


def test_a_parent_never_counts_less_than_its_descendants(touches: Touches, clock: Clock) -> None:
    chance = random.Random(11)
    chains = [[(chance.randrange(6), depth * 50 + branch) for depth in range(8)] for branch in range(10)]
    for chain in chains:
        chain[:4] = chains[0][:4]
    for step in range(2_000):
        chain = chance.choice(chains)[: chance.randrange(1, 9)]
        touches.touch(ids(*[block[0] for block in chain]), ids(*[block[1] for block in chain]))
        if step % 100 == 0:
            clock.ns += DECAY_NS // 3
            touches.decay()
    for chain in chains:
        counts = [int(touches.heat(segment, 500)[record]) for segment, record in chain]
        assert counts == sorted(counts, reverse=True)


def test_many_threads_touch_at_once_and_nothing_is_lost(touches: Touches) -> None:
    def run(segment: int) -> None:
        for record in range(200):
            touches.touch(ids(segment, 99), ids(record, segment))

    threads = [threading.Thread(target=run, args=(segment,)) for segment in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(touches.heat(segment, 200).tolist() == [1] * 200 for segment in range(4))
    assert touches.heat(99, 4).tolist() == [200] * 4
