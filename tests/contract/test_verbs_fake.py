"""The fake CNIC keeps the rules of reliable connections: what the links' own tests rest on."""

from __future__ import annotations

import numpy as np
import pytest
from verbs_kit import State, writes_of
from verbs_rig_kit import PIECE_BYTES, Rig, states

from kvmoverd.adapters.transport.verbs.fabric import Completion, Fabric, Opcode, QueuePair
from kvmoverd.core.qos import KV_LANE


def test_the_fakes_have_all_that_the_port_asks_for(rig: Rig) -> None:
    fabric: Fabric = rig.a.fabric
    end: QueuePair = rig.a.end
    assert fabric.numa_node == -1 and end.end.cnic == 0
    assert rig.a.end.marks == KV_LANE
    assert rig.a.end.end.gid != rig.b.end.end.gid and len(rig.a.end.end.gid) == 16


def test_a_chain_lands_row_by_row_and_completes_once(rig: Rig) -> None:
    rig.write(7, rows=3)
    assert rig.landed() == 0 and rig.a.done() == []
    assert [(rig.wire.step(), rig.landed()) for _ in range(2)] == [(1, 1), (1, 2)]
    assert rig.a.done() == [], "the middle of a chain tells nobody"
    assert rig.wire.settle() == 1 and rig.landed() == 3
    assert rig.a.done() == [Completion(rig.a.end.number, 7, True, Opcode.WRITE)]
    assert rig.b.done() == [] and rig.wire.tally.doorbells == 1


def test_an_immediate_takes_a_slot_and_comes_after_its_bytes(rig: Rig) -> None:
    rig.b.receive(50, at=2048)
    rig.write(7, rows=2, immediate=0xFFFFFFFF)
    rig.wire.step()
    assert rig.b.done() == []
    rig.wire.step()
    (told,) = rig.b.done()
    assert (told.work_id, told.opcode, told.immediate) == (50, Opcode.RECEIVED_IMMEDIATE, 0xFFFFFFFF)
    assert rig.landed() == 2 and not rig.b.end.slots


def test_without_a_slot_work_waits_and_is_counted(rig: Rig) -> None:
    rig.write(7, rows=2, immediate=1)
    rig.a.message(8)
    assert rig.wire.settle() == 1 and rig.wire.settle() == 0
    assert rig.wire.tally.waits_for_slots == 1 and rig.landed() == 1
    rig.b.receive(50)
    assert rig.wire.settle() == 1 and rig.wire.settle() == 0
    rig.b.receive(51)
    assert rig.wire.settle() == 1
    assert [done.work_id for done in rig.a.done()] == [7, 8], "in the order posted"
    assert [(done.work_id, done.opcode) for done in rig.b.done()] == [
        (50, Opcode.RECEIVED_IMMEDIATE),
        (51, Opcode.RECEIVED),
    ]
    assert rig.wire.tally.waits_for_slots == 2 and states(rig) == (State.READY, State.READY)


def test_a_message_lies_in_the_slot(rig: Rig) -> None:
    rig.b.receive(50, at=2048)
    rig.a.message(8, 16)
    rig.wire.settle()
    (told,) = rig.b.done()
    assert (told.size_bytes, told.opcode) == (16, Opcode.RECEIVED)
    assert (rig.b.memory[2048:2064] == 1).all() and (rig.b.memory[2064:] == 2).all()


def test_a_message_longer_than_the_slot_ends_both_ends(rig: Rig) -> None:
    rig.b.receive(50, size_bytes=8)
    rig.a.message(8, 16)
    rig.wire.settle()
    assert [(done.ok, done.status) for done in rig.a.done()] == [(False, "remote invalid request")]
    assert [(done.ok, done.status) for done in rig.b.done()] == [(False, "local length error")]
    assert states(rig) == (State.ERROR, State.ERROR) and (rig.b.memory == 2).all()


def _wrong_key(rig: Rig) -> int:
    return 12345


def _local_key(rig: Rig) -> int:
    return rig.b.keys(0)[0]


def _other_piece(rig: Rig) -> int:
    return rig.b.keys(PIECE_BYTES)[1]


@pytest.mark.parametrize("key", [_wrong_key, _local_key, _other_piece])
def test_a_key_that_does_not_open_ends_both_ends(rig: Rig, key: object) -> None:
    rig.b.receive(50)
    rig.write(7, key=key(rig))  # type: ignore[operator]
    rig.write(8)
    rig.wire.settle()
    assert [(done.work_id, done.ok, done.status) for done in rig.a.done()] == [
        (7, False, "remote access error"),
        (8, False, "work request flushed"),
    ]
    assert [(done.work_id, done.ok) for done in rig.b.done()] == [(50, False)]
    assert states(rig) == (State.ERROR, State.ERROR) and rig.landed() == 0


def test_a_closed_registration_opens_nothing(rig: Rig) -> None:
    more = rig.b.fabric.register(rig.b.address, 64, piece_bytes=64)
    key = int(more.keys(np.array([rig.b.address], np.uint64), np.array([8], np.uint64))[0, 1])
    more.close()
    rig.write(7, key=key)
    rig.wire.settle()
    assert rig.a.done()[0].status == "remote access error"


def test_memory_that_is_not_registered_ends_the_end_that_reads_it(rig: Rig) -> None:
    rows = [(rig.a.address + PIECE_BYTES - 4, rig.b.address, 8, rig.a.keys(0)[0], rig.b.keys(0)[1])]
    rig.a.end.post_writes(writes_of(rows), 7, None)
    rig.wire.settle()
    assert rig.a.done()[0].status == "local protection error" and states(rig) == (State.ERROR, State.READY)


def test_after_fail_all_that_is_posted_is_flushed_and_so_is_what_comes_later(rig: Rig) -> None:
    rig.a.receive(50)
    rig.write(7, rows=3)
    rig.a.message(8)
    rig.wire.step()
    rig.a.end.fail()
    rig.a.end.fail()
    rig.write(9)
    assert [(done.work_id, done.ok) for done in rig.a.done()] == [(7, False), (8, False), (50, False), (9, False)]
    assert rig.wire.settle() == 0 and rig.landed() == 1


@pytest.mark.parametrize("how", ["destroyed", "failed", "killed", "unplugged"])
def test_work_for_an_end_that_does_not_answer_fails_after_its_retries(rig: Rig, how: str) -> None:
    rig.write(7, rows=2)
    rig.write(8)
    rig.wire.step()
    {
        "destroyed": rig.b.end.destroy,
        "failed": rig.b.end.fail,
        "killed": rig.b.fabric.kill,
        "unplugged": rig.b.fabric.unplug,
    }[how]()
    assert rig.wire.settle() == 0 and rig.a.done() == [], "it tries for a while"
    rig.settle_late()
    assert [(done.work_id, done.status) for done in rig.a.done()] == [
        (7, "transport retry counter exceeded"),
        (8, "work request flushed"),
    ]
    assert rig.landed() == 1, "nothing lands after that"
    assert rig.wire.tally.late_attempts == (how in ("destroyed", "killed"))


def test_a_port_that_is_plugged_again_in_time_goes_on(rig: Rig) -> None:
    rig.write(7)
    rig.b.fabric.unplug()
    assert rig.wire.settle() == 0
    rig.b.fabric.plug()
    assert rig.wire.settle() == 1 and rig.a.done()[0].ok


def test_what_was_on_its_way_lands_after_a_failure_but_not_after_destroy(rig: Rig) -> None:
    rig.wire.on_its_way = 2
    rig.write(7, rows=4)
    rig.a.end.fail()
    assert [done.ok for done in rig.a.done()] == [False] and rig.landed() == 0
    rig.wire.step()
    assert rig.landed() == 1, "the sender's own error stops nothing that has left"
    rig.b.end.destroy()
    rig.wire.settle()
    assert rig.landed() == 1 and rig.wire.tally.late_attempts == 1


def test_the_receivers_error_leaves_what_is_on_its_way_and_destroy_ends_it(rig: Rig) -> None:
    rig.wire.on_its_way = 2
    rig.write(7, rows=4)
    rig.wire.step()
    rig.b.end.fail()
    rig.wire.step()
    assert rig.landed() == 2
    rig.b.end.destroy()
    rig.settle_late()
    assert rig.landed() == 2 and rig.wire.tally.late_attempts == 2 and rig.a.done()[0].ok is False
