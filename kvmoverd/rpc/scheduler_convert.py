"""The scheduler's messages to the core's words and back. What is out of its bounds is refused before anything is built of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

from kvmover_proto import common_pb2, scheduler_pb2
from kvmoverd.core.scheduling.explain import Explain
from kvmoverd.core.scheduling.reports import (
    DONE_MAX,
    GROUP_ENGINES_MAX,
    BadReport,
    Done,
    EngineReport,
    GroupReport,
    NodeReport,
    Role,
)
from kvmoverd.core.scheduling.requests import (
    Assignment,
    Delivery,
    Part,
    ReadChoice,
    Request,
    Revoked,
    State,
    Ticket,
)
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path

HELD_MAX = 65_536
LOST_GROUPS_MAX = 1_024
PARTS_MAX = 64
WHY_CHARS_MAX = 512

Word = TypeVar("Word")

_STATES = {
    State.WAITING: scheduler_pb2.WAITING,
    State.ASSIGNED: scheduler_pb2.ASSIGNED,
    State.DONE: scheduler_pb2.DONE,
    State.FAILED: scheduler_pb2.TICKET_FAILED,
    State.CANCELLED: scheduler_pb2.WITHDRAWN,
}
_ROLES = {scheduler_pb2.PREFILL: Role.PREFILL, scheduler_pb2.DECODE: Role.DECODE}
_HAVE_ASSIGNMENTS = (State.ASSIGNED, State.DONE, State.CANCELLED)


# Requests and tickets.


def request_of(message: scheduler_pb2.SubmitRequest) -> Request:
    """Raises `BadRequest`."""
    return Request(
        message.request_id,
        message.model,
        message.prompt_tokens,
        message.hit_tokens,
        message.tenant,
        message.session,
        message.after_attempt,
    )


def submit_message(request: Request) -> scheduler_pb2.SubmitRequest:
    return scheduler_pb2.SubmitRequest(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        hit_tokens=request.hit_tokens,
        tenant=request.tenant,
        session=request.session,
        after_attempt=request.after_attempt,
    )


def ticket_message(ticket: Ticket, scheduler: scheduler_pb2.SchedulerIdentity) -> scheduler_pb2.TicketReply:
    reply = scheduler_pb2.TicketReply(
        scheduler=scheduler,
        request_id=ticket.request_id,
        state=_STATES[ticket.state],
        attempt=ticket.attempt,
        why=ticket.why[:WHY_CHARS_MAX],
    )
    if ticket.assignment is not None and ticket.state in _HAVE_ASSIGNMENTS:
        reply.assignment.CopyFrom(assignment_message(ticket.assignment))
    return reply


def is_as_known(ticket: Ticket, message: scheduler_pb2.GetTicketRequest) -> bool:
    """Does the client know this already?"""
    return _STATES[ticket.state] == message.known_state and ticket.attempt == message.known_attempt


# Assignments.


def assignment_message(assignment: Assignment) -> scheduler_pb2.Assignment:
    return scheduler_pb2.Assignment(
        request_id=assignment.request_id,
        attempt=assignment.attempt,
        prefill_engine=assignment.prefill_engine,
        prefill_node=assignment.prefill_node,
        decode_engine=assignment.decode_engine,
        decode_node=assignment.decode_node,
        read=read_message(assignment.read),
        rules=rules_text(assignment.explain),
    )


def rules_text(explain: Explain) -> str:
    """In three words, as metrics count by them."""
    return "/".join(explain.rules)


def read_message(read: ReadChoice) -> scheduler_pb2.ReadChoice:
    return scheduler_pb2.ReadChoice(
        path=common_pb2.Path.ValueType(read.path.value),
        parts=[scheduler_pb2.PartOfRead(node=part.node, first=part.first, stop=part.stop) for part in read.parts],
    )


def read_of(message: scheduler_pb2.ReadChoice) -> ReadChoice:
    """Raises `BadReport`."""
    _check_count("parts of a read", message.parts, PARTS_MAX, BadReport)
    try:
        path = Path(message.path)
    except ValueError:
        raise BadReport(f"path {message.path} of a read is none of {', '.join(path.name for path in Path)}") from None
    return ReadChoice(path, tuple(Part(part.node, part.first, part.stop) for part in message.parts))


def delivery_message(delivery: Delivery) -> scheduler_pb2.Delivery:
    what = delivery.what
    if isinstance(what, Revoked):
        revoked = scheduler_pb2.AttemptRef(request_id=what.request_id, attempt=what.attempt)
        return scheduler_pb2.Delivery(number=delivery.number, revoked=revoked)
    return scheduler_pb2.Delivery(number=delivery.number, assigned=assignment_message(what))


# Reports.


def group_report_of(message: scheduler_pb2.PullWorkRequest) -> GroupReport:
    """Raises `BadReport`."""
    _check_count("engines", message.engines, GROUP_ENGINES_MAX, BadReport)
    _check_count("done", message.done, DONE_MAX, BadReport)
    _check_count("held", message.held, HELD_MAX, BadReport)
    role = _ROLES.get(message.role)
    if role is None:
        raise BadReport(f"role is {message.role}, must be PREFILL or DECODE")
    node = message.node
    return GroupReport(
        message.group,
        message.model,
        role,
        message.boot_id,
        message.sequence,
        tuple(
            EngineReport(load.engine, node, load.requests, load.prompt_tokens, load.free_hbm_tokens)
            for load in message.engines
        ),
        message.heard,
        tuple(Done(done.request_id, done.attempt) for done in message.done),
    )


def node_report_of(message: scheduler_pb2.ReportNodeRequest) -> NodeReport:
    """Raises `BadReport`."""
    return NodeReport(
        message.node,
        message.boot_id,
        message.sequence,
        Depth(message.read_queue_bytes, message.read_rate_bytes_per_s, message.silent_ns),
        message.buffer_free_bytes,
        message.buffer_bytes,
        message.lane_bytes_per_s,
        message.starved,
        message.help_free_bytes,
    )


def lost_groups_of(message: scheduler_pb2.ReportNodeRequest) -> list[tuple[str, str]]:
    """Each by its name and the boot of its leader. Raises `BadReport`."""
    _check_count("lost groups", message.lost_groups, LOST_GROUPS_MAX, BadReport)
    return [(lost.group, lost.boot_id) for lost in message.lost_groups]


def node_report_message(report: NodeReport) -> scheduler_pb2.ReportNodeRequest:
    return scheduler_pb2.ReportNodeRequest(
        node=report.node,
        boot_id=report.boot_id,
        sequence=report.sequence,
        read_queue_bytes=report.storage.queue_bytes,
        read_rate_bytes_per_s=report.storage.rate_bytes_per_s,
        silent_ns=report.storage.silent_ns,
        buffer_free_bytes=report.buffer_free_bytes,
        buffer_bytes=report.buffer_bytes,
        lane_bytes_per_s=report.lane_bytes_per_s,
        starved=report.starved,
        help_free_bytes=report.help_free_bytes,
    )


def _check_count(what: str, words: Sized, most: int, error: Callable[[str], Exception]) -> None:
    if len(words) > most:
        raise error(f"{len(words)} {what} are given, at most {most} can be")


def deliveries_message(deliveries: Sequence[Delivery]) -> list[scheduler_pb2.Delivery]:
    return [delivery_message(delivery) for delivery in deliveries]
