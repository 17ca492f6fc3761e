"""CNICs over real verbs, such as Soft-RoCE: memory, queue pairs, what completes, what fails, and what is left afterwards."""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from verbs_device_kit import (
    ARENA_BYTES,
    IMPATIENT,
    PIECE_BYTES,
    Side,
    active_ports,
    arrived,
    connect,
    keys,
    no_devices,
    open_sides,
    rows,
)

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.transport.verbs import queue_pair, registration
from kvmoverd.adapters.transport.verbs.device import VerbsQueuePair, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import FabricError, Opcode
from kvmoverd.adapters.transport.verbs.gids import ROCE_2, read_table
from kvmoverd.adapters.transport.verbs.ports import SYSFS
from kvmoverd.adapters.transport.verbs.posting import COMPILED
from kvmoverd.adapters.transport.verbs.registration import DirectPins, PyverbsPins
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KV_LANE, Marks

WHY_NOT = no_devices()
pytestmark = [pytest.mark.contract, pytest.mark.skipif(bool(WHY_NOT), reason=f"needs real verbs: {WHY_NOT}")]


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    one, other = open_sides(retries=IMPATIENT)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def pairs(sides: tuple[Side, Side]) -> tuple[VerbsQueuePair, VerbsQueuePair]:
    one, other = sides
    found = one.pair(), other.pair()
    other.post_slots(found[1], 8)
    connect(*found)
    return found


@pytest.mark.parametrize("by", ["helper", "pyverbs"])
def test_a_chain_lands_and_both_ends_are_told_once(
    sides: tuple[Side, Side], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "pyverbs":
        monkeypatch.setattr(queue_pair, "COMPILED", False)
    elif not COMPILED:
        pytest.skip("needs the compiled posting helper: built without libibverbs-dev")
    (one, other), near, far = sides, sides[0].pair(), sides[1].pair()
    assert bool(near.address) is (by == "helper")
    other.post_slots(far, 2)
    connect(near, far)
    other.fabric.arm()
    writes = rows(one, other, 60)
    near.post_writes(writes, 42, 0xFEEDBEEF)
    assert select.select([other.fabric.fileno()], [], [], 10)[0]
    told = other.wait(1)[0]
    assert (told.opcode, told.immediate, told.work_id, told.ok) == (Opcode.RECEIVED_IMMEDIATE, 0xFEEDBEEF, 100, True)
    assert arrived(writes)
    ended = one.wait(1)[0]
    assert (ended.opcode, ended.work_id, ended.ok, ended.qp_number) == (Opcode.WRITE, 42, True, near.number)
    near.post_message(one.arena.address, 77, one.key(0, 77), 43)
    heard = other.wait(1)[0]
    assert (heard.opcode, heard.size_bytes, heard.work_id) == (Opcode.RECEIVED, 77, 101)
    assert other.view(3 * PIECE_BYTES + 4096, 77) == one.view(0, 77)
    assert one.wait(1)[0].opcode is Opcode.SEND
    assert not one.quiet() and not other.quiet()


def test_the_descriptor_is_readable_once_for_each_time_it_was_armed(
    sides: tuple[Side, Side], pairs: tuple[VerbsQueuePair, VerbsQueuePair]
) -> None:
    one, _ = sides
    for number in range(3):
        one.fabric.arm()
        assert not select.select([one.fabric.fileno()], [], [], 0.05)[0]
        pairs[0].post_writes(rows(one, sides[1], 2), number, None)
        assert select.select([one.fabric.fileno()], [], [], 10)[0]
        assert [each.work_id for each in one.wait(1)] == [number]


@pytest.mark.parametrize("bad", [0, 5, 9])
def test_a_chain_that_fails_ends_once_and_says_why(
    sides: tuple[Side, Side], pairs: tuple[VerbsQueuePair, VerbsQueuePair], bad: int
) -> None:
    one, other = sides
    writes = rows(one, other, 10)
    writes["remote_key"][bad] ^= 0xFFFFFF
    pairs[0].post_writes(writes, 7, 1)
    pairs[0].post_writes(rows(one, other, 10), 8, 2)
    first, second = one.wait(2)
    assert (first.work_id, first.ok, second.work_id, second.ok) == (7, False, 8, False)
    assert "remote access error" in first.status
    assert second.status == f"flushed after: {pairs[0].cause}"
    assert not [each for each in other.quiet() if each.ok] and not one.quiet()


def test_an_end_that_was_failed_flushes_what_is_posted(
    sides: tuple[Side, Side], pairs: tuple[VerbsQueuePair, VerbsQueuePair]
) -> None:
    pairs[1].fail()
    flushed = sides[1].wait(8)
    assert [each.work_id for each in flushed] == list(range(100, 108))
    assert {each.status for each in flushed} == {"flushed: the queue pair failed before"}
    pairs[1].fail()


def test_after_an_end_is_destroyed_nothing_lands_and_nothing_of_it_completes(
    sides: tuple[Side, Side], pairs: tuple[VerbsQueuePair, VerbsQueuePair]
) -> None:
    one, other = sides
    before = bytes(other.view(PIECE_BYTES, PIECE_BYTES))
    pairs[1].fail()
    pairs[1].destroy()
    assert not other.fabric.poll(64)
    pairs[0].post_writes(rows(one, other, 4), 9, 1)
    ended = one.wait(1)[0]
    assert (ended.work_id, ended.ok) == (9, False)
    assert "retries exceeded: the peer does not answer" in ended.status
    assert other.view(PIECE_BYTES, PIECE_BYTES) == before and not other.quiet()


def test_what_an_end_left_is_dropped_and_that_of_others_kept(sides: tuple[Side, Side]) -> None:
    one, other = sides
    doomed, staying, far, far_too = one.pair(), one.pair(), other.pair(), other.pair()
    connect(doomed, far)
    connect(staying, far_too)
    for number in range(5):
        doomed.post_writes(rows(one, other, 3), 10 + number, None)
        staying.post_writes(rows(one, other, 3), 20 + number, None)
    one.fabric.arm()
    staying.post_writes(rows(one, other, 3), 25, None)
    assert select.select([one.fabric.fileno()], [], [], 10)[0]
    doomed.destroy()
    assert [each.work_id for each in one.wait(6)] == [20, 21, 22, 23, 24, 25]


def test_an_end_is_destroyed_in_any_state(sides: tuple[Side, Side]) -> None:
    one, other = sides
    new, ready, far, failed = one.pair(), one.pair(), other.pair(), one.pair()
    connect(ready, far)
    failed.fail()
    for pair in (new, ready, failed, far):
        pair.destroy()
    assert len({new.number, ready.number, failed.number}) == 3


def test_a_port_writes_to_itself_through_one_end(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    looped = one.pair()
    looped.connect(looped.end, KV_LANE)
    writes = rows(one, one, 32)
    looped.post_writes(writes, 3, None)
    assert one.wait(1)[0].ok and arrived(writes)


def test_marks_are_on_the_queue_pair(sides: tuple[Side, Side]) -> None:
    one, other = sides
    near, far = one.pair(), other.pair()
    near.connect(far.end, Marks(service_level=3, traffic_class=0x68, flow_label=0))
    far.connect(near.end, KV_LANE)
    enums = one.fabric.library.enums
    found = [pair.attributes(enums.IBV_QP_AV).ah_attr.traffic_class for pair in (near, far)]
    assert found == [0x68, 0x20]


def test_ipv6_is_an_address_like_any_other() -> None:
    """Link-local ones: every interface has one."""
    ports = active_ports()
    indices = {gid.index for gid in ports[0].gids if gid.address.version == 6 and gid.kind == ROCE_2}
    shared = indices.intersection(gid.index for port in ports[:2] for gid in port.gids if gid.address.version == 6)
    if not shared:
        pytest.skip("needs IPv6 on the interfaces of the RDMA ports")
    one, other = open_sides(gid_index=min(shared))
    near, far = one.pair(), other.pair()
    connect(near, far)
    writes = rows(one, other, 8)
    near.post_writes(writes, 1, None)
    assert one.wait(1)[0].ok and arrived(writes)
    one.close()
    other.close()


def test_a_peer_of_another_kind_of_address_is_refused(sides: tuple[Side, Side]) -> None:
    near, far = sides[0].pair(), sides[1].pair()
    theirs = far.end
    other_kind = type(theirs)(theirs.cnic, theirs.qp_number, theirs.packet_number, bytes([0x20]) * 16, 0, 1024)
    with pytest.raises(FabricError, match=r"an IPv4 and an IPv6 address don't meet; set transport.verbs.gid_index"):
        near.connect(other_kind, KV_LANE)


def test_a_queue_that_is_too_long_is_refused_with_the_most(sides: tuple[Side, Side]) -> None:
    most = sides[0].fabric.facts.requests_max
    with pytest.raises(FabricError, match=rf"takes 1 to {most} requests a queue, not {most + 1} and 1"):
        sides[0].fabric.make_queue_pair(send_max=most + 1, receive_max=1)


def test_the_completion_queue_grows_until_the_device_has_no_more(
    sides: tuple[Side, Side], pairs: tuple[VerbsQueuePair, VerbsQueuePair]
) -> None:
    one, other = sides
    pairs[0].post_writes(rows(one, other, 4), 1, None)
    most = one.fabric.facts.completions_max
    share = min(most // 5, one.fabric.facts.requests_max)
    if share * 5 < most - share:
        pytest.skip("this device's completion queue is too long to be filled")
    for _ in range(4):
        one.pair(send_max=share - 10, receive_max=10)
    pairs[0].post_writes(rows(one, other, 4), 2, None)
    assert [each.work_id for each in one.wait(2)] == [1, 2]
    with pytest.raises(FabricError, match=rf"5 queue pairs hold \d+ completions, \d+ don't fit its {most}"):
        one.pair(send_max=share, receive_max=10)
    one.pairs[-1].destroy()
    one.pair(send_max=share - 10, receive_max=10)


def test_memory_is_found_by_arrays_and_nothing_beside_it(sides: tuple[Side, Side]) -> None:
    memory, start = sides[0].memory, sides[0].arena.address
    assert memory.cuts.tolist() == [start + piece * PIECE_BYTES for piece in (1, 2, 3)]
    inside = keys(memory, start, PIECE_BYTES), keys(memory, start + ARENA_BYTES - 1, 1)
    assert len({int(pair[0]) for pair in inside}) == 2
    for at, size_bytes in ((-1, 1), (PIECE_BYTES - 1, 2), (ARENA_BYTES, 1), (0, PIECE_BYTES + 1), (5, (1 << 64) - 1)):
        with pytest.raises(FabricError, match=r"slice 0, .* is in none of the 4 pieces"):
            keys(memory, start + at, size_bytes)


@pytest.mark.parametrize("pins", [DirectPins, PyverbsPins])
def test_memory_that_is_not_mapped_is_refused_and_leaves_nothing(sides: tuple[Side, Side], pins: type) -> None:
    fabric = sides[0].fabric
    made = pins(fabric.library, fabric.domain_address if pins is DirectPins else fabric.domain)
    start = libc.map_memory(2 * PIECE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    libc.unmap_memory(start + PIECE_BYTES, PIECE_BYTES)
    closed: list[int] = []
    with pytest.raises(
        FabricError, match=r"piece 1 of 2, 1048576 bytes at 0x[0-9a-f]+, .*mapped and writable \(EFAULT; me"
    ):
        registration.register(made, start, 2 * PIECE_BYTES, PIECE_BYTES, closed=lambda: closed.append(1))
    found = registration.register(made, start, PIECE_BYTES, PIECE_BYTES // 2, closed=lambda: closed.append(2))
    assert keys(found, start, 100).all()
    found.close()
    assert closed == [2]
    libc.unmap_memory(start, PIECE_BYTES)


@pytest.mark.parametrize("pins", [DirectPins, PyverbsPins])
def test_a_descriptor_that_is_no_dmabuf_is_refused_with_what_to_do(sides: tuple[Side, Side], pins: type) -> None:
    fabric = sides[0].fabric
    made = pins(fabric.library, fabric.domain_address if pins is DirectPins else fabric.domain)
    fd = os.memfd_create("no dmabuf")
    with pytest.raises(
        FabricError, match=r"piece 0 of 1, 4096 bytes at 0x10000, can't be registered: .* \(E[A-Z]+; memlock"
    ):
        registration.register(made, 0x10000, 4096, 4096, dmabuf_fd=fd)
    os.close(fd)


def test_pinning_lets_other_threads_run(sides: tuple[Side, Side]) -> None:
    arena = Arena(64 << 20, 64 << 20)
    done, ticks = threading.Event(), 0

    def pin() -> None:
        sides[0].fabric.register(arena.address, 64 << 20, piece_bytes=64 << 20).close()
        done.set()

    thread = threading.Thread(target=pin)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks >= 3


def test_a_peer_whose_address_does_not_answer_lets_other_threads_run(sides: tuple[Side, Side]) -> None:
    pair, gid = sides[0].pair(), sides[1].pair().end.gid
    peer = replace(sides[1].pair().end, gid=gid[:-1] + bytes([gid[-1] ^ 0x55]))
    done, ticks, said = threading.Event(), 0, ""

    def reach() -> None:
        nonlocal said
        try:
            pair.connect(peer, KV_LANE)
        except FabricError as error:
            said = str(error)
        done.set()

    thread = threading.Thread(target=reach)
    began_s = time.monotonic()
    thread.start()
    while not done.wait(0.01):
        ticks += 1
    thread.join()
    if time.monotonic() - began_s < 0.5:
        pytest.skip("this network has an answer for any address at once")
    assert ticks >= 10 and "Connection timed out" in said


def test_an_address_that_has_moved_in_the_table_is_found_by_the_next_queue_pair(sides: tuple[Side, Side]) -> None:
    fabric, right, facts = sides[0].fabric, sides[0].fabric.choice, sides[0].fabric.facts
    moved = replace(right.gid, index=right.gid.index + 40)
    fabric.facts, fabric.choice = replace(facts, gids=(moved,), mtu_bytes=256), replace(right, gid=moved)
    fabric._home = replace(fabric._home, facts=fabric.facts, gid=moved)
    pair = sides[0].pair()
    assert (fabric.choice, fabric.facts) == (right, facts) and pair.end.mtu_bytes == facts.mtu_bytes
    connect(pair, sides[1].pair())


def test_a_port_or_a_gid_that_is_not_there_is_refused() -> None:
    with pytest.raises(FabricError, match=r"no_such_0 can't be opened: Failed to find device no_such_0"):
        open_fabric("no_such_0", 1)
    port = active_ports()[0]
    with pytest.raises(TransportRefused, match=rf"{port.name} has no GID 9999; it has"):
        open_fabric(port.device, port.port, 9_999)


def test_a_port_says_what_it_is(sides: tuple[Side, Side]) -> None:
    facts = sides[0].fabric.facts
    assert facts.is_active and facts.mtu_bytes in (256, 512, 1024, 2048, 4096)
    assert sides[0].fabric.choice.gid in facts.gids
    assert list(facts.gids) == read_table(SYSFS / facts.device / "ports" / str(facts.port))
    assert sides[0].fabric.choice.words.startswith(f"GID {sides[0].fabric.choice.gid.index} of")
    assert np.all([facts.region_bytes_max, facts.requests_max, facts.completions_max])
