"""Many agents on many nodes: a scheduler chooses for each turn who prefills, who decodes and who reads; every byte is checked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvmover_client.async_client import AsyncClient
from kvmover_client.errors import KvmoverError
from kvmover_client.replay.board import Board
from kvmover_client.replay.engine import CONNECT_S, Engine
from kvmover_client.replay.engines import DecodeEngine, PrefillEngine
from kvmover_client.replay.groups import DecodeGroup, Place, PrefillGroup
from kvmover_client.replay.player import check_memory, check_pages, manifest_of, pages_needed, request_of
from kvmover_client.replay.report import Json
from kvmover_client.replay.router import Router
from kvmover_client.replay.sampling import Samples, sample, sample_once
from kvmover_client.replay.scheduled_report import RoutedTurn, ScheduledReport
from kvmover_client.replay.tokens import TurnTokens, conversation
from kvmover_client.replay.trace import Session, read_sessions
from kvmover_client.words import Manifest

SESSIONS_MAX = 1024
SPARE = 2
"""An engine has pages for so many times its even share of the turns at once; beyond that they wait for each other."""

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True, slots=True)
class ScheduledOptions:
    """What to replay, and where. `prefill` and `decode`: endpoints of the nodes' daemons by the names of the nodes.

    Each of the `agents` plays a session of the trace, by turns, in words of its own: no two share a prefix. `at_once`: so many
    turns are due at the same time; the agents take them in the order in which their last ones ended. `engines`: of each node.
    `rate_bytes_per_s`: what each node's storage gives at most, 0 for no bound.
    """

    prefill: Mapping[str, str]
    decode: Mapping[str, str]
    trace: Path
    layers: int = 8
    agents: int = 36
    turns: int = 4
    at_once: int = 12
    seed: int = 0
    engines: int = 1
    rate_bytes_per_s: int = 0

    @property
    def pages_at_once(self) -> int:
        """Turns that one engine has pages for."""
        return -(-SPARE * self.at_once // (min(len(self.prefill), len(self.decode)) * self.engines))


async def replay_scheduled(options: ScheduledOptions, tell: Callable[[Json], None]) -> Json:
    """Plays, tells each turn as it ends, and returns the summary; what went wrong is in its `errors`.

    Raises `TraceError`, `NotEnoughMemory` and, while engines start or when a daemon goes, the errors of the client library.
    """
    sessions = agents_of(
        read_sessions(options.trace, sessions_max=SESSIONS_MAX, turns_max=options.turns), options.agents
    )
    manifest = manifest_of(options.layers)
    pages = pages_needed(sessions, options.pages_at_once)
    engines = options.engines * (len(options.prefill) + len(options.decode))
    check_memory(pages * manifest.layout.block_bytes * engines)
    tell({"message": _begin(options, sessions, pages * manifest.layout.block_bytes)})
    board = Board()
    async with contextlib.AsyncExitStack() as opened:
        prefill, decode = list[PrefillGroup](), list[DecodeGroup]()
        for node, endpoint in options.prefill.items():
            found = await _open(PrefillEngine, node, endpoint, manifest, pages, options, opened)
            prefill.append(PrefillGroup(*found, board, manifest.model_id))
        for node, endpoint in options.decode.items():
            taken = await _open(DecodeEngine, node, endpoint, manifest, pages, options, opened)
            decode.append(DecodeGroup(*taken, board, manifest.model_id))
        stage = _Stage(prefill, decode, board, options, tell)
        await stage.run(sessions)
        return stage.summary()


def agents_of(sessions: Sequence[Session], agents: int) -> list[Session]:
    """So many sessions: those of a trace again and again, under names of their own, by which their words differ.

    What storage must give would else be a few tools that soon are in every pool.
    """
    found = []
    for number in range(agents):
        again, index = divmod(number, len(sessions))
        session = sessions[index]
        name = f"{session.name}#{again}" if again else session.name
        found.append(dataclasses.replace(session, name=name, shared_tokens=0))
    return found


async def _open(
    kind: type[E],
    node: str,
    endpoint: str,
    manifest: Manifest,
    pages: int,
    options: ScheduledOptions,
    opened: contextlib.AsyncExitStack,
) -> tuple[Place, dict[str, E]]:
    """A session with a node's daemon, and the node's engines. Raises the errors of the client library."""
    client = await AsyncClient.connect(endpoint, name=f"replay-{node}", timeout_s=CONNECT_S)
    opened.push_async_callback(client.close)
    engines = {}
    for number in range(options.engines):
        name = f"{node}/{number}"
        engines[name] = await kind.open(client, name=name, manifest=manifest, pages=pages, seed=options.seed + number)
        opened.push_async_callback(engines[name].close)
    return Place(node, client), engines


class _Stage:
    """Groups on all nodes, the router before them, and a look at each node's storage."""

    def __init__(
        self,
        prefill: Sequence[PrefillGroup],
        decode: Sequence[DecodeGroup],
        board: Board,
        options: ScheduledOptions,
        tell: Callable[[Json], None],
    ) -> None:
        self._prefill = prefill
        self._groups: list[PrefillGroup | DecodeGroup] = [*prefill, *decode]
        places = [group.place for group in self._groups]
        self._model = next(iter(prefill[0].engines.values())).model
        self._router = Router(places, self._model, board)
        self._clients = {place.node: place.client for place in places}
        self._samples = {place.node: Samples() for place in places}
        self._report = ScheduledReport()
        self._options = options
        self._tell = tell
        self._places = asyncio.Semaphore(options.at_once)
        self._seconds = 0.0
        # Two replays against the same daemons must not look like attempts at the same requests.
        self._run = f"{time.time_ns():x}"

    async def run(self, sessions: Sequence[Session]) -> None:
        """All sessions from begin to end. Raises the errors of the client library when a leader can't go on."""
        begun_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(group.lead()) for group in self._groups]
                beside.append(tasks.create_task(sample(self._clients, self._samples)))
                await self._play(sessions)
                self._seconds = time.monotonic() - begun_s
                for task in beside:
                    task.cancel()
        except ExceptionGroup as group:
            raise _first_of(group) from group
        await sample_once(self._clients, self._samples)
        for each in self._groups:
            check_pages(self._report, list(each.engines.values()))

    def summary(self) -> Json:
        by_rule = sum((group.by_rule for group in self._prefill), Counter[str]())
        summary = self._report.summary(self._samples, self._options.rate_bytes_per_s, by_rule, self._seconds)
        revoked = sum(group.revoked for group in self._groups)
        return summary | {"assigned": by_rule.total(), "revoked": revoked}

    async def _play(self, sessions: Sequence[Session]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, session in enumerate(sessions):
                tasks.create_task(self._agent(index, session))

    async def _agent(self, index: int, session: Session) -> None:
        for number, tokens in enumerate(conversation(session, self._options.seed)):
            async with self._places:
                if not await self._turn(index, session, number, tokens):
                    break

    async def _turn(self, index: int, session: Session, number: int, tokens: TurnTokens) -> bool:
        """False when the turn failed: without its blocks those after it mean nothing."""
        name = f"replay-{self._run}-{index}-{number}"
        request = await asyncio.to_thread(request_of, name, self._model.fingerprint, tokens)
        routed = await self._router.play(request, session.name, index)
        turn = RoutedTurn(session.name, number, request.prompt_tokens, routed)
        self._report.add(turn)
        self._tell(turn.as_json())
        return routed.finished is not None


def _first_of(group: BaseExceptionGroup[Exception]) -> Exception:
    """An error of a daemon by itself, so that it can be told in a line; else the group, which is a fault of the replay."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, KvmoverError) else group  # type: ignore[return-value]


def _begin(options: ScheduledOptions, sessions: Sequence[Session], memory_bytes: int) -> str:
    turns = sum(len(session.turns) for session in sessions)
    return (
        f"{len(sessions)} agents, {turns} turns of {options.trace.name}, {options.at_once} at once, {options.layers} layers; "
        f"{len(options.prefill)} prefill and {len(options.decode)} decode nodes with {options.engines} engines each, "
        f"{memory_bytes / 1e6:.0f} MB of pages in an engine"
    )
