"""One session with the daemon: companion socket, token and gRPC channel. It lives until either end of the socket closes."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar

import grpc.aio

from kvmover_client.companion import Companion, Welcome
from kvmover_client.errors import BadRequest, DaemonGone, KvmoverError, QueueFull, TimedOut, from_rpc, was_cut
from kvmover_client.progress import ProgressPages
from kvmover_proto import engine_pb2_grpc

SESSION_KEY = "kvmover-session-bin"
MESSAGE_BYTES_MAX = 32 << 20
"""A leader's pull with all that its group holds is the largest message."""
CLOSE_S = 5.0
CUT_S = 1.0
"""A daemon that stops cuts its calls first, and closes the companion socket within so long."""
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Without its own connections a new session would share the old one's, and wait out its back-off after a restart.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Ends(Protocol):
    """A call that the link ends when the session is over."""

    def fail(self, error: KvmoverError) -> None: ...


def socket_path(endpoint: str) -> str:
    """Path of the engine API's socket. Raises `BadRequest` for an endpoint that is no Unix socket.

    >>> socket_path("unix:///run/kvmoverd/kvmoverd.sock")
    '/run/kvmoverd/kvmoverd.sock'
    """
    path = endpoint.removeprefix("unix://") if endpoint.startswith("unix://") else endpoint.removeprefix("unix:")
    if path == endpoint or not path:
        raise BadRequest(f"endpoint {endpoint!r} is refused, must be unix:///PATH")
    return path


class Link:
    """Built by `open`. When the daemon goes, every call that runs and every later one fails with `DaemonGone`."""

    def __init__(self, endpoint: str, *, calls_max: int) -> None:
        self.path = socket_path(endpoint)
        self.calls_max = calls_max
        self._gone: asyncio.Future[DaemonGone] = asyncio.get_running_loop().create_future()
        self._calls: set[Ends] = set()
        self._companion: Companion | None = None
        self.pages: ProgressPages | None = None
        self._channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=OPTIONS)
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self.stub = engine_pb2_grpc.EngineStub(self._channel)

    @classmethod
    async def open(
        cls, endpoint: str, *, name: str, timeout_s: float, calls_max: int, progress_page: bool = True
    ) -> tuple[Link, Welcome]:
        """Raises `DaemonGone`, `Refused`, `TimedOut`, `BadRequest`; nothing stays open then."""
        link = cls(endpoint, calls_max=calls_max)
        try:
            return link, await link._begin(name, timeout_s, progress_page=progress_page)
        except BaseException:
            await link.close()
            raise

    async def _begin(self, name: str, timeout_s: float, *, progress_page: bool) -> Welcome:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        self._companion = await Companion.connect(f"{self.path}.companion", self._lose, deadline_s)
        left_s = max(0.0, deadline_s - loop.time())
        welcome = await self._companion.hello(name, left_s, progress_page=progress_page)
        self.pages = self._companion.progress_pages(welcome)
        self._metadata = ((SESSION_KEY, welcome.session_token),)
        # A starting daemon opens the companion socket first.
        ready = asyncio.ensure_future(self._channel.channel_ready())
        try:
            await self._first_of(ready, max(0.0, deadline_s - loop.time()), "connecting")
        finally:
            ready.cancel()
        return welcome

    @property
    def companion(self) -> Companion:
        self.check()
        assert self._companion is not None, "a link without its companion was handed out"
        return self._companion

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._metadata

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    def check(self) -> None:
        """Raises `DaemonGone` once the session is over."""
        if self._gone.done():
            raise self._gone.result().with_traceback(None)

    def track(self, call: Ends) -> None:
        """The call fails when the session ends. Raises `DaemonGone`, `QueueFull`."""
        self.check()
        if len(self._calls) >= self.calls_max:
            raise QueueFull(f"{len(self._calls)} calls run, at most {self.calls_max} may")
        self._calls.add(call)

    def forget(self, call: Ends) -> None:
        self._calls.discard(call)

    async def ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Reply],
        request: Request,
        timeout_s: float,
        what: str,
    ) -> Reply:
        """One question, one answer. Raises what the daemon raised, `DaemonGone`, `TimedOut`."""
        self.check()
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        answer = asyncio.ensure_future(self._answer(call))
        try:
            return await self._first_of(answer, timeout_s, what)
        finally:
            call.cancel()
            answer.cancel()

    async def _first_of(self, answer: asyncio.Future[Reply], timeout_s: float, what: str) -> Reply:
        """The answer, or the end of the session, or of patience, whichever comes first."""
        # gRPC's own deadline is the better witness of a late answer, so it gets the first word.
        either: set[asyncio.Future[Any]] = {answer, self._gone}
        await asyncio.wait(either, timeout=timeout_s + 0.1, return_when=asyncio.FIRST_COMPLETED)
        if answer.cancelled():
            # Nobody has cancelled the caller: the channel was closed under the question.
            self.check()
            raise DaemonGone(f"{what}: the channel to {self.path} was closed before the answer", remedy="connect again")
        if answer.done():
            try:
                return answer.result()
            except KvmoverError:
                self.check()
                raise
        self.check()
        raise TimedOut(f"{what}: no answer within {timeout_s:g} s")

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Request, Reply]) -> Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise await self.meaning(error) from error

    async def meaning(self, error: grpc.aio.AioRpcError) -> KvmoverError:
        """What the daemon meant. When a call was cut it may have meant all of them: then it is the end of the session."""
        if was_cut(error):
            await asyncio.wait({self._gone}, timeout=CUT_S)
        return self._gone.result() if self._gone.done() else from_rpc(error)

    async def close(self) -> None:
        """Ends the session, and with it every call."""
        if self._companion is not None:
            self._companion.close()
        self._lose("this client closed its session")
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._channel.close()
        except TimeoutError:
            raise TimedOut(f"the channel to {self.path} did not close within {CLOSE_S:g} s") from None

    def _lose(self, why: str) -> None:
        if self._gone.done():
            return
        error = DaemonGone(f"{self.path}: {why}", remedy="connect again, then register models and regions again")
        self._gone.set_result(error)
        calls, self._calls = self._calls, set()
        for call in calls:
            call.fail(error)
        if self.pages is not None:
            self.pages.close()
