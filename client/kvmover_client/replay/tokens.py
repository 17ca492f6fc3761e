"""Token ids of a session: deterministic in (seed, session, turn, position), equal where prompts share tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmover_client.replay.mixing import Words, mixed, named, sequence
from kvmover_client.replay.trace import Session

Tokens: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True, eq=False, slots=True)
class TurnTokens:
    """Ids of one turn: the prompt, and the reply that the decode engine will generate."""

    prompt: Tokens
    reply: Tokens

    @property
    def all(self) -> Tokens:
        return np.concatenate([self.prompt, self.reply])


def conversation(session: Session, seed: int) -> Iterator[TurnTokens]:
    """The turns of a session, in order.

    What a prompt keeps, it keeps to the id. Where it does not keep the shared prefix, it begins with it anew: an agent
    that starts over still has its tools.
    """
    said: Tokens = np.zeros(0, dtype=np.uint32)
    shared = _text(0, session.shared_tokens, seed, "shared", session.shared_tokens)
    for number, turn in enumerate(session.turns):
        kept = said[: turn.kept_tokens]
        tools = shared[len(kept) : turn.prompt_tokens]
        begun = len(kept) + len(tools)
        new = _text(begun, turn.prompt_tokens - begun, seed, "prompt", session.name, number)
        reply = _text(turn.prompt_tokens, turn.output_tokens, seed, "reply", session.name, number)
        turn_tokens = TurnTokens(np.concatenate([kept, tools, new]), reply)
        yield turn_tokens
        said = turn_tokens.all


def chain(tokens: Tokens) -> Words:
    """A word per token that depends on its id, its position and every token before it.

    >>> bool(chain(np.array([1, 2], dtype=np.uint32))[1] == chain(np.array([2, 2], dtype=np.uint32))[1])
    False
    """
    positions = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
    return mixed(np.cumsum(mixed(positions | tokens.astype(np.uint64)), dtype=np.uint64))


def _text(first: int, count: int, *what: object) -> Tokens:
    return (sequence(named(*what), first, count) >> np.uint64(32)).astype(np.uint32)
