"""Where a store keeps blocks, found from outside, as the reference must read the same bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.segments.author import machine_name
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.places import Place, segment_name
from tests.bench.daemon import BenchFailed

INDEX_BYTES_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """Byte `offset_bytes` of a file is the first of the record's header page."""

    path: Path
    offset_bytes: int = 0


def find_records(root: Path, fingerprint: bytes, keys: Sequence[bytes]) -> list[Record]:
    """In order of the keys, in either layout; beside a daemon that runs. Raises `BenchFailed` where one is not there."""
    authors = root / "kvm1" / "authors"
    found = _in_segments(authors, fingerprint, keys) if authors.is_dir() else _in_files(root, keys)
    missing = sum(record is None for record in found)
    if missing:
        raise BenchFailed(f"{missing} of {len(keys)} blocks are not in {root}, which should hold them all")
    return [record for record in found if record is not None]


def load_logs(authors: Path, index: SegmentIndex, *, direct: bool = True) -> int:
    """Reads all logs of all authors into the index, as a daemon does at its start; how many entries they had."""
    followers = Followers(
        authors,
        index,
        own=lambda: "",
        machine=machine_name(),
        settings=SegmentSettings(),
        now_ns=time.monotonic_ns,
        direct=direct,
    )
    try:
        followers.load()
        return followers.stats().entries
    finally:
        followers.close()


def new_index() -> SegmentIndex:
    return SegmentIndex(
        ram_bytes_max=INDEX_BYTES_MAX, touches=Touches(now_ns=time.monotonic_ns), now_ns=time.monotonic_ns
    )


def _in_segments(authors: Path, fingerprint: bytes, keys: Sequence[bytes]) -> list[Record | None]:
    index = new_index()
    load_logs(authors, index)
    return [_record(authors, index.find(fingerprint[:16], key)) for key in keys]


def _record(authors: Path, place: Place | None) -> Record | None:
    if place is None:
        return None
    return Record(authors / place.author / "seg" / segment_name(place.segment), place.offset_bytes)


def _in_files(root: Path, keys: Sequence[bytes]) -> list[Record | None]:
    named = {path.stem: Record(path) for path in root.rglob("*.blk")}
    return [named.get(key.hex()) for key in keys]
