"""A whole node in one process: the real machines, drivers and books over in-memory storage and the loopback transport."""

from __future__ import annotations

import asyncio
import gc
import itertools
import select
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import numpy as np
from node_engines import LAYOUT, POISON, Anonymous, Engine, OwnPeers
from node_gates import StorageGate, TransportGate, no_floor
from node_time import LoopClock, at_once, jumping_time, real_time

from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.core.admission import Admission, Purpose
from kvmoverd.core.fence import AttemptFence
from kvmoverd.core.geometry import RegionGeometry, Segment
from kvmoverd.core.keys import ROOT, block_key
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.leases import LeaseTable
from kvmoverd.core.machines.actions import Finish, FinishDelivery
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import End, Path, Reason
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.desk import StorageDesk
from kvmoverd.node.driver import Call
from kvmoverd.node.helping import HelperSide
from kvmoverd.node.leasing import LeaseBook
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.mover import Mover
from kvmoverd.node.node import Node
from kvmoverd.node.outbox import Outbox, Told
from kvmoverd.node.parts import PartBook
from kvmoverd.node.pool import BufferPool
from kvmoverd.node.prefill import Plan
from kvmoverd.node.reader import BlockReader
from kvmoverd.node.requests import Requests
from kvmoverd.node.room import Room
from kvmoverd.node.services import Limits, Services, SplitSettings
from kvmoverd.node.sessions import Sessions, as_pages
from kvmoverd.node.storing import Chain
from kvmoverd.ports.transport import Transport

__all__ = ["LAYOUT", "POISON", "Anonymous", "Engine", "OwnPeers"]

MANIFEST = Manifest("model", b"w" * 32, b"t" * 32, LAYOUT, "u8")
WAIT_S = 5.0
WHOLE = 1 << 40


class NodeKit:
    """The node and what tests need around it. `settle` lets everything that can happen happen."""

    def __init__(
        self,
        *,
        slots: int = 64,
        limits: Limits | None = None,
        range_bytes: int = 1,
        node: str = "here",
        boot_id: str = "boot",
        far: Transport | None = None,
        split: SplitSettings | None = None,
        room_slots: Mapping[Purpose, int] = MappingProxyType({}),
        queue_max: int = 16,
        live_max: int = 64,
        ops_max: int = 8,
        has_threads: bool = False,
    ) -> None:
        """`range_bytes` 1: streams read layer by layer; `WHOLE`: block by block. `far`: to other nodes, where there are some.

        `room_slots`: of purposes that may not have all of the pool. `has_threads`: those of its storage take real time.
        """
        self.limits = limits or Limits(admission_wait_s=0.2, attach_timeout_s=0.5)
        record = LAYOUT.record_bytes
        self.arena = Anonymous(slots * record)
        self.disk, self.wire = StorageGate(), TransportGate()
        self.storage = self.disk.inner
        clock = LoopClock()
        self.observer = CountingObserver()
        self.mover = Mover(self.wire, far or self.wire, lambda lost: None, clock, no_floor(self.observer))
        room_bytes = {purpose: room_slots.get(purpose, slots) * record for purpose in Purpose}
        self.admission = Admission(room_bytes, queue_max=queue_max)
        room = Room(self.admission, wait_s=self.limits.admission_wait_s)
        self.pool = BufferPool(self.arena, piece_bytes=4 * record)
        desk = StorageDesk(self.disk, ops_max=ops_max, queue_max=256, now_ns=clock.now_ns)
        reader = BlockReader(self.pool, desk, self.observer, range_bytes=range_bytes)
        self.services = Services(
            node, boot_id, self.limits, clock, self.observer, self.pool, desk, reader, self.mover, room, at_once
        )
        self.services.split = split or SplitSettings()
        requests = Requests(live_max=live_max, fence=AttemptFence(1000))
        self.parts = PartBook()
        side = DecodeSide(self.services, requests, self.parts)
        leases = LeaseBook(LeaseTable(64), reader, room, clock)
        self.node = Node(
            self.services,
            sessions=Sessions(sessions_max=live_max),
            requests=requests,
            decode_side=side,
            helper_side=HelperSide(self.services, requests, self.parts),
            parts=self.parts,
            leases=leases,
            map_region=lambda fd: self.arena,
            open_gpu=Regions().open_gpu,
        )
        self.node.peers = OwnPeers(LocalPeer(side, self.node.models))
        self._ids = itertools.count(1)
        self.namespace = Namespace(MANIFEST)
        self.pumping, self.has_threads = True, has_threads
        self._readable = select.poll()
        for port in (self.disk, self.wire, far or self.wire):
            self._readable.register(port.fileno(), select.POLLIN)
        self.engines: list[Engine] = []
        self.loop_errors: list[str] = []

    def pump(self) -> None:
        if self.pumping:
            self.node.pump()

    def has_completions(self) -> bool:
        return self.pumping and bool(self.disk.told_later or self.wire.told_later or self._readable.poll(0))

    def engine(self, pages: int = 32, *, ring: bool = False) -> Engine:
        """An engine and its region; `ring`: all layers take turns in the pages of one."""
        session, _ = self.node.session_opened("test", 1)
        layers, at = [], 0
        for segments in LAYOUT.layers[:1] if ring else LAYOUT.layers:
            layer = []
            for size in segments:
                layer.append(Segment(at, size, size, pages))
                at += size * pages
            layers.append(tuple(layer))
        memory = Anonymous(at)
        session.mappings[7] = memory
        geometry = RegionGeometry(LAYOUT, at, tuple(layers))
        region = self.node.register_region(session, 7, self.namespace, geometry)
        engine = Engine(self, session, region, memory, pages)
        self.engines.append(engine)
        return engine

    def chain(self, blocks: int, salt: int = 0) -> tuple[bytes, ...]:
        keys, parent = [], ROOT
        for n in range(blocks):
            parent = block_key(self.namespace.fingerprint, parent, [salt, n])
            keys.append(parent)
        return tuple(keys)

    @staticmethod
    def content(key: bytes) -> bytes:
        """The KV of a block: a function of its key alone."""
        seed = int.from_bytes(key[:8], "little")
        return np.random.default_rng(seed).bytes(LAYOUT.block_bytes)

    def call(self, engine: Engine, *, timeout_s: float = WAIT_S, request_id: str = "", attempt: int = 1) -> Call:
        return Call(request_id or f"r{next(self._ids)}", attempt, engine.session.session_id, timeout_s)

    def plan(
        self,
        engine: Engine,
        call: Call,
        keys: tuple[bytes, ...],
        *,
        hit: int,
        path: Path | None,
        tail: int = 0,
        first_page: int = 0,
        decode_node: str | None = None,
        **more: object,
    ) -> Plan:
        """`decode_node` None: this very node. `more`: as for `Plan`; without `shares` the decode node has the only part."""
        pages = as_pages(list(range(first_page, first_page + len(keys) + (tail > 0))))
        decode_node = self.services.node if decode_node is None else decode_node
        if path is Path.PARTS and hit:
            more.setdefault("shares", (Share(decode_node or self.services.node, Runs.of((0, hit))),))
        return Plan(call, self.namespace, keys, tail, hit, decode_node, path, engine.region, (pages,), **more)  # type: ignore[arg-type]

    def fill(self, engine: Engine, keys: tuple[bytes, ...], first_page: int = 0) -> None:
        """Each block's own content in consecutive pages."""
        for page, key in enumerate(keys, first_page):
            engine.fill(page, self.content(key))

    async def store(self, engine: Engine, keys: tuple[bytes, ...]) -> None:
        """Blocks with their own content, durable; a chain from its root."""
        self.fill(engine, keys)
        pages = as_pages(list(range(len(keys))))
        driver = self.node.store(self.call(engine), self.namespace, Chain(keys, ROOT, 0), engine.region, pages)
        assert end_of(await told(driver.outbox)).reason is Reason.OK

    async def stored_and_held(self, blocks: int) -> tuple[Engine, tuple[bytes, ...]]:
        """Blocks in storage only; from now on reads wait at the gate."""
        engine, keys = self.engine(), self.chain(blocks)
        await self.store(engine, keys)
        self.forget_clean()
        self.disk.closed = True
        return engine, keys

    def close_gates(self) -> None:
        """From now on nothing happens by itself: no read, no copy."""
        self.disk.closed = self.wire.closed = True

    def open_gates(self) -> None:
        self.disk.closed = self.wire.closed = False

    def release_one(self) -> bool:
        """The oldest storage op happens, or else the oldest copy; False when none waits."""
        return self.disk.release_one() or self.wire.release_one()

    def forget_counts(self) -> None:
        self.disk.reads.clear()
        self.disk.layer_reads.clear()

    def forget_clean(self) -> None:
        """From now on every block has to be read."""
        self.pool.size_class(LAYOUT).cache.forget_namespace(self.namespace.fingerprint)

    def pooled(self) -> dict[bytes, bytes]:
        """Payload of each block that is clean in the pool, held or not, by key."""
        size_class = self.pool.size_class(LAYOUT)
        found = {}
        for (fingerprint, key), slot in size_class.cache._by_key.items():
            if size_class.cache.is_clean((fingerprint, key)):
                start = int(size_class.addresses([slot])[0]) - self.arena.address + HEADER_BYTES
                found[key] = bytes(self.arena.bytes[start : start + LAYOUT.block_bytes])
        return found

    def stored(self, key: bytes) -> bytes | None:
        """Payload of a block as it is stored."""
        record = self.storage.stored(self.namespace, key)
        return None if record is None else record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes]

    def no_wrong_bytes(self) -> None:
        """Every block that a look-up could find, in the pool or in storage, is the one of its key."""
        for key, payload in self.pooled().items():
            assert payload == self.content(key), f"block {key.hex()[:8]} is clean in the pool with wrong bytes"
            assert self.stored(key) in (payload, None)
        for key in self.storage._records.get(self.namespace.fingerprint, {}):
            assert self.stored(key) == self.content(key), f"block {key.hex()[:8]} is stored with wrong bytes"

    def slots_add_up(self) -> None:
        for counts in self.pool.slot_counts():
            states = ("free", "filling", "clean", "leased", "quarantined")
            assert counts["total"] == sum(counts[state] for state in states)

    def _no_book_has_entries(self) -> None:
        """What is kept for requests goes with them, whatever way they ended."""
        reader, desk = self.services.reader, self.services.desk
        books = {
            "readings": reader._readings,
            "sets": reader._sets,
            "hurried": reader._hurried,
            "news": reader._news,
            "found": reader.catalog._found,
            "reads": desk._reads,
            "under way": desk._under_way,
            "lines": self.mover._lines,
            "owned": self.node.requests._owned,
            "room": self.services.room._owners,
            "prefills": self.node.prefills.by_name,
            "parts": self.node.parts._parts,
        }
        books |= {f"held {size_class.slot_bytes}": size_class.cache._held for size_class in self.pool._classes.values()}
        assert not any(books.values()), {name: book for name, book in books.items() if book}
        assert (reader._sets_reading, reader._unstarted, desk.read_queue_bytes) == (0, 0, 0)

    async def everything_is_home(self) -> None:
        """No slot in use, no room taken, no request, no page in use: once the last completions were handed out."""
        await until(lambda: self.pool.idle() and not self.node.requests.live(), "slots come home")
        await until(lambda: not self.mover._sinks and not self.mover.sends_under_way(), "sinks are fenced, sends ended")
        self.slots_add_up()
        for counts in self.pool.slot_counts():
            assert (counts["filling"], counts["leased"], counts["quarantined"]) == (0, 0, 0), counts
        for purpose in Purpose:
            assert self.admission.taken_bytes(purpose) == 0, purpose
            assert self.admission.waiting(purpose) == 0, purpose
        assert self.node.requests.live() == []
        self._no_book_has_entries()
        for engine in self.engines:
            assert (engine.region.users, int(engine.region.written.sum())) == (0, 0)
            assert engine.memory.was_left_alone(), "a region was written after it was unmapped"
        self.no_wrong_bytes()
        left = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        ours = [handle for handle in left if "kvmoverd" in getattr(handle._callback, "__module__", "")]
        assert not ours, f"timers are left: {ours}"


IDLE_TURNS, IDLE_S = 100, 0.0005


@asynccontextmanager
async def node_kit(**options: object) -> AsyncIterator[NodeKit]:
    kit = NodeKit(**options)  # type: ignore[arg-type]
    await kit.node.namespaces.register(MANIFEST)
    async with running([kit]):
        yield kit


@asynccontextmanager
async def running(kits: Sequence[NodeKit]) -> AsyncIterator[None]:
    """Their completions are handed out; a fault on the loop is the test's."""
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: errors.append(f"{context}"))
    for kit in kits:
        kit.loop_errors = errors
    try:
        passing = real_time if any(kit.has_threads for kit in kits) else jumping_time
        with passing(kits):
            yield
            await asyncio.sleep(0)
            gc.collect(1)
            assert not errors, errors
    finally:
        loop.set_exception_handler(None)
        for kit in kits:
            kit.disk.close(0)
            kit.mover.close(0)


async def told(outbox: Outbox) -> list[Told]:
    """Everything an outbox tells until its end."""
    found: list[Told] = []
    async with asyncio.timeout(WAIT_S):
        while (event := await outbox.get()) is not None:
            found.append(event)
    return found


def end_of(events: list[Told]) -> End:
    ends = [event.end for event in events if isinstance(event, Finish | FinishDelivery)]
    assert len(ends) == 1, events
    return ends[0]


async def until(condition: object, what: str) -> None:
    assert callable(condition)
    async with asyncio.timeout(WAIT_S):
        for turn in itertools.count():  # what is waited for has no event of its own
            if condition():
                break
            await asyncio.sleep(0 if turn < IDLE_TURNS else IDLE_S)
    assert condition(), what
