"""Streams whose readers give, in mid-stream, the layers of their last blocks that they have not begun: the rest."""

from __future__ import annotations

import pytest
from stream_bench import StreamBench
from stream_kind import split, stream

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AskForRest,
    FencePart,
    Finish,
    Grant,
    PushRest,
    Quiesce,
    StartPart,
)
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import End, Reason

STARTED = "start; reserved pe=0-2 h1=2-4 de=4-6"
TOLD = f"{STARTED}; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -"
FIRST = f"{TOLD}; part_layer 1 0; part_layer 2 0; part_layer 3 0"
PE, HELPER, DE, REST = 1, 2, 3, 4
GIVEN = f"{FIRST}; move 3 0 pe; gave_rest 3 0 1"
"""The decode node brings nothing of its two blocks after layer 0: part 4, read here, does."""


def bench_of(script: str, layers: int = 3, ring_sets: int = 0) -> StreamBench:
    bench = split(layers=layers, ring_sets=ring_sets)
    bench.run(script)
    return bench


def rest(part: int, node: str, span: tuple[int, int], first_layer: int) -> StartPart:
    return StartPart(part, Share(node, Runs.of(span)), first_layer, holds=False, rest=True)


def cause(bench: StreamBench) -> End:
    """How it ends, once it is quiet."""
    (finish,) = bench.run("quiet")
    assert isinstance(finish, Finish)
    return finish.end


def test_the_rest_of_what_the_decode_node_reads_goes_to_another_reader_and_is_pushed_to_it() -> None:
    bench = bench_of(FIRST)
    assert bench.run("move 3 0 pe") == [AskForRest(DE, 0)]
    expected: list[Action] = [PushRest(Runs.of((5, 6)), 2), Grant(DE, 1, 3), rest(REST, "pe", (5, 6), 2)]
    assert bench.run("gave_rest 3 1 2") == expected, (
        "it keeps a block more than it was to, and of the other a layer more"
    )


@pytest.mark.parametrize("to_node", ["de", "h1", "h2"])
def test_what_this_node_gives_is_pushed_anyway(to_node: str) -> None:
    bench = bench_of(FIRST)
    assert bench.run("move 1 1 " + to_node) == [AskForRest(PE, 1)]
    assert bench.run("gave_rest 1 1 1") == [Grant(PE, 1, 3), rest(REST, to_node, (1, 2), 1)]


def test_a_reader_that_keeps_nothing_is_over_after_the_layers_before_the_rest() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 h2")
    assert bench.run("gave_rest 3 0 2")[1:] == [Grant(DE, 2, 2), rest(REST, "h2", (4, 6), 2)]
    assert bench.run("part_layer 1 1; part_layer 2 1; part_layer 3 1") == [AnnounceLayers(1, 1)]
    assert bench.run_all("part_ended 3; part_layer 1 2; part_layer 2 2") == []
    assert bench.run("part_layer 4 2") == [AnnounceLayers(2, 2)], "the decode node still awaits the third node"
    assert bench.run("part_ended 2") == [Quiesce()]
    assert cause(bench) == End(Reason.OK, prefix_blocks=6)
    bench.check_over()


def test_a_layer_is_ready_when_the_reader_of_the_rest_and_the_one_that_gave_it_have_brought_it() -> None:
    bench = bench_of(
        f"{FIRST}; move 3 0 pe; gave_rest 3 1 2; part_layer 1 1; part_layer 2 1; part_layer 1 2; part_layer 2 2"
    )
    assert bench.run("part_layer 4 2") == []
    assert bench.run("part_layer 3 1") == [AnnounceLayers(1, 1)]
    assert bench.run("part_layer 3 2") == [AnnounceLayers(2, 2)]


def test_what_is_lost_behind_the_prefix_is_no_part_of_the_rest() -> None:
    bench = stream(hit_blocks=6, ring_sets=0)
    bench.run("start; reserved de=0-6; part_prefix 1 4 MISS; part_layer 1 0; move 1 2 pe")
    assert bench.run("gave_rest 1 2 1")[2:] == [rest(2, "pe", (2, 4), 1)]


def test_page_sets_of_a_ring_are_granted_again_to_both_and_to_none_that_is_over() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 pe; move 1 1 h2", layers=4, ring_sets=1)
    assert bench.run("gave_rest 3 0 2")[1:] == [Grant(DE, 2, 1), rest(REST, "pe", (4, 6), 2)]
    assert bench.run("gave_rest 1 1 1") == [Grant(PE, 1, 1), rest(5, "h2", (1, 2), 1)]
    assert bench.may_land(REST) == [], "its first layer has no page set yet"
    assert bench.run("computed 1; pushed 1") == [
        Grant(PE, 1, 2),
        Grant(HELPER, 2, 2),
        Grant(DE, 2, 2),
        Grant(REST, 2, 2),
        Grant(5, 1, 2),
    ]
    bench.run("part_layer 1 1; part_layer 2 1; part_layer 5 1; part_layer 3 1; computed 2")
    assert Grant(DE, 2, 2) in bench.run("pushed 2"), "it has no more to bring than two layers"


def test_who_has_nothing_to_give_is_not_asked_again() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 pe")
    assert bench.machine.parts[DE].rest_asked and not bench.machine.parts[DE].may_give_rest
    assert bench.run_all("gave_rest 3 2 0; move 3 0 pe; move 3 0 h2") == []
    assert bench.run_all("part_layer 1 1; part_layer 2 1; part_layer 3 1") == [AnnounceLayers(1, 1)]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{FIRST}; move 2 0 pe", "a third node is replaced, not asked"),
        (f"{FIRST}; move 3 2 pe", "it keeps all"),
        (f"{FIRST}; move 3 0 de", "it reads it already"),
        (f"{FIRST}; move 3 0 pe; move 3 1 h2", "it was asked already"),
        (f"{GIVEN}; move 3 0 h2", "it has given its rest"),
        (f"{GIVEN}; move 4 0 h2", "it is a rest"),
        (f"{FIRST}; part_layer 3 1; part_layer 3 2; move 3 0 pe", "all of its layers are here"),
        (f"{FIRST}; part_ended 3; move 3 0 pe", "it has ended"),
        (f"{FIRST}; stop CANCELLED; move 3 0 pe", "the request has ended"),
        (f"{FIRST}; part_failed 2 PEER_LOST gone; part_fenced 2; move 4 0 pe", "it replaces a third node"),
        (f"{STARTED}; part_prefix 1 1 MISS; part_prefix 2 2 -; part_prefix 3 2 -; move 3 0 pe", "none of it counts"),
    ],
)
def test_nobody_is_asked_for_a_rest_who_can_not_give_it(script: str, why: str) -> None:
    bench = split(ring_sets=0)
    *before, last = script.split("; ")
    bench.run("; ".join(before))
    assert bench.run(last) == [], why


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{FIRST}; gave_rest 3 0 1", "nobody asked"),
        (f"{FIRST}; move 3 0 pe; gave_rest 3 2 1", "it keeps all, and gives some"),
        (f"{FIRST}; move 3 0 pe; gave_rest 3 0 3", "there is no such layer"),
        (f"{FIRST}; move 3 0 pe; part_layer 3 1; gave_rest 3 0 1", "it has sent the layer"),
        (
            f"{FIRST}; move 3 0 pe; part_layer 3 2; gave_rest 3 0 2",
            "it has sent the layer, an earlier one is on its way",
        ),
        (f"{GIVEN}; gave_rest 3 1 2", "it has given another rest"),
    ],
)
def test_a_reader_that_gives_what_it_may_not_has_failed(script: str, why: str) -> None:
    bench = split(ring_sets=0)
    assert bench.run(script) == [Quiesce()], why
    end = cause(bench)
    assert end.reason is Reason.PREFIX_CUT and end.message.startswith("INTERNAL: of 2 blocks it gives all but"), end
    bench.check_over()


def test_late_words_about_a_rest_change_nothing() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 pe; part_ended 3")
    assert bench.run_all("gave_rest 3 0 2; gave_rest 7 0 1; gave_rest 3 2 0") == []
    assert bench_of(GIVEN).run_all("gave_rest 3 0 1; gave_rest 3 2 0; gave_up 3 2") == []


def test_an_answer_to_whether_a_node_is_there_is_not_that_to_what_it_is_to_give() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 pe")
    assert bench.run("gave_up 3 2") == []
    assert bench.run("gave_rest 3 0 2")[2:] == [rest(REST, "pe", (4, 6), 2)]


@pytest.mark.parametrize("reason", ["PEER_LOST", "POOL_EXHAUSTED", "INTERNAL", "LEASE_EXPIRED"])
@pytest.mark.parametrize("sent", ["", "; part_layer 4 1"])
def test_a_rest_whose_reader_fails_is_read_by_an_owner_from_the_layer_on_that_did_not_come(
    reason: str, sent: str
) -> None:
    bench = bench_of(f"{FIRST}; move 3 0 h2; gave_rest 3 0 1{sent}")
    assert bench.run(f"part_failed 4 {reason} gone") == [FencePart(REST)]
    layer = 2 if sent else 1
    assert bench.run_all(f"part_layer 4 {layer}; part_failed 4 PEER_LOST again") == []
    assert bench.run("part_fenced 4") == [rest(5, "pe", (4, 6), layer)]


def test_who_gave_a_rest_is_the_last_that_is_asked_to_read_it_after_all() -> None:
    bench = bench_of(f"{GIVEN}; part_failed 4 POOL_EXHAUSTED full")
    assert bench.run("part_fenced 4") == [rest(5, "de", (4, 6), 1)]
    assert bench.run("part_failed 5 INTERNAL it-helps-nobody") == [Quiesce()]
    assert cause(bench) == End(Reason.PREFIX_CUT, "INTERNAL: it-helps-nobody", prefix_blocks=6)


def test_a_third_node_that_stands_still_with_a_rest_is_replaced() -> None:
    bench = bench_of(f"{FIRST}; move 1 0 h2; gave_rest 1 0 2; part_layer 1 1; part_layer 2 1; part_layer 3 1")
    assert bench.machine.awaits(REST)
    assert bench.run("part_stalled 4; part_fenced 4") == [rest(5, "de", (0, 2), 2)]


def test_a_rest_that_has_all_come_needs_its_reader_no_more() -> None:
    bench = bench_of(f"{GIVEN}; part_layer 4 1; part_layer 4 2")
    assert bench.run_all(
        "part_failed 4 PEER_LOST gone; part_layer 1 1; part_layer 1 2; part_ended 2; part_layer 2 1"
    ) == [AnnounceLayers(1, 1)]
    assert bench.run("part_layer 2 2") == [AnnounceLayers(2, 2), Quiesce()]
    assert cause(bench).reason is Reason.OK
    bench.check_over()


def test_a_block_of_a_rest_that_is_lost_cuts_the_prefix_there() -> None:
    bench = bench_of(GIVEN)
    assert bench.run("part_prefix 4 1 CORRUPT") == [Quiesce()]
    assert cause(bench) == End(Reason.PREFIX_CUT, "block 5 was lost when its part moved", prefix_blocks=5)
    late = bench_of(f"{GIVEN}; part_prefix 4 2 -; part_layer 4 1")
    assert late.give(("part_failed", REST, Reason.PREFIX_CUT, "block 1 was lost", 1)) == [Quiesce()]
    assert cause(late) == End(Reason.PREFIX_CUT, "block 1 was lost", prefix_blocks=5)


def test_who_gave_a_rest_and_fails_afterwards_ends_the_attempt() -> None:
    bench = bench_of(f"{FIRST}; move 3 0 pe; gave_rest 3 1 2")
    assert bench.run("part_failed 3 PEER_LOST gone") == [Quiesce()]
    assert cause(bench) == End(Reason.PREFIX_CUT, "PEER_LOST: gone", prefix_blocks=6)


def test_a_request_may_be_stopped_while_somebody_is_asked_and_while_two_read() -> None:
    for script in (f"{FIRST}; move 3 0 pe", GIVEN, f"{GIVEN}; part_failed 4 POOL_EXHAUSTED full"):
        bench = bench_of(script)
        assert bench.run("stop CANCELLED") == [Quiesce()]
        assert bench.run_all("gave_rest 3 0 2; part_fenced 4; part_layer 4 1") == []
        assert cause(bench).reason is Reason.CANCELLED
        bench.check_over()
