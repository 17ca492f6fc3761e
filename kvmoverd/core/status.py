"""Why a request or a block ended as it did: closed sets, the same names as in `common.proto`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """End of a request or of one block. The values are the numbers of `kvmover.v1.Reason`."""

    OK = 1
    PREFIX_CUT = 2
    CANCELLED = 3
    DEADLINE = 4
    ENGINE_GONE = 5
    PEER_LOST = 6
    POOL_EXHAUSTED = 7
    MISS = 8
    CORRUPT = 9
    SHORT_READ = 10
    IO_ERROR = 11
    NO_SPACE = 12
    STALE_ATTEMPT = 13
    LEASE_EXPIRED = 14
    SHUTTING_DOWN = 15
    DROPPED = 16
    INTERNAL = 17
    TOO_BIG = 18

    # A member is one object: hashing by identity is right, and many times faster than by name.
    __hash__ = object.__hash__


RETRYABLE = frozenset(
    {
        Reason.PREFIX_CUT,
        Reason.DEADLINE,
        Reason.PEER_LOST,
        Reason.POOL_EXHAUSTED,
        Reason.NO_SPACE,
        Reason.SHUTTING_DOWN,
        Reason.DROPPED,
        Reason.LEASE_EXPIRED,
    }
)


class BlockState(enum.Enum):
    """State of one block in an answer. The values are the numbers of `kvmover.v1.BlockState`."""

    HIT = 1
    MISS = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """What became of one block."""

    state: BlockState
    reason: Reason

    @classmethod
    def of(cls, reason: Reason) -> BlockOutcome:
        """
        >>> BlockOutcome.of(Reason.MISS).state
        <BlockState.MISS: 2>
        """
        if reason is Reason.OK:
            return cls(BlockState.HIT, reason)
        return cls(BlockState.MISS if reason is Reason.MISS else BlockState.FAILED, reason)


class Path(enum.Enum):
    """Whose storage NIC reads the hit blocks. The values are the numbers of `kvmover.v1.Path`.

    AUTO: the nodes decide from their queues; PARTS: as the request says.
    """

    PE = 1
    DE = 2
    AUTO = 3
    PARTS = 4


@dataclass(frozen=True, slots=True)
class End:
    """Terminal status of one call.

    `pages_quiet` false: a device may still touch the engine's pages. `prefix_blocks`: blocks [0, n) of the request are good.
    """

    reason: Reason
    message: str = ""
    pages_quiet: bool = True
    prefix_blocks: int = 0
    moved_bytes: int = 0
    storage_read_bytes: int = 0
