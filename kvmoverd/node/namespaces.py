"""Namespaces of the node: opened, purged, pinned and asked for. A purge is told to the other nodes, which look at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvmoverd.core.errors import BadRequest, KvmoverError
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.node.models import Models
from kvmoverd.node.peer import Peers
from kvmoverd.node.services import Services

T = TypeVar("T")

STORAGE_S = 30.0
WRITES_POLL_S = 0.005
TENANT_CHARS_MAX = 128
PIN_S_MAX = 604_800.0


@dataclass(frozen=True, slots=True)
class Looked:
    """Answer of a look-up: leading blocks stored, and of these leading ones in this node's pool."""

    prefix_blocks: int
    pooled_blocks: int


class Namespaces:
    """`peers`: whom a purge is told; None before there are any."""

    def __init__(self, services: Services, models: Models, peers: Callable[[], Peers | None]) -> None:
        self._services = services
        self._models = models
        self._peers = peers

    async def register(self, manifest: Manifest) -> Namespace:
        """Opens the namespace in the store. Raises `ManifestMismatch`, `StaleEpoch`, `StorageUnusable`, `TooBig`."""
        namespace = Namespace(manifest)
        self._services.pool.size_class(namespace.layout)
        self._models.make_room(namespace)
        await self._open(namespace)
        return self._models.add(namespace)

    async def bump_epoch(self, namespace: Namespace) -> Namespace:
        """The next epoch starts empty; the old namespace's blocks are purged."""
        manifest = dataclasses.replace(namespace.manifest, epoch=namespace.manifest.epoch + 1)
        successor = await self.register(manifest)
        self._models.drop(namespace)
        await self._purge(namespace)
        self._tell([namespace], "")
        return successor

    async def purge(self, namespace: Namespace) -> tuple[int, int]:
        """(blocks, bytes) found; the namespace stays registered, empty."""
        found = await self._purge(namespace)
        await self._open(namespace)
        self._tell([namespace], "")
        return found

    async def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As `purge`, of all namespaces of the tenant that the store has, registered here or not. Raises `BadRequest`."""
        if not 1 <= len(tenant) <= TENANT_CHARS_MAX:
            raise BadRequest(f"tenant has {len(tenant)} characters, must have 1 to {TENANT_CHARS_MAX}")
        ours = [namespace for namespace in self._models.all() if namespace.manifest.tenant == tenant]
        work = partial(self._services.desk.storage.purge_tenant, tenant)
        found = await self._emptied(ours, work, "purging the tenant")
        for namespace in ours:
            await self._open(namespace)
        self._tell(ours, tenant)
        return found

    async def purged_elsewhere(self, fingerprints: Sequence[bytes], tenant: str) -> int:
        """Another node has purged these: nothing of them is found in RAM any more, and the store is looked at."""
        asked = set(fingerprints)
        ours = [
            namespace
            for namespace in self._models.all()
            if namespace.fingerprint in asked or (tenant and namespace.manifest.tenant == tenant)
        ]
        for namespace in ours:
            self._forget(namespace)
        for namespace in ours:
            # A later epoch, or a store that is away: whoever uses the namespace next will be told.
            with contextlib.suppress(KvmoverError):
                await self._open(namespace)
            self._forget(namespace)
        return len(ours)

    async def lookup(self, namespace: Namespace, keys: Sequence[bytes]) -> Looked:
        """RAM first, then, where RAM may not know all, a probe of the store: other nodes may have stored blocks."""
        reader = self._services.reader
        stored = await reader.catalog.stored_prefix(namespace, keys)
        return Looked(stored, reader.pooled_prefix(namespace, keys[:stored]))

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        """Keeps stored blocks for so long, 0: no longer; how many of these are known. Raises `BadRequest`."""
        if for_s > PIN_S_MAX:
            raise BadRequest(f"blocks are to be pinned for {for_s:g} s, at most {PIN_S_MAX:g} s are taken")
        return self._services.reader.catalog.pin(namespace, keys, for_s)

    async def _open(self, namespace: Namespace) -> None:
        work = partial(self._services.desk.storage.open_namespace, namespace)
        await self._services.off_loop(work, what="opening the namespace", timeout_s=STORAGE_S)

    async def _purge(self, namespace: Namespace) -> tuple[int, int]:
        work = partial(self._services.desk.storage.purge, namespace)
        return await self._emptied([namespace], work, "purging the namespace")

    async def _emptied(self, namespaces: Sequence[Namespace], work: Callable[[], T], what: str) -> T:
        """Writes that wait are given up, those under way are waited for: none of them may be found afterwards."""
        desk, loop = self._services.desk, asyncio.get_running_loop()
        for namespace in namespaces:
            self._forget(namespace)
        until_s = loop.time() + STORAGE_S
        while any(map(desk.writes, namespaces)) and loop.time() < until_s:  # noqa: ASYNC110 rare, and bounded
            await asyncio.sleep(WRITES_POLL_S)
        found = await self._services.off_loop(work, what=what, timeout_s=STORAGE_S)
        for namespace in namespaces:
            self._forget(namespace)
        return found

    def _forget(self, namespace: Namespace) -> None:
        self._services.reader.forget_namespace(namespace)
        self._services.desk.drop_writes(namespace)

    def _tell(self, namespaces: Sequence[Namespace], tenant: str) -> None:
        """Other nodes hear of it soon; those that don't find out from the store."""
        peers = self._peers()
        if peers is not None:
            peers.tell_purged([namespace.fingerprint for namespace in namespaces], tenant)
