"""Part: a node reads blocks and sends the layers of the good prefix, credit by credit."""

from __future__ import annotations

import pytest
from machines_part_kind import part
from machines_words import parse

from kvmoverd.core.machines.actions import AnnounceLayers, AnnouncePrefix, Finish, Release, SendLayer, TakeSlots
from kvmoverd.core.machines.part import PartState
from kvmoverd.core.status import BlockOutcome, BlockState, End, Reason

LOST = BlockOutcome(BlockState.FAILED, Reason.CORRUPT)


def test_a_good_part_reads_sends_every_layer_and_gives_its_slots_back() -> None:
    bench = part(layers=3, window_layers=2)
    assert bench.run("start") == [TakeSlots()]
    assert bench.run("slots") == []
    assert bench.run("blocks 1=OK") == []
    assert bench.run("blocks 0=OK") == [AnnouncePrefix(2, None), SendLayer(0), SendLayer(1)]
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0), SendLayer(2)]
    assert bench.run("sent 2 OK") == []
    assert bench.run("sent 1 OK") == [AnnounceLayers(1, 2), Release(), Finish(End(Reason.OK, prefix_blocks=2))]
    bench.check_over()


def test_layers_wait_for_credits() -> None:
    bench = part(layers=4, credit_layers=1, window_layers=4)
    assert bench.run("start; slots; blocks 0=OK 1=OK") == [AnnouncePrefix(2, None), SendLayer(0)]
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0)]
    assert bench.run("credit 2 3") == [SendLayer(1), SendLayer(2)]
    assert bench.run("credit 2 2") == [], "a smaller credit takes nothing back"
    assert bench.run("credit 2 4") == [SendLayer(3)]


def test_credits_that_come_before_the_reads_end_count_when_nothing_was_cut() -> None:
    bench = part(layers=3, credit_layers=1, window_layers=3)
    assert bench.run("start; slots; credit 2 3") == []
    assert bench.run("blocks 0=OK 1=OK") == [AnnouncePrefix(2, None), SendLayer(0), SendLayer(1), SendLayer(2)]


def test_a_cut_voids_the_credits_granted_before_it() -> None:
    bench = part(layers=3, credit_layers=2, window_layers=3)
    assert bench.run("start; slots; credit 2 3") == []
    assert bench.run("blocks 0=OK 1=CORRUPT") == [AnnouncePrefix(1, LOST)]
    assert bench.machine.state is PartState.SENDING
    assert bench.run("credit 2 3") == [], "granted before its owner knew of the cut"
    assert bench.run("credit 1 1") == [SendLayer(0)]
    assert bench.run("credit 1 3") == [SendLayer(1), SendLayer(2)]
    assert bench.run("sent 0 OK; sent 1 OK; sent 2 OK")[-1] == Finish(End(Reason.OK, prefix_blocks=1))
    bench.check_over()


def test_the_prefix_ends_before_the_first_lost_block_whatever_follows() -> None:
    bench = part(blocks=4)
    assert bench.run("start; slots; blocks 3=MISS; blocks 2=OK 0=OK; blocks 1=CORRUPT") == [AnnouncePrefix(1, LOST)]


def test_a_part_whose_first_block_is_lost_ends_well_with_nothing_to_send() -> None:
    bench = part()
    missed = BlockOutcome(BlockState.MISS, Reason.MISS)
    end = End(Reason.OK, prefix_blocks=0)
    assert bench.run("start; slots; blocks 0=MISS 1=OK") == [AnnouncePrefix(0, missed), Release(), Finish(end)]
    bench.check_over()


def test_the_first_outcome_of_a_block_counts() -> None:
    bench = part()
    bench.run("start; slots; blocks 0=OK; blocks 0=CORRUPT")
    assert bench.run("blocks 1=OK")[0] == AnnouncePrefix(2, None)


@pytest.mark.parametrize("script", ["start", "start; slots", "start; slots; blocks 0=OK"])
def test_a_part_stopped_before_its_reads_ended_claims_no_good_prefix(script: str) -> None:
    bench = part()
    bench.run(script)
    assert bench.run("stop CANCELLED its owner left") == [Release(), Finish(End(Reason.CANCELLED, "its owner left"))]


def test_a_stop_waits_for_what_is_under_way_and_names_the_prefix() -> None:
    bench = part(layers=3, window_layers=2)
    bench.run("start; slots; blocks 0=OK 1=OK; sent 0 OK")
    assert bench.run("stop CANCELLED") == []
    assert bench.run("credit 2 3") == []
    assert bench.run("sent 1 OK") == [], "applied, though nobody is told any more"
    assert bench.machine.window.arrived.in_order == 2
    assert bench.run("sent 2 PEER_LOST gone") == [Release(), Finish(End(Reason.CANCELLED, prefix_blocks=2))]
    assert bench.machine.window.arrived.in_order == 2


def test_a_failed_send_stops_the_part_and_its_reason_is_the_last_word() -> None:
    bench = part(layers=3, window_layers=2)
    bench.run("start; slots; blocks 0=OK 1=OK")
    assert bench.run("sent 1 PEER_LOST cable cut") == []
    assert bench.run("sent 0 OK") == [Release(), Finish(End(Reason.PEER_LOST, "cable cut", prefix_blocks=2))]


def test_a_part_without_slots_ends_with_the_reason_it_was_refused_for() -> None:
    bench = part()
    bench.run("start")
    refused = bench.give(parse("no_slots POOL_EXHAUSTED asked for 2, 0 are free"))
    assert refused == [Release(), Finish(End(Reason.POOL_EXHAUSTED, "asked for 2, 0 are free"))]


def test_a_completion_for_a_layer_never_sent_does_not_count() -> None:
    bench = part(layers=3, window_layers=1)
    bench.run("start; slots; blocks 0=OK 1=OK")
    assert bench.run("sent 1 OK") == []
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0), SendLayer(1)]


def test_layers_go_out_when_every_block_of_the_prefix_has_them() -> None:
    bench = part(layers=5, credit_layers=5, window_layers=5)
    assert bench.run("start; slots; layers 0=2") == []
    assert bench.run("layers 1=2") == [AnnouncePrefix(2, None), SendLayer(0), SendLayer(1)]
    assert bench.run("layers 0=4") == [], "block 1 has two layers"
    assert bench.run("sent 0 OK; layers 1=3") == [SendLayer(2)]
    assert bench.run("blocks 1=OK") == [SendLayer(3)]
    assert bench.run("blocks 0=OK") == [SendLayer(4)]
    assert bench.run("sent 1 OK; sent 2 OK; sent 3 OK; sent 4 OK")[-1] == Finish(End(Reason.OK, prefix_blocks=2))
    bench.check_over()


def test_the_prefix_is_decided_by_first_ranges_and_losses_alone() -> None:
    bench = part(blocks=3, layers=4, credit_layers=4, window_layers=4)
    assert bench.run("start; slots; layers 0=1 2=1; blocks 1=CORRUPT")[0] == AnnouncePrefix(1, LOST)
    assert bench.run("credit 1 4") == [SendLayer(0)]
    assert bench.run("blocks 2=CORRUPT") == [], "beyond the prefix"
    assert bench.run("blocks 0=OK") == [SendLayer(1), SendLayer(2), SendLayer(3)]


def test_a_block_lost_after_the_prefix_was_announced_cuts_the_attempt_short() -> None:
    bench = part(blocks=3, layers=4, credit_layers=4, window_layers=4)
    bench.run("start; slots; layers 0=1 1=2 2=1; sent 0 OK; layers 0=2 2=2")
    assert bench.run("blocks 0=OK 1=SHORT_READ") == [], "layer 1 is under way"
    assert bench.run("layers 2=4") == []
    text = "block 1 was lost after its first layers: SHORT_READ"
    assert bench.run("sent 1 OK") == [Release(), Finish(End(Reason.PREFIX_CUT, text, prefix_blocks=1))]
    bench.check_over()


def test_a_block_that_loses_its_second_range_before_the_others_have_their_first_is_outside_of_the_prefix() -> None:
    bench = part(blocks=2, layers=4)
    assert bench.run("start; slots; layers 1=2; blocks 1=CORRUPT") == []
    assert bench.run("layers 0=2") == [AnnouncePrefix(1, LOST)]


def test_progress_that_goes_back_or_repeats_changes_nothing() -> None:
    bench = part(blocks=2, layers=4, credit_layers=4, window_layers=4)
    bench.run("start; slots; layers 0=2 0=1; layers 0=2; layers 1=1")
    assert bench.run("layers 1=1; blocks 0=OK; layers 0=1") == []
    assert bench.run("blocks 0=CORRUPT") == [], "it is whole"
    assert bench.run("layers 1=2") == [SendLayer(1)]
