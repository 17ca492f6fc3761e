"""Parts of a request that several nodes read: they hold, give blocks up, go on where another one stopped, and help."""

from __future__ import annotations

import pytest
from machines_kit import Bench
from machines_part_kind import helping_part, part

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnouncePrefix,
    Finish,
    GaveUp,
    Release,
    SendAssembly,
    SendLayer,
    TakeSlots,
)
from kvmoverd.core.machines.part import PartState
from kvmoverd.core.status import BlockOutcome, BlockState, End, Reason

LOST = BlockOutcome(BlockState.FAILED, Reason.CORRUPT)


def over(prefix_blocks: int = 0, reason: Reason = Reason.OK, message: str = "") -> list[Action]:
    return [Release(), Finish(End(reason, message, prefix_blocks=prefix_blocks))]


def holding(blocks: int = 3, layers: int = 3, script: str = "blocks 0=OK 1=OK 2=OK") -> Bench:
    bench = part(blocks, layers, credit_layers=layers, window_layers=layers, holds=True)
    bench.run(f"start; slots; {script}")
    return bench


# ---- one of several parts


def test_a_part_that_holds_sends_nothing_before_its_first_credit() -> None:
    bench = holding()
    assert bench.all(AnnouncePrefix) == [AnnouncePrefix(3, None)] and not bench.all(SendLayer)
    assert bench.machine.state is PartState.HOLDING
    assert bench.run("credit 3 2") == [SendLayer(0), SendLayer(1)]
    assert bench.run("credit 3 3") == [SendLayer(2)]


def test_the_first_credit_says_what_the_prefix_is_and_later_ones_must_agree() -> None:
    bench = holding()
    assert bench.run("credit 2 1") == [SendLayer(0)], "another part lost a block"
    assert bench.machine.prefix_blocks == 2
    assert bench.run("credit 3 3") == []
    assert bench.run("credit 2 3; sent 0 OK; sent 1 OK; sent 2 OK") == [AnnounceLayers(2, 2), *over(2)]
    bench.check_over()


def test_credits_before_the_prefix_is_told_or_for_more_than_is_good_are_void() -> None:
    bench = part(2, holds=True)
    assert bench.run("start; credit 2 3; slots; credit 1 3") == []
    assert bench.run("blocks 0=OK 1=CORRUPT") == [AnnouncePrefix(1, LOST)]
    assert bench.run("credit 2 3") == [] and bench.machine.state is PartState.HOLDING
    assert bench.run("credit 1 1") == [SendLayer(0)]


def test_a_first_credit_for_nothing_ends_the_part_well() -> None:
    bench = holding()
    assert bench.run("credit 0 3") == over()
    bench.check_over()


def test_a_part_that_holds_and_lost_its_first_block_has_nothing_to_wait_for() -> None:
    bench = part(2, holds=True)
    assert bench.run("start; slots; blocks 0=CORRUPT 1=OK") == [AnnouncePrefix(0, LOST), *over()]


def test_a_block_lost_while_the_part_holds_counts_only_if_the_prefix_needs_it() -> None:
    spared = holding(script="layers 0=1 1=1 2=1")
    assert spared.run("blocks 2=CORRUPT") == []
    assert spared.run("credit 2 3") == [SendLayer(0)]
    cut = holding(script="layers 0=1 1=1 2=1")
    cut.run("blocks 1=CORRUPT 2=CORRUPT")
    text = "block 1 was lost after its first layers: CORRUPT"
    assert cut.run("credit 3 3") == over(1, Reason.PREFIX_CUT, text)
    cut.check_over()


def test_a_cut_sends_no_further_layer_while_one_is_under_way() -> None:
    bench = part(2, 4, credit_layers=4, window_layers=4)
    bench.run("start; slots; layers 0=1 1=1")
    assert bench.run("blocks 1=CORRUPT") == [], "layer 0 is under way"
    assert bench.run("layers 0=3; blocks 0=OK; credit 2 4") == []
    assert (
        bench.run("sent 0 OK")[-1] == over(1, Reason.PREFIX_CUT, "block 1 was lost after its first layers: CORRUPT")[-1]
    )


def test_reads_go_on_while_the_part_holds() -> None:
    bench = holding(script="layers 0=1 1=1 2=1")
    assert bench.run("layers 0=2; blocks 1=OK 2=OK; blocks 0=OK") == []
    assert bench.run("credit 3 3") == [SendLayer(0), SendLayer(1), SendLayer(2)]


# ---- blocks given up


def test_a_part_gives_up_what_it_has_not_begun_and_holds_from_then_on() -> None:
    bench = part(4, credit_layers=3)
    assert bench.run("start; slots; layers 0=1; give_up 1 2") == [GaveUp(2)]
    assert bench.run("layers 1=1") == [AnnouncePrefix(2, None)]
    assert bench.machine.state is PartState.HOLDING, "the credit that came with it is void"
    assert bench.run("credit 2 3") == [SendLayer(0)]
    assert bench.run("blocks 0=OK 1=OK; sent 0 OK; sent 1 OK; sent 2 OK")[-1] == over(2)[-1]
    bench.check_over()


def test_of_what_a_part_was_granted_before_it_gave_blocks_up_nothing_counts() -> None:
    bench = part(4, credit_layers=3)
    bench.run("start; slots; give_up 2 2; blocks 0=OK 1=OK")
    assert bench.run("credit 2 1") == [SendLayer(0)]


def test_the_prefix_is_told_at_once_when_the_rest_of_the_blocks_is_known() -> None:
    bench = part(4)
    assert bench.run("start; slots; blocks 0=OK 1=OK; give_up 2 2") == [GaveUp(2), AnnouncePrefix(2, None)]


def test_what_was_lost_among_the_blocks_given_up_is_the_next_readers_affair() -> None:
    bench = part(4)
    assert bench.run("start; slots; blocks 0=OK 3=CORRUPT; give_up 2 1") == [GaveUp(2)]
    assert bench.run("blocks 1=OK") == [AnnouncePrefix(2, None)]


def test_what_is_still_said_of_blocks_given_up_changes_nothing() -> None:
    bench = part(3)
    bench.run("start; slots; give_up 2 0")
    assert bench.run("blocks 2=CORRUPT; layers 2=1") == []
    assert bench.run("blocks 0=OK 1=OK 2=OK") == [AnnouncePrefix(2, None)]


def test_a_part_may_give_up_more_and_more() -> None:
    bench = part(5)
    assert bench.run_all("start; slots; give_up 4 0; give_up 2 1; give_up 3 1") == [
        TakeSlots(),
        GaveUp(4),
        GaveUp(2),
        GaveUp(2),
    ]


@pytest.mark.parametrize("begun", ["start", "start; slots"])
def test_a_part_without_a_block_left_ends(begun: str) -> None:
    bench = part(2)
    bench.run(begun)
    assert bench.run("give_up 0 0") == [GaveUp(0), *over()]
    assert bench.run("slots; blocks 0=OK") == []
    bench.check_over()


def test_a_part_that_waits_for_room_gives_blocks_up_and_reads_the_others() -> None:
    bench = part(3)
    assert bench.run("start; give_up 1 0") == [GaveUp(1)]
    assert bench.run("slots; blocks 0=OK") == [AnnouncePrefix(1, None)]


def test_asked_for_blocks_it_has_begun_the_part_goes_on_as_it_was() -> None:
    bench = part(2, credit_layers=3, window_layers=3)
    assert bench.run("start; slots; layers 0=1; give_up 0 2") == [GaveUp(2)]
    assert bench.run("blocks 0=OK 1=OK") == [AnnouncePrefix(2, None), SendLayer(0), SendLayer(1), SendLayer(2)]


@pytest.mark.parametrize("state", [PartState.HOLDING, PartState.SENDING])
def test_nothing_is_given_up_after_the_prefix_was_told(state: PartState) -> None:
    bench = part(2, holds=state is PartState.HOLDING)
    bench.run("start; slots; blocks 0=OK 1=OK")
    assert bench.machine.state is state
    assert bench.run("give_up 0 0") == [GaveUp(2)]
    assert bench.machine.state is state and bench.machine.prefix_blocks == 2


def test_a_part_that_is_stopped_answers_with_its_end_alone() -> None:
    bench = part(2)
    bench.run("start; slots; blocks 0=OK 1=OK; stop CANCELLED")
    assert bench.run("give_up 0 0") == []


# ---- a part taken over


def test_a_part_taken_over_sends_from_its_first_layer_on() -> None:
    bench = part(layers=4, credit_layers=4, window_layers=2, first_layer=2)
    assert bench.run("start; slots; layers 0=1 1=1") == [AnnouncePrefix(2, None)]
    assert bench.run("layers 0=3 1=3") == [SendLayer(2)]
    assert bench.run("blocks 0=OK 1=OK") == [SendLayer(3)]
    assert bench.run("sent 3 OK; sent 2 OK") == [AnnounceLayers(2, 3), *over(2)]
    bench.check_over()


def test_a_part_taken_over_after_its_last_layer_only_reads() -> None:
    bench = part(first_layer=3)
    assert bench.run("start; slots; layers 0=1 1=1") == [AnnouncePrefix(2, None), *over(2)]
    bench.check_over()


# ---- help


def test_a_helper_sends_each_layer_to_both_and_ends_when_both_have_all() -> None:
    bench = helping_part()
    bench.run("start; slots; blocks 0=OK 1=OK")
    assert bench.run("credit 2 3") == [SendLayer(0), SendLayer(1)]
    assert bench.run("assemble") == [SendAssembly(0), SendAssembly(1)]
    assert bench.run("assembled 1 OK") == [SendAssembly(2)]
    assert bench.run("assembled 0 OK; assembled 2 OK") == []
    assert bench.run("sent 0 OK; sent 1 OK; sent 2 OK") == [AnnounceLayers(2, 2), *over(2)]
    bench.check_over()


def test_the_buffer_gets_layers_that_the_engine_has_no_pages_for_yet() -> None:
    bench = helping_part()
    bench.run("start; slots; blocks 0=OK 1=OK")
    assert bench.run("credit 2 1") == [SendLayer(0)]
    assert bench.run("assemble; assembled 0 OK; assembled 1 OK") == []
    assert bench.machine.assembly.next_layer == 3


def test_a_sink_named_before_the_first_credit_is_kept_for_it() -> None:
    bench = helping_part()
    assert bench.run("start; assemble; slots; blocks 0=OK 1=OK") == [AnnouncePrefix(2, None)]
    assert bench.run("credit 1 1") == [SendLayer(0), SendAssembly(0), SendAssembly(1)]


def test_a_helper_whose_layers_all_arrived_waits_for_the_buffers_sink() -> None:
    bench = helping_part()
    assert bench.run("start; slots; blocks 0=OK 1=OK; credit 2 3; sent 0 OK; sent 1 OK; sent 2 OK") == [
        AnnounceLayers(2, 2)
    ]
    assert bench.machine.state is PartState.SENDING
    assert bench.run("assemble; assembled 0 OK; assembled 1 OK; assembled 2 OK") == over(2)


def test_a_helper_that_can_not_reach_the_buffer_fails_and_waits_for_both() -> None:
    bench = helping_part()
    bench.run("start; slots; blocks 0=OK 1=OK; credit 2 3; assemble")
    assert bench.run("assembled 0 PEER_LOST cable cut") == []
    assert bench.run("sent 0 OK; sent 1 OK") == [], "the other place has one layer under way"
    assert bench.run("assembled 1 OK") == over(2, Reason.PEER_LOST, "cable cut")
    bench.check_over()


def test_a_part_whose_layers_nobody_assembles_ends_without_a_buffer() -> None:
    bench = holding()
    assert bench.run("assemble; credit 3 3") == [SendLayer(0), SendLayer(1), SendLayer(2)]
    assert bench.run("sent 0 OK; sent 1 OK; sent 2 OK")[-1] == over(3)[-1]
    bench.check_over()
