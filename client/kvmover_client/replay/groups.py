"""A group of engines on one node: its leader pulls work from the scheduler, its engines do it, whichever the scheduler chose."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvmover_client.async_client import AsyncClient
from kvmover_client.errors import DaemonGone, KvmoverError
from kvmover_client.leader import Leader
from kvmover_client.replay.board import Board, Entry, Failed
from kvmover_client.replay.engine import Engine
from kvmover_client.replay.engines import DecodeEngine, PrefillEngine
from kvmover_client.replay.pages import OutOfPages
from kvmover_client.replay.request import AttemptFailed
from kvmover_client.replay.turns import ATTEMPT_S
from kvmover_client.scheduling import Assignment, EngineLoad, Revoked, Role

PULL_FAILURES_MAX = 30

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True, slots=True)
class Place:
    """A node, and the session of a replay with its daemon."""

    node: str
    client: AsyncClient


@dataclass(frozen=True, slots=True)
class _Work:
    """An attempt that one engine has."""

    assignment: Assignment
    pages: int
    task: asyncio.Task[None]


class Group(ABC, Generic[E]):
    """Engines by name, and what they have been given. `by_rule` counts assignments, by the scheduler's words."""

    role: Role

    def __init__(self, place: Place, engines: Mapping[str, E], board: Board, model: str) -> None:
        self.place = place
        self.engines = engines
        self.by_rule: Counter[str] = Counter()
        self.revoked = 0
        self._board = board
        self._leader = Leader(place.client, f"{place.node}/{self.role.name.lower()}", model, self.role)
        self._work: dict[tuple[str, int], _Work] = {}

    async def lead(self) -> None:
        """Pulls until it is cancelled; then what runs is cancelled, too. Raises the errors of the client library, in a group."""
        failures = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    for delivery in await self._leader.pull([self._load(name) for name in self.engines]):
                        self._take(delivery, tasks)
                    failures = 0
                except KvmoverError as error:
                    failures += 1
                    if isinstance(error, DaemonGone) or failures == PULL_FAILURES_MAX:
                        raise
                await asyncio.sleep(self._leader.pull_again_s)

    def _take(self, delivery: Assignment | Revoked, tasks: asyncio.TaskGroup) -> None:
        if isinstance(delivery, Revoked):
            for (request_id, attempt), work in self._work.items():
                if request_id == delivery.request_id and attempt <= delivery.attempt:
                    self.revoked += 1
                    work.task.cancel()
            return
        self.by_rule[delivery.rules] += 1
        key = (delivery.request_id, delivery.attempt)
        entry = self._board.find(delivery.request_id)
        pages = self._pages(entry) if entry is not None else 0
        self._work[key] = _Work(delivery, pages, tasks.create_task(self._attempt(delivery, entry)))

    async def _attempt(self, assignment: Assignment, entry: Entry | None) -> None:
        """An attempt whose router is gone is finished at once: nobody waits for it."""
        key = (assignment.request_id, assignment.attempt)
        try:
            if entry is not None:
                async with asyncio.timeout(ATTEMPT_S):
                    await self._do(assignment, entry)
            self._say_done(*key)
        except (AttemptFailed, KvmoverError, OutOfPages, TimeoutError) as error:
            # The scheduler hears of it from the router, which leaves the request and submits it anew.
            retryable = isinstance(error, AttemptFailed | KvmoverError) and error.retryable
            assert entry is not None, "only engines fail"
            entry.failed(Failed(assignment.attempt, f"{self.place.node}: {error!r}", retryable))
        finally:
            del self._work[key]

    def _load(self, name: str) -> EngineLoad:
        """What the scheduler is told of an engine. Pages of what it was given count as taken, whether it has them yet or not."""
        engine = self.engines[name]
        mine = [work for work in self._work.values() if self._engine_of(work.assignment) == name]
        free = engine.kv.allocator.total - engine.unquiet_pages - sum(work.pages for work in mine)
        return EngineLoad(
            engine=name,
            requests=len(mine),
            prompt_tokens=sum(work.assignment.prompt_tokens for work in mine),
            free_hbm_tokens=max(0, free) * engine.model.layout.block_tokens,
            tokens_per_s=engine.tokens_per_s,
        )

    @abstractmethod
    async def _do(self, assignment: Assignment, entry: Entry) -> None:
        """The engine's half of an attempt. Raises `AttemptFailed`, `OutOfPages` and the errors of the client library."""

    @abstractmethod
    def _engine_of(self, assignment: Assignment) -> str:
        """Which of the group's engines it is for."""

    @abstractmethod
    def _pages(self, entry: Entry) -> int:
        """So many pages it takes of the engine."""

    @abstractmethod
    def _say_done(self, request_id: str, attempt: int) -> None:
        """The scheduler hears of it with the next pull."""


class PrefillGroup(Group[PrefillEngine]):
    """Loads, computes and pushes."""

    role = Role.PREFILL

    async def _do(self, assignment: Assignment, entry: Entry) -> None:
        engine = self.engines[assignment.prefill_engine]
        seen = await engine.prefill(entry.request, assignment.attempt, assignment.decode_node, assignment.read)
        entry.prefilled(assignment.attempt, seen)

    def _engine_of(self, assignment: Assignment) -> str:
        return assignment.prefill_engine

    def _pages(self, entry: Entry) -> int:
        return entry.request.prompt_pages

    def _say_done(self, request_id: str, attempt: int) -> None:
        self._leader.prefilled(request_id, attempt)


class DecodeGroup(Group[DecodeEngine]):
    """Assembles, takes over and generates."""

    role = Role.DECODE

    async def _do(self, assignment: Assignment, entry: Entry) -> None:
        engine = self.engines[assignment.decode_engine]
        request_id, attempt = assignment.request_id, assignment.attempt
        whole = partial(self._leader.whole, request_id, attempt)
        entry.decoded(attempt, await engine.decode(entry.request, attempt, whole))

    def _engine_of(self, assignment: Assignment) -> str:
        return assignment.decode_engine

    def _pages(self, entry: Entry) -> int:
        return entry.request.all_pages

    def _say_done(self, request_id: str, attempt: int) -> None:
        self._leader.finished(request_id, attempt)
