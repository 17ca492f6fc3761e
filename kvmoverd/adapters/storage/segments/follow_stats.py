"""What following the logs of others has come to, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FollowStats:
    """Totals since start. `entries` were taken in `load_s` seconds up to `loaded`, all that there was at first being read.

    `pending_entries` wait for an author that is not known yet; `skipped_entries` are of namespaces that are not kept in RAM;
    `lost_entries` could not wait any longer. `bad_blocks`: places of which somebody said that their records are damaged.
    """

    authors: int = 0
    live: int = 0
    loaded: bool = False
    entries: int = 0
    load_s: float = 0.0
    load_entries: int = 0
    backlog: int = 0
    skipped_entries: int = 0
    pending_entries: int = 0
    lost_entries: int = 0
    lag_ms_max: int = 0
    """Longest time since the log of a living author was last looked at."""
    lag_author: str = ""
    """Whose log that is."""
    damaged_pages: int = 0
    lost_seals: int = 0
    failed_pages: int = 0
    snapshots: int = 0
    damaged_sections: int = 0
    unread_logs: int = 0
    scan_failures: int = 0
    unreadable_authors: int = 0
    ignored_names: int = 0
    authors_gone: int = 0
    logs_gone: int = 0
    heard: int = 0
    bad_blocks: int = 0

    @property
    def load_entries_per_s(self) -> float:
        """How fast the index was loaded, so far while it still is."""
        return self.load_entries / self.load_s if self.load_s else 0.0
