"""etcd's v3 API over gRPC: calls with deadlines, over the first endpoint that answers, with its password and its TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from kvmover_proto import etcd_pb2
from kvmoverd.core.errors import ConfigError, PeerUnreachable

RANGE, PUT, TXN = "KV/Range", "KV/Put", "KV/Txn"
GRANT, REVOKE = "Lease/LeaseGrant", "Lease/LeaseRevoke"
WATCH, KEEP_ALIVE = "Watch/Watch", "Lease/LeaseKeepAlive"
AUTHENTICATE = "Auth/Authenticate"
MESSAGE_BYTES_MAX = 64 << 20
"""All members of a large cluster come in one answer."""
CLOSE_S = 1.0
HAS_LEADER = ("hasleader", "true")
"""A member that is cut off from its cluster ends a stream that asks for this; else its watches would be silent for ever."""

_REFUSED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""Another endpoint would say the same."""


class EtcdUnreachable(PeerUnreachable):
    """No endpoint has answered in time."""

    reason = "ETCD_UNREACHABLE"
    remedy = "check that etcd runs, and membership.etcd.endpoints"


class EtcdRefused(ConfigError):
    """etcd has answered, and will not do it: a wrong password, no permission."""

    reason = "ETCD_REFUSED"


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's name

    @classmethod
    def FromString(cls, data: bytes) -> Any: ...  # noqa: N802


Reply = TypeVar("Reply", bound=_Message)
EtcdStream = grpc.aio.StreamStreamCall[Any, Any]


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Where etcd is and who asks. `timeout_s`: for one call at one endpoint. `ca`, `cert`, `key`: PEM; with none of them there is
    no TLS, with `ca` alone the server is known and the client is not."""

    endpoints: tuple[str, ...]
    timeout_s: float = 2.0
    user: str = ""
    password: str = field(default="", repr=False)
    ca: bytes = b""
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)


class EtcdWire:
    """Connections are made when first asked for; a call goes to the endpoint that answered last, then to the others in turn."""

    def __init__(self, access: EtcdAccess) -> None:
        self.access = access
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._order = list(access.endpoints)
        self._token = ""

    async def call(self, method: str, request: _Message, reply: type[Reply]) -> Reply:
        """Raises `EtcdUnreachable` when no endpoint answers, `EtcdRefused`."""
        told = "no endpoint is given"
        for endpoint in list(self._order):
            try:
                answer = await self._asked(endpoint, method, request, reply)
            except grpc.aio.AioRpcError as error:
                told = f"{endpoint}: {error.code().name}: {error.details()}"
                if error.code() in _REFUSED:
                    raise EtcdRefused(f"etcd at {told}"[:512]) from error
                self._last(endpoint)
            else:
                self._first(endpoint)
                return answer
        raise EtcdUnreachable(f"etcd does not answer, of {len(self._order)} endpoints the last said: {told}"[:512])

    @asynccontextmanager
    async def stream(
        self, method: str, request: _Message, reply: type[Reply], *, within_s: float | None = None
    ) -> AsyncIterator[EtcdStream]:
        """A stream at the endpoint that answered last, with its first request sent within that time. Its end is the caller's to
        notice. Raises as `call` does, also inside.
        """
        endpoint = self._order[0]
        within_s = self.access.timeout_s if within_s is None else within_s
        try:
            async with asyncio.timeout(within_s):
                metadata = (*await self._metadata(endpoint), HAS_LEADER)
            opened = self._channel(endpoint).stream_stream(
                f"/etcdserverpb.{method}",
                request_serializer=_serialized,
                response_deserializer=reply.FromString,
            )(metadata=metadata)
            try:
                async with asyncio.timeout(within_s):
                    await opened.write(request)
                yield opened
            finally:
                opened.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            self._last(endpoint)
            if isinstance(error, grpc.aio.AioRpcError) and _token_is_old(error):
                self._token = ""
            raise EtcdUnreachable(f"etcd at {endpoint}: {_text_of(error)}"[:512]) from error

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        try:
            async with asyncio.timeout(CLOSE_S):
                for channel in channels:
                    await channel.close()
        except TimeoutError:
            return

    async def _asked(self, endpoint: str, method: str, request: _Message, reply: type[Reply]) -> Reply:
        """Once more with a new token where the old one is not known any more."""
        for last in (False, True):
            metadata = await self._metadata(endpoint)
            try:
                return await self._once(endpoint, method, request, reply, metadata)
            except grpc.aio.AioRpcError as error:
                if last or not self.access.user or not _token_is_old(error):
                    raise
                self._token = ""
        raise AssertionError("the last try returns or raises")

    async def _once(
        self, endpoint: str, method: str, request: _Message, reply: type[Reply], metadata: Sequence[tuple[str, str]]
    ) -> Reply:
        called: Callable[..., Any] = self._channel(endpoint).unary_unary(
            f"/etcdserverpb.{method}", request_serializer=_serialized, response_deserializer=reply.FromString
        )
        answer: Reply = await called(request, metadata=metadata, timeout=self.access.timeout_s)
        return answer

    async def _metadata(self, endpoint: str) -> tuple[tuple[str, str], ...]:
        if not self.access.user:
            return ()
        if not self._token:
            request = etcd_pb2.AuthenticateRequest(name=self.access.user, password=self.access.password)
            try:
                answer = await self._once(endpoint, AUTHENTICATE, request, etcd_pb2.AuthenticateResponse, ())
            except grpc.aio.AioRpcError as error:
                if not _needs_no_user(error):
                    raise
                return ()
            self._token = answer.token
        return (("token", self._token),)

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self._opened(endpoint)
        return channel

    def _opened(self, endpoint: str) -> grpc.aio.Channel:
        access = self.access
        options = (
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_http_proxy", 0),
            # A connection that leads nowhere is found out. etcd cuts off who asks more often than every 5 s.
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
        )
        if not (access.ca or access.cert):
            return grpc.aio.insecure_channel(endpoint, options=options)
        credentials = grpc.ssl_channel_credentials(access.ca or None, access.key or None, access.cert or None)
        return grpc.aio.secure_channel(endpoint, credentials, options=options)

    def _first(self, endpoint: str) -> None:
        if self._order[0] != endpoint:
            self._order.remove(endpoint)
            self._order.insert(0, endpoint)

    def _last(self, endpoint: str) -> None:
        self._order.remove(endpoint)
        self._order.append(endpoint)


def _serialized(message: _Message) -> bytes:
    return message.SerializeToString()


def _token_is_old(error: grpc.aio.AioRpcError) -> bool:
    """It has expired, its server was started anew, users and roles were changed since, or there was none: authentication is on
    only now."""
    text = error.details() or ""
    is_unknown = error.code() is grpc.StatusCode.UNAUTHENTICATED or "auth token" in text or "auth store" in text
    return is_unknown or "user name is empty" in text


def _needs_no_user(error: grpc.aio.AioRpcError) -> bool:
    """Authentication is off, so far: whoever switches it on gives daemons their user before."""
    return error.code() is grpc.StatusCode.FAILED_PRECONDITION and "not enabled" in (error.details() or "")


def _text_of(error: Exception) -> str:
    return (
        f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
    )
