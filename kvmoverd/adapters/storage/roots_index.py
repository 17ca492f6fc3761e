"""What is stored in any of several roots, as far as RAM knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.roots_root import Root
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place


class RootsIndex:
    """`BlockIndex` over those of the roots. A root that would let nothing in promises nothing: its blocks are misses."""

    def __init__(self, roots: Sequence[Root], now_s: Callable[[], float], on_forget: Callable[[bytes], None]) -> None:
        self._roots, self._on_forget = tuple(roots), on_forget
        self._main = next(root for root in roots if root.settings.is_main)
        self._now_s = now_s

    @property
    def complete(self) -> bool:
        return all(root.storage.index.complete for root in self._roots)

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Of a root that may be tried again, one block at a time is promised until that went well."""
        now_s = self._now_s()
        found = np.zeros(len(keys), dtype=np.bool_)
        for root in self._roots:
            if not root.is_promising(now_s) or not (len(self._roots) == 1 or namespace.fingerprint in root.opened):
                continue
            known = root.storage.index.known(namespace, keys)
            if not root.healthy:
                known[np.flatnonzero(known)[1:]] = False
            found |= known
            if found.all():
                break
        return found

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        """Those in the main root: copies are of no use to other nodes."""
        return self._main.storage.index.places(namespace, keys)

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        for root in self._roots:
            root.storage.index.touch(namespace, keys)

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        return max(root.storage.index.pin(namespace, keys, for_s) for root in self._roots)

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Of several roots, each is told by the set, which knows where they were found."""
        if len(self._roots) == 1:
            self._main.storage.index.found(namespace, keys)

    def lost(self, namespace: Namespace, key: bytes) -> None:
        """As `found`."""
        if len(self._roots) == 1:
            self._main.storage.index.lost(namespace, key)

    def forget(self, namespace: Namespace) -> None:
        """Copies are not asked for it until the main root has said up to where it was purged."""
        self._on_forget(namespace.fingerprint)
        for root in self._roots:
            root.storage.index.forget(namespace)
