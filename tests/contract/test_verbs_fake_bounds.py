"""Fake CNICs: queues and bounds, states, and what a test may do to them."""

from __future__ import annotations

import select
import threading
import time

import numpy as np
import pytest
from verbs_kit import FakeFabric, FakeQueuePair, FakeWire, State, writes_of
from verbs_rig_kit import RECEIVE_MAX, SEND_MAX, Rig, states

from kvmoverd.adapters.transport.verbs.fabric import FabricError, Opcode
from kvmoverd.core.qos import KV_LANE


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
