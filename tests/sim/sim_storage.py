"""One store for the whole cluster, as a shared filesystem is, and each node's reader in front of it.

A reader has a rate of its own and may be slow or stuck. Until an op ends its slot may have any bytes: they are scribbled over.
An op that takes too long has failed, as one of `RootSet`, and says later that the device let go of its slot.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from sim_loop import Process

from kvmoverd.adapters.storage.learned_index import LearnedIndex
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, StorageCounters, StorageDone, StorageFacts, StorageOp

IO_DEADLINE_S = 2.0
SLOWEST_S = 1.0
SCRIBBLE = 0xA5


class SharedStore:
    """What is stored, and who has read it."""

    def __init__(self) -> None:
        self.records = MemoryStorage("shared")
        self.readers: dict[bytes, list[str]] = {}
        """Of each block: the nodes whose read of its first range began, in order."""
        self.layer_readers: dict[tuple[bytes, int], list[str]] = {}
        """As `readers`, of each Layer Block."""
        self.failed: Counter[bytes] = Counter()

    def open(self, namespace: Namespace) -> None:
        self.records.open_namespace(namespace)

    def put(self, namespace: Namespace, key: bytes, content: bytes) -> None:
        """Stores a block."""
        slot = np.zeros(namespace.layout.record_bytes, dtype=np.uint8)
        slot[HEADER_BYTES : HEADER_BYTES + len(content)] = np.frombuffer(content, dtype=np.uint8)
        done = self.do(BlockWrite(0, namespace, key, ROOT, 0, int(slot.ctypes.data)))
        assert done.reason is Reason.OK, done

    def damage(self, namespace: Namespace, key: bytes, at: int | None) -> None:
        """A byte changes, or (None) the block is gone."""
        record = self.records.stored(namespace, key)
        if record is None:
            return
        self.failed[key] += 1
        if at is not None:
            record = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
        self.records.tamper(namespace, key, None if at is None else record)

    def is_lost(self, key: bytes) -> bool:
        """Has it ever failed?"""
        return self.failed[key] > 0

    def do(self, op: StorageOp) -> StorageDone:
        return self.records._done(op)


class SimStorage:
    """`Storage` of one node: ops end one after another, at its rate."""

    def __init__(self, shared: SharedStore, process: Process, node: str, rng: random.Random) -> None:
        self.shared = shared
        self.process = process
        self.node = node
        self.random = rng
        self.op_s = rng.choice([0.001, 0.005, 0.02])
        self.slowness = 1.0
        self.stuck = False
        self.fate: Callable[[StorageOp], Reason | None] = lambda op: None
        self.on_done: Callable[[], None] = lambda: None
        self.index = LearnedIndex()
        self.counters = StorageCounters()
        self.facts = StorageFacts(root=node, kind="memory", io_mode="memory")
        self._waiting: deque[StorageOp] = deque()
        self._busy = False
        self._done: deque[StorageDone] = deque()
        self._under_way: dict[int, StorageOp] = {}
        self._late: set[int] = set()
        self._woken = False

    def open_namespace(self, namespace: Namespace) -> None:
        self.shared.records.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self.shared.records.purge(namespace)

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return self.shared.records.purge_tenant(tenant)

    def heard(self, author: str, log: int) -> None:
        """All read one store."""

    def signature(self) -> tuple[str, int]:
        return "", 0

    def submit(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            self._under_way[op.op_id] = op
            if isinstance(op, BlockRead):
                self._begin(op)
            self._waiting.append(op)
            self.process.after(IO_DEADLINE_S, self._give_up, op)
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._busy:
            self._busy = True
            op_s = self.op_s * self.slowness * (0.5 + self.random.random())
            self.process.after(min(op_s, SLOWEST_S), self._end, self._waiting.popleft())

    def _begin(self, op: BlockRead) -> None:
        """The slot is the device's: any bytes may be in it."""
        if not op.first_layer:
            self.shared.readers.setdefault(op.key, []).append(self.node)
        for layer in op.layers:
            self.shared.layer_readers.setdefault((op.key, layer), []).append(self.node)
        span = op.span
        ctypes.memset(op.address + span.start, SCRIBBLE, len(span))

    def _end(self, op: StorageOp) -> None:
        if self.stuck:
            self.process.after(0.1, self._end, op)
            return
        self._busy = False
        self._next()
        del self._under_way[op.op_id]
        reason = self.fate(op)
        if reason is not None:
            self.shared.failed[getattr(op, "key", b"")] += 1
        done = self.shared.do(op) if reason is None else StorageDone(op.op_id, reason, message="as the seed wants")
        if op.op_id in self._late:
            self._late.remove(op.op_id)
            done = StorageDone(op.op_id, Reason.IO_ERROR, message="it is late")
        self._tell(done)

    def _give_up(self, op: StorageOp) -> None:
        if op.op_id in self._under_way and op.op_id not in self._late:
            self._late.add(op.op_id)
            self.shared.failed[getattr(op, "key", b"")] += 1
            text = f"{self.node} is silent for {IO_DEADLINE_S:g} s"
            self._tell(StorageDone(op.op_id, Reason.IO_ERROR, message=text, quiet=False))

    def _tell(self, done: StorageDone) -> None:
        self._done.append(done)
        if not self._woken:
            self._woken = True
            self.process.soon(self.on_done)

    def poll(self, completions_max: int) -> list[StorageDone]:
        self._woken = False
        taken = [self._done.popleft() for _ in range(min(completions_max, len(self._done)))]
        if self._done:
            self._woken = True
            self.process.soon(self.on_done)
        return taken

    def fileno(self) -> int:
        return -1

    def close(self, timeout_s: float) -> bool:
        return not self._under_way
