"""What a store holds: its namespaces, and on demand its authors and segments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvmoverd.adapters.storage.inspect.authors import authors_of
from kvmoverd.adapters.storage.inspect.catalog import Catalog, LoggedSegment, Progress, no_progress, read_catalog
from kvmoverd.adapters.storage.inspect.manifests import Spaces, read_spaces
from kvmoverd.adapters.storage.inspect.parallel import each, threads_here
from kvmoverd.adapters.storage.inspect.place import StorePlace, find_store
from kvmoverd.adapters.storage.inspect.strangers import blocks_in, fan_directories
from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.core.store.places import PAGE_BYTES, segment_name

_SECTOR_BYTES = 512


def ls(
    root: Path, *, authors: bool = False, segments: bool = False, progress: Progress = no_progress
) -> dict[str, object]:
    """As one JSON object. Raises `StorageUnusable`, `OSError`."""
    place = find_store(root)
    spaces = read_spaces(place.base)
    found: dict[str, object] = {"path": str(root), "layout": place.layout, "version": place.version}
    if place.layout != SEGMENTS:
        found["namespaces"] = [_of_files(place, one, spaces, progress) for one in spaces.directories]
        found["authors"] = 0
        return found
    catalog = read_catalog(place, progress)
    known = sorted(set(spaces.directories) | catalog.namespaces())
    found["namespaces"] = [_of_segments(catalog, one, spaces) for one in known]
    seen = authors_of(place, catalog)
    found["authors"] = [dataclasses.asdict(author) for author in seen] if authors else len(seen)
    if segments:
        found["segments"] = [_segment(place, segment) for segment in catalog.segments()]
    return found


def _about(fingerprint16: bytes, spaces: Spaces) -> dict[str, object]:
    """What the manifest says."""
    space = spaces.spaces.get(fingerprint16)
    if space is None:
        return {
            "namespace": fingerprint16.hex(),
            "model_id": None,
            "why": spaces.wrong.get(fingerprint16, "no directory"),
        }
    manifest, layout = space.manifest, space.layout
    return {
        "namespace": fingerprint16.hex(),
        "model_id": manifest.model_id,
        "tenant": manifest.tenant,
        "epoch": manifest.epoch,
        "dtype": manifest.dtype,
        "layers": layout.layer_count,
        "block_tokens": layout.block_tokens,
        "block_bytes": layout.block_bytes,
        "record_bytes": layout.record_bytes,
    }


def _of_segments(catalog: Catalog, fingerprint16: bytes, spaces: Spaces) -> dict[str, object]:
    tags, size_bytes, count, names = [], 0, 0, set()
    for segment in catalog.segments(fingerprint16):
        rows = segment.rows()
        tags.append(rows["tag"].copy())
        size_bytes += len(rows) * segment.record_pages * PAGE_BYTES
        count += 1
        names.add(segment.author)
    every = np.concatenate(tags) if tags else np.empty(0, np.uint64)
    blocks = len(np.unique(every))
    return {
        **_about(fingerprint16, spaces),
        "blocks": blocks,
        "copies": len(every) - blocks,
        "bytes": size_bytes,
        "segments": count,
        "authors": len(names),
        "purge": catalog.purges.get(fingerprint16, 0),
    }


def _segment(place: StorePlace, segment: LoggedSegment) -> dict[str, object]:
    disk_bytes = 0
    with contextlib.suppress(OSError):
        path = place.authors / segment.author / "seg" / segment_name(segment.number)
        disk_bytes = os.stat(path).st_blocks * _SECTOR_BYTES
    return {
        "author": segment.author,
        "number": segment.number,
        "namespace": segment.fingerprint16.hex(),
        "generation": segment.generation,
        "purge": segment.purge,
        "records": len(segment.rows()),
        "bad": len(segment.bad),
        "bytes": disk_bytes,
    }


def _of_files(place: StorePlace, fingerprint16: bytes, spaces: Spaces, progress: Progress) -> dict[str, object]:
    blocks = size_bytes = 0
    fans: Iterator[Path] = fan_directories(place.base / fingerprint16.hex())
    for fan_blocks, fan_bytes in each(fans, _count, threads=threads_here()):
        blocks, size_bytes = blocks + fan_blocks, size_bytes + fan_bytes
        progress(f"{blocks} blocks")
    return {**_about(fingerprint16, spaces), "blocks": blocks, "bytes": size_bytes}


def _count(fan: Path) -> tuple[int, int]:
    blocks = size_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for name in blocks_in(fan):
            with contextlib.suppress(FileNotFoundError):
                size_bytes += os.stat(fan / name).st_size
                blocks += 1
    return blocks, size_bytes
