"""Names in a store that are no part of it: nothing reads them, and nothing ever deletes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvmoverd.adapters.storage.inspect.manifests import is_namespace
from kvmoverd.adapters.storage.inspect.place import AUTHORS, TEMPS, TRASH, StorePlace
from kvmoverd.adapters.storage.namespaces import MANIFEST
from kvmoverd.adapters.storage.root_format import FORMAT_FILE
from kvmoverd.adapters.storage.roots_marks import MARK_NAME
from kvmoverd.adapters.storage.segments.followed import is_author

_SHARED = frozenset({FORMAT_FILE, TEMPS, TRASH, ".epochs"})
_OF_AUTHOR = re.compile(r"lease|seg|(log|snap|touch)\.\d{8,}|snap\.\d{8,}\.[0-9a-f]{8}|adopt\.\d+")
_SEGMENT = re.compile(r"\d{8,}\.seg")
_OF_NAMESPACE = re.compile(rf"{re.escape(MANIFEST)}|purge\.\d+|{MARK_NAME.pattern}")
_FAN = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.blk")


def strangers_of_segments(place: StorePlace) -> Iterator[Path]:
    """Raises `OSError` where the store itself can't be read; a directory that is gone meanwhile holds none."""
    for entry in _entries(place.base):
        if is_namespace(entry.name) and entry.is_dir(follow_symlinks=False):
            yield from _unlike(Path(entry.path), _OF_NAMESPACE)
        elif entry.name not in _SHARED | {AUTHORS}:
            yield Path(entry.path)
    for entry in _entries(place.authors):
        if not is_author(entry.name) or not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)
            continue
        yield from _unlike(Path(entry.path), _OF_AUTHOR)
        yield from _unlike(Path(entry.path, "seg"), _SEGMENT)


def strangers_of_files(place: StorePlace) -> Iterator[Path]:
    """As of segments."""
    for entry in _entries(place.base):
        if is_namespace(entry.name) and entry.is_dir(follow_symlinks=False):
            yield from _strangers_in_namespace(Path(entry.path))
        elif entry.name not in _SHARED | {".quarantine"}:
            yield Path(entry.path)


def fan_directories(namespace: Path) -> Iterator[Path]:
    """Where the blocks of a namespace lie in layout A."""
    for first in _entries(namespace):
        if _FAN.fullmatch(first.name):
            for second in _entries(Path(first.path)):
                if _FAN.fullmatch(second.name):
                    yield Path(second.path)


def blocks_in(fan: Path) -> list[str]:
    """Names of the files of blocks that belong there. Raises `OSError`."""
    prefix = fan.parent.name + fan.name
    return sorted(name for name in os.listdir(fan) if _BLOCK.fullmatch(name) and name.startswith(prefix))


def _strangers_in_namespace(namespace: Path) -> Iterator[Path]:
    for first in _entries(namespace):
        if not _FAN.fullmatch(first.name) or not first.is_dir(follow_symlinks=False):
            if not _OF_NAMESPACE.fullmatch(first.name):
                yield Path(first.path)
            continue
        for second in _entries(Path(first.path)):
            if not _FAN.fullmatch(second.name) or not second.is_dir(follow_symlinks=False):
                yield Path(second.path)
                continue
            prefix = first.name + second.name
            for block in _entries(Path(second.path)):
                if not (_BLOCK.fullmatch(block.name) and block.name.startswith(prefix)):
                    yield Path(block.path)


def _unlike(directory: Path, expected: re.Pattern[str]) -> Iterator[Path]:
    return (Path(entry.path) for entry in _entries(directory) if not expected.fullmatch(entry.name))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
