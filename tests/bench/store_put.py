"""Durable put of whole blocks into segments, beside plain threads that write the same bytes: `python -m tests.bench.store_put`.

Both sides write records of 2,568,192 bytes past the page cache from memory of the pool's kind, 32 to a commit, and each commit
is two syncs: of the file with the records, then of a log with a page about them. The reference has 8 threads that write into a
pre-sized file and wait for each other at each commit; it computes no checksum and keeps no books.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.record import memory_view, seal
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockWrite
from tests.bench.cpu import CpuMeter, crc_s_per_gb
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import Pair, Run, interval, run_pairs, verdict

LAYOUT = Layout.uniform(layers=61, tokens=64, token_bytes=656)
THREADS = 8
COMMIT_BLOCKS = 32
SLOTS = 96
PAGE_BYTES = 4096
AIM = 1.1
CPU_AIM_S_PER_GB = 0.15
TIMEOUT_S = 60.0
SWITCH_S = 0.0005
"""As in the daemon."""
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Slots full of random bytes, of the pool's kind of memory."""

    arena: Arena
    addresses: tuple[int, ...]

    def record(self, number: int) -> memoryview:
        return memory_view(self.addresses[number % SLOTS], LAYOUT.record_bytes)


@contextmanager
def memory() -> Iterator[Memory]:
    size_bytes = -(-SLOTS * LAYOUT.record_bytes // PIECE_BYTES) * PIECE_BYTES
    arena = Arena(size_bytes, PIECE_BYTES)
    made = Memory(arena, tuple(arena.address + slot * LAYOUT.record_bytes for slot in range(SLOTS)))
    content = os.urandom(LAYOUT.block_bytes)
    for slot in range(SLOTS):
        made.record(slot)[HEADER_BYTES : HEADER_BYTES + len(content)] = content
        made.record(slot)[HEADER_BYTES : HEADER_BYTES + 32] = secrets.token_bytes(32)
    yield made
    arena.close()


class Plain:
    """The reference."""

    def __init__(self, directory: Path, pool: Memory, blocks: int) -> None:
        self._directory, self._pool, self._blocks = directory, pool, blocks
        self._threads = ThreadPoolExecutor(THREADS, "plain-writer")

    async def run(self, number: int) -> Run:
        return await asyncio.to_thread(self._run)

    def _run(self) -> Run:
        data = self._create("data", self._blocks * LAYOUT.record_bytes)
        log = self._create("log", self._blocks // COMMIT_BLOCKS * PAGE_BYTES)
        page = self._pool.record(0)[:PAGE_BYTES]
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        for first in range(0, self._blocks, COMMIT_BLOCKS):
            numbers = iter(range(first, first + COMMIT_BLOCKS))
            lock = threading.Lock()
            list(self._threads.map(lambda _: self._write_some(data, numbers, lock), range(THREADS)))  # noqa: B023
            os.fdatasync(data)
            os.pwrite(log, page, first // COMMIT_BLOCKS * PAGE_BYTES)
            os.fdatasync(log)
        run = _run(self._blocks, time.monotonic() - began_s, meter.spent_s())
        for fd in (data, log):
            os.close(fd)
        for name in ("data", "log"):
            (self._directory / name).unlink()
        return run

    def _create(self, name: str, size_bytes: int) -> int:
        fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o640)
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
        return fd

    def _write_some(self, fd: int, numbers: Iterator[int], lock: threading.Lock) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            put = os.pwrite(fd, self._pool.record(number), number * LAYOUT.record_bytes)
            if put != LAYOUT.record_bytes:
                raise BenchFailed(f"the reference wrote {put} of {LAYOUT.record_bytes} bytes")


class Ours:
    """A fresh store for each run, made and closed outside of what is timed."""

    def __init__(
        self, directory: Path, pool: Memory, blocks: int, work: Callable[[SegmentStore, Namespace], None]
    ) -> None:
        self._directory, self._blocks, self._work, self._pool = directory, blocks, work, pool

    async def run(self, number: int) -> Run:
        return await asyncio.to_thread(self._run)

    def _run(self) -> Run:
        root = self._directory / "store"
        root.mkdir()
        settings = SegmentSettings(commit_blocks=COMMIT_BLOCKS)
        store = open_segment_store(root, node="bench", boot_id=secrets.token_hex(8), settings=settings)
        space = Namespace(Manifest("bench", secrets.token_bytes(32), secrets.token_bytes(32), LAYOUT, "u8"))
        store.open_namespace(space)
        # A store is not made for each block: the first segment is there, as the reference's file is.
        store.appender.segments.take(space.fingerprint, LAYOUT.record_bytes, 0)
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        self._work(store, space)
        run = _run(self._blocks, time.monotonic() - began_s, meter.spent_s())
        if store.appender.counters.appended_blocks != self._blocks:
            raise BenchFailed(f"{store.appender.counters.appended_blocks} of {self._blocks} blocks were written")
        self.counters = store.appender.counters
        store.close(TIMEOUT_S)
        shutil.rmtree(root)
        return run


def by_appender(pool: Memory, blocks: int) -> Callable[[SegmentStore, Namespace], None]:
    """8 threads, each appending one record after the other."""

    def work(store: SegmentStore, space: Namespace) -> None:
        numbers, free, done = itertools.count(), threading.Semaphore(SLOTS), threading.Semaphore(0)

        def ended(end: Appended) -> None:
            free.release()
            if end.reason is Reason.OK:
                done.release()

        def write(_: int) -> None:
            while (number := next(numbers)) < blocks:
                free.acquire(timeout=TIMEOUT_S)
                key, record = secrets.token_bytes(32), pool.record(number)

                def fill(generation: int, key: bytes = key, record: memoryview = record) -> None:
                    seal(record, space, key=key, parent=ROOT, depth=0, write_time_ns=1, generation=generation)

                store.appender.append(Append(space.fingerprint, key, ROOT, 0, record, fill, ended))

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(write, range(THREADS)))
        for _ in range(blocks):
            done.acquire(timeout=TIMEOUT_S)

    return work


def by_port(pool: Memory, blocks: int) -> Callable[[SegmentStore, Namespace], None]:
    """Through the storage port, as the daemon does, with as many ops under way as there are slots."""

    def work(store: SegmentStore, space: Namespace) -> None:
        storage = ThreadsStorage(store, name="bench", threads=THREADS, ops_max=SLOTS)
        free, next_block, left = list(range(SLOTS)), 0, blocks
        slots: dict[int, int] = {}
        while left:
            ops = []
            while free and next_block < blocks:
                slots[next_block] = free.pop()
                address = pool.addresses[slots[next_block]]
                ops.append(BlockWrite(next_block, space, secrets.token_bytes(32), ROOT, 0, address))
                next_block += 1
            storage.submit(ops)
            time.sleep(0.001)
            for done in storage.poll(SLOTS):
                if done.reason is not Reason.OK:
                    raise BenchFailed(f"a block ended {done.reason.name}: {done.message}")
                free.append(slots.pop(done.op_id))
                left -= 1
        storage.close(TIMEOUT_S)

    return work


def _run(blocks: int, took_s: float, cpu_s: float) -> Run:
    size_gb = blocks * LAYOUT.record_bytes / 1e9
    return Run(size_gb / took_s, cpu_s / size_gb)


WAYS = {"appender": by_appender, "port": by_port}


async def measure(directory: Path, way: str, *, blocks: int, pairs: int, seed: int) -> list[Pair]:
    """Pairs of (plain, ours) in GB/s. `directory` holds the files of one run at a time, and is empty afterwards."""
    with memory() as pool:
        ours = Ours(directory, pool, blocks, WAYS[way](pool, blocks))
        plain = Plain(directory, pool, blocks)
        await plain.run(0)
        await ours.run(0)
        return await run_pairs(pairs, seed, plain.run, ours.run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd() / ".bench-store")
    parser.add_argument("--way", choices=[*WAYS, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    crc = crc_s_per_gb(LAYOUT.block_bytes)
    for way in WAYS if asked.way == "all" else [asked.way]:
        asked.directory.mkdir(exist_ok=True)
        pairs = asyncio.run(measure(asked.directory, way, blocks=asked.blocks, pairs=asked.pairs, seed=asked.seed))
        asked.directory.rmdir()
        for pair in pairs:
            order = "ours first" if pair.ours_first else "reference first"
            print(f"  {pair.ours.amount:.2f} / {pair.reference.amount:.2f} GB/s = {pair.ratio:.3f}, {order}")
        _say(way, pairs, crc, asked.seed)


def _say(way: str, pairs: list[Pair], crc: float, seed: int) -> None:
    ratio = interval([pair.ratio for pair in pairs], seed)
    said = verdict(ratio, AIM, runs=len(pairs)).value
    cpu, plain = (
        interval(found, seed).median
        for found in ([pair.ours.cpu_s_per_gb - crc for pair in pairs], [pair.reference.cpu_s_per_gb for pair in pairs])
    )
    print(f"durable put by {way}: {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], aim {AIM}: {said}")
    print(
        f"  CPU s/GB {cpu:.3f} beside {crc:.3f} of the checksum, aim {CPU_AIM_S_PER_GB}; of the reference {plain:.3f}"
    )


if __name__ == "__main__":
    main()
