"""The storage desk: what goes before what, what is bounded, and look-ups beside a disk that hangs."""

from __future__ import annotations

import asyncio

import pytest
from node_gates import StorageGate
from node_kit import LAYOUT, MANIFEST, Anonymous, node_kit, until

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.keys import ROOT
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Reason
from kvmoverd.node import catalog, reader
from kvmoverd.node.desk import LOW_PRIORITY, STANDS_BACK_NS, StorageDesk
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone

NAMESPACE = Namespace(MANIFEST)


def held_kinds(gate: StorageGate) -> list[str]:
    names = {BlockRead: "read", BlockWrite: "write", BlockProbe: "probe"}
    return [names[type(op)] for op in gate.held]


def ignore(done: StorageDone) -> None:
    """A completion that nobody looks at."""


@pytest.fixture
def gate():  # type: ignore[no-untyped-def]
    gate = StorageGate()
    gate.inner.open_namespace(NAMESPACE)
    gate.closed = True
    yield gate
    gate.close(0)


def fill(desk: StorageDesk, address: int, *, reads: int, writes: int, probes: int) -> None:
    for n in range(writes):
        desk.write(NAMESPACE, bytes([n]) * 32, ROOT, n, address, ignore)
    for n in range(reads):
        desk.read(NAMESPACE, bytes([n]) * 32, address, rank=(0, n), done=ignore)
    for n in range(probes):
        desk.probe(NAMESPACE, (bytes([n]) * 32,), ignore)
    desk.submit()


def test_probes_go_first_then_reads_and_one_write_beside_them(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=8, queue_max=100)
    fill(desk, memory.address, reads=20, writes=20, probes=2)
    assert held_kinds(gate) == ["probe", "probe", "write", "read", "read", "read", "read", "read"]
    assert [op.keys[0][0] for op in list(gate.held)[:2] if isinstance(op, BlockProbe)] == [0, 1]
    while gate.release_one():
        desk.pump()
        held = held_kinds(gate)
        most = desk.writes_beside_reads_max if "read" in held else desk.writes_max
        assert held.count("write") <= most
    assert desk.idle() and gate.under_way_max == 8


def test_writes_have_most_places_while_nothing_is_read_and_a_read_finds_one_at_once(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=8, queue_max=100)
    fill(desk, memory.address, reads=0, writes=20, probes=0)
    assert held_kinds(gate) == ["write"] * 6
    fill(desk, memory.address, reads=1, writes=0, probes=0)
    assert held_kinds(gate) == ["write"] * 6 + ["read"]
    for writes_left in (5, 4, 3, 2, 2):
        gate.release_one()
        desk.pump()
        assert sorted(held_kinds(gate)) == ["read"] + ["write"] * writes_left, "beside a read a quarter of all places"


def test_reads_that_nobody_waits_for_go_after_all_writes_and_take_no_place_from_them(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=8, queue_max=100)
    for n in range(4):
        desk.read(NAMESPACE, bytes([n]) * 32, memory.address, rank=(LOW_PRIORITY, 0), done=ignore)
    fill(desk, memory.address, reads=1, writes=20, probes=0)
    assert held_kinds(gate) == ["read", "write", "write"] + ["read"] * 4
    assert [op.low for op in gate.held if isinstance(op, BlockRead)] == [False] + [True] * 4
    gate.release_one()
    desk.pump()
    assert held_kinds(gate).count("write") == 4, "hints that are read leave writes what they have beside nothing"
    while gate.release_one():
        desk.pump()
    assert desk.idle() and desk._low_under_way == 0


def test_a_read_of_less_need_stands_back_for_a_while_and_not_for_ever(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=1, queue_max=200)
    order: list[int] = []

    def read(priority: int, due_ns: int) -> None:
        number = len(order) + desk.reads_waiting() + 1
        rank = (priority, due_ns)
        desk.read(NAMESPACE, bytes([number]) * 32, memory.address, rank=rank, done=lambda _: order.append(priority))

    read(1, 0)
    for step in range(20):
        read(0, step * 10_000_000)
    desk.submit()
    while gate.release_one():
        desk.pump()
    first = order.index(1)
    assert first == STANDS_BACK_NS // 10_000_000 + 1, "what came up to 50 ms later, and is needed more, has passed it"
    assert order == [0] * first + [1] + [0] * (20 - first)


def test_writes_that_a_stop_leaves_are_told(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=2, queue_max=100)
    ended: list[Reason] = []
    for n in range(5):
        desk.write(NAMESPACE, bytes([n]) * 32, ROOT, n, memory.address, lambda done: ended.append(done.reason))
    desk.submit()
    assert desk.writes_waiting() == 3
    desk.stop_writes("the daemon stops")
    assert ended == [Reason.SHUTTING_DOWN] * 3 and desk.writes_waiting() == 0
    while gate.release_one():
        desk.pump()
    assert ended[3:] == [Reason.OK] * 2 and desk.idle()


def test_a_single_place_serves_reads_before_writes(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=1, queue_max=100)
    fill(desk, memory.address, reads=2, writes=1, probes=0)
    order = []
    while gate.held:
        order += held_kinds(gate)
        gate.release_one()
        desk.pump()
    assert order == ["read", "read", "write"]


def test_each_queue_is_bounded_and_says_so_with_numbers(gate: StorageGate) -> None:
    memory = Anonymous(LAYOUT.record_bytes)
    desk = StorageDesk(gate, ops_max=1, queue_max=3)
    fill(desk, memory.address, reads=3, writes=3, probes=3)
    with pytest.raises(QueueFull, match="3 block writes wait, at most 3 may"):
        fill(desk, memory.address, reads=0, writes=1, probes=0)
    desk.probe(NAMESPACE, (ROOT,), ignore)
    with pytest.raises(QueueFull, match="3 probes wait, at most 3 may"):
        fill(desk, memory.address, reads=0, writes=0, probes=1)
    with pytest.raises(QueueFull, match="3 block reads wait, at most 3 may"):
        fill(desk, memory.address, reads=1, writes=0, probes=0)
    assert desk.read_queue_bytes == 3 * LAYOUT.record_bytes
    while gate.release_one():
        desk.pump()


async def test_a_lookup_beside_a_hanging_disk_answers_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "PROBE_S", 0.02)
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(4)
        await kit.store(engine, keys[:2])
        kit.disk.closed = True
        for _ in range(12):
            looked = await asyncio.wait_for(kit.node.namespaces.lookup(kit.namespace, keys), 1.0)
            assert (looked.prefix_blocks, looked.pooled_blocks) == (2, 2)
        assert len(kit.services.desk._probes) == 0, "who gave up left the queue"
        assert len(kit.disk.held) == 8
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(kit.services.desk.idle, "the probes end")
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 2
        await kit.everything_is_home()


async def test_a_block_that_another_node_stored_is_found_by_a_probe() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        await kit.store(engine, keys)
        kit.node.services.reader.forget_namespace(kit.namespace)
        looked = await kit.node.namespaces.lookup(kit.namespace, keys)
        assert (looked.prefix_blocks, looked.pooled_blocks) == (3, 0)
        kit.disk.closed = True
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 3, "remembered: no second probe"
        kit.disk.closed = False
        await kit.everything_is_home()


async def test_later_ranges_take_no_place_that_was_promised_to_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "STARTS_MAX", 2)
    async with node_kit() as kit:
        engine, early, late = kit.engine(), kit.chain(4), kit.chain(6, salt=1)
        await kit.store(engine, early + late)
        kit.forget_clean()
        kit.disk.closed = True
        desk, blocks = kit.services.desk, kit.services.reader
        desk.ops_max, desk.queue_max = 2, 8
        first = blocks.acquire(kit.namespace, early, priority=1, due_ns=1, by_ranges=True)
        await until(lambda: desk.reads_waiting() == 2, "all of the first reads are started")
        second = blocks.acquire(kit.namespace, late, priority=1, due_ns=2, by_ranges=True)
        desk.write(kit.namespace, b"w" * 32, ROOT, 0, kit.arena.address, ignore)
        kit.disk.release_one()
        desk.pump()
        assert held_kinds(kit.disk) == ["read", "write"], "a block waits for its second range"
        await until(lambda: desk.reads_waiting() == 8, "all reads are started")
        with pytest.raises(QueueFull, match="8 block reads wait and 1 more are wanted, at most 8 may"):
            blocks.acquire(kit.namespace, kit.chain(1, salt=2), priority=1, due_ns=3)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(lambda: first.whole_prefix() == 4 and second.whole_prefix() == 6, "everything is read")
        for acquired in (first, second):
            blocks.release(acquired)
        assert not kit.loop_errors


def test_the_depth_is_all_that_is_left_to_read_and_the_rate_at_which_it_was_read(gate: StorageGate) -> None:
    memory, now_ns = Anonymous(LAYOUT.record_bytes), [0]
    desk = StorageDesk(gate, ops_max=4, queue_max=100, now_ns=lambda: now_ns[0])
    assert desk.depth() == Depth()
    gate.inner.submit([BlockWrite(n, NAMESPACE, bytes([n]) * 32, ROOT, 0, memory.address) for n in range(10)])
    assert len(gate.inner.poll(10)) == 10
    fill(desk, memory.address, reads=10, writes=0, probes=0)
    left_bytes = [desk.depth().queue_bytes]
    while gate.release_one():
        now_ns[0] += 10_000_000
        desk.pump()
        left_bytes.append(desk.depth().queue_bytes)
    assert left_bytes == [left * LAYOUT.record_bytes for left in range(10, -1, -1)]
    assert desk.depth().rate_bytes_per_s == pytest.approx(100 * LAYOUT.record_bytes, rel=0.05)
