"""One suite over every transport: what arrives, what is refused, and that a forgotten sink is never written again."""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from markers import HAS_RXE, needs_ipv6, needs_rxe, needs_vm_readv
from transport_kit import SENDER, Pair, cut, make_pair, noise, untouched

from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Received, Send, Sender, Sent, Sink, SinkQuiet

KINDS = [
    "loopback",
    "null",
    "shm-local",
    "shm-local-kernel",
    pytest.param("shm-remote", marks=needs_vm_readv),
    pytest.param("shm-remote-2", marks=needs_vm_readv),
    "tcp4",
    "tcp4-2",
    pytest.param("tcp6", marks=needs_ipv6),
    "verbs-fake",
    "verbs-fake-2",
    "verbs-fake-local",
    pytest.param("verbs", marks=needs_rxe),
    pytest.param("verbs-local", marks=needs_rxe),
]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = make_pair(request.param, tmp_path)
    yield made
    made.close()


def timed_s(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(("from_pieces", "to_pieces"), [(1, 1), (1, 700), (900, 2), (1_700, 1_500)])
def test_a_layer_arrives_byte_by_byte_however_both_sides_cut_it(
    pair: Pair, rng: np.random.Generator, from_pieces: int, to_pieces: int
) -> None:
    source, destination = noise(rng, 400_001), untouched(400_001)
    slices = cut(destination, rng, to_pieces)
    pair.receiver.expect(5, lambda layer, first_block: slices)
    op_id = pair.sender.send(pair.route, 5, 3, cut(source, rng, from_pieces), first_block=9)
    done = pair.sender.sent(op_id)
    assert (done.reason, done.moved_bytes, done.message) == (Reason.OK, 400_001, "")
    assert pair.receiver.wait(Received, 1) == [Received(5, 3, 9, 400_001)]
    assert pair.has(destination, source)


def test_every_layer_of_a_sink_is_applied_once_and_over_one_connection_in_the_order_given(
    pair: Pair, rng: np.random.Generator
) -> None:
    layers, size_bytes = 40, 30_000
    sources = noise(rng, layers * size_bytes).reshape(layers, size_bytes)
    destination = untouched(layers * size_bytes).reshape(layers, size_bytes)
    pair.receiver.expect(1, lambda layer, first_block: cut(destination[layer], np.random.default_rng(layer), 30))
    sends = [Send(1_000_000 + layer, pair.route, 1, layer, 0, cut(sources[layer], rng, 20)) for layer in range(layers)]
    pair.sender.transport.submit(sends)
    received = pair.receiver.wait(Received, layers)
    ended = pair.sender.wait(Sent, layers)
    assert sorted(event.layer for event in received) == list(range(layers))
    assert {done.op_id: done.reason for done in ended} == {send.op_id: Reason.OK for send in sends}
    if pair.in_order:
        assert [event.layer for event in received] == list(range(layers))
        assert [done.op_id for done in ended] == [send.op_id for send in sends]
    assert pair.has(destination, sources)


def test_every_write_is_seen_by_the_time_its_send_is_complete(pair: Pair, rng: np.random.Generator) -> None:
    destination = untouched(100_000)
    slices = cut(destination, rng, 13)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    for layer in range(8):
        source = noise(rng, 100_000)
        assert pair.sender.sent(pair.sender.send(pair.route, 1, layer, cut(source, rng, 7))).reason is Reason.OK
        assert pair.has(destination, source)
        source[:] = 0


def test_sinks_do_not_mix(pair: Pair, rng: np.random.Generator) -> None:
    sources = noise(rng, 6 * 50_000).reshape(6, 50_000)
    destination = untouched(6 * 50_000).reshape(6, 50_000)
    for sink_id in range(6):
        slices = cut(destination[sink_id], rng, 5)
        pair.receiver.expect(sink_id, lambda layer, first_block, slices=slices: slices)  # type: ignore[misc]
    ops = [pair.sender.send(pair.route, sink_id, 0, cut(sources[sink_id], rng, 9)) for sink_id in (3, 0, 5, 2, 1, 4)]
    assert {pair.sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert pair.has(destination, sources)


def test_a_layer_without_a_byte_is_complete_at_once(pair: Pair) -> None:
    nothing: IoVec = np.zeros((0, 2), dtype=np.uint64)
    pair.receiver.expect(1, lambda layer, first_block: nothing)
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, nothing)).reason is Reason.OK
    assert pair.receiver.wait(Received, 1) == [Received(1, 0, 0, 0)]


@pytest.mark.parametrize("sent_bytes", [0, 49_999, 50_001, 2_500_000])
def test_a_frame_of_another_size_is_refused_and_touches_nothing(
    pair: Pair, rng: np.random.Generator, sent_bytes: int
) -> None:
    destination = untouched(50_000)
    slices = cut(destination, rng, 11)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    source = cut(noise(rng, sent_bytes), rng, 4) if sent_bytes else np.zeros((0, 2), dtype=np.uint64)
    done = pair.sender.sent(pair.sender.send(pair.route, 1, 0, source))
    assert done.reason is Reason.INTERNAL and "50000 bytes" in done.message and str(sent_bytes) in done.message
    assert (destination == untouched(50_000)).all()
    good = noise(rng, 50_000)
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(good, rng, 4))).reason is Reason.OK
    assert pair.has(destination, good)


def test_an_unknown_sink_cancels_the_send_and_the_next_one_works(pair: Pair, rng: np.random.Generator) -> None:
    source, destination = noise(rng, 3_000_000), untouched(3_000_000)
    slices = cut(destination, rng, 3)
    pair.receiver.expect(2, lambda layer, first_block: slices)
    lost = pair.sender.send(pair.route, 77, 0, cut(source, rng, 5))
    kept = pair.sender.send(pair.route, 2, 0, cut(source, rng, 5))
    done = pair.sender.sent(lost)
    assert done.reason is Reason.CANCELLED and "sink 77" in done.message
    assert pair.sender.sent(kept).reason is Reason.OK
    assert pair.has(destination, source)


def test_a_layer_that_the_sink_does_not_allow_is_refused(pair: Pair, rng: np.random.Generator) -> None:
    destination = untouched(1_000)
    slices = cut(destination, rng, 3)
    pair.receiver.expect(1, lambda layer, first_block: slices if (layer, first_block) == (4, 8) else None)
    source = cut(noise(rng, 1_000), rng, 2)
    refused = pair.sender.sent(pair.sender.send(pair.route, 1, 4, source, first_block=7))
    assert refused.reason is Reason.CANCELLED and "layer 4 at block 7" in refused.message
    assert (destination == untouched(1_000)).all()
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 4, source, first_block=8)).reason is Reason.OK


@pytest.mark.parametrize("owner", [SENDER, ("a", "boot-3"), ("c", "boot-1"), None], ids=str)
def test_a_sink_lets_in_its_own_sender_and_nobody_else(
    pair: Pair, rng: np.random.Generator, owner: Sender | None
) -> None:
    source, destination = noise(rng, 70_000), untouched(70_000)
    slices, asked = cut(destination, rng, 9), list[int]()

    def resolve(layer: int, first_block: int) -> IoVec | None:
        asked.append(layer)
        return slices

    pair.receiver.transport.expect(Sink(1, resolve, owner))
    done = pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(source, rng, 4)))
    if owner == pair.receiver.lets_in:
        assert done.reason is Reason.OK and pair.has(destination, source)
        return
    assert done.reason is Reason.CANCELLED and "sink 1" in done.message
    assert asked == [] and (destination == untouched(70_000)).all()
    pair.receiver.expect(2, resolve)
    assert pair.sender.sent(pair.sender.send(pair.route, 2, 0, cut(source, rng, 4))).reason is Reason.OK
    assert pair.has(destination, source)


def test_a_layer_that_comes_twice_in_one_burst_is_applied_once(pair: Pair, rng: np.random.Generator) -> None:
    """Nobody has polled in between: it is the transport that knows what has come."""
    sources, destination = noise(rng, 3 * 200_000).reshape(3, 200_000), untouched(2 * 200_000).reshape(2, 200_000)
    slices = [cut(layer, rng, 7) for layer in destination]
    pair.receiver.expect(1, lambda layer, first_block: slices[layer])
    bursts = [(0, 0), (1, 1), (0, 2), (1, 2)]
    sends = [
        Send(2_000_000 + n, pair.route, 1, layer, 0, cut(sources[source], rng, 5))
        for n, (layer, source) in enumerate(bursts)
    ]
    pair.sender.transport.submit(sends)
    reasons = [pair.sender.sent(send.op_id).reason for send in sends]
    assert {reasons[0], reasons[2]} == {reasons[1], reasons[3]} == {Reason.OK, Reason.CANCELLED}
    if pair.in_order:
        assert reasons == [Reason.OK, Reason.OK, Reason.CANCELLED, Reason.CANCELLED]
    for layer in range(2):
        applied = next(source for n, (at, source) in enumerate(bursts) if at == layer and reasons[n] is Reason.OK)
        assert pair.has(destination[layer], sources[applied])
    assert sorted(event.layer for event in pair.receiver.wait(Received, 2)) == [0, 1]
    pair.receiver.pump(0)
    assert len(pair.receiver.of(Received)) == 2


def test_a_sink_that_is_open_is_not_opened_again(pair: Pair) -> None:
    pair.receiver.expect(1, lambda layer, first_block: None)
    with pytest.raises(AssertionError, match="sink 1 is open already"):
        pair.receiver.expect(1, lambda layer, first_block: None)


def test_forgetting_an_idle_sink_makes_it_quiet_and_its_number_free(pair: Pair, rng: np.random.Generator) -> None:
    pair.receiver.expect(1, lambda layer, first_block: None)
    pair.receiver.transport.forget(1)
    assert pair.receiver.wait(SinkQuiet, 1) == [SinkQuiet(1)]
    with pytest.raises(AssertionError, match="sink 1 is not open"):
        pair.receiver.transport.forget(1)
    pair.receiver.expect(1, lambda layer, first_block: None)


def test_a_forgotten_sink_is_not_written_after_it_is_quiet(pair: Pair, rng: np.random.Generator) -> None:
    size_bytes, layers = 6_000_000, 12
    destination = untouched(size_bytes)
    slices = cut(destination, rng, 900)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    source = cut(noise(rng, size_bytes), rng, 700)
    ops = [pair.sender.send(pair.route, 1, layer, source) for layer in range(layers)]
    pair.receiver.wait(Received, 1)
    pair.receiver.transport.forget(1)
    pair.receiver.wait(SinkQuiet, 1)
    destination[:] = 0xEE
    reasons = [pair.sender.sent(op_id).reason for op_id in ops]
    time.sleep(0.05)
    assert (destination == untouched(size_bytes)).all()
    assert set(reasons) <= {Reason.OK, Reason.CANCELLED}
    if pair.in_order:
        assert reasons == sorted(reasons, key=lambda reason: reason is not Reason.OK)


def test_a_resolve_that_fails_does_not_leave_its_send_open(pair: Pair, rng: np.random.Generator) -> None:
    def resolve(layer: int, first_block: int) -> IoVec | None:
        raise LookupError("no such layer")

    pair.receiver.expect(1, resolve)
    done = pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(noise(rng, 100), rng, 2)))
    assert done.reason in (Reason.INTERNAL, Reason.PEER_LOST) and done.message


def test_the_descriptor_is_readable_exactly_while_events_wait(pair: Pair, rng: np.random.Generator) -> None:
    for sink_id in range(5):
        pair.receiver.expect(sink_id, lambda layer, first_block: None)
        pair.receiver.transport.forget(sink_id)
    assert len(pair.receiver.transport.poll(3)) == 3
    pair.receiver.pump(0)
    assert len(pair.receiver.events) == 2
    fd = pair.receiver.transport.fileno()
    assert os.get_blocking(fd) is False
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)


def test_a_closed_transport_ends_every_send_and_leaves_no_descriptor_and_no_thread(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    source, destination = noise(rng, 2_000_000), untouched(2_000_000)
    kinds = ["loopback", "null", "shm-local", "shm-remote", "tcp4", "tcp4-2", "verbs-fake", "verbs-fake-local"]
    for kind in [*kinds, *(("verbs", "verbs-local") if HAS_RXE else ())]:
        descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
        pair = make_pair(kind, tmp_path)
        slices = cut(destination, rng, 10)
        pair.receiver.expect(1, lambda layer, first_block, slices=slices: slices)  # type: ignore[misc]
        ops = [pair.sender.send(pair.route, 1, layer, cut(source, rng, 10)) for layer in range(30)]
        pair.close()
        ops.append(pair.sender.send(pair.route, 1, 99, cut(source, rng, 10)))
        ended = {event.op_id: event.reason for event in pair.sender.transport.poll(1_000) if isinstance(event, Sent)}
        assert set(ended) == set(ops)
        assert set(ended.values()) <= {Reason.OK, Reason.SHUTTING_DOWN, Reason.PEER_LOST}
        assert ended[ops[-1]] is Reason.SHUTTING_DOWN
        assert set(os.listdir("/proc/self/fd")) == descriptors
        assert set(threading.enumerate()) == threads
        assert pair.receiver.transport.close(0.0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loopback"])
def test_neither_submit_nor_poll_keeps_the_loop_for_a_millisecond(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """64 sends of 500 slices, the quickest of some rounds: what the calls cost, not what else the machine does."""
    pair, source, destination = make_pair(kind, tmp_path), noise(rng, 50_000), untouched(50_000)
    from_slices, to_slices = cut(source, rng, 500), cut(destination, rng, 500)
    pair.receiver.expect(1, lambda layer, first_block: to_slices)
    submits_s, polls_s, layers = [], [], itertools.count()
    # The fakes move row by row in this very process: a round takes them a second.
    for _ in range(3 if kind.startswith("verbs-fake") else 15):
        sends = [Send(layer, pair.route, 1, layer, 0, from_slices) for layer in itertools.islice(layers, 64)]
        submits_s.append(timed_s(lambda sends=sends: pair.sender.transport.submit(sends)))  # type: ignore[misc]
        pair.sender.events.clear()
        while len(pair.sender.of(Sent)) < 64:
            assert select.select([pair.sender.transport.fileno()], [], [], 5.0)[0]
            polls_s.append(timed_s(lambda: pair.sender.events.extend(pair.sender.transport.poll(256))))
    assert {event.reason for event in pair.sender.of(Sent)} == {Reason.OK}
    assert min(submits_s) < 0.001 and sorted(polls_s)[len(polls_s) // 2] < 0.001
    pair.close()
