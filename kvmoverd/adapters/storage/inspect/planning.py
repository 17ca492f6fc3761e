"""What daemons would drop of a segment store now, and why: by the rules that they go by, fed from disk.

What a daemon alone remembers is not known here: its uses since its touch log was last written, and how older ones have faded.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvmoverd.adapters.storage.inspect.authors import ALIVE, AuthorSeen, authors_of
from kvmoverd.adapters.storage.inspect.catalog import Catalog, LoggedSegment, Progress, no_progress, read_catalog
from kvmoverd.adapters.storage.inspect.place import TRASH, StorePlace, find_store
from kvmoverd.adapters.storage.inspect.touched import Touched, read_touches
from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.adapters.storage.segments.budgets import Budgets, Taken, choose_victims
from kvmoverd.adapters.storage.segments.followed import FSCK_NODE, node_of
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.usage import room_of
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.store.eviction import SegmentUse, Victim, Why
from kvmoverd.core.store.places import PAGE_BYTES, number_of

_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class _File:
    author: str
    number: int
    size_bytes: int
    written_s: float


@dataclass(slots=True)
class _Node:
    """One node's: its own authors and those that it has adopted."""

    name: str
    authors: list[AuthorSeen] = field(default_factory=list)


def plan(
    root: Path, settings: SegmentSettings, *, node: str = "", progress: Progress = no_progress
) -> dict[str, object]:
    """As one JSON object, for one node or for each. Raises `StorageUnusable`, also for an unknown node, and `OSError`."""
    place = find_store(root)
    if place.layout != SEGMENTS:
        raise StorageUnusable(f"{root} holds one file per block: daemons drop nothing there but what is purged")
    catalog = read_catalog(place, progress)
    seen = authors_of(place, catalog)
    nodes = [one for one in _nodes(seen) if node in ("", one.name)]
    if node and not nodes:
        raise StorageUnusable(
            f"{root} has no authors of a node {node!r}: `store ls --authors` names those that there are"
        )
    touched = read_touches(place.authors, seen)
    planned = [_Plan(place, catalog, touched, settings, one).describe() for one in nodes]
    return {"path": str(root), "layout": place.layout, "nodes": planned}


def _nodes(seen: Iterable[AuthorSeen]) -> list[_Node]:
    nodes: dict[str, _Node] = {}
    for author in seen:
        owner = node_of(author.adopted_by) or author.node
        if author.node != FSCK_NODE:
            nodes.setdefault(owner, _Node(owner)).authors.append(author)
    return [nodes[name] for name in sorted(nodes)]


class _Plan:
    def __init__(
        self, place: StorePlace, catalog: Catalog, touched: Touched, settings: SegmentSettings, node: _Node
    ) -> None:
        self._place, self._catalog, self._touched, self._node = place, catalog, touched, node
        self._purges = Purges(place.base, catalog)
        self._budgets = Budgets(settings)
        self._has_budget = bool(settings.bytes_max or settings.inodes_max)
        self._alive = {author.author for author in node.authors if author.state == ALIVE}

    def describe(self) -> dict[str, object]:
        uses, purged, leaving = self._sort()
        taken = self._taken(leaving)
        excess = self._budgets.excess(taken, room_of(self._place.base), unknown=False)
        victims = choose_victims(uses, self._budgets.limits, excess, self._purges.identity)
        drops = [self._purged(one) for one in purged] + [self._drop(victim) for victim in victims]
        return {
            "node": self._node.name,
            "authors": len(self._node.authors),
            "segments": len(uses) + len(purged),
            "bytes": taken.size_bytes,
            "inodes": taken.inodes,
            "leaving_segments": len(leaving),
            "leaving_bytes": taken.leaving_bytes,
            "budget_given": self._has_budget,
            "budget_used": round(self._budgets.used, 4),
            "freed_bytes": sum(one.size_bytes for one in purged) + sum(victim.freed_bytes for victim in victims),
            "drop": drops,
        }

    def _sort(self) -> tuple[list[SegmentUse], list[_File], list[_File]]:
        """Segments that are alive, that are purged, and that are on their way out."""
        uses, purged, leaving = [], [], []
        for author in self._node.authors:
            filling = self._filling(author.author) if author.author in self._alive else frozenset()
            for file in _files(self._place.authors / author.author):
                known = self._catalog.segment(file.author, file.number)
                if file.number in self._catalog.dropped.get(file.author, ()):
                    leaving.append(file)
                elif known is not None:
                    uses.append(self._use(file, known, active=file.number in filling))
                elif self._catalog.is_purged(file.author, file.number):
                    purged.append(file)
        return uses, purged, leaving

    def _filling(self, author: str) -> frozenset[int]:
        """Segments that take records now: of each namespace the last one that logs speak of."""
        last = {one.fingerprint16: one.number for one in self._catalog.segments() if one.author == author}
        return frozenset(last.values())

    def _use(self, file: _File, segment: LoggedSegment, *, active: bool) -> SegmentUse:
        rows = segment.rows()
        records = max(1, round(file.size_bytes / (segment.record_pages * PAGE_BYTES)), len(rows))
        age_s = max(0.0, time.time() - file.written_s)
        return SegmentUse(
            *segment.name,
            segment.fingerprint16,
            file.size_bytes,
            self._touched.heat(*segment.name, records),
            age_s,
            age_s,
            float(rows["depth"].mean()) if len(rows) else 0.0,
            active=active,
            pinned=self._touched.pinned(*segment.name),
        )

    def _taken(self, leaving: list[_File]) -> Taken:
        trash_bytes = trash_files = 0
        for author in self._node.authors:
            for file_bytes in _trash(self._place.base / TRASH / author.author):
                trash_bytes, trash_files = trash_bytes + file_bytes, trash_files + 1
        inodes = sum(author.inodes for author in self._node.authors)
        leaving_bytes = sum(file.size_bytes for file in leaving)
        return Taken(
            sum(author.bytes for author in self._node.authors) + trash_bytes,
            inodes + trash_files,
            leaving_bytes + trash_bytes,
            len(leaving) + trash_files,
        )

    def _drop(self, victim: Victim) -> dict[str, object]:
        use = victim.use
        return {
            "author": use.author,
            "number": use.number,
            "namespace": use.fingerprint16.hex(),
            "bytes": use.size_bytes,
            "why": victim.why.value,
            "salvaged_blocks": len(victim.salvage),
            "hottest": int(use.heat.max(initial=np.uint8(0))),
            "idle_s": round(use.idle_s, 1),
        }

    def _purged(self, file: _File) -> dict[str, object]:
        return {
            "author": file.author,
            "number": file.number,
            "bytes": file.size_bytes,
            "why": Why.PURGED.value,
            "salvaged_blocks": 0,
        }


def _files(directory: Path) -> list[_File]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory / "seg") as entries:
        for entry in entries:
            number = number_of(entry.name, "seg")
            if number is not None:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(
                        _File(directory.name, number, status.st_blocks * _SECTOR_BYTES, status.st_mtime_ns / 1e9)
                    )
    return sorted(found, key=lambda file: file.number)


def _trash(directory: Path) -> Iterable[int]:
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(f"{where}/{name}").st_blocks * _SECTOR_BYTES
