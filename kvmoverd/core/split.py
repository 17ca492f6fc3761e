"""Who reads what of one request: the prefill node, the decode node, both at once, or third nodes with them. Pure.

A node with `queue` bytes ahead that reads at `rate` has read its part of `size` bytes after (queue + size) / rate. The plan lets
all who read end together, with as few readers as the floor allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvmoverd.core.runs import NO_RUNS, Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share

RATE_ASSUMED_BYTES_PER_S = 4 << 30
"""Of storage NICs of which nobody has seen any at work: it only decides from which size on a first request is split."""
SPANS_MAX = 64
"""Of one part. Beyond it the shortest runs that lie in pools are taken for free blocks, so that the rest has few edges."""
TIE_OF_FLOOR = 0.1
"""Sides whose ends lie closer than that much of the floor end together: rates are never known so well."""
_NUMBER_MAX = float(1 << 62)
_FREE, _NOBODY = -1, -2


@dataclass(frozen=True, slots=True)
class Reader:
    """A node that may read. `pooled`: blocks that are clean in its pool. `starved`: its lane to the prefill node gets too
    little."""

    node: str
    depth: Depth
    pooled: Runs = NO_RUNS
    starved: bool = False


@dataclass(frozen=True, slots=True)
class _Lane:
    """A reader in numbers: bytes ahead and bytes per second, both bounded, the rate never 0."""

    queue: float
    rate: float

    def ends_s(self, size: float) -> float:
        return (self.queue + size) / self.rate


@dataclass(frozen=True, slots=True)
class _Cast:
    """Who reads how many free blocks; `ends_s`: when the last of them has."""

    counts: dict[int, int]
    ends_s: float


def share_of_prefill(*, queue_p: int, queue_d: int, rate_p: int, rate_d: int, size: int) -> float:
    """The fraction x of `size` bytes that the prefill node has to read so that both sides end together, within [0, 1].

    (q_P + x K) / R_P = (q_D + (1 - x) K) / R_D, so x = (R_P q_D - R_D q_P + R_P K) / ((R_P + R_D) K). With long queues the
    shorter one takes all, so that in the long run P prefill and D decode nodes read P / (P + D) on the prefill side. A rate of
    0 is not known: as the other's. With no bytes it is 1 for a shorter queue of the prefill node, else 0.

    >>> share_of_prefill(queue_p=0, queue_d=100, rate_p=1, rate_d=1, size=200)
    0.75
    """
    prefill, decode = _lanes([Depth(queue_p, rate_p), Depth(queue_d, rate_d)])
    return _share(prefill, decode, _bounded(size))


def decide(
    *,
    blocks: Runs,
    block_bytes: int,
    prefill: Reader,
    decode: Reader | None,
    helpers: Sequence[Reader] = (),
    floor_s: float,
    starved_to_decode: bool = False,
) -> ReadPlan:
    """Who reads which of `blocks`; each one is somebody's. Shares are ordered: the prefill node's, helpers', the decode node's.

    Blocks that lie clean in a pool are that node's, cost no queue, and are read by nobody. Of the others the side that ends
    first reads all, the decode node on ties: what it reads crosses PCIe 4 times, what the prefill node reads 6. The other side
    and then helpers, one by one, read with it where each lets the request end more than `floor_s` sooner. A node whose lane to
    the prefill node starves reads nothing, unless all starve; so does the prefill node with `starved_to_decode`, since what
    it reads goes on to the decode node. Without a decode node, or when both are one, there is one side. `why` is "pooled",
    "prefill", "decode", "split" or "helped".
    """
    sides = [prefill] if decode is None else [decode] if decode.node == prefill.node else [decode, prefill]
    named = {side.node for side in sides}
    readers = [*sides, *(helper for helper in helpers if helper.node not in named)]
    avoided = [reader.starved for reader in readers]
    if len(sides) == 2:
        avoided[1] |= starved_to_decode
    casting = _Casting(readers, len(sides), avoided, block_bytes, floor_s)
    order = [*range(1, len(readers)), 0] if decode is not None else list(range(len(readers)))
    owners = _pooled(blocks, readers, avoided)
    cast = casting.cast(int((owners == _FREE).sum()))
    spans = _dealt(owners, blocks.first, cast.counts, order)
    if any(len(found) > SPANS_MAX for found in spans.values()):
        _free_short_runs(owners, keep=max(0, SPANS_MAX - len(blocks.spans)) // 2)
        cast = casting.cast(int((owners == _FREE).sum()))
        spans = _dealt(owners, blocks.first, cast.counts, order)
    shares = [Share(readers[index].node, Runs(tuple(spans[index]))) for index in order if spans[index]]
    words = ["decode" if decode is not None else "prefill", "prefill"][: len(sides)]
    return ReadPlan(tuple(shares), why=_why(cast.counts, words))


def _why(counts: dict[int, int], sides: list[str]) -> str:
    """Who reads, in one word of a few: metrics count by it."""
    if any(index >= len(sides) for index in counts):
        return "helped"
    return "split" if len(counts) > 1 else next((sides[index] for index in counts), "pooled")


class _Casting:
    """Chooses how many free blocks each reads. Of the readers the sides come first, and of them the decode node."""

    def __init__(
        self, readers: Sequence[Reader], sides: int, avoided: Sequence[bool], block_bytes: int, floor_s: float
    ) -> None:
        well = [index for index, avoid in enumerate(avoided) if not avoid] or list(range(len(readers)))
        self._lanes = _lanes([reader.depth for reader in readers])
        self._sides = [index for index in well if index < sides]
        self._helpers = [index for index in well if index >= sides]
        self._block_bytes = _bounded(block_bytes)
        self._floor_s = floor_s

    def cast(self, blocks: int) -> _Cast:
        """For so many free blocks."""
        if not blocks:
            return _Cast({}, 0.0)
        best = self._single(blocks)
        for side in self._sides:
            best = self._with(side, best, blocks)
        rest = [index for index in self._helpers if index not in best.counts]
        while rest:
            promising = self._most_promising(rest, best)
            rest.remove(promising)
            more = self._with(promising, best, blocks)
            if more is best:
                break
            best = more
        return best

    def _single(self, blocks: int) -> _Cast:
        """The side that has read all first; a helper if no side is well. It is said to end when the best one would."""
        size = blocks * self._block_bytes
        ends_s = {index: self._lanes[index].ends_s(size) for index in self._sides or self._helpers}
        first = min(ends_s, key=lambda index: ends_s[index])
        preferred = min(ends_s)
        tie = ends_s[preferred] - ends_s[first] <= self._floor_s * TIE_OF_FLOOR
        return _Cast({preferred if tie else first: blocks}, ends_s[first])

    def _most_promising(self, helpers: Sequence[int], best: _Cast) -> int:
        """The helper with which the level falls furthest: what it could have read until then, over all rates."""
        rate = sum(self._lanes[index].rate for index in best.counts)

        def falls_s(index: int) -> float:
            lane = self._lanes[index]
            return (lane.rate * best.ends_s - lane.queue) / (rate + lane.rate)

        return max(helpers, key=falls_s)

    def _with(self, reader: int, best: _Cast, blocks: int) -> _Cast:
        """One reader more, if that gains more than the floor; else what was."""
        if reader in best.counts:
            return best
        chosen = sorted([*best.counts, reader])
        lanes = [self._lanes[index] for index in chosen]
        counts = _whole(_level(lanes, blocks * self._block_bytes), blocks)
        ends_s = max(lane.ends_s(count * self._block_bytes) for lane, count in zip(lanes, counts, strict=True) if count)
        if best.ends_s - ends_s <= self._floor_s:
            return best
        return _Cast({index: count for index, count in zip(chosen, counts, strict=True) if count}, ends_s)


def _bounded(number: int) -> float:
    """Products of three of these stay far from what a float can hold."""
    return float(min(max(number, 0), _NUMBER_MAX))


def _lanes(depths: Sequence[Depth]) -> list[_Lane]:
    """A rate that is not known is the fastest known one: who has not read yet had nothing to do."""
    fastest = max(depth.rate_bytes_per_s for depth in depths)
    assumed = fastest if fastest > 0 else RATE_ASSUMED_BYTES_PER_S
    rates = [depth.rate_bytes_per_s if depth.rate_bytes_per_s > 0 else assumed for depth in depths]
    return [_Lane(_bounded(depth.queue_bytes), _bounded(rate)) for depth, rate in zip(depths, rates, strict=True)]


def _share(prefill: _Lane, decode: _Lane, size: float) -> float:
    if size <= 0:
        return float(prefill.ends_s(0) < decode.ends_s(0))
    gap = prefill.rate * decode.queue - decode.rate * prefill.queue
    return min(1.0, max(0.0, (gap + prefill.rate * size) / ((prefill.rate + decode.rate) * size)))


def _level(lanes: Sequence[_Lane], size: float) -> list[float]:
    """Fractions of `size` with which all who read end at one time; who is busy for longer than that reads nothing."""
    if len(lanes) == 2:
        share = _share(lanes[1], lanes[0], size)
        return [1.0 - share, share]
    order = sorted(range(len(lanes)), key=lambda index: lanes[index].ends_s(0))
    rates = queues = ends_s = 0.0
    for place, index in enumerate(order):
        rates, queues = rates + lanes[index].rate, queues + lanes[index].queue
        ends_s = (size + queues) / rates
        if place + 1 == len(order) or ends_s <= lanes[order[place + 1]].ends_s(0):
            break
    parts = [max(0.0, lane.rate * ends_s - lane.queue) for lane in lanes]
    total = sum(parts)
    return [part / total for part in parts] if total > 0 else [float(index == order[0]) for index in range(len(lanes))]


def _whole(fractions: Sequence[float], blocks: int) -> list[int]:
    """Whole blocks, `blocks` in all: rounded down, then the largest remainders up; the earlier of two equal ones first."""
    exact = [fraction * blocks for fraction in fractions]
    counts = [min(blocks, int(number)) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: max(0, blocks - sum(counts))]:
        counts[index] += 1
    return counts


def _pooled(blocks: Runs, readers: Sequence[Reader], avoided: Sequence[bool]) -> npt.NDArray[np.int16]:
    """For each index from the first block on whose it is: of readers with a clean copy the first one whose lane is well."""
    first, stop = blocks.first, blocks.stop
    owners = np.full(stop - first, _FREE, dtype=np.int16)
    for index in sorted(range(len(readers)), key=lambda index: (avoided[index], index), reverse=True):
        for a, b in readers[index].pooled.spans:
            owners[max(0, a - first) : max(0, min(b, stop) - first)] = index
    for (_, gap), (after, _) in pairwise(blocks.spans):
        owners[gap - first : after - first] = _NOBODY
    return owners


def _edges(owners: npt.NDArray[np.int16]) -> list[int]:
    """Where runs of one owner begin, and the end of the last."""
    return [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), owners.size] if owners.size else []


def _dealt(
    owners: npt.NDArray[np.int16], first: int, counts: dict[int, int], order: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Each reader's spans: what is its own already, and a run of the free blocks, which are dealt in `order`."""
    free, dealt, begin = np.flatnonzero(owners == _FREE), owners.copy(), 0
    for index in order:
        count = counts.get(index, 0)
        dealt[free[begin : begin + count]] = index
        begin += count
    spans: dict[int, list[tuple[int, int]]] = {index: [] for index in order}
    for a, b in pairwise(_edges(dealt)):
        owner = int(dealt[a])
        if owner != _NOBODY:
            spans[owner].append((first + a, first + b))
    return spans


def _free_short_runs(owners: npt.NDArray[np.int16], *, keep: int) -> None:
    """All but the `keep` longest runs that lie in pools count as free."""
    runs = [(a - b, a, b) for a, b in pairwise(_edges(owners)) if owners[a] >= 0]
    for _, a, b in sorted(runs)[keep:]:
        owners[a:b] = _FREE
