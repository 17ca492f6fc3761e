"""Up to which purge a copy of a namespace is purged: names in the namespace's directory, in the main root and in the copy.

In the main root a namespace has a *token*: when its directory was made, by whatever random name it got then, and how often it
was purged since. A purge, a main root that was replaced and a directory that somebody deleted change it, and it never comes
back. A copy remembers, as a name in its own directory, up to which token it was purged. If that is another one than the main
root's, whatever the reason, the copy is purged before it is asked for anything: what it holds can be had from the main root.

    <main>/kvm1/<fingerprint, 16 bytes in hex>/birth.<16 hex>               and purge.<n>, see the layouts
    <copy>/kvm1/<fingerprint, 16 bytes in hex>/follows.<16 hex>-<n>
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Protocol

from kvmoverd.adapters.storage.block_io import create_file
from kvmoverd.adapters.storage.namespaces import sync_directory
from kvmoverd.core.store.places import number_of

GONE = "0000000000000000-0"
"""Stands for the token of a namespace that the main root does not have."""
MARK_NAME = re.compile(r"birth\.[0-9a-f]{16}|follows\.[0-9a-f]{16}-\d+")
"""Names of this kind in the directory of a namespace."""
_BIRTH, _FOLLOWS, _PURGE = "birth.", "follows.", "purge"
_BIRTH_BYTES = 8


class Marks(Protocol):
    """Of one root; by the first 16 bytes of fingerprints. They block, are for any thread, and raise `OSError`."""

    def token(self, fingerprint16: bytes) -> str | None:
        """Of a main root: what it is now, None while it has no such namespace."""

    def ensure_token(self, fingerprint16: bytes) -> str:
        """As `token` of a namespace that is open: it has one from now on."""

    def purged(self, fingerprint16: bytes) -> None:
        """The namespace was purged in this root, by this process."""

    def mark(self, fingerprint16: bytes) -> str | None:
        """Of a copy: the token up to which it was purged, None when that is not known."""

    def set_mark(self, fingerprint16: bytes, token: str) -> None:
        """It was purged up to this token, and is open: durable when it returns."""


class DiskMarks:
    """In the directories of a store at `base`, whatever its layout."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def token(self, fingerprint16: bytes) -> str | None:
        try:
            names = os.listdir(self._directory(fingerprint16))
        except FileNotFoundError:
            return None
        # Two nodes may each have named it: all go by the first name then.
        births = sorted(name for name in names if name.startswith(_BIRTH))
        purge = max((number for name in names if (number := number_of(name, _PURGE)) is not None), default=0)
        return f"{births[0].removeprefix(_BIRTH)}-{purge}" if births else None

    def ensure_token(self, fingerprint16: bytes) -> str:
        found = self.token(fingerprint16)
        if found is None:
            directory = self._directory(fingerprint16)
            os.close(create_file(directory / f"{_BIRTH}{secrets.token_hex(_BIRTH_BYTES)}"))
            sync_directory(directory)
            found = self.token(fingerprint16)
        # A purge may have taken the directory away meanwhile.
        return found or GONE

    def purged(self, fingerprint16: bytes) -> None:
        """The purge itself has left its name."""

    def mark(self, fingerprint16: bytes) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            names = [name for name in os.listdir(self._directory(fingerprint16)) if name.startswith(_FOLLOWS)]
            return names[0].removeprefix(_FOLLOWS) if len(names) == 1 else None
        return None

    def set_mark(self, fingerprint16: bytes, token: str) -> None:
        directory = self._directory(fingerprint16)
        sync_directory(self.base)
        for name in os.listdir(directory):
            if name.startswith(_FOLLOWS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(directory / name)
        with contextlib.suppress(FileExistsError):
            os.close(create_file(directory / f"{_FOLLOWS}{token}"))
        sync_directory(directory)

    def _directory(self, fingerprint16: bytes) -> Path:
        return self.base / fingerprint16.hex()


class RamMarks:
    """Of a root that is empty whenever a process begins: nobody needs to know more after its end."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, str] = {}
        self._marks: dict[bytes, str] = {}

    def token(self, fingerprint16: bytes) -> str | None:
        return self._tokens.get(fingerprint16)

    def ensure_token(self, fingerprint16: bytes) -> str:
        return self._tokens.setdefault(fingerprint16, f"{secrets.token_hex(_BIRTH_BYTES)}-0")

    def purged(self, fingerprint16: bytes) -> None:
        self._tokens.pop(fingerprint16, None)

    def mark(self, fingerprint16: bytes) -> str | None:
        return self._marks.get(fingerprint16)

    def set_mark(self, fingerprint16: bytes, token: str) -> None:
        self._marks[fingerprint16] = token
