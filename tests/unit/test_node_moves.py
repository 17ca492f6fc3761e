"""Requests that are read by several nodes, one of which dies, stands still or is slow: in every state, to the last byte."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from node_kit import told, until
from node_net import Net, node_net
from node_world import World

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import UnknownModel
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Reason
from kvmoverd.node import balancing
from kvmoverd.node import driver as driver_module
from kvmoverd.node.read_plans import ReadPlanner
from kvmoverd.node.services import SplitSettings
from kvmoverd.node.streaming import StreamDriver

STEPS_MAX = 200
PATIENT = SplitSettings(stall_s=30.0)
IMPATIENT = SplitSettings(stall_s=0.06)


def ends(world: World) -> dict[str, Reason]:
    return {heard.name: heard.end.reason for heard in world.heard if heard.end is not None}


def all_ok(world: World) -> None:
    assert ends(world) == dict.fromkeys(("assemble", "stream", "push", "deliver"), Reason.OK), [
        (heard.name, heard.end) for heard in world.heard
    ]


def stream_of(net: Net) -> StreamDriver:
    found = [driver for driver in net["p"].node.requests.live() if isinstance(driver, StreamDriver)]
    assert len(found) == 1, found
    return found[0]


async def begun(net: Net, *shares: tuple[str, tuple[int, int]], hit: int = 4, timeout_s: float = 5.0) -> World:
    world = World(net["p"], hit=hit, blocks=hit + 1, net=net, timeout_s=timeout_s)
    await world.prepare()
    world.turn_parts(*shares)
    await world.settle()
    return world


async def go_on(net: Net, world: World) -> None:
    """All that is held happens, and all that follows from it, by itself from now on."""
    while await world.step():
        pass
    net.open_gates()


HELPED = (("p", (0, 1)), ("h", (1, 3)), ("d", (3, 4)))
ONLY_HELPED = (("h", (0, 4)),)


EVERY = [5, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
"""Of the steps, which are tried: enough for the quick tests, and all."""


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("shares", [HELPED, ONLY_HELPED], ids=["among-others", "alone"])
async def test_a_third_node_may_die_after_any_step(shares: tuple[tuple[str, tuple[int, int]], ...], every: int) -> None:
    states: Counter[str] = Counter()
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT) as net:
            world = await begun(net, *shares)
            for _ in range(steps):
                went_on = await world.step()
            streams = [one for one in net["p"].node.requests.live() if isinstance(one, StreamDriver)]
            states[streams[0].machine.state.name if streams else "GONE"] += 1
            net.kill("h")
            await world.finish()
            all_ok(world)
        if steps and not went_on:
            break
    assert {"READING", "STREAMING", "GONE"} <= set(states), states


@pytest.mark.parametrize("every", EVERY)
async def test_a_decode_node_may_die_after_any_step_and_everybody_is_told(every: int) -> None:
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT) as net:
            world = await begun(net, *HELPED)
            for _ in range(steps):
                went_on = await world.step()
            over = {heard.name for heard in world.heard if heard.end is not None}
            net.kill("d")
            await go_on(net, world)
            here = [heard for heard in world.heard if heard.name in ("stream", "push")]
            await until(lambda here=here: all(heard.quiet for heard in here), "both calls of the prefill engine end")
            for heard in here:
                assert heard.end is not None
                lost = heard.end.reason in (Reason.PEER_LOST, Reason.PREFIX_CUT)
                assert lost or heard.name in over or heard.end.reason is Reason.OK, (heard.name, heard.end)
            world.kit.node.session_closed(world.prefill.session.session_id, "the test ends")
            await net.everything_is_home()
            for task in world.tasks:
                task.cancel()
        if steps and not went_on:
            break


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_a_third_node_that_falls_silent_before_the_prefix_is_replaced(steps: int) -> None:
    async with node_net(3, split=IMPATIENT) as net:
        world = await begun(net, *HELPED)
        for _ in range(steps):
            await world.step()
        # No word passes any more, and nobody says so.
        net.cuts |= {frozenset(("p", "h")), frozenset(("d", "h"))}
        await until(lambda: net["p"].services.counts.moves["stalled"] == 1, "it is taken for dead")
        await go_on(net, world)
        await until(lambda: all(heard.quiet for heard in world.heard), "all calls end")
        all_ok(world)
        net.cut("p", "h")
        net.cut("d", "h")
        await world.finish()


async def test_blocks_that_a_slow_node_has_not_begun_are_read_by_another_and_none_twice() -> None:
    async with node_net(2, split=IMPATIENT) as net:
        world = await begun(net, ("p", (0, 2)), ("d", (2, 22)), hit=22)
        net["p"].disk.closed = False
        while net["p"].disk.release_one():
            await world.settle()
        # The decode node's device has its first reads, and does not end them.
        await until(lambda: sum(net["p"].services.counts.moves.values()) == 1, "the rest moves")
        await until(lambda: net.read_blocks()["p"] > 2, "it is read here")
        net.open_gates()
        await world.finish()
        all_ok(world)
        read = net.read_blocks()
        assert read["p"] + read["d"] == 22 and read["d"] < 20, read


async def test_a_node_that_is_as_fast_as_the_other_keeps_what_it_has() -> None:
    async with node_net(2) as net:
        world = await begun(net, ("p", (0, 4)), ("d", (4, 8)), hit=8)
        await world.finish()
        all_ok(world)
        assert net.read_blocks() == {"p": 4, "d": 4}
        assert not net["p"].services.counts.moves


@pytest.mark.parametrize("asked", ["d", "h"])
async def test_a_request_that_ends_while_blocks_are_on_the_move_leaves_nothing(asked: str) -> None:
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, *HELPED)
        stream = stream_of(net)
        part = next(part for part, known in stream.machine.parts.items() if known.share.node == asked)
        net.delay_s = 0.02
        stream.run(stream.machine.on_move(part, 0, "p"))
        assert stream.machine.parts[part].moving_to == "p"
        net["p"].node.cancel("x", 1, world.prefill.session.session_id)
        await world.finish()
        assert ends(world)["stream"] is Reason.CANCELLED


@pytest.mark.parametrize("asked", ["p", "d", "h"])
@pytest.mark.parametrize("to_node", ["p", "d", "h"])
async def test_a_part_may_move_from_any_node_to_any_other(asked: str, to_node: str) -> None:
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, ("p", (0, 10)), ("h", (10, 20)), ("d", (20, 30)), hit=30)
        stream = stream_of(net)
        part = next(part for part, known in stream.machine.parts.items() if known.share.node == asked)
        stream.run(stream.machine.on_move(part, 0, to_node))
        await world.settle()
        count = stream.machine.parts[part].count
        assert count == 8, "the device has eight of them already"
        await world.finish()
        all_ok(world)
        assert sum(net.read_blocks().values()) == 30


async def test_a_third_node_that_refuses_is_replaced_at_once() -> None:
    async with node_net(3, split=PATIENT) as net:
        net.refuses = lambda call, own, other: (
            UnknownModel("no such model here") if (call, other) == ("read_part", "h") else None
        )
        world = await begun(net, *HELPED)
        await world.finish()
        all_ok(world)
        assert net.read_blocks() == {"p": 1, "d": 3, "h": 0}
        assert net["p"].services.counts.moves == {"failed": 1}


async def held_by_dead_reader(net: Net, world: World) -> StreamDriver:
    """A third node is lost while its CNIC may still write a layer into the pages."""
    for kit in net.kits.values():
        while kit.disk.release_one():
            await world.settle()
    await until(lambda: len(net.fars["h"].held) > 0, "a layer of the third node is under way")
    for handle in list(net.peers["p"].far["h"].handles):
        handle.lost("no word from h")
    await world.settle()
    return stream_of(net)


async def test_no_second_reader_begins_while_the_first_may_still_write() -> None:
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, *HELPED)
        stream = await held_by_dead_reader(net, world)
        fenced = [known for known in stream.machine.parts.values() if known.fenced]
        assert len(fenced) == 1 and fenced[0].share.node == "h", "it is still the helper's"
        assert [known.share.node for known in stream.machine.parts.values()].count("d") == 1
        net.open_gates()
        await world.finish()
        all_ok(world)


async def test_pages_that_a_dead_node_may_write_are_not_quiet_until_it_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "QUIESCE_S", 0.05)
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, *HELPED, timeout_s=0.4)
        stream = await held_by_dead_reader(net, world)
        heard = next(heard for heard in world.heard if heard.name == "stream")
        await until(lambda: heard.end is not None, "the deadline comes")
        assert heard.end is not None and not heard.end.pages_quiet and not heard.quiet
        assert stream.machine.state is StreamState.UNQUIET
        await asyncio.sleep(0.05)
        assert not heard.quiet
        net.open_gates()
        await world.finish()
        assert heard.quiet


async def test_nobody_waits_for_the_end_of_a_reader_none_of_whose_blocks_count() -> None:
    """It stands still when it is told so, behind the first lost block of another; nothing says that it died."""
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, ("p", (0, 2)), ("h", (2, 4)))
        stream = stream_of(net)
        while net["h"].disk.release_one():
            await world.settle()
        await until(lambda: [known.prefix for known in stream.machine.parts.values()] == [None, 2], "it is read there")
        net.cuts |= {frozenset(("p", "h")), frozenset(("d", "h"))}
        net["p"].storage.tamper(net["p"].namespace, world.keys[1], None)
        await go_on(net, world)
        async with asyncio.timeout(driver_module.QUIESCE_S - 0.5):
            await until(lambda: all(heard.quiet for heard in world.heard), "all calls end")
        all_ok(world)
        assert world.prefix == 1
        net.cut("p", "h")
        net.cut("d", "h")
        await world.finish()


async def test_a_third_node_whose_reads_wait_answers_that_it_is_there_and_keeps_its_part() -> None:
    async with node_net(3, split=IMPATIENT) as net:
        world = await begun(net, *HELPED)
        await asyncio.sleep(5 * IMPATIENT.stall_s)
        assert not net["p"].services.counts.moves
        await world.finish()
        all_ok(world)
        assert net.read_blocks() == {"p": 1, "d": 1, "h": 2}


async def test_the_answer_to_whether_a_node_is_there_is_not_taken_for_that_to_what_it_is_asked_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its progress crosses with the question, and is a reason to ask it for blocks: one question at a time all the same."""
    monkeypatch.setattr(balancing, "MOVES_MAX", 1)
    async with node_net(3, split=PATIENT) as net:
        world = await begun(net, ("p", (0, 2)), ("h", (2, 22)), hit=22)
        stream = stream_of(net)
        part = next(part for part, known in stream.machine.parts.items() if known.share.node == "h")
        while net["p"].disk.release_one():
            await world.settle()
        net.delay_s = 0.05
        stream._balancer._parts[part].heard_ns -= int(PATIENT.stall_s * 1e9 * 0.6)
        await until(lambda: stream._balancer._parts[part].probed_ns is not None, "it is asked whether it is there")
        net.peers["p"].starved, stream._balancer._look_next_ns = {"h"}, 0
        net["h"].disk.release_one()
        await until(lambda: net["p"].services.counts.moves, "what it has not begun moves")
        net.delay_s = 0.0
        await world.finish()
        all_ok(world)
        assert net["p"].services.counts.moves == {"starved": 1}
        assert sum(net.read_blocks().values()) == 22, "nothing is read twice"


async def test_reads_that_wait_behind_those_of_others_do_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadPlanner, "depth", lambda self, node, reserved: Depth(1 << 30, 1 << 30))
    async with node_net(2, split=IMPATIENT) as net:
        world = await begun(net, ("p", (0, 2)), ("d", (2, 22)), hit=22)
        while net["p"].disk.release_one():
            await world.settle()
        await asyncio.sleep(5 * IMPATIENT.stall_s)
        assert not net["p"].services.counts.moves, (
            "the caller has chosen who reads, and there is a second's work before"
        )
        await world.finish()
        all_ok(world)


async def test_what_this_node_has_no_slots_for_the_decode_node_reads() -> None:
    """Room was granted, but the slots are not there."""
    async with node_net(2, slots=10, room_slots={Purpose.READ: 40}) as net:
        kit = net["p"]
        world = World(kit, hit=5, blocks=6, net=net, timeout_s=5.0)
        await world.prepare()
        net.open_gates()
        leased = kit.chain(8, salt=7)
        await kit.store(kit.engine(16), leased)
        lease = kit.node.fetch(kit.call(world.prefill), kit.namespace, leased, FetchKind.LEASE, lease_s=60)
        await told(lease.outbox)
        net.forget_counts()
        world.turn_parts(("p", (0, 4)), ("d", (4, 5)))
        await until(lambda: all(heard.quiet for heard in world.heard), "all calls end")
        all_ok(world)
        assert net.read_blocks() == {"p": 0, "d": 5}
        assert kit.services.counts.moves == {"failed": 1}
        await world.finish()
