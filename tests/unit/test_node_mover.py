"""The mover's order: what is due soon goes before what can wait, few sends are handed out at a time, and none starves."""

from __future__ import annotations

from random import Random

import numpy as np
from node_gates import TransportGate, no_floor

from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.core.status import Reason
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
