"""What an engine does about each end of a call: the remedy in every `Terminal`."""

from __future__ import annotations

from kvmoverd.core.status import Reason

REMEDIES: dict[Reason, str] = {
    Reason.OK: "",
    Reason.PREFIX_CUT: "recompute from prefix_blocks on, under the next attempt",
    Reason.CANCELLED: "",
    Reason.DEADLINE: "try again under the next attempt, with a longer timeout_ms if the node is not overloaded",
    Reason.ENGINE_GONE: "open a session again, register models and regions, and try again under the next attempt",
    Reason.PEER_LOST: "try again under the next attempt, with another node if this one stays away",
    Reason.POOL_EXHAUSTED: "try again under the next attempt after a pause, or raise the limit that is named",
    Reason.MISS: "compute the missing blocks",
    Reason.CORRUPT: "compute the blocks and store them again: the damaged record is not used any more",
    Reason.SHORT_READ: "compute the blocks and store them again: the short record is not used any more",
    Reason.IO_ERROR: "compute the blocks; look at the storage and at the daemon's log for the errno",
    Reason.NO_SPACE: "make room in the storage root, then store the blocks again",
    Reason.STALE_ATTEMPT: "leave the request to its higher attempt, or begin anew under a new request_id",
    Reason.LEASE_EXPIRED: "try again under the next attempt; renew leases, and attach to reservations, in time",
    Reason.SHUTTING_DOWN: "try again on another node, or when this one is back",
    Reason.DROPPED: "store the blocks again when the node is less busy, or compute them when they are needed",
    Reason.INTERNAL: "report it with the daemon's log; try again under a new request_id",
    Reason.TOO_BIG: "send a shorter request, or raise the limit that is named",
}
"""Every reason is here; those without a remedy need none."""
