"""What was used and what is pinned, by segment and record, in RAM: what the choice of victims goes by.

Counts saturate at 255 and are halved every ten minutes. A request touches all keys of its prefix, so a parent never counts
less than its descendants: saturating and halving keep that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.uint8]

DECAY_NS = 600 * 10**9
COUNT_MAX = 255
FRESH_MAX = 1 << 20
"""Touches that wait to be told to others: beyond that they are summed up, and should that not help, forgotten."""
_CAPACITY_MIN = 64
_DECAY_RECORDS = 1 << 20
_SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Used:
    """Records and how often each was used, or for how many more seconds it is pinned; three arrays of one length."""

    segment_ids: Ids
    record_indexes: Ids
    counts: Ids

    def __len__(self) -> int:
        return len(self.segment_ids)


class Touches:
    """Counts of one root. Thread-safe; `touch` takes some 10 us for 500 records, all else is rare.

    Counts of all segments lie in one array, an extent for each that was ever touched, so that one indexing finds them all.
    `now_ns`: a monotonic clock. Arrays that are handed over are kept: they must not change.
    """

    def __init__(self, *, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._starts = np.zeros(256, np.int64)
        self._capacity = np.zeros(256, np.uint32)
        self._used_ns = np.zeros(256, np.int64)
        self._counts: Counts = np.zeros(1 << 14, np.uint8)
        self._taken = 0
        self._free: dict[int, list[int]] = {}
        self._fresh: list[tuple[Ids, Ids]] = []
        self._fresh_records = 0
        self.fresh_dropped = 0
        """Touches that other nodes will not hear of, as too many waited."""
        self._pins: dict[int, dict[str, npt.NDArray[np.int64]]] = {}
        self._decayed_ns = now_ns()

    def touch(self, segment_ids: Ids, record_indexes: Ids) -> None:
        """These records, no one twice, were used here, once each. Both arrays have one length."""
        with self._lock:
            self._add(segment_ids, record_indexes, np.uint8(1))
            self._fresh.append((segment_ids, record_indexes))
            self._fresh_records += len(segment_ids)
            if self._fresh_records > FRESH_MAX:
                self._sum_fresh()

    def add(self, segment_ids: Ids, record_indexes: Ids, counts: npt.NDArray[np.integer]) -> None:
        """These records, no one twice, were used so often by other nodes, or before they moved here."""
        with self._lock:
            self._add(segment_ids, record_indexes, np.minimum(counts, COUNT_MAX).astype(np.uint8))

    def heat(self, segment_id: int, records: int = 0) -> Counts:
        """A copy of the counts; `records` long, or as long as the highest record that was touched asks for."""
        with self._lock:
            start, capacity = self._extent(segment_id)
            known = min(capacity, records) if records else capacity
            found = np.zeros(records or capacity, np.uint8)
            found[:known] = self._counts[start : start + known]
            return found

    def used_ns(self, segment_id: int) -> int:
        """When one of its records was last used, on the monotonic clock; 0: never, as far as is known."""
        with self._lock:
            return int(self._used_ns[segment_id]) if segment_id < len(self._used_ns) else 0

    def decay(self) -> None:
        """Halves the counts once for every ten minutes since it was last done. Cheap when nothing is due."""
        with self._lock:
            halvings = (self._now_ns() - self._decayed_ns) // DECAY_NS
            self._decayed_ns += halvings * DECAY_NS
            taken = self._taken
        for start in range(0, taken if halvings else 0, _DECAY_RECORDS):
            with self._lock:
                self._counts[start : min(taken, start + _DECAY_RECORDS)] >>= min(halvings, 8)

    def forget(self, segment_id: int) -> None:
        """The segment is gone: so are its counts and pins."""
        with self._lock:
            start, capacity = self._extent(segment_id)
            self._pins.pop(segment_id, None)
            if not capacity:
                return
            self._counts[start : start + capacity] = 0
            self._free.setdefault(capacity, []).append(start)
            self._capacity[segment_id] = self._starts[segment_id] = self._used_ns[segment_id] = 0

    def pin(self, segment_ids: Ids, record_indexes: Ids, for_s: float, *, by: str = "") -> None:
        """Keeps these records for so long from now, 0: no longer. Pins of each `by` stand apart; "" is this node."""
        until_ns = self._now_ns() + round(for_s * _SECOND_NS) if for_s > 0 else 0
        with self._lock:
            for segment_id in np.unique(segment_ids).tolist():
                records = record_indexes[segment_ids == segment_id]
                self._pin(segment_id, records, until_ns, by)

    def unpin_all(self, *, by: str) -> None:
        """Whoever pinned is dead: so are his pins."""
        with self._lock:
            for segment_id in [number for number, pins in self._pins.items() if by in pins]:
                del self._pins[segment_id][by]
                if not self._pins[segment_id]:
                    del self._pins[segment_id]

    def pinned(self, segment_id: int) -> int:
        """How many of its records are pinned now, whoever did it."""
        now_ns = self._now_ns()
        with self._lock:
            pins = list(self._pins.get(segment_id, {}).values())
            found: set[int] = set()
            for until_ns in pins:
                found.update(np.flatnonzero(until_ns > now_ns).tolist())
            return len(found)

    def own_pins(self, segment_id: int) -> Ids | None:
        """Records that are pinned by this node alone; None where others have pins there, which they tell of by place."""
        now_ns = self._now_ns()
        with self._lock:
            pins = self._pins.get(segment_id, {})
            if any((until_ns > now_ns).any() for by, until_ns in pins.items() if by):
                return None
            own = pins.get("")
            return np.flatnonzero(own > now_ns).astype(np.uint32) if own is not None else np.empty(0, np.uint32)

    def move_pin(self, segment_id: int, record: int, to_segment_id: int, to_record: int) -> None:
        """The record was appended anew there: this node's pin goes along for the time that it has left."""
        with self._lock:
            own = self._pins.get(segment_id, {}).get("")
            if own is not None and record < len(own) and own[record]:
                self._pin(to_segment_id, np.array([to_record], np.uint32), int(own[record]), "")
                own[record] = 0

    def pins(self) -> Used:
        """What this node has pinned; `counts`: for how many more seconds, rounded up."""
        now_ns = self._now_ns()
        ids, records, left_s = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
        with self._lock:
            self._drop_old_pins(now_ns)
            for segment_id, pins in self._pins.items():
                if (until_ns := pins.get("")) is None:
                    continue
                found = np.flatnonzero(until_ns > now_ns)
                ids.append(np.full(len(found), segment_id, np.uint32))
                records.append(found.astype(np.uint32))
                left_s.append((-((now_ns - until_ns[found]) // _SECOND_NS)).astype(np.uint32))
        return Used(np.concatenate(ids), np.concatenate(records), np.concatenate(left_s))

    def take_fresh(self) -> Used:
        """What `touch` was told since the last call, summed up: sorted by segment id and record."""
        with self._lock:
            fresh, self._fresh, self._fresh_records = self._fresh, [], 0
        return _summed(fresh)

    def _add(self, segment_ids: Ids, record_indexes: Ids, counts: npt.NDArray[np.uint8] | np.uint8) -> None:
        if not len(segment_ids):
            return
        try:
            room = self._capacity[segment_ids]
        except IndexError:
            self._grow_tables(int(segment_ids.max()))
            room = self._capacity[segment_ids]
        if (record_indexes >= room).any():
            self._make_room(segment_ids, record_indexes)
        at = self._starts[segment_ids] + record_indexes
        sums = self._counts[at] + counts
        # A sum of bytes that went round is less than what was added.
        sums[sums < counts] = COUNT_MAX
        self._counts[at] = sums
        self._used_ns[segment_ids] = self._now_ns()

    def _extent(self, segment_id: int) -> tuple[int, int]:
        if segment_id >= len(self._capacity):
            return 0, 0
        return int(self._starts[segment_id]), int(self._capacity[segment_id])

    def _grow_tables(self, segment_id: int) -> None:
        more = max(segment_id + 1, 2 * len(self._starts)) - len(self._starts)
        self._starts = np.pad(self._starts, (0, more))
        self._capacity = np.pad(self._capacity, (0, more))
        self._used_ns = np.pad(self._used_ns, (0, more))

    def _make_room(self, segment_ids: Ids, record_indexes: Ids) -> None:
        """Gives segments whose extents are too short, or that have none, ones of a power of two that suffices."""
        for segment_id in np.unique(segment_ids).tolist():
            highest = int(record_indexes[segment_ids == segment_id].max())
            start, capacity = self._extent(segment_id)
            if highest < capacity:
                continue
            wanted = max(_CAPACITY_MIN, 1 << highest.bit_length())
            new = self._take_extent(wanted)
            self._counts[new : new + capacity] = self._counts[start : start + capacity]
            if capacity:
                self._counts[start : start + capacity] = 0
                self._free.setdefault(capacity, []).append(start)
            self._starts[segment_id], self._capacity[segment_id] = new, wanted

    def _take_extent(self, capacity: int) -> int:
        """Where an extent of zeros begins."""
        if self._free.get(capacity):
            return self._free[capacity].pop()
        start = self._taken
        self._taken += capacity
        if self._taken > len(self._counts):
            # Not np.pad: fresh zeros cost no memory until they are touched.
            larger = np.zeros(max(self._taken, 2 * len(self._counts)), np.uint8)
            larger[:start] = self._counts[:start]
            self._counts = larger
        return start

    def _pin(self, segment_id: int, records: Ids, until_ns: int, by: str) -> None:
        pins = self._pins.setdefault(segment_id, {})
        old = pins.get(by)
        length = int(records.max()) + 1
        if old is None or len(old) < length:
            larger = np.zeros(length, np.int64)
            if old is not None:
                larger[: len(old)] = old
            pins[by] = larger
        pins[by][records] = until_ns

    def _drop_old_pins(self, now_ns: int) -> None:
        for segment_id, pins in list(self._pins.items()):
            for by in [name for name, until_ns in pins.items() if not (until_ns > now_ns).any()]:
                del pins[by]
            if not pins:
                del self._pins[segment_id]

    def _sum_fresh(self) -> None:
        summed = _summed(self._fresh)
        if len(summed) > FRESH_MAX // 2:
            self.fresh_dropped += len(summed)
            self._fresh, self._fresh_records = [], 0
            return
        # The sum's counts are dropped: used at all is what keeps a record, and how often is a detail.
        self._fresh, self._fresh_records = [(summed.segment_ids, summed.record_indexes)], len(summed)


def _summed(parts: list[tuple[Ids, Ids]]) -> Used:
    if not parts:
        none = np.empty(0, np.uint32)
        return Used(none, none, none)
    codes = np.concatenate([part[0] for part in parts]).astype(np.uint64) << np.uint64(32)
    codes |= np.concatenate([part[1] for part in parts])
    found, counts = np.unique(codes, return_counts=True)
    return Used(
        (found >> np.uint64(32)).astype(np.uint32),
        (found & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        counts.astype(np.uint32),
    )
