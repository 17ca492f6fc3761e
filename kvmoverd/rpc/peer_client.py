"""Other nodes over gRPC: `Peer` of `node.peer`, one channel and one Hello per node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from kvmover_proto import node_pb2, node_pb2_grpc
from kvmoverd.core.breaker import Breaker
from kvmoverd.core.errors import KvmoverError, PeerMismatch, PeerUnreachable, ProtocolMismatch
from kvmoverd.core.status import Reason
from kvmoverd.node.peer import (
    Helped,
    PartHandle,
    PartListener,
    PartOrder,
    PeerDepth,
    Reservation,
    Reserved,
    Ticket,
)
from kvmoverd.ports.connection import Answer, Offer
from kvmoverd.ports.observer import Observer
from kvmoverd.ports.storage import Storage
from kvmoverd.ports.transport import Route
from kvmoverd.rpc import convert, places, queue_pairs, shares
from kvmoverd.rpc.dialling import CONNECT_S
from kvmoverd.rpc.errors import error_info, from_call
from kvmoverd.rpc.remote_part import RemotePart, opening_message
from kvmoverd.rpc.server import keepalive
from kvmoverd.rpc.watching import Lost, PeerWatch

log = logging.getLogger(__name__)

PROTOCOL = 2
HELLO_S = 5.0
CALL_S = 10.0
DEPTH_S = 0.5
STOP_S = 3.0
RESERVE_S = 30.0
PURGED_S = 2.0
PAUSE_S = 1.0
"""After a node could not be greeted, requests for it fail at once for this long; longer, when it goes on like that."""
PAUSE_S_MAX = 8.0
FAILURES_MAX = 3
"""So many calls in a row without an answer count as much as a greeting without one."""

CHANNEL_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 8 << 20),
)

Reply = TypeVar("Reply")


class Cancellable(Protocol):
    """A call that is under way."""

    def cancel(self) -> bool: ...


class GrpcPeer:
    """One other node. With the first Hello begins a watch; when that ends, all that goes on with that boot ends at once."""

    def __init__(
        self,
        node: str,
        address: str,
        *,
        own_node: str,
        boot_id: str,
        transport: str,
        observer: Observer,
        silence_s: float,
        on_lost: Lost,
        store: Storage,
    ) -> None:
        """`silence_s`: a node that says nothing for this long is gone; `on_lost` is told then.

        `store`: what this node writes there is told in Hello, and it hears what the other writes.
        """
        self.node = node
        self.address = address
        self.state = "unknown"
        self._own_node = own_node
        self._boot_id = boot_id
        self._transport = transport
        self._observer = observer
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._store = store
        self._channel = grpc.aio.insecure_channel(address, options=(*CHANNEL_OPTIONS, *keepalive(silence_s)))
        self.stub: node_pb2_grpc.NodeAsyncStub = node_pb2_grpc.NodeStub(self._channel)
        self._route: Route | None = None
        self._hello: asyncio.Task[Route] | None = None
        self._watch: PeerWatch | None = None
        self._calls: set[Cancellable] = set()
        self.parts: set[RemotePart] = set()
        self._breaker = Breaker(failures_max=FAILURES_MAX, pause_s=PAUSE_S, pause_max_s=PAUSE_S_MAX)

    @property
    def boot_id(self) -> str:
        """Boot id of the last Hello; empty when never reached."""
        return self._route.boot_id if self._route is not None else ""

    @property
    def lane_starved_from(self) -> bool:
        """Whether the node says that its KV to here gets too little."""
        return self._watch is not None and self._watch.lane_starved

    async def route(self) -> Route:
        """The data channel's route. Raises `PeerUnreachable`, `ProtocolMismatch`, `TransportMismatch`, `PeerMismatch`."""
        wait_s = self._breaker.wait_s(time.monotonic())
        if wait_s > 0:
            raise PeerUnreachable(
                f"{self.node} at {self.address} did not answer; asked again in {wait_s:.1f} s",
                retry_after_ms=int(wait_s * 1000) + 1,
            )
        if self._route is not None:
            return self._route
        if self._hello is None or self._hello.done():
            self._hello = asyncio.get_running_loop().create_task(self._say_hello())
            self._hello.add_done_callback(_looked_at)
        try:
            return await asyncio.shield(self._hello)
        finally:
            if self._hello is not None and self._hello.done():
                self._hello = None

    async def _say_hello(self) -> Route:
        author, log_number = self._store.signature()
        request = node_pb2.HelloRequest(
            node=self._own_node,
            boot_id=self._boot_id,
            protocol=PROTOCOL,
            transport=self._transport,
            store_author=author,
            store_log=log_number,
        )
        try:
            reply = await self._answer(lambda: self.stub.Hello(request, timeout=HELLO_S))
            if reply.node != self.node:
                text = f"the node at {self.address} says that it is {reply.node!r}, [[peers]] says {self.node!r}"
                raise PeerMismatch(text, configured=self.node, found=reply.node)
            await self._watch_boot(reply.boot_id)
        except KvmoverError as error:
            self._breaker.trip(time.monotonic())
            self._changed("down", str(error))
            raise
        self._route = Route(self.node, reply.boot_id, reply.data_endpoint, reply.data_key)
        if places.is_author(reply.store_author):
            self._store.heard(reply.store_author, reply.store_log)
        self._breaker.on_success()
        self._changed("up", f"boot {reply.boot_id}")
        return self._route

    async def _watch_boot(self, boot_id: str) -> None:
        """Goes on with the watch of this boot, or ends that of another and begins one. Raises `KvmoverError`."""
        if self._watch is not None and self._watch.boot_id == boot_id:
            return
        self.gone(f"{self.node} restarted")
        watch = PeerWatch(
            self.node, boot_id, silence_s=self._silence_s, on_end=lambda why: self._watch_ended(watch, why)
        )
        self._watch = watch
        try:
            await watch.open(self.stub, self._own_node, self._boot_id)
        except BaseException:
            if self._watch is watch:
                self._watch = None
            raise
        if self._watch is not watch:
            raise PeerUnreachable(f"{self.node} went away at once")

    def _watch_ended(self, watch: PeerWatch, why: str) -> None:
        if self._watch is watch:
            self.gone(why)

    def lost(self) -> None:
        """The data channel broke; the node may be well all the same."""
        if self._route is not None:
            self._route = None
            self._changed("down", "the data channel broke")

    def gone(self, why: str) -> None:
        """The boot that is watched is void: calls and parts that run end now, and `on_lost` is told."""
        watch, self._watch, self._route = self._watch, None, None
        if watch is None:
            return
        watch.close()
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
        for part in list(self.parts):
            part.lost(why)
        self._changed("down", why)
        self._on_lost(self.node, watch.boot_id, why)

    def gone_boot(self, boot_id: str, why: str) -> None:
        """As `gone`, if it is this boot that is watched."""
        if self._watch is not None and self._watch.boot_id == boot_id:
            self.gone(why)

    def parts_lost(self, sink_ids: Collection[int], why: str) -> None:
        """Those that send to these sinks here. The node may be well, and is told by the end of the calls."""
        for part in list(self.parts):
            if part.sink_id in sink_ids:
                part.lost(why)

    async def reserve(self, reservation: Reservation) -> Reserved:
        """A node that restarted has forgotten this one's Hello: it is said again, once."""
        try:
            return await self._reserve(reservation)
        except ProtocolMismatch as error:
            self.gone(str(error))
            return await self._reserve(reservation)

    async def _reserve(self, reservation: Reservation) -> Reserved:
        route = await self.route()
        request = node_pb2.ReserveRequest(
            request_id=reservation.request_id,
            attempt=reservation.attempt,
            fingerprint=reservation.fingerprint,
            block_keys=b"".join(reservation.block_keys),
            tail_tokens=reservation.tail_tokens,
            hit_blocks=reservation.hit_blocks,
            path=convert.path_number(reservation.path),
            resident_blocks=reservation.resident_blocks,
            parts=shares.part_messages(reservation.shares),
            facts=shares.facts_message(reservation.facts) if reservation.facts is not None else None,
            timeout_ms=max(1, int(reservation.timeout_s * 1000)),
            node=reservation.node,
            boot_id=reservation.boot_id,
            waited_ms=int(reservation.waited_s * 1000),
            places=places.message_of(reservation.places),
        )
        timeout_s = min(reservation.timeout_s, RESERVE_S)
        reply = await self._answer(lambda: self.stub.Reserve(request, timeout=timeout_s), waits=True)
        ticket = convert.ticket_from(reply.ticket)
        if ticket.boot_id != route.boot_id:
            self.gone(f"{self.node} restarted")
            raise PeerUnreachable(f"{self.node} restarted: boot {route.boot_id} became {ticket.boot_id}")
        plan = shares.plan_from(
            reply.plan, resident_blocks=reservation.resident_blocks, hit_blocks=reservation.hit_blocks
        )
        return Reserved(ticket, reply.push_sink, route, plan, shares.depth_from(reply.depth))

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        request = node_pb2.SetPrefixRequest(
            ticket=convert.ticket_message(ticket),
            prefix_blocks=prefix_blocks,
            helped=shares.helped_messages(helped),
        )
        reply = await self._answer(lambda: self.stub.SetPrefix(request, timeout=RESERVE_S), waits=True)
        if len(reply.assembly_sinks) != len(helped):
            raise PeerUnreachable(
                f"{self.node} opened {len(reply.assembly_sinks)} sinks for {len(helped)} helped parts"
            )
        return list(reply.assembly_sinks)

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        part = RemotePart(self, order, listener)
        part.open(opening_message(order, node=self._own_node, boot_id=self._boot_id))
        return part

    async def depth(self) -> PeerDepth:
        """A node that is late has much to do; it is not taken for a dead one."""
        route = await self.route()
        request = node_pb2.ReadDepthRequest(node=self._own_node)
        reply = await self._answer(lambda: self.stub.ReadDepth(request, timeout=DEPTH_S), waits=True)
        return PeerDepth(shares.depth_from(reply.depth), reply.helps, reply.help_free_bytes, route.boot_id)

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        request = node_pb2.ReleaseTicketRequest(
            ticket=convert.ticket_message(ticket), reason=convert.reason_number(reason)
        )
        try:
            await self._answer(lambda: self.stub.ReleaseTicket(request, timeout=CALL_S))
        except KvmoverError as error:
            log.info("ticket %d of %s was not released: %s", ticket.ticket_id, self.node, error)

    async def return_ticket(self, ticket: Ticket) -> None:
        request = node_pb2.ReleaseTicketRequest(
            ticket=convert.ticket_message(ticket), reason=convert.reason_number(Reason.POOL_EXHAUSTED), again=True
        )
        await self._answer(lambda: self.stub.ReleaseTicket(request, timeout=CALL_S))

    async def purged(self, request: node_pb2.PurgedRequest) -> None:
        """Only a hint: a node that is not there is not asked again."""
        if self._breaker.wait_s(time.monotonic()) > 0:
            return
        try:
            await self._answer(lambda: self.stub.Purged(request, timeout=PURGED_S))
        except KvmoverError as error:
            log.info("%s was not told of a purge: %s", self.node, error)

    async def connect_queue_pair(self, route: Route, offer: Offer) -> Answer:
        """The other end of a link, made by the boot that `route` leads to. Raises `KvmoverError`."""
        request = queue_pairs.offer_message(self._own_node, self._boot_id, route.key, offer)
        return queue_pairs.answer_from(
            await self._answer(lambda: self.stub.ConnectQueuePair(request, timeout=CONNECT_S))
        )

    async def stop_part(self, part: int) -> None:
        """Returns when the reader sends nothing any more. Raises `KvmoverError`."""
        request = node_pb2.StopPartRequest(node=self._own_node, boot_id=self._boot_id, part=part)
        await self._answer(lambda: self.stub.StopPart(request, timeout=STOP_S))

    async def close(self) -> None:
        """Nobody is told: this node goes."""
        if self._watch is not None:
            self._watch.close()
            await self._watch.closed()
        await self._channel.close()

    async def _answer(self, begin: Callable[[], grpc.aio.UnaryUnaryCall[Any, Reply]], *, waits: bool = False) -> Reply:
        """`waits`: the node may take as long as the request has, so a late answer says nothing about the node."""
        call = begin()
        self._calls.add(call)
        try:
            reply = await call
        except grpc.aio.AioRpcError as error:
            raise self.judged(error, waits=waits) from error
        except asyncio.CancelledError:
            if call in self._calls:
                raise
            raise PeerUnreachable(f"{self.node} at {self.address} went away meanwhile") from None
        finally:
            self._calls.discard(call)
        self._breaker.on_success()
        return reply

    def judged(self, error: grpc.aio.AioRpcError, *, waits: bool) -> KvmoverError:
        """What a failed call means. A node that does not answer opens the breaker in the end; one that refuses is well."""
        rebuilt = from_call(error)
        if error_info(error) is not None:
            self._breaker.on_success()
            return rebuilt
        if not isinstance(rebuilt, PeerUnreachable):
            return rebuilt
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or not waits:
            self._breaker.on_failure(time.monotonic())
        return PeerUnreachable(f"{self.node} at {self.address}: {rebuilt}")

    def _changed(self, state: str, message: str) -> None:
        if state != self.state:
            self.state = state
            self._observer.peer_changed(self.node, state, message)


def _looked_at(hello: asyncio.Task[Route]) -> None:
    """Whoever waited for it may be gone; what went wrong is told by `state`."""
    if not hello.cancelled():
        hello.exception()
