"""The node as its own peer: prefill and decode engines of one node need no network."""

from __future__ import annotations

from collections.abc import Sequence

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.status import Reason
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.models import Models
from kvmoverd.node.peer import Helped, PartHandle, PartListener, PartOrder, PeerDepth, Reservation, Reserved, Ticket
from kvmoverd.node.reading import Destination


class LocalPeer:
    """`Peer` without leaving the process. A node is no third node of its own requests: it helps itself with nothing."""

    def __init__(self, decode_side: DecodeSide, models: Models) -> None:
        self._side = decode_side
        self._models = models

    async def reserve(self, reservation: Reservation) -> Reserved:
        return await self._side.reserve(self._models.get(reservation.fingerprint), reservation)

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        return await self._side.set_prefix(ticket, prefix_blocks, helped)

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        """Raises as `DecodeSide.read_part`, and `BadPlan` for a part of a third node."""
        if order.help is not None or order.rest:
            raise BadPlan(f"part {order.part}: a node has no help of its own, and the rest of a part is help")
        part = self._side.read_part(order, self._side.own, Destination(None, order.sink_id), listener)
        part.start()
        return part

    async def depth(self) -> PeerDepth:
        return PeerDepth(self._side.depth(), helps=False, help_free_bytes=0, boot_id=self._side.own[1])

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        self._side.release_ticket(ticket, reason)

    async def return_ticket(self, ticket: Ticket) -> None:
        self._side.return_ticket(ticket)

    async def route(self) -> None:
        return None

    def lost(self) -> None:
        """A process does not lose itself."""
