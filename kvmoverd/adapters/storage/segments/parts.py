"""What the store needs of its parts, as far as it uses them: each may be replaced in a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import BlockIndex


class WrittenIndex(Protocol):
    """The index as whoever writes sees it."""

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int:
        """The segment's number here, the same whenever it is asked; -1 when the namespace is not kept in RAM."""

    def add_blocks(self, segment_id: int, entries: npt.NDArray[np.void]) -> None:
        """These are durable, and visible from now on."""


class StoreIndex(WrittenIndex, BlockIndex, Protocol):
    """The index as the store sees it."""

    def find(self, fingerprint16: bytes, key: bytes) -> Place | None:
        """Where a block is that is alive and not known to be bad."""

    def mark_bad(self, fingerprint16: bytes, key: bytes, place: Place, *, for_s: float | None) -> None:
        """The block can't be had there: for so long, or until it is stored again."""

    def blocks(self, fingerprint16: bytes) -> int:
        """Blocks of a namespace that are known and alive, bad ones too."""

    def opened(self, fingerprint16: bytes) -> None:
        """The namespace was opened: it counts as used now."""


class Purges(Protocol):
    """The purge numbers of namespaces."""

    def number(self, fingerprint16: bytes) -> int:
        """The highest that is known here; touches no device."""

    def look(self, namespace: Namespace) -> int:
        """Looks at the namespace's directory. Raises `OSError`."""

    def restore(self, fingerprint16: bytes) -> None:
        """Publishes the number that is known here again if it was deleted. Raises `OSError`."""

    def purge(self, namespace: Namespace) -> int:
        """Publishes the next number, which it gives back. Raises `OSError`."""

    def purge_tenant(self, tenant: str) -> list[bytes]:
        """Purges all namespaces of the tenant; gives their fingerprints, 16 bytes each. Raises `OSError`."""

    def namespaces(self) -> list[bytes]:
        """Fingerprints of all namespaces in the root. Raises `OSError`."""


class Background(Protocol):
    """What goes on beside reads and writes."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until it is known what this node keeps already: no budget means anything before."""

    def heard(self, author: str, log: int) -> None:
        """Another node writes that log: look at once. Never blocks."""

    def purged(self) -> None:
        """Something was purged: its bytes may go."""

    def damaged(self, key: bytes, place: Place, cut: bool) -> None:
        """The record there is damaged, or `cut` off: others are to know. Never blocks."""

    def notes(self) -> list[str]:
        """What a person should know now."""

    def details(self) -> Mapping[str, int | str]:
        """The store by name, as `StorageFacts` has it."""

    def close(self, timeout_s: float) -> bool:
        """Ends its threads; True when they have ended."""
