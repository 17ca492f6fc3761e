"""Look-ups of 500 keys, RAM per key and loading of the segment store's index: `python -m tests.bench.store_index --keys 1000000`.

Each number of keys is measured in a process of its own, so that the growth of its resident memory is the index alone. Keys
come as an author's log tells them: `--batch` entries of one segment of 418 records at a time; those in use are looked up in
an index that nothing else keeps in the processor's caches, by chains of three kinds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.key_table import KEY_BYTES
from kvmoverd.core.store.log_pages import ENTRY

CHAIN_KEYS = 500
SEGMENT_RECORDS = 418
RECORD_PAGES = 627
FINGERPRINT16 = b"0123456789abcdef"
SAMPLES = 1 << 20
LOOKS = 1000
RAM_BYTES_MAX = 1 << 36
LOOKUP_AIM_US, RAM_AIM_BYTES = 100.0, 32.0


@dataclass(frozen=True)
class Figures:
    """`lookup_*`: of 500 keys, microseconds, p50 and p99; all found, none found, found up to a random place of the chain;
    `lookup_moving_us`: all found, in the middle of a move to another array.

    `entries_per_s`: over all calls of `add_blocks`, growth included; `add_us_max`: the longest call. `ram_bytes_per_key`:
    what the index says that its arrays take; `rss_bytes_per_key`: by how much the process has grown.
    """

    keys: int
    batch: int
    lookup_hit_us: tuple[float, float]
    lookup_prefix_us: tuple[float, float]
    lookup_miss_us: tuple[float, float]
    lookup_moving_us: tuple[float, float]
    find_us: float
    entries_per_s: float
    add_us_p50: float
    add_us_p99: float
    add_us_max: float
    ram_bytes_per_key: float
    rss_bytes_per_key: float


def measure(keys: int, batch: int = SEGMENT_RECORDS, looks: int = LOOKS) -> Figures:
    """In this process: what was freed before it began counts for less growth than there is."""
    index = SegmentIndex(
        ram_bytes_max=RAM_BYTES_MAX, touches=Touches(now_ns=time.monotonic_ns), now_ns=time.monotonic_ns
    )
    sample = np.zeros((min(SAMPLES, keys), KEY_BYTES // 8), np.uint64)
    sample[:] = 1
    chance = np.random.default_rng(keys)
    before_bytes = _rss_bytes()
    calls_s = _load(index, keys, batch, sample, chance)
    while index.tidy():
        pass
    grown_bytes = _rss_bytes() - before_bytes
    spent_s = np.sort(np.array(calls_s))
    state = index.load_state()
    assert state.keys >= keys * 0.999, f"{state.keys} keys are there of {keys}"
    steady = Figures(
        keys=state.keys,
        batch=batch,
        lookup_moving_us=(0.0, 0.0),
        lookup_hit_us=_look(index, _chains(sample, chance, lambda: CHAIN_KEYS), looks),
        lookup_prefix_us=_look(index, _chains(sample, chance, lambda: int(chance.integers(CHAIN_KEYS))), looks),
        lookup_miss_us=_look(index, _chains(sample, chance, lambda: 0), looks),
        find_us=_find_us(index, sample),
        entries_per_s=state.keys / float(spent_s.sum()),
        add_us_p50=float(spent_s[len(spent_s) // 2]) * 1e6,
        add_us_p99=float(spent_s[len(spent_s) * 99 // 100]) * 1e6,
        add_us_max=float(spent_s[-1]) * 1e6,
        ram_bytes_per_key=state.ram_bytes / state.keys,
        rss_bytes_per_key=grown_bytes / state.keys,
    )
    _begin_to_move(index, keys)
    later = sample[len(sample) // 4 :]
    return replace(steady, lookup_moving_us=_look(index, _chains(later, chance, lambda: CHAIN_KEYS), looks))


def in_a_process(keys: int, batch: int = SEGMENT_RECORDS) -> Figures:
    """The same in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (keys, batch))


def _load(
    index: SegmentIndex, keys: int, batch: int, sample: npt.NDArray[np.uint64], chance: np.random.Generator
) -> list[float]:
    """Seconds of each call."""
    calls_s: list[float] = []
    each = max(1, keys // len(sample))
    told, number = 0, 0
    while told < keys:
        number += 1
        entries = np.zeros(SEGMENT_RECORDS, ENTRY)
        entries["key"] = chance.integers(0, 1 << 64, (SEGMENT_RECORDS, KEY_BYTES // 8), np.uint64)
        entries["page"] = 1 + np.arange(SEGMENT_RECORDS) * RECORD_PAGES
        segment_id = index.add_segment(
            "bench.0", number, fingerprint16=FINGERPRINT16, generation=1, purge=0, record_pages=RECORD_PAGES
        )
        for first in range(0, SEGMENT_RECORDS, batch):
            start_s = time.perf_counter()
            index.add_blocks(segment_id, entries[first : first + batch])
            calls_s.append(time.perf_counter() - start_s)
        kept = np.arange(-told % each, SEGMENT_RECORDS, each)
        rows = (told + kept) // each
        sample[rows[rows < len(sample)]] = entries["key"][kept[rows < len(sample)]]
        told += SEGMENT_RECORDS
    return calls_s


def _begin_to_move(index: SegmentIndex, keys: int) -> None:
    """Drops the first tenth of all segments, and sweeps half of the way."""
    index.drop_segments("bench.0", range(1, keys // SEGMENT_RECORDS // 10))
    assert index.tidy(keys * 3 // 4), "the sweep should not be at its end"


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
    """Microseconds, p50 and p99."""
    spent_s = np.zeros(looks)
    for turn in range(looks):
        keys, known = next(chains)
        start_s = time.perf_counter()
        _, _, found = index.locate(FINGERPRINT16, keys)
        spent_s[turn] = time.perf_counter() - start_s
        assert found[:known].all(), f"{np.count_nonzero(found)} of {known} keys were found"
        assert not found[known:].any()
    p50_s, p99_s = np.percentile(spent_s, [50, 99])
    return float(p50_s) * 1e6, float(p99_s) * 1e6


def _find_us(index: SegmentIndex, sample: npt.NDArray[np.uint64]) -> float:
    """Microseconds of a look-up of one key."""
    keys = [row.tobytes() for row in sample[:5000]]
    start_s = time.perf_counter()
    for key in keys:
        index.find(FINGERPRINT16, key)
    return (time.perf_counter() - start_s) / len(keys) * 1e6


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000_000, 50_000_000])
    parser.add_argument("--batch", type=int, default=SEGMENT_RECORDS, help="entries of one call, at most 418")
    chosen = parser.parse_args()
    for keys in chosen.keys:
        print(json.dumps(asdict(in_a_process(keys, chosen.batch))), flush=True)


if __name__ == "__main__":
    main()
