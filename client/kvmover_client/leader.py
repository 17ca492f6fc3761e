"""The leader of a group of engines: pulls work for them, and keeps what the scheduler has to be told."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from kvmover_client.errors import BadRequest, KvmoverError
from kvmover_client.scheduler_desk import ANSWER_S, retry_after_s
from kvmover_client.scheduling import (
    Assignment,
    Delivery,
    EngineLoad,
    HeldAssignment,
    Revoked,
    Role,
    Work,
    WorkReport,
)

DONE_MAX = 65_536
"""That one pull may say; others are said by the next."""
HELD_MAX = 65_536
"""What is delivered beyond this is not taken yet, and told again."""
FINISHED_MAX = 65_536
"""Requests of which the last finished attempt is remembered, in case a new scheduler gives it out again."""
TELLS_MAX = 3
"""So often one pull tells what is held: a scheduler that asks for more is asked again later."""
ATTEMPT_STEP = 16
"""From one attempt that is given out to the next: those between are the engine's own, which goes on under them by itself."""
PAUSE_S, PAUSE_MAX_S = 0.02, 0.25
"""After a pull that failed. A scheduler that starts again waits 2 s for what leaders hold, and gives it to others then."""

News = Assignment | Revoked


class Pulls(Protocol):
    """What a leader needs of its client."""

    async def pull_work(self, report: WorkReport, *, timeout_s: float = ANSWER_S) -> Work: ...


class Leader:
    """One for each group of engines that share a role, on one node. Use it from one event loop, one `pull` at a time.

    Each assignment is given to its engine once, however often it is told. A leader that starts again is a new group for the
    scheduler, and what the former one had goes to others. A daemon that starts again is not: after `client.reconnect()` it
    goes on.

    >>> async def lead(leader: Leader) -> None:
    ...     while True:
    ...         for news in await leader.pull([EngineLoad("gpu-0", 0, 0, 1_000_000)]):
    ...             print(news)
    ...         await asyncio.sleep(leader.pull_again_s)
    """

    def __init__(self, client: Pulls, group: str, model: str, role: Role, *, boot_id: str = "") -> None:
        """`group`: unique in the cluster. `boot_id`: of this leader, by default one that nobody else has."""
        self.group = group
        self.model = model
        self.role = role
        self.boot_id = boot_id or secrets.token_hex(16)
        self.pull_again_s = 0.0
        """When the next pull is wanted; after one that failed, when it is worth while."""
        self._client = client
        self._pulling = False
        self._failures = 0
        self._sequence = 0
        self._scheduler_boot_id = ""
        self._epoch = 0
        self._taken = 0
        """Number of the last delivery that `pull` has returned."""
        self._held: dict[str, HeldAssignment] = {}
        self._done: dict[str, int] = {}
        """Attempts that were finished or given back, by request, until an answer says that this was heard."""
        self._failed: set[str] = set()
        """Requests among these that were given back."""
        self._finished: OrderedDict[str, int] = OrderedDict()

    @property
    def held(self) -> tuple[HeldAssignment, ...]:
        """What the group goes on with."""
        return tuple(held for request_id, held in self._held.items() if request_id not in self._done)

    async def pull(self, loads: Sequence[EngineLoad], *, timeout_s: float = ANSWER_S) -> list[News]:
        """Tells how the engines are, and returns what is new for them: begin these, stop those.

        `loads` has every engine of the group, and counts all that earlier pulls have returned; an engine that is missing is
        lost, and what it had goes to others. Raises as `AsyncClient.pull_work`, and `BadRequest` for two pulls at once; nothing
        is lost then, and the next pull, after `pull_again_s`, says it again.
        """
        if self._pulling:
            raise BadRequest(f"group {self.group} is pulled for twice at once")
        self._pulling = True
        try:
            news = await self._pull(loads, asyncio.get_running_loop().time() + timeout_s)
        except KvmoverError as error:
            self.pull_again_s = min(PAUSE_MAX_S, max(PAUSE_S * 2.0 ** min(self._failures, 8), retry_after_s(error)))
            self._failures += 1
            raise
        finally:
            self._pulling = False
        self._failures = 0
        return news

    def prefilled(self, request_id: str, attempt: int) -> bool:
        """Of a prefill group: all layers have been pushed. False: it is not this group's any more, which is no fault.

        `attempt`: that of the assignment, or one of the 15 after it, under which the engine went on by itself.
        """
        self._check_role(Role.PREFILL)
        return self._finish(request_id, attempt)

    def whole(self, request_id: str, attempt: int) -> bool:
        """Of a decode group: the KV is whole, so that the prefill engine is not needed any more. False: as `prefilled`.

        A scheduler that starts again would otherwise have it prefilled anew if the prefill engine is gone by then.
        """
        self._check_role(Role.DECODE)
        if not self._holds(request_id, attempt):
            return False
        self._held[request_id] = dataclasses.replace(self._held[request_id], prefill_done=True)
        return True

    def finished(self, request_id: str, attempt: int) -> bool:
        """Of a decode group: the last token is out, and the request is over. False: as `prefilled`."""
        self._check_role(Role.DECODE)
        return self._finish(request_id, attempt)

    def failed(self, request_id: str, attempt: int) -> bool:
        """The engine can't do it: it goes to others under a higher attempt, a few times. False: as `prefilled`.

        An engine that can go on by itself, under the next attempt and without what is lost, is faster.
        """
        if not self._holds(request_id, attempt):
            return False
        self._done[request_id] = self._held[request_id].assignment.attempt
        self._failed.add(request_id)
        return True

    async def _pull(self, loads: Sequence[EngineLoad], until_s: float) -> list[News]:
        loop = asyncio.get_running_loop()
        telling = False
        for _ in range(1 + TELLS_MAX):
            said = dict(islice(self._done.items(), DONE_MAX))
            report = self._report(loads, said, telling=telling)
            work = await self._client.pull_work(report, timeout_s=max(0.001, until_s - loop.time()))
            if work.scheduler.epoch < self._epoch:
                # It leads no more, and nothing that it says counts.
                break
            self._epoch = work.scheduler.epoch
            self.pull_again_s = work.pull_again_s
            is_new = work.scheduler_boot_id != self._scheduler_boot_id
            if is_new:
                self._scheduler_boot_id, self._taken = work.scheduler_boot_id, 0
            if not work.tell_held and not is_new:
                return self._heard(said, work.deliveries)
            telling = True
        self.pull_again_s = PAUSE_S
        return []

    def _report(self, loads: Sequence[EngineLoad], said: dict[str, int], *, telling: bool) -> WorkReport:
        self._sequence += 1
        return WorkReport(
            group=self.group,
            model=self.model,
            role=self.role,
            boot_id=self.boot_id,
            sequence=self._sequence,
            engines=loads,
            heard=self._taken,
            done=tuple(item for item in said.items() if item[0] not in self._failed),
            failed=tuple(item for item in said.items() if item[0] in self._failed),
            held=tuple(self._held.values()) if telling else (),
            scheduler_boot_id=self._scheduler_boot_id,
        )

    def _heard(self, said: dict[str, int], deliveries: Sequence[Delivery]) -> list[News]:
        """The scheduler has taken the pull. What is new for the engines; nothing is awaited, so that none of it can be lost."""
        for request_id, attempt in said.items():
            if self._done.get(request_id) == attempt:
                del self._done[request_id]
                self._failed.discard(request_id)
            if self._holds(request_id, attempt):
                del self._held[request_id]
        return list(self._news(deliveries))

    def _news(self, deliveries: Sequence[Delivery]) -> Iterator[News]:
        for delivery in deliveries:
            if delivery.number <= self._taken:
                continue
            if isinstance(delivery.what, Revoked):
                yield from self._revoke(delivery.what)
            elif len(self._held) >= HELD_MAX and delivery.what.request_id not in self._held:
                # It is told again, and all after it.
                return
            else:
                yield from self._assign(delivery.what)
            self._taken = delivery.number

    def _assign(self, assignment: Assignment) -> Iterator[News]:
        request_id, attempt = assignment.request_id, assignment.attempt
        held = self._held.get(request_id)
        if held is not None and held.assignment.attempt >= attempt:
            return
        if self.role is Role.DECODE and self._finished.get(request_id, 0) >= attempt:
            # A scheduler that has started again, and does not know that it is over.
            self._done[request_id] = attempt
            return
        if held is not None:
            yield from self._revoke(Revoked(request_id, held.assignment.attempt))
        self._held[request_id] = HeldAssignment(assignment)
        yield assignment

    def _revoke(self, revoked: Revoked) -> Iterator[News]:
        """Of an attempt that the engine has finished it hears nothing."""
        request_id = revoked.request_id
        held = self._held.get(request_id)
        if held is None or held.assignment.attempt > revoked.attempt:
            return
        del self._held[request_id]
        self._failed.discard(request_id)
        if self._done.pop(request_id, 0) < held.assignment.attempt:
            yield Revoked(request_id, held.assignment.attempt)

    def _finish(self, request_id: str, attempt: int) -> bool:
        if not self._holds(request_id, attempt):
            return False
        self._done[request_id] = self._finished[request_id] = self._held[request_id].assignment.attempt
        self._failed.discard(request_id)
        self._finished.move_to_end(request_id)
        if len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        return True

    def _holds(self, request_id: str, attempt: int) -> bool:
        held = self._held.get(request_id)
        return held is not None and 0 <= attempt - held.assignment.attempt < ATTEMPT_STEP

    def _check_role(self, role: Role) -> None:
        """Raises `BadRequest`."""
        if self.role is not role:
            raise BadRequest(f"group {self.group} is of role {self.role.name}, this is for {role.name}")
