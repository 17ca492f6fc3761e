"""Links of queue pairs: what they do when all goes well, over CNICs in one process: chains, classes, CNICs, limits."""

from __future__ import annotations

import time

import numpy as np
import pytest
from transport_kit import SENDER, cut, noise, own_key, scattered, stream_of, untouched
from verbs_raw_kit import await_true
from verbs_town import FAR, Town, route_of

from kvmoverd.adapters.transport.verbs.end import SEND_MAX
from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Received, Route, RouteLost, Send, SinkQuiet


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(29)


def test_a_layer_is_one_chain_with_one_doorbell_and_nobody_ever_waits_for_a_slot(
    town: Town, rng: np.random.Generator
) -> None:
    far, receiver = town.node(FAR, piece_bytes=1 << 20)
    _, sender = town.node(SENDER, piece_bytes=1 << 20)
    source, destination = noise(rng, 60_000), untouched(60_000)
    to_slices, from_slices = scattered(destination, rng, 300), scattered(source, rng, 300)
    receiver.expect(1, lambda layer, first_block: to_slices)
    assert sender.sent(sender.send(route_of(far), 1, 0, from_slices)).reason is Reason.OK
    tally, before = town.wire.tally, town.wire.tally.doorbells
    assert sender.sent(sender.send(route_of(far), 1, 1, from_slices)).reason is Reason.OK
    # Ask, grant, chain, applied.
    assert tally.doorbells - before == 4
    assert (stream_of(destination, to_slices) == stream_of(source, from_slices)).all()
    assert tally.waits_for_slots == 0


def test_a_chain_longer_than_the_send_queue_goes_in_parts(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER)
    size_bytes = 200_000
    source, destination = noise(rng, size_bytes), untouched(size_bytes)
    to_slices, from_slices = scattered(destination, rng, 3 * SEND_MAX), scattered(source, rng, 2 * SEND_MAX)
    receiver.expect(1, lambda layer, first_block: to_slices)
    ops = [sender.send(route_of(far), 1, layer, from_slices) for layer in range(3)]
    assert {sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert (stream_of(destination, to_slices) == stream_of(source, from_slices)).all()
    assert receiver.wait(Received, 3) == [Received(1, layer, 0, size_bytes) for layer in range(3)]


def test_each_class_has_a_link_of_its_own_with_its_marks(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    source, destination = noise(rng, 4 * 9_000).reshape(4, 9_000), untouched(4 * 9_000).reshape(4, 9_000)
    receiver.expect(1, lambda layer, first_block: cut(destination[layer], np.random.default_rng(layer), 5))
    sends = [
        Send(3_000 + layer, route_of(far), 1, layer, 0, cut(source[layer], rng, 5), kv_class)
        for layer, kv_class in enumerate(KvClass)
    ]
    sender.transport.submit(sends)
    assert {sender.sent(send.op_id).reason for send in sends} == {Reason.OK}
    assert (destination == source).all()
    assert [offer.kv_class for offer in town.desk.offers] == list(KvClass)
    assert len(near.fabrics[0].queue_pairs) == len(far.fabrics[0].queue_pairs) == 4
    assert len({offer.link_id for offer in town.desk.offers}) == 4


def test_a_sink_that_is_nearer_to_another_cnic_gets_its_layers_over_that_one_and_this_is_asked_once(
    town: Town, rng: np.random.Generator
) -> None:
    far, receiver = town.node(FAR, cnics=3)
    _, sender = town.node(SENDER, cnics=2)
    size_bytes, layers = 5_000, 6
    source, destination = noise(rng, size_bytes), untouched(size_bytes * layers).reshape(layers, size_bytes)
    at = destination.ctypes.data
    far.book.near.append((range(at, at + destination.nbytes), 2))
    receiver.expect(3, lambda layer, first_block: cut(destination[layer], np.random.default_rng(layer), 5))
    for layer in range(layers):
        assert sender.sent(sender.send(route_of(far), 3, layer, cut(source, rng, 4))).reason is Reason.OK
    assert (destination == source).all()
    assert [offer.peer_cnic for offer in town.desk.offers] == [0, 2]
    assert [len(fabric.queue_pairs) for fabric in far.fabrics] == [1, 0, 1]


def test_layers_leave_by_the_cnic_that_is_nearest_to_their_source(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR, cnics=1)
    near, sender = town.node(SENDER, cnics=3)
    source, destination = noise(rng, 5_000), untouched(5_000)
    near.book.near.append((range(source.ctypes.data, source.ctypes.data + 5_000), 2))
    slices = cut(destination, rng, 4)
    receiver.expect(1, lambda layer, first_block: slices)
    assert sender.sent(sender.send(route_of(far), 1, 0, cut(source, rng, 4))).reason is Reason.OK
    assert [len(fabric.queue_pairs) for fabric in near.fabrics] == [0, 0, 1]
    assert (destination == source).all()


def test_within_a_process_the_cnic_that_is_nearest_to_the_sink_copies(town: Town, rng: np.random.Generator) -> None:
    node, end = town.node(SENDER, cnics=3)
    end.lets_in = None
    source, destination = noise(rng, 5_000), untouched(5_000)
    node.book.near.append((range(destination.ctypes.data, destination.ctypes.data + 5_000), 1))
    slices = cut(destination, rng, 4)
    end.expect(5, lambda layer, first_block: slices)
    assert end.sent(end.send(None, 5, 0, cut(source, rng, 4))).reason is Reason.OK
    assert (destination == source).all() and len(node.fabrics[1].queue_pairs) == 1
    assert town.desk.offers == [] and town.wire.tally.messages == 0


def test_a_source_that_no_cnic_may_read_fails_alone(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    bad, good, destination = noise(rng, 5_000), noise(rng, 5_000), untouched(5_000)
    near.book.forbidden = range(bad.ctypes.data, bad.ctypes.data + 5_000)
    slices = cut(destination, rng, 4)
    receiver.expect(1, lambda layer, first_block: slices)
    ops = [sender.send(route_of(far), 1, layer, cut(source, rng, 4)) for layer, source in enumerate([bad, good])]
    refused = sender.sent(ops[0])
    assert refused.reason is Reason.INTERNAL and "are not registered" in refused.message
    assert sender.sent(ops[1]).reason is Reason.OK and (destination == good).all()
    assert sender.sent(sender.send(route_of(far), 1, 0, cut(good, rng, 4))).reason is Reason.OK
    assert len(town.desk.offers) == 1


def test_a_sink_whose_memory_is_not_registered_refuses_and_its_layer_may_come_again(
    town: Town, rng: np.random.Generator
) -> None:
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER)
    source, destination = noise(rng, 5_000), untouched(5_000)
    slices = cut(destination, rng, 4)
    receiver.expect(1, lambda layer, first_block: slices)
    far.book.forbidden = range(destination.ctypes.data, destination.ctypes.data + 5_000)
    refused = sender.sent(sender.send(route_of(far), 1, 0, cut(source, rng, 4)))
    assert refused.reason is Reason.INTERNAL and "NotRegistered" in refused.message
    far.book.forbidden = range(0)
    assert sender.sent(sender.send(route_of(far), 1, 0, cut(source, rng, 4))).reason is Reason.OK


def test_more_sends_than_the_queue_takes_are_refused_at_once(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER, queue_max=20)
    town.wire.hold()
    source = cut(noise(rng, 100), rng, 3)
    memory = untouched(100)
    slices = cut(memory, rng, 2)
    receiver.expect(1, lambda layer, first_block: slices)
    ops = [sender.send(route_of(far), 1, layer, source) for layer in range(25)]
    refused = [sender.sent(op_id) for op_id in ops[20:]]
    assert {done.reason for done in refused} == {Reason.POOL_EXHAUSTED}
    assert "20 sends to b wait or run, transport.queue_max is 20" in refused[0].message
    town.wire.release()
    assert {sender.sent(op_id).reason for op_id in ops[:20]} == {Reason.OK}


def test_queue_pairs_beyond_the_limit_are_refused_on_both_sides_and_nothing_else_suffers(
    town: Town, rng: np.random.Generator
) -> None:
    far, receiver = town.node(FAR, qps_max=2)
    near, sender = town.node(SENDER, qps_max=3)
    source, destination = cut(noise(rng, 100), rng, 3), untouched(100)
    slices = cut(destination, rng, 2)
    receiver.expect(1, lambda layer, first_block: slices)
    reasons, words = [], []
    for layer, kv_class in enumerate(KvClass):
        sender.transport.submit([Send(5_000 + layer, route_of(far), 1, layer, 0, source, kv_class)])
        done = sender.sent(5_000 + layer)
        reasons.append(done.reason)
        words.append(done.message)
    assert reasons == [Reason.OK, Reason.OK, Reason.POOL_EXHAUSTED, Reason.POOL_EXHAUSTED]
    assert "transport.verbs.qps_max" in words[2]
    assert sender.of(RouteLost) == []
    assert sender.sent(sender.send(route_of(far), 1, 9, source)).reason is Reason.OK
    sender.transport.submit([Send(5_010, None, 1, 0, 0, source)])
    assert len(near.fabrics[0].queue_pairs) <= 3


def test_a_node_that_refuses_is_told_as_lost_once_and_its_sends_end(town: Town, rng: np.random.Generator) -> None:
    _, sender = town.node(SENDER)
    source = cut(noise(rng, 100), rng, 3)
    route = Route("c", "boot-9", "verbs:1", own_key("boot-1"))
    sender.transport.submit([Send(6_000 + layer, route, 1, layer, 0, source) for layer in range(5)])
    ended = [sender.sent(6_000 + layer) for layer in range(5)]
    assert {done.reason for done in ended} == {Reason.PEER_LOST} and "nobody is c of boot boot-9" in ended[0].message
    assert [(lost.node, lost.boot_id, lost.inbound) for lost in sender.wait(RouteLost, 1)] == [("c", "boot-9", False)]


def test_a_node_that_is_full_is_not_told_as_lost(town: Town, rng: np.random.Generator) -> None:
    far, _ = town.node(FAR)
    _, sender = town.node(SENDER)
    town.desk.refusal = PoolExhausted(purpose="transport.verbs.qps_max", asked=1, free=0)
    done = sender.sent(sender.send(route_of(far), 1, 0, cut(noise(rng, 100), rng, 3)))
    assert done.reason is Reason.POOL_EXHAUSTED and "qps_max" in done.message
    sender.pump(0.05)
    assert sender.of(RouteLost) == []


def test_an_offer_that_nobody_answers_ends_after_the_timeout(town: Town, rng: np.random.Generator) -> None:
    far, _ = town.node(FAR)
    near, sender = town.node(SENDER, io_timeout_s=0.3)
    town.desk.silent = True
    began_s = time.monotonic()
    done = sender.sent(sender.send(route_of(far), 1, 0, cut(noise(rng, 100), rng, 3)))
    assert done.reason is Reason.PEER_LOST and "no answer for 0.3 s" in done.message
    assert 0.25 < time.monotonic() - began_s < 3.0
    assert near.fabrics[0].queue_pairs == [] and len(sender.wait(RouteLost, 1)) == 1


@pytest.mark.parametrize("endpoint", ["10.0.0.1:9401", "verbs:", "verbs:0", "verbs:-1", "verbs:257", "verbs:x"])
def test_an_endpoint_that_is_none_of_verbs_is_a_peer_lost(town: Town, rng: np.random.Generator, endpoint: str) -> None:
    _, sender = town.node(SENDER)
    done = sender.sent(sender.send(Route("c", "boot-9", endpoint, own_key("boot-1")), 1, 0, cut(noise(rng, 9), rng, 1)))
    assert done.reason is Reason.PEER_LOST and endpoint in done.message


def test_numbers_that_the_words_have_no_room_for_end_their_send_only(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER)
    source: IoVec = cut(noise(rng, 100), rng, 2)
    done = sender.sent(sender.send(route_of(far), 1, 1 << 32, source))
    assert done.reason is Reason.INTERNAL and str(1 << 32) in done.message
    much = np.array([[8, 1 << 62]], np.uint64)
    done = sender.sent(sender.send(route_of(far), 1, 1, much))
    assert done.reason is Reason.INTERNAL and str(1 << 62) in done.message
    memory = untouched(100)
    slices = cut(memory, rng, 2)
    receiver.expect(1, lambda layer, first_block: slices)
    assert sender.sent(sender.send(route_of(far), 1, 1, source)).reason is Reason.OK


def test_facts_and_bytes_are_counted_by_what_was_applied(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    memory = untouched(1_000)
    slices = cut(memory, rng, 2)
    receiver.expect(1, lambda layer, first_block: slices)
    source = cut(noise(rng, 1_000), rng, 3)
    for layer in range(4):
        sender.sent(sender.send(route_of(far), 1, layer, source))
    sender.sent(sender.send(route_of(far), 2, 0, source))
    assert near.transport.sent_bytes() == {"b": 4_000}
    await_true(lambda: near.transport.facts.queue_pairs == 1, "a queue pair")
    facts = far.transport.facts
    await_true(lambda: far.transport.facts.links_in == 1, "a link")
    assert (facts.fences, facts.reconnects, facts.queue_pairs_max) == (0, 0, 64)
    assert near.transport.endpoint == "verbs:1" and near.transport.lane_text == "SL 2, DSCP 8"


def test_a_forgotten_sink_of_this_process_is_quiet_once_its_copy_has_stopped(
    town: Town, rng: np.random.Generator
) -> None:
    _, end = town.node(SENDER)
    end.lets_in = None
    town.wire.hold()
    source, destination = noise(rng, 50_000), untouched(50_000)
    slices = scattered(destination, rng, 40)
    end.expect(1, lambda layer, first_block: slices)
    op_id = end.send(None, 1, 0, cut(source, rng, 30))
    await_true(lambda: town.wire.step(10) == 10, "a chain that is posted")
    end.transport.forget(1)
    end.pump(0.05)
    assert end.of(SinkQuiet) == []
    town.wire.release()
    assert end.wait(SinkQuiet, 1) == [SinkQuiet(1)]
    assert end.sent(op_id).reason is Reason.CANCELLED
    assert end.of(Received) == []


def test_a_loopback_that_breaks_ends_what_was_under_way_and_the_next_one_is_new(
    town: Town, rng: np.random.Generator
) -> None:
    node, end = town.node(SENDER)
    end.lets_in = None
    town.wire.hold()
    source, destination = noise(rng, 5_000), untouched(5_000)
    slices = scattered(destination, rng, 4)
    end.expect(1, lambda layer, first_block: slices)
    op_id = end.send(None, 1, 0, cut(source, rng, 3))
    await_true(lambda: town.wire.step() == 1, "a chain that is posted")
    town.wire.fail_at(1)
    town.wire.release()
    done = end.sent(op_id)
    assert done.reason is Reason.INTERNAL and "loopback of a0:1" in done.message
    assert end.sent(end.send(None, 1, 0, cut(source, rng, 3))).reason is Reason.OK
    assert (stream_of(destination, slices) == source).all() and len(node.fabrics[0].queue_pairs) == 1
    await_true(lambda: node.transport.facts.loop_breaks == 1, "the count")


def test_a_loopback_that_does_not_move_is_fenced_when_its_sink_is_forgotten(
    town: Town, rng: np.random.Generator
) -> None:
    _, end = town.node(SENDER, fence_s=0.2)
    end.lets_in = None
    town.wire.hold()
    destination = untouched(5_000)
    slices = scattered(destination, rng, 4)
    end.expect(1, lambda layer, first_block: slices)
    op_id = end.send(None, 1, 0, cut(noise(rng, 5_000), rng, 3))
    await_true(lambda: town.wire.step() == 1, "a chain that is posted")
    end.transport.forget(1)
    end.wait(SinkQuiet, 1)
    destination[:] = 0xEE
    town.wire.settle()
    assert (destination == 0xEE).all()
    assert end.sent(op_id).reason is Reason.CANCELLED


def test_a_link_without_work_says_goodbye_on_both_sides_and_the_next_send_makes_a_new_one(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmoverd.adapters.transport.verbs.outgoing.LINGER_S", 0.05)
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    source, destination = noise(rng, 1_000), untouched(1_000)
    to_slices, from_slices = cut(destination, rng, 2), cut(source, rng, 3)
    receiver.expect(1, lambda layer, first_block: to_slices)
    for layer in range(2):
        assert sender.sent(sender.send(route_of(far), 1, layer, from_slices)).reason is Reason.OK
        await_true(lambda: near.fabrics[0].queue_pairs == [] == far.fabrics[0].queue_pairs, "a goodbye")
    assert sender.of(RouteLost) == [] and receiver.of(RouteLost) == []
    assert near.transport.facts.reconnects == far.transport.facts.fences == 0
    assert len(town.desk.offers) == 2


def test_sends_to_a_node_that_is_gone_end_at_once_and_its_layers_are_given_up(
    town: Town, rng: np.random.Generator
) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    town.wire.hold()
    source, destination = noise(rng, 9_000), untouched(9_000)
    to_slices, from_slices = scattered(destination, rng, 9), scattered(source, rng, 3)
    receiver.expect(1, lambda layer, first_block: to_slices)
    ops = [sender.send(route_of(far), 1, layer, from_slices) for layer in range(3)]
    await_true(lambda: town.wire.step() >= 0 and town.wire.tally.written_bytes > 0, "the first write")
    near.transport.peer_gone(FAR, "its beat stopped")
    ended = [sender.sent(op_id) for op_id in ops]
    assert {done.reason for done in ended} == {Reason.PEER_LOST} and "its beat stopped" in ended[0].message
    assert near.fabrics[0].queue_pairs == [] and sender.of(RouteLost) == []
    town.wire.release()
    assert sender.sent(sender.send(route_of(far), 1, 2, from_slices)).reason is Reason.OK
