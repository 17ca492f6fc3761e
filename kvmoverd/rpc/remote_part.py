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
from kvmoverd.node.peer import Help, PartListener, PartOrder
from kvmoverd.node.reasons import reason_of
from kvmoverd.rpc import convert, places, shares

if TYPE_CHECKING:
    from kvmoverd.rpc.peer_client import GrpcPeer

log = logging.getLogger(__name__)


def opening_message(order: PartOrder, *, node: str, boot_id: str) -> node_pb2.OpenPart:
    """`node`, `boot_id`: the owner's."""
    return node_pb2.OpenPart(
        ticket=convert.ticket_message(order.ticket) if order.ticket is not None else None,
        sink=order.sink_id,
        credit_layers=order.credit_layers,
        part=order.part,
        node=node,
        boot_id=boot_id,
        blocks=shares.runs_message(order.blocks),
        first_layer=order.first_layer,
        holds=order.holds,
        help=_help_message(order.help) if order.help is not None else None,
        timeout_ms=max(1, int(order.timeout_s * 1000)),
        rest=order.rest,
    )


def _help_message(found: Help) -> node_pb2.Help:
    return node_pb2.Help(
        request_id=found.request_id,
        attempt=found.attempt,
        manifest=convert.manifest_message(found.namespace.manifest),
        block_keys=b"".join(found.keys),
        places=places.message_of(found.places),
        decode_node=found.decode_node,
    )


class RemotePart:
    """One ReadPart call. `on_end` is told once: by the reader's own end, by a broken call, or by the stop's time limit."""

    def __init__(self, peer: GrpcPeer, order: PartOrder, listener: PartListener) -> None:
        self._peer = peer
        self._order = order
        self._listener = listener
        self._credit: node_pb2.PartCredit | None = None
        self._assembly_sink = 0
        self._credit_told = True
        self._give_up: int | None = None
        self._give_rest: int | None = None
        self._words = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._ended = False

    def open(self, opening: node_pb2.OpenPart) -> None:
        self._peer.parts.add(self)
        self._running = asyncio.get_running_loop().create_task(self._run(opening))

    @property
    def sink_id(self) -> int:
        """The owner's sink that its layers go to."""
        return self._order.sink_id

    def lost(self, why: str) -> None:
        """Its node is gone, or the channel that it sent over: it is over, without being stopped."""
        self._end(End(Reason.PEER_LOST, f"{self._peer.node}: {why}"))
        if self._running is not None:
            self._running.cancel()

    def credit(self, prefix_blocks: int, layers: int) -> None:
        """The latest credit says all: those not sent yet are replaced by it."""
        self._credit = node_pb2.PartCredit(
            credit_layers=layers, prefix_blocks=prefix_blocks, assembly_sink=self._assembly_sink
        )
        self._credit_told = False
        self._words.set()

    def assemble(self, sink_id: int) -> None:
        """Goes with the last credit, or with the first that comes."""
        self._assembly_sink = sink_id
        if self._credit is not None:
            self.credit(self._credit.prefix_blocks, self._credit.credit_layers)

    def give_up(self, kept_blocks: int) -> None:
        """One at a time: the answer to the one before must have come."""
        if self._ended:
            return
        assert self._give_up is None, f"part {self._order.part} was asked for {self._give_up} blocks and not told yet"
        self._give_up = kept_blocks
        self._words.set()

    def give_rest(self, kept_blocks: int) -> None:
        """As `give_up`; the last credit goes before it."""
        if self._ended:
            return
        assert self._give_rest is None, f"part {self._order.part} was asked for a rest and not told yet"
        self._give_rest = kept_blocks
        self._words.set()

    def stop(self) -> None:
        if self._stopping is None and not self._ended:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _run(self, opening: node_pb2.OpenPart) -> None:
        call = self._peer.stub.ReadPart(timeout=self._order.timeout_s)
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
            log.exception("part %d on %s failed", self._order.part, node)
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
                await self._words.wait()
                self._words.clear()
                give_up, self._give_up = self._give_up, None
                give_rest, self._give_rest = self._give_rest, None
                credit, self._credit_told = (None if self._credit_told else self._credit), True
                if give_up is not None:
                    await call.write(node_pb2.ReadPartRequest(give_up=node_pb2.GiveUp(kept_blocks=give_up)))
                if credit is not None:
                    await call.write(node_pb2.ReadPartRequest(credit=credit))
                if give_rest is not None:
                    await call.write(node_pb2.ReadPartRequest(give_rest=node_pb2.GiveRest(kept_blocks=give_rest)))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            log.debug("part %d: no more words to %s: %s", self._order.part, self._peer.node, error)

    def _take(self, event: node_pb2.PartEvent) -> None:
        match event.WhichOneof("kind"):
            case "prefix":
                lost = convert.outcome_from(event.prefix.first_lost) if event.prefix.HasField("first_lost") else None
                self._listener.on_prefix(event.prefix.prefix_blocks, lost)
            case "progress":
                self._listener.on_progress(event.progress.begun_blocks, event.progress.read_bytes)
            case "gave_up":
                self._listener.on_gave_up(event.gave_up.kept_blocks)
            case "gave_rest":
                self._listener.on_gave_rest(event.gave_rest.kept_blocks, event.gave_rest.first_layer)
            case "end":
                self._end(convert.end_from(event.end))
            case _:
                pass

    async def _stop(self) -> None:
        try:
            await self._peer.stop_part(self._order.part)
        except KvmoverError as error:
            log.info("part %d on %s was not stopped: %s", self._order.part, self._peer.node, error)
        if self._running is not None:
            self._running.cancel()
        self._end(End(Reason.CANCELLED, "stopped by its owner"))

    def _end(self, end: End) -> None:
        if not self._ended:
            self._ended = True
            self._peer.parts.discard(self)
            self._listener.on_end(end)
