"""Namespaces that engines have registered with this node."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvmoverd.core.errors import QueueFull, UnknownModel
from kvmoverd.core.manifest import Namespace

NAMESPACES_MAX = 1024


class Models:
    """Namespaces by fingerprint; bounded: a new one takes the place of the one that is unused and was registered longest ago.

    `in_use` says the fingerprints that regions and live requests need; without it nothing is ever dropped.
    """

    def __init__(self, in_use: Callable[[], Collection[bytes]] | None = None) -> None:
        self._by_fingerprint: dict[bytes, Namespace] = {}
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def all(self) -> list[Namespace]:
        """All that are registered, the one registered longest ago first."""
        return list(self._by_fingerprint.values())

    def make_room(self, namespace: Namespace) -> None:
        """Sees to it that `add` can take this one; to be called before the store is touched.

        Raises `QueueFull` when all are in use.
        """
        if namespace.fingerprint in self._by_fingerprint or len(self._by_fingerprint) < NAMESPACES_MAX:
            return
        used = self._by_fingerprint if self._in_use is None else self._in_use()
        unused = next((known for known in self._by_fingerprint if known not in used), None)
        if unused is None:
            raise QueueFull(f"{len(self._by_fingerprint)} namespaces are in use, at most {NAMESPACES_MAX} may be")
        del self._by_fingerprint[unused]

    def add(self, namespace: Namespace) -> Namespace:
        """Registers it as the newest, or again; returns the one that is registered. Raises as `make_room` does."""
        self.make_room(namespace)
        known = self._by_fingerprint.pop(namespace.fingerprint, namespace)
        self._by_fingerprint[namespace.fingerprint] = known
        return known

    def get(self, fingerprint: bytes) -> Namespace:
        namespace = self._by_fingerprint.get(fingerprint)
        if namespace is None:
            raise UnknownModel(f"no namespace {fingerprint.hex()[:16]} is registered with this node")
        return namespace

    def drop(self, namespace: Namespace) -> None:
        self._by_fingerprint.pop(namespace.fingerprint, None)
