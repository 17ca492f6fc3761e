"""What the collection of segments has come to, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CollectorCounters:
    """Totals since start; those that end in `_now` are of the last look.

    `failures`: parts of a step that an error ended; the next step begins them anew.
    """

    evicted_segments: int = 0
    evicted_bytes: int = 0
    purged_segments: int = 0
    unheard_segments: int = 0
    expired_segments: int = 0
    salvaged_blocks: int = 0
    lost_hot_blocks: int = 0
    no_space_segments: int = 0
    no_space_bytes: int = 0
    rooms_refused: int = 0
    authors_left: int = 0
    failures: int = 0
    dying_segments_now: int = 0
    dying_bytes_now: int = 0
    oldest_dying_s_now: float = 0.0
    trash_bytes_now: int = 0
    used_bytes_now: int = 0
    used_inodes_now: int = 0
    budget_used_now: float = 0.0
    unknown_peers_now: int = 0
