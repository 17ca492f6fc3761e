"""Storage desk: the queues in front of the storage port. Reads before writes, urgent before late, bounded under way."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, Storage, StorageDone, StorageOp

COMPLETIONS_MAX = 256

OnDone = Callable[[StorageDone], None]


class StorageDesk:
    """At most `ops_max` ops are under way, at most a quarter of them writes; at most `queue_max` of each wait.

    A read that still waits can be dropped; one that was submitted ends in its own time.
    """

    def __init__(self, storage: Storage, *, ops_max: int, queue_max: int) -> None:
        self.storage = storage
        self.ops_max = ops_max
        self.queue_max = queue_max
        self.writes_max = max(1, ops_max // 4)
        self._ids = itertools.count(1)
        self._reads: list[tuple[int, int, int]] = []
        self._read_ops: dict[int, tuple[BlockRead, OnDone]] = {}
        self._others: deque[tuple[StorageOp, OnDone]] = deque()
        self._under_way: dict[int, tuple[StorageOp, OnDone]] = {}
        self._writes_under_way = 0
        self.read_queue_bytes = 0

    def read(self, namespace: Namespace, key: bytes, address: int, *, priority: int, due_ns: int, done: OnDone) -> int:
        """Queues a read; smaller `priority` first, then earlier `due_ns`. Returns the op's id. Raises `QueueFull`."""
        if len(self._read_ops) >= self.queue_max:
            raise QueueFull(
                f"{len(self._read_ops)} block reads wait, at most {self.queue_max} may", waiting=len(self._read_ops)
            )
        op = BlockRead(next(self._ids), namespace, key, address)
        self._read_ops[op.op_id] = (op, done)
        heapq.heappush(self._reads, (priority, due_ns, op.op_id))
        self.read_queue_bytes += namespace.layout.record_bytes
        return op.op_id

    def reads_waiting(self) -> int:
        return len(self._read_ops)

    def drop_read(self, op_id: int) -> bool:
        """Takes a waiting read out of the queue; False when it was submitted already. A dropped read has no completion."""
        entry = self._read_ops.pop(op_id, None)
        if entry is None:
            return False
        self.read_queue_bytes -= entry[0].namespace.layout.record_bytes
        return True

    def write(self, namespace: Namespace, key: bytes, parent: bytes, depth: int, address: int, done: OnDone) -> None:
        self._queue(BlockWrite(next(self._ids), namespace, key, parent, depth, address), done)

    def probe(self, namespace: Namespace, keys: tuple[bytes, ...], done: OnDone) -> None:
        """Probes are quick and someone waits for them: they go before the writes."""
        self._others.appendleft((BlockProbe(next(self._ids), namespace, keys), done))

    def submit(self) -> None:
        """Hands waiting ops to the storage as far as the limits allow; called once after a burst of events."""
        batch: list[StorageOp] = []
        while len(self._under_way) < self.ops_max and (taken := self._next()):
            op, done = taken
            self._under_way[op.op_id] = taken
            self._writes_under_way += isinstance(op, BlockWrite)
            batch.append(op)
        if batch:
            self.storage.submit(batch)

    def pump(self) -> bool:
        """Hands completions to their owners; True when more may wait."""
        completions = self.storage.poll(COMPLETIONS_MAX)
        for completion in completions:
            op, done = self._under_way.pop(completion.op_id)
            if isinstance(op, BlockRead):
                self.read_queue_bytes -= op.namespace.layout.record_bytes
            self._writes_under_way -= isinstance(op, BlockWrite)
            done(completion)
        self.submit()
        return len(completions) == COMPLETIONS_MAX

    def idle(self) -> bool:
        return not (self._under_way or self._others or self._read_ops)

    def _queue(self, op: StorageOp, done: OnDone) -> None:
        if len(self._others) >= self.queue_max:
            raise QueueFull(
                f"{len(self._others)} block writes wait, at most {self.queue_max} may", waiting=len(self._others)
            )
        self._others.append((op, done))

    def _next(self) -> tuple[StorageOp, OnDone] | None:
        if self._others and isinstance(self._others[0][0], BlockProbe):
            return self._others.popleft()
        while self._reads:
            entry = self._read_ops.pop(heapq.heappop(self._reads)[2], None)
            if entry is not None:
                return entry
        if self._others and self._writes_under_way < self.writes_max:
            return self._others.popleft()
        return None
