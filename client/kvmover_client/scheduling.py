"""The scheduler's words: tickets, assignments, reports of leaders. Tokens count hits and new ones, durations are in seconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover_client.errors import BadRequest
from kvmover_client.words import Part, Path

GAP_MAX = 1e-9
"""Fractions that are to follow each other may differ by so much: they were computed."""
DIGITS = 6
"""Remainders that are alike to so many are equal, and the first part comes first."""


class TicketState(enum.Enum):
    """Where a request is. The values are the numbers of `kvmover.v1.TicketState`."""

    WAITING = 1
    ASSIGNED = 2
    DONE = 3
    FAILED = 4
    WITHDRAWN = 5

    @property
    def is_over(self) -> bool:
        """No other state follows."""
        return self in (TicketState.DONE, TicketState.FAILED, TicketState.WITHDRAWN)


class Role(enum.Enum):
    """What a group's engines do. The values are the numbers of `kvmover.v1.Role`."""

    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """KV that need not be read: the first `tokens` of the prompt are at `where`, a node (in its pool) or an engine (in its
    pages)."""

    where: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PartOfRead:
    """One node reads [first, stop) of a request's hit blocks, as fractions of 1 in prompt order."""

    node: str
    first: float
    stop: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Who reads, as `Plan` takes it: `Plan(path=shares.path, parts=shares.parts)`. `path` None: there is nothing to read."""

    path: Path | None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadChoice:
    """Who reads: one side, the nodes decide, or `parts`, which follow each other from 0 to 1."""

    path: Path
    parts: tuple[PartOfRead, ...] = ()

    def shares(self, first_block: int, blocks: int) -> Shares:
        """The choice for the `blocks` blocks from `first_block` on: those that are hit and not resident.

        Every block is somebody's: each part gets its whole blocks, and those that are left over go to the largest
        remainders. A part that gets none is left out. Raises `BadRequest` for parts that leave a gap, or numbers below 0.

        >>> choice = ReadChoice(Path.PARTS, (PartOfRead("a", 0.0, 0.7), PartOfRead("b", 0.7, 1.0)))
        >>> [(part.node, part.blocks) for part in choice.shares(2, 5).parts]
        [('a', ((2, 6),)), ('b', ((6, 7),))]
        """
        if first_block < 0 or blocks < 0:
            raise BadRequest(f"{blocks} blocks from block {first_block} on are none: both must be 0 or more")
        if not blocks:
            return Shares(None)
        if self.path is not Path.PARTS:
            return Shares(self.path)
        at, ranges = first_block, dict[str, list[tuple[int, int]]]()
        for part, count in zip(self.parts, self._counts(blocks), strict=True):
            if count:
                mine = ranges.setdefault(part.node, [])
                first = mine.pop()[0] if mine and mine[-1][1] == at else at
                mine.append((first, at + count))
                at += count
        return Shares(Path.PARTS, tuple(Part(node, tuple(mine)) for node, mine in ranges.items()))

    def _counts(self, blocks: int) -> list[int]:
        """Blocks of each part. Raises `BadRequest`."""
        at = 0.0
        for part in self.parts:
            if not abs(part.first - at) <= GAP_MAX or not part.first <= part.stop <= 1 + GAP_MAX:
                raise BadRequest(f"the part [{part.first}, {part.stop}) of {part.node} does not follow {at}")
            at = part.stop
        if not self.parts or abs(at - 1) > GAP_MAX:
            raise BadRequest(f"{len(self.parts)} parts end at {at}, they must end at 1")
        exact = [(part.stop - part.first) * blocks for part in self.parts]
        # A whole number that was computed a hair too small is that number.
        counts = [int(share + GAP_MAX * blocks) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: round(counts[index] - exact[index], DIGITS))
        for index in by_remainder[: blocks - sum(counts)]:
            counts[index] += 1
        return counts


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt of a request: who prefills, who decodes, who reads. `rules`: why, in three words."""

    request_id: str
    attempt: int
    prefill_engine: str
    prefill_node: str
    decode_engine: str
    decode_node: str
    read: ReadChoice
    prompt_tokens: int
    hit_tokens: int = 0
    rules: str = ""


@dataclass(frozen=True, slots=True)
class Revoked:
    """An attempt that is over, and with it all lower ones: whoever has begun it stops. The daemon refuses its calls."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the scheduler knows of a request. `attempt`: the current one, or the last; 0: none was given out yet.

    `assignment` is None while it waits, and after it failed; `why` is of one that failed.
    """

    request_id: str
    state: TicketState
    attempt: int = 0
    assignment: Assignment | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which scheduler has answered: it knows nothing of what another boot was told. `epoch` rises with each that leads."""

    boot_id: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Explained:
    """Why the last assignment of a request is as it is: `text` for people, `json` (an object) for programs."""

    text: str
    json: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine of a group. `requests` were given to it and are not finished, with `prompt_tokens` tokens of prompts.

    `free_hbm_tokens`: what would fit beside all of these. `tokens_per_s`: prompt tokens that it lately got done while busy;
    0: not known.
    """

    engine: str
    requests: int
    prompt_tokens: int
    free_hbm_tokens: int
    tokens_per_s: int = 0


@dataclass(frozen=True, slots=True)
class HeldAssignment:
    """What a group goes on with. `prefill_done`: its KV is whole at the decode engine."""

    assignment: Assignment
    prefill_done: bool = False


@dataclass(frozen=True, slots=True)
class WorkReport:
    """One pull of a leader; `Leader` makes them. See `PullWorkRequest` for each field.

    `engines`: all of the group. `done`: attempts (request id, number) that were finished since the last answer, `failed`: those
    that were given back. `held` and `scheduler_boot_id`: for a scheduler that has asked for it by `Work.tell_held`.
    """

    group: str
    model: str
    role: Role
    boot_id: str
    sequence: int
    engines: Sequence[EngineLoad]
    heard: int = 0
    done: Sequence[tuple[str, int]] = ()
    failed: Sequence[tuple[str, int]] = ()
    held: Sequence[HeldAssignment] = ()
    scheduler_boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a leader is told. Numbers rise; those that it has not heard of are told again."""

    number: int
    what: Assignment | Revoked


@dataclass(frozen=True, slots=True)
class Work:
    """The answer to a pull. The next one is wanted within `pull_again_s`, or at once with all of `held` if `tell_held`."""

    scheduler: Identity
    deliveries: tuple[Delivery, ...]
    pull_again_s: float
    tell_held: bool = False

    @property
    def scheduler_boot_id(self) -> str:
        """Of the scheduler that has answered."""
        return self.scheduler.boot_id
