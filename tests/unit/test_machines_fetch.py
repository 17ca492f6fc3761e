"""Fetch: Full Blocks into the pool under a lease, through it into pages, or just into it."""

from __future__ import annotations

import pytest
from machines_kinds import fetch

from kvmoverd.core.machines.actions import (
    AnnounceBlocks,
    AnnounceProgress,
    AnnounceQuiet,
    Finish,
    GrantLease,
    Release,
    SendLayer,
    TakeSlots,
)
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import BlockOutcome, End, Reason

HIT = BlockOutcome.of(Reason.OK)
MISS = BlockOutcome.of(Reason.MISS)
READ = "start; slots; blocks 0=OK 1=OK"


def test_a_lease_is_granted_before_the_answer_and_outlives_the_request() -> None:
    bench = fetch(FetchKind.LEASE, blocks=3)
    assert bench.run("start") == [TakeSlots()]
    assert bench.run("slots") == []
    assert bench.run("blocks 2=OK 0=OK") == [AnnounceProgress(2)]
    assert bench.run("blocks 1=MISS") == [
        AnnounceProgress(3),
        GrantLease(),
        AnnounceBlocks((HIT, MISS, HIT)),
        Release(),
        Finish(End(Reason.OK, prefix_blocks=1)),
    ]
    bench.check_over()


@pytest.mark.parametrize("kind", list(FetchKind))
def test_when_no_block_is_good_nothing_is_leased_or_copied_and_a_miss_is_a_result(kind: FetchKind) -> None:
    bench = fetch(kind)
    told = bench.run("start; slots; blocks 0=MISS 1=MISS")
    assert told == [AnnounceProgress(2), AnnounceBlocks((MISS, MISS)), Release(), Finish(End(Reason.OK))]


def test_the_good_blocks_are_copied_layer_by_layer_within_the_window() -> None:
    bench = fetch(FetchKind.PAGES, layers=3, window_layers=2)
    assert bench.run("start; slots; blocks 0=MISS 1=OK") == [AnnounceProgress(2), SendLayer(0), SendLayer(1)]
    assert bench.machine.good_blocks() == (1,)
    assert bench.run("sent 1 OK") == [SendLayer(2)]
    assert bench.run("sent 2 OK") == []
    assert bench.run("sent 0 OK") == [AnnounceBlocks((MISS, HIT)), Release(), Finish(End(Reason.OK))]
    bench.check_over()


def test_progress_counts_each_block_once() -> None:
    bench = fetch(FetchKind.LEASE, blocks=3)
    bench.run("start; slots")
    assert bench.run("blocks 0=OK 0=CORRUPT") == [AnnounceProgress(1)]
    assert bench.run("blocks 0=OK") == []
    assert bench.run("blocks 0=OK 2=OK") == [AnnounceProgress(2)]
    assert bench.machine.reads.ended_blocks == 2


def test_an_empty_fetch_is_done_at_once_and_takes_nothing() -> None:
    bench = fetch(blocks=0)
    assert bench.run("start") == [AnnounceBlocks(()), Finish(End(Reason.OK))]
    bench.check_over()


def test_a_stop_while_reading_gives_the_slots_back_at_once() -> None:
    bench = fetch(FetchKind.LEASE)
    bench.run("start; slots; blocks 0=OK")
    assert bench.run("stop CANCELLED") == [Release(), Finish(End(Reason.CANCELLED))]
    assert bench.run("blocks 1=OK") == []


def test_a_failed_copy_is_the_last_word_after_the_others_ended() -> None:
    bench = fetch(layers=3, window_layers=2)
    bench.run(READ)
    assert bench.run("sent 0 IO_ERROR bad page") == []
    assert bench.run("sent 1 OK") == [Release(), Finish(End(Reason.IO_ERROR, "bad page"))]


def test_copies_that_do_not_end_leave_the_pages_unquiet_and_the_slots_held() -> None:
    bench = fetch(layers=3, window_layers=1)
    bench.run(f"{READ}; stop DEADLINE")
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.DEADLINE, pages_quiet=False))]
    assert bench.run("sent 0 OK") == [Release(), AnnounceQuiet()]
    bench.check_over()


def test_a_refusal_that_comes_after_the_slots_is_not_believed() -> None:
    bench = fetch()
    assert bench.run("start; slots; no_slots POOL_EXHAUSTED full") == []
    assert bench.run("blocks 0=OK 1=OK")[0] == AnnounceProgress(2)


def test_a_layer_is_copied_as_soon_as_every_block_that_is_not_lost_has_it() -> None:
    bench = fetch(blocks=3, layers=3, window_layers=3)
    assert bench.run("start; slots; layers 0=1 1=2; blocks 2=MISS") == [AnnounceProgress(1), SendLayer(0)]
    assert bench.machine.good_blocks() == (0, 1)
    assert bench.run("sent 0 OK; layers 0=2") == [SendLayer(1)]
    assert bench.run("blocks 0=OK") == [AnnounceProgress(2)]
    assert bench.run("blocks 1=OK") == [AnnounceProgress(3), SendLayer(2)]
    bench.run("sent 2 OK")
    hit, miss = BlockOutcome.of(Reason.OK), BlockOutcome.of(Reason.MISS)
    assert bench.run("sent 1 OK")[0] == AnnounceBlocks((hit, hit, miss))
    bench.check_over()


def test_a_block_lost_after_its_first_layers_is_copied_no_further_and_keeps_nobody_waiting() -> None:
    bench = fetch(blocks=2, layers=3, window_layers=3)
    assert bench.run("start; slots; layers 0=1 1=1") == [SendLayer(0)]
    assert bench.run("blocks 1=OK") == [AnnounceProgress(1)]
    assert bench.run("blocks 0=CORRUPT") == [AnnounceProgress(2), SendLayer(1), SendLayer(2)]
    assert bench.machine.good_blocks() == (1,)
    lost, hit = BlockOutcome.of(Reason.CORRUPT), BlockOutcome.of(Reason.OK)
    assert bench.run("sent 0 OK; sent 1 OK; sent 2 OK")[0] == AnnounceBlocks((lost, hit))
    bench.check_over()


def test_a_fetch_that_loses_every_block_in_the_middle_waits_for_its_copies_and_ends_well() -> None:
    bench = fetch(blocks=1, layers=3, window_layers=1)
    assert bench.run("start; slots; layers 0=2") == [SendLayer(0)]
    assert bench.run("blocks 0=IO_ERROR") == [AnnounceProgress(1)]
    lost = BlockOutcome.of(Reason.IO_ERROR)
    assert bench.run("sent 0 OK") == [AnnounceBlocks((lost,)), Release(), Finish(End(Reason.OK, prefix_blocks=0))]
    bench.check_over()
