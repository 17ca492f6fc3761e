"""The authors of a segment store: who writes, who has ended, and who took over what the dead left behind."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.inspect.catalog import Catalog
from kvmoverd.adapters.storage.inspect.place import StorePlace
from kvmoverd.adapters.storage.owners import start_ticks
from kvmoverd.adapters.storage.segments.author import machine_name
from kvmoverd.adapters.storage.segments.claims import highest
from kvmoverd.adapters.storage.segments.followed import node_of
from kvmoverd.adapters.storage.segments.leases import LEASE
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.lease_page import Lease, decode_lease
from kvmoverd.core.store.places import number_of

SEGMENTS = "seg"
_SECTOR_BYTES = 512
ALIVE, ENDED, DEAD, SILENT = "alive", "ended", "dead", "silent"


@dataclass(frozen=True, slots=True)
class AuthorSeen:
    """`state`: "alive"; "ended", in good order; "dead": his process is gone; "silent": no heartbeat for a minute, by the
    times of files, which is for people: daemons decide by what they see themselves.

    `adopted_by`: the author who may delete his segments, empty when nobody claims to be. `bytes`, `inodes`: of his directory.
    """

    author: str
    node: str
    state: str
    heartbeat_age_s: float
    adopted_by: str
    log: int
    segments: int
    bytes: int
    inodes: int


def authors_of(place: StorePlace, catalog: Catalog) -> list[AuthorSeen]:
    """By name; one whose directory is gone meanwhile is left out."""
    files, machine, found = PageFiles(pages_max=1), machine_name(), []
    for author in sorted(catalog.lives):
        with contextlib.suppress(FileNotFoundError):
            found.append(_seen(place.authors / author, files, machine))
    return found


def _seen(directory: Path, files: PageFiles, machine: str) -> AuthorSeen:
    lease, age_s = None, 0.0
    with contextlib.suppress(OSError):
        age_s = max(0.0, time.time() - os.stat(directory / LEASE).st_mtime)
        lease = decode_lease(files.read_page(directory / LEASE))
    claim = highest(directory, files)
    numbers = [number for name in _names(directory / SEGMENTS) if (number := number_of(name, "seg")) is not None]
    return AuthorSeen(
        directory.name,
        node_of(directory.name),
        _state(lease, age_s, machine),
        round(age_s, 1),
        claim.claimant if claim else "",
        lease.log if lease else 0,
        len(numbers),
        sum(_disk_bytes(one) for one in (directory, directory / SEGMENTS)),
        sum(len(_names(one)) for one in (directory, directory / SEGMENTS)) + 1,
    )


def _state(lease: Lease | None, age_s: float, machine: str) -> str:
    if lease is not None and lease.ended:
        return ENDED
    if lease is not None and lease.machine == machine:
        return ALIVE if start_ticks(lease.pid) == lease.start_ticks else DEAD
    return ALIVE if lease is not None and age_s < SegmentSettings().dead_s else SILENT


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _disk_bytes(directory: Path) -> int:
    """Of the files of one directory."""
    total_bytes = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total_bytes += entry.stat(follow_symlinks=False).st_blocks * _SECTOR_BYTES
    return total_bytes
