"""Requests as the scheduler knows them, and what it tells about them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.explain import EngineWhy, Explain
from kvmoverd.core.scheduling.reports import NAME_CHARS_MAX, REQUEST_ID_CHARS_MAX, TOKENS_MAX
from kvmoverd.core.status import Path

if TYPE_CHECKING:
    from kvmoverd.core.scheduling.state import Engine, Group


ATTEMPT_STEP = 16
"""From one attempt that is given out to the next. Those between are the engines' own: one whose prefix was cut goes on under the
next one by itself, and must not meet the number that the scheduler gives to others meanwhile."""
AFTER_ATTEMPT_MAX = 1 << 30
SINCE_MAX = AFTER_ATTEMPT_MAX - (1 << 20)
FIRST_NS = 1_767_225_600_000_000_000
"""The year 2026 begins."""
STEP_NS = 7_500_000_000
"""By the wall clock attempts of schedulers that start rise by one step in this time, so that `AFTER_ATTEMPT_MAX` is reached in
2041. It is longer than most requests take to lose an engine, and shorter than another scheduler takes to lead in most cases."""
CACHED_MAX = 16


def first_of(attempt: int) -> int:
    """The attempt that was given out, of which this one is, itself or one of the engines' own.

    >>> [first_of(attempt) for attempt in (0, 1, 5, 16, 17)]
    [0, 1, 1, 1, 17]
    """
    return 0 if attempt < 1 else (attempt - 1) // ATTEMPT_STEP * ATTEMPT_STEP + 1


def next_attempt(attempt: int) -> int:
    """The first is 1, and each after it one step further.

    >>> next_attempt(0), next_attempt(1), next_attempt(5), next_attempt(17)
    (1, 17, 17, 33)
    """
    return 1 if attempt < 1 else first_of(attempt) + ATTEMPT_STEP


def after_restart(attempt: int, since: int = 1) -> int:
    """The first of a scheduler whose client or leaders know of this one from an earlier scheduler; 0: of none. `since`: no
    earlier one gave out that or more.

    >>> after_restart(0, 12801), after_restart(17, 12801), after_restart(12801, 12801), after_restart(17)
    (1, 12801, 12817, 33)
    """
    return max(next_attempt(attempt), since) if attempt else 1


def since_start(wall_ns: int) -> int:
    """Above what schedulers that started earlier gave out after their restarts, by the wall clock, unless they gave a request out
    more often than once in `STEP_NS`: whoever of their time may know less than they gave out, nodes refuse it.

    A clock that is wrong by decades leaves clients numbers to come back with, too.

    >>> [since_start((1_767_225_600 + after_s) * 1_000_000_000) for after_s in (-5, 7, 8, 60, 6_000, 1 << 32)]
    [1, 1, 17, 129, 12801, 1072693249]
    """
    return min(max(0, (wall_ns - FIRST_NS) // STEP_NS) * ATTEMPT_STEP, SINCE_MAX) + 1


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """KV that need not be read from storage: so many leading tokens, in a node's pool or in an engine's pages, by its name.

    Raises `BadRequest`.
    """

    where: str
    tokens: int

    def __post_init__(self) -> None:
        if not (0 < len(self.where) <= NAME_CHARS_MAX and 0 <= self.tokens <= TOKENS_MAX):
            raise BadRequest(
                f"cached where {self.where[:NAME_CHARS_MAX]!r}: {self.tokens} tokens; names have 1 to {NAME_CHARS_MAX} "
                f"characters, tokens are 0 to {TOKENS_MAX}"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that wants a prefill engine and a decode engine. `prompt_tokens`: all of it; `hit_tokens`: those whose KV is
    stored. `after_attempt`: the highest attempt that the client knows of, from an earlier scheduler; 0: none.

    `session`: requests of one conversation, whose KV may still lie where the last one ran. `cached`: where the client knows KV
    to be, beside storage. Raises `BadRequest`.
    """

    request_id: str
    model: str
    prompt_tokens: int
    hit_tokens: int = 0
    tenant: str = ""
    session: str = ""
    after_attempt: int = 0
    cached: tuple[CachedPrefix, ...] = ()

    def __post_init__(self) -> None:
        if not (0 < len(self.request_id) <= REQUEST_ID_CHARS_MAX and 0 < len(self.model) <= NAME_CHARS_MAX):
            raise BadRequest(
                f"request_id has {len(self.request_id)} characters, model {len(self.model)}: 1 to {REQUEST_ID_CHARS_MAX} "
                f"and 1 to {NAME_CHARS_MAX}"
            )
        if len(self.tenant) > NAME_CHARS_MAX or len(self.session) > NAME_CHARS_MAX:
            raise BadRequest(
                f"tenant has {len(self.tenant)} characters, session {len(self.session)}: at most {NAME_CHARS_MAX} each"
            )
        if not (0 <= self.hit_tokens <= self.prompt_tokens <= TOKENS_MAX and self.prompt_tokens > 0):
            raise BadRequest(
                f"request {self.request_id!r}: {self.hit_tokens} hit of {self.prompt_tokens} prompt tokens: the prompt has 1 "
                f"to {TOKENS_MAX}, and no more are hit"
            )
        if not 0 <= self.after_attempt <= AFTER_ATTEMPT_MAX:
            raise BadRequest(f"after_attempt is {self.after_attempt}, must be 0 to {AFTER_ATTEMPT_MAX}")
        if len(self.cached) > CACHED_MAX or any(prefix.tokens > self.hit_tokens for prefix in self.cached):
            raise BadRequest(
                f"request {self.request_id!r}: {len(self.cached)} cached prefixes, at most {CACHED_MAX}, none longer than the "
                f"{self.hit_tokens} hit tokens"
            )

    def has_prompt_of(self, other: Request) -> bool:
        return (self.model, self.prompt_tokens) == (other.model, other.prompt_tokens)

    def differs_text(self, other: Request) -> str:
        """For a person who submitted the other one under this one's name."""
        return (
            f"is known with {self.prompt_tokens} tokens for {self.model!r} of tenant {self.tenant!r}, and now has "
            f"{other.prompt_tokens} for {other.model!r} of {other.tenant!r}"
        )


class State(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """For its prefill engine, its decode engine, or both."""
    ASSIGNED = "assigned"
    DONE = "done"
    FAILED = "failed"
    """It waited too long, or was given out too often; `Ticket.why` says which."""
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (State.WAITING, State.ASSIGNED)


@dataclass(frozen=True, slots=True)
class Part:
    """The fraction of the hit blocks, in prompt order, that a node reads: [first, stop) of 1."""

    node: str
    first: float
    stop: float


@dataclass(frozen=True, slots=True)
class ReadChoice:
    """Who reads a request's hit KV: one side, or with `Path.PARTS` each node its part."""

    path: Path
    parts: tuple[Part, ...] = ()


class Assignment(NamedTuple):
    """One attempt of a request: who prefills, who decodes, who reads, and why."""

    request_id: str
    attempt: int
    prefill_engine: str
    prefill_node: str
    decode_engine: str
    decode_node: str
    read: ReadChoice
    explain: Explain
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Revoked(NamedTuple):
    """This attempt is over: another one follows, or none. Whoever has begun it stops; daemons refuse it from the next one on."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Fence:
    """A node must refuse every call of this attempt and of lower ones from here on. Numbers rise."""

    number: int
    request_id: str
    attempt: int


class Delivery(NamedTuple):
    """What a leader is told. Numbers rise; a leader says in its next report which was the last it took."""

    number: int
    what: Assignment | Revoked


class Ticket(NamedTuple):
    """What a client is told of its request. `attempt`: the current one, or the last; `why`: of those that failed."""

    request_id: str
    state: State
    attempt: int
    assignment: Assignment | None = None
    why: str = ""


class Side:
    """One of the two engines that a request was given. Until its leader has heard of it the engine's own numbers do not hold it,
    and the scheduler adds it."""

    __slots__ = ("engine", "heard", "tokens", "why")

    def __init__(self, engine: Engine, tokens: int, why: EngineWhy) -> None:
        self.engine = engine
        self.tokens = tokens
        self.why = why
        self.heard = False

    def hear(self) -> None:
        if not self.heard:
            self.heard = True
            self.engine.heard(self.tokens)

    def let_go(self, request_id: str) -> None:
        """The request is not the engine's any more."""
        self.engine.live.pop(request_id, None)
        if not self.heard:
            self.heard = True
            self.engine.drop_unheard(self.tokens)


class Entry:
    """A live request. `order`: by arrival; `since_ns`: when it arrived, or came back after its engine was lost."""

    __slots__ = (
        "adopted",
        "arrived_ns",
        "assignment",
        "attempt",
        "decode",
        "given_out",
        "order",
        "prefill",
        "prefilled",
        "private_of",
        "request",
        "since_ns",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, order: int, attempt: int, now_ns: int) -> None:
        self.request = request
        self.tokens = request.prompt_tokens
        self.order = order
        self.attempt = attempt
        self.arrived_ns = self.since_ns = now_ns
        self.state = State.WAITING
        self.prefill: Side | None = None
        self.decode: Side | None = None
        self.prefilled = False
        self.adopted = False
        """Known from leaders that hold it; its client has not submitted it to this scheduler."""
        self.given_out = 0
        self.private_of: Group | None = None
        """The decode group in whose private queue it waits."""
        self.assignment: Assignment | None = None

    @property
    def lacks_engine(self) -> bool:
        """One that it needs yet."""
        return self.decode is None or (self.prefill is None and not self.prefilled)

    def ticket(self, why: str = "") -> Ticket:
        return Ticket(self.request.request_id, self.state, self.attempt, self.assignment, why)
