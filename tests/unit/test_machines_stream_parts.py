"""Streams with several readers: the prefix of all, layers of all; moves, fences, third nodes that fail."""

from __future__ import annotations

import pytest
from stream_bench import StreamBench
from stream_kind import split, stream

from kvmoverd.core.machines.actions import (
    AnnounceLayers,
    AnnouncePrefix,
    AskToGiveUp,
    FencePart,
    Finish,
    Grant,
    Quiesce,
    SetPrefix,
    StartPart,
)
from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, End, Reason

MISSED = BlockOutcome.of(Reason.MISS)
STARTED = "start; reserved pe=0-2 h1=2-4 de=4-6"
TOLD = f"{STARTED}; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -"
PE, HELPER, DE = 1, 2, 3


def layer(*numbers: int) -> str:
    """All three parts bring these layers."""
    return "".join(f"; part_layer {part} {number}" for number in numbers for part in (PE, HELPER, DE))


def split_bench(script: str, **options: int) -> StreamBench:
    bench = split(**options)
    bench.run(script)
    return bench


def starts(part: int, node: str, *spans: tuple[int, int], first_layer: int = 0, holds: bool = True) -> StartPart:
    return StartPart(part, Share(node, Runs.of(*spans)), first_layer, holds)


# The prefix -----------------------------------------------------------------------------------------------------------


def test_several_readers_hold_until_all_of_them_know_what_is_good() -> None:
    bench = split(ring_sets=0)
    assert bench.run(STARTED) == [starts(1, "pe", (0, 2)), starts(2, "h1", (2, 4)), starts(3, "de", (4, 6))]
    assert bench.run_all("part_prefix 2 2 -; part_prefix 1 2 -") == []
    grants = [Grant(part, 2, 3) for part in (PE, HELPER, DE)]
    assert bench.run("part_prefix 3 2 -") == [AnnouncePrefix(6, None), SetPrefix(6), *grants]


@pytest.mark.parametrize(
    ("told", "prefix", "counts"),
    [
        ("part_prefix 1 2 -; part_prefix 2 1 MISS; part_prefix 3 0 CORRUPT", 3, (2, 1, 0)),
        ("part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 1 MISS", 5, (2, 2, 1)),
        ("part_prefix 1 1 MISS; part_prefix 2 2 -; part_prefix 3 2 -", 1, (1, 0, 0)),
    ],
)
def test_the_prefix_ends_at_the_first_block_that_any_reader_lost(
    told: str, prefix: int, counts: tuple[int, int, int]
) -> None:
    bench = split(ring_sets=0)
    bench.run(STARTED)
    said = bench.run_all(told)
    assert said[:2] == [AnnouncePrefix(prefix, MISSED), SetPrefix(prefix)]
    assert [(grant.part, grant.blocks) for grant in said[2:] if isinstance(grant, Grant)] == [*enumerate(counts, 1)]


def test_a_cut_before_the_first_block_of_a_part_is_over_for_it_and_the_others_are_enough() -> None:
    bench = split_bench(
        f"{STARTED}; part_prefix 1 2 -; part_prefix 2 0 MISS; part_ended 2; part_prefix 3 2 -", layers=1
    )
    assert bench.run("part_ended 3") == [], "it was granted nothing"
    assert bench.run("part_layer 1 0") == [AnnounceLayers(0, 0), Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=2))]
    bench.check_over()


@pytest.mark.parametrize("part", [HELPER, DE])
@pytest.mark.parametrize("reason", ["PEER_LOST", "INTERNAL", "PREFIX_CUT"])
def test_whatever_becomes_of_a_part_none_of_whose_blocks_count_the_others_go_on(part: int, reason: str) -> None:
    bench = split_bench(f"{STARTED}; part_prefix 1 1 MISS; part_prefix 2 2 -; part_prefix 3 2 -", layers=1)
    assert bench.run(f"part_failed {part} {reason} as-the-test-wants") == []
    assert bench.run("part_layer 1 0") == [AnnounceLayers(0, 0), Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=1))]
    bench.check_over()


def test_a_part_of_several_ranges_is_cut_where_its_block_lies() -> None:
    bench = stream(hit_blocks=6, ring_sets=0)
    bench.run("start; reserved de=0-2,4-6 pe=2-4; part_prefix 2 2 -")
    told = bench.run("part_prefix 1 3 MISS")
    assert told == [AnnouncePrefix(5, MISSED), SetPrefix(5), Grant(1, 3, 3), Grant(2, 2, 3)]


def test_a_layer_is_ready_when_every_part_has_brought_it() -> None:
    bench = split_bench(TOLD, ring_sets=0)
    assert bench.run_all("part_layer 1 0; part_layer 1 1; part_layer 1 2; part_layer 2 1; part_layer 3 0") == []
    assert bench.run("part_layer 2 0") == [AnnounceLayers(0, 0)]
    assert bench.run("part_layer 3 1") == [AnnounceLayers(1, 1)]


def test_a_ring_set_is_granted_again_to_every_reader_at_once() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; computed 1", ring_sets=1)
    assert bench.run("pushed 1") == [Grant(part, 2, 2) for part in (PE, HELPER, DE)]


def test_what_lies_in_the_pages_is_part_of_the_prefix_and_nobody_reads_it() -> None:
    bench = stream(hit_blocks=5, resident_blocks=3, ring_sets=0)
    assert bench.run("start; reserved de=3-5") == [starts(1, "de", (3, 5), holds=False)]
    assert bench.run("part_prefix 1 0 MISS") == [
        AnnouncePrefix(3, MISSED),
        SetPrefix(3),
        AnnounceLayers(0, 2),
        Quiesce(),
    ]
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=3))]


def test_when_all_hits_lie_in_the_pages_every_layer_is_ready_at_once() -> None:
    bench = stream(hit_blocks=3, resident_blocks=3)
    assert bench.run("start; reserved") == [AnnouncePrefix(3, None), SetPrefix(3), AnnounceLayers(0, 2), Quiesce()]


@pytest.mark.parametrize("plan", ["", "de=0-1", "de=0-2 pe=1-2", "de=0-3", "de=0-2,4-5"])
def test_a_plan_that_does_not_give_each_block_to_one_reader_ends_the_stream(plan: str) -> None:
    bench = stream()
    told = bench.run(f"start; reserved {plan}")
    assert [action.end.reason for action in told if isinstance(action, Finish)] == [Reason.INTERNAL]
    assert bench.machine.parts == {}


# Moves ----------------------------------------------------------------------------------------------------------------


def test_unbegun_blocks_move_to_another_reader_and_none_is_read_twice() -> None:
    bench = split_bench(STARTED, ring_sets=0)
    assert bench.run("move 3 0 pe") == [AskToGiveUp(DE, 0)]
    assert bench.run("gave_up 3 1") == [starts(4, "pe", (5, 6))], "it had begun one more than it was to keep"
    assert bench.run_all("part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 1 -") == []
    grants = [Grant(1, 2, 3), Grant(2, 2, 3), Grant(3, 1, 3), Grant(4, 1, 3)]
    assert bench.run("part_prefix 4 1 -") == [AnnouncePrefix(6, None), SetPrefix(6), *grants]


def test_the_prefix_waits_for_what_is_on_the_move() -> None:
    bench = split_bench(f"{STARTED}; move 3 1 pe; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -")
    assert bench.machine.state is StreamState.READING
    assert bench.run("gave_up 3 2")[0] == AnnouncePrefix(6, None), "its prefix was told already: it keeps all"


def test_a_reader_that_was_alone_holds_once_it_has_given_something_up() -> None:
    bench = stream(hit_blocks=4, ring_sets=0)
    bench.run("start; reserved de=0-4; move 1 2 pe")
    assert bench.run("gave_up 1 2") == [starts(2, "pe", (2, 4))]
    assert bench.machine.parts[1].holds and bench.machine.parts[1].sends_blocks == 0


def test_a_reader_that_gives_everything_up_is_no_part_of_the_plan_any_more() -> None:
    bench = stream(hit_blocks=2, layers=1, ring_sets=0)
    bench.run("start; reserved de=0-2; move 1 0 pe")
    assert bench.run("gave_up 1 0") == [starts(2, "pe", (0, 2), holds=False)], "one reader alone does not hold"
    assert bench.run_all("part_ended 1; part_failed 1 PEER_LOST late; part_layer 1 0; part_prefix 1 0 -") == []
    assert bench.run("part_prefix 2 2 -; part_layer 2 0") == [AnnounceLayers(0, 0), Quiesce()]
    bench.run("quiet")
    bench.check_over()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{STARTED}; part_prefix 3 2 -; move 3 0 pe", "its prefix is known"),
        (f"{STARTED}; move 3 1 pe; move 3 0 pe", "it was asked already"),
        (f"{STARTED}; move 3 2 pe", "it keeps all"),
        (f"{STARTED}; move 7 0 pe", "there is no such part"),
        (f"{STARTED}; part_failed 2 PEER_LOST gone; move 2 0 pe", "it is fenced"),
        (f"{STARTED}; stop CANCELLED; move 3 0 pe", "the request has ended"),
    ],
)
def test_nothing_moves_that_can_not_move(script: str, why: str) -> None:
    assert split().run(script) == [], why


def test_a_reader_that_ends_before_it_hears_that_it_is_asked_has_nothing_to_give() -> None:
    """It was alone, so it sends without a grant: its layers and its end cross with what it is asked for."""
    bench = stream(hit_blocks=2, layers=1, ring_sets=0)
    bench.run("start; reserved de=0-2; move 1 1 pe")
    assert bench.run_all("part_prefix 1 2 -; part_layer 1 0") == [], "it may still give"
    assert bench.run("part_ended 1") == [AnnouncePrefix(2, None), SetPrefix(2), AnnounceLayers(0, 0), Quiesce()]
    bench.run("quiet")
    bench.check_over()


def test_a_reader_that_finds_nothing_good_ends_at_once_also_while_it_is_asked_for_blocks() -> None:
    bench = split_bench(f"{STARTED}; move 3 1 pe; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 0 MISS")
    assert bench.run("part_ended 3")[:2] == [AnnouncePrefix(4, MISSED), SetPrefix(4)]


def test_a_reader_that_gives_up_what_it_has_promised_has_failed() -> None:
    bench = split_bench(f"{STARTED}; move 3 0 pe; part_prefix 3 2 -")
    assert bench.run("gave_up 3 1") == [Quiesce()]
    assert bench.machine.state is StreamState.DRAINING


# Third nodes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [r for r in Reason if r not in (Reason.OK, Reason.PREFIX_CUT)])
def test_whatever_a_third_node_fails_with_another_reads_its_part(reason: Reason) -> None:
    bench = split_bench(STARTED)
    assert bench.give(("part_failed", HELPER, reason, "gone")) == [FencePart(HELPER)]
    assert bench.run("part_layer 2 0") == [], "nothing of it counts any more"
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4))]


def test_a_third_node_that_says_nothing_is_fenced_even_while_it_is_asked_to_give_up() -> None:
    bench = split_bench(f"{STARTED}; move 2 0 pe")
    assert bench.run("part_stalled 2") == [FencePart(HELPER)]
    assert bench.run_all("gave_up 2 1; part_prefix 2 2 -; part_failed 2 PEER_LOST gone; part_stalled 2") == []
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4))], "all of it, since nobody knows what it has done"
    assert bench.run("part_fenced 2") == []


@pytest.mark.parametrize("part", [PE, DE])
def test_the_two_who_own_the_request_are_watched_elsewhere(part: int) -> None:
    assert split_bench(STARTED).run(f"part_stalled {part}") == []


def test_a_third_node_that_dies_in_mid_stream_is_replaced_from_its_next_layer_on() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; part_layer 2 1; part_layer 2 2; part_layer 1 1", ring_sets=0)
    assert bench.run("part_failed 2 PEER_LOST gone") == [FencePart(HELPER)]
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4), first_layer=3, holds=False)]
    assert bench.run("part_layer 3 1") == [AnnounceLayers(1, 1)]


def test_layers_that_a_dead_node_sent_out_of_order_are_sent_again() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; part_layer 2 2; part_failed 2 PEER_LOST gone", ring_sets=0)
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4), first_layer=1, holds=False)]
    assert bench.run_all("part_prefix 4 2 -; part_layer 1 1; part_layer 3 1") == []
    assert bench.run("part_layer 4 1") == [AnnounceLayers(1, 1)]


def test_only_what_belongs_to_the_prefix_is_read_again() -> None:
    bench = split_bench(f"{STARTED}; part_prefix 1 2 -; part_prefix 2 1 MISS; part_prefix 3 2 -", ring_sets=0)
    bench.run("part_failed 2 PEER_LOST gone")
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 3), holds=False)]


def test_a_block_that_is_gone_when_it_is_read_again_ends_the_attempt_there() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; part_failed 2 PEER_LOST gone; part_fenced 2")
    assert bench.run("part_prefix 4 1 MISS") == [Quiesce()]
    end = bench.run("quiet")[0]
    assert isinstance(end, Finish)
    assert (end.end.reason, end.end.prefix_blocks) == (Reason.PREFIX_CUT, 3)


def test_a_stream_is_over_only_when_the_decode_node_has_a_third_nodes_layers_too() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}", layers=1)
    assert bench.machine.ready.complete and bench.machine.state is StreamState.STREAMING
    assert bench.run("part_ended 2") == [Quiesce()]
    bench.run("quiet")
    bench.check_over()


def test_a_third_node_that_dies_when_only_the_decode_node_still_waits_is_read_again_for_that() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; part_failed 2 PEER_LOST gone", layers=1)
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4), first_layer=1, holds=False)]
    assert bench.run("part_prefix 4 2 -") == []
    assert bench.run("part_ended 4") == [Quiesce()]


def test_a_stream_is_not_over_while_a_dead_node_s_part_waits_for_its_fence_though_its_layers_are_all_there() -> None:
    """The decode node has yet to read what it did not get from there, and nobody else would tell it to."""
    bench = split_bench(f"{TOLD}; part_layer 1 0; part_layer 2 0; part_failed 2 PEER_LOST gone", layers=1)
    assert bench.run("part_layer 3 0") == [AnnounceLayers(0, 0)]
    assert bench.run("part_fenced 2") == [starts(4, "de", (2, 4), first_layer=1, holds=False)]
    assert bench.run_all("part_ended 1; part_ended 3; part_prefix 4 2 -") == []
    assert bench.run("part_ended 4") == [Quiesce()]


def test_without_a_decode_node_this_node_reads_what_a_third_one_could_not() -> None:
    bench = stream(hit_blocks=4, decode=False, ring_sets=0, pushes=False)
    bench.run("start; reserved pe=0-2 h1=2-4; part_prefix 1 2 -; part_prefix 2 2 -; part_layer 2 0; part_layer 1 0")
    assert bench.run("part_failed 2 PEER_LOST gone; part_fenced 2") == [
        starts(3, "pe", (2, 4), first_layer=1, holds=False)
    ]
    assert bench.run("part_layer 1 1; part_layer 1 2; part_prefix 3 2 -; part_layer 3 1; part_layer 3 2") == [
        AnnounceLayers(2, 2),
        Quiesce(),
    ], "nobody assembles: the last layer is the end"


def test_what_this_node_has_no_room_for_the_decode_node_reads() -> None:
    bench = split_bench(STARTED)
    assert bench.run("part_failed 1 POOL_EXHAUSTED full") == [FencePart(PE)]
    assert bench.run("part_fenced 1") == [starts(4, "de", (0, 2))]


def test_what_the_decode_node_has_no_room_for_this_node_reads_and_nobody_hands_it_on_again() -> None:
    bench = split_bench(STARTED)
    assert bench.run("part_failed 3 POOL_EXHAUSTED full") == [FencePart(DE)]
    assert bench.run("part_fenced 3") == [starts(4, "pe", (4, 6))]
    assert bench.run("move 4 0 de") == [], "it has refused them"
    assert bench.run("part_failed 4 POOL_EXHAUSTED full") == [Quiesce()]


def test_what_this_node_refused_and_a_third_one_has_lost_the_decode_node_reads() -> None:
    bench = split_bench(f"{STARTED}; part_failed 1 POOL_EXHAUSTED full; part_fenced 1; move 4 0 h2; gave_up 4 0")
    assert bench.run("part_failed 5 PEER_LOST gone; part_fenced 5") == [starts(6, "de", (0, 2))]
    assert bench.run("part_failed 6 POOL_EXHAUSTED full") == [Quiesce()], "both have refused"


@pytest.mark.parametrize(
    "script",
    [
        f"{STARTED}; part_failed 1 INTERNAL broken",
        f"{STARTED}; part_failed 3 LEASE_EXPIRED void",
        f"{TOLD}; part_failed 3 LEASE_EXPIRED void",
        f"{STARTED}; part_failed 3 PEER_LOST gone",
        f"{TOLD}; part_failed 1 POOL_EXHAUSTED full",
    ],
)
def test_other_failures_of_the_two_who_own_the_request_end_it(script: str) -> None:
    assert split().run(script) == [Quiesce()]


def test_a_fence_that_takes_too_long_ends_the_request_with_pages_that_are_not_quiet() -> None:
    bench = split_bench(f"{TOLD}{layer(0)}; part_failed 2 PEER_LOST gone")
    assert bench.run("stop DEADLINE 10 s passed") == [Quiesce()]
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.DEADLINE, "10 s passed", pages_quiet=False))]
    assert bench.run("part_fenced 2") == [], "no reader begins any more"
    bench.run("quiet")
    bench.check_over()


def test_a_decode_node_that_refuses_the_prefix_ends_the_request() -> None:
    bench = split_bench(TOLD)
    assert bench.run("reserve_failed LEASE_EXPIRED void") == [Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.LEASE_EXPIRED, "void"))]
