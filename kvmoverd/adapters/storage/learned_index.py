"""What a storage learns of its blocks while it works, where no log says what is there: for layout A, and for memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvmoverd.core.index import PrefixIndex
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place

KEYS_MAX = 4 << 20
BAD_MAX = 1 << 16
"""Blocks that are not tried for a while; beyond that the oldest are tried again."""

_Name = tuple[bytes, bytes]


class LearnedIndex:
    """`BlockIndex` of a storage that forgets nothing by itself: so there is nothing to touch, and a pin is kept for ever.

    The calls of the port are for the loop; those about bad blocks for any thread.
    """

    complete = False

    def __init__(self, *, keys_max: int = KEYS_MAX, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._index = PrefixIndex(keys_max=keys_max)
        self._now_ns = now_ns
        self._bad: dict[_Name, int] = {}
        self._lock = threading.Lock()

    @property
    def bad_blocks(self) -> int:
        """Negative entries that are held."""
        return len(self._bad)

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return np.fromiter(self._index.known(namespace.fingerprint, keys), np.bool_, len(keys))

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        """None for each: a block's name is its place."""
        return [None] * len(keys)

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nothing is dropped for not being used."""

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        return int(self.known(namespace, keys).sum())

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        self._index.add(namespace.fingerprint, keys)

    def lost(self, namespace: Namespace, key: bytes) -> None:
        self._index.remove(namespace.fingerprint, key)

    def forget(self, namespace: Namespace) -> None:
        self._index.drop_namespace(namespace.fingerprint)

    def mark_bad(self, namespace: Namespace, key: bytes, *, for_s: float) -> None:
        """A negative entry: the block is neither read nor found for so long, unless it is stored anew."""
        until_ns = self._now_ns() + int(for_s * 1e9)
        with self._lock:
            self._bad.pop((namespace.fingerprint, key), None)
            self._bad[namespace.fingerprint, key] = until_ns
            if len(self._bad) > BAD_MAX:
                del self._bad[next(iter(self._bad))]

    def bad_for_s(self, namespace: Namespace, key: bytes) -> float:
        """How much longer the block is not to be tried; 0 when it may be."""
        if not self._bad:
            return 0.0
        name = namespace.fingerprint, key
        until_ns = self._bad.get(name)
        if until_ns is None:
            return 0.0
        left_s = (until_ns - self._now_ns()) / 1e9
        if left_s <= 0:
            self.repaired(namespace, key)
        return max(0.0, left_s)

    def repaired(self, namespace: Namespace, key: bytes) -> None:
        """Stored anew: it may be read."""
        if self._bad:
            with self._lock:
                self._bad.pop((namespace.fingerprint, key), None)
