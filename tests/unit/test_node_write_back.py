"""Write-back: nothing is copied or written twice, and no block is lost without being counted, told and logged."""

from __future__ import annotations

import pytest
from node_kit import LAYOUT, NodeKit, end_of, node_kit, told, until
from write_back_kit import dropped, home, let_go, reasons, store, written

from kvmoverd.core.drops import Drop
from kvmoverd.core.errors import QueueFull
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.node import stored
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain, Chains
from kvmoverd.node.writer import ChainBlock, write_blocks
from kvmoverd.ports.storage import BlockProbe, BlockWrite, StorageOp

RECORD = LAYOUT.record_bytes


async def test_blocks_that_are_stored_are_told_without_a_copy_a_slot_or_a_write() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(4)
        await kit.store(engine, keys[:3])
        ops, free = written(kit), kit.admission.free_bytes
        again = store(kit, engine, keys[:3])
        assert kit.services.room._owners == {}, "no room is taken"
        end = end_of(await told(again.outbox))
        assert (end.reason, end.prefix_blocks, end.moved_bytes, ops) == (Reason.OK, 3, 0, [])
        more = await told(store(kit, engine, keys).outbox)
        assert reasons(more) == [Reason.OK] * 4 and end_of(more).moved_bytes == LAYOUT.block_bytes
        assert [op.key for op in ops] == [keys[3]] and free is not None
        await home(kit)


async def test_a_block_that_the_index_knows_and_nobody_has_is_written() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(5)
        await kit.store(engine, keys)
        for lost in (keys[1], keys[3]):
            kit.storage.tamper(kit.namespace, lost, None)
        assert kit.services.reader.catalog.known(kit.namespace, keys) == [0, 1, 2, 3, 4]
        ops = written(kit)
        events = await told(store(kit, engine, keys).outbox)
        assert reasons(events) == [Reason.OK] * 5
        assert [op.key for op in ops] == [keys[1], keys[3]]
        assert all(kit.stored(key) == kit.content(key) for key in keys)
        await home(kit)


async def test_an_index_that_is_wrong_throughout_and_a_device_that_says_nothing_only_cost_the_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "LOOKS_MAX", 3)
    monkeypatch.setattr(stored, "LOOK_S", 0.05)
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(8)
        await kit.store(engine, keys)
        for key in keys:
            kit.storage.tamper(kit.namespace, key, None)
        probes: list[StorageOp] = []

        def note(op: StorageOp) -> Reason | None:
            probes.extend([op] if isinstance(op, BlockProbe) else [])
            return None

        kit.disk.fails = note
        assert reasons(await told(store(kit, engine, keys).outbox)) == [Reason.OK] * 8
        assert len(probes) == 3
        kit.disk.closed = True
        silent = store(kit, engine, keys)
        await until(lambda: any(isinstance(op, BlockWrite) for op in kit.disk.held), "it goes on without an answer")
        await let_go(kit)
        assert reasons(await told(silent.outbox)) == [Reason.OK] * 8
        await home(kit)


async def test_what_was_looked_at_before_a_purge_is_written_after_it() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        await kit.store(engine, keys)
        kit.disk.closed = True
        driver = store(kit, engine, keys)
        assert len(kit.disk.held) == 1, "the look is at the device"
        kit.services.reader.forget_namespace(kit.namespace)
        kit.storage.purge(kit.namespace)
        kit.storage.open_namespace(kit.namespace)
        ops = written(kit)
        await let_go(kit)
        assert reasons(await told(driver.outbox)) == [Reason.OK] * 2
        assert len(ops) == 2 and kit.stored(keys[0]) == kit.content(keys[0])
        await home(kit)


@pytest.mark.parametrize("end", [Reason.OK, Reason.NO_SPACE])
async def test_a_block_that_somebody_writes_here_is_waited_for_and_ends_as_that_write_does(end: Reason) -> None:
    async with node_kit() as kit:
        engine, other, keys = kit.engine(), kit.engine(), kit.chain(3)
        kit.disk.closed = True
        first = store(kit, engine, keys[:2])
        await until(lambda: len(kit.services.writes) == 2, "its writes are under way")
        second = store(kit, other, keys)
        await until(lambda: len(kit.services.writes) == 3, "the third block is written, too")
        assert second.machine.to_copy == (2,)
        ops: list[bytes] = []

        def fail(op: StorageOp) -> Reason | None:
            assert isinstance(op, BlockWrite)
            ops.append(op.key)
            return None if end is Reason.OK or op.key != keys[1] else end

        kit.disk.fails = fail
        await let_go(kit)
        assert reasons(await told(first.outbox)) == [Reason.OK, end]
        assert reasons(await told(second.outbox)) == [Reason.OK, end, Reason.OK]
        assert sorted(ops) == sorted(keys), "each is written once"
        assert dropped(kit) == ({} if end is Reason.OK else {Drop.DISK_FULL.value: 1}), "and counted once"
        await home(kit)


async def test_a_write_that_was_joined_goes_on_when_its_first_caller_is_gone() -> None:
    async with node_kit() as kit:
        engine, other, keys = kit.engine(), kit.engine(), kit.chain(2)
        kit.disk.closed = True
        first = store(kit, engine, keys)
        await until(lambda: len(kit.services.writes) == 2, "its writes are under way")
        second = store(kit, other, keys)
        assert second.machine.accepted, "its pages are free at once"
        kit.node.session_closed(engine.session.session_id, "gone")
        await let_go(kit)
        assert end_of(await told(first.outbox)).reason is Reason.ENGINE_GONE
        assert reasons(await told(second.outbox)) == [Reason.OK] * 2 and dropped(kit) == {}
        await home(kit)


async def test_a_write_of_before_a_purge_is_not_joined_after_it() -> None:
    async with node_kit() as kit:
        engine, other, keys = kit.engine(), kit.engine(), kit.chain(1)
        kit.disk.closed = True
        first = store(kit, engine, keys)
        await until(lambda: len(kit.disk.held) == 1, "the write is at the device")
        kit.services.reader.forget_namespace(kit.namespace)
        second = store(kit, other, keys)
        await until(lambda: len(kit.services.writes) == 2, "it has a write of its own")
        await let_go(kit)
        for driver in (first, second):
            assert end_of(await told(driver.outbox)).reason is Reason.OK
        await home(kit)


async def test_two_calls_that_copy_the_same_block_at_once_write_it_once() -> None:
    async with node_kit() as kit:
        engine, other, keys = kit.engine(), kit.engine(), kit.chain(2)
        ops = written(kit)
        kit.disk.closed = kit.wire.closed = True
        drivers = [store(kit, engine, keys), store(kit, other, keys)]
        assert len(kit.wire.held) == 2, "neither has been copied when the other begins"
        await let_go(kit)
        for driver in drivers:
            assert reasons(await told(driver.outbox)) == [Reason.OK] * 2
        assert len(ops) == 2
        await home(kit)


async def test_a_key_that_a_call_names_twice_is_copied_once_and_answered_twice() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        ops = written(kit)
        kit.fill(engine, (keys[0], keys[1], keys[0], keys[1]))
        chains = Chains((Chain(keys, ROOT, 0), Chain(keys[:1], ROOT, 0), Chain(keys[1:], keys[0], 1)))
        pages = as_pages([0, 1, 2, 3])
        driver = kit.node.store(kit.call(engine), kit.namespace, chains, engine.region, pages)
        events = await told(driver.outbox)
        assert reasons(events) == [Reason.OK] * 4
        assert [op.key for op in ops] == list(keys) and end_of(events).moved_bytes == 2 * LAYOUT.block_bytes
        await home(kit)


async def test_each_block_of_several_chains_is_written_with_its_own_parent_and_depth() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        chains = tuple(Chain(kit.chain(3, salt)[salt:], (ROOT, *kit.chain(3, salt))[salt], salt) for salt in range(3))
        keys = tuple(key for chain in chains for key in chain.keys)
        ops = written(kit)
        kit.fill(engine, keys)
        driver = kit.node.store(
            kit.call(engine), kit.namespace, Chains(chains), engine.region, as_pages(list(range(len(keys))))
        )
        assert reasons(await told(driver.outbox)) == [Reason.OK] * 6
        want = [(block.key, block.parent, block.depth) for chain in chains for block in chain.blocks()]
        assert sorted((op.key, op.parent, op.depth) for op in ops) == sorted(want)
        assert all(kit.stored(key) == kit.content(key) for key in keys)
        await home(kit)


def buffer(kit: NodeKit, keys: tuple[bytes, ...]) -> tuple[int, list[int]]:
    """Blocks in private slots: their owner, and the slots."""
    size_class, owner = kit.pool.size_class(LAYOUT), kit.pool.new_holder()
    slots = size_class.private(len(keys), owner)
    for key, address in zip(keys, size_class.addresses(slots).tolist(), strict=True):
        at = address - kit.arena.address + HEADER_BYTES
        kit.arena.bytes[at : at + LAYOUT.block_bytes] = memoryview(kit.content(key))
    return owner, slots


@pytest.mark.parametrize("looks", ["answered", "refused"])
async def test_blocks_of_a_buffer_are_written_unless_they_are_stored_or_being_written(looks: str) -> None:
    async with node_kit() as kit:
        engine, other, keys = kit.engine(), kit.engine(), kit.chain(3)
        await kit.store(engine, keys[:1])
        kit.disk.closed = True
        writing = store(kit, other, keys[1:2])
        await until(lambda: len(kit.services.writes) == 1, "the second is being written")
        if looks == "refused":
            kit.services.desk._check_queue = lambda what, waiting: full(what)  # type: ignore[method-assign]
        owner, slots = buffer(kit, keys)
        blocks = [ChainBlock(key, ROOT, n) for n, key in enumerate(keys)]
        heard: list[tuple[int, Reason]] = []
        ops, size_class = written(kit), kit.pool.size_class(LAYOUT)
        write_blocks(
            kit.services, kit.namespace, blocks, size_class, slots, lambda n, reason: heard.append((n, reason))
        )
        await let_go(kit)
        await until(lambda: len(heard) == 3, "all have ended")
        assert sorted(heard) == [(0, Reason.OK), (1, Reason.OK), (2, Reason.OK)]
        again = [keys[0]] if looks == "refused" else []
        assert [op.key for op in ops] == [keys[1], keys[2], *again]
        size_class.give_back(owner)
        await told(writing.outbox)
        await home(kit)


def full(what: str) -> None:
    """A queue for probes that is full."""
    if what == "probes":
        raise QueueFull("1024 probes wait, at most 1024 may")
