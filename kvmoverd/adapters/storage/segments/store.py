"""Layout B as `Blocks`: segments that this node appends to, and all that it knows of others'."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.adapters.storage.blocks import End, Opened
from kvmoverd.adapters.storage.root_place import unusable
from kvmoverd.adapters.storage.sealing import seal_write
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.parts import Background, Purges, StoreIndex
from kvmoverd.adapters.storage.segments.reads import Reads
from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.core.errors import ManifestMismatch, StaleEpoch
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import memory_view
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone

READY_WAIT_S = 5.0
"""How long a write waits at start until it is known what this node already keeps."""


class SegmentStore:
    """`Blocks` of layout B. It owns its parts: `close` ends them.

    `background`: what goes on beside reads and writes, with its thread: following others, recovery, garbage collection.
    """

    def __init__(
        self,
        root: SegmentRoot,
        io: BlockIo,
        index: StoreIndex,
        files: SegmentFiles,
        purges: Purges,
        appender: Appender,
        background: Background,
    ) -> None:
        self.io = io
        self.index = index
        self.files = files
        self.appender = appender
        self.background = background
        appender.make_base = self._make_anew
        self._root, self._purges = root, purges
        self._reads = Reads(files, index, purges, background.damaged)
        self._open_spaces: dict[bytes, Namespace] = {}
        self._lock = threading.Lock()
        self._waiting = threading.Lock()
        self._flying: dict[tuple[bytes, bytes], list[tuple[BlockWrite, End]]] = {}

    @property
    def on_close(self) -> Callable[[int], None]:
        return self.files.on_close

    @on_close.setter
    def on_close(self, told: Callable[[int], None]) -> None:
        self.files.on_close = told

    def open(self, op: BlockRead) -> Opened:
        return self._reads.open(op)

    def let_go(self, opened: Opened) -> None:
        self._reads.let_go(opened)

    def check(self, op: BlockRead, opened: Opened | None) -> None:
        self._reads.check(op, opened)

    def failed(self, op: BlockRead, place: Place | None, error: OSError) -> None:
        self._reads.failed(op, place, error)

    def read(self, op: BlockRead, *, looks: int) -> StorageDone:
        return self._reads.read(op, looks=looks)

    def write(self, op: BlockWrite, end: End) -> None:
        """Returns when the record is written; `end` comes with its group's commit. One key at once is written once."""
        name = (op.namespace.fingerprint, op.key)
        with self._lock:
            waiting = self._flying.get(name)
            if waiting is not None:
                waiting.append((op, end))
                return
            self._flying[name] = []
        ended = partial(self._ended, op, end)
        try:
            self._begin(op, ended)
        except BaseException as error:
            ended(Appended(Reason.INTERNAL, f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise

    def probe(self, op: BlockProbe) -> StorageDone:
        if op.looks:
            found = itertools.takewhile(lambda key: self._reads.is_stored(op.namespace, key) is not None, op.keys)
            return StorageDone(op.op_id, Reason.OK, present=sum(1 for _ in found))
        known = self.index.known(op.namespace, op.keys).tolist()
        present = sum(1 for _ in itertools.takewhile(bool, known))
        return StorageDone(op.op_id, Reason.OK, present=present)

    def open_namespace(self, namespace: Namespace) -> None:
        self._root.open_namespace(namespace)
        try:
            self._purges.look(namespace)
        except OSError as error:
            raise unusable(self._root.base, error) from error
        self.index.opened(namespace.fingerprint[:16])
        self._open_spaces[namespace.fingerprint[:16]] = namespace

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """Hides the namespace at once, here; at other nodes within a second and what their filesystem caches."""
        blocks = self.index.blocks(namespace.fingerprint[:16])
        self._open_spaces.pop(namespace.fingerprint[:16], None)
        try:
            self._purges.purge(namespace)
        except OSError as error:
            raise unusable(self._root.base, error) from error
        self.background.purged()
        return blocks, blocks * namespace.layout.record_bytes

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As `purge`; bytes are counted where the namespace was open here, as only then the size of its records is known."""
        try:
            before = {fp: self.index.blocks(fp) for fp in self._purges.namespaces()}
            purged = self._purges.purge_tenant(tenant)
        except OSError as error:
            raise unusable(self._root.base, error) from error
        self.background.purged()
        blocks = size_bytes = 0
        for fingerprint16 in purged:
            space = self._open_spaces.pop(fingerprint16, None)
            count = before.get(fingerprint16, 0)
            blocks += count
            size_bytes += count * space.layout.record_bytes if space else 0
        return blocks, size_bytes

    def trial_path(self) -> str:
        return self._root.new_temp()

    def heard(self, author: str, log: int) -> None:
        if author != self.appender.author.name:
            self.background.heard(author, log)

    def signature(self) -> tuple[str, int]:
        return self.appender.author.name, self.appender.log.number

    def notes(self) -> list[str]:
        return self.background.notes()

    def details(self) -> Mapping[str, int | str]:
        return {"reclaimed_temps": self._root.reclaimed_temps, **self.background.details()}

    def close(self, timeout_s: float) -> bool:
        """Commits what is written, and ends the parts; each thread that is stuck is waited for until the time is over."""
        deadline_s = time.monotonic() + timeout_s
        quiet = self.appender.close(timeout_s)
        quiet = self.background.close(max(0.0, deadline_s - time.monotonic())) and quiet
        if quiet:
            self.files.close()
        return quiet

    def _make_anew(self) -> None:
        """Makes what was deleted of the store around the authors; namespaces that are open here have theirs again.

        Raises `OSError`, `StorageUnusable`.
        """
        self._root.make()
        for fingerprint16, namespace in list(self._open_spaces.items()):
            # One that another node has meanwhile published otherwise, or a newer epoch of, is for the next who registers it.
            with contextlib.suppress(ManifestMismatch, StaleEpoch):
                self._root.open_namespace(namespace)
                self._purges.restore(fingerprint16)

    def _begin(self, op: BlockWrite, ended: Callable[[Appended], None]) -> None:
        """Stores the block unless it is stored."""
        if op.namespace.fingerprint[:16] not in self._open_spaces:
            ended(Appended(Reason.IO_ERROR, "the namespace is not open: it was purged, or never registered"))
            return
        place = self._reads.is_stored(op.namespace, op.key)
        if place is not None:
            ended(Appended(Reason.OK, place=place, new=False))
            return
        if not self._is_ready():
            ended(Appended(Reason.DROPPED, "it is not known yet what this node keeps already: write again later"))
            return
        record = memory_view(op.address, op.namespace.layout.record_bytes)
        self.appender.append(
            Append(op.namespace.fingerprint, op.key, op.parent, op.depth, record, partial(seal_write, op), ended)
        )

    def _is_ready(self) -> bool:
        """Waits, in one thread at a time: the others are for reads."""
        if self.background.wait_ready(0.0):
            return True
        if not self._waiting.acquire(blocking=False):
            return False
        try:
            return self.background.wait_ready(READY_WAIT_S)
        finally:
            self._waiting.release()

    def _ended(self, op: BlockWrite, end: End, done: Appended) -> None:
        """Tells who wrote it, and all who wanted to write the same meanwhile."""
        with self._lock:
            waiting = self._flying.pop((op.namespace.fingerprint, op.key), [])
        moved_bytes = op.namespace.layout.record_bytes if done.reason is Reason.OK and done.new else 0
        end(StorageDone(op.op_id, done.reason, moved_bytes, message=done.message, place=done.place))
        for other, its_end in waiting:
            its_end(StorageDone(other.op_id, done.reason, message=done.message, place=done.place))
