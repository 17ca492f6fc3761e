"""A root that somebody points at: what kind of store it is, or in one line why it is none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.layout_choice import VERSION
from kvmoverd.adapters.storage.root_format import FILES, SEGMENTS, check_format, stored_format
from kvmoverd.core.errors import StorageUnusable

AUTHORS = "authors"
TEMPS = ".tmp"
TRASH = ".trash"
_LAYOUTS = (FILES, SEGMENTS)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """`root`: as in `storage.path`; `base`: the directory in it that the store is."""

    root: Path
    base: Path
    layout: str
    version: int

    @property
    def authors(self) -> Path:
        return self.base / AUTHORS


def find_store(root: Path) -> StorePlace:
    """Raises `StorageUnusable`: no such directory, no store in it, one that this build can't read, or no permission."""
    base = root / VERSION
    try:
        check_directory(root)
        found = stored_format(base)
        if found is None:
            check_not_inside(root)
            raise StorageUnusable(
                f"{root} holds no store: there is no {VERSION} in it; name the storage.path of a daemon"
            )
        layout, version = found
        if layout not in _LAYOUTS:
            raise StorageUnusable(f"{base} holds layout {layout!r}, which this build does not know: use a newer one")
        check_format(base, layout)
        os.scandir(base / AUTHORS if layout == SEGMENTS else base).close()
    except OSError as error:
        raise _unusable(root, error) from error
    return StorePlace(root, base, layout, version)


def check_owner(place: StorePlace) -> None:
    """Raises `StorageUnusable` for a user whose files the daemons may not be able to read."""
    owner, own = os.stat(place.base).st_uid, os.geteuid()
    if owner != own:
        message = f"{place.base} belongs to user {owner}, and this runs as user {own}: repair as the daemon's user"
        raise StorageUnusable(message, owner=owner, own=own)


def check_directory(root: Path) -> None:
    """Raises `StorageUnusable`, `OSError`."""
    if not root.exists():
        raise StorageUnusable(f"there is no {root}: name a directory that is there")
    if not root.is_dir():
        raise StorageUnusable(f"{root} is no directory: name the one that holds {VERSION}")
    os.scandir(root).close()


def check_not_inside(root: Path) -> None:
    """Raises `StorageUnusable` for the directory that a store is, `OSError`."""
    if root.resolve().name == VERSION and stored_format(root) is not None:
        raise StorageUnusable(
            f"{root} holds no store, it is one: there is no {VERSION} in it; name the directory above, {root.parent}"
        )


def _unusable(root: Path, error: OSError) -> StorageUnusable:
    if isinstance(error, PermissionError):
        return StorageUnusable(f"no permission to read {error.filename or root}: run this as the daemon's user")
    return StorageUnusable(f"{root}: {errno_name(error)} ({error})", root=root, errno=error.errno)
