"""What waits without running: prefills between two calls, engines and reservations in line; and who may still come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from node_kit import LAYOUT, Engine, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadRequest, Draining, KvmoverError, PeerUnreachable, QueueFull, StaleAttempt
from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.peer import Reservation
from kvmoverd.node.prefill import Plan
from kvmoverd.node.services import Limits
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain

LONG = Limits(admission_wait_s=30, attach_timeout_s=30)
OTHER = Namespace(Manifest("another model", b"w" * 32, b"t" * 32, LAYOUT, "u8"))


def reservation(kit: NodeKit, request_id: str, attempt: int, blocks: int, node: str = "there") -> Reservation:
    keys = kit.chain(blocks, salt=attempt)
    return Reservation(request_id, attempt, kit.namespace.fingerprint, keys, 0, 0, None, 60.0, node, "boot")


async def lonely(kit: NodeKit, engine: Engine) -> Plan:
    """A stream has ended well, its push has not come: the pages and the ticket wait for it."""
    keys = kit.chain(2)
    await kit.store(kit.engine(), keys)
    plan = kit.plan(engine, kit.call(engine, request_id="x"), keys, hit=2, path=Path.DE)
    assert end_of(await told(kit.node.stream(plan).outbox)).reason is Reason.OK
    assert engine.region.users == 1 and len(kit.node.decode_side._by_ticket) == 1
    return plan


def by_cancel(kit: NodeKit, engine: Engine) -> None:
    kit.node.cancel("x", 1, engine.session.session_id)


def by_death(kit: NodeKit, engine: Engine) -> None:
    kit.node.session_closed(engine.session.session_id, "the engine died")


async def by_unregistering(kit: NodeKit, engine: Engine) -> None:
    assert await asyncio.wait_for(kit.node.unregister_region(engine.session, engine.region.region_id), 1.0)


async def by_shutdown(kit: NodeKit, engine: Engine) -> None:
    assert await kit.node.shut_down(1.0)


def by_higher_attempt(kit: NodeKit, engine: Engine) -> None:
    kit.node.decode_side.attach(kit.namespace, "x", 2, engine.session.session_id, 0.01)


def by_fence(kit: NodeKit, engine: Engine) -> None:
    assert kit.node.requests.fence_off("x", 1)


@pytest.mark.parametrize("end", [by_cancel, by_death, by_unregistering, by_shutdown, by_higher_attempt, by_fence])
async def test_a_prefill_between_two_calls_ends_at_once(end: Callable[[NodeKit, Engine], object]) -> None:
    async with node_kit(limits=LONG) as kit:
        engine = kit.engine()
        await lonely(kit, engine)
        going_on = end(kit, engine)
        if asyncio.iscoroutine(going_on):
            await going_on
        await until(lambda: engine.region.users == 0, "the pages are free")
        await until(lambda: not kit.node.decode_side._by_ticket, "the ticket is given back")
        await until(lambda: not kit.node.decode_side._waiting, "nobody waits")
        await kit.everything_is_home()


async def test_the_next_attempt_may_use_the_same_pages_at_once() -> None:
    async with node_kit(limits=LONG) as kit:
        engine = kit.engine()
        plan = await lonely(kit, engine)
        call = kit.call(engine, request_id="x", attempt=2)
        again = kit.node.stream(kit.plan(engine, call, tuple(plan.keys), hit=2, path=Path.PE))
        assert end_of(await told(again.outbox)).reason is Reason.OK
        kit.node.cancel("x", 2, engine.session.session_id)
        await kit.everything_is_home()


async def test_an_engine_that_waits_under_a_lower_attempt_is_told_when_a_higher_one_reserves() -> None:
    async with node_kit(limits=LONG) as kit:
        engine = kit.engine()
        waiting = kit.node.decode_side.attach(kit.namespace, "x", 1, engine.session.session_id, 20.0)
        reserved = await kit.node.decode_side.reserve(kit.namespace, reservation(kit, "x", 2, 2))
        assert end_of(await told(waiting)).reason is Reason.STALE_ATTEMPT
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_a_buffer_that_is_given_up_does_not_end_well_whatever_is_said_of_it() -> None:
    """A stream that went well may be the last one to leave a request whose push has failed."""
    async with node_kit(limits=LONG) as kit:
        engine, side = kit.engine(), kit.node.decode_side
        waiting = side.attach(kit.namespace, "x", 1, engine.session.session_id, 20.0)
        reserved = await side.reserve(kit.namespace, reservation(kit, "x", 1, 2))
        side.release_ticket(reserved.ticket, Reason.OK)
        end = end_of(await told(waiting))
        assert end.reason is Reason.CANCELLED and "gave the request up" in end.message
        await kit.everything_is_home()


@pytest.mark.parametrize(
    ("incident", "error"),
    [
        (lambda kit: kit.node.requests.enter("fetch", "x", 2), StaleAttempt),
        (lambda kit: kit.node.requests.fence_off("x", 1), StaleAttempt),
        (lambda kit: kit.node.decode_side.stop(Reason.SHUTTING_DOWN, "stopping"), Draining),
        (lambda kit: kit.node.decode_side.peer_lost("there", "boot", "the channel broke"), PeerUnreachable),
    ],
    ids=["higher attempt", "fence", "shutdown", "peer lost"],
)
@pytest.mark.parametrize("granted_first", [False, True])
async def test_a_reservation_in_line_ends_with_what_it_waits_for(
    incident: Callable[[NodeKit], object], error: type[KvmoverError], *, granted_first: bool
) -> None:
    async with node_kit(slots=8, limits=LONG) as kit:
        side = kit.node.decode_side
        first = await side.reserve(kit.namespace, reservation(kit, "first", 1, 6, node="elsewhere"))
        in_line = asyncio.get_running_loop().create_task(side.reserve(kit.namespace, reservation(kit, "x", 1, 6)))
        await asyncio.sleep(0)
        assert kit.admission.waiting(Purpose.DE_BUFFER) == 1
        if granted_first:
            side.release_ticket(first.ticket, Reason.CANCELLED)
            kit.node.pump()  # the room is home with the slots, when no late frame can land any more
            assert kit.admission.waiting(Purpose.DE_BUFFER) == 0 and not in_line.done()
        incident(kit)
        with pytest.raises(error):
            await asyncio.wait_for(in_line, 1.0)
        side.release_ticket(first.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_a_caller_that_goes_away_leaves_the_line() -> None:
    async with node_kit(slots=8, limits=LONG) as kit:
        side = kit.node.decode_side
        first = await side.reserve(kit.namespace, reservation(kit, "first", 1, 6))
        in_line = asyncio.get_running_loop().create_task(side.reserve(kit.namespace, reservation(kit, "x", 1, 6)))
        await asyncio.sleep(0)
        in_line.cancel()
        with pytest.raises(asyncio.CancelledError):
            await in_line
        assert kit.admission.waiting(Purpose.DE_BUFFER) == 0
        side.release_ticket(first.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_a_draining_node_lets_running_requests_go_on_and_takes_no_new_ones() -> None:
    async with node_kit(limits=LONG) as kit:
        engine = kit.engine()
        plan = await lonely(kit, engine)
        kit.node.drain()
        push = kit.node.push(plan)
        attached = kit.node.decode_side.attach(kit.namespace, "x", 1, engine.session.session_id, 5.0)
        push.request.computed(LAYOUT.layer_count)
        assert end_of(await told(push.outbox)).reason is Reason.OK
        with pytest.raises(Draining):
            kit.node.fetch(kit.call(engine), kit.namespace, (), FetchKind.LEASE)
        with pytest.raises(Draining):
            kit.node.decode_side.attach(kit.namespace, "y", 1, engine.session.session_id, 5.0)
        await kit.node.shut_down(1.0)
        with pytest.raises(Draining):
            kit.node.store(
                kit.call(engine, request_id="x"), kit.namespace, Chain((), ROOT, 0), engine.region, as_pages([])
            )
        assert end_of(await told(attached)).reason is Reason.SHUTTING_DOWN
        await kit.everything_is_home()


@pytest.mark.parametrize("reserve_first", [False, True])
async def test_the_decode_engines_own_deadline_counts(*, reserve_first: bool) -> None:
    async with node_kit(limits=LONG) as kit:
        engine, side = kit.engine(), kit.node.decode_side
        if reserve_first:
            await side.reserve(kit.namespace, reservation(kit, "x", 1, 2))
        attached = side.attach(kit.namespace, "x", 1, engine.session.session_id, 0.03)
        if not reserve_first:
            await side.reserve(kit.namespace, reservation(kit, "x", 1, 2))
        assert end_of(await told(attached)).reason is Reason.DEADLINE
        await kit.everything_is_home()


@pytest.mark.parametrize("reserve_first", [False, True])
async def test_both_sides_must_speak_of_the_same_model(*, reserve_first: bool) -> None:
    async with node_kit(limits=LONG) as kit:
        engine, side = kit.engine(), kit.node.decode_side
        session = engine.session.session_id
        if reserve_first:
            reserved = await side.reserve(kit.namespace, reservation(kit, "x", 1, 2))
            with pytest.raises(BadRequest, match="the prefill node reserved for"):
                side.attach(OTHER, "x", 1, session, 5.0)
            side.attach(kit.namespace, "x", 1, session, 5.0)
            side.release_ticket(reserved.ticket, Reason.CANCELLED)
        else:
            waiting = side.attach(OTHER, "x", 1, session, 5.0)
            with pytest.raises(BadRequest, match="the prefill node reserved for"):
                await side.reserve(kit.namespace, reservation(kit, "x", 1, 2))
            assert kit.node.cancel("x", 1, session) == 1
            assert end_of(await told(waiting)).reason is Reason.CANCELLED
        await kit.everything_is_home()


async def test_no_more_leases_are_promised_than_there_may_be() -> None:
    async with node_kit(limits=LONG) as kit:
        engine, keys = kit.engine(), kit.chain(2)
        await kit.store(engine, keys)
        kit.node.leases._table.leases_max = 2
        kit.forget_clean()
        kit.disk.closed = True

        def fetch(kind: FetchKind = FetchKind.LEASE):  # type: ignore[no-untyped-def]
            return kit.node.fetch(kit.call(engine), kit.namespace, keys, kind, lease_s=60)

        first, second = fetch(), fetch()
        with pytest.raises(QueueFull, match="0 leases are out and 2 promised, at most 2 may be"):
            fetch()
        first.stop(Reason.CANCELLED, "test")
        third = fetch()
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        for driver in (second, third):
            assert end_of(await told(driver.outbox)).reason is Reason.OK
        with pytest.raises(QueueFull, match="2 leases are out and 0 promised"):
            fetch()
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()
