"""The wire between the fakes of `verbs_kit`: what a reliable connection does with posted work, one item after the other.

An item is one slice of a chain, or one message. A thread moves them, or, while the wire is held, the test's own `step`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvmoverd.adapters.transport.verbs.fabric import Completion, FabricError, Opcode

if TYPE_CHECKING:
    from verbs_kit import FakeFabric, FakeQueuePair

FLUSHED = "work request flushed"
REMOTE_ACCESS = "remote access error"
REMOTE_INVALID = "remote invalid request"
LOCAL_PROTECTION = "local protection error"
LOCAL_LENGTH = "local length error"
RETRY_EXCEEDED = "transport retry counter exceeded"
INJECTED = "an error that the test asked for"

BATCH_ITEMS = 64
"""Moved by the thread before others may take the lock."""
RETRY_LOOK_S = 0.002
FORBIDDEN_MAX = 4096
TRESPASSES_MAX = 64
WAIT_S = 10.0


@dataclass(slots=True)
class Work:
    """What was posted to send: a chain with its rows, or a message as one row without a remote address."""

    opcode: Opcode
    work_id: int
    rows: list[tuple[int, ...]]
    immediate: int | None = None
    done: int = 0
    tried_s: float | None = None
    """Since when nobody answers."""
    waits: bool = False
    """For a receive slot; counted once."""

    @property
    def places(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class Slot:
    """A posted receive."""

    work_id: int
    address: int
    size_bytes: int
    key: int


@dataclass(slots=True)
class _Flight:
    """Bytes that had left when an end failed: they land, unless the end that they go to is destroyed before."""

    target: FakeQueuePair
    address: int
    raw: bytes


@dataclass(slots=True)
class Tally:
    """What went over the wire since it was made."""

    items: int = 0
    written_bytes: int = 0
    messages: int = 0
    doorbells: int = 0
    waits_for_slots: int = 0
    late_attempts: int = 0
    """Items for an end that is destroyed. None of them ever landed."""
    dropped_completions: int = 0
    trespasses: list[str] = field(default_factory=list)
    """Writes into memory that a test had forbidden."""


class FakeWire:
    """Shared by all fakes of a test. `held`: nothing moves by itself, `step` moves it.

    `retry_s`: how long an end that gets no answer tries. `delay_s`: pause before each item of the thread.
    `on_its_way`: items of each end that land although it, or the end that they go to, has failed meanwhile: what a NIC had
    sent already. They land with the next steps.
    """

    def __init__(self, *, held: bool = False, retry_s: float = 0.05, delay_s: float = 0.0, on_its_way: int = 0) -> None:
        self.retry_s, self.delay_s, self.on_its_way = retry_s, delay_s, on_its_way
        self.tally = Tally()
        self.fabrics: list[FakeFabric] = []
        self.changed = threading.Condition(threading.RLock())
        self._held = held
        self._closing = False
        self._ends: dict[int, FakeQueuePair] = {}
        self._turns: deque[FakeQueuePair] = deque()
        self._destroyed: set[int] = set()
        self._flights: deque[_Flight] = deque()
        self._fail_in: int | None = None
        self._forbidden: deque[tuple[int, int]] = deque(maxlen=FORBIDDEN_MAX)
        self._next_number = 17
        self._thread = threading.Thread(target=self._run, name="fake-wire", daemon=True)
        self._thread.start()

    # What a test does --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """When this returns nothing is under way, and nothing more moves but by `step`."""
        with self.changed:
            self._held = True

    def release(self) -> None:
        with self.changed:
            self._held = False
            self.changed.notify_all()

    def step(self, items: int = 1) -> int:
        """Moves up to so many items; fewer when all that is left waits for a slot or for an answer. Items that fail count."""
        with self.changed:
            return next((moved for moved in range(items) if not self._one()), items)

    def settle(self, items_max: int = 1_000_000) -> int:
        """Moves all that can be moved."""
        return self.step(items_max)

    def fail_at(self, nth: int) -> None:
        """The nth item from now on fails, and with it the ends that it goes from and to; 1 is the next one."""
        with self.changed:
            self._fail_in = nth

    def forbid(self, address: int, size_bytes: int) -> None:
        """From now on a write here is a fault of who posted or granted it: it lands, and stands in `tally.trespasses`."""
        with self.changed:
            self._forbidden.append((address, address + size_bytes))

    def wait(self, true: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Until something holds on the wire; raises AssertionError at the deadline."""
        until_s = time.monotonic() + timeout_s
        with self.changed:
            while not true():
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"{what}: awaited for {timeout_s} s; {self.tally}"
                self.changed.wait(min(left_s, 0.01))

    def close(self) -> None:
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the wire's thread did not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the fakes do --------------------------------------------------------------------------------------------------

    def enter(self, end: FakeQueuePair) -> int:
        """A number for a new end, never used twice."""
        number = self._next_number
        self._next_number += 1
        self._ends[number] = end
        self._turns.append(end)
        return number

    def leave(self, end: FakeQueuePair) -> None:
        del self._ends[end.number]
        self._turns.remove(end)
        self._destroyed.add(end.number)

    def broken(self, end: FakeQueuePair) -> None:
        """Before the work of an end that fails is flushed: what is on its way, from it and to it, stays so."""
        target = self._target(end)
        if target is not None:
            self._leaves(end, target)
            if target is not end and self._target(target) is end:
                self._leaves(target, end)

    # The thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self._closing and (self._held or not self._some()):
                    retrying = not self._held and any(end.sends for end in self._turns)
                    self.changed.wait(RETRY_LOOK_S if retrying else None)
                if self._closing:
                    return
            if self.delay_s:
                time.sleep(self.delay_s)

    def _some(self) -> bool:
        moved = self.step(1 if self.delay_s else BATCH_ITEMS)
        if moved:
            self.changed.notify_all()
        return bool(moved)

    def _one(self) -> bool:
        if self._flights:
            self._land(self._flights.popleft())
            return True
        for _ in range(len(self._turns)):
            end = self._turns[0]
            self._turns.rotate(-1)
            if end.sends and end.fabric.powered and self._advance(end, end.sends[0]):
                self.tally.items += 1
                return True
        return False

    def _advance(self, end: FakeQueuePair, work: Work) -> bool:
        """One item of an end's oldest work; False when it has to wait."""
        target = self._target(end)
        if target is None or not target.hears(end):
            return self._unanswered(end, work)
        work.tried_s = None
        if self._fails_now():
            end.break_down(INJECTED)
            target.break_down()
            return True
        return self._message(end, target, work) if work.opcode is Opcode.SEND else self._write(end, target, work)

    def _target(self, end: FakeQueuePair) -> FakeQueuePair | None:
        return self._ends.get(end.peer.qp_number) if end.peer is not None else None

    def _unanswered(self, end: FakeQueuePair, work: Work) -> bool:
        assert end.peer is not None
        now_s = time.monotonic()
        if work.tried_s is None:
            work.tried_s = now_s
            self.tally.late_attempts += end.peer.qp_number in self._destroyed
        if now_s - work.tried_s < self.retry_s:
            return False
        end.break_down(RETRY_EXCEEDED)
        return True

    def _fails_now(self) -> bool:
        if self._fail_in is None:
            return False
        self._fail_in -= 1
        if self._fail_in:
            return False
        self._fail_in = None
        return True

    def _no_slot(self, target: FakeQueuePair, work: Work) -> bool:
        if target.slots:
            return False
        self.tally.waits_for_slots += not work.waits
        work.waits = True
        return True

    def _message(self, end: FakeQueuePair, target: FakeQueuePair, work: Work) -> bool:
        if self._no_slot(target, work):
            return False
        address, _, size_bytes, key, *_ = work.rows[0]
        slot = target.slots[0]
        if not end.fabric.book.may_read(key, address, size_bytes):
            end.break_down(LOCAL_PROTECTION)
        elif not target.fabric.book.may_receive(slot.key, slot.address, slot.size_bytes):
            target.break_down(slot_status=LOCAL_PROTECTION)
            end.break_down(REMOTE_INVALID)
        elif size_bytes > slot.size_bytes:
            target.break_down(slot_status=LOCAL_LENGTH)
            end.break_down(REMOTE_INVALID)
        else:
            ctypes.memmove(slot.address, address, size_bytes)
            self.tally.messages += 1
            target.received(Opcode.RECEIVED, size_bytes, 0)
            end.sent()
        return True

    def _write(self, end: FakeQueuePair, target: FakeQueuePair, work: Work) -> bool:
        local, remote, size_bytes, local_key, remote_key, _ = work.rows[work.done]
        told = work.immediate if work.done == len(work.rows) - 1 else None
        if told is not None and self._no_slot(target, work):
            return False
        if not end.fabric.book.may_read(local_key, local, size_bytes):
            end.break_down(LOCAL_PROTECTION)
            return True
        if not target.fabric.book.may_be_written(remote_key, remote, size_bytes):
            end.break_down(REMOTE_ACCESS)
            target.break_down()
            return True
        self._landed(target, remote, size_bytes)
        ctypes.memmove(remote, local, size_bytes)
        work.done += 1
        if told is not None:
            target.received(Opcode.RECEIVED_IMMEDIATE, size_bytes, told)
        if work.done == len(work.rows):
            end.sent()
        return True

    def _leaves(self, end: FakeQueuePair, target: FakeQueuePair) -> None:
        rows = [row for work in end.sends if work.opcode is Opcode.WRITE for row in work.rows[work.done :]]
        for local, remote, size_bytes, local_key, remote_key, _ in rows[: self.on_its_way]:
            if end.fabric.book.may_read(local_key, local, size_bytes) and target.fabric.book.may_be_written(
                remote_key, remote, size_bytes
            ):
                self._flights.append(_Flight(target, remote, ctypes.string_at(local, size_bytes)))

    def _land(self, flight: _Flight) -> None:
        self.tally.items += 1
        if flight.target.destroyed:
            self.tally.late_attempts += 1
            return
        self._landed(flight.target, flight.address, len(flight.raw))
        ctypes.memmove(flight.address, flight.raw, len(flight.raw))

    def _landed(self, target: FakeQueuePair, address: int, size_bytes: int) -> None:
        assert not target.destroyed, f"a write of {size_bytes} B lands through end {target.number}, which is destroyed"
        self.tally.written_bytes += size_bytes
        trespass = any(address < end and start < address + size_bytes for start, end in self._forbidden)
        if trespass and len(self.tally.trespasses) < TRESPASSES_MAX:
            self.tally.trespasses.append(f"{size_bytes} B at {address:#x} through end {target.number}")


def failed(end: FakeQueuePair, work_id: int, status: str) -> Completion:
    """All but number and work are noise, as with a real one."""
    return Completion(end.number, work_id, False, Opcode.SEND, 0, 0, status)


def check_room(what: str, used: int, more: int, most: int) -> None:
    if used + more > most:
        raise FabricError(f"{what}: {used} of {most} places are taken, {more} more were posted")
