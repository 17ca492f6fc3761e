"""One reader of a stream, as its driver keeps it: what it was asked, and the sink that its layers come through."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.node.peer import Help, PartHandle, PartOrder
from kvmoverd.node.prefill import Plan, PrefillRequest
from kvmoverd.node.sessions import Pages
from kvmoverd.node.slices import region_iovec
from kvmoverd.ports.transport import IoVec, Sender

LEFT_MIN_S = 0.001
"""A part that begins when the deadline has come is told so by its own."""


@dataclass(eq=False, slots=True)
class StreamReader:
    """Who reads one part, and the sink that its layers come through. `sink_id` None: not open yet, or quiet.

    `granted_layers`: those that may come, once each. `fencing`: its sink is being closed. `pages`: of all its blocks, by
    page set, found when the first layer comes.
    """

    known: StreamPart
    is_local: bool
    granted_layers: int
    sender: Sender | None = None
    sink_id: int | None = None
    handle: PartHandle | None = None
    fencing: bool = False
    ended: bool = False
    pages: dict[int, Pages] = field(default_factory=dict)

    @property
    def boot_id(self) -> str:
        """Of the node that sends; empty: this one."""
        return self.sender[1] if self.sender is not None else ""

    def resolve(self, plan: Plan, layer: int, first_block: int) -> IoVec | None:
        """Where a layer of a part goes; nowhere before it is granted, and when the part is not that reader's any more."""
        known = self.known
        count = known.blocks_at(layer)
        if self.fencing or not count or first_block != known.share.blocks.first:
            return None
        if not known.arrived.in_order <= layer < self.granted_layers:
            return None
        page_set = plan.page_set(layer)
        pages = self.pages.get(page_set)
        if pages is None:
            pages = self.pages[page_set] = plan.pages_of(page_set, known.share.blocks)
        pages = pages[: count * plan.region.geometry.pages_per_block]
        return region_iovec(plan.region, layer, pages, count, 0)

    def order(self, request: PrefillRequest, left_s: float, *, ticket_of_decode_node: bool) -> PartOrder:
        """What another node, or this one's decode side, is asked to read within `left_s`."""
        known, plan, reserved = self.known, request.plan, request.reserved
        assert self.sink_id is not None, "a part is ordered without a sink"
        ticket = reserved.ticket if reserved is not None and ticket_of_decode_node else None
        helping = None
        if not ticket_of_decode_node:
            keys, places = plan.keys_of(known.share.blocks), request.planner.places(known.share.blocks)
            call, decode_node = plan.call, "" if known.rest else plan.decode_node
            helping = Help(call.request_id, call.attempt, plan.namespace, keys, places, decode_node)
        return PartOrder(
            part=known.part,
            blocks=known.share.blocks,
            sink_id=self.sink_id,
            credit_layers=self.granted_layers,
            first_layer=known.first_layer,
            holds=known.holds,
            timeout_s=max(LEFT_MIN_S, left_s),
            ticket=ticket,
            help=helping,
            rest=known.rest,
        )
