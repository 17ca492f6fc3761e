"""The scheduler's calls through the engine API: passed on to whichever scheduler leads, for engines and routers of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import grpc.aio

from kvmover_proto import engine_pb2, scheduler_pb2
from kvmoverd.core.errors import NoScheduler, QueueFull
from kvmoverd.core.scheduling.reports import NAME_CHARS_MAX, BadReport
from kvmoverd.node.node import Node
from kvmoverd.node.sessions import Session
from kvmoverd.rpc.guard import answering
from kvmoverd.rpc.lost_groups import LostGroups, PulledFor
from kvmoverd.rpc.node_reporting import NodeReporter
from kvmoverd.rpc.scheduler_link import MESSAGE_BYTES_MAX, Begin, SchedulerLink

WAITS_MAX = 2048
"""Calls at once that wait for a change of a ticket: half of what the engine API takes, by default."""
RETRY_AFTER_MS = 100
FAREWELL_S = 0.5
"""How long the answer to the last report may take."""
WAIT_S_MAX = 60.0
"""The longest that the scheduler lets a call wait for a change."""
RELAY_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
"""Of a server that passes calls on: what it takes and gives is as large as the scheduler's own."""

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply")


class SchedulerSide:
    """This node and its scheduler: calls that are passed on, reports, fences."""

    def __init__(
        self, node: Node, addresses: Callable[[], Sequence[str]], *, timeout_s: float, waits_max: int = WAITS_MAX
    ) -> None:
        """`waits_max`: calls that wait for a change leave room for others in the server."""
        self._node = node
        self._waits, self._waits_max = 0, waits_max
        self._link = SchedulerLink(addresses, timeout_s=timeout_s)
        self._lost = LostGroups()
        self._reporter = NodeReporter(node, self._link, self._lost)
        self._reporting: asyncio.Task[None] | None = None
        node.on_session_ended.append(self._lost.session_ended)
        node.decode_side.fences_asked = self._reporter.fences_asked

    def start(self) -> None:
        self._reporting = asyncio.get_running_loop().create_task(self._reporter.run())

    async def close(self) -> None:
        """Says that this node drains, if it does; no more reports then, and calls that are passed on end."""
        if self._reporting is not None:
            await self._reporter.report_now(FAREWELL_S)
            self._reporting.cancel()
            await asyncio.wait((self._reporting,))
        self._lost.close()
        await self._link.close()

    async def ask(self, context: Context, begin: Begin[Reply], *, wait_s: float = 0.0) -> Reply:
        """The scheduler's answer. Raises `PassedOn`, `SchedulerUnreachable`, and `QueueFull` for one that would wait."""
        with self._waiting() if wait_s else nullcontext():
            return await self._link.ask(begin, wait_s=wait_s, left_s=context.time_remaining())

    async def pull(
        self, session: Session, request: scheduler_pb2.PullWorkRequest, context: Context
    ) -> scheduler_pb2.PullWorkReply:
        """As `ask`. What the answer ends is over on this node before the leader hears of it. Raises `BadReport`, too."""
        _check_names(request)
        request.node = self._node.services.node
        group = PulledFor(request.group, request.boot_id)
        self._lost.pulled(group, session.session_id)
        try:
            reply = await self.ask(context, lambda stub, left_s: stub.PullWork(request, timeout=left_s))
        finally:
            if not session.alive:
                # The scheduler may have heard this pull after it was told that the leader is gone.
                self._lost.pulled(group, session.session_id)
                self._lost.session_ended(session.session_id)
        self._reporter.apply(_ended_by(reply.deliveries))
        return reply

    def status(self) -> engine_pb2.SchedulerStatus:
        link, reporter = self._link, self._reporter
        return engine_pb2.SchedulerStatus(
            state="reports" if reporter.answers else "unreachable",
            address=link.address,
            boot_id=link.boot_id,
            epoch=link.epoch,
            answered_ms=link.answered_ms,
            reports=reporter.reports,
            fences=reporter.fences,
            calls=link.calls,
            why="" if reporter.answers else link.why,
        )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Raises `QueueFull`."""
        if self._waits >= self._waits_max:
            text = f"{self._waits} calls wait for the scheduler, at most {self._waits_max} can"
            raise QueueFull(text, retry_after_ms=RETRY_AFTER_MS)
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1


def _check_names(request: scheduler_pb2.PullWorkRequest) -> None:
    """They are kept here, and told with this node's reports. Raises `BadReport`."""
    for name, text in (("group", request.group), ("boot_id", request.boot_id)):
        if not 1 <= len(text) <= NAME_CHARS_MAX:
            raise BadReport(f"{name} has {len(text)} characters, must have 1 to {NAME_CHARS_MAX}")


def _ended_by(deliveries: Sequence[scheduler_pb2.Delivery]) -> Iterator[tuple[str, int]]:
    """Attempts that are over: those that are revoked, and those before one that is given out."""
    for delivery in deliveries:
        if delivery.HasField("revoked"):
            yield delivery.revoked.request_id, delivery.revoked.attempt
        elif delivery.assigned.attempt > 1:
            yield delivery.assigned.request_id, delivery.assigned.attempt - 1


class RelayedCalls:
    """Those calls of the engine API that the scheduler answers. `scheduler` None: this node has none."""

    def __init__(self, scheduler: SchedulerSide | None) -> None:
        self._scheduler = scheduler

    def _session(self, context: Context) -> Session:
        """Whose call it is. Raises `UnknownSession`."""
        raise NotImplementedError

    @answering
    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: Context) -> scheduler_pb2.TicketReply:
        return await self._passed_on(context, lambda stub, left_s: stub.Submit(request, timeout=left_s))

    @answering
    async def GetTicket(self, request: scheduler_pb2.GetTicketRequest, context: Context) -> scheduler_pb2.TicketReply:
        wait_s = min(request.wait_ms / 1000, WAIT_S_MAX)
        return await self._passed_on(
            context, lambda stub, left_s: stub.GetTicket(request, timeout=left_s), wait_s=wait_s
        )

    @answering
    async def Withdraw(self, request: scheduler_pb2.WithdrawRequest, context: Context) -> scheduler_pb2.TicketReply:
        return await self._passed_on(context, lambda stub, left_s: stub.Withdraw(request, timeout=left_s))

    @answering
    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Context) -> scheduler_pb2.ExplainReply:
        return await self._passed_on(context, lambda stub, left_s: stub.Explain(request, timeout=left_s))

    @answering
    async def ChoosePath(
        self, request: scheduler_pb2.ChoosePathRequest, context: Context
    ) -> scheduler_pb2.ChoosePathReply:
        return await self._passed_on(context, lambda stub, left_s: stub.ChoosePath(request, timeout=left_s))

    @answering
    async def PullWork(self, request: scheduler_pb2.PullWorkRequest, context: Context) -> scheduler_pb2.PullWorkReply:
        session = self._session(context)
        return await self._side().pull(session, request, context)

    async def _passed_on(self, context: Context, begin: Begin[Reply], *, wait_s: float = 0.0) -> Reply:
        self._session(context)
        return await self._side().ask(context, begin, wait_s=wait_s)

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise NoScheduler("this node belongs to no scheduler: its config has no scheduler.addresses")
        return self._scheduler
