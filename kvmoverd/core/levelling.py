"""Readers that end together: how much each of several nodes reads of one request, in units of a size. Pure.

A node with `queue` bytes ahead that reads at `rate` has read its part of `size` bytes after (queue + size) / rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmoverd.core.shares import Depth

RATE_ASSUMED_BYTES_PER_S = 4 << 30
"""Of storage NICs of which nobody has seen any at work: it only decides from which size on a first request is split."""
TIE_OF_FLOOR = 0.1
"""Sides whose ends lie closer than that much of the floor end together: rates are never known so well."""
_NUMBER_MAX = float(1 << 62)


class Lane(NamedTuple):
    """A reader in numbers: bytes ahead and bytes per second, both bounded, the rate never 0."""

    queue: float
    rate: float

    def ends_s(self, size: float) -> float:
        return (self.queue + size) / self.rate


class Cast(NamedTuple):
    """Who reads how many units, by place; `ends_s`: when the last of them has."""

    counts: dict[int, int]
    ends_s: float


class Casting:
    """Chooses how many units each of `lanes` reads, with as few readers as the floor allows: of `sides` the one that ends first,
    the lesser place on ties; the other one, and then `helpers` one by one, where each lets the last end more than `floor_s`
    sooner. Both are places in `lanes`, ascending; helpers read alone only where there are no sides."""

    def __init__(
        self, lanes: Sequence[Lane], sides: Sequence[int], helpers: Sequence[int], unit_bytes: int, floor_s: float
    ) -> None:
        self._lanes = lanes
        self._sides = sides
        self._helpers = helpers
        self._unit_bytes = bounded(unit_bytes)
        self._floor_s = floor_s

    def cast(self, units: int) -> Cast:
        """For so many of them."""
        if not units:
            return Cast({}, 0.0)
        sides = self._sides
        if len(sides) == 2:
            one, other = self._lanes[sides[0]], self._lanes[sides[1]]
            *counts, ends_s = split_in_two(one, other, units, self._unit_bytes, self._floor_s)
            best = Cast({place: count for place, count in zip(sides, counts, strict=True) if count}, ends_s)
        else:
            best = self._single(units)
        rest = [place for place in self._helpers if place not in best.counts]
        while rest:
            promising = self._most_promising(rest, best)
            rest.remove(promising)
            more = self._with(promising, best, units)
            if more is best:
                break
            best = more
        return best

    def _single(self, units: int) -> Cast:
        """The only side, or the helper that has read all first; of those that tie with it the least place."""
        size = units * self._unit_bytes
        places = self._sides or self._helpers
        ends_s = [self._lanes[place].ends_s(size) for place in places]
        first_s = min(ends_s)
        tie = ends_s[0] - first_s <= self._floor_s * TIE_OF_FLOOR
        return Cast({places[0] if tie else places[ends_s.index(first_s)]: units}, first_s)

    def _most_promising(self, helpers: Sequence[int], best: Cast) -> int:
        """The helper with which the level falls furthest: what it could have read until then, over all rates."""
        rate = sum(self._lanes[place].rate for place in best.counts)

        def falls_s(place: int) -> float:
            lane = self._lanes[place]
            return (lane.rate * best.ends_s - lane.queue) / (rate + lane.rate)

        return max(helpers, key=falls_s)

    def _with(self, reader: int, best: Cast, units: int) -> Cast:
        """One reader more, if that gains more than the floor; else what was."""
        if reader in best.counts:
            return best
        chosen = sorted([*best.counts, reader])
        lanes = [self._lanes[place] for place in chosen]
        counts = whole(level(lanes, units * self._unit_bytes), units)
        ends_s = max(lane.ends_s(count * self._unit_bytes) for lane, count in zip(lanes, counts, strict=True) if count)
        if best.ends_s - ends_s <= self._floor_s:
            return best
        return Cast({place: count for place, count in zip(chosen, counts, strict=True) if count}, ends_s)


def bounded(number: int) -> float:
    """Products of three of these stay far from what a float can hold."""
    return float(min(max(number, 0), _NUMBER_MAX))


def lanes_of(depths: Sequence[Depth]) -> list[Lane]:
    """A rate that is not known is the fastest known one: who has not read yet had nothing to do."""
    fastest = max(depth.rate_bytes_per_s for depth in depths)
    assumed = fastest if fastest > 0 else RATE_ASSUMED_BYTES_PER_S
    rates = [depth.rate_bytes_per_s if depth.rate_bytes_per_s > 0 else assumed for depth in depths]
    return [Lane(bounded(depth.queue_bytes), bounded(rate)) for depth, rate in zip(depths, rates, strict=True)]


def share_of_first(first: Lane, second: Lane, size: float) -> float:
    """The fraction x of `size` bytes with which both end together, within [0, 1]: (q1 + x K) / r1 = (q2 + (1 - x) K) / r2.

    With no bytes it is 1 where the first ends sooner, else 0.
    """
    if size <= 0:
        return float(first.ends_s(0) < second.ends_s(0))
    gap = first.rate * second.queue - second.rate * first.queue
    return min(1.0, max(0.0, (gap + first.rate * size) / ((first.rate + second.rate) * size)))


def ends_of_two(first: Lane, second: Lane, size: float, floor_s: float) -> float:
    """When `size` bytes are read: by the one that ends first, or by both where that gains more than the floor.

    >>> ends_of_two(Lane(0, 10), Lane(100, 10), 300, 0.0), ends_of_two(Lane(0, 10), Lane(400, 10), 300, 0.0)
    (20.0, 30.0)
    """
    (queue_1, rate_1), (queue_2, rate_2) = first, second
    alone_s = min((queue_1 + size) / rate_1, (queue_2 + size) / rate_2)
    level_s = (queue_1 + queue_2 + size) / (rate_1 + rate_2)
    if alone_s - level_s <= floor_s or level_s <= queue_1 / rate_1 or level_s <= queue_2 / rate_2:
        return alone_s
    return level_s


def split_in_two(first: Lane, second: Lane, units: int, unit_bytes: float, floor_s: float) -> tuple[int, int, float]:
    """How many units each reads, and when both have. The one that ends first reads all, the first one on ties, unless both
    together gain more than the floor; then it is said to end when the sooner one would have.

    >>> split_in_two(Lane(0, 10), Lane(100, 10), 30, 10, 0.0), split_in_two(Lane(0, 10), Lane(100, 10), 30, 10, 10.0)
    ((20, 10, 20.0), (30, 0, 30.0))
    """
    size = units * unit_bytes
    (queue_1, rate_1), (queue_2, rate_2) = first, second
    end_1_s, end_2_s = (queue_1 + size) / rate_1, (queue_2 + size) / rate_2
    alone_s = end_1_s if end_1_s < end_2_s else end_2_s
    count_1, count_2 = whole_of_two(share_of_first(second, first, size), units)
    if count_1 and count_2:
        both_1_s, both_2_s = (queue_1 + count_1 * unit_bytes) / rate_1, (queue_2 + count_2 * unit_bytes) / rate_2
        both_s = both_1_s if both_1_s > both_2_s else both_2_s
        if alone_s - both_s > floor_s:
            return count_1, count_2, both_s
    if end_1_s - alone_s <= floor_s * TIE_OF_FLOOR:
        return units, 0, alone_s
    return 0, units, alone_s


def level(lanes: Sequence[Lane], size: float) -> list[float]:
    """Fractions of `size` with which all who read end at one time; who is busy for longer than that reads nothing."""
    if len(lanes) == 2:
        share = share_of_first(lanes[1], lanes[0], size)
        return [1.0 - share, share]
    order = sorted(range(len(lanes)), key=lambda place: lanes[place].ends_s(0))
    rates = queues = ends_s = 0.0
    for rank, place in enumerate(order):
        rates, queues = rates + lanes[place].rate, queues + lanes[place].queue
        ends_s = (size + queues) / rates
        if rank + 1 == len(order) or ends_s <= lanes[order[rank + 1]].ends_s(0):
            break
    parts = [max(0.0, lane.rate * ends_s - lane.queue) for lane in lanes]
    total = sum(parts)
    return [part / total for part in parts] if total > 0 else [float(place == order[0]) for place in range(len(lanes))]


def whole_of_two(second: float, units: int) -> tuple[int, int]:
    """`whole` of 1 - `second` and `second`.

    >>> whole_of_two(0.25, 10), whole_of_two(0.0, 3), whole_of_two(1.0, 3)
    ((8, 2), (3, 0), (0, 3))
    """
    exact_1, exact_2 = (1.0 - second) * units, second * units
    count_1, count_2 = min(units, int(exact_1)), min(units, int(exact_2))
    left = units - count_1 - count_2
    if left == 1:
        if exact_1 - count_1 >= exact_2 - count_2:
            return count_1 + 1, count_2
        return count_1, count_2 + 1
    return (count_1 + 1, count_2 + 1) if left > 1 else (count_1, count_2)


def whole(fractions: Sequence[float], units: int) -> list[int]:
    """Whole units, `units` in all: rounded down, then the largest remainders up; the earlier of two equal ones first."""
    exact = [fraction * units for fraction in fractions]
    counts = [min(units, int(number)) for number in exact]
    left = units - sum(counts)
    if left > 0:
        by_remainder = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
        for place in by_remainder[:left]:
            counts[place] += 1
    return counts
