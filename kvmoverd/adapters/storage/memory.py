"""Storage in this process's memory: for tests and for trying things out. The same records, the same checks, no disk.

It copies and checks on the loop, a block at a time: while it works, the daemon answers nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import takewhile

from kvmoverd.adapters.storage.completions import Completions
from kvmoverd.adapters.storage.learned_index import LearnedIndex
from kvmoverd.adapters.storage.sealing import seal_write
from kvmoverd.core.errors import StaleEpoch
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import RecordMismatch, check_layers, memory_view, verify
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import (
    BlockIndex,
    BlockProbe,
    BlockRead,
    BlockWrite,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)

CAPACITY_BYTES = 4 << 30
OPS_MAX = 1 << 16


class MemoryStorage:
    """Storage port over a dict of records. An op is done when it is submitted, in the thread that submits it: the loop's."""

    def __init__(self, name: str, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._facts = StorageFacts(root=name, kind="memory", io_mode="memory", note="lost when the daemon ends")
        self._completions = Completions()
        self._index = LearnedIndex()
        self._capacity_bytes = capacity_bytes
        self._closed = False
        self._epochs: dict[bytes, int] = {}
        self._tenants: dict[str, dict[bytes, Namespace]] = {}
        self._records: dict[bytes, dict[bytes, bytes]] = {}
        self._stored_bytes = 0
        self._lock = threading.Lock()  # namespaces are opened and purged off the loop

    @property
    def facts(self) -> StorageFacts:
        return self._facts

    @property
    def counters(self) -> StorageCounters:
        return self._completions.counters

    @property
    def index(self) -> BlockIndex:
        return self._index

    def open_namespace(self, namespace: Namespace) -> None:
        """Raises `StaleEpoch`; a manifest can't differ under its own digest here."""
        family, asked = namespace.manifest.family(), namespace.manifest.epoch
        with self._lock:
            known = self._epochs.get(family, 0)
            if asked < known:
                message = f"model {namespace.manifest.model_id!r}: epoch {asked} is below epoch {known}"
                raise StaleEpoch(message, epoch=asked, known=known)
            self._epochs[family] = asked
            self._tenants.setdefault(namespace.manifest.tenant, {})[namespace.fingerprint] = namespace
            self._records.setdefault(namespace.fingerprint, {})

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        with self._lock:
            purged = self._records.pop(namespace.fingerprint, {})
            purged_bytes = sum(map(len, purged.values()))
            self._stored_bytes -= purged_bytes
        return len(purged), purged_bytes

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        with self._lock:
            namespaces = list(self._tenants.get(tenant, {}).values())
        found = [self.purge(namespace) for namespace in namespaces]
        return sum(blocks for blocks, _ in found), sum(freed_bytes for _, freed_bytes in found)

    def heard(self, author: str, log: int) -> None:
        """Nobody else has this memory."""

    def signature(self) -> tuple[str, int]:
        return "", 0

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self._completions.expect(ops, OPS_MAX)
        for op in ops:
            self._completions.put(op, self._done(op))

    def poll(self, completions_max: int) -> list[StorageDone]:
        return self._completions.poll(completions_max)

    def fileno(self) -> int:
        return self._completions.fileno()

    def close(self, timeout_s: float) -> bool:
        """Nothing is ever under way: always True, at once."""
        self._closed = True
        self._completions.close()
        return True

    def stored(self, namespace: Namespace, key: bytes) -> bytes | None:
        """The record as it is stored; for tests."""
        return self._records.get(namespace.fingerprint, {}).get(key)

    def tamper(self, namespace: Namespace, key: bytes, record: bytes | None) -> None:
        """Replaces a stored record by any bytes, or drops it; for tests."""
        records = self._records[namespace.fingerprint]
        self._drop(records, key)
        if record is not None:
            records[key] = record
            self._stored_bytes += len(record)

    def _drop(self, records: dict[bytes, bytes], key: bytes) -> None:
        self._stored_bytes -= len(records.pop(key, b""))

    def _done(self, op: StorageOp) -> StorageDone:
        if self._closed:
            return StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is closed")
        with self._lock:
            if isinstance(op, BlockRead):
                return self._read(op)
            return self._write(op) if isinstance(op, BlockWrite) else self._probe(op)

    def _read(self, op: BlockRead) -> StorageDone:
        records = self._records.get(op.namespace.fingerprint, {})
        stored, record_bytes = records.get(op.key), op.namespace.layout.record_bytes
        if stored is None:
            return StorageDone(op.op_id, Reason.MISS)
        slot, span = memory_view(op.address, record_bytes), op.span
        if len(stored) < record_bytes:
            done = StorageDone(
                op.op_id, Reason.SHORT_READ, message=f"the record ends after {len(stored)} of {record_bytes} bytes"
            )
            return self._damaged(op, records, done, ours=slot[:HEADER_BYTES] == stored[:HEADER_BYTES])
        slot[span.start : span.stop] = memoryview(stored)[span.start : span.stop]
        try:
            if len(stored) > record_bytes:
                raise RecordMismatch("record_bytes", found=len(stored), expected=record_bytes)
            check_layers(slot, op.namespace, op.key, op.layers.start, op.layers.stop)
        except RecordMismatch as error:
            done = StorageDone(op.op_id, Reason.CORRUPT, len(span), message=str(error))
            return self._damaged(op, records, done, ours=slot[:HEADER_BYTES] == stored[:HEADER_BYTES])
        return StorageDone(op.op_id, Reason.OK, len(span))

    def _damaged(self, op: BlockRead, records: dict[bytes, bytes], done: StorageDone, *, ours: bool) -> StorageDone:
        """Drops the record, unless another took the name since the slot's header was read."""
        if op.first_layer and not ours:
            return StorageDone(
                op.op_id, Reason.CORRUPT, done.moved_bytes, message=f"{done.message}; replaced meanwhile"
            )
        self._drop(records, op.key)
        return done

    def _write(self, op: BlockWrite) -> StorageDone:
        records = self._records.get(op.namespace.fingerprint)
        if records is None:
            return StorageDone(
                op.op_id, Reason.IO_ERROR, message="the namespace is not open: it was purged, or never opened"
            )
        if _is_good(records.get(op.key), op.namespace, op.key):
            return StorageDone(op.op_id, Reason.OK)
        self._drop(records, op.key)
        record_bytes = op.namespace.layout.record_bytes
        if self._stored_bytes + record_bytes > self._capacity_bytes:
            message = f"{self._stored_bytes} of {self._capacity_bytes} bytes are used, {record_bytes} more don't fit"
            return StorageDone(op.op_id, Reason.NO_SPACE, message=message)
        records[op.key] = bytes(seal_write(op))
        self._stored_bytes += record_bytes
        return StorageDone(op.op_id, Reason.OK, record_bytes)

    def _probe(self, op: BlockProbe) -> StorageDone:
        records = self._records.get(op.namespace.fingerprint, {})
        record_bytes = op.namespace.layout.record_bytes
        if op.looks:
            leading = takewhile(lambda key: _is_good(records.get(key), op.namespace, key), op.keys)
        else:
            leading = takewhile(lambda key: len(records.get(key, b"")) == record_bytes, op.keys)
        return StorageDone(op.op_id, Reason.OK, present=sum(1 for _ in leading))


def _is_good(stored: bytes | None, namespace: Namespace, key: bytes) -> bool:
    if stored is None or len(stored) != namespace.layout.record_bytes:
        return False
    try:
        verify(memoryview(stored)[:HEADER_BYTES], namespace, key)
    except RecordMismatch:
        return False
    return True
