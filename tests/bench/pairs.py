"""The method: randomly ordered pairs, the median of their ratios, a bootstrap interval, and what that says of an aim.

Two sides are run back to back, so that what the machine does to one it does to the other; which comes first is chance. A
machine whose speed swings by 40 % in minutes can still tell 0.9 from 1.0 in this way.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

PAIRS_MIN = 15
"""Fewer give no verdict."""
RESAMPLES = 10_000
CONFIDENCE = 0.95


class Verdict(enum.Enum):
    MET = "met"
    NOT_RESOLVED = "not resolved"
    MISSED = "missed"
    TOO_FEW = "too few runs"
    NOT_RUN = "not run"
    NO_AIM = "no aim"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one side: how much of the row's unit (GB/s where it moves bytes), and user + sys per GB."""

    amount: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Pair:
    reference: Run
    ours: Run
    ours_first: bool

    @property
    def ratio(self) -> float:
        return self.ours.amount / self.reference.amount


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and where it lies with `CONFIDENCE`."""

    median: float
    low: float
    high: float


Side = Callable[[int], Awaitable[Run]]
"""Runs one side once, for the pair of this number."""


async def run_pairs(count: int, seed: int, reference: Side, ours: Side) -> list[Pair]:
    """`count` pairs, one after the other; whatever a side raises ends them all."""
    found = []
    for number, ours_first in enumerate(orders(count, seed)):
        if ours_first:
            mine = await ours(number)
            theirs = await reference(number)
        else:
            theirs = await reference(number)
            mine = await ours(number)
        found.append(Pair(theirs, mine, ours_first))
    return found


def orders(count: int, seed: int) -> list[bool]:
    """For each pair whether ours comes first: half of them, give or take one, in random order.

    >>> orders(4, seed=1) == orders(4, seed=1), sum(orders(6, seed=1))
    (True, 3)
    """
    halves = np.arange(count) % 2 == 0
    return [bool(first) for first in np.random.default_rng(seed).permutation(halves)]


def interval(values: Sequence[float], seed: int) -> Interval:
    """Median of the values, and the percentile bootstrap of it. Raises `ValueError` when there are none."""
    if not values:
        raise ValueError("0 values have no median")
    found = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    medians = np.median(found[rng.integers(0, len(found), (RESAMPLES, len(found)))], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(float(np.median(found)), float(low), float(high))


def verdict(
    found: Interval, aim: float | None, *, runs: int, lower_is_better: bool = False, runs_min: int = PAIRS_MIN
) -> Verdict:
    """Met only when the worse end of the interval reaches the aim. `runs_min`: fewer decide nothing."""
    if aim is None:
        return Verdict.NO_AIM
    if runs < runs_min:
        return Verdict.TOO_FEW
    worse, better = (-found.high, -found.low) if lower_is_better else (found.low, found.high)
    goal = -aim if lower_is_better else aim
    if worse >= goal:
        return Verdict.MET
    return Verdict.MISSED if better < goal else Verdict.NOT_RESOLVED
