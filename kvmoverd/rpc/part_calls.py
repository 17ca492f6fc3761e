"""The called side of ReadPart: this node reads for another one, as its decode node or as a third one that helps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvmover_proto import node_pb2
from kvmoverd.core.balance import PROGRESS_NS
from kvmoverd.core.errors import BadKeys, BadPlan, BadRequest, PeerUnreachable, UnknownModel, UnknownPeer
from kvmoverd.core.keys import KEYS_MAX, split_keys
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import BlockOutcome, End, Reason
from kvmoverd.node.node import Node
from kvmoverd.node.peer import Help, PartListener, PartOrder
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.ports.transport import Route, Sender
from kvmoverd.rpc import convert, places, shares

PROGRESS_S = PROGRESS_NS / 1e9
"""Progress is told no more often than this: a word costs as much as reading a block."""
GIVE_UPS_MAX = 16
"""Asked for and not heard of by the owner yet, rests too."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a part needs, checked. `owner`: name and boot of the node that asked."""

    order: PartOrder
    owner: Sender
    to_owner: Route | None
    to_decode: Route | None

    def open(self, node: Node, listener: PartListener) -> PartDriver:
        """The part, not begun yet. Raises what the sides refuse it with."""
        if self.order.help is None:
            destination = Destination(self.to_owner, self.order.sink_id)
            return node.decode_side.read_part(self.order, self.owner, destination, listener)
        return node.helper_side.open(
            self.order,
            owner=self.owner,
            to_owner=self.to_owner,
            to_decode=self.to_decode,
            listener=listener,
        )


async def prepared(node: Node, opening: node_pb2.OpenPart) -> Prepared:
    """Checks the opening of a part, and greets the nodes that get its layers: this one and they watch each other from now on.

    Raises `BadPlan`, `BadKeys`, `BadRequest`, `UnknownPeer`, and `PeerUnreachable` when one of them can't be reached.
    """
    order = await _order(node, opening)
    owner = opening.node, opening.boot_id
    to_owner = await _route(node, opening.node)
    if to_owner is not None and to_owner.boot_id != opening.boot_id:
        raise PeerUnreachable(f"{opening.node} runs boot {to_owner.boot_id}, the part is boot {opening.boot_id[:64]}'s")
    decode_node = order.help.decode_node if order.help is not None else ""
    if decode_node == node.services.node:
        raise BadPlan(f"{decode_node} can't help itself: it is the decode node")
    return Prepared(order, owner, to_owner, await _route(node, decode_node) if decode_node else None)


async def _route(node: Node, name: str) -> Route | None:
    """To a node that gets layers; None: to this one. Raises `UnknownPeer`, `PeerUnreachable`."""
    peer = node.peers.peer(name) if node.peers is not None else None
    if peer is None:
        raise UnknownPeer(f"{name[:128]!r} is none of {node.services.node}'s peers", node=name[:128])
    return await peer.route()


async def _order(node: Node, opening: node_pb2.OpenPart) -> PartOrder:
    max_s = node.services.limits.timeout_max_s
    if opening.timeout_ms < 1:
        raise BadRequest("timeout_ms is 0, must be 1 or more")
    if opening.HasField("help") == opening.HasField("ticket"):
        raise BadRequest("a part has either a ticket of this node or help, one of them")
    blocks = shares.runs_from(opening.blocks, blocks_max=KEYS_MAX)
    if not blocks:
        raise BadPlan("the part has no blocks")
    _check_rest(opening)
    found = await _help(node, opening.help, blocks.count) if opening.HasField("help") else None
    return PartOrder(
        part=opening.part,
        blocks=blocks,
        sink_id=opening.sink,
        credit_layers=opening.credit_layers,
        first_layer=opening.first_layer,
        holds=opening.holds,
        timeout_s=convert.seconds("timeout_ms", opening.timeout_ms, 0.0, max_s),
        ticket=convert.ticket_from(opening.ticket) if found is None else None,
        help=found,
        rest=opening.rest,
    )


def _check_rest(opening: node_pb2.OpenPart) -> None:
    """The rest of a part goes to the prefill node alone, and the layers before are somebody else's. Raises `BadRequest`."""
    if not opening.rest:
        return
    if not opening.HasField("help") or opening.help.decode_node:
        raise BadRequest("the rest of a part is read with help, and for no decode node")
    if opening.first_layer < 1:
        raise BadRequest("first_layer is 0, the rest of a part begins at layer 1 or later")


async def _help(node: Node, message: node_pb2.Help, blocks: int) -> Help:
    convert.checked_request(message.request_id, message.attempt)
    keys = split_keys(message.block_keys)
    if len(keys) != blocks:
        raise BadKeys(f"{len(keys)} keys are given, the part has {blocks} blocks")
    hints = places.places_from(message.places, blocks)
    for author in message.places.authors:
        node.services.desk.storage.heard(author, 0)
    return Help(
        request_id=message.request_id,
        attempt=message.attempt,
        namespace=await _namespace(node, message),
        keys=keys,
        places=hints,
        decode_node=message.decode_node,
    )


async def _namespace(node: Node, message: node_pb2.Help) -> Namespace:
    """Registered when this node does not know it yet: no engine of its own may have."""
    asked = Namespace(convert.manifest_of(message.manifest))
    try:
        return node.models.get(asked.fingerprint)
    except UnknownModel:
        return await node.namespaces.register(asked.manifest)


async def commands(requests: AsyncIterator[node_pb2.ReadPartRequest], part: PartDriver, events: PartEvents) -> None:
    """Hands the owner's words to the part; a bad one ends it, and is raised."""
    assembly_sink = 0
    try:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "credit":
                    credit = message.credit
                    if credit.assembly_sink not in (0, assembly_sink):
                        if assembly_sink:
                            raise BadRequest(f"assembly_sink is {credit.assembly_sink} after {assembly_sink}")
                        assembly_sink = credit.assembly_sink
                        part.assemble(assembly_sink)
                    part.credit(credit.prefix_blocks, credit.credit_layers)
                case "give_up":
                    events.asked()
                    part.give_up(message.give_up.kept_blocks)
                case "give_rest":
                    events.asked()
                    part.give_rest(message.give_rest.kept_blocks)
                case _:
                    raise BadRequest(
                        "after the opening only credits, give-ups and give-rests may come, and one opening is enough"
                    )
    except Exception as error:
        part.stop(Reason.CANCELLED, str(error))
        raise


class PartEvents:
    """What a part tells its owner, in order; of its progress only the latest, now and then."""

    def __init__(self) -> None:
        self.listener = PartListener(
            self._on_prefix, self._on_end, self._on_progress, self._on_gave_up, self._on_gave_rest
        )
        self._waiting: deque[node_pb2.PartEvent] = deque()
        self._progress: node_pb2.PartProgress | None = None
        self._ready = asyncio.Event()
        self._give_ups = 0
        self._progress_due_s = 0.0

    def asked(self) -> None:
        """Raises `BadRequest` when the owner asks on without listening."""
        if self._give_ups >= GIVE_UPS_MAX:
            raise BadRequest(f"{self._give_ups} give-ups are not heard of yet, at most {GIVE_UPS_MAX} may be")
        self._give_ups += 1

    async def next(self) -> node_pb2.PartEvent:
        """The next one; after the end there is none."""
        loop = asyncio.get_running_loop()
        while True:
            if self._waiting:
                return self._first()
            self._ready.clear()
            if self._progress is None:
                await self._ready.wait()
                continue
            if loop.time() >= self._progress_due_s:
                self._progress_due_s = loop.time() + PROGRESS_S
                progress, self._progress = self._progress, None
                return node_pb2.PartEvent(progress=progress)
            try:
                async with asyncio.timeout_at(self._progress_due_s):
                    await self._ready.wait()
            except TimeoutError:
                continue

    def _first(self) -> node_pb2.PartEvent:
        event = self._waiting.popleft()
        if event.WhichOneof("kind") in ("gave_up", "gave_rest"):
            self._give_ups -= 1
        return event

    def _tell(self, event: node_pb2.PartEvent) -> None:
        self._waiting.append(event)
        self._ready.set()

    def _on_prefix(self, prefix_blocks: int, first_lost: BlockOutcome | None) -> None:
        lost = convert.block_status(first_lost) if first_lost is not None else None
        self._progress = None
        self._tell(node_pb2.PartEvent(prefix=node_pb2.PartPrefix(prefix_blocks=prefix_blocks, first_lost=lost)))

    def _on_end(self, end: End) -> None:
        self._progress = None
        self._tell(node_pb2.PartEvent(end=convert.terminal(end)))

    def _on_progress(self, begun_blocks: int, read_bytes: int) -> None:
        self._progress = node_pb2.PartProgress(begun_blocks=begun_blocks, read_bytes=read_bytes)
        self._ready.set()

    def _on_gave_up(self, kept_blocks: int) -> None:
        self._tell(node_pb2.PartEvent(gave_up=node_pb2.GaveUp(kept_blocks=kept_blocks)))

    def _on_gave_rest(self, kept_blocks: int, first_layer: int) -> None:
        self._tell(node_pb2.PartEvent(gave_rest=node_pb2.GaveRest(kept_blocks=kept_blocks, first_layer=first_layer)))
