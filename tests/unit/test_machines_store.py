"""Store: full blocks leave the engine's pages (accepted), then the slots (durable)."""

from __future__ import annotations

from machines_kinds import store

from kvmoverd.core.machines.actions import (
    AnnounceAccepted,
    AnnounceBlocks,
    AnnounceQuiet,
    FindStored,
    Finish,
    Release,
    SendLayer,
    TakeSlots,
    WriteBlocks,
)
from kvmoverd.core.machines.store import StoreState
from kvmoverd.core.status import BlockOutcome, End, Reason

NEW = "start; found 0=MISS 1=MISS"
ACCEPTED = f"{NEW}; slots; sent 0 OK; sent 1 OK"
HIT = BlockOutcome.of(Reason.OK)
FULL = BlockOutcome.of(Reason.NO_SPACE)


def lost(reason: Reason) -> AnnounceBlocks:
    """Both blocks are given up, and their caller is told of each."""
    return AnnounceBlocks((BlockOutcome.of(reason),) * 2)


def test_blocks_are_accepted_when_copied_and_answered_when_durable() -> None:
    bench = store(blocks=2, layers=2, window_layers=1)
    assert bench.run("start") == [FindStored()]
    assert bench.run("found 0=MISS 1=MISS") == [TakeSlots()]
    assert bench.run("slots") == [SendLayer(0)]
    assert bench.run("sent 0 OK") == [SendLayer(1)]
    assert bench.run("sent 1 OK") == [AnnounceAccepted(), WriteBlocks((0, 1))]
    assert bench.run("written 1 OK") == []
    assert bench.run("written 0 OK") == [
        AnnounceBlocks((HIT, HIT)),
        Release(),
        Finish(End(Reason.OK, prefix_blocks=2)),
    ]
    bench.check_over()


def test_an_empty_store_is_done_at_once_and_takes_nothing() -> None:
    bench = store(blocks=0)
    assert bench.run("start") == [AnnounceAccepted(), AnnounceBlocks(()), Finish(End(Reason.OK))]
    bench.check_over()


def test_blocks_that_were_not_stored_are_named_in_the_order_of_the_request() -> None:
    bench = store(blocks=3, layers=2)
    bench.run("start; found 0=MISS 1=MISS 2=MISS; slots; sent 0 OK; sent 1 OK")
    bench.run("written 2 IO_ERROR; written 0 OK; written 0 IO_ERROR")
    end = End(Reason.IO_ERROR, "2 of 3 blocks were not stored", prefix_blocks=1)
    outcomes = (HIT, FULL, BlockOutcome.of(Reason.IO_ERROR))
    assert bench.run("written 1 NO_SPACE") == [AnnounceBlocks(outcomes), Release(), Finish(end)]


def test_accepted_blocks_are_written_though_their_caller_went() -> None:
    bench = store(blocks=2, layers=2)
    bench.run(ACCEPTED)
    assert bench.run("stop ENGINE_GONE") == [Finish(End(Reason.ENGINE_GONE))]
    assert bench.machine.state is StoreState.LINGERING
    assert bench.run_all("stop SHUTTING_DOWN; quiesce_timeout; written 0 OK") == []
    assert bench.run("written 1 NO_SPACE") == [Release()]
    bench.check_over()


def test_blocks_not_yet_accepted_are_given_up() -> None:
    bench = store(blocks=2, layers=3, window_layers=2)
    bench.run(f"{NEW}; slots")
    assert bench.run_all("stop CANCELLED; sent 1 OK") == []
    assert bench.run("sent 0 OK") == [Release(), lost(Reason.CANCELLED), Finish(End(Reason.CANCELLED))]
    assert bench.run("written 0 OK") == []


def test_a_failed_copy_is_the_last_word() -> None:
    bench = store(layers=3, window_layers=1)
    end = Finish(End(Reason.IO_ERROR, "bad page"))
    assert bench.run(f"{NEW}; slots; sent 0 IO_ERROR bad page") == [Release(), lost(Reason.IO_ERROR), end]


def test_copies_that_do_not_end_leave_the_pages_unquiet_and_the_slots_held() -> None:
    bench = store(layers=3, window_layers=1)
    bench.run(f"{NEW}; slots; stop DEADLINE")
    assert bench.run("quiesce_timeout") == [lost(Reason.DEADLINE), Finish(End(Reason.DEADLINE, pages_quiet=False))]
    assert bench.run("sent 0 PEER_LOST gone") == [Release(), AnnounceQuiet()]
    bench.check_over()


def test_a_store_without_slots_says_why() -> None:
    bench = store()
    end = Finish(End(Reason.POOL_EXHAUSTED, "full"))
    assert bench.run(f"{NEW}; no_slots POOL_EXHAUSTED full") == [Release(), lost(Reason.POOL_EXHAUSTED), end]


def test_slots_that_come_after_a_cancel_are_not_used() -> None:
    bench = store()
    end = Finish(End(Reason.CANCELLED))
    assert bench.run(f"{NEW}; stop CANCELLED") == [Release(), lost(Reason.CANCELLED), end]
    assert bench.run("slots") == []


def test_blocks_that_are_stored_are_told_at_once_and_take_no_slots() -> None:
    bench = store(blocks=2)
    end = Finish(End(Reason.OK, prefix_blocks=2))
    assert bench.run("start; found 0=OK 1=OK") == [AnnounceAccepted(), AnnounceBlocks((HIT, HIT)), end]
    bench.check_over()


def test_only_blocks_that_are_not_stored_are_copied_and_written() -> None:
    bench = store(blocks=3, layers=1)
    assert bench.run("start; found 0=OK 1=MISS 2=OK") == [TakeSlots()]
    assert bench.machine.to_copy == (1,)
    assert bench.run("slots; sent 0 OK") == [AnnounceAccepted(), WriteBlocks((1,))]
    assert bench.run("written 1 OK")[0] == AnnounceBlocks((HIT, HIT, HIT))
    bench.check_over()


def test_a_block_that_another_writes_ends_as_that_write_does() -> None:
    bench = store(blocks=2, layers=1)
    bench.run("start; found 1=MISS; slots; written 0 NO_SPACE; sent 0 OK")
    end = End(Reason.NO_SPACE, "1 of 2 blocks were not stored", prefix_blocks=0)
    assert bench.run("written 1 OK") == [AnnounceBlocks((FULL, HIT)), Release(), Finish(end)]
    bench.check_over()


def test_a_call_whose_blocks_are_all_written_by_others_frees_its_pages_at_once_and_waits_for_them() -> None:
    bench = store(blocks=2)
    assert bench.run("start; found") == [AnnounceAccepted()]
    assert bench.run("written 1 OK") == []
    assert bench.run("written 0 OK") == [AnnounceBlocks((HIT, HIT)), Finish(End(Reason.OK, prefix_blocks=2))]
    bench.check_over()


def test_a_call_that_is_given_up_still_tells_what_it_knows_to_be_stored() -> None:
    bench = store(blocks=3)
    bench.run("start; found 0=OK 2=MISS; written 1 OK")
    gone = BlockOutcome.of(Reason.POOL_EXHAUSTED)
    assert bench.run("no_slots POOL_EXHAUSTED full")[1] == AnnounceBlocks((HIT, HIT, gone))
    bench.check_over()


def test_who_stops_before_it_is_known_what_is_stored_is_told_so_of_every_block() -> None:
    bench = store(blocks=2)
    bench.run("start")
    assert bench.run("stop DEADLINE late") == [lost(Reason.DEADLINE), Finish(End(Reason.DEADLINE, "late"))]
    assert bench.run_all("found 0=MISS; slots; written 0 OK") == []
    bench.check_over()
