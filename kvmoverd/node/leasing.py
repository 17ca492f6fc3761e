"""Leases of a node: block sets that engines hold in the pool, and the room they occupy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import QueueFull
from kvmoverd.core.leases import Lease, LeaseTable
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.reader import BlockReader
from kvmoverd.node.room import Room
from kvmoverd.ports.clock import Clock

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Held:
    blocks: BlockSet
    room: tuple[Purpose, int]


class LeaseBook:
    """Grants, renews and ends leases; slots and room go back together."""

    def __init__(self, table: LeaseTable, reader: BlockReader, room: Room, clock: Clock) -> None:
        self._table = table
        self._reader = reader
        self._room = room
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._promised = 0

    def __len__(self) -> int:
        return len(self._held)

    def promise(self) -> None:
        """A lease will be granted, or `withdraw` called: so that nobody reads in vain. Raises `QueueFull` at the limit."""
        if len(self._table) + self._promised >= self._table.leases_max:
            raise QueueFull(
                f"{len(self._table)} leases are out and {self._promised} promised, at most {self._table.leases_max} may be"
            )
        self._promised += 1

    def withdraw(self) -> None:
        """A promise is not needed any more."""
        self._promised -= 1

    def grant(self, session_id: str, blocks: BlockSet, room: tuple[Purpose, int], lease_s: float) -> Lease:
        """Redeems a promise: takes the block set and its room over."""
        self._promised -= 1
        now_ns = self._clock.now_ns()
        lease = self._table.grant(session_id, blocks.waiter, now_ns + int(lease_s * NS))
        blocks.deafen()
        self._held[lease.lease_id] = _Held(blocks, room)
        return lease

    def renew(self, session_id: str, refs: Sequence[tuple[int, int]], lease_s: float) -> list[bool]:
        now_ns = self._clock.now_ns()
        return self._table.renew(session_id, refs, now_ns, now_ns + int(lease_s * NS))

    def release(self, session_id: str, refs: Sequence[tuple[int, int]]) -> int:
        released = self._table.release(session_id, refs)
        self._drop(released)
        return len(released)

    def expire(self) -> int:
        """Ends what has run out; called by a timer."""
        expired = self._table.expire(self._clock.now_ns())
        self._drop(expired)
        return len(expired)

    def session_gone(self, session_id: str) -> None:
        self._drop(self._table.session_gone(session_id))

    def _drop(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            held = self._held.pop(lease.lease_id)
            self._reader.release(held.blocks)
            self._room.give_back_bytes(*held.room)
