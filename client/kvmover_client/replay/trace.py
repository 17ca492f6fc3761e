"""Traces: agent sessions as turns, each a prompt that begins with some of what came before it. Sizes in tokens.

Three formats, told apart by their fields, one JSON object a line, plain or gzipped:
`requests` with `in`, `out`, `keep` (sessions as block ids; `keep` = leading blocks shared with the prompt before);
`turns` of [hit, uncached, generated] or [hit, uncached, generated, think_s], where the prompt is hit + uncached tokens.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BLOCK_TOKENS = 64
LINE_BYTES_MAX = 64 << 20
PROMPT_TOKENS_MAX = 1 << 24


class TraceError(ValueError):
    """A trace that can't be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and its reply.

    The prompt's first `kept_tokens` tokens are the leading ones of the previous prompt and reply; the others are new.
    """

    prompt_tokens: int
    output_tokens: int
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one agent. Sessions of equal `shared_tokens` begin with the same so many tokens: their tools."""

    name: str
    shared_tokens: int
    turns: tuple[Turn, ...]

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its reply have together."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)


def read_sessions(path: Path, *, sessions_max: int, turns_max: int) -> list[Session]:
    """The first sessions of a trace, each cut to its first turns. Raises `TraceError`."""
    found: list[Session] = []
    try:
        with _opened(path) as lines:
            for number, line in _lines(path, lines):
                for session in _parsed(f"{path}:{number}", line):
                    if len(found) == sessions_max:
                        return found
                    found.append(Session(session.name, session.shared_tokens, session.turns[:turns_max]))
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not found:
        raise TraceError(f"{path}: the trace has no session")
    return found


def _opened(path: Path) -> IO[bytes]:
    return io.BufferedReader(gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := lines.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"{path}:{number}: the line is longer than {LINE_BYTES_MAX} bytes")
        if line.strip():
            yield number, line


def _parsed(where: str, line: bytes) -> list[Session]:
    """Sessions with at least one turn that a line holds: a compact one also holds those of its sub-agents."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: a session must be a JSON object, this is a {type(record).__name__}")
    if isinstance(record.get("requests"), list):
        sessions = _compact(where, record)
    elif isinstance(record.get("turns"), list):
        sessions = [_simple(where, record)]
    else:
        raise TraceError(
            f"{where}: a session must have a list `requests` (in, out, keep) or `turns` ([hit, uncached, generated]); "
            f"this has the fields {sorted(record)[:12]}"
        )
    return [session for session in sessions if session.turns]


def _compact(where: str, record: dict[str, object]) -> list[Session]:
    """A session of block ids, then each of its sub-agents, which have prompts of their own."""
    block_tokens = _whole(where, record, "block_size", low=1) if "block_size" in record else BLOCK_TOKENS
    tool_tokens = _whole(where, record, "tool_tokens") if "tool_tokens" in record else 0
    name = str(record.get("id", where))
    own: list[dict[str, object]] = []
    found: list[Session] = []
    for request in _objects(where, record["requests"]):
        if "requests" not in request:
            own.append(request)
            continue
        turns = _compact_turns(where, _objects(where, request["requests"]), block_tokens)
        found.append(Session(f"{name}/{len(found) + 1}", 0, turns))
    shared_tokens = tool_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return [Session(name, shared_tokens, _compact_turns(where, own, block_tokens)), *found]


def _compact_turns(where: str, requests: list[dict[str, object]], block_tokens: int) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for request in requests:
        prompt, output = _whole(where, request, "in", low=1), _whole(where, request, "out")
        kept = _whole(where, request, "keep") * block_tokens
        turns.append(_turn(turns[-1] if turns else None, prompt, output, kept))
    return tuple(turns)


def _simple(where: str, record: dict[str, object]) -> Session:
    turns: list[Turn] = []
    listed = record["turns"]
    assert isinstance(listed, list), "_parsed looked"
    for number, entry in enumerate(listed):
        if not isinstance(entry, list) or len(entry) not in (3, 4):
            raise TraceError(f"{where}: turns[{number}] must be [hit, uncached, generated], it is {entry!r:.80}")
        names = ("hit", "uncached", "generated")
        fields: dict[str, object] = dict(zip(names, entry[:3], strict=True))
        hit, uncached, output = (_whole(f"{where}: turns[{number}]", fields, name) for name in names)
        if hit + uncached < 1:
            raise TraceError(f"{where}: turns[{number}] has an empty prompt")
        turns.append(_turn(turns[-1] if turns else None, hit + uncached, output, hit))
    warm_tokens = _whole(where, record, "warm_prefix") if "warm_prefix" in record else 0
    shared_tokens = warm_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    return Session(str(record.get("session", where)), shared_tokens, tuple(turns))


def _turn(previous: Turn | None, prompt: int, output: int, kept: int) -> Turn:
    """Who keeps all full blocks of the last prompt goes on from its reply, if the prompt is long enough for both."""
    if previous is None:
        return Turn(prompt, output, 0)
    said = previous.prompt_tokens + previous.output_tokens
    full = previous.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    if kept >= full and prompt > said:
        return Turn(prompt, output, said)
    return Turn(prompt, output, min(kept, previous.prompt_tokens, prompt))


def _objects(where: str, listed: object) -> list[dict[str, object]]:
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise TraceError(f"{where}: `requests` must be a list of objects")
    return listed


def _whole(where: str, record: dict[str, object], name: str, *, low: int = 0) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= PROMPT_TOKENS_MAX:
        raise TraceError(f"{where}: `{name}` is {value!r:.40}, must be a whole number, {low} to {PROMPT_TOKENS_MAX}")
    return value
