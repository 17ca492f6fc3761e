"""What the scheduler has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Since the start. `by_rule`: assignments by the three words of `Explain.rules`."""

    submitted: int = 0
    assigned: int = 0
    done: int = 0
    requeued: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    by_rule: dict[tuple[str, str, str], int] = field(default_factory=dict)
