"""Engine API: messages in, the node's words, messages out. No rule lives here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, TypeVar

import grpc.aio

from kvmover_proto import engine_pb2, engine_pb2_grpc
from kvmoverd.core.errors import BadRequest, UnknownSession
from kvmoverd.core.keys import split_keys
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Call, Driver
from kvmoverd.node.node import Node
from kvmoverd.node.outbox import Outbox, Told
from kvmoverd.node.prefill import Plan
from kvmoverd.node.progress import ProgressEntry
from kvmoverd.node.sessions import Session
from kvmoverd.ports.connection import RdmaFacts
from kvmoverd.ports.membership import MembershipState
from kvmoverd.rpc import convert, shares
from kvmoverd.rpc.guard import answering, streaming
from kvmoverd.rpc.node_status import membership_message, room_messages, status_reply
from kvmoverd.rpc.plan_calls import first_plan, taking_computed
from kvmoverd.rpc.scheduler_relay import RelayedCalls, SchedulerSide
from kvmoverd.rpc.store_calls import chains_of

SESSION_KEY = "kvmover-session-bin"
LEASES_MAX = 4096
EXPECTED_MS_MAX = 3_600_000
ALWAYS = frozenset({"Cancel", "Drain", "NodeStatus", "PullWork", "Release", "Renew", "Withdraw"})
"""Let through when the server is full: a leader that could not pull would be taken for dead."""

Context = grpc.aio.ServicerContext[Any, Any]
Event = TypeVar("Event")


class EngineService(RelayedCalls, engine_pb2_grpc.EngineServicer):
    """Every call runs for the session whose token it carries."""

    def __init__(
        self,
        node: Node,
        describe: Callable[[], dict[str, str]],
        *,
        sent_bytes: Callable[[], Mapping[str, int]],
        on_drain: Callable[[], Awaitable[None]],
        rdma: Callable[[], RdmaFacts] | None = None,
        scheduler: SchedulerSide | None = None,
        membership: Callable[[], MembershipState],
    ) -> None:
        """`sent_bytes`: KV bytes sent to each node. `on_drain`: told when new requests are no longer taken.

        `rdma`: what there is to tell of CNICs, where the node has them. `scheduler`: of a node that belongs to one.
        `membership`: how well the other nodes are known.
        """
        super().__init__(scheduler)
        self._node = node
        self._describe = describe
        self._sent_bytes = sent_bytes
        self._on_drain = on_drain
        self._rdma = rdma
        self._membership = membership

    @answering
    async def RegisterModel(
        self, request: engine_pb2.RegisterModelRequest, context: Context
    ) -> engine_pb2.RegisterModelReply:
        self._session(context)
        namespace = await self._node.namespaces.register(convert.manifest_of(request.manifest))
        return engine_pb2.RegisterModelReply(
            fingerprint=namespace.fingerprint,
            block_bytes=namespace.layout.block_bytes,
            slots_max=self._node.services.pool.slots_max(namespace.layout),
        )

    @answering
    async def BumpEpoch(self, request: engine_pb2.BumpEpochRequest, context: Context) -> engine_pb2.BumpEpochReply:
        self._session(context)
        successor = await self._node.namespaces.bump_epoch(self._namespace(request.fingerprint))
        return engine_pb2.BumpEpochReply(epoch=successor.manifest.epoch, fingerprint=successor.fingerprint)

    @answering
    async def PurgeNamespace(
        self, request: engine_pb2.PurgeNamespaceRequest, context: Context
    ) -> engine_pb2.PurgeNamespaceReply:
        self._session(context)
        blocks, size_bytes = await self._node.namespaces.purge(self._namespace(request.fingerprint))
        return engine_pb2.PurgeNamespaceReply(purged_bytes=size_bytes, purged_blocks=blocks)

    @answering
    async def PurgeTenant(
        self, request: engine_pb2.PurgeTenantRequest, context: Context
    ) -> engine_pb2.PurgeTenantReply:
        self._session(context)
        blocks, size_bytes = await self._node.namespaces.purge_tenant(request.tenant)
        return engine_pb2.PurgeTenantReply(purged_bytes=size_bytes, purged_blocks=blocks)

    @answering
    async def RegisterRegion(
        self, request: engine_pb2.RegisterRegionRequest, context: Context
    ) -> engine_pb2.RegisterRegionReply:
        session = self._session(context)
        layers = convert.region_layers_of(request.layers)
        namespace = self._namespace(request.fingerprint)
        share = convert.gpu_share_of(request)
        near = convert.near_of(request)
        ticket = await self._node.gpu_shared(session, share) if share is not None else request.fd_ticket
        try:
            geometry = await self._node.region_geometry(session, ticket, namespace, layers)
            await self._node.adopt_region(session, ticket, near)
            region = self._node.register_region(session, ticket, namespace, geometry)
        finally:
            if share is not None:
                # Nobody else knows its ticket: unless it is registered now, it never will be.
                self._node.drop_fd(session.session_id, ticket)
        return engine_pb2.RegisterRegionReply(
            region_id=region.region_id,
            pages=region.geometry.pages,
            pages_per_block=region.geometry.pages_per_block,
        )

    @answering
    async def UnregisterRegion(
        self, request: engine_pb2.UnregisterRegionRequest, context: Context
    ) -> engine_pb2.UnregisterRegionReply:
        quiet = await self._node.unregister_region(self._session(context), request.region_id)
        return engine_pb2.UnregisterRegionReply(pages_quiet=quiet)

    @answering
    async def Lookup(self, request: engine_pb2.LookupRequest, context: Context) -> engine_pb2.LookupReply:
        self._session(context)
        keys = split_keys(request.block_keys)
        looked = await self._node.namespaces.lookup(self._namespace(request.fingerprint), keys)
        return engine_pb2.LookupReply(
            prefix_blocks=looked.prefix_blocks,
            pooled_blocks=looked.pooled_blocks,
            starved_to=sorted(self._node.starved_nodes()),
            starved_from=sorted(self._node.peers.starved_from()) if self._node.peers is not None else (),
            reader=shares.depth_message(self._node.services.reader.depth()),
            rooms=room_messages(self._node.services.room),
        )

    @streaming
    async def FetchBlocks(
        self, request: engine_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncGenerator[engine_pb2.FetchEvent, None]:
        session = self._session(context)
        call = self._call(session, request.request_id, request.attempt, request.timeout_ms)
        limits = self._node.services.limits
        region = session.region(request.region_id) if request.region_id else None
        driver = self._node.fetch(
            call,
            self._namespace(request.fingerprint),
            split_keys(request.block_keys),
            FetchKind.PAGES if region is not None else FetchKind.LEASE,
            lease_s=convert.seconds("lease_ms", request.lease_ms, limits.lease_default_s, limits.timeout_max_s),
            region=region,
            pages=convert.pages_of(request.pages, region) if region is not None else None,
        )
        async with aclosing(_events(driver, convert.fetch_event)) as events:
            async for event in events:
                yield event

    @streaming
    async def StreamLayers(
        self, requests: AsyncIterator[engine_pb2.StreamLayersRequest], context: Context
    ) -> AsyncGenerator[engine_pb2.StreamEvent, None]:
        session = self._session(context)
        message = await first_plan(requests)
        with _claiming(session, message) as entry:
            driver = self._node.stream(self._plan(session, message))
        _report(driver.outbox, entry)
        async with (
            taking_computed(requests, driver, driver.request, entry),
            aclosing(_events(driver, convert.stream_event)) as events,
        ):
            async for event in events:
                yield event

    @streaming
    async def PushLayers(
        self, requests: AsyncIterator[engine_pb2.PushLayersRequest], context: Context
    ) -> AsyncGenerator[engine_pb2.PushEvent, None]:
        session = self._session(context)
        message = await first_plan(requests)
        with _claiming(session, message) as entry:
            driver = self._node.push(self._plan(session, message))
        _report(driver.outbox, entry)
        async with (
            taking_computed(requests, driver, driver.request, entry),
            aclosing(_events(driver, convert.push_event)) as events,
        ):
            async for event in events:
                yield event

    @streaming
    async def AssembleBlocks(
        self, request: engine_pb2.AssembleBlocksRequest, context: Context
    ) -> AsyncGenerator[engine_pb2.AssembleEvent, None]:
        session = self._session(context)
        call = self._call(session, request.request_id, request.attempt, request.timeout_ms)
        namespace = self._namespace(request.fingerprint)
        side = self._node.decode_side
        outbox = side.attach(namespace, call.request_id, call.attempt, session.session_id, call.timeout_s)
        over = False
        try:
            while (told := await outbox.get()) is not None:
                yield convert.assemble_event(told)
            over = True
        finally:
            if not over:
                self._node.cancel(call.request_id, call.attempt, session.session_id)

    @streaming
    async def Deliver(
        self, request: engine_pb2.DeliverRequest, context: Context
    ) -> AsyncGenerator[engine_pb2.DeliverEvent, None]:
        session = self._session(context)
        convert.checked_request(request.request_id, request.attempt)
        region = session.region(request.region_id)
        pages = convert.pages_of(request.pages, region)
        with _claiming(session, request) as entry:
            outbox = self._node.decode_side.deliver(
                request.request_id, request.attempt, region, pages, session.session_id
            )
        _report(outbox, entry)
        try:
            while (told := await outbox.get()) is not None:
                yield convert.deliver_event(told)
        finally:
            self._node.decode_side.end_delivery(request.request_id, request.attempt, session.session_id)

    @streaming
    async def StoreBlocks(
        self, request: engine_pb2.StoreBlocksRequest, context: Context
    ) -> AsyncGenerator[engine_pb2.StoreEvent, None]:
        session = self._session(context)
        call = self._call(session, request.request_id, request.attempt, request.timeout_ms)
        chains, region = chains_of(request), session.region(request.region_id)
        pages = convert.pages_of(request.pages, region)
        driver = self._node.store(call, self._namespace(request.fingerprint), chains, region, pages)
        async with aclosing(_events(driver, lambda told: convert.store_event(told, len(driver.blocks)))) as events:
            async for event in events:
                yield event

    @answering
    async def Prefetch(self, request: engine_pb2.PrefetchRequest, context: Context) -> engine_pb2.PrefetchReply:
        session = self._session(context)
        keys, namespace = split_keys(request.block_keys), self._namespace(request.fingerprint)
        if request.expected_in_ms > EXPECTED_MS_MAX:
            raise BadRequest(f"expected_in_ms is {request.expected_in_ms}, at most {EXPECTED_MS_MAX} are taken")
        accepted = self._node.prefetch(session.session_id, namespace, keys, request.expected_in_ms / 1000)
        return engine_pb2.PrefetchReply(accepted_blocks=accepted)

    @answering
    async def Pin(self, request: engine_pb2.PinRequest, context: Context) -> engine_pb2.PinReply:
        self._session(context)
        keys = split_keys(request.block_keys)
        pinned = self._node.namespaces.pin(self._namespace(request.fingerprint), keys, request.pin_ms / 1000)
        return engine_pb2.PinReply(pinned_blocks=pinned)

    @answering
    async def Renew(self, request: engine_pb2.RenewRequest, context: Context) -> engine_pb2.RenewReply:
        session = self._session(context)
        limits = self._node.services.limits
        lease_s = convert.seconds("lease_ms", request.lease_ms, limits.lease_default_s, limits.timeout_max_s)
        renewed = self._node.leases.renew(session.session_id, _lease_refs(request.leases), lease_s)
        return engine_pb2.RenewReply(renewed=renewed)

    @answering
    async def Release(self, request: engine_pb2.ReleaseRequest, context: Context) -> engine_pb2.ReleaseReply:
        session = self._session(context)
        released = self._node.leases.release(session.session_id, _lease_refs(request.leases))
        return engine_pb2.ReleaseReply(released=released)

    @answering
    async def Cancel(self, request: engine_pb2.CancelRequest, context: Context) -> engine_pb2.CancelReply:
        session = self._session(context)
        convert.checked_request(request.request_id, request.attempt)
        cancelled = self._node.cancel(request.request_id, request.attempt, session.session_id)
        return engine_pb2.CancelReply(cancelled_calls=cancelled)

    @answering
    async def NodeStatus(self, request: engine_pb2.NodeStatusRequest, context: Context) -> engine_pb2.NodeStatusReply:
        rdma = self._rdma() if self._rdma is not None else None
        reply = status_reply(self._node, self._describe(), self._sent_bytes(), rdma)
        if self._scheduler is not None:
            reply.scheduler.CopyFrom(self._scheduler.status())
        reply.membership.CopyFrom(membership_message(self._membership()))
        return reply

    @answering
    async def Drain(self, request: engine_pb2.DrainRequest, context: Context) -> engine_pb2.DrainReply:
        running = self._node.drain()
        await self._on_drain()
        return engine_pb2.DrainReply(running_requests=running)

    def _session(self, context: Context) -> Session:
        for name, value in context.invocation_metadata() or ():
            if name == SESSION_KEY:
                return self._node.sessions.by_token(value if isinstance(value, bytes) else value.encode())
        raise UnknownSession(f"the call carries no {SESSION_KEY}")

    def _namespace(self, fingerprint: bytes) -> Namespace:
        return self._node.models.get(convert.checked_fingerprint(fingerprint))

    def _call(self, session: Session, request_id: str, attempt: int, timeout_ms: int) -> Call:
        convert.checked_request(request_id, attempt)
        limits = self._node.services.limits
        timeout_s = convert.seconds("timeout_ms", timeout_ms, limits.timeout_default_s, limits.timeout_max_s)
        return Call(request_id, attempt, session.session_id, timeout_s)

    def _plan(self, session: Session, message: engine_pb2.RequestPlan) -> Plan:
        region = session.region(message.region_id)
        return Plan(
            call=self._call(session, message.request_id, message.attempt, message.timeout_ms),
            namespace=self._namespace(message.fingerprint),
            keys=split_keys(message.block_keys),
            tail_tokens=message.tail_tokens,
            hit_blocks=message.hit_blocks,
            decode_node=message.decode_node,
            path=convert.path_of(message.path, needed=message.hit_blocks > message.resident_blocks),
            region=region,
            page_sets=convert.page_sets_of(message.page_sets, region),
            resident_blocks=message.resident_blocks,
            shares=shares.shares_from(message.parts, blocks_max=message.hit_blocks),
            helpers=shares.helpers_from(message.helpers),
            no_helpers=message.no_helpers,
        )


def _lease_refs(leases: Sequence[engine_pb2.LeaseRef]) -> list[tuple[int, int]]:
    if len(leases) > LEASES_MAX:
        raise BadRequest(f"{len(leases)} leases in one call, at most {LEASES_MAX} are taken")
    return [(lease.lease_id, lease.lease_generation) for lease in leases]


def _claiming(
    session: Session, message: engine_pb2.RequestPlan | engine_pb2.DeliverRequest
) -> AbstractContextManager[ProgressEntry | None]:
    """The entry that the call names, if it names one. Raises `BadRequest`."""
    if not message.progress_entry:
        return nullcontext()
    if session.progress is None:
        raise BadRequest(f"progress_entry is {message.progress_entry}, this session has no progress page")
    return session.progress.claiming(message.progress_entry, message.progress_generation)


def _report(outbox: Outbox, entry: ProgressEntry | None) -> None:
    if entry is not None:
        outbox.report_to(entry)


async def _events(driver: Driver, translate: Callable[[Told], Event]) -> AsyncGenerator[Event, None]:
    """The events of a request; when the caller goes away, the request is cancelled."""
    try:
        while (told := await driver.outbox.get()) is not None:
            yield translate(told)
    finally:
        driver.stop(Reason.CANCELLED, "the caller went away")
