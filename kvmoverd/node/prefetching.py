"""Prefetcher: warms the pool with what engines expect to want, when the storage has nothing else to do.

A block that was read for a hint stays in the pool as clean cache. Other hints leave it alone until it was wanted, or long
after it was expected to be; a request that needs slots takes it as any other clean block. A request that wants a block which
is being read for a hint joins the read, which is as urgent as the request from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvmoverd.core.errors import PoolExhausted, QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.block_set import BlockSet, Outcomes
from kvmoverd.node.desk import LOW_PRIORITY
from kvmoverd.node.hints import Hint, HintBook
from kvmoverd.node.services import Services

PREFETCH = LOW_PRIORITY
"""Read priority of hints: after everything else."""
UNDER_WAY_BYTES = 4 << 20
"""Reads for hints that a device has at once, and always one: a request's read never waits behind more."""
UNDER_WAY_MAX = 8
HINTS_MAX = 1024
"""Hints that wait to be read."""
ASIDE_MAX = 64
"""Kept blocks that are passed over for one slot: some 0.1 ms."""
KNOWN_MAX = 2048
"""Blocks of one hint: what the index is asked for in one step."""


@dataclass(eq=False, slots=True)
class _Read:
    """A read under way for a hint."""

    hint: Hint
    key: bytes
    blocks: BlockSet


class Prefetcher:
    """One for a node. It takes neither room nor places in queues from requests: a slot for each read under way, no more."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._book = HintBook(services.limits.prefetch_bytes, services.counts.hints)
        self._reads: list[_Read] = []
        self._stopped = False
        services.desk.on_spare = self._go_on
        services.reader.catalog.on_used.append(self._book.wanted)
        services.reader.catalog.on_forgotten.append(self._forget_namespace)

    def hint(self, session_id: str, namespace: Namespace, keys: Sequence[bytes], expected_in_s: float) -> int:
        """How many leading blocks are in the pool, or will be read; the others are dropped."""
        now_ns = self._services.clock.now_ns()
        due_ns = now_ns + int(expected_in_s * 1e9)
        wanted = 0 if self._stopped or len(self._book) >= HINTS_MAX else self._may_be_had(namespace, keys)
        accepted = self._book.add(session_id, namespace, keys[:wanted], due_ns)
        self._services.counts.hints.refused_blocks += len(keys) - accepted
        self._go_on()
        return accepted

    def session_gone(self, session_id: str) -> None:
        """Nobody hopes for its blocks any more."""
        self._book.forget_session(session_id)
        self._leave([read for read in self._reads if read.hint.session_id == session_id])

    def stop(self) -> None:
        """The node is draining: what was hinted is given up, and no more is taken on."""
        self._stopped = True
        self._book.clear()
        self._leave(list(self._reads))

    def _forget_namespace(self, namespace: Namespace) -> None:
        self._book.forget_namespace(namespace.fingerprint)
        self._leave([read for read in self._reads if read.hint.name == namespace.fingerprint])

    def _may_be_had(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Leading blocks that are in the pool or may be stored: where the index is complete, all that it knows."""
        keys = keys[:KNOWN_MAX]
        catalog = self._services.reader.catalog
        if not catalog.is_complete:
            return len(keys)
        known = set(catalog.known(namespace, keys))
        cache, fingerprint = self._services.pool.size_class(namespace.layout).cache, namespace.fingerprint
        return next(
            (n for n, key in enumerate(keys) if n not in known and not cache.is_wanted((fingerprint, key))), len(keys)
        )

    def _go_on(self) -> None:
        """Starts reads as long as there is something to read, and nothing else for the storage to do; after each completion."""
        while not self._stopped and len(self._book):
            if not self._storage_is_idle():
                return
            found = self._book.next()
            if found is not None:
                self._begin(*found)

    def _begin(self, hint: Hint, key: bytes) -> None:
        """Reads it, unless it is there. What finds no slot, or no place in the queue, is given up: it was a hint."""
        services, name = self._services, (hint.name, key)
        size_class = services.pool.size_class(hint.namespace.layout)
        if size_class.cache.is_wanted(name):
            self._book.is_there(name)
            return
        if not size_class.has_slot_beside(self._book, ASIDE_MAX):
            self._book.give_up(hint, key)
            return
        try:
            blocks = services.reader.acquire(hint.namespace, (key,), priority=PREFETCH, due_ns=hint.due_ns)
        except (QueueFull, PoolExhausted):
            self._book.give_up(hint, key)
            return
        read = _Read(hint, key, blocks)
        self._reads.append(read)
        blocks.listen(partial(self._ended, read))

    def _ended(self, read: _Read, outcomes: Outcomes) -> None:
        if outcomes[0][1] is Reason.OK:
            self._book.was_read((read.hint.name, read.key))
        else:
            self._book.give_up(read.hint, read.key)
        self._leave([read])

    def _leave(self, reads: list[_Read]) -> None:
        for read in reads:
            self._reads.remove(read)
            self._services.reader.release(read.blocks)

    def _storage_is_idle(self) -> bool:
        """But for reads of hints, of which few are under way at a time."""
        ours_bytes = sum(read.hint.namespace.layout.record_bytes for read in self._reads)
        if self._reads and (len(self._reads) >= UNDER_WAY_MAX or ours_bytes >= UNDER_WAY_BYTES):
            return False
        return not self._services.desk.writes_waiting() and self._services.reader.depth().queue_bytes <= ours_bytes

    def look(self) -> None:
        """To be called every half second or so, for what no completion tells: hints that are over, a storage that is idle."""
        self._book.expire(self._services.clock.now_ns())
        self._go_on()
