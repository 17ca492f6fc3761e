"""The terminal reason that an error stands for."""

from __future__ import annotations

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.status import Reason

_BY_ERROR = {
    "QUEUE_FULL": Reason.POOL_EXHAUSTED,
    "TICKET_EXPIRED": Reason.LEASE_EXPIRED,
    "DRAINING": Reason.SHUTTING_DOWN,
    "REQUEST_TAKEN": Reason.STALE_ATTEMPT,
    "UNKNOWN_MODEL": Reason.PEER_LOST,
    "UNKNOWN_PEER": Reason.PEER_LOST,
    "PEER_MISMATCH": Reason.PEER_LOST,
}


def reason_of(error: KvmoverError) -> Reason:
    """Errors whose own reason is a terminal one keep it; those without are INTERNAL.

    A node that does not know the model has restarted, or its engine has not registered yet: as good as lost, for now. So is
    one whose place another has, and one that has not heard yet that this node is there.
    """
    return _BY_ERROR.get(error.reason) or Reason.__members__.get(error.reason, Reason.INTERNAL)
