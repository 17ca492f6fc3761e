"""Leases: an engine's right to blocks in the pool, for a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvmoverd.core.errors import QueueFull

DUE_SPARE = 64
"""Entries of ended leases that the order of expiry may carry beside one for each live lease."""


@dataclass(slots=True)
class Lease:
    """(lease_id, generation) names it; `waiter` is what the cache knows it by."""

    lease_id: int
    generation: int
    session_id: str
    waiter: int
    expires_ns: int


class LeaseTable:
    """Expiry revokes the lease; what is in flight holds its slots by itself, whatever the clock says.

    Ids start anew with each table; a `generation` drawn anew makes the leases of an earlier one void.
    """

    def __init__(self, leases_max: int, *, generation: int = 1) -> None:
        self.leases_max = leases_max
        self.generation = generation
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._due: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session_id: str, waiter: int, expires_ns: int) -> Lease:
        """Raises `QueueFull` at the limit."""
        if len(self._leases) >= self.leases_max:
            raise QueueFull(f"{len(self._leases)} leases are out, at most {self.leases_max} may be")
        lease = Lease(next(self._ids), self.generation, session_id, waiter, expires_ns)
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._due, (expires_ns, lease.lease_id))
        return lease

    def renew(self, session_id: str, refs: Sequence[tuple[int, int]], now_ns: int, expires_ns: int) -> list[bool]:
        """Extends those that are still valid; says which, in order. A lease is never shortened."""
        return [self._renew(session_id, lease_id, generation, now_ns, expires_ns) for lease_id, generation in refs]

    def release(self, session_id: str, refs: Sequence[tuple[int, int]]) -> list[Lease]:
        """Ends leases of this session; unknown ones are ignored."""
        found = [lease for ref in dict.fromkeys(refs) if (lease := self._known(session_id, *ref)) is not None]
        self._remove(found)
        return found

    def expire(self, now_ns: int) -> list[Lease]:
        """Ends and returns what has run out."""
        ended = []
        while self._due and self._due[0][0] <= now_ns:
            _, lease_id = heapq.heappop(self._due)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease.expires_ns > now_ns:
                heapq.heappush(self._due, (lease.expires_ns, lease_id))
                continue
            ended.append(self._leases.pop(lease_id))
        return ended

    def session_gone(self, session_id: str) -> list[Lease]:
        """Ends and returns all leases of a session."""
        ended = [lease for lease in self._leases.values() if lease.session_id == session_id]
        self._remove(ended)
        return ended

    def _remove(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self._leases[lease.lease_id]
        # Entries of ended leases stay until they are due: with long leases, quickly released, they would pile up.
        if len(self._due) > 2 * len(self._leases) + DUE_SPARE:
            self._due = [(lease.expires_ns, lease.lease_id) for lease in self._leases.values()]
            heapq.heapify(self._due)

    def _known(self, session_id: str, lease_id: int, generation: int) -> Lease | None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id or lease.generation != generation:
            return None
        return lease

    def _renew(self, session_id: str, lease_id: int, generation: int, now_ns: int, expires_ns: int) -> bool:
        lease = self._known(session_id, lease_id, generation)
        if lease is None or lease.expires_ns <= now_ns:
            return False
        lease.expires_ns = max(lease.expires_ns, expires_ns)
        return True
