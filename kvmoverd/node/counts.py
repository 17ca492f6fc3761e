"""Counts: what was decided here since the start, by why; NodeStatus tells it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class HintCounts:
    """What engines' hints did. `taken_bytes` is of now, the rest since the start, in blocks: read for hints; of these,
    wanted by a request later, or given up long after they were expected to be; hinted, and not taken on."""

    taken_bytes: int = 0
    read_blocks: int = 0
    used_blocks: int = 0
    expired_blocks: int = 0
    refused_blocks: int = 0


@dataclass(slots=True)
class Counts:
    """The reasons are a few fixed words each: no node, no request.

    `plans`: who reads a request, as `ReadPlan.why` has it. `moves`: parts whose unread blocks went to another reader.
    `dropped`: new blocks that were not stored.
    """

    plans: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    hints: HintCounts = field(default_factory=HintCounts)
