"""Errors of the client library: one class per decision a caller can take, rebuilt from what the daemon sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, cast

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvmover_client.words import End

DOMAIN = "kvmoverd"
TEXT_MAX = 512


class KvmoverError(Exception):
    """Base. `reason` is stable and machine-readable; `retryable`: the same call may succeed later; `remedy`: what to do.

    `details` carries the numbers of the message by name.
    """

    reason_default: ClassVar[str] = "INTERNAL"
    retryable_default: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retryable: bool | None = None,
        remedy: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.reason_default
        self.retryable = self.retryable_default if retryable is None else retryable
        self.remedy = remedy
        self.details = dict(details or {})


class BadRequest(KvmoverError):
    """A value outside its bounds: the call must be changed."""

    reason_default = "BAD_REQUEST"


class BadLayout(BadRequest):
    reason_default = "BAD_LAYOUT"


class BadManifest(BadRequest):
    reason_default = "BAD_MANIFEST"


class BadKeys(BadRequest):
    reason_default = "BAD_KEYS"


class BadRegion(BadRequest):
    reason_default = "BAD_REGION"


class BadPages(BadRequest):
    reason_default = "BAD_PAGES"


class BadPlan(BadRequest):
    reason_default = "BAD_PLAN"


class BadReport(BadRequest):
    """A leader's pull that its scheduler does not take: a value out of its bounds, or a sequence number that does not rise."""

    reason_default = "BAD_REPORT"


class UnknownPeer(BadRequest):
    """The plan names a decode node that the daemon does not know."""

    reason_default = "UNKNOWN_PEER"


class TooBig(BadRequest):
    """Could never fit, however long it waits."""

    reason_default = "TOO_BIG"


class NotRegistered(KvmoverError):
    """Register again what the call names."""


class UnknownModel(NotRegistered):
    reason_default = "UNKNOWN_MODEL"


class UnknownRegion(NotRegistered):
    reason_default = "UNKNOWN_REGION"


class UnknownRequest(KvmoverError):
    """No such request on this node: it ended, or never began."""

    reason_default = "UNKNOWN_REQUEST"


class StaleAttempt(KvmoverError):
    """A higher attempt of this request is known: this one is over."""

    reason_default = "STALE_ATTEMPT"


class RequestTaken(KvmoverError):
    """A live request of another engine has this name: choose a new one."""

    reason_default = "REQUEST_TAKEN"


class StaleEpoch(KvmoverError):
    """The model's epoch has moved on: register it with the one named."""

    reason_default = "STALE_EPOCH"


class NotWhole(KvmoverError):
    """Deliver before every layer of every part arrived: wait for `AssembleCall.whole`."""

    reason_default = "NOT_WHOLE"
    retryable_default = True


class PagesBusy(KvmoverError):
    """Another live request writes some of these pages: wait until it is quiet."""

    reason_default = "PAGES_BUSY"


class TicketExpired(KvmoverError):
    """The decode node's buffer is no longer held: start again under a higher attempt."""

    reason_default = "TICKET_EXPIRED"
    retryable_default = True


class Refused(KvmoverError):
    """The node's configuration or stored data forbids it: an operator's matter, see `remedy`."""

    reason_default = "REFUSED"


class ManifestMismatch(Refused):
    """The store holds another manifest under this fingerprint; the message names the field."""

    reason_default = "MANIFEST_MISMATCH"


class StorageUnusable(Refused):
    reason_default = "STORAGE_UNUSABLE"


class NoScheduler(Refused):
    """The daemon's config names no scheduler."""

    reason_default = "NO_SCHEDULER"


class NoCuda(Refused):
    """GPU memory, and no CUDA that could open it: the daemon's, or this process's own."""

    reason_default = "NO_CUDA"


class Unavailable(KvmoverError):
    """Nothing was taken, or the call was cut while it went on; the same one, or the next attempt, may succeed later."""

    reason_default = "UNAVAILABLE"
    retryable_default = True


class PoolExhausted(Unavailable):
    reason_default = "POOL_EXHAUSTED"


class QueueFull(Unavailable):
    reason_default = "QUEUE_FULL"


class Draining(Unavailable):
    """The daemon takes no new requests: use another node."""

    reason_default = "DRAINING"


class SchedulerUnreachable(Unavailable):
    """No scheduler that leads has answered the daemon: ask again after a pause."""

    reason_default = "SCHEDULER_UNREACHABLE"


class PeerLost(Unavailable):
    """The other node's daemon can't be reached."""

    reason_default = "PEER_LOST"


class DaemonGone(KvmoverError):
    """The session has ended: connect again, then register models and regions again."""

    reason_default = "DAEMON_GONE"
    retryable_default = True


class UnknownSession(DaemonGone):
    """The daemon does not know this session: it restarted, or it saw the session end."""

    reason_default = "UNKNOWN_SESSION"


class TimedOut(KvmoverError, TimeoutError):
    """Not within the time given. What was asked for may still happen."""

    reason_default = "DEADLINE"
    retryable_default = True


class CallCancelled(KvmoverError):
    """The call was closed before its end, by this side."""

    reason_default = "CANCELLED"


class RequestFailed(KvmoverError):
    """The scheduler has given a request up: it waited too long for its engines, or was given out too often."""

    reason_default = "REQUEST_FAILED"


class RequestWithdrawn(KvmoverError):
    """A request that its client has left."""

    reason_default = "REQUEST_WITHDRAWN"


class RequestEnded(KvmoverError):
    """A call ended before what was awaited could happen. `end` says why, and what of it is good."""

    def __init__(self, end: End, awaited: str) -> None:
        super().__init__(
            f"ended with {end.reason.name} before {awaited}{': ' if end.message else ''}{end.message}",
            reason=end.reason.name,
            retryable=end.retryable,
            remedy=end.remedy,
            details={"prefix_blocks": str(end.prefix_blocks)},
        )
        self.end = end


def from_rpc(error: grpc.aio.AioRpcError) -> KvmoverError:
    """What the daemon meant: from its `ErrorInfo`, or from the code alone when gRPC itself ended the call."""
    text = (error.details() or "")[:TEXT_MAX]
    info = _error_info(error)
    if info is None:
        unnamed = _too_large(text) or _broken(error.code(), text) or _BY_CODE.get(error.code(), KvmoverError)
        return unnamed(f"{error.code().name}: {text}")
    facts: dict[str, str] = dict(info.metadata)
    reason: str = info.reason
    retryable, remedy = facts.pop("retryable", ""), facts.pop("remedy", "")
    kind: type[KvmoverError] = _BY_REASON.get(reason) or _UNNAMED_BY_CODE.get(error.code(), KvmoverError)
    return kind(
        text,
        reason=reason,
        retryable=retryable == "true" if retryable else None,
        remedy=remedy,
        details=facts,
    )


def was_cut(error: grpc.aio.AioRpcError) -> bool:
    """Did gRPC itself end the call, without a word of the daemon? That is what a daemon does that stops, or goes, in the middle.

    What this side has cancelled raises `asyncio.CancelledError`, and never comes here.
    """
    return error.code() in _CUT and _error_info(error) is None


def from_companion(text: str) -> KvmoverError:
    """What the daemon refused on the companion socket, as "REASON: message"; `Refused` for a reason unknown here."""
    reason, _, message = text.partition(": ")
    kind = _BY_REASON.get(reason)
    return kind(message) if kind is not None else Refused(text)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        # It reads code, details and trailing metadata only, which the error has.
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):
        # Details that contradict the status are not the daemon's; the code alone still says what to do.
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _too_large(text: str) -> type[KvmoverError] | None:
    """gRPC says with one code that a message is too large, and that the server is busy; only the first is final."""
    return TooBig if "larger than max" in text else None


def _broken(code: grpc.StatusCode, text: str) -> type[KvmoverError] | None:
    """gRPC has the code INTERNAL for faults of this very process too; only a connection that broke may be whole later."""
    is_broken = code is grpc.StatusCode.INTERNAL and any(words in text for words in _BROKEN_WORDS)
    return Unavailable if is_broken else None


def _concrete(kind: type[KvmoverError]) -> Iterator[type[KvmoverError]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _concrete(sub)


_BY_REASON = {kind.reason_default: kind for kind in _concrete(KvmoverError) if kind is not RequestEnded}
_UNNAMED_BY_CODE: dict[grpc.StatusCode, type[KvmoverError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.OUT_OF_RANGE: BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: DaemonGone,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.CANCELLED: CallCancelled,
}
"""For reasons that a newer daemon may have: the decision is still that of the code."""
_BY_CODE: dict[grpc.StatusCode, type[KvmoverError]] = {
    **_UNNAMED_BY_CODE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    # On a Unix socket nothing lies between the two ends: a broken connection is a daemon that went.
    grpc.StatusCode.UNAVAILABLE: DaemonGone,
    # As a status of the other end it is a call that the daemon has cut, which may be made again.
    grpc.StatusCode.CANCELLED: Unavailable,
}
_CUT = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
_BROKEN_WORDS = ("Internal error from Core", "RST_STREAM", "GOAWAY", "Stream removed")
