"""Arrivals out of a real trace, who reads by which rule, and how even the storage NICs' work is. Pure."""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACE = Path(__file__).resolve().parents[2] / "client/kvmover_client/replay/traces/claude_code_sessions.jsonl"
GAP_S_MAX = 60.0
"""Of a trace: who pauses longer is another agent."""
BUSY_SHARE = 0.5
"""Windows with less than this part of what the nodes can read say nothing of balance."""


class Rule(enum.Enum):
    """Who reads a request."""

    PE = "the prefill node"
    DE = "the decode node"
    ROUND_ROBIN = "one, then the other"
    SHORTER = "the side whose queue is shorter"
    SPLIT = "both sides, as the nodes decide"
    HELPED = "both sides and idle nodes, as the nodes decide"


@dataclass(frozen=True, slots=True)
class Turn:
    """Of an agent: how long after its turn before, and leading blocks that are stored."""

    gap_s: float
    blocks: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """`decode`: which of the decode nodes, by number."""

    at_s: float
    blocks: int
    decode: int


@dataclass(frozen=True, slots=True)
class Window:
    """What each node's storage has read in a window."""

    length_s: float
    read_bytes: tuple[int, ...]

    @property
    def max_over_avg(self) -> float:
        return max(self.read_bytes) * len(self.read_bytes) / sum(self.read_bytes)

    def is_busy(self, rate_bytes_per_s: float) -> bool:
        """`rate_bytes_per_s`: of one node."""
        return sum(self.read_bytes) > BUSY_SHARE * rate_bytes_per_s * len(self.read_bytes) * self.length_s


def read_turns(trace: Path) -> list[Turn]:
    """Turns with a stored prefix, of all sessions one after the other."""
    found = []
    for line in trace.read_text().splitlines():
        at_s = 0.0
        for turn in json.loads(line)["requests"]:
            if "keep" in turn:
                gap_s, at_s = turn["t"] - at_s, turn["t"]
                if turn["keep"]:
                    found.append(Turn(min(gap_s, GAP_S_MAX), turn["keep"]))
    return found


def arrivals(
    turns: Sequence[Turn], *, agents: int, decodes: int, blocks_per_s: float, length_s: float, seed: int
) -> list[Arrival]:
    """Agents that walk through the turns, each from a place of its own, in a time that is pressed until the load is as wanted."""
    rng = np.random.default_rng(seed)
    walks = []
    for _ in range(agents):
        begin = int(rng.integers(len(turns)))
        gaps_s = np.asarray([turn.gap_s for turn in (*turns[begin:], *turns[:begin])])
        walks.append((begin, float(rng.uniform(0, gaps_s[0])), np.cumsum(gaps_s)))
    wanted_blocks, found = blocks_per_s * length_s, list[tuple[float, int]]()
    for begin, early_s, at_s in walks:
        found += [(float(at) - early_s, turns[(begin + step) % len(turns)].blocks) for step, at in enumerate(at_s)]
    found.sort()
    sums = list(itertools.accumulate(blocks for _, blocks in found))
    count = next((number for number, total in enumerate(sums, 1) if total >= wanted_blocks), len(sums))
    pressed = length_s * min(1.0, sums[count - 1] / wanted_blocks) / max(found[count - 1][0], 1e-9)
    sides = rng.integers(decodes, size=count).tolist()
    return [Arrival(at_s * pressed, blocks, side) for (at_s, blocks), side in zip(found[:count], sides, strict=True)]


class Queues:
    """What a scheduler knows of the nodes that read: bytes that it has given to each, and that have not come."""

    def __init__(self) -> None:
        self._bytes: dict[str, float] = {}
        self._turns = itertools.count()

    def choose(self, rule: Rule, prefill: str, decode: str) -> str:
        """Who is to read: for rules that choose one side. Ties go to the decode side."""
        if rule is Rule.ROUND_ROBIN:
            return (prefill, decode)[next(self._turns) % 2]
        if rule is Rule.SHORTER:
            return prefill if self._bytes.get(prefill, 0.0) < self._bytes.get(decode, 0.0) else decode
        return prefill if rule is Rule.PE else decode

    def given(self, node: str, size_bytes: int) -> None:
        self._bytes[node] = self._bytes.get(node, 0.0) + size_bytes


def windows(times_s: Sequence[float], counters: Sequence[Sequence[int]]) -> list[Window]:
    """Between two looks each; `counters`: per look, bytes read by each node since its start."""
    looks = zip(times_s, counters, strict=True)
    return [
        Window(until_s - since_s, tuple(now - before for before, now in zip(first, second, strict=True)))
        for (since_s, first), (until_s, second) in itertools.pairwise(looks)
    ]


def balance(found: Sequence[Window], rate_bytes_per_s: float) -> tuple[float, int]:
    """Mean of max over average in the busy windows, and how many these are; (0.0, 0) without any."""
    busy = [window.max_over_avg for window in found if window.is_busy(rate_bytes_per_s)]
    return (float(np.mean(busy)), len(busy)) if busy else (0.0, 0)


def spread(read_bytes: Mapping[str, int]) -> float:
    """Max over average of what nodes have read."""
    total_bytes = sum(read_bytes.values())
    return max(read_bytes.values()) * len(read_bytes) / total_bytes if total_bytes else 0.0
