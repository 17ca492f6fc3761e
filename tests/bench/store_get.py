"""Cold get of whole blocks out of both layouts, beside plain threads that read the same bytes: `python -m tests.bench.store_get`.

Both sides read the same records of 2,568,192 bytes past the page cache into memory of the pool's kind. The reference has 8
threads that each take the next record and read it by one `preadv`, out of a file that is opened for it; it checks nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.core.keys import ROOT
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place, segment_name
from kvmoverd.ports.storage import BlockRead, BlockWrite, Storage, StorageDone, StorageOp
from tests.bench.cpu import CpuMeter, crc_s_per_gb
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import Pair, Run, interval, run_pairs, verdict
from tests.bench.store_put import LAYOUT, PIECE_BYTES, SLOTS, SWITCH_S, THREADS, Memory, memory

AIM = 1.0
CPU_AIM_S_PER_GB = 0.10
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Record:
    """Where a block's bytes lie."""

    key: bytes
    path: Path
    offset_bytes: int


class Plain:
    """The reference."""

    def __init__(self, pool: Memory, records: list[Record]) -> None:
        self._pool, self._records = pool, records
        self._threads = ThreadPoolExecutor(THREADS, "plain-reader")

    async def run(self, number: int) -> Run:
        return await asyncio.to_thread(self._run)

    def _run(self) -> Run:
        numbers, lock = iter(range(len(self._records))), threading.Lock()
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        list(self._threads.map(lambda _: self._read_some(numbers, lock), range(THREADS)))
        return _run(len(self._records), time.monotonic() - began_s, meter.spent_s())

    def _read_some(self, numbers: Iterator[int], lock: threading.Lock) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            record = self._records[number]
            fd = os.open(record.path, os.O_RDONLY | os.O_DIRECT)
            try:
                got = os.preadv(fd, [self._pool.record(number)], record.offset_bytes)
            finally:
                os.close(fd)
            if got != LAYOUT.record_bytes:
                raise BenchFailed(f"the reference read {got} of {LAYOUT.record_bytes} bytes")


class Ours:
    """The storage port, with as many reads under way as there are slots."""

    def __init__(self, storage: Storage, space: Namespace, pool: Memory) -> None:
        self.storage, self.space, self._pool = storage, space, pool
        self.keys: list[bytes] = []
        self._ids = itertools.count(1)

    async def run(self, number: int) -> Run:
        return await asyncio.to_thread(self._run)

    def fill(self, blocks: int) -> list[StorageDone]:
        """Stores so many blocks."""
        self.keys = [secrets.token_bytes(32) for _ in range(blocks)]
        return self._all(lambda key, address: BlockWrite(next(self._ids), self.space, key, ROOT, 0, address))

    def _run(self) -> Run:
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        self._all(lambda key, address: BlockRead(next(self._ids), self.space, key, address))
        return _run(len(self.keys), time.monotonic() - began_s, meter.spent_s())

    def _all(self, make: Callable[[bytes, int], StorageOp]) -> list[StorageDone]:
        """One op for each key, in order; what became of each."""
        waiting, free, slots = deque(self.keys), list(self._pool.addresses), dict[int, tuple[int, bytes]]()
        found: dict[bytes, StorageDone] = {}
        while waiting or slots:
            ops = []
            while free and waiting:
                key, address = waiting.popleft(), free.pop()
                ops.append(make(key, address))
                slots[ops[-1].op_id] = address, key
            self.storage.submit(ops)
            if not select.select([self.storage.fileno()], [], [], TIMEOUT_S)[0]:
                raise BenchFailed(f"{len(slots)} ops have not ended within {TIMEOUT_S:g} s")
            for done in self.storage.poll(SLOTS):
                if done.reason is not Reason.OK:
                    raise BenchFailed(f"a block ended {done.reason.name}: {done.message}")
                address, key = slots.pop(done.op_id)
                free.append(address)
                found[key] = done
        return [found[key] for key in self.keys]


def _run(blocks: int, took_s: float, cpu_s: float) -> Run:
    size_gb = blocks * LAYOUT.record_bytes / 1e9
    return Run(size_gb / took_s, cpu_s / size_gb)


def _segments(root: Path) -> Blocks:
    return open_segment_store(root, node="bench", boot_id="0001")


LAYOUTS: dict[str, Callable[[Path], Blocks]] = {"segments": _segments, "files": file_blocks}


def _record(root: Path, key: bytes, place: Place | None) -> Record:
    if place is not None:
        path = root / "kvm1" / "authors" / place.author / "seg" / segment_name(place.segment)
        return Record(key, path, place.offset_bytes)
    (path,) = root.glob(f"kvm1/*/{key[:1].hex()}/{key[1:2].hex()}/{key.hex()}.blk")
    return Record(key, path, 0)


async def measure(root: Path, layout: str, *, blocks: int, pairs: int, seed: int) -> tuple[str, list[Pair]]:
    """What the storage says of itself, and pairs of (plain, ours) in GB/s. `root`, a new directory, is gone afterwards."""
    with memory() as pool:
        storage = open_uring(
            LAYOUTS[layout](root), pool.arena, PIECE_BYTES, name="bench", threads=THREADS, ops_max=SLOTS
        )
        space = Namespace(Manifest("bench", secrets.token_bytes(32), secrets.token_bytes(32), LAYOUT, "u8"))
        storage.open_namespace(space)
        ours = Ours(storage, space, pool)
        try:
            done = ours.fill(blocks)
            plain = Plain(pool, [_record(root, *both) for both in zip(ours.keys, (d.place for d in done), strict=True)])
            await plain.run(0)
            await ours.run(0)
            return storage.facts.note, await run_pairs(pairs, seed, plain.run, ours.run)
        finally:
            storage.close(TIMEOUT_S)
            shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd() / ".bench-store-get")
    parser.add_argument("--layout", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    crc = crc_s_per_gb(LAYOUT.block_bytes)
    for layout in LAYOUTS if asked.layout == "all" else [asked.layout]:
        asked.directory.mkdir(parents=True)
        note, pairs = asyncio.run(
            measure(asked.directory, layout, blocks=asked.blocks, pairs=asked.pairs, seed=asked.seed)
        )
        for pair in pairs:
            order = "ours first" if pair.ours_first else "reference first"
            print(f"  {pair.ours.amount:.2f} / {pair.reference.amount:.2f} GB/s = {pair.ratio:.3f}, {order}")
        _say(layout, note, pairs, crc, asked.seed)


def _say(layout: str, note: str, pairs: list[Pair], crc: float, seed: int) -> None:
    ratio = interval([pair.ratio for pair in pairs], seed)
    said = verdict(ratio, AIM, runs=len(pairs)).value
    cpu = interval([pair.ours.cpu_s_per_gb - crc for pair in pairs], seed).median
    plain = interval([pair.reference.cpu_s_per_gb for pair in pairs], seed).median
    print(f"cold get from {layout} ({note}): {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], aim {AIM}: {said}")
    print(
        f"  CPU s/GB {cpu:.3f} beside {crc:.3f} of the checksum, aim {CPU_AIM_S_PER_GB}; of the reference {plain:.3f}"
    )


if __name__ == "__main__":
    main()
