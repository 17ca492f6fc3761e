"""Namespaces that engines have registered with this node."""

from __future__ import annotations

from kvmoverd.core.errors import QueueFull, UnknownModel
from kvmoverd.core.manifest import Namespace

NAMESPACES_MAX = 1024


class Models:
    """Namespaces by fingerprint; bounded."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[bytes, Namespace] = {}

    def add(self, namespace: Namespace) -> Namespace:
        """Registers it, or returns the one that is registered already."""
        known = self._by_fingerprint.get(namespace.fingerprint)
        if known is not None:
            return known
        if len(self._by_fingerprint) >= NAMESPACES_MAX:
            raise QueueFull(f"{len(self._by_fingerprint)} namespaces are registered, at most {NAMESPACES_MAX} may be")
        self._by_fingerprint[namespace.fingerprint] = namespace
        return namespace

    def get(self, fingerprint: bytes) -> Namespace:
        namespace = self._by_fingerprint.get(fingerprint)
        if namespace is None:
            raise UnknownModel(f"no namespace {fingerprint.hex()[:16]} is registered with this node")
        return namespace

    def drop(self, namespace: Namespace) -> None:
        self._by_fingerprint.pop(namespace.fingerprint, None)
