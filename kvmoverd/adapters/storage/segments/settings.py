"""Settings of one segment store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of what this node keeps of some namespaces; empty `tenant` and `model_id` match all.

    `bytes_max` 0: as the root; `ttl_s` 0: for ever. The first that matches counts.
    """

    tenant: str = ""
    model_id: str = ""
    bytes_max: int = 0
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    """All for one root on one node; sizes in bytes, times in seconds."""

    segment_bytes: int = 1 << 30
    log_pages: int = 4096
    commit_blocks: int = 32
    commit_wait_s: float = 0.02
    index_ram_bytes_max: int = 4 << 30
    bytes_max: int = 0
    """Of this node's segments, 0: only the filesystem's own room counts."""
    inodes_max: int = 0
    high: float = 0.90
    """Of the budget, or of the filesystem: above it segments are dropped, until `low`."""
    low: float = 0.80
    grace_s: float = 60.0
    """From a tombstone to the deletion: longer than the longest read and two polls."""
    poll_s: float = 0.2
    """How often the logs of others are looked at."""
    heartbeat_s: float = 5.0
    dead_s: float = 60.0
    unlink_bytes_per_s: float = float(4 << 30)
    limits: tuple[Limit, ...] = ()
