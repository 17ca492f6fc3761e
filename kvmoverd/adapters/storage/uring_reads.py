"""The thread that owns a ring: reads go in, and come out whole, failed, or to be done by others."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.adapters.storage.read_engine import Ends, Flight
from kvmoverd.adapters.storage.uring_ring import AGAIN, Ring
from kvmoverd.core.layout import ALIGN_BYTES
from kvmoverd.ports.storage import BlockRead

T = TypeVar("T")

SUBMIT_READS_MAX = 4
"""A submit keeps the interpreter lock: 10 us a read of 2.5 MB into 2 MiB pages, 100 us into pages of 4 KiB."""
SUBMIT_NS_MAX = 1_000_000
"""Of processor time. Longer: this filesystem copies at once, or pins many small pages; workers of the kernel are to do it."""
SHORT_READ_BYTES = 1 << 20
SHORT_DEPTH_DIVISOR = 4
"""Short reads are parts of blocks whose first layers are wanted early: in a deep queue they would all end late, together."""
TRIES_MAX = 64
STUCK_S = 0.01
IDLE_S = 1.0


class UringReads:
    """`ReadEngine` over one ring.

    At most `depth` reads are in the ring; the others stand ready with their files open. Some devices end all reads that
    they have at the same moment, and would be idle until what came was checked and the next files were opened.
    """

    def __init__(self, ring: Ring, ends: Ends, *, name: str, depth: int) -> None:
        self._ring = ring
        self._depth = depth
        self._ends = ends
        self._inbox: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}
        self._woken = False
        self._stopping = False
        self._stuck = 0
        self._wake_fd = ring.fileno()
        self.poisoned = ""
        """Why the ring is out of use; empty while it is good."""
        self._thread = threading.Thread(target=self._run, name=f"kvmover-{name}-uring", daemon=True)
        self._thread.start()

    @property
    def strays(self) -> int:
        return self._ring.strays

    def put(self, op: BlockRead, opened: Opened) -> None:
        span = op.span
        offset_bytes = opened.offset_bytes + span.start
        self._inbox.append(Flight(op, opened, op.address + span.start, len(span), offset_bytes))
        self._wake()

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def join(self, deadline_s: float) -> bool:
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def close(self) -> None:
        self._give_up_inbox()
        self._ring.close()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while not self._stopping or self._flights or self._inbox:
            poller.poll((STUCK_S if self._stuck else IDLE_S) * 1000)
            self._woken = False
            ended = self._guarded(self._reap) or []
            self._guarded(self._begin)
            for flight, result in ended:
                self._guarded(partial(self._on_end, flight, result))
            self._guarded(self._begin)

    def _guarded(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - whatever it was, this ring's books can't be trusted to go on
            self._poison(error)
            return None

    def _reap(self) -> list[tuple[Flight, int]]:
        ended = [(self._flights.pop(number), result) for number, result in self._ring.reap()]
        if self._ring.overflowed():
            self._poison(OSError("the completion queue overflowed"))
        return ended

    def _begin(self) -> None:
        """Puts what waits into the ring, few at a time, while there is room. What has ended is looked at after that."""
        while not self._stuck and (room := min(SUBMIT_READS_MAX, self._room())) > 0:
            for _ in range(room):
                self._read(self._inbox.popleft())
            self._submit()
        if self._stuck:
            self._submit()

    def _room(self) -> int:
        """How many of the reads that wait may go into the ring; all of them when they are to be given up."""
        if not self._inbox or self.poisoned or self._stopping:
            return len(self._inbox)
        is_short = self._inbox[0].size_bytes < SHORT_READ_BYTES
        depth = -(-self._depth // SHORT_DEPTH_DIVISOR) if is_short else self._depth
        return min(len(self._inbox), depth - len(self._flights))

    def _read(self, flight: Flight) -> None:
        if self.poisoned or self._stopping:
            self._given_up(flight)
            return
        done = flight.done_bytes
        try:
            number = self._ring.read(
                flight.opened.fd, flight.address + done, flight.size_bytes - done, flight.offset_bytes + done
            )
        except Exception:
            self._inbox.appendleft(flight)
            raise
        self._flights[number] = flight

    def _submit(self) -> None:
        if self.poisoned:
            return
        began_ns = time.thread_time_ns()
        taken = self._ring.submit()
        if time.thread_time_ns() - began_ns > SUBMIT_NS_MAX:
            self._ring.by_workers = True
        if taken:
            self._stuck = 0
            return
        self._stuck += 1
        if self._stuck > TRIES_MAX:
            self._poison(OSError(f"the kernel took no reads {self._stuck} times in a row"))

    def _on_end(self, flight: Flight, result: int) -> None:
        if result < 0:
            self._on_error(flight, result)
            return
        if flight.done_bytes + result >= flight.size_bytes:
            self._ends.came(flight.op, flight.opened)
            return
        # Direct reads must start at a page. None that is whole: the file has been cut.
        whole_bytes = result - result % ALIGN_BYTES
        if whole_bytes == 0:
            self._given_up(flight)
            return
        flight.done_bytes += whole_bytes
        self._inbox.append(flight)

    def _on_error(self, flight: Flight, result: int) -> None:
        flight.tries += 1
        if -result in AGAIN and flight.tries <= TRIES_MAX:
            self._inbox.append(flight)
        else:
            self._ends.failed(flight.op, flight.opened, OSError(-result, os.strerror(-result)))

    def _poison(self, error: Exception) -> None:
        """Out of use. What the kernel has seen keeps its buffer until the completion comes; the rest is given up."""
        self.poisoned = self.poisoned or f"{type(error).__name__}: {error}"
        self._stuck = 0
        for number in self._ring.take_unsubmitted():
            self._given_up(self._flights.pop(number))
        self._give_up_inbox()

    def _give_up_inbox(self) -> None:
        while self._inbox:
            self._given_up(self._inbox.popleft())

    def _given_up(self, flight: Flight) -> None:
        self._ends.given_up(flight.op, flight.opened)
