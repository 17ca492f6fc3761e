"""The mover's order: what is due soon goes before what can wait, few sends are handed out at a time, and none starves."""

from __future__ import annotations

from random import Random

import numpy as np
from node_gates import TransportGate, no_floor

from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.core.status import Reason
from kvmoverd.node.layer_dues import LAYER_NS, LayerDues
from kvmoverd.node.mover import STORES_UNDER_WAY_MAX, UNDER_WAY_MAX, Mover, Need
from kvmoverd.ports.transport import IoVec, Route

NOTHING = np.zeros((0, 2), dtype=np.uint64)


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


class Rig:
    """A mover over a transport that holds what it gets."""

    def __init__(self) -> None:
        self.clock, self.wire = Hand(), TransportGate()
        self.wire.closed = True
        self.mover = Mover(self.wire, self.wire, lambda lost: None, self.clock, no_floor(CountingObserver()))
        self.sink = self.mover.expect(self._resolve, lambda layer, moved: None)
        self.ended: list[int] = []
        self.reasons: set[Reason] = set()

    def send(self, layer: int, need: Need, route: Route | None = None, since_ns: int | None = None) -> None:
        self.mover.send(route, self.sink, layer, 0, NOTHING, self._on_sent, need=need, since_ns=since_ns)

    def held(self) -> list[int]:
        return [send.layer for send, *_ in self.wire.held]

    def step(self) -> None:
        self.wire.release_one()
        self.mover.pump()

    def _resolve(self, layer: int, first_block: int) -> IoVec | None:
        return NOTHING

    def _on_sent(self, layer: int, reason: Reason, moved_bytes: int, message: str) -> None:
        self.ended.append(layer)
        self.reasons.add(reason)


def test_layers_that_are_due_overtake_what_can_wait() -> None:
    rig = Rig()
    for number in range(UNDER_WAY_MAX + 4):
        rig.send(number, Need.PAGES)
    rig.send(100, Need.ASSEMBLY)
    rig.send(101, Need.LAYERS)
    rig.send(102, Need.LAYERS)
    assert rig.held() == list(range(UNDER_WAY_MAX)), "few are handed out at a time"
    for _ in range(7):
        rig.step()
    assert rig.held()[-7:] == [101, 102, 16, 17, 18, 19, 100]
    while rig.wire.held:
        rig.step()
    assert sorted(rig.ended) == [*range(UNDER_WAY_MAX + 4), 100, 101, 102]
    assert rig.mover.sends_under_way() == 0 and not rig.mover._lines
    rig.wire.close(0)


def test_few_copies_for_the_store_are_out_at_a_time_and_all_else_passes_them() -> None:
    rig = Rig()
    for number in range(8):
        rig.send(number, Need.STORE)
    rig.send(100, Need.LAYERS)
    rig.send(101, Need.ASSEMBLY)
    assert rig.held() == [0, 1, 2, 100, 101], "they are large: layers must not stand behind many"
    most = 0
    while rig.wire.held:
        most = max(most, sum(layer < 100 for layer in rig.held()))
        rig.step()
    assert most == STORES_UNDER_WAY_MAX and rig.ended == [0, 1, 2, 100, 101, 3, 4, 5, 6, 7]
    assert rig.mover.sends_under_way() == 0 and not rig.mover._lines
    rig.wire.close(0)


def test_copies_of_the_request_that_came_first_go_first() -> None:
    rig = Rig()
    for number in range(STORES_UNDER_WAY_MAX):
        rig.send(number, Need.STORE)
    rig.clock.ns = 2_000
    rig.send(200, Need.STORE, since_ns=2_000)
    rig.send(100, Need.STORE, since_ns=1_000)
    for _ in range(2):
        rig.step()
    assert rig.held() == [2, 100, 200]
    rig.wire.close(0)


def test_what_may_stand_back_does_so_for_a_while_and_not_for_ever() -> None:
    rig = Rig()
    for number in range(UNDER_WAY_MAX):
        rig.send(number, Need.LAYERS)
    rig.send(100, Need.STORE)
    late = 0
    while 100 not in rig.held():
        rig.clock.ns += 10_000_000
        rig.send(200 + late, Need.LAYERS)
        rig.step()
        late += 1
        assert late < 20, "the store's copy starves"
    assert 5 < late <= 1 + Need.STORE.value // 10_000_000
    rig.wire.close(0)


def test_a_place_that_is_full_keeps_no_other_waiting() -> None:
    rig = Rig()
    there = Route("b", "boot", "127.0.0.1:1", b"")
    for number in range(UNDER_WAY_MAX + 8):
        rig.send(number, Need.LAYERS, there)
    rig.send(100, Need.STORE)
    assert rig.held()[-1] == 100
    rig.wire.close(0)


def test_what_waits_for_a_route_that_broke_fails_with_the_first_loss() -> None:
    rig = Rig()
    rig.wire.fails = lambda send: Reason.PEER_LOST
    there = Route("b", "boot", "127.0.0.1:1", b"")
    for number in range(UNDER_WAY_MAX + 8):
        rig.send(number, Need.LAYERS, there)
    rig.step()
    assert rig.ended == [0, *range(UNDER_WAY_MAX, UNDER_WAY_MAX + 8)] and rig.reasons == {Reason.PEER_LOST}
    assert len(rig.wire.held) == UNDER_WAY_MAX - 1, "the transport ends what it has by itself"
    while rig.wire.held:
        rig.step()
    assert rig.mover.sends_under_way() == 0 and not rig.mover._lines
    rig.wire.close(0)


def test_whatever_the_order_each_send_ends_once_and_no_more_than_the_bound_are_out() -> None:
    rng, rig = Random(5), Rig()
    sent = 0
    for _ in range(400):
        if rng.random() < 0.6:
            rig.send(sent, rng.choice(list(Need)))
            sent += 1
        else:
            rig.step()
        rig.clock.ns += rng.randrange(20_000_000)
        assert len(rig.wire.held) <= UNDER_WAY_MAX
    while rig.wire.held:
        rig.step()
    assert sorted(rig.ended) == list(range(sent))
    rig.wire.close(0)


def drain(rig: Rig, step_ns: int = 0) -> list[int]:
    """Lets a slow transport do one send after the other; in which order."""
    while rig.wire.held:
        rig.clock.ns += step_ns
        rig.step()
    assert rig.mover.sends_under_way() == 0 and not rig.mover._lines
    rig.wire.close(0)
    return rig.ended


def block_the_wire(rig: Rig) -> None:
    """The transport has all that it may have; what is sent from now on waits."""
    for _ in range(UNDER_WAY_MAX):
        rig.send(-1, Need.LAYERS, since_ns=-(10**9))


def test_all_classes_at_once_go_layers_pages_assembly_store() -> None:
    rig, rng = Rig(), Random(3)
    block_the_wire(rig)
    asked = [(need, number) for number, need in enumerate(Need) for _ in range(5)]
    rng.shuffle(asked)
    for need, number in asked:
        rig.send(number, need)
    order = [number for number in drain(rig) if number >= 0]
    assert order == sorted(order) and len(order) == 5 * len(Need)


def test_each_class_has_its_turn_while_more_urgent_ones_never_end() -> None:
    rig = Rig()
    block_the_wire(rig)
    for number, need in enumerate(Need):
        rig.send(1000 + number, need)
    waited_ns = {}
    while len(waited_ns) < len(Need):
        rig.clock.ns += 1_000_000
        for _ in range(2):
            rig.send(0, Need.LAYERS)
        rig.step()
        for number, need in enumerate(Need):
            if 1000 + number in rig.ended:
                waited_ns.setdefault(need, rig.clock.ns)
        assert rig.clock.ns < 1_000_000_000, f"only {waited_ns} had their turn"
    backlog_ns = 2 * UNDER_WAY_MAX * 1_000_000
    for need, ns in waited_ns.items():
        assert ns <= 2 * need.value + backlog_ns, f"{need} waited {ns} ns"


def test_of_two_streams_the_one_goes_first_whose_engine_needs_its_next_layer_first() -> None:
    rig, ahead, behind = Rig(), LayerDues(), LayerDues()
    for dues in (ahead, behind):
        dues.due_ns(0, 0)
    rig.clock.ns = 20 * LAYER_NS
    ahead.computed(10, rig.clock.ns)
    behind.computed(20, rig.clock.ns - LAYER_NS)
    block_the_wire(rig)
    for layer in range(14, 18):
        rig.send(layer, Need.LAYERS, since_ns=ahead.due_ns(layer, rig.clock.ns))
    for layer in range(20, 24):
        rig.send(100 + layer, Need.LAYERS, since_ns=behind.due_ns(layer, rig.clock.ns))
    order = [layer for layer in drain(rig) if layer >= 0]
    assert order == [120, 121, 122, 123, 14, 15, 16, 17], "the one has four layers in hand, the other none"


def test_layers_of_many_streams_take_turns_by_what_their_engines_have_in_hand() -> None:
    rig = Rig()
    block_the_wire(rig)
    streams = [LayerDues() for _ in range(8)]
    for number, dues in enumerate(streams):
        dues.due_ns(0, 0)
        for layer in range(4):
            rig.send(10 * number + layer, Need.LAYERS, since_ns=dues.due_ns(layer, 0))
    order = [sent % 10 for sent in drain(rig) if sent >= 0]
    assert order == sorted(order), "all have their first layer before any has its second"


def test_a_layer_that_is_not_due_for_long_lets_a_delivery_pass_and_is_not_late_itself() -> None:
    rig, dues = Rig(), LayerDues()
    dues.due_ns(0, 0)
    block_the_wire(rig)
    rig.send(30, Need.LAYERS, since_ns=dues.due_ns(30, 0))
    rig.send(1, Need.PAGES)
    rig.send(2, Need.ASSEMBLY)
    rig.send(3, Need.STORE)
    assert [layer for layer in drain(rig) if layer >= 0] == [1, 2, 30, 3]
