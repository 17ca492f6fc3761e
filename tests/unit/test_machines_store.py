"""Store: full blocks leave the engine's pages (accepted), then the slots (durable)."""

from __future__ import annotations

from machines_kinds import store

from kvmoverd.core.machines.actions import (
    AnnounceAccepted,
    AnnounceBlocks,
    AnnounceQuiet,
    Finish,
    Release,
    SendLayer,
    TakeSlots,
    WriteBlocks,
)
from kvmoverd.core.machines.store import StoreState
from kvmoverd.core.status import BlockOutcome, End, Reason

ACCEPTED = "start; slots; sent 0 OK; sent 1 OK"
HIT = BlockOutcome.of(Reason.OK)
FULL = BlockOutcome.of(Reason.NO_SPACE)


def test_blocks_are_accepted_when_copied_and_answered_when_durable() -> None:
    bench = store(blocks=2, layers=2, window_layers=1)
    assert bench.run("start") == [TakeSlots()]
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
    bench.run(f"{ACCEPTED}; written 2 IO_ERROR; written 0 OK; written 0 IO_ERROR")
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
    bench.run("start; slots")
    assert bench.run_all("stop CANCELLED; sent 1 OK") == []
    assert bench.run("sent 0 OK") == [Release(), Finish(End(Reason.CANCELLED))]
    assert bench.run("written 0 OK") == []


def test_a_failed_copy_is_the_last_word() -> None:
    bench = store(layers=3, window_layers=1)
    assert bench.run("start; slots; sent 0 IO_ERROR bad page") == [Release(), Finish(End(Reason.IO_ERROR, "bad page"))]


def test_copies_that_do_not_end_leave_the_pages_unquiet_and_the_slots_held() -> None:
    bench = store(layers=3, window_layers=1)
    bench.run("start; slots; stop DEADLINE")
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.DEADLINE, pages_quiet=False))]
    assert bench.run("sent 0 PEER_LOST gone") == [Release(), AnnounceQuiet()]
    bench.check_over()


def test_a_store_without_slots_says_why() -> None:
    bench = store()
    assert bench.run("start; no_slots POOL_EXHAUSTED full") == [Release(), Finish(End(Reason.POOL_EXHAUSTED, "full"))]


def test_slots_that_come_after_a_cancel_are_not_used() -> None:
    bench = store()
    assert bench.run("start; stop CANCELLED") == [Release(), Finish(End(Reason.CANCELLED))]
    assert bench.run("slots") == []
