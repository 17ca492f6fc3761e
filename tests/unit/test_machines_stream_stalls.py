"""Streams whose third nodes stand still when it is their turn, or whose decode node has nothing left to take over into."""

from __future__ import annotations

import pytest
from stream_bench import StreamBench
from stream_kind import split, stream

from kvmoverd.core.machines.actions import AnnounceLayers, FencePart, Finish, Quiesce, StartPart
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import End, Reason

STARTED = "start; reserved pe=0-2 h1=2-4 de=4-6"
TOLD = f"{STARTED}; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -"
FIRST = "part_layer 1 0; part_layer 2 0; part_layer 3 0"
PE, HELPER, DE = 1, 2, 3
ONE_LAYER = f"{TOLD}; {FIRST}; part_stalled 2; part_fenced 2"
"""With one layer all are ready: the decode node takes the part over for its buffer alone."""


def bench_of(script: str, **options: int) -> StreamBench:
    bench = split(**options)
    bench.run(script)
    return bench


def starts(part: int, node: str, first_layer: int) -> StartPart:
    return StartPart(part, Share(node, Runs.of((2, 4))), first_layer, False)


def test_a_third_node_that_does_not_send_what_was_granted_is_replaced_from_its_next_layer_on() -> None:
    bench = bench_of(f"{TOLD}; {FIRST}", ring_sets=0)
    assert bench.run("part_stalled 2") == [FencePart(HELPER)]
    assert bench.run_all("part_layer 2 1; part_stalled 2") == []
    assert bench.run("part_fenced 2") == [starts(4, "de", 1)]


def test_one_that_ended_without_having_sent_all_is_replaced_too() -> None:
    bench = bench_of(f"{TOLD}; {FIRST}; part_ended 2", ring_sets=0)
    assert bench.machine.awaits(HELPER)
    assert bench.run("part_stalled 2; part_fenced 2") == [starts(4, "de", 1)]


@pytest.mark.parametrize(
    ("script", "part", "why"),
    [
        (f"{TOLD}; {FIRST}", HELPER, "the engine is slow: nothing more is granted"),
        (f"{TOLD}; {FIRST}; part_ended 2", HELPER, "the engine is slow, and the part has ended"),
        (TOLD, PE, "it is watched elsewhere"),
        (TOLD, DE, "it is watched elsewhere"),
        (f"{TOLD}; part_stalled 2; part_fenced 2", 4, "the decode node has taken over"),
        (f"{STARTED}; part_prefix 1 2 -; part_prefix 2 2 -", HELPER, "its prefix is told: others keep it waiting"),
        (f"{STARTED}; part_prefix 1 1 MISS; part_prefix 2 2 -; part_prefix 3 2 -", HELPER, "none of its blocks count"),
        (f"{TOLD}; stop CANCELLED", HELPER, "it is over"),
    ],
)
def test_nobody_stands_still_whose_turn_it_is_not(script: str, part: int, why: str) -> None:
    bench = bench_of(script)
    assert not bench.machine.awaits(part), why
    assert bench.run(f"part_stalled {part}") == [], why


def test_when_all_layers_are_ready_the_decode_node_still_awaits_a_third_node() -> None:
    bench = bench_of(f"{TOLD}; part_layer 1 0; part_layer 2 0", layers=1)
    assert not bench.machine.awaits(HELPER), "the decode node's layer is missing first"
    assert bench.run("part_layer 3 0") == [AnnounceLayers(0, 0)]
    assert bench.machine.awaits(HELPER)
    assert bench.run("part_stalled 2; part_fenced 2") == [starts(4, "de", 1)]
    assert bench.run("part_prefix 4 2 -; part_ended 4") == [Quiesce()]


def test_without_a_decode_node_the_last_layer_is_all_that_is_awaited() -> None:
    bench = stream(hit_blocks=4, layers=1, decode=False, ring_sets=0, pushes=False)
    bench.run("start; reserved pe=0-2 h1=2-4; part_prefix 1 2 -; part_prefix 2 2 -; part_layer 1 0")
    assert bench.machine.awaits(2)
    assert bench.run("part_stalled 2; part_fenced 2") == [starts(3, "pe", 0)]


def test_when_the_decode_node_has_delivered_already_this_node_reads_what_its_own_pages_lack() -> None:
    bench = bench_of(f"{TOLD}; {FIRST}; part_failed 2 PEER_LOST gone; part_fenced 2", ring_sets=0)
    assert bench.run("part_failed 4 LEASE_EXPIRED void") == [FencePart(4)]
    assert bench.run("part_fenced 4") == [starts(5, "pe", 1)]
    assert bench.run("part_failed 5 LEASE_EXPIRED void") == [Quiesce()]


def test_a_buffer_that_goes_while_it_takes_over_ends_the_request() -> None:
    bench = bench_of(f"{TOLD}; {FIRST}; part_failed 2 PEER_LOST gone; part_fenced 2; part_layer 4 1", ring_sets=0)
    assert bench.run("part_failed 4 LEASE_EXPIRED expired") == [Quiesce()]


def test_pages_that_have_all_need_no_buffer_that_is_gone() -> None:
    bench = bench_of(ONE_LAYER, layers=1)
    assert bench.run("part_failed 4 LEASE_EXPIRED void") == [Quiesce()]
    assert bench.run("quiet") == [Finish(End(Reason.OK, prefix_blocks=6))]
    bench.check_over()
