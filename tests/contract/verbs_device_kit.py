"""Two ports of real CNICs, memory on both, and queue pairs between them; or the reason why there are none."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.transport.verbs.device import PortFacts, Retries, VerbsFabric, VerbsQueuePair, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import WRITE, Completion, FabricError, Registration, Writes
from kvmoverd.adapters.transport.verbs.ports import list_ports
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KV_LANE
from kvmoverd.core.record import memory_view

ARENA_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
WAIT_S = 20.0
IMPATIENT = Retries(timeout=10, retry=1)
"""Some 4 ms for each of two tries: for peers that are meant to be gone."""


@functools.cache
def active_ports() -> list[PortFacts]:
    return [port for port in list_ports() if port.is_active]


def no_devices() -> str:
    """Why there are none; "" where there are."""
    try:
        return "" if active_ports() else "no RDMA device with an active port"
    except (TransportRefused, FabricError) as why:
        return f"no RDMA device: {why}"


@dataclass
class Side:
    """A port with registered memory, filled with noise."""

    fabric: VerbsFabric
    arena: Arena = field(default_factory=lambda: Arena(ARENA_BYTES, PIECE_BYTES))
    seed: int = 0

    def __post_init__(self) -> None:
        noise = np.random.default_rng(self.seed).bytes(ARENA_BYTES)
        memory_view(self.arena.address, ARENA_BYTES)[:] = noise
        self.memory: Registration = self.fabric.register(self.arena.address, ARENA_BYTES, piece_bytes=PIECE_BYTES)
        self.pairs: list[VerbsQueuePair] = []

    def pair(self, send_max: int = 128, receive_max: int = 32) -> VerbsQueuePair:
        self.pairs.append(self.fabric.make_queue_pair(send_max=send_max, receive_max=receive_max))
        return self.pairs[-1]

    def key(self, at: int, size_bytes: int, *, remote: bool = False) -> int:
        return int(keys(self.memory, self.arena.address + at, size_bytes)[int(remote)])

    def view(self, at: int, size_bytes: int) -> memoryview:
        return memory_view(self.arena.address + at, size_bytes)

    def post_slots(self, pair: VerbsQueuePair, count: int, size_bytes: int = 4096) -> None:
        """Receive slots number 100, 101, ... in the last piece."""
        for slot in range(count):
            at = 3 * PIECE_BYTES + slot * size_bytes
            pair.post_receive(self.arena.address + at, size_bytes, self.key(at, size_bytes), 100 + slot)

    def wait(self, count: int, *, limit_s: float = WAIT_S) -> list[Completion]:
        """So many completions, in order. Asserts that they come."""
        found: list[Completion] = []
        until = time.monotonic() + limit_s
        while len(found) < count:
            found += self.fabric.poll(64)
            assert time.monotonic() < until, f"{len(found)} of {count} completions in {limit_s} s: {found}"
        return found

    def quiet(self, seconds: float = 0.1) -> Sequence[Completion]:
        """What still comes in a while."""
        time.sleep(seconds)
        return self.fabric.poll(64)

    def close(self) -> None:
        for pair in self.pairs:
            if pair.number in self.fabric:
                pair.destroy()
        self.memory.close()
        self.fabric.close()


def keys(memory: Registration, address: int, size_bytes: int) -> npt.NDArray[np.uint32]:
    found: npt.NDArray[np.uint32] = memory.keys(np.array([address], np.uint64), np.array([size_bytes], np.uint64))[0]
    return found


def rows(source: Side, target: Side, count: int, size_bytes: int = 4096) -> Writes:
    """Slices of the first piece, scattered over the second one there."""
    found = np.zeros(count, WRITE)
    order = np.random.default_rng(5).permutation(count).astype(np.uint64)
    found["local"] = source.arena.address + np.arange(count, dtype=np.uint64) * size_bytes
    found["remote"] = target.arena.address + PIECE_BYTES + order * size_bytes
    found["size_bytes"] = size_bytes
    sizes = found["size_bytes"].astype(np.uint64)
    found["local_key"] = source.memory.keys(found["local"], sizes)[:, 0]
    found["remote_key"] = target.memory.keys(found["remote"], sizes)[:, 1]
    return found


def arrived(writes: Writes) -> bool:
    return all(
        memory_view(int(row["local"]), int(row["size_bytes"]))
        == memory_view(int(row["remote"]), int(row["size_bytes"]))
        for row in writes
    )


def connect(one: VerbsQueuePair, other: VerbsQueuePair) -> None:
    one.connect(other.end, KV_LANE)
    other.connect(one.end, KV_LANE)


def open_sides(*, retries: Retries | None = None, gid_index: int = -1) -> tuple[Side, Side]:
    """The first two ports, or the only one twice."""
    ports = (active_ports() * 2)[:2]
    made: Callable[[PortFacts], VerbsFabric] = lambda port: open_fabric(  # noqa: E731
        port.device, port.port, gid_index, retries=retries
    )
    return Side(made(ports[0]), seed=1), Side(made(ports[1]), seed=2)
