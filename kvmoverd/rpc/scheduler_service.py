"""The Scheduler API: checks words, asks the office, answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import grpc.aio

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.reports import BadReport
from kvmoverd.rpc import scheduler_convert as convert
from kvmoverd.rpc.guard import answering, streaming
from kvmoverd.rpc.scheduler_explain import explain_message
from kvmoverd.rpc.scheduler_office import Office
from kvmoverd.rpc.scheduler_status import status_message
from kvmoverd.rpc.scheduler_streams import Streams, first_of

SERVICE = "kvmover.v1.Scheduler"
ALWAYS = frozenset({"Submit", "Withdraw", "Explain", "ChoosePath", "PullWork", "GetSchedulerStatus"})
"""Let through however many wait: none of them waits for anything."""
WAIT_MS_MAX = 60_000
STREAM_SILENT_S_MIN = 10.0

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """`streams` are those of nodes' reports: a node whose stream ends is not lost before it has been silent for long enough.
    `facts`: of the process, for the status.
    """

    def __init__(self, office: Office, streams: Streams, facts: Callable[[], Mapping[str, object]]) -> None:
        self._office = office
        self._streams = streams
        self._facts = facts
        self._stream_silent_s = max(STREAM_SILENT_S_MIN, 4e-9 * office.settings.limits.node_silent_ns)

    @answering
    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: Context) -> scheduler_pb2.TicketReply:
        began_ns = time.perf_counter_ns()
        ticket = self._office.submit(convert.request_of(request))
        reply = convert.ticket_message(ticket, self._office.identity)
        self._office.calls["submit"].add(time.perf_counter_ns() - began_ns)
        return reply

    @answering
    async def GetTicket(self, request: scheduler_pb2.GetTicketRequest, context: Context) -> scheduler_pb2.TicketReply:
        if request.wait_ms > WAIT_MS_MAX:
            raise BadRequest(f"wait_ms is {request.wait_ms}, must be 0 to {WAIT_MS_MAX}")
        ticket = await self._office.changed_ticket(
            request.request_id, lambda ticket: convert.is_as_known(ticket, request), request.wait_ms
        )
        return convert.ticket_message(ticket, self._office.identity)

    @answering
    async def Withdraw(self, request: scheduler_pb2.WithdrawRequest, context: Context) -> scheduler_pb2.TicketReply:
        return convert.ticket_message(self._office.withdraw(request.request_id), self._office.identity)

    @answering
    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Context) -> scheduler_pb2.ExplainReply:
        return explain_message(self._office.explain(request.request_id))

    @answering
    async def ChoosePath(
        self, request: scheduler_pb2.ChoosePathRequest, context: Context
    ) -> scheduler_pb2.ChoosePathReply:
        read, why = self._office.choose_path(
            request.model, request.prefill_node, request.decode_node, request.hit_tokens
        )
        return scheduler_pb2.ChoosePathReply(
            scheduler=self._office.identity, read=convert.read_message(read), why=why.rule
        )

    @answering
    async def PullWork(self, request: scheduler_pb2.PullWorkRequest, context: Context) -> scheduler_pb2.PullWorkReply:
        began_ns = time.perf_counter_ns()
        office = self._office
        deliveries = office.pull(convert.group_report_of(request), request.scheduler_boot_id)
        reply = scheduler_pb2.PullWorkReply(scheduler=office.identity)
        if deliveries is None:
            reply.tell_held = True
        else:
            reply.deliveries.extend([convert.delivery_message(delivery) for delivery in deliveries])
            reply.pull_again_ms = office.pull_again_ms()
        office.calls["pull"].add(time.perf_counter_ns() - began_ns)
        return reply

    @streaming
    async def ReportNode(
        self, requests: AsyncIterator[scheduler_pb2.ReportNodeRequest], context: Context
    ) -> AsyncGenerator[scheduler_pb2.ReportNodeReply, None]:
        message = await first_of(requests, self._stream_silent_s)
        if message is None:
            return
        convert.node_report_of(message)
        with self._streams.one(message.node) as stream:
            yield self._reported(message)
            while (message := await stream.next(requests, self._stream_silent_s)) is not None:
                if message.node != stream.node:
                    raise BadReport(f"a stream of node {stream.node!r} brings a report of {message.node[:256]!r}")
                yield self._reported(message)

    @answering
    async def GetSchedulerStatus(
        self, request: scheduler_pb2.GetSchedulerStatusRequest, context: Context
    ) -> scheduler_pb2.GetSchedulerStatusReply:
        return status_message(self._office, len(self._streams), self._facts())

    def _reported(self, message: scheduler_pb2.ReportNodeRequest) -> scheduler_pb2.ReportNodeReply:
        for lost in convert.lost_groups_of(message):
            self._office.lose_group(*lost)
        fences = self._office.node_reported(convert.node_report_of(message))
        return scheduler_pb2.ReportNodeReply(
            scheduler=self._office.identity,
            report_again_ms=self._office.report_again_ms(),
            fences=[convert.fence_message(fence) for fence in fences],
        )
