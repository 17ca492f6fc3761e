"""The asyncio client of a node's daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from typing import Self

from kvmover_client import wire
from kvmover_client.calls import AssembleCall, DeliverCall, FetchCall, PushCall, StoreCall, StreamCall
from kvmover_client.companion import Welcome
from kvmover_client.cuda import CudaMemory, CudaRegion
from kvmover_client.keys import packed
from kvmover_client.link import Link
from kvmover_client.memory import Geometry, Region, RegionMemory
from kvmover_client.progress import an_entry
from kvmover_client.scheduler_desk import Desk
from kvmover_client.submitting import SchedulerCalls
from kvmover_client.words import Lease, LookupResult, Manifest, Model, Plan, Purged, StoreChain
from kvmover_proto import engine_pb2

ENDPOINT_DEFAULT = "unix:///run/kvmoverd/kvmoverd.sock"
ENDPOINT_VARIABLE = "KVMOVER_ENDPOINT"
CONNECT_S = 10.0
ANSWER_S = 10.0
CUDA_S = 40.0
REQUEST_S = 60.0
UNREGISTER_S = 15.0
CALLS_MAX = 4096

AnyRegion = Region | CudaRegion


class AsyncClient(SchedulerCalls):
    """One session with the daemon of this node, for one engine. Use it from one event loop.

    Short calls return their answer; long ones return a call object at once, whose awaitables tell what happened. Every
    wait has a deadline. When the daemon goes, all of them fail with `DaemonGone` at once; after `reconnect()` or a new
    `connect()` models and regions must be registered again. Requests that were given to the scheduler are not lost with it:
    see `Submitted`.
    """

    def __init__(self, link: Link, welcome: Welcome, *, endpoint: str, name: str, progress_page: bool) -> None:
        """Use `connect`."""
        self._progress_page = progress_page
        self.endpoint = endpoint
        self.name = name
        self._link = link
        self._welcome = welcome
        self._desk = Desk(lambda: self._link, endpoint, name)

    @classmethod
    async def connect(
        cls,
        endpoint: str = "",
        *,
        name: str = "engine",
        timeout_s: float = CONNECT_S,
        progress_page: bool = True,
    ) -> Self:
        """Opens a session; while no daemon listens, tries again until `timeout_s` has passed.

        `endpoint`: "unix:///PATH" of the engine API, by default that of KVMOVER_ENDPOINT, or else that of a packaged
        daemon. `name` is for logs. `progress_page`: layers are told through shared memory where the daemon offers it, and
        not by a message each. Raises `DaemonGone`, `Refused`, `TimedOut`, `BadRequest`.
        """
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE, "") or ENDPOINT_DEFAULT
        link, welcome = await Link.open(
            endpoint, name=name, timeout_s=timeout_s, calls_max=CALLS_MAX, progress_page=progress_page
        )
        return cls(link, welcome, endpoint=endpoint, name=name, progress_page=progress_page)

    async def reconnect(self, timeout_s: float = CONNECT_S) -> None:
        """Ends the session and opens a new one, as `connect` does. Nothing that was registered is carried over."""
        await self._link.close()
        self._link, self._welcome = await Link.open(
            self.endpoint,
            name=self.name,
            timeout_s=timeout_s,
            calls_max=CALLS_MAX,
            progress_page=self._progress_page,
        )
        await self._desk.use_own()

    async def close(self) -> None:
        """Ends the session: running calls fail, the daemon lets go of regions and leases.

        What it copies just then may still land in their pages for a moment. Who goes on using the memory cancels them first and
        awaits `quiet()`, or unregisters the regions.
        """
        await self._desk.close()
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """Name of the session in the daemon's log."""
        return self._welcome.session_id

    @property
    def boot_id(self) -> str:
        """Changes with each start of the daemon."""
        return self._welcome.boot_id

    @property
    def is_gone(self) -> bool:
        """True once the session is over."""
        return self._link.is_gone

    async def register_model(self, manifest: Manifest, *, timeout_s: float = ANSWER_S) -> Model:
        """Makes a namespace known and opens it in the store. Idempotent. Raises `BadManifest`, `StaleEpoch`, `Refused`."""
        request = engine_pb2.RegisterModelRequest(manifest=wire.manifest_message(manifest))
        link = self._link
        reply = await link.ask(link.stub.RegisterModel, request, timeout_s, "register_model")
        return Model(manifest, reply.fingerprint, reply.block_bytes, reply.slots_max)

    async def bump_epoch(self, model: Model, *, timeout_s: float = ANSWER_S) -> Model:
        """Retires every block of the namespace; the model of the next epoch, which is registered and empty."""
        request = engine_pb2.BumpEpochRequest(fingerprint=model.fingerprint)
        link = self._link
        reply = await link.ask(link.stub.BumpEpoch, request, timeout_s, "bump_epoch")
        manifest = dataclasses.replace(model.manifest, epoch=reply.epoch)
        return dataclasses.replace(model, manifest=manifest, fingerprint=reply.fingerprint)

    async def purge_namespace(self, model: Model, *, timeout_s: float = REQUEST_S) -> Purged:
        """Deletes the namespace's blocks: invisible when this returns, bytes freed in the background."""
        request = engine_pb2.PurgeNamespaceRequest(fingerprint=model.fingerprint)
        link = self._link
        reply = await link.ask(link.stub.PurgeNamespace, request, timeout_s, "purge_namespace")
        return Purged(reply.purged_blocks, reply.purged_bytes)

    async def purge_tenant(self, tenant: str, *, timeout_s: float = REQUEST_S) -> Purged:
        """As `purge_namespace`, of every namespace of the tenant that the store has. Raises `BadRequest` for an empty one."""
        request = engine_pb2.PurgeTenantRequest(tenant=tenant)
        link = self._link
        reply = await link.ask(link.stub.PurgeTenant, request, timeout_s, "purge_tenant")
        return Purged(reply.purged_blocks, reply.purged_bytes)

    async def register_region(
        self,
        memory: RegionMemory,
        geometry: Geometry,
        model: Model,
        *,
        gpu_pci_address: str = "",
        numa_node: int | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Region:
        """Makes memory usable by the daemon, which maps it too. Raises `BadRegion`, `UnknownModel`, `Refused`.

        `gpu_pci_address`, as of nvidia-smi, and `numa_node` say where it is used: a node with several RDMA NICs takes the
        nearest one. With RDMA this takes about a second for some gigabytes.
        """
        link = self._link
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        ticket = await link.companion.pass_fd(memory.fileno(), memory.name, timeout_s)
        request = engine_pb2.RegisterRegionRequest(
            fd_ticket=ticket,
            fingerprint=model.fingerprint,
            layers=wire.region_layers(geometry),
            gpu_pci_address=gpu_pci_address,
            numa_node=numa_node,
        )
        left_s = max(0.0, deadline_s - loop.time())
        reply = await link.ask(link.stub.RegisterRegion, request, left_s, "register_region")
        return Region(reply.region_id, reply.pages, reply.pages_per_block, memory, geometry)

    async def register_cuda_region(
        self, memory: CudaMemory, geometry: Geometry, model: Model, *, timeout_s: float = CUDA_S
    ) -> CudaRegion:
        """Makes GPU memory usable by the daemon, which opens it too: its first one takes a second or some.

        Where the daemon can't: `NoCuda`, and memory of the host is the way. Raises `BadRegion`, `UnknownModel`, too.
        """
        request = engine_pb2.RegisterRegionRequest(
            fingerprint=model.fingerprint, layers=wire.region_layers(geometry), cuda=wire.cuda_message(memory)
        )
        link = self._link
        reply = await link.ask(link.stub.RegisterRegion, request, timeout_s, "register_cuda_region")
        return CudaRegion(reply.region_id, reply.pages, reply.pages_per_block, memory, geometry)

    async def unregister_region(self, region: AnyRegion, *, timeout_s: float = UNREGISTER_S) -> bool:
        """Cancels what uses the region. False: the daemon still touches it, so unmap or free nothing and ask again."""
        request = engine_pb2.UnregisterRegionRequest(region_id=region.region_id)
        link = self._link
        reply = await link.ask(link.stub.UnregisterRegion, request, timeout_s, "unregister_region")
        return reply.pages_quiet

    async def lookup(self, model: Model, keys: Sequence[bytes], *, timeout_s: float = ANSWER_S) -> LookupResult:
        """Longest stored prefix of the keys. Holds nothing: a block found here may still miss when it is read."""
        request = engine_pb2.LookupRequest(fingerprint=model.fingerprint, block_keys=packed(keys))
        link = self._link
        return wire.lookup_result(await link.ask(link.stub.Lookup, request, timeout_s, "lookup"))

    async def prefetch(
        self, model: Model, keys: Sequence[bytes], *, expected_in_s: float = 0.0, timeout_s: float = ANSWER_S
    ) -> int:
        """Hints that these will be wanted in so many seconds: they are read when the storage has nothing else to do.

        How many leading blocks are there, or will be; the others were dropped. Raises `BadRequest` for more than an hour.
        """
        request = engine_pb2.PrefetchRequest(
            fingerprint=model.fingerprint, block_keys=packed(keys), expected_in_ms=wire.expected(expected_in_s)
        )
        link = self._link
        return (await link.ask(link.stub.Prefetch, request, timeout_s, "prefetch")).accepted_blocks

    async def pin(self, model: Model, keys: Sequence[bytes], *, pin_s: float, timeout_s: float = ANSWER_S) -> int:
        """Keeps stored blocks from being dropped for lack of room for `pin_s` seconds from now, a week at most.

        0: no longer. How many of them are known to be stored; the others are not pinned.
        """
        pin_ms = wire.milliseconds(pin_s) if pin_s else 0
        request = engine_pb2.PinRequest(fingerprint=model.fingerprint, block_keys=packed(keys), pin_ms=pin_ms)
        link = self._link
        return (await link.ask(link.stub.Pin, request, timeout_s, "pin")).pinned_blocks

    async def fetch_blocks(
        self,
        request_id: str,
        attempt: int,
        model: Model,
        keys: Sequence[bytes],
        *,
        region: AnyRegion | None = None,
        pages: Sequence[int] = (),
        lease_s: float | None = None,
        timeout_s: float = REQUEST_S,
    ) -> FetchCall:
        """Full Blocks into `pages` of `region`, or, without one, into the pool under a lease of `lease_s`.

        `lease_s` None: the daemon's default.
        """
        request = engine_pb2.FetchBlocksRequest(
            request_id=request_id,
            attempt=attempt,
            fingerprint=model.fingerprint,
            block_keys=packed(keys),
            timeout_ms=wire.milliseconds(timeout_s),
            region_id=region.region_id if region is not None else 0,
            pages=wire.page_set(pages) if region is not None else None,
            lease_ms=wire.milliseconds(lease_s) if lease_s is not None else 0,
        )
        link = self._link
        return FetchCall(link, link.stub.FetchBlocks, request, name=(request_id, attempt), timeout_s=timeout_s)

    async def stream_layers(self, plan: Plan) -> StreamCall:
        """Prefill side: the hit prefix into the plan's pages, layer by layer. `plan.timeout_s` bounds the request."""
        link, name = self._link, (plan.request_id, plan.attempt)
        with an_entry(link.pages) as entry:
            request = engine_pb2.StreamLayersRequest(plan=wire.plan_message(plan, entry))
            method = link.stub.StreamLayers
            return StreamCall(link, method, request, name=name, timeout_s=plan.timeout_s, entry=entry)

    async def push_layers(self, plan: Plan) -> PushCall:
        """Prefill side: layers, once computed, into the decode node's buffer. The plan is that of `stream_layers`."""
        link, name = self._link, (plan.request_id, plan.attempt)
        with an_entry(link.pages) as entry:
            request = engine_pb2.PushLayersRequest(plan=wire.plan_message(plan, entry))
            return PushCall(link, link.stub.PushLayers, request, name=name, timeout_s=plan.timeout_s, entry=entry)

    async def assemble_blocks(
        self, request_id: str, attempt: int, model: Model, timeout_s: float = REQUEST_S
    ) -> AssembleCall:
        """Decode side: attach to a request's buffer on this node. Takes no pages."""
        request = engine_pb2.AssembleBlocksRequest(
            request_id=request_id,
            attempt=attempt,
            fingerprint=model.fingerprint,
            timeout_ms=wire.milliseconds(timeout_s),
        )
        link = self._link
        return AssembleCall(link, link.stub.AssembleBlocks, request, name=(request_id, attempt), timeout_s=timeout_s)

    async def deliver(
        self, request_id: str, attempt: int, region: AnyRegion, pages: Sequence[int], timeout_s: float = REQUEST_S
    ) -> DeliverCall:
        """Decode side: a whole buffer into pages for all blocks and the tail, in token order.

        The daemon bounds it by the time of the assembly; `timeout_s` bounds the waiting here. Its waits raise `NotWhole`
        when it came too early.
        """
        link, name = self._link, (request_id, attempt)
        with an_entry(link.pages) as entry:
            request = wire.deliver_message(request_id, attempt, region.region_id, pages, entry)
            return DeliverCall(link, link.stub.Deliver, request, name=name, timeout_s=timeout_s, entry=entry)

    async def store_blocks(
        self,
        request_id: str,
        attempt: int,
        model: Model,
        keys: Sequence[bytes],
        parent_key: bytes,
        first_depth: int,
        region: AnyRegion,
        pages: Sequence[int],
        *,
        timeout_s: float = REQUEST_S,
    ) -> StoreCall:
        """Consecutive full blocks of one chain out of pages into storage.

        `parent_key`: that of the block before the first, or `ROOT`; `first_depth`: position of the first block, from 0.
        """
        chains = [StoreChain(keys, parent_key, first_depth)]
        return await self.store_chains(request_id, attempt, model, chains, region, pages, timeout_s=timeout_s)

    async def store_chains(
        self,
        request_id: str,
        attempt: int,
        model: Model,
        chains: Sequence[StoreChain],
        region: AnyRegion,
        pages: Sequence[int],
        *,
        timeout_s: float = REQUEST_S,
    ) -> StoreCall:
        """As `store_blocks`, for blocks of many sequences that fill at the same time: one call for all of them.

        `pages` and the result have the blocks of all chains, one chain after the other. Raises `BadRequest` for no chain, or
        an empty one among several.
        """
        request = wire.store_message(request_id, attempt, model, chains, region.region_id, pages, timeout_s)
        link = self._link
        return StoreCall(link, link.stub.StoreBlocks, request, name=(request_id, attempt), timeout_s=timeout_s)

    async def renew(
        self, leases: Sequence[Lease], *, lease_s: float | None = None, timeout_s: float = ANSWER_S
    ) -> list[bool]:
        """Extends leases by `lease_s` from now (None: the daemon's default). False: expired, its blocks may be gone."""
        lease_ms = wire.milliseconds(lease_s) if lease_s is not None else 0
        request = engine_pb2.RenewRequest(leases=wire.lease_refs(leases), lease_ms=lease_ms)
        link = self._link
        return list((await link.ask(link.stub.Renew, request, timeout_s, "renew")).renewed)

    async def release(self, leases: Sequence[Lease], *, timeout_s: float = ANSWER_S) -> int:
        """Gives leases back; how many were held."""
        request = engine_pb2.ReleaseRequest(leases=wire.lease_refs(leases))
        link = self._link
        return (await link.ask(link.stub.Release, request, timeout_s, "release")).released

    async def cancel(self, request_id: str, attempt: int, *, timeout_s: float = ANSWER_S) -> int:
        """Ends all calls of a request on this node, up to this attempt; how many. Each still has its last word."""
        request = engine_pb2.CancelRequest(request_id=request_id, attempt=attempt)
        link = self._link
        return (await link.ask(link.stub.Cancel, request, timeout_s, "cancel")).cancelled_calls

    async def node_status(self, *, timeout_s: float = ANSWER_S) -> engine_pb2.NodeStatusReply:
        """The node's counters and queues, as the API's own message, which explains each field."""
        link = self._link
        return await link.ask(link.stub.NodeStatus, engine_pb2.NodeStatusRequest(), timeout_s, "node_status")

    async def drain(self, *, timeout_s: float = ANSWER_S) -> int:
        """The daemon takes no new requests from here on; how many run."""
        link = self._link
        return (await link.ask(link.stub.Drain, engine_pb2.DrainRequest(), timeout_s, "drain")).running_requests
