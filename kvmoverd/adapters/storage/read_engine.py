"""What reads many open files at once, in depth and without a thread each: io_uring, or the like of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.ports.storage import BlockRead


@dataclass(frozen=True, slots=True)
class Ends:
    """What becomes of a read: each ends in exactly one of these, in any thread, and the record is the callee's to let go."""

    came: Callable[[BlockRead, Opened], None]
    """All bytes of the span, not checked."""
    failed: Callable[[BlockRead, Opened, OSError], None]
    given_up: Callable[[BlockRead, Opened], None]
    """Not read, or not to the end, and the device has let go of the slot: others may read it."""


@dataclass(slots=True, eq=False)
class Flight:
    """A read under way: `done_bytes` of its span have come. `offset_bytes` is in the file."""

    op: BlockRead
    opened: Opened
    address: int
    size_bytes: int
    offset_bytes: int
    done_bytes: int = 0
    tries: int = 0


class ReadEngine(Protocol):
    """Reads until it misbehaves: then it takes no more, and only waits for what is under way."""

    @property
    def poisoned(self) -> str:
        """Why it is out of use; empty while it is good. What is put then is given up."""

    @property
    def strays(self) -> int:
        """Completions that nobody waited for."""

    def put(self, op: BlockRead, opened: Opened) -> None:
        """Reads the span of `op`, which is not empty, from byte `opened.offset_bytes` of its file on; for any thread."""

    def stop(self) -> None:
        """Its thread ends when no read is under way any more; what is not begun is given up."""

    def join(self, deadline_s: float) -> bool:
        """Waits for it until a time of `time.monotonic`; True when it has ended: no device has a slot then."""

    def close(self) -> None:
        """Closes what it reads with; only when `join` said True and nobody puts any more."""
