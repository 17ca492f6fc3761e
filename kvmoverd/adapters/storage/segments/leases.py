"""Whether an author lives, by what his lease says and this node's monotonic clock; no wall clock decides anything."""

from __future__ import annotations

import enum
from pathlib import Path

from kvmoverd.adapters.storage.owners import start_ticks
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.core.store.lease_page import Lease, decode_lease

LEASE = "lease"


class Life(enum.Enum):
    """`LIVE`: not known to be dead, which is also what holds before there was time to tell."""

    LIVE = "live"
    DEAD = "dead"
    ENDED = "ended"
    """Dead, too, and in good order: he said so himself."""


class LeaseWatch:
    """The heartbeat of one author, as seen from here.

    Silence is counted in looks that succeeded, each for at most two heartbeats: neither a filesystem that does not answer,
    nor a standstill of this process, makes others dead.
    """

    def __init__(self, path: Path, *, machine: str, heartbeat_s: float, dead_s: float) -> None:
        self._path, self._machine = path, machine
        self._gap_ns_max, self._dead_ns = round(2 * heartbeat_s * 1e9), round(dead_s * 1e9)
        self._lease: Lease | None = None
        self._looked_ns: int | None = None
        self._process_gone = False
        self._beats = False
        self.silent_ns = 0
        """For how long nothing has changed."""

    def look(self, files: PageFiles, now_ns: int) -> None:
        """Reads the lease once. Raises `OSError`, but not for a lease that is not there: that is silence."""
        try:
            lease = decode_lease(files.read_page(self._path))
        except FileNotFoundError:
            lease = None
        gap_ns = 0 if self._looked_ns is None else min(now_ns - self._looked_ns, self._gap_ns_max)
        self._looked_ns = now_ns
        if lease is not None and lease != self._lease:
            self._beats = self._lease is not None
            self._lease, self.silent_ns = lease, 0
        else:
            # One that is torn just now is being written, or was when its author died: the next looks will tell.
            self.silent_ns += max(0, gap_ns)
        known = self._lease
        self._process_gone = (
            known is not None and known.machine == self._machine and start_ticks(known.pid) != known.start_ticks
        )

    def heard(self) -> None:
        """The author did something else that shows that he lives."""
        self.silent_ns = 0

    @property
    def life(self) -> Life:
        if self._lease is not None and self._lease.ended:
            return Life.ENDED
        return Life.DEAD if self._process_gone or self.silent_ns >= self._dead_ns else Life.LIVE

    @property
    def is_seen_alive(self) -> bool:
        """`LIVE`, and not only for want of time: a heartbeat came while this looked."""
        return self._beats and self.life is Life.LIVE
