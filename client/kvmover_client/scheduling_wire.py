"""The scheduler's words to messages and back. What a newer scheduler may say and this library doesn't know is read as waiting."""

from __future__ import annotations

from collections.abc import Sequence

from kvmover_client.errors import BadRequest
from kvmover_client.scheduling import (
    Assignment,
    CachedPrefix,
    Delivery,
    EngineLoad,
    Identity,
    PartOfRead,
    ReadChoice,
    Revoked,
    Ticket,
    TicketState,
    Work,
    WorkReport,
)
from kvmover_client.words import Path
from kvmover_proto import common_pb2, scheduler_pb2

ATTEMPT_MAX = (1 << 31) - 1
COUNT_MAX = (1 << 31) - 1
TOKENS_MAX = 1 << 40
CACHED_MAX = 16


def submit_message(
    request_id: str,
    model: str,
    prompt_tokens: int,
    hit_tokens: int,
    tenant: str,
    session: str,
    cached: Sequence[CachedPrefix],
) -> scheduler_pb2.SubmitRequest:
    """Raises `BadRequest` for numbers that a message can't have; the scheduler checks the rest."""
    _checked("prompt_tokens", prompt_tokens, 1, TOKENS_MAX)
    _checked("hit_tokens", hit_tokens, 0, prompt_tokens)
    _checked("cached", len(cached), 0, CACHED_MAX)
    return scheduler_pb2.SubmitRequest(
        request_id=request_id,
        model=model,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        tenant=tenant,
        session=session,
        cached=[_cached_message(prefix, hit_tokens) for prefix in cached],
    )


def choose_path_message(
    model: str, prefill_node: str, decode_node: str, hit_tokens: int
) -> scheduler_pb2.ChoosePathRequest:
    """Raises `BadRequest`."""
    return scheduler_pb2.ChoosePathRequest(
        model=model,
        prefill_node=prefill_node,
        decode_node=decode_node,
        hit_tokens=_checked("hit_tokens", hit_tokens, 0, TOKENS_MAX),
    )


def pull_message(report: WorkReport) -> scheduler_pb2.PullWorkRequest:
    """Raises `BadRequest` for loads out of their bounds."""
    return scheduler_pb2.PullWorkRequest(
        group=report.group,
        model=report.model,
        role=scheduler_pb2.Role.ValueType(report.role.value),
        boot_id=report.boot_id,
        sequence=report.sequence,
        engines=[_load_message(load) for load in report.engines],
        heard=report.heard,
        done=_attempts(report.done),
        failed=_attempts(report.failed),
        held=[
            scheduler_pb2.HeldAssignment(assignment=assignment_message(held.assignment), prefill_done=held.prefill_done)
            for held in report.held
        ],
        scheduler_boot_id=report.scheduler_boot_id,
    )


def _attempts(attempts: Sequence[tuple[str, int]]) -> list[scheduler_pb2.AttemptRef]:
    return [scheduler_pb2.AttemptRef(request_id=request_id, attempt=attempt) for request_id, attempt in attempts]


def assignment_message(assignment: Assignment) -> scheduler_pb2.Assignment:
    return scheduler_pb2.Assignment(
        request_id=assignment.request_id,
        attempt=assignment.attempt,
        prefill_engine=assignment.prefill_engine,
        prefill_node=assignment.prefill_node,
        decode_engine=assignment.decode_engine,
        decode_node=assignment.decode_node,
        read=_read_message(assignment.read),
        prompt_tokens=assignment.prompt_tokens,
        hit_tokens=assignment.hit_tokens,
        rules=assignment.rules,
    )


def identity_from(message: scheduler_pb2.SchedulerIdentity) -> Identity:
    return Identity(message.boot_id, message.epoch)


def ticket_from(message: scheduler_pb2.TicketReply) -> Ticket:
    try:
        state = TicketState(message.state)
    except ValueError:
        state = TicketState.WAITING
    assignment = assignment_from(message.assignment) if message.HasField("assignment") else None
    return Ticket(message.request_id, state, message.attempt, assignment, message.why)


def assignment_from(message: scheduler_pb2.Assignment) -> Assignment:
    return Assignment(
        request_id=message.request_id,
        attempt=message.attempt,
        prefill_engine=message.prefill_engine,
        prefill_node=message.prefill_node,
        decode_engine=message.decode_engine,
        decode_node=message.decode_node,
        read=read_from(message.read),
        prompt_tokens=message.prompt_tokens,
        hit_tokens=message.hit_tokens,
        rules=message.rules,
    )


def read_from(message: scheduler_pb2.ReadChoice) -> ReadChoice:
    """`Path.AUTO` for a way to read that this library does not know: the nodes find one that they know."""
    try:
        path = Path(message.path)
    except ValueError:
        return ReadChoice(Path.AUTO)
    return ReadChoice(path, tuple(PartOfRead(part.node, part.first, part.stop) for part in message.parts))


def work_from(message: scheduler_pb2.PullWorkReply) -> Work:
    return Work(
        identity_from(message.scheduler),
        tuple(_delivery_from(delivery) for delivery in message.deliveries),
        message.pull_again_ms / 1000,
        message.tell_held,
    )


def _delivery_from(message: scheduler_pb2.Delivery) -> Delivery:
    if message.HasField("revoked"):
        return Delivery(message.number, Revoked(message.revoked.request_id, message.revoked.attempt))
    return Delivery(message.number, assignment_from(message.assigned))


def _read_message(read: ReadChoice) -> scheduler_pb2.ReadChoice:
    return scheduler_pb2.ReadChoice(
        path=common_pb2.Path.ValueType(read.path.value),
        parts=[scheduler_pb2.PartOfRead(node=part.node, first=part.first, stop=part.stop) for part in read.parts],
    )


def _load_message(load: EngineLoad) -> scheduler_pb2.EngineLoad:
    name = load.engine
    return scheduler_pb2.EngineLoad(
        engine=name,
        requests=_checked(f"requests of {name}", load.requests, 0, COUNT_MAX),
        prompt_tokens=_checked(f"prompt_tokens of {name}", load.prompt_tokens, 0, TOKENS_MAX),
        free_hbm_tokens=_checked(f"free_hbm_tokens of {name}", load.free_hbm_tokens, 0, TOKENS_MAX),
        tokens_per_s=_checked(f"tokens_per_s of {name}", load.tokens_per_s, 0, TOKENS_MAX),
    )


def _cached_message(prefix: CachedPrefix, hit_tokens: int) -> scheduler_pb2.CachedPrefix:
    tokens = _checked(f"tokens cached at {prefix.where}", prefix.tokens, 0, hit_tokens)
    return scheduler_pb2.CachedPrefix(where=prefix.where, tokens=tokens)


def _checked(what: str, number: int, least: int, most: int) -> int:
    if not least <= number <= most:
        raise BadRequest(f"{what} is {number}, must be {least} to {most}")
    return number
