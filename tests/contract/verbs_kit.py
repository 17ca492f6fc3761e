"""CNICs in one process: `fabric.Fabric` with the rules of reliable connections, and every fault that a test can ask for.

    with FakeWire() as wire:
        a, b = FakeFabric(wire, "fake0:1"), FakeFabric(wire, "fake1:1")

The rules are those of hardware where they hurt: places of a queue are taken until the completion is polled; a wrong key
ends both ends; completions of an end that was destroyed may still come; only `arm` makes `fileno` unreadable again; a
flushed completion tells nothing but its work. Writes really copy memory.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from verbs_memory_kit import FakeRegistration, KeyBook
from verbs_wire_kit import FLUSHED, WAIT_S, FakeWire, Slot, Tally, Work, check_room, failed

from kvmoverd.adapters.transport.verbs.fabric import WRITE, Completion, FabricError, Opcode, Writes
from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

__all__ = ["FakeFabric", "FakeQueuePair", "FakeRegistration", "FakeWire", "State", "Tally"]

QUEUE_MAX = 32_768
CQ_MAX = 1 << 20
MTU_BYTES = 4096
PACKET_NUMBER_STEP = 0x2545F


class State(enum.Enum):
    NEW = "new"
    READY = "ready"
    ERROR = "error"
    DESTROYED = "destroyed"


class FakeQueuePair:
    """One end. `sends` and `slots` are what is posted and has not ended."""

    def __init__(self, fabric: FakeFabric, send_max: int, receive_max: int) -> None:
        self.fabric = fabric
        self.wire = fabric.wire
        self.number = self.wire.enter(self)
        self.state = State.NEW
        self.peer: PathEnd | None = None
        self.marks: Marks | None = None
        self.sends: deque[Work] = deque()
        self.slots: deque[Slot] = deque()
        self.send_places_taken = 0
        self.slots_taken = 0
        self._send_max, self._receive_max = send_max, receive_max

    @property
    def end(self) -> PathEnd:
        packet_number = self.number * PACKET_NUMBER_STEP & 0xFFFFFF
        return PathEnd(self.fabric.cnic, self.number, packet_number, self.fabric.gid, 0, MTU_BYTES)

    @property
    def destroyed(self) -> bool:
        return self.state is State.DESTROYED

    # The port -----------------------------------------------------------------------------------------------------------

    def connect(self, peer: PathEnd, marks: Marks) -> None:
        with self.fabric.entered():
            if self.state is not State.NEW:
                raise FabricError(f"queue pair {self.number} is {self.state.value}, only a new one can be connected")
            if self.fabric.refuses_marks:
                raise FabricError(f"queue pair {self.number}: traffic class {marks.traffic_class} was set, 0 was found")
            self.peer, self.marks, self.state = peer, marks, State.READY
            self.wire.changed.notify_all()

    def post_writes(self, writes: Writes, work_id: int, immediate: int | None) -> None:
        assert writes.dtype == WRITE and writes.ndim == 1, f"writes are {writes.dtype} of shape {writes.shape}"
        if not len(writes):
            raise FabricError("a chain without rows")
        if immediate is not None and not 0 <= immediate < 1 << 32:
            raise FabricError(f"an immediate of {immediate} has no 32 bits")
        with self.fabric.entered():
            self._post(Work(Opcode.WRITE, work_id, writes.tolist(), immediate))

    def post_message(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        with self.fabric.entered():
            self._post(Work(Opcode.SEND, work_id, [(address, 0, size_bytes, key, 0, 0)]))

    def post_receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        with self.fabric.entered():
            self._check_alive("post_receive")
            check_room(f"receive queue of {self.number}", self.slots_taken, 1, self._receive_max)
            self.slots_taken += 1
            self.slots.append(Slot(work_id, address, size_bytes, key))
            if self.state is State.ERROR:
                self._flush()
            self.wire.changed.notify_all()

    def fail(self) -> None:
        with self.fabric.entered():
            self._check_alive("fail")
            self.break_down()

    def destroy(self) -> None:
        with self.fabric.entered():
            self._check_alive("destroy")
            if self.fabric.refuses_destroy:
                raise FabricError(f"queue pair {self.number} can't be destroyed: EBUSY")
            self.vanish()
            self.fabric.queue_pairs.remove(self)

    # The wire -----------------------------------------------------------------------------------------------------------

    def hears(self, other: FakeQueuePair) -> bool:
        """Whether packets of the other end come in here: they belong together, and both are plugged in."""
        return (
            self.state is State.READY
            and self.peer == other.end
            and other.peer == self.end
            and self.fabric.plugged
            and other.fabric.plugged
            and self.fabric.powered
        )

    def sent(self) -> None:
        work = self.sends.popleft()
        self.fabric.tell(self, Completion(self.number, work.work_id, True, work.opcode), work.places, 0)

    def received(self, opcode: Opcode, size_bytes: int, immediate: int) -> None:
        slot = self.slots.popleft()
        done = Completion(self.number, slot.work_id, True, opcode, size_bytes, immediate)
        self.fabric.tell(self, done, 0, 1)

    def break_down(self, status: str = FLUSHED, *, slot_status: str = FLUSHED) -> None:
        """To the error state; the oldest work, or slot, ends with its own status and all the rest is flushed."""
        if self.state is State.READY:
            self.wire.broken(self)
        self.state = State.ERROR
        self._flush(status, slot_status)
        self.wire.changed.notify_all()

    def vanish(self) -> None:
        """As if it had never been; what has ended before may still be told."""
        if self.state is State.READY:
            self.wire.broken(self)
        self.state = State.DESTROYED
        self.sends.clear()
        self.slots.clear()
        self.wire.leave(self)
        self.wire.changed.notify_all()

    def _post(self, work: Work) -> None:
        self._check_alive("post")
        if self.state is State.NEW:
            raise FabricError(f"queue pair {self.number} is not connected")
        check_room(f"send queue of {self.number}", self.send_places_taken, work.places, self._send_max)
        self.send_places_taken += work.places
        self.wire.tally.doorbells += 1
        self.sends.append(work)
        if self.state is State.ERROR:
            self._flush()
        self.wire.changed.notify_all()

    def _check_alive(self, call: str) -> None:
        if self.state is State.DESTROYED:
            raise FabricError(f"{call}: queue pair {self.number} is destroyed")

    def _flush(self, status: str = FLUSHED, slot_status: str = FLUSHED) -> None:
        while self.sends:
            work = self.sends.popleft()
            self.fabric.tell(self, failed(self, work.work_id, status), work.places, 0)
            status = FLUSHED
        while self.slots:
            self.fabric.tell(self, failed(self, self.slots.popleft().work_id, slot_status), 0, 1)
            slot_status = FLUSHED


class _Entered:
    """A call of a CNIC: under the wire's lock, and not before a process that was stopped goes on."""

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric

    def __enter__(self) -> None:
        fabric, changed = self._fabric, self._fabric.wire.changed
        changed.acquire()
        until_s = time.monotonic() + WAIT_S
        while fabric.stopped and time.monotonic() < until_s:
            changed.wait(0.1)
        if not fabric.powered or fabric.stopped:
            changed.release()
            raise FabricError(f"{fabric.name}: " + ("stopped for too long" if fabric.stopped else "the device is gone"))

    def __exit__(self, *_: object) -> None:
        self._fabric.wire.changed.release()


class FakeFabric:
    """One port of a CNIC. `piece_bytes_max` is its `max_mr_size`; `register_fails`: no memory can be locked here.

    `refuses_marks`: what is set is not what is read back. `refuses_destroy`: the device keeps its ends.
    `plugged` False: no packet goes out or comes in.
    """

    def __init__(
        self,
        wire: FakeWire,
        name: str = "fake0:1",
        *,
        cnic: int = 0,
        numa_node: int = -1,
        piece_bytes_max: int = 1 << 40,
        queue_pairs_max: int = 1024,
        cq_max: int = CQ_MAX,
    ) -> None:
        self.wire, self.name, self.numa_node, self.cnic = wire, name, numa_node, cnic
        self.refuses_marks = self.refuses_destroy = self.register_fails = self.stopped = False
        self.plugged = self.powered = True
        self.queue_pairs: list[FakeQueuePair] = []
        with wire.changed:
            wire.fabrics.append(self)
            number = len(wire.fabrics)
        self.gid = bytes(10) + b"\xff\xff" + bytes([10, 77, number >> 8, number & 0xFF])
        self.book = KeyBook(piece_bytes_max, first_key=number << 24)
        self._queue_pairs_max, self._cq_max = queue_pairs_max, cq_max
        self._ended: deque[tuple[Completion, FakeQueuePair, int, int]] = deque()
        self._drop: tuple[int, Opcode | None] = (0, None)
        self._armed = False
        self._overrun = False
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # The port -----------------------------------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int, *, piece_bytes: int, dmabuf_fd: int = -1) -> FakeRegistration:
        if dmabuf_fd >= 0:
            raise FabricError(f"{self.name}: can't register {size_bytes} B of a dmabuf, it has no GPU beside it")
        if self.register_fails:
            raise FabricError(f"{self.name}: can't register {size_bytes} B: ENOMEM, raise the limit for locked memory")
        return FakeRegistration(self.book, address, size_bytes, piece_bytes)

    def make_queue_pair(self, *, send_max: int, receive_max: int) -> FakeQueuePair:
        if not (0 < send_max <= QUEUE_MAX and 0 < receive_max <= QUEUE_MAX):
            raise FabricError(f"queues of {send_max} and {receive_max} places, each must be 1 to {QUEUE_MAX}")
        with self.entered():
            check_room(f"queue pairs of {self.name}", len(self.queue_pairs), 1, self._queue_pairs_max)
            made = FakeQueuePair(self, send_max, receive_max)
            self.queue_pairs.append(made)
            return made

    def poll(self, completions_max: int) -> Sequence[Completion]:
        with self.entered():
            if self._overrun:
                raise FabricError(f"{self.name}: more than {self._cq_max} completions were left lying")
            return [self._next() for _ in range(min(completions_max, len(self._ended)))]

    def arm(self) -> None:
        """What has ended before is not told again by `fileno`: poll once more."""
        with self.entered():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
            self._armed = True

    def fileno(self) -> int:
        return self._eventfd

    def close(self) -> None:
        with self.wire.changed:
            assert not self.queue_pairs, f"{self.name} is closed with {len(self.queue_pairs)} queue pairs"
            assert not len(self.book), f"{self.name} is closed with {len(self.book)} registered pieces"
            os.close(self._eventfd)

    # What a test does ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """As SIGSTOP to its process: its calls stand still, what is posted goes on, and others write to it. 10 s at most."""
        with self.wire.changed:
            self.stopped = True

    def resume(self) -> None:
        with self.wire.changed:
            self.stopped = False
            self.wire.changed.notify_all()

    def kill(self) -> None:
        """As SIGKILL: the kernel destroys all that is there; calls of the dead process raise."""
        with self.wire.changed:
            self.powered = self.stopped = False
            for end in self.queue_pairs:
                end.vanish()
            self.queue_pairs.clear()
            self.wire.changed.notify_all()

    def unplug(self) -> None:
        """Nobody gets an answer over this port any more, until `plug`."""
        with self.wire.changed:
            self.plugged = False

    def plug(self) -> None:
        with self.wire.changed:
            self.plugged = True
            self.wire.changed.notify_all()

    def drop_completions(self, count: int, opcode: Opcode | None = None) -> None:
        """The next good ones, of that kind, are never told; what they stand for has happened, and keeps its places."""
        with self.wire.changed:
            self._drop = (count, opcode)

    # The wire -----------------------------------------------------------------------------------------------------------

    def entered(self) -> _Entered:
        return _Entered(self)

    def tell(self, end: FakeQueuePair, done: Completion, send_places: int, slots: int) -> None:
        count, opcode = self._drop
        if done.ok and count and opcode in (None, done.opcode):
            self._drop = (count - 1, opcode)
            self.wire.tally.dropped_completions += 1
            return
        self._overrun = self._overrun or len(self._ended) >= self._cq_max
        if not self._overrun:
            self._ended.append((done, end, send_places, slots))
        if self._armed:
            self._armed = False
            os.eventfd_write(self._eventfd, 1)

    def _next(self) -> Completion:
        done, end, send_places, slots = self._ended.popleft()
        end.send_places_taken -= send_places
        end.slots_taken -= slots
        return done


def writes_of(rows: Sequence[tuple[int, int, int, int, int]]) -> Writes:
    """Rows of local and remote address, bytes, local and remote key."""
    return np.array([(*row, 0) for row in rows], dtype=WRITE)
