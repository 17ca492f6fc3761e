"""The daemon itself, without sockets and disks: the production class, its wiring, its clients and services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from node_kit import LAYOUT, Anonymous
from sim_loop import Process, VirtualLoop
from sim_net import Network
from sim_rpc import Host, Town
from sim_storage import SharedStore, SimStorage
from sim_transport import SimTransport

from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.config import Config, parse
from kvmoverd.core.admission import Purpose
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.daemon import Daemon

SILENCE_S = 2.0
RECORD = LAYOUT.record_bytes
T = TypeVar("T")


class VirtualClock:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        return self._loop.now_ns()

    def monotonic(self) -> float:
        """For modules that ask `time`."""
        return self._loop.time()

    def monotonic_ns(self) -> int:
        return self._loop.now_ns()


async def at_once(work: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """`off_loop` without a thread."""
    return work()


@dataclass
class SimDevices:
    arena: Anonymous
    regions: Regions
    storage: SimStorage
    local: SimTransport
    remote: SimTransport
    rdma: None = None

    def close(self) -> bool:
        return self.remote.close(0.0)


class _Observer(CountingObserver):
    def tell_left_out(self, *, all_windows: bool = False) -> None:
        """Nothing is left out."""


@dataclass
class _Server:
    """What `rpc.server.start` gives."""

    host: Host

    async def set_serving(self, *, serving: bool) -> None:
        """Nobody asks for health here."""

    async def stop(self, grace_s: float) -> None:
        self.host.stopped = True


def config_of(name: str, nodes: Sequence[str], *, slots: int, rooms: dict[str, int], floor_s: float) -> Config:
    """`rooms`: slots for each purpose, by the key in the config; `floor_s`: what a split has to gain."""
    values = {
        "node": {"name": name},
        "node_api": {"listen": "127.0.0.1:1", "silence": f"{int(SILENCE_S * 1000)}ms"},
        "pool": {"bytes": "64MiB", "piece_bytes": "2MiB"},
        "storage": [{"name": name, "kind": "memory"}],
        "transport": {"kind": "tcp", "listen": "127.0.0.1:0"},
        "requests": {"admission_wait": "2s", "attach_timeout": "3s", "timeout_max": "60s"},
        "peers": [{"name": node, "address": f"{node}:1"} for node in nodes],
        "shutdown": {"drain": "1s"},
    }
    config = parse(values, Path("/tmp"))
    sizes = {key: count * RECORD for key, count in rooms.items()}
    pool = replace(config.pool, bytes=slots * RECORD, piece_bytes=4 * RECORD, **sizes)
    return replace(config, pool=pool, split=replace(config.split, floor_s=floor_s))


class SimDaemon(Daemon):
    """One start of one node."""

    def __init__(self, config: Config, cluster: Cluster, boot_id: str) -> None:
        self.cluster = cluster
        self.process = Process(cluster.loop, f"{config.node.name}.{boot_id}")
        cluster.net.nodes[self.process] = config.node.name
        self.process.context.run(super().__init__, config)
        self.boot_id = boot_id
        self._clock = VirtualClock(cluster.loop)  # type: ignore[assignment]
        self._observer = _Observer()  # type: ignore[assignment]
        self.host = Host(cluster.town, self.process, config.node.name)
        self.gone: asyncio.Future[None] = cluster.loop.create_future()
        self.on_killed: list[Callable[[], None]] = []
        self.stopping = False

    @property
    def name(self) -> str:
        return self.config.node.name

    async def start(self) -> None:
        cluster, rng = self.cluster, random.Random(f"{self.cluster.seed} {self.name} {self.boot_id}")
        cluster.town.clients[self.process] = self.host
        transport = SimTransport(cluster.net, self.process, self.name, self.boot_id, rng, SILENCE_S)
        transport.directory = cluster.transports
        cluster.transports[self.name, self.boot_id] = transport
        storage = SimStorage(cluster.store, self.process, self.name, rng)
        self.arena = Anonymous(self.config.pool.bytes)
        self.devices = SimDevices(self.arena, Regions(), storage, transport, transport)  # type: ignore[assignment]
        self._built.push_async_callback(self._close_devices)
        self._make_mover(transport)
        self.node = self._build_node()
        self.node.services.off_loop = at_once
        self.node.services.reader._range_bytes = self.cluster.range_bytes
        storage.on_done = transport.on_events = self._pump
        await self._serve_nodes()
        cluster.town.hosts[f"{self.name}:1"] = self.host
        self._built.callback(asyncio.get_running_loop().create_task(self._expire_leases()).cancel)
        self._built.push_async_callback(self._shut_down_node)

    def _make_mover(self, transport: SimTransport) -> None:
        """As `Daemon.start` does."""
        from kvmoverd.node.lane_watch import LaneWatch
        from kvmoverd.node.mover import Mover

        marks, floor, window_s = self.config.transport.lanes()
        lanes = LaneWatch(marks, floor_bytes_per_s=floor, window_s=window_s, observer=self._observer)
        self._mover = Mover(transport, transport, self._route_lost, self._clock, lanes)

    async def _serve(self, address: str, name: str, add: Callable[[object], None], **more: object) -> None:  # type: ignore[override]
        add(self.host)
        server = _Server(self.host)
        self._servers.append(server)  # type: ignore[arg-type]
        self._built.push_async_callback(server.stop, 0.0)

    def kill(self) -> None:
        """Everything of it vanishes; engines' memory and the store stay as they are."""
        if self.process.is_dead:
            return
        self.process.kill()
        self.host.stopped = True
        self.gone.set_result(None)
        for told in self.on_killed:
            told()
        self.cluster.net.look()

    def slots_add_up(self) -> None:
        for counts in self.node.services.pool.slot_counts():
            states = ("free", "filling", "clean", "leased", "quarantined")
            assert counts["total"] == sum(counts[state] for state in states), counts

    def pooled(self) -> dict[bytes, bytes]:
        """Payload of each block that is clean in the pool, by key."""
        found = {}
        for size_class in self.node.services.pool._classes.values():
            for (fingerprint, key), slot in size_class.cache._by_key.items():
                if size_class.cache.is_clean((fingerprint, key)):
                    start = int(size_class.addresses([slot])[0]) - self.arena.address + HEADER_BYTES
                    found[key] = bytes(self.arena.bytes[start : start + LAYOUT.block_bytes])
        return found

    def left_over(self) -> str:
        """What is not home; empty when all is."""
        services, found = self.node.services, []
        for counts in services.pool.slot_counts():
            taken = {state: counts[state] for state in ("filling", "leased", "quarantined") if counts[state]}
            if taken:
                found.append(f"slots {taken}")
        for purpose in Purpose:
            taken_bytes = services.room._admission.taken_bytes(purpose)
            waiting = services.room._admission.waiting(purpose)
            if taken_bytes or waiting:
                found.append(f"room {purpose.value}: {taken_bytes} bytes, {waiting} wait")
        found += [f"{name}: {book}" for name, book in self._books().items() if book]
        return "; ".join(found)

    def _books(self) -> dict[str, object]:
        services, node = self.node.services, self.node
        reader, desk = services.reader, services.desk
        return {
            "live": [(d.kind, d.call.request_id, d.machine.state.name) for d in node.requests.live()],
            "readings": reader._readings,
            "sets": reader._sets,
            "reads": desk._reads,
            "under way": desk._under_way,
            "late": desk._late,
            "queue bytes": desk.read_queue_bytes,
            "sends": self._mover._sends,
            "lines": self._mover._lines,
            "sinks": self._mover._sinks,
            "owned": node.requests._owned,
            "rooms": services.room._owners,
            "prefills": node.prefills.by_name,
            "waiting engines": node.decode_side._waiting,
            "tickets": node.decode_side._by_ticket,
            "regions": [
                (region.region_id, region.users, int(region.written.sum()))
                for session in node.sessions.all()
                for region in session.regions.values()
                if region.users or region.written.sum()
            ],
        }


class Cluster:
    """Nodes by name, each the daemon that runs there now."""

    def __init__(self, loop: VirtualLoop, seed: int, nodes: Sequence[str], rng: random.Random) -> None:
        self.loop = loop
        self.seed = seed
        self.names = list(nodes)
        self.random = rng
        self.net = Network(loop, seed)
        self.town = Town(self.net, SILENCE_S)
        self.store = SharedStore()
        self.transports: dict[tuple[str, str], SimTransport] = {}
        self.daemons: dict[str, SimDaemon] = {}
        self.all: list[SimDaemon] = []
        self.sizes = rng.choice([(160, 50), (100, 30), (72, 26)])
        self.floor_s = rng.choice([0.0, 0.0, 0.002])
        self.range_bytes = random.Random(f"ranges {seed}").choice([1, 1, RECORD])
        """Blocks are read layer by layer, or whole."""

    def launch(self, name: str) -> SimDaemon:
        """A (new) start of the node; it serves after a moment."""
        slots, room = self.sizes
        boots = sum(daemon.name == name for daemon in self.all) + 1
        helping = self.random.choice([0, room // 2])
        rooms = {
            "read_bytes": room,
            "de_buffer_bytes": room,
            "help_bytes": helping,
            "write_back_bytes": max(2, slots - 2 * room - helping - 2),
            "prefetch_bytes": 2,
        }
        others = [other for other in self.names if other != name]
        config = config_of(name, others, slots=slots, rooms=rooms, floor_s=self.floor_s)
        made = SimDaemon(config, self, f"b{boots}")
        self.daemons[name] = made
        self.all.append(made)
        made.process.task(made.start())
        return made

    def running(self) -> list[SimDaemon]:
        return [daemon for daemon in self.all if not daemon.process.is_dead]

    async def bury(self) -> None:
        """Ends all tasks; nothing that they do now reaches anybody."""
        for process in list(self.loop.processes):
            process.bury()
        for connection in list(self.net.connections):
            connection.broken = True
        me = asyncio.current_task()
        for _ in range(20):
            tasks = [task for process in self.loop.processes for task in process.tasks if task is not me]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0)
