"""The fake CNIC keeps the rules of reliable connections: what the links' own tests rest on."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from verbs_kit import FakeFabric, FakeQueuePair, FakeWire, State, writes_of

from kvmoverd.adapters.transport.verbs.fabric import Completion, Fabric, FabricError, Opcode, QueuePair
from kvmoverd.core.qos import KV_LANE

SIZE_BYTES = 4096
PIECE_BYTES = 1024
SEND_MAX, RECEIVE_MAX = 8, 4


class Side:
    """A CNIC with some memory, registered."""

    def __init__(self, wire: FakeWire, fill: int) -> None:
        self.fabric = FakeFabric(wire, f"fake{fill}:1", cq_max=64)
        self.memory = np.full(SIZE_BYTES, fill, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.registration = self.fabric.register(self.address, SIZE_BYTES, piece_bytes=PIECE_BYTES)
        self.end = self.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)

    def keys(self, at: int) -> tuple[int, int]:
        found = self.registration.keys(np.array([self.address + at], np.uint64), np.array([1], np.uint64))
        return int(found[0, 0]), int(found[0, 1])

    def done(self) -> list[Completion]:
        return list(self.fabric.poll(64))

    def receive(self, work_id: int, at: int = 0, size_bytes: int = 64) -> None:
        self.end.post_receive(self.address + at, size_bytes, self.keys(at)[0], work_id)

    def message(self, work_id: int, size_bytes: int = 16) -> None:
        self.end.post_message(self.address, size_bytes, self.keys(0)[0], work_id)

    def close(self) -> None:
        if self.end in self.fabric.queue_pairs:
            self.end.destroy()
        self.registration.close()
        self.fabric.close()


class Rig:
    """Two connected ends on a wire that the test moves."""

    def __init__(self) -> None:
        self.wire = FakeWire(held=True, retry_s=0.02)
        self.a, self.b = Side(self.wire, 1), Side(self.wire, 2)
        self.a.end.connect(self.b.end.end, KV_LANE)
        self.b.end.connect(self.a.end.end, KV_LANE)

    def write(self, work_id: int, rows: int = 1, immediate: int | None = None, key: int | None = None) -> None:
        """Rows of 8 bytes, one beside the other, from the beginning of a's memory to that of b's."""
        local_key, remote_key = self.a.keys(0)[0], self.b.keys(0)[1] if key is None else key
        chain = [(self.a.address + 8 * n, self.b.address + 8 * n, 8, local_key, remote_key) for n in range(rows)]
        self.a.end.post_writes(writes_of(chain), work_id, immediate)

    def landed(self) -> int:
        """Rows that are there."""
        return int((self.b.memory == 1).sum()) // 8

    def settle_late(self) -> None:
        """Lets those give up whom nobody answers."""
        self.wire.settle()
        time.sleep(0.03)
        self.wire.settle()

    def close(self) -> None:
        self.wire.close()
        self.a.close()
        self.b.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def states(rig: Rig) -> tuple[State, State]:
    return rig.a.end.state, rig.b.end.state


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


def test_places_are_taken_until_completions_are_polled(rig: Rig) -> None:
    rig.write(1, rows=SEND_MAX)
    rig.wire.settle()
    with pytest.raises(FabricError, match="8 of 8 places are taken, 1 more"):
        rig.write(2)
    assert len(rig.a.done()) == 1
    rig.write(2)
    for work_id in range(RECEIVE_MAX):
        rig.b.receive(work_id)
    with pytest.raises(FabricError, match=r"receive queue .* 4 of 4"):
        rig.b.receive(9)
    assert rig.wire.settle() == 1


def test_completions_that_nobody_polls_overrun_the_queue(rig: Rig) -> None:
    small = FakeFabric(rig.wire, cq_max=2)
    end = small.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)
    end.fail()
    for work_id in range(3):
        end.post_receive(rig.a.address, 8, 1, work_id)
    with pytest.raises(FabricError, match="more than 2 completions"):
        small.poll(1)
    end.destroy()
    small.close()


def test_the_nth_item_fails_with_both_ends(rig: Rig) -> None:
    rig.wire.fail_at(2)
    rig.write(7, rows=3)
    rig.wire.settle()
    assert [(done.work_id, done.ok) for done in rig.a.done()] == [(7, False)]
    assert rig.landed() == 1 and states(rig) == (State.ERROR, State.ERROR)


def test_a_dropped_completion_is_never_told_and_keeps_its_places(rig: Rig) -> None:
    rig.a.fabric.drop_completions(1, Opcode.WRITE)
    rig.write(7, rows=3)
    rig.write(8)
    rig.wire.settle()
    assert [done.work_id for done in rig.a.done()] == [8] and rig.landed() == 3
    assert rig.a.end.send_places_taken == 3 and rig.wire.tally.dropped_completions == 1


def test_the_descriptor_tells_of_the_next_completion_once_it_is_armed(rig: Rig) -> None:
    def readable() -> bool:
        return bool(select.select([rig.a.fabric.fileno()], [], [], 0)[0])

    rig.write(1)
    rig.wire.settle()
    assert not readable(), "not armed"
    rig.a.fabric.arm()
    assert not readable() and len(rig.a.done()) == 1, "what came before it was armed is found by polling once more"
    rig.write(2)
    rig.write(3)
    rig.wire.step()
    assert readable()
    assert len(rig.a.done()) == 1
    rig.wire.step()
    assert readable(), "until it is armed again"
    rig.a.fabric.arm()
    assert not readable() and len(rig.a.done()) == 1


def test_an_end_connected_to_itself_writes_into_its_own_memory(rig: Rig) -> None:
    end = rig.a.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)
    end.connect(end.end, KV_LANE)
    rig.a.memory[:8] = 9
    rows = [(rig.a.address, rig.a.address + 512, 8, *rig.a.keys(0))]
    end.post_receive(rig.a.address, 8, rig.a.keys(0)[0], 60)
    end.post_writes(writes_of(rows), 7, 5)
    rig.wire.settle()
    assert (rig.a.memory[512:520] == 9).all()
    assert [(done.work_id, done.immediate) for done in rig.a.done()] == [(60, 5), (7, 0)]
    rows = [(rig.a.address, rig.a.address, 8, rig.a.keys(0)[0], 1)]
    end.post_writes(writes_of(rows), 8, None)
    rig.wire.settle()
    assert [done.status for done in rig.a.done()] == ["remote access error"]
    end.destroy()


def test_ends_that_do_not_know_each_other_never_hear_each_other(rig: Rig) -> None:
    stranger = rig.a.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)
    stranger.connect(rig.b.end.end, KV_LANE)
    stranger.post_writes(writes_of([(rig.a.address, rig.b.address, 8, rig.a.keys(0)[0], rig.b.keys(0)[1])]), 7, None)
    rig.settle_late()
    assert rig.a.done()[0].status == "transport retry counter exceeded" and rig.landed() == 0
    stranger.destroy()


@pytest.mark.parametrize("call", ["connect", "post", "receive", "fail", "destroy"])
def test_calls_in_the_wrong_state_are_refused(rig: Rig, call: str) -> None:
    new = rig.a.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)
    with pytest.raises(FabricError, match="not connected"):
        new.post_message(rig.a.address, 8, rig.a.keys(0)[0], 1)
    with pytest.raises(FabricError, match="only a new one"):
        rig.a.end.connect(rig.b.end.end, KV_LANE)
    new.destroy()
    with pytest.raises(FabricError):
        _call(new, call, rig)


def _call(end: FakeQueuePair, call: str, rig: Rig) -> None:
    match call:
        case "connect":
            end.connect(rig.b.end.end, KV_LANE)
        case "post":
            end.post_message(rig.a.address, 8, 1, 1)
        case "receive":
            end.post_receive(rig.a.address, 8, 1, 1)
        case "fail":
            end.fail()
        case "destroy":
            end.destroy()


def test_marks_that_do_not_stick_are_refused(rig: Rig) -> None:
    rig.a.fabric.refuses_marks = True
    end = rig.a.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)
    with pytest.raises(FabricError, match="traffic class 32 was set, 0 was found"):
        end.connect(rig.b.end.end, KV_LANE)
    end.destroy()


def test_an_end_that_the_device_keeps_is_still_written_to(rig: Rig) -> None:
    rig.b.fabric.refuses_destroy = True
    with pytest.raises(FabricError, match="can't be destroyed"):
        rig.b.end.destroy()
    rig.write(7)
    assert rig.wire.settle() == 1 and rig.landed() == 1
    rig.b.fabric.refuses_destroy = False


def test_pieces_end_where_asked_or_where_the_device_takes_no_more() -> None:
    with FakeWire(held=True) as wire:
        fabric = FakeFabric(wire, piece_bytes_max=1000)
        memory = np.zeros(4096, dtype=np.uint8)
        address = int(memory.ctypes.data)
        registration = fabric.register(address, 2500, piece_bytes=4096)
        assert [int(cut) - address for cut in registration.cuts] == [1000, 2000]
        addresses = np.array([address, address + 1000, address + 2499], np.uint64)
        keys = registration.keys(addresses, np.array([1000, 1, 1], np.uint64))
        assert keys.dtype == np.uint32 and len(np.unique(keys)) == 6
        for at, size_bytes in ((999, 2), (2499, 2), (-1, 1)):
            with pytest.raises(FabricError, match="is in no one piece"):
                registration.keys(np.array([address + at], np.uint64), np.array([size_bytes], np.uint64))
        fabric.register_fails = True
        with pytest.raises(FabricError, match="ENOMEM"):
            fabric.register(address, 16, piece_bytes=16)
        registration.close()
        assert fabric.book.registered_bytes == 0
        fabric.close()


def test_queue_pairs_are_bounded() -> None:
    with FakeWire(held=True) as wire:
        fabric = FakeFabric(wire, queue_pairs_max=1)
        end = fabric.make_queue_pair(send_max=1, receive_max=1)
        with pytest.raises(FabricError, match="1 of 1 places are taken"):
            fabric.make_queue_pair(send_max=1, receive_max=1)
        with pytest.raises(FabricError, match="must be 1 to"):
            fabric.make_queue_pair(send_max=0, receive_max=1)
        end.destroy()
        fabric.close()


def test_writes_into_forbidden_memory_are_remembered(rig: Rig) -> None:
    rig.write(7, rows=3)
    rig.wire.step()
    rig.wire.forbid(rig.b.address, 16)
    rig.wire.settle()
    assert len(rig.wire.tally.trespasses) == 1, "the first was before, the third beside it"


def test_a_stopped_process_stands_still_while_others_write_to_it(rig: Rig) -> None:
    rig.wire.release()
    rig.b.fabric.stop()
    polled = threading.Event()
    thread = threading.Thread(target=lambda: (rig.b.fabric.poll(1), polled.set()))
    thread.start()
    rig.write(7)
    rig.wire.wait(lambda: rig.landed() == 1, "the write lands")
    assert not polled.wait(0.05)
    rig.b.fabric.resume()
    thread.join(5)
    assert polled.is_set()


def test_the_thread_moves_what_is_posted_and_a_held_wire_stands_in_the_middle(rig: Rig) -> None:
    rig.wire.release()
    rig.a.fabric.arm()
    rig.write(7, rows=4)
    assert select.select([rig.a.fabric.fileno()], [], [], 5)[0]
    assert rig.a.done()[0].ok and rig.landed() == 4
    rig.b.memory[:] = 2
    rig.wire.delay_s = 0.02
    rig.write(8, rows=8)
    rig.wire.wait(lambda: rig.landed() >= 2, "two rows land")
    rig.wire.hold()
    stood = rig.landed()
    time.sleep(0.06)
    assert rig.landed() == stood < 8
    rig.b.end.destroy()
    rig.wire.release()
    rig.wire.wait(lambda: rig.a.end.state is State.ERROR, "the sender gives up")
    assert rig.landed() == stood and rig.a.done()[0].work_id == 8
