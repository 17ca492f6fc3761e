"""Roots in memory that a test can hold, fail and hang, and a set of them that is polled as the loop does."""

from __future__ import annotations

import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from node_kit import LAYOUT, MANIFEST, Anonymous, NodeKit

from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone, StorageOp

SPACE = Namespace(MANIFEST)
RECORD = LAYOUT.record_bytes
DEADLINE_S = 0.08
WAIT_S = 5.0


class HeldRoot(MemoryStorage):
    """While it `holds`, ops wait for `release`; `fails` ends them with a reason instead. `calls` says what blocking calls do."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.holds = False
        self.fails: Callable[[StorageOp], Reason | None] = lambda op: None
        self.calls: Callable[[], None] = lambda: None
        self.held: deque[StorageOp] = deque()
        self.seen: list[StorageOp] = []
        self._failed: deque[StorageDone] = deque()

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.seen.extend(ops)
        self.held.extend(ops)
        if not self.holds:
            self.release()

    def release(self) -> None:
        """Everything that is held happens."""
        while self.held:
            op = self.held.popleft()
            reason = self.fails(op)
            if reason is None:
                super().submit([op])
            else:
                self._failed.append(StorageDone(op.op_id, reason, message=f"{reason.name} in {self.facts.root}"))
                os.eventfd_write(self.fileno(), 1)

    def poll(self, completions_max: int) -> list[StorageDone]:
        failed = [self._failed.popleft() for _ in range(min(len(self._failed), completions_max))]
        found = failed + super().poll(completions_max - len(failed))
        if self._failed:
            os.eventfd_write(self.fileno(), 1)
        return found

    def open_namespace(self, namespace: Namespace) -> None:
        self.calls()
        super().open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        self.calls()
        return super().purge(namespace)


class Rig:
    """A set of roots over memory, eight slots, and every completion that came."""

    def __init__(
        self,
        *names: str,
        deadline_s: float = DEADLINE_S,
        ops_max: int = 4,
        pool_slots: int = 1000,
        fill: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """The last name is that of the main root."""
        self.roots = [HeldRoot(name) for name in names]
        settings = [
            RootSettings(is_main=root is self.roots[-1], ops_max=ops_max, io_deadline_s=deadline_s, fill=fill)
            for root in self.roots
        ]
        storages = list(zip(self.roots, settings, strict=True))
        self.set = RootSet(storages, pool_bytes=pool_slots * RECORD, keeps=False, clock_s=clock_s)
        self.set.open_namespace(SPACE)
        self.memory = Anonymous(8 * RECORD)
        self.done: list[StorageDone] = []
        self._ids = itertools.count(1)

    @property
    def main(self) -> HeldRoot:
        return self.roots[-1]

    def address(self, slot: int) -> int:
        return self.memory.address + slot * RECORD

    def write_op(self, key: bytes, slot: int = 0) -> BlockWrite:
        start = slot * RECORD + HEADER_BYTES
        self.memory.bytes[start : start + LAYOUT.block_bytes] = memoryview(NodeKit.content(key))
        return BlockWrite(next(self._ids), SPACE, key, ROOT, 0, self.address(slot))

    def read_op(self, key: bytes, slot: int = 1, layers: tuple[int, int] = (0, 0)) -> BlockRead:
        return BlockRead(next(self._ids), SPACE, key, self.address(slot), *layers)

    def look_op(self, *keys: bytes) -> BlockProbe:
        return replace(self.probe_op(*keys), looks=True)

    def probe_op(self, *keys: bytes) -> BlockProbe:
        return BlockProbe(next(self._ids), SPACE, keys)

    def payload(self, slot: int = 1) -> bytes:
        start = slot * RECORD + HEADER_BYTES
        return bytes(self.memory.bytes[start : start + LAYOUT.block_bytes])

    def run(self, *ops: StorageOp) -> list[StorageDone]:
        """Submits, and waits until each has an end; the first of each, in the order of the ops."""
        self.set.submit(ops)
        wanted = {op.op_id for op in ops}
        self.until(lambda: wanted <= {done.op_id for done in self.done})
        return [next(done for done in self.done if done.op_id == op.op_id) for op in ops]

    def ends(self, op: StorageOp) -> list[tuple[Reason, bool]]:
        return [(done.reason, done.quiet) for done in self.done if done.op_id == op.op_id]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"still not so after {WAIT_S} s; {self.done}"
            if select.select([self.set.fileno()], [], [], 0.01)[0]:
                self.done += self.set.poll(64)

    def live(self, seconds: float) -> None:
        """Time passes while the set is looked after: who only sleeps stands still, which counts for nothing."""
        until_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until_s)

    def wait(self, condition: Callable[[], bool]) -> None:
        """For what no completion tells."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"still not so after {WAIT_S} s"
            time.sleep(0.005)

    def store(self, root: HeldRoot, *keys: bytes) -> None:
        """Blocks that one root has, whoever wrote them."""
        for key in keys:
            op = self.write_op(key)
            MemoryStorage.submit(root, [op])
            assert [done.reason for done in MemoryStorage.poll(root, 8)] == [Reason.OK]

    def details(self, name: str) -> dict[str, int | str]:
        return next(dict(facts.details) for facts, _ in self.set.parts() if facts.root == name)


@contextmanager
def rig(*names: str, **options: object) -> Iterator[Rig]:
    made = Rig(*names, **options)  # type: ignore[arg-type]
    yield made
    for root in made.roots:
        root.holds, root.fails = False, lambda op: None
        root.release()
    made.until(lambda: not any(root.under_way or root.late for root in made.set.roots))
    assert made.set.close(1.0)
    assert not made.set.copying and not made.set._routes._asked and not made.set._routes._served


def keys(count: int, salt: int = 1) -> tuple[bytes, ...]:
    return tuple(bytes([salt, number]) * 16 for number in range(count))


def refusing(error: KvmoverError) -> Callable[[], None]:
    def refuse() -> None:
        raise error

    return refuse
