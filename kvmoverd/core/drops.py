"""Why new blocks were not stored: a closed set, as counters and logs name them."""

from __future__ import annotations

import enum

from kvmoverd.core.status import Reason


class Drop(enum.Enum):
    """The values are the keys of `dropped_blocks` in NodeStatus."""

    NO_ROOM = "no room"
    """pool.write_back_bytes had none in time."""
    FULL_QUEUE = "full queue"
    """As many writes or requests wait as may."""
    DISK_FULL = "disk full"
    IO_ERROR = "io error"
    REFUSED = "storage refuses"
    """The main root takes no writes: it is left alone for a while, or does not know yet what it keeps."""
    PURGED = "purged"
    SHUTTING_DOWN = "shutting down"
    ENGINE_GONE = "engine gone"
    """Before its pages were copied."""
    CANCELLED = "cancelled"
    """By its engine, or by a higher attempt, before its pages were copied."""
    DEADLINE = "deadline"
    """The call's time was over before its pages were copied."""
    DISCARDED = "buffer discarded"
    """New blocks of an attempt that was cut, or whose request ended before its DE buffer was whole."""
    ERROR = "error"


_WRITES = {
    Reason.NO_SPACE: Drop.DISK_FULL,
    Reason.DROPPED: Drop.REFUSED,
    Reason.SHUTTING_DOWN: Drop.SHUTTING_DOWN,
    Reason.INTERNAL: Drop.ERROR,
}
_COPIES = {
    Reason.POOL_EXHAUSTED: Drop.NO_ROOM,
    Reason.TOO_BIG: Drop.NO_ROOM,
    Reason.SHUTTING_DOWN: Drop.SHUTTING_DOWN,
    Reason.ENGINE_GONE: Drop.ENGINE_GONE,
    Reason.CANCELLED: Drop.CANCELLED,
    Reason.STALE_ATTEMPT: Drop.CANCELLED,
    Reason.DEADLINE: Drop.DEADLINE,
}


def drop_of_write(reason: Reason) -> Drop:
    """Why a write that ended so has not stored its block.

    >>> drop_of_write(Reason.NO_SPACE).value
    'disk full'
    """
    assert reason is not Reason.OK, "a write that ended well drops nothing"
    return _WRITES.get(reason, Drop.IO_ERROR)


def drop_of_copy(reason: Reason) -> Drop:
    """Why the blocks of a call that ended so, before its pages were copied, will not be stored."""
    assert reason is not Reason.OK, "a call that ended well drops nothing"
    return _COPIES.get(reason, Drop.ERROR)
