"""Why a request was given to whom: the numbers that its choice was made with, as they were at that moment.

A pull looks at its candidates once (`Board`) and may decide many requests; each decision keeps the board and how many were
decided before it, so that what each candidate looked like is worked out when somebody asks, and not for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Json = dict[str, object]


class Seen(NamedTuple):
    """A candidate as its group's pull found it. `read_queue_bytes` is its node's; -1: not known."""

    engine: str
    node: str
    seq_e: int
    tok_e: int
    free_hbm_tokens: int
    read_queue_bytes: int


class Given(NamedTuple):
    """A request of so many tokens went to the candidate at this place, whose node's read queue is so long since."""

    place: int
    tokens: int
    read_queue_bytes: int


@dataclass(slots=True)
class Board:
    """The candidates of one pull, and what was given to whom in it, in order."""

    seen: Sequence[Seen]
    given: list[Given] = field(default_factory=list)

    def at(self, step: int) -> list[Seen]:
        """The candidates before the decision number `step` of this pull."""
        more: dict[int, tuple[int, int]] = {}
        queues: dict[str, int] = {}
        for place, tokens, queue_bytes in self.given[:step]:
            count, total = more.get(place, (0, 0))
            more[place] = count + 1, total + tokens
            queues[self.seen[place].node] = queue_bytes
        found = []
        for place, seen in enumerate(self.seen):
            count, total = more.get(place, (0, 0))
            found.append(
                seen._replace(
                    seq_e=seen.seq_e + count,
                    tok_e=seen.tok_e + total,
                    free_hbm_tokens=seen.free_hbm_tokens - total,
                    read_queue_bytes=queues.get(seen.node, seen.read_queue_bytes),
                )
            )
        return found


NO_BOARD = Board(())


class EngineWhy(NamedTuple):
    """Why this engine. `rule` is one word of a few, which metrics count by: "C2", "C3" (prefill), "low", "least" (decode),
    "turn" (round robin), "soonest", "cached", "affinity" (joint).

    `numbers`: by name, what the rule compared: the tokens alpha and beta, the level Z, the chosen engine's load before.
    """

    rule: str
    engine: str
    numbers: Sequence[tuple[str, float]]
    board: Board = NO_BOARD
    step: int = 0


class PathWhy(NamedTuple):
    """Why these nodes read. `rule`: "shorter", "tie", "unknown", "alternate", "fixed", and for several readers their plan's word.

    `queues`: bytes ahead of each node that was compared, by name; -1: not known. `hit_bytes`: what has to be read. `reads`: of
    several readers how much each does, by name.
    """

    rule: str
    queues: tuple[tuple[str, int], ...]
    hit_bytes: int
    reads: tuple[tuple[str, int], ...] = ()


class Explain(NamedTuple):
    """Why an assignment is as it is. `waited_ns`: from its arrival, or from when it came back, to the decision."""

    policy: str
    prefill: EngineWhy
    decode: EngineWhy
    path: PathWhy
    waited_ns: int

    @property
    def rules(self) -> tuple[str, str, str]:
        """In three words, for metrics."""
        return self.prefill.rule, self.decode.rule, self.path.rule

    def json(self, *, candidates: bool = False) -> Json:
        """All of it, for logs; with each candidate as it was if asked."""
        return {
            "policy": self.policy,
            "waited_ns": self.waited_ns,
            "prefill": _engine_json(self.prefill, candidates),
            "decode": _engine_json(self.decode, candidates),
            "path": {"rule": self.path.rule, "queues": dict(self.path.queues), "hit_bytes": self.path.hit_bytes},
        }

    def text(self) -> str:
        """For people: a line for each of the three choices, and one for each candidate."""
        lines = [f"policy {self.policy}, waited {self.waited_ns / 1e6:.1f} ms"]
        for what, why in (("prefill", self.prefill), ("decode", self.decode)):
            numbers = ", ".join(f"{name} {number:g}" for name, number in why.numbers)
            lines.append(f"{what}: {why.engine} by {why.rule} ({numbers})")
            lines += [_candidate_text(seen, why) for seen in why.board.at(why.step)]
        queues = ", ".join(f"{node} {ahead:d} B" for node, ahead in self.path.queues)
        return "\n".join([*lines, f"path: {self.path.rule} of {queues}; {self.path.hit_bytes} B to read"])


def _engine_json(why: EngineWhy, candidates: bool) -> Json:
    found: Json = {"rule": why.rule, "engine": why.engine, **dict(why.numbers)}
    if candidates:
        classed = classes(why)
        found["candidates"] = [
            {**seen._asdict(), "class": word} for seen, word in zip(why.board.at(why.step), classed, strict=True)
        ]
    return found


def classes(why: EngineWhy) -> list[str]:
    """Of each candidate the class that it was in: C1, C2, C3 by the paper's first algorithm, or where a level Z was compared
    "low", "rest", "full"; "" where the rule has no classes."""
    numbers = dict(why.numbers)
    candidates = why.board.at(why.step)
    if "alpha_bytes" in numbers:
        alpha, beta = numbers["alpha_bytes"], numbers["beta_tokens"]
        return [
            "C1" if seen.tok_e > beta else "C2" if 0 <= seen.read_queue_bytes <= alpha else "C3" for seen in candidates
        ]
    if "z_tokens" in numbers:
        z, tokens = numbers["z_tokens"], numbers["tokens"]
        return [
            "full" if seen.free_hbm_tokens < tokens else "low" if seen.tok_e + tokens <= z else "rest"
            for seen in candidates
        ]
    return [""] * len(candidates)


def _candidate_text(seen: Seen, why: EngineWhy) -> str:
    mark = "*" if seen.engine == why.engine else " "
    return (
        f" {mark} {seen.engine}: seq_e {seen.seq_e}, tok_e {seen.tok_e}, free HBM {seen.free_hbm_tokens} tokens, "
        f"read queue of {seen.node} {seen.read_queue_bytes} B"
    )
