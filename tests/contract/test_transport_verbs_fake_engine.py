"""The thread of the links, and ends that nobody is at any more: whatever fails or is left lying, the others go on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transport_kit import SENDER, End, cut, noise, untouched
from verbs_kit import FakeQueuePair, FakeWire
from verbs_raw_kit import RawAsker, await_true
from verbs_town import FAR, Town, route_of

from kvmoverd.adapters.transport.threads import Threads
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.messages import GRANT_BYTES, Ask, Grant, Refused
from kvmoverd.core.errors import KvmoverError, PoolExhausted, TransportRefused
from kvmoverd.core.qos import KV_LANE, KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answer, Offer, PathEnd
from kvmoverd.ports.transport import IoVec, Sent, SinkQuiet


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(37)


def spread(memory: Any, pieces: int) -> IoVec:
    """Single bytes that don't touch."""
    starts = memory.ctypes.data + 2 * np.arange(pieces, dtype=np.uint64)
    return np.stack([starts, np.ones(pieces, np.uint64)], axis=1)


def works(sender: End, receiver: End, route: Any, rng: np.random.Generator, sink_id: int = 9) -> bool:
    slices = cut(untouched(1_000), rng, 3)
    receiver.expect(sink_id, lambda layer, first_block: slices)
    return sender.sent(sender.send(route, sink_id, 0, cut(noise(rng, 1_000), rng, 2))).reason is Reason.OK


def test_a_command_that_fails_ends_no_link_and_is_logged(
    town: Town, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    near.transport._engine.post(lambda now_s: 1 // 0)  # type: ignore[arg-type,func-returns-value]
    assert works(sender, receiver, route_of(far), rng)
    assert "ZeroDivisionError" in caplog.text


def test_when_the_thread_itself_fails_every_send_and_offer_ends_and_so_do_later_ones(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    town.wire.hold()
    receiver.expect(1, lambda layer, first_block: cut(untouched(1_000), rng, 2))
    waiting = sender.send(route_of(far), 1, 0, cut(noise(rng, 1_000), rng, 2))
    await_true(lambda: bool(near.fabrics[0].queue_pairs), "a queue pair")
    monkeypatch.setattr(near.transport._engine, "_look", lambda now_s: 1 // 0)
    near.transport.count()
    assert sender.sent(waiting).reason is Reason.SHUTTING_DOWN
    assert sender.sent(sender.send(route_of(far), 1, 1, cut(noise(rng, 1_000), rng, 2))).reason is Reason.SHUTTING_DOWN
    told: list[object] = []
    await_true(lambda: not near.transport._engine.post(lambda now_s: None), "the end of the thread")
    near.transport.accept(FAR, town.desk.offers[0], told.append)
    assert isinstance(told[0], TransportRefused) and near.fabrics[0].queue_pairs == []
    assert "no link works any more" in caplog.text


@pytest.mark.parametrize("pieces", [10, 20_000], ids=["wholly granted", "granted in part"])
def test_a_sink_of_an_end_that_the_device_keeps_is_not_quiet_before_it_is_gone(
    town: Town, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    node, far = town.node(FAR, piece_bytes=1 << 20)
    slices = spread(untouched(2 * pieces), pieces)
    far.expect(1, lambda layer, first_block: slices)
    asker = RawAsker(town.wire, node.transport, SENDER).connected()
    asker.say(Ask(1, 1, 0, 0, pieces))
    asker.await_true(lambda: bool(asker.heard) and isinstance(asker.heard[0], Grant), "a grant")
    node.fabrics[0].refuses_destroy = True
    node.transport.peer_gone(SENDER, "its beat stopped")
    node.transport.forget(1)
    with pytest.raises(AssertionError):
        far.wait(SinkQuiet, 1, timeout_s=0.2)
    node.fabrics[0].refuses_destroy = False
    assert far.wait(SinkQuiet, 1, timeout_s=2.0) == [SinkQuiet(1)]
    assert caplog.records == []
    asker.close()


def test_an_end_that_nobody_speaks_to_is_destroyed_after_a_while(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmoverd.adapters.transport.verbs.incoming.SILENCE_S", 0.1)
    node, _ = town.node(FAR)
    # As after a dial whose answer got lost: its sender never comes.
    asker = RawAsker(town.wire, node.transport, SENDER)
    assert isinstance(asker.answer, Answer) and len(node.fabrics[0].queue_pairs) == 1
    await_true(lambda: node.fabrics[0].queue_pairs == [], "the end of the queue pair")
    assert node.transport.facts.fences == 0
    asker.close()


def test_one_node_gets_half_of_the_queue_pairs_and_another_is_served(town: Town) -> None:
    node, _ = town.node(FAR, qps_max=10)
    askers = [RawAsker(town.wire, node.transport, SENDER, link_id=number) for number in range(6)]
    assert [isinstance(asker.answer, Answer) for asker in askers] == [True] * 5 + [False]
    assert isinstance(askers[-1].answer, PoolExhausted)
    other = RawAsker(town.wire, node.transport, ("c", "boot-3"))
    assert isinstance(other.answer, Answer)
    for asker in (*askers, other):
        asker.close()


def test_one_node_gets_no_more_links_than_there_are_classes_and_pairs_of_cnics(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmoverd.adapters.transport.verbs.acceptors.PEER_CNICS_MAX", 1)
    node, _ = town.node(FAR, qps_max=64)
    askers = [RawAsker(town.wire, node.transport, SENDER, link_id=number) for number in range(len(KvClass) + 1)]
    assert [isinstance(asker.answer, Answer) for asker in askers] == [True] * len(KvClass) + [False]
    assert isinstance(askers[-1].answer, PoolExhausted)
    for asker in askers:
        asker.close()


def test_a_layer_in_more_places_than_the_words_have_room_for_is_refused_and_the_link_lives(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmoverd.adapters.transport.verbs.claims.SLICES_MAX", 100)
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER)
    pieces = 101
    slices = spread(untouched(2 * pieces), pieces)
    receiver.expect(1, lambda layer, first_block: slices)
    ended = sender.sent(sender.send(route_of(far), 1, 0, cut(noise(rng, pieces), rng, 2)))
    assert ended.reason is Reason.INTERNAL and "101 places, at most 100" in ended.message
    assert works(sender, receiver, route_of(far), rng)
    assert len(town.desk.offers) == 1


def test_where_no_thread_can_be_started_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeWire() as wire:
        town = Town(wire)
        monkeypatch.setattr(Threads, "start", lambda self, name, run: False)
        closed: list[str] = []
        monkeypatch.setattr("verbs_kit.FakeFabric.close", lambda self: closed.append(self.name))
        with pytest.raises(TransportRefused):
            town.node(FAR, cnics=2)
        assert closed == ["b0:1", "b1:1"]


def test_cnics_stay_open_where_memory_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeWire() as wire:
        node, _ = Town(wire).node(FAR)
        monkeypatch.setattr(node.book, "close", lambda: False)
        assert node.transport.close(5.0), "no thread and no queue pair is left"
        monkeypatch.undo()
        assert node.book.close()
        node.fabrics[0].close()


def test_a_refusal_names_no_frame_twice(town: Town) -> None:
    """A frame that was granted in part is refused at once when its sink is forgotten: nothing can have been written."""
    node, far = town.node(FAR, piece_bytes=1 << 20)
    slices = spread(untouched(40_000), 20_000)
    far.expect(1, lambda layer, first_block: slices)
    asker = RawAsker(town.wire, node.transport, SENDER).connected()
    asker.say(Ask(1, 1, 0, 0, 20_000))
    await_true(lambda: node.transport._acceptors.links == 1, "the link")
    asker.hear(Grant)
    node.transport.forget(1)
    assert len(asker.hear(Refused)) == 1
    far.wait(SinkQuiet, 1)
    asker.close()


class Slow:
    """Ends whose peer has this GID take a while to connect, and can't be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, gid: bytes) -> None:
        self.begun: list[int] = []
        real = FakeQueuePair.connect

        def connect(pair: FakeQueuePair, peer: PathEnd, marks: Marks) -> None:
            if peer.gid == gid:
                self.begun.append(pair.number)
                time.sleep(seconds)
                raise FabricError("the peer's address does not answer")
            real(pair, peer, marks)

        monkeypatch.setattr(FakeQueuePair, "connect", connect)


def offered(asker: RawAsker, gid: bytes) -> PathEnd:
    return replace(asker.end.path, gid=gid)


NOBODY = bytes(15) + b"\x63"


def test_an_offer_whose_address_does_not_answer_holds_up_nobody_and_is_answered(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, 0.5, NOBODY)
    far, receiver = town.node(FAR)
    _, sender = town.node(SENDER)
    probe = RawAsker(town.wire, far.transport, ("c", "boot-3"))
    told: list[Answer | KvmoverError] = []
    began_s = time.monotonic()
    offers = [
        Offer(1, number, 1, KvClass.LAYERS, KV_LANE, 0, offered(probe, NOBODY), 16, GRANT_BYTES) for number in range(3)
    ]
    for offer in offers:
        far.transport.accept(("d", "boot-4"), offer, told.append)
    for sink_id in range(10, 30):
        assert works(sender, receiver, route_of(far), rng, sink_id)
    assert len(slow.begun) == 3 and not told and time.monotonic() - began_s < 0.5
    await_true(lambda: len(told) == 3, "the answers")
    assert all("address does not answer" in str(answer) for answer in told)
    await_true(lambda: far.transport.facts.links_in == 2, "the links that are left")
    probe.close()


@pytest.mark.parametrize("how", ["anew", "gone", "close"])
def test_what_is_being_connected_is_destroyed_only_afterwards_and_its_offer_is_answered(
    town: Town, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow(monkeypatch, 0.3, NOBODY)
    far, _ = town.node(FAR)
    probe = RawAsker(town.wire, far.transport, ("c", "boot-3"))
    told: list[Answer | KvmoverError] = []
    offer = Offer(1, 5, 1, KvClass.LAYERS, KV_LANE, 0, offered(probe, NOBODY), 16, GRANT_BYTES)
    far.transport.accept(SENDER, offer, told.append)
    await_true(lambda: len(slow.begun) == 1, "the connecting")
    match how:
        case "anew":
            far.transport.accept(SENDER, replace(offer, generation=2, end=probe.end.path), told.append)
            await_true(lambda: len(told) == 2, "two answers")
            assert "can't be destroyed yet" in str(told[1])
        case "gone":
            far.transport.peer_gone(SENDER, "its beat stopped")
            await_true(lambda: len(told) == 1, "an answer")
        case _:
            assert far.transport.close(5.0)
    assert "has ended the link" in str(told[0])
    if how != "close":
        assert slow.begun[0] in [pair.number for pair in far.fabrics[0].queue_pairs]
        await_true(lambda: len(far.fabrics[0].queue_pairs) == 1, "the end of the queue pair")
        far.transport.accept(SENDER, replace(offer, generation=3, end=probe.end.path), told.append)
        await_true(lambda: isinstance(told[-1], Answer), "a link")
    probe.close()
    assert caplog.records == []


def test_a_dial_whose_answer_leads_nowhere_ends_its_sends_and_others_go_on(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, receiver = town.node(FAR)
    lost, _ = town.node(("c", "boot-3"))
    _, sender = town.node(SENDER)
    Slow(monkeypatch, 0.5, lost.fabrics[0].gid)
    waiting = sender.send(route_of(lost, ("c", "boot-3")), 1, 0, cut(noise(rng, 1_000), rng, 2))
    began_s = time.monotonic()
    for sink_id in range(10, 30):
        assert works(sender, receiver, route_of(far), rng, sink_id)
    assert time.monotonic() - began_s < 0.5
    ended = sender.sent(waiting)
    assert ended.reason is Reason.PEER_LOST and "address does not answer" in ended.message


def test_a_transport_that_closes_waits_for_what_connects_and_ends_its_sends(
    town: Town, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, _ = town.node(("c", "boot-3"))
    near, sender = town.node(SENDER)
    slow = Slow(monkeypatch, 0.3, lost.fabrics[0].gid)
    waiting = sender.send(route_of(lost, ("c", "boot-3")), 1, 0, cut(noise(rng, 1_000), rng, 2))
    await_true(lambda: len(slow.begun) == 1, "the connecting")
    assert near.transport.close(5.0)
    ended = near.transport.poll(8)
    assert [(done.op_id, done.reason) for done in ended if isinstance(done, Sent)] == [(waiting, Reason.SHUTTING_DOWN)]
    assert near.fabrics[0].queue_pairs == []


def test_nodes_that_mark_a_class_differently_both_say_so_and_go_on(
    town: Town, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    other = dict.fromkeys(KvClass, KV_LANE) | {KvClass.LAYERS: Marks(5, 104)}
    far, receiver = town.node(FAR, marks=other)
    _, sender = town.node(SENDER)
    assert works(sender, receiver, route_of(far), rng)
    said = [record.getMessage() for record in caplog.records if "marks packets of class layers" in record.message]
    assert [(text.split()[0], text.index("SL 5") < text.index("SL 2")) for text in said] == [
        (SENDER[0], False),
        (FAR[0], True),
    ]
    assert all("DSCP 26" in text and "[transport.verbs]" in text for text in said)


def test_what_a_broken_link_was_to_repeat_ends_when_the_transport_closes(town: Town, rng: np.random.Generator) -> None:
    far, receiver = town.node(FAR)
    near, sender = town.node(SENDER)
    town.wire.hold()
    receiver.expect(1, lambda layer, first_block: cut(untouched(1_000), rng, 2))
    waiting = sender.send(route_of(far), 1, 0, cut(noise(rng, 1_000), rng, 2))
    await_true(lambda: town.wire.step() == 1, "a question")
    near.fabrics[0].refuses_destroy = True
    with town.wire.changed:
        near.fabrics[0].queue_pairs[0].break_down()
    # Its thread tries to destroy the end every half second from now on.
    await_true(lambda: bool(near.transport._engine._graves), "an end that the device keeps")
    near.fabrics[0].refuses_destroy = False
    assert near.transport.close(5.0) and near.fabrics[0].queue_pairs == []
    ended = near.transport.poll(8)
    assert [(done.op_id, done.reason) for done in ended if isinstance(done, Sent)] == [(waiting, Reason.SHUTTING_DOWN)]
