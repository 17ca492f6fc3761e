"""Whose a request is: a stranger's attempt does not end it; its own parties' do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from node_kit import Engine, NodeKit, end_of, node_kit, told, until

from kvmoverd.core.errors import RequestTaken, StaleAttempt
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.shares import ReadPlan
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.assembling import AssemblyDriver
from kvmoverd.node.driver import Driver
from kvmoverd.node.fetching import FetchDriver
from kvmoverd.node.peer import Reservation

ATTEMPT_MAX = (1 << 32) - 1


def owned(kit: NodeKit, engine: Engine, attempt: int = 1) -> FetchDriver:
    """A fetch of request "x" as a servicer makes it, held up at the storage."""
    session = engine.session.session_id
    kit.disk.closed = True
    with kit.node.requests.entering("fetch", "x", attempt, owner=session):
        driver = FetchDriver(
            kit.services,
            kit.call(engine, request_id="x", attempt=attempt),
            namespace=kit.namespace,
            keys=kit.chain(1, salt=attempt),
            kind=FetchKind.LEASE,
            leases=kit.node.leases,
            lease_s=0.0,
            region=None,
            pages=None,
        )
    kit.node.requests.add(driver)
    driver.start()
    return driver


async def finished(kit: NodeKit, driver: Driver) -> Reason:
    kit.disk.closed = False
    while kit.disk.release_one():
        pass
    return end_of(await told(driver.outbox)).reason


@pytest.mark.parametrize("kind", ["fetch", "store", "stream", "push", "attach", "assemble"])
async def test_a_stranger_ends_no_fetch_whatever_it_calls(kind: str) -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        driver = owned(kit, engine)
        with pytest.raises(RequestTaken, match="attempt 4294967295 would end a lower one") as refused:
            kit.node.requests.enter(kind, "x", ATTEMPT_MAX, owner="stranger")
        assert not refused.value.retryable
        assert driver.ended is None
        kit.node.requests.enter("store", "x", 1, owner=engine.session.session_id)
        assert await finished(kit, driver) is Reason.OK
        await kit.everything_is_home()


async def test_an_engine_ends_its_own_lower_attempt() -> None:
    async with node_kit() as kit:
        engine = kit.engine()
        first, second = owned(kit, engine), owned(kit, engine, attempt=2)
        assert end_of(await told(first.outbox)).reason is Reason.STALE_ATTEMPT
        assert await finished(kit, second) is Reason.OK
        await kit.everything_is_home()


async def test_once_its_engine_is_gone_another_may_try_the_request_again() -> None:
    async with node_kit() as kit:
        first, heir = kit.engine(), kit.engine()
        owned(kit, first)
        kit.node.session_closed(first.session.session_id, "its socket closed")
        second = owned(kit, heir, attempt=2)
        assert await finished(kit, second) is Reason.OK


async def test_what_is_live_stays_fenced_however_many_requests_come_after_it() -> None:
    async with node_kit() as kit:
        requests, engine = kit.node.requests, kit.engine()
        driver = owned(kit, engine, attempt=3)
        for number in range(1_100):
            requests.enter("fetch", f"other {number}", 1)
        with pytest.raises(StaleAttempt):
            requests.enter("store", "x", 2)
        assert await finished(kit, driver) is Reason.OK


def _reservation(kit: NodeKit, node: str) -> Reservation:
    keys = kit.chain(2)
    return Reservation("x", 1, kit.namespace.fingerprint, keys, 0, 0, None, 5.0, node, "boot")


@pytest.mark.parametrize(
    ("kind", "owner", "is_taken"),
    [
        ("attach", lambda engine: engine.session.session_id, False),
        ("attach", lambda engine: "another engine", True),
        ("stream", lambda engine: "prefill engine", True),
        ("fetch", lambda engine: "another engine", True),
        ("assemble", lambda engine: "there", False),
        ("assemble", lambda engine: "elsewhere", True),
    ],
)
async def test_only_the_parties_of_an_attempt_may_begin_a_higher_one(
    kind: str, owner: Callable[[Engine], str], *, is_taken: bool
) -> None:
    async with node_kit() as kit:
        engine, side = kit.engine(), kit.node.decode_side
        await side.reserve(kit.namespace, _reservation(kit, "there"))
        outbox = side.attach(kit.namespace, "x", 1, engine.session.session_id, 5.0)
        try:
            kit.node.requests.enter(kind, "x", 2, owner=owner(engine))
        except RequestTaken:
            assert is_taken
            kit.node.cancel("x", 1, engine.session.session_id)
            assert end_of(await told(outbox)).reason is Reason.CANCELLED
        else:
            assert not is_taken
            assert end_of(await told(outbox)).reason is Reason.STALE_ATTEMPT
        await asyncio.sleep(0)
        await kit.everything_is_home()


async def test_a_buffer_that_was_added_for_a_node_is_that_nodes() -> None:
    async with node_kit() as kit:
        requests = kit.node.requests
        with requests.entering("assemble", "x", 1, owner="there"):
            call = kit.call(kit.engine(), request_id="x")
            asked = _reservation(kit, "there")
            driver = AssemblyDriver(kit.services, call, namespace=kit.namespace, reservation=asked, plan=ReadPlan(()))
        requests.add(driver, owner="there")
        with pytest.raises(RequestTaken):
            requests.enter("assemble", "x", 2, owner="elsewhere")
        assert driver.ended is None
        requests.enter("assemble", "x", 2, owner="there")
        assert end_of(await told(driver.outbox)).reason is Reason.STALE_ATTEMPT
        await kit.everything_is_home()


@pytest.mark.parametrize("kind", ["attach", "fetch", "stream", "assemble"])
async def test_a_stranger_ends_no_stream_and_no_push_of_another_engine(kind: str) -> None:
    """Not by AssembleBlocks either: nothing but a buffer that it waits for makes a decode engine part of a request."""
    async with node_kit() as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        plan = kit.plan(prefill, kit.call(prefill, request_id="x"), keys, hit=2, path=Path.PE, decode_node="there")
        push, stream = kit.node.push(plan), kit.node.stream(plan)
        with pytest.raises(RequestTaken):
            kit.node.requests.enter(kind, "x", ATTEMPT_MAX, owner="stranger")
        assert (push.ended, stream.ended) == (None, None)
        assert kit.node.cancel("x", 1, prefill.session.session_id) == 2
        await kit.everything_is_home()


async def test_a_stranger_ends_no_push_whose_stream_went_well_and_which_is_still_to_come() -> None:
    async with node_kit() as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        plan = kit.plan(prefill, kit.call(prefill, request_id="x"), keys, hit=2, path=Path.PE)
        assert end_of(await told(kit.node.stream(plan).outbox)).reason is Reason.OK
        with pytest.raises(RequestTaken):
            kit.node.requests.enter("attach", "x", 2, owner="stranger")
        push = kit.node.push(plan)
        assert push.ended is None
        kit.node.cancel("x", 1, prefill.session.session_id)
        await kit.everything_is_home()


async def test_the_prefill_engine_of_the_same_node_ends_the_buffer_of_its_own_lower_attempt() -> None:
    async with node_kit() as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(2)
        push = kit.node.push(kit.plan(prefill, kit.call(prefill, request_id="x"), keys, hit=0, path=None))
        waits = kit.node.decode_side.attach(kit.namespace, "x", 1, decode.session.session_id, 5.0)
        await until(lambda: push.request.prefix_set, "the buffer is reserved")
        again = kit.node.push(kit.plan(prefill, kit.call(prefill, request_id="x", attempt=2), keys, hit=0, path=None))
        assert end_of(await told(waits)).reason is Reason.STALE_ATTEMPT
        assert end_of(await told(push.outbox)).reason is Reason.STALE_ATTEMPT
        assert again.ended is None
        kit.node.cancel("x", 2, prefill.session.session_id)
        await kit.everything_is_home()


async def test_an_engine_that_waits_leaves_to_the_prefill_node_which_attempt_it_is_and_to_no_stranger() -> None:
    async with node_kit() as kit:
        decode, side = kit.engine(), kit.node.decode_side
        waits = side.attach(kit.namespace, "x", 1, decode.session.session_id, 5.0)
        for kind in ("fetch", "stream"):
            with pytest.raises(RequestTaken):
                kit.node.requests.enter(kind, "x", 2, owner="stranger")
        kit.node.requests.enter("assemble", "x", 2, owner="there")
        assert end_of(await told(waits)).reason is Reason.STALE_ATTEMPT
        await kit.everything_is_home()
