"""Reads at a rate that is set: for a filesystem that is shared with others, and to stand for a storage NIC in benchmarks.

The root is a pipe of that rate: a read is handed on when the pipe has carried its bytes, after those that came before it. So
what moves in any time is known, however long the reads are, and whoever measures the storage sees a device of that speed.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmoverd.adapters.storage.roots_timer import AlarmTimer
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import (
    BlockIndex,
    BlockRead,
    Storage,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)

CATCH_UP_S = 0.02
"""Of the pipe's time: what may be handed on at once when this process came late."""


class ThrottledStorage:
    """Storage port over another one, which it closes. Probes and writes pass at once.

    `rate_bytes_per_s`: of records and ranges as they lie in the storage. A pipe that nothing waits for saves nothing up.
    """

    def __init__(
        self, storage: Storage, rate_bytes_per_s: int, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        assert rate_bytes_per_s > 0, f"{rate_bytes_per_s} bytes a second"
        self._storage = storage
        self._rate = rate_bytes_per_s
        self._clock_s = clock_s
        self._held: deque[tuple[BlockRead, int]] = deque()
        self._begun_s = 0.0
        """When the pipe began to carry the first read that is held, or has carried the last one."""
        self._ended: deque[StorageDone] = deque()
        self._closed = False
        self._timer = AlarmTimer()
        self._epoll = select.epoll()
        for fd in (storage.fileno(), self._timer.fileno()):
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def facts(self) -> StorageFacts:
        facts = self._storage.facts
        note = f"reads are held to {self._rate} bytes a second"
        return replace(facts, note="; ".join(filter(None, [facts.note, note])))

    @property
    def counters(self) -> StorageCounters:
        """The storage's own; what is held is queued, too."""
        return self._storage.counters

    @property
    def index(self) -> BlockIndex:
        return self._storage.index

    def open_namespace(self, namespace: Namespace) -> None:
        self._storage.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self._storage.purge(namespace)

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return self._storage.purge_tenant(tenant)

    def heard(self, author: str, log: int) -> None:
        self._storage.heard(author, log)

    def signature(self) -> tuple[str, int]:
        return self._storage.signature()

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """Reads wait in the order in which they came, all else passes them."""
        now_s = self._clock_s()
        if not self._held:
            self._begun_s = max(self._begun_s, now_s)
        passing: list[StorageOp] = []
        for op in ops:
            if isinstance(op, BlockRead) and not self._closed:
                self._hold(op)
            else:
                passing.append(op)
        if passing:
            self._storage.submit(passing)
        self._hand_on(now_s)

    def poll(self, completions_max: int) -> list[StorageDone]:
        """Hands on the reads whose turn has come, too."""
        if self._held:
            self._hand_on(self._clock_s())
        taken = [self._ended.popleft() for _ in range(min(len(self._ended), completions_max))]
        if self._closed and not self._ended and not self._epoll.closed:
            self._timer.take()
        if len(taken) < completions_max:
            taken += self._storage.poll(completions_max - len(taken))
        return taken

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def close(self, timeout_s: float) -> bool:
        """What is held ends at once. It may be called again."""
        self._closed = True
        while self._held:
            op = self._let_go()
            self._ended.append(StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is being closed"))
        quiet = self._storage.close(timeout_s)
        if quiet and not self._epoll.closed:
            self._epoll.close()
            self._timer.close()
        elif self._ended and not self._epoll.closed:
            self._timer.set(0.0)
        return quiet

    def _hold(self, op: BlockRead) -> None:
        size_bytes = len(op.span)
        self._held.append((op, size_bytes))
        self.counters.queued_bytes += size_bytes

    def _let_go(self) -> BlockRead:
        op, size_bytes = self._held.popleft()
        self.counters.queued_bytes -= size_bytes
        return op

    def _hand_on(self, now_s: float) -> None:
        """Those that the pipe has carried by now; then the timer is set for the next one."""
        due: list[StorageOp] = []
        while self._held:
            carried_s = self._begun_s + self._held[0][1] / self._rate
            if not due and now_s - carried_s > CATCH_UP_S:
                carried_s = now_s - CATCH_UP_S
            if carried_s > now_s:
                break
            self._begun_s = carried_s
            due.append(self._let_go())
        if due:
            self._storage.submit(due)
        if self._held:
            self._timer.set(self._begun_s + self._held[0][1] / self._rate - now_s)
        elif not self._closed:
            self._timer.stand_still()
