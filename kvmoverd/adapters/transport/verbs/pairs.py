"""Which pair of CNICs, one here and one there, carries frames whose own pair is out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Set
from typing import TypeAlias

Pair: TypeAlias = tuple[int, int]
"""CNIC here, CNIC there."""

PAIRS_TRIED_MAX = 8
"""Pairs that a frame is tried over: where so many fail, the node is what is lost, and waiting longer helps nobody."""


def other_pair(
    wanted: Pair, cnics: int, peer_cnics: int, *, out: Set[Pair], on_trial: Set[Pair], tried: Collection[Pair]
) -> Pair | None:
    """A pair that is neither out nor tried; None where there is none. Those on trial come last.

    One whose CNICs are in no pair that failed comes first: it is not known which end of a pair it was.

    >>> other_pair((0, 0), 2, 2, out={(0, 0)}, on_trial=set(), tried=())
    (1, 1)
    >>> other_pair((0, 0), 1, 2, out={(0, 0)}, on_trial=set(), tried=[(0, 1)]) is None
    True
    """
    failed = {*out, *tried}
    near_failed, far_failed = {near for near, _ in failed}, {far for _, far in failed}

    def order(pair: Pair) -> tuple[bool, int, int, int]:
        near, far = pair
        doubts = (near in near_failed) + (far in far_failed)
        return pair in on_trial, doubts, (near - wanted[0]) % cnics, (far - wanted[1]) % peer_cnics

    usable = (pair for pair in itertools.product(range(cnics), range(peer_cnics)) if pair not in failed)
    return min(usable, key=order, default=None)
