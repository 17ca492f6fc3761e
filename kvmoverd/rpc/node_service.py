"""Node-to-node API: what this node does for others, as their decode node or as a third one that helps."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from kvmover_proto import node_pb2, node_pb2_grpc
from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import (
    BadPlan,
    BadRequest,
    KvmoverError,
    ProtocolMismatch,
    QueueFull,
    TransportMismatch,
    UnknownPeer,
)
from kvmoverd.core.keys import split_keys
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import check_whole
from kvmoverd.core.status import Path, Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.models import NAMESPACES_MAX
from kvmoverd.node.namespaces import TENANT_CHARS_MAX
from kvmoverd.node.node import Node
from kvmoverd.node.peer import Reservation, SplitFacts
from kvmoverd.ports.connection import Answer, Answered, Connects
from kvmoverd.rpc import convert, part_calls, places, queue_pairs, shares
from kvmoverd.rpc.dialling import CONNECT_S
from kvmoverd.rpc.feeding import fed
from kvmoverd.rpc.guard import answering, streaming
from kvmoverd.rpc.peer_client import PROTOCOL
from kvmoverd.rpc.watching import Watchers

ALWAYS = frozenset({"ConnectQueuePair", "ReleaseTicket"})
"""Let through when the server is full: requests that are in must be able to end, and to get on."""
KEYS_MAX = 1024
KEY_BYTES = 32
OPEN_WAIT_S = 10.0
STOP_WAIT_S = 2.5
WAITED_S_MAX = 3600.0
ACCEPT_S = CONNECT_S - 1.0
"""Less than the caller waits: he hears why."""

Context = grpc.aio.ServicerContext[Any, Any]
Message = TypeVar("Message")


class DataKeys:
    """Keys that open a data channel to this node, each bound to a node's last boot. Bounded, oldest out."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._boots: dict[str, str] = {}

    def issue(self, node: str, boot_id: str) -> bytes:
        if self._boots.get(node, boot_id) != boot_id:
            for old in [key for key, (holder, _) in self._keys.items() if holder == node]:
                del self._keys[old]
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = (node, boot_id)
        self._boots[node] = boot_id
        while len(self._keys) > KEYS_MAX:
            self._keys.popitem(last=False)
        return key

    def check(self, key: bytes) -> tuple[str, str] | None:
        """(node, boot id) that the key was issued to; called from the transport's threads."""
        return self._keys.get(key)

    def boot_of(self, node: str) -> str | None:
        """Boot id of the node's last Hello."""
        return self._boots.get(node)


class NodeService(node_pb2_grpc.NodeServicer):
    """`data_endpoint` is what Hello hands out with a fresh key; `watchers` knows who may reserve.

    `connects`: the transport, where it has to be introduced to others.
    """

    def __init__(
        self,
        node: Node,
        keys: DataKeys,
        watchers: Watchers,
        *,
        transport: str,
        data_endpoint: str,
        version: str,
        connects: Connects | None = None,
    ) -> None:
        self._node = node
        self._keys = keys
        self._watchers = watchers
        self._transport = transport
        self._data_endpoint = data_endpoint
        self._version = version
        self._connects = connects

    @answering
    async def Hello(self, request: node_pb2.HelloRequest, context: Context) -> node_pb2.HelloReply:
        if not 1 <= len(request.node) <= 128 or not 1 <= len(request.boot_id) <= 64:
            raise BadRequest("node must have 1 to 128 characters, boot_id 1 to 64")
        if request.protocol != PROTOCOL:
            raise ProtocolMismatch(f"{request.node} speaks protocol {request.protocol}, this node speaks {PROTOCOL}")
        if request.transport != self._transport:
            raise TransportMismatch(
                f"{request.node} sends by {request.transport}, this node listens with {self._transport}"
            )
        services = self._node.services
        self._check_known(request.node)
        store = services.desk.storage
        if request.store_author:
            if not places.is_author(request.store_author):
                raise BadRequest(f"store_author {request.store_author[:300]!r} can't be the name of an author")
            store.heard(request.store_author, request.store_log)
        author, log = store.signature()
        return node_pb2.HelloReply(
            node=services.node,
            boot_id=services.boot_id,
            protocol=PROTOCOL,
            data_endpoint=self._data_endpoint,
            data_key=self._keys.issue(request.node, request.boot_id),
            version=self._version,
            store_author=author,
            store_log=log,
        )

    @streaming
    async def Watch(
        self, requests: AsyncIterator[node_pb2.WatchRequest], context: Context
    ) -> AsyncGenerator[node_pb2.WatchReply, None]:
        first = await _first(requests)
        if not first.boot_id or self._keys.boot_of(first.node) != first.boot_id:
            raise ProtocolMismatch(f"{first.node} did not say Hello with boot {first.boot_id}")
        async with contextlib.aclosing(self._watchers.serve(first, requests)) as replies:
            async for reply in replies:
                yield reply

    @answering
    async def Reserve(self, request: node_pb2.ReserveRequest, context: Context) -> node_pb2.ReserveReply:
        convert.checked_request(request.request_id, request.attempt)
        self._check_watches(request.node, request.boot_id)
        namespace = self._node.models.get(convert.checked_fingerprint(request.fingerprint))
        keys = split_keys(request.block_keys)
        if request.hit_blocks > len(keys):
            raise BadRequest(f"hit_blocks is {request.hit_blocks}, the prompt has {len(keys)} full blocks")
        if request.tail_tokens >= namespace.layout.block_tokens or not (keys or request.tail_tokens):
            raise BadRequest(f"tail_tokens is {request.tail_tokens} beside {len(keys)} full blocks")
        if request.timeout_ms < 1:
            raise BadRequest("timeout_ms is 0, must be 1 or more")
        reservation = self._reservation(request, keys)
        began = time.monotonic()
        reserved = await self._node.decode_side.reserve(namespace, reservation)
        left_s = max(0.001, reservation.timeout_s - (time.monotonic() - began))
        return node_pb2.ReserveReply(
            ticket=convert.ticket_message(reserved.ticket),
            push_sink=reserved.push_sink,
            timeout_ms=int(left_s * 1000),
            plan=shares.plan_message(reserved.plan),
            depth=shares.depth_message(reserved.depth),
        )

    def _check_watches(self, node: str, boot_id: str) -> None:
        """Who does not watch may take nothing here: nobody would notice that it died. Raises `ProtocolMismatch`."""
        if self._watchers.boot_of(node) != boot_id:
            raise ProtocolMismatch(f"{node[:128]} does not watch this node with boot {boot_id[:64]}")

    def _reservation(self, request: node_pb2.ReserveRequest, keys: tuple[bytes, ...]) -> Reservation:
        """Raises `BadRequest`, `BadPlan`, `UnknownPeer`."""
        path = convert.path_of(request.path, needed=request.hit_blocks > request.resident_blocks)
        if request.resident_blocks > request.hit_blocks:
            raise BadRequest(f"resident_blocks is {request.resident_blocks}, hit_blocks is {request.hit_blocks}")
        if request.parts and path is not Path.PARTS:
            raise BadPlan(
                f"{len(request.parts)} parts are given with path {request.path}: they go with PATH_PARTS alone"
            )
        parts = shares.shares_from(request.parts, blocks_max=request.hit_blocks)
        if path is Path.PARTS:
            check_whole(parts, Runs.of((request.resident_blocks, request.hit_blocks)))
        for share in parts:
            self._check_known(share.node)
        max_s = self._node.services.limits.timeout_max_s
        return Reservation(
            request_id=request.request_id,
            attempt=request.attempt,
            fingerprint=request.fingerprint,
            block_keys=keys,
            tail_tokens=request.tail_tokens,
            hit_blocks=request.hit_blocks,
            path=path,
            timeout_s=convert.seconds("timeout_ms", request.timeout_ms, 0.0, max_s),
            node=request.node,
            boot_id=request.boot_id,
            waited_s=convert.seconds("waited_ms", request.waited_ms, 0.0, WAITED_S_MAX),
            places=self._hints(request),
            resident_blocks=request.resident_blocks,
            shares=parts,
            facts=self._facts(request) if path is Path.AUTO else None,
        )

    def _facts(self, request: node_pb2.ReserveRequest) -> SplitFacts:
        """Without helpers that this node can't take layers from. Raises `BadPlan`, `BadRequest`."""
        if not request.HasField("facts"):
            raise BadPlan("PATH_AUTO goes with facts, none are given")
        facts = shares.facts_from(request.facts, blocks_max=request.hit_blocks)
        known = tuple((node, depth) for node, depth in facts.helpers if self._knows(node))
        return replace(facts, helpers=known)

    def _knows(self, node: str) -> bool:
        return self._node.peers is not None and self._node.peers.peer(node) is not None

    def _check_known(self, node: str) -> None:
        """Raises `UnknownPeer`."""
        if not self._knows(node):
            raise UnknownPeer(f"{node[:128]!r} is none of {self._node.services.node}'s peers", node=node[:128])

    def _hints(self, request: node_pb2.ReserveRequest) -> list[Place | None]:
        """Where the caller knows blocks to be; authors that are new here are looked for. Raises `BadRequest`."""
        hints = places.places_from(request.places, request.hit_blocks)
        for author in request.places.authors:
            self._node.services.desk.storage.heard(author, 0)
        return hints

    @answering
    async def SetPrefix(self, request: node_pb2.SetPrefixRequest, context: Context) -> node_pb2.SetPrefixReply:
        helped = shares.helped_from(request.helped, blocks_max=request.prefix_blocks)
        for part in helped:
            self._check_known(part.node)
        ticket = convert.ticket_from(request.ticket)
        sinks = await self._node.decode_side.set_prefix(ticket, request.prefix_blocks, helped)
        return node_pb2.SetPrefixReply(assembly_sinks=sinks)

    @streaming
    async def ReadPart(
        self, requests: AsyncIterator[node_pb2.ReadPartRequest], context: Context
    ) -> AsyncGenerator[node_pb2.PartEvent, None]:
        opening = await _opening(requests)
        self._check_watches(opening.node, opening.boot_id)
        prepared = await part_calls.prepared(self._node, opening)
        self._check_watches(opening.node, opening.boot_id)
        events = part_calls.PartEvents()
        part = prepared.open(self._node, events.listener)
        part.start()
        try:
            async with fed(part_calls.commands(requests, part, events)):
                while True:
                    event = await events.next()
                    yield event
                    if event.WhichOneof("kind") == "end":
                        break
        finally:
            if not part.is_gone:
                part.stop(Reason.PEER_LOST, "its owner went away")

    @answering
    async def StopPart(self, request: node_pb2.StopPartRequest, context: Context) -> node_pb2.StopPartReply:
        part = self._node.parts.find((request.node, request.boot_id), request.part)
        if part is None:
            return node_pb2.StopPartReply(sent_layers=0, quiet=True)
        gone = asyncio.Event()
        part.on_gone.append(gone.set)
        part.stop(Reason.CANCELLED, "stopped by its owner")
        if not part.is_gone:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), STOP_WAIT_S)
        return node_pb2.StopPartReply(sent_layers=part.machine.window.arrived.in_order, quiet=part.is_gone)

    @answering
    async def ReadDepth(self, request: node_pb2.ReadDepthRequest, context: Context) -> node_pb2.ReadDepthReply:
        services = self._node.services
        return node_pb2.ReadDepthReply(
            depth=shares.depth_message(services.reader.depth()),
            helps=self._node.helper_side.helps,
            help_free_bytes=services.room.free_bytes(Purpose.HELP),
        )

    @answering
    async def ReleaseTicket(
        self, request: node_pb2.ReleaseTicketRequest, context: Context
    ) -> node_pb2.ReleaseTicketReply:
        ticket = convert.ticket_from(request.ticket)
        if request.again:
            self._node.decode_side.return_ticket(ticket)
        else:
            self._node.decode_side.release_ticket(ticket, convert.reason_from(request.reason))
        return node_pb2.ReleaseTicketReply()

    @answering
    async def Purged(self, request: node_pb2.PurgedRequest, context: Context) -> node_pb2.PurgedReply:
        if len(request.fingerprints) > NAMESPACES_MAX or len(request.tenant) > TENANT_CHARS_MAX:
            raise BadRequest(
                f"{len(request.fingerprints)} namespaces and a tenant of {len(request.tenant)} characters, at most "
                f"{NAMESPACES_MAX} and {TENANT_CHARS_MAX} are taken"
            )
        if any(len(fingerprint) != convert.FINGERPRINT_BYTES for fingerprint in request.fingerprints):
            raise BadRequest(f"fingerprints must have {convert.FINGERPRINT_BYTES} bytes each")
        forgotten = await self._node.namespaces.purged_elsewhere(list(request.fingerprints), request.tenant)
        return node_pb2.PurgedReply(forgotten=forgotten)

    @answering
    async def ConnectQueuePair(
        self, request: node_pb2.ConnectQueuePairRequest, context: Context
    ) -> node_pb2.ConnectQueuePairReply:
        if self._connects is None:
            raise TransportMismatch(f"this node listens with {self._transport}: it has no queue pairs")
        sender = (request.node, request.boot_id)
        if self._keys.check(request.data_key) != sender:
            raise ProtocolMismatch(
                f"the data key is none that this boot issued to {request.node[:128]!r} with boot {request.boot_id[:64]!r}"
            )
        offer = queue_pairs.offer_from(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer | KvmoverError] = loop.create_future()
        self._connects.accept(sender, offer, _told_in(loop, answer))
        try:
            found = await asyncio.wait_for(answer, ACCEPT_S)
        except TimeoutError:
            raise QueueFull(f"the transport took no offer within {ACCEPT_S:g} s") from None
        if isinstance(found, KvmoverError):
            raise found
        return queue_pairs.answer_message(found)


async def _first(requests: AsyncIterator[Message]) -> Message:
    """Raises `BadRequest` when it does not come in time."""
    try:
        return await asyncio.wait_for(anext(requests), OPEN_WAIT_S)
    except (TimeoutError, StopAsyncIteration):
        raise BadRequest(f"the first message must open the call, none came within {OPEN_WAIT_S:g} s") from None


async def _opening(requests: AsyncIterator[node_pb2.ReadPartRequest]) -> node_pb2.OpenPart:
    first = await _first(requests)
    if first.WhichOneof("kind") != "open":
        raise BadRequest("the first message must open the part")
    return first.open


def _told_in(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Answer | KvmoverError]) -> Answered:
    """Answers from any thread; one that comes too late is nobody's any more."""

    def tell(found: Answer | KvmoverError) -> None:
        if not answer.done():
            answer.set_result(found)

    def answered(found: Answer | KvmoverError) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, found)

    return answered
