"""Three daemons over RDMA: a request that all of them read, and what a third node's CNIC may still write when it is gone."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rpc_kit import HERE, LAYERS, SEGMENTS, THERE, Engine, Kit, end_of, until
from test_rpc_peers import peer_of
from verbs_kit import FakeQueuePair
from verbs_node_kit import Fakes, check, everything_is_home, fake_cnics, fill, store, transport, verbs_nodes
from verbs_wire_kit import Work

from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.adapters.transport.verbs.fabric import Opcode
from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.qos import KvClass
from kvmoverd.node.streaming import StreamDriver

THIRD = "third"
CNICS = {HERE: "fake0", THERE: "fake1", THIRD: "fake2"}
BLOCKS, HITS = 5, 4
PAGES, DELIVERED = list(range(BLOCKS)), list(range(8, 8 + BLOCKS))
RIGHT = [(1, block) for block in range(HITS)] + [(2, HITS)]
"""Seed and number of what must lie in each page: hits as they were stored, then what the engine computed."""
SHARES = ((HERE, 0, 1), (THIRD, 1, 3), (THERE, 3, 4))
BLOCK_BYTES = LAYERS * sum(SEGMENTS)
POISON = 0xEE
POISON_RUN_BYTES = min(SEGMENTS)
GONE = "a test says so"


@pytest.fixture
def cnics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fake_cnics(monkeypatch) as fakes:
        yield fakes


class Trio:
    """A prefill node `here`, a decode node `there`, a `third` one, an engine on each; the hits are stored on all."""

    def __init__(self, cnics: Fakes, kits: dict[str, Kit], engines: dict[str, Engine]) -> None:
        self.wire = cnics.wire
        self.kits = kits
        self.engines = engines
        self.fabrics = {name: cnics.opened[f"{device}:1"] for name, device in CNICS.items()}

    def plan(self, request_id: str = "r", shares: tuple[tuple[str, int, int], ...] = SHARES) -> engine_pb2.RequestPlan:
        parts = [
            common_pb2.PlannedPart(node=node, blocks=common_pb2.BlockRuns(first=[first], count=[stop - first]))
            for node, first, stop in shares
        ]
        return self.engines[HERE].plan(
            request_id,
            blocks=BLOCKS,
            hit_blocks=HITS,
            decode_node=THERE,
            path=common_pb2.PATH_PARTS,
            parts=parts,
            page_sets=[common_pb2.PageSet(pages=PAGES)],
        )

    async def between(self, source: str, target: str) -> tuple[FakeQueuePair, Work]:
        """Moves the held wire on until a chain from one node to another has landed in part."""
        async with asyncio.timeout(5.0):
            while True:
                for end in list(self.fabrics[source].queue_pairs):
                    work = end.sends[0] if end.sends else None
                    if work is None or work.opcode is not Opcode.WRITE or not 0 < work.done < len(work.rows):
                        continue
                    if self.goes_to(end, target):
                        return end, work
                # The CNICs' threads need the interpreter to get on.
                await asyncio.sleep(0 if self.wire.step() else 0.001)

    def goes_to(self, end: FakeQueuePair, target: str) -> bool:
        return any(other.end == end.peer for other in self.fabrics[target].queue_pairs)

    def ends_from(self, source: str, target: str) -> list[FakeQueuePair]:
        """Ends of one node that another one writes through."""
        peers = [end.peer for end in self.fabrics[source].queue_pairs]
        return [end for end in self.fabrics[target].queue_pairs if end.end in peers]

    def forget_third(self) -> None:
        """What the others do when their watches of it end."""
        for name in (HERE, THERE):
            self.kits[name].daemon._peer_lost(THIRD, self.kits[THIRD].daemon.boot_id, GONE)

    def poison_third(self) -> None:
        """What its CNIC reads from its memory from now on is wrong."""
        arena = self.kits[THIRD].daemon.devices.arena
        ctypes.memset(arena.address, POISON, arena.size_bytes)

    def poisoned(self, name: str) -> bool:
        """Lies anything of what `poison_third` wrote in this node's pages or pool?"""
        arena = self.kits[name].daemon.devices.arena
        pool = np.ctypeslib.as_array((ctypes.c_uint8 * arena.size_bytes).from_address(arena.address))
        pages = self.engines[name].memories[-1].array()
        needle = bytes([POISON]) * POISON_RUN_BYTES
        return needle in pool.tobytes() or needle in pages.tobytes()

    async def fenced(self, name: str, times: int) -> None:
        """Until so many queue pairs were destroyed there under frames that were not let go."""
        rdma = self.kits[name].daemon.devices.rdma
        assert rdma is not None
        await until(lambda: rdma.links.facts.fences == times, f"{name} has fenced {rdma.links.facts.fences} times")


@asynccontextmanager
async def trio(cnics: Fakes, home: Path, tables: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[Trio]:
    named = {name: transport(device, **(tables or {})) for name, device in CNICS.items()}
    async with verbs_nodes(home, named, shutdown={"drain": "100ms"}, **more) as kits:
        engines = {name: await kit.engine() for name, kit in kits.items()}
        # Of a store that all share only the prefill node has what it wrote, in its pool.
        for name in (HERE,) if "storage" in more else engines:
            await store(engines[name], 1, HITS)
        fill(engines[HERE], PAGES, 2)
        yield Trio(cnics, kits, engines)


class Asked:
    """The calls of one request."""

    def __init__(self, nodes: Trio, plan: engine_pb2.RequestPlan) -> None:
        self.nodes = nodes
        self.request_id = plan.request_id
        self.assembled = nodes.engines[THERE].assemble(plan.request_id)
        self.streamed = nodes.engines[HERE].stream(plan)
        self.pushed = nodes.engines[HERE].ask("PushLayers")
        self._plan = plan

    async def begin(self) -> None:
        await self.pushed.write(engine_pb2.PushLayersRequest(plan=self._plan))

    async def whole(self) -> None:
        """To the last byte in the decode engine's pages, all of them right."""
        prefill, decode = self.nodes.engines[HERE], self.nodes.engines[THERE]
        ready = await end_of(self.streamed)
        assert (ready.status.reason, ready.prefix_blocks) == (common_pb2.OK, HITS), ready
        check(prefill, PAGES, RIGHT)
        await self.pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        assert (await end_of(self.pushed)).status.reason == common_pb2.OK
        async with asyncio.timeout(5.0):
            while (await self.assembled.read()).WhichOneof("kind") != "whole":
                pass
        deliver = engine_pb2.DeliverRequest(
            request_id=self.request_id,
            attempt=1,
            region_id=decode.region_id,
            pages=common_pb2.PageSet(pages=DELIVERED),
        )
        assert (await end_of(decode.ask("Deliver", deliver))).status.reason == common_pb2.OK
        assert (await end_of(self.assembled)).status.reason == common_pb2.OK
        check(prefill, PAGES, RIGHT)
        check(decode, DELIVERED, RIGHT)


async def asked(nodes: Trio, plan: engine_pb2.RequestPlan | None = None) -> Asked:
    made = Asked(nodes, plan if plan is not None else nodes.plan())
    await made.begin()
    return made


@pytest.mark.parametrize("local", ["shm", "verbs"])
async def test_what_three_nodes_read_at_once_is_right_and_each_byte_has_one_way(
    cnics: Fakes, tmp_path: Path, local: str
) -> None:
    async with trio(cnics, tmp_path, {"local": local}) as nodes:
        await (await asked(nodes)).whole()
        await everything_is_home(*nodes.kits.values())
        # From the pages to the DE buffer: what the prefill node read, and the new block. The third node sends its two to both.
        assert await sent_bytes(nodes.kits[HERE]) == ({THERE: 2 * BLOCK_BYTES}, {"assembly": 2 * BLOCK_BYTES})
        assert await sent_bytes(nodes.kits[THERE]) == ({HERE: BLOCK_BYTES}, {"layers": BLOCK_BYTES})
        assert await sent_bytes(nodes.kits[THIRD]) == (
            {HERE: 2 * BLOCK_BYTES, THERE: 2 * BLOCK_BYTES},
            {"layers": 2 * BLOCK_BYTES, "assembly": 2 * BLOCK_BYTES},
        )
        assert not any(kit.daemon.devices.rdma.links.facts.fences for kit in nodes.kits.values())
    assert not any(fabric.queue_pairs or len(fabric.book) for fabric in cnics.opened.values())


async def sent_bytes(kit: Kit) -> tuple[dict[str, int], dict[str, int]]:
    """By node, and by class."""
    status = await kit.status()
    by_node = {peer.node: peer.sent_bytes for peer in status.peers if peer.sent_bytes}
    return by_node, {lane.kv_class: lane.sent_bytes for lane in status.lanes if lane.sent_bytes}


async def test_each_class_has_queue_pairs_with_its_own_marks_also_to_two_nodes(cnics: Fakes, tmp_path: Path) -> None:
    marks = {KvClass.LAYERS: 32, KvClass.ASSEMBLY: 64}
    classes = {kv_class.value: {"traffic_class": traffic_class} for kv_class, traffic_class in marks.items()}
    async with trio(cnics, tmp_path, {"classes": classes}) as nodes:
        await (await asked(nodes)).whole()
        found = {
            target: {end.marks.traffic_class for end in nodes.ends_from(THIRD, target) if end.marks is not None}
            for target in (HERE, THERE)
        }
        assert found == {HERE: {32}, THERE: {64}}
        await everything_is_home(*nodes.kits.values())


@pytest.mark.parametrize("target", [HERE, THERE])
@pytest.mark.parametrize("late", ["before", "after"])
async def test_what_a_third_node_had_sent_when_it_was_killed_never_lands_on_what_is_read_in_its_place(
    cnics: Fakes, tmp_path: Path, target: str, late: str
) -> None:
    """`target`: whom it was writing to, the engine's pages or the DE buffer. `late`: than the queue pairs' end, or not."""
    cnics.wire.on_its_way = 8
    async with trio(cnics, tmp_path) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        await nodes.between(THIRD, target)
        nodes.poison_third()
        ends = nodes.ends_from(THIRD, HERE) + nodes.ends_from(THIRD, THERE)
        nodes.fabrics[THIRD].kill()
        if late == "before":
            assert cnics.wire.settle() > 0
            assert nodes.poisoned(target), "nothing was on its way"
        nodes.forget_third()
        if late == "after":
            await until(lambda: all(end.destroyed for end in ends), "the others' ends are destroyed")
        cnics.wire.release()
        await request.whole()
        assert all(end.destroyed for end in ends)
        assert cnics.wire.tally.late_attempts > 0 or late == "before"
        await nodes.fenced(target, 1)
        await everything_is_home(nodes.kits[HERE], nodes.kits[THERE])


@pytest.mark.parametrize("target", [HERE, THERE])
async def test_a_third_node_that_stands_still_is_fenced_before_its_pages_are_another_reader_s(
    cnics: Fakes, tmp_path: Path, target: str
) -> None:
    """Its process is stopped, its CNIC is not: what that has in hand comes to ends which are destroyed."""
    async with trio(cnics, tmp_path) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        end, work = await nodes.between(THIRD, target)
        nodes.fabrics[THIRD].stop()
        ends = nodes.ends_from(THIRD, HERE) + nodes.ends_from(THIRD, THERE)
        nodes.forget_third()
        await until(lambda: all(end.destroyed for end in ends), "the others' ends are destroyed")
        nodes.poison_third()
        late_attempts = cnics.wire.tally.late_attempts
        cnics.wire.release()
        await request.whole()
        assert cnics.wire.tally.late_attempts > late_attempts, "its CNIC had nothing in hand"
        assert end.sends or work.done < len(work.rows), "what had begun can't have ended well"
        await nodes.fenced(target, 1)
        nodes.fabrics[THIRD].resume()
        await everything_is_home(*nodes.kits.values())


@pytest.mark.parametrize("target", [HERE, THERE])
async def test_a_third_node_whose_packets_are_late_finds_its_queue_pairs_destroyed(
    cnics: Fakes, tmp_path: Path, target: str
) -> None:
    """Its part has failed, nobody took it for dead: whose layer has begun is asked to let go of it, and does not answer."""
    cnics.wire.retry_s = 30.0
    async with trio(cnics, tmp_path, {"fence": "700ms"}) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        end, work = await nodes.between(THIRD, target)
        (far,) = nodes.ends_from(THIRD, target)
        third = nodes.fabrics[THIRD]
        third.stop()
        third.unplug()
        nodes.poison_third()
        (part,) = peer_of(nodes.kits[HERE], THIRD).parts
        part.lost(GONE)
        cnics.wire.release()
        await request.whole()
        assert far.destroyed and end.sends and work.done < len(work.rows)
        before, work.tried_s = cnics.wire.tally.late_attempts, None
        third.plug()
        await until(lambda: cnics.wire.tally.late_attempts > before, "its CNIC goes on")
        await nodes.fenced(target, 1)
        check(nodes.engines[HERE], PAGES, RIGHT)
        check(nodes.engines[THERE], DELIVERED, RIGHT)
        assert not nodes.poisoned(HERE) and not nodes.poisoned(THERE)
        third.resume()
        await everything_is_home(nodes.kits[HERE], nodes.kits[THERE])


async def test_a_third_node_whose_cable_is_pulled_says_so_itself_and_is_replaced(cnics: Fakes, tmp_path: Path) -> None:
    """Its daemon is well, and still reached over the management network."""
    async with trio(cnics, tmp_path, {"fence": "200ms"}) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        await nodes.between(THIRD, HERE)
        nodes.fabrics[THIRD].unplug()
        cnics.wire.release()
        await request.whole()
        moved = (await nodes.kits[HERE].status()).moved_parts
        assert dict(moved) == {"failed": 1}
        await everything_is_home(*nodes.kits.values())
        nodes.fabrics[THIRD].plug()
        fill(nodes.engines[HERE], PAGES, 2)
        await (await asked(nodes, nodes.plan("again"))).whole()
        await everything_is_home(*nodes.kits.values())


async def test_a_third_node_that_has_no_link_to_the_decode_node_alone_is_replaced_there(
    cnics: Fakes, tmp_path: Path
) -> None:
    """The engine's pages have all its layers by then: only the DE buffer has to be filled by another reader."""
    async with trio(cnics, tmp_path) as nodes:
        await (await asked(nodes, nodes.plan("two", ((HERE, 0, 2), (THERE, 2, HITS))))).whole()
        nodes.fabrics[THERE].refuses_marks = True
        fill(nodes.engines[HERE], PAGES, 2)
        await (await asked(nodes)).whole()
        assert (await sent_bytes(nodes.kits[THIRD]))[1] == {"layers": 2 * BLOCK_BYTES}
        assert dict((await nodes.kits[HERE].status()).moved_parts) == {"failed": 1}
        nodes.fabrics[THERE].refuses_marks = False
        fill(nodes.engines[HERE], PAGES, 2)
        await (await asked(nodes, nodes.plan("again"))).whole()
        await everything_is_home(*nodes.kits.values())


async def test_a_request_that_is_cancelled_in_a_layer_of_a_third_node_breaks_no_link(
    cnics: Fakes, tmp_path: Path
) -> None:
    """Its sender lets go of both sinks: nobody else's layers have to be asked for again."""
    async with trio(cnics, tmp_path) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        await nodes.between(THIRD, HERE)
        request.streamed.cancel()
        # Whatever goes on before the node has heard of it ends the stream well.
        (stream,) = [live for live in nodes.kits[HERE].node.requests.live() if isinstance(live, StreamDriver)]
        is_told = (StreamState.DRAINING, StreamState.UNQUIET, StreamState.ENDED)
        await until(lambda: stream.machine.state in is_told, "the stream goes on")
        cnics.wire.release()
        assert (await end_of(request.pushed)).status.reason == common_pb2.CANCELLED
        await everything_is_home(*nodes.kits.values())
        assert not any(kit.daemon.devices.rdma.links.facts.fences for kit in nodes.kits.values())
        assert not any(kit.daemon.devices.rdma.links.facts.reconnects for kit in nodes.kits.values())
        fill(nodes.engines[HERE], PAGES, 2)
        await (await asked(nodes, nodes.plan("again"))).whole()
        await everything_is_home(*nodes.kits.values())


async def test_pages_of_a_cancelled_request_are_quiet_only_when_a_silent_third_node_is_fenced(
    cnics: Fakes, tmp_path: Path
) -> None:
    async with trio(cnics, tmp_path, {"fence": "200ms"}) as nodes:
        cnics.wire.hold()
        request = await asked(nodes)
        await nodes.between(THIRD, HERE)
        nodes.fabrics[THIRD].stop()
        (end,) = nodes.ends_from(THIRD, HERE)
        request.streamed.cancel()
        region = next(iter(nodes.kits[HERE].node.sessions.all())).regions[nodes.engines[HERE].region_id]
        await until(lambda: region.users == 0, "its pages are in use")
        assert end.destroyed, "pages are given back while a CNIC may write them"
        nodes.poison_third()
        cnics.wire.release()
        await everything_is_home(nodes.kits[HERE], nodes.kits[THERE])
        assert not nodes.poisoned(HERE)
        nodes.fabrics[THIRD].resume()
        await everything_is_home(nodes.kits[THIRD])


SLOW = {
    "kind": "auto",
    "layout": "files",
    "threads": 1,
    "ops_max": 1,
    "read_rate_max": "32KiB",
    "io_deadline": "600s",
    "grace": "700s",
}
"""A block takes a quarter of a second, and only one is asked for at a time."""


async def test_blocks_that_a_third_node_gives_up_come_from_another_one_and_by_nobody_twice(
    cnics: Fakes, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    path.mkdir()
    async with trio(cnics, tmp_path, storage=[SLOW | {"name": "root", "path": str(path)}]) as nodes:
        here, third = nodes.kits[HERE].node, nodes.kits[THIRD].node
        request = await asked(nodes)
        await until(lambda: third.services.desk.depth().queue_bytes, "the third node reads")
        (stream,) = [driver for driver in here.requests.live() if isinstance(driver, StreamDriver)]
        (part,) = [known.part for known in stream.machine.parts.values() if known.share.node == THIRD]
        stream.run(stream.machine.on_move(part, 1, THERE))
        await request.whole()
        blocks = {name: sum((await sent_bytes(kit))[0].values()) // BLOCK_BYTES for name, kit in nodes.kits.items()}
        # The prefill node: its block and the new one, to the DE buffer. The decode node: its block and the one that it took over.
        assert blocks == {HERE: 2, THERE: 2, THIRD: 2}, "the third node sends the one that it kept to both"
        read = {
            name: sum(root.read_blocks for root in (await kit.status()).storage) for name, kit in nodes.kits.items()
        }
        assert read == {HERE: 0, THERE: 2, THIRD: 1}
        await everything_is_home(*nodes.kits.values())
