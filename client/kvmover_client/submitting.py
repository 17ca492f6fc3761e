"""Requests that are given to the scheduler, and what becomes of them: through restarts of it, and of the node's daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from kvmover_client import scheduling_wire as wire
from kvmover_client.errors import RequestFailed, RequestWithdrawn, TimedOut, UnknownRequest
from kvmover_client.link import Link
from kvmover_client.scheduler_desk import ANSWER_S, Desk
from kvmover_client.scheduling import (
    Assignment,
    CachedPrefix,
    Explained,
    ReadChoice,
    Ticket,
    TicketState,
    Work,
    WorkReport,
)
from kvmover_proto import scheduler_pb2

SUBMIT_S = 600.0
"""What a scheduler lets a request wait for its engines, by default."""

T = TypeVar("T")


class Submitted:
    """A request that waits for its engines, or has them. `AsyncClient.submit` makes it; any task of the loop may wait for it.

    Nothing is asked while nobody waits: somebody should, until it is done. A scheduler that is another one than before, or that
    does not know the request, is given it again, with the highest attempt that was heard of: so it is not lost, and no attempt
    has a second one beside it. While no scheduler or no daemon answers, waits go on until their time is over.
    """

    def __init__(self, desk: Desk, request: scheduler_pb2.SubmitRequest, until_s: float) -> None:
        """Use `AsyncClient.submit`. `until_s`: of the loop's clock, for all waits."""
        self._desk = desk
        self._request = request
        self._until_s = until_s
        self._turn = asyncio.Lock()
        self._scheduler_boot_id = ""
        self._ticket = Ticket(request.request_id, TicketState.WAITING)
        self._attempt = 0
        self._in_touch = True
        """False after a question without an answer: what is known may be another scheduler's by now."""

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def ticket(self) -> Ticket:
        """What was last heard. Nothing new is heard while nobody waits."""
        return self._ticket

    async def assigned(self, timeout_s: float | None = None) -> Assignment:
        """Who has the request, as soon as somebody has it. It may go to others later: `change`.

        Raises `RequestFailed`, `RequestWithdrawn`, `TimedOut` with what was last known, `UnknownRequest` when it ended so long
        ago that nothing more is known of it. `timeout_s` None: as long as `submit` said.
        """
        return await self._until(self._assignment, "assigned", timeout_s)

    async def done(self, timeout_s: float | None = None) -> Ticket:
        """Returns when the decode engine has finished it. Raises as `assigned`."""
        return await self._until(lambda: self._ticket if self._over() else None, "done", timeout_s)

    async def change(self, timeout_s: float | None = None, *, known: Ticket | None = None) -> Ticket:
        """The ticket, as soon as its state or its attempt is another than that of `known`, or than now; at once when it is over.

        Raises `TimedOut`, `UnknownRequest`, as `assigned`.
        """
        before = known or self._ticket

        def changed() -> Ticket | None:
            now = self._ticket
            is_news = now.state.is_over or (now.state, now.attempt) != (before.state, before.attempt)
            return now if is_news else None

        return await self._until(changed, "changed", timeout_s)

    async def withdraw(self, timeout_s: float = ANSWER_S) -> Ticket:
        """Leaves the request: its engines are told, and daemons refuse its attempts from here on. DONE: it came too late.

        Waits until a scheduler has heard it. Raises `TimedOut`, `UnknownRequest`.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        await self._desk.patiently(lambda: self._withdraw(until_s), self._last_known, until_s=until_s)
        return self._ticket

    async def explain(self, timeout_s: float = ANSWER_S) -> Explained:
        """Why its last assignment is as it is. Raises `UnknownRequest` for one that never had any, `TimedOut`."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        request = scheduler_pb2.ExplainRequest(request_id=self.request_id)

        async def ask() -> scheduler_pb2.ExplainReply:
            return await self._desk.ask(lambda stub: stub.Explain, request, "explain", until_s=until_s)

        reply = await self._desk.patiently(ask, self._last_known, until_s=until_s)
        return Explained(reply.text, reply.json)

    async def _begin(self, *, wait: bool) -> None:
        """The first `Submit`; `wait`: also while the scheduler's queue is full."""
        until_s = self._until_s
        await self._desk.patiently(lambda: self._submit(until_s), self._last_known, until_s=until_s, also_full=wait)

    async def _until(self, found: Callable[[], T | None], what: str, timeout_s: float | None) -> T:
        """One waiter asks for all that wait; the others look at what it has heard."""
        loop = asyncio.get_running_loop()
        until_s = self._until_s if timeout_s is None else min(self._until_s, loop.time() + timeout_s)
        late = f"{self.request_id} is not {what} in time"
        while (result := found()) is None:
            async with self._asking(until_s, late):
                if found() is None:
                    await self._desk.patiently(
                        lambda: self._poll(until_s), lambda: f"{late}: {self._last_known()}", until_s=until_s
                    )
            if found() is None and loop.time() >= until_s:
                raise TimedOut(f"{late}: {self._last_known()}")
        return result

    @asynccontextmanager
    async def _asking(self, until_s: float, late: str) -> AsyncIterator[None]:
        """Raises `TimedOut`."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._turn.acquire()
        except TimeoutError:
            raise TimedOut(f"{late}: {self._last_known()}") from None
        try:
            yield
        finally:
            self._turn.release()

    async def _poll(self, until_s: float) -> None:
        """Waits for a change for a while; what has become of the request is in the ticket then."""
        known, in_touch = self._ticket, self._in_touch

        def message(wait_ms: int) -> scheduler_pb2.GetTicketRequest:
            return scheduler_pb2.GetTicketRequest(
                request_id=known.request_id,
                known_state=scheduler_pb2.TicketState.ValueType(known.state.value),
                known_attempt=known.attempt,
                wait_ms=wait_ms if in_touch else 0,
            )

        self._in_touch = False
        try:
            reply = await self._desk.poll(lambda stub: stub.GetTicket, message, "get_ticket", until_s=until_s)
        except UnknownRequest as error:
            self._check_forgotten(error)
            await self._submit(until_s)
            return
        if reply.scheduler.boot_id == self._scheduler_boot_id:
            self._take(reply)
        else:
            self._desk.check(wire.identity_from(reply.scheduler))
            self._attempt = max(self._attempt, reply.attempt)
            await self._submit(until_s)

    async def _submit(self, until_s: float) -> None:
        if self._ticket.state.is_over:
            # It was withdrawn meanwhile: it must not begin anew.
            return
        request = scheduler_pb2.SubmitRequest()
        request.CopyFrom(self._request)
        request.after_attempt = self._attempt
        # From here on some engine may have it, also if no answer comes: another scheduler than this one must look for that first.
        self._attempt = max(1, self._attempt)
        self._take(await self._desk.ask(lambda stub: stub.Submit, request, "submit", until_s=until_s))

    async def _withdraw(self, until_s: float) -> None:
        request = scheduler_pb2.WithdrawRequest(request_id=self.request_id)
        try:
            reply = await self._desk.ask(lambda stub: stub.Withdraw, request, "withdraw", until_s=until_s)
        except UnknownRequest as error:
            if self._ticket.state.is_over:
                return
            self._check_forgotten(error)
            # Leaders may hold what a new scheduler has not heard of: it must know that this one is withdrawn.
            await self._submit(until_s)
            reply = await self._desk.ask(lambda stub: stub.Withdraw, request, "withdraw", until_s=until_s)
        self._take(reply)

    def _take(self, reply: scheduler_pb2.TicketReply) -> None:
        """Raises `SchedulerUnreachable` for the words of a scheduler that leads no more."""
        self._scheduler_boot_id = self._desk.check(wire.identity_from(reply.scheduler)).boot_id
        self._attempt = max(self._attempt, reply.attempt)
        self._in_touch = True
        if not self._ticket.state.is_over:
            self._ticket = wire.ticket_from(reply)

    def _check_forgotten(self, error: UnknownRequest) -> None:
        """Raises `UnknownRequest` when the very scheduler that was given the request does not know it any more."""
        if error.details.get("scheduler_boot_id", "") == self._scheduler_boot_id != "":
            raise UnknownRequest(
                f"{self._last_known()}; it ended since then, so long ago that the scheduler has forgotten how",
                details=error.details,
            ) from error

    def _over(self) -> bool:
        """Raises `RequestFailed`, `RequestWithdrawn`."""
        ticket = self._ticket
        match ticket.state:
            case TicketState.FAILED:
                raise RequestFailed(f"request {ticket.request_id}, attempt {ticket.attempt}: {ticket.why}")
            case TicketState.WITHDRAWN:
                raise RequestWithdrawn(f"request {ticket.request_id}, attempt {ticket.attempt}: its client has left it")
            case TicketState.DONE:
                return True
            case TicketState.WAITING | TicketState.ASSIGNED:
                return False

    def _assignment(self) -> Assignment | None:
        is_done, assignment = self._over(), self._ticket.assignment
        if is_done and assignment is None:
            raise UnknownRequest(f"request {self.request_id} is done, and nobody remembers by whom")
        return assignment

    def _last_known(self) -> str:
        ticket = self._ticket
        by = (
            f"by scheduler {self._scheduler_boot_id}" if self._scheduler_boot_id else "and no scheduler has heard of it"
        )
        return f"request {ticket.request_id} was last known to be {ticket.state.name}, attempt {ticket.attempt}, {by}"


class SchedulerCalls:
    """The calls of `AsyncClient` that the scheduler answers."""

    _link: Link
    _desk: Desk

    async def submit(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        *,
        hit_tokens: int = 0,
        tenant: str = "",
        session: str = "",
        cached: Sequence[CachedPrefix] = (),
        wait: bool = False,
        timeout_s: float = SUBMIT_S,
    ) -> Submitted:
        """Asks for engines for a request; returns when a scheduler has taken it. The same id again is the same request.

        `model`: as the scheduler's config names it. `hit_tokens`: leading tokens whose KV is stored. `tenant` and `session` may
        be empty; `cached`: where KV is known to be, at most 16. `timeout_s` bounds this and all waits for the request, which
        is not withdrawn then. Raises `QueueFull` with `retry_after_ms` in its details, unless `wait`: then it is asked again;
        `UnknownModel`, `BadRequest`, `NoScheduler`, and `TimedOut` when no scheduler has answered until then.
        """
        request = wire.submit_message(request_id, model, prompt_tokens, hit_tokens, tenant, session, cached)
        submitted = Submitted(self._desk, request, asyncio.get_running_loop().time() + timeout_s)
        await submitted._begin(wait=wait)
        return submitted

    async def pull_work(self, report: WorkReport, *, timeout_s: float = ANSWER_S) -> Work:
        """One pull of a group's leader, as it is; `Leader` keeps what goes into it.

        Raises `BadReport`, `UnknownModel`, `NoScheduler`, `SchedulerUnreachable`, `DaemonGone`, `TimedOut`.
        """
        link = self._link
        return wire.work_from(await link.ask(link.stub.PullWork, wire.pull_message(report), timeout_s, "pull_work"))

    async def choose_path(
        self, model: str, prefill_node: str, decode_node: str, hit_tokens: int, *, timeout_s: float = ANSWER_S
    ) -> ReadChoice:
        """Who reads, for a router that has chosen both nodes itself; `ReadChoice.shares` makes blocks of it.

        Raises `UnknownModel`, `UnknownPeer` for a node that has never reported, `NoScheduler`, `SchedulerUnreachable`.
        """
        request = wire.choose_path_message(model, prefill_node, decode_node, hit_tokens)
        link = self._link
        return wire.read_from((await link.ask(link.stub.ChoosePath, request, timeout_s, "choose_path")).read)
