"""The router of a scheduled replay: gives each turn to the scheduler as it comes due, and waits until engines have done it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover_client.errors import KvmoverError, RequestWithdrawn, UnknownRequest
from kvmover_client.replay.board import Board, Entry, Failed, Finished
from kvmover_client.replay.engines import wait_found
from kvmover_client.replay.groups import Place
from kvmover_client.replay.request import AttemptFailed, Request, StoredBlocks
from kvmover_client.replay.turns import too_few
from kvmover_client.scheduling import CachedPrefix, TicketState
from kvmover_client.submitting import Submitted
from kvmover_client.words import LookupResult, Model

TRIES_MAX = 3
REQUEST_S = 300.0
DONE_S = 30.0
"""Until the scheduler knows, too, that a request is done which its engines have finished, and the other way round."""
CACHED_MAX = 16


@dataclass(frozen=True, slots=True)
class Routed:
    """Outcome of a turn. `ready_s`: from when it was due until its last layer was in the prefill engine.

    `failures` says how tries before ended, and are no errors when a later one succeeded.
    """

    finished: Finished | None
    ready_s: float = 0.0
    seconds: float = 0.0
    failures: Sequence[str] = ()
    errors: Sequence[str] = ()


class Router:
    """One for all nodes: it speaks to each by that node's own daemon, and knows what must be stored."""

    def __init__(self, places: Sequence[Place], model: Model, board: Board) -> None:
        self.stored = StoredBlocks()
        self._places = places
        self._model = model
        self._board = board

    async def play(self, request: Request, session: str, place: int) -> Routed:
        """Never raises for what a daemon or the scheduler did: that is in `errors`. `place`: whose daemon passes it on."""
        prompt = request.keys[: request.prompt_blocks]
        expected_blocks = self.stored.prefix_blocks(prompt)
        await asyncio.gather(*(wait_found(at.client, self._model, prompt[:expected_blocks]) for at in self._places))
        begun_s = time.perf_counter()
        failures: list[str] = []
        for number in range(1, TRIES_MAX + 1):
            # What an engine failed at is left: only the scheduler may begin a further attempt at the same request.
            again = dataclasses.replace(request, request_id=f"{request.request_id}.{number}")
            try:
                finished = await self._try(again, session, self._places[place % len(self._places)])
            except (AttemptFailed, KvmoverError) as failure:
                failures.append(f"try {number}: {failure}")
                if not failure.retryable:
                    break
                continue
            self.stored.add(finished.decoded.durable_keys)
            errors = finished.prefilled.errors + finished.decoded.errors
            errors = errors + too_few(finished.prefilled, expected_blocks, request)
            ready_s = finished.prefilled.ready_at_s - begun_s
            return Routed(finished, ready_s, time.perf_counter() - begun_s, failures, errors)
        return Routed(None, seconds=time.perf_counter() - begun_s, failures=failures, errors=failures)

    async def _try(self, request: Request, session: str, place: Place) -> Finished:
        """Raises `AttemptFailed` and the errors of the client library."""
        entry = self._board.open(request)
        try:
            hit_tokens, cached = await self._known(request)
            submitted = await place.client.submit(
                request.request_id,
                self._model.manifest.model_id,
                request.prompt_tokens,
                hit_tokens=hit_tokens,
                session=session,
                cached=cached,
                wait=True,
                timeout_s=REQUEST_S,
            )
            try:
                await _until_over(entry, submitted)
            except (AttemptFailed, KvmoverError):
                await _leave(submitted)
                raise
        finally:
            self._board.close(entry)
        if len(entry.finished) > 1:
            attempts = ", ".join(str(finished.attempt) for finished in entry.finished)
            raise AttemptFailed(f"finished more than once, under attempts {attempts}", retryable=False)
        return entry.finished[0]

    async def _known(self, request: Request) -> tuple[int, list[CachedPrefix]]:
        """Tokens that are stored, and the nodes that have some of them in their pools, and will when their turn comes."""
        prompt = request.keys[: request.hit_blocks_max]
        looked = await asyncio.gather(*(at.client.lookup(self._model, prompt) for at in self._places))
        hit_blocks = max(each.prefix_blocks for each in looked)
        lasting = [min(hit_blocks, _lasting(each, self._model.block_bytes)) for each in looked]
        cached = [
            CachedPrefix(at.node, blocks * request.block_tokens)
            for at, blocks in zip(self._places, lasting, strict=True)
            if blocks
        ]
        cached.sort(key=lambda prefix: -prefix.tokens)
        return hit_blocks * request.block_tokens, cached[:CACHED_MAX]


def _lasting(looked: LookupResult, block_bytes: int) -> int:
    """Leading blocks in a node's pool that what it reads before can't push out: each block that comes may cost one."""
    return max(0, looked.pooled_blocks - -(-looked.reader.queue_bytes // block_bytes))


async def _until_over(entry: Entry, submitted: Submitted) -> None:
    """Returns when both engines have finished an attempt, and the scheduler knows it. Raises as `Router._try`."""
    over = asyncio.create_task(entry.over.wait())
    told = asyncio.create_task(submitted.done())
    try:
        while not (over.done() or told.done()):
            failing = asyncio.create_task(entry.failures.get())
            await asyncio.wait({over, told, failing}, timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
            if not failing.done():
                failing.cancel()
            elif not _is_replaced(submitted, failing.result()):
                raise AttemptFailed(failing.result().message, retryable=failing.result().retryable)
        async with asyncio.timeout(DONE_S):
            await told
            await over
    except TimeoutError:
        raise AttemptFailed(
            f"engines have finished {len(entry.finished)} attempts, the scheduler says {submitted.ticket.state.name}: "
            f"still so after {DONE_S:g} s",
            retryable=False,
        ) from None
    finally:
        over.cancel()
        told.cancel()


def _is_replaced(submitted: Submitted, failure: Failed) -> bool:
    """Whether the scheduler has given the request to others, or will: then the failure is of what it had given up."""
    ticket = submitted.ticket
    return ticket.attempt > failure.attempt or (ticket.state is TicketState.WAITING and ticket.attempt > 0)


async def _leave(submitted: Submitted) -> None:
    """Engines and daemons hear that nobody waits for it."""
    try:
        await submitted.withdraw()
    except (UnknownRequest, RequestWithdrawn):
        return
