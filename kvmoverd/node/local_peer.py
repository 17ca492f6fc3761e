"""The node as its own peer: prefill and decode engines of one node need no network."""

from __future__ import annotations

from kvmoverd.core.status import Reason
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.models import Models
from kvmoverd.node.peer import PartHandle, PartListener, Reservation, Reserved, Ticket
from kvmoverd.node.reading import Destination, PartDriver


class _OwnPart:
    """A part read by this node for its own prefill engine."""

    def __init__(self, driver: PartDriver) -> None:
        self._driver = driver

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self._driver.credit(prefix_blocks, layers)

    def stop(self) -> None:
        self._driver.stop(Reason.CANCELLED, "stopped by its owner")


class LocalPeer:
    """`Peer` without leaving the process."""

    def __init__(self, decode_side: DecodeSide, models: Models) -> None:
        self._side = decode_side
        self._models = models

    async def reserve(self, reservation: Reservation) -> Reserved:
        return await self._side.reserve(self._models.get(reservation.fingerprint), reservation)

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int) -> None:
        await self._side.set_prefix(ticket, prefix_blocks)

    def read_part(
        self, ticket: Ticket, sink_id: int, credit_layers: int, timeout_s: float, listener: PartListener
    ) -> PartHandle:
        part = self._side.read_part(ticket, Destination(None, sink_id), credit_layers, listener)
        part.start()
        return _OwnPart(part)

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        self._side.release_ticket(ticket, reason)

    async def return_ticket(self, ticket: Ticket) -> None:
        self._side.return_ticket(ticket)

    async def route(self) -> None:
        return None

    def lost(self) -> None:
        """A process does not lose itself."""
