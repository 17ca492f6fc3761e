"""Watches the lane that KV traffic rides on: what rate it gets to other nodes, and whether it starves. Pure: time is an argument.

KV yields to all else on the fabric, so under permanent model traffic its lane may get next to nothing. Classes with the same
marks share one lane, and are judged together: what one leaves the other is no fault of the fabric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvmoverd.core.qos import KvClass
from kvmoverd.node.lane_meter import PARTS, LaneMeter, Seen
from kvmoverd.ports.observer import Observer

BUSY_SHARE = 0.95
"""Of a window, from which on it counts as busy throughout: between two sends of a row there is always a gap."""
WELL_OVER_FLOOR = 1.25
"""A lane that starves has to get so much more than the floor, for a whole window, before it counts as well again."""
HARDLY_BUSY_SHARE = 0.5
"""Below it a lane keeps up with what it is given, though at a low rate: small sends wait for answers, not for the lane."""
FORGET_WINDOWS = 10
"""Without more than that for so long, nothing is known of a lane any more: whoever avoided it may try again."""

Place = tuple[str, str]
"""Node and boot id that sends go to."""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """One class, to all nodes together. `rate_bytes_per_s`: while sends were under way, in the last window; 0 when none were.

    `starved_ns`: how long its lane has been below `floor_bytes_per_s` by now, 0 when it is not; `starved_nodes`: those to
    which it is.
    """

    kv_class: KvClass
    marks: str
    moved_bytes: int
    rate_bytes_per_s: int
    busy_share: float
    floor_bytes_per_s: int
    starved_ns: int
    starved_nodes: int


class _Lane:
    """One set of marks, to one node or to all."""

    def __init__(self, marks: str, node: str, window_ns: int) -> None:
        self.marks, self.node = marks, node
        self.meter = LaneMeter(window_ns)
        self.starved_since_ns: int | None = None
        self._bad_ns = 0

    def patience_ns(self, floor_bytes_per_s: int) -> int:
        """Within which a lane at its floor has ended something, though all that is under way moves at once."""
        return self.meter.under_way_bytes * 1_000_000_000 // max(1, floor_bytes_per_s)

    def judge(self, now_ns: int, floor_bytes_per_s: int, window_ns: int) -> Seen | None:
        """What was seen when it began to starve, or to be well again; None: nothing has changed."""
        seen = self.meter.seen(now_ns, patience_ns=self.patience_ns(floor_bytes_per_s))
        rate = seen.rate_bytes_per_s
        if self.starved_since_ns is None:
            if rate is None or rate >= floor_bytes_per_s or seen.busy_share < BUSY_SHARE:
                return None
            self.starved_since_ns = self._bad_ns = now_ns
            return seen
        good = rate is not None and rate >= floor_bytes_per_s * WELL_OVER_FLOOR
        if not good and seen.busy_share >= HARDLY_BUSY_SHARE:
            self._bad_ns = now_ns
        if now_ns - self._bad_ns < window_ns * (1 if good else FORGET_WINDOWS):
            return None
        self.starved_since_ns = None
        return seen

    def forgettable(self, now_ns: int, window_ns: int) -> bool:
        idle = not self.meter.under_way and now_ns - self.meter.touched_ns >= FORGET_WINDOWS * window_ns
        return idle and self.starved_since_ns is None


class LaneWatch:
    """`marks`: what packets of each class carry, in words. `floor_bytes_per_s` 0: rates are measured, nothing is judged."""

    def __init__(
        self, marks: Mapping[KvClass, str], *, floor_bytes_per_s: int, window_s: float, observer: Observer
    ) -> None:
        self._marks = {kv_class: marks[kv_class] for kv_class in KvClass}
        self._floor_bytes_per_s = floor_bytes_per_s
        self._window_ns = int(window_s * 1e9)
        self._observer = observer
        self._classes = {kv_class: LaneMeter(self._window_ns) for kv_class in KvClass}
        self._to_all = {text: _Lane(text, "", self._window_ns) for text in self._marks.values()}
        self._to_place: dict[tuple[Place, str], _Lane] = {}
        self._starved: set[tuple[str, str]] = set()
        """Node, "" for all, and marks; two starts of one node are one."""
        self._looked_ns = -self._window_ns

    def begun(self, place: Place, kv_class: KvClass, size_bytes: int, now_ns: int) -> None:
        """The transport has got a send to another node."""
        for meter in self._meters(place, kv_class):
            meter.begun(size_bytes, now_ns)

    def ended(self, place: Place, kv_class: KvClass, size_bytes: int, moved_bytes: int | None, now_ns: int) -> None:
        """`moved_bytes` None: the send failed. Its time counts if the lane had been silent for longer than it may be."""
        if moved_bytes is not None:
            for meter in self._meters(place, kv_class):
                meter.ended(size_bytes, moved_bytes, now_ns)
            return
        for lane in self._lanes(place, kv_class):
            late = lane.meter.silence_ns(now_ns) > lane.patience_ns(self._floor_bytes_per_s)
            lane.meter.given_up(size_bytes, now_ns, counts=late and self._floor_bytes_per_s > 0)
        self._classes[kv_class].given_up(size_bytes, now_ns, counts=False)

    def look(self, now_ns: int) -> None:
        """Judges all lanes, and tells the observer what has changed. To be called now and then: silence calls nobody.

        A look soon after another sees nothing new and costs nothing: whoever asks looks first.
        """
        if 0 <= now_ns - self._looked_ns < self._window_ns // PARTS:
            return
        self._looked_ns = now_ns
        if self._floor_bytes_per_s:
            for lane in self._all_lanes():
                seen = lane.judge(now_ns, self._floor_bytes_per_s, self._window_ns)
                if seen is not None:
                    state = "well" if lane.starved_since_ns is None else "starved"
                    self._observer.lane_changed(lane.marks, lane.node, state, _text(seen, self._floor_bytes_per_s))
        for key in [key for key, lane in self._to_place.items() if lane.forgettable(now_ns, self._window_ns)]:
            del self._to_place[key]
        self._starved = {(lane.node, lane.marks) for lane in self._all_lanes() if lane.starved_since_ns is not None}

    def starved(self, node: str, now_ns: int) -> bool:
        """Whether any lane to that node gets too little; for "" those to all nodes together."""
        self.look(now_ns)
        return any((node, marks) in self._starved for marks in self._to_all)

    def starved_nodes(self, now_ns: int) -> set[str]:
        """Those to which any lane gets too little."""
        self.look(now_ns)
        return {node for node, _ in self._starved if node}

    def report(self, now_ns: int) -> list[LaneReport]:
        """One for each class, most urgent first."""
        self.look(now_ns)
        return [self._report(kv_class, now_ns) for kv_class in KvClass]

    def rate_bytes_per_s(self, now_ns: int) -> int:
        """What all lanes got in the last window while there was work for them; 0: there was none."""
        seen = [
            lane.meter.seen(now_ns, patience_ns=lane.patience_ns(self._floor_bytes_per_s or 1))
            for lane in self._to_all.values()
        ]
        return int(sum(each.rate_bytes_per_s or 0 for each in seen))

    def _report(self, kv_class: KvClass, now_ns: int) -> LaneReport:
        marks, meter = self._marks[kv_class], self._classes[kv_class]
        since_ns = self._to_all[marks].starved_since_ns
        floor = self._floor_bytes_per_s
        patience_ns = self._to_all[marks].patience_ns(floor) if floor else self._window_ns
        seen = meter.seen(now_ns, patience_ns=patience_ns)
        return LaneReport(
            kv_class,
            marks,
            meter.moved_bytes,
            int(seen.rate_bytes_per_s or 0),
            seen.busy_share,
            floor,
            max(1, now_ns - since_ns) if since_ns is not None else 0,
            sum(bool(node) and found == marks for node, found in self._starved),
        )

    def _meters(self, place: Place, kv_class: KvClass) -> list[LaneMeter]:
        return [self._classes[kv_class], *(lane.meter for lane in self._lanes(place, kv_class))]

    def _lanes(self, place: Place, kv_class: KvClass) -> tuple[_Lane, _Lane]:
        marks = self._marks[kv_class]
        lane = self._to_place.get((place, marks))
        if lane is None:
            lane = self._to_place[place, marks] = _Lane(marks, place[0], self._window_ns)
        return self._to_all[marks], lane

    def _all_lanes(self) -> Iterable[_Lane]:
        return [*self._to_all.values(), *self._to_place.values()]


def _text(seen: Seen, floor_bytes_per_s: int) -> str:
    if not seen.busy_ns:
        return f"nothing to move for a while; transport.lane_floor is {floor_bytes_per_s} B/s"
    return (
        f"{int(seen.rate_bytes_per_s or 0)} B/s while it had work, {seen.busy_share:.0%} of the last "
        f"{seen.covered_ns / 1e9:.2g} s; transport.lane_floor is {floor_bytes_per_s} B/s"
    )
