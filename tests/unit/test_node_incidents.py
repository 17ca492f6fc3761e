"""Every flow, met by every incident at every step: one end per call, pages left alone after it, books that add up."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
from node_kit import node_kit
from node_world import World

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Reason
from kvmoverd.node.services import Limits
from kvmoverd.ports.storage import BlockRead

SHORT = Limits(admission_wait_s=0.05, attach_timeout_s=0.05)


def cancel_prefill(world: World) -> None:
    world.kit.node.cancel(world.request_id, 1, world.prefill.session.session_id)


def cancel_decode(world: World) -> None:
    world.kit.node.cancel(world.request_id, 1, world.decode.session.session_id)


def deadline(world: World) -> None:
    for driver in world.kit.node.requests.live()[:1]:
        driver.stop(Reason.DEADLINE, "0 s passed")


def prefill_gone(world: World) -> None:
    world.kit.node.session_closed(world.prefill.session.session_id, "the engine died")


def decode_gone(world: World) -> None:
    world.kit.node.session_closed(world.decode.session.session_id, "the engine died")


def prefill_unregisters(world: World) -> None:
    world.do(world.kit.node.unregister_region(world.prefill.session, world.prefill.region.region_id))


def decode_unregisters(world: World) -> None:
    world.do(world.kit.node.unregister_region(world.decode.session, world.decode.region.region_id))


def shutdown(world: World) -> None:
    world.do(world.kit.node.shut_down(2.0))


def higher_attempt(world: World) -> None:
    with contextlib.suppress(KvmoverError):
        call = world.call(world.prefill, attempt=2)
        world.listen("later", world.kit.node.fetch(call, world.kit.namespace, (), FetchKind.LEASE).outbox)


def fenced_off(world: World) -> None:
    assert world.kit.node.requests.fence_off(world.request_id, 1)


def ticket_released(world: World) -> None:
    for driver in list(world.kit.node.decode_side._by_ticket.values()):
        driver.stop(Reason.CANCELLED, "the prefill node gave the request up")


def one_block_fails(world: World) -> None:
    failures = iter([Reason.CORRUPT])
    world.kit.disk.fails = lambda op: next(failures, None)


def storage_fails(world: World) -> None:
    world.kit.disk.fails = lambda op: Reason.IO_ERROR


def reads_fail(world: World) -> None:
    world.kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockRead) else None


def one_send_fails(world: World) -> None:
    failures = iter([Reason.INTERNAL])
    world.kit.wire.fails = lambda send: next(failures, None)


def peer_lost(world: World) -> None:
    world.kit.wire.fails = lambda send: Reason.PEER_LOST
    world.kit.node.decode_side.peer_lost("here", "boot", "the channel broke")


INCIDENTS = [
    cancel_prefill,
    cancel_decode,
    deadline,
    prefill_gone,
    decode_gone,
    prefill_unregisters,
    decode_unregisters,
    shutdown,
    higher_attempt,
    fenced_off,
    ticket_released,
    one_block_fails,
    storage_fails,
    reads_fail,
    one_send_fails,
    peer_lost,
]
FLOWS = [
    World.fetch_lease,
    World.fetch_pages,
    World.store_blocks,
    World.load_only,
    World.push_only,
    World.turn_pe,
    World.turn_de,
    World.turn_full,
]


Deed: TypeAlias = Callable[[World], None]
EVERY = 9
"""In a quick run an incident comes at one step in so many; incidents differ in which, so that together they meet them all."""


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.__name__)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
async def test_a_flow_survives_an_incident_at_some_steps(flow: Deed, incident: Deed) -> None:
    await survives(flow, incident, itertools.count(INCIDENTS.index(incident) % EVERY, EVERY))


@pytest.mark.slow
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.__name__)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
async def test_a_flow_survives_an_incident_at_each_step(flow: Deed, incident: Deed) -> None:
    await survives(flow, incident, itertools.count())


async def survives(flow: Deed, incident: Deed, steps: Iterable[int]) -> None:
    """An incident after each of these numbers of steps, until the flow has no more."""
    for steps_before in steps:
        async with node_kit(slots=24, limits=SHORT) as kit:
            world = World(kit)
            await world.prepare()
            flow(world)
            going_on = True
            for _ in range(steps_before):
                going_on = await world.step()
            incident(world)
            await world.finish()
        if not going_on:
            return


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
async def test_a_flow_without_incident_ends_well(flow: Deed) -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        flow(world)
        await world.finish()
        assert [heard.end.reason for heard in world.heard if heard.end] == [Reason.OK] * len(world.heard)
        assert not world.refused
