"""Attempts that the scheduler has given up: all of their calls end on this node, later ones are refused, and the next attempt
goes on at once, whosever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from node_kit import NodeKit, end_of, node_kit, told
from node_net import Net, node_net
from node_world import World

from kvmoverd.core.errors import Draining, StaleAttempt
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Reason
from kvmoverd.node.services import Limits

LONG = Limits(admission_wait_s=30, attach_timeout_s=30)
FLOWS = [
    World.fetch_lease,
    World.fetch_pages,
    World.store_blocks,
    World.load_only,
    World.push_only,
    World.turn_pe,
    World.turn_de,
]


def fence(where: Net | NodeKit, request_id: str = "x", attempt: int = 1) -> None:
    """As every node does that hears of it."""
    for kit in where.alive if isinstance(where, Net) else [where]:
        kit.node.requests.fence_off(request_id, attempt)


async def is_followed(world: World, flow: Callable[[World], None], where: Net | NodeKit) -> None:
    """The attempt is fenced off as it is; a second one, of other engines, begins before the devices have let go of the first."""
    went_on = [heard for heard in world.heard if heard.end is None]
    fence(where)
    second = World(world.kit, net=world.net, attempt=2)
    flow(second)
    while await world.step() or await second.step():
        pass
    where.open_gates()
    for each in (world, second):
        await each.ended()
    ends = {heard.name: heard.end.reason for heard in went_on if heard.end}
    assert ends == dict.fromkeys(ends, Reason.STALE_ATTEMPT), ends
    assert {heard.end.reason for heard in second.heard if heard.end} == {Reason.OK}, second.heard
    assert not second.refused
    for each in (world, second):
        each.close()
    await where.everything_is_home()


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
async def test_whatever_an_attempt_does_it_ends_and_the_next_one_of_other_engines_goes_on(
    flow: Callable[[World], None],
) -> None:
    for steps in range(0, 16, 3):
        async with node_kit(slots=48, limits=LONG) as kit:
            world = World(kit)
            await world.prepare()
            flow(world)
            going_on = True
            for _ in range(steps):
                going_on = await world.step()
            await is_followed(world, flow, kit)
        if not going_on:
            return


def turn_over_three(world: World) -> None:
    world.turn_parts(("p", (0, 1)), ("h", (1, 2)), ("d", (2, 3)))


async def test_a_request_over_three_nodes_ends_on_all_of_them_and_the_next_attempt_goes_on() -> None:
    for steps in range(0, 16, 3):
        async with node_net(3, slots=48, limits=LONG) as net:
            world = World(net["p"], net=net)
            world.hit = 3
            await world.prepare()
            turn_over_three(world)
            for _ in range(steps):
                await world.step()
            went_on = [heard for heard in world.heard if heard.end is None]
            fence(net)
            while await world.step():
                pass
            net.open_gates()
            await world.ended()
            assert {heard.end.reason for heard in went_on if heard.end} <= {Reason.STALE_ATTEMPT}
            second = World(net["p"], net=net, attempt=2)
            second.hit = 3
            turn_over_three(second)
            while await second.step():
                pass
            await second.ended()
            assert {heard.end.reason for heard in second.heard if heard.end} == {Reason.OK}
            for each in (world, second):
                each.close()
            await net.everything_is_home()


async def test_an_engine_that_waits_for_its_buffer_is_told() -> None:
    async with node_kit(limits=LONG) as kit:
        session = kit.engine().session.session_id
        waiting = kit.node.decode_side.attach(kit.namespace, "x", 3, session, 20.0)
        fence(kit, attempt=2)
        assert kit.node.decode_side._waiting
        fence(kit, attempt=3)
        end = end_of(await told(waiting))
        assert end.reason is Reason.STALE_ATTEMPT and "the scheduler has given attempt 3 up" in end.message
        with pytest.raises(StaleAttempt):
            kit.node.decode_side.attach(kit.namespace, "x", 3, session, 20.0)
        await kit.everything_is_home()


async def test_a_node_that_drains_does_not_take_the_attempt_after_one_that_was_fenced_off() -> None:
    async with node_kit(limits=LONG) as kit:
        engine = kit.engine()
        fence(kit)
        kit.node.drain()
        with pytest.raises(Draining):
            kit.node.fetch(kit.call(engine, request_id="x", attempt=2), kit.namespace, (), FetchKind.LEASE)
        await kit.everything_is_home()


async def test_other_requests_and_higher_attempts_are_left_alone() -> None:
    async with node_kit(limits=LONG) as kit:
        session = kit.engine().session.session_id
        waiting = [kit.node.decode_side.attach(kit.namespace, name, 2, session, 20.0) for name in ("x", "y")]
        fence(kit, "x", 1)
        fence(kit, "z", 9)
        assert len(kit.node.decode_side._waiting) == 2
        kit.node.session_closed(session, "the test ends")
        assert [end_of(await told(outbox)).reason for outbox in waiting] == [Reason.ENGINE_GONE] * 2
        await kit.everything_is_home()
