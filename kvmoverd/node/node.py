"""The node: what engines and other nodes may ask of it, in the core's words. `rpc` translates."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial

from kvmoverd.core.drops import Drop
from kvmoverd.core.errors import (
    BadPlan,
    BadRequest,
    KvmoverError,
    QueueFull,
    StorageUnusable,
    UnknownPeer,
    UnknownRegion,
)
from kvmoverd.core.geometry import RegionGeometry, Segment
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.driver import Call
from kvmoverd.node.fetching import FetchDriver
from kvmoverd.node.gpu_opening import OpenGpu, given_back, open_beside
from kvmoverd.node.helper_book import HelperBook
from kvmoverd.node.helping import HelperSide
from kvmoverd.node.lane_watch import LaneReport
from kvmoverd.node.leasing import LeaseBook
from kvmoverd.node.models import Models
from kvmoverd.node.namespaces import Namespaces
from kvmoverd.node.parts import PartBook
from kvmoverd.node.peer import Peer, Peers
from kvmoverd.node.plan_checks import checked_plan
from kvmoverd.node.prefetching import Prefetcher
from kvmoverd.node.prefill import Plan
from kvmoverd.node.prefills import Prefills
from kvmoverd.node.pushing import PushDriver
from kvmoverd.node.requests import Requests
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import FDS_PENDING_MAX, REGIONS_MAX, Pages, Region, Session, Sessions
from kvmoverd.node.storing import Chain, Chains, StoreDriver
from kvmoverd.node.streaming import StreamDriver
from kvmoverd.node.writer import counting_refused, note_dropped
from kvmoverd.ports.memory import GpuShare, Memory, Near

UNREGISTER_WAIT_S = 10.0
CHECK_S = 30.0
ADOPT_S = 120.0


class Node:
    """One daemon's node. All methods are called on its loop."""

    def __init__(
        self,
        services: Services,
        *,
        sessions: Sessions,
        requests: Requests,
        decode_side: DecodeSide,
        helper_side: HelperSide,
        parts: PartBook,
        leases: LeaseBook,
        map_region: Callable[[int], Memory],
        open_gpu: OpenGpu,
        adopt_region: Callable[[Memory, Near], None] | None = None,
        gpus_over_network: bool = False,
    ) -> None:
        """`adopt_region`: tells the devices of a region before it is used; it blocks. None: they need not know.

        `gpus_over_network`: the transport between nodes reaches GPU memory.
        """
        self.services = services
        self.sessions = sessions
        self.requests = requests
        self.decode_side = decode_side
        self.helper_side = helper_side
        self.parts = parts
        self.leases = leases
        self.prefetcher = Prefetcher(services)
        self.models = Models(self._namespaces_in_use)
        self.peers: Peers | None = None
        self.helper_book: HelperBook | None = None
        self.namespaces = Namespaces(services, self.models, lambda: self.peers)
        self._map_region = map_region
        self._open_gpu = open_gpu
        self._adopt_region = adopt_region
        self._gpus_over_network = gpus_over_network
        self._checking = asyncio.Lock()
        self._adopting = asyncio.Lock()
        self.on_session_ended: list[Callable[[str], None]] = []
        self.prefills = Prefills(services, requests, peers=lambda: self.peers, helpers=lambda: self.helper_book)

    # Sessions and regions ---------------------------------------------------------------------------------------------

    def session_opened(self, client: str, pid: int) -> tuple[Session, bytes]:
        return self.sessions.open(client, pid)

    def fd_received(self, session_id: str, fd: int) -> int:
        """Maps a region's descriptor (the caller keeps and closes `fd`). Raises `BadRegion`, `QueueFull`, `UnknownRegion`."""
        session = self._with_room(session_id)
        ticket = next(self.services.ids)
        self.sessions.keep(session, ticket, self._map_region(fd))
        return ticket

    async def gpu_shared(self, session: Session, share: GpuShare) -> int:
        """Opens a region's GPU memory beside the loop: a ticket for `register_region`. Raises as `fd_received`, and `NoCuda`."""
        self._with_room(session.session_id)
        memory = await open_beside(self.services.off_loop, self._open_gpu, share)
        try:
            self._with_room(session.session_id)
        except KvmoverError:
            memory.close()
            raise
        ticket = next(self.services.ids)
        self.sessions.keep(session, ticket, memory)
        return ticket

    def _with_room(self, session_id: str) -> Session:
        """Raises `UnknownRegion` when the session has ended, `QueueFull` when too much of it waits for its registration."""
        session = self.sessions.by_id(session_id)
        if session is None:
            raise UnknownRegion("the session has ended")
        if len(session.mappings) >= FDS_PENDING_MAX:
            raise QueueFull(
                f"{len(session.mappings)} descriptors wait for RegisterRegion, at most {FDS_PENDING_MAX} may"
            )
        return session

    def session_closed(self, session_id: str, why: str) -> None:
        """The engine is gone: its requests end, its leases and regions go."""
        session = self.sessions.end(session_id)
        if session is None:
            return
        self.services.observer.session_ended(session_id, session.client, why)
        self.requests.stop_session(session_id, why)
        self.decode_side.session_gone(session_id)
        self.prefills.abandon(Reason.ENGINE_GONE, lambda request: request.plan.call.session_id == session_id)
        self.leases.session_gone(session_id)
        self.prefetcher.session_gone(session_id)
        for memory in session.mappings.values():
            memory.close()
        session.mappings.clear()
        for region in list(session.regions.values()):
            region.close(lambda: None)
        session.regions.clear()
        for told in self.on_session_ended:
            told(session_id)

    def drop_fd(self, session_id: str, fd_ticket: int) -> None:
        """A descriptor that was not registered in time."""
        session = self.sessions.by_id(session_id)
        memory = session.mappings.pop(fd_ticket, None) if session is not None else None
        if memory is not None:
            memory.close()

    async def region_geometry(
        self, session: Session, fd_ticket: int, namespace: Namespace, layers: tuple[tuple[Segment, ...], ...]
    ) -> RegionGeometry:
        """Where pages lie in the memory of a ticket, checked. Raises `UnknownRegion`, `BadRegion`.

        Beside the loop and one at a time: thousands of segments take a tenth of a second.
        """
        async with self._checking:
            work = partial(RegionGeometry, namespace.layout, session.mapping(fd_ticket).size_bytes, layers)
            return await self.services.off_loop(work, what="checking a region", timeout_s=CHECK_S)

    async def adopt_region(self, session: Session, fd_ticket: int, near: Near) -> None:
        """Tells the devices of a ticket's memory. Raises `UnknownRegion`, `BadRegion`, and `QueueFull` when they take too long.

        Beside the loop and one at a time: they keep the interpreter's lock for some milliseconds at a time. What took too
        long goes on, and stays so until the memory goes: the next try finds it done.
        """
        if self._adopt_region is None:
            return
        async with self._adopting:
            memory = session.mapping(fd_ticket)
            work = partial(self._adopt_region, memory, near)
            try:
                await self.services.off_loop(work, what="registering a region", timeout_s=ADOPT_S)
            except StorageUnusable as late:
                raise QueueFull(f"{memory.size_bytes} bytes: {late}", size_bytes=memory.size_bytes) from None

    def register_region(
        self, session: Session, fd_ticket: int, namespace: Namespace, geometry: RegionGeometry
    ) -> Region:
        """`geometry`: of this ticket. Raises `UnknownRegion` when it was used, or its session ended, meanwhile."""
        memory = session.mapping(fd_ticket)
        if len(session.regions) >= REGIONS_MAX:
            raise QueueFull(f"{len(session.regions)} regions are registered, at most {REGIONS_MAX} may be")
        del session.mappings[fd_ticket]
        region = Region(next(self.services.ids), session.session_id, memory, geometry, namespace)
        session.regions[region.region_id] = region
        return region

    async def unregister_region(self, session: Session, region_id: int) -> bool:
        """Stops the requests that use the region; False when it is not quiet in time."""
        region = session.region(region_id)
        quiet = asyncio.Event()
        region.close(quiet.set)
        for driver in self.requests.live():
            if driver.call.session_id == session.session_id and driver.uses_region(region):
                driver.stop(Reason.CANCELLED, "its region was unregistered")
        self.prefills.abandon(Reason.CANCELLED, lambda request: request.plan.region is region)
        until_s = asyncio.get_running_loop().time() + UNREGISTER_WAIT_S
        try:
            await asyncio.wait_for(quiet.wait(), UNREGISTER_WAIT_S)
        except TimeoutError:
            return False
        if not await given_back(region.memory, until_s - asyncio.get_running_loop().time()):
            return False
        session.regions.pop(region_id, None)
        return True

    def _namespaces_in_use(self) -> set[bytes]:
        """Fingerprints that a region stands for; a request that is under way holds its namespace by itself."""
        sessions = self.sessions.all()
        return {region.namespace.fingerprint for session in sessions for region in session.regions.values()}

    # Requests ---------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        call: Call,
        namespace: Namespace,
        keys: Sequence[bytes],
        kind: FetchKind,
        *,
        lease_s: float = 0.0,
        region: Region | None = None,
        pages: Pages | None = None,
    ) -> FetchDriver:
        """Raises the errors of `Requests.enter` and `FetchDriver`."""
        if region is not None:
            self._same_namespace(region, namespace)
        with self.requests.entering("fetch", call.request_id, call.attempt, owner=call.session_id):
            driver = FetchDriver(
                self.services,
                call,
                namespace=namespace,
                keys=keys,
                kind=kind,
                leases=self.leases,
                lease_s=lease_s,
                region=region,
                pages=pages,
            )
        self.requests.add(driver)
        driver.start()
        return driver

    def prefetch(self, session_id: str, namespace: Namespace, keys: Sequence[bytes], expected_in_s: float = 0.0) -> int:
        """A hint: reads what is missing when nothing more urgent waits; how many leading blocks are there, or will be."""
        return self.prefetcher.hint(session_id, namespace, keys, expected_in_s)

    def store(
        self, call: Call, namespace: Namespace, chain: Chain | Chains, region: Region, pages: Pages
    ) -> StoreDriver:
        """Raises the errors of `Requests.enter` and `StoreDriver`."""
        self._same_namespace(region, namespace)
        with (
            counting_refused(self.services, len(chain.blocks())),
            self.requests.entering("store", call.request_id, call.attempt, owner=call.session_id),
        ):
            driver = StoreDriver(self.services, call, namespace=namespace, chain=chain, region=region, pages=pages)
        self.requests.add(driver)
        driver.start()
        return driver

    def stream(self, plan: Plan) -> StreamDriver:
        """Raises the errors of `checked_plan` and of `Requests.enter`."""
        plan = self._checked(plan)
        with self.requests.entering("stream", plan.call.request_id, plan.call.attempt, owner=plan.call.session_id):
            driver = StreamDriver(self.prefills.of(plan, self._peer))
        self.requests.add(driver)
        if not self._ended_with_its_request(driver):
            driver.start()
        return driver

    def push(self, plan: Plan) -> PushDriver:
        """Raises as `stream` does."""
        plan = self._checked(plan)
        if not plan.decode_node:
            raise BadPlan("PushLayers needs a decode_node")
        with self.requests.entering("push", plan.call.request_id, plan.call.attempt, owner=plan.call.session_id):
            driver = PushDriver(self.prefills.of(plan, self._peer))
        self.requests.add(driver)
        if not self._ended_with_its_request(driver):
            driver.start(alone=not plan.loaded)
        return driver

    def _ended_with_its_request(self, driver: StreamDriver | PushDriver) -> bool:
        """A push that comes after its stream has failed, or the other way round, fails with it at once."""
        failure = self.prefills.failure(driver.call)
        if failure is None:
            return False
        driver.fail(failure)
        return True

    def _peer(self, node: str) -> Peer:
        peer = self.peers.peer(node) if self.peers is not None else None
        if peer is None:
            raise UnknownPeer(f"no node is named {node!r}", node=node)
        return peer

    def _checked(self, plan: Plan) -> Plan:
        self._same_namespace(plan.region, plan.namespace)
        return checked_plan(
            plan, own_node=self.services.node, knows=self._knows, gpus_over_network=self._gpus_over_network
        )

    def _knows(self, node: str) -> bool:
        return self.peers is not None and self.peers.peer(node) is not None

    def _same_namespace(self, region: Region, namespace: Namespace) -> None:
        if region.namespace != namespace:
            raise BadRequest(f"region {region.region_id} was registered for another namespace")

    def cancel(self, request_id: str, attempt: int, session_id: str) -> int:
        """Ends all calls of this attempt and lower ones that this session made."""
        message = "cancelled by the engine"
        found = self.requests.cancel_of_session(session_id, request_id, attempt, message)
        self.prefills.abandon(
            Reason.CANCELLED,
            lambda request: (
                (request.plan.call.request_id, request.plan.call.session_id) == (request_id, session_id)
                and request.plan.call.attempt <= attempt
            ),
        )
        return found + self.decode_side.cancel(request_id, attempt, session_id, message)

    # Lanes ------------------------------------------------------------------------------------------------------------

    def lane_starved(self, node: str) -> bool:
        """Whether KV to that node gets less than `transport.lane_floor` while there is work: a way to avoid.

        For "": whether KV to all nodes together does.
        """
        return self.services.mover.lanes.starved(node, self.services.clock.now_ns())

    def starved_nodes(self) -> set[str]:
        """All nodes of which `lane_starved` is true."""
        return self.services.mover.lanes.starved_nodes(self.services.clock.now_ns())

    def lanes(self) -> list[LaneReport]:
        """What each class of KV gets, most urgent first."""
        return self.services.mover.lanes.report(self.services.clock.now_ns())

    # Life -------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Hands some completions of each port to their owners.

        No more than a short step of the loop: a port with more of them stays readable, and is pumped again.
        """
        self.services.desk.pump()
        self.services.mover.pump()

    def drain(self) -> int:
        """No new requests from here on; how many run."""
        self.requests.draining = True
        self.prefetcher.stop()
        return len(self.requests.live())

    async def shut_down(self, grace_s: float) -> bool:
        """Everyone is told; True when all requests were over within `grace_s`."""
        self.requests.draining = self.requests.stopping = True
        self.prefetcher.stop()
        message = "the daemon is stopping"
        self.decode_side.stop(Reason.SHUTTING_DOWN, message)
        self.requests.stop_all(Reason.SHUTTING_DOWN, message)
        self.prefills.abandon(Reason.SHUTTING_DOWN)
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while self.requests.live() and loop.time() < until:  # noqa: ASYNC110 - no single event says that all are over
            await asyncio.sleep(0.01)
        self._give_up_writes()
        return not self.requests.live()

    def _give_up_writes(self) -> None:
        """Of what the storage has already nobody will hear: it may commit it yet while it is closed."""
        self.services.desk.stop_writes("the daemon stopped before it was written")
        left = len(self.services.writes)
        note_dropped(self.services, Drop.SHUTTING_DOWN, left, "writes under way: nobody waits for their end")


def new_boot_id() -> str:
    """Random identity of one start of a daemon."""
    return os.urandom(8).hex()
