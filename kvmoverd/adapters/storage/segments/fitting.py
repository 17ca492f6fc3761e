"""Whether a filesystem is large enough for the segments that are to lie on it."""

from __future__ import annotations

import os
from pathlib import Path

SEGMENTS_MIN = 3
"""A namespace that is written to has one that grows and one that waits; and there must be one that can go."""


def too_small(place: Path, segment_bytes: int) -> str:
    """What an operator should know; empty where there is room for `SEGMENTS_MIN`, or it is not said. Raises `OSError`."""
    status = os.statvfs(place)
    there_bytes = status.f_blocks * status.f_frsize
    if there_bytes == 0 or there_bytes >= SEGMENTS_MIN * segment_bytes:
        return ""
    return (
        f"the filesystem has {there_bytes >> 20} MiB, less than {SEGMENTS_MIN} segments of {segment_bytes >> 20} MiB: "
        f"when it is full nothing can be dropped to make room; make segment_bytes smaller"
    )
