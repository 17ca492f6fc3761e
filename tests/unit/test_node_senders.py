"""Frames of other nodes reach the sinks that were opened for them, once a layer, and nothing else of this node."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from node_gates import no_floor
from node_kit import LAYOUT, POISON, WAIT_S, NodeKit, OwnPeers, end_of, node_kit, told, until
from node_world import World
from test_node_incidents import SHORT

from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.shares import ReadPlan, Share
from kvmoverd.core.status import End, Path, Reason
from kvmoverd.node.decode_side import DecodeSide
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.models import Models
from kvmoverd.node.mover import Mover
from kvmoverd.node.peer import PartHandle, PartListener, PartOrder, Reservation, Reserved
from kvmoverd.node.sessions import as_pages
from kvmoverd.ports.transport import Route, RouteLost, Send, Sent

LANE = Lane(dscp=8, so_priority=1)
PEERS = {b"a" * 32: ("a", "boot-a"), b"c" * 32: ("c", "boot-c")}
LAYER_BYTES = LAYOUT.layer_bytes[0]
_OPS = itertools.count(1)


class Network:
    """A node with a TCP transport, and other nodes that have said Hello to it."""

    def __init__(self, kit: NodeKit) -> None:
        self.kit = kit
        self.lost: list[RouteLost] = []
        self.here = tcp("here", "boot")
        lanes = no_floor(kit.observer)
        kit.mover = kit.services.mover = Mover(kit.wire, self.here, self.lost.append, kit.services.clock, lanes)
        self.others = {key: tcp(*who) for key, who in PEERS.items()}

    async def send(self, name: str, sink_id: int, *layers: tuple[int, bytes], first_block: int = 0) -> list[Reason]:
        """Layers from another node in one burst: how each is answered."""
        key = name.encode() * 32
        route, other = Route("here", "boot", self.here.endpoint, key), self.others[key]
        held = [np.frombuffer(content, dtype=np.uint8) for _, content in layers]
        rows = [np.array([[memory.ctypes.data, len(memory)]], dtype=np.uint64) for memory in held]
        sends = [
            Send(next(_OPS), route, sink_id, layer, first_block, row)
            for (layer, _), row in zip(layers, rows, strict=True)
        ]
        other.submit(sends)
        answers: dict[int, Reason] = {}
        async with asyncio.timeout(WAIT_S):
            while len(answers) < len(sends):
                answers |= {event.op_id: event.reason for event in other.poll(64) if isinstance(event, Sent)}
                await asyncio.sleep(0)
        return [answers[send.op_id] for send in sends]

    async def poison(self, name: str, sink_id: int, blocks: int, layer: int = 0) -> Reason:
        return (await self.send(name, sink_id, (layer, bytes([POISON]) * (blocks * LAYER_BYTES))))[0]

    def close(self) -> None:
        for end in (self.here, *self.others.values()):
            assert end.close(WAIT_S)


class FarPeer(LocalPeer):
    """A decode node that calls itself `a`, boot `boot-a`; its part is the test's to read."""

    def __init__(self, decode_side: DecodeSide, models: Models) -> None:
        super().__init__(decode_side, models)
        self.parts: list[tuple[int, PartListener]] = []

    async def reserve(self, reservation: Reservation) -> Reserved:
        reserved = await super().reserve(reservation)
        plan = ReadPlan(tuple(Share("there", share.blocks) for share in reserved.plan.shares))
        return replace(reserved, route=Route("a", "boot-a", "", b"a" * 32), plan=plan)

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        self.parts.append((order.sink_id, listener))
        return _Unheeding()


class _Unheeding:
    """A part that does nothing by itself."""

    def credit(self, prefix_blocks: int, layers: int) -> None:
        """The test sends when it likes."""

    def assemble(self, sink_id: int) -> None:
        """Nobody assembles."""

    def give_up(self, kept_blocks: int) -> None:
        """It keeps all."""

    def stop(self) -> None:
        """The test tells the end."""


def tcp(node: str, boot_id: str) -> TcpTransport:
    """One connection to a node: what a burst has later comes later."""
    return TcpTransport(node, boot_id, "127.0.0.1", 0, lane=LANE, check_key=PEERS.get, connections=1)


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    async with node_kit(slots=24, limits=SHORT) as kit:
        made = Network(kit)
        try:
            yield made
        finally:
            made.close()


def reservation(kit: NodeKit, blocks: int) -> Reservation:
    keys = kit.chain(blocks)
    return Reservation("x", 1, kit.namespace.fingerprint, keys, 0, 0, None, 60.0, "a", "boot-a")


def layers_of(content: bytes) -> list[tuple[int, bytes]]:
    spans = [LAYOUT.layer_span(layer) for layer in range(LAYOUT.layer_count)]
    return [(layer, content[span.start : span.stop]) for layer, span in enumerate(spans)]


@pytest.mark.parametrize(
    "flow", [World.fetch_pages, World.store_blocks, World.load_only, World.turn_pe, World.turn_de, World.push_only]
)
async def test_another_node_reaches_no_sink_of_a_request_of_this_node(flow: Callable[[World], None]) -> None:
    async with network() as net:
        world, tried = World(net.kit, hit=0 if flow is World.push_only else 2), set[int]()
        await world.prepare()
        flow(world)
        more = True
        while more:
            for sink_id in {send.sink_id for send, _ in net.kit.wire.held} - tried:
                tried.add(sink_id)
                for name, blocks in itertools.product("ac", (2, 3)):
                    assert await net.poison(name, sink_id, blocks) is Reason.CANCELLED
            more = await world.step()
        assert tried, "the flow opened sinks"
        await world.finish()
        assert net.lost == [], "a refused frame costs nobody a channel"


async def test_what_is_stored_is_what_the_engine_had_whatever_another_node_sends() -> None:
    async with network() as net:
        kit = net.kit
        engine, keys = kit.engine(8), kit.chain(1)
        kit.disk.closed = True
        storing = asyncio.get_running_loop().create_task(kit.store(engine, keys))
        await until(lambda: kit.disk.held, "the blocks are copied and wait for the disk")
        for sink_id in kit.mover._sinks:
            assert await net.poison("a", sink_id, 1) is Reason.CANCELLED
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await storing
        assert kit.stored(keys[0]) == kit.content(keys[0])
        await kit.everything_is_home()


async def test_a_buffer_takes_layers_of_the_node_that_reserved_it_and_of_no_other() -> None:
    async with network() as net:
        kit, content = net.kit, net.kit.content(net.kit.chain(1)[0])
        reserved = await kit.node.decode_side.reserve(kit.namespace, reservation(kit, 1))
        sink = reserved.push_sink
        await kit.node.decode_side.set_prefix(reserved.ticket, 0, ())
        assert await net.send("c", sink, *layers_of(content)) == [Reason.CANCELLED] * LAYOUT.layer_count
        local = Send(next(_OPS), None, sink, 0, 0, np.zeros((0, 2), dtype=np.uint64))
        kit.wire.inner.submit([local])
        (answer,) = kit.wire.inner.poll(10)
        assert isinstance(answer, Sent) and answer.reason is Reason.CANCELLED, "not even this process"
        assert await net.poison("a", sink, 1, layer=LAYOUT.layer_count) is Reason.CANCELLED, "no such layer"
        assert await net.send("a", sink, *layers_of(content)) == [Reason.OK] * LAYOUT.layer_count
        assert net.lost == []
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_layers_that_come_again_in_the_burst_that_makes_a_buffer_whole_do_not_land() -> None:
    """The loop has seen none of them when the last one comes: what is stored and handed out is what came first."""
    async with network() as net:
        kit, side = net.kit, net.kit.node.decode_side
        engine, (key,) = kit.engine(8), kit.chain(1)
        reserved = await side.reserve(kit.namespace, reservation(kit, 1))
        session = engine.session.session_id
        assembled = side.attach(kit.namespace, "x", 1, session, WAIT_S)
        await side.set_prefix(reserved.ticket, 0, ())
        layers = layers_of(kit.content(key))
        again = [(layer, bytes([POISON]) * LAYER_BYTES) for layer, _ in layers]
        kit.pumping = False
        reasons = await net.send("a", reserved.push_sink, *layers, *again)
        assert reasons == [Reason.OK] * len(layers) + [Reason.CANCELLED] * len(again)
        kit.pumping = True
        await until(lambda: kit.stored(key) is not None, "the new block is stored")
        for layer, _ in layers:
            assert await net.poison("a", reserved.push_sink, 1, layer) is Reason.CANCELLED, "whole, but not released"
        assert end_of(await told(side.deliver("x", 1, engine.region, as_pages([3]), session))).reason is Reason.OK
        assert engine.block(3) == kit.pooled()[key] == kit.stored(key) == kit.content(key)
        assert end_of(await told(assembled)).reason is Reason.OK
        await kit.everything_is_home()


async def test_a_stream_lets_in_the_node_that_reads_its_part_and_nobody_else() -> None:
    async with network() as net:
        kit = net.kit
        far = FarPeer(kit.node.decode_side, kit.node.models)
        kit.node.peers = OwnPeers(far)
        engine, keys = kit.engine(8), kit.chain(1)
        await kit.store(kit.engine(8), keys)
        plan = kit.plan(engine, kit.call(engine), keys, hit=1, path=Path.DE, decode_node="there")
        stream = kit.node.stream(plan)
        await until(lambda: far.parts, "the part is asked for")
        ((sink_id, listener),) = far.parts
        listener.on_prefix(1, None)
        layers = layers_of(kit.content(keys[0]))
        assert await net.send("c", sink_id, *layers) == [Reason.CANCELLED] * len(layers)
        assert await net.send("a", sink_id, *layers, layers[0]) == [Reason.OK] * len(layers) + [Reason.CANCELLED]
        listener.on_end(End(Reason.OK))
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        assert engine.block(0) == kit.content(keys[0])
        kit.node.session_closed(engine.session.session_id, "the test ends")
        await kit.everything_is_home()


async def test_a_region_stays_mapped_until_the_sink_of_a_fetch_is_quiet_but_its_pages_are_free_at_once() -> None:
    async with network() as net:
        kit = net.kit
        engine, keys = kit.engine(8), kit.chain(2)
        await kit.store(engine, keys)
        fetched = kit.node.fetch(
            kit.call(engine), kit.namespace, keys, FetchKind.PAGES, region=engine.region, pages=as_pages([4, 5])
        )
        seen: list[tuple[int, int]] = []
        fetched.on_gone.append(lambda: seen.append((engine.region.users, int(engine.region.written.sum()))))
        assert end_of(await told(fetched.outbox)).reason is Reason.OK
        assert seen == [(1, 0)]
        assert [engine.block(page) for page in (4, 5)] == [kit.content(key) for key in keys]
        await kit.everything_is_home()
