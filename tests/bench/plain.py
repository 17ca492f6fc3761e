"""The reference for a disk: 8 threads that do nothing but read, or write, memory of the pool's kind past the page cache."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.core.layout import ALIGN_BYTES
from kvmoverd.core.record import memory_view
from tests.bench.cpu import CpuMeter
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import Run
from tests.bench.records import Record

THREADS = 8
COMMIT_BLOCKS = 32


class Plain:
    """`slots` records of memory, full of bytes that nothing below can compress."""

    def __init__(self, slots: int, slot_bytes: int, piece_bytes: int) -> None:
        self.arena = Arena(-(-slots * slot_bytes // piece_bytes) * piece_bytes, piece_bytes)
        self.addresses = [self.arena.address + slot * slot_bytes for slot in range(slots)]
        self._slot_bytes = slot_bytes
        self._slots = [memory_view(address, slot_bytes) for address in self.addresses]
        rng = np.random.default_rng(slots)
        for slot in self._slots:
            np.frombuffer(slot, np.uint64)[:] = rng.integers(0, 1 << 64, slot_bytes // 8, dtype=np.uint64)
        self._threads = ThreadPoolExecutor(THREADS, "plain")

    @property
    def page_kind(self) -> str:
        """Of this memory: the kind that a pool of this size gets, too."""
        return self.arena.page_kind

    def read(self, records: Sequence[Record]) -> Run:
        """All of them, once: each file is opened, and read by one `preadv`."""

        def read(number: int) -> int:
            fd = os.open(records[number].path, os.O_RDONLY | os.O_DIRECT)
            try:
                return os.preadv(fd, [self._slot(number)], records[number].offset_bytes)
            finally:
                os.close(fd)

        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        done_bytes = self._each(range(len(records)), read)
        return self._run(len(records), done_bytes, time.monotonic() - began_s, meter.spent_s())

    def write(self, directory: Path, blocks: int) -> Run:
        """So many records into a file that has its size already, each 32 with two syncs: its own, and that of a page in a log.

        The files are made before the time begins, and are gone afterwards.
        """
        data, log = self._create(directory / "data", blocks), self._create(directory / "log", blocks)

        def write(number: int) -> int:
            return os.pwrite(data, self._slot(number), number * self._slot_bytes)

        try:
            meter, began_s = CpuMeter(os.getpid()), time.monotonic()
            done_bytes = 0
            for first in range(0, blocks, COMMIT_BLOCKS):
                done_bytes += self._each(range(first, min(first + COMMIT_BLOCKS, blocks)), write)
                os.fdatasync(data)
                os.pwrite(log, self._slots[0][:ALIGN_BYTES], first // COMMIT_BLOCKS * ALIGN_BYTES)
                os.fdatasync(log)
            return self._run(blocks, done_bytes, time.monotonic() - began_s, meter.spent_s())
        finally:
            for fd, name in ((data, "data"), (log, "log")):
                os.close(fd)
                (directory / name).unlink()

    def close(self) -> None:
        self._threads.shutdown()
        self._slots.clear()
        self.arena.close()

    def _slot(self, number: int) -> memoryview:
        return self._slots[number % len(self._slots)]

    def _create(self, path: Path, blocks: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o640)
        os.ftruncate(fd, blocks * self._slot_bytes)
        os.fsync(fd)
        return fd

    def _each(self, numbers: range, work: Callable[[int], int]) -> int:
        """The sum of what `work` gives for each number, whichever thread takes it."""
        left = itertools.count(numbers.start)

        def some(_: int) -> int:
            done = 0
            while (number := next(left)) < numbers.stop:
                done += work(number)
            return done

        return sum(self._threads.map(some, range(THREADS)))

    def _run(self, records: int, done_bytes: int, took_s: float, cpu_s: float) -> Run:
        size_bytes = records * self._slot_bytes
        if done_bytes != size_bytes:
            raise BenchFailed(f"the reference moved {done_bytes} of {size_bytes} bytes")
        return Run(size_bytes / took_s / 1e9, cpu_s / (size_bytes / 1e9))
