"""Prefix index: keys that this node knows to be stored. What it does not know may be stored all the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """At most `keys_max` keys; beyond that the namespaces used longest ago are forgotten whole."""

    def __init__(self, *, keys_max: int) -> None:
        self.keys_max = keys_max
        self._namespaces: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, fingerprint: bytes, key: bytes) -> None:
        keys = self._namespaces.setdefault(fingerprint, set())
        self._namespaces.move_to_end(fingerprint)
        self._total += key not in keys
        keys.add(key)
        while self._total > self.keys_max:
            _, forgotten = self._namespaces.popitem(last=False)
            self._total -= len(forgotten)

    def remove(self, fingerprint: bytes, key: bytes) -> None:
        keys = self._namespaces.get(fingerprint)
        if keys is not None and key in keys:
            keys.remove(key)
            self._total -= 1

    def drop_namespace(self, fingerprint: bytes) -> None:
        self._total -= len(self._namespaces.pop(fingerprint, ()))

    def known_prefix(self, fingerprint: bytes, keys: Sequence[bytes]) -> int:
        """Leading keys that are known to be stored."""
        known = self._namespaces.get(fingerprint)
        if known is None:
            return 0
        self._namespaces.move_to_end(fingerprint)
        return next((n for n, key in enumerate(keys) if key not in known), len(keys))
