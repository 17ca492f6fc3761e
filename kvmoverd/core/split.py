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

from kvmoverd.core.levelling import Casting, bounded, lanes_of, share_of_first
from kvmoverd.core.runs import NO_RUNS, Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share

SPANS_MAX = 64
"""Of one part. Beyond it the shortest runs that lie in pools are taken for free blocks, so that the rest has few edges."""
_FREE, _NOBODY = -1, -2


@dataclass(frozen=True, slots=True)
class Reader:
    """A node that may read. `pooled`: blocks that are clean in its pool. `starved`: its lane to the prefill node gets too
    little."""

    node: str
    depth: Depth
    pooled: Runs = NO_RUNS
    starved: bool = False


def share_of_prefill(*, queue_p: int, queue_d: int, rate_p: int, rate_d: int, size: int) -> float:
    """The fraction x of `size` bytes that the prefill node has to read so that both sides end together, within [0, 1].

    (q_P + x K) / R_P = (q_D + (1 - x) K) / R_D, so x = (R_P q_D - R_D q_P + R_P K) / ((R_P + R_D) K). With long queues the
    shorter one takes all, so that in the long run P prefill and D decode nodes read P / (P + D) on the prefill side. A rate of
    0 is not known: as the other's. With no bytes it is 1 for a shorter queue of the prefill node, else 0.

    >>> share_of_prefill(queue_p=0, queue_d=100, rate_p=1, rate_d=1, size=200)
    0.75
    """
    prefill, decode = lanes_of([Depth(queue_p, rate_p), Depth(queue_d, rate_d)])
    return share_of_first(prefill, decode, bounded(size))


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
    casting = _casting(readers, len(sides), avoided, block_bytes, floor_s)
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


def _casting(
    readers: Sequence[Reader], sides: int, avoided: Sequence[bool], block_bytes: int, floor_s: float
) -> Casting:
    """Of the readers the first `sides` are sides, and of them the decode node is the first."""
    well = [index for index, avoid in enumerate(avoided) if not avoid] or list(range(len(readers)))
    return Casting(
        lanes_of([reader.depth for reader in readers]),
        [index for index in well if index < sides],
        [index for index in well if index >= sides],
        block_bytes,
        floor_s,
    )


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
