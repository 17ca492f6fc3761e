"""Devices that a test can hold, step by step: the in-memory storage and the loopback transport behind a gate.

While a gate is closed, what was submitted waits; `release_one` lets the oldest happen. `fails` ends what is submitted with
a reason instead. A held send is like one of a device that has its addresses already: it lands when it is released, also
when its sink was forgotten meanwhile, and only then the sink is quiet.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.transport.loopback import LoopbackTransport
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.lane_watch import LaneWatch
from kvmoverd.ports.observer import Observer
from kvmoverd.ports.storage import BlockIndex, BlockRead, StorageCounters, StorageDone, StorageFacts, StorageOp
from kvmoverd.ports.transport import IoVec, Send, Sent, Sink, TransportEvent

NEVER: Callable[[object], Reason | None] = lambda _: None  # noqa: E731


class StorageGate:
    """`Storage` over a `MemoryStorage`."""

    def __init__(self) -> None:
        self.inner = MemoryStorage("root")
        self.closed = False
        self.fails: Callable[[StorageOp], Reason | None] = NEVER
        self.held: deque[StorageOp] = deque()
        self.late: deque[StorageOp] = deque()
        self.reads: Counter[bytes] = Counter()
        self.layer_reads: Counter[tuple[bytes, int]] = Counter()
        """By key and layer: how often a read of it began."""
        self.under_way_max = 0
        self.authors: list[tuple[str, int]] = []
        self.places: dict[bytes, Place] = {}
        """Where records lie, to be told with each read that ends."""
        self.asked: list[tuple[bytes, int, Place | None]] = []
        """Key, first layer and place of each read while there are `places`."""
        self._placed: dict[int, Place] = {}
        self.told_later: deque[StorageDone] = deque()

    @property
    def facts(self) -> StorageFacts:
        return self.inner.facts

    @property
    def counters(self) -> StorageCounters:
        return self.inner.counters

    def open_namespace(self, namespace: Namespace) -> None:
        self.inner.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self.inner.purge(namespace)

    @property
    def index(self) -> BlockIndex:
        return self.inner.index

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return self.inner.purge_tenant(tenant)

    def heard(self, author: str, log: int) -> None:
        self.authors.append((author, log))

    def signature(self) -> tuple[str, int]:
        return self.authors[0] if self.authors else ("", 0)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        self.reads.update(op.key for op in ops if isinstance(op, BlockRead) and not op.first_layer)
        for op in ops:
            if isinstance(op, BlockRead):
                self.layer_reads.update((op.key, layer) for layer in op.layers)
        self.held.extend(ops)
        self.under_way_max = max(self.under_way_max, len(self.held))
        while not self.closed and self.release_one():
            pass

    def release_one(self) -> bool:
        """The oldest op happens; False when none waits."""
        if not self.held:
            return False
        self._happen(self.held.popleft())
        return True

    def release_first_range(self) -> bool:
        """The oldest read of a block's first layers happens, though others are older; False when none waits."""
        found = next((op for op in self.held if isinstance(op, BlockRead) and not op.first_layer), None)
        if found is not None:
            self.held.remove(found)
            self._happen(found)
        return found is not None

    def _happen(self, op: StorageOp) -> None:
        if isinstance(op, BlockRead) and op.key in self.places:
            self.asked.append((op.key, op.first_layer, op.place))
            self._placed[op.op_id] = self.places[op.key]
        reason = self.fails(op)
        if reason is None:
            self.inner.submit([op])
        else:
            self.told_later.append(StorageDone(op.op_id, reason, message="as the test wants"))

    def give_up_one(self) -> None:
        """The oldest op has failed, for taking too long; the device keeps its slot until `let_go_one`."""
        op = self.held.popleft()
        self.late.append(op)
        self.told_later.append(StorageDone(op.op_id, Reason.IO_ERROR, message="root is silent for 10 s", quiet=False))

    def let_go_one(self) -> None:
        """The device is done with the op that was given up first: it happens, and says so."""
        self.inner.submit([self.late.popleft()])

    def poll(self, completions_max: int) -> list[StorageDone]:
        done = list(self.told_later)
        self.told_later.clear()
        done += self.inner.poll(completions_max)
        for completion in done:
            completion.place = self._placed.pop(completion.op_id, None)
        return done

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


class TransportGate:
    """`Transport` over a `LoopbackTransport`."""

    def __init__(self) -> None:
        self.inner = LoopbackTransport()
        self.closed = False
        self.fails: Callable[[Send], Reason | None] = NEVER
        self.held: deque[tuple[Send, IoVec | None]] = deque()
        self._open: dict[int, Sink] = {}
        self._leaving: set[int] = set()
        self.told_later: deque[TransportEvent] = deque()

    def expect(self, sink: Sink) -> None:
        self._open[sink.sink_id] = sink
        self.inner.expect(sink)

    def forget(self, sink_id: int) -> None:
        del self._open[sink_id]
        if self._is_held(sink_id):
            self._leaving.add(sink_id)
        else:
            self.inner.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            sink = self._open.get(send.sink_id)
            self.held.append((send, sink.resolve(send.layer, send.first_block) if sink else None))
        while not self.closed and self.release_one():
            pass

    def release_one(self) -> bool:
        """The oldest send lands; False when none waits."""
        if not self.held:
            return False
        send, slices = self.held.popleft()
        reason = self.fails(send)
        if reason is not None:
            self.told_later.append(Sent(send.op_id, reason, 0, "as the test wants"))
        elif send.sink_id in self._leaving and slices is not None:
            moved = iovec.copy(slices, send.source, iovec.copy_by_slices)
            self.told_later.append(Sent(send.op_id, Reason.CANCELLED, moved, "landed in a forgotten sink"))
        else:
            self.inner.submit([send])
        if send.sink_id in self._leaving and not self._is_held(send.sink_id):
            self._leaving.remove(send.sink_id)
            self.inner.forget(send.sink_id)
        return True

    def poll(self, events_max: int) -> list[TransportEvent]:
        ended = list(self.told_later)
        self.told_later.clear()
        return ended + self.inner.poll(events_max)

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)

    def _is_held(self, sink_id: int) -> bool:
        return any(send.sink_id == sink_id for send, _ in self.held)


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still until the test moves it: what a seed did once, it does again."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def no_floor(observer: Observer) -> LaneWatch:
    """Measures the lanes and judges none."""
    return LaneWatch(dict.fromkeys(KvClass, "one lane"), floor_bytes_per_s=0, window_s=1.0, observer=observer)
