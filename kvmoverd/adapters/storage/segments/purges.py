"""Purge numbers of namespaces, as files that all nodes see, and whose namespaces they are.

A purge publishes `purge.<n>` with the next number; segments that were made under a lower one are dead at once for whoever
knows of it: here when the call returns, at other nodes within a second and what their filesystem keeps of a directory. Their
bytes are gone a grace and the time of their deletion later.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmoverd.adapters.storage.block_io import create_file
from kvmoverd.adapters.storage.namespaces import MANIFEST, sync_directory
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import number_of

POLL_S = 1.0
"""Period of `Purges.poll`."""
MANIFEST_BYTES_MAX = 1 << 20
_PREFIX = "purge"
_TRIES = 100
_STEP_S = 0.05
_FINGERPRINT16_CHARS = 32


class PurgedIndex(Protocol):
    def set_purge(self, fingerprint16: bytes, purge: int) -> None:
        """Segments of the namespace with a lower number are dead."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What of a namespace's manifest limits and purges go by."""

    tenant: str
    model_id: str


class Purges:
    """Purge numbers of one root. Thread-safe; `number` touches no device. `base`: the directory of the namespaces.

    `on_purge` is called with each namespace whose number has grown, here or elsewhere, after the index was told.
    """

    def __init__(
        self,
        base: Path,
        index: PurgedIndex,
        *,
        on_purge: Callable[[bytes], None] = lambda fingerprint16: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base, self._index, self._now_s = base, index, now_s
        self.on_purge = on_purge
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}
        self._identities: dict[bytes, Identity] = {}
        self._waiting: list[bytes] = []

    def number(self, fingerprint16: bytes) -> int:
        """The highest number known here, 0 when the namespace was never purged."""
        return self._numbers.get(fingerprint16, 0)

    def watches(self, fingerprint16: bytes) -> bool:
        """Whether the namespace is polled."""
        return fingerprint16 in self._numbers

    def look(self, namespace: Namespace) -> int:
        """The number now; the namespace is polled from now on. Raises `OSError`."""
        return self.watch(namespace.fingerprint[:16])

    def watch(self, fingerprint16: bytes) -> int:
        """As `look`, for a namespace of which only segments are known. Raises `OSError`."""
        return self._know(fingerprint16, self._highest(fingerprint16))

    def poll(self) -> bool:
        """The keeper's job: looks at the known namespaces, for a twentieth of a second at most; True when there are more."""
        with self._lock:
            waiting = self._waiting or list(self._numbers)
        deadline_s = self._now_s() + _STEP_S
        while waiting and self._now_s() < deadline_s:
            with contextlib.suppress(OSError):
                self.watch(waiting.pop())
        self._waiting = waiting
        return bool(waiting)

    def purge(self, namespace: Namespace) -> int:
        """Purges the namespace and gives its new number: durable and known here when it returns. Raises `OSError`."""
        return self.publish(namespace.fingerprint[:16])

    def publish(self, fingerprint16: bytes) -> int:
        """As `purge`. Raises `FileNotFoundError` for a namespace that was never opened in this root."""
        directory = self._directory(fingerprint16)
        for _ in range(_TRIES):
            # What is known here counts, too: its file may have been deleted, and segments of that number be there.
            number = max(self._highest(fingerprint16), self.number(fingerprint16)) + 1
            with contextlib.suppress(FileExistsError):
                os.close(create_file(directory / f"{_PREFIX}.{number}"))
                sync_directory(directory)
                if self._highest(fingerprint16) > number:
                    # A higher one came first, and has cleared the way for this one: it would be the number of two purges.
                    continue
                self._know(fingerprint16, number)
                self._drop_lower(directory, number)
                return number
        raise StorageUnusable(f"{directory}: {_TRIES} purges by others came first", directory=directory)

    def restore(self, fingerprint16: bytes) -> None:
        """Publishes the number that is known here again if it was deleted. Raises `OSError`."""
        number = self.number(fingerprint16)
        if number > self._highest(fingerprint16):
            directory = self._directory(fingerprint16)
            with contextlib.suppress(FileExistsError):
                os.close(create_file(directory / f"{_PREFIX}.{number}"))
                sync_directory(directory)

    def purge_tenant(self, tenant: str) -> list[bytes]:
        """Purges all namespaces whose manifest names the tenant; gives their fingerprints. Raises `OSError`.

        One that can't be purged stops no other: the first error is raised when all were tried.
        """
        purged: list[bytes] = []
        first: OSError | None = None
        for fingerprint16 in self.namespaces():
            identity = self.identity(fingerprint16)
            if identity is None or identity.tenant != tenant:
                continue
            try:
                self.publish(fingerprint16)
            except OSError as error:
                first = first or error
            else:
                purged.append(fingerprint16)
        if first:
            raise first
        return purged

    def namespaces(self) -> list[bytes]:
        """Fingerprints of all namespaces in the root. Raises `OSError`."""
        found = []
        for name in os.listdir(self._base):
            if len(name) == _FINGERPRINT16_CHARS:
                with contextlib.suppress(ValueError):
                    found.append(bytes.fromhex(name))
        return sorted(found)

    def identity(self, fingerprint16: bytes) -> Identity | None:
        """From the manifest, which never changes; None where none can be read now."""
        known = self._identities.get(fingerprint16)
        if known is None:
            known = _read_identity(self._directory(fingerprint16) / MANIFEST)
            if known is not None:
                self._identities[fingerprint16] = known
        return known

    def _know(self, fingerprint16: bytes, number: int) -> int:
        with self._lock:
            before = self._numbers.get(fingerprint16, 0)
            self._numbers[fingerprint16] = max(before, number)
        if number > before:
            self._index.set_purge(fingerprint16, number)
            self.on_purge(fingerprint16)
        return max(before, number)

    def _highest(self, fingerprint16: bytes) -> int:
        names = os.listdir(self._directory(fingerprint16))
        return max((number for name in names if (number := number_of(name, _PREFIX)) is not None), default=0)

    def _drop_lower(self, directory: Path, number: int) -> None:
        """Only the highest counts; should a lower one stay, nothing is wrong."""
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                lower = number_of(name, _PREFIX)
                if lower is not None and lower < number:
                    os.unlink(directory / name)

    def _directory(self, fingerprint16: bytes) -> Path:
        return self._base / fingerprint16.hex()


def _read_identity(path: Path) -> Identity | None:
    try:
        with open(path, "rb") as file:
            fields = json.loads(file.read(MANIFEST_BYTES_MAX))
        return Identity(str(fields["tenant"]), str(fields["model_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
