"""Moves in mid-stream that meet faults: everybody is told, nothing leaks, no byte is wrong, whatever happens when."""

from __future__ import annotations

from collections import Counter

import pytest
from node_kit import LAYOUT, until
from node_net import Net, node_net
from node_time import pass_time
from rest_kit import EVERY, IMPATIENT, MOVES, PATIENT, SPLIT, STEPS_MAX, Rest, all_ok, ends, steps_of, streaming

from kvmoverd.core.errors import KvmoverError, QueueFull
from kvmoverd.core.status import Reason
from kvmoverd.node import driver as driver_module
from kvmoverd.ports.storage import BlockRead, StorageOp

LAYERS = LAYOUT.layer_count


async def everybody_is_told(rest: Rest, *names: str) -> None:
    """All of these calls end, and are quiet."""
    heard = [one for one in rest.world.heard if one.name in names]
    await until(lambda: all(one.quiet for one in heard), f"{names} end")


async def go_on(rest: Rest) -> None:
    """All that is held happens, and all that follows from it, by itself from now on."""
    while await rest.world.step():
        pass
    rest.net.open_gates()


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("giver", ["p", "d"])
async def test_who_reads_a_rest_may_die_after_any_step(giver: str, every: int) -> None:
    """Before it has sent anything somebody else reads it; else the attempt ends, and says how much is good."""
    found: Counter[Reason] = Counter()
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT, ops_max=2) as net:
            rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
            assert rest.move(giver, "h")
            went_on = await steps_of(rest, steps)
            net.kill("h")
            await rest.world.finish()
            reason = ends(rest.world)["stream"]
            found[reason] += 1
            assert reason in (Reason.OK, Reason.PREFIX_CUT), [(heard.name, heard.end) for heard in rest.world.heard]
            if reason is Reason.OK:
                all_ok(rest.world)
        if not went_on:
            break
    assert found[Reason.OK], found


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("taker", ["p", "h"])
async def test_a_decode_node_that_gave_its_rest_may_die_after_any_step(taker: str, every: int) -> None:
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT, ops_max=2) as net:
            rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
            assert rest.move("d", taker)
            went_on = await steps_of(rest, steps)
            over = {heard.name for heard in rest.world.heard if heard.end is not None}
            net.kill("d")
            await go_on(rest)
            await everybody_is_told(rest, "stream", "push")
            for heard in rest.world.heard:
                if heard.name in ("stream", "push") and heard.name not in over:
                    assert heard.end is not None
                    assert heard.end.reason in (Reason.PEER_LOST, Reason.PREFIX_CUT, Reason.OK), heard.end
            await left_to_the_living(net, rest)
        if not went_on:
            break


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_prefill_node_may_die_after_any_step_of_a_move(giver: str, taker: str, every: int) -> None:
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT, ops_max=2) as net:
            rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
            assert rest.move(giver, taker)
            went_on = await steps_of(rest, steps)
            net.kill("p")
            await go_on(rest)
            await everybody_is_told(rest, "assemble")
            await left_to_the_living(net, rest)
        if not went_on:
            break


async def left_to_the_living(net: Net, rest: Rest) -> None:
    """Slots, rooms and books of the nodes that live are as if nothing had been."""
    for kit, engine in ((rest.world.kit, rest.world.prefill), (rest.world.there, rest.world.decode)):
        if kit.services.node not in net.dead:
            kit.node.session_closed(engine.session.session_id, "the test ends")
    await net.everything_is_home()
    for task in rest.world.tasks:
        task.cancel()


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_request_that_is_cancelled_after_any_step_of_a_move_leaves_nothing(
    giver: str, taker: str, every: int
) -> None:
    for steps in range(0, STEPS_MAX, every):
        async with node_net(3, split=PATIENT, ops_max=2) as net:
            rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
            net.delay_s = 0.001 * (steps % 2)
            assert rest.move(giver, taker)
            went_on = await steps_of(rest, steps)
            for node, engine in (("p", rest.world.prefill), ("d", rest.world.decode)):
                if net[node].node.requests.live():
                    cancel(net, node, engine.session.session_id)
            net.open_gates()
            await rest.world.finish()
            assert ends(rest.world)["stream"] in (Reason.CANCELLED, Reason.OK)
        if not went_on:
            break


def cancel(net: Net, node: str, session_id: str) -> None:
    try:
        net[node].node.cancel("x", 1, session_id)
    except KvmoverError:
        return  # it is over on this node


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_deadline_in_the_middle_of_a_move_ends_all_of_it(
    giver: str, taker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the devices hold keeps the pages unquiet, and comes home with them."""
    monkeypatch.setattr(driver_module, "QUIESCE_S", 0.05)
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT, timeout_s=0.6)
        assert rest.move(giver, taker)
        await steps_of(rest, 6)
        stream = next(heard for heard in rest.world.heard if heard.name == "stream")
        await until(lambda: stream.end is not None, "the deadline comes")
        assert stream.end is not None and stream.end.reason is Reason.DEADLINE
        net.open_gates()
        await rest.world.finish()


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_block_that_is_lost_to_the_reader_of_its_rest_cuts_the_prefix_there(giver: str, taker: str) -> None:
    async with node_net(3, split=PATIENT, ops_max=2) as net:
        rest = await streaming(net, *SPLIT)
        lost = {"p": 11, "d": 20}[giver]
        fail_rest_of(net, taker, rest.world.keys[lost])
        assert rest.move(giver, taker)
        await rest.world.finish()
        stream = next(heard for heard in rest.world.heard if heard.name == "stream")
        assert stream.end is not None
        assert (stream.end.reason, stream.end.prefix_blocks) == (Reason.PREFIX_CUT, lost), stream.end


def fail_rest_of(net: Net, node: str, key: bytes) -> None:
    """Later layers of the block can't be read there."""

    def fails(op: StorageOp) -> Reason | None:
        is_it = isinstance(op, BlockRead) and op.key == key and op.first_layer > 0
        return Reason.IO_ERROR if is_it else None

    net[node].disk.fails = fails


async def test_a_block_that_its_first_reader_loses_below_its_rest_cuts_the_prefix_there() -> None:
    async with node_net(3, split=PATIENT, ops_max=8) as net:
        rest = await streaming(net, ("p", (0, 2)), ("d", (2, 8)))
        # The device of the decode node has the second layer of all its blocks: it keeps that one.
        fail_rest_of(net, "d", rest.world.keys[5])
        assert rest.move("d", "h")
        await rest.world.finish()
        stream = next(heard for heard in rest.world.heard if heard.name == "stream")
        assert stream.end is not None
        assert (stream.end.reason, stream.end.prefix_blocks) == (Reason.PREFIX_CUT, 5), stream.end


@pytest.mark.parametrize(("giver", "taker"), MOVES)
async def test_a_record_that_is_damaged_between_its_first_layers_and_its_rest_is_never_data(
    giver: str, taker: str
) -> None:
    """The header that the rest comes with is sound, and the layers before it were."""
    async with node_net(3, split=PATIENT, ops_max=2) as net:
        rest = await streaming(net, *SPLIT)
        lost = {"p": 11, "d": 20}[giver]
        key, namespace = rest.world.keys[lost], net["p"].namespace
        record = bytearray(net["p"].storage.stored(namespace, key) or b"")
        record[4096 + LAYOUT.layer_span(LAYERS - 1).start] ^= 1
        net["p"].storage.tamper(namespace, key, bytes(record))
        assert rest.move(giver, taker)
        await rest.world.finish()
        stream = next(heard for heard in rest.world.heard if heard.name == "stream")
        assert stream.end is not None
        assert (stream.end.reason, stream.end.prefix_blocks) == (Reason.PREFIX_CUT, lost), stream.end


@pytest.mark.parametrize("giver", ["p", "d"])
async def test_when_nobody_takes_a_rest_the_attempt_ends_and_says_what_is_good(giver: str) -> None:
    """A third node that has no place for it is replaced by one of the two; if they have none either, all are told."""
    async with node_net(3, split=PATIENT) as net:
        rest = await streaming(net, *SPLIT)
        net.refuses = refuse_parts
        assert rest.move(giver, "h")
        await rest.world.finish()
        reason = ends(rest.world)["stream"]
        assert reason in (Reason.OK, Reason.PREFIX_CUT)
        if reason is Reason.OK:
            all_ok(rest.world)
            rest.nothing_was_read_twice()


def refuse_parts(call: str, own: str, other: str) -> KvmoverError | None:
    return QueueFull("64 reads wait, at most 64 may") if (call, other) == ("read_part", "h") else None


@pytest.mark.parametrize("giver", ["p", "d"])
async def test_a_third_node_whose_reads_of_a_rest_wait_for_long_is_not_taken_for_dead(giver: str) -> None:
    """It has nothing to send yet, and says that it is there."""
    async with node_net(3, split=IMPATIENT, ops_max=2) as net:
        rest = await streaming(net, ("p", (0, 4)), ("d", (4, 8)))
        assert rest.move(giver, "h")
        await until(lambda: len(net["h"].disk.held) > 0, "the third node reads")
        for _ in range(40):
            pass_time(IMPATIENT.stall_s / 4)
            await rest.world.settle()
        moves = net["p"].services.counts.moves
        assert not moves["stalled"] and not moves["failed"], moves
        await go_on(rest)
        await rest.world.finish()
        all_ok(rest.world)
        rest.nothing_was_read_twice()
