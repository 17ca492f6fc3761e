"""The watch over the KV lane: what rate it gets while it has work, when it starves, and when it is well again."""

from __future__ import annotations

from random import Random

import pytest

from kvmoverd.adapters.observers.count import CountingObserver
from kvmoverd.core.qos import KvClass
from kvmoverd.node.lane_meter import PARTS, LaneMeter
from kvmoverd.node.lane_watch import FORGET_WINDOWS, LaneReport, LaneWatch

MS = 1_000_000
WINDOW_NS = 1000 * MS
MIB = 1 << 20
FLOOR = 100 * MIB
B, C = ("b", "boot-1"), ("c", "boot-1")
ONE_LANE = dict.fromkeys(KvClass, "KV")
TWO_LANES = {kv_class: "slow" if kv_class is KvClass.WRITE_BACK else "KV" for kv_class in KvClass}


class Told(CountingObserver):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str, str]] = []
        self.texts: list[str] = []

    def lane_changed(self, lane: str, node: str, state: str, message: str) -> None:
        self.said.append((lane, node, state))
        self.texts.append(message)


class Rig:
    """A watch and a clock that looks every half second, as the daemon does."""

    def __init__(self, floor: int = FLOOR, marks: dict[KvClass, str] = ONE_LANE, begin_ns: int = 77 * MS) -> None:
        self.told = Told()
        self.watch = LaneWatch(marks, floor_bytes_per_s=floor, window_s=1.0, observer=self.told)
        self.now_ns = begin_ns
        self._look_ns = begin_ns

    def wait(self, length_ms: float) -> None:
        until_ns = self.now_ns + int(length_ms * MS)
        while self._look_ns <= until_ns:
            self.watch.look(self._look_ns)
            self._look_ns += WINDOW_NS // 2
        self.now_ns = until_ns

    def begin(self, size_bytes: int, place: tuple[str, str] = B, kv_class: KvClass = KvClass.LAYERS) -> None:
        self.watch.begun(place, kv_class, size_bytes, self.now_ns)

    def end(self, size_bytes: int, place: tuple[str, str] = B, kv_class: KvClass = KvClass.LAYERS) -> None:
        self.watch.ended(place, kv_class, size_bytes, size_bytes, self.now_ns)

    def fail(self, size_bytes: int, place: tuple[str, str] = B) -> None:
        self.watch.ended(place, KvClass.LAYERS, size_bytes, None, self.now_ns)

    def move(
        self,
        length_ms: float,
        rate_bytes_per_s: float,
        *,
        size_bytes: int = MIB,
        place: tuple[str, str] = B,
        kv_class: KvClass = KvClass.LAYERS,
    ) -> None:
        """One send after the other, for so long."""
        until_ns = self.now_ns + int(length_ms * MS)
        while self.now_ns < until_ns:
            self.begin(size_bytes, place, kv_class)
            self.wait(size_bytes / rate_bytes_per_s * 1000)
            self.end(size_bytes, place, kv_class)

    def starves(self, node: str = "b") -> bool:
        return self.watch.starved(node, self.now_ns)

    def report(self, kv_class: KvClass = KvClass.LAYERS) -> LaneReport:
        return {found.kv_class: found for found in self.watch.report(self.now_ns)}[kv_class]


def test_a_lane_below_its_floor_for_a_whole_window_starves_and_says_so_once() -> None:
    rig = Rig()
    rig.move(850, FLOOR * 0.5)
    assert not rig.starves(), "not a whole window yet"
    rig.move(3000, FLOOR * 0.5)
    assert rig.starves() and rig.starves("") and not rig.starves("c")
    assert rig.told.said == [("KV", "", "starved"), ("KV", "b", "starved")]
    assert "transport.lane_floor is 104857600 B/s" in rig.told.texts[0] and "of the last 1" in rig.told.texts[0]
    report = rig.report()
    assert report.rate_bytes_per_s == pytest.approx(FLOOR * 0.5, rel=0.1) and report.busy_share > 0.95
    assert 2000 * MS < report.starved_ns < 4000 * MS and report.starved_nodes == 1


def test_a_lane_over_its_floor_never_starves() -> None:
    rig = Rig()
    rig.move(10_000, FLOOR * 1.05)
    assert not rig.starves() and rig.told.said == []
    assert rig.report().starved_ns == 0 and rig.report().moved_bytes >= 10 * FLOOR


def test_a_lane_where_nothing_ends_at_all_starves() -> None:
    rig = Rig()
    rig.begin(MIB)
    rig.wait(900)
    assert not rig.starves()
    rig.wait(600)
    assert rig.starves()
    assert rig.report().rate_bytes_per_s == 0


def test_a_send_that_takes_longer_than_a_window_is_neither_a_silence_nor_a_burst() -> None:
    """At 1.2 times the floor the end of 512 MiB is more than four windows away."""
    rig = Rig()
    rig.move(30_000, FLOOR * 1.2, size_bytes=512 * MIB)
    assert rig.told.said == []
    assert rig.report().rate_bytes_per_s == pytest.approx(FLOOR * 1.2, rel=0.01)
    rig.begin(512 * MIB)
    rig.wait(5000)
    assert not rig.starves(), "at its floor it may take 5.12 s"
    rig.wait(1500)
    assert rig.starves()


def test_many_sends_that_move_side_by_side_may_end_all_at_once() -> None:
    rig = Rig()
    for _ in range(5):
        for _ in range(16):
            rig.begin(16 * MIB)
        rig.wait(2500)
        for _ in range(16):
            rig.end(16 * MIB)
    assert rig.told.said == [] and not rig.starves()
    assert rig.report().rate_bytes_per_s == pytest.approx(256 * MIB / 2.5, rel=0.01)


def test_pairs_of_sends_that_end_shortly_after_each_other_are_no_bursts() -> None:
    """As over two connections: 1 MiB each, side by side at 0.8 times the floor, the second a little later."""
    rig, rates = Rig(floor=2 * MIB), []
    pair_ms = 2000 / 1.6
    for _ in range(12):
        rig.begin(MIB)
        rig.begin(MIB)
        rig.wait(pair_ms * 0.9)
        rig.end(MIB)
        rig.wait(pair_ms * 0.1)
        rig.end(MIB)
        rates.append(rig.report().rate_bytes_per_s / MIB)
    assert all(1.3 < rate < 1.9 for rate in rates), rates
    assert rig.starves() and rig.told.counts["lane", "well"] == 0


def test_bursts_at_full_rate_with_pauses_do_not_starve() -> None:
    rig = Rig()
    for _ in range(20):
        rig.move(50, FLOOR * 10, size_bytes=MIB)
        rig.wait(450)
    assert rig.told.said == []
    assert rig.report().rate_bytes_per_s == pytest.approx(FLOOR * 10, rel=0.05)
    assert rig.report().busy_share == pytest.approx(0.1, abs=0.05)


def test_small_sends_now_and_then_keep_up_at_a_low_rate_and_do_not_starve() -> None:
    rig = Rig()
    for _ in range(2000):
        rig.move(0.5, 5 * MIB, size_bytes=4096)
        rig.wait(2)
    assert rig.told.said == []


def test_short_gaps_between_slow_sends_hide_no_starvation() -> None:
    rig = Rig()
    for _ in range(20):
        rig.move(100, FLOOR * 0.3)
        rig.wait(2)
    assert rig.starves()


def test_an_idle_lane_neither_begins_nor_goes_on_starving() -> None:
    rig = Rig()
    rig.wait(10_000)
    assert rig.told.said == []
    rig.move(3000, FLOOR * 0.5)
    assert rig.starves()
    rig.wait((FORGET_WINDOWS - 2) * 1000)
    assert rig.starves(), "nothing is known to have changed"
    rig.wait(4000)
    assert not rig.starves() and not rig.starves("")
    assert rig.told.said[-1] == ("KV", "b", "well") and "nothing to move" in rig.told.texts[-1]
    rig.wait(1000)
    assert not rig.watch._to_place, "places that nothing goes to are forgotten"


def test_it_takes_well_over_the_floor_for_a_window_to_be_well_again() -> None:
    rig = Rig()
    rig.move(2500, FLOOR * 0.5)
    assert rig.starves()
    rig.move(5000, FLOOR * 1.1)
    assert rig.starves(), "over the floor, but not by enough"
    rig.move(700, FLOOR * 3)
    assert rig.starves(), "not for long enough"
    rig.move(2500, FLOOR * 3)
    assert not rig.starves() and not rig.starves("")
    assert rig.told.said == [("KV", node, state) for state in ("starved", "well") for node in ("", "b")]
    assert rig.report().starved_ns == 0


def test_a_lane_around_its_floor_does_not_flap() -> None:
    rng, rig = Random(3), Rig()
    for _ in range(200):
        rig.move(300, FLOOR * rng.uniform(0.7, 1.25))
    assert rig.told.counts["lane", "well"] == 0 and len(rig.told.said) <= 2


def test_bursts_after_a_starvation_show_that_it_is_over() -> None:
    rig = Rig()
    rig.move(2500, FLOOR * 0.5)
    for _ in range(8):
        rig.wait(450)
        rig.move(20, FLOOR * 10)
    assert not rig.starves()


def test_one_slow_node_does_not_make_the_lane_to_all_nodes_starve() -> None:
    rig = Rig()
    for _ in range(400):
        rig.begin(MIB // 4, B)
        rig.move(10, FLOOR * 4, place=C)
        rig.end(MIB // 4, B)
    assert rig.starves("b") and not rig.starves("c") and not rig.starves("")
    assert rig.report().starved_ns == 0 and rig.report().starved_nodes == 1
    assert rig.watch.starved_nodes(rig.now_ns) == {"b"}


def test_classes_of_one_lane_are_judged_together() -> None:
    """What layers leave to the copies for the store is the node's own choice."""
    rig = Rig()
    for _ in range(400):
        rig.begin(MIB // 16, B, KvClass.ASSEMBLY)
        rig.move(10, FLOOR * 2)
        rig.end(MIB // 16, B, KvClass.ASSEMBLY)
    assert not rig.starves() and rig.report(KvClass.ASSEMBLY).rate_bytes_per_s < FLOOR // 8


def test_classes_with_other_marks_are_other_lanes() -> None:
    rig = Rig(marks=TWO_LANES)
    for _ in range(400):
        rig.begin(MIB // 16, B, KvClass.WRITE_BACK)
        rig.move(10, FLOOR * 2)
        rig.end(MIB // 16, B, KvClass.WRITE_BACK)
    assert rig.starves()
    assert rig.report().starved_ns == 0 and rig.report().starved_nodes == 0
    assert rig.report(KvClass.WRITE_BACK).starved_ns > 0
    assert {lane for lane, *_ in rig.told.said} == {"slow"}


def test_sends_that_fail_count_against_the_lane_only_after_a_long_silence() -> None:
    rig = Rig()
    for _ in range(100):
        rig.begin(16 * MIB)
        rig.wait(50)
        rig.fail(16 * MIB)
    assert rig.told.said == [], "refused, or cancelled: nobody knows what they moved"
    rig.begin(MIB)
    rig.wait(1500)
    rig.fail(MIB)
    assert rig.starves()


def test_without_a_floor_rates_are_measured_and_nothing_is_judged() -> None:
    rig = Rig(floor=0)
    rig.begin(MIB)
    rig.wait(20_000)
    assert not rig.starves() and rig.told.said == []
    rig.end(MIB)
    report = rig.report()
    assert report.moved_bytes == MIB and report.rate_bytes_per_s == pytest.approx(MIB / 20, rel=0.01)
    assert report.floor_bytes_per_s == 0 and report.busy_share > 0.9


def test_every_class_is_reported_most_urgent_first() -> None:
    rig = Rig(marks=TWO_LANES)
    assert [(found.kv_class, found.marks) for found in rig.watch.report(0)] == list(TWO_LANES.items())


def test_whatever_happens_bytes_and_busy_time_add_up() -> None:
    rng = Random(11)
    for _ in range(200):
        meter, now_ns, open_bytes, moved_bytes = LaneMeter(WINDOW_NS), rng.randrange(10**12), list[int](), 0
        began_ns, busy_ns = now_ns, 0
        while now_ns - began_ns < WINDOW_NS * 9 // 10:
            if rng.random() < 0.5 or not open_bytes:
                open_bytes.append(rng.randrange(MIB))
                meter.begun(open_bytes[-1], now_ns)
            else:
                size_bytes = open_bytes.pop(rng.randrange(len(open_bytes)))
                meter.ended(size_bytes, size_bytes, now_ns)
                moved_bytes += size_bytes
            step_ns = rng.choice([0, 1, rng.randrange(20 * MS)])
            busy_ns += step_ns * bool(open_bytes)
            now_ns += step_ns
        seen = meter.seen(now_ns, patience_ns=-1)
        assert seen.moved_bytes == pytest.approx(moved_bytes) and meter.moved_bytes == moved_bytes
        assert seen.busy_ns == pytest.approx(busy_ns) and seen.busy_share <= 1.0
        assert meter.under_way == len(open_bytes) and meter.under_way_bytes == sum(open_bytes)
        assert WINDOW_NS <= seen.covered_ns <= WINDOW_NS * (PARTS + 1) // PARTS
