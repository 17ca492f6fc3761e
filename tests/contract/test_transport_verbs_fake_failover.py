"""Nodes of several CNICs of which some fail: layers go on over what is left, once each, and a node is lost when nothing is."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from transport_kit import SENDER, noise, scattered, stream_of, untouched
from verbs_raw_kit import RawAsker, await_true
from verbs_town import FAR, Town, route_of

from kvmoverd.adapters.transport.verbs.messages import Applied, Ask, Grant
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Offer
from kvmoverd.ports.transport import Received, RouteLost, Sent, SinkQuiet

LAYERS = 40
SIZE_BYTES = 4_000
SINK = 2
"""Even: its layers go to CNIC 0 of two, by number."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(41)


class Rails:
    """Two nodes of `cnics` each. Sources and destinations are nearest to CNIC 0 of their node."""

    def __init__(self, town: Town, rng: np.random.Generator, cnics: int = 2) -> None:
        self.town = town
        self.far, self.receiver = town.node(FAR, cnics=cnics)
        self.near, self.sender = town.node(SENDER, cnics=cnics)
        self.sources = noise(rng, LAYERS * SIZE_BYTES).reshape(LAYERS, SIZE_BYTES)
        self.memory = untouched(LAYERS * SIZE_BYTES).reshape(LAYERS, SIZE_BYTES)
        self.slices = [scattered(layer, rng, 7) for layer in self.memory]
        self.from_slices = [scattered(layer, rng, 5) for layer in self.sources]
        for node, memory in ((self.near, self.sources), (self.far, self.memory)):
            at = memory.ctypes.data
            node.book.near.append((range(at, at + memory.nbytes), 0))
        self.receiver.expect(SINK, lambda layer, first_block: self.slices[layer])

    def send(self, layers: range) -> list[int]:
        return [self.sender.send(route_of(self.far), SINK, layer, self.from_slices[layer]) for layer in layers]

    def reasons(self, ops: list[int]) -> set[Reason]:
        return {self.sender.sent(op_id).reason for op_id in ops}

    def move_some(self) -> None:
        """On a wire that is held: until a few layers have landed, and one of them in part."""
        wire = self.town.wire
        await_true(lambda: wire.step(1) >= 0 and wire.tally.written_bytes > 3.5 * SIZE_BYTES, "some writes")

    def layers(self) -> set[int]:
        """That were told."""
        self.receiver.pump(0.0)
        return {event.layer for event in self.receiver.of(Received)}

    def check(self, layers: range) -> None:
        """Each was told once, all bytes are there, nobody was told of a node lost."""
        received = self.receiver.wait(Received, len(layers))
        assert Counter(event.layer for event in received) == Counter(layers)
        for layer in layers:
            got, sent = stream_of(self.memory[layer], self.slices[layer]), self.sources[layer]
            assert (got == stream_of(sent, self.from_slices[layer])).all(), layer
        assert self.sender.of(RouteLost) == [] and self.receiver.of(RouteLost) == []

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Of the offers, in their order."""
        return [pair_of(offer) for offer in self.town.desk.offers]


def pair_of(offer: Offer) -> tuple[int, int]:
    return offer.link_id >> 16 & 0xFFFF, offer.peer_cnic


@pytest.mark.parametrize("on_its_way", [0, 3])
@pytest.mark.parametrize("side", ["here", "there"])
def test_a_cnic_that_is_unplugged_in_the_middle_costs_no_layer_while_there_is_another(
    town: Town, rng: np.random.Generator, side: str, on_its_way: int
) -> None:
    town.wire.on_its_way = on_its_way
    rails = Rails(town, rng)
    town.wire.hold()
    ops = rails.send(range(LAYERS))
    rails.move_some()
    (rails.near if side == "here" else rails.far).fabrics[0].unplug()
    town.wire.release()
    assert rails.reasons(ops) == {Reason.OK}
    rails.check(range(LAYERS))
    assert rails.pairs[0] == (0, 0) and (1, 1) in rails.pairs
    rails.receiver.transport.forget(SINK)
    assert rails.receiver.wait(SinkQuiet, 1) == [SinkQuiet(SINK)]


def test_without_any_cnic_left_the_node_is_lost_and_it_comes_back_with_them(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    town.wire.hold()
    ops = rails.send(range(10))
    rails.move_some()
    for fabric in rails.near.fabrics:
        fabric.unplug()
    town.wire.release()
    assert Reason.PEER_LOST in rails.reasons(ops) <= {Reason.PEER_LOST, Reason.OK}
    assert len(rails.sender.wait(RouteLost, 1)) == 1
    assert set(rails.pairs) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for fabric in rails.near.fabrics:
        fabric.plug()
    assert rails.reasons(rails.send(range(10, LAYERS))) == {Reason.OK}
    assert len(rails.sender.of(RouteLost)) == 1
    await_true(lambda: rails.layers() >= set(range(10, LAYERS)), "the layers sent anew")
    received = Counter(event.layer for event in rails.receiver.of(Received))
    assert set(range(10, LAYERS)) <= set(received) and max(received.values()) == 1
    for layer in received:
        got = stream_of(rails.memory[layer], rails.slices[layer])
        assert (got == stream_of(rails.sources[layer], rails.from_slices[layer])).all()


def test_a_pair_that_failed_is_used_again_once_it_works_and_meanwhile_one_layer_tries_it(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    rails.far.fabrics[0].unplug()
    assert rails.reasons(rails.send(range(10))) == {Reason.OK}
    time.sleep(0.2)
    tried = rails.pairs.count((0, 0))
    town.wire.retry_s = 0.3
    ops = rails.send(range(10, 20))
    assert rails.reasons(ops) == {Reason.OK}
    ended = [event.op_id for event in rails.sender.of(Sent)]
    assert set(ended[-10:-1]) == set(ops[1:]) and ended[-1] == ops[0], "the others don't wait for the trial"
    assert rails.pairs.count((0, 0)) == tried + 2, "one more trial, which ends with the second break"
    rails.far.fabrics[0].plug()
    layer = 20

    def is_back() -> bool:
        nonlocal layer
        before = [end.number for end in rails.far.fabrics[0].queue_pairs]
        assert rails.reasons(rails.send(range(layer, layer + 1))) == {Reason.OK}
        layer += 1
        time.sleep(0.05)
        return bool(before)

    await_true(is_back, "the first pair")
    offers = len(town.desk.offers)
    assert rails.reasons(rails.send(range(layer, LAYERS))) == {Reason.OK}
    assert len(town.desk.offers) == offers
    rails.check(range(LAYERS))


@pytest.mark.parametrize("what", ["there", "here", "dead here"])
def test_a_pair_that_makes_no_link_is_passed_over(town: Town, rng: np.random.Generator, what: str) -> None:
    rails = Rails(town, rng)
    match what:
        case "there":
            rails.far.fabrics[0].refuses_marks = True
        case "here":
            rails.near.fabrics[0].refuses_marks = True
        case "dead here":
            rails.near.fabrics[0].kill()
    ops = rails.send(range(LAYERS))
    assert rails.reasons(ops) == {Reason.OK}
    rails.check(range(LAYERS))


def test_where_every_pair_is_refused_the_words_of_the_refusal_are_told(town: Town, rng: np.random.Generator) -> None:
    rails = Rails(town, rng)
    for fabric in rails.far.fabrics:
        fabric.refuses_marks = True
    done = rails.sender.sent(rails.send(range(1))[0])
    assert done.reason is Reason.PEER_LOST and "traffic class 32 was set, 0 was found" in done.message
    assert len(rails.sender.wait(RouteLost, 1)) == 1 and len(rails.pairs) == 4


def test_a_node_of_many_cnics_that_does_not_answer_is_lost_after_some_of_them(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng, cnics=4)
    for fabric in rails.far.fabrics:
        fabric.unplug()
    done = rails.sender.sent(rails.send(range(1))[0])
    assert done.reason is Reason.PEER_LOST and len(rails.sender.wait(RouteLost, 1)) == 1
    assert len(set(rails.pairs)) == 8 and [len(set(ends)) for ends in zip(*rails.pairs[:8], strict=True)] == [4, 4]


def test_a_layer_that_was_told_before_its_cnic_failed_is_not_told_again_over_another(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    town.wire.hold()
    op_id = rails.send(range(1))[0]

    def told() -> bool:
        town.wire.step(1)
        rails.receiver.pump(0.0)
        return bool(rails.receiver.of(Received))

    await_true(told, "the layer")
    assert rails.sender.of(Sent) == []
    rails.far.fabrics[0].unplug()
    landed_bytes = town.wire.tally.written_bytes
    town.wire.release()
    assert rails.sender.sent(op_id).reason is Reason.OK
    assert town.wire.tally.written_bytes == landed_bytes, "nothing is written again"
    rails.check(range(1))


def test_a_frame_that_is_repeated_over_another_link_is_answered_as_applied_or_granted_behind_a_fence(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    source = noise(rng, SIZE_BYTES)
    first = RawAsker(town.wire, rails.far.transport, SENDER).connected()
    for sequence in (1, 2):
        first.say(Ask(sequence, SINK, sequence, 0, SIZE_BYTES))
    places = {grant.sequence: grant.places for grant in first.hear(Grant, 2)}
    first.write(source, places[1], 1)
    first.hear(Applied)
    first.fabric.unplug()
    town.wire.retry_s = 30.0
    first.write(noise(rng, SIZE_BYTES), places[2], 2)
    second = RawAsker(town.wire, rails.far.transport, SENDER, link_id=8, peer_cnic=1).connected()
    second.say(*(Ask(sequence, SINK, sequence, 0, SIZE_BYTES, again=True, settled=True) for sequence in (1, 2)))
    assert second.hear(Applied) == [Applied(1)]
    again = second.hear(Grant)[0]
    assert again.sequence == 2 and rails.far.fabrics[0].queue_pairs == []
    first.fabric.plug()
    town.wire.retry_s = 0.05
    assert "retry" in first.breaks()
    second.write(source, again.places, 2)
    second.hear(Applied, 2)
    assert (stream_of(rails.memory[2], rails.slices[2]) == source).all()
    assert [event.layer for event in rails.receiver.wait(Received, 2)] == [1, 2]
    await_true(lambda: rails.far.transport.facts.fences == 1, "one fence")
    first.close()
    second.close()


def test_a_frame_that_is_still_open_on_a_link_which_can_not_be_destroyed_is_not_granted_again(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    first = RawAsker(town.wire, rails.far.transport, SENDER).connected()
    first.say(Ask(1, SINK, 1, 0, SIZE_BYTES))
    first.hear(Grant)
    rails.far.fabrics[0].refuses_destroy = True
    second = RawAsker(town.wire, rails.far.transport, SENDER, link_id=8, peer_cnic=1).connected()
    second.say(Ask(1, SINK, 1, 0, SIZE_BYTES, again=True, settled=True))
    await_true(lambda: rails.far.fabrics[1].queue_pairs == [], "the end of the second link")
    assert second.heard == []
    rails.far.fabrics[0].refuses_destroy = False
    await_true(lambda: rails.far.fabrics[0].queue_pairs == [], "the end of the first link")
    third = RawAsker(town.wire, rails.far.transport, SENDER, link_id=8, peer_cnic=1, generation=2).connected()
    third.say(Ask(1, SINK, 1, 0, SIZE_BYTES, again=True, settled=True))
    third.write(noise(rng, SIZE_BYTES), third.hear(Grant)[0].places, 1)
    third.hear(Applied)
    for asker in (first, second, third):
        asker.close()


def test_another_senders_frame_of_the_same_number_is_neither_told_nor_fenced(
    town: Town, rng: np.random.Generator
) -> None:
    rails = Rails(town, rng)
    first = RawAsker(town.wire, rails.far.transport, SENDER).connected()
    first.say(Ask(1, SINK, 1, 0, SIZE_BYTES))
    places = first.hear(Grant)[0].places
    other = RawAsker(town.wire, rails.far.transport, ("z", "boot-9"), peer_cnic=1).connected()
    other.say(Ask(1, SINK, 1, 0, SIZE_BYTES, again=True, settled=True))
    await_true(lambda: (other.pump(), bool(other.heard))[1], "an answer")
    assert "not open here for z" in str(other.heard)
    first.write(noise(rng, SIZE_BYTES), places, 1)
    assert first.hear(Applied) == [Applied(1)]
    other.say(Ask(1, SINK, 1, 0, SIZE_BYTES, again=True, settled=True))
    await_true(lambda: (other.pump(), len(other.heard) == 2)[1], "an answer")
    assert "not open here for z" in str(other.heard[1])
    first.close()
    other.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_while_cnics_come_and_go_at_both_ends_every_layer_arrives_over_what_is_left(town: Town, seed: int) -> None:
    rng = np.random.default_rng(seed)
    town.wire.on_its_way = 2
    rails = Rails(town, rng)
    flapping = [rails.near.fabrics[0], rails.far.fabrics[1]]
    ops: list[int] = []
    for layer in range(LAYERS):
        fabric = flapping[int(rng.integers(0, 2))]
        (fabric.plug if rng.random() < 0.4 else fabric.unplug)()
        ops += rails.send(range(layer, layer + 1))
        time.sleep(float(rng.uniform(0.0, 0.05)))
    assert rails.reasons(ops) == {Reason.OK}
    rails.check(range(LAYERS))
