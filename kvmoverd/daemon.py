"""Composition root of a node's daemon: builds everything from the config in one place, takes it down in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from kvmover_proto import engine_pb2_grpc, node_pb2_grpc
from kvmoverd import __version__
from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.observers.log import LogObserver
from kvmoverd.adapters.off_loop import off_loop
from kvmoverd.config import COMPANION_SUFFIX, Config
from kvmoverd.core.admission import Admission
from kvmoverd.core.errors import QueueFull, StorageUnusable
from kvmoverd.core.fence import AttemptFence
from kvmoverd.core.leases import LeaseTable
from kvmoverd.core.status import Reason
from kvmoverd.devices import open_devices
from kvmoverd.devices_storage import make_directory
from kvmoverd.devices_transport import CLOSE_S, Rdma, local_text
from kvmoverd.joining import Boots, membership_of, scheduler_of
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.desk import StorageDesk
from kvmoverd.node.helper_book import HelperBook
from kvmoverd.node.helping import HelperSide
from kvmoverd.node.lane_watch import LaneWatch
from kvmoverd.node.leasing import LeaseBook
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.mover import Mover
from kvmoverd.node.node import Node, new_boot_id
from kvmoverd.node.parts import PartBook
from kvmoverd.node.pool import BufferPool
from kvmoverd.node.pushing import PushDriver
from kvmoverd.node.reader import BlockReader
from kvmoverd.node.requests import Requests
from kvmoverd.node.room import Room
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Sessions
from kvmoverd.node.streaming import StreamDriver
from kvmoverd.node_settings import limits_of, room_bytes_of, split_of
from kvmoverd.ports.membership import Member
from kvmoverd.ports.storage import roots_of
from kvmoverd.ports.transport import RouteLost
from kvmoverd.rpc import engine_service, node_service, server
from kvmoverd.rpc.companion import CompanionServer
from kvmoverd.rpc.dialling import Dialler
from kvmoverd.rpc.engine_service import EngineService
from kvmoverd.rpc.loop_lag import LoopLag
from kvmoverd.rpc.node_service import DataKeys, NodeService
from kvmoverd.rpc.peer_client import GrpcPeer
from kvmoverd.rpc.peers import GrpcPeers
from kvmoverd.rpc.scheduler_relay import RELAY_OPTIONS, SchedulerSide
from kvmoverd.rpc.session_hooks import EngineSessions
from kvmoverd.rpc.watching import Watchers

log = logging.getLogger(__name__)

LEASE_PERIOD_S = 0.5
PORTS_PERIOD_S = 5.0
STOP_GRACE_S = 1.0
OPEN_S = 600.0
READS_MAX = 1 << 16
FENCED_MAX = 1 << 16


class Daemon:
    """One node. `start` builds bottom up; `stop` takes down what was built, top down, in bounded time."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.boot_id = new_boot_id()
        self._clock = MonotonicClock()
        self._began_ns = self._clock.now_ns()
        self._keys = DataKeys()
        self._lag = LoopLag()
        self._observer = LogObserver()
        self._cut_short = False
        self.broken = asyncio.Event()
        self.scheduler: SchedulerSide | None = None
        self._servers: list[server.Server] = []
        self._built = AsyncExitStack()

    async def start(self) -> None:
        """Raises `KvmoverError`; what was built by then is taken down by `stop`."""
        self.devices = await off_loop(
            partial(open_devices, self.config, self.boot_id, self._keys.check), what="opening devices", timeout_s=OPEN_S
        )
        self._built.push_async_callback(self._close_devices)
        marks, floor, window_s = self.config.transport.lanes()
        lanes = LaneWatch(marks, floor_bytes_per_s=floor, window_s=window_s, observer=self._observer)
        self._mover = Mover(self.devices.local, self.devices.remote, self._route_lost, self._clock, lanes)
        self.node = self._build_node()
        self._watch_devices()
        await self._serve_nodes()
        await self._join_nodes()
        self._join_scheduler()
        await self._serve_engines()
        for work in (self._lag.watch(), self._expire_leases()):
            self._built.callback(asyncio.get_running_loop().create_task(work).cancel)
        self._built.push_async_callback(self._shut_down_node)
        for root, _ in roots_of(self.devices.storage):
            log.info("storage %s: %s, %s I/O; %s", root.root, root.kind, root.io_mode, root.note or "as asked")
        log.info(
            "node %s serves: boot %s, pool in %s pages, local copies: %s",
            self.config.node.name,
            self.boot_id,
            self.devices.arena.page_kind,
            local_text(self.devices.local),
        )

    async def stop(self) -> bool:
        """True when everyone was told and everything is quiet; False when something had to be cut short."""
        await self._built.aclose()
        self._observer.tell_left_out(all_windows=True)
        return not self._cut_short

    def _build_node(self) -> Node:
        config, storage = self.config, self.devices.storage
        limits = limits_of(config)
        room = Room(Admission(room_bytes_of(config), queue_max=limits.queue_max), wait_s=limits.admission_wait_s)
        pool = BufferPool(self.devices.arena, piece_bytes=config.pool.piece_bytes)
        ops_max = sum(root.ops_max for root in config.storage)
        desk = StorageDesk(storage, ops_max=ops_max, queue_max=READS_MAX, now_ns=self._clock.now_ns)
        observer = self._observer
        reader = BlockReader(pool, desk, observer)
        services = Services(
            config.node.name,
            self.boot_id,
            limits,
            self._clock,
            observer,
            pool,
            desk,
            reader,
            self._mover,
            room,
            off_loop,
            split_of(config),
        )
        requests = Requests(live_max=limits.live_max, fence=AttemptFence(FENCED_MAX))
        parts = PartBook()
        return Node(
            services,
            sessions=Sessions(sessions_max=config.engine_api.sessions_max),
            requests=requests,
            decode_side=DecodeSide(services, requests, parts),
            helper_side=HelperSide(services, requests, parts),
            parts=parts,
            leases=LeaseBook(LeaseTable(limits.leases_max, generation=secrets.randbits(32)), reader, room, self._clock),
            map_region=self.devices.regions.map,
            open_gpu=self.devices.regions.open_gpu,
            gpus_over_network=config.transport.kind == "verbs",
            adopt_region=self.devices.rdma.adopt if self.devices.rdma is not None else None,
        )

    def _watch_devices(self) -> None:
        """Completions are handed out when a device says that there are some."""
        loop = asyncio.get_running_loop()
        for fileno in (self.devices.storage.fileno(), *self._mover.filenos()):
            loop.add_reader(fileno, self._pump)
            self._built.callback(loop.remove_reader, fileno)

    def _pump(self) -> None:
        """A fault of our own ends the daemon: its books can't be trusted any more, and a fresh start can be."""
        try:
            self.node.pump()
        except Exception:
            log.exception("a completion could not be handled; the daemon stops")
            self.broken.set()

    async def _serve_nodes(self) -> None:
        config, node = self.config, self.node
        own = LocalPeer(node.decode_side, node.models)
        self._membership = membership_of(config.membership, config.peers)
        self._peers = GrpcPeers(self._membership, config.node.name, own, self._make_peer)
        self._built.push_async_callback(self._peers.close)
        node.peers = self._peers
        node.helper_book = HelperBook(node.services, self._peers)
        self._built.callback(node.helper_book.close)
        if self.devices.rdma is not None:
            self._introduce(self.devices.rdma)
        self._watchers = Watchers(
            silence_s=config.node_api.silence_s, on_lost=self._peer_lost, starves=node.lane_starved
        )
        service = NodeService(
            node,
            self._keys,
            self._watchers,
            transport=config.transport.kind,
            data_endpoint=config.data_endpoint(self.devices.remote.endpoint),
            version=__version__,
            connects=self.devices.rdma.links if self.devices.rdma is not None else None,
        )
        await self._serve(
            str(config.node_api.listen),
            "kvmover.v1.Node",
            lambda made: node_pb2_grpc.add_NodeServicer_to_server(service, made),
            always=node_service.ALWAYS,
            options=server.keepalive(config.node_api.silence_s),
        )
        self._built.callback(self._watchers.stop)

    def _introduce(self, rdma: Rdma) -> None:
        """Links to other nodes are made over the node-to-node API; until it is closed every offer is answered."""
        dialler = Dialler(self._peers.other)
        rdma.links.dial_with(dialler)
        self._built.callback(dialler.stop)
        self._built.callback(asyncio.get_running_loop().create_task(_look_at_ports(rdma)).cancel)

    async def _join_nodes(self) -> None:
        name, address = self.config.node.name, self.config.node_address(self._servers[-1].port)
        self._built.push_async_callback(self._membership.close)
        self._membership.watch(Boots(name, self._peer_lost).told)
        await self._membership.start(Member(name, address, self.boot_id))

    def _join_scheduler(self) -> None:
        self.scheduler = scheduler_of(self.config, self.node, self._membership.scheduler)
        if self.scheduler is not None:
            self.scheduler.start()
            self._built.push_async_callback(self.scheduler.close)

    async def _serve_engines(self) -> None:
        settings = self.config.engine_api
        await off_loop(partial(make_directory, settings.socket.parent), what="making a directory", timeout_s=OPEN_S)
        companion = CompanionServer(
            Path(f"{settings.socket}{COMPANION_SUFFIX}"),
            EngineSessions(self.node),
            boot_id=self.boot_id,
            version=__version__,
            engine_endpoint=f"unix://{settings.socket}",
            connections_max=settings.sessions_max,
            mode=settings.mode,
        )
        await companion.start()
        self._built.push_async_callback(companion.stop)
        sent_bytes = self.devices.remote.sent_bytes
        rdma = self.devices.rdma
        service = EngineService(
            self.node,
            self._facts,
            sent_bytes=sent_bytes,
            on_drain=self._tell_not_serving,
            rdma=rdma.facts if rdma is not None else None,
            scheduler=self.scheduler,
            membership=self._membership.state,
        )
        await self._serve(
            f"unix:{settings.socket}",
            "kvmover.v1.Engine",
            lambda made: engine_pb2_grpc.add_EngineServicer_to_server(service, made),
            always=engine_service.ALWAYS,
            options=RELAY_OPTIONS,
        )
        server.restrict(settings.socket, settings.mode)

    async def _serve(
        self,
        address: str,
        name: str,
        add: Callable[[server.GrpcServer], None],
        *,
        always: frozenset[str],
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        streams_max = self.config.engine_api.streams_max
        started = await server.start(address, name, add, streams_max=streams_max, always=always, options=options)
        self._servers.append(started)
        self._built.push_async_callback(started.stop, STOP_GRACE_S)

    async def _tell_not_serving(self) -> None:
        """Whoever asks for the health of either API learns that no new requests are taken."""
        for started in self._servers:
            await started.set_serving(serving=False)

    def _make_peer(self, node: str, address: str) -> GrpcPeer:
        return GrpcPeer(
            node,
            address,
            own_node=self.config.node.name,
            boot_id=self.boot_id,
            transport=self.config.transport.kind,
            observer=self._observer,
            silence_s=self.config.node_api.silence_s,
            on_lost=self._peer_lost,
            store=self.devices.storage,
        )

    def _peer_lost(self, node: str, boot_id: str, message: str) -> None:
        """That boot is gone, or has given this one up: both forget the other, and what they had in common ends."""
        self._watchers.drop(node, boot_id, message)
        self._peers.gone(node, boot_id, message)
        if self.devices.rdma is not None:
            self.devices.rdma.links.peer_gone((node, boot_id), message)
        self.node.decode_side.peer_lost(node, boot_id, message)
        self.node.parts.peer_lost(node, boot_id, message)
        self._stop_what_goes_over(node, boot_id, message)

    def _route_lost(self, lost: RouteLost) -> None:
        """A data channel broke: what was on its way over it ends, on both nodes; over one from here, Hello again next time."""
        if lost.inbound:
            self.node.decode_side.sinks_lost(lost.sink_ids, f"{lost.node}: {lost.message}")
            self._peers.parts_lost(lost.node, lost.sink_ids, lost.message)
            return
        self._peers.lost(lost.node)
        self.node.parts.peer_lost(lost.node, lost.boot_id, lost.message)
        self._stop_what_goes_over(lost.node, lost.boot_id, lost.message)

    def _stop_what_goes_over(self, node: str, boot_id: str, message: str) -> None:
        """Ends the prefill requests whose decode side is that boot, also those with nothing under way."""
        for driver in self.node.requests.live():
            if isinstance(driver, PushDriver | StreamDriver) and driver.request.goes_over(node, boot_id):
                driver.stop(Reason.PEER_LOST, f"{node}: {message}")
        self.node.prefills.peer_lost(node, boot_id, message)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            self.node.leases.expire()
            self._mover.look_at_lanes()
            self.node.prefetcher.look()
            if self.devices.rdma is not None:
                self.devices.rdma.links.count()
            self._observer.tell_left_out()

    def _facts(self) -> dict[str, str]:
        """What NodeStatus tells beside the node's own books."""
        return {
            "version": __version__,
            "uptime_ms": str((self._clock.now_ns() - self._began_ns) // 1_000_000),
            "transport": self.config.transport.kind,
            "lane": self.devices.remote.lane_text,
            "local_copies": local_text(self.devices.local),
            "loop_lag_us_max": str(self._lag.max_us),
            "loop_lag_us_p99": str(self._lag.quantile_us(0.99)),
            "loop_lags_over_1ms": str(self._lag.long_count),
        }

    async def _shut_down_node(self) -> None:
        await self._tell_not_serving()
        if not await self.node.shut_down(self.config.shutdown.drain_s):
            self._cut_short = True
            log.warning("%d requests were cut short", len(self.node.requests.live()))

    async def _close_devices(self) -> None:
        try:
            quiet = await off_loop(self.devices.close, what="closing devices", timeout_s=4 * CLOSE_S)
        except (StorageUnusable, QueueFull):
            quiet = False
        if not quiet:
            self._cut_short = True
            log.warning("a device did not let go of the pool within %g s", CLOSE_S)


async def _look_at_ports(rdma: Rdma) -> None:
    while True:
        await asyncio.sleep(PORTS_PERIOD_S)
        try:
            await off_loop(rdma.cnics.look, what="looking at CNICs", timeout_s=PORTS_PERIOD_S)
        except (StorageUnusable, QueueFull) as error:
            log.warning("the CNICs' ports could not be looked at: %s", error)
