"""Blocks in and out of a store at the storage port, in this process: what is left of a daemon without calls and copies."""

from __future__ import annotations

import itertools
import os
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, Storage, StorageOp
from tests.bench.cpu import CpuMeter
from tests.bench.daemon import BenchFailed
from tests.bench.disk import TIMEOUT_S, Work
from tests.bench.pairs import Run
from tests.bench.plain import COMMIT_BLOCKS, THREADS, Plain
from tests.bench.records import Record, find_records

SWITCH_S = 0.0005
"""As in the daemon."""


class PortRig:
    """A store of segments, with as many ops under way as `plain` has slots, which both sides use."""

    def __init__(self, storage: Storage, space: Namespace, plain: Plain, root: Path, work: Work) -> None:
        self.plain = plain
        self._storage, self._space, self._root, self._work = storage, space, root, work
        self._ids = itertools.count(1)
        self._keys: list[bytes] = []
        self._records: list[Record] = []

    @property
    def note(self) -> str:
        facts = self._storage.facts
        return ", ".join(filter(None, (facts.kind, facts.io_mode, facts.note)))

    def fill(self) -> None:
        """Stores what `get` reads."""
        self._keys = self._put()
        self._records = find_records(self._root, self._space.fingerprint, self._keys)

    async def put(self, number: int) -> Run:
        """New blocks; the time ends when the last is durable."""
        return self._timed(self._put)

    async def plain_put(self, number: int) -> Run:
        return self.plain.write(self._root, self._work.all_blocks)

    async def get(self, number: int) -> Run:
        """All that `fill` stored, past the page cache: nothing but slots is in memory."""
        return self._timed(self._get)

    async def plain_get(self, number: int) -> Run:
        return self.plain.read(self._records)

    def _timed(self, work: Callable[[], object]) -> Run:
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        work()
        took_s, size_gb = time.monotonic() - began_s, self._work.total_bytes / 1e9
        return Run(size_gb / took_s, meter.spent_s() / size_gb)

    def _put(self) -> list[bytes]:
        keys = [secrets.token_bytes(32) for _ in range(self._work.all_blocks)]
        self._each(keys, lambda key, address: BlockWrite(next(self._ids), self._space, key, ROOT, 0, address))
        return keys

    def _get(self) -> None:
        self._each(self._keys, lambda key, address: BlockRead(next(self._ids), self._space, key, address))

    def _each(self, keys: list[bytes], make: Callable[[bytes, int], StorageOp]) -> None:
        """One op for each key. Raises `BenchFailed` for one that does not end well, moving all its bytes."""
        waiting, free, busy = deque(keys), list(self.plain.addresses), dict[int, int]()
        while waiting or busy:
            ops = []
            while free and waiting:
                ops.append(make(waiting.popleft(), free[-1]))
                busy[ops[-1].op_id] = free.pop()
            self._storage.submit(ops)
            if not select.select([self._storage.fileno()], [], [], TIMEOUT_S)[0]:
                raise BenchFailed(f"{len(busy)} ops have not ended within {TIMEOUT_S:g} s")
            for done in self._storage.poll(len(busy)):
                if done.reason is not Reason.OK or done.moved_bytes != self._work.record_bytes:
                    raise BenchFailed(f"a block ended {done.reason.name}, {done.moved_bytes} bytes: {done.message}")
                free.append(busy.pop(done.op_id))


@contextmanager
def port_rig(root: Path, work: Work) -> Iterator[PortRig]:
    """An empty store in an empty directory; it is closed in the end."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    plain = Plain(work.live_blocks, work.record_bytes, work.piece_bytes)
    try:
        settings = SegmentSettings(commit_blocks=COMMIT_BLOCKS)
        blocks = open_segment_store(root, node="bench", boot_id=secrets.token_hex(8), settings=settings)
        storage = open_uring(
            blocks, plain.arena, work.piece_bytes, name="bench", threads=THREADS, ops_max=work.live_blocks
        )
        try:
            layout = Layout(work.layout.block_tokens, work.layout.layers)
            space = Namespace(Manifest("bench", secrets.token_bytes(32), secrets.token_bytes(32), layout, "u8"))
            storage.open_namespace(space)
            yield PortRig(storage, space, plain, root, work)
        finally:
            storage.close(TIMEOUT_S)
    finally:
        sys.setswitchinterval(switch_s)
        plain.close()
