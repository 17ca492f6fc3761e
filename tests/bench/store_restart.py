"""How soon a restarted segment store answers: `python -m tests.bench.store_restart --blocks 400000 --dir DIR`.

A former start's logs name all blocks, 32 to a page as group commits leave them; its segments have their full size and are
sparse, but for a record in every 64th of them. Logs are read past the page cache. `first_hit_s`: from before the store is opened
to the first block that a read through it brings, of 32 that lie anywhere; `all_hits_s`: until all of them came.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.record import seal
from kvmoverd.core.status import Reason
from kvmoverd.core.store.lease_page import Lease, encode_lease
from kvmoverd.core.store.log_pages import ENTRY, Kind, LogPage, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, log_name, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, encode_segment, records_in
from kvmoverd.ports.storage import BlockRead

LAYOUT = Layout.uniform(layers=61, tokens=64, token_bytes=656)
SETTINGS = SegmentSettings()
NODE, FORMER = "node-0", "node-0.former"
RECORD_PAGES = LAYOUT.record_bytes // PAGE_BYTES
RECORDS = records_in(SETTINGS.segment_bytes, LAYOUT.record_bytes)
SAMPLE_SEGMENTS = 32
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Figures:
    """`index_entries_per_s`: of following alone, from the first look until all is in the index; seconds else."""

    blocks: int
    index_entries_per_s: float
    load_s: float
    open_s: float
    restart_to_first_hit_s: float
    all_hits_s: float


def restart(parent: Path, blocks: int = 400_000) -> Figures:
    """Makes a store below `parent` and opens it anew. Takes some megabytes, and a second for each million blocks."""
    with _directory(parent) as root:
        space = _space()
        samples = _make_store(root, space, blocks)
        entries, load_s = _load(root)
        assert entries >= blocks, f"{entries} of {blocks} entries were found"
        open_s, first_s, all_s = _restart(root, space, samples)
    return Figures(blocks, entries / load_s, load_s, open_s, first_s, all_s)


def _load(root: Path) -> tuple[int, float]:
    touches = Touches(now_ns=time.monotonic_ns)
    index = SegmentIndex(ram_bytes_max=1 << 36, touches=touches, now_ns=time.monotonic_ns)
    followers = Followers(
        root / "kvm1" / "authors",
        index,
        own=lambda: "",
        machine="bench",
        settings=SETTINGS,
        now_ns=time.monotonic_ns,
    )
    began_s = time.perf_counter()
    followers.load()
    load_s = time.perf_counter() - began_s
    followers.close()
    return followers.stats().entries, load_s


def _restart(root: Path, space: Namespace, keys: list[bytes]) -> tuple[float, float, float]:
    slot = page_memory(LAYOUT.record_bytes)
    began_s = time.perf_counter()
    store = open_segment_store(root, node=NODE, boot_id="bench", settings=SETTINGS)
    try:
        open_s = time.perf_counter() - began_s
        store.open_namespace(space)
        first_s, missing = 0.0, list(keys)
        while missing:
            missing = [key for key in missing if not _hit(store, space, key, slot)]
            now_s = time.perf_counter() - began_s
            if len(missing) < len(keys) and not first_s:
                first_s = now_s
            assert now_s < TIMEOUT_S, f"{len(missing)} of {len(keys)} blocks were not found within {TIMEOUT_S} s"
            time.sleep(0.001)
        return open_s, first_s, time.perf_counter() - began_s
    finally:
        store.close(5.0)


def _hit(store: SegmentStore, space: Namespace, key: bytes, slot: memoryview) -> bool:
    address = np.frombuffer(slot, np.uint8).ctypes.data
    try:
        done = store.read(BlockRead(1, space, key, address), looks=1)
    except FileNotFoundError:
        return False
    assert done.reason is Reason.OK, f"{done.reason.name}: {done.message}"
    return True


def _make_store(root: Path, space: Namespace, blocks: int) -> list[bytes]:
    """A root with a dead author; gives keys of blocks that are really there."""
    place = SegmentRoot(root)
    place.open_namespace(space)
    directory = place.authors / FORMER
    (directory / "seg").mkdir(parents=True)
    (directory / "lease").write_bytes(encode_lease(Lease(1, 1, 1, 1, 1, "bench", ended=True)))
    log = _Log(directory, space)
    chance = np.random.default_rng(blocks)
    samples: list[bytes] = []
    segments = -(-blocks // RECORDS)
    for number in range(1, segments + 1):
        entries = np.zeros(min(RECORDS, blocks - (number - 1) * RECORDS), ENTRY)
        entries["key"] = chance.integers(1, 1 << 63, (len(entries), 4), np.uint64)
        entries["page"] = 1 + RECORD_PAGES * np.arange(len(entries))
        sampled = number % max(1, segments // SAMPLE_SEGMENTS) == 0
        _make_segment(directory, space, number, entries[:1] if sampled else entries[:0])
        if sampled:
            samples.append(entries[0]["key"].tobytes())
        log.say(number, entries)
    log.close()
    return samples


def _make_segment(directory: Path, space: Namespace, number: int, entries: npt.NDArray[np.void]) -> None:
    header = SegmentHeader(
        space.fingerprint, FORMER, number, number, 0, RECORD_PAGES, RECORDS, SETTINGS.segment_bytes, 1
    )
    with open(directory / "seg" / segment_name(number), "wb") as file:
        file.write(encode_segment(header))
        for entry in entries:
            record = page_memory(LAYOUT.record_bytes)
            seal(
                record,
                space,
                key=entry["key"].tobytes(),
                parent=bytes(32),
                depth=0,
                write_time_ns=1,
                generation=number,
            )
            file.seek(int(entry["page"]) * PAGE_BYTES)
            file.write(record)
        file.truncate(SETTINGS.segment_bytes)


class _Log:
    """A former start's logs, as group commits leave them."""

    def __init__(self, directory: Path, space: Namespace) -> None:
        self._directory, self._space, self._number = directory, space, 0
        self._pages: list[bytes] = []
        self._begin()

    def say(self, segment: int, entries: npt.NDArray[np.void]) -> None:
        for first in range(0, len(entries), SETTINGS.commit_blocks):
            if len(self._pages) == SETTINGS.log_pages - 1:
                self._put(Kind.SEAL)
                self.close()
                self._begin()
            self._put(
                Kind.BLOCKS,
                segment=segment,
                generation=segment,
                record_pages=RECORD_PAGES,
                fingerprint16=self._space.fingerprint[:16],
                entries=entries[first : first + SETTINGS.commit_blocks],
            )

    def close(self) -> None:
        with open(self._directory / log_name(self._number), "wb") as file:
            file.write(b"".join(self._pages))
            file.truncate(SETTINGS.log_pages * PAGE_BYTES)
            file.flush()
            os.fsync(file.fileno())

    def _begin(self) -> None:
        self._number, self._pages = self._number + 1, []
        self._put(Kind.HEAD, author=FORMER)

    def _put(self, kind: Kind, **fields: object) -> None:
        page = LogPage(kind, self._number, len(self._pages), **fields)  # type: ignore[arg-type]
        self._pages.append(encode_page(page))


def _space() -> Namespace:
    return Namespace(
        Manifest(
            model_id="bench",
            weights_digest=b"w" * 32,
            tokenizer_digest=b"t" * 32,
            layout=LAYOUT,
            dtype="fp8_e4m3",
        )
    )


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="store-restart-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.store_restart", description=__doc__)
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    for _ in range(arguments.runs):
        print(json.dumps(asdict(restart(arguments.dir, arguments.blocks))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
