"""Counts: what was decided here since the start, by why; NodeStatus tells it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """The reasons are a few fixed words each: no node, no request.

    `plans`: who reads a request, as `ReadPlan.why` has it. `moves`: parts whose unread blocks went to another reader.
    `dropped`: new blocks that were not stored.
    """

    plans: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
