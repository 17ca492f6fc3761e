"""The read meter: what a storage NIC reads at, whatever the shape of the work."""

from __future__ import annotations

import random

import pytest

from kvmoverd.node.read_meter import KNOWN_S, ReadMeter

MS = 1_000_000
MIB = 1 << 20


def near(bytes_per_s: float, share: float = 0.05) -> object:
    return pytest.approx(bytes_per_s, rel=share)


def work(meter: ReadMeter, *, from_ms: int, reads: int, read_bytes: int, each_ms: int) -> int:
    """Reads one after another, the next under way before the last has ended; returns when they are over, in ms."""
    now_ms = from_ms
    meter.begun(reads, now_ms * MS)
    for _ in range(reads):
        now_ms += each_ms
        meter.ended(read_bytes, now_ms * MS)
    return now_ms


def test_nothing_is_known_before_some_work_was_done() -> None:
    meter = ReadMeter()
    assert meter.rate_bytes_per_s(0) == 0
    meter.begun(1, 5 * MS)
    meter.ended(MIB, 5 * MS + int(KNOWN_S * 1e9) - 1)
    assert meter.rate_bytes_per_s(1000 * MS) == 0


def test_a_rate_is_bytes_over_the_time_of_work() -> None:
    meter = ReadMeter()
    end_ms = work(meter, from_ms=100, reads=500, read_bytes=MIB, each_ms=4)
    assert meter.rate_bytes_per_s(end_ms * MS) == near(250 * MIB)


def test_time_without_work_changes_nothing() -> None:
    meter = ReadMeter()
    end_ms = work(meter, from_ms=0, reads=500, read_bytes=MIB, each_ms=4)
    before = meter.rate_bytes_per_s(end_ms * MS)
    assert meter.rate_bytes_per_s((end_ms + 3_600_000) * MS) == before
    end_ms = work(meter, from_ms=end_ms + 3_600_000, reads=100, read_bytes=MIB, each_ms=4)
    assert meter.rate_bytes_per_s(end_ms * MS) == near(before)


@pytest.mark.parametrize("together", [1, 8, 64])
def test_reads_that_end_together_are_no_burst(together: int) -> None:
    meter, now_ms = ReadMeter(), 0
    for _ in range(40):
        meter.begun(together, now_ms * MS)
        now_ms += 2 * together
        for _ in range(together):
            meter.ended(MIB, now_ms * MS)
    assert meter.rate_bytes_per_s(now_ms * MS) == near(500 * MIB, 0.05 + together / 640)


def test_a_device_that_stalls_grows_slower_with_each_look() -> None:
    meter = ReadMeter()
    end_ms = work(meter, from_ms=0, reads=500, read_bytes=MIB, each_ms=4)
    meter.begun(1, end_ms * MS)
    seen = [meter.rate_bytes_per_s((end_ms + wait_ms) * MS) for wait_ms in (0, 500, 1_000, 2_000, 4_000, 16_000)]
    assert seen == sorted(seen, reverse=True)
    assert seen[2] < 0.65 * seen[0]
    assert seen[-1] < 0.001 * seen[0]


def test_a_device_that_slows_down_is_known_for_it_after_some_seconds_and_so_is_one_that_recovers() -> None:
    meter = ReadMeter()
    end_ms = work(meter, from_ms=0, reads=500, read_bytes=MIB, each_ms=4)
    end_ms = work(meter, from_ms=end_ms, reads=150, read_bytes=MIB, each_ms=40)
    assert meter.rate_bytes_per_s(end_ms * MS) == near(25 * MIB, 0.7)
    end_ms = work(meter, from_ms=end_ms, reads=2000, read_bytes=MIB, each_ms=4)
    assert meter.rate_bytes_per_s(end_ms * MS) == near(250 * MIB, 0.1)


def test_misses_take_time_and_move_nothing() -> None:
    meter = ReadMeter()
    end_ms = work(meter, from_ms=0, reads=1000, read_bytes=0, each_ms=1)
    assert meter.rate_bytes_per_s(end_ms * MS) == 0
    end_ms = work(meter, from_ms=end_ms, reads=2000, read_bytes=MIB, each_ms=4)
    assert meter.rate_bytes_per_s(end_ms * MS) == near(250 * MIB)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_pattern_the_rate_is_that_of_the_device(seed: int) -> None:
    """A device of 200 MB/s, reads of any size, any number at once, with pauses."""
    chance, meter = random.Random(seed), ReadMeter()
    now_ns = 0
    for _ in range(60):
        sizes = [chance.randrange(1 << 16, 1 << 22) for _ in range(chance.randrange(1, 64))]
        meter.begun(len(sizes), now_ns)
        for size in sizes:
            now_ns += size * 5
            meter.ended(size, now_ns)
        now_ns += chance.randrange(0, 10**10)
    assert meter.rate_bytes_per_s(now_ns) == near(200e6, 0.02)


def test_a_device_is_silent_from_its_last_bytes_on_and_never_while_it_has_nothing_to_do() -> None:
    meter = ReadMeter()
    assert meter.silent_ns(50 * MS) == 0
    meter.begun(3, 100 * MS)
    assert meter.silent_ns(130 * MS) == 30 * MS, "it has brought nothing yet"
    meter.ended(MIB, 140 * MS)
    meter.ended(0, 160 * MS)
    assert meter.silent_ns(200 * MS) == 60 * MS, "a read that failed has brought nothing"
    meter.ended(MIB, 210 * MS)
    assert meter.silent_ns(900 * MS) == 0
    meter.begun(1, 1000 * MS)
    assert meter.silent_ns(1005 * MS) == 5 * MS, "the pause before counts for nothing"
