"""What leaders go on with while the scheduler starts anew, so that it knows of it, too."""

from __future__ import annotations

from dataclasses import dataclass

from kvmoverd.core.scheduling.explain import EngineWhy, Explain, PathWhy
from kvmoverd.core.scheduling.reports import COUNT_MAX, NAME_CHARS_MAX, REQUEST_ID_CHARS_MAX, TOKENS_MAX, BadReport
from kvmoverd.core.scheduling.requests import Assignment, ReadChoice, Request

ADOPTED = "adopted"
ATTEMPT_MAX = COUNT_MAX - (1 << 20)
"""Of an attempt that is held: more than 65,000 can follow before numbers end."""
STOP_MAX = 1 + 1e-6
"""Of the parts of a read: fractions were computed."""


@dataclass(frozen=True, slots=True)
class Held:
    """An assignment that a group has from an earlier scheduler and has not finished. `prefill_done`: its KV is whole at the
    decode engine. Raises `BadReport`."""

    request_id: str
    attempt: int
    prefill_engine: str
    prefill_node: str
    decode_engine: str
    decode_node: str
    read: ReadChoice
    prompt_tokens: int
    hit_tokens: int = 0
    prefill_done: bool = False

    def __post_init__(self) -> None:
        names = (self.prefill_engine, self.prefill_node, self.decode_engine, self.decode_node)
        if not (
            0 < len(self.request_id) <= REQUEST_ID_CHARS_MAX
            and 1 <= self.attempt <= ATTEMPT_MAX
            and all(0 < len(name) <= NAME_CHARS_MAX for name in names)
            and 0 <= self.hit_tokens <= self.prompt_tokens <= TOKENS_MAX
            and self.prompt_tokens > 0
        ):
            raise BadReport(
                f"held request {self.request_id[:REQUEST_ID_CHARS_MAX]!r}, attempt {self.attempt}: {self.hit_tokens} hit of "
                f"{self.prompt_tokens} tokens, engines and nodes {[name[:NAME_CHARS_MAX] for name in names]}"
            )

        for part in self.read.parts:
            if not (0 < len(part.node) <= NAME_CHARS_MAX and 0 <= part.first <= part.stop <= STOP_MAX):
                raise BadReport(
                    f"held request {self.request_id!r}: node {part.node[:NAME_CHARS_MAX]!r} is to read [{part.first}, "
                    f"{part.stop}): names have 1 to {NAME_CHARS_MAX} characters, fractions are 0 to 1"
                )

    def request(self, model: str) -> Request:
        """As its client may have submitted it; what a leader does not know of it is left out."""
        return Request(self.request_id, model, self.prompt_tokens, self.hit_tokens)

    def assignment(self, policy: str) -> Assignment:
        """Nobody knows any more why it was given so."""
        prefill, decode = EngineWhy(ADOPTED, self.prefill_engine, ()), EngineWhy(ADOPTED, self.decode_engine, ())
        why = Explain(policy, prefill, decode, PathWhy(ADOPTED, (), 0), 0)
        return Assignment(
            self.request_id,
            self.attempt,
            self.prefill_engine,
            self.prefill_node,
            self.decode_engine,
            self.decode_node,
            self.read,
            why,
            self.prompt_tokens,
            self.hit_tokens,
        )
