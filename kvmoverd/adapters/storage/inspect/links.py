"""What the tree of a namespace is made of: tag, parent and depth of every block, from logs, or from the records' headers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmoverd.adapters.storage.block_io import open_regular
from kvmoverd.adapters.storage.inspect.catalog import ROW, Catalog, LoggedSegment, Progress, Rows, read_catalog
from kvmoverd.adapters.storage.inspect.manifests import Spaces, read_spaces
from kvmoverd.adapters.storage.inspect.parallel import each, threads_here
from kvmoverd.adapters.storage.inspect.place import StorePlace
from kvmoverd.adapters.storage.inspect.strangers import blocks_in, fan_directories
from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import RecordMismatch, decode
from kvmoverd.core.store.places import PAGE_BYTES, segment_name


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """`rows`: an array of `ROW`; `unread`: blocks whose header would tell, and can't be read."""

    fingerprint16: bytes
    space: Namespace | None
    rows: Rows
    unread: int


def links_of(place: StorePlace, prefix: str, progress: Progress) -> Iterator[Links]:
    """For each namespace that holds a block, those whose fingerprint begins with `prefix`, in hex. Raises `OSError`."""
    spaces = read_spaces(place.base)
    if place.layout != SEGMENTS:
        for fingerprint16 in spaces.directories:
            if fingerprint16.hex().startswith(prefix):
                yield _of_files(place, fingerprint16, spaces, progress)
        return
    catalog = read_catalog(place, progress)
    for fingerprint16 in sorted(catalog.namespaces()):
        if fingerprint16.hex().startswith(prefix):
            yield _of_segments(place, catalog, fingerprint16, spaces, progress)


def _of_segments(
    place: StorePlace, catalog: Catalog, fingerprint16: bytes, spaces: Spaces, progress: Progress
) -> Links:
    """Snapshots do not keep parents: of what only they tell the headers are read."""

    def linked(segment: LoggedSegment) -> tuple[Rows, int]:
        rows = segment.rows()
        blind = np.flatnonzero((rows["parent"] == 0) & (rows["depth"] > 0))
        if not len(blind):
            return rows, 0
        path = place.authors / segment.author / "seg" / segment_name(segment.number)
        return rows, _read_parents(path, rows, blind.tolist())

    parts, unread, blocks = [], 0, 0
    for rows, missed in each(catalog.segments(fingerprint16), linked, threads=threads_here()):
        parts.append(rows)
        unread, blocks = unread + missed, blocks + len(rows)
        progress(f"{blocks} blocks")
    rows = np.concatenate(parts) if parts else np.empty(0, ROW)
    return Links(fingerprint16, spaces.spaces.get(fingerprint16), rows, unread)


def _read_parents(path: Path, rows: Rows, blind: list[int]) -> int:
    """Fills in the parents of these rows; gives how many could not be read."""
    try:
        fd, _ = open_regular(str(path))
    except OSError:
        return len(blind)
    unread = 0
    try:
        for at in blind:
            try:
                header = decode(os.pread(fd, HEADER_BYTES, int(rows["page"][at]) * PAGE_BYTES))
                rows["parent"][at] = int.from_bytes(header.parent[:8], "little")
            except (OSError, RecordMismatch):
                unread += 1
    finally:
        os.close(fd)
    return unread


def _of_files(place: StorePlace, fingerprint16: bytes, spaces: Spaces, progress: Progress) -> Links:
    parts, unread, blocks = [], 0, 0
    fans = fan_directories(place.base / fingerprint16.hex())
    for rows, missed in each(fans, _rows_of_fan, threads=threads_here()):
        parts.append(rows)
        unread, blocks = unread + missed, blocks + len(rows)
        progress(f"{blocks} blocks")
    rows = np.concatenate(parts) if parts else np.empty(0, ROW)
    return Links(fingerprint16, spaces.spaces.get(fingerprint16), rows, unread)


def _rows_of_fan(fan: Path) -> tuple[Rows, int]:
    """By the headers of the files; one that can't be read is no block here."""
    found, unread = [], 0
    try:
        names = blocks_in(fan)
    except OSError:
        names = []
    for name in names:
        try:
            fd, _ = open_regular(f"{fan}/{name}")
            try:
                header = decode(os.pread(fd, HEADER_BYTES, 0))
            finally:
                os.close(fd)
        except (OSError, RecordMismatch):
            unread += 1
            continue
        links = [int.from_bytes(part[:8], "little") for part in (header.key, header.parent)]
        found.append((links[0], links[1], 0, header.depth))
    return np.array(found, ROW), unread
