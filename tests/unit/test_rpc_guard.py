"""Streams whose caller stops reading: the request behind them ends all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from rpc_kit import refusal_of

from kvmoverd.rpc import guard
from kvmoverd.rpc.guard import streaming

WAIT_S = 5.0
EVENT_BYTES = 16 << 10


class Talker:
    """A service that has much to say, a little at a time."""

    def __init__(self, events: int, pause_s: float = 0.0) -> None:
        self.events = events
        self.pause_s = pause_s
        self.closed = asyncio.Event()

    @streaming
    async def Talk(self, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(self.events):
                await asyncio.sleep(self.pause_s)
                yield bytes(EVENT_BYTES)
        finally:
            self.closed.set()


@asynccontextmanager
async def call_to(talker: Talker) -> AsyncIterator[Any]:
    """A call of `Talk` that is open."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(talker.Talk)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Talk": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_stream("/test/Talk")(b"")
    finally:
        await server.stop(0)


async def read_out(call: Any) -> int:
    """How many events were left."""
    async with asyncio.timeout(WAIT_S):
        return len([event async for event in call])


async def test_a_caller_that_stops_reading_holds_its_request_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "WRITE_S", 0.1)
    talker = Talker(events=10_000)
    async with call_to(talker) as call:
        await asyncio.wait_for(talker.closed.wait(), WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as given_up:
            await read_out(call)
        found = refusal_of(given_up.value)
        assert (found.code, found.reason, found.retryable) == (StatusCode.DEADLINE_EXCEEDED, "DEADLINE", True)
        assert "not read for 0.1 s" in found.message


async def test_a_caller_that_reads_is_heard_out_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WRITE_S", 0.05)
    talker = Talker(events=5, pause_s=0.06)
    async with call_to(talker) as call:
        assert await read_out(call) == 5
        assert await call.code() is StatusCode.OK
    assert talker.closed.is_set()


async def test_a_caller_that_goes_while_it_is_written_to_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC mostly cancels the call by itself; sometimes the write that runs just then fails first."""
    talker = Talker(events=2)
    began: list[str] = []

    class Gone:
        async def write(self, reply: object) -> None:
            began.append("write")
            raise grpc.aio.InternalError('Failed "execute_batch"')

        async def abort_with_status(self, status: object) -> None:
            began.append("abort")

    await talker.Talk(b"", Gone())
    assert began == ["write"]
    assert talker.closed.is_set()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
