"""The scheduler's messages to the core's words and back. What is out of its bounds is refused before anything is built of it."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from kvmover_proto import common_pb2, scheduler_pb2
from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.explain import Explain
from kvmoverd.core.scheduling.held import Held
from kvmoverd.core.scheduling.reports import (
    DONE_MAX,
    GROUP_ENGINES_MAX,
    HELD_MAX,
    BadReport,
    Done,
    EngineReport,
    GroupReport,
    NodeReport,
    Role,
)
from kvmoverd.core.scheduling.requests import (
    CACHED_MAX,
    Assignment,
    CachedPrefix,
    Delivery,
    Fence,
    Part,
    ReadChoice,
    Request,
    Revoked,
    State,
    Ticket,
)
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path

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
    _check_count("cached", message.cached, CACHED_MAX, BadRequest)
    return Request(
        message.request_id,
        message.model,
        message.prompt_tokens,
        message.hit_tokens,
        message.tenant,
        message.session,
        message.after_attempt,
        tuple(CachedPrefix(cached.where, cached.tokens) for cached in message.cached),
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
        prompt_tokens=assignment.prompt_tokens,
        hit_tokens=assignment.hit_tokens,
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
    _check_count("failed", message.failed, DONE_MAX, BadReport)
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
            EngineReport(load.engine, node, load.requests, load.prompt_tokens, load.free_hbm_tokens, load.tokens_per_s)
            for load in message.engines
        ),
        message.heard,
        (
            *(Done(done.request_id, done.attempt) for done in message.done),
            *(Done(failed.request_id, failed.attempt, failed=True) for failed in message.failed),
        ),
        tuple(_held_of(held) for held in message.held),
    )


def _held_of(message: scheduler_pb2.HeldAssignment) -> Held:
    assignment = message.assignment
    return Held(
        assignment.request_id,
        assignment.attempt,
        assignment.prefill_engine,
        assignment.prefill_node,
        assignment.decode_engine,
        assignment.decode_node,
        read_of(assignment.read),
        assignment.prompt_tokens,
        assignment.hit_tokens,
        message.prefill_done,
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
        message.fences_heard,
        message.draining,
    )


def lost_groups_of(message: scheduler_pb2.ReportNodeRequest) -> list[tuple[str, str]]:
    """Each by its name and the boot of its leader. Raises `BadReport`."""
    _check_count("lost groups", message.lost_groups, LOST_GROUPS_MAX, BadReport)
    return [(lost.group, lost.boot_id) for lost in message.lost_groups]


def fence_message(fence: Fence) -> scheduler_pb2.Fence:
    return scheduler_pb2.Fence(number=fence.number, request_id=fence.request_id, attempt=fence.attempt)


def _check_count(what: str, words: Sized, most: int, error: Callable[[str], Exception]) -> None:
    if len(words) > most:
        raise error(f"{len(words)} {what} are given, at most {most} can be")
