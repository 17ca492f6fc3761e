"""The namespaces of a root by their manifests, and those whose manifest is not what their directory's name says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.namespaces import MANIFEST
from kvmoverd.core.errors import BadManifest
from kvmoverd.core.manifest import Namespace, stored_manifest

NAME_CHARACTERS = 32


@dataclass(slots=True)
class Spaces:
    """By the first 16 bytes of the fingerprint. `wrong`: what is wrong with a manifest; `directories`: all that there are."""

    spaces: dict[bytes, Namespace] = field(default_factory=dict)
    wrong: dict[bytes, str] = field(default_factory=dict)
    directories: list[bytes] = field(default_factory=list)


def read_spaces(base: Path) -> Spaces:
    """Raises `OSError` where `base` can't be read."""
    found = Spaces()
    for fingerprint16 in sorted(_directories(base)):
        found.directories.append(fingerprint16)
        path = base / fingerprint16.hex() / MANIFEST
        try:
            space = Namespace(stored_manifest(path.read_bytes()))
        except FileNotFoundError:
            found.wrong[fingerprint16] = f"{path}: there is none"
        except (OSError, BadManifest) as error:
            what = f"{errno_name(error)} ({error})" if isinstance(error, OSError) else str(error)
            found.wrong[fingerprint16] = f"{path}: {what}"
        else:
            if space.fingerprint[:16] == fingerprint16:
                found.spaces[fingerprint16] = space
            else:
                found.wrong[fingerprint16] = f"{path}: its fingerprint is {space.fingerprint[:16].hex()}"
    return found


def _directories(base: Path) -> Iterator[bytes]:
    with os.scandir(base) as entries:
        for entry in entries:
            if is_namespace(entry.name) and entry.is_dir(follow_symlinks=False):
                yield bytes.fromhex(entry.name)


def is_namespace(name: str) -> bool:
    """
    >>> is_namespace("0123456789abcdef0123456789abcdef"), is_namespace(".trash"), is_namespace("authors")
    (True, False, False)
    """
    return len(name) == NAME_CHARACTERS and all(character in "0123456789abcdef" for character in name)
