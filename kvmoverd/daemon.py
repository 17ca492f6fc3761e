"""Composition root of a node's daemon: builds everything from the config in one place, runs it, takes it down in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvmover_proto import engine_pb2_grpc, node_pb2_grpc
from kvmoverd import __version__
from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.region import map_region
from kvmoverd.adapters.observers.log import LogObserver
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.adapters.transport.verbs import refuse_verbs
from kvmoverd.config import Config, StorageConfig
from kvmoverd.core.admission import Admission, Purpose
from kvmoverd.core.fence import AttemptFence
from kvmoverd.core.index import PrefixIndex
from kvmoverd.core.leases import LeaseTable
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.desk import StorageDesk
from kvmoverd.node.leasing import LeaseBook
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.mover import Mover
from kvmoverd.node.node import Node, new_boot_id
from kvmoverd.node.pool import BufferPool
from kvmoverd.node.reader import BlockReader
from kvmoverd.node.requests import Requests
from kvmoverd.node.room import Room
from kvmoverd.node.services import Limits, Services
from kvmoverd.node.sessions import Sessions
from kvmoverd.ports.storage import Storage
from kvmoverd.ports.transport import RouteLost, Transport
from kvmoverd.rpc import server
from kvmoverd.rpc.companion import CompanionServer
from kvmoverd.rpc.engine_service import EngineService
from kvmoverd.rpc.node_service import DataKeys, NodeService
from kvmoverd.rpc.peer_client import GrpcPeer, GrpcPeers
from kvmoverd.rpc.session_hooks import EngineSessions

log = logging.getLogger(__name__)

LAG_PERIOD_S = 0.1
LAG_WINDOW_S = 10.0
LEASE_PERIOD_S = 0.5

STORAGES: dict[str, Callable[[StorageConfig], Storage]] = {
    "threads": lambda root: ThreadsStorage(
        Path(root.path), name=root.name, threads=root.threads, ops_max=root.ops_max, direct=root.direct
    ),
    "memory": lambda root: MemoryStorage(root.name),
}
"""Storage adapters by their kind in the config."""


class LoopLag:
    """Worst delay of the loop in the last two windows: a timer that should fire every `LAG_PERIOD_S`."""

    def __init__(self) -> None:
        self._now_max_s = 0.0
        self._before_max_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        window_end = loop.time() + LAG_WINDOW_S / 2
        while True:
            due = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._now_max_s = max(self._now_max_s, loop.time() - due)
            if loop.time() > window_end:
                self._before_max_s, self._now_max_s = self._now_max_s, 0.0
                window_end = loop.time() + LAG_WINDOW_S / 2

    @property
    def max_us(self) -> int:
        return int(max(self._now_max_s, self._before_max_s) * 1e6)


@dataclass
class Devices:
    """What has to be closed last, outside the loop's objects."""

    arena: Arena
    storage: Storage
    mover: Mover


class Daemon:
    """One node. `start` builds bottom up, `stop` takes down top down; both are bounded in time."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.boot_id = new_boot_id()
        self.node_port = 0
        self._clock = MonotonicClock()
        self._began_ns = self._clock.now_ns()
        self._lag = LoopLag()
        self._tasks: list[asyncio.Task[None]] = []
        self._readers: list[int] = []

    async def start(self) -> None:
        """Raises `ConfigError` and other `KvmoverError`s; what was begun is taken down by `stop`."""
        config = self.config
        loop = asyncio.get_running_loop()
        self._keys = DataKeys()
        arena = await asyncio.to_thread(_touched_arena, config)
        storage = await asyncio.to_thread(STORAGES[config.storage.kind], config.storage)
        local = ShmTransport(
            config.node.name, self.boot_id, None, check_key=self._keys.check, copy_threads=config.transport.copy_threads
        )
        remote = self._remote_transport(local)
        self._mover = Mover(local, remote, self._route_lost)
        self._devices = Devices(arena, storage, self._mover)
        self.node = self._build_node(arena, storage)
        self._watch_devices(loop, storage)
        await self._serve(remote)
        self._tasks += [loop.create_task(self._lag.watch()), loop.create_task(self._expire_leases())]
        log.info("node %s serves: boot %s, pool %s", config.node.name, self.boot_id, arena.page_kind)

    def _remote_transport(self, local: ShmTransport) -> Transport:
        """Node to node: a row per kind of `transport.kind`."""
        settings, name = self.config.transport, self.config.node.name
        lane = Lane(dscp=settings.dscp, so_priority=settings.so_priority)
        match settings.kind:
            case "tcp":
                host, port = settings.listen
                self._tcp = TcpTransport(
                    name,
                    self.boot_id,
                    host,
                    port,
                    lane=lane,
                    check_key=self._keys.check,
                    io_timeout_s=settings.io_timeout_s,
                    queue_max=settings.queue_max,
                )
                return self._tcp
            case "shm":
                return ShmTransport(name, self.boot_id, settings.socket, check_key=self._keys.check)
            case _:
                refuse_verbs()

    def _build_node(self, arena: Arena, storage: Storage) -> Node:
        config, clock = self.config, self._clock
        limits = _limits(config)
        admission = Admission(_room_limits(config), queue_max=limits.queue_max)
        room = Room(admission, wait_s=limits.admission_wait_s)
        pool = BufferPool(arena, piece_bytes=config.pool.piece_bytes)
        desk = StorageDesk(storage, ops_max=config.storage.ops_max, queue_max=READS_MAX)
        observer = LogObserver()
        reader = BlockReader(pool, desk, PrefixIndex(keys_max=INDEX_KEYS_MAX), observer)
        services = Services(
            config.node.name, self.boot_id, limits, clock, observer, pool, desk, reader, self._mover, room
        )
        requests = Requests(live_max=limits.live_max, fence=AttemptFence(FENCED_MAX))
        node = Node(
            services,
            sessions=Sessions(sessions_max=config.engine_api.sessions_max),
            requests=requests,
            decode_side=DecodeSide(services, requests),
            leases=LeaseBook(LeaseTable(limits.leases_max), reader, room, clock),
            map_region=map_region,
        )
        return node

    def _watch_devices(self, loop: asyncio.AbstractEventLoop, storage: Storage) -> None:
        """Completions are handed out when a device says that there are some."""
        for fileno in [storage.fileno(), *self._mover.filenos()]:
            loop.add_reader(fileno, self.node.pump)
            self._readers.append(fileno)

    async def _serve(self, remote: Transport) -> None:
        config, node = self.config, self.node
        streams_max = config.engine_api.streams_max
        node_service = NodeService(
            node, self._keys, transport=config.transport.kind, data_endpoint=remote.endpoint, version=__version__
        )
        host, port = config.node_api.listen
        self._node_server = await server.start(
            f"{host}:{port}",
            "kvmover.v1.Node",
            lambda made: node_pb2_grpc.add_NodeServicer_to_server(node_service, made),
            streams_max=streams_max,
        )
        self.node_port = self._node_server.port
        self._peers = GrpcPeers(
            StaticMembership(config.peers), config.node.name, LocalPeer(node.decode_side, node.models), self._make_peer
        )
        node.peers = self._peers
        socket = Path(config.engine_api.socket)
        socket.parent.mkdir(parents=True, exist_ok=True)
        self._companion = CompanionServer(
            Path(f"{socket}.companion"),
            EngineSessions(node),
            boot_id=self.boot_id,
            version=__version__,
            engine_endpoint=f"unix://{socket}",
            connections_max=config.engine_api.sessions_max,
            mode=config.engine_api.mode,
        )
        await self._companion.start()
        engine_service = EngineService(node, self._facts)
        self._engine_server = await server.start(
            f"unix:{socket}",
            "kvmover.v1.Engine",
            lambda made: engine_pb2_grpc.add_EngineServicer_to_server(engine_service, made),
            streams_max=streams_max,
        )
        server.restrict(socket, config.engine_api.mode)

    def _make_peer(self, node: str, address: str) -> GrpcPeer:
        return GrpcPeer(
            node,
            address,
            own_node=self.config.node.name,
            boot_id=self.boot_id,
            transport=self.config.transport.kind,
            observer=self.node.services.observer,
        )

    def _route_lost(self, lost: RouteLost) -> None:
        """A data channel broke: a new Hello next time; buffers that this peer was filling can't become whole."""
        if lost.inbound:
            self.node.decode_side.peer_lost(lost.node, lost.message)
        else:
            self._peers.lost(lost.node)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            self.node.leases.expire()

    def _facts(self) -> dict[str, str]:
        return {
            "version": __version__,
            "uptime_ms": str((self._clock.now_ns() - self._began_ns) // 1_000_000),
            "transport": self.config.transport.kind,
            "lane": self._lane_text(),
            "loop_lag_us_max": str(self._lag.max_us),
        }

    async def stop(self) -> bool:
        """Everyone told, sockets closed, devices quiet, memory given back; True when nothing was cut short."""
        clean = await self.node.shut_down(self.config.shutdown.drain_s)
        for task in self._tasks:
            task.cancel()
        await self._engine_server.stop(STOP_GRACE_S)
        await self._node_server.stop(STOP_GRACE_S)
        await self._companion.stop()
        await self._peers.close()
        loop = asyncio.get_running_loop()
        for fileno in self._readers:
            loop.remove_reader(fileno)
        quiet = await asyncio.to_thread(self._close_devices)
        return clean and quiet

    def _close_devices(self) -> bool:
        devices = self._devices
        quiet = all([devices.mover.close(CLOSE_S), devices.storage.close(CLOSE_S)])
        if quiet:
            devices.arena.close()
        return quiet

    def _lane_text(self) -> str:
        return self._tcp.lane_text if self._tcp is not None else "shared memory: no network, no lane"


def _touched_arena(config: Config) -> Arena:
    """Allocated and touched: a page fault on the data path would cost more than the copy."""
    arena = Arena(config.pool.bytes, config.pool.piece_bytes)
    arena.touch()
    return arena


def _limits(config: Config) -> Limits:
    requests = config.requests
    return Limits(
        timeout_default_s=requests.timeout_default_s,
        timeout_max_s=requests.timeout_max_s,
        admission_wait_s=requests.admission_wait_s,
        attach_timeout_s=requests.attach_timeout_s,
        lease_default_s=requests.lease_default_s,
        live_max=requests.live_max,
        queue_max=requests.queue_max,
        leases_max=config.pool.leases_max,
        drain_s=config.shutdown.drain_s,
    )


def _room_limits(config: Config) -> dict[Purpose, int]:
    pool = config.pool
    return {
        Purpose.READ: pool.read_bytes,
        Purpose.DE_BUFFER: pool.de_buffer_bytes,
        Purpose.WRITE_BACK: pool.write_back_bytes,
    }


def check_buildable(config: Config) -> None:
    """Refuses what `serve` would refuse, without building it. Raises `TransportRefused`, `StorageUnusable`."""
    if config.transport.kind == "verbs":
        refuse_verbs()


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT; 0 after a clean stop, 1 when something had to be cut short."""
    setup_logging(config.log)
    check_buildable(config)
    return uvloop.run(_serve_until_told(config))


async def _serve_until_told(config: Config) -> int:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    daemon = Daemon(config)
    try:
        await daemon.start()
    except BaseException:
        await daemon.stop()
        raise
    await told.wait()
    log.info("node %s stops", config.node.name)
    clean = await daemon.stop()
    log.info("node %s stopped%s", config.node.name, "" if clean else ", something was cut short")
    return 0 if clean else 1
