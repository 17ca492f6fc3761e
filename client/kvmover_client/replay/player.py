"""Player: replays the sessions of a trace, a few at a time, and reports each turn."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmover_client import Layout, Manifest, block_keys
from kvmover_client.replay.engine import Engine
from kvmover_client.replay.engines import DecodeEngine, PrefillEngine
from kvmover_client.replay.report import Json, Report, TurnPlayed
from kvmover_client.replay.request import ReadPath, Request
from kvmover_client.replay.tokens import TurnTokens, chain, conversation
from kvmover_client.replay.trace import BLOCK_TOKENS, Session, read_sessions
from kvmover_client.replay.turns import Stage

MODEL = "DeepSeek-V3.2"
TOKEN_BYTES = 656
ENGINES = 2
PATHS = (ReadPath.PE, ReadPath.DE, ReadPath.AUTO)


@dataclass(frozen=True, slots=True)
class Options:
    """What to replay, and where. `at_once`: sessions that play at the same time; `paths`: they take turns.

    `stored`: the prompts of all first turns are in the store, by an earlier replay; one that is not found is an error.
    """

    prefill: str
    decode: str
    decode_node: str
    trace: Path
    layers: int = 61
    sessions: int = 2
    turns: int = 4
    seed: int = 0
    at_once: int = 2
    paths: tuple[ReadPath, ...] = PATHS
    stored: bool = False


class ErrorList(Protocol):
    """Where errors of a replay are kept."""

    def error(self, message: str) -> None: ...


class NotEnoughMemory(Exception):
    """The engines' pages would not fit into this machine."""


async def replay(options: Options, tell: Callable[[Json], None]) -> Report:
    """Plays and tells each turn as it ends; what went wrong is in the report.

    Raises `TraceError`, `NotEnoughMemory` and, while the engines start, the errors of the client library.
    """
    sessions = read_sessions(options.trace, sessions_max=options.sessions, turns_max=options.turns)
    manifest = manifest_of(options.layers)
    pages = pages_needed(sessions, options.at_once)
    check_memory(pages * manifest.layout.block_bytes * ENGINES)
    tell({"message": _begin(options, sessions, pages * manifest.layout.block_bytes)})
    prefill = await PrefillEngine.start(
        options.prefill, name="replay-prefill", manifest=manifest, pages=pages, seed=options.seed
    )
    try:
        decode = await DecodeEngine.start(
            options.decode, name="replay-decode", manifest=manifest, pages=pages, seed=options.seed + 1
        )
    except BaseException:
        await prefill.close()
        raise
    try:
        player = _Player(Stage(prefill, decode, options.decode_node), options, tell)
        await player.play(sessions)
        check_pages(player.report, (prefill, decode))
    finally:
        await prefill.close()
        await decode.close()
    return player.report


class _Player:
    """Sessions begin in order: each after the first turn of the one before, whose tools it then finds stored."""

    def __init__(self, stage: Stage, options: Options, tell: Callable[[Json], None]) -> None:
        self.report = Report()
        self._stage = stage
        self._options = options
        self._tell = tell
        self._places = asyncio.Semaphore(options.at_once)
        # Two replays against the same daemons must not look like attempts at the same requests.
        self._run = f"{time.time_ns():x}"

    async def play(self, sessions: Sequence[Session]) -> None:
        begun = [asyncio.Event() for _ in sessions]
        async with asyncio.TaskGroup() as group:
            for index, session in enumerate(sessions):
                before = begun[index - 1] if index else None
                group.create_task(self._session(index, session, before, begun[index]))

    async def _session(self, index: int, session: Session, before: asyncio.Event | None, begun: asyncio.Event) -> None:
        """Each turn has its deadline, so the wait for the session before has one too."""
        if before is not None:
            await before.wait()
        try:
            async with self._places:
                for number, tokens in enumerate(conversation(session, self._options.seed)):
                    if not await self._turn(index, session, number, tokens):
                        break
                    begun.set()
        finally:
            begun.set()

    async def _turn(self, index: int, session: Session, number: int, tokens: TurnTokens) -> bool:
        """False when the turn failed: without its blocks those after it mean nothing."""
        paths = self._options.paths
        path = paths[(index + number) % len(paths)]
        request = await asyncio.to_thread(self._request, f"{index}-{number}", tokens)
        if self._options.stored and number == 0:
            self._stage.stored.add(request.keys[: request.prompt_blocks])
        played = await self._stage.play(request, path)
        turn = TurnPlayed(session.name, number, path, request.prompt_tokens, BLOCK_TOKENS, played)
        self.report.add(turn)
        self._tell(turn.as_json())
        return played.succeeded

    def _request(self, name: str, tokens: TurnTokens) -> Request:
        return request_of(f"replay-{self._run}-{name}", self._stage.prefill.model.fingerprint, tokens)


def request_of(request_id: str, fingerprint: bytes, tokens: TurnTokens) -> Request:
    """What a turn's tokens say: keys and chain take a while for long prompts."""
    said = tokens.all
    keys = block_keys(fingerprint, said, BLOCK_TOKENS)
    return Request(request_id, keys, chain(said), len(tokens.prompt), BLOCK_TOKENS)


def manifest_of(layers: int) -> Manifest:
    """The replay's KV is its own: the digests name how it is made, so that no real model's blocks ever match."""
    return Manifest(
        model_id=MODEL,
        weights_digest=hashlib.blake2b(b"kvmover replay: kv 1", digest_size=32).digest(),
        tokenizer_digest=hashlib.blake2b(b"kvmover replay: tokens 1", digest_size=32).digest(),
        layout=Layout.uniform(layers=layers, tokens=BLOCK_TOKENS, token_bytes=TOKEN_BYTES),
        dtype="fp8_e4m3+bf16_rope",
    )


def pages_needed(sessions: Sequence[Session], at_once: int) -> int:
    """Of each engine: the longest context, as often as sessions play at once."""
    longest_tokens = max(session.context_tokens for session in sessions)
    return -(-longest_tokens // BLOCK_TOKENS) * min(at_once, len(sessions))


def check_memory(needed_bytes: int) -> None:
    """Raises `NotEnoughMemory`."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) * 1024
            if needed_bytes > available_bytes:
                raise NotEnoughMemory(
                    f"the engines' pages take {needed_bytes} bytes, {available_bytes} are available: "
                    "replay fewer layers, fewer turns, or one session at a time"
                )


def check_pages(report: ErrorList, engines: Sequence[Engine]) -> None:
    for engine in engines:
        if engine.unquiet_pages:
            report.error(f"{engine.name}: {engine.unquiet_pages} pages never became quiet")


def _begin(options: Options, sessions: Sequence[Session], memory_bytes: int) -> str:
    turns = sum(len(session.turns) for session in sessions)
    return (
        f"{len(sessions)} sessions, {turns} turns of {options.trace.name}, {options.layers} layers, "
        f"{memory_bytes / 1e6:.0f} MB of pages in each engine"
    )
