"""Storage that does nothing, at once: what is left of the daemon's time then is the daemon's own. For measuring only."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import (
    BlockIndex,
    BlockProbe,
    BlockRead,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)


class NullIndex:
    """`BlockIndex` that knows every block, and remembers nothing."""

    complete = True

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return np.ones(len(keys), np.bool_)

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        return [None] * len(keys)

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nothing is ever dropped."""

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        return len(keys)

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """It was known."""

    def lost(self, namespace: Namespace, key: bytes) -> None:
        """It is still known."""

    def forget(self, namespace: Namespace) -> None:
        """Nothing is remembered."""


class NullStorage:
    """Storage port: every block is there, every read and write is OK and touches no memory. Slots hold what they held."""

    def __init__(self, name: str) -> None:
        note = "for measuring: it stores nothing, and what it reads is whatever the memory held"
        self._facts = StorageFacts(root=name, kind="null", io_mode="memory", note=note)
        self._counters = StorageCounters()
        self._index = NullIndex()
        self._ended: deque[StorageDone] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    @property
    def facts(self) -> StorageFacts:
        return self._facts

    @property
    def counters(self) -> StorageCounters:
        return self._counters

    @property
    def index(self) -> BlockIndex:
        return self._index

    def open_namespace(self, namespace: Namespace) -> None:
        """Nothing to compare."""

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return 0, 0

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return 0, 0

    def heard(self, author: str, log: int) -> None:
        """Nobody else stores here."""

    def signature(self) -> tuple[str, int]:
        return "", 0

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """One write to the eventfd, however many ops."""
        if ops and not self._ended and not self._closed:
            os.eventfd_write(self._wake_fd, 1)
        self._ended.extend(map(self._done, ops))

    def poll(self, completions_max: int) -> list[StorageDone]:
        ended = self._ended
        taken = [ended.popleft() for _ in range(min(len(ended), completions_max))]
        if not ended and not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return taken

    def fileno(self) -> int:
        return self._wake_fd

    def close(self, timeout_s: float) -> bool:
        """Nothing is ever under way: always True, at once."""
        if not self._closed:
            self._closed = True
            os.close(self._wake_fd)
        return True

    def _done(self, op: StorageOp) -> StorageDone:
        if self._closed:
            return StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is closed")
        if isinstance(op, BlockProbe):
            return StorageDone(op.op_id, Reason.OK, present=len(op.keys))
        layout, counters = op.namespace.layout, self._counters
        if isinstance(op, BlockRead):
            is_whole = not (op.first_layer or op.stop_layer)
            moved_bytes = layout.record_bytes if is_whole else len(op.span)
            counters.read_bytes += moved_bytes
            counters.read_blocks += is_whole or op.layers.stop == layout.layer_count
            return StorageDone(op.op_id, Reason.OK, moved_bytes)
        counters.written_bytes += layout.record_bytes
        counters.written_blocks += 1
        return StorageDone(op.op_id, Reason.OK, layout.record_bytes)
