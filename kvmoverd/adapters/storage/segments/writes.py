"""What is appended: a record on its way into a segment, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvmoverd.adapters.storage.block_io import DISK_FULL, errno_name
from kvmoverd.adapters.storage.segments.writes_segments import GrowingSegment
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place


@dataclass(frozen=True, slots=True)
class Appended:
    """How it ended; `place` only where it is OK. `new` false: it was stored before."""

    reason: Reason
    message: str = ""
    place: Place | None = None
    new: bool = True


@dataclass(slots=True, eq=False)
class Append:
    """A record to be stored. `record`: all its pages, whose memory stays as it is until `end` is called, once.

    `seal` fills in the header page for the generation that it is given.
    """

    fingerprint: bytes
    key: bytes
    parent: bytes
    depth: int
    record: memoryview
    seal: Callable[[int], object]
    end: Callable[[Appended], None]
    segment: GrowingSegment | None = field(default=None, repr=False)
    index: int = 0
    ended: bool = False


@dataclass(slots=True)
class AppendCounters:
    """Totals since start; `longest_commit_s`: of one group's syncs and pages; `last_good_ns`: monotonic, 0: none yet."""

    appended_blocks: int = 0
    appended_bytes: int = 0
    failed_blocks: int = 0
    commits: int = 0
    segment_syncs: int = 0
    log_syncs: int = 0
    full_disks: int = 0
    renewals: int = 0
    longest_commit_s: float = 0.0
    last_good_ns: int = 0


def failure(error: Exception) -> Appended:
    """How an append ends that met this exception."""
    if isinstance(error, OSError):
        reason = Reason.NO_SPACE if error.errno in DISK_FULL else Reason.IO_ERROR
        return Appended(reason, f"{errno_name(error)}: {error}")
    return Appended(Reason.INTERNAL, f"{type(error).__name__}: {error}")
