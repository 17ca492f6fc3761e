"""A scheduler that says what a test wants: a real server in this loop, behind the real API."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from rpc_kit import free_port, until

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.core.errors import KvmoverError, NotLeading
from kvmoverd.rpc.errors import to_status

Context = grpc.aio.ServicerContext[Any, Any]
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1))
DEAD = "127.0.0.1:1"
"""Nobody listens there."""


@dataclass
class Rig(scheduler_pb2_grpc.SchedulerServicer):
    """Answers every call at once, until it is told otherwise. `refuses`: with what; `hold`: what calls wait for first.

    `answers`: by method, what a reply has beside the identity. `fences` go out with each answer to a report, `silent`: no report
    is answered.
    """

    boot_id: str = "s1"
    epoch: int = 0
    refuses: KvmoverError | None = None
    status: grpc.Status | None = None
    hold: Callable[[], Awaitable[object]] | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    fences: list[scheduler_pb2.Fence] = field(default_factory=list)
    report_again_ms: int = 20
    silent: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    requests: list[Any] = field(default_factory=list)
    reports: list[scheduler_pb2.ReportNodeRequest] = field(default_factory=list)
    streams: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None

    @property
    def identity(self) -> scheduler_pb2.SchedulerIdentity:
        return scheduler_pb2.SchedulerIdentity(boot_id=self.boot_id, epoch=self.epoch)

    def leads_not(self, leader: str = "") -> None:
        self.refuses = NotLeading(leader=leader)

    async def start(self, port: int = 0) -> Rig:
        self._server = grpc.aio.server(options=OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Its process has died; it may be started again at the same port."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def _answer(self, method: str, request: Any, context: Context, kind: Any) -> Any:
        self.calls[method] += 1
        self.requests.append(request)
        try:
            if self.hold is not None:
                await self.hold()
        except asyncio.CancelledError:
            self.cancelled[method] += 1
            raise
        await self._refuse(context)
        return kind(scheduler=self.identity, **self.answers.get(method, {}))

    async def _refuse(self, context: Context) -> None:
        if self.status is not None:
            await context.abort_with_status(self.status)
        if self.refuses is not None:
            await context.abort_with_status(to_status(self.refuses))

    async def Submit(self, request: Any, context: Context) -> Any:
        return await self._answer("Submit", request, context, scheduler_pb2.TicketReply)

    async def GetTicket(self, request: Any, context: Context) -> Any:
        return await self._answer("GetTicket", request, context, scheduler_pb2.TicketReply)

    async def Withdraw(self, request: Any, context: Context) -> Any:
        return await self._answer("Withdraw", request, context, scheduler_pb2.TicketReply)

    async def ChoosePath(self, request: Any, context: Context) -> Any:
        return await self._answer("ChoosePath", request, context, scheduler_pb2.ChoosePathReply)

    async def PullWork(self, request: Any, context: Context) -> Any:
        return await self._answer("PullWork", request, context, scheduler_pb2.PullWorkReply)

    async def Explain(self, request: Any, context: Context) -> Any:
        self.calls["Explain"] += 1
        await self._refuse(context)
        return scheduler_pb2.ExplainReply(text="why", json="{}")

    async def ReportNode(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        self.streams += 1
        await self._refuse(context)
        async for report in requests:
            self.reports.append(report)
            await self._refuse(context)
            if not self.silent:
                yield scheduler_pb2.ReportNodeReply(
                    scheduler=self.identity, report_again_ms=self.report_again_ms, fences=self.fences
                )

    async def reported(self, count: int = 1) -> scheduler_pb2.ReportNodeRequest:
        """Waits for so many reports from now on; the last of them."""
        seen = len(self.reports) + count
        await until(lambda: len(self.reports) >= seen, f"{count} reports")
        return self.reports[-1]


@asynccontextmanager
async def rigs(count: int = 1) -> AsyncIterator[list[Rig]]:
    made = [await Rig(boot_id=f"s{number}").start() for number in range(1, count + 1)]
    try:
        yield made
    finally:
        for rig in made:
            await rig.stop()
