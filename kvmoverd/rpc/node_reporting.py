"""This node's reports to the scheduler, out of its own books, and what the scheduler says in answer: which attempts to refuse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from kvmover_proto import scheduler_pb2
from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError, SchedulerUnreachable
from kvmoverd.node.node import Node
from kvmoverd.rpc import convert
from kvmoverd.rpc.lost_groups import LostGroups
from kvmoverd.rpc.scheduler_link import Connection, SchedulerLink

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often the books are looked at, and the least time between two reports."""
EARLY_SHARE = 0.1
"""Of the time between two reports; nothing is told earlier. A scheduler that wants fewer reports gets fewer of these, too."""
REPORT_S_MAX = 60.0
RETRY_S, RETRY_S_MAX = 0.05, 0.4
NOTE_S = 30.0
"""Between lines of the log about a scheduler that does not answer, each time for another reason."""
REFUSED_S = 1.0
"""A scheduler that refuses this node's reports is not asked again sooner."""

Reports: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.ReportNodeRequest, scheduler_pb2.ReportNodeReply]"


@dataclass(frozen=True, slots=True)
class Look:
    """What is told before its time when it changes; `draining` at once."""

    reads: bool
    starved: bool
    draining: bool


def node_report(node: Node) -> scheduler_pb2.ReportNodeRequest:
    """What the node's books say now; for the loop's thread."""
    services = node.services
    depth = services.reader.depth()
    buffers = next(use for use in services.room.uses() if use.purpose is Purpose.DE_BUFFER)
    return scheduler_pb2.ReportNodeRequest(
        node=services.node,
        boot_id=services.boot_id,
        read_queue_bytes=depth.queue_bytes,
        read_rate_bytes_per_s=depth.rate_bytes_per_s,
        silent_ns=depth.silent_ns,
        buffer_free_bytes=buffers.limit_bytes - buffers.taken_bytes,
        buffer_bytes=buffers.limit_bytes,
        lane_bytes_per_s=services.mover.lanes.rate_bytes_per_s(services.clock.now_ns()),
        starved=node.lane_starved(""),
        help_free_bytes=services.room.free_bytes(Purpose.HELP) if node.helper_side.helps else 0,
        draining=node.requests.draining,
    )


class NodeReporter:
    """One stream of reports at a time. Without a scheduler that answers the node serves its engines as ever."""

    def __init__(self, node: Node, link: SchedulerLink, lost: LostGroups) -> None:
        self.reports = self.fences = 0
        self.answers = False
        self._node = node
        self._link = link
        self._lost = lost
        self._sequence = 0
        self._noted, self._noted_s = "", 0.0
        self._wanted = asyncio.Event()
        self._told = Look(reads=False, starved=False, draining=False)
        self._early_s = 0.0
        self._asking: dict[asyncio.Future[bool], int] = {}
        """Who waits for the answer to a report that begins after it asked: by the number of the last one before."""

    async def run(self) -> None:
        """Reports until it is cancelled."""
        retry_s = RETRY_S
        while True:
            before = self.reports
            try:
                await self._report_over(self._link.connection())
            except SchedulerUnreachable as error:
                self._note(str(error))
                retry_s = RETRY_S if self.reports > before else min(2 * retry_s, RETRY_S_MAX)
            except KvmoverError as error:
                self._note(str(error))
                retry_s = REFUSED_S
            except Exception:
                log.exception("reports to the scheduler failed; they go on over another stream")
                retry_s = REFUSED_S
            await asyncio.sleep(retry_s)

    async def fences_asked(self) -> bool:
        """Has the scheduler say now which attempts are over; True once their fences are in force, False if it says nothing."""
        return await self.report_now(self._link.timeout_s)

    async def report_now(self, timeout_s: float) -> bool:
        """Returns when a report that begins after this is answered; False where no scheduler answers in time."""
        if not self.answers:
            return False
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asking[answered] = self._sequence
        self._wanted.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            return False
        finally:
            del self._asking[answered]

    def apply(self, fences: Iterable[tuple[str, int]]) -> None:
        """These attempts and lower ones are over. Raises `BadRequest` for what is no name of an attempt."""
        for request_id, attempt in fences:
            convert.checked_request(request_id, attempt)
            self.fences += self._node.requests.fence_off(request_id, attempt)

    async def _report_over(self, connection: Connection) -> None:
        """Raises `KvmoverError` when the stream is over, for whatever reason."""
        call = connection.stub.ReportNode()
        boot_id, heard = "", 0
        try:
            while True:
                # A stream begins with nothing heard: only then is it known which scheduler's numbers these are.
                reply = await self._answer(connection, call, heard)
                if reply.scheduler.boot_id != boot_id:
                    boot_id, heard = reply.scheduler.boot_id, 0
                self.apply((fence.request_id, fence.attempt) for fence in reply.fences)
                heard = max([heard, *(fence.number for fence in reply.fences)])
                self._answered(connection)
                await self._pause(min(max(reply.report_again_ms / 1000, LOOK_S), REPORT_S_MAX))
        except grpc.aio.AioRpcError as error:
            raise self._link.judged(connection, error) from error
        finally:
            self.answers = False
            self._tell_askers(answered=False)
            call.cancel()

    async def _answer(self, connection: Connection, call: Reports, heard: int) -> scheduler_pb2.ReportNodeReply:
        """Sends a report and waits for its answer. Raises `Elsewhere`, and what the call failed with."""
        self._sequence += 1
        lost, self._told = self._lost.told(), self._look()
        message = node_report(self._node)
        message.sequence, message.fences_heard = self._sequence, heard
        message.lost_groups.extend([scheduler_pb2.LostGroup(group=group.name, boot_id=group.boot_id) for group in lost])
        try:
            async with asyncio.timeout(self._link.timeout_s):
                with connection.holding(call):
                    with contextlib.suppress(asyncio.InvalidStateError):
                        # A call that is over takes nothing more; reading says why it is over.
                        await call.write(message)
                    reply = await call.read()
        except TimeoutError:
            raise self._link.stalled(connection, f"did not answer a report for {self._link.timeout_s:g} s") from None
        if not isinstance(reply, scheduler_pb2.ReportNodeReply):
            raise self._link.stalled(connection, "ended the stream of reports")
        self._link.heard(connection, reply.scheduler)
        self._lost.heard(lost)
        return reply

    def _answered(self, connection: Connection) -> None:
        if not self.answers:
            log.info("scheduler %s at %s answers", self._link.boot_id, connection.address)
        self.answers, self._noted = True, ""
        self.reports += 1
        self._tell_askers(answered=True)

    def _tell_askers(self, *, answered: bool) -> None:
        for asking, sequence in self._asking.items():
            if sequence < self._sequence and not asking.done():
                asking.set_result(answered)

    async def _pause(self, report_s: float) -> None:
        """Until the next report is due, or something has changed that should be known before.

        Changes that go on have it wait longer each time, until reports come as often as they would without any.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first_s = max(LOOK_S, report_s * EARLY_SHARE)
        early_s = min(max(self._early_s, first_s), report_s)
        self._early_s = first_s
        while (left_s := began_s + report_s - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._wanted.wait()
            if self._is_urgent():
                break
            if loop.time() - began_s >= early_s and self._look() != self._told:
                self._early_s = 2 * early_s
                break
        if (left_s := began_s + LOOK_S - loop.time()) > 0:
            await asyncio.sleep(left_s)
        self._wanted.clear()

    def _is_urgent(self) -> bool:
        return self._wanted.is_set() or self._lost.count > 0 or self._node.requests.draining != self._told.draining

    def _look(self) -> Look:
        node = self._node
        reads = node.services.reader.depth().queue_bytes > 0
        return Look(reads, node.lane_starved(""), node.requests.draining)

    def _note(self, why: str) -> None:
        """One line for a scheduler that answers no more, not one for each try, nor for each of its two or three reasons."""
        now_s = asyncio.get_running_loop().time()
        if not self._noted or (why != self._noted and now_s - self._noted_s >= NOTE_S):
            log.warning("no reports to a scheduler: %s", why)
            self._noted, self._noted_s = why, now_s
