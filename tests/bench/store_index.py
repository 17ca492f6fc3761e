"""Look-ups of 500 keys and RAM per key of the segment store's index, in a process of its own: its growth is the index alone.

Keys come as an author's log tells them: the entries of a segment of 418 records at a time. Chains are looked up that are all
stored, stored up to a random place, and not stored at all, with nothing else that keeps the index in the processor's caches.
Between rounds the index grows by a hundredth, so that it is seen at many fillings.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.core.store.key_table import KEY_BYTES
from kvmoverd.core.store.log_pages import ENTRY
from tests.bench.daemon import BenchFailed
from tests.bench.records import new_index

CHAIN_KEYS = 500
SEGMENT_RECORDS = 418
RECORD_PAGES = 627
FINGERPRINT16 = b"0123456789abcdef"
SAMPLES = 1 << 20
GROWTH = 100
"""One in so many keys more from round to round."""
WARM_KEYS = 10_000
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Looks:
    """One round; microseconds. `hit`, `prefix`, `miss`: the median; `p99`: of the kind of chain that is slowest."""

    keys: int
    hit: float
    prefix: float
    miss: float
    p99: float
    ram_bytes_per_key: float
    """By how much the process has grown."""
    told_bytes_per_key: float
    """What the index says of itself."""

    @property
    def worst(self) -> float:
        return max(self.hit, self.prefix, self.miss)


@dataclass(frozen=True, slots=True)
class Measured:
    """`moving_us`: look-ups, all found, in the middle of a move to another array: median and 99th percentile."""

    rounds: list[Looks]
    load_s: float
    moving_us: tuple[float, float]


def in_a_process(keys: int, rounds: int, looks: int) -> Measured:
    """Raises `BenchFailed` when it takes longer than `TIMEOUT_S`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(measure, (keys, rounds, looks)).get(TIMEOUT_S)
        except multiprocessing.TimeoutError:
            raise BenchFailed(f"an index of {keys} keys was not measured within {TIMEOUT_S:g} s") from None


def measure(keys: int, rounds: int, looks: int) -> Measured:
    """In this process: what was freed before it began counts for less growth than there is."""
    grower = _Grower(keys)
    # What the first look-ups take of the process for good is no part of an index.
    _look_at(_grown(WARM_KEYS), 0, looks)
    before_bytes = _rss_bytes()
    began_s = time.perf_counter()
    grower.grow(keys)
    load_s = time.perf_counter() - began_s
    found = []
    for _ in range(rounds):
        while grower.index.tidy():
            pass
        grown_bytes = _rss_bytes() - before_bytes
        found.append(_look_at(grower, grown_bytes, looks))
        grower.grow(grower.told + keys // GROWTH)
    _begin_to_move(grower.index, grower.told)
    later = grower.sample[len(grower.sample) // 4 :]
    return Measured(found, load_s, _look(grower.index, _chains(later, grower.chance, lambda: CHAIN_KEYS), looks))


def _grown(keys: int) -> _Grower:
    grower = _Grower(keys)
    grower.grow(keys)
    return grower


class _Grower:
    """An index that is told of more and more segments, and keys to look up, evenly of the first `keys`."""

    def __init__(self, keys: int) -> None:
        self.index = new_index()
        self.chance = np.random.default_rng(keys)
        # Written to, so that it has its memory before that of the index is counted.
        self.sample = np.full((min(SAMPLES, keys), KEY_BYTES // 8), 1, np.uint64)
        self.told = 0
        self._each = max(1, keys // len(self.sample))

    def grow(self, keys: int) -> None:
        while self.told < keys:
            self._add_segment(1 + self.told // SEGMENT_RECORDS)

    def _add_segment(self, number: int) -> None:
        entries = np.zeros(SEGMENT_RECORDS, ENTRY)
        entries["key"] = self.chance.integers(0, 1 << 64, (SEGMENT_RECORDS, KEY_BYTES // 8), np.uint64)
        entries["page"] = 1 + np.arange(SEGMENT_RECORDS) * RECORD_PAGES
        segment_id = self.index.add_segment(
            "bench.0", number, fingerprint16=FINGERPRINT16, generation=1, purge=0, record_pages=RECORD_PAGES
        )
        self.index.add_blocks(segment_id, entries)
        kept = np.arange(-self.told % self._each, SEGMENT_RECORDS, self._each)
        rows = (self.told + kept) // self._each
        inside = rows < len(self.sample)
        self.sample[rows[inside]] = entries["key"][kept[inside]]
        self.told += SEGMENT_RECORDS


def _look_at(grower: _Grower, grown_bytes: int, looks: int) -> Looks:
    index, sample, chance = grower.index, grower.sample, grower.chance
    state = index.load_state()
    if state.keys < grower.told * 0.999:
        raise BenchFailed(f"the index has {state.keys} of {grower.told} keys")
    kinds: tuple[Callable[[], int], ...] = (lambda: CHAIN_KEYS, lambda: int(chance.integers(CHAIN_KEYS)), lambda: 0)
    spent_us = [_look(index, _chains(sample, chance, known), looks) for known in kinds]
    hit, prefix, miss = (p50_us for p50_us, _ in spent_us)
    p99_us = max(p99_us for _, p99_us in spent_us)
    return Looks(state.keys, hit, prefix, miss, p99_us, grown_bytes / state.keys, state.ram_bytes / state.keys)


def _begin_to_move(index: SegmentIndex, keys: int) -> None:
    """Drops the first tenth of all segments, and sweeps half of the way."""
    index.drop_segments("bench.0", range(1, keys // SEGMENT_RECORDS // 10))
    index.tidy(keys * 3 // 4)


def _chains(
    sample: npt.NDArray[np.uint64], chance: np.random.Generator, prefix: Callable[[], int]
) -> Iterator[tuple[bytes, int]]:
    """Joined keys, and how many of them, the first ones, are stored."""
    while True:
        known = prefix()
        chain = chance.integers(0, 1 << 64, (CHAIN_KEYS, KEY_BYTES // 8), np.uint64)
        chain[:known] = sample[chance.integers(0, len(sample), known)]
        yield chain.tobytes(), known


def _look(index: SegmentIndex, chains: Iterator[tuple[bytes, int]], looks: int) -> tuple[float, float]:
    """Microseconds, p50 and p99. Raises `BenchFailed` for a wrong answer."""
    spent_s = np.zeros(looks)
    for turn in range(looks):
        keys, known = next(chains)
        start_s = time.perf_counter()
        _, _, found = index.locate(FINGERPRINT16, keys)
        spent_s[turn] = time.perf_counter() - start_s
        if not found[:known].all() or found[known:].any():
            raise BenchFailed(
                f"{np.count_nonzero(found[:known])} of {known} keys were found, and some that are not there"
            )
    p50_s, p99_s = np.percentile(spent_s, [50, 99])
    return float(p50_s) * 1e6, float(p99_s) * 1e6


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
