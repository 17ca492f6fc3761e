"""Stream: the owner of a request's hit blocks on the prefill side; reservations, credits, cuts."""

from __future__ import annotations

from itertools import product

import pytest
from stream_kind import stream

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.machines.actions import (
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceQuiet,
    Finish,
    Grant,
    Quiesce,
    Reserve,
    SetPrefix,
    StartPart,
)
from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, BlockState, End, Reason

LAYERS = 5


def reads(node: str, *spans: tuple[int, int], part: int = 1) -> StartPart:
    return StartPart(part, Share(node, Runs.of(*spans)), 0, holds=False)


def test_a_stream_reserves_reads_announces_and_ends_when_it_is_quiet() -> None:
    bench = stream(layers=2, hit_blocks=3, ring_sets=0)
    assert bench.run("start") == [Reserve()]
    assert bench.run("reserved de=0-3") == [reads("de", (0, 3))]
    assert bench.run("part_prefix 1 3 -") == [AnnouncePrefix(3, None), SetPrefix(3), Grant(1, 3, 2)]
    assert bench.run("part_layer 1 0") == [AnnounceLayers(0, 0)]
    assert bench.run("part_layer 1 1") == [AnnounceLayers(1, 1), Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=3))]
    bench.check_over()


def test_a_stream_without_a_decode_side_sets_no_prefix_anywhere() -> None:
    bench = stream(decode=False, pushes=False)
    assert bench.run("start") == [Reserve()]
    assert bench.run("reserved pe=0-2") == [reads("pe", (0, 2))]
    assert bench.run("part_prefix 1 2 -") == [AnnouncePrefix(2, None), Grant(1, 2, 1)]


def test_a_request_without_hits_has_all_its_layers_at_once() -> None:
    bench = stream(layers=3, hit_blocks=0)
    assert bench.run("start; reserved") == [AnnouncePrefix(0, None), SetPrefix(0), AnnounceLayers(0, 2), Quiesce()]
    assert bench.machine.ready.complete, "no reader has to be stopped"
    assert bench.run("quiet") == [Finish(End(Reason.OK))]


def test_layers_out_of_order_are_announced_in_order_and_coalesced() -> None:
    bench = stream(layers=4, ring_sets=0)
    bench.run("start; reserved de=0-2; part_prefix 1 2 -")
    assert bench.run_all("part_layer 1 2; part_layer 1 1") == []
    assert bench.run("part_layer 1 0") == [AnnounceLayers(0, 2)]
    assert bench.run("part_layer 1 1") == []


@pytest.mark.parametrize(("ring_sets", "pushes"), list(product((1, 2, 3), (False, True))))
def test_a_page_set_is_granted_again_only_when_its_layer_was_computed_and_pushed(ring_sets: int, pushes: bool) -> None:
    bench = stream(layers=LAYERS, ring_sets=ring_sets, pushes=pushes)
    assert bench.run("start; reserved de=0-2; part_prefix 1 2 -")[-1] == Grant(1, 2, ring_sets)
    for layer in range(LAYERS):
        bench.run(f"part_layer 1 {layer}")
        if layer == LAYERS - 1:
            break
        grant = [Grant(1, 2, layer + 1 + ring_sets)] if layer + 1 + ring_sets <= LAYERS else []
        assert bench.run(f"computed {layer + 1}") == ([] if pushes else grant)
        assert bench.run(f"pushed {layer + 1}") == (grant if pushes else [])
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=2))]
    bench.check_over()


def test_several_layers_computed_at_once_are_one_grant() -> None:
    bench = stream(layers=5, ring_sets=2)
    bench.run("start; reserved de=0-2; part_prefix 1 2 -; part_layer 1 1; part_layer 1 0")
    assert bench.run("computed 2") == []
    assert bench.run("pushed 1") == [Grant(1, 2, 3)]
    assert bench.run("pushed 2") == [Grant(1, 2, 4)]
    assert bench.run_all("computed 1; pushed 1") == [], "what was computed stays so"


def test_credits_only_pace_when_every_layer_has_its_own_pages() -> None:
    bench = stream(layers=3, ring_sets=0)
    assert bench.run("start; reserved de=0-2; part_prefix 1 2 -")[-1] == Grant(1, 2, 3)
    assert bench.run_all("part_layer 1 0; computed 1; pushed 1") == [AnnounceLayers(0, 0)]


def test_a_ring_larger_than_the_model_grants_every_layer_and_no_more() -> None:
    bench = stream(layers=2, ring_sets=7)
    assert bench.run("start; reserved de=0-2; part_prefix 1 2 -")[-1] == Grant(1, 2, 2)
    assert bench.run_all("part_layer 1 0; computed 1; pushed 1") == [AnnounceLayers(0, 0)]


def test_a_cut_before_the_first_layer_shortens_the_prefix_and_the_stream_goes_on() -> None:
    bench = stream(layers=1, hit_blocks=4, ring_sets=0)
    bench.run("start; reserved de=0-4")
    lost = BlockOutcome(BlockState.FAILED, Reason.SHORT_READ)
    assert bench.run("part_prefix 1 2 SHORT_READ") == [AnnouncePrefix(2, lost), SetPrefix(2), Grant(1, 2, 1)]
    assert bench.run("part_prefix 1 1 MISS") == [], "the prefix is said once"
    assert bench.run("part_layer 1 0; quiet") == [Finish(End(Reason.OK, prefix_blocks=2))]


def test_a_layer_may_overtake_the_word_about_the_prefix() -> None:
    bench = stream(layers=4, ring_sets=3)
    bench.run("start; reserved de=0-2")
    assert bench.machine.prefix_blocks == 2, "until it is cut, a layer is that of all hit blocks"
    assert bench.run_all("part_layer 1 1; part_layer 1 0; part_layer 1 0") == [], (
        "nothing is announced before the prefix"
    )
    told = bench.run("part_prefix 1 2 -")
    assert told[:3] == [AnnouncePrefix(2, None), SetPrefix(2), Grant(1, 2, 3)]
    assert told[3:] == [AnnounceLayers(0, 1)]


def test_all_layers_may_overtake_the_word_about_the_prefix() -> None:
    bench = stream(layers=2, ring_sets=0)
    assert bench.run("start; reserved de=0-2; part_layer 1 1; part_layer 1 0; part_prefix 1 2 -")[-1] == Quiesce()
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=2))]


def test_layers_that_came_before_a_cut_are_void() -> None:
    bench = stream(layers=2, ring_sets=0)
    assert bench.run("start; reserved de=0-2; part_layer 1 0; part_prefix 1 1 MISS")[-1] == Grant(1, 1, 2)
    assert bench.run("part_layer 1 1") == []
    assert bench.run("part_layer 1 0") == [AnnounceLayers(0, 1), Quiesce()]


def test_a_cut_to_nothing_leaves_every_layer_to_the_engine() -> None:
    bench = stream(layers=3)
    bench.run("start; reserved de=0-2")
    missed = BlockOutcome(BlockState.MISS, Reason.MISS)
    expected = [AnnouncePrefix(0, missed), SetPrefix(0), AnnounceLayers(0, 2), Quiesce()]
    assert bench.run("part_prefix 1 0 MISS") == expected
    assert bench.run_all("part_layer 1 0; computed 3; pushed 3") == []


def test_a_failure_after_the_first_ready_layer_cuts_the_attempt_at_the_prefix() -> None:
    bench = stream(layers=3, hit_blocks=4, ring_sets=0)
    bench.run("start; reserved de=0-4; part_prefix 1 3 MISS; part_layer 1 0")
    assert bench.run("part_failed 1 PEER_LOST cable cut") == [Quiesce()]
    assert bench.run("part_layer 1 1") == [], "no later layer is announced"
    assert bench.run("quiet") == [Finish(End(Reason.PREFIX_CUT, "PEER_LOST: cable cut", prefix_blocks=3))]


@pytest.mark.parametrize(
    "script",
    [
        "start; reserved de=0-2",
        "start; reserved de=0-2; part_prefix 1 2 -",
        "start; reserved de=0-2; part_prefix 1 2 -; part_layer 1 1",
    ],
)
def test_a_failure_before_the_first_ready_layer_keeps_its_own_reason(script: str) -> None:
    bench = stream()
    bench.run(script)
    assert bench.run("part_failed 1 PEER_LOST cable cut") == [Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.PEER_LOST, "cable cut"))]


def test_a_reader_that_claims_more_than_was_asked_for_has_failed() -> None:
    bench = stream(hit_blocks=2)
    bench.run("start; reserved de=0-2")
    assert bench.run("part_prefix 1 3 -") == [Quiesce()]
    message = "the reader says that 3 blocks are good, 2 were asked for"
    assert bench.run("quiet") == [Finish(End(Reason.INTERNAL, message))]


def test_a_prefix_before_the_reservation_is_not_believed() -> None:
    bench = stream()
    assert bench.run("start; part_prefix 1 2 -") == []
    assert bench.run("reserved de=0-2") == [reads("de", (0, 2))]


def test_a_refused_reservation_ends_the_stream_at_once() -> None:
    bench = stream()
    assert bench.run("start; reserve_failed NO_SPACE full") == [Finish(End(Reason.NO_SPACE, "full"))]
    assert bench.run("reserved de=0-2") == []


@pytest.mark.parametrize(("ready", "claimed"), [(0, 1), (1, 2), (2, 4)])
def test_layers_computed_before_they_were_ready_are_refused_and_change_nothing(ready: int, claimed: int) -> None:
    bench = stream(layers=3, ring_sets=3)
    bench.run("start; reserved de=0-2; part_prefix 1 2 -")
    for layer in range(ready):
        bench.run(f"part_layer 1 {layer}")
    with pytest.raises(BadRequest, match=rf"layers \[0, {claimed}\) said to be computed, {ready} of 3 are ready"):
        bench.run(f"computed {claimed}")
    assert bench.machine.state is StreamState.STREAMING
    assert bench.machine.computed == 0


def test_an_end_that_came_before_the_pages_were_quiet_is_followed_by_quiet() -> None:
    bench = stream()
    bench.run("start; reserved de=0-2; part_prefix 1 2 -; part_layer 1 0")
    assert bench.run("stop DEADLINE 10 s passed") == [Quiesce()]
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.DEADLINE, "10 s passed", pages_quiet=False))]
    assert bench.run_all("stop SHUTTING_DOWN; quiesce_timeout; part_failed 1 PEER_LOST gone") == []
    assert bench.run("quiet") == [AnnounceQuiet()]
    bench.check_over()


def test_a_whole_stream_is_good_even_if_a_cancel_comes_while_it_becomes_quiet() -> None:
    bench = stream(layers=1)
    bench.run("start; reserved de=0-2; part_prefix 1 2 -; part_layer 1 0")
    assert bench.run("stop CANCELLED") == []
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.OK, pages_quiet=False, prefix_blocks=2))]


def test_a_block_lost_by_the_reader_cuts_the_prefix_before_and_after_the_first_ready_layer() -> None:
    for ready in ("", "; part_layer 1 0"):
        bench = stream()
        bench.run(f"start; reserved de=0-2; part_prefix 1 2 -{ready}")
        assert bench.give(("part_failed", 1, Reason.PREFIX_CUT, "block 1 was lost", 1)) == [Quiesce()]
        assert bench.run("quiet") == [Finish(End(Reason.PREFIX_CUT, "block 1 was lost", prefix_blocks=1))]
        bench.check_over()


def test_a_reader_can_not_cut_a_prefix_to_more_than_it_was() -> None:
    bench = stream()
    bench.run("start; reserved de=0-2; part_prefix 1 1 MISS")
    bench.give(("part_failed", 1, Reason.PREFIX_CUT, "lost", 9))
    assert bench.run("quiet") == [Finish(End(Reason.PREFIX_CUT, "lost", prefix_blocks=1))]
