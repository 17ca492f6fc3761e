"""A part on its node gives its rest, and another one reads just that: bytes, reads, room, and what becomes of the slots."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from node_kit import LAYOUT, NodeKit, node_kit, until
from part_kit import OWNER, ROUTES, Owner, Pages, order_of, own_part
from test_node_parts import finished

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadPlan, BadRequest
from kvmoverd.core.status import Reason
from kvmoverd.node.reading import PartDriver
from kvmoverd.ports.storage import BlockRead

RECORD = LAYOUT.record_bytes
LAYERS = LAYOUT.layer_count
BLOCKS = 12


async def begun(
    kit: NodeKit, keys: tuple[bytes, ...], pages: Pages, owner: Owner, *, credit_layers: int = LAYERS
) -> PartDriver:
    """A part that has the first layer of all its blocks, and sends."""
    part = own_part(kit, keys, pages, owner, credit_layers=credit_layers)
    while owner.prefix is None:
        kit.disk.release_one()
        await asyncio.sleep(0)
    return part


def give(part: PartDriver, owner: Owner, pages: Pages, kept_blocks: int) -> tuple[int, int]:
    """What its owner does when he hears of it, too."""
    part.give_rest(kept_blocks)
    kept, first_layer = owner.gave_rest[-1]
    if first_layer:
        pages.given_from(kept, first_layer)
        if kept:
            part.credit(kept, LAYERS)
    return kept, first_layer


def check(kit: NodeKit, keys: tuple[bytes, ...], pages: Pages, kept: int, first_layer: int) -> None:
    """All layers of the blocks that were kept, and those below `first_layer` of the others: and nothing else was written."""
    for index, key in enumerate(keys):
        content = kit.content(key)
        for layer in range(LAYERS):
            span = LAYOUT.layer_span(layer)
            here = pages.layer(layer, index)
            if index < kept or layer < first_layer:
                assert here == content[span.start : span.stop], f"layer {layer} of block {index}"
            else:
                assert here == bytes(len(span)), f"layer {layer} of block {index} is another's"


@pytest.mark.parametrize("kept_blocks", [0, 1, 5, BLOCKS - 1])
async def test_a_part_sends_a_rectangle_less_and_reads_no_byte_of_it(kept_blocks: int) -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(BLOCKS)
        pages, owner = Pages(kit, BLOCKS), Owner()
        part = await begun(kit, keys, pages, owner)
        kept, first_layer = give(part, owner, pages, kept_blocks)
        assert kept_blocks <= kept < BLOCKS and 0 < first_layer < LAYERS
        await finished(kit, owner, pages)
        assert owner.end is not None and (owner.end.reason, owner.end.prefix_blocks) == (Reason.OK, BLOCKS)
        check(kit, keys, pages, kept, first_layer)
        layers = [(key, layer) for n, key in enumerate(keys) for layer in range(LAYERS if n < kept else first_layer)]
        assert kit.disk.layer_reads == dict.fromkeys(layers, 1)
        given_bytes = (BLOCKS - kept) * (LAYOUT.block_bytes - LAYOUT.layer_offsets[first_layer])
        assert owner.end.moved_bytes == BLOCKS * LAYOUT.block_bytes - given_bytes


@pytest.mark.parametrize("helps", [False, True])
async def test_what_one_part_gives_another_one_reads_and_together_they_bring_all(helps: bool) -> None:
    """On one node here, so that the second part must not find what the first has in the pool."""
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(BLOCKS)
        pages, owner = Pages(kit, BLOCKS), Owner()
        part = await begun(kit, keys, pages, owner)
        kept, first_layer = give(part, owner, pages, 4)
        rest, other = Pages(kit, BLOCKS - kept, first_block=kept), Owner()
        taker = rest_part(kit, keys[kept:], rest, other, first_layer, helps=helps)
        assert kit.admission.taken_bytes(Purpose.HELP) == (RECORD * (BLOCKS - kept) if helps else 0)
        kit.disk.closed = False
        while other.prefix is None:
            kit.disk.release_one()
            await asyncio.sleep(0)
        assert other.prefix == (BLOCKS - kept, None)
        taker.credit(BLOCKS - kept, LAYERS)
        await finished(kit, [owner, other], pages, rest)
        assert owner.end is not None and other.end is not None
        assert [end.reason for end in (owner.end, other.end)] == [Reason.OK, Reason.OK]
        check(kit, keys, pages, kept, first_layer)
        for index, key in enumerate(keys[kept:]):
            start = LAYOUT.layer_span(first_layer).start
            assert rest.block(index) == bytes(start) + kit.content(key)[start:]
        every = [(key, layer) for key in keys for layer in range(LAYERS)]
        assert kit.disk.layer_reads == dict.fromkeys(every, 1), "no layer is read twice"
        assert not any(kit.services.reader.pooled(kit.namespace, keys[kept:])), "what is not whole is not clean"


def rest_part(
    kit: NodeKit, keys: tuple[bytes, ...], pages: Pages, owner: Owner, first_layer: int, *, helps: bool
) -> PartDriver:
    """`helps`: for a node that is not this one."""
    if not helps:
        return own_part(kit, keys, pages, owner, holds=True, first_layer=first_layer, rest=True)
    order = order_of(keys, pages, assembles=False, rest_layer=first_layer, kit=kit)
    part = kit.node.helper_side.open(order, owner=OWNER, **ROUTES, listener=owner.listener)
    part.start()
    return part


async def test_layers_of_the_rest_wait_until_the_owner_has_heard() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, owner = Pages(kit, 4), Owner()
        part = await begun(kit, keys, pages, owner)
        part.give_rest(2)
        ((kept, first_layer),) = owner.gave_rest
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(lambda: len(pages.arrived) == first_layer, "layers before the rest")
        part.credit(4, LAYERS)
        await asyncio.sleep(0.01)
        assert sorted(pages.arrived) == list(range(first_layer)) and owner.end is None
        pages.given_from(kept, first_layer)
        part.credit(kept, LAYERS)
        await finished(kit, owner, pages)
        check(kit, keys, pages, kept, first_layer)


async def test_blocks_behind_a_cut_are_read_no_further_when_the_rest_is_asked_for() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(8)
        pages, owner = Pages(kit, 6), Owner()
        missing = (*keys[:6], kit.chain(1, salt=9)[0], *keys[6:])
        part = await begun(kit, missing, pages, owner)
        assert owner.prefix is not None and owner.prefix[0] == 6
        part.credit(6, LAYERS)
        taken_bytes = kit.admission.taken_bytes(Purpose.READ)
        kept, first_layer = give(part, owner, pages, 2)
        assert 2 <= kept < 6 and first_layer
        assert kit.admission.taken_bytes(Purpose.READ) == taken_bytes - 3 * RECORD
        await finished(kit, owner, pages)
        check(kit, keys[:6], pages, kept, first_layer)
        assert owner.end is not None and owner.end.prefix_blocks == 6


async def test_a_part_gives_nothing_of_what_others_wait_for_or_what_is_there() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, owner, more, other = Pages(kit, 4), Owner(), Pages(kit, 4), Owner()
        part = await begun(kit, keys, pages, owner)
        own_part(kit, keys, more, other)
        assert give(part, owner, pages, 0) == (4, 0)
        await finished(kit, [owner, other], pages, more)
        whole, last = Pages(kit, 4), Owner()
        part = own_part(kit, keys, whole, last, credit_layers=1)
        assert give(part, last, whole, 0) == (4, 0), "all of it is clean here"
        part.credit(4, LAYERS)
        await finished(kit, last, whole)
        assert [whole.block(n) for n in range(4)] == [kit.content(key) for key in keys]


async def test_before_it_sends_and_after_its_end_a_part_gives_nothing() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, owner = Pages(kit, 4), Owner()
        part = own_part(kit, keys, pages, owner, holds=True)
        part.give_rest(1)
        while owner.prefix is None:
            kit.disk.release_one()
            await asyncio.sleep(0)
        part.give_rest(1)
        assert owner.gave_rest == [(4, 0)] * 2
        part.credit(4, LAYERS)
        await finished(kit, owner, pages)
        part.give_rest(1)
        assert owner.gave_rest == [(4, 0)] * 2


@pytest.mark.parametrize("kept_blocks", [0, 3])
async def test_a_part_that_has_given_its_rest_may_be_stopped_at_any_step(kept_blocks: int) -> None:
    for steps in range(0, 40, 3):
        async with node_kit() as kit:
            _, keys = await kit.stored_and_held(6)
            kit.wire.closed = True
            pages, owner = Pages(kit, 6), Owner()
            part = await begun(kit, keys, pages, owner)
            give(part, owner, pages, kept_blocks)
            for step in range(steps):
                _ = kit.disk.release_one() if step % 2 else kit.wire.release_one()
                await asyncio.sleep(0)
            part.stop()
            await finished(kit, owner, pages)
            assert owner.end is not None and owner.end.reason in (Reason.CANCELLED, Reason.OK)


@pytest.mark.parametrize("lost", [1, 5])
async def test_a_block_that_is_lost_after_the_rest_was_given_cuts_the_part_where_it_is_lost(lost: int) -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(6)
        pages, owner = Pages(kit, 6), Owner()
        part = await begun(kit, keys, pages, owner)
        kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockRead) and op.key == keys[lost] else None
        # What a device has of the others already goes on: the lost block of the rest is one whose range is still to come.
        kept, first_layer = give(part, owner, pages, 3)
        await finished(kit, owner, pages)
        assert owner.end is not None
        if lost < kept or first_layer > 1:
            assert (owner.end.reason, owner.end.prefix_blocks) == (Reason.PREFIX_CUT, lost)
        else:
            assert owner.end.reason is Reason.OK


async def test_a_rest_that_can_not_be_read_is_told_as_the_prefix_of_its_part() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, owner = Pages(kit, 4), Owner()
        kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockRead) and op.key == keys[2] else None
        part = own_part(kit, keys, pages, owner, holds=True, first_layer=2, rest=True)
        kit.disk.closed = False
        while owner.prefix is None:
            kit.disk.release_one()
            await asyncio.sleep(0)
        assert owner.prefix[0] == 2
        part.stop()
        await finished(kit, owner, pages)


async def test_a_rest_keeps_its_blocks_and_gives_no_rest_itself() -> None:
    async with node_kit() as kit:
        _, keys = await kit.stored_and_held(4)
        pages, owner = Pages(kit, 4), Owner()
        part = own_part(kit, keys, pages, owner, credit_layers=1, first_layer=2, rest=True)
        part.give_up(0)
        assert owner.gave_up == [4]
        kit.disk.closed = False
        while owner.prefix is None:
            kit.disk.release_one()
            await asyncio.sleep(0)
        part.give_rest(0)
        assert owner.gave_rest == [(4, 0)]
        part.credit(4, LAYERS)
        await finished(kit, owner, pages)
        assert sorted(pages.arrived) == list(range(2, LAYERS))


@pytest.mark.parametrize("first_layer", [0, LAYERS])
async def test_a_rest_begins_at_a_layer_that_is_neither_the_first_nor_behind_the_last(first_layer: int) -> None:
    async with node_kit() as kit:
        keys, pages, owner = kit.chain(2), Pages(kit, 2), Owner()
        order = replace(order_of(keys, pages, assembles=False, kit=kit), first_layer=first_layer, rest=True)
        with pytest.raises(BadRequest, match=f"begins at layer {first_layer}, must be 1 to {LAYERS - 1}"):
            kit.node.helper_side.open(order, owner=OWNER, **ROUTES, listener=owner.listener)
        local = kit.node.peers.peer("here") if kit.node.peers is not None else None
        assert local is not None
        with pytest.raises(BadPlan, match="a node has no help of its own"):
            local.read_part(replace(order, help=None), owner.listener)
        pages.close()
        await until(lambda: pages.quiet, "its sink is quiet")
        assert not owner.said
        await kit.everything_is_home()
