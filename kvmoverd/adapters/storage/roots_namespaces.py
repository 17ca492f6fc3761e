"""Namespaces in several roots: opened and purged in all of them at once, each beside the others, in bounded time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvmoverd.adapters.storage.roots_calls import Call
from kvmoverd.adapters.storage.roots_root import Root
from kvmoverd.core.errors import QueueFull, StorageUnusable
from kvmoverd.core.manifest import Namespace

log = logging.getLogger(__name__)

CALL_S = 25.0
"""For a call in all roots."""


class RootsNamespaces:
    """What the port has that blocks; called in threads beside the loop.

    The main root must do what is asked. A copy that can't open a namespace is not asked for its blocks until it can; one
    that can't purge it is neither, and must purge it before it opens it again.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._all = tuple(roots)
        mains = [root for root in roots if root.settings.is_main]
        assert len(mains) == 1, f"{len(mains)} of {len(roots)} roots are main, one must be"
        self.main = mains[0]
        self._unpurged: set[tuple[str, bytes]] = set()
        self._unpurged_tenants: set[tuple[str, str]] = set()

    def open_namespace(self, namespace: Namespace) -> None:
        """As in the port. A manifest or an epoch that differs is refused, wherever it lies."""
        for root, error in self._in_all(lambda root: self._open(root, namespace), "opening a namespace"):
            if root is self.main or not isinstance(error, StorageUnusable | QueueFull):
                raise error
            log.warning("its copies are not used: %s", error)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """As in the port, summed over the roots; raises when any of them could not."""
        found: dict[str, tuple[int, int]] = {}
        failures = self._in_all(lambda root: self._purge(root, namespace, found), "purging a namespace")
        return _sum_or_raise(found, failures)

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As `purge`."""
        found: dict[str, tuple[int, int]] = {}

        failures = self._in_all(lambda root: self._purge_tenant(root, tenant, found), "purging a tenant")
        return _sum_or_raise(found, failures)

    def heard(self, author: str, log: int) -> None:
        """Others write in the main root: copies are nobody else's."""
        self.main.storage.heard(author, log)

    def signature(self) -> tuple[str, int]:
        return self.main.storage.signature()

    def _open(self, root: Root, namespace: Namespace) -> None:
        tenant = namespace.manifest.tenant
        if (root.name, tenant) in self._unpurged_tenants:
            self._purge_tenant(root, tenant, {})
        if (root.name, namespace.fingerprint) in self._unpurged:
            self._purge(root, namespace, {})
        root.storage.open_namespace(namespace)
        root.opened[namespace.fingerprint] = tenant

    def _purge(self, root: Root, namespace: Namespace, found: dict[str, tuple[int, int]]) -> None:
        """Until it is done, the root is not asked."""
        name = root.name, namespace.fingerprint
        self._unpurged.add(name)
        root.opened.pop(namespace.fingerprint, None)
        found[root.name] = root.storage.purge(namespace)
        self._unpurged.discard(name)

    def _purge_tenant(self, root: Root, tenant: str, found: dict[str, tuple[int, int]]) -> None:
        """As `_purge`."""
        self._unpurged_tenants.add((root.name, tenant))
        for fingerprint in [name for name, owner in list(root.opened.items()) if owner == tenant]:
            root.opened.pop(fingerprint, None)
        found[root.name] = root.storage.purge_tenant(tenant)
        self._unpurged_tenants.discard((root.name, tenant))

    def _in_all(self, work: Callable[[Root], None], what: str) -> list[tuple[Root, Exception]]:
        """Does it in all roots at once; the failures, the main root's first."""
        deadline_s = time.monotonic() + CALL_S
        calls: list[tuple[Root, Call[None]]] = []
        failures: list[tuple[Root, Exception]] = []
        for root in sorted(self._all, key=lambda root: not root.settings.is_main):
            try:
                calls.append((root, root.calls.begin(partial(work, root), what=what)))
            except QueueFull as error:
                failures.append((root, error))
        for root, call in calls:
            try:
                call.result(deadline_s)
            except Exception as error:  # noqa: BLE001 whoever called decides
                failures.append((root, error))
        return sorted(failures, key=lambda failure: not failure[0].settings.is_main)


def _sum_or_raise(found: dict[str, tuple[int, int]], failures: Sequence[tuple[Root, Exception]]) -> tuple[int, int]:
    for _, error in failures:
        raise error
    return sum(blocks for blocks, _ in found.values()), sum(size_bytes for _, size_bytes in found.values())
