"""The one table between the core's errors and gRPC: code, reason, retry bit, remedy, numbers."""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvmoverd.core import errors
from kvmoverd.core.errors import KvmoverError

DOMAIN = "kvmoverd"
MESSAGE_BYTES_MAX = 512
FACT_BYTES_MAX = 128

CODES: dict[type[KvmoverError], grpc.StatusCode] = {
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PagesBusy: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRegion: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    errors.UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotWhole: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotRead: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.TicketExpired: grpc.StatusCode.NOT_FOUND,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransportMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ManifestMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleAttempt: grpc.StatusCode.ABORTED,
    errors.RequestTaken: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooBig: grpc.StatusCode.OUT_OF_RANGE,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.NotLeading: grpc.StatusCode.UNAVAILABLE,
    errors.NoScheduler: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SchedulerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageUnusable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransportRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoCuda: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: KvmoverError) -> grpc.StatusCode:
    """The code of the error's class or of its nearest base in the table; INTERNAL for none."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


class PassedOn(KvmoverError):
    """What another process of ours refused a call with, for a caller who is to hear the very same."""

    def __init__(self, error: grpc.aio.AioRpcError, info: error_details_pb2.ErrorInfo) -> None:
        super().__init__(error.details() or info.reason, **dict(info.metadata))
        self.said: grpc.Status = rpc_status.to_status(rpc_status.from_call(error))  # type: ignore[arg-type]


def to_status(error: KvmoverError) -> grpc.Status:
    """A rich status with an `ErrorInfo` that carries reason, retry bit, remedy and numbers.

    Texts are clipped: all of it travels in trailers, and a peer refuses trailers of more than 8 KiB.
    """
    if isinstance(error, PassedOn):
        return error.said
    facts = {name: _clipped(value, FACT_BYTES_MAX) for name, value in error.details.items()}
    facts |= {"retryable": str(error.retryable).lower(), "remedy": error.remedy}
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    number = code_pb2.Code.Value(code_of(error).name)
    message = _clipped(str(error), MESSAGE_BYTES_MAX)
    rich: grpc.Status = rpc_status.to_status(status_pb2.Status(code=number, message=message, details=[detail]))
    return rich


def fault_status(method: str, error: Exception) -> grpc.Status:
    """For a fault of this daemon: the caller learns that there is one, the log has the rest."""
    return to_status(KvmoverError(f"{method} failed with {type(error).__name__}; the daemon's log says more"))


def from_call(error: grpc.aio.AioRpcError) -> KvmoverError:
    """The core's error that a peer raised, rebuilt; what gRPC itself ended the call with is judged by its code."""
    info = error_info(error)
    code, text = error.code(), error.details() or ""
    if info is None:
        kind = errors.TooBig if _TOO_LARGE in text else _UNNAMED_BY_CODE.get(code, errors.PeerUnreachable)
        return _rebuilt(kind, f"{code.name}: {text}"[:MESSAGE_BYTES_MAX], {})
    known = _named(info.reason) or _UNNAMED_BY_CODE.get(code, KvmoverError)
    return _rebuilt(known, text, dict(info.metadata))


def _rebuilt(kind: type[KvmoverError], text: str, details: dict[str, str]) -> KvmoverError:
    """Without the class's own constructor, which asks for numbers and makes the text anew."""
    made = kind.__new__(kind, text)
    made.details = {name: value for name, value in details.items() if name not in ("retryable", "remedy")}
    return made


def _clipped(text: str, bytes_max: int) -> str:
    """At most `bytes_max` bytes of UTF-8; what UTF-8 can't say, such as parts of a broken file name, becomes "?"."""
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """What a daemon of ours said; None when gRPC itself, or someone else, ended the call."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (ValueError, DecodeError):
        # Details that contradict the status are not our daemon's; the code alone still says what to do.
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _all_errors(kind: type[KvmoverError]) -> list[type[KvmoverError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in _all_errors(sub))]


def _named(reason: str) -> type[KvmoverError] | None:
    """Looked for each time: modules with errors of their own may be loaded later than this one."""
    return next((kind for kind in _all_errors(KvmoverError) if kind.reason == reason), None)


_TOO_LARGE = "larger than max"
"""gRPC's own words: one code stands both for a message that is too large and for a server that is busy."""
_UNNAMED_BY_CODE: dict[grpc.StatusCode, type[KvmoverError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnreachable,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolMismatch,
}
"""For calls that gRPC ended, and for reasons that only a newer daemon has: the decision is still that of the code."""
