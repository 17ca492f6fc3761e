"""The one table between the core's errors and gRPC: code, reason, retry bit, remedy, numbers."""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvmoverd.core import errors
from kvmoverd.core.errors import KvmoverError

DOMAIN = "kvmoverd"

CODES: dict[type[KvmoverError], grpc.StatusCode] = {
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PagesBusy: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRegion: grpc.StatusCode.NOT_FOUND,
    errors.UnknownRequest: grpc.StatusCode.NOT_FOUND,
    errors.UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotWhole: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TicketExpired: grpc.StatusCode.NOT_FOUND,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransportMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ManifestMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleAttempt: grpc.StatusCode.ABORTED,
    errors.PoolExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooBig: grpc.StatusCode.OUT_OF_RANGE,
    errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.StorageUnusable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TransportRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: KvmoverError) -> grpc.StatusCode:
    """The code of the error's class or of its nearest base in the table; INTERNAL for none."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def to_status(error: KvmoverError) -> grpc.Status:
    """A rich status with an `ErrorInfo` that carries reason, retry bit, remedy and numbers."""
    facts = {**error.details, "retryable": str(error.retryable).lower(), "remedy": error.remedy}
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    number = code_pb2.Code.Value(code_of(error).name)
    rich: grpc.Status = rpc_status.to_status(status_pb2.Status(code=number, message=str(error), details=[detail]))
    return rich


def from_call(error: grpc.aio.AioRpcError) -> KvmoverError:
    """The core's error that a peer raised, rebuilt; `PeerUnreachable` for anything else."""
    info = _error_info(error)
    code, text = error.code(), error.details() or ""
    if info is None:
        return errors.PeerUnreachable(f"{code.name}: {text}"[:512])
    kind = _BY_REASON.get(info.reason, KvmoverError)
    rebuilt = KvmoverError.__new__(kind)
    KvmoverError.__init__(rebuilt, text, **dict(info.metadata))
    return rebuilt


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _all_errors(kind: type[KvmoverError]) -> list[type[KvmoverError]]:
    return [kind, *(found for sub in kind.__subclasses__() for found in _all_errors(sub))]


_BY_REASON = {kind.reason: kind for kind in reversed(_all_errors(KvmoverError))}
