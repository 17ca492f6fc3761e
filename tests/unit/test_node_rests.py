"""The rest of a set: layers that no device reads yet go to another reader, and its reads begin in the middle of a record."""

from __future__ import annotations

from node_kit import LAYOUT, NodeKit, node_kit, until

from kvmoverd.core.status import Reason
from kvmoverd.node.block_set import BlockSet
from kvmoverd.ports.storage import BlockRead

LAYERS = LAYOUT.layer_count


def acquire(kit: NodeKit, keys: tuple[bytes, ...], *, by_ranges: bool = True) -> BlockSet:
    return kit.services.reader.acquire(kit.namespace, keys, priority=0, due_ns=0, by_ranges=by_ranges)


def rest_of(kit: NodeKit, keys: tuple[bytes, ...], first_layer: int) -> BlockSet:
    return kit.services.reader.acquire_rest(kit.namespace, keys, first_layer, priority=0, due_ns=0)


def held(kit: NodeKit) -> list[tuple[int, int]]:
    return [(op.first_layer, op.layers.stop) for op in kit.disk.held if isinstance(op, BlockRead)]


async def first_layer_of_all(kit: NodeKit, blocks: BlockSet) -> None:
    """All have layer 0; the second ranges of some are in the device."""
    for _ in blocks.slots:
        kit.disk.release_one()
        await until(lambda: not kit.disk.closed or len(kit.disk.held) > 0, "reads go on")
    await until(lambda: blocks.progress == dict.fromkeys(range(len(blocks.slots)), 1), "layer 0 of all is there")


async def read_to_the_end(kit: NodeKit) -> None:
    kit.disk.closed = False
    while kit.disk.release_one():
        pass
    await until(kit.services.desk.idle, "nothing is read any more")


def layers_of(kit: NodeKit, blocks: BlockSet, index: int, layers: range) -> bytes:
    start = int(blocks.payloads()[index]) - kit.arena.address
    span = range(LAYOUT.layer_offsets[layers.start], LAYOUT.layer_span(layers.stop - 1).stop)
    return bytes(kit.arena.bytes[start + span.start : start + span.stop])


def content_of(kit: NodeKit, key: bytes, layers: range) -> bytes:
    return kit.content(key)[LAYOUT.layer_offsets[layers.start] : LAYOUT.layer_span(layers.stop - 1).stop]


async def test_what_no_device_reads_is_given_and_another_set_reads_it_and_no_layer_twice() -> None:
    async with node_kit(ops_max=2) as kit:
        _, keys = await kit.stored_and_held(6)
        kit.forget_counts()
        blocks = acquire(kit, keys)
        await first_layer_of_all(kit, blocks)
        assert held(kit) == [(1, 2), (1, 2)], "second ranges of two blocks are in the device"
        assert kit.services.reader.give_rest(blocks, 1) == (2, 1)
        queue_bytes = 2 * (LAYOUT.record_bytes - LAYOUT.read_span(0, 1).stop)
        assert kit.services.reader.depth().queue_bytes == queue_bytes
        rest = rest_of(kit, keys[2:], 1)
        assert kit.services.reader.depth().queue_bytes == queue_bytes + 4 * LAYOUT.rest_bytes(1)
        await read_to_the_end(kit)
        assert blocks.outcomes == {0: Reason.OK, 1: Reason.OK}
        assert [blocks.progress[index] for index in range(2, 6)] == [1] * 4
        assert rest.outcomes == dict.fromkeys(range(4), Reason.OK)
        for index, key in enumerate(keys[:2]):
            assert layers_of(kit, blocks, index, range(LAYERS)) == kit.content(key)
        for index, key in enumerate(keys[2:]):
            assert layers_of(kit, blocks, 2 + index, range(1)) == content_of(kit, key, range(1))
            assert layers_of(kit, rest, index, range(1, LAYERS)) == content_of(kit, key, range(1, LAYERS))
        assert kit.disk.layer_reads == {(key, layer): 1 for key in keys for layer in range(LAYERS)}
        whole = LAYOUT.record_bytes
        assert blocks.read_bytes == 2 * whole + 4 * LAYOUT.read_span(0, 1).stop
        assert rest.read_bytes == 4 * LAYOUT.rest_bytes(1)
        kit.services.reader.release(blocks)
        kit.services.reader.release(rest)
        assert set(kit.pooled()) == set(keys[:2]), "only whole blocks stay"
        await kit.everything_is_home()


async def test_a_block_whose_range_is_in_the_device_goes_on_to_the_first_layer_given_and_no_further() -> None:
    async with node_kit(ops_max=2) as kit:
        _, keys = await kit.stored_and_held(3)
        blocks = acquire(kit, keys)
        await first_layer_of_all(kit, blocks)
        assert held(kit) == [(1, 2), (1, 2)]
        kit.disk.held.rotate(1)
        kit.disk.release_one()
        await until(lambda: blocks.progress[1] == 2, "the second block came before the first")
        kit.disk.held.reverse()
        assert held(kit) == [(1, 2), (1, 2)], "of the last and of the first block"
        assert kit.services.reader.give_rest(blocks, 0) == (0, 2)
        assert kit.services.reader.depth().queue_bytes == 2 * len(LAYOUT.read_span(1, 2))
        await read_to_the_end(kit)
        assert blocks.outcomes == {} and blocks.progress == {0: 2, 1: 2, 2: 2}
        assert kit.services.desk.read_queue_bytes == 0
        assert kit.disk.layer_reads == {(key, layer): 1 for key in keys for layer in range(2)}
        kit.services.reader.release(blocks)
        await kit.everything_is_home()


async def test_blocks_that_others_wait_for_are_not_given() -> None:
    async with node_kit(ops_max=2) as kit:
        _, keys = await kit.stored_and_held(4)
        blocks = acquire(kit, keys)
        await first_layer_of_all(kit, blocks)
        other = acquire(kit, keys[3:])
        assert kit.services.reader.give_rest(blocks, 0) == (4, 0), "the last block is another's, too"
        kit.services.reader.release(other)
        assert kit.services.reader.give_rest(blocks, 0) == (2, 1), "what was not given may be given later"
        assert kit.services.reader.give_rest(blocks, 0) == (4, 0), "once"
        again = acquire(kit, keys[2:])
        await read_to_the_end(kit)
        assert again.outcomes == {0: Reason.OK, 1: Reason.OK}, "who wants a given block reads it by itself"
        for ended in (blocks, again):
            kit.services.reader.release(ended)
        await kit.everything_is_home()


async def test_a_set_that_is_released_after_it_gave_leaves_nothing_behind() -> None:
    async with node_kit(ops_max=2) as kit:
        _, keys = await kit.stored_and_held(4)
        blocks = acquire(kit, keys)
        await first_layer_of_all(kit, blocks)
        assert kit.services.reader.give_rest(blocks, 0) == (2, 1)
        rest = rest_of(kit, keys[2:], 1)
        kit.services.reader.release(blocks)
        kit.services.reader.release(rest)
        await read_to_the_end(kit)
        assert kit.pooled() == {}
        await kit.everything_is_home()


async def test_a_rest_that_is_lost_says_so_and_gives_its_slot_up() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(2)
        kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockRead) and op.key == keys[1] else None
        rest = rest_of(kit, keys, 2)
        assert kit.services.reader.give_rest(rest, 0) == (2, 0), "a rest gives none"
        await read_to_the_end(kit)
        assert rest.outcomes == {0: Reason.OK, 1: Reason.IO_ERROR}
        kit.services.reader.release(rest)
        await kit.everything_is_home()
