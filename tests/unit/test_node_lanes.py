"""What a node says of its KV lanes: in its status, on the command line, and to whoever chooses where KV goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from node_gates import TransportGate
from node_kit import node_kit
from test_node_status_storage import FACTS

from kvmoverd import cli
from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.core.qos import KV_LANE, KvClass
from kvmoverd.core.status import Reason
from kvmoverd.node.lane_watch import LaneWatch
from kvmoverd.node.mover import Mover, Need
from kvmoverd.ports.transport import IoVec, Route
from kvmoverd.rpc import status_client
from kvmoverd.rpc.node_status import status_reply

MIB = 1 << 20
THERE = Route("b", "boot-1", "127.0.0.1:1", b"")
MEMORY = np.zeros(MIB, dtype=np.uint8)
SOURCE = np.array([[MEMORY.ctypes.data, MIB]], dtype=np.uint64)
MARKS = dict.fromkeys(KvClass, KV_LANE.text)


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


@dataclass
class Rig:
    """A mover with a floor of 1 MiB a second, over a transport that holds what it gets."""

    clock: Hand = field(default_factory=Hand)
    wire: TransportGate = field(default_factory=TransportGate)
    told: CountingObserver = field(default_factory=CountingObserver)

    def __post_init__(self) -> None:
        self.wire.closed = True
        self.lanes = LaneWatch(MARKS, floor_bytes_per_s=MIB, window_s=1.0, observer=self.told)
        self.mover = Mover(self.wire, self.wire, lambda lost: None, self.clock, self.lanes)
        self.sink = self.mover.expect(self._resolve, lambda layer, moved: None)

    def send(self, need: Need, route: Route | None = THERE) -> None:
        self.mover.send(route, self.sink, 0, 0, SOURCE, lambda *_: None, need=need)

    def moved(self, kv_class: KvClass) -> int:
        return {found.kv_class: found.moved_bytes for found in self.lanes.report(self.clock.ns)}[kv_class]

    def _resolve(self, layer: int, first_block: int) -> IoVec | None:
        return SOURCE


@pytest.mark.parametrize(
    ("need", "kv_class"),
    [
        (Need.LAYERS, KvClass.LAYERS),
        (Need.PAGES, KvClass.LAYERS),
        (Need.ASSEMBLY, KvClass.ASSEMBLY),
        (Need.STORE, KvClass.WRITE_BACK),
    ],
)
def test_each_need_has_a_class_and_its_bytes_are_counted_there(need: Need, kv_class: KvClass) -> None:
    rig = Rig()
    rig.send(need)
    assert [send.kv_class for send, *_ in rig.wire.held] == [kv_class]
    rig.wire.release_one()
    rig.mover.pump()
    assert {found: rig.moved(found) for found in KvClass if rig.moved(found)} == {kv_class: MIB}
    rig.wire.close(0)


def test_every_need_has_a_class() -> None:
    rig = Rig()
    for need in Need:
        rig.send(need)
    assert len(rig.wire.held) == len(Need)
    rig.wire.close(0)


def test_what_stays_in_the_process_rides_on_no_lane() -> None:
    rig = Rig()
    rig.send(Need.LAYERS, None)
    rig.clock.ns = 5_000_000_000
    rig.mover.look_at_lanes()
    rig.wire.release_one()
    rig.mover.pump()
    assert not any(rig.moved(found) for found in KvClass) and not rig.told.counts
    rig.wire.close(0)


def test_what_a_transport_does_not_move_starves_and_what_waits_for_it_does_not_count() -> None:
    rig = Rig()
    for _ in range(20):
        rig.send(Need.ASSEMBLY)
    for rig.clock.ns in range(0, 20_000_000_000, 500_000_000):
        rig.mover.look_at_lanes()
        if rig.told.counts:
            break
    assert 16 <= rig.clock.ns / 1e9 <= 17.5, "the 16 MiB that are under way may take 16 s at the floor"
    assert rig.told.counts == {("lane", "starved"): 2} and rig.lanes.starved("b", rig.clock.ns)
    rig.wire.close(0)


def test_a_route_that_broke_leaves_nothing_under_way() -> None:
    rig = Rig()
    rig.wire.fails = lambda send: Reason.PEER_LOST
    for _ in range(20):
        rig.send(Need.ASSEMBLY)
    while rig.wire.held:
        rig.wire.release_one()
        rig.mover.pump()
    assert not rig.mover._under_way_bytes and not rig.mover._lines
    rig.clock.ns = 60_000_000_000
    rig.mover.look_at_lanes()
    assert not rig.told.counts and not rig.lanes._to_place
    rig.wire.close(0)


async def test_status_has_a_lane_for_each_class_and_the_node_answers_who_asks_for_a_path() -> None:
    async with node_kit() as kit:
        lanes = kit.mover.lanes = LaneWatch(MARKS, floor_bytes_per_s=MIB, window_s=1.0, observer=kit.observer)
        now_ns = kit.services.clock.now_ns()
        lanes.begun(("b", "boot-1"), KvClass.ASSEMBLY, 100, now_ns - 3_000_000_000)
        assert kit.node.lane_starved("b") and kit.node.lane_starved("") and not kit.node.lane_starved("c")
        assert kit.node.starved_nodes() == {"b"}
        reply = status_reply(kit.node, FACTS, {})
        assert [lane.kv_class for lane in reply.lanes] == ["layers", "assembly", "write_back", "prefetch"]
        told = reply.lanes[1]
        assert (told.marks, told.floor_bytes_per_s, told.busy_percent) == (KV_LANE.text, MIB, 100)
        assert (told.starved_peers, told.rate_bytes_per_s, told.sent_bytes) == (1, 0, 0) and told.starved_ms >= 1
        lanes.ended(("b", "boot-1"), KvClass.ASSEMBLY, 100, 100, kit.services.clock.now_ns())
        assert status_reply(kit.node, FACTS, {}).lanes[1].sent_bytes == 100


def status(starved_ms: int, *, peer: bool) -> dict[str, Any]:
    lane = {"kv_class": "layers", "marks": "DSCP 8", "starved_ms": starved_ms}
    peers = [
        {"node": "b", "lane_starved": peer, "lane_starved_from": False},
        {"node": "c", "lane_starved": False, "lane_starved_from": peer},
    ]
    return {"lanes": [lane, lane | {"kv_class": "assembly"}], "peers": peers, "rooms": []}


@pytest.mark.parametrize(
    ("starved_ms", "peer", "last"),
    [
        (0, False, []),
        (
            0,
            True,
            ["warning: KV is below transport.lane_floor to b", "warning: KV is below transport.lane_floor from c"],
        ),
        (
            2500,
            True,
            [
                "warning: KV lane DSCP 8 has been below transport.lane_floor for 2.5 s, to all nodes together",
                "warning: KV is below transport.lane_floor to b",
                "warning: KV is below transport.lane_floor from c",
            ],
        ),
    ],
)
def test_the_command_line_ends_with_what_starves(
    starved_ms: int,
    peer: bool,
    last: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(status_client, "node_status", lambda socket, timeout_s: status(starved_ms, peer=peer))
    assert cli.main(["status", "--socket", "x"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")] == last
