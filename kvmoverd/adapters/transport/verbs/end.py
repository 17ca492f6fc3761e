"""One end of a link's queue pair: messages, never more than the other end has slots for, and chains within the send queue.

All memory of its messages is its own, registered when it is made. What is posted completes in the order posted.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.fabric import Completion, Fabric, FabricError, Opcode, Registration, Writes
from kvmoverd.adapters.transport.verbs.messages import (
    ASK_BYTES,
    CREDITS_MAX,
    GRANT_BYTES,
    Credit,
    Message,
    MessageError,
    decode,
    with_credits,
)
from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

SEND_MAX = 1_024
"""Places of a send queue: rows of chains and messages that have not ended."""
MESSAGE_PLACES = 64
"""Of these, kept for messages."""
POSTED_BYTES_MAX = 32 << 20
"""Of chains that have not ended: many times what a round trip hides, and quickly drained when a sink is forgotten."""
CREDITS_KEPT = 1
"""Only a message that gives slots back may take the other end's last one: so two ends never wait for each other."""
SLOTS_MIN = 4

_SERIAL_SHIFT, _KIND_SHIFT = 40, 32
_INDEX_MASK = (1 << _KIND_SHIFT) - 1
_SERIALS = 1 << 24
_KIND_MASK = 0xFF
_RECEIVE, _MESSAGE, _CHAIN = 1, 2, 3
_KINDS = {_RECEIVE: "a receive", _MESSAGE: "a message", _CHAIN: "a chain"}

T = TypeVar("T")


class LinkBroken(Exception):
    """The link is of no more use; the message says why. `token`: whose chain failed, as far as can be told."""

    def __init__(self, message: str, token: object = None) -> None:
        super().__init__(message)
        self.token = token


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory for messages at one end."""

    receive_slots: int
    receive_bytes: int
    send_slots: int
    send_bytes: int


ASKER = Slots(16, GRANT_BYTES, 32, ASK_BYTES)
"""The end that sends layers: 260 KiB."""
GRANTER = Slots(64, ASK_BYTES, 16, GRANT_BYTES)
"""The end that is written to: its slots take immediates, too."""
LOOPED = Slots(0, 0, 0, 0)
"""An end that is connected to itself: no word is spoken."""


@dataclass(frozen=True, slots=True)
class Heard:
    message: Message


@dataclass(frozen=True, slots=True)
class Told:
    """The writes before this immediate have been applied."""

    immediate: int


@dataclass(frozen=True, slots=True)
class ChainEnd(Generic[T]):
    """A chain has left: its source is not read any more."""

    token: T


Outcome: TypeAlias = Heard | Told | ChainEnd[T] | None


@dataclass(frozen=True, slots=True)
class _Posted(Generic[T]):
    """Work that has not ended. `slot`: of a message; `token`: of a chain."""

    index: int
    places: int
    size_bytes: int
    token: T | None = None
    slot: int = -1


class LinkEnd(Generic[T]):
    """`serial`: no other end of this process has it now, or had it lately. `T`: whose a chain is. Raises `FabricError`."""

    def __init__(self, fabric: Fabric, slots: Slots, serial: int) -> None:
        self._slots = slots
        self._serial = serial % _SERIALS
        self._outbox: deque[bytes] = deque()
        self._free = list(range(slots.send_slots))
        self._posted: deque[_Posted[T]] = deque()
        self._posted_places = 0
        self._index = 0
        self._peer_slots = self._credits = self._owed = 0
        self.posted_bytes = 0
        self.connecting = False
        """Another thread has its queue pair."""
        self.given_up = False
        self._sends_at = slots.receive_slots * slots.receive_bytes
        self._memory, self._registration, self._key = self._register(fabric)
        self._address = int(self._memory.ctypes.data)
        try:
            self._queue_pair = fabric.make_queue_pair(send_max=SEND_MAX, receive_max=max(slots.receive_slots, 1))
        except FabricError:
            self._close_memory()
            raise

    @property
    def path(self) -> PathEnd:
        return self._queue_pair.end

    @property
    def number(self) -> int:
        return self.path.qp_number

    def connect(self, peer: PathEnd, marks: Marks, *, peer_slots: int) -> None:
        """`prepare` and `join` at once. Raises `FabricError`."""
        self.prepare(peer_slots)
        self.join(peer, marks)

    def prepare(self, peer_slots: int) -> None:
        """Receives are posted before: the other end may speak as soon as it can. Raises `FabricError`."""
        for slot in range(self._slots.receive_slots):
            self._post_receive(slot)
        self._peer_slots = self._credits = min(peer_slots, CREDITS_MAX)

    def join(self, peer: PathEnd, marks: Marks) -> None:
        """Takes a second where the peer's address does not answer. Raises `FabricError`."""
        self._queue_pair.connect(peer, marks)

    def say(self, message: Message) -> None:
        """Goes with the next `flush` that finds room."""
        self._outbox.append(message.encode())

    @property
    def unsaid(self) -> int:
        """Messages that wait for room."""
        return len(self._outbox)

    @property
    def drained(self) -> bool:
        """All that was posted has ended."""
        return not self._posted

    def flush(self) -> bool:
        """Posts what may be posted now; True when something was. Raises `FabricError`."""
        posted = False
        while self._outbox and self._free and self._credits > CREDITS_KEPT:
            self._post_message(self._outbox.popleft())
            posted = True
        if self._owed and self._owed >= self._slots.receive_slots // 2 and self._free and self._credits:
            self._post_message(Credit().encode())
            posted = True
        return posted

    @property
    def rows_free(self) -> int:
        """Rows of chains that the send queue takes now."""
        return SEND_MAX - MESSAGE_PLACES - self._posted_places

    @property
    def may_tell(self) -> bool:
        """Is there a slot for an immediate?"""
        return self._credits > CREDITS_KEPT

    def post_chain(self, rows: Writes, size_bytes: int, token: T, immediate: int | None) -> None:
        """Its end comes from `take`. Raises `FabricError`."""
        assert len(rows) <= self.rows_free, f"{len(rows)} rows for {self.rows_free} places"
        self._queue_pair.post_writes(rows, self._work_id(_CHAIN, self._next_index), immediate)
        self._credits -= immediate is not None
        self._enter(len(rows), size_bytes, token, -1)

    def take(self, done: Completion) -> Outcome[T]:
        """What a completion of this queue pair stands for. Raises `LinkBroken`, `FabricError`."""
        if done.work_id >> _SERIAL_SHIFT != self._serial:
            return None
        kind, index = done.work_id >> _KIND_SHIFT & _KIND_MASK, done.work_id & _INDEX_MASK
        if not done.ok:
            # What a queue pair fails with is its oldest work, whose own completion may come behind those that it flushed.
            token = self._posted[0].token if self._posted else None
            raise LinkBroken(f"{_KINDS.get(kind, 'work')} failed: {done.status}", token)
        if kind == _RECEIVE:
            return self._received(done, index)
        if not self._posted or self._posted[0].index != index:
            raise LinkBroken(
                f"{_KINDS.get(kind, 'work')} {index} completed, {len(self._posted)} wait and it is not the next"
            )
        work = self._posted.popleft()
        self._posted_places -= work.places
        self.posted_bytes -= work.size_bytes
        if work.token is not None:
            return ChainEnd(work.token)
        self._free.append(work.slot)
        return None

    def fail(self) -> None:
        """Nothing more leaves, and nothing lands that was not on its way. `destroy` follows."""
        self.given_up = True
        if self.connecting:
            return
        with contextlib.suppress(FabricError):
            self._queue_pair.fail()

    def destroy(self) -> bool:
        """Once it gives True nothing of this end reads or writes memory any more; else it may be tried again."""
        if self.connecting:
            return False
        try:
            self._queue_pair.destroy()
        except FabricError:
            return False
        self._close_memory()
        return True

    def _register(self, fabric: Fabric) -> tuple[npt.NDArray[np.uint8], Registration | None, int]:
        """Memory for messages, zeroed, and its local key. Without any slot there is none."""
        size_bytes = self._sends_at + self._slots.send_slots * self._slots.send_bytes
        try:
            memory = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)
        except OSError as error:
            raise FabricError(f"{size_bytes} bytes for the messages of a link can't be had: {error}") from error
        if not size_bytes:
            return memory, None, 0
        at = np.array([memory.ctypes.data], np.uint64)
        registration = fabric.register(int(at[0]), size_bytes, piece_bytes=size_bytes)
        return memory, registration, int(registration.keys(at, np.array([size_bytes], np.uint64))[0, 0])

    def _close_memory(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()

    def _received(self, done: Completion, slot: int) -> Outcome[T]:
        """Takes a message out of its slot, which is posted again at once and owed to the other end."""
        at = slot * self._slots.receive_bytes
        raw = self._memory[at : at + done.size_bytes].tobytes() if done.opcode is Opcode.RECEIVED else b""
        self._post_receive(slot)
        self._owed += 1
        if done.opcode is Opcode.RECEIVED_IMMEDIATE:
            return Told(done.immediate)
        try:
            slots_back, message = decode(raw)
        except MessageError as error:
            raise LinkBroken(str(error)) from error
        self._credits += slots_back
        if self._credits > self._peer_slots:
            raise LinkBroken(f"{slots_back} slots were given back, of {self._peer_slots} then {self._credits} are free")
        return Heard(message)

    def _post_receive(self, slot: int) -> None:
        size_bytes = self._slots.receive_bytes
        self._queue_pair.post_receive(
            self._address + slot * size_bytes, size_bytes, self._key, self._work_id(_RECEIVE, slot)
        )

    def _post_message(self, raw: bytes) -> None:
        slot = self._free[-1]
        at = self._sends_at + slot * self._slots.send_bytes
        self._memory_of(at, len(raw))[:] = np.frombuffer(with_credits(raw, self._owed), np.uint8)
        work_id = self._work_id(_MESSAGE, self._next_index)
        self._queue_pair.post_message(self._address + at, len(raw), self._key, work_id)
        self._free.pop()
        self._owed = 0
        self._credits -= 1
        self._enter(1, 0, None, slot)

    def _memory_of(self, at: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        assert size_bytes <= self._slots.send_bytes, f"a message of {size_bytes} B, a slot has {self._slots.send_bytes}"
        return self._memory[at : at + size_bytes]

    def _enter(self, places: int, size_bytes: int, token: T | None, slot: int) -> None:
        self._index = self._next_index
        self._posted.append(_Posted(self._index, places, size_bytes, token, slot))
        self._posted_places += places
        self.posted_bytes += size_bytes

    @property
    def _next_index(self) -> int:
        return self._index + 1 & _INDEX_MASK

    def _work_id(self, kind: int, index: int) -> int:
        return self._serial << _SERIAL_SHIFT | kind << _KIND_SHIFT | index
