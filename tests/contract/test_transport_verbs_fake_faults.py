"""Links that break at every point of a transfer: each layer is told once, each send ends once, no byte lands late."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from transport_kit import SENDER, Bytes, noise, scattered, stream_of, untouched
from verbs_kit import FakeWire
from verbs_raw_kit import await_true
from verbs_town import FAR, Town, route_of

from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Received, RouteLost, Send, Sent, SinkQuiet

LAYERS = 5
SIZE_BYTES = 4_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(37)


class Transfer:
    """Layers from one node to the other, each to memory of its own."""

    def __init__(
        self, town: Town, rng: np.random.Generator, *, fence_s: float = 0.2, io_timeout_s: float = 5.0
    ) -> None:
        self.town = town
        self.far, self.receiver = town.node(FAR, fence_s=fence_s, io_timeout_s=io_timeout_s)
        self.near, self.sender = town.node(SENDER, io_timeout_s=io_timeout_s)
        self.sources = noise(rng, LAYERS * SIZE_BYTES).reshape(LAYERS, SIZE_BYTES)
        self.memory = untouched(LAYERS * SIZE_BYTES).reshape(LAYERS, SIZE_BYTES)
        self.slices = [scattered(layer, rng, 7) for layer in self.memory]
        self.from_slices = [scattered(layer, rng, 5) for layer in self.sources]

    def begin(self, sink_id: int = 1) -> list[int]:
        self.receiver.expect(sink_id, lambda layer, first_block: self.slices[layer])
        return [
            self.sender.send(route_of(self.far), sink_id, layer, self.from_slices[layer]) for layer in range(LAYERS)
        ]

    def arrived(self, layer: int) -> bool:
        got = stream_of(self.memory[layer], self.slices[layer])
        return bool((got == stream_of(self.sources[layer], self.from_slices[layer])).all())


def move_some(town: Town) -> None:
    """On a wire that is held: until the first layer and a part of the second have landed."""
    await_true(lambda: town.wire.step(1) >= 0 and town.wire.tally.written_bytes > SIZE_BYTES, "some writes")


@pytest.mark.parametrize("on_its_way", [0, 3])
def test_wherever_a_link_breaks_once_every_layer_arrives_once_and_nobody_is_told_of_it(
    rng: np.random.Generator, on_its_way: int
) -> None:
    """Asks, grants, each row, immediates, last words: a fault at each of them in turn."""
    nth, moved = 0, 1
    while nth < moved:
        nth += 1
        with FakeWire(on_its_way=on_its_way) as wire:
            town = Town(wire)
            transfer = Transfer(town, rng)
            wire.fail_at(nth)
            ops = transfer.begin()
            assert {transfer.sender.sent(op_id).reason for op_id in ops} == {Reason.OK}, nth
            received = transfer.receiver.wait(Received, LAYERS)
            assert Counter(event.layer for event in received) == Counter(range(LAYERS)), nth
            assert all(transfer.arrived(layer) for layer in range(LAYERS)), nth
            assert transfer.sender.of(RouteLost) == [] and transfer.receiver.of(RouteLost) == []
            moved = wire.tally.items if nth == 1 else moved
            town.close()
    assert nth > 40


def test_a_link_that_breaks_again_and_again_without_a_layer_applied_is_told_as_lost_once(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng)
    town.desk.on_offer = lambda: town.wire.fail_at(2)
    ended = [transfer.sender.sent(op_id) for op_id in transfer.begin()]
    assert {end.reason for end in ended} == {Reason.PEER_LOST}
    assert "an error that the test asked for" in ended[0].message or "flushed" in ended[0].message
    assert len(town.desk.offers) == 2 and len(transfer.sender.wait(RouteLost, 1)) == 1
    town.desk.on_offer = lambda: None
    again = [transfer.sender.send(route_of(transfer.far), 1, n, transfer.from_slices[n]) for n in range(LAYERS)]
    assert {transfer.sender.sent(op_id).reason for op_id in again} == {Reason.OK}
    assert len(transfer.sender.of(RouteLost)) == 1


def forget_at(transfer: Transfer, items: int) -> bool:
    """Forgets the sink when so many items have moved; False when all had moved before."""
    wire = transfer.town.wire
    wire.hold()
    transfer.begin()
    moved, until_s = 0, time.monotonic() + 5.0
    while moved < items and len(transfer.sender.of(Sent)) < LAYERS and time.monotonic() < until_s:
        moved += wire.step(1)
        transfer.sender.pump(0.0)
    transfer.receiver.transport.forget(1)
    return moved == items


@pytest.mark.parametrize("on_its_way", [0, 2])
@pytest.mark.parametrize("sender", ["answers", "stands still", "is killed"])
def test_whenever_a_sink_is_forgotten_no_byte_lands_once_it_is_quiet(
    rng: np.random.Generator, sender: str, on_its_way: int
) -> None:
    items = 0
    while items < 60:
        items += 4
        with FakeWire(on_its_way=on_its_way) as wire:
            town = Town(wire)
            transfer = Transfer(town, rng, fence_s=0.05)
            reached = forget_at(transfer, items)
            if sender == "stands still":
                transfer.near.fabrics[0].stop()
            if sender == "is killed":
                transfer.near.fabrics[0].kill()
            if sender == "answers":
                wire.release()
            transfer.receiver.wait(SinkQuiet, 1)
            transfer.memory[:] = 0xEE
            wire.forbid(transfer.memory.ctypes.data, transfer.memory.nbytes)
            wire.release()
            wire.settle()
            transfer.near.fabrics[0].resume()
            if sender != "is killed":
                assert {end.reason for end in transfer.sender.wait(Sent, LAYERS)} <= {Reason.OK, Reason.CANCELLED}
            assert (transfer.memory == 0xEE).all() and wire.tally.trespasses == [], items
            assert len(transfer.receiver.of(SinkQuiet)) == 1
            finish(town, transfer, killed=sender == "is killed")
            if not reached:
                return


def finish(town: Town, transfer: Transfer, *, killed: bool) -> None:
    """A node whose device was taken away can't say that all is quiet; its thread ends all the same."""
    if not killed:
        town.close()
        return
    transfer.near.transport.close(5.0)
    assert transfer.far.transport.close(5.0)


def test_others_on_a_fenced_queue_pair_are_repeated_under_a_new_generation_and_arrive_once(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng, fence_s=0.05)
    other = untouched(SIZE_BYTES)
    slices = scattered(other, rng, 9)
    transfer.receiver.expect(2, lambda layer, first_block: slices)
    town.wire.hold()
    ops = transfer.begin()
    kept = transfer.sender.send(route_of(transfer.far), 2, 0, transfer.from_slices[0])
    move_some(town)
    # The first layer has landed: on a busy machine it is told later than that.
    transfer.receiver.wait(Received, 1)
    transfer.near.fabrics[0].stop()
    transfer.receiver.transport.forget(1)
    transfer.receiver.wait(SinkQuiet, 1)
    transfer.memory[:] = 0xEE
    transfer.near.fabrics[0].resume()
    town.wire.release()
    assert transfer.sender.sent(kept).reason is Reason.OK
    assert (stream_of(other, slices) == stream_of(transfer.sources[0], transfer.from_slices[0])).all()
    assert {transfer.sender.sent(op_id).reason for op_id in ops} <= {Reason.OK, Reason.CANCELLED}
    transfer.receiver.wait(Received, 2)
    assert sorted((event.sink_id, event.layer) for event in transfer.receiver.of(Received)) == [(1, 0), (2, 0)]
    assert (transfer.memory == 0xEE).all()
    assert transfer.sender.of(RouteLost) == []
    generations = [offer.generation for offer in town.desk.offers]
    assert len(generations) >= 2 and generations == sorted(set(generations))


def test_a_receiver_that_is_killed_is_a_peer_lost_and_the_source_is_left_alone(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng)
    town.wire.hold()
    ops = transfer.begin()
    move_some(town)
    transfer.far.fabrics[0].kill()
    del town.desk.nodes[FAR]
    town.wire.release()
    ended = [transfer.sender.sent(op_id) for op_id in ops]
    assert Reason.PEER_LOST in {end.reason for end in ended} <= {Reason.PEER_LOST, Reason.OK}
    assert len(transfer.sender.wait(RouteLost, 1)) == 1
    landed = transfer.memory.copy()
    transfer.sources[:] = 0
    town.wire.settle()
    assert (transfer.memory == landed).all()
    transfer.far.transport.close(5.0)
    town.nodes.remove(transfer.far)


def test_a_receiver_that_stands_still_ends_the_sends_in_bounded_time_and_goes_on_later(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng, io_timeout_s=0.5)
    assert {transfer.sender.sent(op_id).reason for op_id in transfer.begin()} == {Reason.OK}
    transfer.far.fabrics[0].stop()
    transfer.receiver.expect(2, lambda layer, first_block: transfer.slices[layer])
    began_s = time.monotonic()
    done = transfer.sender.sent(transfer.sender.send(route_of(transfer.far), 2, 0, transfer.from_slices[0]))
    assert done.reason is Reason.PEER_LOST and time.monotonic() - began_s < 4.0
    transfer.far.fabrics[0].resume()
    deadline_s = time.monotonic() + 10.0
    while transfer.sender.sent(
        transfer.sender.send(route_of(transfer.far), 2, 0, transfer.from_slices[0])
    ).reason is not (Reason.OK):
        assert time.monotonic() < deadline_s, "the link did not come back"
    assert len([event for event in transfer.receiver.wait(Received, LAYERS + 1) if event.sink_id == 2]) == 1


def test_a_cable_that_is_pulled_for_a_moment_costs_no_layer(town: Town, rng: np.random.Generator) -> None:
    transfer = Transfer(town, rng)
    town.wire.hold()
    ops = transfer.begin()
    move_some(town)
    transfer.far.fabrics[0].unplug()
    town.wire.release()
    await_true(lambda: transfer.near.transport.facts.reconnects > 0, "a link that broke")
    transfer.far.fabrics[0].plug()
    assert {transfer.sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert all(transfer.arrived(layer) for layer in range(LAYERS))
    assert len(transfer.receiver.wait(Received, LAYERS)) == LAYERS


def test_a_completion_that_never_comes_is_missed_by_the_deadline_and_the_layer_arrives(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng, io_timeout_s=0.4)
    transfer.near.fabrics[0].drop_completions(1)
    ops = transfer.begin()
    assert {transfer.sender.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert all(transfer.arrived(layer) for layer in range(LAYERS))
    assert Counter(event.layer for event in transfer.receiver.wait(Received, LAYERS)) == Counter(range(LAYERS))


def test_a_device_that_can_not_be_polled_any_more_ends_all_that_goes_over_it(
    town: Town, rng: np.random.Generator
) -> None:
    transfer = Transfer(town, rng)
    assert {transfer.sender.sent(op_id).reason for op_id in transfer.begin()} == {Reason.OK}
    transfer.near.fabrics[0].kill()
    done = transfer.sender.sent(transfer.sender.send(route_of(transfer.far), 1, 0, transfer.from_slices[0]))
    assert done.reason in (Reason.POOL_EXHAUSTED, Reason.PEER_LOST) and done.message
    assert not transfer.near.transport.close(5.0) or transfer.near.fabrics[0].queue_pairs == []
    town.nodes.remove(transfer.near)


def test_closing_in_the_middle_ends_every_send_and_the_sources_are_quiet(town: Town, rng: np.random.Generator) -> None:
    transfer = Transfer(town, rng)
    town.wire.hold()
    ops = transfer.begin()
    move_some(town)
    assert transfer.near.transport.close(5.0)
    ended = {event.op_id: event.reason for event in transfer.near.transport.poll(100) if isinstance(event, Sent)}
    ended |= {event.op_id: event.reason for event in transfer.sender.of(Sent)}
    assert set(ended) == set(ops) and set(ended.values()) <= {Reason.OK, Reason.SHUTTING_DOWN}
    transfer.sources[:] = 0
    landed = transfer.memory.copy()
    town.wire.settle()
    assert (transfer.memory == landed).all()


def test_marks_that_are_not_read_back_make_no_link(town: Town, rng: np.random.Generator) -> None:
    transfer = Transfer(town, rng)
    transfer.near.fabrics[0].refuses_marks = True
    done = transfer.sender.sent(transfer.begin()[0])
    assert done.reason is Reason.PEER_LOST and "traffic class 32 was set, 0 was found" in done.message
    await_true(lambda: transfer.near.fabrics[0].queue_pairs == [], "no queue pair")


class Soak:
    """Many sinks, each of its own layers, some forgotten in mid-flight; every byte is compared."""

    def __init__(self, town: Town, rng: np.random.Generator, seed: int) -> None:
        self.rng = rng
        self.seed = seed
        self.far, self.receiver = town.node(FAR, cnics=2, fence_s=0.05, queue_max=4_096)
        self.near, self.sender = town.node(SENDER, cnics=2, queue_max=4_096)
        self.sinks: dict[int, tuple[Bytes, list[IoVec]]] = {}
        self.sources: dict[int, tuple[int, int, Bytes, IoVec]] = {}
        self.forgotten: set[int] = set()
        self.quiet: set[int] = set()
        self.told: Counter[tuple[int, int]] = Counter()
        self.ended: dict[int, Reason] = {}

    def open(self, sink_id: int, layers: int) -> None:
        memory = untouched(layers * 600).reshape(layers, 600)
        slices = [scattered(layer, self.rng, 4) for layer in memory]
        self.sinks[sink_id] = (memory, slices)
        self.receiver.expect(sink_id, lambda layer, first_block: slices[layer])
        sends = []
        for layer in range(layers):
            source = noise(self.rng, 600)
            op_id = 10_000_000 + len(self.sources)
            rows = scattered(source, self.rng, 3)
            self.sources[op_id] = (sink_id, layer, source, rows)
            sends.append(Send(op_id, route_of(self.far), sink_id, layer, 0, rows, self.rng.choice(list(KvClass))))
        self.sender.transport.submit(sends)

    def forget(self, sink_id: int) -> None:
        self.forgotten.add(sink_id)
        self.receiver.transport.forget(sink_id)

    def pump(self) -> None:
        for end in (self.sender, self.receiver):
            end.pump(0.0)
            for event in end.events:
                match event:
                    case Sent(op_id, reason):
                        assert op_id not in self.ended, f"seed {self.seed}: {op_id} ended twice"
                        self.ended[op_id] = reason
                    case Received(sink_id, layer):
                        self.told[sink_id, layer] += 1
                    case SinkQuiet(sink_id):
                        assert sink_id in self.forgotten and sink_id not in self.quiet, f"seed {self.seed}: {sink_id}"
                        self.quiet.add(sink_id)
                        self.sinks[sink_id][0][:] = 0xEE
                    case RouteLost():
                        pass
            end.events.clear()

    def check(self) -> None:
        assert max(self.told.values()) == 1, f"seed {self.seed}"
        for op_id, (sink_id, layer, source, rows) in self.sources.items():
            memory, slices = self.sinks[sink_id]
            if sink_id in self.forgotten:
                assert self.ended[op_id] in (Reason.OK, Reason.CANCELLED, Reason.PEER_LOST), f"seed {self.seed}"
                assert (memory == 0xEE).all(), f"seed {self.seed}: sink {sink_id} was written after it was quiet"
                continue
            if self.ended[op_id] is Reason.OK:
                assert self.told[sink_id, layer] == 1, f"seed {self.seed}"
                assert (stream_of(memory[layer], slices[layer]) == stream_of(source, rows)).all(), f"seed {self.seed}"
            else:
                assert self.ended[op_id] is Reason.PEER_LOST, f"seed {self.seed}: {self.ended[op_id]}"


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_layers_with_random_forgets_arrive_byte_by_byte_or_not_at_all(
    town: Town, seed: int, *, breaks: bool
) -> None:
    rng = np.random.default_rng(seed)
    town.wire.on_its_way = 3
    soak = Soak(town, rng, seed)
    for sink_id in range(60):
        soak.open(sink_id, int(rng.integers(1, 40)))
        if breaks and rng.random() < 0.2:
            town.wire.fail_at(int(rng.integers(1, 60)))
        for _ in range(int(rng.integers(1, 30))):
            soak.pump()
        for old in [old for old in soak.sinks if old not in soak.forgotten and rng.random() < 0.03]:
            soak.forget(old)
    deadline_s = time.monotonic() + 40.0
    while len(soak.ended) < len(soak.sources) or soak.quiet != soak.forgotten:
        assert time.monotonic() < deadline_s, f"seed {seed}: {len(soak.ended)} of {len(soak.sources)} sends ended"
        soak.pump()
    soak.pump()
    soak.check()
    assert len(soak.forgotten) > 10 and len(soak.sources) > 800
    assert town.wire.tally.waits_for_slots == 0
