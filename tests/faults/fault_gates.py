"""Gates around a daemon's real devices: while one is shut, what was asked of the device waits, as if it were slow.

A held copy into this process's memory is like that of a device which has its addresses already: they are resolved when it
is submitted, it lands when its gate opens, also when its sink was forgotten meanwhile, and only then the sink is quiet.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, StorageDone, StorageOp
from kvmoverd.ports.transport import IoVec, Received, Send, Sent, Sink, SinkQuiet, TransportEvent

GATES = (
    "reads",
    "later",
    "writes",
    "local",
    "remote",
    "reserve",
    "set_prefix",
    "release_ticket",
    "stop_part",
    "give_up",
    "quiet",
    "find",
)
"""Storage reads, those of later layers, and writes; copies within this process; sends to other nodes; questions to other nodes;
the word that a sink for other nodes is quiet; what is found out of blocks before they are stored."""
TWISTS = ("lose", "late", "duplicate", "short")
"""What may become of a completion: it never comes, it waits for its gate, it comes twice, it moved less than was asked."""


class Gate:
    """What comes while it is shut waits, oldest first. Completions wait with the gate whose work they end."""

    def __init__(self) -> None:
        self.is_shut = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._opened = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def shut(self) -> None:
        self.is_shut = True
        self._opened.clear()

    def open(self) -> None:
        self.is_shut = False
        self._opened.set()
        waiting, self._waiting = self._waiting, deque()
        for act in waiting:
            act()

    def passing(self, act: Callable[[], None]) -> None:
        """Now, or when it opens."""
        if self.is_shut:
            self._waiting.append(act)
        else:
            act()

    async def wait(self) -> None:
        if self.is_shut:
            await self._opened.wait()


class Twist:
    """What becomes of the next completions of one device, so many of each."""

    def __init__(self) -> None:
        self.due: dict[str, int] = dict.fromkeys(TWISTS, 0)
        self.done: dict[str, int] = dict.fromkeys(TWISTS, 0)

    def take(self) -> str:
        """The twist of this completion; empty for none."""
        for name, count in self.due.items():
            if count:
                self.due[name] -= 1
                self.done[name] += 1
                return name
        return ""


class StorageGate:
    """`Storage` over a real adapter: anything that is not gated is the adapter's own."""

    def __init__(self, inner: Any, gates: dict[str, Gate], pump: Callable[[], None]) -> None:
        self._inner = inner
        self._gates = gates
        self._pump = pump
        self._kinds: dict[int, str] = {}
        self._ready: deque[StorageDone] = deque()
        self.twist = Twist()
        self.slow_s = 0.0
        """What each read takes, beside its own time, one after another."""
        self._free_at_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            gate = self._gate(op)
            if gate is None:
                self._inner.submit([op])
            else:
                gate.passing(lambda op=op: self._begin(op))  # type: ignore[misc]

    def _begin(self, op: StorageOp) -> None:
        if not self.slow_s or not isinstance(op, BlockRead):
            self._inner.submit([op])
            return
        loop = asyncio.get_running_loop()
        self._free_at_s = max(self._free_at_s, loop.time()) + self.slow_s
        loop.call_at(self._free_at_s, self._inner.submit, [op])

    def poll(self, completions_max: int) -> list[StorageDone]:
        for done in self._inner.poll(completions_max):
            self._twisted(done)
        found = list(self._ready)
        self._ready.clear()
        return found

    def _gate(self, op: StorageOp) -> Gate | None:
        kind = {BlockRead: "reads", BlockWrite: "writes"}.get(type(op))
        if kind is None:
            return None
        if isinstance(op, BlockRead) and op.first_layer and self._gates["later"].is_shut:
            kind = "later"
        self._kinds[op.op_id] = kind
        return self._gates[kind]

    def _twisted(self, done: StorageDone) -> None:
        """Storage completions may be late or short; the contract is one completion per op, so none comes twice."""
        kind = self._kinds.pop(done.op_id, None)
        twist = self.twist.take() if kind is not None else ""
        if kind is not None and twist in ("late", "lose"):
            gate = self._gates[kind]
            gate.shut()
            gate.passing(lambda: self._late(done))
        elif twist == "short":
            self._ready.append(StorageDone(done.op_id, Reason.SHORT_READ, message="cut short by the test"))
        else:
            self._ready.append(done)

    def _late(self, done: StorageDone) -> None:
        self._ready.append(done)
        asyncio.get_running_loop().call_soon(self._pump)


class TransportGate:
    """`Transport` over a real adapter."""

    def __init__(self, inner: Any, gate: Gate, quiet: Gate, pump: Callable[[], None], *, is_local: bool) -> None:
        self._inner = inner
        self._gate = gate
        self._quiet = quiet
        self._pump = pump
        self._is_local = is_local
        self._sinks: dict[int, Sink] = {}
        self._held: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._ready: deque[TransportEvent] = deque()
        self.twist = Twist()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def expect(self, sink: Sink) -> None:
        self._sinks[sink.sink_id] = sink
        self._inner.expect(sink)

    def forget(self, sink_id: int) -> None:
        self._sinks.pop(sink_id, None)
        if self._held.get(sink_id):
            self._leaving.add(sink_id)
        else:
            self._inner.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if not self._gate.is_shut:
                self._inner.submit([send])
                continue
            sink = self._sinks.get(send.sink_id) if self._is_local else None
            slices = sink.resolve(send.layer, send.first_block) if sink is not None else None
            if self._is_local:
                self._held[send.sink_id] = self._held.get(send.sink_id, 0) + 1
            self._gate.passing(lambda send=send, slices=slices: self._release(send, slices))  # type: ignore[misc]

    def poll(self, events_max: int) -> list[TransportEvent]:
        for event in self._inner.poll(events_max):
            self._twisted(event)
        found = list(self._ready)
        self._ready.clear()
        return found

    def _release(self, send: Send, slices: IoVec | None) -> None:
        if send.sink_id in self._leaving:
            moved = land(send.source, slices) if slices is not None else 0
            self._late(Sent(send.op_id, Reason.CANCELLED, moved, "landed in a forgotten sink"))
        else:
            self._inner.submit([send])
        if not self._is_local:
            return
        self._held[send.sink_id] -= 1
        if not self._held[send.sink_id]:
            del self._held[send.sink_id]
            if send.sink_id in self._leaving:
                self._leaving.remove(send.sink_id)
                self._inner.forget(send.sink_id)

    def _twisted(self, event: TransportEvent) -> None:
        """A send may be late, lost or short; what arrives may arrive twice: the peer decides about that."""
        twist = self.twist.take() if isinstance(event, Sent | Received) else ""
        match twist, event:
            case (("late" | "lose"), _):
                self._gate.shut()
                self._gate.passing(lambda: self._late(event))
            case "short", Sent():
                self._ready.append(Sent(event.op_id, Reason.IO_ERROR, 0, "cut short by the test"))
            case "duplicate", Received():
                self._ready += [event, event]
            case _, SinkQuiet():
                self._quiet.passing(lambda: self._late(event))
            case _:
                self._ready.append(event)

    def _late(self, event: TransportEvent) -> None:
        self._ready.append(event)
        asyncio.get_running_loop().call_soon(self._pump)


def land(source: IoVec, slices: IoVec) -> int:
    """Copies from slices to slices of this process's memory, whatever their cuts; bytes moved."""
    content = b"".join(ctypes.string_at(int(address), int(size)) for address, size in source)
    ends = np.cumsum(slices[:, 1], dtype=np.int64)
    for (address, size), end in zip(slices, ends, strict=True):
        ctypes.memmove(int(address), content[int(end) - int(size) : int(end)], int(size))
    return len(content)
