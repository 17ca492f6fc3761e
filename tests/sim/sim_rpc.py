"""gRPC without sockets: the channel and the server that the daemon's own clients and services run on, over `sim_net`.

Messages are serialised, and a call behaves as one of grpc.aio does: deadlines hold at both ends, a cancelled call cancels its
handler, a connection that breaks ends the calls over it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

import grpc
import grpc.aio
from sim_loop import OWNER, Process
from sim_net import Connection, Network

EOF = grpc.aio.EOF
NO_METADATA = grpc.aio.Metadata()


class Aborted(Exception):
    """A handler gave its call up."""


def failure(code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata = NO_METADATA) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, NO_METADATA, trailing, details)


class Host:
    """One daemon's server, and its connections to others' as a client."""

    def __init__(self, town: Town, process: Process, node: str) -> None:
        self.town = town
        self.process = process
        self.node = node
        self.handlers: dict[str, Any] = {}
        self.stopped = False
        self._connections: dict[Process, Connection] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered ones are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def connection_to(self, process: Process) -> Connection:
        known = self._connections.get(process)
        if known is None or known.broken:
            known = self.town.net.connect(self.process, process, self.town.patience_s)
            self._connections[process] = known
        return known


class Town:
    """Where daemons listen: by address."""

    def __init__(self, net: Network, patience_s: float) -> None:
        self.net = net
        self.patience_s = patience_s
        self.hosts: dict[str, Host] = {}
        self.clients: dict[Process, Host] = {}

    def channel(self, address: str, options: object = ()) -> Channel:
        """Stands for `grpc.aio.insecure_channel`."""
        owner = OWNER.get()
        assert owner is not None, "a channel of nobody"
        return Channel(self.clients[owner], address)


class Channel:
    def __init__(self, client: Host, address: str) -> None:
        self.client = client
        self.address = address

    def unary_unary(
        self, path: str, *, request_serializer: Any, response_deserializer: Any, **more: Any
    ) -> Callable[..., UnaryCall]:
        return lambda request, timeout=None: UnaryCall(
            self, path, request_serializer, response_deserializer, timeout, request
        )

    def stream_stream(
        self, path: str, *, request_serializer: Any, response_deserializer: Any, **more: Any
    ) -> Callable[..., StreamCall]:
        return lambda timeout=None: StreamCall(self, path, request_serializer, response_deserializer, timeout)

    async def close(self) -> None:
        for connection in list(self.client._connections.values()):
            connection.break_off("the channel was closed")


class _Call:
    """The calling end."""

    def __init__(self, channel: Channel, path: str, serialize: Any, deserialize: Any, timeout_s: float | None) -> None:
        self.path = path
        self._serialize, self._deserialize = serialize, deserialize
        self._client = channel.client
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._replies: deque[Any] = deque()
        self._serving: _Serving | None = None
        self._timer = self._loop.call_later(timeout_s, self._late) if timeout_s is not None else None
        host = self._client.town.hosts.get(channel.address)
        if host is None or host.process.is_dead or host.stopped:
            self._loop.call_later(
                self._client.town.net.latency_s(), self._fail, grpc.StatusCode.UNAVAILABLE, "connection refused"
            )
            self._connection = None
            return
        self._connection = self._client.connection_to(host.process)
        self._connection.on_broken.append((self._client.process, self._broken))
        self._serving = _Serving(self, host, self._connection, timeout_s)
        self._connection.send(host.process, self._serving.begin)

    def _send(self, work: Callable[..., object], *args: object) -> None:
        if self._connection is not None and self._serving is not None:
            self._connection.send(self._serving.host.process, work, *args)

    def _late(self) -> None:
        self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _broken(self, why: str) -> None:
        self._fail(grpc.StatusCode.UNAVAILABLE, why)

    def _fail(self, code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata = NO_METADATA) -> None:
        self._end(failure(code, details, trailing))

    def _end(self, error: BaseException | None) -> None:
        if self._over:
            return
        self._over, self._error = True, error
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.on_broken[:] = [entry for entry in self._connection.on_broken if entry[1] != self._broken]
        self._changed.set()

    def take(self, raw: bytes) -> None:
        """A reply has come."""
        if not self._over:
            self._replies.append(self._deserialize(raw))
            self._changed.set()

    def take_status(self, code: grpc.StatusCode | None, details: str, trailing: grpc.aio.Metadata) -> None:
        """The last word of the handler; `code` None: OK."""
        self._end(None if code is None else failure(code, details, trailing))

    def cancel(self) -> bool:
        if self._over:
            return False
        if not self._client.process.is_dead and self._serving is not None:
            self._send(self._serving.cancel)
        self._end(asyncio.CancelledError())
        return True

    def done(self) -> bool:
        return self._over

    async def _next(self) -> Any:
        """The next reply; EOF at the end. Raises what the call failed with."""
        while not self._replies:
            if self._over:
                if self._error is not None:
                    raise self._error
                return EOF
            self._changed.clear()
            await self._changed.wait()
        return self._replies.popleft()


class UnaryCall(_Call):
    def __init__(
        self, channel: Channel, path: str, serialize: Any, deserialize: Any, timeout_s: float | None, request: Any
    ) -> None:
        super().__init__(channel, path, serialize, deserialize, timeout_s)
        if self._serving is not None:
            self._send(self._serving.take, serialize(request))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        try:
            reply = await self._next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert reply is not EOF, f"{self.path} ended without a reply"
        return reply


class StreamCall(_Call):
    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)
        if self._over:
            raise self._error if isinstance(self._error, grpc.aio.AioRpcError) else asyncio.InvalidStateError("over")
        if self._serving is not None:
            self._send(self._serving.take, self._serialize(message))

    async def read(self) -> Any:
        return await self._next()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (reply := await self._next()) is not EOF:
            yield reply


class _Serving:
    """The called end, and the context that its handler gets."""

    def __init__(self, call: _Call, host: Host, connection: Connection, timeout_s: float | None) -> None:
        self.host = host
        self._call = call
        self._connection = connection
        self._timeout_s = timeout_s
        self._requests: deque[bytes] = deque()
        self._changed: asyncio.Event | None = None
        self._task: asyncio.Task[Any] | None = None
        self._handler = host.handlers.get(call.path)
        self._status: Any = None

    def begin(self) -> None:
        if self.host.stopped or self._handler is None:
            self._reply_status(grpc.StatusCode.UNAVAILABLE, "not serving", NO_METADATA)
            return
        self._changed = asyncio.Event()
        self._connection.on_broken.append((self.host.process, self._broken))
        self._task = asyncio.get_running_loop().create_task(self._serve())
        if self._timeout_s is not None:
            asyncio.get_running_loop().call_later(self._timeout_s, self.cancel)

    def take(self, raw: bytes) -> None:
        self._requests.append(raw)
        if self._changed is not None:
            self._changed.set()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _broken(self, why: str) -> None:
        self.cancel()

    async def _serve(self) -> None:
        handler = self._handler
        try:
            if handler.response_streaming:
                await handler.stream_stream(self._messages(), self)
            else:
                request = await anext(self._messages())
                reply = await handler.unary_unary(request, self)
                self._to_caller(self._call.take, handler.response_serializer(reply))
            self._reply_status(None, "", NO_METADATA)
        except Aborted:
            status = self._status
            trailing = grpc.aio.Metadata(*status.trailing_metadata)
            self._reply_status(status.code, status.details, trailing)
        finally:
            self._connection.on_broken[:] = [entry for entry in self._connection.on_broken if entry[1] != self._broken]

    async def _messages(self) -> AsyncIterator[Any]:
        assert self._changed is not None, "not begun"
        while True:
            while self._requests:
                yield self._handler.request_deserializer(self._requests.popleft())
            self._changed.clear()
            await self._changed.wait()

    async def write(self, message: Any) -> None:
        self._to_caller(self._call.take, self._handler.response_serializer(message))
        await asyncio.sleep(0)

    async def abort_with_status(self, status: Any) -> Coroutine[Any, Any, None]:
        self._status = status
        raise Aborted

    def _to_caller(self, work: Callable[..., object], *args: object) -> None:
        self._connection.send(self._call._client.process, work, *args)

    def _reply_status(self, code: grpc.StatusCode | None, details: str, trailing: grpc.aio.Metadata) -> None:
        self._to_caller(self._call.take_status, code, details, trailing)
