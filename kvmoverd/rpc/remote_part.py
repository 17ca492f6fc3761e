"""A part that another node reads: one ReadPart call of `rpc.peer_client`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvmover_proto import node_pb2
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.status import End, Reason
from kvmoverd.node.peer import PartListener, Ticket
from kvmoverd.node.reasons import reason_of
from kvmoverd.rpc import convert

if TYPE_CHECKING:
    from kvmoverd.rpc.peer_client import GrpcPeer

log = logging.getLogger(__name__)


class RemotePart:
    """One ReadPart call. `on_end` is told once: by the reader's own end, by a broken call, or by the stop's time limit."""

    def __init__(self, peer: GrpcPeer, ticket: Ticket, listener: PartListener, timeout_s: float) -> None:
        self._peer = peer
        self._ticket = ticket
        self._listener = listener
        self._timeout_s = timeout_s
        self._credit: node_pb2.PartCredit | None = None
        self._credited = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._ended = False

    def open(self, sink_id: int, credit_layers: int) -> None:
        opening = node_pb2.OpenPart(
            ticket=convert.ticket_message(self._ticket), sink=sink_id, credit_layers=credit_layers
        )
        self._peer.parts.add(self)
        self._running = asyncio.get_running_loop().create_task(self._run(opening))

    def lost(self, why: str) -> None:
        """Its node is gone: it is over, without being stopped."""
        self._end(End(Reason.PEER_LOST, f"{self._peer.node}: {why}"))
        if self._running is not None:
            self._running.cancel()

    def credit(self, prefix_blocks: int, layers: int) -> None:
        """The latest credit says all: those not sent yet are replaced by it."""
        self._credit = node_pb2.PartCredit(credit_layers=layers, prefix_blocks=prefix_blocks)
        self._credited.set()

    def stop(self) -> None:
        if self._stopping is None and not self._ended:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _run(self, opening: node_pb2.OpenPart) -> None:
        call = self._peer.stub.ReadPart(timeout=self._timeout_s)
        sending = asyncio.get_running_loop().create_task(self._send(call, opening))
        node = self._peer.node
        try:
            async for event in call:
                self._take(event)
            self._end(End(Reason.PEER_LOST, f"{node} ended the part without a word"))
        except grpc.aio.AioRpcError as error:
            judged = self._peer.judged(error, waits=True)
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._end(End(Reason.DEADLINE if late else reason_of(judged), f"{node}: {judged}"))
        except asyncio.CancelledError:
            self._end(End(Reason.CANCELLED, "stopped by its owner"))
        except Exception as error:
            # Without an end its owner would wait for the deadline.
            log.exception("the part of ticket %d on %s failed", self._ticket.ticket_id, node)
            self._end(End(Reason.INTERNAL, f"{node}: {type(error).__name__}"))
        finally:
            sending.cancel()
            call.cancel()

    async def _send(
        self, call: grpc.aio.StreamStreamCall[node_pb2.ReadPartRequest, node_pb2.PartEvent], opening: node_pb2.OpenPart
    ) -> None:
        try:
            await call.write(node_pb2.ReadPartRequest(open=opening))
            while True:
                await self._credited.wait()
                self._credited.clear()
                await call.write(node_pb2.ReadPartRequest(credit=self._credit))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            log.debug("ticket %d: no more credits to %s: %s", self._ticket.ticket_id, self._peer.node, error)

    def _take(self, event: node_pb2.PartEvent) -> None:
        match event.WhichOneof("kind"):
            case "prefix":
                lost = convert.outcome_from(event.prefix.first_lost) if event.prefix.HasField("first_lost") else None
                self._listener.on_prefix(event.prefix.prefix_blocks, lost)
            case "end":
                self._end(convert.end_from(event.end))
            case _:
                pass

    async def _stop(self) -> None:
        request = node_pb2.StopPartRequest(ticket=convert.ticket_message(self._ticket))
        try:
            await self._peer.stop_part(request)
        except KvmoverError as error:
            log.info("the part of ticket %d on %s was not stopped: %s", self._ticket.ticket_id, self._peer.node, error)
        if self._running is not None:
            self._running.cancel()
        self._end(End(Reason.CANCELLED, "stopped by its owner"))

    def _end(self, end: End) -> None:
        if not self._ended:
            self._ended = True
            self._peer.parts.discard(self)
            self._listener.on_end(end)
