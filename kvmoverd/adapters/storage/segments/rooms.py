"""Room on a full disk, made at once, in the thread of whoever needs it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from kvmoverd.adapters.storage.segments.census import Census
from kvmoverd.adapters.storage.segments.collector_stats import CollectorCounters
from kvmoverd.adapters.storage.segments.graveyard import Graveyard
from kvmoverd.adapters.storage.segments.usage import Usage
from kvmoverd.adapters.storage.trash import Trash
from kvmoverd.core.store.eviction import Why, choose

ROOM_WAIT_S = 5.0
ROOM_S = 10.0
ROOM_PART = 0.25
"""Of what this node keeps: more is not dropped for one call."""


class Rooms:
    """Frees what is in the trash, what waits for it, and what is alive, in this order: whatever of these fails, the rest goes on.

    Any thread may call `make`. `owned`: authors whose segments are collected here; `is_active`: the segment takes records now.
    """

    def __init__(
        self,
        counters: CollectorCounters,
        *,
        census: Census,
        usage: Usage,
        graveyard: Graveyard,
        trash: Trash,
        owned: Callable[[], Collection[str]],
        is_active: Callable[[str, int], bool],
    ) -> None:
        self._counters = counters
        self._census, self._usage, self._graveyard, self._trash = census, usage, graveyard, trash
        self._owned, self._is_active = owned, is_active
        self._making = threading.Lock()

    def make(self, bytes_wanted: int) -> bool:
        """As `Collector.make_room`."""
        if not self._making.acquire(timeout=ROOM_WAIT_S):
            self._counters.rooms_refused += 1
            return False
        try:
            freed_bytes = self._make(bytes_wanted, time.monotonic() + ROOM_S)
        finally:
            self._making.release()
        self._counters.no_space_bytes += freed_bytes
        self._counters.rooms_refused += not freed_bytes
        return freed_bytes > 0

    def _make(self, bytes_wanted: int, deadline_s: float) -> int:
        freed_bytes = self._trash.empty_now(bytes_wanted, deadline_s)
        if freed_bytes < bytes_wanted:
            freed_bytes += self._graveyard.delete_waiting(bytes_wanted - freed_bytes, deadline_s)
        left_bytes = bytes_wanted - freed_bytes
        if left_bytes > 0 and time.monotonic() < deadline_s:
            freed_bytes += self._drop(left_bytes, deadline_s)
        return freed_bytes

    def _drop(self, bytes_wanted: int, deadline_s: float) -> int:
        owned, freed_bytes = self._owned(), 0
        with contextlib.suppress(OSError):
            self._usage.refresh(owned, self._is_active)
        # Where we have little, a full disk is not ours to empty.
        wanted = min(bytes_wanted, round(self._usage.totals()[0] * ROOM_PART))
        victims = choose(
            self._census.uses(self._usage.segments(owned)),
            why=Why.NO_SPACE,
            bytes_wanted=wanted,
            salvage_below=0.0,
            even_unknown=True,
        )
        for victim in victims:
            if time.monotonic() > deadline_s:
                break
            segment = self._usage.find(victim.use.author, victim.use.number)
            deleted_bytes = self._graveyard.delete_now(segment, deadline_s) if segment is not None else 0
            freed_bytes += deleted_bytes
            self._counters.no_space_segments += deleted_bytes > 0
        return freed_bytes
