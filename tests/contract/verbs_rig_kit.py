"""Two fake CNICs that know each other, each with some memory."""

from __future__ import annotations

import time

import numpy as np
from verbs_kit import FakeFabric, FakeWire, State, writes_of

from kvmoverd.adapters.transport.verbs.fabric import Completion
from kvmoverd.core.qos import KV_LANE

SIZE_BYTES = 4096
PIECE_BYTES = 1024
SEND_MAX, RECEIVE_MAX = 8, 4


class Side:
    """A CNIC with some memory, registered."""

    def __init__(self, wire: FakeWire, fill: int) -> None:
        self.fabric = FakeFabric(wire, f"fake{fill}:1", cq_max=64)
        self.memory = np.full(SIZE_BYTES, fill, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.registration = self.fabric.register(self.address, SIZE_BYTES, piece_bytes=PIECE_BYTES)
        self.end = self.fabric.make_queue_pair(send_max=SEND_MAX, receive_max=RECEIVE_MAX)

    def keys(self, at: int) -> tuple[int, int]:
        found = self.registration.keys(np.array([self.address + at], np.uint64), np.array([1], np.uint64))
        return int(found[0, 0]), int(found[0, 1])

    def done(self) -> list[Completion]:
        return list(self.fabric.poll(64))

    def receive(self, work_id: int, at: int = 0, size_bytes: int = 64) -> None:
        self.end.post_receive(self.address + at, size_bytes, self.keys(at)[0], work_id)

    def message(self, work_id: int, size_bytes: int = 16) -> None:
        self.end.post_message(self.address, size_bytes, self.keys(0)[0], work_id)

    def close(self) -> None:
        if self.end in self.fabric.queue_pairs:
            self.end.destroy()
        self.registration.close()
        self.fabric.close()


class Rig:
    """Two connected ends on a wire that the test moves."""

    def __init__(self) -> None:
        self.wire = FakeWire(held=True, retry_s=0.02)
        self.a, self.b = Side(self.wire, 1), Side(self.wire, 2)
        self.a.end.connect(self.b.end.end, KV_LANE)
        self.b.end.connect(self.a.end.end, KV_LANE)

    def write(self, work_id: int, rows: int = 1, immediate: int | None = None, key: int | None = None) -> None:
        """Rows of 8 bytes, one beside the other, from the beginning of a's memory to that of b's."""
        local_key, remote_key = self.a.keys(0)[0], self.b.keys(0)[1] if key is None else key
        chain = [(self.a.address + 8 * n, self.b.address + 8 * n, 8, local_key, remote_key) for n in range(rows)]
        self.a.end.post_writes(writes_of(chain), work_id, immediate)

    def landed(self) -> int:
        """Rows that are there."""
        return int((self.b.memory == 1).sum()) // 8

    def settle_late(self) -> None:
        """Lets those give up whom nobody answers."""
        self.wire.settle()
        time.sleep(0.03)
        self.wire.settle()

    def close(self) -> None:
        self.wire.close()
        self.a.close()
        self.b.close()


def states(rig: Rig) -> tuple[State, State]:
    return rig.a.end.state, rig.b.end.state
