"""Assemble and deliver: a request's DE buffer from reservation to the last stored block."""

from __future__ import annotations

from itertools import permutations

import pytest
from machines_kinds import ASSEMBLE, assembly

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.machines.actions import (
    AnnounceAttached,
    AnnounceLayers,
    AnnounceQuiet,
    AnnounceStored,
    AnnounceWhole,
    Finish,
    FinishDelivery,
    Quiesce,
    Release,
    SendLayer,
    WriteBlocks,
)
from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import End, Reason

WHOLE = "attached; prefix 1; layer 0; layer 1"
DONE = End(Reason.OK, prefix_blocks=3)
UNDELIVERED = (AssembleState.WAITING_ENGINE, AssembleState.FILLING, AssembleState.WHOLE)


def test_a_buffer_becomes_whole_is_delivered_and_stored() -> None:
    bench = assembly(layers=2, blocks=3, hit_blocks=1, window_layers=1)
    assert not bench.machine.attached
    assert bench.run("attached") == [AnnounceAttached()]
    assert bench.machine.attached
    assert bench.run_all("prefix 1; layer 0") == []
    assert bench.run("layer 1") == [AnnounceWhole(1), WriteBlocks((1, 2))]
    assert bench.run("deliver") == [SendLayer(0)]
    assert bench.run("written 1 OK") == []
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0), SendLayer(1)]
    assert bench.run("sent 1 OK") == [AnnounceLayers(1, 1), FinishDelivery(DONE)]
    assert bench.run("written 2 NO_SPACE") == [Release(), AnnounceStored(1, 1), Finish(DONE)]
    bench.check_over()


def test_what_was_stored_before_the_delivery_ends_with_it() -> None:
    bench = assembly(layers=1)
    bench.run("attached; prefix 1; layer 0; written 2 OK; written 1 OK; deliver")
    told = bench.run("sent 0 OK")
    assert told == [AnnounceLayers(0, 0), FinishDelivery(DONE), Release(), AnnounceStored(2, 0), Finish(DONE)]


def test_a_buffer_without_new_full_blocks_stores_nothing() -> None:
    bench = assembly(layers=1, blocks=2, hit_blocks=2)
    assert bench.run("attached; prefix 2; layer 0") == [AnnounceWhole(2)]
    done = End(Reason.OK, prefix_blocks=2)
    assert bench.run("deliver; sent 0 OK")[1:] == [FinishDelivery(done), Release(), AnnounceStored(0, 0), Finish(done)]


@pytest.mark.parametrize("order", list(permutations(("attached", "prefix 1", "layer 0", "layer 1"))))
def test_a_buffer_is_whole_once_whatever_comes_last(order: tuple[str, ...]) -> None:
    bench = assembly()
    told = [action for said in order for action in bench.run(said)]
    assert told.count(AnnounceWhole(1)) == 1
    assert told[-1] == WriteBlocks((1, 2))
    assert bench.machine.state is AssembleState.WHOLE


def test_a_cut_prefix_makes_the_lost_hits_new_blocks() -> None:
    bench = assembly(layers=1, blocks=3, hit_blocks=2)
    bench.run("attached; prefix 1")
    assert bench.run("layer 0") == [AnnounceWhole(1), WriteBlocks((1, 2))]


@pytest.mark.parametrize("script", ["attached", "attached; layer 0; layer 1", "attached; prefix 1; layer 1"])
def test_a_delivery_before_the_buffer_is_whole_is_refused_and_changes_nothing(script: str) -> None:
    bench = assembly()
    bench.run(script)
    with pytest.raises(NotWhole, match=r"the DE buffer is filling: [02] of 2 layers are in"):
        bench.run("deliver")
    assert bench.machine.state is AssembleState.FILLING


@pytest.mark.parametrize("state", [state for state in AssembleState if state not in UNDELIVERED])
def test_a_buffer_is_delivered_once_and_a_second_delivery_is_refused_for_good(state: AssembleState) -> None:
    for script in ASSEMBLE.reach[state]:
        bench = ASSEMBLE.bench(script)
        with pytest.raises(UnknownRequest, match=f"the DE buffer is {state.value}: delivered already") as refused:
            bench.run("deliver")
        assert not refused.value.retryable, "the engine would ask again, for ever"
        bench.run("stop CANCELLED")
        bench.finish_up()
        bench.check_over()


def test_a_prefix_of_more_than_the_hits_is_refused_and_changes_nothing() -> None:
    bench = assembly(blocks=3, hit_blocks=2)
    with pytest.raises(BadRequest, match="prefix of 3 blocks set, 2 are hits"):
        bench.run("prefix 3")
    assert bench.machine.prefix_blocks is None
    assert bench.run("prefix 1") == []


def test_a_prefix_is_set_once_and_may_be_repeated() -> None:
    bench = assembly(blocks=3, hit_blocks=2)
    assert bench.run_all("prefix 2; prefix 2") == []
    with pytest.raises(BadRequest, match="prefix set to 1 blocks, it is 2 already"):
        bench.run("prefix 1")
    assert bench.machine.prefix_blocks == 2


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.ENGINE_GONE, Reason.SHUTTING_DOWN])
def test_what_is_whole_is_stored_though_its_caller_went(reason: Reason) -> None:
    bench = assembly()
    bench.run(WHOLE)
    assert bench.give(("stop", reason, "gone")) == [Finish(End(reason, "gone"))]
    assert bench.machine.state is AssembleState.STORING
    assert bench.run("written 1 OK") == []
    assert bench.run("written 2 OK") == [Release()]
    bench.check_over()


def test_what_is_not_whole_is_given_up_with_its_caller() -> None:
    bench = assembly()
    bench.run("attached; prefix 1; layer 0")
    assert bench.run("stop PEER_LOST prefill node gone") == [
        Finish(End(Reason.PEER_LOST, "prefill node gone")),
        Release(),
    ]
    assert bench.run_all("layer 1; attached; prefix 1; hits_pending; hits_whole; helped_layer 0 0; taken_over 0") == []


def test_a_cancelled_delivery_ends_when_its_copies_have() -> None:
    bench = assembly(layers=3, window_layers=2)
    bench.run("attached; prefix 1; layer 0; layer 1; layer 2; deliver")
    assert bench.run("stop CANCELLED") == [Quiesce()]
    assert bench.run_all("sent 1 OK; written 1 OK") == []
    end = End(Reason.CANCELLED)
    assert bench.run("sent 0 OK") == [FinishDelivery(end), Finish(end)]
    assert bench.run("written 2 OK") == [Release()]


def test_a_failed_copy_ends_the_delivery_and_the_buffer_is_still_stored() -> None:
    bench = assembly()
    bench.run(f"{WHOLE}; deliver")
    end = End(Reason.IO_ERROR, "bad page")
    assert bench.run("sent 0 IO_ERROR bad page") == [FinishDelivery(end), Finish(end)]
    assert bench.run("written 1 OK; written 2 OK") == [Release()]


def test_copies_that_do_not_end_leave_the_pages_unquiet_and_the_slots_held() -> None:
    bench = assembly()
    bench.run(f"{WHOLE}; deliver; stop DEADLINE")
    end = End(Reason.DEADLINE, pages_quiet=False)
    assert bench.run("quiesce_timeout") == [FinishDelivery(end), Finish(end)]
    assert bench.run_all("written 1 OK; written 2 OK") == [], "slots stay held while a copy reads them"
    assert bench.run("sent 0 OK") == [AnnounceQuiet(), Release()]
    bench.check_over()


def test_a_buffer_whose_hits_are_read_here_is_whole_only_when_they_are() -> None:
    for script in (
        "hits_pending; attached; prefix 1; layer 0; layer 1; hits_whole",
        "hits_pending; attached; hits_whole; prefix 1; layer 0; layer 1",
    ):
        bench = assembly()
        *before, last = script.split("; ")
        assert not any(isinstance(action, AnnounceWhole) for action in bench.run_all(";".join(before)))
        assert AnnounceWhole(1) in bench.run(last)


@pytest.mark.parametrize(
    "order", list(permutations(("layer 0", "layer 1", "helped_layer 0 0", "helped_layer 0 1", "hits_whole")))[::7]
)
def test_a_buffer_is_whole_when_every_sender_and_every_read_is_done_whatever_comes_last(order: tuple[str, ...]) -> None:
    bench = assembly()
    bench.run("hits_pending; attached; prefix 1 1")
    *before, last = order
    assert bench.run_all("; ".join(before)) == []
    assert AnnounceWhole(1) in bench.run(last)


def test_a_third_nodes_layers_count_once_each_and_only_its_own() -> None:
    bench = assembly()
    bench.run("attached; prefix 1 2; layer 0; layer 1")
    assert bench.run_all("helped_layer 0 0; helped_layer 0 0; helped_layer 1 1; helped_layer 5 1") == []
    assert not bench.machine.received
    assert bench.run_all("helped_layer 0 1") == []
    assert bench.run("helped_layer 1 0") == [AnnounceWhole(1), WriteBlocks((1, 2))]
    assert bench.machine.received


def test_a_part_that_is_taken_over_is_awaited_from_the_own_reads_and_not_from_its_sender() -> None:
    bench = assembly()
    bench.run("attached; prefix 1 1; layer 0; layer 1; helped_layer 0 0")
    assert bench.run_all("taken_over 0; helped_layer 0 1") == [], "late layers of its sender count for nothing"
    assert bench.machine.received, "nothing more is to come from other nodes"
    assert bench.run("hits_whole") == [AnnounceWhole(1), WriteBlocks((1, 2))]


def test_a_part_that_is_taken_over_twice_changes_nothing() -> None:
    bench = assembly()
    bench.run("attached; prefix 1 1; layer 0; layer 1; taken_over 0; hits_whole")
    assert bench.machine.state is AssembleState.WHOLE
    assert bench.run("taken_over 0") == []
    assert bench.machine.hits_whole


def test_a_buffer_that_nothing_is_pushed_into_is_whole_by_its_prefix_alone() -> None:
    bench = assembly(blocks=1, hit_blocks=1)
    bench.run("attached")
    assert bench.machine.on_prefix(1, first_pushed=2) == [AnnounceWhole(1)]


@pytest.mark.parametrize("order", list(permutations(("layer 2", "layer 3", "hits_whole"))))
def test_a_buffer_that_nothing_was_to_be_pushed_into_awaits_the_layers_of_a_rest(order: tuple[str, ...]) -> None:
    bench = assembly(layers=4, blocks=1, hit_blocks=1)
    bench.run("hits_pending; attached; prefix 1 0 4")
    assert bench.machine.received
    assert bench.run("rest 2") == []
    assert not bench.machine.received, "its prefill node may not die now"
    *before, last = order
    assert bench.run_all("; ".join(before)) == []
    assert bench.run(last) == [AnnounceWhole(1)]


def test_a_rest_given_before_the_prefix_was_set_is_awaited_with_it() -> None:
    bench = assembly(layers=4, blocks=1, hit_blocks=1)
    bench.run("hits_pending; attached; prefix 1 0 3; hits_whole")
    assert not bench.machine.received
    assert bench.run("layer 3") == [AnnounceWhole(1)]


def test_a_second_rest_is_awaited_from_the_earlier_of_the_two() -> None:
    for script in ("rest 1; rest 3", "rest 3; rest 1"):
        bench = assembly(layers=4, blocks=2, hit_blocks=2)
        bench.run(f"hits_pending; attached; prefix 2 0 4; {script}; hits_whole")
        assert bench.run_all("layer 3; layer 2") == []
        assert bench.run("layer 1") == [AnnounceWhole(2)]
    late = assembly(layers=4, blocks=2, hit_blocks=2)
    late.run("hits_pending; attached; prefix 2 0 4; rest 1; layer 1; layer 2; rest 3; hits_whole")
    assert late.run("layer 3") == [AnnounceWhole(2)], "what was pushed of the first is there"


def test_a_rest_changes_nothing_where_the_layers_are_awaited_anyway() -> None:
    bench = assembly(layers=3)
    bench.run("hits_pending; attached; prefix 1; layer 0; rest 1; hits_whole")
    assert bench.run_all("layer 2") == []
    assert bench.run("layer 1") == [AnnounceWhole(1), WriteBlocks((1, 2))]


def test_a_rest_that_is_given_when_the_buffer_is_over_changes_nothing() -> None:
    for script in (WHOLE, f"{WHOLE}; deliver", f"{WHOLE}; stop CANCELLED", "stop PEER_LOST"):
        bench = assembly()
        bench.run(script)
        before = bench.machine.state, bench.machine.received
        assert bench.run("rest 1") == []
        assert (bench.machine.state, bench.machine.received) == before, "a buffer that has all outlives its owner"


def test_a_cut_tells_the_engine_how_much_is_good() -> None:
    bench = assembly(blocks=3, hit_blocks=3)
    bench.run("hits_pending; attached; prefix 3; layer 0; layer 1")
    told = bench.machine.on_stop(Reason.PREFIX_CUT, "block 2 was lost", 2)
    assert told == [Finish(End(Reason.PREFIX_CUT, "block 2 was lost", prefix_blocks=2)), Release()]


def test_a_delivered_buffer_stays_for_the_parts_that_send_from_it_and_a_stopped_one_does_not() -> None:
    done = End(Reason.OK, prefix_blocks=1)
    script = "part_begun 1; part_begun 2; attached; prefix 1; layer 0; layer 1; deliver; sent 0 OK"
    bench = assembly(blocks=1)
    bench.run(f"{script}; part_over 1")
    assert bench.run("sent 1 OK") == [AnnounceLayers(1, 1), FinishDelivery(done)]
    assert bench.run("part_over 1") == []
    assert bench.run("part_over 2") == [Release(), AnnounceStored(0, 0), Finish(done)]
    stopped = assembly(blocks=1)
    stopped.run(f"{script}; sent 1 OK")
    assert stopped.run("stop CANCELLED") == [Finish(End(Reason.CANCELLED)), Release()]
