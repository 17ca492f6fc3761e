"""A small daemon with a real scheduler in it: the client's words go over a real socket into real books.

What is between the two, a daemon's relay, can fail here as it can there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from client_kit import Context, ScriptedDaemon, ScriptedEngine, Sessions

from kvmover_client import AsyncClient, EngineLoad
from kvmoverd.core.errors import KvmoverError, SchedulerUnreachable
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.state import Model
from kvmoverd.rpc.errors import to_status
from kvmoverd.rpc.scheduler_office import Chance, Office, OfficeSettings
from kvmoverd.rpc.scheduler_service import SchedulerService
from kvmoverd.rpc.scheduler_streams import Streams

MODEL = "m"
SETTLE_S = 0.1
UNREACHABLE = SchedulerUnreachable("no scheduler that leads has answered: as scripted", retry_after_ms=20)


def loads(*engines: str) -> list[EngineLoad]:
    """Idle engines."""
    return [EngineLoad(engine, 0, 0, 1_000_000) for engine in engines]


def office(**limits: int) -> Office:
    """The scheduler's books; each time that it comes to lead it is another boot, b1, b2, ..."""
    numbers = count(0)
    settings = OfficeSettings(
        models=(Model(MODEL, 1_000, 1_000_000, 1_000_000),),
        policy="round-robin",
        limits=Limits(**{"settle_ns": round(SETTLE_S * 1e9), **limits}),
        joint=JointSettings(),
        waits_max=16_384,
        report_interval_s=0.2,
        pull_interval_s=0.02,
        pulls_per_s=1_000_000,
        reports_per_s=1_000_000,
    )
    chance = Chance(time.monotonic_ns, time.time_ns, lambda: f"b{next(numbers)}")
    return Office(settings, chance, lambda: None)


class SchedulingEngine(ScriptedEngine):
    """`refusals`: what the next calls fail with; `cut`: the next answers are lost, though the scheduler has heard the call.

    `before` is awaited before each call is passed on.
    """

    def __init__(self, sessions: Sessions, books: Office) -> None:
        super().__init__(sessions)
        self.office = books
        self.service = SchedulerService(books, Streams(8), dict)
        self.refusals: deque[KvmoverError] = deque()
        self.unreachable = False
        self.cut: deque[str] = deque()
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.calls: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.heard: dict[str, Any] = {}
        """The last request of each call."""

    async def Submit(self, request: Any, context: Context) -> Any:
        return await self._passed_on("Submit", request, context)

    async def GetTicket(self, request: Any, context: Context) -> Any:
        return await self._passed_on("GetTicket", request, context)

    async def Withdraw(self, request: Any, context: Context) -> Any:
        return await self._passed_on("Withdraw", request, context)

    async def Explain(self, request: Any, context: Context) -> Any:
        return await self._passed_on("Explain", request, context)

    async def ChoosePath(self, request: Any, context: Context) -> Any:
        return await self._passed_on("ChoosePath", request, context)

    async def PullWork(self, request: Any, context: Context) -> Any:
        request.node = f"node-of-{request.group}"
        return await self._passed_on("PullWork", request, context)

    async def _passed_on(self, method: str, request: Any, context: Context) -> Any:
        self.calls[method] += 1
        self.heard[method] = request
        self.under_way[method] += 1
        self.most[method] = max(self.most[method], self.under_way[method])
        try:
            if self.before is not None:
                await self.before(method)
            await self._check(request, context)
            if self.unreachable:
                await context.abort_with_status(to_status(UNREACHABLE))
            if self.refusals:
                await context.abort_with_status(to_status(self.refusals.popleft()))
            answer = await getattr(self.service, method)(request, context)
            if self.cut and self.cut[0] == method:
                self.cut.popleft()
                await context.abort_with_status(to_status(UNREACHABLE))
            return answer
        finally:
            self.under_way[method] -= 1


@asynccontextmanager
async def serving(path: Path, **limits: int) -> AsyncIterator[tuple[SchedulingDaemon, AsyncClient]]:
    """A daemon whose scheduler has these limits, and a client of it."""
    daemon = await SchedulingDaemon(path, **limits).start()
    try:
        async with await AsyncClient.connect(daemon.endpoint, name="router") as client:
            yield daemon, client
    finally:
        await daemon.stop()


class SchedulingDaemon(ScriptedDaemon):
    """A daemon whose scheduler leads from the start."""

    engine: SchedulingEngine
    calls_max = 4096

    def __init__(self, path: Path, books: Office | None = None, **limits: int) -> None:
        super().__init__(path)
        if books is None:
            books = office(**limits)
            books.lead(0)
        self.engine = SchedulingEngine(self.sessions, books)
        self._ticking: asyncio.Task[None] | None = None

    @property
    def office(self) -> Office:
        return self.engine.office

    async def start(self) -> SchedulingDaemon:
        await super().start()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await super().stop()

    def restart_scheduler(self, epoch: int = 0) -> None:
        """It knows nothing, and has another boot id. Calls that wait are refused as by one that stops."""
        self.office.step_down("")
        self.office.lead(epoch)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.office.tick()
