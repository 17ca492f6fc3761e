"""The two threads of one 3FS ring: one puts reads in, one takes their ends out, as the library wants it."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import deque

from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.adapters.storage.read_engine import Ends, Flight
from kvmoverd.adapters.storage.usrbio_ring import UsrbioRing
from kvmoverd.ports.storage import BlockRead

BATCH_MAX = 4
"""Reads put in before the daemon is woken. It may do what it finds as one batch, whose reads all end together."""
TRIES_MAX = 64
AGAIN = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
WAIT_S = 0.1
"""At most so long until a thread looks whether it is to stop."""
FULL_S = 0.005
SILENCE_S = 90.0
"""Reads are under way and none ends: the daemon itself gives up after some 60 s, so this one is gone."""


class UsrbioLane:
    """Reads through one ring, at most `depth` at a time, until it misbehaves.

    A read that is in the ring may write to its slot until its end was taken out, whatever else happened.
    """

    def __init__(self, ring: UsrbioRing, ends: Ends, *, name: str, depth: int, silence_s: float = SILENCE_S) -> None:
        assert 1 <= depth <= ring.entries, f"{depth} reads at a time, the ring has {ring.entries} entries"
        self._ring = ring
        self._ends = ends
        self._depth = depth
        self._silence_s = silence_s
        self._numbers = itertools.count(1)
        self._inbox: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._no_more = False
        self._full = 0
        self._heard_s = time.monotonic()
        self.strays = 0
        self.poisoned = ""
        self.refused = 0
        """Reads that the library would not take, and that went by threads."""
        self.refusal = ""
        self._threads = [
            threading.Thread(target=self._put_in, name=f"kvmover-{name}-in", daemon=True),
            threading.Thread(target=self._take_out, name=f"kvmover-{name}-out", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def load(self) -> int:
        """Reads that it has, under way or waiting."""
        return len(self._inbox) + len(self._flights)

    def put(self, op: BlockRead, opened: Opened) -> None:
        """As in `ReadEngine`; the descriptor is registered."""
        span = op.span
        self._line_up(Flight(op, opened, op.address + span.start, len(span), opened.offset_bytes + span.start))

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, deadline_s: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _line_up(self, flight: Flight) -> None:
        with self._changed:
            taken = not (self._stopping or self.poisoned)
            if taken:
                self._inbox.append(flight)
                self._changed.notify_all()
        if not taken:
            self._give_up(flight)

    def _put_in(self) -> None:
        while batch := self._next_batch():
            begun = [self._begin(flight) for flight in batch]
            if any(begun):
                self._submit()
        with self._changed:
            left, self._no_more = list(self._inbox), True
            self._inbox.clear()
            self._changed.notify_all()
        for flight in left:
            self._give_up(flight)

    def _next_batch(self) -> list[Flight]:
        """Waits until there are reads and room for them; empty when no more are to be begun."""
        with self._changed:
            while not (self._stopping or self.poisoned):
                room = min(BATCH_MAX, len(self._inbox), self._depth - len(self._flights))
                if room > 0:
                    return [self._inbox.popleft() for _ in range(room)]
                self._changed.wait(WAIT_S)
        return []

    def _begin(self, flight: Flight) -> bool:
        """Puts a read into the ring; its end may come before this returns."""
        if not self._flights:
            self._heard_s = time.monotonic()
        number, done = next(self._numbers), flight.done_bytes
        self._flights[number] = flight
        try:
            self._ring.read(
                number, flight.opened.fd, flight.address + done, flight.size_bytes - done, flight.offset_bytes + done
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, a read without an end would hold its slot for ever
            del self._flights[number]
            self._on_refused(flight, error)
            return False
        self._full = 0
        if len(self._flights) <= 1:
            self._wake_other()
        return True

    def _on_refused(self, flight: Flight, error: Exception) -> None:
        if isinstance(error, BlockingIOError) and self._full < TRIES_MAX:
            self._full += 1
            time.sleep(FULL_S)
            self._line_up(flight)
            return
        self.refused += 1
        self.refusal = f"{type(error).__name__}: {error}"
        self._give_up(flight)

    def _submit(self) -> None:
        try:
            self._ring.submit()
        except OSError as error:
            self._poison(f"{type(error).__name__}: {error}")

    def _take_out(self) -> None:
        while self._any_flight():
            for number, result in self._reap():
                flight = self._flights.pop(number, None)
                if flight is None:
                    self.strays += 1
                else:
                    self._end(flight, result)
            if self._inbox:
                self._wake_other()

    def _any_flight(self) -> bool:
        """Waits until something is under way; False when nothing is, and nothing more will be."""
        with self._changed:
            while not self._flights:
                if self._no_more:
                    return False
                self._changed.wait(WAIT_S)
        return True

    def _reap(self) -> list[tuple[int, int]]:
        try:
            ended = self._ring.reap(WAIT_S)
        except Exception as error:  # noqa: BLE001 - reads are under way: their ends are asked for until they come
            self._poison(f"{type(error).__name__}: {error}")
            time.sleep(WAIT_S)
            return []
        now_s = time.monotonic()
        if ended:
            self._heard_s = now_s
        elif now_s - self._heard_s > self._silence_s:
            self._poison(f"{len(self._flights)} reads are under way, none has ended for {self._silence_s:g} s")
        return ended

    def _end(self, flight: Flight, result: int) -> None:
        try:
            self._on_end(flight, result)
        except Exception as error:  # noqa: BLE001 - the ends of other reads still have to be taken out
            self._poison(f"{type(error).__name__}: {error}")

    def _on_end(self, flight: Flight, result: int) -> None:
        flight.tries += 1
        again = flight.tries <= TRIES_MAX
        if result > 0 and flight.done_bytes + result >= flight.size_bytes:
            self._ends.came(flight.op, flight.opened)
        elif result > 0 and again:
            flight.done_bytes += result
            self._line_up(flight)
        elif result < 0 and -result in AGAIN and again:
            self._line_up(flight)
        elif result < 0:
            self._ends.failed(flight.op, flight.opened, OSError(-result, os.strerror(-result)))
        else:
            self._give_up(flight)

    def _poison(self, why: str) -> None:
        with self._changed:
            self.poisoned = self.poisoned or why
            self._changed.notify_all()

    def _give_up(self, flight: Flight) -> None:
        self._ends.given_up(flight.op, flight.opened)

    def _wake_other(self) -> None:
        with self._changed:
            self._changed.notify_all()
