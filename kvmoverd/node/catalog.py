"""Catalog: which blocks this node knows to be stored, and which it used. RAM first, a probe where RAM may not know all."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place
from kvmoverd.node.desk import StorageDesk
from kvmoverd.ports.storage import StorageDone

PROBE_S = 10.0
LOOKED_KEYS_MAX = 2048
"""Keys that are looked up in one step of the loop: some 0.3 ms."""
TOUCH_KEYS_MAX = 512
"""Keys whose use is booked in one step of the loop: some 0.1 ms."""
USES_MAX = 4096
"""Requests whose uses wait to be booked; beyond that the oldest are forgotten: it is only for the choice of what to drop."""


class Catalog:
    """The storage's index as the node asks it, guarded against purges: what began before one is not found after it."""

    def __init__(self, desk: StorageDesk) -> None:
        self._desk = desk
        self._index = desk.storage.index
        self._purges: Counter[bytes] = Counter()
        self._found: dict[bytes, tuple[Namespace, list[bytes]]] = {}
        self._uses: deque[tuple[Namespace, Sequence[bytes]]] = deque(maxlen=USES_MAX)
        self._booking = False
        self.on_used: list[Callable[[Namespace, Sequence[bytes]], None]] = []
        """Called with the keys of each request that uses blocks, at once."""
        self.on_forgotten: list[Callable[[Namespace], None]] = []
        """Called with each namespace that was purged."""

    @property
    def is_complete(self) -> bool:
        """Whether what RAM does not know is not stored."""
        return self._index.complete

    def purges(self, namespace: Namespace) -> int:
        """How often the namespace was purged: what began before the last time must not be found."""
        return self._purges[namespace.fingerprint]

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Indexes of the keys that RAM knows to be stored; at most `LOOKED_KEYS_MAX` keys at a time."""
        return list(map(int, self._index.known(namespace, keys).nonzero()[0]))

    async def known_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading keys that are known to be stored; others have their turn between two steps."""
        for first in range(0, len(keys), LOOKED_KEYS_MAX):
            if first:
                await asyncio.sleep(0)
            known = self._index.known(namespace, keys[first : first + LOOKED_KEYS_MAX])
            if not known.all():
                return first + int(known.argmin())
        return len(keys)

    async def stored_prefix(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading keys that are stored: the store is asked for those that RAM may not know. Raises `QueueFull`."""
        known = await self.known_prefix(namespace, keys)
        if known == len(keys) or self._index.complete:
            return known
        return known + await self._probe(namespace, tuple(keys[known:]))

    async def _probe(self, namespace: Namespace, keys: tuple[bytes, ...]) -> int:
        """Leading keys that the store has; what it finds is remembered. 0 when it does not answer in time."""
        answer: asyncio.Future[StorageDone] = asyncio.get_running_loop().create_future()
        purges = self.purges(namespace)
        op_id = self._desk.probe(namespace, keys, lambda done: None if answer.done() else answer.set_result(done))
        self._desk.submit()
        try:
            done = await asyncio.wait_for(answer, PROBE_S)
        except TimeoutError:
            return 0
        finally:
            self._desk.drop_probe(op_id)
        self.found(namespace, keys[: done.present], purges)
        return done.present

    def found(self, namespace: Namespace, keys: Sequence[bytes], purges: int) -> None:
        """These are stored, unless the namespace was purged since it had been purged `purges` times."""
        if purges == self.purges(namespace):
            self._index.found(namespace, keys)

    def was_read(self, namespace: Namespace, key: bytes, purges: int) -> None:
        """As `found`, to be booked for many at once by `remember`."""
        if purges != self._purges[namespace.fingerprint]:
            return
        entry = self._found.get(namespace.fingerprint)
        if entry is None:
            entry = self._found[namespace.fingerprint] = (namespace, [])
        entry[1].append(key)

    def remember(self) -> None:
        """Books what was read since the last time."""
        for namespace, keys in self._found.values():
            self._index.found(namespace, keys)
        self._found.clear()

    def lost(self, namespace: Namespace, key: bytes) -> None:
        """A read did not find it, or found it damaged."""
        self.remember()
        self._index.lost(namespace, key)

    def forget(self, namespace: Namespace) -> None:
        """Purged."""
        self._purges[namespace.fingerprint] += 1
        self._found.pop(namespace.fingerprint, None)
        self._index.forget(namespace)
        for told in self.on_forgotten:
            told(namespace)

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        """Where they lie, as hints for other nodes."""
        return self._index.places(namespace, keys)

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        """Keeps these for so long, 0: no longer; how many are known."""
        return self._index.pin(namespace, keys, for_s)

    def used(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """A request uses these, whether they are read or lie in the pool: booked after what is urgent now."""
        for told in self.on_used:
            told(namespace, keys)
        self._uses.append((namespace, keys))
        if not self._booking:
            self._booking = True
            asyncio.get_running_loop().call_soon(self._book)

    def _book(self) -> None:
        room = TOUCH_KEYS_MAX
        while self._uses and room:
            namespace, keys = self._uses.popleft()
            self._index.touch(namespace, keys[:room])
            if len(keys) > room:
                self._uses.appendleft((namespace, keys[room:]))
            room -= min(room, len(keys))
        self._booking = bool(self._uses)
        if self._booking:
            asyncio.get_running_loop().call_soon(self._book)
