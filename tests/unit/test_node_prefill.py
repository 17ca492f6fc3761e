"""The life of a prefill request: stream and push in either order, alone, at odds; prompts of every shape; rings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from node_kit import LAYOUT, Engine, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.errors import BadPlan, BadRequest, PagesBusy
from kvmoverd.core.machines.actions import AnnouncePrefix, AnnounceWhole
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.outbox import Attached, Outbox
from kvmoverd.node.services import Limits
from kvmoverd.node.sessions import as_pages

SHORT = Limits(admission_wait_s=0.2, attach_timeout_s=0.05)
TAIL = b"tail" * 8


def assemble(kit: NodeKit, decode: Engine, request_id: str) -> Outbox:
    return kit.node.decode_side.attach(kit.namespace, request_id, 1, decode.session.session_id, 5.0)


async def deliver(kit: NodeKit, decode: Engine, request_id: str, assembled: Outbox, total_blocks: int) -> None:
    assert isinstance(await assembled.get(), Attached)
    assert isinstance(await assembled.get(), AnnounceWhole)
    pages = as_pages(list(range(total_blocks)))
    delivery = kit.node.decode_side.deliver(request_id, 1, decode.region, pages, decode.session.session_id)
    assert end_of(await told(delivery)).reason is Reason.OK
    assert end_of(await told(assembled)).reason is Reason.OK


async def test_a_stream_whose_push_never_comes_gives_the_buffer_and_the_pages_back() -> None:
    async with node_kit(limits=SHORT) as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        stream = kit.node.stream(kit.plan(prefill, call, keys, hit=2, path=Path.PE))
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        assert prefill.region.users == 1, "the push may still come"
        end = end_of(await told(assembled))
        assert (end.reason, end.pages_quiet) == (Reason.DEADLINE, True)
        assert kit.node.prefills.by_name == {}
        await kit.everything_is_home()


async def test_a_push_may_come_before_its_stream() -> None:
    async with node_kit() as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(3)
        await kit.store(kit.engine(), keys[:2])
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=2, path=Path.PE)
        push = kit.node.push(plan)
        push.request.computed(0)
        with pytest.raises(BadRequest, match=r"StreamLayers has not loaded any"):
            push.request.computed(1)
        await asyncio.sleep(0)
        stream = kit.node.stream(plan)
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        prefill.fill(2, kit.content(keys[2]))
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, 3)
        assert [decode.block(page) for page in range(3)] == [kit.content(key) for key in keys]
        await kit.everything_is_home()


async def test_a_push_whose_stream_never_comes_ends_long_before_its_deadline() -> None:
    async with node_kit(limits=SHORT) as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        push = kit.node.push(kit.plan(prefill, kit.call(prefill), keys, hit=2, path=Path.DE))
        end = end_of(await told(push.outbox))
        assert (end.reason, end.message) == (Reason.DEADLINE, "no StreamLayers of this attempt came within 0.05 s")
        await kit.everything_is_home()


async def test_stream_and_push_at_odds_are_told_so_and_the_first_goes_on() -> None:
    async with node_kit() as kit:
        prefill, stranger, decode, keys = kit.engine(), kit.engine(), kit.engine(), kit.chain(3)
        await kit.store(kit.engine(), keys)
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=2, path=Path.PE, tail=1)
        kit.wire.closed = True
        stream = kit.node.stream(plan)
        others = [
            kit.plan(prefill, call, keys, hit=3, path=Path.PE, tail=1),
            kit.plan(prefill, call, keys, hit=2, path=Path.DE, tail=1),
            kit.plan(prefill, call, keys, hit=2, path=Path.PE, tail=2),
            kit.plan(prefill, call, keys[:2], hit=2, path=Path.PE, tail=1),
            kit.plan(prefill, call, keys, hit=2, path=Path.PE, tail=1, first_page=1),
            kit.plan(prefill, call, keys, hit=2, path=Path.PE, tail=1, decode_node="there"),
            kit.plan(stranger, call, keys, hit=2, path=Path.PE, tail=1),
        ]
        for other in others:
            with pytest.raises(BadPlan, match="must carry the same plan"):
                kit.node.push(other)
        kit.wire.closed = False
        while kit.wire.release_one():
            pass
        push = kit.node.push(plan)
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        prefill.fill(2, kit.content(keys[2]))
        prefill.fill(3, kit.content(TAIL))
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, 4)
        await kit.everything_is_home()


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize(
    ("blocks", "hit", "tail", "with_stream"),
    [(0, 0, 1, False), (0, 0, 1, True), (1, 0, 0, False), (1, 0, 0, True), (2, 2, 0, True), (2, 2, 3, True)],
)
async def test_prompts_of_every_shape(path: Path, blocks: int, hit: int, tail: int, *, with_stream: bool) -> None:
    async with node_kit() as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(blocks)
        if hit:
            await kit.store(kit.engine(), keys[:hit])
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=hit, path=path, tail=tail)
        if with_stream:
            events = await told(kit.node.stream(plan).outbox)
            assert end_of(events).reason is Reason.OK
        push = kit.node.push(plan)
        kit.fill(prefill, keys[hit:], hit)
        if tail:
            prefill.fill(blocks, kit.content(TAIL))
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, plan.total_blocks)
        assert [decode.block(page) for page in range(blocks)] == [kit.content(key) for key in keys]
        await until(lambda: all(kit.stored(key) for key in keys), "new blocks are stored")
        await kit.everything_is_home()


@pytest.mark.parametrize("path", list(Path))
async def test_a_prefix_cut_to_nothing_makes_every_block_a_new_one(path: Path) -> None:
    async with node_kit() as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(3)
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=3, path=path, tail=1)
        events = await told(kit.node.stream(plan).outbox)
        prefix = next(event for event in events if isinstance(event, AnnouncePrefix))
        assert prefix.prefix_blocks == 0 and prefix.first_lost is not None
        assert prefix.first_lost.reason is Reason.MISS
        assert end_of(events).reason is Reason.OK and end_of(events).prefix_blocks == 0
        push = kit.node.push(plan)
        kit.fill(prefill, keys)
        prefill.fill(3, kit.content(TAIL))
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, 4)
        assert [decode.block(page) for page in range(3)] == [kit.content(key) for key in keys]
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 3
        await kit.everything_is_home()


async def test_a_cut_needs_no_more_slots_than_were_admitted() -> None:
    """Blocks that were read behind the first lost one are of no use to this request: they make way."""
    async with node_kit(slots=8) as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(7)
        await kit.store(kit.engine(), keys[:6])
        kit.forget_clean()
        kit.storage.tamper(kit.namespace, keys[1], None)
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=6, path=Path.DE, tail=1)
        end = end_of(await told(kit.node.stream(plan).outbox))
        assert (end.reason, end.prefix_blocks) == (Reason.OK, 1)
        push = kit.node.push(plan)
        kit.fill(prefill, keys[1:], 1)
        prefill.fill(7, kit.content(TAIL))
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, 8)
        assert [decode.block(page) for page in range(7)] == [kit.content(key) for key in keys]
        await kit.everything_is_home()


async def test_pages_that_are_only_read_may_be_pushed_by_two_requests_at_once() -> None:
    async with node_kit() as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(prefill, keys)
        kit.wire.closed = True
        pushes = [kit.node.push(kit.plan(prefill, kit.call(prefill), keys, hit=0, path=None)) for _ in range(2)]
        loading = kit.node.stream(kit.plan(prefill, kit.call(prefill), keys, hit=1, path=Path.PE, first_page=5))
        for first_page in (4, 5):
            busy = kit.plan(prefill, kit.call(prefill), keys, hit=2, path=Path.PE, first_page=first_page)
            with pytest.raises(PagesBusy):
                kit.node.stream(busy)
        for driver in (*pushes, loading):
            driver.stop(Reason.CANCELLED, "test")
        kit.wire.closed = False
        while kit.wire.release_one():
            pass
        await kit.everything_is_home()


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("sets", [1, 2, 3])
async def test_a_ring_set_is_written_again_only_after_it_was_computed_and_pushed(path: Path, sets: int) -> None:
    async with node_kit() as kit:
        prefill, decode, keys = kit.engine(ring=True), kit.engine(), kit.chain(3)
        await kit.store(kit.engine(), keys[:2])
        kit.wire.closed = True
        call = kit.call(prefill)
        assembled = assemble(kit, decode, call.request_id)
        plan = kit.plan(prefill, call, keys, hit=2, path=path)
        page_sets = tuple(as_pages([4 * n, 4 * n + 1, 4 * n + 2]) for n in range(sets))
        plan = replace(plan, page_sets=page_sets)
        stream, push = kit.node.stream(plan), kit.node.push(plan)
        for layer in range(LAYOUT.layer_count):
            await _release_until(kit, lambda layer=layer: stream.machine.ready.in_order > layer)  # type: ignore[misc]
            last = min(LAYOUT.layer_count, layer + sets)
            await _release_until(kit, lambda last=last: stream.machine.ready.in_order >= last)  # type: ignore[misc]
            await _settle(kit)
            assert stream.machine.ready.in_order == last, "credits end here, whatever else may happen"
            span = LAYOUT.layer_span(layer)
            for block in range(2):
                want = kit.content(keys[block])[span.start : span.stop]
                assert prefill.block(4 * (layer % sets) + block) == want, f"layer {layer} was overwritten too soon"
            _fill_ring(prefill, 4 * (layer % sets) + 2, kit.content(keys[2])[span.start : span.stop])
            push.request.computed(layer + 1)
            await _settle(kit)
            assert stream.machine.ready.in_order == last, "computed, but not pushed yet"
            await _release_until(kit, lambda layer=layer: push.machine.window.arrived.in_order > layer)  # type: ignore[misc]
        kit.wire.closed = False
        while kit.wire.release_one():
            pass
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        assert end_of(await told(push.outbox)).reason is Reason.OK
        await deliver(kit, decode, call.request_id, assembled, 3)
        assert [decode.block(page) for page in range(3)] == [kit.content(key) for key in keys]
        await kit.everything_is_home()


async def _release_until(kit: NodeKit, condition) -> None:  # type: ignore[no-untyped-def]
    for _ in range(200):
        if condition():
            return
        await _settle(kit)
        if not condition():
            kit.wire.release_one()
        await _settle(kit)
    raise AssertionError("it does not happen")


async def _settle(kit: NodeKit) -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def _fill_ring(engine: Engine, page: int, content: bytes) -> None:
    at = 0
    for start, stop in engine._spans(page):
        engine.memory.bytes[start:stop] = np.frombuffer(content[at : at + stop - start], dtype=np.uint8)
        at += stop - start
