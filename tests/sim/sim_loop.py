"""A loop whose time is virtual, and the processes that live on it.

`select` never sleeps: time jumps to the next timer. Each callback belongs to a process, by its context: those of one process
keep their order, those of several may change places, as the seed says. A process can be frozen, as by SIGSTOP: what is its to
do waits, and is done at once when it goes on; or it can be dead: nothing of it is ever done again.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

START_S = 1000.0
STEPS_MAX = 3_000_000
OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("OWNER", default=None)


class Life(enum.Enum):
    RUNNING = 1
    FROZEN = 2
    DEAD = 3
    BURIED = 4
    """Its tasks may end now: nothing that they do reaches anybody."""


class Process:
    """What shares a fate: a daemon, or an engine."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.life = Life.RUNNING
        self.parked: list[asyncio.Handle] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.life.name}>"

    @property
    def is_dead(self) -> bool:
        return self.life in (Life.DEAD, Life.BURIED)

    @property
    def runs(self) -> bool:
        return self.life is Life.RUNNING

    def soon(self, work: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(work, *args, context=self.context)

    def after(self, delay_s: float, work: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, work, *args, context=self.context)

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self.context)

    def freeze(self) -> None:
        if self.life is Life.RUNNING:
            self.life = Life.FROZEN

    def thaw(self) -> None:
        if self.life is Life.FROZEN:
            self.life = Life.RUNNING
            self.loop.unpark(self)

    def kill(self) -> None:
        if self.life is not Life.BURIED:
            self.life = Life.DEAD

    def bury(self) -> None:
        self.life = Life.BURIED
        self.loop.unpark(self)


class _NoWait(selectors.SelectSelector):
    """Nobody waits here: there are no devices, and time is the loop's own."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """What a seed did once, it does again."""

    def __init__(self, seed: int) -> None:
        self.now_s = START_S
        self.random = random.Random(f"loop {seed}")
        self.processes: list[Process] = []
        self.errors: list[str] = []
        self.steps = 0
        super().__init__(_NoWait())
        self.set_exception_handler(self._failed)
        self.set_task_factory(_owned_task)

    def time(self) -> float:
        return self.now_s

    def now_ns(self) -> int:
        """As the clock port has it."""
        return int(self.now_s * 1e9)

    def unpark(self, process: Process) -> None:
        parked, process.parked = process.parked, []
        self._ready: deque[asyncio.Handle]
        self._ready.extend(parked)

    def _run_once(self) -> None:
        self._advance()
        batch = list(self._ready)
        self._ready.clear()
        for handle in self._mixed(batch):
            self._step(handle)

    def _advance(self) -> None:
        """Timers that are due become ready; when nothing else is, time goes on to the next one."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self.now_s or not self._ready):  # type: ignore[attr-defined]
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:  # type: ignore[attr-defined]
                self._timer_cancelled_count -= 1
                continue
            self.now_s = max(self.now_s, timer.when())
            self._ready.append(timer)
        assert self._ready, "nothing will ever happen again"

    def _mixed(self, batch: list[asyncio.Handle]) -> list[asyncio.Handle]:
        """Processes take turns as chance has it."""
        owners = {id(handle._context.get(OWNER)) for handle in batch}  # type: ignore[attr-defined]
        if len(owners) < 2:
            return batch
        ranks = {owner: self.random.random() for owner in sorted(owners, key=self._number)}
        return sorted(batch, key=lambda handle: ranks[id(handle._context.get(OWNER))])  # type: ignore[attr-defined]

    def _number(self, owner: int) -> int:
        return next((number for number, process in enumerate(self.processes) if id(process) == owner), -1)

    def _step(self, handle: asyncio.Handle) -> None:
        self.steps += 1
        assert self.steps < STEPS_MAX, f"{self.steps} steps: something turns on the spot"
        if handle._cancelled:  # type: ignore[attr-defined]
            return
        owner = handle._context.get(OWNER)  # type: ignore[attr-defined]
        if owner is None or owner.life in (Life.RUNNING, Life.BURIED):
            handle._run()  # type: ignore[attr-defined]
        else:
            owner.parked.append(handle)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{self.now_s - START_S:.3f} s: {context.get('message')}: {error!r} {_where(error)}")


def _where(error: BaseException | None) -> str:
    places, trace = [], error.__traceback__ if error is not None else None
    while trace is not None:
        places.append(f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(places)


def _owned_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    owner = context.get(OWNER) if context is not None else OWNER.get()
    if owner is not None:
        owner.tasks.add(task)
        task.add_done_callback(owner.tasks.discard)
    return task
