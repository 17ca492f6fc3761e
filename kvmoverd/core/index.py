"""Prefix index: keys that this node knows to be stored. What it does not know may be stored all the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat


@dataclass(slots=True)
class _Known:
    """Keys of one namespace in two generations; the older one is forgotten when the younger is full."""

    young: set[bytes] = field(default_factory=set)
    old: set[bytes] = field(default_factory=set)

    def __contains__(self, key: bytes) -> bool:
        return key in self.young or key in self.old

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


class PrefixIndex:
    """At most `keys_max` keys, 2 at least.

    Beyond that the namespaces used longest ago are forgotten whole; one that would fill the index alone forgets the older
    half of its keys.
    """

    def __init__(self, *, keys_max: int) -> None:
        assert keys_max >= 2, f"keys_max is {keys_max}, must be 2 or more"
        self.keys_max = keys_max
        self._namespaces: OrderedDict[bytes, _Known] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, fingerprint: bytes, keys: Iterable[bytes]) -> None:
        """These are stored."""
        known = self._namespaces.get(fingerprint)
        if known is None:
            known = self._namespaces[fingerprint] = _Known()
        self._namespaces.move_to_end(fingerprint)
        for key in keys:
            if key not in known.young and key not in known.old:
                self._add(known, key)
        while self._total > self.keys_max:
            _, forgotten = self._namespaces.popitem(last=False)
            self._total -= len(forgotten)

    def _add(self, known: _Known, key: bytes) -> None:
        if len(known.young) >= self.keys_max // 2:
            self._total -= len(known.old)
            known.young, known.old = set(), known.young
        known.young.add(key)
        self._total += 1

    def remove(self, fingerprint: bytes, key: bytes) -> None:
        """The block is gone; nothing for a key that is not known."""
        known = self._namespaces.get(fingerprint)
        if known is None or key not in known:
            return
        known.young.discard(key)
        known.old.discard(key)
        self._total -= 1
        if not known:
            del self._namespaces[fingerprint]

    def drop_namespace(self, fingerprint: bytes) -> None:
        self._total -= len(self._namespaces.pop(fingerprint, ()))

    def known(self, fingerprint: bytes, keys: Sequence[bytes]) -> Iterator[bool]:
        """For each key whether it is known to be stored."""
        known = self._namespaces.get(fingerprint)
        if known is None:
            return repeat(False, len(keys))
        self._namespaces.move_to_end(fingerprint)
        young, old = known.young, known.old
        return (key in young or key in old for key in keys)
