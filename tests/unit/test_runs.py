"""Runs of blocks: held to masks, and to work that grows with the number of runs only."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvmoverd.core.runs import Runs

BLOCKS = 24
MANY = 32_768


def mask_of(runs: Runs, blocks: int = BLOCKS) -> np.ndarray:  # type: ignore[type-arg]
    mask = np.zeros(blocks, dtype=np.bool_)
    mask[runs.indexes()] = True
    return mask


def some(seed: int) -> Runs:
    chance = random.Random(seed)
    return Runs.of_mask(np.array([chance.random() < 0.5 for _ in range(BLOCKS)]))


@pytest.mark.parametrize("seed", range(200))
def test_what_is_taken_away_cut_and_shared_is_what_masks_say(seed: int) -> None:
    one, other = some(2 * seed), some(2 * seed + 1)
    assert (mask_of(one.minus(other)) == (mask_of(one) & ~mask_of(other))).all()
    assert (mask_of(one.both(other)) == (mask_of(one) & mask_of(other))).all()
    assert (mask_of(Runs.union((one, other))) == (mask_of(one) | mask_of(other))).all()
    for place in range(one.count + 1):
        head, tail = one.head(place), one.tail(place)
        assert (head.count, tail.count) == (place, one.count - place) and Runs.union((head, tail)) == one
        assert one.below(one.at(place)) == place
    for found in (one.minus(other), one.both(other), one.cut(3, 17)):
        assert found == Runs.of_mask(mask_of(found)), "ascending, none empty, no two touching"


def test_many_short_runs_cost_no_more_than_their_number() -> None:
    """As of a pool in which every second block is clean, or of a plan from another node: the loop waits for it."""
    even = Runs(tuple((2 * run, 2 * run + 1) for run in range(MANY)))
    odd = Runs(tuple((2 * run + 1, 2 * run + 2) for run in range(MANY)))
    began_s = time.perf_counter()
    assert (
        even.minus(odd) == even and even.both(odd) == Runs() and even.minus(even) == Runs() and even.both(even) == even
    )
    assert time.perf_counter() - began_s < 2.0
