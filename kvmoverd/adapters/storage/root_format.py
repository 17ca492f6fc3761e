"""What kind of store a root holds: `<root>/kvm1/format.json`, published once; without it what lies there decides."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvmoverd.adapters.storage.block_io import open_regular
from kvmoverd.adapters.storage.namespaces import publish_file
from kvmoverd.core.errors import StorageUnusable

FORMAT_FILE = "format.json"
FILES, SEGMENTS = "files", "segments"
AUTHORS = "authors"
"""The directory that only a store of segments has."""
VERSIONS = {FILES: (1,), SEGMENTS: (1,)}
"""Versions of each layout that this build reads; it writes the last of them."""


def stored_format(base: Path) -> tuple[str, int] | None:
    """(layout, version) of the store at `<root>/kvm1`, None for an empty one. Raises `StorageUnusable`, `OSError`."""
    path = base / FORMAT_FILE
    try:
        # Not `read_bytes`: what has taken its place may be a FIFO, which nobody ever writes to.
        with open(open_regular(str(path))[0], "rb") as file:
            content = file.read()
    except FileNotFoundError:
        # A store whose file was lost keeps its layout: as one of files it would have none of its blocks.
        if (base / AUTHORS).is_dir():
            return SEGMENTS, 1
        return (FILES, 1) if _has_namespaces(base) else None
    try:
        fields = json.loads(content)
        return str(fields["layout"]), int(fields["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageUnusable(f"{path} can't be understood: {type(error).__name__}: {error}", path=path) from error


def check_format(base: Path, layout: str) -> None:
    """Raises `StorageUnusable`, by name, for a store of the other layout or of a version that this build can't read."""
    found = stored_format(base)
    if found is None:
        return
    if found[0] != layout:
        message = (
            f"{base} holds layout {found[0]!r}, not {layout!r}: set storage.layout to it, or use another directory"
        )
        raise StorageUnusable(message, layout=found[0], asked=layout)
    if found[1] not in VERSIONS[layout]:
        readable = ", ".join(map(str, VERSIONS[layout]))
        message = f"{base} is of version {found[1]} of layout {layout!r}, this build reads {readable}"
        raise StorageUnusable(message, version=found[1])


def publish_format(base: Path, layout: str, temp: Path) -> None:
    """Makes the store one of this layout, or checks that it is one. Raises `StorageUnusable`, `OSError`."""
    check_format(base, layout)
    if (base / FORMAT_FILE).exists():
        return
    content = json.dumps({"layout": layout, "version": VERSIONS[layout][-1]}).encode()
    publish_file(base / FORMAT_FILE, content, temp)
    check_format(base, layout)


def _has_namespaces(base: Path) -> bool:
    try:
        with os.scandir(base) as entries:
            return any(not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False) for entry in entries)
    except FileNotFoundError:
        return False
