"""Slots of a DE buffer: each block has one, private or of a read, whatever is refused, cut, given up or taken over."""

from __future__ import annotations

import asyncio

import pytest
from de_rig import LAYERS, DeRig
from node_kit import LAYOUT, end_of, told, until
from node_net import node_net
from test_node_de_parts import ended_well, sends_all, whole_and_delivered
from test_node_shortcuts import warm

from kvmoverd.core.errors import BadPlan, PoolExhausted, QueueFull, UnknownRequest
from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.de_buffer import NO_SLOT
from kvmoverd.node.de_plan import UNHEARD_NS, Given, plan_of
from kvmoverd.node.peer import Reservation, SplitFacts
from kvmoverd.node.services import Limits


async def test_clean_hits_are_not_evicted_for_the_slots_that_come_with_them() -> None:
    """They are the oldest in the pool, and there are younger blocks to evict."""
    async with node_net(2, slots=12) as net:
        rig, kit = DeRig(net, hit=4, blocks=12), net["d"]
        await kit.store(kit.engine(), kit.chain(4, salt=7))
        kit.forget_clean()
        await net["p"].store(net["p"].engine(), rig.keys[:4])
        await warm(kit, rig.keys[:4])
        await warm(kit, kit.chain(4, salt=7))
        await rig.reserve((0, 4))
        assert net.read_blocks()["d"] == 0
        assert not kit.services.reader.pooled(kit.namespace, kit.chain(4, salt=7)).any(), "the others made room"
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


async def test_a_reservation_that_finds_too_few_slots_takes_none_and_starts_no_read() -> None:
    async with node_net(2, slots=8, limits=Limits(admission_wait_s=0.05, attach_timeout_s=5)) as net:
        rig, kit = DeRig(net, hit=4, blocks=6), net["d"]
        full = kit.pool.new_holder()
        kit.pool.size_class(LAYOUT).private(4, full)
        with pytest.raises(PoolExhausted, match="asked for 4 slots, 2 can be had"):
            await rig.reserve((0, 4))
        assert net.read_blocks()["d"] == 0
        kit.pool.size_class(LAYOUT).give_back(full)
        kit.node.session_closed(rig.decode.session.session_id, "the test ends")
        await net.everything_is_home()


async def test_a_part_that_the_reader_has_no_place_for_leaves_the_buffer_as_it_was() -> None:
    async with node_net(2) as net:
        rig, desk = DeRig(net, hit=4, blocks=4), net["d"].services.desk
        await rig.reserve()
        desk.queue_max, many = 0, desk.queue_max
        with pytest.raises(QueueFull):
            rig.part((1, 3))
        desk.queue_max = many
        assert NO_SLOT not in rig.assembly.buffer.slots()
        part = rig.part((1, 3))
        await until(lambda: part.prefix, "read")
        await rig.set_prefix(4)
        sends_all(part, 2)
        await ended_well(rig, part)
        await rig.push_all([0, 3])
        net["p"].mover.forget(rig.parts.pop(0).sink_id, lambda: None)
        await whole_and_delivered(rig)


async def test_blocks_behind_a_cut_get_other_slots_and_what_was_read_of_them_is_clean() -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((0, 4))
        part = rig.part((0, 4))
        await until(lambda: part.prefix and rig.assembly.buffer.whole(4), "read")
        before = rig.assembly.buffer.slots()
        await rig.set_prefix(2)
        part.prefix = 2, None
        after = rig.assembly.buffer.slots()
        assert after[:2] == before[:2] and not set(after) & set(before[2:4])
        (counts,) = net["d"].pool.slot_counts()
        assert (counts["leased"], counts["clean"]) == (5, 2)
        sends_all(part, 2)
        await ended_well(rig, part)
        await rig.push_all([2, 3, 4])
        await whole_and_delivered(rig)


async def test_blocks_behind_a_lost_one_are_read_no_further() -> None:
    async with node_net(2) as net:
        rig, kit = DeRig(net, hit=4, blocks=4), net["d"]
        await net["p"].store(net["p"].engine(), rig.keys)
        net["p"].storage.tamper(kit.namespace, rig.keys[1], None)
        kit.disk.closed = True
        asked = Reservation("x", 1, kit.namespace.fingerprint, rig.keys, 0, 4, Path.DE, 5.0, "p", "boot-p")
        rig.reserved = await rig.side.reserve(kit.namespace, asked)
        part = rig.part((0, 4))
        while not part.prefix:
            assert kit.disk.release_one()
            await asyncio.sleep(0.001)
        assert part.prefix[0] == 1
        read: list[bytes] = []
        kit.disk.fails = lambda op: read.append(op.key)
        await until(
            lambda: (
                not kit.disk.release_one() and rig.assembly.buffer.whole(1) and not kit.services.desk.reads_waiting()
            ),
            "the first one is whole",
        )
        await rig.set_prefix(1)
        kit.disk.closed = False
        assert {key: read.count(key) for key in rig.keys[2:]} == {rig.keys[2]: 1, rig.keys[3]: 1}, "only what was begun"
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


async def test_a_buffer_is_not_whole_while_a_part_waits_for_its_old_sender() -> None:
    """All that this node has begun to read is there, all that others push too: but the part's blocks are nowhere yet."""
    async with node_net(3) as net:
        rig, kit = DeRig(net, hit=4, blocks=5), net["d"]
        kit.disk.closed = True
        await rig.reserve((0, 1))
        own = rig.part((0, 1))
        kit.disk.release_one()
        await until(lambda: own.prefix, "the first layers are there")
        (sink,) = await rig.set_prefix(4, ("h", (1, 4)))
        net.fars["h"].closed = True
        rig.send("h", sink, 0, (1, 2, 3), 1)
        taken = rig.part((1, 4))
        await rig.push_all([4])
        assembled = rig.attach()
        await until(lambda: not kit.disk.release_one() and rig.assembly.buffer.whole(1), "its own block is whole")
        await asyncio.sleep(0.01)
        assert rig.assembly.machine.state is AssembleState.FILLING
        net.fars["h"].closed = kit.disk.closed = False
        net.fars["h"].release_one()
        await until(lambda: taken.prefix, "read anew")
        sends_all(own, 1)
        sends_all(taken, 3)
        await ended_well(rig, taken)
        await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "whole")
        assert end_of(await told(rig.deliver())).reason is Reason.OK
        assert end_of(await told(assembled)).reason is Reason.OK
        rig.delivered_right()
        await rig.over()


async def test_a_part_that_is_taken_over_may_lie_in_the_pool_already() -> None:
    async with node_net(3) as net:
        rig = DeRig(net, hit=3, blocks=4)
        await rig.reserve()
        await warm(net["d"], rig.keys[:2])
        await rig.set_prefix(3, ("h", (0, 2)))
        await rig.push_all([2, 3])
        taken = rig.part((0, 2), first_layer=LAYERS)
        await until(lambda: taken.prefix, "known at once")
        sends_all(taken, 2)
        await until(lambda: taken.end, "over")
        await whole_and_delivered(rig)
        assert net.read_blocks()["d"] == 2, "once, for the pool"


async def test_a_lost_block_cuts_the_buffer_also_when_its_part_is_stopped_before_it_says_so() -> None:
    async with node_net(3) as net:
        rig, kit = DeRig(net, hit=3, blocks=4), net["d"]
        await rig.reserve()
        assembled = rig.attach()
        await rig.set_prefix(3, ("h", (0, 2)))
        kit.disk.closed = True
        taken = rig.part((0, 2), first_layer=LAYERS)
        await until(lambda: taken.prefix or (kit.disk.release_one() and False), "first layers are there")
        kit.storage.tamper(kit.namespace, rig.keys[1], None)
        kit.disk.closed = False
        while kit.disk.release_one():
            pass
        await until(lambda: rig.assembly.buffer.reads[0].found.outcomes.get(1), "a block is lost")
        assert taken.end is None and taken.driver is not None, "it waits to hear of the prefix"
        taken.driver.stop()
        end = end_of(await told(assembled))
        assert (end.reason, end.prefix_blocks) == (Reason.PREFIX_CUT, 1)
        await rig.over()


async def test_of_two_third_nodes_parts_the_one_that_is_named_is_taken_over_and_no_piece_of_one() -> None:
    async with node_net(4) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve()
        first, _ = await rig.set_prefix(4, ("h", (0, 2)), ("i", (2, 4)))
        with pytest.raises(UnknownRequest, match="no part of a third node"):
            rig.part((2, 3))
        net["p"].mover.forget(rig.parts.pop(0).sink_id, lambda: None)
        taken = rig.part((2, 4))
        await until(lambda: taken.prefix, "read")
        sends_all(taken, 2)
        await ended_well(rig, taken)
        answers = [rig.send("h", first, layer, (0, 1), 0) for layer in range(LAYERS)]
        await until(lambda: all(answers), "the other part still comes from its node")
        assert answers == [[Reason.OK]] * LAYERS
        with pytest.raises(UnknownRequest, match="no part of a third node"):
            rig.part((2, 4))
        net["p"].mover.forget(rig.parts.pop().sink_id, lambda: None)
        await rig.push_all([4])
        await whole_and_delivered(rig)
        assert net.read_blocks()["d"] == 2


async def test_a_take_over_waits_for_a_place_in_the_queue_of_reads() -> None:
    limits = Limits(admission_wait_s=5, attach_timeout_s=5)
    async with node_net(3, limits=limits) as net:
        rig, desk = DeRig(net, hit=3, blocks=4), net["d"].services.desk
        await rig.reserve()
        await rig.set_prefix(3, ("h", (0, 2)))
        desk.queue_max, many = 0, desk.queue_max
        taken = rig.part((0, 2))
        await asyncio.sleep(0.05)
        assert taken.words == [] and NO_SLOT not in rig.assembly.buffer.slots()
        desk.queue_max = many
        await until(lambda: taken.prefix, "read")
        sends_all(taken, 2)
        await ended_well(rig, taken)
        await rig.push_all([2, 3])
        await whole_and_delivered(rig)


async def test_a_take_over_that_finds_no_place_in_time_fails_and_its_owner_hears_of_it() -> None:
    async with node_net(3, limits=Limits(admission_wait_s=0.05, attach_timeout_s=5)) as net:
        rig, desk = DeRig(net, hit=3, blocks=4), net["d"].services.desk
        await rig.reserve()
        await rig.set_prefix(3, ("h", (0, 2)))
        desk.queue_max = 0
        taken = rig.part((0, 2))
        await until(lambda: taken.end, "told")
        assert taken.end is not None and taken.end.reason is Reason.POOL_EXHAUSTED
        rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        await rig.over()


# The plan -------------------------------------------------------------------------------------------------------------


def reservation(rig: DeRig, path: Path | None, **more: object) -> Reservation:
    fingerprint = rig.kit.namespace.fingerprint
    return Reservation("x", 1, fingerprint, rig.keys, 0, rig.hit, path, 5.0, "p", "boot-p", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((), "the parts lack 4"),
        ((Share("p", Runs.of((0, 3))),), "the parts lack 1"),
        ((Share("p", Runs.of((0, 4))), Share("d", Runs.of((3, 4)))), "must be disjoint"),
        ((Share("p", Runs.of((0, 2))), Share("p", Runs.of((2, 4)))), "each node may have one"),
        ((Share("p", Runs.of((0, 5))),), "have 1 others"),
    ],
)
async def test_parts_that_are_not_all_hits_once_each_are_refused(shares: tuple[Share, ...], words: str) -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=6)
        with pytest.raises(BadPlan, match=words):
            await rig.side.reserve(rig.kit.namespace, reservation(rig, Path.PARTS, shares=shares))
        net["d"].node.session_closed(rig.decode.session.session_id, "the test ends")
        await net.everything_is_home()


@pytest.mark.parametrize("path", [None, Path.AUTO])
async def test_hits_that_nobody_is_named_for_are_refused(path: Path | None) -> None:
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=6)
        with pytest.raises(BadPlan, match="nothing says who reads them"):
            plan_of(net["d"].services, rig.kit.namespace, reservation(rig, path), Given())


async def test_a_decision_goes_by_this_nodes_queue_its_clean_blocks_and_what_the_prefill_node_knows() -> None:
    async with node_net(3) as net:
        rig, there = DeRig(net, hit=8, blocks=8), net["d"]
        await net["p"].store(net["p"].engine(), rig.keys)
        await warm(there, rig.keys[2:4])
        busy = Depth(queue_bytes=1 << 40, rate_bytes_per_s=1 << 30)
        idle = Depth(rate_bytes_per_s=1 << 30)

        def decided(facts: SplitFacts) -> dict[str, Runs]:
            asked = reservation(rig, Path.AUTO, facts=facts, resident_blocks=1)
            plan, depth = plan_of(there.services, rig.kit.namespace, asked, Given())
            assert depth == there.services.reader.depth() and Runs.union(
                share.blocks for share in plan.shares
            ) == Runs.of((1, 8))
            return {share.node: share.blocks for share in plan.shares}

        facts = SplitFacts(busy, Runs.of((5, 6)), (), False, False, 0.002)
        shares = decided(facts)
        assert 5 in shares["p"] and 2 in shares["d"] and 3 in shares["d"], "what is clean is its node's"
        assert shares["p"].count == 1, "the prefill node has too much to read already"
        starved = SplitFacts(idle, Runs(), (), False, True, 0.002)
        assert decided(starved)["p"].count >= 5, "what the decode node reads would come too late"


async def test_of_requests_that_are_decided_at_once_each_knows_what_those_before_it_gave_to_others() -> None:
    async with node_net(2) as net:
        rig, given, rate = DeRig(net, hit=8, blocks=8), Given(), 1 << 20
        here = Depth(rate_bytes_per_s=rate)
        facts = SplitFacts(here, Runs(), (("h", here),), False, False, 0.0)
        counts = []
        for _ in range(3):
            plan, _ = plan_of(net["d"].services, rig.kit.namespace, reservation(rig, Path.AUTO, facts=facts), given)
            counts.append({share.node: share.blocks.count for share in plan.shares})
        assert counts[0]["p"] > 0 and counts[0]["h"] > 0
        assert sum(counts[2].get(node, 0) for node in "ph") < sum(counts[0][node] for node in "ph"), (
            "the decode node's own queue did not grow here: more of it falls to it"
        )


def test_what_was_given_counts_until_the_node_must_have_heard_of_it() -> None:
    given, told = Given(), Depth(5, 7)
    given.add("p", 100, 1000)
    given.add("h", 30, 2000)
    assert given.with_it("p", told, 3000) == Depth(105, 7) and given.with_it("h", told, 3000) == Depth(35, 7)
    assert given.with_it("p", told, 1001 + UNHEARD_NS) == told
    assert given.with_it("h", told, 1001 + UNHEARD_NS) == Depth(35, 7)


async def test_blocks_that_no_part_was_opened_for_are_pushed_after_all_but_for_those_that_are_held() -> None:
    """Their owner was refused the part, and reads them itself."""
    async with node_net(2) as net:
        rig = DeRig(net, hit=4, blocks=5)
        await rig.reserve((2, 4))
        await until(lambda: rig.assembly.buffer.whole(4), "read")
        await rig.set_prefix(4)
        (counts,) = net["d"].pool.slot_counts()
        assert (counts["leased"], counts["clean"]) == (5, 2), "what was read is clean"
        await rig.push_all([0, 1, 2, 3, 4])
        await whole_and_delivered(rig)
