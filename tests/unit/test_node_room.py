"""Room: who waits is served in order, for a bounded time, and leaves no trace however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node_gates import StillLoop
from node_kit import LAYOUT, NodeKit, OwnPeers, end_of, node_kit, told, until
from node_net import Net, node_net

from kvmoverd.core.admission import Admission, Purpose
from kvmoverd.core.errors import KvmoverError, PoolExhausted, QueueFull, TooBig
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.fetching import FetchDriver
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.outbox import Attached, Outbox
from kvmoverd.node.peer import Reservation, Reserved
from kvmoverd.node.prefill import HOLD_S
from kvmoverd.node.room import Room
from kvmoverd.node.services import Limits
from kvmoverd.node.streaming import StreamDriver

LIMIT_BYTES = 100


class Desk:
    """A room of 100 bytes, and what it told whom, in order."""

    def __init__(self) -> None:
        self.admission = Admission(dict.fromkeys(Purpose, LIMIT_BYTES), queue_max=3)
        self.room = Room(self.admission, wait_s=1.0)
        self.granted: list[str] = []
        self.refused: list[tuple[str, type[KvmoverError]]] = []
        self.errors: list[KvmoverError] = []

    def ask(self, owner: str, size_bytes: int, purpose: Purpose = Purpose.READ) -> None:
        def refused(error: KvmoverError) -> None:
            self.refused.append((owner, type(error)))
            self.errors.append(error)

        self.room.ask(purpose, owner, size_bytes, granted=lambda: self.granted.append(owner), refused=refused)

    def empty(self) -> bool:
        room = self.room
        return not (room._owners or room._waiting or any(map(self.admission.taken_bytes, Purpose)))


def in_still_time(test):  # type: ignore[no-untyped-def]
    """Runs a coroutine on a loop whose time only the test moves."""

    def run() -> None:
        with asyncio.Runner(loop_factory=StillLoop) as runner:
            runner.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StillLoop)
    loop.now_s += seconds
    for _ in range(3):
        await asyncio.sleep(0)


@in_still_time
async def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    desk = Desk()
    desk.ask("first", 60)
    desk.ask("large", 90)
    desk.ask("small", 10)
    assert desk.granted == ["first"] and not desk.room.fits_now(Purpose.READ, 1)
    desk.ask("other", 90, Purpose.WRITE_BACK)
    assert desk.granted == ["first", "other"], "purposes do not wait for each other"
    desk.room.give_back("first")
    assert desk.granted == ["first", "other", "large", "small"]
    for owner in ("large", "small", "other"):
        desk.room.give_back(owner)
    assert desk.empty()


@in_still_time
async def test_who_waits_too_long_is_refused_with_numbers_and_those_behind_move_up() -> None:
    desk = Desk()
    desk.ask("first", 60)
    desk.ask("large", 90)
    await pass_time(0.5)
    desk.ask("small", 40)
    await pass_time(0.6)
    assert desk.refused == [("large", PoolExhausted)] and desk.granted == ["first", "small"]
    assert str(desk.errors[0]) == "pool.read_bytes, after 1 s: asked for 90 bytes, 40 can be had"
    await pass_time(2.0)
    assert len(desk.refused) == 1, "a granted place has no time limit"
    for owner in ("first", "small", "large", "stranger"):
        desk.room.give_back(owner)
    assert desk.empty()


@in_still_time
async def test_who_leaves_while_waiting_is_never_granted_and_lets_others_pass() -> None:
    desk = Desk()
    desk.ask("first", 60)
    desk.ask("large", 90)
    desk.ask("small", 30)
    desk.room.give_back("large")
    assert desk.granted == ["first", "small"] and not desk.refused
    desk.room.give_back("small")
    desk.room.give_back("first")
    await pass_time(5.0)
    assert desk.empty() and not desk.refused


@in_still_time
async def test_what_can_never_fit_and_a_full_queue_are_told_at_once() -> None:
    desk = Desk()
    desk.ask("huge", 101)
    desk.ask("first", 100)
    for n in range(4):
        desk.ask(f"w{n}", 10)
    assert desk.refused == [("huge", TooBig), ("w3", QueueFull)]
    for owner in ("w0", "w1", "w2", "first"):
        desk.room.give_back(owner)
    assert desk.empty()


@in_still_time
async def test_a_grant_that_gives_back_at_once_serves_the_next_in_the_same_breath() -> None:
    desk = Desk()
    desk.ask("first", 100)
    for name in ("a", "b"):
        desk.room.ask(
            Purpose.READ,
            name,
            100,
            granted=lambda name=name: (desk.granted.append(name), desk.room.give_back(name)),  # type: ignore[misc]
            refused=lambda error: None,
        )
    desk.ask("last", 100)
    desk.room.give_back("first")
    assert desk.granted == ["first", "a", "b", "last"]
    desk.room.give_back("last")
    assert desk.empty()


@in_still_time
async def test_a_part_of_a_place_can_be_handed_over_and_the_rest_serves_others() -> None:
    desk = Desk()
    desk.ask("first", 100)
    desk.ask("second", 70)
    held = desk.room.hand_over("first", 30)
    assert held == (Purpose.READ, 30) and desk.granted == ["first", "second"]
    desk.room.give_back("second")
    desk.room.give_back_bytes(*held)
    assert desk.empty()


def lease(kit: NodeKit, engine, keys, **options) -> FetchDriver:  # type: ignore[no-untyped-def]
    return kit.node.fetch(kit.call(engine, **options), kit.namespace, keys, FetchKind.LEASE, lease_s=60)


async def test_requests_are_admitted_in_order_and_a_cancelled_one_makes_room() -> None:
    async with node_kit(slots=8, limits=Limits(admission_wait_s=30)) as kit:
        engine = kit.engine()
        await kit.store(engine, kit.chain(6))
        kit.disk.closed = True
        first = lease(kit, engine, kit.chain(6))
        second, third = lease(kit, engine, kit.chain(8, salt=1)), lease(kit, engine, kit.chain(2, salt=2))
        assert kit.admission.waiting(Purpose.READ) == 2
        assert third.machine.state.name == "WAITING", "it waits its turn, though it would fit"
        kit.node.cancel(second.call.request_id, 1, engine.session.session_id)
        assert end_of(await told(second.outbox)).reason is Reason.CANCELLED
        assert third.machine.state.name == "READING"
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        for driver in (first, third):
            assert end_of(await told(driver.outbox)).reason is Reason.OK
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_the_deadline_ends_a_wait_for_room() -> None:
    async with node_kit(slots=8, limits=Limits(admission_wait_s=30)) as kit:
        engine = kit.engine()
        await kit.store(engine, kit.chain(6))
        held = lease(kit, engine, kit.chain(6))
        assert end_of(await told(held.outbox)).reason is Reason.OK
        late = lease(kit, engine, kit.chain(6, salt=1), timeout_s=0.02)
        end = end_of(await told(late.outbox))
        assert (end.reason, end.message, end.pages_quiet) == (Reason.DEADLINE, "0.02 s passed", True)
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()


async def test_a_turn_whose_buffer_does_not_fit_in_time_ends() -> None:
    async with node_kit(slots=8, limits=Limits(admission_wait_s=0.03, attach_timeout_s=5)) as kit:
        engine, keys = kit.engine(), kit.chain(5)
        await kit.store(engine, keys)
        call = kit.call(engine)
        first = kit.node.stream(kit.plan(engine, call, keys, hit=5, path=Path.DE))
        await asyncio.sleep(0.005)
        second = kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=5, path=Path.DE, first_page=10))
        end = end_of(await told(second.outbox))
        assert end.reason is Reason.POOL_EXHAUSTED
        assert f"asked for {5 * LAYOUT.record_bytes} bytes" in end.message
        assert end_of(await told(first.outbox)).reason is Reason.OK
        kit.node.cancel(call.request_id, 1, engine.session.session_id)
        await kit.everything_is_home()


@in_still_time
async def test_who_has_waited_elsewhere_goes_first_and_waits_only_what_is_left() -> None:
    desk = Desk()
    desk.ask("first", 100)
    desk.ask("young", 10)
    desk.room.ask(
        Purpose.READ,
        "old",
        100,
        granted=lambda: desk.granted.append("old"),
        refused=lambda error: desk.refused.append(("old", type(error))),
        waited_s=0.75,
    )
    await pass_time(0.3)
    assert desk.refused == [("old", PoolExhausted)]
    desk.room.give_back("first")
    assert desk.granted == ["first", "young"]
    desk.room.give_back("young")
    assert desk.empty()


@in_still_time
async def test_a_place_that_was_taken_for_another_is_used_by_it() -> None:
    desk = Desk()
    desk.ask("request", 60)
    desk.room.rename("request", "part")
    desk.ask("part", 60)
    assert (desk.granted, desk.admission.taken_bytes(Purpose.READ)) == (["request", "part"], 60)
    desk.room.give_back("request")
    assert desk.admission.taken_bytes(Purpose.READ) == 60
    desk.room.give_back("part")
    assert desk.empty()


BACK = Limits(admission_wait_s=5, attach_timeout_s=5)


@asynccontextmanager
async def scarce(limits: Limits) -> AsyncIterator[tuple[Net, StreamDriver, Outbox]]:
    """A prefill node without room for its own reads, "all of it" has it: its stream of two hits, and a decode engine that
    waits on another node for the buffer."""
    async with node_net(2, limits=limits) as net:
        kit, keys = net["p"], net["p"].chain(2)
        await kit.store(kit.engine(), keys)
        size_bytes = 64 * LAYOUT.record_bytes
        room = kit.services.room
        room.ask(Purpose.READ, "all of it", size_bytes, granted=lambda: None, refused=lambda error: None)
        prefill, decode = kit.engine(), net["d"].engine()
        call = kit.call(prefill, request_id="x")
        stream = kit.node.stream(kit.plan(prefill, call, keys, hit=2, path=Path.PE, decode_node="d"))
        waits = net["d"].node.decode_side.attach(kit.namespace, "x", 1, decode.session.session_id, 5.0)
        yield net, stream, waits
        await net.everything_is_home()


async def test_a_request_without_room_at_home_gives_its_buffer_back_and_both_ends_wait_on() -> None:
    async with scarce(BACK) as (net, stream, waits):
        kit, there = net["p"], net["d"]
        await until(lambda: there.admission.taken_bytes(Purpose.DE_BUFFER) > 0, "the buffer is taken")
        await until(lambda: kit.admission.waiting(Purpose.READ) == 1, "room is asked for here")
        asked: list[float] = []
        reserve = there.node.decode_side.reserve

        async def counted(namespace: Namespace, reservation: Reservation) -> Reserved:
            asked.append(reservation.waited_s)
            return await reserve(namespace, reservation)

        there.node.decode_side.reserve = counted  # type: ignore[method-assign]
        await until(lambda: len(asked) >= 2, "the buffer went back, and was asked for again, twice")
        assert HOLD_S <= asked[0] < asked[1] < BACK.admission_wait_s, "its age goes along"
        assert stream.ended is None
        kit.services.room.give_back("all of it")
        assert end_of(await told(stream.outbox)).reason is Reason.OK
        kit.node.cancel("x", 1, stream.call.session_id)
        events = await told(waits)
        assert [isinstance(event, Attached) for event in events] == [True] * (len(events) - 1) + [False]
        assert len(events) >= 3, "it was attached to each buffer"
        assert end_of(events).reason is Reason.CANCELLED


async def test_a_request_that_finds_no_room_at_home_in_all_its_time_is_refused_and_leaves_nothing() -> None:
    async with scarce(Limits(admission_wait_s=0.7, attach_timeout_s=5)) as (net, stream, waits):
        assert end_of(await told(stream.outbox)).reason is Reason.POOL_EXHAUSTED
        assert end_of(await told(waits)).reason is Reason.POOL_EXHAUSTED
        net["p"].services.room.give_back("all of it")


async def test_a_request_that_is_cancelled_while_it_waits_at_home_leaves_nothing() -> None:
    async with scarce(BACK) as (net, stream, waits):
        kit = net["p"]
        await until(lambda: kit.admission.waiting(Purpose.READ) == 1, "room is asked for here")
        kit.node.cancel("x", 1, stream.call.session_id)
        assert end_of(await told(stream.outbox)).reason is Reason.CANCELLED
        assert kit.admission.waiting(Purpose.READ) == 0, "it left the queue"
        assert end_of(await told(waits)).reason is Reason.CANCELLED
        net["p"].services.room.give_back("all of it")


class FullPeer(LocalPeer):
    """A decode node that has no room for the first reservations."""

    def __init__(self, kit: NodeKit, refusals: int) -> None:
        super().__init__(kit.node.decode_side, kit.node.models)
        self.ages_s: list[float] = []
        self._refusals = refusals

    async def reserve(self, reservation: Reservation) -> Reserved:
        self.ages_s.append(reservation.waited_s)
        if len(self.ages_s) <= self._refusals:
            raise PoolExhausted(purpose="de_buffer", asked=2, free=0)
        return await super().reserve(reservation)


async def test_a_decode_node_without_room_is_asked_again_within_the_admission_wait() -> None:
    async with node_kit(limits=BACK) as kit:
        prefill, peer = kit.engine(), FullPeer(kit, refusals=1)
        kit.node.peers = OwnPeers(peer)
        push = kit.node.push(kit.plan(prefill, kit.call(prefill, request_id="x"), kit.chain(2), hit=0, path=None))
        await until(lambda: push.request.prefix_set, "reserved at last")
        assert len(peer.ages_s) == 2
        assert HOLD_S <= peer.ages_s[1] < 2.0
        kit.node.cancel("x", 1, prefill.session.session_id)
        await kit.everything_is_home()


async def test_a_buffer_that_something_was_pushed_into_does_not_go_back_to_admission() -> None:
    async with node_kit(limits=BACK) as kit:
        prefill, decode, keys = kit.engine(), kit.engine(), kit.chain(2)
        kit.fill(prefill, keys)
        push = kit.node.push(kit.plan(prefill, kit.call(prefill, request_id="x"), keys, hit=0, path=None))
        waits = kit.node.decode_side.attach(kit.namespace, "x", 1, decode.session.session_id, 5.0)
        await until(lambda: push.request.prefix_set, "reserved")
        push.request.computed(1)
        (assembly,) = [driver for driver in kit.node.requests.live() if driver.kind == "assemble"]
        await until(lambda: assembly.moved_bytes > 0, "a layer is in")
        assert push.request.reserved is not None
        kit.node.decode_side.return_ticket(push.request.reserved.ticket)
        assert end_of(await told(waits)).reason is Reason.POOL_EXHAUSTED
        kit.node.cancel("x", 1, prefill.session.session_id)
        await kit.everything_is_home()


@in_still_time
async def test_a_place_that_shrinks_gives_the_rest_to_others_and_one_that_waits_keeps_its_turn() -> None:
    desk = Desk()
    desk.ask("first", 90)
    desk.ask("second", 60)
    desk.ask("third", 5)
    desk.room.shrink("second", 20)
    assert desk.granted == ["first"], "20 bytes do not fit beside 90"
    desk.room.shrink("second", 40)
    desk.room.shrink("nobody", 0)
    desk.room.shrink("first", 80)
    assert desk.granted == ["first", "second"]
    desk.ask("fourth", 1)
    desk.room.shrink("third", 0)
    assert desk.granted == ["first", "second", "third"], "who needs nothing waits for nobody"
    desk.room.shrink("first", 70)
    assert desk.granted == ["first", "second", "third", "fourth"]
    assert desk.admission.taken_bytes(Purpose.READ) == 70 + 20 + 0 + 1
    for owner in ("first", "second", "third", "fourth"):
        desk.room.give_back(owner)
    await pass_time(2.0)
    assert desk.empty() and not desk.refused


@in_still_time
async def test_what_waits_for_how_long_and_who_was_refused_can_be_told() -> None:
    desk = Desk()
    desk.ask("first", 60)
    desk.ask("second", 50)
    await pass_time(0.25)
    desk.ask("third", 30)
    use = next(use for use in desk.room.uses() if use.purpose is Purpose.READ)
    assert (use.limit_bytes, use.taken_bytes, use.waiting, use.waiting_bytes) == (LIMIT_BYTES, 60, 2, 80)
    assert abs(use.oldest_wait_s - 0.25) < 0.01 and use.refused == 0
    await pass_time(0.8)
    use = next(use for use in desk.room.uses() if use.purpose is Purpose.READ)
    assert desk.granted == ["first", "third"]
    assert (use.taken_bytes, use.waiting, use.oldest_wait_s, use.refused) == (90, 0, 0.0, 1)
    assert {use.purpose for use in desk.room.uses()} == set(Purpose)
